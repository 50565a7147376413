"""Are the derivatives of a function right? (`localize.py` asks it of every node of a graph.)

Compares a directional derivative, <v, J u> for random u and v, with a central difference (phi(h) - phi(-h)) / 2h
of phi(h) = <v, f(x + h u)>, in float64. One wrong element of J moves the product, so two runs of f stand for a whole
Jacobian. A direction has steps of the size of its elements, so that the logarithm of a small number stays defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minigrad.backend.device import is_array, to_host
from minigrad.backend.random import get_rng_state, set_rng_state
from minigrad.ops.shape import concatenate, reshape
from minigrad.tape import Tensor, _raw, describe, jvp, no_grad, vjp


class GradientError(AssertionError):
    """What `check_grads` raises: a derivative and the differences of the function disagree."""


# ------------------------------------------------------------------------------- one line through the function


@dataclass
class Line:
    """phi(h) along a direction: `at(h)` gives the output there, raw; v is its cotangent on the host, and what it has a
    0 for (an infinity that a mask put there) is not looked at."""

    at: Callable[[float], Any]
    v: np.ndarray

    def value(self, h: float) -> tuple[float, float]:
        """phi(h), and the size of the terms it sums, which bounds its rounding."""
        terms = np.multiply(self.v, to_host(self.at(h)), where=self.v != 0.0, out=np.zeros(self.v.shape))
        return float(terms.sum()), float(np.abs(terms).sum())

    def difference(self, h: float) -> tuple[float, float]:
        (a, size), (b, _) = self.value(h), self.value(-h)
        return (a - b) / (2.0 * h), size / h

    def agrees(self, analytic: float, scale: float, eps: float, rtol: float, atol: float,
               machine: float = 2.0**-52) -> tuple[bool, float]:
        """Whether some difference confirms the derivative, and the best there is: a step of eps; Richardson's
        extrapolation from longer ones, for what bends little but rounds much; a short one, for a kink close by."""
        best = np.nan
        for h, extrapolate in ((eps, False), (16.0 * eps, True), (eps / 16.0, False)):
            numeric, size = self.difference(h)
            if extrapolate:
                numeric = (4.0 * self.difference(h / 2.0)[0] - numeric) / 3.0
            if np.isfinite(numeric) and not abs(numeric - analytic) >= abs(best - analytic):
                best = numeric
            close = rtol * (max(abs(numeric), abs(analytic)) + 0.01 * scale)     # scale: what cancels in the sum
            if abs(numeric - analytic) <= atol + close + 4.0 * machine * size:
                return True, numeric
        return False, best

    def kinked(self, eps: float, scale: float, machine: float = 2.0**-52) -> bool:
        """Whether the derivatives to the left and to the right differ, or the value jumps."""
        h = eps / 16.0
        (left, size), (here, _), (right, _) = (self.value(h * side) for side in (-1, 0, 1))
        rise, rounding = abs(right - left), 16.0 * machine * size
        bends = abs(right - 2.0 * here + left) > 1e-3 * max(h * scale, rise) + rounding
        return bends or rise > 8.0 * h * abs(self.difference(eps)[0]) + rounding     # 2 h of it where it is smooth


def direction(x: Any, rng: np.random.Generator) -> np.ndarray:
    """Random numbers of x's shape, each of the size of x's element (a zero's: small beside the others'), but at most 1,
    unless that were lost in the element's rounding."""
    size = np.abs(np.where(np.isfinite(x), x, 0.0))
    top = float(size.max(initial=0.0)) or 1.0            # scaled, as a square of 1e200 would overflow
    usual = top * float(np.sqrt(np.mean(np.square(size / top)))) if size.size else 0.0
    reach = np.where(size > 0.0, np.minimum(size, 1.0), 1e-4 * usual or 1.0)
    return rng.standard_normal(np.shape(x)) * np.maximum(reach, 1e-6 * size)


def moved(x: Tensor, u: np.ndarray, h: float) -> Any:
    return x + Tensor(h * u, device=x.device)  # type: ignore[operator]


def dot(a: Any, b: np.ndarray) -> tuple[float, float]:
    """<a, b> and the sum of its terms' sizes."""
    terms = np.multiply(to_host(_raw(a)), b, where=b != 0.0, out=np.zeros(b.shape))
    return float(terms.sum()), float(np.abs(terms).sum())


def is_float(x: Any) -> bool:
    return isinstance(x, float) or getattr(getattr(_raw(x), "dtype", None), "kind", "") == "f"


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-300)


# ------------------------------------------------------------------------------------------------- a function


def check_grads(f: Callable, inputs: Any, order: int = 2, modes: Sequence[str] = ("vjp", "jvp"), eps: float = 6e-6,
                rtol: float = 1e-5, atol: float = 1e-7, seed: int = 0) -> bool:
    """Compare the derivatives of f, of orders 1 to `order`, with central differences; True, or GradientError.

    f(*inputs) -> a Tensor or a tuple of them; inputs: one Tensor, array or number, or a list of them. Floats are copied
    to float64, all else is held constant and passed as it is. modes: "vjp" is reverse mode, "jvp" is `mg.jvp`; given
    both, <v, J u> must also be the same from both. Higher orders check the derivative of the one below.
    eps is the step (about the cube root of float64's precision). |analytic - numeric| may be rtol times their size and
    a hundredth of their terms', and atol (of a direction whose largest element is below 1: as much less). Inputs,
    `.grad` and the stream of random numbers stay as they were.

    f must be differentiable where it is asked: at a kink (relu at 0, max at a tie) no difference has the derivative
    that the rule chose. Before it accuses, a second direction and longer and shorter steps are tried; an error at a
    kink says that the left and right derivatives differ. Choose inputs away from it.
    Infinities among the outputs, such as a mask puts in, are not looked at. GradientError also for an f whose second
    call gives another value; ValueError and TypeError for what has no derivative: no float input, an integer output,
    a NaN.
    """
    if not set(modes) <= {"vjp", "jvp"} or not modes or isinstance(modes, str):
        raise ValueError(f'[check_grads] modes are "vjp" and "jvp", in a tuple: got {modes!r}')
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise ValueError(f"[check_grads] order is an integer of at least 1: got {order!r}")
    if not (eps > 0.0 and rtol >= 0.0 and atol >= 0.0):
        raise ValueError(f"[check_grads] eps is above 0, rtol and atol are not below: got {eps!r}, {rtol!r}, {atol!r}")
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    places = [i for i, x in enumerate(given) if is_float(x)]
    if not places:
        raise ValueError("[check_grads] at least one input must be of floats: got "
                         + (", ".join(map(describe, given)) or "none"))
    xs = [Tensor(given[i], dtype=np.float64) for i in places]

    def call(*floats: Tensor) -> Tensor:
        args = [x.copy() if is_array(x) else x for x in given]
        for i, x in zip(places, floats):
            args[i] = x
        return _joined(f(*args))

    state = get_rng_state()
    try:
        with no_grad(), np.errstate(all="ignore"):
            a, b = (to_host(call(*(x.to(np.float64) for x in xs))._data) for _ in range(2))
        if not np.array_equal(a, b, equal_nan=True):
            raise GradientError(f"[check_grads] {_name(f)} is not deterministic: two calls on the same inputs differ; "
                                "fix its random numbers (mg.manual_seed in it, model.eval()) and let it keep no state")
        if np.isnan(a).any() or a.size and np.isinf(a).all():
            raise ValueError(f"[check_grads] {_name(f)} is not finite at these inputs, so it has no derivative there: "
                             "choose others")
        named = _argument_names(f, places, xs)
        rng, g = np.random.default_rng(seed), call
        for k in range(1, order + 1):
            g = _check_one(g, xs, named, f"{_name(f)}, order {k}", modes, eps, rtol, atol, rng)
    finally:
        set_rng_state(state)
    return True


def _check_one(g: Callable, xs: list[Tensor], named: list[str], what: str, modes: Sequence[str], eps: float,
               rtol: float, atol: float, rng: np.random.Generator) -> Callable:
    """Check the first derivative of g; gives that derivative as a function of the same xs, for the next order."""
    with no_grad(), np.errstate(all="ignore"):
        seen = np.isfinite(to_host(g(*xs)._data))        # all but infinities, which a mask put there
    for i, (x, name) in enumerate(zip(xs, named)):
        failed: dict[str, str] = {}
        for _ in range(2):                               # a wrong derivative is wrong in nearly every direction
            v, u = rng.standard_normal(seen.shape) * seen, direction(to_host(x._data), rng)

            def at(h: float, i: int = i, x: Tensor = x, u: np.ndarray = u) -> Any:
                with no_grad():
                    return g(*xs[:i], moved(x, u, h), *xs[i + 1:])._data

            line, found = Line(at, v), {}
            reach = min(float(np.abs(u).max(initial=0.0)), 1.0)      # a direction of small elements has small products
            for mode in [m for m in modes if not failed or m in failed]:
                with np.errstate(all="ignore"):
                    if mode == "vjp":
                        analytic, scale = dot(_tuple(vjp(g, *xs)[1](_like(v, x)))[i], u)
                    else:
                        along = [_like(u if j == i else np.zeros(z.shape), x) for j, z in enumerate(xs)]
                        analytic, scale = dot(jvp(g, xs, along)[1], v)
                    found[mode] = analytic
                    good, numeric = line.agrees(analytic, scale, eps, rtol, atol * reach)
                    kink = not good and line.kinked(eps, scale)
                failed.pop(mode, None)
                if not good:
                    failed[mode] = (
                        f"[check_grads] {what}, {mode}: the derivative by {name} is wrong: analytic {analytic:.8g}, "
                        f"numeric {numeric:.8g}, relative error {relative(analytic, numeric):.2g}"
                        + ("\nleft and right derivatives differ here: this may be a kink, where there is no derivative"
                           if kink else "" if np.isfinite(numeric) else
                           "\nno difference is finite: f is not, close to these inputs; choose others"))
            if not failed:
                break
        if failed:
            raise GradientError(next(iter(failed.values())))
        if len(found) == 2 and not abs(found["vjp"] - found["jvp"]) <= 1e-9 * scale + 1e-3 * atol:
            raise GradientError(f"[check_grads] {what}: vjp and jvp disagree on the derivative by {name}: "
                                f"{found['vjp']:.12g} and {found['jvp']:.12g}")
    v, us = rng.standard_normal(seen.shape) * seen, [direction(to_host(x._data), rng) for x in xs]
    if "vjp" in modes:
        return lambda *floats: _joined(_tuple(vjp(g, *floats)[1](_like(v, xs[0]))))
    return lambda *floats: jvp(g, floats, [_like(u, xs[0]) for u in us])[1]


def _like(array: np.ndarray, x: Tensor) -> Tensor:
    return Tensor(array, device=x.device)


def _tuple(x: Any) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _joined(ys: Any) -> Tensor:
    """All outputs as one Tensor, checked."""
    ys = _tuple(ys)
    if not ys:
        raise TypeError("[check_grads] f returns a Tensor or a tuple of them: got an empty one")
    for y in ys:
        if not isinstance(y, Tensor):
            raise TypeError(f"[check_grads] f returns a Tensor or a tuple of them: got {describe(y)}")
        if y.dtype.kind != "f":
            raise TypeError(f"[check_grads] an output of {y.dtype} has no derivative; return the float ones only")
        if y.dtype != np.float64:
            raise TypeError(f"[check_grads] f makes {y.dtype} of float64 inputs: differences are lost in its rounding; "
                            "let it keep the dtype of its inputs")
    return ys[0] if len(ys) == 1 else concatenate([reshape(y, (-1,)) for y in ys])


def _name(f: Any) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _argument_names(f: Callable, places: Sequence[int], xs: Sequence[Tensor]) -> list[str]:
    try:
        names = [p.name for p in inspect.signature(f).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        names = []
    return [f"argument {i}" + (f" ({names[i]})" if i < len(names) else "") + f", {x.shape}"
            for i, x in zip(places, xs)]
