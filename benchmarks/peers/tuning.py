"""What the benchmarks of tuning beside TRL share: options, texts, the model, and rounds with all peers in turns."""

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common import SHAPES, available_cores, processor, run_peer, slug, write_results
from corpus import make_jsonl

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CASES = {"all weights": {}, "LoRA, r 16": {"lora": 16}}
PEERS = {"TRL": "tune_trl.py", "Weft": "tune_weft.py"}
PROMPT, ANSWER = 2.8, 3.6  # means of the logarithms of numbers of words


def arguments(description: str, *, size: str, records: int, quick: int) -> argparse.Namespace:
    """Returns the options of a benchmark.

    Args:
        size, records: defaults.
        quick: number of records with `--quick`.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter with trl and peft")
    parser.add_argument("--size", default=size, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("--records", type=int, default=records)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "results")
    parser.add_argument("--add", action="store_true", help="add rounds to the results, made with the same options")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    help_quick = f"one round of 14m with {quick} records: does it work at all?"
    parser.add_argument("--quick", action="store_true", help=help_quick)
    args = parser.parse_args()
    if args.quick:
        args.size, args.records, args.rounds = "14m", quick, 1
    return args


class Texts:
    """Texts whose lengths are like those of instruction data: most are short, some are long.

    Args:
        most: largest number of words of a text.
    """

    def __init__(self, most: int = 220):
        with tempfile.TemporaryDirectory() as folder:
            make_jsonl(Path(folder) / "text.jsonl", 4, unique=True)
            lines = (Path(folder) / "text.jsonl").read_text().splitlines()
        self.words = [word for line in lines for word in json.loads(line)["text"].split() if len(word) < 20]
        self.rng, self.most = random.Random(0), most

    def draw(self, *means: float) -> list[str]:
        """Returns consecutive texts, for the means of the logarithms of their numbers of words."""
        sizes = [min(self.most, int(self.rng.lognormvariate(mean, 0.7)) + 3) for mean in means]
        start, texts = self.rng.randrange(len(self.words) - sum(sizes)), []
        for size in sizes:
            texts.append(" ".join(self.words[start : start + size]))
            start += size
        return texts


def make_model(folder: Path, size: str, records: Path) -> None:
    """Writes a Llama with random weights, and a tokenizer that was trained on the records."""
    from hf_model import llama
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained = ByteLevelBPETokenizer()
    trained.train([str(records)], vocab_size=8000, special_tokens=tokens, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(folder)
    llama(SHAPES[size]).save_pretrained(folder)


def compare(
    args: argparse.Namespace,
    name: str,
    asked: dict,
    record: Callable[[], dict],
    page: Callable[[dict], str],
) -> None:
    """Measures the peers in turns, each in a process of its own, and writes the results.

    Args:
        name: of the files of results.
        asked: of the peers, besides data, model and threads.
        record: returns the next record.
        page: case -> peer -> its measurements, to the table.
    """
    pythons = {"TRL": args.trl_python, "Weft": sys.executable}
    found: dict = {case: {peer: [] for peer in PEERS} for case in CASES}
    results = f"{name}-{slug(processor())}"
    if args.add:
        found = json.loads((args.out / f"{results}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        records, model = Path(folder) / "records.jsonl", Path(folder) / "model"
        records.write_text("".join(json.dumps(record()) + "\n" for _ in range(args.records)))
        make_model(model, args.size, records)
        asked = asked | {"records": str(records), "model": str(model), "work": folder, "threads": args.threads}
        for number in range(1, args.rounds + 1):
            for case in args.cases:
                for peer in PEERS:
                    found[case][peer].append(run_peer(pythons[peer], PEERS[peer], asked | CASES[case], folder))
                    print(case, peer, found[case][peer][-1], flush=True)
            # After each round, so that a run that is interrupted leaves its whole rounds.
            measured = {case: peers for case, peers in found.items() if peers["TRL"]}
            write_results(args.out, results, page(measured), found, show=number == args.rounds)


def rates_table(args: argparse.Namespace, title: str, what: str, found: dict) -> str:
    """Returns the table of useful tokens/s and memory.

    Args:
        what: the data and the number of records per step.
    """
    lines = [
        *heading(args, title, what, found),
        "| case | system | useful tokens/s | of TRL's | peak memory, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, peers in found.items():
        rates = {peer: median(rounds, lambda one: one["tokens"] / one["seconds"]) for peer, rounds in peers.items()}
        for peer, rounds in peers.items():
            share, memory = rates[peer] / rates["TRL"], median(rounds, lambda one: one["peak_bytes"] / 2**20)
            lines.append(f"| {case} | {peer} | {rates[peer]:,.0f} | {share:.2f} | {memory:,.0f} |")
    return "\n".join(lines) + "\n"


def heading(args: argparse.Namespace, title: str, what: str, found: dict) -> list[str]:
    """Returns the lines above the table of `found`: case -> peer -> measurements."""
    rounds = min(len(measured) for peers in found.values() for measured in peers.values())
    return [
        f"# {title}",
        "",
        f"{processor()}, {args.threads} threads. A {args.size} Llama in bf16 with float32 weights (LoRA: bf16 base), "
        f"{what}; medians of {rounds} interleaved round{'s' * (rounds != 1)}.",
        "",
    ]


def median(rounds: list[dict], value: Callable[[dict], float]) -> float:
    """Returns the median of a value of the rounds."""
    return statistics.median(map(value, rounds))
