"""LoRA adapters against peft: logits and tokens, unmerged and merged, alone and mixed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from gguf_twins import write_twin
from golden_cases import CASES, VOCAB, Case
from golden_harness import load, random_prompts
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file

from adapter_files import write_adapter
from quickstep.errors import ConfigError
from quickstep.model.adapters.checkpoint import open_adapter
from quickstep.model.adapters.int8 import as_int8
from quickstep.model.adapters.lora_modules import base_biases
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.model.spec import read_spec
from quickstep.ops.table import LoRAAdapter
from quickstep.ops.tensors import host_dtype

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
NUM_NEW = 6


def with_adapters(base, path: Path, configs: list[dict[str, object]]):
    """A peft model with random adapters `a0`, `a1`, ..., each saved in a folder of its name."""
    model = None
    for index, values in enumerate(configs):
        config = peft.LoraConfig(**({"task_type": "CAUSAL_LM", "lora_dropout": 0.1} | values))
        name = f"a{index}"
        if model is None:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    assert model is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "modules_to_save" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(path)
    return model.eval()


def read(model: Decoder, path: Path, max_rank: int = 256, in_int8: bool = False) -> LoRAAdapter:
    dtype = host_dtype(model.kv_layout.dtype)
    biases = base_biases(model.spec, model.weights, model.ops)
    weights = open_adapter(path, model.spec, max_rank).read(dtype, biases)
    return model.ops.pack_lora(as_int8(weights.modules) if in_int8 else weights.modules)


def greedy(model: Decoder, prompts, adapters: list[LoRAAdapter | None], chunk: int = 6):
    """Tokens and logits of each prompt with its adapter."""
    driver = PagedDriver(model, adapters={id(p): a for p, a in zip(prompts, adapters, strict=True)})
    return driver.generate(prompts, NUM_NEW, chunk)


def targets_of(case: Case) -> list[str]:
    if case.family == "Phi3":
        return ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    if case.family == "Lfm2":
        return ["out_proj", "in_proj", "w1", "w2", "w3"]
    if case.family == "Lfm2Moe":
        return ["q_proj", "in_proj", "out_proj"]
    if case.family == "GraniteMoeHybrid":
        return ["q_proj", "in_proj", "out_proj", "input_linear", "output_linear"]
    if case.family == "FalconH1":
        return [*DENSE, "in_proj"]  # peft refuses `out_proj` of Mamba
    if case.family == "NemotronH":
        return ["q_proj", "in_proj", "k_proj", "o_proj", "up_proj", "down_proj"]
    if case.family == "Qwen3_5Text":
        return [*DENSE, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    if case.family in LATENT:
        return LATENT[case.family]
    if case.family == "Qwen3Next":
        return [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]
    if case.family == "Qwen3_5MoeText":
        return [*ATTENTION, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    if case.family == "Starcoder2":
        return [*ATTENTION, "c_fc", "c_proj"]
    if case.family == "Phi":
        return ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"]
    return ATTENTION if case.family in SPARSE else DENSE


SPARSE = (
    "Mixtral",
    "Qwen3Moe",
    "Qwen2Moe",
    "GptOss",
    "Olmoe",
    "Glm4Moe",
    "Ernie4_5_Moe",
    "MiniMaxM2",
    "Llama4Text",
)
LATENT = {
    "DeepseekV2": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
    **{
        family: ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
        for family in ("DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa", "Youtu")
    },
}
ONE_PER_FAMILY = list({case.family: case for case in reversed(CASES)}.values())[::-1]
PHI = next(case for case in ONE_PER_FAMILY if case.family == "Phi")
# peft writes the bias of Phi's output projection into the adapter too
NO_HEAD_BIAS = [case for case in ONE_PER_FAMILY if case.family != "Phi"]


def embedding_of(case: Case) -> str:
    return "embeddings" if case.family == "NemotronH" else "embed_tokens"


@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=lambda case: case.name)
def test_a_mixed_batch_equals_peft(case: Case, tmp_path: Path) -> None:
    base = case.save(tmp_path / "base")
    targets = targets_of(case)
    configs = [
        {"r": 4, "lora_alpha": 8, "target_modules": targets},
        {
            "r": 8,
            "lora_alpha": 4,
            "use_rslora": True,
            "target_modules": targets[:2],
            "rank_pattern": {targets[0]: 16},
            "alpha_pattern": {f"layers.1.self_attn.{targets[1]}": 32},
        },
        {
            "r": 3,
            "target_modules": rf".*\.({'|'.join(targets)})",
            "exclude_modules": targets[1:2],
        },
        {"r": 5, "target_modules": targets, "layers_to_transform": [0, 2]},
    ]
    peft_model = with_adapters(base, tmp_path / "adapters", configs)
    names: list[str | None] = [*(f"a{index}" for index in range(len(configs))), None]
    equals_peft(case, peft_model, tmp_path, names)


def peft_logits(peft_model, name: str | None, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([token_ids])
        if name is None:
            with peft_model.disable_adapter():
                return peft_model(ids).logits[0].float()
        peft_model.set_adapter(name)
        return peft_model(ids).logits[0].float()


@pytest.mark.parametrize("case", NO_HEAD_BIAS, ids=lambda case: case.name)
def test_embeddings_and_output_projections_equal_peft(case: Case, tmp_path: Path) -> None:
    base = case.save(tmp_path / "base")
    configs = [
        {"r": 4, "lora_alpha": 8, "target_modules": [embedding_of(case), "lm_head"]},
        {"r": 7, "target_modules": ["lm_head"]},
        {"r": 3, "target_modules": [embedding_of(case), *targets_of(case)[:1]], "use_rslora": True},
    ]
    peft_model = with_adapters(base, tmp_path / "adapters", configs)
    equals_peft(case, peft_model, tmp_path, ["a0", "a1", None, "a2"])


@pytest.mark.parametrize("case", NO_HEAD_BIAS, ids=lambda case: case.name)
def test_complete_modules_and_biases_of_b_equal_peft(case: Case, tmp_path: Path) -> None:
    base = case.save(tmp_path / "base")
    targets = targets_of(case)
    configs = [
        {"r": 4, "target_modules": targets[-1:], "modules_to_save": ["lm_head"]},
        {"r": 3, "target_modules": targets[:1], "modules_to_save": [embedding_of(case)]},
        {"r": 5, "target_modules": targets[:2], "lora_bias": True},
    ]
    peft_model = with_adapters(base, tmp_path / "adapters", configs)
    equals_peft(case, peft_model, tmp_path, ["a0", "a1", None, "a2", "a0"])


def test_an_adapter_with_a_bias_of_the_output_projection_is_refused(tmp_path: Path) -> None:
    config: dict[str, object] = {"r": 4, "target_modules": ["lm_head"]}
    with_adapters(PHI.save(tmp_path / "base"), tmp_path / "adapters", [config])
    with pytest.raises(ConfigError, match=r"lm_head\.base_layer\.bias.*changes no matrix"):
        open_adapter(tmp_path / "adapters" / "a0", read_spec(tmp_path / "base"), 256)


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_complete_linear_layers_equal_peft(name: str, tmp_path: Path) -> None:
    """One of them in a matrix with others, with a bias and without."""
    case = next(case for case in CASES if case.name == name)
    base = case.save(tmp_path / "base")
    first, *_, last = targets_of(case)
    config = {"r": 4, "target_modules": ["o_proj"], "modules_to_save": [first, last]}
    peft_model = with_adapters(base, tmp_path / "adapters", [config])
    equals_peft(case, peft_model, tmp_path, ["a0", None, "a0"])


@pytest.mark.parametrize("biases", ["all", "lora_only"])
@pytest.mark.parametrize("name", ["llama-biases-mqa", "qwen2", "granite-swa"])
def test_trained_biases_equal_peft(name: str, biases: str, tmp_path: Path) -> None:
    """Peft trains the biases in place, so one adapter at a time, and has no base model left."""
    case = next(case for case in CASES if case.name == name)
    base = case.save(tmp_path / "base")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj", "up_proj"], bias=biases
    )
    peft_model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * 0.3)
    peft_model.save_pretrained(tmp_path / "adapter")
    model = load(tmp_path / "base", max_model_len=case.max_model_len)
    assert isinstance(model, Decoder)
    prompts = random_prompts((11, 5), VOCAB)
    rows = greedy(model, prompts, [read(model, tmp_path / "adapter"), None])
    expected = peft_model.eval()(torch.tensor([rows[0].token_ids[:-1]])).logits[0].detach()
    torch.testing.assert_close(torch.cat(rows[0].logits), expected, atol=2e-4, rtol=1e-4)
    [plain] = greedy(model, prompts[1:], [None])
    assert torch.equal(torch.cat(rows[1].logits), torch.cat(plain.logits))


@pytest.mark.parametrize("last", ["q_proj", "gate"])
def test_experts_equal_peft(last: str, tmp_path: Path) -> None:
    """A checkpoint of experts one by one, as of transformers 4, which peft converts; `gate` is the
    router. Of Qwen3-MoE, peft 0.21 leaves the dense layers out.
    """
    case = next(case for case in ONE_PER_FAMILY if case.family == "Mixtral")
    base = case.save(tmp_path / "base")
    path = tmp_path / "adapters" / "a0"
    targets = ["w1", "w2", "w3", last]
    write_adapter(path, read_spec(tmp_path / "base"), targets, scale=2.0, lora_dropout=0.0)
    peft_model = peft.PeftModel.from_pretrained(base, path, adapter_name="a0")
    equals_peft(case, peft_model.eval(), tmp_path, ["a0", None, "a0"])


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen2-moe", r".*\.shared_expert(_gate|\.\w+_proj)"),
        ("granite-hybrid-moe", r".*\.shared_mlp\.\w+_linear"),
        ("nemotron-h-moe", r".*\.shared_experts\.\w+_proj"),
        ("nemotron-h-latents", r".*\.fc[12]_latent_proj"),
        ("llama4", r".*\.shared_expert\.\w+_proj"),
    ],
)
def test_the_expert_of_all_tokens_equals_peft(name: str, targets: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    base = case.save(tmp_path / "base")
    configs: list[dict[str, object]] = [
        {"r": 4, "target_modules": targets},
        {"r": 3, "target_modules": targets, "use_rslora": True},
    ]
    peft_model = with_adapters(base, tmp_path / "adapters", configs)
    equals_peft(case, peft_model, tmp_path, ["a0", "a1", None, "a0"])


@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize(
    "name", ["llama4", "qwen3-moe", "mixtral", "gpt-oss", "glm4-moe", "qwen3.5-moe", "olmoe"]
)
def test_parameters_of_all_experts_equal_peft(
    name: str, parameters: list[str], tmp_path: Path
) -> None:
    """`target_parameters`: A and B of all experts of a layer, as peft saves them."""
    case = next(case for case in CASES if case.name == name)
    base = case.save(tmp_path / "base")
    targets = [f"experts.{parameter}" for parameter in parameters]
    config: dict[str, object] = {
        **{"r": 3, "lora_alpha": 8, "lora_dropout": 0.0},
        **{"target_modules": [], "target_parameters": targets},
    }
    peft_model = with_adapters(base, tmp_path / "adapters", [config])
    equals_peft(case, peft_model, tmp_path, ["a0", None])


def saved_parameters(path: Path, name: str = "llama4") -> tuple[Decoder, dict[str, torch.Tensor]]:
    """A model and the tensors of an adapter of all parameters of its experts in `a0`."""
    case = next(case for case in CASES if case.name == name)
    base = case.save(path / "base")
    config = {"r": 3, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": []}
    parameters = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    with_adapters(base, path, [config | parameters])
    model = load(path / "base")
    assert isinstance(model, Decoder)
    return model, load_file(path / "a0" / "adapter_model.safetensors")


def test_parameters_may_be_in_either_order_and_nesting(tmp_path: Path) -> None:
    """A and B of older versions of peft are those of the transposed matrix; which parameter is
    nested in the other differs too.
    """
    model, tensors = saved_parameters(tmp_path)
    prompts = random_prompts((12,), VOCAB)
    [expected] = greedy(model, prompts, [read(model, tmp_path / "a0")])
    num_experts = model.spec.moe.num_experts
    turned = {}
    for name, tensor in tensors.items():
        nested = ".base_layer" in name
        other = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("_B", "_A")
        own = other if nested else other.replace(".experts.", ".experts.base_layer.")
        own = own.replace(".base_layer", "") if nested else own
        if "lora_A" in name:  # [E r, x] -> [x, r E]
            rows = tensor.reshape(num_experts, -1, tensor.shape[1])
            turned[own] = rows.permute(2, 1, 0).reshape(tensor.shape[1], -1).contiguous()
        else:
            rows = tensor.reshape(tensor.shape[0], -1, num_experts)
            turned[own] = rows.permute(2, 1, 0).reshape(-1, tensor.shape[0]).contiguous()
    save_file(turned, tmp_path / "a0" / "adapter_model.safetensors")
    [row] = greedy(model, prompts, [read(model, tmp_path / "a0")])
    assert row.token_ids == expected.token_ids
    assert torch.equal(torch.cat(row.logits), torch.cat(expected.logits))


@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"]], ids=str)
def test_square_experts_have_the_order_of_the_others_or_are_refused(
    parameters: list[str], tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == "llama4")
    case = replace(case, values=case.values | {"hidden_size": 64, "intermediate_size": 64})
    base = case.save(tmp_path / "base")
    config: dict[str, object] = {
        **{"r": 3, "lora_dropout": 0.0, "target_modules": []},
        "target_parameters": [f"experts.{parameter}" for parameter in parameters],
    }
    peft_model = with_adapters(base, tmp_path / "adapters", [config])
    if len(parameters) == 2:
        equals_peft(case, peft_model, tmp_path, ["a0", None])
        return
    with pytest.raises(ConfigError, match="square: nothing in the file says"):
        open_adapter(tmp_path / "adapters" / "a0", read_spec(tmp_path / "base"), 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": None}, "without the other of A and B"),
        ({"A": None, "B": None}, "holds no tensors for 'layers.1.feed_forward.experts"),
        ({"A": torch.zeros(15, 7)}, r"shape \[15, 7\], which fits no parameter"),
        ({"A": torch.zeros(12, 64), "B": torch.zeros(80, 12)}, "the base model and .* need"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(
    change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    model, tensors = saved_parameters(tmp_path)
    start = next(name for name in tensors if "layers.1." in name and ".base_layer" in name)
    for part, tensor in change.items():
        name = f"{start.rpartition('.lora_')[0]}.lora_{part}.weight"
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "a0" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        open_adapter(tmp_path / "a0", model.spec, 64)


def test_unmerged_experts_equal_merged(tmp_path: Path) -> None:
    case = next(case for case in ONE_PER_FAMILY if case.family == "Qwen3Moe")
    case.save(tmp_path / "base")
    targets = ["gate_proj", "up_proj", "down_proj", "gate"]
    adapter = write_adapter(tmp_path / "a0", read_spec(tmp_path / "base"), targets, scale=2.0)
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    halves = load_file(adapter / "adapter_model.safetensors")
    for name, a in halves.items():
        if name.endswith("lora_A.weight"):
            b = halves[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            merged[f"{module}.weight"] += 2.0 * b @ a  # lora_alpha / r
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    model = load(tmp_path / "base")
    assert isinstance(model, Decoder)
    prompts = random_prompts((20,), VOCAB)
    [row] = greedy(model, prompts, [read(model, adapter)])
    [expected] = greedy(load(tmp_path / "merged"), prompts, [None])
    assert row.token_ids == expected.token_ids
    torch.testing.assert_close(torch.cat(row.logits), torch.cat(expected.logits), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3.5", "qwen35"), ("qwen3-next", "qwen3next")]
)
def test_adapters_of_a_gguf_file_equal_peft(name: str, architecture: str, tmp_path: Path) -> None:
    """They are of the checkpoint, whose heads and projections are in another order."""
    case = next(case for case in CASES if case.name == name)
    case = replace(case, values=case.values | {"mlp_only_layers": []})
    base = case.save(tmp_path / "checkpoint")
    config: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": targets_of(case)}
    peft_model = with_adapters(base, tmp_path / "adapters", [config])
    file = tmp_path / "twin.gguf"
    write_twin(tmp_path / "checkpoint", file, architecture, {}, paired=False)
    equals_peft(case, peft_model, tmp_path, ["a0", None], load(file, dtype="float32"))


def equals_peft(
    case: Case, peft_model, path: Path, names: list[str | None], model: Model | None = None
) -> None:
    """A mixed batch of adapters (None: none) has peft's logits, and each adapter has an effect."""
    model = model or load(path / "base", max_model_len=case.max_model_len)
    assert isinstance(model, Decoder)
    packed = [None if n is None else read(model, path / "adapters" / n) for n in names]
    prompts = random_prompts((11, 5, 17, 9, 13)[: len(names)], VOCAB)
    rows = greedy(model, prompts, packed)
    plain = greedy(model, prompts, [None] * len(prompts))
    for name, prompt, row, without in zip(names, prompts, rows, plain, strict=True):
        expected = peft_logits(peft_model, name, row.token_ids[:-1])
        found = torch.cat(row.logits)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        same = min(len(prompt), found.shape[0])
        changed = (found[:same] - torch.cat(without.logits)[:same]).abs().max()
        assert (changed > 0.01) == (name is not None), (
            "an adapter changes the logits, none does not"
        )


@pytest.mark.parametrize("case", ONE_PER_FAMILY, ids=lambda case: case.name)
def test_unmerged_equals_merged(case: Case, tmp_path: Path) -> None:
    base = case.save(tmp_path / "base")
    config: dict[str, object] = {"r": 16, "lora_alpha": 16, "target_modules": targets_of(case)}
    peft_model = with_adapters(base, tmp_path / "adapters", [config])
    model = load(tmp_path / "base")
    assert isinstance(model, Decoder)
    prompts = random_prompts((20,), VOCAB)
    [row] = greedy(model, prompts, [read(model, tmp_path / "adapters" / "a0")])
    merged = peft_model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    [expected] = greedy(load(tmp_path / "merged"), prompts, [None])
    assert row.token_ids == expected.token_ids
    atol = max(2e-4, case.atol)
    torch.testing.assert_close(torch.cat(row.logits), torch.cat(expected.logits), atol=atol, rtol=0)


def test_int8_adapters_are_close(tmp_path: Path) -> None:
    """The change that an adapter makes to the logits is off by a few percent."""
    case = next(case for case in CASES if case.name == "qwen3")
    configs: list[dict[str, object]] = [
        {"r": 8, "target_modules": [*DENSE, "embed_tokens", "lm_head"]},
        {"r": 8, "target_modules": DENSE, "modules_to_save": ["lm_head", "embed_tokens"]},
    ]
    [prompt] = random_prompts((40,), VOCAB)
    for index, config in enumerate(configs):
        base = case.save(tmp_path / "base")
        with_adapters(base, tmp_path / f"{index}", [config])
        model = load(tmp_path / "base")
        assert isinstance(model, Decoder)
        path = tmp_path / f"{index}" / "a0"
        exact_adapter, rounded_adapter = read(model, path), read(model, path, in_int8=True)
        assert rounded_adapter.nbytes < 0.5 * exact_adapter.nbytes
        packed = [None, exact_adapter, rounded_adapter]
        of_prompt = [greedy(model, [prompt], [one], chunk=64)[0].logits[0][:40] for one in packed]
        none, exact, rounded = (logits.double() for logits in of_prompt)
        change = (exact - none).square().mean().sqrt()
        assert 0 < (rounded - exact).square().mean().sqrt() < 0.05 * change


@pytest.mark.parametrize(
    ("dtype", "quantization", "in_int8"),
    [
        ("float32", None, False),
        ("bfloat16", None, False),
        ("float16", None, False),
        ("bfloat16", None, True),
        ("bfloat16", "int8", False),
        ("bfloat16", "int4", True),
    ],
)
def test_alone_equals_batched_with_any_neighbours(
    dtype: str, quantization: str | None, in_int8: bool, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == "qwen3")
    base = case.save(tmp_path / "base")
    targets = [*DENSE, "embed_tokens", "lm_head"]
    configs = [{"r": rank, "target_modules": targets} for rank in (1, 256)]
    complete = {"r": 8, "target_modules": DENSE, "modules_to_save": ["embed_tokens", "lm_head"]}
    with_adapters(case.save(tmp_path / "base"), tmp_path / "complete", [complete])
    with_adapters(base, tmp_path / "adapters", configs)
    model = load(tmp_path / "base", dtype=dtype, quantization=quantization)
    assert isinstance(model, Decoder)
    paths = [tmp_path / name for name in ("adapters/a0", "complete/a0", "adapters/a1")]
    loaded = [read(model, path, in_int8=in_int8) for path in paths]
    adapters = [loaded[0], None, loaded[1], loaded[0], loaded[2]]
    prompts = random_prompts((11, 5, 17, 9, 13), VOCAB)
    mixed = greedy(model, prompts, adapters, chunk=5)
    for index, row in enumerate(mixed):
        [alone] = greedy(model, prompts[index : index + 1], adapters[index : index + 1], chunk=64)
        assert alone.token_ids == row.token_ids
        assert torch.equal(torch.cat(alone.logits), torch.cat(row.logits))
