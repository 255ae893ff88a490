"""schemathesis over the OpenAPI document: no request gets a 5xx, and each answer follows the document."""

import os

import httpx
import schemathesis
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
URL = os.environ["WEFT_SERVER_URL"]
KEY = os.environ["WEFT_SERVER_KEY"]

schema = schemathesis.openapi.from_url(f"{URL}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case):
    response = case.call(headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and response.request.method != "HEAD":
        error = response.json()["error"]
        assert isinstance(error["message"], str)
        assert isinstance(error["code"], str)


def test_the_server_still_answers():
    assert httpx.get(f"{URL}/health").status_code == 200
