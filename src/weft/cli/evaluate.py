"""`weft evaluate`: how good a trained model is."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

HELP = "measure a model: perplexity and bits per byte of token stores, benchmark tasks"

# Options of one part of the work, refused where that part is not asked for.
OF_STORES = ("sequence_length", "stride", "documents", "max_tokens")
OF_TASKS = ("include_path", "num_fewshot", "limit", "apply_chat_template")

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
    _refuse_idle(args)
    if args.json is not None and (Path(args.json).is_dir() or not Path(args.json).absolute().parent.is_dir()):
        from weft.config.errors import UserError

        raise UserError("no file can be written there; name one in a folder that there is", args.json)
    # Mistakes in tasks and stores are told before a large model is loaded.
    names = [name.strip() for name in (args.tasks or "").split(",") if name.strip()]
    tasks = None
    if args.tasks is not None:
        from weft.evaluate.tasks import find_tasks

        tasks = find_tasks(names, args.include_path)
    import torch

    from weft.checkpoint.load import resolve, tokenizer_folder
    from weft.checkpoint.model import load_model
    from weft.data.stores.store import TokenStore
    from weft.evaluate.trained import held_out_store, how_trained
    from weft.observe.console import Console
    from weft.train.run_directory import replace_text

    console = Console()
    checkpoint = resolve(args.source)
    trained = how_trained(checkpoint)
    paths = args.stores or ([] if args.tasks is not None else [held_out_store(checkpoint, trained)])
    stores = [TokenStore.open(path) for path in paths]
    tokenizer = args.tokenizer or tokenizer_folder(checkpoint)
    device = _device(args.device)
    model = load_model(checkpoint, device, getattr(torch, args.dtype) if args.dtype else None)
    results: dict[str, Any] = {"model": str(checkpoint)}
    if stores:
        if tokenizer is None:
            console.warning(f"{checkpoint} has no tokenizer with it: nobody can tell whether a store's ids are its own")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: console.warning(str(message))
            results |= _on_stores(args, model, stores, trained, tokenizer, console)
    if args.tasks is not None:
        from weft.evaluate.tasks import on_tasks

        results["tasks"] = on_tasks(
            model,
            tokenizer,
            names,
            tasks,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            chat=args.apply_chat_template,
            batch_size=args.batch_size,
            console=console,
        )
        console.table(*_table(results["tasks"]))
    if args.json is not None:
        replace_text(Path(args.json), json.dumps(results, indent=1, allow_nan=False) + "\n")
    return 0


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise UserError for an option that would do nothing."""
    from weft.config.errors import UserError

    idle, other = (OF_TASKS, "--tasks") if args.tasks is None else (OF_STORES, "--store")
    if args.tasks is not None and args.stores:
        return
    for name in idle:
        if getattr(args, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} says something only beside {other}; leave it out, or add that")


def _device(stated: str | None):
    import torch

    from weft.config.errors import UserError

    if stated is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(stated)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # what a build without CUDA says
        raise UserError(
            f"--device {stated}: {str(error).splitlines()[0]}; name cpu or a device that there is"
        ) from None
    return device


def _on_stores(args, model, stores, trained, tokenizer, console) -> dict[str, Any]:
    from weft.evaluate.perplexity import default_length, perplexity, together

    length = args.sequence_length
    if length is None:
        length = (trained and trained.sequence_length) or default_length(model)
    stride = length if args.stride is None else args.stride
    apart = args.documents == "apart" if args.documents else trained is None or trained.documents_apart
    found = [
        perplexity(
            model,
            store,
            sequence_length=length,
            stride=stride,
            documents_apart=apart,
            batch_size=args.batch_size,
            max_tokens=args.max_tokens,
            tokenizer=tokenizer,
            console=console,
        )
        for store in stores
    ]
    overall = together(found)
    rows = [
        [
            one.store,
            f"{one.loss:.4f}",
            f"{one.perplexity:,.4f}",
            "not known" if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}",
            one.tokens,
            None if one.bytes is None else round(one.bytes),
        ]
        for one in (found if len(found) == 1 else [*found, overall])
    ]
    console.table(["store", "loss", "perplexity", "bits per byte", "tokens", "bytes"], rows)
    ways = "each document by itself" if apart else "documents end to end"
    console.result(f"{ways}, in windows of at most {length:,} tokens, each {stride:,} after the one before")
    console.result(MEANING)
    settings = {"sequence_length": length, "stride": stride, "documents": "apart" if apart else "joined"}
    return settings | {"stores": [one.as_dict() for one in found], "all": overall.as_dict()}


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
