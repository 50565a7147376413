"""data: the same text out; windows that depend on (seed, step) only; an honest n-gram model."""

import json
import math
import os
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigrad import data
from minigrad.data import (
    CharTokenizer,
    DataError,
    NgramModel,
    Windows,
    builtin_text,
    open_tokens,
    read_text,
    split,
    tokenize_to_file,
)

budget = settings(max_examples=100, deadline=None, derandomize=True)
PLAIN = st.characters(exclude_categories=["Cs"], exclude_characters="\r\0")


def written(path, content):
    path.write_bytes(content)
    return path


# --- reading -------------------------------------------------------------------------------------


def test_bom_and_newlines(tmp_path):
    path = written(tmp_path / "a", b"\xef\xbb\xbfa\r\nb\rc\n\r\n\xc3\xa9")
    assert read_text(path) == "a\nb\nc\n\né"


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_pieces_may_end_anywhere(tmp_path, monkeypatch, block):
    """Blocks of a few bytes cut the mark, the \\r\\n and every character of 2, 3 and 4 bytes."""
    text = "é\r\n€\r😀\n" * 3 + "\r"
    path = written(tmp_path / "a", "\ufeff".encode() + text.encode())
    monkeypatch.setattr(data, "BLOCK", block)
    if block < 3:  # then the mark comes with a later piece
        path.write_bytes(text.encode())
    assert read_text(path) == text.replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty"),
        (b"abc\0def", "NUL byte at offset 3"),
        ("text".encode("utf-16"), "binary or UTF-16"),
        (b"caf\xe9 au lait", "byte 0xE9 at offset 3"),  # Latin-1
        (b"a" * (1 << 20) + b"\xff", "byte 0xFF at offset 1048576"),  # in the second block
        (b"a" * ((1 << 20) - 1) + b"\xe2\x82x", "byte 0xE2 at offset 1048575"),  # across blocks
        (b"ab\xe2\x82", "byte 0xE2 at offset 2"),  # the end cuts a character
    ],
)
def test_files_that_are_not_text(tmp_path, content, says):
    path = written(tmp_path / "a.txt", content)
    for read in (read_text, CharTokenizer.from_file):
        with pytest.raises(DataError, match=says) as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_paths_that_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    for path, says in [("none", "must exist"), (".", "is a folder"), ("pipe", "device or a pipe")]:
        with pytest.raises(DataError, match=says):
            read_text(tmp_path / path)


def test_builtin_text_is_long_plain_and_always_the_same():
    text = builtin_text()
    assert text == builtin_text()
    assert len(text) > 300_000 and "\r" not in text and "\0" not in text
    assert 50 < len(set(text)) < 256  # so that tokens are bytes


def test_builtin_text_missing_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # as where it is stripped
    with pytest.raises(DataError, match="--text FILE"):
        builtin_text()


# --- the tokenizer -------------------------------------------------------------------------------


@budget
@given(st.text(min_size=1))
def test_decode_inverts_encode_for_any_text(text):
    """Lone surrogates too: Python strings have them, and UTF-8 refuses them."""
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert ids.shape == (len(text),) and ids.dtype == np.uint8
    assert tokenizer.decode(ids) == text
    assert [tokenizer.chars[i] for i in ids] == list(text)
    assert tokenizer.chars == "".join(sorted(set(text))) and tokenizer.vocab_size == len(set(text))
    assert CharTokenizer.from_json(tokenizer.to_json()).chars == tokenizer.chars


@pytest.mark.parametrize(
    "size, dtype",
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_smallest_dtype_that_holds_every_id(size, dtype):
    chars = "".join(map(chr, range(size)))
    ids = CharTokenizer(chars).encode(chars)
    assert ids.dtype == dtype and ids[-1] == size - 1 and ids.tolist() == list(range(size))


def test_encode_over_several_blocks(monkeypatch):
    monkeypatch.setattr(data, "BLOCK", 4)
    tokenizer = CharTokenizer("abc")
    assert tokenizer.decode(tokenizer.encode("abcabccba")) == "abcabccba"
    with pytest.raises(DataError, match="'x'.* at position 9"):
        tokenizer.encode("abcabccbax")


@pytest.mark.parametrize(
    "text, says",
    [
        ("abé", r"one of the 3 known: 'é' \(U\+00E9\) at position 2"),
        ("😀a", r"'😀' \(U\+1F600\) at position 0"),  # beyond the largest known code point
        ("aÆ", r"'Æ' \(U\+00C6\) at position 1"),  # 'a' plus the size of the table
        ("a\nb", r"'\\n' \(U\+000A\) at position 1"),  # below the smallest
        ("aéü", "at position 1"),  # the first of two
    ],
)
def test_an_unknown_character_is_named_with_its_place(text, says):
    with pytest.raises(DataError, match=says):
        CharTokenizer("abc").encode(text)


def test_ids_out_of_range_never_wrap():
    tokenizer = CharTokenizer("abc")
    for ids, says in [
        ([0, 3], r"\[0, 3\): 3 at position 1"),
        ([1, -1], r"\[0, 3\): -1 at position 1"),
        (np.array([2**63], np.uint64), str(2**63)),
        ([0.5], "must be 1-D integers: float64"),
    ]:
        with pytest.raises(DataError, match=says):
            tokenizer.decode(ids)
    assert tokenizer.decode([]) == "" and tokenizer.decode([[0, 1], [2, 0]]) == "abca"
    assert len(tokenizer.encode("")) == 0


@pytest.mark.parametrize("chars", ["", "aba", None, ["a", "b"]])
def test_chars_must_be_different_characters(chars):
    with pytest.raises(DataError, match="no character twice"):
        CharTokenizer(chars)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"tokenizer": "bpe"}', "[" * 100_000, '{"tokenizer": "char"}',
     '{"tokenizer": "char", "chars": "ab"}', '{"tokenizer": "char", "chars": ["a", "a"]}',
     '{"tokenizer": "char", "chars": ["ab"]}', '{"tokenizer": "char", "chars": []}',
     '{"tokenizer": "bpe", "chars": ["a"]}', None, "x" * 20_000_000],
)  # fmt: skip
def test_from_json_takes_nothing_else(text):
    with pytest.raises(DataError) as caught:
        CharTokenizer.from_json(text)
    assert len(str(caught.value)) < 200  # it does not print 20 MB


def test_all_of_unicode_fits_the_bound_of_from_json():
    chars = "".join(map(chr, range(0x110000)))
    assert CharTokenizer.from_json(CharTokenizer(chars).to_json()).chars == chars


# --- tokens in files -----------------------------------------------------------------------------


@budget
@given(text=st.text(PLAIN, min_size=1).filter(lambda t: t[0] != "\ufeff"), block=st.integers(4, 30))
def test_a_streamed_file_holds_the_same_tokens(tmp_path_factory, text, block):
    folder = tmp_path_factory.mktemp("data")
    path = written(folder / "a.txt", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "BLOCK", block)
        tokenizer = CharTokenizer.from_file(path)
        count = tokenize_to_file(path, folder / "a.npy", tokenizer)
    tokens = open_tokens(folder / "a.npy")
    assert tokenizer.chars == CharTokenizer.from_text(text).chars and count == len(text)
    assert isinstance(tokens, np.memmap) and tokens.dtype == tokenizer.dtype
    np.testing.assert_array_equal(tokens, tokenizer.encode(text))
    np.testing.assert_array_equal(np.load(folder / "a.npy"), tokens)  # an ordinary .npy file


def test_a_failed_encoding_leaves_the_old_file(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK", 4)
    text, out = written(tmp_path / "a.txt", b"abcabcabx"), written(tmp_path / "a.npy", b"old")
    with pytest.raises(DataError, match="'x'.*position 8"):  # counted in the file, not the block
        tokenize_to_file(text, out, CharTokenizer("abc"))
    assert out.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["a.npy", "a.txt"]
    os.symlink("a.txt", tmp_path / "link")
    with pytest.raises(DataError, match="over the text itself"):
        tokenize_to_file(text, tmp_path / "link", CharTokenizer("abcx"))
    assert text.read_bytes() == b"abcabcabx"


def test_a_text_is_never_in_memory_whole(tmp_path):
    """16 MiB in blocks of 1 MiB, whose code points and ids take 4 MiB each."""
    path = written(tmp_path / "a", b"abcdefg\n" * (1 << 21))
    tracemalloc.start()
    tokenize_to_file(path, tmp_path / "b", CharTokenizer.from_file(path))
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()


def test_token_files_that_are_not(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10, dtype=np.uint8))
    whole = path.read_bytes()
    cases = [
        (whole[:-3], f"truncated: {len(whole)} bytes expected, {len(whole) - 3} found"),
        (whole + b"x", "too long"),
        (whole[:40], "."),
        (b"", "."),
        (b"plain text, no array at all", "magic"),
    ]
    for array, says in [
        (np.zeros((2, 2), int), r"1-D integers: int64 \(2, 2\)"),
        (np.zeros(3), "1-D integers: float64"),
        (np.array([{}]), "1-D integers: object"),  # a pickle, not opened
    ]:
        np.save(path, array)
        cases.append((path.read_bytes(), says))
    for content, says in cases:
        with pytest.raises(DataError, match=says) as caught:
            open_tokens(written(path, content))
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        open_tokens(tmp_path / "none")
    with pytest.raises(DataError, match="is a folder"):
        open_tokens(tmp_path)


# --- split and windows ---------------------------------------------------------------------------


def test_split_cuts_where_nanogpt_does():
    """So that losses on tinyshakespeare can be compared with the published ones."""
    train, val = split(np.zeros(1_115_394, np.uint8))
    assert (len(train), len(val)) == (1_003_854, 111_540)
    assert split("abcd", 0.5) == ("ab", "cd")


@pytest.mark.parametrize("n, fraction", [(0, 0.1), (1, 0.5), (5, 0), (5, 1), (5, -0.1), (5, 0.99)])
def test_split_leaves_no_part_empty(n, fraction):
    with pytest.raises(DataError, match=f"{n} tokens, val_fraction {fraction}"):
        split(np.arange(n), fraction)


@budget
@given(
    n=st.integers(2, 40),
    context=st.integers(1, 10),
    batch=st.integers(1, 5),
    step=st.integers(0, 99),
)
def test_a_batch_is_windows_and_what_follows_them(n, context, batch, step):
    tokens = np.arange(n, dtype=np.uint8)  # the token is its own place
    if n <= context:
        with pytest.raises(DataError, match=rf"context \+ 1 = {context + 1}: {n} tokens"):
            Windows(tokens, context, batch)
        return
    inputs, targets = Windows(tokens, context, batch, seed=3).batch(step)
    for a in (inputs, targets):
        assert a.shape == (batch, context) and a.dtype == np.int64 and a.flags.c_contiguous
    np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(context))
    np.testing.assert_array_equal(targets, inputs + 1)


def test_batches_depend_on_seed_and_step_alone():
    tokens = np.arange(10_000)
    windows = Windows(tokens, 8, 16, seed=1)
    forward = [windows.batch(step)[0] for step in range(20)]
    again = Windows(tokens, 8, 16, seed=1)  # a resumed run, in any order
    for step in reversed(range(20)):
        np.testing.assert_array_equal(again.batch(step)[0], forward[step])
    every = [Windows(tokens, 8, 16, s).batch(t)[0] for s in range(9) for t in range(9)]
    assert len({batch.tobytes() for batch in every}) == 81  # (0, 1) is not (1, 0)


def test_batches_are_the_same_for_ever():
    """Written down: another stream would silently break every resumed run."""
    starts = Windows(np.arange(1000), 10, 4, seed=42).batch(7)[0][:, 0]
    assert starts.tolist() == [291, 925, 453, 766]


def test_every_place_is_as_likely_as_every_other():
    """Chi squared over the 20 places of 40,000 draws: 19 degrees, the 0.999 quantile is 43.8."""
    windows = Windows(np.arange(25), 5, 400)
    counts = np.bincount(np.concatenate([windows.batch(s)[0][:, 0] for s in range(100)]))
    assert len(counts) == 20  # the last place can be drawn, none after it
    assert ((counts - 2000) ** 2 / 2000).sum() < 43.8


@budget
@given(n=st.integers(2, 60), context=st.integers(1, 10), batch=st.integers(1, 5))
def test_sequential_predicts_each_token_once_but_for_the_rest(n, context, batch):
    if n <= context:
        return
    batches = list(Windows(np.arange(n), context, 3).sequential(batch))
    assert [len(x) for x, _ in batches[:-1]] == [batch] * (len(batches) - 1)
    inputs, targets = (np.concatenate(part).ravel() for part in zip(*batches, strict=True))
    rest = (n - 1) % context
    assert targets.tolist() == list(range(1, n - rest)) and (inputs == targets - 1).all()


def test_windows_read_a_memmap(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    tokens = open_tokens(tmp_path / "a.npy")
    windows = Windows(tokens, 8, 4)
    assert np.shares_memory(windows.tokens, tokens)  # not loaded
    for a, b in zip(windows.batch(5), Windows(np.arange(100), 8, 4).batch(5), strict=True):
        np.testing.assert_array_equal(a, b)


def test_windows_say_what_is_wrong():
    for arguments in [(0, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 2**64)]:
        with pytest.raises(DataError, match="must be 1 or more, seed"):
            Windows(np.arange(9), *arguments)
    for tokens in (np.zeros(9), np.zeros((3, 3), int)):
        with pytest.raises(DataError, match="1-D integers"):
            Windows(tokens, 1, 1)
    with pytest.raises(DataError, match="step .*: -1"):
        Windows(np.arange(9), 1, 1).batch(-1)
    with pytest.raises(DataError, match="batch_size must be 1 or more: 0"):
        Windows(np.arange(9), 1, 1).sequential(0)


# --- the n-gram model ----------------------------------------------------------------------------


def kneser_ney(tokens, n, vocab_size):
    """The formula of the docstring read aloud, with dictionaries: p(w | h) for a tuple h."""
    grams = [[tuple(tokens[i : i + k]) for i in range(len(tokens) - k + 1)] for k in range(n + 1)]
    counts = []
    for k in range(1, n + 1):
        seen = grams[n] if k == n else [g[1:] for g in sorted(set(grams[k + 1]))]
        counts.append({g: seen.count(g) for g in set(seen)})

    def discount(k, c):
        n1, n2, n3, n4 = (sum(v == i for v in counts[k - 1].values()) for i in (1, 2, 3, 4))
        if min(n1, n2, n3, n4) == 0:
            return [0, 0.5, 1, 1.5][min(c, 3)]
        y = n1 / (n1 + 2 * n2)
        return [0, y, max(0.1, 2 - 3 * y * n3 / n2), max(0.1, 3 - 4 * y * n4 / n3)][min(c, 3)]

    def p(h, w, k):
        if k == 0:
            return 1 / vocab_size
        h = h[len(h) - (k - 1) :]
        row = {g[-1]: c for g, c in counts[k - 1].items() if g[:-1] == h}
        if not row:
            return p(h[1:], w, k - 1)
        total, c = sum(row.values()), row.get(w, 0)
        rest = sum(discount(k, v) for v in row.values())
        return (c - discount(k, c) + rest * p(h[1:], w, k - 1)) / total

    return lambda h, w: p(h[-(n - 1) :] if n > 1 else (), w, min(n, len(h) + 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_the_model_is_the_formula(data):
    vocab_size, n = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    ids = st.integers(0, vocab_size - 1)
    train = data.draw(st.lists(ids, min_size=n, max_size=120))
    test = data.draw(st.lists(ids, min_size=1, max_size=12))
    model, p = NgramModel(n).fit(train, vocab_size), kneser_ney(train, n, vocab_size)
    want = [p(tuple(test[:i]), w) for i, w in enumerate(test)]
    assert model.loss(test) == pytest.approx(-sum(map(math.log, want)) / len(test), rel=1e-12)
    np.testing.assert_allclose(
        model.probabilities(test), [p(tuple(test), w) for w in range(vocab_size)], rtol=1e-12
    )


def test_the_discounts_of_the_paper_are_reached():
    """Enough text that n1..n4 are all there, which the small cases above seldom give."""
    train = np.random.default_rng(0).integers(0, 5, 600) ** 2 // 5  # 0, 1, 3: unequal
    model, p = NgramModel(4).fit(train, 5), kneser_ney(train.tolist(), 4, 5)
    for h in [(), (0,), (1, 3), (3, 3, 3), (4, 0, 1), (2, 4, 3, 1)]:
        np.testing.assert_allclose(model.probabilities(h), [p(h, w) for w in range(5)], rtol=1e-12)


def test_discounts_stay_positive():
    """n3 = 10 beside n1 = n2 = n4 = 1 would make D(2) = 2 - 3/3 * 10 = -8, and so p < 0."""
    counts = np.array([1, 2, 4, *[3] * 10])
    np.testing.assert_allclose(data._discounts(counts), [0, 1 / 3, 0.1, 3 - 4 / 30])


@budget
@given(st.data())
def test_probabilities_sum_to_one_and_are_never_zero(data):
    """After any context: seen, unseen, longer than n, and with tokens that were never seen."""
    vocab_size, n = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 5))
    ids = st.integers(0, vocab_size - 1)
    model = NgramModel(n).fit(data.draw(st.lists(ids, min_size=n, max_size=200)), vocab_size)
    p = model.probabilities(data.draw(st.lists(ids, max_size=7)))
    assert p.shape == (vocab_size,) and (p > 0).all()
    assert p.sum() == pytest.approx(1, abs=1e-12)


def test_loss_of_sources_whose_entropy_is_known():
    rng = np.random.default_rng(0)
    coin = rng.integers(0, 2, 20_000)  # fair: log 2 at best, and a little over for the estimates
    assert math.log(2) - 0.01 < NgramModel(4).fit(coin[:10_000], 2).loss(coin[10_000:]) < 0.70
    cycle = np.tile(np.arange(5), 2000)  # known after one token
    assert NgramModel(2).fit(cycle, 5).loss(cycle) < 0.01
    assert NgramModel(1).fit(cycle, 5).loss(cycle) == pytest.approx(math.log(5), abs=1e-3)


def test_more_context_helps_on_prose():
    """nats per character on the last tenth; with n = 4 known to be near 1.34 on Python 3.11."""
    text = builtin_text()
    tokenizer = CharTokenizer.from_text(text)
    train, val = split(tokenizer.encode(text))
    losses = [NgramModel(n).fit(train, tokenizer.vocab_size).loss(val) for n in (1, 2, 3, 4)]
    assert losses == sorted(losses, reverse=True)
    assert 2.8 < losses[0] < 3.4 and 1.2 < losses[3] < 1.5


def test_ngram_errors():
    with pytest.raises(DataError, match="n must be 1 or more: 0"):
        NgramModel(0)
    with pytest.raises(DataError, match="n = 4 or more: 3"):
        NgramModel(4).fit([0, 1, 2], 3)
    with pytest.raises(DataError, match=r"\[0, 3\): 3 at position 1"):
        NgramModel(2).fit([0, 3], 3)
    model = NgramModel(2).fit([0, 1, 2], 3)
    with pytest.raises(DataError, match=r"\[loss\] token ids must be in \[0, 3\): 7 at position 0"):
        model.loss(np.array([7]))
    with pytest.raises(DataError, match="0 tokens"):
        model.loss(np.array([], np.uint8))


def test_to_json_is_ascii_json():
    """It goes into the metadata of a checkpoint, which must be UTF-8: a surrogate is escaped."""
    text = CharTokenizer("a\ud800😀").to_json()
    assert text.isascii() and json.loads(text)["chars"] == ["a", "\ud800", "😀"]


def test_the_loss_of_a_certain_text_is_zero_and_not_minus_zero():
    loss = NgramModel(4).fit(np.zeros(50, np.int64), 1).loss(np.zeros(9, np.int64))
    assert f"{loss:.4f}" == "0.0000"
