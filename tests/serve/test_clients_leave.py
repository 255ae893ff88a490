"""A client that leaves frees its own place, wherever its request is; failures of the engine reach those who wait."""

import asyncio
import json

from serving import Caller, Gate, until

import weft
from weft.serve.errors import ApiError

LONG = "Kalo mi ren sta tu vo. " * 12
PATH = "/v1/completions"


def neighbour(tokens=40):
    return {"prompt": "Kalo mi", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def alone(chat_model, tokens=40):
    return weft.generate(chat_model, "Kalo mi", tokens, ignore_eos=True)


def text_of(caller):
    return json.loads(caller.text)["choices"][0]["text"]


def streamed(caller, index):
    """The text of a choice that the caller has received so far."""
    lines = [line.removeprefix("data: ") for line in caller.text.split("\n\n")]
    found = [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]
    return "".join(choice["text"] for choice in found if choice["index"] == index)


def test_a_client_that_waits_in_the_queue_leaves(serve, chat_model):
    async def test(client):
        engine, worker = client.models[0].engine, client.models[0].worker
        gate = Gate(engine)
        first = Caller(client, PATH, neighbour())
        await until(lambda: len(worker.generations) == 1)
        second, third = Caller(client, PATH, neighbour(5)), Caller(client, PATH, neighbour(6))
        await until(lambda: len(worker.generations) == 3)
        gate.allow(4)
        await second.leave()
        assert second.received == []
        assert len(worker.generations) == 2
        gate.open()
        await asyncio.gather(first.task, third.task)
        assert text_of(first) == alone(chat_model)
        assert text_of(third) == alone(chat_model, 6)
        assert engine.new_tokens == 40 + 6
        assert (worker.open, worker.generations) == (0, {})

    serve(test, max_batch=1)


def test_a_client_leaves_during_its_prompt(serve, chat_model):
    async def test(client):
        engine, worker = client.models[0].engine, client.models[0].worker
        gate = Gate(engine)
        stays = Caller(client, PATH, neighbour())
        leaves = Caller(client, PATH, {"prompt": LONG, "max_tokens": 30})
        await until(lambda: len(worker.generations) == 2)
        gate.allow(3)  # 16 tokens each, some of them the other request's
        await until(lambda: engine.steps == 3)
        prompt = len(client.models[0].tokenizer.encode(LONG))
        assert 16 < engine.computed_tokens < prompt
        await leaves.leave()
        gate.open()
        await stays.task
        assert text_of(stays) == alone(chat_model)
        assert engine.new_tokens == 40
        assert engine.computed_tokens < 40 + prompt
        assert leaves.received == []

    serve(test, max_step_tokens=16)


def test_a_client_leaves_during_its_text(serve, chat_model):
    async def test(client):
        engine, worker = client.models[0].engine, client.models[0].worker
        gate = Gate(engine)
        stays = Caller(client, PATH, neighbour())
        leaves = [Caller(client, PATH, neighbour(400) | {"n": 2, "stream": stream}) for stream in (False, True)]
        await until(lambda: len(worker.generations) == 3)
        gate.allow(6)
        await until(lambda: engine.steps == 6)
        begun = alone(chat_model, 3)  # in any number of events: a busy server sends several tokens in one
        await until(lambda: all(streamed(leaves[1], index).startswith(begun) for index in range(2)))
        for caller in leaves:
            await caller.leave()
        assert 'finish_reason":"' not in leaves[1].text
        gate.open()
        await stays.task
        assert text_of(stays) == alone(chat_model)
        assert engine.new_tokens < 40 + 4 * 9
        assert (worker.open, worker.generations) == (0, {})

    serve(test)


def test_a_client_leaves_before_its_prompt_is_encoded(serve, chat_model):
    async def test(client):
        callers = [Caller(client, PATH, neighbour(3)) for _ in range(20)]
        await asyncio.gather(*(caller.leave() for caller in callers))
        response = await client.post(PATH, json=neighbour(5))
        assert response.json()["choices"][0]["text"] == alone(chat_model, 5)
        assert client.models[0].worker.open == 0

    serve(test)


def test_time_is_over(serve):
    async def test(client):
        gate = Gate(client.models[0].engine)
        response = await client.post(PATH, json=neighbour(3))
        caller = Caller(client, PATH, neighbour() | {"stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        await caller.task
        assert json.loads(caller.text.removeprefix("data: "))["error"]["code"] == "timeout"
        gate.open()
        assert client.models[0].worker.open == 0

    serve(test, settings={"request_timeout": 0.3})


def test_the_end_of_the_drain_timeout_ends_requests(serve):
    async def test(client):
        gate = Gate(client.models[0].engine)
        callers = [Caller(client, PATH, neighbour() | {"stream": stream}) for stream in (False, True)]
        await until(lambda: len(client.models[0].worker.generations) == 2)
        gate.allow(1)  # between two steps, the engine's thread accepts the second request
        await until(lambda: len(callers[1].received) > 0)
        error = ApiError(503, "server_shutting_down", "later")
        client._transport.app.state.services.exchanges.abort(error)
        await asyncio.gather(*(caller.task for caller in callers))
        assert callers[0].received[0]["status"] == 503
        assert [json.loads(caller.text.split("data: ")[-1]) for caller in callers] == [error.body] * 2
        gate.open()

    serve(test)


def test_a_failed_step_ends_its_requests_only(serve, chat_model):
    async def test(client):
        engine, forward = client.models[0].engine, client.models[0].engine.runner.forward

        def fail(*_):
            raise RuntimeError("secret path")

        engine.runner.forward = fail
        response = await client.post(PATH, json=neighbour())
        assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
        assert response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text
        engine.runner.forward = forward
        assert (await client.post(PATH, json=neighbour())).json()["choices"][0]["text"] == alone(chat_model)
        assert (await client.get("/health")).json() == {"status": "ok"}

    serve(test)


def test_an_engine_that_fails_again_and_again_is_reported(serve):
    async def test(client):
        model, other = client.models
        gate = Gate(model.engine)
        waiting = [Caller(client, PATH, neighbour() | {"stream": stream}) for stream in (False, True)]
        await until(lambda: len(model.worker.generations) == 2)
        gate.allow(3)
        await until(lambda: "data: " in waiting[1].text)

        def fail():
            raise RuntimeError("a bug")

        gate._step = fail
        gate.open()
        await asyncio.gather(*(caller.task for caller in waiting))
        assert waiting[0].received[0]["status"] == 500
        assert json.loads(waiting[0].text)["error"]["code"] == "engine_error"
        assert json.loads(waiting[1].text.split("data: ")[-1])["error"]["code"] == "engine_error"
        health = await client.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "one" in health.json()["error"]["message"]
        assert model.worker.failed.is_set()
        later = await client.post(PATH, json=neighbour())
        assert later.status_code == 500
        assert (await client.post(PATH, json=neighbour(2) | {"model": "two"})).status_code == 200
        assert other.worker.failure is None

    serve(test, names=("one", "two"))
