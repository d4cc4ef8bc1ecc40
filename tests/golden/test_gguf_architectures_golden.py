"""GGUF files of each architecture, as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import prediction_layers as layers
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from gguf_twins import write_twin
from golden_cases import CASES, VOCAB, Case, rope
from golden_harness import PROMPT_LENS, assert_same_as_transformers, load, random_prompts
from paged_driver import PagedDriver
from safetensors.numpy import load_file

from quickstep import LLM, SamplingParams
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.weights import open_weights
from quickstep.model.spec import read_spec
from quickstep.ops.reference import reference_ops

GPT_OSS = Case("gpt-oss", "GptOss", {
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 24,
} | rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False))  # fmt: skip
GLM = Case("glm4moe", "Glm4Moe", {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "n_shared_experts": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
    "use_qk_norm": True, "attention_bias": True, "head_dim": 24, "first_k_dense_replace": 1,
} | rope("default", partial_rotary_factor=0.5))  # fmt: skip
QWEN3_MOE = Case("qwen3moe", "Qwen3Moe", {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "head_dim": 24,
})  # fmt: skip


def golden(name: str, **changes: object) -> Case:
    case = next(case for case in CASES if case.name == name)
    return replace(case, values=case.values | changes)


QWEN_NEXT = golden("qwen3-next", mlp_only_layers=[])
QWEN_35, QWEN_35_MOE = golden("qwen3.5"), golden("qwen3.5-moe")
NO_LEAST_STEP = 1e-30
BIASES = ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")
# llama.cpp has no multipliers of its own, so that of the embedding would be that of the logits
WITHOUT_BIASES = dict.fromkeys((*BIASES, "tie_word_embeddings"), False)
# a file has no chunks of another size
LLAMA4_OF_GGUF = {"attention_chunk_size": 8192, "floor_scale": 8192} | rope("default")
# the case, its section in addition to the sizes, whether queries and keys are in pairs
TWINS: list[tuple[str, Case, dict[str, object], bool]] = [
    ("qwen3moe", QWEN3_MOE, {}, False),
    (
        "olmoe",
        Case("olmoe", "Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False}
             | {"num_key_value_heads": 4}),
        {},
        False,
    ),
    (
        "llama",
        Case("mixtral", "Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
        {},
        True,
    ),
    ("olmo2", Case("olmo2", "Olmo2"), {}, False),
    ("qwen2moe", golden("qwen2-moe", mlp_only_layers=[], norm_topk_prob=False), {}, False),
    (
        "exaone4",
        golden("exaone4"),
        {".attention.sliding_window_pattern": [True, False, True, False]},
        False,
    ),
    ("exaone4", golden("exaone4-full"), {}, False),
    ("seed_oss", golden("seed-oss", attention_out_bias=False, mlp_bias=False), {}, False),
    ("glm4", golden("glm4"), {}, False),
    (
        "cohere2",  # llama.cpp knows which layers have a window
        golden("cohere2", attention_bias=False,
               layer_types=["sliding_attention"] * 3 + ["full_attention"]),
        {".logit_scale": 0.5},
        False,
    ),
    ("arcee", golden("arcee", mlp_bias=False), {}, True),
    ("ernie4_5", golden("ernie4.5", use_bias=False), {}, False),
    (
        "granite",
        Case("granite", "Granite", {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
            "logits_scaling": 0.5,
        }),
        {
            ".attention.scale": 0.2,
            ".embedding_scale": 3.0,
            ".residual_scale": 0.4,
            ".logit_scale": 0.5,
        },
        True,
    ),
    ("granitehybrid", golden("granite-hybrid"), {}, True),
    ("granitehybrid", golden("granite-hybrid-moe"), {}, True),
    ("granitehybrid", golden("granite-hybrid-biases", mamba_proj_bias=False), {}, True),
    ("smollm3", Case("smollm3", "SmolLM3", {"num_hidden_layers": 5}), {}, True),
    (
        "glm4moe",
        GLM,
        {
            ".expert_shared_count": 2,
            ".leading_dense_block_count": 1,
            ".expert_gating_func": 2,
            ".expert_weights_scale": 1.5,
            ".expert_weights_norm": True,
        },
        False,
    ),
    (
        "gpt-oss",
        GPT_OSS,
        {
            ".expert_feed_forward_length": 96,
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 64,
        },
        False,
    ),
    ("qwen3next", QWEN_NEXT, {}, False),
    ("qwen35", QWEN_35, {}, False),
    ("qwen35moe", QWEN_35_MOE, {}, False),
    # files have a row of each layer's inputs for every token
    ("gemma3n", golden("gemma3n", vocab_size_per_layer_input=VOCAB), {}, False),
    ("falcon-h1", golden("falcon-h1"), {}, False),
    ("falcon-h1", golden("falcon-h1-norm", **WITHOUT_BIASES), {}, False),
    ("nemotron_h", golden("nemotron-h", time_step_min=NO_LEAST_STEP), {}, True),
    (
        "nemotron_h_moe",
        golden("nemotron-h-moe", time_step_min=NO_LEAST_STEP, use_bias=False, use_conv_bias=True),
        {},
        True,
    ),
    (
        "nemotron_h_moe",
        golden("nemotron-h-latents", time_step_min=NO_LEAST_STEP, use_conv_bias=True),
        {},
        True,
    ),
    ("llama4", golden("llama4", **LLAMA4_OF_GGUF), {}, False),
    (
        "lfm2",
        Case("lfm2", "Lfm2", {
            "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_auto_adjust_ff_dim": False,
        }),
        {".attention.head_count_kv": [0, 2, 0, 0], ".vocab_size": VOCAB},
        False,
    ),
]  # fmt: skip


def section_of(architecture: str) -> dict[str, object]:
    """The keys of an architecture's own section in its twin."""
    (section,) = [section for name, _, section, _ in TWINS if name == architecture]
    return section


@pytest.mark.parametrize(
    ("architecture", "case", "section", "paired"), TWINS, ids=lambda x: str(x)[:12]
)
def test_a_file_computes_what_its_checkpoint_does(
    architecture: str, case: Case, section: dict[str, object], paired: bool, tmp_path: Path
) -> None:
    reference = case.save(tmp_path)
    path = tmp_path / "twin.gguf"
    write_twin(tmp_path, path, architecture, section, paired=paired)
    model = load(path, dtype="float32")
    prompts = random_prompts(PROMPT_LENS, VOCAB)
    assert_same_as_transformers(model, reference, prompts, case.atol)


@pytest.mark.parametrize(
    ("architecture", "case", "section", "paired"), TWINS, ids=lambda x: str(x)[:12]
)
def test_a_quantized_file_in_16_bits_computes_the_same_with_and_without_torch(
    architecture: str, case: Case, section: dict[str, object], paired: bool, tmp_path: Path
) -> None:
    """Files that people have: matrices are quantized, some tensors stay in float32."""
    sizes: dict[str, object] = {"vocab_size": 264}
    if architecture == "gemma3n":
        sizes |= {"vocab_size_per_layer_input": 264}
    replace(case, values=case.values | sizes).save(tmp_path)
    path = tmp_path / "twin.gguf"
    kinds = dict.fromkeys(("attn_k", "attn_qkv", "ssm_in", "ffn_up", "ffn_up_exps"), Kind.Q8_0)
    section = section | ({".vocab_size": 264} if ".vocab_size" in section else {})
    write_twin(tmp_path, path, architecture, section, paired=paired, kinds=kinds)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    found = []
    for is_eager in (False, True):
        options = {"num_blocks": 32, "max_model_len": 64, "num_threads": 1}
        with LLM(str(path), dtype="bfloat16", enforce_eager=is_eager, **options) as llm:
            [output] = llm.generate([{"prompt_token_ids": list(range(40, 59))}], sampling)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


def test_experts_keep_the_types_of_their_tensor(tmp_path: Path) -> None:
    QWEN3_MOE.save(tmp_path)
    path = tmp_path / "mixed.gguf"
    kinds = {"ffn_gate_exps": Kind.Q8_0, "ffn_up_exps": Kind.Q4_0, "ffn_down_exps": Kind.Q8_0}
    write_twin(tmp_path, path, "qwen3moe", {}, paired=False, kinds=kinds)
    weights = open_weights(path, read_spec(path))
    tensor = weights.files.tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert (tensor.dtype, tensor.shape) == ("Q4_0", (64, 64))
    load(path, dtype="float32")


def test_layers_that_draft_are_not_used(tmp_path: Path) -> None:
    GLM.save(tmp_path)
    path = tmp_path / "mtp.gguf"
    section = section_of("glm4moe") | {".nextn_predict_layers": 1}
    write_twin(tmp_path, path, "glm4moe", section, paired=False)
    spec = read_spec(path)
    assert spec.num_layers == 2
    unused = open_weights(path, spec).unused()
    assert "model.layers.2.mlp.experts.0.up_proj.weight" in unused


@pytest.mark.parametrize(
    ("architecture", "case"),
    [("qwen3next", QWEN_NEXT), ("qwen35", QWEN_35), ("qwen35moe", QWEN_35_MOE)],
    ids=lambda x: str(x)[:9],
)
def test_a_layer_of_qwen_drafts_what_transformers_would(
    architecture: str, case: Case, tmp_path: Path
) -> None:
    layer = layers.write_with_layer(tmp_path, case)
    path = tmp_path / "twin.gguf"
    num_layers = layer.target.config.num_hidden_layers
    recurrent = [kind == "linear_attention" for kind in layer.target.config.layer_types]
    section = {
        ".block_count": num_layers + 1,
        ".nextn_predict_layers": 1,
        ".attention.recurrent_layers": [*recurrent, False],
    }
    write_twin(tmp_path, path, architecture, section, paired=False)
    token_ids = tuple(range(40, 52))
    hidden = layer.hidden(token_ids[:-1])
    assert layers.drafted(path, token_ids, hidden) == layer.drafts(token_ids, hidden, 6)


def test_the_layer_of_nemotron_drafts_what_transformers_would(tmp_path: Path) -> None:
    layer = layers.write_with_layer(tmp_path, layers.NEMOTRON)
    config = layer.target.config
    kinds = config.layers_block_type
    keys, width = config.num_key_value_heads, config.moe_intermediate_size
    section = {
        ".block_count": len(kinds) + 1,
        ".nextn_predict_layers": 1,
        ".attention.head_count_kv": [*(keys * (kind == "full_attention") for kind in kinds), keys],
        ".feed_forward_length": [*(width * (kind == "moe") for kind in kinds), width],
    }
    path = tmp_path / "twin.gguf"
    write_twin(tmp_path, path, "nemotron_h_moe", section, paired=True)
    token_ids = tuple(range(40, 52))
    hidden = layer.hidden(token_ids[:-1])
    assert layers.drafted(path, token_ids, hidden) == layer.drafts(token_ids, hidden, 6)


@pytest.mark.parametrize("older", [True, False], ids=["fused projections", "fused experts"])
def test_other_layouts_of_a_file_compute_the_same(older: bool, tmp_path: Path) -> None:
    """Qwen3-Next's first files have one matrix of queries, keys, values and gates; files may have
    gate and up of all experts in one tensor.
    """
    QWEN_NEXT.save(tmp_path)
    paths = tmp_path / "usual.gguf", tmp_path / "other.gguf"
    layout = {"is_older": True} if older else {"fuses_experts": True}
    write_twin(tmp_path, paths[0], "qwen3next", {}, paired=False)
    write_twin(tmp_path, paths[1], "qwen3next", {}, paired=False, **layout)
    prompts = random_prompts(PROMPT_LENS, VOCAB)
    rows = [
        PagedDriver(load(path, dtype="float32")).generate(prompts, 4, chunk=6) for path in paths
    ]
    for usual, other in zip(*rows, strict=True):
        assert torch.equal(torch.cat(usual.logits), torch.cat(other.logits))


def test_blocks_are_put_in_order_as_they_are_loaded_and_read(tmp_path: Path) -> None:
    """Native kernels load the rows of blocks in order, other ops reorder quantized values."""
    QWEN_35.save(tmp_path)
    path = tmp_path / "blocks.gguf"
    kinds = dict.fromkeys(("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta"), Kind.Q8_0)
    write_twin(tmp_path, path, "qwen35", {}, paired=False, kinds=kinds)
    prompts = random_prompts((17,), VOCAB)
    models = load(path, dtype="float32"), load(path, dtype="float32", ops=reference_ops())
    found, expected = (
        torch.cat(row.logits)
        for model in models
        for row in PagedDriver(model).generate(prompts, 1, chunk=6)
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 0])
def test_chunks_of_llama_4_are_those_of_llama_cpp(window: int | None, tmp_path: Path) -> None:
    golden("llama4", **LLAMA4_OF_GGUF).save(tmp_path)
    path = tmp_path / "twin.gguf"
    section = {} if window is None else {".attention.sliding_window": window}
    write_twin(tmp_path, path, "llama4", section, paired=False)
    spec = read_spec(path)
    found = [(layer.chunk, layer.rope, layer.query_rope) for layer in spec.layers]
    rotated, grown = (8192, 0, None), (None, None, 1)
    assert found == ([rotated] * 3 + [grown] if window is None else [(None, 0, None)] * 4)


def test_rates_of_decay_are_not_rounded(tmp_path: Path) -> None:
    """The model computes in bfloat16; the rates are exponentials, in float32."""
    QWEN_35.save(tmp_path)
    path = tmp_path / "twin.gguf"
    write_twin(tmp_path, path, "qwen35", {}, paired=False)
    found = load(path, dtype="bfloat16").weights.layers[0].mixer.delta.rates.numpy()
    logarithms = load_file(tmp_path / "model.safetensors")["model.layers.0.linear_attn.A_log"]
    np.testing.assert_allclose(found, -np.exp(logarithms), rtol=1e-6)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_a_layer_drafts_what_transformers_would(kind: Kind, tmp_path: Path) -> None:
    layer = layers.write_with_layer(tmp_path, GLM)
    layers.change_config(tmp_path, {"num_hidden_layers": 4})
    path = tmp_path / "twin.gguf"
    section = section_of("glm4moe") | {".nextn_predict_layers": 1}
    kinds = {"eh_proj": kind}
    write_twin(tmp_path, path, "glm4moe", section, paired=False, kinds=kinds)
    if kind is Kind.Q8_0:
        stored = quants.quantize(layer.fc.numpy(), kind)
        layer = replace(layer, fc=torch.from_numpy(quants.dequantize(stored, kind)))
    token_ids = tuple(range(40, 52))
    hidden = layer.hidden(token_ids[:-1])
    assert layers.drafted(path, token_ids, hidden) == layer.drafts(token_ids, hidden, 6)


def test_an_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    QWEN3_MOE.save(tmp_path)
    path = tmp_path / "new.gguf"
    write_twin(tmp_path, path, "qwen3vlmoe", {}, paired=False)
    with pytest.raises(ConfigError, match=r"architecture 'qwen3vlmoe'.*the nearest is qwen3moe"):
        read_spec(path)
