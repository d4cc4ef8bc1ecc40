"""Which implementation runs the ops: decided once, when a model is loaded.

The native library on a CPU where it is present, otherwise the PyTorch reference, which runs
everywhere. Nothing is decided again while the model lives.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol, cast

import torch

from quickstep.errors import ConfigError
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable

__all__ = ["KERNELS", "resolve_ops"]

KERNELS = ("auto", "reference", "native")
_NATIVE_MODULE = "quickstep.ops.native"


class _NativeModule(Protocol):
    """What `quickstep.ops.native` exposes."""

    def load_native(self) -> OpTable | None:
        """The native table, or None where the library is absent."""


def resolve_ops(device: torch.device, kernels: str = "auto") -> OpTable:
    """The op table for `device`; `kernels` is one of KERNELS.

    Raises:
        ConfigError: `kernels` is not known, or is `native` where native kernels cannot run.
    """
    if kernels not in KERNELS:
        raise ConfigError(f"kernels is {kernels!r}, it must be one of {', '.join(KERNELS)}")
    native = _native_ops() if kernels != "reference" and device.type == "cpu" else None
    if kernels == "native" and native is None:
        raise ConfigError(
            f"kernels is 'native', but no native kernels are built for {device.type}; "
            "install with a C++ compiler present, or choose 'auto'"
        )
    return native or reference_ops()


def _native_ops() -> OpTable | None:
    if importlib.util.find_spec(_NATIVE_MODULE) is None:
        return None
    return cast(_NativeModule, importlib.import_module(_NATIVE_MODULE)).load_native()
