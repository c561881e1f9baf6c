"""Folders of models that others have made: what is in them is refused, and not run or made up for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sluice
import torch
from safetensors.torch import load_file, save_file
from sluice.serving.arguments import CannotLoad
from sluice.serving.load import load_model
from test_command import Done, answer_to, here  # noqa: F401: a fixture

CODE = '''
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({ran!r}).touch()
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
'''


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model, with other words in one of its files of JSON."""
    def change(name: str, **words: object) -> Path:
        path = tmp_path / "hostile"
        if not path.exists():
            shutil.copytree(folder, path)
        said = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**said, **words}))
        return path

    return change


@pytest.fixture
def with_code(changed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A model with Python code of its own, for one of its parts. It leaves `ran` behind when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def make(part: str) -> Path:
        if part == "tokenizer":
            path = changed("tokenizer_config.json", tokenizer_class="Tokenizer",
                           auto_map={"AutoTokenizer": [None, "code.Tokenizer"]})
        else:
            path = changed("config.json", model_type="own", auto_map={
                "AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
        (path / "code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
        return path

    return make


@pytest.mark.parametrize("part", ["model", "tokenizer"])
@pytest.mark.parametrize("name", ["run", "chat"])
def test_code_of_a_model_does_not_run(here: Callable[..., Done], with_code: Callable[..., Path], tmp_path: Path,
                                      name: str, part: str) -> None:
    """Whatever standard input says."""
    prompt = ("--file", "-") if name == "run" else ()
    done = here(name, *prompt, "--model", str(with_code(part)), typed="y\n" * 9)
    assert not (tmp_path / "ran").exists()
    assert (done.returncode, done.stdout) == (2, "") and "give --trust-remote-code" in done.stderr


def test_code_of_a_model_that_is_evaluated_does_not_run(with_code: Callable[..., Path], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "text").write_text("the cat sat on the mat")
    monkeypatch.setattr("sys.argv", ["sluice", "eval", "--model", str(with_code("model")), "--text",
                                     str(tmp_path / "text"), "--device", "cpu"])
    assert sluice.__main__.main() == 2 and not (tmp_path / "ran").exists()
    assert "give --trust-remote-code" in capsys.readouterr().err


def test_code_that_is_trusted_runs(here: Callable[..., Done], with_code: Callable[..., Path], tmp_path: Path) -> None:
    done = here("run", "--prompt", "the cat", "--model", str(with_code("model")), "--trust-remote-code")
    assert (done.returncode, done.stdout) == (0, answer_to("the cat") + "\n"), done.stderr
    assert (tmp_path / "ran").exists()


@pytest.fixture
def with_weights(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with other weights."""
    def make(change: Callable[[dict[str, torch.Tensor]], object], pickled: bool) -> Path:
        path = tmp_path / "weights"
        shutil.copytree(folder, path)
        file = next(path.glob("*.safetensors"))
        weights = load_file(file)
        change(weights)
        if pickled:
            file.unlink()
            torch.save(weights, path / "pytorch_model.bin")
        else:
            save_file(weights, file, {"format": "pt"})
        return path

    return make


_NORM, _DOWN = "model.layers.1.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(("change", "words"), [
    (lambda weights: weights.pop(_NORM), f"lacks weights: {_NORM}; "),
    (lambda weights: [weights.pop(key) for key in list(weights) if ".mlp." in key],
     "lacks weights: model.layers.0.mlp.down_proj.weight, .* and 6 more"),
    (lambda weights: weights.update({"model.layers.3.mlp.up_proj.weight": weights[_DOWN].clone()}),
     "no place for: model.layers.3.mlp.up_proj.weight"),
    (lambda weights: weights.update({_DOWN: weights[_DOWN].view(torch.int32)}), f"type .*: {_DOWN} as I32|int32"),
    (lambda weights: weights.update({_DOWN: weights[_DOWN][:-1].clone()}), f"shape: {_DOWN} is 63x128 and .* 64x128"),
])
def test_weights_that_are_not_the_models(with_weights: Callable[..., Path], change: Callable[..., object], words: str,
                                         pickled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotLoad, match=words):
        load_model(str(with_weights(change, pickled)), "auto")
    assert capfd.readouterr() == ("", "")  # It is all in the error.


def test_tables_of_rotary_positions_are_no_weights(with_weights: Callable[..., Path]) -> None:
    """Older models have them, and they follow from the configuration."""
    path = with_weights(lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
                        False)
    assert load_model(str(path), "auto").config.vocab_size > 0


@pytest.mark.parametrize("text", [
    '{"temperature": "hot"}', '{"temperature": -1}', '{"top_p": 0}', '{"top_p": 7}', '{"top_k": 1.5}',
    '{"temperature": true}', '{"temperature": 1e999}', '{"temperature": NaN}', '{"repetition_penalty": 0}',
    '{"top_k": [1]}', '{"top_k": -7}', '{"eos_token_id": "end"}', '{"eos_token_id": [1, "a"]}', '{"eos_token_id": -1}',
    '{"eos_token_id": 1.5}', "{", "[]", '"text"', "\0", '{"temperature": {"a": 1}}'])
def test_a_generation_config_that_would_fail_every_request(changed: Callable[..., Path], text: str) -> None:
    """The server does not start."""
    path = changed("config.json")
    (path / "generation_config.json").write_text(text)
    with pytest.raises(CannotLoad, match="generation_config.json|the model"):
        load_model(str(path), "auto")


def test_a_generation_config_that_is_fine(changed: Callable[..., Path], here: Callable[..., Done]) -> None:
    path = changed("config.json")
    (path / "generation_config.json").write_text('{"top_k": -1, "temperature": 0.0, "eos_token_id": [0, 290]}')
    done = here("run", "--prompt", "the cat", "--model", str(path))
    assert (done.returncode, done.stdout) == (0, answer_to("the cat") + "\n")


def test_all_that_loads_says_whether_code_may_run() -> None:
    """What is left out asks on standard input. Configurations of sampling and adapters have no code."""
    texts = [path.read_text() for path in Path(sluice.__file__).parent.rglob("*.py")]
    calls = [text[found.start() :][:400] for text in texts for found in re.finditer(r"\w+\.from_pretrained\(", text)
             if not found[0].startswith(("GenerationConfig.", "Peft"))]
    assert len(calls) >= 3 and all("trust_remote_code=" in call for call in calls), calls
