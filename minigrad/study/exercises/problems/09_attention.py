"""Exercise 9: one attention head backwards, (A.10.5) to (A.10.9). It is exercises 3 and 7, put together.

    S = Q K^T / sqrt(D)                              (A.10.1)      Q (T, D), K (S, D): T queries, S keys
    A = softmax of S over the visible sets           (A.10.2)      A (T, S), given to you; 0 where a key is hidden
    O = A V                                          (A.10.3)      V (S, Dv), O (T, Dv)

Go back through the three lines in falling order. G_O is `ct`.

    O = A V is a matrix product:        G_V from A and G_O                  (A.10.5)
                                        G_A from G_O and V                  (A.10.6)
    A is the masked softmax of S:       G_S from A and G_A                  (A.10.7)
    S = Q K^T / sqrt(D), a product      G_Q from G_S and K                  (A.10.8)
    again, but of K *transposed*, and   G_K from G_S and Q                  (A.10.9)
    with a factor that stays a factor

    ct (T, Dv), q (T, D), k (S, D), v (S, Dv), a (T, S)        returns (G_Q (T, D), G_K (S, D), G_V (S, Dv))

No mask appears in the arguments: where A is 0, (A.10.7) gives 0.
"""

import numpy as np


def attention(q, k, v, visible):
    s = np.where(visible, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    e = np.exp(s - s.max(axis=1, keepdims=True))
    a = e / e.sum(axis=1, keepdims=True)
    return a @ v, a


def attention_vjp(ct, q, k, v, a):
    """(G_Q, G_K, G_V)"""
    # [yours]
    scale = 1.0 / np.sqrt(q.shape[1]).astype(q.dtype)
    g_v = a.T @ ct                                       # (A.10.5)
    g_a = ct @ v.T                                       # (A.10.6)
    c = (a * g_a).sum(axis=1, keepdims=True)
    g_s = a * (g_a - c)                                  # (A.10.7)
    return g_s @ k * scale, g_s.T @ q * scale, g_v       # (A.10.8), (A.10.9)
    # [end]


# Hint: for the last two, <G_S, dQ K^T> = <G_S K, dQ>, and <G_S, Q dK^T> = <G_S^T, dK Q^T>. Both times 1/sqrt(D).
