"""What can be tested without a GPU: shapes, the commands of ours, tables, and that a wrong kernel is found out."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from unittest.mock import MagicMock

import apart
import attention
import kernels
import pytest
import timing
import torch
from cases import PAGE, SCALE, TOLERANCE, DecodeCase, PromptCase
from shapes import HEAD_DIM, KV_HEADS, Shape, commands, read_shape
from side_by_side import of_report, table


@pytest.mark.parametrize(("text", "want"), [
    ("8x32K", Shape(8, 32768)), ("4K", Shape(1, 4096)), ("16x1K-128K", Shape(16, 131072, 1024)), ("3x100-1000", Shape(3, 1000, 100)),
])
def test_shapes(text: str, want: Shape) -> None:
    assert read_shape(text) == want and read_shape(str(want)) == want


@pytest.mark.parametrize("text", ["", "x8K", "0x8K", "8x", "8K-", "8M", "2x2K-1K"])
def test_no_shapes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="give"):
        read_shape(text)
    with pytest.raises(SystemExit):
        attention.arguments(["decode", text])
    assert "give" in capsys.readouterr().err


def test_ragged() -> None:
    lengths = Shape(16, 131072, 1024).lengths
    assert lengths[0] == 131072 and lengths[-1] == 1024 and len(lengths) == 16 and lengths == sorted(lengths, reverse=True)
    assert all(abs(a / b - 128 ** (1 / 15)) < 0.002 for a, b in zip(lengths, lengths[1:]))
    assert Shape(2, 100, 100).lengths == [100, 100] and Shape(1, 100, 10).lengths == [100]


def test_commands() -> None:
    shapes = [read_shape(text) for text in ("8x32K", "32x8K", "32K", "16x1K-32K")]
    dense = ["bench", "gpu", "--device", "cuda", "--sections", "attention", "--length"]
    assert commands("decode", shapes, []) == [
        [*dense, "32768", "--rows", "1,8", "--dense-only"], [*dense, "8192", "--rows", "32", "--dense-only"],
        [*dense, "32768", "--rows", "16", "--ragged", "1024", "--dense-only"]]
    assert commands("decode", shapes[:1], ["--policies", "a | b"])[0][-2:] == ["--policies", "a | b"]
    (prompts,) = commands("prefill", [Shape(1, 4096), Shape(1, 1024)], [])
    assert prompts[prompts.index("--length") + 1] == "1024,4096" and prompts[prompts.index("--chunk") + 1] == "4096"


def forward(**changes: object) -> dict:
    return {"length_tokens": 1024, "rows": 4, "method": "sluice", "placement": "near", "mode": "graph", "layer_us": 5.0,
            "coverage_mean": 0.9, **changes}


def test_ours_beside_them() -> None:
    dense = forward(method="dense in HBM", placement=None, mode=None, layer_us=10.0)
    result = {"config": {"ragged": 256}, "results": {"attention": [dense, forward(mode="enqueued", layer_us=6.0), forward()]}}
    assert of_report(result) == [{"shape": "4x256-1K", "kernel": "sluice dense", "us": 10.0, "coverage": 0.9},
                                 {"shape": "4x256-1K", "kernel": "near/sluice", "us": 5.0, "coverage": 0.9}]
    result["results"]["attention"].pop()
    assert of_report(result)[1]["us"] == 6.0
    prompt = {"length_tokens": 2048, "rows": 1, "method": "dense", "chunk_tokens": 2048, "total_ms": 2.0}
    result = {"config": {"ragged": 0}, "results": {"prefill": [prompt, {**prompt, "chunk_tokens": 1024, "total_ms": 3.0}]}}
    assert of_report(result) == [{"shape": "1x2K", "kernel": "sluice dense", "us": 2000.0}]


def test_table() -> None:
    lines = [{"shape": "4x1K", "kernel": "a", "us": 20.0}, {"shape": "4x1K", "kernel": "b", "error": "wrong"},
             {"shape": "1x1K", "kernel": "a", "us": 4000.0}, {"kernel": "c", "error": "missing: no c"},
             {"shape": "4x1K", "kernel": "sluice dense", "us": 10.0, "coverage": 1.0},
             {"shape": "8x1K", "kernel": "sluice dense", "us": 1.0, "coverage": 1.0}]
    shown = table(lines)
    assert "| 4x1K | 20.0 (2.00) | - | 10.0 (1.00) |" in shown and "| 1x1K | 4,000 | - | - |" in shown
    assert "- b, 4x1K: wrong" in shown and "- c: missing: no c" in shown and "8x1K" not in shown


def plain(case: DecodeCase, left_out: int = 0) -> torch.Tensor:
    """torch's attention without a kernel of its own, of pages as others get them."""
    numbers, copies = kernels.pages_of(case)
    k, v = copies[0]
    out = []
    for q, pages, length in zip(case.q, numbers, case.lengths):
        keys, values = (each[pages].reshape(-1, KV_HEADS, HEAD_DIM)[: length - left_out].transpose(0, 1)[None] for each in (k, v))
        out.append(torch.nn.functional.scaled_dot_product_attention(q[None, :, None].float(), keys.float(), values.float(),
                                                                    scale=SCALE, enable_gqa=True)[0, :, 0])
    return torch.stack(out)


@pytest.mark.parametrize("shape", [Shape(2, 3 * PAGE), Shape(3, 4 * PAGE + 7, 50), Shape(1, 4000)])
def test_decode_is_held_against_attention(shape: Shape) -> None:
    case = DecodeCase(shape, "cpu", cold_bytes=1)
    assert case.copies == 1 and case.error(plain(case)) < TOLERANCE / 10
    assert case.error(plain(case, left_out=1)) > TOLERANCE
    if case.capacity > min(case.lengths):
        assert case.error(plain(case, left_out=-1)) > TOLERANCE
    assert case.error(plain(case) * float("nan")) > TOLERANCE


def test_prompts_are_held_against_attention() -> None:
    case = PromptCase(Shape(1, 300), "cpu")
    q, k, v = (each.transpose(1, 2).float() for each in (case.q, case.k, case.v))

    def attended(first_seen: int) -> torch.Tensor:
        seen = torch.ones(300, 300, dtype=torch.bool).tril(first_seen)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)

    assert case.error(attended(0)) < TOLERANCE / 10
    assert case.error(attended(1)) > TOLERANCE and case.error(attended(-1)) > TOLERANCE


def test_one_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn_3", "fa3_fwd", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    found, missing = kernels.available("decode", None, None)
    assert list(found) == ["torch flash"] and "--fa3" in missing["FlashAttention-3"] and "FlashInfer XQA" in missing
    found, missing = kernels.available("prefill", "torch cuDNN,none", None)
    assert list(found) == ["torch cuDNN"] and "have torch flash" in missing["none"]


def test_ours_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that fails for one of two lengths leaves a gap."""
    command = tmp_path / "sluice"
    result = {"config": {"ragged": 0}, "results": {"attention": [forward(length_tokens=2048)]}}
    command.write_text("#!/bin/sh\ncase \"$*\" in *'--length 1024'*) echo no room >&2; exit 1 ;; esac\n"
                       f"for file; do :; done\ncat >\"$file\" <<'END'\n{json.dumps(result)}\nEND\n")
    command.chmod(0o755)
    assert attention.ours(str(command), "decode", [Shape(4, 1024), Shape(4, 2048)], []) == [result]
    assert "no room" in capsys.readouterr().err


def test_prompts_have_no_batches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.arguments(["prefill", "2x4K"])
    assert "one at a time" in capsys.readouterr().err
    assert attention.arguments(["prefill"]).shapes[0] == Shape(1, 4096)
    assert attention.arguments(["decode", "--rounds", "2", "4K", "2x4K", "--fa3", "file"]).shapes == [Shape(1, 4096), Shape(2, 4096)]
    assert attention.arguments(["decode", "--options=--policies 'a | b'"]).options == "--policies 'a | b'"


def lost() -> None:
    raise RuntimeError("illegal memory access")


def crashes(case: DecodeCase) -> kernels.Call:
    """At one shape."""
    if case.shape.rows == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return lambda copy: plain(case)


def loses_the_device(case: DecodeCase) -> kernels.Call:
    """All that follows fails in this process."""
    if case.shape.rows == 2:
        torch.cuda.synchronize = lost
        lost()
    torch.cuda.synchronize()
    return lambda copy: plain(case)


def broken(case: DecodeCase) -> kernels.Call:
    raise RuntimeError("no such head\nand more")


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are right, wrong and broken in several ways; times that are made up."""
    made = {"right": lambda case: lambda copy: plain(case), "wrong": lambda case: lambda copy: plain(case, 1), "broken": broken,
            "crashes": crashes, "loses": loses_the_device, "hangs": lambda case: time.sleep(60)}
    monkeypatch.setattr(kernels, "makers", lambda what, fa3: {
        name: lambda ready=ready: kernels.Kernel("1.0", ready) for name, ready in made.items()})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(timing, "DecodeCase", lambda shape: DecodeCase(shape, "cpu", cold_bytes=1))
    monkeypatch.setattr(timing, "captured", lambda call, copies: call)
    monkeypatch.setattr(timing, "median_us", lambda run, rounds: 40.0 * timing.BURST)


def test_whole(no_gpu_needed: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the GPU."""
    command = ["decode", "2x192", "--kernels", "right,wrong,broken,none"]
    assert attention.main([*command, "-o", "json", "--output", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    right, wrong, failed, missing = report["results"]["beside"]
    assert right["us"] == 40.0 and right["GB_per_s"] == round(2 * 192 * 4096 / 40e-6 / 1e9) and right["relative_error"] < TOLERANCE
    assert "us" not in wrong and "wrong: off by" in wrong["error"]
    assert failed["error"] == "no such head" and missing["kernel"] == "none" and report["host"]["gpu"] == "a GPU"
    assert report["config"]["versions"] == {"torch": torch.__version__, "right": "1.0", "wrong": "1.0", "broken": "1.0"}
    assert attention.main(command) == 0 and "| 2x192 | 40.0 | - | - |" in capsys.readouterr().out
    assert timing.work("prefill", Shape(1, 1), 1.0)["tflops"] == 0.0


@pytest.mark.parametrize(("kernel", "why"), [("crashes", "signal 9"), ("loses", "illegal memory access"), ("hangs", "no answer in 3 s")])
def test_one_that_ends_costs_only_its_own_figures(no_gpu_needed: None, kernel: str, why: str) -> None:
    shapes = [Shape(1, 64), Shape(2, 64), Shape(3, 64)] if kernel != "hangs" else [Shape(2, 64)]
    kind, lines = apart.measure_apart(apart.Task("decode", kernel, None, 1), shapes, 3 if kernel == "hangs" else 60)
    assert kind.version == "1.0" and [line["shape"] for line in lines] == list(map(str, shapes))
    assert [why in line.get("error", "") for line in lines] == [shape.rows == 2 for shape in shapes]
    assert all("us" in line for line in lines if "error" not in line)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.main(["decode", "64"]) == 1 and "no GPU" in capsys.readouterr().err


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses only: what a call made ready must not be freed before the last replay."""
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())

    def ready() -> tuple[kernels.Call, weakref.ref]:
        workspace = torch.zeros(1)
        return lambda copy: workspace, weakref.ref(workspace)

    call, workspace = ready()
    run = timing.captured(call, 1)
    del call
    run()
    assert workspace() is not None
