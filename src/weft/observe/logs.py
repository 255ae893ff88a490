"""A log file for each rank, `<run>/logs/rank-00000.log`. Python's warnings go there and not over the progress bar."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from weft.errors import UserError

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
LOGGER = logging.getLogger("weft")
_handler: logging.FileHandler | None = None


def log_path(run_directory: str | Path, rank: int = 0) -> Path:
    """Returns the path of a rank's log."""
    return Path(run_directory) / "logs" / f"rank-{rank:05d}.log"


def log_to_file(run_directory: str | Path, rank: int = 0) -> logging.Logger:
    """Appends this process's log to the run directory; returns the logger. Replaces an open log.

    The log has local times, what libraries log from INFO (torch: WARNING) up, and Python's warnings.

    Raises:
        UserError: the file cannot be written.
    """
    global _handler
    path = log_path(run_directory, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FailSilentHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}; free space or set run.directory", path) from error
    handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
    stop_log()
    _handler = handler
    root = logging.getLogger()
    root.addHandler(handler)
    if root.level > logging.INFO or root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
    LOGGER.propagate = True
    logging.captureWarnings(True)
    warnings.simplefilter("default", append=True)
    return LOGGER


def open_log() -> Path | None:
    """Returns the path of this process's open log, or None."""
    return Path(_handler.baseFilename) if _handler is not None else None


def stop_log() -> None:
    """Closes this process's log; warnings go to stderr again."""
    global _handler
    if _handler is not None:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(_handler)
        _handler.close()
        _handler = None


class _FailSilentHandler(logging.FileHandler):
    """Ignores a full disk, instead of a traceback for each line: saving the checkpoint or the metrics reports it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
