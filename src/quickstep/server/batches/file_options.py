"""What the operator may set about files and batches."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["BatchOptions", "FileOptions"]


class FileOptions(msgspec.Struct, frozen=True):
    """Where clients' files stand, and how much of them.

    Attributes:
        directory: None keeps them in a private temporary one until the server stops.
        file_bytes: Largest upload.
        total_bytes: All files together.
        num_files: How many.
        bytes_per_key: The files of one API key together. Without keys only the totals count.
        files_per_key: How many.
    """

    directory: Path | None = None
    file_bytes: int = 100 * 1024 * 1024
    total_bytes: int = 1024 * 1024 * 1024
    num_files: int = 1000
    bytes_per_key: int = 512 * 1024 * 1024
    files_per_key: int = 500


class BatchOptions(msgspec.Struct, frozen=True):
    """How batches run.

    Attributes:
        concurrency: Lines of all batches that the engine has at a time.
        num_lines: Requests of one batch, as many as OpenAI takes.
        num_active: Batches that are not over, of all clients.
        active_per_key: The same of one API key.
        num_kept: Batches that are remembered; of the key that has most, the one that ended first
            is forgotten.
        added_priority: What the lines' priority, between -10 and 10, is raised by; lower goes
            first, so live requests do.
        num_tries: How often a line is sent to an engine that takes none (it restarts, say).
        retry_s: The pause between two tries.
    """

    concurrency: int = 32
    num_lines: int = 50_000
    num_active: int = 64
    active_per_key: int = 32
    num_kept: int = 1000
    added_priority: int = 1000
    num_tries: int = 240
    retry_s: float = 0.5
