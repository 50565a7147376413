"""How a signal flows through a model while it trains: `watch(model)` measures activations, gradients and updates.

Per watched step and layer (a module of the model, or a parameter), in `rows`:

* activation_rms: sqrt(mean y^2) of the module's output, the last op computed before its (last) call returned;
* gradient_norm: of a module, the norm of the loss's gradient by that output; of a parameter, of its `.grad` when it was
  updated (so after clipping);
* weight_norm, update_ratio: |w| before the update, and |change of w| / |w|; no ratio where w was 0;
* dead: the share of units (last axis) that nothing in the batch activated: relu, gelu or silu never above 0;
* entropy: of attention, for each head the mean over rows of -sum_j A_ij log A_ij, in nats (A of A.10.2): 0 if each row
  looks at one key, log S if at all S alike.

The last two are read off the ops of those names: under mg.composed(), which takes the ops apart, only relu's are there.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from minigrad.backend.device import to_host, xp
from minigrad.nn.module import Module
from minigrad.study.heat import heatmaps
from minigrad.study.profile import Table
from minigrad.tape import Node, Tensor, Watcher, _raw, _set, _wrap, describe

KEYS = "activation_rms", "gradient_norm", "weight_norm", "update_ratio", "dead", "entropy"
_FAR = 1e3                                               # times the gradient at the model's output, or a part of it
_UPDATES = 1e-4, 1e-1                                    # the usual change of a matrix in a step, as a share of it


def watch(model: Module, every: int = 1) -> Flow:
    """`with mg.study.watch(model) as flow:` around a training loop measures every n-th step, layer by layer.

    flow.rows: a dict per layer and step; print(flow): the last step, with warnings in plain words; flow.plot(path): all
    steps as a PNG. A step ends when an Optimizer has stepped; after an update by hand call flow.step(). Training is bit
    for bit what it is unwatched. Kept are the rows and, from backward to update, a copy of the parameters.
    """
    return Flow(model, every)


class Flow(Watcher):
    """What `watch` collects; see the top of the file for the numbers of a row."""

    def __init__(self, model: Module, every: int = 1) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"[watch] watches a Module: got {describe(model)}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"[watch] every is an integer of at least 1: got {every!r}")
        self.model, self.every, self.steps = model, every, 0
        self._rows: list[dict[str, Any]] = []
        self._paths = {id(inner): path or type(model).__name__ for path, inner in model.named_modules()}
        self._calls: list[list] = []                     # of each module being called: its path, its last output
        self._forget()

    def _forget(self) -> None:
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self._made: weakref.WeakKeyDictionary[Node, list[str]] = weakref.WeakKeyDictionary()
        self._latest: dict[str, int] = {}                # of each module the number of the node it made last
        self._before: dict[str, Any] = {}
        self._updated = False

    def _note(self, kind: str, path: str, key: str, value: Any) -> None:
        self._found.setdefault((kind, path), {})[key] = value

    @property
    def _on(self) -> bool:
        return self.steps % self.every == 0

    # while a step runs
    def entered(self, module: Any) -> None:
        if not self._calls and self._updated:
            self._close()
        self._calls.append([self._paths.get(id(module)), None])

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        if not self._on or not self._calls or out.node is None:
            return                                       # not recorded: an evaluation is no training step
        self._calls[-1][1], path = out, self._calls[-1][0]
        if path is not None and out.size:
            if op.name in ("relu", "gelu", "silu"):
                alive = (out._data > 0).any(axis=tuple(range(out.ndim - 1)))
                self._note("module", path, "dead", 1.0 - alive.mean())
            elif op.name.startswith("attention_") or op.name == "masked_softmax" and params["axis"] == -1:
                self._note("module", path, "entropy", _entropy(op, out, args, params))

    def left(self, module: Any) -> None:
        path, out = self._calls.pop()
        if out is None:
            return
        if self._calls:
            self._calls[-1][1] = out
        if path is not None:
            self._note("module", path, "activation_rms", _norm(out._data) / math.sqrt(max(1, out.size)))
            self._made.setdefault(out.node, []).append(path)
            self._latest[path] = out.node.index

    def pulling(self, node: Node, ct: Any) -> None:
        if not self._on:
            return
        if not self._before and not self._updated:
            self._before = {path: p._data.copy() for path, p in self.model.named_parameters() if p.requires_grad}
        for path in self._made.get(node, ()):
            if self._latest[path] == node.index:         # of a module called several times the last output, as above
                self._note("module", path, "gradient_norm", _norm(_raw(ct)))

    def stepped(self, optimizer: Any) -> None:
        self._update({id(p) for group in optimizer.param_groups for p in group["params"]})

    def step(self) -> None:
        """The parameters were updated by hand: the step has ended. After an Optimizer's step it does nothing."""
        if not self._updated:
            self._update({id(p) for p in self.model.parameters()})

    def _update(self, which: set[int]) -> None:
        for path, p in self.model.named_parameters():
            if id(p) in which:
                self._updated = True
                w = self._before.pop(path, None)
                if w is not None:
                    self._note("parameter", path, "gradient_norm", None if p._grad is None else _norm(p._grad._data))
                    self._note("parameter", path, "weight_norm", _norm(w))
                    self._note("parameter", path, "update_ratio", _norm(p._data - w))

    def _close(self) -> None:
        """Make rows of what was found, in the model's order: here, once a step, a GPU is waited for."""
        if self._on:
            order = {("module", path): i for i, path in enumerate(self._paths.values())}
            order |= {("parameter", path): len(order) + i for i, (path, _) in enumerate(self.model.named_parameters())}
            for kind, path in sorted(self._found, key=lambda of: order.get(of, len(order))):
                numbers = {key: _number(self._found[kind, path].get(key)) for key in KEYS}
                if kind == "parameter":
                    size = numbers["weight_norm"]
                    numbers["update_ratio"] = numbers["update_ratio"] / size if size else None
                self._rows.append({"step": self.steps, "layer": path, "kind": kind, **numbers})
        self.steps += 1
        self._forget()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._updated:
            self._close()
        self._forget()

    # afterwards
    @property
    def rows(self) -> list[dict[str, Any]]:
        """step, layer, kind ("module" or "parameter") and the numbers, of every watched step that has ended."""
        if self._updated:
            self._close()
        return self._rows

    def __str__(self) -> str:
        if not self.rows:
            return "no step has ended yet: it ends with Optimizer.step(), or with flow.step() after an update by hand"
        last = [row for row in self.rows if row["step"] == self.rows[-1]["step"]]
        said = warnings_of(last, self._matrices())
        rows = [{**row, "warning": "; ".join(words)} for row, words in zip(last, said)]
        count = sum(map(bool, said))
        return (f"step {last[0]['step']}: {count} of {len(last)} layers with a warning\n"
                + str(Table(rows, {"layer": ("layer", str), **_COLUMNS, "warning": ("", str)})))

    def _matrices(self) -> set[str]:
        return {path for path, p in self.model.named_parameters() if p.ndim > 1}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Activation RMS and gradient norm of the modules, update ratio of the matrices: a row per layer, a column per
        step, the number as a colour; grey where it is 0 or missing. A PNG; needs matplotlib."""
        matrices = self._matrices()
        layers = [row for row in self.rows if row["kind"] == "module" or row["layer"] in matrices]
        heatmaps(path, layers, {("activation_rms", "module"): ("activation RMS", None),
                                ("gradient_norm", "module"): ("gradient norm", None),
                                ("update_ratio", "parameter"): ("update / weight of matrices", _UPDATES)})


def _norm(a: Any) -> Any:
    """sqrt(sum a^2), a 0-d array on a's device."""
    m, a = xp(a), a.astype(np.float32) if a.dtype == np.float16 else a
    with np.errstate(all="ignore"):                      # too large to square is an infinity, which the table shows
        return m.sqrt(m.square(a).sum())


def _number(x: Any) -> Any:
    """What a row holds: a float, a list of them, or None."""
    if x is None:
        return None
    x = to_host(x)
    return x.tolist() if x.ndim else float(x)


def _entropy(op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> Any:
    """Of each head's rows. The kernels do not give A: with the identity for v the composition's A v is A."""
    a = out._data
    if op.name != "masked_softmax":
        q, k, _, *masks = (x.detach() if isinstance(x, Tensor) else x for x in args)
        m, s = xp(a), k.shape[-2]
        v = _wrap(m.broadcast_to(m.eye(s, dtype=a.dtype), (*k.shape[:-1], s)))
        with _set(watchers=(), recording=False):
            a = op.reference(q, k, v, *masks, **{**params, "dropout": None, "refuse_empty_rows": False})._data
    m = xp(a)
    each = -(a * m.log(m.where(a > 0, a, 1.0))).sum(axis=-1)
    return each.mean(axis=tuple(i for i in range(each.ndim) if i != each.ndim - 2))


def warnings_of(rows: Sequence[dict[str, Any]], matrices: set[str]) -> list[list[str]]:
    """What is unusual in each row of one step, in plain words."""
    norms = [row["gradient_norm"] for row in rows if row["kind"] == "module" and row["gradient_norm"] is not None]
    whole = next((row["gradient_norm"] for row in rows if row["kind"] == "module"), None) or max(norms, default=0.0)
    said = []
    for row in rows:
        words, g, update = [], row["gradient_norm"], row["update_ratio"]
        if not all(math.isfinite(x) for x in (row["activation_rms"], g, row["weight_norm"], update) if x is not None):
            words.append("not finite")
        elif row["kind"] == "module" and g is not None:
            if g == 0:
                words.append("no gradient arrives")
            elif g < whole / _FAR:
                words.append(f"vanishing gradient: {g / whole:.0e} of that at the model's output")
            elif g > whole * _FAR:
                words.append(f"exploding gradient: {g / max(whole, 1e-300):.0e} times that at the model's output")
        elif row["layer"] in matrices and update is not None and not _UPDATES[0] <= update <= _UPDATES[1]:
            words.append(f"{'large' if update > _UPDATES[1] else 'small'} update: {update:.0e} of the weights (usual: "
                         f"{_UPDATES[0]:g} to {_UPDATES[1]:g})")
        if row["dead"] is not None and row["dead"] > 0.5:
            words.append(f"{100 * row['dead']:.0f} % of the units are dead on this batch")
        said.append(words)
    return said


def _several(x: Any) -> str:
    return f"{min(x):.2f} to {max(x):.2f}" if isinstance(x, list) else f"{x:.2f}"


def _short(x: float) -> str:
    return f"{x:.3g}"


_COLUMNS = {"activation_rms": ("activation RMS", _short), "gradient_norm": ("gradient norm", _short),
            "weight_norm": ("weight norm", _short), "update_ratio": ("update / weight", _short),
            "dead": ("dead", lambda x: f"{100 * x:.0f} %"), "entropy": ("entropy of heads", _several)}
