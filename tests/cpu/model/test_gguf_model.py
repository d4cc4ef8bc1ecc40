"""A model in a GGUF file: its sizes, its tensors in the architecture's order, and its answers."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf_files as files
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_models import HF, KINDS, MIXTURES, VOCAB, write_model
from hypothesis import given
from hypothesis import strategies as st
from quantized_checkpoint import load, logits_of, opened, write_whole
from torch import Tensor

from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.checkpoint.weights import open_weights
from quickstep.model.rope import make_rope_table
from quickstep.model.spec import parse_spec, read_spec
from quickstep.ops.tensors import Device, to_numpy
from quickstep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny-q4_k_m.gguf"
    return path, write_model(path)


def test_metadata_reads_as_the_config_it_was_converted_from(
    llama: tuple[Path, dict[str, Tensor]],
) -> None:
    assert read_spec(llama[0]) == parse_spec(HF)


DIALECTS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("qwen2", {}, {"architectures": ["Qwen2ForCausalLM"]}),
    (
        "qwen3",
        {"attention__key_length": 32, "attention__value_length": 32, "rope__freq_base": 1e6},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "rope_theta": 1e6},
    ),
    (
        "llama",
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    (
        "qwen2",
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 64,
        },
        {
            "architectures": ["Qwen2ForCausalLM"],
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    (
        "phi3",
        {"attention__sliding_window": 128},
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 128}
        | {"original_max_position_embeddings": 256},
    ),
    (
        "gemma2",
        {
            "attention__sliding_window": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention__key_length": 64,
            "attention__value_length": 64,
        },
        {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64, "head_dim": 64}
        | {"query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    (
        "gemma3",
        {"attention__sliding_window": 64, "attention__key_length": 64}
        | {"attention__value_length": 64, "rope__freq_base": 1e6},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "head_dim": 64}
        | {"query_pre_attn_scalar": 64, "rope_theta": 1e6},
    ),
    (  # as the converter of 2026 writes it
        "gemma3",
        {"attention__sliding_window": 64, "attention__key_length": 64, "rope__freq_base_swa": 2e4}
        | {"attention__value_length": 64, "rope__freq_base": 1e6}
        | {"attention__sliding_window_pattern": 2},
        {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "head_dim": 64}
        | {"query_pre_attn_scalar": 64, "rope_theta": 1e6, "rope_local_base_freq": 2e4}
        | {"sliding_window_pattern": 2},
    ),
    (
        "gemma2",
        {
            "attention__sliding_window": 64,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention__key_length": 64,
            "attention__value_length": 64,
            "attention__sliding_window_pattern": [False, True],
            "rope__freq_base_swa": 1e4,
        },
        {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64, "head_dim": 64}
        | {"query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"}
        | {"layer_types": ["full_attention", "sliding_attention"]},
    ),
    (
        "qwen3",
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 64,
            "rope__scaling__attn_factor": 0.5,
            "rope__scaling__yarn_beta_fast": 32.0,
            "rope__scaling__yarn_beta_slow": 1.0,
            "rope__scaling__yarn_ext_factor": 1.0,
            "rope__dimension_sections": [1, 1, 1, 0],
            "pooling_type": 3,
        },
        {
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 64,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attn_factor": 0.5,
            },
        },
    ),
    (
        "llama",
        {"rope__scale_linear": 4.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {}),
]


@pytest.mark.parametrize("with_divisors", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, 1.25])
@pytest.mark.parametrize("factor", [None, 1.0, 4.0])
@pytest.mark.parametrize("kind", [None, "none", "linear", "yarn", "longrope"])
def test_scaling_keys_mean_what_llama_cpp_does_with_them(
    kind: str | None, factor: float | None, scale: float | None, with_divisors: bool, tmp_path: Path
) -> None:
    """Its `ggml_rope_yarn`, position by position, with the parameters of its context."""
    pairs = files.HIDDEN // files.HEADS // 2
    divisors = np.linspace(1, 8, pairs, dtype=np.float32)
    keys = {".rope.scaling.type": kind, ".rope.scaling.factor": factor}
    keys |= {".rope.scaling.attn_factor": scale, ".rope.scaling.original_context_length": 64}
    metadata = files.sizes() | {key: value for key, value in keys.items() if value is not None}
    tensors = [("token_embd.weight", np.zeros((VOCAB, files.HIDDEN), np.float16), Kind.F16)]
    if with_divisors:
        tensors.append(("rope_freqs.weight", divisors, Kind.F32))
    path = files.write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors)
    if kind == "yarn" and with_divisors:
        with pytest.raises(ConfigError, match="both YaRN and a tensor"):
            read_spec(path)
        return
    [rope] = read_spec(path).ropes
    found = make_rope_table(rope, 256, Device("cpu"))
    freq_scale = 1 / (1.0 if kind == "none" else factor or 1.0)
    plain = 10_000.0 ** (-np.arange(pairs) / pairs) / (divisors if with_divisors else 1.0)
    angle, magnitude = freq_scale * plain, scale or 1.0
    if kind == "yarn":
        borders = [
            2 * pairs * np.log(64 / (beta * 2 * np.pi)) / (2 * np.log(10_000.0))
            for beta in (32.0, 1.0)
        ]
        low, high = max(0, np.floor(borders[0])), min(2 * pairs - 1, np.ceil(borders[1]))
        ramp = 1 - np.clip((np.arange(pairs) - low) / max(0.001, high - low), 0, 1)
        angle = angle * (1 - ramp) + plain * ramp
        magnitude *= 1 + 0.1 * np.log(1 / freq_scale)
    angles = np.arange(256)[:, None] * angle
    np.testing.assert_allclose(to_numpy(found.cos), np.cos(angles) * magnitude, atol=1e-4)
    np.testing.assert_allclose(to_numpy(found.sin), np.sin(angles) * magnitude, atol=1e-4)


@pytest.mark.parametrize(("architecture", "section", "config"), DIALECTS)
def test_each_architecture_reads_as_its_config(
    architecture: str, section: dict[str, object], config: dict[str, object], tmp_path: Path
) -> None:
    embedding = np.zeros((VOCAB, files.HIDDEN), dtype=np.float16)
    metadata = files.sizes(**section)
    if "attention__key_length" in section:
        metadata[".rope.dimension_count"] = section["attention__key_length"]
    tensors = [("token_embd.weight", embedding, Kind.F16)]
    path = files.write_gguf(tmp_path / "m.gguf", architecture, metadata, tensors)
    expected = HF | {"torch_dtype": "float16", "tie_word_embeddings": True} | config
    found = read_spec(path)
    wanted = parse_spec(expected)
    assert found.norm_offset == 0.0
    if architecture.startswith("gemma"):
        assert wanted.norm_offset == 1.0
    for name in wanted.__slots__:
        if name != "norm_offset":
            assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize("base", [1e6, 500_000.0, 283_461_213.0, 3_580_165_449.0, 1e11])
def test_a_number_is_the_shortest_decimal_of_its_float32(base: float, tmp_path: Path) -> None:
    metadata = files.sizes(rope__freq_base=base, attention__layer_norm_rms_epsilon=1e-6)
    tensors = [("token_embd.weight", np.zeros((VOCAB, files.HIDDEN), dtype=np.float16), Kind.F16)]
    spec = read_spec(files.write_gguf(tmp_path / "m.gguf", "llama", metadata, tensors))
    assert spec.ropes[0].theta == float(str(np.float32(base)))
    assert spec.norm_eps == 1e-6


def test_frequency_divisors_are_part_of_the_rope(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, files.HIDDEN // files.HEADS // 2, dtype=np.float32)
    embedding = np.zeros((VOCAB, files.HIDDEN), dtype=np.float16)
    tensors = [
        ("token_embd.weight", embedding, Kind.F16),
        ("rope_freqs.weight", divisors, Kind.F32),
    ]
    path = files.write_gguf(tmp_path / "m.gguf", "llama", files.sizes(), tensors)
    [rope] = read_spec(path).ropes
    assert rope.short_factor == rope.long_factor == tuple(divisors.tolist())
    assert rope.attention_factor == 1.0


def test_tensors_are_the_architectures_own(llama: tuple[Path, dict[str, Tensor]]) -> None:
    path, meant = llama
    source = opened(path)[1]
    start = "model.layers.1."
    attention, dense = f"{start}self_attn.", f"{start}mlp."
    for module, parts in ((attention, "qkv"), (attention, "o"), (dense, ("gate", "up"))):
        names = tuple(f"{module}{part}_proj.weight" for part in parts)
        found = source.linear(names)
        expected = torch.cat([meant[name] for name in names])
        torch.testing.assert_close(found.dequantized(), expected, rtol=2e-6, atol=1e-6)
    for name in ("lm_head.weight", "model.embed_tokens.weight", f"{start}mlp.down_proj.weight"):
        torch.testing.assert_close(
            source.linear((name,)).dequantized(), meant[name], rtol=2e-6, atol=1e-6
        )
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(source.tensor(norm), meant[norm])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_whole_matrices_and_biases_keep_their_order(architecture: str, tmp_path: Path) -> None:
    changes = {"qwen2": {"architectures": ["Qwen2ForCausalLM"]}}.get(architecture, {})
    kinds = dict.fromkeys(KINDS, Kind.F16)
    path = tmp_path / "m.gguf"
    meant = write_model(path, architecture, kinds, **changes)
    expected = load(write_whole(tmp_path / "whole", meant, **{**HF, **changes}))
    tokens = [5, 77, 200, 31, 9]
    torch.testing.assert_close(
        logits_of(load(path), tokens), logits_of(expected, tokens), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("mixture", ["Q4_K_M", *MIXTURES])
def test_answers_are_near_those_of_the_weights_it_means(mixture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    meant = write_model(path, kinds={"Q4_K_M": KINDS, **MIXTURES}[mixture])
    expected = load(write_whole(tmp_path, meant, **HF))
    tokens = [(7 * i + 3) % 256 for i in range(24)]
    found, wanted = logits_of(load(path), tokens), logits_of(expected, tokens)
    assert float((found - wanted).square().mean() / wanted.square().mean()) < 0.05**2


def test_the_factor_of_a_tensors_scales_counts(tmp_path: Path) -> None:
    kinds = dict.fromkeys(KINDS, Kind.NVFP4)
    factors = {"q_proj": 1.75, "v_proj": -0.3, "o_proj": 0.1, "down_proj": 3.0}
    meant = write_model(tmp_path / "m.gguf", kinds=kinds, factors=factors)
    _, source = opened(tmp_path / "m.gguf")
    names = tuple(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    expected = torch.cat([meant[name] for name in names])
    torch.testing.assert_close(source.linear(names).dequantized(), expected, rtol=1e-6, atol=0)
    whole = load(write_whole(tmp_path, meant, **HF))
    tokens = [(7 * i + 3) % 256 for i in range(24)]
    found, wanted = logits_of(load(tmp_path / "m.gguf"), tokens), logits_of(whole, tokens)
    assert float((found - wanted).square().mean() / wanted.square().mean()) < 0.05**2


def test_a_factor_of_a_matrix_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    kinds = dict.fromkeys(KINDS, Kind.F16)
    write_model(tmp_path / "m.gguf", kinds=kinds, factors={"o_proj": 2.0})
    with pytest.raises(ConfigError, match=r"o_proj\.scale.* not part of the architecture"):
        load(tmp_path / "m.gguf")


def test_the_engine_answers_alone_as_in_a_batch(llama: tuple[Path, dict[str, Tensor]]) -> None:
    prompts = ["one", "another prompt that is longer", "abab", "x" * 40]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    with LLM(str(llama[0]), num_threads=1, dtype="float32") as llm:
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
        assert llm.engine.tokenizer.encode("ab") == [257]
        plan = llm.engine.model.memory_plan
    assert [(o.token_ids, o.logprobs) for o in together] == [
        (o.token_ids, o.logprobs) for o in alone
    ]
    assert plan is not None and plan.rows[0].detail.endswith("as the checkpoint has quantized them")


def test_a_directory_with_one_file_is_that_file(llama: tuple[Path, dict[str, Tensor]]) -> None:
    path = llama[0]
    assert find_checkpoint(LoadConfig(model=str(path.parent))).path == path
    named = find_checkpoint(LoadConfig(model=str(path)))
    assert (named.path, named.name) == (path, "tiny-q4_k_m")


def test_several_files_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="holds 2 GGUF files"):
        find_checkpoint(LoadConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("architecture", "metadata", "named"),
    [
        ("mamba", {}, "architecture 'mamba'"),
        ("qwen2", {".expert_count": 8}, "'expert_count'"),
        ("llama", {".attention.value_length": 32}, "values of 32"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {".rope.scaling.type": "spiral"}, "'spiral'"),
        ("llama", {".attention.clamp_kqv": 8.0}, "'attention.clamp_kqv'"),
        ("llama", {".rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier"),
        ("gemma2", {".rope.freq_base_swa": 2e4}, "freq_base_swa"),
        ("qwen3", {".pooling_type": 1}, "pooling_type"),
        ("llama", {"split.count": [1, 2]}, "'split.count' to (1, 2), not to an integer"),
        ("llama", {"split.count": "x"}, "'split.count' to 'x', not to an integer"),
        ("llama", {".context_length": float("nan")}, "'context_length' to nan, it must be"),
        ("llama", {".block_count": float("inf")}, "'block_count' to inf, it must be"),
        (
            "gemma2",
            {".block_count": 2**31, ".attention.sliding_window_pattern": 6},
            "'block_count' to 2147483648, it must be at most",
        ),
        ("llama", {".attention.head_count": list(range(1000))}, "..., it must be an integer"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    architecture: str, metadata: dict[str, object], named: str, tmp_path: Path
) -> None:
    embedding = np.zeros((VOCAB, files.HIDDEN), dtype=np.float16)
    tensors = [("token_embd.weight", embedding, Kind.F16)]
    path = tmp_path / "m.gguf"
    files.write_gguf(path, architecture, files.sizes() | metadata, tensors)
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert named in str(caught.value)


def test_block_types_that_are_not_read_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    values = np.zeros((VOCAB, files.HIDDEN // 128 * 18), dtype=np.uint8)
    tensors = [("token_embd.weight", values, Kind.Q1_0)]
    path = files.write_gguf(tmp_path / "m.gguf", "llama", files.sizes(), tensors)
    with pytest.raises(ConfigError, match=r"stores token_embd\.weight as Q1_0"):
        read_spec(path)


@pytest.mark.parametrize(
    ("name", "other", "named"),
    [
        (b"blk.1.attn_norm", b"blk.0.attn_norm", "the tensor 'blk.0.attn_norm.weight' twice"),
        (b"llama.rope.freq_base", b"llama.context_length", "'llama.context_length' twice"),
    ],
)
def test_two_things_of_one_name_are_refused(
    llama: tuple[Path, dict[str, Tensor]], name: bytes, other: bytes, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "twice.gguf"
    content = llama[0].read_bytes()
    assert content.count(name) == 1 and len(name) == len(other)
    path.write_bytes(content.replace(name, other))
    with pytest.raises(ConfigError, match=named):
        read_spec(path)


def test_a_name_whose_length_is_damaged_is_refused_in_a_short_message(
    llama: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    path, name = tmp_path / "m.gguf", b"blk.0.attn_q.weight"
    content = llama[0].read_bytes()
    length = struct.pack("<Q", len(name))
    assert content.count(length + name) == 1
    path.write_bytes(content.replace(length + name, struct.pack("<Q", 200_000) + name))
    with pytest.raises(ConfigError, match="a tensor's name has 200000 bytes") as caught:
        read_spec(path)
    assert len(str(caught.value)) < 400


def test_a_tensor_of_no_elements_is_refused_however_many_experts_it_claims(tmp_path: Path) -> None:
    embedding = np.zeros((VOCAB, files.HIDDEN), dtype=np.float16)
    experts = np.zeros((7777, 1, 32), dtype=np.float32)
    tensors = [("token_embd.weight", embedding, Kind.F16)]
    tensors += [("blk.0.ffn_up_exps.weight", experts, Kind.F32)]
    path = files.write_gguf(tmp_path / "m.gguf", "llama", files.sizes(), tensors)
    dimensions = struct.pack("<3Q", 32, 1, 7777)
    content = path.read_bytes()
    assert content.count(dimensions) == 1
    path.write_bytes(content.replace(dimensions, struct.pack("<3Q", 32, 0, 2**60)))
    with pytest.raises(ConfigError, match=r"'blk\.0\.ffn_up_exps\.weight' of shape"):
        read_spec(path)


def test_a_vocabulary_that_is_no_list_of_texts_is_refused(tmp_path: Path) -> None:
    embedding = np.zeros((VOCAB, files.HIDDEN), dtype=np.float16)
    for key in ("tokens", "merges"):
        metadata = files.sizes() | files.byte_vocabulary(VOCAB) | {f"tokenizer.ggml.{key}": [1, 2]}
        tensors = [("token_embd.weight", embedding, Kind.F16)]
        path = files.write_gguf(tmp_path / f"{key}.gguf", "llama", metadata, tensors)
        with pytest.raises(ConfigError, match=rf"tokenizer\.ggml\.{key}"):
            Tokenizer.open(path)


def test_a_cut_file_is_refused_wherever_it_ends(
    llama: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    content = llama[0].read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (1, 3, 10, 30, 200, 5000, len(content) - 1):
        cut.write_bytes(content[:length])
        with pytest.raises(ConfigError):
            read_spec(cut)


def test_a_checkpoint_in_codes_is_not_quantized_again(
    llama: tuple[Path, dict[str, Tensor]],
) -> None:
    with pytest.raises(ConfigError, match=r"quantized already \(gguf\)"):
        load(llama[0], quantization="int8")


def test_another_file_has_another_fingerprint(
    llama: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    content = bytearray(llama[0].read_bytes())
    content[-5] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    prints = {load(path).fingerprint for path in (llama[0], tmp_path / "other.gguf")}
    assert len(prints) == 2


@given(st.integers(0, 1500), st.integers(0, 255))
def test_a_changed_byte_of_the_header_is_refused_or_harmless(
    llama: tuple[Path, dict[str, Tensor]], at: int, value: int
) -> None:
    content = bytearray(llama[0].read_bytes())
    content[at] = value
    changed = llama[0].parent / "changed.bin.gguf"
    changed.write_bytes(content)
    try:
        weights = open_weights(changed, read_spec(changed))
        weights.check()
        Tokenizer.open(changed)
    except ConfigError:
        pass
    finally:
        changed.unlink()
