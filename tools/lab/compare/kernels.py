"""Attention of other libraries, each where it is installed.

A kernel is made ready for a case outside of what is timed, and is then called with the number of a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from cases import PAGE, SCALE, DecodeCase, PromptCase
from shapes import HEAD_DIM, KV_HEADS, Q_HEADS
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[int], torch.Tensor]


class Kernel(NamedTuple):
    version: str
    ready: Callable[[DecodeCase], Call] | Callable[[PromptCase], Call]


def torch_decode(case: DecodeCase) -> Call:
    """torch's copy of FlashAttention-2, keys and values [rows, heads, tokens, d] as torch has them."""
    if case.ragged:
        raise ValueError("sequences of one length only")
    kv = [tuple(each[:, : case.shape.tokens].transpose(1, 2).contiguous() for each in both) for both in case.kv]
    q = case.q.unsqueeze(2)

    def call(copy: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, *kv[copy], enable_gqa=True).squeeze(2)

    return call


def torch_prompt(backend: SDPBackend) -> Callable[[PromptCase], Call]:
    def ready(case: PromptCase) -> Call:
        q, k, v = (each.transpose(1, 2).contiguous() for each in (case.q, case.k, case.v))

        def call(_: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        return call

    return ready


def fa3_kernel(what: str, file: str | None) -> Kernel:
    """FlashAttention-3: its operator has the name of whichever package it came with."""
    packages = ("flash_attn_3", "fa3_fwd")
    if file:
        torch.ops.load_library(file)
    else:
        found = next((name for name in packages if importlib.util.find_spec(name)), None)
        if found is None:
            raise ImportError("install a package that has flash_attn_3 or fa3_fwd, or name its extension with --fa3")
        importlib.import_module(f"{found}._C")
    name = next(name for name in packages if hasattr(getattr(torch.ops, name), "fwd"))
    forward = getattr(torch.ops, name).fwd

    def decode(case: DecodeCase) -> Call:
        q = case.q.unsqueeze(1)
        used = torch.tensor(case.lengths, dtype=torch.int32, device=q.device) if case.ragged else None
        kv = case.kv if case.ragged else [tuple(each[:, : case.shape.tokens] for each in both) for both in case.kv]
        return lambda copy: forward(q, *kv[copy], seqused_k=used, softmax_scale=SCALE, num_splits=0)[0].squeeze(1)

    def prompt(case: PromptCase) -> Call:
        return lambda _: forward(case.q, case.k, case.v, softmax_scale=SCALE, is_causal=True, num_splits=1)[0][0]

    return Kernel(name, decode if what == "decode" else prompt)


def pages_of(case: DecodeCase) -> tuple[list[list[int]], list[tuple[torch.Tensor, ...]]]:
    """The pages of each sequence, and every copy as pages."""
    per_row = case.capacity // PAGE
    numbers = [list(range(row * per_row, row * per_row + -(-length // PAGE))) for row, length in enumerate(case.lengths)]
    return numbers, [tuple(each.view(-1, PAGE, KV_HEADS, HEAD_DIM) for each in both) for both in case.kv]


def flashinfer_batch(tensor_cores: bool) -> Callable[[DecodeCase], Call]:
    import flashinfer

    def ready(case: DecodeCase) -> Call:
        numbers, kv = pages_of(case)
        ends = torch.tensor([0, *map(len, numbers)]).cumsum(0).int()
        flat = torch.tensor([page for row in numbers for page in row], dtype=torch.int32, device=case.q.device)
        last = torch.tensor([(length - 1) % PAGE + 1 for length in case.lengths], dtype=torch.int32)
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=case.q.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(ends, flat, last, Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=torch.bfloat16,
                     kv_data_type=torch.bfloat16)
        return lambda copy: wrapper.run(case.q, kv[copy])

    return ready


def flashinfer_xqa() -> Callable[[DecodeCase], Call]:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    def ready(case: DecodeCase) -> Call:
        numbers, kv = pages_of(case)
        most = case.capacity // PAGE
        tables = torch.tensor([row + [row[-1]] * (most - len(row)) for row in numbers], dtype=torch.int32, device=case.q.device)
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device=case.q.device)
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=case.q.device)
        return lambda copy: xqa_batch_decode_with_kv_cache(case.q, kv[copy], workspace, tables, lengths, case.shape.tokens,
                                                           bmm1_scale=SCALE)

    return ready


def flashinfer_version() -> str:
    return importlib.import_module("flashinfer").__version__


def makers(what: str, fa3: str | None) -> dict[str, Callable[[], Kernel]]:
    if what == "prefill":
        return {"torch flash": lambda: Kernel(torch.__version__, torch_prompt(SDPBackend.FLASH_ATTENTION)),
                "torch cuDNN": lambda: Kernel(torch.__version__, torch_prompt(SDPBackend.CUDNN_ATTENTION)),
                "FlashAttention-3": lambda: fa3_kernel(what, fa3)}
    return {"torch flash": lambda: Kernel(torch.__version__, torch_decode),
            "FlashAttention-3": lambda: fa3_kernel(what, fa3),
            "FlashInfer": lambda: Kernel(flashinfer_version(), flashinfer_batch(False)),
            "FlashInfer tensor cores": lambda: Kernel(flashinfer_version(), flashinfer_batch(True)),
            "FlashInfer XQA": lambda: Kernel(flashinfer_version(), flashinfer_xqa())}


def available(what: str, names: str | None, fa3: str | None) -> tuple[dict[str, Kernel], dict[str, str]]:
    """The kernels that can be called, and why others cannot."""
    made = makers(what, fa3)
    wanted = names.split(",") if names else list(made)
    found, missing = {}, {name: f"no such kernel; have {', '.join(made)}" for name in wanted if name not in made}
    for name in wanted:
        if name in missing:
            continue
        try:
            found[name] = made[name]()
        except (ImportError, OSError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0]
    return found, missing
