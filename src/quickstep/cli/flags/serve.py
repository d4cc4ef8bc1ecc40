"""The flags of `quickstep serve` about HTTP: access, limits, stored files, TLS, log."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import template_fields
from quickstep.cli.flags.lora import adapter_names
from quickstep.cli.flags.parsing import bytes_size, positive_int, positive_or_all
from quickstep.cli.launch_ahead import KEY_VARIABLE
from quickstep.config import InputConfig, RecordingConfig, StreamConfig
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.engine.logs import LogSetup
    from quickstep.server.options import RequestLimits, ServerOptions, UsageOptions, WarmPrompt
    from quickstep.server.usage.api_keys import ApiKey, ApiKeys, Entries

_LOG = logging.getLogger("quickstep.cli")
_LEVELS = ("debug", "info", "warning", "error")

# flag -> (field of RequestLimits, type, default as text, help)
_LIMITS = (
    ("--max-body-bytes", "body_bytes", bytes_size, "4MiB", "largest request body"),
    ("--max-header-bytes", "header_bytes", bytes_size, "32KiB", "request line and headers"),
    ("--max-url-bytes", "url_bytes", bytes_size, "8KiB", "path and query"),
    ("--max-json-depth", "json_depth", positive_int, "64", "nesting depth of a body"),
    ("--max-json-values", "json_values", positive_int, "300000", "values in a body"),
    (
        "--max-json-containers",
        "json_containers",
        positive_int,
        "50000",
        "objects and lists in a body",
    ),
    ("--max-n", "n", positive_int, "32", "choices per prompt"),
    ("--max-prompts", "prompts", positive_int, "256", "prompts per request"),
    ("--max-sequences", "sequences", positive_int, "512", "prompts times choices per request"),
    (
        "--max-request-tokens",
        "tokens",
        positive_int,
        "8388608",
        "total tokens per request, prompts and outputs",
    ),
    ("--max-stop", "stop", positive_int, "16", "stop strings per request"),
    ("--max-stop-chars", "stop_chars", positive_int, "256", "characters per stop string"),
    ("--max-logit-bias", "logit_bias", positive_int, "1024", "entries of logit_bias"),
    (
        "--max-logprobs",
        "logprobs",
        positive_or_all,
        "20",
        "alternatives per token, -1 for no limit; a request with -1 has the complete vocabulary",
    ),
    ("--max-tools", "tools", positive_int, "128", "functions per request"),
)
# flag -> (field of InputConfig, type, default as text, help)
_INPUTS = (
    (
        "--max-schema-bytes",
        "schema_bytes",
        bytes_size,
        "512KiB",
        "size of a JSON schema or a grammar",
    ),
    ("--max-schema-depth", "schema_depth", positive_int, "32", "nesting depth of a JSON schema"),
    ("--max-regex-bytes", "regex_bytes", bytes_size, "2KiB", "size of a regular expression"),
    ("--grammar-timeout-s", "grammar_s", float, "2", "CPU time to compile a grammar, in seconds"),
    (
        "--template-timeout-s",
        "template_s",
        float,
        "1",
        "CPU time to render a chat template, in seconds",
    ),
)
_STREAMS = (
    ("--max-unread-deltas", positive_int, "256", "chunks of output"),
    ("--max-unread-bytes", bytes_size, "1MiB", "bytes of output"),
)
_SECONDS = (
    ("--keep-alive-timeout-s", "how long an idle connection stays open", 75.0),
    ("--header-timeout-s", "how long a request's headers may take to arrive", 20.0),
    ("--upload-timeout-s", "how long a request's body may take to arrive", 120.0),
    (
        "--slow-reader-timeout-s",
        "how long a client may leave an answer unread before its connection is cut",
        60.0,
    ),
    ("--stream-comment-s", "interval of comments in a stream without output; 0 for none", 15.0),
    (
        "--stall-timeout-s",
        "how long the engine's process may make no progress while requests wait, before it is "
        "restarted",
        30.0,
    ),
    ("--drain-timeout-s", "how long running requests may continue after SIGTERM", 30.0),
)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Register the flags in groups."""
    _add_file_flags(parser.add_argument_group("files and batches"))
    _add_access_flags(parser.add_argument_group("access"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_usage_flags(parser.add_argument_group("usage and costs"))
    _add_recording_flags(parser.add_argument_group("recording"))
    group = parser.add_argument_group("connections")
    group.add_argument(
        "--max-connections",
        type=positive_int,
        default=4096,
        metavar="N",
        help="open connections, beyond which the server responds 503; one address gets at most "
        "eight ninths (default: %(default)s, or less if the process may open fewer files)",
    )
    group.add_argument(
        "--max-reception-bytes",
        type=bytes_size,
        metavar="SIZE",
        help="bytes of request bodies that are being received, which the clients share; beyond "
        "them the server responds 503 before it reads a body (default: 64 times --max-body-bytes)",
    )
    for flag, text, default in _SECONDS:
        group.add_argument(
            flag,
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default: %(default)s)",
        )
    for flag, kind, default_text, text in _STREAMS:
        group.add_argument(
            flag,
            type=kind,
            default=kind(default_text),
            metavar="N" if kind is positive_int else "SIZE",
            help=f"{text} that a client may leave unread; its request is paused at the limit until "
            f"half of it is read (default: {default_text})",
        )
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="text, or one JSON object per line (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=_LEVELS,
        default="info",
        help="lowest level to log (default: %(default)s)",
    )
    group.add_argument(
        "--metrics-prefix",
        default="quickstep",
        metavar="NAME",
        help="what the names of metrics begin with; vllm gives vLLM's own names "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        action="extend",
        default=[],
        metavar="TARGET:MS",
        help="count the requests that keep all of these limits in milliseconds, such as ttft:500 "
        "tpot:50 e2el:10000 (default: none)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span per request to this OpenTelemetry receiver, such as "
        "http://localhost:4318/v1/traces (default: none; needs the extra otel)",
    )
    group.add_argument("--access-log", action="store_true", help="log one line per request")


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="KEY or NAME=KEY that clients must send, or NAME[LOW..HIGH]=KEY with the range of "
        "priorities for its requests (default range: -10..10); the environment variable "
        f"{KEY_VARIABLE} works too, and other users cannot see it (default: no key needed)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file of such keys, one per line (also NAME:KEY), or a .yaml file of keys with rate "
        "limits and budgets",
    )
    group.add_argument(
        "--admin-api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="keys like --api-key that may also call /debug and the other routes for operators "
        "(default: none; a server without any keys accepts them from its own machine)",
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="share cached prefixes between API keys; clients may then detect prompts of other "
        "keys by timing (default: each key has its own part of the cache)",
    )
    group.add_argument(
        "--warm-prompts",
        type=Path,
        metavar="FILE",
        help="prompts to compute and cache before the server listens: a .jsonl file of bodies of "
        "chat completions or completions, or else a text file with a prompt per line",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="without API keys: names with a dot by which clients may call the server; * allows "
        "all (default: none, since a web page can have a name of its own point to this server)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins of web pages that may call the server, or * (default: none)",
    )
    group.add_argument(
        "--allowed-methods",
        nargs="+",
        default=["*"],
        metavar="METHOD",
        help="methods that such pages may use (default: all)",
    )
    group.add_argument(
        "--allowed-headers",
        nargs="+",
        default=["*"],
        metavar="HEADER",
        help="headers that such pages may send (default: all)",
    )
    group.add_argument(
        "--allow-credentials", action="store_true", help="allow browsers to send cookies"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve https with this certificate")
    group.add_argument(
        "--ssl-keyfile", metavar="FILE", help="private key, unless it is in --ssl-certfile"
    )
    group.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="require client certificates that one of these signed",
    )
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="path prefix that a proxy removes, such as /llm",
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    for flag, name, kind, default_text, text in (*_LIMITS, *_INPUTS):
        default = kind(default_text)
        group.add_argument(
            flag, dest=f"limit_{name}", type=kind, default=default, metavar="N",
            help=f"{text} (default: {default_text})",
        )  # fmt: skip
    group.add_argument(
        "--unknown-fields",
        choices=["report", "refuse"],
        default="report",
        help="unknown fields of a request: ignore and report them, or respond 400 "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="respond 400 for unknown fields, and for known fields that have no effect",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="add the usage so far to every chunk of chat and completions, and end with a chunk of "
        "it",
    )
    group.add_argument(
        "--enable-per-request-metrics",
        action="store_true",
        help="add timings to responses of chat and completions",
    )
    group.add_argument(
        "--reasoning-budget-message",
        default="",
        metavar="TEXT",
        help="what a reasoning that has used up its budget ends with, for requests without "
        "reasoning_budget_message (default: only the closing tag)",
    )
    group.add_argument(
        "--default-timeout-s",
        type=float,
        metavar="SECONDS",
        help="time limit of requests without timeout_s; at the limit they return what is generated "
        "(default: none)",
    )
    group.add_argument(
        "--max-timeout-s",
        type=float,
        metavar="SECONDS",
        help="largest timeout_s of a request (default: none)",
    )
    group.add_argument(
        "--timeout-finish-reason",
        choices=("timeout", "length"),
        default="timeout",
        help="finish_reason of an answer that ends at its time limit; length is for clients that "
        "accept OpenAI's values only (default: %(default)s)",
    )


def _add_usage_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--price-book",
        type=Path,
        metavar="FILE",
        help="YAML file with the prices of tokens and of device time (default: no costs)",
    )
    group.add_argument(
        "--usage-db",
        type=Path,
        metavar="FILE",
        help="SQLite file with the usage of every finished request, created if there is none; "
        "`quickstep usage` adds it up (default: none)",
    )


def _add_recording_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--record",
        metavar="FILE",
        help="record the traffic for `quickstep replay`, `simulate` and `plan`: lengths, times and "
        "shared prefixes as JSON lines, without text; earlier ones are kept as FILE.1, FILE.2, ...",
    )
    group.add_argument(
        "--record-full",
        metavar="FILE",
        help="the same with prompts, sampling and outputs: a bug report that can be run again",
    )


def recording_config(args: argparse.Namespace) -> RecordingConfig | None:
    """Of `--record` or `--record-full`. Raises ConfigError for both."""
    if args.record is not None and args.record_full is not None:
        raise ConfigError("--record and --record-full are given; choose one")
    path = args.record or args.record_full
    return None if path is None else RecordingConfig(path, args.record_full is not None)


def _add_file_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--files-dir",
        metavar="DIR",
        help="directory of uploaded files and batch outputs (default: a temporary directory)",
    )
    group.add_argument(
        "--max-file-bytes",
        type=bytes_size,
        default=100 * 1024 * 1024,
        metavar="SIZE",
        help="largest uploaded file (default: 100MiB)",
    )
    group.add_argument(
        "--max-files-bytes",
        type=bytes_size,
        default=1024 * 1024 * 1024,
        metavar="SIZE",
        help="total size of all files (default: 1GiB)",
    )
    group.add_argument(
        "--max-files-bytes-per-key",
        type=bytes_size,
        default=512 * 1024 * 1024,
        metavar="SIZE",
        help="total size of the files of one API key (default: 512MiB)",
    )
    group.add_argument(
        "--max-files-per-key",
        type=positive_int,
        default=500,
        metavar="N",
        help="number of files of one API key (default: %(default)s)",
    )
    group.add_argument(
        "--max-stored-responses",
        type=positive_int,
        default=4096,
        metavar="N",
        help="responses stored for previous_response_id; the least recently used are dropped "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-stored-response-bytes",
        type=bytes_size,
        default=64 * 1024 * 1024,
        metavar="SIZE",
        help="total size of the stored responses (default: 64MiB)",
    )
    group.add_argument(
        "--batch-concurrency",
        type=positive_int,
        default=32,
        metavar="N",
        help="batch requests that run at the same time; other requests go first "
        "(default: %(default)s)",
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The options of the server. Raises ConfigError."""
    from quickstep.server.options import (
        AnswerOptions,
        BatchOptions,
        ConnectionOptions,
        CorsOptions,
        Deadlines,
        FieldRules,
        FileOptions,
        MetricsOptions,
        ServerOptions,
        TlsOptions,
    )

    api_keys = take_api_keys(args, os.environ)
    return ServerOptions(
        served_model_names=tuple(args.served_model_name),
        adapter_names=adapter_names(args),
        lora_dir=args.lora_dir,
        limits=_limits(args),
        connections=ConnectionOptions(
            max_connections=args.max_connections,
            max_reception_bytes=args.max_reception_bytes,
            keep_alive_s=args.keep_alive_timeout_s,
            header_s=args.header_timeout_s,
            upload_s=args.upload_timeout_s,
            slow_reader_s=args.slow_reader_timeout_s,
            comment_every_s=args.stream_comment_s,
        ),
        api_keys=api_keys,
        allowed_hosts=tuple(args.allowed_hosts),
        cors=CorsOptions(
            origins=tuple(args.allowed_origins),
            methods=tuple(args.allowed_methods),
            headers=tuple(args.allowed_headers),
            credentials=args.allow_credentials,
        ),
        tls=TlsOptions(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs),
        deadlines=Deadlines(args.default_timeout_s, args.max_timeout_s, args.timeout_finish_reason),
        field_rules=FieldRules(
            refuse_unknown=args.strict or args.unknown_fields == "refuse",
            refuse_hints=args.strict,
        ),
        answers=AnswerOptions(
            always_usage=args.enable_force_include_usage,
            request_metrics=args.enable_per_request_metrics,
            budget_message=args.reasoning_budget_message,
        ),
        metrics=MetricsOptions(
            args.metrics_prefix, _goodput(args.goodput), args.otlp_traces_endpoint
        ),
        share_prefix_cache=args.share_prefix_cache,
        warm_prompts=_warm_prompts(args, api_keys),
        root_path=args.root_path,
        access_log=args.access_log,
        files=FileOptions(
            directory=_files_directory(args.files_dir),
            file_bytes=args.max_file_bytes,
            total_bytes=args.max_files_bytes,
            bytes_per_key=args.max_files_bytes_per_key,
            files_per_key=args.max_files_per_key,
        ),
        batches=BatchOptions(concurrency=args.batch_concurrency),
        usage=_usage_options(args),
        stored_responses=args.max_stored_responses,
        stored_response_bytes=args.max_stored_response_bytes,
        stall_s=args.stall_timeout_s,
        drain_s=args.drain_timeout_s,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )


def _files_directory(name: str | None) -> Path | None:
    """The directory, which is made if there is none. Raises ConfigError."""
    if name is None:
        return None
    directory = Path(name)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_usable = bool(name) and os.access(directory, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"--files-dir {name} cannot be made: {error.strerror}") from None
    if not is_usable:
        raise ConfigError(f"--files-dir {name!r} is no directory that this user can write to")
    return directory


def input_config(args: argparse.Namespace) -> InputConfig:
    """The chat template, and the limits of preparing a request. Raises ConfigError."""
    values = vars(args)
    limits = {name: values[f"limit_{name}"] for _, name, *_ in _INPUTS}
    return InputConfig(**limits, **template_fields(args))


def stream_config(args: argparse.Namespace) -> StreamConfig:
    """The limits of unread output. Raises ConfigError."""
    return StreamConfig(args.max_unread_deltas, args.max_unread_bytes)


def log_setup(args: argparse.Namespace) -> LogSetup:
    """The log configuration of both processes."""
    from quickstep.engine.logs import LogSetup

    level = logging.getLevelNamesMapping()[args.log_level.upper()]
    return LogSetup(level, as_json=args.log_format == "json")


def take_api_keys(args: argparse.Namespace, environ: os._Environ[str] | dict[str, str]) -> ApiKeys:
    """The keys of flags, file and environment. Raises ConfigError.

    The variable is removed from the environment, because child processes do not need it.
    """
    from quickstep.server.usage.api_keys import ApiKeys

    variable = environ.pop(KEY_VARIABLE, None)
    if variable == "":
        raise ConfigError(
            f"{KEY_VARIABLE} is set and empty, so the server would be open: unset it, or set a key"
        )

    def read() -> Entries:
        keys: list[str | ApiKey] = list(args.api_key)
        if args.api_key_file is not None:
            keys += _keys_in(Path(args.api_key_file))
        if variable is not None:
            keys.append(variable)
        return keys, args.admin_api_key

    return ApiKeys(*read(), read)


def _keys_in(path: Path) -> list[str | ApiKey]:
    from quickstep.server.usage.api_keys import read_key_file

    entries, is_shared = read_key_file(path)
    if is_shared:
        _LOG.warning("other users can read or change %s: chmod 600 it", path)
    if not entries:
        raise ConfigError(f"--api-key-file {path} contains no key")
    return entries


def _warm_prompts(args: argparse.Namespace, api_keys: ApiKeys) -> tuple[WarmPrompt, ...]:
    if args.warm_prompts is None:
        return ()
    if not args.enable_prefix_caching:
        raise ConfigError("--warm-prompts needs the prefix cache; drop --no-enable-prefix-caching")
    from quickstep.server.operate.warm_prompts import read_warm_prompts

    return read_warm_prompts(args.warm_prompts, api_keys)


def _usage_options(args: argparse.Namespace) -> UsageOptions:
    from quickstep.server.options import UsageOptions
    from quickstep.server.usage.price_book import read_price_book

    if args.usage_db is not None:
        from quickstep.server.usage.ledger import check_ledger

        check_ledger(args.usage_db)
    return UsageOptions(
        price_book=None if args.price_book is None else read_price_book(args.price_book),
        ledger=args.usage_db,
    )


def _goodput(texts: Sequence[str]) -> dict[str, float]:
    """The targets of `--goodput`, in milliseconds. Raises ConfigError."""
    targets: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            targets[name] = float(number)
        except ValueError:
            raise ConfigError(
                f"--goodput {text!r} is no TARGET:MILLISECONDS, such as ttft:500"
            ) from None
    return targets


def _limits(args: argparse.Namespace) -> RequestLimits:
    from quickstep.server.options import RequestLimits

    values = vars(args)
    return RequestLimits(**{name: values[f"limit_{name}"] for _, name, *_ in _LIMITS})
