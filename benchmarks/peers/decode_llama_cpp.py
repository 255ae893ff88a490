"""Tokens per second of llama.cpp (llama-cpp-python) on a GGUF file with random weights; see generate_decode.py.

Runs in an environment of its own: pip install llama-cpp-python==0.3.36 gguf==0.19, built with
CMAKE_ARGS="-DGGML_LLAMAFILE=ON". On a virtual machine where its AMX code crashes, add -DGGML_NATIVE=OFF and the
processor's other instruction sets (-DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON ...).
"""

import tempfile
import time
from pathlib import Path

from common import job, report_decoding


def write_gguf(path: Path, shape: dict, dtype: str) -> None:
    """Writes a Llama with random weights, without a tokenizer."""
    import gguf
    import numpy as np

    types = gguf.GGMLQuantizationType
    kind = {"bfloat16": types.BF16, "int8": types.Q8_0, "int4": types.Q4_0}[dtype]
    width, heads, layers = shape["hidden_size"], shape["num_attention_heads"], shape["num_hidden_layers"]
    inner, vocab = shape["intermediate_size"], shape["vocab_size"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def add(name: str, *size: int) -> None:
        values = random.standard_normal(size, dtype=np.float32) * 0.02
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab, width)
    add("output.weight", vocab, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    kv = width // heads * shape["num_key_value_heads"]
    for i in range(layers):
        for name, size in (("q", width), ("k", kv), ("v", kv), ("output", width)):
            add(f"blk.{i}.attn_{name}.weight", size, width)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{i}.{name}.weight", inner, width)
        add(f"blk.{i}.ffn_down.weight", width, inner)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    asked = job(torch_threads=False)
    import llama_cpp as c
    import numpy as np

    c.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(path, asked["shape"], asked["dtype"])
        model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16 * 256, 2048, 512, 16
    params.n_threads = params.n_threads_batch = asked["threads"]
    context, vocab = c.llama_init_from_model(model, params), asked["shape"]["vocab_size"]

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        batch = c.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert c.llama_decode(context, batch) == 0
        best = [
            int(np.ctypeslib.as_array(c.llama_get_logits_ith(context, i), (vocab,)).argmax())
            for i, row in enumerate(rows)
            if row[3]
        ]
        c.llama_batch_free(batch)
        return best

    def generate(prompts: list[list[int]], tokens: int) -> float:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        start = time.perf_counter()
        length = len(prompts[0])
        new = decode([(t, p, s, p == length - 1) for s, ids in enumerate(prompts) for p, t in enumerate(ids)])
        for step in range(tokens - 1):
            new = decode([(token, length + step, s, True) for s, token in enumerate(new)])
        return time.perf_counter() - start

    report_decoding(asked, generate)


if __name__ == "__main__":
    main()
