"""Exercise 4: broadcasting, and why its rule is a sum.

NumPy repeats an array when shapes differ: adding a bias b (3,) to x (2, 3) uses each element of b twice. As a function
of its own, y = broadcast_to(x, shape):

    aligned at the right; axes that are missing on the left are added; axes of length 1 are stretched.
    x (4, 1)  ->  y (2, 4, 3):    y[i, j, k] = x[j, 0]

The recipe, dL = <ct, dy>:

    1. dy[i, j, k] = dx[j, 0]
    2. dL = sum over i, j, k of ct[i, j, k] dx[j, 0]
    3. dx[j, 0] does not depend on i and k: take it out of those two sums. What is left beside it?

In words: the loss felt every copy, so the copies' cotangents add. Whoever copies forward sums backward (and whoever
sums forward copies backward: it is the same recipe read the other way).

    ct          a float array
    x_shape     a tuple: the shape of x, broadcastable to ct.shape, possibly () or with axes of length 1
    returns     ct_x, of exactly that shape

An axis of x that has length 1 where ct has length 1 too was not stretched: summing over it does no harm.
"""

import numpy as np


def broadcast(x, shape):
    return np.broadcast_to(x, shape)


def broadcast_vjp(ct, x_shape):
    """ct_x, of shape x_shape, for y = broadcast_to(x, ct.shape)"""
    # [yours]
    added = ct.ndim - len(x_shape)
    stretched = [i + added for i, n in enumerate(x_shape) if n == 1]
    return ct.sum(axis=(*range(added), *stretched)).reshape(x_shape)
    # [end]


# Hint: sum over the ct.ndim - len(x_shape) leading axes, and over each axis where x_shape has a 1; then bring the axes
# of length 1 back, with keepdims=True or a reshape.
