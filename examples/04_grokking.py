"""Grokking: a network knows its training data by heart, and much later, at once, it understands.

    python examples/04_grokking.py                              # six minutes on one core
    python examples/04_grokking.py --fraction 0.3 --epochs 15000      # the paper's main run: hours, and a long wait

The task is c = a + b mod 113, written as three tokens "a b =", and there are 113^2 = 12769 such questions. A
Transformer of one layer sees six tenths of them, all at once at every step ("epoch"), and is asked the others. It soon
learns the answers it is shown, while on the others it gets *worse*: a loss above log 113 = 4.73, which is what guessing
costs. That is memorising. But weight decay pulls at every weight at every step, and a rule needs smaller weights than a
table of answers: so, hidden behind a training loss near 0, the table is slowly exchanged for the rule, and when the
rule prevails the loss on the questions never seen falls to almost nothing. That delayed fall is called grokking (Power
et al., 2022). The less there is to learn from, the longer the wait; with six tenths it is short.

A step on the way: from epoch 160 on (seed 0) the test accuracy rests near 60 %. Attention adds up a and b with little
regard to order, so the network that knows a + b by heart knows b + a, and for six tenths of the test questions that is
among those learnt. The other four tenths are what the rule is for.

The rule is known too (Nanda et al., 2023): the network places the number a on circles, at the angles 2 pi k a / 113 for
a few frequencies k, and adds angles. So the embedding, taken as a function of a, ends up with a few large Fourier
components; it begins with all alike. The right half of the picture shows it.

Setup, as published: N. Nanda, L. Chan, T. Lieberum, J. Smith, J. Steinhardt, "Progress measures for grokking via
mechanistic interpretability", ICLR 2023, and `transformers.py` of its repository progress-measures-paper. One layer,
width 128, 4 heads, ReLU MLP of 512, learned positions, no norms, biases in the MLP alone, 114 tokens; AdamW with
learning rate 1e-3 (10 epochs of warm-up), betas (0.9, 0.98), weight decay 1 on everything; loss at the last token, in
float64. Weights start normal with deviation 1/sqrt(width), the head's with 1/sqrt(tokens), biases at 0. When grokking
comes depends on all of these, and on the seed: the test loss fell under 0.1 at epoch 540 with seed 0 and at 310 with
seed 1; published is about 440 to 600.

The folder --out holds curves.png and log.csv, replaced by the next run. Ctrl-C stops and leaves what was drawn so far.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import sys
import time
from pathlib import Path

import numpy as np

import minigrad as mg
import minigrad.functional as F
from minigrad import io, nn, optim, train

P = 113                                                  # the modulus; the token P is "="
WIDTH, HEADS, HIDDEN = 128, 4, 512
LR, BETAS, DECAY, WARMUP = 1e-3, (0.9, 0.98), 1.0, 10
GROKKED = 0.1                                            # the test loss that counts as understood
COLUMNS = ("epoch", "train_loss", "test_loss", "train_acc", "test_acc")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--epochs", type=int, default=1000, help="most epochs (default: 1000)")
    p.add_argument("--fraction", type=float, default=0.6, help="of the questions, to learn from (default: 0.6)")
    p.add_argument("--every", type=int, default=10, metavar="N", help="epochs between rows of the table (default: 10)")
    p.add_argument("--after", type=int, default=100, metavar="N",
                   help=f"stop this many epochs after the test loss fell under {GROKKED} for good (default: 100)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="runs/grokking", metavar="DIR")
    p.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    args = p.parse_args(argv)
    if min(args.epochs, args.every, args.after) < 1 or not 1.0 / P**2 <= args.fraction < 1.0:
        raise ValueError("[arguments] --epochs, --every and --after are at least 1 and --fraction is between 0 and 1, "
                         f"of {P**2} questions: got {args.epochs}, {args.every}, {args.after}, {args.fraction}")
    return args


def questions(fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All "a b =" as ids (N, 3), shuffled and cut in two: to learn from, and to be asked."""
    pairs = [(a, b, P) for a in range(P) for b in range(P)]
    random.Random(seed).shuffle(pairs)                   # Python's shuffle, as published: the same split for a seed
    cut = int(fraction * len(pairs))
    return np.array(pairs[:cut]), np.array(pairs[cut:])


def make_model() -> nn.Transformer:
    """One layer with the published start: normal weights, deviation 1/sqrt(width), the head's 1/sqrt(tokens)."""
    model = nn.Transformer(vocab_size=P + 1, context=3, d_model=WIDTH, n_layers=1, n_heads=HEADS, d_ff=HIDDEN,
                           norm="none", mlp="relu", position="learned", tied=False)
    attention = model.blocks[0].attention
    attention.qkv.bias = attention.out.bias = None
    attention.causal = False                             # see answer(): the one query may see all three tokens
    for path, p in model.named_parameters():
        if p.ndim == 2:
            p.copy_(mg.randn(*p.shape) / math.sqrt(P + 1 if path == "head.weight" else WIDTH))
    return model


def answer(model: nn.Transformer, ids: np.ndarray) -> mg.Tensor:
    """Logits (B, 114) at "=". The same numbers as model(ids)[:, -1], at a third of the cost: with a single layer, no
    other position's query, MLP or logits have a part in them."""
    block = model.blocks[0]
    x = model.embedding(ids) + model.position.weight
    last = x[:, -1:]
    last = last + block.attention(last, context=x)
    last = last + block.mlp(last)
    return model.head(last[:, 0]).to(mg.float64)         # at a loss near 0 float32 would round it away


def loss_and_accuracy(model: nn.Transformer, ids: np.ndarray) -> tuple[float, float]:
    with mg.no_grad():
        logits = answer(model, ids)
        sums = ids[:, :2].sum(axis=1) % P
        return float(F.cross_entropy(logits, sums)), float((logits.numpy().argmax(axis=1) == sums).mean())


def fourier(model: nn.Transformer) -> np.ndarray:
    """The share of each frequency k = 1 ... 56 in the embedding as a function of the number a: sums to 1."""
    power = (np.abs(np.fft.rfft(model.embedding.weight.numpy()[:P], axis=0)) ** 2).sum(axis=1)[1:]
    return power / power.sum()


def first_below(rows: list[dict], name: str) -> int | None:
    """The first epoch of the table from which on the loss stays below GROKKED."""
    found = None
    for row in reversed(rows):
        if row[name] >= GROKKED:
            break
        found = row["epoch"]
    return found


def write(out: Path, rows: list[dict], before: np.ndarray, now: np.ndarray) -> None:
    """log.csv and curves.png."""
    from matplotlib.figure import Figure

    with io.write_whole(out / "log.csv") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    epochs = [row["epoch"] for row in rows]
    for name, label, color in (("train_loss", "train", "#8aa1b8"), ("test_loss", "test", "#c2410c")):
        losses = [row[name] for row in rows]
        left.plot(epochs, losses, label=f"{label}, {losses[-1]:.2g}", color=color, linewidth=2)
    left.axhline(math.log(P), color="#475569", linestyle="--", linewidth=1.2, label=f"guessing, {math.log(P):.2f}")
    left.axhline(GROKKED, color="#475569", linestyle=":", linewidth=1.2)
    if (epoch := first_below(rows, "test_loss")) is not None:
        left.annotate(f"test loss below {GROKKED}\nat epoch {epoch}", (epoch, GROKKED), (-130, -50),
                      textcoords="offset points", arrowprops={"arrowstyle": "-", "color": "#475569"})
    left.set(xlabel="epoch", ylabel="loss (nats)", yscale="log", title="Grokking: a + b mod 113")
    left.set_xlim(left=0)
    frequencies = np.arange(1, len(now) + 1)
    right.bar(frequencies, now, color="#c2410c", label="at the end")
    right.plot(frequencies, before, color="#8aa1b8", linewidth=2, label="at the start")
    right.set(xlabel="frequency k of the embedding", ylabel="share of its power", title="What it learned: circles")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    with io.write_whole(out / "curves.png", "wb") as file:
        figure.savefig(file, format="png")


def main(argv: list[str] | None = None) -> int:
    import matplotlib.figure  # noqa: F401  (a missing one is told now, not when the first picture is drawn)

    args = arguments(argv)
    if args.threads is not None:
        mg.set_num_threads(args.threads)
    out = Path(args.out)
    train.claim(out)
    train.keep_freed_memory()
    learn, ask = questions(args.fraction, args.seed)
    targets = learn[:, :2].sum(axis=1) % P
    mg.manual_seed(args.seed)
    model = make_model()
    optimizer = optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)
    schedule = optim.constant_schedule(LR, WARMUP)
    print(f"{len(learn)} questions to learn from, {len(ask)} to be asked; {model.num_parameters():,} parameters, "
          f"{mg.get_num_threads()} threads, seed {args.seed}")
    print(f"{'epoch':>6} {'train loss':>11} {'test loss':>10} {'train acc':>10} {'test acc':>9} {'seconds':>8}")

    rows: list[dict] = []
    before, begin, stopped = fourier(model), time.perf_counter(), False
    try:
        for epoch in range(args.epochs + 1):
            if epoch % args.every == 0 or epoch == args.epochs:
                losses, accuracies = zip(*(loss_and_accuracy(model, ids) for ids in (learn, ask)))
                rows.append(dict(zip(COLUMNS, (epoch, *losses, *accuracies))))
                print(f"{epoch:>6} {losses[0]:>11.2e} {losses[1]:>10.4f} {accuracies[0]:>10.1%} {accuracies[1]:>9.1%} "
                      f"{time.perf_counter() - begin:>8.0f}", flush=True)
                if len(rows) % 10 == 0:                  # a picture to watch while it goes on
                    write(out, rows, before, fourier(model))
                grokked = first_below(rows, "test_loss")
                if epoch == args.epochs or (grokked is not None and epoch >= grokked + args.after):
                    break
            optimizer.param_groups[0]["lr"] = schedule(epoch)
            optimizer.zero_grad()
            F.cross_entropy(answer(model, learn), targets).backward()
            optimizer.step()
    except KeyboardInterrupt:
        stopped = True
        print("\nstopped")
    if rows:
        write(out, rows, before, fourier(model))
        report(rows, args, fourier(model))
        print(f"written: {out / 'log.csv'}, {out / 'curves.png'}")
    return 130 if stopped else 0


def report(rows: list[dict], args: argparse.Namespace, shares: np.ndarray) -> None:
    """The milestones, beside the published ones."""
    published = {"test_loss": "about 440 to 600"} if args.fraction == 0.6 else {}
    print(f"\n{'':28}{'this run':>12}   published (fraction 0.6)")
    for name in ("train_loss", "test_loss"):
        epoch = first_below(rows, name)
        reached = f"epoch {epoch}" if epoch is not None else "not yet"
        print(f"{name.replace('_', ' ') + f' below {GROKKED}':28}{reached:>12}   {published.get(name, '')}".rstrip())
    top = np.argsort(-shares)[:5]
    names = ", ".join(map(str, sorted(top + 1)))
    print(f"five frequencies, {names}, hold {shares[top].sum():.0%} of the embedding's power")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        sys.exit(f"error: {error.name} is missing; in the clone of minigrad: python -m pip install -e '.[train]'")
    except (train.TrainingError, RuntimeError, ValueError, OSError) as error:        # in one line, no traceback
        sys.exit(f"error: {error}")
