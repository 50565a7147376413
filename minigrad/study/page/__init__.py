"""What `Tape.html` writes: one page that opens from disk, steps through a tape and asks no network for anything.

This file turns what the tape noted into JSON; arrays.js, graph.js and page.js draw it, within template.html.
Every text reaches the page as JSON and is put in place as text, never as markup: no name or label can break out of it.

The JSON, all lists in the order of the tape, "snapshot" and "attention" being positions in the lists of that name:

    steps         [0 or 1, number, held]: node or pull `number` comes next; bytes held after it, in order of time
    nodes         of each Record the fields by their names
    leaves        of each Leaf the fields by their names
    pulls         of each Pull node, op, run, depth, ct and results: to, argument, rule, axes, added, ct
    ops           per op its formula and the lines of its rule
    compositions  of fused ops the nodes of their references, nested
    snapshots     numbers, and either the values, or a picture: 8 bits a cell, of which +-127 stands for +-top
    attentions    weights as 16-bit counts of 1/10000, visible as bits
"""

from __future__ import annotations

import base64
import json
import linecache
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import numpy as np

from minigrad.backend.device import is_array
from minigrad.backend.random import get_rng_state, set_rng_state
from minigrad.io import write_whole
from minigrad.methods import picture
from minigrad.study import text
from minigrad.study.snapshot import SIDE
from minigrad.study.tape import Tape
from minigrad.tape import Tensor, _set, describe

PICTURES = 240_000                                       # characters for all pictures: where more are due, coarser ones
_SIDES = SIDE, 24, 16, 12, 8
_WORK, _CUT = 1 << 24, 16                                # a reference runs again on whole shapes up to this size


def write(tape: Tape, path: str | os.PathLike[str], tokens: Sequence | None = None) -> None:
    """The page of a tape, written whole or not at all.

    tokens: a label for each position; the axes of attention with as many positions show them. A tape without values
    gives a page without numbers: graph, formulas, rules, lines and memory are there, and reading them waits for no GPU.
    ValueError if the tape is empty or no attention has as many positions as there are tokens; OSError as `write_whole`.
    """
    made = render(tape, tokens)
    with write_whole(path) as file:
        file.write(made)


def render(tape: Tape, tokens: Sequence | None = None) -> str:
    """The page as text."""
    if not tape.records:
        raise ValueError("[Tape.html] something must be recorded on the tape: call the model inside "
                         "`with mg.Tape() as tape:`, on tensors that require gradients")
    said = json.dumps(described(tape, tokens), separators=(",", ":"), allow_nan=False)
    said = said.replace("<", "\\u003c")                  # so that no "</script>" can be in it
    return re.sub(r"\{\{([\w.]+)\}\}", lambda found: said if found.group(1) == "data" else _file(found.group(1)),
                  _file("template.html"))


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def described(tape: Tape, tokens: Sequence | None = None) -> dict[str, Any]:
    """What the page shows, as in the description at the top."""
    pulls, snapshots, attentions = tape.pulls, _Shared(), []
    compositions = _Compositions()
    nodes = []
    for r in tape.records:
        if r.attention is not None:
            attentions.append(_attention(r.attention))
        path, _, number = r.line.rpartition(":")
        nodes.append({
            "op": r.name, "inputs": [[name, *reference] for name, reference in r.inputs], "params": r.params,
            "shape": str(r.shape), "dtype": str(r.dtype), "on": f"{r.device}/{r.backend}", "kept": r.bytes_kept,
            "line": r.line, "code": linecache.getline(path, int(number)).strip(), "module": r.module,
            "equation": r.equation, "value": snapshots.number(r.value), "composition": compositions.number(tape, r),
            "attention": None if r.attention is None else len(attentions) - 1})
    ops = {r.name: {"formula": r.formula, "rule": _lines(r.rule)} for r in tape.records}
    leaves = [{"name": leaf.name, "shape": str(leaf.shape), "dtype": str(leaf.dtype),
               "value": snapshots.number(leaf.value), "gradient": snapshots.number(leaf.gradient)}
              for leaf in tape.leaves]
    passed = [{"node": p.number, "op": p.name, "run": p.run, "depth": p.depth, "ct": snapshots.number(p.ct),
               "results": [{"to": r.target, "argument": argument, "rule": rule, "axes": r.axes, "added": r.added,
                            "ct": snapshots.number(r.ct)} for r, argument, rule in _explained(tape, p)]} for p in pulls]
    return {"nodes": nodes, "ops": ops, "leaves": leaves, "pulls": passed, "steps": list(_steps(tape.records, pulls)),
            "compositions": compositions.made, "snapshots": snapshots.encoded(), "attentions": attentions,
            "tokens": _labels(tokens, attentions), "values": tape.values}


def _steps(records: Sequence, pulls: Sequence) -> Iterator[tuple[int, int, int]]:
    """Nodes and pulls in the order of time."""
    done = 0
    for r in records:
        for i in range(done, r.pulls):
            yield 1, i, pulls[i].held
        done = max(done, r.pulls)
        yield 0, r.number, r.held
    for i in range(done, len(pulls)):
        yield 1, i, pulls[i].held


def _lines(rule: str) -> list[str]:
    """The parts of a rule, one for each argument, after the definitions they share."""
    return [part.strip().removesuffix(",") for part in re.split(r"(?:^|,) (?=ct_\w+ = )", " " + rule) if part.strip()]


def _explained(tape: Tape, pull: Any) -> Iterator[tuple[Any, str, str]]:
    """Each result of a pull with the argument it is for and that argument's part of the rule."""
    record = None if pull.number is None else tape.records[pull.number]
    inputs = [] if record is None else list(record.inputs)
    for r in pull.results:                               # in the order of the arguments
        name = next((name for name, reference in inputs if reference == r.target), "")
        if name:
            inputs.remove((name, r.target))
        lines = [] if record is None else _lines(record.rule)
        yield r, name, next((line for line in lines if line.startswith(f"ct_{name.partition('[')[0]} =")), "")


def _labels(tokens: Sequence | None, attentions: Sequence[dict]) -> list[str] | None:
    if tokens is None:
        return None
    if not hasattr(tokens, "__iter__"):
        raise TypeError(f"[Tape.html] tokens are labels, one for each position: got {describe(tokens)}")
    labels = [str(token) for token in tokens]
    lengths = sorted({n for a in attentions for n in (a["queries"], a["keys"])})
    if len(labels) not in lengths:
        raise ValueError("[Tape.html] tokens must label the positions of an attention on this tape, of which there are "
                         f"{' or '.join(map(str, lengths)) or 'none'}: got {len(labels)} tokens")
    return labels


# ------------------------------------------------------------------------------------------------------- numbers


def _number(x: float) -> float | str:
    """Eight digits, of which the page shows four; JSON has no NaN."""
    return float(f"{x:.8g}") if math.isfinite(x) else str(x)


def _packed(x: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(x).data).decode()


class _Shared:
    """Snapshots, each once: the cotangent that leaves one node is mostly the one that enters the next."""

    def __init__(self) -> None:
        self.known: dict[tuple, int] = {}
        self.all: list[Any] = []

    def number(self, s: Any) -> int | None:
        if s is None:
            return None
        key = s.shape, str(s.dtype), s.min, s.mean, s.max, s.norm, s.values.tobytes()
        if key not in self.known:
            self.known[key] = len(self.all)
            self.all.append(s)
        return self.known[key]

    def encoded(self) -> list[dict[str, Any]]:
        """All of them, with pictures as fine as there is room for."""
        drawn = [s.values.shape for s in self.all if not s.whole]
        for side in _SIDES:
            if sum(min(n, side) * min(m, side) for n, m in drawn) * 4 // 3 <= PICTURES:
                break
        return [_snapshot(s, side) for s in self.all]


def _snapshot(s: Any, side: int) -> dict[str, Any]:
    made = {"shape": s.shape, "dtype": str(s.dtype), "nans": s.nans, "infs": s.infs,
            **{name: _number(getattr(s, name)) for name in ("min", "mean", "max", "norm")}}
    if s.whole:
        return made | {"values": [_number(v) for v in s.values.reshape(-1).tolist()]}
    x = picture(s.values, side)
    seen = np.isfinite(x)
    top = float(np.abs(x[seen]).max()) if seen.any() else 0.0
    cells = np.full(x.shape, -128, np.int8)              # a block with a NaN or an infinity
    cells[seen] = np.rint(x[seen] / top * 127) if top else 0
    return made | {"rows": x.shape[0], "columns": x.shape[1], "top": _number(top), "cells": _packed(cells)}


def _attention(a: Any) -> dict[str, Any]:
    heads, rows, columns = a.weights.shape
    return {"heads": heads, "rows": rows, "columns": columns, "queries": a.queries, "keys": a.keys,
            "weights": _packed(np.rint(np.nan_to_num(a.weights) * 1e4).astype("<u2")),
            "visible": _packed(np.packbits(a.visible, bitorder="little"))}


# -------------------------------------------------------------------------------------- what fused ops stand for


class _Compositions:
    """The references of fused ops as lists of nodes, each once; a fused op within one has its own."""

    def __init__(self) -> None:
        self.known: dict[tuple, int | None] = {}
        self.made: list[dict[str, Any]] = []

    def number(self, tape: Tape, record: Any) -> int | None:
        """The position in `made` of the reference of a record's op; None if it has none, or it cannot run again."""
        op = tape.nodes[record.number].primitive
        if getattr(op, "reference", None) is None or any(x[0] == "outside" for _, x in record.inputs):
            return None
        inputs = [_argument(tape, reference) for _, reference in record.inputs]
        key = record.name, tuple(inputs), str(record.params)
        if key not in self.known:
            inner, args, whole = _run(op, record, inputs)
            self.known[key] = None
            if inner is not None:
                names = {inner._reference(x): name for x, (name, _) in zip(args, record.inputs)}
                self.made.append({"whole": whole, "nodes": [self._node(inner, r, names, whole) for r in inner.records]})
                self.known[key] = len(self.made) - 1
        return self.known[key]

    def _node(self, tape: Tape, r: Any, names: dict, whole: bool) -> dict[str, Any]:
        came = [names.get(x) or (f"{x[1]} {tape.records[x[1]].name}" if x[0] == "node" else text.referred(tape, x))
                for _, x in r.inputs if x != ("constant", None)]
        return {"op": r.name, "formula": r.formula, "equation": r.equation, "from": came, "params": r.params,
                "names": [name for name, _ in r.inputs],
                "shape": str(r.shape) if whole else "", "composition": self.number(tape, r)}


def _argument(tape: Tape, reference: Any) -> Any:
    """(shape, dtype, whether it requires a gradient) of an array that came in, or the number it was."""
    kind, which = reference
    if kind != "constant":
        x = tape.records[which] if kind == "node" else tape.leaves[which]
        return x.shape, str(x.dtype), True
    array = re.search(r"\(([\d, ]*)\) (\w+)", which or "")
    if array:
        return tuple(map(int, re.findall(r"\d+", array[1]))), array[2], False
    try:
        return None if which is None else float(which)
    except ValueError:                                   # True: no array function of this package takes one here
        return None


def _run(op: Any, record: Any, inputs: Sequence) -> tuple[Tape | None, list, bool]:
    """The reference of a fused node, run on ones and unwatched: what a tape noted, the arguments, and whether on the
    recorded shapes; where these are large every axis is cut to at most 16."""
    sizes = [record.shape, *(x[0] for x in inputs if isinstance(x, tuple))]
    small = max(map(math.prod, sizes)) * max((n for size in sizes for n in size), default=1) <= _WORK
    for most in (sys.maxsize, _CUT) if small else (_CUT,):
        args = [Tensor(np.ones([min(n, most) for n in x[0]], x[1]), x[2]) if isinstance(x, tuple) else x
                for x in inputs]
        params = {name: value[tuple(slice(most) for _ in range(value.ndim))] if is_array(value) else value
                  for name, value in record.given.items()}
        tape, state = Tape(values=False), get_rng_state()
        try:
            with _set(watchers=(), recording=True, composed=False), np.errstate(all="ignore"), tape:
                op.reference(*args, **params)
            return tape, args, most > _CUT
        except Exception:                                # parameters that do not fit the cut shapes; anything at all,
            pass                                         # as a reference of the user's sees arrays it never expected
        finally:
            set_rng_state(state)
    return None, [], False
