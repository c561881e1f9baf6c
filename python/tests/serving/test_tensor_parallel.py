"""Two ranks of torchrun that share a model."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
import ranks_program
import torch
import transformers
from server import Server
from small import DEVICE, bare_model, expected, prompt_ids, text_of, tokenizer
from test_command import ARGUMENTS, answer_to
from test_windows import WINDOW, model_of
from waiting import DEADLINE_S, alive, children, wait_until

pytestmark = pytest.mark.skipif(DEVICE != "cpu" and torch.cuda.device_count() < 2, reason="one GPU")
if "CI" not in os.environ:  # There it may not be missing.
    pytest.importorskip("accelerate", reason="transformers needs it to share a model between ranks")

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ranks_program.__file__)
LATE = {ranks_program.LATE: "2"} if DEVICE == "cpu" else {}  # NCCL's threads end with the group.
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def torchrun(*words: str, **environment: str) -> subprocess.CompletedProcess:
    done = subprocess.run([sys.executable, *TORCHRUN, *words], capture_output=True, text=True, timeout=DEADLINE_S,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    assert done.returncode == 0, done.stderr
    return done


def pid_of(server: Server, rank: int) -> int:
    return next(pid for pid in children(server.process.pid)
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def test_generate(tmp_path: Path) -> None:
    """Each rank runs the same program, and models that cannot be shared are refused."""
    models = {kind: bare_model(kind) for kind in ("llama", "qwen3")}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3,
             "vocab_size": 64, "pad_token_id": 0}
    models["odd"] = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **{**shape, "num_attention_heads": 4}, num_key_value_heads=1))
    models["whole"] = transformers.Phi3ForCausalLM(transformers.Phi3Config(
        **{**shape, "num_attention_heads": 4}, num_key_value_heads=2))
    for name, model in models.items():
        copy.deepcopy(model).save_pretrained(tmp_path / name)
    torchrun("generate", *(str(tmp_path / name) for name in models))
    for rank in range(2):
        told = json.loads((tmp_path / f"told.{rank}").read_text())
        for kind in ("llama", "qwen3"):
            # One of two heads of keys, half of the memory, and all of the tokens.
            assert told[str(tmp_path / kind)] == [1, 8 << 20, expected(models[kind], prompt_ids(100), 12)]
        assert "1 heads of keys and values, which 2 ranks cannot share evenly" in told[str(tmp_path / "odd")]
        assert "leaves the heads of its attention whole" in told[str(tmp_path / "whole")]


def test_run(folder: Path) -> None:
    """Rank 0 alone says the answer, and threads of torch's that are still at work then do not abort a rank."""
    prompt = "the cat sat on the mat " * 20
    done = torchrun("run", "--model", str(folder), *ARGUMENTS, "--prompt", prompt, **LATE)
    assert done.stdout == answer_to(prompt) + "\n"


def test_forwards_that_fail_on_a_rank(folder: Path, tmp_path: Path) -> None:
    """Their requests end on all ranks, and the next are served; one failure is repaired by another try."""
    model = tmp_path / "tiny"
    copy.deepcopy(bare_model("llama")).save_pretrained(model)
    tokenizer().save_pretrained(model)
    torchrun("loop", str(model), "on", **{ranks_program.FAULTS: str(tmp_path / "faults")})
    told = json.loads((tmp_path / "told.loop").read_text())
    assert told.pop("four") == [expected(bare_model("llama"), prompt_ids(50 + n, n), 32) for n in range(1, 5)]
    assert told.pop("preemptions") > 0
    used, replays, hopeless = told.pop("status")
    assert used == 0 and replays > 20 and hopeless is None
    wants = expected(bare_model("llama"), prompt_ids(90), 6)
    assert len(told) == 10
    for fault, (error, tokens, after) in told.items():
        assert after == wants, fault
        if "'plan', 1" in fault:
            assert (error, tokens) == (None, wants), fault
        else:
            assert "is broken" in error and ("rank 1: " in error) == fault.startswith("(1") and not tokens, fault


def test_chunks_that_fail_on_a_rank_where_there_are_windows(tmp_path: Path) -> None:
    """They are taken back by the others, though these are many windows."""
    model, prompt = model_of("Mistral", sliding_window=WINDOW), prompt_ids(300)
    copy.deepcopy(model).save_pretrained(tmp_path / "tiny")
    tokenizer().save_pretrained(tmp_path / "tiny")
    torchrun("windows", str(tmp_path / "tiny"), **{ranks_program.FAULTS: str(tmp_path / "faults")})
    told = json.loads((tmp_path / "told.windows").read_text())
    wants = expected(model, prompt, 6)
    assert len(told) == 4
    for fault, (error, tokens, after) in told.items():
        assert after == wants, fault
        if fault.endswith("1)"):
            assert (error, tokens) == (None, wants), fault
        else:
            assert "is broken" in error and not tokens, fault


@pytest.fixture
def start_shared(start: Callable[..., Server]) -> Callable[..., Server]:
    return lambda *arguments, **environment: start(*arguments, program=TORCHRUN, **environment)


def test_a_server(start_shared: Callable[..., Server], tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    server = start_shared(**{ranks_program.FAULTS: str(faults)})
    client, ids = server.client(), prompt_ids(100)
    wants = text_of(expected(bare_model("llama"), ids, 12))

    def answer() -> str:
        return client.completions.create(prompt=ids, max_tokens=12, **GREEDY).choices[0].text

    assert answer() == wants
    faults.write_text("1 attend 2")
    with pytest.raises(openai.InternalServerError, match="rank 1: RuntimeError: attend is broken"):
        answer()
    assert answer() == wants and server.metric("sluice_failed_forwards_total") == 2
    under_way = client.completions.create(prompt=ids, max_tokens=100, stream=True, **GREEDY)
    next(iter(under_way))
    ranks = [pid_of(server, rank) for rank in range(2)]
    os.kill(ranks[1], signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(under_way)
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not any(map(alive, ranks)))
    assert "rank 1 has ended" in "".join(server.said)


def test_a_server_that_is_told_to_end(start_shared: Callable[..., Server]) -> None:
    server = start_shared(**LATE)
    ranks = [pid_of(server, rank) for rank in range(2)]
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not any(map(alive, ranks)))
    assert not any("rank" in line for line in server.said if line.startswith("sluice: "))
    assert "terminate called" not in "".join(server.said)
