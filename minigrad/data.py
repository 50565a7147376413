"""Text to token windows: reading, a character tokenizer, windows for training and evaluation, and
the n-gram model that any network must beat.

Lies above io.py, whose `write_whole` it uses. Tokens are 1-D integer arrays, also np.memmap.
"""

import codecs
import io
import json
import os
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from minigrad.io import write_whole

FilePath = str | os.PathLike[str]
Text = TypeVar("Text", str, np.ndarray)
BLOCK = 1 << 20  # bytes read or characters encoded at a time


class DataError(ValueError):
    """Text or tokens that cannot be used; one line that says what and where."""


def _blocks(path: FilePath) -> Iterator[str]:
    """The text of a file piece by piece: UTF-8, byte order mark stripped, every newline `\\n`."""
    if not os.path.exists(path):
        raise DataError(f"[read_text] the file must exist: {path}")
    if not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "a device or a pipe"
        raise DataError(f"[read_text] must be a plain text file: {path} is {what}")
    if os.path.getsize(path) == 0:
        raise DataError(f"[read_text] the file must hold some text: {path} is empty")
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    end = 0
    try:
        with open(path, "rb") as file:
            while True:
                block = file.read(BLOCK)
                if (nul := block.find(b"\0")) >= 0:
                    raise DataError(
                        f"[read_text] must be text: {path} is binary or UTF-16 (a NUL byte at "
                        f"offset {end + nul}); save it as UTF-8"
                    )
                start, end = end, end + len(block)
                piece = decoder.decode(block, final=not block)
                yield piece.removeprefix("\ufeff") if start == 0 else piece
                if not block:
                    return
    except UnicodeDecodeError as error:  # error.object is the block after the bytes held back
        offset = end - len(error.object) + error.start
        raise DataError(
            f"[read_text] must be UTF-8: {path} has byte 0x{error.object[error.start]:02X} at "
            f"offset {offset} ({error.reason}); convert it, as with iconv -f LATIN1 -t UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"[read_text] must be readable: {path}: {error.strerror}") from error


def read_text(path: FilePath) -> str:
    """The text of a UTF-8 file, byte order mark stripped and every newline `\\n`. DataError if
    missing, a folder, empty, binary, or not UTF-8 (it names the byte and its offset)."""
    return "".join(_blocks(path))


def builtin_text() -> str:
    """About 465,000 characters of prose that come with Python: the language reference as shown by
    `help()`, topics in alphabetical order, so the same text for the same Python version. Some
    paragraphs appear under two topics: of the last tenth, a twelfth has been seen before."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "[builtin_text] this Python comes without pydoc_data.topics: pass --text FILE"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


class CharTokenizer:
    """One token id per character: the id of a character is its place in `chars`."""

    def __init__(self, chars: str) -> None:
        """chars: at least one character, none twice."""
        if not isinstance(chars, str) or not chars or len(set(chars)) < len(chars):
            raise DataError("[CharTokenizer] chars must be text, not empty, no character twice")
        self.chars = chars
        self.dtype = np.min_scalar_type(len(chars) - 1)  # uint8, uint16 or uint32
        self._codes = _code_points(chars)
        # id by code point, -1 for unknown; the last place stands for all larger code points
        self._ids = np.full(int(self._codes.max()) + 2, -1, np.int32)
        self._ids[self._codes] = np.arange(len(chars))

    @classmethod
    def from_text(cls, text: str) -> "CharTokenizer":
        """The characters of `text`, sorted by code point."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_file(cls, path: FilePath) -> "CharTokenizer":
        """As `from_text(read_text(path))`, for a file of any size."""
        seen: set[str] = set()
        for piece in _blocks(path):
            seen.update(piece)
        return cls("".join(sorted(seen)))

    @property
    def vocab_size(self) -> int:
        return len(self.chars)

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, 1-D, in the smallest unsigned dtype that holds every id."""
        return self._encode(text, 0)

    def _encode(self, text: str, start: int) -> np.ndarray:
        out = np.empty(len(text), self.dtype)
        for begin in range(0, len(text), BLOCK):  # bounds the scratch memory
            codes = _code_points(text[begin : begin + BLOCK])
            ids = self._ids[np.minimum(codes, len(self._ids) - 1)]
            if ids.min() < 0:
                at = begin + int(ids.argmin())
                raise DataError(
                    f"[encode] each character must be one of the {self.vocab_size} known: "
                    f"{text[at]!r} (U+{ord(text[at]):04X}) at position {start + at}"
                )
            out[begin : begin + len(ids)] = ids
        return out

    def decode(self, ids: Any) -> str:
        """The text of ids: any integers in [0, vocab_size), in an array, Tensor or list."""
        ids = np.asarray(ids).ravel()
        if ids.size == 0:
            return ""
        ids = _checked(ids, self.vocab_size, "decode")
        return self._codes[ids].tobytes().decode("utf-32-le", "surrogatepass")

    def to_json(self) -> str:
        """ASCII text for `from_json`."""
        # a list, because JSON makes one character of two surrogates side by side
        return json.dumps({"tokenizer": "char", "chars": list(self.chars)})

    @classmethod
    def from_json(cls, text: str) -> "CharTokenizer":
        """The inverse of `to_json`; DataError for anything else."""
        # 0x110000 code points, each of up to two escapes of 6 bytes in quotes, and the frame
        if not isinstance(text, str) or len(text) > 16 * 0x110000 + 100:
            raise DataError("[from_json] must be a string no longer than all of Unicode")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"[from_json] must be JSON: {error}") from error
        chars = content.get("chars") if isinstance(content, dict) else None
        if not (isinstance(chars, list) and all(isinstance(c, str) and len(c) == 1 for c in chars)):
            raise DataError(f'[from_json] must hold "chars", a list of characters: {text[:60]!r}')
        if content.get("tokenizer") != "char":
            raise DataError(f'[from_json] "tokenizer" must be "char": {text[:60]!r}')
        return cls("".join(chars))


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _checked(tokens: Any, vocab_size: int | None, op: str) -> np.ndarray:
    """tokens as a 1-D integer array; given vocab_size, every one in [0, vocab_size)."""
    tokens = np.asarray(tokens)  # of a memmap: a view, nothing is read
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"[{op}] tokens must be 1-D integers: {tokens.dtype} {tokens.shape}")
    if vocab_size is not None and tokens.size:
        for extreme in (tokens.argmin(), tokens.argmax()):
            if not 0 <= tokens[extreme] < vocab_size:
                raise DataError(
                    f"[{op}] token ids must be in [0, {vocab_size}): {tokens[extreme]} "
                    f"at position {extreme}"
                )
    return tokens


def tokenize_to_file(text_path: FilePath, out_path: FilePath, tokenizer: CharTokenizer) -> int:
    """Encode a text file of any size to a .npy file, written whole; gives the number of tokens."""
    if os.path.exists(out_path) and os.path.exists(text_path):
        if os.path.samefile(text_path, out_path):
            raise DataError(f"[tokenize_to_file] must not write over the text itself: {out_path}")
    header = {"descr": np.lib.format.dtype_to_descr(tokenizer.dtype), "fortran_order": False}
    with write_whole(out_path, "wb") as file:
        # the length is known at the end: NumPy pads the header so that any length fits its place
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (0,)})
        data, count = file.tell(), 0
        for piece in _blocks(text_path):
            file.write(tokenizer._encode(piece, count).data)
            count += len(piece)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (count,)})
        if file.tell() != data:
            raise DataError("[tokenize_to_file] this NumPy does not pad .npy headers: update it")
    return count


def open_tokens(path: FilePath) -> np.ndarray:
    """The tokens of a .npy file as a read-only np.memmap: nothing is read until it is used."""
    try:
        if not os.path.isfile(path):
            raise ValueError("is a folder" if os.path.isdir(path) else "no such file")
        with open(path, "rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("version of .npy is not 1.0")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if len(shape) != 1 or dtype.kind not in "iu":
                raise ValueError(f"tokens must be 1-D integers: {dtype} {shape}")
            expected = file.tell() + shape[0] * dtype.itemsize
            size = os.fstat(file.fileno()).st_size
            if expected != size:
                problem = "truncated" if expected > size else "too long"
                raise ValueError(f"{problem}: {expected:,} bytes expected, {size:,} found")
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"[open_tokens] must be a .npy file of tokens: {path}: {error}") from error


def split(tokens: Text, val_fraction: float = 0.1) -> tuple[Text, Text]:
    """(train, val): the first part and the last `val_fraction` of tokens (or of a text), as views.
    The cut is at int(n * (1 - val_fraction)), as in nanoGPT. DataError if a part would be empty."""
    cut = int(len(tokens) * (1 - val_fraction)) if 0 < val_fraction < 1 else 0
    if cut == 0 or cut == len(tokens):
        raise DataError(
            f"[split] both parts must hold something: {len(tokens)} tokens, "
            f"val_fraction {val_fraction}"
        )
    return tokens[:cut], tokens[cut:]


class Batches(Protocol):
    """What train.Run learns from and train.evaluate reads: Windows of one text, or whatever a model's `loss` takes.

    `batch(step)` depends on the step alone; `sequential(batch_size)` gives every row once, and
    `len` says how many rows that is; `count` how many tokens of a batch's targets a mean loss is over.
    """

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]: ...
    def sequential(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]: ...
    def count(self, targets: np.ndarray) -> int: ...
    def __len__(self) -> int: ...


class Windows:
    """Windows of `context` tokens with, as targets, the token that follows each."""

    def __init__(self, tokens: Any, context: int, batch_size: int, seed: int = 0) -> None:
        """tokens (N,), an array or a memmap, with N > context; 0 <= seed < 2**64."""
        self.tokens = _checked(tokens, None, "Windows")
        if context < 1 or batch_size < 1 or not 0 <= seed < 1 << 64:
            raise DataError(
                f"[Windows] context and batch_size must be 1 or more, seed in [0, 2**64): "
                f"{context}, {batch_size}, {seed}"
            )
        if len(self.tokens) < context + 1:
            raise DataError(
                f"[Windows] tokens must fill one window of context + 1 = {context + 1}: "
                f"{len(self.tokens)} tokens; use a longer text or a shorter context"
            )
        self.context, self.batch_size, self.seed = context, batch_size, seed

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets), int64 (batch_size, context), from random places, with replacement.

        The places depend on (seed, step) alone: a resumed run sees the same batches, with no state
        to save. They are raw Philox bits, which NumPy promises to keep, keyed by the pair; taking
        the remainder favours no place by more than N / 2**64.
        """
        if not 0 <= step < 1 << 64:
            raise DataError(f"[batch] step must be in [0, 2**64): {step}")
        bits = np.random.Philox(key=np.array([self.seed, step], np.uint64))
        places = np.uint64(len(self.tokens) - self.context)
        return self._at((bits.random_raw(self.batch_size) % places).astype(np.int64))

    def sequential(self, batch_size: int | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Batches of all windows that do not overlap, in order; the last batch may be smaller.

        Every token but the first is a target exactly once, except the (N - 1) % context at the end
        that fill no window, which are never one.
        """
        size = self.batch_size if batch_size is None else batch_size
        if size < 1:
            raise DataError(f"[sequential] batch_size must be 1 or more: {size}")
        starts = np.arange(len(self)) * self.context
        return (self._at(starts[i : i + size]) for i in range(0, len(starts), size))

    def __len__(self) -> int:
        """The number of windows that do not overlap."""
        return (len(self.tokens) - 1) // self.context

    def count(self, targets: np.ndarray) -> int:
        """The tokens of a batch's targets that a mean loss is over: all of them."""
        return targets.size

    def _at(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places = starts[:, None] + np.arange(self.context)
        return self.tokens[places].astype(np.int64), self.tokens[places + 1].astype(np.int64)


class NgramModel:
    """Interpolated modified Kneser-Ney, the strongest of the n-gram models that only count.

    S. Chen and J. Goodman, An empirical study of smoothing techniques for language modeling (1999).
    With h the k - 1 tokens before w and h' the same without its first, order k = 1..n says

        p_k(w|h) = (c(hw) - D(c(hw))) / c(h.) + p_{k-1}(w|h') * sum_v D(c(hv)) / c(h.)

    where p_0 is uniform, c counts at order n, and below it the different tokens seen before hw;
    where h was never seen p_k = p_{k-1}. D has three values per order, from the numbers of n-grams
    seen 1, 2, 3 and 4 times (0.5, 1, 1.5 where one of them is none, as in single characters).
    """

    def __init__(self, n: int = 4) -> None:
        if n < 1:
            raise DataError(f"[NgramModel] n must be 1 or more: {n}")
        self.n = n

    def fit(self, tokens: Any, vocab_size: int) -> "NgramModel":
        """Count the n-grams of tokens (N,), N >= n, ids below vocab_size. Some 100 N bytes."""
        tokens = _checked(tokens, vocab_size, "fit").astype(np.int64)
        if len(tokens) < self.n:
            raise DataError(f"[fit] tokens must be n = {self.n} or more: {len(tokens)}")
        self.vocab_size = vocab_size
        # A k-gram is the number of its first k - 1 tokens times V plus its last; np.unique numbers
        # the k-grams anew at every order, so that no key overflows.
        orders, prefix = [], np.zeros(len(tokens), np.int64)
        for k in range(1, self.n + 1):
            grams = prefix * vocab_size + tokens[k - 1 :]
            # keys, place of the first of each, number of the k-gram at each place, counts
            orders.append(np.unique(grams, True, True, True))
            prefix = orders[-1][2][:-1]
        self._orders = []
        contexts = 1
        for k, (keys, _, numbers, counts) in enumerate(orders, 1):
            if k < self.n:  # each different (k+1)-gram that ends in this k-gram
                counts = np.bincount(numbers[orders[k][1] + 1], minlength=len(keys))
            discounts = _discounts(counts)[np.minimum(counts, 3)]
            total = np.bincount(keys // vocab_size, counts, contexts)
            rest = np.bincount(keys // vocab_size, discounts, contexts)
            self._orders.append((keys, counts - discounts, total, rest))
            contexts = len(keys)
        return self

    def loss(self, tokens: Any) -> float:
        """Mean of -log p(token | up to n - 1 tokens before it) over tokens (N,), in nats."""
        tokens = _checked(tokens, self.vocab_size, "loss")
        if len(tokens) == 0:
            raise DataError("[loss] there must be a token to score: 0 tokens")
        return max(0.0, float(-np.log(self._score(tokens)).mean()))  # 0, not -0

    def probabilities(self, context: Any) -> np.ndarray:
        """p(w | context) for every w, float64 (V,); only the last n - 1 tokens of context count."""
        context = np.asarray(context) if len(context) else np.empty(0, np.int64)
        context = _checked(context, self.vocab_size, "probabilities")
        rows = np.broadcast_to(context, (self.vocab_size, len(context)))
        return self._score(np.c_[rows, np.arange(self.vocab_size)])[:, -1]

    def _score(self, tokens: np.ndarray) -> np.ndarray:
        """The probability of each token given those before it along the last axis."""
        tokens = tokens.astype(np.int64)
        p = np.full(tokens.shape, 1 / self.vocab_size)
        context = np.zeros(tokens.shape, np.int64)  # its number, -1 if never seen
        for k, (keys, left, total, rest) in enumerate(self._orders, 1):
            lower = p[..., k - 1 :]
            wanted = np.where(context < 0, -1, context * self.vocab_size + tokens[..., k - 1 :])
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            seen = keys[at] == wanted
            seen_context = (context >= 0) & (total[context] > 0)
            mixed = np.where(seen, left[at], 0) + rest[context] * lower
            np.divide(mixed, total[context], out=lower, where=seen_context)
            context = np.where(seen, at, -1)[..., :-1]
        return p


def _discounts(counts: np.ndarray) -> np.ndarray:
    """D(0), D(1), D(2), D(3 or more) from the counts of one order (Chen and Goodman, 1999)."""
    n1, n2, n3, n4 = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].tolist()
    if not (n1 and n2 and n3 and n4):
        return np.array([0, 0.5, 1, 1.5])
    y = n1 / (n1 + 2 * n2)
    # kept positive, so that what was never seen keeps a probability
    return np.array([0, *np.maximum([y, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0.1)])
