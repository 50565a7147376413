"""Optimisers, gradient clipping, learning-rate schedules. Keywords and formulas are PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np

from minigrad.backend.device import device_of, to_device, xp
from minigrad.kernels.numpy import optimizer as _numpy
from minigrad.nn.module import cast
from minigrad.tape import Tensor, _clock, _memory, _raw, _state, _wrap, describe


class Optimizer:
    """A list of Tensors, or of groups {"params": [...], "lr": ..., ...} whose settings override the keywords.

    `param_groups[i]["lr"]` may be set between steps. Parameters without a gradient are passed over. A subclass has
    `slots`, the names of its state arrays, and `update`, which writes a parameter in place.
    """

    slots: tuple[str, ...] = ()

    def __init__(self, params: Iterable, **defaults: Any) -> None:
        if hasattr(params, "parameters"):
            raise TypeError(f"[{self.name}] optimises parameters: pass model.parameters(), not the model")
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        self.param_groups: list[dict[str, Any]] = []
        seen: set[int] = set()
        for group in groups:
            if not isinstance(group, dict) or "params" not in group:
                raise ValueError(f'[{self.name}] a group is a dict with "params": got {describe(group)}')
            unknown = set(group) - set(defaults) - {"params"}
            if unknown:
                raise ValueError(f"[{self.name}] a group has params and {', '.join(defaults)}: "
                                 f"got {', '.join(sorted(unknown))}")
            members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            for p in members:
                if not isinstance(p, Tensor) or not p.is_leaf:
                    raise TypeError(f"[{self.name}] optimises leaf Tensors, such as model.parameters(): "
                                    f"got {describe(p)}")
                if id(p) in seen:
                    raise ValueError(f"[{self.name}] a parameter of shape {p.shape} is given twice")
                seen.add(id(p))
            self.param_groups.append({**defaults, **group, "params": members})
        if not seen:
            raise ValueError(f"[{self.name}] there are no parameters to optimise")
        for group in self.param_groups:
            self.check(group)
        self.state: dict[int, dict[str, Any]] = {}       # by position of the parameter, over all groups

    @property
    def name(self) -> str:
        return type(self).__name__

    def check(self, group: dict[str, Any]) -> None:
        """Raise for settings that cannot be meant."""
        for key in ("lr", "weight_decay", "eps", "momentum"):
            if not (isinstance(value := group.get(key, 0.0), Real) and 0.0 <= value < math.inf):
                raise ValueError(f"[{self.name}] {key} is at least 0: got {value!r}")
        betas = group.get("betas", (0.0, 0.0))
        if not (isinstance(betas, (tuple, list)) and len(betas) == 2
                and all(isinstance(b, Real) and 0.0 <= b < 1.0 for b in betas)):
            raise ValueError(f"[{self.name}] two betas are in [0, 1): got {betas!r}")

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Write the raw array p in place from its gradient g; state["step"] counts from 1."""
        raise NotImplementedError

    def _numbered(self) -> list[tuple[int, Tensor, dict[str, Any]]]:
        every = [(p, group) for group in self.param_groups for p in group["params"]]
        return [(i, p, group) for i, (p, group) in enumerate(every)]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for watcher in _state.watchers:
            watcher.stepping(self)
        for i, p, group in self._numbered():
            if p._grad is None:
                continue
            array, memory, state = p._data, _memory(p), self.state.setdefault(i, {"step": 0})
            for name in self.slots:
                if name not in state:
                    state[name] = xp(array).zeros_like(array)
                elif state[name].dtype != array.dtype or device_of(state[name]) != p.device:     # the model was moved
                    state[name] = to_device(state[name], p.device).astype(array.dtype)
            state["step"] += 1
            for locked in memory.locked:                 # a live graph needs the old values: its backward will say so
                locked.flags.writeable = True
            self.update(array, p._grad._data, state, group)
            for locked in memory.locked:
                locked.flags.writeable = False
            memory.written = next(_clock)
        for watcher in _state.watchers:
            watcher.stepped(self)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for _, p, _ in self._numbered():
            p._grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """All that a resumed run needs, flat, for mg.save: state.I.NAME per parameter I, group.I.NAME."""
        flat = {f"state.{i}.{name}": value for i, state in self.state.items() for name, value in state.items()}
        flat |= {f"group.{i}.{name}": value for i, group in enumerate(self.param_groups)
                 for name, value in group.items() if name != "params"}
        return {name: _wrap(_host(value)) for name, value in flat.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave. If anything does not fit nothing changes, and the error names it all."""
        numbered, problems = self._numbered(), []
        fresh: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = [{} for _ in self.param_groups]
        for name, value in state.items():
            kind, _, rest = name.partition(".")
            index, _, slot = rest.partition(".")
            i = int(index) if index.isdecimal() else -1
            if kind == "group" and 0 <= i < len(groups) and slot != "params" and slot in self.param_groups[i]:
                place, shape = groups[i], np.shape(self.param_groups[i][slot])
            elif kind == "state" and 0 <= i < len(numbered) and slot in ("step", *self.slots):
                place, shape = fresh.setdefault(i, {}), () if slot == "step" else numbered[i][1].shape
            else:
                problems.append(f"unknown {name}")
                continue
            raw = _raw(value)
            if np.shape(raw) != shape:
                problems.append(f"misshapen {name}: {np.shape(raw)} for {shape}")
            elif kind == "group":
                setting = np.asarray(raw).tolist()
                place[slot] = tuple(setting) if isinstance(setting, list) else setting
            elif slot == "step":
                if not isinstance(step := np.asarray(raw).item(), Integral) or step < 0:
                    problems.append(f"{name} counts steps: got {step!r}")
                place[slot] = step
            else:
                try:
                    place[slot] = cast(raw, numbered[i][1])
                except (TypeError, ValueError):
                    problems.append(f"{name} holds no real numbers: {describe(value)}")
        problems += [f"missing group.{i}.{name}" for i, group in enumerate(self.param_groups)
                     for name in group if name != "params" and name not in groups[i]]
        problems += [f"missing state.{i}.{name}" for i, slots in fresh.items()
                     for name in ("step", *self.slots) if name not in slots]
        if problems:
            raise ValueError(f"[load_state_dict] the state does not fit this {self.name}: " + "; ".join(problems))
        for group, loaded in zip(self.param_groups, groups):
            self.check({**group, **loaded})
        self.state = fresh
        for group, loaded in zip(self.param_groups, groups):
            group.update(loaded)


def _host(value: Any) -> Any:
    return value if hasattr(value, "dtype") else np.asarray(value)


class SGD(Optimizer):
    """g += weight_decay p;  b = momentum b + g;  p -= lr b  (nesterov: p -= lr (g + momentum b))"""

    def __init__(self, params: Iterable, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
                 nesterov: bool = False) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)

    @property
    def slots(self) -> tuple[str, ...]:                  # type: ignore[override]
        return ("momentum_buffer",) if any(group["momentum"] for group in self.param_groups) else ()

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("[SGD] nesterov needs a momentum")

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            g = g + group["weight_decay"] * p
        if group["momentum"]:
            b = state["momentum_buffer"]
            b *= group["momentum"]
            b += g
            g = g + group["momentum"] * b if group["nesterov"] else b
        p -= group["lr"] * g


class Adam(Optimizer):
    """m, v: running means of g and g^2, corrected for their start;  p -= lr m / (sqrt(v) + eps)  (Kingma and Ba, 2014).
    weight_decay here is L2: it is added to the gradient."""

    slots = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, v, (b1, b2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        rest = group["lr"], b1, b2, group["eps"], group["weight_decay"], state["step"]
        if xp(p) is np and p.flags.c_contiguous and not _state.composed:
            _numpy.adamw(p, np.ascontiguousarray(g), m, v, *rest, decoupled=self.decoupled)
        else:
            _adamw(p, g, m, v, *rest, decoupled=self.decoupled)


def _adamw(p, g, m, v, lr, b1, b2, eps, weight_decay, step, decoupled):
    """The formula the kernel must equal."""
    if decoupled:
        p *= 1.0 - lr * weight_decay
    elif weight_decay:
        g = g + weight_decay * p
    m += (1.0 - b1) * (g - m)
    v *= b2
    v += (1.0 - b2) * g * g
    p -= (lr / (1.0 - b1**step)) * m / (v**0.5 / math.sqrt(1.0 - b2**step) + eps)


class AdamW(Adam):
    """Adam with decoupled weight decay, p *= 1 - lr weight_decay (Loshchilov and Hutter, 2017)."""

    decoupled = True

    def __init__(self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


class Lion(Optimizer):
    """p *= 1 - lr weight_decay;  p -= lr sign(b1 m + (1 - b1) g);  m = b2 m + (1 - b2) g  (Chen et al., 2023)"""

    slots = ("exp_avg",)

    def __init__(self, params: Iterable, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        m, (b1, b2), lr = state["exp_avg"], group["betas"], group["lr"]
        p *= 1.0 - lr * group["weight_decay"]
        p -= lr * xp(p).sign(b1 * m + (1.0 - b1) * g)
        m *= b2
        m += (1.0 - b2) * g


class Muon(Optimizer):
    """For matrices (d_in, d_out): the momentum's update, made nearly orthogonal (Jordan et al., 2024).

    b = momentum b + (1 - momentum) g;  u = (1 - momentum) g + momentum b (nesterov);  O = ns_steps Newton-Schulz steps
    from u / |u|;  p *= 1 - lr weight_decay;  p -= lr sqrt(max(1, d_out / d_in)) O. AdamW is for embeddings, norms,
    biases.
    """

    slots = ("momentum_buffer",)

    def __init__(self, params: Iterable, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
                 nesterov: bool = True, eps: float = 1e-7, ns_steps: int = 5) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps,
                         ns_steps=ns_steps)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if not isinstance(group["ns_steps"], Integral) or group["ns_steps"] < 0:
            raise ValueError(f"[Muon] ns_steps is an integer of at least 0: got {group['ns_steps']!r}")
        for p in group["params"]:
            if p.ndim != 2:
                raise ValueError("[Muon] optimises matrices, others belong to AdamW: "
                                 f"got a parameter of shape {p.shape}")

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        b, momentum, lr = state["momentum_buffer"], group["momentum"], group["lr"]
        b += (1.0 - momentum) * (g - b)
        u = g + momentum * (b - g) if group["nesterov"] else b
        p *= 1.0 - lr * group["weight_decay"]
        scale = math.sqrt(max(1.0, p.shape[1] / max(1, p.shape[0])))
        p -= lr * scale * orthogonalize(u, group["ns_steps"], group["eps"])


class Together:
    """Several optimisers as one, each for its own parameters: Together(Muon(matrices), AdamW(the rest)). `param_groups`
    are those of all; the state of the i-th is saved as i.NAME."""

    def __init__(self, *optimizers: Optimizer) -> None:
        params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if len({id(p) for p in params}) < len(params):
            raise ValueError("[Together] a parameter belongs to one optimiser: one is given to two")
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": value for i, o in enumerate(self.optimizers) for name, value in o.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As Optimizer.load_state_dict: all or nothing."""
        before = self.state_dict()
        unknown = [name for name in state if name.partition(".")[0] not in map(str, range(len(self.optimizers)))]
        if unknown:
            raise ValueError(f"[load_state_dict] the state does not fit: unknown {', '.join(unknown)}")
        try:
            self._load(state)
        except ValueError:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict({name.partition(".")[2]: value for name, value in state.items()
                                       if name.startswith(f"{i}.")})


def orthogonalize(u: Any, steps: int = 5, eps: float = 1e-7) -> Any:
    """Newton-Schulz: X = a X + (b X X^T + c (X X^T)^2) X drives every singular value near 1; u is a raw matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / xp(x).maximum((x * x).sum() ** 0.5, x.dtype.type(eps))
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def clip_grad_norm_(params: Iterable[Tensor] | Tensor, max_norm: float, error_if_nonfinite: bool = False) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)), norm the 2-norm of all of them together, which is
    returned (0-d, as before scaling)."""
    grads = [p._grad for p in ([params] if isinstance(params, Tensor) else params) if p._grad is not None]
    if not max_norm >= 0:
        raise ValueError(f"[clip_grad_norm_] max_norm is at least 0: got {max_norm}")
    if not grads:
        return _wrap(np.zeros((), np.float32))
    library = xp(grads[0]._data)
    if library is np:
        norm = np.asarray(math.sqrt(math.fsum(_numpy.sum_of_squares(g._data) for g in grads)), grads[0].dtype)
    else:                                                # stays on the device: nothing waits
        norm = library.sqrt(sum((g._data * g._data).sum() for g in grads))
    if error_if_nonfinite and not bool(library.isfinite(norm)):
        raise FloatingPointError(f"[clip_grad_norm_] the norm of the gradients is {norm}")
    scale = library.minimum(max_norm / (norm + 1e-6), 1.0)
    for g in grads:
        if library is not np or not scale == 1.0:
            with np.errstate(invalid="ignore"):          # an infinite norm makes infinity times 0, as it should
                g._data *= scale.astype(g.dtype)
            _memory(g).written = next(_clock)
    return _wrap(norm)


Schedule = Callable[[int], float]


def constant_schedule(lr: float, warmup: int = 0) -> Schedule:
    """step -> lr, rising in a straight line over the first `warmup` steps. Steps count from 0, as in all schedules:
    `for group in optimizer.param_groups: group["lr"] = schedule(step)`."""
    return _schedule(lr, warmup, warmup, 0.0, lambda x: 1.0)


def linear_schedule(lr: float, steps: int, warmup: int = 0, min_lr: float = 0.0) -> Schedule:
    """Warm-up, then a straight line from lr to min_lr at `steps`."""
    return _schedule(lr, steps, warmup, min_lr, lambda x: 1.0 - x)


def cosine_schedule(lr: float, steps: int, warmup: int = 0, min_lr: float = 0.0) -> Schedule:
    """Warm-up, then half a cosine from lr to min_lr at `steps` (Loshchilov and Hutter, 2016)."""
    return _schedule(lr, steps, warmup, min_lr, lambda x: 0.5 * (1.0 + math.cos(math.pi * x)))


def _schedule(lr: float, steps: int, warmup: int, min_lr: float, fall: Callable[[float], float]) -> Schedule:
    if not 0 <= warmup <= steps or not 0 <= min_lr <= lr:
        raise ValueError("[schedule] 0 <= warmup <= steps and 0 <= min_lr <= lr: "
                         f"got {warmup}, {steps}, {min_lr}, {lr}")

    def at(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / (warmup + 1)
        x = min(1.0, (step - warmup) / max(1, steps - warmup))
        return min_lr + (lr - min_lr) * fall(x)
    return at
