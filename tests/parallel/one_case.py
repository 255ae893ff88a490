"""One case of the matrix by hand: `.venv/bin/python tests/parallel/one_case.py --model dense --mesh tp=2,pp=2`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    from compare import Runner
    from matrix import FAMILIES, MODELS, WAYS, Case, fits, mesh_name, unknown
    from pool import RanksFailed

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["dense"], choices=[*MODELS, *FAMILIES, "all"], metavar="MODEL")
    parser.add_argument("--way", nargs="+", default=["plain"], choices=[*WAYS, "all"], metavar="WAY")
    parser.add_argument("--mesh", nargs="+", default=["dp_shard=2"], help="keys of `parallel:`, as tp=2,pp=2")
    parser.add_argument("--out", type=Path, help="keep files and runs here; default: a folder that is deleted")
    parser.add_argument("--seconds", type=float, default=60, help="then say where each rank hangs")
    parser.add_argument("--all", action="store_true", help="show every tensor that differs")
    parser.epilog = f"models: {', '.join([*MODELS, *FAMILIES])}, all; ways: {', '.join(WAYS)}, all"
    chosen = parser.parse_args()
    models = [*MODELS, *FAMILIES] if "all" in chosen.model else chosen.model
    ways = list(WAYS) if "all" in chosen.way else chosen.way
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="weft-case-") as temporary:
        folder = chosen.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runner = Runner(folder, seconds=chosen.seconds)
        for mesh in map(parsed, chosen.mesh):
            if reason := unknown(mesh):
                print(f"{mesh_name(mesh)}: this version has no {reason}")
                wrong += 1
                continue
            for case in (Case(model, way, mesh) for model in models if fits(model, mesh) for way in ways):
                try:
                    runner.reference(case)
                    began = time.perf_counter()
                    difference = runner.compare(case)
                except RanksFailed as error:
                    print(f"FAILED {case}:\n{error}")
                    wrong += 1
                    continue
                seconds = time.perf_counter() - began
                good = difference.good
                print(f"{'equal' if good else 'WRONG'}  {case}: {difference} ({seconds:.1f} s)", flush=True)
                if not good:
                    print(difference.wrong(10000 if chosen.all else 12))
                wrong += not good
        runner.pool.close()
    return 1 if wrong else 0


def parsed(text: str) -> dict:
    """`tp=2,pp_schedule=zbv_zero_bubble` as keys of `parallel:`."""
    mesh: dict = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        mesh[key.strip()] = (
            int(value) if value.lstrip("-").isdigit() else {"true": True, "false": False}.get(value, value)
        )
    return mesh


if __name__ == "__main__":
    sys.exit(main())
