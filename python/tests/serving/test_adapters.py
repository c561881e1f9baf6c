"""Adapters of peft as part of a model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sluice.serving import adapters
from sluice.serving.arguments import CannotLoad, NotInstalled
from sluice.serving.load import load_model
from small import bare_model, expected, text_of, tokenizer
from test_command import Done, here  # noqa: F401  (a fixture)

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="the package peft is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    """A folder with an adapter, and peft's own model with it."""
    import peft

    torch.manual_seed(9)
    model = peft.get_peft_model(copy.deepcopy(bare_model("llama")), peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, values in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(values, std=0.3)
    path = tmp_path_factory.mktemp("adapters") / "lora"
    model.save_pretrained(path)
    return path, model.eval()


@needs_peft
def test_answers_are_those_of_peft(here: Callable[..., Done], made: tuple) -> None:
    ids = tokenizer().encode("the cat sat")
    wants, without = (expected(model, ids, 12) for model in (made[1], bare_model("llama")))
    assert wants != without
    wants = wants[: wants.index(0)] if 0 in wants else wants
    done = here("run", "--adapter", str(made[0]), "--prompt", "the cat sat")
    assert (done.returncode, done.stdout) == (0, text_of(wants) + "\n"), done.stderr


@needs_peft
def test_adapters_that_are_refused(folder: Path, made: tuple, tmp_path: Path, here: Callable[..., Done]) -> None:
    import peft

    other = peft.get_peft_model(copy.deepcopy(bare_model("llama")), peft.LoraConfig(target_modules=["lm_head"], r=2))
    other.save_pretrained(tmp_path / "other")
    config = (tmp_path / "other" / "adapter_config.json").read_text()
    (tmp_path / "other" / "adapter_config.json").write_text(config.replace("lm_head", "q_proj"))
    prompts = peft.get_peft_model(copy.deepcopy(bare_model("llama")), peft.PromptTuningConfig(
        num_virtual_tokens=2, task_type="CAUSAL_LM"))
    prompts.save_pretrained(tmp_path / "prompts")
    for name, words in (("other", "cannot be loaded onto this model"), ("prompts", "changes prompts, not weights")):
        with pytest.raises(CannotLoad, match=words):
            load_model(str(folder), "auto", adapter=str(tmp_path / name))
    done = here("run", "--adapter", str(folder), "--prompt", "a")
    assert done.returncode == 2 and "adapter_config.json" in done.stderr


def test_without_peft(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(adapters.importlib.util, "find_spec",
                        lambda name, *more: None if name == "peft" else find(name, *more))
    with pytest.raises(NotInstalled, match=r"pip install './python\[adapters\]'"):
        load_model(str(folder), "auto", adapter=str(tmp_path))
