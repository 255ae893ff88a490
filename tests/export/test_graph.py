"""`weft export --to torch`: graphs of all families, run by PyTorch alone, against Transformers' models."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graph_calls import CASES, cache, compare, export_as, greedy, left_padded, pair, small, texts
from transformers import LlamaConfig, LlamaForSequenceClassification, OPTConfig, OPTForCausalLM

import weft
from weft.cli.main import main
from weft.generation.settings import Sampling
from weft.generation.text import generate_ids

pytestmark = pytest.mark.xdist_group("graph")  # one worker imports the compiler
PAGE = Path(__file__).parents[2] / "docs/export/torch.md"


def exported(tmp_path, theirs, to="torch", **options):
    """The folder of the exported model, and what its graph.json says."""
    theirs.save_pretrained(tmp_path / "hf")
    weft.export_model(tmp_path / "hf", tmp_path / to, to, **options)
    return tmp_path / to, json.loads((tmp_path / to / "graph.json").read_text())


def run(tmp_path, theirs):
    folder, description = exported(tmp_path, theirs)
    assert description["target"] == "torch"
    compare(torch.export.load(folder / "model.pt2").module(), description, theirs)
    return folder, description


@pytest.mark.long
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path):
    """Sliding windows in every other layer, caps, tied weights."""
    run(tmp_path, small("Gemma2", "as is"))


@pytest.mark.export
@pytest.mark.parametrize(("family", "shape"), CASES, ids=[" ".join(case) for case in CASES])
def test_every_family(tmp_path, family, shape):
    run(tmp_path, pair(family, shape)[0])


CALL = """
import sys
sys.modules["weft"] = None  # an import of Weft fails
import torch
program = torch.export.load(sys.argv[1] + "/model.pt2").module()
inputs = torch.load(sys.argv[2], weights_only=True)
torch.save(list(program(*inputs)), sys.argv[2])
"""


@pytest.fixture(scope="module")
def experts(tmp_path_factory, tiny_tokenizer):
    """A model with experts, the folder in which the page's command exported it to `program`, and its graph.json."""
    folder = tmp_path_factory.mktemp("experts")
    theirs = small("Mixtral", "as is", vocab_size=512)
    export_as(PAGE, theirs, tiny_tokenizer, folder)
    return theirs, folder, json.loads((folder / "program/graph.json").read_text())


@pytest.mark.long
def test_pytorch_runs_the_program_without_weft(tmp_path, experts):
    theirs, folder, description = experts
    tokens, positions = left_padded([texts(5, seed=1).tolist(), texts(2, seed=2).tolist()])
    torch.save([tokens, positions, *cache(description, 2)], tmp_path / "call.pt")
    subprocess.run([sys.executable, "-c", CALL, folder / "program", tmp_path / "call.pt"], check=True, cwd="/")
    out = torch.load(tmp_path / "call.pt", weights_only=True)
    with torch.no_grad():
        assert (out[0][0] - theirs(tokens[:1]).logits[0]).abs().max() < 1e-5
        assert (out[0][1, 3:] - theirs(tokens[1:, 3:]).logits[0]).abs().max() < 1e-5
    assert len(out) == len(description["outputs"]) == 1 + 2 * 2


def test_all_operators_are_those_of_pytorch(experts):
    """Experts, too: Weft's own operators are not in the graph, so that PyTorch runs it without Weft."""
    program = torch.export.load(experts[1] / "program/model.pt2")
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("scaled_dot_product_attention" in name for name in names)
    # And Python's own, of sizes.
    assert not [name for name in names if not name.startswith(("aten.", "<built-in function ", "sym_"))]


def test_a_cache_of_fixed_size_drops_its_first_columns(experts):
    """Columns before the first token of a text are never seen, whatever numbers they contain."""
    theirs, folder, description = experts
    call, text = torch.export.load(folder / "program/model.pt2").module(), texts(1, 9, seed=4)
    past = [torch.full_like(tensor, 1e30) for tensor in cache(description, 1, past=16)]
    with torch.no_grad():
        expected = theirs(text).logits
        for place in range(9):
            out = call(text[:, place : place + 1], torch.tensor([[place]]), *past)
            past = [tensor[:, :, 1:] for tensor in out[1:]]
            assert (out[0] - expected[:, place : place + 1]).abs().max() < 1e-4


def test_the_program_of_the_page_generates_what_weft_generates(experts, monkeypatch, capsys):
    _, folder, description = experts
    assert description["target"] == "torch"
    monkeypatch.chdir(folder)
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(program, "torch.md", "exec"), {})
    found = json.loads(capsys.readouterr().out)
    expected = generate_ids(weft.load_model(folder / "runs/run"), [[5, 6, 7]], Sampling(8, temperature=0.0))
    assert found == [5, 6, 7, *expected[0]]
    assert (folder / "program/tokenizer.json").read_bytes() == (folder / "runs/run/tokenizer.json").read_bytes()


@pytest.mark.export
def test_rotations_that_change_at_a_length(tmp_path):
    """graph.json names the length at which a program runs the whole text again, as Weft's engine does."""
    theirs, ours = pair("Phi3", "longrope")
    folder, description = exported(tmp_path, theirs)
    assert description["recompute_at"] == 33
    prompts = [texts(length, seed=length).tolist() for length in (28, 31, 3)]
    call = torch.export.load(folder / "model.pt2").module()
    with torch.no_grad():
        found = greedy(call, description, prompts)
    assert found == generate_ids(ours, prompts, Sampling(14, temperature=0.0))


def test_what_a_graph_cannot_hold_is_refused(tmp_path, capsys):
    """A reward model, and a model whose class is not Weft's; nothing is written."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1, pad_token_id=0)).save_pretrained(tmp_path / "r")
    OPTForCausalLM(OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=32, max_position_embeddings=16)).save_pretrained(
        tmp_path / "o"
    )
    for name, what in (("r", r"num_labels: 1 .*--to torch; use --to hf\n"), ("o", "architecture 'OPTForCausalLM'")):
        capsys.readouterr()
        assert main(["export", str(tmp_path / name), str(tmp_path / "out"), "--to", "torch"]) == 2
        said = capsys.readouterr().err
        assert re.search(what, said)
        assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()
