"""The decoder-only Transformer: GPT-2-like or Llama-like by its config."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.backend import random
from minigrad.backend.device import to_host
from minigrad.nn.attention import MultiheadAttention
from minigrad.nn.layers import MLP, Dropout, Embedding, LayerNorm, Linear, RMSNorm, SwiGLU
from minigrad.nn.module import Module, ModuleList
from minigrad.ops.index import check_ids
from minigrad.tape import Tensor, _raw


@dataclass(frozen=True)
class TransformerConfig:
    """What a Transformer is made of; the defaults are GPT-2's choices, `TransformerConfig.llama` gives Llama's.

    vocab_size V, context (longest T), d_model C, n_layers, n_heads; n_kv_heads (n_heads), d_ff (4 C, or 8/3 C for
    swiglu); norm "layer" or "rms"; mlp "gelu", "gelu_tanh", "relu", "silu" or "swiglu"; position "learned", "rope" or
    "none"; bias in linears and norms; dropout; tied: the head is the embedding, transposed; qk_norm; window.
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "d_model", "n_layers", "n_heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"[TransformerConfig] {name} is an integer of at least 1: got {value!r}")
        for name, allowed in (("norm", ("layer", "rms", "none")), ("position", ("learned", "rope", "none")),
                              ("mlp", ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "none"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"[TransformerConfig] {name} is one of {', '.join(allowed)}: "
                                 f"got {getattr(self, name)!r}")

    @classmethod
    def llama(cls, **sizes: Any) -> TransformerConfig:
        """RMSNorm, rotary positions, SwiGLU, no biases, untied head."""
        return cls(**{"norm": "rms", "position": "rope", "mlp": "swiglu", "bias": False, "tied": False, **sizes})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _norm(c: TransformerConfig) -> Module | None:
    return {"rms": lambda: RMSNorm(c.d_model), "layer": lambda: LayerNorm(c.d_model, c.bias), "none": lambda: None}[c.norm]()


def _apply(module: Module | None, x: Tensor) -> Tensor:
    return x if module is None else module(x)


class TransformerBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-norm. (B, T, C) -> (B, T, C)."""

    def __init__(self, config: TransformerConfig) -> None:
        c = config
        self.norm1, self.norm2 = _norm(c), _norm(c)
        self.attention = MultiheadAttention(
            c.d_model, c.n_heads, c.n_kv_heads, rope=c.position == "rope", qk_norm=c.qk_norm, bias=c.bias, causal=True,
            window=c.window, dropout=c.dropout)
        self.mlp = None if c.mlp == "none" else (SwiGLU(c.d_model, c.d_ff, c.bias, c.dropout) if c.mlp == "swiglu"
                    else MLP(c.d_model, c.d_ff, c.bias, c.mlp, c.dropout))
        self.dropout = Dropout(c.dropout)

    def forward(self, x: Tensor, attn_mask: Any = None) -> Tensor:
        x = x + self.dropout(self.attention(_apply(self.norm1, x), attn_mask=attn_mask))
        return x if self.mlp is None else x + self.mlp(_apply(self.norm2, x))


class Transformer(Module):
    """Decoder-only: Transformer(config), or Transformer(vocab_size=65, context=64, d_model=128, n_layers=4, n_heads=4).

    model(ids (B, T)) -> logits (B, T, V); model.loss(ids, targets) -> the mean cross-entropy in nats per token.
    Starts by GPT-2's rule: normal with deviation 0.02, 0.02/sqrt(2 n_layers) where a branch joins the residual (Radford
    et al., 2019), biases 0.
    """

    def __init__(self, config: TransformerConfig | None = None, **fields: Any) -> None:
        if (config is None) == (not fields):
            raise TypeError("[Transformer] give a TransformerConfig, or its fields by name")
        c = config if config is not None else TransformerConfig(**fields)
        self.config = c
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.position = Embedding(c.context, c.d_model) if c.position == "learned" else None
        self.dropout = Dropout(c.dropout)
        self.blocks = ModuleList(TransformerBlock(c) for _ in range(c.n_layers))
        self.norm = _norm(c)
        self.head = None if c.tied else Linear(c.d_model, c.vocab_size, bias=False)
        for path, p in self.named_parameters():
            if p.ndim == 2:
                joins = path.endswith(("attention.out.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * c.n_layers) if joins else 0.02
                p.copy_((random.normal(p.shape, np.float64) * std).astype(np.float32))
            elif path.endswith("bias"):
                p.copy_(0.0)

    def forward(self, ids: Any, attn_mask: Any = None) -> Tensor:
        if len(np.shape(ids)) != 2:
            raise ValueError(f"[Transformer] ids are (B, T): got {np.shape(ids)}")
        t = np.shape(ids)[1]
        if t > self.config.context:
            raise ValueError(f"[Transformer] {t} tokens do not fit the context of {self.config.context}")
        x = self.embedding(ids)
        if self.position is not None:
            x = x + self.position.weight[:t]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, attn_mask)
        x = _apply(self.norm, x)
        return F.linear(x, self.embedding.weight.T) if self.head is None else self.head(x)

    def loss(self, ids: Any, targets: Any, attn_mask: Any = None) -> Tensor:
        """Mean cross-entropy of the next tokens: ids and targets (B, T)."""
        return F.cross_entropy(self(ids, attn_mask), targets)

    def generate(self, ids: Any, n: int, temperature: float = 1.0, top_k: int | None = None) -> np.ndarray:
        """`n` further tokens after ids (B, T), one after another: (B, T + n) int64. Each is drawn from
        softmax(logits / temperature) of the last `context` tokens, from its top_k likeliest if given; temperature 0
        takes the likeliest. Randomness is mg.manual_seed's."""
        if not temperature >= 0 or (top_k is not None and top_k < 1) or n < 0:
            raise ValueError("[generate] temperature is at least 0, top_k at least 1 and n at least 0: "
                             f"got {temperature}, {top_k}, {n}")
        ids = np.asarray(to_host(_raw(ids)))
        if ids.ndim != 2 or not ids.shape[1]:
            raise ValueError(f"[generate] a prompt of at least one token is needed, ids (B, T): got {ids.shape}")
        ids = check_ids("generate", ids, self.config.vocab_size).astype(np.int64)
        with self.evaluating():
            for _ in range(n):
                logits = to_host(self(ids[:, -self.config.context:])._data)[:, -1].astype(np.float64)
                ids = np.concatenate([ids, _pick(logits, temperature, top_k)], axis=1)
        return ids


def _pick(logits: np.ndarray, temperature: float, top_k: int | None) -> np.ndarray:
    """One token of each row by the Gumbel trick: argmax of logits / temperature - log(-log u) draws from softmax."""
    if temperature == 0:
        return logits.argmax(axis=-1)[:, None]
    if top_k is not None and top_k < logits.shape[-1]:
        least = np.partition(logits, -top_k, axis=-1)[:, -top_k, None]
        logits = np.where(logits < least, -np.inf, logits)
    u = np.maximum(random.uniform(logits.shape, np.float64), 1e-300)
    return (logits / temperature - np.log(-np.log(u))).argmax(axis=-1)[:, None]
