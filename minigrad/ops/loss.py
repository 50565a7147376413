"""cross_entropy and mse_loss."""

from __future__ import annotations

import numpy as np

from minigrad.backend.device import xp
from minigrad.kernels.numpy import loss as _numpy
from minigrad.kernels.numpy.blocks import promoted
from minigrad.ops.elementwise import array, number, on_device_of, where
from minigrad.ops.index import check_ids
from minigrad.ops.reduce import logsumexp
from minigrad.ops.shape import getitem, reshape
from minigrad.tape import primitive, sample

_targets = np.array([2, 0, -100])


@primitive(kernels={"numpy": (promoted(_numpy.cross_entropy), _numpy.cross_entropy_backward, "lse")},
           samples=[sample((3, 4), targets=_targets), sample((3, 4), targets=_targets, label_smoothing=0.1),
                    sample((3, 4), targets=np.array([1, 0, 3]), ignore_index=0)])
def _cross_entropy(logits, /, targets, ignore_index=-100, label_smoothing=0.0):
    """-log p_t = lse - z_t, p = softmax(z);  ct_logits = ct (p - onehot(t)), 0 for an ignored row

    Logits z (N, V), targets t (N,) -> (N,), lse = log sum e^z. With smoothing e: -(1 - e) log p_t - e/V sum_v log p_v
    = lse - (1 - e) z_t - e mean z, and (1 - e) onehot(t) + e/V in place of onehot(t).
    """
    keep = targets != ignore_index
    picked = getitem(logits, (xp(targets).arange(len(targets)), where(keep, targets, 0)))
    loss = logsumexp(logits, axis=-1) - (1.0 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing * logits.mean(axis=-1)
    return where(keep, loss, 0.0)


def cross_entropy(logits, targets, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    """-log softmax(logits)[target]: logits (*S, V), targets (*S) integers in 0 .. V-1.

    Targets equal to ignore_index count for nothing. label_smoothing e in [0, 1] mixes the target with the uniform
    distribution. reduction: "mean" over what is kept (0 if nothing is), "sum", or "none" for (*S).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'[cross_entropy] reduction is "mean", "sum" or "none": got {reduction!r}')
    logits = array("cross_entropy", "logits", logits)
    label_smoothing = number("cross_entropy", "label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"[cross_entropy] label_smoothing is in [0, 1]: got {label_smoothing}")
    v = logits.shape[-1] if logits.ndim else 0
    ids = check_ids("cross_entropy", targets, v, but=ignore_index)
    if ids.shape != logits.shape[:-1]:
        raise ValueError(f"[cross_entropy] logits are (*S, V) and targets (*S): logits {logits.shape}, "
                         f"targets {ids.shape}")
    flat = on_device_of(ids, logits).reshape(-1)
    losses = _cross_entropy(reshape(logits, (-1, v)) if logits.ndim != 2 else logits, targets=flat,
                            ignore_index=ignore_index, label_smoothing=label_smoothing)
    if reduction == "none":
        return reshape(losses, ids.shape)
    if reduction == "sum":
        return losses.sum()
    kept = (ids != ignore_index).sum()                   # counted where the targets came from: nothing waits
    total = losses.astype(np.result_type(losses.dtype, np.float32)).sum()  # more than a float16 can hold
    kept = max(1, int(kept)) if isinstance(kept, np.generic) else xp(kept).maximum(kept, 1).astype(total.dtype)
    return (total / kept).astype(losses.dtype)


def mse_loss(x, target, reduction="mean"):
    """(x - target)^2: "mean", "sum" or "none". The shapes must agree: a silent broadcast is a wrong loss."""
    x, target = array("mse_loss", "x", x), array("mse_loss", "target", target)
    if x.shape != target.shape:
        raise ValueError(f"[mse_loss] x and target must have the same shape: x {x.shape}, target {target.shape}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'[mse_loss] reduction is "mean", "sum" or "none": got {reduction!r}')
    error = x - target
    error = error * error
    return error if reduction == "none" else getattr(error, reduction)()
