"""The guide lists the clients that `make clients` tests, at the versions that it installs."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"^(?P<name>[\w-]+)(?:\[[\w,]+\])?==(?P<version>[\w.]+)$", re.MULTILINE)
ROW = re.compile(r"^\| (?P<name>[a-z-]+) \| (?P<versions>[\d., ]+) \|", re.MULTILINE)


def test_the_guide_lists_the_clients_at_their_installed_versions() -> None:
    installed = {
        (pin["name"], pin["version"])
        for file in (ROOT / "tests/clients").glob("*/requirements.txt")
        for pin in PIN.finditer(file.read_text())
        if not pin["name"].startswith("pytest")
    }
    agents = json.loads((ROOT / "tests/clients/agents/package.json").read_text())
    for name, version in agents["dependencies"].items():
        installed.add((name.rpartition("/")[2], version))
    guide = (ROOT / "docs/guide/clients.md").read_text()
    section = guide.split("## Tested clients")[1].split("\n## ")[0]
    listed = {
        (row["name"], version)
        for row in ROW.finditer(section)
        for version in row["versions"].split(", ")
    }
    assert listed == installed
    assert len(installed) >= 10


def test_every_client_is_pinned() -> None:
    for file in (ROOT / "tests/clients").glob("*/requirements.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert all(PIN.fullmatch(line) for line in lines)
