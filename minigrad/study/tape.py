"""The Tape: a watcher that notes what the engine does, for you to read."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minigrad.backend.device import is_array
from minigrad.study import text
from minigrad.study.modules import ModuleWatcher
from minigrad.study.snapshot import Attention, Snapshot, attention_of
from minigrad.tape import Node, Part, Tensor, _pull_back, _raw, describe

_ROOM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def caller() -> str:
    """FILE:LINE of the call in the user's code: the nearest frame outside this package."""
    return _call()[0]


def _call() -> tuple[str, str]:
    """`caller`, and the equation that this line, or one of the package's on the way, bears in a comment: (A.10.1)."""
    frame: Any = sys._getframe(1)
    equation = _marked(frame.f_code.co_filename, frame.f_lineno)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOM):
        frame = frame.f_back
        equation = equation or _marked(frame.f_code.co_filename, frame.f_lineno)
    return f"{_shortest(frame.f_code.co_filename, os.getcwd())}:{frame.f_lineno}", equation


def passes() -> int:
    """How many backward passes run now, each within the one before: 2 in that of a checkpoint."""
    frame: Any = sys._getframe(1)
    count = 0
    while frame is not None:
        count, frame = count + (frame.f_code is _pull_back.__code__), frame.f_back
    return count


def _hollow(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters, with zeros that take no memory for the arrays among them."""
    return {name: np.broadcast_to(np.zeros((), value.dtype), value.shape) if is_array(value) else value
            for name, value in params.items()}


@functools.cache
def _marked(path: str, line: int) -> str:
    found = re.search(r"#.*\((A\.10\.\d+)\)", linecache.getline(path, line))
    return found.group(1) if found else ""


@functools.cache
def _shortest(path: str, folder: str) -> str:
    try:
        return min(path, os.path.relpath(path, folder), key=len)
    except ValueError:                                   # another drive
        return path


# A reference says where an argument comes from, or a cotangent goes: ("node", its number) | ("leaf", its number) |
# ("outside", the op of a node that this tape has not recorded) | ("constant", what it is, or None if not given).
Reference = tuple[str, Any]


@dataclass(slots=True)
class Record:
    """What the Tape noted when it saw a node made; numbers and short texts only."""

    number: int
    name: str
    formula: str
    equation: str                                        # "A.10.7", or ""
    rule: str                                            # the vjp in mathematics: "ct_a = ct b,  ct_b = ct a"
    inputs: list[tuple[str, Reference]]                  # per argument its name and where it came from
    params: dict[str, str]                               # parameters that differ from their defaults, in short
    shape: tuple[int, ...]
    dtype: np.dtype
    device: str
    backend: str
    bytes_kept: int                                      # when it was recorded: before the backward pass releases it
    line: str                                            # FILE:LINE in the user's code
    module: str                                          # dotted path in the outermost module, its class name, or ""
    value: Snapshot | None
    attention: Attention | None
    held: int                                            # bytes that the tape's nodes keep, with this one
    pulls: int                                           # how many pulls the tape had noted before
    given: dict[str, Any]                                # of a fused op all parameters, arrays as zeros without memory


@dataclass(slots=True)
class Leaf:
    """A leaf that a recorded node used. name: a parameter's path, or "leaf 3"; gradient: what the last backward pass
    that reached it found, pass number `run` (x.grad adds up all passes)."""

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    value: Snapshot | None
    gradient: Snapshot | None = None
    run: int = -1
    born: int = 0                                        # the index of the first node that used it


@dataclass(slots=True)
class Result:
    """What a rule gave for one argument: the cotangent after the engine settled it (shape and dtype of its target), the
    axes it was summed over to undo broadcasting, and whether it was added to one that had arrived before."""

    target: Reference
    ct: Snapshot | None
    axes: tuple[int, ...]
    added: bool


@dataclass(slots=True)
class Pull:
    """A node's rules ran. number: of its record (None if it was recorded outside this tape); run: which backward pass,
    from 0; depth: 0, or 1 within the pass of a checkpoint, and so on; held: bytes that the tape's nodes keep after."""

    number: int | None
    name: str
    ct: Snapshot | None
    run: int
    depth: int
    results: list[Result] = field(default_factory=list)
    held: int = 0


class Modules(ModuleWatcher):
    """Knows in which module the program is, and has the outermost one name its parameters."""

    def entered(self, module: Any) -> None:
        if not self.calls:
            list(module.named_parameters())
        super().entered(module)


class Tape(Modules):
    """`with mg.Tape() as tape:` notes every node recorded inside and every backward pass that runs inside, for you to
    read then or later: print(tape), tape.why(x), tape.tree(), tape.dot(), tape.html(path).

    nodes: the Nodes, in creation order; records: a Record for each, same order; leaves: a Leaf for each leaf they used;
    pulls: a Pull for each node that the backward passes went through, in the order they ran. Values are noted as they
    pass, as a few numbers and a small picture (Snapshot), so that the tape keeps no array alive: nodes drop what they
    kept as always. values=False notes structure only and never reads an array: no wait on a GPU.

    The nodes of a function under mg.checkpoint are forgotten when its forward is over, as the graph forgets them; they
    are on the tape when the backward pass makes them again.
    """

    def __init__(self, values: bool = True) -> None:
        super().__init__()
        self.values = values
        self.nodes: list[Node] = []
        self.records: list[Record] = []
        self.leaves: list[Leaf] = []
        self._pulls: list[Pull] = []
        self._numbers: dict[int, int] = {}               # a node's index -> its number here
        self._leaf_numbers: dict[int, tuple[weakref.ref, int]] = {}     # by id, as == of Tensors is elementwise
        self._names: dict[str, int] = {}                 # leaves by name
        self._held = self._runs = 0
        self._pulling: dict[int, Pull] = {}              # by a node's index, its latest
        self._last: tuple[weakref.ref, int, Pull] | None = None     # the node pulled last, what it kept, its Pull
        self._arrived: list[tuple[int, set[Reference]]] = []   # of each pass that runs: number, what got a cotangent
        self._axes: tuple[int, ...] = ()

    @property
    def pulls(self) -> list[Pull]:
        self._settle()
        return self._pulls

    # ---------------------------------------------------------------------------------------------- what it is told

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        node = out.node
        if node is None:
            return
        if "since" in params and op.name == "checkpoint":
            self._forget(params["since"])
            params = {}
        line, marked = _call()
        node.line = node.line or line
        targets = node.targets or ()
        names = [*op.named(args), *(f"captured {i}" for i in range(len(targets) - len(args)))]
        sources = [*(a if t is None else t for a, t in zip(args, targets)), *targets[len(args):]]
        inputs = [(name, self._reference(source, node.index)) for name, source in zip(names, sources)]
        formula, rule, equation = text.formula(op)
        equation, kept = equation or marked, node.bytes_kept
        value = attention = None
        if self.values:
            value, attention = Snapshot(out), attention_of(op.name, equation, _raw(out), args, params)
        self._numbers[node.index] = len(self.nodes)
        self.records.append(Record(
            len(self.nodes), op.name, formula, equation, rule, inputs, text.shown(op, params), node.shape, node.dtype,
            str(node.device), node.backend, kept, node.line, self.path, value, attention, self._held + kept,
            len(self._pulls), _hollow(params) if getattr(op, "reference", None) else {}))
        self.nodes.append(node)
        self._held += kept

    def pulling(self, node: Node, ct: Any) -> None:
        me = self._reference(node)
        if not self._arrived or me not in self._arrived[-1][1]:      # nothing led here: a pass begins at this node
            del self._arrived[passes() - 1:]             # those that an error ended
            self._arrived.append((self._runs, set()))
            self._runs += 1
        number = self._numbers.get(node.index)
        pull = Pull(number, node.name, self._snapshot(ct), self._arrived[-1][0], len(self._arrived) - 1)
        self._pulls.append(pull)
        self._pulling[node.index] = pull
        self._current(node, pull)

    def summed(self, node: Node, axes: tuple[int, ...]) -> None:
        self._axes = axes

    def pulled(self, node: Node, ct: Any, target: Any, c: Any) -> None:
        axes, self._axes = self._axes, ()
        pull = self._pulling.get(node.index)
        if pull is None:                                 # the tape was opened in the middle of a rule
            return
        self._current(node, pull)                        # again, if its rule ran a pass of its own
        if c.__class__ is Part and self.values:
            c = c.add_into(None, False, target.shape)
        to, arrived = self._reference(target), self._arrived[-1][1] if self._arrived else set()
        pull.results.append(Result(to, self._snapshot(c), axes, to in arrived))
        arrived.add(to)

    def finished(self, found: dict[Any, Any]) -> None:
        self._settle()
        run = self._arrived.pop()[0] if self._arrived else -1
        for target, ct in found.items():
            kind, number = self._reference(target)
            if kind == "leaf":
                self.leaves[number].gradient, self.leaves[number].run = self._snapshot(ct), run

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._settle()
        self._arrived, self._pulling = [], {}

    # ----------------------------------------------------------------------------------------------- how it notes it

    def _snapshot(self, array: Any) -> Snapshot | None:
        return Snapshot(array) if self.values and array.__class__ is not Part else None

    def _reference(self, x: Any, index: int = 0) -> Reference:
        """Where an argument of node `index` came from."""
        if isinstance(x, Node):
            number = self._numbers.get(x.index)
            return ("outside", x.name) if number is None else ("node", number)
        if not isinstance(x, Tensor) or not x.requires_grad:
            path = getattr(x, "path", "")
            return "constant", None if x is None else f"{path} {describe(x)}".strip()
        known = self._leaf_numbers.get(id(x))
        if known is not None and known[0]() is x:
            return "leaf", known[1]
        number = len(self.leaves)
        name = getattr(x, "path", "") or f"leaf {number}"
        if name in self._names:                          # of two modules that are not in one
            name = f"{name} (leaf {number})"
        self._names[name] = number
        self._leaf_numbers[id(x)] = weakref.ref(x), number
        self.leaves.append(Leaf(number, name, x.shape, x.dtype, self._snapshot(x), born=index))
        return "leaf", number

    def _current(self, node: Node, pull: Pull) -> None:
        """The rules of `node` run."""
        if self._last is None or self._last[2] is not pull:
            self._settle()
            self._last = weakref.ref(node), 0 if pull.number is None else self.records[pull.number].bytes_kept, pull

    def _settle(self) -> None:
        """Note what is held now, after the node pulled last dropped what it kept."""
        if self._last is not None:
            node, kept, pull = self._last[0](), *self._last[1:]
            self._held -= kept if node is None or node.targets is None else 0
            pull.held, self._last = self._held, None

    def _forget(self, since: int) -> None:
        """Drop the nodes numbered above `since`, and the leaves that only they used."""
        while self.nodes and self.nodes[-1].index > since:
            del self._numbers[self.nodes.pop().index]
            self._held -= self.records.pop().bytes_kept
        while self.leaves and self.leaves[-1].born > since:
            gone = self.leaves.pop()
            del self._names[gone.name]
            self._leaf_numbers = {key: known for key, known in self._leaf_numbers.items() if known[1] != gone.number}

    # ------------------------------------------------------------------------------------------------ what it answers

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __str__(self) -> str:
        return text.table(self)

    def _repr_html_(self) -> str:
        return text.html_table(self)

    def why(self, x: Any, steps: int | None = 8) -> str:
        """Explains one gradient in words: of x, a leaf or other Tensor on this tape, a leaf by name, or a node by
        number. The cotangents that reached it in the last backward pass that did: each with its rule in mathematics,
        shape and norm, the axes it was summed over, and what was added where paths join. Of a long chain only the last
        `steps` are told in full; None tells all. ValueError if x is not here, or nothing came back to it."""
        if not self.values:
            raise ValueError("[Tape.why] this tape noted no values: open it as mg.Tape(), without values=False")
        return text.why(self, self._find(x), steps)

    def tree(self) -> str:
        """A tree in plain text, from the outputs down to the leaves; every node once."""
        return text.tree(self)

    def dot(self) -> str:
        """The graph for Graphviz (`dot -Tsvg`), clustered by module: text, which needs nothing installed."""
        return text.dot(self)

    def html(self, path: str | os.PathLike[str], tokens: Sequence | None = None) -> None:
        """Write the tape as a page: one file that opens from disk and steps through the forward and the backward pass.
        tokens: labels of the positions, for the axes of attention that have as many. See `minigrad/study/page`."""
        from minigrad.study import page  # it reads Tapes, so it is above this file

        page.write(self, path, tokens)

    def _find(self, x: Any) -> Reference:
        if isinstance(x, Tensor):
            number = None if x.node is None else self._numbers.get(x.node.index)
            known = self._leaf_numbers.get(id(x))
            if number is not None:
                return "node", number
            if known is not None and known[0]() is x:
                return "leaf", known[1]
        elif isinstance(x, str) and x in self._names:
            return "leaf", self._names[x]
        elif type(x) is int and 0 <= x < len(self.nodes):
            return "node", x
        raise ValueError("[Tape.why] x is a leaf or a result recorded on this tape, the name of a leaf or the number "
                         f"of a node: got {describe(x)}")
