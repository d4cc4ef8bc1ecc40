"""The training text: sources of the standard library of the running interpreter.

Owns which files are read, which modules are held out, and the order of documents. Called by
`dataset` (training text) and `quality` (held-out text). Nothing here is random, and nothing under
site-packages is ever read.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Not in the training data: the quality script measures bits per byte on them.
from quickstep.bench.text_accuracy import HELD_OUT_MODULES

# Generated tables, fixtures and packaging code: text that no user would continue.
_EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "__pycache__", "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo",
     "distutils", "ensurepip", "__phello__", "lib-dynload"}
)  # fmt: skip
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata")
_TEST_FOLDERS = frozenset({"test", "tests"})
_MAX_TEST_BYTES = 120_000  # larger test files are mostly tables of expected values


@dataclass(frozen=True, slots=True)
class Document:
    """One file (or one help topic) of the corpus."""

    name: str  # path below the library's folder, with forward slashes
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text, split by what it is used for."""

    library: tuple[Document, ...]
    tests: tuple[Document, ...]
    held_out: tuple[Document, ...]


def top_module(name: str) -> str:
    """The top-level module a document path or a dotted name belongs to."""
    return name.replace("/", ".").split(".")[0]


def is_held_out(name: str) -> bool:
    """Whether a document path or dotted name belongs to a held-out module or to its tests."""
    parts = [part.removesuffix("py").rstrip(".") for part in name.replace(".", "/").split("/")]
    if parts[0] in _TEST_FOLDERS:
        return any(_is_test_of_held_out(part) for part in parts[1:])
    return top_module(name) in HELD_OUT_MODULES


def load_corpus() -> Corpus:
    """Read the complete corpus, in path order."""
    library: list[Document] = []
    tests: list[Document] = []
    held_out: list[Document] = []
    for document in _source_documents(Path(sysconfig.get_path("stdlib"))):
        in_tests = not _TEST_FOLDERS.isdisjoint(document.name.split("/"))
        if is_held_out(document.name):
            if not in_tests:
                held_out.append(document)
        elif not in_tests:
            library.append(document)
        elif len(document.text) <= _MAX_TEST_BYTES:
            tests.append(document)
    library.extend(_help_topics())
    return Corpus(tuple(library), tuple(tests), tuple(held_out))


def _is_test_of_held_out(part: str) -> bool:
    stem = part.removeprefix("test_").removeprefix("test")
    return any(stem == module or stem.startswith(f"{module}_") for module in HELD_OUT_MODULES)


def _source_documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        parts = name.split("/")
        if not _EXCLUDED_FOLDERS.isdisjoint(parts) or parts[0].startswith(_EXCLUDED_PREFIXES):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # fixtures in other encodings
        if text.strip():
            yield Document(name, text.replace("\r\n", "\n"))


def _help_topics() -> Iterator[Document]:
    """The language reference texts that `help("TOPIC")` shows: the library's best prose."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield Document(f"pydoc_data/topics/{name}", topics[name])
