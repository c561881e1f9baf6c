"""Folders of models that others have made: what is in them is refused, and not run or made up for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sluice
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


def test_all_that_loads_says_whether_code_may_run() -> None:
    """What is left out asks on standard input."""
    calls = [(path.name, call) for path in Path(sluice.__file__).parent.rglob("*.py")
             for call in path.read_text().split(".from_pretrained(")[1:]]
    assert len(calls) >= 3
    assert [name for name, call in calls if "trust_remote_code=" not in call[:400]] == []
