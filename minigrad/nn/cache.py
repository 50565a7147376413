"""KVCache: the keys and values of the tokens a model has seen, so that the next token costs one position's work."""

from __future__ import annotations

from typing import Any

import numpy as np

from minigrad.backend.device import device_of, is_array, to_host, xp
from minigrad.nn.layers import check_sizes
from minigrad.ops.elementwise import number
from minigrad.ops.index import check_ids
from minigrad.tape import Tensor, _raw, _refuse_history, _wrap, describe


class KVCache:
    """Keys and values (B, Hkv, S, D) of every layer, by slot: token i of every row stands in slot i.

    `model.cache(batch)` makes one that fits a model; model(ids, cache=cache) appends the new tokens and attends over
    all. capacity: the most slots, or None. window: a query sees only its last `window` slots, and older ones are
    forgotten, so that memory stays bounded however many tokens pass. pad (B,): so many slots at the start of each row
    hold nothing: prompts of different lengths end side by side, and a row's positions begin after its padding.

    The memory grows by doubling as tokens come, never past `capacity`. `length` moves on only when a whole forward pass
    went through, so that one which failed or was interrupted has changed nothing. Holds values without history.
    """

    def __init__(self, n_layers: int, batch: int, capacity: int | None = None, window: int | None = None,
                 pad: Any = None, owner: Any = None) -> None:
        check_sizes("KVCache", n_layers, batch, *(x for x in (capacity, window) if x is not None))
        if window == 0:
            raise ValueError("[KVCache] a window has at least the query's own slot: got 0")
        self.batch, self.capacity, self.window, self.length = batch, capacity, window, 0
        self.pad = None
        if pad is not None:
            slots = to_host(_raw(pad))
            if slots.shape != (batch,) or slots.dtype.kind not in "iu" or (slots < 0).any():
                raise ValueError(f"[KVCache] pad holds one integer of at least 0 for each of {batch} rows: got {pad!r}")
            self.pad = slots.astype(np.int64) if slots.any() else None   # unsigned ones would make floats of positions
        self.owner = owner                               # what made it: the cache of another model is refused
        self._held: list[Any] = [None] * n_layers        # per layer (slot of the first, keys, values)
        self._context: list[Any] = [None] * n_layers     # per layer the keys and values of a cross-attention

    def __getitem__(self, layer: int) -> LayerCache:
        if not 0 <= layer < len(self):
            raise IndexError(f"[KVCache] layers are 0 to {len(self) - 1}: got {layer}")
        return LayerCache(self, layer)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        arrays = [a for held in self._held + self._context if held is not None for a in held]
        return sum(a.nbytes for a in arrays if is_array(a))

    def check(self, owner: Any, batch: int, tokens: int) -> None:
        """Raise unless `tokens` more of `batch` rows of this model fit."""
        if self.owner is not None and self.owner is not owner:
            raise ValueError(f"[KVCache] made for another model ({type(self.owner).__name__}): use model.cache(batch)")
        if batch != self.batch:
            raise ValueError(f"[KVCache] holds {self.batch} rows: got a batch of {batch}")
        if self.capacity is not None and self.length + tokens > self.capacity:
            raise ValueError(f"[KVCache] full: {self.length} of {self.capacity} slots are taken and {tokens} more do "
                             "not fit; make a larger one, or a window that forgets (window=)")

    def span(self, tokens: int) -> tuple[int, int]:
        """(slot of the first key, number of keys) that `tokens` new queries attend over."""
        kept = self.length if self.window is None else min(self.length, self.window - 1)
        return self.length - kept, kept + tokens

    def positions(self, tokens: int) -> np.ndarray:
        """Positions of the next tokens: (T,), or (B, T) with padding (0 within it)."""
        slots = np.arange(self.length, self.length + tokens)
        return slots if self.pad is None else np.maximum(slots - self.pad[:, None], 0)

    def visible(self, tokens: int) -> np.ndarray | None:
        """(B, 1, 1, S): which of the keys are no padding; None if all."""
        first, n = self.span(tokens)
        if self.pad is None or self.pad.max(initial=0) <= first:
            return None
        return (np.arange(first, first + n) >= self.pad[:, None])[:, None, None, :]

    def advance(self, tokens: int) -> None:
        """The forward pass over `tokens` is complete."""
        self.length += tokens

    def reorder(self, rows: Any) -> None:
        """Row i becomes what row rows[i] was; len(rows) may differ from the batch (beams split and die)."""
        rows = to_host(check_ids("KVCache.reorder", rows, self.batch))
        if rows.ndim != 1:
            raise ValueError(f"[KVCache.reorder] rows name one old row for each new one, (B,): got shape {rows.shape}")
        for held in (self._held, self._context):
            held[:] = [None if h is None else tuple(a[rows] if is_array(a) else a for a in h) for h in held]
        self.pad = None if self.pad is None else self.pad[rows]
        self.batch = len(rows)

    def truncate(self, length: int) -> None:
        """Forget the tokens from slot `length` on."""
        length = number("KVCache.truncate", "length", length, int)
        if not 0 <= length <= self.length or (self.window is not None and length < self.length):
            raise ValueError(f"[KVCache] can be cut back to 0 to {self.length} tokens, and not with a window: {length}")
        self.length = length


def check_cache(cache: Any, owner: Any, batch: int, tokens: int) -> None:
    """Raise unless `cache` is one, and `tokens` more of `batch` rows of this model fit."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"[{type(owner).__name__}] cache is a KVCache, from model.cache(batch): got {describe(cache)}")
    cache.check(owner, batch, tokens)


class LayerCache:
    """One layer's part of a KVCache, as MultiheadAttention uses it."""

    def __init__(self, cache: KVCache, layer: int) -> None:
        self.cache, self.layer = cache, layer

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' k and v after those held, and give all that their queries attend over."""
        cache, t = self.cache, k.shape[-2]
        for x in (k, v):
            _refuse_history(x, "KVCache", "decode under mg.no_grad() or model.evaluating()")
        cache.check(cache.owner, k.shape[0], t)
        first, n = cache.span(t)
        base, *arrays = cache._held[self.layer] or (first, None, None)
        held = arrays[0]
        if held is not None and (held.dtype, device_of(held)) != (k.dtype, k.device):    # it would be cast, silently
            raise ValueError(f"[KVCache] holds keys of {held.dtype} on {device_of(held)}: got {k.dtype} on {k.device}; "
                             "make a new cache after model.to()")
        if held is None or cache.length + t - base > held.shape[-2]:
            room = min(max(64, 2 * n), cache.capacity or 2 * n)
            if cache.window is not None:                 # a long chunk takes what it needs, and the next one much less
                room = max(2 * cache.window, n)
            arrays = [_moved(old, new._data, first - base, n - t, room) for old, new in zip(arrays, (k, v))]
            base = first
            cache._held[self.layer] = (base, *arrays)
        at = cache.length - base
        for array, new in zip(arrays, (k, v)):
            array[..., at:at + t, :] = new._data
        keys, values = (_wrap(array[..., at + t - n:at + t, :]) for array in arrays)
        return keys, values

    def context(self, make: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of a cross-attention's context: made once, then kept."""
        cache = self.cache
        if cache._context[self.layer] is None:
            k, v = make()
            for x in (k, v):
                _refuse_history(x, "KVCache", "decode under mg.no_grad() or model.evaluating()")
            cache._context[self.layer] = (k._data, v._data)
        k, v = cache._context[self.layer]
        return _wrap(k), _wrap(v)


def _moved(old: Any, new: Any, start: int, kept: int, room: int) -> Any:
    """An array with room for `room` slots that begins with `kept` of the old ones, from index `start` on."""
    array = xp(new).empty((*new.shape[:-2], room, new.shape[-1]), new.dtype)
    if kept:
        array[..., :kept, :] = old[..., start:start + kept, :]
    return array
