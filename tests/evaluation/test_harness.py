"""lm-evaluation-harness's questions, answered with the scores of its own `hf` model."""

import builtins
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from evaluation_cases import WINDOW, random_llama
from tokenizers.processors import TemplateProcessing

import weft
from weft.cli.main import main
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.evaluation.settings import Settings
from weft.evaluation.tasks import evaluate_tasks, find_tasks

CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}] {{ m.content.strip() }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEXTS = ["Kalo mi ren sta.", " Tu vo\n\nshi pra el kalo", "grüße 北京", "a", "ka " * 200, "mi", "Renstatu kalo. Vo"]


@pytest.fixture(scope="module")
def harness():
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    pytest.importorskip("accelerate", reason="the harness's hf model needs it")
    from lm_eval.models.huggingface import HFLM

    return HFLM


@pytest.fixture(scope="module", params=["plain", "framed"])
def folders(request, tmp_path_factory, tiny_tokenizer):
    """A random model of Hugging Face's, imported and exported again, with a tokenizer that frames texts or not."""
    root = tmp_path_factory.mktemp(request.param)
    random_llama(root / "hf", 520, bos_token_id=None, eos_token_id=0)
    settings = json.loads((tiny_tokenizer / "tokenizer_config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    if request.param == "framed":
        tokenizer.add_special_tokens(["<s>"])
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
        settings["bos_token"] = "<s>"
    tokenizer.save(str(root / "hf" / "tokenizer.json"))
    (root / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    (root / "hf" / "chat_template.jinja").write_text(CHAT)
    assert main(["import", str(root / "hf"), str(root / "ours")]) == 0
    assert main(["export", str(root / "ours"), str(root / "exported")]) == 0
    return root


@pytest.fixture(scope="module")
def both(harness, folders):
    from weft.evaluation.harness import WeftLM

    theirs = harness(pretrained=str(folders / "exported"), device="cpu", batch_size=1)
    tokenizer = Tokenizer.load(folders / "ours" / "tokenizer")
    return WeftLM(weft.load_model(folders / "ours"), tokenizer, batch_size=3), theirs


def requests(*arguments):
    return [SimpleNamespace(args=one, task_name="test") for one in arguments]


def test_the_same_probabilities(both):
    """Of answers long and short, behind no question, a question with blanks at its end, one that is too long."""
    questions = ["", *TEXTS, "kalo ", "mi \n "]
    asked = [(question, answer) for question in questions for answer in (" ren", "a", " kalo mi. Ren sta tu", "üß")]
    ours, theirs = (lm.loglikelihood(requests(*asked)) for lm in both)
    for found, expected in zip(ours, theirs, strict=True):
        assert found[0] == pytest.approx(expected[0], abs=1e-5, rel=1e-6)
        assert found[1] == expected[1]
    # What the model itself would write is the likeliest.
    start = both[0].tok_encode("kalo mi")
    likeliest = both[0].model(torch.tensor([start]))[0, -1].argmax().item()
    assert both[0]._loglikelihood_tokens([(None, start, [likeliest])])[0][1]


def test_the_same_perplexity(both):
    texts = [*TEXTS, "", "<s>kalo", "<|endoftext|>mi ren"]
    ours, theirs = (lm.loglikelihood_rolling(requests(*((text,) for text in texts))) for lm in both)
    assert len(both[0].tok_encode(TEXTS[4])) > 2 * WINDOW  # of more than one window
    assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-6)


def test_the_same_answers(both):
    ways = [
        {"until": ["\n\n", "a"], "max_gen_toks": 20},
        {"until": "ka", "max_gen_toks": 30, "do_sample": False},
        {"max_gen_toks": 7},
        {"until": ["never", " r", "e"], "max_new_tokens": 24, "temperature": 0.0},
    ]
    asked = [(text, way) for text in TEXTS for way in ways]
    ours, theirs = (lm.generate_until(requests(*asked)) for lm in both)
    assert ours == theirs
    assert len({len(text) for text in ours}) > 5


def test_the_same_conversations(both):
    asked = [{"role": "user", "content": "kalo "}]
    begun = [*asked, {"role": "assistant", "content": "mi ren. "}]
    for lm in both:
        lm.chat_template(True)
    for chat, prompt in ((asked, True), (begun, False), ([{"role": "system", "content": "x"}, *asked], True)):
        ours, theirs = (lm.apply_chat_template(list(chat), add_generation_prompt=prompt) for lm in both)
        assert ours == theirs
    assert both[0].chat_template(True) == both[1].chat_template(True)


COMMON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
TASKS = {
    "choices": {
        "training_split": "train", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "writing": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks, and how to fill in what one of them expects."""
    folder = tmp_path / "tasks"
    folder.mkdir()

    def write(said):
        rows = [
            {"question": text, "choices": [" ren", " kalo mi", "a"], "answer": i % 3, "said": said[i % len(said)]}
            for i, text in enumerate(text for text in TEXTS if len(text) < 100)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"data_files": {"test": str(folder / "rows.jsonl"), "train": str(folder / "rows.jsonl")}}
        for name, task in TASKS.items():
            content = {"task": name, "dataset_kwargs": files} | COMMON | task
            (folder / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
        return folder

    return write


def scores(results):
    return {
        task: {key: value for key, value in found.items() if "," in key and isinstance(value, float)}
        for task, found in results.items()
    }


def test_the_same_scores_of_local_tasks(both, folders, tasks, tmp_path, monkeypatch, capfd):
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)  # no git repository
    said = both[1].generate_until(requests(*((text, {"until": ["\n"], "max_gen_toks": 5}) for text in TEXTS[:2])))
    folder = tasks([*said, "something else"])
    out = tmp_path / "scores.json"
    words = ["evaluate", folders / "ours", "--tasks", "choices,rolling,writing", "--include-path", folder]
    chat = "framed" in str(folders)
    words += ["--num-fewshot", int(chat), "--batch-size", "4", "--json", out]
    if chat:
        words.append("--apply-chat-template")
    assert main([str(word) for word in words]) == 0
    shown, told = capfd.readouterr()
    assert "fatal" not in told
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # two seconds
    theirs = lm_eval.simple_evaluate(
        both[1],
        tasks=list(TASKS),
        num_fewshot=int(chat),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=1000,
    )
    found = json.loads(out.read_text())["tasks"]
    assert found.keys() == TASKS.keys()
    for task, expected in scores(theirs["results"]).items():
        assert found[task]["questions"] == 6
        for score in found[task]["scores"]:
            assert score["value"] == pytest.approx(expected[f"{score['metric']},{score['filter']}"], rel=1e-5)
            if score["stderr"] is not None:
                assert score["stderr"] == pytest.approx(expected[f"{score['metric']}_stderr,{score['filter']}"])
            assert score["metric"] in shown
    if not chat:
        assert 0 < found["writing"]["scores"][0]["value"] < 1


def test_what_cannot_be_asked_is_reported_in_one_line(both, folders, tasks, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # that takes seconds
    model, tokenizer, folder = both[0].model, folders / "ours" / "tokenizer", tasks(["x"])
    (folder / "choices.yaml").write_text((folder / "choices.yaml").read_text().replace("rows.jsonl", "gone.jsonl"))
    for names, place, what in (
        (["rollin"], folder, "did you mean 'rolling'"),
        (["rolling"], tmp_path / "gone", "no such folder"),
        ([], folder, "`tasks` is empty"),
    ):
        with pytest.raises(UserError, match=what):
            find_tasks(names, place)
    every = find_tasks(list(TASKS), folder)
    for name, given, more, what in (
        ("choices", tokenizer, {}, "cannot build choices: FileNotFoundError.*gone.jsonl"),
        ("rolling", tokenizer, {"limit": 0}, "limit is 0"),
        ("rolling", tokenizer, {"num_fewshot": -1}, "num_fewshot is -1"),
        ("rolling", None, {}, "set `tokenizer`"),
    ):
        with pytest.raises(UserError, match=what) as problem:
            evaluate_tasks(model, [name], every, Settings(tokenizer=given, **more))
        assert "\n" not in str(problem.value)
    bare = tmp_path / "bare"
    shutil.copytree(tokenizer, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"no chat template in this folder; put a chat_template\.jinja"):
        evaluate_tasks(model, ["rolling"], every, Settings(tokenizer=bare, apply_chat_template=True))
    for settings, what in (({"num_beams": 2}, "num_beams"), ({"max_gen_toks": WINDOW}, "lower max_gen_toks")):
        with pytest.raises(UserError, match=what):
            both[0].generate_until(requests(("ka", settings)))
    with pytest.raises(UserError, match="empty answer"):
        both[0].loglikelihood(requests(("ka", "")))


def test_without_the_harness(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("weft.evaluation.tasks.find_spec", lambda name: None)
    real = builtins.__import__

    def without(name, *rest, **more):
        assert not name.startswith("lm_eval")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["evaluate", str(tmp_path), "--tasks", "arc_easy"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'weft-train[eval]'" in said
    assert said.count("\n") == 1
