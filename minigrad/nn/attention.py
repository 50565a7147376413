"""Multi-head attention as a layer (A.10.10, A.10 section 5)."""

from __future__ import annotations

from typing import Any

import minigrad.functional as F
from minigrad.nn.layers import Dropout, Linear, RMSNorm, check_sizes
from minigrad.nn.module import Module
from minigrad.tape import Tensor


class MultiheadAttention(Module):
    """Attention of n_heads query heads over n_kv_heads key/value heads (A.10.5), D = d_model // n_heads.

    forward(x (B, T, C), context=None (B, S, C), attn_mask=None) -> (B, T, C). Queries come from x, keys and values from
    context (cross-attention) or x. attn_mask: bool, **True = may be seen**, or float, added; broadcastable to
    (B, n_heads, T, S). rope: rotary positions with base 10000, or the base given. qk_norm: RMSNorm of every head's q
    and k. window: only the last `window` keys. One product makes q, k and v: heads are views of its columns.
    """

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, rope: bool | float = False,
                 qk_norm: bool = False, bias: bool = True, causal: bool = False, window: int | None = None,
                 dropout: float = 0.0, implementation: str = "auto") -> None:
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_sizes("MultiheadAttention", d_model, n_heads, n_kv_heads)
        if min(d_model, n_heads, n_kv_heads) < 1 or d_model % n_heads or n_heads % n_kv_heads:
            raise ValueError(f"[MultiheadAttention] heads divide the width and kv heads the heads: d_model {d_model}, "
                             f"n_heads {n_heads}, n_kv_heads {n_kv_heads}")
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_model // n_heads
        if rope and self.d_head % 2:
            raise ValueError(f"[MultiheadAttention] rotary positions turn pairs: the head width {self.d_head} is odd")
        self.rope_base = 10000.0 if rope is True else float(rope)
        self.causal, self.window, self.implementation = causal, window, implementation
        self.qkv = Linear(d_model, (n_heads + 2 * n_kv_heads) * self.d_head, bias)
        self.out = Linear(d_model, d_model, bias)
        self.q_norm, self.k_norm = (RMSNorm(self.d_head), RMSNorm(self.d_head)) if qk_norm else (None, None)
        self.dropout = Dropout(dropout)                  # on the weights; the residual's is the block's business

    def _heads(self, x: Tensor, n: int) -> Tensor:
        return x.reshape(*x.shape[:-1], n, self.d_head).swapaxes(-2, -3)

    def forward(self, x: Tensor, context: Tensor | None = None, attn_mask: Any = None) -> Tensor:
        cut, end = self.n_heads * self.d_head, (self.n_heads + 2 * self.n_kv_heads) * self.d_head
        shared = self.n_kv_heads * self.d_head
        if context is None:
            packed = self.qkv(x)
            q, k, v = packed[..., :cut], packed[..., cut:cut + shared], packed[..., cut + shared:]
        else:                                            # the same weights, each part from its own input (A.10.11)
            w, b = self.qkv.weight, self.qkv.bias
            q = F.linear(x, w[:, :cut], None if b is None else b[:cut])
            packed = F.linear(context, w[:, cut:end], None if b is None else b[cut:end])
            k, v = packed[..., :shared], packed[..., shared:]
        q, k, v = self._heads(q, self.n_heads), self._heads(k, self.n_kv_heads), self._heads(v, self.n_kv_heads)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base:
            q, k = self._rotate(q), self._rotate(k)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask, self.dropout.p if self.training else 0.0, is_causal=self.causal, window=self.window,
            enable_gqa=self.n_kv_heads != self.n_heads, implementation=self.implementation)
        return self.out(y.swapaxes(-2, -3).reshape(*x.shape[:-1], cut))

    def _rotate(self, x: Tensor) -> Tensor:
        return F.rotary_embedding(x, *F.rotary_tables(range(x.shape[-2]), self.d_head, self.rope_base))
