"""Speculative decoding of one request: proposals that are accepted, and that are rejected, beside transformers.

    .venv/bin/python benchmarks/generate_speculative.py [--size 60m] [--dtype bfloat16] [--rounds 5] [--quick]

One process holds the same random weights as Weft's decoder and as transformers' Llama, and a small draft model. The
greedy text of random weights soon repeats itself, so prompt look-up is nearly always right: the most that proposals can
gain. A draft with random weights is nearly always wrong, and nothing repeats in a sampled text: the most that proposals
can cost. A trained pair is between these bounds. The measurements take turns; figures are medians of the rounds.
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

CASES = {
    "greedy, no proposals": (0.0, {}),
    "greedy, look-up": (0.0, {"lookup": True}),
    "greedy, draft model": (0.0, {"draft": True}),
    "temperature 1, no proposals": (1.0, {}),
    "temperature 1, look-up": (1.0, {"lookup": True}),
}


def make_models(shape: dict, dtype: str):
    """The same random weights as transformers' Llama and as Weft's decoder."""
    import torch
    import transformers

    import weft

    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).to(getattr(torch, dtype)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, weft.load_model(folder)


def measure_weft(engine, prompt, new: int, temperature: float) -> tuple[float, float]:
    """Returns (tokens/s, accepted share of the proposals)."""
    import weft

    before, start = (engine.accepted_tokens, engine.proposed_tokens), time.perf_counter()
    count = sum(1 for _ in engine.submit(prompt, weft.Sampling(new, temperature=temperature)))
    took = time.perf_counter() - start
    accepted, proposed = engine.accepted_tokens - before[0], engine.proposed_tokens - before[1]
    return count / took, accepted / max(1, proposed)


def measure_transformers(model, draft, prompt, new: int, temperature: float, how: dict, tokens: int) -> float:
    """Returns tokens/s."""
    import torch

    options = {"prompt_lookup_num_tokens": tokens} if "lookup" in how else {}
    options |= {"assistant_model": draft} if "draft" in how else {}
    options |= {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    inputs, start = torch.tensor([prompt]), time.perf_counter()
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, eos_token_id=None, **options
    )
    return (out.shape[1] - len(prompt)) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speculative decoding of one request.")
    parser.add_argument("--size", default="60m", choices=SHAPES)
    parser.add_argument("--draft-size", default="14m", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--new", type=int, default=200, help="new tokens")
    parser.add_argument("--lookup", type=int, default=7, help="tokens that look-up proposes")
    parser.add_argument("--draft-tokens", type=int, default=4, help="tokens that the draft model proposes")
    parser.add_argument("--quick", action="store_true", help="does it work at all? no figures to quote")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.size, args.new = 1, "14m", 24
    from weft.launch.threads import wait_briefly

    wait_briefly()
    import torch

    import weft

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    theirs, ours = make_models(SHAPES[args.size], args.dtype)
    their_draft, our_draft = make_models(SHAPES[args.draft_size], args.dtype)
    their_draft.generation_config.num_assistant_tokens = args.draft_tokens
    their_draft.generation_config.num_assistant_tokens_schedule = "constant"
    their_draft.generation_config.assistant_confidence_threshold = 0.0
    options = {"lookup": {"lookup": args.lookup}, "draft": {"draft": our_draft, "draft_tokens": args.draft_tokens}}
    engines = {
        name: weft.Engine(ours, max_cache_tokens=4096, **{k: v for key in how for k, v in options[key].items()})
        for name, (_, how) in CASES.items()
    }
    rng, rounds = random.Random(0), []
    for number in range(-1, args.rounds):
        prompt, found = [rng.randrange(VOCABULARY) for _ in range(64)], {}
        for name, (temperature, how) in CASES.items():
            speed, share = measure_weft(engines[name], prompt, args.new, temperature)
            tokens = args.lookup if "lookup" in how else args.draft_tokens
            peer = measure_transformers(theirs, their_draft, prompt, args.new, temperature, how, tokens)
            found[name] = {"weft": speed, "accepted": share, "transformers": peer}
        rounds.append(found)
        print(f"round {number + 1} of {args.rounds}: {found}", flush=True)
    del rounds[0]  # the warm-up

    def median(name: str, key: str) -> float:
        return statistics.median(one[name][key] for one in rounds)

    lines = [
        "# Speculative decoding of one request",
        "",
        f"{processor()}, {args.threads} threads; Llama {args.size}, draft {args.draft_size}, random weights, "
        f"{args.dtype}; {args.new} new tokens; {args.lookup} tokens by look-up, {args.draft_tokens} by the draft; "
        f"{datetime.date.today()}; torch {torch.__version__}; medians of {args.rounds} rounds.",
        "",
        "| | accepted proposals | Weft (tokens/s) | beside no proposals | transformers (tokens/s) "
        "| beside no proposals |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in CASES:
        plain = f"{name.partition(',')[0]}, no proposals"
        cells = [f"{median(name, 'accepted'):.0%}" if name != plain else ""]
        for who in ("weft", "transformers"):
            ratio = statistics.median(one[name][who] / one[plain][who] for one in rounds)
            cells += [f"{median(name, who):,.0f}", f"{ratio:.2f} x"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    name = f"generate_speculative-{slug(processor())}-{args.size}-{args.dtype}"
    write_results(args.out, "generate_speculative" if args.quick else name, "\n".join(lines) + "\n", rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
