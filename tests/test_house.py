"""Rules of the house that no linter knows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).resolve().parent.parent


def tracked_files() -> list[Path]:
    """The files that git tracks; without git (a source archive), all that are not obviously made."""
    try:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        made = {".venv", ".venv-litgpt", ".git", "runs", "work", "__pycache__", ".ruff_cache", ".pytest_cache"}
        return [p for p in ROOT.rglob("*") if p.is_file() and not made & set(p.relative_to(ROOT).parts)]


def texts(*suffixes: str):
    for path in tracked_files():
        if not suffixes or path.suffix in suffixes:
            try:
                yield path.relative_to(ROOT), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "APPENDIX: How to apply the Apache License to your work." in text


def test_version_is_stated_once_and_the_changelog_knows_it():
    from importlib.metadata import PackageNotFoundError, version

    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z0-9.]+)?", weft.__version__)
    assert f"## [{weft.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    stated = re.compile(rf"""["']{re.escape(weft.__version__)}["']""")
    files = {str(path) for path, text in texts(".py", ".toml") if stated.search(text) and path.parts[0] != "tests"}
    assert files == {"pyproject.toml"}
    try:
        installed = version("weft-train")
    except PackageNotFoundError:
        pytest.skip("run from the sources, not installed")
    assert installed == weft.__version__


@pytest.mark.parametrize("module", ["weft", "weft.config.run", "weft.cli.main"])
def test_importing_it_does_not_import_torch(module):
    heavy = "{'torch', 'numpy', 'transformers', 'tokenizers'}"
    program = f"import sys, {module}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"import {module} imports {done.stderr.strip()}"


def test_public_names_are_there():
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = weft.nonsense


def test_no_file_is_over_500_lines():
    long = {str(path): text.count("\n") for path, text in texts(".py", ".md", ".yaml") if text.count("\n") > 500}
    # Written by a program from the schema, and read by searching in it.
    long.pop("docs/configuration.md", None)
    assert not long


def test_torch_is_pinned_to_one_version_that_any_index_has():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert "torch==2.13.0" in pins
    for line in pins:
        assert not line or line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line), line


def test_tracked_files_name_no_machine():
    """No path of somebody's machine, and no package index or mirror, by which a clone would work in one place only."""
    paths = re.compile(r"(?<![\w.~])/(home|root|work|Users|opt)/\w")
    hosts = re.compile(
        r"--(extra-)?index-url|--find-links|https?://[^\s)\"']*/simple\b|pythonhosted|download\.pytorch\.org"
    )
    found = []
    for path, text in texts():
        if path == Path("tests/test_house.py"):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if paths.search(line) or hosts.search(line):
                found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)
