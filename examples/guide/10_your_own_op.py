"""Guide 10. Your own op: forward, rules, samples, and kernels for two libraries.

    python examples/guide/10_your_own_op.py

Read before: guides 1, 2 and 7. The options of @mg.primitive are listed in its docstring (minigrad/tape.py); what each
mistake says is a table in CONTRIBUTING.md, whose five steps put an op into minigrad itself. Nothing here needs that: an
op of one's own can live in one's own file.
"""

import math

import numpy as np

import minigrad as mg
import minigrad.functional as F
from minigrad import sample

# ------------------------------------------------------------------------------------------------ 1. a plain op
#
# log cosh(x), a smooth |x|. The forward gets raw arrays; arrays come before the /, parameters after it.
#
#     y = log cosh(a x) / a            dy = tanh(a x) dx            ct_x = ct tanh(a x)
#
# The rule's parameter names say what the node keeps: here x. `a` is a parameter, and free. Rules are written with
# minigrad's functions (F.tanh), because the engine runs them on Tensors too, when the backward pass is itself recorded.
# Rules never undo broadcasting, cast, add up, or write into ct.
#
# samples: rows that a test can call it with. A tuple is the shape of a float array; error= is a message it must raise.


@mg.primitive(rules=[lambda ct, x, a: ct * F.tanh(a * x)],
              samples=[sample((2, 3)), sample((4,), a=3.0), sample(()), sample((0, 2)),
                       sample((2,), a=0.0, error="[log_cosh] a must be positive: got 0.0")])
def log_cosh(x, /, a=1.0):
    """y = log cosh(a x) / a, elementwise: |x| with a rounded tip;  ct_x = ct tanh(a x)"""
    if not a > 0:
        raise ValueError(f"[log_cosh] a must be positive: got {a}")
    z = abs(a * x)
    return (z + F.log1p(F.exp(-2.0 * z)) - math.log(2.0)) / a    # F's functions take raw arrays of any device


# ------------------------------------------------------------------------------------------------ 2. a fused op
#
# The gate of a SwiGLU block (Shazeer, 2020), y = silu(u) * v, silu(u) = u sigmoid(u). As plain ops it leaves two nodes,
# which keep u, v and silu(u). The decorated function is the *reference*; a kernel per library stands beside it:
#
#     kernels={"numpy": (forward, joint rule, *names of residuals), "cupy": (...)}
#
# forward: raw arrays and parameters in, y out (or (y, residuals...)). The joint rule returns a tuple, a cotangent (or
# None) for each array argument; like any rule it names what it needs. The library of the arrays picks the kernel. A
# library without one runs the reference, as do mg.composed() and higher orders: no kernel has to know second order.
#
# The NumPy kernel works in rows that stay in the cache, the CuPy one in whole arrays with few temporaries. (On a GPU
# one would rather write one cupy.ElementwiseKernel for each direction: a loop over elements that touches memory once.)


def _gate_numpy(u, v):
    y = np.empty(np.broadcast_shapes(u.shape, v.shape), np.result_type(u, v))
    for u_row, v_row, y_row in _rows(u, v, y):
        np.multiply(_sigmoid(u_row), u_row, out=y_row)
        y_row *= v_row
    return y


def _gate_numpy_rule(ct, u, v):
    ct_u, ct_v = np.empty_like(u), np.empty_like(v)
    for c, u_row, v_row, cu, cv in _rows(ct, u, v, ct_u, ct_v):
        s = _sigmoid(u_row)
        np.multiply(c * s, u_row, out=cv)                # ct silu(u)
        np.multiply(c * v_row, s * (1.0 + u_row * (1.0 - s)), out=cu)    # silu' = s (1 + u (1 - s))
    return ct_u, ct_v


def _rows(*arrays, block=64):
    flat = [a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in arrays]     # views of the arrays to write
    return (tuple(a[i:i + block] for a in flat) for i in range(0, len(flat[0]), block))


def _sigmoid(u):
    e = np.exp(-abs(u))                                  # never overflows
    return np.where(u >= 0, 1.0, e) / (1.0 + e)


def _gate_cupy(u, v):
    y = F.sigmoid(u)                                     # new memory, so writing into it harms nobody
    y *= u
    y *= v
    return y


def _gate_cupy_rule(ct, u, v):
    s = F.sigmoid(u)
    ct_v = ct * s
    ct_u = ct_v * (1.0 + u * (1.0 - s))                  # ct s (1 + u (1 - s))
    ct_u *= v
    ct_v *= u
    return ct_u, ct_v


@mg.primitive(kernels={"numpy": (_gate_numpy, _gate_numpy_rule), "cupy": (_gate_cupy, _gate_cupy_rule)},
              samples=[sample((2, 3), (2, 3)), sample((5,), (5,)), sample((0, 3), (0, 3)),
                       sample((2, 40, 3), (2, 40, 3))])     # more rows than one block has
def _swiglu(u, v, /):
    """y = silu(u) v = u sigmoid(u) v;  ct_v = ct silu(u),  ct_u = ct v s (1 + u (1 - s)),  s = sigmoid(u)"""
    return F.silu(u) * v


def swiglu(u, v):
    """silu(u) v: u, v (*S, C) of one shape -> (*S, C). Checked here, once for the reference and every kernel."""
    if np.shape(u) != np.shape(v) or not np.ndim(u):
        raise ValueError(f"[swiglu] u and v have one shape, of at least one axis: u {np.shape(u)}, v {np.shape(v)}")
    return _swiglu(u, v)


# ---------------------------------------------------------------------------------------------- 3. held to its rows
#
# This is what tests/test_ops.py asks of every op, in short: along a random direction the derivative of a random
# projection agrees with central differences, and so does the derivative of that derivative; a kernel equals its
# reference; the error rows raise their message.


def slope(f, xs, along):
    """The derivative of scalar f at xs along `along`, as a Tensor that can be differentiated again."""
    return sum((ct * v).sum() for ct, v in zip(mg.gradients(f(*xs), xs, create_graph=True), along, strict=True))


def held(op, row, h=1e-5):
    """The largest relative error of the derivatives of orders 1 and 2; and that kernel and reference agree."""
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(row.low, row.high, shape) for shape in row.args]
    weight = rng.standard_normal(op(*arrays, **row.params).shape)
    along = [rng.standard_normal(a.shape) for a in arrays]
    worst = 0.0

    def f(*xs):
        return (op(*xs, **row.params) * weight).sum()

    for g in (f, lambda *xs: slope(f, xs, along)):
        leaves, *moved = ([mg.tensor(a + s * v, requires_grad=True) for a, v in zip(arrays, along, strict=True)]
                          for s in (0.0, h, -h))
        measured = (g(*moved[0]) - g(*moved[1])).item() / (2 * h)
        worst = max(worst, abs(slope(g, leaves, along).item() - measured) / (1.0 + abs(measured)))

    # All of that recorded the backward pass, and so ran differentiable rules or the reference. The kernel's own rule
    # runs in a plain pass; it must give what the reference gives.
    def plain_pass():
        leaves = [mg.tensor(a, requires_grad=True) for a in arrays]
        y = op(*leaves, **row.params)
        return y, *mg.gradients(y, leaves, weight)

    with mg.composed():
        reference = plain_pass()
    for got, want in zip(plain_pass(), reference, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-12, atol=1e-14)
    return worst


if __name__ == "__main__":
    for op in (log_cosh, _swiglu):
        print(f"{op.name}: {op.__doc__}\n")
        for row in op.samples:
            if row.error is None:
                error = held(op, row)
                assert error < 1e-6
                print(f"  {row!r:25} derivatives of orders 1 and 2: {'agree' if error < 1e-6 else error}")
            else:
                try:
                    op(*map(mg.zeros, row.args), **row.params)
                except ValueError as error:
                    print(f"  {row!r:25} {error}")
                    assert row.error in str(error)
        print()

    u, v = mg.randn(256, 64, requires_grad=True), mg.randn(256, 64, requires_grad=True)
    for name, way in (("reference", mg.composed()), ("kernel", mg.enable_grad())):
        with way, mg.Tape() as tape:
            swiglu(u, v)
        print(f"{name:10} {' '.join(node.name for node in tape):14} keeps {sum(n.bytes_kept for n in tape):,} bytes")
    print(f"kernels for: {', '.join(_swiglu.kernels)}; a tensor on \"cuda\" takes the second")

# To try: in _gate_numpy_rule write `c *= s` instead of using c * s, and run. Who says what?
# To try: leave the minus out of log_cosh's F.exp(-2.0 * z). Which row finds it, and what if there were only `(0, 2)`?
