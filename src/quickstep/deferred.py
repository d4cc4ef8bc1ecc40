"""Modules that wait: each stands in `sys.modules` empty and runs its code when it is first asked.

For packages of which a process of ours uses a few modules: `import a.b` runs the code of `a` first,
and that imports all of `a`. With `a` deferred, `a.b` alone is imported, and the code of `a` runs
when a name in it is looked up. A package that is imported already, or that moves its modules, is
imported completely: slower, not wrong.

Only the command line and the engine's process defer anything: a program that uses the library
finds every module as its authors made it.
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
else:  # these classes are for checking types alone, and their module imports a dozen others
    Loader = MetaPathFinder = object

__all__ = ["complete", "defer"]

# What is asked of a module by others than the import system. It asks for the likes of `__path__`.
_NAMES_IN_CODE = frozenset({"__all__", "__version__"})


class _DeferredModule(ModuleType):
    """Runs its code when an attribute is looked up that it does not have yet."""

    def __getattr__(self, name: str) -> object:
        loading = self.__dict__.get("_loading")
        if loading is None or (name.startswith("__") and name not in _NAMES_IN_CODE):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if PathFinder.find_spec(f"{self.__name__}.{name}", self.__dict__.get("__path__", ())):
            return import_module(f"{self.__name__}.{name}")  # `from . import name`
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

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def defers(self, names: Collection[str]) -> bool:
        """Whether these are its own already."""
        return self._names >= frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a deferred module; None for any other."""
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec.loader)
        return spec


def defer(names: Collection[str]) -> None:
    """Whoever imports the modules `names` from now on gets them deferred."""
    if not any(isinstance(one, _Deferring) and one.defers(names) for one in sys.meta_path):
        sys.meta_path.insert(0, _Deferring(names))


def complete(names: Collection[str]) -> None:
    """Run the code of those of `names` that are deferred still."""
    for name in names:
        module = sys.modules.get(name)
        loading = None if module is None else module.__dict__.get("_loading")
        if module is not None and isinstance(loading, _Loading):
            loading.run(module)
