"""What engines tell of themselves. The names are those of sluice.h."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Sizes:
    """What an engine has room for, of what its policies want beside the features of its largest bucket."""

    prompt_queries: int  #: of a prompt's newest tokens, for each of cpu_sequences
    max_picks: int  #: tokens that a query head may choose on the device
    digests: int  #: of full pages: none, of boxes, or of cuboids with means (0, 1, 2)
    max_ranked: int  #: pages that a query head may choose
    max_window: int  #: sinks and recent tokens of a policy, together
    max_clusters: int  #: of a KV head, for each of cluster_sequences
    code_bits: int  #: of a channel of the copies of keys, 4 or 3; 0: there are none
    forecasts: int  #: 1: what histories propose lies ready for a GPU, which chooses of it
    cpu_sequences: int  #: that live at once and whose policies choose on the CPU
    cluster_sequences: int  #: that live at once and whose policies choose among clusters of keys on the device


@dataclass(frozen=True)
class Stats:
    """What an engine has done so far."""

    asked: int  #: layers whose far part the CPU was asked for
    unplanned: int  #: replays without a plan of their own
    near_tokens: int  #: attended in device memory, by all rows that choose, layers and KV heads
    far_tokens: int  #: and in place, by the CPU
    fetched_tokens: int  #: and by the device over the link
    promoted: int  #: tokens brought near, by layers and KV heads
    scored: int  #: keys that policies read to choose on the CPU
    estimated: int  #: keys whose copies the device was to read to choose
    ranked_pages: int  #: pages whose digests it was to read
    waited_ns: int  #: that the device waited for the CPU's answers
    answer_ns: int  #: from when a thread saw a question until it was answered
    sparse_chunks: int  #: of prompts: (layer, chunk) pairs where blocks were chosen
    dense_chunks: int  #: and the others
    kept_blocks: int  #: (query head, query block, key block) triples computed where they were chosen
    causal_blocks: int  #: and what dense attention would have computed there
    matched_tokens: int  #: of prompts, that sequences began with
    evicted_blocks: int  #: kept for prompts to come, until something else needed them
    missed: int  #: choices of query heads for which all scores were read once more
    stalls: int  #: plans that waited until a policy had looked at a prompt
    awaited: int  #: layers whose choice waited for what histories propose, which is part of waited_ns
    drawn_heads: int  #: choices of query heads that drew what they attend (budget stage ``sample``)
    error_bars: int  #: sum of their relative standard errors, in millionths
    wide_bars: int  #: how many of these were above 10%

    @property
    def error_bar(self) -> float:
        """The mean relative standard error of what was drawn; 0 if nothing was."""
        return self.error_bars / self.drawn_heads * 1e-6 if self.drawn_heads else 0.0


@dataclass(frozen=True)
class Memory:
    """Memory of an engine in bytes, all but `policies` and `prefixes` reserved when it is created."""

    far_pages: int  #: host: keys and values
    far_pages_used: int  #: of these, in blocks that sequences hold; shared ones count once
    far_pages_cached: int  #: and in blocks that no sequence has, kept for prompts to come
    prefixes: int  #: host, not reserved: names of tokens, and what finds pages by them
    pinned: int  #: host: what device and threads share
    partials: int  #: host: the threads' own
    policies: int  #: host: what policies that choose on the CPU have learnt
    near_pages: int  #: device
    near_pages_used: int  #: of these, when the newest forward ended
    codes: int  #: device: copies of keys, of `code_bits` a channel
    digests: int  #: device: of full pages
    buffers: int  #: device: everything else

    @property
    def device(self) -> int:
        """All of it that is the device's."""
        return self.near_pages + self.codes + self.digests + self.buffers


@dataclass(frozen=True)
class SequenceMemory:
    """Memory of one sequence in bytes: of the host, but for what is near."""

    far_pages: int  #: keys and values, in blocks that it holds
    far_pages_shared: int  #: of these, in blocks that stay if it ends
    policy: int  #: heap: what its policy has learnt
    names: int  #: heap: names of its tokens
    tail: int  #: pinned: queries of its prompt's newest tokens
    near_pages: int  #: device: rows of these blocks that lie near, as it has them when asked
    near_pages_shared: int  #: of these, in blocks that others hold or names keep


@dataclass(frozen=True)
class Audit:
    """What audits of a sequence found, over all layers, query heads and audited tokens. Shares are in [0, 1]; all is 0
    if nothing was audited."""

    top_k: int  #: tokens with the largest scores that `overlap` is about
    layers: int
    q_heads: int
    tokens: int  #: audited
    attended_tokens: int  #: by the query heads of a group together, summed over layers and KV heads
    dense_tokens: int  #: and those that there were
    bypassed_heads: int  #: query heads that attended nothing, summed over layers
    coverage_count: int
    coverage_mean: float  #: share of the exact softmax that was attended
    coverage_min: float
    coverage_p5: float  #: 5% of the samples lie below
    coverage_p50: float
    overlap_count: int
    overlap_mean: float  #: share of the top_k tokens that was attended
    overlap_min: float
    watched_count: int
    watched_mean: float  #: share of the watched tokens' mass that was attended, where they held 1%
    watched_min: float


@dataclass(frozen=True)
class HeadAudit:
    """The same for one layer and query head: means over the audited steps."""

    steps: int
    bound_broken: int  #: steps whose error was above error_bound
    watched_steps: int  #: steps in which watched tokens held 1%
    coverage: float  #: share of the exact softmax that was attended
    coverage_min: float
    overlap: float  #: share of the tokens with the largest scores that was attended
    error: float  #: L2 norm of output minus exact output
    relative_error: float  #: the same over the norm of the exact output
    error_bound: float  #: 2 (1 - coverage) max |v|
    watched_mass: float  #: the watched tokens' exact share
    watched_kept: float  #: the attended part of that share, relative to it


@dataclass(frozen=True)
class AdmissionUse:
    """What an admission has shared out."""

    waiting: int  #: requests
    running: int  #: requests
    pages: int  #: of those that run; shared ones count for each of them
    near_pages: int  #: likewise


Figures = TypeVar("Figures")


def read(kind: type[Figures], struct: ctypes.Structure) -> Figures:
    """The struct's fields of the same names."""
    return kind(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(kind)})
