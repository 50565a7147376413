"""The NumPy kernels against the plain formula in float64, and against PyTorch."""

import itertools
import math
import os
import threading

import numpy as np
import pytest

from minigrad.backend import threads
from minigrad.kernels.numpy import activation, embedding, loss, norm, optimizer, softmax

# Largest error allowed, in units of the largest value: float64 and float32 as promised; float16
# is computed in float32, so what remains is the rounding of inputs kept and of the output.
BOUND = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-3}
DTYPES = list(BOUND)
# empty, single, one row, odd widths, more rows than a block holds, a row longer than LONGEST_DOT
SHAPES = [(0, 5), (1, 1), (1, 33), (7, 65), (3, 5, 8), (3001, 400), (2, 10007)]


pytestmark = pytest.mark.filterwarnings("error")  # no kernel warns on legal input


@pytest.fixture(autouse=True)
def threads_restored():
    before = threads.get_num_threads()
    yield
    threads.set_num_threads(before)


def draw(*shape, dtype="float64", seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def wide(*arrays):
    """The same numbers in float64, so that rounding of the inputs does not count as error."""
    return [None if a is None else a.astype(np.float64) for a in arrays]


def close(got, want, like, factor=1.0):
    """Equal within BOUND of the largest value, and of the dtype of ``like``."""
    want = np.asarray(want)
    assert got.dtype == like.dtype
    assert got.shape == want.shape
    scale = max(1.0, np.abs(want).max(initial=0.0))
    error = np.abs(got.astype(np.float64) - want).max(initial=0.0)
    assert error <= factor * BOUND[like.dtype.name] * scale, (error, scale)


# ---- the plain formulas, in float64

def plain_softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True, initial=-1e300))
    return e / e.sum(axis=axis, keepdims=True)


def plain_layer_norm(x, w, b, eps):
    mean = x.mean(axis=-1, keepdims=True)
    xhat = (x - mean) / np.sqrt(((x - mean) ** 2).mean(axis=-1, keepdims=True) + eps)
    return xhat * (1 if w is None else w) + (0 if b is None else b)


def plain_rms_norm(x, w, eps):
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return y * (1 if w is None else w)


def plain_erf(x):
    return np.array([math.erf(v) for v in x.ravel().tolist()]).reshape(x.shape)


def plain_gelu(x, approximate):
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + plain_erf(x / math.sqrt(2)))


def plain_silu(x):
    return x / (1 + np.exp(-x))


def plain_cross_entropy(x, targets, ignore_index, smoothing):
    q = np.full(x.shape, smoothing / max(1, x.shape[1]))
    kept = np.flatnonzero(targets != ignore_index)
    q[kept, targets[kept]] += 1 - smoothing
    m = x.max(axis=1, keepdims=True)
    log_p = x - m - np.log(np.exp(x - m).sum(axis=1, keepdims=True))
    return np.where(targets == ignore_index, 0, -(q * log_p).sum(axis=1))


def slope(f, x, ct, h=1e-6):
    """ct times the derivative of an elementwise f, by central differences in float64."""
    return ct * (f(x + h) - f(x - h)) / (2 * h)


# ---- softmax

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_and_log_softmax(shape, dtype):
    x, ct = draw(*shape, dtype=dtype, scale=3), draw(*shape, dtype=dtype, seed=1)
    x64, ct64 = wide(x, ct)
    for axis in range(-len(shape), len(shape)):
        if shape[axis] == 0:  # the maximum of nothing is asked for nowhere: there is no row
            assert softmax.softmax(x, axis).shape == shape
            continue
        y64 = plain_softmax(x64, axis)
        close(softmax.softmax(x, axis), y64, x)
        y = y64.astype(dtype)
        (y64,) = wide(y)
        want = y64 * (ct64 - (ct64 * y64).sum(axis=axis, keepdims=True))
        close(softmax.softmax_backward(ct, y, axis), want, x)

        log64 = np.log(plain_softmax(x64, axis))
        close(softmax.log_softmax(x, axis), log64, x)
        log = log64.astype(dtype)
        (log64,) = wide(log)
        want = ct64 - np.exp(log64) * ct64.sum(axis=axis, keepdims=True)
        close(softmax.log_softmax_backward(ct, log, axis), want, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_extreme_logits_is_one_hot_and_finite(dtype):
    # 1e4 apart: exp underflows to exactly 0, and log_softmax is the plain difference
    x = np.array([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype)
    np.testing.assert_array_equal(softmax.softmax(x, -1)[0], [1, 0, 0])
    close(softmax.softmax(x, -1)[1], [1 / 3] * 3, x)
    close(softmax.log_softmax(x, -1)[0], [0, -2e4, -1e4], x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_shape", [(2, 3, 5, 6), (5, 6), (2, 1, 1, 6), (3, 5, 1), (1,), ()])
def test_masked_softmax_equals_softmax_of_minus_infinity(mask_shape, dtype):
    scores = draw(2, 3, 5, 6, dtype=dtype)
    visible = np.random.default_rng(1).random(mask_shape) < 0.6
    full = np.broadcast_to(visible, scores.shape)
    for axis in range(4):
        e = np.where(full, np.exp(wide(scores)[0]), 0)
        s = e.sum(axis=axis, keepdims=True)
        y = softmax.masked_softmax(scores, visible, axis)
        close(y, e / np.where(s == 0, 1, s), scores)
        assert not y[~full].any()  # exactly 0
    close(softmax.masked_softmax(scores, None, -1), plain_softmax(wide(scores)[0]), scores)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_softmax_never_looks_at_hidden_scores(dtype):
    inf, nan = np.inf, np.nan
    scores = np.array([[nan, 1, 1], [inf, -inf, 1], [nan, inf, 5], [-inf, -inf, 7]], dtype)
    visible = np.array([[0, 1, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0]], bool)
    # hidden NaN; hidden inf and visible -inf; a row that sees nothing; one that sees only -inf
    want = [[0, 0.5, 0.5], [0, 0, 1], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_array_equal(softmax.masked_softmax(scores, visible, -1), want)
    # a visible +inf or NaN must show
    assert np.isnan(softmax.masked_softmax(scores[:3], None, -1)).any(axis=1).all()


def test_one_mask_serves_all_heads_without_being_repeated():
    scores, visible = draw(4, 8, 40, 40, dtype="float32"), np.tri(40, dtype=bool)
    np.testing.assert_array_equal(
        softmax.masked_softmax(scores, visible, -1),
        softmax.masked_softmax(scores, np.broadcast_to(visible, scores.shape), -1))


# ---- norms

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_weight, with_bias", [(1, 1), (1, 0), (0, 1), (0, 0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm(shape, with_weight, with_bias, dtype):
    x, ct = draw(*shape, dtype=dtype) + np.dtype(dtype).type(2), draw(*shape, dtype=dtype, seed=1)
    w = draw(shape[-1], dtype=dtype, seed=2) if with_weight else None
    b = draw(shape[-1], dtype=dtype, seed=3) if with_bias else None
    x64, ct64, w64, b64 = wide(x, ct, w, b)
    y, mean, rstd = norm.layer_norm(x, w, b, 1e-5)
    close(y, plain_layer_norm(x64, w64, b64, 1e-5), x)
    assert mean.shape == rstd.shape == shape[:-1] + (1,)

    ct_x, ct_w, ct_b = norm.layer_norm_backward(ct, x, w, b, mean, rstd)
    rstd64 = 1 / np.sqrt(x64.var(axis=-1, keepdims=True) + 1e-5)
    xhat = (x64 - x64.mean(axis=-1, keepdims=True)) * rstd64
    g = ct64 * (1 if w is None else w64)
    want = rstd64 * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    close(ct_x, want, x)
    lead = tuple(range(len(shape) - 1))
    assert (ct_w is None, ct_b is None) == (w is None, b is None)
    if w is not None:
        close(ct_w, (ct64 * xhat).sum(axis=lead), x)
    if b is not None:
        close(ct_b, ct64.sum(axis=lead), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, with_weight, dtype):
    x, ct = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    w = draw(shape[-1], dtype=dtype, seed=2) if with_weight else None
    x64, ct64, w64 = wide(x, ct, w)
    y, rstd = norm.rms_norm(x, w, 1e-6)
    close(y, plain_rms_norm(x64, w64, 1e-6), x)

    ct_x, ct_w = norm.rms_norm_backward(ct, x, w, rstd)
    rstd64 = 1 / np.sqrt((x64 * x64).mean(axis=-1, keepdims=True) + 1e-6)
    xhat, g = x64 * rstd64, ct64 * (1 if w is None else w64)
    close(ct_x, rstd64 * (g - xhat * (g * xhat).mean(axis=-1, keepdims=True)), x)
    if w is None:
        assert ct_w is None
    else:
        close(ct_w, (ct64 * xhat).sum(axis=tuple(range(len(shape) - 1))), x)


def test_variance_of_values_far_from_zero_does_not_cancel():
    # E[x^2] - E[x]^2 would lose all 24 bits here; x - mean is exact, so y is that of small x.
    small = np.arange(64, dtype=np.float32).reshape(1, 64)
    far = norm.layer_norm(small + np.float32(2**18), None, None, 1e-5)[0]
    close(far, plain_layer_norm(*wide(small), None, None, 1e-5), far)


# ---- activations

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 65), (3, 5, 8), (700_001,)])
@pytest.mark.parametrize("name", ["none", "tanh", "silu"])
def test_activations(name, shape, dtype):
    x, ct = np.asarray(draw(*shape, scale=3)).astype(dtype), np.asarray(draw(*shape)).astype(dtype)
    x64, ct64 = wide(x, ct)

    def plain(x):
        return plain_silu(x) if name == "silu" else plain_gelu(x, name)

    y = activation.silu(x) if name == "silu" else activation.gelu(x, name)
    close(y, plain(x64), x)
    if name == "silu":
        ct_x = activation.silu_backward(ct, x)
    else:
        ct_x = activation.gelu_backward(ct, x, name)
    # the differences themselves are good to 1e-8
    close(ct_x, slope(plain, x64, ct64), x, factor=1e5 if dtype == "float64" else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_far_out_are_the_identity_or_zero(dtype):
    x, one = np.array([1e4, -1e4], dtype), np.ones(2, dtype)
    for y in (activation.gelu(x, "none"), activation.gelu(x, "tanh"), activation.silu(x)):
        np.testing.assert_array_equal(y, [x[0], 0])
    for ct_x in (activation.gelu_backward(one, x, "none"), activation.gelu_backward(one, x, "tanh"),
                 activation.silu_backward(one, x)):
        np.testing.assert_array_equal(ct_x, [1, 0])


def relative_error_of_erf(x):
    want = plain_erf(x.astype(np.float64))
    return np.abs((activation.erf(x).astype(np.float64) - want) / want).max()


def test_erf_to_the_last_bits():
    # all scales, both signs, and closely around the seams of the formulas, at 1 and near 3.64
    ends = (-300, 1.4)
    x = np.concatenate([np.logspace(*ends, 5000), np.linspace(0.01, 7, 20_001), 1 + np.arange(
        -200, 200) * 1e-14, np.linspace(3.6, 3.7, 2001)])
    x = np.concatenate([x, -x])
    assert relative_error_of_erf(x) < 1e-15
    x = x.astype(np.float32)
    assert relative_error_of_erf(x[np.abs(x) > 1e-37]) < 3 * 2**-23  # 3 units in the last place
    for dtype in DTYPES:
        y = activation.erf(np.array([0, np.inf, -np.inf, np.nan, 30, -30], dtype))
        np.testing.assert_array_equal(y, [0, 1, -1, np.nan, 1, -1])


# ---- loss

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 65), (3001, 400), (3, 10007)])
def test_cross_entropy(shape, smoothing, dtype):
    logits, ct = draw(*shape, dtype=dtype, scale=3), draw(shape[0], dtype=dtype, seed=1)
    targets = np.random.default_rng(2).integers(0, shape[1], shape[0])
    targets[::3] = -100
    x64, ct64 = wide(logits, ct)
    losses, lse = loss.cross_entropy(logits, targets, -100, smoothing)
    close(losses, plain_cross_entropy(x64, targets, -100, smoothing), logits)
    np.testing.assert_allclose(lse, np.log(np.exp(x64).sum(axis=1)), rtol=1e-6)

    kept = np.flatnonzero(targets != -100)
    q = np.full(shape, smoothing / shape[1])
    q[kept, targets[kept]] += 1 - smoothing
    want = np.where(targets == -100, 0, ct64)[:, None] * (plain_softmax(x64) - q)
    got = loss.cross_entropy_backward(ct, logits, targets, lse, -100, smoothing)
    close(got, want, logits)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_cross_entropy_of_large_logits_keeps_its_digits(dtype):
    # near 1e4 a float32 log-sum-exp alone would be wrong in the third digit of loss and softmax
    logits = np.array([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4 - 2]], dtype)
    targets, one = np.array([1, 2]), np.ones(2, dtype)
    losses, lse = loss.cross_entropy(logits, targets, -100, 0.0)
    want = plain_cross_entropy(wide(logits)[0], targets, -100, 0.0)
    np.testing.assert_allclose(losses, want, rtol=2e-6)
    ct_logits = loss.cross_entropy_backward(one, logits, targets, lse, -100, 0.0)
    want = plain_softmax(wide(logits)[0]) - np.eye(3)[targets]
    # lse itself, a float64 near 1e4, is only good to 1e-12
    close(ct_logits, want, logits, factor=100 if dtype == "float64" else 1)


def test_cross_entropy_of_an_ignored_row_of_nan_is_zero():
    logits = np.array([[np.nan, 1], [0, 0]], np.float32)
    targets = np.array([7, 1])  # 7 is the ignore_index, although out of range
    losses, lse = loss.cross_entropy(logits, targets, 7, 0.0)
    np.testing.assert_allclose(losses, [0, math.log(2)], rtol=1e-6)
    ct = loss.cross_entropy_backward(np.ones(2, np.float32), logits, targets, lse, 7, 0.0)
    np.testing.assert_allclose(ct, [[0, 0], [0.5, -0.5]], rtol=1e-6)


# ---- embedding

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, n, width", [(0, 3, 4), (1, 1, 1), (500, 7, 3), (300, 70_000, 5),
                                             (3000, 65, 300), (4, 4, 0)])
def test_embedding_backward(count, n, width, dtype):
    ct = draw(count, width, dtype=dtype)
    ids = np.random.default_rng(1).integers(0, n, count)
    want = np.zeros((n, width))
    np.add.at(want, ids, wide(ct)[0])
    close(embedding.embedding_backward(ct, ids, n), want, ct)
    close(embedding.embedding_backward(ct, ids.astype(np.int32), n), want, ct)


def test_embedding_backward_of_one_id_alone():
    ct = np.ones((5000, 2), np.float32)
    table = embedding.embedding_backward(ct, np.full(5000, 3), 5)
    np.testing.assert_array_equal(table, np.eye(5)[3][:, None] * [5000, 5000])


# ---- optimizer

@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("decay, decoupled", [(0.0, True), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("size", [0, 1, 700_001])
def test_adamw_follows_torch(size, decay, decoupled, dtype):
    torch = pytest.importorskip("torch")
    p, m, v = draw(size, dtype=dtype), np.zeros(size, dtype), np.zeros(size, dtype)
    q = torch.nn.Parameter(torch.tensor(p))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind([q], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    for step in range(1, 5):
        g = draw(size, dtype=dtype, seed=step)
        q.grad = torch.tensor(g) * 0.5  # gradient clipping multiplies the gradient first
        theirs.step()
        optimizer.adamw(p, g, m, v, 1e-2, 0.8, 0.95, 1e-6, decay, step, 0.5, decoupled)
        np.testing.assert_array_equal(g, draw(size, dtype=dtype, seed=step))
    close(p, q.detach().numpy().astype(np.float64), p)
    if size:
        close(v, theirs.state[q]["exp_avg_sq"].numpy().astype(np.float64), p)


def test_adamw_updates_half_precision_and_views_in_place():
    p = draw(10, dtype="float16")
    before, g = p.copy(), np.ones(10, np.float16)
    m, v = np.zeros(10, np.float32), np.zeros(10, np.float32)
    optimizer.adamw(p, g, m, v, 0.1, 0.9, 0.999, 1e-8, 0.0, 1)
    np.testing.assert_allclose(p, before - 0.1, atol=2e-3)  # the first step is lr sign(g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (5, 7), (4096,), (1_000_003,)])
def test_sum_of_squares(shape, dtype):
    g = draw(*shape, dtype=dtype)
    got, want = optimizer.sum_of_squares(g), float((wide(g)[0] ** 2).sum())
    assert isinstance(got, float)
    assert got == pytest.approx(want, rel=1e-13 if dtype == "float64" else 2e-7)


# ---- all kernels

def every_kernel(dtype="float32", view=lambda a: a, rows=3001, width=130):
    """{name: result or tuple of results} of every kernel, inputs passed through ``view``."""
    x, ct = view(draw(rows, width, dtype=dtype)), view(draw(rows, width, dtype=dtype, seed=1))
    w = view(draw(width, dtype=dtype, seed=2))
    ids = view(np.random.default_rng(3).integers(0, width, rows))
    visible = view(np.random.default_rng(4).random((rows, width)) < 0.5)
    _, mean, rstd = norm.layer_norm(x, w, w, 1e-5)
    _, rms = norm.rms_norm(x, w, 1e-5)
    lse = loss.cross_entropy(x, ids, 5, 0.1)[1]
    state = [draw(rows * width, dtype=dtype, scale=scale) for scale in (1, 1, 0, 0)]
    optimizer.adamw(*state, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1)
    return {
        "softmax": softmax.softmax(x, -1),
        "softmax axis 0": softmax.softmax(x, 0),
        "softmax_backward": softmax.softmax_backward(ct, x, -1),
        "log_softmax": softmax.log_softmax(x, -1),
        "log_softmax_backward": softmax.log_softmax_backward(ct, x, -1),
        "masked_softmax": softmax.masked_softmax(x, visible, -1),
        "layer_norm": norm.layer_norm(x, w, w, 1e-5),
        "layer_norm_backward": norm.layer_norm_backward(ct, x, w, w, mean, rstd),
        "rms_norm": norm.rms_norm(x, w, 1e-5),
        "rms_norm_backward": norm.rms_norm_backward(ct, x, w, rms),
        "gelu": activation.gelu(x, "none"),
        "gelu_backward": activation.gelu_backward(ct, x, "none"),
        "gelu tanh": activation.gelu(x, "tanh"),
        "gelu_backward tanh": activation.gelu_backward(ct, x, "tanh"),
        "silu": activation.silu(x),
        "silu_backward": activation.silu_backward(ct, x),
        "erf": activation.erf(x),
        "cross_entropy": loss.cross_entropy(x, ids, 5, 0.1),
        "cross_entropy_backward": loss.cross_entropy_backward(ct[:, 0], x, ids, lse, 5, 0.1),
        "embedding_backward": embedding.embedding_backward(ct, ids, width),
        "adamw": tuple(state),
        "sum_of_squares": np.array(optimizer.sum_of_squares(x)),
    }


def pairs(a, b):
    """(name, array of a, array of b) of two results of `every_kernel`."""
    for name in a:
        one, two = (r[name] if isinstance(r[name], tuple) else (r[name],) for r in (a, b))
        yield from zip(itertools.repeat(name), one, two, strict=False)


def test_results_do_not_depend_on_the_number_of_threads():
    # stronger than "within rounding": the blocks are the same, only who runs them differs
    threads.set_num_threads(1)
    one = every_kernel()
    for n in (2, 2, 5):  # twice with 2: a repeat is equal bit for bit
        threads.set_num_threads(n)
        for name, a, b in pairs(one, every_kernel()):
            np.testing.assert_array_equal(a, b, err_msg=name)


def strided(a):
    """The same values, none of them next to each other in memory, and read-only."""
    spread = np.zeros(tuple(2 * n for n in a.shape), a.dtype)
    spread[(slice(None, None, 2),) * a.ndim] = a
    view = spread[(slice(None, None, 2),) * a.ndim]
    view.flags.writeable = False
    return view


def transposed(a):
    return np.asfortranarray(a)


@pytest.mark.parametrize("view", [strided, transposed])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides_do_and_inputs_are_not_written(view, dtype):
    plain = every_kernel(dtype, rows=300, width=33)
    for name, a, b in pairs(plain, every_kernel(dtype, view, rows=300, width=33)):
        close(b, wide(a)[0], a)  # NumPy sums strided rows in another order
        assert a.dtype == b.dtype, name


def test_kernels_agree_with_torch():
    torch = pytest.importorskip("torch")
    nn = torch.nn.functional
    x, ct = draw(300, 65, dtype="float32"), draw(300, 65, dtype="float32", seed=1)
    w, b = draw(65, dtype="float32", seed=2), draw(65, dtype="float32", seed=3)
    ids = np.random.default_rng(3).integers(0, 65, 300)
    tx, tw, tb = (torch.tensor(a, requires_grad=True) for a in (x, w, b))
    tids = torch.tensor(ids)

    def check(y, ours, *leaves, given=ct):
        grads = torch.autograd.grad(y, leaves, torch.tensor(given))
        for theirs, mine in zip((y.detach(), *grads), ours, strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=2e-5, atol=1e-5)

    y = softmax.softmax(x, -1)
    check(nn.softmax(tx, -1), (y, softmax.softmax_backward(ct, y, -1)), tx)
    y = softmax.log_softmax(x, 0)
    check(nn.log_softmax(tx, 0), (y, softmax.log_softmax_backward(ct, y, 0)), tx)
    y, mean, rstd = norm.layer_norm(x, w, b, 1e-5)
    check(nn.layer_norm(tx, (65,), tw, tb),
          (y, *norm.layer_norm_backward(ct, x, w, b, mean, rstd)), tx, tw, tb)
    y, rstd = norm.rms_norm(x, w, 1e-6)
    check(nn.rms_norm(tx, (65,), tw, 1e-6), (y, *norm.rms_norm_backward(ct, x, w, rstd)), tx, tw)
    for form in ("none", "tanh"):
        check(nn.gelu(tx, approximate=form),
              (activation.gelu(x, form), activation.gelu_backward(ct, x, form)), tx)
    check(nn.silu(tx), (activation.silu(x), activation.silu_backward(ct, x)), tx)
    check(torch.erf(tx), (activation.erf(x),
                          ct * 2 / math.sqrt(math.pi) * np.exp(-x.astype(float) ** 2)), tx)
    for smoothing in (0.0, 0.1):
        y, lse = loss.cross_entropy(x, ids, 3, smoothing)
        check(nn.cross_entropy(tx, tids, ignore_index=3, label_smoothing=smoothing,
                               reduction="none"),
              (y, loss.cross_entropy_backward(ct[:, 0], x, ids, lse, 3, smoothing)),
              tx, given=ct[:, 0])
    table = torch.zeros(65, 65, requires_grad=True)
    check(nn.embedding(tids, table),
          (np.zeros((300, 65)), embedding.embedding_backward(ct, ids, 65)), table)


# ---- threads

BIG = threads.BLOCK_BYTES  # as the bytes of a row: every row is a block of its own


@pytest.mark.parametrize("n", [1, 3])
def test_for_rows_covers_every_row_once_and_lists_results_in_order(n):
    threads.set_num_threads(n)
    for rows, row_bytes in itertools.product((0, 1, 2, 7, 1000), (0, 1, BIG // 3, BIG, 10 * BIG)):
        blocks = threads.for_rows(lambda lo, hi: (lo, hi), rows, row_bytes)
        assert [r for lo, hi in blocks for r in range(lo, hi)] == list(range(rows))
        assert all(hi > lo for lo, hi in blocks)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_in_a_body_reaches_the_caller_and_the_next_loop_works(n, error):
    threads.set_num_threads(n)

    def body(lo, hi):
        if lo == 5:
            raise error("row 5")
        return lo

    with pytest.raises(error, match="row 5"):
        threads.for_rows(body, 20, BIG)
    assert threads.for_rows(lambda lo, hi: lo, 20, BIG) == list(range(20))


def test_more_than_one_thread_takes_part():
    threads.set_num_threads(2)
    both = threading.Barrier(2, timeout=60)  # each of two blocks waits until the other has begun
    names = threads.for_rows(lambda lo, hi: (both.wait(), threading.get_ident())[1], 2, BIG)
    assert len(set(names)) == 2


def test_a_nested_loop_runs_in_its_own_thread():
    threads.set_num_threads(2)

    def outer(lo, hi):
        me = threading.get_ident()
        inner = threads.for_rows(lambda lo, hi: threading.get_ident(), 4, BIG)
        return inner == [me] * 4

    assert all(threads.for_rows(outer, 8, BIG))


def test_loops_from_several_threads_at_once_do_not_wait_for_each_other():
    threads.set_num_threads(4)
    x = draw(4000, 400, dtype="float32")
    want, got = softmax.softmax(x, -1), {}
    users = [threading.Thread(target=lambda i=i: got.update({i: softmax.softmax(x, -1)}))
             for i in range(6)]
    for user in users:
        user.start()
    for user in users:
        user.join(60)
    assert len(got) == 6 and all(np.array_equal(y, want) for y in got.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    threads.set_num_threads(2)
    threads.for_rows(lambda lo, hi: None, 8, BIG)  # the parent's threads exist now
    child = os.fork()
    if child == 0:  # the child must not return into pytest
        good = threads.for_rows(lambda lo, hi: lo, 8, BIG) == list(range(8))
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", None, True])
def test_a_thread_count_must_be_a_positive_integer(n):
    before = threads.get_num_threads()
    with pytest.raises(ValueError, match="set_num_threads"):
        threads.set_num_threads(n)
    assert threads.get_num_threads() == before


def test_the_thread_count_is_set_and_reaches_blas():
    threads.set_num_threads(np.int64(2))
    assert threads.get_num_threads() == 2
    threads.set_num_threads(1)  # also BLAS: no exception is all that can be seen from here
    assert threads.get_num_threads() == 1


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelus_slope_stays_finite_far_out(approximate):
    """Where Phi is 0 or 1 the slope is too, however large x^3 is: 1e15^3 overflows float32 on the way."""
    x = np.array([-1e18, -1e15, -1e5, 1e5, 1e15, 1e18], np.float32)
    with np.errstate(over="ignore"):
        assert (activation.gelu_backward(np.ones_like(x), x, approximate) == [0, 0, 0, 1, 1, 1]).all()
