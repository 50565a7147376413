"""Functions that shrink axes. axis: an int, a tuple (the empty one reduces nothing), or None for all."""

from __future__ import annotations

import numpy as np

from minigrad.backend.device import xp
from minigrad.ops.elementwise import exp, isfinite, where
from minigrad.ops.shape import broadcast_to, flip
from minigrad.tape import primitive, sample

_rows = [sample((2, 3)), sample((2, 3), axis=1), sample((2, 3, 4), axis=(0, -1), keepdims=True), sample(()),
         sample((2, 3), axis=()), sample((2, 3), axis=2, error="axis 2")]


def _axes(axis, ndim: int) -> tuple[int, ...]:
    axes = tuple(range(ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(a % ndim for a in axes) if ndim else ()  # NumPy takes axis 0 of a 0-d array


def _keep(c, shape, axis, keepdims):
    """A reduced array with its axes back, of length 1."""
    axes = _axes(axis, len(shape))
    return c if keepdims else c.reshape(tuple(1 if i in axes else n for i, n in enumerate(shape)))


def _spread(c, shape, axis, keepdims):
    """The adjoint of a sum: every element gets the cotangent of its sum."""
    return broadcast_to(_keep(c, shape, axis, keepdims), shape)


def _count(shape, axis) -> int:
    return int(np.prod([shape[a] for a in _axes(axis, len(shape))], dtype=np.int64))


@primitive(samples=[*_rows, sample((0, 3), axis=0)],
           rules=[lambda ct, x_shape, axis, keepdims: _spread(ct, x_shape, axis, keepdims)])
def sum_(x, /, axis=None, keepdims=False):
    """sum x over `axis`;  ct_x = ct, repeated over `axis`

    In x's dtype (bool and small integers in 64 bits, as NumPy's).
    """
    return x.sum(axis=axis, keepdims=keepdims)


@primitive(samples=_rows, rules=[lambda ct, x_shape, axis, keepdims:
                                 _spread(ct * (1.0 / max(1, _count(x_shape, axis))), x_shape, axis, keepdims)])
def mean(x, /, axis=None, keepdims=False):
    """sum x / n over the n elements of `axis`;  ct_x = ct / n, repeated over `axis`

    Of nothing it is NaN, as NumPy has it.
    """
    return x.mean(axis=axis, keepdims=keepdims)


def _over(a: float, n: int) -> float:
    return a / n if n > 0 else np.nan                    # as the variance itself


@primitive(samples=[*_rows, sample((2, 3), axis=1, ddof=1), sample((4,), ddof=1, keepdims=True)],
           rules=[lambda ct, x, axis, ddof, keepdims: _keep(ct, x.shape, axis, keepdims) * (
               (x - x.mean(axis=axis, keepdims=True)) * _over(2.0, _count(x.shape, axis) - ddof))])
def var(x, /, axis=None, ddof=0, keepdims=False):
    """sum (x - mean)^2 / (n - ddof);  ct_x = ct 2 (x - mean) / (n - ddof)"""
    return x.var(axis=axis, ddof=ddof, keepdims=keepdims)


def _extreme_rule(ct, x, y, axis, keepdims):
    hit = x == _keep(y, x.shape, axis, keepdims)
    share = _keep(ct, x.shape, axis, keepdims) / hit.sum(axis=_axes(axis, x.ndim), keepdims=True).astype(ct.dtype)
    return where(hit, share, 0.0)


@primitive(samples=_rows, rules=[_extreme_rule])
def max_(x, /, axis=None, keepdims=False):
    """max x over `axis`;  ct_x = ct / (number of ties) where x = y, else 0"""
    return x.max(axis=axis, keepdims=keepdims)


@primitive(samples=_rows, rules=[_extreme_rule])
def min_(x, /, axis=None, keepdims=False):
    """min x over `axis`;  ct_x = ct / (number of ties) where x = y, else 0"""
    return x.min(axis=axis, keepdims=keepdims)


def _finite(y):
    return where(isfinite(y), y, 0.0)                    # an infinite maximum must not give inf - inf


@primitive(samples=_rows, rules=[lambda ct, x, y, axis, keepdims: _keep(ct, x.shape, axis, keepdims)
                                 * exp(x - _finite(_keep(y, x.shape, axis, keepdims)))])
def logsumexp(x, /, axis=None, keepdims=False):
    """log sum e^x = m + log sum e^(x - m) with m = max x;  ct_x = ct e^(x - y); a row of -inf gives -inf, gradient 0"""
    m = xp(x)
    top = (x.max if x.size else x.sum)(axis=axis, keepdims=True)  # nothing has no maximum, but a sum of 0
    top = m.where(m.isfinite(top), top, m.zeros_like(top))
    with np.errstate(divide="ignore"):
        y = m.log(m.exp(x - top).sum(axis=axis, keepdims=True)) + top
    return y if keepdims else y.reshape(x.sum(axis=axis).shape)


@primitive(samples=[sample((2, 3), axis=1), sample((4,), axis=0), sample((2, 3, 2), axis=-2), sample((2, 3))],
           rules=[lambda ct, x_shape, axis: flip(cumsum(flip(ct, axis=axis), axis=axis), axis=axis).reshape(x_shape)])
def cumsum(x, /, axis=None):
    """y_i = sum x_j for j <= i along `axis` (of the flattened x without one);  ct_x = at j, sum ct_i for i >= j"""
    return xp(x).cumsum(x, axis=axis)


@primitive(samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=1, keepdims=True)])
def argmax(x, /, axis=None, keepdims=False):
    """The index of the first largest element (int64);  no gradient"""
    return xp(x).argmax(x, axis=axis, keepdims=keepdims)


@primitive(samples=[sample((2, 3)), sample((2, 3), axis=1)])
def argmin(x, /, axis=None, keepdims=False):
    """The index of the first smallest element (int64);  no gradient"""
    return xp(x).argmin(x, axis=axis, keepdims=keepdims)


@primitive(samples=[sample((2, 3)), sample((2, 3), axis=1)])
def any_(x, /, axis=None, keepdims=False):
    """True if any element is nonzero;  no gradient"""
    return x.any(axis=axis, keepdims=keepdims)


@primitive(samples=[sample((2, 3)), sample((2, 3), axis=1)])
def all_(x, /, axis=None, keepdims=False):
    """True if all elements are nonzero;  no gradient"""
    return x.all(axis=axis, keepdims=keepdims)


def std(x, axis=None, ddof=0, keepdims=False):
    """The square root of `var`; where that is 0 so is the gradient."""
    v = var(x, axis=axis, ddof=ddof, keepdims=keepdims)
    return (v + (v == 0)) ** 0.5 * (v != 0)
