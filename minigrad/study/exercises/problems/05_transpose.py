"""Exercise 5: a transpose changes no number, only its place. Its rule puts each cotangent back where it came from.

    y = x.transpose(axes):   axis i of y is axis axes[i] of x.     y.shape[i] == x.shape[axes[i]]

dL = <ct, dy>, and dy holds the numbers of dx in another order. So ct_x holds the numbers of ct in the order of x: the
*inverse* permutation. For two axes, (1, 0), the inverse is the permutation itself; so it is for the (0, 2, 1, 3) that
splits and merges attention heads (A.10, section 5). For three axes it is not: x (2, 3, 4) with axes (1, 2, 0) is
y (3, 4, 2), and applying (1, 2, 0) again gives (4, 2, 3), not (2, 3, 4).

    ct          a float array, of y's shape
    axes        a tuple, a permutation of 0 .. ndim - 1
    returns     ct_x, of x's shape
"""

import numpy as np


def transpose(x, axes):
    return x.transpose(axes)


def transpose_vjp(ct, axes):
    """ct_x for y = x.transpose(axes)"""
    # [yours]
    return ct.transpose(np.argsort(axes))
    # [end]


# Hint: you need `inverse` with inverse[axes[i]] = i for every i. Fill a list in a loop, or think what np.argsort does.
