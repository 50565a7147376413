"""Layer norm and RMS norm over the last axis."""

import numpy as np

from .blocks import as_rows, by_blocks, column_sum, computed_in, row_dot, row_sum, total


def layer_norm(x, weight, bias, eps):
    """y = xhat weight + bias, xhat = (x - mean) rstd, rstd = 1 / sqrt(var + eps), biased var.

    x, y (*S, C); weight, bias (C,) or None; mean, rstd (*S, 1), kept for the backward pass (in
    float32 for float16). The variance is that of x - mean: sum(x^2) - C mean^2 would cancel.
    """
    rows, width = as_rows(x, -1), x.shape[-1]
    weight, bias = _computed(weight), _computed(bias)
    y = np.empty(rows.shape, x.dtype)
    mean, rstd = np.zeros((2, len(rows), 1), computed_in(x.dtype))

    def body(x, y, mean, rstd):
        np.divide(row_sum(x), width, out=mean)
        np.subtract(x, mean, out=y)
        rstd[...] = 1 / np.sqrt(row_dot(y, y) / width + eps)
        y *= rstd
        if weight is not None:
            y *= weight
        if bias is not None:
            y += bias

    by_blocks(body, [rows], [y, mean, rstd])
    stats = x.shape[:-1] + (1,)
    return y.reshape(x.shape), mean.reshape(stats), rstd.reshape(stats)


def layer_norm_backward(ct, x, weight, bias, mean, rstd):
    """Cotangents (ct_x, ct_weight, ct_bias) of `layer_norm`; None for a weight or bias of None.

    With g = ct weight and means over the row:
    ct_x = rstd (g - mean(g) - xhat mean(g xhat)), ct_weight = sum ct xhat, ct_bias = sum ct.
    (The mean of xhat is 0, so mean(g) may as well be taken off at the end.)
    ct, x, ct_x (*S, C); mean, rstd (*S, 1); ct_weight, ct_bias (C,).
    """
    inputs = [as_rows(a, -1) for a in (ct, x, mean, rstd)]
    ct_x = np.empty(inputs[1].shape, x.dtype)
    wide = _computed(weight)

    def body(ct, x, mean, rstd, ct_x, centred, temp):
        np.subtract(x, mean, out=centred)
        ct_weight = _backward_block(ct, centred, wide, rstd, ct_x, temp)
        ct_x -= row_sum(ct_x) / x.shape[1]
        return ct_weight, None if bias is None else column_sum(ct)

    parts = by_blocks(body, inputs, [ct_x], temps=2)
    ct_weight = None if weight is None else total([w for w, b in parts], weight)
    ct_bias = None if bias is None else total([b for w, b in parts], bias)
    return ct_x.reshape(x.shape), ct_weight, ct_bias


def rms_norm(x, weight, eps):
    """y = x rstd weight, rstd = 1 / sqrt(mean(x^2) + eps).

    x, y (*S, C); weight (C,) or None; rstd (*S, 1), in float32 for float16.
    """
    rows, width = as_rows(x, -1), x.shape[-1]
    weight = _computed(weight)
    y = np.empty(rows.shape, x.dtype)
    rstd = np.zeros((len(rows), 1), computed_in(x.dtype))

    def body(x, y, rstd):
        rstd[...] = 1 / np.sqrt(row_dot(x, x) / width + eps)
        np.multiply(x, rstd, out=y)
        if weight is not None:
            y *= weight

    by_blocks(body, [rows], [y, rstd])
    return y.reshape(x.shape), rstd.reshape(x.shape[:-1] + (1,))


def rms_norm_backward(ct, x, weight, rstd):
    """Cotangents (ct_x, ct_weight) of `rms_norm`: those of layer norm without mean(g)."""
    inputs = [as_rows(a, -1) for a in (ct, x, rstd)]
    ct_x = np.empty(inputs[1].shape, x.dtype)
    wide = _computed(weight)

    def body(ct, x, rstd, ct_x, temp):
        return _backward_block(ct, x, wide, rstd, ct_x, temp)

    parts = by_blocks(body, inputs, [ct_x], temps=1)
    return ct_x.reshape(x.shape), None if weight is None else total(parts, weight)


def _backward_block(ct, z, weight, rstd, ct_x, temp):
    """ct_x = rstd (g - xhat mean(g xhat)), xhat = rstd z; returns this block's sum ct xhat.

    rstd goes into ct first, not into z: one pass less.
    """
    np.multiply(ct, rstd, out=ct_x)
    ct_weight = None
    if weight is not None:
        ct_weight = column_sum(np.multiply(ct_x, z, out=temp))
        ct_x *= weight
    np.multiply(z, rstd * rstd * row_dot(ct_x, z) / z.shape[1], out=temp)
    ct_x -= temp
    return ct_weight


def _computed(weight):
    return None if weight is None else weight.astype(computed_in(weight.dtype), copy=False)
