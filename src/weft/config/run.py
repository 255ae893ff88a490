"""Defines `RunConfig`, the configuration of a run, which reads, checks and completes a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from pydantic import BaseModel, Discriminator, Field, PrivateAttr, Tag

from weft.config.adapter import AdapterSection
from weft.config.adapter_source import resolve_adapter
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
from weft.config.tree import Node
from weft.config.watch import WatchSection
from weft.errors import ConfigError, Problem


class RunSection(Section):
    """Name, directory and random seed of the run. The run directory is `<directory>/<name>`."""

    name: str | None = None
    """Name of the run. Default: the file's name without `.yaml`."""
    directory: Folder = "runs"
    """Parent folder of run directories."""
    seed: int = Field(0, ge=0)
    """Seed of the initial weights, of the sample order, of dropout, of generated text and of gradient compression."""


class ObjectiveSection(Component):
    """The training loss. Each file in `weft/objectives/` defines one built-in objective."""

    kind: ClassVar[str] = "objective"

    type: str = "pretrain"
    """Name of a built-in objective, or a custom class `module:Class`."""


class OptimizerSection(Component):
    """The optimizer. All keys except `type`, `no_decay`, `lr_multipliers` and `layer_decay` are arguments of the
    optimizer's class. `weft/optim/` defines the built-in optimizers.
    """

    kind: ClassVar[str] = "optimizer"

    type: str = "adamw"
    """Name of a built-in optimizer, or a custom class `module:Class`."""
    no_decay: list[Literal["norm", "bias", "embedding"]] = Field(default=["norm", "bias"])
    """Parameters without weight decay. `norm`: all parameters of norms; `bias`: all other biases; `embedding`:
    embedding tables, and an output head that is tied to one.
    """
    lr_multipliers: dict[str, Annotated[float, Gt(0)]] = Field(default={})
    """Factors of the learning rate for parameters by patterns of their names, such as `{lm_head: 0.1}`. Patterns are
    those of `training.freeze`. If several patterns match a parameter, the last one applies.
    """
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Layer-wise decay of the learning rate: with N layers, layer i (counted from 0) has the learning rate times
    `layer_decay^(N - i)`, embeddings times `layer_decay^(N + 1)`, and the final norm and the head the full learning
    rate. Default: no decay.
    """


class ScheduleSection(Component):
    """The learning rate schedule. Each file in `weft/optim/schedules/` defines one built-in schedule."""

    kind: ClassVar[str] = "schedule"

    type: str = "cosine"
    """Name of a built-in schedule, or a custom class `module:Class`."""


class LocalSection(Section):
    """Quick checkpoints in the memory or on a disk of each host, between those in the run directory.

    A run that resumes takes the newest checkpoint that survives, of both places. With `copies`, local checkpoints also
    survive the loss of a host. The last two are kept until the run ends or stops.
    """

    seconds: float | None = Field(None, gt=0)
    """Seconds between local checkpoints. Default: 120."""
    steps: int | None = Field(None, ge=1)
    """Number of steps between local checkpoints, in place of `seconds`."""
    directory: str | None = None
    """The folder for local checkpoints of all runs, on each host. Environment variables such as `$TMPDIR` are those of
    the host. Default: `/dev/shm` (the host's memory), or the temporary folder.
    """
    copies: int = Field(1, ge=0)
    """Number of other hosts that keep a copy of what a host saves. So many hosts can be lost at once. Each host keeps
    the files of its own ranks and `copies` times as much. It has no effect on one host.
    """


class CheckpointSection(Section):
    """When to save checkpoints, and which ones to keep. The last step is always saved."""

    mode: Literal["sync", "async"] = "sync"
    """`async`: copy weights and optimizer state to the host's memory, which needs as many bytes on each rank as the
    rank saves, and write the checkpoint while the training goes on. `sync`: the training waits.
    """
    local: LocalSection | None = None
    """Quick local checkpoints. Default: none."""
    every: int | None = Field(None, ge=1)
    """Number of steps between checkpoints. Default: a tenth of the run's steps."""
    keep_last: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept."""
    keep_every: int | None = Field(None, ge=1)
    """Checkpoints whose step is a multiple of this number are never deleted. Default: none; only the newest `keep_last`
    checkpoints are kept.
    """
    keep_best: int = Field(0, ge=0)
    """Number of checkpoints that are kept because their validation is best by `best_metric`. `checkpoints/best` in the
    run directory is a link to the best one.
    """
    remote: str | None = None
    """URL of an object store, such as `s3://bucket/prefix` (any that fsspec knows), to which each checkpoint is copied
    beside the training, with as many of them kept. A run whose directory is lost continues from there. Default: none.
    """
    best_metric: str = "validation_loss"
    """Metric of validations by which checkpoints are compared, as in metrics.jsonl."""
    best_mode: Literal["min", "max"] = "min"
    """`min`: lower values of `best_metric` are better. `max`: higher values are, as of accuracies and rewards."""


class CallbackSection(Component):
    """A callback: code that runs at events of the training, such as a step, a validation or a checkpoint.

    Each file in `weft/train/callbacks/` defines one built-in callback.
    """

    kind: ClassVar[str] = "callback"

    type: str
    """Name of a built-in callback, or a custom class `module:Class`."""


class MetricSection(Component):
    """A custom metric, which is computed at each logged step for `metrics.jsonl` and the trackers."""

    kind: ClassVar[str] = "metric"

    type: str
    """The class of the metric, as `module:Class`."""


class TrackerSection(Component):
    """An experiment tracker. Each file in `weft/observe/trackers/` defines one built-in tracker."""

    kind: ClassVar[str] = "tracker"

    type: str
    """Name of a built-in tracker, or a custom class `module:Class`."""


class LogSection(Section):
    """Which metrics are logged, and where. `metrics.jsonl` is always written."""

    every: int = Field(1, ge=1)
    """Number of steps between two lines of metrics."""
    trackers: list[str | TrackerSection] = Field(default=["tensorboard"])
    """Trackers that receive the metrics. Each item is `tensorboard`, `wandb`, `mlflow` or `module:Class`, or
    `{type: ..., ...}` with the arguments of the tracker.
    """
    metrics: list[MetricSection] = Field(default=[])
    """Custom metrics: `module:Class`, or `{type: module:Class, ...}` with the arguments of the class."""


def _model_tag(model: Any) -> str:
    chosen = model.get("type", "decoder") if isinstance(model, dict) else getattr(model, "type", "decoder")
    return chosen if chosen in ("decoder", "hf") else "custom" if isinstance(chosen, str) else "decoder"


def _default(section: type[BaseModel]) -> Any:
    """Returns a pydantic field for an optional section. If a file omits the section, its keys have their defaults."""
    return Field(default_factory=section)


class RunConfig(Section):
    """The checked and completed configuration of a run. The result of a run depends only on this configuration and on
    the data.
    """

    run: RunSection = _default(RunSection)
    model: Annotated[
        Annotated[ModelSection, Tag("decoder")]
        | Annotated[TransformersModelSection, Tag("hf")]
        | Annotated[CustomModelSection, Tag("custom")],
        Discriminator(_model_tag),
    ]
    tokenizer: Folder | None = None
    """Folder of the tokenizer, with a `tokenizer.json`. The tokenizer is copied into the run directory. Default: no
    tokenizer; then the trained model cannot generate text.
    """
    data: DataSection = _default(DataSection)
    objective: ObjectiveSection = _default(ObjectiveSection)
    adapter: AdapterSection | None = None
    """Low-rank adapter (LoRA) to train in place of the model's weights. Default: none; all weights are trained."""
    optimizer: OptimizerSection = _default(OptimizerSection)
    schedule: ScheduleSection = _default(ScheduleSection)
    training: TrainingSection = _default(TrainingSection)
    validation: ValidationSection = _default(ValidationSection)
    samples: SamplesSection = _default(SamplesSection)
    parallel: ParallelSection = _default(ParallelSection)
    checkpoint: CheckpointSection = _default(CheckpointSection)
    callbacks: list[CallbackSection] = Field(default=[])
    """Callbacks, which every rank calls in the order of this list. Each item is `early_stopping`, `ema`, `lr_monitor`
    or `module:Class`, or `{type: ..., ...}` with the arguments of the callback.
    """
    log: LogSection = _default(LogSection)
    watch: WatchSection = _default(WatchSection)

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _lacks: list[Problem] = PrivateAttr(default_factory=list)

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        check_data: bool = True,
        ranks: int | None = None,
        for_fit: bool = False,
    ) -> RunConfig:
        """Reads, merges, checks and completes a YAML file.

        >>> weft.RunConfig.load("run.yaml", ["optimizer.lr=1e-3"]).optimizer.arguments["lr"]
        0.001

        Args:
            path: the YAML file.
            overrides: `key.path=value` with a YAML value; they take precedence over the file.
            check_data: whether the headers of the tokenizer and of the token stores are read and checked too.
            ranks: world size for which the mesh is checked. Default: the world size that torchrun set, otherwise the
                smallest that fits the mesh.
            for_fit: whether the training data and the length of the run are required. `Trainer.fit` requires them;
                `Trainer.step` does not.

        Raises:
            ConfigError: the configuration has problems. All are listed, ordered by file and line; each has file, line,
                key and remedy.
        """
        problems: list[Problem] = []
        tree, files = read_tree(Path(path), overrides, problems)
        if tree is None:
            raise ConfigError(_in_order(problems, files))
        tree, known = resolve_model(_with_auto(tree), problems)
        tree = resolve_adapter(tree, problems)
        draft = Draft(tree, problems, cls, model_known=known, ranks=ranks or launched_ranks())
        draft.check()
        lacks = apply_rules(draft, check_data=check_data) if draft.complete else []
        if for_fit:
            draft.problems += lacks
        if draft.problems:
            raise ConfigError(_in_order(draft.problems, files))
        config: RunConfig = draft.finish()
        config._origins.update(draft.origins)
        config._lacks.extend(lacks)
        return config

    def raise_unless_complete(self) -> None:
        """Raises ConfigError if the training data or the length of the run are missing, which `Trainer.fit` needs."""
        if self._lacks:
            raise ConfigError(self._lacks)

    def __eq__(self, other: object) -> bool:
        """Whether two configurations have equal values; the origins of the values are not compared."""
        return self.__dict__ == other.__dict__ if isinstance(other, RunConfig) else NotImplemented

    @property
    def generates(self) -> bool:
        """Whether the model generates the training data from prompts, as the objective `grpo` needs."""
        return isinstance(self.data.train, str) and "updates_per_rollout" in self.objective.arguments

    @property
    def run_directory(self) -> Path:
        """The run directory, `<run.directory>/<run.name>`."""
        return Path(self.run.directory) / (self.run.name or "run")

    @property
    def origins(self) -> dict[str, str]:
        """Origin of each value by dotted key: `file:line`, `preset llama-tiny`, `default`, `command line`, ..."""
        return self._origins

    def as_dict(self) -> dict[str, Any]:
        """Returns the resolved configuration as plain data, with the YAML file's keys."""
        return self.model_dump(mode="json", by_alias=True)


def _with_auto(tree: Node) -> Node:
    """Writes `parallel: auto` out as `parallel: {auto: true}`."""
    parallel = tree.get("parallel")
    if parallel is None or parallel.value != "auto":
        return tree
    section = Node({"auto": Node(True, parallel.file, parallel.line)}, parallel.file, parallel.line)
    return Node({**tree.value, "parallel": section}, tree.file, tree.line)


def _in_order(problems: list[Problem], files: list[str]) -> list[Problem]:
    """Sorts problems by file (the main file first) and line, and removes duplicates."""
    place = {file: number for number, file in enumerate(files)}
    return sorted(dict.fromkeys(problems), key=lambda p: (place.get(p.file or "", len(files)), p.line or 0))
