"""`weft profile --structure`: what wraps what, without ranks or memory."""

import pytest

from weft.cli.main import main

MOE = {
    "moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "num_hidden_layers": 4,
    "hidden_dropout": 0.1,
}


@pytest.fixture
def picture(capfd):
    """`weft profile --structure` in this process: `picture(yaml, *arguments) -> (exit code, stdout, stderr)`."""

    def run(yaml, *arguments):
        capfd.readouterr()
        code = main(["profile", str(yaml), "--structure", *arguments])
        return code, *capfd.readouterr()

    return run


@pytest.fixture
def yaml(run_yaml):
    return run_yaml(
        model={"preset": "llama-tiny", "vocab_size": 512, **MOE},
        data={"validation": None},
        training={"activation_checkpointing": "every-2", "dtype": "bfloat16"},
    )


def chain(text, title):
    """What wraps a forward, from the outside in: the lines that go further and further in after `title`."""
    lines = text[text.index(f"\n{title}") :].split("forward:\n", 1)[1].splitlines()
    found = []
    for line in lines:
        found.append(line.strip())
        if line.endswith(".forward"):
            return found


@pytest.mark.parametrize(
    "options",
    [["--out", "x"], ["--steps", "2"], ["--warmup", "1"], ["--ranks", "0"], ["--nproc", "0"]],
    ids=lambda options: options[0],
)
def test_options_without_effect_are_refused(options, capsys):
    assert main(["profile", "run.yaml", "--structure", *options]) == 2
    assert options[0] in capsys.readouterr().err


def test_one_rank(picture, yaml, tmp_path):
    code, text, errors = picture(yaml)
    assert (code, errors) == (0, "")
    assert text.startswith("mesh: one rank; rank 0 of 1; compute in bfloat16, parameters in float32\n")
    plain, recomputed = "layers.0, layers.2 (2): Block", "layers.1, layers.3 (2): Block"
    outside = ["cast the output to torch.float32", "dropout: the layer's seed"]
    local = "local parameters: plain tensors of 10 DTensors"
    assert chain(text, plain) == [*outside, local, "Block.forward"]
    assert chain(text, recomputed) == [*outside, "activation checkpointing (every-2)", local, "Block.forward"]
    assert "FSDP2" not in text
    assert not (tmp_path / "runs").exists()


def test_every_axis_of_a_mesh(picture, yaml):
    mesh = ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]
    sizes = [f"parallel.{axis}=2" for axis in mesh]
    code, text, errors = picture(
        yaml, *sizes, "training.compile=true", "parallel.cp_method=all_gather", "training.micro_batch_size=1"
    )
    assert (code, errors) == (0, "")
    assert text.startswith("mesh: pp 2 x dp_replicate 2 x dp_shard 2 x cp 2 x tp 2 x ep 2; rank 0 of 32; ")
    assert "\nDecoder, stage 0\n" in text
    assert chain(text, "layers.1 (1): Block") == [
        "FSDP2 (dp_replicate x fsdp: 2 x 4)",
        "dropout: the layer's seed",
        "local parameters: plain tensors of 7 DTensors",
        "torch.compile",
        "activation checkpointing (every-2)",
        "Block.forward",
    ]
    assert "tp: all-gather the sequence, reduce-scatter the output\n        MixtureOfExperts.forward" in text
    assert "cp: keys and values by all-gather\n        CoreAttention.forward" in text
    assert "send <- ep: all-to-all" in text
    assert "dp_replicate R, efsdp" in text  # the experts, on a mesh of their own
    assert "stage 1" not in text


def test_a_mesh_that_cannot_be_is_one_line(picture, yaml):
    code, _, errors = picture(yaml, "parallel.tp=3", "--nproc", "3")
    assert code == 2
    assert "Traceback" not in errors
    assert "parallel.tp" in errors
