"""The exercises: their cases, what gives the right answers, and the mistakes that are known by name.

A mistake is written as the student would write it. Each must give a wrong answer in some case, and no two the same
(tests/test_exercises.py). The solved files are in problems/.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.study.exercises.grade import Exercise


def _draw(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Standard normal float64 arrays, the same at every call."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def _dict(names: str, values: Any) -> dict:
    return dict(zip(names.split(), values, strict=True))


# ------------------------------------------------------------------------------------------------ 1, 2: elementwise

_pairs = [_dict("ct a b", _draw(*[shape] * 3, seed=n)) for n, shape in enumerate([(2, 3), (4,), ()])]

add = Exercise("01_add", "add_vjp", ("ct_a", "ct_b"), _pairs,
               forward=lambda c: (F.add, (c["a"], c["b"]), c["ct"]),
               factors=lambda c: {"a": c["a"], "b": c["b"], "2": 2.0},
               wrong=[("this is the forward, a + b; what is asked for are the cotangents of a and b",
                       lambda ct, a, b: (a + b, a + b)),
                      ("this is the local derivative alone, 1 everywhere: the cotangent ct is missing",
                       lambda ct, a, b: (np.ones_like(a), np.ones_like(b))),
                      ("the sign is flipped: that is the rule of a - b", lambda ct, a, b: (-ct, -ct))])

multiply = Exercise("02_multiply", "multiply_vjp", ("ct_a", "ct_b"), _pairs,
                    forward=lambda c: (F.multiply, (c["a"], c["b"]), c["ct"]),
                    factors=lambda c: {"ct": c["ct"], "a": c["a"], "b": c["b"], "2": 2.0},
                    wrong=[("the argument's own value where the other's belongs: (a + da) b changes by da b",
                            lambda ct, a, b: (ct * a, ct * b)),
                           ("this is the forward times ct, ct a b: take the argument itself out",
                            lambda ct, a, b: (ct * a * b, ct * a * b)),
                           ("this is the rule of a quotient, ct / b: a product multiplies",
                            lambda ct, a, b: (ct / b, ct / a))])

# ------------------------------------------------------------------------------------------------- 3: matrix product

# the second case is square and no matrix is symmetric: wrong orders and missing transposes fit, and must show
matmul = Exercise("03_matmul", "matmul_vjp", ("ct_a", "ct_b"),
                  [_dict("ct a b", _draw((2, 4), (2, 3), (3, 4), seed=1)),
                   _dict("ct a b", _draw((3, 3), (3, 3), (3, 3), seed=2))],
                  forward=lambda c: (F.matmul, (c["a"], c["b"]), c["ct"]),
                  wrong=[("the result is transposed", lambda ct, a, b: (b @ ct.T, ct.T @ a)),
                         ("b must be transposed: <ct, da b> = <ct b^T, da>", lambda ct, a, b: (ct @ b, a.T @ ct)),
                         ("the factors are in the wrong order: b stood on the right of a, so b^T goes to the right of "
                          "ct", lambda ct, a, b: (b.T @ ct, a.T @ ct)),
                         ("a must be transposed: <ct, a db> = <a^T ct, db>", lambda ct, a, b: (ct @ b.T, a @ ct)),
                         ("the factors are in the wrong order: a stood on the left of b, so a^T goes to the left of ct",
                          lambda ct, a, b: (ct @ b.T, ct @ a.T))])

# ------------------------------------------------------------------------------- 4, 5: shapes without arithmetic

broadcast = Exercise(
    "04_broadcast", "broadcast_vjp", ("ct_x",),
    [_dict("ct x_shape", [_draw(big, seed=3)[0], small]) for big, small in
     [((2, 3), (3,)), ((2, 3), (2, 1)), ((2, 4, 3), (4, 1)), ((2, 3), ()), ((2, 1), (2, 1)), ((3,), (3,)),
      ((2, 4, 3), (1, 4, 1))]],
    forward=lambda c: (lambda x: F.broadcast_to(x, c["ct"].shape), (np.zeros(c["x_shape"]),), c["ct"]),
    # a sum that is missing over some axis is found by its shape: grade.py names the axis
    wrong=[("a mean where a sum belongs: every copy counts fully",
            lambda ct, x_shape: _unbroadcast(ct, x_shape) * max(1, np.prod(x_shape, dtype=int)) / ct.size),
           ("one copy's cotangent is taken, the others are dropped: they must be added",
            lambda ct, x_shape: ct[(0,) * (ct.ndim - len(x_shape))
                                   + tuple(slice(0, n) for n in x_shape)]),
           ("the axes of length 1 are lost: sum with keepdims=True, or reshape to x_shape",
            lambda ct, x_shape: np.squeeze(_unbroadcast(ct, x_shape)))])


def _unbroadcast(ct, x_shape):
    lead = ct.ndim - len(x_shape)
    return ct.sum(axis=(*range(lead), *(i + lead for i, n in enumerate(x_shape) if n == 1))).reshape(x_shape)


# cubes: there every permutation fits, so that a wrong one gives wrong numbers and not only a wrong shape
transpose = Exercise(
    "05_transpose", "transpose_vjp", ("ct_x",),
    [_dict("ct axes", [_draw(shape, seed=4)[0], axes]) for shape, axes in
     [((3, 4, 2), (1, 2, 0)), ((3, 3, 3), (1, 2, 0)), ((3, 2), (1, 0)), ((2, 5, 3, 4), (0, 2, 1, 3))]],
    forward=lambda c: (lambda x: F.transpose(x, c["axes"]), (np.zeros([c["ct"].shape[i] for i in
                                                                      np.argsort(c["axes"])]),), c["ct"]),
    wrong=[("the same permutation again, where its inverse belongs: axis i of y was axis axes[i] of x, so send it back "
            "there", lambda ct, axes: ct.transpose(axes)),
           ("the axes are reversed, whatever the permutation was", lambda ct, axes: ct.T),
           ("nothing is moved back: ct is returned as it came", lambda ct, axes: ct),
           ("a reshape to x's shape, which keeps the numbers in ct's order: transpose moves them",
            lambda ct, axes: ct.reshape([ct.shape[i] for i in np.argsort(axes)]))])

# ------------------------------------------------------------------------------------------------ 6, 7: softmax


def _softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _row(x):
    return x.sum(axis=-1, keepdims=True)


# the rule takes the output: the forward of the case goes through log y, whose softmax is y again; square: axes may mix
_soft = [dict(ct=_draw(shape, seed=5)[0], y=_softmax(_draw(shape, seed=6)[0])) for shape in [(3, 3), (2, 3, 4), (5,)]]

softmax = Exercise(
    "06_softmax", "softmax_vjp", ("ct_x",), _soft,
    forward=lambda c: (F.softmax, (np.log(c["y"]),), c["ct"]),
    factors=lambda c: {"y": c["y"]},
    wrong=[("the row's c is forgotten: y (ct - c), with c = sum of ct y over the row", lambda ct, y: y * ct),
           ("y (1 - y) is the diagonal of the Jacobian alone: every y_j depends on every x_r of its row",
            lambda ct, y: ct * y * (1 - y)),
           ("c is the sum of ct over the row: it must be the sum of ct y", lambda ct, y: y * (ct - _row(ct))),
           ("c is a mean: it must be the sum of ct y over the row",
            lambda ct, y: y * (ct - (ct * y).mean(-1, keepdims=True))),
           ("c is one sum over everything: it must be one per row (axis=-1, keepdims=True)",
            lambda ct, y: y * (ct - (ct * y).sum())),
           ("c is summed along the wrong axis: a row is the last axis",
            lambda ct, y: y * (ct - (ct * y).sum(0, keepdims=True))),
           ("keepdims=True is missing in c: its shape (n,) lines up with the columns, not with the rows",
            lambda ct, y: y * (ct - (ct * y).sum(-1))),
           ("this is the rule of log_softmax, ct - y sum ct", lambda ct, y: ct - y * _row(ct)),
           ("the factor y is missing in front: y (ct - c)", lambda ct, y: ct - _row(ct * y)),
           ("c is added: it must be subtracted", lambda ct, y: y * (ct + _row(ct * y)))])


def _masked(scores, visible):
    hidden = np.where(visible, scores, -np.inf)
    m = hidden.max(axis=-1, keepdims=True)
    e = np.exp(hidden - np.where(m == -np.inf, 0.0, m))
    return e / np.where(_row(e) == 0, 1.0, _row(e))


def _rule(ct, a):
    return a * (ct - _row(ct * a))


def _masked_case(seed, shape, huge=False, empty=False, level=0.0):
    ct, scores, coin = _draw(shape, shape, shape, seed=seed)
    visible = coin > -0.3
    visible[..., 0], visible[..., 1] = True, False       # every row sees something and misses something
    scores += level                                      # e^1000 overflows, unless the maximum is taken out
    if huge:
        scores[..., 1] = 2000.0                          # hidden: as the maximum it would wipe out all others
    if empty:
        visible[-1] = False
    return dict(ct=ct, scores=scores, visible=visible)


def _late_mask(ct, scores, visible):
    a = np.where(visible, _softmax(scores), 0.0)         # not normalised over the visible set
    return _rule(ct, a)


def _overflowing(scores, visible):
    e = np.where(visible, np.exp(scores), 0.0)
    return e / np.where(visible.any(-1, keepdims=True), _row(e), 1.0)


def _hidden_maximum(ct, scores, visible):
    e = np.where(visible, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = _row(e)
    return _rule(ct, e / np.where(visible.any(-1, keepdims=True), total, 1.0))


def _plain_minus_infinity(ct, scores, visible):
    return _rule(ct, _softmax(np.where(visible, scores, -np.inf)))


def _large_negative(ct, scores, visible):
    return _rule(ct, _softmax(np.where(visible, scores, -1e9)))


masked_softmax = Exercise(
    "07_masked_softmax", "masked_softmax_vjp", ("G_S",),
    [_masked_case(7, (4, 5)), _masked_case(8, (3, 4), huge=True), _masked_case(9, (3, 4), empty=True),
     _masked_case(10, (2, 3, 4), level=1000.0)],
    forward=lambda c: (lambda s: F.masked_softmax(s, c["visible"], empty_rows="zeros"), (c["scores"],), c["ct"]),
    wrong=[("the mask is forgotten: the softmax runs over hidden keys too", lambda ct, scores, visible:
            _rule(ct, _softmax(scores))),
           ("the mask is forgotten, and so is the maximum: large scores overflow", lambda ct, scores, visible:
            _rule(ct, np.exp(scores) / _row(np.exp(scores)))),
           ("the maximum is not subtracted: e^(scores in the hundreds) overflows",
            lambda ct, scores, visible: _rule(ct, _overflowing(scores, visible))),
           ("the mask is applied to the result only: A itself still counts the hidden keys in its sum",
            lambda ct, scores, visible: np.where(visible, _rule(ct, _softmax(scores)), 0.0)),
           ("the hidden weights are set to 0 after the softmax: the visible ones no longer sum to 1", _late_mask),
           ("the mask is upside down: True = this key may be seen",
            lambda ct, scores, visible: _rule(ct, _masked(scores, ~visible))),
           ("the maximum is taken over hidden scores too: a huge one makes every visible e^(...) underflow to 0",
            _hidden_maximum),
           ("a row that sees nothing gives NaN (-inf - -inf, or 0 / 0): it must give zeros", _plain_minus_infinity),
           ("a row that sees nothing gives the softmax of its hidden scores: a finite minus infinity makes them all "
            "equal; it must give zeros", _large_negative),
           ("the row's c is forgotten: A (G_A - c)", lambda ct, scores, visible: _masked(scores, visible) * ct),
           ("c is the sum of G_A over the row: it must be the sum of A G_A (A.10.7)",
            lambda ct, scores, visible: _masked(scores, visible) * (ct - _row(np.where(visible, ct, 0.0)))),
           ("this is A, the forward: what is asked for is G_S", lambda ct, scores, visible: _masked(scores, visible))])

# --------------------------------------------------------------------------------------------- 8: layer norm


def _norm_case(shape, seed):
    ct, x, weight = _draw(shape, shape, shape[-1:], seed=seed)
    mean, rstd = x.mean(-1, keepdims=True), 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return dict(ct=ct, x=x, weight=weight, mean=mean, rstd=rstd)


def _norm(x_terms=("mean", "xhat"), use_weight=True, average=True, g_weight=None, sums=(True, True), hat=True):
    """The right rule with one thing changed."""
    def run(ct, x, weight, mean, rstd):
        xhat = (x - mean) * rstd
        g = ct * weight if use_weight else ct
        n = 1 if average else x.shape[-1]
        ct_x = g.copy()
        if "mean" in x_terms:
            ct_x = ct_x - g.mean(-1, keepdims=True) * n
        if "xhat" in x_terms:
            ct_x = ct_x - xhat * (g * xhat).mean(-1, keepdims=True) * n
        rows = tuple(range(ct.ndim - 1))
        ct_w = ct * (xhat if hat else x) if g_weight is None else g_weight(ct, x, weight, xhat)
        return (ct_x * rstd, ct_w.sum(axis=rows) if sums[0] else ct_w, ct.sum(axis=rows) if sums[1] else ct)
    return run


layer_norm = Exercise(
    "08_layer_norm", "layer_norm_vjp", ("ct_x", "ct_weight", "ct_bias"),
    [_norm_case((4, 3), 11), _norm_case((2, 3, 5), 12)],
    forward=lambda c: (F.layer_norm, (c["x"], c["weight"], np.zeros_like(c["weight"])), c["ct"]),
    factors=lambda c: {"rstd": c["rstd"], "weight": c["weight"], "C": float(c["x"].shape[-1])},
    wrong=[("the term avg(g) is missing: the mean depends on x too", _norm(("xhat",))),
           ("the term xhat avg(g xhat) is missing: rstd depends on x too", _norm(("mean",))),
           ("both averages are missing: the mean and rstd depend on x too", _norm(())),
           ("the weight is forgotten: g = ct * weight, not ct", _norm(use_weight=False)),
           ("sums where averages belong: each avg( ) divides by C", _norm(average=False)),
           ("multiplied with x where xhat belongs: what the weight multiplies is xhat", _norm(hat=False)),
           ("multiplied with the weight, which belongs into ct_x only",
            _norm(g_weight=lambda ct, x, weight, xhat: ct * xhat * weight)),
           ("xhat is forgotten: this is ct_bias", _norm(g_weight=lambda ct, x, weight, xhat: ct)),
           ("not summed over the leading axes (*S): one weight serves all rows", _norm(sums=(False, True))),
           ("not summed over the leading axes (*S): one bias serves all rows", _norm(sums=(True, False)))])

# ---------------------------------------------------------------------------------------------- 9: attention


def _attention_case(t, s, d, dv, seed, causal=False):
    ct, q, k, v = _draw((t, dv), (t, d), (s, d), (s, dv), seed=seed)
    visible = np.tril(np.ones((t, s), bool)) if causal else np.ones((t, s), bool)
    return dict(ct=ct, q=q, k=k, v=v, a=_masked(q @ k.T / np.sqrt(d), visible))


def _scale(case):
    return {"1/sqrt(D)": case["q"].shape[1] ** -0.5}


def _attention(c=True, weigh=True, scale_q=1.0, scale_k=1.0, transposed_s=True, transposed_a=True, from_s=None):
    """(A.10.5) to (A.10.9) with one thing changed."""
    def run(ct, q, k, v, a):
        scale, g_a = q.shape[1] ** -0.5, ct @ v.T
        g_s = (a * (g_a - (_row(a * g_a) if c else 0.0)) if weigh else g_a) if from_s is None else from_s(a, g_a)
        return (g_s @ k * scale**scale_q, (g_s.T if transposed_s else g_s) @ q * scale**scale_k,
                (a.T if transposed_a else a) @ ct)
    return run


attention = Exercise(
    "09_attention", "attention_vjp", ("G_Q", "G_K", "G_V"),
    [_attention_case(3, 4, 5, 2, 13), _attention_case(4, 4, 3, 3, 14, causal=True)],
    forward=lambda c: (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, (c["a"] > 0)),
                       (c["q"], c["k"], c["v"]), c["ct"]),
    factors=_scale,
    wrong=[("the factor 1/sqrt(D) is missing", _attention(scale_q=0, scale_k=0)),
           ("the factor 1/sqrt(D) is there twice", _attention(scale_q=2, scale_k=2)),
           ("multiplied by sqrt(D) where it must be divided", _attention(scale_q=-1, scale_k=-1)),
           ("the row's c is forgotten: G_S = A (G_A - c) (A.10.7)", _attention(c=False)),
           ("the softmax is passed over: G_S is A (G_A - c) (A.10.7), not G_A", _attention(weigh=False)),
           ("c is the sum of G_A over the row: it must be the sum of A G_A (A.10.7)",
            _attention(from_s=lambda a, g: a * (g - _row(np.where(a > 0, g, 0.0))))),
           ("c is one sum over everything: it must be one per row (axis=1, keepdims=True)",
            _attention(from_s=lambda a, g: a * (g - (a * g).sum()))),
           ("keepdims=True is missing in c: its shape (T,) lines up with the columns, not with the rows",
            _attention(from_s=lambda a, g: a * (g - (a * g).sum(axis=1)))),
           ("only the Jacobian's diagonal A (1 - A) is used: every A_ij depends on every score of its row",
            _attention(from_s=lambda a, g: a * (1 - a) * g)),
           ("G_S must be transposed: K stands transposed in S = Q K^T (A.10.9)", _attention(transposed_s=False)),
           ("A must be transposed: G_V = A^T G_O (A.10.5)", _attention(transposed_a=False))])

# ---------------------------------------------------------------------------------------------- 10: shared heads


def _head_case(kv_head, heads, seed):
    return dict(ct=_draw((len(kv_head), 2, 3), seed=seed)[0], kv_head=kv_head, heads=heads)


def _heads(put):
    def run(ct, kv_head, heads):
        out = np.zeros((heads, *ct.shape[1:]), ct.dtype)
        put(out, ct, list(kv_head))
        return out
    return run


def _mean_heads(out, ct, g):
    np.add.at(out, g, ct)
    out /= np.maximum(np.bincount(g, minlength=len(out)), 1)[:, None, None]


def _in_order(ct, kv_head, heads):
    return ct.reshape(heads, len(kv_head) // heads, *ct.shape[1:]).sum(axis=1)


shared_heads = Exercise(
    "10_shared_heads", "read_heads_vjp", ("ct_x",),
    [_head_case((0, 0, 1, 1), 2, 15), _head_case((1, 0, 1, 1), 2, 16), _head_case((0, 2, 0), 3, 17),
     _head_case((0, 1, 2), 3, 18), _head_case((0, 0, 0), 1, 19)],
    forward=lambda c: (lambda x: F.take(x, np.array(c["kv_head"]), axis=0),
                       (np.zeros((c["heads"], *c["ct"].shape[1:])),), c["ct"]),
    wrong=[("not summed over the heads that share: the last one wins (out[index] = ct, or out[index] += ct with an "
            "index that repeats: NumPy adds such an index once)", _heads(lambda out, ct, g: out.__setitem__(g, ct))),
           ("a mean over the heads that share, where a sum belongs", _heads(_mean_heads)),
           ("only the first head that reads is taken; what the heads that share send back must be summed",
            _heads(lambda out, ct, g: [out.__setitem__(h, ct[g.index(h)]) for h in set(g)])),
           ("the map is ignored and the heads are shared in order: head r reads kv_head[r]", _in_order),
           ("this is the forward's indexing again, ct[kv_head]: cotangents must go back to the heads they came from",
            lambda ct, kv_head, heads: ct[list(kv_head)]),
           ("not summed over the heads that share: ct is returned as it came, one for each query head",
            lambda ct, kv_head, heads: ct)])

# ------------------------------------------------------------------------------- 11, 12: attention in tiles


def _tiled_case(t, s, d, dv, block, seed, scale=1.0):
    q, k, v = _draw((t, d), (s, d), (s, dv), seed=seed)
    return dict(q=q * scale, k=k, v=v, block=block)


# blocks that do not divide S; a single block; scores in the hundreds, which overflow without the maximum
# D = 5 first: for D = 4 a factor of 2 would pass for a missing 1/sqrt(D)
_tiled = [_tiled_case(3, 7, 5, 2, 3, 20), _tiled_case(4, 4, 3, 3, 2, 21), _tiled_case(2, 6, 4, 2, 6, 22),
          _tiled_case(3, 8, 4, 2, 2, 23, scale=600.0)]


def _plain(q, k, v):
    s = q @ k.T / np.sqrt(q.shape[1])
    shift = s.max(axis=1, keepdims=True)
    total = np.exp(s - shift).sum(axis=1, keepdims=True)
    return np.exp(s - shift) / total @ v, (shift + np.log(total))[:, 0]


def _plain_by_minigrad(c):
    o = F.scaled_dot_product_attention(c["q"], c["k"], c["v"])
    return np.asarray(o), np.asarray(F.logsumexp(c["q"] @ c["k"].T / np.sqrt(c["q"].shape[1]), axis=1))


def _online(shrink_l=True, shrink_o=True, divide=True, maximum="running", lse=lambda m, total: m + np.log(total),
            scaled=True, last=True):
    """The online softmax with one thing changed."""
    def run(q, k, v, block):
        m, total, o = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), v.shape[1]))
        for start in range(0, len(k) if last else len(k) // block * block, block):
            s = q @ k[start:start + block].T / (np.sqrt(q.shape[1]) if scaled else 1.0)
            new = {"running": np.maximum(m, s.max(axis=1)), "block": s.max(axis=1), "none": np.zeros(len(q))}[maximum]
            p, shrink = np.exp(s - new[:, None]), np.exp(m - new) if start else np.zeros(len(q))
            total = total * (shrink if shrink_l or not start else 1.0) + p.sum(axis=1)
            o = o * (shrink if shrink_o or not start else np.ones(len(q)))[:, None] + p @ v[start:start + block]
            m = new
        return o / total[:, None] if divide else o, lse(m, total)
    return run


def _long(names):
    """Arguments of one long case: T = S = 512 in blocks of 32, where all scores take 2 MB."""
    case = _tiled_case(512, 512, 4, 4, 32, 24)
    if "ct" in names:
        o, lse = _plain(case["q"], case["k"], case["v"])
        case = dict(ct=_draw((512, 4), seed=25)[0], **{n: case[n] for n in "qkv"}, o=o, lse=lse, block=32)
    return case, 512 * 512 * 8, "all T S scores are in memory; keep to blocks of (T, block)"


online_softmax = Exercise(
    "11_online_softmax", "online_attention", ("O", "lse"), _tiled, right=_plain_by_minigrad,
    memory=lambda: _long("qkv"),
    factors=_scale,
    wrong=[("l is not rescaled when the maximum grows: l = l shrink + sum of p", _online(shrink_l=False)),
           ("o is not rescaled when the maximum grows: o = o shrink + p v", _online(shrink_o=False)),
           ("neither l nor o is rescaled when the maximum grows", _online(shrink_l=False, shrink_o=False)),
           ("the division by l at the end is missing", _online(divide=False)),
           ("the maximum is not subtracted: e^(scores in the hundreds) overflows", _online(maximum="none")),
           ("lse is the logarithm of l alone: the maximum was taken out, add it: m + log l",
            _online(lse=lambda m, total: np.log(total))),
           ("lse is m + l: the logarithm is missing, m + log l", _online(lse=lambda m, total: m + total)),
           ("lse is the maximum m alone: m + log l", _online(lse=lambda m, total: m)),
           ("the factor 1/sqrt(D) is missing in the scores", _online(scaled=False)),
           ("the last block, which is shorter, is left out", _online(last=False))])


def _backward(scale_q=1.0, scale_k=1.0, c="o", normalised=True, add=True, weigh=True, transposed=True):
    """The tiled backward with one thing changed."""
    def run(ct, q, k, v, o, lse, block):
        scale, g_q, g_k, g_v = q.shape[1] ** -0.5, np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for start in range(0, len(k), block):
            j = slice(start, start + block)
            p = np.exp(q @ k[j].T * scale - (lse[:, None] if normalised else 0.0))
            g_a = ct @ v[j].T
            row = {"o": _row(ct * o), "block": _row(p * g_a), "none": 0.0, "ct": _row(ct)}[c]
            g_s = p * (g_a - row) if weigh else g_a - row
            g_q = (g_q if add else 0.0) + g_s @ k[j] * scale**scale_q
            g_k[j], g_v[j] = g_s.T @ q * scale**scale_k, p.T @ ct
        return g_q, g_k, g_v
    return run


def _with_residuals(case, seed):
    o, lse = _plain(case["q"], case["k"], case["v"])
    return dict(ct=_draw(o.shape, seed=seed)[0], **{n: case[n] for n in "qkv"}, o=o, lse=lse, block=case["block"])


tiled_attention = Exercise(
    "12_tiled_attention", "tiled_attention_vjp", ("G_Q", "G_K", "G_V"),
    [_with_residuals(case, 26 + n) for n, case in enumerate(_tiled[:3])],
    forward=lambda c: (F.scaled_dot_product_attention, (c["q"], c["k"], c["v"]), c["ct"]),
    memory=lambda: _long("ct"),
    factors=_scale,
    wrong=[("the factor 1/sqrt(D) is missing", _backward(scale_q=0, scale_k=0)),
           ("the factor 1/sqrt(D) is there twice", _backward(scale_q=2, scale_k=2)),
           ("multiplied by sqrt(D) where it must be divided", _backward(scale_q=-1, scale_k=-1)),
           ("the row's c is forgotten: G_S = p (G_A - c) (A.10.7)", _backward(c="none")),
           ("c is summed over the block only: it is a sum over all keys; use ct . O, which is the same",
            _backward(c="block")),
           ("c is the sum of ct: it must be the sum of ct O over the row", _backward(c="ct")),
           ("lse is not subtracted in p: these are e^S, not the weights e^(S - lse)", _backward(normalised=False)),
           ("only the last block's contribution is left: every block adds to G_Q (+=)", _backward(add=False)),
           ("the factor p is missing: G_S = p (G_A - c) (A.10.7)", _backward(weigh=False))])

EXERCISES = (add, multiply, matmul, broadcast, transpose, softmax, masked_softmax, layer_norm, attention, shared_heads,
             online_softmax, tiled_attention)
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
