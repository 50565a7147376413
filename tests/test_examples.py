"""The examples run as a reader runs them: in a process of their own, warnings as errors, from any folder."""

import csv
import doctest
import importlib.util
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import or_skip

import minigrad as mg

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))


def run(name, folder):
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "error", str(EXAMPLES / name)], cwd=folder, env=one_thread,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_01_tape(tmp_path):
    out = run("01_tape.py", tmp_path)
    losses = [float(x) for x in re.findall(r"step +\d+ +loss ([\d.]+)", out)]
    assert len(losses) >= 5 and losses == sorted(losses, reverse=True)
    assert losses[0] > 1.0 and losses[-1] < 1e-3
    for line in ("0 xor 0 =  0.00", "0 xor 1 =  1.00", "1 xor 0 =  1.00", "1 xor 1 =  0.00"):
        assert line in out
    assert len(re.findall(r"gradient of \w+: largest", out)) == 8
    table = out.partition("print(tape)")[2].splitlines()[1:]
    assert table[0].split() == ["op", "from", "formula", "shape", "dtype", "on", "kept", "line"]
    assert [row.split()[1] for row in table[1:]] == "matmul add tanh matmul add subtract multiply sum".split()
    assert "01_tape.py:" in table[1]


def test_01_is_forty_lines():
    """The engine between its two marks: lines of code, without comments, docstrings and blank lines."""
    text = (EXAMPLES / "01_tape.py").read_text(encoding="utf-8")
    engine = text.partition("# [engine: from here]")[2].partition("# [engine: to here]")[0]
    lines = [line.strip() for line in engine.splitlines()]
    assert 30 <= sum(bool(line) and not line.startswith(("#", '"""')) for line in lines) <= 45


def test_02_attention_by_hand(tmp_path):
    out = run("02_attention_by_hand.py", tmp_path)
    rows = [line for line in out.splitlines() if line.startswith("A.10")]
    for number in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11):
        assert any(re.match(rf"A\.10\.{number} ", row) for row in rows), f"no row for A.10.{number}"
    assert "(A.10.4)" in out and "GQA: G_K" in out and "undone by (2, 0, 1)" in out and "a row of G_S sums to 0" in out
    assert "[scaled_dot_product_attention] a row that sees no key has no softmax (A.10.2): query 3" in out
    for row in rows:
        *_, tape, finite = row.split()
        assert float(tape) < 1e-12 and (finite == "-" or float(finite) < 1e-7), row
    assert f"All {len(rows)} checks hold" in out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_docstring_examples(path):
    """Lines after >>> in an example's docstrings do what they say; and each example says how it is run."""
    text = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in text
    found = doctest.DocTestParser().get_doctest(text, {"__name__": path.stem}, path.name, str(path), 0)
    if found.examples:
        assert not doctest.DocTestRunner().run(found).failed


BENCHMARKS = Path(__file__).parent / "benchmarks"


def run_short(path, folder, *args):
    """A script with few steps, on one thread: exit status and what it printed."""
    or_skip("matplotlib.figure", f"{path.name} and its pictures")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "error", str(path), "--threads", "1", *args], cwd=folder, env=env,
                          capture_output=True, text=True, timeout=240)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def loaded(path):
    """The script as a module, not run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_04_grokking(tmp_path):
    """One epoch: the table, the comparison and the files; the losses start at that of guessing, log 113 = 4.73."""
    code, out = run_short(EXAMPLES / "04_grokking.py", tmp_path, "--epochs", "1", "--every", "1", "--out", "run")
    assert code == 0 and "test loss below 0.1" in out and "about 440 to 600" in out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "log.csv").read_text(encoding="utf-8"))))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert all(abs(float(rows[0][name]) - math.log(113)) < 0.3 for name in ("train_loss", "test_loss"))
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"])
    assert is_png(tmp_path / "run" / "curves.png")


def test_04_answers_as_the_whole_model_does():
    """What the example leaves out of the computation has no part in the answer."""
    script = loaded(EXAMPLES / "04_grokking.py")
    mg.manual_seed(3)
    model = script.make_model()
    learn, ask = script.questions(0.6, 0)
    assert len(learn) == 7661 and len(ask) == 5108
    assert len({tuple(row) for row in [*learn.tolist(), *ask.tolist()]}) == 113**2
    short = script.answer(model, learn[:20])
    model.blocks[0].attention.causal = True
    assert abs(short.numpy() - model(learn[:20]).numpy()[:, -1]).max() < 1e-5     # float32 rounding, logits of about 1


def test_05_induction_heads(tmp_path):
    code, out = run_short(EXAMPLES / "05_induction_heads.py", tmp_path, "--steps", "1", "--every", "1", "--out", "run")
    assert code == 0 and "phase change: not seen" in out and "no induction head yet" in out
    assert len(re.findall(r"^layer \d, head \d", out, re.M)) == 8
    rows = list(csv.DictReader(io.StringIO((tmp_path / "run" / "log.csv").read_text(encoding="utf-8"))))
    assert [row["step"] for row in rows] == ["0", "1"] and abs(float(rows[0]["loss"]) - math.log(128)) < 0.3
    assert is_png(tmp_path / "run" / "loss.png") and is_png(tmp_path / "run" / "attention.png")


@pytest.mark.parametrize("published", [False, True])
def test_05_attention_maps_are_the_models_own(published):
    """A recomputed from q and k, times v and through `out`, is what the layer itself returns."""
    script = loaded(EXAMPLES / "05_induction_heads.py")
    mg.manual_seed(0)
    model = script.make_model(published)
    for p in model.parameters():                         # at its start of 0.02 all attention is alike: make it differ
        if p.ndim == 2:
            p.copy_(p.numpy() * (2 if published else 10))
    ids, _ = script.repeated(np.random.default_rng(0), 3, (5, 9))
    maps = script.attention_maps(model, ids)
    assert abs(maps.sum(axis=-1) - 1).max() < 1e-5 and maps.max() > 0.5
    x = model.embedding(ids) + (model.position.weight if published else 0.0)
    for block, a in zip(model.blocks, maps.swapaxes(1, 2)):
        normed = x if published else block.norm1(x)
        v = block.attention.qkv(normed).numpy()[..., -script.WIDTH:].reshape(3, 48, script.HEADS, -1).swapaxes(1, 2)
        y = block.attention.out(mg.tensor((a @ v).swapaxes(1, 2).reshape(3, 48, script.WIDTH)))
        assert abs(y.numpy() - block.attention(normed).numpy()).max() < 1e-4
        x = block(x)


def test_05_head_scores_by_hand():
    """Maps drawn by hand: one head that looks one back, one that looks where an earlier equal token was followed."""
    script = loaded(EXAMPLES / "05_induction_heads.py")
    ids = np.array([[7, 8, 9, 7, 8, 9, 7, 8]])
    t = np.arange(8)
    maps = np.zeros((1, 2, 1, 8, 8))
    maps[0, 0, 0, t, np.maximum(t - 1, 0)] = 1.0
    maps[0, 1, 0, t[3:], t[3:] - 2] = 1.0                # 3 sees 7 as at 0, and looks at 1
    maps[0, 1, 0, 6, [1, 4]] = 0.5                       # both 7s before count
    previous, induction = script.head_scores(maps, ids)
    assert previous.tolist() == [[1.0, 0.0]] and induction.tolist() == [[0.0, 1.0]]


def test_reversed_addition(tmp_path):
    """Two steps miss the goal, which the exit status says; sums are written as the docstring shows."""
    path = BENCHMARKS / "reversed_addition.py"
    code, out = run_short(path, tmp_path, "--steps", "2", "--every", "2", "--further", "10", "--out",
                          "curve.csv")
    assert code == 1 and "MISSED" in out and (tmp_path / "curve.csv").read_text(encoding="utf-8").count("\n") == 2
    script = loaded(path)
    assert script.TOKENS.decode(script.lines(np.array([999001]))[0]) == "999+001=0001"       # 1000, units first
    assert script.TOKENS.decode(script.lines(np.array([7]))[0]) == "000+007=7000"


def test_bad_arguments_are_one_line(tmp_path):
    or_skip("matplotlib.figure", "04_grokking.py and its pictures")
    done = subprocess.run([sys.executable, str(EXAMPLES / "04_grokking.py"), "--epochs", "0"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and done.stderr.startswith("error: [arguments]") and done.stderr.count("\n") == 1
    with pytest.raises(ValueError, match=r"\[arguments\] --steps and --every are at least 1: got 0, 50"):
        loaded(EXAMPLES / "05_induction_heads.py").arguments(["--steps", "0"])
