"""Clocks for the host and for a CUDA stream, and what a machine reaches by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from minigrad.backend.device import Device


class Clock:
    """Marks on the host's time line. `seconds` may be asked of marks made before the last `wait`."""

    on_host = True

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, a: Any, b: Any) -> float:
        return b - a

    def wait(self) -> None:
        pass


class CudaClock(Clock):
    """Marks on a CUDA stream's time line: events, put among the kernels without waiting for them."""

    on_host = False

    def __init__(self, device: Device) -> None:
        self.cuda, self.ordinal = device.xp.cuda, device.ordinal

    def mark(self) -> Any:
        event = self.cuda.Event()
        event.record()
        return event

    def seconds(self, a: Any, b: Any) -> float:
        return self.cuda.get_elapsed_time(a, b) * 1e-3   # CUDA's is in milliseconds

    def wait(self) -> None:
        self.cuda.Device(self.ordinal).synchronize()


def clock_of(device: Device) -> Clock:
    return Clock() if device.type == "cpu" else CudaClock(device)


def machine_rates(device: Device, n: int | None = None, size: int | None = None) -> tuple[float, float]:
    """What the device reaches now, with the threads it has: FLOP/s of a float32 product of matrices (n, n), 2 n^3
    operations, and bytes/s of a copy of `size` float32, read and written; each the best of five. n = 1024 and 64 MB
    unless given, on CUDA 4096 and 256 MB."""
    m, clock, on_host = device.xp, clock_of(device), device.type == "cpu"
    n, size = n or (1024 if on_host else 4096), size or (1 << 24 if on_host else 1 << 26)
    a, source = m.ones((n, n), np.float32), m.ones(size, np.float32)
    target = m.zeros_like(source)

    def best(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):                               # the first one warms up
            begin = clock.mark()
            run()
            end = clock.mark()
            clock.wait()
            times.append(clock.seconds(begin, end))
        return max(min(times[1:]), 1e-9)

    return 2.0 * n**3 / best(lambda: a @ a), 2.0 * source.nbytes / best(lambda: target.__setitem__(..., source))
