"""The name of what computes: weights, config, dtype and kernel set in one digest.

Equal fingerprints promise equal bits for equal requests. Checkpoints up to 64 MiB are hashed
completely. Larger ones are hashed by config, headers (names, shapes, offsets) and sixteen 4 KiB
windows of every tensor, ends included: another training, merge or quantization changes every
tensor, so it is detected; an edit of a few bytes elsewhere in a large tensor is not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.interface import KVLayout, Model

_COMPLETE_BYTES = 64 * 2**20
_CHUNK_BYTES = 2**20
_WINDOW_BYTES = 4096
_WINDOWS = 16


class Fingerprinting:
    """The `weights_fingerprint` of a checkpoint, computed in a thread while its weights are read,
    unless it is `known`.

    `begin` it when reading starts: it takes 40 ms for some hundred tensors.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        files: TensorFiles,
        settings: tuple[str, ...],
        known: str | None = None,
    ) -> None:
        self._arguments = (config, files, settings)
        self._known = known
        self._begun: Future[str] | None = None

    def begin(self) -> None:
        """Start the thread. Idempotent."""
        if self._begun is None and self._known is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="fingerprint")
            self._begun = thread.submit(weights_fingerprint, *self._arguments)
            thread.shutdown(wait=False)

    def result(self) -> str:
        """Wait for it. Raises ConfigError for a file that cannot be read."""
        if self._known is not None:
            return self._known
        self.begin()
        assert self._begun is not None
        return self._begun.result()


def weights_fingerprint(
    config: Mapping[str, object], files: TensorFiles, settings: tuple[str, ...]
) -> str:
    """32 hex digits over the config, the tensors and `settings` (dtype, kernel set, ...)."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(config, sort_keys=True).encode())
    digest.update("\0".join(settings).encode())
    for header in files.headers:
        digest.update(header)
    is_small = files.num_bytes <= _COMPLETE_BYTES
    for name in sorted(files.tensors):
        nbytes = files.tensors[name].nbytes
        for piece in files.pieces(name, _all(nbytes) if is_small else _windows(nbytes)):
            digest.update(piece)
    return digest.hexdigest()


def fingerprint_with_kv(model: Model, kv_layout: KVLayout) -> str:
    """The model's fingerprint; where keys and values have another dtype, one over that as well."""
    if kv_layout.dtype == model.kv_layout.dtype:
        return model.fingerprint
    text = f"{model.fingerprint}\0{kv_layout.dtype}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _all(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, _CHUNK_BYTES):
        yield start, min(_CHUNK_BYTES, nbytes - start)


def _windows(nbytes: int) -> Iterator[tuple[int, int]]:
    if nbytes <= _WINDOWS * _WINDOW_BYTES:
        yield from _all(nbytes)
        return
    last = nbytes - _WINDOW_BYTES
    for index in range(_WINDOWS):
        yield last * index // (_WINDOWS - 1), _WINDOW_BYTES
