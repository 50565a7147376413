"""Products: matmul, einsum, linear."""

from __future__ import annotations

import math
import string

import numpy as np

from minigrad.backend.device import is_array, xp
from minigrad.ops.elementwise import array
from minigrad.ops.shape import broadcast_to, expand_dims, reshape, swapaxes
from minigrad.tape import Tensor, describe, primitive, sample


def _as_rows(x):
    """(*S, C) as (rows, C), also if C is 0."""
    return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _rows_times(x, w):
    """x (*S, k) times a matrix w (k, m) as one product: of an array (B, T, k) NumPy would make B small ones, two to
    four times as slow where T is short."""
    return x @ w if x.ndim < 3 else reshape(_as_rows(x) @ w, (*x.shape[:-1], w.shape[1]))


def _matmul_rule_a(ct, a_shape, b):
    if len(a_shape) == 1:
        ct = expand_dims(ct, -1 if b.ndim == 1 else -2)  # a stood as a row
    if b.ndim == 1:
        return ct * b if len(a_shape) == 1 else expand_dims(ct, -1) * b
    ct_a = _rows_times(ct, b.T) if b.ndim == 2 else ct @ swapaxes(b, -1, -2)
    return ct_a if len(a_shape) > 1 else reshape(ct_a, (*ct_a.shape[:-2], a_shape[0]))


def _matmul_rule_b(ct, a, b_shape):
    if len(b_shape) == 1:
        return ct * a if a.ndim == 1 else expand_dims(ct, -1) * a
    if a.ndim == 1:
        return expand_dims(a, -1) @ expand_dims(ct, -2)
    if len(b_shape) == 2 and a.ndim > 2:                 # one product instead of a batch of them to be summed
        return _as_rows(a).T @ _as_rows(ct)
    return swapaxes(a, -1, -2) @ ct


@primitive(broadcasts=True, rules=[_matmul_rule_a, _matmul_rule_b],
           samples=[sample((2, 3), (3, 4)), sample((2, 4, 3), (3, 5)), sample((2, 1, 4, 3), (5, 3, 2)),
                    sample((3,), (3,)), sample((2, 3), (3,)), sample((4, 2, 3), (3,)), sample((3,), (3, 2)),
                    sample((3,), (4, 3, 2)), sample((2, 0), (0, 3)),
                    sample((2, 3, 4), (5, 6), error="[matmul] inner sizes differ: a (2, 3, 4) @ b (5, 6)"),
                    sample((), (2,), error="[matmul] both sides need at least one axis")])
def matmul(a, b, /):
    """a @ b;  ct_a = ct b^T,  ct_b = a^T ct

    (*S, n, k) @ (*S, k, m) -> (*S, n, m), leading axes broadcast; a vector stands for a row or a column.
    """
    if not np.ndim(a) or not np.ndim(b):
        raise ValueError(f"[matmul] both sides need at least one axis: a {np.shape(a)} @ b {np.shape(b)}")
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(f"[matmul] inner sizes differ: a {a.shape} @ b {b.shape}")
    return _rows_times(a, b) if b.ndim == 2 else a @ b


def _linear_rule_x(ct, w):
    return _rows_times(ct, w.T)


def _linear_rule_w(ct, x):
    return _as_rows(x).T @ _as_rows(ct)


@primitive(fused=True, samples=[sample((2, 3), (3, 4)), sample((2, 5, 3), (3, 4), (4,)), sample((3,), (3, 2), (2,)),
                                sample((0, 3), (3, 2), (2,)),
                                sample((2, 3), (4, 3), error="[linear] w is stored (d_in, d_out) and x ends in d_in")],
           rules=[_linear_rule_x, _linear_rule_w, lambda ct: ct.sum(axis=tuple(range(ct.ndim - 1)))])
def linear(x, w, b=None, /):
    """y = x w + b  (A.10.10);  ct_x = ct w^T  (A.10.11),  ct_w = x^T ct  (A.10.11),  ct_b = the sum of ct over (*S)

    x (*S, d_in), w (d_in, d_out), b (d_out,) -> (*S, d_out).
    """
    if np.ndim(w) != 2 or np.shape(x)[-1:] != w.shape[:1] or (b is not None and np.shape(b) != w.shape[1:]):
        raise ValueError(f"[linear] w is stored (d_in, d_out) and x ends in d_in: x {np.shape(x)}, w {np.shape(w)}"
                         + ("" if b is None else f", b {np.shape(b)}"))
    if is_array(x) and is_array(w) and x.ndim > 2:
        y = _rows_times(x, w)
        if b is not None and y.dtype == np.result_type(y, b):
            y += b                                       # into the product's own memory
            return y
        return y if b is None else y + b
    return x @ w if b is None else x @ w + b


# --------------------------------------------------------------------------------------------------------- einsum


def _parse(subscripts: str, shapes) -> tuple[list[str], str]:
    """Subscripts with the output explicit and the ellipsis spelled out in letters of its own."""
    text = subscripts.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"[einsum] {len(terms)} terms in {subscripts!r} but {len(shapes)} operands")
    free = [c for c in string.ascii_letters if c not in text]
    longest = max((len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes) if "..." in term),
                  default=0)
    dots = "".join(free[:max(longest, 0)])
    spelled = []
    for term, shape in zip(terms, shapes):
        n = len(shape) - len(term.replace("...", ""))
        if n < 0 or (n and "..." not in term):
            raise ValueError(f"[einsum] term {term!r} of {subscripts!r} does not fit an operand of shape {shape}")
        spelled.append(term.replace("...", dots[len(dots) - n:]))
    if not arrow:
        letters = "".join(spelled)
        out = "..." * bool(dots) + "".join(sorted(c for c in set(letters) - set(dots) if letters.count(c) == 1))
    elif dots and "..." not in out:
        raise ValueError(f"[einsum] the output of {subscripts!r} must have the ... of its operands")
    return spelled, out.replace("...", dots)


def _einsum_rule(ct, operands, shapes, needs, terms, out):
    """The cotangent of an operand is the einsum of ct with the other operands, onto the operand's own letters. A letter
    that only this operand has was summed: there the cotangent is the same for all, brought in by a vector of ones."""
    cts = []
    for i, want in enumerate(needs):
        others = [j for j in range(len(terms)) if j != i]
        known = set(out).union(*(terms[j] for j in others))
        alone = [(c, n) for c, n in zip(terms[i], shapes[i]) if c not in known]
        ones = [xp(operands[i] if is_array(operands[i]) else operands[i]._data).ones(n, operands[i].dtype)
                for _, n in alone]
        c = _einsum(ct, *[operands[j] for j in others], *ones, out=terms[i],
                    terms=(out, *(terms[j] for j in others), *(c for c, _ in alone))) if want else None
        full = None if c is None else np.broadcast_shapes(c.shape, shapes[i])
        cts.append(c if c is None or c.shape == full else broadcast_to(c, full))  # others had length 1 there
    return tuple(cts)


@primitive(broadcasts=True, rule=_einsum_rule,
           samples=[sample((2, 3), (3, 4), terms=("ij", "jk"), out="ik"), sample((2, 3), terms=("ij",), out="j"),
                    sample((2, 3), (3, 2), (2,), terms=("ij", "ji", "i"), out=""),
                    sample((2, 3), terms=("ij",), out="ji")])
def _einsum(*operands, terms, out):
    """sum of products: operand i has the letters terms[i], the result those of out;  ct_operands = the einsum of ct
    with the other operands, onto the operand's letters"""
    return xp(operands[0]).einsum(",".join(terms) + "->" + out, *operands, optimize=len(operands) > 1)


def einsum(subscripts, *operands):
    """Sums of products by NumPy's subscripts, e.g. einsum("bqd,bkd->bqk", q, k); "..." and repeated letters allowed.

    ct of an operand = einsum of ct with the other operands, onto the operand's letters.
    """
    if not isinstance(subscripts, str):
        raise TypeError(f"[einsum] takes the subscripts first, then the operands: got {describe(subscripts)}")
    operands = tuple(array("einsum", f"operand {i}", x) for i, x in enumerate(operands))
    terms, out = _parse(subscripts, [x.shape for x in operands])
    lengths: dict[str, int] = {}
    for term, x in zip(terms, operands):
        for c, n in zip(term, x.shape):
            if lengths.setdefault(c, n) != n and 1 not in (n, lengths[c]):
                raise ValueError(f"[einsum] letter {c!r} of {subscripts!r} has lengths {lengths[c]} and {n}")
            lengths[c] = max(lengths[c], n)
    free = iter(c for c in string.ascii_letters if c not in "".join(terms) + out)
    extra: list = []
    for k, term in enumerate(terms):                     # a diagonal, "ii", is "ij" times the identity in i and j
        for at, c in enumerate(term):
            if c in term[:at]:
                new = next(free)
                term = term[:at] + new + term[at + 1:]
                raw = operands[k]._data if isinstance(operands[k], Tensor) else operands[k]
                extra.append((c + new, xp(raw).eye(lengths[c], dtype=raw.dtype)))
        terms[k] = term
    return _einsum(*operands, *(eye for _, eye in extra), terms=(*terms, *(t for t, _ in extra)), out=out)
