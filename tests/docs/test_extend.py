"""The table of docs/extend.md: files of the kind are there, they have what it says, and its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extend.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| a")]


def anchors(page: Path) -> set[str]:
    """What a heading is called in links."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def defined(path: Path) -> set[str]:
    """The names that a file defines, at its top and in its classes; "name(...)" with a function's first arguments."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
            names.add(f"{node.name}({', '.join(one.arg for one in node.args.args if one.arg != 'self')})")
        elif isinstance(node, ast.ClassDef):
            names |= {node.name, *(ast.unparse(base) for base in node.bases)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    return names


def test_the_table_has_every_seam():
    assert len(ROWS) == 15
    assert all(len(row) == 5 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row(row):
    _, where, holds, _, more = row
    for page, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", f"{holds} {more}"):
        assert (ROOT / "docs" / page).is_file(), page
        assert not anchor or anchor in anchors(ROOT / "docs" / page), f"{page}#{anchor}"
    if "<" not in where:
        return
    files = [path for path in (ROOT / "src/weft").glob(re.sub(r"<\w+>", "*", where.strip("`"))) if path.stem[0] != "_"]
    assert files, where
    names = set().union(*(defined(path) for path in (*files, files[0].with_name("__init__.py"))))
    for said in re.findall(r"`([^`]+)`", holds):
        name, _, arguments = said.rstrip(")").partition("(")
        given = [one.strip() for one in arguments.split(",") if one.strip() not in ("", "self", "...")]
        found = [one for one in names if one.partition("(")[0] == name]
        assert found, f"no {name} in {where}"
        if given:
            assert any(one.partition("(")[2].rstrip(")").split(", ")[: len(given)] == given for one in found), said
