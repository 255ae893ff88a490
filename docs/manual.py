"""Hooks of mkdocs.yml: titles of code blocks, docstrings' examples as code, a check of the API reference."""

from __future__ import annotations

import logging
import re
from functools import cache
from pathlib import Path

import griffe

log = logging.getLogger("mkdocs.plugins.manual")  # with `strict`, a warning of this logger fails the build
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
SOURCES = Path(__file__).parents[1] / "src"


def on_page_markdown(markdown: str, page, **_) -> str:
    """Checks the names that the page documents, and writes "```python my_file.py" as a block with a title."""
    for name in re.findall(r"^::: (\S+)", markdown, re.MULTILINE):
        for missing in undocumented(package()[name.removeprefix("weft.")]):
            log.warning("%s: %s has no docstring", page.file.src_uri, missing)
    titled = re.sub(r"^```(\w+) ([\w/-]+\.\w+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
    return re.sub(r"^```(\w+) [\w-]+$", r"```\1", titled, flags=re.MULTILINE)  # a mark for the tests


class ExamplesAsCode(griffe.Extension):
    """Puts the `>>>` lines of docstrings, and what they print, into code blocks."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^>>> .*?(?=\n\n|\Z)", r"```pycon\n\g<0>\n```", obj.docstring.value, flags=re.M | re.S
            )


@cache
def package() -> griffe.Object | griffe.Alias:
    """The package, read from its source files without importing them."""
    return griffe.load("weft", search_paths=[SOURCES], resolve_aliases=True)


def undocumented(found: griffe.Object | griffe.Alias) -> list[str]:
    """The object, and its public methods and functions, without a docstring."""
    names = [] if found.has_docstring else [found.path]
    if found.is_class or found.is_module:
        for name, member in found.members.items():
            if not name.startswith("_") and not member.is_alias and member.is_function and not member.has_docstring:
                names.append(f"{found.path}.{name}")
    return names
