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


_POOLS = ("cache", "tiers", "*", "*")
_COPIES = ("cache", "copies", "*")


def _counter(name: str, text: str, *path: str, labels: tuple[str, ...] = ()) -> EngineMetric:
    return EngineMetric(f"banyan_{name}", CounterMetricFamily, text, path, labels)


def _gauge(name: str, text: str, *path: str, labels: tuple[str, ...] = ()) -> EngineMetric:
    return EngineMetric(f"banyan_{name}", GaugeMetricFamily, text, path, labels)


def _request_metrics() -> Iterator[EngineMetric]:
    """What became of requests and their tokens."""
    at = "engine"
    yield _counter(
        "requests_finished", "Requests by how they ended.", at, "finished", "*", labels=("reason",)
    )
    yield _counter(
        "requests_refused", "Requests refused, by code.", at, "refused", "*", labels=("code",)
    )
    yield _counter(
        "prompt_tokens", "Prompt tokens by source.", at, "prompt_tokens", "*", labels=("source",)
    )
    for name, text in (
        ("steps", "Scheduler steps."),
        ("prefill_tokens", "Tokens run through the model by prefill, recomputation included."),
        ("generated_tokens", "Tokens chosen."),
        ("retractions", "Running requests put back because slots ran out."),
        ("load_failures", "Load-backs that failed under a running request."),
        ("forward_failures", "Calls into the model that raised."),
        ("sharing_waits", "Requests that waited for another one's prefill of their prefix."),
        ("stalled", "Steps a running request sat out because transfers held its slots."),
    ):
        yield _counter(name, text, at, name)
    for name in ("running", "waiting", "prefilling", "decoding"):
        yield _gauge(f"requests_{name}", f"Requests {name} now.", at, name)


def _cache_metrics() -> Iterator[EngineMetric]:
    """What the pools hold and what moves between the tiers."""
    for name in ("capacity", "free", "evictable", "protected", "other"):
        text = f"Slots: {name}." if name != "other" else "Slots held by requests and transfers."
        yield _gauge(f"pool_slots_{name}", text, *_POOLS, name, labels=("tier", "component"))
    text = "Bytes of one slot."
    yield _gauge("pool_record_bytes", text, *_POOLS, "record_bytes", labels=("tier", "component"))
    for name, text in (
        ("jobs", "Transfers ended, failed ones included."),
        ("bytes", "Bytes copied."),
        ("seconds", "Time spent copying, without queueing."),
        ("verified", "Records whose SHA-256 was compared after a copy."),
        ("mismatched", "Records whose SHA-256 differed after a copy."),
    ):
        yield _counter(f"copy_{name}", text, *_COPIES, name, labels=("kind",))
    text = "Transfers that failed, by reason; the requests recompute."
    yield _counter("copy_failures", text, *_COPIES, "reasons", "*", labels=("kind", "reason"))
    text = "Cached data not used, by reason."
    yield _counter("cache_misses", text, "cache", "misses", "*", labels=("reason",))
    text = "Events inside the cache."
    yield _counter("cache_events", text, "cache", "counts", "*", labels=("event",))
    yield _gauge("cache_leases", "Leases held.", "cache", "leases")
    yield _gauge("cache_operations", "Transfers on their way.", "cache", "operations")
    yield _counter("bad_frames", "Messages the engine could not read.", "bad_frames")


ENGINE_METRICS: tuple[EngineMetric, ...] = (*_request_metrics(), *_cache_metrics())


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
            metrics.duration.observe(now - self._arrival)

    def client_gone(self) -> None:
        """Account for a client that left."""
        self._metrics.clients_gone.inc()
