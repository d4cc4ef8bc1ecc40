"""Warnings about kernels that Triton compiles while the engine serves: every stream waits for them.

All variants of a model's kernels are compiled before it is ready: no argument that changes from
step to step is specialized. `engine.assembly` says when an engine opens and when it is ready. The
hooks are Triton's, one of each for a process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import triton

_LOGGER = logging.getLogger(__name__)


class _Compiles:
    """Both hooks: when a thread begins to compile, and when it has."""

    def __init__(self) -> None:
        self._began_s: dict[int, float] = {}  # by thread

    def begin(self, **_: object) -> bool:
        """False: compile it."""
        self._began_s[threading.get_ident()] = time.monotonic()
        return False

    def end(self, *, fn: Any, compile: Mapping[str, Any], **_: object) -> None:
        """`fn` is the kernel, `compile` has what it is compiled for."""
        now_s = time.monotonic()
        began_s = self._began_s.pop(threading.get_ident(), now_s)
        _LOGGER.warning(
            "compiled a kernel while serving, %.1f s: %s(%s)",
            now_s - began_s,
            fn.name,
            ", ".join(_arguments(compile)),
        )


def _arguments(compiled: Mapping[str, Any]) -> Iterator[str]:
    """Of a variant: the values that are part of it, or the types, with `/16` where one is known to
    be a multiple of 16.
    """
    [multiples] = compiled["configs"]
    for index, (name, kind) in enumerate(compiled["signature"].items()):
        if (index,) in compiled["constants"]:
            yield f"{name}={compiled['constants'][index,]}"
        else:
            yield f"{name}: {kind}{'/16' if multiples.get((index,)) else ''}"
    yield f"num_warps={compiled['num_warps']}, num_stages={compiled['num_stages']}"


def expect_compiles() -> None:
    """Compiles are not reported: an engine opens."""
    triton.knobs.runtime.jit_cache_hook = None
    triton.knobs.runtime.jit_post_compile_hook = None


def warn_of_compiles() -> None:
    """Report every compile, or read from Triton's cache, from now on."""
    compiles = _Compiles()
    triton.knobs.runtime.jit_cache_hook = compiles.begin
    triton.knobs.runtime.jit_post_compile_hook = compiles.end
