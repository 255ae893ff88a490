"""The sections of a run's YAML file. `RunConfig` is these and `load`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, PrivateAttr, Tag

from weft.config.component_sections import (
    CallbackSection,
    MetricSection,
    ObjectiveSection,
    OptimizerSection,
    ScheduleSection,
    TrackerSection,
)
from weft.config.data import DataSection
from weft.config.mesh import ParallelSection
from weft.config.model import CustomModelSection, ModelSection
from weft.config.section import Folder, Section
from weft.config.training import SamplesSection, TrainingSection, ValidationSection
from weft.config.transformers_model import TransformersModelSection


class RunSection(Section):
    """Names the run directory, `<directory>/<name>`, and seeds everything random."""

    name: str | None = Field(None, description="default: the file's name without .yaml")
    directory: Folder = Field("runs", description="where run directories are kept")
    seed: int = Field(0, ge=0, description="of weights, order of samples, dropout")


class CheckpointSection(Section):
    """When to save, and what to keep. The last step is always saved."""

    every: int | None = Field(None, ge=1, description="steps between; default: a tenth of the run")
    keep_last: int = Field(2, ge=1, description="keep the newest so many")
    keep_every: int | None = Field(None, ge=1, description="and, for good, those of steps divisible by this")


class LogSection(Section):
    """What is written down while training. `metrics.jsonl` always is."""

    every: int = Field(1, ge=1, description="steps between two lines of metrics")
    trackers: list[str | TrackerSection] = Field(
        default=["tensorboard"],
        description="tensorboard, wandb, mlflow, or module:Class; or {type: ..., its arguments}",
    )
    metrics: list[MetricSection] = Field(
        default=[], description="further numbers of a step: module:Class, or {type: ..., its arguments}"
    )


def _kind_of_model(model: Any) -> str:
    chosen = model.get("type", "decoder") if isinstance(model, dict) else getattr(model, "type", "decoder")
    return chosen if chosen in ("decoder", "hf") else "own" if isinstance(chosen, str) else "decoder"


class RunSections(Section):
    """All sections of a run, and where their values came from."""

    run: RunSection = Field(default_factory=lambda: RunSection())
    model: Annotated[
        Annotated[ModelSection, Tag("decoder")]
        | Annotated[TransformersModelSection, Tag("hf")]
        | Annotated[CustomModelSection, Tag("own")],
        Discriminator(_kind_of_model),
    ]
    tokenizer: Folder | None = Field(
        None, description="folder with a tokenizer.json, copied into the run; without it the model can write no text"
    )
    data: DataSection
    objective: ObjectiveSection = Field(default_factory=lambda: ObjectiveSection())
    optimizer: OptimizerSection = Field(default_factory=lambda: OptimizerSection())
    schedule: ScheduleSection = Field(default_factory=lambda: ScheduleSection())
    training: TrainingSection
    validation: ValidationSection = Field(default_factory=lambda: ValidationSection())
    samples: SamplesSection = Field(default_factory=lambda: SamplesSection())
    parallel: ParallelSection = Field(default_factory=lambda: ParallelSection())
    checkpoint: CheckpointSection = Field(default_factory=lambda: CheckpointSection())
    callbacks: list[CallbackSection] = Field(
        default=[], description="early_stopping, ema, lr_monitor, or module:Class; called in this order on every rank"
    )
    log: LogSection = Field(default_factory=lambda: LogSection())

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
