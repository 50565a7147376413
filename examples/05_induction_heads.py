"""Induction heads: two layers of attention, alone, learn to continue what they have seen before, and do so all at once.

    python examples/05_induction_heads.py                       # a few minutes
    python examples/05_induction_heads.py --published           # the setup of the published curve, and its trap

Every row of training data is a block of random tokens, repeated until 48 tokens are full: "r k b z r k b z ...". The
first block cannot be foretold (log 128 = 4.85 nats a token). Everything after it can: look where the current token
stood before, and say what followed it there. That takes two attention heads, one above the other:

  * a **previous-token head** in layer 1 looks one position back, and so writes into every position which token stood
    before it;
  * an **induction head** in layer 2 then looks, from the token "b", for a position that says "a b stood before me": the
    position after the previous b. What it finds there, z, is the answer.

Neither is of any use without the other, so for hundreds of steps the loss hardly moves; then both form together and the
loss falls at once, a phase change (Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; Olsson et
al., "In-context Learning and Induction Heads", 2022; the task is the repeated subsequences of Nanda et al., "Progress
measures for grokking via mechanistic interpretability", 2023).

The published curve (--published) is of rows in which every block has 16 tokens, repeated 3 times. The loss falls as it
should, but what forms there is no induction head. The answer always stands at the same place, 15 or 31 positions back,
so a head that goes by positions alone is enough, and no head of layer 1 looks one back. On blocks of 16 its attention
looks exactly like an induction head's; on blocks of 12 it is lost, and its loss is far above guessing. So the blocks
here have all lengths from 8 to 24, and the script ends by asking the head about blocks of 12 and of 16.

Setup: two layers of attention, 4 heads, width 48, 128 tokens, no MLPs, 48 positions, batch 128, AdamW with learning
rate 1e-3 and weight decay 1. Here, with LayerNorm, rotary positions ("one back" is the same everywhere) and GPT-2's
start, all is over within 400 steps. --published has, as in `transformers.py` of the repository progress-measures-paper,
no norms, learned positions, betas (0.9, 0.98), 10 steps of warm-up, and normal weights of deviation 1/sqrt(width),
the head's 1/sqrt(tokens); there the loss falls between steps 300 and 1000. The published figures, about 4.6 at step 500
and 1.3 at step 1000, cannot be means over all 47 predictions, of which 15 are of the first block and cost 4.85 each:
that alone is 1.55. So the loss is printed for all tokens and for the repeats alone.

The folder --out holds loss.png, attention.png and log.csv, replaced by the next run. Ctrl-C stops and leaves what was
drawn so far.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from pathlib import Path

import numpy as np

import minigrad as mg
import minigrad.functional as F
from minigrad import io, nn, optim, train

VOCAB, CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 128, 48, 48, 2, 4, 128
LR, DECAY = 1e-3, 1.0
ASKED = (12, 16)                                         # lengths of blocks that the head is asked about at the end
PUBLISHED = {500: 4.6, 1000: 1.3}                        # step -> loss, about
COLUMNS = ("step", "loss", "first", "repeats", "previous", "induction")
SHADES = " .:-=+*#%@"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--published", action="store_true", help="the setup of the published curve: all blocks of 16 tokens")
    p.add_argument("--every", type=int, default=50, metavar="N", help="steps between rows of the table (default: 50)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="runs/induction-heads", metavar="DIR")
    p.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    args = p.parse_args(argv)
    if min(args.steps, args.every) < 1:
        raise ValueError(f"[arguments] --steps and --every are at least 1: got {args.steps}, {args.every}")
    return args


def repeated(rng: np.random.Generator, n: int, lengths: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """n rows of 48 ids, each a random block over and over, and which of them are repeats: (n, 48), (n, 48) bool."""
    length = rng.integers(lengths[0], lengths[1] + 1, (n, 1))
    position = np.arange(CONTEXT)
    blocks = rng.integers(0, VOCAB, (n, lengths[1]))
    return np.take_along_axis(blocks, position % length, axis=1), position >= length


def attention_maps(model: nn.Transformer, ids: np.ndarray) -> np.ndarray:
    """A = softmax(Q K^T / sqrt(D)) (A.10.2) of every head, which the model keeps to itself: (layer, head, B, T, T)."""
    visible = np.tril(np.ones((ids.shape[1],) * 2, bool))
    maps = []
    with mg.no_grad():
        x = model.embedding(ids)
        if model.position is not None:
            x = x + model.position.weight[:ids.shape[1]]
        for block in model.blocks:
            attention = block.attention
            packed = attention.qkv(x if block.norm1 is None else block.norm1(x))
            packed = packed.reshape(*ids.shape, 3, HEADS, attention.d_head)
            q, k, _ = F.moveaxis(packed, 2, 0).swapaxes(-2, -3)                       # each (B, H, T, D)
            if attention.rope_base:
                cos, sin = F.rotary_tables(range(ids.shape[1]), attention.d_head, attention.rope_base)
                q, k = F.rotary_embedding(q, cos, sin), F.rotary_embedding(k, cos, sin)
            scores = q @ k.mT / math.sqrt(attention.d_head)
            maps.append(F.masked_softmax(scores, visible).numpy().swapaxes(0, 1))
            x = block(x)
    return np.stack(maps)


def head_scores(maps: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two shares of every head's attention, (layer, head): what goes to the previous position; and what goes, from
    tokens seen before, to the positions that follow an earlier one of the same token."""
    t = np.arange(1, ids.shape[1])
    previous = maps[..., t, t - 1].mean(axis=(-2, -1))
    follows = np.zeros(maps.shape[2:], bool)             # (B, T, S): does s follow an earlier token like that at t?
    follows[:, :, 1:] = ids[:, :, None] == ids[:, None, :-1]
    follows &= np.tril(np.ones(follows.shape[1:], bool))
    asked = follows.any(axis=-1)
    induction = (maps * follows).sum(axis=-1)[..., asked].mean(axis=-1)
    return previous, induction


def make_model(published: bool) -> nn.Transformer:
    """Two layers of attention without MLPs."""
    model = nn.Transformer(vocab_size=VOCAB, context=CONTEXT, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, mlp="none",
                           norm="none" if published else "layer", position="learned" if published else "rope",
                           bias=False, tied=False)
    if published:
        for path, p in model.named_parameters():
            p.copy_(mg.randn(*p.shape) / math.sqrt(VOCAB if path == "head.weight" else WIDTH))
    return model


def look(model: nn.Transformer, seed: int, length: int) -> dict:
    """What is known of the model now, on 64 fresh rows of blocks of one length: losses, maps of row 0, head scores."""
    ids, repeats = repeated(np.random.default_rng(seed), 64, (length, length))
    with mg.no_grad():
        losses = F.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="none").numpy()
    maps = attention_maps(model, ids)
    previous, induction = head_scores(maps, ids)
    return {"first": float(losses[~repeats[:, 1:]].mean()), "repeats": float(losses[repeats[:, 1:]].mean()),
            "maps": maps[:, :, 0], "previous": previous, "induction": induction}


def best(scores: np.ndarray) -> tuple[int, int]:
    """(layer, head) of the highest score, from 0."""
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    return int(layer), int(head)


def name(head: tuple[int, int]) -> str:
    return f"layer {head[0] + 1}, head {head[1] + 1}"


def chosen(after: dict) -> dict[str, tuple[int, int]]:
    """The heads that are drawn: the best at each of the two."""
    return {"to the previous token": best(after["previous"]), "to what followed before": best(after["induction"])}


def phase_change(rows: list[dict]) -> tuple[int, int] | None:
    """Between which two rows the loss on repeats fell from near guessing to under half of it: their steps."""
    guessing = math.log(VOCAB)
    high = [row["step"] for row in rows if row["repeats"] > 0.9 * guessing]
    low = [row["step"] for row in rows if row["repeats"] < 0.5 * guessing]
    return (high[-1], low[0]) if high and low and high[-1] < low[0] else None


def as_text(before: np.ndarray, after: np.ndarray, size: int) -> str:
    """Two maps side by side, a character for each weight: rows look at columns."""
    pictures = [["".join(SHADES[min(int(w * len(SHADES)), len(SHADES) - 1)] for w in row) for row in map[:size, :size]]
                for map in (before, after)]
    return "\n".join(f"  {a:{size}}  |  {b}".rstrip() for a, b in zip(*pictures))


def write(out: Path, rows: list[dict], before: dict, after: dict, shown: int) -> None:
    """log.csv, loss.png, attention.png."""
    from matplotlib.figure import Figure

    with io.write_whole(out / "log.csv") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)

    figure = Figure(figsize=(7, 5.6), dpi=130, layout="constrained")
    losses, heads = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = [row["step"] for row in rows]
    for axes, key, label, color in (
            (losses, "first", "first block: nothing to go by", "#8aa1b8"), (losses, "repeats", "repeats", "#c2410c"),
            (heads, "previous", "to the previous token", "#8aa1b8"),
            (heads, "induction", "to what followed before", "#c2410c")):
        values = [row[key] for row in rows]
        axes.plot(steps, values, label=f"{label}, {values[-1]:.2f}", color=color, linewidth=2)
    losses.axhline(math.log(VOCAB), color="#475569", linestyle="--", linewidth=1.2,
                   label=f"guessing, {math.log(VOCAB):.2f}")
    losses.set(ylabel="loss (nats per token)", ylim=(0, None), title=f"Blocks of {shown} tokens, repeated")
    heads.set(xlabel="step", ylabel="attention of the best head", ylim=(0, 1))
    heads.set_xlim(left=0)
    for axes in (losses, heads):
        if (change := phase_change(rows)) is not None:
            axes.axvspan(*change, color="#fde68a", alpha=0.6, linewidth=0, label="phase change")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="best")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    with io.write_whole(out / "loss.png", "wb") as file:
        figure.savefig(file, format="png")

    figure = Figure(figsize=(8.4, 8.4), dpi=130, layout="constrained")
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (role, head) in zip(grid.T, chosen(after).items()):
        for a, seen in zip(axes, (before, after)):
            a.imshow(seen["maps"][head], cmap="Oranges", vmin=0, vmax=1, interpolation="nearest")
            a.set_title(f"{role}: {name(head)}, step {seen['step']}", fontsize=10)
            for edge in range(shown, CONTEXT, shown):    # where a block ends
                a.axhline(edge - 0.5, color="#475569", linewidth=0.5)
                a.axvline(edge - 0.5, color="#475569", linewidth=0.5)
    for a in grid[1]:
        a.set_xlabel("position looked at")
    for a in grid[:, 0]:
        a.set_ylabel("position that looks")
    with io.write_whole(out / "attention.png", "wb") as file:
        figure.savefig(file, format="png")


def report(rows: list[dict], before: dict, after: dict, others: dict[int, dict], shown: int, published: bool) -> None:
    """The heads before and after, their maps as text, whether they follow tokens or only count, and the published."""
    print(f"\nattention of every head on blocks of {shown}, step {before['step']} -> step {after['step']}")
    print(f"{'':18}{'to the previous token':>26}{'to what followed before':>28}")
    for layer in range(LAYERS):
        for head in range(HEADS):
            previous, induction = (f"{before[key][layer, head]:.2f} -> {after[key][layer, head]:.2f}"
                                   for key in ("previous", "induction"))
            print(f"{name((layer, head)):18}{previous:>26}{induction:>28}")
    head = chosen(after)["to what followed before"]
    print(f"\nthe map of {name(head)}: before, and after (three blocks of {shown}; a row looks at columns)\n")
    print(as_text(before["maps"][head], after["maps"][head], 3 * shown))
    print(f"\n{'blocks of':>10} {'loss, first block':>18} {'loss, repeats':>14} "
          f"{name(head) + ', to what followed':>35}")
    for length, seen in others.items():
        print(f"{length:>10} {seen['first']:>18.2f} {seen['repeats']:>14.2f} {seen['induction'][head]:>35.2f}")
    shares = [seen["induction"][head] for seen in others.values()]
    print("it follows tokens: an induction head" if min(shares) > 0.3 else
          "it goes by positions alone: no induction head" if max(shares) > 0.3 else "no induction head yet")
    if at := [row for row in rows if row["step"] in PUBLISHED]:
        print(f"\n{'loss':12}{'published':>10}{'this run, all tokens':>22}{'repeats':>10}" +
              ("" if published else "    (published: with blocks of 16 alone, as --published has them)"))
        for row in at:
            print(f"step {row['step']:<7}{PUBLISHED[row['step']]:>10}{row['loss']:>22.2f}{row['repeats']:>10.2f}")
    change = phase_change(rows)
    print(f"\nphase change: {'not seen' if change is None else f'between steps {change[0]} and {change[1]}'}")


def main(argv: list[str] | None = None) -> int:
    import matplotlib.figure  # noqa: F401  (a missing one is told now, not when the first picture is drawn)

    args = arguments(argv)
    if args.threads is not None:
        mg.set_num_threads(args.threads)
    out = Path(args.out)
    train.claim(out)
    train.keep_freed_memory()
    mg.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    lengths, shown = ((16, 16), 16) if args.published else ((8, 24), 12)
    model = make_model(args.published)
    optimizer = optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98 if args.published else 0.999),
                            weight_decay=DECAY)
    schedule = optim.constant_schedule(LR, 10 if args.published else 0)
    print(f"{model.num_parameters():,} parameters, {mg.get_num_threads()} threads, seed {args.seed}; blocks of "
          f"{lengths[0]} to {lengths[1]} tokens")
    print(f"loss: on all that is learnt from; then, on blocks of {shown}: loss in the first block and in repeats, and "
          "attention of the best heads")
    print(f"{'step':>6} {'loss':>7} {'first':>7} {'repeats':>8} {'previous':>9} {'induction':>10} {'seconds':>8}")

    rows: list[dict] = []
    seen: dict = {}
    before: dict = {}
    begin, stopped = time.perf_counter(), False
    try:
        for step in range(args.steps + 1):
            ids, _ = repeated(rng, BATCH, lengths)
            loss = model.loss(ids[:, :-1], ids[:, 1:])
            if step % args.every == 0 or step == args.steps:
                seen = {"step": step, **look(model, args.seed, shown)}
                rows.append(dict(zip(COLUMNS, (step, float(loss), seen["first"], seen["repeats"],
                                               float(seen["previous"].max()), float(seen["induction"].max())))))
                print("{step:>6} {loss:>7.3f} {first:>7.3f} {repeats:>8.3f} {previous:>9.2f} {induction:>10.2f}".format(
                    **rows[-1]), f"{time.perf_counter() - begin:>8.0f}", flush=True)
                if not before or seen["repeats"] > 0.9 * math.log(VOCAB):
                    before = seen                        # the last look at which it was still near guessing
                if len(rows) % 10 == 0:                  # pictures to watch while it goes on
                    write(out, rows, before, seen, shown)
            if step < args.steps:
                optimizer.param_groups[0]["lr"] = schedule(step)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except KeyboardInterrupt:
        stopped = True
        print("\nstopped")
    if rows:
        write(out, rows, before, seen, shown)
        others = {length: look(model, args.seed, length) for length in ASKED}
        report(rows, before, seen, others, shown, args.published)
        print(f"written: {out / 'log.csv'}, {out / 'loss.png'}, {out / 'attention.png'}")
    return 130 if stopped else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        sys.exit(f"error: {error.name} is missing; in the clone of minigrad: python -m pip install -e '.[train]'")
    except (train.TrainingError, RuntimeError, ValueError, OSError) as error:        # in one line, no traceback
        sys.exit(f"error: {error}")
