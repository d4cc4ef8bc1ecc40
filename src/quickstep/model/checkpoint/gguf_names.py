"""Which GGUF files make one model: parts of a file, tags of a repository, files for other uses.

Parts are named `NAME-00001-of-00003.gguf`. A tag is the end of a name: `Q4_K_M`, `UD-Q4_K_XL`.
Nothing is opened here, so the same rules hold for a folder, the hub's cache and a repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from quickstep.errors import ConfigError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# Image encoders, statistics of quantizing, and drafts for a model: as llama.cpp names them.
_NO_MODEL = re.compile(r"mmproj|imatrix|(^|[-._])(mtp|eagle3|dflash|dspark)-", re.IGNORECASE)
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_NAMED_TAG = re.compile(
    r"(?:UD-)?(?:I?Q\d\w*|TQ\d_\d\w*|MXFP\d\w*|NVFP\d\w*|BF16|F16|F32)$", re.IGNORECASE
)


class GgufModels(msgspec.Struct, frozen=True):
    """The GGUF files of a folder or a repository.

    Attributes:
        files: The first, or only, file of each model.
        left_out: Files for other uses: image encoders, drafts, statistics.
    """

    files: tuple[str, ...]
    left_out: tuple[str, ...]


def is_gguf(path: str | Path) -> bool:
    """Whether a checkpoint's path is such a file, by its name."""
    return Path(path).suffix.lower() == ".gguf"


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The paths of all parts of the file that `path` is a part of, in order; else the path."""
    return tuple(path.with_name(name) for name in _all_parts(path.name))


def gguf_stem(path: Path) -> str:
    """A file's name without its ending and the number of its part."""
    part = _PART.fullmatch(path.name)
    return path.stem if part is None else part["stem"]


def gguf_models(names: Iterable[str]) -> GgufModels:
    """Sort the files of a folder or a repository, which are named with slashes."""
    files = sorted(name for name in names if is_gguf(name))
    left_out = tuple(name for name in files if _NO_MODEL.search(_base(name)))
    firsts = dict.fromkeys(_all_parts(name)[0] for name in files if name not in left_out)
    return GgufModels(tuple(firsts), left_out)


def choose_gguf(models: GgufModels, repository: str, tag: str = "") -> tuple[str, ...]:
    """The files of a tag's model, all parts in order; without a tag of Q4_K_M, then Q8_0 (as
    llama.cpp), or of the only model that there is.

    Raises:
        ConfigError: There is no such model, or several and no default; names the tags.
    """
    if not models.files:
        if tag:
            raise ConfigError(f"{repository} has no GGUF file of a model, so none of the tag {tag}")
        raise ConfigError(f"{repository} has neither a config.json nor a GGUF file of a model")
    found = (_with_tag(models.files, wanted) for wanted in ([tag] if tag else _DEFAULT_TAGS))
    chosen = next((name for name in found if name is not None), None)
    if chosen is None and (tag or len(models.files) > 1):
        what = f"no GGUF file of the tag {tag}" if tag else f"{len(models.files)} models"
        raise ConfigError(
            f"{repository} has {what}; name one of them as {repository}:TAG, of the tags "
            f"{', '.join(_tags(models.files))}"
        )
    return _all_parts(chosen or models.files[0])


def _with_tag(files: Iterable[str], tag: str) -> str | None:
    """The file whose name ends in the tag; one without `UD-` before the tag if there are both."""
    separator = "[-._]" if _NAMED_TAG.fullmatch(tag) else "[-.]"
    ends = re.compile(rf"(?:^|{separator}){re.escape(tag.removesuffix('.gguf'))}$", re.IGNORECASE)
    found = [name for name in files if ends.search(gguf_stem(Path(_base(name))))]
    return min(found, key=lambda name: f"ud-{tag}".lower() in _base(name).lower(), default=None)


def _tags(files: Iterable[str]) -> list[str]:
    stems = [gguf_stem(Path(_base(name))) for name in files]
    found = {stem: _NAMED_TAG.search(stem) for stem in stems}
    return sorted({stem if tag is None else tag[0] for stem, tag in found.items()})


def _all_parts(name: str) -> tuple[str, ...]:
    """The names of all parts of the file that `name` is a part of; else the name."""
    part = _PART.fullmatch(name)
    if part is None or not 0 < int(part["number"]) <= int(part["count"]):
        return (name,)
    ending, numbers = name[-len(".gguf") :], range(1, int(part["count"]) + 1)
    return tuple(f"{part['stem']}-{i:05d}-of-{part['count']}{ending}" for i in numbers)


def _base(name: str) -> str:
    return name.rpartition("/")[2]
