"""A byte-level Llama that trains fast: weights of all layers are stacked, and the sequences of a step lie in one row of
tokens but for attention, so that what is compiled serves every length."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

BOS, EOS, VOCABULARY = 256, 257, 320


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 6
    hidden: int = 384
    q_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1024
    context: int = 32768
    theta: float = 500000.0
    epsilon: float = 1e-5

    def config(self):
        """What Hugging Face's config.json says of it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "torch_dtype": "bfloat16",
        }


def normalized(x, weight, epsilon, dtype):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * scale * weight).to(dtype)


def rotated(x, cos, sin):
    """RoPE. x: [tokens, heads, head_dim], cos and sin: [tokens, 1, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def before_attention(x, norm, q, k, v, cos, sin, head_dim, epsilon, dtype):
    h = normalized(x, norm, epsilon, dtype)
    project = lambda weight: F.linear(h, weight.to(dtype)).view(h.shape[0], -1, head_dim)
    return rotated(project(q), cos, sin), rotated(project(k), cos, sin), project(v)


def after_attention(x, attended, o, norm, gate, up, down, epsilon, dtype):
    x = x + F.linear(attended, o.to(dtype)).float()
    h = normalized(x, norm, epsilon, dtype)
    h = F.silu(F.linear(h, gate.to(dtype))) * F.linear(h, up.to(dtype))
    return x + F.linear(h, down.to(dtype)).float()


def sink_logs(q, k, rows):
    """log of the softmax's share that the first token has, of queries of `rows` (positions): [sequences, heads, rows].

    :param q: [sequences, query heads, length, head_dim], after RoPE; k likewise of KV heads"""
    asked = q[:, :, rows].unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("shgrc,shtc->shgrt", asked, k).float() / math.sqrt(q.shape[-1])
    unseen = torch.arange(k.shape[2], device=k.device) > rows[:, None]
    return (logits[..., 0] - logits.masked_fill(unseen, -math.inf).logsumexp(-1)).flatten(1, 2)


def loss_of(x, norm, embedding, targets, weights, epsilon, dtype):
    """Weighted sum of the losses, and whether each token is the likeliest."""
    logits = F.linear(normalized(x, norm, epsilon, dtype), embedding.to(dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum() / weights.sum(), logits.argmax(-1) == targets


class Llama(nn.Module):
    NAMES = {
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "post_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }

    def __init__(self, shape, dtype):
        """:param dtype: of products; weights and what layers add up are float32"""
        super().__init__()
        self.shape, self.dtype = shape, dtype
        q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        weight = lambda *size, std=0.02: nn.Parameter(torch.randn(shape.layers, *size) * std)
        ends = 0.02 / math.sqrt(2 * shape.layers)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, shape.hidden) * 0.02)
        self.q, self.k, self.v = (weight(size, shape.hidden) for size in (q, kv, kv))
        self.o = weight(shape.hidden, q, std=ends)
        self.gate, self.up = (weight(shape.intermediate, shape.hidden) for _ in range(2))
        self.down = weight(shape.hidden, shape.intermediate, std=ends)
        self.input_norm, self.post_norm = (nn.Parameter(torch.ones(shape.layers, shape.hidden)) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.before, self.after, self.head = before_attention, after_attention, loss_of
        self.angles = {}

    def compile(self):
        """What is called from here on with the shapes of the first call is compiled."""
        self.before, self.after, self.head = (
            torch.compile(part, dynamic=False) for part in (before_attention, after_attention, loss_of)
        )

    def eager(self):
        self.before, self.after, self.head = before_attention, after_attention, loss_of

    def rope(self, sequences, length, device):
        """cos and sin of every token's position, [sequences * length, 1, head_dim / 2] each."""
        key = (sequences, length)
        if key not in self.angles:
            half = self.shape.head_dim // 2
            rates = self.shape.theta ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
            angles = torch.outer(torch.arange(length, device=device, dtype=torch.float64), rates)
            angles = angles.repeat(sequences, 1)[:, None]
            self.angles[key] = (angles.cos().float(), angles.sin().float())
        return self.angles[key]

    def hidden(self, tokens, see=None):
        """:param tokens: [sequences, length]
        :param see: called with queries and keys of each layer, [sequences, heads, length, head_dim]
        :return: [sequences * length, hidden], before the last norm"""
        sequences, length = tokens.shape
        shape, dtype = self.shape, self.dtype
        cos, sin = self.rope(sequences, length, tokens.device)
        x = F.embedding(tokens.reshape(-1), self.embedding)
        layers = zip(*(getattr(self, name).unbind(0) for name in self.NAMES))
        for input_norm, q, k, v, o, post_norm, gate, up, down in layers:
            heads = self.before(x, input_norm, q, k, v, cos, sin, shape.head_dim, shape.epsilon, dtype)
            queries, keys, values = (each.view(sequences, length, -1, shape.head_dim).transpose(1, 2) for each in heads)
            if see:
                see(queries, keys)
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            attended = attended.transpose(1, 2).reshape(sequences * length, -1)
            x = self.after(x, attended, o, post_norm, gate, up, down, shape.epsilon, dtype)
        return x

    def forward(self, tokens, targets, weights, see=None):
        x = self.hidden(tokens, see)
        return self.head(
            x, self.norm, self.embedding, targets.reshape(-1), weights.reshape(-1), self.shape.epsilon, self.dtype
        )

    def tensors(self):
        """By the names that Hugging Face gives them, in bf16 on the CPU."""
        found = {"model.embed_tokens.weight": self.embedding}
        for layer in range(self.shape.layers):
            for ours, theirs in self.NAMES.items():
                found[f"model.layers.{layer}.{theirs}.weight"] = getattr(self, ours)[layer]
        found["model.norm.weight"] = self.norm
        return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in found.items()}
