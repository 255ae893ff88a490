"""Tokens per second of transformers' `generate` on a Llama with random weights; see generate_decode.py."""

import time

from common import job, report_decoding
from hf_model import llama


def main() -> None:
    asked = job()
    import torch

    device = asked.get("device", "cpu")
    model = llama(asked["shape"]).to(device, getattr(torch, asked["dtype"])).eval()

    def generate(prompts: list[list[int]], tokens: int) -> float:
        start = time.perf_counter()
        options = {"do_sample": False, "use_cache": True, "min_new_tokens": tokens, "max_new_tokens": tokens}
        ids = torch.tensor(prompts, device=device)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, eos_token_id=None, **options)
        assert found.cpu().shape[1] == len(prompts[0]) + tokens
        return time.perf_counter() - start

    report_decoding(asked, generate)


if __name__ == "__main__":
    main()
