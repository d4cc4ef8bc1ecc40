"""How threads and processes that compute for long share the processors with those that answer.

Where two threads have time slices of one length, Linux lets the one that runs finish its slice, 3
to 4 ms, before the one that wakes up, also if its priority is lower. It takes the processor at once
from a thread whose slices are longer (Linux 6.12 and later; sched_setattr(2), EEVDF's slices).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

_SLICE_NS = 20_000_000
_NICE = 10
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period; and the number
# of the system call, which the C library has no function for
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_KEEP_POLICY = 8


def lower_priority() -> None:
    """Of this process, before it has other threads: steps of running requests come first."""
    os.nice(_NICE)
    use_long_slices()


def use_long_slices() -> None:
    """In the calling thread. What the kernel does not know changes nothing."""
    number = _SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)  # on Linux the thread's
        attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, 0, _KEEP_POLICY, nice, 0, _SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)
