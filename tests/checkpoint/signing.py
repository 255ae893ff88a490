"""How tests make checkpoints that were changed on purpose look undamaged."""

import hashlib
import json
from pathlib import Path


def sign(step: Path) -> None:
    """Writes checksums.json for the files as they are, as somebody does who changes a checkpoint on purpose."""
    content = json.loads((step / "checksums.json").read_bytes())
    for name in content["files"]:
        if (step / name).is_file():
            data = (step / name).read_bytes()
            content["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    content["digest"] = hashlib.sha256(json.dumps(content["files"], sort_keys=True).encode()).hexdigest()
    (step / "checksums.json").write_text(json.dumps(content))
