"""What the tests of parallel runs share: ranks, and the matrix' report."""

import sys
from pathlib import Path

import pytest

# Whole runs are started and looked at as in tests/train; the parts of the matrix' own are found here.
sys.path.append(str(Path(__file__).parent.parent / "train"))


@pytest.fixture(scope="session")
def runner(tmp_path_factory, request):
    """Runs cases of the matrix, and keeps the runs of one process that they are compared with."""
    from compare import Runner
    from matrix import FEWER_STEPS, STEPS

    whole = any(item.get_closest_marker("matrix") for item in request.session.items)
    runner = Runner(tmp_path_factory.mktemp("matrix"), steps=STEPS if whole else FEWER_STEPS, seconds=120)
    yield runner
    runner.pool.close()


def pytest_terminal_summary(terminalreporter):
    """Where the whole matrix was run: the largest differences of each mesh and model."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for key, value in getattr(report, "user_properties", ()):
            if key == "difference" and report.when == "call":
                found.setdefault(value["mesh"], {}).setdefault(value["model"], []).append(value["largest"])
    if not found:
        return
    from matrix import MODELS

    columns = [*MODELS, "families"]
    terminalreporter.section("differences from one process: loss/gradient/weight, as powers of ten; of how many cases")
    width = max(map(len, found))
    terminalreporter.write_line(" " * width + "".join(f"{column:>19}" for column in columns))
    for mesh, models in found.items():
        cells = dict.fromkeys(columns, "")
        for column in columns:
            of = [case for model, cases in models.items() for case in cases if column in (model, "families")]
            if column == "families":
                of = [case for model, cases in models.items() for case in cases if model not in MODELS]
            if of:
                largest = "/".join(_power(max(values)) for values in zip(*of, strict=True))
                cells[column] = f"{largest} ({len(of)})"
        terminalreporter.write_line(f"{mesh:<{width}}" + "".join(f"{cell:>19}" for cell in cells.values()))


def _power(number: float) -> str:
    """`-15` for 1.2e-15; `0` for nothing, `inf`."""
    from math import isinf, log10

    return "0" if number == 0 else "inf" if isinf(number) else str(int(log10(number) // 1))
