"""A model of transformers whose newest tokens attend as a policy says, all of them in one forward."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from policies import Rows, attend
from router import LOOK, Budgets, Cost, Look, look, step
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "routing"
CHUNK = 2048


@dataclass
class Work:
    """What the attention of a forward does, layer by layer, and what it leaves."""

    budgets: Budgets = field(default_factory=Budgets)
    choices: list[Tensor] | None = None  #: of each layer; without: dense
    looks: list[Look] | None = None  #: of each layer, of the prompt; without: looks are taken
    taken: list[Look] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)


class Emulation:
    """One sequence of one model in bf16."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.work = Work()
        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attention)
        self.start()

    def start(self) -> None:
        """A new sequence."""
        self.cache = DynamicCache(config=self.model.config)
        self.seconds = 0.0  #: that the model's own attention took to read the prompt

    def read(self, tokens: Tensor) -> list[Look]:
        """Reads a prompt, or goes on with it. :param tokens: [count], at least LOOK
        :return: what a look at its newest queries leaves, a layer each"""
        began = time.perf_counter()
        for piece in tokens[:-LOOK].split(CHUNK):
            self._forward("sdpa", piece)
        self.seconds += time.perf_counter() - began
        self.work = Work()
        self._forward(NAME, tokens[-LOOK:])
        return self.work.taken

    def predict(self, tokens: Tensor, work: Work | None = None) -> Tensor:
        """What comes behind each of these tokens, which are forgotten then; without `work` by the model's own
        attention.
        :return: [count, vocabulary], logarithms of probabilities in float32"""
        before = self.cache.get_seq_length()
        self.work = work or Work()
        logits = self._forward(NAME if work else "sdpa", tokens)
        self.cache.crop(before - self.cache.get_seq_length())
        return logits.float().log_softmax(-1)

    @torch.no_grad()
    def _forward(self, attention: str, tokens: Tensor) -> Tensor:
        self.model.set_attn_implementation(attention)
        positions = torch.arange(len(tokens))[None] + self.cache.get_seq_length()
        return self.model(tokens[None], past_key_values=self.cache, use_cache=True, position_ids=positions).logits[0]

    def _attention(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
                   scaling: float | None = None, **_: object) -> tuple[Tensor, None]:
        kv_heads, head_dim = k.shape[1], k.shape[3]
        queries = q[0].float().view(kv_heads, -1, *q.shape[2:])
        rows = Rows(queries, k[0].float(), v[0].float(), scaling or head_dim**-0.5)
        scores, work, layer = rows.scores(), self.work, module.layer_idx
        if work.choices is None or work.looks is None:
            out = attend(scores, rows.v, rows.seen())
            if work.looks is None:
                work.taken.append(look(rows, scores, out, work.budgets))
        else:
            out, cost = step(rows, scores, work.looks[layer], work.choices[layer], work.budgets, seed=layer)
            work.costs.append(cost)
        return out.to(q.dtype).view(1, -1, *out.shape[2:]).transpose(1, 2).contiguous(), None


def everywhere(policy: int, looks: list[Look]) -> list[Tensor]:
    """One policy for all heads."""
    return [torch.full(each.bars.shape[1:], policy) for each in looks]
