"""The examples run as a reader runs them: in a process of their own, warnings as errors, from any folder."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
