"""The table of pipeline stages of a plan: where stages begin, and which parameters they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from weft.errors import UserError
from weft.planner.parallelize.runtime import matches
from weft.planner.parallelize.stage_follow import spanning_modules

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # schedules with two stages on a rank: one from the front, one from the end
ONE_STAGE = ("GPipe", "1F1B")  # schedules with one stage on a rank
SEVERAL_STAGES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Stages:
    """The stages of a plan.

    Attributes:
        pp: number of ranks of the pipeline axis.
        begins: names of the modules with whose call stages begin; the first is "".
        owns: for each stage, names of modules and parameters: the stage has their parameters. `h.0..3` stands for
            `h.0`, `h.1`, `h.2` and `h.3`.
        schedule: name of a schedule of `torch.distributed.pipelining`.
        micro_batches: number of micro-batches of a call.
    """

    pp: int
    begins: Sequence[str]
    owns: Sequence[Sequence[str]]
    schedule: str
    micro_batches: int

    def rank_of(self, stage: int) -> int:
        """Returns the rank of the axis `pp` that runs a stage."""
        if self.schedule in V_SHAPED:
            return min(stage, 2 * self.pp - 1 - stage)
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages that a rank of the axis `pp` runs."""
        return [stage for stage in range(len(self.begins)) if self.rank_of(stage) == rank]

    def ranks_of(self, name: str) -> list[int]:
        """Returns the ranks of the axis `pp` that have a parameter: the first, if no stage names the parameter."""
        owners = [stage for stage, names in enumerate(self.owns) if any(covers(one, name) for one in names)]
        return sorted({self.rank_of(stage) for stage in owners}) or [0]

    def check(self, model: nn.Module, recompute: Sequence[str]) -> None:
        """Raises UserError if the stages do not fit the ranks, the schedule, or the names of the module.

        Args:
            recompute: patterns of names of modules that are computed again in backward.
        """
        count, known = len(self.begins), (*ONE_STAGE, *SEVERAL_STAGES, *V_SHAPED)
        if self.schedule not in known:
            raise UserError(f"plan: schedule {self.schedule!r} is not supported; use one of {', '.join(known)}")
        fits = count % self.pp == 0 and count // self.pp > 1
        each = "a multiple of pp, more than pp"
        if self.schedule in (*ONE_STAGE, *V_SHAPED):
            stages = self.pp * (2 if self.schedule in V_SHAPED else 1)
            fits, each = count == stages, str(stages)
        if not fits:
            raise UserError(
                f"plan: {count} stages on {self.pp} pipeline ranks do not fit the schedule {self.schedule}, which "
                f"needs {each}; change STAGES or SCHEDULE"
            )
        if not fits_schedule(self.schedule, self.pp, count, self.micro_batches):
            raise UserError(f"plan: {self.micro_batches} micro-batches do not fit {self.schedule}; give {2 * count}")
        if self.begins[0]:
            raise UserError(f'plan: the first stage begins with "", the module itself, and not {self.begins[0]!r}')
        self._check_names(model, recompute)

    def _check_names(self, model: nn.Module, recompute: Sequence[str]) -> None:
        modules = {name for name, _ in model.named_modules()}
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        kind, around = type(model).__name__, spanning_modules(self.begins)
        for begin, names in zip(self.begins, self.owns, strict=True):
            if begin not in modules:
                raise UserError(f"plan: stages: {begin!r} is no module of {kind}; name a module that the forward calls")
            for name in names:
                if not any(covers(name, one) for one in parameters):
                    raise UserError(f"plan: stages: {name!r} is no parameter, or module with parameters, of {kind}")
        for name in sorted(around & modules):
            if any(matches(name, pattern) for pattern in recompute):
                raise UserError(
                    f"plan: recompute: a stage begins within {name or kind!r}, which cannot be computed again as one; "
                    "recompute modules within it"
                )


def fits_schedule(schedule: str, pp: int, stages: int, micro_batches: int) -> bool:
    """Whether a schedule runs a number of micro-batches."""
    if schedule in ("1F1B", "DualPipeV"):
        return micro_batches >= stages
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return micro_batches % max(1, micro_batches // pp) == 0
    return micro_batches >= 1


def stages_of(pp: int, table: Sequence[Any], schedule: str, micro_batches: int) -> Stages:
    """Returns the stages of a plan's table: (module with whose call a stage begins, what the stage has), ..."""
    return Stages(pp, [begin for begin, _ in table], [names for _, names in table], schedule, micro_batches)


def covers(entry: str, name: str) -> bool:
    """Whether a parameter is in what an entry names: `h.0..3` covers `h.2.weight`, and `head` covers `head.weight`."""
    words = [] if entry == "" else entry.replace("..", "\0").split(".")
    parts = name.split(".")
    if len(words) > len(parts):
        return False
    for word, part in zip(words, parts, strict=False):
        first, found, last = word.partition("\0")
        if found and first.isdigit() and last.isdigit():
            if not (part.isdigit() and int(first) <= int(part) <= int(last)):
                return False
        elif word != part:
            return False
    return True
