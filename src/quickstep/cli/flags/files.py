"""The flags of `quickstep serve` about what is kept for clients: files, batches, responses."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.parsing import bytes_size, positive_int

if TYPE_CHECKING:
    from quickstep.server.options import BatchOptions, FileOptions

__all__ = ["add_file_flags", "batch_options", "file_options"]


def add_file_flags(parser: argparse.ArgumentParser) -> None:
    """Where files stand, how large they are, how many lines run at a time."""
    group = parser.add_argument_group("files and batches")
    group.add_argument(
        "--files-dir",
        metavar="DIR",
        help="keeps uploads and the outputs of batches (default: a temporary one, until the end)",
    )
    group.add_argument(
        "--max-file-bytes",
        type=bytes_size,
        default=100 * 1024 * 1024,
        metavar="SIZE",
        help="largest upload (default: 100MiB)",
    )
    group.add_argument(
        "--max-files-bytes",
        type=bytes_size,
        default=1024 * 1024 * 1024,
        metavar="SIZE",
        help="all files together (default: 1GiB)",
    )
    group.add_argument(
        "--max-files-bytes-per-key",
        type=bytes_size,
        default=512 * 1024 * 1024,
        metavar="SIZE",
        help="the files of one API key together (default: 512MiB)",
    )
    group.add_argument(
        "--max-files-per-key",
        type=positive_int,
        default=500,
        metavar="N",
        help="files of one API key (default: %(default)s)",
    )
    group.add_argument(
        "--max-stored-responses",
        type=positive_int,
        default=4096,
        metavar="N",
        help="answers kept for previous_response_id, the last used ones (default: %(default)s)",
    )
    group.add_argument(
        "--max-stored-response-bytes",
        type=bytes_size,
        default=64 * 1024 * 1024,
        metavar="SIZE",
        help="all of them together (default: 64MiB)",
    )
    group.add_argument(
        "--batch-concurrency",
        type=positive_int,
        default=32,
        metavar="N",
        help="lines of all batches that run at a time, behind live requests (default: %(default)s)",
    )


def file_options(args: argparse.Namespace) -> FileOptions:
    """The flags about files."""
    from quickstep.server.options import FileOptions

    return FileOptions(
        directory=Path(args.files_dir) if args.files_dir else None,
        file_bytes=args.max_file_bytes,
        total_bytes=args.max_files_bytes,
        bytes_per_key=args.max_files_bytes_per_key,
        files_per_key=args.max_files_per_key,
    )


def batch_options(args: argparse.Namespace) -> BatchOptions:
    """The flags about batches."""
    from quickstep.server.options import BatchOptions

    return BatchOptions(concurrency=args.batch_concurrency)
