"""The tracker for MLflow (a server or a local database). Needs `pip install 'weft-train[mlflow]'`."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from weft.errors import UserError
from weft.formatting import flat
from weft.observe.run_info import RunInfo, scalars

_BATCH = 500  # metrics per request; MLflow accepts 1,000


class MLflow:
    """Logs a run, with all its resumptions, as one MLflow run, whose id is kept in the run directory.

    MLflow keeps every value that it gets, so steps that a resumed run repeats are not sent twice.

    Args:
        tracking_uri: URI of the tracking server. Default: the environment variable MLFLOW_TRACKING_URI, else the
            database `<run>/mlflow.db` (view it with `mlflow ui --backend-store-uri sqlite:///<run>/mlflow.db`).
        experiment: name of the experiment, which is created if it does not exist.
        flush_seconds: minimum number of seconds between two requests. Values are queued, and sent together by the next
            request. If 500 values are queued, they are sent earlier.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        tracking_uri: str | None = None,
        experiment: str = "weft",
        flush_seconds: float = 5.0,
    ):
        try:
            from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
            from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
            from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError("log.trackers: mlflow is not installed; pip install 'weft-train[mlflow]'") from error
        for noisy in ("alembic", "mlflow.store.db.utils"):  # they log every migration of a new database
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.failures = (MlflowException,)
        self._metric, self._every, self._sent = Metric, flush_seconds, time.monotonic()
        self._waiting: list[Any] = []
        home = run.path.resolve()
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        uri = given or f"sqlite:///{home}/mlflow.db"
        identity = run.path / "mlflow-run-id.txt"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            if run.resumed_step is not None and identity.exists():
                self._id = identity.read_text(encoding="utf-8").strip()
                self._client.update_run(self._id, status="RUNNING")
                history = self._client.get_metric_history(self._id, "train/loss")
                self._last = max((metric.step for metric in history), default=0)
            else:
                known = self._client.get_experiment_by_name(experiment)
                artifacts = None if given else (home / "mlflow-artifacts").as_uri()
                number = known.experiment_id if known else self._client.create_experiment(experiment, artifacts)
                self._id = self._client.create_run(number, run_name=run.name).info.run_id
                self._last = 0
                parameters = [Param(key, str(value)[:5000]) for key, value in flat(run.config).items()]
                for start in range(0, len(parameters), 100):
                    self._client.log_batch(self._id, params=parameters[start : start + 100])
                identity.write_text(self._id + "\n", encoding="utf-8")
        except MlflowException as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise UserError(f"log.trackers: mlflow at {uri}: {reason}; check tracking_uri") from error
        self.place = f"mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite:") else uri

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Queues the metrics of one step."""
        if step <= self._last:
            return
        moment = int(time.time() * 1000)
        self._waiting += [self._metric(name, value, moment, step) for name, value in scalars(metrics).items()]
        if len(self._waiting) >= _BATCH or time.monotonic() - self._sent >= self._every:
            self._send()

    def text(self, step: int, name: str, text: str) -> None:
        """Logs a text as the artifact `samples/step-00000200-<name>.txt`."""
        if step > self._last:
            safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
            self._client.log_text(self._id, text, f"samples/step-{step:08d}-{safe}.txt")

    def close(self) -> None:
        """Sends the queued metrics and ends the MLflow run."""
        self._send()
        self._client.set_terminated(self._id)

    def _send(self) -> None:
        self._sent = time.monotonic()
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_BATCH])
            del self._waiting[:_BATCH]  # after the request, so that metrics of a failed request are sent again
