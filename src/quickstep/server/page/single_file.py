"""The page as one file with a report inside, which a browser opens without a server or a network.

Called by `quickstep simulate --report`. A module of a file cannot import another file, so each
module is in the import map as data, under a name without a path, and imports the others by these.
"""

from __future__ import annotations

import gzip
import html
import posixpath
import re
from base64 import b64encode

import msgspec

from quickstep.server.page.endpoint import page_files

_IMPORT = re.compile(r'\b(from|import)\s*"(\.\.?/[^"]+)"')
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
)


def page_with_report(title: str, report: msgspec.Struct) -> str:
    """The page; `report` has the fields of `sim.report.Report`."""
    files = {name: item.read_text(encoding="utf-8") for name, item in page_files()}
    modules = {
        _specifier(name): "data:text/javascript;base64," + _base64(_with_names(name, text).encode())
        for name, text in files.items()
        if name.endswith(".js")
    }
    styles = "\n".join(text for name, text in sorted(files.items()) if name.endswith(".css"))
    data = _base64(gzip.compress(msgspec.json.encode(report), 9, mtime=0))
    import_map = msgspec.json.encode({"imports": modules}).decode()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title>'
        f"<style>{styles}</style></head>"
        f'<body><div id="page"></div><script type="application/json" id="report">{data}</script>'
        f'<script type="importmap">{import_map}</script>'
        f'<script type="module">import "{_specifier("app.js")}";</script></body></html>\n'
    )


def _with_names(name: str, text: str) -> str:
    """A module's text that imports others by their names instead of their paths."""
    folder = posixpath.dirname(name)

    def renamed(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        return f'{match[1]} "{_specifier(path)}"'

    return _IMPORT.sub(renamed, text)


def _specifier(name: str) -> str:
    return f"quickstep/{name}"


def _base64(content: bytes) -> str:
    return b64encode(content).decode("ascii")
