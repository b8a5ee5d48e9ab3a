"""Metrics: numbers about a model's engine for monitoring, by name and for prometheus_client.

Source: Prometheus documentation, "Metric and label naming".
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from attention.toml_tables import read_tables
from specdec.engine.stats import LATELY
from specdec.errors import InvalidInputError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class MetricInfo(NamedTuple):
    """Description of a number. kind: "counter" (only grows) or "gauge". help: one line."""

    kind: str
    help: str


_REASONS = ("eos", "stop", "length", "timeout", "cancelled")
_HELP = read_tables("specdec", "extensions/service/metrics.toml")
METRICS = {
    name: MetricInfo("counter" if name.endswith("_total") else "gauge", own.format(lately=LATELY))
    for name, own in _HELP.items()
}
"""All metrics by name; in Prometheus text each name begins with "specdec_"."""


class Metrics(dict[str, float]):
    """Numbers at one moment, by the names of `METRICS`; counters count since the model was loaded."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__({name: float(values[name]) for name in METRICS})

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value:g}' for name, value in self.items())})"

    def collect(self) -> list[Metric]:
        """As a collector of prometheus_client has them."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        found = ((name, METRICS[name], value) for name, value in self.items())
        return [kinds[info.kind](f"specdec_{name}", info.help, value) for name, info, value in found]

    def prometheus(self) -> str:
        """Prometheus' text format, by prometheus_client. To be replaced by `generate_latest(metrics)` after 0.2.

        Raises:
            InvalidInputError: prometheus_client is not installed.
        """
        try:
            from prometheus_client import generate_latest
        except ImportError:
            raise InvalidInputError("prometheus() needs prometheus_client: pip install 'specdec-hf[serve]'") from None
        own: Any = self
        return generate_latest(own).decode()


def metrics_of(engine: Any) -> Metrics:
    """The numbers of an `Engine`, on any thread. Waits for no round: a running round may be counted in part."""
    counters = engine.counters
    stats = engine.stats
    scheduler = engine.scheduler
    now = time.perf_counter()
    uptime = now - counters.made
    rows = engine.config.max_num_seqs
    windowed = scheduler.windowed_pages
    head = scheduler.head_pages
    pools = {"target": [scheduler.target_pages], "head": [] if head is None else [head], "windowed": [*windowed]}
    queue, prefill, decode = counters.seconds
    # The age of a round, for which requests wait, keeps growing if the round never ends.
    arrivals = [r.times.submitted for r in (*scheduler.running, *scheduler.waiting)]
    return Metrics(
        {f"requests_ended_by_{reason}_total": counters.ends[reason] for reason in _REASONS}
        | {f"{name}_pages_used": sum(pages.num_used for pages in pool) for name, pool in pools.items()}
        | {f"{name}_pages_free": sum(pages.allocator.num_free for pages in pool) for name, pool in pools.items()}
        | {
            "requests_finished_total": stats.requests,
            "requests_failed_total": counters.ends["failed"],
            "requests_dropped_total": counters.ends["dropped"],
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "rows_used": rows - engine.table.num_free,
            "rows": rows,
            "prefix_query_tokens_total": stats.prefix_query_tokens,
            "prefix_hit_tokens_total": stats.prefix_hit_tokens,
            "rounds_total": stats.rounds,
            "preemptions_total": stats.preemptions,
            "interrupted_total": stats.interrupted,
            "generated_tokens_total": counters.reported,
            "verified_rounds_total": stats.verified,
            "emitted_tokens_total": stats.emitted,
            "acceptance_length": stats.tau,
            "tokens_per_second": counters.lately(now) / LATELY,
            "lifetime_tokens_per_second": counters.reported / uptime,
            "uptime_seconds": uptime,
            "round_age_seconds": now - max(counters.last, min(arrivals)) if arrivals else 0.0,
            "queue_seconds_total": queue,
            "prefill_seconds_total": prefill,
            "decode_seconds_total": decode,
        }
    )
