"""`weft doctor`: prints the environment, and checks the environment for known problems."""

from __future__ import annotations

import argparse
from typing import Any

HELP = "print versions, devices and known problems of this machine"
GROUP = "use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints versions, devices, memory, disk, interconnect, compilers and installed extras, then known problems, "
        "each with a remedy. Paste the output into bug reports: it contains no paths, host names or keys. Exits with "
        "code 1 if a problem was found."
    )
    parser.epilog = "example: weft doctor --json > doctor.json"
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from weft.observe.environment import environment, problems

    found = environment()
    known = problems(found)
    if args.json:
        import json

        print(json.dumps(found | {"problems": known}, indent=2))
        return 1 if known else 0
    for section, entries in found.items():
        print(section)
        for name, value in entries.items():
            print(f"  {name.removesuffix('_bytes'):24} {_text(name, value)}")
    print("problems")
    print("\n".join(f"  - {problem}" for problem in known) or "  none")
    return 1 if known else 0


def _text(name: str, value: Any) -> str:
    from weft.formatting import byte_size

    if value is None or value == []:
        return "none"
    if name.endswith("_bytes"):
        return byte_size(value)
    return ", ".join(value) if isinstance(value, list) else str(value)
