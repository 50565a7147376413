"""Time and peak memory of attention, forward and backward: what O(T) saves over O(T^2), and skipping over computing.

    python tests/benchmarks/attention.py                        # T 256 to 16384: about half an hour
    python tests/benchmarks/attention.py --sizes 256 1024 --threads 1 --repeats 3 --out attention

One sample, 8 heads of width 64, float32. Every number comes from a process of its own. Time: the median of some
repeats after one warm-up (fewer repeats where one takes long; the JSON says how many). Memory: how far one pass takes
the process above what it held with the inputs made and a tiny pass done, so it counts everything: scores, gradients,
scratch of threads. A pass that would need more than --max-gb is left out, with the reason. PyTorch's kernels stand
beside where it is installed; it has no window, so there it gets a mask, whose T x T bytes count. --out PATH writes
PATH.json and PATH.md.
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

B, H, D = 1, 8, 64
OURS, TORCHS = ["composed", "fused", "tiled"], ["torch flash", "torch math"]
KINDS = {"full": {}, "causal": {"is_causal": True}, "windowed": {"is_causal": True, "window": 512}}
SCORES_HELD = 4                                          # arrays of H T T scores that a pass holds: only a first guess
LONG = 60.0                                              # seconds after which no further repeat starts


# --- one measurement, in a process of its own ----------------------------------------------------------------------


def minigrad_pass(way: str, t: int, kind: str, threads: int):
    """A function that runs one forward and backward pass."""
    import minigrad as mg
    import minigrad.functional as F

    mg.set_num_threads(threads)
    q, k, v = inputs = [mg.randn(B, H, t, D, requires_grad=True) for _ in range(3)]
    ct = mg.randn(B, H, t, D)

    def run():
        F.scaled_dot_product_attention(q, k, v, implementation=way, **KINDS[kind]).backward(ct)
        for x in inputs:
            x.grad = None
    return run


def torch_pass(way: str, t: int, kind: str, threads: int):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_num_threads(threads)
    q, k, v = inputs = [torch.randn(B, H, t, D, requires_grad=True) for _ in range(3)]
    ct = torch.randn(B, H, t, D)
    backend = SDPBackend.MATH if way == "torch math" else SDPBackend.FLASH_ATTENTION
    masks: list = []

    def run():
        if kind == "windowed" and not masks:             # made in the warm-up when time is measured, counted in memory
            at = torch.arange(t)
            apart = at[:, None] - at
            masks.append((apart >= 0) & (apart < KINDS[kind]["window"]))
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, *masks, is_causal=kind == "causal").backward(ct)
        for x in inputs:
            x.grad = None
    return run


def held() -> int:
    """Bytes of memory this process holds now; from here on `peak` starts anew, where the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return peak()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(what: str, way: str, t: int, kind: str, threads: int, repeats: int) -> dict:
    make = torch_pass if way in TORCHS else minigrad_pass
    if what == "memory":
        make(way, 16, kind, threads)()                   # loads code, starts threads
        run = make(way, t, kind, threads)
        before = held()
        run()
        return {"bytes": max(0, peak() - before)}
    run = make(way, t, kind, threads)
    times: list[float] = []
    begin = time.perf_counter()
    run()
    while len(times) < repeats and (not times or time.perf_counter() - begin < LONG):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times), "repeats": len(times)}


# --- the table -----------------------------------------------------------------------------------------------------


def in_a_process(**task) -> dict:
    """What `measure` returns, or why it did not."""
    threads = str(task["threads"])
    env = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "MINIGRAD_COMPOSED": ""}
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"skipped": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def expected_bytes(t: int, smaller: dict | None) -> float:
    """From the largest smaller size that ran, by the law of the worst case, T^2."""
    return SCORES_HELD * 4 * H * t * t if smaller is None else smaller["bytes"] * (t / smaller["t"]) ** 2


def measure_all(args) -> list[dict]:
    ways = OURS + (TORCHS if importlib.util.find_spec("torch") else [])
    rows = []
    for kind in KINDS:
        for way in ways:
            smaller = None
            for t in sorted(args.sizes):
                row = {"kind": kind, "way": way, "t": t}
                linear = way in ("tiled", "torch flash") and not (way == "torch flash" and kind == "windowed")
                need = expected_bytes(t, smaller)
                if not linear and need > args.max_gb * 1e9:
                    row["skipped"] = f"would need about {need / 1e9:.2g} GB, over --max-gb {args.max_gb:g}"
                else:
                    task = {"way": way, "t": t, "kind": kind, "threads": args.threads, "repeats": args.repeats}
                    row |= in_a_process(what="memory", **task)
                    if "skipped" not in row:
                        smaller = row
                        row |= in_a_process(what="time", **task)
                rows.append(row)
                print(f"{kind:9} {way:12} T {t:6}  {cell(row)}", file=sys.stderr, flush=True)
    return rows


def cell(row: dict | None) -> str:
    if row is None or "skipped" in row:
        return "left out" if row else ""
    return f"{row['seconds'] * 1e3:,.1f} ms, {row['bytes'] / 1e6:,.1f} MB"


def lines(header: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [header, ["---:"] * len(header), *body]]


def report(run: dict) -> str:
    """The Markdown text: three tables, then what they show, computed from them."""
    rows, at = run["rows"], {(r["kind"], r["way"], r["t"]): r for r in run["rows"]}
    ways = list(dict.fromkeys(r["way"] for r in rows))
    sizes = sorted({r["t"] for r in rows})
    machine = ", ".join(f"{name} {value}" for name, value in run["machine"].items())
    out = ["# Attention: time and peak memory, forward and backward", "",
           f"B {B}, H {H}, D {D}, float32. {machine}. Memory is what a pass takes above its inputs."]
    for kind, options in KINDS.items():
        out += ["", f"## {kind.capitalize()}" + (f", w = {options['window']}" if "window" in options else ""), ""]
        out += lines(["T", *ways], [[f"{t}", *(cell(at.get((kind, way, t))) for way in ways)] for t in sizes])
    out += ["", "## How memory grows", "",
            "The power p of T in memory ~ T^p, between the two largest sizes that ran.", ""]
    powers = [[kind, *(growth([at[kind, way, t] for t in sizes]) for way in ways)] for kind in KINDS]
    out += lines(["", *ways], powers)
    out += ["", "## What skipping hidden blocks saves", "",
            "Time of full attention over time of causal, and of windowed.", ""]
    out += lines(["T", *ways], [[f"{t}", *(saving(at, way, t) for way in ways)] for t in sizes])
    reasons = [f"- {r['kind']}, {r['way']}, T {r['t']}: {r['skipped']}" for r in rows if "skipped" in r]
    return "\n".join(out + (["", "## Left out", "", *reasons] if reasons else [])) + "\n"


def growth(rows: list[dict]) -> str:
    ran = [r for r in rows if r.get("bytes")][-2:]
    return f"{math.log(ran[1]['bytes'] / ran[0]['bytes'], ran[1]['t'] / ran[0]['t']):.2f}" if len(ran) == 2 else ""


def saving(at: dict, way: str, t: int) -> str:
    full, *others = (at.get((kind, way, t), {}).get("seconds") for kind in ("full", "causal", "windowed"))
    return " / ".join(f"{full / other:.1f}" if full and other else "-" for other in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 8192, 16384], metavar="T")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                        else os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-gb", type=float, default=4.0)
    parser.add_argument("--out", type=Path, help="write this path with .json and .md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(**json.loads(args.one))))
        return
    machine = {"CPUs": os.cpu_count(), "threads": args.threads, "machine": platform.machine(),
               "Python": platform.python_version(), "NumPy": np.__version__}
    if importlib.util.find_spec("torch"):
        machine["PyTorch"] = version("torch")
    run = {"machine": machine, "shape": {"B": B, "H": H, "D": D}, "rows": measure_all(args)}
    text = report(run)
    print(text)
    if args.out:
        args.out.with_suffix(".json").write_text(json.dumps(run, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
