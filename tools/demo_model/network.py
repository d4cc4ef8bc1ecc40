"""A compact Llama for training, with Hugging Face's parameter names.

Owns the architecture of the demo model. Called by `train`, `export` and `quality`; the engine has
its own implementation and never imports this one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_model.tokenizer import MAX_CONTEXT, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the model."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 256
    intermediate_size: int = 704
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_context: int = MAX_CONTEXT


class _RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        queries, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [R, T, hidden]; cos and sin: [T, D]."""
        rows, length, _ = x.shape
        heads = (rows, length, -1, self._shape.head_size)
        q = _rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self._shape.num_heads // self._shape.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = _causal_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over all of q, k, v [R, H, T, D], with the scores in memory.

    In bf16 on a CPU, forward and backward take 49 ms of one core for 4,096 tokens in rows of 512;
    `scaled_dot_product_attention` takes 97 ms (AVX-512, PyTorch 2.13).
    """
    length, size = q.shape[2:]
    future = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    keys = k.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(
        future.expand(q.shape[0] * q.shape[1], -1, -1), q.flatten(0, 1), keys, alpha=size**-0.5
    )
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(q.shape)


class _FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = _RmsNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _RmsNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = _FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class _EagleDecoderLayer(nn.Module):
    """A layer without a norm before its attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _RmsNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = _FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(x, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleLayer(nn.Module):
    """EAGLE's layer (arXiv:2401.15077): predicts the target's next hidden state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([_EagleDecoderLayer(shape)])

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[R, T, C] of hidden states of tokens and the embeddings of the tokens after them."""
        cos, sin = _rotation(hidden.shape[1], self._shape)
        x = self.fc(torch.cat((embedded.to(hidden.dtype), hidden), dim=-1))
        return self.layers[0](x, cos, sin)


class _Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _RmsNorm(shape.hidden_size, shape.norm_eps)


class Llama(nn.Module):
    """The demo model; the output projection is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Decoder(shape)
        self._initialize_()

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states [R, T, hidden] of tokens [R, T], after the last norm."""
        cos, sin = _rotation(tokens.shape[1], self.shape)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [R, T, V] of tokens [R, T]."""
        return F.linear(self(tokens), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean cross entropy in nats; all arguments [R, T]."""
        logits = self.logits(tokens).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses @ weights.flatten() / weights.sum()

    def _initialize_(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.shape.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual_std if into_residual else 0.02)


def _rotation(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [R, H, T, D], the halves of D being the pairs."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)
