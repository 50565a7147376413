"""One training step of a small GPT, against PyTorch eager and compiled, JAX compiled, and the products alone.

    python tests/benchmarks/step.py                             # every row: about a quarter of an hour
    python tests/benchmarks/step.py --sizes nano baby --threads 1 --rounds 5 --out step

A step is forward, backward and AdamW in float32: pre-norm, tanh-GELU, causal, learned positions, tied head, no dropout.
`floor`: the step's matrix products alone, into memory that is there already. `chain`: 300 times x = tanh(x a + b) on
8 x 8, forward and backward, which is the cost of a node. `generate`: a token with a key/value cache.

Each number comes from a process of its own, pinned to the same cores as the others; in a round every program has its
turn, and what counts is the median over rounds of the ratio to PyTorch's turn in the same round, with its quartiles.
Memory is the peak above what the process held with its libraries imported. A program whose library is missing is left
out. Run it on a quiet machine. --out PATH writes PATH.json and PATH.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

# vocabulary, context, layers, heads, width, batch
SIZES = {"nano": (65, 32, 2, 2, 64, 16), "baby": (65, 64, 4, 4, 128, 12), "mid": (65, 256, 6, 6, 384, 8)}
PROGRAMS = {"minigrad": "numpy", "torch": "torch", "torch compiled": "torch", "jax compiled": "jax", "floor": "numpy"}
SECONDS = 2.0                                            # how long a turn measures, once warm


# --- the programs: each gives a function that runs one step ----------------------------------------------------------


def minigrad_step(v, t, layers, heads, c, b, threads):
    import minigrad as mg
    from minigrad import nn, optim, train

    mg.set_num_threads(threads)
    train.keep_freed_memory()                            # as the training loop of minigrad/train.py does
    model = nn.Transformer(vocab_size=v, context=t, d_model=c, n_layers=layers, n_heads=heads)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    ids, targets = batch_of(v, t, b)

    def step():
        loss = model.loss(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def torch_model(v, t, layers, heads, c):
    """The same model in PyTorch's words: model(ids, cache=None), a cache being a list of (k, v) for each layer."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
            self.qkv, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)
            self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

        def forward(self, x, cache):
            n = x.shape[1]
            q, k, v = (a.view(-1, n, heads, c // heads).transpose(1, 2) for a in self.qkv(self.norm1(x)).split(c, 2))
            if cache is not None:
                if cache:
                    k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
                cache[:] = [k, v]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)
            x = x + self.out(y.transpose(1, 2).reshape(-1, n, c))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(v, c), nn.Embedding(t, c)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(c)

        def forward(self, ids, caches=None, at=0):
            x = self.embedding(ids) + self.position.weight[at:at + ids.shape[1]]
            for i, block in enumerate(self.blocks):
                x = block(x, None if caches is None else caches[i])
            return self.norm(x) @ self.embedding.weight.T
    return Model()


def torch_step(v, t, layers, heads, c, b, threads, compiled=False):
    import torch

    torch.set_num_threads(threads)
    model = torch_model(v, t, layers, heads, c)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, targets = (torch.tensor(a) for a in batch_of(v, t, b))
    run = torch.compile(model) if compiled else model

    def step():
        loss = torch.nn.functional.cross_entropy(run(ids).view(-1, v), targets.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()
    return step


def jax_step(v, t, layers, heads, c, b, threads):
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def matrix(*shape):
        return jnp.asarray(rng.normal(0, 0.02, shape).astype(np.float32))

    def norm_of():
        return jnp.ones(c), jnp.zeros(c)

    params = {"embedding": matrix(v, c), "position": matrix(t, c), "norm": norm_of(), "blocks": [
        {"norm1": norm_of(), "norm2": norm_of(), "qkv": (matrix(c, 3 * c), jnp.zeros(3 * c)),
         "out": (matrix(c, c), jnp.zeros(c)), "up": (matrix(c, 4 * c), jnp.zeros(4 * c)),
         "down": (matrix(4 * c, c), jnp.zeros(c))} for _ in range(layers)]}
    hidden = jnp.asarray(np.triu(np.full((t, t), -np.inf, np.float32), 1))

    def normed(x, weights):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * weights[0] + weights[1]

    def linear(x, weights):
        return x @ weights[0] + weights[1]

    def loss_of(p, ids, targets):
        x = p["embedding"][ids] + p["position"]
        for w in p["blocks"]:
            q, k, u = (a.reshape(b, t, heads, c // heads).transpose(0, 2, 1, 3)
                       for a in jnp.split(linear(normed(x, w["norm1"]), w["qkv"]), 3, axis=-1))
            a = jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(c // heads) + hidden)
            x = x + linear((a @ u).transpose(0, 2, 1, 3).reshape(b, t, c), w["out"])
            x = x + linear(jax.nn.gelu(linear(normed(x, w["norm2"]), w["up"]), approximate=True), w["down"])
        logits = normed(x, p["norm"]) @ p["embedding"].T
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()

    @jax.jit
    def update(p, m1, m2, n, ids, targets):
        loss, grads = jax.value_and_grad(loss_of)(p, ids, targets)
        m1 = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m1, grads)
        m2 = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, m2, grads)
        p = jax.tree.map(lambda w, a, s: w * (1 - 1e-5) - 1e-3 * (a / (1 - 0.9**n)) / (
            jnp.sqrt(s / (1 - 0.999**n)) + 1e-8), p, m1, m2)
        return loss, p, m1, m2

    zeros = jax.tree.map(jnp.zeros_like, params)
    ids, targets = (jnp.asarray(a) for a in batch_of(v, t, b))
    state = [params, zeros, zeros, 0]

    def step():
        state[3] += 1
        loss, *state[:3] = update(*state, ids, targets)
        return float(loss)
    return step


def floor_step(v, t, layers, heads, c, b, threads):
    """The products of one step, forward and backward: of each x w also ct w^T and x^T ct."""
    rows, d = b * t, c // heads
    linear = [(rows, c, 3 * c), (rows, c, c), (rows, c, 4 * c), (rows, 4 * c, c)]
    each = [*linear * layers, (rows, c, v)]

    def array(*shape):
        return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

    products = []
    for m, k, n in each:
        x, w, ct = array(m, k), array(k, n), array(m, n)
        products += [(x, w, np.empty_like(ct)), (ct, w.T, np.empty_like(x)), (x.T, ct, np.empty_like(w))]
    for _ in range(layers):
        q, scores = array(b, heads, t, d), array(b, heads, t, t)
        kt, out, held = q.swapaxes(-1, -2), np.empty_like(q), np.empty_like(scores)
        products += [(q, kt, held), (scores, q, out), (q, kt, held), (scores.swapaxes(-1, -2), q, out),
                     (scores, q, out), (scores.swapaxes(-1, -2), q, out)]

    def step():
        for x, w, y in products:
            np.matmul(x, w, out=y)
        return 0.0
    return step


def batch_of(v, t, b):
    ids = np.random.default_rng(0).integers(0, v, (b, t + 1))
    return ids[:, :-1], ids[:, 1:]


def chain_of(program, threads):
    a, b = (np.random.default_rng(s).standard_normal((8, 8)).astype(np.float32) * 0.1 for s in (0, 1))
    if program == "minigrad":
        import minigrad as mg
        tensor, tanh = (lambda x: mg.tensor(x, requires_grad=True)), mg.functional.tanh
    else:
        import torch
        torch.set_num_threads(threads)
        tensor, tanh = (lambda x: torch.tensor(x, requires_grad=True)), torch.tanh
    a, b = tensor(a), tensor(b)

    def step():
        x = tensor(np.ones((8, 8), np.float32))
        for _ in range(300):
            x = tanh(x * a + b)
        x.sum().backward()
        return 0.0
    return step


def writer_of(program, v, t, layers, heads, c, b, threads):
    """A step is t // 2 tokens for each of b rows, from a prompt of t // 2: seconds a token follow."""
    prompt = np.random.default_rng(0).integers(0, v, (b, t // 2))
    if program == "minigrad":
        import minigrad as mg
        from minigrad import nn
        mg.set_num_threads(threads)
        model = nn.Transformer(vocab_size=v, context=t, d_model=c, n_layers=layers, n_heads=heads)
        return lambda: model.generate(prompt, t // 2, temperature=0)[0, -1]
    import torch
    torch.set_num_threads(threads)
    model = torch_model(v, t, layers, heads, c).eval()

    @torch.no_grad()
    def step():
        caches, ids, at = [[] for _ in range(layers)], torch.tensor(prompt), 0
        for _ in range(t // 2):
            logits = model(ids, caches, at)
            at += ids.shape[1]
            ids = logits[:, -1].argmax(-1, keepdim=True)
        return int(ids[0, 0])
    return step


# --- one turn, in a process of its own -------------------------------------------------------------------------------


def held() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def turn(row: str, program: str, sizes: list, threads: int) -> dict:
    importlib.import_module(PROGRAMS[program])
    if program == "minigrad":
        importlib.import_module("minigrad.train")
    before = held()
    if row == "chain":
        step = chain_of(program, threads)
    elif row.startswith("generate"):
        step = writer_of(program, *sizes, threads)
    else:
        make = {"minigrad": minigrad_step, "torch": torch_step, "jax compiled": jax_step, "floor": floor_step,
                "torch compiled": lambda *a: torch_step(*a, compiled=True)}[program]
        step = make(*sizes, threads)
    for _ in range(3):
        step()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times), "bytes": peak() - before}


def in_a_process(row: str, program: str, sizes: list, threads: int) -> dict | None:
    count = str(threads)
    env = {**os.environ, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MINIGRAD_COMPOSED": "",
           "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"}
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_setaffinity") else None
    command = [sys.executable, __file__, "--one", json.dumps([row, program, sizes, threads])]
    done = subprocess.run(command, capture_output=True, text=True, env=env,
                          preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores))
    if done.returncode:
        print(f"{program}: {(done.stderr.strip().splitlines() or ['ended'])[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


# --- the table -------------------------------------------------------------------------------------------------------


def measure(row: str, programs: list[str], sizes: list, threads: int, rounds: int) -> list[dict]:
    turns: dict[str, list] = {program: [] for program in programs}
    for _ in range(rounds):
        for program in programs:
            turns[program].append(in_a_process(row, program, sizes, threads))
    found = []
    for program in programs:
        done = [(one, base) for one, base in zip(turns[program], turns["torch"]) if one and base]
        if done:
            ratios = sorted(one["seconds"] / base["seconds"] for one, base in done)
            low, middle, high = (float(np.quantile(ratios, q)) for q in (0.25, 0.5, 0.75))
            found.append({"row": row, "threads": threads, "program": program, "ratio": middle, "quartiles": [low, high],
                          "seconds": statistics.median(one["seconds"] for one, _ in done),
                          "megabytes": statistics.median(one["bytes"] for one, _ in done) / 1e6})
            print(line(found[-1]), file=sys.stderr, flush=True)
    return found


def line(r: dict) -> str:
    return (f"| {r['row']} | {r['threads']} | {r['program']} | {r['seconds'] * 1e3:.2f} | {r['ratio']:.2f} "
            f"| {r['quartiles'][0]:.2f} to {r['quartiles'][1]:.2f} | {r['megabytes']:.0f} |")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    p.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    p.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    p.add_argument("--rows", nargs="+", choices=("step", "chain", "generate"), default=["step", "chain", "generate"])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out", metavar="PATH")
    p.add_argument("--one", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.one:
        print(json.dumps(turn(*json.loads(args.one))))
        return 0
    if importlib.util.find_spec("torch") is None:
        sys.exit("error: every ratio is to PyTorch: python -m pip install torch==2.13.0")
    programs = [name for name in dict.fromkeys(["torch", *args.programs]) if importlib.util.find_spec(PROGRAMS[name])]
    both = [name for name in programs if name in ("torch", "minigrad")]
    results = []
    for threads in args.threads:
        if "step" in args.rows:
            for size in args.sizes:
                results += measure(size, programs, SIZES[size], threads, args.rounds)
        if "chain" in args.rows:
            results += measure("chain", both, [], threads, args.rounds)
        if "generate" in args.rows:
            for rows in (1, 16):
                sizes = [*SIZES[args.sizes[-1]][:5], rows]
                results += measure(f"generate {args.sizes[-1]}, {rows} rows", both, sizes, threads, args.rounds)
    libraries = {name: version(name) for name in ("numpy", "torch", "jax") if importlib.util.find_spec(name)}
    head = [f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
            + ", ".join(f"{name} {number}" for name, number in libraries.items()), "",
            "| what | threads | program | ms | of PyTorch eager | quartiles | peak MB |",
            "|---|---|---|---|---|---|---|"]
    table = "\n".join([*head, *map(line, results)])
    print(table)
    if args.out:
        Path(f"{args.out}.json").write_text(json.dumps({"libraries": libraries, "results": results}, indent=1))
        Path(f"{args.out}.md").write_text(table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
