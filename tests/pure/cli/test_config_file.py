"""`--config FILE`: flags from a file, which the command line goes before."""

from __future__ import annotations

from pathlib import Path

import pytest

from quickstep.cli import generate, serve
from quickstep.cli.flags.engine import engine_config, model_of
from quickstep.cli.flags.parsing import Parser
from quickstep.config import CacheConfig, EngineConfig, PolicyName, SpeculationMethod
from quickstep.errors import ConfigError


@pytest.fixture
def parsed(tmp_path: Path):
    """Parse arguments of `serve` with a file of this content."""

    def parse(content: str, *arguments: str):
        file = tmp_path / "flags.yaml"
        file.write_text(content)
        parser = Parser(prog="quickstep")
        serve.add_parser(parser.add_subparsers())
        return parser.parse_args(["serve", *arguments, "--config", str(file)])

    return parse


def config_of(args) -> EngineConfig:
    return engine_config(args, model_of(args))


FILE = """
model: some/model
max_num_seqs: 8
scheduling-policy: fcfs
enable-prefix-caching: false
kv-cache-memory-bytes: 2GiB
no-kv-cache: true
inter-token-target-s: 1
speculative-config: {method: ngram, num_speculative_tokens: 3}
api-key: [a=first, second]
allowed-hosts: box
swap-space: 0
"""


def test_keys_are_long_flags_with_either_dash(parsed):
    args = parsed(FILE)
    config = config_of(args)
    assert config.load.model == "some/model"
    assert config.cache == CacheConfig(kv_cache_bytes=2 * 2**30, prefix_caching=False)
    assert config.scheduler.max_num_seqs == 8
    assert config.scheduler.policy is PolicyName.FCFS
    assert config.scheduler.inter_token_target_s == 1
    assert not config.scheduler.use_kv_cache
    assert [proposer.method for proposer in config.speculation.proposers] == [
        SpeculationMethod.NGRAM
    ]
    assert (args.api_key, args.allowed_hosts) == (["a=first", "second"], ["box"])


def test_the_command_line_goes_before_the_file(parsed):
    args = parsed(FILE, "other", "--max-num-seqs=3", "--api-key", "z", "--enable-prefix-caching")
    config = config_of(args)
    assert config.load.model == "other"
    assert config.cache.prefix_caching
    assert (config.scheduler.max_num_seqs, args.api_key) == (3, ["z"])


def test_what_neither_names_is_the_default(parsed):
    assert config_of(parsed("")) == config_of(parsed("max-num-seqs: 64"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max-num-seq: 3", "max-num-seq is no flag; did you mean max-num-seqs?"),
        ("zzz: 3", "zzz is no flag; see quickstep serve --help"),
        ("config: other.yaml", "config is no flag"),
        ("max-num-seqs: 0", "max-num-seqs: 0 is below 1"),
        ("max-num-seqs: [1, 2]", "max-num-seqs is a list, it takes one value"),
        ("dtype: float8", "dtype: invalid choice: 'float8'"),
        ("model:", "model has no value; leave it out for the default"),
        ("offline: 3", "offline is 3, it must be true or false"),
        ("device: true", "device is true, it needs a value"),
        ("block-size: 16\nblock_size: 32", "block_size sets the same as block-size; keep one"),
        ("gpu-memory-utilization: 0.5", "is a flag of vLLM; give --memory-bytes"),
        ("- 3", "is not valid: Expected `object`, got `array`"),
    ],
)
def test_faults_are_one_sentence_with_file_and_key(parsed, content: str, says: str):
    with pytest.raises(ConfigError) as caught:
        parsed(content)
    assert "--config " in str(caught.value)
    assert "flags.yaml" in str(caught.value)
    assert says in str(caught.value)


def test_every_command_that_opens_an_engine_reads_a_file(tmp_path: Path):
    file = tmp_path / "flags.yaml"
    file.write_text("max-tokens: 5\nthreads: 2\n")
    parser = Parser(prog="quickstep")
    generate.add_parser(parser.add_subparsers())
    args = parser.parse_args(["generate", "a prompt", "--config", str(file)])
    assert (args.prompt, args.max_tokens, args.threads) == ("a prompt", 5, 2)


def test_sections_of_a_command_are_no_flags(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("max_num_seqs: 8\nroutes: {chat: [{max_tokens: 64}]}\n")
    parser = Parser(prog="quickstep")
    serve.add_parser(parser.add_subparsers())
    command = next(iter(parser._subparsers._group_actions)).choices["serve"]
    command.file_sections = ("models", "routes")
    args = parser.parse_args(["serve", "some/model", "--config", str(file)])
    assert args.file_sections == {"routes": {"chat": [{"max_tokens": 64}]}}
    assert args.max_num_seqs == 8
    command.file_sections = ()
    with pytest.raises(ConfigError, match="routes is no flag"):
        parser.parse_args(["serve", "some/model", "--config", str(file)])
