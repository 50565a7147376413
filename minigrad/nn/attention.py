"""Multi-head attention as a layer (A.10.10, A.10 section 5)."""

from __future__ import annotations

from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.nn.cache import LayerCache
from minigrad.nn.layers import Dropout, Linear, RMSNorm, check_sizes
from minigrad.nn.module import Module, Parameter
from minigrad.ops.elementwise import array, number, on_device_of
from minigrad.ops.softmax import check_empty_choice
from minigrad.tape import Tensor, describe


class MultiheadAttention(Module):
    """Attention of n_heads query heads over n_kv_heads key/value heads (A.10.5) of width D = d_head (C / n_heads).

    forward(x (B, T, C), context=None (B, S, C), attn_mask=None, cache=None, bias=None) -> (B, T, C). Queries come from
    x, keys and values from context (cross-attention) or x. attn_mask: bool, **True = may be seen**, or float, added;
    broadcastable to (B, n_heads, T, S). bias: likewise added, and finite: it hides nothing. One product makes q, k and
    v: heads are views of its columns.

    rope: rotary positions with base 10000, or the base given; rope_fraction: of the head width, the part that turns;
        rope_interleaved: pairs (2i, 2i + 1) instead of halves; rope_scaling: as F.rotary_tables takes it.
    qk_norm: RMSNorm of every head's q and k. sinks: a learned score per head. causal, window, softcap, empty_rows: as
        in F.scaled_dot_product_attention.
    cache: a layer of a KVCache, `cache[i]`: keys and values of x join those held; of a context they are kept.
    """

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int | None = None, rope: bool | float = False,
                 qk_norm: bool = False, bias: bool = True, causal: bool = False, window: int | None = None,
                 dropout: float = 0.0, implementation: str = "auto", *, d_head: int | None = None,
                 rope_fraction: float = 1.0, rope_interleaved: bool = False, rope_scaling: dict | None = None,
                 softcap: float | None = None, sinks: bool = False,
                 empty_rows: str = "raise") -> None:
        op = "MultiheadAttention"
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_sizes(op, d_model, n_heads, n_kv_heads, 1 if d_head is None else d_head, 1 if window is None else window)
        for name, value in (("d_head", d_head), ("window", window)):
            if value is not None and value < 1:
                raise ValueError(f"[{op}] {name} is an integer of at least 1, or None: got {value!r}")
        if min(d_model, n_heads, n_kv_heads) < 1 or (d_head is None and d_model % n_heads) or n_heads % n_kv_heads:
            raise ValueError(f"[{op}] heads divide the width and kv heads the heads: d_model {d_model}, "
                             f"n_heads {n_heads}, n_kv_heads {n_kv_heads}")
        self.n_heads, self.n_kv_heads, self.d_head = n_heads, n_kv_heads, d_head or d_model // n_heads
        check_empty_choice(op, empty_rows)
        if not 0.0 < number(op, "rope_fraction", rope_fraction) <= 1.0:
            raise ValueError(f"[{op}] rope_fraction is above 0 and at most 1: got {rope_fraction}")
        self.rope_width = int(self.d_head * rope_fraction) if rope else 0
        if rope and (self.rope_width % 2 or not self.rope_width):
            raise ValueError(f"[{op}] rotary positions turn pairs: {self.rope_width} of the head width {self.d_head} "
                             "is odd or none")
        self.rope_base = 10000.0 if rope is True else number(op, "rope", rope)
        self.rope_interleaved, self.rope_scaling = rope_interleaved, rope_scaling
        self.causal, self.window, self.softcap = causal, window, softcap
        self.empty_rows, self.implementation = empty_rows, implementation
        self.qkv = Linear(d_model, (n_heads + 2 * n_kv_heads) * self.d_head, bias)
        self.out = Linear(n_heads * self.d_head, d_model, bias)
        self.q_norm, self.k_norm = (RMSNorm(self.d_head), RMSNorm(self.d_head)) if qk_norm else (None, None)
        self.sinks = Parameter(np.zeros(n_heads, np.float32)) if sinks else None
        self.dropout = Dropout(dropout)                  # on the weights; the residual's is the block's business
        if rope:
            self._tables(np.zeros(1))                    # a scaling that is no scaling is refused here

    def forward(self, x: Tensor, context: Tensor | None = None, attn_mask: Any = None,
                cache: LayerCache | None = None, bias: Any = None) -> Tensor:
        x = array("MultiheadAttention", "x", x)
        if x.ndim < 2:
            raise ValueError(f"[MultiheadAttention] x is (B, T, C): got {describe(x)}")
        cut, shared, t = self.n_heads * self.d_head, self.n_kv_heads * self.d_head, x.shape[-2]
        positions = np.arange(t) if cache is None else cache.cache.positions(t)
        offset, padded = None, False
        if cache is not None and self.rope_width and "dynamic" in (self.rope_scaling or {}).values() and (
                cache.cache.length or cache.cache.pad is not None):
            raise ValueError('[MultiheadAttention] "dynamic" scaling turns all keys anew as a text grows: none can be '
                             "cached, and rows of different lengths share no batch; pass use_cache=False")
        if context is None:
            packed = self.qkv(x)
            q, k, v = packed[..., :cut], packed[..., cut:cut + shared], packed[..., cut + shared:]
            q = self._turned(self.q_norm, self._heads(q, self.n_heads), positions)
            k = self._turned(self.k_norm, self._heads(k, self.n_kv_heads), positions)
            v = self._heads(v, self.n_kv_heads)
            if cache is not None:
                attn_mask = both_masks(attn_mask, cache.cache.visible(t))
                k, v = cache.append(k, v)
                offset = k.shape[-2] - t                 # the new queries are the last
                padded = cache.cache.pad is not None
        else:
            q = self._turned(self.q_norm, self._heads(self._part(x, 0, cut), self.n_heads), positions)
            k, v = self._of(context) if cache is None else cache.context(lambda: self._of(context))
        # Padding sees nothing, and gets zeros; where no mask hides anything no row is empty, and none is looked for.
        empty_rows = "zeros" if padded or (attn_mask is None and context is None) else self.empty_rows
        y = F.scaled_dot_product_attention(
            q, k, v, both_masks(attn_mask, bias), self.dropout.p if self.training else 0.0, is_causal=self.causal,
            window=self.window, query_offset=offset, softcap=self.softcap, sinks=self.sinks,
            enable_gqa=self.n_kv_heads != self.n_heads, implementation=self.implementation, empty_rows=empty_rows)
        return self.out(y.swapaxes(-2, -3).reshape(*x.shape[:-1], cut))

    def _of(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a context: the same weights, each part from its own input (A.10.11)."""
        cut, shared = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        packed = self._part(context, cut, cut + 2 * shared)
        k, v = self._heads(packed[..., :shared], self.n_kv_heads), self._heads(packed[..., shared:], self.n_kv_heads)
        return self._turned(self.k_norm, k, np.arange(k.shape[-2])), v

    def _part(self, x: Tensor, start: int, end: int) -> Tensor:
        """x times some columns of the packed weight."""
        w, b = self.qkv.weight, self.qkv.bias
        return F.linear(x, w[:, start:end], None if b is None else b[start:end])

    def _heads(self, x: Tensor, n: int) -> Tensor:
        return x.reshape(*x.shape[:-1], n, self.d_head).swapaxes(-2, -3)

    def _turned(self, norm: RMSNorm | None, x: Tensor, positions: np.ndarray) -> Tensor:
        """Queries or keys (B, H, T, D), normalised and turned to positions (T,) or (B, T), if the layer does so."""
        x = x if norm is None else norm(x)
        return F.rotary_embedding(x, *self._tables(positions), self.rope_interleaved) if self.rope_width else x

    def _tables(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin (T, R/2), or (B, 1, T, R/2): alike for all heads."""
        cos, sin = F.rotary_tables(positions, self.rope_width, self.rope_base, self.rope_scaling)
        return (cos, sin) if positions.ndim == 1 else (cos[:, None], sin[:, None])


def both_masks(a: Any, b: Any) -> Any:
    """One mask that says what two say: boolean visible sets meet, a float mask is added, or hidden by a boolean one."""
    if a is None or b is None:
        return b if a is None else a
    a, b = (m if isinstance(m, Tensor) else np.asarray(m) for m in (a, b))
    for mask in (a, b):                                  # 1 and 0 would be added to the scores
        if mask.dtype.kind not in "bf":
            raise TypeError("[MultiheadAttention] a mask is boolean, True = may be seen, or floating, added to the "
                            f"scores: got {describe(mask)}; write mask != 0")
    try:
        np.broadcast_shapes(a.shape, b.shape)
    except ValueError:
        raise ValueError(f"[MultiheadAttention] masks and biases broadcast to the scores: {a.shape} meets "
                         f"{b.shape}") from None
    a, b = on_device_of(a, b), on_device_of(b, a)
    if a.dtype == bool and b.dtype == bool:
        return a & b
    if bool in (a.dtype, b.dtype):
        return F.where(a, b, -np.inf) if a.dtype == bool else F.where(b, a, -np.inf)
    return a + b
