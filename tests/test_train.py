"""Runs: what they write, that a resumed run is the run that was never interrupted, and that bad input loses nothing.

Texts and models are tiny; example 03 is run as its user runs it, in this process where possible.
"""

import csv
import importlib.util
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import or_skip

import minigrad as mg
from minigrad import data, nn, optim, train
from minigrad.io import CheckpointError

EXAMPLE = Path(__file__).parent.parent / "examples" / "03_train_char_gpt.py"
TINY = ["--config", "nano", "--layers", "1", "--width", "8", "--heads", "2", "--context", "8", "--batch", "4"]
TEXT = "the cat sat on the mat; the dog sat on the log.\n" * 30
TIMES = ("tokens_per_second", "seconds")  # the columns that differ from run to run


@pytest.fixture(autouse=True)
def _extras():
    or_skip("tqdm", "training runs (python -m pip install -e '.[train]')")
    or_skip("matplotlib", "training runs (python -m pip install -e '.[train]')")


class Model(nn.Transformer):
    """A tiny model with dropout, whose loss calls `at[n]` the n-th time it is asked for while training."""

    def __init__(self, at=None, d_model=8):
        super().__init__(vocab_size=30, context=8, d_model=d_model, n_layers=1, n_heads=2, dropout=0.2)
        self._at, self._calls = at or {}, 0

    def loss(self, ids, targets, attn_mask=None):
        loss = super().loss(ids, targets, attn_mask)
        if self.training:
            self._calls += 1
            if self._calls in self._at:
                loss = self._at[self._calls](loss)
        return loss


def interrupt(loss):
    signal.raise_signal(signal.SIGINT)
    return loss


def make(out, steps=20, at=None, seed=3, eval_every=5, **options):
    """A run on the cats and dogs, from a seed."""
    mg.manual_seed(seed)
    tokenizer = data.CharTokenizer.from_text(TEXT)
    held_in, held_out = data.split(tokenizer.encode(TEXT), 0.1)
    model = Model(at, **options)
    optimizer = optim.AdamW(train.decay_groups(model, 0.1), lr=0.01)
    return train.Run(
        out,
        model,
        optimizer,
        data.Windows(held_in, 8, 4, seed),
        data.Windows(held_out, 8, 4),
        steps,
        optim.cosine_schedule(0.01, 20, 2, 0.001),
        eval_every=eval_every,
        settings={"name": "test"},
    )


def everything(run):
    """All that must be equal, bit for bit, between a run and its double."""
    arrays = {**{f"m.{k}": v for k, v in run.model.state_dict().items()}, **run.optimizer.state_dict()}
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in run.rows]
    return {k: v.numpy().tobytes() for k, v in arrays.items()}, rows, mg.get_rng_state(), run.step, run.losses


def log_of(folder):
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def no_curve(monkeypatch):
    """Drawing takes most of a tiny run's time; where the curve is not the question it is left out."""
    monkeypatch.setattr(train, "plot", lambda *_: None)


# --- Run ----------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_writes_checkpoint_log_and_curve(tmp_path, capsys):
    run = make(tmp_path / "a" / "run", steps=60, eval_every=20)
    start = train.evaluate(run.model, run.val)
    run.fit()
    assert not run.interrupted and run.step == 60
    assert run.rows[-1]["val_loss"] < start - 0.5  # 19 characters: from log 30 = 3.4, some 0.7 lower
    assert sorted(p.name for p in run.out.iterdir()) == ["checkpoint.safetensors", "log.csv", "loss.png"]
    rows = log_of(run.out)
    assert tuple(rows[0]) == train.COLUMNS == ("step", "train_loss", "val_loss", "lr", "grad_norm", *TIMES)
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    assert float(rows[-1]["val_loss"]) == train.evaluate(run.model, run.val)  # of the final weights, in full
    assert float(rows[0]["lr"]) == run.schedule(19) and float(rows[0]["train_loss"]) > float(rows[-1]["train_loss"])
    assert all(float(row["tokens_per_second"]) > 0 and float(row["grad_norm"]) > 0 for row in rows)
    png = (run.out / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and png.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", png[16:24]) == (910, 546)  # 7 x 4.2 inches of 130 dots
    state = mg.load(run.checkpoint)
    for path, p in run.model.named_parameters():
        assert state[f"model.{path}"].numpy().tobytes() == p.numpy().tobytes()
    shown = capsys.readouterr().out
    assert "step     20" in shown and "tokens/s" in shown


def test_train_loss_of_a_row_is_the_mean_since_the_last_row(no_curve, tmp_path):
    seen = []

    def keep(loss):
        seen.append(loss.item())
        return loss

    run = make(tmp_path, steps=7, at={n: keep for n in range(1, 8)})
    run.fit()
    assert [row["step"] for row in run.rows] == [5, 7]
    assert [row["train_loss"] for row in run.rows] == [sum(seen[:5]) / 5, sum(seen[5:]) / 2]


@pytest.mark.parametrize("at", [3, 5, 8], ids=["before the first row", "on a row", "between rows"])
def test_an_interrupted_and_resumed_run_is_the_uninterrupted_one(no_curve, tmp_path, at):
    """With dropout, clipping, a schedule and Adam's state; Ctrl-C comes within step `at`, which ends first."""
    whole = make(tmp_path / "whole")
    whole.fit()
    wanted = everything(whole)
    first = make(tmp_path / "run", at={at: interrupt})
    first.fit()
    assert first.interrupted and first.step == at and first.checkpoint.exists()
    second = make(tmp_path / "run", seed=99)  # begins elsewhere in every respect but the data
    second.train = first.train
    second.resume()
    assert everything(second) == everything(first)[:2] + (second_state(first),) + (at, first.losses)
    second.fit()
    assert not second.interrupted
    assert everything(second) == wanted
    assert [row["step"] for row in log_of(tmp_path / "run")] == ["5", "10", "15", "20"]


def second_state(run):
    return tuple(train.read_run(run.checkpoint)["random"])


def test_the_same_seed_gives_the_same_run(no_curve, tmp_path):
    ends = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run = make(tmp_path / name, steps=6, seed=seed)
        run.fit()
        ends.append(everything(run))
    assert ends[0] == ends[1]
    assert ends[0][0] != ends[2][0]


def test_a_second_interrupt_stops_at_once_and_keeps_the_last_checkpoint(no_curve, tmp_path):
    def twice(loss):
        interrupt(loss)
        return interrupt(loss)

    before = signal.getsignal(signal.SIGINT)
    run = make(tmp_path, at={7: twice})
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert train.read_run(run.checkpoint)["step"] == 5  # that of the row at step 5
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_are_the_callers_again_after_a_run(no_curve, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    make(tmp_path, steps=2).fit()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_may_be_in_another_thread(tmp_path):
    """Python allows signal handlers in the main thread only."""
    run, errors = make(tmp_path, steps=2), []

    def work():
        try:
            run.fit()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not errors and run.step == 2 and run.checkpoint.exists()


def nan(loss):
    return loss * math.nan


def nan_gradient(loss):
    return loss + ((loss * 0.0) ** 0.5) * 0.0  # finite, with a slope of infinity times 0


@pytest.mark.parametrize(
    "bad, name", [(nan, "loss is nan"), (nan_gradient, "gradient's norm is nan")], ids=["loss", "gradient"]
)
@pytest.mark.parametrize(
    "at, kept",
    [
        (3, "nothing was saved yet"),
        (8, "checkpoint.safetensors holds the state of step 5"),
        (10, "holds the state of step 5"),
    ],
)
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(no_curve, tmp_path, bad, name, at, kept):
    run = make(tmp_path, at={at: bad})
    with (
        np.errstate(all="ignore"),
        pytest.raises(train.TrainingError, match=rf"\[train\] the {name} at step {at - 1}") as error,
    ):
        run.fit()
    assert kept in str(error.value) and "detect_anomaly" in str(error.value) and "\n" not in str(error.value)
    assert all(np.isfinite(p.numpy()).all() for p in run.model.parameters())  # nothing was stepped
    assert run.checkpoint.exists() == (at > 5)
    if at > 5:
        again = make(tmp_path)
        again.resume()
        assert again.step == 5


def test_a_checkpoint_that_does_not_fit_changes_nothing(no_curve, tmp_path):
    make(tmp_path / "a", steps=5).fit()
    file = (tmp_path / "a" / "checkpoint.safetensors").read_bytes()
    other = make(tmp_path / "a", d_model=16)
    before = everything(other)
    with pytest.raises(ValueError, match="misshapen"):
        other.resume()
    assert everything(other) == before
    # an optimiser that fits, and a model that does not
    run = make(tmp_path / "b", steps=5)
    run.fit()
    state, run_text = mg.load(run.checkpoint), mg.io.load_metadata(run.checkpoint)
    mg.save(run.checkpoint, {**state, "model.extra": mg.zeros(2)}, run_text)
    fresh = make(tmp_path / "b")
    before = everything(fresh)
    with pytest.raises(ValueError, match="unknown extra"):
        fresh.resume()
    assert everything(fresh) == before
    assert (tmp_path / "a" / "checkpoint.safetensors").read_bytes() == file


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"minigrad.run": "not JSON"},
        {"minigrad.run": "[]"},
        {"minigrad.run": '{"step": 3}'},
        {"minigrad.run": '{"step": "3", "seconds": 1.0, "random": [0, 0], "rows": [], "losses": [], "settings": {}}'},
    ],
)
def test_what_is_not_a_checkpoint_of_a_run_is_refused(tmp_path, metadata):
    mg.save(tmp_path / "checkpoint.safetensors", {"x": mg.zeros(2)}, metadata)
    with pytest.raises(CheckpointError, match=r"checkpoint.safetensors is not a checkpoint of a training run"):
        make(tmp_path).resume()


@pytest.mark.parametrize("library", ["tqdm", "matplotlib"])
def test_a_missing_library_is_told_before_training(tmp_path, monkeypatch, library):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now fails
    monkeypatch.setitem(sys.modules, library, None)
    run = make(tmp_path)
    with pytest.raises(ImportError, match=rf"\[train\] {library} is missing.*python -m pip install .*\[train\]"):
        run.fit()
    assert run.step == 0 and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(train.TrainingError, match=r"\[train\] cannot write into .*file/run.*choose another"):
        make(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"


def test_evaluate_counts_each_token_once(rng):
    """32 windows in batches of 5, so that the last is smaller, weigh the same as all in one."""
    model, windows = Model(), data.Windows(rng.integers(0, 30, 32 * 8 + 1), 8, 4)
    x, y = next(windows.sequential(32))
    wanted = model.eval().loss(x, y).item()
    model.train()
    assert train.evaluate(model, windows, batch_size=5) == pytest.approx(wanted, rel=1e-6)  # without dropout
    assert model.training and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("most, taken", [(1, [0]), (2, [0, 4]), (3, [0, 3, 6]), (8, range(8)), (99, range(8))])
def test_evaluate_takes_at_most_so_many_batches_evenly_spread(rng, most, taken):
    model, windows = Model(), data.Windows(rng.integers(0, 30, 32 * 8 + 1), 8, 4)
    batches = list(windows.sequential(4))
    model.eval()
    wanted = sum(model.loss(*batches[i]).item() for i in taken) / len(taken)
    assert train.evaluate(model, windows, batch_size=4, most=most) == pytest.approx(wanted, rel=1e-6)
    assert not model.training


def test_matrices_decay_and_vectors_do_not():
    model = Model()
    matrices, vectors = train.decay_groups(model, 0.3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in matrices["params"]} == {2} and {p.ndim for p in vectors["params"]} == {1}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


# --- example 03, as its user runs it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    """The example as a module; the tests that must see its last lines run it by its path instead."""
    spec = importlib.util.spec_from_file_location("train_char_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def finished(tmp_path_factory, example):
    """A finished run, to be copied: its folder and the text beside it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    assert (
        example.main(
            [*TINY, "--text", str(folder / "text.txt"), "--out", str(folder / "run"), "--steps", "6", "--sample", "5"]
        )
        == 0
    )
    return folder


@pytest.fixture
def run_folder(finished, tmp_path):
    """A copy of that run, under which nothing may change when an error is expected."""
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def error_of(monkeypatch, *arguments):
    """The one line that `python examples/03_train_char_gpt.py ARGUMENTS` ends with, instead of a traceback."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    line = end.value.code  # Python prints a text to stderr and exits with 1
    assert isinstance(line, str) and line.startswith("error: ") and "\n" not in line
    return line


def test_example_trains_writes_and_samples(tmp_path, example, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "run"
    code = example.main(
        [
            *TINY,
            "--text",
            str(tmp_path / "text.txt"),
            "--out",
            str(out),
            "--steps",
            "8",
            "--sample",
            "12",
            "--prompt",
            "the ",
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint.safetensors", "log.csv", "loss.png"]
    for part in (
        "1,440 characters",
        "1,296 to learn, 144 held out",
        "4-gram model of the same text: validation loss",
        "validation loss",
        f"written: {out / 'checkpoint.safetensors'}",
    ):
        assert part in shown
    sample = shown.split("---\n")[-1]
    assert sample.startswith("the ") and len(sample.rstrip("\n")) <= 4 + 12
    assert len(log_of(out)) == 8  # eight rows unless --eval-every


def test_example_resumes_a_finished_run_to_write_more_and_to_train_on(no_curve, run_folder, example, capsys):
    before = mg.load(run_folder / "checkpoint.safetensors")
    assert example.main(["--resume", str(run_folder), "--prompt", "dog", "--sample", "4"]) == 0
    assert "resumed" in (shown := capsys.readouterr().out) and shown.split("---\n")[-1].startswith("dog")
    after = mg.load(run_folder / "checkpoint.safetensors")
    assert all(after[name].numpy().tobytes() == before[name].numpy().tobytes() for name in before)
    assert example.main(["--resume", str(run_folder), "--steps", "9", "--sample", "0"]) == 0
    rows = log_of(run_folder)
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_example_encodes_a_large_text_to_disk_and_anew_for_a_new_run(no_curve, tmp_path, example, monkeypatch):
    monkeypatch.setattr(example, "LARGE", 100)  # bytes
    out = tmp_path / "run"
    for name, text in (("a", TEXT), ("b", TEXT.replace("cat", "tac"))):  # the same characters
        (tmp_path / name).write_text(text)
        assert (
            example.main([*TINY, "--text", str(tmp_path / name), "--out", str(out), "--steps", "2", "--sample", "1"])
            == 0
        )
        tokens = data.open_tokens(out / "tokens.npy")
        assert data.CharTokenizer.from_text(text).decode(tokens) == text
        if name == "a":                                  # a run that was given up before its first checkpoint
            (out / "checkpoint.safetensors").unlink()
    assert example.main(["--resume", str(out), "--steps", "3", "--sample", "1"]) == 0


def test_ctrl_c_saves_and_the_printed_command_goes_on(tmp_path):
    """In a process of its own: Ctrl-C once the first row is written; exit code 130; then the command it printed."""
    text, out = tmp_path / "text.txt", tmp_path / "a run"  # a name with a space, as folders have
    text.write_text(TEXT)
    command = [
        sys.executable,
        str(EXAMPLE),
        *TINY,
        "--text",
        str(text),
        "--out",
        str(out),
        "--steps",
        "100000",
        "--eval-every",
        "5",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "log.csv").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (out / "log.csv").exists(), process.communicate(timeout=5)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, (shown, errors)
    assert "Traceback" not in errors
    step = train.read_run(out / "checkpoint.safetensors")["step"]
    assert 5 <= step < 100000 and f"stopped at step {step} of 100000 and saved; to go on:" in shown
    printed = shlex.split(shown.split("to go on:")[1].strip())
    assert printed[:2] == ["python", str(EXAMPLE)]
    on = subprocess.run(
        [sys.executable, *printed[1:], "--steps", str(step + 3), "--sample", "3", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert on.returncode == 0, on.stderr
    assert f"resumed {out} at step {step}" in on.stdout
    assert train.read_run(out / "checkpoint.safetensors")["step"] == step + 3


def test_errors_end_with_code_1_and_one_line(tmp_path):
    """What `error_of` takes for granted, once in a process of its own."""
    end = subprocess.run(
        [sys.executable, str(EXAMPLE), "--text", str(tmp_path / "none.txt"), "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert end.returncode == 1 and end.stdout == ""
    assert end.stderr == f"error: [read_text] the file must exist: {tmp_path / 'none.txt'}\n"


TEXTS = {
    "empty": (b"", "must hold some text.*is empty"),
    "short": (
        b"abcabcabcabc",
        r"must fill one window of context \+ 1 = 9: 2 tokens; use a longer text or a shorter context",
    ),
    "one character": (b"a", r"\[split\].*1 tokens"),
    "Latin-1": (b"caf\xe9 au lait " * 100, "must be UTF-8.*byte 0xE9 at offset 3"),
    "binary": (b"\x7fELF\x01\x00\x00" * 100, "is binary or UTF-16.*NUL byte at offset 5"),
}


@pytest.mark.parametrize("content, message", TEXTS.values(), ids=TEXTS)
def test_a_text_that_cannot_be_used(run_folder, tmp_path, monkeypatch, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    before = contents(run_folder)
    assert pytest.raises(AssertionError, unchanged, {}, run_folder)  # the check itself can fail
    line = error_of(monkeypatch, *TINY, "--text", tmp_path / "bad.txt", "--out", run_folder.parent / "new")
    assert_match(message, line)
    unchanged(before, run_folder)
    line = error_of(monkeypatch, "--resume", run_folder, "--text", tmp_path / "bad.txt")
    assert line
    unchanged(before, run_folder)


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def unchanged(before, folder):
    assert contents(folder) == before


def assert_match(message, line):
    assert re.search(message, line), line


ARGUMENTS = {
    "no such text": (["--text", "no/such.txt"], "the file must exist: .*no/such.txt"),
    "a folder as text": (["--text", "."], "is a folder"),
    "unknown character": (["--prompt", "the \u20ac"], r"\[encode\].*'\u20ac' \(U\+20AC\) at position 4"),
    "empty prompt": (["--prompt", ""], "--prompt needs at least one character"),
    "no steps": (["--steps", "0"], "--steps must be above 0: 0"),
    "negative steps": (["--steps", "-3"], "--steps must be above 0: -3"),
    "negative width": (["--width", "-8"], "--width must be above 0: -8"),
    "no layers": (["--layers", "0"], "--layers must be above 0: 0"),
    "no heads": (["--heads", "0"], "--heads must be above 0: 0"),
    "negative batch": (["--batch", "-1"], "--batch must be above 0: -1"),
    "no context": (["--context", "0"], "--context must be above 0: 0"),
    "no rows": (["--eval-every", "0"], "--eval-every must be above 0: 0"),
    "lr 0": (["--lr", "0"], "--lr must be above 0: 0.0"),
    "lr nan": (["--lr", "nan"], "--lr must be above 0: nan"),
    "width by heads": (["--width", "10", "--heads", "3"], "heads divide the width.*d_model 10, n_heads 3"),
    "dropout": (["--dropout", "1.5"], "dropout is a probability below 1: got 1.5"),
    "all dropped": (["--dropout", "1.0"], "dropout is a probability below 1: got 1.0"),
    "negative sample": (["--sample", "-1"], "--sample must be at least 0"),
    "temperature": (["--temperature", "-0.5"], "--temperature .* at least 0: -0.5"),
    "seed": (["--seed", "-1"], "seed"),
    "threads": (["--threads", "0"], "at least 1, got 0"),
    "device": (["--device", "tpu"], "a device is .*cpu.*cuda.*'tpu'"),
}


@pytest.mark.parametrize("arguments, message", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_cannot_be_meant(finished, run_folder, monkeypatch, arguments, message):
    """The earlier run in that folder stays whole: nothing is written before everything is known to fit."""
    before = contents(run_folder)
    text = [] if "--text" in arguments else ["--text", finished / "text.txt"]
    assert_match(message, error_of(monkeypatch, *TINY, *text, "--out", run_folder.parent / "new", *arguments))
    unchanged(before, run_folder)


def test_arguments_that_are_not_numbers_are_usage_errors(example, capsys):
    for arguments in (["--steps", "many"], ["--config", "huge"], ["--unknown"]):
        with pytest.raises(SystemExit) as end:
            example.main(arguments)
        assert end.value.code == 2
        assert arguments[-1] in capsys.readouterr().err


def test_cuda_without_cupy_says_what_to_install_and_what_to_type(run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # importing it now fails
    before = contents(run_folder)
    line = error_of(monkeypatch, "--device", "cuda", "--out", run_folder.parent / "new")
    assert_match(r"'cuda' needs CuPy: .*pip install .*without a GPU.*cpu", line)
    unchanged(before, run_folder)


def test_an_out_that_cannot_be_written_is_told_before_training(finished, tmp_path, monkeypatch):
    """Below a plain file: permissions would not stop root."""
    (tmp_path / "file").write_text("mine")
    line = error_of(monkeypatch, *TINY, "--text", finished / "text.txt", "--out", tmp_path / "file" / "run")
    assert_match(r"cannot write into .*file/run.*choose another", line)
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_libraries_are_one_line(finished, run_folder, monkeypatch):
    before = contents(run_folder)
    for library in ("tqdm", "matplotlib"):
        with monkeypatch.context() as without:
            for name in [name for name in sys.modules if name.split(".")[0] == library]:
                without.setitem(sys.modules, name, None)
            without.setitem(sys.modules, library, None)
            line = error_of(without, *TINY, "--text", finished / "text.txt", "--out", run_folder.parent / "new")
        assert_match(rf"{library} is missing.*python -m pip install", line)
        unchanged(before, run_folder)


def test_resume_refuses_another_shape(run_folder, monkeypatch):
    before = contents(run_folder)
    line = error_of(monkeypatch, "--resume", run_folder, "--width", "16", "--dropout", "0.5", "--layers", "1")
    assert_match(r"a run keeps its sizes and seed; this one cannot change --width \(8\), --dropout \(0.0\)$", line)
    unchanged(before, run_folder)


def test_resume_refuses_a_text_of_other_characters(run_folder, tmp_path, monkeypatch):
    (tmp_path / "other.txt").write_text("0123456789" * 50)
    before = contents(run_folder)
    line = error_of(monkeypatch, "--resume", run_folder, "--text", tmp_path / "other.txt")
    assert_match("the text is not the one this run began with", line)
    unchanged(before, run_folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1], ids=["empty", "5 bytes", "half a header", "all but a byte"])
def test_resume_refuses_a_truncated_checkpoint(run_folder, monkeypatch, keep):
    path = run_folder / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    before = contents(run_folder)
    assert_match(r"checkpoint.safetensors: .*truncated", error_of(monkeypatch, "--resume", run_folder))
    unchanged(before, run_folder)


def test_resume_refuses_what_is_not_a_checkpoint(run_folder, tmp_path, monkeypatch):
    path = run_folder / "checkpoint.safetensors"
    path.write_bytes(TEXT.encode())
    assert_match("not a safetensors file", error_of(monkeypatch, "--resume", run_folder))
    mg.save(path, {"x": mg.zeros(3)})
    assert_match("is not a checkpoint of a training run", error_of(monkeypatch, "--resume", run_folder))
    make(run_folder, steps=1).fit()  # a run, but not of this program
    before = contents(run_folder)
    assert_match("is a run of another program", error_of(monkeypatch, "--resume", run_folder))
    unchanged(before, run_folder)
    assert_match("no such file", error_of(monkeypatch, "--resume", tmp_path / "nowhere"))
    assert not (tmp_path / "nowhere").exists()


def test_a_new_run_never_overwrites_another(run_folder, example, monkeypatch):
    """--out of a folder that holds a run is refused, saying how to go on; without --out the next free name is taken."""
    before = contents(run_folder)
    line = error_of(monkeypatch, *TINY, "--out", run_folder)
    assert_match("holds a run already, or one is going on in it: go on with --resume", line)
    unchanged(before, run_folder)
    monkeypatch.chdir(run_folder.parent)
    (run_folder.parent / "runs").mkdir()
    (run_folder.parent / "runs/char-gpt").symlink_to(run_folder)
    assert str(example.folder_of(example.arguments([]))) == "runs/char-gpt-2"
    unchanged(before, run_folder)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at, kept", [(5, "nothing was saved yet"), (10, "holds the state of step 5"),
                                      (8, "holds the state of step 5")])
def test_weights_that_are_not_finite_are_never_saved(no_curve, tmp_path, value, at, kept):
    """An update from a finite gradient makes them; seen by the validation loss (5, 10) or when Ctrl-C saves (8)."""
    run = make(tmp_path, at={8: interrupt} if at == 8 else None)
    step = run.optimizer.step

    def spoil():
        step()
        if run.step + 1 == at:
            run.model.norm.weight.data[0] = value

    run.optimizer.step = spoil
    with np.errstate(all="ignore"), pytest.raises(train.TrainingError, match=kept):
        run.fit()
    assert len(run.rows) == (at - 1) // 5 and run.checkpoint.exists() == (at > 5)
    if at > 5:
        assert all(np.isfinite(x.numpy()).all() for x in mg.load(run.checkpoint).values())


def test_a_learning_rate_too_large_ends_with_an_error(finished, tmp_path, monkeypatch):
    with np.errstate(all="ignore"):
        line = error_of(monkeypatch, *TINY, "--text", finished / "text.txt", "--out", tmp_path / "new", "--lr", "6e37",
                        "--steps", "1")
    assert_match(r"is (nan|inf) at step 1; nothing was saved yet", line)
    assert not list((tmp_path / "new").iterdir())


def test_evaluate_gives_every_module_its_own_mode_back(rng):
    model = Model()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    train.evaluate(model, data.Windows(rng.integers(0, 30, 33), 8, 4))
    assert [module.training for module in model.modules()] == before and not all(before)


@pytest.fixture
def taken():
    """taken(folder): as another process that trains there."""
    fcntl = pytest.importorskip("fcntl")
    held = []

    def take(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held.append(os.open(folder, os.O_RDONLY))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
        return held[-1]

    yield take
    for descriptor in held:
        os.close(descriptor)


def test_a_folder_has_one_run_at_a_time(no_curve, tmp_path, taken):
    fcntl = pytest.importorskip("fcntl")
    descriptor = taken(tmp_path / "a")
    with pytest.raises(train.FolderTaken, match="another process is training in .*/a; wait"):
        make(tmp_path / "a")
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    run = make(tmp_path / "a", steps=2)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run.fit()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["checkpoint.safetensors", "log.csv"]


def test_example_takes_the_next_name_or_refuses(tmp_path, example, monkeypatch, taken):
    monkeypatch.chdir(tmp_path)
    taken(tmp_path / "runs/char-gpt")
    assert str(example.folder_of(example.arguments([]))) == "runs/char-gpt-2"
    assert_match("or one is going on in it", error_of(monkeypatch, *TINY, "--out", "runs/char-gpt"))


@pytest.mark.parametrize("given, message", [
    (["--out", "elsewhere"], r"leave out --out$"),
    (["--config", "nano"], r"leave out --config$"),
    (["--seed", "2"], r"cannot change --seed \(1337\)$"),
])
def test_resume_refuses_what_it_would_ignore(run_folder, monkeypatch, given, message):
    before = contents(run_folder)
    assert_match(message, error_of(monkeypatch, "--resume", run_folder, *given))
    unchanged(before, run_folder)


@pytest.mark.parametrize("large", [False, True])
def test_resume_refuses_another_text_of_the_same_characters(no_curve, tmp_path, example, monkeypatch, large):
    monkeypatch.setattr(example, "LARGE", 100 if large else 1 << 30)
    (tmp_path / "a").write_text(TEXT)
    (tmp_path / "b").write_text(TEXT.replace("cat", "tac"))
    begin = [*TINY, "--steps", "2", "--sample", "0", "--text", str(tmp_path / "a"), "--out", str(tmp_path / "run")]
    assert example.main(begin) == 0
    before = contents(tmp_path / "run")
    with pytest.raises(train.TrainingError, match="the text is not the one this run began with"):
        example.main(["--resume", str(tmp_path / "run"), "--text", str(tmp_path / "b")])
    unchanged(before, tmp_path / "run")
    (tmp_path / "a").rename(tmp_path / "c")              # the same text under another name is the same text
    assert example.main(["--resume", str(tmp_path / "run"), "--text", str(tmp_path / "c"), "--sample", "0"]) == 0
