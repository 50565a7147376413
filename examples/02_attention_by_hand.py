"""Attention by hand: Appendix A.10, equation by equation, against the tape and against finite differences.

    python examples/02_attention_by_hand.py

For one head: the forward pass (A.10.1 to A.10.3, with A.10.10), then every gradient of the appendix (A.10.5 to A.10.11)
written out in NumPy. Each is compared with what minigrad's tape computes and, in float64, with central differences of
the loss. Then what A.10 says of cross-attention, of heads, of shared key/value heads, of rows that see nothing, and of
the factor 1/sqrt(d) (A.10.4). The table at the end is the result; a difference that is too large stops the program.

Names: n positions, d the width of X, dh the width of a query and a key, dv that of a value. G_Z is the gradient of the
loss with respect to Z, of Z's shape. Products of arrays are matrix products, row vectors stand for positions.
"""

import math

import numpy as np

import minigrad as mg
import minigrad.functional as F

rng = np.random.default_rng(0)
TAPE, FINITE = 1e-12, 1e-7                               # the largest differences allowed
table = []


def check(equation, what, hand, tape, finite=None):
    """Compare the hand-made array with the tape's and, if given, with finite differences; add a row to the table."""
    hand, tape = np.asarray(hand), np.asarray(tape)
    assert hand.shape == tape.shape, (equation, what, hand.shape, tape.shape)
    to_tape = np.abs(hand - tape).max()
    to_finite = None if finite is None else np.abs(hand - finite).max()
    assert to_tape < TAPE and (to_finite is None or to_finite < FINITE), (equation, what, to_tape, to_finite)
    table.append((equation, what, str(hand.shape), f"{to_tape:.1e}", "-" if to_finite is None else f"{to_finite:.1e}"))


def slope(f, x, h=1e-5):
    """The gradient of a scalar f at x by central differences: (f(x + h e) - f(x - h e)) / 2h for each element e."""
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += h
        down[at] -= h
        found[at] = (f(up) - f(down)) / (2 * h)
    return found


# -------------------------------------------------------------------------------------------------- 1. the forward pass

n, d, dh, dv = 5, 6, 4, 3
X = rng.standard_normal((n, d))
W_Q, W_K, W_V = (rng.standard_normal((d, width)) / math.sqrt(d) for width in (dh, dh, dv))

# The visible set V_i of each row i, as a matrix: True = query i may see key j. Causal, j <= i (A.10 sec. 6), and one
# key hidden from every later row, as padding is.
visible = np.tril(np.ones((n, n), bool))
visible[2:, 1] = False


def softmax_rows(S, visible):
    """(A.10.2): only over the visible set; zero elsewhere. The maximum is taken over the visible scores as well."""
    A = np.zeros_like(S)
    for i, seen in enumerate(visible):
        e = np.exp(S[i, seen] - S[i, seen].max())
        A[i, seen] = e / e.sum()
    return A


def forward(X, W_Q, W_K, W_V):
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V                  # (A.10.10)
    S = Q @ K.T / math.sqrt(dh)                          # (A.10.1)
    A = softmax_rows(S, visible)                         # (A.10.2)
    O = A @ V                                            # (A.10.3)  # noqa: E741
    return Q, K, V, S, A, O


Q, K, V, S, A, O = forward(X, W_Q, W_K, W_V)             # noqa: E741

# The same on the tape. `composed` runs every op as its composition of plain nodes, so that S and A lie on the tape; the
# fused kernels follow below.
tensors = [mg.tensor(array, requires_grad=True) for array in (X, W_Q, W_K, W_V)]
x, w_q, w_k, w_v = tensors
with mg.composed():
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    s = q @ k.T / math.sqrt(dh)
    a = F.masked_softmax(s, visible)
    o = a @ v

entry = np.array([[sum(Q[i, r] * K[j, r] for r in range(dh)) / math.sqrt(dh) for j in range(n)] for i in range(n)])
for name, hand, tape in (("Q", Q, q), ("K", K, k), ("V", V, v)):
    check("A.10.10", f"{name} = X W_{name}", hand, tape)
check("A.10.1", "S_ij = q_i . k_j / sqrt(dh)", entry, s)
check("A.10.2", "A = softmax over the visible set", A, a)
check("A.10.2", "a row of A sums to 1", np.ones(n), a.sum(axis=1))
check("A.10.2", "A is 0 where hidden", np.zeros((~visible).sum()), np.asarray(a)[~visible])
check("A.10.3", "O = A V", O, o)

# ------------------------------------------------------------------------------------------------- 2. the backward pass
#
# Any loss will do; ours weighs the outputs with fixed numbers, L = sum(O * G_O), so that its gradient with respect to
# O, which the appendix starts from, is G_O itself.

G_O = rng.standard_normal((n, dv))


def loss(O):                                             # noqa: E741
    return (O * G_O).sum()


# The gradients by the appendix, in its order.
G_V = A.T @ G_O                                          # (A.10.5)
G_A = G_O @ V.T                                          # (A.10.6)
c = (A * G_A).sum(axis=1, keepdims=True)                 # c_i, over the visible set: elsewhere A is 0
G_S = np.where(visible, A * (G_A - c), 0.0)              # (A.10.7)
G_Q = G_S @ K / math.sqrt(dh)                            # (A.10.8)
G_K = G_S.T @ Q / math.sqrt(dh)                          # (A.10.9)
G_WQ, G_WK, G_WV = X.T @ G_Q, X.T @ G_K, X.T @ G_V       # (A.10.11)
G_X = G_Q @ W_Q.T + G_K @ W_K.T + G_V @ W_V.T            # (A.10.11): X was used three times, the cotangents add

# By the tape: `mg.gradients` also gives the cotangents of what lies between the leaves and the loss.
named = dict(v=v, a=a, s=s, q=q, k=k, w_q=w_q, w_k=w_k, w_v=w_v, x=x)
cts = dict(zip(named, mg.gradients((o * G_O).sum(), list(named.values())), strict=True))

# By finite differences: each line is the loss as a function of one quantity, everything before it held fixed.
check("A.10.5", "G_V = A^T G_O", G_V, cts["v"], slope(lambda V: loss(A @ V), V))
check("A.10.6", "G_A = G_O V^T", G_A, cts["a"], slope(lambda A: loss(A @ V), A))
check("A.10.7", "G_S = A (G_A - c), 0 where hidden", G_S, cts["s"],
      slope(lambda S: loss(softmax_rows(S, visible) @ V), S))
check("A.10.7", "a row of G_S sums to 0", np.zeros(n), cts["s"].sum(axis=1))
check("A.10.8", "G_Q = G_S K / sqrt(dh)", G_Q, cts["q"],
      slope(lambda Q: loss(softmax_rows(Q @ K.T / math.sqrt(dh), visible) @ V), Q))
check("A.10.9", "G_K = G_S^T Q / sqrt(dh)", G_K, cts["k"],
      slope(lambda K: loss(softmax_rows(Q @ K.T / math.sqrt(dh), visible) @ V), K))
check("A.10.11", "G_W_Q = X^T G_Q", G_WQ, cts["w_q"], slope(lambda W: loss(forward(X, W, W_K, W_V)[-1]), W_Q))
check("A.10.11", "G_W_K = X^T G_K", G_WK, cts["w_k"], slope(lambda W: loss(forward(X, W_Q, W, W_V)[-1]), W_K))
check("A.10.11", "G_W_V = X^T G_V", G_WV, cts["w_v"], slope(lambda W: loss(forward(X, W_Q, W_K, W)[-1]), W_V))
check("A.10.11", "G_X = G_Q W_Q^T + G_K W_K^T + G_V W_V^T", G_X, cts["x"],
      slope(lambda X: loss(forward(X, W_Q, W_K, W_V)[-1]), X))

# Training does not keep a node for every line: one fused op does (A.10.1) to (A.10.3), and its kernel's backward is
# (A.10.5) to (A.10.9). It must give the same. "tiled" never holds all of S or A (A.10 sec. 6).
for implementation in ("composed", "fused", "tiled"):
    leaves = [mg.tensor(array, requires_grad=True) for array in (Q, K, V)]
    whole = F.scaled_dot_product_attention(*leaves, visible, implementation=implementation)
    check("A.10.1-3", f"O by the op, {implementation}", O, whole)
    for name, hand, tape in zip(("G_Q", "G_K", "G_V"), (G_Q, G_K, G_V), mg.gradients(whole, leaves, G_O), strict=True):
        check("A.10.5-9", f"{name} by the op, {implementation}", hand, tape)


# --------------------------------------------------------------------------------------------------- 3. cross-attention
#
# Queries come from X, keys and values from another sequence C of another length. The formulas are the same, but G_X
# and G_C sum only over the branches that came from each (the sentence after A.10.11).

C = rng.standard_normal((7, d))
everything = np.ones((n, 7), bool)


def cross(X, C):
    K, V = C @ W_K, C @ W_V
    A = softmax_rows(X @ W_Q @ K.T / math.sqrt(dh), everything)
    return K, V, A, A @ V


Kc, Vc, Ac, Oc = cross(X, C)
G_Ac = G_O @ Vc.T
G_Sc = Ac * (G_Ac - (Ac * G_Ac).sum(axis=1, keepdims=True))
G_Xc = G_Sc @ Kc / math.sqrt(dh) @ W_Q.T
G_C = G_Sc.T @ Q / math.sqrt(dh) @ W_K.T + Ac.T @ G_O @ W_V.T

x, context = (mg.tensor(array, requires_grad=True) for array in (X, C))
o = F.scaled_dot_product_attention(x @ W_Q, context @ W_K, context @ W_V)
ct_x, ct_context = mg.gradients(o, [x, context], G_O)
check("A.10.11", "cross: G_X = G_Q W_Q^T", G_Xc, ct_x, slope(lambda X: loss(cross(X, C)[-1]), X))
check("A.10.11", "cross: G_C = G_K W_K^T + G_V W_V^T", G_C, ct_context, slope(lambda C: loss(cross(X, C)[-1]), C))


# ---------------------------------------------------------------------- 4. heads are an index permutation (A.10 sec. 5)
#
# One product makes all heads side by side, (B, n, H dh). Reshape and transpose to (B, H, n, dh) change no number, only
# its place, so each cotangent goes back to where its number came from: the *inverse* permutations, last one first.
# (0, 2, 1, 3) is its own inverse; (1, 2, 0) is not, and shows that the inverse is meant.

B, H = 2, 3
packed = rng.standard_normal((B, n, H * dh))
weight = rng.standard_normal((B, H, n, dh))


def split_heads(packed):
    return packed.reshape(B, n, H, dh).transpose(0, 2, 1, 3)


def merge_heads(heads):
    return heads.transpose(0, 2, 1, 3).reshape(B, n, H * dh)


leaf = mg.tensor(packed, requires_grad=True)
ct, = mg.gradients(split_heads(leaf), [leaf], weight)    # split_heads runs on arrays and on Tensors
check("A.10 sec. 5", "(B, n, H dh) -> (B, H, n, dh), undone", merge_heads(weight), ct,
      slope(lambda p: (split_heads(p) * weight).sum(), packed))

axes = (1, 2, 0)
inverse = tuple(int(i) for i in np.argsort(axes))        # (2, 0, 1)
cube, weight = rng.standard_normal((2, 3, 4)), rng.standard_normal((3, 4, 2))
leaf = mg.tensor(cube, requires_grad=True)
ct, = mg.gradients(leaf.transpose(axes), [leaf], weight)
check("A.10 sec. 5", "transpose (1, 2, 0), undone by (2, 0, 1)", weight.transpose(inverse), ct,
      slope(lambda x: (x.transpose(axes) * weight).sum(), cube))


# ------------------------------------------------------------------------------ 5. shared key/value heads (A.10 sec. 5)
#
# Grouped-query attention: query head r reads key/value head g(r). Every query head applies (A.10.1) to (A.10.9) on its
# own; what the heads that share a key/value head send back to it adds up.

g = (0, 0, 1)                                            # query heads 0 and 1 share key/value head 0
Qh = rng.standard_normal((3, n, dh))
Kh, Vh = rng.standard_normal((2, n, dh)), rng.standard_normal((2, n, dv))
G_Oh = rng.standard_normal((3, n, dv))


def grouped(Qh, Kh, Vh):
    Ah = np.stack([softmax_rows(Qh[r] @ Kh[g[r]].T / math.sqrt(dh), visible) for r in range(3)])
    return Ah, np.stack([Ah[r] @ Vh[g[r]] for r in range(3)])


Ah, Oh = grouped(Qh, Kh, Vh)
G_Qh, G_Kh, G_Vh = np.zeros_like(Qh), np.zeros_like(Kh), np.zeros_like(Vh)
for r in range(3):
    G_Ar = G_Oh[r] @ Vh[g[r]].T                                                   # (A.10.6)
    G_Sr = Ah[r] * (G_Ar - (Ah[r] * G_Ar).sum(axis=1, keepdims=True))             # (A.10.7)
    G_Qh[r] = G_Sr @ Kh[g[r]] / math.sqrt(dh)                                     # (A.10.8)
    G_Kh[g[r]] += G_Sr.T @ Qh[r] / math.sqrt(dh)                                  # (A.10.9), += : heads that share add
    G_Vh[g[r]] += Ah[r].T @ G_Oh[r]                                               # (A.10.5), +=

leaves = [mg.tensor(array, requires_grad=True) for array in (Qh, Kh, Vh)]
o = F.scaled_dot_product_attention(*leaves, visible, kv_head=g)
ct_q, ct_k, ct_v = mg.gradients(o, leaves, G_Oh)
check("A.10 sec. 5", "GQA: O, three query heads over two", Oh, o)
check("A.10 sec. 5", "GQA: G_Q", G_Qh, ct_q,
      slope(lambda Q: (grouped(Q, Kh, Vh)[1] * G_Oh).sum(), Qh))
check("A.10 sec. 5", "GQA: G_K, added where heads share", G_Kh, ct_k,
      slope(lambda K: (grouped(Qh, K, Vh)[1] * G_Oh).sum(), Kh))
check("A.10 sec. 5", "GQA: G_V, added where heads share", G_Vh, ct_v,
      slope(lambda V: (grouped(Qh, Kh, V)[1] * G_Oh).sum(), Vh))


# ---------------------------------------------------------------------------------- 6. a row that sees nothing (A.10.2)
#
# The softmax of an empty set is undefined. A finite "minus infinity" would quietly give the mean of V, a true one NaN.
# minigrad refuses, and names the row; or, if asked, gives zeros: no output and no gradient.

blind = visible.copy()
blind[3] = False
leaves = [mg.tensor(array, requires_grad=True) for array in (Q, K, V)]
try:
    F.scaled_dot_product_attention(*leaves, blind)
    raise AssertionError("a row that sees nothing was let through")
except ValueError as error:
    refusal = str(error)
o = F.scaled_dot_product_attention(*leaves, blind, empty_rows="zeros")
check("A.10.2", 'empty row, "zeros": its output', np.zeros(dv), o[3])
check("A.10.8", 'empty row, "zeros": its G_Q', np.zeros(dh), mg.gradients(o, leaves, G_O)[0][3])


# ---------------------------------------------------------------------------------------------------------- the results

header = ("equation", "what", "shape", "tape", "finite differences")
widths = [max(map(len, column)) for column in zip(header, *table, strict=True)]
print("The formulas of A.10 by hand, and their largest differences from the tape and from finite differences:\n")
for row in (header, *table):
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
print(f"\nA row that sees nothing: {refusal}")

# (A.10.4): for independent coordinates of mean 0, Var(q . k) = dh sigma_q^2 sigma_k^2. Nothing needs to be normal: here
# q is uniform in (-1, 1), of variance 1/3, and k is -2 or 2 by the toss of a coin, of variance 4. After the division by
# sqrt(dh) the variance of a score no longer depends on dh. That is a statement about such a start: trained Q and K do
# not meet its conditions in general.
print("\n(A.10.4) Var(q . k) = dh sigma_q^2 sigma_k^2, 20,000 pairs, sigma_q^2 = 1/3, sigma_k^2 = 4:\n")
print(" dh   predicted   measured   measured / dh, the variance of S")
for width in (4, 16, 64):
    products = (rng.uniform(-1.0, 1.0, (20_000, width)) * rng.choice([-2.0, 2.0], (20_000, width))).sum(axis=1)
    predicted, measured = width / 3 * 4, products.var()
    assert abs(measured / predicted - 1) < 0.05          # a variance from 20,000 draws is good to about 1 %
    print(f"{width:3}   {predicted:9.3f}   {measured:8.3f}   {measured / width:.3f}")
print(f"\nAll {len(table)} checks hold: {TAPE} to the tape, {FINITE} to finite differences.")
