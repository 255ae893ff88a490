"""Benchmark tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from weft.config.suggest import did_you_mean
from weft.errors import UserError
from weft.evaluation.settings import Settings
from weft.observe.console import Console

if TYPE_CHECKING:
    from weft.evaluation.harness import WeftLM

DRAWS = 1000  # samples of answers from which the harness estimates an error that has no formula


def find_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> Any:
    """The harness's index of tasks, in which all these are. Of its own thousands, which take seconds to read, only if
    one of them is asked for.

    Args:
        tasks: names, as the harness or the YAML files in `include_path` give them.
        include_path: a folder with tasks of one's own.

    Raises:
        UserError: no harness, no such folder, or an unknown task.
    """
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs EleutherAI's lm-evaluation-harness; pip install 'weft-train[eval]'")
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise UserError("--tasks names no task; give one or several, with commas between them")
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError("no such folder of tasks; name one with YAML files in it", include_path)
    manager = None
    if include_path is not None:
        manager = TaskManager(include_path=str(include_path), include_defaults=False)
    if manager is None or not set(tasks) <= set(manager.all_subtasks):  # a group may name tasks of the harness
        manager = TaskManager(include_path=None if include_path is None else str(include_path))
    for name in tasks:
        if name not in manager.all_tasks:
            where = "" if include_path is None else f" nor in {include_path}"
            hint = did_you_mean(name, manager.all_tasks) or "; `lm-eval ls tasks` lists those of the harness"
            raise UserError(f"no task {name!r} in the harness{where}{hint}")
    return manager


def on_tasks(
    model: nn.Module,
    tokenizer: str | Path | None,
    tasks: Sequence[str],
    manager: Any = None,
    *,
    settings: Settings,
    console: Console | None = None,
) -> dict[str, Any]:
    """Ask a model the questions of tasks.

    Args:
        model: as `weft.load_model` gives it.
        tokenizer: the model's folder of it.
        tasks: their names.
        manager: from `find_tasks`; default: of the harness's own.
        settings: those of tasks, and the batch size.

    Returns:
        For each task, and each group of them: `questions`, `shots`, `version` and `scores`, each with `metric`,
        `filter` (what the harness does to an answer first), `value` and `stderr` (None if there is none).

    Raises:
        UserError: no harness, no tokenizer, an unknown task, or one that cannot be built.
    """
    manager = find_tasks(tasks) if manager is None else manager
    if tokenizer is None:
        raise UserError("tasks are text, and this model has no tokenizer with it; name it with --tokenizer")
    for name in ("batch_size", "limit", "num_fewshot"):
        number = getattr(settings, name)
        if number is not None and number < (name != "num_fewshot"):
            raise UserError(f"{name} is {number}; give at least {int(name != 'num_fewshot')}")
    from weft.data.tokenizers.tokenizer import Tokenizer
    from weft.evaluation.harness import WeftLM

    lm = WeftLM(model, Tokenizer.load(tokenizer), batch_size=settings.batch_size, console=console)
    if settings.apply_chat_template:
        lm.chat_template(True)
    try:
        with contextlib.redirect_stdout(sys.stderr), _no_surroundings():  # ours is for the results
            results = _ask(lm, tasks, manager, settings)
    except UserError:
        raise
    except Exception as error:
        if lm.asked:
            raise
        told = " ".join(str(error).split())
        raise UserError(
            f"the harness cannot build {', '.join(tasks)}: {type(error).__name__}: {told}; mend the task, or bring its "
            "data"
        ) from error
    return {task: _scores(task, results) for task in results["results"]}


def _ask(lm: WeftLM, tasks: Sequence[str], manager: Any, settings: Settings) -> dict[str, Any]:
    import lm_eval

    found = lm_eval.simple_evaluate(
        lm,
        tasks=[*tasks],
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        apply_chat_template=settings.apply_chat_template,
        task_manager=manager,
        bootstrap_iters=DRAWS,
        log_samples=False,
    )
    return dict(found or {})


@contextlib.contextmanager
def _no_surroundings() -> Iterator[None]:
    """Within it the harness does not look at the machine, for seconds, and the git repository around, where git
    complains if there is none: nothing of that is kept."""
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
    """One task's results without what the harness says for itself."""
    results, scores = found["results"][task], []
    for key, value in results.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = results.get(f"{metric}_stderr,{filtered}")
        stderr = float(stderr) if isinstance(stderr, int | float) else None
        scores.append({"metric": metric, "filter": filtered, "value": float(value), "stderr": stderr})
    asked = found.get("n-samples", {}).get(task, {}).get("effective")
    shots, version = found.get("n-shot", {}).get(task), found.get("versions", {}).get(task)
    return {"questions": asked, "shots": shots, "version": version, "scores": scores}
