"""`weft bench serve`: sends requests to a server on this machine, and prints latencies and throughput."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "send requests to a server on this machine, and print latencies and throughput"
GROUP = "work"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sends streaming requests with random words to an OpenAI-compatible server (`weft serve`, vLLM, llama.cpp), "
        "and prints percentiles of the time to the first token, of the time per further token and of complete "
        "requests, and the throughput. With --concurrency, a new request begins when an earlier one ends. With "
        "--rate, requests begin at random times (a Poisson process), whether or not earlier ones have ended; their "
        "latency counts from these times. Only a server on this machine is accepted. Ctrl-C prints what was measured."
    )
    parser.epilog = "example: weft bench serve http://127.0.0.1:8000 --rate 4 --requests 200 --out load"
    parser.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="the model (default: the first that the server lists)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="requests at a time (default: 8)")
    load.add_argument("--rate", type=float, metavar="R", help="mean number of requests that begin per second")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="requests in all (default: 100)")
    parser.add_argument(
        "--prompt-words",
        metavar="LOW:HIGH",
        help="words of a prompt, random between (default: 8:128, cut to what fits in the model's window)",
    )
    parser.add_argument(
        "--new-tokens",
        metavar="LOW:HIGH",
        help="maximum new tokens, random between (default: 16:64, at most a quarter of the model's window)",
    )
    parser.add_argument("--shared-words", type=int, default=0, metavar="N", help="first words, equal in all prompts")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions instead of /v1/completions")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="generate all new tokens (weft, vLLM and llama.cpp know `ignore_eos`)"
    )
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="seconds per request (default: 120)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key (default: the variable WEFT_API_KEY)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and arrival times (default: 0)")
    parser.add_argument("--out", metavar="DIR", help="write load.html (a plot), load.json and requests.jsonl to DIR")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    import os

    from weft.files import refuse_existing
    from weft.observe.console import Console
    from weft.serve.bench import Load, parse_range, run_load
    from weft.serve.bench_report import print_summary, summarize, write_report

    load = Load(
        url=args.url.rstrip("/"),
        model=args.model,
        concurrency=8 if args.concurrency is None and args.rate is None else args.concurrency,
        rate=args.rate,
        requests=args.requests,
        prompt_words=args.prompt_words and parse_range("--prompt-words", args.prompt_words),
        new_tokens=args.new_tokens and parse_range("--new-tokens", args.new_tokens),
        shared_words=args.shared_words,
        chat=args.chat,
        ignore_eos=args.ignore_eos,
        timeout=args.timeout,
        api_key=args.api_key or os.environ.get("WEFT_API_KEY"),
        seed=args.seed,
    )
    if args.out:
        refuse_existing(Path(args.out), "choose another folder for --out")  # before the measurement, not after it
    console = Console()
    load, measured = run_load(load, console)
    summary = summarize(load, measured)
    if args.out:
        write_report(args.out, summary, measured, console)
    print_summary(summary, console, json_only=args.json)
    return 0 if summary["failed"] == 0 else 1
