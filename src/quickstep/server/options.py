"""What the operator may set about the HTTP API, and the bounds on what a client may send.

Frozen sections made by `cli.serve` (or by a test) and read by the routes. Nothing here is about
the engine: its own limits (context, queue) are the scheduler's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quickstep.errors import ConfigError, RequestError
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.server.usage.limits import KeyLimits
from quickstep.server.usage.price_book import PriceBook


class RequestLimits(msgspec.Struct, frozen=True):
    """Bounds on one request; beyond one the answer is 400 (413 for the body, 414 for the URL, 431
    for the headers).

    Attributes:
        body_bytes: Size of a request body.
        header_bytes: Size of the request line and all headers.
        url_bytes: Size of the path with its query.
        json_depth: Nested objects and lists of a body.
        json_values: Values in the lists and objects of a body.
        json_containers: Objects and lists of a body.
        n: Choices per prompt.
        prompts: Prompts per request.
        sequences: Prompts times sequences of each (n, best_of or beams).
        tokens: Tokens of one request: its prompts, and all that its sequences may generate.
        stop: Stop strings per request.
        stop_chars: Characters of one stop string.
        stop_token_ids: Stop token ids, and allowed token ids, per request.
        logit_bias: Entries of `logit_bias`.
        bad_words: Bad words per request.
        bad_word_chars: Characters of one bad word.
        dry_breakers: DRY's sequence breakers per request.
        dry_breaker_chars: Characters of one breaker.
        logprobs: Alternatives per token; -1 for no bound. A request that sends -1 has the complete
            vocabulary, if the bound allows so many.
        logprob_token_ids: Tokens whose logprobs a request may request by id.
        budget_message_chars: Characters of `reasoning_budget_message`.
        label_chars: Characters of `user`, `cache_salt` and the other labels, which logs keep.
        tools: Functions that a request may offer to the model.
        metadata: Entries of `metadata`; keys have at most 64 and values at most 512 characters.
        detokenized: Tokens of one `/detokenize`.
        adapters: LoRA adapters that apply to one request together.
    """

    body_bytes: int = 4 * 1024 * 1024
    header_bytes: int = 32 * 1024
    url_bytes: int = 8 * 1024
    json_depth: int = 64
    json_values: int = 300_000
    json_containers: int = 50_000
    n: int = 32
    prompts: int = 256
    sequences: int = 512
    tokens: int = 8 * 1024 * 1024
    stop: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 1024
    logit_bias: int = 1024
    bad_words: int = 64
    bad_word_chars: int = 64
    dry_breakers: int = 16
    dry_breaker_chars: int = 32
    logprobs: int = 20
    logprob_token_ids: int = 128
    budget_message_chars: int = 1024
    label_chars: int = 512
    tools: int = 128
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

    keep_alive_s: float = 75.0
    header_s: float = 20.0
    upload_s: float = 120.0
    slow_reader_s: float = 60.0
    comment_every_s: float = 15.0
    max_connections: int = 4096
    max_reception_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_alive_s", "header_s", "upload_s", "slow_reader_s"):
            value = getattr(self, name)
            if not value > 0:
                flag = _FLAGS[name]
                raise ConfigError(f"{flag} is {value:g}, it must be above 0")
        if not self.comment_every_s >= 0:
            raise ConfigError(
                f"--stream-comment-s is {self.comment_every_s:g}, it must be at least 0"
            )


_FLAGS = {
    "keep_alive_s": "--keep-alive-timeout-s",
    "header_s": "--header-timeout-s",
    "upload_s": "--upload-timeout-s",
    "slow_reader_s": "--slow-reader-timeout-s",
}


class CorsOptions(msgspec.Struct, frozen=True):
    """Which web pages of other origins may call; none by default.

    Attributes:
        origins: Origins such as `https://example.com`, or `*`.
        methods: Allowed methods.
        headers: Allowed request headers, or `*`.
        credentials: Whether browsers may send cookies and the like along.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False

    def __post_init__(self) -> None:
        if self.credentials and "*" in self.origins:
            raise ConfigError(
                "--allow-credentials cannot go with --allowed-origins *: name the origins"
            )


class TlsOptions(msgspec.Struct, frozen=True):
    """Files in PEM form; no certificate, no TLS.

    Attributes:
        certfile: The server's certificate with its chain.
        keyfile: Its key; None if it is in `certfile`.
        ca_certs: With it, clients have to show a certificate that one of these signed.
    """

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None

    def __post_init__(self) -> None:
        if self.certfile is None and (self.keyfile or self.ca_certs):
            flag = "--ssl-keyfile" if self.keyfile else "--ssl-ca-certs"
            raise ConfigError(f"{flag} needs --ssl-certfile")


class Deadlines(msgspec.Struct, frozen=True):
    """How long a request may take, in seconds; then what was generated is the answer.

    Attributes:
        default_s: For requests without `timeout_s`; None for no end.
        max_s: The largest `timeout_s` of a request; None for no limit.
        finish_reason: The `finish_reason` of such an answer in OpenAI's API: `timeout`, or `length`
            for clients that know only OpenAI's own values.
    """

    default_s: float | None = None
    max_s: float | None = None
    finish_reason: str = "timeout"

    def __post_init__(self) -> None:
        for flag, value in (
            ("--default-timeout-s", self.default_s),
            ("--max-timeout-s", self.max_s),
        ):
            if value is not None and not value > 0:
                raise ConfigError(f"{flag} is {value:g}, it must be above 0")
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
    """What responses contain that a request did not request.

    Attributes:
        always_usage: Every chunk of chat and completions has the usage so far, and the last one
            nothing else.
        request_metrics: Responses of chat and completions include how long the request took.
        budget_message: What a reasoning that has used up its budget ends with, for requests without
            `reasoning_budget_message`; "" for the closing tag only.
    """

    always_usage: bool = False
    request_metrics: bool = False
    budget_message: str = ""


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

    prefix: str = "quickstep"
    goodput_ms: Mapping[str, float] = msgspec.field(default_factory=dict)
    otlp_traces_endpoint: str | None = None

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

    directory: Path | None = None
    file_bytes: int = 100 * 1024 * 1024
    total_bytes: int = 1024 * 1024 * 1024
    num_files: int = 1000
    bytes_per_key: int = 512 * 1024 * 1024
    files_per_key: int = 500


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

    concurrency: int = 32
    num_lines: int = 50_000
    num_active: int = 64
    active_per_key: int = 32
    num_kept: int = 1000
    added_priority: int = 1000
    num_tries: int = 240
    retry_s: float = 0.5


class UsageOptions(msgspec.Struct, frozen=True):
    """What requests cost, and where their usage is recorded.

    Attributes:
        price_book: The prices; None for none.
        ledger: The SQLite file of the ledger; None for none.
    """

    price_book: PriceBook | None = None
    ledger: Path | None = None


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


class ServerOptions(msgspec.Struct, frozen=True):
    """How one engine is served.

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
        stall_s: `/health` and `/ready` fail when work is pending and no step has finished for this
            long; an engine's process that makes no progress for so long is replaced.
        drain_s: How long SIGTERM lets running requests continue before they are ended.
        tool_call_parser: Name of the format of tool calls, `none` for no tools; None takes what
            the chat template implies.
        reasoning_parser: The same for reasoning.
    """

    served_model_names: tuple[str, ...] = ()
    adapter_names: tuple[str, ...] = ()
    lora_dir: str | None = None
    limits: RequestLimits = msgspec.field(default_factory=RequestLimits)
    connections: ConnectionOptions = msgspec.field(default_factory=ConnectionOptions)
    api_keys: ApiKeys = msgspec.field(default_factory=ApiKeys)
    allowed_hosts: tuple[str, ...] = ()
    cors: CorsOptions = msgspec.field(default_factory=CorsOptions)
    tls: TlsOptions = msgspec.field(default_factory=TlsOptions)
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    field_rules: FieldRules = msgspec.field(default_factory=FieldRules)
    answers: AnswerOptions = msgspec.field(default_factory=AnswerOptions)
    metrics: MetricsOptions = msgspec.field(default_factory=MetricsOptions)
    share_prefix_cache: bool = False
    warm_prompts: tuple[WarmPrompt, ...] = ()
    root_path: str = ""
    access_log: bool = False
    files: FileOptions = msgspec.field(default_factory=FileOptions)
    batches: BatchOptions = msgspec.field(default_factory=BatchOptions)
    usage: UsageOptions = msgspec.field(default_factory=UsageOptions)
    stored_responses: int = 4096
    stored_response_bytes: int = 64 * 1024 * 1024
    stall_s: float = 30.0
    drain_s: float = 30.0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

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
