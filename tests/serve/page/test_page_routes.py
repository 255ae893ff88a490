"""The routes of the page: its files, their headers, and that nothing of it comes from elsewhere."""

import re

import pytest

import weft.serve.page
from weft.serve.page import page_routes

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def test_the_page_needs_no_key_and_has_its_own_policy(serve):
    async def test(client):
        assert (await client.get("/v1/models")).status_code == 401
        page = await client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
        assert len(files) == 4
        for file in files:
            answer = await client.get(f"/{file}")
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"].startswith(POLICY)
            assert answer.headers["x-content-type-options"] == "nosniff"
            for imported in re.findall(r'from "\./([^"]+)"', answer.text):
                assert (await client.get(f"/page/{imported}")).status_code == 200
        key = {"Authorization": "Bearer right"}
        kept = {"If-None-Match": page.headers["etag"]}
        assert (await client.get("/", headers=kept)).status_code == 304
        for path in ("/page/__init__.py", "/page/../__init__.py", "/page/%2e%2e/app.py", "/page/", "/page"):
            assert (await client.get(path, headers=key)).status_code == 404
        assert (await client.get("/v1/models", headers=key)).status_code == 200

    serve(test, settings={"api_keys": ("right",)})


def test_the_page_asks_no_other_host_and_parses_no_html():
    """Addresses in the sources are those of namespaces only, and no source has a function that makes code of text."""
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|setHTML|createContextualFragment"
    sources = {}
    for route in page_routes():
        folder = weft.serve.page.__path__[0]
        name = "index.html" if route.path == "/" else route.path.removeprefix("/page/")
        with open(f"{folder}/{name}", encoding="utf-8") as file:
            sources[name] = file.read()
    assert {"index.html", "style.css", "app.js", "markdown.js", "icon.svg"} <= set(sources)
    for name, source in sources.items():
        found = set(re.findall(r"""["'(](?:https?:)?//\w[^"')\s]+""", source))
        assert {address.strip("\"'(") for address in found} <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(rf"{unsafe}|\beval\(|new Function|\sstyle=|\son[a-z]+=\"", source), name
        assert source.count("\n") <= 350, name


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_the_page_only_answers_get(serve, method):
    async def test(client):
        assert (await client.request(method, "/")).status_code in (404, 405)

    serve(test)
