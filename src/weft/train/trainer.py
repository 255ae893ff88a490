"""From a checked config to a trained model: the wiring of all rooms."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.checkpoint.huggingface.foreign import fill_foreign
from weft.checkpoint.load import checkpoints, load, resolve
from weft.config.components import load_class
from weft.config.errors import UserError
from weft.config.foreign import ForeignModelSection, notices
from weft.config.legal_mesh import check_mesh
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.config.training import TrainingSection
from weft.kernels.flash import flash_usable
from weft.kernels.masks import flex_usable
from weft.models.roles import parameter_roles
from weft.models.trial import try_parts
from weft.observe.console import Console
from weft.optim.groups import parameter_groups
from weft.parallel.apply import parallelize
from weft.parallel.fp8 import raise_unless_usable
from weft.parallel.gradients.compress import PowerSGD
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.memory.offload import keep_state_on_host
from weft.parallel.world import World, start_world
from weft.train.choices import DTYPES, apply_choices, choose
from weft.train.data import Data, open_data
from weft.train.loop import Loop, Outcome
from weft.train.recorder import Recorder
from weft.train.run_directory import RunDirectory, claim
from weft.train.stop import StopSignal


class Trainer:
    """Trains what a `RunConfig` describes, alone or as one rank of a torchrun job.

    Args:
        config: from `RunConfig.load`.
        fresh: set aside what the run directory holds, and start over. Otherwise `fit` goes on from its last checkpoint.
        console: where to speak; by default stderr, by the first rank.
    """

    loop: Callable[..., Loop] = Loop  # what takes the steps, and what tells of them: `weft profile` has its own
    recorder: Callable[..., Recorder] = Recorder

    def __init__(self, config: RunConfig, *, fresh: bool = False, console: Console | None = None):
        self.config, self.fresh = config, fresh
        self.console = console or Console(speaks=int(os.environ.get("RANK", 0)) == 0)

    def fit(self) -> Outcome:
        """Train to the end of the run, or to a signal.

        Returns:
            How it ended; a checkpoint of its last step exists in the run directory.

        Raises:
            UserError: whatever the user can mend: data, sizes, a damaged checkpoint, a full disk.
        """
        check_mesh(self.config, int(os.environ.get("WORLD_SIZE", 1)))
        world, run = start_world(self.config.parallel), None
        try:
            examine_fp8(self.config, world, self.console)  # before there is a run directory
            run, config = prepare(self.config, world, fresh=self.fresh)
            examine_attention(config, world, self.console)
            examine_parts(config, world)
            data = world.agree(lambda: open_data(config, world, self.console))
            model, optimizer = build(config, world)
            compress = compressor(config, world, model, self.console)
            state = world.agree(lambda: restore(config, run, model, optimizer, compress))
            step = int(state["step"])
            if step >= data.length.steps:
                self.console.line(nothing_to_do(run, step, data.length.steps))
                world.close()
                return Outcome("finished", step, None, {})
            examine_foreign(config, world, model, self.console)
            loop = wire(
                config,
                world,
                run,
                data,
                model,
                optimizer,
                state,
                self.console,
                compress=compress,
                loop=self.loop,
                recorder=self.recorder,
            )
            with StopSignal() as stop:  # to the end: a second signal must not cut off the last words
                outcome = loop.run(step, stop)
                loop.recorder.ended(outcome.status, outcome.step)
                world.close()
            return outcome
        except BaseException:
            world.abandon()
            raise
        finally:
            if run is not None:
                run.release()  # the process may go on, and train here again


def prepare(config: RunConfig, world: World, *, fresh: bool) -> tuple[RunDirectory, RunConfig]:
    """Claim the run directory; fill in what Weft chooses, once a run and alike on all ranks."""
    path = config.run_directory
    lock = world.agree(lambda: claim(path, fresh=fresh), only_first=True)
    run = RunDirectory(path, lock if world.rank == 0 else None)
    config = run.with_choices(config)
    chosen = world.agree(lambda: choose(config.training, world.device).model_dump(), only_first=True)
    config = config.model_copy(update={"training": TrainingSection(**chosen)})
    apply_choices(config.training)
    return run, config


def build(config: RunConfig, world: World) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The sharded model at its initial weights, and its optimizer."""
    model = parallelize(
        config.model,
        config.parallel,
        world,
        dtype=DTYPES[config.training.dtype],
        reduce_dtype=DTYPES.get(config.training.reduce_dtype),  # auto is none of them
        seed=config.run.seed,
        compile=config.training.compile,
        activation_checkpointing=config.training.activation_checkpointing,
        only_rows_from=config.training.only_rows_from,
        sequence=config.data.sequence_length or 0,
        fp8=config.training.fp8,
    )
    groups = parameter_groups(model, parameter_roles(model), config.optimizer.no_decay)
    optimizer = load_class(config.optimizer, "optimizer")(groups, **config.optimizer.arguments)
    if config.parallel.offload == "optimizer":
        keep_state_on_host(optimizer, world.device)
    return model, optimizer


def compressor(config: RunConfig, world: World, model: nn.Module, console: Console) -> PowerSGD | None:
    """What sums gradients over the copies of the model, if FSDP2 is not to."""
    section, training = config.parallel.compress, config.training
    if section is None:
        return None
    state = torch.promote_types(DTYPES[training.dtype], torch.float32)
    made = PowerSGD(section, model, world, dtype=DTYPES.get(training.reduce_dtype, state), seed=config.run.seed)
    if not made.matrices:
        mistake = UserError(f"parallel.compress.rank: factors of rank {section.rank} make no matrix smaller; lower it")
        mistake.quiet = world.rank != 0  # all ranks find the same
        raise mistake
    exact = f"exactly for {section.start_step:,} steps, from there on " if section.start_step else ""
    console.line(
        f"{world.shape.dp_replicate} copies tell one another their gradients: {exact}{made.share:.2%} of the numbers "
        f"(matrices by factors of rank {section.rank})"
    )
    return made


def restore(
    config: RunConfig,
    run: RunDirectory,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compress: PowerSGD | None = None,
) -> dict[str, Any]:
    """Go on from the run's last checkpoint; or start from the one that `model.from` names, or from `model.path`.

    Returns:
        What the loop goes on from: `step`, the number of updates made so far, and what else was saved with them.
    """
    if checkpoints(run.path):
        others = compress.blank_state if compress is not None else None
        state = load(resolve(run.path), model=model, optimizer=optimizer, others=others)
        if compress is not None:
            compress.restored()
        return state
    if isinstance(config.model, ForeignModelSection) and config.model.from_ is None and config.model.weights:
        fill_foreign(model, config.model)
    if config.model.from_ is not None:
        load(resolve(config.model.from_), model=model, optimizer=optimizer if config.model.load_optimizer else None)
    return {"step": 0}


def examine_attention(config: RunConfig, world: World, console: Console) -> None:
    """Say before any work what the chosen attention cannot do on this device.

    Raises:
        UserError: flash-attn cannot be called here.
    """
    if not isinstance(config.model, ModelSection):
        return
    chosen, dtype = config.model.attention_implementation, DTYPES[config.training.dtype]
    if chosen == "flash":
        world.agree(lambda: flash_usable(world.device, dtype))
    if chosen == "flex" and not flex_usable(world.device, dtype, config.model.qk_head_dim):
        console.warning(
            "model.attention_implementation: flex attention is for GPUs, with 16 or 32 bits and heads of 16 or more; "
            "here the same masks are applied whole"
        )


def examine_fp8(config: RunConfig, world: World, console: Console) -> None:
    """Say before any work if products in 8 bits are not to be had here.

    Raises:
        UserError: what is missing.
    """
    if config.training.fp8:
        world.agree(lambda: raise_unless_usable(world.device))
        if not config.training.compile:
            console.warning(
                "training.fp8 without training.compile: rounding takes longer than is won; set compile: true"
            )


def examine_parts(config: RunConfig, world: World) -> None:
    """Try the decoder's parts that are the user's own, each alone, before anything is built or sharded.

    Raises:
        UserError: a part gives what the decoder cannot use.
    """
    if isinstance(config.model, ModelSection):
        model, device, dtype = config.model, world.device, DTYPES[config.training.dtype]
        documents, seq = config.data.document_attention, config.data.sequence_length or 16
        world.agree(
            lambda: try_parts(model, seed=config.run.seed, seq=seq, documents=documents, dtype=dtype, device=device)
        )


def examine_foreign(config: RunConfig, world: World, model: nn.Module, console: Console) -> None:
    """Say once what a model of transformers does without here, and try whether it can be trained on these batches.

    Raises:
        UserError: it looks ahead, or documents are to be kept apart and it cannot.
    """
    if not isinstance(config.model, ForeignModelSection):
        return
    from weft.models.foreign import examine

    name = type(model).__name__.removeprefix("FSDP")
    for line in notices(config.model, name):
        console.line(line)
    lacks = examine(model, documents=config.data.document_attention or config.data.packing == "best_fit")

    def tell() -> None:
        if lacks is not None:
            raise UserError(f"model: {name}: {lacks}")

    world.agree(tell)


def nothing_to_do(run: RunDirectory, step: int, steps: int) -> str:
    """What a run says that has made all its steps. Nothing is written: the saved config stays that of its training."""
    where = "finished" if step == steps else "past its length"
    return (
        f"{run.path}: this run is {where}: it has made {step:,} steps, and its length is {steps:,}; nothing to do; "
        "lengthen it (training.steps), or --fresh starts over"
    )


def wire(
    config: RunConfig,
    world: World,
    run: RunDirectory,
    data: Data,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    console: Console,
    *,
    compress: PowerSGD | None = None,
    loop: Callable[..., Loop] = Loop,
    recorder: Callable[..., Recorder] = Recorder,
) -> Loop:
    """Put the parts together, and write down what this run is."""
    world.agree(lambda: run.write_config(config), only_first=True)
    tokenizer = run.tokenizer()
    records = recorder(config, world, run, data.length, model, int(state["step"]), data.digests, console, data.plan)
    schedule = load_class(config.schedule, "schedule")(data.length.steps, **config.schedule.arguments)
    prompts = config.samples.prompts
    if prompts and tokenizer is None:
        raise UserError("samples.prompts: there is no tokenizer to read them with; set tokenizer")
    return loop(
        config=config,
        length=data.length,
        world=world,
        directory=run.path,
        source=data.source,
        held_out=data.held_out,
        bytes_per_token=data.bytes_per_token,
        model=model,
        objective=load_class(config.objective, "objective")(**config.objective.arguments),
        optimizer=optimizer,
        schedule=schedule,
        recorder=records,
        prompts=[tokenizer.prompt(text) for text in prompts] if tokenizer else [],
        stop_ids=frozenset([tokenizer.eod_id]) if tokenizer else frozenset(),
        decode=tokenizer.decode if tokenizer else None,
        scale=LossScale(config.training, state),
        compress=compress,
    )
