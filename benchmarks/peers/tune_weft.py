"""Weft: a run through the public Trainer, from a raw file; see tune_sft.py, tune_dpo.py, tune_grpo.py."""

import json
import sys
import tempfile
from pathlib import Path

from weft.launch.threads import use_huge_pages, wait_briefly

wait_briefly()  # as `weft train` does, before torch loads
use_huge_pages()

from common import BETAS, CLIP, LEARNING_RATE, Clock, peak_resident_bytes  # noqa: E402

asked = json.loads(sys.argv[1])
WARMUP = 2 if asked["method"] == "grpo" else 3  # steps that are not timed
clock, useful, rollouts = Clock({"device": "cpu"}), [], []


class Watch:
    """A tracker: it is called once a step, after everything else that the loop does in it."""

    def __init__(self, run):
        pass

    def log(self, step, values):
        clock.tick()
        if "rollout_seconds" in values:
            rollouts.append(values)

    def text(self, step, name, text):
        pass

    def close(self):
        pass


class Useful:
    """A callback that counts the tokens of the records in each batch, without padding."""

    def step(self, state):
        batch = state.batch
        useful.append(int(batch.at_tokens(batch.learned_documents).sum()))


def reward(completions):
    return [len(set(text)) / 100 for text in completions]


def method() -> dict:
    """The keys of the run that depend on the method."""
    if asked["method"] == "sft":
        sequences, length = 3, 512  # about 16 records
        objective = {"type": "sft"}
    elif asked["method"] == "dpo":
        sequences, length = 2, 1024  # about 6 pairs
        objective = {"type": "dpo", "beta": 0.1}
    else:
        sequences, length = 3, 512  # per micro-batch: about 8 answers
        objective = {"type": "grpo", "reward": "tune_weft:reward"}
        objective |= {"prompts": asked["prompts"], "group": asked["group"], "max_new_tokens": asked["new_tokens"]}
    count = len(Path(asked["records"]).read_text().splitlines())
    if "prompts" in asked:
        amount = {"steps": count // asked["prompts"]}
    else:
        amount = {"epochs": 1, "batch_tokens": sequences * length}
    return {
        "data": {"train": asked["records"], "sequence_length": length},
        "objective": objective,
        "training": amount | {"micro_batch_size": sequences},
    }


def config(directory: Path) -> dict:
    chosen = method()
    return {
        "run": {"name": "bench", "directory": str(directory)},
        "model": {"from": asked["model"]},
        **chosen,
        "optimizer": {"type": "adamw", "lr": LEARNING_RATE, "betas": list(BETAS)},
        "schedule": {"type": "linear"},
        "training": {
            **chosen["training"],
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
    done = {"seconds": clock.ends[last] - clock.ends[WARMUP - 1], "peak_bytes": peak_resident_bytes()}
    if asked["method"] == "grpo":
        timed, answers = rollouts[WARMUP : last + 1], asked["prompts"] * asked["group"]
        done["rollout_seconds"] = sum(one["rollout_seconds"] for one in timed)
        done |= {"sampled": sum(one["completion_length"] * answers for one in timed), "updates": len(timed)}
    else:
        done["tokens"] = sum(useful[WARMUP : last + 1])
    print(json.dumps(done))
