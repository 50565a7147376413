"""Exercise 7: softmax over a visible set (A.10.2), from the scores to its rule (A.10.7).

In attention a query does not see every key. `visible` is a bool array, True = this key may be seen, and a row's softmax
is taken over its visible set V_i alone:

    A_ij = e^(S_ij - m_i) / sum over r in V_i of e^(S_ir - m_i)   if j is in V_i,     m_i = max over r in V_i of S_ir
    A_ij = 0                                                      if not                                      (A.10.2)

    G_S_ij = A_ij (G_A_ij - c_i)  if j is in V_i, else 0,         c_i = sum over r in V_i of A_ir G_A_ir      (A.10.7)

(G_Z is the appendix's name for the cotangent of Z: here G_A is `ct`.) Hidden scores may hold anything, and must not
matter: a huge hidden score must not become the maximum, or every visible e^(...) underflows to 0 and the row is 0 / 0.

A row whose visible set is empty has no softmax. minigrad refuses such a row unless told otherwise
(empty_rows="zeros"): here such a row gives zeros, in A and in G_S. Never NaN.

    ct, scores  float arrays (*S, n)
    visible     bool, of the same shape
    returns     G_S, the cotangent of the scores, (*S, n)

Compute A from the scores first, then the rule.
"""

import numpy as np


def masked_softmax_vjp(ct, scores, visible):
    """G_S for A = softmax of the scores over the visible set"""
    # [yours]
    hidden = np.where(visible, scores, -np.inf)
    m = hidden.max(axis=-1, keepdims=True)
    e = np.exp(hidden - np.where(m == -np.inf, 0.0, m))  # an empty row has m = -inf: e is 0 there, not NaN
    total = e.sum(axis=-1, keepdims=True)
    a = e / np.where(total == 0.0, 1.0, total)
    c = (a * ct).sum(axis=-1, keepdims=True)
    return a * (ct - c)
    # [end]


# Hint: put -inf where `visible` is False before taking the maximum; e^(-inf) is exactly 0. Two divisions to watch: an
# empty row has the maximum -inf, and -inf - -inf is NaN; and its sum is 0. Then (A.10.7) needs no mask of its own,
# because A is 0 wherever a key is hidden.
