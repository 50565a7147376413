"""Softmax along an axis, its logarithm, and softmax over a visible set."""

import math

import numpy as np

from .blocks import as_rows, by_blocks, from_rows, row_dot, row_sum


def softmax(x, axis):
    """y_c = exp(x_c - m) / sum_k exp(x_k - m), m = max_k x_k, over ``axis``.  x, y (*S)."""
    def body(x, y):
        np.subtract(x, x.max(axis=1, keepdims=True), out=y)
        np.exp(y, out=y)
        y *= 1 / row_sum(y)

    return _along(body, axis, x)


def softmax_backward(ct, y, axis):
    """ct_x = y (ct - sum_k ct_k y_k), the sum over ``axis``.  ct, y, ct_x (*S)."""
    def body(ct, y, ct_x):
        np.subtract(ct, row_dot(ct, y), out=ct_x)
        ct_x *= y

    return _along(body, axis, ct, y)


def log_softmax(x, axis):
    """y_c = x_c - m - log sum_k exp(x_k - m), m = max_k x_k, over ``axis``.  x, y (*S)."""
    def body(x, y, e):
        np.subtract(x, x.max(axis=1, keepdims=True), out=y)
        np.exp(y, out=e)
        y -= np.log(row_sum(e))

    return _along(body, axis, x, temps=1)


def log_softmax_backward(ct, y, axis):
    """ct_x = ct - exp(y) sum_k ct_k, the sum over ``axis``.  ct, y, ct_x (*S)."""
    def body(ct, y, ct_x):
        np.exp(y, out=ct_x)
        ct_x *= row_sum(ct)
        np.subtract(ct, ct_x, out=ct_x)

    return _along(body, axis, ct, y)


def masked_softmax(scores, visible, axis):
    """Softmax over the visible set of each row (A.10.1): hidden entries weigh exactly 0.

    scores, y (*S); visible: booleans that broadcast to (*S), or None for all. What stands in a
    hidden place, NaN and infinity included, is never looked at. A visible -inf weighs 0. A row
    with nothing to see, or nothing but -inf, is a row of zeros. A visible +inf or NaN makes its
    row NaN, as in `softmax`: such a score is an overflow, and must show. Backward: as softmax.
    """
    rows = as_rows(scores, axis)
    y = np.empty(rows.shape, rows.dtype)

    def body(x, row, y):
        if visible is not None:
            y.fill(-np.inf)
            np.copyto(y, x, where=sets[row])
            x = y
        m = x.max(axis=1, keepdims=True)
        m[m == -np.inf] = 0  # -inf - -inf would be NaN
        np.subtract(x, m, out=y)
        np.exp(y, out=y)
        s = row_sum(y)
        s[s == 0] = 1
        y *= 1 / s

    # Heads and batches often share one mask. It is never repeated in memory: row n of the scores
    # sees the set number row[n].
    lead = np.moveaxis(scores, axis, -1).shape[:-1]
    row = np.zeros(len(rows), int)
    if visible is not None:
        sets = visible.reshape((1,) * (scores.ndim - visible.ndim) + visible.shape)
        sets = np.moveaxis(sets, axis, -1)
        number = np.arange(math.prod(sets.shape[:-1])).reshape(sets.shape[:-1])
        row = np.broadcast_to(number, lead).reshape(-1)
        sets = as_rows(sets, -1)
    by_blocks(body, [rows, row], [y])
    return from_rows(y, scores.shape, axis)


def _along(body, axis, *inputs, temps=0):
    """Run ``body`` on rows of arrays of one shape, rows along ``axis``; its one output."""
    rows = [as_rows(x, axis) for x in inputs]
    y = np.empty(rows[0].shape, rows[0].dtype)
    by_blocks(body, rows, [y], temps)
    return from_rows(y, inputs[0].shape, axis)
