"""llama.cpp's own routes: `/completion`, and `/props` about the server; `slots` has `/slots`.

Several prompts, or several completions of one prompt, give a list of completions; in a stream they
differ by `index`. A stream has no `[DONE]`: the chunk with `stop: true` is the last of its index.
`/load` is vLLM's; it is here because it reports the same state as `/slots`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quickstep import __version__
from quickstep.engine.interface import Vocabulary
from quickstep.server.fields.decode import invalid_json
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.shared_fields import LoRAScale
from quickstep.server.generate.api import Observers, reports_progress
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.generate.generation import (
    Choice,
    Generation,
    Head,
    ParsedRequest,
)
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import error_of, json_response
from quickstep.server.http.event_stream import data_frame
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.llama_cpp.request import SAMPLERS, llama_request
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest
from quickstep.server.llama_cpp.response_types import (
    DefaultSettings,
    GenerationSettings,
    LlamaAdapter,
    LlamaChunk,
    LlamaCompletion,
    LlamaProps,
    LlamaTimings,
    LlamaToken,
    LlamaTopToken,
    LogitBias,
    Modalities,
    ServerLoad,
)
from quickstep.server.llama_cpp.slots import (
    SlotRoutes,
    SlotsByKey,
    SlotTokens,
    check_slot,
    num_slots,
)
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.response_types import PromptProgressReport
from quickstep.server.options import bounded
from quickstep.types import Delta, FinishReason, SamplingParams, TokenLogprobs

_NO_SLOT = -1  # a completion without `id_slot`


class LlamaCpp:
    """The API of `/completion`."""

    def __init__(self, slots: SlotsByKey, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Parse and validate a body. Raises RequestError."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, LlamaCompletionRequest)
        bounded("response_fields", len(fields.response_fields or ()), 64, "entries")
        parsed = llama_request(fields, model)
        progress = reports_progress(fields, reader)
        keep = None
        if fields.id_slot is not None and fields.id_slot != _NO_SLOT:
            keep = partial(self._slots.put, caller, check_slot(fields.id_slot, model))
        return replace(
            parsed,
            request=replace(parsed.request, reports_progress=progress),
            ignored=reader.ignored,
            writer=partial(_LlamaWriter, fields, model, keep, self._clock),
        )


class _LlamaWriter:
    def __init__(
        self,
        fields: LlamaCompletionRequest,
        model: ServedModel,
        keep: Callable[[SlotTokens], None] | None,
        clock: Callable[[], float],
        generation: Generation,
        head: Head,
    ) -> None:
        self._fields = fields
        self._model = model
        self._keep = keep
        self._id_slot = _NO_SLOT if keep is None or fields.id_slot is None else fields.id_slot
        self._tokenizer: Vocabulary = model.engine.tokenizer
        self._generation = generation
        self._clock = clock
        self._started_s = clock()
        self._first_s: dict[int, float] = {}

    def opening(self) -> Iterator[bytes]:
        """A stream has no chunks before the first delta."""
        return iter(())

    def delta(self, delta: Delta) -> Iterator[bytes]:
        """The chunk of new text and tokens, and the last chunk of a completion that ends."""
        self.collect(delta)
        choice = self._generation.choices[delta.index]
        if delta.progress is not None:
            num_prompt_tokens = len(self._prompt(choice))
            yield data_frame(
                LlamaChunk(
                    index=choice.index,
                    content="",
                    tokens=[],
                    stop=False,
                    id_slot=self._id_slot,
                    tokens_predicted=0,
                    tokens_evaluated=num_prompt_tokens,
                    prompt_progress=PromptProgressReport.of(delta.progress, num_prompt_tokens),
                )
            )
        if delta.text or delta.token_ids:
            yield data_frame(
                LlamaChunk(
                    index=choice.index,
                    content=delta.text,
                    tokens=list(delta.token_ids),
                    stop=False,
                    id_slot=self._id_slot,
                    tokens_predicted=len(choice.token_ids),
                    tokens_evaluated=len(self._prompt(choice)),
                    timings=self._timings(choice) if self._fields.timings_per_token else UNSET,
                    completion_probabilities=self._probabilities(delta.logprobs),
                )
            )
        if delta.finish_reason is not None:
            yield data_frame(self._selected_fields(self._completion(choice, content="", tokens=[])))

    def ending(self) -> Iterator[bytes]:
        """A stream ends with the last chunks of its completions."""
        return iter(())

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        _, body = error_of(error)
        yield data_frame(body)

    def collect(self, delta: Delta) -> None:
        """Record the time of the first token."""
        if delta.token_ids:
            self._first_s.setdefault(delta.index, self._clock())

    def complete(self) -> object:
        """The completion, or the list of them."""
        completions = []
        for choice in self._generation.choices:
            tokens = list(choice.token_ids) if self._fields.return_tokens else []
            completion = self._completion(choice, "".join(choice.text), tokens)
            completions.append(self._selected_fields(completion))
        return completions[0] if len(completions) == 1 else completions

    def _prompt(self, choice: Choice) -> Sequence[int]:
        return self._generation.prompt_token_ids(choice)

    def _completion(self, choice: Choice, content: str, tokens: list[int]) -> LlamaCompletion:
        text = "".join(choice.text)
        prompt = self._prompt(choice)
        in_stream = self._generation.request.stream
        if self._keep is not None and not choice.index:
            self._keep(self._slot_tokens(prompt, choice))
        return LlamaCompletion(
            index=choice.index,
            content=content,
            tokens=tokens,
            id_slot=self._id_slot,
            stop=True,
            model=self._generation.request.model,
            tokens_predicted=len(choice.token_ids),
            tokens_evaluated=len(prompt),
            generation_settings=_generation_settings(
                self._generation.request.sampling,
                choice.seed,
                in_stream,
                self._model.engine.max_model_len,
            ),
            prompt=self._tokenizer.decode(prompt, skip_special_tokens=False),
            has_new_line="\n" in text,
            truncated=choice.finish_reason is FinishReason.CONTEXT_LIMIT,
            stop_type=_stop_type(choice.finish_reason),
            stopping_word=self._stopping_word(choice, text),
            tokens_cached=choice.timings.num_cached_tokens if choice.timings else 0,
            timings=self._timings(choice),
            completion_probabilities=(UNSET if in_stream else self._probabilities(choice.logprobs)),
        )

    def _slot_tokens(self, prompt: Sequence[int], choice: Choice) -> SlotTokens:
        request, token_ids = self._generation.request.request, [*prompt, *choice.token_ids]
        return SlotTokens.of(self._model.name, request.adapter, request.cache_salt, token_ids)

    def _selected_fields(self, completion: LlamaCompletion) -> object:
        """The completion, or only its `response_fields`; `a/b` is a field of a field."""
        paths = self._fields.response_fields
        if not paths:
            return completion
        fields = msgspec.to_builtins(completion)
        selected: dict[str, Any] = {}
        for path in paths:
            value: Any = fields
            for name in path.split("/"):
                value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
            if value is not UNSET:
                selected[path] = value
        return selected

    def _stopping_word(self, choice: Choice, text: str) -> str:
        """The stop string that ended the completion: the tokens' text continues with it."""
        if choice.finish_reason is not FinishReason.STOP_STRING:
            return ""
        decoded = self._tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        for stop in self._generation.request.sampling.stop:
            if decoded.startswith(stop, len(text)):
                return stop
        return ""

    def _timings(self, choice: Choice) -> LlamaTimings:
        """The engine's timings after the end; before it, timings by this process's clock."""
        num_prompt, num_predicted = len(self._prompt(choice)), len(choice.token_ids)
        timings = choice.timings
        if timings is None:
            first_s = self._first_s.get(choice.index, self._clock())
            prompt_s, predicted_s = first_s - self._started_s, self._clock() - first_s
            num_cached = 0
        else:
            prompt_s = timings.prefill_s
            predicted_s = timings.decode_s  # without what it waited for others or for its reader
            num_cached = timings.num_cached_tokens
        num_computed = num_prompt - num_cached
        return LlamaTimings(
            cache_n=num_cached,
            prompt_n=num_computed,
            prompt_ms=prompt_s * 1e3,
            prompt_per_token_ms=_ratio(prompt_s * 1e3, num_computed),
            prompt_per_second=_ratio(num_computed, prompt_s),
            predicted_n=num_predicted,
            predicted_ms=predicted_s * 1e3,
            predicted_per_token_ms=_ratio(predicted_s * 1e3, num_predicted),
            predicted_per_second=_ratio(num_predicted, predicted_s),
        )

    def _probabilities(self, logprobs: Sequence[TokenLogprobs]) -> list[LlamaToken] | UnsetType:
        if not self._fields.n_probs:
            return UNSET
        return [
            LlamaToken(
                *self._token(item.token_id),
                item.logprob,
                [LlamaTopToken(*self._token(each), logprob) for each, logprob in item.top],
            )
            for item in logprobs
        ]

    def _token(self, token_id: int) -> tuple[int, str, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        return token_id, data.decode(errors="replace"), list(data)


def _generation_settings(
    sampling: SamplingParams,
    seed: int | None,
    stream: bool | UnsetType = UNSET,
    n_ctx: int | UnsetType = UNSET,
) -> GenerationSettings:
    """The sampling parameters under llama.cpp's names."""
    num_tokens = -1 if sampling.max_tokens is None else sampling.max_tokens
    return GenerationSettings(
        n_predict=num_tokens,
        max_tokens=num_tokens,
        seed=-1 if seed is None else seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        xtc_probability=sampling.xtc_probability,
        xtc_threshold=sampling.xtc_threshold,
        repeat_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        dry_multiplier=sampling.dry_multiplier,
        dry_base=sampling.dry_base,
        dry_allowed_length=sampling.dry_allowed_length,
        dry_penalty_last_n=sampling.dry_range or -1,
        dry_sequence_breakers=sampling.dry_sequence_breakers,
        stop=sampling.stop,
        ignore_eos=sampling.ignore_eos,
        logit_bias=[LogitBias(*entry) for entry in sampling.logit_bias.items()],
        n_probs=sampling.logprobs or 0,
        grammar="" if sampling.grammar is None else sampling.grammar.text,
        samplers=SAMPLERS,
        stream=stream,
        n_ctx=n_ctx,
    )


def _stop_type(reason: FinishReason | None) -> Literal["none", "eos", "limit", "word"]:
    if reason in (FinishReason.EOS, FinishReason.STOP_TOKEN):
        return "eos"
    if reason is FinishReason.STOP_STRING:
        return "word"
    return "none" if reason in (None, FinishReason.ABORTED) else "limit"


def _ratio(value: float, of: float) -> float:
    """`value / of`, 0 if `of` is 0: JSON has no infinity."""
    return value / of if of > 0 else 0.0


class _AdapterScales(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    lora: list[LoRAScale]


def llama_cpp_routes(models: ModelRegistry, observers: Observers) -> list[ApiRoute]:
    """The routes of this module."""
    slots = SlotsByKey()
    completion = GeneratingRoute(LlamaCpp(slots), models, observers)
    state = _StateRoutes(models)
    return [
        ApiRoute(
            "POST",
            "/completion",
            completion.answer,
            "Text that continues a prompt, in the format of llama.cpp.",
            is_repeatable=True,
            request=LlamaCompletionRequest,
            # `response_fields` may leave out any field
            response=LlamaCompletion
            | list[LlamaCompletion]
            | list[dict[str, Any]]
            | dict[str, Any],
            streams=True,
        ),
        ApiRoute(
            "GET",
            "/props",
            state.props,
            "The model, its default parameters and its chat template.",
            response=LlamaProps,
        ),
        *SlotRoutes(models, slots).routes(),
        ApiRoute(
            "GET",
            "/lora-adapters",
            state.adapters,
            "The LoRA adapters, and the scales at which they apply to requests without `lora`.",
            response=list[LlamaAdapter],
        ),
        ApiRoute(
            "POST",
            "/lora-adapters",
            state.set_adapters,
            "Set the scales of LoRA adapters for requests that name the model itself and have no "
            "`lora`; adapters that are not listed have the scale 0.",
            request=LoRAScale,
            takes_list=True,
            response=list[LlamaAdapter],
            needs_admin=True,
        ),
        ApiRoute("GET", "/load", state.load, "How busy the server is.", response=ServerLoad),
    ]


class _StateRoutes:
    """The endpoints that report the state of the server."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    @property
    def _model(self) -> ServedModel:
        """The default one: these requests cannot name a model."""
        return self._models.default

    async def props(self, _: Request) -> Response:
        """Return the default parameters, the number of slots and the chat template."""
        engine = self._model.engine
        own: dict[str, Any] = {"max_tokens": None, **engine.default_sampling}
        defaults = SamplingParams(**own)
        settings = DefaultSettings(
            id=0,
            id_task=-1,
            n_ctx=engine.max_model_len,
            speculative=False,
            is_processing=engine.stats().has_work,
            params=_generation_settings(defaults, defaults.seed),
        )
        template = engine.chat_template
        props = LlamaProps(
            default_generation_settings=settings,
            total_slots=num_slots(self._model),
            model_alias=self._model.name,
            model_path=engine.model_name,
            modalities=Modalities(),
            chat_template="" if template is None else template.source,
            build_info=f"quickstep {__version__}",
        )
        return json_response(props)

    async def adapters(self, _: Request) -> Response:
        """Return the LoRA adapters with their default scales."""
        return json_response(self._adapters())

    async def set_adapters(self, request: Request) -> Response:
        """Set the default scales of the LoRA adapters, and return them."""
        reader = FieldReader(self._models.server.field_rules)
        try:
            value = msgspec.json.decode(body_of(request).decode())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid_json(error, body_of(request)) from None
        scales = reader.convert({"lora": value}, _AdapterScales).lora
        report_ignored(request, reader.ignored)
        self._model.adapters.set_default(scales)
        return json_response(self._adapters())

    def _adapters(self) -> list[LlamaAdapter]:
        adapters = self._model.adapters
        scales = adapters.default_scales
        return [
            LlamaAdapter(number, name, scales.get(name, 0.0))
            for number, name in sorted(adapters.numbered().items())
        ]

    async def load(self, _: Request) -> Response:
        """Return the numbers of requests and of blocks."""
        stats = self._model.engine.stats()
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
