"""Guide 2. Broadcasting: copying forward is summing backward.

    python examples/guide/02_broadcasting.py

Read before: guide 1 (the definition of a rule). The idea is one line long, and it comes back as summed biases, shared
parameters, embedding tables and grouped attention heads.
"""

import numpy as np

import minigrad as mg
import minigrad.functional as F

rng = np.random.default_rng(0)

# ------------------------------------------------------------------------------------------------ 1. the adjoint
#
# NumPy aligns shapes at the right, adds axes that are missing on the left, and stretches axes of length 1. As a
# function of its own, y = broadcast_to(x, shape) is linear, so dy is made from dx exactly as y from x. For x (2, 1) ->
# y (2, 3):
#
#     dL = <ct, dy> = sum over i, j of ct[i, j] dx[i, 0] = sum over i of (sum over j of ct[i, j]) dx[i, 0]
#
# and what stands beside dx[i, 0] is the sum over the axis that was stretched. The loss felt every copy; the copies'
# cotangents add. Read from right to left, the same line is the rule of sum: it copies its cotangent.


def unbroadcast(ct, shape):
    """The rule of broadcast_to: sum over the axes that were added or stretched."""
    added = ct.ndim - len(shape)
    stretched = tuple(i + added for i, n in enumerate(shape) if n == 1 and ct.shape[i + added] != 1)
    return ct.sum(axis=(*range(added), *stretched), keepdims=True).reshape(shape), (*range(added), *stretched)


# Two linear maps are adjoint if <ct, P dx> = <P' ct, dx> for all ct and dx: no small h is needed to check a linear one.

print("broadcast_to and its adjoint, <ct, dy> against <ct_x, dx>:\n")
for small, big in [((3,), (2, 3)), ((2, 1), (2, 3)), ((), (2, 3)), ((4, 1), (2, 4, 3)), ((1, 4, 1), (2, 4, 3))]:
    dx, ct = rng.standard_normal(small), rng.standard_normal(big)
    ct_x, axes = unbroadcast(ct, small)
    left, right = (ct * np.broadcast_to(dx, big)).sum(), (ct_x * dx).sum()
    print(f"  {small!s:10} -> {big!s:10} summed over axes {axes!s:7}  {left:9.5f}  {right:9.5f}")
    assert np.isclose(left, right, rtol=1e-12)

# ---------------------------------------------------------------------------------------------- 2. done in one place
#
# a + b, a * b and many others broadcast. Rules that each undid it would all have the same few lines, and some would
# have them wrong. In minigrad a rule returns what it has, of the output's shape: `lambda ct, b: ct * b` for a product.
# The engine sums it to the argument's shape, for every op declared with broadcasts=True (_unbroadcast in
# minigrad/tape.py).

x = mg.tensor(rng.standard_normal((2, 3)), requires_grad=True)
bias = mg.tensor(rng.standard_normal(3), requires_grad=True)
scale = mg.tensor(2.0, requires_grad=True, dtype=mg.float64)
ct = rng.standard_normal((2, 3))
found = mg.gradients(x * scale + bias, [x, bias, scale], ct)
wanted = (ct * 2.0, ct.sum(axis=0), (ct * x.numpy()).sum())
print("\nx (2, 3) * scale () + bias (3,): the cotangents have their tensors' shapes\n")
for name, c, w in zip(("x", "bias", "scale"), found, wanted, strict=True):
    np.testing.assert_allclose(c.numpy(), w, rtol=1e-12)
    print(f"  ct_{name:6} {c.shape}")

# --------------------------------------------------------------------------------------------- 3. the same idea again
#
# Whatever is read more than once gets the sum of what its readers send back. An embedding table is rows that are read
# by id; a row that came twice gets two cotangents, a row that never came gets zeros.

table = mg.tensor(np.zeros((4, 2)), requires_grad=True)
ids = [1, 3, 1]
ct = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
gradient = mg.gradients(F.embedding(ids, table), [table], ct)[0].numpy()
print(f"\nids {ids} read rows of a table; their cotangents come back to the rows:\n")
for i, row in enumerate(gradient):
    came = " + ".join(str(c.tolist()) for n, c in zip(ids, ct, strict=True) if n == i) or "read by nobody"
    print(f"  row {i}  {row.tolist()!s:14} = {came}")

# NumPy has a trap here, since `out[ids] += ct` reads out[ids] once, adds, and stores: of two equal ids the last one
# stored wins.

trap, right = np.zeros((4, 2)), np.zeros((4, 2))
trap[ids] += ct
np.add.at(right, ids, ct)
print(f"\n  out[ids] += ct leaves in row 1    {trap[1].tolist()}   (wrong: one of the two is lost)")
print(f"  np.add.at(out, ids, ct) leaves    {right[1].tolist()}")
assert (right == gradient).all()

# To try: make `scale` of shape (2, 1), np.full((2, 1), 2.0). Over which axis must ct * x be summed in `wanted` now?
# To try: what is the rule of y = x.mean(axis=0), read as a sum followed by a multiplication?
