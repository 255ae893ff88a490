"""A tiny chat model that learned one conversation by heart, for tests of chats and of the server."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as TheirTokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
MARKS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
# The beginning of a text is a token of the template, as in Llama 3.
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SYSTEM = "Mi vo."
TURNS = [("Kalo mi ren?", "Sta tu vo, né 日本! " + "Ka lo tu pra el. " * 6), ("Pra el?", "Shi § ka mi.\nRen 😀 lo.")]


MESSAGES = [{"role": "system", "content": SYSTEM}]
for _question, _answer in TURNS:
    MESSAGES += [{"role": "user", "content": _question}, {"role": "assistant", "content": _answer}]


def make_chat_model(tiny_tokenizer: Path, made: Path, template=TEMPLATE, messages=MESSAGES, tools=None) -> Path:
    """A Hugging Face folder: a Llama that learned one conversation by heart, and its tokenizer and template."""
    content = TheirTokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    content.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    begin = (MARKS[0], content.token_to_id(MARKS[0]))  # a second beginning, if somebody asks for special tokens
    content.post_processor = processors.TemplateProcessing(single=f"{MARKS[0]} $A", special_tokens=[begin])
    end = json.loads((tiny_tokenizer / "tokenizer_config.json").read_text())["eos_token"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=content, bos_token=MARKS[0], eos_token=end)
    tokenizer.chat_template = template
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=content.get_vocab_size(), max_position_embeddings=512, **SHAPE)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = LlamaForCausalLM(config)
    text = tokenizer.apply_chat_template(messages, tools, tokenize=False)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for _ in range(120):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    model.generation_config.eos_token_id = content.token_to_id(end)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made
