"""Real text for the data benchmarks, from what is wherever the project is: the sources of Python packages."""

import hashlib
import json
import sys
import sysconfig
from pathlib import Path


def make_jsonl(path: Path, megabytes: int, suffixes: tuple[str, ...] = (".py",), unique: bool = False) -> dict:
    """Write JSON lines of `{"path", "text"}`, about `megabytes` in size, the same for the same packages.

    The files in order; where they are not enough, they come again with their lines turned round: no text repeats.

    Args:
        unique: leave out files of the same content as an earlier one (packages carry copies of others).
    """
    seen: set[bytes] = set()
    documents = size = turns = 0
    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    files = sorted({file for folder in folders for file in folder.rglob("*") if file.suffix in suffixes})
    if not files:
        sys.exit("no Python sources here to make text of")
    with open(path, "wb") as out:
        while size < megabytes * 1e6:
            for file in files:
                try:
                    text = file.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue
                digest = hashlib.sha256(text.encode()).digest()
                if unique and not turns and digest in seen:
                    continue
                seen.add(digest)
                if turns:
                    text = "\n".join(text.split("\n")[:: -1 if turns % 2 else 1]) + f"\n# {turns}\n"
                line = json.dumps({"path": file.name, "text": text}, ensure_ascii=False).encode() + b"\n"
                out.write(line)
                documents, size = documents + 1, size + len(line)
                if size >= megabytes * 1e6:
                    break
            turns += 1
    return {"documents": documents, "bytes": size}
