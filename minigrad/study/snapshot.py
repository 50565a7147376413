"""What is left of an array when it has passed: a few numbers and a small picture, never the array itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend.device import to_host
from minigrad.methods import picture
from minigrad.ops.attention import visible_set
from minigrad.tape import _raw, primitives

FULL, SIDE = 64, 32                                      # all values up to this size; else a picture of this side


class Snapshot:
    """An array as it was at one moment, computed in float64 on the host (from a GPU this waits).

    shape, dtype; min, mean, max and norm (L2) of its finite elements (NaN if there are none); nans, infs: how many
    elements are not finite. `values`, float64: the array itself if its size is at most 64; else a picture of at most
    32 x 32 (see `minigrad.methods.picture`), of which each element is the mean of a block. `whole` says which.
    """

    __slots__ = ("shape", "dtype", "min", "mean", "max", "norm", "nans", "infs", "values", "whole")

    def __init__(self, array: Any) -> None:
        array = to_host(_raw(array))
        self.shape, self.dtype = array.shape, array.dtype
        x = array.astype(np.float64)                     # a copy, so that nothing of the step lives on
        self.nans = self.infs = 0
        finite = x
        with np.errstate(all="ignore"):
            if not np.isfinite(x.sum()):                 # one pass in the usual case
                self.nans, self.infs = int(np.isnan(x).sum()), int(np.isinf(x).sum())
                finite = x[np.isfinite(x)]
            self.min = self.mean = self.max = self.norm = float("nan")
            if finite.size:
                self.min, self.mean, self.max = float(finite.min()), float(finite.mean()), float(finite.max())
                top = max(-self.min, self.max)           # scaled, as a square of 1e200 would overflow
                self.norm = top * float(np.sqrt(np.square(finite / top).sum())) if top else 0.0
        self.whole = x.size <= FULL
        self.values = x if self.whole else picture(x, SIDE)

    def __repr__(self) -> str:
        bad = "".join(f", {n} {what}" for n, what in ((self.nans, "NaN"), (self.infs, "infinite")) if n)
        return (f"<{self.shape} {self.dtype} in [{self.min:.4g}, {self.max:.4g}], mean {self.mean:.4g}, "
                f"norm {self.norm:.4g}{bad}>")


class Attention:
    """The attention weights of one application, for the first element of the batch, before dropout.

    weights (H, T', S') float64 and visible (H, T', S') bool, the visible set, of at most the first 32 query and key
    positions; T and S are how many there are (`queries`, `keys`). A row of `weights` sums to 1 if no key is cut and
    there is no sink (composed, a sink is one more key, the last).
    """

    __slots__ = ("weights", "visible", "queries", "keys")

    def __init__(self, weights: Any, visible: Any) -> None:
        weights = _first(weights)
        self.queries, self.keys = weights.shape[-2:]
        self.weights = weights[:, :SIDE, :SIDE].astype(np.float64)
        self.visible = np.broadcast_to(_first(visible), weights.shape)[:, :SIDE, :SIDE].copy()


def attention_of(name: str, equation: str, y: Any, args: Sequence, params: dict[str, Any]) -> Attention | None:
    """The weights that an op computed, if it is attention or its softmax: A.10.2. A fused or tiled kernel does not give
    them out: they are computed again for the first 32 queries by the composition, in float64, with V = I."""
    args = [_raw(a) for a in args]
    if not y.size:
        return None                                      # an empty batch has no first element
    if name.startswith("attention_"):
        q, k, _, mask, bias, sinks = (None if a is None else to_host(a) for a in args)
        q, k, t, s = _first(q)[:, :SIDE], _first(k), q.shape[-2], k.shape[-2]
        heads = (max(len(q), len(k)), t, s)
        mask, bias = (None if a is None else np.broadcast_to(_first(a), heads)[:, :SIDE] for a in (mask, bias))
        v = np.broadcast_to(np.eye(s, min(s, SIDE)), (len(k), s, min(s, SIDE)))
        place = {name: params[name] for name in ("causal", "query_offset", "window")}
        seen = visible_set(q.shape[-2], s, mask, **place)
        composition: Any = primitives[name].reference
        a = composition(q.astype(np.float64), k.astype(np.float64), v, mask, bias, sinks,
                        **{**params, "dropout": None, "refuse_empty_rows": False})
        seen = np.broadcast_to(True if seen is None else seen, (*heads[:1], q.shape[-2], s))
        made = Attention(a, (seen if bias is None else seen & (bias > -np.inf))[..., :SIDE])
        made.queries, made.keys = t, s
        return made
    if y.ndim < 2 or params.get("axis", -1) not in (-1, y.ndim - 1):
        return None
    if name == "exp" and not (equation == "A.10.2" and bool((y.sum(axis=-1) < 1.01).all())):
        return None                                      # a line of the user's that computes numerators bears it too
    if name in ("softmax", "masked_softmax", "exp"):
        seen = to_host(args[0]) > -np.inf                # exp: under mg.composed(), of S - log sum, -inf where hidden
        return Attention(to_host(y), seen if name != "masked_softmax" or args[1] is None else seen & to_host(args[1]))
    return None


def _first(x: Any) -> Any:
    """The first element of the batch, (H, T, S)."""
    while x.ndim > 3:
        x = x[0]
    return x.reshape((1,) * (3 - x.ndim) + x.shape)
