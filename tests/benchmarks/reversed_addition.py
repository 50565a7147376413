"""Three-digit addition, learnt: a small Transformer adds two numbers it has never seen together, and is never wrong.

    python tests/benchmarks/reversed_addition.py
    python tests/benchmarks/reversed_addition.py --seed 2 --out addition.csv

A sum is a line of twelve characters with the answer written in reverse, "123+456=9750": units first, as one adds on
paper, so that each digit needs two digits, a carry, and nothing that is still to come. (Lee et al., "Teaching
Arithmetic to Small Transformers", 2023, found that this order makes addition easy to learn; the other way round the
first digit written depends on all carries.) There are a million sums of numbers from 000 to 999. 1000 are held out, to
be asked every --every steps; 10,000 more are held out and asked once, at the end, because the run stops where the first
1000 happen to be all right. The rest are learnt from, a random batch at a time, the loss taken at the answer alone.

Four layers, width 64, 4 heads, GPT-2-like, 200,000 parameters; AdamW, its learning rate falling by a cosine. An answer
counts if all four of its digits, each the likeliest given those written before it, are right. The published result is
that all of 1000 held-out sums are; the script returns 0 where that is reached.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time

import numpy as np

import minigrad as mg
import minigrad.functional as F
from minigrad import data, io, nn, optim, train

LAYERS, WIDTH, HEADS, BATCH = 4, 64, 4, 256
LR, WARMUP, BETAS, DECAY, CLIP = 2e-3, 100, (0.9, 0.99), 0.1, 1.0
HELD_OUT = 1000
DIGITS, ANSWER, QUESTION = 3, 4, 8                       # characters of a number, of the answer, and of "123+456="
TOKENS = data.CharTokenizer("0123456789+=")              # a digit's id is the digit


def lines(sums: np.ndarray) -> np.ndarray:
    """Ids (N, 12) of the sums a * 1000 + b.

    >>> TOKENS.decode(lines(np.array([123456]))[0])
    '123+456=9750'
    """
    a, b = np.divmod(sums, 10**DIGITS)
    plus, equals = (np.full((len(sums), 1), TOKENS.encode(c)[0]) for c in "+=")
    return np.concatenate([digits(a, DIGITS)[:, ::-1], plus, digits(b, DIGITS)[:, ::-1], equals, digits(a + b, ANSWER)],
                          axis=1)


def digits(numbers: np.ndarray, n: int) -> np.ndarray:
    """(N,) -> (N, n), units first."""
    return numbers[:, None] // 10 ** np.arange(n) % 10


def right(model: nn.Transformer, sums: np.ndarray) -> int:
    """How many of the sums are answered without a fault, each digit by argmax."""
    ids = lines(sums)
    written = model.generate(ids[:, :QUESTION], ANSWER, temperature=0.0)
    return int((written == ids).all(axis=1).sum())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="the learning rate falls over so many (default: 2000)")
    parser.add_argument("--every", type=int, default=100, help="steps between checks (default: 100)")
    parser.add_argument("--further", type=int, default=10_000, metavar="N",
                        help="sums held out besides, asked once at the end (default: 10000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--out", metavar="FILE", help="write the curve here as CSV: step, loss, right, seconds")
    args = parser.parse_args(argv)
    if min(args.steps, args.every, args.further) < 1 or args.further > 500_000:
        parser.error("--steps and --every are at least 1, --further from 1 to 500000: "
                     f"{args.steps}, {args.every}, {args.further}")
    if args.threads is not None:
        mg.set_num_threads(args.threads)
    train.keep_freed_memory()

    rng = np.random.default_rng(args.seed)
    every_sum = rng.permutation(10 ** (2 * DIGITS))
    held_out, further, to_learn = np.split(every_sum, [HELD_OUT, HELD_OUT + args.further])
    mg.manual_seed(args.seed)
    model = nn.Transformer(vocab_size=TOKENS.vocab_size, context=QUESTION + ANSWER - 1, d_model=WIDTH, n_layers=LAYERS,
                           n_heads=HEADS)
    optimizer = optim.AdamW(train.decay_groups(model, DECAY), lr=LR, betas=BETAS)
    schedule = optim.cosine_schedule(LR, args.steps, min(WARMUP, args.steps // 10), LR / 100)
    print(f"{len(to_learn):,} sums to learn from, {HELD_OUT:,} + {args.further:,} held out; {model.num_parameters():,} "
          f"parameters, seed {args.seed}, {mg.get_num_threads()} threads")
    print(f"{'step':>6} {'loss':>9} {'right of 1000':>14} {'seconds':>8}")

    rows: list[tuple] = []
    losses: list[float] = []
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        ids = lines(rng.choice(to_learn, BATCH))
        targets = ids[:, 1:].copy()
        targets[:, :QUESTION - 1] = -100                 # what the question is cannot be foretold: no loss there
        loss = F.cross_entropy(model(ids[:, :-1]), targets, ignore_index=-100)
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step - 1)
        optimizer.step()
        if step % args.every == 0 or step == args.steps:
            seconds = round(time.perf_counter() - begin, 1)
            rows.append((step, sum(losses) / len(losses), right(model, held_out), seconds))
            losses = []
            print(f"{step:>6} {rows[-1][1]:>9.4f} {rows[-1][2]:>14} {rows[-1][3]:>8.0f}", flush=True)
            if rows[-1][2] == HELD_OUT:
                break

    if args.out:
        with io.write_whole(args.out) as file:
            csv.writer(file, lineterminator="\n").writerows([("step", "loss", "right", "seconds"), *rows])
    reached = rows[-1][2] == HELD_OUT
    print(f"\n{'':44}{'published':>10}{'this run':>10}")
    print(f"{f'right of the {HELD_OUT:,} held-out sums':44}{HELD_OUT:>10,}{rows[-1][2]:>10,}")
    print(f"{f'right of {args.further:,} more, asked once':44}{'':>10}{right(model, further):>10,}")
    print(f"the goal is {'reached' if reached else 'MISSED'} at step {rows[-1][0]}, {rows[-1][3]:.0f} s")
    return 0 if reached else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (data.DataError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
