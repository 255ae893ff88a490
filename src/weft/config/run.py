"""`RunConfig`: one run's YAML file, read, checked and completed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, PrivateAttr, Tag

from weft.config.data import DataSection
from weft.config.draft import Draft
from weft.config.inherit import read_tree
from weft.config.mesh import ParallelSection, launched_ranks
from weft.config.model import CustomModelSection, ModelSection
from weft.config.model_source import resolve_model
from weft.config.rules import apply_rules
from weft.config.section import Component, Folder, Section
from weft.config.training import SamplesSection, TrainingSection, ValidationSection
from weft.config.transformers_model import TransformersModelSection
from weft.errors import ConfigError, Problem


class RunSection(Section):
    """Names the run directory, `<directory>/<name>`, and seeds all randomness."""

    name: str | None = None
    """Name of the run. Default: the file's name without `.yaml`."""
    directory: Folder = "runs"
    """Parent folder of run directories."""
    seed: int = Field(0, ge=0)
    """Seed of initial weights, sample order and dropout."""


class ObjectiveSection(Component):
    """The training loss. Built-in objectives are the files of `weft/objectives/`."""

    kind: ClassVar[str] = "objective"

    type: str = "pretrain"


class OptimizerSection(Component):
    """The optimizer. Built-in optimizers are the files of `weft/optim/`; the other keys are their arguments."""

    kind: ClassVar[str] = "optimizer"

    type: str = "adamw"
    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(default=["norm", "bias"])
    """Parameter roles without weight decay."""


class ScheduleSection(Component):
    """The learning rate schedule. Built-in schedules are the files of `weft/optim/schedules/`."""

    kind: ClassVar[str] = "schedule"

    type: str = "cosine"


class CheckpointSection(Section):
    """When to save checkpoints, and which ones to keep. The last step is always saved."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints. Default: a tenth of the run."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int | None = Field(None, ge=1)
    """Steps whose checkpoints are never deleted: the multiples of this number."""


class CallbackSection(Component):
    """An action at events of the run. Built-in callbacks are the files of `weft/train/callbacks/`."""

    kind: ClassVar[str] = "callback"


class MetricSection(Component):
    """A custom metric of each step, `module:Class`, for `metrics.jsonl` and the trackers."""

    kind: ClassVar[str] = "metric"


class TrackerSection(Component):
    """An experiment tracker. Built-in trackers are the files of `weft/observe/trackers/`."""

    kind: ClassVar[str] = "tracker"


class LogSection(Section):
    """Metrics and where they go. `metrics.jsonl` is always written."""

    every: int = Field(1, ge=1)
    """Steps between two lines of metrics."""
    trackers: list[str | TrackerSection] = Field(default=["tensorboard"])
    """Trackers that receive the metrics: `tensorboard`, `wandb`, `mlflow` or `module:Class`; `{type: ..., ...}` gives
    one its arguments.
    """
    metrics: list[MetricSection] = Field(default=[])
    """Custom metrics of a step: `module:Class`, or `{type: ..., ...}` with its arguments."""


def _model_tag(model: Any) -> str:
    chosen = model.get("type", "decoder") if isinstance(model, dict) else getattr(model, "type", "decoder")
    return chosen if chosen in ("decoder", "hf") else "custom" if isinstance(chosen, str) else "decoder"


def _default(section: type[Section]) -> Any:
    """Returns the default of a section that may be omitted: all its own defaults."""
    return Field(default_factory=section)


class RunConfig(Section):
    """A checked and completed configuration of a run. A run is a function of this and of the data."""

    run: RunSection = _default(RunSection)
    model: Annotated[
        Annotated[ModelSection, Tag("decoder")]
        | Annotated[TransformersModelSection, Tag("hf")]
        | Annotated[CustomModelSection, Tag("custom")],
        Discriminator(_model_tag),
    ]
    tokenizer: Folder | None = None
    """Folder with a `tokenizer.json`, which is copied into the run directory. Default: none, and the model generates no
    text.
    """
    data: DataSection
    objective: ObjectiveSection = _default(ObjectiveSection)
    optimizer: OptimizerSection = _default(OptimizerSection)
    schedule: ScheduleSection = _default(ScheduleSection)
    training: TrainingSection
    validation: ValidationSection = _default(ValidationSection)
    samples: SamplesSection = _default(SamplesSection)
    parallel: ParallelSection = _default(ParallelSection)
    checkpoint: CheckpointSection = _default(CheckpointSection)
    callbacks: list[CallbackSection] = Field(default=[])
    """Callbacks, which every rank calls in this order: `early_stopping`, `ema`, `lr_monitor` or `module:Class`; `{type:
    ..., ...}` gives one its arguments.
    """
    log: LogSection = _default(LogSection)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), *, check_data: bool = True, ranks: int | None = None
    ) -> RunConfig:
        """Reads, merges, checks and completes a YAML file.

        >>> weft.RunConfig.load("run.yaml", ["optimizer.lr=1e-3"]).optimizer.arguments["lr"]
        0.001

        Args:
            path: the file; `extends`, presets and defaults are filled in.
            overrides: `key.path=value` with a YAML value; they take precedence over the file.
            check_data: also read the headers of the tokenizer and of the token stores.
            ranks: world size for which the mesh is checked; default: torchrun's, else the smallest that fits the mesh.

        Raises:
            ConfigError: with every problem, ordered by file and line; each has file, line, key and remedy.
        """
        problems: list[Problem] = []
        tree, files = read_tree(Path(path), overrides, problems)
        if tree is None:
            raise ConfigError(_in_order(problems, files))
        tree, known = resolve_model(tree, problems)
        draft = Draft(tree, problems, cls, model_known=known, ranks=ranks or launched_ranks())
        draft.check()
        if draft.complete:
            apply_rules(draft, check_data=check_data)
        if draft.problems:
            raise ConfigError(_in_order(draft.problems, files))
        config: RunConfig = draft.finish()
        config._origins.update(draft.origins)
        return config

    def __eq__(self, other: object) -> bool:
        """Compares the sections, not where their values came from."""
        return self.__dict__ == other.__dict__ if isinstance(other, RunConfig) else NotImplemented

    @property
    def run_directory(self) -> Path:
        """`<run.directory>/<run.name>`."""
        return Path(self.run.directory) / (self.run.name or "run")

    @property
    def origins(self) -> dict[str, str]:
        """Source of each value: dotted key -> `file:line`, `preset llama-tiny`, `default`, `command line`, ..."""
        return self._origins

    def as_dict(self) -> dict[str, Any]:
        """Returns the resolved configuration as plain data, with the YAML file's keys."""
        return self.model_dump(mode="json", by_alias=True)


def _in_order(problems: list[Problem], files: list[str]) -> list[Problem]:
    """Sorts problems by file (the main one first) and line, without duplicates."""
    place = {file: number for number, file in enumerate(files)}
    return sorted(dict.fromkeys(problems), key=lambda p: (place.get(p.file or "", len(files)), p.line or 0))
