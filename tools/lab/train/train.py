#!/usr/bin/env python3
"""Trains a small byte-level Llama on the tasks of `sluice eval`, for a given number of seconds on one GPU.

Texts grow from 512 tokens to the whole context, as looking up is learned fastest from short texts with many questions.
The output directory is what `sluice eval --model` takes; it is written every minute and at the end, when
measured.json says how many answers are right by task and length.
"""

import argparse
import collections
import json
import multiprocessing
import os
import pathlib
import random
import sys
import sysconfig
import time

import torch

import checkpoint
import measure
from model import BOS, Llama, Shape, sink_logs
from optimizer import optimizers_of
from texts import ANSWER, SHARES, TextMaker


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--output", required=True, help="directory of the model")
    add("--seconds", type=float, default=480, help="from the start of the program to its end")
    add("--steps", type=int, default=0, help="end after so many steps, if that is earlier; 0: no limit")
    add("--measure-seconds", type=float, default=30, help="of --seconds, for the last measurement")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=1)
    add("--lengths", default="512,2048,8192,32768", help="tokens of a text, one stage after the other")
    add("--shares", default="0.2,0.25,0.2,0.35", help="of the time, at most, for each stage; the last has the rest")
    add("--learned", type=float, default=0.985, help="share of the answers' bytes right at which a stage ends earlier")
    add("--step-tokens", type=int, default=1 << 17)
    add("--matrix-lr", type=float, default=0.02, help="of Muon")
    add("--other-lr", type=float, default=3e-3, help="of AdamW, for embeddings and norms")
    add("--sinks", type=float, default=0.0, help="what heads pay for not looking at the first token, so that it is a sink")
    add("--sink-rows", type=int, default=32, help="queries of a text that pay, drawn anew in each step")
    add("--warm-up", type=int, default=100, help="steps")
    add("--decay", type=float, default=0.5, help="share of the time in which learning rates fall to their end")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that write texts")
    add("--kinds", default=",".join(SHARES), help="of texts")
    add("--source", default=sysconfig.get_path("stdlib"), help="directory of .py files for haystacks; '' for none")
    add("--prompts", default="", help="what `sluice eval --write-prompts` wrote, to be measured at the end")
    add("--measured-texts", type=int, default=4, help="per task and length, of those that are written as in training")
    add("--shard-mib", type=int, default=1024, help="of a file of weights, at most")
    add("--checkpoint-seconds", type=float, default=60)
    add("--eager", action="store_true", help="without torch.compile")
    for name, value in vars(Shape()).items():
        add(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = parser.parse_args(given)
    options.lengths = [int(length) for length in options.lengths.split(",")]
    options.kinds = options.kinds.split(",")
    options.shares = [float(share) for share in options.shares.split(",")]
    if len(options.lengths) != len(options.shares):
        parser.error("--shares: as many as --lengths")
    if any(options.step_tokens % length for length in options.lengths):
        parser.error("--step-tokens: a multiple of each of --lengths")
    if max(options.lengths) > options.context:
        parser.error("--lengths: at most --context")
    return options


def source_text(directory, most_bytes=8 << 20):
    """ASCII of the directory's .py files, not of those below it."""
    parts, size = [], 0
    for path in sorted(pathlib.Path(directory).glob("*.py")) if directory else []:
        text = path.read_text("latin-1").encode("ascii", "ignore").decode()
        parts.append(text)
        size += len(text)
        if size > most_bytes:
            break
    return "".join(parts)


MAKER = None  # Of a worker process.


def start_worker(source, kinds):
    global MAKER
    MAKER = TextMaker(source, kinds)


def make_batch(seed, count, length):
    made = [MAKER.write(f"{seed} {i}", length) for i in range(count)]
    return length, b"".join(text for text, _, _ in made), b"".join(weights for _, weights, _ in made)


class Texts:
    """Batches, written ahead by worker processes; the same ones for the same seed and lengths."""

    def __init__(self, options, source):
        self.options = options
        # Forked: before this process has a context of the GPU, or threads of its own.
        self.pool = multiprocessing.get_context("fork").Pool(options.workers, start_worker, (source, options.kinds))
        self.ahead, self.asked = collections.deque(), 0

    def take(self, choose_length):
        while len(self.ahead) < 2 * self.options.workers:
            length = choose_length()
            count = self.options.step_tokens // length
            self.ahead.append(self.pool.apply_async(make_batch, (f"{self.options.seed} {self.asked}", count, length)))
            self.asked += 1
        length, text, weights = self.ahead.popleft().get(timeout=120)
        as_rows = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, length)
        return as_rows(text), as_rows(weights)

    def close(self):
        self.pool.terminate()
        self.pool.join()


class Curriculum:
    """Which lengths are trained when, and how fast."""

    def __init__(self, options):
        self.options, self.stage, self.right = options, 0, 0.0
        self.random = random.Random(options.seed)

    def length(self):
        """Half of the steps have the longest of the stage, the others one of the shorter ones."""
        lengths = self.options.lengths
        longest = self.stage == 0 or self.random.random() < 0.5
        return lengths[self.stage] if longest else self.random.choice(lengths[: self.stage])

    def observe(self, length, right, progress):
        """:param right: share of the answers' bytes :return: whether a stage begins"""
        options = self.options
        if length == options.lengths[self.stage]:
            self.right += (right - self.right) * 0.1
        over = progress > sum(options.shares[: self.stage + 1]) or self.right > options.learned
        if not over or self.stage + 1 == len(options.lengths):
            return False
        self.stage, self.right = self.stage + 1, 0.0
        return True

    def rate(self, step, progress):
        falling = min(1.0, (1.0 - progress) / self.options.decay)
        return min(1.0, (step + 1) / self.options.warm_up) * max(0.03, falling)


class Training:
    def __init__(self, options, model, texts):
        self.options, self.model, self.texts = options, model, texts
        self.optimizers = optimizers_of(model, options.matrix_lr, options.other_lr)
        self.rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self.plan = Curriculum(options)

    def step(self, rate):
        """:return: (length, loss, share of the answers' bytes right), the last two on the device"""
        text, weights = (self.on_device(each) for each in self.texts.take(self.plan.length))
        targets = text.long()
        tokens = targets.roll(1, 1)
        tokens[:, 0] = BOS
        costs = []
        loss, same = self.model(tokens, targets, weights.float() / ANSWER, self.sinks(costs, targets.shape[1]))
        (loss + self.options.sinks * sum(costs) / len(costs) if costs else loss).backward()
        self.update(rate)
        answers = (weights == ANSWER).reshape(-1)
        return targets.shape[1], loss.detach(), (same & answers).sum() / answers.sum().clamp(min=1)

    def sinks(self, costs, length):
        """What `costs` learns from a layer's queries and keys; None where nothing is asked."""
        if not self.options.sinks:
            return None
        rows = torch.randint(1, length, (self.options.sink_rows,), device=self.options.device)
        return lambda queries, keys: costs.append(-sink_logs(queries, keys, rows).mean())

    def on_device(self, batch):
        if not self.options.device.startswith("cuda"):
            return batch
        return batch.pin_memory().to(self.options.device, non_blocking=True)

    def update(self, rate):
        for weight in self.model.parameters():
            torch.nan_to_num_(weight.grad, 0.0, 0.0, 0.0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rates in zip(self.optimizers, self.rates):
            for group, full in zip(optimizer.param_groups, rates):
                group["lr"] = full * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def run(self, deadline):
        """Trains until `deadline` (time.monotonic). The first step, which may compile, is outside of the plan."""
        self.step(1.0 / self.options.warm_up)
        begin = saved = said = time.monotonic()
        print(f"compiled, {deadline - begin:.0f} s for training", flush=True)
        step, last = 0, None
        while time.monotonic() < deadline and not 0 < self.options.steps <= step:
            progress = (time.monotonic() - begin) / max(1e-6, deadline - begin)
            if self.options.steps:
                progress = max(progress, step / self.options.steps)
            now = self.step(self.plan.rate(step, progress))
            if last is not None:  # Of the step before, so that the device always has work.
                length, loss, right = last[0], last[1].item(), last[2].item()
                begins = self.plan.observe(length, right, progress)
                if begins or time.monotonic() - said > 5 or step < 3:
                    said = time.monotonic()
                    print(f"{said - begin:6.1f} s, step {step}: length {length}, loss {loss:.4f}, answers' bytes "
                          f"{right:.4f}, {'next stage' if begins else 'stage'} {self.plan.stage}", flush=True)
            step, last = step + 1, now
            if time.monotonic() - saved > self.options.checkpoint_seconds:
                saved = time.monotonic()
                save(self.options, self.model)
        said = "" if last is None else f", the last with loss {last[1].item():.4f}"
        tokens = step * self.options.step_tokens
        print(f"{time.monotonic() - begin:.1f} s, {step} steps, {tokens / 1e6:.1f} M tokens{said}", flush=True)


def save(options, model):
    checkpoint.save(options.output, model.shape.config(), model.tensors(), options.shard_mib << 20)


def compiled(options, model):
    """Whether parts of the model could be compiled; said, as without they take twice as long."""
    if options.eager or not options.device.startswith("cuda"):
        return False
    torch._dynamo.config.suppress_errors = True  # What cannot be compiled runs as it is.
    model.compile()
    return True


def main():
    start = time.monotonic()
    options = arguments()
    source = source_text(options.source)
    texts = Texts(options, source)
    try:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
        shape = Shape(**{name: getattr(options, name) for name in vars(Shape())})
        model = Llama(shape, dtype).to(options.device)
        parameters = sum(weight.numel() for weight in model.parameters())
        compiles = compiled(options, model)
        print(f"{shape}: {parameters / 1e6:.1f} M parameters, {options.device}, {len(source) >> 10} KiB of source, "
              f"{'compiled' if compiles else 'eager'}", flush=True)
        Training(options, model, texts).run(start + options.seconds - options.measure_seconds)
    finally:
        texts.close()
    save(options, model)
    model.eager()
    cells = measure.prompts_of(options.prompts) if options.prompts else {}
    cells |= measure.own_texts(TextMaker(source, options.kinds), options.lengths, options.measured_texts)
    table = measure.measure(model, cells, options.device, start + options.seconds)
    sinks = measure.sinks(model, TextMaker(source, options.kinds), options.lengths[-1], options.device)
    for layer, heads in enumerate(sinks):
        print(f"layer {layer}, share of the first token by head: {' '.join(f'{share:.2f}' for share in heads)}")
    checkpoint.write_whole(pathlib.Path(options.output) / "sinks.json", json.dumps(sinks).encode())
    checkpoint.write_whole(pathlib.Path(options.output) / "measured.json", json.dumps(table, indent=1).encode())
    for row in table:
        print(f"{row['task']:>14} {row['length']:>6}: {row['right']:.3f} of {row['answers']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
