"""layer_norm and rms_norm over the last axis."""

from __future__ import annotations

import numpy as np

from minigrad.kernels.numpy import norm as _numpy
from minigrad.kernels.numpy.blocks import promoted
from minigrad.tape import primitive, sample


def _check(op, x, *vectors):
    shape = np.shape(x)
    if not shape or not shape[-1]:
        raise ValueError(f"[{op}] x (*S, C) has nothing to normalise: x {shape}")
    if any(v is not None and np.shape(v) != shape[-1:] for v in vectors):
        came = ", ".join(str(np.shape(v)) for v in vectors if v is not None)
        raise ValueError(f"[{op}] weight and bias are (C,) for x (*S, C): x {shape}, got {came}")


def _layer_norm(x, weight, bias, eps):
    _check("layer_norm", x, weight, bias)
    return promoted(_numpy.layer_norm)(x, weight, bias, eps)


def _rms_norm(x, weight, eps):
    _check("rms_norm", x, weight)
    return promoted(_numpy.rms_norm)(x, weight, eps)


@primitive(kernels={"numpy": (_layer_norm, promoted(_numpy.layer_norm_backward), "mean", "rstd")},
           samples=[sample((2, 3)), sample((2, 5, 4), (4,), (4,)), sample((2, 4), (4,)), sample((2, 4), None, (4,)),
                    sample((3,)), sample((0, 4), (4,), (4,)),
                    sample((2, 3), (2,), error="[layer_norm] weight and bias are (C,)")])
def layer_norm(x, weight=None, bias=None, /, eps=1e-5):
    """y = h weight + bias, h = (x - mean) r, r = 1 / sqrt(var + eps);  with g = ct weight,
    ct_x = r (g - mean g - h mean(g h)),  ct_weight = sum ct h,  ct_bias = sum ct

    Mean and (biased) variance over the last axis: x (*S, C), weight and bias (C,) (Ba, Kiros and Hinton, 2016).
    """
    _check("layer_norm", x, weight, bias)
    centred = x - x.mean(axis=-1, keepdims=True)
    y = centred / ((centred * centred).mean(axis=-1, keepdims=True) + eps) ** 0.5
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@primitive(kernels={"numpy": (_rms_norm, promoted(_numpy.rms_norm_backward), "rstd")},
           samples=[sample((2, 3)), sample((2, 5, 4), (4,)), sample((3,)), sample((0, 4), (4,)),
                    sample((2, 3), (2,), error="[rms_norm] weight and bias are (C,)")])
def rms_norm(x, weight=None, /, eps=1e-6):
    """y = h weight, h = x r, r = 1 / sqrt(mean x^2 + eps);  with g = ct weight,
    ct_x = r (g - h mean(g h)),  ct_weight = sum ct h

    Over the last axis: x (*S, C), weight (C,) (Zhang and Sennrich, 2019).
    """
    _check("rms_norm", x, weight)
    y = x / ((x * x).mean(axis=-1, keepdims=True) + eps) ** 0.5
    return y if weight is None else y * weight
