"""A deferred module runs its code on the first attribute; its submodules import without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(tmp_path: Path, code: str) -> str:
    """What `code` prints, with a package `house` whose front door prints when it opens."""
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").write_text("print('door')\nfrom house.room import size\n")
    (house / "room.py").write_text("from . import cellar\nsize = 3\n")
    (house / "cellar.py").write_text("")
    code = f"from quickstep.deferred import complete, defer\ndefer(['house'])\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_package_is_imported_without_the_top_one(tmp_path: Path) -> None:
    assert run(tmp_path, "from house.room import size\nprint(size)") == "3\n"


def test_the_top_package_loads_a_name_that_only_it_has(tmp_path: Path) -> None:
    assert run(tmp_path, "import house\nprint('first')\nprint(house.size)") == "first\ndoor\n3\n"


def test_completing_runs_the_code_once(tmp_path: Path) -> None:
    assert run(tmp_path, "import house\ncomplete(['house'])\ncomplete(['house'])") == "door\n"
