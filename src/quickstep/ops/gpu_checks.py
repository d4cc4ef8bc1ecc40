"""Stored results of `quickstep doctor --gpu-check`: where Triton's kernels are known to be right.

One file per GPU model, versions of torch and Triton, and source of the kernels; `ops.resolve` reads
it. A file that cannot be used is as one that is not there.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import msgspec

from quickstep.cache_dir import cache_dir

CHECK_COMMAND = "quickstep doctor --gpu-check"
_LOGGER = logging.getLogger(__name__)
_KERNELS = Path(__file__).resolve().parent / "triton"


class GpuCheckKey(msgspec.Struct, frozen=True):
    """What the result of a check depends on.

    Attributes:
        gpu: Name and compute capability.
        torch: Its version, with the one of CUDA.
        triton: Its version.
        kernels: Digest of the source of the kernels.
    """

    gpu: str
    torch: str
    triton: str
    kernels: str


class StoredGpuCheck(msgspec.Struct, frozen=True):
    """The content of a file. `failures` has a line per failed part; without any, it has passed."""

    key: GpuCheckKey
    failures: tuple[str, ...]


def gpu_check_key(index: int) -> GpuCheckKey:
    """The key of a GPU of this machine."""
    from importlib.metadata import version

    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return GpuCheckKey(
        f"{torch.cuda.get_device_name(index)}, {major}.{minor}",
        str(torch.__version__),
        version("triton"),
        _digest_of(_KERNELS),
    )


def _digest_of(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _path_of(folder: Path, key: GpuCheckKey) -> Path:
    name = hashlib.blake2b(msgspec.json.encode(key), digest_size=12).hexdigest()
    return folder / "gpu_checks" / f"{name}.json"


def read_gpu_check(key: GpuCheckKey, folder: Path | None = None) -> StoredGpuCheck | None:
    """The stored result; `folder` None: in the cache directory."""
    folder = folder or cache_dir()
    if folder is None:
        return None
    path = _path_of(folder, key)
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=StoredGpuCheck)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        _LOGGER.warning("the stored check of a GPU in %s is ignored: %s", path, error)
        return None
    return stored if stored.key == key else None


def write_gpu_check(stored: StoredGpuCheck, folder: Path | None = None) -> Path | None:
    """Store a result; where it is. None: nothing is stored on this machine."""
    folder = folder or cache_dir()
    if folder is None:
        return None
    path = _path_of(folder, stored.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(stored))
    except OSError as error:
        _LOGGER.warning("the check of a GPU was not stored in %s: %s", path, error)
        return None
    return path
