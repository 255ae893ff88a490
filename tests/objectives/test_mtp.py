"""Multi-token prediction against its formula, written with the layers of transformers' Llama, a document at a time."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm

import weft
from weft.cli.main import main
from weft.config.model import ModelSection
from weft.models.build import build_model
from weft.models.forward import forward_of
from weft.objectives import Batch
from weft.objectives.pretrain import Pretrain

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
DEPTH = 2
DOCUMENTS = [[7, 5, 1, 3], [2, 14], [16]]  # lengths of the documents of three sequences


def batch_of(documents):
    """Packed documents of random tokens, of which each has one more than its inputs, and a fifth is not learned."""
    torch.manual_seed(3)
    texts = [[torch.randint(97, (length + 1,)) for length in row] for row in documents]
    tokens, labels = (
        torch.stack([torch.cat([t[cut] for t in row]) for row in texts]) for cut in (slice(-1), slice(1, None))
    )
    segments = torch.stack([torch.cat([torch.full((n,), i) for i, n in enumerate(row)]) for row in documents])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    weight = (torch.rand(tokens.shape) < 0.8).float()
    return texts, Batch(tokens, labels, weight, positions, segments, torch.arange(len(documents)))


class Plain(torch.nn.Module):
    """Llama and its prediction layers: no packing, no masks, each document by itself."""

    def __init__(self):
        super().__init__()
        config = LlamaConfig(**SHAPE, attn_implementation="eager")
        self.model = LlamaModel(config)
        self.head = torch.nn.Linear(32, 97, bias=False)
        norms = ("enorm", "hnorm", "head_norm")
        self.ahead = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {name: LlamaRMSNorm(32, 1e-5) for name in norms}
                | {"eh_proj": torch.nn.Linear(64, 32, bias=False), "block": LlamaDecoderLayer(config, 0)}
            )
            for _ in range(DEPTH)
        )
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def losses(self, text):
        """The cross-entropy of each token that is predicted: of the model, and of each prediction layer."""
        hidden = self.model(text[None, :-1]).last_hidden_state
        found = [F.cross_entropy(self.head(hidden)[0], text[1:], reduction="none")]
        for depth, layer in enumerate(self.ahead, 1):
            count = len(text) - 1 - depth  # of these the target is in the document
            if count <= 0:
                break
            embedded = self.model.embed_tokens(text[None, depth : depth + count])
            x = layer["eh_proj"](torch.cat((layer["enorm"](embedded), layer["hnorm"](hidden[:, :count])), -1))
            places = torch.arange(count)[None]
            mask = torch.full((count, count), float("-inf"), dtype=x.dtype).triu(1)[None, None]
            x = layer["block"](x, attention_mask=mask, position_embeddings=self.model.rotary_emb(x, places))
            hidden = layer["head_norm"](x)
            found.append(F.cross_entropy(self.head(hidden)[0], text[1 + depth :], reduction="none"))
        return found

    def named(self):
        """The parameters by Weft's names."""
        found = {}
        for name, parameter in self.named_parameters():
            layer, _, rest = name.removeprefix("ahead.").partition(".")
            name = f"layers.{2 + int(layer)}.{rest.removeprefix('block.')}" if name.startswith("ahead.") else name
            name = (
                name.removeprefix("model.").replace("self_attn", "attention").replace("head.weight", "lm_head.weight")
            )
            name = name.replace("input_layernorm", "attention_norm").replace("post_attention_layernorm", "mlp_norm")
            found[name] = parameter
        return found


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(1)
    plain = Plain().double()
    section = ModelSection(**SHAPE, num_nextn_predict_layers=DEPTH)
    ours = build_model(section).double()
    ours.load_state_dict({name: parameter.detach() for name, parameter in plain.named().items()})
    assert section.size().parameters == sum(p.numel() for p in ours.parameters())
    # A token goes through all matrices once, and through the head once more for each prediction layer.
    products = sum(p.numel() for name, p in ours.named_parameters() if p.dim() == 2 and name != "embed_tokens.weight")
    assert section.size().matmul == products + DEPTH * 97 * 32
    return plain, ours


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_loss_and_gradients_are_those_of_the_formula(models, z_loss):
    plain, ours = models
    texts, batch = batch_of(DOCUMENTS)
    total, weights, ahead, targets = 0.0, 0.0, 0.0, 0.0
    for row, found in enumerate(texts):
        start = 0
        for text in found:
            weight = batch.weight[row, start : start + len(text) - 1].double()
            start += len(text) - 1
            main_, *others = plain.losses(text)
            total, weights = total + (main_ * weight).sum(), weights + weight.sum()
            for depth, losses in enumerate(others, 1):
                ahead, targets = ahead + (losses * weight[depth:]).sum(), targets + weight[depth:].sum()
    objective = Pretrain(mtp_loss_factor=0.4, z_loss=z_loss)
    batch = batch.with_following(DEPTH)
    loss = objective.loss(forward_of(ours, normalizers=bool(z_loss))(objective.inputs(batch)), batch)
    assert loss.sum.item() == pytest.approx(total.item(), rel=1e-7)  # the auxiliary loss has only a gradient
    assert loss.scalars["mtp_loss"][0].item() == pytest.approx(ahead.item(), rel=1e-7)
    assert loss.scalars["mtp_loss"][1].item() == targets.item() > 0
    if not z_loss:
        (total + 0.4 / DEPTH * ahead).backward()
        loss.sum.backward()
        for name, parameter in plain.named().items():
            torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6)


def test_documents_that_are_too_short_and_sequences_without_documents():
    _, batch = batch_of([[1, 1, 2], [4]])
    following = batch.with_following(3).extra["next_weight"]
    assert following[0].count_nonzero() <= 1
    assert (following[1, 1:, 2] == 0).all()  # of four tokens, only the first has a third one after it
    plain = Batch(batch.tokens, batch.labels, torch.ones(2, 4), batch.positions, None, batch.samples)
    found = plain.with_following(5).extra
    assert found["next_weight"].sum((0, 1)).tolist() == [6, 4, 2, 0, 0]
    assert torch.equal(found["next_tokens"][:, :2, 1], batch.tokens[:, 2:])
    assert torch.equal(found["next_labels"][:, :2, 1], batch.labels[:, 2:])


def train(path):
    assert main(["train", str(path)]) == 0
    return [json.loads(line) for line in (path.parent / "runs" / path.stem / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_generates_and_goes_on(run_yaml, tmp_path, capsys):
    """The layers learn; generation leaves them out; runs start without the layers of their source, or with new ones."""
    model = {"preset": "llama-tiny", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512}
    few, training = {"directory": str(tmp_path / "runs")}, {"steps": 6, "batch_tokens": 256}
    quick = {"training": training | {"steps": 1}, "schedule": {"type": "constant", "warmup_steps": 0}}
    path = run_yaml(
        "one.yaml", run=few | {"name": "one"}, model=model | {"num_nextn_predict_layers": 1}, training=training
    )
    said = train(path)
    ahead = [line["mtp_loss"] for line in said if "mtp_loss" in line]
    assert ahead[-1] < ahead[0]
    assert any("validation_mtp_loss" in line for line in said)
    source = str(tmp_path / "runs" / "one")
    loaded = weft.load_model(source)
    assert len(loaded.layers) == 2
    tokens = torch.arange(10)[None]
    for name, number in (("none", 0), ("more", 2)):
        own = {"from": source, "preset": None, "num_nextn_predict_layers": number}
        path = run_yaml(f"{name}.yaml", run=few | {"name": name}, model=own, **quick)
        capsys.readouterr()
        first = next(line for line in train(path) if "loss" in line)
        assert ("mtp_loss" in first) == (number > 0)
        assert ("1 multi-token prediction layer has new initial weights" in capsys.readouterr().err) == (number == 2)
        assert (weft.load_model(tmp_path / "runs" / name)(tokens) - loaded(tokens)).abs().max() < 1
    capsys.readouterr()
    assert main(["export", source, str(tmp_path / "hf")]) == 0
    assert "no multi-token prediction layers; they are not exported" in capsys.readouterr().err
    assert torch.equal(weft.load_model(tmp_path / "hf")(tokens), loaded(tokens))


REFUSED = {
    "adapter": (
        {"adapter": {"r": 2}, "model": {"from": "SOURCE", "preset": None, "num_nextn_predict_layers": 1}},
        "an adapter does not",
    ),
    "reward model": ({"model": {"num_nextn_predict_layers": 1, "num_labels": 1}}, "a reward model has no head"),
    "split backward": (
        {"model": {"num_nextn_predict_layers": 1}, "parallel": {"pp": 2, "pp_schedule": "zbv_zero_bubble"}},
        "set parallel.pp_schedule: interleaved_1f1b",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(case, run_yaml, hf_folder, capsys):
    sections, what = json.loads(json.dumps(REFUSED[case][0]).replace("SOURCE", str(hf_folder))), REFUSED[case][1]
    assert main(["config", "check", str(run_yaml(**sections))]) == 2
    assert what in capsys.readouterr().err


def test_layers_that_an_objective_does_not_train_are_reported(run_yaml, capsys):
    path = run_yaml(model={"num_nextn_predict_layers": 1}, objective={"mtp_loss_factor": 0})
    assert main(["config", "check", str(path)]) == 0
    assert "does not train these layers" in "".join(capsys.readouterr())
