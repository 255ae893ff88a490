"""A 28B model's step on 2,048 ranks, as one of them takes it, on this machine alone.

    .venv/bin/python benchmarks/parallel_many_ranks.py [--quick] [--only tp,ep]

Llama of 28B parameters (or a mixture of experts of 30B) at 8,192 tokens in bfloat16, with full activation
checkpointing: made by `build_sharded_model`, stepped by a run's own loop, on PyTorch's fake process group and with
tensors that have no values (`tests/parallel/shapes.py`). So all but arithmetic and sending is as on the ranks: what is
told is the time and memory that this takes here, and what the rank would need and send.
"""

import datetime
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
sys.path.insert(0, str(HERE.parent / "tests" / "parallel"))
from common import measured_apart, mesh_options, processor, write_results  # noqa: E402

NOTES = """\
- Here: CPU seconds to build the model and share it out (on the meta device), and of the second step; the most memory
  that this process has had, with its libraries.
- The first rank: its parameters, gradients and AdamW's state; the most that it needs in two steps, activations and what
  is gathered included (what PyTorch's MemTracker says, too); what it cannot but send in a step.
- A row of 8,192 tokens a step for each data rank; in a pipeline two for each of its ranks, one at a time."""


def job(mesh: dict) -> None:
    """One mesh, in a process of its own."""
    import torch
    from shapes import RANKS, imagine, write_run

    layers = mesh.pop("layers", None)
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder), mesh, **({"steps": 1} if layers else {}))
        if layers:
            sections = dict(line.split(": ", 1) for line in file.read_text().splitlines())
            sections["model"] = json.dumps(json.loads(sections["model"]) | {"num_hidden_layers": layers})
            file.write_text("".join(f"{name}: {value}\n" for name, value in sections.items()))
        found = imagine(file, RANKS)
    done = {name: getattr(found, name) for name in ("building", "step", "state", "peak", "resident")}
    done |= {"calls": len(found.calls), "sent": sum(call.sent for call in found.calls), "torch": torch.__version__}
    print(json.dumps(done))


def main() -> int:
    args = mesh_options("A 28B model's step as one of 2,048 ranks.", "8 layers, one step")
    if args.job is not None:
        job(args.job)
        return 0
    from shapes import MESHES, RANKS

    rows = []
    for mesh in MESHES:
        if args.only and not args.only & set(mesh):
            continue
        try:
            found = measured_apart(__file__, mesh | ({"layers": 8} if args.quick else {}))
        except KeyboardInterrupt:
            print("interrupted: the table has what there is")
            break
        if "failed" in found:
            print(f"{mesh}: FAILED: {found['failed']}", flush=True)
            return 1
        rows.append({"mesh": mesh} | found)
        print(line(rows[-1]), flush=True)
    if not rows:
        return 130
    lines = [
        f"# A step on {RANKS:,} ranks",
        "",
        f"{processor()}, one thread; torch {rows[0]['torch']}; {datetime.date.today()}.",
        "",
        NOTES,
        *(["", "**A quick look**: 8 layers, one step."] if args.quick else []),
        "",
        "| mesh (dp_shard: the rest) | build (s) | step (s) | memory (GiB) | | rank: state (GiB) | peak (GiB) "
        "| calls a step | sent (GiB) |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]
    name = "parallel_many_ranks" + ("-quick" if args.quick else "")
    write_results(args.out, name, "\n".join(lines) + "\n", rows)
    return 0


def line(row: dict) -> str:
    mesh = " ".join(f"{key} {value}" for key, value in row["mesh"].items()) or "dp_shard 2048"
    resident, state, peak, sent = (row[key] / 2**30 for key in ("resident", "state", "peak", "sent"))
    here = f"{row['building']:.1f} | {row['step']:.1f} | {resident:.2f}"
    return f"| {mesh} | {here} | | {state:.2f} | {peak:.1f} | {row['calls']:,} | {sent:.1f} |"


if __name__ == "__main__":
    raise SystemExit(main())
