"""A tape in words: what print(tape), tape.why(x), tape.tree() and tape.dot() say."""

from __future__ import annotations

import functools
import html
import os
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
    """A parameter or a few numbers in few characters."""
    if isinstance(value, list):
        return f"[{', '.join(map(short, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(short, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        return ":".join("" if v is None else str(v) for v in (value.start, value.stop))
    if value is Ellipsis:
        return "..."
    return f"{value:.6g}" if isinstance(value, float) else repr(value) if isinstance(value, str) else describe(value)


def rule_of(rule: str, argument: str) -> str:
    """Of a rule the part for one argument, after the definitions it uses: "with g = ct weight, ct_x = ...". All of it
    if the argument has no part of its own."""
    shared, *parts = re.split(r",? (?=ct_\w+ = )", " " + rule)
    mine = next((part for part in parts if part.startswith(f"ct_{argument.split('[')[0]} =")), None)
    if mine is None:
        return rule
    uses = any(re.search(rf"\b{name}\b", mine) for name in re.findall(r"(\w+) =", shared))
    return f"{shared.strip()}, {mine}" if uses else mine


def referred(tape: Any, reference: Any, module: str = "") -> str:
    """A reference in a word: 12, blocks.0.norm1.weight (.weight within blocks.0.norm1), [exp] for a node outside the
    tape, 2.0, or - for an argument not given."""
    kind, which = reference
    if kind == "leaf":
        name = tape.leaves[which].name
        return name[len(module):] if module and name.startswith(module + ".") else name
    return f"[{which}]" if kind == "outside" else "-" if which is None else str(which)


def cut(said: str, width: int) -> str:
    return said if len(said) <= width else said[:width - 1].rstrip() + "…"


def rows(tape: Any) -> list[tuple[str, ...]]:
    """The table's head and a row per node; columns that would be empty are left out."""
    made = [("", "op", "from", "formula", "eq", "shape", "dtype", "on", "kept", "line", "module")]
    for node, r in zip(tape.nodes, tape.records):
        came = " ".join(referred(tape, source, r.module) for _, source in r.inputs if source != ("constant", None))
        params = [(name, value.replace(" ", "")) for name, value in r.params.items() if value != str(r.shape)]
        said = " ".join([r.formula.partition(" (A.10")[0], *(
            value if len(params) == 1 else f"{name}={value}" for name, value in params)])
        made.append((str(r.number), r.name, cut(came, 16), cut(said, 23), r.equation.replace(" to A.10.", "-"),
                     str(r.shape).replace(" ", ""), str(r.dtype), f"{r.device}/{r.backend}",
                     f"{r.bytes_kept:,} B" + (" released" if node.targets is None and r.bytes_kept else ""),
                     os.path.basename(r.line), r.module))
    used = [any(row[i] for row in made[1:]) or made[0][i] not in ("eq", "module") for i in range(len(made[0]))]
    return [tuple(cell for cell, use in zip(row, used) if use) for row in made]


def table(tape: Any) -> str:
    """print(tape): a row per node, in creation order. "from": the nodes by number and leaves by name that were its
    arguments; "kept": the bytes it held for its rules, "released" once they ran."""
    lines = rows(tape)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in lines)


def html_table(tape: Any) -> str:
    head, *body = ["".join(f"<{'td' if i else 'th'} style='text-align:left;white-space:nowrap'>{html.escape(cell)}"
                           f"</{'td' if i else 'th'}>" for cell in row) for i, row in enumerate(rows(tape))]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def where(record: Any) -> str:
    return ", ".join(part for part in (record.module, record.line) if part)


# --------------------------------------------------------------------------------------------------------- why


def why(tape: Any, target: Any, steps: int | None) -> str:
    """The cotangents that reached `target`, a reference, in the last backward pass that did."""
    pulls = tape.pulls
    reaching = [p for p in pulls if any(r.target == target for r in p.results) or ("node", p.number) == target]
    if not reaching:
        raise ValueError(f"[Tape.why] no backward pass on this tape reached {_named(tape, target)}: "
                         + ("it does not lead there" if pulls else "call backward inside `with mg.Tape()`"))
    outermost = min(p.depth for p in reaching)
    run = [p for p in reaching if p.depth == outermost][-1].run
    needed = {target}
    chain: list[tuple[Any, list]] = []                   # the pulls on the way, and of each the results on the way
    arrivals: dict[Any, list] = {}                       # what reached each target, by whom
    for p in reversed([p for p in pulls if p.run == run]):           # from the leaves to where the pass began
        used = [r for r in p.results if r.target in needed]
        for r in used:
            arrivals.setdefault(r.target, []).insert(0, (p, r))
        if used or ("node", p.number) == target:
            chain.insert(0, (p, used))
            if p.number is not None:
                needed.add(("node", p.number))
    total, came = _total(tape, target, chain, arrivals), arrivals.get(target, [])
    lines = [f"{_named(tape, target)}: its {'gradient' if target[0] == 'leaf' else 'cotangent'} has {total}"]
    if len(came) > 1:
        lines += [f"it is the sum of {len(came)}:"] + [f"    by {_op(p)}, {_values(r.ct)}" for p, r in came]
    shown = chain if steps is None else chain[max(0, len(chain) - steps):]
    trunk = chain[:len(chain) - len(shown)]
    first = chain[0][0]
    lines.append(f"backward pass {run} begins at {_op(first)} with a cotangent of {_values(first.ct)}")
    if trunk:
        norms = [p.ct.norm for p, _ in trunk]
        names = [p.name for p, _ in trunk]
        listed = " ".join(names if len(names) < 9 else [*names[:4], "…", *names[-4:]])
        lines.append(f"… {len(trunk)} steps first: {listed}; norms {min(norms):.3g} to {max(norms):.3g}; "
                     "tape.why(x, steps=None) tells all")
    for p, used in shown:
        record = None if p.number is None else tape.records[p.number]
        lines.append(f"{_op(p)}  " + ("" if record is None else f"{record.formula}  ({where(record)})"))
        joined = arrivals.get(("node", p.number), [])
        lines.append(f"    ct {p.ct.shape}, {_values(p.ct)}" + (
            f", the sum of {len(joined)}: from {', '.join(_op(q) for q, _ in joined)}" if len(joined) > 1 else ""))
        inputs = [] if record is None else list(record.inputs)
        for r in p.results:                              # in the order of the arguments
            argument = next((argument for argument in inputs if argument[1] == r.target), None)
            rule = "a rule"
            if record is not None and argument is not None:
                inputs.remove(argument)
                rule = rule_of(record.rule, argument[0])
            if any(r is u for u in used):
                summed = f", summed over axes {', '.join(map(str, r.axes))}" if r.axes else ""
                lines.append(f"    {rule}{summed}  ->  {_named(tape, r.target)}, {_values(r.ct)}"
                             + (", added to what had come" if r.added else ""))
    return "\n".join(lines)


def _total(tape: Any, target: Any, chain: list, arrivals: dict) -> str:
    """The whole cotangent of the target: what its own rules saw, or what the pass found for a leaf."""
    kind, which = target
    if kind == "node":
        own = [p.ct for p, _ in chain if p.number == which]
        return _values(own[0] if own else arrivals[target][-1][1].ct)
    leaf = tape.leaves[which]
    return _values(leaf.gradient) if leaf.run == chain[0][0].run else "not been found: the pass was interrupted"


def _op(p: Any) -> str:
    return f"[{p.name}]" if p.number is None else f"{p.number} [{p.name}]"


def _named(tape: Any, reference: Any) -> str:
    kind, which = reference
    if kind == "node":
        return f"{which} [{tape.records[which].name}] {tape.records[which].shape}"
    return f"{tape.leaves[which].name} {tape.leaves[which].shape}" if kind == "leaf" else f"[{which}]"


def _values(s: Any) -> str:
    """A Snapshot in short: the values, if they are few."""
    if s.values.size <= 4 and s.whole:
        return f"value {short(s.values.tolist())}"
    bad = "".join(f", {n} {what}" for n, what in ((s.nans, "NaN"), (s.infs, "infinite")) if n)
    return f"norm {s.norm:.4g} in [{s.min:.3g}, {s.max:.3g}]{bad}"


# ------------------------------------------------------------------------------------------------- tree and dot


def tree(tape: Any) -> str:
    """From each output (a node that no other uses) down to the leaves, every node once, after all that use it. Straight
    down is the longest way; the shorter arguments of a node are drawn first, indented."""
    parents = [list(dict.fromkeys(which for _, (kind, which) in r.inputs if kind == "node")) for r in tape.records]
    uses, depth = [0] * len(parents), [0] * len(parents)
    for i, found in enumerate(parents):
        depth[i] = 1 + max((depth[j] for j in found), default=0)
        for j in found:
            uses[j] += 1
    lines: list[str] = []
    stack = [(i, 0) for i, n in enumerate(uses) if not n]
    while stack:
        i, level = stack.pop()
        r = tape.records[i]
        came = ", ".join(f"{name} = {referred(tape, source)}" for name, source in r.inputs
                         if source != ("constant", None))
        lines.append("│ " * level + f"{i} {r.name} {r.shape}  {came}")
        ready = []
        for j in parents[i]:
            uses[j] -= 1
            if not uses[j]:
                ready.append(j)
        ready.sort(key=depth.__getitem__, reverse=True)
        stack += [(j, level + bool(k)) for k, j in enumerate(ready)]
    return "\n".join(lines)


def dot(tape: Any) -> str:
    """The graph in Graphviz's language, a cluster per module; arrows go the way of the forward pass."""
    lines = ["digraph tape {", "  node [shape=box, fontname=monospace];"]
    rooms: dict[str, list[int]] = {}
    for r in tape.records:
        rooms.setdefault(r.module, []).append(r.number)
    inside: list[str] = []
    for module in sorted(rooms, key=lambda path: path.split(".") if path else []):
        path = module.split(".") if module else []
        while inside != path[:len(inside)]:
            inside.pop()
            lines.append("  " * len(inside) + "  }")
        for name in path[len(inside):]:
            inside.append(name)
            cluster = _quote("cluster_" + ".".join(inside))
            lines.append("  " * len(inside) + f"subgraph {cluster} {{ label={_quote(name)};")
        for i in rooms[module]:
            r = tape.records[i]
            lines.append("  " * len(inside) + f"  n{i} [label={_quote(f'{i} {r.name}', f'{r.shape} {r.dtype}')}];")
    lines += ["  " * i + "  }" for i in reversed(range(len(inside)))]
    lines += [f"  l{leaf.number} [shape=ellipse, label={_quote(leaf.name, f'{leaf.shape} {leaf.dtype}')}];"
              for leaf in tape.leaves]
    for r in tape.records:
        for name, (kind, which) in r.inputs:
            if kind in ("node", "leaf"):
                lines.append(f"  {kind[0]}{which} -> n{r.number} [label={_quote(name)}];")
    return "\n".join([*lines, "}"])


def _quote(*lines: str) -> str:
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'
