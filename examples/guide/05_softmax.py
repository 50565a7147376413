"""Guide 5. Softmax: a rule that never writes its Jacobian down, and rows that see only part of their keys.

    python examples/guide/05_softmax.py

Read before: guide 1. The equations are those of Appendix A.10, as in examples/02_attention_by_hand.py; its G_Z is the
cotangent of Z.
"""

import numpy as np

import minigrad as mg
import minigrad.functional as F

rng = np.random.default_rng(0)

# ---------------------------------------------------------------------------- 1. the Jacobian without the Jacobian
#
# a_j = e^(s_j) / sum of e^(s_r): every a_j depends on every s_r of its row. Take the logarithm first,
#
#     log a_j = s_j - log sum e^(s_r)      so     da_j / a_j = ds_j - sum over r of a_r ds_r.
#
# So the Jacobian of a row is diag(a) - a a^T. It is n x n, but <ct, da> needs only one number more than ct and a:
#
#     <ct, da> = sum of ct_j a_j ds_j - c (sum of a_r ds_r) = <a (ct - c), ds>,     c = sum of a_j ct_j     (A.10.7)
#
# The rule needs the output and not the input. The engine sees that from the rule's parameter names: `ct, y`.


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))        # the maximum cancels in the quotient, and e^x cannot overflow
    return e / e.sum(axis=-1, keepdims=True)


def rule(ct, a):
    return a * (ct - (a * ct).sum(axis=-1, keepdims=True))


s, ct = rng.standard_normal(5), rng.standard_normal(5)
a = softmax(s)
jacobian = np.diag(a) - np.outer(a, a)
print("softmax of one row, ct_s two ways:\n")
print("  jacobian^T ct    ", np.array2string(jacobian.T @ ct, precision=5))
print("  a (ct - c)       ", np.array2string(rule(ct, a), precision=5))
np.testing.assert_allclose(jacobian.T @ ct, rule(ct, a), rtol=1e-12, atol=1e-15)
print("  the sum of ct_s is 0: adding a constant to a row changes no softmax")
print("  ct_s is 0 for a constant ct: a row of a sums to 1, whatever s is")
assert abs(rule(ct, a).sum()) < 1e-15 and abs(rule(np.ones(5), a)).max() < 1e-15
n = 4096
print(f"  a row of {n}: its Jacobian would take {n * n * 8 / 2**20:.0f} MiB, a and c take {(n + 1) / 2**7:.0f} KiB")

# When a row has made up its mind, its Jacobian is small in all directions: hard attention lets little gradient through
# to the scores. (That is a statement about this row; V and the residual path still get theirs.)

print("\n sharpness    largest a    |ct_s|")
for sharpness in (1, 4, 16, 64):
    a = softmax(sharpness * s)
    print(f"{sharpness:10}{a.max():13.6f}{np.linalg.norm(rule(ct, a)):10.1e}")

# ------------------------------------------------------------------------------------------ 2. the visible set (A.10.2)
#
# In attention a query sees only some keys. The softmax is taken over those: the sum and the maximum as well. What is
# hidden gets weight 0 and gradient 0, and its score does not matter, even if it is huge.

visible = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1]], bool)       # True = this key may be seen
scores = rng.standard_normal((3, 4))
scores[0, 3] = 1e4                                       # hidden: as the maximum, it would turn the row into 0 / 0
s = mg.tensor(scores, requires_grad=True)
a = F.masked_softmax(s, visible)
ct = rng.standard_normal((3, 4))
g_s, = mg.gradients(a, [s], ct)


def draw(name, x, hidden):
    print(f"\n  {name}")
    for row, hide in zip(np.asarray(x), hidden, strict=True):
        print("    " + "".join("       .   " if h else f"{v:9.4f}  " for v, h in zip(row, hide, strict=True)).rstrip())


print("\nOver a visible set (a dot is hidden):")
draw("A    (A.10.2)", a, ~visible)
draw("G_S  (A.10.7)", g_s, ~visible)
np.testing.assert_allclose(g_s.numpy(), rule(ct, a.numpy()), rtol=1e-12, atol=1e-15)
assert not a.numpy()[~visible].any() and not g_s.numpy()[~visible].any()
np.testing.assert_allclose(a.numpy().sum(axis=1), 1.0, rtol=1e-12)

# -------------------------------------------------------------------------------------------- 3. rows that see nothing
#
# If the visible set is empty, (A.10.2) divides nothing by nothing: there is no softmax. What one gets depends on how
# the mask was written, and no two ways agree. minigrad refuses, and names the row; if asked, it gives zeros.

blind = visible.copy()
blind[1] = False
row = scores[1]
with np.errstate(invalid="ignore"):
    print("\nA row that sees nothing, if one")
    print("  subtracts 1e9:    ", softmax(row - 1e9).round(3).tolist(), " the softmax of what was hidden")
    print("  writes -1e9:      ", softmax(np.where(blind[1], row, -1e9)).tolist(), " the mean of V")
    print("  writes -inf:      ", softmax(np.where(blind[1], row, -np.inf)).tolist())
try:
    F.masked_softmax(s, blind)
except ValueError as error:
    print(f"  asks minigrad:     {error}")
a = F.masked_softmax(s, blind, empty_rows="zeros")
g_s = mg.gradients(a, [s], ct)[0].numpy()
print('  empty_rows="zeros":', a.numpy()[1].tolist(), " and no gradient:", (g_s[1] + 0.0).tolist())     # + 0.0: no -0.0

# To try: derive the rule of log_softmax, y = s - log sum e^s, the same way. What does it keep? (ops/softmax.py)
# To try: make ct the same number in every column of a row of part 2. What is that row of G_S, and why?
