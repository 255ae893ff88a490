"""The manual: every page has a place in the navigation, links lead somewhere, public names have docstrings."""

import inspect
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import weft

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text("utf-8"))
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def leaves(nav) -> list[str]:
    """The pages of a navigation."""
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(item)]


def prose(page: Path) -> str:
    """The page without code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as MkDocs and GitHub write them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    api = re.findall(r"^::: (\S+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(api)


def test_the_navigation_has_every_page_once():
    assert sorted(leaves(SITE["nav"])) == PAGES


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CONTRIBUTING.md"])
def test_links_of_a_page_resolve(page):
    path = (DOCS / page).resolve()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith(("https://", "mailto:")):
            continue
        assert not target.startswith(("http:", "/")), target
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target
        # The site has only what is in docs/; README and CONTRIBUTING are read beside the sources.
        assert page.startswith("..") or found.is_relative_to(DOCS), f"{target}: outside docs/"


def test_nothing_is_loaded_from_another_host():
    assert SITE["strict"] is True
    assert SITE["theme"]["font"] is False
    for page in PAGES:
        assert not re.findall(r"!\[[^]]*\]\(http|<img|<script|<iframe", prose(DOCS / page)), page


@pytest.mark.parametrize("name", weft.__all__)
def test_public_names_have_docstrings_and_a_place_in_the_reference(name):
    found = getattr(weft, name)
    missing = [] if inspect.getdoc(found) else [name]
    if inspect.isclass(found):
        members = {key: value for key, value in vars(found).items() if not key.startswith("_")}
        missing += [key for key, value in members.items() if inspect.isroutine(value) and not inspect.getdoc(value)]
    assert not missing
    assert f"::: weft.{name}\n" in (DOCS / "reference/python.md").read_text("utf-8")


def test_the_drawing_names_every_package():
    drawing = xml.etree.ElementTree.parse(DOCS / "images/packages.svg")
    drawn = {element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")}
    packages = {path.stem for path in (ROOT / "src/weft").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert {name for name in packages if not name.startswith("_")} <= drawn


def test_the_architecture_names_modules_that_exist():
    page = prose(DOCS / "architecture.md")
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page)
    assert len(named) > 30
    places = (ROOT / "src/weft", ROOT / "src/weft/parallel/axes", ROOT)
    missing = {name for name in named if not any((place / name).exists() for place in places)}
    assert missing <= {"logs/"}  # of a run directory


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 120
