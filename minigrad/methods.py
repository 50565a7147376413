"""The operator table: a Tensor's operators and methods are the functions of the ops, and nothing else."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from minigrad.backend.device import to_host
from minigrad.ops import elementwise, linalg, reduce, shape, softmax
from minigrad.tape import Tensor


def _reflected(op: Any) -> Any:
    return lambda self, other: op(other, self)


_operators = {
    "add": elementwise.add, "sub": elementwise.subtract, "mul": elementwise.multiply, "truediv": elementwise.divide,
    "pow": elementwise.power, "matmul": linalg.matmul,
}
_one_sided = {
    "neg": elementwise.negative, "abs": elementwise.abs_, "getitem": shape.getitem, "invert": elementwise.logical_not,
    "gt": elementwise.greater, "ge": elementwise.greater_equal, "lt": elementwise.less, "le": elementwise.less_equal,
    "eq": elementwise.equal, "ne": elementwise.not_equal, "and": elementwise.logical_and, "or": elementwise.logical_or,
}
_methods = {
    **{name: getattr(elementwise, name) for name in (
        "exp log log1p expm1 sqrt square sin cos tanh sigmoid softplus relu erf gelu silu sign clip").split()},
    "abs": elementwise.abs_, "softmax": softmax.softmax, "log_softmax": softmax.log_softmax,
    "sum": reduce.sum_, "mean": reduce.mean, "max": reduce.max_, "min": reduce.min_,
    "var": reduce.var, "std": reduce.std, "logsumexp": reduce.logsumexp, "cumsum": reduce.cumsum,
    "argmax": reduce.argmax, "argmin": reduce.argmin, "any": reduce.any_, "all": reduce.all_, "squeeze": shape.squeeze,
    "swapaxes": shape.swapaxes, "matmul": linalg.matmul,
}


def _method(op: Any) -> Any:
    def method(self, *args, **params):
        return op(self, *args, **params)
    method.__name__, method.__doc__ = op.__name__, op.__doc__
    return method


def _binary(op: Any) -> Any:
    return lambda self, other: op(self, other)


for _name, _op in _operators.items():
    setattr(Tensor, f"__{_name}__", _binary(_op))
    setattr(Tensor, f"__r{_name}__", _reflected(_op))
for _name, _op in _one_sided.items():
    setattr(Tensor, f"__{_name}__", _method(_op))
for _name, _op in _methods.items():
    setattr(Tensor, _name, _method(_op))


def _lengths(given: tuple) -> tuple:
    """x.reshape(2, 3) and x.reshape((2, 3)) are the same."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


Tensor.__pos__ = lambda self: self                                                      # type: ignore[attr-defined]
Tensor.reshape = lambda self, *lengths: shape.reshape(self, _lengths(lengths))          # type: ignore[attr-defined]
Tensor.transpose = lambda self, *axes: shape.transpose(self, _lengths(axes) or None)    # type: ignore[attr-defined]
Tensor.T = property(lambda self: shape.transpose(self))                                 # type: ignore[attr-defined]
Tensor.mT = property(lambda self: shape.swapaxes(self, -1, -2))                         # type: ignore[attr-defined]


def picture(x: Any, side: int = 32) -> np.ndarray:
    """An array as a matrix of at most side x side: its leading axes are folded into rows (a vector is one row), rows
    and columns are cut into `side` runs as even as can be, and each element is the mean of a block."""
    x = to_host(x)
    x = x.reshape(-1, x.shape[-1]) if x.ndim and x.size else x.reshape(1, -1)
    for axis in (0, 1):
        n = x.shape[axis]
        if n > side:
            starts = np.arange(side) * n // side
            counts = np.diff([*starts, n]).reshape((-1, 1) if axis == 0 else (1, -1))
            with np.errstate(all="ignore"):              # a sum too large is a block that is not finite
                x = np.add.reduceat(x, starts, axis=axis, dtype=np.float64) / counts
    return x


def _colour(v: float, top: float) -> str:
    """Blue below 0, white at 0, red above; grey if not finite."""
    if not np.isfinite(v):
        return "#999"
    pale = 255 - int(200 * min(1.0, abs(v) / top)) if top else 255
    return f"#{255:02x}{pale:02x}{pale:02x}" if v > 0 else f"#{pale:02x}{pale:02x}{255:02x}"


def heat_map(x: Any) -> str:
    """An HTML table of an array: its numbers if there are at most 64, else its picture in colours."""
    x = to_host(x)
    cells = picture(x, 64 if x.size <= 64 else 32).astype(np.float64)
    finite = abs(cells[np.isfinite(cells)])
    top = float(finite.max()) if finite.size else 0.0
    rows = "".join("<tr>" + "".join(
        f'<td style="background:{_colour(v, top)};color:#000;padding:2px 4px" title="{v:.6g}">'
        f'{f"{v:.4g}" if x.size <= 64 else ""}</td>' for v in row) + "</tr>" for row in cells.tolist())
    return f'<table style="border-collapse:collapse">{rows}</table>'


def _repr_html(self: Tensor) -> str:
    """For Jupyter: what the tensor is, and a table or heat map of its values."""
    kind = "a leaf" if self.requires_grad else "no history"
    said = f"{self.shape} {self.dtype} on {self.device}, " + (f"op {self.node.name}" if self.node is not None else kind)
    return f"<div>{html.escape(said)}{heat_map(self._data) if self.size else ''}</div>"


Tensor._repr_html_ = _repr_html                                                         # type: ignore[attr-defined]
