"""Devices and their array libraries: the only code that may name CuPy.

Op mathematics sees `xp` (the array library an array belongs to) and operators. Where NumPy and CuPy differ, the
difference has one name here: `to_device`, `to_host`, `scatter_add`, `is_array`, `cupyx_special`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np


class Device(str):
    """A device by name: "cpu", "cuda" (the same as "cuda:0"), "cuda:1"; compares equal to that string."""

    type: str
    ordinal: int

    def __new__(cls, name: str = "cpu") -> Device:
        kind, _, index = str(name).partition(":")
        if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and int(index or 0)):
            raise ValueError(f'[device] a device is "cpu", "cuda" or "cuda:1": {name!r}')
        self = super().__new__(cls, kind if not int(index or 0) else f"{kind}:{int(index)}")
        self.type, self.ordinal = kind, int(index or 0)
        return self

    @property
    def xp(self) -> ModuleType:
        """The array library: NumPy, or CuPy (imported when first asked for)."""
        return np if self.type == "cpu" else cuda_module(self.ordinal)

    @property
    def backend(self) -> str:
        """The name kernels are looked up by: "numpy" or "cupy"."""
        return "numpy" if self.type == "cpu" else "cupy"


CPU = Device("cpu")
_devices = {"cpu": CPU}


def device(name: str | Device) -> Device:
    """The Device called `name`; raises at once, in one line, if this machine does not have it."""
    if isinstance(name, Device):
        return name
    made = Device(name)
    if made.type == "cuda":
        cuda_module(made.ordinal)
    return _devices.setdefault(str(made), made)


def cuda_module(index: int = 0) -> Any:
    """CuPy with device `index` present, or one line that says what to install or to type instead."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "[device] 'cuda' needs CuPy: python -m pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x on CUDA 12); "
            f"to go on without a GPU use the device 'cpu' ({error})") from None
    try:
        count, why = cupy.cuda.runtime.getDeviceCount(), "no device is visible"
    except RuntimeError as error:
        count, why = 0, str(error)
    if index < count:
        return cupy
    if count:
        why = f"there is no device {index}, only {count}"
    raise RuntimeError(f"[device] 'cuda' is not available: {why}; to go on without a GPU use the device 'cpu'")


def is_available() -> bool:
    """True if tensors can be put on "cuda" here."""
    try:
        return bool(cuda_module())
    except RuntimeError:
        return False


def synchronize() -> None:
    """Wait until the current CUDA device has done all it was asked to do (for timing)."""
    cuda_module().cuda.Device().synchronize()


def is_array(x: Any) -> bool:
    """True for a raw array of any device's library (not a Tensor, not a scalar)."""
    return isinstance(x, np.ndarray) or _is_cupy(x)


def _is_cupy(x: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def xp(x: Any) -> Any:
    """The array library of a raw array (NumPy for anything that is not a CuPy array)."""
    return np if type(x) is np.ndarray or not _is_cupy(x) else sys.modules["cupy"]


def device_of(x: Any) -> Device:
    """The Device a raw array lives on."""
    if type(x) is np.ndarray or not _is_cupy(x):
        return CPU
    index = int(x.device.id)
    return device("cuda" if index == 0 else f"cuda:{index}")


def root(array: Any) -> Any:
    """The array that owns the memory which `array` is a view of, or itself."""
    while is_array(base := getattr(array, "base", None)):
        array = base
    return array


def to_device(x: Any, to: Device) -> Any:
    """The raw array `x` on `to`: itself if it is there already."""
    if device_of(x) == to:
        return x
    if to.type == "cpu":
        return x.get()
    module: Any = to.xp
    with module.cuda.Device(to.ordinal):
        return module.asarray(x)


def to_host(x: Any) -> np.ndarray:
    """The raw array as a NumPy array: itself on the CPU, a copy (which waits) from a GPU."""
    return to_device(x, CPU) if is_array(x) else np.asarray(x)


def scatter_add(into: Any, index: Any, values: Any) -> None:
    """into[index] += values, in place, where an index that comes twice adds twice."""
    xp(into).add.at(into, index, values)


def cupyx_special() -> Any:
    """CuPy's special functions (NumPy has none: minigrad's own erf stands in kernels/numpy)."""
    from cupyx.scipy import special
    return special
