"""Scaled dot-product attention, Appendix A.10: the composition line by line, and the kernels that must equal it."""

from __future__ import annotations

import inspect
import math

import numpy as np

from minigrad.backend.device import is_array, xp
from minigrad.backend.random import Key, drop_below, stream
from minigrad.kernels.numpy import attention as _numpy
from minigrad.kernels.numpy.blocks import promoted
from minigrad.ops.elementwise import array, number, on_device_of, tanh
from minigrad.ops.index import take
from minigrad.ops.shape import broadcast_to, concatenate, reshape, swapaxes
from minigrad.ops.softmax import _masked_softmax, check_empty_choice, check_visible, refuse_empty
from minigrad.tape import _raw, _state, describe, primitive, sample

# "auto" tiles from this many scores a head, where keeping them all becomes slower than computing them again (measured),
# or, if a head is not tiny, from this many scores in all, where they would fill the memory: 256 MB in float32.
TILED_FROM_HEAD, TILED_FROM_ALL, TINY_HEAD = 2 << 20, 64 << 20, 1 << 18


def visible_set(t, s, mask=None, causal=False, query_offset=0, window=None, m=np):
    """The visible sets of A.10.1 as one bool array broadcastable to (..., T, S), or None if every key is seen.

    Query i stands at key position p = i + query_offset; the offset is an integer, or an array (B, 1, 1, 1) of one for
    each sequence. Causal: keys j <= p (A.10.6). Window w: with causal only j > p - w, else |p - j| < w. The mask is one
    more condition.
    """
    seen = [] if mask is None else [mask]
    if causal or window is not None:
        p, j = m.arange(t)[:, None] + query_offset, m.arange(s)
        if causal:
            seen.append(j <= p)
        if window is not None:
            seen += [j > p - window] if causal else [abs(p - j) < window]
    visible = None
    for part in seen:
        visible = part if visible is None else visible & part
    return visible


def document_mask(ids, key_ids=None):
    """Documents packed into one row do not see each other: ids (*L, T) -> bool (*L, 1, T, S), True where ids agree.

    ids: integers, the document of each query; key_ids (*L, S): of each key, if not the same. A negative id is padding:
    no query sees it, and it sees nothing, so its rows are empty: empty_rows="zeros" gives them zeros and no gradient.
    Combines with is_causal and window, and by & with other masks. The mask takes T S bytes; "tiled" skips the tiles
    that it hides.
    """
    ids = _integers("document_mask", ids)
    keys = ids if key_ids is None else _integers("document_mask", key_ids)
    if not ids.ndim or not keys.ndim or ids.shape[:-1] != keys.shape[:-1]:
        raise ValueError(f"[document_mask] ids are (*L, T) and key_ids (*L, S): ids {ids.shape}, key_ids {keys.shape}")
    ids, keys = ids[..., None, :, None], keys[..., None, None, :]
    return (ids == keys) & (ids >= 0)


def padding_mask(lengths, s):
    """Of S keys the first `lengths` of each sequence may be seen: lengths (*L) -> bool (*L, 1, 1, S)."""
    lengths = _integers("padding_mask", lengths)
    if bool(((lengths < 0) | (lengths > s)).any()):
        raise ValueError(f"[padding_mask] a length is in 0 to {s}, the number of keys: got {lengths.tolist()}")
    return xp(lengths).arange(s) < lengths[..., None, None, None]


def _integers(op, x):
    x = _raw(x)
    x = x if is_array(x) else np.asarray(x, dtype=None if np.size(x) else np.int64)
    if x.dtype.kind not in "iu":
        raise TypeError(f"[{op}] takes integers: got {x.dtype}")
    return x


def _composition(q, k, v, mask=None, bias=None, sinks=None, /, scale=1.0, causal=False, query_offset=0, window=None,
                 softcap=None, kv_head=None, dropout=None, refuse_empty_rows=False):
    """A = softmax(scale q k^T) over the visible set, y = A v  (A.10.1 to A.10.3);  with G_A = ct v^T  (A.10.6),
    G_S = A (G_A - sum A G_A)  (A.10.7),  ct_q = scale G_S k  (A.10.8),  ct_k = scale G_S^T q  (A.10.9),
    ct_v = A^T ct  (A.10.5),  ct_bias = G_S,  ct_sinks = -sum a (sum A G_A), a the sink's weight in its row

    kv_head: for each query head r its key/value head g(r) (section 5 of A.10), or None; ct_k and ct_v sum over the
    heads that share. softcap c: scores S become c tanh(S / c), and G_S takes the factor 1 - tanh(S / c)^2.
    """
    if kv_head is not None:
        k, v = take(k, np.array(kv_head), axis=-3), take(v, np.array(kv_head), axis=-3)
    scores = (q @ swapaxes(k, -1, -2)) * scale           # (A.10.1)
    if softcap is not None:
        scores = softcap * tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    m = xp(_raw(scores))
    visible = visible_set(*scores.shape[-2:], _raw(mask), causal, query_offset, window, m)
    if sinks is not None:                                # one more key per head that every row sees, without a value
        column = broadcast_to(reshape(sinks, (-1, 1, 1)[-scores.ndim:]), (*scores.shape[:-1], 1))
        if visible is not None:
            visible = m.broadcast_to(visible, scores.shape)
            visible = m.concatenate([visible, m.ones(column.shape, bool)], axis=-1)
        scores = concatenate([scores, column], axis=-1)
    if refuse_empty_rows:
        _check_rows(_raw(scores), visible)
    a = _masked_softmax(scores, visible)                 # (A.10.2)
    a = a if sinks is None else a[..., :-1]
    if dropout is not None:
        p, key = dropout
        rows = m.arange(math.prod(a.shape[:-1])).reshape(*a.shape[:-1], 1)
        keep = key.bits(rows, m.arange(a.shape[-1]), m) >= m.uint32(drop_below(p))
        a = a * (keep * a.dtype.type(1.0 / (1.0 - p)))
    return a @ v                                         # (A.10.3)


def _check_rows(scores, visible):
    seen = scores > -np.inf if visible is None else (scores > -np.inf) & visible
    refuse_empty("scaled_dot_product_attention", ~seen.any(axis=-1))


def _kernel(name: str):
    """The NumPy kernel `name` and its joint backward, as the engine calls them."""
    run, back = promoted(getattr(_numpy, name)), promoted(getattr(_numpy, name + "_backward"))

    def options(scale, causal, query_offset, window, softcap, kv_head, dropout):
        if dropout is not None:
            p, key = dropout
            dropout = p, lambda r0, r1, c0, c1, s: key.bits(np.arange(r0, r1)[:, None], np.arange(c0, c1)[None])
        return dict(scale=scale, causal=causal, query_offset=query_offset, window=window, softcap=softcap,
                    kv_head=kv_head, dropout=dropout)

    def forward(q, k, v, mask, bias, sinks, refuse_empty_rows, **params):
        o, kept = run(q, k, v, mask, bias, sinks, **options(**params))
        if refuse_empty_rows:
            refuse_empty("scaled_dot_product_attention", np.isneginf(kept[0]))
        return o, kept

    def rule(ct, q, k, v, mask, bias, sinks, y, kept, needs, scale, causal, query_offset, window, softcap, kv_head,
             dropout):
        given = options(scale, causal, query_offset, window, softcap, kv_head, dropout)
        cts = back(ct, q, k, v, mask, bias, sinks, y, *kept, need_bias=needs[4], **given)
        return (*cts[:3], None, *cts[3:])

    return forward, rule, "kept"


_see = np.tril(np.ones((4, 4), bool)) & (np.arange(4) != 1)
_half = {"scale": 0.5}
_rows = [sample((2, 3, 4), (2, 5, 4), (2, 5, 2), **_half),
         sample((3, 4, 2), (3, 4, 2), (3, 4, 2), causal=True, **_half),
         sample((2, 1, 4, 2), (2, 1, 4, 2), (2, 1, 4, 3), _see, **_half),
         sample((4, 2), (4, 2), (4, 2), None, (4, 4), **_half),
         sample((4, 3, 2), (2, 3, 2), (2, 3, 2), kv_head=(0, 0, 1, 1), **_half),
         sample((3, 2, 2), (2, 5, 2), (2, 5, 2), None, (5,), (3,), kv_head=(1, 0, 1), softcap=2.0, causal=True,
                query_offset=3, window=2, **_half),
         sample((2, 3, 2), (2, 3, 2), (2, 3, 2), dropout=(0.5, Key((3, 1))), **_half),
         sample((2, 3, 2), (2, 3, 2), (2, 3, 2), causal=True, query_offset=-1, **_half),
         sample((2, 0, 2), (2, 3, 2), (2, 3, 2))]


def _declare(name: str):
    def attention(*args, **params):
        return _composition(*args, **params)
    attention.__name__, attention.__doc__ = f"attention_{name}", _composition.__doc__
    attention.__signature__ = inspect.signature(_composition)
    return primitive(attention, kernels={"numpy": _kernel(name)}, samples=_rows)


_implementations = {"composed": _composition, "fused": _declare("fused"), "tiled": _declare("tiled")}


def scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                                 enable_gqa=False, *, query_offset=None, window=None, kv_head=None, softcap=None,
                                 sinks=None, empty_rows="raise", implementation="auto"):
    """softmax(q k^T / sqrt(D)) v over each query's visible set: A.10.1 to A.10.3, backward A.10.5 to A.10.9.

    q (*L, Hq, T, D), k (*L, Hkv, S, D), v (*L, Hkv, S, Dv) -> (*L, Hq, T, Dv); leading axes broadcast, none is fine.
    attn_mask: bool, **True = this key may be seen**, or float, added to the scores (-inf hides; it gets a gradient if
        it requires one); broadcastable to (*L, Hq, T, S). Combines with everything below.
    is_causal: query i sees keys j <= i + query_offset. With T != S the offset must be given (S - T with a cache).
    window=w: with is_causal only the last w of those keys; without, |position - key| < w.
    enable_gqa: query head r uses key/value head r // (Hq // Hkv); kv_head=[...] any map g(r) (A.10.5). Their cotangents
        sum over the heads that share.
    scale: default 1/sqrt(D) (A.10.1). softcap=c: scores become c tanh(scores / c) before any mask is added.
    sinks (Hq,): a score per head that joins a row's normalising sum and nothing else.
    dropout_p: on the weights; the bits are recomputed in the backward.
    empty_rows: a row that sees nothing has no softmax; "raise" names the first, "zeros" gives zeros and zero gradients.
    implementation: "composed" (a node for every line), "fused" (keeps A), "tiled" (online softmax, memory O(T): Dao et
        al., 2022), "auto".
    """
    op = "scaled_dot_product_attention"
    q, k, v = array(op, "q", q), array(op, "k", k), array(op, "v", v)
    sinks = None if sinks is None else array(op, "sinks", sinks)
    attn_mask = None if attn_mask is None else array(op, "attn_mask", attn_mask)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim < 2:
            raise ValueError(f"[{op}] q, k and v are (*L, H, T, D): got {name} {x.shape}")
    t, s, d = q.shape[-2], k.shape[-2], q.shape[-1]
    heads, shared = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    if k.shape[-1] != d or v.shape[-2] != s or (v.shape[-3] if v.ndim > 2 else 1) != shared:
        raise ValueError(f"[{op}] q and k share D, k and v share S and heads: q {q.shape}, k {k.shape}, v {v.shape}")
    if not d:
        raise ValueError(f"[{op}] q and k need a width D of at least 1: q {q.shape}, k {k.shape}")
    try:
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise ValueError(f"[{op}] leading axes must broadcast: q {q.shape}, k {k.shape}, v {v.shape}") from None
    kv_head = _kv_map(op, heads, shared, enable_gqa, kv_head)
    if (is_causal or window is not None) and query_offset is None and t != s:
        raise ValueError(f"[{op}] causal or windowed attention of {t} queries over {s} keys is ambiguous: say which "
                         f"key position query 0 has; query_offset={s - t} aligns the ends (decoding with a cache), 0 "
                         "the beginnings")
    if np.ndim(query_offset):
        raise ValueError(f"[{op}] query_offset is one integer: got shape {np.shape(query_offset)}; for one a sequence "
                         "pass attn_mask=F.visible_set(T, S, causal=True, query_offset=offsets of shape (B, 1, 1, 1))")
    query_offset = None if query_offset is None else number(op, "query_offset", query_offset, int)
    if window is not None and (isinstance(window, bool) or number(op, "window", window, int) < 1):
        raise ValueError(f"[{op}] window is an integer of at least 1: got {window!r}")
    scale = 1.0 / math.sqrt(d) if scale is None else number(op, "scale", scale)
    softcap = None if softcap is None else number(op, "softcap", softcap)
    dropout_p = number(op, "dropout_p", dropout_p)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"[{op}] softcap is positive: got {softcap!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"[{op}] dropout_p is in [0, 1): got {dropout_p!r}")
    if implementation not in (*_implementations, "auto"):
        raise ValueError(f'[{op}] implementation is "auto", "composed", "fused" or "tiled": got {implementation!r}')
    check_empty_choice(op, empty_rows)
    shape = (*lead, *((heads,) if q.ndim > 2 or k.ndim > 2 else ()), t, s)
    mask, bias = _split_mask(op, attn_mask, shape)
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"[{op}] sinks holds a score per query head, ({heads},): got {describe(sinks)}")
    # Some rows can be empty only by a mask, or where the positions leave the keys: a plain causal mask costs no check.
    plainly_full = mask is None and bias is None and s > 0 and (
        not is_causal and window is None or (query_offset or 0) == 0 and t <= s or is_causal and window is None
        and (query_offset or 0) >= 0)
    if implementation == "auto":
        large = t * s >= TILED_FROM_HEAD or (t * s >= TINY_HEAD and math.prod(shape) >= TILED_FROM_ALL)
        implementation = "tiled" if large else "fused"
    if _state.composed:
        implementation = "composed"
    return _implementations[implementation](
        q, k, v, None if mask is None else on_device_of(mask, q), None if bias is None else on_device_of(bias, q),
        sinks, scale=scale, causal=bool(is_causal),
        query_offset=query_offset or 0, window=None if window is None else int(window),
        softcap=softcap, kv_head=kv_head,
        dropout=(dropout_p, stream.key()) if dropout_p else None,
        refuse_empty_rows=empty_rows == "raise" and sinks is None and not plainly_full)


def _kv_map(op, heads, shared, enable_gqa, kv_head):
    """g(r) for each query head as a tuple, or None when every head has its own."""
    if kv_head is not None:
        given = np.asarray(kv_head).reshape(-1).tolist()
        if len(given) != heads or not all(isinstance(r, int) and 0 <= r < shared for r in given):
            raise ValueError(f"[{op}] kv_head names for each of {heads} query heads one of {shared} key/value heads, "
                             f"0 to {shared - 1}: got {given}")
        return tuple(given)
    if heads == shared:
        return None
    if not enable_gqa:
        raise ValueError(f"[{op}] {heads} query heads over {shared} key/value heads: pass enable_gqa=True to share "
                         "them in order, or kv_head=[...]")
    if shared == 0 or heads % shared:
        raise ValueError(f"[{op}] query heads must be a multiple of key/value heads to share them evenly: {heads} over "
                         f"{shared}; or pass kv_head=[...]")
    return tuple(r // (heads // shared) for r in range(heads))


def _split_mask(op, attn_mask, shape):
    """(bool mask, None) or (None, additive bias), checked against the shape of the scores."""
    if attn_mask is None:
        return None, None
    if attn_mask.dtype.kind == "f":
        check_visible(op, np.broadcast_to(np.True_, attn_mask.shape), shape)
        return None, attn_mask
    return check_visible(op, attn_mask, shape), None

