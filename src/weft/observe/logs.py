"""Writes a log file for each rank, `<run>/logs/rank-00000.log`, which also receives Python's warnings."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

from weft.errors import UserError

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
LOGGER = logging.getLogger("weft")
_handler: _FailSilentHandler | None = None


def log_path(run_directory: str | Path, rank: int = 0) -> Path:
    """Returns the path of a rank's log file."""
    return Path(run_directory) / "logs" / f"rank-{rank:05d}.log"


def log_to_file(run_directory: str | Path, rank: int = 0) -> logging.Logger:
    """Opens this process's log file in the run directory for appending, and returns the logger.

    The log contains messages of level INFO and higher from all libraries (torch: WARNING and higher), with local times,
    and Python's warnings. If this process already has an open log file, that file is closed first.

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
    handler.level_before = root.level
    root.addHandler(handler)
    if root.level > logging.INFO or root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
    LOGGER.propagate = True
    logging.captureWarnings(True)
    warnings.simplefilter("default", append=True)
    return LOGGER


def open_log() -> Path | None:
    """Returns the path of this process's log file; None if no log file is open."""
    return Path(_handler.baseFilename) if _handler is not None else None


def stop_log() -> None:
    """Closes this process's log file, and restores the root logger. Python's warnings then go to stderr again."""
    global _handler
    if _handler is not None:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(_handler)
        logging.getLogger().setLevel(_handler.level_before)
        _handler.close()
        _handler = None


class _FailSilentHandler(logging.FileHandler):
    """A log handler that ignores OSErrors, such as a full disk, instead of printing a traceback for each log line.

    A full disk is reported by the next write of a checkpoint or of metrics.

    Attributes:
        level_before: level of the root logger before this handler was added.
    """

    level_before = logging.WARNING

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
