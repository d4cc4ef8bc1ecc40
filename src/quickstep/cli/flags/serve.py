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
from quickstep.cli.flags.options import add_options, from_flags
from quickstep.cli.launch_ahead import KEY_VARIABLE
from quickstep.config import InputConfig, RecordingConfig, StreamConfig
from quickstep.core.fallback import read_routes
from quickstep.errors import ConfigError
from quickstep.server.options import (
    AnswerOptions,
    BatchOptions,
    ConnectionOptions,
    CorsOptions,
    Deadlines,
    FieldRules,
    FileOptions,
    KeptStreamOptions,
    MetricsOptions,
    ModelsOptions,
    RequestLimits,
    ServerOptions,
    TlsOptions,
    UsageOptions,
)

if TYPE_CHECKING:
    from quickstep.engine.logs import LogSetup
    from quickstep.server.options import WarmPrompt
    from quickstep.server.usage.api_keys import ApiKey, ApiKeys, Entries

_LOG = logging.getLogger("quickstep.cli")
_LEVELS = ("debug", "info", "warning", "error")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Register the flags in groups."""
    _add_file_flags(parser.add_argument_group("files and batches"))
    _add_access_flags(parser.add_argument_group("access"))
    _add_request_flags(parser.add_argument_group("requests"))
    add_options(parser.add_argument_group("usage and costs"), UsageOptions)
    _add_recording_flags(parser.add_argument_group("recording"))
    group = parser.add_argument_group("connections")
    add_options(group, ConnectionOptions)
    add_options(group, ServerOptions, "stall_s", "drain_s")
    add_options(group, StreamConfig)
    group = parser.add_argument_group("log")
    add_log_flags(group)
    add_options(group, MetricsOptions, "prefix", "otlp_traces_endpoint")
    group.add_argument(
        "--goodput",
        nargs="+",
        action="extend",
        default=[],
        metavar="TARGET:MS",
        help="count the requests that keep all of these limits in milliseconds, such as ttft:500 "
        "tpot:50 e2el:10000 (default: none)",
    )
    add_options(group, ServerOptions, "access_log", "page")


def add_log_flags(group: argparse._ArgumentGroup) -> None:
    """Register the flags of the log."""
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
    add_options(group, ServerOptions, "share_prefix_cache", "allowed_hosts", "root_path")
    add_options(group, ServerOptions, "warm_prompts", is_optional=True)
    add_options(group, CorsOptions)
    add_options(group, TlsOptions)


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    add_options(group, RequestLimits)
    add_options(group, InputConfig, "schema_bytes", "schema_depth", "regex_bytes")
    add_options(group, InputConfig, "grammar_s", "template_s")
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
    add_options(group, AnswerOptions)
    add_options(group, Deadlines)


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
    add_options(group, FileOptions)
    add_options(
        group,
        ServerOptions,
        *("stored_responses", "stored_response_bytes", "stored_response_age_s", "response_store"),
    )
    add_options(group, KeptStreamOptions)
    add_options(group, BatchOptions)


def server_options(args: argparse.Namespace) -> ServerOptions:
    """The options of the server. Raises ConfigError."""
    api_keys = take_api_keys(args, os.environ)
    if args.response_store is not None:
        from quickstep.server.responses.stored_file import check_response_file

        check_response_file(args.response_store)
    return from_flags(
        ServerOptions,
        args,
        adapter_names=adapter_names(args),
        lora_dir=args.lora_dir,
        limits=from_flags(RequestLimits, args),
        connections=from_flags(ConnectionOptions, args),
        api_keys=api_keys,
        cors=from_flags(CorsOptions, args),
        tls=from_flags(TlsOptions, args),
        deadlines=from_flags(Deadlines, args),
        field_rules=FieldRules(
            refuse_unknown=args.strict or args.unknown_fields == "refuse",
            refuse_hints=args.strict,
        ),
        answers=from_flags(AnswerOptions, args),
        metrics=from_flags(MetricsOptions, args, goodput_ms=_goodput(args.goodput)),
        warm_prompts=_warm_prompts(args, api_keys),
        files=from_flags(FileOptions, args, directory=_files_directory(args.files_dir)),
        batches=from_flags(BatchOptions, args),
        usage=_usage_options(args),
        models=from_flags(ModelsOptions, args),
        routes=read_routes(args.file_sections.get("routes", {})),
        kept_streams=from_flags(KeptStreamOptions, args),
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
    return from_flags(InputConfig, args, **template_fields(args))


def stream_config(args: argparse.Namespace) -> StreamConfig:
    """The limits of unread output. Raises ConfigError."""
    return from_flags(StreamConfig, args)


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
