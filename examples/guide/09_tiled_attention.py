"""Guide 9. Tiled attention: the same numbers without ever holding all the weights.

    python examples/guide/09_tiled_attention.py

Read before: guide 8. The weights A (T, S) grow with the product of the lengths: 32 GiB for one head at T = S = 65,536.
Online softmax (Milakov and Gimelshein, 2018) and recomputation in the backward (Dao et al., 2022) need blocks of them
only. Below are both, in NumPy, causal; the fast version of the same is minigrad/kernels/numpy/attention.py.
"""

import tracemalloc

import numpy as np

import minigrad as mg
import minigrad.functional as F

BLOCK = 64


# ------------------------------------------------------------------------------------------------- 1. two forwards


def visible(rows, columns):
    """The causal visible set of a tile: key j <= query i."""
    return np.arange(columns.start, columns.stop) <= np.arange(rows.start, rows.stop)[:, None]


def tiles(T, S):
    """The tiles with anything to see, row block by row block."""
    for r in range(0, T, BLOCK):
        rows = slice(r, min(r + BLOCK, T))
        for c in range(0, min(rows.stop, S), BLOCK):     # causal: keys after the block's last query are skipped
            yield rows, slice(c, min(c + BLOCK, S))


def composed(Q, K, V):
    """(A.10.1) to (A.10.3), all of S and A at once."""
    S = Q @ K.T / np.sqrt(Q.shape[1])
    S[~visible(slice(0, len(Q)), slice(0, len(K)))] = -np.inf
    A = np.exp(S - S.max(axis=1, keepdims=True))
    A /= A.sum(axis=1, keepdims=True)
    return A @ V, A


# A row of O is (sum of e^(S_ij - m) v_j) / (sum of e^(S_ij - m)): two sums over keys, which can be taken tile by tile,
# if only the maximum m were known. It is not, before the last tile; so use the maximum so far, and when a larger one
# comes, multiply what was summed by e^(old - new). A factor common to both sums cancels: the result is exact, not
# approximate.


def tiled(Q, K, V):
    """O and, per row, the log-sum-exp of its scores."""
    m, total = np.full((len(Q), 1), -np.inf), np.zeros((len(Q), 1))
    O = np.zeros((len(Q), V.shape[1]))  # noqa: E741
    for rows, cols in tiles(len(Q), len(K)):
        S = np.where(visible(rows, cols), Q[rows] @ K[cols].T / np.sqrt(Q.shape[1]), -np.inf)       # (A.10.1)
        higher = np.maximum(m[rows], S.max(axis=1, keepdims=True))
        shrink, P = np.exp(m[rows] - higher), np.exp(S - higher)
        total[rows] = total[rows] * shrink + P.sum(axis=1, keepdims=True)
        O[rows] = O[rows] * shrink + P @ V[cols]
        m[rows] = higher
    return O / total, m + np.log(total)


# ------------------------------------------------------------------------------------------------ 2. two backwards


def composed_backward(G_O, Q, K, V, A):
    scale = 1.0 / np.sqrt(Q.shape[1])
    G_A = G_O @ V.T                                                                                 # (A.10.6)
    G_S = A * (G_A - (A * G_A).sum(axis=1, keepdims=True))                                          # (A.10.7)
    return G_S @ K * scale, G_S.T @ Q * scale, A.T @ G_O                                            # (A.10.8, 9, 5)


# A tile of A is e^(S - lse): one product and one exponential, made again instead of kept. One thing in (A.10.7) needs a
# whole row, c_i = sum over j of A_ij G_A_ij. But G_A_ij = G_O_i . v_j, so c_i = G_O_i . (sum of A_ij v_j) = G_O_i .
# O_i, a dot product of two rows of width Dv. That, and lse, is all that is kept beyond Q, K, V and O.


def tiled_backward(G_O, Q, K, V, O, lse):  # noqa: E741
    scale, c = 1.0 / np.sqrt(Q.shape[1]), (G_O * O).sum(axis=1, keepdims=True)
    G_Q, G_K, G_V = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
    for rows, cols in tiles(len(Q), len(K)):
        S = np.where(visible(rows, cols), Q[rows] @ K[cols].T * scale, -np.inf)
        A = np.exp(S - lse[rows])                                                                   # (A.10.2), again
        G_V[cols] += A.T @ G_O[rows]                                                                # (A.10.5)
        G_S = A * (G_O[rows] @ V[cols].T - c[rows])                                                 # (A.10.6), (A.10.7)
        G_Q[rows] += G_S @ K[cols] * scale                                                          # (A.10.8)
        G_K[cols] += G_S.T @ Q[rows] * scale                                                        # (A.10.9)
    return G_Q, G_K, G_V


# -------------------------------------------------------------------------------------------- 3. equal, and smaller


def peak(f):
    """(result, the most memory that f had in use at once)."""
    tracemalloc.start()
    try:
        return f(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def one_pass(forward, backward, keep_output):
    def run():
        O, kept = forward(Q, K, V)  # noqa: E741
        return O, *backward(G_O, Q, K, V, *([O] if keep_output else []), kept)
    return peak(run)


rng = np.random.default_rng(0)
print(f"Forward and backward, causal, one head of width 16, tiles of {BLOCK} x {BLOCK}; the most memory in use:\n")
print("    T    composed      tiled    largest difference")
for T in (100, 256, 512, 1024):                          # 100 is no multiple of the block
    Q, K, V, G_O = rng.standard_normal((4, T, 16))
    plain, much = one_pass(composed, composed_backward, keep_output=False)
    tile, little = one_pass(tiled, tiled_backward, keep_output=True)
    difference = max(abs(a - b).max() for a, b in zip(plain, tile, strict=True))
    assert difference < 1e-12
    print(f"{T:5}{much / 2**20:8.1f} MiB{little / 2**20:7.1f} MiB    below 1e-12")

print("\nTwice the length is four times the memory on the left and twice on the right. The work stays quadratic on")
print("both sides: tiles save memory, not products; the causal set halves them, because hidden tiles are skipped.")
seen = sum(1 for _ in tiles(T, T))
print(f"tiles looked at, T = {T}: {seen} of {(T // BLOCK) ** 2}")

leaves = [mg.tensor(array, requires_grad=True) for array in (Q, K, V)]
o = F.scaled_dot_product_attention(*leaves, is_causal=True, implementation="tiled")
found = (o, *mg.gradients(o, leaves, G_O))
assert max(abs(a.numpy() - b).max() for a, b in zip(found, tile, strict=True)) < 1e-12
print('\nminigrad\'s implementation="tiled" gives the same O, G_Q, G_K and G_V: below 1e-12')

# To try: leave `shrink` out of O's line, but not of total's, and print abs(plain[0] - tile[0]).max(axis=1) before the
# assert. Which rows of O stay right, and why?
# To try: give `visible` a window, j > i - 100, and skip the tiles that it empties.
