"""Defines `Endpoint`, which serves the metrics of a run's last step for Prometheus."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.errors import UserError


class Endpoint:
    """A server on 127.0.0.1 with the metrics of the last step, at `/metrics`. Each is a gauge `weft_NAME`.

    The numbers are read when Prometheus asks for them, in the thread of the server, so a step costs nothing.

    Args:
        read: returns the metrics of the last step.
        events: number of events of each kind, for the counter `weft_events_total`.

    Raises:
        UserError: prometheus_client is not installed, or the port is in use.
    """

    def __init__(self, port: int, read: Callable[[], Mapping[str, Any]], events: Counter[str]):
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise UserError(
                "watch.prometheus_port needs prometheus_client; run: pip install 'weft-train[serve]', or remove the key"
            ) from None
        self.read, self.events = read, events
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise UserError(
                f"watch.prometheus_port: {port} cannot be opened ({error.strerror}); choose another port"
            ) from None

    def collect(self) -> Iterator[Any]:
        """Yields the metrics, in the form of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in sorted(dict(self.read()).items()):
            if isinstance(value, int | float):
                plain = re.sub(r"\W", "_", name)
                yield GaugeMetricFamily(f"weft_{plain}", f"{name} of the last step.", value)
        family = CounterMetricFamily("weft_events", "Events of the watch.", labels=["event"])
        for kind, count in sorted(self.events.items()):
            family.add_metric([kind], count)
        yield family

    def close(self) -> None:
        """Stops the server. Can be called twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
