"""The same pack on a Ray cluster: the same bytes, and the same words when it fails."""

import json

import pytest

from weft.cli.main import main
from weft.data.packing.pack import pack
from weft.errors import UserError

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=1 << 27
    )
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_a_cluster_gives_the_same_bytes_and_names_the_first_reject(tmp_path, tiny_tokenizer):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": f"document {number} " * 20}) for number in range(200)]
    path.write_text("\n".join(lines))
    options = {"reading": None, "range_bytes": 8192}
    pack([path], tmp_path / "a", tiny_tokenizer, workers=1, **options)
    pack([path], tmp_path / "b", tiny_tokenizer, ray="", **options)
    for name in ("tokens.bin", "tokens.idx", "store.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    lines[150] = lines[190] = '{"text": null}'
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"in.jsonl:151: "):
        pack([path], tmp_path / "c", tiny_tokenizer, ray="", **options)


def test_without_ray_it_says_what_to_install(tmp_path, tiny_corpus, tiny_tokenizer, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    command = ["data", "pack", str(tiny_corpus / "train"), "--tokenizer", str(tiny_tokenizer)]
    assert main([*command, "--out", str(tmp_path / "s"), "--ray"]) == 2
    assert "pip install 'weft-train[ray]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
