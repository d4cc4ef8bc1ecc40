"""Importing torch in the time that inference needs of it, for processes that are Quickstep's own.

Half of `import torch` goes into modules for exporting and tracing programs, which inference never
touches. `import_torch` leaves those out: each stands in `sys.modules` as an empty module that runs
its code when something is first looked up in it. What their code registers with torch (kernels of
the meta device) comes with `complete_torch`. `preload_torch` has the shared libraries mapped by
another thread, while this one imports what else there is.

Only the command line and the engine's process call this. A program that uses the library imports
torch as it likes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

__all__ = ["complete_torch", "import_torch", "preload_torch"]

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


def import_torch() -> None:
    """Import torch without its deferred modules. Once it is imported, nothing changes."""
    if "torch" in sys.modules:
        return
    finder = _Deferring()
    sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401
    finally:
        sys.meta_path.remove(finder)


def complete_torch() -> None:
    """Run what was deferred: for code that makes models on the meta device, or traces them."""
    for name in _DEFERRED:
        module = sys.modules.get(name)
        loading = None if module is None else module.__dict__.get("_loading")
        if module is not None and isinstance(loading, _Loading):
            loading.run(module)


def preload_torch() -> None:
    """Begin to map torch's shared library, in a thread; importing torch then finds it there."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is None or found.origin is None or not sys.platform.startswith("linux"):
        return
    library = Path(found.origin).parent / "lib" / "libtorch_cpu.so"
    if library.exists():
        threading.Thread(target=_map, args=(library,), daemon=True).start()


def _map(library: Path) -> None:
    """`dlopen`, called as any foreign function is: without the interpreter's lock."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(library), os.RTLD_NOW | os.RTLD_LOCAL)
