"""`weft quickstart`: trains a small code model on Python's standard library, with Weft's subcommands."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from weft.files import replace_file
from weft.formatting import amount, byte_size
from weft.processes import cpp_compiler, signal_handler

HELP = "train a small model on Python's standard library in a few minutes"
GROUP = "start"
HELD_OUT_PERCENT = 5
VOCABULARY = 4096
TRIAL_STEPS = 40

FIRST_LINE = "# Written by `weft quickstart`"
RUN_YAML = """\
{written}; edit it freely. `weft train {name}` resumes the run; --fresh starts it over.
run: {{name: quickstart, directory: {runs}, seed: 1}}
model:
  hidden_size: 96
  num_hidden_layers: 4
  num_attention_heads: 2
  mlp: plain
  hidden_act: relu2
  qk_norm: true
  max_position_embeddings: 1024
  initialization: muon_zero
  initializer_range: 1.0
tokenizer: {tokenizer}
data: {{train: {train}, validation: {heldout}, sequence_length: 256}}
optimizer: {{type: muon, lr: 0.02, embedding_lr: 0.03, head_lr: 0.01, other_lr: 0.003}}
schedule: {{type: wsd, warmup_steps: 20, decay_fraction: 0.6}}
training: {{steps: {steps}, batch_tokens: 2048, micro_batch_size: 8, compile: {compile}}}
validation: {{every: {part}, tokens: 65536, micro_batch_size: 32}}
samples: {{prompts: ["\\n\\ndef "], every: {part}, max_new_tokens: 48, temperature: 0.6}}
checkpoint: {{every: {part}, keep_last: 2}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a small Llama-style model on the standard library of the running Python interpreter (thousands of "
        f"files, no download). Holds out {HELD_OUT_PERCENT}% of the files, trains a tokenizer, packs the files, trains "
        "the model, compares it with gzip and xz on the held-out files, and generates text. Each step is a Weft "
        "command, which is printed before it runs. The YAML file of the run is kept. After Ctrl-C, the same command "
        "resumes."
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="training time in minutes (default: 3)")
    parser.add_argument("--directory", default="quickstart", help="output directory (default: quickstart)")
    parser.add_argument(
        "--fresh", action="store_true", help="discard an earlier run and train from the start, for --minutes"
    )


def run(args: argparse.Namespace) -> int:
    from weft.errors import UserError

    if not 0 < args.minutes <= 1e6:
        raise UserError(f"--minutes {args.minutes:g}: use a number above 0 and at most a million, for example 3")
    began, home = time.perf_counter(), Path(args.directory)
    yaml, run_directory = home / "run.yaml", home / "runs" / "quickstart"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot be created: {error.strerror}; choose another --directory", home) from None

    if yaml.is_file() and FIRST_LINE not in yaml.read_text(encoding="utf-8", errors="replace"):
        raise UserError("not written by `weft quickstart`; choose another --directory", yaml)
    train_files, held_out_files = split_library(home)
    log(f"corpus: Python's standard library, {len(train_files):,} files for training, {len(held_out_files):,} held out")
    listed = ["--files-from", str(home / "train.txt")]
    if not (home / "tokenizer" / "tokenizer.json").exists():
        weft("data", "train-tokenizer", *listed, "--vocab-size", str(VOCABULARY), "--out", str(home / "tokenizer"))
    for name in ("train", "heldout"):
        if not (home / name / "store.json").exists():
            files = ["--files-from", str(home / f"{name}.txt"), "--tokenizer", str(home / "tokenizer")]
            weft("data", "pack", *files, "--out", str(home / name))

    fresh = args.fresh and yaml.exists()
    if not yaml.exists() or fresh:
        steps = steps_for(args.minutes, home)
        text = run_yaml(yaml, home, steps, part=-(-steps // 5))
        replace_file(yaml, text)
        log(f"wrote {yaml}: {steps} steps fit into {args.minutes:g} minutes on this machine")
    weft("train", str(yaml), *(["--fresh"] if fresh else []))
    # The prompt begins with two newlines because `def` is rare at the start of a file.
    how = ["--max-new-tokens", "120", "--temperature", "0.7", "--top-p", "0.95"]
    weft("generate", str(run_directory), "\n\ndef ", *how)
    weft("report", str(run_directory))
    summary(home, yaml, run_directory, held_out_files, time.perf_counter() - began)
    return 0


def run_yaml(yaml: Path, home: Path, steps: int, *, part: int) -> str:
    """Returns the text of a run file.

    Args:
        yaml: the file.
        home: the quickstart's directory.
        part: number of steps between validations, samples and checkpoints.
    """
    paths = {name: home / name for name in ("runs", "tokenizer", "train", "heldout")}
    values = {name: yaml_text(str(path)) for name, path in paths.items()}
    values["compile"] = "false" if cpp_compiler() is None else "true"
    return RUN_YAML.format(name=quoted(str(yaml)), written=FIRST_LINE, steps=steps, part=part, **values)


def yaml_text(text: str) -> str:
    """Returns a text as a YAML value, quoted if it could mean something else."""
    from weft.config.tree import without_variables

    if re.fullmatch(r"[\w./-]+", text):
        return text
    inside = f"./{text}" if text.startswith("~/") else text  # not the home folder
    return without_variables(json.dumps(inside, ensure_ascii=False))


def log(text: str) -> None:
    """Prints a line on stderr."""
    print(text, file=sys.stderr, flush=True)


def weft(*arguments: str) -> None:
    """Runs a `weft` subcommand in a new process. If it fails, this process exits with the same exit code."""
    log("\n$ weft " + " ".join(quoted(a) for a in arguments))
    process = subprocess.Popen([sys.executable, "-m", "weft", *arguments])

    def pass_on(number: int, frame: object) -> None:
        if number != signal.SIGINT:  # Ctrl-C reaches the subcommand, too
            process.send_signal(number)

    with signal_handler(pass_on, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        code = process.wait()  # after a signal, the subcommand saves a checkpoint before it exits
    if code:
        if code in (-1, -2, -15, 129, 130, 143):
            log("stopped; `weft quickstart` resumes from here")
        raise SystemExit(128 - code if code < 0 else code)


def quoted(argument: str) -> str:
    """Returns an argument; quotes it for a shell if it contains blanks or line ends."""
    if "\n" in argument:
        return "$'" + argument.replace("\n", "\\n") + "'"
    return f'"{argument}"' if " " in argument else argument


def split_library(home: Path) -> tuple[list[Path], list[Path]]:
    """Splits the Python files of the standard library into training files and held-out files.

    A hash of the path selects HELD_OUT_PERCENT percent of the files as held out. The lists are written to train.txt and
    heldout.txt in `home`, and returned.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped & set(name.parts) or not path.is_file() or not readable(path):
            continue
        digest = hashlib.blake2b(name.as_posix().encode(), digest_size=8).digest()
        parts[int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT].append(path)
    for name, files in zip(("train", "heldout"), parts, strict=True):
        (home / f"{name}.txt").write_text("".join(f"{path}\n" for path in files), encoding="utf-8")
    return parts


def readable(path: Path) -> bool:
    """Whether a file is UTF-8 text. A few test files of the standard library use other encodings on purpose."""
    try:
        path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def steps_for(minutes: float, home: Path) -> int:
    """Returns the number of training steps that fit into `minutes`, after timing TRIAL_STEPS steps.

    The timed steps also fill the compiler's cache.
    """
    trial = home / "trial.yaml"
    lines = run_yaml(trial, home, TRIAL_STEPS, part=10 * TRIAL_STEPS).splitlines(keepends=True)
    unused = ("validation:", "samples:")  # the trial measures steps only
    trial.write_text("".join(line for line in lines if not line.startswith(unused)), encoding="utf-8")
    if cpp_compiler() is None:
        log("no C++ compiler works on this machine, so the model is not compiled; with g++, it trains faster")
    log(f"\ntiming {TRIAL_STEPS} steps to see how many fit into {minutes:g} minutes")
    weft(
        "train",
        str(trial),
        "run.name=.trial",
        "--fresh",
        "data.validation=null",
        "log.trackers=[]",
    )
    lines = (home / "runs" / ".trial" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = statistics.median(json.loads(line)["step_seconds"] for line in lines[TRIAL_STEPS // 4 :])
    return max(20, round(minutes * 60 / seconds))


def summary(home: Path, yaml: Path, run_directory: Path, held_out_files: list[Path], seconds: float) -> None:
    """Prints the held-out bits per byte of the model, gzip and xz, and commands to try next.

    Args:
        seconds: total time of the quickstart.
    """
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "validation_bits_per_byte" in line)
    texts = [path.read_bytes() for path in held_out_files]
    size = sum(map(len, texts))
    rows = [  # each file compressed separately, as `gzip -9 FILE...` does
        ("gzip -9", 8 * sum(len(gzip.compress(text, 9)) for text in texts) / size),
        ("xz -9", 8 * sum(len(lzma.compress(text, preset=9)) for text in texts) / size),
        ("this model", last["validation_bits_per_byte"]),
    ]
    print(f"\nheld-out bits per byte ({len(held_out_files):,} files, {byte_size(size, 'MB')}; lower is better)")
    for name, value in rows:
        print(f"  {name:12} {value:.3f}  {'=' * round(20 * value)}")
    print(
        f"\nrun directory: {run_directory}  ({last['step']:,} steps, {amount(last['tokens'])} tokens; "
        f"{seconds / 60:.1f} minutes in total)\n\ntry next:\n"
        f'  weft generate {quoted(str(run_directory))} "class " "import " --temperature 0.8\n'
        f"  weft train {quoted(str(yaml))} run.name=longer training.steps={4 * last['step']}\n"
        f"  open {run_directory / 'report.html'}   (or: tensorboard --logdir {home / 'runs'})",
        flush=True,
    )
