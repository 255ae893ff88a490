"""`weft evaluate`: how good a trained model is."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.evaluation.evaluate import Evaluation
    from weft.observe.console import Console

HELP = "measure a model: perplexity, bits per byte, benchmark tasks"
GROUP = "use"

MEANING = """\
loss: nats per predicted token. perplexity: e^loss, among how many equally likely tokens the model would be as unsure.
bits per byte: bits of the predicted tokens per byte of text that they stand for; compares models of any tokenizer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures the model of a run's newest checkpoint, of one checkpoint, of an imported folder or of a Hugging "
        "Face folder. By default on the run's validation data, the whole of it; with --store on other token stores; "
        "with --tasks on tasks of EleutherAI's lm-evaluation-harness."
    )
    parser.add_argument("source", metavar="RUN", help="a run directory, a checkpoint, or a Hugging Face folder")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="default: as saved")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="sequences at once (default: 8)")
    parser.add_argument("--tokenizer", metavar="DIR", help="the model's tokenizer (default: the one with the model)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    stores = parser.add_argument_group("token stores")
    stores.add_argument(
        "--store", dest="stores", action="append", metavar="DIR", help="a token store; may be given several times"
    )
    stores.add_argument("--sequence-length", type=int, metavar="N", help="tokens read at once (default: as trained)")
    stores.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="move the window on by N tokens: each token then has at least sequence-length - N tokens before it, at "
        "the price of reading more than once (default: the sequence length)",
    )
    stores.add_argument(
        "--documents",
        choices=["apart", "joined"],
        help="each document by itself, or all end to end (default: as trained; apart if that is not known)",
    )
    stores.add_argument("--max-tokens", type=int, metavar="N", help="stop after N tokens of each store")
    tasks = parser.add_argument_group("tasks (pip install 'weft-train[eval]')")
    tasks.add_argument("--tasks", metavar="TASK,...", help="names of tasks")
    tasks.add_argument("--include-path", metavar="DIR", help="a folder with tasks of your own (YAML files)")
    tasks.add_argument(
        "--num-fewshot", type=int, metavar="N", help="examples before each question (default: the task's)"
    )
    tasks.add_argument("--limit", type=int, metavar="N", help="the first N questions of each task")
    tasks.add_argument("--apply-chat-template", action="store_true", help="ask by the tokenizer's chat template")


def run(args: argparse.Namespace) -> int:
    from weft.launch.threads import wait_briefly

    wait_briefly()
    import torch

    from weft.errors import UserError
    from weft.evaluation.evaluate import evaluate
    from weft.files import replace_file
    from weft.observe.console import Console

    if args.json is not None and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        raise UserError("no file can be written there; name one in a folder that there is", args.json)
    console, settings = Console(), vars(args).copy()
    for name in ("source", "stores", "tasks", "json"):
        del settings[name]
    settings["dtype"] = getattr(torch, args.dtype) if args.dtype else None
    try:
        found = evaluate(args.source, args.stores, args.tasks, console=console, **settings)
    except UserError as error:  # it names arguments of the function
        raise UserError(re.sub("`(store|device)`", r"--\1", str(error))) from error
    if found.stores:
        tell_stores(found, console)
    if found.tasks:
        console.table(*_table(found.tasks))
    if args.json is not None:
        replace_file(Path(args.json), json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n")
    return 0


def tell_stores(found: Evaluation, console: Console) -> None:
    """A table of token stores' measures, and what they mean."""
    rows = [
        [
            one.store,
            f"{one.loss:.4f}",
            f"{one.perplexity:,.4f}",
            "not known" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}",
            one.tokens,
            None if one.bytes is None else round(one.bytes),
        ]
        for one in (found.stores if len(found.stores) == 1 else [*found.stores, found.all])
    ]
    console.table(["store", "loss", "perplexity", "bits per byte", "tokens", "bytes"], rows)
    length, stride = found.windows["sequence_length"], found.windows["stride"]
    ways = "each document by itself" if found.windows["documents"] == "apart" else "documents end to end"
    console.result(f"{ways}, in windows of at most {length:,} tokens, each {stride:,} after the one before")
    console.result(MEANING)


def _table(results: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Rows of tasks' scores."""
    rows = []
    for task, found in results.items():
        for score in found["scores"]:
            name = score["metric"] + ("" if score["filter"] == "none" else f" ({score['filter']})")
            error = None if score["stderr"] is None else f"{score['stderr']:.4f}"
            value = score["value"] if isinstance(score["value"], str) else f"{score['value']:,.4f}"
            rows.append([task, found["questions"], found["shots"], name, value, error])
    return ["task", "questions", "shots", "score", "value", "+-"], rows
