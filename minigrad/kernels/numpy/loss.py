"""Cross-entropy of logits against integer targets."""

import numpy as np

from .blocks import by_blocks, row_sum


def cross_entropy(logits, targets, ignore_index, label_smoothing):
    """losses_n = lse_n - sum_v q_nv logits_nv, lse = log sum exp logits, one loss per row.

    q = (1 - eps) onehot(target) + eps / V with eps = ``label_smoothing``; rows whose target is
    ``ignore_index`` give 0. logits (N, V), targets (N,) in range, losses (N,), lse (N,). lse is
    always float64: it is kept for the backward pass, and near 1e4 a float32 is only good to 1e-3.
    """
    losses = np.zeros(len(logits), logits.dtype)
    lse = np.zeros(len(logits))

    def body(logits, targets, losses, lse, shifted, e):
        m = logits.max(axis=1, keepdims=True)
        np.subtract(logits, m, out=shifted)
        np.exp(shifted, out=e)
        log_sum = np.log(row_sum(e))[:, 0]
        np.add(m[:, 0], log_sum, out=lse, dtype=lse.dtype)
        # All that follows counts from m, where nothing cancels.
        ignored = targets == ignore_index
        target = np.where(ignored, 0, targets)
        losses[...] = log_sum - (1 - label_smoothing) * shifted[np.arange(len(target)), target]
        if label_smoothing:
            losses -= label_smoothing / logits.shape[1] * row_sum(shifted)[:, 0]
        losses[ignored] = 0

    by_blocks(body, [logits, targets], [losses, lse], temps=2)
    return losses, lse


def cross_entropy_backward(ct, logits, targets, lse, ignore_index, label_smoothing):
    """ct_logits = ct (softmax(logits) - q); zero rows where ignored.

    ct, targets, lse (N,), one ct per row; logits, ct_logits (N, V); q as in `cross_entropy`.
    """
    ct_logits = np.empty(logits.shape, logits.dtype)

    def body(logits, ct, targets, lse, out):
        # softmax = exp(logits - high) exp(-low): the rounding of lse goes into the row's factor
        high = lse.astype(logits.dtype)
        low = (lse - high).astype(logits.dtype)
        np.subtract(logits, high[:, None], out=out)
        np.exp(out, out=out)
        out *= (ct * np.exp(-low))[:, None]
        if label_smoothing:
            out -= (label_smoothing / logits.shape[1] * ct)[:, None]
        ignored = targets == ignore_index
        target = np.where(ignored, 0, targets)
        out[np.arange(len(target)), target] -= (1 - label_smoothing) * ct
        out[ignored] = 0

    by_blocks(body, [logits, ct, targets, lse], [ct_logits])
    return ct_logits
