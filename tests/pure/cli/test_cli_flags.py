"""The command line without an engine: flags, sizes, suggestions, exit codes."""

import argparse
import logging
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from quickstep.cli import (
    batch,
    bench,
    calibrate,
    chat,
    generate,
    plan,
    serve,
    simulate,
    verify,
)
from quickstep.cli.flags.engine import engine_config, model_of
from quickstep.cli.flags.lora import lora_config
from quickstep.cli.flags.parsing import Parser, bytes_size, token_count
from quickstep.cli.flags.sampling import print_defaults, sampling_params
from quickstep.cli.flags.serve import input_config, log_setup, server_options, stream_config
from quickstep.cli.main import COMMANDS, main
from quickstep.config import (
    ContentFormat,
    EngineConfig,
    InputConfig,
    LoRAConfig,
    PolicyName,
    SchedulerConfig,
    StreamConfig,
)
from quickstep.errors import ConfigError, RequestError
from quickstep.server.options import (
    AnswerOptions,
    ConnectionOptions,
    CorsOptions,
    Deadlines,
    FieldRules,
    RequestLimits,
    TlsOptions,
    UsageOptions,
)


def parsed(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="quickstep")
    subparsers = parser.add_subparsers()
    serve.add_parser(subparsers)
    generate.add_parser(subparsers)
    return parser.parse_args(argv)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quickstep", *argv]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def one_sentence(done: subprocess.CompletedProcess[str]) -> str:
    """What a user reads of a mistake: one line, nothing on stdout."""
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_the_flags_of_usage_read_and_check_their_files(tmp_path: Path) -> None:
    assert server_options(parsed("serve")).usage == UsageOptions()
    prices, database = tmp_path / "prices.yaml", tmp_path / "usage.db"
    prices.write_text("models: {demo: {output_per_million: 2}}")
    flags = ("serve", "--price-book", str(prices), "--usage-db", str(database))
    usage = server_options(parsed(*flags)).usage
    assert usage.price_book is not None
    assert usage.price_book.price("demo").output_per_million == 2
    assert usage.ledger == database and database.is_file()
    for flag, message in (("--usage-db", "not a database"), ("--price-book", "no price")):
        (tmp_path / "bad").write_text("# no content\n" * 100)
        with pytest.raises(ConfigError, match=message):
            server_options(parsed("serve", flag, str(tmp_path / "bad")))


def test_the_flags_of_adapters() -> None:
    assert lora_config(parsed("serve")) is None
    assert lora_config(parsed("serve", "--enable-lora")) == LoRAConfig()
    flags = ("serve", "--lora-modules", "a=/x", "b=y=z", "--max-loras", "3", "--max-lora-rank", "8")
    assert lora_config(parsed(*flags)) == LoRAConfig((("a", "/x"), ("b", "y=z")), 3, 8)
    assert server_options(parsed(*flags)).adapter_names == ("a", "b")
    flags = ("--lora-dir", "/", "--max-cpu-loras", "99", "--lora-pin", "p", "q")
    flags += ("--lora-memory-bytes", "2M", "--lora-allowed-dirs", "/")
    found = lora_config(parsed("serve", *flags))
    assert found == LoRAConfig((), 64, 256, 99, "/", ("p", "q"), 2_000_000, ("/",))
    assert found.client_dirs == ("/", "/") and found.num_host_loras == 35
    for values, part in (
        (("a",), "NAME=DIR"),
        (("=x",), "NAME=DIR"),
        (('{"name": "a"}',), "no adapter in JSON.*`path`"),
        (('{"name": "a", "path": "b", "rank": 3}',), "no adapter in JSON.*`rank`"),
        (('["a"]',), "no adapter in JSON"),
        (("{a=b}",), "no adapter in JSON"),
        (('{"name": "a", "path": "x"}', "a=y"), "twice"),
        (("a=x", "a=y"), "twice"),
        (("a=x", "--max-loras", "3", "--max-cpu-loras", "2"), "--max-cpu-loras"),
        (("a=x", "--max-loras", "2", "--lora-pin", "a", "b"), "--lora-pin"),
        (("a=x", "--lora-dir", "/absent"), "--lora-dir is /absent"),
        (("a=x", "--lora-allowed-dirs", "/absent"), "--lora-allowed-dirs is /absent"),
    ):
        with pytest.raises(ConfigError, match=part):
            lora_config(parsed("serve", "--lora-modules", *values))


def test_adapters_may_be_in_vllms_json(caplog: pytest.LogCaptureFixture) -> None:
    one = '{"name": "a", "path": "/x", "base_model_name": "m"}'
    more = '[{"name": "b", "path": "y=z"}, {"name": "c", "path": "w", "base_model_name": "served"}]'
    flags = ("serve", "m", "--served-model-name", "served", "--lora-modules", one, "d=/v", more)
    found = lora_config(parsed(*flags))
    assert found is not None
    assert found.modules == (("a", "/x"), ("d", "/v"), ("b", "y=z"), ("c", "w"))
    assert server_options(parsed(*flags)).adapter_names == ("a", "d", "b", "c")
    assert caplog.text == ""
    server_options(parsed("serve", "other", "--lora-modules", one))
    assert "base_model_name m of a is no name of this server's model" in caplog.text


def test_the_adapters_in_memory_limit_those_in_compute_memory_unless_both_are_given() -> None:
    for num_cpu, num_computing in ((2, 2), (64, 64), (99, 64)):
        found = lora_config(parsed("serve", "--enable-lora", "--max-cpu-loras", str(num_cpu)))
        assert found is not None
        assert (found.max_loras, found.num_host_loras) == (num_computing, num_cpu - num_computing)


def test_no_flags_give_the_default_configuration() -> None:
    """Only the queue of a server has a limit."""
    served = EngineConfig(scheduler=SchedulerConfig(max_waiting=16_384))
    assert engine_config(parsed("serve"), "demo") == served
    assert engine_config(parsed("generate", "a"), "demo") == EngineConfig()


def test_every_engine_flag_reaches_the_configuration() -> None:
    args = parsed(
        *("serve", "--dtype", "half", "--device", "cpu", "--offline", "--threads", "2"),
        *("--revision", "r1", "--max-model-len", "8k", "--block-size", "32", "--num-blocks", "99"),
        *("--kv-cache-memory-bytes", "2GiB", "--memory-bytes", "4G"),
        *("--no-enable-prefix-caching", "--max-num-seqs", "7", "--max-num-batched-tokens", "512"),
        *("--max-waiting", "5", "--scheduling-policy", "prefill-first", "--pipeline-depth", "2"),
        *("--inter-token-target-s", "0.5"),
    )
    config = engine_config(args, "m", seed=3)
    load, cache, scheduler = config.load, config.cache, config.scheduler
    assert (load.model, load.dtype, load.device, load.revision) == ("m", "float16", "cpu", "r1")
    assert (load.offline, load.num_threads) == (True, 2)
    assert (cache.block_size, cache.num_blocks, cache.prefix_caching) == (32, 99, False)
    assert cache.kv_cache_bytes == 2 * 2**30
    assert config.memory_bytes == 4 * 10**9
    assert config.seed == 3
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (7, 512)
    assert (config.max_model_len, scheduler.max_waiting) == (8000, 5)
    assert (scheduler.policy, scheduler.pipeline_depth) == (PolicyName.PREFILL_FIRST, 2)
    assert scheduler.inter_token_target_s == 0.5


def test_no_flags_give_the_default_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUICKSTEP_API_KEY", raising=False)
    options = server_options(parsed("serve"))
    assert not options.api_keys
    assert options.limits == RequestLimits()
    assert (options.connections, options.cors, options.tls) == (
        ConnectionOptions(),
        CorsOptions(),
        TlsOptions(),
    )
    assert options.deadlines == Deadlines()
    assert options.field_rules == FieldRules()
    assert options.answers == AnswerOptions()
    args = parsed(*("serve", "--enable-force-include-usage", "--enable-per-request-metrics"))
    assert server_options(args).answers == AnswerOptions(True, True)
    args = parsed("serve", "--reasoning-budget-message", "Enough.")
    assert server_options(args).answers == AnswerOptions(budget_message="Enough.")
    assert server_options(parsed("serve", "--thinking-budget", "64")).answers.thinking_budget == 64
    assert server_options(parsed("serve", "--max-logprobs", "-1")).limits.logprobs == -1
    assert server_options(parsed("serve", "--strict")).field_rules == FieldRules(True, True)
    assert input_config(parsed("serve")) == InputConfig()
    assert stream_config(parsed("serve")) == StreamConfig()


def test_an_empty_key_in_the_environment_is_no_open_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKSTEP_API_KEY", "")
    with pytest.raises(ConfigError, match="set and empty"):
        server_options(parsed("serve"))


def test_every_server_flag_reaches_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKSTEP_API_KEY", "third")
    args = parsed(
        *("serve", "--api-key", "a=first", "second", "--allowed-origins", "https://a", "https://b"),
        *("--allowed-methods", "POST", "--allowed-headers", "x-a", "--allow-credentials"),
        *("--ssl-certfile", "c", "--ssl-keyfile", "k", "--ssl-ca-certs", "ca"),
        *("--allowed-hosts", "box", "box.example"),
        *("--root-path", "/llm", "--unknown-fields", "refuse", "--access-log"),
        *("--default-timeout-s", "5", "--max-timeout-s", "9", "--drain-timeout-s", "1"),
        *("--keep-alive-timeout-s", "1", "--header-timeout-s", "2", "--upload-timeout-s", "3"),
        *("--max-unread-deltas", "7", "--max-unread-bytes", "2k"),
        *("--slow-reader-timeout-s", "4", "--stream-comment-s", "0", "--max-connections", "77"),
        *("--max-reception-bytes", "4Ki"),
        *("--max-body-bytes", "1Ki", "--max-header-bytes", "2Ki", "--max-url-bytes", "3Ki"),
        *("--max-json-depth", "4", "--max-json-values", "70", "--max-json-containers", "60"),
        *("--max-n", "5", "--max-prompts", "6", "--max-stop", "7"),
        *("--max-stop-chars", "8", "--max-logit-bias", "9", "--max-logprobs", "3"),
        *("--max-tools", "2", "--max-schema-bytes", "1k", "--max-schema-depth", "3"),
        *("--max-regex-bytes", "2k", "--grammar-timeout-s", "0.5", "--template-timeout-s", "3"),
    )
    options = server_options(args)
    # the SHA-256 of `second` begins so, and that of `third`
    assert options.api_keys.names == ("a", "key-16367aacb67a", "key-b1e99324505b")
    assert "QUICKSTEP_API_KEY" not in os.environ
    assert options.cors == CorsOptions(("https://a", "https://b"), ("POST",), ("x-a",), True)
    assert options.tls == TlsOptions("c", "k", "ca")
    assert options.allowed_hosts == ("box", "box.example")
    assert (options.root_path, options.field_rules) == ("/llm", FieldRules(refuse_unknown=True))
    assert (options.access_log, options.drain_s) == (True, 1)
    assert options.deadlines == Deadlines(5, 9)
    assert options.connections == ConnectionOptions(1, 2, 3, 4, 0, 77, 4096)
    limits = options.limits
    assert (limits.body_bytes, limits.header_bytes, limits.url_bytes) == (1024, 2048, 3072)
    assert (limits.json_depth, limits.n, limits.prompts) == (4, 5, 6)
    assert (limits.json_values, limits.json_containers) == (70, 60)
    assert (limits.stop, limits.stop_chars, limits.logit_bias) == (7, 8, 9)
    assert (limits.logprobs, limits.tools) == (3, 2)
    assert input_config(args) == InputConfig(1000, 3, 2000, 0.5, 3)
    assert stream_config(args) == StreamConfig(7, 2000)


def test_the_log_flags_reach_both_processes() -> None:
    setup = log_setup(parsed("serve", "--log-format", "json", "--log-level", "warning"))
    assert (setup.as_json, setup.level) == (True, logging.WARNING)


@pytest.mark.parametrize(("place", "flag"), [("m", ""), ("", "m"), ("m", "m")])
@pytest.mark.parametrize(
    ("command", "others"),
    [
        (serve, ()),
        (chat, ()),
        (batch, ("-i", "in", "-o", "out")),
        (calibrate, ()),
        (verify, ()),
        (plan, ()),
        (simulate, ()),
        (generate, ("a prompt",)),
    ],
    ids=lambda value: getattr(value, "__name__", "").rpartition(".")[2],
)
def test_the_model_has_a_place_and_a_flag_in_every_command(
    command: ModuleType, others: tuple[str, ...], place: str, flag: str
) -> None:
    argv = [*([place] if place else []), *others, *(["--model", flag] if flag else [])]
    parser = Parser(prog="quickstep")
    command.add_parser(parser.add_subparsers())
    name = command.__name__.rpartition(".")[2]
    args = parser.parse_args([name, *argv])
    assert model_of(args) == "m"
    if name == "generate":
        assert args.prompt == "a prompt"


@pytest.mark.parametrize("kind", ["step", "latency", "throughput", "serve", "accuracy"])
def test_the_model_has_a_place_and_a_flag_in_every_benchmark(kind: str) -> None:
    parser = Parser(prog="quickstep")
    bench.add_parser(parser.add_subparsers())
    assert model_of(parser.parse_args(["bench", kind, "m"])) == "m"
    assert model_of(parser.parse_args(["bench", kind, "--model", "m"])) == "m"


def test_a_plan_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "simulate"):
        assert main([command]) == 2
        assert f"no model is named; see quickstep {command} --help" in capsys.readouterr().err


def test_the_model_is_the_demo_unless_named() -> None:
    assert model_of(parsed("serve")) == "demo"


def test_bad_engine_values_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="--block-size is 12"):
        engine_config(parsed("serve", "--block-size", "12"), "demo")


def test_a_chat_template_is_a_file_or_itself_and_reaches_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    for flag in ("--chat-template", "--chat-template-file"):
        for source in (str(file), "{{ messages }}"):
            inputs = input_config(parsed("serve", flag, source))
            assert inputs == InputConfig(chat_template="{{ messages }}")
    inputs = input_config(parsed("serve", "--chat-template-content-format", "openai"))
    assert inputs == InputConfig(content_format=ContentFormat.OPENAI)


def test_sampling_flags_go_over_the_checkpoints_defaults() -> None:
    args = parsed("generate", "hi", "--top-k", "3", "--stop", "a", "--stop", "b", "--seed", "5")
    sampling = sampling_params(args, {"top_k": 9, "top_p": 0.5}, n=2)
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (3, 0.5, 0.0)
    assert (sampling.stop, sampling.seed, sampling.n) == (("a", "b"), 5, 2)


def test_a_flag_goes_before_the_preset_and_the_preset_before_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.8, "top_k": 20}

    def of(*flags: str) -> tuple[float, float, int]:
        sampling = sampling_params(parsed("generate", "hi", *flags), defaults)
        return sampling.temperature, sampling.top_p, sampling.top_k

    assert of() == (0.6, 0.8, 20)
    assert of("--preset", "brainstorm") == (1.2, 1.0, 20)
    assert of("--preset", "brainstorm", "--temperature", "0") == (0.0, 1.0, 20)
    assert sampling_params(parsed("generate", "hi"), {}).temperature == 0.0


def test_every_sampling_flag_reaches_the_parameters() -> None:
    args = parsed(
        *("generate", "hi", "--typical-p", "0.9", "--xtc-probability", "0.5"),
        *("--xtc-threshold", "0.2", "--dry-multiplier", "0.8", "--dry-base", "2"),
        *("--dry-allowed-length", "3", "--dry-range", "64", "--dry-sequence-breakers", "."),
        *("--bad-words", "no", "--bad-words", "never", "--thinking-budget", "99"),
    )
    sampling = sampling_params(args, {})
    assert (sampling.typical_p, sampling.xtc_probability, sampling.xtc_threshold) == (0.9, 0.5, 0.2)
    assert (sampling.dry_multiplier, sampling.dry_base) == (0.8, 2.0)
    assert (sampling.dry_allowed_length, sampling.dry_range) == (3, 64)
    assert sampling.dry_sequence_breakers == (".",)
    assert sampling.bad_words == ("no", "never")
    assert sampling.thinking_budget == 99


def test_the_models_own_defaults_are_printed_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_defaults({"temperature": 0.6, "max_tokens": 9})
    print_defaults({})
    assert capsys.readouterr().err == "the model's own sampling defaults: temperature 0.6\n"


def test_bad_sampling_values_are_request_errors() -> None:
    with pytest.raises(RequestError, match="temperature is -1"):
        sampling_params(parsed("generate", "hi", "--temperature", "-1"), {})


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("1k", 1000), ("1Ki", 1024), ("1.5GiB", 3 * 2**29), ("2 MB", 2 * 10**6)],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1ib", "1x", "1e3", "k"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        bytes_size(text)


@pytest.mark.parametrize(("text", "count"), [("8192", 8192), ("8k", 8000), ("8Ki", 8192)])
def test_counts(text: str, count: int) -> None:
    assert token_count(text) == count


@pytest.mark.parametrize("text", ["0", "8kb", "many"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        token_count(text)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serve", "--prot", "80"], "there is no flag --prot; did you mean --port?"),
        (["serve", "m", "--max-model-length=8"], "did you mean --max-model-len?"),
        (["serve", "--max-num-seq", "8"], "did you mean --max-num-seqs?"),
        (["serve", "--zzz"], "there is no flag --zzz; see quickstep serve --help"),
        (["verify", "a", "b"], "'b' is one argument too many; see quickstep verify --help"),
        (["serve", "a", "b"], "the model 'a' is no directory, no .gguf file"),
        (["serv"], "did you mean serve?"),
        (["serve", "--dtype", "float61"], "did you mean float16?"),
        (["serve", "--max-num-seqs", "0"], "argument --max-num-seqs: 0 is below 1"),
        (["serve", "--max-num-seqs", "9" * 19], "9999999999999999999 is above 2^63 - 1"),
        (["serve", "--max-body-bytes", "9" * 400], "999 is above 2^63 - 1"),
        (["verify", "--adapters", "-1"], "argument --adapters: -1 is below 0"),
        (["serve", "--kv-cache-memory-bytes", "lots"], "'lots' is not a size"),
        (["generate"], "the following arguments are required: PROMPT"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_help_and_version_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "quickstep 0.1.0\n"
    assert main(["--help"]) == 0
    assert main(["serve", "--help"]) == 0
    assert "--max-model-len" in capsys.readouterr().out


def test_a_wrong_flag_is_exit_code_2_of_the_process() -> None:
    done = run("serve", "--prot", "80")
    assert done.returncode == 2
    assert one_sentence(done) == ("quickstep serve: there is no flag --prot; did you mean --port?")


def test_a_port_in_use_is_one_sentence_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in one_sentence(done)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["serve", "--port", "70000"], "--port is 70000"),
        (["serve", "--host", "no.such.host.invalid"], "is not an address"),
        (["serve", "a", "--model", "b"], "MODEL is a and --model is b"),
        (["serve", "--drain-timeout-s", "-1"], "--drain-timeout-s is -1"),
        (["serve", "--stall-timeout-s", "0.5"], "--stall-timeout-s is 0.5"),
        (["serve", "--drain-timeout-s", "inf"], "--drain-timeout-s is inf"),
        (["serve", "--stall-timeout-s", "inf"], "--stall-timeout-s is inf"),
        (["serve", "--stall-timeout-s", "nan"], "--stall-timeout-s is nan"),
        (["serve", "--seed", "99999999999999999999999"], "--seed is 99999999999999999999999"),
        (["generate", "hi", "--threads", "10000"], "--threads is 10000, it must be from 1 to 1024"),
        (["serve", "--files-dir", "/proc/x"], "--files-dir /proc/x cannot be made"),
        (["serve", "--files-dir", __file__], "cannot be made: File exists"),
        (["serve", "--files-dir", ""], "--files-dir '' is no directory"),
        (["serve", "--max-body-bytes", "0"], "--max-body-bytes is 0"),
        (["serve", "--max-url-bytes", "0"], "--max-url-bytes is 0"),
        (["serve", "--max-header-bytes", "1"], "--max-header-bytes is 1"),
        (["serve", "--served-model-name", ""], "--served-model-name is ''"),
        (["serve", "--served-model-name", "a\nb"], "--served-model-name is 'a\\nb'"),
        (["serve", "--served-model-name", "a", "b", "a"], "--served-model-name has 'a' twice"),
        (["serve", "--enable-lora", "--lora-pin", "nope"], "--lora-pin names 'nope'"),
        (["serve", "--lora-modules", "a\nb=/x"], "the name 'a\\nb' has characters"),
        (["serve", "--lora-modules", f"{'a' * 256}=/x"], "has 256 bytes, the limit is 255"),
        (["serve", "--upload-timeout-s", "0"], "--upload-timeout-s is 0"),
        (["serve", "--template-timeout-s", "0"], "--template-timeout-s is 0"),
        (["serve", "--api-key", "a=x", "a=y"], "two API keys have the name a"),
        (["serve", "--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read"),
        (["serve", "--ssl-keyfile", "k"], "--ssl-keyfile needs --ssl-certfile"),
        (["serve", "--ssl-certfile", "/nowhere"], "no certificate with its key can be read"),
        (["serve", "--max-json-depth", "0"], "0 is below 1"),
        (["serve", "--tool-call-parser", "xml"], "--tool-call-parser is 'xml'; known are hermes"),
        (["serve", "--reasoning-parser", "x"], "--reasoning-parser is 'x'; known are think"),
        (["serve", "--chat-template", "/nowhere"], "the chat template /nowhere cannot be read: No"),
        (
            ["chat", "--chat-template", "a\n{% for %}"],
            "the chat template cannot be read at line 2:",
        ),
        (["batch", "-i", "i", "-o", "o", "--chat-template", "{{ a"], "cannot be read at line 1:"),
        (["generate", "hi", "--stream", "--json"], "--stream prints one text"),
        (["generate", "hi", "--temperature", "-1"], "temperature is -1.0"),
        (["chat", "--top-p", "2"], "top_p is 2.0"),
    ],
)
def test_unusable_values_are_exit_code_2(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


def test_every_flag_of_every_command_has_a_help_text() -> None:
    def without_help(parser: argparse.ArgumentParser) -> list[str]:
        found = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found += without_help(command)
            elif not action.help:
                found.append(f"{parser.prog} {action.option_strings or action.dest}")
        return found

    parser = Parser(prog="quickstep")
    subparsers = parser.add_subparsers()
    for name in COMMANDS:
        import_module(f"quickstep.cli.{name}").add_parser(subparsers)
    assert without_help(parser) == []


@pytest.mark.parametrize("argv", [[], ["help"], ["--help"]])
def test_without_a_command_the_list_is_printed(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {name}" in printed for name in COMMANDS)


def test_help_takes_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "replay"]) == 0
    printed = capsys.readouterr().out
    assert "usage: quickstep replay" in printed
    assert "examples:\n  quickstep serve demo --record run.jsonl" in printed
    assert main(["help", "sserve"]) == 2


def test_a_recording_that_is_not_there_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["replay", "nofile"]) == 2
    assert "nofile cannot be read: No such file or directory" in capsys.readouterr().err
