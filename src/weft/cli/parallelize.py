"""`weft parallelize`: finds how a plain module runs on several devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

HELP = "find how any PyTorch module runs on many devices, and write the plan as Python"
GROUP = "train"
GIVEN = ("module", "inputs", "loss")  # options that a plan remembers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds the fastest way to run a plain PyTorch module, written for one device, on many: how the batch and the "
        "parameters are split, where tensors are redistributed, and which blocks are recomputed. Nothing runs on the "
        "devices, and no memory is needed for the module: its tensors have no data. The plan is written as Python that "
        "needs only PyTorch. A plan decides speed and memory, not results."
    )
    parser.add_argument("module", metavar="MODULE:NAME", nargs="?", help="a class, a function that returns the module")
    parser.add_argument(
        "--inputs",
        metavar="MODULE:NAME",
        help="inputs of one call with the global batch: a tensor, a tuple, a dict of arguments, or a function without "
        "arguments that returns one of them",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices")
    parser.add_argument(
        "--hardware", metavar="NAME", help="hardware file, as for weft plan (default: this GPU, or h100-sxm)"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device to use, such as 70GB (default: 90%% of it)"
    )
    parser.add_argument("--loss", metavar="MODULE:NAME", help="function of the outputs that returns the loss")
    parser.add_argument(
        "--out", metavar="FILE", help="the plan to write: plan.py (and plan.json beside it), or plan.json"
    )
    parser.add_argument("--explain", action="store_true", help="print the plan with reasons and costs")
    parser.add_argument("--picture", metavar="FILE", help="write a picture of the operations and placements (SVG)")
    parser.add_argument(
        "--verify",
        metavar="PLAN",
        help="run the plan (plan.json, or plan.py, also edited) on gloo processes of this machine in float64, and "
        "compare loss, gradients and parameters after a step with one device; exits with code 1 if they differ",
    )
    parser.add_argument(
        "--verify-ops",
        action="store_true",
        help="run MODULE:NAME once on the CPU in float64, and try the annotations (weft.register_op) of the operations "
        "that it calls: each dimension is cut in two, and the parts are compared with the whole; exits with code 1 if "
        "an annotation is wrong, and proposes another mark",
    )
    parser.add_argument("--diff", nargs=2, metavar=("PLAN", "PLAN"), help="only print what two plans do differently")


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace
    from pathlib import Path

    from weft.cli.options import check_output_file, refuse_other_options
    from weft.errors import UserError
    from weft.planner.parallelize.explain import difference, explain
    from weft.planner.parallelize.picture import picture
    from weft.planner.parallelize.read import read_plan
    from weft.planner.parallelize.write import check_out, write_plan

    if args.diff:
        refuse_other_options(args, "--diff")
        lines = difference(*map(read_plan, args.diff))
        print("\n".join(lines) or "the plans are equal")
        return 0
    if args.verify:
        refuse_other_options(args, "--verify", "--inputs", "--loss")
        return verify(args)
    needed = [("MODULE:NAME", args.module), ("--inputs", args.inputs)]
    for name, value in needed if args.verify_ops else [*needed, ("--devices", args.devices)]:
        if value is None:
            raise UserError(f"{name} is required: weft parallelize my:Net --inputs my:example --devices 16")
    if args.verify_ops:
        refuse_other_options(args, "--verify-ops", "--inputs")
        return verify_ops(args)
    if args.out:
        check_out(Path(args.out))
    check_output_file("--picture", args.picture)
    from weft.planner.parallelize.search import search_plan

    plan, search, best = search_plan(
        module_of(args.module),
        inputs_of(args.inputs),
        devices=args.devices,
        hardware=args.hardware,
        memory=args.memory,
        loss=named(args.loss, "--loss") if args.loss else None,
    )
    given = {name: getattr(args, name) for name in GIVEN if getattr(args, name)}
    plan = replace(plan, notes={**plan.notes, **given})  # for --verify
    if args.explain or not args.out:
        print(explain(plan))
    if args.out:
        write_plan(plan, args.out, args.module.partition(":")[2] or args.module)
        print(f"{args.out}: {plan}, {len(plan.parameters)} patterns of split parameters")
    for path, why in search.space.graph.islands.items():
        print(f"warning: {path or 'the whole module'} runs on plain tensors: {why}", file=sys.stderr)
    if args.picture:
        from weft.files import replace_file, report_write_errors

        with report_write_errors(Path(args.picture)):
            replace_file(Path(args.picture), picture(search, best, plan.stages))
        print(f"{args.picture}: operations and placements")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Prints how far the results of a plan are from one device. Returns 0 if they are equal, and 1 otherwise."""
    from pathlib import Path

    from weft.errors import UserError
    from weft.planner.parallelize.read import read_plan
    from weft.planner.parallelize.verify import verify_plan

    twin = Path(args.verify).with_suffix(".json")
    remembered = read_plan(twin).notes if twin.is_file() else {}
    module, inputs, loss = (getattr(args, name) or remembered.get(name) for name in GIVEN)
    if module is None or inputs is None:
        raise UserError(
            f"--verify needs the module: weft parallelize my:Net --inputs my:example --verify {args.verify}"
        )
    call = module_of(module), inputs_of(inputs)
    report = verify_plan(read_plan(args.verify), *call, loss=named(loss, "--loss") if loss else None)
    print(report)
    return 0 if report.equal else 1


def verify_ops(args: argparse.Namespace) -> int:
    """Prints what is wrong in the annotations of the operations that a module calls. Returns 1 if something is."""
    from weft.planner.parallelize.verify_ops import verify_operations

    report = verify_operations(module_of(args.module), inputs_of(args.inputs))
    for operation, found in report.items():
        untried = f" (not tried, of size 1: {', '.join(sorted(found.untried))})" if found.untried else ""
        print(f"{operation}: {'WRONG' if found.problems else 'right'}{untried}")
        for line in found.problems:
            print(f"  {line}")
    return 1 if any(found.problems for found in report.values()) else 0


def named(reference: str, option: str) -> Any:
    """Returns the object that `module:name` names."""
    from weft.errors import UserError
    from weft.plugins import load_reference

    if ":" not in reference:
        raise UserError(f"{option} {reference}: give MODULE:NAME, such as my:Net for Net in my.py")
    return load_reference(reference)


def module_of(reference: str) -> Any:
    """Returns a module, or a function that makes it, for `module:name`."""
    from weft.errors import UserError

    found = named(reference, "MODULE:NAME")
    if not callable(found):
        raise UserError(f"{reference} is a {type(found).__name__}; name a class, a function or a torch.nn.Module")
    return _called(found, reference)


def inputs_of(reference: str) -> Any:
    """Returns example inputs for `module:name`."""
    found = named(reference, "--inputs")
    return _called(found, reference)() if callable(found) else found


def _called(found: Callable, reference: str) -> Any:
    """Returns a module as it is, and a class or function checked to need no arguments."""
    import inspect

    from torch import nn

    from weft.errors import UserError

    if isinstance(found, nn.Module):
        return found
    needed = [
        one.name
        for one in inspect.signature(found).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if needed:
        raise UserError(
            f"{reference} needs {', '.join(needed)}; name a function without arguments that returns the result"
        )
    return found
