"""Fetch the libraries of the page at `/` from npm: each pinned by version and checksum.

`python tools/vendor_page.py` rewrites `src/quickstep/server/page/static/vendor`; `--check` only
compares the committed files with `checksums.txt` there, without a network. The files are those of
the packages, except that imports of another package name its file here, references to source maps
are left out, and a script that sets a variable becomes a module that exports it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).parent.parent / "src/quickstep/server/page/static/vendor"
_CHECKSUMS = "checksums.txt"
_LANGUAGES = ("bash", "c", "cpp", "css", "go", "java", "javascript", "json", "python", "rust")
_LANGUAGES += ("sql", "typescript", "xml", "yaml")
_SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*$")
_IMPORTS = {b'from"preact"': b'from"./preact.js"'}
_SCRIPT = re.compile(rb"^var (\w+)=")


class Package(NamedTuple):
    """A package of npm; `files` are its paths with the names here."""

    name: str
    version: str
    sha256: str
    files: dict[str, str]


PACKAGES = (
    Package(
        "preact",
        "10.29.8",
        "b18cb0a457f3d43c7bb30391a74ade7d13e03bc6e77915e061c70c0fe1123299",
        {
            "dist/preact.module.js": "preact.js",
            "hooks/dist/hooks.module.js": "preact-hooks.js",
            "LICENSE": "preact.LICENSE",
        },
    ),
    Package(
        "htm",
        "3.1.1",
        "2425b9bee11409177bcabc7f32e319926fc6690c1701c0b257c88bdff2d5ba90",
        {"dist/htm.module.js": "htm.js", "LICENSE": "htm.LICENSE"},
    ),
    Package(
        "marked",
        "18.2.1",
        "d66c5213fc203466186060105b01f51896764ba64b3797d2620d02e28e34b8ca",
        {"lib/marked.esm.js": "marked.js", "LICENSE": "marked.LICENSE"},
    ),
    Package(
        "dompurify",
        "3.5.0",
        "faa5f2bfe2814384b83d6edb4ed66812fbfdb2a654b4d59edd4b12304058ec20",
        {"dist/purify.es.mjs": "purify.js", "LICENSE": "purify.LICENSE"},
    ),
    Package(
        "temml",
        "0.13.5",
        "bca5b76dd26d1d6c81f8d817f6cc8bf0f0a1a7787512e281d5c22b986f8ae582",
        {"dist/temml.min.js": "temml.js", "LICENSE": "temml.LICENSE"},
    ),
    Package(
        "uplot",
        "1.6.32",
        "4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d",
        {
            "dist/uPlot.esm.js": "uplot.js",
            "dist/uPlot.min.css": "uplot.css",
            "LICENSE": "uplot.LICENSE",
        },
    ),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "b8a006d30f45afe783072569f3d69c5b60c0e7b9ca28cd474e12f2584e2a3bd9",
        {
            "es/core.min.js": "highlight.js",
            "LICENSE": "highlight.LICENSE",
            **{f"es/languages/{name}.min.js": f"highlight-{name}.js" for name in _LANGUAGES},
        },
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the committed files only")
    if not parser.parse_args().check:
        for path in _FOLDER.iterdir():
            path.unlink()
        for package in PACKAGES:
            _vendor(package)
        lines = "".join(f"{_sha256(path)}  {path.name}\n" for path in _committed())
        (_FOLDER / _CHECKSUMS).write_text(lines)
    changed = changed_files()
    if changed:
        sys.exit(f"not as fetched: {', '.join(changed)}; run tools/vendor_page.py")


def changed_files() -> list[str]:
    """The names of committed files that differ from the checksums."""
    lines = (_FOLDER / _CHECKSUMS).read_text().splitlines()
    expected = dict(reversed(line.split("  ", 1)) for line in lines)
    actual = {path.name: _sha256(path) for path in _committed()}
    names = sorted(expected.keys() | actual.keys())
    return [name for name in names if expected.get(name) != actual.get(name)]


def _vendor(package: Package) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        archive = next(Path(folder).glob("*.tgz"))
        if _sha256(archive) != package.sha256:
            sys.exit(f"{package.name} {package.version} has the sha256 {_sha256(archive)}")
        with tarfile.open(archive) as tar:
            for path, name in package.files.items():
                member = tar.extractfile(f"package/{path}")
                if member is None:
                    sys.exit(f"{package.name} has no file {path}")
                data = _SOURCE_MAP.sub(b"\n", member.read())
                for old, new in _IMPORTS.items():
                    data = data.replace(old, new)
                script = _SCRIPT.match(data)
                if script and b"export " not in data:
                    data += b"\nexport default " + script[1] + b";\n"
                (_FOLDER / name).write_bytes(data)


def _committed() -> list[Path]:
    return sorted(path for path in _FOLDER.iterdir() if path.name != _CHECKSUMS)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
