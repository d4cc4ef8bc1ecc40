"""Export a training run: `python -m tools.demo_model.export --run FOLDER --to FOLDER`.

Writes bf16 safetensors, config and tokenizer files from the run's newest checkpoint, at any time
during training, and checks the result against transformers' Llama. The model card is `quality`'s.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_model.network import Llama, Shape
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, write_tokenizer_files

_MAX_LOGIT_DIFFERENCE = 1e-3  # both sides in fp32; what remains is the order of additions


def write_model(run: Path, target: Path) -> None:
    """Write every file of the model but its card into `target`."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    write_tokenizer_files(tokenizer, target)
    (target / "config.json").write_text(json.dumps(_config(tokenizer), indent=2) + "\n")
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in checkpoint["model"].items()}
    path = target / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the writer makes it readable by its owner only


def load_exported(folder: Path) -> Llama:
    """The exported weights in the training module, computing in fp32."""
    model = Llama(Shape())
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: w.float() for name, w in weights.items()})
    return model.eval()


@torch.inference_mode()
def logit_difference(folder: Path) -> float:
    """Largest difference between our logits and transformers', over the complete context length."""
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(Shape().vocab_size, (1, Shape().max_context), generator=generator)
    ours = load_exported(folder).logits(tokens)
    return (ours - reference(tokens).logits).abs().max().item()


def _config(tokenizer: Tokenizer) -> dict[str, object]:
    shape = Shape()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    """Export to a temporary directory next to the target, check, then move it there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--to", type=Path, required=True, help="folder of the exported model")
    arguments = parser.parse_args()
    partial = arguments.to.with_name(arguments.to.name + ".partial")
    write_model(arguments.run, partial)
    difference = logit_difference(partial)
    if difference > _MAX_LOGIT_DIFFERENCE:
        raise SystemExit(
            f"logits differ from transformers' by {difference:.2g}, at most "
            f"{_MAX_LOGIT_DIFFERENCE:g} is allowed; the export in {partial} is wrong"
        )
    arguments.to.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        path.replace(arguments.to / path.name)
    shutil.rmtree(partial)
    print(f"exported to {arguments.to}; logits within {difference:.1e} of transformers'")


if __name__ == "__main__":
    main()
