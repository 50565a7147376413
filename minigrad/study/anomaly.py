"""detect_anomaly: which op made the first NaN or infinity, where, from what, and what to do about it."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend.device import is_array, to_host, xp
from minigrad.study.tape import Modules, caller, passes
from minigrad.tape import Node, Part, Tensor, _raw, describe


class AnomalyError(FloatingPointError, RuntimeError):
    """What `detect_anomaly` raises."""


class detect_anomaly(Modules):
    """`with mg.detect_anomaly():` raises at the first op that makes a NaN or infinity, forward or backward. Its
    AnomalyError names the op, the line that called it and its module, the arguments with the range of their values, and
    where it is known the cause, with a remedy.

    An infinity that was put in (the -inf of a mask) is not reported. Kept inputs and outputs are fingerprinted, so that
    a write through any old view of them is caught at backward, on every device. Slow; for debugging.
    """

    def __enter__(self) -> Any:
        super().__enter__()
        self._quiet = np.errstate(all="ignore")          # this names what NumPy would only warn of
        self._quiet.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._quiet.__exit__(*error)

    def __init__(self) -> None:
        super().__init__()
        self.prints: weakref.WeakKeyDictionary[Node, list[int]] = weakref.WeakKeyDictionary()
        self.modules: weakref.WeakKeyDictionary[Node, str] = weakref.WeakKeyDictionary()
        self.came = ""                                   # where the first NaN entered, if no op made it
        self.through = ""                                # the rule that runs, where rules are recorded themselves
        self.reached: set[int] = set()                   # indices of nodes that a rule gave a finite cotangent

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        node, at = out.node, caller() + (f" in {self.path}" if self.path else "")
        named = [(name, a) for name, a in zip(op.named(args), args) if a is not None]
        for what, kind in _KINDS:                        # an op outside the tape may make infinities: a mask
            had = [(name, a) for name, a in named if _has(a, what)]
            if _has(out, what) and not had and (node is not None or what == "isnan"):
                during = self.through if passes() else ""        # an error may have ended the pass that it names
                raise AnomalyError(
                    f"[{op.name}] made {kind} in the {during or 'forward pass'} at {at}: "
                    + ", ".join(f"{name} {described(a)}" for name, a in named)
                    + _because(cause(op.name, {name: _raw(a) for name, a in named}, what, out.dtype)))
            if had and what == "isnan" and not self.came:
                name, a = had[0]
                self.came = f"the first NaN came with an input: {name} {described(a)} of [{op.name}] at {at}"
        if node is not None:
            node.line = node.line or caller()
            self.prints[node], self.modules[node] = _fingerprints(node), self.path

    def started(self, y: Tensor) -> None:
        if _has(y, "isnan") or _has(y, "isinf"):
            came = self.came if _has(y, "isnan") else ""
            came = came or "no watched op made it: it came with an input"
            raise AnomalyError(f"[backward] starts at {described(y)}; {came}")

    def pulling(self, node: Node, ct: Any) -> None:
        if self.prints.get(node, []) != (_fingerprints(node) if node in self.prints else []):
            node.refuse_stale()
        for what, kind in _KINDS:                        # each was finite when it came, or `pulled` would have raised
            if _has(ct, what) and node.index in self.reached:
                raise AnomalyError(f"[{node.name}] the cotangents that reached it add up to {kind}{self._where(node)}"
                                   + _because(_largest(ct.dtype, backward=True)))
            if _has(ct, what):
                raise AnomalyError(f"[{node.name}] its cotangent, {described(ct)}, came with {kind}: the pass was "
                                   f"given it{self._where(node)}")
        self.reached.discard(node.index)
        self.through = f"backward pass of [{node.name}]{node.where()}, by a rule"

    def pulled(self, node: Node, ct: Any, target: Any, c: Any) -> None:
        c = c.ct if isinstance(c, Part) else c
        for what, kind in _KINDS:
            if _has(c, what) and not _has(ct, what):
                kept = [(name, a) for name, a in zip(node.primitive.named(node.arrays or ()), node.arrays or ())
                        if a is not None] + [("y", y) for y in [node.y] if y is not None]
                raise AnomalyError(
                    f"[{node.name}] made {kind} in the backward pass{self._where(node)}: from cotangent {described(ct)}"
                    + "".join(f" and {name} {described(a)}" for name, a in kept)
                    + _because(cause(node.name, dict(kept), what, c.dtype, backward=True)))
        if isinstance(target, Node):
            self.reached.add(target.index)

    def finished(self, found: dict[Any, Any]) -> None:
        self.through = ""
        for target, ct in found.items():
            for what, kind in _KINDS:
                if isinstance(target, Tensor) and _has(ct, what):
                    named = getattr(target, "path", "") or f"a leaf {target.shape}"
                    raise AnomalyError(f"[backward] the cotangents of {named} add up to {kind}"
                                       + _because(_largest(ct.dtype, backward=True)))

    def _where(self, node: Node) -> str:
        module = self.modules.get(node, "")
        return node.where() + (f" in {module}" if module else "")


_KINDS = (("isnan", "a NaN"), ("isinf", "an infinity"))


def cause(name: str, given: dict[str, Any], what: str, dtype: np.dtype, backward: bool = False) -> str:
    """What makes a NaN or infinity in the op `name` from these arguments (in the backward pass: from what its node
    kept, y among it), with a remedy; "" if that is not known."""
    given = {key: np.asarray(to_host(a), np.float64) for key, a in given.items()
             if is_array(a) or isinstance(a, (int, float))}
    zero, infinite = ({key for key, a in given.items() if test(a).any()} for test in (lambda a: a == 0, np.isinf))
    negative = {key for key, a in given.items() if (a < 0).any()}
    nan = what == "isnan"
    first, y = next(iter(given), ""), given.get("y")
    if name in ("log", "log1p") and not infinite:
        bad = given[first] + (1 if name == "log1p" else 0)
        if nan:
            return "the log of a negative number: clip x first, or look why it is negative" if (bad < 0).any() else ""
        return ("the derivative of the log is infinite at 0" if backward else "the log of 0 is -inf") + (
            ": add a small number to x, or clip it; for the log of a softmax use F.log_softmax")
    if name == "sqrt" and y is not None and backward and (y == 0).any():
        return "the derivative of the square root is infinite at 0: add a small number under the root"
    if name == "sqrt" and "x" in negative:
        return "the square root of a negative number"
    if name == "divide" and "b" in zero:
        return "division by 0: add a small number to b, or replace its zeros with mg.where before the division"
    if name == "power" and nan and "a" in negative:
        return ("the derivative by b is ct y log a, and a has negative numbers: detach b" if backward
                else "a negative number to a fractional power")
    if name == "power" and "a" in zero and (backward or "b" in negative):
        return ("the derivative of a^b is infinite at 0 for b < 1: add a small number to a" if backward
                else "0 to a negative power: add a small number to a")
    if "softmax" in name and first in infinite:
        if (given[first] == np.inf).any():
            return "a score of +inf has no softmax"
        return ('an empty softmax row, -inf everywhere: let it see a key, or F.masked_softmax(x, visible, '
                'empty_rows="zeros")')
    if name in ("exp", "expm1") and not nan and not infinite and not backward:
        return (f"e^x exceeds {dtype}'s largest, {_top(dtype)}, from x = {np.log(float(np.finfo(dtype).max)):.4g} on: "
                "subtract the maximum first (F.softmax and F.logsumexp do), or clip x")
    if nan and infinite and name in ("add", "subtract", "sum", "mean", "cumsum"):
        return "infinity minus infinity; in a softmax: a row that is -inf everywhere"
    if nan and infinite and name == "divide" and not backward:
        return "infinity over infinity"
    if nan and infinite and (backward or any(a != b for a in zero for b in infinite)):
        return ("0 times infinity: the infinity was there already; choose with mg.where before the op that makes it, "
                "not after")
    return "" if nan or infinite else _largest(dtype, backward)


def _largest(dtype: np.dtype, backward: bool) -> str:
    """An overflow: nothing that came in was infinite."""
    remedy = ""
    if dtype == np.float16:
        remedy = ": compute this in float32, or scale the loss (loss scaling)" + (", here by less" if backward else "")
    return f"an overflow: {dtype}'s largest number is {_top(dtype)}{remedy}"


def _top(dtype: np.dtype) -> str:
    return "65504" if dtype == np.float16 else f"{float(np.finfo(dtype).max):.4g}"


def _because(said: str) -> str:
    return f"; {said}" if said else ""


def described(x: Any) -> str:
    """Shape, dtype, parameter path, the range of the finite values, how many are not."""
    x, path = _raw(x), getattr(x, "path", "")
    if not is_array(x) or not x.size or x.dtype.kind not in "fiu":
        return describe(x)
    finite = x[xp(x).isfinite(x)]
    said = f" in [{float(finite.min()):.4g}, {float(finite.max()):.4g}]" if finite.size else ""
    counts = {"NaN": int(xp(x).isnan(x).sum()), "infinite": int(xp(x).isinf(x).sum())}
    bad = " and ".join(f"{n} {kind}" for kind, n in counts.items() if n)
    return f"{path} {describe(x)}".strip() + said + (f" with {bad}" if bad else "")


def _has(x: Any, what: str) -> bool:
    x = _raw(x)
    if is_array(x):
        return x.dtype.kind == "f" and bool(getattr(xp(x), what)(x).any())
    return isinstance(x, float) and bool(getattr(np, what)(x))


def _fingerprints(node: Node) -> list[int]:
    kept = [*(node.arrays or ()), node.y]
    return [zlib.crc32(np.ascontiguousarray(to_host(a)).data) if is_array(a) and a.size else 0 for a in kept]
