"""Functions of one element at a time. All broadcast like NumPy; the engine sums cotangents back (a vjp per input)."""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend.device import cupyx_special, is_array, to_device, xp
from minigrad.kernels.numpy import activation as _numpy
from minigrad.kernels.numpy.blocks import promoted
from minigrad.tape import Tensor, _from_python, _raw, describe, primitive, sample

_pair = [sample((2, 3), (2, 3)), sample((2, 1, 3), (4, 1)), sample((), (2,)), sample((0, 3), (3,)), sample((3,), 2.0),
         sample((2, 3), (4,), error="[OP]")]


def _errors(name: str, rows: list) -> list:
    """The rows with the op's own name in the expected messages."""
    return [sample(*r.args, low=r.low, high=r.high, error=r.error and r.error.replace("OP", name), **r.params)
            for r in rows]


@primitive(broadcasts=True, samples=_errors("add", _pair), rules=[lambda ct: ct, lambda ct: ct])
def add(a, b, /):
    """a + b;  ct_a = ct,  ct_b = ct"""
    return a + b


@primitive(broadcasts=True, samples=_errors("subtract", _pair), rules=[lambda ct: ct, lambda ct: -ct])
def subtract(a, b, /):
    """a - b;  ct_a = ct,  ct_b = -ct"""
    return a - b


@primitive(broadcasts=True, samples=_errors("multiply", _pair), rules=[lambda ct, b: ct * b, lambda ct, a: ct * a])
def multiply(a, b, /):
    """a b;  ct_a = ct b,  ct_b = ct a"""
    return a * b


@primitive(broadcasts=True, rules=[lambda ct, b: ct / b, lambda ct, b, y: -(ct * y) / b],
           samples=[sample((2, 3), (2, 3), low=0.5), sample((2, 1), (1, 3), low=0.5), sample(2.0, (3,), low=0.5)])
def divide(a, b, /):
    """a / b;  ct_a = ct / b,  ct_b = -ct y / b"""
    return a / b


def _power_rule_a(ct, a, b):
    if not is_array(b) and not isinstance(b, Tensor):
        return ct * (b * a ** (b - 1)) if b else ct * 0.0
    return ct * (b * a ** where(logical_and(a == 0, b == 0), 1.0, b - 1))  # 0 times infinity is 0 here


@primitive(broadcasts=True, samples=[sample((2, 3), (2, 3), low=0.5), sample((3, 1), (2,), low=0.5), sample((4,), 2),
                                     sample((4,), 0), sample((4,), -1.5, low=0.5), sample(2.0, (3,))],
           rules=[_power_rule_a, lambda ct, a, y: ct * y * log(where(a == 0, 1.0, a))])
def power(a, b, /):
    """a^b;  ct_a = ct b a^(b-1),  ct_b = ct y log a  (0 where a = 0)"""
    return a**b


@primitive(samples=[sample((2, 3)), sample(()), sample((0,))], rules=[lambda ct: -ct])
def negative(x, /):
    """-x;  ct_x = -ct"""
    return -x


@primitive(samples=[sample((2, 3)), sample(())], rules=[lambda ct, y: ct * y])
def exp(x, /):
    """e^x;  ct_x = ct y"""
    return xp(x).exp(x)


@primitive(samples=[sample((2, 3), low=0.2)], rules=[lambda ct, x: ct / x])
def log(x, /):
    """log x, the natural logarithm;  ct_x = ct / x"""
    return xp(x).log(x)


@primitive(samples=[sample((2, 3), low=-0.5)], rules=[lambda ct, x: ct / (1.0 + x)])
def log1p(x, /):
    """log(1 + x), accurate near 0;  ct_x = ct / (1 + x)"""
    return xp(x).log1p(x)


@primitive(samples=[sample((2, 3))], rules=[lambda ct, y: ct * (y + 1.0)])
def expm1(x, /):
    """e^x - 1, accurate near 0;  ct_x = ct (y + 1)"""
    return xp(x).expm1(x)


@primitive(samples=[sample((2, 3), low=0.2)], rules=[lambda ct, y: ct * 0.5 / y])
def sqrt(x, /):
    """sqrt x;  ct_x = ct / (2 y)"""
    return xp(x).sqrt(x)


@primitive(samples=[sample((2, 3)), sample(())], rules=[lambda ct, x: 2.0 * x * ct])
def square(x, /):
    """x^2;  ct_x = 2 x ct"""
    return x * x


@primitive(samples=[sample((2, 3))], rules=[lambda ct, x: ct * cos(x)])
def sin(x, /):
    """sin x (radians);  ct_x = ct cos x"""
    return xp(x).sin(x)


@primitive(samples=[sample((2, 3))], rules=[lambda ct, x: -(ct * sin(x))])
def cos(x, /):
    """cos x (radians);  ct_x = -ct sin x"""
    return xp(x).cos(x)


@primitive(samples=[sample((2, 3)), sample(())], rules=[lambda ct, y: ct * (1.0 - y * y)])
def tanh(x, /):
    """tanh x;  ct_x = ct (1 - y^2)"""
    return xp(x).tanh(x)


@primitive(samples=[sample((2, 3)), sample(())], rules=[lambda ct, y: ct * (y * (1.0 - y))])
def sigmoid(x, /):
    """1 / (1 + e^-x) = e^min(x, 0) / (1 + e^-|x|), which cannot overflow;  ct_x = ct y (1 - y)"""
    m = xp(x)
    e = m.exp(-m.abs(x))
    return m.where(x < 0, e, 1) / (1 + e)


@primitive(samples=[sample((2, 3))], rules=[lambda ct, x: ct * sigmoid(x)])
def softplus(x, /):
    """log(1 + e^x) = max(x, 0) + log1p(e^-|x|), which cannot overflow;  ct_x = ct sigmoid(x)"""
    m = xp(x)
    return m.maximum(x, 0) + m.log1p(m.exp(-m.abs(x)))


@primitive(samples=[sample((2, 3)), sample((0,))], rules=[lambda ct, y: where(y > 0, ct, 0.0)])
def relu(x, /):
    """max(x, 0);  ct_x = ct where y > 0, else 0"""
    return xp(x).maximum(x, 0)


@primitive(samples=[sample((2, 3))], rules=[lambda ct, x: ct * (2.0 / math.sqrt(math.pi)) * exp(-(x * x))])
def erf(x, /):
    """2/sqrt(pi) times the integral of e^(-t^2) from 0 to x;  ct_x = ct 2/sqrt(pi) e^(-x^2)"""
    return promoted(_numpy.erf)(np.asarray(x)) if xp(x) is np else cupyx_special().erf(x)


def _gelu(x, approximate):
    _check_approximate(approximate)
    return promoted(_numpy.gelu)(x, approximate)


def _check_approximate(approximate):
    if approximate not in ("none", "tanh"):
        raise ValueError(f'[gelu] approximate is "none" or "tanh": got {approximate!r}')


@primitive(samples=[sample((2, 3)), sample(()), sample((2, 3), approximate="tanh"), sample((0, 2)),
                    sample((2,), approximate="sigmoid", error='approximate is "none" or "tanh"')],
           kernels={"numpy": (_gelu, _numpy.gelu_backward)})
def gelu(x, /, approximate="none"):
    """x Phi(x) = x (1 + erf(x / sqrt 2)) / 2;  ct_x = ct (Phi(x) + x phi(x)), with phi = Phi' the normal density

    With approximate="tanh" x (1 + tanh(sqrt(2/pi)(x + 0.044715 x^3))) / 2 and the derivative of that (Hendrycks and
    Gimpel, 2016).
    """
    _check_approximate(approximate)
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


@primitive(samples=[sample((2, 3)), sample(()), sample((0, 2))],
           kernels={"numpy": (promoted(_numpy.silu), _numpy.silu_backward)})
def silu(x, /):
    """x s, s = sigmoid(x), also called swish (Elfwing et al., 2017);  ct_x = ct s (1 + x (1 - s))"""
    return x * sigmoid(x)


@primitive(samples=[sample((2, 3))], rules=[None])
def sign(x, /):
    """-1, 0 or 1, as x is below, at or above 0;  no gradient"""
    return xp(x).sign(x)


@primitive(samples=[sample((2, 3)), sample(())], rules=[lambda ct, x: where(x > 0, ct, where(x < 0, -ct, 0.0))])
def abs_(x, /):
    """|x|;  ct_x = ct sign x, 0 at 0"""
    return xp(x).abs(x)


@primitive(broadcasts=True, samples=_errors("maximum", _pair),
           rules=[lambda ct, a, b: _share(ct, a > b, a == b), lambda ct, a, b: _share(ct, b > a, a == b)])
def maximum(a, b, /):
    """max(a, b), elementwise;  ct_a = ct where a > b, ct / 2 where a = b, else 0,
    ct_b = ct where b > a, ct / 2 where a = b, else 0"""
    return _either("maximum", a, b)


@primitive(broadcasts=True, samples=_errors("minimum", _pair),
           rules=[lambda ct, a, b: _share(ct, a < b, a == b), lambda ct, a, b: _share(ct, b < a, a == b)])
def minimum(a, b, /):
    """min(a, b), elementwise;  ct_a = ct where a < b, ct / 2 where a = b, else 0,
    ct_b = ct where b < a, ct / 2 where a = b, else 0"""
    return _either("minimum", a, b)


def _share(ct, won, tied):
    """The cotangent of one side. Chosen, not multiplied by 0 or 1: 0 times infinity is NaN."""
    return where(won, ct, where(tied, 0.5 * ct, 0.0))


def _either(name, a, b):
    return getattr(xp(a if is_array(a) else b), name)(a, b)


def _inside(x, low, high):
    keep = x == x                                        # NaN passes nothing
    keep = keep if low is None else keep & (x >= low)
    return keep if high is None else keep & (x <= high)


@primitive(broadcasts=True, samples=[sample((2, 3), -1.0, 1.0), sample((2, 3), (3,), None),
                                     sample((2, 3), None, (2, 1)), sample((2, 3), (3,), 1.9), sample((2,), None, None)],
           rules=[lambda ct, x, low, high: where(_inside(x, low, high), ct, 0.0),
                  lambda ct, x, low, high: where(
                      x < low if high is None else logical_and(x < low, low <= high), ct, 0.0),
                  lambda ct, x, low, high: where(
                      x > high if low is None else logical_or(x > high, low > high), ct, 0.0)])
def _clip(x, low=None, high=None, /):
    """min(max(x, low), high);  ct_x = ct where low <= x <= high, else 0,
    ct_low = ct where x < low <= high, else 0,  ct_high = ct where x > high or low > high, else 0"""
    x = x if low is None else _either("maximum", x, low)
    return _either("minimum", x, high) if high is not None else x + 0


def clip(x, low=None, high=None, *, min=None, max=None):
    """min(max(x, low), high), also by NumPy's names; the gradient of x is 1 at its bounds, and a Tensor bound gets what
    it replaces."""
    return _clip(x, min if low is None else low, max if high is None else high)


@primitive(broadcasts=True, samples=[sample(np.array([True, False, True]), (2, 3), (3,)),
                                     sample(np.array([[True], [False]]), (3,), 0.0), sample(np.array(True), (), (2,))],
           rules=[None, lambda ct, condition: _where(condition, ct, 0.0),
                  lambda ct, condition: _where(condition, 0.0, ct)])
def _where(condition, a, b, /):
    """a where the condition holds, else b;  ct_a = ct where it holds, else 0,  ct_b = ct where not, else 0"""
    return xp(condition).where(condition, a, b)


def where(condition, a, b):
    """a where the condition (bool, may be a NumPy array on any device) holds, else b. Broadcasts like NumPy."""
    return _where(on_device_of(condition, a, b), a, b)


def on_device_of(constant, *others):
    """A NumPy constant (a mask, ids) brought to where the Tensors are."""
    if isinstance(constant, (bool, list, tuple, np.generic)):
        constant = np.asarray(constant)
    for other in others:
        if isinstance(other, Tensor) and isinstance(constant, np.ndarray):
            return to_device(constant, other.device)
    return constant


def array(op, name, x):
    """An argument as a Tensor or array: a list or number becomes one; an error names what else came."""
    if isinstance(x, Tensor) or is_array(x):
        return x
    if isinstance(x, (list, tuple, bool, int, float, np.generic)):
        return _from_python(x)
    raise TypeError(f"[{op}] {name} is a Tensor, an array or a list of numbers: got {describe(x)}")


def number(op, name, x, kind=float):
    """A parameter as a Python number; one that asks for a gradient would not get it, and half an integer is none."""
    if isinstance(x, Tensor) and x.requires_grad:
        raise TypeError(f"[{op}] {name} is a number, not a Tensor that requires a gradient: pass {name}.item(), or "
                        "write the formula out")
    try:
        made = kind(_raw(x))
        if made == x or made != made:                    # "1" and 0.5 are no integers
            return made
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"[{op}] {name} is {'an integer' if kind is int else 'a number'}: got {describe(x)}")


def _comparison(name: str, symbol: str):
    def compare(a, b, /):
        return _either(name, a, b)
    compare.__name__, compare.__doc__ = name, f"a {symbol} b, elementwise: bool;  no gradient"
    return primitive(compare, broadcasts=True, samples=[sample((2, 3), (3,)), sample((2,), 0.5)])


greater, greater_equal = _comparison("greater", ">"), _comparison("greater_equal", ">=")
less, less_equal = _comparison("less", "<"), _comparison("less_equal", "<=")
equal, not_equal = _comparison("equal", "=="), _comparison("not_equal", "!=")
logical_and, logical_or = _comparison("logical_and", "and"), _comparison("logical_or", "or")


@primitive(samples=[sample((2, 3))])
def logical_not(x, /):
    """not x: bool;  no gradient"""
    return xp(x).logical_not(x)


@primitive(samples=[sample((2, 3))])
def isfinite(x, /):
    """True where x is neither NaN nor infinite;  no gradient"""
    return xp(x).isfinite(x)
