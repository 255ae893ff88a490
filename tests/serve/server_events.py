"""Reads server-sent events."""

import json


def events(response) -> list:
    """The data of a response's server-sent events, without the `[DONE]` with which they must end."""
    *data, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(one) for one in data]
