"""A NumPy-backed stand-in for CuPy that refuses what a GPU array would refuse, for tests without a GPU.

    fakecupy.install(monkeypatch)                            # now `import cupy` finds this

It raises CuPy's errors for mixed host and device arrays, fills uninitialised memory with NaN, refuses names that CuPy
lacks (if CuPy is installed: importing it needs no GPU), refuses out-of-range indices, which CuPy would wrap in silence,
and counts or forbids everything that makes the host wait (`no_sync`).
"""
import contextlib
import math
import types

import numpy as np

try:
    import cupy as _real  # importing CuPy needs no GPU: use it to learn which names exist
except ImportError:
    _real = None

syncs = []                            # what forced the host to wait, in order (see no_sync)
_forbid = False


@contextlib.contextmanager
def no_sync():
    """Fail on any hidden device-to-host wait: what a captured CUDA graph cannot contain."""
    global _forbid
    _forbid, old = True, _forbid
    try:
        yield
    finally:
        _forbid = old


def _sync(what):
    syncs.append(what)
    if _forbid:
        raise RuntimeError(f"{what} waits for the GPU")


def _in(x, what="Unsupported type"):  # unwrap an argument the way CuPy would accept it
    if isinstance(x, ndarray):
        return x._a
    if isinstance(x, np.ndarray):
        raise TypeError(f"{what} <class 'numpy.ndarray'>")
    if isinstance(x, (list, tuple)):
        return type(x)(_in(v, what) for v in x)
    return x


def _out(x):
    if isinstance(x, (np.ndarray, np.generic)):
        return ndarray(np.asarray(x))
    if isinstance(x, (list, tuple)):
        return type(x)(map(_out, x))
    return x


def _call(f, args, kwargs):
    out = kwargs.get("out")
    r = f(*_in(args), **{k: _in(v) for k, v in kwargs.items()})
    return out if isinstance(out, ndarray) else _out(r)


class ndarray:
    __hash__ = None
    __array_priority__ = 100

    def __init__(self, a):
        if a.dtype.kind not in "biufcV":
            raise ValueError(f"Unsupported dtype {a.dtype}")
        self._a = a

    dtype, shape, ndim, size, strides, itemsize, nbytes, flags = (
        property(lambda s, n=n: getattr(s._a, n))
        for n in "dtype shape ndim size strides itemsize nbytes flags".split())
    T = property(lambda s: _out(s._a.T))
    device = types.SimpleNamespace(id=0)
    base = property(lambda s: s._a.base)

    def __getattr__(self, name):      # methods: sum, reshape, astype, ...
        if name.startswith("__") or (_real and not hasattr(_real.ndarray, name)):
            raise AttributeError(f"cupy.ndarray has no attribute {name!r}")
        if name in ("item", "tolist", "nonzero"):
            _sync("." + name)
        f = getattr(self._a, name)
        return (lambda *a, **k: f(*a, **k)) if name in ("item", "tolist") else (lambda *a, **k: _call(f, a, k))

    def get(self, *a, **k):
        _sync(".get()")
        return self._a.copy()

    def __array__(self, *a, **k):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        if isinstance(kwargs.get("out"), tuple):
            kwargs["out"], = kwargs["out"]
        f = getattr(__getattr__(ufunc.__name__), method)
        return f(*args, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        return __getattr__(func.__name__)(*args, **kwargs)

    def _index(self, key, store=False):
        keys = key if isinstance(key, tuple) else (key,)
        out = []
        for k in keys:
            if isinstance(k, (np.ndarray, list)):
                syncs.append("host array used as an index")           # CuPy copies it over, silently
            k = np.asarray(k) if isinstance(k, list) else getattr(k, "_a", k)
            if isinstance(k, np.ndarray) and k.dtype == bool:
                if not store:
                    _sync("boolean mask index")                       # the result's size is data
            out.append(k)
        ints = [k for k in out if isinstance(k, np.ndarray) and k.dtype.kind in "iu"]
        if store and ints:
            flat = np.stack([b.ravel() for b in np.broadcast_arrays(*ints)])
            if np.unique(flat, axis=1).shape[1] < flat.shape[1]:
                raise RuntimeError("assignment with repeated indices: CuPy stores any one of the values")
        return tuple(out)

    def __getitem__(self, key):       # NumPy raises on out-of-bounds; CuPy would wrap in silence
        return _out(self._a[self._index(key)])

    def __setitem__(self, key, value):
        self._a[self._index(key, store=True)] = _in(value)

    def __bool__(self):
        _sync("bool()")
        return bool(self._a)

    def __float__(self):
        _sync("float()")
        return float(self._a)

    def __int__(self):
        _sync("int()")
        return int(self._a)

    def __index__(self):
        _sync("index()")
        return self._a.__index__()

    def __len__(self): return len(self._a)
    def __iter__(self): return (self[i] for i in range(len(self)))
    def __repr__(self): return f"fakecupy.{self._a!r}"


def _binary(op, ufunc, reverse=False):
    def f(self, other):
        a, b = (other, self) if reverse else (self, other)
        return __getattr__(ufunc)(a, b)
    return f


for _op, _u in dict(add="add", sub="subtract", mul="multiply", truediv="true_divide", floordiv="floor_divide",
                    mod="remainder", pow="power", matmul="matmul", rshift="right_shift", lshift="left_shift",
                    xor="bitwise_xor", **{"and": "bitwise_and", "or": "bitwise_or"}, lt="less", le="less_equal",
                    gt="greater", ge="greater_equal", eq="equal", ne="not_equal").items():
    setattr(ndarray, f"__{_op}__", _binary(_op, _u))
    if _op not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(ndarray, f"__r{_op}__", _binary(_op, _u, True))
        setattr(ndarray, f"__i{_op}__", lambda self, o, u=_u: __getattr__(u)(self, o, out=self))
ndarray.__neg__ = lambda s: __getattr__("negative")(s)
ndarray.__abs__ = lambda s: __getattr__("absolute")(s)
ndarray.__invert__ = lambda s: __getattr__("invert")(s)


class _Ufunc:
    def __init__(self, f): self.f, self.__name__ = f, f.__name__
    def __call__(self, *args, **kwargs):
        if "where" in kwargs:
            raise TypeError("Wrong arguments {'where'}")
        for x in args:
            if isinstance(x, (list, tuple)):
                raise TypeError(f"Unsupported type {type(x)}")
        if self.__name__ in ("matmul", "dot"):
            _check_matmul(*args[:2])
        return _call(self.f, args, kwargs)

    def at(self, a, idx, b):
        if self.__name__ == "subtract" or (self.__name__ == "add" and a.dtype.name == "bfloat16"):
            raise TypeError(f"cupy.{self.__name__}.at does not support {a.dtype}")
        self.f.at(a._a, ndarray._index(a, idx), _in(b))

    def reduce(self, a, *args, **kwargs):
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`cupy_{self.__name__}.reduce` is not supported yet")
        return _call(self.f.reduce, (a, *args), kwargs)


def _check_matmul(a, b):              # CuPy 14.2: a batched product in half precision is upcast, in bfloat16 it fails
    if max(a.ndim, b.ndim) > 2 and "bfloat16" in (a.dtype.name, b.dtype.name):
        raise TypeError("data type 'E' not understood")


def array(x, dtype=None, **kw):       # an explicit copy to the GPU
    return ndarray(np.array(x._a if isinstance(x, ndarray) else x, dtype))
def asarray(x, dtype=None, **kw): return x if isinstance(x, ndarray) and dtype in (None, x.dtype) else array(x, dtype)
def asnumpy(x, **kw): return x.get() if isinstance(x, ndarray) else np.asarray(x)
def empty(shape, dtype=float, **kw):  # poison what an uninitialised buffer holds
    a = np.empty(shape, dtype)
    a.fill(np.nan if a.dtype.kind == "f" else 0x7F if a.dtype.kind in "iu" else 0)
    return ndarray(a)
def empty_like(x, dtype=None, **kw): return empty(x.shape, dtype or x.dtype)
def get_array_module(*xs): return __import__(__name__) if any(isinstance(x, ndarray) for x in xs) else np


def __getattr__(name):                # every other cupy.NAME: NumPy's, wrapped; missing where CuPy lacks it
    if name.startswith("__") or (_real and not hasattr(_real, name)) or not hasattr(np, name):
        raise AttributeError(f"module 'cupy' has no attribute {name!r}")
    f = getattr(np, name)
    if not callable(f) or isinstance(f, type):
        return f                      # dtypes, pi, newaxis
    if isinstance(f, np.ufunc):
        return _Ufunc(f)
    def wrapped(*args, **kwargs):
        if name in ("nonzero", "unique", "argwhere", "flatnonzero", "allclose", "array_equal", "repeat") and not (
                name == "repeat" and len(args) > 1 and isinstance(args[1], int)):
            _sync(name)
        return _call(f, args, kwargs)
    return wrapped


class _Device:
    """cupy.cuda.Device(i): one device, always current."""

    def __init__(self, index=0):
        self.id = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def synchronize(self):
        _sync("Device.synchronize")
        _Event.reached = _Event.recorded


class _Event:
    """cupy.cuda.Event(): recorded among the kernels; its time is known once the host has waited."""
    recorded = reached = 0            # how many there are, and how many of them the device is known to have passed

    def record(self, stream=None):
        _Event.recorded += 1
        self.number = _Event.recorded


def _elapsed(start, end):             # in milliseconds: here one for each event in between
    if end.number > _Event.reached:
        raise RuntimeError("cudaErrorNotReady: device not ready")
    return float(end.number - start.number)


cuda = types.SimpleNamespace(Device=_Device, Event=_Event, get_elapsed_time=_elapsed, is_available=lambda: True,
                             runtime=types.SimpleNamespace(getDeviceCount=lambda: 1))


def install(monkeypatch):
    """Make this module `cupy`, with the one function of cupyx that is used."""
    import sys
    special = types.ModuleType("cupyx.scipy.special")
    special.erf = lambda x: _out(np.vectorize(math.erf, otypes=[x.dtype])(x._a))
    scipy = types.ModuleType("cupyx.scipy")
    scipy.special = special
    monkeypatch.setitem(sys.modules, "cupy", sys.modules[__name__])
    monkeypatch.setitem(sys.modules, "cupyx", types.ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.scipy", scipy)
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", special)
