"""The second device without a GPU: the op table, layers, optimisers and a training run on a strict stand-in for CuPy.

It shows that no op mixes host and device arrays, uses a name CuPy lacks, or waits for the device inside a training
step. It says nothing of speed, nor of what only a real GPU does."""

import fakecupy
import numpy as np
import pytest

import minigrad as mg
import minigrad.functional as F
from minigrad import nn, optim


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """"cuda" is the stand-in."""
    fakecupy.install(monkeypatch)
    yield
    fakecupy.syncs.clear()


ROWS = [(name, i) for name, op in mg.primitives.items() for i, s in enumerate(op.samples) if s.error is None
        and name != "move"]                              # its parameters are devices: see test_tensors_move


def on(device, name, i):
    """Sample i of an op with its float arrays as Tensors on `device`, and its other arrays there."""
    sample, rng = mg.primitives[name].samples[i], np.random.default_rng(i)
    args = []
    for a in sample.args:
        if isinstance(a, tuple):
            args.append(mg.tensor(rng.uniform(sample.low, sample.high, a), requires_grad=True, device=device))
        else:
            args.append(mg.tensor(a, device=device)._data if isinstance(a, np.ndarray) else a)

    def moved(value):
        if isinstance(value, np.ndarray):
            return mg.tensor(value, device=device)._data
        return tuple(map(moved, value)) if type(value) is tuple else value
    return args, {k: moved(v) for k, v in sample.params.items()}


@pytest.mark.parametrize("name, i", ROWS)
def test_every_op_on_the_stand_in_equals_the_cpu(name, i, monkeypatch):
    """Forward and first-order gradients, for every sample of every op."""
    results = []
    for device in ("cpu", "cuda"):
        args, params = on(device, name, i)
        y = mg.primitives[name](*args, **params)
        assert not isinstance(y, mg.Tensor) or y.device == device
        xs = [a for a in args if isinstance(a, mg.Tensor)]
        cts = []
        if isinstance(y, mg.Tensor) and y.requires_grad:
            grad_y = mg.tensor(np.random.default_rng(9).uniform(-1, 1, y.shape), device=device, dtype=y.dtype)
            cts = mg.gradients(y, xs, grad_y)
            assert all(c.device == device and c.dtype == x.dtype for c, x in zip(cts, xs))
        results.append([mg.Tensor(r).numpy() for r in (y, *cts)])
    for a, b in zip(*results):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)


def test_tensors_move_and_gradients_move_back():
    x = mg.randn(2, 3, requires_grad=True)
    y = x.to("cuda")
    assert (y.device, x.device) == ("cuda", "cpu") and mg.cuda.is_available()
    (y * y).sum().backward()
    assert x.grad.device == "cpu"
    np.testing.assert_allclose(x.grad.numpy(), 2 * x.numpy(), rtol=1e-6)
    assert y.to("cuda") is y and mg.zeros(2, device="cuda").device == "cuda"


def test_mixing_devices_names_op_argument_path_and_the_move_to_write():
    model = nn.Sequential(nn.Linear(3, 3))
    dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"\[linear\].*one device.*0\.weight.*\.to\('cuda'\)"):
        model(mg.zeros(2, 3, device="cuda"))
    with pytest.raises(ValueError, match=r"\[add\].*\.to\('cuda'\)"):
        mg.zeros(2, device="cuda") + np.zeros(2, np.float32)


def test_masks_and_ids_may_stay_numpy():
    x = mg.randn(2, 2, device="cuda")
    assert F.where(np.eye(2, dtype=bool), x, 0.0).device == "cuda"
    assert F.embedding(np.array([0, 1]), x).device == "cuda"
    assert F.scaled_dot_product_attention(x, x, x, np.tril(np.ones((2, 2), bool))).device == "cuda"
    assert F.cross_entropy(x, np.array([0, 1])).device == "cuda"


def test_the_same_seed_gives_the_same_start_and_the_same_dropout():
    drawn = []
    for device in ("cpu", "cuda"):
        mg.manual_seed(5)
        drawn.append([mg.randn(3, device=device).numpy(), F.dropout(mg.ones(64, device=device), 0.5).numpy()])
    assert all((a == b).all() for a, b in zip(*drawn))


SIZES = dict(vocab_size=11, context=6, d_model=8, n_layers=2, n_heads=2)
KINDS = {"gpt2": {}, "llama": dict(norm="rms", position="rope", mlp="swiglu", bias=False, tied=False, n_kv_heads=1),
         "t5": dict(position="t5", sinks=True), "alibi": dict(position="alibi", window=3, logit_softcap=5.0),
         "sinusoidal": dict(position="sinusoidal", block="parallel", softcap=4.0),
         "post": dict(block="post", qk_norm=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_run_equals_the_cpus_and_never_waits(kind):
    """Three steps of a tiny model with dropout: equal losses, and no hidden wait between the ids and the update."""
    ids = np.random.default_rng(0).integers(0, 11, (3, 4, 7))
    losses = {}
    for device in ("cpu", "cuda"):
        mg.manual_seed(1)
        model = nn.Transformer(**SIZES, **KINDS[kind], dropout=0.1).to(device)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        losses[device] = []
        for batch in ids:
            with fakecupy.no_sync():
                loss = model.loss(batch[:, :-1], batch[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optim.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            losses[device].append(loss.item())
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_the_cpus(kind):
    """Through the cache and past the context; prompts of unequal lengths; and an encoder-decoder with its beams."""
    written = {}
    for device in ("cpu", "cuda"):
        mg.manual_seed(2)
        model = nn.Transformer(**SIZES, **KINDS[kind]).to(device)
        texts = [model.generate([[1, 2, 3], [4]], 6, temperature=0)]
        if KINDS[kind].get("block") != "parallel":
            pair = nn.EncoderDecoder(**SIZES, **KINDS[kind]).to(device)
            texts.append(pair.generate([[3, 4, 5], [6]], 4, temperature=0))
            texts.append([tokens for tokens, _ in pair.beam_search([[3, 4, 5], [6]], 4, beams=2)[0]])
        written[device] = [[row.tolist() for row in rows] for rows in texts]
    assert written["cpu"] == written["cuda"]


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, momentum=0.9), optim.Adam, optim.Lion, optim.Muon])
def test_optimisers_stay_on_the_device(make):
    p = nn.Parameter(np.ones((3, 2), np.float32), device="cuda")
    optimizer = make([p])
    for _ in range(2):
        (p * p).sum().backward()
        with fakecupy.no_sync():
            optimizer.step()
    assert p.device == "cuda" and (p.numpy() < 1).all()
