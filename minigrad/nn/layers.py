"""Layers. Weights are stored (d_in, d_out): y = x W + b (A.10.10). Legend for shapes in `minigrad/ops/__init__.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.backend import random
from minigrad.nn.module import Module, Parameter
from minigrad.ops.elementwise import number
from minigrad.tape import Tensor


def check_sizes(op: str, *sizes: Any) -> None:
    """Raise unless all are integers of at least 0."""
    if not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 0 for n in sizes):
        raise ValueError(f"[{op}] sizes are integers of at least 0: got {', '.join(map(repr, sizes))}")


def _uniform(bound: float, *shape: int) -> Parameter:
    return Parameter((random.uniform(shape, np.float64) * 2.0 * bound - bound).astype(np.float32))


def normal(std: float, *shape: int) -> Parameter:
    """A float32 Parameter of normal numbers with standard deviation `std`."""
    return Parameter((random.normal(shape, np.float64) * std).astype(np.float32))


class Linear(Module):
    """y = x W + b: (*S, d_in) -> (*S, d_out). Starts uniform in +-1/sqrt(d_in), as PyTorch's."""

    def __init__(self, d_in: int, d_out: int, bias: bool = True) -> None:
        check_sizes("Linear", d_in, d_out)
        bound = 1.0 / math.sqrt(max(1, d_in))
        self.weight = _uniform(bound, d_in, d_out)
        self.bias = _uniform(bound, d_out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Rows of a table (n, C) by id: (*S) integers -> (*S, C). Starts standard normal, as PyTorch's."""

    def __init__(self, n: int, d_model: int) -> None:
        check_sizes("Embedding", n, d_model)
        self.weight = normal(1.0, n, d_model)

    def forward(self, ids: Any) -> Tensor:
        return F.embedding(ids, self.weight)


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis, of length C."""

    def __init__(self, d_model: int, bias: bool = True, eps: float = 1e-5) -> None:
        check_sizes("LayerNorm", d_model)
        self.weight = Parameter(np.ones(d_model, np.float32))
        self.bias = Parameter(np.zeros(d_model, np.float32)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """x / sqrt(mean x^2 + eps) * weight over the last axis, of length C."""

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        check_sizes("RMSNorm", d_model)
        self.weight = Parameter(np.ones(d_model, np.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, eps=self.eps)


class Dropout(Module):
    """Zeroes elements with probability p while training."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0.0 <= number("Dropout", "dropout", p) < 1.0:
            raise ValueError(f"[Dropout] dropout is a probability below 1: got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, training=self.training)


class GELU(Module):
    """gelu(x); approximate="tanh" for GPT-2's."""

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)


_ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu}


class MLP(Module):
    """down(activation(up(x))): C -> d_ff -> C, d_ff = 4 C unless given. activation: gelu, gelu_tanh, relu, silu."""

    def __init__(self, d_model: int, d_ff: int | None = None, bias: bool = True, activation: str = "gelu",
                 dropout: float = 0.0) -> None:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"[MLP] activation is one of {', '.join(_ACTIVATIONS)}: got {activation!r}")
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.up, self.down = Linear(d_model, d_ff, bias), Linear(d_ff, d_model, bias)
        self.dropout, self.activation = Dropout(dropout), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(_ACTIVATIONS[self.activation](self.up(x))))


class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020): d_ff = 8/3 C, rounded up to a multiple of 8, unless given."""

    def __init__(self, d_model: int, d_ff: int | None = None, bias: bool = False, dropout: float = 0.0) -> None:
        d_ff = -(-8 * d_model // 24) * 8 if d_ff is None else d_ff
        self.gate, self.up = Linear(d_model, d_ff, bias), Linear(d_model, d_ff, bias)
        self.down, self.dropout = Linear(d_ff, d_model, bias), Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))
