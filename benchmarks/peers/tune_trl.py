"""TRL's `SFTTrainer`, with PEFT for LoRA; see tune_sft.py. Runs in an environment with trl and peft."""

import json
import tempfile

import torch
from common import BETAS, CLIP, LEARNING_RATE, Clock, job, peak_resident_bytes
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

WARMUP = 3
asked = job()
lora = asked.get("lora")


class Times(TrainerCallback):
    def __init__(self):
        self.clock = Clock({"device": "cpu"})

    def on_step_end(self, args, state, control, **_):
        self.clock.tick()


tokenizer = AutoTokenizer.from_pretrained(asked["model"])
model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16 if lora else torch.float32)
peft = None
if lora:
    from peft import LoraConfig

    peft = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
times = Times()
with tempfile.TemporaryDirectory() as directory:
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        peft_config=peft,
        train_dataset=load_dataset("json", data_files=asked["records"], split="train", cache_dir=directory),
        callbacks=[times],
        args=SFTConfig(
            output_dir=directory,
            num_train_epochs=1,
            per_device_train_batch_size=asked["batch"],
            learning_rate=LEARNING_RATE,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP,
            bf16=True,
            use_cpu=True,
            gradient_checkpointing=False,
            assistant_only_loss=True,
            max_length=512,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
    trainer.train()
ends = times.clock.ends
timed = len(ends) - WARMUP
seconds = ends[-1] - ends[WARMUP - 1]
print(json.dumps({"seconds": seconds, "tokens": tokens * timed / len(ends), "peak_bytes": peak_resident_bytes()}))
