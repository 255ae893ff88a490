"""Scaling laws: a known law is found again, and what cannot be identified is refused."""

import csv
import json

import numpy as np
import pytest

from weft.cli.main import main
from weft.errors import UserError
from weft.planner.budget import ParametricLaw
from weft.planner.scaling_law import Observation, best_sizes, fit_all, fit_envelope, fit_isoflop, fit_law
from weft.planner.scaling_runs import read_law, read_observations

# The law that Besiroglu et al. (2024) fitted to Chinchilla's runs.
LAW = ParametricLaw(e=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)
BEST = best_sizes(LAW)


def isoflops(noise: float = 0.0) -> list[Observation]:
    """Nine sizes around the best one at each of six budgets."""
    chooser, found = np.random.default_rng(1), []
    for flops in np.geomspace(6e18, 3e21, 6):
        for times in np.geomspace(1 / 4, 4, 9):
            size = BEST.parameters(flops) * times
            tokens = flops / 6 / size
            found.append(Observation(size, tokens, LAW.loss(size, tokens) * np.exp(chooser.normal(0, noise))))
    return found


def grid() -> list[Observation]:
    """Losses of 12 sizes at 12 numbers of tokens, as along runs with a constant learning rate."""
    sizes, lengths = np.geomspace(1e7, 1e10, 12), np.geomspace(1e8, 1e12, 12)
    return [Observation(n, d, LAW.loss(n, d)) for n in sizes for d in lengths]


def test_the_best_size_is_a_minimum_of_the_law():
    flops, best = 1e21, BEST.parameters(1e21)
    least = min(np.geomspace(best / 3, best * 3, 2001), key=lambda n: LAW.loss(n, flops / 6 / n))
    assert best == pytest.approx(least, rel=2e-3)


def test_a_law_without_noise_is_found_exactly():
    for points in (isoflops(), grid()):
        found = fit_law(points)
        for name in ("e", "a", "b", "alpha", "beta"):
            assert getattr(found, name) == pytest.approx(getattr(LAW, name), rel=5e-3), name


def test_three_ways_agree_with_the_law():
    isoflop, envelope = fit_isoflop(isoflops()), fit_envelope(grid())
    assert isoflop is not None
    assert isoflop.exponent == pytest.approx(BEST.exponent, abs=5e-3)
    assert isoflop.parameters(1e21) == pytest.approx(BEST.parameters(1e21), rel=0.05)
    assert envelope is not None
    assert envelope.exponent == pytest.approx(BEST.exponent, abs=0.06)  # sizes are a factor of 1.9 apart
    interpolated = fit_isoflop(grid())  # no common budgets
    assert interpolated is not None
    assert interpolated.exponent == pytest.approx(BEST.exponent, abs=0.06)
    assert fit_envelope(isoflops()) is None  # no size has two losses


def test_intervals_contain_the_law():
    found = fit_all(isoflops(noise=0.003), resamples=60)
    assert json.loads(json.dumps(found)) == found
    for name in ("alpha", "beta"):
        low, high = found["parametric"][name]["interval"]
        assert low < found["parametric"][name]["value"] < high
        assert low - (high - low) / 2 < getattr(LAW, name) < high + (high - low) / 2
    for way in ("parametric", "isoflop"):
        low, high = found["optimum"][way]["exponent"]["interval"]
        assert low - 0.02 < BEST.exponent < high + 0.02
        assert high - low < 0.15
    assert found["optimum"]["envelope"] is None


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (grid()[:5], "5 numbers, but there are 5 losses of 1 model sizes"),
        ([Observation(n, 20 * n, LAW.loss(n, 20 * n)) for n in np.geomspace(1e7, 1e10, 12)], "20 tokens per parameter"),
        ([Observation(n, d, 2 + 1e3 / d**0.4) for n in (1e7, 1e8, 1e9) for d in (1e9, 1e10, 1e11)], "fall with size"),
    ],
)
def test_what_cannot_be_identified_is_refused(points, message):
    with pytest.raises(UserError, match=message):
        fit_all(points, resamples=2)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "losses.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "parameters", "tokens", "loss"])
        writer.writerows(["run", one.parameters, one.tokens, one.loss] for one in isoflops())
    return path


def test_the_command_reads_tables(table, tmp_path, capsys):
    command = ["scaling", "fit", str(table), "--resamples", "8"]
    assert main([*command, "--json", "--picture", str(tmp_path / "fit.svg")]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["format"] == 1
    (tmp_path / "fit.json").write_text(out)
    assert read_law(tmp_path / "fit.json").beta == found["parametric"]["beta"]["value"]
    with pytest.raises(UserError, match=r"losses\.csv: not a fitted law"):
        read_law(table)
    assert found["parametric"]["alpha"]["value"] == pytest.approx(LAW.alpha, rel=5e-3)
    picture = (tmp_path / "fit.svg").read_text()
    assert "N^0.348" in picture
    assert ">1e20</text>" in picture
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "alpha" in out
    assert "not identified" in out  # the envelope


def test_bad_lines_have_a_place(table, capsys):
    table.write_text(table.read_text() + "run,1e9,2e10,nan\n")
    assert main(["scaling", "fit", str(table)]) == 2
    assert "losses.csv:56: loss: must be a positive number, not 'nan'" in capsys.readouterr().err
    table.write_text("parameters,loss\n1,2\n")
    assert main(["scaling", "fit", str(table)]) == 2
    assert "has no column tokens" in capsys.readouterr().err
    table.write_bytes(b"\xff\xfe\x00")
    assert main(["scaling", "fit", str(table)]) == 2
    assert "losses.csv: cannot be read as CSV in UTF-8" in capsys.readouterr().err


def test_run_directories_are_read(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    manifest = {"parameters": 1000, "sessions": [{"status": "finished"}]}
    (run / "manifest.json").write_text(json.dumps(manifest))
    lines = [{"step": step, "tokens": 100 * step, "loss": 5 - step / 100} for step in range(1, 41)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_observations([run]) == [Observation(1000, 4000, pytest.approx((4.60 + 4.61) / 2))]
    lines[-1]["validation_loss"] = 4.7
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_observations([run]) == [Observation(1000, 4000, 4.7)]
    manifest["sessions"][0]["status"] = "stopped"
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main(["scaling", "fit", str(run)]) == 2
    assert "has not finished (status: stopped)" in capsys.readouterr().err
