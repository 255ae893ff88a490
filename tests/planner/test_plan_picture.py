"""weft plan --days and --picture."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from test_plan_verb import weft  # noqa: F401 - a fixture

HARDWARE = ("--hardware", "a100-sxm")
SMALL = "{hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4, vocab_size: 1000, intermediate_size: 512}"
SVG = "{http://www.w3.org/2000/svg}"


def drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_picture_has_a_front_and_a_lane_for_each_pipeline_rank(weft, tmp_path):  # noqa: F811
    words = ("run.yaml", "--devices", "4", *HARDWARE, "parallel={pp: 2}", f"model={SMALL}")
    code, out, err = weft(*words, "--keep-mesh", "--picture", "plan.html", "--json")
    assert (code, err) == (0, "")
    timeline = drawings((tmp_path / "plan.html").read_text())[1]
    texts = [one.text for one in timeline.iter(f"{SVG}text")]
    assert {"rank 0: compute", "rank 1: compute"} <= set(texts)
    bars = [one.find(f"{SVG}title").text for one in timeline.iter(f"{SVG}rect") if one.find(f"{SVG}title") is not None]
    assert sum(text.startswith("F0:") for text in bars) == 2  # each rank runs the first micro-batch forward once
    assert json.loads(out)["plans"][0]["parallel"]["pp"] == 2


def test_each_point_of_the_front_needs_less_memory_and_more_time(weft, tmp_path):  # noqa: F811
    code, _, err = weft("run.yaml", "--devices", "2", *HARDWARE, f"model={SMALL}", "--picture", "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert code == 0
    assert "wrote plan.html" in err
    assert "<script" not in page
    line = next(drawings(page)[0].iter(f"{SVG}polyline")).get("points")
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) > 2
    assert points == sorted(points, reverse=True)  # from right to left: less memory
    heights = [height for _, height in points]
    assert heights == sorted(heights, reverse=True)  # upwards, which is more time


def test_days_give_the_number_of_devices(weft):  # noqa: F811
    words = ("run.yaml", *HARDWARE, "--limit", "1", "--json")
    alone = json.loads(weft(*words, "--devices", "1")[1])["plans"][0]["days"]
    code, out, err = weft(*words, "--days", str(alone / 3))
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["devices"] == 4
    assert found["plans"][0]["days"] == found["tried"]["4"] <= alone / 3
    assert "days by devices: 1: " in weft(*words[:-1], "--days", str(alone / 3))[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--days", "3", "--devices", "4"), "--days does not use --devices"),
        (("--days", "3", "--keep-mesh"), "--days does not use --keep-mesh"),
        (("--days", "0"), "--days 0: use a positive number"),
        (("--days", "nan"), "--days nan: use a positive number"),
        (("--devices", "1", "--picture", "plan.png"), "--picture plan.png: the picture is an HTML page"),
        (("--devices", "1", "--picture", "no/plan.html"), "no/plan.html"),
    ],
)
def test_wrong_options_are_reported(weft, words, message):  # noqa: F811
    code, out, err = weft("run.yaml", *HARDWARE, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
