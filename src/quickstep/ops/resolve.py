"""Which implementation runs the ops: decided once, when a model is loaded.

The native library on a CPU where it is present, otherwise the PyTorch reference, which runs
everywhere. Triton kernels only by name, as no GPU has run them yet. Nothing is decided again while
the model lives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quickstep.config import KERNELS
from quickstep.errors import ConfigError
from quickstep.ops.native.backend import load_native
from quickstep.ops.table import OpTable
from quickstep.ops.thread_placement import ThreadPlaces
from quickstep.ops.torch_import import require_torch

if TYPE_CHECKING:
    import torch

    from quickstep.ops.tensors import Device

__all__ = ["resolve_ops"]

# What `auto` is on a GPU: `triton` once `make gpu` has passed on one (docs/design/0039).
_AUTO_ON_GPU = "reference"


def resolve_ops(
    device: torch.device | Device,
    kernels: str = "auto",
    num_threads: int | None = None,
    isa: str | None = None,
    places: Callable[[int], ThreadPlaces] | None = None,
) -> OpTable:
    """The op table for `device`; `kernels` is one of KERNELS.

    `num_threads`, `isa` and `places` are the native kernels' own
    (`ops.native.backend.load_native`): None for the machine's cores, its best instruction set, and
    wherever the system runs them.

    Raises:
        ConfigError: `kernels` is not known, or is `native` or `triton` where those cannot run.
    """
    if kernels not in KERNELS:
        raise ConfigError(f"--kernels is {kernels!r}, it must be one of {', '.join(KERNELS)}")
    wants_native = kernels in ("auto", "native") and device.type == "cpu"
    native = load_native(num_threads, isa, places=places) if wants_native else None
    if kernels == "native" and native is None:
        raise ConfigError(
            f"--kernels is 'native', but no native kernels are built for {device.type}; "
            "install with a C++ compiler present, or choose 'auto'"
        )
    if native is not None:
        return native
    if kernels == "auto" and device.type == "cuda":
        kernels = _AUTO_ON_GPU
    require_torch(f"running the PyTorch ops on {device.type}")
    if kernels == "triton":
        from quickstep.ops.triton.backend import load_triton

        table = load_triton(device)
        if table is None:
            raise ConfigError(
                f"--kernels is 'triton', but Triton is not installed or does not run on "
                f"{device.type}; choose 'auto'"
            )
        return table
    from quickstep.ops.reference import reference_ops

    return reference_ops()
