"""Scaled dot-product attention on raw NumPy arrays: the fused and the tiled kernel.

Equation numbers are those of Appendix A.10. Legend: B batch, T query positions, S key positions,
H heads (Hq of the queries, Hkv of keys and values), D head width (Dv of the values).

For one query row i of one head, with its visible set V_i:

    S_ij = scale q_i . k_j                                                            (A.10.1)
    E_ij = exp(S_ij - m_i) for j in V_i, else 0;   z_i = sum_j E_ij;   A = E / z      (A.10.2)
    O    = A V                                                                        (A.10.3)

`fused` keeps E, all of it. `tiled` walks over tiles of keys and keeps one number a row, the
log-sum-exp m + log z, from which its backward computes every tile of A again: memory grows with T.

All four functions take, in this order and by these names:

    q (*L, Hq, T, D)   k (*L, Hkv, S, D)   v (*L, Hkv, S, Dv)   leading axes L broadcast;
           arrays of two axes have no head axis
    mask   None or bool, broadcasts to (*L, Hq, T, S); True: this key may be seen
    bias   None or float, likewise; added to the scores after the softcap; -inf hides the key
    sinks  None or (Hq,): one score a head that joins the row's sum z and nothing else
    scale, softcap  S is scale q k^T, and with softcap c then c tanh(S / c)
    query_offset, causal, window  row i stands at key position p = i + query_offset; causal: it sees
           j <= p; window w: p - w < j, and unless causal j < p + w too
    kv_head  None, or g(r) of A.10.5 as Hq integers: query head r uses kv head g(r)
    dropout  None or (p, bits): bits(row0, row1, col0, col1, S) is the block of random uint32 words,
           rows counted over (*L, Hq, T); kept where word >= p 2^32, and then divided by 1 - p

A row that sees nothing: o and all gradients are 0, lse is -inf (or its sink). A hidden key may hold
infinities or NaN in K, as its score is overwritten; it must be finite in V, and in the backward in
K, because 0 NaN is NaN in A V and G_S K. float16 is computed in float32; results have the dtype of
their inputs, lse the dtype of the computation. Sums run in an order that does not depend on the
number of threads. o, G_Q, G_K, G_V lie in memory as (*L, rows, H, width): merging heads is free.
"""

import numpy as np

from minigrad.kernels.numpy.attention_blocks import ALL, Backward, Problem, run, runs, stack

# fused: query rows of a block, and bytes of scores of the small heads that one block takes together
ROWS, SLAB_BYTES = 64, 1 << 19
# tiled: query rows and keys of a tile; its scores are what a core's cache holds
TILE_ROWS, KEYS = 256, 512


def fused(q, k, v, mask, bias, sinks, **params):
    """O = A V.  Returns o (*L, Hq, T, Dv) and (lse, z, E, kept); lse and z are (*L, Hq, T).

    E and dropout's kept (None without) are flat: the blocks one after another, without the keys
    that causal or window hide from a whole block.
    """
    p = Problem(q, k, v, mask, bias, sinks, **params)
    blocks = p.blocks(ROWS, SLAB_BYTES)
    o, lse, z_all = p.outputs()
    e_all = np.empty(blocks[-1].place.stop if blocks else 0, p.dtype)
    kept_all = None if p.bits is None else np.empty(e_all.shape, bool)

    def body(b):
        k, v = p.keys_values(b)
        e = p.scores(b, b.keys, p.queries(b), k, out=part(e_all, b))
        m, z, _ = absorb(e, *p.start(b), p.tame)
        p.put(lse, b, m + np.log(z))
        p.put(z_all, b, z)
        if kept_all is not None:
            kept = part(kept_all, b)
            kept[...] = p.kept(b, b.keys)
            e = e * kept
        p.put(o, b, e @ v * (p.boost / nonzero(z)))

    run(blocks, body)
    return p.leave(o), (lse.reshape(p.row_shape), z_all.reshape(p.row_shape), e_all, kept_all)


def fused_backward(ct, q, k, v, mask, bias, sinks, o, lse, z, e, kept, *, need_bias, **params):
    """The gradients of q, k, v, bias, sinks in their shapes; None where there is none to give.

    A = E / z divides whole rows, so G_O and c are divided instead, which are narrower:
    G_V = E^T (G_O / z)  and  G_S = E ((G_O / z) V^T - c / z).
    """
    p = Backward(ct, o, need_bias, q, k, v, mask, bias, sinks, **params)
    z = nonzero(z).reshape(p.c.shape)

    def body(group):
        for b in group:
            p.add_q(b, p.step(b, b.keys, *p.rows(b, z), *p.keys_values(b),
                              part(e, b), part(kept, b)))

    run(p.groups(p.blocks(ROWS, SLAB_BYTES)), body)
    return p.results(q, k, v, bias, sinks, lse)


def tiled(q, k, v, mask, bias, sinks, **params):
    """O = A V without A (A.10.6).  Returns o (*L, Hq, T, Dv) and (lse,), lse (*L, Hq, T)."""
    p = Problem(q, k, v, mask, bias, sinks, **params)
    o, lse, _ = p.outputs()

    def body(group):
        for b, k, v in with_packed(p, group):
            q, (m, z) = p.queries(b), p.start(b)
            total = np.zeros((*q.shape[:-1], v.shape[-1]), p.dtype)
            for keys in tiles(p, b):
                e = p.scores(b, keys, q, k[..., keys, :])
                m, z, shrink = absorb(e, m, z, p.tame)
                if p.bits is not None:
                    e *= p.kept(b, keys)
                total *= shrink
                total += e @ v[..., keys, :]
            p.put(lse, b, m + np.log(z))
            p.put(o, b, total * (p.boost / nonzero(z)))

    run(p.groups(p.blocks(TILE_ROWS)), body)
    return p.leave(o), (lse.reshape(p.row_shape),)


def tiled_backward(ct, q, k, v, mask, bias, sinks, o, lse, *, need_bias, **params):
    """What `fused_backward` returns, from A = exp(S - lse), computed again tile by tile."""
    p = Backward(ct, o, need_bias, q, k, v, mask, bias, sinks, **params)
    m = finite(lse).reshape(p.c.shape)
    z = nonzero(np.exp(lse)).reshape(p.c.shape) if p.tame else np.ones_like(m)

    def body(group):
        for b, k, v in with_packed(p, group):
            q, g, c = p.rows(b, z)
            ct_q = np.zeros_like(q)
            for keys in tiles(p, b):
                e = p.scores(b, keys, q, k[..., keys, :])
                if not p.tame:
                    e -= p.stacked(m, b)
                np.exp(e, out=e)
                ct_q += p.step(b, keys, q, g, c, k[..., keys, :], v[..., keys, :],
                               e, p.kept(b, keys))
            p.add_q(b, ct_q)

    run(p.groups(p.blocks(TILE_ROWS)), body)
    return p.results(q, k, v, bias, sinks, lse)


def absorb(s, m, z, tame):
    """Online softmax: scores s become E = exp(s - m'); returns m', z' and what shrinks old sums.

    m, z (.., rows, 1) are the rows' max and sum before these keys, m', z' with them:
    m' = max(m, max_j s_ij),   z' = z exp(m - m') + sum_j E_ij.
    """
    ones = np.ones(s.shape[-1], s.dtype)  # a product with ones adds up faster than a sum does
    if tame:
        np.exp(s, out=s)
        return m, z + np.vecdot(s, ones)[..., None], 1
    m_new = np.maximum(m, s.max(-1, keepdims=True, initial=-np.inf))
    shift = finite(m_new)
    s -= shift
    np.exp(s, out=s)
    shrink = np.exp(m - shift)
    return m_new, z * shrink + np.vecdot(s, ones)[..., None], shrink


def finite(m):
    """m, and 0 for the -inf of a row that saw nothing yet: exp(-inf - 0) is 0, not NaN."""
    return np.where(m == -np.inf, 0, m)


def nonzero(z):
    """z, and 1 for the 0 of a row that saw nothing: 0 / 1 is 0, not NaN."""
    return np.where(z == 0, 1, z)


def part(flat, b):
    """The block's scores in a flat array of all blocks, (n, p, G rows, keys); None of None."""
    return None if flat is None else flat[b.place].reshape(stack(b.shape))


def with_packed(p, group):
    """The blocks, each with all keys and values of its head, contiguous: tiles read them often."""
    head = None
    for b in group:
        if (b.n, b.kv) != head:
            head = b.n, b.kv
            k, v = map(np.ascontiguousarray, p.keys_values(b._replace(keys=ALL)))
        yield b, k, v


def tiles(p, b):
    """The block's keys, about KEYS at a time, without those that the mask hides from all rows."""
    return [keys for keys in runs(b.keys.start, b.keys.stop, KEYS) if p.sees_any(b, keys)]
