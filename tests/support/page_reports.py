"""The report inside a page of `quickstep simulate --report`."""

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

_REPORT = re.compile(r'<script type="application/json" id="report">([^<]*)</script>')
_REFERENCE = re.compile(r'\b(?:src|href)="([^"]*)"|@import|url\(')


def embedded_report(page: Path) -> dict[str, Any]:
    """The data, after a check that the page refers to nothing outside of itself."""
    text = page.read_text(encoding="utf-8")
    assert {match[1] for match in _REFERENCE.finditer(text)} == {"data:,"}
    assert "default-src 'none'" in text
    found = _REPORT.search(text)
    assert found is not None
    report: dict[str, Any] = json.loads(gzip.decompress(b64decode(found[1])))
    return report
