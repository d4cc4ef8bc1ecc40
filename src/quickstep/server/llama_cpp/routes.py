"""llama.cpp's own routes: `/completion`, and what the server says of itself in its words.

`/load` is vLLM's and stands here with its like.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep import __version__
from quickstep.errors import EngineError
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.http.errors import json_response
from quickstep.server.http.route import ApiRoute
from quickstep.server.llama_cpp.completion import LlamaCpp, generation_settings
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest
from quickstep.server.llama_cpp.response_types import (
    DefaultSettings,
    LlamaCompletion,
    LlamaProps,
    Modalities,
    ServerLoad,
    Slot,
)
from quickstep.server.metrics import Metrics
from quickstep.server.openai.request_types import decode_values
from quickstep.types import SamplingParams

__all__ = ["SlotQuery", "llama_cpp_routes"]


class SlotQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `/slots`: 1 asks for 503 when all are taken."""

    fail_on_no_slot: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0


def llama_cpp_routes(served: Served, metrics: Metrics) -> list[ApiRoute]:
    """All of them."""
    completion = GeneratingRoute(LlamaCpp(), served, metrics)
    state = _ServerState(served)
    return [
        ApiRoute(
            "POST",
            "/completion",
            completion.answer,
            "Text that continues a prompt, as llama.cpp has it.",
            request=LlamaCompletionRequest,
            # `response_fields` may leave out any field
            response=LlamaCompletion
            | list[LlamaCompletion]
            | list[dict[str, Any]]
            | dict[str, Any],
            streams=True,
        ),
        ApiRoute("GET", "/props", state.props, "What is served.", response=LlamaProps),
        ApiRoute(
            "GET",
            "/slots",
            state.slots,
            "The places in the batch.",
            response=list[Slot],
            query=SlotQuery,
        ),
        ApiRoute("GET", "/load", state.load, "How busy the server is.", response=ServerLoad),
    ]


class _ServerState:
    """The endpoints that only tell."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def props(self, _: Request) -> Response:
        """Defaults, slots, template."""
        engine = self._served.engine
        own: dict[str, Any] = {"max_tokens": None, **engine.default_sampling}
        defaults = SamplingParams(**own)
        settings = DefaultSettings(
            id=0,
            id_task=-1,
            n_ctx=engine.max_model_len,
            speculative=False,
            is_processing=engine.stats().has_work,
            params=generation_settings(defaults),
        )
        template = engine.chat_template
        props = LlamaProps(
            default_generation_settings=settings,
            total_slots=self._num_slots,
            model_alias=self._served.names[0],
            model_path=engine.model_name,
            modalities=Modalities(),
            chat_template="" if template is None else template.source,
            build_info=f"quickstep {__version__}",
        )
        return json_response(props)

    async def slots(self, request: Request) -> Response:
        """Which places of the batch are taken."""
        query = decode_values(request.query_params, SlotQuery)
        num_running = self._served.engine.stats().scheduler.num_running
        num_ctx = self._served.engine.max_model_len
        slots = [
            Slot(place, num_ctx, False, place < num_running) for place in range(self._num_slots)
        ]
        if query.fail_on_no_slot and num_running >= len(slots):
            raise EngineError("all slots are taken; try again later")
        return json_response(slots)

    async def load(self, _: Request) -> Response:
        """Requests and blocks."""
        stats = self._served.engine.stats()
        scheduler = stats.scheduler
        load = ServerLoad(
            server_load=stats.num_requests,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preempted=scheduler.num_preempted,
            num_used_blocks=scheduler.blocks.num_used,
            num_cached_blocks=scheduler.blocks.num_cached,
            num_free_blocks=scheduler.blocks.num_free,
        )
        return json_response(load)

    @property
    def _num_slots(self) -> int:
        """Sequences that the engine computes at a time; at least one."""
        plan = self._served.engine.memory_plan
        return 1 if plan is None else plan.max_num_seqs
