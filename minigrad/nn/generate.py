"""Writing with a model, token by token: the choices of what comes next, a key/value cache, stops, streaming, beams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigrad.backend import random
from minigrad.backend.device import is_array, to_host
from minigrad.nn.module import Module
from minigrad.ops.elementwise import number
from minigrad.ops.index import check_ids
from minigrad.tape import _raw


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen from the logits. In this order:

    repetition_penalty r: logits of tokens already in the row are divided by r where positive, else multiplied by it
        (Keskar et al., 2019). temperature: logits / temperature; 0 takes the likeliest. top_k: only the k likeliest.
    top_p: only the likeliest whose probabilities first sum to p (Holtzman et al., 2020). min_p: only those at least
        min_p times as probable as the likeliest (Nguyen et al., 2024). The draw is from what remains.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None or name in ("temperature", "repetition_penalty"):
                object.__setattr__(self, name, number("generate", name, value))
        bad = [text for ok, text in (
            (0 <= self.temperature < math.inf, f"temperature is at least 0: got {self.temperature}"),
            (self.top_k is None or (isinstance(self.top_k, (int, np.integer)) and not isinstance(
                self.top_k, bool) and self.top_k >= 1),
             f"top_k is an integer of at least 1: got {self.top_k}"),
            (self.top_p is None or 0 < self.top_p <= 1, f"top_p is above 0 and at most 1: got {self.top_p}"),
            (self.min_p is None or 0 <= self.min_p <= 1, f"min_p is in 0 to 1: got {self.min_p}"),
            (0 < self.repetition_penalty < math.inf, f"repetition_penalty is above 0: got {self.repetition_penalty}"),
        ) if not ok]
        if bad:
            raise ValueError(f"[generate] {'; '.join(bad)}")

    def __call__(self, logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """One token for each row: logits (B, V) float64, seen (B, V) bool -> (B,)."""
        check_logits("generate", logits)
        if self.repetition_penalty != 1.0:
            r = self.repetition_penalty
            with np.errstate(over="ignore"):             # the largest finite number stands for what is beyond
                penalized = np.where(logits > 0, np.minimum(logits / r, np.finfo(logits.dtype).max), logits * r)
            logits = np.where(seen, penalized, logits)
        if self.temperature == 0:
            return logits.argmax(axis=-1)
        with np.errstate(over="ignore"):                 # the largest is 0, and what is too far below is never drawn
            logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = np.partition(logits, -self.top_k, axis=-1)[:, -self.top_k, None]
            logits = np.where(logits < least, -np.inf, logits)
        if self.top_p is not None:
            order = np.argsort(-logits, axis=-1, kind="stable")
            p = np.exp(np.take_along_axis(logits, order, -1))
            p /= p.sum(axis=-1, keepdims=True)
            enough = np.cumsum(p, axis=-1) - p >= self.top_p                         # reached before this one
            np.put_along_axis(enough, order, enough.copy(), -1)
            logits = np.where(enough, -np.inf, logits)
        if self.min_p:
            logits = np.where(logits < math.log(self.min_p), -np.inf, logits)        # the largest is 0
        u = np.maximum(random.uniform(logits.shape, np.float64), 1e-300)
        return (logits - np.log(-np.log(u))).argmax(axis=-1)     # Gumbel: argmax of logits + noise draws from softmax


def check_logits(op: str, logits: np.ndarray) -> None:
    """Raise unless every row (V,) has a softmax: no NaN, and a finite largest."""
    nan, top = np.isnan(logits).any(axis=-1), logits.max(axis=-1)
    if nan.any():
        raise ValueError(f"[{op}] the logits of row {int(nan.argmax())} hold a NaN: the model's weights are spoilt")
    if np.isinf(top).any():
        row = int(np.isinf(top).argmax())
        raise ValueError(f"[{op}] the largest logit of a row is finite: row {row} has {top[row]}")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while generating; `ids` is what was written until then, as `generate` would have given it."""

    def __init__(self, ids: Any) -> None:
        super().__init__("interrupted; .ids holds what was written")
        self.ids = ids


class Stops:
    """Where a row ends: at a token, or when the text written ends a string. `tokenizer` has encode and decode."""

    def __init__(self, stop: Any, tokenizer: Any, vocab: int, always: tuple = ()) -> None:
        many = isinstance(stop, (list, tuple, set, frozenset, range)) or (is_array(_raw(stop)) and np.ndim(_raw(stop)))
        stop = list(to_host(_raw(stop)) if is_array(_raw(stop)) else stop) if many else [stop]
        self.texts = [s for s in stop if isinstance(s, str)]
        ids = [s for s in stop if not isinstance(s, str)]
        for s in ids:
            if isinstance(s, bool) or not isinstance(s, (int, np.integer)) or not 0 <= s < vocab:
                raise ValueError(f"[generate] a stop is a token, 0 to {vocab - 1}, or a string: got {s!r}")
        if self.texts and tokenizer is None:
            raise ValueError("[generate] stop strings are found in the text: pass tokenizer=, with encode and decode")
        if self.texts and not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
            raise TypeError(f"[generate] a tokenizer has encode and decode: got {type(tokenizer).__name__}")
        for text in self.texts:
            if not text:
                raise ValueError("[generate] a stop string has at least one character: got ''")
            try:
                tokenizer.encode(text)
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"[generate] the tokenizer cannot write the stop string {text!r}: {error}") from None
        self.tokens, self.tokenizer = np.array([*ids, *always], np.int64), tokenizer
        # every token but a special one adds a byte at least, so the last so many hold the longest string
        self.tail = max((len(text.encode("utf-8", "surrogatepass")) for text in self.texts), default=0)

    def __bool__(self) -> bool:
        return bool(self.texts or len(self.tokens))

    def ended(self, written: np.ndarray) -> np.ndarray:
        """Which rows of written (B, n), the tokens after the prompts, have just ended."""
        ended = np.isin(written[:, -1], self.tokens)
        if self.texts:
            for i, row in enumerate(written):
                # a string that began before these tokens was found when it ended, so it must end in the last token
                for text in self.texts if not ended[i] else ():
                    tail = row[-self.tail - 8:]
                    ended[i] |= self.tokenizer.decode(tail).count(text) > self.tokenizer.decode(tail[:-1]).count(text)
        return ended


def prompts_of(ids: Any, vocab: int) -> list[np.ndarray]:
    """The prompts, each (T,) int64 of at least one token: from an array (B, T), or a list of rows of any lengths."""
    ids = _raw(ids)
    rows = list(ids) if isinstance(ids, (list, tuple)) else np.atleast_1d(to_host(check_ids("generate", ids, vocab)))
    given, rows = len(rows), [to_host(check_ids("generate", row, vocab)).astype(np.int64) for row in rows]
    if not rows or len(rows) < given or any(row.ndim != 1 or not len(row) for row in rows):
        raise ValueError(f"[generate] a prompt of at least one token is needed, ids (B, T) or a list of rows: got "
                         f"{[np.shape(row) for row in ids] if isinstance(ids, (list, tuple)) else np.shape(ids)}")
    return rows


def _tokens(decoder: Any, prompts: list[np.ndarray], n: int, sampler: Sampler, stops: Stops, vocab: int,
            use_cache: bool) -> Iterator[np.ndarray]:
    """The tokens (B,) after the prompts, step by step; -1 where a row has ended. Prompts of different lengths are
    padded at their beginning, so that all end in the same slot."""
    t, lengths = max(map(len, prompts)), np.array([len(p) for p in prompts])
    ids, pad = np.zeros((len(prompts), t + n), np.int64), t - lengths
    seen = np.zeros((len(prompts), vocab), bool)
    for i, prompt in enumerate(prompts):
        ids[i, t - len(prompt):t] = prompt
        seen[i, prompt] = True
    cache = decoder.cache(len(prompts), pad=pad)
    if cache.capacity is not None and t > cache.capacity:
        raise ValueError(f"[generate] the prompt of row {int(lengths.argmax())} has {t} tokens and the context holds "
                         f"{cache.capacity}: give its last {cache.capacity}")
    done = np.zeros(len(prompts), bool)
    for end in range(t, t + n):
        start = cache.length
        if not use_cache or (cache.capacity is not None and end > cache.capacity):
            # past the context the last tokens of it are read anew, at positions from 0 on
            start = 0 if cache.capacity is None else max(0, end - cache.capacity)
            cache = decoder.cache(len(prompts), pad=np.maximum(pad - start, 0))
        logits = to_host(decoder(ids[:, start:end], cache=cache)._data)[:, -1].astype(np.float64)
        new = sampler(logits, seen)
        seen[np.arange(len(new)), new] = True
        ids[:, end] = new
        yield np.where(done, -1, new)
        if stops:
            done |= stops.ended(ids[:, t:end + 1])
            if done.all():
                return


class Generates(Module):
    """What a model that writes can do. The model has `config`, and `_decoder(ids)` gives what generation needs: a
    function of (ids, cache) with a method `cache`, the prompts, and the tokens that end a row."""

    _decoder: Any

    def generate(self, ids: Any, n: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
                 min_p: float | None = None, repetition_penalty: float = 1.0, stop: Any = (), tokenizer: Any = None,
                 use_cache: bool = True) -> Any:
        """Write up to n tokens after each prompt.

        ids: (B, T) integers, or a list of rows of different lengths (for an encoder-decoder: the sources, and what is
        written stands alone). The choices of the next token are Sampler's; randomness is mg.manual_seed's.
        stop: tokens and strings that end a row, which keeps them; strings need a `tokenizer` with encode and decode.

        Gives (B, T + n) int64; of prompts in a list, or with a stop, a list of rows. Keys and values are cached, with
        the same result as without (use_cache=False). Past the context, a model without a window reads the last
        `context` tokens anew for each token. Ctrl-C raises Interrupted (a KeyboardInterrupt), whose `ids` is what was
        written.
        """
        sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
        with self.evaluating():
            decoder, prompts, stops, steps = self._start(ids, n, sampler, stop, tokenizer, use_cache)
            columns: list[np.ndarray] = []

            def written() -> Any:
                after = np.stack(columns, axis=1) if columns else np.zeros((len(prompts), 0), np.int64)
                rows = [np.concatenate([prompt, row[row >= 0]]) for prompt, row in zip(prompts, after)]
                return rows if stops or isinstance(ids, (list, tuple)) else np.stack(rows)

            try:
                for tokens in steps:
                    columns.append(tokens)
            except KeyboardInterrupt:
                raise Interrupted(written()) from None
            return written()

    def stream(self, ids: Any, n: int, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
               min_p: float | None = None, repetition_penalty: float = 1.0, stop: Any = (), tokenizer: Any = None,
               use_cache: bool = True) -> Iterator[np.ndarray]:
        """As `generate`, but gives the tokens (B,) one after another as they are written; -1 for a row that ended."""
        sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty)
        with self.evaluating():
            *_, steps = self._start(ids, n, sampler, stop, tokenizer, use_cache)

        def give() -> Iterator[np.ndarray]:
            while True:
                with self.evaluating():                  # not across a yield: there the caller's state holds
                    tokens = next(steps, None)
                if tokens is None:
                    return
                yield tokens

        return give()

    def _start(self, ids: Any, n: int, sampler: Sampler, stop: Any, tokenizer: Any, use_cache: bool) -> tuple:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise ValueError(f"[generate] n is an integer of at least 0: got {n!r}")
        decoder, prompts, always = self._decoder(ids)
        vocab = self.config.vocab_size
        stops = Stops(stop, tokenizer, vocab, always)
        return decoder, prompts, stops, _tokens(decoder, prompts, n, sampler, stops, vocab, use_cache)


def beam_search(decoder: Any, prompts: Sequence[np.ndarray], n: int, beams: int, end: int, length_penalty: float
                ) -> list[list[tuple[np.ndarray, float]]]:
    """For each prompt (all of one length) the `beams` best continuations found, best first: [(tokens, score), ...].

    Keeps the `beams` likeliest unfinished rows of each prompt and extends each by every token. score = log p /
    ((5 + length) / 6)^length_penalty (Wu et al., 2016); `length` counts the tokens written, `end` included. Stops at n
    tokens, or when no unfinished row can reach the finished ones any more. beams=1, length_penalty=0 is greedy.
    """
    for name, value, least in (("n", n, 1), ("beams", beams, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"[beam_search] {name} is an integer of at least {least}: got {value!r}")
    if not 0 <= number("beam_search", "length_penalty", length_penalty) < math.inf:
        raise ValueError(f"[beam_search] length_penalty is at least 0: got {length_penalty}")
    lengths = {np.shape(prompt) for prompt in prompts}
    if len(lengths) != 1 or len(min(lengths)) != 1 or not min(lengths)[0]:
        raise ValueError(f"[beam_search] prompts are rows of one length, at least one token: got {sorted(lengths)}")
    b, t = len(prompts), len(prompts[0])
    cache = decoder.cache(b)
    if cache.capacity is not None and t + n - 1 > cache.capacity:
        raise ValueError(f"[beam_search] {t} + {n} tokens do not fit the context of {cache.capacity}")

    def penalized(score: Any, length: int) -> Any:
        return score / ((5 + length) / 6) ** length_penalty

    rows = np.stack(prompts)                             # (B * beams, T) once the beams have split
    scores = np.zeros((b, 1))
    finished: list[list[tuple[float, np.ndarray]]] = [[] for _ in range(b)]
    live = [True] * b
    for length in range(1, n + 1):
        logits = to_host(decoder(rows[:, cache.length:], cache=cache)._data)[:, -1].astype(np.float64)
        check_logits("beam_search", logits)
        logits -= logits.max(axis=-1, keepdims=True)
        logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        v, width = logp.shape[-1], scores.shape[1]
        total = (scores[:, :, None] + logp.reshape(b, width, v)).reshape(b, width * v)
        best = np.argsort(-total, axis=-1, kind="stable")[:, :2 * beams]     # at most half of them can end
        parents, tokens = np.repeat(np.arange(b) * width, beams).reshape(b, beams), np.zeros((b, beams), np.int64)
        scores = np.full((b, beams), -np.inf)
        for i in range(b):
            kept = 0
            for rank, candidate in enumerate(best[i]):
                parent, token = i * width + candidate // v, candidate % v
                score = total[i, candidate]
                if token == end or length == n:
                    if rank < beams and score > -np.inf and live[i]:
                        finished[i].append((penalized(score, length), np.append(rows[parent, t:], token)))
                elif kept < beams:
                    parents[i, kept], tokens[i, kept], scores[i, kept] = parent, token, score
                    kept += 1
            finished[i] = sorted(finished[i], key=lambda found: -found[0])[:beams]
            live[i] = live[i] and (len(finished[i]) < beams or scores[i].max() > -np.inf
                                   and penalized(scores[i].max(), n) > finished[i][-1][0])
        if not any(live):
            break
        rows = np.concatenate([rows[parents.reshape(-1)], tokens.reshape(-1, 1)], axis=1)
        cache.reorder(parents.reshape(-1))
    return [[(tokens, float(score)) for score, tokens in found] for found in finished]
