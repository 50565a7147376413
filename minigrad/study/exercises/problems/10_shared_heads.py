"""Exercise 10: grouped-query attention, where several query heads read one key/value head (A.10, section 5).

Query head r reads key/value head g(r). As a function of its own, the reading is an indexing by `kv_head`, a tuple of
Hq integers with kv_head[r] = g(r):

    y = x[kv_head]                x (Hkv, S, D)  ->  y (Hq, S, D),       y[r] = x[g(r)]

(x is K or V. A fast kernel never makes y; its rule is the same.) dL = <ct, dy> = sum over r of <ct[r], dx[g(r)]>. For
each head h of x collect everything that stands beside dx[h]. The appendix says it in a sentence: what the query heads
that share a key/value head send back must be summed. Exercise 4 in other clothes: copied forward, summed backward.

The map may be any: (0, 0, 1, 1) shares in order, (1, 0, 1) does not, and a head that nobody reads gets zeros.

    ct          float array (Hq, S, D)
    kv_head     a tuple of Hq integers in 0 .. heads - 1
    heads       Hkv, how many heads x has
    returns     ct_x (Hkv, S, D)

Beware of NumPy: `out[index] += ct` reads out[index] once, adds, and stores; where an index comes twice, the last one
stored wins and the others are lost.
"""

import numpy as np


def read_heads(x, kv_head):
    return x[list(kv_head)]


def read_heads_vjp(ct, kv_head, heads):
    """ct_x for y = x[kv_head]"""
    # [yours]
    ct_x = np.zeros((heads, *ct.shape[1:]), ct.dtype)
    for r, h in enumerate(kv_head):
        ct_x[h] += ct[r]
    return ct_x
    # [end]


# Hint: a loop over r with ct_x[kv_head[r]] += ct[r] is right, and clear. np.add.at does it in one call.
