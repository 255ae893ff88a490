"""`/v1/responses`: the items of an answer, whole and as events that agree with each other."""

import json

import jsonschema
import pytest
from chat_model import SYSTEM, TURNS
from served_tools import ANSWER, CALLS, SCHEMA, TOOLS, USER

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def stream_of(response):
    """The events of a stream, whose names are their types."""
    found = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def rebuilt(events):
    """The output that a client builds from the events, which must agree with each other."""
    output = []
    for event in events:
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(output)
            output.append(event["item"])
        elif kind == "content_part.added":
            output[index]["content"].append(event["part"])
        elif kind == "output_text.delta":
            output[index]["content"][0]["text"] += event["delta"]
            output[index]["content"][0]["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            output[index]["arguments"] += event["delta"]
        elif kind == "output_text.done":
            assert event["text"] == output[index]["content"][0]["text"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == output[index]["arguments"]
        elif kind == "output_item.done":
            output[index]["status"] = event["item"]["status"]
            assert event["item"] == output[index]
    return output


def without_ids(value):
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


async def both(client, **body):
    """The response, which is the same whole and as a stream, but for its ids."""
    body = {"temperature": 0, "max_output_tokens": 150} | body
    whole = (await client.post("/v1/responses", json=body)).json()
    events = stream_of(await client.post("/v1/responses", json=body | {"stream": True}))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert rebuilt(events) == last["output"]
    assert without_ids(last) == without_ids(whole)
    return whole


def test_texts_are_those_of_the_chat(serve):
    async def test(client):
        parts = [{"type": "input_text", "text": TURNS[0][0]}]
        for given in (TURNS[0][0], [{"role": "user", "content": parts}]):
            whole = await both(client, input=given, instructions=SYSTEM, metadata={"a": "b"})
            (item,) = whole["output"]
            assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
            assert item["content"][0]["text"] == TURNS[0][1]
            assert (whole["status"], whole["metadata"], whole["instructions"]) == ("completed", {"a": "b"}, SYSTEM)
            assert whole["usage"]["total_tokens"] == whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"]
        answered = {"type": "message", "role": "assistant", "content": item["content"]}
        after = [{"role": "user", "content": TURNS[0][0]}, answered, {"role": "user", "content": TURNS[1][0]}]
        whole = await both(client, input=after, instructions=SYSTEM)
        assert whole["output"][0]["content"][0]["text"] == TURNS[1][1]
        include = ["message.output_text.logprobs"]
        cut = await both(client, input=TURNS[0][0], max_output_tokens=5, include=include, top_logprobs=2)
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [len(one["top_logprobs"]) for one in cut["output"][0]["content"][0]["logprobs"]] == [2] * 5

    serve(test)


def test_functions_and_schemas(serve, tools_model):
    async def test(client):
        user = [{"role": "user", "content": USER["content"]}]
        whole = await both(client, input=user, tools=FUNCTIONS)
        message, *calls = whole["output"]
        assert message["content"][0]["text"] == "Mi vo."
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
        assert {call["type"] for call in calls} == {"function_call"}
        result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "7 shi"}
        whole = await both(client, input=[*user, *whole["output"], result], tools=FUNCTIONS)
        assert whole["output"][0]["content"][0]["text"] == ANSWER["content"]
        named = {"type": "function", "name": "tu"}
        whole = await both(client, input="Shi", tools=FUNCTIONS, tool_choice=named)
        assert [(one["type"], one["name"], one["arguments"]) for one in whole["output"]] == [
            ("function_call", "tu", "{}")
        ]
        assert whole["tool_choice"] == named
        form = {"type": "json_schema", "name": "vo", "schema": SCHEMA, "strict": True}
        whole = await both(client, input="Shi", text={"format": form})
        assert whole["text"] == {"format": form}
        jsonschema.validate(json.loads(whole["output"][0]["content"][0]["text"]), SCHEMA)

    serve(test, folder=tools_model)


SCHEMA_FORMAT = {"type": "json_schema", "name": "a", "schema": {"not": {}}}
MISTAKES = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items"),
    ({"store": True}, "store", "not stored"),
    ({"input": []}, "input", "at least one"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type", "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "'input_text'"),
    ({"input": [{"role": "user", "content": "a"}, {"role": "king", "content": "a"}]}, "input.1.role", "'user'"),
    ({"input": [{"role": "user", "content": "a", "audio": 1}]}, "input.0.audio", "no parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "b": 1}]}]}, "input.0.content.0.b",
     "no parameter"),
    ({"input": [{"role": "user"}]}, "input.0.content", "missing"),
    ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name", "missing"),
    ({"input": [{"type": "function_call_output", "output": "a"}]}, "input.0.call_id", "missing"),
    ({"tools": [{"type": "web_search", "name": "a"}]}, "tools.0.type", "function"),
    ({"conversation": "a"}, "conversation", "no parameter"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    # Errors of what follows the conversion to a chat name the keys of this endpoint, too.
    ({"text": {"format": SCHEMA_FORMAT}}, "text.format", "/not"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "missing"),
    ({"max_output_tokens": 101}, "max_output_tokens", "max_output_tokens is 101"),
    ({"input": "ka lo " * 400}, "input", "512"),
    ({"top_logprobs": 2}, "top_logprobs", "include"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_name_the_parameter(serve, stream):
    async def test(client):
        for more, param, said in MISTAKES:
            response = await client.post("/v1/responses", json={"input": "a", "stream": stream} | more)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), error
            assert said in error["message"]

    serve(test, settings={"max_new_tokens": 100})
