"""Positions: scaled rotary tables, ALiBi, sinusoids and T5's buckets, against the published formulas written here as
loops over plain numbers, the numbers in the papers, and the properties they are made for."""

import math

import numpy as np
import pytest

import minigrad as mg
import minigrad.functional as F
from minigrad import nn

CONTEXT = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 4.0}
NTK = {"rope_type": "ntk", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, CONTEXT: 16}
YARN = {"rope_type": "yarn", "factor": 16.0, CONTEXT: 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, CONTEXT: 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
RULES = {"linear": LINEAR, "ntk": NTK, "dynamic": DYNAMIC, "yarn": YARN, "llama3": LLAMA3}
each_rule = pytest.mark.parametrize("scaling", RULES.values(), ids=RULES)


# --- scaled rotary tables ---------------------------------------------------------------------------------------------


def scaled(kind, i, r, base, s, longest=0, context=0, fast=32, slow=1, low=1, high=4):
    """Radians per position of pair i, from the papers, one number at a time."""
    plain = 1.0 / base ** (2 * i / r)
    if kind == "linear":  # position m / s
        return plain / s
    if kind == "dynamic":
        s, kind = max(1.0, s * longest / context - (s - 1)), "ntk"
    if kind == "ntk":
        return 1.0 / (base * s ** (r / (r - 2))) ** (2 * i / r)
    wavelength = 2 * math.pi / plain
    if kind == "llama3":  # the branches of Llama 3.1's own code
        if wavelength < context / high:
            return plain
        if wavelength > context / low:
            return plain / s
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * plain / s + smooth * plain
    ends = [r * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base)) for turns in (fast, slow)]
    first, last = max(0, math.floor(ends[0])), min(r - 1, math.ceil(ends[1]))
    divided = min(1.0, max(0.0, (i - first) / (last - first)))
    return divided * plain / s + (1 - divided) * plain


@pytest.mark.parametrize("r, base", [(128, 10000.0), (64, 500000.0), (6, 100.0)])
@each_rule
def test_tables_follow_the_papers(scaling, r, base):
    kind = scaling["rope_type"]
    positions = [0, 1, 7, 40]
    cos, sin = F.rotary_tables(positions, r, base, scaling)
    temperature = 0.1 * math.log(scaling["factor"]) + 1.0 if kind == "yarn" else 1.0
    for row, m in enumerate(positions):
        for i in range(r // 2):
            angle = m * scaled(kind, i, r, base, scaling["factor"], 41, scaling.get(CONTEXT, 0))
            assert abs(cos[row, i] - temperature * math.cos(angle)) < 1e-12
            assert abs(sin[row, i] - temperature * math.sin(angle)) < 1e-12
    assert cos.shape == sin.shape == (4, r // 2) and cos.dtype == sin.dtype == np.float64


def frequencies(r, base=10000.0, scaling=None):
    """Radians per position of every pair, read off the tables at a position where no pair has turned half way round."""
    cos, sin = F.rotary_tables([1], r, base, scaling)
    return np.arctan2(sin, cos)[0]


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    """Llama 2's 4096 tokens, D = 128: pairs to 20 turn more than 32 times and stay, pairs from 46 less than once (the
    ends that the authors' code computes for this model); between them a ramp, so frequencies still fall."""
    plain, long = frequencies(128), frequencies(128, scaling=YARN)
    np.testing.assert_allclose(long[:21], plain[:21], rtol=1e-14)
    np.testing.assert_allclose(long[46:], plain[46:] / 16.0, rtol=1e-12)
    assert (long[21:46] < plain[21:46]).all() and (long[21:46] > plain[21:46] / 16.0).all()
    assert (np.diff(long) < 0).all()
    turns = 4096 * plain / (2 * np.pi)
    assert turns[20] > 32 and turns[46] < 1


def test_yarns_temperature():
    """0.1 ln s + 1 = sqrt(1/t): 1.2773 at s = 16, 1.3466 at s = 32; it scales q and k, so the scores by its square; a
    given attention_factor takes its place."""
    for s, expected in ((16.0, 1.2773), (32.0, 1.3466)):
        cos, sin = F.rotary_tables(range(5), 8, scaling={**YARN, "factor": s})
        np.testing.assert_allclose(np.hypot(cos, sin), expected, atol=5e-5)
    cos, sin = F.rotary_tables(range(5), 8, scaling={**YARN, "attention_factor": 1.5})
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=1e-14)


def test_yarns_ramp_may_have_fractional_ends():
    """"truncate": False, and other betas: the ends are where a pair turns exactly beta times."""
    r, base, context = 128, 10000.0, 4096
    given = {**YARN, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0}
    first, last = (r * math.log(context / (2 * math.pi * b)) / (2 * math.log(base)) for b in (20.0, 2.0))
    plain = frequencies(r)
    expected = [f if i < first else f / 16 if i > last else f + (f / 16 - f) * (i - first) / (last - first)
                for i, f in enumerate(plain)]
    np.testing.assert_allclose(frequencies(r, scaling=given), expected, rtol=1e-12)


@pytest.mark.parametrize("context", [1, 2, 7, 10**12])
def test_yarn_of_toy_and_of_endless_contexts(context):
    """Where no pair turns once, the ramp is at the first pair, which stays; where all turn often, all stay."""
    plain, long = frequencies(16), frequencies(16, scaling={**YARN, CONTEXT: context})
    assert long[0] == pytest.approx(plain[0], rel=1e-12)
    np.testing.assert_allclose(long[2:], plain[2:] / (1.0 if context > 7 else 16.0), rtol=1e-12)


def test_llama_31_keeps_short_waves_and_divides_long_ones():
    """Llama 3.1: base 500000, D = 128, waves shorter than 8192/4 = 2048 tokens stay, longer than 8192 are divided."""
    plain, long = frequencies(128, 5e5), frequencies(128, 5e5, LLAMA3)
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(long[waves < 2048], plain[waves < 2048], rtol=1e-14)
    np.testing.assert_allclose(long[waves > 8192], plain[waves > 8192] / 8, rtol=1e-12)
    between = (waves > 2048) & (waves < 8192)
    assert between.sum() == 6 and (np.diff(long) < 0).all()


def test_ntk_keeps_the_first_pair_and_divides_the_last():
    """What the exponent R/(R-2) was chosen for."""
    plain, long = frequencies(64), frequencies(64, scaling=NTK)
    assert long[0] == plain[0] and long[-1] == pytest.approx(plain[-1] / 4.0, rel=1e-12)


def test_dynamic_changes_nothing_until_the_context_is_exceeded():
    for n, s in ((16, 1.0), (17, 4 * 17 / 16 - 3), (64, 13.0)):  # 4 * 64/16 - 3
        same = F.rotary_tables(range(n), 8, scaling={"rope_type": "ntk", "factor": s})
        np.testing.assert_allclose(F.rotary_tables(range(n), 8, scaling=DYNAMIC), same, rtol=0, atol=1e-12)
    # a token alone, at position 63, belongs to a text of 64
    np.testing.assert_array_equal(F.rotary_tables([63], 8, scaling=DYNAMIC)[0],
                                  F.rotary_tables(range(64), 8, scaling=DYNAMIC)[0][63:])


@pytest.mark.parametrize("scaling", [LINEAR, NTK, YARN, LLAMA3], ids=["linear", "ntk", "yarn", "llama3"])
def test_factor_1_changes_nothing(scaling):
    for a, b in zip(F.rotary_tables(range(50), 16, scaling={**scaling, "factor": 1}), F.rotary_tables(range(50), 16)):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_linear_is_the_position_divided():
    np.testing.assert_allclose(F.rotary_tables(range(0, 40, 4), 8, scaling=LINEAR), F.rotary_tables(range(10), 8),
                               rtol=0, atol=1e-14)


def test_ways_to_write_the_rule():
    """The old key, both keys, a null, no rule, Tensors and fractions as positions, leading axes."""
    want = F.rotary_tables([0, 3], 8, scaling=LINEAR)
    for given in ({"type": "linear", "factor": 4}, {**LINEAR, "type": "linear", CONTEXT: None}):
        np.testing.assert_array_equal(F.rotary_tables(mg.tensor([0, 3]), 8, scaling=given), want)
    np.testing.assert_array_equal(F.rotary_tables([0, 0.75], 8, scaling={"rope_type": "default"}), want)
    assert F.rotary_tables(np.zeros((2, 5), int), 8)[0].shape == (2, 5, 4)
    assert F.rotary_tables([], 8, scaling=DYNAMIC)[0].shape == (0, 4)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@each_rule
def test_scores_depend_on_the_distance_only(rng, scaling, interleaved):
    """<R_m q, R_n k> for all m, n from one q and one k: constant on every diagonal, also with YaRN's temperature, and
    with part of the width unturned."""
    q, k = rng.normal(size=(2, 10))
    tables = F.rotary_tables(range(40), 8, scaling=scaling)
    scores = np.matmul(F.rotary_embedding(np.tile(q, (40, 1)), *tables, interleaved),
                       F.rotary_embedding(np.tile(k, (40, 1)), *tables, interleaved).T)
    for d in range(-39, 40):
        assert np.ptp(np.diagonal(scores, d)) < 1e-12
    assert np.ptp(scores) > 1


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_gradients_with_scaled_tables(rng, interleaved):
    """YaRN's tables are no rotation (their length is not 1): x by the fused rule and by the composition, and cos and
    sin that are learned, against central differences."""
    arrays = [rng.normal(size=(2, 3, 7)), *F.rotary_tables([0, 5, 9000], 4, scaling=YARN)]
    ct = rng.normal(size=(2, 3, 7))

    def f(x, cos, sin):
        return (F.rotary_embedding(x, cos, sin, interleaved) * ct).sum()

    def differences(i):
        slopes = np.zeros_like(arrays[i])
        for at in np.ndindex(slopes.shape):
            ends = []
            for h in (1e-6, -1e-6):
                moved = [a.copy() for a in arrays]
                moved[i][at] += h
                ends.append(f(*moved))
            slopes[at] = (ends[0] - ends[1]) / 2e-6
        return slopes

    for learned in ([0], [0, 1, 2]):
        inputs = [mg.tensor(a, requires_grad=i in learned) for i, a in enumerate(arrays)]
        for i, gradient in zip(learned, mg.gradients(f(*inputs), [inputs[i] for i in learned])):
            np.testing.assert_allclose(gradient.numpy(), differences(i), rtol=0, atol=1e-8)
    with mg.composed():
        x = mg.tensor(arrays[0], requires_grad=True)
        again, = mg.gradients(f(x, *arrays[1:]), [x])
    np.testing.assert_allclose(again.numpy(), differences(0), rtol=0, atol=1e-8)


def test_float32_stays_float32():
    x = mg.randn(3, 8, requires_grad=True)
    y = F.rotary_embedding(x, *F.rotary_tables(range(3), 8, scaling=YARN))
    assert y.dtype == np.float32


@pytest.mark.parametrize("call, error, message", [
    (dict(r=5), ValueError, "r is an even integer of at least 2: got 5"),
    (dict(r=0), ValueError, "r is an even integer of at least 2: got 0"),
    (dict(r=2.5), TypeError, "r is an integer: got 2.5"),
    (dict(base=1.0), ValueError, "base is a finite number above 1: got 1.0"),
    (dict(base="x"), TypeError, "base is a number: got str"),
    (dict(positions=["a"]), TypeError, r"positions are numbers: got list"),
    (dict(positions=[0.0, math.inf]), ValueError, "positions are finite: got inf"),
    (dict(positions=[[1], [2, 3]]), ValueError, "positions are one array: got rows of different lengths"),
    (dict(positions=[True]), TypeError, r"positions are numbers"),
    (dict(scaling="yarn"), TypeError, "scaling is a dict.*got str"),
    (dict(scaling={"factor": 2.0}), ValueError, '"rope_type" of scaling is one of default, linear, ntk, dynamic, yarn'),
    (dict(scaling={"rope_type": "longrope"}), ValueError, "one of.*longrope"),
    (dict(scaling={"rope_type": "linear", "type": "yarn"}), ValueError, '"rope_type" of scaling is one of'),
    (dict(scaling={"rope_type": ["linear"]}), ValueError, '"rope_type" of scaling is one of'),
    (dict(scaling={"rope_type": "yarn", "beta_fst": 3}), ValueError,
     f"missing factor, missing {CONTEXT}, unknown beta_fst"),
    (dict(scaling={**LINEAR, CONTEXT: 10}), ValueError, f'scaling "linear" takes factor: unknown {CONTEXT}'),
    (dict(scaling={"rope_type": "linear", "factor": None}), ValueError, "missing factor"),
    (dict(scaling={**LINEAR, "factor": 0.5}), ValueError, "factor is at least 1: got 0.5"),
    (dict(scaling={**LINEAR, "factor": math.inf}), ValueError, "factor is a finite number above 0: got inf"),
    (dict(scaling={**LINEAR, "factor": "2"}), TypeError, "factor is a number: got str"),
    (dict(scaling={**YARN, CONTEXT: -1}), ValueError, f"{CONTEXT} is a finite number above 0: got -1"),
    (dict(scaling={**YARN, "beta_slow": 40}), ValueError, "beta_slow is below beta_fast: got 40.0 and 32.0"),
    (dict(scaling={**LLAMA3, "low_freq_factor": 4}), ValueError, "low_freq_factor is below high_freq_factor"),
    (dict(scaling=NTK, r=2), ValueError, 'r - 2 of "ntk" is an integer of at least 1: got 0'),
])
def test_what_tables_refuse(call, error, message):
    with pytest.raises(error, match=r"\[rotary_tables\].*" + message):
        F.rotary_tables(**{"positions": [0, 1], "r": 8, **call})


# --- ALiBi ------------------------------------------------------------------------------------------------------------


def test_alibi_slopes_are_the_papers():
    """8 heads: 1/2, 1/4 ... 1/256; 16 heads: sqrt(1/2) to the powers 1 .. 16; 12: of 8, then every other of 16."""
    np.testing.assert_array_equal(F.alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(F.alibi_slopes(16), np.sqrt(0.5) ** np.arange(1, 17), rtol=1e-14)
    np.testing.assert_allclose(F.alibi_slopes(12), [*F.alibi_slopes(8), *F.alibi_slopes(16)[0:8:2]], rtol=1e-14)

    def published(n):  # get_slopes of the authors' code, in outline: recursive
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        below = 2 ** math.floor(math.log2(n))
        return published(below) + published(2 * below)[0::2][: n - below]

    for n in range(1, 70):
        np.testing.assert_allclose(F.alibi_slopes(n), published(n), rtol=1e-12)


def test_alibi_bias_is_minus_slope_times_distance():
    for h, t, s, offset in ((3, 4, 4, 0), (2, 3, 6, 3), (2, 2, 3, -2), (1, 0, 3, 0)):
        bias, slopes = F.alibi_bias(h, t, s, offset), F.alibi_slopes(h)
        assert bias.shape == (h, t, s) and bias.dtype == np.float32
        for at in np.ndindex(bias.shape):
            assert bias[at] == np.float32(-slopes[at[0]] * abs(at[1] + offset - at[2]))
    several = F.alibi_bias(3, 2, 5, np.array([0, 3]).reshape(2, 1, 1, 1))
    np.testing.assert_array_equal(several, [F.alibi_bias(3, 2, 5), F.alibi_bias(3, 2, 5, 3)])


def test_alibi_decodes_as_it_trains(rng):
    """The last query alone, over a cache of keys, gives the last row of the whole: adding a constant to a row of scores
    changes no softmax, so -slope (i - j) and the paper's slope j are one."""
    q, k, v = (mg.tensor(rng.normal(size=(4, 6, 8))) for _ in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, F.alibi_bias(4, 6, 6), is_causal=True)
    last = F.scaled_dot_product_attention(q[:, 5:], k, v, F.alibi_bias(4, 1, 6, 5))
    paper = F.alibi_slopes(4)[:, None, None] * np.arange(6)
    np.testing.assert_allclose(last.numpy(), whole[:, 5:].numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(F.scaled_dot_product_attention(q, k, v, paper, is_causal=True).numpy(), whole.numpy(),
                               rtol=0, atol=1e-6)


# --- sinusoids --------------------------------------------------------------------------------------------------------


def test_sinusoids_are_vaswanis():
    """PE(p, 2i) = sin(p / 10000^(2i/C)), PE(p, 2i+1) = cos(...); wavelengths from 2 pi to 10000 2 pi."""
    pe = F.sinusoidal_positions(50, 6)
    assert pe.shape == (50, 6) and pe.dtype == np.float32
    for p, column in np.ndindex(50, 6):
        angle = p / 10000 ** ((column - column % 2) / 6)
        assert pe[p, column] == np.float32(math.cos(angle) if column % 2 else math.sin(angle))
    np.testing.assert_array_equal(F.sinusoidal_positions([[7], [3]], 6), pe[[[7], [3]]])
    np.testing.assert_array_equal(F.sinusoidal_positions(np.int64(3), 6), pe[:3])
    assert not np.array_equal(F.sinusoidal_positions([1], 6, base=100.0), pe[1:2])
    assert F.sinusoidal_positions(0, 4).shape == (0, 4)
    assert (mg.zeros(2, 4) + F.sinusoidal_positions(2, 4)).dtype == mg.float32


def test_a_shift_of_sinusoids_is_a_rotation(rng):
    """The paper's reason for them: PE(p + k) is one linear map of PE(p), for every p."""
    pe = F.sinusoidal_positions(40, 8).astype(float)
    turn, *_ = np.linalg.lstsq(pe[:-5], pe[5:], rcond=None)
    np.testing.assert_allclose(pe[:-5] @ turn, pe[5:], rtol=0, atol=1e-6)


# --- T5's buckets -----------------------------------------------------------------------------------------------------


def bucket_of(distance, n_buckets, max_distance, bidirectional):
    """Raffel et al. (2020), one key `distance` ahead of its query; logarithms compared as whole numbers:
    k <= w log(n/E) / log(M/E) is M^k E^w <= n^w E^k."""
    if bidirectional:
        n_buckets //= 2
        if distance > 0:
            return n_buckets + bucket_of(-distance, n_buckets, max_distance, False)
        distance = -abs(distance)
    n, exact = max(0, -distance), n_buckets // 2
    if n < exact:
        return n
    k, w = 0, n_buckets - exact
    while exact + k < n_buckets - 1 and max_distance ** (k + 1) * exact**w <= n**w * exact ** (k + 1):
        k += 1
    return exact + k


@pytest.mark.parametrize("bidirectional", [True, False], ids=["both ways", "one way"])
@pytest.mark.parametrize("n_buckets, max_distance", [(32, 128), (32, 256), (8, 20), (4, 3), (6, 1000), (64, 33)])
def test_buckets_follow_the_rule(n_buckets, max_distance, bidirectional):
    far = 2 * max_distance + 40
    got = F.relative_buckets(1, 2 * far + 1, n_buckets, max_distance, bidirectional, query_offset=far)[0]
    expected = [bucket_of(d, n_buckets, max_distance, bidirectional) for d in range(-far, far + 1)]
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.int64 and got.max() == n_buckets - 1
    grid = F.relative_buckets(5, 7, n_buckets, max_distance, bidirectional, query_offset=-1)
    assert grid.shape == (5, 7) and grid[2, 4] == bucket_of(4 - (2 - 1), n_buckets, max_distance, bidirectional)


@pytest.mark.parametrize("n_buckets, max_distance, begins", [(32, 128, {16: 10, 32: 12, 64: 14}), (16, 64, {16: 6})])
def test_buckets_begin_where_the_logarithm_is_whole(n_buckets, max_distance, begins):
    """8 * 16^(2/8) is 16: bucket 8 + 2 begins at 16 and 15 is before it, where a rounded logarithm may not agree."""
    for n, bucket in begins.items():
        row = F.relative_buckets(1, n + 1, n_buckets, max_distance, query_offset=n)[0][::-1]
        assert (row[n], row[n - 1]) == (bucket, bucket - 1)


def test_buckets_are_t5s_in_float32():
    """The formula as T5 computes it, in float32, for its own sizes: all distances to 1000 agree."""
    n = np.arange(1000)
    for size, bidirectional in ((16, True), (32, False)):
        exact = size // 2
        with np.errstate(divide="ignore"):
            logs = np.log(n.astype(np.float32) / np.float32(exact))
        large = exact + np.nan_to_num(logs / np.float32(math.log(128 / exact)) * np.float32(size - exact), neginf=0)
        expected = np.where(n < exact, n, np.minimum(large.astype(int), size - 1))
        got = F.relative_buckets(1, 1000, bidirectional=bidirectional, query_offset=999)[0][::-1]
        np.testing.assert_array_equal(got, expected)


def test_a_learned_table_of_buckets_gets_its_gradient(rng):
    """The bias as the docstring builds it; the gradient of an entry sums those of the scores in its bucket."""
    buckets = F.relative_buckets(3, 5, 8, 20, query_offset=1)
    table = nn.Parameter(rng.normal(size=(8, 2)))
    bias = F.moveaxis(F.embedding(buckets, table), -1, -3)
    assert bias.shape == (2, 3, 5) and bias[1, 2, 0].item() == table.numpy()[buckets[2, 0], 1]
    q, k, v = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 5, 4))
    F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward()
    dense = mg.tensor(bias.numpy(), requires_grad=True)
    F.scaled_dot_product_attention(q, k, v, attn_mask=dense).sum().backward()
    expected = np.zeros((8, 2))
    for i, j in np.ndindex(3, 5):
        expected[buckets[i, j]] += dense.grad.numpy()[:, i, j]
    np.testing.assert_allclose(table.grad.numpy(), expected, rtol=0, atol=1e-14)
    assert np.abs(expected).max() > 1e-3
    several = F.relative_buckets(3, 5, 8, 20, query_offset=np.array([[[[1]]], [[[0]]]]))
    assert several.shape == (2, 1, 3, 5) and (several[0, 0] == buckets).all()


@pytest.mark.parametrize("call, error, message", [
    (lambda: F.alibi_slopes(0), ValueError, r"\[alibi_slopes\] n_heads is an integer of at least 1: got 0"),
    (lambda: F.alibi_slopes(True), ValueError, r"\[alibi_slopes\] n_heads is an integer of at least 1: got True"),
    (lambda: F.alibi_slopes(2.5), TypeError, r"\[alibi_slopes\] n_heads is an integer: got 2.5"),
    (lambda: F.alibi_bias(2, -1, 3), ValueError, r"\[alibi_bias\] t is an integer of at least 0: got -1"),
    (lambda: F.alibi_bias(2, 1, "a"), TypeError, r"\[alibi_bias\] s is an integer: got str"),
    (lambda: F.alibi_bias(2, 1, 3, 0.5), ValueError, r"\[alibi_bias\] query_offset is an integer.*0.5"),
    (lambda: F.alibi_bias(2, 1, 3, [1, 2]), ValueError, r"\[alibi_bias\] query_offset.*\(B, 1, 1, 1\): got list"),
    (lambda: F.sinusoidal_positions(3, 5), ValueError, r"\[sinusoidal_positions\] d_model is an even integer.*5"),
    (lambda: F.sinusoidal_positions(-1, 4), ValueError, r"\[sinusoidal_positions\] a count of positions.*got -1"),
    (lambda: F.sinusoidal_positions(2.5, 4), TypeError, r"\[sinusoidal_positions\] a count of positions.*got 2.5"),
    (lambda: F.sinusoidal_positions(["a"], 4), TypeError, r"\[sinusoidal_positions\] positions are numbers"),
    (lambda: F.sinusoidal_positions(3, 4, base=0), ValueError, r"\[sinusoidal_positions\] base.*above 1: got 0"),
    (lambda: F.relative_buckets(2, 3, 5), ValueError, r"\[relative_buckets\] n_buckets is an even.*least 4: got 5"),
    (lambda: F.relative_buckets(2, 3, 1, bidirectional=False), ValueError, r"\[relative_buckets\] n_buckets.*2: got 1"),
    (lambda: F.relative_buckets(2, 3, 32, 8), ValueError, r"\[relative_buckets\] max_distance.*at least 9: got 8"),
    (lambda: F.relative_buckets(2.5, 3), TypeError, r"\[relative_buckets\] t is an integer: got 2.5"),
])
def test_what_positions_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
