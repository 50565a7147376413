"""Taking by number: embedding, take, take_along_axis, one_hot. Numbers out of range are errors that name number and
size; they never wrap. take and take_along_axis count negatives from the end as NumPy does, an embedding does not."""

from __future__ import annotations

import numpy as np

from minigrad.backend.device import is_array, to_host, xp
from minigrad.kernels.numpy import embedding as _numpy
from minigrad.ops.elementwise import array, number, on_device_of, where
from minigrad.ops.shape import axis_of, getitem, reshape
from minigrad.tape import _raw, _wrap, describe, primitive, sample


def check_ids(op: str, ids, n: int, low: int = 0, but: int | None = None):
    """`ids` as a raw integer array of its own, all in low .. n-1 (or equal to `but`); an error names the first that is
    not."""
    ids = _raw(ids)
    try:
        ids = ids.copy() if is_array(ids) else np.asarray(ids, dtype=None if np.size(ids) else np.int64)
    except ValueError:
        raise ValueError(f"[{op}] ids are an array of integers: got rows of different lengths") from None
    if ids.dtype.kind not in "iu":
        raise TypeError(f"[{op}] ids are integers: got {ids.dtype}")
    bad = (ids < low) | (ids >= n)
    bad = bad if but is None else bad & (ids != but)
    if ids.size and bool(bad.any()):
        every = to_host(xp(ids).stack(bad.nonzero())) if ids.ndim else ()
        at = tuple(int(i[0]) for i in every)
        raise IndexError(f"[{op}] id {int(ids[at])} at {at} is out of range for size {n}")
    return ids


def _lookup(table, ids):
    return table[ids]


def _scatter(ct, ids, table_shape):
    return _numpy.embedding_backward(ct.reshape(ids.size, ct.shape[-1]), ids.reshape(-1), table_shape[0])


@primitive(kernels={"numpy": (_lookup, _scatter)},
           samples=[sample((5, 3), ids=np.array([[0, 4], [4, 2]])), sample((4, 2), ids=np.array(1)),
                    sample((4, 2), ids=np.zeros((0, 2), int))])
def _embedding(table, /, ids):
    """table[ids];  ct_table = zeros with ct added at ids: the sum of ct over equal ids"""
    return getitem(table, ids)


def embedding(ids, table):
    """Rows of the table: ids (*S) integers in 0 .. V-1, table (V, C) -> (*S, C). ct_table sums ct over equal ids."""
    table = array("embedding", "table", table)
    if table.ndim != 2:
        raise ValueError(f"[embedding] takes ids and then a table (V, C): got ids {describe(ids)}, table {table.shape}")
    return _embedding(table, ids=on_device_of(check_ids("embedding", ids, table.shape[0]), table))


def take(x, indices, axis=None):
    """Elements of x at `indices` along `axis` (of the flattened x without one); negatives count from the end."""
    x = reshape(x, (-1,)) if axis is None else x
    axis = axis_of("take", axis or 0, x.shape)
    n = x.shape[axis]
    return getitem(x, (slice(None),) * axis + (on_device_of(check_ids("take", indices, n, low=-n), x),))


def take_along_axis(x, indices, axis):
    """x[..., indices[..., j, ...], ...] with indices shaped like x but for `axis`; negatives count from the end."""
    axis = axis_of("take_along_axis", axis, x.shape)
    n = x.shape[axis]
    ids = on_device_of(check_ids("take_along_axis", indices, n, low=-n), x)
    if ids.ndim != x.ndim:
        raise ValueError(f"[take_along_axis] indices have x's number of axes: x {x.shape}, indices {ids.shape}")
    m = xp(ids)
    shape = [ids.shape[i] if i == axis else n for i, n in enumerate(x.shape)]
    ids = m.broadcast_to(ids, shape)
    grid = [m.arange(n).reshape([-1 if j == i else 1 for j in range(x.ndim)]) for i, n in enumerate(x.shape)]
    return getitem(x, tuple(ids if i == axis else g for i, g in enumerate(grid)))


def repeat(x, repeats, axis=None):
    """Each part along `axis` (element of the flattened x without one) `repeats` times: a number, or one for each."""
    n = x.size if axis is None else x.shape[axis_of("repeat", axis, x.shape)]
    return take(x, np.repeat(np.arange(n), repeats), axis)


def roll(x, shift, axis=None):
    """Elements moved `shift` places along `axis` (in row-major order without one); the last come first."""
    n = x.size if axis is None else x.shape[axis_of("roll", axis, x.shape)]
    return reshape(take(x, np.roll(np.arange(n), shift), axis), x.shape)


def one_hot(ids, n):
    """(*S) integers in 0 .. n-1 -> (*S, n) float32: 1 at the id, 0 elsewhere. A Tensor, without gradient."""
    n = number("one_hot", "n", n, int)
    ids = check_ids("one_hot", ids, n)
    return _wrap((ids[..., None] == xp(ids).arange(n)).astype(np.float32))


def tril(x, k=0):
    """The lower triangle of the last two axes, up to diagonal k; zeros above."""
    return _triangle(x, k, True)


def triu(x, k=0):
    """The upper triangle of the last two axes, from diagonal k; zeros below."""
    return _triangle(x, k, False)


def _triangle(x, k, lower):
    axis_of("tril" if lower else "triu", -2, x.shape)
    rows, columns = np.arange(x.shape[-2])[:, None] + k, np.arange(x.shape[-1])
    return where(columns <= rows if lower else columns >= rows, x, 0.0)

