"""The cache that transformers sees. The keys and values that it stands for are an engine's."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, Unsupported
from sluice.options import Bucket, PlanItem

if TYPE_CHECKING:
    from sluice.transformers import Enabled


class SluiceLayer(CacheLayerMixin):
    """Counts the tokens of a layer, and says whose new keys are. Keys and values themselves are the engine's."""

    is_sliding, is_croppable, supports_early_init = False, True, False

    def __init__(self, cache: SluiceCache, index: int) -> None:
        super().__init__()
        self._cache, self._index, self.columns = weakref.ref(cache), index, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any,
               **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_initialized = True
        self.columns += key_states.shape[-2]
        key_states.sluice_cache, key_states.sluice_layer = self._cache(), self._index
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1


class SluiceCache(Cache):
    """The sequences of a batch. They end with the cache."""

    def __init__(self, enabled: Enabled) -> None:
        super().__init__(layers=[SluiceLayer(self, index) for index in range(enabled.engine.options.layers)])
        self._enabled = enabled
        self._sequences: list[int] = []
        self._mask: torch.Tensor | None = None  # [rows, columns] on the CPU: which columns are no padding.
        self._rows: torch.Tensor | None = None  # Of the forward that runs: which are no padding; None: all.
        self._bucket = Bucket()
        weakref.finalize(self, _end_all, enabled.engine, self._sequences)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of the newest columns of all rows: q [batch, q_heads, n, head_dim], k, v alike; [batch, n, q_heads,
        head_dim]."""
        enabled, engine = self._enabled, self._enabled.engine
        stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
        if layer == 0:
            self._plan(q.shape[0], q.shape[2], mask, stream)
        elif enabled.pending is None and self._bucket.rows:
            raise InvalidArgument(f"layer {layer} comes without the layers before it; models are to run whole")
        out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
        if not self._bucket.rows:
            return out
        rows = (self._packed(each) for each in (q, k, v))
        packed = out.flatten(0, 1) if self._rows is None else torch.empty(
            self._bucket.rows, *out.shape[2:], dtype=out.dtype, device=out.device)
        engine.attend(self._bucket, layer, *rows, packed, stream=stream)
        if self._rows is not None:
            out[self._rows.to(out.device)] = packed
        if layer + 1 == len(self.layers):
            number, enabled.pending = enabled.pending, None
            engine.finish(number)
        return out

    def _packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """[batch, heads, n, head_dim] as [rows, heads, head_dim]; of one row or column as it lies."""
        if self._rows is not None:
            return tensor.transpose(1, 2)[self._rows.to(tensor.device)]
        return tensor.transpose(1, 2).flatten(0, 1)

    def _plan(self, batch: int, columns: int, mask: torch.Tensor | None, stream: Any) -> None:
        enabled, engine = self._enabled, self._enabled.engine
        if enabled.pending is not None:
            engine.cancel(enabled.pending)
            enabled.pending = None
        seen = self._mask
        old = 0 if seen is None else seen.shape[1]
        whole = torch.ones(batch, old + columns, dtype=torch.bool) if mask is None else mask.to("cpu", torch.bool)
        if whole.shape != (batch, old + columns):
            raise InvalidArgument(f"the attention mask is {tuple(whole.shape)}, and the cache and its new tokens make "
                                  f"{(batch, old + columns)}")
        if seen is not None and mask is None:
            whole[:, :old] = seen
        if seen is not None and not torch.equal(whole[:, :old], seen):
            raise Unsupported("the attention mask hides other tokens of the cache than before; begin with a new cache")
        while len(self._sequences) < batch:
            self._sequences.append(engine.begin(enabled.policy))
        new = whole[:, old:]
        prefill = columns > 1
        items = [PlanItem(sequence, count, prefill) for sequence, count in zip(self._sequences, new.sum(1).tolist())
                 if count]
        rows = sum(item.tokens for item in items)
        largest = engine.options.largest
        if prefill and rows > largest.prefill_rows:
            raise Unsupported(f"{rows} tokens of prompts at once, and the engine was made for {largest.prefill_rows}; "
                              "give generate() a prefill_chunk_size, or enable() more prefill_rows")
        if prefill:
            self._bucket = Bucket(prefill_rows=rows, prefills=len(items))
        else:
            self._bucket = Bucket(decode_rows=rows, features=largest.features)
        self._rows = None if new.all() else new
        if items:
            enabled.pending = engine.plan(items, self._bucket, stream)
        self._mask = whole

    def _replace(self, indices: list[int]) -> None:
        """Row i becomes what row indices[i] was."""
        engine, old = self._enabled.engine, list(self._sequences)
        if not old:
            return
        for index in set(range(len(old))) - set(indices):
            engine.end(old[index])
        taken: set[int] = set()
        # The finalizer has the list.
        self._sequences[:] = []
        for index in indices:
            again = index in taken
            self._sequences.append(engine.fork(old[index], engine.tokens(old[index])) if again else old[index])
            taken.add(index)
        self._mask = self._mask[indices]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._replace(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._replace(torch.arange(len(self._sequences))[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace([index for index in range(len(self._sequences)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        columns = self.get_seq_length()
        tokens_to_remove = int(tokens_to_remove)  # It may come as a tensor.
        # A positive number is what is to stay, as in older versions.
        keep = min(tokens_to_remove, columns) if tokens_to_remove > 0 else max(columns + tokens_to_remove, 0)
        if keep == columns:
            return
        self._mask = self._mask[:, :keep]
        for sequence, tokens in zip(self._sequences, self._mask.sum(1).tolist()):
            self._enabled.engine.truncate(sequence, tokens)
        for layer in self.layers:
            layer.columns = keep

    def reset(self) -> None:
        _end_all(self._enabled.engine, self._sequences)
        self._mask = None
        for layer in self.layers:
            layer.columns = 0

    @property
    def batch_size(self) -> int:
        return len(self._sequences)


def _end_all(engine: Engine, sequences: list[int]) -> None:
    while sequences:
        try:
            engine.end(sequences.pop())
        except Error:  # The engine is closed, or a forward of a model that failed is under way: then it has ended all.
            return
