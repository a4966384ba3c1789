"""Counters and histograms of a server, for Prometheus and for its page."""

from collections import deque
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_RECENT = 512
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """What a server counts.

    Args:
        waiting: Returns how many requests wait.
        connections: Returns how many clients are connected.
        replicas: Returns how many engines can answer.
    """

    def __init__(
        self,
        *,
        waiting: Callable[[], int],
        connections: Callable[[], int],
        replicas: Callable[[], int],
    ) -> None:
        self.registry: CollectorRegistry = CollectorRegistry()
        self.recent_ms: deque[float] = deque(maxlen=_RECENT)
        self._requests = self._counter("phyai_requests", "Requests by outcome", "outcome")
        self._refused = self._counter("phyai_refused", "Connections refused", "reason")
        self._restarts = self._counter("phyai_replica_restarts", "Replicas that were replaced")
        self._latency = Histogram(
            "phyai_request_seconds",
            "From a request's last byte to its reply",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._stage = Histogram(
            "phyai_stage_seconds",
            "Stages of a request",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._batch = Histogram(
            "phyai_batch_size",
            "Requests that were computed together",
            buckets=_BATCHES,
            registry=self.registry,
        )
        for name, text, read in (
            ("phyai_queue_length", "Requests that wait for an engine", waiting),
            ("phyai_connections", "Connected clients", connections),
            ("phyai_replicas_ready", "Engines that can answer", replicas),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def answered(self, seconds: float, timing_ms: Mapping[str, float], batch: int) -> None:
        """Count a request that was answered."""
        self._requests.labels("ok").inc()
        self._latency.observe(seconds)
        self.recent_ms.append(1e3 * seconds)
        self._batch.observe(batch)
        for stage, value in timing_ms.items():
            self._stage.labels(stage).observe(value / 1e3)

    def failed(self, outcome: str) -> None:
        """Count a request without an answer: ``bad_request``, ``busy``, ``timeout``, ``error``."""
        self._requests.labels(outcome).inc()

    def refused(self, reason: str) -> None:
        """Count a connection that was refused: ``key``, ``full``, ``draining``, ``origin``."""
        self._refused.labels(reason).inc()

    def restarted(self) -> None:
        """Count a replica that was replaced."""
        self._restarts.inc()

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
