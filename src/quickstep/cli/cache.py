"""`quickstep cache`: the packed weights that earlier starts have left in the cache directory."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime

from quickstep.cache_dir import cache_dir
from quickstep.cli.flags.parsing import Parser, bytes_size, command
from quickstep.cli.screen import console_on, print_table
from quickstep.engine.packed_weights.directory import PackedDirectory, PackedFileInfo
from quickstep.errors import ConfigError, size_text

_LS, _PRUNE = "ls", "prune"


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "cache",
        "List or remove the packed weights that starts on a CPU have left for later ones.",
        run,
        examples="quickstep cache ls\nquickstep cache prune --to 8G\nquickstep cache prune --to 0",
    )
    parser.add_argument(
        "action",
        choices=[_LS, _PRUNE],
        help="ls: list the files; prune: remove the least recently used ones",
    )
    parser.add_argument(
        "--to",
        type=bytes_size,
        metavar="SIZE",
        help="of prune: how many bytes may stay, such as 8G; 0 removes all",
    )
    parser.add_argument(
        "--format",
        choices=["table", "json"],
        default="table",
        help="how to print it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """List the files, or those that were removed. Raises ConfigError."""
    if (args.to is None) != (args.action == _LS):
        raise ConfigError("prune needs --to SIZE, how many bytes may stay; ls does not take it")
    root = cache_dir()
    if root is None:
        raise ConfigError("QUICKSTEP_CACHE_DIR is empty, so nothing is stored")
    directory = PackedDirectory.open(root, sys.maxsize)
    files = directory.files() if args.action == _LS else directory.prune(args.to)
    if args.format == "json":
        print(json.dumps([_fields(info) for info in files], indent=2))
        return 0
    total = size_text(sum(info.num_bytes for info in files))
    what = "removed" if args.action == _PRUNE else "least recently used first"
    title = f"{directory.path}: {len(files)} files, {total}, {what}"
    rows = [
        (info.model or "(not readable)", size_text(info.num_bytes), _when(info), info.path.name)
        for info in files
    ]
    print_table(console_on(sys.stdout), title, ["model", "size", "used (UTC)", "file"], rows)
    return 0


def _fields(info: PackedFileInfo) -> dict[str, object]:
    return {
        "path": str(info.path),
        "model": info.model,
        "bytes": info.num_bytes,
        "used_at": _when(info),
    }


def _when(info: PackedFileInfo) -> str:
    return datetime.fromtimestamp(info.used_s, UTC).strftime("%Y-%m-%d %H:%M")
