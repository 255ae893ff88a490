"""weft plan: its output, the file it writes, and what is wrong with its input."""

import json
import re
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models

from weft.cli.main import main
from weft.config.adapter import AdapterSection
from weft.config.run import RunConfig
from weft.planner.hardware import load_hardware
from weft.planner.no_plan import nothing_fits
from weft.planner.plan import plan_of
from weft.planner.step import predict

RUN = """
model: {preset: llama-125m, vocab_size: 32000}
tokenizer: no-such-tokenizer
data: {train: no-such-store, sequence_length: 1024}
training: {tokens: 1e9, batch_tokens: 65536}
parallel: {zero_stage: 2, tp: 2}
"""


@pytest.fixture
def weft(tmp_path, monkeypatch, capsys):
    """Returns a function that runs `weft plan` in a folder with run.yaml: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["plan", *words])
        return code, *capsys.readouterr()

    return call


PLAN = ("run.yaml", "--devices", "4", "--hardware", "a100-sxm")


def test_json_has_the_plans_best_first(weft):
    code, out, err = weft(*PLAN, "--json", "--limit", "3", "--price", "2")
    assert (code, err) == (0, "")
    plans = json.loads(out)["plans"]
    assert len(plans) == 3
    assert [plan["step_seconds"] for plan in plans] == sorted(plan["step_seconds"] for plan in plans)
    for plan in plans:
        sizes = plan["parallel"]
        assert sizes["pp"] * sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] * sizes["tp"] == 4
        assert type(plan["memory_bytes"]) is int
        assert plan["memory_bytes"] == pytest.approx(sum(plan["memory"].values()), abs=10)
        assert plan["memory_bytes"] <= 80e9
        assert plan["step_seconds"] == pytest.approx(sum(plan["parts"].values()))
        assert plan["tokens_per_second"] == pytest.approx(65536 / plan["step_seconds"])
        hours = 15259 * plan["step_seconds"] / 3600 * 4
        assert plan["gpu_hours"] == pytest.approx(hours)
        assert plan["days"] == pytest.approx(hours / 4 / 24)
        assert plan["energy_mwh"] == pytest.approx(hours * 400 / 1e6)
        assert plan["price"] == pytest.approx(2 * hours)


def test_the_written_file_is_the_plan(weft, tmp_path):
    code, out, _ = weft(*PLAN, "--json", "--apply", "plan.yaml")
    best = json.loads(out)["plans"][0]
    assert code == 0
    assert main(["config", "check", "plan.yaml", "--no-data", "--devices", "4"]) == 0
    config = RunConfig.load("plan.yaml", check_data=False, ranks=4)
    assert {key: getattr(config.parallel, key) for key in best["parallel"]} == best["parallel"]
    assert config.parallel.zero_stage is None  # the plan's keys replace those of run.yaml
    assert {key: getattr(config.training, key) for key in best["training"]} == best["training"]
    assert config.training.batch_tokens == 65536
    predicted = predict(config, 4, load_hardware("a100-sxm"))
    assert predicted.step_seconds == pytest.approx(best["step_seconds"])
    assert weft(*PLAN, "--apply", "plan.yaml")[0] == 0  # an earlier plan is replaced
    code, _, err = weft(*PLAN, "--apply", "run.yaml")
    assert (code, (tmp_path / "run.yaml").read_text()) == (2, RUN)
    assert "run.yaml: this file exists and is not a plan" in err


def test_a_mesh_that_is_kept_may_not_fit(weft):
    code, out, _ = weft(*PLAN, "--keep-mesh", "model.preset=llama3.1-70b", "parallel.tp=4", "parallel.zero_stage=null")
    assert code == 0
    assert "(a100-sxm), bfloat16\n" in out
    assert re.search(r"\n  does not fit: .*GB too much\n", out)
    assert "does not fit" not in weft(*PLAN, "--keep-mesh")[1]


def test_without_memory_of_the_host_the_remedies_are_of_the_host(weft):
    code, _, err = weft(*PLAN, "model.preset=llama3.1-405b", "data.sequence_length=256", "--hardware", "b200")
    assert code == 2
    assert "needs more host memory for offloading" in err
    # Parameters, gradients and two states of AdamW in float32, for 405B less the words that the vocabulary lacks.
    assert "in all, 6.443 TB" in err
    assert "32 devices or more, on 4 hosts" in err
    assert "optimizer: {type: muon}" in err
    assert err.count("(5)") == 1


def test_remedies_name_the_hosts_of_the_devices_and_nothing_that_the_run_has(weft):
    host = ("data.sequence_length=256", "--hardware", "b200")  # 8 devices in a host of 2 TB
    replicas = ("zero_stage=null", "auto=true", "dp_replicate=32", "dp_shard=1", "pp=1", "tp=1")
    replicas = [f"parallel.{key}" for key in replicas]
    _, _, err = weft(*PLAN, *host, "model.preset=llama3.1-70b", *replicas, "--devices", "32")
    assert "needs more host memory for offloading" in err
    assert "64 devices or more, on 8 hosts" in err  # though two hosts have the memory for one copy
    _, _, err = weft(*PLAN, *host, "model.preset=llama3.1-405b", "optimizer.type=muon")
    assert "needs more host memory for offloading" in err
    assert "24 devices or more, on 3 hosts" in err
    assert "muon" not in err


def test_no_adapter_is_proposed_to_a_run_with_one(weft):
    words = ["model.preset=llama3.1-405b", "parallel.zero_stage=3"]
    config, hardware = RunConfig.load("run.yaml", words, check_data=False, ranks=2), load_hardware("a100-sxm")
    with_adapter = config.model_copy(update={"adapter": AdapterSection(r=16)})
    for offload in ("none", "parameters"):
        section = config.parallel.model_copy(update={"offload": offload})
        for one, proposed in ((config, True), (with_adapter, False)):
            plan = plan_of(one.model_copy(update={"parallel": section}), 2, hardware)
            assert ("an adapter in place" in str(nothing_fits([plan], hardware))) == proposed, offload


def test_keep_mesh_predicts_the_file_itself(weft):
    code, out, _ = weft(*PLAN, "--json", "--keep-mesh")
    (plan,) = json.loads(out)["plans"]
    config = RunConfig.load("run.yaml", check_data=False, ranks=4)
    assert code == 0
    assert plan["parallel"]["tp"] == plan["parallel"]["dp_shard"] == 2
    assert plan["parallel"]["zero_stage"] == 2
    assert plan["step_seconds"] == predict(config, 4, load_hardware("a100-sxm")).step_seconds
    _, out, _ = weft(*PLAN, "--json", "--limit", "1")
    assert json.loads(out)["plans"][0]["step_seconds"] < plan["step_seconds"]


def test_the_table_names_parts_and_the_runner_up(weft):
    code, out, _ = weft(*PLAN)
    assert code == 0
    for word in ("mesh", "activations", "compute", "runner-up", "MFU", "device-hours", "a100-sxm"):
        assert word in out
    assert "e-0" not in out  # seconds of a short run, in days


def test_a_short_run_is_in_seconds_and_a_long_one_in_days(weft):
    short, long = (weft(PLAN[0], f"training.tokens={tokens}", *PLAN[1:])[1] for tokens in (655_360, 10**12))
    assert re.search(r"run +10 steps, \d[\d.smh]*, ", short)
    assert re.search(r"run +[\d,]+ steps, [\d,.]+ days, [\d,.]+k device-hours", long)


def test_the_help_lists_the_hardware(weft):
    code, out, _ = weft("--help")
    assert code == 0
    assert "h100-mn5" in out
    assert "a100-leonardo" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hardware", "h100-mn6"), r"no hardware file 'h100-mn6'; did you mean 'h100-mn5'"),
        (("--devices", "0"), "--devices 0: use at least 1"),
        (("--apply", "."), ".: a directory, not a file; choose another name for --apply"),
        (("--picture", "no/plan.html"), "no does not exist; create it, or choose another name for --picture"),
        (("--limit", "0"), "--limit 0: use at least 1"),
        (("--price", "-1"), "--price -1: use a positive number"),
        (("model.preset=llama-126m",), "llama-125m"),
        (("--keep-mesh", "parallel.tp=8"), "parallel: tp 8 does not divide the 4 ranks"),
        (("model={type: 'my:Net'}",), r"my:Net"),
        (("training.dtype=float64", "--hardware", "b200", "--devices", "1000000"), "no mesh gives each of them work"),
        (("model.preset=llama3.1-405b", "--devices", "2"), "no plan fits 2 devices"),
    ],
)
def test_wrong_input_is_reported(weft, words, message):
    code, out, err = weft(*PLAN, *words)
    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_an_unknown_vocabulary_is_assumed_and_reported(weft, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN.replace(", vocab_size: 32000", ""))
    code, out, err = weft(*PLAN, "--json", "--keep-mesh")
    assert code == 0
    assert json.loads(out)["plans"]
    assert "assuming 32,000" in err


def test_the_vocabulary_is_that_of_the_tokenizer_also_without_its_stores(weft, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(301)}, unk_token="t0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "run.yaml").write_text(RUN.replace("vocab_size: 32000", "pad_vocab_to_multiple: 64"))
    code, out, err = weft(*PLAN, "--json", "--keep-mesh", "tokenizer=tok", "data.train=missing")
    assert (code, "assuming" in err) == (0, False), err
    (tmp_path / "run.yaml").write_text(RUN.replace("32000", "320"))
    (expected,) = json.loads(weft(*PLAN, "--json", "--keep-mesh")[1])["plans"]
    assert json.loads(out)["plans"][0]["memory"] == expected["memory"]
    (tmp_path / "run.yaml").write_text(RUN.replace(", vocab_size: 32000", ""))
    code, _, err = weft(*PLAN, "--keep-mesh", "tokenizer=tok", "data.train=missing", "parallel.tp=4")
    assert (code, "vocabulary's 302 rows" in err) == (2, True), err


def test_no_torch_is_imported(weft):
    script = f"import sys; from weft.cli.main import main; main(['plan', *{PLAN!r}, '--keep-mesh'])"
    script += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_budget_has_sizes_by_each_law_and_advice(weft):
    code, out, _ = weft("--budget", "1e22", "--json")
    found = json.loads(out)
    assert code == 0
    for one in found["optima"]:
        assert 6 * one["parameters"] * one["tokens"] == pytest.approx(1e22, rel=0.2)
    assert found["spread"]["least"] <= found["spread"]["mean"] <= found["spread"]["most"]
    assert len(found["advice"]) == 2
    code, out, _ = weft("--budget", "1e22")
    assert "chinchilla-3" in out
    assert "learning rate" in out
    assert weft("--budget", "3")[0] == weft("--devices", "2")[0] == 2


def test_a_fitted_law_comes_first_in_a_budget(weft, tmp_path):
    law = {"E": 1.5, "A": 400.0, "B": 400.0, "alpha": 0.34, "beta": 0.34}  # symmetric: as many parameters as tokens
    (tmp_path / "fit.json").write_text(json.dumps({"parametric": {key: {"value": one} for key, one in law.items()}}))
    code, out, _ = weft("--budget", "6e20", "--scaling", "fit.json", "--json")
    own = json.loads(out)["optima"][0]
    assert (code, own["law"]) == (0, "own")
    assert own["parameters"] == pytest.approx(1e10)
    assert own["tokens"] == pytest.approx(1e10)
    assert own["loss"] == pytest.approx(1.5 + 800 / 1e10**0.34)
    assert "fitted to your runs" in weft("--budget", "6e20", "--scaling", "fit.json")[1]
    for words, message in (
        (("--budget", "6e20", "--scaling", "no.json"), "no.json: not a fitted law"),
        ((*PLAN, "--scaling", "fit.json"), "also give --budget"),
    ):
        code, _, err = weft(*words)
        assert code == 2
        assert message in err


def test_the_largest_sequence_fits_and_is_longer(weft):
    code, out, _ = weft(*PLAN, "--json", "--largest", "sequence", "--limit", "1")
    assert code == 0
    assert json.loads(out)["largest_sequence"] > 1024
    assert "largest model" in weft(*PLAN, "--largest", "model", "--limit", "1")[1]


SMALL = "{hidden_size: 256, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 1000, intermediate_size: 512}"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_simulated_memory_stands_beside_the_formulas(weft):
    words = (*PLAN, f"model={SMALL}", "model.mlp=gated", "parallel={pp: 2}", "--keep-mesh", "--simulate")
    code, out, err = weft(*words, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)["simulated"]
    # Each pipeline rank has 2 data ranks, one layer, and half of the embedding or of the head.
    layer, ends = 4 * 256**2 + 3 * 256 * 512 + 2 * 256, 1000 * 256
    assert found[0]["rank"] == 0
    for one in found:
        for name in ("simulated", "formula"):
            assert one[name]["parameters"] == pytest.approx(4 * (layer + ends) / 2, rel=1e-2)
            assert one[f"{name}_bytes"] == pytest.approx(sum(one[name].values()), abs=10)
        assert one["simulated"]["optimizer"] == pytest.approx(2 * one["simulated"]["parameters"], rel=1e-2)
        assert one["simulated"]["activations"] > 0
    code, out, _ = weft(*(word for word in words if "pp: 2" not in word))
    assert code == 0
    assert "rank 0, two steps of the code without memory" in out
    code, out, err = weft(*words, "parallel.offload=optimizer")
    assert code == 2
    assert "parallel.offload: optimizer" in err
    assert "Traceback" not in err
