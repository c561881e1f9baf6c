"""How many answers a model has right when it is told the text before each: what greedy decoding would say."""

import json
import time

import torch
import torch.nn.functional as F

from model import BOS, normalized, sink_logs


def prompts_of(path):
    """What `sluice eval --write-prompts` wrote, as {(task, length): [(text, [(begin, end)])]}."""
    cells = {}
    for line in open(path, encoding="utf-8"):
        prompt = json.loads(line)
        text = prompt["prompt"] + prompt["answer"]
        row = (text.encode("latin-1"), [(len(prompt["prompt"]), len(text))])
        cells.setdefault((prompt["task"], prompt["length_tokens"]), []).append(row)
    return cells


def own_texts(maker, lengths, count):
    """Texts as in training, of seeds that training does not draw."""
    cells = {}
    for length in lengths:
        for kind in maker.shares:
            if kind != "reading":
                seeds = (f"held out {kind} {length} {i}" for i in range(count))
                cells[f"own {kind}", length] = [maker.write(seed, length, kind)[::2] for seed in seeds]
    return cells


def with_first(rows):
    """BOS in front of each text, zeros behind the shorter ones: [rows, longest + 1]"""
    tokens = torch.zeros(len(rows), max(len(text) for text, _ in rows) + 1, dtype=torch.long)
    for row, (text, _) in enumerate(rows):
        tokens[row, 0] = BOS
        tokens[row, 1 : len(text) + 1] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens


@torch.no_grad()
def right_answers(model, rows, device):
    """For each row and answer in it, whether all of its bytes are the likeliest."""
    tokens = with_first(rows).to(device)
    x = model.hidden(tokens[:, :-1]).view(len(rows), tokens.shape[1] - 1, -1)
    found = []
    for row, (_, answers) in enumerate(rows):
        if not answers:
            continue
        places = torch.cat([torch.arange(begin, end) for begin, end in answers]).to(device)
        h = normalized(x[row, places], model.norm, model.shape.epsilon, model.dtype)
        same = F.linear(h, model.embedding.to(model.dtype)).argmax(-1) == tokens[row, places + 1]
        found += [part.all().item() for part in same.cpu().split([end - begin for begin, end in answers])]
    return found


def measure(model, cells, device, deadline, batch_tokens=1 << 17):
    """:return: a row for each (task, length) that could be measured before `deadline` (time.monotonic)"""
    table = []
    for (task, length), rows in cells.items():
        found, at_once = [], max(1, batch_tokens // length)
        for i in range(0, len(rows), at_once):
            if time.monotonic() > deadline:
                return table
            found += right_answers(model, rows[i : i + at_once], device)
        table.append({"task": task, "length": length, "answers": len(found), "right": sum(found) / max(1, len(found))})
    return table


@torch.no_grad()
def sinks(model, maker, length, device, count=128):
    """:return: by layer and query head, the mean share of the first token in the softmax of `count` late tokens"""
    tokens = with_first([maker.write("held out sinks", length)[::2]])[:, :length].to(device)
    rows = torch.linspace(length // 2, length - 1, count, device=device).long()
    shares = []
    model.hidden(tokens, lambda q, k: shares.append(sink_logs(q, k, rows).exp().mean((0, 2)).tolist()))
    return shares
