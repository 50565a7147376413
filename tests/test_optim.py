"""Optimisers against PyTorch and their formulas, clipping, schedules, and a state that resumes bit for bit."""

import math

import numpy as np
import pytest

import minigrad as mg
from minigrad import nn, optim
from minigrad.optim import clip_grad_norm_, orthogonalize

SHAPES = [(4, 6), (6,), (3, 2)]


def params_of(rng, dtype=np.float64, shapes=SHAPES):
    return [nn.Parameter(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def set_grads(params, step, scale=1.0):
    """Gradients that depend on the step and on nothing else."""
    rng = np.random.default_rng((7, step))
    for p in params:
        p.grad = mg.tensor((scale * rng.normal(size=p.shape)).astype(p.dtype))


def bits(params):
    return [p.numpy().tobytes() for p in params]


# --- fifty steps against PyTorch --------------------------------------------------------------------------------------

# ours, theirs, settings
AGAINST = {
    "sgd": ("SGD", "SGD", dict(lr=0.1)),
    "sgd decay": ("SGD", "SGD", dict(lr=0.1, weight_decay=0.3)),
    "sgd momentum": ("SGD", "SGD", dict(lr=0.1, momentum=0.9, weight_decay=0.1)),
    "sgd nesterov": ("SGD", "SGD", dict(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1)),
    "adam": ("Adam", "Adam", dict(lr=0.05)),
    "adam L2": ("Adam", "Adam", dict(lr=0.05, betas=(0.7, 0.95), eps=1e-3, weight_decay=0.3)),
    "adamw": ("AdamW", "AdamW", dict(lr=0.05)),  # also: the default weight decay is 0.01
    "adamw set": ("AdamW", "AdamW", dict(lr=0.05, betas=(0.7, 0.95), eps=1e-3, weight_decay=0.3)),
}


@pytest.mark.parametrize("dtype, tol", [(np.float64, 1e-13), (np.float32, 2e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize("ours, theirs, settings", AGAINST.values(), ids=AGAINST)
def test_fifty_steps_as_torch(torch, rng, ours, theirs, settings, dtype, tol):
    """The learning rate changes on the way and one gradient is missing at times. float32: some 50 roundings of
    6e-8 in values of up to about 5."""
    params = params_of(rng, dtype)
    others = [torch.nn.Parameter(torch.from_numpy(p.numpy())) for p in params]
    optimizer, other = getattr(optim, ours)(params, **settings), getattr(torch.optim, theirs)(others, **settings)
    for step in range(50):
        set_grads(params, step)
        if step % 5 == 3:
            params[1].grad = None
        for p, q in zip(params, others):
            q.grad = None if p.grad is None else torch.from_numpy(p.grad.numpy())
        for group in (optimizer.param_groups[0], other.param_groups[0]):
            group["lr"] = settings["lr"] * (1.0 - step / 60)
        optimizer.step()
        other.step()
    for p, q in zip(params, others):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=tol, atol=tol)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (16, 16)])
def test_muon_as_torch(torch, rng, shape, nesterov):
    """PyTorch stores (out, in), so weight and gradient are transposed. It runs Newton-Schulz in bfloat16, whose 8 bits
    are off by up to 2^-9 at each of its 15 products: a percent or so of an entry that moves by lr = 0.02 a step, 20
    times. Over 48 such runs the largest difference was 0.0027; a wrong factor or momentum moves entries by far more."""
    p, settings = (
        nn.Parameter(rng.normal(size=shape).astype(np.float32)),
        dict(lr=0.02, weight_decay=0.1, nesterov=nesterov),
    )
    start = p.numpy()
    q = torch.nn.Parameter(torch.from_numpy(p.numpy().T.copy()))
    optimizer, other = optim.Muon([p], **settings), torch.optim.Muon([q], **settings)
    for step in range(20):
        set_grads([p], step)
        q.grad = torch.from_numpy(p.grad.numpy().T.copy())
        optimizer.step()
        other.step()
    assert np.abs(p.numpy() - q.detach().numpy().T).max() < 0.006
    assert np.abs(p.numpy() - start).max() > 0.1


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (8, 8)])
def test_fifty_steps_of_muon_as_torch_in_float64(torch, monkeypatch, rng, shape, nesterov):
    """PyTorch's own code with its cast to bfloat16 made a copy: what is left to differ is rounding."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    p, settings = nn.Parameter(rng.normal(size=shape)), dict(lr=0.02, weight_decay=0.1, nesterov=nesterov)
    start = p.numpy()
    q = torch.nn.Parameter(torch.from_numpy(p.numpy().T.copy()))
    optimizer, other = optim.Muon([p], **settings), torch.optim.Muon([q], **settings)
    for step in range(50):
        set_grads([p], step)
        q.grad = torch.from_numpy(p.grad.numpy().T.copy())
        for group in (optimizer.param_groups[0], other.param_groups[0]):
            group["lr"] = 0.02 * (1.0 - step / 60)
        optimizer.step()
        other.step()
    np.testing.assert_allclose(p.numpy(), q.detach().numpy().T, rtol=0, atol=1e-13)
    assert np.abs(p.numpy() - start).max() > 0.1


@pytest.mark.parametrize("ours, theirs, settings", AGAINST.values(), ids=AGAINST)
def test_a_model_trains_for_fifty_steps_as_its_copy_in_torch(torch, rng, ours, theirs, settings):
    """All parts together in float64: embedding, norm, MLP, head, cross-entropy with smoothing and ignored targets,
    gradients clipped, a warm-up: every loss and norm on the way, and every weight at the end."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.LayerNorm(6), nn.MLP(6), nn.RMSNorm(6), nn.Linear(6, 9)).to(mg.float64)
    copy = torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 24), torch.nn.GELU(),
                               torch.nn.Linear(24, 6), torch.nn.RMSNorm(6, eps=1e-6), torch.nn.Linear(6, 9)).double()
    pairs = list(zip(model.parameters(), (q if q.ndim < 2 or q is copy[0].weight else q.T  # linears are stored turned
                                          for q in copy.parameters()), strict=True))
    for p, q in pairs:
        q.data.copy_(torch.from_numpy(p.numpy()))
    optimizer, other = getattr(optim, ours)(model.parameters(), **settings), getattr(torch.optim, theirs)(
        copy.parameters(), **settings)
    for step in range(50):
        ids, targets = rng.integers(0, 9, (2, 16))
        targets[step % 16] = -100
        for group in (optimizer.param_groups[0], other.param_groups[0]):
            group["lr"] = settings["lr"] * min(1.0, (step + 1) / 10)
        loss = mg.functional.cross_entropy(model(ids), targets, label_smoothing=0.1)
        loss_ = torch.nn.functional.cross_entropy(copy(torch.from_numpy(ids)), torch.from_numpy(targets),
                                                  label_smoothing=0.1)
        optimizer.zero_grad()
        other.zero_grad()
        loss.backward()
        loss_.backward()
        norm, norm_ = clip_grad_norm_(model.parameters(), 0.5), torch.nn.utils.clip_grad_norm_(copy.parameters(), 0.5)
        assert loss.item() == pytest.approx(loss_.item(), rel=1e-12)
        assert float(norm) == pytest.approx(float(norm_), rel=1e-11)
        optimizer.step()
        other.step()
    for p, q in pairs:
        np.testing.assert_allclose(p.numpy(), q.detach().numpy(), rtol=0, atol=1e-12)


def test_muon_is_its_formula(rng):
    """In float64 against the formula, the polynomial of Newton-Schulz applied to the singular values."""
    p = nn.Parameter(rng.normal(size=(3, 5)))
    w, b = p.numpy(), np.zeros((3, 5))
    optimizer = optim.Muon([p], lr=0.1, weight_decay=0.2, momentum=0.9)
    for step in range(10):
        set_grads([p], step)
        g = p.grad.numpy()
        b = 0.9 * b + 0.1 * g
        u, s, vt = np.linalg.svd(0.1 * g + 0.9 * b, full_matrices=False)
        s = s / np.sqrt((s**2).sum())
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = w * (1 - 0.1 * 0.2) - 0.1 * math.sqrt(5 / 3) * (u * s) @ vt
        optimizer.step()
    np.testing.assert_allclose(p.numpy(), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (5, 20), (20, 5), (1, 7)])
def test_orthogonalize_brings_singular_values_near_one(rng, shape):
    """Singular values spread over a factor of 100 come out in (0.5, 1.5), most near 1; the singular vectors stay."""
    n = min(shape)
    u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    start = np.geomspace(100.0, 1.0, n)
    x = orthogonalize((u * start) @ vt)
    diagonal = u.T @ x @ vt.T
    assert np.abs(diagonal - np.diag(np.diag(diagonal))).max() < 1e-10
    assert (np.diag(diagonal) > 0.5).all() and (np.diag(diagonal) < 1.5).all()
    assert (orthogonalize(np.zeros(shape)) == 0.0).all()  # no NaN from 0 / 0


def test_lion_is_its_formula(rng):
    p = nn.Parameter(rng.normal(size=(4, 6)))
    w, m = p.numpy(), np.zeros((4, 6))
    optimizer = optim.Lion([p], lr=0.01, betas=(0.8, 0.95), weight_decay=0.3)
    for step in range(50):
        set_grads([p], step)
        g = p.grad.numpy()
        w = w * (1 - 0.01 * 0.3) - 0.01 * np.sign(0.8 * m + 0.2 * g)
        m = 0.95 * m + 0.05 * g
        optimizer.step()
    np.testing.assert_allclose(p.numpy(), w, rtol=0, atol=1e-13)
    assert optimizer.param_groups[0]["lr"] == 0.01 and optim.Lion([p]).param_groups[0]["betas"] == (0.9, 0.99)


@pytest.mark.parametrize("dtype, tol", [(np.float64, 1e-14), (np.float32, 1e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_adam_kernel_equals_the_plain_formula(rng, kind, dtype, tol):
    """The kernel makes one pass over blocks; `composed` runs the formula as written. 300 x 400 spans several."""
    start = rng.normal(size=(300, 400)).astype(dtype)
    ends = []
    for plain in (False, True):
        p = nn.Parameter(start)
        optimizer = getattr(optim, kind)([p], lr=0.01, weight_decay=0.1)
        for step in range(5):
            set_grads([p], step)
            if plain:
                with mg.composed():
                    optimizer.step()
            else:
                optimizer.step()
        ends.append(p.numpy())
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=tol)
    assert np.abs(ends[0] - start).max() > 0.01


def test_parameters_that_are_not_contiguous_are_updated_in_place(rng):
    start = rng.normal(size=(4, 6))
    p, q = nn.Parameter(start), nn.Parameter(start)
    q._data = np.asfortranarray(q._data)
    for params in ([p], [q]):
        optimizer = optim.AdamW(params, lr=0.1)
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
    np.testing.assert_allclose(q.numpy(), p.numpy(), rtol=0, atol=1e-14)
    assert (p.numpy() != start).all()


def test_scalars_and_empty_parameters_are_updated(rng):
    params = params_of(rng, np.float64, [(), (0, 3)])
    start = params[0].item()
    for make in (optim.SGD, optim.AdamW, optim.Lion):
        set_grads(params, 0)
        make(params, lr=0.1).step()
    assert params[0].item() != start and params[0].shape == ()


# --- groups and settings ----------------------------------------------------------------------------------------------


def test_groups_have_their_own_settings(rng):
    a, b = params_of(rng, shapes=[(3,), (3,)])
    start = a.numpy(), b.numpy()
    optimizer = optim.SGD([{"params": [a], "lr": 0.5}, {"params": b}], lr=0.1)  # a single Tensor is a list of one
    set_grads([a, b], 0)
    optimizer.step()
    np.testing.assert_allclose(a.numpy(), start[0] - 0.5 * a.grad.numpy(), rtol=1e-15)
    np.testing.assert_allclose(b.numpy(), start[1] - 0.1 * b.grad.numpy(), rtol=1e-15)
    optimizer.param_groups[1]["lr"] = 0.0  # set between steps
    before = b.numpy()
    optimizer.step()
    assert (b.numpy() == before).all() and (a.numpy() != start[0]).all()


def test_momentum_of_one_group_alone(torch, rng):
    a, b = params_of(rng, shapes=[(3,), (3,)])
    q, r = (torch.nn.Parameter(torch.from_numpy(p.numpy())) for p in (a, b))
    ours = optim.SGD([{"params": [a], "momentum": 0.9, "nesterov": True}, {"params": [b]}], lr=0.1)
    theirs = torch.optim.SGD([{"params": [q], "momentum": 0.9, "nesterov": True}, {"params": [r]}], lr=0.1)
    for step in range(5):
        set_grads([a, b], step)
        q.grad, r.grad = torch.from_numpy(a.grad.numpy()), torch.from_numpy(b.grad.numpy())
        ours.step()
        theirs.step()
    np.testing.assert_allclose(a.numpy(), q.detach().numpy(), rtol=1e-13)
    np.testing.assert_allclose(b.numpy(), r.detach().numpy(), rtol=1e-13)


def test_parameters_without_a_gradient_are_passed_over(rng):
    params = params_of(rng)
    before = bits(params)
    optimizer = optim.AdamW(params, lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert bits(params) == before and not optimizer.state  # not even decay
    set_grads(params[:1], 0)
    optimizer.step()
    assert bits(params)[0] != before[0] and bits(params)[1:] == before[1:]
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


LEAF = nn.Parameter(np.ones(2, np.float32))
MATRIX = nn.Parameter(np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.SGD([]), r"\[SGD\] there are no parameters"),
        (lambda: optim.SGD([{"params": []}]), r"\[SGD\] there are no parameters"),
        (lambda: optim.AdamW([LEAF, LEAF]), r"\[AdamW\].*shape \(2,\) is given twice"),
        (lambda: optim.AdamW([{"params": [LEAF]}, {"params": [LEAF]}]), r"given twice"),
        (lambda: optim.AdamW([LEAF * 2.0]), r"\[AdamW\] optimises leaf Tensors"),
        (lambda: optim.AdamW([np.ones(2)]), r"\[AdamW\] optimises leaf Tensors.*\(2,\) float64"),
        (
            lambda: optim.AdamW([{"params": [LEAF], "momentum": 0.9}]),
            r"\[AdamW\] a group has params and .*betas.*got momentum",
        ),
        (lambda: optim.AdamW([{"lr": 0.1}]), r'\[AdamW\] a group is a dict with "params"'),
        (
            lambda: optim.AdamW([{"params": [LEAF]}, MATRIX]),
            r'\[AdamW\] a group is a dict with "params": got \(2, 2\) float32',
        ),
        (lambda: optim.AdamW([LEAF], lr=-0.1), r"\[AdamW\] lr is at least 0: got -0.1"),
        (lambda: optim.AdamW([LEAF], lr=math.nan), r"\[AdamW\] lr is at least 0: got nan"),
        (lambda: optim.AdamW([LEAF], lr="a"), r"\[AdamW\] lr is at least 0: got 'a'"),
        (lambda: optim.SGD([LEAF], lr=None), r"\[SGD\] lr is at least 0: got None"),
        (lambda: optim.SGD([LEAF], lr=math.inf), r"\[SGD\] lr is at least 0: got inf"),
        (lambda: optim.AdamW([LEAF], betas=(0.9,)), r"\[AdamW\] two betas are in \[0, 1\): got \(0.9,\)"),
        (lambda: optim.Lion([LEAF], betas=None), r"\[Lion\] two betas are in \[0, 1\): got None"),
        (lambda: optim.Muon([MATRIX], ns_steps=2.5), r"\[Muon\] ns_steps is an integer of at least 0: got 2.5"),
        (lambda: optim.AdamW([LEAF], weight_decay=-1.0), r"weight_decay is at least 0"),
        (lambda: optim.AdamW([LEAF], eps=-1e-8), r"eps is at least 0"),
        (lambda: optim.AdamW([LEAF], betas=(0.9, 1.0)), r"betas are in \[0, 1\): got \(0.9, 1.0\)"),
        (lambda: optim.AdamW([{"params": [LEAF], "lr": -1.0}]), r"lr is at least 0: got -1.0"),
        (lambda: optim.SGD([LEAF], momentum=-0.5), r"momentum is at least 0"),
        (lambda: optim.SGD([LEAF], nesterov=True), r"\[SGD\] nesterov needs a momentum"),
        (lambda: optim.SGD([{"params": [LEAF], "nesterov": True}]), r"\[SGD\] nesterov needs a momentum"),
        (lambda: optim.Muon([MATRIX, LEAF]), r"\[Muon\].*AdamW: got a parameter of shape \(2,\)"),
        (lambda: clip_grad_norm_([LEAF], -1.0), r"\[clip_grad_norm_\] max_norm is at least 0: got -1.0"),
        (lambda: optim.cosine_schedule(0.1, 10, warmup=11), r"\[schedule\].*warmup <= steps"),
        (lambda: optim.linear_schedule(0.1, 10, min_lr=0.2), r"\[schedule\].*min_lr <= lr"),
    ],
)
def test_invalid_settings_say_what_is_wrong(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


# --- a step and the tape ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW, optim.Lion, optim.Muon], ids=lambda m: m.__name__)
def test_a_step_under_a_live_graph_is_reported_by_its_backward(rng, make):
    """The graph kept W; after the step its gradient would be that of the new W: an error, not a wrong number."""
    w = nn.Parameter(rng.normal(size=(3, 3)))
    x = mg.tensor(rng.normal(size=(2, 3)), requires_grad=True)
    stale = (x @ w).sum()
    w.grad = mg.ones_like(w)
    before = w.numpy()
    make([w], lr=0.1).step()
    assert (w.numpy() != before).all()
    with pytest.raises(RuntimeError, match=r"\[matmul\].*written in place"):
        stale.backward()
    assert x.grad is None
    (x @ w).sum().backward()  # a new graph is fine
    np.testing.assert_allclose(x.grad.numpy(), np.ones((2, 3)) @ w.numpy().T, rtol=1e-14)


def test_a_step_under_a_live_graph_through_a_view_is_reported(rng):
    w = nn.Parameter(rng.normal(size=(3, 3)))
    x = mg.tensor(rng.normal(size=(2, 3)), requires_grad=True)
    stale = (x @ w.T[:, :2]).sum()  # what the graph kept is a view of w
    w.grad = mg.ones_like(w)
    optim.SGD([w], lr=0.1).step()
    with pytest.raises(RuntimeError, match="written in place"):
        stale.backward()


def test_a_step_writes_where_the_user_holds_the_raw_array(rng):
    """`p.data` taken earlier is the same memory; while a graph needs it the optimiser may write, the user not."""
    w = nn.Parameter(rng.normal(size=(3, 3)))
    raw = w.data
    live = (w * w).sum()
    w.grad = mg.ones_like(w)
    optim.SGD([w], lr=0.5).step()
    assert (raw == w.numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 0.0
    del live
    raw[0] = 0.0
    assert (w.numpy()[0] == 0.0).all()


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tol", [(np.float64, 1e-13), (np.float32, 1e-6)], ids=["float64", "float32"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0, math.inf, math.nan], ids=["above", "below", "zero", "inf", "nan"])
def test_clip_grad_norm_as_torch(torch, rng, scale, dtype, tol):
    params = params_of(rng, dtype, [(40, 300), (6,), ()])
    set_grads(params, 0, 1.0 if math.isinf(scale) else scale)
    if math.isinf(scale):
        params[1].grad = mg.tensor(np.array([math.inf, 1, 1, 1, 1, 1], dtype))
    params.append(nn.Parameter(np.ones(2, dtype)))  # has no gradient
    before = [p.grad.numpy() for p in params[:3]]
    others = [torch.nn.Parameter(torch.from_numpy(p.numpy())) for p in params]
    for p, q in zip(params[:3], others):
        q.grad = torch.from_numpy(p.grad.numpy())
    norm = clip_grad_norm_(iter(params), 1.0)
    np.testing.assert_allclose(norm.item(), torch.nn.utils.clip_grad_norm_(others, 1.0).item(), rtol=10 * tol)
    assert norm.dtype == dtype and norm.shape == ()
    for p, q in zip(params[:3], others):
        np.testing.assert_allclose(p.grad.numpy(), q.grad.numpy(), rtol=10 * tol)
    if scale == 1e-3:  # a norm of 0.1, below the limit: not a bit changes
        assert [b.tobytes() for b in before] == [p.grad.numpy().tobytes() for p in params[:3]]


def test_clip_grad_norm_takes_one_tensor_and_none():
    p = nn.Parameter(np.zeros(2))
    assert clip_grad_norm_([p], 1.0).item() == 0.0 and clip_grad_norm_([], 1.0).item() == 0.0
    p.grad = mg.tensor(np.array([3.0, 4.0]))
    assert clip_grad_norm_(p, 1.0).item() == 5.0  # 3, 4, 5
    np.testing.assert_allclose(p.grad.numpy(), [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_grad_norm_may_refuse_what_is_not_finite(bad):
    p = nn.Parameter(np.zeros(2))
    p.grad = mg.tensor(np.array([bad, 1.0]))
    with pytest.raises(FloatingPointError, match=rf"norm of the gradients is {bad}"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert p.grad.tolist()[1] == 1.0  # nothing scaled


# --- schedules ------------------------------------------------------------------------------------------------------


def test_cosine_schedule_is_nanogpts():
    """get_lr of nanoGPT's train.py, with the settings of its CPU configuration."""
    lr, min_lr, warmup, steps = 1e-3, 1e-4, 100, 2000

    def get_lr(it):
        if it < warmup:
            return lr * (it + 1) / (warmup + 1)
        if it > steps:
            return min_lr
        coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup) / (steps - warmup)))
        return min_lr + coeff * (lr - min_lr)

    schedule = optim.cosine_schedule(lr, steps, warmup, min_lr)
    for it in (0, 1, 50, 99, 100, 101, 1000, 1050, 1999, 2000, 2001, 5000):
        assert schedule(it) == pytest.approx(get_lr(it), rel=1e-14)
    assert schedule(0) == pytest.approx(lr / 101)  # the first step is not lost on a rate of 0
    assert schedule(100) == lr
    assert schedule(1050) == pytest.approx((lr + min_lr) / 2)  # half way
    assert schedule(2000) == pytest.approx(min_lr)


def test_linear_and_constant_schedules():
    linear = optim.linear_schedule(1.0, 110, warmup=10, min_lr=0.2)
    assert [linear(s) for s in (0, 9, 10, 60, 110, 500)] == pytest.approx([1 / 11, 10 / 11, 1.0, 0.6, 0.2, 0.2])
    constant = optim.constant_schedule(0.5, warmup=4)
    assert [constant(s) for s in (0, 3, 4, 1000)] == pytest.approx([0.1, 0.4, 0.5, 0.5])
    assert optim.constant_schedule(0.5)(0) == 0.5
    assert [optim.cosine_schedule(1.0, 0)(s) for s in (0, 5)] == [1.0, 0.0]  # no steps: no division by 0


# --- state ------------------------------------------------------------------------------------------------------------

EVERY = {
    "sgd": (optim.SGD, dict(lr=0.1)),
    "momentum": (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True)),
    "adam": (optim.Adam, dict(lr=0.01, weight_decay=0.1)),
    "adamw": (optim.AdamW, dict(lr=0.01, betas=(0.8, 0.9))),
    "lion": (optim.Lion, dict(lr=0.01)),
    "muon": (optim.Muon, dict(lr=0.01, ns_steps=3)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make, settings", EVERY.values(), ids=EVERY)
def test_a_state_through_a_file_resumes_bit_for_bit(rng, tmp_path, make, settings, dtype):
    """Ten steps, against five, a file, a new optimiser with other settings, and five more."""
    shapes = [(4, 6), (3, 2), (2, 2)]
    whole = params_of(np.random.default_rng(1), dtype, shapes)
    parts = params_of(np.random.default_rng(1), dtype, shapes)
    one, first = make(whole, **settings), make(parts, **settings)
    for step in range(10):
        for params, optimizer in ((whole, one), (parts, first)):
            set_grads(params, step)
            params[2].grad = None  # one parameter has no state
            optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            if step < 5 or optimizer is one:
                optimizer.step()
    mg.save(tmp_path / "o.safetensors", first.state_dict())
    second = make(parts, **{**settings, "lr": 123.0, "weight_decay": 0.77})
    second.load_state_dict(mg.load(tmp_path / "o.safetensors"))
    assert second.param_groups[0] == first.param_groups[0]
    assert {k: type(v) for k, v in second.param_groups[0].items()} == {
        k: type(v) for k, v in first.param_groups[0].items()
    }
    assert set(second.state) == {0, 1}
    for step in range(5, 10):
        set_grads(parts, step)
        parts[2].grad = None
        second.param_groups[0]["lr"] = 0.01 * (step + 1)
        second.step()
    assert bits(parts) == bits(whole)
    a, b = one.state_dict(), second.state_dict()
    assert a.keys() == b.keys() and all(a[k].numpy().tobytes() == b[k].numpy().tobytes() for k in a)


def test_a_loaded_state_is_a_copy(rng):
    params = params_of(rng)
    one, other = optim.AdamW(params), optim.AdamW(params)
    set_grads(params, 0)
    one.step()
    other.load_state_dict(one.state_dict())
    kept = other.state[0]["exp_avg"].copy()
    one.step()
    assert (other.state[0]["exp_avg"] == kept).all()


def test_betas_given_as_a_list_come_back(rng):
    params = params_of(rng)
    optimizer = optim.AdamW([{"params": params, "betas": [0.8, 0.9]}])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_a_state_that_does_not_fit_changes_nothing_and_names_it_all(rng):
    params = params_of(rng)
    optimizer = optim.AdamW(params, lr=0.25)
    set_grads(params, 0)
    optimizer.step()
    before = {name: x.numpy().copy() for name, x in optimizer.state_dict().items()}
    state = dict(optimizer.state_dict())
    del state["group.0.lr"], state["state.1.exp_avg"]
    state |= {
        "state.0.exp_avg_sq": mg.zeros(6, 4),
        "state.2.momentum_buffer": mg.zeros(3, 2),
        "state.9.step": mg.tensor(3),
        "group.4.lr": mg.tensor(0.1),
        "group.0.betas": mg.tensor([0.1, 0.2, 0.3]),
        "group.0.params": mg.tensor(0),
        "state.2.step": mg.tensor([1, 2]),
        "nonsense": mg.zeros(1),
        "group.0.eps": mg.zeros(0),
    }
    with pytest.raises(ValueError, match=r"\[load_state_dict\].*AdamW") as error:
        optimizer.load_state_dict(state)
    for part in (
        "missing group.0.lr",
        "missing state.1.exp_avg",
        "misshapen state.0.exp_avg_sq: (6, 4) for (4, 6)",
        "unknown state.2.momentum_buffer",
        "unknown state.9.step",
        "unknown group.4.lr",
        "misshapen group.0.betas: (3,) for (2,)",
        "unknown group.0.params",
        "misshapen state.2.step",
        "unknown nonsense",
        "misshapen group.0.eps",
    ):
        assert part in str(error.value)
    after = optimizer.state_dict()
    assert after.keys() == before.keys() and all(after[k].numpy().tobytes() == before[k].tobytes() for k in before)
    with pytest.raises(ValueError, match="momentum_buffer"):
        optim.SGD(params, momentum=0.9).load_state_dict(before)  # another optimiser's state


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"group.0.lr": np.array(math.nan)}, r"lr is at least 0: got nan"),
        ({"group.0.lr": np.array("abc")}, r"lr is at least 0: got 'abc'"),
        ({"group.0.betas": np.array([0.9, 1.5])}, r"betas are in \[0, 1\): got \(0.9, 1.5\)"),
        ({"group.0.betas": np.array([0.9])}, r"misshapen group.0.betas: \(1,\) for \(2,\)"),
        ({"state.1.step": np.array(-1)}, r"state.1.step counts steps: got -1"),
        ({"state.1.step": np.array(1.5)}, r"state.1.step counts steps: got 1.5"),
        ({"state.1.step": np.array("x")}, r"state.1.step counts steps: got 'x'"),
        ({"state.1.exp_avg": np.zeros(6, complex)}, r"state.1.exp_avg holds no real numbers"),
        ({"state.1.exp_avg": np.zeros(6, "V4")}, r"state.1.exp_avg holds no real numbers"),
    ],
)
@pytest.mark.parametrize("together", [False, True])
def test_a_state_that_cannot_be_meant_changes_nothing(rng, changed, message, together):
    params = params_of(rng)
    one = optim.AdamW(params, lr=0.25)
    set_grads(params, 0)
    one.step()
    optimizer, prefix = (optim.Together(one), "0.") if together else (one, "")
    before = {name: x.numpy() for name, x in optimizer.state_dict().items()}
    state = {**before, f"{prefix}state.0.exp_avg": np.ones((4, 6))}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({**state, **{prefix + name: value for name, value in changed.items()}})
    after = optimizer.state_dict()
    assert after.keys() == before.keys() and all(after[k].numpy().tobytes() == before[k].tobytes() for k in before)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_muon_takes_an_empty_matrix(shape):
    p = nn.Parameter(np.zeros(shape))
    p.grad = mg.tensor(np.zeros(shape))
    optim.Muon([p]).step()
    assert p.shape == shape
