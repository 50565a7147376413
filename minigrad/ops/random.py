"""dropout, from counter-based bits: nothing is stored for the backward pass but two integers."""

from __future__ import annotations

import numpy as np

from minigrad.backend.device import xp
from minigrad.backend.random import Key, drop_below, stream
from minigrad.ops.elementwise import number
from minigrad.tape import _raw, primitive, sample


@primitive(fused=True, samples=[sample((4, 5), p=0.5, key=Key((7, 0))), sample((), p=0.25, key=Key((7, 1))),
                                sample((0, 2), p=0.5, key=Key((7, 2)))],
           rules=[lambda ct, p, key: _dropout(ct, p=p, key=key)])
def _dropout(x, /, p, key):
    """x keep / (1 - p);  ct_x = ct keep / (1 - p), by the same bits"""
    raw = _raw(x)
    m = xp(raw)
    keep = key.flat(raw.size, m).reshape(raw.shape) >= m.uint32(drop_below(p))
    return x * (keep * np.result_type(raw.dtype, np.float16).type(1.0 / (1.0 - p)))


def dropout(x, p=0.5, training=True):
    """Each element 0 with probability p, else divided by 1 - p (Srivastava et al., 2014); x itself if not training.

    The same seed (mg.manual_seed) gives the same mask on every device.
    """
    p = number("dropout", "p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"[dropout] p is a probability: got {p}")
    if not training or p == 0.0:
        return x
    return x * 0.0 if p == 1.0 else _dropout(x, p=p, key=stream.key())
