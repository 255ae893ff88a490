"""Copies tokenizer folders."""

from __future__ import annotations

import shutil
from pathlib import Path

from weft.headers import TOKENIZER_CONFIG_FILES, tokenizer_file

TEMPLATES = "additional_chat_templates"  # folder of further chat templates: NAME.jinja


def copy_tokenizer(path: str | Path, into: Path) -> None:
    """Copies the files of a tokenizer into a folder, but not other files next to them, such as a model's weights."""
    file = tokenizer_file(path)
    into.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, into / "tokenizer.json")
    for name in (*TOKENIZER_CONFIG_FILES, "chat_template.jinja", "chat_template.json"):
        if (file.parent / name).exists():
            shutil.copy(file.parent / name, into / name)
    for template in sorted((file.parent / TEMPLATES).glob("*.jinja")):
        (into / TEMPLATES).mkdir(exist_ok=True)
        shutil.copy(template, into / TEMPLATES / template.name)
