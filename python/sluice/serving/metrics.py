"""What Prometheus is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sluice.serving.requests import Status

_FIRST_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_NEXT_S = (0.003, 0.006, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.6, 1, 3)


class Metrics:
    """Of one server. `status`: the engine's newest. `lost`: why there is none any more."""

    def __init__(self, status: Callable[[], Status], lost: Callable[[], str | None]) -> None:
        self._status, self._lost = status, lost
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("sluice_requests", "Requests, by how they ended", ["outcome"], registry=registry)
        self.prompt_tokens = Counter("sluice_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter("sluice_cached_tokens", "Tokens of prompts that were known", registry=registry)
        self.answer_tokens = Counter("sluice_answer_tokens", "Tokens of answers", registry=registry)
        self.first_token = Histogram("sluice_time_to_first_token_seconds", "From a request to its first token",
                                     buckets=_FIRST_S, registry=registry)
        self.next_token = Histogram("sluice_time_per_output_token_seconds", "From a token to the next",
                                    buckets=_NEXT_S, registry=registry)
        registry.register(self)  # For `collect`.

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's interface: what the engine says of itself."""
        status, up = self._status(), self._lost() is None
        if not up:  # Nothing runs, and nothing has memory.
            status = dataclasses.replace(status, running=0, waiting=0, memory=None)
        yield GaugeMetricFamily("sluice_engine_up", "1: the engine answers; 0: it is lost", int(up))
        for name, value, text in (("running", status.running, "Answers that are being generated"),
                                  ("waiting", status.waiting, "Answers that wait for memory")):
            yield GaugeMetricFamily(f"sluice_{name}", text, value)
        for name, value, text in (("forwards", status.forwards, "Forwards of the model"),
                                  ("failed_forwards", status.failed_forwards, "Forwards that failed"),
                                  ("preemptions", status.preemptions, "Sequences that lost their memory for a while"),
                                  ("graph_captures", status.graph_captures, "CUDA graphs of forwards, by size"),
                                  ("graph_replays", status.graph_replays, "Forwards that such a graph was")):
            yield CounterMetricFamily(f"sluice_{name}", text, value)
        memory = GaugeMetricFamily("sluice_memory_bytes", "Memory of the engine, by kind", labels=["kind"])
        for kind, value in (dataclasses.asdict(status.memory) if status.memory else {}).items():
            memory.add_metric([kind], value)
        yield memory
        engine = CounterMetricFamily("sluice_engine", "What the engine has done, by kind", labels=["kind"])
        for kind, value in status.stats.items():
            engine.add_metric([kind], value)
        yield engine
        disk = GaugeMetricFamily("sluice_disk", "Prefixes on disk, by kind", labels=["kind"])
        for kind, value in status.disk.items():
            disk.add_metric([kind], value)
        yield disk

    def text(self) -> bytes:
        return generate_latest(self._registry)
