"""The ledger of a model: what each layer holds, computes and keeps, from one pass over an example."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minigrad.backend.device import is_array, root
from minigrad.backend.random import get_rng_state, set_rng_state
from minigrad.nn.attention import MultiheadAttention
from minigrad.nn.module import Module
from minigrad.ops.flops import backward_flops, flops
from minigrad.tape import Tensor, Watcher, _raw, _set

COLUMNS = ("parameters", "forward", "backward", "activations", "cache")


class Ledger:
    """What `summarize` found: `rows`, a dict of COLUMNS for each layer, and `total`. print() shows them as a table.

    parameters: numbers learned, a shared one where it comes first. forward, backward: floating-point operations of
    products for a token, 2 for a multiply-add. activations: bytes for a token that the recorded nodes keep for the
    backward pass, parameters left out and each array counted once. cache: bytes of keys and values for a token.
    """

    def __init__(self, title: str, tokens: int, rows: dict[str, dict[str, float]], notes: dict[str, str]) -> None:
        self.title, self.tokens, self.rows, self.notes = title, tokens, rows, notes

    @property
    def total(self) -> dict[str, float]:
        return {column: sum(row[column] for row in self.rows.values()) for column in COLUMNS}

    def __str__(self) -> str:
        heads = ("layer", "parameters", "FLOPs/token forward", "backward", "activation B/token", "KV cache B/token", "")
        lines = [(path, *(f"{math.ceil(row[column]):,}" if row[column] else "-" for column in COLUMNS),
                  self.notes.get(path, "")) for path, row in [*self.rows.items(), ("total", self.total)]]
        first, *widths, _ = [max(map(len, column)) for column in zip(heads, *lines)]
        table = ["  ".join([path.ljust(first), *(cell.rjust(w) for cell, w in zip(cells, widths)), note]).rstrip()
                 for path, *cells, note in (heads, *lines)]
        return "\n".join([self.title, *table[:-1], "-" * max(map(len, table)), table[-1]])

    __repr__ = __str__


class _Meter(Watcher):
    """Adds up, by the path of the module that computed it, what a pass costs."""

    def __init__(self, model: Module) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.parameters = [root(p._data) for p in model.parameters()]
        self.counted = {id(base) for base in self.parameters}
        self.bases: list[Any] = []                       # keeps what is counted alive, so that its id stays its own
        self.stack: list[str] = []
        self.rows: dict[str, dict[str, float]] = {}

    def row(self, path: str) -> dict[str, float]:
        return self.rows.setdefault(path, dict.fromkeys(COLUMNS, 0.0))

    def entered(self, module: Module) -> None:
        self.stack.append(self.paths.get(id(module), ""))

    def left(self, module: Module) -> None:
        self.stack.pop()

    def computed(self, op: Any, out: Tensor, args: Any, params: dict[str, Any]) -> None:
        row, node = self.row(self.stack[-1] if self.stack else ""), out.node
        row["forward"] += flops(op, args, params)
        if node is None:
            return
        row["backward"] += backward_flops(op, args, params, [target is not None for target in node.targets])
        row["activations"] += sum(self.new(a) for a in node.kept)

    def new(self, array: Any) -> int:
        """Bytes of the memory that `array` is part of, the first time it is met."""
        base = root(array)
        if id(base) in self.counted:
            return 0
        self.counted.add(id(base))
        self.bases.append(base)
        return base.nbytes


def summarize(model: Module, *inputs: Any, targets: Any = None) -> Ledger:
    """The ledger of model(*inputs), or of model.loss(*inputs, targets), by layer: attentions and MLPs apart.

    It is measured on one recorded forward pass, so it holds for any Module: the example's size decides what a token's
    attention costs (the pairs that causality and the window leave) and how experts share. Memory: that of one such
    pass. Afterwards the model, its gradients and the stream of random numbers are as before.
    """
    meter, state = _Meter(model), get_rng_state()
    try:
        with _set(recording=True), meter:
            out = model(*inputs) if targets is None else model.loss(*inputs, targets)
    finally:
        set_rng_state(state)
    del out
    last = _raw(inputs[-1])
    last = last if is_array(last) else np.asarray(last)
    tokens = math.prod(last.shape[:-1] if last.dtype.kind == "f" else last.shape)    # vectors (*S, C), or ids (*S)
    rows: dict[str, dict[str, float]] = {}
    layers = _layers(model)
    for path, row in meter.rows.items():
        mine = rows.setdefault(_layer_of(path, layers), dict.fromkeys(COLUMNS, 0.0))
        for column in COLUMNS:
            mine[column] += row[column] / tokens
    for path, p in model.named_parameters():
        rows.setdefault(_layer_of(path, layers), dict.fromkeys(COLUMNS, 0.0))["parameters"] += p.size
    notes = {}
    for path, module in model.named_modules():
        if isinstance(module, MultiheadAttention):
            row = rows.setdefault(path, dict.fromkeys(COLUMNS, 0.0))
            row["cache"] += 2 * module.n_kv_heads * module.d_head * module.qkv.weight.dtype.itemsize
            notes[path] = _heads_of(module)
    order = {path: i for i, path in enumerate([*layers, ""])}
    rows = dict(sorted(rows.items(), key=lambda item: order[item[0]]))
    rows = {path or "(itself)": row for path, row in rows.items() if any(row.values())}
    return Ledger(f"{type(model).__name__}: {model.num_parameters():,} parameters; for one of {tokens} tokens:", tokens,
                  rows, notes)


def _heads_of(module: MultiheadAttention) -> str:
    kind = ("multi-head" if module.n_kv_heads == module.n_heads else
            "multi-query (MQA)" if module.n_kv_heads == 1 else "grouped-query (GQA)")
    window = "" if module.window is None else f", window {module.window}"
    return f"{kind}: {module.n_heads} query heads over {module.n_kv_heads} of keys and values{window}"


def _layers(model: Module) -> list[str]:
    """The paths that get a row: the largest modules that hold no attention, and the attentions."""
    rows: list[str] = []
    for path, module in model.named_modules():           # parents first
        splits = any(isinstance(m, MultiheadAttention) for m in module.modules() if m is not module)
        if path and not splits and not any(path.startswith(row + ".") for row in rows):
            rows.append(path)
    return rows


def _layer_of(path: str, layers: list[str]) -> str:
    """The row that a module's or parameter's path belongs to."""
    return max((row for row in layers if path == row or path.startswith(row + ".")), key=len, default="")
