"""Row-parallel loops on the CPU: how the NumPy kernels use the cache and more than one core.

A kernel made of several NumPy calls reads its array from memory once per call. Run block by block,
with blocks small enough to stay in the cache, it reads memory once in all. And because NumPy
releases the interpreter lock inside its loops, plain Python threads can share the blocks.
"""

import ctypes
import glob
import numbers
import os
import threading
import types
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

# What one block may touch in all arrays together: an L2 cache and a share of L3. Measured from
# 256 KiB to 4 MiB: with less, Python between the NumPy calls costs more than the cache saves.
BLOCK_BYTES = 2 * 1024 * 1024
MAX_DEFAULT_THREADS = 16


def set_num_threads(n):
    """Use ``n`` >= 1 threads from now on, in these loops and in BLAS (matrix products).

    BLAS is reached only where NumPy brings its own OpenBLAS, as its wheels do; with any other BLAS
    the second half does nothing: set that library's own variable before Python starts.
    """
    global _num_threads
    if not isinstance(n, numbers.Integral) or isinstance(n, bool) or n < 1:
        raise ValueError(f"[set_num_threads] n must be an integer of at least 1, got {n!r}")
    _num_threads = int(n)
    if _blas_threads:
        _blas_threads.set(_num_threads)


def get_num_threads():
    """The number of threads set, or by default the CPUs this process may use, at most 16."""
    return _num_threads


def for_rows(body, rows, row_bytes):
    """Call ``body(lo, hi)`` for consecutive blocks that cover ``range(rows)``; list the results.

    ``row_bytes`` is what one row touches in all arrays together. The blocks depend on nothing but
    ``rows`` and ``row_bytes``, and the list is in row order, so results do not depend on which
    thread ran what, nor on how many there are. An exception in a body ends the loop and is raised
    here. A call from inside a body runs in that thread.
    """
    blocks = _blocks(rows, row_bytes)
    helpers = min(_num_threads, len(blocks)) - 1
    if helpers < 1 or getattr(_here, "busy", False):
        return [body(lo, hi) for lo, hi in blocks]

    results = [None] * len(blocks)
    todo = deque(enumerate(blocks))

    def work():
        _here.busy = True
        try:
            while True:
                try:
                    i, (lo, hi) = todo.popleft()
                except IndexError:  # nothing left
                    return
                results[i] = body(lo, hi)
        except BaseException:
            todo.clear()
            raise
        finally:
            _here.busy = False

    # Our threads each call BLAS themselves: with its own threads on top they would fight over the cores.
    blas = _blas_threads.get() if _blas_threads else 1
    if blas > 1:
        _blas_threads.set(1)
    futures = _submit(work, helpers)
    try:
        work()
    finally:
        # Also after Ctrl-C: no new block starts, and no thread is left writing to the arrays.
        todo.clear()
        started = [future for future in futures if not future.cancel()]
        wait(started)
        if blas > 1:
            _blas_threads.set(blas)
    for future in started:
        future.result()  # raises what its body raised
    return results


def _blocks(rows, row_bytes):
    """Even blocks [(lo, hi), ...] of about BLOCK_BYTES, and never of less than one row."""
    count = -(-rows * row_bytes // BLOCK_BYTES)
    count += count > 1 and count % 2  # an even number, so that two threads get equal shares
    count = min(max(count, 1), rows)
    return [(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _submit(work, copies) -> list[Future]:
    try:
        return [_pool.submit(work) for _ in range(copies)]
    except RuntimeError:  # the interpreter is shutting down: the caller does all the work
        return []


def _new_pool():
    """A pool whose threads start when first needed (also: the parent's do not survive a fork)."""
    global _pool
    _pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="minigrad")


def _find_blas():
    """OpenBLAS's thread count, .get() and .set(n), from the library file in NumPy's wheel, or None."""
    site = os.path.dirname(np.__file__)
    for folder in (site + ".libs", os.path.join(site, ".dylibs")):
        for path in glob.glob(os.path.join(folder, "*openblas*")):
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_%s_num_threads64_", "openblas_%s_num_threads64_",
                         "scipy_openblas_%s_num_threads", "openblas_%s_num_threads"):
                if hasattr(library, name % "set"):
                    return types.SimpleNamespace(get=getattr(library, name % "get"), set=getattr(library, name % "set"))
    return None


def _usable_cpus():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_pool: ThreadPoolExecutor
_here = threading.local()  # .busy: this thread is inside a body
_new_pool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_pool)

_blas_threads = _find_blas()
_num_threads = min(_usable_cpus(), MAX_DEFAULT_THREADS)
_asked = os.environ.get("MINIGRAD_NUM_THREADS")
if _asked:
    set_num_threads(int(_asked) if _asked.strip().isdecimal() else _asked)
