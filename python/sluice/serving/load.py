"""From a folder to a serving loop."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from sluice.serving.arguments import CannotLoad
from sluice.serving.loop import Loop
from sluice.serving.model import PackedModel
from sluice.serving.process import Ready, Settings

_DEFAULTS = ("temperature", "top_p", "top_k", "repetition_penalty")


@contextlib.contextmanager
def _loading(what: str) -> Iterator[None]:
    """Whatever transformers raises becomes a line."""
    try:
        yield
    except Exception as error:
        raise CannotLoad(f"{what} cannot be loaded: {' '.join(str(error).split())}") from error


def load_tokenizer(model: str) -> Any:
    with _loading(f"the tokenizer of {model}"):
        return transformers.AutoTokenizer.from_pretrained(model)


def load_loop(settings: Settings) -> tuple[Loop, Ready]:
    """Loads model and tokenizer, and builds the engine."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    with _loading(f"the model {settings.model}"):
        model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).to(settings.device)
    packed = PackedModel(model, settings.policy, settings.host_bytes, context=settings.context,
                         sequences=settings.sequences, prefill_rows=settings.prefill_rows, graphs=settings.graphs,
                         **settings.options)
    if packed.graphs_failed is not None:
        print(f"sluice: forwards run without CUDA graphs: {packed.graphs_failed}", file=sys.stderr, flush=True)
    generation = model.generation_config
    ends = generation.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    loop = Loop(packed, load_tokenizer(settings.model), end_ids=ends, prefix=settings.prefix,
                slowdown=settings.slowdown)
    # Only what the model's makers wrote: others are the protocol's.
    told = generation.to_diff_dict()
    defaults = {name: told[name] for name in _DEFAULTS if told.get(name) is not None}
    return loop, Ready(loop.limit, defaults, packed.vocabulary, packed.engine.memory().near_pages)
