"""Ranks on a CPU that measure the memory of their steps and of their devices, as ranks on GPUs do.

`install` changes one process; a `sitecustomize` module with `SITECUSTOMIZE` does it in processes
that are started with its folder in the path.
"""

from __future__ import annotations

import sys

from quickstep.engine import assembly, memory_plan
from quickstep.model.sizing import MEASURED_RESERVE_BYTES
from quickstep.runtime import activation_probe

FREE_BYTES = 2 * MEASURED_RESERVE_BYTES  # of rank 0
FEW_BYTES = MEASURED_RESERVE_BYTES + (1 << 20) + (1 << 17)  # of the others
SITECUSTOMIZE = "import as_on_gpus\nas_on_gpus.install()\n"
_STEP_BYTES = 1 << 20


def install() -> None:
    """Measure in this process. It has fewer bytes if it is another rank."""

    def measured(model, kv_layout, block_size, *sizes):
        activation_probe.run_largest_step(model, kv_layout, block_size, *sizes)
        return _STEP_BYTES

    is_other = "ranks.worker" in " ".join(sys.orig_argv)
    activation_probe.measured_activation_bytes = measured
    assembly.measured_plan = memory_plan._fitted_plan
    memory_plan._free_bytes = lambda _: FEW_BYTES if is_other else FREE_BYTES
