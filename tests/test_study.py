"""The tape in study: what it notes, that it keeps and changes nothing, what it says; and what detect_anomaly names."""

import contextlib
import dataclasses
import gc
import html.parser
import re
import threading
import weakref

import fakecupy
import numpy as np
import pytest
from conftest import kernels

import minigrad as mg
import minigrad.functional as F
from minigrad import nn, study
from minigrad.methods import picture
from minigrad.study import Snapshot, text


def leaf(*values, dtype=np.float64):
    return mg.tensor(np.array(values, dtype), requires_grad=True)


def line_of(f):
    """FILE:LINE of a one-line function, as the messages have it."""
    return f"test_study.py:{f.__code__.co_firstlineno}"


def gpt(**fields):
    """Two layers, small enough to read."""
    sizes = dict(vocab_size=11, context=8, d_model=8, n_layers=2, n_heads=2) | fields
    return nn.Transformer(**sizes), np.arange(12).reshape(2, 6) % 11


# ------------------------------------------------------------------------------------------- formulas of all the ops

OPS = {name: op for name, op in mg.primitives.items()
       if (op.plain.forward if op.plain else op.reference).__module__.startswith("minigrad.")}


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_formula_and_rule(name):
    """One docstring convention: a part "ct_NAME =" for exactly the arguments that have a derivative."""
    op = OPS[name]
    formula, rule, _ = text.formula(op)
    assert formula and rule and "\n" not in formula + rule and ";  " not in rule
    told = set(re.findall(r"ct_(\w+) = ", rule))
    if op.plain is None or op.plain.joint:               # a joint rule: which arguments is not written down
        assert told and told <= set(op.inputs)
    else:
        assert told == {name for name, rule in zip(op.inputs, op.plain.rules) if rule is not None}
        assert (rule == "no gradient") == (not told)
    for name in told:
        assert f"ct_{name} = " in text.rule_of(rule, name) and text.rule_of(rule, name).count("ct_") >= 1


def test_equation_numbers_and_parts_of_rules():
    assert text.formula(OPS["linear"])[2] == "A.10.10" and text.formula(OPS["softmax"])[2] == "A.10.2"
    assert text.formula(OPS["attention_tiled"])[2] == "A.10.1 to A.10.3" and text.formula(OPS["exp"])[2] == ""
    rule = text.formula(OPS["layer_norm"])[1]
    assert text.rule_of(rule, "x") == "with g = ct weight, ct_x = r (g - mean g - h mean(g h))"
    assert text.rule_of(rule, "bias") == "ct_bias = sum ct"              # it does not use g
    assert text.rule_of("ct_xs = ct, cut", "xs[2]") == "ct_xs = ct, cut"
    assert text.rule_of("no gradient", "x") == "no gradient"


# -------------------------------------------------------------------------------------------------------- snapshots


def test_snapshot_of_a_small_array_is_the_array():
    x = np.array([[3.0, -4.0], [0.0, 1.0]], np.float32)
    s = Snapshot(x)
    assert (s.shape, s.dtype, s.min, s.mean, s.max) == ((2, 2), np.float32, -4.0, 0.0, 3.0)
    assert s.norm == np.sqrt(26.0) and s.whole and s.values.dtype == np.float64 and (s.values == x).all()
    x[0, 0] = 7.0                                        # a copy: what happens to the array later is not seen
    assert s.values[0, 0] == 3.0


def test_snapshot_counts_what_is_not_finite():
    """The numbers are of the finite elements: -2 and 1."""
    s = Snapshot(np.array([np.nan, np.inf, -np.inf, np.inf, -2.0, 1.0]))
    assert (s.nans, s.infs, s.min, s.mean, s.max, s.norm) == (1, 3, -2.0, -0.5, 1.0, np.sqrt(5.0))
    assert np.isnan(Snapshot(np.array([np.nan])).norm) and np.isnan(Snapshot(np.zeros((0, 3))).mean)
    assert Snapshot(np.array([1e200, 1e200])).norm == pytest.approx(1e200 * np.sqrt(2))      # the square overflows
    assert Snapshot(np.array([60000.0] * 3, np.float16)).norm == pytest.approx(np.sqrt(3) * np.float16(60000))
    assert Snapshot(np.array(True)).mean == 1.0 and Snapshot(mg.tensor(2.5)).values == 2.5


def test_a_large_array_becomes_means_of_blocks():
    """(2, 32, 64) folds into 64 rows of 64: blocks of 2 x 2. Element (b, i, j) is row 32 b + i."""
    x = np.arange(2 * 32 * 64.0).reshape(2, 32, 64)
    s = Snapshot(x)
    assert not s.whole and s.values.shape == (32, 32)
    np.testing.assert_array_equal(s.values, x.reshape(32, 2, 32, 2).mean(axis=(1, 3)))
    rng = np.random.default_rng(0)
    for shape in [(65,), (33, 47), (100, 2), (1000,), (3, 5, 7, 2)]:
        y = rng.standard_normal(shape)
        small = picture(y)
        rows, columns = y.reshape(-1, y.shape[-1]).shape if y.ndim > 1 else (1, y.size)
        assert small.shape == (min(rows, 32), min(columns, 32))
        size = [np.diff([*(np.arange(min(n, 32)) * n // min(n, 32)), n]) for n in (rows, columns)]
        assert (small * np.outer(*size)).sum() == pytest.approx(y.sum())     # each element in one block
    y[0, 0, 0, 0] = np.nan
    assert np.isnan(Snapshot(y).values).sum() == 1       # the block that holds it


# ------------------------------------------------------------------------------------------------ what is noted forward


def test_records_of_a_small_graph():
    """y = sum of (x w)^2, written x w times itself."""
    x, w = leaf(1, 2), leaf([3.0], [4.0])
    c = np.array(2.0)
    with mg.Tape() as tape:
        h = x * w
        y = (h * h).sum(axis=(0, 1)) + mg.tensor(c)
    names = [r.name for r in tape.records]
    assert names == [n.name for n in tape.nodes] == ["multiply", "multiply", "sum", "add"]
    first, second, total, last = tape.records
    assert first.inputs == [("a", ("leaf", 0)), ("b", ("leaf", 1))]
    assert second.inputs == [("a", ("node", 0)), ("b", ("node", 0))]
    assert last.inputs == [("a", ("node", 2)), ("b", ("constant", "() float64"))]
    assert total.params == {"axis": "(0, 1)"} and first.params == {}     # keepdims is at its default
    assert (first.formula, first.rule, first.equation) == ("a b", "ct_a = ct b, ct_b = ct a", "")
    assert (first.shape, first.dtype, first.device, first.backend) == ((2, 2), np.float64, "cpu", "numpy")
    assert [r.bytes_kept for r in tape.records] == [32, 32, 0, 0]        # x and w; h, once
    assert first.line.endswith(f"test_study.py:{test_records_of_a_small_graph.__code__.co_firstlineno + 5}")
    assert first.module == "" and (first.value.values == [[3, 6], [4, 8]]).all()
    assert total.value.mean == 125 == y.item() - 2       # 9 + 36 + 16 + 64
    assert [leaf.name for leaf in tape.leaves] == ["leaf 0", "leaf 1"]
    assert (tape.leaves[0].value.values == [1, 2]).all() and tape.leaves[0].gradient is None


def test_modules_and_parameters_have_their_paths():
    model, ids = gpt()
    with mg.Tape() as tape:
        model.loss(ids, ids)
    assert sorted(leaf.name for leaf in tape.leaves) == sorted(path for path, _ in model.named_parameters())
    modules = {r.module for r in tape.records}
    assert {"Transformer", "embedding", "blocks.0", "blocks.1.attention.qkv", "norm", ""} <= modules
    linear = next(r for r in tape.records if r.module == "blocks.1.mlp.up" and len(r.inputs) > 1)
    assert any(tape.leaves[i].name == "blocks.1.mlp.up.weight" for _, (kind, i) in linear.inputs if kind == "leaf")
    outer = nn.Linear(2, 2), nn.Linear(2, 2)             # both have a parameter "weight"
    with mg.Tape() as tape:
        outer[1](outer[0](leaf([1.0, 2.0])))
    assert [x.name for x in tape.leaves] == ["leaf 0", "weight", "bias", "weight (leaf 3)", "bias (leaf 4)"]
    assert {r.module for r in tape.records} == {"Linear"}


def test_modules_are_told_apart_by_identity():
    """A dataclass has == and no hash; these two are equal and lie at different paths."""
    @dataclasses.dataclass
    class Scale(nn.Module):
        by: float

        def forward(self, x):
            return x * self.by

    with mg.Tape() as tape:
        nn.Sequential(Scale(2.0), Scale(2.0))(leaf(1.0))
    assert [r.module for r in tape.records] == ["0", "1"]


@pytest.mark.parametrize("way", ["composed", "fused", "tiled", "reference"])
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True, "window": 3}, {"softcap": 2.0, "scale": 0.7}, {"sinks": mg.tensor([0.5, -1.0, 0.0, 2.0])},
    {"attn_mask": np.arange(40) % 3 > 0}, {"attn_mask": np.where(np.arange(40) % 3 > 0, 0.5, -np.inf)},
    {"kv_head": [1, 0, 0, 1]}], ids=lambda options: " ".join(options) or "plain")
def test_attention_weights_are_noted(way, options):
    """40 positions, of which 32 are kept: against the weights that values e_j bring out, head by head, in float64."""
    q = mg.randn(2, 4, 40, 3, dtype=np.float64, requires_grad=True)
    k = mg.randn(2, 2 if "kv_head" in options else 4, 40, 3, dtype=np.float64)
    implementation = "auto" if way == "reference" else way
    with mg.Tape() as tape, mg.composed() if way == "reference" else kernels():
        F.scaled_dot_product_attention(q, k, k, **options, implementation=implementation)
    eye = np.broadcast_to(np.eye(40), (*k.shape[:2], 40, 40))
    with mg.no_grad(), kernels():
        want = F.scaled_dot_product_attention(q, k, eye, **options, implementation="fused").numpy()[0]
    found, = [r.attention for r in tape.records if r.attention is not None]
    sunk = "sinks" in options and way in ("composed", "reference")       # there one more column stands at the end
    assert found.weights.shape == (4, 32, 32) and (found.queries, found.keys) == (40, 40 + sunk)
    np.testing.assert_allclose(found.weights, want[:, :32, :32], rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(found.visible, want[:, :32, :32] > 0)


def test_an_empty_batch_has_no_weights_and_a_huge_block_no_warning():
    q = mg.zeros(0, 2, 4, 3, requires_grad=True)
    with mg.Tape() as tape:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert len(tape) > 1 and not any(r.attention for r in tape.records)
    assert np.isinf(Snapshot(np.full(70, 1e308)).values).any()   # the sum of a block overflows; warnings are errors


def test_numerators_are_no_attention():
    """exp on a line that bears the equation's number: weights only where no row sums to more than 1."""
    s = leaf([1.0, 2.0], [3.0, 4.0])
    with mg.Tape() as tape:
        F.exp(s)  # (A.10.2)
        F.exp(s - F.logsumexp(s, axis=-1, keepdims=True))  # (A.10.2)
    exps = [r.attention for r in tape.records if r.name == "exp"]
    assert exps[0] is None and exps[1].weights.sum() == pytest.approx(2.0)


def test_values_false_reads_no_array(monkeypatch):
    """Structure only; the same nodes, references and bytes."""
    def read(*_):
        raise AssertionError("an array was read")
    model, ids = gpt()
    with mg.Tape() as full:
        model.loss(ids, ids).backward()
    monkeypatch.setattr(study.snapshot, "to_host", read)
    with mg.Tape(values=False) as tape:
        model.loss(ids, ids).backward()
    assert [(r.name, r.inputs, r.bytes_kept) for r in tape.records] == [
        (r.name, r.inputs, r.bytes_kept) for r in full.records]
    assert all(r.value is None and r.attention is None for r in tape.records)
    assert [p.number for p in tape.pulls] == [p.number for p in full.pulls] and tape.pulls[0].ct is None
    assert str(tape) and tape.tree() and tape.dot()
    with pytest.raises(ValueError, match=r"\[Tape.why\] this tape noted no values"):
        tape.why("norm.weight")


def test_on_another_device(monkeypatch):
    """On the stand-in for CuPy: the numbers of the CPU; and values=False makes the step wait for nothing."""
    fakecupy.install(monkeypatch)
    tapes = []
    for device in ("cpu", "cuda"):
        mg.manual_seed(0)
        model, ids = gpt()
        model.to(device)
        with mg.Tape() as tape, mg.composed():
            model.loss(ids, ids).backward()
        tapes.append(tape)
    for a, b in zip(tapes[0].records, tapes[1].records, strict=True):
        assert b.device == "cuda" and b.backend == "cupy" and a.value.norm == pytest.approx(b.value.norm)
        assert (a.attention is None) == (b.attention is None)
    for a, b in zip(tapes[0].pulls, tapes[1].pulls, strict=True):
        assert a.ct.norm == pytest.approx(b.ct.norm, rel=1e-4)
    ids = mg.tensor(ids, device="cuda")
    with fakecupy.no_sync(), mg.Tape(values=False) as tape, mg.composed():
        ((model.blocks[0](mg.ones(1, 3, 8, device="cuda"))) ** 2.0).sum().backward()
    assert len(tape) > 40 and str(tape)


# ----------------------------------------------------------------------------------------------- what is noted backward


def test_pulls_of_a_small_graph():
    """y = sum h^2, h = x w: ct_h = 2 h = 6 12 8 16 (two equal cotangents), ct_x = its sums over rows of ct_h w."""
    x, w = leaf(1, 2), leaf([3.0], [4.0])
    with mg.Tape() as tape:
        h = x * w
        (h * h).sum().backward()
    assert [(p.number, p.name, p.run, p.depth) for p in tape.pulls] == [
        (2, "sum", 0, 0), (1, "multiply", 0, 0), (0, "multiply", 0, 0)]
    total, square, product = tape.pulls
    assert total.ct.values == 1.0 and (product.ct.values == [[6, 12], [8, 16]]).all()
    assert [(r.target, r.added, r.axes) for r in square.results] == [(("node", 0), False, ()), (("node", 0), True, ())]
    assert (square.results[1].ct.values == [[3, 6], [4, 8]]).all()
    assert [(r.target, r.axes, r.ct.values.ravel().tolist()) for r in product.results] == [
        (("leaf", 0), (0,), [50, 100]), (("leaf", 1), (1,), [30, 40])]
    assert [p.held for p in tape.pulls] == [64, 32, 0]   # 32 bytes of each product, gone as the pass goes
    assert (tape.leaves[0].gradient.values == x.grad.numpy()).all()


def test_the_cotangent_of_a_slice_is_shown_whole():
    x = leaf(1, 2, 3)
    with mg.Tape() as tape:
        (x[1:] * 2.0).sum().backward()
    assert tape.pulls[-1].results[0].ct.values.tolist() == [0, 2, 2]


@pytest.mark.parametrize("way", [kernels, mg.composed])
def test_what_arrives_adds_up(way):
    """At every node and leaf of a pass the cotangents noted as arriving sum to the one noted as its own: means of
    blocks are linear. With slices, broadcasting, a tied weight and a checkpoint."""
    model, ids = gpt()
    model.to(mg.float64)
    with mg.Tape() as tape, way():
        h = mg.checkpoint(model.blocks[0], model.embedding(ids) + model.position.weight[:6])
        F.cross_entropy(F.linear(model.blocks[1](h), model.embedding.weight.T), ids).backward()
    for run in {p.run for p in tape.pulls}:
        arrived = {}
        for p in (p for p in tape.pulls if p.run == run):
            for r in p.results:
                arrived.setdefault(r.target, []).append(r.ct.values)
                assert r.added == (len(arrived[r.target]) > 1)
        own = {("node", p.number): p.ct for p in tape.pulls if p.run == run}
        own |= {("leaf", x.number): x.gradient for x in tape.leaves if x.run == run}
        assert len(own) > 4
        for target, values in arrived.items():
            if target in own:
                np.testing.assert_allclose(sum(values), own[target].values, rtol=1e-9, atol=1e-15)
    assert sum(x.gradient is not None for x in tape.leaves) >= 26 and tape.pulls[-1].held == 0


def test_several_passes():
    """Retained, then again with another cotangent: runs 0 and 1; a leaf's gradient is that of the last pass."""
    x = leaf(3.0)
    with mg.Tape() as tape:
        y = x * x
        y.backward(retain_graph=True)
        assert tape.pulls[-1].held == 8
        y.backward(mg.tensor(np.array([10.0])))
        g, = mg.gradients(x * 2.0, [x])
    assert [(p.number, p.run, p.held) for p in tape.pulls] == [(0, 0, 8), (0, 1, 0), (1, 2, 0)]
    assert tape.leaves[0].gradient.values == 2.0 == g and x.grad.item() == 66
    assert [r.added for p in tape.pulls for r in p.results] == [False, True, False, True, False]
    assert "backward pass 2" in tape.why(x)


def test_create_graph_is_noted_as_it_runs():
    """x^3: the second derivative is 6 x."""
    x = leaf(2.0)
    with mg.Tape() as tape:
        g, = mg.gradients(x * x * x, [x], create_graph=True)
        g.backward()
    assert x.grad.item() == 12 and len({p.run for p in tape.pulls}) == 2
    assert tape.leaves[0].gradient.values == 12.0 and "its gradient has value [12]" in tape.why(x)


def test_nodes_from_elsewhere_are_outside():
    """Made before the tape, or in another thread: named, and passed through."""
    x, made = leaf(2.0), []
    thread = threading.Thread(target=lambda: made.append(F.exp(x)))
    with mg.Tape() as tape:
        thread.start()
        thread.join()
        y = made[0] * x
        y.backward()
    assert tape.records[0].inputs == [("a", ("outside", "exp")), ("b", ("leaf", 0))]
    assert [(p.number, p.name) for p in tape.pulls] == [(0, "multiply"), (None, "exp")]
    assert x.grad.item() == pytest.approx(3 * np.exp(2.0)) == tape.leaves[0].gradient.mean
    assert "[exp]" in tape.why(x) and "[exp]" in str(tape)


def test_nested_tapes_note_the_same():
    x = leaf(2.0)
    with mg.Tape() as outer:
        y = F.exp(x)
        with mg.Tape() as inner:
            (y * x).backward()
    assert [r.name for r in outer.records] == ["exp", "multiply"] and [r.name for r in inner.records] == ["multiply"]
    assert inner.records[0].inputs[0] == ("a", ("outside", "exp"))
    assert [p.name for p in outer.pulls] == [p.name for p in inner.pulls] == ["multiply", "exp"]
    assert str(outer.leaves[0].gradient) == str(inner.leaves[0].gradient)


class _Breaks(nn.Module):
    def forward(self, x):
        return F.exp(x) @ mg.ones(5, 5)                  # does not fit


def test_an_exception_in_the_middle():
    """In a module: the next one's path is its own. In a rule: the pass is told as unfinished, the next is whole."""
    x = leaf([1.0, 2.0])
    with mg.Tape() as tape:
        with pytest.raises(ValueError, match="matmul"):
            nn.Sequential(_Breaks())(x)
        nn.Sequential(F.exp)(x)
        z = x * 3.0
        w = z * z
        z.copy_(z.detach())                              # now w's rule refuses to run
        with pytest.raises(RuntimeError, match="written in place"):
            (w + x * 2.0).sum().backward()
        assert [r.module for r in tape.records][:3] == ["0", "Sequential", ""]
        assert "gradient has not been found: the pass was interrupted" in tape.why(x)
        (x * 5.0).sum().backward()
        assert "value [[5, 5]]" in tape.why(x).splitlines()[0]
    with pytest.raises(KeyError), tape:
        raise KeyError
    assert not mg.tape._state.watchers and x.grad.tolist() == [[5, 5]]


def test_checkpoint_is_forgotten_and_comes_again():
    """Its nodes are not on the graph after its forward; its backward makes them again, one pass within another."""
    w, x = leaf(3.0), leaf(2.0)
    with mg.Tape() as tape:
        h = w * 1.0
        y = mg.checkpoint(lambda a: F.exp(a) * w, x * 2.0)
        assert [r.name for r in tape.records] == ["multiply", "multiply", "checkpoint"] and len(tape.leaves) == 2
        (y * h).backward()
    assert x.grad.item() == pytest.approx(18 * np.exp(4.0)) and w.grad.item() == pytest.approx(6 * np.exp(4.0))
    again = [r.name for r in tape.records[4:]]
    assert again == ["alias", "exp", "multiply"] or again == ["exp", "multiply"]
    assert [p.depth for p in tape.pulls if p.name == "exp"] == [1]
    told = tape.why(w)
    assert "2 [checkpoint]" in told and "f runs again" in told and tape.leaves[0].gradient.mean == w.grad.item()
    assert tape.pulls[-1].held == 0 and tape.pulls[0].held > 0
    by_checkpoint, = [r for p in tape.pulls if p.name == "checkpoint" for r in p.results if r.target == ("leaf", 0)]
    assert not by_checkpoint.added                       # the first of w's two in the outer pass


# -------------------------------------------------------------------------------------------- nothing kept or changed


def step(tape, way=contextlib.nullcontext):
    """A training step of a small model with dropout and a checkpoint; all its numbers."""
    mg.manual_seed(1)
    model, ids = gpt(dropout=0.1)
    with tape, way():
        h = mg.checkpoint(model.blocks[1], model.blocks[0](model.embedding(ids)))
        loss = model.loss(ids, ids) + (h * h).mean()
        g, = mg.gradients(loss, [model.norm.weight], create_graph=True)
        (loss + (g * g).sum()).backward()
    return [loss.numpy(), g.numpy(), *(p.grad.numpy() for p in model.parameters())]


@pytest.mark.parametrize("way", [contextlib.nullcontext, mg.composed], ids=["kernels", "composed"])
@pytest.mark.parametrize("make", [mg.Tape, lambda: mg.Tape(values=False), mg.detect_anomaly])
def test_results_are_bit_identical_when_watched(make, way):
    for a, b in zip(step(contextlib.nullcontext(), way), step(make(), way), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("composed", [False, True])
def test_a_tape_keeps_nothing_of_a_step_alive(composed):
    """Without the garbage collector: Tensors, their arrays and the model die while the tape lives and can be read."""
    model, ids = gpt(dropout=0.1)
    alive = []

    class Spy(mg.tape.Watcher):
        def computed(self, op, out, args, params):
            alive.extend([weakref.ref(out), weakref.ref(out._data)])

        def pulled(self, node, ct, target, c):
            if isinstance(c, np.ndarray):
                alive.append(weakref.ref(c))

    gc.collect()
    gc.disable()
    try:
        with mg.Tape() as tape, Spy(), mg.composed() if composed else kernels():
            loss = model.loss(ids, ids)
            loss.backward()
        alive += [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
        del model, loss
        left = [ref() for ref in alive if ref() is not None]
        assert len(alive) > 100 and not left
        node = weakref.ref(tape.nodes[0])
        assert str(tape) and tape.tree() and tape.dot() and tape.why("blocks.0.mlp.up.weight", steps=None)
        gone = weakref.ref(tape)
        del tape
        assert gone() is None and node() is None         # no reference cycle
    finally:
        gc.enable()


# --------------------------------------------------------------------------------------------------- what it says


@pytest.fixture(scope="module")
def run():
    """A tape of a two-layer GPT, forward and backward."""
    mg.manual_seed(0)
    model, ids = gpt(d_model=32, n_heads=4)
    with mg.Tape() as tape, kernels():
        loss = model.loss(ids, ids)
        loss.backward()
    return tape, model, loss


def test_print_a_gpt(run):
    tape, _, _ = run
    head, *lines = str(tape).splitlines()
    assert head.split() == "op from formula eq shape dtype on kept line module".split()
    assert len(lines) == len(tape) and max(map(len, lines)) <= 165       # 160 with a file name as train.py
    assert [line.split()[:2] for line in lines] == [[str(r.number), r.name] for r in tape.records]
    row = next(line for line in lines if line.endswith("blocks.1.mlp.up") and " linear " in line)
    assert re.match(r"\d+ +linear +\d+ \.weight \.bias +y = x w \+ b +A\.10\.10 +\(2,6,128\) +float32 +cpu/numpy "
                    r"+[\d,]+ B released +test_study\.py:\d+ +blocks\.1\.mlp\.up", row)
    assert any("A.10.1-3" in line and "attention_fused" in line for line in lines)
    assert all(line.index(r.name) == head.index("op") for line, r in zip(lines, tape.records))
    plain = mg.Tape()
    assert str(plain).split() == "op from formula shape dtype on kept line".split() and plain.tree() == ""


def test_why_tells_a_chain(run):
    tape, model, loss = run
    told = tape.why(model.blocks[0].attention.qkv.weight)
    lines = told.splitlines()
    assert lines[0].startswith("blocks.0.attention.qkv.weight (32, 96): its gradient has norm ")
    norm = np.linalg.norm(model.blocks[0].attention.qkv.weight.grad.numpy().astype(np.float64))
    assert f"norm {norm:.4g}" in lines[0]
    assert re.match(r"backward pass 0 begins at \d+ \[divide\] with a cotangent of value 1$", lines[1])
    more = int(re.match(r"… (\d+) steps first: divide sum cross_entropy reshape … ", lines[2]).group(1))
    assert told.count("    ct (") == 8                   # told in full
    assert "the sum of 3: from" in told and "ct_w = x^T ct (A.10.11)  ->  blocks.0.attention.qkv.weight" in told
    full = tape.why("blocks.0.attention.qkv.weight", steps=None)
    assert full.count("    ct (") == more + 8 and "…" not in full
    tied = tape.why("embedding.weight")
    assert "it is the sum of 2:" in tied and "[transpose]" in tied and "0 [embedding]" in tied
    assert tape.why(loss).splitlines()[0] == f"{len(tape) - 1} [divide] (): its cotangent has value 1"
    assert tape.why(tape.records[3].number) == tape.why(3)


def test_why_in_numbers():
    """d(sum (x w)^2)/dx, the rules and the axis summed."""
    x, w = leaf(1, 2), leaf([3.0], [4.0])
    with mg.Tape() as tape:
        h = x * w
        (h * h).sum().backward()
    told = tape.why(x)
    assert "leaf 0 (2,): its gradient has value [50, 100]" in told
    assert "ct_a = ct b, summed over axes 0  ->  leaf 0 (2,), value [50, 100]" in told
    assert "ct_b = ct a  ->  0 [multiply] (2, 2), value [[3, 6], [4, 8]], added to what had come" in told
    assert "ct (2, 2), value [[6, 12], [8, 16]], the sum of 2: from 1 [multiply], 1 [multiply]" in told
    assert tape.why(h).splitlines()[0] == "0 [multiply] (2, 2): its cotangent has value [[6, 12], [8, 16]]"


def test_why_says_what_is_missing():
    x, other = leaf(1.0), leaf(2.0)
    with mg.Tape() as tape:
        y = x * 2.0
        z = other * 3.0
    for bad in (leaf(1.0), mg.tensor(1.0), "weight", 7, -1, None, True):
        with pytest.raises(ValueError, match=r"^\[Tape.why\] x is a leaf or a result recorded on this tape"):
            tape.why(bad)
    with pytest.raises(ValueError, match=r"\[Tape.why\] no backward pass.*call backward inside `with mg.Tape\(\)`"):
        tape.why(x)
    with tape:
        y.backward()
    for missed in (other, z):
        with pytest.raises(ValueError, match="no backward pass on this tape reached .*it does not lead there"):
            tape.why(missed)


def test_tree_shows_every_node_once():
    x = leaf(1.0)
    with mg.Tape() as tape:
        a = F.exp(x)
        b = a * a                                        # shared: a once, after all that use it
        c = b + F.tanh(a)
        _ = F.sin(x)
        c - b
    assert tape.tree().splitlines() == [
        "5 subtract (1,)  a = 3, b = 1", "3 add (1,)  a = 1, b = 2", "│ 2 tanh (1,)  x = 0",
        "1 multiply (1,)  a = 0, b = 0", "0 exp (1,)  x = leaf 0", "4 sin (1,)  x = leaf 0"]


def test_a_very_long_chain():
    """No recursion, and no quadratic text: each step has a shared and a side argument. 5,000 nodes are recorded and the
    rest is said to have been."""
    x = leaf(1.0)
    with mg.Tape(values=False) as tape:
        y = x
        for _ in range(2_500):
            y = y + -y
        y.backward()
    assert len(tape.pulls) == len(tape) == 5_000
    negative, add = tape.records[-2:]
    for i in range(5_000, 100_000, 2):
        tape.records += [dataclasses.replace(negative, number=i, inputs=[("x", ("node", i - 1))]), dataclasses.replace(
            add, number=i + 1, inputs=[("a", ("node", i - 1)), ("b", ("node", i))])]
    lines = tape.tree().splitlines()
    assert len(lines) == 100_000 and max(map(len, lines)) < 50
    assert tape.dot().count("->") == 150_000
    with mg.Tape() as tape:
        y = x
        for _ in range(2_000):
            y = y * 1.0
        y.backward()
    told = tape.why(x)
    assert "… 1992 steps first" in told and len(told.splitlines()) < 40


def test_dot_is_whole_and_escaped(run):
    tape, _, _ = run
    told = tape.dot()
    assert told.count("{") == told.count("}") and told.startswith("digraph tape {") and told.endswith("}")
    edges = sum(kind in ("node", "leaf") for r in tape.records for _, (kind, _) in r.inputs)
    assert told.count(" -> ") == edges and 'subgraph "cluster_blocks.0.attention"' in told
    assert all(f"  n{i} [" in told for i in range(len(tape)))
    p = nn.Parameter(np.ones(2))
    p.path = 'a "quoted" \\ name'
    with mg.Tape() as tape:
        F.exp(p)
    assert r'label="a \"quoted\" \\ name\n(2,) float64"' in tape.dot()


class _Balanced(html.parser.HTMLParser):
    """Every tag closed, in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_jupyter_shows_tensors_and_tapes(run):
    x = leaf([1.0, -2.0], [np.nan, np.inf])
    page = _Balanced(x._repr_html_())
    assert page.texts[0] == "(2, 2) float64 on cpu, a leaf" and page.texts[1:] == ["1", "-2", "nan", "inf"]
    assert "op exp" in F.exp(x)._repr_html_() and "no history" in mg.tensor(3)._repr_html_()
    large = mg.zeros(100, 3, 50)._repr_html_()
    assert _Balanced(large) and large.count("<td") == 32 * 32            # a picture, not 15,000 cells
    assert _Balanced(mg.zeros(0, 3)._repr_html_()).texts == ["(0, 3) float32 on cpu, no history"]
    assert _Balanced(mg.tensor([True, False])._repr_html_()).texts[1:] == ["1", "0"]
    p = nn.Parameter(np.ones(2))
    p.path = "<b>&"
    with mg.Tape() as tape:
        F.exp(p)
    page = tape._repr_html_()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page and "<b>&" in _Balanced(page).texts
    assert run[0]._repr_html_().count("<tr>") == len(run[0]) + 1


# ---------------------------------------------------------------------------------------------------------- anomalies

HALF = np.float16
FORWARD = [
    ("log", lambda: F.log(leaf(0, 1)), "an infinity", r"x \(2,\) float64 in \[0, 1\]; the log of 0 is -inf"),
    ("log", lambda: F.log(leaf(-1, 1)), "a NaN", "the log of a negative number"),
    ("sqrt", lambda: F.sqrt(leaf(-1, 1)), "a NaN", "the square root of a negative number"),
    ("divide", lambda: leaf(1, 2) / leaf(0, 1), "an infinity", "division by 0"),
    ("divide", lambda: leaf(0, 2) / leaf(0, 1), "a NaN", "division by 0"),
    ("power", lambda: leaf(0, 2) ** -1.0, "an infinity", "0 to a negative power"),
    ("power", lambda: leaf(-1, 2) ** 0.5, "a NaN", "a negative number to a fractional power"),
    ("power", lambda: leaf(0, -1) ** 0.5, "a NaN", "a negative number to a fractional power"),   # the 0 is innocent
    ("power", lambda: leaf(0, 1e200) ** 2.0, "an infinity", "an overflow"),
    ("exp", lambda: F.exp(leaf(12, dtype=HALF)), "an infinity", r"float16's largest, 65504, from x = 11\.09"),
    ("exp", lambda: F.exp(leaf(710)), "an infinity", r"from x = 709\.8"),
    ("multiply", lambda: leaf(300, dtype=HALF) * leaf(300, dtype=HALF), "an infinity", "65504: compute .*in float32"),
    ("matmul", lambda: leaf([300] * 4, dtype=HALF) @ leaf(*[[300]] * 4, dtype=HALF), "an infinity", "loss scaling"),
    ("subtract", lambda: leaf(np.inf) - np.inf, "a NaN", r"a \(1,\) float64 with 1 infinite, b inf; infinity minus"),
    ("multiply", lambda: leaf(0) * np.inf, "a NaN", "0 times infinity"),
    ("sum", lambda: leaf(np.inf, -np.inf, 0).sum(), "a NaN", "infinity minus infinity"),
    ("divide", lambda: leaf(np.inf, 0) / leaf(np.inf, 1), "a NaN", "infinity over infinity"),
    ("sin", lambda: F.sin(leaf(np.inf, 0)), "a NaN", "1 infinite$"),                # no product here: no cause named
]


@pytest.mark.parametrize("op, f, kind, why", FORWARD, ids=lambda x: x if isinstance(x, str) and len(x) < 9 else "")
def test_an_anomaly_forward_is_named(op, f, kind, why):
    said = rf"^\[{op}\] made {kind} in the forward pass at .*{re.escape(line_of(f))}: .*{why}"
    with mg.detect_anomaly(), pytest.raises(mg.AnomalyError, match=said) as error:
        f()
    assert "\n" not in str(error.value)


def test_an_empty_softmax_row_is_named():
    """As a kernel, and as the reference, where -inf minus -inf makes the NaN."""
    f = lambda: F.softmax(leaf([0, 1], [-np.inf, -np.inf]))  # noqa: E731
    at = re.escape(line_of(f))
    with kernels(), mg.detect_anomaly(), pytest.raises(mg.AnomalyError, match=rf"\[softmax\].*{at}.*empty softmax row"):
        f()
    with mg.composed(), mg.detect_anomaly(), pytest.raises(
            mg.AnomalyError, match=rf"\[subtract\].*{at}.*in a softmax: a row that is -inf everywhere"):
        f()


BACKWARD = [
    ("sqrt", lambda: F.sqrt(leaf(0, 1)).sum(), 1.0, r"y \(2,\) float64 in \[0, 1\]; the derivative of the square root"),
    ("power", lambda: (leaf(0, 1) ** 0.5).sum(), 1.0, r"the derivative of a\^b is infinite at 0"),
    ("multiply", lambda: leaf(300, dtype=HALF) * leaf(100, dtype=HALF), HALF(300), "65504.*here by less"),
]


@pytest.mark.parametrize("op, f, ct, why", BACKWARD, ids=lambda x: x if isinstance(x, str) and len(x) < 9 else "")
def test_an_anomaly_backward_is_named(op, f, ct, why):
    said = rf"^\[{op}\] made an infinity in the backward pass, recorded at .*{re.escape(line_of(f))}: from .*{why}"
    with mg.detect_anomaly():
        y = f()
        with pytest.raises(mg.AnomalyError, match=said):
            y.backward(mg.full(y.shape, ct, dtype=y.dtype))


def test_a_sum_of_cotangents_that_overflows_is_named():
    """Each is 40000, below 65504; together not. At a node, and at a leaf."""
    for x, said in ((leaf(1, dtype=HALF) * 1.0, r"\[multiply\] the cotangents that reached it add up to an infinity"),
                    (leaf(1, dtype=HALF), r"\[backward\] the cotangents of a leaf \(1,\) add up to an infinity")):
        with mg.detect_anomaly():
            y = x * 200.0 + x * 200.0
            with pytest.raises(mg.AnomalyError, match=said + ".*65504"):
                y.backward(mg.full((1,), 200.0, dtype=HALF))


def test_what_came_from_outside_is_said_so():
    x = leaf(1.0)
    with mg.detect_anomaly():
        with pytest.raises(mg.AnomalyError, match=r"\[multiply\] its cotangent.*1 infinite, came with an infinity"):
            (x * 2.0).backward(mg.tensor([np.inf]))
        with pytest.raises(mg.AnomalyError, match=r"came with an input: a \(1,\) float64 with 1 NaN of \[add\] at"):
            ((leaf(np.nan) + 1.0) * 2.0).backward()
        with pytest.raises(mg.AnomalyError, match=r"1 infinite; no watched op made it"):     # that NaN is innocent
            (leaf(np.inf) * 2.0).backward()


def test_an_anomaly_in_a_model_names_module_and_parameter():
    model, ids = gpt()
    model.blocks[1].attention.out.weight.copy_(1e38)
    model.blocks[1].attention.qkv.bias.copy_(1e3)
    with mg.detect_anomaly(), pytest.raises(mg.AnomalyError) as error:
        model.loss(ids, ids)
    said = str(error.value)
    assert re.search(r"made an infinity .* in blocks\.1\.attention\.out: .*blocks\.1\.attention\.out\.weight", said)
    assert "an overflow: float32's largest number is 3.403e+38" in said


def test_an_anomaly_in_a_recorded_backward_pass():
    """Under create_graph the rule is made of ops: the division in sqrt's rule."""
    x = leaf(0, 1)
    with mg.detect_anomaly():
        y = F.sqrt(x).sum()
        with pytest.raises(mg.AnomalyError, match=r"\[divide\] made an infinity in the backward pass of \[sqrt\]"):
            mg.gradients(y, [x], create_graph=True)
        with pytest.raises(mg.AnomalyError, match=r"\[log\] made an infinity in the forward pass at"):
            F.log(x)                                     # that pass is over
