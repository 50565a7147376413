"""io: files are whole or untouched, types come back exactly, a bad file gives one clear line."""

import json
import os
import stat
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from minigrad import nn
from minigrad.io import _STORED, MAX_HEADER, CheckpointError, load, load_metadata, save, write_whole
from minigrad.tape import Tensor

DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
budget = settings(max_examples=100, deadline=None, derandomize=True)


def bytes_of(path):
    return path.read_bytes() if path.exists() else None


def assert_same(a, b):
    """Equal bit for bit: NaN payloads and the sign of zero too, which == would not see."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def raw(path, header, data=b"", length=None):
    """A file in the format by hand, to be wrong in one chosen way."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


# --- write_whole ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.csv"
    path.write_text("old")
    with pytest.raises(error):
        with write_whole(path) as file:
            file.write("x" * 100_000)  # more than the buffer, so that bytes are on the disk
            raise error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_text_is_utf8_and_newlines_are_kept(tmp_path):
    with write_whole(tmp_path / "a.csv") as file:
        file.write("é\n1\r\n")  # csv.writer ends its rows with \r\n itself
    assert (tmp_path / "a.csv").read_bytes() == b"\xc3\xa9\n1\r\n"


def test_mode_of_an_existing_file_is_kept_and_a_new_one_follows_umask(tmp_path):
    path, new = tmp_path / "a", tmp_path / "b"
    path.write_text("old")
    path.chmod(0o640)
    for p in (path, new):
        with write_whole(p, "wb") as file:
            file.write(b"new")
    (tmp_path / "c").write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert new.stat().st_mode == (tmp_path / "c").stat().st_mode
    assert path.read_bytes() == b"new"


def test_relative_paths_and_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.symlink("folder/real", "link")
    for name in ("bare", "./folder/../dotted", "link"):
        with write_whole(name) as file:
            file.write(name)
    assert sorted(os.listdir()) == ["bare", "dotted", "folder", "link"]
    assert os.path.islink("link") and (tmp_path / "folder/real").read_text() == "link"


def test_destinations_that_cannot_be_are_refused_before_the_body_runs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, error, text in [
        (tmp_path / "none" / "a", FileNotFoundError, "folder must exist"),
        (tmp_path, IsADirectoryError, "not a folder"),
        (tmp_path / "pipe", OSError, "not a device or pipe"),
    ]:
        with pytest.raises(error, match=text):
            with write_whole(path):
                pytest.fail("the body ran")
    with pytest.raises(ValueError, match="'w' or 'wb': 'a'"):
        with write_whole(tmp_path / "a", "a"):
            pass
    assert os.listdir(tmp_path) == ["pipe"] and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


# --- round trips ---------------------------------------------------------------------------------


@budget
@given(st.data())
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path_factory, data):
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
    arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
    state = data.draw(st.dictionaries(st.text().filter("__metadata__".__ne__), arrays, max_size=4))
    path = tmp_path_factory.mktemp("io") / "a.safetensors"
    save(path, state)
    back = load(path)
    assert set(back) == set(state)
    for name, array in state.items():
        assert_same(back[name].numpy(), array)


@budget
@given(
    hnp.arrays(st.sampled_from(["float32", ">f4", "int16"]), (2, 3, 4)), st.permutations(range(3))
)
def test_memory_order_and_byte_order_do_not_matter(tmp_path_factory, array, axes):
    """The library's own writer stores the memory of such arrays as it lies: other numbers."""
    path = tmp_path_factory.mktemp("io") / "a.safetensors"
    state = {"t": array.transpose(axes), "s": array[:, ::2, ::-1], "f": np.asfortranarray(array)}
    save(path, state)
    for name, value in load(path).items():
        assert_same(value.numpy(), np.array(state[name], array.dtype.newbyteorder("="), order="C"))


def test_tensors_and_numbers(tmp_path):
    path = tmp_path / "a.safetensors"
    state = {
        "tensor": Tensor(np.float32([[1, -0.0], [np.nan, np.inf]])),
        "true": True,
        "step": 2**62 + 1,  # not a float64
        "rate": 0.1,
        "scalar": np.float16(0.1),
    }
    save(path, state)
    back = {name: tensor.numpy() for name, tensor in load(path).items()}
    assert_same(back["tensor"], state["tensor"].numpy())
    assert_same(back["true"], np.array(True))
    assert_same(back["step"], np.array(2**62 + 1))
    assert_same(back["rate"], np.array(0.1))
    assert_same(back["scalar"], np.array(0.1, np.float16))


def test_loaded_tensors_are_tensors_of_the_device(tmp_path):
    save(tmp_path / "a", {"x": np.ones(2, np.float32)})
    x = load(tmp_path / "a", device="cpu")["x"]
    assert isinstance(x, Tensor) and str(x.device) == "cpu"


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    path = tmp_path / "a.safetensors"
    state = {dtype: np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    save(path, state, metadata={"é": "ü"})
    for name, array in safetensors.numpy.load_file(path).items():
        assert_same(array, state[name])
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"é": "ü"}
    safetensors.numpy.save_file(state, path, {"a": "b"})
    for name, tensor in load(path).items():
        assert_same(tensor.numpy(), state[name])
    assert load_metadata(path) == {"a": "b"}


def test_the_same_state_gives_the_same_bytes(tmp_path):
    """In any order of insertion: two runs can be compared with cmp."""
    state = {name: np.full(2, i, np.float32) for i, name in enumerate("abcdef")}
    metadata = {name: name for name in "abcdef"}
    save(tmp_path / "1", state, metadata)
    save(tmp_path / "2", dict(reversed(state.items())), dict(reversed(metadata.items())))
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


def test_arrays_are_aligned_in_the_file(tmp_path):
    """Readers that map the file need it: a bool of one byte must not come before a float64."""
    save(tmp_path / "a", {"a": True, "b": np.ones(3, np.float16), "c": 1.0})
    content = bytes_of(tmp_path / "a")
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    for e in json.loads(content[8 : 8 + length]).values():
        assert e["data_offsets"][0] % np.dtype(_STORED[e["dtype"]]).itemsize == 0


def test_bfloat16_becomes_float32_exactly(tmp_path):
    """All 65536 values of the type, against the definition: the upper half of a float32."""
    bits = np.arange(65536, dtype="<u2")
    raw(tmp_path / "a", {"x": entry("BF16", (65536,), (0, 131072))}, bits.tobytes())
    want = (bits.astype(np.uint32) << 16).view(np.float32)
    assert_same(load(tmp_path / "a")["x"].numpy(), want)
    raw(tmp_path / "a", {"x": entry("BF16", (), (0, 2))}, b"\x40\xc0")  # 0xC040 is -3
    assert_same(load(tmp_path / "a")["x"].numpy(), np.float32(-3).reshape(()))


def test_a_bool_byte_of_2_is_true_and_becomes_1(tmp_path):
    raw(tmp_path / "a", {"x": entry("BOOL", (3,), (0, 3))}, b"\x02\x00\x01")
    assert load(tmp_path / "a")["x"].numpy().tobytes() == b"\x01\x00\x01"


def test_metadata(tmp_path):
    save(tmp_path / "a", {})
    assert (load(tmp_path / "a"), load_metadata(tmp_path / "a")) == ({}, {})
    save(tmp_path / "a", {"x": 1}, {"config": '{"a": [1]}', "": "\0\n"})
    assert load_metadata(tmp_path / "a") == {"config": '{"a": [1]}', "": "\0\n"}
    raw(tmp_path / "a", {"__metadata__": None})
    assert load_metadata(tmp_path / "a") == {}


def test_links_are_followed(tmp_path):
    save(tmp_path / "a", {"x": 1})
    os.symlink("a", tmp_path / "link")
    assert load(tmp_path / "link")["x"].item() == 1


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value, says",
    [
        (3, np.zeros(1), "a name must be text .*: 3"),
        ("__metadata__", np.zeros(1), "__metadata__"),
        ("\ud800", np.zeros(1), "must be UTF-8"),
        ("bad", np.array([None]), "'bad' must be bool, integer or float.*: object"),
        ("bad", np.zeros(1, complex), "'bad' .*: complex128"),
        ("bad", np.zeros(1, np.longdouble), "'bad' .*: (float128|float96)"),
        ("bad", np.array(["a"]), "'bad' .*: <U1"),
        ("bad", np.zeros(1, "M8[s]"), "'bad' .*datetime64"),
        ("bad", np.zeros(1, [("a", "f4")]), "'bad' "),
        ("bad", 2**64, "'bad' .*: object"),  # a Python int that no dtype holds
        ("bad", "text", "'bad' must be a Tensor, array or number: str"),
        ("bad", [1.0], "'bad' .*: list"),
        ("bad", {"m": np.zeros(1)}, "'bad' .*: dict"),
        ("bad", None, "'bad' .*: NoneType"),
    ],
)
def test_a_refused_save_names_the_entry_and_changes_nothing(tmp_path, name, value, says):
    path = tmp_path / "a.safetensors"
    for old in (None, {"x": np.ones(3)}):  # no file, then an old one
        if old is not None:
            save(path, old)
        before = bytes_of(path)
        with pytest.raises(CheckpointError, match=says):
            save(path, {"good": np.zeros(3), name: value})
        assert bytes_of(path) == before
        assert os.listdir(tmp_path) == ([] if old is None else ["a.safetensors"])


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": None}])
def test_metadata_must_be_text(tmp_path, metadata):
    with pytest.raises(CheckpointError, match="metadata must be text"):
        save(tmp_path / "a", {}, metadata)
    assert os.listdir(tmp_path) == []


def test_a_header_that_no_reader_would_take_is_not_written(tmp_path):
    with pytest.raises(CheckpointError, match="must fit in 100,000,000 bytes"):
        save(tmp_path / "a", {}, {"a": "x" * MAX_HEADER})
    assert os.listdir(tmp_path) == []


def test_an_interrupt_while_arrays_are_written_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save(path, {"x": 1})
    before = bytes_of(path)

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)  # the last moment before the file takes its place
    with pytest.raises(KeyboardInterrupt):
        save(path, {"x": np.zeros(1000)})
    assert bytes_of(path) == before and os.listdir(tmp_path) == ["a"]


BAD_HEADERS = {
    "overlap": ({"a": entry(), "b": entry(offsets=(2, 6))}, 6, "invalid offset"),
    "shared": ({"a": entry(), "b": entry()}, 4, "invalid offset"),
    "gap at the start": ({"a": entry(offsets=(4, 8))}, 8, "invalid offset"),
    "backwards": ({"a": entry(), "b": entry(offsets=(4, 0))}, 4, "invalid offset"),
    "past the end": ({"a": entry(offsets=(0, 400))}, 4, "truncated: .* bytes expected"),
    "trailing bytes": ({"a": entry()}, 9, "too long: .* bytes expected"),
    "shape against size": ({"a": entry(shape=(3,))}, 4, "invalid shape|info"),
    "size overflow": ({"a": entry(shape=(2**40, 2**40))}, 4, "overflow"),
    "negative shape": ({"a": entry(shape=(-1,))}, 4, "-1"),
    "too large though empty": (
        {"a": entry(shape=(0, 2**62), offsets=(0, 0))}, 0, "'a' cannot be read"),
    "100 axes": ({"a": entry(shape=(1,) * 100)}, 4, "'a' cannot be read"),
    "FP8": ({"a": entry("F8_E4M3", (4,))}, 4, "'a' has a type .* not supported: F8_E4M3"),
    "complex": ({"a": entry("C64", (1,), (0, 8))}, 8, "not supported: C64"),
    "type of a type": ({"a": entry(["F32"])}, 4, "must have a dtype"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, 4, "must have a dtype"),
    "text offsets": ({"a": entry(offsets=("0", "4"))}, 4, "must have a dtype"),
    "float offsets": ({"a": entry(offsets=(0, 4.0))}, 4, "invalid"),
    "metadata not text": ({"__metadata__": {"a": 1}, "b": entry()}, 4, "string"),
    "a list": (b"[1]", 0, "must have a dtype"),
    "not JSON": (b"{nonsense", 0, "Expecting"),
    "not UTF-8": (b'{"\xff":1}', 0, "utf-8"),
    "deep": (b'{"a":' + b"[" * 200_000, 0, "recursion|Expecting"),
    "huge number": (b'{"a":' + b"9" * 10_000 + b"}", 0, "digits"),
    "twice, other bytes": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', 2, "'a' is given twice"),
    "twice, same bytes": (  # the library takes this one
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}', 4, "'a' is given twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers_are_one_line_that_names_the_file(tmp_path, case):
    header, size, says = BAD_HEADERS[case]
    path = raw(tmp_path / "a.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=says) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"[load] {path}: ") and "\n" not in message and len(message) < 400


def test_bad_files_are_one_line_that_names_the_file(tmp_path):
    path = tmp_path / "a"
    for content, says in [
        (b"", "0, so it is empty"),
        (b"abc", "8 bytes or more: 3"),
        (b"PK\x03\x04" + b"x" * 100, "not a safetensors file"),  # a pickle of torch
        (b"\x80\x04\x95" + b"x" * 100, "not a safetensors file"),  # a bare pickle
        (b"some text and no tensors", "not a safetensors file"),
        (struct.pack("<Q", MAX_HEADER + 1) + b"{}", "header too large: 100,000,001"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header too large"),
        (struct.pack("<Q", 5000) + b"{}", "truncated: 5,008 bytes or more expected, 10 found"),
        (struct.pack("<Q", 0), "Expecting value"),
    ]:
        path.write_bytes(content)
        for read in (load, load_metadata):
            with pytest.raises(CheckpointError, match=says) as caught:
                read(path)
            assert str(caught.value).startswith(f"[load] {path}: ")
    with pytest.raises(CheckpointError, match="none: no such file"):
        load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is a folder"):
        load(tmp_path)


def test_a_file_cut_anywhere_is_refused_with_both_sizes(tmp_path):
    path = tmp_path / "a"
    save(path, {"x": np.arange(5), "y": np.float32(1)})
    content = bytes_of(path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        says = "so it is empty or truncated" if size < 8 else f"expected, {size:,} found"
        with pytest.raises(CheckpointError, match=says):
            load(path)


def test_memory_is_bounded_by_the_file(tmp_path):
    """An array and its copy as a Tensor at a time; nothing for a size that the file only claims."""
    path = tmp_path / "a"
    save(path, {name: np.zeros(1 << 20) for name in "abcd"})  # 4 arrays of 8 MiB
    claims = raw(tmp_path / "b", {"a": entry(shape=(2**30,), offsets=(0, 2**32))}, bytes(100))
    long = raw(tmp_path / "c", {}, length=MAX_HEADER)
    peaks = []
    for p in (path, claims, long):
        tracemalloc.start()
        try:
            load(p)
        except CheckpointError:
            pass
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    assert peaks[0] < 5 * 8 + 1 and max(peaks[1:]) < 1, peaks


@budget
@given(st.data())
def test_a_damaged_file_loads_or_is_refused_but_never_fails_otherwise(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("io") / "a"
    save(path, {"x": np.arange(3, dtype=np.int16), "y": True}, {"k": "v"})
    content = bytearray(bytes_of(path))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        load(path)
    except CheckpointError:
        pass


def test_a_module_is_not_a_state(tmp_path):
    with pytest.raises(CheckpointError, match=r"\[save\].*model.state_dict\(\).*: Linear"):
        save(tmp_path / "a", nn.Linear(2, 2))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_path(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*/a.safetensors'"):
        save(tmp_path / "a.safetensors", {"x": np.zeros(2)})
    assert not list(tmp_path.iterdir())
