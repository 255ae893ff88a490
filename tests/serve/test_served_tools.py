"""Tools over HTTP: a model that learned calls by heart, and calls that are enforced, whole and as a stream."""

import json

import jsonschema
import pytest
from served_tools import ANSWER, CALLS, RESULT, SCHEMA, TOOLS, USER
from serving import events


def asked(messages, **more):
    return {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **more}


def joined(chunks):
    """The message of a stream: content, (id, name, arguments) of each call, and the finish reasons."""
    content, calls, finishes = "", [], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)  # indices increase, and the name comes first
                assert call["type"] == "function"
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
        finishes.append(choice["finish_reason"])
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    return content, calls, finishes[-1]


def found(choice):
    message = choice["message"]
    calls = [
        [one["id"], one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", [])
    ]
    return message["content"], calls, choice["finish_reason"]


def test_learned_calls_and_the_answer_to_their_results(serve, tools_model):
    async def test(client):
        body = asked([USER])
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        content, calls, finish = found(whole["choices"][0])
        assert (content, finish) == ("Mi vo.", "tool_calls")
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == CALLS
        chunks = events(await client.post("/v1/chat/completions", json=body | {"stream": True}))
        streamed = joined(chunks)
        assert (streamed[0], [call[1:] for call in streamed[1]], streamed[2]) == (
            content,
            [call[1:] for call in calls],
            finish,
        )
        assert len(chunks) > 10  # arguments arrive while they are generated
        # OpenAI's clients send the calls back as they came: arguments are JSON text.
        after = [USER, whole["choices"][0]["message"], RESULT]
        answer = (await client.post("/v1/chat/completions", json=asked(after))).json()
        assert found(answer["choices"][0]) == (ANSWER["content"], [], "stop")

    serve(test, folder=tools_model)


def test_a_call_that_max_tokens_cuts_ends_with_length(serve, tools_model):
    async def test(client):
        lengths = set()
        for most in range(5, 60, 6):
            body = asked([USER], max_tokens=most)
            content, calls, finish = found((await client.post("/v1/chat/completions", json=body)).json()["choices"][0])
            assert finish == "length"
            streamed = joined(events(await client.post("/v1/chat/completions", json=body | {"stream": True})))
            assert (streamed[0], [call[1:] for call in streamed[1]]) == (content or "", [call[1:] for call in calls])
            if calls:
                assert json.dumps(CALLS[0][1], ensure_ascii=False).startswith(calls[0][2])
            lengths.add(len(calls))
        assert lengths >= {0, 1}

    serve(test, folder=tools_model)


@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named_calls_follow_the_schema(serve, tools_model, stream):
    async def test(client):
        for choice, names in (
            ("required", {"ren", "tu"}),
            ({"type": "function", "function": {"name": "ren"}}, {"ren"}),
        ):
            body = asked([{"role": "user", "content": "Shi"}], temperature=1.5, max_tokens=400, stream=stream)
            body |= {"tool_choice": choice, "parallel_tool_calls": False}
            for seed in range(2):
                response = await client.post("/v1/chat/completions", json=body | {"seed": seed})
                _, calls, finish = joined(events(response)) if stream else found(response.json()["choices"][0])
                if finish == "length":
                    continue
                ((_, name, arguments),) = calls
                assert name in names
                assert finish == "tool_calls"
                schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
                jsonschema.validate(json.loads(arguments), schemas[name])

    serve(test, folder=tools_model)


def test_without_tools_there_are_no_calls(serve, tools_model):
    async def test(client):
        for more in ({"tool_choice": "none"}, {"tools": []}):
            body = asked([USER], **more)
            message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            assert "tool_calls" not in message

    serve(test, folder=tools_model)


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "vo", "schema": schema, "strict": True}}


def test_answers_follow_the_response_format(serve, tools_model):
    async def test(client):
        for seed in range(2):
            body = {"messages": [USER], "seed": seed, "temperature": 2, "max_tokens": 200}
            for tools in ({}, {"tools": TOOLS}):  # with tools, the answer is JSON or a call
                given = body | tools | {"response_format": schema_format(SCHEMA)}
                content, calls, finish = found(
                    (await client.post("/v1/chat/completions", json=given)).json()["choices"][0]
                )
                assert finish != "stop" or not calls
                if finish == "stop":
                    jsonschema.validate(json.loads(content), SCHEMA)
            given = body | {"response_format": {"type": "json_object"}}
            content, _, finish = found((await client.post("/v1/chat/completions", json=given)).json()["choices"][0])
            assert content.startswith("{")
            assert finish == "length" or isinstance(json.loads(content), dict)

    serve(test, folder=tools_model)


MISTAKES = [
    ({"tools": [], "tool_choice": "required"}, 400, "invalid_value", "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, "invalid_value", "tool_choice", "ren, tu"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, 400, "invalid_value", "tools", "same name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
         "tool_choice": "required"},
        400, "invalid_json_schema", "tools", "'f' cannot be enforced: /not",
    ),
    (
        {"response_format": schema_format({"properties": {"a": {"uniqueItems": True}}})},
        400, "invalid_json_schema", "response_format", "/properties/a/uniqueItems",
    ),
    ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format.type", "json_schema"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, 400, "missing_required_parameter",
     "messages.0.tool_calls.0.function", "missing"),
]  # fmt: skip


def test_mistakes_name_the_parameter(serve, tools_model, chat_model, monkeypatch):
    async def test(client):
        for more, status, code, param, said in MISTAKES:
            response = await client.post("/v1/chat/completions", json=asked([USER]) | more)
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (status, code, param)
            assert said in error["message"]

    async def without_template(client):
        response = await client.post("/v1/chat/completions", json=asked([USER]))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_tools")

    async def without_llguidance(client):
        body = {"messages": [USER], "response_format": {"type": "json_object"}}
        response = await client.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (501, "constraints_not_installed")
        assert "pip install 'weft-train[constraints]'" in response.json()["error"]["message"]

    serve(test, folder=tools_model)
    serve(without_template, folder=chat_model)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    serve(without_llguidance, folder=tools_model)
