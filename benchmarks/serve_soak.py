"""A server under long and hostile load: is an answer lost or mixed up, does memory grow, does anything hang?

    .venv/bin/python benchmarks/serve_soak.py [--requests 10000] [--connections 200] [--quick]

Many connections send requests with 64 different prompts to `weft serve` with the tiny chat model of the tests, and
compare each answer with the answer that the prompt got alone. One request in ten leaves in the middle of its answer.
All the while, other connections read one piece every two seconds, send half a request, or nothing at all. Memory is
the resident memory of the server's process; it is compared between a fifth of the requests and all of them.
"""

import argparse
import asyncio
import datetime
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import processor, slug, write_results  # noqa: E402

MODEL = HERE.parent / "tests" / "serve" / "clients" / "make_model.py"
PROMPTS = 64


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--slow", type=int, default=16, help="connections that read slowly")
    parser.add_argument("--half-open", type=int, default=32, help="connections that send half a request, or nothing")
    parser.add_argument("--minutes", type=float, default=30, help="limit of the whole measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="few requests: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.connections, args.slow, args.half_open = 400, 40, 4, 8
    return args


class Soak:
    """The state of a measurement."""

    def __init__(self, session: aiohttp.ClientSession, url: str, process: psutil.Process, args: argparse.Namespace):
        self.session, self.url, self.process, self.args = session, url, process, args
        self.counts: Counter[str] = Counter()
        self.alone: dict[int, str] = {}
        self.memory: list[tuple[int, int]] = []  # ended requests, bytes

    @staticmethod
    def body(prompt: int, stream: bool) -> dict:
        text = "hello " * (prompt % 9) + f"tools {prompt} é 日本"
        new = 4 + prompt % 29
        return {
            "model": "tiny",
            "prompt": text,
            "max_tokens": new,
            "temperature": prompt % 2,
            "seed": 5,
            "stream": stream,
        }

    async def text(self, prompt: int) -> str:
        async with self.session.post(f"{self.url}/v1/completions", json=self.body(prompt, False)) as response:
            found = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status} {found}")
            return found["choices"][0]["text"]

    async def client(self, requests: asyncio.Queue) -> None:
        while not requests.empty():
            number = requests.get_nowait()
            rng = random.Random(number)
            prompt = rng.randrange(PROMPTS)
            try:
                if number % 10 == 0:
                    await self.leave(prompt)
                else:
                    same = await self.text(prompt) == self.alone[prompt]
                    self.counts["answered" if same else "mixed up"] += 1
            except Exception as error:
                self.counts["failed"] += 1
                print(f"request {number}: {error!r}", flush=True)
            ended = sum(self.counts.values())
            if ended % 100 == 0:
                self.memory.append((ended, self.process.memory_info().rss))

    async def leave(self, prompt: int) -> None:
        """Begins a stream and closes the connection after its first piece."""
        body = self.body(prompt, True) | {"max_tokens": 400}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        self.counts["left"] += 1

    async def slow_reader(self, number: int) -> None:
        """Reads a long stream one piece every two seconds, again and again."""
        while True:
            body = self.body(number, True) | {"max_tokens": 60}
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                while await response.content.readline():
                    await asyncio.sleep(2)

    async def half_open(self, number: int) -> None:
        """Opens a connection, sends nothing or half a request, and waits for the server to close it."""
        host, port = self.url.removeprefix("http://").split(":")
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            if number % 2:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
                await writer.drain()
            await asyncio.wait([asyncio.ensure_future(reader.read())], timeout=90)
            writer.close()

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(f"{self.url}/metrics") as response:
            lines = re.findall(r"^([a-z_:]+)(?:\{.*\})? ([0-9.e+-]+)$", await response.text(), re.MULTILINE)
            return {name: float(value) for name, value in lines}

    async def run(self) -> None:
        for prompt in range(PROMPTS):
            self.alone[prompt] = await self.text(prompt)
        requests: asyncio.Queue = asyncio.Queue()
        for number in range(self.args.requests):
            requests.put_nowait(number)
        others = [asyncio.create_task(self.slow_reader(number)) for number in range(self.args.slow)]
        others += [asyncio.create_task(self.half_open(number)) for number in range(self.args.half_open)]
        async with asyncio.timeout(60 * self.args.minutes):
            await asyncio.gather(*(self.client(requests) for _ in range(self.args.connections)))
        for task in others:
            task.cancel()
        found = await asyncio.gather(*others, return_exceptions=True)
        for error in found:
            if not isinstance(error, asyncio.CancelledError):
                print(f"another connection: {error!r}", flush=True)
                self.counts["other connections failed"] += 1


async def measure(url: str, process: psutil.Process, args: argparse.Namespace) -> tuple[Soak, float, dict[str, float]]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        soak = Soak(session, url, process, args)
        began = time.perf_counter()
        await soak.run()
        seconds = time.perf_counter() - began
        await asyncio.sleep(3)  # the server notices the connections that were closed
        return soak, seconds, await soak.metrics()


def main() -> None:
    args = arguments()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, MODEL, place], env=environment, check=True)
        words = ["serve", f"{place}/tiny", "--port", "0", "--max-batch", "32", "--no-access-log"]
        command = [sys.executable, "-m", "weft", *words, "--max-waiting", str(2 * args.connections)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().split(" at ")[1].strip()
            process = psutil.Process(server.pid)
            soak, seconds, metrics = asyncio.run(measure(url, process, args))
            threads, files = process.num_threads(), process.num_fds()
        finally:
            server.terminate()
            code = server.wait(60)
    soak.memory.sort()
    early = next(size for ended, size in soak.memory if ended >= args.requests // 5)
    last = soak.memory[-1][1]
    held = {name: value for name, value in metrics.items() if re.search("running|waiting|queue", name)}
    rows = [
        ("requests", f"{args.requests:,} on {args.connections} connections, {seconds:,.0f} s"),
        ("answers equal to the prompt's alone", f"{soak.counts['answered']:,}"),
        ("left in the middle", f"{soak.counts['left']:,}"),
        ("mixed up", str(soak.counts["mixed up"])),
        ("failed", str(soak.counts["failed"])),
        ("slow readers, half-open connections", f"{args.slow}, {args.half_open}"),
        ("failed among these", str(soak.counts["other connections failed"])),
        ("resident memory after a fifth, and at the end", f"{early / 2**20:,.0f} MiB, {last / 2**20:,.0f} MiB"),
        ("afterwards, in the server's metrics", ", ".join(f"{name} {value:g}" for name, value in held.items())),
        ("threads and open files afterwards", f"{threads}, {files}"),
        ("exit code after SIGTERM", str(code)),
    ]
    page = f"# A server under long load\n\n{processor()}; {datetime.date.today()}.\n\n| | |\n| --- | --- |\n"
    page += "".join(f"| {name} | {value} |\n" for name, value in rows)
    name = "serve_soak" if args.quick else f"serve_soak-{slug(processor())}"
    write_results(args.out, name, page, {"counts": soak.counts, "memory": soak.memory, "metrics": metrics})


if __name__ == "__main__":
    main()
