"""The same random weights for every engine: one seeded checkpoint, converted for each of them.

A checkpoint has the sizes of `quickstep.bench.shapes`, weights drawn from a seed, and a byte-level
BPE vocabulary trained on the standard library's source. Rows of the embedding beyond the
vocabulary are zero, so that greedy tokens stay inside it. Needs transformers.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

from benchmarks.peers.environments import Environment
from quickstep.bench.shapes import SHAPES

__all__ = ["VOCABULARY", "gguf", "make_checkpoint", "openvino_ir", "w8a8"]

VOCABULARY = 8192
_LLAMA_QUANTS = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}


def make_checkpoint(shape: str, cache: Path, seed: int) -> Path:
    """A directory that transformers, vLLM and Quickstep open."""
    path = cache / f"{shape}-{seed}"
    if (path / "model.safetensors").exists():
        return path
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in SHAPES[shape].items() if key != "torch_dtype"}
    [architecture] = fields["architectures"]
    kind = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}[architecture]
    config = AutoConfig.for_model(kind, **fields, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(seed)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.get_input_embeddings().weight[VOCABULARY:] = 0
    model.generation_config.eos_token_id = 0
    _write_tokenizer(path)
    model.save_pretrained(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """Trained on a fixed list of modules: the same on every machine with this Python."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_path("stdlib"))
    files = [str(file) for file in sorted(library.glob("*.py"))]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(files, vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # the wrapper has no other way to its tokenizer
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    fast.save_pretrained(path)


def gguf(checkpoint: Path, precision: str, environment: Environment) -> Path:
    """The checkpoint as llama.cpp reads it, quantised by its own tool."""
    base = checkpoint.with_name(f"{checkpoint.name}.bf16.gguf")
    if not base.exists():
        # the converter knows pre-tokenizers by a hash of their output, and not this one's
        program = (
            "import sys; sys.path.insert(0, sys.argv.pop(1)); import convert_hf_to_gguf as c;"
            "from conversion.base import TextModel as t;"
            "t.get_vocab_base_pre = lambda self, tokenizer: 'qwen2'; c.main()"
        )
        source = str(environment.directory / "source")
        command = [str(environment.python), "-c", program, source, str(checkpoint)]
        subprocess.run([*command, "--outtype", "bf16", "--outfile", str(base)], check=True)
    if precision == "bf16":
        return base
    path = checkpoint.with_name(f"{checkpoint.name}.{_LLAMA_QUANTS[precision]}.gguf")
    if not path.exists():
        tool = environment.directory / "build" / "bin" / "llama-quantize"
        subprocess.run([str(tool), str(base), str(path), _LLAMA_QUANTS[precision]], check=True)
    return path


def openvino_ir(checkpoint: Path, precision: str, environment: Environment) -> Path:
    """The checkpoint as OpenVINO reads it, with weights in fp16 (run in bf16), int8 or int4."""
    path = checkpoint.with_name(f"{checkpoint.name}-openvino-{precision}")
    if not path.exists():
        tool = environment.python.parent / "optimum-cli"
        weights = {"bf16": "fp16"}.get(precision, precision)
        task = ["--task", "text-generation-with-past", "--weight-format", weights]
        partial = path.with_name(f"{path.name}.partial")
        command = [str(tool), "export", "openvino", "--model", str(checkpoint), *task]
        subprocess.run([*command, str(partial)], check=True)
        partial.rename(path)
    return path


def w8a8(checkpoint: Path) -> Path:
    """A compressed-tensors checkpoint as vLLM reads it: int8 per output channel, activations
    quantised per token as they come, the output projection in bf16.
    """
    path = checkpoint.with_name(f"{checkpoint.name}-w8a8")
    if (path / "model.safetensors").exists():
        return path
    import torch
    from safetensors.torch import load_file, save_file

    path.mkdir(exist_ok=True)
    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        weight = tensor.float()
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-8)
        tensors[name] = torch.round(weight / scale).clamp(-127, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for file in checkpoint.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = _W8A8
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
