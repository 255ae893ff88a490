"""What ranks do in the tests of `Trainer.step`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from matrix import FEWER_STEPS
from matrix_parts import Sequences

from weft.checkpoint.load import resolve
from weft.config.run import RunConfig
from weft.data.batches.batch import Batch
from weft.data.batches.loader import BatchSource
from weft.errors import UserError
from weft.train.trainer import Trainer

KEYS = ("tokens", "labels", "weight", "positions", "segments")


def global_batches(config: RunConfig, sequences: int, masked: bool = False) -> BatchSource:
    """The batches that `fit` reads from the matrix' data, whole."""
    return BatchSource(Sequences(masked=masked), batch_size=sequences, seed=config.run.seed)


def as_dict(batch: Batch, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    """The rows of a batch as a user passes them."""
    return {key: value[rows] for key in KEYS if (value := getattr(batch, key)) is not None}


def own_loop(config: RunConfig, form: Any, until: int, sequences: int, fresh: bool = True) -> list[dict[str, float]]:
    """Steps by `Trainer.step` with the batches of `fit`; the metrics of each."""
    source, found = global_batches(config, sequences), []
    with Trainer(config, batches=form, fresh=fresh) as trainer:
        mesh, each = trainer.mesh, sequences // trainer.mesh.dp_size
        rows = slice(None) if form == "global" else slice(mesh.dp_rank * each, (mesh.dp_rank + 1) * each)
        for step in range(trainer.resume(), until):
            found.append(trainer.step(as_dict(source.batch(step), rows)))
    assert trainer.step_number == until
    return found


def several(files: dict[str, Path], sequences: int) -> dict[str, Any]:
    """On each rank: a run by `fit`, and the same by `step`, in both forms and resumed; then batches that are wrong."""
    configs = {name: RunConfig.load(file) for name, file in files.items()}
    Trainer(configs["fit"], fresh=True).fit()
    metrics = {"global": own_loop(configs["global"], "global", FEWER_STEPS, sequences)}
    own_loop(configs["local"], "local", 1, sequences)  # stops here
    metrics["local"] = own_loop(configs["local"], "local", FEWER_STEPS, sequences, fresh=False)
    ends = ended(configs["refused"], as_dict(global_batches(configs["refused"], sequences).batch(0)))
    return metrics | {"refused": refused(configs["refused"], sequences), "ends": ends}


def ended(config: RunConfig, batch: dict[str, torch.Tensor]) -> list[Any]:
    """What happens on each rank if only rank 1 gets signals: after which steps, and what is saved."""
    found: list[Any] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        trainer = Trainer(config, batches="global", fresh=True)
        handle = trainer.optimizer.register_step_pre_hook(
            lambda *_, number=number, rank=trainer.mesh.rank: os.kill(os.getpid(), number) if rank == 1 else None
        )
        try:
            with trainer:
                trainer.step(batch)
                handle.remove()
                found.append(trainer.stopping)
                trainer.step(batch)
                found.append(trainer.stopping)
                trainer.step(batch)
        except (KeyboardInterrupt, SystemExit) as end:
            found += [type(end).__name__, trainer.step_number, resolve(config.run_directory).name]
    return found


def refused(config: RunConfig, sequences: int) -> dict[str, str]:
    """What each wrong batch is told, on a mesh of several data ranks; a good one is trained on after each."""
    good, said = as_dict(global_batches(config, sequences).batch(0)), {}
    for form in ("global", "local"):
        with Trainer(config, batches=form, fresh=True) as trainer:
            mesh = trainer.mesh
            assert mesh.size == mesh.pp_size * mesh.dp_size * mesh.cp_size * mesh.tp_size
            count = torch.ones(1)
            torch.distributed.all_reduce(count, group=mesh.dp_group)
            assert count.item() == mesh.dp_size
            wrong = {
                "one rank": {**good, "tokens": good["tokens"] - 300 * (mesh.rank == 1)},
                "another": {key: value.roll(mesh.rank, 0) for key, value in good.items()},
                "positions": {**good, "positions": good["positions"] + mesh.rank},
                "length": {key: value[:, :31] for key, value in good.items()},
                "sizes": {key: value[: 2 + 2 * (mesh.dp_rank == 1)] for key, value in good.items()},
            }
            for name, batch in wrong.items():
                try:
                    trainer.step(batch)
                    said[f"{form}, {name}"] = "nothing"
                except UserError as error:
                    said[f"{form}, {name}"] = str(error)
                assert trainer.step(good)["step"] == trainer.step_number
    return said
