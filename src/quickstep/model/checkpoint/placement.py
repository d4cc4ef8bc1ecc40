"""Where a model's tensors go and in which element type: `auto` resolved, without importing torch.

Called by the engine's assembly and by the loader, once each at load.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import STORED_DTYPES
from quickstep.model.decoder_spec import ModelSpec
from quickstep.ops.tensors import CPU, FLOAT32, Device, DType
from quickstep.ops.torch_import import has_torch, require_torch

_DTYPES = {dtype.name: dtype for dtype in STORED_DTYPES.values()}


_GPU_NAME = re.compile(r"cuda(?::(\d+))?", re.ASCII)


def choose_device(name: str) -> Device:
    """`auto` takes a GPU if torch finds one; torch is imported only where there is a driver.

    Raises:
        ConfigError: The name is unknown, or there is no such device.
    """
    gpu = _GPU_NAME.fullmatch(name)
    if gpu is None and name not in ("auto", "cpu"):
        raise ConfigError(f"--device is {name!r}, it must be auto, cpu, cuda or cuda:N")
    if name == "cpu" or (name == "auto" and not _has_gpu_driver()):
        return CPU
    if gpu is not None:
        require_torch(f"--device {name}")
    elif not has_torch():
        return CPU
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(gpu[1]) if gpu is not None and gpu[1] else None
    if (index or 0) < num_gpus:
        return Device("cuda", index)
    if gpu is None:
        return CPU
    seen = f"{num_gpus} GPUs" if num_gpus else "no GPU"
    raise ConfigError(f"--device is {name} and torch sees {seen}; use --device cpu")


def rank_device(first: Device, rank: int) -> Device:
    """The GPU of a rank whose rank 0 has `first`: the devices that follow it, one for each."""
    import torch

    index = torch.cuda.current_device() if first.index is None else first.index
    return Device(first.type, index + rank)


def check_num_devices(first: Device, size: int) -> None:
    """Raise ConfigError where there is no GPU for each of `size` ranks from `first` on."""
    import torch

    last, num_gpus = rank_device(first, size - 1), torch.cuda.device_count()
    assert last.index is not None
    if last.index >= num_gpus:
        begin = last.index - size + 1
        raise ConfigError(
            f"--tensor-parallel-size {size} needs a GPU for each rank, cuda:{begin} to "
            f"cuda:{last.index}, and torch sees {num_gpus} GPUs; lower it, or use --device cpu"
        )


def _has_gpu_driver() -> bool:
    """Whether torch could see a GPU: no build of it does without one of these."""
    if not sys.platform.startswith("linux"):
        return True
    if Path("/dev/kfd").exists():  # AMD's
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def choose_dtype(name: str, spec: ModelSpec, files: TensorFiles | None = None) -> DType:
    """`auto` takes the config's dtype, else that of the stored weights, else float32.

    Raises:
        ConfigError: The name is unknown.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise ConfigError(f"--dtype is {name!r}, it must be auto or {', '.join(_DTYPES)}")
        return _DTYPES[name]
    if spec.dtype in _DTYPES:
        return _DTYPES[spec.dtype]
    stored = {tensor.dtype for tensor in files.tensors.values()} if files is not None else set()
    return next((STORED_DTYPES[code] for code in STORED_DTYPES if code in stored), FLOAT32)
