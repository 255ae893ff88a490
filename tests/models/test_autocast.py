"""A model in a loop of somebody else's, whose precision is autocast's."""

import pytest
import torch

from weft.config.model import ExpertsSection, ModelSection
from weft.models.build import build_model
from weft.models.initialize import initialize

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 172,
    "vocab_size": 512,
    "max_position_embeddings": 32,
}
EXPERTS = ExpertsSection(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)


@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_autocast_computes_in_its_dtype_and_gives_float32_gradients(moe, inside):
    torch.manual_seed(0)
    family = "llama" if moe is None else "mixtral"
    model = build_model(ModelSection(family=family, **SHAPE, moe=moe))
    initialize(model, 0)
    tokens = torch.randint(0, 512, (2, 32))
    positions = torch.arange(32).repeat(2, 1)
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not list(module.children()):
            module.register_forward_hook(lambda module, args, out: seen.append(out.dtype))

    def gradients(*, narrow):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            logprobs = model(tokens, positions, None, labels=tokens.roll(-1, 1))
            assert logprobs.dtype == torch.float32
            if inside:
                logprobs.mean().neg().backward()
        if not inside:
            logprobs.mean().neg().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, whole = gradients(narrow=False)
    seen.clear()
    near, rounded = gradients(narrow=True)
    assert set(seen) == {torch.bfloat16}
    assert not torch.equal(exact, near)
    assert torch.allclose(exact, near, atol=0.05)
    assert torch.cosine_similarity(whole, rounded, dim=0) > 0.99
