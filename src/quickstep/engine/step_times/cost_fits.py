"""Stored fits of the step-time model: one file per model, format, kernels and machine.

An engine starts with the stored fit, or without one at the start values, and saves what it has
learnt every few minutes and when it stops. A file that cannot be used is ignored with a line in the
log: nothing here delays or fails a start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import platform
import tempfile
from pathlib import Path

import msgspec

from quickstep.core.cost_model import Coefficients, CostFit, LinearCostModel
from quickstep.core.overhead import EngineOverhead, StageTimes
from quickstep.engine.machine import usable_cores
from quickstep.version import __version__

_LOGGER = logging.getLogger(__name__)
_VERSION = 2
_SAVE_EVERY_S = 180.0
_MIN_NEW_STEPS = 50


class FitKey(msgspec.Struct, frozen=True):
    """What step times depend on.

    Attributes:
        fingerprint: Of weights, their format, dtype, KV dtype and kernel set.
        version: Quickstep's, because kernels change.
        cpu: The CPU's model.
        num_cores: Cores that the process may use.
        num_threads: Threads that compute.
        device: `cpu` or `cuda`.
        is_eager: Steps are not captured.
        split: Tensor-parallel ranks and stages, each a process with `num_threads`.
    """

    fingerprint: str
    version: str
    cpu: str
    num_cores: int
    num_threads: int
    device: str
    is_eager: bool
    split: tuple[int, int] = (1, 1)


class FitSource(msgspec.Struct, frozen=True):
    """The checkpoint and the formats that a calibration was of, as `--quantization` and
    `--kv-cache-dtype` name them: by it, a fit is found without loading the model.
    """

    path: str
    quantization: str | None
    kv_dtype: str


class StoredFit(msgspec.Struct, frozen=True):
    """The content of a file. `version` is of this format; `overhead`, `source` and `stages` (of a
    pipeline) are known after a calibration.
    """

    version: int
    key: FitKey
    fit: CostFit
    overhead: EngineOverhead | None = None
    source: FitSource | None = None
    stages: StageTimes | None = None


def fit_key(
    fingerprint: str,
    device: str,
    num_threads: int,
    is_eager: bool,
    split: tuple[int, int] = (1, 1),
    root: Path = Path("/"),
) -> FitKey:
    """The key of a model on this machine; `root` has Linux's `proc`."""
    cores, cpu = usable_cores(), _cpu_model(root)
    return FitKey(fingerprint, __version__, cpu, cores, num_threads, device, is_eager, split)


def _cpu_model(root: Path) -> str:
    try:
        with (root / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class FitFile:
    """The file of one key, in the folder of the cache."""

    def __init__(self, folder: Path, key: FitKey) -> None:
        self._key = key
        digest = hashlib.blake2b(msgspec.json.encode(key), digest_size=12).hexdigest()
        self.path = folder / "cost_fits" / f"{digest}.json"

    def read(self) -> CostFit | None:
        """The stored fit; None if there is none that can be used."""
        stored = self.read_all()
        return None if stored is None else stored.fit

    def read_all(self) -> StoredFit | None:
        """The content; None if there is none that can be used."""
        try:
            stored = msgspec.json.decode(self.path.read_bytes(), type=StoredFit)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            _LOGGER.warning("the stored step times in %s are ignored: %s", self.path, error)
            return None
        if stored.version != _VERSION or stored.key != self._key:
            _LOGGER.warning(
                "the stored step times in %s are ignored: they are of another version", self.path
            )
            return None
        return stored

    def write(
        self,
        fit: CostFit,
        overhead: EngineOverhead | None = None,
        source: FitSource | None = None,
        stages: StageTimes | None = None,
    ) -> None:
        """Replace the file at once; what is not given keeps its stored value. Raises OSError."""
        if overhead is None and self.path.exists():
            before = self.read_all()
            if before is not None:
                overhead, source, stages = before.overhead, before.source, before.stages
        stored = StoredFit(_VERSION, self._key, fit, overhead, source, stages)
        content = msgspec.json.encode(stored)
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".fit-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def find_calibration(
    folder: Path,
    source: FitSource,
    root: Path = Path("/"),
    split: tuple[int, int] = (1, 1),
    num_engines: int = 1,
) -> StoredFit | None:
    """The newest calibration of a checkpoint by this version on this machine; None without one.
    `split` as in `FitKey`. Of several engines or processes, one with as many threads as each has
    cores.
    """
    num_processes = num_engines * split[0] * split[1]
    num_threads = max(1, usable_cores() // num_processes)
    found: list[tuple[float, StoredFit]] = []
    for path in (folder / "cost_fits").glob("*.json"):
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredFit)
            changed_s = path.stat().st_mtime
        except (OSError, ValueError):
            continue  # it is replaced when its engine starts
        key = stored.key
        is_here = (key.cpu, key.num_cores) == (_cpu_model(root), usable_cores())
        matches = key.split == split and (num_processes == 1 or key.num_threads == num_threads)
        if matches and stored.source == source and is_here and key.version == __version__:
            found.append((changed_s, stored))
    return max(found, key=lambda one: one[0], default=(0.0, None))[1]


class FitSaver:
    """Saves the fit of a running engine. Owned by the engine; called in its event loop.

    `file` is None where nothing is stored.

    Attributes:
        due_s: `tick` does nothing before.
    """

    def __init__(self, model: LinearCostModel, file: FitFile | None) -> None:
        self._model = model
        self._file = file
        self._num_saved = model.num_steps
        self.due_s = -math.inf
        self._saving: asyncio.Future[None] | None = None

    @staticmethod
    def open(file: FitFile | None, start: Coefficients) -> FitSaver:
        """A saver of a new model, which continues from the stored fit or begins at `start`."""
        fit = None if file is None else file.read()
        model = LinearCostModel(start) if fit is None else LinearCostModel.of_fit(fit)
        return FitSaver(model, file)

    @property
    def model(self) -> LinearCostModel:
        """The model whose fit is saved."""
        return self._model

    def tick(self, now: float) -> None:
        """Save in a thread if some minutes have passed since the last time."""
        if now < self.due_s:
            return
        is_first, self.due_s = self.due_s == -math.inf, now + _SAVE_EVERY_S
        if not is_first and (self._saving is None or self._saving.done()):
            fit = self._new_fit()
            if fit is not None:
                loop = asyncio.get_running_loop()
                self._saving = loop.run_in_executor(None, self._write, fit)

    async def close(self) -> None:
        """Save what is new."""
        if self._saving is not None:
            await self._saving
        fit = self._new_fit()
        if fit is not None:
            self._write(fit)

    def _new_fit(self) -> CostFit | None:
        """The fit, if there were enough steps since the last one."""
        if self._file is None or self._model.num_steps < self._num_saved + _MIN_NEW_STEPS:
            return None
        self._num_saved = self._model.num_steps
        return self._model.fit()

    def _write(self, fit: CostFit) -> None:
        assert self._file is not None, "a fit is written to a file"
        try:
            self._file.write(fit)
        except OSError as error:
            _LOGGER.warning("step times are not stored: %s", error)
            self._file = None
