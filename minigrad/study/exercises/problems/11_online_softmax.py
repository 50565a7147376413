"""Exercise 11: attention without ever holding all scores: the online softmax.

(Milakov and Gimelshein, 2018; Dao et al., 2022.) The weights A (T, S) grow with the product of the lengths. But a row
of O needs only two sums over its keys,

    O_i = (sum over j of e^(S_ij - m_i) v_j) / (sum over j of e^(S_ij - m_i)),

and sums can be taken block by block of keys. The difficulty is m_i, the maximum of a row, which is not known before the
last block. The way out: keep the maximum *so far*, and when a block brings a larger one, rescale what is summed so far.
For each block of keys, with per row m (maximum), l (sum), o (weighted sum of values; not yet divided):

    s      = q k_block^T / sqrt(D)                           (T, block)
    m_new  = max(m, maximum of s over the block)
    p      = e^(s - m_new)
    shrink = e^(m - m_new)                                   1 where the maximum stays
    l      = l shrink + sum of p
    o      = o shrink + p v_block
    m      = m_new

Start with m = -inf, l = 0, o = 0: the first shrink is then e^(-inf) = 0. At the end O = o / l, and the log-sum-exp

    lse = m + log l            so that    A_ij = e^(S_ij - lse_i)

of the row is all that the backward pass (exercise 12) needs to have every weight again.

    q (T, D), k (S, D), v (S, Dv), block an integer (S need not be a multiple of it: the last block is shorter)
    returns     (O (T, Dv), lse (T,))

No mask here: every query sees every key. The grader also looks at the memory: an array of all T S scores is too much.
"""

import numpy as np


def online_attention(q, k, v, block):
    """(O, lse), holding no more than (T, block) scores at a time"""
    # [yours]
    scale = 1.0 / np.sqrt(q.shape[1]).astype(q.dtype)
    m = np.full(q.shape[0], -np.inf, q.dtype)
    l = np.zeros(q.shape[0], q.dtype)  # noqa: E741
    o = np.zeros((q.shape[0], v.shape[1]), q.dtype)
    for start in range(0, k.shape[0], block):
        s = q @ k[start:start + block].T * scale
        m_new = np.maximum(m, s.max(axis=1))
        p = np.exp(s - m_new[:, None])
        shrink = np.exp(m - m_new)
        l = l * shrink + p.sum(axis=1)  # noqa: E741
        o = o * shrink[:, None] + p @ v[start:start + block]
        m = m_new
    return o / l[:, None], m + np.log(l)
    # [end]


# Hint: write the seven lines above as they stand; m, l and shrink are (T,), so use [:, None] beside (T, block) or
# (T, Dv). The dtype: np.sqrt of a Python int is float64, and float32 arrays times it become float64.
