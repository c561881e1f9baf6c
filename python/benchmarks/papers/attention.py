"""Queries, keys and values of a model of transformers, as dense attention sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from transformers import AttentionInterface, AutoModelForCausalLM


class Layer:
    """Queries of a layer's newest tokens, keys and values of all tokens: [steps, q_heads, d], [tokens, kv_heads, d]."""

    def __init__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.queries, self.keys, self.values = queries, keys, values
        self.group = queries.shape[1] // keys.shape[1]

    def steps(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Step, KV head, the queries of its group, and the keys that they see."""
        first = self.keys.shape[0] - self.queries.shape[0]
        for step in range(self.queries.shape[0]):
            for head in range(self.keys.shape[1]):
                own = self.queries[step, head * self.group:(head + 1) * self.group]
                yield step, head, own, self.keys[:first + step + 1, head]


def run(model: AutoModelForCausalLM, ids: list[int],
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The model with this attention, layer by layer: query, key, value [heads, tokens, d] to output [q_heads, tokens, d].
    Returns the logits, [tokens, vocabulary]."""
    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return attend(query[0], key[0], value[0]).transpose(0, 1)[None].contiguous(), None

    AttentionInterface.register("papers", attention)
    model.config._attn_implementation = "papers"
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]


def attention_of(model: AutoModelForCausalLM, ids: list[int], steps: int) -> list[Layer]:
    """Every layer under dense attention; `steps` of the newest queries."""
    layers: list[Layer] = []

    def probe(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        by_token = [each.transpose(0, 1).float() for each in (query[:, -steps:], key, value)]
        layers.append(Layer(*by_token))
        return dense(query, key, value)

    run(model, ids, probe)
    return layers


def shares(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Of the softmax, [heads, tokens]."""
    return torch.softmax(queries @ keys.T / keys.shape[1] ** 0.5, dim=-1)


@dataclasses.dataclass
class Prompts:
    """Prompts with their answers, token ids each, under dense attention."""

    model: AutoModelForCausalLM
    texts: list[tuple[list[int], list[int]]]
    steps: int | None  # Newest tokens that are looked at, those of the answer included; None: the prompt alone.

    def __call__(self) -> Iterator[list[Layer]]:
        for prompt, answer in self.texts:
            ids = prompt if self.steps is None else prompt + answer
            yield attention_of(self.model, ids, self.steps or len(ids))
