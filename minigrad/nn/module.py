"""Module: a tree of parameters with a forward function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from reprlib import recursive_repr
from typing import Any

import numpy as np

from minigrad.backend.device import device as _device
from minigrad.backend.device import is_array, to_device
from minigrad.tape import Tensor, _memory, _raw, _state, describe, no_grad


class Parameter(Tensor):
    """A Tensor that a Module trains. `path` is its dotted name in the module last asked for its parameters."""

    __slots__ = ("path",)

    def __init__(self, data: Any, requires_grad: bool = True, **options: Any) -> None:
        super().__init__(data, requires_grad, **options)
        self.path = ""


def _within(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The Tensors and Modules that are `value` or stand in its lists and dicts."""
    if isinstance(value, (Tensor, Module)):
        yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for key, member in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _within(f"{name}.{key}", member)


class Module:
    """Assign Parameters, Tensors (buffers: saved and moved, not trained), Modules, and lists or dicts of these (nested
    too) as attributes; define `forward`. Names beginning with "_" are left out. Order is the order of assignment."""

    training = True
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watchers = _state.watchers
        if not watchers:
            return self.forward(*args, **kwargs)
        for watcher in watchers:
            watcher.entered(self)
        try:
            return self.forward(*args, **kwargs)
        finally:
            for watcher in watchers:
                watcher.left(self)

    def _members(self) -> Iterator[tuple[str, Any]]:
        """Own Tensors and Modules by name; those in lists and dicts as name.0, name.key."""
        for name, value in vars(self).items():
            if not name.startswith("_"):
                yield from _within(name, value)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """(path, module) for this module and all below, each once, parents first."""
        seen: set[int] = set()
        left: list[tuple[str, Module]] = [(prefix, self)]
        while left:
            path, module = left.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                left += reversed([(f"{path}.{name}" if path else name, member) for name, member in module._members()
                                  if isinstance(member, Module)])

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def _named_tensors(self) -> dict[str, Tensor]:
        """Every Parameter and buffer once, under its first path."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for path, module in self.named_modules():
            for name, member in module._members():
                if isinstance(member, Tensor) and id(member) not in seen:
                    seen.add(id(member))
                    found[f"{path}.{name}" if path else name] = member
        return found

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(path, Parameter), each once even if shared."""
        for path, member in self._named_tensors().items():
            if isinstance(member, Parameter):
                member.path = path
                yield path, member

    def parameters(self) -> Iterator[Parameter]:
        return (p for _, p in self.named_parameters())

    def num_parameters(self) -> int:
        """How many numbers the parameters hold."""
        return sum(p.size for p in self.parameters())

    def zero_grad(self) -> None:
        for p in self.parameters():
            p.grad = None

    def requires_grad_(self, value: bool = True) -> Module:
        """Freeze (False) or unfreeze every parameter."""
        for p in self.parameters():
            p.requires_grad = value
        return self

    def train(self, mode: bool = True) -> Module:
        """Training behaviour (dropout) on or off, in this module and all below; returns the module."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        return self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """eval() and no_grad() inside `with`; then each module's `training` is again what it was. It is the module's,
        for all threads: where several use a model at once, call model.eval() before."""
        modes = [(module, module.training) for module in self.modules()]
        try:
            self.eval()
            with no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def to(self, *args: Any, device: Any = None, dtype: Any = None) -> Module:
        """Move every parameter and buffer in place, to a device ("cuda") or floating dtype; the Tensors stay the same
        objects, so an optimiser made before keeps working."""
        for arg in args:
            if isinstance(arg, str):
                device = arg
            else:
                dtype = arg
        if dtype is not None and np.dtype(dtype).kind != "f":
            raise TypeError(f"[Module.to] a module's dtype is a floating one: got {np.dtype(dtype)}")
        to, moved = None if device is None else _device(device), []
        for path, x in self._named_tensors().items():
            raw = x._data if to is None else to_device(x._data, to)
            raw = raw.astype(dtype) if dtype is not None and raw.dtype.kind == "f" and raw.dtype != dtype else raw
            if raw is not x._data:
                if _memory(x).held:
                    raise RuntimeError(f"[Module.to] a live graph still needs {path}; move after backward")
                moved.append((x, raw))
        for x, raw in moved:                             # all or nothing
            x._data, x._memory, x._grad = raw, None, None
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Path -> Tensor for every parameter and buffer; shares their memory, so save or copy it before training on."""
        return {path: x.detach() for path, x in self._named_tensors().items()}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Copy values in by path. If anything does not fit nothing is changed, and the error names every missing,
        unknown and misshapen entry. strict=False allows missing and unknown ones."""
        own = self._named_tensors()
        load_checked(type(self).__name__, own, state, strict)

    @recursive_repr()
    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for name, member in self._members():
            text = f"Parameter{member.shape}" if isinstance(member, Parameter) else (
                f"buffer{member.shape}" if isinstance(member, Tensor) else repr(member))
            lines.append(f"  {name}: " + text.replace("\n", "\n  "))
        return "\n".join([*lines, ")"]) if len(lines) > 1 else lines[0] + ")"


def load_checked(owner: str, own: dict[str, Tensor], state: dict[str, Any], strict: bool = True) -> None:
    """Copy `state` into the Tensors `own`, all or nothing."""
    problems, values = [], {}
    if strict:
        problems += [f"missing {name}" for name in own if name not in state]
        problems += [f"unknown {name}" for name in state if name not in own]
    shared = [name for name in own if name in state]
    problems += [f"misshapen {name}: {describe(state[name])} for {own[name].shape}" for name in shared
                 if getattr(state[name], "shape", None) != own[name].shape]
    for name in shared:
        try:
            values[name] = cast(state[name], own[name])
        except (TypeError, ValueError):
            problems.append(f"{name} holds no real numbers: {describe(state[name])}")
    if problems:
        raise ValueError(f"[load_state_dict] the state does not fit {owner}: " + "; ".join(problems))
    for name in shared:
        own[name].copy_(values[name])


def cast(value: Any, like: Tensor) -> Any:
    """A raw copy of a Tensor or array with the dtype and device of `like`; TypeError or ValueError if it holds no real
    numbers. (Kind V: bfloat16 from ml_dtypes.)"""
    raw = _raw(value)
    raw = raw if is_array(raw) else np.asarray(raw)
    if raw.dtype.kind not in "biufV":
        raise TypeError(f"real numbers are needed: got {raw.dtype}")
    return to_device(raw.astype(like.dtype), like.device)


class Sequential(Module):
    """Modules (or functions) applied one after another."""

    def __init__(self, *layers: Any) -> None:
        for layer in layers:
            if not callable(layer):
                raise TypeError(f"[{type(self).__name__}] layers are Modules or functions: got {describe(layer)}")
        self.layers = list(layers)

    def _members(self) -> Iterator[tuple[str, Any]]:     # 0, 1, ... and not layers.0
        return ((name.removeprefix("layers."), member) for name, member in super()._members())

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __getitem__(self, i: int) -> Any:
        return self.layers[i]

    def __len__(self) -> int:
        return len(self.layers)


class ModuleList(Sequential):
    """A list of Modules for the owner to call. (A plain list as an attribute works as well.)"""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        if not isinstance(module, Module):
            raise TypeError("[ModuleList] holds Modules; assign a Parameter as an attribute, alone or in a plain list: "
                            f"got {type(module).__name__}")
        self.layers.append(module)
        return self

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    def forward(self, *_: Any) -> Any:
        raise TypeError("[ModuleList] a list is not called; call its modules, or use nn.Sequential")
