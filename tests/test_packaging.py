"""The package as it is published: a wheel and an sdist that are built, read, installed and run."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import weft

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command, **settings):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, **settings)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    (sources,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=sources)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def test_metadata_are_valid_and_the_readme_is_in_them(built):
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        texts = [opened.read(name)]
    with tarfile.open(sdist) as opened:
        (member,) = (
            member for member in opened.getmembers() if member.name.count("/") == 1 and "PKG-INFO" in member.name
        )
        texts.append(opened.extractfile(member).read())
    for text in texts:
        found = Metadata.from_email(text, validate=True)  # raises for what an index would refuse
        assert (found.name, str(found.version)) == ("weft-train", weft.__version__)
        assert found.description_content_type == "text/markdown"
        assert found.description.startswith("# Weft")
        assert found.license_expression == "Apache-2.0"


def test_the_wheel_has_every_module_and_the_sdist_its_tests(built):
    sdist, wheel = built
    files = [*(ROOT / "src" / "weft").rglob("*.py"), *(ROOT / "src" / "weft" / "serve" / "page").iterdir()]
    modules = {path.relative_to(ROOT / "src").as_posix() for path in files if path.is_file()}
    assert modules <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"tests/test_packaging.py", "docs/plugins.md", "LICENSE", "constraints.txt"} <= names


def test_pip_installs_the_wheel_and_it_runs(built, tmp_path):
    run(
        sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", tmp_path / "site", built[1]
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    code = "import weft, weft.cli.main; print(weft.__file__); weft.cli.main.main(['--version'])"
    where, version = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).splitlines()
    assert Path(where).is_relative_to(tmp_path / "site")
    assert version == f"weft {weft.__version__}"
    assert run(tmp_path / "site" / "bin" / "weft", "--help", env=environment).startswith("usage: weft")


def test_poetry_finds_what_it_asks_for():
    """A static version, its own name for the folder, and no extra that names the package itself."""
    assert "dynamic" not in PYPROJECT["project"]
    (package,) = PYPROJECT["tool"]["poetry"]["packages"]
    assert (ROOT / package["from"] / package["include"] / "__init__.py").is_file()
    every = [one for extra in PYPROJECT["project"]["optional-dependencies"].values() for one in extra]
    assert not [one for one in every if one.startswith(PYPROJECT["project"]["name"])]
