"""minigrad: a tiny reverse-mode autodiff framework on NumPy and CuPy. Start at tape.py."""

from __future__ import annotations

from typing import Any

import numpy as _np

from minigrad import methods as _methods  # noqa: F401  (attaches the operators)
from minigrad.backend import device as cuda
from minigrad.backend import random as _random
from minigrad.backend.device import Device, device
from minigrad.backend.random import get_rng_state, manual_seed, set_rng_state
from minigrad.backend.threads import get_num_threads, set_num_threads
from minigrad.ops.elementwise import where
from minigrad.ops.shape import concatenate, stack
from minigrad.tape import (
    Node,
    Primitive,
    Sample,
    Tensor,
    checkpoint,
    composed,
    enable_grad,
    grad,
    gradients,
    hvp,
    jvp,
    no_grad,
    primitive,
    primitives,
    sample,
    value_and_grad,
    vjp,
)
from minigrad.tape import _wrap as _wrap_array

__version__ = "0.1.0"

float16, float32, float64 = _np.dtype("float16"), _np.dtype("float32"), _np.dtype("float64")
int8, int16, int32, int64 = (_np.dtype(f"int{n}") for n in (8, 16, 32, 64))
uint8, bool_ = _np.dtype("uint8"), _np.dtype("bool")


def tensor(data: Any, requires_grad: bool = False, device: str | Device | None = None, dtype: Any = None) -> Tensor:
    """A Tensor holding a copy of `data`: Python floats become float32, ints int64; arrays keep their dtype."""
    return Tensor(data, requires_grad, device, dtype)


def _shape(given: tuple) -> tuple[int, ...]:
    lengths = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    if not all(isinstance(n, (int, _np.integer)) and n >= 0 for n in lengths):
        raise ValueError(f"[shape] lengths are integers of at least 0: got {lengths}")
    return tuple(int(n) for n in lengths)


def _made(array: Any, requires_grad: bool, device: str | Device) -> Tensor:
    made = Tensor(array, device=device)
    return made.requires_grad_(requires_grad)


def full(shape: Any, value: Any, requires_grad: bool = False, device: str | Device = "cpu",
         dtype: Any = None) -> Tensor:
    """A tensor of one value; float32 for a Python float."""
    return _made(_np.full(shape, value, dtype or Tensor(value).dtype), requires_grad, device)


def zeros(*shape: Any, requires_grad: bool = False, device: str | Device = "cpu", dtype: Any = float32) -> Tensor:
    """Zeros: zeros(2, 3) or zeros((2, 3)); float32."""
    return _made(_np.zeros(_shape(shape), dtype), requires_grad, device)


def ones(*shape: Any, requires_grad: bool = False, device: str | Device = "cpu", dtype: Any = float32) -> Tensor:
    """Ones: ones(2, 3) or ones((2, 3)); float32."""
    return _made(_np.ones(_shape(shape), dtype), requires_grad, device)


def zeros_like(x: Tensor, requires_grad: bool = False) -> Tensor:
    """Zeros of x's shape, dtype and device."""
    return _made(_np.zeros(x.shape, x.dtype), requires_grad, x.device)


def ones_like(x: Tensor, requires_grad: bool = False) -> Tensor:
    """Ones of x's shape, dtype and device."""
    return _made(_np.ones(x.shape, x.dtype), requires_grad, x.device)


def arange(*bounds: Any, requires_grad: bool = False, device: str | Device = "cpu", dtype: Any = None) -> Tensor:
    """arange(stop), (start, stop) or (start, stop, step); int64 for ints, float32 for floats."""
    made = _np.arange(*bounds)
    return _made(made.astype(dtype or (float32 if made.dtype == float64 else made.dtype)), requires_grad, device)


def eye(n: int, m: int | None = None, requires_grad: bool = False, device: str | Device = "cpu",
        dtype: Any = float32) -> Tensor:
    """The identity, (n, m or n); float32."""
    return _made(_np.eye(n, m, dtype=dtype), requires_grad, device)


def randn(*shape: Any, requires_grad: bool = False, device: str | Device = "cpu", dtype: Any = float32) -> Tensor:
    """Standard normal numbers from mg.manual_seed's stream, the same on every device."""
    return _made(_random.normal(_shape(shape), dtype), requires_grad, device)


def rand(*shape: Any, requires_grad: bool = False, device: str | Device = "cpu", dtype: Any = float32) -> Tensor:
    """Uniform numbers in [0, 1) from mg.manual_seed's stream, the same on every device."""
    return _made(_random.uniform(_shape(shape), dtype), requires_grad, device)


def from_dlpack(x: Any) -> Tensor:
    """A Tensor of another library's memory, not copied: both see writes."""
    if "cuda" in str(getattr(x, "device", "")):
        return _wrap_array(cuda.cuda_module().from_dlpack(x))
    made = _wrap_array(_np.from_dlpack(x).view())        # NumPy locks and unlocks only a view of what it imports
    _ = made.data                                        # the other library holds this memory: it is exposed
    return made


# ruff: noqa: E402, F401, F811  (these rooms stand above what is made here; all public names are re-exported)
from minigrad import data, functional, io, nn, optim, study, train
from minigrad.io import load, save
from minigrad.study import AnomalyError, Tape, detect_anomaly

_private = {"annotations", "Any", "methods", "backend", "ops", "kernels", "tape"}
__all__ = [name for name in dir() if not name.startswith("_") and name not in _private]
