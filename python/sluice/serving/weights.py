"""What a checkpoint lacks of its model, has beyond it or has in another type is refused: transformers makes up the
first at random, and leaves the second out."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from sluice.serving.arguments import CannotLoad, source

_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"})
_SHOWN = 3


def refuse_incomplete(name: str, model: transformers.PreTrainedModel, told: dict[str, Any]) -> None:
    """`told`: what transformers has noticed when it loaded the model.
    @throws CannotLoad naming some of the tensors"""
    mismatched = [f"{key} is {_shape(has)} and should be {_shape(wants)}"
                  for key, has, wants in sorted(told["mismatched_keys"], key=str)]
    for what, keys in (("lacks weights", sorted(told["missing_keys"])), ("has weights of another shape", mismatched),
                       ("has weights that its configuration has no place for", sorted(told["unexpected_keys"])),
                       ("has weights in a type that is not theirs", _mistyped(name, model))):
        if keys:
            raise CannotLoad(f"the model {name} {what}: {_some(keys)}; its files are not all of one model, or not "
                             "whole: fetch it again")


def _some(keys: Collection[str]) -> str:
    more = len(keys) - _SHOWN
    return ", ".join(list(keys)[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shape(size: Any) -> str:
    return "x".join(map(str, size)) or "one number"


def _mistyped(name: str, model: transformers.PreTrainedModel) -> list[str]:
    """Weights that are no floating point numbers although the model's are. What a quantizer or a reader of GGUF makes
    of its files is its own."""
    if getattr(model.config, "quantization_config", None) is not None or source(name)[1]:
        return []
    floats = {key for key, value in model.state_dict().items() if value.is_floating_point()}
    return sorted(f"{key} as {dtype}" for key, dtype in _types(_folder_of(name))
                  if dtype not in _FLOATS and (key in floats or key.endswith(".weight")))


def _folder_of(name: str) -> Path | None:
    """Where the files of a model are; of a name that transformers knows, in its cache."""
    config = transformers.utils.cached_file(name, "config.json", _raise_exceptions_for_missing_entries=False)
    return None if config is None else Path(config).parent


def _types(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Of all tensors of a checkpoint: name and type."""
    if folder is None:
        return
    files = _files(folder, "model.safetensors")
    for file in files:
        with safetensors.safe_open(file, "pt") as content:
            yield from ((key, content.get_slice(key).get_dtype()) for key in content.keys())
    for file in [] if files else _files(folder, "pytorch_model.bin"):
        told = torch.load(file, map_location="meta", weights_only=True)
        yield from ((key, str(value.dtype).removeprefix("torch.")) for key, value in told.items()
                    if isinstance(value, torch.Tensor))


def _files(folder: Path, name: str) -> list[Path]:
    """Those that transformers reads: one, or what an index names. A folder may have others."""
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    return [folder / each for each in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))] \
        if index.is_file() else []
