"""Each kind of number as people read it, at the edges between its units."""

import subprocess
import sys

import pytest

from weft import formatting


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (formatting.counted(0, "document"), "0 documents"),
        (formatting.counted(1, "document"), "1 document"),
        (formatting.counted(12345, "document"), "12,345 documents"),
        (formatting.counted(2, "entry", "entries"), "2 entries"),
        (formatting.percent(1, 8), "12.50%"),
        (formatting.percent(0, 0), "0.00%"),
        (formatting.timing(0.0000121), "12.1 us"),
        (formatting.timing(0.00321), "3.21 ms"),
        (formatting.timing(12.5), "12.5 s"),
        (formatting.flops_rate(989.4e12), "989.4 TFLOP/s"),
        (formatting.flops_rate(120e9), "120 GFLOP/s"),
        (formatting.progress(120, None, "step"), "120"),
        (formatting.progress(120, 1000, "step"), "120/1000"),
        (formatting.progress(1_500_000, 4_000_000, "B"), "1.5/4.0 MB"),
        (formatting.progress(1_500_000, None, "B"), "1.5 MB"),
        (formatting.progress(0, 4_000_000, "B"), "0.0/4.0 MB"),
        (formatting.progress(590, 1180, "B"), "0.6/1.2 kB"),
        (formatting.progress(0, 4, "B"), "0/4 B"),
    ],
)
def test_numbers(shown, text):
    assert shown == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, "7"), (1234, "1.2k"), (134_100_000, "134.1M"), (8_030_000_000, "8.03B"), (15_000_000_000_000, "15.00T")],
)
def test_amounts(number, text):
    assert formatting.amount(number) == text


def test_amounts_below_a_limit_in_full():
    assert [formatting.amount(number, 1e6) for number in (40_960, 1_234_567)] == ["40,960", "1.2M"]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3e-4, "3e-4"), (0.25, "0.25"), (1500, "1,500"), (12_000, "12k"), (3.5e6, "3.5M")]
)
def test_ticks_of_an_axis(value, text):
    assert formatting.tick(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "True"), ("a", "a"), (12345, "12,345"), (0.123456, "0.1235"), (1e4, "10,000")],
)
def test_cells(value, text):
    assert formatting.cell(value) == text


def test_bytes():
    sizes = [formatting.byte_size(number) for number in (640, 30_700, 1_200_000_000)]
    assert sizes == ["640 B", "30.7 kB", "1.2 GB"]
    assert formatting.byte_size(1_234_567_890, "MB") == "1,234.6 MB"
    assert formatting.byte_size(1_234_567_890, "GB") == "1.23 GB"
    small = [formatting.byte_size(number, "MB") for number in (50_001, 49_999, 118, 0)]
    assert small == ["0.1 MB", "50 kB", "118 B", "0 B"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (0.8, "0.8s"),
        (44.6, "45s"),
        (80, "1m20s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (273600, "3d04h"),
    ],
)
def test_durations(seconds, text):
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("per_second", "unit", "text"),
    [
        (12.3e6, "B", "12.3 MB/s"),
        (0.4, "step", "2.5 s/step"),
        (8.12, "step", "8.1 steps/s"),
        (12345, "file", "12,345 files/s"),
        (12.3, "batch", "12 batches/s"),
    ],
)
def test_rates(per_second, unit, text):
    assert formatting.rate(per_second, unit) == text


def test_metrics():
    assert formatting.metric("mfu", 0.4213) == "MFU 42.1%"
    assert formatting.metric("loss", float("nan")) == "loss nan"
    assert formatting.metric("loss", 12345.678) == "loss 1.23e+04"
    assert formatting.metric("lr", 3e-4) == "lr 3.0e-04"
    assert formatting.metric("tokens_per_second", 12345.6) == "12,346 tokens/s"
    assert formatting.metric("documents", 12345) == "documents 12,345"


def test_it_needs_no_torch():
    code = "import sys, weft.formatting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
