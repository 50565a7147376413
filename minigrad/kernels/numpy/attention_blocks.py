"""The pieces of an attention problem: how `attention` cuts it up, and the mathematics of one piece.

A `Problem` brings every array to one shape at the border, once. With the query heads arranged as
P stacks of G heads that share a kv head (A.10.5; P G = Hq):

    q, o, ct  (N, P, G, T, width)     k, v  (N, Hkv, S, width)     mask, bias  (N, P, G, T, S)

N counts all leading axes. An axis of length 1 is shared by every block: nothing is repeated. A
`Block` is what one step works on: some batch entries, some stacks, a run of query rows, and the
keys that any of those rows may see. Its heads stand as one matrix per stack, (n, p, G rows, width),
so that the products of A.10.3 and A.10.5 run at once over all heads that share a key.
"""

from collections import defaultdict
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from minigrad.backend.random import drop_below
from minigrad.backend.threads import BLOCK_BYTES, for_rows
from minigrad.kernels.numpy.blocks import computed_in

ALL = slice(None)


class Block(NamedTuple):
    n: slice  # batch entries
    stack: slice  # stacks of query heads
    kv: slice  # their kv heads
    rows: slice  # query positions
    keys: slice  # key positions
    shape: tuple  # of its scores: (n, p, G, rows, keys)
    place: slice  # where they lie in a flat array that holds all blocks, one after another


class Problem:
    """One call of an attention kernel; the arguments are those of `attention.fused`."""

    def __init__(self, q, k, v, mask, bias, sinks, *, scale, query_offset, causal, window, softcap,
                 kv_head, dropout):
        self.out_dtype, self.dtype = q.dtype, computed_in(q.dtype)
        flat = max(q.ndim, k.ndim, v.ndim) == 2
        q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
        q, k, v = (x.astype(self.dtype, copy=False) for x in (q, k, v))
        self.lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        self.N, (Hq, self.T), (Hkv, self.S) = prod(self.lead), q.shape[-3:-1], k.shape[-3:-1]
        self.row_shape = self.lead + (() if flat else (Hq,)) + (self.T,)

        if kv_head is None:
            kv_head = range(Hq) if Hkv > 1 else [0] * Hq
        self.kv_head = [int(g) for g in kv_head]
        self.G = max(1, Hq // max(1, Hkv))
        self.neighbours = self.kv_head == [r // self.G for r in range(self.G * Hkv)]
        if not self.neighbours:  # heads that share do not stand side by side: no stacking
            self.G = 1
        self.P = Hq // self.G

        self.q, self.k, self.v = self.enter(q, split=True), self.enter(k), self.enter(v)
        self.mask = None if mask is None else self.enter(mask, split=True)
        self.bias = None if bias is None else self.enter(bias, split=True)
        self.sinks = None if sinks is None else sinks.reshape(self.P, self.G, 1, 1)
        # NaN + -inf is NaN: such scores must be overwritten where a bias of -inf hides them.
        self.overwrite = bias is not None and not np.isfinite(self.k).all()
        self.scale, self.softcap = scale, softcap
        self.p, self.bits = dropout or (0.0, None)
        self.boost = 0.0 if self.p == 1 else 1 / (1 - self.p)  # makes up for what dropout takes
        # Row i stands at key position i + offset, and sees `before` keys left of it, `after` right.
        self.offset = query_offset or 0
        self.before = window - 1 if window else self.T + self.S + abs(self.offset)
        self.after = 0 if causal else self.before
        # The shift m of A.10.2 only keeps exp from overflowing: softmax does not see it. Where
        # |S_ij| <= scale |q_i| |k_j| is small, m = 0 does, and saves two passes over the scores.
        self.tame = (bias is None and sinks is None and self.T > 1
                     and abs(scale) * longest(self.q) * longest(self.k) < 32)
        self.sums, self.apart_heads = [], True  # which gradients blocks add to: see `Backward`

    # --- the border, in and out ---------------------------------------------------------------

    def enter(self, x, split=False):
        """(*L, H, rows, width) as (N or 1, H, rows, width); split turns H into P, G."""
        x = x.reshape((1,) * (3 - x.ndim) + x.shape)
        lead, (H, *tail) = x.shape[:-3], x.shape[-3:]
        if prod(lead) == 1:
            lead = (1,)
        else:  # copies only an array that is shared along some, not all, of several leading axes
            lead, x = (self.N,), np.broadcast_to(x, self.lead + x.shape[-3:])
        heads = (H,) if not split else (1, 1) if H == 1 else (self.P, self.G)
        return x.reshape(*lead, *heads, *tail)

    def zeros(self, n, x, width):
        """Zeros like x but for its first and last axis. In memory rows come before heads, so that
        merging heads and width (the concatenation of heads in A.10.5) is a view."""
        _, *heads, rows, _ = x.shape
        return np.moveaxis(np.zeros((n, rows, *heads, width), self.dtype), 1, -2)

    def outputs(self):
        """Room for o (N, P, G, T, Dv), and for lse and z, (N, P, G, T, 1)."""
        rows = self.N, self.P, self.G, self.T, 1
        o = self.zeros(self.N, self.q, self.v.shape[-1])
        return o, np.empty(rows, self.dtype), np.empty(rows, self.dtype)

    def leave(self, o):
        """o (N, P, G, T, Dv) as (*L, Hq, T, Dv)."""
        return o.reshape(self.row_shape + o.shape[-1:]).astype(self.out_dtype, copy=False)

    # --- cutting ------------------------------------------------------------------------------

    def blocks(self, rows, slab_bytes=0):
        """All blocks of `rows` stacked rows; they take several heads if those fit in slab_bytes."""
        rows = max(1, rows // self.G)
        fit = slab_bytes // max(1, self.G * min(rows, self.T) * self.S * self.dtype.itemsize)
        fit = max(1, fit) if self.neighbours else 1
        blocks, start = [], 0
        for n in runs(0, self.N, max(1, fit // max(1, self.P))):
            for stack in runs(0, self.P, fit):
                kv = slice(self.kv_head[stack.start * self.G],
                           self.kv_head[stack.stop * self.G - 1] + 1)
                for r in runs(0, self.T, rows):
                    low = min(max(0, r.start + self.offset - self.before), self.S)
                    keys = slice(low, max(low, min(self.S, r.stop + self.offset + self.after)))
                    shape = (size(n), size(stack), self.G, size(r), size(keys))
                    place = slice(start, start := start + prod(shape))
                    blocks.append(Block(n, stack, kv, r, keys, shape, place))
        return blocks

    def groups(self, blocks):
        """Blocks of one head, and blocks that add to one gradient, together: they keep their order
        in one thread, so that a sum does not depend on the number of threads."""
        apart = all(len(x) == self.N for x in self.sums)
        groups = defaultdict(list)
        for b in blocks:
            groups[apart and b.n.start, self.apart_heads and b.kv.start].append(b)
        return list(groups.values())

    def stacked(self, x, b):
        """The block's rows of x (N, P, G, T, width), its heads stacked: (n, p, G rows, width)."""
        x = cut(x, b.n, b.stack, ALL, b.rows)
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[-1])

    def put(self, x, b, part):
        """Store what `stacked` takes."""
        x = cut(x, b.n, b.stack, ALL, b.rows)
        x[...] = part.reshape(x.shape)

    def queries(self, b):
        return self.stacked(self.q, b) * self.scale

    def keys_values(self, b):
        """The block's keys and values, each (n, p, keys, width)."""
        return cut(self.k, b.n, b.kv)[:, :, b.keys], cut(self.v, b.n, b.kv)[:, :, b.keys]

    # --- the mathematics of one block, or of some keys of it ------------------------------------

    def scores(self, b, keys, q, k, out=None):
        """S of A.10.1, (n, p, G rows, keys): softcapped, biased, -inf at hidden keys."""
        s = self.capped(q, k, out)
        wide = s.reshape(*b.shape[:4], -1)  # the same memory with G and rows apart
        if self.bias is not None:
            bias = cut(self.bias, b.n, b.stack, ALL, b.rows, keys)
            wide += bias
            if self.overwrite:
                np.copyto(wide, -np.inf, where=bias == -np.inf)
        # Only the strips of keys that the band's two edges run through need work.
        left = b.rows.stop - 1 + self.offset - self.before - keys.start
        right = b.rows.start + self.offset + self.after + 1 - keys.start
        if left > 0 or right < size(keys):
            at = np.arange(b.rows.start, b.rows.stop)[:, None] + self.offset
            key, left, right = np.arange(keys.start, keys.stop), max(0, left), max(0, right)
            np.copyto(wide[..., :left], -np.inf, where=key[:left] < at - self.before)
            np.copyto(wide[..., right:], -np.inf, where=key[right:] > at + self.after)
        if self.mask is not None:
            seen = cut(self.mask, b.n, b.stack, ALL, b.rows, keys)
            if not seen.all():
                np.copyto(wide, -np.inf, where=~seen)
        return s

    def capped(self, q, k, out=None):
        """S = q k^T, with q already scaled; after the softcap c tanh(S / c)."""
        s = np.matmul(q, k.swapaxes(-1, -2), out=out)
        if self.softcap:
            s /= self.softcap
            np.tanh(s, out=s)
            s *= self.softcap
        return s

    def sees_any(self, b, keys):
        return self.mask is None or cut(self.mask, b.n, b.stack, ALL, b.rows, keys).any()

    def start(self, b):
        """Max m and sum z of a row before its first key. A sink is a key seen first, of value 0."""
        shape = (*b.shape[:4], 1)
        if self.sinks is None:
            m = np.full(shape, 0 if self.tame else -np.inf, self.dtype)
            z = np.zeros(shape, self.dtype)
        else:
            m = np.broadcast_to(self.sinks[b.stack], shape).astype(self.dtype)
            z = np.ones(shape, self.dtype)
        return m.reshape(stack(shape)), z.reshape(stack(shape))

    def kept(self, b, keys):
        """What dropout leaves, as bool (n, p, G rows, keys); None without dropout."""
        if self.bits is None:
            return None
        kept = np.empty((*b.shape[:4], size(keys)), bool)
        for n, s, g in np.ndindex(b.shape[:3]):
            head = ((b.n.start + n) * self.P + b.stack.start + s) * self.G + g
            low, high = head * self.T + b.rows.start, head * self.T + b.rows.stop
            word = self.bits(low, high, keys.start, keys.stop, self.S)
            kept[n, s, g] = word >= drop_below(self.p)
        return kept.reshape(stack(kept.shape))


class Backward(Problem):
    """A problem with the cotangent of its output, and the gradients, summed up block by block."""

    def __init__(self, ct, o, need_bias, *arrays, **params):
        super().__init__(*arrays, **params)
        ct, o = (x if x.ndim > 2 else x[None] for x in (ct, o))
        ct, o = (self.enter(x.astype(self.dtype, copy=False), split=True) for x in (ct, o))
        # c of A.10.7: sum_j A_ij (G_A)_ij = sum_j A_ij (G_O)_i . v_j = (G_O)_i . o_i
        self.ct, self.c = ct, np.einsum("npgtd,npgtd->npgt", ct, o)[..., None]
        self.ct_q, self.ct_k, self.ct_v = (
            self.zeros(len(x), x, x.shape[-1]) for x in (self.q, self.k, self.v))
        self.sums, self.ct_bias = [self.ct_q, self.ct_k, self.ct_v], None
        if need_bias:
            self.ct_bias = np.zeros(self.bias.shape, self.dtype)
            self.sums.append(self.ct_bias)
            self.apart_heads = self.ct_bias.shape[1] == self.P

    def rows(self, b, z):
        """The block's rows of scaled q, of G_O / (1 - p) / z, and of c / z."""
        z = self.stacked(z, b)
        g = self.stacked(self.ct, b) * (self.boost / z)
        return self.queries(b), g, self.stacked(self.c, b) / z

    def step(self, b, keys, q, g, c, k, v, e, kept):
        """Add these keys' share to G_K, G_V and the bias gradient; return that of G_Q / scale.

        q, g, c are those of `rows`, e (n, p, G rows, keys) is E = A z: the z of the rows cancels.
        """
        s = g @ v.swapaxes(-1, -2)  # A.10.6
        dropped = e
        if kept is not None:
            s *= kept
            dropped = e * kept
        add(cut(self.ct_v, b.n, b.kv)[:, :, keys], dropped.swapaxes(-1, -2) @ g)  # A.10.5
        s -= c
        s *= e  # A.10.7
        if self.ct_bias is not None:
            add(cut(self.ct_bias, b.n, b.stack, ALL, b.rows, keys), s.reshape(*b.shape[:4], -1))
        if self.softcap:  # the derivative of c tanh(S / c) is 1 - tanh^2
            s *= 1 - (self.capped(q, k) / self.softcap) ** 2
        add(cut(self.ct_k, b.n, b.kv)[:, :, keys], s.swapaxes(-1, -2) @ q)  # A.10.9
        return s @ k  # A.10.8

    def add_q(self, b, part):
        total = cut(self.ct_q, b.n, b.stack, ALL, b.rows)
        add(total, (part * self.scale).reshape(*b.shape[:4], -1))

    def results(self, q, k, v, bias, sinks, lse):
        """The five gradients, in the shapes and dtypes of their arrays."""
        ct_bias = ct_sinks = None
        if self.ct_bias is not None:
            ct_bias = self.leave_like(bias, self.ct_bias)
        if sinks is not None:  # A.10.7 for a key of weight exp(sink - lse) whose G_A is 0
            lse = lse.reshape(self.c.shape)
            share = np.exp(self.sinks - lse) * -self.c
            ct_sinks = share.sum((0, 3, 4)).reshape(sinks.shape).astype(sinks.dtype)
        ct_q, ct_k, ct_v = map(self.leave_like, (q, k, v), (self.ct_q, self.ct_k, self.ct_v))
        return ct_q, ct_k, ct_v, ct_bias, ct_sinks

    def leave_like(self, x, ct):
        """ct (N or 1, heads.., rows, width) in x's shape: summed over leading axes x shares."""
        if ct.size != x.size:
            own = (1,) * (len(self.lead) + 3 - x.ndim) + x.shape
            ct = ct.reshape(self.lead + own[-3:])
            ct = ct.sum(tuple(i for i in range(len(self.lead)) if own[i] == 1))
        return ct.reshape(x.shape).astype(x.dtype, copy=False)


def run(groups, body):
    """body(group) for all groups of blocks, spread over threads."""
    def some(low, high):
        with np.errstate(all="ignore"):  # garbage at hidden keys and log 0 of empty rows are meant
            for group in groups[low:high]:
                body(group)

    for_rows(some, len(groups), BLOCK_BYTES)


def longest(x):
    """The largest length |x_i| of a row of x."""
    return float(np.einsum("...d,...d->...", x, x).max(initial=0)) ** 0.5


def runs(low, high, most):
    """range(low, high) in even runs of at most so many."""
    count = -(-(high - low) // most)
    cuts = [low + (high - low) * i // count for i in range(count + 1)] if count else []
    return [slice(*pair) for pair in pairwise(cuts)]


def size(run):
    return run.stop - run.start


def stack(shape):
    """(n, p, G, rows, width) as (n, p, G rows, width)."""
    n, p, G, rows, width = shape
    return n, p, G * rows, width


def cut(x, *index):
    """The block of x at these slices; an axis of length 1 is shared by every block."""
    return x[tuple(i if n > 1 else ALL for i, n in zip(index, x.shape, strict=False))]


def add(total, part):
    """total += part, summed over the axes that total shares."""
    shared = tuple(i for i, n in enumerate(total.shape) if n != part.shape[i])
    total += part.sum(shared, keepdims=True) if shared else part
