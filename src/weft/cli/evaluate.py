"""`weft evaluate`: evaluates a model on token stores and benchmark tasks."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.evaluation.evaluate import Evaluation
    from weft.evaluation.preferences import PreferenceResult
    from weft.observe.console import Console

HELP = "evaluate a model: perplexity, bits per byte, preferences, benchmark tasks"
GROUP = "use"

MEANING = """\
loss: mean cross-entropy in nats per predicted token. perplexity: e^loss.
bits per byte: cross-entropy of the predicted tokens in bits, per byte of their text; comparable across tokenizers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluates a run's newest checkpoint, one checkpoint, an imported folder or a Hugging Face folder. By default, "
        "the model is evaluated on the full validation data of the run. --store selects other token stores; --tasks "
        "selects tasks of EleutherAI's lm-evaluation-harness."
    )
    parser.add_argument("source", metavar="RUN", help="a run directory, a checkpoint, or a Hugging Face folder")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float64"], help="dtype of the model (default: as saved)"
    )
    parser.add_argument("--quantize", choices=["int8", "int4"], help="load weights in 8 or 4 bits (default: as saved)")
    parser.add_argument(
        "--adapter", metavar="DIR", help="add a LoRA adapter: a folder of PEFT, or a run with an adapter"
    )
    parser.add_argument("--device", help="device, such as cpu or cuda:1 (default: a GPU, if available)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences per batch (default: 8)")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of a tokenizer (default: the model's tokenizer)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE")
    stores = parser.add_argument_group("token stores")
    stores.add_argument(
        "--store", dest="stores", action="append", metavar="DIR", help="a token store; can be given several times"
    )
    stores.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="maximum number of tokens in a window (default: as in training)",
    )
    stores.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="number of tokens from the start of a window to the start of the next (default: the sequence length). "
        "With a smaller N, windows overlap, and each token is predicted from at least sequence-length - N tokens",
    )
    stores.add_argument(
        "--documents",
        choices=["apart", "joined"],
        help="evaluate documents separately (apart) or concatenated (default: as in training, or apart if unknown)",
    )
    stores.add_argument("--max-tokens", type=int, metavar="N", help="stop after N tokens of each store")
    _add_preference_arguments(parser)
    tasks = parser.add_argument_group("tasks (pip install 'weft-train[eval]')")
    tasks.add_argument("--tasks", metavar="TASK,...", help="names of tasks, separated by commas")
    tasks.add_argument("--include-path", metavar="DIR", help="a folder with custom tasks (YAML files)")
    tasks.add_argument(
        "--num-fewshot",
        type=int,
        metavar="N",
        help="number of examples before each question (default: set by the task)",
    )
    tasks.add_argument("--limit", type=int, metavar="N", help="use the first N questions of each task")
    tasks.add_argument(
        "--apply-chat-template", action="store_true", help="format questions by the tokenizer's chat template"
    )


def _add_preference_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("token stores of preferences")
    group.add_argument(
        "--reference",
        metavar="RUN",
        help="a model, such as the one before training, whose log-probabilities are subtracted (default: none)",
    )
    group.add_argument(
        "--per-token", action="store_true", help="divide log-probabilities by the number of tokens of the answer"
    )


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly

    wait_briefly()
    import torch

    from weft.errors import UserError
    from weft.evaluation.evaluate import evaluate
    from weft.files import replace_file
    from weft.observe.console import Console

    if args.json is not None and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        raise UserError("--json: no file can be written here; use the path of a file in an existing folder", args.json)
    console, settings = Console(), vars(args).copy()
    for name in ("source", "stores", "tasks", "json", "words"):
        del settings[name]
    settings["dtype"] = getattr(torch, args.dtype) if args.dtype else None
    try:
        found = evaluate(args.source, args.stores, args.tasks, console=console, **settings)
    except UserError as error:  # its message names arguments of the function
        raise UserError(_with_options(str(error))) from error
    if found.stores:
        _print_stores(found, console)
    if found.preferences:
        _print_preferences(found.preferences, console)
    if found.tasks:
        _print_tasks(found.tasks, console)
    if args.json is not None:
        replace_file(Path(args.json), json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    return 0


def _with_options(message: str) -> str:
    """Returns an error message of `weft.evaluate` for the command line: "`include_path`" becomes "--include-path"."""
    return re.sub("`([a-z_]+)`", lambda found: f"--{found[1].replace('_', '-')}", message)


def _print_stores(found: Evaluation, console: Console) -> None:
    rows = [
        [
            one.store,
            f"{one.loss:.4f}",
            f"{one.perplexity:,.4f}",
            "unknown" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}",
            one.tokens,
            None if one.bytes is None else round(one.bytes),
        ]
        for one in (found.stores if len(found.stores) == 1 else [*found.stores, found.all])
    ]
    console.table(["store", "loss", "perplexity", "bits per byte", "tokens", "bytes"], rows)
    length, stride = found.windows["sequence_length"], found.windows["stride"]
    ways = "documents evaluated separately" if found.windows["documents"] == "apart" else "documents concatenated"
    console.result(f"{ways}, in windows of at most {length:,} tokens, stride {stride:,}")
    console.result(MEANING)


def _print_preferences(found: list[PreferenceResult], console: Console) -> None:
    rows = [[one.store, one.pairs, f"{one.accuracy:.4f}", f"{one.margin:,.4f}"] for one in found]
    console.table(["store", "pairs", "accuracy", "margin"], rows)
    console.result(
        "accuracy: fraction of pairs whose chosen answer has the higher reward. margin: mean difference of the rewards"
    )
    console.result(f"reward: {found[0].reward}{'' if found[0].reward == 'score' else ', in nats'}")


def _print_tasks(results: dict[str, Any], console: Console) -> None:
    rows = []
    for task, found in results.items():
        for score in found["scores"]:
            name = score["metric"] + ("" if score["filter"] == "none" else f" ({score['filter']})")
            error = None if score["stderr"] is None else f"{score['stderr']:.4f}"
            rows.append([task, found["questions"], found["shots"], name, f"{score['value']:,.4f}", error])
    console.table(["task", "questions", "shots", "score", "value", "+-"], rows)
