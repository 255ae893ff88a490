"""The chat template with which a store was packed: recorded in the store, and used by the runs that train on it."""

import json

from running import QUIET, train

from weft.cli.main import main
from weft.data.conversations.named_templates import NAMED
from weft.data.stores.store import TokenStore

RECORDS = [{"instruction": f"Vo shi {n}?", "output": "Kalo mi. " * (n + 1)} for n in range(6)]


def test_a_run_on_packed_conversations_has_their_chat_template(run_yaml, tiny_tokenizer, tiny_store, tmp_path, capsys):
    path = tmp_path / "my.json"
    path.write_text(json.dumps(RECORDS))
    for name in ("zephyr", "chatml"):
        command = ["data", "pack", str(path), "--tokenizer", str(tiny_tokenizer), "--out", str(tmp_path / name)]
        assert main([*command, "--chat-template", name]) == 0
    shuffled = tmp_path / "shuffled"
    assert main(["data", "shuffle", str(tmp_path / "zephyr"), "--out", str(shuffled), "--seed", "1"]) == 0
    for parts, expected in ((["zephyr", "shuffled"], NAMED["zephyr"].source), (["zephyr", "chatml"], None)):
        merged = tmp_path / "-".join(parts)
        assert main(["data", "merge", *(str(tmp_path / part) for part in parts), "--out", str(merged)]) == 0
        assert TokenStore(merged).info.chat_template == expected
    assert TokenStore(tiny_store).info.chat_template is None
    data = {"train": str(shuffled), "validation": str(tmp_path / "chatml"), "sequence_length": 64}
    training = {"steps": 1, "batch_tokens": 64, "micro_batch_size": 1}
    common = {"log": QUIET, "checkpoint": {"every": 1}, "schedule": {"type": "constant", "warmup_steps": 0}}
    assert train(run_yaml(data=data, training=training, **common)) == 0
    saved = tmp_path / "runs" / "demo" / "tokenizer" / "chat_template.jinja"
    assert saved.read_text() == NAMED["zephyr"].source
    capsys.readouterr()
    # Texts are joined; conversations that validate them would be, too.
    file = run_yaml("texts.yaml", data=data | {"train": str(tiny_store)}, training=training, **common)
    for overrides, warned in (([], True), (["data.packing=concatenate"], False), (["data.packing=best_fit"], False)):
        assert main(["config", "check", str(file), *overrides]) == 0
        assert ("data.validation: conversations are joined and split at any token" in capsys.readouterr().err) == warned
