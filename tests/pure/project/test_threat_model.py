"""Each line of the threat model in `docs/guide/security.md` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def lines() -> list[str]:
    text = (ROOT / "docs/guide/security.md").read_text(encoding="utf-8")
    section = text.partition("## Threat model\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_each_line_of_the_threat_model_has_a_test() -> None:
    found = lines()
    assert len(found) > 20
    for line in found:
        named = NAMED.findall(line)
        assert named, line
        for place, name in named:
            file = ROOT / (place if place.startswith("tests/") else f"tests/serve/{place}")
            assert f"def {name}(" in file.read_text(encoding="utf-8"), f"{place}::{name}"
