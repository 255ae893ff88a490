"""The report: one page, whole in itself, for every state that a run can be in."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from weft.errors import UserError
from weft.observe import charts
from weft.observe.events import append_event
from weft.observe.flops import DEFINITION
from weft.observe.manifest import end_session, write_manifest
from weft.observe.metrics import MetricsFile, SamplesFile
from weft.observe.report import build_report

CONFIG = {"run": {"name": "demo", "seed": 7}}


class Page(HTMLParser):
    """Checks that tags nest, and gathers text, tags and what would be fetched."""

    VOID = {"meta", "link", "br", "line", "circle", "path", "img", "input"}  # noqa: RUF012

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.fetched = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.fetched += [v for k, v in attributes if k in ("src", "href", "srcset", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def make_run(path, steps, *, validation=False, bad=(), manifest=True, samples=(), resumed=None):
    path.mkdir(exist_ok=True)
    if manifest:
        facts = {"steps": 500, "tokens_per_step": 1024, "parameters": 13_800_000, "peak_flops_per_second": 8.8e11}
        facts |= {"peak_origin": "measured with a 2048 x 2048 bfloat16 matmul on 4 CPU threads"}
        write_manifest(path, CONFIG, ranks=1, **facts)
        if resumed:
            write_manifest(path, CONFIG, ranks=1, resumed_step=resumed, **facts)
    metrics = MetricsFile(path)
    for step in range(1, steps + 1):
        record = {"step": step, "tokens": step * 1024, "loss": math.nan if step in bad else 5 / step, "lr": 1e-3}
        record |= {"grad_norm": 1.0, "tokens_per_second": 100.0, "mfu": 0.25, "memory_bytes": 3_000_000_000}
        record |= {"step_seconds": 2.0, "data_seconds": 0.1}
        if validation and step % 10 == 0:
            record |= {"validation_loss": 6 / step, "validation_bits_per_byte": 2 / step}
        metrics.write(record)
    writer = SamplesFile(path)
    for step, prompt, text in samples:
        writer.add(step, prompt, text)
    return path


def page_of(run):
    return Page(build_report(run).read_text(encoding="utf-8"))


def test_a_whole_run(tmp_path):
    run = make_run(
        tmp_path / "demo", 40, validation=True, resumed=17, samples=[(20, "def ", "f():"), (40, "def ", "g():")]
    )
    (run / "config.yaml").write_text("optimizer: {lr: 0.001}  # <script>alert(1)</script>\n")
    end_session(run, status="stopped", step=40)
    page = page_of(run)
    assert page.fetched == []
    assert not re.search(r"https?://|@import|url\(", (run / "report.html").read_text())
    assert sum(tag == "figure" for tag, _ in page.tags) == 7
    assert sum(a.get("class") == "resume" for _, a in page.tags) == 7
    for words in (
        "demo",
        "stopped: step 40 of 500",
        "0.1250",  # the last loss
        "0.1500 at step 40; best 0.1500",
        "0.050 held out",
        "40,960 of 512,000 planned",
        "25.0%",
        "3.00 GB",
        "13.8M",
        "def g():",
        "optimizer: {lr: 0.001} # <script>alert(1)</script>",
        "resumed after step 17",
        DEFINITION,
        "measured with a 2048 x 2048 bfloat16 matmul on 4 CPU threads",
    ):
        assert words in page.text.replace("def f", "deff").replace("def  g", "def g"), words


@pytest.mark.parametrize(
    ("config", "named"),
    [("objective: sft", True), ("objective:\n  type: pretrain", True), ("objective: {type: dpo}", False)]
    + [(text, False) for text in ("objective: [", "- 1", "")],
)
def test_only_a_loss_per_token_is_called_so(tmp_path, config, named):
    run = make_run(tmp_path / "r", 2)
    (run / "config.yaml").write_text(config)
    assert page_of(run).text.count("nats per token") >= 2 if named else "nats per token" not in page_of(run).text


def test_text_of_a_model_cannot_write_the_page(tmp_path):
    evil = "</pre></script><script>alert(1)</script><img src=http://x>"
    run = make_run(tmp_path / "r", 2, samples=[(1, evil, evil + "\ud800")])
    page = page_of(run)
    assert sum(tag == "script" for tag, _ in page.tags) == 2  # ours
    assert page.fetched == []
    assert evil in page.text


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("manifest", [True, False])
def test_a_run_that_has_hardly_begun(tmp_path, steps, manifest):
    page = page_of(make_run(tmp_path / "r", steps, manifest=manifest))
    assert ("No metrics yet" in page.text) == (steps == 0)
    assert sum(tag == "figure" for tag, _ in page.tags) == (6 if steps else 0)


def test_a_loss_that_is_no_number(tmp_path):
    run = make_run(tmp_path / "r", 10, bad=(4, 5, 10))
    page = page_of(run)
    assert "3 values not finite" in page.text
    assert sum(a.get("class") == "bad" for _, a in page.tags) == 3
    assert "nan at step 10" in page.text
    all_bad = page_of(make_run(tmp_path / "s", 3, bad=(1, 2, 3)))
    assert sum(tag == "figure" for tag, _ in all_bad.tags) == 5


def test_a_run_that_is_still_writing(tmp_path):
    run = make_run(tmp_path / "r", 5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert "step 5 of 500" in page_of(run).text
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")  # torn all the same, and ended by whoever looked at it
    assert "step 5 of 500" in page_of(run).text


def test_many_steps_make_a_page_of_bounded_size(tmp_path):
    run = make_run(tmp_path / "r", 5000)
    page = page_of(run)
    readouts = json.loads(re.search(r'id="readouts">(.*?)</script>', (run / "report.html").read_text())[1])
    assert all(len(c["x"]) <= charts.MOST_POINTS for chart in readouts.values() for c in chart["curves"])
    assert "Each point is the mean of up to 5 logged steps" in page.text
    assert (run / "report.html").stat().st_size < 1_000_000


def test_not_a_run(tmp_path):
    with pytest.raises(UserError, match="no such run directory"):
        build_report(tmp_path / "nothing")
    with pytest.raises(UserError, match="not a run directory"):
        build_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        build_report(tmp_path)


def test_building_twice_replaces_the_page(tmp_path):
    run = make_run(tmp_path / "r", 3)
    first = build_report(run).read_text()
    make_more = MetricsFile(run)
    make_more.write({"step": 4, "loss": 0.123456})
    assert "0.1235" not in first
    assert "0.1235" in build_report(run).read_text()


def test_a_downsampled_curve_keeps_means_and_extremes():
    values = [math.sin(i) for i in range(2500)]
    values[1234] = 50.0  # one spike must stay visible
    values[7] = math.nan
    chart = charts.draw(charts.Plot("k", "t", [charts.Series("s", range(1, 2501), values)], repr))
    (curve,) = chart.curves
    assert len(curve.readout["x"]) == 834
    assert curve.per_point == 3
    assert any("50.0)" in label for label in curve.readout["t"])
    mean = sum(values[3:6]) / 3
    assert curve.readout["t"][1].startswith(repr(mean)[:12])
    top = min(float(y) for y in re.findall(r" (-?[\d.]+)", curve.band))
    assert top < chart.box[1] + 20  # the band reaches up to the spike


def test_coordinates():
    chart = charts.draw(charts.Plot("k", "t", [charts.Series("s", [0, 10], [0.0, 100.0])], repr, from_zero=True))
    (curve,) = chart.curves
    left, top, right, bottom = chart.box
    assert curve.readout["x"] == [left, right]
    assert curve.readout["y"][0] == bottom
    assert top < curve.readout["y"][1] < bottom
    zero = next(y for y, label in chart.y_ticks if label == "0")
    assert zero == bottom


def test_gaps_are_gaps():
    chart = charts.draw(charts.Plot("k", "t", [charts.Series("s", range(5), [1, 2, math.inf, 2, 1])], repr))
    assert chart.curves[0].path.count("M") == 2


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 3.0001), (-2e-5, 7e-5), (1, 1e9), (0.1, 0.3)])
def test_ticks_are_few_round_and_inside(low, high):
    values = charts.ticks(low, high)
    assert 2 <= len(values) <= 8
    assert all(low - 1e-9 * (high - low) <= v <= high + 1e-9 * (high - low) for v in values)


def test_the_mean_line_does_not_lag():
    line = charts.centered_mean([float(i) for i in range(100)], 10)
    assert line == pytest.approx([float(i) for i in range(100)])
    assert math.isnan(charts.centered_mean([1.0, math.nan, 3.0], 3)[1])


def test_the_verb_prints_the_page(tmp_path, capsys):
    main = pytest.importorskip("weft.cli.main").main
    run = make_run(tmp_path / "r", 2)
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr()
    assert (said.out.strip(), said.err) == (str(run / "report.html"), "")
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_events_of_the_watch_are_marked_in_the_chart_of_the_loss(tmp_path):
    make_run(tmp_path / "demo", 40)
    append_event(tmp_path / "demo", 20, "spike", "warn", "step 20: the loss <is> a spike")
    text = build_report(tmp_path / "demo").read_text()
    [mark] = [attributes for _, attributes in Page(text).tags if attributes.get("class") == "event"]
    left, right = charts.LEFT, 1136 - charts.RIGHT
    at = float(re.match(r"M([\d.]+) ", mark["d"])[1])
    assert at == pytest.approx(left + (20 - 1) / (40 - 1) * (right - left), abs=0.1)
    assert "the loss &lt;is&gt; a spike" in text
    assert "1 event of the watch" in Page(text).text
