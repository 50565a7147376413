"""One step of Adam and AdamW, and the sum of squares that gradient clipping needs."""

import math

import numpy as np

from .blocks import by_blocks

SQUARES = 4096  # long enough for a quick dot product, short enough for an accurate one


def adamw(p, g, m, v, lr, beta1, beta2, eps, weight_decay, step, scale=1.0, decoupled=True):
    """Update p, m and v in place, in one pass (Loshchilov and Hutter, as in torch.optim.AdamW).

    g' = scale g                                  (``decoupled=False``, Adam: + weight_decay p)
    p <- p - lr weight_decay p                    (``decoupled=True`` only)
    m <- m + (1 - beta1) (g' - m),                v <- beta2 v + (1 - beta2) g'^2
    p <- p - lr mhat / (sqrt(vhat) + eps),        mhat = m / (1 - beta1^step), vhat likewise

    p, g, m, v: contiguous, of equal length, any one dtype; ``step`` counts from 1.
    """
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step

    def body(p, g, m, v, p_new, m_new, v_new, t, grad):
        if scale != 1:
            g = np.multiply(g, scale, out=grad)
        if weight_decay and decoupled:
            p = np.multiply(p, 1 - lr * weight_decay, out=p_new)
        elif weight_decay:
            np.multiply(p, weight_decay, out=t)
            g = np.add(g, t, out=grad)
        np.subtract(g, m, out=t)
        t *= 1 - beta1
        np.add(m, t, out=m_new)
        np.multiply(g, g, out=t)
        t *= 1 - beta2
        np.multiply(v, beta2, out=v_new)
        v_new += t
        np.sqrt(v_new, out=t)
        t *= 1 / math.sqrt(correction2)
        t += eps
        np.divide(m_new, t, out=t)
        t *= lr / correction1
        np.subtract(p, t, out=p_new)

    p, g, m, v = (a.reshape(-1) for a in (p, g, m, v))
    by_blocks(body, [p, g, m, v], [p, m, v], temps=2)


def sum_of_squares(g):
    """sum g^2 as a Python float: g's dtype for SQUARES elements, float64 beyond.  g (*S)."""
    def body(g):
        whole = len(g) // SQUARES * SQUARES
        pieces, rest = g[:whole].reshape(-1, SQUARES), g[whole:]
        return float(np.vecdot(pieces, pieces).sum(dtype=np.float64)) + float(np.dot(rest, rest))

    return math.fsum(by_blocks(body, [g.reshape(-1)]))
