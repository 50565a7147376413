"""Guide 4. Higher orders: a backward pass that is recorded can be differentiated.

    python examples/guide/04_higher_orders.py

Read before: guide 1, and the point on rules and Tensors at the top of minigrad/tape.py.
"""

import math

import numpy as np

import minigrad as mg
import minigrad.functional as F

# ------------------------------------------------------------------------------------------- 1. rules on Tensors
#
# The rule of sin is `lambda ct, x: ct * cos(x)`, written with minigrad's own cos and *. Those take raw arrays, and then
# nothing is recorded: that is the plain backward pass. Given Tensors they record as always: then the backward pass
# itself lies on a tape, and can be run through again. There is no second set of rules for second derivatives.

x = mg.tensor(0.4, requires_grad=True, dtype=mg.float64)
with mg.Tape() as tape:
    y = F.sin(x)
    forward = len(tape)
    slope, = mg.gradients(y, [x], create_graph=True)
print(f"sin(x) leaves {forward} node; its gradient, recorded, adds: {' '.join(n.name for n in tape.nodes[forward:])}")

f, value = F.sin, []
for _ in range(5):
    value.append(f(x).item())
    f = mg.grad(f)                                       # a function again, so it can be differentiated again
wanted = [math.sin(0.4), math.cos(0.4), -math.sin(0.4), -math.cos(0.4), math.sin(0.4)]
print("\n order   d^n sin / dx^n at 0.4")
for order, (got, want) in enumerate(zip(value, wanted, strict=True)):
    assert abs(got - want) < 1e-14
    print(f"{order:5}{got:15.9f}")

# ------------------------------------------------------------------------------------- 2. a Hessian times a vector
#
# The Hessian of f: R^n -> R has n^2 elements. Its product with one vector v is the derivative of the gradient along v,
# and costs about two backward passes, whatever n is: mg.hvp. Finite differences of the gradient agree.


def rosenbrock(x):
    """(1 - x0)^2 + 100 (x1 - x0^2)^2: a narrow curved valley, its lowest point at (1, 1)."""
    return (1.0 - x[0]) ** 2 + 100.0 * (x[1] - x[0] ** 2) ** 2


at, v, h = np.array([-1.2, 1.0]), np.array([0.6, -0.8]), 1e-5
gradient = mg.grad(rosenbrock)
product = mg.hvp(rosenbrock, at, v).numpy()
differences = (gradient(at + h * v) - gradient(at - h * v)).numpy() / (2 * h)
print(f"\nHessian times v: {product.round(4).tolist()}, by differences of the gradient {differences.round(4).tolist()}")
np.testing.assert_allclose(product, differences, rtol=1e-6)

# -------------------------------------------------------------------------------------------- 3. Newton's method
#
# Gradient descent only knows which way is down. Newton's method replaces f near x by the parabola with the same slope
# and bend and jumps to its lowest point: solve H step = -gradient. H comes column by column from hvp; for two unknowns
# that is cheap. Near the solution each step doubles the number of right digits.

x = at
print("\n step        f(x)      distance to (1, 1)")
for step in range(8):
    distance = np.linalg.norm(x - 1.0)
    print(f"{step:5}{rosenbrock(x):14.3e}{distance:14.3e}")
    if distance < 1e-12:
        break
    hessian = np.stack([mg.hvp(rosenbrock, x, e).numpy() for e in np.eye(2)], axis=1)
    x = x - np.linalg.solve(hessian, gradient(x).numpy())
newton = step

x = at
for _ in range(1000):
    x = x - 1e-3 * gradient(x).numpy()                   # at a rate of 2e-3 it flies apart
print(f"\nNewton: {newton} steps; gradient descent with rate 0.001 is {np.linalg.norm(x - 1.0):.2f} away after 1000")

# ------------------------------------------------------------------------------------------------ 4. what it is for
#
# A gradient as part of a loss: penalise the slope of a model with respect to its input, and train on that. One backward
# pass is recorded inside, the outer one runs through both.

w = mg.tensor([2.0, -1.0], requires_grad=True, dtype=mg.float64)
x = mg.tensor([0.3, 0.5], requires_grad=True, dtype=mg.float64)
y = F.tanh((w * x).sum())
slope, = mg.gradients(y, [x], create_graph=True)         # (1 - y^2) w
penalty = (slope * slope).sum()                          # (1 - y^2)^2 (w . w)
penalty.backward()
by_hand = (1 - y.item() ** 2) ** 2 * (2 * w.numpy() - 4 * y.item() * 5.0 * x.numpy())     # w . w = 5
print(f"\ngradient of a squared slope: {w.grad.numpy().round(6).tolist()}, by hand {by_hand.round(6).tolist()}")
np.testing.assert_allclose(w.grad.numpy(), by_hand, rtol=1e-12)

# To try: start Newton's method at (0, 0.6) instead. Does f fall in every step? Does it have to?
# To try: leave out create_graph=True in part 4, and read what penalty.backward() says.
