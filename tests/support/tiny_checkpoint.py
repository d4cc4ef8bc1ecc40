"""A random Llama of a few thousand parameters with a byte tokenizer, written as a checkpoint."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, VOCAB = 32, 2, 4, 2, 8, 48, 264
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{{ suffix }}"
)


def write_checkpoint(path, template=TEMPLATE, max_len=256, seed=0):
    """Fill the directory `path`; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(_weights(seed), str(path / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": max_len,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "torch_dtype": "float32",
    }
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"temperature": 0.6, "top_p": 0.9, "top_k": None})
    write_tokenizer(path, template)
    return path


def write_tokenizer(path, template=TEMPLATE):
    """Into the directory `path`."""
    tokens = {"eos_token": END} | ({"chat_template": template} if template else {})
    _write(path / "tokenizer_config.json", tokens)
    _library().save(str(path / "tokenizer.json"))


def _write(file, content):
    file.write_text(json.dumps(content))


def _library():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END, special=True)])
    return library


def _weights(seed):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=0.3):
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, scale=1.0),
        "lm_head.weight": random(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        weights |= {
            f"{start}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{start}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{start}.self_attn.q_proj.weight": random(HEADS * HEAD_SIZE, HIDDEN),
            f"{start}.self_attn.k_proj.weight": random(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{start}.self_attn.v_proj.weight": random(KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{start}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_SIZE),
            f"{start}.mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{start}.mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            f"{start}.mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        }
    return weights
