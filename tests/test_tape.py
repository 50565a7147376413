"""The engine by hand: what recording, the backward pass, its memory and its errors mean. Each value says why."""

import contextlib
import copy
import gc
import itertools
import pickle
import sys
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from conftest import kernels

import minigrad as mg
import minigrad.functional as F


def leaf(*values, dtype=np.float64):
    """A leaf that requires a gradient: leaf(1, 2) is a vector, leaf(3) a scalar."""
    data = np.array(values if len(values) > 1 else values[0], dtype)
    return mg.tensor(data, requires_grad=True)


@pytest.fixture
def primitive():
    """`mg.primitive` for ops of a test; they are forgotten at its end."""
    before = set(mg.primitives)
    yield mg.primitive
    for name in set(mg.primitives) - before:
        del mg.primitives[name]


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ------------------------------------------------------------------------------------------- long and wide graphs


def test_a_chain_of_100_000_nodes():
    """Forward, backward, and being dropped without backward: nothing recurses. d/dx of x + 1 + ... is 1."""
    for backward in (True, False):
        x = leaf(1.0)
        y = x
        for _ in range(100_000):
            y = y + 1.0
        if backward:
            y.backward()
            assert x.grad.item() == 1.0
        assert y.item() == 100_001.0
        del y


def test_a_long_chain_to_second_order():
    """Recorded backward passes are long chains too. y = x^2 2^k / 2^k: y'' = 2."""
    x = leaf(3.0)
    y = x * x
    for _ in range(5000):
        y = y * 2.0 * 0.5
    g, = mg.gradients(y, [x], create_graph=True)
    g.backward()
    assert x.grad.item() == 2.0


def test_stacked_diamonds_take_linear_time(primitive):
    """60 times x = twice(x, x): 2^60 paths, but each node's rules run once, two for its two arguments."""
    calls = []

    @primitive(rules=[lambda ct: calls.append(1) or ct, lambda ct: calls.append(1) or ct])
    def diamond(a, b, /):
        return a + b

    x = leaf(1.0)
    y = x
    for _ in range(60):
        y = diamond(y, y)
    y.backward()
    assert len(calls) == 120
    assert x.grad.item() == 2.0**60


def test_a_non_leaf_used_twice_is_summed():
    """h = x^2 feeds two branches; y = h * 3 + h: y' = 4 * 2x."""
    x = leaf(5.0)
    h = x * x
    (h * 3.0 + h).backward()
    assert x.grad.item() == 40.0


def test_gradients_accumulate_over_backwards_and_none_forgets():
    x = leaf(2.0)
    for expected in (3.0, 6.0):
        (x * 3.0).backward()
        assert x.grad.item() == expected
    x.grad = None
    (x * 3.0).backward()
    assert x.grad.item() == 3.0


def test_accumulation_makes_no_alias():
    """x + y gives one cotangent to both: writing to one gradient must not touch the other, nor the array passed in."""
    x, y, g = leaf(1, 2), leaf(3, 4), np.ones(2)
    (x + y).backward(g)
    x.grad.data[...] = 7.0
    assert y.grad.tolist() == [1, 1] and g.tolist() == [1, 1]
    z = leaf(1, 2)
    z.backward(g)                                        # a leaf's own backward
    z.grad.data[...] = 7.0
    assert g.tolist() == [1, 1]


def test_backward_of_a_kept_gradient_is_not_changed_later():
    """.grad taken by the user is not written to by the next backward: it may be in a list of his."""
    x = leaf(1.0)
    (x * 1.0).backward()
    kept = x.grad
    (x * 1.0).backward()
    assert (kept.item(), x.grad.item()) == (1.0, 2.0)


# ------------------------------------------------------------------------------------------------ freeing of memory


def graph(x):
    return F.softmax((x @ x).exp() * x, axis=-1).sum()


@pytest.mark.parametrize("use", ["dropped", "backward", "retained", "tape", "anomaly", "create_graph", "checkpoint",
                                 "vjp", "composed"])
def test_a_graph_is_freed_at_once(no_gc, use):
    """With the garbage collector off, all nodes and Tensors of a graph die with the last name for them: no cycles."""
    x = leaf(1.0) * np.ones((3, 3))
    x = mg.tensor(x.numpy(), requires_grad=True)
    nodes = []

    def watched(x):
        h = (x @ x).exp()
        y = F.layer_norm(F.softmax(h * x, axis=-1)).sum()
        stack = [y.node]
        while stack:
            node = stack.pop()
            if isinstance(node, mg.Node):
                nodes.append(weakref.ref(node))
                stack.extend(node.targets)
        nodes.append(weakref.ref(h))
        return y

    if use == "tape":
        with mg.Tape() as tape:
            y = watched(x)
        str(tape)
        y.backward()
        del tape
    elif use == "anomaly":
        with mg.detect_anomaly():
            y = watched(x)
            y.backward()
    elif use == "create_graph":
        y = watched(x)
        g, = mg.gradients(y, [x], create_graph=True)
        nodes.append(weakref.ref(g.node))
        (g * g).sum().backward()
        del g
    elif use == "checkpoint":
        y = mg.checkpoint(watched, x)
        y.backward()
    elif use == "vjp":
        y, pull = mg.vjp(watched, x)
        pull(mg.ones_like(y))
        del pull
    elif use == "composed":
        with mg.composed():
            y = watched(x)
        y.backward()
    else:
        y = watched(x)
        if use != "dropped":
            y.backward(retain_graph=use == "retained")
    del y
    x.grad = None
    assert nodes and all(ref() is None for ref in nodes)


def test_memory_goes_as_the_backward_pass_goes():
    """After backward the output is still there, and its nodes keep nothing."""
    x = leaf(1, 2)
    with mg.Tape() as tape:
        y = (x.exp() * x).sum()
    assert sum(node.bytes_kept for node in tape) == 16 + 32     # exp's y; the product's two factors
    y.backward()
    assert [node.bytes_kept for node in tape] == [0, 0, 0]
    assert all(node.targets is None for node in tape)


def test_peak_memory_does_not_grow_over_200_steps():
    """A training step, 200 times. What is held between steps does not grow (after gc, which empties CPython's free
    lists; cycles are the business of the test above). Nor does the peak: keeping the smallest array of each step, 8 kB,
    would add 1.5 MB; free lists stay below 200 kB."""
    rng = np.random.default_rng(0)
    w1, w2 = (mg.tensor(rng.normal(size=(32, 32)).astype(np.float32), requires_grad=True) for _ in range(2))
    data, targets = rng.normal(size=(64, 32)).astype(np.float32), rng.integers(0, 32, 64)

    def step():
        h = F.gelu(F.layer_norm(F.linear(data, w1)))
        F.cross_entropy(F.linear(F.dropout(h, 0.1), w2), targets).backward()
        for p in (w1, w2):
            p.copy_(p.numpy() - 0.01 * p.grad.numpy())
            p.grad = None

    peaks, held = [], []
    tracemalloc.start()
    try:
        for k in range(200):
            tracemalloc.reset_peak()
            step()
            peaks.append(tracemalloc.get_traced_memory()[1])
            if k in (19, 199):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[1] - held[0] < 10_000, held              # 180 floats of `peaks`, and not one array a step
    assert max(peaks[180:]) - max(peaks[10:20]) < 200_000, (peaks[10], peaks[-1])


# -------------------------------------------------------------------------------------- writing to what is needed


def overwrite_kept_input(x, how):
    w = leaf(2, 3)
    alias, view = w.data, w.detach()
    y = (x * w).sum()
    if how == "copy_":
        w.copy_([0, 0])
    elif how == "data":
        w.data[...] = 0
    elif how == "data +=":
        w.data += 1
    elif how == "view.copy_":
        view.copy_([0, 0])
    elif how == "slice.copy_":
        w[:1].copy_(0)
    elif how == "view.data":
        view.data[...] = 0
    elif how == "alias":
        alias[...] = 0
    elif how == "setitem":
        with mg.no_grad():
            w[0] = 0.0
    elif how == "numpy":
        np.asarray(w)[...] = 0
    return y


def overwrite_kept_output(x, how):
    y = x.exp()
    alias, view = y.data, y.detach()
    z = y.sum()
    if how == "copy_":
        y.copy_([0, 0])
    elif how == "data":
        y.data[...] = 0
    elif how == "data +=":
        y.data += 1
    elif how == "view.copy_":
        view.copy_([0, 0])
    elif how == "slice.copy_":
        y[:1].copy_(0)
    elif how == "view.data":
        view.data[...] = 0
    elif how == "alias":
        alias[...] = 0
    elif how == "setitem":
        with mg.no_grad():
            y.detach()[0] = 0.0
    elif how == "numpy":
        np.asarray(y)[...] = 0
    return z


@pytest.mark.parametrize("kept", [overwrite_kept_input, overwrite_kept_output])
@pytest.mark.parametrize("how", ["copy_", "data", "data +=", "view.copy_", "slice.copy_", "view.data", "alias",
                                 "setitem", "numpy"])
def test_writing_to_a_kept_array_is_an_error(kept, how):
    """Refused at once (NumPy: read-only), or reported by backward; never a wrong gradient."""
    x = leaf(1, 2)
    with pytest.raises((RuntimeError, ValueError), match="written in place|read-only|\\[setitem\\]"):
        kept(x, how).backward()
    assert x.grad is None


def test_an_old_view_of_data_is_caught_by_detect_anomaly():
    """NumPy cannot lock a view taken earlier; the fingerprint of what a node kept can tell."""
    x, w = leaf(1, 2), leaf(2, 3)
    part = w.data[:1]
    with mg.detect_anomaly():
        y = (x * w).sum()
        part[...] = 0
        with pytest.raises(RuntimeError, match="written in place.*test_tape.py"):
            y.backward()


@pytest.mark.parametrize("watch", [contextlib.nullcontext, mg.detect_anomaly])
def test_an_array_that_was_only_an_argument_may_be_reused(watch):
    """A batch buffer is the user's: what a node keeps of it is a copy, so filling it anew changes no gradient.
    d(sum x c)/dx = c as it was, (3, 4); embedding rows 0 and 1 as asked, not row 2; targets and masks likewise."""
    x, c, ids = leaf(1, 2), np.array([3.0, 4.0]), np.array([0, 1])
    table, mask, key = leaf([1.0, 1], [2, 2], [3, 3]), np.array([True, False]), np.array([1])
    with watch():
        y = (x * c).sum() + F.embedding(ids, table).sum() + F.where(mask, x, 0.0).sum() + 10 * x[key].sum()
        z = F.cross_entropy(table, np.array([0, 1, 0])[:3])
        c[:], ids[:], mask[:], key[:] = 0, 2, False, 0
        (y + 0 * z).backward()
    assert x.grad.tolist() == [4, 14]                    # 3 + 1 (where), 4 + 10 (the key)
    assert table.grad.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_writing_where_no_value_is_kept_is_fine():
    """A sum needs no values: gradient 1, whatever the values are by then."""
    x, w = leaf(1, 2), leaf(2, 3)
    y = (x + w).sum()
    w.copy_([0, 0])
    w.data[...] = 5
    y.backward()
    assert x.grad.tolist() == [1, 1] and w.tolist() == [5, 5]


@pytest.mark.parametrize("end", ["backward", "dropped"])
def test_writable_again_when_the_graph_is_gone(end):
    w = leaf(2, 3)
    alias = w.data
    y = (w * w).sum()
    with pytest.raises(ValueError, match="read-only"):
        alias[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        w.data[0] = 1
    if end == "backward":
        y.backward()
    else:
        del y
    alias[0], w.data[1] = 7, 8
    assert w.tolist() == [7, 8]


def test_two_graphs_hold_one_array():
    """The second graph still needs w when the first is gone."""
    w = leaf(2, 3)
    alias = w.data
    first, second = (w * w).sum(), (w * 1.0 * w).sum()
    first.backward()
    with pytest.raises(ValueError, match="read-only"):
        alias[0] = 1
    second.backward()
    alias[0] = 1


def test_a_failed_op_holds_nothing():
    """An op that raises leaves its arguments writable."""
    w = leaf(2, 3)
    alias = w.data
    with pytest.raises(ValueError):
        w * np.ones(3)
    alias[0] = 1


def test_copy_checks_shape_and_makes_a_leaf():
    x = leaf(1, 2)
    with pytest.raises(ValueError, match=r"\[copy_\].*\(2,\).*\(3,\)"):
        x.copy_([1, 2, 3])
    y = x * 2.0
    y.copy_([5, 6])
    assert y.is_leaf and not y.requires_grad and y.tolist() == [5, 6]
    x.copy_(9)
    assert x.tolist() == [9, 9] and x.requires_grad


def test_history_of_an_overwritten_view_is_not_used():
    """b is a view of a; after b is overwritten, a's values no longer come from a's node."""
    x = leaf(1, 2)
    a = x * 2.0
    a.detach().copy_([0, 0])
    with pytest.raises(RuntimeError, match="overwritten in place"):
        (a * 3.0).sum().backward()


# ----------------------------------------------------------------------------------------- backward and gradients


def test_second_backward_names_retain_graph():
    x = leaf(2.0)
    y = x * x
    y.backward()
    with pytest.raises(RuntimeError, match=r"\[multiply\].*retain_graph=True"):
        y.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        (y + x).backward()                               # through a part that is released
    assert x.grad.item() == 4.0


def test_retain_graph():
    x = leaf(2.0)
    y = x * x
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 8.0


def test_backward_needs_a_scalar_or_a_cotangent():
    x = leaf(1, 2)
    y = x * 2.0
    with pytest.raises(RuntimeError, match=r"\[backward\].*\(2,\).*y.sum\(\)"):
        y.backward()
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        y.backward(np.ones(3))
    y.backward(mg.tensor([1.0, 10.0], dtype=np.float64), retain_graph=True)
    y.backward(np.array([1.0, 10.0]), retain_graph=True)
    y.backward([1.0, 10.0])
    assert x.grad.tolist() == [6, 60]
    with pytest.raises(RuntimeError, match="requires a gradient"):
        mg.tensor([1.0]).sum().backward()


def test_gradients_of_leaves_and_non_leaves():
    """y = 3 h, h = x^2 at 2: dy/dh = 3, dy/dx = 12, dy/dy = 1; nothing for z; and .grad is not touched."""
    x, z = leaf(2.0), leaf(1.0)
    h = x * x
    y = h * 3.0
    got = mg.gradients(y, [h, x, y, z])
    assert [g.item() for g in got] == [3.0, 12.0, 1.0, 0.0]
    assert all(isinstance(g, mg.Tensor) and g.dtype == np.float64 for g in got)
    assert x.grad is None and z.grad is None
    g, = mg.gradients(x * 2.0, x, grad_y=5.0)            # one tensor, and a cotangent
    assert g.item() == 10.0


def test_gradients_do_not_alias():
    x = leaf(1, 2)
    h = x + 0.0
    a, b = mg.gradients(h + h, [h, x], grad_y=np.ones(2))
    a.data[...] = 9
    assert b.tolist() == [2, 2]
    g = np.ones(2)
    y = x * 2.0
    c, = mg.gradients(y, [y], grad_y=g)                  # the gradient of y itself is the cotangent given, copied
    c.data[...] = 9
    assert g.tolist() == [1, 1]


def test_gradients_refuses_what_requires_none():
    with pytest.raises(RuntimeError, match=r"\[gradients\] xs\[1\]"):
        x = leaf(1.0)
        mg.gradients(x * 2.0, [x, mg.tensor(1.0)])


def test_gradients_of_a_part_run_only_that_part(primitive):
    """Nodes that are on no path to x do not run."""
    calls = []

    @primitive(rules=[lambda ct: calls.append(1) or ct])
    def counted(a, /):
        return a + 0.0

    x, z = leaf(1.0), leaf(2.0)
    y = x * 2.0 + counted(z)
    assert mg.gradients(y, [x])[0].item() == 2.0
    assert not calls


def test_third_order_by_create_graph():
    """x^4 at 2: 4 x^3 = 32, 12 x^2 = 48, 24 x = 48, 24."""
    x = leaf(2.0)
    y, orders = x**4, []
    for _ in range(4):
        y, = mg.gradients(y, [x], create_graph=True)
        orders.append(y.item())
    assert orders == [32.0, 48.0, 48.0, 24.0]


def test_create_graph_goes_through_the_cotangent():
    """<x^2's gradient> is linear in grad_y: d/dv of (2 x v) is 2x."""
    x, v = leaf(3.0), leaf(5.0)
    g, = mg.gradients(x * x, [x], grad_y=v, create_graph=True)
    assert g.item() == 30.0
    assert [t.item() for t in mg.gradients(g, [x, v])] == [10.0, 6.0]


def test_backward_after_gradients_with_retain():
    """gradients without create_graph releases, as backward does, unless told to retain."""
    x = leaf(2.0)
    y = x * x
    mg.gradients(y, [x], retain_graph=True)
    mg.gradients(y, [x])
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward()


def test_a_failed_backward_changes_no_grad(primitive):
    """x is reached before the rule that fails; it keeps the old gradient."""
    @primitive(rules=[lambda ct: 1 / 0])
    def broken(a, /):
        return a + 0.0

    x, z = leaf(1.0), leaf(1.0)
    (x * 2.0).backward()
    with pytest.raises(ZeroDivisionError):
        (broken(z) + x * 5.0).backward()
    assert x.grad.item() == 2.0 and z.grad is None


def test_grad_property_is_checked():
    x = leaf(1, 2)
    x.grad = None
    x.grad = mg.tensor(np.array([1.0, 2.0]))
    for wrong in (mg.tensor(np.ones(3)), mg.tensor([1.0, 2.0], dtype=np.float32), np.ones(2), 0):
        with pytest.raises(ValueError, match=r"\[grad\]"):
            x.grad = wrong
    assert x.grad.tolist() == [1, 2]


# ----------------------------------------------------------------------------------------- transforms of functions


def test_nested_grad():
    """sin, cos, -sin, -cos: any order."""
    f, x = F.sin, 0.7
    for want in (np.cos(x), -np.sin(x), -np.cos(x), np.sin(x)):
        f = mg.grad(f)
        assert f(np.array(x)).item() == pytest.approx(want, rel=1e-14)


def test_perturbations_are_not_confused():
    """d/dx [x * d/dy (x + y)] = 1 at any x: the inner derivative with respect to y is 1, not 2."""
    f = mg.grad(lambda x: x * mg.grad(lambda y: x + y)(np.array(1.0)))
    assert f(np.array(3.0)).item() == 1.0
    # d/dx [x * d/dy (x y)] = 2x
    g = mg.grad(lambda x: x * mg.grad(lambda y: x * y)(np.array(1.0)))
    assert g(np.array(3.0)).item() == 6.0


def test_value_and_grad():
    def f(a, b, *, power=1):
        return (a * b**power).sum()

    a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    y, (ga, gb) = mg.value_and_grad(f, argnums=(0, 1))(a, b, power=2)
    assert y.item() == 1 * 9 + 2 * 16
    assert ga.tolist() == [9, 16] and gb.tolist() == [6, 16]
    y, g = mg.value_and_grad(f, argnums=1)(a, b)
    assert g.tolist() == [1, 2]
    assert mg.grad(f, argnums=-1)(a, b).tolist() == [1, 2]
    y, g = mg.value_and_grad(f, argnums=(1,))(a, b)
    assert isinstance(g, tuple)


def test_transforms_refuse_what_has_no_gradient():
    with pytest.raises(RuntimeError, match=r"\[grad\].*scalar.*\(2,\)"):
        mg.grad(lambda x: x * 2.0)(np.ones(2))
    with pytest.raises(TypeError, match=r"\[grad\].*one Tensor"):
        mg.grad(lambda x: 3.0)(np.ones(2))
    with pytest.raises(IndexError, match=r"\[grad\].*argument 1"):
        mg.grad(lambda x: x.sum(), argnums=1)(np.ones(2))
    with pytest.raises(TypeError, match="floating-point"):
        mg.grad(lambda x: x.sum())(np.array([1, 2]))
    with pytest.raises(TypeError, match="mg.gradients"):
        mg.grad(lambda x: x["a"].sum())({"a": np.ones(2)})


def test_grad_records_under_no_grad_and_leaves_no_trace():
    x = leaf(3.0)
    with mg.no_grad():
        g = mg.grad(lambda x: x * x)(x)
    assert g.item() == 6.0 and not g.requires_grad and x.grad is None


def test_vjp_pullback_may_be_called_twice():
    """f = (x0 x1, x0): J = [[x1, x0], [1, 0]]; rows of J by unit cotangents."""
    y, pull = mg.vjp(lambda x: F.stack([x[0] * x[1], x[0]]), np.array([2.0, 3.0]))
    assert y.tolist() == [6, 2]
    assert [pull(np.eye(2)[i]).tolist() for i in (0, 1, 0)] == [[3, 2], [1, 0], [3, 2]]
    y, pull = mg.vjp(lambda a, b: a * b, np.array(2.0), np.array(3.0))
    cts = pull(np.array(1.0))
    assert isinstance(cts, tuple) and [c.item() for c in cts] == [3.0, 2.0]


def test_vjp_differentiates_through_the_cotangent():
    """pull(ct) = ct 2x is differentiable in ct."""
    _, pull = mg.vjp(lambda x: x * x, np.array(3.0))
    assert mg.grad(lambda ct: pull(ct) * ct)(np.array(5.0)).item() == 2 * 5.0 * 6.0


def test_jvp_and_hvp_of_a_quadratic_form(rng):
    """f = x^T A x: gradient (A + A^T) x, derivative along v <gradient, v>, Hessian A + A^T."""
    a, x, v = rng.normal(size=(4, 4)), rng.normal(size=4), rng.normal(size=4)

    def f(x):
        return x @ (mg.tensor(a) @ x)

    y, dy = mg.jvp(f, (x,), (v,))
    assert y.item() == pytest.approx(x @ a @ x) and dy.item() == pytest.approx((a + a.T) @ x @ v)
    np.testing.assert_allclose(mg.hvp(f, x, v), (a + a.T) @ v, rtol=1e-12)
    y, dy = mg.jvp(lambda x, z: x * z, (x, v), (v, x))
    np.testing.assert_allclose(dy, v * v + x * x, rtol=1e-12)
    assert dy.dtype == np.float64


def test_jvp_of_what_does_not_depend_is_zero():
    y, dy = mg.jvp(lambda x: F.sign(x), (np.array([1.0, -2.0]),), (np.ones(2),))
    assert dy.tolist() == [0, 0]
    y, dy = mg.jvp(lambda x: mg.tensor(np.ones(3)), (np.ones(2),), (np.ones(2),))
    assert dy.tolist() == [0, 0, 0]


def test_jvp_refuses_wrong_tangents():
    with pytest.raises(ValueError, match=r"\[jvp\].*\(2,\).*\(3,\)"):
        mg.jvp(lambda x: x, (np.ones(2),), (np.ones(3),))
    with pytest.raises(ValueError, match=r"\[jvp\].*1 arguments and 2 tangents"):
        mg.jvp(lambda x: x, (np.ones(2),), (np.ones(2), np.ones(2)))


def test_a_gradient_penalty_reaches_the_weights():
    """d(x) = w x^2: the gradient in x is 2 w x; penalty (2 w x)^2 has derivative 8 w x^2 in w, a tensor that the
    differentiated function only closes over."""
    w = leaf(3.0)
    penalty = mg.grad(lambda x: w * x * x)(mg.tensor(np.array(2.0))) ** 2
    assert penalty.item() == 144.0
    penalty.backward()
    assert w.grad.item() == 8 * 3.0 * 4.0
    # the same through value_and_grad, vjp, jvp and hvp
    w.grad = None
    x = np.array(2.0)
    y, g = mg.value_and_grad(lambda x: w * x * x)(x)
    y2, pull = mg.vjp(lambda x: w * x * x, x)
    _, dy = mg.jvp(lambda x: w * x * x, (x,), (np.array(1.0),))
    h = mg.hvp(lambda x: w * x * x, x, np.array(1.0))
    for value, slope in ((y, 4.0), (g, 4.0), (y2, 4.0), (pull(np.array(1.0)), 4.0), (dy, 4.0), (h, 2.0)):
        assert mg.gradients(value, [w], retain_graph=True)[0].item() == slope


def test_grad_at_a_tensor_that_requires_one():
    """grad(f)(x) stays connected to x, as any function of it does: x^3 has 3 x^2, then 6 x."""
    x = leaf(2.0)
    g = mg.grad(lambda x: x**3)(x * 1.0)
    assert g.item() == 12.0
    g.backward()
    assert x.grad.item() == 12.0
    assert not mg.grad(lambda x: x**3)(mg.tensor(np.array(2.0))).requires_grad


# ------------------------------------------------------------------------------------------------ recording or not


def test_no_grad_and_enable_grad():
    x = leaf(1.0)
    with mg.no_grad():
        assert (x * 2.0).is_leaf
        with mg.enable_grad():
            assert (x * 2.0).requires_grad
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad


def test_no_grad_as_a_decorator_and_after_an_exception():
    x = leaf(1.0)

    @mg.no_grad()
    def f(x):
        return x * 2.0

    assert not f(x).requires_grad and not f(x).requires_grad
    with pytest.raises(KeyError), mg.no_grad():
        raise KeyError
    assert (x * 2.0).requires_grad


def test_recording_belongs_to_the_thread():
    """no_grad, composed and a Tape here change nothing there."""
    x, seen = leaf(1, 2), {}
    usual = F.softmax(x).node.name                       # as MINIGRAD_COMPOSED has it

    def work():
        y = F.softmax(x)
        seen["tracked"], seen["node"] = y.requires_grad, y.node and y.node.name

    with mg.no_grad(), mg.composed(), mg.Tape() as tape:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not F.softmax(x).requires_grad
    assert seen == {"tracked": True, "node": usual} and not tape.nodes


def test_threads_may_share_leaves():
    """Each thread records and pulls back its own graph of the same leaf."""
    x, got = leaf(1, 2), []

    def work(k):
        for _ in range(50):
            got.append((k, mg.gradients((x * float(k) * x).sum(), [x])[0].tolist()))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 200 and all(g == [2.0 * k, 4.0 * k] for k, g in got)


def test_composed_records_the_reference():
    x = leaf(1, 2)
    with kernels(), mg.Tape() as plain:
        F.softmax(x)
    with mg.composed(), mg.Tape() as tape:
        F.softmax(x)
    assert [n.name for n in plain] == ["softmax"]
    assert [n.name for n in tape] == ["logsumexp", "subtract", "exp"]


def test_detach_and_requires_grad():
    x = leaf(1, 2)
    d = (x * 2.0).detach()
    assert not d.requires_grad and d.is_leaf
    assert np.shares_memory(x.detach().data, x.data)
    with pytest.raises(RuntimeError, match="detach"):
        (x * 2.0).requires_grad = False
    x.requires_grad = False
    assert not (x * 2.0).requires_grad
    assert x.requires_grad_().requires_grad


# ----------------------------------------------------------------------------------------------------- checkpoint


def mlp(x, w, p=0.5):
    return F.dropout(F.gelu(x @ w), p) @ w


@pytest.mark.parametrize("how", ["arguments", "closure", "nested"])
def test_checkpoint_equals_plain(how, rng):
    """Values, gradients, the random bits of dropout, and where the stream of random numbers ends: all the same."""
    x0, w0 = rng.normal(size=(5, 4)), rng.normal(size=(4, 4))

    def run(wrapped):
        x, w = mg.tensor(x0, requires_grad=True), mg.tensor(w0, requires_grad=True)
        mg.manual_seed(3)
        if how == "arguments":
            y = wrapped(mlp, x, w)
        elif how == "closure":
            y = wrapped(lambda x: mlp(x, w), x)
        else:
            y = wrapped(lambda x: wrapped(lambda x: mlp(x, w), x) + mlp(x, w), x)
        state = mg.get_rng_state()
        F.dropout(y, 0.5).sum().backward()
        return y.numpy(), x.grad.numpy(), w.grad.numpy(), state, mg.get_rng_state()

    for got, want in zip(run(mg.checkpoint), run(lambda f, *args: f(*args))):
        np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("closure", [False, True])
def test_checkpoint_to_second_order(closure, rng):
    """The recomputation is recorded under create_graph; second derivatives agree with the plain ones."""
    x0, w0 = rng.normal(size=(3, 4)), rng.normal(size=(4, 4))

    def run(wrapped):
        x, w = mg.tensor(x0, requires_grad=True), mg.tensor(w0, requires_grad=True)
        mg.manual_seed(3)
        y = wrapped(lambda x: mlp(x, w), x) if closure else wrapped(mlp, x, w)
        gx, gw = mg.gradients((y * y).sum(), [x, w], create_graph=True)
        return [g.numpy() for g in mg.gradients((gx * gx).sum() + gw.sum(), [x, w])]

    for got, want in zip(run(mg.checkpoint), run(lambda f, *args: f(*args))):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_checkpoint_inside_grad():
    """d^2/dx^2 of x^3 through a checkpoint: 6x."""
    f = mg.grad(mg.grad(lambda x: mg.checkpoint(lambda x: x * x * x, x)))
    assert f(np.array(2.0)).item() == 12.0


def test_checkpoint_keeps_less_memory():
    """Eight exponentials keep eight outputs; checkpointed, their argument and the result only."""
    def f(x):
        for _ in range(8):
            x = (x * 0.1).exp()
        return x

    def kept(wrapped):
        x = mg.tensor(np.zeros(100_000), requires_grad=True)
        gc.collect()
        tracemalloc.start()
        try:
            y = wrapped(f, x)
            return tracemalloc.get_traced_memory()[0], y
        finally:
            tracemalloc.stop()

    plain, less = kept(lambda f, x: f(x))[0], kept(mg.checkpoint)[0]
    assert plain > 8 * 800_000 and less < 2 * 800_000


def test_checkpoint_with_other_arguments_and_without_recording():
    x = leaf(1, 2)
    y = mg.checkpoint(lambda x, k, c: x * k * c, x, 3.0, np.array([1.0, 10.0]))
    y.sum().backward()
    assert x.grad.tolist() == [3, 30]
    with mg.no_grad():
        assert not mg.checkpoint(lambda x: x * 2.0, x).requires_grad
    with pytest.raises(TypeError, match=r"\[checkpoint\].*one Tensor"):
        mg.checkpoint(lambda x: (x, x), x)


def test_checkpoint_second_backward_and_mutation():
    x = leaf(1, 2)
    y = mg.checkpoint(lambda x: x * x, x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        y.backward()
    z = mg.checkpoint(lambda x: x * x, x).sum()
    x.copy_([5, 6])
    with pytest.raises(RuntimeError, match="written in place"):
        z.backward()


def test_checkpoint_of_a_view_argument():
    """The argument may be a non-leaf; gradients flow on through it."""
    x = leaf(1, 2)
    mg.checkpoint(lambda h: h * h, x * 3.0).sum().backward()
    assert x.grad.tolist() == [18, 36]                   # d (3x)^2 = 18 x


# ------------------------------------------------------------------------------------------------- detect_anomaly


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_detect_anomaly_names_the_op_and_the_line():
    x = leaf(0.0, 1.0)
    with mg.detect_anomaly():
        with pytest.raises(mg.AnomalyError, match=r"\[log\].*infinity.*forward.*test_tape\.py:\d+"):
            F.log(x)
        with pytest.raises(mg.AnomalyError, match=r"\[log\].*NaN.*forward"):
            F.log(-x - 1.0)
        with pytest.raises(mg.AnomalyError, match=r"\[divide\].*infinity"):
            (x + 1.0) / 0.0
        y = F.sqrt(x).sum()                              # finite; its derivative 1 / (2 sqrt 0) is not
        with pytest.raises(mg.AnomalyError, match=r"\[sqrt\].*infinity.*backward.*test_tape\.py:\d+"):
            y.backward()
    assert x.grad is None
    assert np.isinf((x / 0.0).numpy()).any()             # not watched any more


def test_detect_anomaly_lets_masks_be():
    """-inf that was put in, or made outside the tape, is meant."""
    x = mg.tensor(np.arange(9.0).reshape(3, 3), requires_grad=True)
    with mg.detect_anomaly():
        hidden = mg.where(np.tri(3, dtype=bool), 0.0, -np.inf)
        F.softmax(x + hidden).sum().backward()
        F.masked_softmax(x, np.tri(3, dtype=bool)).sum().backward()
        q = mg.tensor(np.ones((3, 2)), requires_grad=True)
        for way in ("composed", "fused", "tiled"):
            F.scaled_dot_product_attention(q, q, q, is_causal=True, implementation=way).sum().backward()
            F.scaled_dot_product_attention(q, q, q, hidden, implementation=way).sum().backward()


def test_detect_anomaly_names_what_came_with_the_input():
    x = leaf(np.nan, 1.0)
    with mg.detect_anomaly(), pytest.raises(mg.AnomalyError, match="input"):
        (x * 2.0).sum().backward()


# ------------------------------------------------------------------------------------------------------------ Tape


def test_tape_lists_nodes_in_creation_order():
    x = leaf(1, 2)
    x * 1.0
    with mg.Tape() as tape:
        y = (x * 2.0).exp().sum()
        with mg.no_grad():
            x * 3.0                                      # not recorded
    y * 4.0                                              # after it was closed
    assert [n.name for n in tape.nodes] == ["multiply", "exp", "sum"] and len(tape) == 3
    assert [n.index for n in tape] == sorted(n.index for n in tape)
    assert list(tape.nodes[1].targets) == [tape.nodes[0]] and tape.nodes[0].targets[0] is x
    assert (tape.nodes[0].shape, tape.nodes[0].dtype, tape.nodes[0].device) == ((2,), np.float64, "cpu")


def test_print_tape():
    x = leaf(1, 2)
    with mg.Tape() as tape:
        y = x.exp().sum()
    text = str(tape)
    first, second = text.splitlines()[1:3]
    assert "exp" in first and "leaf" in first and "(2,)" in first and "float64" in first and "test_tape.py" in first
    assert "16 B" in first and second.split()[:3] == ["1", "sum", "0"]
    y.backward()
    assert "released" in str(tape)


def test_nested_tapes_see_the_same_nodes():
    x = leaf(1.0)
    with mg.Tape() as outer:
        x * 1.0
        with mg.Tape() as inner:
            x * 2.0
    assert len(outer) == 2 and len(inner) == 1 and outer.nodes[1] is inner.nodes[0]


def test_tape_records_the_backward_pass_under_create_graph():
    """The backward pass of x exp(x) is made of the same ops."""
    x = leaf(1.0)
    y = x * x.exp()
    with mg.Tape() as tape:
        mg.gradients(y, [x], create_graph=True)
    assert {n.name for n in tape} <= {"multiply", "add"} and len(tape) >= 3


# --------------------------------------------------------------------------------------------- dtypes and scalars


def test_float32_stays_float32():
    """Through Python's sum (which starts at int 0), numbers and NumPy scalars from both sides, means, 0-d results."""
    x = leaf(1, 2, 3, dtype=np.float32)
    results = [sum([x, x]), x * np.float64(2), np.float64(2) * x, x * 2, 2 * x, x / 3, 3 / x, np.float64(1) - x,
               x - np.float64(1), x + np.int64(1), np.int64(1) + x, x**2, x ** np.float64(2), np.float64(2) ** x,
               x.mean(), x.sum() * np.float64(2), x.var(), x.std(), x[0] * np.float64(3), np.float64(3) * x[0],
               F.maximum(x, np.float64(0)), F.clip(x, np.float64(0), 2),
               mg.where(np.array([True, False, True]), x, np.float64(0)),
               x.mean() ** 0.5, F.logsumexp(x), x.max(), F.pad(x, ((1, 1),)), F.sigmoid(x), F.gelu(x.sum())]
    for y in results:
        assert isinstance(y, mg.Tensor) and y.dtype == np.float32, y
        assert isinstance(y.data, np.ndarray)            # 0-d results are arrays, not NumPy scalars
        g, = mg.gradients(y.sum(), [x])
        assert g.dtype == np.float32 and g.shape == x.shape


def test_numpy_on_the_left_is_a_tensor():
    x = leaf(1, 2)
    a = np.array([3.0, 4.0])
    for y, want in ((a * x, [3, 8]), (a + x, [4, 6]), (a - x, [2, 2]), (a / x, [3, 2]), (a @ x, 11), (a**x, [3, 16]),
                    (np.float64(2) * x, [2, 4]), (np.int64(1) - x, [0, -1])):
        assert isinstance(y, mg.Tensor) and y.requires_grad and y.tolist() == want
    c = a > x
    assert isinstance(c, mg.Tensor) and c.dtype == bool and c.tolist() == [True, True]


def test_made_from_python_or_numpy():
    assert mg.tensor(1.5).dtype == np.float32 and mg.tensor([[1.0, 2.0]]).dtype == np.float32
    assert mg.tensor([1, 2]).dtype == np.int64 and mg.tensor([True]).dtype == bool
    assert mg.tensor(np.ones(2)).dtype == np.float64 and mg.tensor(np.float64(1)).dtype == np.float64
    assert mg.tensor(np.ones(2, np.float16)).dtype == np.float16
    assert mg.tensor([1.0], dtype=mg.float64).dtype == np.float64
    assert mg.tensor([1, 2], dtype=np.float32, requires_grad=True).requires_grad
    a = np.ones(2)
    x = mg.tensor(a)
    a[0] = 5
    assert x.tolist() == [1, 1]                          # a copy
    with pytest.raises(TypeError, match=r"\[tensor\]"):
        mg.tensor(["a"])
    with pytest.raises(TypeError, match=r"\[tensor\]"):
        mg.tensor([1j])


def test_only_floats_require_gradients():
    for make in (lambda: mg.tensor([1, 2], requires_grad=True), lambda: mg.tensor([True], requires_grad=True),
                 lambda: mg.tensor([1]).requires_grad_()):
        with pytest.raises(TypeError, match=r"\[requires_grad\].*floating-point"):
            make()


def test_mixed_dtypes_promote_as_numpy_and_gradients_come_back():
    """float32 * float64 is float64 (NEP 50); each gradient has its tensor's dtype."""
    a, b = leaf(1, 2, dtype=np.float32), leaf(3, 4)
    y = a * b
    assert y.dtype == np.float64
    y.sum().backward()
    assert a.grad.dtype == np.float32 and b.grad.dtype == np.float64


def test_to_is_differentiable():
    x = leaf(1, 2, dtype=np.float32)
    y = x.to(mg.float64)
    assert y.dtype == np.float64 and x.to(mg.float32) is x and x.to("cpu") is x
    y.sum().backward()
    assert x.grad.dtype == np.float32
    assert x.to("cpu", mg.float16).dtype == np.float16 and x.astype(np.float64).dtype == np.float64


# ------------------------------------------------------------------------------------------------- a Tensor's face


def test_numbers_out():
    x = mg.tensor([[1.5]])
    assert x.item() == 1.5 and float(x) == 1.5 and int(x) == 1 and bool(x)
    assert f"{x:.2f}" == "1.50" and np.asarray(x).shape == (1, 1)
    assert [10, 20, 30][mg.tensor(1)] == 20
    two = mg.tensor([1.0, 2.0])
    for f in (float, int, bool, lambda t: t.item(), lambda t: f"{t:.2f}"):
        with pytest.raises(ValueError, match=r"^\[(item|bool)\].*\(2,\)"):
            f(two)
    assert f"{two}" == repr(two) and 2.0 in two and 3.0 not in two


def test_len_and_iteration():
    x = leaf(1, 2, 3)
    assert len(x) == 3
    a, b, c = x
    (a * 10.0 + c).backward()
    assert x.grad.tolist() == [10, 0, 1]
    with pytest.raises(TypeError, match=r"\[iter\].*0-d"):
        iter(mg.tensor(1.0))
    with pytest.raises(TypeError):
        len(mg.tensor(1.0))


def test_repr():
    assert repr(mg.tensor([1.0, 2.0])) == "tensor([1., 2.], dtype=float32)"
    assert repr(leaf(1.0)) == "tensor(1., dtype=float64, requires_grad=True)"
    assert repr(leaf(1.0) * 2.0) == "tensor(2., dtype=float64, op=multiply)"
    assert "..." in repr(mg.zeros(1000))


def test_numpy_is_a_copy_and_asarray_is_not_writable():
    x = mg.tensor([1.0, 2.0])
    x.numpy()[0] = 9
    assert x.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(x)[0] = 9
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    assert np.array(x).flags.writeable


def test_data_is_the_array_itself():
    """p.data -= step and p.data[...] = a write in place; p.data = a copies in."""
    p = leaf(1, 2)
    raw = p.data
    p.data -= 1.0
    p.data[1] = 5.0
    assert p.data is raw and p.tolist() == [0, 5] and p.requires_grad
    p.data = np.array([7.0, 8.0])
    assert p.tolist() == [7, 8] and p.data is raw


def test_deepcopy():
    x = leaf(1, 2)
    (x * 2.0).sum().backward()
    a, b = copy.deepcopy([x, x])
    assert a is b and a.requires_grad and a.tolist() == [1, 2] and a.grad.tolist() == [2, 2]
    a.data[0] = 9
    a.grad.data[0] = 9
    assert x.tolist() == [1, 2] and x.grad.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match=r"\[deepcopy\].*detach"):
        copy.deepcopy(x * 2.0)


def test_pickle_is_refused():
    with pytest.raises(TypeError, match="safetensors"):
        pickle.dumps(leaf(1.0))


def test_hash_is_identity():
    x, y = leaf(1.0), leaf(1.0)
    assert {x: 1, y: 2}[x] == 1 and len({x, y}) == 2


def test_dlpack_shares_memory():
    x = mg.tensor([1.0, 2.0])
    a = np.from_dlpack(x)
    assert a.tolist() == [1, 2] and np.shares_memory(a, x.data)
    b = np.ones(2, np.float32)
    y = mg.from_dlpack(b)
    b[0] = 5
    assert y.tolist() == [5, 1]
    y.requires_grad = True
    (y * y).sum().backward()                             # its memory is not ours to lock, and nothing fails for that
    assert y.grad.tolist() == [10, 2]
    with mg.detect_anomaly():
        z = (y * y).sum()
        b[0] = 1                                         # the owner's write would make the gradient wrong
        with pytest.raises(RuntimeError, match="written in place"):
            z.backward()


def test_setitem():
    x = leaf(1, 2, 3)
    with pytest.raises(RuntimeError, match=r"\[setitem\].*mg\.where"):
        x[0] = 5.0
    with pytest.raises(RuntimeError, match=r"\[setitem\].*mg\.where"):
        (x * 2.0)[0] = 5.0
    with mg.no_grad():
        x[0] = 5.0
        x[1:] = mg.tensor([6.0, 7.0])
    assert x.tolist() == [5, 6, 7]
    c = mg.zeros(3)
    c[mg.tensor([0, 2])] = 1.0
    assert c.tolist() == [1, 0, 1]


def test_operators_are_the_functions():
    a, b = leaf(1, 2), leaf(3, 5)
    pairs = [(a + b, F.add(a, b)), (a - b, F.subtract(a, b)), (a * b, F.multiply(a, b)), (a / b, F.divide(a, b)),
             (a**b, F.power(a, b)), (a @ b, F.matmul(a, b)), (-a, F.negative(a)), (abs(a), F.abs(a)),
             (a > b, F.greater(a, b)), (a >= b, F.greater_equal(a, b)), (a < b, F.less(a, b)),
             (a <= b, F.less_equal(a, b)), (a == b, F.equal(a, b)),
             (a != b, F.not_equal(a, b)), ((a > 1) & (b > 1), F.logical_and(a > 1, b > 1)),
             ((a > 1) | (b > 1), F.logical_or(a > 1, b > 1)), (~(a > 1), F.logical_not(a > 1))]
    for x, y in pairs:
        assert x.tolist() == y.tolist() and x.dtype == y.dtype
    x = mg.tensor(np.arange(6.0).reshape(1, 2, 3))
    assert x.T.shape == (3, 2, 1) and x.mT.shape == (1, 3, 2) and x.transpose(2, 0, 1).shape == (3, 1, 2)
    assert x.transpose((2, 0, 1)).shape == (3, 1, 2) and x.reshape(3, 2).shape == x.reshape((3, 2)).shape == (3, 2)
    assert x.squeeze().shape == (2, 3) and x.swapaxes(0, 2).shape == (3, 2, 1) and x.sum(axis=(0, 1)).shape == (3,)


# ---------------------------------------------------------------------------- conventions where calculus has a choice


def test_relu_and_abs_at_0():
    x = leaf(-1, 0, 2)
    assert mg.gradients(F.relu(x).sum(), [x])[0].tolist() == [0, 0, 1]
    assert mg.gradients(abs(x).sum(), [x])[0].tolist() == [-1, 0, 1]


@pytest.mark.parametrize("f", [F.max, F.min])
def test_ties_of_max_and_min_share_1(f):
    """Two of three are extreme: a half each. Also along an axis, and all equal."""
    x = mg.tensor(np.array([[1.0, 1.0, 1.0], [5.0, 5.0, 5.0]]), requires_grad=True)
    np.testing.assert_allclose(mg.gradients(f(x), [x])[0].numpy().sum(), 1.0)
    g = mg.gradients(f(x, axis=1).sum(), [x])[0].numpy()
    np.testing.assert_allclose(g, np.full((2, 3), 1 / 3))


@pytest.mark.parametrize("f", [F.maximum, F.minimum])
def test_ties_of_maximum_and_minimum_share_1(f):
    a, b = leaf(1, 2, 3), leaf(1, 3, 2)
    ga, gb = (g.numpy() for g in mg.gradients(f(a, b).sum(), [a, b]))
    assert (ga >= 0).all() and (ga + gb).tolist() == [1, 1, 1] and ga[0] == 0.5


def test_clip_at_its_bounds():
    """Gradient 1 for x at and between the bounds; a Tensor bound gets what it replaces, and at a tie x has it all."""
    x = leaf(-2, -1, 0, 1, 2)
    assert mg.gradients(F.clip(x, -1.0, 1.0).sum(), [x])[0].tolist() == [0, 1, 1, 1, 0]
    low, high = leaf(-1.0), leaf(1.0)
    gx, gl, gh = mg.gradients(F.clip(x, low, high).sum(), [x, low, high])
    assert gx.tolist() == [0, 1, 1, 1, 0] and (gl.item(), gh.item()) == (1.0, 1.0)
    assert F.clip(x, None, 0.0).tolist() == [-2, -1, 0, 0, 0] and F.clip(x, low=0.0).tolist() == [0, 0, 0, 1, 2]


def test_power_at_0():
    """x^0 = 1 with derivative 0, also at 0; x^1 has 1; x^2 has 0 at 0; 0^b has 0 in b."""
    for exponent, slope in ((0, 0.0), (0.0, 0.0), (1, 1.0), (2, 0.0), (2.0, 0.0), (3, 0.0)):
        x = leaf(0.0)
        g, = mg.gradients(x**exponent, [x], create_graph=True)
        assert g.item() == slope, exponent
    a, b = leaf(0.0, 0.0, 2.0), leaf(0.0, 2.0, 0.0)
    ga, gb = mg.gradients((a**b).sum(), [a, b])
    assert ga.tolist() == [0, 0, 0] and gb.tolist() == [0, 0, np.log(2.0)]
    x = leaf(2.0)
    assert mg.gradients(x**-1, [x])[0].item() == -0.25


def test_integer_powers_of_negative_numbers():
    """(-2)^3 = -8, slope 3 * 4 = 12, second 6 * -2 = -12."""
    x = leaf(-2.0)
    g, = mg.gradients(x**3, [x], create_graph=True)
    assert g.item() == 12.0 and mg.gradients(g, [x])[0].item() == -12.0


def test_where_stops_what_is_not_chosen():
    """An infinite branch that is not chosen gives 0, not NaN, if it is guarded before; the condition may be NumPy's."""
    x = leaf(0.0, 4.0)
    keep = np.array([False, True])
    y = mg.where(keep, F.sqrt(mg.where(keep, x, 1.0)), 0.0)
    assert mg.gradients(y.sum(), [x])[0].tolist() == [0, 0.25]
    assert mg.where(True, x, 0.0).tolist() == [0, 4] and mg.where(x > 1.0, x, -1.0).tolist() == [-1, 4]
    assert mg.where([True, False], x, -1.0).tolist() == [0, -1]


def test_axis_empty_tuple_reduces_nothing():
    x = mg.tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    for f in (F.sum, F.mean, F.max, F.min):
        y = f(x, axis=())
        assert y.tolist() == x.tolist()
        assert mg.gradients(y.sum(), [x])[0].tolist() == [[1] * 3] * 2
    assert F.var(x, axis=()).tolist() == [[0] * 3] * 2


def test_softmax_of_nothing():
    """log sum over nothing is log 0; a softmax along an axis without elements has none."""
    x = mg.tensor(np.zeros((2, 0)), requires_grad=True)
    assert F.logsumexp(x, axis=1).tolist() == [-np.inf, -np.inf]
    for f in (F.softmax, F.log_softmax):
        y = f(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (2, 0)


def test_indexing_twice_adds_twice():
    """x[[0, 0, 1]] takes element 0 twice: gradient 2. Tensors, lists, arrays and bool masks index alike."""
    for key in ([0, 0, 1], np.array([0, 0, 1]), mg.tensor([0, 0, 1])):
        x = leaf(1, 2, 3)
        assert mg.gradients(x[key].sum(), [x])[0].tolist() == [2, 1, 0]
    x = leaf(1, 2, 3)
    assert x[x > 1.5].tolist() == [2, 3] and x[-1].item() == 3 and x[[]].shape == (0,)
    y = mg.tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    g, = mg.gradients(y[:, 1:][0].sum() + y[1, 2] * 5.0 + y[..., None].sum(), [y])
    assert g.tolist() == [[1, 2, 2], [1, 1, 6]]


def test_slices_of_one_tensor_add_into_one_gradient():
    """Overlapping slices and the whole: each element gets one per use; the order of uses does not matter."""
    for order in itertools.permutations(range(3)):
        x = leaf(1, 2, 3, 4)
        parts = [lambda x: x[:2].sum(), lambda x: x[1:].sum(), lambda x: (x * 10.0).sum()]
        (parts[order[0]](x) + parts[order[1]](x) + parts[order[2]](x)).backward()
        assert x.grad.tolist() == [11, 12, 11, 11]


def test_a_slice_adds_into_a_shared_cotangent():
    """x + w hands one cotangent to both; what the slice of x then adds must not reach w."""
    x, w = leaf(1, 2), leaf(3, 4)
    h = x * 1.0
    part = h[:1].sum()
    ((h + w) * np.array([1.0, 10.0])).sum().backward(retain_graph=True)
    assert x.grad.tolist() == [1, 10] and w.grad.tolist() == [1, 10]
    x.grad = w.grad = None
    (part + ((h + w) * np.array([1.0, 10.0])).sum()).backward()
    assert x.grad.tolist() == [2, 10] and w.grad.tolist() == [1, 10]


def test_losses_conventions():
    """Nothing kept: loss 0, gradient 0. Ids out of range name the id and the size; they never wrap."""
    z = mg.tensor(np.zeros((2, 3)), requires_grad=True)
    loss = F.cross_entropy(z, np.array([-100, -100]))
    loss.backward()
    assert loss.item() == 0.0 and z.grad.tolist() == [[0] * 3] * 2
    for call in (lambda: F.cross_entropy(z, np.array([0, 3])), lambda: F.embedding(np.array([0, 3]), z.T),
                 lambda: F.take(z, np.array([3]), axis=1), lambda: F.one_hot(np.array([3]), 3),
                 lambda: F.take_along_axis(z, np.array([[3]]), 1)):
        with pytest.raises(IndexError, match=r"^\[\w+\] id 3 at \(.*\) is out of range for size 3"):
            call()
    for call in (lambda: F.embedding([-1], z), lambda: F.cross_entropy(z, np.array([0, -1]))):
        with pytest.raises(IndexError, match="id -1"):
            call()
    assert F.take(z, [-1], axis=1).shape == (2, 1)
    with pytest.raises(IndexError, match="id 5"):
        F.embedding(np.array(5), z)
    with pytest.raises(TypeError, match=r"\[embedding\] ids are integers"):
        F.embedding(np.array([0.5]), z)


# ------------------------------------------------------------------------------------------ errors and custom ops


@pytest.mark.parametrize("call, says", [
    (lambda a, b: a + b, r"\[add\].*a \(2, 3\).*b \(4,\)"),
    (lambda a, b: a * b, r"\[multiply\].*a \(2, 3\).*b \(4,\)"),
    (lambda a, b: a @ b, r"\[matmul\] inner sizes differ: a \(2, 3\) @ b \(4,\)"),
    (lambda a, b: a.reshape(7), r"\[reshape\].*x \(2, 3\).*7"),
    (lambda a, b: a.transpose(0, 0), r"\[transpose\].*x \(2, 3\)"),
    (lambda a, b: a.sum(axis=5), r"\[sum\].*axis 5"),
    (lambda a, b: F.softmax(a, axis=3), r"\[\w+\].*axis"),
    (lambda a, b: a[5], r"\[getitem\].*index 5"),
    (lambda a, b: F.concatenate([a, b]), r"\[concatenate\].*\(2, 3\).*\(4,\)"),
    (lambda a, b: F.stack([a, b]), r"\[concatenate\]"),
    (lambda a, b: F.einsum("ij,jk->ik", a, b), r"\[einsum\] term 'jk'.*\(4,\)"),
    (lambda a, b: F.einsum("ij,j->i", a, b), r"\[einsum\] letter 'j'.* 3 and 4"),
    (lambda a, b: F.linear(a, b), r"\[linear\].*\(d_in, d_out\).*\(2, 3\).*\(4,\)"),
    (lambda a, b: F.layer_norm(a, b), r"\[layer_norm\].*\(2, 3\).*\(4,\)"),
    (lambda a, b: F.mse_loss(a, b), r"\[mse_loss\].*\(2, 3\).*\(4,\)"),
    (lambda a, b: F.split(a, 2, axis=1), r"\[split\].*length 3"),
    (lambda a, b: F.squeeze(a, 0), r"\[squeeze\].*axis 0.*\(2, 3\)"),
    (lambda a, b: F.expand_dims(a, 5), r"\[expand_dims\]"),
    (lambda a, b: F.pad(a, ((1, 1),)), r"\[pad\].*\(2, 3\)"),
    (lambda a, b: F.broadcast_to(a, (3, 2)), r"\[broadcast_to\].*\(2, 3\)"),
    (lambda a, b: F.dropout(a, 1.5), r"\[dropout\].*1.5"),
    (lambda a, b: F.cross_entropy(a, np.array([0, 1, 2])), r"\[cross_entropy\].*\(2, 3\).*\(3,\)"),
    (lambda a, b: F.cross_entropy(a, np.array([0, 1]), reduction="none of it"), r"\[cross_entropy\].*reduction"),
    (lambda a, b: F.gelu(a, approximate="sigmoid"), r"\[gelu\].*'sigmoid'"),
    (lambda a, b: F.rotary_embedding(a, np.ones((2, 4)), np.ones((2, 4))), r"\[rotary_embedding\].*\(2, 3\)"),
    (lambda a, b: a + "x", r"\[add\].*str"),
    (lambda a, b: F.exp(), r"\[exp\].*missing"),
    (lambda a, b: F.exp(a, b), r"\[exp\] takes"),
    (lambda a, b: F.masked_softmax(a, np.ones((3, 3), bool)),
     r"\[masked_softmax\].*True.*mask \(3, 3\), scores \(2, 3\)"),
    (lambda a, b: F.masked_softmax(a, np.ones((2, 3))), r"\[masked_softmax\].*boolean.*float64"),
    (lambda a, b: F.masked_softmax(a, np.zeros((2, 3), bool)), r"\[masked_softmax\].*query 0"),
])
def test_errors_name_the_op_what_must_hold_and_what_came(call, says):
    a, b = mg.tensor(np.ones((2, 3)), requires_grad=True), mg.tensor(np.ones(4))
    with pytest.raises((ValueError, TypeError, IndexError), match="^" + says):
        call(a, b)


def test_a_custom_primitive(primitive):
    """The cube: rules in its own words give any order. 8, 12, 12, 6 at 2."""
    @primitive(rules=[lambda ct, x: 3.0 * x * x * ct], samples=[mg.sample((2, 3))])
    def my_cube(x, /):
        """x^3"""
        return x * x * x

    f, got = my_cube, [my_cube(np.array(2.0)).item()]
    for _ in range(3):
        f = mg.grad(f)
        got.append(f(np.array(2.0)).item())
    assert got == [8.0, 12.0, 12.0, 6.0]
    assert mg.primitives["my_cube"] is my_cube and my_cube.__doc__ == "x^3"


def test_a_custom_kernel_falls_back_to_its_reference(primitive):
    """First order by the kernel's own rule (with what it kept), second by differentiating the reference."""
    ran = []

    def forward(x):
        ran.append("forward")
        return x * x, x * 2.0

    def backward(ct, twice):
        ran.append("backward")
        return ct * twice

    @primitive(kernels={"numpy": (forward, backward, "twice")})
    def my_square(x, /):
        return x * x

    x = leaf(3.0)
    with kernels():
        my_square(x).backward()
        assert ran == ["forward", "backward"] and x.grad.item() == 6.0
        assert mg.grad(mg.grad(my_square))(np.array(3.0)).item() == 2.0
    ran.clear()
    with mg.composed():
        my_square(x).backward()
    assert not ran


@pytest.mark.parametrize("rule", [lambda ct, z: ct, lambda x: x, lambda: 0])
def test_a_rule_may_only_name_what_there_is(primitive, rule):
    """At definition, not at the first backward."""
    with pytest.raises(TypeError, match=r"^\[my_wrong\] a rule takes ct"):
        @primitive(rules=[rule])
        def my_wrong(x, /):
            return x


def test_primitive_definitions_are_checked(primitive):
    with pytest.raises(TypeError, match=r"^\[my_two\] one rule per array argument"):
        @primitive(rules=[lambda ct: ct])
        def my_two(a, b, /):
            return a + b

    with pytest.raises(TypeError, match=r"^\[exp\].*exists already"):
        @primitive(rules=[lambda ct: ct])
        def exp(x, /):
            return x


def test_what_rules_return_is_checked(primitive):
    """A wrong shape names the op and both shapes; a cotangent of another dtype is cast."""
    @primitive(rules=[lambda ct: ct[:1]])
    def my_short(x, /):
        return x + 0.0

    @primitive(rules=[lambda ct: ct.sum()])
    def my_scalar(x, /):
        return x + 0.0

    @primitive(broadcasts=True, rules=[lambda ct: ct[:1]])
    def my_broadcast(x, /):
        return x + 0.0

    @primitive(rules=[lambda ct: ct.astype(np.float64)])
    def my_wide(x, /):
        return x + 0.0

    for op, came in ((my_short, r"\(1,\)"), (my_scalar, r"\(\)"), (my_broadcast, r"\(1,\)")):
        x = leaf(1, 2)
        with pytest.raises(RuntimeError, match=rf"^\[{op.name}\].*{came}.*\(2,\)"):
            op(x).sum().backward()
        assert x.grad is None
    x = leaf(1, 2, dtype=np.float32)
    my_wide(x).sum().backward()
    assert x.grad.dtype == np.float32


def test_a_rule_may_return_the_cotangent_itself_or_a_view(primitive):
    """The engine adds in place only into arrays of its own: sharing ct between arguments is safe."""
    @primitive(rule=lambda ct: (ct, ct[::-1]))
    def my_shared(a, b, /):
        return a + b[::-1]

    a, b = leaf(1, 2), leaf(3, 4)
    y = my_shared(a, b)
    (my_shared(y, y) * np.array([1.0, 10.0])).sum().backward()
    # y = a + rev b; f = y + rev y: df/dy = ct + rev ct = [11, 11]
    assert a.grad.tolist() == [11, 11] and b.grad.tolist() == [11, 11]


def test_parameters_by_position_and_arrays_by_name():
    x = mg.tensor(np.arange(6.0).reshape(2, 3))
    assert F.sum(x, 1).tolist() == [3, 12] and F.sum(x, 1, True).shape == (2, 1)
    assert F.layer_norm(x, bias=mg.tensor(np.ones(3))).shape == (2, 3)
    assert F.clip(x, high=1.0).numpy().max() == 1.0
    assert F.softmax(x, 0).shape == (2, 3)
    with pytest.raises(TypeError, match=r"\[sum\].*axis is given twice"):
        F.sum(x, 1, axis=0)


def test_device_errors():
    """Without CuPy, one line: what to install and what to type instead."""
    with pytest.raises(ValueError, match=r'\[device\].*"cpu", "cuda"'):
        mg.tensor(1.0, device="gpu")
    if not mg.cuda.is_available():
        for ask in (lambda: mg.tensor(1.0).to("cuda"), lambda: mg.zeros(2, device="cuda")):
            with pytest.raises(RuntimeError, match=r"^\[device\] 'cuda'.*pip install.*'cpu'"):
                ask()


# ------------------------------------------------------------------------- faults once found, each with its right value


@pytest.mark.parametrize("use", [
    lambda w: (leaf([1.0, 2]) @ w.T).sum(), lambda w: (w.reshape(4) ** 2).sum(),
    lambda w: (w[:1] * w[:1]).sum(), lambda w: (w.detach().reshape(4) * w.reshape(4)).sum()])
@pytest.mark.parametrize("expose", [lambda w: w.data, lambda w: w.T.data, lambda w: w.reshape(4).data])
def test_data_is_locked_by_a_node_that_keeps_any_view_of_it(use, expose):
    """The raw array was taken from w or a view of it, and the node keeps another view: one memory, one lock."""
    w = leaf([1.0, 2], [3, 4])
    raw = expose(w)
    y = use(w)
    with pytest.raises(ValueError, match="read-only"):
        raw[...] = 100
    y.backward()
    raw[...] = 5                                         # nothing needs it any more
    assert (w.numpy() == 5).all()


def test_a_copying_index_shares_nothing():
    """x[:, [0, 1]] is a copy: writing it leaves x, and what was computed from x, alone."""
    x = leaf([1.0, 2], [3, 4])
    picked = x.detach()[:, [0, 1]]
    y = (x * x).sum()
    picked.copy_(0.0)
    y.backward()
    assert x.grad.tolist() == [[2, 4], [6, 8]]


class Matrix(np.ndarray):
    """As np.matrix: * is the matrix product."""

    def __mul__(self, other):
        return np.matmul(self, other)


@pytest.mark.parametrize("kind", [Matrix, np.recarray])
def test_of_a_subclass_of_ndarray_only_the_values_count(kind):
    """A matrix must not turn * into the matrix product: 4 * 4 = 16 in the corner, not 22."""
    array = np.array([[1.0, 2], [3, 4]]).view(kind)
    for x in (mg.tensor(array), mg.ones(2, 2, dtype=mg.float64) * array):
        assert type(x.data) is np.ndarray
        assert (x * array)[1, 1].item() == 16


def test_masked_and_memory_mapped_arrays(tmp_path):
    np.save(tmp_path / "a.npy", np.eye(2))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert (mg.ones(2, 2, dtype=mg.float64) * mapped).tolist() == [[1, 0], [0, 1]]
    with pytest.raises(TypeError, match=r"\[tensor\] a masked array"):
        mg.tensor(np.ma.masked_array([1.0, 2], [True, False]))


@pytest.mark.parametrize("cut", [
    lambda x: mg.zeros(2, dtype=mg.float64).__setitem__(0, x[0]),
    lambda x: mg.zeros(2, dtype=mg.float64).copy_(x * 2),
    lambda x: x * [x[0], x[1]], lambda x: mg.tensor([x[0], x[1]]), lambda x: np.concatenate([x, x]), np.sum])
def test_the_graph_is_never_cut_silently(cut):
    """Where only values would be taken of a tensor whose history is being recorded, that is an error."""
    x = leaf(1.0, 2.0)
    with pytest.raises((RuntimeError, TypeError), match=r"^\[.*(gradient|NumPy's)"):
        cut(x)
    assert np.allclose(x, [1, 2]) and np.asarray(x).tolist() == [1, 2]


def test_in_place_arithmetic_on_a_leaf_is_refused():
    """p -= step would leave p as it was: the training loop of a PyTorch user must not silently do nothing."""
    p = leaf(1.0, 2.0)
    with mg.no_grad(), pytest.raises(RuntimeError, match=r"p.copy_\(p - step\)"):
        p -= 0.1
    p.data -= 0.5
    h = p * 2
    h += 1
    assert h.tolist() == [2, 4]


def test_a_refused_op_holds_nothing():
    x, t = leaf(1.0, 2.0), leaf(3.0, 4.0)
    raw, z = x.data, t * 2
    z.detach().copy_(0.0)
    with pytest.raises(RuntimeError, match="overwritten in place"):
        x * z
    raw[...] = 7
    assert x.tolist() == [7, 7]


def test_a_caught_error_keeps_no_graph_alive():
    """The exception must not refer to itself: with the collector off the node and its lock are gone at once."""
    x = leaf(1.0, 2.0)
    raw = x.data
    gc.disable()
    try:
        try:
            (x * x) @ mg.ones(3, dtype=mg.float64)
        except ValueError:
            pass
        raw[...] = 1
    finally:
        gc.enable()


def test_contexts_may_be_entered_again():
    off = mg.no_grad()
    x = leaf(1.0, 2.0)
    with off, off:
        assert not (x * x).requires_grad
    with off:
        assert not (x * x).requires_grad
    assert (x * x).requires_grad
    for watcher in (mg.Tape(), mg.detect_anomaly()):
        before = np.geterr()
        with watcher, pytest.raises(RuntimeError, match="watching already"):
            watcher.__enter__()
        assert np.geterr() == before
    with pytest.raises(TypeError, match="generator"):
        @mg.no_grad()
        def produce():
            yield 1


def test_checkpoint_in_threads_replays_its_own_random_bits():
    """Keys that other threads draw meanwhile are neither replayed nor lost: y = dropout(x) x has gradient 2 y / x."""
    wrong = []

    def work():
        for _ in range(40):
            x = mg.ones(64, requires_grad=True)
            y = mg.checkpoint(lambda a: F.dropout(a, 0.5) * a, x)
            y.sum().backward()
            wrong.append(abs(x.grad.numpy() - 2 * y.numpy()).max())

    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(old)
    assert len(wrong) == 160 and max(wrong) == 0


def test_a_checkpointed_function_that_draws_more_the_second_time_is_refused():
    draws = iter([0, 1])
    x = leaf(1.0, 2.0)
    y = mg.checkpoint(lambda a: F.dropout(a, 0.5) if next(draws) else a * 1, x)
    with pytest.raises(RuntimeError, match=r"\[checkpoint\] the function drew more"):
        y.sum().backward()


def test_the_same_x_twice_gives_two_gradients():
    x = leaf(1.0, 2.0)
    a, b = mg.gradients((x * x).sum(), [x, x])
    assert a.tolist() == b.tolist() == [2, 4] and not np.shares_memory(a.data, b.data)


@pytest.mark.parametrize("make", [lambda x: x * 1j, lambda x: x.astype(np.complex64), lambda x: x.astype(object),
                                  lambda x: x * np.array([1j, 2]), lambda x: x.copy_(None),
                                  lambda x: mg.jvp(F.exp, x, x), lambda x: mg.grad(lambda a: a.sum(), (0, 0))(x)])
def test_what_is_no_number_or_no_argument_is_refused(make):
    with pytest.raises((TypeError, ValueError), match=r"^\["):
        make(leaf(1.0, 2.0))
