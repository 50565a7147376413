"""The engine: Tensors, the tape they leave behind, and the backward pass. It knows no op.

How it works, once:

* A **Tensor** is a raw array (NumPy or CuPy) with a history. A **leaf** was made by the user; every other Tensor was
  made by a **primitive**: a forward function on raw arrays plus one backward rule (a vjp) per array argument.
* When a primitive meets a Tensor that requires a gradient it records a **Node**: which primitive, from which parents
  (`targets`: Nodes, or leaves), and the few arrays its rules will name. The names of a rule's parameters say what is
  kept: `ct` is the cotangent coming in; an argument's name keeps that array; `y` keeps the output; `x_shape` keeps
  only a shape. Nothing named, nothing kept. A Node never holds its own output Tensor, so there is no reference cycle.
* Nodes are numbered as they are made, so a parent's number is smaller than its child's: the creation index *is* a
  topological order. The backward pass collects the nodes that reach the output, with a stack, and walks them in
  falling order: take the node's cotangent, run its rules, add the results to the cotangents of its targets, drop what
  the node kept. Only leaves keep a `.grad`, written at the very end, so that a pass that fails changes nothing.
* Rules never undo broadcasting, cast or accumulate. The engine does each once (`_settle`, `_add`), and checks them.
* Rules are written with minigrad's own functions, and those pass raw arrays straight through. So one rule serves both
  passes: on raw arrays (fast, nothing recorded), and on Tensors (`create_graph=True`), which records the backward pass
  itself and so gives derivatives of any order.
* A **fused** primitive carries its composition of plain primitives as `reference`, and beside it kernels, by backend,
  which know first order only. What serves higher orders is either a differentiable rule that stands beside the kernel
  (softmax: it needs only y) or the reference, which the engine then differentiates. The reference also runs on a
  backend without a kernel, and under `mg.composed()`.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from minigrad.backend.device import CPU, Device, device_of, is_array, to_device, to_host, xp
from minigrad.backend.device import device as _device
from minigrad.backend.random import stream

_clock = itertools.count(1)                              # numbers nodes and writes: what came first, exactly
_SCALARS = (float, int, bool, type(None))
_QUERIES = "allclose array_equal array_equiv isclose shape ndim size may_share_memory shares_memory".split()


class _State(threading.local):
    """What this thread is doing; each thread starts with these."""

    recording = True
    composed = os.environ.get("MINIGRAD_COMPOSED", "") not in ("", "0")
    watchers: tuple[Watcher, ...] = ()


_state = _State()


class _set(contextlib.ContextDecorator):
    """Set fields of the state for a `with` block or a function; may be entered again while it is active."""

    def __init__(self, **values: Any) -> None:
        self.values, self.old = values, []               # type: ignore[var-annotated]

    def __enter__(self) -> None:
        self.old.append({name: getattr(_state, name) for name in self.values})
        vars(_state).update(self.values)

    def __exit__(self, *_: Any) -> None:
        vars(_state).update(self.old.pop())

    def _recreate_cm(self) -> _set:                      # a decorated function may run in several threads
        return _set(**self.values)

    def __call__(self, f: Any) -> Any:
        if inspect.isgeneratorfunction(f):
            raise TypeError(f"[decorator] {f.__name__} is a generator, whose body runs later: use `with` inside it")
        return super().__call__(f)


def no_grad() -> contextlib.AbstractContextManager[None]:
    """Record nothing inside (this thread only): `with mg.no_grad():`, or `@mg.no_grad()` on a function."""
    return _set(recording=False)


def enable_grad() -> contextlib.AbstractContextManager[None]:
    """Record inside, even within `no_grad`."""
    return _set(recording=True)


def composed() -> contextlib.AbstractContextManager[None]:
    """Run every fused op as its reference composition: the plain mathematics, node by node."""
    return _set(composed=True)


class Watcher:
    """What may look on while a `with` block runs (see `study/tape.py`); changes nothing and, unused, costs nothing."""

    def __enter__(self) -> Any:
        if any(w is self for w in _state.watchers):
            raise RuntimeError(f"[{type(self).__name__}] this one is watching already; make another")
        _state.watchers += (self,)
        return self

    def __exit__(self, *_: Any) -> None:
        _state.watchers = tuple(w for w in _state.watchers if w is not self)

    def entered(self, module: Any) -> None:
        """A Module was called; what is computed until it is left happens in it."""

    def left(self, module: Any) -> None:
        """The call returned or raised."""

    def computing(self, op: Any) -> None:
        """An op's forward begins; `computed` follows unless it raises."""

    def computed(self, op: Any, out: Tensor, args: Sequence, params: dict[str, Any]) -> None:
        """An op was computed; out._node is its node if it was recorded."""

    def started(self, y: Tensor) -> None:
        """A backward pass begins at y."""

    def pulling(self, node: Node, ct: Any) -> None:
        """A node's rules are about to run."""

    def summed(self, node: Node, axes: tuple[int, ...]) -> None:
        """What a rule of the node gave is summed over these of its axes, to undo broadcasting; `pulled` follows."""

    def pulled(self, node: Node, ct: Any, target: Any, c: Any) -> None:
        """A rule gave `c` as the cotangent of `target`."""

    def finished(self, found: dict[Any, Any]) -> None:
        """A pass through at least one node is over: the cotangents it found, by leaf or node asked for."""

    def stepping(self, optimizer: Any) -> None:
        """An optimiser begins to update its parameters."""

    def stepped(self, optimizer: Any) -> None:
        """It has updated them."""


# --------------------------------------------------------------------------------------------- memory and Tensors


class Memory:
    """What is known of a piece of memory: when it was last written, how many live nodes need it as it is, whether the
    user has been given the raw array. Tensors that are views of one another share one."""

    __slots__ = ("written", "held", "exposed", "locked")

    def __init__(self) -> None:
        self.written, self.held = 0, 0
        self.exposed: tuple[Any, ...] = ()
        self.locked: tuple[Any, ...] = ()

    def expose(self, array: Any) -> None:
        if array not in _Identity(self.exposed):
            self.exposed += (array,)

    def hold(self) -> None:
        self.held += 1
        for array in self.exposed:                       # the user's names for it now refuse writes
            if array not in _Identity(self.locked) and getattr(array.flags, "writeable", False):
                array.flags.writeable = False
                self.locked += (array,)

    def release(self) -> None:
        self.held -= 1
        if self.locked and not self.held:
            for array in self.locked:
                array.flags.writeable = True
            self.locked = ()


class _Identity(tuple):
    """A tuple whose `in` asks for the same object (arrays compare elementwise)."""

    def __contains__(self, x: object) -> bool:
        return any(x is y for y in self)


class Tensor:
    """An array with a history. Arrays speak NumPy; training speaks PyTorch (`requires_grad`, `.grad`, `.backward()`).

    Tensor(data, requires_grad=False, device=None, dtype=None) copies `data`: an array keeps its dtype, Python floats
    become float32, Python ints int64. Only floating-point tensors can require a gradient.
    """

    __slots__ = ("_data", "_tracked", "_grad", "_node", "_memory", "__weakref__")
    _data: Any
    __array_ufunc__ = None                               # so that np_array * tensor asks the Tensor
    __hash__ = object.__hash__                           # identity: == is elementwise

    def __init__(self, data: Any, requires_grad: bool = False, device: str | Device | None = None,
                 dtype: Any = None) -> None:
        raw = data._data if isinstance(data, Tensor) else data
        to = device_of(raw) if device is None else _device(device)
        if isinstance(raw, np.ma.MaskedArray):
            raise TypeError("[tensor] a masked array has no plain values: use .filled(value)")
        if isinstance(raw, np.ndarray):
            raw = np.asarray(raw)                        # of a memmap or matrix only the values
        if is_array(raw):
            array = to_device(raw.astype(raw.dtype if dtype is None else dtype, copy=True), to)
        else:
            array = to_device(_from_python(raw, dtype), to)
        _check_dtype(array.dtype, requires_grad)
        self._data, self._tracked = array, bool(requires_grad)
        self._grad: Tensor | None = None
        self._node: Node | None = None
        self._memory: Memory | None = None

    # what it is
    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> int:
        return self._data.size

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @property
    def device(self) -> Device:
        return device_of(self._data)

    @property
    def node(self) -> Node | None:
        """The Node that made this Tensor; None for a leaf."""
        return self._node

    @property
    def is_leaf(self) -> bool:
        return self._node is None

    @property
    def requires_grad(self) -> bool:
        return self._tracked

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self._node is not None and not value:
            raise RuntimeError("[requires_grad] only a leaf can stop requiring a gradient; use x.detach()")
        _check_dtype(self.dtype, value)
        self._tracked = bool(value)

    @property
    def grad(self) -> Tensor | None:
        """The gradient accumulated in this leaf by `backward`: a Tensor of its shape, dtype and device, or None."""
        return self._grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and not (isinstance(value, Tensor) and value.shape == self.shape
                                      and value.dtype == self.dtype and value.device == self.device):
            raise ValueError(f"[grad] a gradient is None or a Tensor like its tensor, {describe(self)}: "
                             f"got {describe(value)}")
        self._grad = value

    # its values
    @property
    def data(self) -> Any:
        """The raw array, writable while no live node needs its values, and read-only otherwise (NumPy)."""
        memory = _memory(self)
        if memory.held and isinstance(self._data, np.ndarray):
            view = self._data.view()
            view.flags.writeable = False
            return view
        memory.expose(self._data)
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        if value is not self._data:                      # p.data -= step assigns what it wrote in place
            self.copy_(value)
        else:
            _memory(self).written = next(_clock)

    def copy_(self, value: Any) -> Tensor:
        """Overwrite the values in place, checked: shapes must broadcast; what a live node needed is then stale, which
        its backward reports. A non-leaf becomes a leaf, as its values no longer depend on anything."""
        _refuse_history(value, "copy_", "copy under mg.no_grad()")
        raw = _raw(value)
        raw = to_device(raw if is_array(raw) else _from_python(raw).astype(self.dtype), self.device)
        tail = self.shape[max(0, self.ndim - raw.ndim):]
        if raw.ndim > self.ndim or any(n not in (1, m) for n, m in zip(raw.shape, tail)):
            raise ValueError(f"[copy_] the values must broadcast to {self.shape}: got {raw.shape}")
        memory, array = _memory(self), self._data
        memory.written = next(_clock)
        locked = array in _Identity(memory.locked)
        if locked:
            array.flags.writeable = True
        try:
            array[...] = raw
        finally:
            if locked:
                array.flags.writeable = False
        if self._node is not None:
            self._node, self._tracked = None, False
        return self

    def numpy(self) -> np.ndarray:
        """A NumPy copy of the values."""
        return np.array(to_host(self._data))

    def item(self) -> Any:
        """The only element, as a Python number."""
        if self.size != 1:
            raise ValueError(f"[item] one element is needed: got shape {self.shape}")
        return self._data.item()

    def tolist(self) -> Any:
        return self._data.tolist()

    def detach(self) -> Tensor:
        """The same memory without the history."""
        return _wrap(self._data, _memory(self))

    def to(self, *args: Any, device: str | Device | None = None, dtype: Any = None) -> Tensor:
        """`x.to("cuda")`, `x.to(mg.float64)`, or both; itself if nothing changes. Gradients flow back through it."""
        for arg in args:
            if isinstance(arg, str):
                device = arg
            else:
                dtype = arg
        to, dtype = self.device if device is None else _device(device), np.dtype(dtype or self.dtype)
        _check_dtype(dtype, False)
        moved = self if to == self.device else _move(self, device=to, source=self.device)
        return moved if moved.dtype == dtype else _cast(moved, dtype=dtype)

    def astype(self, dtype: Any) -> Tensor:
        return self.to(dtype=dtype)

    def requires_grad_(self, value: bool = True) -> Tensor:
        self.requires_grad = value
        return self

    def backward(self, gradient: Any = None, retain_graph: bool = False) -> None:
        """Add to the `.grad` of every leaf the gradient of this Tensor; `gradient`: its cotangent (1 for a scalar)."""
        if not self._tracked:
            raise RuntimeError("[backward] this tensor does not depend on any tensor that requires a gradient")
        ct = _raw(_seed(self, gradient, "backward"))
        for watcher in _state.watchers:
            watcher.started(self)
        found = _pull_back([(self._node or self, ct)], retain=retain_graph)
        for leaf, ct in found.items():                   # all at once, after everything succeeded
            if leaf._grad is None:
                leaf._grad = _wrap(ct)
            else:
                leaf._grad = _wrap(_add(leaf._grad._data, ct))

    # protocols
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = to_host(self._data)
        if copy or (dtype is not None and dtype != array.dtype):
            return np.array(array, dtype=dtype)
        view = array.view()
        view.flags.writeable = False
        return view

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.ndim:
            raise TypeError("[iter] a 0-d tensor has nothing to iterate over; use .item()")
        return (self[i] for i in range(len(self)))  # type: ignore[index]

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"[bool] only one element is true or false: got shape {self.shape}; use .any() or .all()")
        return bool(self._data.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self._data.__index__()

    def __contains__(self, value: Any) -> bool:
        return bool((self._data == (value._data if isinstance(value, Tensor) else value)).any())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __deepcopy__(self, memo: dict) -> Tensor:
        if self._node is not None:
            raise RuntimeError("[deepcopy] only a leaf can be copied; use x.detach() first")
        made = cast(Tensor, memo.setdefault(id(self), type(self)(self._data, self._tracked)))
        made._grad = None if self._grad is None else _wrap(self._grad._data.copy())
        return made

    def __reduce__(self) -> Any:
        raise TypeError("[pickle] a Tensor is not pickled; mg.save writes safetensors")

    def __repr__(self) -> str:
        body = np.array2string(to_host(self._data), separator=", ", prefix="tensor(", threshold=100, precision=4)
        where = "" if self.device == CPU else f", device={self.device!s}"
        node = "" if self._node is None else f", op={self._node.name}"
        grad = ", requires_grad=True" if self._tracked and self._node is None else node
        return f"tensor({body}, dtype={self.dtype}{where}{grad})"

    def _in_place(self, other: Any) -> Any:
        if self._tracked and self._node is None:
            raise RuntimeError("[in place] x += y would make a new tensor and leave this leaf as it was: write "
                               "p.copy_(p - step) or p.data -= step.data, or x = x + y")
        return NotImplemented                            # x += y is x = x + y

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = _in_place

    def __array_function__(self, f: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """np.concatenate([x, y]) and the like: refused where they would cut the graph."""
        if f.__name__ not in _QUERIES:
            for x in [*args, *kwargs.values()]:
                for y in x if isinstance(x, (list, tuple)) else (x,):
                    _refuse_history(y, f"np.{f.__name__}", "use minigrad.functional")
        return f._implementation(*args, **kwargs)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._tracked and (_state.recording or self._node is not None):
            raise RuntimeError(
                "[setitem] writing to part of a tensor with a history would lose its gradient; build a new one: "
                "mg.where(mask, value, x) or F.concatenate([...]); a leaf may be set under mg.no_grad()")
        _refuse_history(value, "setitem", "build the tensor with F.stack, F.concatenate or mg.where")
        key = tuple(_raw(k) for k in key) if isinstance(key, tuple) else _raw(key)
        memory = _memory(self)
        if self._data in _Identity(memory.locked):
            raise RuntimeError("[setitem] a live node needs these values; set them after backward, or use .copy_()")
        self._data[key] = _raw(value)
        memory.written = next(_clock)


def _refuse_history(x: Any, op: str, instead: str) -> None:
    """Raise where only the values of x would be used although its history is being recorded."""
    if isinstance(x, Tensor) and x._tracked and _state.recording:
        raise RuntimeError(f"[{op}] would take a tensor's values and lose its gradient: {instead}, or .detach() it")


def _raw(x: Any) -> Any:
    return x._data if isinstance(x, Tensor) else x


def _wrap(array: Any, memory: Memory | None = None) -> Tensor:
    """A Tensor of this very array, without history."""
    made: Tensor = Tensor.__new__(Tensor)
    made._data, made._tracked, made._grad, made._node, made._memory = array, False, None, None, memory
    return made


def _memory(x: Tensor) -> Memory:
    memory = x._memory
    if memory is None:
        memory = x._memory = Memory()
    return memory


def _from_python(x: Any, dtype: Any = None) -> np.ndarray:
    """An array of Python numbers or nested lists: floats are float32 unless a NumPy array among them says otherwise."""
    if isinstance(x, (list, tuple)):
        for v in x:
            _refuse_history(v, "tensor", "write F.stack([...])")
        x = [_raw(v) for v in x]
    array = np.asarray(x, dtype=dtype)
    strong = isinstance(x, np.generic) or (isinstance(x, list) and any(isinstance(v, np.ndarray) for v in x))
    if dtype is None and array.dtype == np.float64 and not strong:
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"[tensor] elements are bool, integer or floating-point numbers: got {array.dtype}")
    return array


def _check_dtype(dtype: np.dtype, tracked: bool) -> None:
    if dtype.kind not in "biuf":
        raise TypeError(f"[tensor] elements are bool, integer or floating-point numbers NumPy has: got {dtype}")
    if tracked and dtype.kind != "f":
        raise TypeError(f"[requires_grad] only floating-point tensors can require a gradient: got {dtype}")


def describe(x: Any) -> str:
    """What came, for an error: "(2, 3) float32", with the device unless it is the CPU."""
    x = _raw(x)
    if not is_array(x):
        return repr(x) if isinstance(x, _SCALARS) else type(x).__name__
    where = device_of(x)
    return f"{x.shape} {x.dtype}" + ("" if where == CPU else f" on {where}")


def _listed(x: Any) -> str:
    """The same for what a forward or a rule returned: each item of a tuple, and a Tensor by that name."""
    if isinstance(x, tuple):
        return f"({', '.join(map(_listed, x))})"
    return f"a Tensor {describe(x)}" if isinstance(x, Tensor) else describe(x)


def _path(x: Any) -> str:
    """" = blocks.0.mlp.up.weight" for a parameter whose module has named it."""
    return f" = {path}" if (path := getattr(x, "path", "")) else ""


# ------------------------------------------------------------------------------------------ primitives and nodes


class _Rule:
    """One backward rule and, read once from its signature, where each of its arguments comes from."""

    def __init__(self, rule: Callable, known: dict[str, tuple[str, Any]], owner: str) -> None:
        names = list(inspect.signature(rule).parameters)
        unknown = [name for name in names[1:] if name not in known]
        if not names or names[0] != "ct" or unknown:
            raise TypeError(f"[{owner}] a rule takes ct, then any of {', '.join(sorted(known))}: got {names}")
        self.run = rule
        self.slots = [known[name] for name in names[1:]]
        self.only = self.slots[0] if len(self.slots) == 1 else ("", 0)

    def call(self, ct: Any, node: Node, wanted: Any) -> Any:
        """The rule on raw arrays."""
        kind, which = self.only
        if kind == "input":                              # the most common, spelled out
            return self.run(ct, node.arrays[which])
        if kind == "y":
            return self.run(ct, node.y)
        if not self.slots:
            return self.run(ct)
        return self.run(ct, *[node.raw(kind, which, wanted) for kind, which in self.slots])


    def call_recorded(self, ct: Any, node: Node, wanted: Any) -> Any:
        """The rule on Tensors with their history, so that the rule itself is recorded."""
        return self.run(ct, *[node._tensor(kind, which, wanted) for kind, which in self.slots])


class Body:
    """A way to compute a primitive: the forward on raw arrays and its rules, `rules` one per array argument (None where
    there is no derivative) or one joint `rule` that returns a cotangent for each argument.

    Besides `ct`, the arguments' names, `y` and `NAME_shape`, a rule may name any parameter of the forward, `shapes`
    (all of them), `needs` (a bool per argument), and the `residuals`, which the forward then returns after its output.
    """

    def __init__(self, forward: Callable, rules: Sequence[Callable | None] | None, rule: Callable | None,
                 residuals: Sequence[str], inputs: Sequence[str], params: Sequence[str], variadic: bool,
                 owner: str, keep_all: bool) -> None:
        known: dict[str, tuple[str, Any]] = {"y": ("y", 0), "shapes": ("shapes", 0), "needs": ("needs", 0)}
        known |= {name: ("param", name) for name in params}
        known |= {name: ("residual", i) for i, name in enumerate(residuals)}
        for i, name in enumerate(inputs):
            known |= {name: ("inputs" if variadic else "input", i), f"{name}_shape": ("shape", i)}
        self.forward, self.residuals = forward, tuple(residuals)
        self.joint = None if rule is None else _Rule(rule, known, owner)
        self.rules = [None if r is None else _Rule(r, known, owner) for r in rules or ()]
        self.keep_all = keep_all
        used = [slot for r in [self.joint, *self.rules] if r is not None for slot in r.slots]
        self.keeps_shapes = any(kind in ("shape", "shapes") for kind, _ in used)
        self.plans: dict[tuple[int, int], tuple[tuple[bool, ...], bool]] = {}

    def plan(self, needs: int, count: int) -> tuple[tuple[bool, ...], bool]:
        """Which of `count` inputs, and whether the output, to keep if those in the bit set `needs` need gradients."""
        rules = [self.joint] if self.joint else [r for i, r in enumerate(self.rules) if r and needs >> i & 1]
        named = {slot for r in rules for slot in r.slots}
        every = self.keep_all or any(kind == "inputs" for kind, _ in named)
        made = tuple(every or ("input", i) in named for i in range(count)), ("y", 0) in named
        return self.plans.setdefault((needs, count), made)


class Sample:
    """A row of the op table: what to call an op with, and what must then hold. A tuple of ints is the shape of a float
    array whose values are distinct in (low, high); anything else is passed as it is. With `error`, the call must raise
    that message."""

    def __init__(self, *args: Any, low: float = -2.0, high: float = 2.0, error: str | None = None,
                 **params: Any) -> None:
        self.args, self.low, self.high, self.error, self.params = args, low, high, error, params

    def __repr__(self) -> str:
        shown = [f"{a.dtype}{list(a.shape)}" if isinstance(a, np.ndarray) else str(a) for a in self.args]
        return ",".join(shown + [f"{k}={v}" for k, v in self.params.items()])[:80]


sample = Sample
primitives: dict[str, Primitive] = {}                    # every op there is, by name: the table the tests run


class Primitive:
    """A differentiable function of arrays, made by `@primitive`: given Tensors it records, given raw arrays not."""

    def __init__(self, forward: Callable, *, rules: Sequence[Callable | None] | None = None,
                 rule: Callable | None = None, samples: Sequence[Sample] = (), residuals: Sequence[str] = (),
                 kernels: dict[str, tuple] | None = None, fused: bool = False,
                 broadcasts: bool = False, view: bool = False) -> None:
        self.name, self.__doc__ = forward.__name__.strip("_"), forward.__doc__
        self.__name__ = self.name
        kinds = inspect.Parameter
        signature = inspect.signature(forward)
        given = list(signature.parameters.values())
        self.__signature__ = signature
        variadic = bool(given) and given[0].kind is kinds.VAR_POSITIONAL
        self.inputs = [p.name for p in given if p.kind in (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL)]
        self.optional = sum(p.default is not kinds.empty for p in given if p.kind is kinds.POSITIONAL_ONLY)
        params = [p for p in given if p.name not in self.inputs]
        self.params = [p.name for p in params]
        self.defaults = {p.name: p.default for p in params if p.default is not kinds.empty}
        self.arity = sys.maxsize if variadic else len(self.inputs)
        self.reference, self.samples = (forward if kernels or fused else None), tuple(samples)
        self.broadcasts, self.view = broadcasts, view
        if not self.inputs:
            raise TypeError(f"[{self.name}] arrays come before a / in the signature: got {signature}")
        if rules is not None and (callable(rules) or len(rules) != len(self.inputs)):
            came = "a function" if callable(rules) else len(rules)
            raise TypeError(f"[{self.name}] one rule per array argument {self.inputs}: got {came}")
        for name, kernel in (kernels or {}).items():
            if name not in ("numpy", "cupy") or not isinstance(kernel, tuple) or len(kernel) < 2:
                raise TypeError(f'[{self.name}] kernels= takes "numpy" or "cupy", each with (forward, joint rule, '
                                f"*residual names): got {name!r}: {_listed(kernel)}")
        if rules is None and rule is None and not kernels:
            rules = [None] * len(self.inputs)
        common = (self.inputs, self.params, variadic, self.name)

        def body(forward: Callable, rules: Any, rule: Any, residuals: Sequence[str], keep_all: bool) -> Body:
            return Body(forward, rules, rule, residuals, *common, keep_all=keep_all)

        # `rules`/`rule` are differentiable; a kernel's rule is not, so its node keeps all inputs for the reference,
        # unless differentiable rules stand beside it.
        self.differentiable = rules is not None or rule is not None
        self.plain = body(forward, rules, rule, residuals, False) if self.differentiable else None
        self.kernels = {name: body(run, None, back, names, not self.differentiable)
                        for name, (run, back, *names) in (kernels or {}).items()}
        if self.name in primitives:
            raise TypeError(f"[{self.name}] a primitive of this name exists already; to define it anew first "
                            f"del mg.primitives[{self.name!r}]")
        primitives[self.name] = self

    def __repr__(self) -> str:
        return f"<primitive {self.name}>"

    def __call__(self, *args: Any, **params: Any) -> Any:
        if len(args) != self.arity:
            args = self._arguments(args, params)
        if self.defaults:
            params = self.defaults | params
        arrays, library, needs, bit, tensors = [], None, 0, 1, False
        for arg in args:
            if isinstance(arg, Tensor):
                array = arg._data
                tensors = True
                if arg._tracked:
                    needs |= bit
            elif arg.__class__ in _SCALARS:
                array = arg
            else:
                array = self._constant(arg)
            if array.__class__ not in _SCALARS:
                if library is None:
                    library = array.__class__
                elif library is not array.__class__:
                    self._mixed(args)
            arrays.append(array)
            bit <<= 1
        state = _state
        body: Any = self.plain
        if self.reference is not None:
            kernel = self.kernels.get("numpy" if library is np.ndarray else "cupy")
            body = None if state.composed else kernel or body
            if body is None:
                self._refuse_unknown(params)
                return self.reference(*(args if tensors else arrays), **params)
        if not tensors:
            y = body.forward(*arrays, **params)
            return y[0] if body.residuals else y
        watchers = state.watchers
        for watcher in watchers:
            watcher.computing(self)
        try:
            y = body.forward(*arrays, **params)
        except (ValueError, TypeError, IndexError, AttributeError, OverflowError) as error:
            if str(error).startswith("["):
                raise
            raise self._explained(error, args, params) from error
        residuals: tuple = ()
        if body.residuals:
            if not isinstance(y, tuple) or len(y) != 1 + len(body.residuals):
                raise TypeError(f"[{self.name}] the forward must return (y, {', '.join(body.residuals)}): got "
                                f"{_listed(y)}")
            y, residuals = y[0], y[1:]
        if y.__class__ is not library:
            if not is_array(y) and y.__class__ not in _SCALARS[:3] and not isinstance(y, np.generic):
                raise TypeError(f"[{self.name}] the forward must return one array: got {_listed(y)}"
                                + ("; name what follows the output in residuals=" if isinstance(y, tuple) else ""))
            y = xp(y).asarray(y)                         # NumPy makes scalars of 0-d results
        out = _wrap(y)
        kind = y.dtype.kind
        if kind not in "fbiu":
            _check_dtype(y.dtype, False)
        if needs and state.recording and kind == "f":
            _record(self, body, args, arrays, params, needs, out, residuals)
        elif self.view:
            _share(out, args[0])
        for watcher in watchers:
            watcher.computed(self, out, args, params)
        return out

    # the rare paths
    def _arguments(self, args: tuple, params: dict) -> tuple:
        """Parameters given by position, and arrays given by name."""
        if len(args) > self.arity:
            extra, args = args[self.arity:], args[:self.arity]
            if len(extra) > len(self.params):
                raise TypeError(f"[{self.name}] takes {self.__signature__}: got {self.arity + len(extra)} arguments")
            for name, value in zip(self.params, extra):
                if name in params:
                    raise TypeError(f"[{self.name}] {name} is given twice")
                params[name] = value
        elif self.arity != sys.maxsize:
            missing = object()
            rest = [params.pop(name, missing) for name in self.inputs[len(args):]]
            optional = len(self.inputs) - self.optional
            for i, (name, value) in enumerate(zip(self.inputs[len(args):], rest), len(args)):
                if value is missing and i < optional:
                    raise TypeError(f"[{self.name}] takes {self.__signature__}: {name} is missing")
            args += tuple(None if value is missing else value for value in rest)
        return args

    def _constant(self, x: Any) -> Any:
        """An argument that is no Tensor: a NumPy scalar is as weak as a Python one; lists become arrays."""
        if isinstance(x, np.generic):
            return x.item()
        if is_array(x):
            return np.asarray(x) if isinstance(x, np.ndarray) else x     # of a memmap or matrix only the values
        if isinstance(x, (list, tuple)):
            return _from_python(x)
        raise TypeError(f"[{self.name}] arguments are Tensors, arrays or numbers: got {type(x).__name__}")

    def named(self, args: Sequence) -> list[str]:
        return [f"{self.inputs[0]}[{i}]" for i in range(len(args))] if self.arity == sys.maxsize else self.inputs

    def listed(self, args: Sequence) -> str:
        """The arguments by name with what they are, for errors."""
        return ", ".join(f"{name} {describe(a)}" for name, a in zip(self.named(args), args) if a is not None)

    def _mixed(self, args: tuple) -> None:
        came = ", ".join(f"{name}{_path(a)} {_raw(a).shape} on {device_of(_raw(a))}"
                         for name, a in zip(self.named(args), args) if is_array(_raw(a)))
        where = next(device_of(_raw(a)) for a in args if is_array(_raw(a)) and device_of(_raw(a)) != CPU)
        raise ValueError(f"[{self.name}] all arguments must be on one device: {came}; "
                         f"move them, for example with .to('{where}')")

    def _refuse_unknown(self, params: dict) -> None:
        unknown = [name for name in params if name not in self.params]
        if unknown:
            raise TypeError(f"[{self.name}] takes {self.__signature__}: got {', '.join(unknown)} (names are NumPy's)")

    def _explained(self, error: Exception, args: tuple, params: dict) -> Exception:
        self._refuse_unknown(params)
        came = self.listed(args)
        given = "".join(f", {k}={v!r}" for k, v in params.items() if isinstance(v, (int, float, tuple, str, list)))
        kind: type[Exception] = next(k for k in (IndexError, TypeError, OverflowError, AttributeError, ValueError)
                                     if isinstance(error, k))
        return kind(f"[{self.name}] {str(error).strip()}: {came}{given}")


def primitive(forward: Callable | None = None, **options: Any) -> Any:
    """Make a differentiable function of a forward on raw arrays. Arrays come before the `/`, parameters after it.

        @primitive(rules=[lambda ct, x: 2.0 * x * ct], samples=[sample((2, 3))])
        def square(x, /):
            return x * x

    Options: `rules` (one per array, None where there is no derivative) or a joint `rule`; `samples`, rows for the test
    table; `residuals`, names of extra outputs kept for the rules; `broadcasts=True`, the engine sums cotangents back to
    the arguments' shapes; `view=True`, the output may share memory with the first argument. `kernels`, {"numpy":
    (forward, joint rule, *residual names)}, makes a fused op: the decorated function is then its reference, a plain
    composition of other functions that each kernel must equal. With `rules` beside it, or with `fused=True` and no
    kernel at all, those serve higher orders and backends without a kernel, and the composition only mg.composed().
    """
    if forward is not None:
        return Primitive(forward, **options)
    return lambda forward: Primitive(forward, **options)


class Node:
    """One application of a primitive on the tape. `targets` are its parents: per array argument a Node, a leaf Tensor,
    or None where no gradient flows. `index` orders all nodes by creation."""

    __slots__ = ("index", "primitive", "body", "targets", "arrays", "y", "residuals", "params", "shapes", "memories",
                 "shape", "dtype", "device", "line", "__weakref__")

    index: int
    primitive: Any
    body: Any
    targets: Any                                         # a tuple, or None once released
    arrays: Any
    y: Any
    residuals: Any
    params: dict[str, Any]
    shapes: Any
    memories: dict[int, Memory]                          # of kept inputs by position, and of the output under -1
    shape: tuple[int, ...]
    dtype: np.dtype
    device: Device
    line: str | None

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def backend(self) -> str:
        """"numpy" or "cupy" for a kernel or a plain op of that library."""
        return self.device.backend

    @property
    def bytes_kept(self) -> int:
        """Bytes of the arrays this node keeps for its rules (0 once released)."""
        return sum({id(a): a.nbytes for a in self.kept}.values())

    @property
    def kept(self) -> list[Any]:
        """The arrays this node keeps for its rules (none once released)."""
        slots = [] if self.targets is None else [*self.arrays, self.y, *self.residuals]
        return [b for a in slots for b in (a if isinstance(a, tuple) else (a,)) if is_array(b)]

    def keeps(self, array: Any) -> bool:
        """Whether this very array is one the node keeps."""
        for kept in self.arrays:
            if kept is array:
                return True
        return array is self.y or array in _Identity(self.residuals)

    def release(self) -> None:
        """Drop everything kept; the node cannot run again."""
        if self.targets is not None:
            for memory in self.memories.values():
                memory.release()
            self.targets = self.arrays = self.y = self.residuals = None
            self.memories, self.params = {}, {}

    __del__ = release

    def pull(self, ct: Any, needed: Any, create_graph: bool) -> list[tuple[Any, Any]]:
        """Cotangents of this node's targets from the cotangent of its output: [(target, cotangent), ...]."""
        self.check()
        body, op, targets = self.body, self.primitive, self.targets
        wanted = [t is not None and (needed is None or t in needed) for t in targets]
        call = _Rule.call
        if create_graph:                                 # a kernel's rule is not differentiable, the plain rules are
            if not op.differentiable or body.keep_all:
                return self._pull_reference(ct, wanted)
            body, call = op.plain, _Rule.call_recorded
        if body.joint is None:
            return [(t, call(rule, ct, self, wanted)) for t, rule, want in zip(targets, body.rules, wanted)
                    if want and rule is not None]
        cts = call(body.joint, ct, self, wanted)
        cts = cts if isinstance(cts, (tuple, list)) else (cts,)
        if len(cts) != len(targets):
            raise RuntimeError(f"[{self.name}] a joint rule returns a cotangent (or None) for each of {len(targets)} "
                               f"arguments: got {len(cts)}")
        if len({id(c) for c in cts if c is not None}) < sum(c is not None for c in cts):
            raise RuntimeError(f"[{self.name}] a joint rule returned one array twice; copy it")
        return [(t, c) for t, c, want in zip(targets, cts, wanted) if want and c is not None]

    def check(self) -> None:
        """Raise if a kept array was written since it was kept."""
        for memory in self.memories.values():
            if memory.written > self.index:
                self.refuse_stale()

    def refuse_stale(self) -> None:
        raise RuntimeError(f"[{self.name}] an array this node kept for its backward was written in place since"
                           f"{self.where()}; write after backward, or compute it anew")

    def where(self) -> str:
        """", recorded at FILE:LINE" if that is known."""
        return f", recorded at {self.line}" if self.line else ""

    def raw(self, kind: str, which: Any, wanted: Sequence[bool]) -> Any:
        """A rule's argument, raw."""
        if kind == "input":
            return self.arrays[which]
        if kind == "y":
            return self.y
        if kind == "param":
            return self.params[which]
        if kind == "residual":
            return self.residuals[which]
        if kind == "shape":
            return self.shapes[which]
        return {"inputs": self.arrays, "shapes": self.shapes, "needs": wanted}[kind]

    def _tensor(self, kind: str, which: Any, wanted: list[bool]) -> Any:
        """A rule's argument as a Tensor with its history, so that the rule itself is recorded."""
        if kind == "input":
            return self._input(which)
        if kind == "inputs":
            return [self._input(i) for i in range(len(self.arrays))]
        value = self.raw(kind, which, wanted)
        if kind != "y":
            return value
        made = _wrap(value, self.memories[-1])  # -1: the output's
        made._node, made._tracked = self, True
        return made

    def _input(self, i: int) -> Any:
        array, target = self.arrays[i], self.targets[i]
        if isinstance(target, Tensor):
            return target
        if not is_array(array):
            return array
        made = _wrap(array, self.memories.get(i))
        if target is not None:
            made._node, made._tracked = target, True
        return made

    def _pull_reference(self, ct: Any, wanted: list[bool]) -> list[tuple[Any, Any]]:
        """Differentiate the composition instead: the cotangents are recorded Tensors."""
        inputs = [self._input(i) for i in range(len(self.arrays))]
        with enable_grad():
            args = [_alias(x) if want else x.detach() if isinstance(x, Tensor) else x
                    for x, want in zip(inputs, wanted)]
            y = self.primitive.reference(*args, **self.params)
        roots = [x for x, want in zip(args, wanted) if want]
        cts = gradients(y, roots, ct, create_graph=True)
        return list(zip([t for t, want in zip(self.targets, wanted) if want], cts))


def _record(op: Primitive, body: Body, args: Sequence, arrays: list, params: dict, needs: int, out: Tensor,
            residuals: Sequence) -> None:
    """Write a Node for this application and make `out` its output."""
    node: Node = Node.__new__(Node)
    y = out._data
    node.index, node.primitive, node.body, node.params = next(_clock), op, body, params
    node.shape, node.dtype, node.line, node.residuals = y.shape, y.dtype, None, residuals
    node.device = CPU if y.__class__ is np.ndarray else device_of(y)
    node.targets, node.memories = None, {}               # until complete: an error below leaves nothing held
    keep, keeps_y = body.plans.get((needs, len(arrays))) or body.plan(needs, len(arrays))
    node.shapes = tuple(getattr(a, "shape", ()) for a in arrays) if body.keeps_shapes else None
    memories: dict[int, Memory] = {}
    targets, kept = [], []
    for i, arg in enumerate(args):
        array = arrays[i] if keep[i] else None
        if array.__class__ is np.ndarray and not isinstance(arg, Tensor):
            array = array.copy()                         # the user's own array: what is done to it later is not seen
        kept.append(array)
        target: Any = None
        if isinstance(arg, Tensor):
            memory = arg._memory
            if arg._tracked:
                target = source = arg._node
                if source is None:
                    target = arg
                elif memory is not None and memory.written > source.index:
                    for held in memories.values():
                        held.release()
                    raise RuntimeError(f"[{op.name}] {op.named(args)[i]} was overwritten in place, through a view, "
                                       f"after [{source.name}] computed it: its history is not true any more; "
                                       "detach it")
            if keep[i]:
                if memory is None:
                    memory = arg._memory = Memory()
                memory.hold()
                memories[i] = memory
        targets.append(target)
    if op.view:
        _share(out, args[0])
    node.y = None
    if keeps_y:
        node.y = y
        memories[-1] = memory = _memory(out)
        memory.hold()
    node.arrays, node.memories, node.targets = kept, memories, targets
    out._node, out._tracked = node, True


def _share(out: Tensor, x: Any) -> None:
    """If `out` is a view of x, they are one piece of memory."""
    if isinstance(x, Tensor) and out._data.base is not None and xp(x._data).may_share_memory(out._data, x._data):
        out._memory = _memory(x)


# --------------------------------------------------------------------------------------------- the backward pass


def _reachable(roots: list[Any], wanted: set | None, floor: int) -> tuple[list[Node], set | None]:
    """The nodes to run, in creation order, and all targets on the way: those that a root depends on; with `wanted`,
    only those on a path to one of them. Nodes up to index `floor` count as leaves."""
    seen, stack, released = set(), list(roots), None
    while stack:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen or node.index <= floor:
            continue
        seen.add(node)
        if node.targets is not None:
            stack.extend(node.targets)
        elif wanted is None or node not in wanted:
            _refuse(node)
        else:
            released = node
    order = sorted(seen, key=lambda node: node.index)
    if wanted is None:
        return order, None
    ends = {target for node in order for target in node.targets or ()} | set(roots)
    if released is not None and not wanted <= ends:
        _refuse(released)                                # what is missing may lie behind it
    needed = set(wanted)
    for node in order:                                   # parents come before children
        if node not in needed and any(target in needed for target in node.targets or ()):
            needed.add(node)
    return [node for node in order if node in needed], needed


def _refuse(node: Node) -> None:
    raise RuntimeError(f"[{node.name}] the backward pass went through this node already and released what it kept"
                       f"{node.where()}; pass retain_graph=True to the first backward to run it again")


def _pull_back(seeds: list[tuple[Any, Any]], wanted: Sequence | None = None, create_graph: bool = False,
               retain: bool = False, floor: int = 0) -> dict[Any, Any]:
    """The backward pass: cotangents of all leaves that the seeds reach, or of the `wanted` nodes and leaves."""
    results = set(wanted or ())
    order, needed = _reachable([target for target, _ in seeds], None if wanted is None else results, floor)
    watchers = _state.watchers if order else ()
    cts: dict[Any, Any] = dict(seeds)
    made: set = set()                                    # targets whose cotangent is an array of its own: add in place
    found: dict[Any, Any] = {}
    with _set(recording=create_graph):
        while order:
            node = order.pop()
            ct = cts.pop(node, None)                     # nothing is added after this: its children all have run
            if ct is not None:
                if node in results:
                    found[node] = ct if create_graph else ct.copy()
                if node.targets is not None:
                    for watcher in watchers:
                        watcher.pulling(node, ct)
                    for target, c in _run_rules(node, ct, needed, create_graph):
                        c = _settle(node, target, c)
                        for watcher in watchers:
                            watcher.pulled(node, ct, target, c)
                        old = cts.get(target)
                        if c.__class__ is Part:
                            cts[target] = c.add_into(old, target in made, target.shape)
                            made.add(target)
                        elif old is None:
                            cts[target] = c
                            if c is not ct and getattr(c, "base", None) is None and not node.keeps(c):
                                made.add(target)         # no view, not the cotangent that came in: nobody else's
                        elif create_graph or target not in made:
                            cts[target] = _add(old, c)
                            made.add(target)
                        else:
                            old += c
            if not retain:
                node.release()
    for target, ct in cts.items():                       # the leaves
        if wanted is None or target in results:
            found[target] = ct if create_graph or target in made else ct.copy()
    for watcher in watchers:
        watcher.finished(found)
    return found


def _run_rules(node: Node, ct: Any, needed: Any, create_graph: bool) -> list[tuple[Any, Any]]:
    """node.pull, with the cotangent locked, since others may share it; an error in a rule names the op."""
    lock = ct.__class__ is np.ndarray and ct.flags.writeable
    if lock:
        ct.setflags(write=False)
    try:
        return node.pull(ct, needed, create_graph)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        why = str(error).strip()
        if why.startswith("["):
            raise
        hint = ""
        if "read-only" in why:
            hint = "; a rule never writes into ct or what it names, which others share: make a new array"
        elif "'Tensor'" in why:
            hint = "; a rule that is differentiated again gets Tensors: write it with minigrad's functions"
        kind = next(k for k in (IndexError, TypeError, AttributeError, ValueError) if isinstance(error, k))
        raise kind(f"[{node.name}] in a rule: {why}: ct {describe(ct)}{node.where()}{hint}") from error
    finally:
        if lock:
            ct.setflags(write=True)


def _add(a: Any, b: Any) -> Any:
    """a + b as an array (NumPy makes a scalar of two 0-d arrays)."""
    c = a + b
    return c if isinstance(c, Tensor) or is_array(c) else xp(a).asarray(c)


class Part:
    """What a rule on raw arrays may return for "zeros but for ct at key": the engine adds it into one array, so that
    the slices of a tensor do not each bring a full array of zeros."""

    __slots__ = ("ct", "key", "dtype")

    def __init__(self, ct: Any, key: Any) -> None:
        self.ct, self.key, self.dtype = ct, key, ct.dtype

    def add_into(self, old: Any, owned: bool, shape: tuple[int, ...]) -> Any:
        if old is None:
            old = xp(self.ct).zeros(shape, self.dtype)
        elif not owned:
            old = old.copy()
        old[self.key] += self.ct
        return old


def _settle(node: Node, target: Any, c: Any) -> Any:
    """A rule's result made fit for its target: broadcasting undone, dtype and device as the target's; or an error."""
    shape = target.shape
    if c.__class__ is Part:
        if c.dtype != target.dtype:
            c = Part(c.ct.astype(target.dtype), c.key)
        return c
    if c.__class__ is not np.ndarray:
        c = _returned(node, target, c)
    if c.shape != shape:
        if not node.primitive.broadcasts or c.ndim < len(shape):
            raise RuntimeError(f"[{node.name}] a rule returned a cotangent of shape {c.shape} for an argument of shape "
                               f"{shape}{node.where()}")
        c = _unbroadcast(c, shape, node)
    if c.__class__ is not np.ndarray and not isinstance(c, Tensor):
        c = xp(c).asarray(c)                             # the sum of all elements is a NumPy scalar
    if c.dtype is not target.dtype and c.dtype != target.dtype:
        if c.dtype.kind != "f":
            raise RuntimeError(f"[{node.name}] a cotangent is floating-point: a rule returned {c.dtype} for an "
                               f"argument of {target.dtype}{node.where()}")
        c = c.astype(target.dtype)
    return c


def _returned(node: Node, target: Any, c: Any) -> Any:
    """A rule's result as an array, or as a Tensor while the pass is recorded: NumPy makes scalars of 0-d results."""
    if isinstance(c, Tensor) and _state.recording:
        return c
    if not is_array(c) and not isinstance(c, np.generic):
        raise RuntimeError(f"[{node.name}] a rule must return an array like its argument, {target.shape} "
                           f"{target.dtype}: got {_listed(c)}{node.where()}")
    return xp(c).asarray(c)


def _unbroadcast(c: Any, shape: tuple[int, ...], node: Node) -> Any:
    """The adjoint of broadcasting: sum over the axes that were added or stretched."""
    lead = c.ndim - len(shape)
    axes = (*range(lead), *(i + lead for i, n in enumerate(shape) if n == 1 and c.shape[i + lead] != 1))
    for watcher in _state.watchers:
        watcher.summed(node, axes)
    c = c.sum(axis=axes, keepdims=True)
    if c.shape[lead:] != shape:
        raise RuntimeError(f"[{node.name}] a rule returned a cotangent of shape {c.shape}, which does not broadcast "
                           f"from {shape}{node.where()}")
    return c.reshape(shape)


def _seed(y: Tensor, gradient: Any, op: str) -> Any:
    """The cotangent of the output, checked: raw, or the Tensor given."""
    if gradient is None:
        if y.size != 1:
            raise RuntimeError(f"[{op}] the gradient of a tensor of shape {y.shape} needs the cotangent of its output; "
                               "call it on a scalar such as y.sum(), or pass one of the same shape")
        return xp(y._data).ones(y.shape, y.dtype)
    raw = _raw(gradient)
    raw = raw if is_array(raw) else xp(y._data).asarray(raw, dtype=y.dtype)
    if raw.shape != y.shape:
        raise ValueError(f"[{op}] the cotangent must have the shape of the output, {y.shape}: got {raw.shape}")
    if device_of(raw) != y.device:
        raise ValueError(f"[{op}] the cotangent must be on {y.device}: got {describe(raw)}; use .to('{y.device}')")
    if isinstance(gradient, Tensor) and gradient._tracked:
        return gradient.astype(y.dtype)
    return raw.astype(y.dtype, copy=False)


def gradients(y: Tensor, xs: Any, grad_y: Any = None, create_graph: bool = False,
              retain_graph: bool | None = None) -> list[Tensor]:
    """The gradients of y with respect to each Tensor in `xs` (leaves or not), as Tensors; `.grad` is not touched.

    grad_y: the cotangent of y, shape of y (1 for a scalar). create_graph: record the backward pass too, so that the
    results can be differentiated again. retain_graph: keep what the nodes hold (default: as create_graph). Zeros where
    y does not depend on x. RuntimeError if an x does not require a gradient.
    """
    xs = [xs] if isinstance(xs, Tensor) else list(xs)
    for i, x in enumerate(xs):
        if not isinstance(x, Tensor) or not x._tracked:
            raise RuntimeError(f"[gradients] xs[{i}] must be a Tensor that requires a gradient: got {describe(x)}")
    targets = [x._node or x for x in xs]
    found: dict[Any, Any] = {}
    ct = _seed(y, grad_y, "gradients")
    if y._tracked:
        if create_graph:
            ct = ct if isinstance(ct, Tensor) else _wrap(ct)
        else:
            ct = _raw(ct)
        retain = create_graph if retain_graph is None else retain_graph
        found = _pull_back([(y._node or y, ct)], targets, create_graph, retain)
    made: list[Tensor] = []
    for x, target in zip(xs, targets):
        ct = found.get(target)
        ct = xp(x._data).zeros(x.shape, x.dtype) if ct is None else ct
        if is_array(ct) and any(ct is other._data for other in made):    # the same x twice: each its own
            ct = ct.copy()
        made.append(ct if isinstance(ct, Tensor) else _wrap(ct))
    return made


# ------------------------------------------------------------------------------------- transforms of a function


def _enter(x: Any, name: str) -> Tensor:
    """An argument of a transform as the root of its own graph, still connected to an outer one."""
    if not isinstance(x, Tensor):
        if isinstance(x, dict) or callable(x):
            raise TypeError(f"[{name}] differentiates with respect to Tensors or arrays: got {type(x).__name__}; "
                            "for parameters of a module use mg.gradients(loss, list(model.parameters()))")
        x = Tensor(x)
    _check_dtype(x.dtype, True)
    if x._tracked:
        return _alias(x)
    made = x.detach()
    made._tracked = True
    return made


def _call(f: Callable, args: Sequence, name: str) -> Tensor:
    y = f(*args)
    if not isinstance(y, Tensor):
        raise TypeError(f"[{name}] the function must return one Tensor: got {type(y).__name__}")
    return y


def _open(y: Tensor, roots: Sequence[Tensor]) -> bool:
    """Whether y also depends, outside its own roots, on something that requires a gradient: then derivatives of y must
    be recorded in their turn."""
    ends, stack, seen = {r._node or r for r in roots}, [y._node or y], set()
    if any(r._node is not None for r in roots):
        return True
    while stack:
        target = stack.pop()
        if target is None or target in seen or target in ends:
            continue
        seen.add(target)
        if isinstance(target, Tensor):
            if target._tracked:
                return True
        else:
            stack.extend(target.targets or ())
    return False


def _leave(y: Tensor, keep: bool) -> Tensor:
    return y if keep else y.detach()


def vjp(f: Callable, *xs: Any) -> tuple[Tensor, Callable]:
    """(y, pullback) with y = f(*xs) and pullback(ct) = J^T ct: a Tensor for one argument, a tuple for several.

    The pullback may be called any number of times. Nest transforms for higher order.
    """
    outer = _state.recording
    with enable_grad():
        roots = [_enter(x, "vjp") for x in xs]
        y = _call(f, roots, "vjp")
    keep = outer and _open(y, roots)

    def pullback(ct: Any) -> Any:
        again = keep or (_state.recording and isinstance(ct, Tensor) and ct._tracked)
        cts = gradients(y, roots, ct, create_graph=again, retain_graph=True)
        return cts[0] if len(cts) == 1 else tuple(cts)

    return _leave(y, keep), pullback


def value_and_grad(f: Callable, argnums: int | Sequence[int] = 0) -> Callable:
    """A function that returns (f(*args), gradient); f must return a scalar Tensor. See `grad`."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        outer, given = _state.recording, list(args)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"[grad] argnums names an argument twice: {numbers}")
        for i in numbers:
            if not -len(args) <= i < len(args):
                raise IndexError(f"[grad] argnums names argument {i}, but {len(args)} were given")
        with enable_grad():
            roots = [_enter(args[i], "grad") for i in numbers]
            for i, root in zip(numbers, roots):
                given[i] = root
            y = _call(lambda *a: f(*a, **kwargs), given, "grad")
        if y.size != 1:
            raise RuntimeError(f"[grad] the function must return a scalar: got shape {y.shape}; use mg.vjp")
        keep = outer and _open(y, roots)
        cts = gradients(y, roots, create_graph=keep)
        return _leave(y, keep), cts[0] if isinstance(argnums, int) else tuple(cts)

    return run


def grad(f: Callable, argnums: int | Sequence[int] = 0) -> Callable:
    """A function that returns the gradient of scalar f with respect to argument `argnums` (a tuple for several).

    Nest it for higher order: mg.grad(mg.grad(f))(x). It records inside even under no_grad.
    """
    both = value_and_grad(f, argnums)
    return lambda *args, **kwargs: both(*args, **kwargs)[1]


def jvp(f: Callable, xs: Sequence, tangents: Sequence) -> tuple[Tensor, Tensor]:
    """(f(*xs), J t), the derivative in the direction of the tangents.

    Forward mode from two reverse passes: u -> J^T u is linear, and its own vjp, at any u, takes t to J t. So every op
    that can be differentiated twice has a jvp, and there are no further rules to get wrong.
    """
    if isinstance(xs, Tensor) or isinstance(tangents, Tensor):
        raise TypeError("[jvp] takes tuples, one tangent per argument: mg.jvp(f, (x,), (t,))")
    if len(xs) != len(tangents):
        raise ValueError(f"[jvp] one tangent per argument: got {len(xs)} arguments and {len(tangents)} tangents")
    outer = _state.recording
    with enable_grad():
        roots = [_enter(x, "jvp") for x in xs]
        y = _call(f, roots, "jvp")
        keep = outer and (_open(y, roots) or any(isinstance(t, Tensor) and t._tracked for t in tangents))
        u = _wrap(xp(y._data).zeros(y.shape, y.dtype))
        u._tracked = True
        total = None
        for x, t, ct in zip(roots, tangents, gradients(y, roots, u, create_graph=True)):
            t = t if isinstance(t, Tensor) else Tensor(t, dtype=x.dtype, device=x.device)
            if t.shape != x.shape:
                raise ValueError(f"[jvp] a tangent has its argument's shape, {x.shape}: got {t.shape}")
            part = cast(Any, ct * t).sum()  # type: ignore[operator]
            total = part if total is None else total + part
        if total is None or not total._tracked:
            return _leave(y, keep), _wrap(u._data)
        dy, = gradients(total, [u], create_graph=keep)
    return _leave(y, keep), dy


def hvp(f: Callable, x: Any, v: Any) -> Tensor:
    """The Hessian of scalar f at x times v: the directional derivative of the gradient."""
    return jvp(grad(f), (x,), (v,))[1]


class _Checkpoint(Node):
    """A node that runs its function again when its cotangent arrives."""

    __slots__ = ("f", "args", "random")

    f: Callable
    args: list[Any]
    random: list[Any]

    def pull(self, ct: Any, needed: Any, create_graph: bool) -> list[tuple[Any, Any]]:
        self.check()
        targets = self.targets or ()
        with enable_grad(), stream.replaying(self.random):
            args = [_enter(self._input(i), "checkpoint") if targets[i] is not None else a
                    for i, a in enumerate(self.args)]
            floor = next(_clock)
            y = _call(self.f, args, "checkpoint")
        ends = [a._node or a for a, t in zip(args, targets) if t is not None] + list(targets[len(args):])
        found = _pull_back([(y._node or y, ct)], ends, create_graph, create_graph, floor)
        mine = [t for t in targets if t is not None]
        return [(t, found[end]) for t, end in zip(mine, ends) if end in found and (needed is None or t in needed)]


def checkpoint(f: Callable, *args: Any) -> Tensor:
    """f(*args), keeping only the arguments: what f computes inside is computed again in the backward pass.

    Gradients also reach what f uses without being passed it (parameters of a module). The second run sees the same
    random bits, and the stream of random numbers ends where a plain call leaves it. f must return one Tensor.
    """
    if not _state.recording:
        return _call(f, args, "checkpoint")
    floor = next(_clock)
    inner = [a.detach().requires_grad_() if isinstance(a, Tensor) and a._tracked else a for a in args]
    with stream.noting() as random:
        y = _call(f, inner, "checkpoint")
    mine = set(a for a in inner if isinstance(a, Tensor))
    captured: dict[Any, None] = {}
    stack: list[Any] = [y._node or y]
    seen: set = set()
    while stack:
        target = stack.pop()
        if target is None or target in seen or target in mine:
            continue
        seen.add(target)
        if isinstance(target, Node) and target.index > floor:
            stack.extend(target.targets or ())
        else:
            captured[target] = None
    out = y.detach()
    if y._tracked:
        node: Any = _Checkpoint.__new__(_Checkpoint)
        node.index, node.primitive, node.body, node.params = next(_clock), _CHECKPOINT, None, {}
        node.shape, node.dtype, node.device = y.shape, y.dtype, y.device
        node.f, node.random, node.y, node.residuals, node.shapes = f, random, None, (), None
        node.line, node.memories = None, {}
        tensors = [a if isinstance(a, Tensor) else None for a in args]
        node.arrays = [None if a is None else a._data for a in tensors]
        node.args = [a if t is None or not t._tracked else None for a, t in zip(args, tensors)]
        for i, held in enumerate([*tensors, *captured]):
            if isinstance(held, Tensor):
                node.memories[i] = _memory(held)
                node.memories[i].hold()
        node.targets = (*((t._node or t) if t is not None and t._tracked else None for t in tensors), *captured)
        out._memory, out._node, out._tracked = None, node, True
    for watcher in _state.watchers:
        watcher.computed(_CHECKPOINT, out, args, {"since": floor})   # nodes numbered above were f's, and are gone
    return out


class _CHECKPOINT:                                       # stands where a Primitive would
    """f(arguments), of which only the arguments are kept;  ct_x = f runs again and its own graph is pulled back"""

    name, broadcasts = "checkpoint", False

    @staticmethod
    def named(args: Sequence) -> list[str]:
        return [f"argument {i}" for i in range(len(args))]


# ------------------------------------------------------------------------------------- the engine's own three ops


@primitive(rules=[lambda ct: ct], samples=[sample((2, 3)), sample(())], view=True)
def _alias(x, /):
    """x itself, as a new node: where a transform enters a graph;  ct_x = ct"""
    return x


@primitive(rules=[lambda ct: ct], samples=[sample((2, 3), dtype=np.float64)])
def _cast(x, /, dtype):
    """x in another dtype;  ct_x = ct, which the engine casts back"""
    return x.astype(dtype)


@primitive(rules=[lambda ct, device, source: _move(ct, device=source, source=device)],
           samples=[sample((2, 3), device=CPU, source=CPU)])
def _move(x, /, device, source):
    """x on another device;  ct_x = ct, moved back"""
    return to_device(x, device)
