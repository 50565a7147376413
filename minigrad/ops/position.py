"""Where a token stands, told to a model: rotary tables with their scalings for long contexts, ALiBi, sinusoids, and the
buckets of relative positions. The tables are constants: NumPy arrays, computed in float64."""

from __future__ import annotations

import math

import numpy as np

from minigrad.backend.device import to_host
from minigrad.ops.elementwise import array, number, on_device_of
from minigrad.ops.shape import broadcasts, concatenate, reshape, stack
from minigrad.tape import Tensor, _raw, describe, primitive, sample


def _turn(x, cos, sin, interleaved):
    r = cos.shape[-1]
    if interleaved:
        pairs = x[..., :2 * r].reshape(*x.shape[:-1], r, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = reshape(stack([a * cos - b * sin, b * cos + a * sin], axis=-1), (*x.shape[:-1], 2 * r))
    else:
        a, b = x[..., :r], x[..., r:2 * r]
        turned = concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned if 2 * r == x.shape[-1] else concatenate([turned, x[..., 2 * r:]], axis=-1)


_angle = np.linspace(0.1, 2.0, 6).reshape(3, 2)


@primitive(fused=True,
           rules=[lambda ct, cos, sin, interleaved: _rotary(ct, cos=cos, sin=-sin, interleaved=interleaved)],
           samples=[sample((2, 3, 4), cos=np.cos(_angle), sin=np.sin(_angle)),
                    sample((2, 3, 4), cos=np.cos(_angle), sin=np.sin(_angle), interleaved=True),
                    sample((3, 7), cos=np.cos(_angle), sin=np.sin(_angle))])
def _rotary(x, /, cos, sin, interleaved=False):
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair in x;  ct_x = ct turned back, by -sin"""
    return _turn(x, cos, sin, interleaved)


def rotary_embedding(x, cos, sin, interleaved=False):
    """Turn the first R of D elements by position: x (*S, T, D); cos, sin (..., T, R/2), broadcastable.

    Pair (a, b) -> (a cos - b sin, b cos + a sin); the pairs are elements (i, i + R/2), or neighbours (2i, 2i + 1) if
    interleaved. The cotangent turns back (-sin). From `rotary_tables`: <R_m q, R_n k> depends on m - n only (Su et al.,
    2021). cos and sin that require gradients get them.
    """
    op = "rotary_embedding"
    x, cos, sin = array(op, "x", x), array(op, "cos", cos), array(op, "sin", sin)
    cos, sin = on_device_of(cos, x), on_device_of(sin, x)
    r = cos.shape[-1] if cos.ndim else 0
    if cos.shape != sin.shape or x.ndim < 2 or 2 * r > x.shape[-1] or not broadcasts(cos.shape[:-1], x.shape[:-1]):
        raise ValueError(f"[{op}] cos and sin are (..., T, R/2) with R at most D, and broadcast to x (*S, T, D): "
                         f"x {x.shape}, cos {cos.shape}, sin {sin.shape}")
    dtype = np.result_type(x.dtype, np.float16)          # integers turn as floats
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    if any(isinstance(a, Tensor) and a.requires_grad for a in (cos, sin)):
        return _turn(x, cos, sin, interleaved)           # learned positions: every step a node
    return _rotary(x, cos=_raw(cos), sin=_raw(sin), interleaved=bool(interleaved))


def rotary_tables(positions, r, base=10000.0, scaling=None):
    """cos and sin of positions (*S,) times base^(-2i/R), i = 0 .. R/2-1: two NumPy arrays (*S, R/2), float64.

    scaling stretches a context of L0 = original_max_position_embeddings tokens by s = factor >= 1. A dict with the
    names of Hugging Face configs: "rope_type" (or "type"), "default" for none, and what that rule takes:
    "linear": factor. Every frequency / s (Chen et al., 2023).
    "ntk": factor. base s^(R/(R-2)): the first frequency stays, the last is divided by s ("NTK-aware", bloc97, 2023).
    "dynamic": factor, L0. "ntk" with s L/L0 - (s - 1) for s, once the longest L = max(positions) + 1 exceeds L0.
    "yarn": factor, L0; beta_fast=32, beta_slow=1, truncate=True, attention_factor=0.1 ln s + 1, which multiplies cos
        and sin. Pairs that turn more than beta_fast times in L0 tokens stay, those that turn less than beta_slow times
        are divided by s; between, a ramp linear in the pair's number, with whole ends if truncate: as the code of Peng
        et al. (2023) has it, and checkpoints with it (their paper's ramp is linear in the turns).
    "llama3": factor, L0, low_freq_factor, high_freq_factor. The same with a ramp linear in the turns (Llama 3.1, 2024).
    """
    op = "rotary_tables"
    positions, r, base = _positions(op, positions), _size(op, "r", r, 2, even=True), _above(op, "base", base, 1)
    frequency, attention = _frequencies(op, positions, r, base, scaling)
    angle = positions[..., None] * frequency
    return np.cos(angle) * attention, np.sin(angle) * attention


_CONTEXT = "original_max_position_embeddings"
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
_TAKES = {"default": ((), {}), "linear": (("factor",), {}), "ntk": (("factor",), {}),  # what a rule needs, and may have
          "dynamic": (("factor", _CONTEXT), {}), "yarn": (("factor", _CONTEXT), _YARN),
          "llama3": (("factor", _CONTEXT, "low_freq_factor", "high_freq_factor"), {})}


def _frequencies(op, positions, r, base, scaling):
    """Radians per position of each pair (R/2,), and the number that multiplies cos and sin."""
    kind, given = _scaling(op, scaling)
    s, context = given.get("factor", 1.0), given.get(_CONTEXT)
    if kind == "dynamic":
        s = s * max(positions.max(initial=0) + 1, context) / context - (s - 1)
    if kind in ("ntk", "dynamic"):
        base *= s ** (r / _size(op, f'r - 2 of "{kind}"', r - 2, 1))
    frequency = base ** (-np.arange(0, r, 2) / r)
    stays = 0.0 if kind == "linear" else 1.0             # the share of each frequency that is not divided by s
    if kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        stays = np.clip((context * frequency / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    elif kind == "yarn":
        def turning(times):                              # the (fractional) pair that turns so often in L0 tokens
            return r * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))
        first, last = turning(given["beta_fast"]), turning(given["beta_slow"])
        first, last = (math.floor(first), math.ceil(last)) if given["truncate"] else (first, last)
        first, last = (min(max(x, 0), r - 1) for x in (first, last))
        stays = 1.0 - np.clip((np.arange(r // 2) - first) / (last - first or 0.001), 0.0, 1.0)
    attention = given.get("attention_factor") or (0.1 * math.log(s) + 1.0 if kind == "yarn" else 1.0)
    return stays * frequency + (1.0 - stays) * frequency / s, attention


def _scaling(op, scaling):
    """The rule's name and all its values, checked; every missing and unknown key is named."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, dict):
        raise TypeError(f'[{op}] scaling is a dict, {{"rope_type": "linear", "factor": 2.0}}: got {describe(scaling)}')
    given = {key: value for key, value in scaling.items() if value is not None}
    kind, other = given.pop("rope_type", None), given.pop("type", None)
    kind = other if kind is None else kind
    if kind not in list(_TAKES) or other not in (None, kind):
        raise ValueError(f'[{op}] "rope_type" of scaling is one of {", ".join(_TAKES)}: got {scaling}')
    needs, may = _TAKES[kind]
    wrong = [f"missing {key}" for key in needs if key not in given]
    wrong += [f"unknown {key}" for key in given if key not in (*needs, *may)]
    if wrong:
        raise ValueError(f'[{op}] scaling "{kind}" takes {", ".join([*needs, *may]) or "nothing"}: {", ".join(wrong)}')
    given = may | {key: x if key == "truncate" else _above(op, key, x, 0) for key, x in given.items()}
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        if low in given and not given[low] < given[high]:
            raise ValueError(f"[{op}] {low} is below {high}: got {given[low]} and {given[high]}")
    if given.get("factor", 1.0) < 1.0:
        raise ValueError(f"[{op}] factor is at least 1: got {given['factor']}")
    return kind, given


def sinusoidal_positions(positions, d_model, base=10000.0):
    """sin and cos of p base^(-2i/C) in columns 2i and 2i + 1 (Vaswani et al., 2017): NumPy, float32 (*S, C), C even.
    positions: an array (*S) of them, or a count n, for 0 .. n-1."""
    op = "sinusoidal_positions"
    d_model = _size(op, "d_model", d_model, 2, even=True)
    if not np.ndim(_raw(positions)):
        positions = np.arange(_size(op, "a count of positions", positions, 0))
    cos, sin = rotary_tables(_positions(op, positions), d_model, _above(op, "base", base, 1))
    return np.stack([sin, cos], axis=-1).reshape(*sin.shape[:-1], d_model).astype(np.float32)


def alibi_slopes(n_heads):
    """The slope of each head in ALiBi (Press et al., 2022): 2^(-8 h/H), h = 1 .. H, where H is a power of two; else
    those of the power of two below, and then every other one of the power above: float64 (H,), NumPy."""
    h = _size("alibi_slopes", "n_heads", n_heads, 1)
    p = 1 << (h.bit_length() - 1)                        # the largest power of two up to H
    return 2.0 ** np.concatenate([-8.0 / p * np.arange(1, p + 1), -4.0 / p * np.arange(1, 2 * (h - p), 2)])


def alibi_bias(n_heads, t, s, query_offset=0):
    """-slope |i + query_offset - j| for query i and key j: float32 (H, T, S), to be added to scores as attn_mask.

    Press et al. (2022) with is_causal=True, which hides the keys ahead; without, symmetric. query_offset: see
    `relative_buckets`; (B, 1, 1, 1) of them give (B, H, T, S).
    """
    slopes, away = alibi_slopes(n_heads)[:, None, None], -abs(_ahead("alibi_bias", t, s, query_offset))
    bias = np.empty(np.broadcast_shapes(slopes.shape, away.shape), np.float32)
    return np.multiply(slopes, away, out=bias, casting="same_kind")      # no float64 array of that size on the way


def relative_buckets(t, s, n_buckets=32, max_distance=128, bidirectional=True, query_offset=0):
    """T5's bucket of each query i and key j by the distance j - i - query_offset (Raffel et al., 2020): int64 (T, S).

    Of N buckets the first E = N // 2 hold a distance each; n >= E is in min(N - 1, E + floor((N - E) log(n / E) /
    log(max_distance / E))), exactly. bidirectional: N is n_buckets / 2, and a key ahead is in bucket + N; without it
    (T5's decoder) N is n_buckets, and every key ahead is at distance 0.
    query_offset: the key position of query 0, an integer; or one for each sequence, (B, 1, 1, 1): then (B, 1, T, S).
    A learned table (n_buckets, H) makes the bias, (H, T, S), with a gradient:
    attn_mask=F.moveaxis(F.embedding(buckets, table), -1, -3).
    """
    op = "relative_buckets"
    n = _size(op, "n_buckets", n_buckets, 4, even=True) // 2 if bidirectional else _size(op, "n_buckets", n_buckets, 2)
    exact = n // 2
    m, log_buckets = _size(op, "max_distance", max_distance, exact + 1), n - exact
    starts = list(range(exact + 1))                      # the least distance of each bucket, in whole numbers
    for k in range(1, log_buckets):
        x = int(exact * (m / exact) ** (k / log_buckets))  # the least x with (x/E)^(N-E) >= (max/E)^k, or just below it
        while x**log_buckets * exact**k < m**k * exact**log_buckets:
            x += 1
        starts.append(x)
    ahead = _ahead(op, t, s, query_offset)
    bucket = np.searchsorted(starts, abs(ahead) if bidirectional else np.maximum(-ahead, 0), side="right") - 1
    return bucket + n * (ahead > 0) if bidirectional else bucket


def _ahead(op, t, s, query_offset):
    """How far key j is ahead of query i: j - (i + query_offset), int64 (T, S)."""
    t, s, offset = _size(op, "t", t, 0), _size(op, "s", s, 0), to_host(_raw(query_offset))
    if offset.dtype.kind not in "iu" or (offset.ndim and (offset.ndim != 4 or offset.shape[1:] != (1, 1, 1))):
        raise ValueError(f"[{op}] query_offset is an integer, or integers (B, 1, 1, 1): got {describe(query_offset)}")
    return np.arange(s) - (np.arange(t)[:, None] + offset.astype(np.int64))


def _size(op, name, x, least, even=False):
    n = number(op, name, x, int)
    if isinstance(x, (bool, np.bool_)) or n < least or (even and n % 2):
        raise ValueError(f"[{op}] {name} is an {'even ' if even else ''}integer of at least {least}: got {describe(x)}")
    return n


def _above(op, name, x, bound):
    value = number(op, name, x)
    if isinstance(x, bool) or not bound < value < math.inf:
        raise ValueError(f"[{op}] {name} is a finite number above {bound}: got {describe(x)}")
    return value


def _positions(op, positions):
    try:
        p = to_host(_raw(positions))
    except ValueError:
        raise ValueError(f"[{op}] positions are one array: got rows of different lengths") from None
    if p.dtype.kind not in "iuf":
        raise TypeError(f"[{op}] positions are numbers: got {describe(positions)}")
    if not np.isfinite(p).all():                         # a cosine of nothing
        raise ValueError(f"[{op}] positions are finite: got {p[~np.isfinite(p)][0]}")
    return p
