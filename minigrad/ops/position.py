"""Rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

import numpy as np

from minigrad.ops.elementwise import array, on_device_of
from minigrad.ops.shape import broadcasts, concatenate, reshape, stack
from minigrad.tape import Tensor, _raw, primitive, sample


def _turn(x, cos, sin, interleaved):
    r = cos.shape[-1]
    if interleaved:
        pairs = x[..., :2 * r].reshape(*x.shape[:-1], r, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = reshape(stack([a * cos - b * sin, b * cos + a * sin], axis=-1), (*x.shape[:-1], 2 * r))
    else:
        a, b = x[..., :r], x[..., r:2 * r]
        turned = concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned if 2 * r == x.shape[-1] else concatenate([turned, x[..., 2 * r:]], axis=-1)


_angle = np.linspace(0.1, 2.0, 6).reshape(3, 2)


@primitive(fused=True,
           rules=[lambda ct, cos, sin, interleaved: _rotary(ct, cos=cos, sin=-sin, interleaved=interleaved)],
           samples=[sample((2, 3, 4), cos=np.cos(_angle), sin=np.sin(_angle)),
                    sample((2, 3, 4), cos=np.cos(_angle), sin=np.sin(_angle), interleaved=True),
                    sample((3, 7), cos=np.cos(_angle), sin=np.sin(_angle))])
def _rotary(x, /, cos, sin, interleaved=False):
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair in x;  ct_x = ct turned back, by -sin"""
    return _turn(x, cos, sin, interleaved)


def rotary_embedding(x, cos, sin, interleaved=False):
    """Turn the first R of D elements by position: x (*S, T, D); cos, sin (..., T, R/2), broadcastable.

    Pair (a, b) -> (a cos - b sin, b cos + a sin); the pairs are elements (i, i + R/2), or neighbours (2i, 2i + 1) if
    interleaved. A rotation: the cotangent turns back (-sin).
    """
    op = "rotary_embedding"
    x, cos, sin = array(op, "x", x), array(op, "cos", cos), array(op, "sin", sin)
    cos, sin = on_device_of(cos, x), on_device_of(sin, x)
    r = cos.shape[-1] if cos.ndim else 0
    if cos.shape != sin.shape or x.ndim < 2 or 2 * r > x.shape[-1] or not broadcasts(cos.shape[:-1], x.shape[:-1]):
        raise ValueError(f"[{op}] cos and sin are (..., T, R/2) with R at most D, and broadcast to x (*S, T, D): "
                         f"x {x.shape}, cos {cos.shape}, sin {sin.shape}")
    dtype = np.result_type(x.dtype, np.float16)          # integers turn as floats
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    if any(isinstance(a, Tensor) and a.requires_grad for a in (cos, sin)):
        return _turn(x, cos, sin, interleaved)           # learned positions: every step a node
    return _rotary(x, cos=_raw(cos), sin=_raw(sin), interleaved=bool(interleaved))


def rotary_tables(positions, r, base=10000.0):
    """cos and sin of positions (*S,) times base^(-2i/R), i = 0 .. R/2-1: two NumPy arrays (*S, R/2), float64."""
    angle = np.asarray(positions)[..., None] * base ** (-np.arange(0, r, 2) / r)
    return np.cos(angle), np.sin(angle)
