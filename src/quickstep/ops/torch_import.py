"""torch is optional: whether it is installed, and importing it quickly.

The served path on native kernels never imports torch. `require_torch` is called where something
else begins: the reference ops, GPUs, checkpoints that are not captured, the transformers fallback.

Half of the time of `import torch` is spent in modules for exporting and tracing programs, which
inference never touches. After `defer_parts_of_torch` an import leaves those out (see
`quickstep.deferred`). What their code registers with torch (kernels of the meta device) is added by
`complete_torch`.

Only the command line and the engine's process call this, and most of them never import torch at
all. A program that uses the library imports torch as it likes.
"""

from __future__ import annotations

import importlib.util
import sys

from quickstep.deferred import complete, defer
from quickstep.errors import ConfigError, how_to_install

# Subtrees that nothing but torch's own `__init__` imports at `import torch`.
_DEFERRED = frozenset(("torch._meta_registrations", "torch.export", "torch.distributions"))


def defer_parts_of_torch() -> None:
    """Make every later import of torch skip its deferred modules."""
    if "torch" not in sys.modules:
        defer(_DEFERRED)


def complete_torch() -> None:
    """Run what was deferred: for code that makes models on the meta device, or traces them."""
    complete(_DEFERRED)


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def require_torch(what: str) -> None:
    """Raise ConfigError if torch is not installed; `what` needs it, as in `--device cuda`."""
    if not has_torch():
        raise ConfigError(f"{what} needs PyTorch: {how_to_install('torch')}")
