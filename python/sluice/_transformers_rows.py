"""The rows of a batch as sequences of an engine."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sluice._torch import take_sinks
from sluice.engine import Engine
from sluice.errors import Error, InvalidArgument, OutOfCapacity, Timeout, Unsupported
from sluice.options import Bucket, PlanItem, bucket_tokens


class Turn:
    """An engine runs one forward after another. A thread takes the turn with the first layer that the engine attends
    and gives it back with the last; other threads wait for it, at most the engine's `timeout_ms`."""

    def __init__(self, engine: Engine, grow: Callable[[int], Engine] | None = None) -> None:
        """`grow` makes an engine for so many rows in the place of this one, in which none lives; None: it has as many
        as were asked for."""
        self.engine = engine
        self.holder: Rows | None = None
        self.all_rows: weakref.WeakSet[Rows] = weakref.WeakSet()
        self._grow = grow
        self._lock = threading.Lock()
        self._thread: int | None = None

    def take(self, holder: Rows) -> None:
        self.drop()
        timeout_ms = self.engine.options.timeout_ms or 30_000
        if not self._lock.acquire(timeout=timeout_ms / 1000):
            raise Timeout(f"a forward of this model in another thread took more than {timeout_ms} ms; give enable() a "
                          "larger timeout_ms")
        self.holder, self._thread = holder, threading.get_ident()

    def make_room(self, rows: int, holder: Rows) -> None:
        """For so many rows of the holder, which has none yet, beside those of other caches."""
        live = sum(len(each) for each in list(self.all_rows) if each is not holder)
        has, wanted = self.engine.options.sequences, live + rows
        if wanted <= has:
            return
        if live or self._grow is None:
            others = f" where {live} live in other caches" if live else ""
            raise OutOfCapacity(f"{rows} rows{others}, and the engine was made for {has}; "
                                f"{'let go of those caches, or ' if live else ''}give enable() sequences={wanted}")
        self.engine = self._grow(wanted)

    def drop(self) -> None:
        """Takes back the forward of the calling thread that did not get to its last layer; else does nothing."""
        if self.holder is not None and self._thread == threading.get_ident():
            try:
                self.holder.forget_forward()
            finally:
                self.give_back()

    def give_back(self) -> None:
        self.holder = self._thread = None
        self._lock.release()


class Rows:
    """The sequences of a cache, one for each row of its batch. They end with it."""

    chooses = False
    """Whether several columns of one forward choose as the policy says, each as if those before it had been decoded one
    by one; else they are a part of a prompt, and attend everything before them."""

    def __init__(self, turn: Turn, policy: str) -> None:
        self._turn, self._policy = turn, policy
        self._sequences: list[int] = []
        self._mask: torch.Tensor | None = None  # [rows, columns] on the CPU: which columns are no padding
        # Of the forward that runs:
        self._forward: int | None = None  # its number; None also if all of its tokens are padding
        self._next_layer = 0
        self._whole = torch.empty(0, 0, dtype=torch.bool, device="cpu")  # what the mask is going to be
        # Row and column of each token that is no padding, where q is: an index for which no layer waits; None: all.
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bucket = Bucket()
        self._lost = False  # A row could not be forked; the others have ended with it.
        self._in_pieces = False  # Columns are parts of a prompt, also where there is one alone.
        self._strange: Sequence[str] = ()  # Why this forward is not read in pieces.
        turn.all_rows.add(self)
        weakref.finalize(self, _end_all, turn, self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> list[int]:
        """The engine's names of them."""
        return list(self._sequences)

    @property
    def columns(self) -> int:
        """Tokens of a row, padding included, without those of a forward that is under way."""
        return 0 if self._mask is None else self._mask.shape[1]

    def tokens(self) -> list[int]:
        """Of each row, padding left out."""
        return [self._turn.engine.tokens(sequence) for sequence in self._sequences]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
               sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of the newest columns of all rows in one of the engine's layers.

        q [rows, q_heads, n, head_dim], k and v [rows, kv_heads, n, head_dim] of one dtype; mask [rows, columns + n], 0
        where a column is padding; sinks [q_heads]: logits that take part in the softmax and have no value. Returns
        [rows, n, q_heads, head_dim], zeros where a column is padding."""
        stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
        if layer == 0:
            self._begin(q, mask, stream)
        elif self._turn.holder is not self or layer != self._next_layer:
            raise InvalidArgument(f"attention layer {layer} comes without those before it; models are to run whole")
        engine = self._turn.engine  # _begin may have changed it.
        out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], q.shape[3], dtype=q.dtype, device=q.device)
        if self._forward is not None:
            packed = out.flatten(0, 1) if self._kept is None else torch.empty(
                self._bucket.rows, *out.shape[2:], dtype=out.dtype, device=out.device)
            lse = None if sinks is None else torch.empty(packed.shape[:2], dtype=torch.float32, device=out.device)
            engine.attend(self._bucket, layer, *(self._packed(each) for each in (q, k, v)), packed, lse, stream=stream)
            if lse is not None:
                take_sinks(packed, lse, sinks)
            if self._kept is not None:
                out[self._kept] = packed
        self._next_layer = layer + 1
        if self._next_layer == engine.options.layers:
            self._finish()
        return out

    @contextlib.contextmanager
    def reads_in_pieces(self, strange: Sequence[str]) -> Iterator[None]:
        """In it forwards are pieces of a longer one; or all of it, if it is called with `strange` arguments."""
        self._in_pieces, self._strange = True, strange
        try:
            yield
        finally:
            self._in_pieces, self._strange = False, ()

    def forget_forward(self) -> None:
        """Cancels the forward that is under way: no row has its tokens."""
        number, self._forward = self._forward, None
        if number is not None:
            try:
                self._turn.engine.cancel(number)
            except Error:  # The engine is closed, or the forward has failed by itself.
                pass

    def replace(self, indices: list[int]) -> None:
        """Row i becomes what row indices[i] was. If an error is raised, all rows are lost."""
        # Rows without a token have no sequence: the first forward did not come to its end.
        if self._mask is None or not self._sequences or indices == list(range(len(self._sequences))):
            return
        engine, old = self._turn.engine, list(self._sequences)
        try:
            for index in set(range(len(old))) - set(indices):
                engine.end(old[index])
            rows: list[int] = []
            # The finalizer has the list.
            self._sequences[:] = [old[index] for index in sorted(set(indices))]
            for place, index in enumerate(indices):
                again = index in indices[:place]
                rows.append(engine.fork(old[index], engine.tokens(old[index])) if again else old[index])
                if again:
                    self._sequences.append(rows[-1])
        except Error:
            self._lost = True
            _end_all(self._turn, self._sequences)
            raise
        self._sequences[:] = rows
        self._mask = self._mask[indices]

    def fork(self, policy: str) -> Rows:
        """Rows of the same tokens, under a policy of their own."""
        rows, engine = Rows(self._turn, policy), self._turn.engine
        for sequence in self._sequences:
            rows._sequences.append(engine.fork(sequence, engine.tokens(sequence), policy))
        rows._mask = self._mask
        return rows

    def truncate(self, columns: int) -> None:
        """Takes the newest columns back, until there are as many. Without any left the rows end, and the next forward
        begins others."""
        if columns == 0:
            _end_all(self._turn, self._sequences)
            self._mask = None
        if columns >= self.columns:
            return
        mask = self._mask[:, :columns]
        for sequence, tokens in zip(self._sequences, mask.sum(1).tolist()):
            self._turn.engine.truncate(sequence, tokens)
        self._mask = mask

    def clear(self) -> None:
        """Ends all rows."""
        if self._turn.holder is self:
            self._turn.drop()
        _end_all(self._turn, self._sequences)
        self._mask, self._lost = None, False

    def _begin(self, q: torch.Tensor, mask: torch.Tensor | None, stream: Any) -> None:
        batch, new_columns = q.shape[0], q.shape[2]
        if self._lost:
            raise InvalidArgument("the rows of this cache are lost, see the error before; reset() it, or begin with a "
                                  "new one")
        self._turn.take(self)
        try:
            self._whole = self._mask_after(batch, new_columns, mask)
            if self._mask is None and len(self) != batch:
                _end_all(self._turn, self._sequences)
                self._turn.make_room(batch, self)
            while len(self) < batch:
                self._sequences.append(self._turn.engine.begin(self._policy))
            new = self._whole[:, self.columns:]
            self._kept = None if new.all() else tuple(new.nonzero().T.to(q.device))
            self._plan(new.sum(1).tolist(), new_columns > 1 and not self.chooses or self._in_pieces, stream)
        except BaseException:
            self._turn.give_back()
            raise

    def _mask_after(self, batch: int, new_columns: int, mask: torch.Tensor | None) -> torch.Tensor:
        old, seen = self.columns, self._mask
        if seen is not None and batch != len(self):
            raise InvalidArgument(f"the cache has {len(self)} rows, and this batch {batch}")
        whole = (torch.ones(batch, old + new_columns, dtype=torch.bool, device="cpu") if mask is None else
                 mask.to("cpu", torch.bool))
        if whole.shape != (batch, old + new_columns):
            raise InvalidArgument(f"the attention mask is {tuple(whole.shape)}, and the cache and its new tokens make "
                                  f"{(batch, old + new_columns)}")
        if seen is not None and mask is None:
            whole[:, :old] = seen
        if seen is not None and not torch.equal(whole[:, :old], seen):
            raise Unsupported("the attention mask hides other tokens of the cache than before; begin with a new cache")
        return whole

    def _plan(self, counts: list[int], prefill: bool, stream: Any) -> None:
        engine = self._turn.engine
        items = [PlanItem(sequence, count, prefill) for sequence, count in zip(self._sequences, counts) if count]
        rows, largest = sum(counts), engine.options.largest
        if prefill and rows > largest.prefill_rows:
            raise Unsupported(f"{rows} tokens of prompts at once, and the engine was made for {largest.prefill_rows}; "
                              f"they are not read in pieces, as it is not known what of {', '.join(self._strange)} "
                              "belongs to which token: give enable() more prefill_rows")
        if not prefill and rows > largest.decode_rows:
            raise OutOfCapacity(f"{rows} rows at once, and the engine was made for {largest.decode_rows}; give "
                                "enable() more sequences")
        tokens = bucket_tokens(max((engine.tokens(item.sequence) + item.tokens for item in items), default=1),
                               engine.options)
        if prefill:
            self._bucket = Bucket(prefill_rows=rows, prefills=len(items), max_tokens=tokens)
        else:
            self._bucket = Bucket(decode_rows=rows, max_tokens=tokens, features=largest.features)
        self._forward = engine.plan(items, self._bucket, stream) if items else None

    def _finish(self) -> None:
        if self._forward is not None:
            self._turn.engine.finish(self._forward)
        self._forward, self._mask = None, self._whole
        self._turn.give_back()

    def _packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, heads, n, head_dim] as [tokens, heads, head_dim]; of one row or column as it lies."""
        if self._kept is not None:
            return tensor.transpose(1, 2)[self._kept]
        return tensor.transpose(1, 2).flatten(0, 1)


def _end_all(turn: Turn, sequences: list[int]) -> None:
    while sequences:
        try:
            turn.engine.end(sequences.pop())
        except Error:  # The engine is closed, which has ended all.
            continue
