"""The training loop that the examples share: progress, evaluation on held-out text, checkpoints, a CSV, a loss curve.

A run lives in one folder: checkpoint.safetensors (model, optimiser, step, random state and settings in one file,
written whole), log.csv, loss.png. Batches depend on (seed, step) alone and randomness on two integers, so a resumed run
is, bit for bit, the run that was never interrupted.
"""

from __future__ import annotations

import csv
import ctypes
import json
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from minigrad.backend.random import get_rng_state, set_rng_state
from minigrad.data import Batches
from minigrad.io import CheckpointError, load, load_metadata, save, write_whole
from minigrad.nn.module import Module
from minigrad.optim import Optimizer, Schedule, Together, clip_grad_norm_

try:
    import fcntl
except ImportError:                                      # Windows
    fcntl = None                                         # type: ignore[assignment]

COLUMNS = ("step", "train_loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "seconds")


class TrainingError(RuntimeError):
    """A run that cannot start or go on; one line that says why and what to do."""


class FolderTaken(TrainingError):
    """Another process is training in the folder."""


def decay_groups(model: Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: matrices decay, vectors (biases, norms) do not."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]


def evaluate(model: Module, windows: Batches, batch_size: int = 64, most: int | None = None) -> float:
    """Mean loss (nats per token) over the windows in order, each token once; `most`: only so many batches, evenly
    spread."""
    total, count = 0.0, 0
    batches = -(-len(windows) // batch_size)
    every = 1 if most is None else max(1, -(-batches // most))
    with model.evaluating():
        for i, (x, y) in enumerate(windows.sequential(batch_size)):
            if i % every == 0:
                total += float(model.loss(x, y)) * windows.count(y)       # type: ignore[operator]
                count += windows.count(y)
    return total / count


class Run:
    """A training run in a folder.

    Run(out, model, optimizer, train, val, steps, schedule, settings) claims the folder, before anything is computed;
    `fit()` trains from `step` to `steps` and gives it up; `resume()` takes up what the folder holds.
    schedule(step) is the learning rate of the first parameter group; the others keep their ratio to it.
    """

    def __init__(self, out: str | os.PathLike[str], model: Any, optimizer: Optimizer | Together, train: Batches,
                 val: Batches, steps: int, schedule: Schedule, clip: float = 1.0, eval_every: int = 250,
                 settings: dict[str, Any] | None = None) -> None:
        self.out, self.model, self.optimizer, self.train, self.val = Path(out), model, optimizer, train, val
        self.steps, self.schedule, self.clip, self.eval_every = steps, schedule, clip, max(1, eval_every)
        self.settings = settings or {}
        self.step, self.seconds, self.interrupted = 0, 0.0, False
        self.rows: list[dict[str, Any]] = []
        self.losses: list[float] = []                    # of the steps since the last row
        self.saved: int | None = None                    # the step that the checkpoint holds
        first, *_ = rates = [group["lr"] for group in optimizer.param_groups]
        self.ratios = [rate / first if first else 1.0 for rate in rates]
        claim(self.out)
        keep_freed_memory()

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    def save(self) -> None:
        """Write checkpoint, log and curve; each file whole. Parameters that are not finite are refused."""
        for path, p in self.model.named_parameters():
            self._finite(f"largest of {path}", np.abs(p.numpy()).max(initial=0.0))
        state = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        state |= {f"optimizer.{k}": v for k, v in self.optimizer.state_dict().items()}
        run = {"step": self.step, "seconds": self.seconds, "random": get_rng_state(), "rows": self.rows,
               "losses": self.losses, "settings": self.settings}
        save(self.checkpoint, state, {"minigrad.run": json.dumps(run)})
        self.saved = self.step
        with write_whole(self.out / "log.csv") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        plot(self.rows, self.out / "loss.png", self.settings.get("baseline"))

    def resume(self) -> None:
        """Go on from the folder's checkpoint; nothing changes if it does not fit."""
        run, state = read_run(self.checkpoint), load(self.checkpoint)
        parts: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
        for name, value in state.items():
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = value
        before = self.optimizer.state_dict()
        self.optimizer.load_state_dict(parts["optimizer"])
        try:
            self.model.load_state_dict(parts["model"])
        except ValueError:
            self.optimizer.load_state_dict(before)
            raise
        self.step, self.seconds, self.rows, self.losses = run["step"], run["seconds"], run["rows"], run["losses"]
        self.saved = self.step
        set_rng_state(run["random"])

    def fit(self) -> None:
        """Train to `steps`. Ctrl-C finishes the step it is in, saves, and returns with `interrupted` set; a second
        Ctrl-C stops at once. A loss or gradient that is not finite stops the run; the last checkpoint stays."""
        _needs("matplotlib.figure")                      # to be told now, not when the first curve is drawn
        begin, spent, tokens = time.perf_counter(), self.seconds, 0
        with claimed(self.out), _progress(self.step, self.steps) as bar, _on_interrupt() as asked:
            while self.step < self.steps and not asked():
                lr = self.schedule(self.step)
                for group, ratio in zip(self.optimizer.param_groups, self.ratios):
                    group["lr"] = lr * ratio
                x, y = self.train.batch(self.step)
                loss = self.model.loss(x, y)
                value = self._finite("loss", loss)
                self.optimizer.zero_grad()
                loss.backward()
                norm = self._finite("gradient's norm", clip_grad_norm_(self.model.parameters(), self.clip))
                self.optimizer.step()
                self.step += 1
                tokens += self.train.count(y)
                self.losses.append(value)
                self.seconds = spent + time.perf_counter() - begin
                speed = tokens / (self.seconds - spent)
                bar.set_postfix(loss=f"{value:.3f}", **{"tokens/s": f"{speed:,.0f}"}, refresh=False)
                bar.update()
                if self.step % self.eval_every == 0 or self.step == self.steps:
                    self._report(bar, lr, norm, speed)
            self.interrupted = self.step < self.steps
            self.save()

    def _finite(self, name: str, x: Any) -> float:
        value = float(x)
        if math.isfinite(value):
            return value
        saved = f"{self.checkpoint} holds the state of step {self.saved}"
        raise TrainingError(f"[train] the {name} is {value} at step {self.step}; "
                            f"{'nothing was saved yet' if self.saved is None else saved}. Find the op with "
                            "mg.detect_anomaly(), or lower the learning rate")

    def _report(self, bar: Any, lr: float, norm: float, speed: float) -> None:
        train_loss, self.losses = sum(self.losses) / len(self.losses), []
        val_loss = self._finite("validation loss", evaluate(self.model, self.val,
                                                            most=None if self.step == self.steps else 12))
        row = dict(zip(COLUMNS, (self.step, train_loss, val_loss, lr, norm, round(speed), round(self.seconds, 2))))
        self.rows.append(row)
        bar.write(f"step {self.step:>6}  train {train_loss:.4f}  val {val_loss:.4f}  lr {lr:.2e}  |g| {norm:.2f}  "
                  f"{speed:,.0f} tokens/s  {self.seconds:.0f} s")
        self.save()


def keep_freed_memory() -> None:
    """Let the process keep the memory of freed arrays for the next ones. Without this glibc hands every large array
    back to the system, and the next one is mapped and zeroed anew, page by page: a seventh of a small model's step."""
    with suppress(OSError, AttributeError):              # another libc has no such knob
        mallopt = ctypes.CDLL(None).mallopt
        for knob in (-1, -3):                            # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            mallopt(knob, 1 << 30)


_claims: dict[Path, int] = {}                            # this process's folders: descriptors that hold a lock


def claim(path: Path) -> None:
    """Make the folder, prove that a file can be written in it, and keep other processes out, or raise. The lock is the
    system's and ends with the process, so none is ever stale; where there is none (Windows, some network disks) nobody
    is kept out."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = error.strerror or error
        raise TrainingError(f"[train] cannot write into {path}: {why}; choose another folder") from None
    if fcntl is not None and path.resolve() not in _claims:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise FolderTaken(f"[train] another process is training in {path}; wait for its end, or choose another "
                              "folder") from None
        except OSError:                                  # a disk without locks
            pass
        _claims[path.resolve()] = descriptor


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The folder is this process's inside `with`, and free afterwards."""
    claim(path)
    try:
        yield
    finally:
        if (descriptor := _claims.pop(path.resolve(), None)) is not None:
            os.close(descriptor)


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a checkpoint says of its run: step, seconds, random, rows, losses, settings."""
    kinds = {"step": int, "seconds": float, "random": list, "rows": list, "losses": list, "settings": dict}
    try:
        run = json.loads(load_metadata(path)["minigrad.run"])
        if all(isinstance(run[name], kind) for name, kind in kinds.items()) and len(run["random"]) == 2:
            return run
    except (KeyError, TypeError, json.JSONDecodeError):
        pass
    raise CheckpointError(f"[train] {path} is not a checkpoint of a training run")


def plot(rows: list[dict[str, Any]], path: Path, baseline: dict[str, Any] | None = None) -> None:
    """Draw train and validation loss over steps (PNG), with a dashed line for a baseline {"name", "loss"}."""
    if not rows:
        return
    figure_type = _needs("matplotlib.figure").Figure
    figure = figure_type(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] for row in rows]
    for key, label, color in (("train_loss", "train", "#8aa1b8"), ("val_loss", "validation", "#c2410c")):
        values = [row[key] for row in rows]
        axes.plot(steps, values, label=f"{label}, {values[-1]:.3f}", color=color, linewidth=2,
                  marker="o" if len(rows) < 30 else "", markersize=3.5)
    if baseline:
        axes.axhline(baseline["loss"], color="#475569", linestyle="--", linewidth=1.2,
                     label=f"{baseline['name']}, {baseline['loss']:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    with write_whole(path, "wb") as file:
        figure.savefig(file, format="png")


def _needs(module: str) -> Any:
    """An optional library, or the line that installs it."""
    import importlib
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"[train] {module.split('.')[0]} is missing; in the clone of minigrad: "
                          "python -m pip install -e '.[train]'") from None


def _progress(start: int, steps: int) -> Any:
    return _needs("tqdm").tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, disable=None,
                               smoothing=0.05)


@contextmanager
def _on_interrupt() -> Iterator[Any]:
    """Gives a function that is true once Ctrl-C was pressed. Only the main thread can ask; elsewhere it stays false."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("\nstopping after this step (Ctrl-C again: at once, without saving)", flush=True)

    old = signal.signal(signal.SIGINT, handler)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, old)
