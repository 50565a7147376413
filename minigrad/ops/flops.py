"""How much an op computes: the floating-point operations of its products, 2 for a multiply-add, as the field counts."""

from __future__ import annotations

import math

import numpy as np


def flops(op, args, params):
    """Operations of the products in one forward application of the primitive `op` to `args` (Tensors or arrays); 0 for
    an op without products, whose cost is the memory it moves.

    matmul (*S, n, k) @ (k, m): 2 S n k m. attention: 2 (D + Dv) for each pair of a query and a key it may see by
    position (causal, window), times heads and batch; a mask is not looked at. einsum: 2 for each combination of all its
    letters, times the operands but one.
    A backward pass costs the same again for each operand that gets a gradient: see `backward_flops`.
    """
    name = op.name
    shapes = [np.shape(a) for a in args]
    if name in ("matmul", "linear"):
        a, b = shapes[:2]
        rows = math.prod(a[:-1]) if len(b) < 3 else math.prod(
            np.broadcast_shapes(a[:-2], b[:-2])) * (a[-2] if len(a) > 1 else 1)
        return 2 * rows * a[-1] * (b[-1] if len(b) > 1 else 1)
    if name.startswith("attention_"):
        q, k, v = shapes[:3]
        return 2 * (q[-1] + v[-1]) * _rows(q, k, v) * _pairs(q[-2], k[-2], params)
    if name == "einsum":
        sizes = {c: n for term, shape in zip(params["terms"], shapes) for c, n in zip(term, shape) if n != 1}
        return 2 * math.prod(sizes.values()) * (len(shapes) - 1)
    return 0


def backward_flops(op, args, params, needs):
    """Operations of the products in the op's rules, where `needs` says for each argument if it gets a gradient. Each
    operand's cotangent is one product of the forward's size; attention's five are counted as four: a kernel that
    computes the scores anew (tiled) does more work for the same mathematics."""
    once = flops(op, args, params)
    if op.name.startswith("attention_"):
        return 2 * once if any(needs) else 0
    return once * sum(needs[:2] if op.name in ("matmul", "linear") else needs)


def _rows(q, k, v):
    """Over how many (batch, head) pairs attention runs."""
    lead = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    return math.prod(lead) * (q[-3] if len(q) > 2 else 1)


def _pairs(t, s, params):
    """Of t s pairs of query and key those that causality and the window leave: `visible_set(...).sum()`, without making
    it. Query i at position p sees keys first(p) .. end(p) - 1, both cut to 0 .. S, so the count is a sum of ends less
    one of firsts."""
    causal, offset, window = params["causal"], params["query_offset"], params["window"]
    ends = _clipped_sum(offset + (1 if causal else window), t, s) if causal or window is not None else t * s
    return ends if window is None else ends - _clipped_sum(offset + 1 - window, t, s)


def _clipped_sum(start, t, s):
    """The sum over i = 0 .. t-1 of start + i, each cut to 0 .. s."""
    def below(n):                                        # of the integers below n, each cut to 0 .. s
        m = min(max(n, 0), s)
        return m * (m - 1) // 2 + max(0, n - s) * s
    return below(start + t) - below(start)
