"""A level of instructions compiles the kernels whose code it changes, and takes the others from the
level that it adds instructions to.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "csrc" / "kernels"
ADDED = {  # what the compiler defines for the flags that a level has and its base has not
    "avx_vnni": {"__AVXVNNI__"},
    "avx512_vnni": {"__AVX512VNNI__"},
    "avx512_bf16": {"__AVX512BF16__"},
    "avx512_amx": {"__AMX_INT8__", "__AMX_BF16__", "__AMX_TILE__"},
    "neon_dotprod": {"__ARM_FEATURE_DOTPROD"},
    "neon_bf16": {"__ARM_FEATURE_BF16_VECTOR_ARITHMETIC"},
}
OF_BASES = {"__AVX2__", "__AVX512F__", "__aarch64__"}


def levels() -> dict[str, set[str]]:
    """What CMakeLists.txt has levels compile that have a base."""
    text = (ROOT / "CMakeLists.txt").read_text()
    (shared,) = re.findall(r"set\(integer_products (.+)\)", text)
    found = re.findall(
        r"(?m)^ +add_level(?:_if_known)?\((\w+)[^)]*?BASE \w+\s+SOURCES([^)]*?)FLAGS", text
    )
    return {
        name: set(sources.replace("${integer_products}", shared).split()) for name, sources in found
    }


def conditions(source: Path, seen: set[Path]) -> set[str]:
    """The compiler's macros that a source and all that it includes decide by."""
    if source in seen or not source.exists():
        return set()
    seen.add(source)
    text = source.read_text()
    found = set(
        re.findall(r"__A[A-Z]\w+|__aarch64__", " ".join(re.findall(r"#\s*(?:el)?if.*", text)))
    )
    for name in re.findall(r'#include "(.+)"', text):
        found |= conditions(ROOT / "csrc" / name, seen)
    return found


SOURCES = {
    path.stem: conditions(path, set())
    for path in KERNELS.glob("*.cpp")
    if path.stem != "table" and not path.stem.startswith("amx_")
}


@pytest.mark.parametrize("level", ADDED)
def test_a_level_compiles_what_it_changes(level: str) -> None:
    assert levels()[level] == {name for name, found in SOURCES.items() if found & ADDED[level]}


def test_all_conditions_are_of_a_level() -> None:
    known = OF_BASES.union(*ADDED.values())
    assert {name for found in SOURCES.values() for name in found} <= known
    assert set(levels()) == set(ADDED)


def test_every_source_enters_its_functions_into_the_table() -> None:
    (table,) = re.findall(r"struct Kernels \{(.+?)\n\};", (KERNELS / "kernels.h").read_text(), re.S)
    fields = set(re.findall(r"\(\*(\w+)\)", table))
    entered = [
        name
        for source in SOURCES
        for name in re.findall(r"level\.(\w+) =", (KERNELS / f"{source}.cpp").read_text())
    ]
    assert sorted(entered) == sorted(fields)
