"""watch: each number equals the one worked out by hand, training is what it is unwatched, bad training is named."""

import gc
import math
import weakref

import fakecupy
import numpy as np
import pytest
from conftest import kernels, or_skip

import minigrad as mg
import minigrad.functional as F
from minigrad import nn, optim
from minigrad.study import watch


def row(flow, layer, step=None):
    step = flow.rows[-1]["step"] if step is None else step
    return next(r for r in flow.rows if r["layer"] == layer and r["step"] == step)


def norm(x):
    return math.sqrt((np.asarray(x, np.float64) ** 2).sum())


class Two(nn.Module):
    """y = b(relu(a(x))): small enough to follow by hand."""

    def __init__(self):
        self.a, self.b, self.drop = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.b(F.relu(self.a(x))))


def one_step(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x)
    (y * y).sum().backward()
    optimizer.step()
    return y


def test_each_number_by_hand():
    """Activation, gradient by it (2 y for the loss sum y^2, and 2 y W^T before), update lr |g| / |w| of plain SGD."""
    model, x = Two(), mg.randn(5, 3)
    model.a.bias.copy_(np.array([-100.0, 0.0, -100.0, -100.0]))                    # three of four units dead
    wb, wa = model.b.weight.numpy(), model.a.weight.numpy()
    with watch(model) as flow:
        y = one_step(model, optim.SGD(model.parameters(), lr=1e-3), x)
    close = pytest.approx
    for layer in ("Two", "b"):                           # Dropout(0) hands its input on: no op, no row, same output
        assert row(flow, layer)["activation_rms"] == close(norm(y.numpy()) / math.sqrt(10), rel=1e-5)
        assert row(flow, layer)["gradient_norm"] == close(norm(2 * y.numpy()), rel=1e-5)
    assert not any(r["layer"] == "drop" for r in flow.rows)
    hidden = x.numpy() @ wa + np.array([-100.0, 0.0, -100.0, -100.0])
    assert row(flow, "a")["activation_rms"] == close(norm(hidden) / math.sqrt(20), rel=1e-5)
    assert row(flow, "a")["gradient_norm"] == close(norm(2 * y.numpy() @ wb.T * (hidden > 0)), rel=1e-5)
    assert row(flow, "Two")["dead"] == 0.75 and row(flow, "a")["dead"] is None     # the relu is called in Two
    g = norm(model.b.weight.grad.numpy())
    weight = row(flow, "b.weight")
    assert weight["kind"] == "parameter" and weight["gradient_norm"] == close(g, rel=1e-5)
    assert weight["weight_norm"] == close(norm(wb), rel=1e-5)
    assert weight["update_ratio"] == close(1e-3 * g / norm(wb), rel=1e-2)          # w - w' in float32
    assert [r["layer"] for r in flow.rows] == ["Two", "a", "b", "a.weight", "a.bias", "b.weight", "b.bias"]


def test_a_module_called_twice_is_measured_at_its_last_output():
    """y = a(a(x)), loss sum y^2: the last output is y and the gradient by it 2 y, not that by the first output."""
    model = nn.Sequential(nn.Linear(2, 2))
    with watch(model) as flow:
        y = model[0](model[0](mg.randn(4, 2)) * 3.0)
        (y * y).sum().backward()
        optim.SGD(model.parameters(), lr=0.1).step()
    found = row(flow, "0")
    assert found["activation_rms"] == pytest.approx(norm(y.numpy()) / math.sqrt(8), rel=1e-5)
    assert found["gradient_norm"] == pytest.approx(norm(2 * y.numpy()), rel=1e-5)


@pytest.mark.parametrize("implementation", ["fused", "tiled", "composed"])
def test_attention_entropy_of_each_head(implementation):
    """Causal, T = 4: with all scores equal row i is uniform over i + 1 keys, so the mean is mean log (i + 1); a head
    with one overwhelming key looks at that alone. Composed, the weights are an op's own output."""
    model = nn.MultiheadAttention(4, 2, causal=True, implementation=implementation)
    w = np.zeros((4, 12), np.float32)
    w[0, 2], w[0, 6] = 100.0, 100.0                      # q and k of head 1 from feature 0
    model.qkv.weight.copy_(w)
    model.qkv.bias.copy_(0.0)
    x = np.zeros((2, 4, 4), np.float32)
    x[:, 0, 0], x[:, 1:, 0] = 3.0, 1.0                   # the first position's key wins in every row
    with kernels(), watch(model) as flow:
        one_step(model, optim.SGD(model.parameters(), lr=1e-3), mg.tensor(x))
    uniform, single = row(flow, "MultiheadAttention")["entropy"]
    assert uniform == pytest.approx(np.mean(np.log([1, 2, 3, 4])), rel=1e-5) and abs(single) < 1e-6


@pytest.mark.parametrize("fields", [{"n_kv_heads": 1}, {"window": 2}, {"dropout": 0.3}], ids=str)
def test_entropy_of_every_kind_of_attention(fields):
    """Shared heads, windows, dropout (the weights before it): between 0 and the log of what a row may see."""
    model = nn.Transformer(vocab_size=7, context=6, d_model=8, n_layers=1, n_heads=2, **fields)
    ids = np.random.default_rng(0).integers(0, 7, (3, 7))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with kernels(), watch(model) as flow:
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    found = row(flow, "blocks.0.attention")["entropy"]
    most = np.mean([np.log(min(i + 1, fields.get("window", 6))) for i in range(6)])
    assert len(found) == 2 and all(0.9 * most < h <= most + 1e-6 for h in found)   # near uniform at the start


def train(watched, every=1, together=False, steps=4):
    mg.manual_seed(1)
    model = nn.Transformer(vocab_size=9, context=5, d_model=8, n_layers=2, n_heads=2, dropout=0.2, mlp="relu")
    ids, params = np.random.default_rng(0).integers(0, 9, (3, 6)), list(model.parameters())
    optimizer = optim.AdamW(params, lr=1e-2)
    if together:
        matrices = [p for path, p in model.named_parameters() if p.ndim == 2 and "blocks" in path]
        rest = [p for p in params if all(p is not q for q in matrices)]
        optimizer = optim.Together(optim.Muon(matrices, lr=1e-2), optim.AdamW(rest, lr=1e-2))
    nodes, flow = [], None

    def run():
        for _ in range(steps):
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            nodes.append(weakref.ref(loss.node))
            optimizer.zero_grad()
            loss.backward()
            optim.clip_grad_norm_(params, 1.0)
            optimizer.step()
            with model.evaluating():                     # an evaluation between the steps is none of them
                model(ids[:, :-1])

    if watched:
        with watch(model, every=every) as flow:
            run()
    else:
        run()
    return flow, [p.numpy() for p in params], nodes


@pytest.mark.parametrize("together", [False, True])
def test_training_is_bit_for_bit_the_same_and_nothing_stays(together):
    flow, watched, nodes = train(True, together=together)
    _, alone, _ = train(False, together=together)
    assert all((a == b).all() for a, b in zip(watched, alone))
    gc.collect()
    assert not any(ref() for ref in nodes) and mg.tape._state.watchers == ()
    assert [r["step"] for r in flow.rows if r["layer"] == "Transformer"] == [0, 1, 2, 3]
    matrices = [r for r in flow.rows if r["layer"].endswith("weight") and r["step"] == 3]
    assert matrices and all(0 < r["update_ratio"] < 1 for r in matrices)           # also of the second optimiser's
    assert all(isinstance(x, (int, float, str, list, type(None))) for r in flow.rows for x in r.values())


def test_every_other_step():
    flow, *_ = train(True, every=2)
    assert sorted({r["step"] for r in flow.rows}) == [0, 2]


def test_rows_are_there_as_soon_as_the_step_has_ended():
    model, counts = Two(), []
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with watch(model) as flow:
        assert "no step has ended" in str(flow)
        for _ in range(2):
            one_step(model, optimizer, mg.randn(2, 3))
            counts.append(len(flow.rows))
    assert counts == [7, 14] and len(flow.rows) == 14


def test_an_update_by_hand_ends_a_step_with_flow_step():
    model = Two()
    with watch(model) as flow:
        for _ in range(2):
            model.zero_grad()
            model(mg.ones(1, 3)).sum().backward()
            for p in model.parameters():
                p.data -= 0.1 * p.grad.numpy()
            flow.step()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        one_step(model, optimizer, mg.ones(1, 3))
        flow.step()                                      # it has ended already
    assert sorted({r["step"] for r in flow.rows}) == [0, 1, 2]
    assert all(row(flow, "b.bias", step)["update_ratio"] > 0 for step in range(3))


def test_another_models_optimiser_ends_no_step():
    model, other = Two(), Two()
    mine, others = (optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    with watch(model) as flow:
        one_step(other, others, mg.ones(1, 3))
        assert not flow.rows
        one_step(model, mine, mg.ones(1, 3))
    assert {r["step"] for r in flow.rows} == {0} and len(flow.rows) == 7


def test_bad_training_is_named_in_plain_words():
    """Ten sigmoid layers with weights of 0.01: each divides the gradient by hundreds. A rate of 1e3 replaces the
    weights, one of 1e-9 leaves them; a bias of -100 kills every relu; a parameter of infinity."""
    def shown(model, lr, x=None):
        with watch(model) as flow, np.errstate(all="ignore"):
            one_step(model, optim.SGD(model.parameters(), lr=lr), mg.ones(2, 3) if x is None else x)
        return str(flow)

    deep = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(3, 3), F.sigmoid)])
    for p in deep.parameters():
        p.copy_(p.numpy() * 0.01)
    assert "vanishing gradient" in shown(deep, 0.1)
    steep = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)])
    for p in steep.parameters():
        p.copy_(p.numpy() * 100.0)
    assert "exploding gradient" in shown(steep, 0.1, mg.ones(2, 3) * 1e-6)
    assert "large update" in shown(Two(), 1e3) and "small update" in shown(Two(), 1e-9)
    dead = Two()
    dead.a.bias.copy_(-100.0)
    text = shown(dead, 0.01)
    assert "100 % of the units are dead" in text and "no gradient arrives" in text
    broken = Two()
    broken.b.bias.copy_(math.inf)
    assert "not finite" in shown(broken, 0.01)
    healthy = Two()
    healthy.a.bias.copy_(1.0)
    assert shown(healthy, 1e-3).startswith("step 0: 0 of 7 layers with a warning")


def test_plot_writes_a_picture(tmp_path):
    """With several steps and with one, with numbers that are all alike, all zero or missing."""
    or_skip("matplotlib", "the picture of watch")
    model = Two()
    with watch(model) as flow:
        for _ in range(3):
            one_step(model, optim.SGD(model.parameters(), lr=0.1), mg.ones(1, 3))
    flow.plot(tmp_path / "flow.png")
    model.b.weight.copy_(0.0)
    model.b.bias.copy_(0.0)
    with watch(model) as still:
        one_step(model, optim.SGD(model.parameters(), lr=0.0), mg.ones(1, 3))
    still.plot(tmp_path / "still.png")
    with watch(model) as nothing:
        pass
    nothing.plot(tmp_path / "nothing.png")
    for name in ("flow", "still", "nothing"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_on_the_stand_in_the_numbers_are_the_cpus(monkeypatch):
    """No array of the host meets one of the device; nothing waits but the making of rows."""
    fakecupy.install(monkeypatch)
    rows = []
    for device in ("cpu", "cuda"):
        mg.manual_seed(1)
        model = nn.Transformer(vocab_size=9, context=5, d_model=8, n_layers=1, n_heads=2, n_kv_heads=1, mlp="relu")
        model.to(device)
        optimizer, ids = optim.AdamW(model.parameters(), lr=1e-2), np.random.default_rng(0).integers(0, 9, (3, 6))
        with watch(model) as flow:
            with fakecupy.no_sync():
                model.loss(ids[:, :-1], ids[:, 1:]).backward()
                optimizer.step()
        rows.append([[v for k, v in r.items() if isinstance(v, float)] for r in flow.rows])
    fakecupy.syncs.clear()
    for a, b in zip(*rows):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_bad_calls_are_named():
    with pytest.raises(TypeError, match=r"\[watch\] watches a Module"):
        watch(3)
    with pytest.raises(ValueError, match=r"\[watch\] every"):
        watch(Two(), every=0)
