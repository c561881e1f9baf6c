"""A model whose heads several ranks share: rank 0 decides, and all of them run the same forwards, each with an engine
for its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers

from sluice.errors import Unsupported
from sluice.options import PlanItem
from sluice.serving.model import PackedModel, Planned
from sluice.serving.ranks import START_S, Disagreed, Ranks, RanksLost


class _Order(NamedTuple):
    """What rank 0 tells the others: what it has done since the order before, then what all do."""

    log: list[tuple[Any, ...]]  #: ("end", sequence) and ("name", sequence, first, ids); sequences as rank 0 calls them
    call: str  #: "begin" or "forward"
    arguments: tuple[Any, ...]


class ShardedModel(PackedModel):
    """A PackedModel of each rank, over its part of the heads. Rank 0's is used as any other is; the others `follow`.

    What begins and each forward is agreed upon. A forward is planned by all before one of them runs the model, whose
    collectives need all; if attention fails on a rank, the model still runs to its end there. So what fails on one
    rank ends on all, and they go on together. What breaks off within the model's own code leaves the others in a
    collective, and ends all of them."""

    _goes_on = True

    def __init__(self, model: transformers.PreTrainedModel, policy: str, host_bytes: int, *, ranks: Ranks,
                 graphs: str = "auto", prefill_rows: int = 2048, window_slack: int = 0, **options: Any) -> None:
        """`host_bytes`: of all ranks together. Others are those of PackedModel. Layers with windows keep at least the
        `prefill_rows` tokens before their windows: a chunk that fails on one rank is taken back by all."""
        self._ranks = ranks
        self._log: list[tuple[Any, ...]] = []  # What rank 0 has not told yet, and others have not done.
        self._names: dict[int, int] = {}  # Of other ranks: their sequences by what rank 0 calls them.
        self._under_way: list[tuple[int, int]] = []  # Sequences of the newest forward, and tokens they had before.
        self._behind_bytes = 0  # How much less free memory than rank 0 a rank had after the newest forward.
        # One after another: each engine looks for itself whether the machine has memory for it.
        for rank in range(ranks.ranks):
            error = None
            try:
                if rank == ranks.rank:
                    super().__init__(model, policy, host_bytes, graphs="off", prefill_rows=prefill_rows,
                                     window_slack=max(window_slack or 0, prefill_rows), **options)
            except Exception as failed:
                error = failed
            try:
                ranks.agree(error=error, timeout_s=START_S)
            except BaseException:
                if error is None and ranks.rank <= rank:
                    super().close()
                raise
        self._try_out_together()
        if self._wants_graphs(graphs):
            self._record()

    def close(self) -> None:
        """Ends the others, too, if this is rank 0."""
        if self._ranks.rank == 0 and self._ranks.lost is None:
            self._ranks.tell(None)
        super().close()
        self._ranks.close()

    def begin(self, ids: Sequence[int] | None, salt: int = 0) -> int:
        sequence = super().begin(ids, salt)
        self._tell("begin", sequence, ids, salt)
        self._settle(sequence)
        return sequence

    def end(self, sequence: int) -> None:
        if self.lost is None:  # Else it may be part of a forward that nobody can end.
            super().end(sequence)
            self._log.append(("end", sequence))

    def name_tokens(self, sequence: int, first: int, ids: Sequence[int]) -> None:
        super().name_tokens(sequence, first, ids)
        self._log.append(("name", sequence, first, ids))

    def held_bytes(self) -> int:
        return super().held_bytes() + self._behind_bytes

    @property
    def lost(self) -> str | None:
        return self._ranks.lost

    def run(self, items: Sequence[PlanItem], ids: Sequence[int], kept: Sequence[int]) -> tuple[int, torch.Tensor]:
        if self._ranks.rank == 0:
            self._tell("forward", items, ids, kept)
        return super().run(items, ids, kept)

    def finish(self, number: int) -> None:
        error, free = self._error, 0
        try:
            if error is None:
                super().finish(number)
                free = self._free_bytes()
            else:
                self.cancel(number)
        except Exception as failed:
            error = failed
        try:
            self._behind_bytes = free - min(self._ranks.agree(free, error))
        except RanksLost:
            raise
        except Exception:
            self._truncate(self._under_way)  # Others do not have the new ones.
            raise

    def follow(self) -> None:
        """Does what rank 0 does, until that ends.
        @throws RanksLost"""
        while (order := self._ranks.hear()) is not None:
            self._log.extend(order.log)
            try:
                if order.call == "begin":
                    self._begin_too(*order.arguments)
                else:
                    self._run_too(*order.arguments)
            except Disagreed:
                pass  # Rank 0 tells whom it concerns.

    def _tell(self, call: str, *arguments: Any) -> None:
        log, self._log = self._log, []
        self._ranks.tell(_Order(log, call, arguments))

    def _begin_too(self, name: int, ids: Sequence[int] | None, salt: int) -> None:
        error = None
        try:
            self._catch_up()
            self._names[name] = super().begin(ids, salt)
        except Exception as failed:
            error = failed
        try:
            self._settle(self._names.get(name), error)
        except Disagreed:
            self._names.pop(name, None)
            raise

    def _settle(self, sequence: int | None, error: Exception | None = None) -> None:
        """A sequence that began has the tokens that all ranks have found, or ends."""
        found = 0 if sequence is None else self.engine.tokens(sequence)
        try:
            had = self._ranks.agree(found, error)
        except BaseException:
            if sequence is not None:
                self.engine.end(sequence)
            raise
        if sequence is None or min(had) == max(had):
            return
        self._truncate([(sequence, min(had))])
        # Again, as one of them may have none left.
        self._truncate([(sequence, min(self._ranks.agree(self.engine.tokens(sequence))))])

    def _run_too(self, items: Sequence[PlanItem], ids: Sequence[int], kept: Sequence[int]) -> None:
        number, _ = self.run(items, ids, kept)
        self.finish(number)

    def _catch_up(self) -> None:
        """Does what rank 0 has done alone."""
        while self._ranks.rank and self._log:
            what, name, *arguments = self._log.pop(0)
            if what == "end":
                self.engine.end(self._names.pop(name))
            else:
                self.engine.name_tokens(self._names[name], *arguments)

    def _plan(self, items: Sequence[PlanItem]) -> Planned:
        planned, error = None, None
        try:
            self._catch_up()
            if self._ranks.rank:
                items = [PlanItem(self._names[item.sequence], item.tokens, item.prefill) for item in items]
            self._under_way = [(item.sequence, self.engine.tokens(item.sequence)) for item in items]
            planned = super()._plan(items)
        except Exception as failed:
            error = failed
        try:
            had = self._ranks.agree(0 if planned is None else sum(planned.positions), error)
            if len(set(had)) > 1:
                raise Disagreed("the ranks do not have the same tokens of these requests")
        except BaseException:
            if planned is not None:
                self.cancel(planned.number)
            raise
        return planned

    def _broke_off(self, number: int, error: BaseException) -> None:
        self._ranks.break_off(f"did not get to the end of a forward: {type(error).__name__}: {error}")

    def _truncate(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Sequences to as many tokens as all ranks have; to none where layers with windows have let go of what is seen
        behind as many."""
        try:
            for sequence, tokens in lengths:
                if self.engine.tokens(sequence) <= tokens:
                    continue
                try:
                    self.engine.truncate(sequence, tokens)
                except Unsupported:
                    self.engine.truncate(sequence, 0)
        except Exception as error:
            self._ranks.break_off(f"cannot take tokens back that others do not have: {type(error).__name__}: {error}")

    def _free_bytes(self) -> int:
        memory = self.engine.memory()
        return memory.far_pages - memory.far_pages_used

    def _try_out(self) -> None:
        """Not yet: while engines are made one after another, the model's collectives would wait for each other."""

    def _try_out_together(self) -> None:
        error = None
        try:
            super()._try_out()
        except Exception as failed:
            error = failed
        try:
            self._ranks.agree(error=error, timeout_s=START_S)
        except BaseException:
            super().close()
            raise

    def _record(self) -> None:
        """Either all ranks have graphs or none."""
        super()._record()
        failed = max(self._ranks.agree(self._padded is None, timeout_s=START_S))
        if failed and self._padded is not None:
            self._padded, self.graph_captures, self.graphs_failed = None, 0, "another rank could not capture them"
