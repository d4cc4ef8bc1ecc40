"""Importing torch in the time that inference needs of it, for processes that are Quickstep's own.

Half of `import torch` goes into modules for exporting and tracing programs, which inference never
touches. After `defer_parts_of_torch` an import leaves those out (see `quickstep.deferred`). What
their code registers with torch (kernels of the meta device) comes with `complete_torch`.

Only the command line and the engine's process call this, and most of them never import torch at
all. A program that uses the library imports torch as it likes.
"""

from __future__ import annotations

import sys

from quickstep.deferred import complete, defer

__all__ = ["complete_torch", "defer_parts_of_torch"]

# Subtrees that nothing but torch's own front door imports at `import torch`.
_DEFERRED = frozenset(("torch._meta_registrations", "torch.export", "torch.distributions"))


def defer_parts_of_torch() -> None:
    """Let whoever imports torch from now on import it without its deferred modules."""
    if "torch" not in sys.modules:
        defer(_DEFERRED)


def complete_torch() -> None:
    """Run what was deferred: for code that makes models on the meta device, or traces them."""
    complete(_DEFERRED)
