"""Guide 8. Attention on real letters: the visible set, the weights, and where the gradient goes.

    python examples/guide/08_attention.py

Read before: guide 5. examples/02_attention_by_hand.py checks every equation of Appendix A.10 on random numbers; here
the same equations run on a sentence, and are drawn.
"""

import numpy as np

import minigrad as mg
import minigrad.functional as F

TEXT = "the hen then"
letters = sorted(set(TEXT))
T, D = len(TEXT), len(letters)
SHADES = " .:-=+*#%@"


def draw(title, matrix, visible=None, rows=TEXT, columns=TEXT):
    """|matrix| as a heat map: a row is a query, a column a key; / is hidden, a blank is 0."""
    matrix = np.asarray(matrix)
    shade = np.rint(np.abs(matrix) / max(np.abs(matrix).max(), 1e-300) * (len(SHADES) - 1)).astype(int)
    print(f"\n  {title}\n        " + " ".join(columns.replace(" ", "_")))
    for i, letter in enumerate(rows.replace(" ", "_")):
        marks = [SHADES[n] if visible is None or visible[i, j] else "/" for j, n in enumerate(shade[i])]
        print(f"      {letter} " + " ".join(marks).rstrip())


# ------------------------------------------------------------------------------------------- 1. who may see whom
#
# Each query position i has a visible set V_i of key positions (A.10.1). Everything one does with masks is a choice of
# V_i: causal (j <= i), a window of the last w keys, documents packed into one row that must not see each other.

causal = F.visible_set(T, T, causal=True)
window = F.visible_set(T, T, causal=True, window=4)
words = np.cumsum([c == " " for c in TEXT])              # 0 0 0 1 1 1 1 2 ...: which word a letter belongs to
packed = F.document_mask(words)[0] & causal
print(f"The visible sets of {TEXT!r}: @ is seen, / is hidden; a row is a query, a column a key.")
draw("causal: j <= i", np.ones((T, T)), causal)
draw("window=4: the last four of those", np.ones((T, T)), window)
draw("document_mask: each word by itself", np.ones((T, T)), packed)

# ---------------------------------------------------------------------------------------- 2. forward (A.10.1 to 3)
#
# No training here: the projections are chosen by hand, so that one can say beforehand what must come out. A query asks
# "what followed the letter that I am, when it came before?": q is one's own letter, k the letter *before* the key, v
# the key's own letter. Heads that do this appear in trained models by themselves (induction heads: Olsson et al.,
# 2022).

own = np.eye(D)[[letters.index(c) for c in TEXT]]                # (T, D) one-hot letters
before = np.vstack([np.zeros(D), own[:-1]])                      # the letter before each position
Q, K, V = 8.0 * own, before, own
S = Q @ K.T / np.sqrt(D)                                         # (A.10.1)
hidden = np.where(causal, S, -np.inf)
A = np.exp(hidden - hidden.max(axis=1, keepdims=True))
A /= A.sum(axis=1, keepdims=True)                                # (A.10.2)
O = A @ V                                                        # (A.10.3)  # noqa: E741
draw("the weights A: who looks where", A, causal)
guesses = "".join(letters[n] for n in O.argmax(axis=1))
print(f"\n  letters  {TEXT!r}\n  guesses  {guesses!r}   (under each letter, what followed it before;")
print("                             a new letter's row is even, and its guess means nothing)")
assert guesses[8:10] == "he" and np.allclose(A.sum(axis=1), 1.0)

# --------------------------------------------------------------------------------------- 3. backward (A.10.5 to 9)
#
# Let the loss be the negative logarithm of the weight that O gives the right next letter, wherever it gives any. G_O
# then points at letters; the appendix's five lines carry it back.

right = own[1:]                                                  # the letter that really came next
given = (O[:-1] * right).sum(axis=1)
G_O = np.zeros_like(O)
G_O[:-1] = -right / np.where(given > 1e-6, given, np.inf)[:, None]
G_V = A.T @ G_O                                                  # (A.10.5)
G_A = G_O @ V.T                                                  # (A.10.6)
G_S = A * (G_A - (A * G_A).sum(axis=1, keepdims=True))           # (A.10.7): 0 where A is
G_Q = G_S @ K / np.sqrt(D)                                       # (A.10.8)
G_K = G_S.T @ Q / np.sqrt(D)                                     # (A.10.9)
draw("|G_S|: the scores that this loss wants changed", G_S, causal)
worst = np.abs(G_S).max(axis=1).argmax()
up, down = G_S[worst].argmin(), G_S[worst].argmax()
print(f"\n  most of all at query {worst} ({TEXT[worst]!r}), which wants to look more at key {up} ({TEXT[up]!r})")
print(f"  and less at key {down} ({TEXT[down]!r})")
assert abs(G_S.sum(axis=1)).max() < 1e-12 and not G_S[~causal].any()

# minigrad's op does all of it in one node, and its backward is those five lines.

leaves = [mg.tensor(array, requires_grad=True) for array in (Q, K, V)]
o = F.scaled_dot_product_attention(*leaves, is_causal=True)
found = mg.gradients(o, leaves, G_O)
print("\nfrom F.scaled_dot_product_attention, largest difference below 1e-12:")
for name, hand, tape in zip(("O", "G_Q", "G_K", "G_V"), (O, G_Q, G_K, G_V), (o, *found), strict=True):
    assert abs(hand - tape.numpy()).max() < 1e-12, name
    print(f"  {name:4}{hand.shape}")

# To try: in `hidden`, replace `causal` by `window` or `packed`. Which guesses change (the assert below them then stops
# the script), and could you have said so from the maps of part 1?
# To try: make the 8.0 in Q smaller or larger. What happens to A, and to the size of G_S (guide 5, part 1)?
