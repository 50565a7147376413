"""Generation: a cache changes nothing but the time; the choices of the next token; stops, streams, Ctrl-C, beams."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

import minigrad as mg
from minigrad import data, nn
from minigrad.nn.generate import Stops

SIZES = dict(vocab_size=17, context=24, d_model=16, n_layers=2, n_heads=4)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
KINDS = {
    "learned": {}, "sinusoidal": dict(position="sinusoidal"), "rope": dict(position="rope"),
    "alibi": dict(position="alibi"), "t5": dict(position="t5"), "no positions": dict(position="none"),
    "yarn": dict(position="rope", rope_scaling=YARN),
    "partial rope in pairs, GQA, qk norm": dict(position="rope", rope_fraction=0.5, rope_interleaved=True, n_kv_heads=2,
                                                qk_norm=True),
    "MQA, wide heads": dict(n_kv_heads=1, d_head=8), "post": dict(block="post"),
    "parallel, caps, sinks": dict(block="parallel", softcap=5.0, logit_softcap=9.0, sinks=True, scale_embedding=True),
    "window": dict(window=5, position="rope"), "window, alibi": dict(window=5, position="alibi"),
    "window, t5": dict(window=3, position="t5"), "window 1": dict(window=1, position="rope"),
    "window, learned": dict(window=4), "experts": dict(n_experts=3, top_k=2, position="rope"),
    "no norm": dict(norm="none", mlp="relu"), "attention only": dict(mlp="none"),
}


def sharpened(model, seed=0):
    """Weights far from their start, in float64: every choice is then clear of rounding, and biases and sinks count."""
    rng = np.random.default_rng(seed)
    model.to(mg.float64)
    for p in model.parameters():
        p.copy_(p.numpy() * 6.0 + (0.3 * rng.normal(size=p.shape) if p.ndim == 1 else 0.0))
    return model


def model_of(kind, **changed):
    return sharpened(nn.Transformer(**{**SIZES, **KINDS[kind], **changed}))


def prompts(lengths=(3, 7, 1, 5)):
    rng = np.random.default_rng(1)
    return [rng.integers(0, 17, n) for n in lengths]


def by_full_passes(model, prompt, n, context):
    """Greedy continuation with nothing but model(ids)."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(np.array([ids[-context:]])).numpy()[0, -1].argmax()))
    return ids


# --------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("kind", KINDS)
def test_cached_decoding_is_the_full_pass(kind):
    """Token by token, prompts of unequal length in one batch, each row as if it were alone."""
    model = model_of(kind)
    with model.evaluating():
        written = model.generate(prompts(), 14, temperature=0)
        for prompt, row in zip(prompts(), written):
            assert row.tolist() == by_full_passes(model, prompt, 14, 24)
    assert len({tuple(row[-14:]) for row in written}) > 1, "the rows tell nothing if they all say the same"


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_give_the_logits_of_one_pass(kind):
    """All logits, to rounding, however the text is cut into chunks."""
    model, ids = model_of(kind), np.random.default_rng(2).integers(0, 17, (2, 20))
    with model.evaluating():
        whole = model(ids).numpy()
        for cuts in ([20], [1] * 20, [7, 1, 9, 3]):
            cache, parts, at = model.cache(2), [], 0
            for n in cuts:
                parts.append(model(ids[:, at:at + n], cache=cache).numpy())
                at += n
            np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=1e-9, atol=1e-9 * abs(whole).max())


@pytest.mark.parametrize("kind", ["learned", "rope", "alibi"])
def test_past_the_context_the_last_tokens_are_read_anew(kind):
    model = model_of(kind)
    written = model.generate(prompts(), 40, temperature=0)
    with model.evaluating():
        for prompt, row in zip(prompts((3, 7)), written):
            # rows are as if alone until the longest one meets the end of the context, and then as the crop has it
            assert row.tolist()[:24] == by_full_passes(model, prompt, 40, 24)[:24]
        assert written[1].tolist() == by_full_passes(model, prompts()[1], 40, 24)
    assert all((a == b).all() for a, b in zip(written, model.generate(prompts(), 40, temperature=0, use_cache=False)))


def test_a_window_keeps_the_cache_bounded():
    """10,000 tokens past a window of 8: never more than a few windows of keys, and the same as without a cache."""
    model = nn.Transformer(**{**SIZES, "position": "rope", "window": 8}).eval()
    ids = np.random.default_rng(0).integers(0, 17, (1, 10_000))
    chunks, most, one = itertools.cycle([1, 1, 60]), 0, 2 * 2 * 16 * 4   # bytes of a token: k and v, layers, C, float32
    with mg.no_grad():
        cache = model.cache(1)
        model(ids[:, :100], cache=cache)                 # a prompt longer than the window
        while cache.length < 10_000:
            if 9_500 < cache.length and not tracemalloc.is_tracing():
                tracemalloc.start()
            logits = model(ids[:, cache.length:cache.length + next(chunks)], cache=cache)
            most = max(most, cache.nbytes)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert cache.length == 10_000 and grown < 100_000
        assert most <= 100 * one and cache.nbytes <= (60 + 7) * one
        # two layers of window 8 see the last 15 tokens, so these alone give the same logits, as rotations are relative
        alone = model(ids[:, -24:]).numpy()[0, -1]
    np.testing.assert_allclose(logits.numpy()[0, -1], alone, atol=2e-5)


def test_an_interrupted_pass_leaves_the_cache_as_it_was():
    model, ids = model_of("rope"), np.random.default_rng(3).integers(0, 17, (1, 9))
    with model.evaluating():
        cache = model.cache(1)
        model(ids[:, :5], cache=cache)
        forward = model.blocks[1].forward

        def interrupted(*args):
            raise KeyboardInterrupt

        model.blocks[1].forward = interrupted
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 5:7], cache=cache)
        model.blocks[1].forward = forward
        assert cache.length == 5
        np.testing.assert_allclose(model(ids[:, 5:], cache=cache).numpy(), model(ids).numpy()[:, 5:], rtol=1e-9)


def test_truncate_takes_tokens_back():
    model, ids = model_of("learned"), np.random.default_rng(3).integers(0, 17, (1, 9))
    with model.evaluating():
        cache = model.cache(1)
        model(np.concatenate([ids[:, :4], [[1, 2, 3]]], axis=1), cache=cache)
        cache.truncate(4)
        np.testing.assert_allclose(model(ids[:, 4:], cache=cache).numpy(), model(ids).numpy()[:, 4:], rtol=1e-9)
        with pytest.raises(ValueError, match="cut back to 0 to 9 tokens"):
            cache.truncate(10)


def test_one_attention_with_its_own_cache():
    """nn.KVCache without a model around it, as the docstring of MultiheadAttention has it."""
    layer = nn.MultiheadAttention(8, 2, rope=True, causal=True).to(mg.float64)
    x = mg.tensor(np.random.default_rng(0).normal(size=(2, 5, 8)))
    with mg.no_grad():
        cache, parts = nn.KVCache(1, 2), []
        for i in range(5):
            parts.append(layer(x[:, i:i + 1], cache=cache[0]).numpy())
            cache.advance(1)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), layer(x).numpy(), rtol=1e-12)


def test_cache_errors():
    model, other = model_of("learned"), model_of("learned")
    ids = np.zeros((2, 3), int)
    with model.evaluating():
        cache = model.cache(2, capacity=4)
        model(ids, cache=cache)
        with pytest.raises(ValueError, match=r"\[KVCache\] full: 3 of 4 slots are taken and 3 more do not fit"):
            model(ids, cache=cache)
        with pytest.raises(ValueError, match=r"\[KVCache\] made for another model \(Transformer\)"):
            other(ids, cache=cache)
        with pytest.raises(ValueError, match=r"\[KVCache\] holds 2 rows: got a batch of 1"):
            model(ids[:1, :1], cache=cache)
        with pytest.raises(ValueError, match="learned positions end at the context of 24: got capacity 25"):
            model.cache(1, capacity=25)
        with pytest.raises(ValueError, match="one integer of at least 0 for each of 2 rows"):
            model.cache(2, pad=[1])
        assert cache.length == 3
    with pytest.raises(RuntimeError, match=r"\[KVCache\] would take a tensor's values and lose its gradient"):
        model(ids, cache=model.cache(2))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}
    model = nn.Transformer(**SIZES, position="rope", rope_scaling=dynamic)
    with pytest.raises(ValueError, match="pass use_cache=False"):
        model.generate(np.zeros((1, 3), int), 5)
    assert model.generate(np.zeros((1, 3), int), 5, use_cache=False).shape == (1, 8)


def test_a_cache_takes_no_wrong_rows_dtypes_or_slots():
    """Each of these went through without a word: rows as a mask, keys cast, keys written past the capacity."""
    model = nn.Transformer(**SIZES).eval()
    with mg.no_grad():
        cache = model.cache(2, pad=np.array([1, 0], np.uint64))      # unsigned less signed would be a float
        model(np.ones((2, 3), int), cache=cache)
        assert cache.positions(1).dtype == np.int64
        for rows in ([True, False], [1.0, 0.0], [0, 2], [-1], [[0, 1]], 1):
            with pytest.raises((TypeError, ValueError, IndexError), match=r"\[KVCache.reorder\]"):
                cache.reorder(rows)
        with pytest.raises(TypeError, match=r"\[KVCache.truncate\] length is an integer: got 1.5"):
            cache.truncate(1.5)
        with pytest.raises(IndexError, match=r"\[KVCache\] layers are 0 to 1: got 2"):
            cache[2]
        model.to(mg.float64)
        with pytest.raises(ValueError, match=r"holds keys of float32 on cpu: got float64 on cpu; make a new cache"):
            model(np.ones((2, 1), int), cache=cache)
        with pytest.raises(TypeError, match=r"\[Transformer\] cache is a KVCache, from model.cache\(batch\): got True"):
            model(np.ones((2, 1), int), cache=True)
        # without a model around it, the fifth key of four slots was lost, and the query attended to the wrong ones
        layer, cache = nn.MultiheadAttention(8, 2, causal=True), nn.KVCache(1, 2, capacity=4)
        layer(mg.randn(2, 4, 8), cache=cache[0])
        cache.advance(4)
        with pytest.raises(ValueError, match=r"full: 4 of 4 slots are taken and 1 more"):
            layer(mg.randn(2, 1, 8), cache=cache[0])
        with pytest.raises(ValueError, match=r"\[KVCache\] holds 2 rows: got a batch of 3"):
            layer(mg.randn(3, 1, 8), cache=nn.KVCache(1, 2)[0])
    with pytest.raises(ValueError, match="a window has at least the query's own slot: got 0"):
        nn.KVCache(1, 2, window=0)
    with pytest.raises(ValueError, match=r"\[EncoderDecoder.cache\] learned positions end at the context of 12"):
        pair_of().cache(1, capacity=13)


# -------------------------------------------------------------------------------------------------------- the choice


def shares(sampler, logits, n=4000, seen=None):
    mg.manual_seed(0)
    seen = np.zeros(len(logits), bool) if seen is None else seen
    drawn = sampler(np.tile(np.asarray(logits, float), (n, 1)), np.tile(seen, (n, 1)))
    return np.bincount(drawn, minlength=len(logits)) / n


P = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
CHOICES = [
    (dict(), P),
    (dict(temperature=0.5), P**2 / (P**2).sum()),
    (dict(temperature=0.0), [1, 0, 0, 0, 0]),
    (dict(temperature=1e-12), [1, 0, 0, 0, 0]),          # no overflow on the way
    (dict(top_k=2), [2 / 3, 1 / 3, 0, 0, 0]),
    (dict(top_k=99), P),
    (dict(top_p=0.75), [2 / 3, 1 / 3, 0, 0, 0]),         # reached exactly by two
    (dict(top_p=0.76), P * [1, 1, 1, 0, 0] / 0.9),       # and not quite: the third that crosses it stays
    (dict(top_p=1e-9), [1, 0, 0, 0, 0]),                 # never empty
    (dict(top_p=1.0), P),
    (dict(min_p=0.2), P * [1, 1, 1, 0, 0] / 0.9),        # at least 0.2 of 0.5
    (dict(min_p=1.0), [1, 0, 0, 0, 0]),
    (dict(min_p=0.0), P),
    (dict(top_k=3, top_p=0.8), [2 / 3, 1 / 3, 0, 0, 0]),     # of the three left (0.56, 0.28, 0.17) two reach 0.8
]


@pytest.mark.parametrize("choice, expected", CHOICES, ids=lambda x: str(x)[:40])
def test_draws_follow_the_distribution(choice, expected):
    """Shares of 4,000 draws within five standard errors; what is excluded is never drawn."""
    expected = np.array(expected, float)
    drawn = shares(nn.Sampler(**choice), np.log(P) + 3.0)
    assert (abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all()
    assert (drawn[expected == 0] == 0).all()


@pytest.mark.parametrize("row, message", [
    ([-math.inf, -math.inf], "the largest logit of a row is finite: row 1 has -inf"),    # token 0 was "drawn"
    ([0.0, math.inf], "the largest logit of a row is finite: row 1 has inf"),
    ([0.0, math.nan], "the logits of row 1 hold a NaN"),
])
def test_logits_without_a_softmax_are_refused(row, message):
    logits = np.array([[0.0, 1.0], row])
    with pytest.raises(ValueError, match=rf"\[generate\] {message}"):
        nn.Sampler()(logits, np.zeros((2, 2), bool))
    model = nn.Transformer(**{**SIZES, "position": "rope"})
    model.forward = lambda ids, cache: mg.tensor(np.broadcast_to(np.array(row), (len(ids), ids.shape[1], 2)))
    with pytest.raises(ValueError, match=r"\[beam_search\] the l"):     # a NaN gave no beam at all, [[]]
        nn.beam_search(model, [np.array([1])], 3, 2, 0, 0.6)


def test_extreme_choices_do_not_overflow():
    """Denormal temperatures and penalties at the edge of float64: the likeliest, and no warning."""
    logits, seen = np.array([[3.0, 1.0, -1e308], [-5.0, -4.0, 1e308]]), np.ones((2, 3), bool)
    assert nn.Sampler(temperature=1e-310)(logits, seen).tolist() == [0, 2]
    assert nn.Sampler(repetition_penalty=1e-310)(logits[:, 1:], seen[:, 1:]).tolist() == [0, 1]


def test_repetition_penalty():
    """Keskar's rule: positive logits of what was said are divided, negative ones multiplied: less likely both."""
    seen = np.array([True, False, True, False])
    logits = np.array([2.0, 1.0, -1.0, -1.5])
    penalized = np.array([1.0, 1.0, -2.0, -1.5])
    drawn = shares(nn.Sampler(repetition_penalty=2.0), logits, seen=seen)
    expected = np.exp(penalized) / np.exp(penalized).sum()
    assert (abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all()
    model = model_of("rope")
    said = model.generate(np.array([[3]]), 12, temperature=0, repetition_penalty=1e6)[0]
    assert len(set(said.tolist())) == 13                 # so strong a penalty never repeats a token


@pytest.mark.parametrize("choice, message", [
    (dict(top_p=0), "top_p is above 0 and at most 1: got 0"),
    (dict(top_k=True), "top_k is an integer of at least 1: got True"),
    (dict(stop=["a", [1, 2]]), r"a stop is a token, 0 to 16, or a string: got \[1, 2\]"),
    (dict(top_p=1.1), "top_p is above 0 and at most 1: got 1.1"),
    (dict(min_p=-0.1), "min_p is in 0 to 1: got -0.1"), (dict(top_k=1.5), "top_k is an integer of at least 1: got 1.5"),
    (dict(temperature=math.inf), "temperature is at least 0: got inf"),
    (dict(repetition_penalty=0), "repetition_penalty is above 0: got 0"),
    (dict(stop=17), "a stop is a token, 0 to 16, or a string: got 17"), (dict(stop=[-1]), "got -1"),
    (dict(stop=1.5), "got 1.5"), (dict(stop="a"), "stop strings are found in the text: pass tokenizer="),
    (dict(stop="!", tokenizer=data.CharTokenizer("ab")), "the tokenizer cannot write the stop string '!'.*'!'"),
    (dict(stop="", tokenizer=data.CharTokenizer("ab")), "at least one character"),
])
def test_choices_that_are_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        model_of("rope").generate(np.array([[1]]), 3, **choice)


@pytest.mark.parametrize("choice, message", [
    (dict(temperature=None), "temperature is a number: got None"), (dict(top_p="a"), "top_p is a number: got str"),
    (dict(stop="a", tokenizer=object()), "a tokenizer has encode and decode: got object"),
    (dict(ids=3), None), (dict(ids=np.array(3)), None), (dict(ids=[[1], [[2]]]), None), (dict(ids=[1, [2]]), None),
])
def test_what_is_no_choice_or_prompt_is_named(choice, message):
    with pytest.raises((TypeError, ValueError), match=rf"\[generate\] {message or 'a prompt of at least one token'}"):
        model_of("rope").generate(**{"ids": np.array([[1]]), "n": 3, **choice})


def test_a_prompt_longer_than_the_context():
    with pytest.raises(ValueError, match="the prompt of row 1 has 25 tokens and the context holds 24: give its last"):
        model_of("learned").generate([np.zeros(3, int), np.zeros(25, int)], 3)
    assert len(model_of("window").generate([np.zeros(40, int)], 3)[0]) == 43     # a window forgets, so any length fits


def test_a_model_with_nan_weights_says_so():
    model = model_of("rope")
    model.norm.weight.copy_(math.nan)
    with pytest.raises(ValueError, match="the logits of row 0 hold a NaN"):
        model.generate(np.array([[1]]), 3)


# ------------------------------------------------------------------------------------------- stops, streams, Ctrl-C


def test_rows_end_each_at_its_stop_token():
    model = model_of("rope")
    free = model.generate(prompts(), 12, temperature=0)
    stop = int(free[0][5])                               # the third token the first row writes
    for row, prompt, whole in zip(model.generate(prompts(), 12, temperature=0, stop=stop), prompts(), free):
        after = whole[len(prompt):].tolist()
        n = after.index(stop) + 1 if stop in after else 12
        assert row.tolist() == whole[:len(prompt) + n].tolist()


class Writer:
    """A decoder that always writes the same text, one character a token; what generation needs of a model."""

    config = nn.TransformerConfig(vocab_size=26, context=64, d_model=1, n_layers=1, n_heads=1)

    def __init__(self, text, tokenizer):
        self.ids = tokenizer.encode(text)

    def cache(self, batch, pad=None):
        return nn.KVCache(1, batch, 64, pad=pad)

    def __call__(self, ids, cache):
        logits = np.zeros((*ids.shape, 26), np.float32)
        cache.advance(ids.shape[1])
        logits[:, -1, self.ids[(cache.length - 1) % len(self.ids)]] = 1.0
        return mg.tensor(logits)


LETTERS = data.CharTokenizer("abcdefghijklmnopqrstuvwxyz")


@pytest.mark.parametrize("stop, expected", [
    ("d", "abcd"), ("cd", "abcd"), (["xyz", "bc"], "abc"), ("ea", "abcdea"), ("zz", "abcdeabcde"),
    ("abcdeab", "abcdeab"), ([3], "abcd"),
])
def test_stop_strings(stop, expected):
    """Found where they end, across any number of tokens; the row keeps them."""
    from minigrad.nn.generate import Sampler, _tokens

    stops = Stops(stop, LETTERS, 26)
    steps = _tokens(Writer("abcde", LETTERS), [np.array([0])], 10, Sampler(0), stops, 26, True)
    assert LETTERS.decode(np.concatenate(list(steps))) == expected


def test_a_stop_string_in_the_prompt_does_not_end_the_row():
    from minigrad.nn.generate import Sampler, _tokens

    stops = Stops("bc", LETTERS, 26)
    steps = _tokens(Writer("zzzzz", LETTERS), [LETTERS.encode("abc")], 4, Sampler(0), stops, 26, True)
    assert len(list(steps)) == 4


def test_stream_gives_what_generate_does():
    model = model_of("rope").train()
    mg.manual_seed(4)
    whole = model.generate(prompts(), 9, stop=3)
    mg.manual_seed(4)
    columns = []
    for tokens in model.stream(prompts(), 9, stop=3):
        assert model.training                            # between tokens the caller's state holds
        assert (mg.tensor([1.0], requires_grad=True) * 2).requires_grad
        columns.append(tokens)
    for prompt, row, after in zip(prompts(), whole, np.stack(columns, axis=1)):
        assert row.tolist() == [*prompt, *after[after >= 0]]
    assert model.training


def test_ctrl_c_leaves_what_was_written():
    model = model_of("rope").train()
    whole = model.generate(prompts(), 9, temperature=0)
    forward, calls = model.forward, itertools.count()

    def fourth_is_interrupted(*args, **kwargs):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    model.forward = fourth_is_interrupted
    with pytest.raises(nn.Interrupted) as caught:
        model.generate(prompts(), 9, temperature=0)
    assert [row.tolist() for row in caught.value.ids] == [row[:len(p) + 4].tolist() for p, row in zip(prompts(), whole)]
    assert isinstance(caught.value, KeyboardInterrupt) and model.training


def test_a_list_gives_a_list_and_an_array_an_array():
    model = model_of("rope")
    assert isinstance(model.generate([[1, 2], [3]], 2), list)
    assert model.generate(np.array([[1, 2], [3, 4]]), 2).shape == (2, 4)
    assert model.generate(mg.tensor([[1, 2]]), 0).tolist() == [[1, 2]]
    assert isinstance(model.generate(np.array([[1, 2]]), 2, stop=0), list)
    for bad in ([], [[]], [[[1]]], [1, 2], [["a"]]):
        with pytest.raises((ValueError, TypeError), match=r"\[generate\]"):
            model.generate(bad, 2)


# ------------------------------------------------------------------------------------------------- encoder-decoder

PAIR = dict(vocab_size=9, source_vocab=11, context=12, d_model=16, n_layers=2, n_heads=4)


def pair_of(**changed):
    return sharpened(nn.EncoderDecoder(**{**PAIR, **changed}), seed=5)


def sources():
    rng = np.random.default_rng(6)
    return [rng.integers(3, 11, n) for n in (6, 2, 9)]


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "rope", "alibi", "t5", "no positions", "window", "experts",
                                  "partial rope in pairs, GQA, qk norm", "post", "no norm"])
def test_encoder_decoder_generation_is_the_full_pass(kind):
    """Sources of unequal length in one batch, each row as if it were alone and uncached."""
    model = pair_of(**KINDS[kind])
    written = model.generate(sources(), 10, temperature=0)
    with model.evaluating():
        for source, row in zip(sources(), written):
            ids = [1]
            while len(ids) < 11 and ids[-1] != 2:
                ids.append(int(model(source[None], np.array([ids])).numpy()[0, -1].argmax()))
            assert row.tolist() == ids
    again = model.generate(sources(), 10, temperature=0, use_cache=False)
    assert all((a == b).all() for a, b in zip(written, again))


def every_target(model, source, n):
    """All targets of up to n tokens with their log-probabilities, by brute force."""
    found = {}
    with model.evaluating():
        for ids in itertools.product(range(4), repeat=n):
            logits = model(source[None], np.array([[1, *ids[:-1]]])).numpy()[0]
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            cut = ids.index(2) + 1 if 2 in ids else n    # 2 is the end
            found[ids[:cut]] = sum(logp[i, ids[i]] for i in range(cut))
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_a_beam_wide_enough_finds_the_best_target(penalty):
    model = pair_of(vocab_size=4, position="rope")
    for p in model.parameters():
        p.copy_(p.numpy() / 3.0)                         # softer: the best is not the greedy one everywhere
    for source in sources():
        every = every_target(model, source, 3)
        score = {ids: logp / ((5 + len(ids)) / 6) ** penalty for ids, logp in every.items()}
        best = sorted(score, key=score.get, reverse=True)[:5]
        found = model.beam_search([source], 3, beams=64, length_penalty=penalty)[0]
        assert [tuple(tokens.tolist()) for tokens, _ in found[:5]] == best
        np.testing.assert_allclose([s for _, s in found[:5]], [score[ids] for ids in best], rtol=1e-9)


def test_one_beam_is_greedy_and_rows_do_not_disturb_each_other():
    model = pair_of(position="rope")
    greedy = model.generate(sources(), 8, temperature=0)
    for row, found in zip(greedy, model.beam_search(sources(), 8, beams=1)):
        assert found[0][0].tolist() == row[1:].tolist()
    together = model.beam_search(sources(), 8, beams=3)
    for source, found in zip(sources(), together):
        (alone,) = model.beam_search([source], 8, beams=3)
        assert [t.tolist() for t, _ in alone] == [t.tolist() for t, _ in found]
        np.testing.assert_allclose([s for _, s in alone], [s for _, s in found], rtol=1e-9)
        scores = [s for _, s in found]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3


@pytest.mark.parametrize("options, message", [
    (dict(n=0), "n is an integer of at least 1: got 0"), (dict(beams=0), "beams is an integer of at least 1: got 0"),
    (dict(length_penalty=-1.0), "length_penalty is at least 0"),
    (dict(length_penalty=math.nan), "length_penalty is at least 0: got nan"),
    (dict(n=13), r"1 \+ 13 tokens do not fit the context of 12"),
])
def test_beam_search_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        pair_of().beam_search(sources(), **{"n": 3, **options})


def test_one_beam_is_greedy_only_without_a_length_penalty():
    """The end is likeliest at once (0.5), but the other token is certain ever after: log 0.4 over 20 is more."""
    class Table:
        def cache(self, batch):
            return nn.KVCache(0, batch)

        def __call__(self, ids, cache):
            first, cache.length = cache.length == 0, cache.length + ids.shape[1]
            return mg.tensor(np.log(np.tile([[[0.5, 0.4, 0.1] if first else [1e-9, 1.0, 1e-9]]], (len(ids), 1, 1))))

    found = {penalty: nn.beam_search(Table(), [np.array([1])], 20, 1, 0, penalty)[0][0] for penalty in (0.0, 2.0)}
    assert found[0.0][0].tolist() == [0] and found[2.0][0].tolist() == [1] * 20
    np.testing.assert_allclose([found[0.0][1], found[2.0][1]], [np.log(0.5), np.log(0.4) / (25 / 6) ** 2], rtol=1e-6)


@pytest.mark.parametrize("bad", [[], [[1], [1, 2]], [[]], [1, 2]])
def test_beams_need_prompts_of_one_length(bad):
    with pytest.raises(ValueError, match=r"\[beam_search\] prompts are rows of one length"):
        nn.beam_search(model_of("rope"), bad, 3, 2, 0, 0.6)
