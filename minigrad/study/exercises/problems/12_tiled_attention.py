"""Exercise 12: the backward pass of tiled attention: compute the weights again, block by block (Dao et al., 2022).

From the forward pass we kept O (T, Dv) and lse (T,), not A. For a block of keys the weights come back in one line,

    p = e^(q k_block^T / sqrt(D) - lse)                      (T, block), the block's columns of A

and (A.10.5) to (A.10.9) are applied to these columns:

    G_V of the block    from p and ct                        (A.10.5)
    G_A = ct v_block^T                                       (A.10.6)
    G_S = p (G_A - c)                                        (A.10.7)
    G_Q gets a contribution from every block: add            (A.10.8)
    G_K of the block                                         (A.10.9)

One thing does not fit: c_i = sum over *all* keys of A_ij G_A_ij, and we have one block at a time. But

    c_i = sum over j of A_ij (ct_i . v_j) = ct_i . (sum over j of A_ij v_j) = ct_i . O_i

so it is a dot product of two rows that we have, before the first block. That is why O is kept.

    ct (T, Dv), q (T, D), k (S, D), v (S, Dv), o (T, Dv), lse (T,), block an integer
    returns     (G_Q (T, D), G_K (S, D), G_V (S, Dv))

No mask. The grader also looks at the memory: an array of all T S weights is too much.
"""

import numpy as np


def tiled_attention_vjp(ct, q, k, v, o, lse, block):
    """(G_Q, G_K, G_V), holding no more than a few (T, block) arrays at a time"""
    # [yours]
    scale = 1.0 / np.sqrt(q.shape[1]).astype(q.dtype)
    c = (ct * o).sum(axis=1, keepdims=True)
    g_q, g_k, g_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start in range(0, k.shape[0], block):
        cols = slice(start, start + block)
        p = np.exp(q @ k[cols].T * scale - lse[:, None])
        g_s = p * (ct @ v[cols].T - c)                   # (A.10.6), (A.10.7)
        g_q += g_s @ k[cols] * scale                     # (A.10.8)
        g_k[cols] = g_s.T @ q * scale                    # (A.10.9)
        g_v[cols] = p.T @ ct                             # (A.10.5)
    return g_q, g_k, g_v
    # [end]


# Hint: c = (ct * o).sum(axis=1, keepdims=True) before the loop; in the loop the five lines above; += for G_Q only.
