"""check_grads and localize: sound derivatives pass, planted errors are named, and nothing is changed by the asking."""

import fakecupy
import numpy as np
import pytest
from conftest import kernels
from test_ops import arguments, differentiable, is_float, rows

import minigrad as mg
import minigrad.functional as F
from minigrad import nn, optim
from minigrad.study import GradientError, check_grads, localize
from minigrad.tape import Part

# ----------------------------------------------------------------------------------------------- check_grads


def test_sound_functions_pass_at_every_order_and_mode():
    """Several arguments and outputs, one that is not used, one that is no float, arrays and numbers as inputs."""
    x, w = mg.randn(3, 4), mg.randn(4, 2)
    assert check_grads(lambda x, w: F.tanh(x @ w), [x, w], order=3)
    assert check_grads(lambda x, w: (F.softmax(x), (w * w).sum()), [x, w])
    assert check_grads(lambda x, unused: x**3, (x, w))
    assert check_grads(lambda x, ids: F.embedding(ids, x), [x, np.array([0, 2, 2])])
    assert check_grads(lambda x: x * x, x) and check_grads(lambda x: F.exp(x), 0.3)
    assert check_grads(lambda x: x, x.numpy())           # the input itself
    for mode in ("vjp", "jvp"):
        assert check_grads(lambda x: F.layer_norm(x * x), x, modes=(mode,))


def test_a_module_can_be_checked():
    model = nn.MLP(4, 6)
    assert check_grads(lambda x, w: model(x) @ w, [mg.randn(2, 4), mg.randn(4, 3)])


@pytest.mark.parametrize("x", [[1e-7, 3.0], [1e4, 2e4]], ids=["tiny", "large"])
def test_steps_fit_the_size_of_each_element(x):
    """A step of 6e-6 would leave the logarithm's domain at 1e-7, and 6e-6 times 1e4 would jump through the sine."""
    assert check_grads(lambda x: F.log(x) + F.sin(x), np.array(x))


def test_a_large_constant_does_not_drown_the_difference():
    """1e6 + x: the outputs round at 1e-10, which a step of 6e-6 turns into 2e-5; a longer one with Richardson helps."""
    assert check_grads(lambda x: F.sin(x) + 1e6, np.array([0.3, 1.2]))


def test_a_kink_close_by_is_no_error_and_one_hit_is_named():
    assert check_grads(F.relu, np.array([1e-9, -1e-9, 2.0]))
    with pytest.raises(GradientError, match="left and right derivatives differ"):
        check_grads(F.relu, np.zeros(3))
    with pytest.raises(GradientError, match="left and right derivatives differ"):
        check_grads(lambda x: x.max(), np.ones(2))       # order 2: the first derivative jumps at a tie, evenly about it

    def blind(x):
        with mg.no_grad():
            return x * 2.0

    with pytest.raises(GradientError, match="analytic 0, numeric") as error:
        check_grads(blind, mg.randn(3))
    assert "left and right" not in str(error.value)      # a line has no kink, whatever the analytic derivative is


def test_what_is_not_finite_is_not_called_wrong():
    """A mask's infinities are constants; NaN and infinite values have no derivative; sqrt at 0 has no difference. A
    square of 1e200 among the inputs overflows in no place of the checker's own (warnings are errors)."""
    x = mg.randn(3, 2, dtype=np.float64)
    seen = np.array([[True, False], [True, True], [False, True]])
    for modes in (("vjp", "jvp"), ("vjp",), ("jvp",)):
        assert check_grads(lambda x: mg.where(seen, x * x, -np.inf), x, modes=modes)
    for f, at in ((F.exp, np.array([np.nan, 1.0])), (F.log, np.array([-1.0])), (lambda x: x * np.inf, np.ones(2))):
        with pytest.raises(ValueError, match="not finite at these inputs"), np.errstate(all="ignore"):
            check_grads(f, at)
    with pytest.raises(GradientError, match="no difference is finite"):
        check_grads(F.sqrt, np.zeros(2))
    assert check_grads(lambda x: x * 2.0, np.array([1e200, 0.0]))


def plant(monkeypatch, name, rule):
    """Another backward rule for the one argument of `name`."""
    monkeypatch.setattr(mg.primitives[name].plain.rules[0], "run", rule)


def test_a_wrong_rule_is_an_error_that_says_what_and_how_much(monkeypatch):
    """Twice the derivative: relative error 1/2. Argument 1 of two, named as in f."""
    plant(monkeypatch, "sin", lambda ct, x: 2.0 * ct * F.cos(x))
    with pytest.raises(GradientError) as caught:
        check_grads(lambda a, angle: a * F.sin(angle), [np.ones(3), np.ones(3)])
    message = str(caught.value)
    for part in ("order 1", "vjp", "argument 1 (angle)", "analytic", "numeric", "relative error 0.5"):
        assert part in message
    assert isinstance(caught.value, AssertionError) and "\n" not in message
    with pytest.raises(GradientError, match="order 1, jvp"):
        check_grads(F.sin, np.ones(3), modes=("jvp",))


def test_a_wrong_rule_is_seen_at_small_inputs(monkeypatch):
    """The directions are as small as the inputs: 2 % of a derivative of 1 along 1e-6 is 2e-8, below a whole atol."""
    plant(monkeypatch, "sin", lambda ct, x: 1.02 * ct * F.cos(x))
    with pytest.raises(GradientError, match="relative error 0.02"):
        check_grads(F.sin, np.array([1e-6, -3e-6]))


def test_a_rule_wrong_at_second_order_only(monkeypatch):
    """Its values are right, its history is cut: x counts as a constant."""
    plant(monkeypatch, "square", lambda ct, x: 2.0 * ct * (x.detach() if isinstance(x, mg.Tensor) else x))
    assert check_grads(F.square, np.ones(3), order=1)
    with pytest.raises(GradientError, match="order 2"):
        check_grads(F.square, np.ones(3))


def test_forward_mode_is_checked_for_itself_and_against_reverse_mode(monkeypatch):
    """A factor of 1 + 1e-7 on the tangent is far within what differences can see, and yet the modes must agree."""
    def wrong(factor):
        return lambda f, xs, ts: (None, mg.jvp(f, xs, ts)[1] * factor)

    monkeypatch.setattr("minigrad.study.check.jvp", wrong(-1.0))
    with pytest.raises(GradientError, match="order 1, jvp"):
        check_grads(F.sin, np.ones(3))
    monkeypatch.setattr("minigrad.study.check.jvp", wrong(1.0 + 1e-7))
    with pytest.raises(GradientError, match="disagree"):
        check_grads(F.sin, np.ones(3))


def test_nothing_is_touched():
    x = mg.randn(3, requires_grad=True)
    (x * 2.0).sum().backward()
    before, grad, stream = x.numpy(), x.grad.numpy(), mg.get_rng_state()

    def f(x, c):
        mg.manual_seed(5)                                # so that its dropout is one function
        c[0] += 1.0                                      # of its own copy
        return F.dropout(x, 0.5) * x

    constant = np.zeros(2, int)
    assert check_grads(f, [x, constant])
    assert (x.numpy() == before).all() and (x.grad.numpy() == grad).all() and not constant.any()
    assert mg.get_rng_state() == stream and x.dtype == mg.float32
    localize(f, [x, constant.copy()])
    assert (x.grad.numpy() == grad).all() and mg.get_rng_state() == stream


def test_what_cannot_be_checked_is_said():
    x = mg.randn(3)
    with pytest.raises(GradientError, match="not deterministic"):
        check_grads(lambda x: F.dropout(x, 0.5), x)
    assert mg.get_rng_state() == (0, 2)                  # randn's two draws alone
    with pytest.raises(TypeError, match="int64 has no derivative"):
        check_grads(lambda x: (x, F.argmax(x)), x)
    with pytest.raises(TypeError, match="float32 of float64"):
        check_grads(lambda x: x.astype(mg.float32), x)
    with pytest.raises(TypeError, match="returns a Tensor"):
        check_grads(lambda x: x.numpy(), x)
    with pytest.raises(ValueError, match="must be of floats"):
        check_grads(lambda x: x, np.arange(3))
    with pytest.raises(ValueError, match="modes"):
        check_grads(lambda x: x, x, modes=("forward",))
    with pytest.raises(ValueError, match="order"):
        check_grads(lambda x: x, x, order=0)
    for bounds in ({"eps": 0.0}, {"rtol": -1.0}, {"atol": np.nan}):
        with pytest.raises(ValueError, match="eps is above 0"):
            check_grads(lambda x: x, x, **bounds)
    with pytest.raises(TypeError, match="got an empty one"):
        check_grads(lambda x: (), x)


# -------------------------------------------------------------------------------------------------- localize

DIFFERENTIABLE = [name for name in mg.primitives if any(differentiable(name, i) for i in rows(name))]


def called(name, i):
    """The op on sample i, its float arrays as leaves that are arguments of the function."""
    args, params = arguments(name, i)
    places = [k for k, a in enumerate(args) if is_float(a)]

    def f(*leaves):
        given = list(args)
        for k, leaf in zip(places, leaves):
            given[k] = leaf
        return mg.primitives[name](*given, **params)
    return f, [args[k] for k in places]


def within_200(f):
    """f amid a chain of 200 cheap nodes."""
    def run(*args):
        y = f(*args).sum()
        for _ in range(100):
            y = y * 0.9 + 0.1
        return y
    return run


def wrong(rule, at, factor):
    """The rule with its result, or of a joint rule the `at`-th, multiplied."""
    def times(c):
        return Part(c.ct * factor, c.key) if isinstance(c, Part) else c * factor

    def run(*given):
        cts = rule(*given)
        if at is None or not isinstance(cts, (tuple, list)):
            return times(cts)
        return tuple(times(c) if i == at and c is not None else c for i, c in enumerate(cts))
    return run


def plants(name):
    """(sample, argument's place, name) of each rule that has something to get wrong: the first sample where the
    cotangent is not zero."""
    op, seen = mg.primitives[name], set()
    for i in rows(name):
        if differentiable(name, i):
            f, given = called(name, i)
            args, _ = arguments(name, i)
            with kernels():
                xs = [mg.tensor(a, requires_grad=True) for a in given]
                y = f(*xs)
                cts = mg.gradients(y, xs, np.random.default_rng(1).standard_normal(y.shape))
            for k, ct in zip([k for k, a in enumerate(args) if is_float(a)], cts):
                if k not in seen and np.abs(ct.numpy()).max(initial=0.0) > 1e-3:
                    seen.add(k)
                    yield i, k, op.named(args)[k]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_planted_wrong_rule_is_named(name, monkeypatch):
    """Each rule of each op in turn: its sign flipped amid 200 nodes, and off by a tenth alone."""
    op = mg.primitives[name]
    body = op.kernels.get("numpy") or op.plain
    found = list(plants(name))
    assert found or name == "sign", "a differentiable op has a rule to get wrong"
    for i, k, argument in found:
        rule, at = (body.joint, k) if body.joint else (body.rules[min(k, len(body.rules) - 1)], None)
        for factor, around in ((-1.0, within_200), (1.1, lambda f: f)):
            f, given = called(name, i)
            with monkeypatch.context() as patch, kernels():
                patch.setattr(rule, "run", wrong(rule.run, at, factor))
                result = localize(around(f), given)
            assert {(w.op, w.argument) for w in result.wrong} == {(name, argument)}, str(result)
            assert not result and "wrong rule" in str(result) and "test_check.py" in result.wrong[0].line
            w = result.wrong[0]
            assert abs(w.analytic - factor * w.numeric) < 1e-2 * abs(w.numeric)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_sound_rules_are_not_accused(name):
    """Every sample, as kernel and as composition."""
    for i in rows(name):
        if differentiable(name, i):
            f, given = called(name, i)
            for way in (kernels(), mg.composed()):
                with way:
                    result = localize(f, given)
                assert result and result.nodes and not result.skipped, str(result)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "relu"])
@pytest.mark.parametrize("composed", [False, True])
def test_a_sound_model_is_not_accused(kind, composed):
    """A Transformer with dropout, masks, views and shared weights, in float32. With relu half of the activations stand
    exactly on dropout's zero, and the next relu on a kink: a point beside decides."""
    sizes = dict(vocab_size=7, context=5, d_model=8, n_layers=2, n_heads=2, dropout=0.2)
    c = (nn.TransformerConfig.llama(**sizes, n_kv_heads=1, window=3) if kind == "llama" else
         nn.TransformerConfig(**sizes, mlp="relu" if kind == "relu" else "gelu"))
    model, ids = nn.Transformer(c), np.random.default_rng(0).integers(0, 7, (2, 6))

    def loss():
        y = model(ids[:, :-1])
        return F.cross_entropy(F.relu(F.relu(y)) + F.maximum(y, y), ids[:, 1:])

    with mg.tape._set(composed=composed):
        result = localize(loss)
    assert result and result.nodes > 50 and not result.skipped, str(result)
    assert str(result) == f"{result.nodes} nodes checked, no wrong rule"


def test_values_at_the_edge_of_a_domain_accuse_nobody():
    """log near 1e-12 and sqrt at 0, saturated sigmoids, sums that cancel; many elements of very different sizes."""
    def f(x):
        y = F.log(F.softmax(x * 30.0) + 1e-12).sum() + F.sqrt(F.relu(x)).sum() + F.sigmoid(x * 40.0).sum()
        return y + F.exp(x * 20.0).sum() + F.logsumexp(x * 100.0, axis=-1).sum() + F.layer_norm(x * 1e-4 + 10.0).sum()

    for seed in range(3):
        result = localize(f, np.random.default_rng(seed).standard_normal((20, 30)).astype(np.float32), seed=seed)
        assert result and not result.skipped, str(result)


@pytest.mark.parametrize("f", [lambda x: F.log(x * 0.0), lambda x: F.exp(x * 1e4), lambda x: F.exp(x * np.nan)],
                         ids=["log of 0", "overflow", "NaN"])
def test_what_is_not_finite_is_passed_over(f):
    """There the cotangent 0 that keeps infinities out of the sum meets an infinite derivative: NaN, and no rule's."""
    with np.errstate(all="ignore"):
        found = localize(f, np.array([1.0, 2.0]))
    assert found and "not finite" in str(found) or not found.skipped and found.nodes == 2


def test_one_wrong_element_among_many_is_found(monkeypatch):
    """One of 20,000 is doubled: the tolerance does not grow with the sum that the others make."""
    def one_wrong(ct, x):
        c = ct * np.cos(x)
        c[7] *= 2.0
        return c
    plant(monkeypatch, "sin", one_wrong)
    assert [w.op for w in localize(F.sin, np.full(20000, 0.5)).wrong] == ["sin"]
    with pytest.raises(GradientError):
        check_grads(F.sin, np.full(20000, 0.5), order=1, modes=("vjp",))


def test_line_and_module_of_the_wrong_node(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.MLP(3, 5, activation="relu"))
    plant(monkeypatch, "relu", lambda ct, y: ct)         # as if nothing were cut off
    result = localize(lambda x: model(x), mg.randn(4, 3))
    assert [(w.op, w.argument, w.module) for w in result.wrong] == [("relu", "x", "1")]
    assert "[relu] the rule of x is wrong" in str(result) and str(result).endswith(" in 1")


def test_a_rule_that_raises_or_has_the_wrong_shape_is_named(monkeypatch):
    plant(monkeypatch, "sin", lambda ct, x: ct.sum())
    result = localize(F.sin, np.ones(3))
    assert "[sin] the rule of x is wrong: RuntimeError: [sin] a rule returned a cotangent of shape ()" in str(result)


def test_checkpoints_are_passed_over_and_their_inside_is_checked(monkeypatch):
    def f(x):
        return mg.checkpoint(lambda x: F.sin(x) * x, x).sum()
    result = localize(f, mg.randn(3))
    assert result and result.nodes == 3 and len(result.skipped) == 1 and "not checked: [checkpoint]" in str(result)
    plant(monkeypatch, "sin", lambda ct, x: -ct)
    assert [w.op for w in localize(f, mg.randn(3)).wrong] == ["sin"]


def test_localize_leaves_a_training_step_as_it_was():
    """Nodes, gradients and parameters: the step after it is, bit for bit, the step without it."""
    ends = []
    for look in (False, True):
        mg.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer, x = optim.AdamW(model.parameters(), lr=0.1), mg.randn(5, 3)
        for _ in range(2):
            if look:
                localize(model, x)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        ends.append([p.numpy() for p in model.parameters()])
    assert all((a == b).all() for a, b in zip(*ends))


def test_on_the_stand_in(monkeypatch):
    """Both work on the second device: directions and cotangents go where the arrays are."""
    fakecupy.install(monkeypatch)
    x, w = mg.randn(2, 3, device="cuda"), mg.randn(3, 2, device="cuda")
    assert check_grads(lambda x, w: F.softmax(x @ w), [x, w])
    model = nn.Transformer(vocab_size=7, context=5, d_model=8, n_layers=1, n_heads=2, dropout=0.2).to("cuda")
    ids = np.random.default_rng(0).integers(0, 7, (2, 6))
    result = localize(lambda: model.loss(ids[:, :-1], ids[:, 1:]))
    assert result and result.nodes > 20 and not result.skipped, str(result)
    fakecupy.syncs.clear()
