"""The flags of `quickstep serve` that are about HTTP: who may call, bounds, TLS, log."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.file_flags import batch_options, file_options
from quickstep.cli.launch_ahead import KEY_VARIABLE
from quickstep.cli.parsing import bytes_size, positive_int, positive_or_all
from quickstep.config import InputConfig, StreamConfig
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.engine.logs import LogSetup
    from quickstep.server.api_keys import ApiKeys
    from quickstep.server.options import RequestLimits, ServerOptions

__all__ = [
    "add_serve_flags",
    "input_config",
    "log_setup",
    "server_options",
    "stream_config",
    "take_api_keys",
]

_LOG = logging.getLogger("quickstep.cli")
_LEVELS = ("debug", "info", "warning", "error")

# flag -> (field of RequestLimits, type, default as shown, help)
_LIMITS = (
    ("--max-body-bytes", "body_bytes", bytes_size, "4MiB", "largest request body"),
    ("--max-header-bytes", "header_bytes", bytes_size, "32KiB", "request line and headers"),
    ("--max-url-bytes", "url_bytes", bytes_size, "8KiB", "path and query"),
    ("--max-json-depth", "json_depth", positive_int, "64", "nested objects and lists of a body"),
    ("--max-n", "n", positive_int, "32", "choices per prompt"),
    ("--max-prompts", "prompts", positive_int, "256", "prompts per request"),
    ("--max-sequences", "sequences", positive_int, "512", "prompts times choices of a request"),
    (
        "--max-request-tokens",
        "tokens",
        positive_int,
        "8388608",
        "tokens that a request may take in all",
    ),
    ("--max-stop", "stop", positive_int, "16", "stop strings per request"),
    ("--max-stop-chars", "stop_chars", positive_int, "256", "characters of a stop string"),
    ("--max-logit-bias", "logit_bias", positive_int, "1024", "entries of logit_bias"),
    ("--max-logprobs", "logprobs", positive_or_all, "20", "alternatives per token, -1 for all"),
    ("--max-tools", "tools", positive_int, "128", "functions per request"),
)
# flag -> (field of InputConfig, type, default as shown, help)
_INPUTS = (
    ("--max-schema-bytes", "schema_bytes", bytes_size, "512KiB", "a JSON schema or a grammar"),
    ("--max-schema-depth", "schema_depth", positive_int, "32", "levels of a JSON schema"),
    ("--max-regex-bytes", "regex_bytes", bytes_size, "2KiB", "a regular expression"),
    ("--grammar-timeout-s", "grammar_s", float, "2", "processor time to compile a grammar"),
    ("--template-timeout-s", "template_s", float, "1", "processor time to render a conversation"),
)
_STREAMS = (
    ("--max-unread-deltas", positive_int, "256", "pieces of output"),
    ("--max-unread-bytes", bytes_size, "1MiB", "output"),
)
_SECONDS = (
    ("--keep-alive-timeout-s", "an idle connection between two requests", 5.0),
    ("--header-timeout-s", "until a request's headers are there", 20.0),
    ("--upload-timeout-s", "until a request's body is there", 120.0),
    ("--slow-reader-timeout-s", "a stream that its client does not read; then it is ended", 60.0),
    ("--stream-comment-s", "after which a silent stream gets a comment; 0 for never", 15.0),
    (
        "--stall-timeout-s",
        "without progress of the engine's process while requests wait for it; then another is "
        "started in its place",
        30.0,
    ),
    ("--drain-timeout-s", "what SIGTERM leaves to running requests", 30.0),
)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Register the flags in groups."""
    _add_access_flags(parser.add_argument_group("access"))
    _add_request_flags(parser.add_argument_group("requests"))
    group = parser.add_argument_group("connections")
    group.add_argument(
        "--max-connections",
        type=positive_int,
        default=4096,
        metavar="N",
        help="open at a time; beyond them the answer is 503 (default: %(default)s, less where the "
        "process may open fewer files)",
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
            help=f"{text} that a client may leave unread; beyond it its request is paused until "
            f"half is left (default: {default_text})",
        )
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="lines of text, or one JSON object a line (default: %(default)s)",
    )
    group.add_argument(
        "--log-level", choices=_LEVELS, default="info", help="least level (default: %(default)s)"
    )
    group.add_argument("--access-log", action="store_true", help="one line per request")


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY",
        help="KEY or NAME=KEY that clients have to send, or NAME[LOW..HIGH]=KEY with the range of "
        "its requests' priorities (default: -10..10); also taken from the variable "
        f"{KEY_VARIABLE}, which no other user can see (default: everybody may call)",
    )
    group.add_argument(
        "--api-key-file", metavar="FILE", help="such keys, one in each line (NAME:KEY as well)"
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="let prompts of one API key hit those of another; their clients can then find out "
        "each other's prompts (default: each key has its own part of the cache)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="web pages that browsers may call from, or * (default: none)",
    )
    group.add_argument("--allowed-methods", nargs="+", default=["*"], metavar="METHOD")
    group.add_argument("--allowed-headers", nargs="+", default=["*"], metavar="HEADER")
    group.add_argument(
        "--allow-credentials", action="store_true", help="let browsers send cookies along"
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve https with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="its key, unless it stands beside it")
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="clients need a certificate signed by one of these"
    )
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="path that a proxy in front cuts off, such as /llm",
    )


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    for flag, name, kind, shown, text in (*_LIMITS, *_INPUTS):
        default = kind(shown)
        group.add_argument(
            flag, dest=f"limit_{name}", type=kind, default=default, metavar="N",
            help=f"{text} (default: {shown})",
        )  # fmt: skip
    group.add_argument(
        "--unknown-fields",
        choices=["report", "refuse"],
        default="report",
        help="of a request: drop them and report them, or answer 400 (default: %(default)s)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="answer 400 for unknown fields and for hints that have no effect",
    )
    group.add_argument(
        "--enable-force-include-usage",
        action="store_true",
        help="every stream of chat and completions ends with its usage",
    )
    group.add_argument(
        "--enable-per-request-metrics",
        action="store_true",
        help="answers of chat and completions tell how long their parts took",
    )
    group.add_argument(
        "--default-timeout-s",
        type=float,
        metavar="SECONDS",
        help="for requests without timeout_s; then what they have is the answer (default: none)",
    )
    group.add_argument(
        "--max-timeout-s", type=float, metavar="SECONDS", help="largest timeout_s (default: none)"
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The flags as options. Raises ConfigError."""
    from quickstep.server.options import (
        AnswerOptions,
        ConnectionOptions,
        CorsOptions,
        Deadlines,
        FieldRules,
        ServerOptions,
        TlsOptions,
    )

    if not args.drain_timeout_s >= 0:
        raise ConfigError(f"--drain-timeout-s is {args.drain_timeout_s:g}, it must be at least 0")
    return ServerOptions(
        served_model_names=tuple(args.served_model_name),
        limits=_limits(args),
        connections=ConnectionOptions(
            max_connections=args.max_connections,
            keep_alive_s=args.keep_alive_timeout_s,
            header_s=args.header_timeout_s,
            upload_s=args.upload_timeout_s,
            slow_reader_s=args.slow_reader_timeout_s,
            comment_every_s=args.stream_comment_s,
        ),
        api_keys=take_api_keys(args, os.environ),
        cors=CorsOptions(
            origins=tuple(args.allowed_origins),
            methods=tuple(args.allowed_methods),
            headers=tuple(args.allowed_headers),
            credentials=args.allow_credentials,
        ),
        tls=TlsOptions(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs),
        deadlines=Deadlines(args.default_timeout_s, args.max_timeout_s),
        field_rules=FieldRules(
            refuse_unknown=args.strict or args.unknown_fields == "refuse",
            refuse_hints=args.strict,
        ),
        answers=AnswerOptions(
            always_usage=args.enable_force_include_usage,
            request_metrics=args.enable_per_request_metrics,
        ),
        share_prefix_cache=args.share_prefix_cache,
        root_path=args.root_path,
        access_log=args.access_log,
        files=file_options(args),
        batches=batch_options(args),
        stored_responses=args.max_stored_responses,
        stored_response_bytes=args.max_stored_response_bytes,
        stall_s=args.stall_timeout_s,
        drain_s=args.drain_timeout_s,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )


def input_config(args: argparse.Namespace) -> InputConfig:
    """What preparing a request may take. Raises ConfigError."""
    values = vars(args)
    return InputConfig(**{name: values[f"limit_{name}"] for _, name, *_ in _INPUTS})


def stream_config(args: argparse.Namespace) -> StreamConfig:
    """What a client may leave unread. Raises ConfigError."""
    return StreamConfig(args.max_unread_deltas, args.max_unread_bytes)


def log_setup(args: argparse.Namespace) -> LogSetup:
    """How both processes log."""
    from quickstep.engine.logs import LogSetup

    level = logging.getLevelNamesMapping()[args.log_level.upper()]
    return LogSetup(level, as_json=args.log_format == "json")


def take_api_keys(args: argparse.Namespace, environ: os._Environ[str] | dict[str, str]) -> ApiKeys:
    """The keys of flags, file and environment, which are taken out of the environment: the
    engine's process has no use for them. Raises ConfigError.
    """
    from quickstep.server.api_keys import ApiKeys, read_key_file

    given = list(args.api_key)
    if args.api_key_file is not None:
        entries, is_shared = read_key_file(Path(args.api_key_file))
        if is_shared:
            _LOG.warning("other users can read or change %s: chmod 600 it", args.api_key_file)
        if not entries:
            raise ConfigError(f"--api-key-file {args.api_key_file} holds no key")
        given += entries
    variable = environ.pop(KEY_VARIABLE, "")
    if variable:
        given.append(variable)
    return ApiKeys(given)


def _limits(args: argparse.Namespace) -> RequestLimits:
    from quickstep.server.options import RequestLimits

    values = vars(args)
    return RequestLimits(**{name: values[f"limit_{name}"] for _, name, *_ in _LIMITS})
