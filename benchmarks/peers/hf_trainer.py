"""Hugging Face `Trainer` with its defaults, less what only costs it time: no reports, no progress bar, no saving."""

import tempfile

import torch
from common import BETAS, CLIP, LEARNING_RATE, SHAPES, WEIGHT_DECAY, Clock, job, report, windows
from hf_model import llama
from transformers import Trainer, TrainerCallback, TrainingArguments

asked = job()
rows = windows(asked)
shape = asked.get("shape") or SHAPES[asked["size"]]
micro = asked.get("micro", asked["batch"])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(rows)

    def __getitem__(self, i):
        tokens = torch.from_numpy(rows[i, :-1].astype("int64"))
        return {"input_ids": tokens, "labels": tokens}


class Times(TrainerCallback):
    def __init__(self):
        self.clock = Clock(asked)

    def on_step_end(self, args, state, control, **_):
        self.clock.tick()


steps = asked["warmup"] + asked["steps"]
with tempfile.TemporaryDirectory() as directory:
    times = Times()
    trainer = Trainer(
        model=llama(shape),
        args=TrainingArguments(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=asked["batch"] // micro,
            learning_rate=LEARNING_RATE,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            bf16=asked["dtype"] == "bf16",
            torch_compile=asked["compile"],
            use_cpu=asked["device"] == "cpu",
            dataloader_pin_memory=asked["device"] != "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=steps,
        ),
        train_dataset=Rows(),
        callbacks=[times],
    )
    loss = trainer.train().training_loss
report(asked, trainer.model, times.clock, [loss])
