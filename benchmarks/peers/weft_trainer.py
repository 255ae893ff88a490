"""Weft: a whole run through the public Trainer, from a YAML file. Timed from outside, by a tracker of our own."""

import json
import sys
import tempfile
from pathlib import Path

from weft.launch.threads import use_huge_pages, wait_briefly

wait_briefly()  # as `weft train` does, before torch loads
use_huge_pages()

from common import BETAS, CLIP, LEARNING_RATE, SHAPES, WEIGHT_DECAY, Clock, report, windows  # noqa: E402

asked = json.loads(sys.argv[1])  # Weft sets the number of threads by itself, from its config
clock = Clock(asked)
losses = []


class Rows:
    """The shared sequences as a dataset of the user's own."""

    def __init__(self):
        self.rows = windows(asked)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i, :-1].astype("int64"), "labels": self.rows[i, 1:].astype("int64")}


class Watch:
    """A tracker: it is called once a step, after everything else that the loop does in it."""

    def __init__(self, run):
        pass

    def log(self, step, values):
        clock.tick()
        losses.append(values["loss"])

    def text(self, step, name, text):
        pass

    def close(self):
        pass


def config(directory: Path) -> dict:
    # One step more than is measured: the last one's end comes after the last checkpoint.
    steps = asked["warmup"] + asked["steps"] + 1
    return {
        "run": {"name": "bench", "directory": str(directory), "seed": 0},
        "model": SHAPES[asked["size"]],
        "data": {"train": {"type": "weft_trainer:Rows"}, "sequence_length": asked["sequence"]},
        "optimizer": {"type": "adamw", "lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        "schedule": {"type": "linear"},
        "training": {
            "steps": steps,
            "batch_tokens": asked["batch"] * asked["sequence"],
            "micro_batch_size": asked["batch"],
            "dtype": {"bf16": "bfloat16", "fp32": "float32"}[asked["dtype"]],
            "compile": asked["compile"],
            "grad_clip": CLIP,
            "threads": asked["threads"],
        },
        "checkpoint": {"every": steps},
        "log": {"trackers": ["weft_trainer:Watch"]},
    }


if __name__ == "__main__":
    # The run's config names these classes as `weft_trainer:...`; they are to be this module's, not a second import's.
    sys.modules["weft_trainer"] = sys.modules["__main__"]
    import weft

    # The run directory is on disk in the working directory, as a user's is.
    with tempfile.TemporaryDirectory(dir=asked["work"]) as directory:
        path = Path(directory) / "bench.yaml"
        path.write_text(json.dumps(config(Path(directory) / "runs"), indent=1))
        trainer = weft.Trainer(weft.RunConfig.load(path))
        trainer.fit()
        model = weft.load_model(Path(directory) / "runs" / "bench")
    report(asked, model, clock, losses)
