"""Each parameter has its effect or is refused; errors have the status and the body of OpenAI's API."""

import asyncio
import json
import threading

import pytest
import torch
from chat_model import SYSTEM, TURNS
from serving import Caller, Gate, events, until

import weft

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Kalo mi ren?"}]
KEY = {"authorization": "Bearer one"}


@pytest.fixture
def ask(serve):
    """Sends one request: `ask(path, body, **options of serve) -> response`."""

    def send(path, body, headers=None, **options):
        async def test(client):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=data, headers={"content-type": "application/json"} | (headers or {}))

        return serve(test, **options)

    return send


REFUSED = [
    (CHAT, {"messages": MESSAGES, "model": "gpt"}, 404, "model_not_found", "model", "tiny"),
    (CHAT, {"messages": MESSAGES, "temprature": 1}, 400, "unknown_parameter", "temprature", "/openapi.json"),
    (CHAT, {"temperature": 1}, 400, "missing_required_parameter", "messages", "set it"),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, 400, "invalid_value", "temperature", "number"),
    (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "invalid_value", "temperature", "0"),
    (CHAT, {"messages": MESSAGES, "top_p": 1.5}, 400, "invalid_value", "top_p", "1"),
    (CHAT, {"messages": MESSAGES, "stop": ["a", ""]}, 400, "invalid_value", "stop", "empty"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"9999": 1}}, 400, "invalid_value", "logit_bias", "9999"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias.a", "pattern"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "invalid_value", "top_logprobs", "logprobs: true"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"u": 1}}, 400, "unknown_parameter", "stream_options.u", "remove"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages", "at least 1"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "invalid_value", "messages.0.role", "'user'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]}, 400,
     "invalid_value", "messages.0.content.0.type", "'text'"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]}, 400,
     "unknown_parameter", "messages.0.content.0.b", "remove"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "missing_required_parameter",
     "messages.0.content.0.text", "set it"),
    (CHAT, {"messages": MESSAGES, "stream_options": {}}, 400, "invalid_value", "stream_options", "stream: true"),
    (CHAT, {"messages": MESSAGES, "stop": ["a"] * 17}, 400, "invalid_value", "stop", "16"),
    (CHAT, {"messages": MESSAGES, "stop": [1]}, 400, "invalid_value", "stop", "a string, a list of strings;"),
    (CHAT, {"messages": MESSAGES, "tool_choice": {"type": "function"}}, 400, "missing_required_parameter",
     "tool_choice.function", "set it"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "yaml"}}, 400, "invalid_value", "response_format.type",
     "'yaml'; use one of 'text', 'json_object', 'json_schema'"),
    (CHAT, {"messages": MESSAGES, "response_format": {}}, 400, "missing_required_parameter", "response_format.type",
     "set it"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "missing_required_parameter",
     "response_format.json_schema", "set it"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, 400,
     "invalid_value", "response_format.json_schema.name", "pattern"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "invalid_message", "messages", "missing"),
    (CHAT, {"messages": [{"role": "user", "content": "ka lo " * 400}]}, 400, "context_length_exceeded",
     "messages", "512"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 101}, 400, "too_many_tokens", "max_completion_tokens",
     "100"),
    (TEXT, {"prompt": [1, 2, 99999]}, 400, "invalid_value", "prompt", "99999"),
    (TEXT, {"prompt": []}, 400, "invalid_value", "prompt", "empty"),
    (TEXT, {"prompt": [[]]}, 400, "invalid_value", "prompt", "no tokens"),
    (TEXT, {"prompt": [5] * 512}, 400, "context_length_exceeded", "prompt", "512"),
    (TEXT, {"prompt": "a", "n": 65}, 400, "too_many_choices", "n", "64"),
    (TEXT, {"prompt": ["a"] * 33, "n": 2}, 400, "too_many_choices", "n", "66"),
    (TEXT, {"prompt": "a", "best_of": 3}, 400, "unsupported_value", "best_of", "remove"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "invalid_value", "suffix", ""),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens", "1"),
    (TEXT, {"prompt": [1, "a"]}, 400, "invalid_value", "prompt", "types: a string, a list of strings, a list of "
     "integers, a list of lists of integers;"),
    (TEXT, {"prompt": 5}, 400, "invalid_value", "prompt", "a list of strings, a list of integers,"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", "messages.0.content",
     "/openapi.json"),
    (TEXT, b"{", 400, "invalid_json", None, "JSON"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, "invalid_json", None, "UTF-8"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", None, "JSON"),
    (TEXT, b"[" * 3000, 400, "invalid_json", None, "JSON"),
    (TEXT, b"[1]", 400, "invalid_value", None, "object"),
    (TEXT, b"", 400, "missing_body", None, "object"),
    (TEXT, b" " * 4097, 413, "request_too_large", None, "4,096"),
    ("/v1/complete", {}, 404, "unknown_url", None, "/openapi.json"),
    ("/health", {}, 405, "method_not_allowed", None, "method"),
]  # fmt: skip


def test_errors(serve):
    async def test(client):
        for path, body, status, code, param, words in REFUSED:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = await client.post(path, content=data, headers={"content-type": "application/json"})
            found = response.json()["error"]
            assert (response.status_code, found["code"], found["param"]) == (status, code, param), (body, found)
            assert words in found["message"]
            assert "\n" not in found["message"]
            kind = {404: "not_found_error"}.get(status, "invalid_request_error")
            assert found == {"message": found["message"], "type": kind, "param": param, "code": code}
            assert response.headers["x-content-type-options"] == "nosniff"

    settings = {"max_body": 4096, "max_new_tokens": 100, "max_choices": 64}
    serve(test, settings=settings)


def test_other_types_than_json_are_refused(ask):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = ask(TEXT, b'{"prompt": "a"}', {"content-type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_keys(serve):
    async def test(client):
        async def status(method, path, key=None, scheme="Bearer"):
            headers = {} if key is None else {"authorization": f"{scheme} {key}".encode()}
            response = await client.request(
                method, path, json={"prompt": "a"} if method == "POST" else None, headers=headers
            )
            if response.status_code == 401:
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            return response.status_code

        assert await status("GET", "/health") == 200
        for path in ("/v1/models", "/openapi.json", "/nothing", "/health/", "/page", "/v1/models/tiny"):
            assert await status("GET", path) == 401, path
        for key in ("", "wrong", "on", "one1", "öne", "one two"):
            assert await status("GET", "/v1/models", key) == 401
        assert await status("GET", "/v1/models", "one", "Basic") == 401
        assert await status("POST", TEXT) == 401
        for key in ("one", "zwei ö", "boss"):
            assert await status("POST", TEXT, key) == 200

    serve(test, settings={"api_keys": ("one", "zwei ö"), "admin_keys": ("boss",)})


def test_head_is_get_without_the_body(serve):
    async def test(client):
        for path, headers, status in (
            ("/health", {}, 200), ("/v1/models", KEY, 200), ("/", {}, 200), ("/v1/models", {}, 401), (TEXT, KEY, 405),
        ):  # fmt: skip
            get, head = [await client.request(m, path, headers=headers) for m in ("GET", "HEAD")]
            assert (get.status_code, head.status_code) == (status, status), path
            assert (head.content, get.headers["content-length"]) == (b"", head.headers["content-length"])

    serve(test, settings={"api_keys": ("one",)})


def test_checks_of_a_server_that_hangs_do_not_queue_up(serve):
    async def test(client):
        (model,), hold = client.models, threading.Event()
        held = asyncio.create_task(model.worker.call(lambda _: hold.wait(30)))
        assert set(await asyncio.gather(*(model.check(0.05) for _ in range(20)))) == {
            "the engine has not responded for 0.05 seconds"
        }
        assert len(model.worker._answers) <= 2  # of `held` and of all checks
        hold.set()
        await held
        assert (await client.get("/health")).status_code == 200

    serve(test)


def test_other_hosts_and_origins_are_refused(serve):
    async def test(client):
        for host, status in (("127.0.0.1:80", 200), ("LOCALHOST", 200), ("[::1]:9", 200), ("evil.example", 403),
                             ("127.0.0.1.evil.example", 403), ("", 403), ("[", 403)):  # fmt: skip
            response = await client.get("/v1/models", headers={"host": host, "origin": "http://evil.example"})
            assert response.status_code == status, host
            assert not any(name.startswith("access-control") for name in response.headers)

    serve(test, settings={"hosts": ("localhost", "127.0.0.1", "::1")})


def test_pages_of_an_allowed_origin_can_send_keys(serve):
    async def test(client):
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, allowed in (("http://page.test", "http://page.test"), ("http://other.test", None)):
            response = await client.options(TEXT, headers={"origin": origin, **asks})
            assert response.headers.get("access-control-allow-origin") == allowed
            assert response.is_success == (allowed is not None)
        response = await client.post(TEXT, json={"prompt": "a"}, headers={"origin": "http://page.test"})
        assert response.status_code == 401  # the request itself needs the key
        assert response.headers["access-control-allow-origin"] == "http://page.test"

    serve(test, settings={"api_keys": ("one",), "cors_origins": ("http://page.test",)})


def test_a_full_queue(serve):
    async def test(client):
        gate, worker = Gate(client.models[0].engine), client.models[0].worker
        callers = [Caller(client, TEXT, {"prompt": "a", "max_tokens": 3, "n": 2}) for _ in range(2)]
        await until(lambda: len(worker.generations) == 2)
        refused = await client.post(TEXT, json={"prompt": "a", "n": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/v1/models")).status_code == 200
        gate.open()
        for caller in callers:
            await caller.task
        assert (await client.post(TEXT, json={"prompt": "a", "n": 4})).status_code == 200
        never = await client.post(TEXT, json={"prompt": "a", "n": 6})
        assert (never.status_code, never.json()["error"]["code"]) == (400, "too_many_choices")

    serve(test, max_batch=2, max_waiting=3)


def test_models(serve):
    async def test(client):
        listed = (await client.get("/v1/models")).json()
        assert [(one["id"], one["object"]) for one in listed["data"]] == [("one", "model"), ("two/b", "model")]
        assert {one["max_model_len"] for one in listed["data"]} == {512}
        assert (await client.get("/v1/models/two/b")).json() == listed["data"][1]
        assert (await client.get("/v1/models/three")).json()["error"]["code"] == "model_not_found"
        for name in ("one", "two/b"):
            body = {"prompt": "Kalo", "model": name, "max_tokens": 2, "temperature": 0}
            assert (await client.post(TEXT, json=body)).json()["model"] == name

    serve(test, names=("one", "two/b"))


def test_settings_choose_tokens(serve):
    async def test(client):
        async def text(**body):
            response = await client.post(TEXT, json={"prompt": "Kalo mi", "max_tokens": 20, "ignore_eos": True} | body)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["text"]

        greedy = await text(temperature=0)
        assert await text(temperature=0, top_p=0.5, top_k=3, min_p=0.1) == greedy
        assert await text(temperature=5, top_p=0) == greedy == await text(temperature=5, top_k=1)
        assert await text(temperature=5, min_p=1) == greedy
        assert await text(temperature=5, top_k=-1, seed=1) == await text(temperature=5, top_k=0, seed=1) != greedy
        texts = [await text(temperature=5, seed=seed) for seed in (1, 1, 2, None, None)]
        assert len(set(texts)) == 4  # without a seed, another text each time
        assert await text(seed=7) == await text(seed=7, temperature=1)
        for change in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 9}):
            assert await text(temperature=0, **change) != greedy
        choice = (await client.post(TEXT, json={"prompt": "Kalo mi", "temperature": 0, "logprobs": 0})).json()[
            "choices"
        ][0]
        tokenizer = client.models[0].tokenizer
        first = next(
            id for id in range(tokenizer.vocab_size) if tokenizer.decode([id]) == choice["logprobs"]["tokens"][0]
        )
        assert not (await text(temperature=0, logit_bias={str(first): -100})).startswith(greedy[:5])
        assert await text(temperature=0, user="a", store=False, metadata={"a": "b"}, service_tier="auto") == greedy
        stop = greedy[5:8]
        assert (
            await text(temperature=0, stop=stop)
            == greedy[: greedy.index(stop)]
            == await text(temperature=0, stop=["nothing", stop])
        )

    serve(test)


def test_max_tokens(serve):
    async def test(client):
        async def tokens(path, **body):
            body |= {"prompt": "Kalo"} if path == TEXT else {"messages": MESSAGES}
            answer = (await client.post(path, json=body | {"ignore_eos": True, "temperature": 0})).json()
            assert answer["choices"][0]["finish_reason"] == "length"
            return answer["usage"]["completion_tokens"]

        assert await tokens(TEXT) == 16
        assert await tokens(TEXT, max_tokens=3) == 3
        assert await tokens(CHAT, max_tokens=3) == 3
        assert await tokens(CHAT, max_tokens=30, max_completion_tokens=2) == 2

    serve(test)


def test_the_window_ends_a_text(serve):
    async def test(client):
        body = {"prompt": [5] * 500, "max_tokens": 100, "ignore_eos": True}
        answer = (await client.post(TEXT, json=body)).json()
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (12, "length")
        chat = {"messages": [{"role": "user", "content": "ka lo " * 200}], "ignore_eos": True}
        usage = (await client.post(CHAT, json=chat)).json()["usage"]
        assert usage["total_tokens"] == 512

    serve(test)


def test_a_small_cache_is_a_small_window(ask):
    response = ask(TEXT, {"prompt": [5] * 64}, max_cache_tokens=64)
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_roles_and_parts_of_messages(serve):
    async def test(client):
        async def answer(*messages):
            body = {"messages": list(messages), "temperature": 0}
            return (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]

        system = {"role": "developer", "content": SYSTEM}
        parts = {"role": "user", "content": [{"type": "text", "text": "Kalo mi "}, {"type": "text", "text": "ren?"}]}
        assert await answer(system, parts) == TURNS[0][1]
        past = [
            {"role": "assistant", "content": TURNS[0][1], "refusal": None},
            {"role": "user", "content": TURNS[1][0]},
        ]
        assert await answer(system, parts, *past) == TURNS[1][1]

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_model(serve, chat_model, stream):
    model, ids = weft.load_model(chat_model), weft.Tokenizer.load(chat_model).prompt("Kalo mi").ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids]))[0, -1].log_softmax(-1).topk(3)

    async def test(client):
        body = {"prompt": "Kalo mi", "logprobs": 3, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        response = await client.post(TEXT, json=body | {"stream": stream})
        found = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for chunk in events(response) if stream else [response.json()]:
            for key, values in found.items():
                values += chunk["choices"][0]["logprobs"][key]
        assert {len(value) for value in found.values()} == {5}
        assert found["token_logprobs"][0] == pytest.approx(expected.values[0].item(), abs=1e-4)
        assert list(found["top_logprobs"][0].values()) == pytest.approx(expected.values.tolist(), abs=1e-4)
        assert found["tokens"][0] == next(iter(found["top_logprobs"][0]))
        assert found["text_offset"][0] == 0

    serve(test)
