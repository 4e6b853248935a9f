"""What a gateway has served, as numbers in Prometheus' text format (exposition format 0.0.4)."""

from __future__ import annotations

import bisect
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from agl.trainer.gateway.calls import Choice, OnTokens, Reply

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of durations, in seconds."""

Labels = tuple[str, ...]


class Histogram:
    """Durations by label, in seconds."""

    def __init__(self) -> None:
        self.counts: dict[Labels, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))
        self.sums: Counter[Labels] = Counter()

    def add(self, labels: Labels, seconds: float) -> None:
        """Count a duration."""
        self.counts[labels][bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sums[labels] += seconds  # type: ignore[assignment]


class Metrics:
    """The numbers of one server.

    Attributes:
        requests: (application, model, HTTP status) -> how many ended.
        open_requests: application -> how many run or wait now.
        tokens: (application, model, "prompt", "cached" or "sampled") -> how many.
        durations, waits: (application, model) -> seconds to the end of an answer, and to a stream's first tokens.
    """

    def __init__(self) -> None:
        self.requests: Counter[Labels] = Counter()
        self.open_requests: Counter[str] = Counter()
        self.tokens: Counter[Labels] = Counter()
        self.durations = Histogram()
        self.waits = Histogram()

    def refused(self, application: str, status: int) -> None:
        """Count a request that no policy has seen."""
        self.requests[application, "", str(status)] += 1

    def started(self, application: str, model: str) -> Measured:
        """Begin to measure a request."""
        return Measured(self, application, model)

    def text(self) -> str:
        """All of it in Prometheus' format."""
        names = "application", "model"
        lines = [
            *_counter("agl_requests_total", "Requests that ended.", (*names, "status"), self.requests),
            *_counter(
                "agl_open_requests",
                "Requests that run or wait.",
                ("application",),
                {(name,): value for name, value in self.open_requests.items()},
                "gauge",
            ),
            *_counter("agl_tokens_total", "Tokens; cached ones are prompt, too.", (*names, "kind"), self.tokens),
            *_histogram("agl_request_seconds", "Time to the end of an answer.", names, self.durations),
            *_histogram("agl_first_token_seconds", "Time to the first tokens of a stream.", names, self.waits),
        ]
        return "\n".join(lines) + "\n"


class Measured:
    """One request."""

    def __init__(self, metrics: Metrics, application: str, model: str) -> None:
        self._metrics = metrics
        self._labels = (application, model)
        self._began = time.monotonic()
        self._waiting = True

    def timing(self, on_tokens: OnTokens | None) -> OnTokens | None:
        """`on_tokens`, which also measures how long the first tokens took."""
        if on_tokens is None:
            return None

        def timed(choice: Choice, ids: Sequence[int]) -> None:
            self.first_tokens()
            on_tokens(choice, ids)

        return timed

    def first_tokens(self) -> None:
        """There are tokens; the first ones of the request are timed."""
        if self._waiting:
            self._waiting = False
            self._metrics.waits.add(self._labels, time.monotonic() - self._began)

    def answered(self, replies: Sequence[Reply]) -> None:
        """It was answered."""
        sampled = sum(reply.completion.token_ids.size for reply in replies)
        self.tokens(replies[0].prompt_tokens, replies[0].completion.cached_tokens, sampled)
        self.ended(200)

    def tokens(self, prompt: int, cached: int, sampled: int) -> None:
        """Count tokens. `cached`: of the prompt's, those that the engine had computed before."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("sampled", sampled)):
            self._metrics.tokens[(*self._labels, kind)] += count

    def ended(self, status: int) -> None:
        """It has ended with this HTTP status; 499 if its client hung up."""
        self._metrics.requests[(*self._labels, str(status))] += 1
        self._metrics.durations.add(self._labels, time.monotonic() - self._began)


def _counter(
    name: str, about: str, labels: Sequence[str], values: Mapping[Labels, float], kind: str = "counter"
) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for key, value in sorted(values.items()):
        yield f"{name}{_labels(labels, key)} {value}"


def _histogram(name: str, about: str, labels: Sequence[str], histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} histogram"
    for key, counts in sorted(histogram.counts.items()):
        below = 0
        for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
            below += count
            yield f"{name}_bucket{_labels((*labels, 'le'), (*key, str(bound)))} {below}"
        yield f"{name}_sum{_labels(labels, key)} {histogram.sums[key]}"
        yield f"{name}_count{_labels(labels, key)} {below}"


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    escaped = (value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for value in values)
    pairs = (f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
    return "{" + ",".join(pairs) + "}"
