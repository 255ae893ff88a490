"""Prompts begin with the tokens that the tokenizer adds, as those of Transformers do."""

import asyncio
import json
import shutil

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import weft
from weft.cli.main import main
from weft.config.data import DataSection
from weft.data.conversations.template import ChatTemplate, find_template
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.chat_format import ChatFormat
from weft.serve.app import create_app
from weft.serve.served_model import ServedModel
from weft.serve.services import Settings
from weft.train.rollouts.prompts import read_prompts

PROMPTS = ["Kalo mi", "<|endoftext|>Ren sta", ""]


@pytest.fixture(params=[True, False], ids=["adds", "adds nothing"])
def folder(request, tmp_path, hf_folder):
    """A model whose tokenizer adds its first token; and one that only says so in a setting, which has no effect."""
    shutil.copytree(hf_folder, tmp_path / "model")
    file, settings = tmp_path / "model" / "tokenizer.json", tmp_path / "model" / "tokenizer_config.json"
    content = json.loads(file.read_text())
    token = "<|endoftext|>"
    if request.param:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
        }
    file.write_text(json.dumps(content))
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"add_bos_token": not request.param}))
    return tmp_path / "model"


def test_rollouts_continue_what_transformers_continues(folder, tmp_path):
    file, tokenizer = tmp_path / "prompts.jsonl", AutoTokenizer.from_pretrained(folder)
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    expected = [tokenizer(prompt).input_ids or [tokenizer.eos_token_id] for prompt in PROMPTS]
    expected = [ids[1:] if ids[:2] == [0, 0] else ids for ids in expected]  # Transformers adds the token a second time
    found = read_prompts(str(file), DataSection(train=str(file)), Tokenizer.load(folder), 99, []).found
    assert [prompt.ids for prompt in found] == expected


def test_generate_and_completions_continue_what_transformers_continues(folder, capsys):
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    expected, counts = [], []
    for prompt in PROMPTS:
        ids = tokenizer(prompt).input_ids or [tokenizer.eos_token_id]
        ids = ids[1:] if ids[:2] == [0, 0] else ids  # the text has the token already; Transformers adds a second one
        assert ours.prompt(prompt).ids == ids
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = theirs.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
        expected.append(tokenizer.decode(ids + out[0, len(ids) :].tolist())[len(tokenizer.decode(ids)) :])
        counts.append(len(ids))
    assert weft.generate(folder, PROMPTS, 8, 0.0, ignore_eos=True) == expected
    assert main(["generate", str(folder), PROMPTS[0], "--temperature", "0", "--max-new-tokens", "8"]) == 0
    assert weft.generate(folder, PROMPTS[0], 8, 0.0) in capsys.readouterr().out

    async def answers():
        chat = ChatFormat(ChatTemplate.for_tokenizer(find_template(folder), folder), ours, "")
        served = ServedModel("tiny", weft.Engine(weft.load_model(folder), ours), chat, max_waiting=8)
        app = create_app([served], Settings())
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://a") as one:

            async def post(path, **body):
                return (await one.post(path, json=body)).json()

            greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
            many = [await post("/v1/completions", prompt=prompt, **greedy) for prompt in PROMPTS]
            plain = await post("/v1/completions", prompt=PROMPTS[0], max_tokens=1, add_special_tokens=False)
            ids = await post("/tokenize", prompt=PROMPTS[0])
            chatted = await post("/tokenize", messages=[{"role": "user", "content": "Kalo"}])
        return many, plain, ids, chatted

    many, plain, ids, chatted = asyncio.run(answers())
    assert [one["choices"][0]["text"] for one in many] == expected
    assert [one["usage"]["prompt_tokens"] for one in many] == counts
    assert plain["usage"]["prompt_tokens"] == len(ours.encode(PROMPTS[0]))
    assert ids["tokens"] == tokenizer(PROMPTS[0]).input_ids
    template = tokenizer.apply_chat_template([{"role": "user", "content": "Kalo"}], add_generation_prompt=True)
    assert chatted["tokens"] == template["input_ids"]  # a template writes its special tokens itself
