"""Tokens per second of Weft's engine on a Llama with random weights; see generate_decode.py."""

import time

from common import job, report_decoding


def main() -> None:
    asked = job()
    from weft.launch.threads import use_huge_pages

    use_huge_pages()  # as `weft generate` does
    import torch

    from weft.config.model import ModelSection
    from weft.generation.engine import Engine
    from weft.generation.settings import Sampling
    from weft.models.build import build_model
    from weft.models.initialize import initialize
    from weft.models.quantize import quantize

    model = build_model(ModelSection(**asked["shape"]))
    initialize(model, 0)
    model = model.to(asked.get("device", "cpu"), getattr(torch, asked["dtype"])).eval()
    if "quantize" in asked:
        quantize(model, asked["quantize"])
    engine = Engine(model, compile=asked["compile"])

    def generate(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        streams = [engine.submit(prompt, Sampling(tokens, temperature=0)) for prompt in prompts]
        while engine.step():
            pass
        assert all(len(list(stream)) == tokens for stream in streams)
        return time.perf_counter() - start

    report_decoding(asked, generate)


if __name__ == "__main__":
    main()
