"""A model of the user's own over `tp`: what docs/parallel-own-model.md says, and what is said of wrong tables."""

import json
import re
import sys
from pathlib import Path

import pytest
from compare import Run, compare
from matrix import WITHIN
from pool import RanksFailed, weft_command

PAGE = (Path(__file__).parents[2] / "docs" / "parallel-own-model.md").read_text(encoding="utf-8")
CODE, YAML = (re.search(rf"```{language}\n(.*?)```", PAGE, re.S).group(1) for language in ("python", "yaml"))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes the page's model, changed, into a module of its own; returns its `module:Class`."""
    number = iter(range(100))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)

    def write(*changes, name="GPT"):
        code = CODE
        for before, after in changes:
            assert before in code
            code = code.replace(before, after)
        module = f"own_gpt_{next(number)}_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(code)
        return f"{module}:{name}"

    return write


def write_run(folder, name, model, mesh, **training):
    sections = {
        "run": {"name": name, "directory": str(folder), "seed": 7},
        "model": {"width": 32, "head_dim": 8, "longest": 32, "vocab_size": 256} | model,
        "data": {"sequence_length": 32, "train": {"type": "matrix_parts:Sequences"}},
        "optimizer": {"type": "matrix_parts:PlainSGD", "lr": 0.3},
        "schedule": {"type": "constant"},
        "training": {"steps": 2, "dtype": "float64", "grad_clip": None, "threads": 1, "batch_tokens": 8 * 32}
        | {"micro_batch_size": 2, **training},
        "parallel": {"dp_shard": 1, **mesh},
        "checkpoint": {"every": 1, "keep_last": 10},
        "log": {"every": 1, "trackers": []},
    }
    file = folder / f"{name}.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()))
    return file


# Changes of the page's model, its arguments, and keys of `training`.
MODELS = {
    "tied": ([], {"tied": True}, {}),
    "recomputing": ([], {"tied": False}, {"activation_checkpointing": "full"}),
    # A head that is whole, of a rank's slice of the sequence; biases everywhere.
    "whole head": ([('        "head": "head",\n', ""), ("bias=False", "bias=True")], {"tied": False}, {}),
    # `labels` and `positions` are the model's to take; output projections begin as zeros.
    "labels": (
        [
            ("def forward(self, tokens):", "def forward(self, tokens, positions, labels):"),
            ("torch.arange(tokens.shape[1], device=tokens.device)", "positions"),
            (
                "return self.head(self.norm(x))",
                "return self.head(self.norm(x)).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)",
            ),
            (
                "        if tied:\n",
                "        for block in self.blocks:\n"
                "            nn.init.zeros_(block.mlp[2].weight)\n"
                "            nn.init.zeros_(block.mlp[2].bias)\n"
                "        if tied:\n",
            ),
        ],
        {},
        {},
    ),
    # Parameters without dimensions, in the blocks and outside of them.
    "scalars": (
        [
            ("x + self.mlp(", "x + self.gain * self.mlp("),
            (
                "        self.attention = ",
                "        self.gain = nn.Parameter(torch.tensor(1.5))\n        self.attention = ",
            ),
            ("self.head(self.norm(x))", "self.head(self.scale * self.norm(x))"),
            ("        if tied:\n", "        self.scale = nn.Parameter(torch.tensor(0.7))\n        if tied:\n"),
        ],
        {},
        {"activation_checkpointing": "full"},
    ),
    # Replicated parameters that are used after the head, with and without dimensions.
    "after the head": (
        [
            ("self.head(self.norm(x))", "self.gain * self.head(self.norm(x)) + self.bias"),
            (
                "        if tied:\n",
                "        self.gain = nn.Parameter(torch.tensor(0.7))\n"
                "        self.bias = nn.Parameter(torch.linspace(-1, 1, vocab_size))\n"
                "        if tied:\n",
            ),
        ],
        {},
        {},
    ),
}
ON_MESHES = [
    ("labels", {"tp": 2}),
    ("scalars", {"dp_shard": 2}),
    ("after the head", {"tp": 2}),
]
ON_OTHER_MESHES = [
    ("tied", {"tp": 2}),
    ("tied", {"dp_shard": 2}),
    ("tied", {"tp": 2, "dp_shard": 2}),
    ("recomputing", {"tp": 2}),
    ("whole head", {"tp": 2}),
    ("labels", {"tp": 2, "dp_replicate": 2}),
    ("scalars", {"dp_shard": 2, "dp_replicate": 2}),
    ("scalars", {"dp_shard": 2, "tp": 2}),
    ("after the head", {"tp": 2, "dp_shard": 2}),
]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [*ON_MESHES, *(pytest.param(*other, marks=pytest.mark.long) for other in ON_OTHER_MESHES)],
    ids=str,
)
def test_any_mesh_is_one_process(runner, own, tmp_path, name, mesh):
    changes, arguments, training = MODELS[name]
    model = {"type": own(*changes), **arguments}
    ranks = mesh.get("tp", 1) * mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    runner.pool.run(write_run(tmp_path, "alone", model, {}, **training), 1, seconds=120)
    runner.pool.run(write_run(tmp_path, "mesh", model, mesh, **training), ranks, seconds=120)
    difference = compare(Run(tmp_path / "alone"), Run(tmp_path / "mesh"))
    assert difference.largest <= WITHIN, difference.wrong()


@pytest.mark.matrix
def test_noise_of_embeddings_is_that_of_one_process(runner, own, tmp_path):
    method = "    def get_input_embeddings(self):\n        return self.words\n\n    def forward(self, tokens):"
    model, runs = {"type": own(("    def forward(self, tokens):", method))}, []
    for name, mesh in (("alone", {}), ("noisy", {"tp": 2, "dp_shard": 2})):
        file = write_run(tmp_path, name, model, mesh)
        file.write_text(file.read_text() + "objective: {type: sft, neftune: 5}\n")
        runner.pool.run(file, 4 if mesh else 1, seconds=120)
        runs.append(Run(tmp_path / name))
    difference = compare(*runs)
    assert difference.largest <= WITHIN, difference.wrong()


LINE = '        "blocks.*.mlp.2.bias": "added",\n'
# The changes of the page's model, its arguments, and what one line of the message must contain.
WRONG = {
    "no table": ([("weft_sharding = {", "sharding = {")], {}, ["parallel.tp: 2", "weft_sharding"]),
    "no pattern": (
        [("blocks.*.attention.o.weight", "blocks.*.atention.o.weight")],
        {},
        ["'blocks.*.atention.o.weight' matches no", "did you mean 'blocks.*.attention.o.weight'?"],
    ),
    "size": (
        [],
        {"vocab_size": 255},
        ["parallel.tp: 2 does not divide dimension 0 of words.weight, which is 255; change"],
    ),
    "dimension": (
        [(LINE, LINE.replace('"added"', "1"))],
        {},
        ["blocks.0.mlp.2.bias has no dimension 1", "(32,)", "use a smaller dimension"],
    ),
    "word": (
        [(LINE, LINE.replace("added", "add"))],
        {},
        ["'blocks.*.mlp.2.bias': 'add'", "use a dimension or one of part, embedding,"],
    ),
    "no embedding": (
        [('"embedding"', '"positions"')],
        {"tied": False},
        ["no 'embedding'; add this rule"],
    ),
    "tied": (
        [('"head": "head"', '"head.weight": 1')],
        {},
        ["words.weight and head.weight are tied", "0 and 1", "use one rule"],
    ),
    "nothing sharded": (
        [('        "blocks.*.mlp.0.*": 0,\n        "blocks.*.mlp.2.weight": 1,\n', "")],
        {},
        ["blocks.0.mlp has the rule 'part', but no sharded parameter", "add rules that shard its matrices"],
    ),
    # Only a comparison finds these: biases begin as zeros, heads are not divisible, matrices are fused.
    "bias": (
        [(LINE, ""), ("        if tied:\n", "        nn.init.zeros_(self.blocks[0].mlp[2].bias)\n        if tied:\n")],
        {},
        ["sharded over 2 ranks", "wrong outputs (off by up to ", "'added' for output biases"],
    ),
    "heads": ([], {"head_dim": 32}, ["sharded over 2 ranks", "fails in line 14: RuntimeError: shape"]),
    "slice": (
        [('        "places": "positions",\n', "")],
        {},
        ["sharded over 2 ranks", "fails in line 54: RuntimeError: The size of tensor a (4) must match"],
    ),
    # Right in forward, and in backward a norm over a shard of the sequence.
    "gradient": (
        [
            (
                "            x = block(x)\n",
                "            x = block(x)\n            if x.requires_grad:\n"
                "                x.register_hook(lambda grad: grad / grad.norm())\n",
            )
        ],
        {},
        ["sharded over 2 ranks", "wrong gradients of ", "compute each token independently"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tables(runner, own, tmp_path, case):
    changes, arguments, said = WRONG[case]
    type_ = own(*changes)
    file = write_run(tmp_path, "wrong", {"type": type_, **arguments}, {"tp": 2})
    with pytest.raises(RanksFailed) as failure:
        runner.pool.run(file, 2, seconds=120)
    found = [line for line in str(failure.value).splitlines() if all(words in line for words in said)]
    assert found, str(failure.value)
    line = found[0]
    if case != "no table":  # read from the source, and reported in the run file
        assert re.search(rf"UserError: {type_.partition(':')[0]}.py:\d+: GPT.weft_sharding: ", line), line
    assert "; " in line


def test_the_page_as_it_stands(runner, tmp_path, tiny_store, tiny_tokenizer):
    (tmp_path / "my_gpt.py").write_text(CODE)
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "store").symlink_to(tiny_store)
    (tmp_path / "tok").symlink_to(tiny_tokenizer)
    (command,) = re.findall(r"^\$ weft train (.*)$", PAGE, re.M)
    file, ranks = re.fullmatch(r"(\S+) --nproc (\d)", command).groups()
    for code, errors in runner.pool.call(weft_command, int(ranks), tmp_path, ["train", file]):
        assert code == 0, errors
    assert len(Run(tmp_path / "runs" / "run").metrics["loss"]) >= 1


def test_layers_get_what_their_weights_are(runner, own, tmp_path):
    """In 16 bits: a norm of PyTorch's takes no float32 beside weights in bfloat16."""
    for name, mesh in (("alone", {}), ("two", {"tp": 2})):
        runner.pool.run(write_run(tmp_path, name, {"type": own()}, mesh, dtype="bfloat16"), mesh.get("tp", 1))
    alone, two = (Run(tmp_path / name).metrics["loss"] for name in ("alone", "two"))
    assert alone == pytest.approx(two, rel=2e-3)
