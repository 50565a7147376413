"""Where in a model a call is: what watchers of training use to name modules."""

from __future__ import annotations

import weakref
from typing import Any

from minigrad.tape import Watcher

OUTSIDE = "(outside modules)"


class ModuleWatcher(Watcher):
    """A Watcher that knows which Module is being called: `path`, as in `named_modules`; "" outside of all. The
    outermost module, which has no name there, goes by its class."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._paths: dict[int, tuple[weakref.ref, str]] = {}     # by id: a user's Module may define == and no hash

    @property
    def path(self) -> str:
        return self.calls[-1] if self.calls else ""

    def entered(self, module: Any) -> None:
        known = self._paths.get(id(module))
        if known is None or known[0]() is not module:
            above = f"{self.path}.{type(module).__name__}" if self.calls else ""
            for path, inner in module.named_modules(above):
                self._paths[id(inner)] = weakref.ref(inner), path or type(module).__name__
        self.calls.append(self._paths[id(module)][1])

    def left(self, module: Any) -> None:
        self.calls.pop()
