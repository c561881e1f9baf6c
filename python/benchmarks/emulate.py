"""What other choices of tokens would answer, emulated with torch before anybody builds them.

`sluice eval --tasks table --lengths 32000 --count 64 --seed 777 --write-prompts prompts.jsonl`, then
`python benchmarks/emulate.py DIR prompts.jsonl --task table` from python/: DIR holds a small byte-level Llama (one of
tools/train, or tests/data/testbed). A prompt is read densely but for its last 24 tokens; these and the answer of dense
attention are read on by every choice side by side, each with the keys and values that its own outputs lead to. Counted
are answers of which every step has dense attention's likeliest token, and the divergence of the distributions. Sums are
float32, activations, keys and values bf16, scores exact. Of a KV head what any of its query heads chose is attended,
with 4 sinks and 128 recent tokens, as the engine does it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

SINKS, RECENT, LAST = 4, 128, 24
BOS, EOS, NEWLINE = 256, 257, 10
PAGES = (16, 64, 256)


class Choice(NamedTuple):
    name: str
    tokens: float = 0.0  # of each query head; below 1 a share of the prompt; 0: all
    by_value: bool = False  # ranked by the score and how far the value is from the mean
    rest: int = 0  # what stands for the others: 0 nothing, 1 the mean of all values, else the mean of a page of so many
    noise: float = 0.0  # relative, of outputs


CHOICES = (Choice("dense"), Choice("floor: sums 1e-3 apart", noise=1e-3), Choice("64", 64),
           Choice("64, mean", 64, rest=1),
           *(Choice(f"64, page {page}", 64, rest=page) for page in PAGES), Choice("64 by value, mean", 64, True, 1),
           Choice("64 by value, page 64", 64, True, 64), Choice("128, mean", 128, rest=1),
           Choice("256 by value, mean", 256, True, 1), Choice("1%, mean", 0.01, rest=1),
           Choice("4%, mean", 0.04, rest=1))


class Prompt:
    """Of each layer [KV heads, tokens, head_dim] float32, and what stands for values that are not attended."""

    def __init__(self, keys_and_values):
        self.keys = [k.float() for k, _ in keys_and_values]
        self.values = [v.float() for _, v in keys_and_values]
        self.tokens = self.keys[0].shape[1]
        self.mean = [v.mean(1) for v in self.values]
        self.apart = [(v - v.mean(1, keepdim=True)).norm(dim=-1).clamp_min(1e-9).log() for v in self.values]
        self.pages = [{page: self._means(v, page) for page in PAGES} for v in self.values]

    def _means(self, values, page):
        heads, tokens, dim = values.shape
        count = -(-tokens // page)
        padded = F.pad(values, (0, 0, 0, count * page - tokens)).view(heads, count, page, dim).sum(2)
        sizes = torch.full((count, 1), float(page), device=values.device)
        sizes[-1] = tokens - (count - 1) * page
        return padded / sizes


class Emulated:
    def __init__(self, directory: Path, device: str):
        config = json.loads((directory / "config.json").read_text())
        self.layers, self.heads, self.kv_heads = (config[f"num_{what}"] for what in
                                                  ("hidden_layers", "attention_heads", "key_value_heads"))
        self.dim, self.eps, self.device = config["head_dim"], config["rms_norm_eps"], device
        self.group = self.heads // self.kv_heads
        self.frequencies = config["rope_theta"] ** -(torch.arange(0, self.dim, 2, device=device).float() / self.dim)
        self.weights = {name: tensor.to(device) for file in directory.glob("*.safetensors")
                        for name, tensor in load_file(file).items()}

    def _weight(self, layer: int, name: str):
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def _norm(self, x, weight):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * weight

    def _rotated(self, x, positions):
        angles = torch.cat([positions[:, None].float() * self.frequencies] * 2, -1)
        y, half = x.float(), self.dim // 2
        return (y * angles.cos() + torch.cat([-y[..., half:], y[..., :half]], -1) * angles.sin()).to(x.dtype)

    def _projected(self, x, layer: int, positions):
        """Query, key and value of rows [n, hidden]: [heads, n, head_dim]."""
        x = self._norm(x, self._weight(layer, "input_layernorm"))
        q, k, v = ((x @ self._weight(layer, f"self_attn.{name}_proj").T).view(len(x), -1, self.dim).transpose(0, 1)
                   for name in "qkv")
        return self._rotated(q, positions), self._rotated(k, positions), v

    def _added(self, x, attended, layer: int):
        x = x + attended @ self._weight(layer, "self_attn.o_proj").T
        y = self._norm(x, self._weight(layer, "post_attention_layernorm"))
        gate, up, down = (self._weight(layer, f"mlp.{name}_proj").T for name in ("gate", "up", "down"))
        return x + (F.silu(y @ gate) * (y @ up)) @ down

    def read(self, ids) -> Prompt:
        x, kept = self.weights["model.embed_tokens.weight"][ids], []
        positions = torch.arange(len(ids), device=self.device)
        for layer in range(self.layers):
            q, k, v = self._projected(x, layer, positions)
            out = F.scaled_dot_product_attention(q[None], k.repeat_interleave(self.group, 0)[None],
                                                 v.repeat_interleave(self.group, 0)[None], is_causal=True)[0]
            x = self._added(x, out.transpose(0, 1).reshape(len(ids), -1), layer)
            kept.append((k, v))
        return Prompt(kept)

    def step(self, token, position: int, prompt: Prompt, tail: list, attended: list):
        """Log probabilities [choices, vocabulary] of the token behind this one. `tail` keeps each choice's keys and
        values."""
        x = self.weights["model.embed_tokens.weight"][token].expand(len(CHOICES), -1)
        at = torch.full((len(CHOICES),), position, device=self.device)
        for layer in range(self.layers):
            q, k, v = (each.transpose(0, 1).float() for each in self._projected(x, layer, at))
            tail[layer].append((k, v))
            out, share = self._attend(q.reshape(len(CHOICES), self.kv_heads, self.group, self.dim), layer, position,
                                      prompt, tail[layer])
            attended.append(share)
            x = self._added(x, out.reshape(len(CHOICES), -1).to(x.dtype), layer)
        x = self._norm(x, self.weights["model.norm.weight"])
        return F.log_softmax((x @ self.weights["model.embed_tokens.weight"].T).float(), -1)

    def _attend(self, q, layer: int, position: int, prompt: Prompt, tail):
        own_keys, own_values = (torch.stack([each[i] for each in tail], 2) for i in (0, 1))
        scores = torch.einsum("ckgd,knd->ckgn", q, prompt.keys[layer]) * self.dim**-0.5
        own = torch.einsum("ckgd,cktd->ckgt", q, own_keys) * self.dim**-0.5
        top = torch.maximum(scores.amax(-1), own.amax(-1))[..., None]
        chosen = self._chosen(scores, layer, position, prompt)
        weights, own = (scores - top).exp(), (own - top).exp()
        kept = weights * chosen[:, :, None]
        left = weights - kept
        out = torch.einsum("ckgn,knd->ckgd", kept, prompt.values[layer])
        out = out + torch.einsum("ckgt,cktd->ckgd", own, own_values)
        mass = weights.sum(-1) + own.sum(-1)
        for c, choice in enumerate(CHOICES):
            if choice.tokens and choice.rest == 0:
                mass[c] -= left[c].sum(-1)
            elif choice.rest == 1:
                out[c] += left[c].sum(-1)[..., None] * prompt.mean[layer][:, None]
            elif choice.rest:
                means = prompt.pages[layer][choice.rest]
                padded = F.pad(left[c], (0, means.shape[1] * choice.rest - prompt.tokens))
                out[c] += torch.einsum("kgp,kpd->kgd", padded.unflatten(-1, (-1, choice.rest)).sum(-1), means)
        out = out / mass[..., None]
        noise = torch.tensor([choice.noise for choice in CHOICES], device=self.device)[:, None, None, None]
        return out * (1 + noise * torch.randn_like(out)), chosen.float().sum(-1).mean(1)

    def _chosen(self, scores, layer: int, position: int, prompt: Prompt):
        """[choices, KV heads, tokens of the prompt]"""
        chosen = torch.zeros(len(CHOICES), self.kv_heads, prompt.tokens, dtype=torch.bool, device=self.device)
        end = min(max(SINKS, position + 1 - RECENT), prompt.tokens)
        chosen[:, :, :SINKS] = True
        chosen[:, :, end:] = True
        for c, choice in enumerate(CHOICES):
            count = int(choice.tokens * prompt.tokens) if choice.tokens < 1 else int(choice.tokens)
            if count == 0:
                chosen[c] = True
                continue
            ranked = scores[c, ..., SINKS:end] + (prompt.apart[layer][:, None, SINKS:end] if choice.by_value else 0.0)
            best = ranked.topk(min(count, end - SINKS), -1).indices + SINKS
            chosen[c].scatter_(1, best.flatten(1), True)
        return chosen


def answer(model: Emulated, text: str, right: str) -> dict:
    """Of one prompt: by choice whether all of the answer is the same, the divergence at each of its steps, what is
    attended."""
    ids = torch.tensor([BOS, *text.encode()], device=model.device)
    prompt = model.read(ids[:-LAST])
    tail, attended, position = [[] for _ in range(model.layers)], [], len(ids) - LAST
    for token in ids[-LAST:]:
        logs = model.step(token, position, prompt, tail, attended)
        position += 1
    same, divergence, said = torch.ones(len(CHOICES), dtype=torch.bool, device=model.device), [], []
    for _ in range(len(right.encode()) + 4):
        divergence.append((logs[0].exp() * (logs[0] - logs)).sum(-1))
        likeliest = logs.argmax(-1)
        same &= likeliest == likeliest[0]
        said.append(int(likeliest[0]))
        if said[-1] in (NEWLINE, EOS):
            break
        logs = model.step(likeliest[0], position, prompt, tail, attended)
        position += 1
    return {"same": same.cpu(), "divergence": torch.stack(divergence).cpu(),
            "attended": torch.stack(attended).mean(0).cpu(),
            "right": bytes(token for token in said if token < BOS).decode(errors="replace") == right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, help="of `sluice eval --write-prompts`")
    parser.add_argument("--task", help="only its prompts")
    parser.add_argument("--count", type=int, default=1 << 20, help="prompts at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no prompt is begun later")
    parser.add_argument("--output", type=Path, help="JSON, rewritten behind each prompt")
    wants = parser.parse_args()
    torch.set_grad_enabled(False)
    model = Emulated(wants.model, "cuda" if torch.cuda.is_available() else "cpu")
    begun, found = time.monotonic(), []
    prompts = [json.loads(line) for line in wants.prompts.read_text().splitlines()]
    for each in [one for one in prompts if wants.task in (None, one["task"])][:wants.count]:
        if time.monotonic() - begun > wants.seconds:
            break
        found.append(answer(model, each["prompt"], each["answer"]))
        steps = torch.cat([one["divergence"] for one in found])
        choices = {
            choice.name: {"same": sum(int(one["same"][c]) for one in found), "kl": float(steps[:, c].double().mean()),
                          "worst": float(steps[:, c].max()),
                          "attended": float(torch.stack([one["attended"] for one in found])[:, c].mean())}
            for c, choice in enumerate(CHOICES)}
        report = {"task": wants.task, "prompts": len(found), "dense_right": sum(one["right"] for one in found),
                  "choices": choices}
        if wants.output:
            wants.output.write_text(json.dumps(report, indent=1) + "\n")
    if not found:
        raise SystemExit("no prompt of that task")
    print(f"{report['prompts']} prompts, dense attention right in {report['dense_right']}")
    for name, row in report["choices"].items():
        print(f"{name:24s} same {row['same']:4d}  KL {row['kl']:.1e}  worst {row['worst']:.1e}  "
              f"attended {row['attended']:.0f}")


if __name__ == "__main__":
    main()
