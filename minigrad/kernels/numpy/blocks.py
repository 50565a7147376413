"""What the NumPy kernels share: running a formula on blocks of rows."""

import functools
import math
import threading

import numpy as np

from minigrad.backend.threads import BLOCK_BYTES, for_rows

# OpenBLAS starts threads of its own for longer dot products, which would fight with ours.
LONGEST_DOT = 8192


def promoted(kernel):
    """The kernel for arrays of any dtypes: brought to their common float dtype, as NumPy's operators would (NEP 50;
    int64 to float64). Booleans, which are masks, and what is given by name (ids) stay."""
    def numeric(a):
        return isinstance(a, np.ndarray) and a.dtype != bool

    @functools.wraps(kernel)
    def run(*args, **params):
        kinds = {a.dtype for a in args if numeric(a)}
        if len(kinds) != 1 or min(kinds).kind != "f":
            dtype = np.result_type(np.float16, *kinds)
            args = [a.astype(dtype, copy=False) if numeric(a) else a for a in args]
        return kernel(*args, **params)

    return run


def by_blocks(body, reads, writes=(), temps=0):
    """Run ``body(*reads, *writes, *temps)`` on blocks of rows of arrays; list what it returns.

    reads, writes: arrays with the same number of rows N (first axis); an array updated in place
    is given in both. temps: how many arrays of the shape of the first read to add as work space.
    The body sees slices, except that float16 is turned into float32 on the way in and back on the
    way out. Floating point warnings are off in it: exp underflows, and exp(inf) is the right limit.
    """
    if reads[0].size == 0:
        return []
    dtype = computed_in(reads[0].dtype)

    def run(lo, hi):
        buffers = _Buffers()
        ins = [_as_computed(a[lo:hi], buffers) for a in reads]
        outs = [a[lo:hi] if a.dtype != np.float16 else buffers.next(a[lo:hi].shape, np.float32)
                for a in writes]
        work = [buffers.next(reads[0][lo:hi].shape, dtype) for _ in range(temps)]
        with np.errstate(all="ignore"):
            result = body(*ins, *outs, *work)
            for a, out in zip(writes, outs, strict=True):
                if a.dtype == np.float16:
                    a[lo:hi] = out
        return result

    rows = len(reads[0])
    touched = sum(a.nbytes for a in (*reads, *writes)) + temps * reads[0].nbytes
    return for_rows(run, rows, touched // rows)


def computed_in(dtype):
    """The dtype to compute in: float16 has neither the range nor the speed."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def _as_computed(block, buffers):
    if block.dtype != np.float16:
        return block
    wide = buffers.next(block.shape, np.float32)
    wide[...] = block
    return wide


_kept = threading.local()  # .buffers: this thread's work space, used again by every block


class _Buffers:
    """Hands out the thread's buffers one after the other, as arrays of the shape asked for."""

    def __init__(self):
        self.used = 0

    def next(self, shape, dtype):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > BLOCK_BYTES:  # one very long row: not worth keeping for ever
            return np.empty(shape, dtype)
        kept = _kept.__dict__.setdefault("buffers", [])
        if self.used == len(kept):
            kept.append(np.empty(BLOCK_BYTES, np.uint8))
        buffer = kept[self.used]
        self.used += 1
        return buffer[:nbytes].view(dtype).reshape(shape)


def as_rows(x, axis):
    """``x`` as (N, C) with ``axis`` last: a view where strides allow, else a copy."""
    last = x if axis in (-1, x.ndim - 1) else np.moveaxis(x, axis, -1)
    return last.reshape(math.prod(last.shape[:-1]), last.shape[-1])


def from_rows(rows, shape, axis):
    """The inverse of `as_rows`: (N, C) seen as an array of the given shape."""
    if axis in (-1, len(shape) - 1):
        return rows.reshape(shape)
    last = shape[:axis % len(shape)] + shape[axis % len(shape) + 1:] + (shape[axis],)
    return np.moveaxis(rows.reshape(last), -1, axis)


def row_dot(a, b):
    """sum_c a[n, c] b[n, c] as a column (N, 1). Faster than a product and a sum on short rows."""
    if a.shape[-1] > LONGEST_DOT:
        return np.sum(a * b, axis=-1, keepdims=True)
    return np.vecdot(a, b)[:, None]


def row_sum(a):
    """sum_c a[n, c] as a column (N, 1); for short rows a dot product with ones is quicker."""
    if a.shape[-1] > LONGEST_DOT:
        return np.sum(a, axis=-1, keepdims=True)
    return np.vecdot(a, np.ones(a.shape[-1], a.dtype))[:, None]


def column_sum(a):
    """sum_n a[n, c] (C,). Sixteen rows are taken as one, for NumPy likes its rows long."""
    whole = len(a) // 16 * 16
    if not whole or not a.flags.c_contiguous:
        return a.sum(axis=0)
    many = a[:whole].reshape(whole // 16, -1).sum(axis=0).reshape(16, -1)
    return many.sum(axis=0) + a[whole:].sum(axis=0)


def total(parts, like):
    """Sum the blocks' partial results, in order and in float64, as an array like ``like``."""
    result = np.zeros(like.shape)
    for part in parts:
        result += part
    return result.astype(like.dtype)
