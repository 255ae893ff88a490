"""The requests of the page on the server's API are answered, and the page names every number of `/metrics`."""

import json
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "serving-api.md").read_text("utf-8")


def test_the_requests_of_the_page_are_answered(serve, tools_model):
    requests = re.findall(r"^`POST (\S+)`\n\n```json\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(requests) == 6

    async def test(client):
        for path, body in requests:
            response = await client.post(path, json=json.loads(body))
            assert response.status_code == 200, (path, response.text)
        text = (await client.get("/metrics")).text
        named = set(re.findall(r"\bweft_\w+", PAGE.partition("## Metrics")[2]))
        found = set(re.findall(r"^(weft_\w+?)(?:_bucket|_sum|_count)?\{", text, re.MULTILINE))
        found = {name for name in found if not name.endswith("_created")}
        assert found == named

    serve(test, folder=tools_model)
