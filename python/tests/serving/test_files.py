"""What --model may be: a folder, a file of GGUF, and what is said of other files and of packages that are missing."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sluice.__main__ import main
from sluice.serving.arguments import CannotLoad, NotInstalled, check_folder
from sluice.serving.command import name_of
from sluice.serving.load import end_ids, load_config, load_model, load_tokenizer
from sluice.serving.sessions import signature
from small import bare_model, tokenizer
from test_command import Done, answer_to, here  # noqa: F401  (a fixture)
from waiting import DEADLINE_S

HAS_GGUF = importlib.util.find_spec("gguf") is not None
needs_gguf = pytest.mark.skipif(not HAS_GGUF, reason="the package gguf is not installed")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gguf_file

    path = tmp_path_factory.mktemp("files") / "tiny-F32.gguf"
    gguf_file.write(path, bare_model("llama"), tokenizer())
    return path


@needs_gguf
def test_a_file_of_gguf_is_the_model_that_it_was_made_of(gguf: Path, here: Callable[..., Done]) -> None:
    template = "<|system|>be brief<|end|><|user|>the cat<|end|><|assistant|>"
    assert here("run", "--model", str(gguf), "--prompt", "the cat sat").stdout == answer_to("the cat sat") + "\n"
    done = here("chat", "--model", str(gguf), "--system", "be brief", typed="the cat\n")
    assert done.stdout == answer_to(template) + "\n"
    assert load_config(str(gguf)).vocab_size == len(tokenizer()) and name_of(str(gguf)) == "tiny-F32"
    assert tokenizer().eos_token_id in end_ids(load_model(str(gguf), "auto"), load_tokenizer(str(gguf)))


@needs_gguf
def test_evaluation_of_a_file_of_gguf(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task": "a", "length": 8, "prompt": "the cat", "answer": "sat"}))
    monkeypatch.setattr("sys.argv", ["sluice", "eval", "--model", str(gguf), "--tasks", str(tasks), "--device", "cpu",
                                     "--policies", "full", "--json", "-"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["results"]


def test_gguf_without_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "gguf" else find(name, *more))
    for name in ("run", "eval"):
        more = ["--prompt", "a"] if name == "run" else ["--text", __file__]
        monkeypatch.setattr("sys.argv", ["sluice", name, "--model", str(path), "--device", "cpu", *more])
        assert main() == 3
        assert "pip install './python[gguf]'" in capsys.readouterr().err
    with pytest.raises(NotInstalled):
        load_tokenizer(str(path))


def test_other_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").touch()
    for model, words in ((folder / "model.safetensors", "is a file; --model is the folder.*config.json"),
                         (tmp_path / "none.gguf", "there is no file"), (tmp_path / "none", "there is no folder"),
                         (tmp_path, "config.json is missing; --model .*some.gguf")):
        with pytest.raises(CannotLoad, match=words):
            check_folder(str(model))
    check_folder(str(folder))
    check_folder("some/name")
    check_folder(str(tmp_path / "some.gguf"))


METHODS = {"awq": {"bits": 4}, "gptq": {"bits": 4}, "bitsandbytes": {"load_in_4bit": True}, "compressed-tensors": {},
           "torchao": {"quant_type": "int4_weight_only"}}


@pytest.mark.parametrize("method", METHODS)
def test_packages_of_quantised_models_that_are_missing(folder: Path, tmp_path: Path, method: str,
                                                       here: Callable[..., Done]) -> None:
    package = {"awq": "gptqmodel", "gptq": "optimum"}.get(method, method)
    if importlib.util.find_spec(package.replace("-", "_")) is not None:
        pytest.skip(f"{package} is installed")
    quantised = tmp_path / "quantised"
    shutil.copytree(folder, quantised)
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(
        {**config, "quantization_config": {"quant_method": method, **METHODS[method]}}))
    done = here("run", "--model", str(quantised), "--prompt", "a")
    assert done.returncode == 3 and package in done.stderr and done.stderr.count("\n") == 1, done.stderr
    if method != "awq":
        return
    served = subprocess.run([sys.executable, "-m", "sluice", "serve", "--model", str(quantised), "--port", "0",
                             "--device", "cpu"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert served.returncode == 3 and package in served.stderr and served.stderr.startswith("sluice: the model")


def test_sessions_know_a_file_by_its_weights(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"GGUF one")
    other.write_bytes(b"GGUF two")
    assert len({signature(str(one)), signature(str(other)), str(one), str(other)}) == 4
    assert signature("some/name") == "some/name"
