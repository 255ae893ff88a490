"""Objectives that learn only some of the completions of a group, next to each other in one sequence."""

import pytest
import torch
from rollout_runs import lines_of, settings, write_inputs
from running import train

from weft.data.batches.layout import Layout
from weft.train.rollouts.rollout import Completion, Rollout, pack_documents

BEST = '''
import torch
from weft.generation.rollouts import Rollouts
from weft.objectives.pretrain import Pretrain


class Best(Pretrain):
    """Fine-tuning on the two best completions of each group, as one item."""

    documents_per_item, temperature, max_new_tokens = 2, 1.0, 6

    def __init__(self, *, reward: str, group: int = 4, prompts: int = 4, updates_per_rollout: int = 1):
        super().__init__()
        self.rollouts = Rollouts(reward=reward, group=group, prompts=prompts)
        self.updates_per_rollout = updates_per_rollout
        self.scalars = ("items",)

    def choose(self, rewards):
        best = rewards.topk(2, dim=1).indices
        return torch.where(rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True), best[:, :1], best)

    def loss(self, outputs, batch):
        from weft.objectives import Loss
        whole = batch.by_item(batch.learned_documents)
        assert (whole.all(-1) == whole.any(-1)).all()
        items = whole.all(-1).sum() * batch.share
        return Loss(super().loss(outputs, batch), {"items": (items, torch.ones(()) * batch.share)})
'''


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    (tmp_path / "rollout_best.py").write_text(BEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def best(reward, **sections):
    sections = settings(**sections)
    return sections | {"objective": {"type": "rollout_best:Best", "reward": f"rollout_rewards:{reward}"}}


def test_the_best_completions_of_each_group_are_learned_as_items(run_yaml, tmp_path, capsys):
    lines = lines_of(run_yaml, tmp_path, **best("letters", training={"steps": 3, "micro_batch_size": 16}))
    assert lines[0]["items"] > 0
    for line in lines:  # of groups with equal rewards, none is learned
        assert line["items"] == 4 * (1 - line["equal_rewards"])
        assert 0 < line["learned_tokens"] <= line["items"] * 2 * 6
    assert train(run_yaml(**best("letters", data={"sequence_length": 12}))) == 2
    assert "must hold 2 completions with their prompts; lower the number" in capsys.readouterr().err


def test_a_step_without_a_chosen_completion_says_why(run_yaml, capsys):
    assert train(run_yaml(**best("each", training={"steps": 1}))) == 0
    assert "step 1: nothing can be learned, as all rewards of each prompt are equal" in capsys.readouterr().err


def test_items_are_packed_into_one_sequence():
    sizes = (5, 9, 3, 7, 4, 2, 8, 6)
    documents = [
        Completion([n + 1] * size, [0, *[1] * (size - 1)], [0.0] * size, False, [""], [])
        for n, size in enumerate(sizes)
    ]
    rollout = Rollout.of(0, documents, torch.zeros(8))
    batch = pack_documents(rollout, range(8), 16, Layout(), padding=0, first_sample=0, per_item=2).batch
    found = {}
    for row, segments in zip(batch.tokens.tolist(), batch.segments.tolist(), strict=True):
        for token, segment in zip(row, segments, strict=True):
            if token:
                found.setdefault(token - 1, (len(found) and 0, segment, row))
    assert len(found) == 8
    for first in range(0, 8, 2):
        one, other = found[first], found[first + 1]
        assert one[1] % 2 == 0
        assert other[1:] == (one[1] + 1, one[2])
