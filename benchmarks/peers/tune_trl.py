"""TRL's trainers, with PEFT for LoRA; see tune_sft.py, tune_dpo.py, tune_grpo.py. Runs in an environment with trl and
peft.
"""

import json
import tempfile
import time

import torch
from common import BETAS, CLIP, LEARNING_RATE, Clock, job, peak_resident_bytes
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

asked = job()
WARMUP = 2 if asked["method"] == "grpo" else 3  # steps that are not timed
lora = asked.get("lora")


class Times(TrainerCallback):
    """Notes when steps and rollouts end, and as a reward function counts sampled tokens."""

    __name__ = "reward"

    def __init__(self):
        self.clock, self.rollouts, self.sampled = Clock({"device": "cpu"}), [], []

    def on_step_begin(self, args, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.clock.tick()

    def __call__(self, completions, completion_ids, **_):
        self.rollouts.append(time.perf_counter() - self.began)
        self.sampled.append(sum(map(len, completion_ids)))
        return [len(set(text)) / 100 for text in completions]


def settings(directory: str, **others) -> dict:
    return {
        "output_dir": directory,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": CLIP,
        "bf16": True,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **others,
    }


def sft(directory: str, **given):
    from trl import SFTConfig, SFTTrainer

    more = {"per_device_train_batch_size": asked["batch"], "assistant_only_loss": True, "max_length": 512}
    return SFTTrainer(args=SFTConfig(**settings(directory, **more)), **given)


def dpo(directory: str, **given):
    from trl import DPOConfig, DPOTrainer

    more = {"per_device_train_batch_size": asked["batch"], "beta": 0.1, "max_length": 512}
    return DPOTrainer(args=DPOConfig(**settings(directory, **more)), **given)


def grpo(directory: str, **given):
    from trl import GRPOConfig, GRPOTrainer

    more = {
        "per_device_train_batch_size": asked["group"],  # all answers of a rollout are sampled together
        "gradient_accumulation_steps": asked["prompts"],
        "num_generations": asked["group"],
        "max_completion_length": asked["new_tokens"],
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "generation_kwargs": {"use_cache": True},
    }
    return GRPOTrainer(args=GRPOConfig(**settings(directory, **more)), reward_funcs=times, **given)


def tokens_of(dataset) -> int:
    """Tokens of the records, without padding; of both answers with their prompts."""
    if "input_ids" in dataset.column_names:
        return sum(map(len, dataset["input_ids"]))
    sizes = {name: sum(map(len, dataset[f"{name}_ids"])) for name in ("prompt", "chosen", "rejected")}
    return 2 * sizes["prompt"] + sizes["chosen"] + sizes["rejected"]


peft = None
if lora:
    from peft import LoraConfig

    peft = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
times = Times()
with tempfile.TemporaryDirectory() as directory:
    trainer = {"sft": sft, "dpo": dpo, "grpo": grpo}[asked["method"]](
        directory,
        model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16 if lora else torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        peft_config=peft,
        train_dataset=load_dataset("json", data_files=asked["records"], split="train", cache_dir=directory),
        callbacks=[times],
    )
    trainer.train()
ends = times.clock.ends
timed = len(ends) - WARMUP
done = {"seconds": ends[-1] - ends[WARMUP - 1], "peak_bytes": peak_resident_bytes()}
if asked["method"] == "grpo":
    done |= {"rollout_seconds": sum(times.rollouts[WARMUP:]), "sampled": sum(times.sampled[WARMUP:]), "updates": timed}
else:
    done["tokens"] = tokens_of(trainer.train_dataset) * timed / len(ends)
print(json.dumps(done))
