"""Watchers of the engine: the Tape, and detect_anomaly."""

from __future__ import annotations

import os
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from minigrad.backend.device import is_array, to_host, xp
from minigrad.tape import Node, Part, Tensor, Watcher, _raw, describe

_ROOM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def caller() -> str:
    """FILE:LINE of the call in the user's code: the nearest frame outside this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOM):
        frame = frame.f_back
    path = frame.f_code.co_filename
    try:
        path = min(path, os.path.relpath(path), key=len)
    except ValueError:                                   # another drive
        pass
    return f"{path}:{frame.f_lineno}"


class Tape(Watcher):
    """`with mg.Tape() as tape:` collects the nodes recorded inside, in creation order; print(tape) shows them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        if out.node is not None:
            out.node.line = out.node.line or caller()
            self.nodes.append(out.node)

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __str__(self) -> str:
        number = {node: i for i, node in enumerate(self.nodes)}
        rows = [("", "op", "from", "shape", "dtype", "on", "kept", "line")]
        for i, node in enumerate(self.nodes):
            parents = ["leaf" if isinstance(t, Tensor) else str(number.get(t, "outside")) if t is not None else "-"
                       for t in node.targets or ()]
            rows.append((str(i), node.name, " ".join(parents) if parents else "released", str(node.shape),
                         str(node.dtype), f"{node.device}/{node.backend}", f"{node.bytes_kept:,} B", node.line or ""))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


class AnomalyError(FloatingPointError, RuntimeError):
    """What `detect_anomaly` raises."""


class detect_anomaly(Watcher):
    """`with mg.detect_anomaly():` raises at the first op that makes a NaN or infinity, forward or backward, naming it
    and the line that called it.

    An infinity that was put in (the -inf of a mask) is not reported. Kept inputs and outputs are fingerprinted, so
    that a write through any old view of them is caught at backward, on every device. Slow; for debugging.
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
        self.prints: weakref.WeakKeyDictionary[Node, list[int]] = weakref.WeakKeyDictionary()

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        node = out.node
        for what, name in _KINDS:                        # an op outside the tape may make infinities: a mask
            if _has(out, what) and not any(_has(a, what) for a in args) and (node is not None or what == "isnan"):
                came = ", ".join(f"{n} {describe(a)}{_range(a)}" for n, a in zip(op.named(args), args) if a is not None)
                raise AnomalyError(f"[{op.name}] made {name} in the forward pass at {caller()}: {came}")
        if node is not None:
            node.line = node.line or caller()
            self.prints[node] = _fingerprints(node)

    def started(self, y: Tensor) -> None:
        if _has(y, "isnan") or _has(y, "isinf"):
            raise AnomalyError(f"[backward] starts at {y!r}, which no watched op made: it came with the inputs")

    def pulling(self, node: Node, ct: Any) -> None:
        if self.prints.get(node, []) != (_fingerprints(node) if node in self.prints else []):
            node.refuse_stale()

    def pulled(self, node: Node, ct: Any, target: Any, c: Any) -> None:
        c = c.ct if isinstance(c, Part) else c
        for what, name in _KINDS:
            if _has(c, what) and not _has(ct, what):
                kept = ", ".join(f"{describe(a)}{_range(a)}" for a in node.arrays or () if is_array(a))
                raise AnomalyError(f"[{node.name}] made {name} in the backward pass{node.where()}: from cotangent "
                                   f"{describe(ct)}{_range(ct)}" + (f" and {kept}" if kept else ""))


_KINDS = (("isnan", "a NaN"), ("isinf", "an infinity"))


def _has(x: Any, what: str) -> bool:
    x = _raw(x)
    if is_array(x):
        return x.dtype.kind == "f" and bool(getattr(xp(x), what)(x).any())
    return isinstance(x, float) and bool(getattr(np, what)(x))


def _range(x: Any) -> str:
    x = _raw(x)
    return f" in [{float(x.min()):.4g}, {float(x.max()):.4g}]" if is_array(x) and x.size else ""


def _fingerprints(node: Node) -> list[int]:
    kept = [*(node.arrays or ()), node.y]
    return [zlib.crc32(np.ascontiguousarray(to_host(a)).data) if is_array(a) and a.size else 0 for a in kept]
