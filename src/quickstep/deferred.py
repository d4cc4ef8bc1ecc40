"""Deferred imports: a module is created empty, and its code runs when an attribute is looked up.

This is for packages of which a process uses a few submodules. `import a.b` runs the code of `a`
first, which may import all of `a`. If `a` is deferred, only `a.b` is imported, and the code of `a`
runs when one of its names is looked up. A package that is already imported, or that moves its
modules, is imported completely: slower, but correct.

Only the command line and the engine's process defer imports. Programs that use Quickstep as a
library are not affected.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # at run time these classes are not needed, and their module imports many others
    Loader = MetaPathFinder = object

# Dunder names that code looks up; the import system looks up others, such as `__path__`.
_NAMES_IN_CODE = frozenset({"__all__", "__version__"})


class _DeferredModule(ModuleType):
    """A module that runs its code when a missing attribute is looked up."""

    def __getattr__(self, name: str) -> object:
        loading = self.__dict__.get("_loading")
        if loading is None or (name.startswith("__") and name not in _NAMES_IN_CODE):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if PathFinder.find_spec(f"{self.__name__}.{name}", self.__dict__.get("__path__", ())):
            return import_module(f"{self.__name__}.{name}")  # `from . import name`
        loading.run(self)
        return getattr(self, name)


class _Loading(Loader):
    """Wraps a module's loader, and runs the module's code on request."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._lock = threading.RLock()
        self._running = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an empty module."""
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Postpone running the code."""
        module.__dict__["_loading"] = self

    def run(self, module: ModuleType) -> None:
        """Run the module's code once; other threads wait for it."""
        with self._lock:
            if self._running:  # this thread is already inside that code
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
    """Finds the deferred modules before the other finders."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def defers(self, names: Collection[str]) -> bool:
        """Whether this finder already defers all these modules."""
        return self._names >= frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a deferred module; None for other modules."""
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec.loader)
        return spec


def defer(names: Collection[str]) -> None:
    """Defer the modules `names` when they are imported from now on."""
    if not any(isinstance(finder, _Deferring) and finder.defers(names) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring(names))


def complete(names: Collection[str]) -> None:
    """Run the code of those modules in `names` that are still deferred."""
    for name in names:
        module = sys.modules.get(name)
        loading = None if module is None else module.__dict__.get("_loading")
        if module is not None and isinstance(loading, _Loading):
            loading.run(module)
