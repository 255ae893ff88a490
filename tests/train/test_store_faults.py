"""`checkpoint.remote` on an S3 server behind a proxy that fails: 500, 503, slow, connections closed in mid-upload."""

import http.client
import json
import shutil
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from running import losses, train

from weft.checkpoint import remote
from weft.checkpoint.load import checkpoints

SECTIONS = {
    "training": {"steps": 4, "batch_tokens": 128, "micro_batch_size": 2},
    "data": {"validation": None},
    "schedule": {"type": "constant", "warmup_steps": 0},
    "log": {"trackers": []},
}
ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>{0} of the proxy</Message></Error>"
SECRET = "never-recorded"
WRITES, READS = ("PUT", "POST"), ("GET",)
FAULTS = {"500": "InternalError", "503": "SlowDown", "close": "", "slow": ""}


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on. `fault` strikes `times` of those with `methods` for an object whose name contains `where`."""

    protocol_version = "HTTP/1.1"
    target, fault, where, times, struck = ("", 0), "", "", 0, 0
    methods: tuple[str, ...] = WRITES
    release = threading.Event()  # ends the fault "stuck"

    def log_message(self, *_) -> None:
        pass

    def body(self, limit: int | None = None) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            size = int(self.headers.get("Content-Length") or 0)
            return self.rfile.read(size if limit is None else min(limit, size))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def strikes(self) -> bool:
        kind = type(self)
        if self.command not in kind.methods or kind.where not in self.path or kind.struck >= kind.times:
            return False
        kind.struck += 1
        return True

    def answer(self) -> None:
        if self.strikes():
            if self.fault == "close":
                self.body(1000)
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if self.fault == "half":
                return self.reply_half()
            if self.fault == "slow":
                self.release.wait(0.3)
            elif self.fault == "stuck":
                self.release.wait(60)
            else:
                self.body()
                return self.reply(int(self.fault), {}, ERROR.format(FAULTS[self.fault]).encode())
        status, headers, content = self.pass_on()
        self.reply(status, headers, content)

    def reply_half(self) -> None:
        """Closes the connection in the middle of the answer."""
        status, headers, content = self.pass_on()
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def pass_on(self) -> tuple[int, dict[str, str], bytes]:
        content = self.body()
        skipped = ("transfer-encoding", "content-length", "expect", "connection")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        connection = http.client.HTTPConnection(*self.target, timeout=60)
        connection.request(self.command, self.path, content, headers)
        response = connection.getresponse()
        answer = response.status, dict(response.getheaders()), response.read()
        connection.close()
        return answer

    def reply(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(name, value)
        length = next((v for k, v in headers.items() if k.lower() == "content-length"), str(len(content)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer


def reset() -> None:
    """Empties the server: its state outlives it."""
    connection = http.client.HTTPConnection(*Proxy.target)
    connection.request("POST", "/moto-api/reset")
    assert connection.getresponse().status == 200
    connection.close()


pytestmark = pytest.mark.xdist_group("s3")  # one worker imports the server


@pytest.fixture
def s3(monkeypatch):
    """A bucket of an S3 server behind the proxy; an `s3fs` that does not ask the proxy."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    for name, value in {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    Proxy.target, Proxy.times, Proxy.struck = moto.get_host_and_port(), 0, 0
    Proxy.release = threading.Event()
    reset()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    direct = s3fs.S3FileSystem(endpoint_url="http://{}:{}".format(*Proxy.target), skip_instance_cache=True)
    direct.mkdir("bucket")
    yield direct
    Proxy.release.set()
    reset()
    proxy.shutdown()
    proxy.server_close()
    moto.stop()


@pytest.fixture
def run(run_yaml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fit(*overrides: str, every: int = 2, code: int = 0) -> Path:
        section = {"every": every, "keep_last": 2, "remote": "s3://bucket/runs"}
        assert train(run_yaml(**SECTIONS, checkpoint=section), *overrides) == code
        return tmp_path / "runs" / "demo"

    return fit


def strike(fault: str, where: str, times: int = 10**6, methods: tuple[str, ...] = WRITES) -> None:
    Proxy.fault, Proxy.where, Proxy.times, Proxy.struck, Proxy.methods = fault, where, times, 0, methods


def markers(s3) -> list[str]:
    s3.invalidate_cache()
    return [name for name in s3.find("bucket") if name.endswith("complete.json")]


def complete(s3) -> list[str]:
    return sorted(name.split("/")[-2] for name in markers(s3))


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["500", "503", "close"])
def test_a_store_that_fails_is_named_and_the_same_command_copies_the_checkpoint(s3, run, capsys, fault):
    run("training.steps=2")
    capsys.readouterr()
    strike(fault, "step-00000004/shard")
    made = run(code=2)
    told = capsys.readouterr().err
    assert Proxy.struck > 1
    assert "checkpoint.remote: the checkpoint could not be copied to s3://bucket/runs/demo: " in told
    assert FAULTS[fault] in told
    assert "Traceback" not in told
    assert complete(s3) == ["step-00000002"]  # half an upload is none
    assert len(checkpoints(made)) == 2
    strike(fault, "", 0)
    run()
    assert "copying step-00000004" in capsys.readouterr().err
    assert complete(s3) == ["step-00000002", "step-00000004"]
    expected = losses(made)
    shutil.rmtree(made)
    assert losses(run("training.steps=6", "--accept-changes"))[:4] == expected


@pytest.mark.chaos
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_for_a_while_loses_nothing(s3, run, fault):
    strike(fault, "", 4)
    made = run()
    assert Proxy.struck == 4
    expected = losses(made)
    assert complete(s3) == ["step-00000002", "step-00000004"]
    shutil.rmtree(made)
    assert losses(run("training.steps=6", "--accept-changes"))[:4] == expected


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["500", "503", "slow", "half"])
@pytest.mark.parametrize("where", ["current.json", "complete.json", "state.json", "shard", "metrics.jsonl"])
def test_a_store_that_cannot_be_read_for_a_while_loses_nothing(s3, run, capsys, fault, where):
    """A new host downloads the run: of each object, the first three answers are errors, slow or half."""
    made = run()
    expected = losses(made)
    shutil.rmtree(made)
    capsys.readouterr()
    strike(fault, where, 3, READS)
    assert losses(run("training.steps=6", "--accept-changes"))[:4] == expected
    assert "Traceback" not in capsys.readouterr().err
    assert Proxy.struck == 3 or (fault == "slow" and Proxy.struck)


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["500", "503", "half"])
@pytest.mark.parametrize("where", ["current.json", "complete.json", "shard"])
def test_a_store_that_cannot_be_read_is_named_and_nothing_starts_over(s3, run, capsys, fault, where):
    """A run that took the store for empty would begin again at step 0, in the place of the old one."""
    made = run()
    expected = losses(made)
    shutil.rmtree(made)
    capsys.readouterr()
    strike(fault, where, methods=READS)
    made = run("training.steps=6", "--accept-changes", code=2)
    told = capsys.readouterr().err
    assert "checkpoint.remote: " in told
    assert "Traceback" not in told
    assert not checkpoints(made)
    strike(fault, "", 0)
    assert complete(s3) == ["step-00000002", "step-00000004"]
    assert losses(run("training.steps=6", "--accept-changes"))[:4] == expected


@pytest.mark.long
def test_a_lost_run_continues_from_the_store(s3, run, tmp_path):
    run("run.name=whole", "checkpoint.remote=null")
    made = run("training.steps=2")
    shutil.rmtree(made)
    assert losses(run("--accept-changes")) == losses(tmp_path / "runs" / "whole")
    assert [path.name for path in checkpoints(made)] == ["step-00000002", "step-00000004"]
    assert complete(s3) == ["step-00000002", "step-00000004"]


def test_a_new_host_downloads_the_run_and_deletes_incomplete_uploads(s3, run, capsys):
    """A kill leaves an upload without its marker, and parts of a large object, which are not even listed."""
    made = run("training.steps=2")
    recorded = "".join(path.read_text() for path in made.rglob("*.json*")) + (made / "config.yaml").read_text()
    assert SECRET not in recorded
    (folder,) = {name.split("/step-")[0] for name in markers(s3)}
    s3.pipe_file(f"{folder}/step-00000001/shard.safetensors", b"half")
    key = f"{folder}/step-00000001/large.safetensors".removeprefix("bucket/")
    for name in (key, "of/another/run"):
        s3.call_s3("create_multipart_upload", Bucket="bucket", Key=name)
    shutil.rmtree(made)
    run("--accept-changes")
    assert "downloaded step-00000002" in capsys.readouterr().err
    s3.invalidate_cache()
    assert not s3.exists(f"{folder}/step-00000001")
    assert [one["Key"] for one in s3.list_multipart_uploads("bucket")] == ["of/another/run"]


def test_a_deadline_does_not_wait_for_the_store(s3, run, capsys, monkeypatch, tmp_path):
    (tmp_path / "stops.py").write_text(
        "import os, signal\nclass Stops:\n    def step(self, state):\n"
        "        if state.step == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    monkeypatch.setenv("WEFT_STOP_WITHIN", "5")
    strike("stuck", "shard")
    callbacks = f"callbacks={json.dumps([{'type': 'stops:Stops'}])}"
    made = run(callbacks, every=10, code=143)
    assert "could not be copied to s3://bucket/runs/demo in time (--stop-within)" in capsys.readouterr().err
    assert [path.name for path in checkpoints(made)] == ["step-00000003"]
    Proxy.release.set()
    strike("", "", 0)
    run("--accept-changes", every=10)
    assert complete(s3)[-1] == "step-00000004"
