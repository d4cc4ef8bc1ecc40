"""One log line every ten seconds while there is traffic: rates, queue, cache.

`TrafficLog.line` compares two moments of the engine; `watch` is the app's task that logs it.
"""

from __future__ import annotations

import asyncio
import logging

from quickstep.core.accounting import Totals
from quickstep.engine.stats import EngineStats
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.metrics import Metrics

__all__ = ["TrafficLog", "watch"]

_LOG = logging.getLogger("quickstep.server")
_EVERY_S = 10.0


class TrafficLog:
    """Remembers the last moment that was told."""

    def __init__(self, stats: EngineStats) -> None:
        self._totals: Totals = stats.scheduler.totals
        self._now_s = stats.now_s
        self._num_embedded = 0

    def line(self, stats: EngineStats, num_embedded: int = 0) -> str | None:
        """What happened since the last call; None if nothing did.

        `num_embedded` counts the prompts so far that became vectors; they are told if there are.
        """
        load, before = stats.scheduler, self._totals
        totals, seconds = load.totals, stats.now_s - self._now_s
        self._totals, self._now_s = totals, stats.now_s
        embedded = num_embedded - self._num_embedded
        self._num_embedded = num_embedded
        if totals.num_steps == before.num_steps and not stats.has_work:
            return None
        blocks = load.blocks
        num_blocks = blocks.num_used + blocks.num_cached + blocks.num_free
        looked_up = totals.prefix_query_tokens - before.prefix_query_tokens
        found = totals.prefix_hit_tokens - before.prefix_hit_tokens
        line = (
            f"prompt {_rate(totals.num_prompt_tokens - before.num_prompt_tokens, seconds)}, "
            f"generation {_rate(totals.num_output_tokens - before.num_output_tokens, seconds)}, "
            f"running {load.num_running}, waiting {load.num_waiting + load.num_preempted}, "
            f"KV blocks in use {blocks.num_used / num_blocks:.1%}, "
            f"prefix cache hits {found / looked_up if looked_up else 0:.1%}"
        )
        return f"{line}, embedded {embedded}" if embedded else line


async def watch(engine: ServedEngine, metrics: Metrics) -> None:
    """Log until cancelled."""
    log = TrafficLog(engine.stats())
    while True:
        await asyncio.sleep(_EVERY_S)
        line = log.line(engine.stats(), metrics.num_embedded)
        if line is not None:
            _LOG.info("%s", line)


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds if seconds > 0 else 0:.1f} tokens/s"
