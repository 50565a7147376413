"""Layers and models: against PyTorch in float64, the formulas of A.10 in plain NumPy, and what a user may rely on."""

import copy
import math

import numpy as np
import pytest

import minigrad as mg
import minigrad.functional as F
from minigrad import nn

GPT = dict(vocab_size=11, context=8, d_model=12, n_layers=2, n_heads=3)
LLAMA = dict(GPT, n_kv_heads=1, d_ff=20)


def gpt(**changed):
    return nn.Transformer(**{**GPT, **changed})


def llama(**changed):
    return nn.Transformer(nn.TransformerConfig.llama(**{**LLAMA, **changed}))


MODELS = {
    "gpt": gpt,
    "gpt untied": lambda **c: gpt(tied=False, **c),
    "llama": llama,
    "window, qk_norm": lambda **c: gpt(window=3, qk_norm=True, position="none", norm="rms", mlp="relu", **c),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def ids_of(rng, shape=(2, 7), size=11):
    return rng.integers(0, size, shape)


def near(a, b, tol=1e-12):
    """Equal within tol of the largest value: a fixed relative tolerance asks too much of sums that cancel."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.abs(a - b).max(initial=0.0) <= tol * max(1.0, np.abs(b).max(initial=0.0))


def grads_of(model, ids, targets):
    """Loss and gradients by path, of a fresh backward."""
    model.zero_grad()
    loss = model.loss(ids, targets)
    loss.backward()
    return loss.item(), {path: p.grad.numpy() for path, p in model.named_parameters()}


def same_grads(one, other, tol=1e-12):
    assert one.keys() == other.keys()
    for path in one:
        near(one[path], other[path], tol)


# --- layers against PyTorch ----------------------------------------------------------------------------------------


def compare(torch, ours, theirs, pairs, inputs, call=None):
    """Copy the weights over (pairs: our path -> (their tensor, transposed)), then outputs, input gradients and weight
    gradients must agree in float64."""
    ours.to(mg.float64)
    theirs = theirs.double()
    named = dict(theirs.named_parameters())
    pairs = {ours_: (named[name], turned) for ours_, (name, turned) in pairs.items()}
    assert pairs.keys() == dict(ours.named_parameters()).keys()
    for tensor, _ in pairs.values():  # PyTorch starts norms at 1 and biases at 0, which hide mistakes
        tensor.data.copy_(torch.from_numpy(np.random.default_rng(tensor.numel()).normal(size=tuple(tensor.shape))))
    ours.load_state_dict(
        {path: (t.detach().numpy().T if turned else t.detach().numpy()) for path, (t, turned) in pairs.items()}
    )
    mine = [mg.tensor(x, requires_grad=x.dtype.kind == "f") for x in inputs]
    other = [torch.from_numpy(x.copy()).requires_grad_(x.dtype.kind == "f") for x in inputs]
    y, z = ours(*mine), (call or theirs)(*other)
    near(y.numpy(), z.detach().numpy())
    ct = np.random.default_rng(5).normal(size=y.shape)
    y.backward(ct)
    z.backward(torch.from_numpy(ct))
    for a, b in zip(mine, other):
        if a.requires_grad:
            near(a.grad.numpy(), b.grad.numpy())
    for path, p in ours.named_parameters():
        tensor, turned = pairs[path]
        near(p.grad.numpy(), tensor.grad.numpy().T if turned else tensor.grad.numpy())


def linear_pairs(**names):
    return {
        f"{ours}.{part}": (f"{theirs}.{part}", part == "weight")
        for ours, theirs in names.items()
        for part in ("weight", "bias")
    }


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs_transposed(torch, rng, bias):
    pairs = {"weight": ("weight", True), "bias": ("bias", False)} if bias else {"weight": ("weight", True)}
    compare(torch, nn.Linear(5, 7, bias), torch.nn.Linear(5, 7, bias), pairs, [rng.normal(size=(2, 3, 5))])


def test_embedding_is_torchs(torch, rng):
    compare(
        torch,
        nn.Embedding(6, 4),
        torch.nn.Embedding(6, 4),
        {"weight": ("weight", False)},
        [np.array([[0, 5, 5], [1, 0, 5]])],
    )


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(torch, rng, bias):
    pairs = {name: (name, False) for name in (("weight", "bias") if bias else ("weight",))}
    compare(torch, nn.LayerNorm(5, bias), torch.nn.LayerNorm(5, bias=bias), pairs, [rng.normal(size=(2, 3, 5))])


def test_rms_norm_is_torchs(torch, rng):
    compare(
        torch, nn.RMSNorm(5), torch.nn.RMSNorm(5, eps=1e-6), {"weight": ("weight", False)}, [rng.normal(size=(2, 3, 5))]
    )


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("gelu", lambda t: t.nn.GELU()),
        ("gelu_tanh", lambda t: t.nn.GELU(approximate="tanh")),
        ("relu", lambda t: t.nn.ReLU()),
        ("silu", lambda t: t.nn.SiLU()),
    ],
)
def test_mlp_is_two_linears_of_torch(torch, rng, ours, theirs):
    pair = torch.nn.Sequential(
        torch.nn.Linear(4, 16), theirs(torch), torch.nn.Linear(16, 4)
    )  # 16: four times the width
    compare(torch, nn.MLP(4, activation=ours), pair, linear_pairs(up="0", down="2"), [rng.normal(size=(2, 3, 4))])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_layer_is_torchs(torch, rng, approximate):
    compare(torch, nn.GELU(approximate), torch.nn.GELU(approximate), {}, [rng.normal(size=(2, 5)) * 3])


def test_swiglu_is_its_formula_in_torch(torch, rng):
    parts = torch.nn.ModuleDict(
        {name: torch.nn.Linear(*sizes) for name, sizes in {"gate": (6, 16), "up": (6, 16), "down": (16, 6)}.items()}
    )

    def formula(x):
        return parts["down"](torch.nn.functional.silu(parts["gate"](x)) * parts["up"](x))

    # 16: 8/3 of 6, rounded up to a multiple of 8
    compare(
        torch,
        nn.SwiGLU(6, bias=True),
        parts,
        linear_pairs(gate="gate", up="up", down="down"),
        [rng.normal(size=(2, 3, 6))],
        formula,
    )


ATTENTION = {
    "qkv.weight": ("in_proj_weight", True),
    "qkv.bias": ("in_proj_bias", False),
    **linear_pairs(out="out_proj"),
}


class Masked(nn.Module):
    """An attention layer with its mask fixed, so that inputs are all that is passed."""

    def __init__(self, inner, mask):
        self.inner, self._mask = inner, mask

    def forward(self, *inputs):
        return self.inner(*inputs, attn_mask=self._mask)


@pytest.mark.parametrize("case", ["plain", "causal", "bool mask", "float mask", "cross", "window"])
def test_attention_layer_is_torchs(torch, rng, case):
    t, s = (5, 7) if case == "cross" else (6, 6)
    rows, columns = np.arange(t)[:, None], np.arange(s)
    hidden, mask, options = None, None, {}
    if case == "causal":
        hidden, options = columns > rows, dict(causal=True)
    elif case == "window":  # the last 2 keys: its own and the one before
        hidden, options = (columns > rows) | (columns <= rows - 2), dict(causal=True, window=2)
    elif case == "bool mask":  # True means hidden to PyTorch, and visible to minigrad
        hidden = rng.random((t, s)) < 0.4
        hidden[:, 0] = False
        mask = ~hidden
    elif case == "float mask":
        hidden = mask = rng.normal(size=(t, s))
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    theirs_mask = None if hidden is None else torch.from_numpy(hidden)

    def call(x, context=None):
        context = x if context is None else context
        return theirs(x, context, context, attn_mask=theirs_mask, need_weights=False)[0]

    inputs = [rng.normal(size=(2, t, 12))] + ([rng.normal(size=(2, s, 12))] if case == "cross" else [])
    pairs = {f"inner.{ours}": pair for ours, pair in ATTENTION.items()}
    compare(torch, Masked(nn.MultiheadAttention(12, 3, **options), mask), theirs, pairs, inputs, call)


def test_block_is_torchs_norm_first_encoder_layer(torch, rng):
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, dim_feedforward=48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    ours = nn.TransformerBlock(nn.TransformerConfig(**{**GPT, "mlp": "gelu"}))
    pairs = {f"attention.{name}": (f"self_attn.{pair[0]}", pair[1]) for name, pair in ATTENTION.items()}
    pairs |= {f"{norm}.{part}": (f"{norm}.{part}", False) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
    pairs |= {
        f"mlp.{ours_}.{part}": (f"{theirs_}.{part}", part == "weight")
        for ours_, theirs_ in (("up", "linear1"), ("down", "linear2"))
        for part in ("weight", "bias")
    }
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    compare(torch, ours, theirs, pairs, [rng.normal(size=(2, 6, 12))], lambda x: theirs(x, src_mask=hidden))


# --- the attention layer's options, against loops in NumPy ------------------------------------------------------------


def attention_by_hand(layer, x, visible):
    """A.10.1 to A.10.3 and A.10.10, one batch, head and query at a time; rotary positions as complex numbers."""
    w = {path: p.numpy() for path, p in layer.named_parameters()}
    heads, shared, d = layer.n_heads, layer.n_kv_heads, layer.d_head
    y = np.zeros_like(x)
    for b in range(len(x)):
        packed = x[b] @ w["qkv.weight"] + w.get("qkv.bias", 0.0)
        parts = np.split(packed, np.cumsum([d] * (heads + 2 * shared))[:-1], axis=1)
        q, k, v = parts[:heads], parts[heads : heads + shared], parts[heads + shared :]

        def prepare(head, weight):
            if weight is not None:
                head = head / np.sqrt((head**2).mean(1, keepdims=True) + 1e-6) * weight
            if layer.rope_base:
                angle = np.arange(len(head))[:, None] * layer.rope_base ** (-2 * np.arange(d // 2) / d)
                z = (head[:, : d // 2] + 1j * head[:, d // 2 :]) * np.exp(1j * angle)
                head = np.concatenate([z.real, z.imag], axis=1)
            return head

        out = np.zeros((x.shape[1], heads * d))
        for r in range(heads):
            g = r // (heads // shared)  # (A.10.5)
            qr, kr = prepare(q[r], w.get("q_norm.weight")), prepare(k[g], w.get("k_norm.weight"))
            for i in range(len(qr)):
                seen = np.flatnonzero(visible[i])
                e = np.exp(kr[seen] @ qr[i] / math.sqrt(d))
                out[i, r * d : (r + 1) * d] = (e / e.sum()) @ v[g][seen]
        y[b] = out @ w["out.weight"] + w.get("out.bias", 0.0)
    return y


OPTIONS = {
    "rope": dict(rope=True),
    "another base": dict(rope=100.0, bias=False),
    "gqa": dict(n_kv_heads=2),
    "mqa": dict(n_kv_heads=1),
    "qk_norm": dict(qk_norm=True),
    "all": dict(n_kv_heads=2, rope=True, qk_norm=True, bias=False, window=3),
}


@pytest.mark.parametrize("implementation", ["composed", "fused", "tiled"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_options_by_hand(rng, options, implementation):
    layer = nn.MultiheadAttention(16, 4, causal=True, implementation=implementation, **options).to(mg.float64)
    for p in layer.parameters():
        p.copy_(rng.normal(size=p.shape) * 0.5)
    x, (rows, columns) = rng.normal(size=(2, 6, 16)), np.ogrid[:6, :6]
    visible = (columns <= rows) & (columns > rows - options.get("window", 6))
    near(layer(mg.tensor(x)).numpy(), attention_by_hand(layer, x, visible))
    # the gradient in one random direction of everything, against a central difference of the loops above
    inputs = [mg.tensor(x, requires_grad=True), *layer.parameters()]
    ct = rng.normal(size=x.shape)
    layer(inputs[0]).backward(ct)
    start, ways = [p.numpy() for p in inputs], [rng.normal(size=p.shape) for p in inputs]
    slope = sum((p.grad.numpy() * way).sum() for p, way in zip(inputs, ways))

    def at(h):
        for p, a, way in zip(inputs, start, ways):
            p.copy_(a + h * way)
        return (attention_by_hand(layer, inputs[0].numpy(), visible) * ct).sum()

    near(slope, (at(1e-5) - at(-1e-5)) / 2e-5, 1e-7)


def test_shared_heads_equal_repeated_heads(rng):
    """GQA is full attention whose key and value weights are repeated; a shared weight's gradient sums its copies'."""
    few, full = (
        nn.MultiheadAttention(8, 4, 2, bias=False, causal=True),
        nn.MultiheadAttention(8, 4, bias=False, causal=True),
    )
    few.to(mg.float64), full.to(mg.float64)
    cut = few.qkv.weight.numpy()  # columns: 4 heads of q, 2 of k, 2 of v, each 2 wide
    order = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    full.load_state_dict({"qkv.weight": cut.reshape(8, 8, 2)[:, order].reshape(8, 24), "out.weight": few.out.weight})
    x = mg.tensor(rng.normal(size=(3, 5, 8)))
    near(few(x).numpy(), full(x).numpy())
    few(x).sum().backward()
    full(x).sum().backward()
    wide = full.qkv.weight.grad.numpy().reshape(8, 12, 2)
    summed = np.zeros((8, 8, 2))
    for to, column in zip(order, range(12)):
        summed[:, to] += wide[:, column]
    near(few.qkv.weight.grad.numpy().reshape(8, 8, 2), summed)


def test_cross_attention_weights_are_those_of_self_attention(rng):
    layer = nn.MultiheadAttention(12, 3, 1).to(mg.float64)
    x = mg.tensor(rng.normal(size=(2, 4, 12)))
    near(layer(x, context=x).numpy(), layer(x).numpy())


def test_mask_may_differ_by_batch_and_head(rng):
    layer = nn.MultiheadAttention(8, 2).to(mg.float64)
    x = mg.tensor(rng.normal(size=(3, 4, 8)))
    padding = np.arange(4) < np.array([4, 2, 3])[:, None]  # lengths 4, 2, 3
    y = layer(x, attn_mask=padding[:, None, None])
    for b, length in enumerate((4, 2, 3)):
        near(y[b].numpy(), layer(x[b : b + 1], context=x[b : b + 1, :length])[0].numpy())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: nn.MultiheadAttention(10, 3), r"\[MultiheadAttention\].*d_model 10, n_heads 3"),
        (lambda: nn.MultiheadAttention(12, 3, 2), r"\[MultiheadAttention\].*n_kv_heads 2"),
        (lambda: nn.MultiheadAttention(12, 0), r"\[MultiheadAttention\].*n_heads 0"),
        (lambda: nn.MultiheadAttention(12, 3, 0), r"\[MultiheadAttention\].*n_kv_heads 0"),
        (lambda: nn.MultiheadAttention(12, -3), r"\[MultiheadAttention\].*at least 0: got 12, -3, -3"),
        (lambda: nn.MultiheadAttention(9, 3, rope=True), r"head width 3 is odd"),
        (lambda: nn.MultiheadAttention("a", 2), r"\[MultiheadAttention\] sizes are integers.*'a', 2"),
        (lambda: nn.Linear("a", 2), r"\[Linear\] sizes are integers of at least 0: got 'a', 2"),
        (lambda: nn.Linear(-1, 2), r"\[Linear\].*got -1, 2"),
        (lambda: nn.Embedding(-1, 2), r"\[Embedding\].*got -1, 2"),
        (lambda: nn.LayerNorm(2.5), r"\[LayerNorm\].*got 2.5"),
        (lambda: nn.RMSNorm(-1), r"\[RMSNorm\].*got -1"),
        (lambda: nn.Dropout(1.0), r"\[Dropout\] dropout is a probability below 1: got 1.0"),
        (lambda: nn.MultiheadAttention(4, 2, dropout=1.0), r"\[Dropout\].*got 1.0"),
        (lambda: gpt()([]), r"\[Transformer\] ids are \(B, T\): got \(0,\)"),
        (lambda: gpt()([1, 2]), r"\[Transformer\] ids are \(B, T\): got \(2,\)"),
        (lambda: nn.ModuleList([nn.Parameter(np.ones(2))]), r"\[ModuleList\].*as an attribute.*got Parameter"),
        (lambda: nn.ModuleList().append(abs), r"\[ModuleList\] holds Modules"),
        (lambda: nn.Sequential(nn.Parameter(np.ones(2))), r"\[Sequential\] layers are Modules or functions: got"),
        (lambda: nn.MLP(4, activation="swish"), r"\[MLP\] activation is one of gelu.*'swish'"),
        (lambda: gpt(d_model=0), r"d_model is an integer of at least 1: got 0"),
        (lambda: gpt(n_heads=2.0), r"n_heads is an integer of at least 1: got 2.0"),
        (lambda: gpt(n_kv_heads=0), r"n_kv_heads 0"),
        (lambda: gpt(norm="batch"), r"norm is one of layer, rms, none: got 'batch'"),
        (lambda: gpt(position="absolute"), r"position is one of learned, .*none: got 'absolute'"),
        (lambda: gpt(dropout=1.5), r"dropout.*1.5"),
        (lambda: nn.Linear(3, 4)(mg.zeros(2, 5)), r"\[linear\].*x \(2, 5\), w \(3, 4\)"),
        (lambda: nn.LayerNorm(3)(mg.zeros(2, 5)), r"\[layer_norm\].*x \(2, 5\)"),
        (lambda: nn.MultiheadAttention(4, 2)(mg.zeros(2, 3, 5)), r"\[linear\].*x \(2, 3, 5\), w \(4, 12\)"),
        (
            lambda: nn.MultiheadAttention(4, 2)(mg.zeros(2, 3, 4), attn_mask=np.ones((3, 5), bool)),
            r"\(3, 5\).*\(2, 2, 3, 3\)",
        ),
        (
            lambda: nn.MultiheadAttention(4, 2, causal=True)(mg.zeros(2, 3, 4), mg.zeros(2, 5, 4)),
            r"3 queries over 5 keys is ambiguous",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


# --- the Transformer ----------------------------------------------------------------------------------------------


@each_model
def test_later_tokens_do_not_change_earlier_logits(rng, make):
    model = make().to(mg.float64)
    ids = ids_of(rng, (1, 8))
    before = model(ids).numpy()
    for t in range(8):
        other = ids.copy()
        other[0, t] = (ids[0, t] + 1) % 11
        after = model(other).numpy()
        assert np.abs(after[:, :t] - before[:, :t]).max(initial=0.0) <= 1e-12
        assert np.abs(after[:, t] - before[:, t]).max() > 1e-4  # and the change is seen from its place on


def test_batch_rows_do_not_see_one_another(rng):
    model, ids = gpt().to(mg.float64), ids_of(rng)
    near(model(ids)[1:].numpy(), model(ids[1:]).numpy())


@pytest.mark.parametrize(
    "options, count",
    [
        # V C + T C for the tables, then per layer 4 C^2 + 8 C^2 in matrices, 4 C + 5 C in biases and 4 C in norms;
        # 2 C at the end
        (dict(), lambda v, t, c, n: v * c + t * c + n * (12 * c * c + 13 * c) + 2 * c),
        (dict(tied=False), lambda v, t, c, n: 2 * v * c + t * c + n * (12 * c * c + 13 * c) + 2 * c),
        (dict(bias=False), lambda v, t, c, n: v * c + t * c + n * (12 * c * c + 2 * c) + c),
    ],
    ids=["tied", "untied", "no bias"],
)
def test_gpt_parameters_are_counted_by_formula(options, count):
    assert gpt(**options).num_parameters() == count(11, 8, 12, 2)


def test_llama_parameters_are_counted_by_formula():
    v, c, n, d, heads, shared, ff = 11, 12, 2, 4, 3, 1, 20
    assert llama().num_parameters() == 2 * v * c + n * (c * d * (heads + 2 * shared) + c * c + 3 * c * ff + 2 * c) + c


def test_gpt2_small_has_its_published_size():
    """124,439,808 numbers (Radford et al., 2019), from the formula above: nothing so large is made here."""
    v, t, c, n = 50257, 1024, 768, 12
    assert v * c + t * c + n * (12 * c * c + 13 * c) + 2 * c == 124_439_808


@pytest.mark.parametrize("make", [gpt, llama], ids=["gpt", "llama"])
def test_start_deviations(make):
    layers = 3
    model = make(d_model=48, n_layers=layers, vocab_size=100, d_ff=96, tied=False)
    for path, p in model.named_parameters():
        values = p.numpy().astype(np.float64)
        if p.ndim == 1:
            assert (values == (0.0 if path.endswith("bias") else 1.0)).all(), path
            continue
        std = 0.02 / math.sqrt(2 * layers) if path.endswith(("out.weight", "down.weight")) else 0.02
        # a sample's deviation is off by a factor 1 +- 1/sqrt(2 n): five of those, and five standard errors of the mean
        assert abs(values.std() / std - 1.0) < 5.0 / math.sqrt(2 * values.size), path
        assert abs(values.mean()) < 5.0 * std / math.sqrt(values.size), path


@each_model
def test_loss_at_the_start_is_log_v(rng, make):
    """Logits of deviation 0.02 sqrt(C) are near 0, so every one of the V tokens is about as likely."""
    model = make(vocab_size=100)
    assert abs(model.loss(ids_of(rng, size=100), ids_of(rng, size=100)).item() - math.log(100)) < 0.05


def test_gradient_of_the_tied_table_is_the_sum_of_both_uses(rng):
    tied, untied = gpt().to(mg.float64), gpt(tied=False).to(mg.float64)
    state = tied.state_dict()
    untied.load_state_dict({**state, "head.weight": state["embedding.weight"].T})
    ids, targets = ids_of(rng), ids_of(rng)
    one, both = grads_of(tied, ids, targets), grads_of(untied, ids, targets)
    near(one[0], both[0])
    near(one[1]["embedding.weight"], both[1]["embedding.weight"] + both[1]["head.weight"].T)
    assert np.abs(both[1]["embedding.weight"]).max() > 1e-4  # neither use is lost in the other


def test_transformer_in_torch(torch, rng):
    """The whole of GPT-2's arithmetic written with torch.nn.functional: loss and every gradient."""
    model = gpt(mlp="gelu").to(mg.float64)
    for p in model.parameters():
        p.copy_(rng.normal(size=p.shape) * 0.3)
    ids, targets = ids_of(rng), ids_of(rng)
    loss, grads = grads_of(model, ids, targets)
    w = {path: torch.from_numpy(p.numpy()).requires_grad_() for path, p in model.named_parameters()}
    f = torch.nn.functional

    def norm(x, at):
        return f.layer_norm(x, (12,), w[f"{at}.weight"], w[f"{at}.bias"])

    def linear(x, at):
        return x @ w[f"{at}.weight"] + w[f"{at}.bias"]

    x = w["embedding.weight"][torch.from_numpy(ids)] + w["position.weight"][:7]
    for i in range(2):
        q, k, v = (
            part.view(2, 7, 3, 4).transpose(1, 2)
            for part in linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention.qkv").split(12, -1)
        )
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 7, 12)
        x = x + linear(y, f"blocks.{i}.attention.out")
        x = x + linear(f.gelu(linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.up")), f"blocks.{i}.mlp.down")
    logits = norm(x, "norm") @ w["embedding.weight"].T
    theirs = f.cross_entropy(logits.reshape(-1, 11), torch.from_numpy(targets).reshape(-1))
    theirs.backward()
    near(loss, theirs.item())
    same_grads(grads, {path: t.grad.numpy() for path, t in w.items()}, 1e-11)


@each_model
def test_second_order_through_a_whole_model(rng, make):
    """H v from differentiating the gradient, against a central difference of the gradient along v."""
    model = make(n_layers=1).to(mg.float64)
    params = list(model.parameters())
    for p in params:
        p.copy_(rng.normal(size=p.shape) * 0.5)  # far from the start, where second derivatives are near 0
    ids, targets = ids_of(rng), ids_of(rng)
    ways = [rng.normal(size=p.shape) for p in params]
    first = mg.gradients(model.loss(ids, targets), params, create_graph=True)
    along = sum((g * way).sum() for g, way in zip(first, ways))
    hv = mg.gradients(along, params)
    start = [p.numpy() for p in params]

    def gradient_at(h):
        for p, a, way in zip(params, start, ways):
            p.copy_(a + h * way)
        return [g.numpy() for g in mg.gradients(model.loss(ids, targets), params)]

    for h, plus, minus in zip(hv, gradient_at(1e-5), gradient_at(-1e-5)):
        near(h.numpy(), (plus - minus) / 2e-5, 1e-6)


def test_hvp_of_one_weight_is_the_second_derivative_of_the_loss(rng):
    model = gpt(n_layers=1).to(mg.float64)
    table, ids, targets = model.embedding.weight.numpy(), ids_of(rng), ids_of(rng)
    way = rng.normal(size=table.shape)

    def loss(w):  # a Tensor stands where a Parameter stood
        model.embedding.weight = w
        return model.loss(ids, targets)

    curve = (mg.hvp(loss, mg.tensor(table), way) * way).sum().item()
    at = [loss(mg.tensor(table + h * way)).item() for h in (-1e-4, 0.0, 1e-4)]
    near(curve, (at[0] - 2 * at[1] + at[2]) / 1e-8, 1e-5)


@each_model
def test_composed_gives_the_same_loss_and_gradients(rng, make):
    """Also with dropout: the compositions draw the same bits as the kernels."""
    model, ids, targets = make(dropout=0.3).to(mg.float64), ids_of(rng), ids_of(rng)
    mg.manual_seed(3)
    loss, grads = grads_of(model, ids, targets)
    mg.manual_seed(3)
    with mg.composed():
        plain, plain_grads = grads_of(model, ids, targets)
    near(loss, plain)
    same_grads(grads, plain_grads)
    mg.manual_seed(4)
    assert abs(grads_of(model, ids, targets)[0] - loss) > 1e-5  # dropout was at work


@each_model
def test_checkpointed_blocks_give_the_same_gradients(rng, make):
    model, ids, targets = make(dropout=0.3).to(mg.float64), ids_of(rng), ids_of(rng)
    params = list(model.parameters())

    def run():
        mg.manual_seed(3)
        loss = model.loss(ids, targets)
        return loss.item(), mg.get_rng_state(), [g.numpy() for g in mg.gradients(loss, params)]

    loss, state, grads = run()
    model.blocks.layers = [lambda x, mask, block=block: mg.checkpoint(block, x, mask) for block in model.blocks]
    again = run()
    assert again[:2] == (loss, state)
    for a, b in zip(again[2], grads):
        near(a, b)


def test_attention_mask_reaches_every_block(rng):
    """Padding on the left, hidden by a mask, leaves the real tokens as without it (no positions are learned)."""
    model = gpt(position="none").to(mg.float64)
    ids = ids_of(rng, (1, 6))
    padded = np.concatenate([[[9, 9]], ids], axis=1)
    mask = np.zeros((8, 8), bool)
    mask[:, 2:] = True
    mask[:2] = True  # padding sees itself: a row must see something
    near(model(padded, mask)[:, 2:].numpy(), model(ids).numpy())


def test_what_does_not_fit_a_model_is_named(rng):
    model = gpt()
    with pytest.raises(ValueError, match=r"\[Transformer\] 9 tokens do not fit the context of 8"):
        model(ids_of(rng, (1, 9)))
    for bad in (11, -1):  # never wrapped around
        with pytest.raises(IndexError, match=rf"\[embedding\] id {bad} at \(0, 2\) is out of range for size 11"):
            model(np.array([[0, 1, bad]]))
    with pytest.raises(IndexError, match=r"\[cross_entropy\] id 11 at \(0, 1\) is out of range for size 11"):
        model.loss(np.array([[0, 1]]), np.array([[0, 11]]))
    with pytest.raises(TypeError, match="integers"):
        model(np.array([[0.5, 1.0]]))
    with pytest.raises(ValueError, match=r"logits \(1, 3, 11\), targets \(1, 2\)"):
        model.loss(np.zeros((1, 3), int), np.zeros((1, 2), int))
    with pytest.raises(TypeError, match="TransformerConfig, or its fields"):
        nn.Transformer()
    with pytest.raises(TypeError, match="TransformerConfig, or its fields"):
        nn.Transformer(nn.TransformerConfig(**GPT), dropout=0.1)


def test_config_goes_through_a_dict():
    config = nn.TransformerConfig.llama(**LLAMA)
    assert nn.TransformerConfig(**config.to_dict()) == config
    assert (config.norm, config.position, config.mlp, config.bias, config.tied) == (
        "rms",
        "rope",
        "swiglu",
        False,
        False,
    )


# --- generate -----------------------------------------------------------------------------------------------------


def sharp(**changed):
    """A model with weights large enough that its choices are clear of rounding."""
    model = gpt(**changed)
    for p in model.parameters():
        p.copy_(p.numpy() * 10.0)
    return model


def test_greedy_takes_the_likeliest_of_the_last_context_tokens(rng):
    model = sharp()
    prompt = ids_of(rng, (2, 5))
    out = model.generate(prompt, 6, temperature=0)  # 11 tokens: longer than the context of 8
    assert out.dtype == np.int64 and out.shape == (2, 11)
    assert (out[:, :5] == prompt).all()
    for t in range(5, 11):
        assert (out[:, t] == model(out[:, max(0, t - 8) : t]).numpy()[:, -1].argmax(-1)).all()
    assert (model.generate(prompt, 6, temperature=0) == out).all()
    assert (model.generate(prompt, 6, top_k=1) == out).all()
    assert len(np.unique(out[:, 5:])) > 1  # not one token over and over, which any bug would pass


def test_same_seed_same_sample(rng):
    model, prompt, samples = gpt(), ids_of(rng), []
    for seed in (5, 5, 6):
        mg.manual_seed(seed)
        samples.append(model.generate(prompt, 20))
    assert (samples[0] == samples[1]).all()
    assert (samples[0] != samples[2]).any()


def test_samples_follow_the_softmax(rng):
    """Shares of 4,000 draws against softmax(logits / T), within five standard errors; top_k keeps the likeliest."""
    model, n = sharp(), 4000
    prompt = np.repeat(ids_of(rng, (1, 4)), n, axis=0)
    logits = model(prompt[:1]).numpy()[0, -1].astype(np.float64)
    for temperature, top_k in ((1.0, None), (2.0, None), (1.0, 3)):
        p = np.exp((logits - logits.max()) / temperature)
        if top_k:
            p[np.argsort(p)[:-top_k]] = 0.0
        p /= p.sum()
        drawn = np.bincount(model.generate(prompt, 1, temperature, top_k)[:, -1], minlength=11) / n
        assert (np.abs(drawn - p) <= 5.0 * np.sqrt(p * (1 - p) / n)).all()
        assert (drawn[p == 0.0] == 0.0).all()


def test_generate_leaves_the_model_as_it_was(rng):
    model = gpt(dropout=0.5)
    a = model.generate(ids_of(rng), 5, temperature=0)
    assert model.training and all(m.training for m in model.modules())
    assert (
        a == model.eval().generate(ids_of(np.random.default_rng(0)), 5, temperature=0)
    ).all()  # no dropout while writing
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "ids, options, message",
    [
        (np.zeros((1, 0), int), {}, "a prompt of at least one token"),
        (np.zeros(3, int), {}, r"ids \(B, T\) or a list of rows: got \(3,\)"),
        (np.array([[0, 11]]), {}, r"id 11 at \(0, 1\) is out of range for size 11"),
        (np.array([[99] + [0] * 9]), {}, r"id 99 at \(0, 0\) is out of range for size 11"),  # also left of the context
        (np.array([[0.5]]), {}, "ids are integers"),
        (np.array([[0]]), dict(temperature=-1.0), "temperature is at least 0"),
        (np.array([[0]]), dict(temperature=math.nan), "temperature is at least 0"),
        (np.array([[0]]), dict(top_k=0), "top_k is an integer of at least 1"),
        (np.array([[0]]), dict(n=-1), "-1"),
    ],
)
def test_what_generate_refuses(ids, options, message):
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        gpt().generate(ids, **{"n": 2, **options})


# --- Module -------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Members of every kind: in lists, tuples, dicts and lists of lists, shared, buffers, and what is not a member."""

    def __init__(self):
        self.first = nn.Linear(2, 3)
        self.many = [nn.Linear(3, 3, bias=False), nn.Parameter(np.ones(3, np.float32))]
        self.pair = (nn.Linear(1, 1, bias=False),)
        self.by_name = {"a": nn.Linear(3, 1), "b": nn.Parameter(np.zeros((), np.float32))}
        self.nested = [[nn.Linear(1, 2, bias=False)], {"deep": nn.Linear(2, 1, bias=False)}]
        self.again = self.first  # shared: counted once
        self.alias = self.first.weight
        self.scale = mg.tensor([2.0, 3.0])  # a buffer
        self._hidden = nn.Linear(9, 9)
        self.width, self.nothing, self.words = 3, None, ["a", "b"]


def test_members_are_found_once_each_in_order_of_assignment():
    module = Everything()
    # a shared tensor goes by the name nearest the top
    trained = [
        "alias",
        "first.bias",
        "many.0.weight",
        "many.1",
        "pair.0.weight",
        "by_name.a.weight",
        "by_name.a.bias",
        "by_name.b",
        "nested.0.0.weight",
        "nested.1.deep.weight",
    ]
    assert sorted(path for path, _ in module.named_parameters()) == sorted(trained)
    assert set(module.state_dict()) == {*trained, "scale"}
    assert module.num_parameters() == 6 + 3 + 9 + 3 + 1 + 3 + 1 + 1 + 2 + 2
    assert len(list(module.parameters())) == len({id(p) for p in module.parameters()}) == len(trained)
    assert list(dict(nn.MLP(2).named_parameters())) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert all(p.path == path for path, p in module.named_parameters())


def test_shared_layers_receive_the_gradient_of_both_uses(rng):
    layer = nn.Linear(3, 3, bias=False).to(mg.float64)
    twice = nn.Sequential(layer, layer)
    assert [path for path, _ in twice.named_parameters()] == ["0.weight"]
    x, w = rng.normal(size=(2, 3)), layer.weight.numpy()
    twice(mg.tensor(x)).sum().backward()
    ones = np.ones((2, 3))  # y = x W W: d/dW = x^T (1 W^T) + (x W)^T 1
    near(layer.weight.grad.numpy(), x.T @ (ones @ w.T) + (x @ w).T @ ones)


def test_sequential_takes_functions_and_lists_are_not_called(rng):
    module = nn.Sequential(nn.Linear(3, 4), F.relu, nn.Dropout(0.5), nn.Linear(4, 2))
    assert list(module.state_dict()) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert module(mg.randn(5, 3)).shape == (5, 2) and len(module) == 4 and isinstance(module[3], nn.Linear)
    several = nn.ModuleList([nn.Linear(1, 1)]).append(nn.Linear(1, 1))
    assert len(list(several)) == 2
    with pytest.raises(TypeError, match="ModuleList"):
        several(mg.zeros(1))


def test_train_and_eval_return_the_module_and_switch_dropout():
    module = nn.Sequential(nn.Sequential(nn.Dropout(0.5)))
    x = mg.ones(1000)
    assert module.training and set(module(x).tolist()) == {0.0, 2.0}  # kept values are divided by 1 - p
    assert module.eval() is module and not module[0][0].training
    assert (module(x).numpy() == 1.0).all()
    assert module.train() is module and module[0][0].training
    assert module.train(False) is module and not module.training


def test_attention_dropout_follows_training():
    layer = nn.MultiheadAttention(8, 2, dropout=0.5)
    x = mg.randn(1, 6, 8)
    assert (layer(x).numpy() != layer(x).numpy()).any()
    layer.eval()
    assert (layer(x).numpy() == layer(x).numpy()).all()


def test_requires_grad_freezes(rng):
    model = gpt()
    assert model.blocks.requires_grad_(False) is model.blocks
    grads = {}
    model.loss(ids_of(rng), ids_of(rng)).backward()
    grads = {path: p.grad for path, p in model.named_parameters()}
    assert {path.split(".")[0] for path, g in grads.items() if g is not None} == {"embedding", "position", "norm"}
    model.requires_grad_(False)
    assert not model.loss(ids_of(rng), ids_of(rng)).requires_grad
    model.requires_grad_()
    assert model.loss(ids_of(rng), ids_of(rng)).requires_grad


def test_to_keeps_the_parameters_and_the_optimiser(rng):
    """The same run, moved to float64 before the first step and after it, is the run that was float64 throughout."""
    ids, targets = ids_of(rng), ids_of(rng)
    finals = []
    for move_at in (0, 1):
        mg.manual_seed(1)
        model = gpt()
        params = list(model.parameters())
        optimizer = mg.optim.AdamW(params, lr=1e-2)
        for step in range(4):
            if step == move_at:
                assert model.to(mg.float64) is model
                assert all(a is b for a, b in zip(params, model.parameters()))
                assert {p.dtype for p in params} == {mg.float64}
            model.loss(ids, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {p.dtype for p in params} == {mg.float64}
        assert {a.dtype for slots in optimizer.state.values() for n, a in slots.items() if n != "step"} == {mg.float64}
        finals.append([p.numpy() for p in params])
    for a, b in zip(*finals):
        near(
            a, b, 2e-2
        )  # one step in float32: where a gradient is rounding, Adam's step is of size lr whatever its sign
    assert max(np.abs(a - b).max() for a, b in zip(*finals)) > 0.0


def test_to_refuses_what_cannot_be_and_changes_nothing(rng):
    model = gpt()
    with pytest.raises((TypeError, ValueError), match="int64"):
        model.to(mg.int64)
    loss = model.norm(mg.randn(2, 12, requires_grad=True)).sum()  # holds its weight, near the end of the list
    with pytest.raises(RuntimeError, match=r"\[Module.to\] a live graph still needs"):
        model.to(mg.float64)
    assert {p.dtype for p in model.parameters()} == {mg.float32}  # not half of them
    loss.backward()
    model.to(mg.float64)


def test_deepcopy_is_independent(rng):
    model, ids, targets = gpt(), ids_of(rng), ids_of(rng)
    grads_of(model, ids, targets)
    twin = copy.deepcopy(model)
    assert twin(ids).numpy().tobytes() == model(ids).numpy().tobytes()
    mine, others = dict(model.named_parameters()), dict(twin.named_parameters())
    assert mine.keys() == others.keys()  # a tied or shared parameter stays shared
    before = model(ids).numpy()
    for path, p in others.items():
        assert p is not mine[path] and isinstance(p, nn.Parameter) and p.requires_grad
        assert (p.grad.numpy() == mine[path].grad.numpy()).all() and p.grad is not mine[path].grad
        p.copy_(p.numpy() + 1.0)
    assert model(ids).numpy().tobytes() == before.tobytes()
    shared = copy.deepcopy(Everything())
    assert shared.alias is shared.first.weight


def test_repr_can_be_read():
    assert repr(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.LayerNorm(3, bias=False))) == (
        "Sequential(\n  0: Linear(\n    weight: Parameter(2, 3)\n    bias: Parameter(3,)\n  )\n  1: Dropout()\n"
        "  2: LayerNorm(\n    weight: Parameter(3,)\n  )\n)"
    )
    assert "scale: buffer(2,)" in repr(Everything())


# --- state_dict ---------------------------------------------------------------------------------------------------


@each_model
def test_state_goes_through_a_file_bit_for_bit(rng, make, tmp_path):
    one, other, ids = make(), make(), ids_of(rng)
    assert one(ids).numpy().tobytes() != other(ids).numpy().tobytes()
    mg.save(tmp_path / "m.safetensors", one.state_dict())
    other.load_state_dict(mg.load(tmp_path / "m.safetensors"))
    for (path, a), (name, b) in zip(one.named_parameters(), other.named_parameters()):
        assert path == name and a.numpy().tobytes() == b.numpy().tobytes()
    assert one(ids).numpy().tobytes() == other(ids).numpy().tobytes()


def test_buffers_are_saved_and_not_trained():
    module = Everything()
    module.load_state_dict({**module.state_dict(), "scale": np.array([5.0, 6.0], np.float32)})
    assert module.scale.tolist() == [5.0, 6.0] and not module.scale.requires_grad
    assert module.to(mg.float64).scale.dtype == mg.float64


def test_a_state_that_does_not_fit_changes_nothing_and_names_it_all():
    model = gpt()
    before = {path: x.numpy() for path, x in model.state_dict().items()}
    state = {path: mg.zeros_like(x) for path, x in model.state_dict().items()}
    del state["norm.weight"], state["blocks.1.mlp.up.bias"]
    state |= {"extra": mg.zeros(1), "head.weight": mg.zeros(12, 11), "norm.bias": mg.zeros(13), "position.weight": 3.0}
    with pytest.raises(ValueError, match=r"\[load_state_dict\].*Transformer") as error:
        model.load_state_dict(state)
    for part in (
        "missing norm.weight",
        "missing blocks.1.mlp.up.bias",
        "unknown extra",
        "unknown head.weight",
        "misshapen norm.bias: (13,)",
        "(12,)",
        "misshapen position.weight",
    ):
        assert part in str(error.value)
    assert "embedding" not in str(error.value)  # what fits is not named
    for path, x in model.state_dict().items():
        assert x.numpy().tobytes() == before[path].tobytes()
    with pytest.raises(ValueError, match="misshapen norm.bias"):
        model.load_state_dict(state, strict=False)  # missing and unknown are allowed, a wrong shape never
    del state["norm.bias"], state["position.weight"]
    model.load_state_dict(state, strict=False)
    assert (model.embedding.weight.numpy() == 0.0).all() and (model.norm.weight.numpy() == 1.0).all()


def test_entries_that_are_not_numbers_change_nothing():
    model = nn.Linear(2, 2)
    before = model.weight.numpy()
    with pytest.raises(ValueError, match="bias"):
        model.load_state_dict({"weight": np.zeros((2, 2)), "bias": np.array(["a", "b"])})
    assert (model.weight.numpy() == before).all()


def test_loaded_values_are_cast_and_copied():
    model, given = nn.Linear(2, 2, bias=False), np.ones((2, 2))
    model.load_state_dict({"weight": given})
    assert model.weight.dtype == mg.float32  # the module's dtype stays
    given[:] = 7.0
    assert (model.weight.numpy() == 1.0).all()


def test_float32_stays_float32(rng):
    for make in MODELS.values():
        model = make(dropout=0.1)
        logits = model(ids_of(rng))
        loss, grads = grads_of(model, ids_of(rng), ids_of(rng))
        assert logits.dtype == mg.float32 and {g.dtype for g in grads.values()} == {np.dtype("float32")}


def test_a_sequential_has_members_of_its_own():
    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(2, 3), F.relu, nn.Linear(3, 1))
            self.scale = nn.Parameter(np.ones(1, np.float32))

    assert [path for path, _ in Net().named_parameters()] == ["scale", "0.weight", "0.bias", "2.weight", "2.bias"]


def test_modules_may_point_in_a_circle():
    parent = nn.Module()
    parent.child = nn.Linear(2, 3)
    parent.child.parent = parent
    assert [path for path, _ in parent.named_modules()] == ["", "child"]
    assert [path for path, _ in parent.named_parameters()] == ["child.weight", "child.bias"]
    assert "parent: ..." in repr(parent) and copy.deepcopy(parent).child.parent is not parent


def test_modules_are_as_deep_as_they_are():
    deep = nn.Linear(1, 1)
    for _ in range(3000):
        deep = nn.Sequential(deep)
    assert deep.num_parameters() == 2


def test_evaluating_gives_every_module_its_own_mode_back(rng):
    model = gpt(dropout=0.5)
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    assert True in before and False in before
    model.generate(ids_of(rng, (1, 2)), 2)
    with pytest.raises(KeyError), model.evaluating():
        assert not any(module.training for module in model.modules()) and not model(ids_of(rng)).requires_grad
        raise KeyError
    assert [module.training for module in model.modules()] == before and model(ids_of(rng)).requires_grad


@pytest.mark.parametrize("bad", [np.zeros(2, "V4"), np.zeros(2, [("a", "f4"), ("b", "f4")]), np.zeros(2, complex)])
def test_an_entry_that_cannot_be_cast_changes_nothing(bad):
    model = nn.Linear(2, 2)
    before = model.weight.numpy()
    with pytest.raises(ValueError, match="bias holds no real numbers"):
        model.load_state_dict({"weight": np.zeros((2, 2)), "bias": bad})
    assert (model.weight.numpy() == before).all()


def test_entries_of_a_models_own_state_can_be_swapped():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    state = model.state_dict()
    a, b = state["0.weight"].numpy(), state["1.weight"].numpy()
    model.load_state_dict({"0.weight": state["1.weight"], "1.weight": state["0.weight"]})
    assert (model[0].weight.numpy() == b).all() and (model[1].weight.numpy() == a).all()


def test_sizes_and_switches_of_layers_are_what_they_say():
    """True is no size, 0 is no "default", and an option that the layer would never look at is still checked."""
    for make, message in [
        (lambda: nn.Linear(True, 2), r"\[Linear\] sizes are integers of at least 0: got True, 2"),
        (lambda: nn.MLP(4, d_ff=True), r"\[Linear\] sizes are integers"),
        (lambda: nn.Dropout("a"), r"\[Dropout\] dropout is a number: got str"),
        (lambda: nn.MultiheadAttention(8, 2, d_head=0), r"d_head is an integer of at least 1, or None: got 0"),
        (lambda: nn.MultiheadAttention(8, 2, window=-1), r"\[MultiheadAttention\] sizes are integers"),
        (lambda: nn.MultiheadAttention(8, 2, rope="a"), r"\[MultiheadAttention\] rope is a number: got str"),
        (lambda: nn.MultiheadAttention(8, 2, rope=True, rope_fraction="a"), r"rope_fraction is a number: got str"),
        (lambda: nn.MultiheadAttention(8, 2, empty_rows="zero"), r'empty_rows is "raise" or "zeros": got \'zero\''),
        (lambda: nn.MultiheadAttention(8, 2)(mg.zeros(8)), r"\[MultiheadAttention\] x is \(B, T, C\): got \(8,\)"),
        (lambda: nn.MultiheadAttention(8, 2)("a"), r"\[MultiheadAttention\] x is a Tensor, an array or a list"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            make()
    assert nn.MLP(4, d_ff=0)(mg.zeros(1, 4)).shape == (1, 4)         # no hidden units: the bias of `down` alone


def test_ctrl_c_on_the_way_into_evaluating_leaves_no_module_behind():
    """The modes are put back whichever of the modules were reached."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    whole = model.eval

    def interrupted():
        whole()
        raise KeyboardInterrupt

    model.eval = interrupted
    with pytest.raises(KeyboardInterrupt), model.evaluating():
        pass
    assert all(module.training for module in model.modules())
