"""Every registered op, by one table: each sample row of each primitive goes through every check; there is no list of
exceptions. A new op needs its rows (`samples=`) and one line in an oracle below."""

import functools
import inspect
import itertools
import math
import warnings

import numpy as np
import pytest
from conftest import kernels

import minigrad as mg
import minigrad.functional as F

NAMES = list(mg.primitives)
PATHS = [(name, way) for name, op in mg.primitives.items() for way in ("op", "composed") if way == "op" or op.reference]


def rows(name, errors=False):
    return [i for i, s in enumerate(mg.primitives[name].samples) if (s.error is not None) is errors]


def each_row(test):
    """Run the test for every sample row of its op; a failure names the row."""
    @functools.wraps(test)
    def run(name, **given):
        for i in rows(name):
            try:
                test(name=name, i=i, **given)
            except BaseException as error:
                error.add_note(f"[{name}] sample {i}: {mg.primitives[name].samples[i]}")
                raise

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "i"])
    return run


def over(values, names="name"):
    """Every row of these ops (and paths), one test an op."""
    return lambda test: pytest.mark.parametrize(names, values)(each_row(test))


every_op, every_row, every_path = pytest.mark.parametrize("name", NAMES), over(NAMES), over(PATHS, "name, way")
every_fused = over([name for name in NAMES if mg.primitives[name].reference])


# ------------------------------------------------------------------------------- from a sample row to arguments


def is_shape(x):
    return type(x) is tuple and all(isinstance(n, int) for n in x)


def is_float(x):
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def values(shapes, low, high, seed=0):
    """Arrays whose values are distinct in (low, high), also between arrays: no ties. A grid, shuffled; its offset of
    0.37 steps keeps it off the kinks at 0 and 1 (a kink would have to be at a step's 0, 0.25, 0.5 or 0.75)."""
    sizes = [math.prod(s) for s in shapes]
    n = sum(sizes)
    grid = low + (high - low) * (np.random.default_rng(seed).permutation(n) + 0.37) / max(1, n)
    return [part.reshape(shape) for part, shape in zip(np.split(grid, np.cumsum(sizes)[:-1]), shapes)] if shapes else []


def arguments(name, i, dtype=np.float64, resize=None):
    """(args, params) of sample i, with float arrays for its shapes. resize=(n, m): lengths n become m everywhere."""
    sample = mg.primitives[name].samples[i]
    swap = (lambda n: resize[1] if n == resize[0] else n) if resize else (lambda n: n)

    def constant(x):
        if resize and is_shape(x) and len(x) == resize[0]:
            return x[:resize[1]]                         # a tuple along that axis
        if isinstance(x, np.ndarray):
            for axis, n in enumerate(x.shape):
                x = np.take(x, np.arange(swap(n)) % max(1, n), axis=axis)
            return x.astype(dtype) if is_float(x) else x
        return x

    shapes = [tuple(map(swap, a)) for a in sample.args if is_shape(a)]
    arrays = iter(values(shapes, sample.low, sample.high))
    args = [next(arrays).astype(dtype) if is_shape(a) else constant(a) for a in sample.args]
    return args, {k: tuple(map(swap, v)) if k == "shape" else constant(v) for k, v in sample.params.items()}


def leaves(args):
    """The float arrays as leaves that require a gradient, the other arguments as they are."""
    made = [mg.tensor(a, requires_grad=True) if is_float(a) else a for a in args]
    return made, [t for t in made if isinstance(t, mg.Tensor)]


def within(way):
    return mg.composed() if way == "composed" else kernels()


def like(x, seed=1):
    return np.random.default_rng(seed).standard_normal(x.shape).astype(x.dtype)


def projected(y, seed=1):
    """A scalar from any output: its product with fixed random numbers (for NumPy arrays and Tensors)."""
    return (y * like(y, seed)).sum()


def first(name, args, params, way="op", create_graph=False):
    """(leaves, gradients of the projected output) on one path. The projection is the cotangent itself, and no op: a
    sign wrong in `sum` must not cancel."""
    made, xs = leaves(args)
    with within(way):
        y = mg.primitives[name](*made, **params)
        return xs, mg.gradients(y, xs, like(y), create_graph=create_graph)


def close(got, want, rtol=1e-9, atol=1e-10):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=rtol, atol=atol)


def differentiable(name, i):
    """Whether the op's output is a float: indices and truth values have no derivative."""
    args, params = arguments(name, i)
    return any(is_float(a) for a in args) and np.asarray(mg.primitives[name](*args, **params)).dtype.kind == "f"


# --------------------------------------------------------------------------------------------------- the oracles


def _flat(axis, x, torch):
    """x with the reduced axes flattened into a last one, and the shape with them kept as 1."""
    axes = [a % x.ndim for a in (range(x.ndim) if axis is None else axis if isinstance(axis, tuple) else [axis])]
    kept = [a for a in range(x.ndim) if a not in axes]
    flat = x.permute([*kept, *axes]).reshape([x.shape[a] for a in kept] + [math.prod(x.shape[a] for a in axes)])
    return flat, [1 if a in axes else n for a, n in enumerate(x.shape)]


def reducing(f):
    def run(torch, x, axis=None, keepdims=False, **params):
        flat, kept = _flat(axis, x, torch)
        y = f(torch, flat, **params)
        return y.reshape(kept) if keepdims else y
    return run


def _index(torch, key):
    if isinstance(key, tuple):
        return tuple(_index(torch, k) for k in key)
    return torch.from_numpy(key) if isinstance(key, np.ndarray) else key


def _place(torch, x, shape, key):
    index = torch.arange(math.prod(shape)).reshape(shape)[_index(torch, key)]
    return torch.zeros(math.prod(shape), dtype=x.dtype).index_add(0, index.reshape(-1), x.reshape(-1)).reshape(shape)


def _masked_softmax(torch, x, visible=None, axis=-1):
    visible = torch.ones_like(x, dtype=bool) if visible is None else visible
    e = torch.exp(x) * visible
    total = e.sum(axis, keepdim=True)
    return e / (total + (total == 0))


def _attention(torch, q, k, v, mask=None, bias=None, sinks=None, scale=1.0, causal=False, query_offset=0, window=None,
               softcap=None, kv_head=None, dropout=None, empty_rows="zeros"):
    """Appendix A.10 by hand: one row of one head at a time, over the keys it sees only."""
    flat = q.ndim == 2
    q, k, v = (x[None] if flat else x for x in (q, k, v))
    lead, (heads, rows), keys = q.shape[:-3], q.shape[-3:-1], k.shape[-2]
    full = (*lead, heads, rows, keys)
    mask = None if mask is None else torch.broadcast_to(mask, full)
    bias = None if bias is None else torch.broadcast_to(bias, full)
    out = torch.zeros((*lead, heads, rows, v.shape[-1]), dtype=q.dtype)
    for number, at in enumerate(itertools.product(*map(range, (*lead, heads, rows)))):
        *n, r, i = at
        g, p = (r if kv_head is None else kv_head[r]), i + query_offset
        seen = [j for j in range(keys)
                if (not causal or j <= p) and (window is None or (p - j < window and (causal or j - p < window)))
                and (mask is None or mask[(*at, j)])]
        if not seen:
            continue
        s = torch.stack([q[at] @ k[(*n, g, j)] * scale for j in seen])
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = s if bias is None else s + torch.stack([bias[(*at, j)] for j in seen])
        s = s if sinks is None else torch.cat([s, sinks[r:r + 1]])
        a = torch.softmax(s, 0)[:len(seen)]
        if dropout is not None:
            word = dropout[1].bits(np.array([number]), np.array(seen))
            a = a * torch.from_numpy((word / 2.0**32 >= dropout[0]) / (1 - dropout[0]))
        out[at] = a @ torch.stack([v[(*n, g, j)] for j in seen])
    return out[0] if flat else out


def _rotary(torch, x, cos, sin, interleaved=False):
    """As multiplication by e^(i angle) of complex numbers."""
    r = cos.shape[-1]
    re, im = (x[..., 0:2 * r:2], x[..., 1:2 * r:2]) if interleaved else (x[..., :r], x[..., r:2 * r])
    turned = torch.complex(re, im) * torch.complex(cos, sin)
    if interleaved:
        first = torch.view_as_real(turned).flatten(-2)
    else:
        first = torch.cat([turned.real, turned.imag], -1)
    return torch.cat([first, x[..., 2 * r:]], -1)


def _same(f):
    return lambda torch, *xs, **params: getattr(torch, f)(*xs, **params)


def _second_as_tensor(f):
    return lambda torch, a, b: getattr(torch, f)(a, torch.as_tensor(b, dtype=a.dtype))


def _nn(f):
    return lambda torch, *xs, **params: getattr(torch.nn.functional, f)(*xs, **params)


TORCH = {
    **{name: _same(name) for name in "add subtract multiply divide negative exp log log1p expm1 sqrt square sin cos "
       "tanh sigmoid relu erf sign abs greater greater_equal less less_equal not_equal logical_not "
       "isfinite where matmul".split()},
    **{name: _second_as_tensor(name) for name in "maximum minimum logical_and logical_or".split()},
    "equal": lambda torch, a, b: torch.eq(a, b),
    "power": lambda torch, a, b: torch.pow(a, b),
    "softplus": _nn("softplus"), "gelu": _nn("gelu"), "silu": _nn("silu"),
    "clip": lambda torch, x, low=None, high=None: torch.clamp(
        x, *(None if b is None else torch.as_tensor(b, dtype=x.dtype) for b in (low, high)))
        if (low, high) != (None, None) else x,
    "reshape": lambda torch, x, shape: x.reshape(shape),
    "transpose": lambda torch, x, axes=None: x.permute(list(range(x.ndim)[::-1] if axes is None else axes)),
    "broadcast_to": lambda torch, x, shape: torch.broadcast_to(x, shape),
    "concatenate": lambda torch, *xs, axis: torch.cat(xs, axis),
    "pad": lambda torch, x, width, constant_values=0.0: torch.nn.functional.pad(
        x, [n for pair in width[::-1] for n in pair], value=constant_values),
    "flip": lambda torch, x, axis=None: torch.flip(
        x, tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)),
    "getitem": lambda torch, x, key: x[_index(torch, key)],
    "place": _place,
    "linear": lambda torch, x, w, b=None: torch.nn.functional.linear(x, w.T, b),
    "einsum": lambda torch, *xs, terms, out: torch.einsum(",".join(terms) + "->" + out, *xs),
    "sum": reducing(lambda torch, x: x.sum(-1)), "mean": reducing(lambda torch, x: x.mean(-1)),
    "var": reducing(lambda torch, x, ddof=0: x.var(-1, correction=ddof)),
    "max": reducing(lambda torch, x: x.amax(-1)), "min": reducing(lambda torch, x: x.amin(-1)),
    "logsumexp": reducing(lambda torch, x: x.logsumexp(-1)),
    "argmax": reducing(lambda torch, x: x.argmax(-1)), "argmin": reducing(lambda torch, x: x.argmin(-1)),
    "any": reducing(lambda torch, x: x.any(-1)), "all": reducing(lambda torch, x: x.all(-1)),
    "cumsum": lambda torch, x, axis=None: x.reshape(-1).cumsum(0) if axis is None else x.cumsum(axis),
    "embedding": lambda torch, table, ids: torch.nn.functional.embedding(ids, table),
    "softmax": lambda torch, x, axis=-1: x.softmax(axis),
    "log_softmax": lambda torch, x, axis=-1: x.log_softmax(axis),
    "masked_softmax": _masked_softmax,
    "attention_fused": _attention, "attention_tiled": _attention,
    "cross_entropy": lambda torch, x, targets, **params: torch.nn.functional.cross_entropy(
        x, targets, reduction="none", **params),
    "layer_norm": lambda torch, x, weight=None, bias=None, eps=1e-5: torch.nn.functional.layer_norm(
        x, x.shape[-1:], weight, bias, eps),
    "rms_norm": lambda torch, x, weight=None, eps=1e-6: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps),
    "rotary": _rotary,
}
NUMPY = {                                                # what torch has no counterpart of, as a formula
    "alias": lambda x: x,
    "cast": lambda x, dtype: np.array(x.tolist(), dtype),
    "move": lambda x, device, source: x,
    "dropout": lambda x, p, key:
        x / (1 - p) * (key.bits(np.array([0]), np.arange(x.size)) / 2**32 >= p).reshape(x.shape),
}


def test_every_op_has_one_oracle():
    """Also the other way: an oracle of no op is a typing mistake."""
    assert sorted([*TORCH, *NUMPY]) == sorted(mg.primitives)


@every_op
def test_every_op_has_samples(name):
    assert any(s.error is None for s in mg.primitives[name].samples), f"[{name}] has no sample rows: it is not tested"


@every_op
def test_every_op_says_what_it_is(name):
    """A docstring, of the primitive or of the function that stands for it in F."""
    public = [getattr(mg.functional, called, None) for called in (name, name + "_embedding")]
    assert mg.primitives[name].__doc__ or any(f is not None and f.__doc__ for f in public)


def oracle(torch, name, args, params):
    """(value, gradients of the projected value or None) by PyTorch in float64."""
    raw = [torch.from_numpy(np.array(a)) if isinstance(a, np.ndarray) else a for a in args]
    xs = [t.requires_grad_() for t in raw if torch.is_tensor(t) and t.is_floating_point()]
    given = {k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v for k, v in params.items()}
    if name in ("getitem", "place"):
        given = params
    y = TORCH[name](torch, *raw, **given)
    if not y.requires_grad:
        return y.numpy(), None
    cts = torch.autograd.grad((y * torch.from_numpy(like(y.detach().numpy()))).sum(), xs, allow_unused=True)
    return y.detach().numpy(), [torch.zeros_like(x) if ct is None else ct for x, ct in zip(xs, cts)]


def check_oracle(torch, name, args, params):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        warnings.filterwarnings("ignore", message="var|std")
        want, cts = oracle(torch, name, args, params)
    with kernels():
        y = mg.primitives[name](*leaves(args)[0], **params)
    close(y, want)
    assert y.shape == want.shape
    for got, ct in zip(first(name, args, params)[1] if cts else (), cts or ()):
        close(got, ct)


# ---------------------------------------------------------------------------------------------- errors and values


@pytest.mark.parametrize("name, i", [(name, i) for name in NAMES for i in rows(name, errors=True)])
def test_error_rows(name, i):
    """The message promised by the row; it starts with an op in brackets. On both paths."""
    args, params = arguments(name, i)
    op, promised = mg.primitives[name], mg.primitives[name].samples[i].error
    for way in ("op", "composed"):
        with within(way), pytest.raises((ValueError, TypeError, IndexError)) as caught:
            op(*leaves(args)[0], **params)
        assert str(caught.value).startswith("[") and promised in str(caught.value)


@over(list(TORCH))
def test_against_torch(name, i, torch):
    check_oracle(torch, name, *arguments(name, i))


@over(list(NUMPY))
def test_against_a_formula(name, i):
    args, params = arguments(name, i)
    close(mg.primitives[name](*leaves(args)[0], **params), NUMPY[name](*args, **params))


@every_fused
def test_fused_equals_its_reference(name, i):
    """Kernel and composition are one function: values, and first gradients to 1e-10, in float64. The reference is run
    by hand and through mg.composed()."""
    args, params = arguments(name, i)
    op = mg.primitives[name]
    made, _ = leaves(args)
    with kernels():
        y = op(*made, **params)
    close(op.reference(*made, **{**op.defaults, **params}), y, 1e-12, 1e-12)
    with mg.composed():
        close(op(*made, **params), y, 1e-12, 1e-12)
    for fused, plain in zip(first(name, args, params)[1], first(name, args, params, "composed")[1]):
        close(fused, plain, 1e-10, 1e-10)


@every_row
def test_raw_arrays_pass_straight_through(name, i):
    """Raw arrays in, the same numbers as a raw array out, on both paths; nothing is recorded."""
    args, params = arguments(name, i)
    op = mg.primitives[name]
    want = op(*leaves(args)[0], **params).numpy()
    for way in ("op", "composed"):
        with mg.Tape() as tape, within(way):
            y = op(*args, **params)
        assert isinstance(y, (np.ndarray, np.generic)) and not tape.nodes
        assert y.shape == want.shape and y.dtype == want.dtype
        close(y, want)


# ------------------------------------------------------------------------------------------------------- gradients

STEP = 1e-5                                              # central differences in float64: errors near 1e-10 f'''


def check_directional(f, cts, args):
    """<cts, v> against (f(x + hv) - f(x - hv)) / 2h for a random direction v. f: arguments -> float."""
    v = [like(a, 2 + k) if is_float(a) else None for k, a in enumerate(args)]

    def at(h):
        return f([a if d is None else np.asarray(a + h * d) for a, d in zip(args, v)])

    terms = [np.asarray(ct) * d for ct, d in zip(cts, [d for d in v if d is not None])]
    want = (at(STEP) - at(-STEP)) / (2 * STEP)
    scale = 1.0 + sum(np.abs(t).sum() for t in terms)
    assert abs(sum(t.sum() for t in terms) - want) <= 1e-6 * scale, (terms, want)


def order_1(name, args, params, way):
    def f(args):
        with mg.no_grad(), within(way):
            return projected(mg.primitives[name](*leaves(args)[0], **params).numpy()).item()

    check_directional(f, first(name, args, params, way)[1], args)


def order_2(name, args, params, way):
    """The gradient of <gradient, fixed numbers>, recorded by create_graph, against differences of first gradients."""
    def total(cts):
        return sum(projected(ct, 10 + k) for k, ct in enumerate(cts))

    with within(way):
        xs, cts = first(name, args, params, way, create_graph=True)
        s = total(cts)
        second = mg.gradients(s, xs) if s.requires_grad else [mg.zeros_like(x) for x in xs]
    check_directional(lambda args: total(first(name, args, params, way)[1]).item(), second, args)


@every_path
def test_gradient_of_order_1(name, i, way):
    if differentiable(name, i):
        order_1(name, *arguments(name, i), way)


@every_path
def test_gradient_of_order_2(name, i, way):
    if differentiable(name, i):
        order_2(name, *arguments(name, i), way)


@every_path
def test_jvp(name, i, way):
    """The pushforward, elementwise, against differences of the output."""
    if not differentiable(name, i):
        return
    args, params = arguments(name, i)
    op, at = mg.primitives[name], [k for k, a in enumerate(args) if is_float(a)]

    def f(*xs):
        given = list(args)
        for k, x in zip(at, xs):
            given[k] = x
        return op(*given, **params)

    xs, v = [args[k] for k in at], [like(args[k], 2 + k) for k in at]
    with within(way):
        y, dy = mg.jvp(f, xs, v)
        high, low = (np.asarray(f(*[np.asarray(x + h * d) for x, d in zip(xs, v)])) for h in (STEP, -STEP))
    close(y, f(*xs), 1e-12, 1e-12)
    assert dy.shape == y.shape
    close(dy, (high - low) / (2 * STEP), 1e-6, 1e-6)


@every_row
def test_what_has_no_derivative_says_so(name, i):
    """Integer and bool outputs are not tracked; a float output of tracked arguments is."""
    args, params = arguments(name, i)
    made, xs = leaves(args)
    y = mg.primitives[name](*made, **params)
    assert y.requires_grad == (bool(xs) and y.dtype.kind == "f")
    assert y.is_leaf != y.requires_grad


@every_row
def test_one_tensor_as_two_arguments(name, i):
    """f(x, x): the gradient of x is the sum of what each place gets."""
    args, params = arguments(name, i)
    twins = [(a, b) for a, b in itertools.combinations(range(len(args)), 2)
             if is_float(args[a]) and is_float(args[b]) and args[a].shape == args[b].shape]
    if not twins or not differentiable(name, i):
        return
    a, b = twins[0]
    args[b] = args[a].copy()
    made, xs = leaves(args)
    op = mg.primitives[name]
    apart = mg.gradients(projected(op(*made, **params)), [made[a], made[b]])
    made[b] = made[a]
    projected(op(*made, **params)).backward()
    close(made[a].grad, apart[0].numpy() + apart[1].numpy())


# ------------------------------------------------------------- the functions of F that are made of several primitives

ANGLE = np.linspace(0.1, 2.0, 6).reshape(3, 2)
IDS, TARGETS = np.array([[2, 0], [1, 1]]), np.array([[2, 0], [-100, 1]])


# name -> rows of (shapes, ours of F's function and Tensors, PyTorch's of torch and tensors)
FUNCTIONS = {
    "concatenate": [([(2, 3), (1, 3)], lambda f, a, b: f([a, b]), lambda t, a, b: t.cat([a, b])),
                    ([(2, 3), (2, 1)], lambda f, a, b: f([a, b, a], axis=-1), lambda t, a, b: t.cat([a, b, a], -1))],
    "stack": [([(2, 3), (2, 3)], lambda f, a, b, k=k: f([a, b], axis=k), lambda t, a, b, k=k: t.stack([a, b], k))
              for k in (0, 1, -1)],
    "split": [([(6, 2)], lambda f, x: f(x, 3)[1], lambda t, x: t.split(x, 2)[1]),
              ([(2, 5)], lambda f, x: f(x, [1, 0, 4], axis=-1)[2], lambda t, x: t.split(x, [1, 0, 4], -1)[2])],
    "pad": [([(2, 3)], lambda f, x: f(x, ((1, 0), (0, 2)), constant_values=3.0),
             lambda t, x: t.nn.functional.pad(x, (0, 2, 1, 0), value=3.0)),
            ([(2, 3)], lambda f, x: f(x, 1), lambda t, x: t.nn.functional.pad(x, (1, 1, 1, 1))),
            ([(2, 3)], lambda f, x: f(x, (1, 2)), lambda t, x: t.nn.functional.pad(x, (1, 2, 1, 2)))],
    "squeeze": [([(1, 2, 1)], lambda f, x: f(x), lambda t, x: x.squeeze()),
                ([(1, 2, 1)], lambda f, x: f(x, axis=-1), lambda t, x: x.squeeze(-1)),
                ([(1, 2, 1)], lambda f, x: f(x, axis=(0, 2)), lambda t, x: x.squeeze((0, 2)))],
    "expand_dims": [([(2, 3)], lambda f, x: f(x, 1), lambda t, x: x[:, None]),
                    ([(2, 3)], lambda f, x: f(x, -1), lambda t, x: x[..., None]),
                    ([(2, 3)], lambda f, x: f(x, (0, -1)), lambda t, x: x[None, ..., None])],
    "swapaxes": [([(2, 3, 4)], lambda f, x: f(x, 0, -1), lambda t, x: x.swapaxes(0, -1))],
    "moveaxis": [([(2, 3, 4)], lambda f, x: f(x, 0, -1), lambda t, x: x.moveaxis(0, -1)),
                 ([(2, 3, 4)], lambda f, x: f(x, -1, 1), lambda t, x: x.moveaxis(-1, 1))],
    "getitem": [([(3, 4)], lambda f, x: f(x, (slice(None), [2, 0, 2])), lambda t, x: x[:, [2, 0, 2]])],
    "take": [([(3, 4)], lambda f, x: f(x, IDS), lambda t, x: t.take(x, t.from_numpy(IDS))),
             ([(3, 4)], lambda f, x: f(x, IDS, axis=0), lambda t, x: x[t.from_numpy(IDS)]),
             ([(3, 4)], lambda f, x: f(x, -1, axis=1), lambda t, x: x[:, -1]),
             ([(3, 4)], lambda f, x: f(x, [[-1, 0]], axis=-1), lambda t, x: x[:, [[-1, 0]]])],
    "take_along_axis": [([(2, 3)], lambda f, x: f(x, IDS, 1), lambda t, x: t.take_along_dim(x, t.from_numpy(IDS), 1)),
                        ([(3, 2)], lambda f, x: f(x, IDS[:1] - 3, 0), lambda t, x: x.gather(0, t.from_numpy(IDS[:1])))],
    "repeat": [([(2, 3)], lambda f, x: f(x, 2), lambda t, x: x.repeat_interleave(2)),
               ([(2, 3)], lambda f, x: f(x, [2, 0, 1], axis=1),
                lambda t, x: x.repeat_interleave(t.tensor([2, 0, 1]), 1))],
    "roll": [([(2, 3)], lambda f, x: f(x, 2), lambda t, x: x.roll(2)),
             ([(2, 3)], lambda f, x: f(x, -1, axis=-1), lambda t, x: x.roll(-1, -1))],
    "tril": [([(2, 3, 4)], lambda f, x: f(x), lambda t, x: x.tril()),
             ([(3, 4)], lambda f, x: f(x, -1), lambda t, x: x.tril(-1))],
    "triu": [([(2, 3, 4)], lambda f, x: f(x), lambda t, x: x.triu()),
             ([(3, 4)], lambda f, x: f(x, 1), lambda t, x: x.triu(1))],
    "where": [([(2, 3), (3,)], lambda f, a, b: f(np.eye(2, 3) > 0, a, b),
               lambda t, a, b: t.where(t.eye(2, 3) > 0, a, b)),
              ([(2, 3)], lambda f, a: f(a > 0, a, -1.0), lambda t, a: t.where(a > 0, a, -1.0))],
    "clip": [([(2, 3)], lambda f, x: f(x, min=-1.0, max=0.9), lambda t, x: x.clamp(-1.0, 0.9)),
             ([(2, 3), (3,), (2, 3)], lambda f, x, a, b: f(x, a, b), lambda t, x, a, b: t.clamp(x, a, b))],
    "std": [([(2, 3)], lambda f, x: f(x), lambda t, x: x.std(correction=0)),
            ([(2, 3)], lambda f, x: f(x, axis=1, ddof=1, keepdims=True),
             lambda t, x: x.std(1, correction=1, keepdim=True))],
    "einsum": [([(2, 3), (3, 4)], lambda f, a, b: f("ij,jk", a, b), lambda t, a, b: t.einsum("ij,jk", a, b)),
               ([(2, 3, 4), (2, 4, 5)], lambda f, a, b: f("...ij,...jk->...ik", a, b), lambda t, a, b: a @ b),
               ([(2, 3, 4), (4, 5)], lambda f, a, b: f("b...i, ik -> k...b", a, b),
                lambda t, a, b: t.einsum("b...i,ik->k...b", a, b)),
               ([(3, 3)], lambda f, a: f("ii", a), lambda t, a: t.einsum("ii", a)),
               ([(3, 3)], lambda f, a: f("ii->i", a), lambda t, a: t.einsum("ii->i", a)),
               ([(2, 3), (2, 3), (3,)], lambda f, a, b, c: f("ij,ij,j->i", a, b, c),
                lambda t, a, b, c: t.einsum("ij,ij,j->i", a, b, c)),
               ([(2, 3), (4,)], lambda f, a, b: f("ij,k->k", a, b), lambda t, a, b: t.einsum("ij,k->k", a, b)),
               ([(2, 3), (2, 3)], lambda f, a, b: f("...,...->...", a, b), lambda t, a, b: a * b)],
    "embedding": [([(3, 4)], lambda f, x: f(IDS, x), lambda t, x: x[t.from_numpy(IDS)]),
                  ([(3, 4)], lambda f, x: f([], x), lambda t, x: x[:0])],
    "dropout": [([(2, 3)], lambda f, x: f(x, 0.5, training=False), lambda t, x: x)],
    "masked_softmax": [([(2, 3)], lambda f, x: f(x, np.eye(2, 3) > 0, axis=-1),
                        lambda t, x: t.where(t.eye(2, 3) > 0, x, -t.inf).softmax(-1))],
    "cross_entropy": [([(2, 2, 3)], lambda f, x, r=r, e=e: f(x, TARGETS, reduction=r, label_smoothing=e),
                       lambda t, x, r=r, e=e: t.nn.functional.cross_entropy(
                           x.movedim(-1, 1), t.from_numpy(TARGETS), reduction=r, label_smoothing=e))
                      for r in ("mean", "sum", "none") for e in (0.0, 0.2)]
                     + [([(3,)], lambda f, x: f(x, 1), lambda t, x: t.nn.functional.cross_entropy(x, t.tensor(1)))],
    "mse_loss": [([(2, 3), (2, 3)], lambda f, a, b, r=r: f(a, b, reduction=r),
                  lambda t, a, b, r=r: t.nn.functional.mse_loss(a, b, reduction=r)) for r in ("mean", "sum", "none")],
    "rotary_embedding": [([(2, 3, 7)], lambda f, x, i=i: f(x, np.cos(ANGLE), np.sin(ANGLE), interleaved=i),
                          lambda t, x, i=i: _rotary(t, x, t.from_numpy(np.cos(ANGLE)), t.from_numpy(np.sin(ANGLE)), i))
                         for i in (False, True)]
                        + [([(2, 3, 5), (3, 2), (3, 2)], lambda f, x, a, b: f(x, a, b), _rotary)],
    "scaled_dot_product_attention": [([(2, 3, 4)] * 3, lambda f, q, k, v: f(q, k, v, is_causal=True),
                                      lambda t, q, k, v: t.nn.functional.scaled_dot_product_attention(
                                          q, k, v, is_causal=True))],
    "one_hot": [([], lambda f: f(IDS, 3), lambda t: t.nn.functional.one_hot(t.from_numpy(IDS), 3).float())],
    "visible_set": [([], lambda f: f(3, 5, causal=True, query_offset=1),
                     lambda t: t.ones(3, 5, dtype=bool).tril(1))],
    "document_mask": [([], lambda f: f(np.array([0, 0, 1, -1])), lambda t: t.tensor(
        [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=bool)[None])],
    "padding_mask": [([], lambda f: f([1, 3], 3), lambda t: t.tensor(
        [[1, 0, 0], [1, 1, 1]], dtype=bool)[:, None, None])],
    "rotary_tables": [([], lambda f: f(np.arange(4), 6, base=100.0)[1],
                       lambda t: t.sin(t.arange(4.0, dtype=t.float64)[:, None]
                                       * 100.0 ** (-t.arange(3.0, dtype=t.float64) / 3)))],
    "sinusoidal_positions": [([], lambda f: f(3, 2), lambda t: t.stack(
        [t.sin(t.arange(3.0).double()), t.cos(t.arange(3.0).double())], dim=1).float())],
    "alibi_slopes": [([], lambda f: f(8), lambda t: 0.5 ** t.arange(1.0, 9.0))],
    "alibi_bias": [([], lambda f: f(1, 2, 3), lambda t: t.tensor([[[0.0, 1.0, 2.0], [1.0, 0.0, 1.0]]]) / -256)],
    "relative_buckets": [([], lambda f: f(2, 3, 4, 3), lambda t: t.tensor([[0, 3, 3], [1, 0, 3]]))],
}


def test_every_function_is_tested():
    """A name of F is a primitive, which the table runs, or has rows above."""
    plain = {n for n in mg.functional.__all__ if not isinstance(getattr(mg.functional, n), mg.Primitive)}
    assert plain == set(FUNCTIONS)


@pytest.mark.parametrize("name, k", [(name, k) for name, rows in FUNCTIONS.items() for k in range(len(rows))])
def test_functions_against_torch(name, k, torch):
    """Values, and gradients of order 1; the dtype is kept in float32; raw arrays pass."""
    shapes, ours, theirs = FUNCTIONS[name][k]
    arrays, f = values(shapes, -2.0, 2.0), getattr(mg.functional, name)
    xs, ts = [mg.tensor(a, requires_grad=True) for a in arrays], [torch.from_numpy(a).requires_grad_() for a in arrays]
    y, want = ours(f, *xs), theirs(torch, *ts)
    close(y, want.detach())
    assert y.shape == want.shape
    if not xs:
        return
    ct = like(y)
    for got, expected in zip(mg.gradients(y, xs, ct), torch.autograd.grad(want, ts, torch.from_numpy(ct))):
        close(got, expected)
    narrow = ours(f, *(mg.tensor(a.astype(np.float32), requires_grad=True) for a in arrays))
    assert narrow.dtype == np.float32 and narrow.requires_grad
    raw = ours(f, *arrays)
    assert isinstance(raw, (np.ndarray, np.generic))
    close(raw, y)


# ---------------------------------------------------------------------------------------- shapes: generated by rule


def refused_by_name(name, args, params):
    """Whether the op refuses these arguments, on either path: it must do so with an error that starts with an op in
    brackets."""
    try:
        for way in ("op", "composed"):
            with within(way):
                mg.primitives[name](*leaves(args)[0], **params)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        assert str(error).startswith("["), f"[{name}] an unnamed error: {error!r}"
        return True
    return False


def sizes_of(name, i):
    return sorted({n for a in mg.primitives[name].samples[i].args if is_shape(a) for n in a} - {0, 1})


def check_small(name, args, params, torch=None):
    """All of the above for arguments with axes of length 0 or 1, on both paths. NumPy's warning is right only if the
    result is not a number (the mean of nothing)."""
    op = mg.primitives[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if refused_by_name(name, args, params):
            return False
        with kernels():
            y = op(*leaves(args)[0], **params)
    finite = bool(np.isfinite(y.numpy()).all())
    assert caught or not np.isnan(y.numpy()).any(), f"[{name}] made {y} silently"
    assert not (finite and caught), f"[{name}] warns of a finite result: {caught[0].message}"
    with warnings.catch_warnings():
        if not finite:
            warnings.simplefilter("ignore")
        for way in ("op", "composed"):
            with within(way):
                again = op(*leaves(args)[0], **params)
            assert again.shape == y.shape and again.dtype == y.dtype
            close(again, y)
            if y.dtype.kind == "f":
                xs, cts = first(name, args, params, way)
                assert all(ct.shape == x.shape and ct.dtype == x.dtype for x, ct in zip(xs, cts))
                if finite:
                    order_1(name, args, params, way)
                    order_2(name, args, params, way)
        if torch is not None and name in TORCH:
            check_oracle(torch, name, args, params)
    return True


@pytest.mark.parametrize("length", [0, 1])
@every_op
def test_axes_of_length_0_and_1(name, length):
    """Each length of each row, in all arguments at once, becomes 0 or 1: the op gives the right answer or refuses by
    name; and of all these some are not refused."""
    tried = [check_small(name, *arguments(name, i, resize=(n, length))) for i in rows(name) for n in sizes_of(name, i)]
    assert any(tried)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("name", list(TORCH))
def test_axes_of_length_0_and_1_against_torch(name, length, torch):
    """Where PyTorch takes the case too (it has no maximum of nothing either, but refuses more)."""
    for i in rows(name):
        for n in sizes_of(name, i):
            args, params = arguments(name, i, resize=(n, length))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    oracle(torch, name, args, params)
            except (RuntimeError, IndexError, ValueError):
                continue
            check_small(name, args, params, torch)


def is_elementwise(name, i):
    """By what it does: one element of each argument makes the element of the result, and no parameter is needed."""
    args, params = arguments(name, i)
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    y = np.asarray(mg.primitives[name](*args, **params))
    try:
        if y.shape != np.broadcast_shapes(*(a.shape for a in arrays)) or not y.size:
            return False
        full = [np.broadcast_to(a, y.shape).reshape(-1) if isinstance(a, np.ndarray) else a for a in args]
        for at in range(y.size):
            one = mg.primitives[name](*[a[at:at + 1] if isinstance(a, np.ndarray) else a for a in full], **params)
            if np.shape(one) != (1,) or not np.allclose(one[0], y.reshape(-1)[at]):
                return False
    except (ValueError, TypeError, IndexError, AttributeError):
        return False
    return True


@every_row
def test_0d(name, i):
    """All array arguments as 0-d: right or refused by name; an elementwise op takes them."""
    args, params = arguments(name, i)
    sample = mg.primitives[name].samples[i]
    small = iter(values([() for a in args if is_float(a)], sample.low, sample.high))
    args = [next(small) if is_float(a) else a.flat[0].reshape(()) if isinstance(a, np.ndarray) else a for a in args]
    assert check_small(name, args, params) or not is_elementwise(name, i)


def test_elementwise_ops_are_recognised():
    """The rule above is not empty, and does not take everything."""
    found = {name for name in NAMES if is_elementwise(name, rows(name)[0])}
    assert {"add", "exp", "gelu", "relu", "where", "clip"} <= found
    assert not {"sum", "softmax", "matmul", "reshape", "layer_norm"} & found


def layouts(a):
    """The same values with other strides: transposed, every second element of a larger array, back to front."""
    yield np.asfortranarray(a) if a.ndim > 1 else np.stack([a, a], -1)[..., 0]
    wide = np.zeros([2 * n for n in a.shape], a.dtype)
    every = (*(slice(None, None, 2),) * a.ndim, ...)
    wide[every] = a
    yield wide[every]
    back = (slice(None, None, -1),) * a.ndim
    yield np.ascontiguousarray(a[back])[back] if a.ndim else a.copy()


@every_path
def test_memory_layout_does_not_matter(name, i, way):
    args, params = arguments(name, i)
    op = mg.primitives[name]
    with within(way):
        want = op(*args, **params)
        cts = first(name, args, params, way)[1] if differentiable(name, i) else []
        for which in range(3):
            odd = [list(layouts(a))[which] if isinstance(a, np.ndarray) else a for a in args]
            close(op(*odd, **params), want, 1e-12, 1e-12)
            made = [mg.tensor(0.0, dtype=np.float64).detach() if is_float(a) else a for a in odd]
            for t, a in zip(made, odd):
                if is_float(a):
                    t._data, t._tracked = a, True        # mg.tensor would copy it into row-major order
            xs = [t for t in made if isinstance(t, mg.Tensor)]
            y = op(*made, **params)
            close(y, want, 1e-12, 1e-12)
            if cts:
                # and a cotangent that is not contiguous
                got = mg.gradients(y, xs, list(layouts(like(y)))[which])
                for ct, expected in zip(got, cts):
                    close(ct, expected, 1e-11, 1e-11)


def shrunk(shape):
    """The shape with one axis of length 1, or without its leading axes."""
    yield from (shape[:k] + (1,) + shape[k + 1:] for k, n in enumerate(shape) if n > 1)
    yield from (shape[k:] for k in range(1, len(shape) + 1))


def summed(c, shape):
    """The adjoint of broadcasting `shape` to c's, in plain NumPy; None if it does not broadcast."""
    lead = c.ndim - len(shape)
    if lead < 0 or any(n not in (1, m) for n, m in zip(shape, c.shape[lead:])):
        return None
    return c.sum(tuple(k for k in range(c.ndim) if k < lead or shape[k - lead] != c.shape[k])).reshape(shape)


@pytest.mark.parametrize("name", [name for name, op in mg.primitives.items() if op.broadcasts])
def test_broadcasting(name):
    """Some of the generated shapes are not refused."""
    assert sum(check_broadcasting(name, i) for i in rows(name))


def check_broadcasting(name, i):
    """An argument with an axis of length 1, or a missing one, counts as the same values spelled out in full: the same
    result (if nothing else stretches it, then with an axis of length 1 too), and gradients summed over what was
    repeated."""
    args, params = arguments(name, i)
    op, places = mg.primitives[name], [k for k, a in enumerate(args) if is_float(a)]
    if sum(isinstance(a, np.ndarray) for a in args) < 2 and "shape" not in params:
        return 0                                         # nothing to broadcast with
    tried = 0
    for at, way in itertools.product(places, ("op", "composed")):
        for shape in shrunk(args[at].shape) if args[at].size else ():
            corner = tuple(slice(n) for n in [1] * (args[at].ndim - len(shape)) + [*shape])
            small, spelled = list(args), list(args)
            small[at] = args[at][corner].reshape(shape)
            spelled[at] = np.broadcast_to(small[at], args[at].shape).copy()
            if refused_by_name(name, small, params):
                continue
            with within(way):
                (few, xs), (full, wide) = leaves(small), leaves(spelled)
                y, want = op(*few, **params), op(*full, **params)
                ct = like(want)
                ct_y = summed(ct, y.shape)
                if ct_y is None:                         # the missing axis has a role: a matrix became a vector
                    continue
                close(np.broadcast_to(y.numpy(), want.shape), want)
                tried += 1
                if y.requires_grad:
                    for x, got, expected in zip(xs, mg.gradients(y, xs, ct_y), mg.gradients(want, wide, ct)):
                        assert got.shape == x.shape
                        close(got, summed(expected.numpy(), x.shape))
                    order_2(name, small, params, way)
    return tried


# ------------------------------------------------------------------------------------------------ dtype and memory

TOLERANCE = {np.float16: 0.03, np.float32: 2e-5, np.float64: 1e-12}


def with_dtype(params, dtype):
    """A dtype asked for is the dtype under test."""
    return {k: dtype if k == "dtype" else v for k, v in params.items()}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda d: d.__name__)
@every_path
def test_dtype_and_device_are_kept(name, i, way, dtype):
    """Output and gradients of order 1 and 2 have the dtype, shape and device of the input, and float64's values."""
    op, tol = mg.primitives[name], TOLERANCE[dtype]
    args, params = arguments(name, i, dtype)
    params = with_dtype(params, dtype)
    made, xs = leaves(args)
    # float64 on the rounded inputs: what is measured is the op, not the rounding of its arguments
    wide = [a.astype(np.float64) if is_float(a) else a for a in args]
    exact = with_dtype({k: v.astype(np.float64) if is_float(v) else v for k, v in params.items()}, np.float64)
    with within(way):
        y = op(*made, **params)
        want = np.asarray(op(*wide, **exact))
        assert y.dtype == (dtype if want.dtype.kind == "f" else want.dtype) and y.device == "cpu"
        close(y, want, tol, tol)
        if want.dtype.kind != "f" or not xs:
            return
        cts = first(name, args, params, way, create_graph=True)[1]
        for x, ct, expected in zip(xs, cts, first(name, wide, exact, way)[1]):
            assert (ct.dtype, ct.shape, ct.device) == (x.dtype, x.shape, x.device)
            close(ct, expected, 4 * tol, 4 * tol * max(1.0, np.abs(expected.numpy()).max(initial=0.0)))
        inner = [ct for ct in cts if ct.requires_grad]
        if inner:
            s = sum(projected(ct) for ct in inner)
            assert s.dtype == dtype
            s.backward()
            assert all(x.grad is None or (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
                       for x in first(name, args, params, way)[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda d: d.__name__)
@every_row
def test_scalars_are_weak(name, i, dtype):
    """Each array argument in turn as a Python number and as a NumPy one of every kind: the dtype stays; or the op
    refuses by name. An op that broadcasts two arrays elementwise takes them."""
    args, params = arguments(name, i, dtype)
    params = with_dtype(params, dtype)
    places = [k for k, a in enumerate(args) if is_float(a)]
    if len(places) < 2:
        return
    for at in places:
        value = float(args[at].reshape(-1)[0]) if args[at].size else 1.5
        for scalar in (value, 2, np.float64(value), np.float32(value), np.int64(2), np.float16(value)):
            given = [scalar if k == at else a for k, a in enumerate(args)]
            if refused_by_name(name, given, params):
                assert not is_elementwise(name, i)
                break
            made, xs = leaves(given)
            y = mg.primitives[name](*made, **params)
            if y.dtype.kind == "f":
                assert y.dtype == dtype, f"{type(scalar)} as argument {at}"
                assert all(ct.dtype == dtype for ct in mg.gradients(projected(y), xs))


def parameter_names(rule):
    return list(inspect.signature(rule.run).parameters)[1:]


@every_row
def test_a_node_keeps_what_its_rules_name(name, i):
    """For every set of arguments that need a gradient: an input is kept if a rule that runs names it (or if the node
    must differentiate its reference later), the output if one names y; nothing else, and the very arrays."""
    op = mg.primitives[name]
    args, params = arguments(name, i)
    if not differentiable(name, i):
        return
    body = op.kernels.get("numpy", op.plain)
    floats = [k for k, a in enumerate(args) if is_float(a)]
    for needed in (set(c) for n in range(1, len(floats) + 1) for c in itertools.combinations(floats, n)):
        made = [mg.tensor(a, requires_grad=k in needed) if is_float(a) else a for k, a in enumerate(args)]
        with kernels():
            y = mg.primitives[name](*made, **params)
        node = y.node
        rules = [body.joint] if body.joint else [r for k, r in enumerate(body.rules) if r and k in needed]
        named = {n for rule in rules for n in parameter_names(rule)}
        all_inputs = not op.differentiable or (len(op.inputs) == 1 and op.inputs[0] in named)
        made += [None] * (len(node.arrays) - len(made))  # optional arguments that were not given
        for k, a in enumerate(made):
            label = op.inputs[min(k, len(op.inputs) - 1)]
            raw = a._data if isinstance(a, mg.Tensor) else a
            if all_inputs or (label in named and len(args) <= len(op.inputs)):
                assert node.arrays[k] is raw or (not is_float(raw) and np.all(node.arrays[k] == raw))
            else:
                assert node.arrays[k] is None, f"[{name}] keeps {label}, which no rule that runs names"
        assert (node.y is y._data) if "y" in named else node.y is None
        assert bool(node.residuals) == bool(body.residuals)
        assert [t is not None for t in node.targets] == [k in needed for k in range(len(made))]


@pytest.mark.parametrize("build, kept", [
    (lambda x, c: x + c, 0), (lambda x, c: x - x, 0), (lambda x, c: -x, 0), (lambda x, c: x.sum(), 0),
    (lambda x, c: x.reshape(6), 0), (lambda x, c: x.T, 0), (lambda x, c: x[0], 0),
    (lambda x, c: x * c, 48), (lambda x, c: c * x, 48), (lambda x, c: x * 2.0, 0),
    (lambda x, c: x * x, 48), (lambda x, c: x.exp(), 48), (lambda x, c: x.tanh(), 48),
    (lambda x, c: x / c, 48), (lambda x, c: c / x, 96), (lambda x, c: mg.functional.softmax(x), 48)])
def test_bytes_kept(build, kept):
    """add keeps nothing; a product with a constant only the constant, 6 float64 numbers; exp its output only; c / x its
    output and x."""
    x = mg.tensor(np.linspace(1.0, 2.0, 6).reshape(2, 3), requires_grad=True)
    with kernels():
        assert build(x, mg.tensor(np.full((2, 3), 3.0))).node.bytes_kept == kept


@every_path
def test_nothing_is_modified_and_nothing_aliased(name, i, way):
    """Forward, backward and second order leave inputs, constants, the output and the cotangent as they were, to the
    last bit. Gradients share memory with none of these, nor with one another."""
    args, params = arguments(name, i)
    made, xs = leaves(args)
    watched = [x._data for x in xs] + [a for a in (*args, *params.values()) if isinstance(a, np.ndarray)]
    before = [a.tobytes() for a in watched]
    with within(way):
        y = mg.primitives[name](*made, **params)
        if y.dtype.kind == "f":
            ct = like(y)
            watched, before = [*watched, y._data, ct], [*before, y._data.tobytes(), ct.tobytes()]
            y.backward(ct, retain_graph=True)
            grads = [x.grad._data for x in xs if x.grad is not None]
            for a, b in itertools.combinations([*grads, *watched], 2):
                mine = any(a is g for g in grads)
                assert not (mine and np.shares_memory(a, b)), f"[{name}] a gradient is an alias"
            once = [g.tobytes() for g in grads]
            inner = mg.gradients(y, xs, ct, create_graph=True)
            for g, want in zip((c for c, x in zip(inner, xs) if x.grad is not None), grads):
                close(g, want)                           # the recorded pass computes the same
            inner = [c for c in inner if c.requires_grad]
            if inner:
                mg.gradients(sum(projected(c) for c in inner), xs)
            assert [g.tobytes() for g in grads] == once
    assert [a.tobytes() for a in watched] == before


@every_row
def test_second_run_is_the_same_bits(name, i):
    """No op depends on hidden state."""
    args, params = arguments(name, i)
    runs = [mg.primitives[name](*leaves(args)[0], **params).numpy().tobytes() for _ in range(2)]
    assert runs[0] == runs[1]


# ------------------------------------------------------------------------------------- faults once found, by their kind


def grads(f, *xs, order=1):
    """The gradients of sum f (order 2: of the sum of its first gradient), on both paths; they must agree."""
    found = []
    for way in ("op", "composed"):
        with within(way), np.errstate(all="ignore"):
            leaf = [mg.tensor(np.array(x), requires_grad=True) for x in xs]
            y = f(*leaf).sum()
            if order == 2:
                y = mg.gradients(y, leaf[:1], create_graph=True)[0].sum()
            found.append([g.numpy() for g in mg.gradients(y, leaf)])
    for a, b in zip(*found):
        close(a, b, rtol=1e-6)
    return found[0]


def test_power_at_zero():
    """d/db d/da a^b = a^(b-1) (1 + b log a), which is 1/a at b = 0; and 0^0 gives no NaN."""
    close(grads(lambda a, b: a**b, 2.0, 0.0, order=2)[1], 0.5)
    for order in (1, 2):
        assert all(np.isfinite(g).all() for g in grads(lambda a, b: a**b, [0.0, 0.0], [0.0, 2.0], order=order))


def test_sigmoid_keeps_its_lower_tail():
    x = mg.tensor([-20.0, -80.0, 0.0, 30.0], requires_grad=True)
    close(F.sigmoid(x), 1 / (1 + np.exp([20.0, 80.0, 0.0, -30.0])), rtol=1e-6)
    close(mg.gradients(F.log(F.sigmoid(x)).sum(), [x])[0], [1.0, 1.0, 0.5, 0.0], rtol=1e-6)


@pytest.mark.parametrize("f", [F.relu, lambda x: F.maximum(x, 0.0), lambda x: F.maximum(0.0, x),
                               lambda x: F.clip(x, 0.0), lambda x: -F.minimum(-x, 0.0),
                               lambda x: -F.clip(-x, None, 0.0)])
def test_what_is_not_chosen_gets_nothing_also_of_infinity(f):
    """sqrt has an infinite derivative at 0, and 0 times infinity is NaN."""
    for order, want in ((1, 0.25), (2, -1 / 32)):
        close(grads(lambda x: F.sqrt(f(x)), [-1.0, 4.0], order=order)[0], [0.0, want])


def test_abs_and_std_at_rest():
    x = mg.tensor([0.0, -2.0, 2.0], requires_grad=True)
    close(mg.gradients(F.abs(x), [x], np.array([np.inf, 3.0, 3.0]))[0], [0.0, -3.0, 3.0])
    for order in (1, 2):
        close(grads(lambda x: F.std(x, axis=1), np.ones((2, 3)), order=order)[0], np.zeros((2, 3)))


def test_clip_with_crossed_bounds():
    """The value is high, so high has the gradient; x has it at its bounds."""
    got = grads(F.clip, [0.0, 1.5, 3.0, 1.0, 2.0], [2.0, 2.0, 2.0, 1.0, 3.0], [1.0, 1.0, 1.0, 2.0, 3.0])
    close(got, [[0, 0, 0, 1, 0], [0, 0, 0, 0, 1], [1, 1, 1, 0, 0]])


Q = (2, 2, 3)
MIXED = {                                                # name -> (shapes, f)
    "layer_norm": ([(2, 3), (3,), (3,)], F.layer_norm), "rms_norm": ([(2, 3), (3,)], F.rms_norm),
    "attention_fused": ([Q, Q, Q, (2, 2), (2,)], lambda q, k, v, bias, sinks: F.scaled_dot_product_attention(
        q, k, v, bias, sinks=sinks, implementation="fused")),
    "attention_tiled": ([Q, Q, Q, (2, 2), (2,)], lambda q, k, v, bias, sinks: F.scaled_dot_product_attention(
        q, k, v, bias, sinks=sinks, implementation="tiled")),
}
ONE = {**{name: getattr(F, name) for name in "softmax log_softmax layer_norm rms_norm gelu silu erf sigmoid".split()},
       "masked_softmax": lambda x: F.masked_softmax(x, np.eye(2, 3) > -1),
       "cross_entropy": lambda x: F.cross_entropy(x, [0, 2]),
       "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
       "dropout": lambda x: (mg.manual_seed(0), F.dropout(x, 0.25))[1],
       "rotary": lambda x: F.rotary_embedding(x, np.full((2, 1), 0.6), np.full((2, 1), 0.8))}


@pytest.mark.parametrize("name", MIXED)
def test_fused_ops_promote_as_their_compositions(name):
    """Each argument in turn wider, narrower or integer: dtype and values are those of the composition (NEP 50)."""
    shapes, f = MIXED[name]
    for base, other in itertools.permutations((np.float16, np.float32, np.float64, np.int64), 2):
        for at in range(len(shapes)):
            arrays = [v.astype(other if i == at else base) for i, v in enumerate(values(shapes, -2.0, 2.0))]
            if name.startswith("attention") and arrays[3].dtype.kind == "i":
                continue                                 # an integer is no mask
            results = []
            for way in ("op", "composed"):
                xs = [mg.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
                tracked = [x for x in xs if x.requires_grad]
                with within(way):
                    y = f(*xs)
                    results.append([y, *mg.gradients(y, tracked, like(y.numpy()))])
            for a, b in zip(*results):
                assert a.dtype == b.dtype and a.dtype.kind == "f"
                close(a.numpy().astype(float), b.numpy().astype(float), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_integers_are_computed_as_floats(name, dtype):
    x = np.arange(6).reshape(2, 3)
    want = ONE[name](mg.tensor(x.astype(np.float64)))
    for way in ("op", "composed"):
        with within(way):
            y = ONE[name](mg.tensor(x.astype(dtype)))
        assert y.dtype == np.float64
        close(y, want)


def test_the_mean_loss_of_many_rows_in_float16():
    x = mg.tensor(np.zeros((70000, 4), np.float16), requires_grad=True)
    loss = F.cross_entropy(x, np.zeros(70000, int))
    assert loss.dtype == np.float16
    close(loss, np.log(4), rtol=1e-3)
    close(mg.gradients(loss, [x])[0].numpy()[0], np.array([-0.75, 0.25, 0.25, 0.25]) / 70000, atol=1e-7)


LEAF, X, ATTEND = mg.tensor(0.5, requires_grad=True), mg.ones(1, 2, 1), F.scaled_dot_product_attention
SQUARE = mg.ones(2, 3)
REFUSED = [                                              # (what it says, call)
    *((f"] {name} is a number, not a Tensor that requires a gradient", f) for name, f in {
        "scale": lambda: ATTEND(X, X, X, scale=LEAF), "softcap": lambda: ATTEND(X, X, X, softcap=LEAF),
        "constant_values": lambda: F.pad(X, 1, LEAF), "p": lambda: F.dropout(X, LEAF),
        "label_smoothing": lambda: F.cross_entropy(SQUARE, [0, 1], label_smoothing=LEAF)}.items()),
    *(("axis 5 is out of range for (1, 2, 1", f) for f in (
        lambda: F.squeeze(X, 5), lambda: F.take(X, [0], 5), lambda: F.take_along_axis(X, np.zeros((1, 1, 1), int), 5),
        lambda: F.moveaxis(X, 0, 5), lambda: F.swapaxes(X, 5, 0), lambda: F.split(X, 1, 5), lambda: F.expand_dims(X, 5),
        lambda: F.softmax(X, 5), lambda: F.log_softmax(X, 5), lambda: F.masked_softmax(X, axis=5),
        lambda: F.stack([X, X], 5))),
    ("axis is one integer: got (0, 1)", lambda: F.softmax(X, (0, 1))),
    ("axis -2 is out of range for (1,)", lambda: mg.ones(1).mT),
    ("axis 0 is out of range for ()", lambda: F.take(LEAF, [0], axis=0)),
    ("axis -2 is out of range for (1,)", lambda: F.tril(mg.ones(1))),
    ("sections is an integer: got 1.5", lambda: F.split(SQUARE, 1.5, -1)),
    ("a size is an integer: got 1.5", lambda: F.split(SQUARE, [1.5, 1.5], -1)),
    ("width is a pair", lambda: F.pad(SQUARE, ((1, 2), (1,)))), ("width is a pair", lambda: F.pad(SQUARE, 1.5)),
    ("takes at least one array", lambda: F.stack([])), ("takes at least one array", lambda: F.concatenate([])),
    ("same number of dimensions", lambda: F.stack([1.0, SQUARE])),
    ("operand 0 is a Tensor", lambda: F.einsum("i->", None)),
    ("takes the subscripts first", lambda: F.einsum(SQUARE, "ij->")),
    ("must have the ... of its operands", lambda: F.einsum("ii...->i", np.ones((2, 2, 3)))),
    ("same shape", lambda: F.mse_loss(SQUARE, 0.0)), ("logits is a Tensor", lambda: F.cross_entropy(None, [0])),
    ("k is a Tensor", lambda: ATTEND(X, None, X)), ("window is an integer", lambda: ATTEND(X, X, X, window="3")),
    ("scale is a number", lambda: ATTEND(X, X, X, scale="1")),
    ("query_offset is an integer: got 0.5", lambda: ATTEND(X, X, X, is_causal=True, query_offset=0.5)),
    ("query_offset is an integer: got str", lambda: ATTEND(X, X, X, is_causal=True, query_offset="0")),
    ("takes ids and then a table", lambda: F.embedding(SQUARE, [0])),
    ("broadcast to x", lambda: F.rotary_embedding(SQUARE, np.ones((5, 1)), np.ones((5, 1)))),
    ("broadcast to x", lambda: F.rotary_embedding(SQUARE, np.ones((1, 2, 1)), np.ones((1, 2, 1)))),
    ("n is an integer: got 3.5", lambda: F.one_hot([1], 3.5)),
]


@pytest.mark.parametrize("k", range(len(REFUSED)))
def test_refusals_name_the_op(k):
    says, f = REFUSED[k]
    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError)) as error:
        f()
    assert str(error.value).startswith("[") and says in str(error.value)


def test_lists_and_numpy_integers_are_taken():
    assert len(F.split(SQUARE, np.int64(3), -1)) == len(F.split(SQUARE, np.ones(3, int), -1)) == 3
    close(F.einsum("i,i->", [1.0, 2.0], [3.0, 4.0]), 11.0)
    close(F.mse_loss(mg.tensor([1.0, 2.0]), [1.0, 4.0]), 2.0)
    close(F.cross_entropy([[0.0, 0.0]], [1]), np.log(2), rtol=1e-6)
    close(ATTEND([[1.0, 2.0]], [[1.0, 2.0]], [[1.0, 2.0]]), [[1.0, 2.0]])
    close(ATTEND(SQUARE, SQUARE, SQUARE, sinks=[0.0]), np.full((2, 3), 2 / (2 + np.exp(-3**0.5))), rtol=1e-6)
    assert (F.one_hot([1], np.int64(3)).shape, (+SQUARE) is SQUARE) == ((1, 3), True)
