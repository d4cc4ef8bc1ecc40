"""Kernels that start while the one before them still runs: programmatic dependent launch.

A kernel that takes part calls `start_next` and then, before it reads what an earlier kernel wrote
and before it writes anything, `wait_for_inputs`: from there on all earlier kernels have ended. That
holds because every program of each of them waits, so none may end before it has. What comes before,
addresses and prefetches of weights, overlaps with the end of the kernel before. Launched with
`overlap_options`, and OVERLAP with `overlaps`. NVIDIA GPUs from Hopper on.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from quickstep.ops.triton.rounding import INTERPRETED

__all__ = ["overlap_options", "overlaps", "prefetch", "start_next", "wait_for_inputs"]


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """The next kernel may start once all programs of this one have come here."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Until all earlier kernels have ended, and what they wrote is there."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, num_bytes):
    """Bring `num_bytes`, a multiple of 16, from each of the aligned pointers to the L2 cache."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [pointers, num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def overlaps(device: torch.device) -> bool:
    """Whether kernels on the device can start before the last one has ended."""
    return device.type == "cuda" and _overlaps(device.index or 0)


@functools.cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Options of a launch on the device."""
    return {"launch_pdl": True} if overlaps(device) else {}
