"""The exercises: the solved set passes and the blank one is named as such, in a student's own folder and process; the
grader says what is wrong, in words, with answers that are wrong in a known way."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minigrad
from minigrad.study.exercises import __main__ as command
from minigrad.study.exercises import grade
from minigrad.study.exercises.table import BY_NAME, EXERCISES

ROOT = Path(minigrad.__file__).parents[1]
every_exercise = pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)


def student(folder, *args):
    """A command as a student types it, in that folder, in a process of its own, warnings as errors."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-W", "error", *args], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=120)


def graded(done):
    """{exercise: what the summary says of it}."""
    summary = done.stdout.partition("= exercises =")[2]
    return dict(re.findall(r"^(\d\d_\w+) +(.*)$", summary, re.M))


def said(exercise, function):
    """The grader's words, or "right" or "not written yet"."""
    try:
        grade.diagnose(exercise, function)
    except grade.Wrong as error:
        return str(error)
    except grade.NotWritten:
        return "not written yet"
    return "right"


# ------------------------------------------------------------------------------------------------- the folder


def test_the_solved_set_passes(tmp_path):
    done = student(tmp_path, "-m", "minigrad.study.exercises", "--solved", "here")
    assert done.returncode == 0 and not done.stderr, done.stderr
    done = student(tmp_path / "here", "-m", "pytest", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
    assert graded(done) == {e.name: "right" for e in EXERCISES}


def test_the_blank_set_is_not_written_yet_and_mistakes_show_beside_it(tmp_path):
    """One run over blanks, a right answer, a wrong one, a file that is no Python and one without its function."""
    done = student(tmp_path, "-m", "minigrad.study.exercises")
    folder = tmp_path / "exercises"
    assert done.returncode == 0 and sorted(p.name for p in folder.glob("[0-9]*.py")) == [
        f"{e.name}.py" for e in EXERCISES]
    assert not any("[yours]" in p.read_text(encoding="utf-8") for p in folder.iterdir())
    done = student(folder, "-m", "pytest", "-p", "no:cacheprovider", "03_matmul.py")
    assert done.returncode == 0 and graded(done) == {"03_matmul": "not written yet"}, done.stdout

    (folder / "01_add.py").write_text("def add_vjp(ct, a, b):\n    return ct, ct\n", encoding="utf-8")
    for name, text in (("02_multiply.py", "def multiply_vjp(ct, a, b):\n    return ct * b, -ct * a\n"),
                       ("03_matmul.py", "def matmul_vjp(ct, a, b)\n"), ("04_broadcast.py", "f = abs\n")):
        (folder / name).write_text(text, encoding="utf-8")
    done = student(folder, "-m", "pytest", "-p", "no:cacheprovider")
    found = graded(done)
    assert done.returncode == 1 and found["01_add"] == "right"
    assert found["02_multiply"].startswith("WRONG  ct_b: the sign is flipped")
    assert found["03_matmul"] == "WRONG  the file does not read as Python: expected ':', line 1"
    assert found["04_broadcast"].startswith("WRONG  the file has no function broadcast_vjp")
    assert all(found[e.name] == "not written yet" for e in EXERCISES[4:])
    assert "Traceback" not in done.stdout and "1 passed, 8 skipped" in done.stdout.replace("3 failed, ", "")


def test_a_students_work_is_left_alone(tmp_path, capsys):
    mine = tmp_path / "01_add.py"
    mine.write_text("mine", encoding="utf-8")
    assert command.main([str(tmp_path), "--solved"]) == 0
    out = capsys.readouterr().out
    assert mine.read_text(encoding="utf-8") == "mine" and "left alone, being there already: 01_add.py\n" in out
    assert (tmp_path / "02_multiply.py").exists() and "wrote 13 files" in out
    assert command.main([str(mine)]) == 2                # a file where a folder is meant
    assert "[exercises] FOLDER is a folder" in capsys.readouterr().err


def test_list_names_every_exercise_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [e.name for e in EXERCISES]
    assert not list(tmp_path.iterdir())


@every_exercise
def test_a_statement_has_what_a_student_needs(exercise):
    """What is given and returned, a hint, and one blank whose function has the arguments that the grader passes."""
    blank, solved = (command.text_of(exercise.name, s) for s in (False, True))
    assert blank.count("raise NotImplementedError") == 1 and "NotImplementedError" not in solved
    assert "returns" in blank and "# Hint:" in blank
    assert blank.startswith(f'"""Exercise {int(exercise.name[:2])}: ')
    arguments = ", ".join(exercise.cases[0])
    assert f"def {exercise.function}({arguments}):" in blank
    assert all(len(line) <= 120 for line in blank.splitlines())


# ------------------------------------------------------------------------------------------------- the grader


@every_exercise
def test_the_right_answers_agree_with_central_differences(exercise):
    """Every element of every cotangent of the small cases: the oracle is not only minigrad's word. The exercise without
    a vjp, the online softmax, is held to the plain formula by the solved set."""
    for case in exercise.cases if exercise.forward else []:
        for i, right in enumerate(exercise.right(case)):
            found = np.array([exercise.slope(case, i, at) for at in np.ndindex(right.shape)]).reshape(right.shape)
            np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-7)


@every_exercise
def test_every_known_mistake_is_wrong_and_told_from_the_others(exercise):
    """Given a known mistake, the grader says its words (and, where it leaves a result right, nothing of that)."""
    for what, function in exercise.wrong:
        assert said(exercise, function).partition(": ")[2].partition("\n")[0] == what
    assert len({what for what, _ in exercise.wrong}) == len(exercise.wrong)


# A student's mistakes, as they would write them: not the table's own functions. (exercise, body, words)
PLANTED = [
    ("01_add", "return ct, -ct", "ct_b: the sign is flipped"),
    ("01_add", "return 2 * ct, ct", "ct_a: the factor 2 is one too many"),
    ("01_add", "return ct", "must return 2 arrays, (ct_a, ct_b): got 1"),
    ("01_add", "return ct, None", "ct_b must be an array of numbers: got None"),
    ("01_add", "return ct, ct > 0", "ct_b must be an array of numbers: got (2, 3) bool"),
    ("01_add", "return ct, np.array([ct, None], object)", "ct_b must be an array of numbers"),
    ("01_add", "pass", "returns None: the return is missing"),
    ("01_add", "ct *= 1.5; return ct, ct", "writes into its argument ct"),
    ("01_add", "return ct, ct * np.float64(1.0) + np.zeros(ct.shape)", "ct_b: the numbers are right, but float32"),
    ("01_add", "import minigrad as mg; return ct, mg.tensor(ct)", "ct_b is a Tensor: write the rule with NumPy"),
    ("01_add", "return ct, ct + 1e-3", "elements are wrong; at"),
    ("02_multiply", "return ct * a, ct * b", "ct_a, ct_b: the argument's own value where the other's belongs"),
    ("02_multiply", "return ct, ct * a", "ct_a: the factor b is missing"),
    ("02_multiply", "return b, ct * a", "ct_a: the factor ct is missing"),
    ("02_multiply", "return ct * b, ct / a", "ct_b: this is the rule of a quotient"),
    ("02_multiply", "return ct * c, ct * a", "raises NameError: name 'c' is not defined, line 4; called with ct (2"),
    ("02_multiply", "return ct * b, np.stack([ct, a[:1]])", "raises ValueError: all input arrays must have the same "
     "shape, line 4; called"),
    ("03_matmul", "return ct @ b, a.T @ ct", "ct_a: b must be transposed: <ct, da b> = <ct b^T, da>"),
    ("03_matmul", "return ct @ b, ct @ a", "ct_a: b must be transposed"),
    ("03_matmul", "return (ct @ b.T).T, a.T @ ct", "ct_a: the result is transposed"),
    ("03_matmul", "return a.T @ ct, ct @ b.T", "ct_a: this is ct_b: are the results in the order"),
    ("03_matmul", "return -(ct @ b.T), a.T @ ct", "ct_a: the sign is flipped"),
    ("04_broadcast", "return ct", "the sum over axis 0 is missing: an array of (3,) was repeated there to (2, 3)"),
    ("04_broadcast", "return ct.sum(axis=0) if ct.ndim > len(x_shape) else ct", "the sum over axis 1 is missing"),
    ("04_broadcast", "return np.full(x_shape, ct.sum())", "elements are wrong; at"),
    ("05_transpose", "return ct.transpose(axes)", "the same permutation again, where its inverse belongs"),
    ("05_transpose", "return np.swapaxes(ct, 0, 1)", "has its axes in the wrong order: got (4, 3, 2), must be (2, 3"),
    ("06_softmax", "return y * (ct - (y * ct).sum(axis=-1))", "keepdims=True is missing in c"),
    ("06_softmax", "return ct * y", "the row's c is forgotten"),
    ("06_softmax", "return -y * (ct - (y * ct).sum(-1, keepdims=True))", "the sign is flipped"),
    ("06_softmax", "return 2.5 * y * (ct - (y * ct).sum(-1, keepdims=True))", "is 2.5 times the right answer"),
    ("06_softmax", "return np.diag(y) - np.outer(y, y) @ ct", "raises ValueError: matmul"),
    ("06_softmax", "return y[..., None] * (np.eye(y.shape[-1]) - y[..., None, :])", "has the wrong shape: got (3, 3"),
    ("07_masked_softmax", "e = np.exp(scores); a = e / e.sum(-1, keepdims=True)\n"
     "    return a * (ct - (a * ct).sum(-1, keepdims=True))", "the mask is forgotten, and so is the maximum"),
    ("07_masked_softmax", "e = np.exp(scores - scores.max(-1, keepdims=True)); a = e / e.sum(-1, keepdims=True)\n"
     "    return a * (ct - (a * ct).sum(-1, keepdims=True))", "the mask is forgotten"),
    ("07_masked_softmax", "s = np.where(visible, scores, -np.inf); s = s - s.max(-1, keepdims=True)\n"
     "    a = np.exp(s) / np.exp(s).sum(-1, keepdims=True)\n"
     "    return a * (ct - (a * ct).sum(-1, keepdims=True))", "a row that sees nothing gives NaN"),
    ("08_layer_norm", "xhat = (x - mean) * rstd; g = ct * weight\n"
     "    ct_x = rstd * (g - g.mean(-1, keepdims=True))\n"
     "    return ct_x, (ct * xhat).sum(0), ct.sum(0)", "ct_x: the term xhat avg(g xhat) is missing"),
    ("08_layer_norm", "xhat = (x - mean) * rstd; g = ct * weight\n"
     "    ct_x = g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True)\n"
     "    rows = tuple(range(x.ndim - 1)); return ct_x, (ct * xhat).sum(rows), ct.sum(rows)",
     "ct_x: the factor rstd is missing"),
    ("08_layer_norm", "xhat = (x - mean) * rstd; g = ct * weight\n"
     "    ct_x = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))\n"
     "    return ct_x, (ct * xhat).sum(0), ct.sum(0)", "ct_weight, ct_bias: the sum over axis 0 is missing"),
    ("08_layer_norm", "xhat = (x - mean) * rstd; g = ct * weight\n"
     "    ct_x = rstd * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))\n"
     "    return ct_x, ct * xhat, ct", "ct_weight: not summed over the leading axes"),
    ("09_attention", "g_a = ct @ v.T; g_s = a * (g_a - (a * g_a).sum(1, keepdims=True)); d = q.shape[1]\n"
     "    return g_s @ k, g_s.T @ q, a.T @ ct", "G_Q, G_K: the factor 1/sqrt(D) is missing"),
    ("09_attention", "g_a = ct @ v.T; g_s = a * (g_a - (a * g_a).sum(1, keepdims=True)); d = q.shape[1]\n"
     "    return g_s @ k / d, g_s.T @ q / d**0.5, a.T @ ct", "G_Q: the factor 1/sqrt(D) is there twice"),
    ("09_attention", "g_a = ct @ v.T; g_s = a * (g_a - (a * g_a).sum())\n"
     "    return g_s @ k, g_s.T @ q, a.T @ ct", "G_Q, G_K: c is one sum over everything: it must be one per row (axis=1"
     ", keepdims=True); and the factor 1/sqrt(D) is missing"),
    ("09_attention", "g_a = ct @ v.T; g_s = a * g_a; d = q.shape[1] ** 0.5\n"
     "    return g_s @ k / d, g_s.T @ q / d, a.T @ ct", "G_Q, G_K: the row's c is forgotten"),
    ("09_attention", "g_a = ct @ v.T; g_s = a * (g_a - (a * g_a).sum(1, keepdims=True)); d = q.shape[1] ** 0.5\n"
     "    return g_s @ k / d, g_s @ q / d, a @ ct", "G_K: G_S must be transposed"),
    ("10_shared_heads", "out = np.zeros((heads, *ct.shape[1:]), ct.dtype); out[list(kv_head)] += ct; return out",
     "not summed over the heads that share: the last one wins"),
    ("10_shared_heads", "return ct.reshape(heads, -1, *ct.shape[1:]).sum(1)", "the map is ignored"),
    ("11_online_softmax", "s = q @ k.T / q.shape[1] ** 0.5; m = s.max(1, keepdims=True); p = np.exp(s - m)\n"
     "    l = p.sum(1, keepdims=True); return p @ v / l, m + np.log(l)",
     "lse: has the right number of elements but the wrong shape: got (3, 1), must be (3,)"),
    ("11_online_softmax", "s = q @ k.T / q.shape[1] ** 0.5; m = s.max(1); p = np.exp(s - m[:, None]); l = p.sum(1)\n"
     "    return p @ v / l[:, None], m + np.log(l)", "the numbers are right, but it holds"),
    ("12_tiled_attention", "p = np.exp(q @ k.T / q.shape[1] ** 0.5 - lse[:, None]); g_a = ct @ v.T\n"
     "    g_s = p * (g_a - (ct * o).sum(1, keepdims=True)) * q.shape[1] ** 0.5\n"
     "    return g_s @ k, g_s.T @ q, p.T @ ct", "G_Q, G_K: multiplied by sqrt(D) where it must be divided"),
    ("12_tiled_attention", "p = np.exp(q @ k.T / q.shape[1] ** 0.5 - lse[:, None]); g_a = ct @ v.T\n"
     "    g_s = p * (g_a - (ct * o).sum(1, keepdims=True)) / q.shape[1] ** 0.5\n"
     "    return g_s @ k, g_s.T @ q, p.T @ ct", "the numbers are right, but it holds"),
]


@pytest.mark.parametrize("name, body, words", PLANTED)
def test_planted_mistakes_get_their_words(name, body, words, tmp_path):
    exercise = BY_NAME[name]
    path = tmp_path / f"{name}.py"
    path.write_text(f"import numpy as np\n\ndef {exercise.function}({', '.join(exercise.cases[0])}):\n    {body}\n",
                    encoding="utf-8")
    assert words in said(exercise, grade.load(path, exercise.function))


def test_arguments_reach_the_student_unharmed():
    """A function that writes into an argument must not spoil the case for the next one."""
    exercise = BY_NAME["02_multiply"]
    before = exercise.cases[0]["a"].copy()

    def spoils(ct, a, b):
        a[...] = 0.0
        return ct * b, ct * a

    assert "writes into its argument a" in said(exercise, spoils)
    np.testing.assert_array_equal(exercise.cases[0]["a"], before)


@pytest.mark.parametrize("name", ["09_attention", "11_online_softmax", "12_tiled_attention"])
def test_a_factor_of_two_is_not_the_scale(name):
    """1/sqrt(D) is 1/2 for D = 4, and no answer of exercise 11, nor G_V, has it as a factor."""
    exercise = BY_NAME[name]
    rights = iter([exercise.right(case) for case in exercise.cases])
    with pytest.raises(grade.Wrong, match="is 2 times the right answer"):
        grade.diagnose(exercise, lambda *_: tuple(2.0 * r for r in next(rights)))


@pytest.mark.parametrize("text, said", [
    ("import numpy as np\nadd_vjp = np.negative\n", "raises TypeError: negative"),     # a function without __code__
    ("def add_vjp(ct, a, b):\n    raise SystemExit(1)\n", "raises SystemExit: 1, line 2"),
    ("raise SystemExit(3)\n", "stops while it is read: SystemExit: 3, line 1")],
                         ids=["ufunc", "exit", "exit at import"])
def test_answers_that_stop_in_unusual_ways_are_sentences(tmp_path, text, said):
    (tmp_path / "01_add.py").write_text(text, encoding="utf-8")
    with pytest.raises(grade.Wrong, match=said):
        grade.diagnose(BY_NAME["01_add"], grade.load(tmp_path / "01_add.py", "add_vjp"))
