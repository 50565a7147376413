"""Mixture of experts: a router sends every token through a few of many MLPs (Shazeer et al., 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import minigrad.functional as F
from minigrad.backend.device import to_host, xp
from minigrad.backend.random import stream
from minigrad.nn.layers import MLP, Linear, SwiGLU, check_sizes
from minigrad.nn.module import Module, ModuleList
from minigrad.ops.elementwise import array, number, on_device_of
from minigrad.tape import Tensor, _raw, _state, describe


@dataclass(frozen=True)
class Routing:
    """How a MoE routed the tokens of its last pass: N tokens, top_k choices each, E experts.

    counts (E,): choices of each expert, before any is dropped. dropped: choices beyond the capacity. balance, z: the
    router's losses (see MoE), Tensors with the pass's graph if it was recorded; None under mg.checkpoint.
    """

    counts: np.ndarray
    dropped: int
    balance: Tensor | None
    z: Tensor | None

    def __deepcopy__(self, memo: dict) -> Routing:       # a copy of a model has no part in the graph of the original
        return replace(self, balance=None, z=None)


class MoE(Module):
    """y = sum over the top_k experts e of a token of w_e expert_e(x): (*S, C) -> (*S, C).

    p = softmax(x W_router); the experts of a token are the top_k of largest p, of equals the first; their weights are
    their p, divided by the sum if `normalize` (Mixtral, Jiang et al., 2024; the default for top_k > 1. A single weight
    would be 1 and teach the router nothing: Switch, Fedus et al., 2021, keeps p).
    n_experts E, top_k: 1 <= top_k <= E. mlp: "swiglu", or the activation of an MLP; d_ff, bias, dropout as there.
    capacity_factor: while training, an expert takes at most ceil(capacity_factor N top_k / E) of N tokens, in their
        order; the choices beyond are dropped and add nothing, their token passes by the residual around the layer.
        None, and in evaluation, where a token's result may not depend on its neighbours: nothing is dropped.

    `routing` tells of the last pass, with two losses for training, each a scalar (see `balance_loss`):
    balance = E sum_e f_e P_e, f_e the share of choices that fell on e, a constant, P_e the mean of p_e (Fedus et al.):
        1 when all are used alike, E when one expert has it all. (Hugging Face's Mixtral counts top_k times this.)
    z = mean (log sum_e exp(x W_router)_e)^2, which keeps the router's scores small (Zoph et al., 2022).
    They hold the graph of the pass until the next one.

    Each expert runs once, on its own tokens. Where a pass is recorded, experts without a token run on none, so that
    every parameter has a gradient, zero for these. On CUDA the router's scores are copied to the host, which waits for
    them: the number of rows of each product must be known there. Nothing else waits.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int = 2, d_ff: int | None = None, mlp: str = "swiglu",
                 capacity_factor: float | None = None, bias: bool = False, normalize: bool | None = None,
                 dropout: float = 0.0) -> None:
        check_sizes("MoE", d_model, n_experts, top_k)
        if not 1 <= top_k <= n_experts:
            raise ValueError(f"[MoE] a token goes to 1 to n_experts of them: top_k {top_k}, n_experts {n_experts}")
        if capacity_factor is not None and not 0.0 < number("MoE", "capacity_factor", capacity_factor) < math.inf:
            raise ValueError(f"[MoE] capacity_factor is a finite number above 0, or None: got {capacity_factor!r}")
        self.n_experts, self.top_k, self.capacity_factor = n_experts, top_k, capacity_factor
        self.normalize = top_k > 1 if normalize is None else normalize
        self.router = Linear(d_model, n_experts, bias=False)
        self.experts = ModuleList(
            SwiGLU(d_model, d_ff, bias, dropout) if mlp == "swiglu" else MLP(d_model, d_ff, bias, mlp, dropout)
            for _ in range(n_experts))
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = array("MoE", "x", x)
        if not x.ndim:
            raise ValueError(f"[MoE] x is (*S, C): got {describe(x)}")
        tokens = x.reshape(-1, x.shape[-1])
        n, c = tokens.shape
        scores = self.router(tokens)
        p, chosen = F.softmax(scores), self._choose(scores)                        # (N, E), (N, K)
        weights = F.take_along_axis(p, chosen, axis=-1)
        if self.normalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        # The N K choices, token by token, sorted by expert; each expert takes the first of its own.
        counts = np.bincount(chosen.reshape(-1), minlength=self.n_experts)
        order, begins = np.argsort(chosen.reshape(-1), kind="stable"), np.cumsum(counts) - counts
        limited = self.capacity_factor is not None and self.training
        sizes = np.minimum(counts, self._capacity(n)) if limited else counts
        taken = np.concatenate([order[begin:begin + size] for begin, size in zip(begins, sizes)])
        # A row for every choice, so that to gather is to permute: no row is taken twice, and the adjoint adds nothing.
        rows = F.broadcast_to(tokens[:, None], (n, self.top_k, c)).reshape(n * self.top_k, c)
        parts = F.split(F.embedding(taken, rows), sizes.tolist())
        done = [expert(part) for expert, part in zip(self.experts, parts) if part.shape[0] or _state.recording]
        nothing = xp(_raw(tokens)).zeros((1, c), tokens.dtype)                     # what a dropped choice brings
        place = np.full(n * self.top_k, len(taken))
        place[taken] = np.arange(len(taken))
        back = F.embedding(place, F.concatenate([*done, nothing])).reshape(n, self.top_k, c)
        self._note(scores, p, counts, counts.sum() - sizes.sum())
        return (back * weights[..., None]).sum(axis=1).reshape(x.shape)

    def _choose(self, scores: Tensor) -> np.ndarray:
        """The top_k experts of each token, best first, of equals the first: integers (N, K) on the host."""
        host = to_host(scores._data)
        bad = ~np.isfinite(host)
        if bad.any():
            token, expert = np.argwhere(bad)[0]
            raise ValueError(f"[MoE] the router's scores are finite: got {host[token, expert]} for expert {expert} at "
                             f"token {token} of {len(host)}, from the input or the router's weight")
        return np.argsort(-host, axis=-1, kind="stable")[:, :self.top_k]

    def _capacity(self, n: int) -> int:
        return math.ceil(self.capacity_factor * n * self.top_k / self.n_experts)  # type: ignore[operator]

    def _note(self, scores: Tensor, p: Tensor, counts: np.ndarray, dropped: Any) -> None:
        balance = z = None
        if not stream.noted:                             # a checkpoint's inner graph does not reach what came before it
            n = max(1, scores.shape[0])
            f = on_device_of((counts * (self.n_experts / (n * self.top_k))).astype(p.dtype), p)
            balance = (p.sum(axis=0) / n * f).sum()
            z = F.square(F.logsumexp(scores, axis=-1)).sum() / n
        self.routing = Routing(counts, int(dropped), balance, z)


def balance_loss(model: Module, balance: float = 1.0, z: float = 0.0) -> Tensor:
    """The sum over the MoE layers of a model of balance * routing.balance + z * routing.z, of the last pass: a scalar.

    loss = model.loss(x, y) + nn.balance_loss(model, 0.01, z=0.001), the weights of Fedus et al. and Zoph et al. A layer
    that is called twice in a pass counts the last time. RuntimeError if a layer has no pass behind it, or one under
    mg.checkpoint, from which these losses cannot be differentiated.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, MoE)}
    if not layers:
        raise ValueError(f"[balance_loss] the model holds a MoE layer: got {type(model).__name__} without one")
    total: Any = 0.0
    for path, layer in layers.items():
        if layer.routing is None or layer.routing.balance is None:
            raise RuntimeError(f"[balance_loss] every MoE has a pass behind it, outside mg.checkpoint: {path or 'it'} "
                               "has none; call the model first, and blocks that hold a MoE without checkpoint")
        total = total + balance * layer.routing.balance + z * layer.routing.z  # type: ignore[operator]
    return total
