"""Writes hardware files with measured numbers, and adds measured collectives to them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.files import replace_file, report_write_errors
from weft.planner.hardware import Hardware, MeasuredCollective

WIDTH = 140  # columns of a line
DIGITS = 4  # significant digits of measured numbers
NOT_MEASURED = "a guess, not measured"


def rounded(tree: Any) -> Any:
    """Returns a tree of dicts and lists in which floats have `DIGITS` significant digits."""
    if isinstance(tree, Mapping):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [rounded(value) for value in tree]
    return float(f"{tree:.{DIGITS}g}") if isinstance(tree, float) else tree


def hardware_yaml(tree: Mapping[str, Any]) -> str:
    """Returns a hardware file as YAML. Each level, collective and operation has a line.

    Args:
        tree: the keys of `weft.planner.hardware.Hardware`.
    """
    Hardware.model_validate(tree)  # a bug of the measurement, not a mistake of the user, must not be written
    return _dump({key: _styled(value) for key, value in rounded(tree).items()})


def write_hardware(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes a new hardware file."""
    text = hardware_yaml(tree)
    with report_write_errors(path):
        replace_file(path, text)


def add_links(
    path: Path,
    levels: Sequence[Mapping[str, Any]],
    collectives: Sequence[MeasuredCollective],
    *,
    slowdown: float | None,
    source: str,
    host: Mapping[str, float] | None = None,
) -> None:
    """Writes measured links to a hardware file that `load_hardware` accepts. Its other lines and comments stay.

    Args:
        levels: values of the first levels; further levels of the file stay.
        collectives: measured collectives. They replace those of the file with the same kind, ranks and nodes.
        slowdown: measured `overlap.slowdown`; None keeps that of the file.
        source: where the numbers come from.
        host: measured values of `host`; its others stay.
    """
    from ruamel.yaml import YAML

    tree = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    for place, values in enumerate(levels):
        if place < len(tree["levels"]):
            tree["levels"][place] = _styled([{**tree["levels"][place], **rounded(values)}])[0]
        else:
            tree["levels"].append(_styled([rounded(values)])[0])
    new = {(one.kind, one.ranks, one.nodes): one.model_dump() for one in collectives}
    old = {(one["kind"], one["ranks"], one.get("nodes", 1)): dict(one) for one in tree.get("collectives", [])}
    tree["collectives"] = _styled(rounded(list((old | new).values())))
    tree.setdefault("source", {})
    tree["source"].update({"levels": source, "collectives": source})
    if slowdown is not None:
        tree["overlap"] = _styled({"slowdown": rounded(slowdown)})
        tree["source"]["overlap"] = source
    for key, value in rounded(host or {}).items():
        tree["host"][key] = value
        tree["source"][f"host.{key}"] = source
    Hardware.model_validate(tree)
    with report_write_errors(path):
        replace_file(path, _dump(tree))


def _dump(tree: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML

    yaml, out = YAML(typ="rt"), io.StringIO()
    yaml.width = WIDTH
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump(tree, out)
    return out.getvalue()


def _styled(value: Any) -> Any:
    """Returns a value whose entries are written on a line each."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(value, list):
        rows = CommentedSeq([_flow(one) for one in value])
        return rows
    if isinstance(value, Mapping):
        return CommentedMap({key: _flow(one) for key, one in value.items()})
    return value


def _flow(value: Any) -> Any:
    """Returns a value that is written on one line."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(value, Mapping):
        made = CommentedMap({key: _flow(one) for key, one in value.items()})
    elif isinstance(value, list):
        made = CommentedSeq(value)
    else:
        return value
    made.fa.set_flow_style()
    return made
