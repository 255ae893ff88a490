"""Calls exported graphs as a user's program does, and compares them with Transformers' models."""

import contextlib
import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))
from test_families import CASES, ROWS, build_pair, pair, texts

from weft.cli.main import main

NEW = 14  # tokens to generate

__all__ = ["CASES", "cache", "compare", "export_as", "greedy", "left_padded", "pair", "small", "texts"]


def small(family, shape, **changes):
    """Transformers' model of a case, with two layers."""
    return build_pair(family, ROWS[family][shape] | {"num_hidden_layers": 2} | changes)[0]


def export_as(page, theirs, tokenizer, folder):
    """Exports a model with a tokenizer from `folder/runs/run`, by the command of a page. Returns what was printed."""
    run = folder / "runs/run"
    theirs.save_pretrained(run)
    for file in tokenizer.iterdir():
        shutil.copy(file, run)
    (command,) = re.findall(rf"^\$ weft (.* --to {page.stem}.*)$", page.read_text(), re.MULTILINE)
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as printed:
        patched.chdir(folder)
        assert main(command.split()) == 0
    return printed.getvalue()


def longest(theirs):
    """130 tokens, or fewer for a model with a table of positions."""
    config = theirs.config
    table = getattr(config, "n_positions", None) or (config.max_seq_len if config.model_type == "mpt" else None)
    return min(130, table or 130)


def calls(theirs):
    """(batch, length) of calls without a cache: every combination differs from the sizes of the capture."""
    return [(batch, length) for batch in (1, 3) for length in (1, 7, longest(theirs))]


def cache(description, batch, past=0):
    """An empty cache, or one of zeros, in the layout of graph.json."""
    layout = description["inputs"][2:]
    assert all(entry["shape"][0] == "batch" and entry["shape"][2] == "past" for entry in layout)
    kinds = [getattr(torch, entry["dtype"]) for entry in layout]
    shapes = [[batch, entry["shape"][1], past, entry["shape"][3]] for entry in layout]
    return [torch.zeros(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]


def left_padded(prompts):
    """Token ids and positions `[batch, seq]` of prompts of several lengths."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    positions = torch.arange(width) - torch.tensor([[width - len(prompt)] for prompt in prompts])
    return tokens, positions


def greedy(call, description, prompts, new=NEW):
    """Continues prompts together: prefill, then one token a call."""
    texts_, out = [list(prompt) for prompt in prompts], None
    for _ in range(new):
        if out is None or any(len(text) == description["recompute_at"] for text in texts_):
            tokens, positions = left_padded(texts_)
            past = cache(description, len(texts_))
        else:
            tokens = torch.tensor([[text[-1]] for text in texts_])
            positions, past = torch.tensor([[len(text) - 1] for text in texts_]), out[1:]
        out = call(tokens, positions, *past)
        assert out[0].shape == (len(texts_), tokens.shape[1], description["outputs"][0]["shape"][2])
        assert out[1].shape[2] == past[0].shape[2] + tokens.shape[1]
        for text, chosen in zip(texts_, out[0][:, -1].argmax(-1).tolist(), strict=True):
            text.append(chosen)
    return [text[len(prompt) :] for text, prompt in zip(texts_, prompts, strict=True)]


@torch.no_grad()
def compare(call, description, theirs, bound=1e-4):
    """Logits without a cache, after a cache, and greedy tokens of three prompts of different lengths."""
    for batch, length in calls(theirs):
        tokens = texts(batch, length, seed=length)
        positions = torch.arange(length).repeat(batch, 1)
        expected = theirs(tokens).logits
        out = call(tokens, positions, *cache(description, batch))
        _near(out[0], expected, bound)
        if length == 7:  # the same in two calls
            before, after = ([part.contiguous() for part in x.tensor_split([3], dim=1)] for x in (tokens, positions))
            first = call(before[0], after[0], *cache(description, batch))
            second = call(before[1], after[1], *first[1:])
            _near(torch.cat((first[0], second[0]), 1), expected, bound)
            for one, other in zip(second[1:], out[1:], strict=True):
                _near(one, other, bound)
    prompts = [texts(length, seed=length).tolist() for length in (11, 3, 8)]
    tokens, positions = left_padded(prompts)
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(tokens, attention_mask=(positions >= 0).long(), **options)
    assert greedy(call, description, prompts) == expected[:, tokens.shape[1] :].tolist()


def _near(found, expected, bound):
    assert (found - expected).abs().max() <= bound * max(1.0, expected.abs().max().item())
