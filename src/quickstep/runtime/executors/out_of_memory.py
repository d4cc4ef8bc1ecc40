"""A device's memory: it is freed after a step that had too little of it, and with an executor.

Called by the executors. Nothing here imports torch: without it, there is no such error.
"""

from __future__ import annotations

import gc
import logging
import sys
import traceback

from quickstep.errors import EngineError, StepOutOfMemory, text_for_clients

_LOGGER = logging.getLogger(__name__)


def free_device_memory() -> None:
    """Give back what no tensor uses: the allocator keeps it, and others see it as used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gc.collect()  # tensors in cycles
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device has too little memory for what was tried."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def step_failure(step_id: int, error: BaseException) -> EngineError:
    """What a step failed with. After it was out of memory, its tensors and the allocator's unused
    memory are freed, so that the next step may run.
    """
    if not is_out_of_memory(error):
        failure = EngineError(f"step {step_id} failed: {text_for_clients(error)}")
        failure.__cause__ = error
        return failure
    _LOGGER.error("step %d needs more memory than the device has", step_id, exc_info=error)
    traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
    free_device_memory()
    return StepOutOfMemory(
        f"step {step_id} needs more memory than the device has: {error}; lower "
        "--max-num-batched-tokens or --max-num-seqs"
    )
