"""One measurement of huggingface_files.py: a model's files in or out; or those files, made.

file_jobs.py --job '{"way": "import", "source": ..., "out": ..., ...}'
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

from common import peak_resident_bytes


class Watch:
    """Looks every 10 ms how much memory the process has that is no file's."""

    def __enter__(self):
        self.start = self.anonymous()
        self.peak, self.over = self.start, threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def look(self):
        while not self.over.wait(0.01):
            self.peak = max(self.peak, self.anonymous())

    @staticmethod
    def anonymous() -> int:
        return status("RssAnon")


def status(key: str) -> int:
    """Bytes that /proc says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def work(asked: dict) -> None:
    """One measurement; the result is the last line on stdout."""
    import torch

    torch.set_num_threads(asked["threads"])
    if asked["way"] == "make":
        print(json.dumps(make(asked["section"], Path(asked["folder"]), asked["shard_bytes"])))
        return
    theirs = asked["way"].endswith("pretrained")
    act = transformers_way if theirs else weft_way
    call = act(asked)
    before = status("VmRSS")
    with Watch() as watch:
        began = time.perf_counter()
        model = call()
        seconds = time.perf_counter() - began
        if model is not None:
            for parameter in model.parameters():
                parameter.data.view(torch.uint8).flatten()[::4096].sum()
            seconds = time.perf_counter() - began
    done = {"seconds": seconds, "start_bytes": before, "peak_bytes": peak_resident_bytes() - before}
    done |= {"anonymous_peak_bytes": watch.peak - watch.start}
    if asked["way"] == "save_pretrained":
        began = time.perf_counter()
        for path in Path(asked["out"]).iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        done["fsync_seconds"] = time.perf_counter() - began
    print(json.dumps(done))


def weft_way(asked: dict):
    """The call to be measured, with what it needs imported."""
    import weft.checkpoint.huggingface.import_model
    import weft.checkpoint.load_model
    import weft.export.hf
    import weft.models.build
    import weft.observe.console
    from weft.cli.main import main

    def verb(*words: str) -> None:
        if code := main(list(words)):
            sys.exit(f"exit code {code}")

    way, source, imported, out = asked["way"], asked["source"], asked["imported"], asked["out"]
    if way == "import":
        return lambda: verb("import", source, out)
    if way == "export":
        return lambda: verb("export", imported, out, "--max-shard-size", str(asked["shard_bytes"]))
    return lambda: weft.load_model(source if way == "load_model" else imported)


def transformers_way(asked: dict):
    """The call to be measured, with what it needs imported."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # its module is imported by that
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(asked["source"]))

    def call():
        model = AutoModelForCausalLM.from_pretrained(asked["source"], dtype="auto")
        if asked["way"] == "save_pretrained":
            model.save_pretrained(asked["out"], max_shard_size=asked["shard_bytes"])
        return model

    return call


def make(section: dict, folder: Path, shard_bytes: int) -> dict:
    """A Hugging Face folder of random numbers: a tensor at a time, so that any size fits into memory."""
    import torch

    from weft.checkpoint.huggingface.folder import names_in_files
    from weft.checkpoint.tensor_file import Entry, split_by_size, write_safetensors
    from weft.config.model import ModelSection
    from weft.families.config_json import CONFIG, INDEX
    from weft.models.decoder import Decoder
    from weft.models.huggingface_weights import invert, saved_tensors, to_config_json

    checked = ModelSection(**section)
    with torch.device("meta"):
        ours = saved_tensors(Decoder(checked))
    torch.manual_seed(0)
    numbers = (0.02 * torch.randn(1 << 24)).to(torch.bfloat16)  # the same again and again: no reader looks at them

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return numbers.repeat(-(-size // len(numbers)))[:size].reshape(shape)

    entries = []
    for theirs, parts in names_in_files(checked).items():
        transform = parts[0][1]
        one = transform is not None and transform.expert is not None
        empty = [torch.empty(ours[name].shape[one:], device="meta") for name, _ in parts]
        shape = tuple(invert(transform, empty).shape)
        entries.append(Entry(theirs, torch.bfloat16, shape, lambda shape=shape: drawn(shape)))
    folder.mkdir(parents=True)
    shards, weight_map = split_by_size(entries, shard_bytes), {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, {"format": "pt"})
        weight_map |= {entry.name: name for entry in shard}
    size = sum(entry.bytes for entry in entries)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(to_config_json(checked) | {"dtype": "bfloat16"}))
    return {"parameters": checked.size().parameters, "bytes": size, "tensors": len(entries), "files": len(shards)}


if __name__ == "__main__":
    work(json.loads(sys.argv[2]))
