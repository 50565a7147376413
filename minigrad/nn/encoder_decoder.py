"""The encoder-decoder Transformer: reads a source whole, writes a target token by token (Vaswani et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.backend.device import to_host
from minigrad.nn.cache import KVCache, check_cache
from minigrad.nn.generate import Generates, beam_search, prompts_of
from minigrad.nn.layers import Dropout, Embedding, Linear, check_sizes
from minigrad.nn.module import ModuleList
from minigrad.nn.moe import balance_loss
from minigrad.nn.summary import Ledger, summarize
from minigrad.nn.transformer import (
    TransformerBlock,
    TransformerConfig,
    embed,
    initialize,
    make_bias,
    make_cache,
    make_norm,
    read_out,
)
from minigrad.ops.index import check_ids
from minigrad.tape import Tensor, _raw


@dataclass(frozen=True)
class EncoderDecoderConfig(TransformerConfig):
    """A TransformerConfig of the decoder, and of the encoder: source_vocab (None: source and target share a vocabulary
    and a table), n_encoder_layers (n_layers). pad fills rows up, on both sides; begin and end stand around a target."""

    source_vocab: int | None = None
    n_encoder_layers: int | None = None
    pad: int = 0
    begin: int = 1
    end: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source_vocab", "n_encoder_layers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
                raise ValueError(f"[EncoderDecoderConfig] {name} is an integer of at least 1, or None: got {value!r}")
        special = (self.pad, self.begin, self.end)
        integers = all(isinstance(s, (int, np.integer)) and not isinstance(s, bool) for s in special)
        if not integers or len(set(special)) < 3 or not all(0 <= s < self.vocab_size for s in special):
            raise ValueError("[EncoderDecoderConfig] pad, begin and end are different tokens of the vocabulary of "
                             f"{self.vocab_size}: got {special}")
        if self.block == "parallel":
            raise ValueError('[EncoderDecoderConfig] block is "pre" or "post": a parallel one has no cross-attention')


class EncoderDecoder(Generates):
    """EncoderDecoder(config), or EncoderDecoder(vocab_size=..., context=..., d_model=..., n_layers=..., n_heads=...).

    model(source (B, S), target (B, T)) -> logits (B, T, V) of the token after each target token. Rows of both are
    filled up at their end with `pad`, which no token attends to. model.loss(source, target) shifts: the target is
    begin, tokens, end. model.generate(source, n) and model.beam_search(source, n) write targets.
    """

    def __init__(self, config: EncoderDecoderConfig | None = None, **fields: Any) -> None:
        if (config is None) == (not fields) or not isinstance(config, (EncoderDecoderConfig, type(None))):
            raise TypeError("[EncoderDecoder] give an EncoderDecoderConfig, or its fields by name")
        c = config if config is not None else EncoderDecoderConfig(**fields)
        self.config = c
        self.embedding = Embedding(c.vocab_size, c.d_model)
        self.source_embedding = self.embedding if c.source_vocab is None else Embedding(c.source_vocab, c.d_model)
        learned = c.position == "learned"
        self.position, self.source_position = (Embedding(c.context, c.d_model) if learned else None for _ in range(2))
        self.position_bias, self.source_position_bias = make_bias(c), make_bias(c, causal=False)
        self.dropout = Dropout(c.dropout)
        self.encoder = ModuleList(TransformerBlock(c, causal=False) for _ in range(c.n_encoder_layers or c.n_layers))
        self.encoder_norm = None if c.block == "post" else make_norm(c)
        self.blocks = ModuleList(TransformerBlock(c, cross=True) for _ in range(c.n_layers))
        self.norm = None if c.block == "post" else make_norm(c)
        self.head = None if c.tied else Linear(c.d_model, c.vocab_size, bias=False)
        initialize(self, c)

    def encode(self, source: Any) -> tuple[Tensor, np.ndarray]:
        """source (B, S) -> what the decoder attends to: (B, S, C), and which of it is no padding, (B, 1, 1, S)."""
        c = self.config
        source = self._checked("source", source, c.source_vocab or c.vocab_size)
        visible = (source != c.pad)[:, None, None, :]
        if not visible.any(axis=-1).all():
            row = int((~visible.any(axis=-1)).reshape(-1).argmax())
            raise ValueError(f"[EncoderDecoder] a source has at least one token that is no padding: row {row} has none")
        x = self.dropout(embed(c, self.source_embedding, self.source_position, source))
        t = source.shape[1]
        bias = None if self.source_position_bias is None else self.source_position_bias(t, t, 0, x.dtype)
        for block in self.encoder:
            x = block(x, visible, bias=bias)
        return x if self.encoder_norm is None else self.encoder_norm(x), visible

    def decode(self, target: Any, memory: Tensor, visible: Any, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each of target (B, T), given what `encode` made of the source."""
        c = self.config
        target = self._checked("target", target, c.vocab_size, cached=cache is not None)
        b, t = target.shape
        if b != memory.shape[0]:
            raise ValueError(f"[EncoderDecoder] source and target have the same rows: {memory.shape[0]} and {b}")
        if cache is not None:
            check_cache(cache, self, b, t)
        x = self.dropout(embed(c, self.embedding, self.position, target, cache))
        s = t if cache is None else cache.span(t)[1]
        bias = None if self.position_bias is None else self.position_bias(t, s, s - t, x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, None, None if cache is None else cache[i], bias, memory, visible)
        logits = read_out(c, self.norm, self.head, self.embedding, x)
        if cache is not None:
            cache.advance(t)
        return logits

    def forward(self, source: Any, target: Any) -> Tensor:
        return self.decode(target, *self.encode(source))

    def loss(self, source: Any, target: Any) -> Tensor:
        """Mean cross-entropy, in nats, of each token of target (B, T) after its first, padding left out; while
        training, with experts, plus `balance` times their load-balancing loss."""
        c = self.config
        target = self._checked("target", target, c.vocab_size, cached=True)
        loss = F.cross_entropy(self(source, target[:, :-1]), target[:, 1:], ignore_index=c.pad)
        return loss + c.balance * balance_loss(self) if c.n_experts and c.balance and self.training else loss

    def _checked(self, name: str, ids: Any, vocab: int, cached: bool = False) -> np.ndarray:
        ids = check_ids(f"EncoderDecoder {name}", to_host(_raw(ids)) if isinstance(ids, Tensor) else ids, vocab)
        if len(np.shape(ids)) != 2 or not np.shape(ids)[1]:
            raise ValueError(f"[EncoderDecoder] {name} is (B, {name[0].upper()}) tokens, one at least: got "
                             f"{np.shape(ids)}")
        if np.shape(ids)[1] > self.config.context and not cached:
            raise ValueError(f"[EncoderDecoder] {np.shape(ids)[1]} {name} tokens do not fit the context of "
                             f"{self.config.context}")
        return ids

    def cache(self, batch: int, capacity: int | None = None, pad: Any = None) -> KVCache:
        """A KVCache for `decode`, of `batch` rows: see Transformer.cache."""
        return make_cache(self, batch, capacity, pad)

    def _decoder(self, source: Any) -> tuple[Any, list[np.ndarray], tuple]:
        rows = prompts_of(source, self.config.source_vocab or self.config.vocab_size)
        filled = np.full((len(rows), max(map(len, rows))), self.config.pad)
        for i, row in enumerate(rows):
            filled[i, :len(row)] = row
        return _Conditioned(self, filled), [np.array([self.config.begin])] * len(rows), (self.config.end,)

    def beam_search(self, source: Any, n: int, beams: int = 4, length_penalty: float = 0.6) -> list:
        """The `beams` best targets of each source found, best first: a list for each row of (tokens after begin,
        score). See nn.beam_search."""
        with self.evaluating():
            decoder, prompts, _ = self._decoder(source)
            found = beam_search(decoder, prompts, n, beams, self.config.end, length_penalty)
        return found

    def summary(self, batch: int = 1, tokens: int | None = None) -> Ledger:
        """The ledger of parameters, FLOPs, activation and cache bytes by layer, for source and target of `tokens` each;
        printable. See nn.summarize."""
        t = self.config.context if tokens is None else tokens
        check_sizes("summary", batch, t)
        source, target = (np.full((batch, n), self.config.end, np.int64) for n in (t, t + 1))    # the last is no input
        ledger = summarize(self, source, targets=target)
        for path, row in ledger.rows.items():            # the source is read whole, and no key of it waits for a query
            row["cache"] = 0.0 if path.startswith("encoder.") else row["cache"]
        return ledger


class _Conditioned:
    """A decoder with its sources read: what generation calls."""

    def __init__(self, model: EncoderDecoder, source: np.ndarray) -> None:
        self.model, (self.memory, self.visible) = model, model.encode(source)

    def __call__(self, ids: np.ndarray, cache: KVCache) -> Tensor:
        if cache.batch != self.memory.shape[0]:          # from now on beams: each source's rows stand side by side
            every = np.repeat(np.arange(self.memory.shape[0]), cache.batch // self.memory.shape[0])
            self.memory, self.visible = self.memory[every], self.visible[every]
        return self.model.decode(ids, self.memory, self.visible, cache)

    def cache(self, batch: int, pad: Any = None) -> KVCache:
        return self.model.cache(batch, pad=pad)
