"""Evaluates models on benchmark tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from weft.config.suggest import did_you_mean
from weft.errors import UserError
from weft.evaluation.settings import Settings
from weft.observe.console import Console

DRAWS = 1000  # number of bootstrap samples for standard errors without a formula


def find_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> Any:
    """Returns a `TaskManager` (a class of the harness) that contains all `tasks`.

    The manager contains the harness's own tasks only if `tasks` needs them, because indexing these tasks takes seconds.

    Args:
        tasks: names of tasks that the harness or the YAML files in `include_path` define.
        include_path: folder with custom tasks.

    Raises:
        UserError: the harness is not installed, the folder does not exist, or a task is unknown.
    """
    if find_spec("lm_eval") is None:
        raise UserError("`tasks` needs EleutherAI's lm-evaluation-harness; run `pip install 'weft-train[eval]'`")
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError("`tasks` is empty; set it to one or several tasks, separated by commas")
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError("no such folder of tasks; set `include_path` to a folder with YAML files", include_path)
    manager = None
    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_subtasks):  # a group can contain tasks of the harness
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in tasks:
        if name not in manager.all_tasks:
            where = "" if include_path is None else f" or in {include_path}"
            hint = did_you_mean(name, manager.all_tasks) or "; list the harness's tasks with `lm-eval ls tasks`"
            raise UserError(f"there is no task {name!r} in the harness{where}{hint}")
    return manager


def evaluate_tasks(
    model: nn.Module, tasks: Sequence[str], manager: Any, settings: Settings, console: Console | None = None
) -> dict[str, Any]:
    """Evaluates a model on tasks.

    Args:
        model: a module that `weft.load_model` returned.
        tasks: names of the tasks.
        manager: the TaskManager that `find_tasks` returned.

    Returns:
        For each task and group, a dict with `questions` (number of questions), `shots` (number of examples per
        question), `version` and `scores`. Each score has `metric`, `filter` (which the harness applied to the answers),
        `value` and `stderr` (the standard error, or None).

    Raises:
        UserError: the model has no tokenizer, or a task cannot be built.
    """
    if settings.tokenizer is None:
        raise UserError("tasks need a tokenizer, but this model has none; set `tokenizer`")
    import lm_eval

    from weft.data.conversations.template import template_folder
    from weft.data.tokenizers.tokenizer import Tokenizer
    from weft.evaluation.harness import WeftLM

    tokenizer = Tokenizer.load(settings.tokenizer)
    folder = tokenizer.path if tokenizer.path.is_dir() else tokenizer.path.parent
    templates = template_folder(settings.adapter, folder)
    lm = WeftLM(model, tokenizer, batch_size=settings.batch_size, console=console, template_folder=templates)
    if settings.apply_chat_template:
        lm.chat_template(True)
    try:
        with (
            contextlib.redirect_stdout(sys.stderr),
            _without_environment(),
        ):  # standard output is reserved for the results
            results: Any = lm_eval.simple_evaluate(
                lm,
                tasks=[*tasks],
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                apply_chat_template=settings.apply_chat_template,
                task_manager=manager,
                bootstrap_iters=DRAWS,
                log_samples=False,
            )
    except UserError:
        raise
    except Exception as error:
        if lm.requested:
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"the harness cannot build {', '.join(tasks)}: {what}; fix the task, or provide the task's data"
        ) from error
    return {task: _scores(task, results) for task in results["results"]}


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """Context in which the harness inspects neither the machine (which takes seconds) nor the git repository."""
    from lm_eval import evaluator

    names = ("get_git_commit_hash", "add_env_info")
    before = {name: getattr(evaluator, name) for name in names}
    for name in names:
        setattr(evaluator, name, lambda *_: None)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(evaluator, name, function)


def _scores(task: str, found: Any) -> dict[str, Any]:
    results, scores = found["results"][task], []
    for key, value in results.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = results.get(f"{metric}_stderr,{filtered}")
        stderr = float(stderr) if isinstance(stderr, int | float) else None
        scores.append({"metric": metric, "filter": filtered, "value": float(value), "stderr": stderr})
    questions = found.get("n-samples", {}).get(task, {}).get("effective")
    shots, version = found.get("n-shot", {}).get(task), found.get("versions", {}).get(task)
    return {"questions": questions, "shots": shots, "version": version, "scores": scores}
