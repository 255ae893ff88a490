"""Embeddings, log-probabilities and token ids over HTTP, against Transformers."""

import base64

import numpy as np
import pytest
import torch
from chat_model import SYSTEM, TURNS
from serving import events
from transformers import AutoModelForCausalLM, AutoTokenizer

CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TURNS[0][0]}]
TEXTS = ["Kalo mi ren?", "né 日本! 😀"]


def test_embeddings_are_those_of_transformers(serve, chat_model):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat_model), AutoTokenizer.from_pretrained(chat_model)
    encoded = [tokenizer.encode(text) for text in TEXTS]  # with special tokens
    expected = []
    for ids in encoded:
        with torch.no_grad():
            hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        expected.append({"mean": hidden.mean(0), "last": hidden[-1]})

    async def test(client):
        async def post(**body):
            response = await client.post("/v1/embeddings", json=body)
            return response.status_code, response.json()

        for pooling in ("mean", "last"):
            for given in (TEXTS, encoded):
                _, answer = await post(input=given, pooling=pooling)
                for one, theirs in zip(answer["data"], expected, strict=True):
                    vector = theirs[pooling] / theirs[pooling].norm()
                    torch.testing.assert_close(torch.tensor(one["embedding"]), vector, rtol=1e-4, atol=1e-5)
                assert answer["usage"]["prompt_tokens"] == sum(map(len, encoded))
        _, single = await post(input=TEXTS[1], dimensions=64)
        _, coded = await post(input=encoded[1], encoding_format="base64")
        raw = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
        np.testing.assert_array_equal(raw, np.array(single["data"][0]["embedding"], "<f4"))
        for body, param in (({"dimensions": 8}, "dimensions"), ({"input": []}, "input"), ({"pooling": "x"}, "pooling")):
            status, answer = await post(**{"input": "Ren"} | body)
            assert (status, answer["error"]["param"]) == (400, param)
        for ids, code in (([7] * 513, "context_length_exceeded"), ([99999], "invalid_value"), ([[]], "invalid_value")):
            status, answer = await post(input=ids)
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, "input")

    serve(test)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_bytes_of_each_token_and_its_own_list(serve, chat_model, stream):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(chat_model), AutoTokenizer.from_pretrained(chat_model)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    with torch.no_grad():
        new = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ]
        logprobs = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    async def test(client):
        async def answers(path, **body):
            body |= {"max_tokens": 24, "temperature": 0, "stream": stream}
            response = await client.post(path, json=body)
            return [choice for one in (events(response) if stream else [response.json()]) for choice in one["choices"]]

        found = await answers("/v1/completions", prompt=prompt, logprobs=3)
        text = "".join(choice["text"] for choice in found)
        columns = [choice["logprobs"] for choice in found if choice["logprobs"]]
        values, tops, tokens, offsets = (
            [x for part in columns for x in part[key]]
            for key in ("token_logprobs", "top_logprobs", "tokens", "text_offset")
        )
        torch.testing.assert_close(torch.tensor(values), logprobs.gather(1, new[:, None])[:, 0], rtol=1e-4, atol=1e-4)
        best = logprobs.topk(3).values
        torch.testing.assert_close(torch.tensor([list(top.values()) for top in tops]), best, rtol=1e-4, atol=1e-4)
        assert any(token.startswith("bytes:\\x") for token in tokens)  # a part of a character
        for token, offset in zip(tokens, offsets, strict=True):
            assert token.startswith("bytes:") or text[offset:].startswith(token)
        chat = await answers("/v1/chat/completions", messages=CHAT, logprobs=True, top_logprobs=2)
        entries = [entry for choice in chat if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        content = "".join(c["delta"].get("content", "") if stream else c["message"]["content"] for c in chat)
        raw = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert raw.decode(errors="ignore").strip("\ufffd") == content
        assert len(entries) == 24
        for entry in entries:
            assert [len(entry["top_logprobs"]), entry["top_logprobs"][0]["bytes"]] == [2, entry["bytes"]]
            assert "\ufffd" not in entry["token"]

    serve(test)


def test_token_ids_are_those_of_transformers(serve, chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    messages = [{"role": "user", "content": TEXTS[1]}]

    async def test(client):
        async def post(path, **body):
            return (await client.post(path, json=body)).json()

        for special in (False, True):
            answer = await post("/tokenize", prompt=TEXTS[1], add_special_tokens=special, return_token_strs=True)
            assert answer["tokens"] == tokenizer.encode(TEXTS[1], add_special_tokens=special)
            assert answer["count"] == len(answer["token_strs"]) == len(answer["tokens"])
        plain = tokenizer.encode(TEXTS[1], add_special_tokens=False)
        assert await post("/detokenize", tokens=plain) == {"prompt": TEXTS[1]}
        for generation in (False, True):
            answer = await post("/tokenize", messages=messages, add_generation_prompt=generation)
            theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=generation)["input_ids"]
            assert answer["tokens"] == theirs
            assert answer["max_model_len"] == 512
        assert (await post("/detokenize", tokens=[99999]))["error"]["param"] == "tokens"
        assert (await post("/tokenize", prompt="a", messages=messages))["error"]["param"] == "prompt"

    serve(test)
