"""What the watch finds beside the losses (times of ranks, waits for data, memory, disk), and where it sends it."""

import json
import math
import random
import shutil
import socket
import statistics
import threading
import time
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, HTTPServer

import forked
import pytest
import torch
from running import QUIET, train

from weft.checkpoint.load import checkpoints
from weft.observe.events import read_events
from weft.train.watch.growth import SAMPLES, Growth
from weft.train.watch.heartbeat import HEARTBEAT, Heartbeat
from weft.train.watch.own_time import OwnTime, slow_ranks

PARTS = '''
import os
import time
import urllib.request

import numpy as np


class Rows:
    """Rows of which the sixth breaks the loss; each takes `seconds` to read."""

    def __init__(self, *, count: int = 400, seconds: float = 0.0, bad: int = -1):
        self.rows, self.seconds = np.random.default_rng(3).integers(0, 510, (count, 32)), seconds
        if bad >= 0:
            self.rows[bad, 0] = 511

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return {"tokens": self.rows[i]}


class Broken:
    def inputs(self, batch):
        return {"tokens": batch.tokens, "labels": batch.labels}

    def weight(self, batch):
        return batch.weight.sum()

    def loss(self, outputs, batch):
        return -(outputs * batch.weight).sum() * (float("nan") if (batch.tokens[:, 0] == 511).any() else 1.0)


class Scrape:
    """Reads the endpoint for Prometheus after step 8; keeps `leak` bytes of each step; stops the run at `stop`."""

    def __init__(self, *, port: int = 0, out: str = "", leak: int = 0, stop: int = -1):
        self.port, self.out, self.leak, self.stop, self.kept = port, out, leak, stop, []

    def step(self, state):
        self.kept.append(np.ones(self.leak, dtype=np.uint8))
        if self.port and state.step == 8:
            page = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5).read().decode()
            open(self.out, "w").write(page)
        if state.step == self.stop:
            state.request_stop("enough")


class Sleepy:
    """A schedule that takes a while on rank 1."""

    def __init__(self, total_steps: int, *, warmup_steps: int = 0):
        self.seconds = 0.25 if os.environ.get("RANK") == "1" else 0.0

    def __call__(self, step):
        time.sleep(self.seconds)
        return 1.0
'''


@pytest.fixture
def monitored(run_yaml, tmp_path, monkeypatch):
    """Writes a run of small steps with a section `watch`, and returns its file and its directory."""
    (tmp_path / "monitor_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def write(watch, *, steps=12, rows=None, callback=None, schedule="constant"):
        file = run_yaml(
            data={
                "train": {"type": "monitor_parts:Rows", **(rows or {})},
                "validation": None,
                "sequence_length": 32,
                "shuffle": False,
            },
            objective={"type": "monitor_parts:Broken"},
            model={"num_hidden_layers": 1},
            training={"steps": steps, "batch_tokens": 4 * 32, "micro_batch_size": 2, "threads": 1},
            schedule={"type": schedule, "warmup_steps": 0},
            callbacks=[{"type": "monitor_parts:Scrape", **callback}] if callback else [],
            checkpoint={"every": 100},
            log=QUIET,
        )
        with file.open("a") as out:
            out.write(f"watch: {json.dumps(watch)}\n")
        return file, tmp_path / "runs" / "demo"

    return write


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def receiver():
    """A server that keeps what is posted to it; its URL and the list of JSON objects."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()
    server.server_close()


def test_an_event_reaches_webhook_command_and_prometheus_and_the_heartbeat_shows_the_end(
    monitored, receiver, tmp_path, monkeypatch, capsys
):
    url, posted = receiver
    monkeypatch.setenv("ALERT_URL", f"{url}/hook/T0SECRET")
    port, page = free_port(), tmp_path / "page.txt"
    alert = {"webhook": "$ALERT_URL", "command": ["sh", "-c", f"cat >> {tmp_path}/called.json"]}
    watch = {"non_finite": "skip", "alert": alert, "prometheus_port": port, "heartbeat": 0.1}
    file, run = monitored(watch, rows={"bad": 21}, callback={"port": port, "out": str(page)})
    assert train(file) == 0
    [event] = read_events(run)
    assert (event["event"], event["step"]) == ("non-finite", 6)
    expected = {"run": "demo"} | {key: value for key, value in event.items() if value == value}
    [called] = (tmp_path / "called.json").read_text().splitlines(keepends=True)
    assert called.endswith("\n")  # `read` of a shell needs the end of a line
    for got in (posted[0][1], json.loads(called)):
        assert expected.items() <= got.items()
    assert [path for path, _ in posted] == ["/hook/T0SECRET"]
    scraped = dict(line.rsplit(" ", 1) for line in page.read_text().splitlines() if not line.startswith("#"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert float(scraped["weft_loss"]) == lines[7]["loss"]
    assert float(scraped["weft_step"]) == 8
    assert float(scraped['weft_events_total{event="non-finite"}']) == 1
    beat = json.loads((run / "logs" / "heartbeat.json").read_text())
    assert (beat["step"], beat["status"], beat["loss"]) == (12, "finished", lines[-1]["loss"])
    assert not list((run / "logs").glob(".heartbeat*"))
    assert "T0SECRET" not in capsys.readouterr().err


def test_the_last_beat_shows_an_end_that_comes_during_a_beat(tmp_path):
    (tmp_path / HEARTBEAT).parent.mkdir()
    now, reading, goes_on = {"status": None}, threading.Event(), threading.Event()

    def read():
        found = dict(now)
        reading.set()
        goes_on.wait(60)
        return found

    heartbeat = Heartbeat(tmp_path, 60.0, read)
    assert reading.wait(60)
    now["status"] = "finished"
    threading.Timer(0.2, goes_on.set).start()
    heartbeat.close()
    assert json.loads((tmp_path / HEARTBEAT).read_text())["status"] == "finished"


def test_a_webhook_that_fails_is_one_warning_without_its_url(monitored, capsys):
    watch = {"non_finite": "skip", "alert": {"webhook": f"http://127.0.0.1:{free_port()}/T0SECRET"}}
    file, run = monitored(watch, rows={"count": 20, "bad": 1}, steps=7)  # the row comes twice
    assert train(file) == 0
    assert len(read_events(run)) == 2
    said = capsys.readouterr().err
    assert said.count("watch.alert.webhook: 127.0.0.1 cannot be reached") == 1
    assert "T0SECRET" not in said


@pytest.mark.parametrize(
    ("watch", "said"),
    [
        ({"alert": {}}, "watch.alert: it has no receiver"),
        ({"alert": {"webhook": "ftp://host"}}, "http or https URL"),
        ({"alert": {"webhook": "$NOT_SET_ANYWHERE"}}, "NOT_SET_ANYWHERE is not set"),
        ({"prometheus_port": 0}, "watch.prometheus_port"),
        ({"slow_rank": 0.5}, "watch.slow_rank"),
    ],
)
def test_values_without_meaning_are_refused(monitored, watch, said, capsys):
    file, _ = monitored(watch)
    assert train(file) == 2
    assert said in capsys.readouterr().err


def test_a_busy_port_is_refused(monitored, receiver, capsys):
    port = int(receiver[0].rpartition(":")[2])
    file, _ = monitored({"prometheus_port": port})
    assert train(file) == 2
    assert f"watch.prometheus_port: {port} cannot be opened" in capsys.readouterr().err


# The clock of the steps counts what the process computes and what it means to sleep, not what a busy machine does.
WAITS = """
import sys, time
from types import SimpleNamespace
import monitor_parts
from weft.cli.main import main
from weft.train import clock

slept = []
monitor_parts.time = SimpleNamespace(sleep=slept.append)
clock.time = SimpleNamespace(perf_counter=lambda: time.process_time() + sum(slept))
sys.exit(main(sys.argv[1:]))
"""


def test_waits_for_data_and_growing_memory_are_named_once(monitored):
    """Each row takes 0.1 s to read, and a callback keeps 4 MB of each step: a thousand years of them are too much.

    In a process of its own, in whose memory no earlier test has left room.
    """
    steps = SAMPLES + 8
    file, run = monitored(
        {"every": 1},
        steps=10**8,
        rows={"seconds": 0.1},
        callback={"leak": 4_000_000, "stop": steps},
    )
    done = forked.run("train", file, program=WAITS)
    assert done.returncode == 0, done.stderr
    found = {event["event"]: event for event in read_events(run)}
    assert sorted(event["event"] for event in read_events(run)) == ["data-stall", "memory-growth"]
    assert found["data-stall"]["share"] > 0.25
    assert found["memory-growth"]["bytes_per_step"] == pytest.approx(4e6, rel=0.3)
    assert "waits for batches" in done.stderr
    assert "grows by" in done.stderr


@pytest.mark.parametrize(
    ("used", "grows"),
    [
        (lambda step: 1e9 + 1e6 * step, True),
        (lambda step: 1e9 + 1e6 * step + 5e6 * math.sin(step), True),
        (lambda step: 1e9 + 2e8 * (1 - math.exp(-step / 40)), False),  # a cache that fills up
        (lambda step: 1e9 + 1e8 * math.sin(step), False),
        (lambda step: 1e9 + 1e8 * (step > 100), False),
    ],
)
def test_growth_is_steady_growth(used, grows):
    growth = Growth()
    found = [growth.add(step, used(step), 1e9, 1e5) for step in range(0, 400, 10)]
    assert any(one is not None for one in found) == grows
    if grows:
        assert next(one for one in found if one) == pytest.approx(1e6, rel=0.2)
        calm = Growth()  # the end of the run comes first
        assert not any(calm.add(step, used(step), 1e9, 500) for step in range(0, 400, 10))


def test_a_disk_without_room_for_two_checkpoints_is_a_warning_before_it_is_full(monitored, monkeypatch, capsys):
    file, run = monitored({}, steps=4)
    assert train(file) == 0
    assert not read_events(run)
    size = sum(path.stat().st_size for path in checkpoints(run)[-1].iterdir())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10 * size, 8.5 * size, int(1.5 * size)))
    capsys.readouterr()
    assert train(file, "training.steps=6") == 0
    assert [(event["event"], event["checkpoint_bytes"]) for event in read_events(run)] == [("disk", size)]
    err = capsys.readouterr().err
    assert "two checkpoints" in err
    assert "free space" in err


@pytest.mark.xdist_group("ranks")
def test_the_rank_for_which_the_others_wait_is_named(monitored, tmp_path, ranks):
    from pool import weft_command

    file, run = monitored({"every": 2, "data_stall": None}, steps=10, schedule="monitor_parts:Sleepy")
    (code, errors), (_, other) = ranks.call(weft_command, 2, tmp_path, ["train", str(file)])
    assert code == 0, errors + other
    [event] = read_events(run)
    assert (event["event"], event["rank"]) == ("slow-rank", 1)
    assert event["seconds"] > 0.25
    assert "the other ranks wait for rank 1" in errors


def test_waiting_is_no_own_time_but_computing_is():
    own = OwnTime(torch.device("cpu"))
    own.depart()
    time.sleep(0.1)
    own.reduced()
    assert own.seconds < 0.05
    own.depart()
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass
    own.reduced()
    assert own.seconds > 0.095
    own.close()


def test_ranks_are_compared_with_the_others_of_their_stage():
    assert slow_ranks([1.0, 1.1, 2.0, 2.1], [0, 0, 1, 1], 1.5, 0.01) == {}
    assert slow_ranks([1.0, 1.1, 1.8, 1.0], [0, 0, 0, 0], 1.5, 0.01) == {2: (1.8, 1.0)}
    assert slow_ranks([1.0, 1.6], [0, 0], 1.5, 0.01) == {1: (1.6, 1.0)}
    assert slow_ranks([0.001, 0.002], [0, 0], 1.5, 0.01) == {}
    assert slow_ranks([1.0], [0], 1.5, 0.01) == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_times_of_many_ranks_are_compared_with_the_median_of_the_others(seed):
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    seconds, stages = draw.choices((1.0, 1.3, 2.0, 3.5), k=count), draw.choices((0, 1, 2), k=count)
    expected = {}
    for rank, own in enumerate(seconds):
        others = [seconds[other] for other in range(count) if stages[other] == stages[rank] and other != rank]
        if others and own > 1.5 * statistics.median(others) and own - statistics.median(others) > 0.1:
            expected[rank] = (own, statistics.median(others))
    assert slow_ranks(seconds, stages, 1.5, 0.1) == expected
