"""The tape in forty lines: reverse-mode automatic differentiation from scratch, then the same with minigrad.

    python examples/01_tape.py

Part 1 is a complete engine on NumPy, in the words of minigrad/tape.py. Part 2 trains a network with it. Part 3 runs
the same network with minigrad and finds the same gradients. Next: examples/02_attention_by_hand.py.
"""

import itertools

import numpy as np

# ------------------------------------------------------------------------------------------- part 1: the engine
#
# We want the derivative of one number, the loss, with respect to every parameter. The chain rule says how: if the loss
# changes by `ct` per unit of y (its *cotangent*), and y = tanh(x), then it changes by ct * (1 - y^2) per unit of x. So
# every function needs one backward *rule* per argument, which turns the cotangent of its output into that of the
# argument; and we need to remember which functions ran, so as to apply their rules from the last to the first.
#
# Three things are enough:
#   Tensor     an array with a history: the node that made it, or None for a *leaf*, made by the user;
#   Node       one application of a function: its rules, its parents (`targets`), and the arrays the rules need;
#   primitive  makes a function of arrays into one of Tensors that leaves a Node behind. All nodes are the *tape*.
#
# A node gets its number when it is made, and its parents were made before it. So falling numbers are an order in which
# every node comes after everything that used it: by then its cotangent is complete. That is why there is no recursion
# and no topological sort below: sorting by number is enough.

# [engine: from here]
clock = itertools.count()


class Tensor:
    def __init__(self, array, requires_grad=False, node=None):
        self.array, self.requires_grad, self.node, self.grad = np.asarray(array), requires_grad, node, None


class Node:
    def __init__(self, rules, targets, arrays, y):
        self.index, self.rules, self.targets, self.arrays, self.y = next(clock), rules, targets, arrays, y


def primitive(*rules):
    def wrap(forward):
        def function(*args):
            arrays = [a.array for a in args]
            y = forward(*arrays)
            if not any(a.requires_grad for a in args):
                return Tensor(y)                         # nothing to differentiate: nothing to remember
            targets = [(a.node or a) if a.requires_grad else None for a in args]
            return Tensor(y, True, Node(rules, targets, arrays, y))
        return function
    return wrap


def unbroadcast(ct, shape):
    """NumPy repeated an array of `shape` to the shape of ct; the loss felt every copy, so their cotangents add."""
    ct = ct.sum(axis=tuple(range(ct.ndim - len(shape))))
    return ct.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def backward(y):
    seen, stack = set(), [y.node or y]
    while stack:                                         # the nodes that y depends on
        node = stack.pop()
        if isinstance(node, Node) and node not in seen:
            seen.add(node)
            stack.extend(node.targets)
    cts = {y.node or y: np.ones_like(y.array)}           # the loss changes by 1 per unit of itself
    for node in sorted(seen, key=lambda node: node.index, reverse=True):
        ct = cts.pop(node)                               # complete: all that used this node's output came before
        for rule, target, array in zip(node.rules, node.targets, node.arrays, strict=True):
            if target is not None:
                c = unbroadcast(rule(ct, node.y, *node.arrays), array.shape)
                cts[target] = cts[target] + c if target in cts else c    # used twice: the cotangents add
    for leaf, ct in cts.items():                         # only leaves are left
        leaf.grad = ct if leaf.grad is None else leaf.grad + ct
# [engine: to here]


# That is all of the engine. It knows no function; these are the five that the network below needs. A rule takes ct, the
# output y, then the arguments.

add = primitive(lambda ct, y, a, b: ct, lambda ct, y, a, b: ct)(lambda a, b: a + b)
subtract = primitive(lambda ct, y, a, b: ct, lambda ct, y, a, b: -ct)(lambda a, b: a - b)
multiply = primitive(lambda ct, y, a, b: ct * b, lambda ct, y, a, b: ct * a)(lambda a, b: a * b)
matmul = primitive(lambda ct, y, a, b: ct @ b.T, lambda ct, y, a, b: a.T @ ct)(lambda a, b: a @ b)
tanh = primitive(lambda ct, y, x: ct * (1.0 - y * y))(np.tanh)
total = primitive(lambda ct, y, x: np.broadcast_to(ct, x.shape))(np.sum)

Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__matmul__ = add, subtract, multiply, matmul
Tensor.tanh, Tensor.sum, Tensor.backward = tanh, total, backward


# ----------------------------------------------------------------------------------- part 2: a network learns XOR
#
# Four points that no straight line separates. One hidden layer of eight tanh units does it. `loss` uses operators and
# methods only, so it runs on our Tensors here and on minigrad's in part 3.

POINTS = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
XOR = np.array([[0.0], [1.0], [1.0], [0.0]])


def network(x, w1, b1, w2, b2):
    return (x @ w1 + b1).tanh() @ w2 + b2                # (4, 2) -> (4, 8) -> (4, 1); the biases broadcast


def loss(x, target, *parameters):
    error = network(x, *parameters) - target             # used twice in the product: its two cotangents add
    return (error * error).sum()


def start():
    """The same small random weights for both engines, in float64."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 8)), np.zeros(8), rng.standard_normal((8, 1)) / 8, np.zeros(1)]


def train(steps=200, rate=0.05):
    """Plain gradient descent with the engine above."""
    x, target = Tensor(POINTS), Tensor(XOR)
    parameters = [Tensor(array, requires_grad=True) for array in start()]
    for step in range(steps + 1):
        value = loss(x, target, *parameters)
        value.backward()
        if step % 25 == 0:
            print(f"  step {step:3}   loss {value.array:.6f}")
        for p in parameters:
            p.array -= rate * p.grad                     # safe: the tape of this step is not used again
            p.grad = None                                # or the next backward would add to it
    for point, y in zip(POINTS, network(x, *parameters).array[:, 0], strict=True):
        print(f"  {point[0]:.0f} xor {point[1]:.0f} = {y:5.2f}")
    return [p.array for p in parameters]


# ------------------------------------------------------------------------------------ part 3: the same in minigrad


def compare(arrays):
    """The gradients of the loss at these parameters: the engine above against minigrad's."""
    import minigrad as mg

    ours = [Tensor(array, requires_grad=True) for array in arrays]
    loss(Tensor(POINTS), Tensor(XOR), *ours).backward()

    theirs = [mg.tensor(array, requires_grad=True) for array in arrays]
    with mg.Tape() as tape:
        value = loss(mg.tensor(POINTS), mg.tensor(XOR), *theirs)
    picture = str(tape)                                  # now, while the nodes still hold what they kept
    value.backward()

    for name, a, b in zip(("w1", "b1", "w2", "b2"), ours, theirs, strict=True):
        difference = np.abs(a.grad - b.grad.numpy()).max()
        print(f"  gradient of {name}: largest {np.abs(a.grad).max():.6f}, difference {difference:.1e}")
        np.testing.assert_allclose(a.grad, b.grad.numpy(), rtol=1e-12, atol=1e-15)
    return picture


if __name__ == "__main__":
    print("1. XOR with the engine of this file:")
    trained = train()
    print("2. The same gradients from minigrad, at the first weights:")
    picture = compare(start())
    print("   and after training:")
    compare(trained)
    print("3. minigrad's tape of one loss, print(tape): a row per node, the parents it came from, the bytes it keeps:")
    print(picture)

# What minigrad/tape.py does beyond this file, each for a reason its top comment gives:
#   - a rule's parameter names say what a node keeps (tanh keeps y and not x; add keeps nothing), where we keep it all;
#   - a node drops what it kept as soon as its rules ran, so memory falls as the pass goes, and a write to a kept array
#     in between is an error instead of a wrong gradient;
#   - rules run on Tensors as well as on arrays, so the backward pass can be recorded: derivatives of any order;
#   - a *fused* primitive has a fast kernel beside the plain composition it must equal.
