"""Requests that share an engine: together or alone, with or without a shared prefix; prefill beside transformers.

    .venv/bin/python benchmarks/generate_serving.py [--size 60m] [--dtype bfloat16] [--rounds 5] [--quick]

One process holds the same random weights as Weft's decoder and as transformers' Llama. The measurements take turns,
round after round, so each pair sees the same minutes of the machine. Figures are medians; ratios are medians of the
rounds' ratios. Goals: 32 requests together at least 3 x one at a time; a second request with the first one's 1,000
tokens at most a fifth of its time.
"""

import argparse
import datetime
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import SHAPES, VOCABULARY, available_cores, processor, slug, write_results  # noqa: E402

PREFIX, SUFFIX = 1000, 16
REQUESTS = 32


def seconds(act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def make_models(shape: dict, dtype: str, folder: str):
    """The same random weights as transformers' Llama and as Weft's decoder."""
    import torch
    import transformers

    import weft

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(getattr(torch, dtype)).eval()
    theirs.save_pretrained(folder)
    return theirs, weft.load_model(folder)


class Requests:
    """Random prompts from a seed; none is used twice, so that only what is meant to be shared is shared."""

    def __init__(self):
        self.rng = random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(length)]

    def mixed(self, count: int, longest: int, new: int) -> list[tuple[list[int], int]]:
        """(prompt, number of new tokens) of requests of mixed length, the same lengths in each round."""
        rng = random.Random(1)
        return [(self.prompt(rng.randrange(8, longest)), rng.randrange(new // 4, new)) for _ in range(count)]


def together(engine, requests) -> None:
    from weft import Sampling

    streams = [engine.submit(prompt, Sampling(new, temperature=0)) for prompt, new in requests]
    for stream in streams:
        for _ in stream:
            pass


def apart(engine, requests) -> None:
    for request in requests:
        together(engine, [request])


def one_round(engine, theirs, requests: Requests, args) -> dict[str, float]:
    """Seconds of each measurement."""
    import torch

    found = {}
    engine.clear()
    found["together"] = seconds(lambda: together(engine, requests.mixed(args.requests, args.longest, args.new)))
    found["apart"] = seconds(lambda: apart(engine, requests.mixed(args.requests, args.longest, args.new)))
    prefix = requests.prompt(PREFIX)
    for name in ("first", "second"):
        found[name] = seconds(lambda: together(engine, [(prefix + requests.prompt(SUFFIX), 1)]))
    for rows, length in ((1, args.prefill), (8, args.prefill // 8)):
        prompts = [requests.prompt(length) for _ in range(rows)]
        found[f"weft {rows}"] = seconds(lambda prompts=prompts: together(engine, [(prompt, 1) for prompt in prompts]))
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            found[f"transformers {rows}"] = seconds(
                lambda tokens=tokens: theirs(tokens, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Requests that share an engine.")
    parser.add_argument("--size", default="60m", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--longest", type=int, default=256, help="longest prompt of the mixed requests, in tokens")
    parser.add_argument("--new", type=int, default=64, help="most new tokens of the mixed requests")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the prefill measurement")
    parser.add_argument("--quick", action="store_true", help="does it work at all? no figures to quote")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.size, args.requests, args.new, args.prefill = 1, "14m", 8, 16, 128
    from weft.launch.threads import wait_briefly

    wait_briefly()
    import torch

    import weft

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = make_models(SHAPES[args.size], args.dtype, folder)
    engine, requests, rounds = weft.Engine(ours, max_cache_tokens=16_384), Requests(), []
    for number in range(-1, args.rounds):
        rounds.append(one_round(engine, theirs, requests, args))
        print(f"round {number + 1} of {args.rounds}: {rounds[-1]}", flush=True)
    del rounds[0]  # the warm-up

    def median(name: str) -> float:
        return statistics.median(one[name] for one in rounds)

    def ratio(name: str, other: str) -> float:
        return statistics.median(one[name] / one[other] for one in rounds)

    new = sum(count for _, count in requests.mixed(args.requests, args.longest, args.new))
    lines = [
        "# Requests that share an engine",
        "",
        f"{processor()}, {args.threads} thread{'s' * (args.threads > 1)}; Llama {args.size}, {args.dtype}; "
        f"{datetime.date.today()}; torch {torch.__version__}; medians of {args.rounds} rounds, ratios are medians "
        "of the rounds' ratios.",
        "",
        "| measurement | | | ratio | goal |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| {args.requests} requests of mixed length, {new:,} new tokens: one at a time, together (new tokens/s) "
        f"| {new / median('apart'):,.1f} | {new / median('together'):,.1f} | {ratio('apart', 'together'):.2f} x "
        "| at least 3 x |",
        f"| prompt of {PREFIX:,} + {SUFFIX} tokens: first, second with the same {PREFIX:,} (ms) "
        f"| {1e3 * median('first'):,.1f} | {1e3 * median('second'):,.1f} | {ratio('second', 'first'):.3f} "
        "| at most 0.2 |",
    ]
    for rows in (1, 8):
        tokens = rows * (args.prefill // rows)
        speeds = [f"{tokens / median(f'{who} {rows}'):,.0f}" for who in ("transformers", "weft")]
        lines.append(
            f"| prefill of {rows} x {args.prefill // rows:,} tokens: transformers, Weft (tokens/s) | {speeds[0]} "
            f"| {speeds[1]} | {ratio(f'transformers {rows}', f'weft {rows}'):.2f} x | |"
        )
    name = f"generate_serving-{slug(processor())}-{args.size}-{args.dtype}" if not args.quick else "generate_serving"
    write_results(args.out, name, "\n".join(lines) + "\n", rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
