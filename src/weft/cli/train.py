"""`weft train`: a checked config in, a trained model out."""

from __future__ import annotations

import argparse
import os
import sys

HELP = "train a model as a YAML file says; go on if it was interrupted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train what FILE describes, in the run directory <run.directory>/<run.name>. If that holds a checkpoint, "
        "training goes on from the last whole one. SIGTERM and Ctrl-C save a checkpoint and leave; the same command "
        "goes on."
    )
    parser.epilog = (
        "examples:\n"
        "  weft train run.yaml\n"
        "  weft train run.yaml optimizer.lr=1e-3 training.steps=2000\n"
        "  weft train run.yaml --nproc 4                       four processes on this machine (FSDP2)\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft train run.yaml\n\n"
        "exit codes: 0 finished, 1 the loss is not finite (a checkpoint is saved), 2 a mistake in the input,\n"
        "130 stopped by Ctrl-C and 143 by SIGTERM (a checkpoint is saved)"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the file's")
    parser.add_argument("--nproc", type=int, metavar="N", help="local processes (default: all GPUs, or 1 on CPU)")
    parser.add_argument("--fresh", action="store_true", help="set aside what the run directory holds and start over")


def run(args: argparse.Namespace) -> int:
    from weft.config.run import RunConfig
    from weft.launch.threads import wait_briefly

    wait_briefly()
    if "RANK" in os.environ:
        from weft.launch.local import die_with_launcher

        die_with_launcher()
        return train(RunConfig.load(args.file, args.overrides), fresh=args.fresh)
    config = RunConfig.load(args.file, args.overrides)  # mistakes are told before anything heavy starts
    from weft.launch.local import checked_nproc, launch_local

    nproc = checked_nproc(args.nproc)
    if nproc == 1:
        return train(config, fresh=args.fresh)
    from weft.config.mesh import mesh_shape

    mesh_shape(config.parallel, nproc)
    command = [sys.executable, "-m", "weft", "train", args.file, *args.overrides]
    return launch_local([*command, "--fresh"] if args.fresh else command, nproc)


def train(config, *, fresh: bool) -> int:
    """Train in this process; returns the exit code."""
    from weft.train.trainer import Trainer

    outcome = Trainer(config, fresh=fresh).fit()
    if outcome.status == "stopped":
        if int(os.environ.get("RANK", 0)) == 0:
            done = f"after step {outcome.step}, saved" if outcome.step else "before the first step"
            print(f"stopped {done}; the same command goes on from there", file=sys.stderr)
        return 128 + (outcome.signal or 15)
    return 1 if outcome.status == "non-finite" else 0
