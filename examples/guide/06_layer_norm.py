"""Guide 6. Layer normalisation: a derivation by hand, and why two numbers a row are all that need be kept.

    python examples/guide/06_layer_norm.py

Read before: guides 1 and 2.
"""

import contextlib

import numpy as np

import minigrad as mg
import minigrad.functional as F

rng = np.random.default_rng(0)

# ------------------------------------------------------------------------------------------------ 1. the derivation
#
# Over a row x of C elements, with avg( ) its average:
#
#     mean = avg(x),   var = avg((x - mean)^2),   rstd = (var + eps)^(-1/2),   xhat = (x - mean) rstd,   y = xhat w + b
#
# The last step is known: g = ct w is the cotangent of xhat, ct_w is the sum over all rows of ct xhat, ct_b that of ct.
# For x, step 1 of guide 1 asks how xhat changes. It depends on x in three ways:
#
#     d mean = avg(dx)
#     d var  = 2 avg((x - mean) (dx - d mean)) = 2 avg((x - mean) dx)              (x - mean averages to 0)
#     d rstd = -1/2 (var + eps)^(-3/2) d var   = -rstd^2 avg(xhat dx)
#     d xhat = (dx - d mean) rstd + (x - mean) d rstd
#            = rstd (dx - avg(dx) - xhat avg(xhat dx))
#
# Step 2 and 3: put it into <g, d xhat> and move everything to the other side. An average is its own adjoint,
# <g, avg(dx)> = <avg(g), dx>, and the last term becomes <g, xhat avg(xhat dx)> = <xhat avg(g xhat), dx>. So
#
#     ct_x = rstd (g - avg(g) - xhat avg(g xhat))
#
# In words: take from g its part along (1, 1, ..., 1) and its part along xhat. Those are the two directions in which x
# can move without moving y (a shift and, but for eps, a stretch), so no gradient may point along them.


def average(x):
    return x.mean(axis=-1, keepdims=True)


def forward(x, w, b, eps=1e-5):
    mean, rstd = average(x), 1.0 / np.sqrt(x.var(axis=-1, keepdims=True) + eps)
    return (x - mean) * rstd * w + b, mean, rstd


def backward(ct, x, w, mean, rstd):
    xhat, g = (x - mean) * rstd, ct * w
    ct_x = rstd * (g - average(g) - xhat * average(g * xhat))
    return ct_x, (ct * xhat).sum(axis=0), ct.sum(axis=0)


x, ct = rng.standard_normal((6, 8)), rng.standard_normal((6, 8))
w, b = rng.standard_normal(8), rng.standard_normal(8)
y, mean, rstd = forward(x, w, b)
cts = backward(ct, x, w, mean, rstd)

# --------------------------------------------------------------------------------------------------- 2. is it right?


def slope(f, x, h=1e-5):
    """The gradient of <ct, f(x)> by central differences, element by element."""
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[at] = h
        found[at] = (ct * (f(x + e) - f(x - e))).sum() / (2 * h)
    return found


leaves = [mg.tensor(array, requires_grad=True) for array in (x, w, b)]
tape_cts = mg.gradients(F.layer_norm(*leaves), leaves, ct)
finite = (slope(lambda x: forward(x, w, b)[0], x), slope(lambda w: forward(x, w, b)[0], w),
          slope(lambda b: forward(x, w, b)[0], b))
print("largest difference of the hand-made cotangents\n")
print("            from minigrad   from central differences")
for name, hand, tape, near in zip(("x", "w", "b"), cts, tape_cts, finite, strict=True):
    to_tape, to_near = abs(hand - tape.numpy()).max(), abs(hand - near).max()
    assert to_tape < 1e-12 and to_near < 1e-7
    print(f"  ct_{name}      below 1e-12     below 1e-7")

xhat = (x - mean) * rstd
along_one, along_xhat = abs(cts[0].sum(axis=1)).max(), abs((cts[0] * xhat).sum(axis=1)).max()
assert along_one < 1e-12
print("\nct_x along (1, ..., 1): below 1e-12")
print(f"ct_x along xhat:        {along_xhat:.0e}   (not 0 to the last digit: eps stands in the way of a pure stretch)")

# ---------------------------------------------------------------------------------------------------- 3. what to keep
#
# Written as plain ops, every intermediate array waits on the tape for its own rule. The rule above needs x, w, and two
# numbers a row; xhat is one subtraction and one product away, cheaper to make again than to fetch. A *fused* op does
# that: one node, with mean and rstd as its residuals. (The composition keeps x - mean and xhat; the fused op keeps x,
# which whoever made it or uses it next most likely keeps as well.)

rows, width = 256, 512
big = mg.tensor(rng.standard_normal((rows, width)), requires_grad=True)
w, b = (mg.tensor(np.ones(width), requires_grad=True) for _ in range(2))
for name, way in (("composed", mg.composed()), ("fused", contextlib.nullcontext())):
    with way, mg.Tape() as tape:
        F.layer_norm(big, w, b)
    kept = sum({id(a): a.nbytes for node in tape for a in node.kept}.values())       # what two nodes keep counts once
    print(f"\n{name:9}{len(tape)} node{'s' * (len(tape) > 1)}, keeping {kept / big.nbytes:.2f} times the size of x")
    print(f"         {', '.join(node.name for node in tape)}")

# To try: set eps to 0 in forward and in F.layer_norm(..., eps=0.0): what becomes of ct_x along xhat?
# To try: derive the rule of rms_norm, y = x / sqrt(avg(x^2) + eps). Which of the three terms goes?
