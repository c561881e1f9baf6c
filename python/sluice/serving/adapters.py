"""Adapters of peft as part of a model's weights."""

from __future__ import annotations

import importlib.util
import warnings

import transformers

from sluice._reporting import one_line
from sluice.serving.arguments import CannotLoad, NotInstalled


def with_adapter(model: transformers.PreTrainedModel, folder: str) -> transformers.PreTrainedModel:
    """The model with an adapter in its weights: it takes no longer than without. Quantized weights would be rounded
    once more; there it stays beside them.
    @throws CannotLoad if it is of another model, or of a kind that is no part of weights; NotInstalled without peft"""
    if importlib.util.find_spec("peft") is None:
        raise NotInstalled("--adapter: the package peft is not installed: pip install './python[adapters]', in "
                           "Sluice's sources, has it")
    import peft

    try:
        config = peft.PeftConfig.from_pretrained(folder)
        if config.is_prompt_learning:
            raise ValueError(f"{config.peft_type} changes prompts, not weights")
        with warnings.catch_warnings():
            # Of weights that the adapter lacks, or that the model has no place for.
            warnings.simplefilter("error", UserWarning)
            adapted = peft.PeftModel.from_pretrained(model, folder)
        if getattr(model.config, "quantization_config", None) is not None:
            return adapted.get_base_model()
        return adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # Whatever peft raises becomes a line.
        raise CannotLoad(f"--adapter {folder} cannot be loaded onto this model: {one_line(str(error))}") from error
