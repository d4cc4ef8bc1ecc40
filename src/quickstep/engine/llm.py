"""`LLM`: the library's synchronous API, with vLLM's class, argument and option names.

    from quickstep import LLM, SamplingParams

    with LLM("demo") as llm:
        for output in llm.generate(["def add(", "import "], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

A background thread runs an event loop with the asynchronous engine (see `engine.engine`), and
every method waits for a coroutine there. Any thread may call it. An unknown option is a ConfigError
that names the nearest known one.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    NoReturn,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from quickstep.config import (
    CacheConfig,
    ContentFormat,
    EngineConfig,
    InputConfig,
    LoadConfig,
    LoRAConfig,
    PolicyName,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.engine.adapters import LoRARequest
from quickstep.engine.assembly import open_engine
from quickstep.engine.requests import as_token_ids, check_token_ids
from quickstep.errors import ConfigError, RequestError
from quickstep.option import options_of
from quickstep.types import Pooling, Request, SamplingParams

if TYPE_CHECKING:
    from quickstep.engine.beam_search import BeamSearch, BeamSearchParams
    from quickstep.engine.engine import Engine
    from quickstep.engine.outputs import (
        BeamSearchOutput,
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PromptAnswer,
        RequestOutput,
        RerankOutput,
        ScoringRequestOutput,
    )
    from quickstep.engine.stream import Stream
    from quickstep.text.chat_template import Message
    from quickstep.text.tokenizer import Tokenizer

# The adapter of all prompts, or of each.
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
Prompt = str | Sequence[int] | Mapping[str, Any]

_T = TypeVar("_T")
_Kind = TypeVar("_Kind", bound=enum.Enum)
_Submitted = TypeVar("_Submitted", "Stream", "BeamSearch")


class LLMOptions(TypedDict, total=False):
    """The options of `LLM`; None means the default. `quickstep.config` declares them: this is their
    signature for type checkers.
    """

    revision: str | None
    dtype: str
    quantization: str | None
    device: str
    kernels: str
    offline: bool
    num_threads: int | None
    pin_threads: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    packed_cache_bytes: int
    block_size: int
    num_blocks: int | None
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    kv_cache_dtype: str
    kv_cache_dir: str | None
    kv_cache_disk_bytes: int | None
    slot_save_path: str | None
    state_slots: int | None
    state_interval: int
    max_model_len: int | None
    allow_long_context: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int | None
    pipeline_depth: int | None
    policy: str | PolicyName
    inter_token_target_s: float
    priority_aging_s: float
    batch_timeout_s: float
    use_kv_cache: bool
    speculative_config: dict[str, Any] | list[dict[str, Any]]
    seed: int | None
    memory_bytes: int | None
    enforce_eager: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    lora_dir: str
    lora_pin: tuple[str, ...]
    lora_memory_bytes: int
    lora_dtype: str
    chat_template: str | None
    chat_template_content_format: str | ContentFormat


# The section "" is EngineConfig itself.
_SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    "": EngineConfig,
    "load": LoadConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "lora": LoRAConfig,
    "inputs": InputConfig,
}


@cache
def option_places() -> Mapping[str, tuple[str, str]]:
    """Where each option of `LLM` is declared: (section, field)."""
    places = {
        argument: (section, declared.field)
        for section, kind in _SECTIONS.items()
        for declared in options_of(kind).values()
        for argument in declared.arguments
    }
    return {**places, "enable_lora": ("lora", "enabled")}


# Public names of vLLM's class that this one does not have: what to do instead.
_ABSENT: Mapping[str, str] = {
    "apply_model": "the model runs as captured native steps; there is no torch module to call",
    "collective_rpc": "there are no worker processes",
    "encode": "`embed(pooling=...)` gives the pooled hidden states",
    "enqueue": "`generate` takes all prompts at once; `engine.stream` submits single requests",
    "finish_weight_update": "weights do not change while a model is loaded",
    "from_engine_args": "pass the options to LLM(...) itself",
    "get_metrics": "`engine.stats()` has the counts, and every output its `metrics`",
    "get_world_size": "there is one device",
    "init_weight_transfer_engine": "weights do not change while a model is loaded",
    "llm_engine": "`engine` is the asynchronous engine",
    "preprocess_chat": "`engine.chat_prompt(messages)` gives the token ids of a conversation",
    "reset_mm_cache": "models are text only",
    "reward": "there are no reward heads; `embed(pooling=...)` gives the pooled hidden states",
    "set_tokenizer": "the tokenizer is the checkpoint's",
    "sleep": "`close` frees the model and a new LLM loads it again",
    "start_profile": "`quickstep bench step --profile` profiles steps",
    "start_weight_update": "weights do not change while a model is loaded",
    "stop_profile": "`quickstep bench step --profile` profiles steps",
    "update_weights": "weights do not change while a model is loaded",
    "wait_for_completion": "`generate` returns when all prompts are answered",
    "wake_up": "`close` frees the model and a new LLM loads it again",
}


def _absent(name: str) -> AttributeError:
    why = _ABSENT.get(name)
    return AttributeError(
        f"LLM has no attribute {name!r}" + ("" if why is None else f", unlike vLLM's: {why}")
    )


class _NamesWhatIsAbsent(type):
    """`LLM.from_engine_args` and the like end with a sentence."""

    def __getattr__(cls, name: str) -> NoReturn:
        raise _absent(name)


class _TokenizedPrompt(NamedTuple):
    """A prompt ready to submit, and its text unless it was token ids."""

    text: str | None
    token_ids: Sequence[int]


class LLM(metaclass=_NamesWhatIsAbsent):
    """A loaded model. The constructor loads (as vLLM's does); close it, or use it in a `with`.

    Raises:
        ConfigError: An option is unknown or bad, or the checkpoint cannot be used.
    """

    def __init__(self, model: str = "demo", **options: Unpack[LLMOptions]) -> None:
        config = engine_config(model, options)
        with _progress_bar("Loading weights", is_wanted=True) as show:
            self._engine = open_engine(config, show)
        from quickstep.engine.loop_thread import LoopThread

        self._thread = LoopThread("quickstep-llm", self._engine.stop)
        self._thread.start()
        # also at the interpreter's exit, if `close` is never called
        self._end = weakref.finalize(self, self._thread.close)
        self._thread.call(self._engine.start())

    @property
    def engine(self) -> Engine:
        """The asynchronous engine; it runs in this object's own event loop."""
        return self._engine

    def __getattr__(self, name: str) -> NoReturn:
        raise _absent(name)

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer: `encode(text)`, `decode(token_ids)`, `vocab_size`, ..."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: the values of the checkpoint's
        `generation_config.json`, and for others the defaults of `SamplingParams`.
        """
        values: dict[str, Any] = dict(self._engine.default_sampling)
        return SamplingParams(**values)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; the answers are in the order of the prompts.

        A prompt is text, token ids, or a mapping with `prompt` or `prompt_token_ids`. If a single
        sequence fails, its output's `error` says why. `lora_request` is the adapter of all prompts,
        or a list with that of each, None for none; it needs `enable_lora`. `priority` is that of
        all or of each, from -10 to 10, the lowest first; `fcfs` and `fair` do not read it. Without
        `sampling_params` they are those of `get_default_sampling_params`.

        Raises:
            RequestError: One of the prompts or parameters is invalid; then none is served.
        """
        tokenized = self._tokenized(prompts)
        return self._serve(tokenized, sampling_params, use_tqdm, lora_request, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        With `continue_final_message` the answer continues the last message; as in vLLM,
        `add_generation_prompt` must be False then.

        Raises:
            RequestError: As `generate`, the model has no chat template, or a last message cannot
                be continued.
            ConfigError: The chat template cannot be read.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set "
                "add_generation_prompt=False",
                param="continue_final_message",
            )
        tokenized = [
            _TokenizedPrompt(
                None,
                self._engine.chat_prompt(
                    conversation,
                    tools,
                    add_generation_prompt,
                    chat_template_kwargs,
                    continue_final_message,
                ),
            )
            for conversation in _as_conversations(messages)
        ]
        return self._serve(tokenized, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: Pooling | None = None,
        input_type: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of one prompt or many: the pooled final hidden states, of length 1.

        `pooling` None uses the pooling of the model's card, else the last token's state. Before
        prompts of text goes the card's text for the task `input_type`, such as `query`, else that
        of its default task.

        Raises:
            RequestError: One of the prompts is invalid; then none is served.
            EngineError: The model failed on one.
        """
        from quickstep.engine.outputs import collect_embedding
        from quickstep.engine.retrieval.pairs import prompt_of_task

        sampling = SamplingParams(max_tokens=1)  # no token is sampled
        retrieval = self._engine.retrieval
        if retrieval.refusal:
            raise RequestError(retrieval.refusal, param="model")
        how = pooling or retrieval.pooling

        before = prompt_of_task(retrieval, input_type)
        submits = [
            partial(self._engine.stream, Request("", ids, sampling, pooling=how))
            for ids in [
                as_token_ids(prompt.token_ids) for prompt in self._tokenized(prompts, before)
            ]
        ]

        async def answer(stream: Stream, number: int) -> EmbeddingRequestOutput:
            return await collect_embedding(stream)

        with _progress_bar("Embedding", is_wanted=use_tqdm) as show:
            return self._thread.call(_all_answers(submits, answer, show))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well documents answer a query: of one query with each document, or of as many pairs.

        A model whose files have a pooling compares the two embeddings; another one is asked about
        the pair, and the score is the probability of "yes" against "no".
        `truncate_prompt_tokens` shortens documents until a prompt has so many tokens; -1 for as
        many as the model takes.

        Raises:
            RequestError: A text is too long, or the model cannot score.
            EngineError: The model failed on one.
        """
        from quickstep.engine.outputs import ScoringOutput, ScoringRequestOutput, collect_answer
        from quickstep.engine.retrieval.pairs import (
            Pairs,
            TextLimits,
            pair_pooling,
            pair_prompts,
            pair_sampling,
            pair_scores,
        )

        pairs = Pairs(_as_texts(queries), _as_texts(documents), "queries", "documents")
        engine = self._engine
        limits = TextLimits(truncate_prompt_tokens)
        prompts = pair_prompts(engine, pairs, instruction, limits)
        pooling = pair_pooling(engine.retrieval)
        sampling = pair_sampling(engine.retrieval)
        submits = [
            partial(
                engine.stream, Request("", tuple(ids), sampling, pooling=pooling, speculation=False)
            )
            for ids in prompts
        ]

        async def answer(stream: Stream, number: int) -> PromptAnswer:
            return await collect_answer(stream)

        with _progress_bar("Scoring", is_wanted=use_tqdm) as show:
            answers = self._thread.call(_all_answers(submits, answer, show))
        scores = pair_scores(engine.retrieval, [answer.delta for answer in answers], pairs)
        return [
            ScoringRequestOutput(
                answer.request_id,
                ScoringOutput(score),
                answer.prompt_token_ids,
                answer.num_cached_tokens,
                True,
            )
            for answer, score in zip(answers[-len(scores) :], scores, strict=True)
        ]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """The classes of one text or many, of an encoder with a classification head.

        Raises:
            RequestError: One of the texts is invalid, or the model has no such head.
            EngineError: The model failed on one.
        """
        from quickstep.engine.outputs import (
            ClassificationOutput,
            ClassificationRequestOutput,
            collect_answer,
        )
        from quickstep.engine.retrieval.pairs import class_probabilities

        sampling = SamplingParams(max_tokens=1)  # no token is sampled
        submits = [
            partial(
                self._engine.stream,
                Request("", as_token_ids(prompt.token_ids), sampling, pooling=Pooling.CLASSES),
            )
            for prompt in self._tokenized(prompts)
        ]

        async def answer(stream: Stream, number: int) -> PromptAnswer:
            return await collect_answer(stream)

        with _progress_bar("Classifying", is_wanted=use_tqdm) as show:
            answers = self._thread.call(_all_answers(submits, answer, show))
        labels = self._engine.retrieval.labels
        outputs = []
        for found in answers:
            probs = class_probabilities(found.delta.embedding or ())
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            outputs.append(
                ClassificationRequestOutput(
                    found.request_id,
                    ClassificationOutput(probs, label),
                    found.prompt_token_ids,
                    found.num_cached_tokens,
                    True,
                )
            )
        return outputs

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        use_tqdm: bool = True,
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[RerankOutput]:
        """Documents by their scores (see `score`), the best first; the first `top_n` of them.

        Raises:
            RequestError: As `score`.
            EngineError: The model failed on one.
        """
        from quickstep.engine.outputs import RerankOutput

        outputs = self.score(
            query,
            documents,
            use_tqdm,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        scores = [output.outputs.score for output in outputs]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [
            RerankOutput(index, scores[index], documents[index]) for index in order[: top_n or None]
        ]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Search the most likely answers of one prompt or many (see `engine.beam_search`).

        Raises:
            RequestError: One of the prompts is invalid.
            EngineError: The model failed on one.
        """
        from quickstep.engine.outputs import beam_search_output

        tokenized = self._tokenized(prompts)
        submits = [partial(self._start_search, prompt.token_ids, params) for prompt in tokenized]
        tokenizer = self._engine.tokenizer

        async def answer(search: BeamSearch, number: int) -> BeamSearchOutput:
            best = await search.run()
            return beam_search_output(tokenized[number].token_ids, best, tokenizer)

        with _progress_bar("Searching", is_wanted=use_tqdm) as show:
            return self._thread.call(_all_answers(submits, answer, show))

    def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were."""
        return self._thread.call(self._engine.reset_prefix_cache())

    def close(self) -> None:
        """End all requests and free everything. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(
        self,
        prompts: Sequence[_TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequests,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        from quickstep.engine.outputs import collect

        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        sampling = _as_many(sampling_params, len(prompts))
        adapters = self._loaded(lora_request, len(prompts))
        priorities = _priorities(priority, len(prompts))
        submits = [
            partial(self._engine.generate, prompt.token_ids, params, adapter=adapter, priority=rank)
            for prompt, params, adapter, rank in zip(
                prompts, sampling, adapters, priorities, strict=True
            )
        ]
        tokenizer = self._engine.tokenizer

        async def answer(stream: Stream, number: int) -> RequestOutput:
            return await collect(stream, prompts[number].text, sampling[number], tokenizer)

        with _progress_bar("Generating", is_wanted=use_tqdm) as show:
            return self._thread.call(_all_answers(submits, answer, show))

    def _loaded(self, lora_request: LoRARequests, num_prompts: int) -> list[str]:
        """The name of each prompt's adapter, after loading those that are not. RequestError."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            wanted: Sequence[LoRARequest | None] = [lora_request] * num_prompts
        else:
            wanted = lora_request
        if len(wanted) != num_prompts:
            raise RequestError(
                f"{len(wanted)} lora_requests for {num_prompts} prompts; pass one for all or one "
                "for each",
                param="lora_request",
            )
        paths = {adapter.name: adapter.path for adapter in self._engine.adapters}
        for adapter in dict.fromkeys(wanted):
            if adapter is None:
                continue
            name, path = adapter.lora_name, adapter.lora_path
            if path and paths.get(name) != str(Path(path)):
                opening = self._engine.load_adapter(name, path)
            else:
                opening = self._engine.open_adapter(name)
            paths[name] = self._thread.call(opening).path
        return ["" if adapter is None else adapter.lora_name for adapter in wanted]

    def _start_search(self, token_ids: Sequence[int], params: BeamSearchParams) -> BeamSearch:
        from quickstep.engine.beam_search import BeamSearch

        engine = self._engine
        max_model_len, vocab_size = engine.max_model_len, engine.model.vocab_size
        ids = as_token_ids(token_ids)
        check_token_ids(ids, vocab_size, max_model_len)
        search = BeamSearch(
            engine.stream,
            Request("", ids),
            params,
            engine.tokenizer.eos_token_ids,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        search.start()
        return search

    def _tokenized(
        self, prompts: Prompt | Sequence[Prompt], before: str = ""
    ) -> list[_TokenizedPrompt]:
        """Tokenize in the caller's thread, so that other requests continue meanwhile; texts get the
        text `before` them.
        """
        encode = self._engine.tokenizer.encode
        return [
            _TokenizedPrompt(prompt, encode(before + prompt))
            if isinstance(prompt, str)
            else _TokenizedPrompt(None, prompt)
            for prompt in map(_plain_prompt, _as_prompts(prompts))
        ]


async def _all_answers(
    submits: Sequence[Callable[[], _Submitted]],
    answer: Callable[[_Submitted, int], Awaitable[_T]],
    show: Callable[[int, int], None] | None,
) -> list[_T]:
    """Submit all, then wait for all. In any case, no request stays submitted."""
    import asyncio

    submitted: list[_Submitted] = []
    num_done = 0

    async def counted(number: int) -> _T:
        nonlocal num_done
        result = await answer(submitted[number], number)
        num_done += 1
        if show is not None:
            show(num_done, len(submits))
        return result

    try:
        for submit in submits:
            submitted.append(submit())
        return list(await asyncio.gather(*map(counted, range(len(submitted)))))
    finally:
        for request in submitted:
            await request.aclose()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many; a list of integers is one prompt."""
    is_single = isinstance(prompts, (str, Mapping))
    if is_single or (len(prompts) > 0 and isinstance(prompts[0], int)):  # type: ignore[index]
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def _plain_prompt(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    known = {"prompt", "prompt_token_ids"} & set(prompt)
    if len(prompt) != 1 or not known:
        raise RequestError(
            f"a prompt has the keys {sorted(prompt)}, it takes either `prompt` or "
            "`prompt_token_ids`",
            param="prompt",
        )
    return cast("str | Sequence[int]", prompt[known.pop()])


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return cast("Sequence[Sequence[Message]]", messages)


def _priorities(priority: int | Sequence[int], num_prompts: int) -> Sequence[int]:
    """That of each prompt. Raises RequestError."""
    priorities = [priority] * num_prompts if isinstance(priority, int) else priority
    if len(priorities) != num_prompts:
        raise RequestError(
            f"{len(priorities)} priorities for {num_prompts} prompts; pass one for all or one for "
            "each",
            param="priority",
        )
    return priorities


def _as_many(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        kind = type(sampling_params).__name__
        raise RequestError(
            f"sampling_params is a {kind}, it must be SamplingParams or a list of them",
            param="sampling_params",
        )
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; pass one for all "
            "or one for each",
            param="sampling_params",
        )
    if not all(isinstance(params, SamplingParams) for params in sampling_params):
        raise RequestError("sampling_params must be SamplingParams", param="sampling_params")
    return sampling_params


@contextmanager
def _progress_bar(what: str, is_wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on standard error, called with (done, total); None without a terminal."""
    if not is_wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration for `LLM(model, **options)`.

    Raises:
        ConfigError: An option is unknown, given twice by two names, or has a bad value.
    """
    sections: dict[str, dict[str, Any]] = {"load": {"model": model}}
    sections |= {"cache": {}, "scheduler": {}, "lora": {}, "inputs": {}}
    own: dict[str, Any] = {}
    places = option_places()
    for name, value in options.items():
        if name not in places:
            raise ConfigError(_unknown(name))
        if value is None:
            continue
        _check_type(name, value)
        section, field = places[name]
        fields = sections[section] if section else own
        if field in fields:
            raise ConfigError(f"{name} and another name of {field} are both given; keep one")
        if name == "policy":
            value = _named(name, value, PolicyName)
        elif name == "chat_template_content_format":
            value = _named(name, value, ContentFormat)
        elif name == "chat_template":
            from quickstep.text.chat_template import read_template

            value = read_template(value)
        elif name == "speculative_config":
            value = SpeculationConfig.of_fields(value, name)
        fields[field] = value
    return EngineConfig(
        load=LoadConfig(**sections["load"]),
        cache=CacheConfig(**sections["cache"]),
        scheduler=SchedulerConfig(**sections["scheduler"]),
        lora=_lora(sections["lora"]),
        inputs=InputConfig(**sections["inputs"]),
        **own,
    )


def _lora(options: dict[str, Any]) -> LoRAConfig | None:
    if options.pop("enabled", "directory" in options):
        usual = LoRAConfig.usual_max_loras(options.get("max_cpu_loras"))
        return LoRAConfig(**{"max_loras": usual, **options})
    if options:
        raise ConfigError(f"{next(iter(options))} needs enable_lora=True")
    return None


def _check_type(name: str, value: Any) -> None:
    """Raise ConfigError for a wrong type. Integers may be floats, booleans neither."""
    hint = get_type_hints(LLMOptions)[name]
    hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    wanted = tuple(get_origin(kind) or kind for kind in hints)
    allowed = (*wanted, int) if float in wanted else wanted
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in wanted):
        names = " or ".join(kind.__name__ for kind in wanted if kind is not NoneType)
        raise ConfigError(f"{name} is {value!r}, it must be of type {names}")


def _named(name: str, value: object, kind: type[_Kind]) -> _Kind:
    """The member of an enum by its value. Raises ConfigError."""
    try:
        return kind(value)
    except ValueError as error:
        names = ", ".join(str(member.value) for member in kind)
        raise ConfigError(f"{name} is {value!r}, it must be one of {names}") from error


def _unknown(name: str) -> str:
    if name == "trust_remote_code":
        return "trust_remote_code does not exist here: a checkpoint's own code is never run"
    import difflib

    nearest = difflib.get_close_matches(name, option_places(), n=1, cutoff=0.0)[0]
    return f"LLM has no option {name!r}; the nearest is {nearest!r}"


def _as_texts(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts
