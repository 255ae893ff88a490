"""`/metrics` has the numbers of the requests that were answered, as the library of Prometheus reads them."""

from prometheus_client.parser import text_string_to_metric_families
from serving import Caller, Gate, until


def read(text):
    """(name, model or path, further label) -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def test_numbers_are_those_of_the_requests(serve):
    async def test(client):
        async def numbers():
            return read((await client.get("/metrics")).text)

        before = await numbers()
        assert before["weft_requests_running", "tiny"] == before["weft_generated_tokens_total", "tiny"] == 0
        usages = []
        for stream in (False, True):
            body = {"prompt": "Kalo mi", "max_tokens": 7, "n": 2, "stream": stream, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            usages += [] if stream else [response.json()["usage"]]
        await client.post("/v1/completions", json={"prompt": 1.5})
        await client.get("/nowhere/1")
        found = await numbers()
        assert found["weft_generated_tokens_total", "tiny"] == 2 * usages[0]["completion_tokens"] == 28
        assert found["weft_prompt_tokens_total", "tiny"] == 2 * usages[0]["prompt_tokens"]
        assert found["weft_time_to_first_token_seconds_count", "tiny"] == 2
        assert found["weft_time_per_output_token_seconds_count", "tiny"] == 2
        assert 0 < found["weft_time_to_first_token_seconds_sum", "tiny"] < 60
        assert found["weft_http_requests_total", "/v1/completions", "200"] == 2
        assert found["weft_http_requests_total", "/v1/completions", "400"] == 1
        assert found["weft_http_requests_total", "other", "404"] == 1

    serve(test, max_cache_tokens=2048)


def test_texts_that_run_and_wait_and_their_part_of_the_cache(serve):
    async def test(client):
        (model,) = client.models
        gate = Gate(model.engine)
        body = {"prompt": [5] * 100, "max_tokens": 20, "ignore_eos": True}
        callers = [Caller(client, "/v1/completions", body) for _ in range(3)]
        await until(lambda: len(model.worker.generations) == 3)
        gate.allow(3)
        await until(lambda: len(model.engine.running) == 1 and len(model.engine.waiting) == 2)
        found = read((await client.get("/metrics")).text)
        assert (found["weft_requests_running", "tiny"], found["weft_requests_waiting", "tiny"]) == (1, 2)
        capacity, ratio = found["weft_cache_capacity_tokens", "tiny"], found["weft_cache_used_ratio", "tiny"]
        assert 100 <= capacity * ratio <= 150
        gate.open()
        for caller in callers:
            await caller.task

    serve(test, max_cache_tokens=2048, max_batch=1)


def test_the_numbers_need_the_key(serve):
    async def test(client):
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"Authorization": "Bearer k"})).status_code == 200

    serve(test, settings={"api_keys": ("k",)})
