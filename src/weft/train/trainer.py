"""Defines `Trainer`, which trains a model from a checked config."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing

from weft.config.components import make_component
from weft.config.legal_mesh import check_mesh
from weft.config.run import RunConfig
from weft.config.warnings import warnings
from weft.data.raw.pack_sources import pack_sources
from weft.errors import UserError
from weft.formatting import counted
from weft.observe.console import Console
from weft.observe.logs import stop_log
from weft.parallel.fp8 import raise_unless_usable
from weft.parallel.gradients.scaling import LossScale
from weft.parallel.same_run import compare_ranks
from weft.parallel.world import World, start_world
from weft.processes import signal_handler
from weft.train.build import Built, build, components, compressor, restore
from weft.train.data import layout_of, open_data
from weft.train.job import prepare
from weft.train.loop import Loop, Outcome
from weft.train.preflight import check_decoder, check_transformers_model, run_facts
from weft.train.recorder import Recorder
from weft.train.run_directory import RunDirectory, set_aside_damaged
from weft.train.sample_writer import Sampler
from weft.train.stop import StopRequest


class Trainer:
    """Trains the model of a `RunConfig`, as a single process or as one rank of a torchrun job.

    >>> config = weft.RunConfig.load("run.yaml", ["run.name=other", "training.steps=2"])
    >>> outcome = weft.Trainer(config, fresh=True).fit()
    >>> outcome.status, outcome.step
    ('finished', 2)

    Args:
        config: a config that `RunConfig.load` returned.
        fresh: move the content of the run directory aside and start over. Otherwise `fit` resumes from the last
            checkpoint.
        from_last_good: move damaged checkpoints aside, and resume from the last undamaged checkpoint.
        console: the console to print on. By default, only the first rank prints.
    """

    loop: Callable[..., Loop] = Loop  # `weft profile` replaces both
    recorder: Callable[..., Recorder] = Recorder

    def __init__(
        self,
        config: RunConfig,
        *,
        fresh: bool = False,
        from_last_good: bool = False,
        console: Console | None = None,
    ):
        rank = int(os.environ.get("RANK", 0))
        if fresh and from_last_good:
            error = UserError("fresh starts over, but from_last_good resumes; use only one of the two options")
            error.quiet = rank != 0  # raised on all ranks
            raise error
        self.config, self.fresh, self.from_last_good = config, fresh, from_last_good
        self.user_config = config  # equal on all ranks; `weft profile` trains with a variant of it
        self.console = console or Console(prints=rank == 0)

    def fit(self) -> Outcome:
        """Trains to the end of the run, or until a signal or a callback stops the run.

        Returns:
            The outcome. A checkpoint of its last step exists in the run directory.

        Raises:
            UserError: an error that the user can correct: invalid data or sizes, a damaged checkpoint, or a full disk.
        """
        built = self._build()
        with built.cleanup:
            step, steps, world = built.step, built.data.length.steps, built.job.world
            if step >= steps:
                self.console.line(nothing_to_do(built.job.run, step, steps))
                world.close()
                return Outcome("finished", step, None, {})
            stop, loop = StopRequest(), self._start(built)
            with signal_handler(stop.receive, *StopRequest.SIGNALS):  # to the end, so that the report is written
                with closing(loop.recorder):
                    outcome = loop.run(step, stop)
                loop.recorder.ended(outcome.status, outcome.step, outcome.reason)
                world.close()
        stop_log()  # not after an exception, whose traceback is logged
        return outcome

    def _build(self) -> Built:
        """Starts the process group, builds the model and all other components, and restores the last checkpoint."""
        self._pack_sources()
        compare_ranks(lambda: run_facts(self.user_config))
        check_mesh(self.config, int(os.environ.get("WORLD_SIZE", 1)))
        with ExitStack() as cleanup:
            world = start_world(self.config.parallel)
            cleanup.callback(world.abandon)
            self._check_and_warn(world)
            job = prepare(self.config, world, self.console, fresh=self.fresh)
            cleanup.callback(job.run.release)  # this process may train here again
            if self.from_last_good:
                for line in world.agree(lambda: set_aside_damaged(job.run.path), only_first=True):
                    self.console.warning(line)
            check_decoder(job)
            objective, callbacks = world.agree(lambda: components(job.config, world))
            data = world.agree(lambda: open_data(job.config, world, self.console, layout_of(objective, job.config)))
            model, optimizer = build(job.config, world)
            compress = compressor(job, model)
            state = restore(job, model, optimizer, compress, callbacks)
            return Built(job, data, objective, callbacks, model, optimizer, compress, state, cleanup.pop_all())

    def _start(self, built: Built) -> Loop:
        """Opens the files of the run directory and the trackers, and returns the training loop."""
        job, model, world = built.job, built.model, built.job.world
        check_transformers_model(job, model)
        world.agree(lambda: job.run.write_config(job.config), only_first=True)
        schedule = world.agree(lambda: make_component(job.config.schedule, "schedule", built.data.length.steps))
        sampler = world.agree(lambda: Sampler(job, model))
        return self.loop(
            job=job,
            data=built.data,
            model=model,
            objective=built.objective,
            optimizer=built.optimizer,
            schedule=schedule,
            scale=LossScale(job.config.training, built.state),
            recorder=self.recorder(job, built.data, model, built.step),
            callbacks=built.callbacks,
            sampler=sampler,
            compress=built.compress,
            replay=not built.state.get("validated", True),
        )

    def _pack_sources(self) -> None:
        """Packs raw data before ranks communicate. Of the ranks that share a cache, one packs and the others wait."""
        self.config = pack_sources(self.config, self.console)
        self.user_config = self.user_config.model_copy(update={"data": self.config.data})

    def _check_and_warn(self, world: World) -> None:
        """Checks fp8, and prints the warnings of the config, before the run directory is created."""
        if self.config.training.fp8:
            world.agree(lambda: raise_unless_usable(world.device))
        for warning in world.agree(lambda: warnings(self.user_config, world.shape), only_first=True):
            self.console.warning(warning)


def nothing_to_do(run: RunDirectory, step: int, steps: int) -> str:
    """Returns the message for a run that has already made all its steps.

    Args:
        step: number of steps that the run has made.
        steps: length of the run according to its config.
    """
    where = "finished" if step == steps else "past its length"
    return (
        f"{run.path}: this run is {where}: it has made {counted(step, 'step')}, and its length is {steps:,}; "
        "nothing to do; raise training.steps to continue, or use --fresh to start over"
    )
