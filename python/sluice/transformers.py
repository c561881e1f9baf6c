"""Models of transformers with their keys and values in Sluice's host memory.

    sluice.transformers.enable(model, policy="sluice", host_bytes=8 << 30)
    model.generate(**inputs)  # as before

Sluice serves the layers of full attention. Others that a model mixes them with, of sliding windows, chunks or linear
attention, keep the little that they need in transformers' own cache and attend through sdpa.

Attention sinks (gpt-oss) are exact with the policy `full`. With others a sink has the share that it would have if the
tokens that are attended were all there are: more than in the model, by what those leave out.

What cannot be served is refused with the reason. Versions of transformers that this has run with: 5.17 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.masking_utils import AttentionMaskInterface

from sluice._library import OWNER
from sluice._transformers_attention import attention, mask
from sluice._transformers_cache import LayerKind, SluiceCache, handed, not_attended
from sluice._transformers_pieces import in_pieces
from sluice._transformers_rows import Turn
from sluice._transformers_support import (NAME, attention_shape, changing, choose_near, dense_tokens, install,
                                          kv_dtype, layer_kinds, logit_options, longest, ranks_of, refuse,
                                          refuse_of_the_model, refuse_rehearsed)
from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, OutOfCapacity, Unsupported
from sluice.options import Bucket, EngineOptions, _refuse_scores, _unsigned

_SEQUENCES = 16  # Where it is not said how many.
_OWNER = "enable()'s "  # Of options, in messages.

__all__ = ["Enabled", "enable"]


def enable(model: transformers.PreTrainedModel, policy: str = "sluice", host_bytes: int = 1 << 30, *,
           sequences: int | None = None, prefill_rows: int = 2048, max_tokens: int | None = None,
           **options: Any) -> Enabled:
    """Has this model attend by `policy`, with keys and values of at most `host_bytes`. `sequences`: rows of a batch, or
    beams, that live at once, in all caches; None: 16, or as many as a batch has that comes while no other cache has.
    `prefill_rows`: tokens of a prompt, over all rows of a batch, that go through the model's decoder at once; longer
    ones are read in pieces. `max_tokens`: of the longest sequence, which the engine has room for, as far as `host_bytes`
    hold it; None: what the model is made for (max_position_embeddings, scaled as its positions are, or 131,072).
    `options` are others of EngineOptions; without `near_bytes` the memory of a GPU for near keys and values is chosen
    by what is free, and without `dense_tokens` policy `sluice` has DENSE_AUTO. What is returned takes it back:
    `close()`, or `with`.

    Several tokens of a row in one call are taken for a part of its prompt and attend all that comes before them; single
    ones choose as the policy says.

    Of a model that ranks share, loaded with DistributedConfig(tp_size=N) under torchrun, each rank enables its own
    part, with its share of `host_bytes`; `options` are each rank's. All run the same program.

    Threads may use the model at once, each with a cache of its own; their forwards take turns. A forward that fails
    leaves the cache as it was, but where layers of transformers' own cache are part of it: then that refuses to go on.

    Raises Unsupported with the reason if the model cannot be served, and then changes nothing."""
    if not hasattr(model, "config"):
        raise InvalidArgument(f"model is a {type(model).__name__}; give what from_pretrained of AutoModelForCausalLM "
                              "returns")
    _refuse(model, options)
    options.setdefault("dense_tokens", dense_tokens(policy, next(model.parameters()).device, ranks_of(model)))

    most = longest(model.config.get_text_config(decoder=True)) if max_tokens is None else max_tokens
    if most < 1:
        raise InvalidArgument(f"max_tokens is {most}; it must be at least 1, or None for what the model is made for")

    def made_for(rows: int) -> EngineOptions:
        return options_for(model, [policy], host_bytes, Bucket(rows, prefill_rows, rows, most), rows, options)

    return _enabled(model, policy, made_for, sequences)


def enable_for(model: transformers.PreTrainedModel, policies: Sequence[str], host_bytes: int, largest: Bucket,
               sequences: int, options: dict[str, Any]) -> Enabled:
    """As `enable`, for several policies: that of caches is the first of them, and their forks may have any."""
    _refuse(model, options)

    def made_for(_: int) -> EngineOptions:
        return options_for(model, policies, host_bytes, largest, sequences, options)

    return _enabled(model, policies[0], made_for, sequences)


def _refuse(model: transformers.PreTrainedModel, options: dict[str, Any]) -> None:
    refuse_of_the_model(options)
    refuse(model, model.config.get_text_config(decoder=True))


def _enabled(model: transformers.PreTrainedModel, policy: str, made_for: Callable[[int], EngineOptions],
             sequences: int | None) -> Enabled:
    kinds = layer_kinds(model, model.config.get_text_config(decoder=True))
    try:
        return Enabled(model, policy, lambda rows: Engine(made_for(rows), owner=_OWNER), kinds, sequences)
    except Error as error:
        raise type(error)(str(error).replace(OWNER, _OWNER)) from None


def options_for(model: transformers.PreTrainedModel, policies: Sequence[str], host_bytes: int, largest: Bucket,
                sequences: int, options: dict[str, Any]) -> EngineOptions:
    """Of an engine for these policies and a model that is not refused. `largest` says how long sequences are: what
    policies want grows with it, and host_bytes of a small model hold far more."""
    config = model.config.get_text_config(decoder=True)
    kinds = layer_kinds(model, config)
    device = next(model.parameters()).device
    made = EngineOptions(
        layers=sum(kind.make is None for kind in kinds), **attention_shape(model, config, kinds),
        device="cpu" if device.type == "cpu" else f"cuda:{device.index or 0}",
        host_bytes=_unsigned("host_bytes", host_bytes, 64) // ranks_of(model), sequences=sequences, largest=largest,
        policies=policies,
        **{**logit_options(model, config, kinds), **options, "kv_dtype": kv_dtype(model, options.get("kv_dtype"))})
    for policy in policies:
        refuse_rehearsed(policy)
        _refuse_scores(policy)
    choose_near(made, options.get("near_bytes"), largest.max_tokens)
    return made


class Enabled:
    """What `enable` has done to a model."""

    def __init__(self, model: transformers.PreTrainedModel, policy: str, made_for: Callable[[int], Engine],
                 kinds: Sequence[LayerKind], sequences: int | None) -> None:
        """`made_for` makes an engine for so many rows."""
        engine = made_for(_SEQUENCES if sequences is None else sequences)
        self.policy, self._made_for = policy, made_for
        self.turn = Turn(engine, self._grow if sequences is None else None)
        self._model, self._kinds, self._closed = model, kinds, False
        transformers.AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)
        with changing:
            try:
                self._before = install(model, NAME)
            except BaseException:
                engine.close()
                raise
            self._hooks = []
            for module in {model, model.base_model, model.get_decoder()}:
                self._hooks += [module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
                                module.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)]
            self._decoder = _innermost(model)
            self._own_forward = vars(self._decoder).get("forward")
            self._forward = in_pieces(self._decoder.forward, _cache_of, engine.options.largest.prefill_rows)
            self._decoder.forward = self._forward
            self._own_generate = vars(model).get("generate")
            self._generate = model.generate
            model.generate = self._generate_here

    @property
    def engine(self) -> Engine:
        """It is made anew for more rows than it was made for, where enable() was not told how many there will be."""
        return self.turn.engine

    def cache(self) -> SluiceCache:
        """An empty cache, for `past_key_values` of generate() or of the model: keep it for the next turn."""
        return SluiceCache(self, self._kinds)

    def close(self) -> None:
        """Leaves the model as it was, and gives all memory back. Its caches are of no use any more."""
        with changing:
            if self._closed:
                return
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            _put_back(self._model, "generate", self._generate_here, self._own_generate)
            _put_back(self._decoder, "forward", self._forward, self._own_forward)
            try:
                self._model.set_attn_implementation(self._before)
            finally:
                self.engine.close()

    def _grow(self, rows: int) -> Engine:
        old = self.engine.options
        if old.device != "cpu":
            torch.cuda.synchronize(old.device)  # The old one's memory may still be read.
        self.engine.close()
        try:
            return self._made_for(1 << (rows - 1).bit_length())
        except Error as error:
            self.turn.engine = self._made_for(old.sequences)
            raise OutOfCapacity(f"{rows} rows at once, for which no engine can be made: {error}") from error

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _before_forward(self, module: torch.nn.Module, inputs: tuple, arguments: dict[str, Any]) -> None:
        cache = _cache_of(inputs, arguments)
        if cache is not None:
            if cache.enabled is not self:
                raise InvalidArgument("past_key_values is a cache of another model; take one of this model's cache()")
            keep = arguments.get("logits_to_keep")
            cache.forward_begins(module, keep if isinstance(keep, int) and arguments.get("labels") is None else None)

    def _after_forward(self, module: torch.nn.Module, inputs: tuple, arguments: dict[str, Any], output: Any) -> None:
        cache, left = _cache_of(inputs, arguments), handed.layer
        if cache is not None:
            cache.forward_ends(module)
        handed.clear()
        if output is not None and left is None:
            return
        # It has failed, or its last layer did not attend what it has been given.
        self.turn.drop()
        if cache is not None and cache.enabled is self:
            cache.forward_failed()
        if output is not None:
            raise not_attended(left)

    def _generate_here(self, *inputs: Any, **options: Any) -> Any:
        if self._closed:
            return self._generate(*inputs, **options)
        configs = [each for each in (*inputs, options.get("generation_config"), self._model.generation_config)
                   if isinstance(each, transformers.GenerationConfig)]

        def said(name: str) -> Any:
            if name in options:
                return options[name]
            return next((value for each in configs if (value := getattr(each, name, None)) is not None), None)

        if said("use_cache") is False:
            raise Unsupported("use_cache is False, and Sluice is a cache; leave it True, or close() Sluice")
        # transformers takes "hybrid", which models on the hub have, for None.
        if said("cache_implementation") not in (None, "hybrid"):
            raise Unsupported(f"cache_implementation is {said('cache_implementation')}; with Sluice it has to be None, "
                              "also in model.generation_config")
        if said("output_attentions") or getattr(self._model.config, "output_attentions", False):
            raise Unsupported("output_attentions: Sluice computes no weights that it could return")
        if said("assistant_early_exit") is not None:
            raise Unsupported("assistant_early_exit: Sluice runs a model's layers all or none")
        given = options.get("past_key_values")
        if given is None:
            options["past_key_values"] = given = self.cache()
        elif not isinstance(given, SluiceCache):
            raise InvalidArgument(f"past_key_values is a {type(given).__name__}; with Sluice it is what cache() of "
                                  "enable()'s result returns")
        # transformers splits ids alone, and not behind what a cache has.
        given.chunk, options["prefill_chunk_size"] = said("prefill_chunk_size"), None
        return self._generate(*inputs, **options)


def _innermost(model: transformers.PreTrainedModel) -> torch.nn.Module:
    """The decoder, which has layers and no head."""
    decoder = model.get_decoder()
    while hasattr(decoder, "get_decoder") and (inner := decoder.get_decoder()) is not decoder:
        decoder = inner
    return decoder


def _put_back(owner: torch.nn.Module, name: str, ours: Any, before: Any) -> None:
    """An attribute of one object as it was, unless another library has put its own in this place."""
    if vars(owner).get(name) == ours:
        delattr(owner, name)
        if before is not None:
            setattr(owner, name, before)


def _cache_of(inputs: tuple, arguments: dict[str, Any]) -> SluiceCache | None:
    """The cache of a forward that is called with these."""
    return next((each for each in (*inputs, *arguments.values()) if isinstance(each, SluiceCache)), None)
