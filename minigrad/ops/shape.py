"""Functions that move elements about and change none. `reshape` and `transpose` give back the inverse permutation in
the backward pass (A.10.5): they only re-index, so the cotangent is re-indexed the other way."""

from __future__ import annotations

import operator

import numpy as np

from minigrad.backend.device import is_array, scatter_add, xp
from minigrad.ops.elementwise import array, number
from minigrad.tape import Part, Tensor, primitive, sample


def axis_of(op, axis, shape):
    """One axis, counted from the front; an error if the shape has none such."""
    try:
        place = operator.index(axis)
    except TypeError:
        raise TypeError(f"[{op}] axis is one integer: got {axis!r}") from None
    if not -len(shape) <= place < len(shape):
        raise np.exceptions.AxisError(f"[{op}] axis {place} is out of range for {tuple(shape)}")
    return place % len(shape)


def broadcasts(shape, to):
    """Whether an array of one shape broadcasts to another."""
    try:
        return np.broadcast_shapes(shape, to) == tuple(to)
    except ValueError:
        return False


@primitive(view=True, samples=[sample((2, 3), shape=(3, 2)), sample((2, 3), shape=(-1,)), sample((), shape=(1, 1)),
                               sample((2, 3), shape=(4, 2), error="[reshape]"), sample((0, 3), shape=(3, 0))],
           rules=[lambda ct, x_shape: ct.reshape(x_shape)])
def reshape(x, /, shape):
    """x in another shape;  ct_x = ct in x's shape

    The elements keep their row-major order; one length may be -1.
    """
    return x.reshape(shape)


@primitive(view=True, samples=[sample((2, 3)), sample((2, 3, 4), axes=(1, 2, 0)), sample((2, 3, 4), axes=(-1, 0, 1)),
                               sample((2, 3), axes=(0, 0), error="[transpose]")],
           rules=[lambda ct, axes: transpose(ct, None if axes is None else tuple(
               int(i) for i in np.argsort([a % len(axes) for a in axes])))])
def transpose(x, /, axes=None):
    """x permuted;  ct_x = ct by the inverse permutation (section 5 of A.10)

    Its axes in the order of `axes`, reversed without.
    """
    return x.transpose(axes) if axes is not None else x.transpose()


def swapaxes(x, a, b):
    """Axes a and b exchanged."""
    axes = list(range(x.ndim))
    a, b = (axis_of("swapaxes", axis, x.shape) for axis in (a, b))
    axes[a], axes[b] = b, a
    return transpose(x, tuple(axes))


def moveaxis(x, source, destination):
    """Axis `source` moved to `destination`, the others in order."""
    axes = list(range(x.ndim))
    source, destination = (axis_of("moveaxis", axis, x.shape) for axis in (source, destination))
    axes.insert(destination, axes.pop(source))
    return transpose(x, tuple(axes))


@primitive(broadcasts=True, view=True, rules=[lambda ct: ct],
           samples=[sample((3,), shape=(2, 3)), sample((2, 1), shape=(4, 2, 3)), sample((), shape=(2,)),
                    sample((2, 3), shape=(2, 4), error="[broadcast_to]")])
def broadcast_to(x, /, shape):
    """x repeated, without copying, to a shape it broadcasts to;  ct_x = ct, which the engine sums back"""
    return xp(x).broadcast_to(x, shape)


def squeeze(x, axis=None):
    """Axes of length 1 dropped: all of them, or those named."""
    axes = [i for i, n in enumerate(x.shape) if n == 1] if axis is None else [
        axis_of("squeeze", a, x.shape) for a in (axis if isinstance(axis, tuple) else (axis,))]
    for a in axes:
        if x.shape[a] != 1:
            raise ValueError(f"[squeeze] only axes of length 1 can be dropped: axis {a} of {x.shape}")
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in axes))


def expand_dims(x, axis):
    """New axes of length 1 at the positions `axis` (an int or a tuple) of the result."""
    given = axis if isinstance(axis, tuple) else (axis,)
    whole = (*x.shape, *(1 for _ in given))
    axes = {axis_of("expand_dims", a, whole) for a in given}
    if len(axes) != len(given):
        raise ValueError(f"[expand_dims] axis names each new axis once: got {axis}")
    old = iter(x.shape)
    return reshape(x, tuple(1 if i in axes else next(old) for i in range(len(whole))))


def _concatenate_rule(ct, shapes, needs, axis):
    stops = np.cumsum([0] + [shape[axis] for shape in shapes])
    cut = (slice(None),) * (axis % len(shapes[0]))
    return tuple(ct[(*cut, slice(int(a), int(b)))] if want else None for a, b, want in zip(stops, stops[1:], needs))


@primitive(rule=_concatenate_rule, samples=[sample((2, 3), (1, 3), axis=0), sample((2, 1), (2, 3), (2, 0), axis=-1),
                                            sample((2, 3), (2,), axis=0, error="[concatenate]")])
def _concatenate(*xs, axis):
    """xs one after another along `axis`;  ct_xs = ct, cut where they meet"""
    return xp(xs[0]).concatenate(xs, axis=axis)


def concatenate(xs, axis=0):
    """Tensors joined along `axis`; the cotangent is cut where they meet."""
    return _concatenate(*_several("concatenate", xs), axis=axis)


def stack(xs, axis=0):
    """Tensors of one shape joined along a new axis."""
    return concatenate([expand_dims(x, axis) for x in _several("stack", xs)], axis)


def _several(op, xs):
    xs = [array(op, f"xs[{i}]", x) for i, x in enumerate(xs)]
    if not xs:
        raise ValueError(f"[{op}] takes at least one array: got none")
    return xs


def split(x, sections, axis=0):
    """A list of parts along `axis`: `sections` equal ones, or the given sizes, which must add up."""
    axis = axis_of("split", axis, x.shape)
    n = x.shape[axis]
    if np.ndim(sections):
        sizes = [number("split", "a size", size, int) for size in sections]
    else:
        count = number("split", "sections", sections, int)
        sizes = [n // max(1, count)] * count
    if sum(sizes) != n or min(sizes, default=0 if n else -1) < 0:
        raise ValueError(f"[split] the parts must add up to axis {axis}, of length {n}: got {sections}")
    stops = np.cumsum([0, *sizes])
    cut = (slice(None),) * axis
    return [x[(*cut, slice(int(a), int(b)))] for a, b in zip(stops, stops[1:])]


def _unpad(ct, width):
    return ct[tuple(slice(a, ct.shape[i] - b) for i, (a, b) in enumerate(width))]


@primitive(rules=[_unpad], samples=[sample((2, 3), width=((1, 0), (0, 2))),
                                    sample((2, 3), width=((0, 0), (1, 1)), constant_values=5.0)])
def _pad(x, /, width, constant_values=0.0):
    """x with a border of constants;  ct_x = ct without the border"""
    return xp(x).pad(x, width, constant_values=constant_values)


def pad(x, width, constant_values=0.0):
    """`width` = ((before, after), ...) elements of a constant around each axis, or one pair or number for all; the
    cotangent is cut back."""
    try:
        pairs = np.asarray(width) if np.ndim(width) > 1 else np.broadcast_to(width, (x.ndim, 2))
    except ValueError:
        pairs = None
    if pairs is None or pairs.dtype.kind not in "iu" or pairs.shape != (x.ndim, 2) or (pairs < 0).any():
        raise ValueError(f"[pad] width is a pair (before, after) of at least 0 per axis: x {x.shape}, width {width}")
    return _pad(x, width=tuple(map(tuple, pairs.tolist())),
                constant_values=number("pad", "constant_values", constant_values))


@primitive(view=True, samples=[sample((2, 3)), sample((2, 3), axis=1), sample((2, 3), axis=(0, -1))],
           rules=[lambda ct, axis: flip(ct, axis=axis)])
def flip(x, /, axis=None):
    """x in reverse order along `axis` (all axes by default);  ct_x = ct in reverse order"""
    return xp(x).flip(x, axis=axis)


# ------------------------------------------------------------------------------------------------------- indexing

_ids = np.array([[0, 2], [2, 1]])


def _is_basic(key) -> bool:
    """Whether an index only slices, so that no element is taken twice."""
    return not any(is_array(k) for k in (key if isinstance(key, tuple) else (key,)))


def _plain_key(key):
    """An index as NumPy and CuPy take it: Tensors unwrapped, lists made arrays."""
    if isinstance(key, tuple):
        return tuple(_plain_key(k) for k in key)
    key = key._data if isinstance(key, Tensor) else key
    if isinstance(key, list):
        return np.asarray(key, dtype=None if len(key) else np.int64)
    return key.copy() if is_array(key) else key          # what the user does to it later is not seen


def _getitem_rule(ct, x_shape, key):
    if _is_basic(key) and not isinstance(ct, Tensor):
        return Part(ct, key)
    return _place(ct, shape=x_shape, key=key)


@primitive(view=True, rules=[_getitem_rule],
           samples=[sample((3, 4), key=1), sample((3, 4), key=(slice(None), slice(0, 4, 2))),
                    sample((3, 4), key=(..., None, -1)), sample((3, 4), key=_ids),
                    sample((3, 4), key=(slice(None), _ids)), sample((3, 4), key=(_ids, _ids)),
                    sample((3,), key=np.array([True, False, True])), sample((3, 4), key=3, error="[getitem]"),
                    sample((3, 4), key=np.array([0, 5]), error="[getitem]")])
def _getitem(x, /, key):
    """x[key];  ct_x = zeros, with ct added at key"""
    return x[key]


def getitem(x, key):
    """x[key] with NumPy's indexing: integers, slices, None, ..., integer and bool arrays; negatives from the end."""
    return _getitem(x, key=_plain_key(key))


@primitive(broadcasts=True, rules=[lambda ct, key: _getitem(ct, key=key)],
           samples=[sample((4,), shape=(3, 4), key=1), sample((2, 2, 4), shape=(3, 4), key=_ids)])
def _place(ct, /, shape, key):
    """zeros of `shape` with the argument added at key, the adjoint of getitem;  ct_ct = ct[key]"""
    z = xp(ct).zeros(shape, ct.dtype)
    if _is_basic(key):
        z[key] = ct
    else:
        scatter_add(z, key, ct)
    return z
