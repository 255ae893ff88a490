"""Run by a Python with llama-cpp-python: prints what llama.cpp computes with a GGUF file, as JSON.

Standard input is a JSON object: `model`, `lora` (a path or null), `texts` to tokenize, `prompts` (lists of ids) whose
logits and greedy continuations of `tokens` ids are wanted, and `context`.
"""

import json
import sys

import llama_cpp
import numpy as np

asked = json.load(sys.stdin)
model = llama_cpp.Llama(
    asked["model"], n_ctx=asked["context"], n_batch=asked["context"], n_ubatch=asked["context"], n_threads=1,
    logits_all=True, verbose=False, lora_path=asked.get("lora"), type_k=0, type_v=0, seed=1, n_gpu_layers=0,
    vocab_only=asked.get("vocab_only", False),
)  # fmt: skip
found = {
    "texts": [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]],
    "with_bos": [model.tokenize(text.encode(), add_bos=True, special=True) for text in asked["texts"]],
    "pieces": [
        model.detokenize(model.tokenize(text.encode(), add_bos=False, special=True), special=True).decode(
            errors="replace"
        )
        for text in asked["texts"]
    ],
    "eos": model.token_eos(),
    "bos": model.token_bos(),
    "metadata": {key: value for key, value in model.metadata.items() if len(value) < 2000},
}
vocab = llama_cpp.llama_model_get_vocab(model.model)
found["ends"] = [id for id in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, id)]
answers = []
for prompt in asked["prompts"]:
    model.reset()
    model.eval(prompt)
    logits = np.array(model.scores[: len(prompt)])
    ids = []
    for _ in range(asked["tokens"]):
        ids.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(ids[-1:])
    if asked.get("nll"):  # the sum over the tokens after the first half of the window
        log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        start = len(prompt) // 2
        answers.append(float(-sum(log_probs[i - 1, prompt[i]] for i in range(start, len(prompt)))))
    else:
        answers.append({"logits": logits.tolist(), "greedy": ids})
found["answers"] = answers
json.dump(found, sys.stdout)
