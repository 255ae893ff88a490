"""docs/add-a-model.md is true: in a copy of this package, its blocks of code make a family that passes the proof."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weft.families import llama
from weft.families.mapping import SAME

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
FAMILY = "src/weft/families/stablelm.py"


def blocks(path):
    """The code on the page that belongs into a file, in order."""
    return "\n\n".join(re.findall(rf"^```python {re.escape(path)}\n(.*?)^```$", TEXT, re.S | re.M))


def with_row(path, table):
    """A test file with the page's row in one of its tables."""
    before, start, rest = (ROOT / path).read_text(encoding="utf-8").partition(f"\n{table} = {{\n")
    assert start
    return before + start + blocks(path) + rest


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package and what tests it, with the family added as the page says."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src" / "weft", copy / "src" / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    for path in ("pyproject.toml", "tests/conftest.py", "tests/hf_reference.py"):
        (copy / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    assert not (copy / FAMILY).exists(), "the family is built in by now: the page needs another one"
    (copy / FAMILY).write_text(blocks(FAMILY))
    for path, table in (("tests/models/test_families.py", "ROWS"), ("tests/cli/test_models.py", "PUBLISHED")):
        (copy / path).parent.mkdir()
        (copy / path).write_text(with_row(path, table))
    return copy


def python(copy, *words):
    """What Python prints, run in the copy."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    done = subprocess.run([sys.executable, *words], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_names_every_file_of_its_code():
    assert set(re.findall(r"^```python ?(.*)$", TEXT, re.M)) == {
        FAMILY, "tests/models/test_families.py", "tests/cli/test_models.py"
    }  # fmt: skip


def test_the_page_lists_the_shared_keys_and_llamas_defaults():
    keys = TEXT.partition("**Keys.**")[2].partition("**Weights.**")[0]
    assert {*SAME, *llama.DEFAULTS} <= set(re.findall(r"`(\w+)`", keys))


def test_the_family_is_written_in_the_houses_style(copy):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        pytest.skip("ruff is not installed")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, "--no-cache", FAMILY], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_the_family_passes_the_proof(copy):
    """One process for both commands: each would take seconds to import torch."""
    (command,) = re.findall(r"^\$ python (-m pytest .*)$", TEXT, re.M)
    tests = [shlex.split(command)[2:], ["-q", "tests/cli/test_models.py", "-k", "published_size"]]
    said = python(copy, "-c", f"import pytest\nassert not any([pytest.main(words) for words in {tests!r}])")
    proofs, sizes = re.findall(r"(\d+) passed", said)
    assert int(proofs) >= 2 * 4  # two shapes, four tests of each
    assert sizes == "1"


def test_the_commands(copy):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, StableLmConfig, StableLmForCausalLM

    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    config = StableLmConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **small)
    torch.manual_seed(0)
    StableLmForCausalLM(config).save_pretrained(copy / "path/to/hf-folder")
    commands = [shlex.split(line) for line in re.findall(r"^\$ weft (.*?)(?:  +#.*)?$", TEXT, re.M)]
    assert [words[0] for words in commands] == ["models", "models", "import", "export"]
    program = f"from weft.cli.main import main\nassert not any(map(main, {commands!r}))"
    out = python(copy, "-c", program)
    assert out.startswith("stablelm: StableLM (Bellagente et al., 2024)")
    assert "reads StableLmForCausalLM\n" in out
    assert re.search(r"stablelm-3b +2\.80B", out)
    assert "  norm: layernorm\n" in out
    there, back = (load_file(copy / folder / "model.safetensors") for folder in ("path/to/hf-folder", "back"))
    assert there.keys() == back.keys()
    assert all(torch.equal(tensor, back[name]) for name, tensor in there.items())
    assert type(AutoModelForCausalLM.from_pretrained(copy / "back")) is StableLmForCausalLM


@pytest.mark.parametrize("option", ["qk_layernorm", "use_parallel_residual"])
def test_what_the_decoder_cannot_say_is_refused(copy, option):
    program = f"from weft.families import stablelm; stablelm.from_hf({{{option!r}: True}})"
    with pytest.raises(AssertionError, match=f"UserError: {option}: True is not supported; it must be False"):
        python(copy, "-c", program)
