"""The operator table: a Tensor's operators and methods are the functions of the ops, and nothing else."""

from __future__ import annotations

from typing import Any

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


for _name, _op in _operators.items():
    setattr(Tensor, f"__{_name}__", _method(_op))
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
