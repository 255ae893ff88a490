"""docs/serving.md: its requests are answered, and its paths, parameters, codes and options exist."""

import json
import re
from pathlib import Path

import httpx
from serving import events

from weft.cli.main import main
from weft.serve.app import create_app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
PATHS = re.compile(r"`(?:GET|POST) (/[^`]*)`")


def section(name):
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_the_requests_of_the_page_are_answered(serve):
    requests = re.findall(r"curl (?:-N )?http://127.0.0.1:8000(\S+) .*?-d '(.*?)'", PAGE, re.S)
    assert len(requests) == 2

    async def test(client):
        for path, body in requests:
            body = json.loads(body)
            response = await client.post(path, json=body)
            assert response.status_code == 200
            assert events(response) if body.get("stream") else response.json()["choices"]
        missing = await client.post("/v1/completions", json={"prompt": "a", "model": "gpt"})
        (example,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
        assert missing.json() == json.loads(example.replace("run", "tiny"))

    serve(test)


def test_the_tables_name_all_paths_and_parameters():
    document = create_app([]).openapi()
    stated = {path.replace("NAME", "{name}") for path in PATHS.findall(section("Endpoints"))}
    assert set(document["paths"]) <= stated
    assert stated - {"/", "/openapi.json"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    named = set(re.findall(r"`(\w+)", section("Parameters")))
    wanted = {*schemas["CompletionRequest"]["properties"], *schemas["ChatRequest"]["properties"]}
    assert wanted - named == {"prompt", "messages", "modalities"}


def test_the_options_and_codes_of_the_page_exist(capsys):
    assert main(["serve", "--help"]) == 0
    help_page = capsys.readouterr().out
    for option in set(re.findall(r"`(--[\w-]+)", PAGE)):
        assert option in help_page
    sources = "".join(path.read_text() for path in (ROOT / "src" / "weft" / "serve").glob("*.py"))
    for code in re.findall(r"`(\w+)`", section("Errors").partition("| --- |")[2].partition("An error")[0]):
        assert f'"{code}"' in sources or code in ("Retry", "application")


def test_the_page_of_the_api_is_not_loaded_from_elsewhere():
    paths = {route.path for route in create_app([]).routes if hasattr(route, "path")}
    assert not {"/docs", "/redoc"} & paths
    assert httpx.URL(create_app([]).openapi_url).is_relative_url
