"""Defines `Metrics`, the numbers of a server for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.generation.cache import BLOCK
from weft.generation.engine import Engine
from weft.serve.served_model import ServedModel, ServedModels

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)  # seconds
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """The numbers of a server.

    Args:
        models: the models, whose engines are asked when the numbers are read.
    """

    def __init__(self, models: ServedModels):
        self.registry, self._models = CollectorRegistry(), models
        self.registry.register(self)
        self.requests = Counter(
            "weft_http_requests", "Answered HTTP requests.", ["path", "status"], registry=self.registry
        )
        self._first = Histogram(
            "weft_time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            ["model"],
            buckets=FIRST_TOKEN,
            registry=self.registry,
        )
        self._next = Histogram(
            "weft_time_per_output_token_seconds",
            "Mean time between two tokens of a request, by request.",
            ["model"],
            buckets=NEXT_TOKEN,
            registry=self.registry,
        )
        self._prompt = Counter("weft_prompt_tokens", "Prompt tokens of requests.", ["model"], registry=self.registry)

    def watch(self, model: ServedModel) -> Watch:
        """Returns what measures a request of a model, which begins now."""
        return Watch(self, model.name)

    def collect(self) -> Iterator[Metric]:
        """Yields the numbers of the engines. The engines go on meanwhile, so the numbers can differ by a step."""
        gauges = [
            ("weft_requests_running", "Texts that are being generated.", lambda e: len(e.running)),
            ("weft_requests_waiting", "Texts that wait for others.", lambda e: len(e.waiting)),
            ("weft_cache_capacity_tokens", "Tokens that fit in the key-value cache.", lambda e: e.capacity),
            ("weft_cache_used_ratio", "Part of the key-value cache that running texts use.", _used_ratio),
        ]
        counters = [
            ("weft_generated_tokens", "New tokens.", lambda e: e.new_tokens),
            ("weft_computed_tokens", "Tokens that forward passes computed.", lambda e: e.computed_tokens),
            ("weft_cached_prompt_tokens", "Prompt tokens that the cache had already.", lambda e: e.shared_tokens),
            ("weft_engine_steps", "Steps of the engine.", lambda e: e.steps),
            ("weft_proposed_tokens", "Tokens that speculative decoding proposed.", lambda e: e.proposed_tokens),
            ("weft_accepted_tokens", "Proposed tokens that the model accepted.", lambda e: e.accepted_tokens),
        ]
        for kind, found in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, what, value in found:
                family = kind(name, what, labels=["model"])
                for model in self._models:
                    if (number := value(model.engine)) is not None:
                        family.add_metric([model.name], number)
                yield family


def _used_ratio(engine: Engine) -> float | None:
    if not engine.capacity:
        return None
    return (len(engine.blocks) - engine.blocks.free) * BLOCK / engine.capacity


class Watch:
    """Measures a request: call `begin` with its prompt tokens, `add` for new tokens, and `end`."""

    def __init__(self, metrics: Metrics, model: str):
        self._metrics, self._model, self._start = metrics, model, time.perf_counter()
        self._first = self._last = 0.0

    def begin(self, prompt_tokens: int) -> None:
        self._metrics._prompt.labels(self._model).inc(prompt_tokens)

    def add(self) -> None:
        self._last = time.perf_counter()
        if not self._first:
            self._first = self._last
            self._metrics._first.labels(self._model).observe(self._first - self._start)

    def end(self, steps: int) -> None:
        """Ends a request whose longest text has `steps` tokens."""
        if steps > 1:
            self._metrics._next.labels(self._model).observe((self._last - self._first) / (steps - 1))


class CountRequests:
    """Counts answered requests by path and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The pattern of the path: clients can ask for any number of paths.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, send_and_count if scope["type"] == "http" else send)
