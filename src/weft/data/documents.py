"""Files and folders of text and JSON lines, as a stream of documents; what is none is counted under a reason."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from weft.config.errors import UserError

JSON_LINES = {".jsonl", ".ndjson", ".jl"}


@dataclass(frozen=True)
class Document:
    """A text and where it came from; `line` is None where a file is one document."""

    text: str
    path: Path
    line: int | None


@dataclass(frozen=True)
class Reject:
    """A document that cannot be read, with the reason."""

    path: Path
    line: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line is not None else str(self.path)


@dataclass
class Counts:
    """What a stream of documents saw. `sources`: path, bytes, sha256 and documents of each file."""

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    blank_lines: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    skipped_files: Counter[str] = field(default_factory=Counter)
    sources: list[dict[str, Any]] = field(default_factory=list)


def find_files(inputs: Sequence[str | Path], files_from: str | Path | None = None) -> list[Path]:
    """The files that `inputs` name, folders searched to any depth, in the order given and sorted within folders.

    Args:
        files_from: a text file that names more inputs, one a line.

    Raises:
        UserError: an input does not exist, or there is none.
    """
    named = [Path(i) for i in inputs]
    if files_from is not None:
        try:
            lines = Path(files_from).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}; --files-from names a list of files", files_from
            ) from None
        except UnicodeDecodeError:
            raise UserError("not UTF-8; --files-from names a text file with one path a line", files_from) from None
        named += [Path(line) for line in lines if line.strip()]
    files: list[Path] = []
    for path in named:
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
        elif path.exists():
            files.append(path)
        else:
            raise UserError("no such file or folder; check the path", path)
    if not files:
        where = ", ".join(map(str, named)) or "the input"
        raise UserError(f"no files in {where}; name folders or files of text or JSON lines")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def read_documents(
    files: Sequence[Path],
    counts: Counts,
    *,
    text_field: str = "text",
    on_reject: Callable[[Reject], None],
    on_progress: Callable[[int], None] = lambda done: None,
) -> Iterator[Document]:
    """All documents of `files`, one file after the other.

    Args:
        counts: is filled as the stream is read.
        text_field: the key of a JSON line's text.
        on_reject: is told of each line or file that is no document; it may raise.
        on_progress: is told how many bytes have been read.
    """
    done = 0
    for path in files:
        before, digest, size = counts.documents, hashlib.sha256(), 0
        try:
            file = open(path, "rb")  # noqa: SIM115 (closed below)
        except OSError as error:
            raise UserError(f"cannot be read: {error.strerror}", path) from None
        with file:
            chunks = enumerate(file, start=1) if path.suffix.lower() in JSON_LINES else [(None, file.read())]
            for line, raw in chunks:
                digest.update(raw)
                size += len(raw)
                if line is None and b"\0" in raw[:8192]:
                    counts.skipped_files["binary"] += 1
                    break
                text = _text(raw, path, line, text_field, counts, on_reject)
                if text is not None:
                    counts.documents += 1
                    counts.empty += not text
                    counts.bytes += len(text) if text.isascii() else len(text.encode())
                    yield Document(text, path, line)
                on_progress(done + size)
        done += size
        counts.sources.append(
            {"path": str(path), "size": size, "sha256": digest.hexdigest(), "documents": counts.documents - before}
        )


def _text(
    raw: bytes, path: Path, line: int | None, key: str, counts: Counts, on_reject: Callable[[Reject], None]
) -> str | None:
    """The text of one file or line, or None if it is blank or rejected."""
    reason = ""
    if line is None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            reason = "invalid UTF-8"
    elif not raw.strip():
        counts.blank_lines += 1
        return None
    else:
        try:
            record = _record(raw)
        except UnicodeError:
            reason = "invalid UTF-8"
        except (ValueError, RecursionError):
            reason = "broken JSON"
        else:
            if not isinstance(record, dict):
                reason = "not a JSON object"
            elif key not in record:
                reason = f"no field {key!r}"
            elif record[key] is None:
                reason = f"field {key!r} is null"
            elif not isinstance(record[key], str):
                reason = f"field {key!r} is not text"
            else:
                return record[key]
    counts.rejected[reason] += 1
    on_reject(Reject(path, line, reason))
    return None


def _record(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Python's own parser takes what orjson does not, such as NaN beside the text, and tells bad UTF-8 apart.
        record = json.loads(raw.decode("utf-8"))
        json.dumps(record, ensure_ascii=False).encode("utf-8")  # raises for lone surrogates, which no text can hold
        return record
