"""The sections of a run's YAML file. `RunConfig` is these and `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from weft.config.data import DataSection
from weft.config.foreign import ForeignModelSection
from weft.config.mesh import ParallelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.parts import ObjectiveSection, OptimizerSection, ScheduleSection
from weft.config.section import Component, Section
from weft.config.training import SamplesSection, TrainingSection, ValidationSection


class RunSection(Section):
    """Names the run directory, `<directory>/<name>`, and seeds everything random."""

    name: str | None = Field(None, description="default: the file's name without .yaml")
    directory: str = Field("runs", description="where run directories are kept")
    seed: int = Field(0, ge=0, description="of weights, order of samples, dropout")


class CheckpointSection(Section):
    """When to save, and what to keep. The last step is always saved."""

    every: int | None = Field(None, ge=1, description="steps between; default: a tenth of the run")
    keep_last: int = Field(2, ge=1, description="keep the newest so many")
    keep_every: int | None = Field(None, ge=1, description="and, for good, those of steps divisible by this")


class LogSection(Section):
    """What is written down while training. `metrics.jsonl` always is."""

    every: int = Field(1, ge=1, description="steps between two lines of metrics")
    trackers: list[str | Component] = Field(
        default=["tensorboard"],
        description="tensorboard, wandb, mlflow, or module:Class; or {type: ..., its arguments}",
    )


class RunSections(Section):
    """All sections of a run, and where their values came from."""

    run: RunSection = RunSection()
    model: ModelSection | ForeignModelSection | CustomModelSection
    tokenizer: str | None = Field(
        None, description="folder with a tokenizer.json, copied into the run; without it the model can write no text"
    )
    data: DataSection
    objective: ObjectiveSection = ObjectiveSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    training: TrainingSection
    validation: ValidationSection = ValidationSection()
    samples: SamplesSection = SamplesSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Equal if all sections are, wherever their values came from."""
        if not isinstance(other, RunSections):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in RunSections.model_fields)

    @property
    def run_directory(self) -> Path:
        """`<run.directory>/<run.name>`."""
        return Path(self.run.directory) / (self.run.name or "run")

    @property
    def origins(self) -> dict[str, str]:
        """Where each value came from: dotted key -> `file:line`, `preset llama-tiny`, `default`, `command line`, ..."""
        return self._origins

    def as_dict(self) -> dict[str, Any]:
        """The resolved whole as plain data, in the YAML file's own keys."""
        return self.model_dump(mode="json", by_alias=True)
