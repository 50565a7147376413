"""Exercise 2: y = a * b, element by element (b is not constant: both arguments change).

The recipe of exercise 1 again, dL = <ct, dy>:

    1. the product rule:      dy = da * b + a * db
    2. put it in:             dL = <ct, da * b> + <ct, a * db>
    3. move the factors over: <ct, da * b> is the sum over all elements of ct * da * b; what stands beside da?

Note what the answer needs: ct_a needs the *values of b* from the forward pass, so an engine has to keep b until the
backward pass. Exercise 1 needed no values at all, and so addition keeps nothing.

    ct, a, b    float arrays of one shape
    returns     (ct_a, ct_b)
"""


def multiply(a, b):
    return a * b


def multiply_vjp(ct, a, b):
    """(ct_a, ct_b) for y = a * b"""
    # [yours]
    return ct * b, ct * a
    # [end]


# Hint: <ct, da * b> = <ct * b, da>.
