"""Exercise 8: layer normalisation over the last axis of length C (Ba et al., 2016).

    mean = average of x over the row,   var = average of (x - mean)^2,   rstd = 1 / sqrt(var + eps)
    xhat = (x - mean) rstd,             y = xhat * weight + bias

x (*S, C); weight and bias (C,) serve all rows; mean and rstd (*S, 1), one number a row.

bias:    exercise 4. It was repeated along *S, so sum over all leading axes.
weight:  exercises 2 and 4. What is it multiplied with? Then sum over *S.
x:       let g = ct * weight, the cotangent of xhat, so that dL = <g, dxhat>. Within a row, avg( ) being the average
         over its C elements:

    1. xhat changes because x does, because the mean does, and because rstd does:
           d mean = avg(dx)
           d var  = 2 avg((x - mean) dx)
           d rstd = -(1/2) rstd^3 d var = -rstd^2 avg(xhat dx)
           dxhat  = rstd dx  -  rstd avg(dx)  -  rstd xhat avg(xhat dx)
    2. dL = <g, dxhat>.
    3. Move each average to the other side of <,>:   <g, avg(dx)> = <avg(g), dx>,
       and <g, xhat avg(xhat dx)> = <xhat avg(g xhat), dx>. Collect what stands beside dx: three terms.

So all that has to be kept is x and two numbers a row; xhat is computed anew from them.

    ct, x (*S, C);  weight (C,);  mean, rstd (*S, 1)         returns (ct_x (*S, C), ct_weight (C,), ct_bias (C,))

A check: each row of ct_x sums to 0, since adding a constant to a row of x changes nothing.
"""

import numpy as np


def layer_norm(x, weight, bias, eps=1e-5):
    mean = x.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    return (x - mean) * rstd * weight + bias


def layer_norm_vjp(ct, x, weight, mean, rstd):
    """(ct_x, ct_weight, ct_bias)"""
    # [yours]
    xhat = (x - mean) * rstd
    g = ct * weight
    ct_x = rstd * (g - g.mean(axis=-1, keepdims=True) - xhat * (g * xhat).mean(axis=-1, keepdims=True))
    rows = tuple(range(ct.ndim - 1))
    return ct_x, (ct * xhat).sum(axis=rows), ct.sum(axis=rows)
    # [end]


# Hint: ct_x = rstd * (g - avg(g) - xhat * avg(g * xhat)), each avg with axis=-1, keepdims=True.
