"""`weft config`: check a run's file, show it resolved, print what it may hold."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "check a run's YAML file, show it resolved, print its schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  weft config check run.yaml optimizer.lr=1e-3\n"
        "  weft config show run.yaml --origin\n"
        "  weft config schema > run.schema.json"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="check | show | schema")
    check = verbs.add_parser("check", help="find every mistake in a run's file", description=_CHECK)
    show = verbs.add_parser("show", help="print the resolved whole", description=_SHOW)
    schema = verbs.add_parser("schema", help="print the JSON Schema, for editors", description=_SCHEMA)
    for verb in (check, show):
        verb.add_argument("file", metavar="FILE", help="the run's YAML file")
        verb.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the file's")
        verb.add_argument("--no-data", action="store_true", help="do not open the tokenizer's and the stores' headers")
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    schema.add_argument("--markdown", action="store_true", help="the reference page (docs/configuration.md) instead")


_CHECK = (
    "Reads FILE with all that it extends, checks every key, and opens the tokenizer's and the token stores' headers. "
    "All problems are told in one pass, each with file, line and what to do. Exit code 0 if there is none, 2 otherwise."
)
_SHOW = "Prints FILE with everything that it extends, presets, overrides, defaults and derived values, as YAML."
_SCHEMA = (
    "Prints the JSON Schema of a run's file, with the arguments of the built-in optimizers, schedules and trackers."
)


def run(args: argparse.Namespace) -> int:
    if args.verb == "schema":
        from weft.config.reference import json_schema, markdown

        if args.markdown:
            print(markdown(), end="")
        else:
            import json

            print(json.dumps(json_schema(), indent=2))
        return 0
    from weft.config.load import dump_yaml
    from weft.config.run import RunConfig

    config = RunConfig.load(args.file, args.overrides, check_data=not args.no_data)
    if args.verb == "show":
        print(dump_yaml(config, origins=args.origin), end="")
        return 0
    print(f"{args.file}: OK")
    for name, fact in facts(config, open_data=not args.no_data).items():
        print(f"  {name:12}{fact}")
    sys.stdout.flush()
    return 0


def facts(config, *, open_data: bool) -> dict[str, str]:
    """What follows from a checked config, in words."""
    from weft.config.derive import derive, sequence_length
    from weft.config.errors import UserError
    from weft.config.mixture import plan, weighted
    from weft.config.model import ModelSection
    from weft.config.size import in_words, model_size

    told: dict[str, str] = {}
    model = config.model
    if isinstance(model, ModelSection):
        shape = f"{model.num_hidden_layers} layers of width {model.hidden_size}"
        if model.vocab_size:
            size = model_size(model)
            shape = f"{in_words(size.parameters)} parameters ({in_words(size.matmul)} in matrix products): {shape}"
        told["model"] = (f"{model.preset}, " if model.preset else "") + shape
        if model.from_:
            told["starts from"] = model.from_
    else:
        told["model"] = model.type
    tokens = None
    if open_data and isinstance(config.data.train, str):
        from weft.config.headers import read_store_header

        tokens = read_store_header(config.data.train).num_tokens
        told["data"] = f"{config.data.train}, {tokens:,} tokens, in sequences of {sequence_length(config):,}"
    sizes = _sizes(config) if open_data else None
    samples = None if sizes is None or weighted(config.data) else sum(sizes)
    ranks = _data_ranks(config)
    try:
        length = derive(config, train_tokens=tokens, train_samples=samples, data_ranks=ranks)
    except UserError:
        told["length"] = f"{config.training.epochs:g} epochs"
        return told
    told["length"] = f"{length.steps:,} steps of {length.tokens_per_step:,} tokens, {length.tokens:,} in all" + (
        f" ({length.epochs:.3g} epochs)" if length.epochs else ""
    )
    if sizes is not None:
        planned = plan(config.data, sizes, length.sequence_length, length.steps * length.sequences_per_step)
        told["data"] = f"\n{'':14}".join(planned.lines())
    told["batch"] = (
        f"{length.sequences_per_step:,} sequences = {ranks} rank{'s' if ranks > 1 else ''} x {length.accumulation} "
        f"micro-batch{'es' if length.accumulation > 1 else ''} of up to {length.micro_batch_size}"
    )
    every = [f"checkpoint every {length.checkpoint_every:,} steps"]
    if config.data.validation is not None:
        every.insert(0, f"validation every {length.validation_every:,}")
    told["while at it"] = ", ".join(every)
    told["writes to"] = str(config.run_directory)
    return told


def _sizes(config) -> list[int] | None:
    """Sequences in each source of a mixture of stores, as far as their headers tell: best-fit packing gives some more.

    None for one source, or where a dataset of the user's own is among them.
    """
    from weft.config.data import StoreSource
    from weft.config.derive import sequence_length
    from weft.config.headers import read_store_header
    from weft.config.mixture import sources_of

    sources = sources_of(config.data)
    if not sources or not all(isinstance(source, StoreSource) for source in sources):
        return None
    return [(read_store_header(source.store).num_tokens - 1) // sequence_length(config) for source in sources]


def _data_ranks(config) -> int:
    """Ranks as torchrun says, or as the mesh needs at least."""
    from weft.config.mesh import mesh_shape

    whole = max(1, config.parallel.dp_replicate) * max(1, config.parallel.dp_shard)
    world = os.environ.get("WORLD_SIZE", "")
    return mesh_shape(config.parallel, int(world) if world.isdigit() and int(world) else whole).data_ranks
