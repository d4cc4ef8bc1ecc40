"""Text that the bundled demo model was never trained on: modules of the standard library.

The text is the running interpreter's, so it ships with every Python and needs no download; two
Python versions have slightly different texts, and a report says which one read it. The model's
card and its training (`tools/demo_model`) take the list of modules from here.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

__all__ = ["HELD_OUT_MODULES", "held_out_text"]

# They cover parsing, numerics, networking, text and file formats, and no other module carries a
# copy of one.
HELD_OUT_MODULES = (
    "cmd", "colorsys", "configparser", "difflib", "fileinput", "graphlib", "mailbox",
    "netrc", "quopri", "sched", "shelve", "statistics", "tomllib", "wave", "xmlrpc", "zipapp",
)  # fmt: skip


def held_out_text(library: Path | None = None) -> str:
    """Sources of the held-out modules in path order; `library` is the standard library's folder."""
    root = library or Path(sysconfig.get_path("stdlib"))
    texts = []
    for module in HELD_OUT_MODULES:
        file = root / f"{module}.py"
        paths = [file] if file.is_file() else sorted((root / module).rglob("*.py"))
        texts += [path.read_text(encoding="utf-8") for path in paths]
    return "".join(texts)
