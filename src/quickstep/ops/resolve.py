"""Which implementation runs the ops: decided once, when a model is loaded.

The native library on a CPU where it is present, otherwise the PyTorch reference, which runs
everywhere. On a GPU Triton's, where `quickstep doctor --gpu-check` has passed on that GPU with
these versions (`ops.gpu_checks`). Nothing is decided again while the model lives.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from quickstep.config import KERNELS
from quickstep.errors import ConfigError, how_to_install
from quickstep.ops.gpu_checks import CHECK_COMMAND, gpu_check_key, read_gpu_check
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.thread_placement import ThreadPlaces
from quickstep.ops.torch_import import has_torch, require_torch

if TYPE_CHECKING:
    import torch

    from quickstep.ops.tensors import Device

_LOGGER = logging.getLogger(__name__)


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
    if native is not None:
        return native
    if kernels == "native":
        why = f"they run on CPUs, not on {device.type}; choose 'auto'"
        why = native_status().reason if wants_native else why
        raise ConfigError(f"--kernels is 'native', but {why}")
    if kernels == "auto" and device.type == "cuda":
        kernels = _auto_on_gpu(device)
    if wants_native and not has_torch():
        raise ConfigError(
            f"{native_status().reason}, or run on PyTorch's ops, which are slow: "
            f"{how_to_install('torch')}"
        )
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


def _auto_on_gpu(device: torch.device | Device) -> str:
    """Triton's kernels where their check has passed on this GPU, else the reference, with a warning
    that says what to do.
    """
    if importlib.util.find_spec("triton") is None:
        why = "Triton is not installed"
    else:
        require_torch("running on a GPU")
        stored = read_gpu_check(gpu_check_key(device.index or 0))
        if stored is not None and not stored.failures:
            return "triton"
        if stored is None:
            why = f"nothing has checked Triton's kernels on this GPU: run `{CHECK_COMMAND}` once"
        else:
            why = f"Triton's kernels failed `{CHECK_COMMAND}` on this GPU: {stored.failures[0]}"
    _LOGGER.warning("running on PyTorch's ops, exact and very slow on a GPU: %s", why)
    return "reference"
