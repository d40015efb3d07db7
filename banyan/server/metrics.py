"""The numbers that Prometheus reads.

Owns the latencies measured here, where the user's waiting is felt, and the table that maps the
engine's `stats()` to metric families. Counters come from the engine as they are: nothing is
averaged, so that a rate over any window can be computed by whoever reads them. On the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from banyan.engine.messages import Output

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class EngineMetric(NamedTuple):
    """One family made from the engine's stats.

    Args:
        path: keys into `stats()`; `*` stands for any key and becomes the next label's value.
        labels: one name per `*` in `path`.
    """

    name: str
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    help: str
    path: tuple[str, ...]
    labels: tuple[str, ...] = ()


ENGINE_METRICS: tuple[EngineMetric, ...] = ()


def samples(stats: Any, path: tuple[str, ...]) -> Iterator[tuple[list[str], float]]:
    """The label values and the number of everything that `path` leads to in `stats`."""
    if not path:
        yield [], float(stats)
        return
    head, rest = path[0], path[1:]
    if head != "*":
        if head in stats:
            yield from samples(stats[head], rest)
        return
    for key, value in stats.items():
        for labels, number in samples(value, rest):
            yield [key, *labels], number


class EngineCollector(Collector):
    """The engine's stats, as last fetched; nothing but `banyan_engine_up 0` when it is gone."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] | None = None

    def collect(self) -> Iterator[Metric]:
        """All families of `ENGINE_METRICS` that the stats have."""
        up = self.stats is not None
        yield GaugeMetricFamily("banyan_engine_up", "1 while the engine answers.", value=int(up))
        for metric in ENGINE_METRICS if up else ():
            family = metric.kind(metric.name, metric.help, labels=metric.labels)
            for labels, number in samples(self.stats, metric.path):
                family.add_metric(labels, number)
            yield family


class ServerMetrics:
    """All metrics of one server, in a registry of their own.

    Args:
        clock: seconds, monotone.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.responses = Counter(
            "banyan_http_responses",
            "Answers by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self.finished = Counter(
            "banyan_requests_finished",
            "Prompts by how they ended.",
            ["reason"],
            registry=self.registry,
        )
        self.clients_gone = Counter(
            "banyan_clients_gone",
            "Requests whose client left before the end.",
            registry=self.registry,
        )
        self.ttft = Histogram(
            "banyan_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "banyan_inter_token_latency_seconds",
            "Between two tokens of one answer.",
            buckets=_ITL_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "banyan_request_duration_seconds",
            "From a request's arrival to its end.",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )

    def timer(self) -> RequestTimer:
        """Start measuring a request that has just arrived."""
        return RequestTimer(self)

    def render(self, stats: dict[str, Any] | None) -> bytes:
        """The text exposition; `stats` are the engine's, None when it is gone."""
        self.engine.stats = stats
        return generate_latest(self.registry)


class RequestTimer:
    """Measures one HTTP request; its prompts are told apart by request id."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._arrival = metrics.clock()
        self._last: dict[str, float] = {}

    def note(self, output: Output) -> None:
        """Account for one output at the moment it is passed on."""
        metrics, now = self._metrics, self._metrics.clock()
        if output.tokens:
            last = self._last.get(output.request_id)
            if last is None:
                metrics.ttft.observe(now - self._arrival)
            else:
                for _ in output.tokens:
                    metrics.itl.observe((now - last) / len(output.tokens))
            self._last[output.request_id] = now
        if output.finish_reason is not None:
            metrics.finished.labels(output.finish_reason).inc()
            metrics.duration.observe(now - self._arrival)

    def client_gone(self) -> None:
        """Account for a client that left."""
        self._metrics.clients_gone.inc()
