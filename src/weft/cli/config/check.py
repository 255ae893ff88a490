"""`weft config check`: every mistake in a run's file, or what follows from it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from weft.cli.config import add_file

if TYPE_CHECKING:
    from weft.config.mesh import MeshShape

HELP = (
    "Reads FILE with all that it extends, checks every key, and opens the tokenizer's and the token stores' headers. "
    "All problems are told in one pass, each with file, line and what to do. Exit code 0 if there is none, 2 otherwise."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "example: weft config check run.yaml optimizer.lr=1e-3"
    add_file(parser)


def run(args: argparse.Namespace) -> int:
    from weft.config.mixture import unknown_tokenizers
    from weft.config.run import RunConfig
    from weft.observe.console import Console

    config = RunConfig.load(args.file, args.overrides, check_data=not args.no_data)
    print(f"{args.file}: OK")
    for name, fact in facts(config, open_data=not args.no_data).items():
        print(f"  {name:12}{fact}")
    sys.stdout.flush()
    doubt = None if args.no_data else unknown_tokenizers(config.data)
    if doubt is not None:
        Console().warning(doubt)
    return 0


def facts(config, *, open_data: bool) -> dict[str, str]:
    """What follows from a checked config, in words."""
    from weft.config.derive import derive, sequence_length
    from weft.config.errors import UserError
    from weft.config.foreign import LIMITS, ForeignModelSection
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
    elif isinstance(model, ForeignModelSection):
        told["model"] = f"{model.architecture} of transformers: {LIMITS}"
        told["starts from"] = model.from_ or (model.path if model.weights else "random weights")
    else:
        told["model"] = model.type
    tokens = None
    if open_data and isinstance(config.data.train, str):
        from weft.config.headers import read_store_header

        tokens = read_store_header(config.data.train).num_tokens
        told["data"] = f"{config.data.train}, {tokens:,} tokens, in sequences of {sequence_length(config):,}"
    sizes = _sizes(config) if open_data else None
    samples = None if sizes is None or weighted(config.data) else sum(sizes)
    if sizes is None and not isinstance(config.data.train, str):
        told["data"] = f"\n{'':14}".join(_outline(config, open_data))
    mesh = _mesh(config)
    ranks = mesh.data_ranks
    if lines := _axes(config, mesh):
        told["mesh"] = f"\n{'':14}".join(lines)
    try:
        length = derive(config, train_tokens=tokens, train_samples=samples, mesh=mesh)
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
    stores = [source.store for source in sources if isinstance(source, StoreSource)]
    if not sources or len(stores) < len(sources):
        return None
    return [(read_store_header(store).num_tokens - 1) // sequence_length(config) for store in stores]


def _outline(config, open_data: bool) -> list[str]:
    """Sources whose sizes the start of a run tells, as far as they are known."""
    from weft.config.data import DatasetSection, StoreSource
    from weft.config.derive import sequence_length
    from weft.config.headers import read_store_header
    from weft.config.mixture import sources_of

    length = f"in sequences of {sequence_length(config):,}"
    if isinstance(config.data.train, DatasetSection):
        return [f"{config.data.train.type}, {length}; its size is known when the run starts"]
    sources = sources_of(config.data)
    own = (
        "a dataset of your own is among them; its size"
        if open_data
        else "their sizes were not read; how much each gives"
    )
    lines = [f"{len(sources)} sources {length}; {own} is known when the run starts:"]
    whole = sum(source.weight or 0 for source in sources)
    widest = max(len(source.label) for source in sources)
    for source in sources:
        share = "by stage" if config.data.curriculum else "by size"
        if source.weight is not None:
            share = f"{100 * source.weight / whole:.2f}%"
        what = source.store if isinstance(source, StoreSource) else source.type
        if isinstance(source, StoreSource) and open_data:
            what += f", {read_store_header(source.store).num_tokens:,} tokens"
        limit = "" if source.max_epochs is None else f", at most {source.max_epochs:g} epochs"
        lines.append(f"  {source.label:{widest}}  {share:>8}  {what}{limit}")
    return lines


def _axes(config, mesh: MeshShape) -> list[str]:
    """What the ranks do; nothing for one rank."""
    from weft.config.derive import sequence_length
    from weft.config.mesh import AXES
    from weft.config.stages import stage_ranges

    ranks = mesh.pp * mesh.data_ranks * mesh.cp * mesh.tp
    if ranks == 1:
        return []
    words = {
        "dp_replicate": "copies of the model, of different rows",
        "dp_shard": "share the parameters; different rows",
        "cp": "share the tokens of each row",
        "tp": "share each layer's matrices, and between them the tokens",
        "ep": "share the experts, of the ranks of dp_shard x cp",
    }
    if mesh.pp > 1:
        section = config.parallel.model_copy(update={"pp": mesh.pp})
        layers = ", ".join(str(len(stage)) for stage in stage_ranges(config.model, section, sequence_length(config)))
        words["pp"] = f"stages of {layers} layers, by {section.schedule}"
    filled = [axis for axis in AXES if getattr(config.parallel, axis) == -1]
    more = f"or a multiple: {filled[0]} fills" if filled and not _world() else ""
    return [f"{ranks} ranks{', ' * bool(more)}{more}"] + [
        f"  {axis:12} {size:>5}  {words[axis]}" for axis, size in mesh.sizes.items() if size > 1
    ]


def _world() -> int | None:
    """Ranks as torchrun says."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) or None if world.isdigit() else None


def _mesh(config) -> MeshShape:
    """On as many ranks as torchrun says, or as it needs at least."""
    from weft.config.mesh import least_ranks, mesh_shape

    return mesh_shape(config.parallel, _world() or least_ranks(config.parallel))
