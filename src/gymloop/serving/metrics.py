"""The server's numbers, for Prometheus. Each server has a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from gymloop.serving.call import Said
from gymloop.serving.refusal import ApiError
from gymloop.serving.traffic import Traffic

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """What ``/metrics`` shows.

    Args:
        in_flight: requests being served now.
        queued: requests that the engine has not given a row; None where it does not say.
        weight_version: of the engine; None until there is one.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        queued: Callable[[], int | None],
        weight_version: Callable[[], int | None],
    ):
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("gymloop_requests", "Replies sent", ("route", "status"), registry=registry)
        self._seconds = Histogram(
            "gymloop_request_seconds", "From headers to the last byte", ("route",), buckets=SECONDS, registry=registry
        )
        self._first = Histogram(
            "gymloop_time_to_first_token_seconds", "Of streamed requests", buckets=SECONDS, registry=registry
        )
        self._refusals = Counter("gymloop_refusals", "Replies with an error", ("code",), registry=registry)
        self._prompt_tokens = Counter("gymloop_prompt_tokens", "Tokens in prompts", registry=registry)
        self._tokens = Counter("gymloop_generation_tokens", "Tokens sampled", registry=registry)
        self._lengths = Histogram(
            "gymloop_generation_length_tokens", "Tokens of a sample", buckets=TOKENS, registry=registry
        )
        self._ends = Counter("gymloop_samples", "Samples finished", ("finish_reason",), registry=registry)
        self._segments = Counter(
            "gymloop_new_segments", "Prompts that do not continue the assistant turn before them", registry=registry
        )
        for name, text, read in (
            ("gymloop_requests_in_flight", "Requests being served", in_flight),
            ("gymloop_requests_queued", "Requests that wait for a row of the engine", queued),
            ("gymloop_weight_version", "Version of the engine's weights", weight_version),
        ):
            Gauge(name, text, registry=registry).set_function(_or_nan(read))
        self._bound: dict[tuple[str, int], Counter] = {}

    def replied(self, route: str, status: int, seconds: float) -> None:
        """Count a reply."""
        counter = self._bound.get((route, status))
        if counter is None:
            counter = self._bound[route, status] = self._requests.labels(route, status)
        counter.inc()
        self._seconds.labels(route).observe(seconds)

    def refused(self, refusal: ApiError) -> None:
        """Count a reply with an error."""
        self._refusals.labels(refusal.code).inc()

    def first_token(self, seconds: float) -> None:
        """Time from a streamed request to its first event."""
        self._first.observe(seconds)

    def sampled(self, prompt_tokens: int, new_segment: bool, said: Sequence[Said]) -> None:
        """Count what a request cost."""
        self._prompt_tokens.inc(prompt_tokens)
        if new_segment:
            self._segments.inc()
        for one in said:
            self._tokens.inc(len(one.sample.token_ids))
            self._lengths.observe(len(one.sample.token_ids))
            self._ends.labels(one.sample.finish_reason).inc()

    def traffic(self) -> Traffic:
        """The counters that a line of the log is made of."""
        totals: dict[str, float] = {}
        for metric in self._registry.collect():
            for sample in metric.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return Traffic(
            samples=int(totals.get("gymloop_samples_total", 0)),
            prompt_tokens=int(totals["gymloop_prompt_tokens_total"]),
            tokens=int(totals["gymloop_generation_tokens_total"]),
            refused=int(totals.get("gymloop_refusals_total", 0)),
            in_flight=int(totals["gymloop_requests_in_flight"]),
        )

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)


def _or_nan(read: Callable[[], int | None]) -> Callable[[], float]:
    def value() -> float:
        found = read()
        return float("nan") if found is None else found

    return value
