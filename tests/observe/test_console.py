"""The console: who prints, where, how often, and what happens when nobody listens."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from weft.observe.console import Console
from weft.observe.progress import Count, PlainProgress

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def plain(total, unit="step", start=0, interval=5.0, description="training"):
    clock, lines = Clock(), []
    return PlainProgress(lines.append, total, description, unit, start, interval, clock), clock, lines


def test_only_one_process_speaks():
    out, err = io.StringIO(), io.StringIO()
    console = Console(prints=False, out=out, err=err)
    console.line("a")
    console.warning("b")
    console.result("c")
    console.table(["x"], [[1]])
    with console.progress(3) as progress:
        progress.update(1, loss=1.0)
    assert out.getvalue() + err.getvalue() == ""


def test_notes_go_to_stderr_and_results_to_stdout():
    out, err = io.StringIO(), io.StringIO()
    console = Console(out=out, err=err)
    console.line("note")
    console.warning("odd")
    console.result("answer")
    assert (out.getvalue(), err.getvalue()) == ("answer\n", "note\nwarning: odd\n")


def test_a_line_is_complete_in_itself():
    progress, clock, lines = plain(1000, start=100)
    with progress:
        clock.now += 2
        progress.update(120, loss=3.412, lr=3e-4, tokens_per_second=12345.4)
    assert lines[0] == "step 100/1000"
    assert lines[1] == "step 120/1000  loss 3.412  lr 3.0e-04  12,345 tokens/s  ETA 1m28s"
    assert lines[-1] == "step 120/1000  loss 3.412  lr 3.0e-04  12,345 tokens/s  took 2s"


def test_lines_are_as_rare_as_asked():
    progress, clock, lines = plain(10_000)
    with progress:
        for step in range(1, 10_001):
            clock.now += 0.01
            progress.update(step, loss=1.0)
    assert len(lines) == 1 + 1 + 19 + 1  # start, first update, each 5 s of the 100 s, end
    assert lines[-1].startswith("step 10000/10000 ")


def test_long_runs_speak_at_least_once_a_minute_and_no_more():
    progress, clock, lines = plain(1_000_000)
    with progress:
        for step in range(1, 1001):
            clock.now += 100
            progress.update(step)
    assert len(lines) == 1002
    progress, clock, lines = plain(1_000_000)
    with progress:
        for step in range(1, 86_401):
            clock.now += 1
            progress.update(step)
    assert 1300 < len(lines) < 1700


def test_the_end_is_reported_when_it_breaks_off():
    progress, _, lines = plain(10)

    def fail():
        with progress:
            progress.update(1)
            progress.update(4, loss=2.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert lines[-1].startswith("step 4/10  loss 2.000")


def test_bytes_are_printed_in_megabytes():
    progress, clock, lines = plain(4_000_000, unit="B", description="packing")
    with progress:
        clock.now += 1
        progress.update(2_000_000)
        clock.now += 1
        progress.update(4_000_000)
    assert lines == [
        "packing 0.0/4.0 MB",
        "packing 2.0/4.0 MB  2.0 MB/s  ETA 1s",
        "packing 4.0/4.0 MB  2.0 MB/s  took 2s",
    ]


def test_a_total_need_not_be_known():
    progress, clock, lines = plain(None, unit="document", description="reading")
    with progress:
        clock.now += 1
        progress.update(30)
    assert lines == [
        "reading 0 documents",
        "reading 30 documents  30 documents/s",
        "reading 30 documents  30 documents/s  took 1s",
    ]


def test_a_slow_first_step_does_not_spoil_the_estimate_for_ever():
    clock = Clock()
    count = Count(1000, "", "step", 0, clock)
    clock.now += 30  # it compiles
    count.update(1, {})
    for step in range(2, 101):
        clock.now += 1
        count.update(step, {})
    assert count.remaining == pytest.approx(900, rel=0.01)


def test_a_field_stays_until_it_is_given_anew_or_removed():
    count = Count(10, "", "step", 0)
    count.update(1, {"loss": 1.0, "validation_loss": 2.0})
    count.update(2, {"loss": 0.5, "validation_loss": None})
    assert count.fields == {"loss": 0.5}


def test_escape_sequences_of_a_model_stay_off_the_terminal():
    out, err = io.StringIO(), io.StringIO()
    console = Console(out=out, err=err)
    console.line("a\x1b[2Jb\x07\ttab\nline")
    console.result("c\x9b31md")
    assert err.getvalue() == "a[2Jb\ttab\nline\n"
    assert out.getvalue() == "c31md\n"


def test_an_encoding_that_lacks_a_character():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    console = Console(out=stream, err=stream)
    console.line("café")
    console.result("naïve")
    assert raw.getvalue() == b"caf?\nna?ve\n"


def test_a_closed_stderr_silences_and_does_not_stop():
    out, err = io.StringIO(), io.StringIO()
    console = Console(out=out, err=err)
    err.close()
    assert not console.live
    console.line("nobody listens")
    with console.progress(2) as progress:
        progress.update(1)
    console.result("still here")
    assert out.getvalue() == "still here\n"


def test_a_broken_pipe_on_stderr_does_not_stop():
    code = (
        "import time; from weft.observe.console import Console\n"
        "c = Console()\n"
        "with c.progress(200) as p:\n"
        "    for i in range(200): p.update(i + 1, loss=1.0); c.line('x' * 1000)\n"
        "c.result('done')\n"
    )
    read, write = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=write, stdout=subprocess.PIPE, text=True)
    os.close(write)
    os.close(read)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "done\n")


def on_a_terminal(columns, **environment):
    """What a small run shows on a terminal of so many columns, and on a stdout that is no terminal."""
    code = (
        "import os, sys, time; from weft.observe.console import Console\n"
        "c = Console(interval=0)\n"
        "c.line('[bold]begin[/bold]')\n"
        "with c.progress(4, 'training') as p:\n"
        "    for i in range(4):\n"
        "        time.sleep(.1); p.update(i + 1, loss=3.25, tokens_per_second=12345.); c.line(f'note {i}')\n"
        "    print('print still goes to stdout')\n"
        "    with c.progress(2, 'inner') as q: q.update(1)\n"
        "    if not os.fork(): print('\\nchild', file=sys.stderr, flush=True); os._exit(0)\n"
        "    os.wait()\n"
        "c.result('end')\n"
    )
    main, side = pty.openpty()
    known = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": str(columns),
        "PYTHONIOENCODING": "utf-8",
        **environment,
    }
    process = subprocess.Popen([sys.executable, "-c", code], stderr=side, stdout=subprocess.PIPE, env=known)
    os.close(side)
    shown = b""
    try:
        while piece := os.read(main, 65536):
            shown += piece
    except OSError:  # the other side is closed
        pass
    out, _ = process.communicate(timeout=60)
    os.close(main)
    assert process.returncode == 0
    return shown.decode("utf-8"), out.decode("utf-8")


@pytest.mark.parametrize("columns", [140, 40, 10])
def test_a_bar_on_a_terminal_of_any_width(columns):
    shown, out = on_a_terminal(columns)
    assert out == "print still goes to stdout\nend\n"
    lines = [line for line in re.split(r"[\r\n]+", ESCAPE.sub("", shown)) if line.strip()]
    assert "[bold]begin[/bold]" in shown  # no markup in what is said
    assert "note 2" in shown
    assert "child" in shown
    bars = [line for line in lines if "4/4" in line]
    assert bars
    assert "100%" in bars[-1]
    assert all(len(line) <= columns for line in lines if "%" in line)
    assert ("12,345 tokens/s" in bars[-1]) == (columns == 140)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": ""}, {"PYTHONIOENCODING": "ascii"}])
def test_plain_lines_on_a_terminal_that_cannot(environment):
    shown, _ = on_a_terminal(80, **environment)
    assert "\x1b" not in shown
    assert "step 4/4  loss 3.250  12,345 tokens/s  took" in shown


def test_no_colour_when_asked():
    shown, _ = on_a_terminal(80, NO_COLOR="1")
    assert "4/4" in shown
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][;m]", shown)


def test_importing_the_console_is_cheap():
    code = "import sys, weft.observe.console; assert not {'rich', 'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tables_line_up():
    out = io.StringIO()
    Console(out=out).table(["name", "bits"], [["gzip -9", 2.04], ["this model", 1.7], ["none", None]])
    assert out.getvalue().splitlines() == [
        "name        bits",
        "gzip -9     2.04",
        "this model   1.7",
        "none           -",
    ]
