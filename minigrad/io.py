"""Files: written whole or not at all; named tensors in safetensors. Nothing is ever pickled.

The format (github.com/huggingface/safetensors): eight bytes, little-endian, with the length of a
JSON header; the header, {name: {"dtype", "shape", "data_offsets": [begin, end]}}; then the bytes.
Lies above tape.py and below data.py, which writes its files with `write_whole`.
"""

import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from minigrad.tape import Tensor

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library

_STORED = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "|b1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}  # fmt: skip
_NAMES = {np.dtype(stored): name for name, stored in _STORED.items()}


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; one line that says which and why."""


@contextmanager
def write_whole(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Open `path` for writing so that it holds, at any moment, all the old bytes or all the new.

    mode: "w" (UTF-8, newlines as given) or "wb". The bytes go to a temporary file in the same
    folder, reach the disk, and take the place of `path` when the block ends. If it ends by any
    exception, also Ctrl-C, `path` is as it was and the temporary file is gone. An existing file
    keeps its mode; a symbolic link stays and its target is replaced. OSError where the folder is
    missing or not writable, or where `path` is a folder or a device.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"[write_whole] mode must be 'w' or 'wb': {mode!r}")
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"[write_whole] the folder must exist: {folder}")
    if os.path.isdir(target):
        raise IsADirectoryError(f"[write_whole] the path must name a file, not a folder: {path}")
    if os.path.exists(target) and not os.path.isfile(target):
        # os.replace would put a plain file in the place of /dev/null
        raise OSError(f"[write_whole] the path must name a file, not a device or pipe: {path}")
    temporary = os.path.join(folder, f".minigrad-{secrets.token_hex(8)}.tmp")
    text = {} if mode == "wb" else {"encoding": "utf-8", "newline": ""}
    try:
        try:
            file = open(temporary, mode.replace("w", "x"), **text)  # type: ignore[call-overload]
        except PermissionError as error:  # the temporary name would mean nothing to a reader
            raise PermissionError(f"[write_whole] the folder must be writable: {folder}") from error
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(target):
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:  # a full disk names no file
            error.filename = os.fspath(path)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name reaches the disk too; Windows has no such call
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write named arrays to a safetensors file, whole or not at all.

    state: name -> Tensor, NumPy array or scalar, or Python bool, int or float (kept as a 0-d array
    of bool, int64, float64); any shape and memory order; bool, int8-64, uint8-64, float16/32/64.
    metadata: text -> text. The same state gives the same bytes. CheckpointError names an entry that
    cannot be stored, and then nothing is written. Nested state is for the caller to flatten.

    The library's own writer is not used. As of 0.8 it stores non-contiguous and Fortran-ordered
    arrays in the wrong order without a word, metadata in random order, and needs a second copy.
    """
    if not isinstance(state, Mapping):
        came = type(state).__name__
        raise CheckpointError(f"[save] a state must map names to arrays, as model.state_dict() does: {came}")
    arrays = {name: _array(name, entry) for name, entry in state.items()}
    header: dict[str, Any] = {}
    if metadata is not None:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise CheckpointError(f"[save] metadata must be text: {key!r}: {value!r}")
        header["__metadata__"] = dict(sorted(metadata.items()))
    # widest first keeps every array aligned in the file; the name makes the order unique
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    end = 0
    for name in order:
        array = arrays[name]
        begin, end = end, end + array.nbytes
        dtype = _NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    try:
        encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        around = error.object[max(0, error.start - 20) : error.end]
        raise CheckpointError(f"[save] names and metadata must be UTF-8: {around!r}") from error
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MAX_HEADER:
        size = f"{len(encoded):,}"
        raise CheckpointError(f"[save] names and metadata must fit in {MAX_HEADER:,} bytes: {size}")
    with write_whole(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in order:
            file.write(arrays[name].data)


def load(path: str | os.PathLike[str], device: Any = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file into {name: Tensor on `device`}, names in the order of the file.

    bfloat16 becomes float32, exactly (in twice the bytes); every type of `save` comes back as it
    was. Memory: the tensors and one array more; sizes are checked before anything is allocated.
    CheckpointError, naming the file, for anything but a whole safetensors file of those types.
    """
    header, _ = _read_header(path)
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        state = {}
        for name, entry in header.items():
            file.seek(start + entry["data_offsets"][0])
            try:
                array = _read(file, entry["dtype"], entry["shape"])
            except ValueError as error:  # a shape with more axes, or larger, than NumPy has
                raise CheckpointError(f"[load] {path}: {name!r} cannot be read: {error}") from error
            state[name] = Tensor(array, device=device)
    return state


def load_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file, {} if it has none. Reads the header; errors as `load`."""
    return _read_header(path)[1]


def _array(name: Any, entry: Any) -> np.ndarray:
    """One entry of a state as a C-ordered little-endian array of a type that can be stored."""
    if not isinstance(name, str) or name == "__metadata__":
        raise CheckpointError(f"[save] a name must be text other than '__metadata__': {name!r}")
    if not isinstance(entry, (np.ndarray, np.generic, bool, int, float)):
        if not callable(getattr(entry, "numpy", None)):
            came = type(entry).__name__
            raise CheckpointError(f"[save] {name!r} must be a Tensor, array or number: {came}")
        entry = entry.numpy()
    array = np.asarray(entry, order="C")  # not ascontiguousarray, which makes 0-d arrays 1-d
    stored = array.dtype.newbyteorder("<")
    if stored not in _NAMES:
        came = str(array.dtype)
        raise CheckpointError(f"[save] {name!r} must be bool, integer or float16/32/64: {came}")
    return array.astype(stored, copy=False)


def _read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """({name: entry}, metadata) of a file, once `_check_header` has nothing against it."""
    try:
        if not os.path.isfile(path):
            raise ValueError("is a folder" if os.path.isdir(path) else "no such file")
        header = _check_header(path)
    except (OSError, ValueError, SafetensorError, RecursionError) as error:
        raise CheckpointError(f"[load] {path}: {error}") from error
    metadata = header.pop("__metadata__", None) or {}  # the format allows null
    return header, metadata


def _check_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The header as JSON. The library checks its structure: types, offsets without overlap or gap,
    sizes that agree with shapes. Checked here is what it leaves open: names given twice, types
    NumPy lacks, and how many bytes there should be."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"must have 8 bytes or more: {size}, so it is empty or truncated")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"not a safetensors file, or a header too large: {length:,} bytes")
        if 8 + length > size:
            raise ValueError(f"truncated: {8 + length:,} bytes or more expected, {size:,} found")
        header = json.loads(file.read(length).decode(), object_pairs_hook=_no_duplicates)
    try:
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in entries.items():
            if entry["dtype"] not in _STORED and entry["dtype"] != "BF16":
                raise ValueError(f"{name!r} has a type that is not supported: {entry['dtype']}")
        expected = 8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0)
        if expected != size:
            problem = "truncated" if expected > size else "too long"
            raise ValueError(f"{problem}: {expected:,} bytes expected, {size:,} found")
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError("each entry must have a dtype, shape and data_offsets") from error
    with safe_open(Path(path), framework="np"):
        return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON allows a name twice and Python keeps the last; a checkpoint must mean one thing."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is given twice")
        found[name] = value
    return found


def _read(file: IO[bytes], dtype: str, shape: list[int]) -> np.ndarray:
    """The array stored where the file stands, fresh and writable."""
    count = math.prod(shape)
    array = np.fromfile(file, _STORED.get(dtype, "<u2"), count)
    if array.size < count:
        raise ValueError(f"{count} values expected, {array.size} found: cut while it was read")
    if dtype == "BF16":  # the upper half of a float32
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "BOOL":  # any byte but 0 is True, and NumPy relies on that being 1
        array = array.view(np.uint8) != 0
    return array.reshape(shape)
