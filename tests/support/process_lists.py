"""The living processes of this machine, from /proc."""

from __future__ import annotations

from pathlib import Path


def processes() -> dict[int, int]:
    """Living processes and their parents."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def workers(process_id: int, module: bytes = b"engine.remote.worker") -> list[int]:
    """The living engine processes of a process; with `engine.ranks.worker`, the other ranks of an
    engine.
    """
    children = [child for child, parent in processes().items() if parent == process_id]
    return [child for child in children if module in command_line(child)]


def command_line(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""
