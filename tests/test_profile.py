"""profile: every stretch of a step has one owner, the parts add up, memory and FLOPs are those of a hand count.

No test measures: the clock is a counter that the ops under test move by known amounts."""

import gc
import itertools
import json
import re
import sys
import weakref
import xml.etree.ElementTree as xml

import fakecupy
import numpy as np
import pytest
from conftest import kernels

import minigrad as mg
import minigrad.functional as F
from minigrad import nn, optim
from minigrad.ops.attention import visible_set
from minigrad.ops.flops import backward_flops, flops
from minigrad.study import profile

PROFILE = sys.modules["minigrad.study.profile"]          # the module: the name in the room is the function

# ------------------------------------------------------------------------------------------------------- FLOPs


def test_attentions_pairs_equal_the_visible_sets_for_every_small_case():
    """Offsets from far before the keys to far behind them: rows that see nothing, and rows that see all."""
    op = mg.primitives["attention_fused"]
    for t, s, offset, causal, window in itertools.product(range(4), range(4), range(-5, 7), (False, True),
                                                          (None, 1, 2, 9)):
        visible = visible_set(t, s, None, causal, offset, window)
        pairs = t * s if visible is None else int(np.broadcast_to(visible, (t, s)).sum())
        q, k, v = np.zeros((2, 3, t, 5)), np.zeros((2, 3, s, 5)), np.zeros((2, 3, s, 7))
        given = {"causal": causal, "query_offset": offset, "window": window}
        assert flops(op, (q, k, v), given) == 2 * (5 + 7) * 6 * pairs


def test_flops_of_products_by_hand():
    def count(name, *shapes, **params):
        return flops(mg.primitives[name], [np.zeros(s) for s in shapes], params)

    assert count("matmul", (4, 3), (3, 5)) == 2 * 4 * 3 * 5
    assert count("matmul", (2, 1, 4, 3), (6, 3, 5)) == 2 * 12 * 4 * 3 * 5          # 2 x 6 products
    assert count("matmul", (3,), (3, 5)) == 2 * 3 * 5 and count("matmul", (4, 3), (3,)) == 2 * 4 * 3
    assert count("linear", (2, 4, 3), (3, 5), (5,)) == 2 * 8 * 3 * 5
    assert count("einsum", (4, 3), (3, 5), terms=("ij", "jk"), out="ik") == 2 * 4 * 3 * 5
    assert count("exp", (4, 3)) == 0
    linear, shapes = mg.primitives["linear"], [np.zeros(s) for s in ((4, 3), (3, 5), (5,))]
    assert backward_flops(linear, shapes, {}, [True, True, True]) == 2 * 120
    assert backward_flops(linear, shapes, {}, [False, True, True]) == 120          # no gradient for the data


# --------------------------------------------------------------------------------------------- time, by a counter


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still but for what the test adds to now[0]; the machine reaches 1 FLOP/s and 1 B/s."""
    time = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: time[0])
    monkeypatch.setattr(PROFILE, "machine_rates", lambda device: (1.0, 1.0))
    return time


def takes(monkeypatch, now, owner, name, seconds):
    """Whoever calls owner.name moves the clock."""
    run = getattr(owner, name)

    def slow(*args, **params):
        now[0] += seconds
        return run(*args, **params)
    monkeypatch.setattr(owner, name, slow)


def by(table, name):
    return next(row for row in table if next(iter(row.values())) == name)


@pytest.fixture
def slow_sine(monkeypatch, now):
    """sin takes 3 s forward and 5 s backward, exp 2 s and 1 s."""
    for name, forward, backward in (("sin", 3.0, 5.0), ("exp", 2.0, 1.0)):
        body = mg.primitives[name].plain
        takes(monkeypatch, now, body, "forward", forward)
        takes(monkeypatch, now, body.rules[0], "run", backward)
    return now


def test_each_part_of_a_step_has_its_own_time(monkeypatch, slow_sine):
    """7 s of the optimiser, 11 s of Python before, 13 s between backward and update: all found where they were."""
    now, w = slow_sine, mg.ones(4, requires_grad=True)
    optimizer = optim.SGD([w], lr=0.1)
    takes(monkeypatch, now, optimizer, "update", 7.0)

    def step():
        now[0] += 11.0
        loss = F.exp(F.sin(w)).sum()
        optimizer.zero_grad()
        loss.backward()
        now[0] += 13.0
        optimizer.step()

    p = profile(step, repeat=2)
    sin, exp = by(p.by_op, "sin"), by(p.by_op, "exp")
    assert (sin["calls"], sin["forward"], sin["backward"], sin["seconds"]) == (1, 3.0, 5.0, 8.0)
    assert (exp["forward"], exp["backward"]) == (2.0, 1.0)
    assert by(p.by_op, "optimiser")["seconds"] == 7.0 and by(p.by_op, "other")["seconds"] == 24.0
    assert p.step == p.plain == p.total == 42.0 and by(p.by_op, "total")["seconds"] == 42.0
    assert sin["share"] == 8.0 / 42.0
    assert [row["op"] for row in p.by_op[:2]] == ["sin", "exp"]                    # the slowest first
    assert sin["bytes"] == (16 + 16) + 3 * 16            # x, y; then ct, the x it kept, ct_x: four float32 each
    assert sin["copy_share"] == 80 / 8.0 and sin["product_share"] is None


def test_work_inside_a_rule_belongs_to_whom_it_belongs(slow_sine):
    """A checkpoint runs its function again in the backward pass: 3 s more of sin's forward, its rule for itself, and
    nothing for the checkpoint. Twice, so that one is left before the next begins."""
    now, w = slow_sine, mg.ones(4, requires_grad=True)

    def step():
        y = mg.checkpoint(F.sin, mg.checkpoint(F.sin, w))
        y.sum().backward()
        now[0] += 1.0
        F.exp(w)

    p = profile(step, repeat=1)
    sin = by(p.by_op, "sin")
    assert (sin["calls"], sin["forward"], sin["backward"]) == (4, 12.0, 10.0)
    assert by(p.by_op, "checkpoint")["seconds"] == 0.0 and by(p.by_op, "other")["seconds"] == 1.0
    assert by(p.by_op, "exp")["forward"] == 2.0 and p.total == p.step == 25.0


def test_a_recorded_backward_pass_is_cut_too(slow_sine):
    """Second order: the rule of sin runs once, recorded, and makes a cos; the rule of that cos computes a sine, which
    is no op of the graph: its 3 s are cos's."""
    x = mg.ones(3)
    p = profile(lambda: mg.grad(lambda x: mg.grad(lambda x: F.sin(x).sum())(x).sum())(x), repeat=1)
    sin, cos = by(p.by_op, "sin"), by(p.by_op, "cos")
    assert (sin["calls"], sin["forward"], sin["backward"]) == (1, 3.0, 5.0)
    assert (cos["calls"], cos["forward"], cos["backward"]) == (1, 0.0, 3.0) and p.total == p.step == 11.0


def test_an_op_that_fails_takes_no_others_time(slow_sine):
    now, x = slow_sine, mg.ones(3, requires_grad=True)

    def step():
        try:
            x @ mg.ones(4)
        except ValueError:
            pass
        F.sin(x).sum().backward()
        now[0] += 6.0

    p = profile(step, repeat=1)
    assert by(p.by_op, "sin")["seconds"] == 8.0 and p.total == p.step == 14.0


def model_and_step(**fields):
    mg.manual_seed(0)
    model = nn.Transformer(vocab_size=11, context=6, d_model=8, n_layers=2, n_heads=2, **fields)
    optimizer, ids = optim.AdamW(model.parameters(), lr=1e-2), np.random.default_rng(0).integers(0, 11, (3, 7))

    def step():
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, step


def ticking(monkeypatch):
    """A clock on which every look takes a second: the finest stretches are all different from 0."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(PROFILE, "machine_rates", lambda device: (1e9, 1e9))


@pytest.mark.parametrize("composed", [False, True])
def test_totals_agree_with_the_whole_step(monkeypatch, composed):
    """By op and by module, and the step as measured from outside, within 5 %."""
    ticking(monkeypatch)
    _, step = model_and_step(dropout=0.1)
    with mg.tape._set(composed=composed):
        p = profile(step, repeat=2)
    for table in (p.by_op, p.by_module):
        parts, total = sum(row["seconds"] for row in table[:-1]), table[-1]["seconds"]
        assert abs(parts - total) < 1e-9 * total and abs(total - p.step) < 0.05 * p.step
        assert abs(sum(row["share"] for row in table[:-1]) - 1.0) < 1e-9
    assert sum(row["flops"] for row in p.by_op[:-4]) == sum(row["flops"] for row in p.by_module[:-4])


def test_modules_calls_and_flops_are_those_of_the_model(monkeypatch):
    """Each Linear once, in its own row; FLOPs by hand: 3 x 6 tokens, width 8, forward and twice that backward, but the
    scores of the 21 pairs a causal mask leaves, and no gradient product for the ids."""
    ticking(monkeypatch)
    _, step = model_and_step()
    with kernels():
        p = profile(step, repeat=2)
    qkv = by(p.by_module, "blocks.0.attention.qkv")
    assert (qkv["calls"], qkv["flops"]) == (1, 3 * 2 * 18 * 8 * 24)
    weights = 8 * 24 + 8 * 8 + 2 * 8 * 32
    assert by(p.by_op, "total")["flops"] == 3 * 2 * (18 * (2 * weights + 8 * 11) + 2 * 3 * 2 * (4 + 4) * 21)
    names = [row["module"] for row in p.by_module]
    assert {"embedding", "blocks.1.mlp.up", "norm", "Transformer", "(outside modules)"} <= set(names)


# -------------------------------------------------------------------------------------------------------- memory


def test_the_most_that_live_nodes_keep(now):
    """Two exp keep their outputs, 400 bytes each; the second is kept by its square too and counts once, the parameter
    not at all. Then they go, and a graph made afterwards does not move the peak."""
    w = mg.ones(100, requires_grad=True)

    def step():
        F.square(F.exp(F.exp(w))).sum().backward()
        F.exp(F.exp(w))

    p = profile(step, repeat=1)
    assert p.peak_bytes == 800 and p.parameter_bytes == 400
    assert [(h["op"], h["bytes"], h["module"]) for h in p.holders] == [("exp", 800, "(outside modules)")]
    assert "test_profile.py:" in p.holders[0]["line"]


def test_views_of_one_memory_count_once(now):
    w = mg.ones(2, 50, requires_grad=True)

    def step():
        y = F.exp(w)
        (F.square(y.reshape(100)) * 1.0).sum().backward()

    assert profile(step, repeat=1).peak_bytes == 400


def test_a_model_names_its_modules(now):
    _, step = model_and_step()
    p = profile(step, repeat=1)
    assert sum(h["bytes"] for h in p.holders) == p.peak_bytes > 0
    assert any(h["module"].startswith("blocks.0.") for h in p.holders)


# -------------------------------------------------------------------------------------- what it shows, and leaves


def test_text_and_dict(monkeypatch):
    ticking(monkeypatch)
    _, step = model_and_step()
    p = profile(step, repeat=1)
    text = str(p)
    for part in ("linear" if not mg.tape._state.composed else "matmul", "optimiser", "other", "profiler", "total",
                 "unwatched", "kept for the backward pass", "GFLOP/s"):
        assert part in text
    assert json.loads(json.dumps(p.to_dict()))["by_op"][0]["op"] == p.by_op[0]["op"]
    assert str(p.by_module).splitlines()[0].startswith("module")


def test_the_picture_is_one_svg_whose_boxes_lie_within_their_parents(monkeypatch, tmp_path):
    ticking(monkeypatch)
    _, step = model_and_step(dropout=0.1)
    p = profile(step, repeat=1)
    p.svg(tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text(encoding="utf-8")
    root = xml.fromstring(text)
    assert "script" not in text and not re.search(r'(href|src)=|url\(', text) and "prefers-color-scheme" in text
    boxes = {}
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        title, rect = group[0].text, group[1]
        boxes[title.split("\n")[0]] = (float(rect.get("x")), float(rect.get("width")), float(rect.get("y")))
    assert {"step", "step > forward", "step > backward", "step > optimiser"} <= set(boxes)
    assert any(path.startswith("step > backward > blocks.1 > mlp > up > ") for path in boxes)
    for path, (x, width, y) in boxes.items():
        if path != "step":
            px, pwidth, py = boxes[path.rpartition(" > ")[0]]
            assert px - 0.02 <= x and x + width <= px + pwidth + 0.02 and y > py


def test_training_goes_on_as_without_it_and_nothing_stays(now):
    """1 + 2 repeat steps, bit for bit; no node lives on; no watcher is left, also after an error in the step."""
    ends, nodes = [], []
    for watched in (False, True):
        model, step = model_and_step(dropout=0.1)
        if watched:
            p = profile(step, repeat=2)
        else:
            for _ in range(5):
                step()
        ends.append([x.numpy() for x in model.parameters()])
    assert all((a == b).all() for a, b in zip(*ends))
    w = mg.ones(3, requires_grad=True)

    def noting():
        y = F.sin(w)
        nodes.append(weakref.ref(y.node))
        y.sum().backward()

    slots = mg.Node.__slots__
    p = profile(noting, repeat=1)
    gc.collect()
    assert p and len(nodes) == 3 and not any(ref() for ref in nodes)
    assert mg.Node.__slots__ == slots and not hasattr(F.sin(w).node, "__dict__")
    with pytest.raises(ZeroDivisionError):
        profile(lambda: 1 / 0)
    assert mg.tape._state.watchers == ()


def test_bad_calls_are_named():
    with pytest.raises(TypeError, match=r"\[profile\] step"):
        profile(3)
    with pytest.raises(ValueError, match=r"\[profile\] repeat"):
        profile(lambda: None, repeat=0)


def test_a_step_without_any_op(now):
    """Nothing but time."""
    def step():
        now[0] += 2.0
    p = profile(step, repeat=1)
    assert p.total == 2.0 and by(p.by_op, "other")["share"] == 1.0 and p.peak_bytes == 0 and str(p)


def test_what_the_machine_reaches_is_positive(monkeypatch):
    from minigrad.study.clock import machine_rates
    ticking(monkeypatch)                                 # the arithmetic: a second for each
    product, copy = machine_rates(mg.device("cpu"), n=16, size=100)
    assert product == 2.0 * 16**3 and copy == 2.0 * 4 * 100


# ------------------------------------------------------------------------------------- the second device's clock


def test_events_are_recorded_without_a_wait_and_resolved_after_one(monkeypatch):
    """On the strict stand-in: no hook waits inside the step, an elapsed time is asked only of events the device has
    passed, and the parts are the whole. One millisecond lies between two events there."""
    fakecupy.install(monkeypatch)
    monkeypatch.setattr(PROFILE, "machine_rates", lambda device: (1e9, 1e9))
    model, _ = model_and_step()
    model.to("cuda")
    optimizer, ids = optim.AdamW(model.parameters(), lr=1e-2), np.random.default_rng(0).integers(0, 11, (3, 7))

    def step():
        with fakecupy.no_sync():
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    p = profile(step, repeat=2)
    fakecupy.syncs.clear()
    assert p.device == "cuda" and by(p.by_op, "profiler")["seconds"] == 0.0
    assert abs(sum(row["seconds"] for row in p.by_op[:-1]) - p.total) < 1e-12
    assert abs(p.total * 1e3 - round(p.total * 1e3)) < 1e-6 and p.total > 0.1
    assert by(p.by_op, "optimiser")["seconds"] > 0 and by(p.by_op, "optimiser")["calls"] == 1


def test_every_row_has_every_column_and_a_picture_needs_its_folder(tmp_path):
    """The total has no calls, and says so by None; a refused path names the folder."""
    x = mg.tensor([1.0, 2.0], requires_grad=True)
    found = mg.study.profile(lambda: (x * x).sum().backward(), repeat=1)
    assert found.by_op[-1]["calls"] is None and len({frozenset(row) for row in found.by_op}) == 1
    with pytest.raises(FileNotFoundError, match="the folder must exist"):
        found.svg(tmp_path / "missing" / "step.svg")
