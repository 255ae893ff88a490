"""Weft: a run of the objective sft through the public Trainer, from a raw file; see tune_sft.py."""

import json
import sys
import tempfile
from pathlib import Path

from weft.launch.threads import use_huge_pages, wait_briefly

wait_briefly()  # as `weft train` does, before torch loads
use_huge_pages()

from common import BETAS, CLIP, LEARNING_RATE, Clock, peak_resident_bytes  # noqa: E402

WARMUP = 3
asked = json.loads(sys.argv[1])
clock, useful = Clock({"device": "cpu"}), []


class Watch:
    """A tracker: it is called once a step, after everything else that the loop does in it."""

    def __init__(self, run):
        pass

    def log(self, step, values):
        clock.tick()

    def text(self, step, name, text):
        pass

    def close(self):
        pass


class Useful:
    """A callback that counts the tokens of the records in each batch, without padding."""

    def step(self, state):
        useful.append(int((state.batch.segments >= 0).sum()))


def config(directory: Path) -> dict:
    return {
        "run": {"name": "bench", "directory": str(directory)},
        "model": {"from": asked["model"]},
        "data": {"train": asked["records"], "sequence_length": 512},
        "objective": {"type": "sft"},
        "optimizer": {"type": "adamw", "lr": LEARNING_RATE, "betas": list(BETAS)},
        "schedule": {"type": "linear"},
        "training": {
            "epochs": 1,
            "batch_tokens": 3 * 512,  # about 16 records
            "micro_batch_size": 3,
            "dtype": "bfloat16",
            "compile": False,
            "grad_clip": CLIP,
            "threads": asked["threads"],
        },
        "log": {"trackers": ["tune_weft:Watch"]},
        "callbacks": [{"type": "tune_weft:Useful"}],
        **({"adapter": {"type": "lora", "r": asked["lora"], "targets": "all-linear"}} if "lora" in asked else {}),
    }


if __name__ == "__main__":
    sys.modules["tune_weft"] = sys.modules["__main__"]  # the run's config names these classes as `tune_weft:...`
    import weft

    with tempfile.TemporaryDirectory(dir=asked["work"]) as directory:
        path = Path(directory) / "bench.yaml"
        path.write_text(json.dumps(config(Path(directory) / "runs"), indent=1))
        weft.Trainer(weft.RunConfig.load(path)).fit()
    last = len(clock.ends) - 2  # the end of the last step comes after the last checkpoint
    seconds = clock.ends[last] - clock.ends[WARMUP - 1]
    tokens = sum(useful[WARMUP : last + 1])
    print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_bytes": peak_resident_bytes()}))
