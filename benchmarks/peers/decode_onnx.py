"""Tokens per second of onnxruntime on a model that `weft export --to onnx` wrote; see export_onnx.py."""

import json
import time
from pathlib import Path

from common import job, report_decoding


def main() -> None:
    asked = job(torch_threads=False)
    import numpy as np
    import onnxruntime

    folder, options = Path(asked["folder"]), onnxruntime.SessionOptions()
    options.intra_op_num_threads = asked["threads"]
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    inputs = json.loads((folder / "graph.json").read_text())["inputs"]
    names = [entry["name"] for entry in inputs]

    def generate(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        new, first = np.array(prompts), 0
        past = [np.zeros([len(new), entry["shape"][1], 0, entry["shape"][3]], entry["dtype"]) for entry in inputs[2:]]
        for _ in range(tokens):
            positions = np.broadcast_to(np.arange(first, first + new.shape[1]), new.shape)
            logits, *past = session.run(None, dict(zip(names, [new, positions, *past], strict=True)))
            first += new.shape[1]
            new = logits[:, -1:].argmax(-1)
        return time.perf_counter() - start

    report_decoding(asked, generate)


if __name__ == "__main__":
    main()
