"""`weft serve` as a process: keys, logs, clients that leave, and signals."""

import gc
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest
from chat_model import SYSTEM, TURNS
from forked import Forked

from weft.cli.main import main
from weft.serve import server

MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TURNS[0][0]}]
# More than a minute's work for one sequence at a time.
ENDLESS = {"prompt": "Kalo", "max_tokens": 500, "ignore_eos": True, "n": 100, "stream": True}
KEY = "sk-of-a-test"


@pytest.fixture
def start(chat_model):
    """Starts `weft serve`: `start(*options) -> (process, client)`."""
    started = []

    def run(*options):
        process = Forked("serve", f"tiny={chat_model}", "--port", "0", *options, WEFT_API_KEY=KEY)
        started.append(process)
        words = process.first_line().split()
        assert words[:3] == ["serving", "tiny", "at"], process.stderr
        return process, httpx.Client(base_url=words[3], headers={"authorization": f"Bearer {KEY}"}, timeout=30)

    yield run
    for process in started:
        process.kill()


def refuses_connections(client):
    try:
        client.get("/health")
    except httpx.ConnectError:
        return True
    except httpx.ReadError:  # it was connecting when the server closed its port: the next attempt tells
        pass
    return False


def test_a_server_ends_after_its_requests(start):
    process, client = start("--max-batch", "1")
    assert client.get("/v1/models", headers={"authorization": ""}).status_code == 401
    assert client.get("/health", headers={"authorization": ""}).status_code == 200
    assert client.get("/health", headers={"x": "a" * 2**15}).status_code == 200
    try:
        status = client.get("/health", headers={"x": "a" * 2**23}).status_code
    except httpx.TransportError:  # the server closes the connection before the header has been sent
        status = 431
    assert status == 431
    # A client that closes its connection frees the only place.
    with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        next(response.iter_lines())
    body = {"messages": MESSAGES, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert answer == TURNS[0][1]
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        data = [next(lines)]
        process.send_signal(signal.SIGTERM)
        data += lines
    *chunks, last = [line.removeprefix("data: ") for line in data if line]
    assert last == "[DONE]"
    assert "".join(json.loads(c)["choices"][0]["delta"].get("content", "") for c in chunks) == TURNS[0][1]
    log = process.communicate(30)[1]
    assert process.returncode == 0
    assert refuses_connections(client)
    assert '"POST /v1/chat/completions HTTP/1.1" 200' in log
    assert "tiny: 36 prompt tokens, 54 new tokens" in log
    assert not any(secret in log for secret in (KEY, "Kalo", "Sta tu", "Traceback"))


def test_ctrl_c_after_a_first_signal_ends_the_server_at_once(start):
    process, client = start("--drain-timeout", "1000", "--max-batch", "1")
    with client.stream("POST", "/v1/completions", json=ENDLESS) as response:
        next(lines := response.iter_lines())
        process.send_signal(signal.SIGHUP)
        while not refuses_connections(client):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        log = process.communicate(30)[1]
        assert process.returncode == 0
        with suppress(httpx.RemoteProtocolError):
            assert "server_shutting_down" in "".join(lines)
    assert "Traceback" not in log


def test_a_server_starts_without_slow_libraries(chat_model):
    """PyTorch's compiler and Transformers take longer to import than the model to load. The first answer needs none."""
    program = """import sys, weft.serve.app, weft.serve.server
from weft import Sampling
from weft.serve.load import Loader
engine = Loader()(sys.argv[1]).engine
assert len(list(engine.submit("Kalo", Sampling(2, 0)))) == 2
print(*sys.modules)"""
    command = [sys.executable, "-c", program, str(chat_model)]
    loaded = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert "weft.serve" in loaded
    assert not {"torch._dynamo", "torch._inductor", "torch.onnx", "transformers", "pandas"} & {*loaded}


def test_mistakes_are_one_line(chat_model, capsys, monkeypatch):
    monkeypatch.setattr(server.Server, "serve_until_signal", lambda *_: 0)
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    path = str(chat_model)
    for words, expected in (
        ([path, "--port", port], f"port {port}: Address already in use; choose another --port"),
        ([path, "--port", "99999"], "--port 99999: set it to at most 65535"),
        ([path, "--host", "nowhere.invalid"], "--host"),
        (["nowhere"], "nowhere: this path does not exist"),
        ([path, "--max-batch", "0"], "--max-batch 0: set it to at least 1"),
        ([path, "--request-timeout", "0"], "--request-timeout 0.0: set it to more than 0"),
        ([path, "--request-timeout", "nan"], "--request-timeout nan: set it to more than 0"),
        ([path, "--drain-timeout", "nan"], "--drain-timeout nan: set it to at least 0"),
        ([path, "--api-key", ""], "a key is empty"),
        ([path, "--max-cache-tokens", "0"], "--max-cache-tokens 0: set it to at least 1"),
        ([path, "--cors-origin", "https://a.com/"], "--cors-origin https://a.com/: write scheme, host and port only"),
        ([path, "--allow-host", "a.com:80"], "--allow-host a.com:80: write a name without scheme and port"),
        ([""], "the model '' has no path; write PATH or NAME=PATH"),
        (["=" + path], f"the model '={path}' has no name; write PATH or NAME=PATH"),
        (["a="], "the model 'a=' has no path"),
        ([path, "--adapter", "model=nowhere"], "the adapter 'model' has the name of the model"),
        ([path, path], "two models are named 'model'; give other names as NAME=PATH"),
        ([path, "b=" + path, "--adapter", "a=b"], "--adapter: several models"),
        ([path, "--adapter", "a"], "--adapter a: write NAME=DIR"),
        ([path, "--chat-template", "nothing"], "--chat-template nothing"),
    ):
        assert main(["serve", "--port", "0", *words]) == 2, words
        error = capsys.readouterr().err
        assert expected in error
        assert error.count("\n") == 1
    taken.close()


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("::1", None, False)]
)
def test_an_open_server_warns(chat_model, capsys, monkeypatch, host, key, warned):
    monkeypatch.setattr(server, "open_socket", lambda host, port: socket.create_server(("127.0.0.1", 0)))
    before = gc.get_freeze_count()  # a collection during a request skips what was loaded before the server was ready
    frozen = lambda self, _: self._ready() or int(gc.get_freeze_count() <= before)  # noqa: E731
    monkeypatch.setattr(server.Server, "serve_until_signal", frozen)
    assert main(["serve", str(chat_model), "--host", host, *(["--api-key", key] if key else [])]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("serving model at http://127.0.0.1:")
    assert ("set WEFT_API_KEY" in shown.err) == warned
