"""The texts of the server are those of the model, for any number of requests at once."""

import asyncio

import pytest
from chat_model import SYSTEM, TURNS
from serving import events

import weft

CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TURNS[0][0]}]


def test_a_chat_is_answered_as_learned(serve):
    async def test(client):
        body = {"model": "tiny", "messages": CHAT, "temperature": 0}
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        (choice,) = whole["choices"]
        assert choice["message"] == {"role": "assistant", "content": TURNS[0][1], "refusal": None}
        assert (choice["finish_reason"], whole["object"], whole["model"]) == ("stop", "chat.completion", "tiny")
        stream = body | {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(await client.post("/v1/chat/completions", json=stream))
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert [("role" in delta) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        assert "".join(delta.get("content", "") for delta in deltas) == TURNS[0][1]
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert {c["usage"] for c in chunks} == {None}

    serve(test)


def test_texts_do_not_depend_on_other_requests(serve, chat_model):
    prompts = ["Kalo mi", "Ren sta", "Pra el. ", "Tu vo", "Ka lo tu", "Shi", "El", "Mi vo."]
    alone = {}
    for i, prompt in enumerate(prompts):
        for temperature in (0.0, 0.9):
            text = weft.generate(chat_model, prompt, 12 + i, temperature, seed=i)
            alone[prompt, temperature] = text

    async def test(client):
        async def one(i, prompt, temperature):
            body = {"prompt": prompt, "max_tokens": 12 + i, "temperature": temperature, "seed": i, "stream": i % 2 == 1}
            response = await client.post("/v1/completions", json=body)
            if body["stream"]:
                return "".join(event["choices"][0]["text"] for event in events(response))
            return response.json()["choices"][0]["text"]

        keys = [(i, prompt, temperature) for i, prompt in enumerate(prompts) for temperature in (0.0, 0.9)]
        texts = await asyncio.gather(*(one(*key) for key in keys))
        assert dict(zip([key[1:] for key in keys], texts, strict=True)) == alone

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_n_choices_each(serve, stream):
    async def test(client):
        body = {
            "prompt": ["Kalo mi", "Ren "],
            "n": 2,
            "max_tokens": 6,
            "temperature": 3,
            "seed": 3,
            "echo": True,
            "stream": stream,
        }
        response = await client.post("/v1/completions", json=body)
        texts = [""] * 4
        for event in events(response) if stream else [response.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert [text.startswith(prompt) for text, prompt in zip(texts, ["Kalo mi"] * 2 + ["Ren "] * 2, strict=True)]
        assert len(set(texts)) == 4

    serve(test)
