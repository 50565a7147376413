"""Guide 7. Fused ops: every fast thing stands beside the plain thing it must equal.

    python examples/guide/07_fused.py

Read before: guides 4 and 6, and the point on fused primitives at the top of minigrad/tape.py.
"""

import numpy as np

import minigrad as mg
import minigrad.functional as F

mg.manual_seed(0)

# ------------------------------------------------------------------------------------------- 1. two ways to one number
#
# A fused op is a primitive whose function is its *reference*, a composition of plain ops, with *kernels* beside it that
# compute the same at once. The reference is the documentation, the oracle of the tests, what runs on a device without a
# kernel, and what is differentiated for second derivatives, because a kernel's rule works on raw arrays and first order
# only. `with mg.composed():` runs every fused op as its reference.
#
# For each op: how many nodes it leaves, how many bytes they keep, and how far apart the two ways are.


def normal(*shape):
    return mg.randn(*shape, dtype=mg.float64).requires_grad_()


B, T, C, V, H = 4, 32, 64, 50, 4
x, weight, bias, w, b = normal(B, T, C), normal(C), normal(C), normal(C, V), normal(V)
q, k, v = normal(B, H, T, C // H), normal(B, H, T, C // H), normal(B, H, T, C // H)
leaves = [x, weight, bias, w, b, q, k, v]
targets = np.arange(B * T).reshape(B, T) % V
ops = {
    "linear": lambda: F.linear(x, w, b),
    "gelu": lambda: F.gelu(x),
    "softmax": lambda: F.softmax(x),
    "layer_norm": lambda: F.layer_norm(x, weight, bias),
    "rms_norm": lambda: F.rms_norm(x, weight),
    "cross_entropy": lambda: F.cross_entropy(F.linear(x, w), targets),
    "attention": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "attention, tiled": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, implementation="tiled"),
}


def measured(op):
    """(gradients, nodes, bytes kept); an array that several nodes keep is counted once."""
    with mg.Tape() as tape:
        y = op()
    size = sum({id(a): a.nbytes for node in tape for a in node.kept}.values())
    return mg.gradients((y * y).sum(), leaves), len(tape), size


print("                     nodes             bytes kept             largest difference")
print("                     composed  fused   composed      fused    of the gradients")
for name, op in ops.items():
    with mg.composed():
        plain, nodes, size = measured(op)
    fast, few, small = measured(op)
    difference = max(abs(a.numpy() - b.numpy()).max() / (1.0 + abs(a.numpy()).max())
                     for a, b in zip(plain, fast, strict=True))
    assert difference < 1e-12 and few <= nodes
    print(f"  {name:19}{nodes:8}{few:7}{size:11,}{small:11,}    below 1e-12")

# ---------------------------------------------------------------------------------------------- 2. higher orders
#
# A kernel's rule takes raw arrays; there is nothing to record. So when the backward pass is recorded (create_graph),
# the engine either uses differentiable rules that stand beside the kernel (softmax: `rules=` and `kernels=` both), or
# runs the reference on the arrays that were kept, and differentiates that. Who writes a kernel gets second derivatives
# from the reference, for nothing.

vector = mg.randn(B, T, C, dtype=mg.float64)


def loss(x):
    return (F.layer_norm(F.gelu(x), weight.detach(), bias.detach()) ** 3).sum()


fast = mg.hvp(loss, x.detach(), vector)
with mg.composed():
    plain = mg.hvp(loss, x.detach(), vector)
print(f"\na Hessian times a vector through gelu and layer_norm: largest element {abs(fast.numpy()).max():.4f},")
print(f"fused and composed agree to 1e-12: {np.allclose(fast.numpy(), plain.numpy(), rtol=1e-12, atol=1e-10)}")

# ---------------------------------------------------------------------------------------------------- 3. on the tape

with mg.composed(), mg.Tape() as tape:
    F.softmax(x[0, :2, :3])
print("\nsoftmax as its reference, print(tape):\n")
print("\n".join(line.rpartition("  ")[0].rstrip() for line in str(tape).splitlines()))

# To try: which of these ops keeps its output, and which its input? Read `rules=` and `kernels=` in minigrad/ops/.
# To try: run the whole guide with the environment variable MINIGRAD_COMPOSED=1. Which numbers of this script change?
