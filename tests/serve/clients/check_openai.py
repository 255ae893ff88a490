"""The `openai` client with every parameter of both endpoints."""

import json

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Kalo", "Ren"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=60)


def test_models(client, server):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model


def test_a_chat_completion_and_its_stream_are_equal(client, server):
    settings = {"model": server.model, "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert [choice.delta.role for choice in choices].count("assistant") == 1
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1


def test_every_parameter_of_a_chat_completion(client, server):
    answer = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "system", "content": "Be short."}, *HELLO],
        max_tokens=8,
        temperature=0.7,
        top_p=0.9,
        n=2,
        seed=7,
        stop=["zzz"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
        user="someone",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs.content
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3
            assert token.logprob <= 0
            assert isinstance(token.bytes, list)


def test_a_seed_repeats_a_sample(client, server):
    def sample(seed):
        answer = client.chat.completions.create(
            model=server.model, messages=HELLO, max_tokens=12, temperature=1.5, seed=seed
        )
        return answer.choices[0].message.content

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(6)}) > 1


def test_logprob_bytes_make_the_text(client, server):
    answer = client.chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=16, temperature=1.5, seed=3, logprobs=True
    )
    raw = b"".join(bytes(token.bytes) for token in answer.choices[0].logprobs.content)
    assert raw.decode("utf-8", "replace").startswith(answer.choices[0].message.content.rstrip("\ufffd"))


def test_completions(client, server):
    answer = client.completions.create(
        model=server.model,
        prompt=["hello", "good morning"],
        max_tokens=5,
        temperature=0,
        n=2,
        logprobs=2,
        seed=1,
        stop="zzz",
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -100},
        user="someone",
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)
    pieces = client.completions.create(
        model=server.model, prompt="hello", max_tokens=5, temperature=0, stream=True, echo=True
    )
    whole = client.completions.create(model=server.model, prompt="hello", max_tokens=5, temperature=0, echo=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    ids = client.completions.create(model=server.model, prompt=[5, 6, 7], max_tokens=2, temperature=0)
    assert ids.usage.prompt_tokens == 3


def test_structured_output(client, server):
    answer = client.chat.completions.create(
        model=server.model,
        messages=HELLO,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert found["name"] in ("Kalo", "Ren")
    assert 0 <= found["age"] <= 99
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_call(client, server, choice, stream):
    settings = {"model": server.model, "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 120}
    settings |= {"temperature": 0}
    if stream:
        chunks = [c.choices[0] for c in client.chat.completions.create(**settings, stream=True) if c.choices]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert [call.function.name for call in calls if call.function.name] == ["add"]
        assert {call.index for call in calls} == {0}
        arguments = "".join(call.function.arguments or "" for call in calls)
        finish = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
    else:
        answer = client.chat.completions.create(**settings)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, call.function.name) == ("function", "add")
        assert call.id
        arguments, finish = call.function.arguments, [answer.choices[0].finish_reason]
    assert set(json.loads(arguments)) == {"a", "b"}
    assert finish in (["tool_calls"], ["stop"])
    if choice == "required":
        assert finish == ["tool_calls"]


def test_a_tool_result_in_the_messages(client, server):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    answer = client.chat.completions.create(model=server.model, messages=messages, tools=[TOOL], max_tokens=4)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_responses(client, server):
    answer = client.responses.create(
        model=server.model, input="hello", instructions="Be short.", max_output_tokens=16, temperature=0
    )
    assert answer.status in ("completed", "incomplete")
    events = list(
        client.responses.create(
            model=server.model,
            input="hello",
            instructions="Be short.",
            max_output_tokens=16,
            temperature=0,
            stream=True,
        )
    )
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].type == f"response.{answer.status}"
    assert events[-1].response.output_text == text == answer.output_text
    settings = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    with client.responses.stream(model=server.model, input="hello", max_output_tokens=300, text=settings) as stream:
        assert json.loads(stream.get_final_response().output_text)["name"] in ("Kalo", "Ren")


def test_embeddings(client, server):
    answer = client.embeddings.create(model=server.model, input=["hello", "good morning", "hello"])
    first, second, third = (one.embedding for one in answer.data)
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-4)
    assert first == pytest.approx(third, abs=1e-5)
    assert first != pytest.approx(second, abs=1e-3)
    plain = client.embeddings.create(model=server.model, input="hello", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-5)


def test_errors(client, server):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert server.model in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=server.model, prompt="hello " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=server.model, messages=[])
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
