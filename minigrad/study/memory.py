"""What the live nodes of a graph keep for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend.device import CPU, root
from minigrad.study.modules import OUTSIDE, ModuleWatcher
from minigrad.study.tape import caller
from minigrad.tape import Node, Tensor


class Held(ModuleWatcher):
    """What the live nodes of a step keep for their rules, as it grows and falls. An array that several keep counts
    once, and what a leaf holds (a parameter) not at all: it lives anyway. Holds no node and no array itself."""

    def __init__(self) -> None:
        super().__init__()
        self.device = CPU
        self.leaves: dict[int, int] = {}
        self.alive: dict[int, tuple[weakref.ref, list[int]]] = {}  # a node's number -> the memories it keeps
        self.kept: dict[int, list] = {}                  # memory -> [how many keep it, bytes, who kept it first]
        self.log: list[tuple[int, tuple[str, str, str]]] = []
        self.last: weakref.ref | None = None             # the node whose rules ran last

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.alive.clear()

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        self.device = out.device
        if out.node is None:
            return
        for a in args:
            if isinstance(a, Tensor) and a.is_leaf and a.requires_grad:
                own = root(a._data)
                self.leaves[id(own)] = own.nbytes
        memories = {id(own): own.nbytes for own in map(root, out.node.kept) if id(own) not in self.leaves}
        label = op.name, self.path or OUTSIDE, caller()
        for memory, size in memories.items():
            entry = self.kept.setdefault(memory, [0, size, label])
            entry[0] += 1
            if entry[0] == 1:
                self.log.append((size, entry[2]))
        index = out.node.index
        self.alive[index] = weakref.ref(out.node, lambda _: self._gone(index)), list(memories)

    def _gone(self, index: int) -> None:
        for memory in self.alive.pop(index, (None, ()))[1]:
            entry = self.kept[memory]
            entry[0] -= 1
            if not entry[0]:
                self.log.append((-entry[1], entry[2]))
                del self.kept[memory]

    def pulling(self, node: Node, ct: Any) -> None:
        last = self.last() if self.last is not None else None
        if last is not None and last.targets is None:    # released, though somebody holds on to its node
            self._gone(last.index)
        self.last = weakref.ref(node)

    def peak(self) -> tuple[int, list[dict[str, Any]]]:
        """The most bytes kept at once, and who kept them then, the largest first."""
        sums = np.cumsum([0, *(size for size, _ in self.log)])
        top = int(sums.argmax())
        holders: dict[tuple[str, str, str], int] = {}
        for size, label in self.log[:top]:
            holders[label] = holders.get(label, 0) + size
        rows = [{"op": op, "module": module, "line": line, "bytes": size}
                for (op, module, line), size in sorted(holders.items(), key=lambda item: -item[1]) if size]
        return int(sums[top]), rows
