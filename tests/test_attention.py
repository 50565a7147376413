"""The public attention and masked softmax: Appendix A.10 as properties, its three implementations as one function,
PyTorch as an oracle, and what is refused."""

import itertools
import math
import warnings

import numpy as np
import pytest
from conftest import kernels
from hypothesis import given, settings
from hypothesis import strategies as st

import minigrad as mg
import minigrad.functional as F

WAYS = ["composed", "fused", "tiled"]
attend = F.scaled_dot_product_attention
every_way = pytest.mark.parametrize("way", WAYS)
every_dtype = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)


def budget(n):
    return settings(max_examples=n, deadline=None, derandomize=True, database=None)


def leaf(x, dtype=np.float64):
    return mg.tensor(np.asarray(x, dtype), requires_grad=True)


def problem(rng, lead=(2,), heads=2, shared=None, t=4, s=4, d=3, dv=2, dtype=np.float64):
    """Leaves q, k, v."""
    shapes = (*lead, heads, t, d), (*lead, shared or heads, s, d), (*lead, shared or heads, s, dv)
    return [leaf(rng.standard_normal(shape), dtype) for shape in shapes]


def close(got, want, tol=1e-11):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=tol, atol=tol)


# --------------------------------------------------------------------------- three implementations of one function


@st.composite
def problems(draw):
    """Arrays and options of any attention problem the signature allows, small."""
    t, s = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    heads, shared = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 2)]))
    lead = draw(st.sampled_from([(), (2,), (2, 1)]))
    d, dv = draw(st.sampled_from([(3, 3), (2, 4), (1, 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    arrays = {name: rng.standard_normal((*lead, h, n, w))
              for name, h, n, w in (("q", heads, t, d), ("k", shared, s, d), ("v", shared, s, dv))}
    options = {"is_causal": draw(st.booleans()), "window": draw(st.sampled_from([None, 1, 2, 3])),
               "query_offset": draw(st.integers(-2, 4)), "softcap": draw(st.sampled_from([None, 1.5])),
               "scale": draw(st.sampled_from([None, 0.7])), "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.4]))}
    if heads != shared:
        if draw(st.booleans()):
            options["enable_gqa"] = True
        else:
            options["kv_head"] = [int(g) for g in rng.integers(0, shared, heads)]
    full = (*lead, heads, t, s)
    shape = draw(st.sampled_from([full, (t, s), (heads, 1, s), (1, 1, t, s)[-len(full):], (*full[:-2], t, 1), (s,)]))
    kind = draw(st.sampled_from(["none", "bool", "float", "float with -inf"]))
    if kind == "bool":
        options["attn_mask"] = rng.random(shape) < 0.6
    elif kind != "none":
        arrays["attn_mask"] = rng.standard_normal(shape)
        if kind == "float with -inf":
            arrays["attn_mask"][rng.random(shape) < 0.3] = -np.inf
    if draw(st.booleans()):
        arrays["sinks"] = rng.standard_normal(heads)
    return arrays, options


def solve(arrays, options, way, order):
    """Output, first and (with order 2) second gradients of every array."""
    mg.manual_seed(5)                                    # the same dropout for each
    xs = {name: leaf(a) for name, a in arrays.items()}
    y = attend(**xs, **options, empty_rows="zeros", implementation=way)
    numbers = np.random.default_rng(1)
    cts = mg.gradients(y, list(xs.values()), numbers.standard_normal(y.shape), create_graph=order == 2)
    results = [y.numpy(), *(ct.numpy() for ct in cts)]
    if order == 2:
        s = sum((ct * numbers.standard_normal(ct.shape)).sum() for ct in cts)
        results += [g.numpy() for g in mg.gradients(s, list(xs.values()))] if s.requires_grad else []
    return results


@given(problems())
@budget(120)
def test_implementations_agree(given):
    """Outputs and all gradients of composed, fused and tiled; never NaN, whatever is hidden."""
    arrays, options = given
    want = solve(arrays, options, "composed", 1)
    assert all(np.isfinite(a).all() for a in want)
    for way in ("fused", "tiled"):
        for a, b in zip(solve(arrays, options, way, 1), want):
            close(a, b)


@given(problems())
@budget(40)
def test_implementations_agree_to_second_order(given):
    arrays, options = given
    want = solve(arrays, options, "composed", 2)
    assert all(np.isfinite(a).all() for a in want)
    for way in ("fused", "tiled"):
        for a, b in zip(solve(arrays, options, way, 2), want):
            close(a, b, 1e-9)


@every_way
def test_second_order_by_finite_differences(way, rng):
    """The gradient of <G_q, R> + <G_k, R> against differences of first gradients."""
    arrays = [rng.standard_normal((2, 3, 2)) for _ in range(3)]
    r = [rng.standard_normal((2, 3, 2)) for _ in range(4)]

    def penalty(arrays, create_graph=False):
        xs = [leaf(a) for a in arrays]
        y = attend(*xs, is_causal=True, softcap=2.0, implementation=way)
        cts = mg.gradients(y, xs, r[3], create_graph=create_graph)
        return xs, sum((ct * c).sum() for ct, c in zip(cts, r))

    xs, s = penalty(arrays, True)
    second = mg.gradients(s, xs)
    v, h = [rng.standard_normal(a.shape) for a in arrays], 1e-5
    high, low = (penalty([a + e * h * d for a, d in zip(arrays, v)])[1].item() for e in (1, -1))
    assert sum((g.numpy() * d).sum() for g, d in zip(second, v)) == pytest.approx((high - low) / (2 * h), rel=1e-6)


@every_way
def test_composed_context_wins(way, rng):
    """Under mg.composed() every implementation is the nodes of A.10, and no fused one is left."""
    q, k, v = problem(rng)
    with mg.composed(), mg.Tape() as tape:
        attend(q, k, v, is_causal=True, implementation=way)
    assert not {"attention_fused", "attention_tiled", "masked_softmax"} & {n.name for n in tape}
    assert "matmul" in {n.name for n in tape}


def test_each_way_is_what_it_says(rng):
    """composed: nodes for the lines of A.10; fused and tiled: one node; auto: one of these."""
    q, k, v = problem(rng)
    names = {}
    for way in (*WAYS, "auto"):
        with kernels(), mg.Tape() as tape:
            attend(q, k, v, implementation=way)
        names[way] = [n.name for n in tape]
    assert names["fused"] == ["attention_fused"] and names["tiled"] == ["attention_tiled"]
    assert names["auto"] in (names["fused"], names["tiled"])
    assert {"matmul", "masked_softmax", "multiply", "transpose"} == set(names["composed"])


# -------------------------------------------------------------------------------------------------------- PyTorch

GRID = list(itertools.product(
    [((2,), 2, 2), ((), 3, 3), ((2, 2), 1, 1), ((2,), 4, 2), ((2,), 4, 1)],           # leading axes, heads, kv heads
    [(4, 4), (3, 5), (1, 6)],                                                        # lengths
    ["none", "causal", "bool", "float"],
    [None, 0.3],                                                                     # scale
    [False, True]))                                                                  # strided


def strided(a):
    """The same values with the heads inside the rows, as a projection leaves them: not contiguous."""
    return np.ascontiguousarray(np.moveaxis(a, -3, -2)).swapaxes(-3, -2) if a.ndim > 2 else a[::-1].copy()[::-1]


@every_way
def test_against_torch(way, torch):
    """Outputs and the gradients of q, k, v and of a float mask, in float64."""
    numbers = np.random.default_rng(0)
    for (lead, heads, shared), (t, s), kind, scale, odd in GRID:
        if kind == "causal" and t != s:
            continue
        shapes = (*lead, heads, t, 3), (*lead, shared, s, 3), (*lead, shared, s, 2)
        arrays = [numbers.standard_normal(shape) for shape in shapes]
        arrays = [strided(a) if odd else a for a in arrays]
        mask = {"bool": numbers.random((heads, t, s)) < 0.7, "float": numbers.standard_normal((t, s))}.get(kind)
        if kind == "bool":
            mask[..., 0] = True
        theirs = [torch.from_numpy(np.array(a)).requires_grad_() for a in arrays]
        m = None if mask is None else torch.from_numpy(mask)
        if kind == "float":
            theirs.append(m.requires_grad_())
        gqa = heads != shared
        flat = len(lead) > 1                             # PyTorch's GQA and masks want four axes
        call = [x.flatten(0, len(lead) - 1) if flat else x for x in theirs[:3]]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        y = sdpa(*call, m, 0.0, kind == "causal", scale=scale, enable_gqa=gqa)
        y = y.reshape(*lead, heads, t, 2)
        ct = numbers.standard_normal(y.shape)
        cts = torch.autograd.grad(y, theirs, torch.from_numpy(ct))

        mine = [mg.tensor(0.0, dtype=np.float64) for _ in arrays]
        for x, a in zip(mine, arrays):
            x._data, x._tracked = a, True                # with its strides: mg.tensor would copy
        given = leaf(mask) if kind == "float" else mask
        out = attend(*mine, given, 0.0, kind == "causal", scale, gqa, implementation=way)
        close(out, y.detach())
        xs = mine + ([given] if kind == "float" else [])
        for got, want in zip(mg.gradients(out, xs, ct), cts):
            close(got, want)


@every_way
def test_float32_and_float16_against_float64(way, rng):
    """The rounding of the dtype and no more; the dtype is kept, forward and backward."""
    q, k, v = problem(rng, t=9, s=9)
    exact = attend(q, k, v, is_causal=True)
    ct = rng.standard_normal(exact.shape)
    want = [exact, *mg.gradients(exact, [q, k, v], ct)]
    for dtype, tol in ((np.float32, 2e-6), (np.float16, 6e-3)):
        xs = [leaf(x.numpy(), dtype) for x in (q, k, v)]
        y = attend(*xs, is_causal=True, implementation=way)
        for got, ref in zip([y, *mg.gradients(y, xs, ct.astype(dtype))], want):
            assert got.dtype == dtype
            close(got, ref, tol)


# ------------------------------------------------------------------------------------------ A.10.1: the visible sets


def sees(i, j, causal, offset, window):
    """Whether query i sees key j, from the words of the contract."""
    p = i + offset
    if causal and j > p:
        return False
    if window is None:
        return True
    return p - window < j if causal else abs(p - j) < window


@every_way
def test_visible_sets(way):
    """With V the identity the output is A, whose nonzero entries are the visible set: causal, offset and window."""
    t, s = 4, 6
    q, k = np.zeros((t, 1)), np.zeros((s, 1))
    for causal, offset, window in itertools.product((False, True), (-2, 0, 2, 5), (None, 1, 2, 3)):
        a = attend(mg.tensor(q), k, np.eye(s), is_causal=causal, query_offset=offset, window=window, empty_rows="zeros",
                   implementation=way).numpy()
        want = np.array([[sees(i, j, causal, offset, window) for j in range(s)] for i in range(t)])
        assert ((a > 0) == want).all(), (causal, offset, window)
        close(a.sum(-1), want.any(-1))                   # equal scores: uniform over the set


@every_way
def test_masks_combine(way, rng):
    """attn_mask and is_causal and window: a key must pass all."""
    q, k, _ = problem(rng, lead=(), heads=1, t=5, s=5)
    mask = rng.random((5, 5)) < 0.8
    mask |= np.eye(5, dtype=bool)
    a = attend(q, k, np.eye(5), mask, is_causal=True, window=3, implementation=way).numpy()[0]
    want = mask & np.array([[sees(i, j, True, 0, 3) for j in range(5)] for i in range(5)])
    assert ((a > 0) == want).all()


@every_way
def test_true_means_seen(way, rng):
    """The polarity: True = this key may be seen. The same as adding 0 there and -inf elsewhere."""
    q, k, v = problem(rng)
    mask = np.tri(4, dtype=bool)
    want = attend(q, k, v, is_causal=True, implementation=way)
    close(attend(q, k, v, mask, implementation=way), want)
    close(attend(q, k, v, mg.tensor(mask), implementation=way), want)
    close(attend(q, k, v, mask.tolist(), implementation=way), want)
    close(attend(q, k, v, np.where(mask, 0.0, -np.inf), implementation=way), want)


@every_way
def test_decoding_with_a_cache_equals_the_full_pass(way, rng):
    """Row by row over the keys so far, query_offset = S - T: the rows of the causal pass over all."""
    q, k, v = (x.detach() for x in problem(rng, t=6, s=6))
    full = attend(q, k, v, is_causal=True, implementation=way).numpy()
    for at, n in ((0, 1), (1, 1), (2, 3), (5, 1)):       # a step may bring several queries
        part = attend(q[..., at:at + n, :], k[..., :at + n, :], v[..., :at + n, :], is_causal=True, query_offset=at,
                      implementation=way)
        close(part, full[..., at:at + n, :])


@every_way
def test_packed_documents_do_not_see_each_other(way, rng):
    """Two documents in one row, by a mask: each is as if alone, and so are its gradients."""
    q, k, v = problem(rng, lead=(), t=5, s=5)
    ids = np.array([0, 0, 1, 1, 1])
    y = attend(q, k, v, ids[:, None] == ids, is_causal=True, implementation=way)
    cts = mg.gradients(y.sum(), [q, k, v])
    for part in (slice(0, 2), slice(2, 5)):
        xs = [leaf(x.numpy()[:, part]) for x in (q, k, v)]
        alone = attend(*xs, is_causal=True, implementation=way)
        close(y.numpy()[:, part], alone)
        for got, want in zip(cts, mg.gradients(alone.sum(), xs)):
            close(got.numpy()[:, part], want)


# -------------------------------------------------------------------------------------- A.10.1 to A.10.9: properties


@every_way
def test_rows_of_a_are_a_distribution(way, rng):
    """A is non-negative, its rows sum to 1; so an output row is a convex combination of the visible values (A.10.3)."""
    q, k, v = problem(rng, t=5, s=5)
    a = attend(q, k, np.broadcast_to(np.eye(5), (2, 2, 5, 5)), is_causal=True, implementation=way).numpy()
    assert (a >= 0).all()
    close(a.sum(-1), 1.0)
    y = attend(q, k, v, is_causal=True, implementation=way).numpy()
    for i in range(5):
        seen = v.numpy()[..., :i + 1, :]
        assert (y[..., i, :] <= seen.max(-2) + 1e-12).all() and (y[..., i, :] >= seen.min(-2) - 1e-12).all()
    close(y, a @ v.numpy())


@every_way
def test_gradient_of_the_scores(way, rng):
    """A float mask that is added to the scores has G_S as its gradient: rows sum to 0, hidden entries are exactly 0,
    and it is A (G_A - c) of A.10.7; then A.10.5, A.10.8 and A.10.9 for V, Q and K."""
    q, k, v = problem(rng, t=5, s=5, d=4)
    bias = leaf(rng.standard_normal((2, 2, 5, 5)))
    eye = np.broadcast_to(np.eye(5), (2, 2, 5, 5))
    a = attend(q, k, eye, bias, is_causal=True, implementation=way).numpy()
    y = attend(q, k, v, bias, is_causal=True, implementation=way)
    g_o = rng.standard_normal(y.shape)
    g_s, g_q, g_k, g_v = (g.numpy() for g in mg.gradients(y, [bias, q, k, v], g_o))
    close(g_s.sum(-1), 0.0)
    assert (g_s[..., np.triu(np.ones((5, 5), bool), 1)] == 0).all()
    g_a = g_o @ v.numpy().swapaxes(-1, -2)                                            # (A.10.6)
    close(g_s, a * (g_a - (a * g_a).sum(-1, keepdims=True)))                          # (A.10.7)
    close(g_v, a.swapaxes(-1, -2) @ g_o)                                              # (A.10.5)
    close(g_q, g_s @ k.numpy() / 2.0)                                                 # (A.10.8), sqrt(d) = 2
    close(g_k, g_s.swapaxes(-1, -2) @ q.numpy() / 2.0)                                # (A.10.9)


@every_way
def test_a_constant_added_to_a_row_changes_nothing(way, rng):
    """Also a large one: softmax is shifted by its maximum first. 2^20 is exact, so rounding stays near 1e-10."""
    q, k, v = problem(rng)
    y = attend(q, k, v, np.zeros((4, 4)), implementation=way).numpy()
    for shift in (np.array([[1.0], [-3.0], [50.0], [0.0]]), np.full((4, 1), 2.0**20), np.full((4, 1), -(2.0**20))):
        close(attend(q, k, v, np.broadcast_to(shift, (4, 4)), implementation=way), y, 1e-8)


@every_way
def test_what_is_hidden_gets_exactly_nothing(way, rng):
    """A key that no query sees: its K and V get 0, not 1e-17; and its values do not matter."""
    q, k, v = problem(rng, t=3, s=5)
    mask = np.array([True, False, True, True, False])
    y = attend(q, k, v, mask, implementation=way)
    cts = mg.gradients((y * y).sum(), [k, v])
    for ct in cts:
        assert (ct.numpy()[..., ~mask, :] == 0).all() and (ct.numpy()[..., mask, :] != 0).all()
    with mg.no_grad():
        k[..., ~mask, :] = 1e3
        v[..., ~mask, :] = -1e3
    close(attend(q, k, v, mask, implementation=way), y)


def test_variance_of_the_scores_under_its_assumptions():
    """A.10.4: zero mean, independent, uncorrelated products: Var(q . k) = d sq^2 sk^2, so the scores over sqrt(d) have
    variance sq^2 sk^2 at any d; no normality needed (here: uniform and +-1). 40,000 pairs: within 5%."""
    rng = np.random.default_rng(0)
    for d in (4, 64, 256):
        q = mg.tensor(rng.uniform(-1, 1, (200, d)))                                   # variance 1/3
        k = mg.tensor(rng.choice([-2.0, 2.0], (200, d)))                              # variance 4
        s = (q @ k.T / math.sqrt(d)).numpy()
        assert s.var() == pytest.approx(4 / 3, rel=0.05)


@pytest.mark.parametrize("broken, want", [("mean", 10.0), ("correlated coordinates", 64.0), ("q = k", 2.0)])
def test_variance_of_the_scores_without_them(broken, want):
    """Each assumption is needed; the scores of d = 64 standard normal coordinates, over sqrt(d), had variance 1.
    Means of 3 on one side: Var(q_r (k_r + 3)) = 1 + 9 = 10. All coordinates equal: d q k / sqrt(d), variance d = 64.
    q = k: Var(sum q_r^2) / d = Var(chi^2_1) = 2."""
    rng, d, n = np.random.default_rng(0), 64, 40_000
    q, k = rng.standard_normal((2, n, d))
    if broken == "mean":
        k = k + 3.0
    elif broken == "correlated coordinates":
        q, k = q[:, :1] * np.ones(d), k[:, :1] * np.ones(d)
    else:
        k = q
    s = (q * k).sum(-1) / math.sqrt(d)
    assert s.var() == pytest.approx(want, rel=0.1) and abs(s.var() - 1) > 0.5


@every_way
def test_gradients_of_shared_inputs_add_up(way, rng):
    """Self-attention (A.10.11): one x through three weights. Cross-attention: x and z each get only their branches."""
    x, z = leaf(rng.standard_normal((4, 3))), leaf(rng.standard_normal((5, 3)))
    w = [mg.tensor(rng.standard_normal((3, 3))) for _ in range(3)]
    y = attend(x @ w[0], x @ w[1], x @ w[2], implementation=way)
    total = mg.gradients((y * y).sum(), [x])[0]
    copies = [leaf(x.numpy()) for _ in range(3)]
    y = attend(*(c @ m for c, m in zip(copies, w)), implementation=way)
    close(total, sum(g.numpy() for g in mg.gradients((y * y).sum(), copies)))
    y = attend(x @ w[0], z @ w[1], z @ w[2], implementation=way)
    g_x, g_z = mg.gradients((y * y).sum(), [x, z])
    assert g_x.shape == (4, 3) and g_z.shape == (5, 3) and np.abs(g_z.numpy()).min() > 0


# ------------------------------------------------------------------------------------------ A.10.5: heads and shapes


@every_way
def test_shared_heads_equal_repeated_ones(way, rng):
    """Grouped and multi-query heads: as K and V repeated by hand; the gradient of a shared head is the sum over those
    that share it. The default map is r // (Hq / Hkv); kv_head gives any."""
    q, k, v = problem(rng, heads=4, shared=2)
    for options, g in (({"enable_gqa": True}, [0, 0, 1, 1]), ({"kv_head": [1, 0, 1, 1]}, [1, 0, 1, 1]),
                       ({"kv_head": np.array([0, 0, 0, 0])}, [0, 0, 0, 0])):
        y = attend(q, k, v, is_causal=True, implementation=way, **options)
        kk, vv = leaf(k.numpy()[:, g]), leaf(v.numpy()[:, g])
        want = attend(q, kk, vv, is_causal=True, implementation=way)
        close(y, want)
        got = mg.gradients((y * y).sum(), [q, k, v])
        wide = mg.gradients((want * want).sum(), [q, kk, vv])
        close(got[0], wide[0])
        for a, b in zip(got[1:], wide[1:]):
            close(a, np.stack([b.numpy()[:, [r for r in range(4) if g[r] == h]].sum(1) for h in range(2)], 1))


@every_way
def test_leading_axes_broadcast(way, rng):
    """q of one batch over keys of many, and the other way; gradients are summed over what was repeated."""
    q, k, v = (leaf(rng.standard_normal(shape)) for shape in ((1, 2, 3, 2), (4, 2, 5, 2), (2, 5, 3)))
    y = attend(q, k, v, implementation=way)
    assert y.shape == (4, 2, 3, 3)
    full = [leaf(np.broadcast_to(x.numpy(), (4, *x.shape[-3:]))) for x in (q, k, v)]
    want = attend(*full, implementation=way)
    close(y, want)
    got, wide = (mg.gradients((o * o).sum(), xs) for o, xs in ((y, [q, k, v]), (want, full)))
    close(got[0], wide[0].numpy().sum(0, keepdims=True))
    close(got[1], wide[1])
    close(got[2], wide[2].numpy().sum(0))


@every_way
def test_no_head_axis_and_many_leading_axes(way, rng):
    q, k, v = problem(rng, lead=(2, 3, 1), heads=2)
    y = attend(q, k, v, implementation=way)
    assert y.shape == (2, 3, 1, 2, 4, 2)
    one = attend(q[1, 2, 0, 1], k[1, 2, 0, 1], v[1, 2, 0, 1], implementation=way)
    assert one.shape == (4, 2)
    close(one, y.numpy()[1, 2, 0, 1])


@every_way
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 2, 0)])
def test_no_batch_and_no_query_are_fine(way, shape):
    """Nothing comes out, and gradients of the right shape are 0."""
    b, h, t = shape
    q, k, v = leaf(np.ones((b, h, t, 2))), leaf(np.ones((b, h, 5, 2))), leaf(np.ones((b, h, 5, 3)))
    y = attend(q, k, v, implementation=way)
    assert y.shape == (b, h, t, 3)
    y.sum().backward()
    assert all(x.grad.shape == x.shape and not x.grad.numpy().any() for x in (q, k, v))


# --------------------------------------------------------------------------------------------------------- the extras


@every_way
def test_softcap_and_sinks(way, rng):
    """S -> c tanh(S / c) before the mask; a sink adds e^s to a row's sum and nothing to its output."""
    q, k, v = problem(rng, lead=(), t=3, s=3, d=4)
    sinks = leaf([0.5, -1.0])
    mask = rng.standard_normal((3, 3))
    s = q.numpy() @ k.numpy().swapaxes(-1, -2) / 2
    e = np.exp(1.5 * np.tanh(s / 1.5) + mask)
    want = e / (e.sum(-1, keepdims=True) + np.exp(sinks.numpy())[:, None, None]) @ v.numpy()
    close(attend(q, k, v, mask, softcap=1.5, sinks=sinks, implementation=way), want)
    low = attend(q, k, v, sinks=mg.tensor(np.full(2, -1e4)), implementation=way)
    close(low, attend(q, k, v, implementation=way))      # a sink far below is none


@every_way
def test_float_mask_gets_its_gradient_through_broadcasting(way, rng):
    """ALiBi: slopes (H, 1, 1) times distances; a slope's gradient sums G_S times the distance over all it touched."""
    q, k, v = problem(rng, t=4, s=4)
    distance = -np.abs(np.arange(4)[:, None] - np.arange(4.0))
    slopes = leaf([[[0.5]], [[0.25]]])
    full = leaf(np.broadcast_to(slopes.numpy() * distance, (2, 2, 4, 4)))
    y = attend(q, k, v, slopes * distance, is_causal=True, implementation=way)
    want = attend(q, k, v, full, is_causal=True, implementation=way)
    close(y, want)
    got, wide = mg.gradients((y * y).sum(), [slopes])[0], mg.gradients((want * want).sum(), [full])[0]
    close(got, (wide.numpy() * distance).sum((0, 2, 3)).reshape(2, 1, 1))


def test_dropout_is_the_same_on_every_path(rng):
    """One seed, one mask; other seeds, others. Kept weights are divided by 1 - p, so the mean over seeds is the plain
    output: 400 runs within 5 standard errors."""
    q, k, v = problem(rng)
    runs = []
    for way in WAYS:
        mg.manual_seed(11)
        runs.append((attend(q, k, v, None, 0.5, is_causal=True, implementation=way).numpy(), mg.get_rng_state()))
    close(runs[1][0], runs[0][0])
    close(runs[2][0], runs[0][0])
    assert runs[0][1] == runs[1][1] == runs[2][1]
    assert (attend(q, k, v, None, 0.5, is_causal=True).numpy() != runs[0][0]).any()
    plain = attend(q, k, v).numpy()
    many = np.stack([attend(q, k, v, dropout_p=0.3).numpy() for _ in range(400)])
    assert (np.abs(many.mean(0) - plain) < 5 * many.std(0) / 20).all()


@every_way
def test_dropout_at_backward_uses_the_same_bits(way, rng):
    """With the seed reset, differences of the output are the gradient: dropout is a fixed linear map of A."""
    q, k, v = problem(rng, lead=(), t=3, s=3)
    d, h = rng.standard_normal(k.shape), 1e-6

    def f(k):
        mg.manual_seed(2)
        return (attend(q, k, v, dropout_p=0.4, implementation=way) * np.arange(1.0, 13).reshape(2, 3, 2)).sum()

    g = mg.gradients(f(k), [k])[0].numpy()
    with mg.no_grad():
        slope = (f(k.numpy() + h * d).item() - f(k.numpy() - h * d).item()) / (2 * h)
    assert (g * d).sum() == pytest.approx(slope, rel=1e-6)


# ----------------------------------------------------------------------------------------- a row that sees nothing

EMPTY = {
    "bool mask": lambda: {"attn_mask": np.array([[True] * 4, [False] * 4, [True, False, True, False]])},
    "float mask": lambda: {"attn_mask": np.array([[0.0] * 4, [-np.inf] * 4, [1.0, -np.inf, 0.0, 2.0]])},
    "offset": lambda: {"is_causal": True, "query_offset": -2},
    "window": lambda: {"window": 1, "query_offset": 3},
    "together": lambda: {"attn_mask": np.array([False, True, True, True]), "is_causal": True, "query_offset": 0},
}


@every_way
@every_dtype
@pytest.mark.parametrize("case", list(EMPTY))
def test_empty_rows(case, dtype, way, rng):
    """"raise" names the first such row; "zeros" gives it zeros, and its query no gradient; never NaN, and the other
    rows are as they would be alone. No warning: pytest makes those errors."""
    q, k, v = problem(rng, t=3, s=4, dtype=dtype)
    options = EMPTY[case]()
    offset, mask = options.get("query_offset", 0), np.asarray(options.get("attn_mask", True))
    band = options.get("is_causal", False), offset, options.get("window")
    seen = (mask if mask.dtype == bool else mask > -np.inf) & np.array(
        [[sees(i, j, *band) for j in range(4)] for i in range(3)])
    empty = ~seen.any(-1)
    assert empty.any()
    if mask.dtype != bool:
        options["attn_mask"] = leaf(mask, dtype)
    with pytest.raises(ValueError, match=rf"batch 0, head 0, query {empty.argmax()}\b.*empty_rows=\"zeros\""):
        attend(q, k, v, **options, implementation=way)
    y = attend(q, k, v, **options, empty_rows="zeros", implementation=way)
    xs = [q, k, v] + [x for x in options.values() if isinstance(x, mg.Tensor)]
    cts = mg.gradients(y, xs, rng.standard_normal(y.shape).astype(dtype), create_graph=True)
    assert y.dtype == dtype and not y.numpy()[..., empty, :].any() and not cts[0].numpy()[..., empty, :].any()
    for a in (y, *cts):
        assert np.isfinite(a.numpy()).all() and a.dtype == dtype
    assert all(np.isfinite(g.numpy()).all() for g in mg.gradients(sum(ct.sum() for ct in cts), xs))
    if not empty.all():
        bias = options["attn_mask"].numpy() if isinstance(options.get("attn_mask"), mg.Tensor) else np.zeros(seen.shape)
        some = attend(q.detach()[..., ~empty, :], k, v, np.where(seen, bias, -np.inf)[~empty].astype(dtype))
        close(y.numpy()[..., ~empty, :], some, {np.float16: 5e-3, np.float32: 1e-5}.get(dtype, 1e-11))


@every_way
def test_no_key_at_all_is_an_empty_row(way):
    q, k, v = leaf(np.ones((2, 3, 2))), leaf(np.ones((2, 0, 2))), leaf(np.ones((2, 0, 4)))
    with pytest.raises(ValueError, match="head 0, query 0"):
        attend(q, k, v, implementation=way)
    y = attend(q, k, v, empty_rows="zeros", implementation=way)
    y.sum().backward()
    assert y.shape == (2, 3, 4) and not y.numpy().any() and not q.grad.numpy().any() and k.grad.shape == (2, 0, 2)


@every_way
def test_a_sink_makes_no_row_empty(way, rng):
    """With a sink every row has a sum: e^s. A row that sees no key then gives zeros and is no error."""
    q, k, v = problem(rng, lead=(), t=3, s=3)
    y = attend(q, k, v, is_causal=True, query_offset=-1, sinks=mg.tensor(np.zeros(2)), implementation=way)
    assert not y.numpy()[:, 0].any() and y.numpy()[:, 1].all()


def test_masked_softmax_rows(rng):
    """The names of a row: (query,), (head, query), (batch, head, query)."""
    for shape, at in (((3, 4), "query 1"), ((2, 3, 4), "head 0, query 1"), ((2, 2, 3, 4), "batch 0, head 0, query 1")):
        mask = np.ones((3, 4), bool)
        mask[1] = False
        with pytest.raises(ValueError, match=rf"^\[masked_softmax\].*: {at};"):
            F.masked_softmax(mg.tensor(rng.standard_normal(shape)), mask)


@every_dtype
@pytest.mark.parametrize("context", [mg.composed, kernels], ids=["composed", "fused"])
def test_masked_softmax(dtype, context, rng):
    """A.10.2 over the visible set; A.10.7 backward: 0 where hidden, rows of G_S sum to 0; empty rows are zeros."""
    tol = {np.float16: 4e-3, np.float32: 2e-6, np.float64: 1e-13}[dtype]
    s = leaf(rng.standard_normal((5, 4)) * 3, dtype)
    seen = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 0]], bool)
    with context():
        a = F.masked_softmax(s, seen, empty_rows="zeros")
        ct = rng.standard_normal((5, 4)).astype(dtype)
        g, = mg.gradients(a, [s], ct, create_graph=True)
        second = mg.gradients((g * ct).sum(), [s])[0].numpy()
    e = np.exp(s.numpy().astype(np.float64)) * seen
    total = e.sum(-1, keepdims=True)
    want = e / np.where(total == 0, 1, total)
    close(a, want, tol)
    assert a.dtype == g.dtype == dtype and (a.numpy()[~seen] == 0).all() and (g.numpy()[~seen] == 0).all()
    assert np.isfinite(second).all()
    close(g.numpy().astype(np.float64).sum(-1), 0, 4 * tol)
    close(g, want * (ct - (want * ct).sum(-1, keepdims=True)), 4 * tol)
    close(a.numpy().astype(np.float64).sum(-1), [1, 0, 1, 1, 1], 4 * tol)


def test_masked_softmax_axis_and_infinities(rng):
    """Along another axis; a score of -inf is hidden like a masked one; large scores do not overflow."""
    s = rng.standard_normal((3, 4)) * 500
    close(F.masked_softmax(mg.tensor(s), axis=0), F.softmax(mg.tensor(s), axis=0))
    s[0, 1] = -np.inf
    seen = np.isfinite(s)
    close(F.masked_softmax(mg.tensor(s)), F.masked_softmax(mg.tensor(np.where(seen, s, 1e3)), seen))
    s[0] = -np.inf
    with pytest.raises(ValueError, match="query 0"):
        F.masked_softmax(mg.tensor(s))
    assert not F.masked_softmax(mg.tensor(s), empty_rows="zeros").numpy()[0].any()


def test_a_pure_causal_mask_needs_no_check(rng):
    """It has no empty row, whatever the lengths: offset 0 or more."""
    q, k, v = problem(rng, t=3, s=5)
    for offset in (0, 2, 10):
        assert attend(q, k, v, is_causal=True, query_offset=offset).shape == (2, 2, 3, 2)


# ------------------------------------------------------------------------------------------------------------ errors


def shaped(*shapes):
    return [mg.tensor(np.ones(s)) for s in shapes]


ROW, HEADS, CROSS = shaped((4, 2), (4, 2), (4, 2)), shaped(*[(2, 4, 2)] * 3), shaped((2, 3, 2), (2, 5, 2), (2, 5, 2))
HOLE = np.array([[[[True]]], [[[False]]]]) | np.array([[True], [False], [True]])     # batch 1, query 1
ERRORS = [
    ("heads that do not divide", shaped((3, 4, 2), (2, 4, 2), (2, 4, 2)), {"enable_gqa": True},
     r"multiple.*3 over 2.*kv_head"),
    ("shared without being said", shaped((4, 4, 2), (2, 4, 2), (2, 4, 2)), {},
     r"4 query heads over 2.*enable_gqa=True"),
    ("map out of range", HEADS, {"kv_head": [0, 2]}, r"0 to 1: got \[0, 2\]"),
    ("map below 0", HEADS, {"kv_head": [0, -1]}, r"0 to 1: got \[0, -1\]"),
    ("map of a wrong length", shaped((4, 4, 2), (2, 4, 2), (2, 4, 2)), {"kv_head": [0, 1]}, r"each of 4 query heads"),
    ("mask that does not fit", HEADS, {"attn_mask": np.ones((3, 4), bool)},
     r"True = this key may be seen.*mask \(3, 4\), scores \(2, 4, 4\)"),
    ("mask larger than the scores", ROW, {"attn_mask": np.ones((2, 4, 4), bool)},
     r"mask \(2, 4, 4\), scores \(4, 4\)"),
    ("float mask that does not fit", HEADS, {"attn_mask": np.ones((4, 5))}, r"\(4, 5\).*\(2, 4, 4\)"),
    ("integer mask", ROW, {"attn_mask": np.ones((4, 4), int)}, r"boolean.*int64.*mask != 0"),
    ("causal with two lengths", CROSS, {"is_causal": True}, r"ambiguous.*query_offset=2"),
    ("window with two lengths", CROSS, {"window": 2}, r"ambiguous.*query_offset=2"),
    ("window of 0", ROW, {"window": 0}, r"window.*got 0"),
    ("half a window", ROW, {"window": 1.5}, r"window.*got 1.5"),
    ("softcap of 0", ROW, {"softcap": 0.0}, r"softcap.*got 0.0"),
    ("dropout of 1", ROW, {"dropout_p": 1.0}, r"dropout_p.*got 1.0"),
    ("unknown implementation", ROW, {"implementation": "flash"}, r"\"tiled\".*got 'flash'"),
    ("unknown empty_rows", ROW, {"empty_rows": "nan"}, r"\"zeros\".*got 'nan'"),
    ("widths that differ", shaped((4, 2), (4, 3), (4, 2)), {}, r"q \(4, 2\), k \(4, 3\)"),
    ("no width", shaped((4, 0), (4, 0), (4, 2)), {}, r"width D of at least 1: q \(4, 0\)"),
    ("lengths that differ", shaped((4, 2), (4, 2), (5, 2)), {}, r"k \(4, 2\), v \(5, 2\)"),
    ("key and value heads", shaped((2, 4, 2), (2, 4, 2), (1, 4, 2)), {}, r"heads.*v \(1, 4, 2\)"),
    ("leading axes", shaped((2, 1, 4, 2), (3, 1, 4, 2), (3, 1, 4, 2)), {},
     r"leading axes.*q \(2, 1, 4, 2\), k \(3, 1, 4, 2\)"),
    ("a vector", shaped((4,), (4, 2), (4, 2)), {}, r"got q \(4,\)"),
    ("sinks of a wrong length", HEADS, {"sinks": mg.tensor([1.0])}, r"sinks.*\(2,\).*\(1,\)"),
    ("an empty row", shaped(*[(2, 2, 3, 2)] * 3), {"attn_mask": HOLE}, r"batch 1, head 0, query 1"),
]


@every_way
@pytest.mark.parametrize("what, arrays, options, says", ERRORS, ids=[e[0] for e in ERRORS])
def test_errors(what, arrays, options, says, way):
    """Which op, what must hold, what came."""
    with pytest.raises((ValueError, TypeError), match=r"^\[scaled_dot_product_attention\].*" + says):
        attend(*arrays, **{"implementation": way, **options})


def test_nothing_warns_at_extreme_scores():
    """Scores of +-1e4: weights are exactly 0 and 1, in float32, on every path; no overflow and no NaN."""
    q, k = np.array([[100.0], [-100.0]], np.float32), np.array([[100.0], [-100.0], [0.0]], np.float32)
    v = np.arange(3, dtype=np.float32)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in WAYS:
            xs = [leaf(a, np.float32) for a in (q, k, v)]
            y = attend(*xs, scale=1.0, implementation=way)
            assert y.tolist() == [[0.0], [1.0]]
            y.sum().backward()
            assert all(np.isfinite(x.grad.numpy()).all() for x in xs)
