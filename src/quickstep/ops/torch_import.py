"""Importing torch in the time that inference needs of it, for processes that are Quickstep's own.

Half of `import torch` goes into modules for exporting and tracing programs, which inference never
touches. `import_torch` defers those (see `quickstep.deferred`). What their code registers with
torch (kernels of the meta device) comes with `complete_torch`. `preload_torch` has the shared
libraries mapped by another thread, while this one imports what else there is.

Only the command line and the engine's process call this. A program that uses the library imports
torch as it likes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from quickstep.deferred import complete, deferring

__all__ = ["complete_torch", "import_torch", "preload_torch"]

# Subtrees that nothing but torch's own front door imports at `import torch`.
_DEFERRED = frozenset(("torch._meta_registrations", "torch.export", "torch.distributions"))


def import_torch() -> None:
    """Import torch without its deferred modules. Once it is imported, nothing changes."""
    if "torch" in sys.modules:
        return
    with deferring(_DEFERRED):
        import torch  # noqa: F401


def complete_torch() -> None:
    """Run what was deferred: for code that makes models on the meta device, or traces them."""
    complete(_DEFERRED)


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
