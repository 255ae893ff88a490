"""The tracker for Weights & Biases (online or offline). Needs `pip install 'weft-train[wandb]'`."""

from __future__ import annotations

import html
from typing import Any, Literal

from weft.errors import UserError
from weft.observe.run_info import RunInfo, scalars


class WandB:
    """Logs a run, with all its resumptions, as one wandb run, whose id is kept in the run directory.

    A resumed run logs the steps after its last checkpoint again, with the same values. wandb ignores these values,
    because it keeps the first value of each step.

    Args:
        project: name of the wandb project.
        entity: user or team that owns the project. Default: your default entity.
        mode: "online"; "offline" (upload the run later with the `wandb sync` command that is printed); or "disabled".
        group: name of the group of runs that the run belongs to. Default: no group.
        tags: tags of the run. Default: no tags.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        project: str = "weft",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] = "online",
        group: str | None = None,
        tags: list[str] | None = None,
    ):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError("log.trackers: wandb is not installed; pip install 'weft-train[wandb]'") from error
        self._wandb: Any = wandb  # a type checker resolves the name to this file
        self.failures = (self._wandb.Error,)
        identity = run.path / "wandb" / "run-id.txt"
        known = identity.read_text(encoding="utf-8").strip() if identity.exists() else None
        try:
            self._run = self._wandb.init(
                project=project,
                entity=entity,
                group=group,
                tags=tags,
                mode=mode,
                name=run.name,
                dir=str(run.path),
                config=run.config,
                id=known if run.resumed_step is not None else None,
                resume="allow" if run.resumed_step is not None and known else None,
                # Weft has its own progress bar. A second run in one process (a sweep, a test) is a new wandb run.
                settings=self._wandb.Settings(silent=True, console="off"),
                reinit="create_new",
            )
        except self.failures as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise UserError(f"log.trackers: wandb: {reason}; run `wandb login`, or set mode: offline") from error
        if mode != "disabled":
            identity.parent.mkdir(parents=True, exist_ok=True)
            identity.write_text(self._run.id + "\n", encoding="utf-8")
        folder = str(self._run.dir).removesuffix("/files")
        self.place = {"online": self._run.url, "offline": f"wandb sync {folder}"}.get(mode)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs the metrics of one step."""
        self._run.log(scalars(metrics), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text under `samples/<name>`."""
        page = self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
        self._run.log({f"samples/{name}": page}, step=step)

    def close(self) -> None:
        """Finishes the wandb run."""
        self._run.finish()
