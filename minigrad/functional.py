"""Every differentiable function, by name: `import minigrad.functional as F`. Arrays speak NumPy: axis, keepdims,
broadcasting. Called with Tensors they record; raw arrays pass straight through."""

# ruff: noqa: F401  (to hold these names is what this file is for)
from minigrad.ops.attention import document_mask, padding_mask, scaled_dot_product_attention, visible_set
from minigrad.ops.elementwise import abs_ as abs
from minigrad.ops.elementwise import (
    add,
    clip,
    cos,
    divide,
    equal,
    erf,
    exp,
    expm1,
    gelu,
    greater,
    greater_equal,
    isfinite,
    less,
    less_equal,
    log,
    log1p,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    multiply,
    negative,
    not_equal,
    power,
    relu,
    sigmoid,
    sign,
    silu,
    sin,
    softplus,
    sqrt,
    square,
    subtract,
    tanh,
    where,
)
from minigrad.ops.index import embedding, one_hot, repeat, roll, take, take_along_axis, tril, triu
from minigrad.ops.linalg import einsum, linear, matmul
from minigrad.ops.loss import cross_entropy, mse_loss
from minigrad.ops.norm import layer_norm, rms_norm
from minigrad.ops.position import (
    alibi_bias,
    alibi_slopes,
    relative_buckets,
    rotary_embedding,
    rotary_tables,
    sinusoidal_positions,
)
from minigrad.ops.random import dropout
from minigrad.ops.reduce import all_ as all
from minigrad.ops.reduce import any_ as any
from minigrad.ops.reduce import argmax, argmin, cumsum, logsumexp, mean, std, var
from minigrad.ops.reduce import max_ as max
from minigrad.ops.reduce import min_ as min
from minigrad.ops.reduce import sum_ as sum
from minigrad.ops.shape import (
    broadcast_to,
    concatenate,
    expand_dims,
    flip,
    getitem,
    moveaxis,
    pad,
    reshape,
    split,
    squeeze,
    stack,
    swapaxes,
    transpose,
)
from minigrad.ops.softmax import log_softmax, masked_softmax, softmax

__all__ = [name for name in dir() if not name.startswith("_")]
