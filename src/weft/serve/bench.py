"""Sends streaming requests to an OpenAI-compatible server on this machine, and measures each of them.

With a rate, requests begin at times that are drawn before the first request, and latencies count from these times: a
server that stalls does not delay the later requests of the measurement ("coordinated omission", Tene, 2013).
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import orjson

from weft.errors import UserError
from weft.observe.console import Console

MOST_REQUESTS = 100_000
PROMPT_WORDS, NEW_TOKENS = (8, 128), (16, 64)  # defaults for models with a large window
CHAT_TOKENS = 64  # tokens of the default window that are kept for the text of a chat template
TEXT = """
time person year way day thing man world life hand part child eye woman place work week case point government
company number group problem fact water river stone light sound paper music winter summer green blue small large
"""
WORDS = TEXT.split()


@dataclass(frozen=True)
class Load:
    """The requests of a measurement.

    Attributes:
        url: address of the server, which must be on this machine.
        model: name of the model; None: the first model that the server lists.
        concurrency: number of requests at a time; None if `rate` is set.
        rate: mean number of requests that begin per second (a Poisson process); None if `concurrency` is set.
        requests: number of requests.
        prompt_words: least and greatest number of words of a prompt, without `shared_words`. None: PROMPT_WORDS, but
            prompts are cut so that they fit in the window that the server reports, even with a token per character.
        new_tokens: least and greatest `max_tokens`. None: NEW_TOKENS, but at most a quarter of this window.
        shared_words: number of words with which all prompts begin.
        chat: whether the prompts are messages for /v1/chat/completions.
        ignore_eos: whether the requests ask to continue after the end of a text.
        timeout: seconds after which a request has failed.
        api_key: the key for the server; None: no key.
        seed: seed of prompts, lengths and arrival times.

    Raises:
        UserError: a number is out of range, or the server is not on this machine.
    """

    url: str
    model: str | None = None
    concurrency: int | None = 8
    rate: float | None = None
    requests: int = 100
    prompt_words: tuple[int, int] | None = None
    new_tokens: tuple[int, int] | None = None
    shared_words: int = 0
    chat: bool = False
    ignore_eos: bool = False
    timeout: float = 120.0
    api_key: str | None = None
    seed: int = 0

    def __post_init__(self):
        for ok, name, remedy in (
            (self.concurrency is None or self.concurrency >= 1, "concurrency", "set it to at least 1"),
            (self.rate is None or 0 < self.rate < 1e4, "rate", "set it to a number above 0, at most 10,000"),
            (1 <= self.requests <= MOST_REQUESTS, "requests", f"set it to a number from 1 to {MOST_REQUESTS:,}"),
            (self.shared_words >= 0, "shared_words", "set it to 0 or more"),
            (0 < self.timeout < 1e5, "timeout", "set it to a number of seconds above 0"),
        ):
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; {remedy}")
        check_on_this_machine(self.url)


@dataclass
class Measured:
    """One request. Times are seconds since the beginning of the measurement.

    Attributes:
        begin: when the request began, or should have begun (see `Load.rate`).
        arrivals: when the pieces of the text arrived.
        end: when the response ended; 0: it has not ended.
        prompt_tokens: number of tokens of the prompt, as the server reports it.
        new_tokens: number of new tokens, as the server reports it; without a report, the number of pieces.
        finish: the reason for the end of the text, as the server reports it.
        error: what failed: the HTTP status, the code of the error, or the exception; None: the request succeeded.
    """

    begin: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    finish: str | None = None
    error: str | None = None


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Converts "LOW:HIGH" or "N" to two numbers. Raises UserError if they are not integers with 1 <= LOW <= HIGH."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise UserError(f"{option} {text}: not a range; give LOW:HIGH, such as 8:128, with 1 <= LOW <= HIGH")
    return found


def check_on_this_machine(url: str) -> None:
    """Raises UserError if `url` is not an http address, or if one of the host's addresses is not a loopback address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"{url}: not the address of a server; give one such as http://127.0.0.1:8000")
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise UserError(f"{url}: unknown host ({error}); check the address") from None
    if not all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in addresses):
        raise UserError(f"{url}: not on this machine; `weft bench serve` loads only 127.0.0.1, so run it on the server")


def run_load(load: Load, console: Console) -> tuple[Load, list[Measured]]:
    """Sends the requests. Ctrl-C ends those that have not ended.

    Returns:
        The load with the name of the model, and the measurements of the requests that have ended.

    Raises:
        UserError: aiohttp is not installed, no server answers, or the server has no such model.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise UserError("`weft bench serve` needs aiohttp; run: pip install 'weft-train[serve]'") from None
    measured: list[Measured] = []
    try:
        model = asyncio.run(_check_model(load))
        load = replace(load, model=model["id"])
        asyncio.run(_run(load, model.get("max_model_len"), measured, console))
    except KeyboardInterrupt:
        console.warning(f"interrupted after {len(measured):,} of {load.requests:,} requests")
    return load, [one for one in measured if one.end]


def _session(load: Load) -> Any:
    import aiohttp

    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    return aiohttp.ClientSession(
        load.url,
        headers=headers,
        # The load decides how many connections there are. Each request has its own: a server can close a used one
        # at the moment at which the next request is sent, and that request would fail.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=load.timeout),
    )


async def _run(load: Load, window: int | None, measured: list[Measured], console: Console) -> None:
    async with _session(load) as session:
        bodies, begins = _plan(load, window)
        limit = asyncio.Semaphore(load.concurrency or load.requests)
        with console.progress(load.requests, "load", "request") as progress:
            start, tasks, ended = time.perf_counter(), set(), Counter()
            for body, begin in zip(bodies, begins, strict=True):
                if load.rate is None:
                    await limit.acquire()
                    begin = time.perf_counter() - start
                else:
                    await asyncio.sleep(max(0.0, start + begin - time.perf_counter()))
                measured.append(Measured(begin))

                async def measure(body: dict[str, Any], one: Measured) -> None:
                    try:
                        await _request(session, load, body, start, one)
                    finally:
                        limit.release()
                    ended.update(all=1, failed=int(one.error is not None))
                    progress.update(ended["all"], failed=ended["failed"])

                tasks.add(task := asyncio.create_task(measure(body, measured[-1])))
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)


def _plan(load: Load, window: int | None) -> tuple[list[dict[str, Any]], list[float]]:
    """Returns the bodies of the requests, and the seconds at which they begin if there is a rate.

    Args:
        load: the requests.
        window: maximum number of tokens of a prompt with its continuation; None: not known.
    """
    rng = random.Random(load.seed)
    most = max(1, window // 4) if window else NEW_TOKENS[1]
    low, high = load.new_tokens or (min(NEW_TOKENS[0], most), min(NEW_TOKENS[1], most))
    room = window - high - CHAT_TOKENS * load.chat if window and load.prompt_words is None else None
    words = load.prompt_words or PROMPT_WORDS
    shared = [rng.choice(WORDS) for _ in range(load.shared_words)]
    bodies, begins, begin = [], [], 0.0
    for _ in range(load.requests):
        text = " ".join([*shared, *(rng.choice(WORDS) for _ in range(rng.randint(*words)))])
        while room is not None and len(text) > room and " " in text:
            text = text.rpartition(" ")[0]
        body = {"model": load.model, "max_tokens": rng.randint(low, high), "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        body |= {"messages": [{"role": "user", "content": text}]} if load.chat else {"prompt": text}
        bodies.append(body | ({"ignore_eos": True} if load.ignore_eos else {}))
        begins.append(begin)
        begin += rng.expovariate(load.rate) if load.rate else 0.0
    return bodies, begins


async def _check_model(load: Load) -> dict[str, Any]:
    """Returns the server's description of the model. Raises UserError if no server answers or it has no such model."""
    import aiohttp

    try:
        async with _session(load) as session, session.get("/v1/models") as response:
            if response.status != 200:
                what = "give --api-key" if response.status == 401 else "is this an OpenAI-compatible server?"
                raise UserError(f"{load.url}/v1/models: HTTP status {response.status}; {what}")
            models = {one["id"]: one for one in orjson.loads(await response.read())["data"]}
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        what = f"no server answers ({str(error) or type(error).__name__}); start one with `weft serve`"
        raise UserError(f"{load.url}: {what}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{load.url}/v1/models: no list of models; is this an OpenAI-compatible server?") from None
    if not models or load.model not in (None, *models):
        raise UserError(f"--model {load.model}: not served at {load.url}; give one of {', '.join(models) or 'none'}")
    return models[load.model or next(iter(models))]


async def _request(session: Any, load: Load, body: dict[str, Any], start: float, one: Measured) -> None:
    """Sends one request, and fills in its measurements."""
    import aiohttp

    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    try:
        async with session.post(path, json=body) as response:
            if response.status == 200:
                async for event in _events(response):
                    _read(event, one, time.perf_counter() - start)
            else:
                one.error = _error_text(response.status, await response.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
        one.error = f"{type(error).__name__}: {error}".rstrip(": ")
    if one.error is None and one.finish is None:
        one.error = "the response ended without a finish_reason"
    one.new_tokens = one.new_tokens or len(one.arrivals)
    one.end = time.perf_counter() - start  # a cancelled request has no end, and is not part of the results


def _read(event: dict[str, Any], one: Measured, now: float) -> None:
    """Adds a streamed object, which arrived at the time `now`, to the measurements of a request."""
    if usage := event.get("usage"):
        one.prompt_tokens, one.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", []):
        one.finish = choice.get("finish_reason") or one.finish
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            one.arrivals.append(now)
    if "error" in event:
        one.error = str(event["error"].get("code") or event["error"].get("message"))


async def _events(response: Any) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events, up to `[DONE]`."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield orjson.loads(data)


def _error_text(status: int, body: bytes) -> str:
    try:
        return f"{status} {orjson.loads(body)['error'].get('code') or ''}".strip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return str(status)
