"""The decoder-only Transformer: GPT-2-like, Llama-like, Mixtral-like or what its config says."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.backend import random
from minigrad.backend.device import is_array
from minigrad.nn.attention import MultiheadAttention
from minigrad.nn.cache import KVCache, LayerCache, check_cache
from minigrad.nn.generate import Generates, prompts_of
from minigrad.nn.layers import MLP, Dropout, Embedding, LayerNorm, Linear, RMSNorm, SwiGLU, check_sizes
from minigrad.nn.module import Module, ModuleList
from minigrad.nn.moe import MoE, balance_loss
from minigrad.nn.summary import Ledger, summarize
from minigrad.ops.elementwise import number, on_device_of
from minigrad.ops.index import check_ids
from minigrad.tape import Tensor, _raw

_CHOICES = {
    "norm": ("layer", "rms", "none"), "mlp": ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "none"),
    "position": ("learned", "sinusoidal", "rope", "alibi", "t5", "none"), "block": ("pre", "post", "parallel"),
    "init": ("gpt2", "xavier", "small", "default"),
}


@dataclass(frozen=True)
class TransformerConfig:
    """What a Transformer is made of; the defaults are GPT-2's choices, `.llama()` and `.mixtral()` give those models'.

    vocab_size V, context (longest T), d_model C, n_layers, n_heads; n_kv_heads (n_heads), d_ff (4 C, or 8/3 C for
    swiglu), d_head (C / n_heads).
    block: "pre" x + f(norm x); "post" norm(x + f(x)) (Vaswani et al., 2017); "parallel" x + attention(norm x) +
        mlp(norm x) with one norm (Wang and Komatsuzaki, 2021).
    norm: "layer", "rms" or "none". mlp: "gelu", "gelu_tanh", "relu", "silu", "swiglu", or "none": attention only.
    position: "learned"; "sinusoidal" (Vaswani et al., 2017); "rope" (Su et al., 2021), with rope_base, rope_fraction,
        rope_interleaved and rope_scaling as in MultiheadAttention; "alibi" (Press et al., 2022); "t5", relative buckets
        (Raffel et al., 2020); "none".
    n_experts: a mixture of so many MLPs in each block, top_k of them for a token; capacity_factor as in nn.MoE;
        balance: what the load-balancing loss weighs in `loss` while training.
    bias in linears and norms; dropout; tied: the head is the embedding, transposed; qk_norm; window; softcap of the
        scores, logit_softcap of the logits (c tanh(logits / c)); sinks; scale_embedding: times sqrt(C).
    init: "gpt2", normal of deviation 0.02, / sqrt(2 n_layers) where a branch joins the residual (Radford et al., 2019);
        "small", deviation sqrt(2 / 5C), and 2 / (n_layers sqrt(C)) there (Nguyen and Salazar, 2019; Black et al.,
        2022); "xavier", sqrt(2 / (d_in + d_out)) (Glorot and Bengio, 2010); "default", each layer's own.
    """

    vocab_size: int
    context: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    d_ff: int | None = None
    norm: str = "layer"
    mlp: str = "gelu_tanh"
    position: str = "learned"
    bias: bool = True
    dropout: float = 0.0
    tied: bool = True
    qk_norm: bool = False
    window: int | None = None
    block: str = "pre"
    d_head: int | None = None
    rope_base: float = 10000.0
    rope_fraction: float = 1.0
    rope_interleaved: bool = False
    rope_scaling: dict | None = None
    n_experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = None
    balance: float = 0.01
    softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    scale_embedding: bool = False
    init: str = "gpt2"

    def __post_init__(self) -> None:
        op = type(self).__name__
        for name in ("vocab_size", "context", "d_model", "n_layers", "n_heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"[{op}] {name} is an integer of at least 1: got {value!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"[{op}] {name} is one of {', '.join(allowed)}: got {getattr(self, name)!r}")
        for name, bound in (("softcap", 0), ("logit_softcap", 0), ("rope_base", 1)):
            value = getattr(self, name)
            if value is not None and not bound < number(op, name, value) < math.inf:
                raise ValueError(f"[{op}] {name} is finite and above {bound}: got {value!r}")
        if not math.isfinite(number(op, "balance", self.balance)):
            raise ValueError(f"[{op}] balance is a finite number: got {self.balance!r}")
        if self.n_experts and self.mlp == "none":
            raise ValueError(f'[{op}] a mixture of experts needs an mlp: got mlp "none", n_experts {self.n_experts}')
        if self.rope_scaling is not None and self.position != "rope":
            raise ValueError(f"[{op}] rope_scaling is for rotary positions: got position {self.position!r}")

    @classmethod
    def llama(cls, **fields: Any) -> TransformerConfig:
        """RMSNorm, rotary positions, SwiGLU, no biases, untied head (Touvron et al., 2023)."""
        return cls(**{"norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "tied": False, **fields})

    @classmethod
    def mixtral(cls, **fields: Any) -> TransformerConfig:
        """Llama's choices with 8 experts, 2 of them for a token (Jiang et al., 2024)."""
        return cls.llama(**{"n_experts": 8, "top_k": 2, **fields})

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON can hold them: TransformerConfig(**fields) makes the same again."""
        return {name: x.item() if isinstance(x, np.generic) else x for name, x in asdict(self).items()}


def make_norm(c: TransformerConfig) -> Module | None:
    return None if c.norm == "none" else RMSNorm(c.d_model) if c.norm == "rms" else LayerNorm(c.d_model, c.bias)


def _make_mlp(c: TransformerConfig) -> Module | None:
    if c.mlp == "none":
        return None
    if c.n_experts:
        return MoE(c.d_model, c.n_experts, c.top_k, c.d_ff, c.mlp, capacity_factor=c.capacity_factor, bias=c.bias,
                   dropout=c.dropout)
    if c.mlp == "swiglu":
        return SwiGLU(c.d_model, c.d_ff, c.bias, c.dropout)
    return MLP(c.d_model, c.d_ff, c.bias, c.mlp, c.dropout)


def apply(module: Module | None, x: Tensor) -> Tensor:
    """module(x), or x where there is none."""
    return x if module is None else module(x)


class TransformerBlock(Module):
    """Attention and MLP around the residual stream, (B, T, C) -> (B, T, C), as config.block says. With `cross`, a
    second attention, from x to a context (B, S, C), stands between them."""

    def __init__(self, config: TransformerConfig, causal: bool = True, cross: bool = False) -> None:
        c = config
        common = dict(n_kv_heads=c.n_kv_heads, qk_norm=c.qk_norm, bias=c.bias, dropout=c.dropout, d_head=c.d_head,
                      softcap=c.softcap, sinks=c.sinks)
        self.norm1 = make_norm(c)
        self.attention = MultiheadAttention(
            c.d_model, c.n_heads, rope=c.rope_base if c.position == "rope" else False, causal=causal, window=c.window,
            rope_fraction=c.rope_fraction, rope_interleaved=c.rope_interleaved, rope_scaling=c.rope_scaling,
            empty_rows="raise" if causal else "zeros", **common)     # padding may see nothing through a window
        self.norm_cross = make_norm(c) if cross else None
        self.cross = MultiheadAttention(c.d_model, c.n_heads, empty_rows="zeros", **common) if cross else None
        self.norm2 = None if c.block == "parallel" or c.mlp == "none" else make_norm(c)
        self.mlp = _make_mlp(c)
        self.dropout, self.order = Dropout(c.dropout), c.block
        if cross and c.block == "parallel":
            raise ValueError("[TransformerBlock] a parallel block has no place for cross-attention")

    def forward(self, x: Tensor, attn_mask: Any = None, cache: LayerCache | None = None, bias: Any = None,
                context: Tensor | None = None, context_mask: Any = None) -> Tensor:
        def attend(y: Tensor) -> Tensor:
            return self.dropout(self.attention(y, attn_mask=attn_mask, cache=cache, bias=bias))

        def cross(y: Tensor) -> Tensor:
            return self.dropout(self.cross(y, context, attn_mask=context_mask, cache=cache))

        if self.order == "parallel":
            y = apply(self.norm1, x)
            return x + attend(y) if self.mlp is None else x + attend(y) + self.mlp(y)
        x = self._branch(x, self.norm1, attend)
        x = x if self.cross is None else self._branch(x, self.norm_cross, cross)
        return x if self.mlp is None else self._branch(x, self.norm2, self.mlp)

    def _branch(self, x: Tensor, norm: Module | None, f: Any) -> Tensor:
        return apply(norm, x + f(x)) if self.order == "post" else x + f(apply(norm, x))


def embed(c: TransformerConfig, embedding: Embedding, position: Embedding | None, ids: Any, cache: KVCache | None = None
          ) -> Tensor:
    """ids (B, T) -> (B, T, C): their rows of the table, and what their positions add."""
    x, t = embedding(ids), np.shape(ids)[1]
    x = x * math.sqrt(c.d_model) if c.scale_embedding else x
    if position is not None:
        return x + (position.weight[:t] if cache is None else position(cache.positions(t)))
    if c.position == "sinusoidal":
        at = F.sinusoidal_positions(np.arange(t) if cache is None else cache.positions(t), c.d_model)
        return x + on_device_of(at.astype(x.dtype), x)
    return x


def read_out(c: TransformerConfig, norm: Module | None, head: Module | None, embedding: Embedding, x: Tensor) -> Tensor:
    """(B, T, C) -> logits (B, T, V): the last norm, and the head or, tied, the embedding transposed."""
    x = apply(norm, x)
    logits = F.linear(x, embedding.weight.T) if head is None else head(x)
    return logits if c.logit_softcap is None else c.logit_softcap * F.tanh(logits / c.logit_softcap)


class PositionBias(Module):
    """What position adds to the scores: (H, T, S) for "alibi" (F.alibi_bias), or for "t5" a learned number for each
    head and bucket of distance (F.relative_buckets)."""

    def __init__(self, c: TransformerConfig, causal: bool = True) -> None:
        self.kind, self.heads, self.causal = c.position, c.n_heads, causal
        self.table = Embedding(32, c.n_heads) if c.position == "t5" else None

    def forward(self, t: int, s: int, query_offset: int = 0, dtype: Any = np.float32) -> Any:
        if self.kind == "alibi":                         # a constant that leaves the scores their dtype
            return F.alibi_bias(self.heads, t, s, query_offset).astype(dtype, copy=False)
        buckets = F.relative_buckets(t, s, bidirectional=not self.causal, query_offset=query_offset)
        return F.transpose(self.table(buckets), (2, 0, 1))


def make_bias(c: TransformerConfig, causal: bool = True) -> PositionBias | None:
    return PositionBias(c, causal) if c.position in ("alibi", "t5") else None


def make_cache(model: Any, batch: int, capacity: int | None, pad: Any) -> KVCache:
    """A KVCache for a model with a config: see Transformer.cache."""
    c = model.config
    if capacity is None and (c.window is None or c.position == "learned"):
        capacity = c.context
    cache = KVCache(c.n_layers, batch, capacity, c.window, pad, owner=model)
    if c.position == "learned" and capacity > c.context:
        raise ValueError(f"[{type(model).__name__}.cache] learned positions end at the context of {c.context}: got "
                         f"capacity {capacity}")
    return cache


def initialize(model: Module, c: TransformerConfig) -> None:
    """Draw the weights by the rule c.init names; biases start at 0 and norms as they are."""
    if c.init == "default":
        return
    for path, p in model.named_parameters():
        if p.ndim == 2:
            joins = path.endswith(("attention.out.weight", "cross.out.weight", "down.weight"))
            if c.init == "gpt2":
                std = 0.02 / math.sqrt(2 * c.n_layers) if joins else 0.02
            elif c.init == "small":
                std = 2 / (c.n_layers * math.sqrt(c.d_model)) if joins else math.sqrt(2 / (5 * c.d_model))
            else:
                std = math.sqrt(2 / sum(p.shape))
            p.copy_((random.normal(p.shape, np.float64) * std).astype(np.float32))
        elif path.endswith("bias"):
            p.copy_(0.0)


class Transformer(Generates):
    """Decoder-only: Transformer(config), or Transformer(vocab_size=65, context=64, d_model=128, n_layers=4, n_heads=4).

    model(ids (B, T)) -> logits (B, T, V); model.loss(ids, targets) -> the mean cross-entropy in nats per token.
    print(model.summary()) shows what it costs; model.generate writes; model.cache(batch) makes a KVCache for it.
    """

    def __init__(self, config: TransformerConfig | None = None, **fields: Any) -> None:
        if (config is None) == (not fields) or not isinstance(config, (TransformerConfig, type(None))):
            raise TypeError("[Transformer] give a TransformerConfig, or its fields by name")
        c = config if config is not None else TransformerConfig(**fields)
        self.config = c
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.position = Embedding(c.context, c.d_model) if c.position == "learned" else None
        self.position_bias = make_bias(c)
        self.dropout = Dropout(c.dropout)
        self.blocks = ModuleList(TransformerBlock(c) for _ in range(c.n_layers))
        self.norm = None if c.block == "post" else make_norm(c)
        self.head = None if c.tied else Linear(c.d_model, c.vocab_size, bias=False)
        initialize(self, c)

    def forward(self, ids: Any, attn_mask: Any = None, cache: KVCache | None = None) -> Tensor:
        c = self.config
        ids = ids if is_array(_raw(ids)) else check_ids("Transformer", ids, c.vocab_size)
        if len(np.shape(ids)) != 2:
            raise ValueError(f"[Transformer] ids are (B, T): got {np.shape(ids)}")
        b, t = np.shape(ids)
        if cache is None and t > c.context:
            raise ValueError(f"[Transformer] {t} tokens do not fit the context of {c.context}")
        if cache is not None:
            check_cache(cache, self, b, t)
        x = self.dropout(embed(c, self.embedding, self.position, ids, cache))
        s, given = t if cache is None else cache.span(t)[1], {}
        if self.position_bias is not None:
            given["bias"] = self.position_bias(t, s, s - t, x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, attn_mask, **given) if cache is None else block(x, attn_mask, cache[i], **given)
        logits = read_out(c, self.norm, self.head, self.embedding, x)
        if cache is not None:
            cache.advance(t)
        return logits

    def loss(self, ids: Any, targets: Any, attn_mask: Any = None) -> Tensor:
        """Mean cross-entropy of the next tokens: ids and targets (B, T); while training, with experts, plus `balance`
        times their load-balancing loss."""
        loss = F.cross_entropy(self(ids, attn_mask), targets)
        if self.config.n_experts and self.config.balance and self.training:
            loss = loss + self.config.balance * balance_loss(self)
        return loss

    def cache(self, batch: int, capacity: int | None = None, pad: Any = None) -> KVCache:
        """A KVCache for `batch` rows; pad (B,): so many slots at the start of each row are padding.

        capacity: the most tokens: by default the context, or without limit where a window forgets and positions have no
        table of their own; learned positions allow no more than the context.
        """
        return make_cache(self, batch, capacity, pad)

    def _decoder(self, ids: Any) -> tuple[Any, list[np.ndarray], tuple]:
        return self, prompts_of(ids, self.config.vocab_size), ()

    def summary(self, batch: int = 1, tokens: int | None = None) -> Ledger:
        """The ledger of parameters, FLOPs, activation and cache bytes by layer; printable. See nn.summarize."""
        t = self.config.context if tokens is None else tokens
        check_sizes("summary", batch, t)
        return summarize(self, np.zeros((batch, t), np.int64), targets=np.zeros((batch, t), np.int64))
