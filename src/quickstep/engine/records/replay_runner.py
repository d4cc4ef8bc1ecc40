"""The model of a full recording, for `quickstep replay`: it runs plans without an engine."""

from __future__ import annotations

from msgspec.structs import replace

from quickstep.config import EngineConfig
from quickstep.core.recordings.recording import EngineLine
from quickstep.core.recordings.replay import SchedulerRecording
from quickstep.errors import ConfigError
from quickstep.types import Executor, StepPlan, StepResult


class ReplayRunner:
    """Runs plans one after the other. Owned by its caller, who closes it. `grammars` stay compiled
    as long as it exists.
    """

    def __init__(self, executor: Executor, grammars: list[object]) -> None:
        self._executor = executor
        self._grammars = grammars

    def run(self, plan: StepPlan) -> StepResult:
        """The result of a step."""
        return self._executor.submit(plan).result()

    def close(self) -> None:
        """Free the model."""
        self._executor.close()


def open_runner(recording: SchedulerRecording) -> ReplayRunner:
    """Load the model that was recorded.

    Raises:
        ConfigError: The recording has no tokens, or the weights or the kernels are others.
    """
    from quickstep.engine.assembly import describe, load_weights, open_executor
    from quickstep.runtime.cache.kv_cache import allocate_kv
    from quickstep.text.grammar.grammars import check_grammar

    config = _config_of(recording.engine)
    loaded = load_weights(config, None)
    description = describe(loaded, 0.0, config.inputs, with_template=False)
    if description.fingerprint != recording.engine.fingerprint:
        raise ConfigError(
            f"the recording is of {recording.engine.fingerprint}, and {config.load.model} is now "
            f"{description.fingerprint}: other weights or kernels give other tokens; --plans-only "
            "compares the plans"
        )
    plan, block_size = loaded.plan, config.cache.block_size
    device = loaded.model.device
    kv = allocate_kv(loaded.kv_layout, plan.num_blocks, block_size, device, plan.states)
    executor = open_executor(config, loaded.model, kv, loaded.plan, description, loaded.adapters)
    wanted = (request.request.sampling.grammar for request in recording.requests.values())
    grammars: list[object] = [check_grammar(grammar, description.grammars) for grammar in wanted]
    return ReplayRunner(executor, grammars)


def _config_of(engine: EngineLine) -> EngineConfig:
    if engine.engine is None:
        raise ConfigError("the recording has no tokens; record with --record-full")
    cache = replace(engine.engine.cache, num_blocks=engine.num_blocks)
    return replace(engine.engine, cache=cache, recording=None, streams=None)
