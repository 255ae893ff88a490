"""`.json`: lists, and records one after the other in any spacing, give exactly their values."""

import gzip
import json
import random

import pytest
from source_cases import collect, reasons, values

from weft.data.documents import Document
from weft.data.sources import Reading, streams

BETWEEN = ["", " ", "\n", "\n\n", "\r\n", "\t\n ", "\n  \n"]


def record(rng, number):
    text = "".join(rng.choices('ab{}[],:"\\ \né🎉', k=rng.randrange(12)))
    inner = [{"text": "inner"}, [], {}, 1.5, None, "x" * rng.randrange(40)]
    return {"n": number, "rest": rng.sample(inner, rng.randrange(4)), "text": text}


def written(rng, value):
    """JSON on one line, or over several."""
    separators = rng.choice([(",", ":"), (", ", ": "), (",\n", "\n: \n")])
    return json.dumps(
        value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 0, 2]), separators=separators
    )


def test_objects_on_one_line_are_read_in_any_spacing(tmp_path):
    path = tmp_path / "a.json"
    for between in BETWEEN:
        for end in ("", "\n", " "):
            path.write_text(between.join(['{"text":"a"}', '{"text": "b"}', '{"text":"c"}']) + end, newline="")
            assert values(path) == ["a", "b", "c"], repr(between)
    lines = [
        '{"text":"a"}',
        '{"text":"b"}{"text":"c"}',
        '{"text":',
        '"d"}',
        "",
        '{"text":"e"} {',
        '"text":"f"}{"text":"g"}',
    ]
    path.write_text("\n".join(lines))
    items, counts = collect(path)
    assert items == [("a", 1), ("b", 2), ("c", 2), ("d", 3), ("e", 6), ("f", 6), ("g", 7)]
    assert counts.lines == 7


@pytest.mark.parametrize("block", [5, 50, 1 << 20])
def test_every_spacing_gives_the_values_that_were_written(tmp_path, monkeypatch, block):
    monkeypatch.setattr(streams.UnitReader.read, "__defaults__", (block,))
    rng = random.Random(block)
    for number in range(60):
        records = [record(rng, n) for n in range(rng.randrange(1, 9))]
        text, odd = "", rng.random()
        for one in records:
            text += (json.dumps(one) if rng.random() < odd else written(rng, one)) + rng.choice(BETWEEN)
        path = tmp_path / f"{number}.json"
        path.write_text(text, encoding="utf-8", newline="")
        assert values(path, Reading(records=True)) == records
        zipped = tmp_path / f"{number}.json.gz"
        zipped.write_bytes(gzip.compress(text.encode()))
        assert values(zipped) == [one["text"] for one in records]
        path.write_text(json.dumps(records, indent=rng.choice([None, 1])))
        assert values(path, Reading(records=True)) == records


@pytest.mark.parametrize(
    "broken", ['{"text": "cut', '{"text": "x", "y": [', "nothing of JSON's", '{"text": "x"}}', '{"text": "ÿ" "}', "[1,"]
)
@pytest.mark.parametrize("place", [1, 3, 6])
def test_a_broken_record_costs_its_line_only(tmp_path, broken, place):
    lines = [f'{{"text": "{name}"}}' for name in "abcdef"]
    path = tmp_path / "a.json"
    path.write_bytes("\n".join([*lines[:place], broken, *lines[place:]]).encode("latin-1"))
    items, counts = collect(path)
    assert [item.value for item in items if isinstance(item, Document) and item.value != "x"] == list("abcdef")
    assert reasons(items) == [(place + 1, "broken JSON")]
    assert counts.lines == 7


def test_a_big_file_of_lines_is_cut_and_its_odd_lines_are_read(tmp_path):
    path = tmp_path / "a.json"
    records = [{"text": f"{n} " + "x" * (n % 90)} for n in range(2000)]
    lines = [json.dumps(one) for one in records]
    for content in (
        "\n".join(lines) + "\n",
        "\n".join([*lines[:-3], "".join(lines[-3:])]),
        "\n".join(json.dumps(one, indent=n % 2 or None) for n, one in enumerate(records)),
    ):
        path.write_text(content)
        for size in (1000, 4097):
            items, counts = collect(path, range_bytes=size)
            assert [item.value for item in items] == [one["text"] for one in records]
            assert counts.lines == len(content.splitlines())


def test_what_never_ends_takes_neither_the_lines_behind_it_nor_all_time(tmp_path):
    path = tmp_path / "a.json"
    for begun, number in (('{"a":[\n', 3000), ('{"text":"x","a":[\n', 1), ('{"text": "x\n', 3000)):
        path.write_text('{"text":"first"}\n' + begun * number + '{"text":"b"}\n' * 20)
        items, counts = collect(path)
        assert [item.value for item in items if isinstance(item, Document)] == ["first"] + ["b"] * 20
        assert [line for line, _ in reasons(items)] == list(range(2, 2 + number))
        assert counts.lines == 21 + number
