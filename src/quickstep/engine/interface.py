"""The protocols by which the server uses an engine.

`engine.engine.Engine`, the client of an engine in its own process and the tests' scripted engine
implement them. No torch here or above.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.retrieval.card import Retrieval
from quickstep.engine.stats import EngineStats, ReplicaChange
from quickstep.text.tool_calls.formats import OutputFormats
from quickstep.types import Delta, Request, SequenceTimings, SlotPrefix

if TYPE_CHECKING:
    from quickstep.model.sizing import MemoryPlan


class TokenStream(Protocol):
    """The deltas of one request, in order per sequence. Closing it early aborts the request."""

    @property
    def request_id(self) -> str:
        """The engine's id."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt as the model reads it."""

    @property
    def seed(self) -> int:
        """The seed of the sampling noise: the client's, or a random one."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keywords of the request's schema that are enforced less strictly than written; known
        once the engine has accepted the request.
        """

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate the deltas; ends after the last sequence's end."""

    async def accepted(self) -> None:
        """Return once the engine has taken the request. Raises RequestError, EngineError."""

    async def aclose(self) -> None:
        """Abort what still runs and free its blocks. Idempotent."""


class Vocabulary(Protocol):
    """The tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token`, ... to their text."""

    def token_id(self, text: str) -> int | None:
        """The token that is exactly `text`."""

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least, known without tokenising it; 0 for unknown."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Raises RequestError, EngineError."""

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, as the tokenizer joins them."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""


class Template(Protocol):
    """A chat template."""

    @property
    def source(self) -> str:
        """The template's own text."""

    @property
    def formats(self) -> OutputFormats:
        """How a model with this template writes calls and reasoning."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt text of a conversation; it may end with the last message's text, which the
        answer then continues. Raises RequestError if the template refuses it.
        """


class ServedEngine(Protocol):
    """One model, serving."""

    @property
    def model_name(self) -> str:
        """The name of the loaded model."""

    @property
    def fingerprint(self) -> str:
        """Weights, dtype and kernel set."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""

    @property
    def block_size(self) -> int:
        """Tokens of a KV block: what the prefix cache keeps is a multiple of it."""

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """Sampling values of the checkpoint, for what a request does not set."""

    @property
    def retrieval(self) -> Retrieval:
        """How the model embeds texts and scores pairs, as its card says."""

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What the memory is used for; None without a plan."""

    @property
    def tokenizer(self) -> Vocabulary:
        """The model's tokenizer."""

    @property
    def chat_template(self) -> Template | None:
        """None if the model has none."""

    @property
    def step_log(self) -> StepLog:
        """What the engine has done; a follower receives every record."""

    def stats(self) -> EngineStats:
        """What the engine is doing now."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of live requests."""

    async def live_timings(self, request_id: str) -> dict[int, SequenceTimings]:
        """What the live sequences of a request spent their time on so far, by index."""

    async def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were.

        Raises EngineError if the engine does not run.
        """

    async def save_slot(
        self, filename: str, adapter: str, cache_salt: str, token_ids: Sequence[int]
    ) -> SlotPrefix:
        """Write what is cached of a prefix into a file of `--slot-save-path`. Raises RequestError,
        EngineError.
        """

    async def restore_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        """Read such a file into the prefix cache. Raises RequestError, EngineError."""

    async def load_adapter(
        self, name: str, path: str, *, is_from_client: bool = False
    ) -> LoadedAdapter:
        """Let new requests name a LoRA adapter, the latest of a name. `is_from_client`: only from
        the directories that clients may load from. Raises RequestError, EngineError.
        """

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests with an adapter. Raises RequestError, EngineError."""

    async def start(self) -> None:
        """Begin stepping."""

    async def stop(self, drain_s: float = 0.0) -> None:
        """Let running requests continue for `drain_s`, then end them, then free everything."""

    @property
    def has_queue(self) -> bool:
        """Whether requests wait, as far as is known here."""

    def check_admission(self, request: Request, num_sequences: int) -> None:
        """Raise RequestError for a request of so many sequences that could not be accepted now,
        whatever its prompt is.
        """

    async def prepare(self, request: Request) -> object:
        """Compile what `stream` needs of it, off the event loop. Raises RequestError."""

    def stream(self, request: Request) -> TokenStream:
        """Submit a request. Raises RequestError for what is known at once; the rest of the engine's
        refusals come with the stream's `accepted`.
        """


@runtime_checkable
class SleepingEngine(Protocol):
    """A served engine that can give its memory back between requests and load its model again."""

    async def sleep(self) -> None:
        """Give the memory back. Raises EngineError with live requests, or if it does not run."""

    async def wake(self) -> None:
        """Load the model again. Raises EngineError if it does not sleep, or does not serve then."""


@runtime_checkable
class ReplicatedEngine(Protocol):
    """A served engine whose processes an operator may drain and restart one by one. Streams move to
    another one, or to the new process, after `drain_s` seconds; if only other weights are there,
    they end first. All raise RequestError for a number that does not exist and while another change
    is under way, and EngineError if the new process does not serve.
    """

    @property
    def num_replicas(self) -> int:
        """The replicas have numbers below this."""

    def has_new_files(self) -> bool:
        """Whether files of the checkpoint have changed since they were loaded."""

    async def drain_replica(self, number: int, drain_s: float = 0.0) -> ReplicaChange:
        """Give a replica no more requests until it is restarted; return when it has none."""

    async def restart_replica(self, number: int, drain_s: float = 0.0) -> ReplicaChange:
        """Drain a replica and start it again; return when it serves."""

    async def restart_replicas(self, drain_s: float = 0.0) -> list[ReplicaChange]:
        """Restart all, one after the other, each while all others serve."""
