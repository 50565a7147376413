"""softmax, log_softmax, and masked_softmax over a visible set (A.10.2). Each rule needs the output only."""

from __future__ import annotations

import numpy as np

from minigrad.backend.device import to_host, xp
from minigrad.kernels.numpy import softmax as _numpy
from minigrad.kernels.numpy.blocks import promoted
from minigrad.ops.elementwise import array, exp, on_device_of, where
from minigrad.ops.reduce import logsumexp
from minigrad.ops.shape import axis_of, broadcasts
from minigrad.tape import _raw, primitive, sample

_rows = [sample((2, 3)), sample((2, 3), axis=0), sample((2, 3, 4), axis=1), sample((4,)), sample((0, 3)),
         sample((2, 3), low=50.0, high=90.0)]


def _softmax_rule(ct, y, axis):
    return y * (ct - (ct * y).sum(axis=axis, keepdims=True))


def _along(op, kernel):
    kernel = promoted(kernel)
    return lambda x, axis: kernel(x, axis_of(op, axis, x.shape))


@primitive(kernels={"numpy": (_along("softmax", _numpy.softmax), _numpy.softmax_backward)},
           rules=[_softmax_rule], samples=_rows)
def softmax(x, /, axis=-1):
    """y = e^x / sum e^x along `axis`  (A.10.2);  ct_x = y (ct - sum ct y), whose sum is 0  (A.10.7)"""
    return exp(x - logsumexp(x, axis=axis_of("softmax", axis, x.shape), keepdims=True))


@primitive(kernels={"numpy": (_along("log_softmax", _numpy.log_softmax), _numpy.log_softmax_backward)}, samples=_rows,
           rules=[lambda ct, y, axis: ct - exp(y) * ct.sum(axis=axis, keepdims=True)])
def log_softmax(x, /, axis=-1):
    """y = x - log sum e^x along `axis`;  ct_x = ct - e^y sum ct"""
    return x - logsumexp(x, axis=axis_of("log_softmax", axis, x.shape), keepdims=True)


_seen = np.array([[True, False, True], [True, True, True]])


@primitive(kernels={"numpy": (promoted(_numpy.masked_softmax),
                              lambda ct, y, axis: (_numpy.softmax_backward(ct, y, axis), None))},
           rules=[_softmax_rule, None],
           samples=[sample((2, 3), _seen), sample((2, 3), None), sample((4, 2, 3), _seen),
                    sample((2, 3), _seen, axis=0), sample((2, 3), np.array([[False], [True]]))])
def _masked_softmax(scores, visible=None, /, axis=-1):
    """y = e^x / sum e^x over the visible keys, 0 elsewhere  (A.10.2);  ct_scores = y (ct - sum ct y)  (A.10.7)

    A row that sees nothing gives zeros; one that sees a NaN or +inf gives NaN, which must show.
    """
    hidden = scores if visible is None else where(visible, scores, -np.inf)
    shift = logsumexp(hidden, axis=axis, keepdims=True)
    return exp(hidden - where(shift == -np.inf, 0.0, where(shift < np.inf, shift, np.nan)))


def masked_softmax(scores, visible=None, axis=-1, empty_rows="raise"):
    """softmax over the visible set: A_ij = e^(S_ij - m_i) / sum over visible r of e^(S_ir - m_i), 0 if hidden (A.10.2).

    scores (*S); visible: bool, broadcastable to scores, **True = seen** (None: all). A score of -inf is hidden too. A
    row that sees nothing has no softmax: empty_rows="raise" names the first, "zeros" gives zeros and zero gradients.
    G_S = A (G_A - c), c = sum A G_A (A.10.7): 0 where hidden, each row sums to 0.
    """
    scores = array("masked_softmax", "scores", scores)
    axis = axis_of("masked_softmax", axis, scores.shape)
    visible = check_visible("masked_softmax", visible, scores.shape)
    visible = None if visible is None else on_device_of(visible, scores)
    check_empty_choice("masked_softmax", empty_rows)
    a = _masked_softmax(scores, visible, axis=axis)
    if empty_rows == "raise":
        empty = _raw(a).max(axis=axis) == 0 if a.shape[axis] else xp(_raw(a)).ones(_raw(a).sum(axis=axis).shape, bool)
        refuse_empty("masked_softmax", empty)
    return a


def check_visible(op: str, visible, shape):
    """The mask, raw, checked: bool, and broadcastable to the scores."""
    if visible is None:
        return None
    visible = _raw(visible)
    visible = visible if hasattr(visible, "dtype") else np.asarray(visible)
    if visible.dtype != bool:
        raise TypeError(f"[{op}] a visible set is boolean, True = this key may be seen: got {visible.dtype}; "
                        "write mask != 0 (or mask == 0 if 1 means hidden)")
    if not broadcasts(visible.shape, shape):
        raise ValueError(f"[{op}] the mask must broadcast to the scores (True = this key may be seen): "
                         f"mask {visible.shape}, scores {tuple(shape)}")
    return visible


def check_empty_choice(op: str, empty_rows: str) -> None:
    if empty_rows not in ("raise", "zeros"):
        raise ValueError(f'[{op}] empty_rows is "raise" or "zeros": got {empty_rows!r}')


_AXES = {1: ("query",), 2: ("head", "query"), 3: ("batch", "head", "query")}


def refuse_empty(op: str, empty) -> None:
    """Raise, naming the first row that sees nothing, if there is one. empty (*S): True for such rows."""
    if bool(empty.any()):
        first = [int(i[0]) for i in np.nonzero(to_host(empty))] if empty.ndim else []
        names = _AXES.get(len(first), tuple(f"axis {i}" for i in range(len(first))))
        at = ", ".join(f"{name} {i}" for name, i in zip(names, first)) or "the only row"
        raise ValueError(f'[{op}] a row that sees no key has no softmax (A.10.2): {at}; let it see a key, or pass '
                         'empty_rows="zeros"')
