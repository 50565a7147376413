"""Train a small GPT on characters, watch it learn, and read what it writes.

    python examples/03_train_char_gpt.py                        # text that every Python has; about three minutes
    python examples/03_train_char_gpt.py --text shakespeare.txt --config baby --steps 5000 --out runs/shakespeare
    python examples/03_train_char_gpt.py --resume runs/shakespeare --prompt "ROMEO:"

The folder --out holds checkpoint.safetensors, log.csv and loss.png. Ctrl-C saves and says how to go on.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

import minigrad as mg
from minigrad import data, nn, optim, train

# Sizes, and steps and learning rates that suit them. The matrices of the blocks learn by Muon, all else by AdamW.
CONFIGS = {
    "nano": dict(layers=2, heads=2, width=64, context=32, batch=16, steps=3000, lr=4e-3),
    "baby": dict(layers=4, heads=4, width=128, context=64, batch=12, steps=1200, lr=4e-3),
    "mid": dict(layers=6, heads=6, width=384, context=256, batch=8, steps=4000, lr=2e-3, dropout=0.2),
}
MUON = 5.0                                               # Muon's learning rate is this many times AdamW's
LARGE = 64 << 20                                         # bytes of text from which tokens stay on disk, memory-mapped


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--text", metavar="FILE", help="UTF-8 text to learn (default: Python's own documentation)")
    p.add_argument("--config", choices=CONFIGS, help="sizes of a new run (default: baby)")
    p.add_argument("--out", metavar="DIR", help="folder of a new run (default: runs/char-gpt, or -2, -3 if taken)")
    p.add_argument("--resume", metavar="DIR", help="go on with the run in this folder; --steps may be raised")
    p.add_argument("--prompt", metavar="TEXT", help="what the sample begins with")
    p.add_argument("--sample", type=int, default=400, metavar="N", help="characters to write at the end")
    p.add_argument("--temperature", type=float, default=0.8)
    p.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    p.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    p.add_argument("--seed", type=int, help="of a new run (default: 1337)")
    p.add_argument("--eval-every", type=int, metavar="N", help="steps between evaluations (default: an eighth of all)")
    for name in ("steps", "layers", "heads", "width", "context", "batch"):
        p.add_argument(f"--{name}", type=int, help="overrides the config")
    for name in ("lr", "dropout"):
        p.add_argument(f"--{name}", type=float, help="overrides the config")
    return p.parse_args(argv)


def folder_of(args: argparse.Namespace) -> Path:
    """The run's folder, claimed: never one that holds another run, unless to go on with that."""
    if args.resume:
        train.claim(Path(args.resume))
        return Path(args.resume)
    names = [args.out] if args.out else ["runs/char-gpt", *(f"runs/char-gpt-{i}" for i in range(2, 1000))]
    for name in names:
        with suppress(train.FolderTaken):
            if not (Path(name) / "checkpoint.safetensors").exists():
                train.claim(Path(name))
                return Path(name)
    raise train.TrainingError(f"[arguments] {names[0]} holds a run already, or one is going on in it: go on with "
                              f"--resume {names[0]}, or choose another --out")


def settings_of(args: argparse.Namespace) -> dict:
    """All that determines the run: from the checkpoint when resuming, else the config with what was overridden."""
    names = ("steps", "eval_every", "layers", "heads", "width", "context", "batch", "lr", "dropout", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.text is not None:
        given["text"] = str(Path(args.text).resolve())
    new = {"dropout": 0.0, "eval_every": None, "seed": 1337, "text": None, **CONFIGS[args.config or "baby"], **given}
    if args.resume:
        if ignored := [f"--{name}" for name in ("out", "config") if getattr(args, name) is not None]:
            raise train.TrainingError(f"[resume] a run keeps its folder and sizes: leave out {', '.join(ignored)}")
        path = Path(args.resume) / "checkpoint.safetensors"
        settings = train.read_run(path)["settings"]
        if not {*new, "vocab", "baseline"} <= set(settings):
            raise train.TrainingError(f"[resume] {path} is a run of another program")
        free = ("steps", "eval_every", "text")
        fixed = [f"--{k} ({settings[k]})" for k, v in given.items() if k not in free and v != settings[k]]
        if fixed:
            raise train.TrainingError("[resume] a run keeps its sizes and seed; this one cannot change "
                                      f"{', '.join(fixed)}")
        settings |= given
    else:
        settings = new
    for name in names[:-2]:
        if settings[name] is not None and not settings[name] > 0:
            raise train.TrainingError(f"[arguments] --{name.replace('_', '-')} must be above 0: {settings[name]}")
    if not args.temperature >= 0 or args.sample < 0:
        raise train.TrainingError("[arguments] --temperature and --sample must be at least 0: "
                                  f"{args.temperature}, {args.sample}")
    return settings


def tokens_of(settings: dict, out: Path, resume: bool) -> tuple[data.CharTokenizer, np.ndarray]:
    """The text as numbers; a large file is encoded piece by piece to disk and mapped, never loaded whole."""
    path = settings["text"]
    large = path is not None and Path(path).is_file() and Path(path).stat().st_size > LARGE
    if large:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    else:
        text = data.builtin_text() if path is None else data.read_text(path)
        digest = hashlib.sha256(text.encode()).hexdigest()
    if settings.setdefault("digest", digest) != digest:
        raise train.TrainingError("[resume] the text is not the one this run began with")
    if large:
        tokenizer = data.CharTokenizer.from_file(path)
        if not (resume and (out / "tokens.npy").exists()):       # a new run may have another text
            data.tokenize_to_file(path, out / "tokens.npy", tokenizer)
        return tokenizer, data.open_tokens(out / "tokens.npy")
    tokenizer = data.CharTokenizer.from_text(text)
    return tokenizer, tokenizer.encode(text)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = mg.device(args.device)                      # says at once if there is no such device
    if args.threads is not None:
        mg.set_num_threads(args.threads)
    settings, out = settings_of(args), folder_of(args)

    tokenizer, tokens = tokens_of(settings, out, bool(args.resume))
    if settings.setdefault("vocab", tokenizer.to_json()) != tokenizer.to_json():
        raise train.TrainingError("[resume] the text has other characters than the one this run began with")
    start = tokenizer.encode(tokenizer.chars[0] if args.prompt is None else args.prompt)     # chars[0] is "\n", mostly
    if not len(start):
        raise train.TrainingError("[arguments] --prompt needs at least one character")
    held_in, held_out = data.split(tokens, 0.1)
    train_windows = data.Windows(held_in, settings["context"], settings["batch"], settings["seed"])
    val_windows = data.Windows(held_out, settings["context"], settings["batch"])

    mg.manual_seed(settings["seed"])
    model = nn.Transformer(vocab_size=tokenizer.vocab_size, context=settings["context"], d_model=settings["width"],
                           n_layers=settings["layers"], n_heads=settings["heads"], dropout=settings["dropout"],
                           position="rope", bias=False).to(device)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    lr, steps = settings["lr"], settings["steps"]
    optimizer = optim.Together(optim.AdamW(others, lr=lr, betas=(0.9, 0.99), weight_decay=0.0),
                               optim.Muon(matrices, lr=lr * MUON, weight_decay=0.0))
    schedule = optim.cosine_schedule(lr, steps, warmup=min(100, steps // 10), min_lr=lr / 10)
    print(f"{len(tokens):,} characters, {tokenizer.vocab_size} different; {len(held_in):,} to learn, {len(held_out):,} "
          "held out")
    sizes = ", ".join(f"{name} {settings[name]}" for name in ("layers", "heads", "width", "context", "batch"))
    print(f"{model.num_parameters():,} parameters on {device}, {mg.get_num_threads()} threads: {sizes}")

    if "baseline" not in settings:                       # what counting four characters at a time achieves
        ngram = data.NgramModel(4).fit(held_in[:10_000_000], tokenizer.vocab_size)
        settings["baseline"] = {"name": "4-gram model", "loss": ngram.loss(held_out[:1_000_000])}
    print(f"4-gram model of the same text: validation loss {settings['baseline']['loss']:.4f}")
    run = train.Run(out, model, optimizer, train_windows, val_windows, steps, schedule, clip=1.0,
                    eval_every=settings["eval_every"] or max(1, steps // 8), settings=settings)
    on = ["--device", str(device)] if device != "cpu" else []
    again = shlex.join(["python", sys.argv[0], "--resume", str(out), *on])
    if args.resume:
        run.resume()
        print(f"resumed {out} at step {run.step}")
    run.fit()
    if run.interrupted:
        print(f"stopped at step {run.step} of {steps} and saved; to go on:\n  {again}")
        return 130

    print(f"validation loss {run.rows[-1]['val_loss']:.4f}, 4-gram model {settings['baseline']['loss']:.4f} (nats per "
          "character)")
    print(f"written: {run.checkpoint}, {out / 'log.csv'}, {out / 'loss.png'}")
    print(f"--- a sample ({again} --prompt '...' writes more) ---")
    print(tokenizer.decode(start).lstrip("\n"), end="", flush=True)
    for tokens in model.stream(start[None, -settings["context"]:], args.sample, temperature=args.temperature):
        print(tokenizer.decode(tokens), end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:                            # outside the training loop, or pressed twice in it
        print("\nstopped at once; the last checkpoint is as it was")
        sys.exit(130)
    except (train.TrainingError, ImportError, RuntimeError, ValueError, OSError) as error:   # in one line, no traceback
        sys.exit(f"error: {error}")
