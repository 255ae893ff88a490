"""`echo` with `logprobs`: log-probabilities of the prompt are those of Transformers."""

import pytest
import torch
from chat_model import MARKS
from serving import events
from transformers import AutoModelForCausalLM

from weft.generation.sequence import MOST_SCORED

TEXT = "/v1/completions"
LONG = "Kalo mi ren sta tu vo, né 日本! Pra el shi. " * 12


@pytest.fixture(scope="module")
def reference(chat_model):
    """Function: token ids -> log-probabilities `[tokens, vocab]` of Transformers."""
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)

    def logprobs(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return logprobs


def check(found, ids, reference, top=2):
    """Compares the first entries of `logprobs` with the prompt `ids`."""
    expected = reference(ids)
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    for i, id in enumerate(ids[1:], 1):
        assert found["token_logprobs"][i] == pytest.approx(expected[i - 1, id].item(), abs=1e-3)
        best = expected[i - 1].topk(top).values.tolist()
        assert list(found["top_logprobs"][i].values()) == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 24}, {"batch_invariant": True}])
def test_prompts_are_scored_as_by_transformers(serve, reference, options):
    async def test(client):
        engine, tokenizer = client.models[0].engine, client.models[0].tokenizer
        ids, forward, most = tokenizer.encode(LONG), engine.runner.forward, 0
        assert len(ids) > MOST_SCORED
        plain = (await client.post(TEXT, json={"prompt": ids, "temperature": 0})).json()  # now the prompt is cached

        def watch(works):
            nonlocal most
            logits = forward(works)
            most = max(most, sum(map(len, logits)))
            return logits

        engine.runner.forward = watch
        prompts = [ids, ids[:40], ids[:1]]
        body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 2, "temperature": 0}
        choices = (await client.post(TEXT, json=body)).json()["choices"]
        # Never all logits of a prompt: a step has some rows for prompts, and one for each of the new tokens.
        assert most <= MOST_SCORED + len(choices)
        assert [c["index"] for c in choices] == list(range(6))
        for choice in choices:
            prompt = prompts[choice["index"] // 2]
            check(choice["logprobs"], prompt, reference)
            assert {len(values) for values in choice["logprobs"].values()} == {len(prompt) + 16}
            assert choice["text"].startswith(tokenizer.decode(prompt).rstrip("\ufffd"))
            assert choice["logprobs"]["text_offset"][0] == 0
        assert choices[0]["text"] == tokenizer.decode(ids) + plain["choices"][0]["text"]

    serve(test, **options)


def test_a_stream_has_the_same_scores(serve):
    async def test(client):
        for more in ({"max_tokens": 3}, {"max_tokens": 0}):
            body = {"prompt": ["Kalo mi ren ", "Pra el"], "echo": True, "logprobs": 1, "temperature": 0} | more
            whole = (await client.post(TEXT, json=body)).json()
            found = [
                {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} for _ in "ab"
            ]
            finish = [None, None]
            for event in events(await client.post(TEXT, json=body | {"stream": True})):
                for choice in event["choices"]:
                    one = found[choice["index"]]
                    one["text"] += choice["text"]
                    finish[choice["index"]] = choice["finish_reason"]
                    for key, values in (choice["logprobs"] or {}).items():
                        one[key] += values
            for choice, one in zip(whole["choices"], found, strict=True):
                assert {"text": choice["text"], **choice["logprobs"]} == one
            assert finish == [choice["finish_reason"] for choice in whole["choices"]]

    serve(test)


def test_only_the_prompt(serve):
    async def test(client):
        body = {"prompt": "Kalo mi ren ", "max_tokens": 0, "echo": True}
        answer = (await client.post(TEXT, json=body)).json()
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["choices"][0] == {"index": 0, "text": "Kalo mi ren ", "logprobs": None, "finish_reason": "length"}
        scored = (await client.post(TEXT, json=body | {"logprobs": 0})).json()["choices"][0]
        first, *tokens = scored["logprobs"]["tokens"]
        assert (scored["text"], first, "".join(tokens)) == ("Kalo mi ren ", MARKS[0], "Kalo mi ren ")
        offset = 0
        for token, found in zip(tokens, scored["logprobs"]["text_offset"][1:], strict=True):
            assert found == offset
            offset += len(token)
        assert scored["logprobs"]["text_offset"][0] == 0

    serve(test)
