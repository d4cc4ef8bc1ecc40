"""The same random weights for every engine: one seeded checkpoint, converted for each of them.

A checkpoint has the sizes of `quickstep.bench.shapes`, random weights from a seed, and a byte-level
BPE vocabulary trained on the standard library's source. Every greedy token is plain text: rows of
the embedding beyond the vocabulary, of special tokens and of tokens that are not whole ASCII
characters are zero, so that no server holds a token back until the rest of a character has come,
and counts and times of tokens are those of the model. Needs transformers.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Environment
from quickstep.bench.shapes import SHAPES

__all__ = [
    "checkpoint_path",
    "convert",
    "converted_path",
    "make_checkpoint",
    "plain_tokens",
]

_VOCABULARY = 8192
_PLAIN_TOKENS = "plain_tokens.json"
_LLAMA_QUANTS = {"int8": "q8_0", "int4": "q4_0"}


def checkpoint_path(shape: str, cache: Path, seed: int) -> Path:
    """Where `make_checkpoint` writes."""
    return cache / "checkpoints" / f"{shape}-{seed}-plain"


def make_checkpoint(shape: str, cache: Path, seed: int) -> Path:
    """A directory that transformers, vLLM and Quickstep open."""
    final = checkpoint_path(shape, cache, seed)
    if final.exists():
        return final
    path = final.with_name(f"{final.name}.partial")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in SHAPES[shape].items() if key != "torch_dtype"}
    [architecture] = fields["architectures"]
    kind = {
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "Qwen3_5ForCausalLM": "qwen3_5_text",
        "LlamaForCausalLM": "llama",
    }[architecture]
    config = AutoConfig.for_model(kind, **fields, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(seed)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        _write_tokenizer(path, min(_VOCABULARY, model.config.vocab_size))
        plain = torch.zeros(model.config.vocab_size, 1, dtype=torch.bfloat16)
        plain[_write_plain_tokens(path)] = 1
        model.get_output_embeddings().weight.mul_(plain)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(path)
    path.rename(final)
    return final


def plain_tokens(checkpoint: Path) -> list[int]:
    """The token ids that prompts consist of, and that greedy outputs have."""
    found: list[int] = json.loads((checkpoint / _PLAIN_TOKENS).read_text())
    return found


def _write_plain_tokens(path: Path) -> list[int]:
    """The ids whose text is whole ASCII characters, into the checkpoint."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = {
        token_id: tokenizer.decode([token_id]) for token_id in range(tokenizer.get_vocab_size())
    }
    found = [one for one, text in texts.items() if text and text.isascii()]
    (path / _PLAIN_TOKENS).write_text(json.dumps(found))
    return found


def _write_tokenizer(path: Path, num_tokens: int) -> None:
    """Trained on a fixed list of modules: the same on every machine with this Python."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_path("stdlib"))
    files = [str(file) for file in sorted(library.glob("*.py"))]
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train(files, vocab_size=num_tokens, special_tokens=["<|endoftext|>"], show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,  # the wrapper has no other way to its tokenizer
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    fast.save_pretrained(path)


def converted_path(checkpoint: Path, engine: str, precision: str) -> Path:
    """The checkpoint in the form that an engine reads at a precision, which may also be a type that
    llama.cpp's quantizer knows.
    """
    if engine == "llama_cpp":
        kind = _LLAMA_QUANTS.get(precision, precision)
        return checkpoint.with_name(f"{checkpoint.name}.{kind}.gguf")
    if engine == "openvino":
        return checkpoint.with_name(f"{checkpoint.name}-openvino-{precision}")
    if engine == "vllm" and precision == "int8":
        return checkpoint.with_name(f"{checkpoint.name}-w8a8")
    return checkpoint


def convert(checkpoint: Path, engine: str, precision: str, tools: Environment) -> Path:
    """Make `converted_path` with the engine's own tools. Raises CalledProcessError."""
    path = converted_path(checkpoint, engine, precision)
    if path.exists():
        return path
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    if engine == "llama_cpp":
        _to_gguf(checkpoint, precision, tools, partial)
    elif engine == "openvino":
        _to_openvino(checkpoint, precision, tools, partial)
    else:
        _to_w8a8(checkpoint, partial)
    partial.rename(path)
    return path


def _to_gguf(checkpoint: Path, precision: str, tools: Environment, path: Path) -> None:
    """16 bits by llama.cpp's converter, fewer by its quantizer, from bf16."""
    if precision not in ("bf16", "f16"):
        base = convert(checkpoint, "llama_cpp", "bf16", tools)
        tool = tools.directory / "build" / "bin" / "llama-quantize"
        kind = _LLAMA_QUANTS.get(precision, precision)
        subprocess.run([str(tool), str(base), str(path), kind], check=True)
        return
    # the converter knows pre-tokenizers by a hash of their output, and not this one's
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import convert_hf_to_gguf as c;"
        "from conversion.base import TextModel as t;"
        "t.get_vocab_base_pre = lambda self, tokenizer: 'qwen2'; c.main()"
    )
    # of Qwen3.5, whose checkpoints otherwise must have a layer that drafts
    options = ["--no-mtp"] if _config(checkpoint)["model_type"] == "qwen3_5_text" else []
    source = str(tools.directory / "source")
    command = [str(tools.python), "-c", program, source, str(checkpoint)]
    command += ["--outtype", precision, "--outfile", str(path), *options]
    subprocess.run(command, check=True)


def _config(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    return found


def _to_openvino(checkpoint: Path, precision: str, tools: Environment, path: Path) -> None:
    """Weights in fp16 (run in bf16), int8 or int4, by optimum."""
    weights = {"bf16": "fp16"}.get(precision, precision)
    command = [str(tools.python.parent / "optimum-cli"), "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", weights, str(path)], check=True)


def _to_w8a8(checkpoint: Path, path: Path) -> None:
    """A compressed-tensors checkpoint as vLLM reads it: int8 per output channel, activations
    quantised per token as they come, the output projection in bf16.
    """
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
    config = {**_config(checkpoint), "quantization_config": _W8A8}
    (path / "config.json").write_text(json.dumps(config, indent=2))


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
