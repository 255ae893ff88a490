"""`weft config check`: reports all errors in a run file; without errors, prints the plan of the run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from weft.cli.config import add_file
from weft.formatting import amount, counted

if TYPE_CHECKING:
    from weft.config.mesh import MeshShape

HELP = "report all errors in a run file"
GROUP = "run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads FILE and the files that it extends, checks every key, reads the headers of the tokenizer and the token "
        "stores, and checks that the run directory can be written (neither with --no-data). Prints all errors, each "
        "with its file, its line and a remedy. Exits with code 0 if there are no errors, otherwise with code 2."
    )
    parser.epilog = "example: weft config check run.yaml optimizer.lr=1e-3"
    add_file(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="check the mesh for N devices, one rank per device")


def run(args: argparse.Namespace) -> int:
    from weft.config.mesh import launched_ranks
    from weft.config.run import RunConfig
    from weft.config.warnings import warnings
    from weft.errors import UserError
    from weft.observe.console import Console

    if args.devices is not None and args.devices < 1:
        raise UserError(f"--devices {args.devices}: use at least 1")
    ranks = args.devices or launched_ranks()
    config = RunConfig.load(args.file, args.overrides, check_data=not args.no_data, ranks=ranks, for_fit=True)
    if not args.no_data:
        _check_run_directory(config, args.file)
    plan = facts(config, ranks, open_data=not args.no_data)
    print(f"{args.file}: OK")
    for name, fact in plan.items():
        print(f"  {name:12}{fact}")
    sys.stdout.flush()
    for warning in warnings(config, _mesh(config, ranks), open_data=not args.no_data):
        Console().warning(warning)
    return 0


def _check_run_directory(config, file: str) -> None:
    """Raises UserError if this user cannot create the run directory, or cannot write into it."""
    from weft.errors import UserError

    run = config.run_directory.absolute()
    found = next(path for path in (run, *run.parents) if os.path.lexists(path))
    origin = config.origins["run.directory"]
    where = f"{file if origin == 'default' else origin}: run.directory: "
    if not found.is_dir():
        raise UserError(f"{where}{found} is not a folder; set another")
    if not os.access(found, os.W_OK | os.X_OK):
        raise UserError(f"{where}this user cannot write into {found}; set another folder")


def facts(config, ranks: int | None = None, *, open_data: bool) -> dict[str, str]:
    """Returns lines that describe the plan of a run, as label -> text.

    Args:
        ranks: world size. Default: the smallest world size that fits the mesh.
        open_data: whether to read the headers of the token stores.
    """
    from weft.config.derive import derive, sequence_length
    from weft.data.batches.mixture_plan import plan_mixture
    from weft.errors import UserError

    found, tokens = _model(config.model) | _adapter(config), None
    raw = _raw(config) if open_data else {}
    if "data.train" in raw:
        found["data"] = f"{raw['data.train']}, in sequences of {sequence_length(config):,}"
    elif open_data and isinstance(config.data.train, str):
        from weft.headers import read_store_header

        tokens = read_store_header(config.data.train).num_tokens
        found["data"] = f"{config.data.train}, {counted(tokens, 'token')}, in sequences of {sequence_length(config):,}"
    sizes = _sizes(config) if open_data else None
    samples = None if sizes is None or config.data.weighted else sum(sizes)
    if sizes is None and not isinstance(config.data.train, str):
        found["data"] = f"\n{'':14}".join(_outline(config, open_data, raw))
    for key in (key for key in raw if key.startswith("data.validation")):
        found[key.removeprefix("data.")] = raw[key]
    mesh = _mesh(config, ranks)
    if lines := _axes(config, mesh, known=ranks is not None):
        found["mesh"] = f"\n{'':14}".join(lines)
    if config.generates:
        settings = config.objective.arguments
        each = f"{settings['prompts']:,} prompts x {settings['group']:,} completions of up to"
        found["rollouts"] = (
            f"{each} {settings['max_new_tokens']:,} tokens, every {settings['updates_per_rollout']:,} steps"
        )
        return found | {"length": counted(config.training.steps, "step"), "output": str(config.run_directory)}
    try:
        length = derive(config, train_tokens=tokens, train_samples=samples, mesh=mesh)
    except UserError:
        found["length"] = f"{config.training.epochs:g} epochs"
        return found
    found["length"] = (
        f"{counted(length.steps, 'step')} of {counted(length.tokens_per_step, 'token')}, {length.tokens:,} in all"
        + (f" ({length.epochs:.3g} epochs)" if length.epochs else "")
    )
    if sizes is not None:
        planned = plan_mixture(config.data, sizes, length.sequence_length, length.steps * length.sequences_per_step)
        found["data"] = f"\n{'':14}".join(planned.lines())
    found["batch"] = (
        f"{counted(length.sequences_per_step, 'sequence')} = {counted(mesh.data_ranks, 'rank')} x "
        f"{counted(length.accumulation, 'micro-batch', 'micro-batches')} of up to {length.micro_batch_size}"
    )
    every = [f"checkpoint every {counted(length.checkpoint_every, 'step')}"]
    if config.data.validation is not None:
        every.insert(0, f"validation every {length.validation_every:,}")
    found["intervals"] = ", ".join(every)
    found["output"] = str(config.run_directory)
    return found


def _model(model) -> dict[str, str]:
    from weft.config.model import ModelSection
    from weft.config.transformers_model import LIMITS, TransformersModelSection

    if isinstance(model, TransformersModelSection):
        start = str(model.from_ or (model.path if model.weights else "random weights"))
        return {"model": f"{model.architecture} of transformers: {LIMITS}", "starts from": start}
    if not isinstance(model, ModelSection):
        return {"model": model.type}
    shape = f"{counted(model.num_hidden_layers, 'layer')} with hidden size {model.hidden_size}"
    if model.vocab_size:
        size = model.size()
        shape = f"{amount(size.parameters)} parameters ({amount(size.matmul)} in matrix multiplications): {shape}"
    found = {"model": (f"{model.preset}, " if model.preset else "") + shape}
    return found | ({"starts from": model.from_} if model.from_ else {})


def _raw(config) -> dict[str, str]:
    """Returns a description of each raw source, by dotted configuration key. Reads the first records.

    Raises:
        UserError: the layout of a raw source cannot be detected, or its chat template is not found.
    """
    if config.generates:
        return {"data.train": f"{config.data.train}, prompts"}
    if not config.data.raw:
        return {}
    from weft.data.raw.pack_sources import detect_sources

    found = detect_sources(config)
    return {key: f"{raw.path}, {raw.description}; packed when the run starts" for key, raw in found.items()}


def _adapter(config) -> dict[str, str]:
    """Returns a line about the adapter of a run; {} if the run has none."""
    from weft.config.adapter import adapted_layers, adapter_parameters, decoder_layers, is_stacked
    from weft.config.model import ModelSection

    section, model = config.adapter, config.model
    if section is None:
        return {}
    text = f"{'DoRA' if section.dora else 'LoRA'} of rank {section.r}, scale {section.scale:g}"
    if isinstance(model, ModelSection):
        layers = decoder_layers(model)
        chosen = adapted_layers(section, layers, [name for name in layers if is_stacked(name)])
        trained = adapter_parameters(section, layers, chosen)
        text = f"{amount(trained)} trained parameters: {text}, on {counted(len(chosen), 'layer')}"
    return {"adapter": text + (f"; other weights in {section.quantize}" if section.quantize else "")}


def _sizes(config) -> list[int] | None:
    """Returns the number of sequences in each token store of a mixture, computed from the headers of the stores.

    Best-fit packing yields slightly more sequences. Returns None for a single source, or if the mixture has a custom
    dataset or raw data.
    """
    from weft.config.data import StoreSource
    from weft.config.derive import sequence_length
    from weft.headers import read_store_header

    sources = config.data.sources
    stores = [source.store for source in sources if isinstance(source, StoreSource)]
    if not sources or len(stores) < len(sources) or any(key.startswith("data.train") for key in config.data.raw):
        return None
    return [(read_store_header(store).num_tokens - 1) // sequence_length(config) for store in stores]


def _outline(config, open_data: bool, raw: dict[str, str]) -> list[str]:
    """Returns lines that describe data whose size is known only when the run starts; each source has one line.

    `raw`: description of each raw source, by dotted configuration key.
    """
    from weft.config.data import DatasetSection, StoreSource
    from weft.config.derive import sequence_length
    from weft.headers import read_store_header

    length = f"in sequences of {sequence_length(config):,}"
    if isinstance(config.data.train, DatasetSection):
        return [f"{config.data.train.type}, {length}; the size will be known when the run starts"]
    sources = config.data.sources
    unknown = "the sizes of custom datasets and raw data" if open_data else "their sizes (not read)"
    lines = [f"{len(sources)} sources {length}; {unknown} will be known when the run starts:"]
    total = sum(source.weight or 0 for source in sources)
    widest = max(len(source.label) for source in sources)
    for number, source in enumerate(sources):
        share = "by stage" if config.data.curriculum else "by size"
        if source.weight is not None:
            share = f"{100 * source.weight / total:.2f}%"
        what = source.store if isinstance(source, StoreSource) else source.type
        if (key := f"data.train[{number}].store") in raw:
            what = raw[key]
        elif isinstance(source, StoreSource) and open_data:
            what += f", {counted(read_store_header(source.store).num_tokens, 'token')}"
        limit = "" if source.max_epochs is None else f", at most {source.max_epochs:g} epochs"
        lines.append(f"  {source.label:{widest}}  {share:>8}  {what}{limit}")
    return lines


def _axes(config, mesh: MeshShape, *, known: bool) -> list[str]:
    """Returns lines of text about the mesh: the number of ranks, and each axis of more than one rank.

    Args:
        known: whether the number of ranks is given. If not, the result for a mesh of a single rank is empty.
    """
    from weft.config.derive import sequence_length
    from weft.config.mesh import AXES
    from weft.parallel.stages import stage_ranges

    ranks = mesh.pp * mesh.data_ranks * mesh.cp * mesh.tp
    if ranks == 1 and not known:
        return []
    words = {
        "dp_replicate": "replicas of the model, on different sequences",
        "dp_shard": "shards of the parameters, on different sequences",
        "cp": "shards of each sequence's tokens",
        "tp": "shards of each layer's matrices (tensor and sequence parallel)",
        "ep": "shards of the experts, among the ranks of dp_shard x cp",
    }
    if mesh.pp > 1 and config.parallel.plan is not None:
        words["pp"] = f"stages of the plan, by {config.parallel.pp_schedule}"
    elif mesh.pp > 1:
        section = config.parallel.model_copy(update={"pp": mesh.pp})
        layers = ", ".join(str(len(stage)) for stage in stage_ranges(config.model, section, sequence_length(config)))
        words["pp"] = f"stages of {layers} layers, by {section.pp_schedule}"
    filled = [axis for axis in AXES if getattr(config.parallel, axis) == -1]
    more = f"or a multiple: {filled[0]} fills" if filled and not known else ""
    return [f"{counted(ranks, 'rank')}{', ' * bool(more)}{more}"] + [
        f"  {axis:12} {size:>5}  {words[axis]}" for axis, size in mesh.sizes.items() if size > 1
    ]


def _mesh(config, ranks: int | None) -> MeshShape:
    """Returns the mesh on `ranks` ranks; if None, on the smallest number of ranks that fits the mesh."""
    from weft.config.mesh import least_ranks, mesh_shape

    return mesh_shape(config.parallel, ranks or least_ranks(config.parallel))
