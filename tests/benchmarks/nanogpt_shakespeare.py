"""nanoGPT's published run on a CPU, in minigrad: the same configuration, the same loss.

    python tests/benchmarks/nanogpt_shakespeare.py --text shakespeare.txt

nanoGPT's README trains a baby GPT on the characters of Shakespeare "on a macbook or other cheap computer": 4 layers,
4 heads, width 128, context 64, batch 12, 2000 steps, no dropout, and ends at a validation loss of 1.88. What its
train.py does besides is done here: AdamW with betas (0.9, 0.99) and weight decay 0.1 on matrices alone, gradients
clipped at 1.0, a learning rate of 1e-3 falling to 1e-4 by a cosine after 100 steps of warm-up, no biases, a tied
head, exact GELU, the first nine tenths of the text to learn from. It estimates the loss on 20 random batches of the
rest; so does this script, and at the end it also takes the whole of the rest, once, which leaves no chance in that
number. What chance there is lies in the seed: seeds 1, 2 and 1337 ended at 1.887, 1.941 and 1.920 by nanoGPT's estimate
and at 1.906, 1.930 and 1.913 on the whole, and PyTorch from the same first weights on the same batches as seed 1337
printed the same four digits as minigrad at every evaluation.

The text is the file of nanoGPT's data/shakespeare_char (1,115,394 characters), which is not in this repository.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import numpy as np

import minigrad as mg
from minigrad import data, nn, optim, train

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
LR, MIN_LR, WARMUP = 1e-3, 1e-4, 100
EVAL_BATCHES = 20
PUBLISHED, PYTORCH, GOAL = 1.88, 1.8857, 1.90  # README of nanoGPT; PyTorch 2.13 on this configuration; to reach


def estimate(model: nn.Transformer, windows: data.Windows, step: int) -> float:
    """Mean loss of EVAL_BATCHES random batches, as nanoGPT's estimate_loss; other batches at every step."""
    model.eval()
    with mg.no_grad():
        losses = [float(model.loss(*windows.batch(step * EVAL_BATCHES + i))) for i in range(EVAL_BATCHES)]
    model.train()
    return sum(losses) / len(losses)


def curve(points: list[tuple[int, float]], width: int = 64, height: int = 14) -> str:
    """(step, loss) as text: one column for each stretch of steps, losses falling from top to bottom."""
    steps, losses = np.array(points).T
    low, high = losses.min(), losses.max()
    heights = np.interp(np.linspace(steps[0], steps[-1], width), steps, losses)
    rows = np.rint((high - heights) / max(high - low, 1e-9) * (height - 1)).astype(int)
    lines = []
    for row in range(height):
        label = high - (high - low) * row / (height - 1)
        lines.append(f"{label:6.2f} |" + "".join("*" if r == row else " " for r in rows).rstrip())
    return "\n".join(
        [*lines, " " * 7 + "+" + "-" * width, f"{' ' * 8}{steps[0]:<8.0f}{'step':^{width - 16}}{steps[-1]:>8.0f}"]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", required=True, metavar="FILE", help="the text of nanoGPT's data/shakespeare_char")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--out", metavar="FILE", help="write the curve here as CSV: step, train loss, validation loss")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be 1 or more: {args.steps}")
    if args.threads is not None:
        mg.set_num_threads(args.threads)

    text = data.read_text(args.text)
    tokenizer = data.CharTokenizer.from_text(text)
    held_in, held_out = data.split(tokenizer.encode(text), 0.1)
    batches = data.Windows(held_in, CONTEXT, BATCH, args.seed)
    asked = {
        "train": data.Windows(held_in, CONTEXT, BATCH, args.seed + 1),
        "val": data.Windows(held_out, CONTEXT, BATCH, args.seed + 2),
    }

    mg.manual_seed(args.seed)
    model = nn.Transformer(
        vocab_size=tokenizer.vocab_size,
        context=CONTEXT,
        d_model=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        mlp="gelu",
        bias=False,
        dropout=0.0,
    )
    optimizer = optim.AdamW(train.decay_groups(model, 0.1), lr=LR, betas=(0.9, 0.99))
    schedule = optim.cosine_schedule(LR, args.steps, min(WARMUP, args.steps // 10), MIN_LR)
    print(
        f"{len(text):,} characters, {tokenizer.vocab_size} different; {model.num_parameters():,} parameters; "
        f"{args.steps} steps, seed {args.seed}, {mg.get_num_threads()} threads"
    )

    points, spent = [], 0.0
    for step in range(args.steps + 1):
        if step % max(1, args.steps // 8) == 0 or step == args.steps:  # every 250 steps, as nanoGPT's configuration
            losses = {name: estimate(model, windows, step) for name, windows in asked.items()}
            points.append((step, losses["train"], losses["val"]))
            if args.out:  # from the first point on, so that a path that cannot be written is told before training
                with mg.io.write_whole(args.out) as file:
                    file.write("step,train_loss,val_loss\n" + "".join(f"{n},{a!r},{b!r}\n" for n, a, b in points))
            print(f"step {step:5}  train {losses['train']:.4f}  val {losses['val']:.4f}  {spent:6.1f} s", flush=True)
            if not math.isfinite(losses["val"]):
                print("the loss is not finite: stopped")
                return 1
        if step == args.steps:
            break
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.zero_grad()
        model.loss(*batches.batch(step)).backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent += time.perf_counter() - begin

    begin = time.perf_counter()
    whole = train.evaluate(model, data.Windows(held_out, CONTEXT, BATCH))
    counted = (len(held_out) - 1) // CONTEXT * CONTEXT
    print(f"\nvalidation loss over steps (nats per character)\n{curve([(step, val) for step, _, val in points])}\n")
    rows = [
        ("nanoGPT, published", f"{PUBLISHED:.2f}", "20 random batches"),
        ("PyTorch, the same configuration", f"{PYTORCH:.4f}", ""),
        (
            "minigrad, as nanoGPT estimates",
            f"{points[-1][2]:.4f}",
            f"{EVAL_BATCHES} random batches of {BATCH} x {CONTEXT} characters",
        ),
        ("minigrad, all held-out text", f"{whole:.4f}", f"{counted:,} characters, each once"),
    ]
    print("\n".join(f"{name:34}{value:>8}   {note}".rstrip() for name, value, note in rows))
    speed, took = args.steps * BATCH * CONTEXT / spent, time.perf_counter() - begin
    print(f"trained in {spent:.1f} s, {speed:,.0f} tokens/s; the last row took {took:.1f} s")
    if args.out:
        print(f"written: {args.out}")
    if args.steps < 2000:
        print(f"the published number is that of 2000 steps, not {args.steps}")
        return 0
    reached = points[-1][2] <= GOAL
    print(f"the goal of {GOAL:.2f} is {'reached' if reached else 'MISSED'}")
    return 0 if reached else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (data.DataError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
