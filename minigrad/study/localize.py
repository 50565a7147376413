"""Which rule is wrong? `localize` checks every node of the graph that a function makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minigrad.backend.device import is_array, to_host
from minigrad.backend.random import get_rng_state, set_rng_state
from minigrad.study.check import Line, direction, dot, is_float, moved, relative
from minigrad.study.modules import ModuleWatcher
from minigrad.study.tape import caller
from minigrad.tape import Tensor, _raw, _set, gradients, no_grad


@dataclass
class WrongRule:
    """A rule that disagrees with its op: derivatives along a random direction, where it was called, in which module."""

    op: str
    argument: str
    analytic: float
    numeric: float
    line: str
    module: str
    problem: str = ""                                    # what the rule raised instead

    @property
    def error(self) -> float:
        """|analytic - numeric| over the larger."""
        return relative(self.analytic, self.numeric)

    def __str__(self) -> str:
        said = self.problem or (f"analytic {self.analytic:.8g}, numeric {self.numeric:.8g}, relative error "
                                f"{self.error:.2g}")
        return f"[{self.op}] the rule of {self.argument} is wrong: {said}; called at {self.line}" + (
            f" in {self.module}" if self.module else "")


@dataclass
class Localized:
    """What `localize` found: how many nodes were checked, the wrong rules, and what was passed over, with the reason.
    True if no rule is wrong."""

    nodes: int = 0
    wrong: list[WrongRule] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        by_rule: dict[tuple[str, str], list[WrongRule]] = {}
        for w in self.wrong:
            by_rule.setdefault((w.op, w.argument), []).append(w)
        count = len(by_rule)
        lines = [f"{self.nodes} nodes checked, " + (f"{count} wrong rule{'s' * (count > 1)}" if count else
                                                   "no wrong rule")]
        lines += [str(same[0]) + (f" (and {len(same) - 1} more nodes)" if same[1:] else "")
                  for same in by_rule.values()]
        lines += [f"not checked: {reason}" + (f" ({n} nodes)" if (n := self.skipped.count(reason)) > 1 else "")
                  for reason in dict.fromkeys(self.skipped)]
        return "\n".join(lines)


class _Recorder(ModuleWatcher):
    """Every recorded application of an op with the values it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, list, dict, list[bool], str, str]] = []

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        if out.node is not None:
            needs = [target is not None for target in out.node.targets]
            self.seen.append((op, [_raw(a) for a in args], params, needs, caller(), self.path))


def localize(f: Callable, inputs: Any = (), seed: int = 0) -> Localized:
    """Run f(*inputs) and check the rule of every node of its graph; names op, argument, line and module of a wrong one.

    f: any function, a model's loss for example; inputs: as for `check_grads`, floats among them get gradients. Each
    node's op is run again alone, in float64, at the values it saw, with the same parameters (so the same dropout), and
    each rule that its backward pass would use is compared with differences along a random direction. Where a value
    stands on a kink (relu at 0, max at a tie), a point beside it decides. A checkpoint has no rule of its own: it is
    named as passed over, and the nodes inside it are checked. Finds wrong first derivatives only. Changes nothing, but
    holds all that the graph computed until it is done.
    """
    given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
    args = [Tensor(x, requires_grad=True) if is_float(x) else x for x in given]
    state = get_rng_state()
    try:
        with _set(recording=True), _Recorder() as recorder:
            f(*args)
    finally:
        set_rng_state(state)
    found, rng = Localized(), np.random.default_rng(seed)
    with _set(watchers=(), composed=False), np.errstate(all="ignore"):    # what was recorded ran as itself
        for op, raws, params, needs, line, module in recorder.seen:
            if not hasattr(op, "arity"):                 # stands where a Primitive would
                found.skipped.append(f"[{op.name}] at {line}: it runs its function again, whose nodes are checked")
                continue
            found.nodes += 1
            _check_node(found, op, raws, params, needs, (line, module), rng)
    return found


def _aside(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A direction whose hundredth leaves signs as they are, and zeros on the positive side: within the domain of log
    and sqrt."""
    u = direction(x, rng)
    return np.where(x == 0.0, np.abs(u), u)


def _check_node(found: Localized, op: Any, raws: list, params: dict, needs: list[bool], where: tuple[str, str],
                rng: np.random.Generator) -> None:
    exact = [a.astype(np.float64) if is_array(a) and a.dtype.kind == "f" else a for a in raws]
    suspects, names = [i for i, need in enumerate(needs) if need], op.named(raws)
    for beside in (False, True):                         # at the values it saw, then close to them
        places = suspects
        if beside:
            exact = [moved(Tensor(a), _aside(to_host(a), rng), 0.01)._data if needs[i] else a
                     for i, a in enumerate(exact)]
        leaves = [Tensor(a, requires_grad=True) if needs[i] else a for i, a in enumerate(exact)]
        try:
            with _set(recording=True):
                y = op(*leaves, **params)
                seen = np.isfinite(to_host(y._data))
                v = rng.standard_normal(y.shape) * seen
                cts = gradients(y, [leaves[i] for i in places], Tensor(v, device=y.device))
        except Exception as error:                       # the engine's, on what the rule returned, or its own
            found.wrong.append(WrongRule(op.name, " or ".join(names[i] for i in places), np.nan, np.nan, *where,
                                         f"{type(error).__name__}: {error}"))
            return
        machine = float(np.finfo(y.dtype).eps)           # not float64's if the op is a cast
        eps, suspects = machine ** (1 / 3), []           # the step where truncation and rounding meet
        for i, ct in zip(places, cts):
            u = direction(to_host(exact[i]), rng)

            def at(h: float, i: int = i, u: np.ndarray = u, exact: list = exact) -> Any:
                with no_grad():
                    return op(*exact[:i], moved(Tensor(exact[i]), u, h), *exact[i + 1:], **params)._data

            line = Line(at, v)
            analytic, scale = dot(ct, u)
            good, numeric = line.agrees(analytic, scale, eps, min(eps, 0.01), 1e-14, machine)
            if good:
                continue
            clear = not abs(analytic - numeric) <= 0.01 * scale and not line.kinked(eps, scale, machine)
            decided = np.isfinite(numeric) and (np.isfinite(analytic) or seen.all())     # else it is 0 times infinity
            if decided and (beside or clear):
                found.wrong.append(WrongRule(op.name, names[i], analytic, numeric, *where))
            else:
                suspects.append(i)
        if not suspects:
            return
    found.skipped.append(f"[{op.name}] at {where[0]}: its values are not finite")
