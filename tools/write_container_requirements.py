"""Write `deploy/container-requirements.txt`: what the container installs, by version and hash.

`python tools/write_container_requirements.py` asks pip for the newest versions that
`pyproject.toml` allows, for the Python and the machines of the image, and needs an index of
packages. `tests/pure` checks that the file has every dependency.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "deploy/container-requirements.txt"
PYTHON = "3.12"  # as in the Dockerfile
MACHINES = ("x86_64", "aarch64")
GLIBC = (36, 35, 34, 31, 28, 17, 12, 5)  # versions of the platform tags: 2.36 is Debian 12's
_TEXT = """\
# What the container installs, for Python 3.12 on x86_64 and aarch64, each file by its hash:
# tools/write_container_requirements.py writes it.
"""


def resolved(machine: str, dependencies: list[str]) -> dict[str, tuple[str, str]]:
    """By the name of each package its version, and the hash of its wheel for a machine."""
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--quiet", "--dry-run", "--ignore-installed", f"--report={report}")
        tags = (f"--python-version={PYTHON}", "--implementation=cp", "--only-binary=:all:")
        abis = (f"--abi=cp{PYTHON.replace('.', '')}", "--abi=abi3", "--abi=none")
        command = [sys.executable, "-m", "pip", "install", *options, f"--target={folder}/none"]
        subprocess.run([*command, *tags, *abis, *platforms, *dependencies], check=True)
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        package["metadata"]["name"].lower().replace("_", "-"): (
            package["metadata"]["version"],
            package["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for package in installed
    }


def content(found: list[dict[str, tuple[str, str]]]) -> str:
    """The file, from what was found for each machine. Raises ValueError if versions differ."""
    lines = []
    for name in sorted(set().union(*found)):
        versions = {packages[name][0] for packages in found if name in packages}
        hashes = sorted({packages[name][1] for packages in found if name in packages})
        if len(versions) != 1:
            raise ValueError(f"the machines need {name} in {' and '.join(sorted(versions))}")
        pins = " \\\n    ".join(f"--hash=sha256:{digest}" for digest in hashes)
        lines.append(f"{name}=={versions.pop()} \\\n    {pins}")
    return _TEXT + "\n".join(lines) + "\n"


def main() -> None:
    """Write the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [resolved(machine, project["dependencies"]) for machine in MACHINES]
    OUTPUT.write_text(content(found), encoding="utf-8")


if __name__ == "__main__":
    main()
