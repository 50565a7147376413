"""The guide's scripts run as a reader runs them and print what they are meant to show; the ops of its last chapter hold
on both devices; and CONTRIBUTING's table of mistakes says what is said."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import fakecupy
import numpy as np
import pytest

import minigrad as mg

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "examples" / "guide"
SCRIPTS = sorted(GUIDE.glob("[0-9][0-9]_*.py"))
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.M)
MISTAKES = ROW.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### What a mistake says")[2])


def run(name, folder):
    """What the script prints, in a process of its own, with kernels, whatever this process runs with."""
    env = {k: v for k, v in os.environ.items() if k != "MINIGRAD_COMPOSED"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "error", str(GUIDE / name)], cwd=folder, env=env, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_says_how_to_run_it_what_to_read_before_and_what_to_try(path):
    text = path.read_text(encoding="utf-8")
    top, end = text.partition('"""\n\n')[0], text.rstrip().splitlines()[-6:]
    assert f"python examples/guide/{path.name}" in top and "Read before: " in top
    assert any(line.startswith("# To try: ") for line in end) and "/work" not in text
    assert f'"""Guide {int(path.name[:2])}. ' in top


def test_there_are_ten():
    assert [int(path.name[:2]) for path in SCRIPTS] == list(range(1, 11))


def test_01_rules(tmp_path):
    out = run("01_rules.py", tmp_path)
    verdicts = re.findall(r"^  (.+?)  +measured.* (\w+)$", out, re.M)
    assert len(verdicts) == 6 and {name for name, said in verdicts if said == "DIFFERS"} == {"tanh, wrong"}
    bars = {int(p): len(bar) for p, bar in re.findall(r"h = 1e-(\d+)  (#*)", out)}
    assert min(bars, key=bars.get) in (5, 6)             # the best h of a central difference: cube root of 1e-16
    assert bars[1] - bars[3] in (3, 4, 5)                # and above it the error falls by two powers for one of h


def test_02_broadcasting(tmp_path):
    out = run("02_broadcasting.py", tmp_path)
    for row in ("(4, 1)     -> (2, 4, 3)  summed over axes (0, 2)", "ct_bias   (3,)", "ct_scale  ()",
                "row 1  [5.0, 50.0]    = [1.0, 10.0] + [4.0, 40.0]", "leaves in row 1    [4.0, 40.0]"):
        assert row in out


def test_03_order(tmp_path):
    out = run("03_order.py", tmp_path)
    assert "made:   tanh exp sin multiply sum\npulled: sum multiply sin exp tanh" in out
    assert re.search(r"^ +12 +13 +13 +8191$", out, re.M)  # 2^13 - 1 paths
    kept = [int(n.replace(",", "")) for n in re.findall(r"^  \w+ +([\d,]+) #", out, re.M)]
    assert len(kept) == 18 and kept == sorted(kept, reverse=True) and kept[0] > 20 * kept[-1]
    assert "again: [sum] the backward pass went through this node already" in out


def test_04_higher_orders(tmp_path):
    out = run("04_higher_orders.py", tmp_path)
    assert "adds: cos multiply" in out and "    3   -0.921060994" in out          # -cos 0.4
    # the Hessian at (-1.2, 1) is [[1330, 480], [480, 200]], times (0.6, -0.8)
    assert "Hessian times v: [414.0, 128.0], by differences of the gradient [414.0, 128.0]" in out
    assert "Newton: 7 steps" in out


def test_05_softmax(tmp_path):
    out = run("05_softmax.py", tmp_path)
    by_jacobian, by_rule = re.search(r"jacobian\^T ct +(\[.*\])\n +a \(ct - c\) +(\[.*\])", out).groups()
    assert by_jacobian == by_rule and "128 MiB, a and c take 32 KiB" in out        # 4096^2 * 8 bytes
    sizes = [float(x) for x in re.findall(r"^ +\d+ +[\d.]+ +(\S+)$", out, re.M)]
    assert len(sizes) == 4 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 1e-10
    assert "[nan, nan, nan, nan]" in out and "has no softmax (A.10.2): query 1" in out
    assert 'empty_rows="zeros": [0.0, 0.0, 0.0, 0.0]  and no gradient: [0.0, 0.0, 0.0, 0.0]' in out


def test_06_layer_norm(tmp_path):
    out = run("06_layer_norm.py", tmp_path)
    assert len(re.findall(r"ct_[xwb] +below 1e-12 +below 1e-7", out)) == 3
    (nodes, plain), (one, fused) = re.findall(r"(\d+) nodes?, keeping ([\d.]+) times", out)
    assert int(nodes) > int(one) == 1 and float(plain) > 2 > float(fused)


def test_07_fused(tmp_path):
    out = run("07_fused.py", tmp_path)
    rows = re.findall(r"^  (\w[\w, ]+?) +(\d+) +(\d+) +([\d,]+) +([\d,]+) +below 1e-12$", out, re.M)
    assert len(rows) == 8 and all(int(few) < int(many) for _, many, few, _, _ in rows)
    kept = {name: [int(n.replace(",", "")) for n in sizes] for name, _, _, *sizes in rows}
    assert kept["attention, tiled"][1] < kept["attention"][1] < kept["attention"][0]
    assert "fused and composed agree to 1e-12: True" in out
    assert re.search(r"^1  logsumexp +0 .*\(2, ?1\) +float64 +cpu/numpy +64 B$", out, re.M)


def test_08_attention(tmp_path):
    out = run("08_attention.py", tmp_path)
    maps = re.split(r"\n\n  (?=\S)", out)
    seen = {m.partition(":")[0]: m.count("@") for m in maps}
    assert seen["causal"] == 78 and seen["document_mask"] == 6 + 10 + 15           # 12 letters; words of 3, 4 and 5
    assert next(n for name, n in seen.items() if name.startswith("window")) == 1 + 2 + 3 + 9 * 4
    guesses = re.search(r"guesses  '(.{12})'", out)[1]
    assert guesses[8:10] == "he"                         # after the second t and h, what followed the first ones
    assert "most of all at query 7 (' '), which wants to look more at key 0 ('t')" in out    # the letter that comes


def test_09_tiled_attention(tmp_path):
    out = run("09_tiled_attention.py", tmp_path)
    rows = re.findall(r"^ *(\d+) +([\d.]+) MiB +([\d.]+) MiB +below 1e-12$", out, re.M)
    plain, tiled = ({int(row[0]): float(row[i]) for row in rows} for i in (1, 2))
    assert plain[1024] / plain[512] == pytest.approx(4.0, rel=0.05)
    assert tiled[1024] / tiled[512] < 2.2 and plain[1024] > 20 * tiled[1024]
    assert "tiles looked at, T = 1024: 136 of 256" in out                          # 16 * 17 / 2


def test_10_your_own_op(tmp_path):
    out = run("10_your_own_op.py", tmp_path)
    assert out.count("derivatives of orders 1 and 2: agree") == 8 and "[log_cosh] a must be positive: got 0.0" in out
    plain, kernel = (int(n.replace(",", "")) for n in re.findall(r"keeps ([\d,]+) bytes", out))
    assert kernel == 2 * 256 * 64 * 4 < plain            # u and v, float32
    assert "kernels for: numpy, cupy" in out


# ------------------------------------------------------------------------------- the last chapter's ops, and mistakes


@pytest.fixture
def fresh():
    """The primitives a test registers are taken out of the table afterwards."""
    before = set(mg.primitives)
    yield
    for name in set(mg.primitives) - before:
        del mg.primitives[name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ops_of_chapter_10_on_both_devices(device, fresh, monkeypatch):
    """Both kernels of swiglu, the CuPy one on the strict stand-in: value and first gradients by the formula in float64;
    each device takes its own kernel, and the second never waits; higher orders come from the reference."""
    if device == "cuda":
        fakecupy.install(monkeypatch)
    space = runpy.run_path(str(GUIDE / "10_your_own_op.py"))
    ran = []
    op = space["_swiglu"]
    for name, body in op.kernels.items():
        monkeypatch.setattr(body, "forward", lambda u, v, run=body.forward, name=name: ran.append(name) or run(u, v))
    rng = np.random.default_rng(0)
    u, v, ct = rng.standard_normal((3, 5, 4)) * 3
    s = 1 / (1 + np.exp(-u))
    want = (u * s * v, ct * v * s * (1 + u * (1 - s)), ct * u * s)
    leaves = [mg.tensor(a, requires_grad=True, device=device) for a in (u, v)]
    with fakecupy.no_sync(), mg.tape._set(composed=False):
        y = space["swiglu"](*leaves)
        found = [y, *mg.gradients(y, leaves, mg.tensor(ct, device=device))]
    assert ran == ["numpy" if device == "cpu" else "cupy"] and y.node.name == "swiglu"
    for got, right in zip(found, want, strict=True):
        assert got.device == device
        np.testing.assert_allclose(got.numpy(), right, rtol=1e-12, atol=1e-14)
    second = mg.hvp(lambda u: space["swiglu"](u, leaves[1].detach()).sum(), leaves[0].detach(), mg.ones_like(leaves[0]))
    np.testing.assert_allclose(second.numpy(), v * s * (1 - s) * (2 + u * (1 - 2 * s)), rtol=1e-10, atol=1e-12)

    x = mg.tensor(np.array([-800.0, 0.5, 800.0], np.float32), requires_grad=True, device=device)
    y = space["log_cosh"](x, a=2.0)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, x.grad.device) == (np.float32, np.float32, device)
    far = 800 - np.log(2) / 2                            # where cosh itself would overflow
    np.testing.assert_allclose(y.numpy(), [far, np.log(np.cosh(1.0)) / 2, far], rtol=1e-6)
    np.testing.assert_allclose(x.grad.numpy(), np.tanh([-1600.0, 1.0, 1600.0]), rtol=1e-6)


def space():
    def f(x, /):
        return x * x

    def g(a, b, /):
        return a + b

    return {"mg": mg, "np": np, "primitive": mg.primitive, "sample": mg.sample, "f": f, "g": g,
            "x": mg.tensor([1.0, 2.0], requires_grad=True)}


@pytest.mark.parametrize("code, message", MISTAKES, ids=[code for code, _ in MISTAKES])
def test_what_a_mistake_says(code, message, fresh):
    """The code of the row raises in one line, which holds what the row quotes, and leaves no gradient behind."""
    names = space()
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        exec(code, names)
    assert str(raised.value).startswith("[") and "\n" not in str(raised.value)
    assert names["x"].grad is None


def test_the_table_of_mistakes_was_found():
    assert len(MISTAKES) >= 14


def test_an_op_without_samples_fails_the_suite(fresh):
    import test_ops

    exec("primitive(f, rules=[lambda ct, x: 2 * x * ct])", space())
    with pytest.raises(AssertionError, match=re.escape("[f] has no sample rows: it is not tested")):
        test_ops.test_every_op_has_samples("f")


def test_the_cotangent_is_locked_while_a_rule_runs_and_only_then(fresh):
    """s + x gives one array as the cotangent of both: if the rule of s could write into it, x's gradient would be wrong
    without a word. The user's own cotangent is locked as well, and given back as it was, after an error too."""
    names = space()
    exec("def rule(ct, x):\n    ct *= 2 * x\n    return ct\nop = primitive(f, rules=[rule])", names)
    x, ct = names["x"], np.ones(2, np.float32)
    with pytest.raises(ValueError, match="a rule never writes into ct"):
        (names["op"](x) + x).backward(ct)
    assert x.grad is None and ct.flags.writeable and ct.tolist() == [1.0, 1.0]
    (x * x).backward(ct)
    assert ct.flags.writeable and x.grad.tolist() == [2.0, 4.0]
