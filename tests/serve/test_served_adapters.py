"""Adapters are added and removed while the server runs, by those who have the admin key."""

import asyncio
import threading

import peft
import pytest
import torch
from serving import until
from transformers import AutoModelForCausalLM

import weft

ADMIN = {"Authorization": "Bearer secret-admin"}
LEGAL = {"lora_name": "legal"}
TEXTS = {"model": "legal", "input": ["Kalo", "mi"] * 20}
PROMPT = {"prompt": "Kalo mi", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(chat_model, tmp_path_factory):
    """A folder with the PEFT adapter `one`, which changes texts, and a link to a place outside of the folder."""
    made = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    theirs = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"]))
    torch.manual_seed(1)
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    theirs.save_pretrained(made / "one")
    (made / "link").symlink_to("/")
    (made / "broken").mkdir()
    (made / "broken" / "adapter_config.json").write_text("{")
    return made


def settings(adapters):
    return {"admin_keys": ("secret-admin",), "api_keys": ("user",), "adapter_folder": str(adapters)}


def test_an_adapter_is_a_model_while_it_is_loaded(serve, adapters, chat_model):
    plain = weft.generate(chat_model, PROMPT["prompt"], 8)
    adapted = weft.generate(chat_model, PROMPT["prompt"], 8, adapter=adapters / "one")
    assert plain != adapted

    async def test(client):
        async def text(model):
            response = await client.post("/v1/completions", json=PROMPT | {"model": model}, headers=ADMIN)
            return response.json()["choices"][0]["text"] if response.is_success else response.status_code

        for path in ("one", str(adapters / "one")):
            body = {"lora_name": "legal", "lora_path": path}
            response = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
            assert (response.status_code, response.json()["parent"]) == (200, "tiny"), response.text
            again = await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
            assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
            listed = (await client.get("/v1/models", headers=ADMIN)).json()["data"]
            assert [(one["id"], one["parent"]) for one in listed] == [("tiny", None), ("legal", "tiny")]
            assert (await text("legal"), await text("tiny")) == (adapted, plain)
            embedded = [
                (await client.post("/v1/embeddings", json={"model": m, "input": "Ren"}, headers=ADMIN)).json()["data"]
                for m in ("legal", "tiny")
            ]
            assert embedded[0] != embedded[1]
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"}, headers=ADMIN)
            assert gone.status_code == 200
            assert (await text("legal"), await text("tiny")) == (404, plain)

    serve(test, settings=settings(adapters))


def test_an_adapter_in_use_stays(serve, adapters):
    async def test(client):
        body = {"lora_name": "legal", "lora_path": "one"}
        await client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)
        (model,) = client.models
        sampling = weft.Sampling(400, 0.0)
        async with await model.worker.submit([[5]], sampling, stop_ids=(), adapter="legal"):
            gone = await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"}, headers=ADMIN)
            assert (gone.status_code, gone.json()["error"]["code"]) == (409, "adapter_in_use")
        # A request for embeddings is computed text by text. The adapter stays between two texts.
        hold, embedded = (
            threading.Event(),
            asyncio.create_task(client.post("/v1/embeddings", json=TEXTS, headers=ADMIN)),
        )
        await until(lambda: model.adapters["legal"].requests == 1)
        held = asyncio.create_task(model.worker.call(lambda _: hold.wait(30)))
        gone = asyncio.create_task(client.post("/v1/unload_lora_adapter", json=LEGAL, headers=ADMIN))
        again = await client.post("/v1/unload_lora_adapter", json=LEGAL, headers=ADMIN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "adapter_in_use")
        hold.set()
        await held
        assert ((await gone).status_code, (await embedded).status_code) == (409, 200)
        assert len((await embedded).json()["data"]) == len(TEXTS["input"])
        gone = await client.post("/v1/unload_lora_adapter", json=LEGAL, headers=ADMIN)
        assert gone.status_code == 200
        gone = await client.post("/v1/unload_lora_adapter", json=LEGAL, headers=ADMIN)
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "lora_name")

    serve(test, settings=settings(adapters))


def test_others_are_refused(serve, adapters):
    user = {"Authorization": "Bearer user"}
    cases = [
        ({}, user, {}, 403, "admin_key_required"),
        ({}, {}, {}, 401, "invalid_api_key"),
        ({"admin_keys": ()}, user, {}, 403, "admin_disabled"),
        ({"adapter_folder": None}, ADMIN, {}, 403, "adapters_disabled"),
        ({}, ADMIN, {"lora_path": "../one"}, 403, "path_not_allowed"),
        ({}, ADMIN, {"lora_path": "/etc"}, 403, "path_not_allowed"),
        ({}, ADMIN, {"lora_path": "link/etc"}, 403, "path_not_allowed"),
        ({}, ADMIN, {"lora_path": "none"}, 400, "invalid_adapter"),
        ({}, ADMIN, {"lora_path": "broken"}, 400, "invalid_adapter"),
        ({}, ADMIN, {"lora_name": "tiny"}, 400, "adapter_exists"),
        ({}, ADMIN, {"lora_name": "a\nb"}, 400, "invalid_value"),
        ({}, ADMIN, {"base_model_name": "no"}, 404, "model_not_found"),
        ({}, ADMIN, {"other": 1}, 400, "unknown_parameter"),
    ]
    for changed, headers, more, status, code in cases:

        async def test(client, headers=headers, more=more, status=status, code=code):
            body = {"lora_name": "legal", "lora_path": "one"} | more
            response = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code), more
            response = await client.post("/v1/unload_lora_adapter", json={"lora_name": "legal"}, headers=headers)
            assert response.status_code == (404 if headers is ADMIN else status)

        serve(test, settings=settings(adapters) | changed)
