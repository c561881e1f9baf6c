"""A model of transformers that runs over packed rows: one forward has rows of many sequences behind each other."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from sluice._near import SERVED_SHARE
from sluice._transformers_support import (changing, choose_near, dense_tokens, install, longest, ranks_of,
                                          refuse_of_the_model)
from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, Unsupported
from sluice.options import Bucket, Features, PlanItem, _refuse_scores, bucket_tokens, whole_tokens
from sluice.serving.attention import NAME, Forward, attention, running_as
from sluice.serving.graphs import CudaGraphs, PaddedForwards, Padding, Recorder, Staging, Uncaptured
from sluice.serving.served import engine_options, served_layers

GRAPHS = ("auto", "on", "off")


@dataclasses.dataclass
class Planned:
    """A forward that has been planned."""

    number: int
    bucket: Bucket
    size: Padding | None  #: None: it has no padding
    positions: list[int]  #: of all tokens


class PackedModel:
    """A model and the engine that keeps its keys and values. Not to be used by two threads at once."""

    _goes_on = False  #: see Forward

    def __init__(self, model: transformers.PreTrainedModel, policy: str = "sluice", host_bytes: int = 1 << 30, *,
                 context: int | None = None, sequences: int = 16, prefill_rows: int = 2048, graphs: str = "auto",
                 compile: bool = False, **options: Any) -> None:
        """`host_bytes`: for keys and values. `context`: tokens of a sequence, at most; None: the model's. `sequences`:
        that live at once. `prefill_rows`: tokens of prompts that one forward takes. `graphs`: forwards of decoded
        tokens alone are replayed from CUDA graphs, which are captured here; "auto": on a GPU. On the CPU "on" pads them
        as graphs would be, and runs them as they are. `compile`: the model is compiled by torch, which takes a
        minute or so and makes one kernel of several small ones. `options` are others of EngineOptions; without
        `near_bytes` a GPU's memory for near keys and values is chosen by what is free.
        @throws Unsupported naming what the model has that is not served"""
        if graphs not in GRAPHS:
            raise InvalidArgument(f'graphs is "{graphs}"; it must be one of {", ".join(GRAPHS)}')
        if compile and graphs == "off":
            raise InvalidArgument("compile: what is compiled are forwards of a fixed size, and graphs is off, which "
                                  "has none; leave one of them out")
        config = model.config.get_text_config(decoder=True)
        refuse_of_the_model(options)
        kinds = served_layers(model, config)
        self.policy, self._model = policy, model.eval()
        self.context: int = min(context or longest(config), longest(config))
        """Tokens of a sequence, prompt and answer, at most."""

        self.vocabulary: int = config.vocab_size
        """Ids of tokens are below this."""

        self.weights = f"{getattr(model.config, '_commit_hash', None)} {model.dtype}"
        """Which ones, where the model's name leaves that open: revision and type."""

        self._device = device = next(model.parameters()).device
        # A window that no sequence outgrows is none, and the policy chooses in its layers, too.
        windows = [kind.window if kind.window < self.context else 0 for kind in kinds]
        options.setdefault("dense_tokens", dense_tokens(policy, device, ranks_of(model)))
        made = engine_options(model, config, kinds, windows=windows if any(windows) else None,
                              host_bytes=host_bytes // ranks_of(model), sequences=sequences,
                              largest=Bucket(decode_rows=sequences, prefill_rows=prefill_rows, prefills=sequences,
                                             max_tokens=self.context),
                              policies=[policy], **options)
        _refuse_scores(policy)
        choose_near(made, options.get("near_bytes"), self.context, SERVED_SHARE)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        # No mask is registered for this name, and so none is made: the engine knows which rows are whose.
        transformers.AttentionInterface.register(NAME, attention)
        self.engine = Engine(made)
        try:
            self._before: str | dict[str, str] | None = install(model, NAME)
        except BaseException:
            self.engine.close()
            raise
        self.graph_captures = self.graph_replays = 0
        self.graphs_failed: str | None = None
        """Why forwards run without graphs although they were asked for; None if they run as asked for."""

        self.compile_failed: str | None = None
        """Likewise, why they are not compiled."""

        self._staging = Staging(max(16, 3 * self.engine.options.largest.rows), device)
        self._padded: PaddedForwards | None = None
        self._compiled: Callable[..., Any] | None = None
        self._ran_compiled = False  # The newest forward.
        self._error: Exception | None = None  # Of the newest forward, or while graphs are recorded, that went on.
        try:
            self._try_out()
        except BaseException:
            PackedModel.close(self)
            raise
        if compile or self._wants_graphs(graphs):
            self._record(compile)

    def close(self) -> None:
        """Leaves the model as it was, and gives all memory back."""
        with changing:
            before, self._before = self._before, None
            if before is None:
                return
            self._padded = self._compiled = None
            try:
                self._model.set_attn_implementation(before)
            finally:
                self.engine.close()

    def begin(self, ids: Sequence[int] | None, salt: int = 0) -> int:
        """A new sequence, which has what is known of a prompt of these ids with this salt."""
        return self.engine.begin(self.policy, ids, salt)

    def end(self, sequence: int) -> None:
        self.engine.end(sequence)

    def name_tokens(self, sequence: int, first: int, ids: Sequence[int]) -> None:
        self.engine.name_tokens(sequence, first, ids)

    def held_bytes(self) -> int:
        """Host memory that sequences hold."""
        return self.engine.memory().far_pages_used

    @property
    def lost(self) -> str | None:
        """Why no forward can run any more; None if one can."""
        return None

    def run(self, items: Sequence[PlanItem], ids: Sequence[int], kept: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Plans and enqueues a forward: its number, which is to be finished before anything of it is used, and the
        logits [len(kept), vocabulary] in f32 of the rows `kept`, which are good until the next run. `ids` are those of
        all items' tokens, in their order. If it fails, nothing is under way."""
        planned, self._error = self._plan(items), None
        try:
            if planned.size is None:
                logits = self._run_plainly(planned.bucket, ids, planned.positions, kept)
            else:
                logits = self._padded.run(planned.size, ids, planned.positions, kept)
                self.graph_replays += 1
        except BaseException as error:
            self._broke_off(planned.number, error)
            raise
        return planned.number, logits

    def finish(self, number: int) -> None:
        """Waits for a forward. If it fails, no sequence has its tokens."""
        try:
            self.engine.finish(number)
        except BaseException:
            self.cancel(number)
            raise

    def cancel(self, number: int) -> None:
        """Takes a forward back, if it is still there."""
        try:
            self.engine.cancel(number)
        except Error:
            pass  # It was taken back when it failed.

    def _plan(self, items: Sequence[PlanItem]) -> Planned:
        positions: list[int] = []
        for item in items:
            first = self.engine.tokens(item.sequence)
            if first + item.tokens > self.context:
                raise InvalidArgument(f"a sequence would have {first + item.tokens} tokens, and may have "
                                      f"{self.context}")
            positions.extend(range(first, first + item.tokens))
        size, longest = None, max(positions) + 1
        if self._padded is not None and not any(item.prefill for item in items):
            size = self._padded.size(len(positions), longest)
        bucket = self._bucket(items, longest) if size is None else self._padded_bucket(size)
        return Planned(self.engine.plan(items, bucket, self._stream()), bucket, size, positions)

    def _broke_off(self, number: int, error: BaseException) -> None:
        """The model did not get to the end of a forward."""
        self.cancel(number)

    @torch.inference_mode()
    def _try_out(self) -> None:
        """Runs a token through the model, without the engine. What its attention has that is not served is known then,
        and not with the first request."""
        self._compute(Bucket(decode_rows=1), *self._staging.put([0], [0]), None, False)

    def _record(self, compile: bool = False) -> None:
        """Graphs of all sizes, or none: without them forwards are slower, and the same."""
        if compile:
            self.compile_failed = self._record_compiled()
            if self.compile_failed is None:
                return
            self._compiled = None
        self.graphs_failed = self._record_all(self._model)

    def _record_compiled(self) -> str | None:
        try:
            self._compiled = torch.compile(self._model, dynamic=True)
        except Exception as error:  # It refuses some versions of Python.
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return self._record_all(self._compiled, True)

    def _record_all(self, model: Callable[..., Any], plain: bool = False) -> str | None:
        """Why it could not be done; None if it was. `plain`: others run through it, too."""
        recorder: Recorder = CudaGraphs(self._device) if self._device.type == "cuda" else Uncaptured()

        def compute(size: Padding, ids: torch.Tensor, positions: torch.Tensor, attends: bool) -> torch.Tensor:
            return self._compute(self._padded_bucket(size), ids, positions, None, attends, model)

        self._error = None
        try:
            largest = Padding(self.engine.options.sequences, self.engine.options.largest.max_tokens)
            padded = PaddedForwards(largest, self._staging, compute, recorder, whole_tokens(self.engine.options))
            if plain:
                # Other numbers of rows than of those that are kept: torch would take them to be the same.
                self._run_plainly(Bucket(decode_rows=5), [0] * 5, range(5), [1], False)
                if not self._ran_compiled:
                    raise Unsupported("torch runs this model as it is: see TORCH_LOGS=recompiles,graph_breaks")
            if self._error is not None:
                raise self._error
            self._padded, self.graph_captures = padded, len(padded.sizes)
        except Exception as error:  # Of the model, which is others' code, of torch or of the device.
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def _wants_graphs(self, graphs: str) -> bool:
        captures = self._device.type == "cuda" and self.engine.options.handover != "host"
        return graphs == "on" or graphs == "auto" and captures

    def _padded_bucket(self, size: Padding) -> Bucket:
        return Bucket(decode_rows=size.rows, max_tokens=size.max_tokens, features=self.engine.options.largest.features)

    def _bucket(self, items: Sequence[PlanItem], longest: int) -> Bucket:
        largest = self.engine.options.largest
        decoded = sum(item.tokens for item in items if not item.prefill)
        prompts = [item.tokens for item in items if item.prefill]
        return Bucket(decode_rows=decoded, prefill_rows=sum(prompts), prefills=len(prompts),
                      max_tokens=bucket_tokens(longest, self.engine.options),
                      features=largest.features if decoded else Features.NONE)

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    @torch.inference_mode()
    def _run_plainly(self, bucket: Bucket, ids: Sequence[int], positions: Sequence[int], kept: Sequence[int],
                     attends: bool = True) -> torch.Tensor:
        # One row, and one that is kept, would be compiled for themselves.
        model = self._compiled if len(ids) > 1 else None
        more = [0] * max(0, 2 - len(kept)) if model is not None else []
        logits = self._compute(bucket, *self._staging.put(ids, positions, [*kept, *more]), attends, model)
        return logits[: len(kept)].float()

    def _compute(self, bucket: Bucket, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor | None,
                 attends: bool, model: Callable[..., Any] | None = None) -> torch.Tensor:
        """The model's logits of the rows `kept`, or of all. `model`: what was made of it, if not itself."""
        running = Forward(self.engine if attends else None, self.engine.options, self.context, bucket, self._stream(),
                          goes_on=self._goes_on)
        options = {"logits_to_keep": kept} if self._keeps and kept is not None else {}
        with running_as(running):
            logits = (self._model if model is None else model)(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **options).logits[0]
        self._error = self._error or running.error
        if running.layer != self.engine.options.layers:
            raise Unsupported(f"the model attended in {running.layer} layers, and its configuration says "
                              f"{self.engine.options.layers}")
        self._ran_compiled = running.compiled == running.layer
        return logits if kept is None or self._keeps else logits[kept]
