"""The cache that transformers sees: layers of full attention stand for an engine's, others are the library's own."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from sluice._transformers_rows import Rows
from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, Unsupported

if TYPE_CHECKING:
    from sluice.transformers import Enabled


@dataclass(frozen=True)
class LayerKind:
    """What keeps the tokens of one layer of a model."""

    type: str  #: as in `config.layer_types`
    make: Callable[[], Any] | None  #: makes a layer of the library's cache; None: it is Sluice's
    window: int = 0  #: newest tokens that a row of a layer of Sluice's sees, its own included; 0: all

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything of tokens at all."""
        return self.type not in ("dummy", "mlp", "moe")


class _Handed(threading.local):
    """What a cache has given to the layer that runs in this thread, until that attends it."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    layer: SluiceLayer | None = None

    def clear(self) -> None:
        self.keys = self.values = self.layer = None


handed = _Handed()


class SluiceLayer(CacheLayerMixin):
    """A layer of full attention, whose keys and values are an engine's. It hands the new ones on to `attention`."""

    is_sliding, is_croppable, supports_early_init = False, True, False

    def __init__(self, cache: SluiceCache, index: int) -> None:
        super().__init__()
        self._cache, self.index = weakref.ref(cache), index

    @property
    def rows(self) -> Rows:
        return self._cache().rows

    @property
    def engine(self) -> Engine:
        return self._cache().enabled.engine

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any,
               **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if handed.layer is not None:
            left = handed.layer
            handed.clear()
            raise not_attended(left)
        self.is_initialized = True
        handed.keys, handed.values, handed.layer = key_states, value_states, self
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows.columns

    def get_max_length(self) -> int:
        return -1


def not_attended(layer: SluiceLayer) -> Unsupported:
    return Unsupported(f"the keys of attention layer {layer.index} did not come to Sluice: the model attends them in "
                       "another way, or failed there before")


def take_handed(keys: torch.Tensor, values: torch.Tensor) -> SluiceLayer | None:
    """The layer whose new keys and values these are; None if they are of no cache of ours."""
    layer, same = handed.layer, handed.keys is keys and handed.values is values
    handed.clear()
    if layer is not None and not same:
        raise Unsupported(f"this model changes keys or values between the cache and attention layer {layer.index}; "
                          "Sluice serves those that the cache gets")
    return layer


class SluiceCache(Cache):
    """The cache of a batch. What it keeps is given back with it."""

    def __init__(self, enabled: Enabled, kinds: Sequence[LayerKind]) -> None:
        """`kinds` of all layers of the model."""
        self.enabled, self._kinds = enabled, kinds
        self.rows = Rows(enabled.turn, enabled.policy)
        engine_layers = iter(range(len(kinds)))
        super().__init__(layers=[SluiceLayer(self, next(engine_layers)) if kind.make is None else kind.make()
                                 for kind in kinds])
        self._others = [index for index, kind in enumerate(kinds) if kind.make is not None and kind.keeps]
        self._uneven = False  # A forward failed, and some layers may have its tokens.
        self._columns_before = 0  # those of the newest forward
        self._running: torch.nn.Module | None = None  # the outermost one that has this cache
        self.chunk: int | None = None
        """Columns of a prompt that go through the model at once; None: as many as the engine takes."""

        self.keep: int | None = None
        """Of how many newest tokens the forward that runs wants logits; None: of all."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._each("reorder_cache", beam_idx)
        self.rows.replace(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each("batch_select_indices", indices)
        self.rows.replace(torch.arange(len(self.rows), device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each("batch_repeat_interleave", repeats)
        self.rows.replace([index for index in range(len(self.rows)) for _ in range(repeats)])

    def fork(self, policy: str) -> SluiceCache:
        """A cache of the same tokens, under a policy of its own. Both go on by themselves."""
        forked = SluiceCache(self.enabled, self._kinds)
        for index in self._others:
            forked.layers[index] = copy.deepcopy(self.layers[index])
        forked.rows = self.rows.fork(policy)
        return forked

    def crop(self, tokens_to_remove: int) -> None:
        columns = self.rows.columns
        tokens_to_remove = int(tokens_to_remove)  # It may come as a tensor.
        # A positive number is what is to stay, as in older versions.
        keep = min(tokens_to_remove, columns) if tokens_to_remove > 0 else max(columns + tokens_to_remove, 0)
        for index in self._others:
            layer = self.layers[index]
            # Also where nothing is to go: those that record let go of what they kept for this call.
            if keep == columns and not getattr(layer, "record_past", False):
                continue
            if keep < columns and not layer.is_croppable:
                raise Unsupported(f"layer {index} ({layer}) of transformers cannot take tokens back")
            try:
                layer.crop(keep - columns)
            except RuntimeError as reason:
                raise Unsupported(f"layer {index} ({layer}) of transformers cannot take tokens back: {reason}"
                                  ) from reason
        self.rows.truncate(keep)

    def layer_of(self, kind: str) -> Any:
        """The first layer of a type."""
        return next(layer for layer, each in zip(self.layers, self._kinds) if each.type == kind)

    def reset(self) -> None:
        self.rows.clear()
        # Not their own reset(), which leaves zeros behind in some versions.
        for index in self._others:
            self.layers[index] = self._kinds[index].make()
        self._uneven, self._running = False, None

    def forward_begins(self, module: torch.nn.Module, keep: int | None = None) -> None:
        """Raises InvalidArgument if no forward can go on from here. Modules with this cache may lie in each other, and
        the outermost one says what is kept."""
        if self._running is module:  # It was interrupted: hooks learn of no KeyboardInterrupt.
            handed.clear()
            self.enabled.turn.drop()
            self.forward_failed()
            self._running = None
        if self._uneven:
            raise InvalidArgument("a forward with this cache failed, and its layers may not have the same tokens any "
                                  "more; reset() it, or begin with a new one")
        if self._running is None:
            self._running, self._columns_before, self.keep = module, self.rows.columns, keep

    def forward_ends(self, module: torch.nn.Module) -> None:
        if self._running is module:
            self._running = None

    def forward_failed(self) -> None:
        """Takes the tokens of a forward back that did not get to its end, if all layers can."""
        try:
            self.rows.truncate(self._columns_before)
            self._uneven = bool(self._others)
        except Error:
            self._uneven = True

    @property
    def is_initialized(self) -> bool:
        return len(self.rows) > 0

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    def _each(self, method: str, *arguments: Any) -> None:
        """Calls it of all layers of the library; of none if one lacks it."""
        for index in self._others:
            if not hasattr(self.layers[index], method):
                raise Unsupported(f"layer {index} ({self.layers[index]}) of transformers has no {method}")
        for index in self._others:
            getattr(self.layers[index], method)(*arguments)
