"""Random bits that any device computes alike: the word of element i of draw n is a hash of (seed, n, i).

Nothing is stored but (seed, n): dropout recomputes its mask in the backward pass, a tile of attention weights hashes
just its own elements, a checkpoint replays the words it used, and a run resumes from two integers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

# Odd multipliers and shifts of a 32-bit integer mixer with low bias, found by search: C. Wellons, "Prospecting for
# Hash Functions" (2018), the constants known as lowbias32.
_M1, _M2 = 0x7FEB352D, 0x846CA68B


def mix(x: Any) -> Any:
    """A bijection of uint32 arrays in which every input bit moves every output bit about half of the time."""
    x = x ^ (x >> 16)
    x *= x.dtype.type(_M1)
    x ^= x >> 15
    x *= x.dtype.type(_M2)
    x ^= x >> 16
    return x


def _word(*parts: int) -> int:
    """The same mixing for a few Python integers: one 32-bit word that depends on all of them, in order."""
    h = 0x9E3779B9
    for part in parts:
        while True:
            h ^= part & 0xFFFFFFFF
            h = ((h ^ (h >> 16)) * _M1) & 0xFFFFFFFF
            h = ((h ^ (h >> 15)) * _M2) & 0xFFFFFFFF
            h = (h ^ (h >> 16)) + 0x9E3779B9 & 0xFFFFFFFF
            part >>= 32
            if not part:
                break
    return h


class Key(tuple):
    """(seed, n): the n-th draw of a seed's stream; all its elements' words follow from it."""

    def bits(self, rows: Any, columns: Any, xp: Any = np) -> Any:
        """Words of the elements at `rows` x `columns` (integers that broadcast): uint32, uniform on 0 .. 2^32-1."""
        a, b = _word(*self, 1), _word(*self, 2)
        rows = mix((rows % 2**32).astype(xp.uint32) ^ xp.uint32(a)) + (rows // 2**32).astype(xp.uint32)
        return mix(mix(columns.astype(xp.uint32) ^ xp.uint32(b)) ^ rows)

    def flat(self, size: int, xp: Any = np) -> Any:
        """Words of elements 0 .. size-1 of a flat array: uint32 (size,)."""
        width = 1 << 16                                  # element i stands in row i // width: no 32-bit limit
        rows = xp.arange(max(1, -(-size // width)), dtype=xp.int64)[:, None]
        columns = xp.arange(min(size, width), dtype=xp.int64)[None]
        return self.bits(rows, columns, xp).reshape(-1)[:size]


def drop_below(p: float) -> int:
    """Dropout with probability p drops the elements whose word is below this."""
    return min(math.ceil(p * 2**32), 2**32 - 1)


class _Here(threading.local):
    """What this thread does with the stream: the lists that note its keys, and the keys it replays."""

    notes: tuple[list[Key], ...] = ()
    replay: Iterator[Key] | None = None


class Stream:
    """A seed and how many keys were drawn from it. One for all threads; a thread may note its keys and replay them."""

    def __init__(self, seed: int = 0) -> None:
        self._lock, self._here = threading.Lock(), _Here()
        self.state = (int(seed), 0)

    def key(self) -> Key:
        """The next key; each call gives another."""
        here = self._here
        if here.replay is not None:
            key = next(here.replay, None)
            if key is None:
                raise RuntimeError("[checkpoint] the function drew more random numbers the second time it ran")
        else:
            with self._lock:
                seed, n = self.state
                self.state = (seed, n + 1)
            key = Key((seed, n))
        for keys in here.notes:
            keys.append(key)
        return key

    @property
    def noted(self) -> bool:
        """Whether this thread's keys are noted or replayed now: it runs inside a checkpoint."""
        return bool(self._here.notes) or self._here.replay is not None

    @contextmanager
    def noting(self) -> Iterator[list[Key]]:
        """A list of the keys this thread draws inside."""
        keys: list[Key] = []
        old, self._here.notes = self._here.notes, (*self._here.notes, keys)
        try:
            yield keys
        finally:
            self._here.notes = old

    @contextmanager
    def replaying(self, keys: list[Key]) -> Iterator[None]:
        """This thread draws these keys again inside, and the stream stays where it is."""
        old, self._here.replay = self._here.replay, iter(keys)
        try:
            yield
        finally:
            self._here.replay = old


stream = Stream()


def manual_seed(seed: int) -> None:
    """Start the stream of random numbers anew; the same seed gives the same run on every device."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"[manual_seed] a seed is an integer of at least 0: {seed!r}")
    stream.state = (int(seed), 0)


def get_rng_state() -> tuple[int, int]:
    """All there is to the state of randomness: (seed, keys drawn)."""
    return stream.state


def set_rng_state(state: tuple[int, int]) -> None:
    """Go on from a state that `get_rng_state` gave."""
    seed, drawn = state
    stream.state = (int(seed), int(drawn))


def uniform(shape: tuple[int, ...], dtype: Any) -> Any:
    """Uniform on [0, 1), drawn on the host in float64 (53 bits) and rounded, so that every device starts equal."""
    size = int(np.prod(shape, dtype=np.int64))
    words = stream.key().flat(2 * size).astype(np.uint64)
    u = ((words[:size] << np.uint64(21)) ^ (words[size:] >> np.uint64(11))).astype(np.float64) * 2.0**-53
    made = u.reshape(shape).astype(dtype)
    top = np.nextafter(made.dtype.type(1), made.dtype.type(0))
    return np.minimum(made, top)                         # rounding to float32 may not reach 1


def normal(shape: tuple[int, ...], dtype: Any) -> Any:
    """Standard normal by Box and Muller (1958): sqrt(-2 log(1 - u)) cos(2 pi v)."""
    u, v = uniform(shape, np.float64), uniform(shape, np.float64)
    return (np.sqrt(-2.0 * np.log1p(-u)) * np.cos(2.0 * np.pi * v)).astype(dtype)
