"""The attention kernels against A.10.1 to A.10.9 written out line by line in float64."""

import contextlib
import gc
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigrad.backend import threads
from minigrad.kernels.numpy import attention

KERNELS = ["fused", "tiled"]
PLAIN = dict(scale=0.3, query_offset=None, causal=False, window=None, softcap=None, kv_head=None,
             dropout=None)


# --- the reference ----------------------------------------------------------------------------


def one_head(q, k, v, seen, bias, sink, kept, ct, scale, softcap):
    """One head of one sample: o, lse, and the gradients of q, k, v, bias and sink for ct."""
    S = scale * q @ k.T  # A.10.1
    slope = np.ones_like(S)
    if softcap:
        slope = 1 - np.tanh(S / softcap) ** 2
        S = softcap * np.tanh(S / softcap)
    S = S + bias
    seen = seen & (bias > -np.inf)
    A, A_sink, lse = np.zeros_like(S), np.zeros(len(q)), np.full(len(q), -np.inf)
    for i in range(len(q)):
        if not seen[i].any() and sink is None:
            continue  # A.10.2 is undefined: a row of zeros
        m = max([*S[i, seen[i]], *([] if sink is None else [sink])])
        E = np.exp(S[i, seen[i]] - m)
        E_sink = 0.0 if sink is None else np.exp(sink - m)
        A[i, seen[i]] = E / (E.sum() + E_sink)  # A.10.2
        A_sink[i] = E_sink / (E.sum() + E_sink)
        lse[i] = m + np.log(E.sum() + E_sink)
    o = (A * kept) @ v  # A.10.3
    G_V = (A * kept).T @ ct  # A.10.5
    G_A = (ct @ v.T) * kept  # A.10.6
    c = (A * G_A).sum(1, keepdims=True)
    G_S = np.where(seen, A * (G_A - c), 0)  # A.10.7
    G_sink = -(A_sink * c[:, 0]).sum()
    G_bias = G_S
    G_S = G_S * slope
    return o, lse, scale * G_S @ k, scale * G_S.T @ q, G_V, G_bias, G_sink  # A.10.8, A.10.9


def visible(T, S, query_offset, causal, window):
    at, j = np.arange(T)[:, None] + (query_offset or 0), np.arange(S)
    seen = np.ones((T, S), bool)
    if causal:
        seen &= j <= at
    if window:
        seen &= (j > at - window) if causal else (abs(at - j) < window)
    return seen


def unbroadcast(x, shape):
    x = x.sum(tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1)
    return x.sum(axes, keepdims=True).reshape(shape)


def reference(ct, q, k, v, mask, bias, sinks, *, scale, query_offset, causal, window, softcap,
              kv_head, dropout):
    """o, lse and the five gradients, in float64."""
    flat = q.ndim == 2
    arrays = [np.asarray(x, np.float64) for x in (q, k, v)]
    q4, k4, v4 = (x[None] if flat else x for x in arrays)
    lead = np.broadcast_shapes(q4.shape[:-3], k4.shape[:-3], v4.shape[:-3])
    q4, k4, v4 = (np.broadcast_to(x, lead + x.shape[-3:]) for x in (q4, k4, v4))
    (Hq, T), S = q4.shape[-3:-1], k4.shape[-2]
    scores = (*lead, Hq, T, S)
    seen = np.broadcast_to(True if mask is None else mask, scores)
    seen = seen & visible(T, S, query_offset, causal, window)
    plus = np.broadcast_to(0.0 if bias is None else np.float64(bias), scores)
    ct4 = np.asarray(ct, np.float64).reshape(*lead, Hq, T, v4.shape[-1])
    o, lse = np.zeros(ct4.shape), np.zeros(scores[:-1])
    G_q, G_k, G_v = np.zeros(q4.shape), np.zeros(k4.shape), np.zeros(v4.shape)
    G_b, G_s = np.zeros(scores), np.zeros(Hq)
    for number, n in enumerate(np.ndindex(lead)):
        for r in range(Hq):
            g = r if kv_head is None else kv_head[r]
            kept = np.ones((T, S))
            if dropout:
                p, bits = dropout
                row = (number * Hq + r) * T
                kept = (bits(row, row + T, 0, S, S) >= p * 2**32) / (1 - p)
            sink = None if sinks is None else float(sinks[r])
            a = one_head(q4[n][r], k4[n][g], v4[n][g], seen[n][r], plus[n][r], sink, kept,
                         ct4[n][r], scale, softcap)
            o[n][r], lse[n][r], G_q[n][r] = a[:3]
            G_k[n][g] += a[3]
            G_v[n][g] += a[4]
            G_b[n][r] = a[5]
            G_s[r] += a[6]
    head = () if flat else (Hq,)
    grads = [unbroadcast(G, x.shape) for G, x in zip((G_q, G_k, G_v), (q, k, v), strict=True)]
    grads.append(None if bias is None else unbroadcast(G_b, np.shape(bias)))
    grads.append(None if sinks is None else G_s)
    return o.reshape(*lead, *head, T, v.shape[-1]), lse.reshape(*lead, *head, T), grads


# --- running a kernel -------------------------------------------------------------------------


def run(kernel, ct, arrays, params, need_bias=None):
    o, residuals = getattr(attention, kernel)(*arrays, **params)
    need_bias = arrays[4] is not None if need_bias is None else need_bias
    backward = getattr(attention, kernel + "_backward")
    kept = {"fused": 4, "tiled": 1}[kernel]
    assert len(residuals) == kept
    return o, residuals[0], backward(ct, *arrays, o, *residuals, need_bias=need_bias, **params)


@contextlib.contextmanager
def small_blocks(rows=3, keys=4, slab=400):
    """Blocks so small that small problems are cut up, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(ROWS=rows, TILE_ROWS=rows, KEYS=keys, SLAB_BYTES=slab).items():
            patch.setattr(attention, name, value)
        yield


@contextlib.contextmanager
def num_threads(n):
    before = threads.get_num_threads()
    threads.set_num_threads(n)
    try:
        yield
    finally:
        threads.set_num_threads(before)


def check(kernel, ct, arrays, params, rtol=1e-9, atol=1e-10):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copies = [None if x is None else x.copy() for x in arrays]
        o, lse, grads = run(kernel, ct, arrays, params)
    for x, copy in zip(arrays, copies, strict=True):
        assert x is None or np.array_equal(x, copy, equal_nan=True)  # inputs are never written
    o_ref, lse_ref, grads_ref = reference(ct, *arrays, **params)
    assert o.shape == o_ref.shape and o.dtype == arrays[0].dtype
    np.testing.assert_allclose(o, o_ref, rtol, atol)
    np.testing.assert_allclose(lse, lse_ref, rtol, atol)
    names = "q k v bias sinks".split()
    for x, G, G_ref, name in zip([*arrays[:3], *arrays[4:]], grads, grads_ref, names, strict=True):
        if x is None:
            assert G is None
        else:
            assert G.shape == x.shape and G.dtype == x.dtype, name
            np.testing.assert_allclose(G, G_ref, rtol, atol, err_msg=name)


def bits(low_row, high_row, low_col, high_col, S):
    """A hash of (row, col): the same words however the scores are cut."""
    rows, cols = np.arange(low_row, high_row)[:, None], np.arange(low_col, high_col)
    x = ((rows * S + cols) * 2654435761 % 2**32).astype(np.uint32)
    x ^= x >> np.uint32(15)
    return x * np.uint32(2246822519)


@st.composite
def problems(draw):
    lead = draw(st.sampled_from([(), (1,), (2,), (2, 3)]))
    flat = lead == () and draw(st.booleans())
    Hkv, kv_head = draw(st.sampled_from(
        [(1, None), (2, None), (3, None), (2, [0, 0, 1, 1]), (1, [0, 0, 0]), (2, [1, 0]),
         (3, [0, 2, 0, 2]), (2, [0, 1, 1])])) if not flat else (1, None)
    Hq = Hkv if kv_head is None else len(kv_head)
    T, S = draw(st.sampled_from([0, 1, 2, 5, 7, 9])), draw(st.sampled_from([0, 1, 3, 6, 9, 10]))
    D, Dv = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))

    def shared(shape):  # some axes of length 1, or missing
        cut = draw(st.integers(0, len(shape)))
        return tuple(n if draw(st.booleans()) else 1 for n in shape)[cut:]

    def some_lead():
        return draw(st.sampled_from([lead, lead[1:], (1,) * len(lead)]))

    def heads(lead, H, rows, width):
        return rng.standard_normal((rows, width) if flat else (*lead, H, rows, width))

    q = heads(lead, Hq, T, D)
    k, v = heads(some_lead(), Hkv, S, D), heads(some_lead(), Hkv, S, Dv)
    scores = (T, S) if flat else (*lead, Hq, T, S)
    mask = rng.random(shared(scores)) < 0.6 if draw(st.booleans()) else None
    bias = None
    if draw(st.booleans()):
        bias = np.asarray(rng.standard_normal(shared(scores)))
        bias = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias)
    sinks = rng.standard_normal(Hq) if draw(st.booleans()) else None
    params = dict(
        scale=draw(st.sampled_from([0.5, 1.7])), query_offset=draw(st.sampled_from([None, 2, -3])),
        causal=draw(st.booleans()), window=draw(st.sampled_from([None, 1, 3])),
        softcap=draw(st.sampled_from([None, 1.5])), kv_head=kv_head,
        dropout=draw(st.sampled_from([None, (0.3, bits)])))
    ct = rng.standard_normal((*q.shape[:-1], Dv))
    return ct, (q, k, v, mask, bias, sinks), params


# --- agreement --------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=250, deadline=None, derandomize=True)
@given(problem=problems())
def test_every_option_in_small_blocks(kernel, problem):
    with small_blocks():
        check(kernel, *problem)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(problem=problems(), n=st.sampled_from([1, 2]), slab=st.sampled_from([1, 3000, 1 << 20]))
def test_every_option_in_large_blocks_and_threads(kernel, problem, n, slab):
    with small_blocks(rows=128, keys=512, slab=slab), num_threads(n):
        check(kernel, *problem)


@pytest.mark.parametrize("kernel", KERNELS)
def test_central_differences(kernel):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 4, 5, 3)), *rng.standard_normal((2, 2, 2, 6, 3))
    bias, sinks = rng.standard_normal((4, 5, 6)), rng.standard_normal(4)
    arrays = [q, k, v, rng.random((5, 6)) < 0.7, bias, sinks]
    params = dict(scale=0.6, query_offset=1, causal=True, window=4, softcap=2.0,
                  kv_head=[0, 0, 1, 1], dropout=(0.2, bits))
    ct = rng.standard_normal(q.shape)
    with small_blocks():
        grads = run(kernel, ct, arrays, params)[2]
        for place, G in zip((0, 1, 2, 4, 5), grads, strict=True):
            u, moved = rng.standard_normal(arrays[place].shape), []
            for step in (1e-5, -1e-5):
                other = list(arrays)
                other[place] = arrays[place] + step * u
                moved.append((ct * getattr(attention, kernel)(*other, **params)[0]).sum())
            assert (G * u).sum() == pytest.approx((moved[0] - moved[1]) / 2e-5, rel=1e-7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(2, 3, 70, 16), (1, 2, 1100, 64), (12, 2, 33, 8)])
@pytest.mark.parametrize("case", ["plain", "causal", "bool", "float", "gqa"])
def test_torch_agrees(kernel, shape, case):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    B, H, T, D = shape
    q, k, v, ct = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
    mask = bias = None
    params = dict(PLAIN, scale=D**-0.5)
    options = dict(scale=D**-0.5)
    if case == "causal":
        params["causal"] = options["is_causal"] = True
    if case == "bool":
        mask = (rng.random((B, 1, T, T)) < 0.5) | np.eye(T, dtype=bool)
        options["attn_mask"] = torch.tensor(mask)
    if case == "float":
        bias = rng.standard_normal((1, H, T, T)).astype(np.float32)
        options["attn_mask"] = torch.tensor(bias, requires_grad=True)
    if case == "gqa":
        k, v = k[:, :1].copy(), v[:, :1].copy()
        params["kv_head"], options["enable_gqa"] = [0] * H, True
    t = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    o_ref = torch.nn.functional.scaled_dot_product_attention(*t, **options)
    wanted = t + ([options["attn_mask"]] if case == "float" else [])
    grads_ref = torch.autograd.grad(o_ref, wanted, torch.tensor(ct))
    with num_threads(1):
        o, _, grads = run(kernel, ct, (q, k, v, mask, bias, None), params)
    np.testing.assert_allclose(o, o_ref.detach().numpy(), 1e-4, 1e-5)
    for G, G_ref in zip(grads, grads_ref, strict=False):
        np.testing.assert_allclose(G, G_ref.numpy(), 1e-3, 3e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype, tol", [
    (np.float16, 5e-3), (np.float32, 1e-5), (np.float64, 1e-12)])
def test_dtypes(kernel, dtype, tol):
    rng = np.random.default_rng(2)
    q, k, v, ct = (rng.standard_normal((2, 2, 40, 8)).astype(dtype) for _ in range(4))
    arrays = (q, k, v, None, rng.standard_normal((40, 40)).astype(dtype), None)
    check(kernel, ct, arrays, dict(PLAIN, causal=True), rtol=tol, atol=tol)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [30, 1e3])
def test_large_scores_do_not_overflow(kernel, size):
    rng = np.random.default_rng(10)
    q, k, v, ct = rng.standard_normal((4, 1, 2, 20, 4))
    with small_blocks():
        o, _, grads = run(kernel, ct, (size * q, k, v, None, None, None), PLAIN)
    o_ref, _, grads_ref = reference(ct, size * q, k, v, None, None, None, **PLAIN)
    np.testing.assert_allclose(o, o_ref, 1e-9)
    for G, G_ref in zip(grads[:3], grads_ref, strict=False):
        np.testing.assert_allclose(G, G_ref, 1e-9, 1e-12 * size)


# --- rows and keys that nothing reaches -------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_rows_are_zero(kernel, sinks):
    rng = np.random.default_rng(3)
    q, k, v, ct = rng.standard_normal((4, 2, 3, 9, 4))
    mask = np.ones((2, 1, 9, 9), bool)
    mask[1, :, 4] = False
    arrays = (q, k, v, mask, None, np.zeros(3) if sinks else None)
    params = dict(PLAIN, causal=True, query_offset=-2)
    with small_blocks():
        check(kernel, ct, arrays, params)
        o, lse, grads = run(kernel, ct, arrays, params)
    empty = np.zeros((2, 3, 9), bool)
    empty[:, :, :2] = empty[1, :, 4] = True
    assert not o[empty].any() and not grads[0][empty].any()
    assert ((lse == (0 if sinks else -np.inf)) == empty).all() or sinks
    if not sinks:
        assert np.array_equal(np.isneginf(lse), empty)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("B, T, S", [(2, 3, 0), (2, 0, 3), (0, 3, 3), (2, 0, 0)])
def test_empty_axes(kernel, B, T, S):
    q, k, v = np.ones((B, 2, T, 3)), np.ones((B, 2, S, 3)), np.ones((B, 2, S, 5))
    for bias, sinks in ((None, None), (np.zeros((2, T, S)), np.ones(2))):
        check(kernel, np.ones((B, 2, T, 5)), (q, k, v, None, bias, sinks), PLAIN)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("how", ["mask", "bias", "causal"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_in_hidden_keys_does_not_leak(kernel, how, garbage):
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 1, 2, 7, 4))
    params = dict(PLAIN, causal=how == "causal")
    seen = np.arange(7) < 5
    mask = seen if how == "mask" else None
    bias = np.where(seen, 0.0, -np.inf) if how == "bias" else None
    clean = getattr(attention, kernel)(q, k, v, mask, bias, None, **params)[0]
    k[..., 5:, 1:3] = garbage
    rows = slice(0, 5 if how == "causal" else 7)
    with small_blocks(), warnings.catch_warnings():
        warnings.simplefilter("error")
        o = getattr(attention, kernel)(q, k, v, mask, bias, None, **params)[0]
    np.testing.assert_allclose(o[..., rows, :], clean[..., rows, :], 1e-12)


# --- memory, layout, order of sums ------------------------------------------------------------


def packed(B, T, H, D, rng):
    qkv = rng.standard_normal((B, T, 3, H, D)).astype(np.float32)
    return [qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_views_in_and_heads_merge_free(kernel):
    rng = np.random.default_rng(5)
    q, k, v = packed(2, 50, 3, 8, rng)
    ct = np.broadcast_to(np.float32(1), (2, 3, 50, 8))
    arrays, params = (q, k, v, None, None, None), dict(PLAIN, causal=True)
    check(kernel, ct, arrays, params, 1e-5, 1e-5)
    o, _, grads = run(kernel, ct, arrays, params)
    for x in (o, *grads[:3]):
        merged = x.transpose(0, 2, 1, 3).reshape(2, 50, 24)
        assert np.shares_memory(merged, x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_change_nothing(kernel):
    rng = np.random.default_rng(6)
    q, k, v = packed(3, 300, 4, 16, rng)
    bias = rng.standard_normal((1, 300, 300)).astype(np.float32)
    arrays = (q, k[:1], v, None, bias, np.zeros(4, np.float32))
    results = []
    for n in (1, 2, 2):
        with num_threads(n), small_blocks(64, 64, 1 << 16):
            o, lse, grads = run(kernel, np.ones_like(q), arrays, dict(PLAIN, causal=True))
        results.append([o, lse, *grads])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_allclose(x, y, 1e-5, 1e-5)
    for x, y in zip(*results[1:], strict=True):
        assert np.array_equal(x, y)


def peak_mib(f):
    gc.collect()
    tracemalloc.start()
    try:
        keep = f()  # noqa: F841  outputs count
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def test_tiled_memory_grows_with_T():
    rng = np.random.default_rng(7)
    params = dict(PLAIN, causal=True)
    q, k, v = packed(1, 8192, 8, 64, rng)
    ct = np.ones_like(q)
    for window in (64, 2048):  # makes it quick; blocks are as large as without
        params["window"] = window
        with num_threads(1):
            peak = peak_mib(lambda: run("tiled", ct, (q, k, v, None, None, None), params))
        assert peak < 100  # 83 of which are o and the gradients


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_heads_are_not_repeated(kernel):
    rng = np.random.default_rng(8)
    T, S, G, D = 2, 20_000, 16, 32
    q = rng.standard_normal((1, G, T, D)).astype(np.float32)
    k, v = rng.standard_normal((2, 1, 1, S, D)).astype(np.float32)  # 2.4 MiB each, 39 repeated
    arrays, params = (q, k, v, None, None, None), dict(PLAIN, kv_head=[0] * G)
    weights = G * T * S * 4 / 2**20
    assert peak_mib(lambda: run(kernel, np.ones_like(q), arrays, params)) < 4 * weights + 15


def test_hidden_tiles_are_skipped(monkeypatch):
    """Packed documents: only the tiles on the diagonal are computed."""
    rng = np.random.default_rng(9)
    q, k, v = packed(1, 64, 1, 4, rng)
    document = np.repeat(np.arange(8), 8)
    mask = document[:, None] == document
    seen = []
    scores = attention.Problem.scores

    def counted(p, b, keys, *args, **kwargs):
        seen.append(keys)
        return scores(p, b, keys, *args, **kwargs)

    monkeypatch.setattr(attention.Problem, "scores", counted)
    with small_blocks(rows=8, keys=8):
        check("tiled", np.ones_like(q), (q, k, v, mask, None, None), PLAIN, 1e-5, 1e-5)
    assert len(seen) == 2 * 8
