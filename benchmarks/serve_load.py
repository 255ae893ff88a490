"""A server under load: `weft serve` with many clients and with one, beside llama.cpp's server.

    .venv/bin/python benchmarks/serve_load.py [--llama-server PATH] [--rounds 3] [--weights bf16,q8] [--quick]

All servers have the same model (random weights, a tokenizer of 32,000 tokens), the same bits per weight, as many slots
as there are clients, and the same cores, which the clients use too. `weft bench serve` sends the same requests of mixed
length to each: 32 clients at a time, and one at a time. The servers take turns, round after round, each in a process of
its own; figures are medians, ratios are medians of the rounds' ratios. llama-server is built from the sources in the
sdist of llama-cpp-python 0.3.36 (see peers/decode_llama_cpp.py for the flags); without it, its columns are left out.
Goals: 32 clients at least 3 x one at a time; at least llama.cpp's speed; ready to answer in under 3 s.
"""

import argparse
import contextlib
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import available_cores, processor, slug, write_results  # noqa: E402
from corpus import make_jsonl  # noqa: E402

SHAPE = {  # 42M parameters
    **{"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"intermediate_size": 1408, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": True},
}
# Bits per weight -> options of `weft serve`, and the type of the GGUF file.
WEIGHTS = {"f32": (["--dtype", "float32"], "f32"), "bf16": ([], "bf16"), "q8": (["--quantize", "int8"], "q8_0")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--weights", default="bf16,q8", help="comma-separated: " + ", ".join(WEIGHTS))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128, help="requests of all clients; one client sends a quarter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--quick", action="store_true", help="few requests: does it work at all?")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.rounds = 16, 1
    return args


def weft(*words: str, **settings: object) -> str:
    """Runs a command of Weft in a process of its own, and returns what it prints on stdout."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE, **settings).stdout


def make_model(folder: Path) -> Path:
    """Writes a Hugging Face folder: random weights in bfloat16, and a tokenizer of Python sources."""
    make_jsonl(folder / "corpus.jsonl", 20)
    weft("data", "train-tokenizer", "corpus.jsonl", "--vocab-size", "32000", "--out", "tok", cwd=folder)
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(folder / "hf")
    for file in (folder / "tok").iterdir():
        (folder / "hf" / file.name).write_bytes(file.read_bytes())
    return folder / "hf"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def serving(command: list[str], port: int, threads: int) -> Iterator[float]:
    """Runs a server until the end of the block. Yields the seconds from its start to its first answer."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages are compiled
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                    break
                except (urllib.error.URLError, OSError):
                    if process.poll() is not None or time.perf_counter() - began > 120:
                        log.seek(0)
                        raise SystemExit(f"{command}: {log.read()[-3000:].decode()}") from None
                    time.sleep(0.02)
            answer_one(port)
            yield time.perf_counter() - began
        finally:
            process.terminate()
            process.wait(60)


def answer_one(port: int) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 1, "model": model_name(port)}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
    urllib.request.urlopen(request, timeout=60).read()


def model_name(port: int) -> str:
    return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60))["data"][0]["id"]


def measure(command: list[str], port: int, args: argparse.Namespace) -> dict[str, float]:
    """Starts a server and loads it. Returns its figures."""
    with serving(command, port, args.threads) as ready:
        found: dict[str, float] = {"ready": ready}
        for name, clients, requests in (("one", 1, args.requests // 4), ("many", args.clients, args.requests)):
            words = ["--concurrency", str(clients), "--requests", str(requests), "--ignore-eos", "--json"]
            summary = json.loads(weft("bench", "serve", f"http://127.0.0.1:{port}", *words, stderr=subprocess.DEVNULL))
            found[name] = summary["new_tokens_per_second"]
            found[f"{name} first"] = summary["milliseconds"]["first_token"]["p50"]
            found[f"{name} tokens"] = summary["new_tokens"]
    return found


def commands(server: str, weights: str, folder: Path, port: int, args: argparse.Namespace) -> list[str]:
    options, kind = WEIGHTS[weights]
    if server == "weft":
        batch = ["--max-batch", str(args.clients)]
        return [sys.executable, "-m", "weft", "serve", str(folder / "hf"), "--port", str(port), *batch, *options]
    slots = ["--parallel", str(args.clients), "--ctx-size", str(args.clients * 512)]
    threads = ["--threads", str(args.threads), "--threads-batch", str(args.threads)]
    return [str(args.llama_server), "-m", str(folder / f"{kind}.gguf"), "--port", str(port), *slots, *threads]


def table(found: dict[str, list[dict[str, dict[str, float]]]], args: argparse.Namespace) -> str:
    lines = [
        "# A server under load",
        "",
        f"{processor()}, {args.threads} threads; Llama of 42M parameters; {datetime.date.today()}; {args.clients} "
        f"clients, {args.requests} requests of 8 to 128 words and 16 to 64 new tokens; medians of {args.rounds} "
        "rounds, ratios are medians of the rounds' ratios.",
        "",
        "| weights | server | ready, s | one at a time, new tokens/s | all clients, new tokens/s | together / alone | "
        "first token with all clients, p50 ms | Weft / llama.cpp |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for weights, rounds in found.items():
        for server in rounds[0]:
            one = [each[server] for each in rounds]
            middle = {name: statistics.median(figures[name] for figures in one) for name in one[0]}
            together = statistics.median(figures["many"] / figures["one"] for figures in one)
            beside = ""
            if server == "weft" and "llama.cpp" in rounds[0]:
                ratio = statistics.median(each["weft"]["many"] / each["llama.cpp"]["many"] for each in rounds)
                beside = f"{ratio:.2f} x"
            lines.append(
                f"| {weights} | {server} | {middle['ready']:.1f} | {middle['one']:,.1f} | {middle['many']:,.1f} | "
                f"{together:.2f} x | {middle['many first']:,.0f} | {beside} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments()
    servers = ["weft", *(["llama.cpp"] if args.llama_server else [])]
    found: dict[str, list[dict[str, dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder)
        for weights in args.weights.split(","):
            if args.llama_server:
                kind = WEIGHTS[weights][1]
                weft("export", str(model), f"{kind}.gguf", "--to", "gguf", "--type", kind, cwd=folder)
            found[weights] = []
            for _ in range(args.rounds):
                figures = {}
                for server in servers:
                    port = free_port()
                    figures[server] = measure(commands(server, weights, folder, port, args), port, args)
                found[weights].append(figures)
                print(weights, figures, flush=True)
    name = "serve_load" if args.quick else f"serve_load-{slug(processor())}"
    write_results(args.out, name, table(found, args), found)


if __name__ == "__main__":
    main()
