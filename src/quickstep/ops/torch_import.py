"""Importing torch in the time that inference needs of it, for processes that are Quickstep's own.

Half of `import torch` goes into modules for exporting and tracing programs, which inference never
touches. After `defer_parts_of_torch` an import leaves those out: each stands in `sys.modules` as an
empty module that runs its code when something is first looked up in it. What their code registers
with torch (kernels of the meta device) comes with `complete_torch`.

Only the command line and the engine's process call this, and most of them never import torch at
all. A program that uses the library imports torch as it likes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["complete_torch", "defer_parts_of_torch"]

# Subtrees that nothing but torch's own front door imports at `import torch`.
_DEFERRED = frozenset(("torch._meta_registrations", "torch.export", "torch.distributions"))


class _DeferredModule(ModuleType):
    """Runs its code when an attribute is looked up that it does not have yet."""

    def __getattr__(self, name: str) -> object:
        loading = self.__dict__.get("_loading")
        # the import system asks for these of every module
        if loading is None or (name.startswith("__") and name != "__all__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        loading.run(self)
        return getattr(self, name)


class _Loading(Loader):
    """Stands for a module's loader until its code is wanted."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._lock = threading.RLock()
        self._running = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""
        module.__dict__["_loading"] = self

    def run(self, module: ModuleType) -> None:
        """The module's code, once; other threads wait for it."""
        with self._lock:
            if self._running:  # by this thread, from within that code
                raise AttributeError(f"module {module.__name__!r} is being imported")
            if module.__dict__.get("_loading") is not self:
                return
            self._running = True
            try:
                self._loader.exec_module(module)
                del module.__dict__["_loading"]
            finally:
                self._running = False


class _Deferring(MetaPathFinder):
    """Finds the deferred modules, before anybody else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a deferred module; None for any other."""
        if fullname not in _DEFERRED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec.loader)
        return spec


def defer_parts_of_torch() -> None:
    """Let whoever imports torch from now on import it without its deferred modules."""
    is_there = "torch" in sys.modules or any(isinstance(one, _Deferring) for one in sys.meta_path)
    if not is_there:
        sys.meta_path.insert(0, _Deferring())


def complete_torch() -> None:
    """Run what was deferred: for code that makes models on the meta device, or traces them."""
    for name in _DEFERRED:
        module = sys.modules.get(name)
        loading = None if module is None else module.__dict__.get("_loading")
        if module is not None and isinstance(loading, _Loading):
            loading.run(module)
