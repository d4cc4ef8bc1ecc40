"""What the operator may set about the HTTP API, and the bounds on what a client may send.

Frozen sections made by `cli.serve` (or by a test) and read by the routes. Nothing here is about
the engine: its own limits (context, queue) are the scheduler's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quickstep.config import STALL_S
from quickstep.core.fallback import Route
from quickstep.core.model_residency import MAX_OVERTAKE_S
from quickstep.errors import ConfigError, RequestError
from quickstep.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    AllowedRange,
    Kind,
    Option,
    check_bounds,
)
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.server.usage.limits import KeyLimits
from quickstep.server.usage.price_book import PriceBook

MAX_STORED_RESPONSES = 4096
MAX_STORED_RESPONSE_BYTES = 64 * 1024 * 1024
MAX_STORED_RESPONSE_AGE_S = 30 * 86_400.0  # as long as OpenAI


class RequestLimits(msgspec.Struct, frozen=True):
    """Bounds on one request; beyond one the answer is 400 (413 for the body, 414 for the URL, 431
    for the headers).

    Attributes:
        sequences: Prompts times sequences of each (n, best_of or beams).
        tokens: Tokens of one request: its prompts, and all that its sequences may generate.
        stop_token_ids: Stop token ids, and allowed token ids, per request.
        bad_words: Bad words per request.
        bad_word_chars: Characters of one bad word.
        dry_breakers: DRY's sequence breakers per request.
        dry_breaker_chars: Characters of one breaker.
        logprobs: Alternatives per token; -1 for no bound. A request that sends -1 has the complete
            vocabulary, if the bound allows so many.
        logprob_token_ids: Tokens whose logprobs a request may request by id.
        budget_message_chars: Characters of `reasoning_budget_message`.
        label_chars: Characters of `user`, `cache_salt` and the other labels, which logs keep.
        metadata: Entries of `metadata`; keys have at most 64 and values at most 512 characters.
        detokenized: Tokens of one `/detokenize`.
        adapters: LoRA adapters that apply to one request together.
    """

    body_bytes: Annotated[
        int, Option("largest request body", Kind.BYTES, "--max-body-bytes", metavar="N")
    ] = 4 * 1024 * 1024
    header_bytes: Annotated[
        int, Option("request line and headers", Kind.BYTES, "--max-header-bytes", metavar="N")
    ] = 32 * 1024
    url_bytes: Annotated[
        int, Option("path and query", Kind.BYTES, "--max-url-bytes", metavar="N")
    ] = 8 * 1024
    json_depth: Annotated[
        int, Option("nesting depth of a body", Kind.COUNT, "--max-json-depth")
    ] = 64
    json_values: Annotated[int, Option("values in a body", Kind.COUNT, "--max-json-values")] = (
        300_000
    )
    json_containers: Annotated[
        int, Option("objects and lists in a body", Kind.COUNT, "--max-json-containers")
    ] = 50_000
    n: Annotated[int, Option("choices per prompt", Kind.COUNT, "--max-n")] = 32
    prompts: Annotated[int, Option("prompts per request", Kind.COUNT, "--max-prompts")] = 256
    sequences: Annotated[
        int, Option("prompts times choices per request", Kind.COUNT, "--max-sequences")
    ] = 512
    tokens: Annotated[
        int,
        Option("total tokens per request, prompts and outputs", Kind.COUNT, "--max-request-tokens"),
    ] = 8 * 1024 * 1024
    stop: Annotated[int, Option("stop strings per request", Kind.COUNT, "--max-stop")] = 16
    stop_chars: Annotated[
        int, Option("characters per stop string", Kind.COUNT, "--max-stop-chars")
    ] = 256
    stop_token_ids: int = 1024
    logit_bias: Annotated[int, Option("entries of logit_bias", Kind.COUNT, "--max-logit-bias")] = (
        1024
    )
    bad_words: int = 64
    bad_word_chars: int = 64
    dry_breakers: int = 16
    dry_breaker_chars: int = 32
    logprobs: Annotated[
        int,
        Option(
            "alternatives per token, -1 for no limit; a request with -1 has the complete "
            "vocabulary",
            Kind.COUNT_OR_ALL,
            "--max-logprobs",
        ),
    ] = 20
    logprob_token_ids: int = 128
    budget_message_chars: int = 1024
    label_chars: int = 512
    tools: Annotated[int, Option("functions per request", Kind.COUNT, "--max-tools")] = 128
    metadata: int = 16
    detokenized: int = 250_000
    adapters: int = 8

    def __post_init__(self) -> None:
        for name, least in (("body_bytes", 128), ("header_bytes", 1024), ("url_bytes", 128)):
            value = getattr(self, name)
            if value < least:
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--max-{flag} is {value}, which is too little for any request; it must be at "
                    f"least {least}"
                )


def bounded(name: str, value: int, limit: int, unit: str = "") -> None:
    """Raise RequestError if `value` is above `limit`."""
    if value > limit:
        has = f"has {value} {unit}" if unit else f"is {value}"
        raise RequestError(f"{name} {has}, the limit is {limit}", param=name)


class ConnectionOptions(msgspec.Struct, frozen=True):
    """How many connections there may be, and how long a client may take over its part of one, in
    seconds.

    Attributes:
        keep_alive_s: An idle connection between two requests; longer than the minute for which
            clients keep one, so that none is closed just as they use it.
        header_s: From the first byte of a request (or a new connection) to the end of its headers.
        upload_s: A request's body, from the end of the headers to its last byte.
        slow_reader_s: An answer of which too much is unread; then the connection is cut, which
            ends its request.
        comment_every_s: A stream without data sends a comment this often, so that
            proxies keep it open; 0 for never.
        max_connections: Open ones at a time, which the clients' addresses share; beyond them, or
            beyond the share of an address, the answer is 503.
        max_reception_bytes: Bytes of bodies that are being received or wait to be parsed, which the
            keys share (without keys, the addresses); None for 64 times the largest body.
    """

    keep_alive_s: Annotated[
        float,
        Option(
            "how long an idle connection stays open",
            Kind.SECONDS,
            "--keep-alive-timeout-s",
            bounds=POSITIVE,
        ),
    ] = 75.0
    header_s: Annotated[
        float,
        Option(
            "how long a request's headers may take to arrive",
            Kind.SECONDS,
            "--header-timeout-s",
            bounds=POSITIVE,
        ),
    ] = 20.0
    upload_s: Annotated[
        float,
        Option(
            "how long a request's body may take to arrive",
            Kind.SECONDS,
            "--upload-timeout-s",
            bounds=POSITIVE,
        ),
    ] = 120.0
    slow_reader_s: Annotated[
        float,
        Option(
            "how long a client may leave an answer unread before its connection is cut",
            Kind.SECONDS,
            "--slow-reader-timeout-s",
            bounds=POSITIVE,
        ),
    ] = 60.0
    comment_every_s: Annotated[
        float,
        Option(
            "interval of comments in a stream without output; 0 for none",
            Kind.SECONDS,
            "--stream-comment-s",
            bounds=AT_LEAST_0,
        ),
    ] = 15.0
    max_connections: Annotated[
        int,
        Option(
            "open connections, beyond which the server responds 503; one address gets at most "
            "eight ninths",
            Kind.COUNT,
            default_text="{value}, or less if the process may open fewer files",
        ),
    ] = 4096
    max_reception_bytes: Annotated[
        int | None,
        Option(
            "bytes of request bodies that are being received, which the clients share; beyond "
            "them the server responds 503 before it reads a body",
            Kind.BYTES,
            default_text="64 times --max-body-bytes",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)


class CorsOptions(msgspec.Struct, frozen=True):
    """Which web pages of other origins may call; none by default."""

    origins: Annotated[
        tuple[str, ...],
        Option(
            "origins of web pages that may call the server, or *",
            flag="--allowed-origins",
            metavar="ORIGIN",
            default_text="none",
        ),
    ] = ()
    methods: Annotated[
        tuple[str, ...],
        Option(
            "methods that such pages may use",
            flag="--allowed-methods",
            metavar="METHOD",
            default_text="all",
        ),
    ] = ("*",)
    headers: Annotated[
        tuple[str, ...],
        Option(
            "headers that such pages may send",
            flag="--allowed-headers",
            metavar="HEADER",
            default_text="all",
        ),
    ] = ("*",)
    credentials: Annotated[
        bool, Option("allow browsers to send cookies", flag="--allow-credentials")
    ] = False

    def __post_init__(self) -> None:
        if self.credentials and "*" in self.origins:
            raise ConfigError(
                "--allow-credentials cannot go with --allowed-origins *: name the origins"
            )


class TlsOptions(msgspec.Struct, frozen=True):
    """Files in PEM form; no certificate, no TLS.

    Attributes:
        certfile: With its chain.
    """

    certfile: Annotated[
        str | None,
        Option("serve https with this certificate", flag="--ssl-certfile", metavar="FILE"),
    ] = None
    keyfile: Annotated[
        str | None,
        Option("private key, unless it is in --ssl-certfile", flag="--ssl-keyfile", metavar="FILE"),
    ] = None
    ca_certs: Annotated[
        str | None,
        Option(
            "require client certificates that one of these signed",
            flag="--ssl-ca-certs",
            metavar="FILE",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.certfile is None and (self.keyfile or self.ca_certs):
            flag = "--ssl-keyfile" if self.keyfile else "--ssl-ca-certs"
            raise ConfigError(f"{flag} needs --ssl-certfile")


class Deadlines(msgspec.Struct, frozen=True):
    """How long a request may take, in seconds; then what was generated is the answer."""

    default_s: Annotated[
        float | None,
        Option(
            "time limit of requests without timeout_s; at the limit they return what is generated",
            Kind.SECONDS,
            "--default-timeout-s",
            default_text="none",
            bounds=POSITIVE,
        ),
    ] = None
    max_s: Annotated[
        float | None,
        Option(
            "largest timeout_s of a request",
            Kind.SECONDS,
            "--max-timeout-s",
            default_text="none",
            bounds=POSITIVE,
        ),
    ] = None
    finish_reason: Annotated[
        str,
        Option(
            "finish_reason of an answer that ends at its time limit; length is for clients "
            "that accept OpenAI's values only",
            flag="--timeout-finish-reason",
            choices=("timeout", "length"),
        ),
    ] = "timeout"

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.default_s and self.max_s and self.default_s > self.max_s:
            raise ConfigError(
                f"--default-timeout-s is {self.default_s:g}, --max-timeout-s allows {self.max_s:g}"
            )

    def of(self, requested_s: float | None) -> float | None:
        """The timeout of a request that requests `requested_s`. Raises RequestError."""
        if requested_s is None:
            return self.max_s if self.default_s is None else self.default_s
        if self.max_s is not None and requested_s > self.max_s:
            raise RequestError(
                f"timeout_s is {requested_s:g}, the limit is {self.max_s:g}", param="timeout_s"
            )
        return requested_s


_LEAST_STALL_S = 1.0
_BODIES_IN_RECEPTION = 64  # of the largest size
_LONGEST_S = 7 * 86_400


class AnswerOptions(msgspec.Struct, frozen=True):
    """What responses contain that a request did not request."""

    always_usage: Annotated[
        bool,
        Option(
            "add the usage so far to every chunk of chat and completions, and end with a "
            "chunk of it",
            flag="--enable-force-include-usage",
        ),
    ] = False
    request_metrics: Annotated[
        bool,
        Option(
            "add timings to responses of chat and completions", flag="--enable-per-request-metrics"
        ),
    ] = False
    budget_message: Annotated[
        str,
        Option(
            "what a reasoning that has used up its budget ends with, for requests without "
            "reasoning_budget_message",
            flag="--reasoning-budget-message",
            metavar="TEXT",
            default_text="only the closing tag",
        ),
    ] = ""
    thinking_budget: Annotated[
        int | None,
        Option(
            "most reasoning tokens of conversations that give no budget and no effort",
            Kind.INTEGER,
            bounds=AT_LEAST_0,
            default_text="no limit",
        ),
    ] = None


class FieldRules(msgspec.Struct, frozen=True):
    """What happens to a request's fields that have no effect. By default they are reported in the
    answer's header `x-quickstep-ignored` and, once per client, in the log.

    Attributes:
        refuse_unknown: Answer 400 for fields that no schema has.
        refuse_hints: Answer 400 for hints that have no effect.
    """

    refuse_unknown: bool = False
    refuse_hints: bool = False


class MetricsOptions(msgspec.Struct, frozen=True):
    """What `/metrics` reports, and where traces are sent.

    Attributes:
        prefix: What names begin with, before a colon; `vllm` gives vLLM's own names.
        goodput_ms: Limits, in milliseconds, that a good request keeps, by `ttft` (time to first
            token), `tpot` (mean time per further token of its slowest choice) and `e2el` (arrival
            to end). Empty for no goodput.
        otlp_traces_endpoint: The URL that gets OpenTelemetry's spans, over HTTP; None for none.
    """

    prefix: Annotated[
        str,
        Option(
            "what the names of metrics begin with; vllm gives vLLM's own names",
            flag="--metrics-prefix",
            metavar="NAME",
        ),
    ] = "quickstep"
    goodput_ms: Mapping[str, float] = msgspec.field(default_factory=dict)
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            "send a span per request to this OpenTelemetry receiver, such as "
            "http://localhost:4318/v1/traces",
            metavar="URL",
            default_text="none; needs the extra otel",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"--metrics-prefix is {self.prefix!r}, it must be letters, digits and underscores"
            )
        for name, value in self.goodput_ms.items():
            if name not in GOODPUT_TARGETS:
                known = ", ".join(GOODPUT_TARGETS)
                raise ConfigError(f"--goodput has no target {name!r}; there are {known}")
            if not 0.0 < value < float("inf"):
                raise ConfigError(f"--goodput {name} is {value:g}, it must be above 0 milliseconds")


GOODPUT_TARGETS = ("ttft", "tpot", "e2el")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")


class FileOptions(msgspec.Struct, frozen=True):
    """The directory of clients' files, and their limits.

    Attributes:
        directory: None keeps them in a private temporary one until the server stops.
        file_bytes: Largest upload.
        total_bytes: Limit of all files together.
        num_files: Limit of the number of files.
        bytes_per_key: Limit of all files of one API key. Without keys only the totals count.
        files_per_key: Limit of the number of files of one API key.
    """

    directory: Annotated[
        Path | None,
        Option(
            "directory of uploaded files and batch outputs",
            flag="--files-dir",
            metavar="DIR",
            default_text="a temporary directory",
        ),
    ] = None
    file_bytes: Annotated[int, Option("largest uploaded file", Kind.BYTES, "--max-file-bytes")] = (
        100 * 1024 * 1024
    )
    total_bytes: Annotated[
        int, Option("total size of all files", Kind.BYTES, "--max-files-bytes")
    ] = 1024 * 1024 * 1024
    num_files: int = 1000
    bytes_per_key: Annotated[
        int,
        Option("total size of the files of one API key", Kind.BYTES, "--max-files-bytes-per-key"),
    ] = 512 * 1024 * 1024
    files_per_key: Annotated[
        int, Option("number of files of one API key", Kind.COUNT, "--max-files-per-key")
    ] = 500


class BatchOptions(msgspec.Struct, frozen=True):
    """How batches run.

    Attributes:
        concurrency: Lines of all batches that the engine computes at a time.
        num_lines: Requests of one batch, as many as OpenAI takes.
        num_active: Batches that have not ended, of all clients.
        active_per_key: Batches that have not ended, of one API key.
        num_kept: Batches that can be retrieved; beyond it, the key that has most ended batches
            loses the one that ended first.
        added_priority: Added to the lines' priority, which is between -10 and 10; lower runs
            first, so live requests do.
        num_tries: How often a line is sent to an engine that accepts none (during a restart).
        retry_s: The pause between two tries.
    """

    concurrency: Annotated[
        int,
        Option(
            "batch requests that run at the same time; other requests go first",
            Kind.COUNT,
            "--batch-concurrency",
        ),
    ] = 32
    num_lines: int = 50_000
    num_active: int = 64
    active_per_key: int = 32
    num_kept: int = 1000
    added_priority: int = 1000
    num_tries: int = 240
    retry_s: float = 0.5


_KEPT_BYTES = AllowedRange(least=64 * 1024)  # more than a client lags when it begins to read


class KeptStreamOptions(msgspec.Struct, frozen=True):
    """Responses that continue without their client, and are kept to be read again.

    Attributes:
        kept_s: After their end.
        stream_bytes: Of one response; a longer one loses its first bytes.
        total_bytes: Of all of them; beyond it, the key that holds most loses some.
        streams_per_key: Those that are written and those that have ended, of one API key; all
            clients together without keys.
    """

    kept_s: Annotated[
        float,
        Option(
            "how long a response in the background, of a conversation's id or of an idempotency "
            "key can be read again after its end",
            Kind.SECONDS,
            "--kept-stream-s",
            bounds=AT_LEAST_0,
        ),
    ] = 600.0
    stream_bytes: Annotated[
        int,
        Option(
            "size of one such response; the first bytes of a longer one cannot be read again",
            Kind.BYTES,
            "--max-kept-stream-bytes",
            bounds=_KEPT_BYTES,
        ),
    ] = 4 * 1024 * 1024
    total_bytes: Annotated[
        int,
        Option(
            "total size of such responses; beyond it, those of the API key with most are dropped",
            Kind.BYTES,
            "--max-kept-streams-bytes",
            bounds=_KEPT_BYTES,
        ),
    ] = 64 * 1024 * 1024
    streams_per_key: Annotated[
        int,
        Option(
            "such responses of one API key, running and ended ones",
            Kind.COUNT,
            "--max-kept-streams-per-key",
            bounds=AT_LEAST_1,
        ),
    ] = 1024

    def __post_init__(self) -> None:
        check_bounds(self)


class UsageOptions(msgspec.Struct, frozen=True):
    """What requests cost, and where their usage is recorded.

    Attributes:
        price_book: The prices; None for none.
        ledger: The SQLite file of the ledger; None for none.
    """

    price_book: Annotated[
        PriceBook | None,
        Option(
            "YAML file with the prices of tokens and of device time",
            Kind.PATH,
            default_text="no costs",
        ),
    ] = None
    ledger: Annotated[
        Path | None,
        Option(
            "SQLite file with the usage of every finished request, created if there is none; "
            "`quickstep usage` adds it up",
            Kind.PATH,
            "--usage-db",
            default_text="none",
        ),
    ] = None


class WarmPrompt(msgspec.Struct, frozen=True):
    """A prompt to compute at the start.

    Attributes:
        line: Of the file.
        body: That of a chat completion (`messages`) or a completion (`prompt`).
        api_keys: Names of the keys whose cache gets it; () for all of them.
    """

    line: int
    body: dict[str, Any]
    api_keys: tuple[str, ...] = ()


class ModelsOptions(msgspec.Struct, frozen=True):
    """Which of several models are in memory."""

    memory_bytes: Annotated[
        int | None,
        Option(
            "memory for all models that are loaded at the same time, KV caches included; others "
            "are loaded when they are named, and idle ones leave",
            Kind.BYTES,
            "--models-memory-bytes",
            default_text="the free memory",
            bounds=AT_LEAST_1,
        ),
    ] = None
    num_loaded: Annotated[
        int,
        Option(
            "how many of several models are loaded at the start, in their order and as far as "
            "they fit; pinned ones always are",
            Kind.COUNT,
            "--load-models",
            bounds=AT_LEAST_1,
        ),
    ] = 1
    idle_s: Annotated[
        float | None,
        Option(
            "after how long without requests a model's memory is given back; it is loaded again "
            "when it is named",
            Kind.SECONDS,
            "--model-idle-s",
            default_text="when another model needs the memory",
            bounds=AT_LEAST_0,
        ),
    ] = None
    overtake_s: Annotated[
        float,
        Option(
            "how long requests wait for a model while others are busy, before the least used of "
            "those takes no new requests and leaves",
            Kind.SECONDS,
            "--model-overtake-s",
            bounds=AT_LEAST_0,
        ),
    ] = MAX_OVERTAKE_S

    def __post_init__(self) -> None:
        check_bounds(self)


class ServerOptions(msgspec.Struct, frozen=True):
    """How models are served.

    Attributes:
        served_model_names: Names that clients may use; empty takes the engine's model name. The
            first one is in the responses.
        adapter_names: LoRA adapters, which clients may name as models.
        lora_dir: Each of its folders is another one.
        limits: Bounds on one request.
        connections: How long clients may take.
        api_keys: The clients that may call; without keys, every client may.
        allowed_hosts: Without keys, names with a dot that a request may give as its host, or `*`: a
            page of any such name can have it point here (DNS rebinding).
        cors: Which web pages may call.
        tls: The certificate, if there is one.
        deadlines: How long requests may take.
        field_rules: What happens to fields that have no effect.
        answers: What responses contain that a request did not request.
        metrics: Names of metrics, and targets of goodput.
        share_prefix_cache: Let the prompts of one API key hit the cached prompts of another, whose
            text they then can guess block by block.
        warm_prompts: What is computed before the server listens.
        root_path: The path of this server behind a proxy, which the proxy removes.
        access_log: One log line per request.
        files: The directory and limits of clients' files.
        batches: How batches run.
        usage: Prices, and the ledger of finished requests.
        stored_responses: Answers of the Responses API that are kept for `previous_response_id`.
        stored_response_bytes: All of them together, as JSON.
        stored_response_age_s: How long each is kept.
        response_store: The SQLite file in which they outlive the server; None for none.
        stall_s: `/health` and `/ready` fail when work is pending and no step has finished for this
            long; an engine's process that makes no progress for so long is replaced.
        drain_s: How long SIGTERM lets running requests continue before they are ended.
        tool_call_parser: Name of the format of tool calls, `none` for no tools; None takes what
            the chat template implies.
        reasoning_parser: The same for reasoning.
        page: Browsers get a page at `/`.
        models: Which of several models are in memory.
        routes: Fallback chains by the model's name.
        kept_streams: Responses that continue without their client.
    """

    served_model_names: Annotated[
        tuple[str, ...],
        Option(
            "model names that clients may use; responses have the first",
            flag="--served-model-name",
            metavar="NAME",
            default_text="the model's",
        ),
    ] = ()
    adapter_names: tuple[str, ...] = ()
    lora_dir: str | None = None
    limits: RequestLimits = msgspec.field(default_factory=RequestLimits)
    connections: ConnectionOptions = msgspec.field(default_factory=ConnectionOptions)
    api_keys: ApiKeys = msgspec.field(default_factory=ApiKeys)
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "without API keys: names with a dot by which clients may call the server; * allows all",
            metavar="NAME",
            default_text="none, since a web page can have a name of its own point to this server",
        ),
    ] = ()
    cors: CorsOptions = msgspec.field(default_factory=CorsOptions)
    tls: TlsOptions = msgspec.field(default_factory=TlsOptions)
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    field_rules: FieldRules = msgspec.field(default_factory=FieldRules)
    answers: AnswerOptions = msgspec.field(default_factory=AnswerOptions)
    metrics: MetricsOptions = msgspec.field(default_factory=MetricsOptions)
    share_prefix_cache: Annotated[
        bool,
        Option(
            "share cached prefixes between API keys; clients may then detect prompts of other "
            "keys by timing",
            default_text="each key has its own part of the cache",
        ),
    ] = False
    warm_prompts: Annotated[
        tuple[WarmPrompt, ...],
        Option(
            "prompts to compute and cache before the server listens: a .jsonl file of bodies "
            "of chat completions or completions, or else a text file with a prompt per line",
            Kind.PATH,
        ),
    ] = ()
    root_path: Annotated[
        str, Option("path prefix that a proxy removes, such as /llm", metavar="PATH")
    ] = ""
    access_log: Annotated[bool, Option("log one line per request")] = False
    files: FileOptions = msgspec.field(default_factory=FileOptions)
    batches: BatchOptions = msgspec.field(default_factory=BatchOptions)
    usage: UsageOptions = msgspec.field(default_factory=UsageOptions)
    stored_responses: Annotated[
        int,
        Option(
            "responses stored for previous_response_id; the least recently used are dropped",
            Kind.COUNT,
            "--max-stored-responses",
        ),
    ] = MAX_STORED_RESPONSES
    stored_response_bytes: Annotated[
        int, Option("total size of the stored responses", Kind.BYTES, "--max-stored-response-bytes")
    ] = MAX_STORED_RESPONSE_BYTES
    stored_response_age_s: Annotated[
        float,
        Option(
            "how long a response is stored",
            Kind.SECONDS,
            "--max-stored-response-age-s",
            bounds=POSITIVE,
        ),
    ] = MAX_STORED_RESPONSE_AGE_S
    response_store: Annotated[
        Path | None,
        Option(
            "SQLite file in which stored responses outlive the server, created if there is none",
            Kind.PATH,
            default_text="they are stored in memory only",
        ),
    ] = None
    stall_s: Annotated[
        float,
        Option(
            "how long the engine's process may make no progress while requests wait, before "
            "it is restarted",
            Kind.SECONDS,
            "--stall-timeout-s",
        ),
    ] = STALL_S
    drain_s: Annotated[
        float,
        Option(
            "how long running requests may continue after SIGTERM",
            Kind.SECONDS,
            "--drain-timeout-s",
        ),
    ] = 30.0
    tool_call_parser: Annotated[
        str | None,
        Option(
            "format of tool calls: hermes, llama3_json, pythonic, mistral, deepseek_v3, "
            "granite, harmony, qwen3_coder, glm45, minimax_m2, deepseek_v32, deepseek_v4, "
            "seed_oss, kimi_k2, gemma4, lfm2, or none",
            metavar="NAME",
            default_text="detected in the chat template",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Option(
            "format of reasoning: think, mistral, harmony, seed_oss, gemma4, or none",
            metavar="NAME",
            default_text="detected in the chat template",
        ),
    ] = None
    page: Annotated[bool, Option("no page for browsers at /", flag="--no-page", turns_off=True)] = (
        True
    )
    models: ModelsOptions = msgspec.field(default_factory=ModelsOptions)
    routes: Mapping[str, Route] = msgspec.field(default_factory=dict)
    kept_streams: KeptStreamOptions = msgspec.field(default_factory=KeptStreamOptions)

    def __post_init__(self) -> None:
        if not 0.0 <= self.drain_s <= _LONGEST_S:
            raise ConfigError(
                f"--drain-timeout-s is {self.drain_s:g}, it must be from 0 to {_LONGEST_S} (a week)"
            )
        for name in self.served_model_names:
            if not name or not name.isprintable():
                raise ConfigError(
                    f"--served-model-name is {name[:100]!a}, it must have characters that can be "
                    "printed, and no others"
                )
            if self.served_model_names.count(name) > 1:
                raise ConfigError(f"--served-model-name has {name!r} twice; give each name once")
        if not _LEAST_STALL_S <= self.stall_s <= _LONGEST_S:
            raise ConfigError(
                f"--stall-timeout-s is {self.stall_s:g}, it must be from {_LEAST_STALL_S:g} (an "
                f"engine's process reports ten times a second) to {_LONGEST_S} (a week)"
            )
        if self.reception_bytes < self.limits.body_bytes:
            raise ConfigError(
                f"--max-reception-bytes is {self.reception_bytes}, it must be at least "
                f"--max-body-bytes, which is {self.limits.body_bytes}"
            )
        self.check_limits(self.api_keys.limits)
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(
                f"--root-path is {self.root_path!r}, it must begin with a slash and not end in one"
            )

    @property
    def reception_bytes(self) -> int:
        """Bytes of bodies that are being received."""
        most = self.connections.max_reception_bytes
        return _BODIES_IN_RECEPTION * self.limits.body_bytes if most is None else most

    def check_limits(self, of_keys: Mapping[str, KeyLimits]) -> None:
        """Raise ConfigError for limits of keys that this server cannot keep."""
        for name, limits in of_keys.items():
            if limits.budgets and self.usage.ledger is None:
                raise ConfigError(
                    f"the API key {name} has a budget, which needs --usage-db FILE to last over a "
                    "restart"
                )
            if self.usage.price_book is None and any(budget.usd for budget in limits.budgets):
                raise ConfigError(
                    f"the API key {name} has a budget in dollars, which needs --price-book FILE"
                )
