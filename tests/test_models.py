"""Models by config: blocks against their formulas and PyTorch, padding on both sides, initial weights, the ledger."""

import json
import math
import tracemalloc

import numpy as np
import pytest
from conftest import kernels

import minigrad as mg
import minigrad.functional as F
from minigrad import nn

GPT = dict(vocab_size=13, context=10, d_model=8, n_layers=2, n_heads=2)
PAIR = dict(vocab_size=9, source_vocab=11, context=12, d_model=8, n_layers=2, n_heads=2)


def near(a, b, tol=1e-12):
    np.testing.assert_allclose(a, b, rtol=tol, atol=tol)


def jolted(model):
    """In float64, with every parameter moved, so that zeros and ones hide nothing."""
    rng = np.random.default_rng(0)
    model.to(mg.float64)
    for p in model.parameters():
        p.copy_(p.numpy() + 0.3 * rng.normal(size=p.shape))
    return model


def ids_of(shape, n=13, seed=1):
    return np.random.default_rng(seed).integers(3, n, shape)


# ------------------------------------------------------------------------------------------------------------ blocks


def test_block_orders_are_their_formulas():
    x = mg.tensor(np.random.default_rng(0).normal(size=(2, 5, 8)))

    def block(order):
        return jolted(nn.TransformerBlock(nn.TransformerConfig(**GPT, block=order)))

    b = block("pre")
    y = x + b.attention(b.norm1(x))
    near(b(x).numpy(), (y + b.mlp(b.norm2(y))).numpy())
    b = block("post")
    y = b.norm1(x + b.attention(x))
    near(b(x).numpy(), b.norm2(y + b.mlp(y)).numpy())
    b = block("parallel")
    near(b(x).numpy(), (x + b.attention(b.norm1(x)) + b.mlp(b.norm1(x))).numpy())
    assert b.norm2 is None                               # one norm serves both branches


def test_a_post_norm_model_ends_in_its_blocks_norm():
    assert nn.Transformer(**GPT, block="post").norm is None and nn.Transformer(**GPT).norm is not None


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("implementation", ["composed", "fused", "tiled"])
def test_position_biases_are_added_to_the_scores(kind, implementation):
    """Against softmax(q k / sqrt(D) + bias) v written out, with the bias from the distance alone."""
    model = jolted(nn.Transformer(**GPT, position=kind))
    layer, bias = model.blocks[0].attention, model.position_bias(5, 5)
    layer.implementation = implementation
    x = np.random.default_rng(0).normal(size=(2, 5, 8))
    packed = (x @ layer.qkv.weight.numpy() + layer.qkv.bias.numpy()).reshape(2, 5, 3, 2, 4).transpose(2, 0, 3, 1, 4)
    scores = packed[0] @ packed[1].swapaxes(-1, -2) / 2.0
    for i in range(5):
        for j in range(5):
            for h in range(2):
                slope = 2.0 ** (-4 * (h + 1))            # Press et al.: of two heads 2^-4 and 2^-8
                at = -slope * (i - j) if kind == "alibi" else model.position_bias.table.weight.numpy()[max(i - j, 0), h]
                scores[:, h, i, j] = scores[:, h, i, j] + at if j <= i else -np.inf
    a = np.exp(scores - scores.max(-1, keepdims=True))
    y = (a / a.sum(-1, keepdims=True) @ packed[2]).swapaxes(1, 2).reshape(2, 5, 8)
    near(layer(mg.tensor(x), attn_mask=bias).numpy(), y @ layer.out.weight.numpy() + layer.out.bias.numpy(), 1e-6)


@pytest.mark.parametrize("fields", [
    dict(position="t5"), dict(sinks=True, softcap=3.0), dict(logit_softcap=2.0, scale_embedding=True),
    dict(position="rope", rope_fraction=0.5, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    dict(block="post", position="alibi"), dict(block="parallel", position="sinusoidal"),
    dict(n_experts=3, top_k=2, mlp="gelu"),
], ids=str)
def test_every_part_gets_its_gradient(fields):
    """The slope of the loss along a random direction in all parameters, and a gradient for each of them."""
    model = jolted(nn.Transformer(**GPT, **fields))
    ids, params = ids_of((2, 7)), list(model.parameters())
    grads = mg.gradients(model.loss(ids[:, :-1], ids[:, 1:]), params)
    rng, h = np.random.default_rng(3), 1e-5
    directions = [rng.normal(size=p.shape) for p in params]
    start = [p.numpy() for p in params]
    losses = []
    for sign in (1, -1):
        for p, a, d in zip(params, start, directions):
            p.copy_(a + sign * h * d)
        losses.append(model.loss(ids[:, :-1], ids[:, 1:]).item())
    slope = sum((g.numpy() * d).sum() for g, d in zip(grads, directions))
    near((losses[0] - losses[1]) / (2 * h), slope, 1e-6)
    for (path, _), g in zip(model.named_parameters(), grads):
        assert g.numpy().any() or "experts" in path, path        # an expert may have had no token


def test_masks_of_both_kinds_join_position_biases():
    """A hidden key is hidden whether the mask is boolean or -inf, also beside ALiBi's float mask."""
    model = jolted(nn.Transformer(**GPT, position="alibi"))
    ids = ids_of((1, 6))
    seen = np.ones((6, 6), bool)
    seen[3:, 1] = False
    a, b = model(ids, seen).numpy(), model(ids, np.where(seen, 0.0, -np.inf)).numpy()
    near(a, b)
    assert abs(a - model(ids).numpy()).max() > 1e-3


@pytest.mark.parametrize("fields, message", [
    (dict(block="sandwich"), "block is one of pre, post, parallel: got 'sandwich'"),
    (dict(init="zeros"), "init is one of gpt2, xavier, small, default: got 'zeros'"),
    (dict(logit_softcap=0.0), "logit_softcap is finite and above 0: got 0.0"),
    (dict(softcap=-1.0), "softcap is finite and above 0: got -1.0"),
    (dict(position="rope", rope_base=0), "rope_base is finite and above 1: got 0"),      # was: no positions at all
    (dict(d_head=0), "d_head is an integer of at least 1, or None: got 0"),              # was: the default
    (dict(window=0), "window is an integer of at least 1, or None: got 0"),              # was: found by the first pass
    (dict(window=True), "sizes are integers"), (dict(d_ff=True), "sizes are integers"),
    (dict(n_experts=4, balance=math.nan), "balance is a finite number: got nan"),
    (dict(n_experts=4, mlp="none"), "a mixture of experts needs an mlp"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling is for rotary positions: got position"),
    (dict(position="rope", rope_scaling={"type": "cubic"}), "is one of default, linear"),
    (dict(position="rope", rope_fraction=0.0), "rope_fraction is above 0 and at most 1: got 0.0"),
    (dict(position="rope", rope_fraction=0.25), "rotary positions turn pairs: 1 of the head width 4 is odd or none"),
    (dict(n_experts=2, top_k=3), "top_k"),
    (dict(position="sinusoidal", d_model=7, n_heads=1), "d_model is an even integer"),
])
def test_configs_that_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        model = nn.Transformer(**{**GPT, **fields})
        model(ids_of((1, 3)))


# ----------------------------------------------------------------------------------------------------- first weights


def test_initial_deviations_are_the_published_ones():
    sizes = dict(vocab_size=300, context=8, d_model=96, n_layers=4, n_heads=4)
    joins = ("attention.out.weight", "down.weight")

    def deviations(init):
        model = nn.Transformer(**sizes, init=init)
        return {path: (float(p.numpy().std()), p.shape, path.endswith(joins)) for path, p in model.named_parameters()
                if p.ndim == 2 and p.size > 2000}

    for std, _, join in deviations("gpt2").values():
        assert std == pytest.approx(0.02 / math.sqrt(8) if join else 0.02, rel=0.05)
    for std, _, join in deviations("small").values():
        assert std == pytest.approx(2 / (4 * math.sqrt(96)) if join else math.sqrt(2 / (5 * 96)), rel=0.05)
    for std, shape, _ in deviations("xavier").values():
        assert std == pytest.approx(math.sqrt(2 / sum(shape)), rel=0.05)
    assert deviations("default")["embedding.weight"][0] == pytest.approx(1.0, rel=0.05)


# --------------------------------------------------------------------------------------------------- encoder-decoder


def padded(rows, pad=0):
    out = np.full((len(rows), max(map(len, rows))), pad)
    for i, row in enumerate(rows):
        out[i, :len(row)] = row
    return out


@pytest.mark.parametrize("fields", [{}, dict(position="t5"), dict(position="alibi", window=3), dict(position="rope")],
                         ids=str)
def test_padding_on_both_sides_changes_nothing(fields):
    """Each pair alone, or filled up in a batch: the same logits where there is text, the same loss and gradients."""
    model = jolted(nn.EncoderDecoder(**PAIR, **fields))
    rng = np.random.default_rng(2)
    sources = [rng.integers(3, 11, n) for n in (5, 2, 7)]
    targets = [np.array([1, *rng.integers(3, 9, n), 2]) for n in (1, 6, 3)]
    source, target = padded(sources), padded(targets)
    params = list(model.parameters())
    logits = model(source, target).numpy()
    total, grads = 0.0, [np.zeros(p.shape) for p in params]
    for i, (s, t) in enumerate(zip(sources, targets)):
        near(logits[i, :len(t)], model(s[None], t[None]).numpy()[0], 1e-10)
        loss = model.loss(s[None], t[None]) * (len(t) - 1)
        total += loss.item()
        for g, new in zip(grads, mg.gradients(loss, params)):
            g += new.numpy()
    n = sum(len(t) - 1 for t in targets)
    loss = model.loss(source, target)
    near(loss.item(), total / n, 1e-10)
    for g, whole in zip(grads, mg.gradients(loss, params)):
        near(whole.numpy(), g / n, 1e-9)


def test_the_decoder_reads_the_source_and_not_ahead():
    model = jolted(nn.EncoderDecoder(**PAIR))
    source, target = ids_of((1, 5), 11), np.array([[1, 4, 5, 6]])
    a = model(source, target).numpy()
    changed = target.copy()
    changed[0, 2] = 7
    near(model(source, changed).numpy()[:, :2], a[:, :2])
    assert abs(model(source, changed).numpy()[:, 2:] - a[:, 2:]).max() > 1e-3
    assert abs(model(source[:, ::-1], target).numpy() - a).max() > 1e-3


@pytest.mark.parametrize("order", ["pre", "post"])
def test_blocks_equal_torch(torch, order):
    """Encoder and decoder layers, from the same weights (PyTorch stores them transposed)."""
    c = nn.EncoderDecoderConfig(**PAIR, block=order, mlp="relu", d_ff=20)
    options = dict(d_model=8, nhead=2, dim_feedforward=20, dropout=0.0, batch_first=True, norm_first=order == "pre",
                   dtype=torch.float64)
    x, memory = (np.random.default_rng(s).normal(size=(2, n, 8)) for s, n in ((0, 5), (1, 6)))
    padding = np.arange(6) < np.array([[6], [4]])

    def load(theirs, ours):
        """[(their module, our module)]: linears and norms, and packed projections."""
        with torch.no_grad():
            for t, m in zip(theirs, ours):
                packed = m.qkv if isinstance(m, nn.MultiheadAttention) else m
                weight, bias = packed.weight, packed.bias
                names = ("in_proj_weight", "in_proj_bias") if hasattr(t, "in_proj_weight") else ("weight", "bias")
                getattr(t, names[0]).copy_(torch.tensor(weight.numpy().T))
                getattr(t, names[1]).copy_(torch.tensor(bias.numpy()))
                if names[0] == "in_proj_weight":
                    t.out_proj.weight.copy_(torch.tensor(m.out.weight.numpy().T))
                    t.out_proj.bias.copy_(torch.tensor(m.out.bias.numpy()))

    ours = jolted(nn.TransformerBlock(c, causal=False))
    theirs = torch.nn.TransformerEncoderLayer(**options)
    load([theirs.self_attn, theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2],
         [ours.attention, ours.mlp.up, ours.mlp.down, ours.norm1, ours.norm2])
    expected = theirs.train()(torch.tensor(memory), src_key_padding_mask=torch.tensor(~padding)).detach().numpy()
    near(ours(mg.tensor(memory), padding[:, None, None]).numpy()[padding], expected[padding], 1e-9)

    ours = jolted(nn.TransformerBlock(c, cross=True))
    theirs = torch.nn.TransformerDecoderLayer(**options)
    load([theirs.self_attn, theirs.multihead_attn, theirs.linear1, theirs.linear2, theirs.norm1, theirs.norm2,
          theirs.norm3],
         [ours.attention, ours.cross, ours.mlp.up, ours.mlp.down, ours.norm1, ours.norm_cross, ours.norm2])
    ahead = torch.triu(torch.full((5, 5), -np.inf), 1).double()
    expected = theirs(torch.tensor(x), torch.tensor(memory), tgt_mask=ahead,
                      memory_key_padding_mask=torch.tensor(~padding)).detach().numpy()
    near(ours(mg.tensor(x), context=mg.tensor(memory), context_mask=padding[:, None, None]).numpy(), expected, 1e-9)


@pytest.mark.parametrize("make, message", [
    (lambda: nn.EncoderDecoder(**PAIR, pad=1), r"pad, begin and end are different tokens.*got \(1, 1, 2\)"),
    (lambda: nn.EncoderDecoder(**PAIR, end=9), r"got \(0, 1, 9\)"),
    (lambda: nn.EncoderDecoder(**PAIR, block="parallel"), 'block is "pre" or "post"'),
    (lambda: nn.EncoderDecoder(**{**PAIR, "source_vocab": 0}), "source_vocab is an integer of at least 1, or None"),
    (lambda: nn.EncoderDecoder(**PAIR)(np.zeros((2, 3), int), np.ones((2, 2), int)), "row 0 has none"),
    (lambda: nn.EncoderDecoder(**PAIR)(np.full((2, 3), 4), np.ones((1, 2), int)), "the same rows: 2 and 1"),
    (lambda: nn.EncoderDecoder(**PAIR)(np.full((2, 13), 4), np.ones((2, 2), int)), "13 source tokens do not fit"),
    (lambda: nn.EncoderDecoder(**PAIR)(np.full((2, 3), 11), np.ones((2, 2), int)), "id 11 .* for size 11"),
    (lambda: nn.EncoderDecoder(**PAIR)(np.full((2, 3), 4), np.ones(2, int)), r"target is \(B, T\) tokens.*got \(2,\)"),
    (lambda: nn.EncoderDecoder(), "give an EncoderDecoderConfig, or its fields"),
])
def test_what_an_encoder_decoder_refuses(make, message):
    with pytest.raises((ValueError, IndexError, TypeError), match=message):
        make()


def test_a_shared_vocabulary_shares_its_table():
    model = nn.EncoderDecoder(**{**PAIR, "source_vocab": None})
    assert model.source_embedding is model.embedding
    assert sum(path.endswith("embedding.weight") for path, _ in model.named_parameters()) == 1


# -------------------------------------------------------------------------------------------------------- the ledger


def test_ledger_counts_in_closed_form():
    """GPT with C = 32, d_ff = 4 C, V = 50, over T = 16 tokens: products of weights, and attention's causal half."""
    c, t, v, layers, heads = 32, 16, 50, 3, 4
    model = nn.Transformer(vocab_size=v, context=t, d_model=c, n_layers=layers, n_heads=heads)
    with kernels():                                      # a composition multiplies the hidden half too
        ledger = model.summary(batch=2)
    weights = 3 * c * c + c * c + 8 * c * c              # qkv, out, up and down
    pairs = (t + 1) / 2                                  # keys that a token sees, on average
    forward = layers * (2 * weights + 4 * c * pairs) + 2 * c * v
    assert ledger.total["forward"] == forward
    assert ledger.total["backward"] == 2 * forward
    assert ledger.total["parameters"] == model.num_parameters()
    assert ledger.rows["blocks.1.attention"]["forward"] == 2 * 4 * c * c + 4 * c * pairs
    assert ledger.rows["blocks.1.mlp"]["parameters"] == model.blocks[1].mlp.up.weight.size * 2 + 5 * c
    assert ledger.total["cache"] == layers * 2 * c * 4


@pytest.mark.parametrize("fields", [
    {}, dict(n_kv_heads=2, position="rope", norm="rms", mlp="swiglu", tied=False), dict(n_kv_heads=1),
    dict(dropout=0.1), dict(block="parallel", window=4, position="rope"), dict(n_experts=4, position="rope"),
], ids=str)
def test_the_ledger_is_what_a_run_measures(fields):
    """Activations: the growth of traced memory by a recorded pass. Cache: the growth of a cache, token by token."""
    sizes = dict(vocab_size=50, context=64, d_model=32, n_layers=2, n_heads=4)
    model = nn.Transformer(**{**sizes, **fields})
    ids = np.zeros((4, 64), np.int64)
    ledger = model.summary(batch=4)
    model.loss(ids, ids)                                 # what is made once is there
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    loss = model.loss(ids, ids)
    measured = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    counted = ledger.total["activations"] * ids.size
    assert counted == pytest.approx(measured, rel=0.05)  # traced memory also holds nodes and the like
    del loss
    with model.evaluating():
        cache = model.cache(4, capacity=64)
        model(ids, cache=cache)
        if "window" not in fields:
            assert cache.nbytes == 4 * 64 * ledger.total["cache"]


def test_the_ledger_changes_nothing_and_says_which_heads():
    model = nn.Transformer(**GPT, n_kv_heads=1, dropout=0.5)
    mg.manual_seed(3)
    state, weights = mg.get_rng_state(), model.state_dict()["embedding.weight"].numpy()
    text = str(model.summary())
    assert mg.get_rng_state() == state and (model.embedding.weight.numpy() == weights).all()
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert "multi-query (MQA): 2 query heads over 1" in text and "blocks.1.mlp" in text
    shared = nn.Transformer(**{**GPT, "n_heads": 4, "n_kv_heads": 2})
    assert "grouped-query (GQA): 4 query heads over 2" in str(shared.summary())
    with mg.no_grad():
        assert str(model.summary()) == text              # also where nothing is recorded


def test_a_ledger_of_any_module():
    ledger = nn.summarize(nn.Sequential(nn.Linear(4, 8), F.relu, nn.Linear(8, 2)), mg.zeros(5, 4))
    assert ledger.tokens == 5 and ledger.total["forward"] == 2 * (4 * 8 + 8 * 2)
    assert ledger.total["backward"] == 2 * (4 * 8) + 4 * (8 * 2)     # no gradient is asked of the input
    assert "0" in ledger.rows and "2" in ledger.rows


def test_an_encoder_decoder_has_a_ledger():
    model = nn.EncoderDecoder(**PAIR)
    ledger = model.summary()
    assert ledger.total["parameters"] == model.num_parameters()
    # k and v of two attentions of each decoder layer, float32: the encoder's are used once and never held
    assert ledger.total["cache"] == 2 * 2 * model.config.n_layers * model.config.d_model * 4
    # as many target positions as source positions are computed: the head's product is that of one token for one
    assert ledger.rows["(itself)"]["forward"] == 2 * model.config.d_model * model.config.vocab_size
    assert {"encoder.0.attention", "blocks.1.cross", "blocks.1.mlp"} <= set(ledger.rows)


@pytest.mark.parametrize("tokens", [dict(batch=0), dict(tokens=0), dict(batch=-1), dict(tokens="a"), dict(batch=True)])
@pytest.mark.parametrize("make", [lambda: nn.Transformer(**GPT), lambda: nn.EncoderDecoder(**PAIR)])
def test_a_ledger_needs_a_token(make, tokens):
    with pytest.raises(ValueError, match=r"\[summar(y|ize)\]|target is"):
        make().summary(**tokens)


def test_a_ledger_of_experts_leaves_no_graph():
    """The routing of the example held its graph, so that the model could not even be moved."""
    model = nn.Transformer(**GPT, n_experts=3)
    model.summary()
    assert all(block.mlp.routing is None for block in model.blocks)
    model.to(mg.float64)


@pytest.mark.parametrize("dtype", [mg.float16, mg.float64])
@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rope", "alibi", "t5"])
def test_positions_leave_the_dtype(position, dtype):
    """ALiBi's float32 constants made everything after the first attention of a float16 model float32."""
    ids = np.array([[3, 4, 5]])
    model = nn.Transformer(**{**GPT, "position": position}).to(dtype)
    assert model(ids).dtype == dtype
    assert nn.EncoderDecoder(**{**PAIR, "position": position}).to(dtype)(ids, ids).dtype == dtype


@pytest.mark.parametrize("position", ["learned", "alibi", "t5"])
def test_a_mask_of_ones_and_zeros_is_refused_with_a_bias_too(position):
    """Where positions add a bias, integers were added to the scores: a hidden key weighed 1/e of a visible one."""
    model, ids = nn.Transformer(**{**GPT, "position": position}), np.array([[1, 2]])
    with pytest.raises(TypeError, match="boolean.*got.* int64"):
        model(ids, attn_mask=np.array([[1, 0], [1, 1]]))
    with pytest.raises(ValueError, match=r"^\[(MultiheadAttention|scaled_dot_product_attention)\].*\(3, 3\)"):
        model(ids, attn_mask=np.ones((3, 3), bool))
    with mg.no_grad(), pytest.raises(TypeError, match="boolean.*got.* int64"):
        model(ids, attn_mask=np.array([[1, 0], [1, 1]]), cache=model.cache(1, pad=[1]))


def test_configs_survive_json():
    """NumPy integers, as sizes computed from data are, included."""
    config = nn.TransformerConfig(**{**GPT, "n_layers": np.int64(2), "dropout": np.float32(0.5)}, position="rope",
                                  rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert nn.TransformerConfig(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("make", [
    lambda: nn.Transformer(dict(GPT)), lambda: nn.Transformer(65), lambda: nn.EncoderDecoder(dict(PAIR)),
    lambda: nn.EncoderDecoder(nn.TransformerConfig(**GPT)),          # lacks the encoder's fields
])
def test_what_is_no_config_is_refused(make):
    with pytest.raises(TypeError, match=r"\] give an? \w+Config, or its fields by name"):
        make()


def test_ids_of_ragged_rows_are_named():
    for call in (nn.Transformer(**GPT), lambda ids: nn.EncoderDecoder(**PAIR)(ids, ids)):
        with pytest.raises(ValueError, match="ids are an array of integers: got rows of different lengths"):
            call([[1, 2], [3]])


def test_a_ledger_of_checkpoints():
    """Only the argument is kept, 4 numbers of 4 bytes for a token, and the forward pass (2 FLOPs a weight) runs again;
    within another checkpoint it runs a third time. What was counted is what the inner nodes would keep."""
    net = nn.Sequential(nn.Linear(4, 8), F.relu, nn.Linear(8, 2))

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            self.inner = inner

        def forward(self, x):
            return mg.checkpoint(self.inner, x)

    once, forward = Checkpointed(net), 2 * (4 * 8 + 8 * 2)
    plain = nn.summarize(net, mg.zeros(5, 4)).total
    for model, times in ((once, 1), (Checkpointed(once), 2)):
        total = nn.summarize(model, mg.zeros(5, 4)).total
        assert total["forward"] == forward and total["backward"] == plain["backward"] + times * forward
        assert total["activations"] == 4 * 4 < plain["activations"]
