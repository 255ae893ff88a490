"""`weft bench serve` against a server with known answers."""

import asyncio
import json
import threading

import pytest
from aiohttp import web

from weft.cli.main import main
from weft.errors import UserError
from weft.serve.bench import Load, parse_range
from weft.serve.bench_report import percentile, summarize

PIECES = 4


class Server:
    """An OpenAI-compatible server whose answers have PIECES pieces. Every fifth request fails."""

    def __init__(self):
        self.bodies, self.keys, self.running, self.most = [], set(), 0, 0
        self.gate: asyncio.Event | None = None

    async def models(self, request):
        return web.json_response({"data": [{"id": "small"}, {"id": "large"}, {"id": "short", "max_model_len": 96}]})

    async def complete(self, request):
        self.bodies.append(await request.json())
        self.keys.add(request.headers.get("Authorization"))
        if len(self.bodies) % 5 == 0:
            return web.json_response({"error": {"code": "queue_full"}}, status=429)
        self.running += 1
        self.most = max(self.most, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(PIECES):
            await asyncio.sleep(0.01)
            choice = {"index": 0, "text": " a", "delta": {"content": " a"}, "finish_reason": None}
            choice |= {"finish_reason": "length"} if number == PIECES - 1 else {}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 10, "completion_tokens": 2 * PIECES}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        self.running -= 1
        return response


@pytest.fixture
def server():
    """A running `Server`, with its address as the attribute `url`."""
    found, loop, started = Server(), asyncio.new_event_loop(), threading.Event()

    async def start():
        app = web.Application()
        app.router.add_get("/v1/models", found.models)
        app.router.add_post("/v1/completions", found.complete)
        app.router.add_post("/v1/chat/completions", found.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        return runner

    def serve():
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(30)
    yield found
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def test_requests_at_a_time_are_counted_and_failures_named(server, capsys, tmp_path):
    out = tmp_path / "load"
    words = ["--prompt-words", "3:5", "--new-tokens", "7", "--shared-words", "2", "--api-key", "k", "--json"]
    code = main(["bench", "serve", server.url, "--requests", "20", "--concurrency", "3", "--out", str(out), *words])
    assert code == 1  # four requests failed
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "small"
    assert (found["requests"], found["failed"], found["errors"]) == (20, 4, {"429 queue_full": 4})
    assert (found["prompt_tokens"], found["new_tokens"]) == (16 * 10, 16 * 2 * PIECES)
    assert server.most == 3
    assert server.keys == {"Bearer k"}
    times = found["milliseconds"]
    assert times["first_token"]["p50"] >= 10
    assert times["request"]["p50"] >= 10 * PIECES
    assert times["per_token"]["p50"] >= 10 * (PIECES - 1) / (2 * PIECES - 1)
    assert times["first_token"]["p50"] <= times["first_token"]["p90"] <= times["first_token"]["p99"]
    prompts = [body["prompt"].split() for body in server.bodies]
    assert {len(prompt) for prompt in prompts} <= {5, 6, 7}
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 1 < len({tuple(prompt) for prompt in prompts})
    assert {(body["model"], body["max_tokens"]) for body in server.bodies} == {("small", 7)}
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert sum(len(one["arrivals"]) for one in requests) == 16 * PIECES
    page = (out / "load.html").read_text()
    assert page.count("<svg") == 2
    assert "429 queue_full" in page
    assert json.loads((out / "load.json").read_text()) == found


def test_latencies_at_a_rate_count_from_the_time_at_which_a_request_is_due(server, capsys):
    words = ["--rate", "200", "--requests", "9", "--chat", "--model", "large", "--ignore-eos"]
    main(["bench", "serve", server.url, *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 9
    assert server.most > 3  # they did not wait for each other
    assert all(body["messages"] and body["ignore_eos"] and body["model"] == "large" for body in server.bodies)
    first = [body["messages"] for body in server.bodies]
    server.bodies.clear()
    main(["bench", "serve", server.url, *words])
    assert [body["messages"] for body in server.bodies] == first  # the same seed gives the same requests
    said = capsys.readouterr().out
    assert all(text in said for text in ("large at http://127.0.0.1", "200 per second", "p99", "new tokens/s"))


@pytest.mark.parametrize("chat", [False, True])
def test_default_lengths_fit_in_the_window(server, capsys, chat):
    main(["bench", "serve", server.url, "--requests", "20", "--model", "short", "--json", *["--chat"] * chat])
    assert {body["max_tokens"] for body in server.bodies} <= {*range(16, 25)}
    texts = [body["messages"][0]["content"] if chat else body["prompt"] for body in server.bodies]
    kept = 64 * chat  # for the template
    assert all(
        " " not in text or len(text) + body["max_tokens"] + kept <= 96
        for text, body in zip(texts, server.bodies, strict=True)
    )
    assert len({len(text.split()) for text in texts}) > 1
    server.bodies.clear()
    main(["bench", "serve", server.url, "--requests", "3", "--model", "short", "--prompt-words", "50"])
    assert {len(body["prompt"].split()) for body in server.bodies} == {50}  # as it was asked for


def test_a_percentile_is_the_nearest_rank():
    assert [percentile([1.0, 2.0, 3.0, 4.0], p) for p in (1, 25, 50, 51, 99, 100)] == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["http://192.0.2.1:80"], "not on this machine"),
        (["127.0.0.1:80"], "http://127.0.0.1:8000"),
        (["http://127.0.0.1:1"], "no server answers"),
        (["http://127.0.0.1:1", "--requests", "0"], "--requests is 0"),
        (["http://127.0.0.1:1", "--rate", "0"], "--rate is 0"),
        (["http://127.0.0.1:1", "--rate", "nan"], "--rate is nan"),
        (["http://127.0.0.1:1", "--timeout", "nan"], "--timeout is nan"),
        (["http://127.0.0.1:1", "--new-tokens", "9:3"], "--new-tokens 9:3"),
        (["http://127.0.0.1:1", "--out", "."], "already exists"),
    ],
)
def test_mistakes(words, part, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "serve", *words]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1


def test_an_unknown_model_is_refused_with_the_names(server, capsys):
    assert main(["bench", "serve", server.url, "--model", "smal"]) == 2
    assert "small, large, short" in capsys.readouterr().err


def test_no_request_has_ended():
    with pytest.raises(UserError, match="no request"):
        summarize(Load("http://127.0.0.1:1"), [])
    assert parse_range("--new-tokens", "5") == (5, 5)
