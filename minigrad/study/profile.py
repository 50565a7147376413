"""Where does a training step's time go, and what holds its memory? `profile(step)` runs it and says.

A watcher cuts the step's time line at each hook of the engine: before and after an op's forward, before and after a
node's rules, around an optimiser's step. Every stretch between two cuts has one owner, so the parts add up:

* forward of an op: from just before its forward to just after, with the engine's recording of the node;
* backward of an op: its node's rules, and what the engine does with their results: undo broadcasting, accumulate;
* optimiser: `Optimizer.step`; profiler: this watcher's own work in its hooks, on a CPU; other: all else, which is
  Python between ops, data, clipping, writing `.grad`.

FLOPs are those of products (`minigrad/ops/flops.py`). Bytes moved are the least there can be: each array argument read
and each result written once, nothing for a view. Both are set against what this machine reaches, measured at the time;
a copy rate above 100 % means that the data were still in a cache.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigrad.backend.device import is_array, xp
from minigrad.backend.threads import get_num_threads
from minigrad.io import write_whole
from minigrad.ops.flops import backward_flops, flops
from minigrad.study.clock import Clock, clock_of, machine_rates
from minigrad.study.flame import flame
from minigrad.study.memory import Held
from minigrad.study.modules import OUTSIDE, ModuleWatcher
from minigrad.tape import Node, Part, Tensor, _raw, describe

# ------------------------------------------------------------------------------------------------- the watchers


@dataclass
class Cell:
    """What one op in one module did in one direction, over all profiled steps."""

    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class _Frame:
    """Who owns the time from now on."""

    def __init__(self, owner: tuple[str, str, str], of: Any = None, reads: int = 0) -> None:
        self.owner, self.of, self.reads, self.pulled = owner, of, reads, False


_OTHER, _PROFILER, _OPTIMISER = ("other", "", ""), ("profiler", "", ""), ("optimiser", "", "")


class _Timer(ModuleWatcher):
    """Cuts the step's time line and gives each stretch its owner: (direction, module path, op)."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.cells: dict[tuple[str, str, str], Cell] = {}
        self.marks: list[tuple[Any, tuple[str, str, str]]] = []
        self.frames = [_Frame(_OTHER)]
        self.about: weakref.WeakKeyDictionary[Node, tuple[str, float]] = weakref.WeakKeyDictionary()

    def run(self, step: Callable[[], Any]) -> None:
        self.frames, self.marks = [_Frame(_OTHER)], []
        with self:
            self._cut(_OTHER)
            step()
            self._leave_backward()
            self._cut(_OTHER)

    def resolve(self) -> None:
        """Give each owner its time; the clock must have waited."""
        for (a, owner), (b, _) in zip(self.marks, self.marks[1:]):
            self._cell(owner).seconds += self.clock.seconds(a, b)
        self.marks = []

    def _cell(self, owner: tuple[str, str, str]) -> Cell:
        return self.cells.setdefault(owner, Cell())

    def _cut(self, owner: tuple[str, str, str]) -> None:
        self.marks.append((self.clock.mark(), owner))

    def _begin(self) -> None:                            # of a hook: on a GPU its time on the host is no stream's
        if self.clock.on_host:
            self._cut(_PROFILER)

    def _end(self) -> None:
        self._cut(self.frames[-1].owner)

    def _leave_backward(self) -> None:
        """The next event does not belong to a backward pass: what came after the last rule was none of its node's."""
        while self.frames[-1].pulled:
            self.frames.pop()
            where = next(i for i in reversed(range(len(self.marks))) if self.marks[i][1] != _PROFILER)
            self.marks[where] = self.marks[where][0], self.frames[-1].owner

    def computing(self, op: Any) -> None:
        self._begin()
        self._leave_backward()
        self.frames.append(_Frame(("forward", self.path, op.name), op))
        self._end()

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        self._begin()
        if any(frame.of is op for frame in self.frames):     # not so for a checkpoint: its inside was seen
            while self.frames.pop().of is not op:
                pass
        cell = self._cell(("forward", self.path, op.name))
        cell.calls += 1
        cell.flops += flops(op, args, params)
        cell.bytes += _moved(op, out, args)
        if out.node is not None:
            needs = [target is not None for target in out.node.targets[:len(args)]]
            self.about[out.node] = self.path, backward_flops(op, args, params, needs)
        self._end()

    def pulling(self, node: Node, ct: Any) -> None:
        self._begin()
        while (top := self.frames[-1]).owner[0] == "backward" and top.of > node.index:
            self.frames.pop()                            # nodes run in falling order; newer ones run inside a node
        path, operations = self.about.get(node, (self.path, 0))
        self.frames.append(_Frame(("backward", path, node.name), node.index, _bytes(ct) + node.bytes_kept))
        cell = self._cell(self.frames[-1].owner)
        cell.calls += 1
        cell.flops += operations
        self._end()

    def pulled(self, node: Node, ct: Any, target: Any, c: Any) -> None:
        self._begin()
        while self.frames[-1].of != node.index and any(frame.of == node.index for frame in self.frames):
            self.frames.pop()                            # the pass that ran inside this node
        frame = self.frames[-1]
        if frame.of == node.index:
            frame.pulled = True
            made = _raw(c.ct if isinstance(c, Part) else c)
            if not xp(made).may_share_memory(made, _raw(ct)):
                self._cell(frame.owner).bytes += _bytes(made) + frame.reads
                frame.reads = 0                          # once for all of its rules
        self._end()

    def stepping(self, optimizer: Any) -> None:
        self._begin()
        self._leave_backward()
        self.frames.append(_Frame(_OPTIMISER, optimizer))
        self._cell(_OPTIMISER).calls += 1
        self._end()

    def stepped(self, optimizer: Any) -> None:
        self._begin()
        if self.frames[-1].of is optimizer:
            self.frames.pop()
        self._end()


def _bytes(x: Any) -> int:
    raw = _raw(x)
    return raw.nbytes if is_array(raw) else 0


def _moved(op: Any, out: Tensor, args: Sequence) -> int:
    """Bytes an op must at least read and write."""
    if getattr(op, "view", False) and xp(out._data).may_share_memory(out._data, _raw(args[0])):
        return 0
    if op.name in ("embedding", "getitem"):              # reads only the rows it takes
        return 2 * out.nbytes
    return out.nbytes + sum(map(_bytes, args))


# -------------------------------------------------------------------------------------------------- the answer


class Table(list):
    """Rows as dicts; str() lines them up: numbers to the right, what is shown by `str` to the left."""

    def __init__(self, rows: Iterable[dict[str, Any]], formats: dict[str, tuple[str, Callable[[Any], str]]]) -> None:
        super().__init__(rows)
        self.formats = formats

    def __str__(self) -> str:
        cells = [[head for head, _ in self.formats.values()]]
        cells += [["" if row.get(key) is None else show(row[key]) for key, (_, show) in self.formats.items()]
                  for row in self]
        widths = [max(map(len, column)) for column in zip(*cells)]
        words = [show is str for _, show in self.formats.values()]
        return "\n".join("  ".join(cell.ljust(w) if left else cell.rjust(w)
                                   for cell, w, left in zip(row, widths, words)).rstrip() for row in cells)


_MS, _SHARE = (lambda s: f"{1e3 * s:.3f}"), (lambda x: f"{100 * x:.1f} %")
_COLUMNS = {"calls": ("calls", lambda n: f"{n:g}"), "forward": ("forward ms", _MS), "backward": ("backward ms", _MS),
            "seconds": ("both ms", _MS), "share": ("of step", _SHARE), "flops": ("GFLOP", lambda n: f"{1e-9 * n:.4f}"),
            "product_share": ("of product rate", _SHARE), "bytes": ("MB", lambda n: f"{1e-6 * n:.2f}"),
            "copy_share": ("of copy rate", _SHARE)}


class Profile:
    """What `profile` found; times in seconds, means over `repeat` steps. print(p), print(p.by_module), p.svg(path)."""

    def __init__(self, timer: _Timer, held: Held, repeat: int, step: float, plain: float,
                 rates: tuple[float, float]) -> None:
        self.device, self.threads, self.repeat = str(held.device), get_num_threads(), repeat
        self.step, self.plain, (self.product_rate, self.copy_rate) = step, plain, rates
        self.cells = {owner: Cell(*(value / repeat for value in vars(cell).values()))
                      for owner, cell in timer.cells.items()}
        self.total = sum(cell.seconds for cell in self.cells.values())
        self.peak_bytes, self.holders = held.peak()
        self.parameter_bytes = sum(held.leaves.values())

    @property
    def by_op(self) -> Table:
        """A row per op, the slowest first; then optimiser, other, profiler, total."""
        return self._table("op", lambda path, op: op)

    @property
    def by_module(self) -> Table:
        """A row per module, of the ops called in it and in no module below it; then the rest and the total."""
        return self._table("module", lambda path, op: path or OUTSIDE)

    def _table(self, title: str, name: Callable[[str, str], str]) -> Table:
        groups: dict[str, dict[str, Cell]] = {}
        for (direction, path, op), cell in self.cells.items():
            if direction in ("forward", "backward"):
                sums = groups.setdefault(name(path, op), {"forward": Cell(), "backward": Cell()})[direction]
                for key, value in vars(cell).items():
                    setattr(sums, key, getattr(sums, key) + value)
        rows = [self._row(title, key, g["forward"], g["backward"]) for key, g in groups.items()]
        rows.sort(key=lambda row: -row["seconds"])
        rest = [(direction, self.cells.get((direction, "", ""), Cell())) for direction in
                ("optimiser", "other", "profiler")]
        rows += [{title: key, "calls": cell.calls or None, "seconds": cell.seconds, "share": cell.seconds / self.total}
                 for key, cell in rest]
        whole = {key: sum(row.get(key) or 0 for row in rows) for key in ("forward", "backward", "flops", "bytes")}
        rows.append({title: "total", "seconds": self.total, "share": 1.0, **whole})
        rows = [dict.fromkeys((title, *_COLUMNS)) | row for row in rows]         # every row has every column
        return Table(rows, {title: (title, str), **_COLUMNS})

    def _row(self, title: str, key: str, f: Cell, b: Cell) -> dict[str, Any]:
        seconds, operations, moved = f.seconds + b.seconds, f.flops + b.flops, f.bytes + b.bytes
        return {title: key, "calls": f.calls or b.calls, "forward": f.seconds, "backward": b.seconds,
                "seconds": seconds, "share": seconds / self.total, "flops": operations, "bytes": moved,
                "product_share": operations / seconds / self.product_rate if operations and seconds else None,
                "copy_share": moved / seconds / self.copy_rate if moved and seconds else None}

    def __str__(self) -> str:
        lines = [f"{self._title()}, mean of {self.repeat}; its parts add up to {_MS(self.total)} ms; "
                 f"{_MS(self.plain)} ms unwatched",
                 f"this machine now: {1e-9 * self.product_rate:.1f} GFLOP/s in float32 products, "
                 f"{1e-9 * self.copy_rate:.1f} GB/s in copies", "", str(self.by_op), "",
                 f"graph at its largest: {1e-6 * self.peak_bytes:.2f} MB kept for the backward pass, besides "
                 f"{1e-6 * self.parameter_bytes:.2f} MB of parameters (as much again for their gradients)"]
        lines += [f"  {1e-6 * row['bytes']:9.2f} MB  {row['op']} in {row['module']}, {row['line']}"
                  for row in self.holders[:8]]
        return "\n".join(lines)

    def _title(self) -> str:
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.device == "cpu" else ""
        return f"step {_MS(self.step)} ms on {self.device}{threads}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and dicts, for json.dump."""
        names = "device threads repeat step plain total product_rate copy_rate peak_bytes parameter_bytes holders"
        return {**{name: getattr(self, name) for name in names.split()},
                "by_op": list(self.by_op), "by_module": list(self.by_module)}

    def svg(self, path: str | Path) -> None:
        """A picture: time along x, modules and ops nested downwards, forward and backward side by side. One file
        without scripts; hover over a box for its numbers; follows a light or dark page."""
        with write_whole(path, "w") as file:
            file.write(flame(self.cells, self.total, self._title()))


def profile(step: Callable[[], Any], repeat: int = 5) -> Profile:
    """Run a training step under watch: where its time goes, by op and by module, and what holds its memory.

    step(): a whole step without arguments (forward, backward, optimiser). It runs 1 + 2 repeat times: once to warm up
    and to watch the memory, then in turns unwatched and watched, so that the watching itself can be told. Nothing but
    the runs changes the model. On CUDA times are those of the current stream; nothing waits inside a step.
    """
    if not callable(step):
        raise TypeError(f"[profile] step is a function without arguments: got {describe(step)}")
    if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
        raise ValueError(f"[profile] repeat is an integer of at least 1: got {repeat!r}")
    held = Held()
    with held:
        step()
    clock = clock_of(held.device)
    timer, rates, plain, watched = _Timer(clock), machine_rates(held.device), 0.0, 0.0
    for _ in range(repeat):
        clock.wait()
        begin = time.perf_counter()
        step()
        clock.wait()
        middle = time.perf_counter()
        timer.run(step)
        clock.wait()
        plain, watched = plain + middle - begin, watched + time.perf_counter() - middle
        timer.resolve()
    return Profile(timer, held, repeat, watched / repeat, plain / repeat, rates)
