"""A tape in words: what print(tape), tape.why(x), tape.tree() and tape.dot() say."""

from __future__ import annotations

import functools
import re
from typing import Any

from minigrad.backend.device import is_array
from minigrad.tape import describe


def formula(op: Any) -> tuple[str, str, str]:
    """(formula, rule, equation number or "") of a primitive, read from its docstring: "FORMULA;  RULE", where RULE is
    "ct_a = ...,  ct_b = ..." or "no gradient"; a blank line ends it. An equation's number is in brackets: (A.10.7)."""
    return _parse(op.__doc__ or "")


@functools.cache
def _parse(doc: str) -> tuple[str, str, str]:
    what, _, how = (" ".join(part.split()) for part in re.split(r"\n\s*\n", doc)[0].partition(";  "))
    number = re.search(r"\((A\.10\.\d+(?: to A\.10\.\d+)?)\)", f"{what} {how}")
    return what, how, number.group(1) if number else ""


def shown(op: Any, params: dict[str, Any]) -> dict[str, str]:
    """The parameters worth showing: those that are not at their defaults."""
    defaults = getattr(op, "defaults", {})
    return {name: short(value) for name, value in params.items()
            if not (name in defaults and type(value) is type(defaults[name]) and not is_array(value)
                    and value == defaults[name])}


def short(value: Any) -> str:
    """A parameter in a few characters."""
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(short, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, slice):
        return ":".join("" if v is None else str(v) for v in (value.start, value.stop))
    if value is Ellipsis:
        return "..."
    return f"{value:.6g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else describe(value)


def referred(tape: Any, reference: Any) -> str:
    """A reference in a word: 12, blocks.0.norm1.weight, outside [exp], 2.0, or - for an argument not given."""
    kind, which = reference
    if kind == "leaf":
        return tape.leaves[which].name
    if kind == "outside":
        return f"outside [{which}]"
    return "-" if which is None else str(which)


def cut(said: str, width: int) -> str:
    return said if len(said) <= width else said[:width - 1].rstrip() + "…"


def table(tape: Any) -> str:
    """A row per node, in creation order; "released" once the backward pass has run its rules."""
    rows = [("", "op", "from", "formula", "eq", "shape", "dtype", "on", "kept", "line", "module")]
    for node, r in zip(tape.nodes, tape.records):
        came = [referred(tape, source) for _, source in r.inputs if source != ("constant", None)]
        rows.append((str(r.number), r.name, cut(" ".join(came), 30), cut(r.formula, 24),
                     r.equation.replace(" to A.10.", "-"), str(r.shape).replace(" ", ""), str(r.dtype),
                     f"{r.device}/{r.backend}", f"{r.bytes_kept:,} B" + (" released" if node.targets is None else ""),
                     r.line, r.module))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths) if w).rstrip() for row in rows)
