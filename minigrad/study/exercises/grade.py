"""The grader: runs a student's function on the cases of an exercise and says in words what is wrong with its answers.

The right answers are those of minigrad's own ops (mg.vjp), and central differences of the forward agree with them
(tests/test_exercises.py). A wrong answer is first compared with the answers that known mistakes give, `Exercise.wrong`,
then looked at in general: number, shape, sign, a factor, a permutation of the axes, one row, the dtype.
"""

from __future__ import annotations

import importlib.util
import itertools
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.tape import Tensor, describe, vjp

RTOL, ATOL = 1e-7, 1e-9                                  # float64; what is wrong is wrong by far more


class NotWritten(Exception):
    """The blank is still there."""


class Wrong(Exception):
    """What is wrong, in words."""


class Raised(Wrong):
    """The function raised: so do some known mistakes, where the shapes do not fit."""


class Exercise:
    """One exercise: the file it lies in, the function to write, and what its answers are compared with.

    cases: dicts of the function's arguments, in its order. `forward(case)` gives (f, xs, ct): the answers are then the
    vjp of f at xs. Where the exercise is a forward itself, `right(case)` gives the answers. `wrong`: (words, function)
    pairs, each function a mistake people make, called as the student's. `factors(case)`: arrays or numbers, by name,
    that one forgets or has too many of. `memory(case)`: bytes that the function may not have in use at once.
    """

    def __init__(self, name: str, function: str, returns: Sequence[str], cases: Sequence[dict], *,
                 forward: Callable | None = None, right: Callable | None = None,
                 wrong: Sequence[tuple[str, Callable]] = (), factors: Callable = lambda case: {},
                 memory: Callable | None = None) -> None:
        self.name, self.function, self.returns, self.cases = name, function, tuple(returns), list(cases)
        self.forward, self.wrong, self.factors, self.memory = forward, list(wrong), factors, memory
        self.right = right or self._vjp

    def _vjp(self, case: dict) -> tuple:
        f, xs, ct = self.forward(case)                   # type: ignore[misc]
        cts = vjp(f, *xs)[1](ct)
        return tuple(c.numpy() for c in (cts if isinstance(cts, tuple) else (cts,)))

    def slope(self, case: dict, i: int, at: tuple, h: float = 1e-5) -> float | None:
        """Element `at` of answer i by central differences: <ct, f(x + h e) - f(x - h e)> / 2h; None without forward."""
        if self.forward is None:
            return None
        f, xs, ct = self.forward(case)
        both = []
        for step in (h, -h):
            moved = [np.array(x) for x in xs]
            moved[i][at] += step
            both.append(float((np.asarray(f(*moved)) * ct).sum()))
        return (both[0] - both[1]) / (2 * h)


# ------------------------------------------------------------------------------------------ running the function


def load(path: Path, function: str) -> Callable:
    """The function of that name in a student's file; Wrong says what keeps the file from being read."""
    spec = importlib.util.spec_from_file_location("exercise_" + path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise Wrong(f"the file does not read as Python: {error.msg}, line {error.lineno}") from error
    except (Exception, SystemExit) as error:             # exit() in a file of one's own is a mistake like any
        what = f"{type(error).__name__}: {error}{_line(error, str(path))}"
        raise Wrong(f"the file stops while it is read: {what}") from error
    if not callable(getattr(module, function, None)):
        raise Wrong(f"the file has no function {function}: keep the name, the grader calls it")
    return getattr(module, function)


def _line(error: BaseException, path: str) -> str:
    """", line N" of the innermost frame in the student's own file."""
    mine = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f", line {mine[-1].lineno}" if mine else ""


def _copied(case: dict) -> dict:
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in case.items()}


def _shapes(case: dict) -> str:
    return ", ".join(f"{k} {v.shape}" if isinstance(v, np.ndarray) else f"{k}={v}" for k, v in case.items())


def _call(function: Callable, case: dict, returns: Sequence[str]) -> tuple:
    """The answers to one case, as many as asked for and all of them arrays; or Wrong."""
    given = _copied(case)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")                  # a NaN is diagnosed in words below
        try:
            got = function(*given.values())
        except NotImplementedError as error:
            raise NotWritten from error
        except (Exception, SystemExit) as error:
            code = getattr(function, "__code__", None)   # none in np.add or a cached function
            where = _line(error, code.co_filename) if code else ""
            what = f"raises {type(error).__name__}: {error}{where}"
            raise Raised(f"{what}; called with {_shapes(case)}") from error
    for name, value in given.items():
        if isinstance(value, np.ndarray) and not np.array_equal(value, case[name], equal_nan=True):
            raise Wrong(f"writes into its argument {name}, which others may still need: make a new array instead of "
                        f"{name} += ... or {name}[...] = ...")
    if got is None:
        raise Wrong("returns None: the return is missing")
    answers = tuple(got) if isinstance(got, (tuple, list)) else (got,)
    if len(answers) != len(returns):
        plural = "s" if len(returns) > 1 else ""
        raise Wrong(f"must return {len(returns)} array{plural}, ({', '.join(returns)}): got {len(answers)}")
    for name, answer in zip(returns, answers):
        if isinstance(answer, Tensor):
            raise Wrong(f"{name} is a Tensor: write the rule with NumPy, on arrays")
        if not isinstance(answer, (np.ndarray, np.generic, float, int)) or np.asarray(answer).dtype.kind not in "fiu":
            raise Wrong(f"{name} must be an array of numbers: got {describe(answer)}")
    return tuple(np.asarray(a) for a in answers)


# -------------------------------------------------------------------------------------------------- the diagnosis


def same(a: Any, b: Any) -> bool:
    """Of one shape, and equal to rounding."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and np.allclose(a, b, RTOL, ATOL, equal_nan=True)


def diagnose(exercise: Exercise, function: Callable) -> None:
    """Nothing if the function is right; else NotWritten, or Wrong with the words."""
    names, words = exercise.returns, {}                  # words: what is wrong -> with which of the results
    rights = [exercise.right(case) for case in exercise.cases]
    answers, raised = [], None
    for case in exercise.cases:
        try:
            answers.append(_call(function, case, names))
        except Raised as error:
            answers.append(None)
            raised = raised or error
    for i, name in enumerate(names):
        bad = [k for k, (got, right) in enumerate(zip(answers, rights)) if got is None or not same(got[i], right[i])]
        if not bad:
            continue
        what = _known(exercise, [None if a is None else a[i] for a in answers], [r[i] for r in rights], i)
        if what is None and answers[bad[0]] is not None:
            what = _general(exercise, exercise.cases[bad[0]], answers[bad[0]], rights[bad[0]], i)
        if what is not None:
            words.setdefault(what, []).append(name)
    if words:
        raise Wrong("\n".join(f"{', '.join(which)}: {what}" for what, which in words.items()))
    if raised is not None:
        raise raised
    _check_dtypes(exercise, function)
    if exercise.memory is not None:
        _check_memory(exercise, function)


def _known(exercise: Exercise, got: list, right: list, i: int) -> str | None:
    """The words of a known mistake that gives exactly these answers in every case, and raises where they raise; or
    these but for the sign or a number that is missing or one too many, which are then named too."""
    factors = [{k: f for k, f in exercise.factors(case).items() if np.ndim(f) == 0} for case in exercise.cases]
    second = [([1.0] * len(got), ""), ([-1.0] * len(got), "; and the sign is flipped")]
    for name in set.intersection(*map(set, factors)):
        second.append(([f[name] for f in factors], f"; and the factor {name} is missing"))
        second.append(([1.0 / f[name] for f in factors], f"; and the factor {name} is one too many"))
    mistakes = []
    for what, function in exercise.wrong:
        theirs = [mistaken(function, case, i) for case in exercise.cases]
        if not all(t is None or same(t, r) for t, r in zip(theirs, right)):      # else it shows in other results only
            mistakes.append((what, theirs))
    for by, also in second:
        for what, theirs in mistakes:
            if all(same(n * g, t) if g is not None and t is not None else g is t for n, g, t in zip(by, got, theirs)):
                return what + also
    return None


def mistaken(function: Callable, case: dict, i: int) -> Any:
    """Result i of a known mistake, or None where it raises."""
    with np.errstate(all="ignore"):
        try:
            return _tuple(function(*_copied(case).values()))[i]
        except (ValueError, IndexError):
            return None


def _tuple(x: Any) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _general(exercise: Exercise, case: dict, answers: tuple, rights: tuple, i: int) -> str:
    """What is wrong with answer i to this case, whoever the student."""
    got, right = answers[i], rights[i]
    with np.errstate(all="ignore"):
        found = (_elsewhere(exercise, answers, rights, i) or _shape(got, right, np.shape(case.get("ct", ())))
                 or _sign_or_factor(got, right, exercise.factors(case)) or _permuted(got, right))
    if found is not None:
        return f"{found} ({_shapes(case)})"
    wrong = ~np.isclose(got, right, RTOL, ATOL)
    at = tuple(int(n) for n in np.argwhere(wrong)[0])
    finite = exercise.slope(case, i, at)
    what = f"{wrong.sum()} of {wrong.size} elements are wrong"
    if wrong.ndim > 1 and not wrong.all():
        rows = np.flatnonzero(wrong.any(axis=tuple(range(1, wrong.ndim))))
        if len(rows) < wrong.shape[0]:
            what += f", all at first index {', '.join(map(str, rows))}"
    witness = "" if finite is None else f" (central differences of the forward: {finite:.6g})"
    return f"{what}; at {at} you have {got[at]:.6g}, right is {right[at]:.6g}{witness} ({_shapes(case)})"


def _shape(got: np.ndarray, right: np.ndarray, ct: tuple[int, ...]) -> str | None:
    g, r = got.shape, right.shape
    if g == r:
        if np.isfinite(right).all() and not np.isfinite(got).all():
            return f"has {np.isnan(got).sum()} NaN and {np.isinf(got).sum()} infinite elements"
        return None
    lead = len(g) - len(r)
    if lead >= 0 and all(n in (1, m) for n, m in zip(r, g[lead:])):
        axes = (*range(lead), *(j + lead for j, n in enumerate(r) if n == 1 and g[j + lead] != 1))
        if axes and all(g[a] == 1 for a in axes):
            return f"has an axis of length 1 too many: got {g}, must be {r}"
        if len(g) > len(ct) or g[:lead] != ct[len(ct) - len(g):][:lead]:         # no axes of the output's
            return f"has the wrong shape: got {g}, must be {r}"
        said = f"axis {axes[0]}" if len(axes) == 1 else f"axes {axes}"
        return (f"the sum over {said} is missing: an array of {r} was repeated there to {g}, so the copies' cotangents "
                "add")
    if tuple(n for n in g if n != 1) == tuple(n for n in r if n != 1):
        return f"has the right number of elements but the wrong shape: got {g}, must be {r}; keepdims=True or a reshape"
    if g == r[::-1] and len(r) == 2:
        return f"is transposed: got {g}, must be {r}"
    if sorted(g) == sorted(r):
        return f"has its axes in the wrong order: got {g}, must be {r}"
    if len(g) < len(r):
        return f"has lost axes: got {g}, must be {r}; sum only where the argument was repeated"
    return f"has the wrong shape: got {g}, must be {r}"


def _sign_or_factor(got: np.ndarray, right: np.ndarray, factors: dict) -> str | None:
    if not got.any():
        return "is all zeros"
    if same(got, -right):
        return "the sign is flipped"
    for sign, also in ((1.0, ""), (-1.0, "; and the sign is flipped")):
        for name, factor in factors.items():
            if same(got * factor, sign * right):
                return f"the factor {name} is missing{also}"
            if same(got, sign * right * factor):
                return f"the factor {name} is one too many{also}"
            if same(got * factor * factor, sign * right):
                return f"divides by {name} where it must multiply{also}"
            if same(got, sign * right * factor * factor):
                return f"multiplies by {name} where it must divide{also}"
    ratio = (got / right)[right != 0]
    if ratio.size > 1 and np.allclose(ratio, ratio[0], RTOL, ATOL):
        return f"is {ratio[0]:.6g} times the right answer"
    return None


def _elsewhere(exercise: Exercise, answers: tuple, rights: tuple, i: int) -> str | None:
    for j, name in enumerate(exercise.returns):
        if j != i and same(answers[i], rights[j]):
            return f"this is {name}: are the results in the order ({', '.join(exercise.returns)})?"
    return None


def _permuted(got: np.ndarray, right: np.ndarray) -> str | None:
    if right.ndim > 1:
        for axes in itertools.permutations(range(right.ndim)):
            if axes != tuple(range(right.ndim)) and same(right.transpose(axes), got):
                return "is transposed" if right.ndim == 2 else f"is the right answer with its axes permuted by {axes}"
    return None


def _check_dtypes(exercise: Exercise, function: Callable) -> None:
    """float32 in, float32 out: an engine that casts back would hide that the rule computes in another dtype."""
    case = {k: v.astype(np.float32) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v
            for k, v in exercise.cases[0].items()}
    for name, answer in zip(exercise.returns, _call(function, case, exercise.returns)):
        if answer.dtype != np.float32:
            raise Wrong(f"{name}: the numbers are right, but float32 arguments must give float32: got {answer.dtype}. "
                        "A NumPy float64 scalar or array is in the way (np.sqrt(2), np.zeros(n), np.float64)")


def _check_memory(exercise: Exercise, function: Callable) -> None:
    case, most, what = exercise.memory()                 # type: ignore[misc]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        _call(function, case, exercise.returns)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    if peak > most:
        raise Wrong(f"the numbers are right, but it holds {peak:,} bytes at once, more than {most:,}: {what} "
                    f"({_shapes(case)})")
