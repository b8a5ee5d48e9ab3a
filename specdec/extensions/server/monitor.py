"""Monitor: counters and latencies of a server's requests, and its engine's numbers, for Prometheus.

Source: Prometheus documentation, "Metric and label naming", "Histograms and summaries".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specdec.extensions.server.record import RequestRecord
from specdec.extensions.service.monitoring import Metrics

_TO_A_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_OF_A_TOKEN = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0)
_OF_ALL = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0)
"""Upper ends of buckets, in seconds."""


class EngineNumbers(Collector):
    """A model's `metrics()` at each scrape."""

    def __init__(self, metrics: Callable[[], Metrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._metrics().collect()


class Monitor:
    """The numbers of one server."""

    def __init__(self, metrics: Callable[[], Metrics], in_flight: Callable[[], int]) -> None:
        """metrics: of the model. in_flight: completions that clients have at once."""
        own = self.registry = CollectorRegistry()
        own.register(EngineNumbers(metrics))
        ProcessCollector(registry=own)
        self._requests = Counter(
            "specdec_http_requests",
            "HTTP requests that have ended, 499 where the client went away.",
            ("path", "status", "reason"),
            registry=own,
        )
        Gauge("specdec_http_in_flight", "Completions of clients in flight.", registry=own).set_function(in_flight)
        self._first, self._token, self._total, self._queue = (
            Histogram(f"specdec_{name}_seconds", help, buckets=buckets, registry=own)
            for name, help, buckets in (
                ("time_to_first_token", "From a request's arrival to its first token.", _TO_A_TOKEN),
                ("time_per_output_token", "Of each token after the first, the mean of a completion.", _OF_A_TOKEN),
                ("request", "From a request's arrival to the end of its answer.", _OF_ALL),
                ("queue", "Of a completion, waiting for a row.", _TO_A_TOKEN),
            )
        )

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended; its latencies where it was answered."""
        self._requests.labels(record.route, str(record.status), record.reason).inc()
        for one in record.done:
            self._queue.observe(one.stats.queue_s)
            if len(one.token_ids) > 1:
                self._token.observe(one.stats.decode_s / (len(one.token_ids) - 1))
        if record.first_token_s is not None:
            self._first.observe(record.first_token_s)
        if record.done and record.status == 200:
            self._total.observe(record.total_s)

    def text(self, accept: str) -> tuple[bytes, str]:
        """All numbers, and the content type, in the format that a scrape's Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
