"""lm-evaluation-harness over HTTP: its requests give the numbers and texts of Transformers on the same folder."""

import json
import os
import subprocess

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": "hello good", "choices": [" morning", " add", " age"], "gold": 0},
    {"question": "What is 2 +", "choices": [" 3?", " Kalo Ren"], "gold": 0},
    {"question": "Tools: né", "choices": [" 日本", " short", " {} []"], "gold": 1},
]
TASKS = {
    "choose": "multiple_choice\ndoc_to_choice: '{{choices}}'\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]",
    "score": "loglikelihood_rolling\nmetric_list: [{metric: bits_per_byte}]",
    "write": "generate_until\ngeneration_kwargs: {until: ['\\n'], max_gen_toks: 12}\n"
    "metric_list: [{metric: exact_match}]",
}
TEXTS = {"choose": ("{{question}}", "{{gold}}"), "score": ("", "{{question}}"), "write": ("{{question}}", "{{gold}}")}

# Prints what the tasks ask for. The harness sends texts without special tokens, and begins complete texts with `<bos>`.
REFERENCE = """
import json, sys, torch, transformers
folder, rows = sys.argv[1], json.loads(sys.argv[2])
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids
def score(ids, new):
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(logprobs[i - 1, ids[i]].item() for i in range(len(ids) - new, len(ids)))
def write(ids):
    new = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids):]
    return tokenizer.decode(new).split("\\n")[0].split(tokenizer.eos_token)[0]
found = {"choose": [], "score": [], "write": []}
for row in rows:
    question = encode(row["question"])
    for choice in row["choices"]:
        ids = encode(row["question"] + choice)
        found["choose"].append(score(ids, len(ids) - len(question)))
    found["score"].append(score([tokenizer.bos_token_id, *question], len(question)))
    found["write"].append(write(question))
print(json.dumps(found))
"""


def results(server, folder, model, path, tasks, **options):
    arguments = {"model": server.model, "base_url": server.url + path, "num_concurrent": 4, "auth_token": server.key}
    return lm_eval.simple_evaluate(
        model, model_args={**arguments, "max_length": 512}, tasks=tasks, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), **options,
    )["samples"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, server):
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HOME", str(tmp_path)), ("OPENAI_API_KEY", server.key)):
        monkeypatch.setenv(name, value)
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS))
    for name, rest in TASKS.items():
        text, target = TEXTS[name]
        lines = [
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test",
            f"doc_to_text: '{text}'\ndoc_to_target: '{target}'\noutput_type: {rest}\n",
        ]
        (tmp_path / f"{name}.yaml").write_text("\n".join(lines))
    return tmp_path


def test_tasks_have_the_numbers_of_transformers(server, folder, request):
    command = [os.environ["WEFT_PYTHON"], "-c", REFERENCE, request.config.weft_model, json.dumps(ROWS)]
    expected = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    found = results(server, folder, "local-completions", "/v1/completions", [*TASKS])
    scores = [choice[0][0] for sample in found["choose"] for choice in sample["resps"]]
    assert scores == pytest.approx(expected["choose"], abs=1e-3)
    assert [sample["resps"][0][0] for sample in found["score"]] == pytest.approx(expected["score"], abs=1e-3)
    assert [sample["resps"][0][0] for sample in found["write"]] == expected["write"]


def test_chats(server, folder):
    found = results(
        server, folder, "local-chat-completions", "/v1/chat/completions", ["write"], apply_chat_template=True
    )
    assert all(sample["resps"][0][0] for sample in found["write"])
