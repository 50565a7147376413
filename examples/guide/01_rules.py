"""Guide 1. Rules: what a backward rule is, how one is found, and how one is checked.

    python examples/guide/01_rules.py

Read before: examples/01_tape.py, a whole engine in forty lines. It takes rules as given; here they are derived. How
minigrad's engine applies them is written at the top of minigrad/tape.py, and not repeated in this guide.
"""

import numpy as np

import minigrad as mg
import minigrad.functional as F

rng = np.random.default_rng(0)

# ---------------------------------------------------------------------------------------------- 1. the definition
#
# Somewhere after y = f(x) a program computes one number, the loss L. Write ct = dL/dy for its *cotangent*: an array of
# y's shape that says how much L changes per unit of each element of y. Write <u, v> for the sum of all products of
# elements. A small change dy of y then changes the loss by
#
#     dL = <ct, dy>.
#
# Now let x change by dx, and with it y by dy = J dx, where J is the derivative of f: linear in dx. A *rule*, or vjp
# (vector-Jacobian product), answers what ct_x makes dL = <ct_x, dx> for every dx. Three steps find it for any f:
#
#     1. write dy in terms of dx;    2. put it into <ct, dy>;    3. move all that is not dx to the other side.
#
#     tanh          dy = (1 - y^2) dx              <ct, (1 - y^2) dx> = <ct (1 - y^2), dx>        ct_x = ct (1 - y^2)
#     a b           dy = da b + a db               <ct, da b> = <ct b, da>                        ct_a = ct b
#     sum           dy = sum of dx, a number       ct sum(dx) = <ct 1, dx>                        ct_x = ct, everywhere
#     a @ b         dy = da @ b + a @ db           <ct, da @ b> = <ct @ b^T, da>                  ct_a = ct @ b^T
#
# J is never built: for a (512, 512) matrix product it would have 2^36 elements; its rule is one more matrix product.

B = rng.standard_normal((3, 4))
rules = {
    "tanh": (np.tanh, lambda ct, x: ct * (1.0 - np.tanh(x) ** 2)),
    "times b": (lambda x: x * B, lambda ct, x: ct * B),
    "sum": (np.sum, lambda ct, x: np.broadcast_to(ct, x.shape)),
    "x @ b^T": (lambda x: x @ B.T, lambda ct, x: ct @ B),
    "cumsum": (lambda x: np.cumsum(x, axis=1), lambda ct, x: np.flip(np.cumsum(np.flip(ct, 1), axis=1), 1)),
    "tanh, wrong": (np.tanh, lambda ct, x: ct * (1.0 - np.tanh(x))),
}


# -------------------------------------------------------------------------------------------------- 2. the check
#
# The definition is also the test. Take any direction v; move x a little along it, both ways, and compare
#
#     <ct, f(x + h v) - f(x - h v)> / 2h     with     <ct_x, v>.
#
# One random direction suffices to find a wrong rule: to escape, its error would have to be at right angles to v.


def both_sides(f, rule, x, h=1e-5):
    v, ct = rng.standard_normal(x.shape), rng.standard_normal(np.shape(f(x)))
    measured = (ct * (f(x + h * v) - f(x - h * v))).sum() / (2 * h)
    return measured, (rule(ct, x) * v).sum()


print("A rule against central differences, along one random direction:\n")
for name, (f, rule) in rules.items():
    measured, ruled = both_sides(f, rule, rng.standard_normal((3, 4)))
    verdict = "agrees" if np.isclose(measured, ruled, rtol=1e-6, atol=1e-8) else "DIFFERS"
    print(f"  {name:14} measured {measured:9.6f}   by the rule {ruled:9.6f}   {verdict}")

# ------------------------------------------------------------------------------------------- 3. how small is small?
#
# The error of a central difference has two parts. What the curve's bend leaves over falls as h^2; what rounding leaves
# over, about 1e-16 / h, grows. So there is a best h, near the cube root of 1e-16, and no difference is exact: the rule
# is the better of the two. (Each mark is a factor of ten.)

x, v = np.array(0.7), 1.0
exact = 1.0 - np.tanh(x) ** 2
print("\nThe error of (tanh(x + h) - tanh(x - h)) / 2h at x = 0.7:\n")
for power in range(1, 13):
    h = 10.0**-power
    error = abs((np.tanh(x + h) - np.tanh(x - h)) / (2 * h) - exact)
    print(f"  h = 1e-{power:02}  {'#' * max(0, round(14 + np.log10(max(error, 1e-14))))}")

# ---------------------------------------------------------------------------------------------- 4. minigrad's rules
#
# mg.vjp gives y and the pullback, the function that takes ct to ct_x. Each op of minigrad stands in one block with its
# rules beside it (minigrad/ops/elementwise.py), and the same check runs over all of them, for first and second
# derivatives (tests/test_ops.py).

x = rng.standard_normal((3, 4))
y, pullback = mg.vjp(F.tanh, x)
ct = rng.standard_normal((3, 4))
difference = abs(pullback(ct).numpy() - rules["tanh"][1](ct, x)).max()
print(f"\nminigrad's tanh rule against ours, largest difference: {difference:.0e}")

# To try: derive the rule of y = x / (1 + x^2), add it to `rules`, and see whether it agrees.
# To try: leave the two flips out of the rule of "cumsum". Of which other function would it be the right rule?
