"""Defines `Alerts`, which sends events of the watch to a webhook or a command, in a thread beside the training."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from weft.config.watch import AlertSection
from weft.errors import UserError

MOST_WAITING = 100  # events that wait for a slow receiver; later ones are dropped
log = logging.getLogger("weft.train")


class Alerts:
    """Sends events to the receivers of `watch.alert`. No method waits for a receiver, except `close`.

    Args:
        warn: prints a warning; called once for each receiver that fails.

    Raises:
        UserError: the environment variable of the webhook is not set, or has no URL.
    """

    def __init__(self, section: AlertSection, warn: Callable[[str], None]):
        self.section, self.warn, self.dropped = section, warn, 0
        self.url = None if section.webhook is None else _url(section.webhook)
        self._failed: set[str] = set()
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def send(self, event: dict[str, Any]) -> None:
        """Sends an event later. Drops the event if too many events wait."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Waits until the waiting events are sent, at most twice `watch.alert.timeout`; warns if some are not."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=self.section.timeout)
        self._thread.join(self.section.timeout)
        if self.dropped or self._thread.is_alive():
            log.warning("some alerts were not sent, because the receiver was too slow")

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            body = json.dumps(event).encode()
            if self.url is not None:
                self._attempt("webhook", lambda body=body: self._post(body))
            if self.section.command is not None:
                self._attempt("command", lambda body=body: self._call(body))

    def _attempt(self, receiver: str, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
            if receiver not in self._failed:
                self._failed.add(receiver)
                self.warn(f"watch.alert.{receiver}: {self._reason(error)}; the event is in logs/events.jsonl")

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(
            self.url or "", body, {"Content-Type": "application/json", "User-Agent": "weft"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=self.section.timeout) as answer:
            answer.read(1)

    def _call(self, body: bytes) -> None:
        subprocess.run(
            self.section.command or [],
            input=body + b"\n",  # a shell's `read` needs the end of a line
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=self.section.timeout,
            check=True,
        )

    def _reason(self, error: Exception) -> str:
        """Returns the reason of a failure, without the URL, which is a secret."""
        if isinstance(error, urllib.error.HTTPError):
            return f"{_host(self.url)} answered with status {error.code}"
        if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
            return f"no answer in {self.section.timeout:g} s"
        if isinstance(error, subprocess.CalledProcessError):
            return f"{(self.section.command or [''])[0]} exited with code {error.returncode}"
        if isinstance(error, urllib.error.URLError):
            return f"{_host(self.url)} cannot be reached ({error.reason})"
        if isinstance(error, OSError):
            return f"{error.strerror or type(error).__name__}" + (f": {error.filename}" if error.filename else "")
        return type(error).__name__


def _url(given: str) -> str:
    """Returns the URL of a webhook, which may be the `$NAME` of an environment variable."""
    if not given.startswith("$"):
        return given
    url = os.environ.get(given[1:])
    if not url:
        raise UserError(f"watch.alert.webhook: the environment variable {given[1:]} is not set; set it to the URL")
    if urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"watch.alert.webhook: the environment variable {given[1:]} is not an http or https URL")
    return url


def _host(url: str | None) -> str:
    return urlsplit(url or "").hostname or "the host"
