"""Guide 3. Order: why the creation index is enough, and where the memory goes.

    python examples/guide/03_order.py

Read before: guide 1, and the top of minigrad/tape.py (its points on Nodes and on the order of the pass). Here we watch
both happen.
"""

import numpy as np

import minigrad as mg
from minigrad.tape import Watcher

# -------------------------------------------------------------------------------------------------- 1. a diamond
#
#         x            h is used twice. Its cotangent is the sum of what both users send back, so h's own rule must
#         h            wait for both. Any order in which a node comes after all its users will do: a topological order.
#       a   b
#         y            Nodes are numbered as they are made, and nothing can use what has not been made yet. So falling
#                      numbers are such an order, for free: no recursion, no sorting by dependencies.


class Diary(Watcher):
    """Notes which rules ran, in which order, and how much the tape kept at that moment."""

    def __init__(self, tape):
        self.tape, self.names, self.kept = tape, [], []

    def pulling(self, node, ct):
        self.names.append(node.name)
        self.kept.append(sum(n.bytes_kept for n in self.tape))


x = mg.tensor([0.5], requires_grad=True)
with mg.Tape() as tape:
    h = x.tanh()
    a = h.exp()
    b = h.sin()
    y = (a * b).sum()
with Diary(tape) as diary:
    y.backward()
print("made:  ", " ".join(node.name for node in tape))
print("pulled:", " ".join(diary.names))
assert diary.names == [node.name for node in tape][::-1]

# --------------------------------------------------------------------------------------------- 2. why not recursion?
#
# "Send the cotangent to the parents, and let them do the same" is also right, and visits every *path* from y to x. A
# chain of n diamonds has 2^n paths and 2 n nodes.


def walk(node):
    """How many rules a recursive pass would run from here."""
    return 1 + sum(walk(target) for target in node.targets if not isinstance(target, mg.Tensor))


print("\n diamonds   nodes   rules run by the engine   by recursion")
for n in (1, 4, 8, 12):
    with mg.Tape() as tape:
        y = x.tanh()
        for _ in range(n):
            y = y * y                                    # y is used twice
    recursive = walk(y.node)
    with Diary(tape) as diary:
        y.backward()
    print(f"{n:9}{len(tape):8}{len(diary.names):26}{recursive:15}")
assert recursive == 2 ** (n + 1) - 1 and len(diary.names) == n + 1

# Recursion also fails in depth: Python allows about a thousand calls. A stack has no such limit.

y = x
for _ in range(5000):
    y = y * 0.999
y.backward()
print("\na chain of 5000 nodes went back without recursion")

# -------------------------------------------------------------------------------------- 3. memory goes as the pass goes
#
# What a node keeps for its rules is needed once. The engine drops it as soon as the rules ran, so what the tape keeps
# falls while the pass runs, and at the end nothing is left to wait for the garbage collector. (A second backward
# through the same tape is therefore an error, which says retain_graph=True.)

layers, width = 8, 64
weights = [mg.tensor(np.eye(width), requires_grad=True) for _ in range(layers)]
data = mg.tensor(np.linspace(-1.0, 1.0, 32 * width).reshape(32, width))
with mg.Tape() as tape:
    h = data
    for w in weights:
        h = (h @ w).tanh()
    loss = (h * h).sum()
with Diary(tape) as diary:
    loss.backward()

print(f"\n{layers} layers of tanh(h @ w): bytes that the tape keeps, before each rule of the backward pass\n")
for name, kept in zip(diary.names, diary.kept, strict=True):
    print(f"  {name:9}{kept:8,} {'#' * round(kept / 8192)}")
assert diary.kept == sorted(diary.kept, reverse=True) and sum(n.bytes_kept for n in tape) == 0

# tanh keeps its output and matmul its inputs: the output of one is the input of the next, and an array that two nodes
# keep is counted in both, but lies in memory once.

try:
    loss.backward()
except RuntimeError as error:
    print(f"\nagain: {error}")

# To try: replace tanh() by relu(), then by `h + 1.0`. What do they keep? Look at their rules in ops/elementwise.py.
# To try: pass retain_graph=True to the first loss.backward() of part 3. What do the bars do, and which assert stops it?
