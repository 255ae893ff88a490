"""`weft.register_op`: operations that DTensor cannot look into are split as their annotation says."""

import pytest
import register_parts
import torch
from parallelize_counts import slow_device
from torch.distributed.tensor import Shard

import weft
from weft.errors import UserError
from weft.planner.parallelize.register_op import Annotation, wrong_splits
from weft.planner.parallelize.search import search_plan


@pytest.mark.xdist_group("ranks")
def test_a_registered_operation_runs_on_parts_and_equals_one_process(ranks):
    cases = [{"dp": 2}, {"tp": 2, "parameters": register_parts.COLUMNS}, {"dp": 2, "tp": 1}]
    for found in ranks.call(register_parts.equal_to_one_process, 2, cases):
        (dp, by_rows), (tp, by_columns), _ = found
        assert max(dp, tp) < 1e-12
        assert by_rows == ((2, 8), False)  # half of the batch
        assert by_columns == ((4, 4), False)  # half of the hidden dimension


@pytest.mark.xdist_group("ranks")
def test_the_search_splits_registered_operations_and_counts_their_work(ranks):
    torch.manual_seed(0)
    x = torch.randn(1, 6)  # one row, which only the tensor axis can share
    plan, search, best = search_plan(register_parts.Net(), x, devices=2, hardware=slow_device("float32"))
    chosen = {str(step.node.target): one for step, one in zip(search.space.steps, best.strategies, strict=True)}
    scaled = chosen["scale"]  # needs data, so that only its annotation has a rule
    assert [one.forward for one in (*scaled.inputs, *scaled.outputs)] == [(Shard(1),), (Shard(0),), (Shard(1),)]
    assert plan.parameters["weight"] == plan.parameters["inner.weight"] == Shard(0)
    step = next(one for one in search.space.steps if str(one.node.target) == "scale")
    assert step.full_forward.bytes == 4 * (8 + 8 + 8)
    assert scaled.forward.bytes == step.full_forward.bytes / 2
    cases = [{"tp": 2, "parameters": plan.parameters, "inputs": plan.inputs, "outputs": plan.outputs}]
    for found in ranks.call(register_parts.equal_to_one_process, 2, cases):
        ((worst, (shapes, is_sharded)),) = found
        assert worst < 1e-12
        assert (shapes, is_sharded) == ((4, 4), False)


def test_an_annotation_with_other_results_is_refused():
    @weft.register_op("b d -> b d n")
    def doubled(x):
        return 2 * x

    class Net(torch.nn.Module):
        def forward(self, x):
            return doubled(x)

    with pytest.raises(UserError, match=r"'b d -> b d n': result 1 has 2 dimensions"):
        weft.parallelize(Net(), torch.zeros(2, 4), devices=2)


def test_an_operation_whose_results_have_no_known_size_is_refused():
    @weft.register_op("b d^ -> b n")
    def made(x):
        return x.new_tensor(x.numpy(force=True)[:, :2])

    class Net(torch.nn.Module):
        def forward(self, x):
            return made(x)

    with pytest.raises(UserError, match=r"made.*no size for n.*register_fake"):
        weft.parallelize(Net(), torch.zeros(2, 4), devices=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b d", "->"),
        ("b d -> c d -> e", "->"),
        ("b d! -> b", "d!"),
        ("b d -> b", r"d\+"),
        ("b d^, d -> b d", "two marks"),
        ("b+ -> b+", "summed"),
        ("b (h d -> b h", "parenthesis"),
    ],
)
def test_a_wrong_annotation_is_one_line(text, words):
    with pytest.raises(UserError, match=words):
        weft.register_op(text)


def test_the_notation():
    found = Annotation.parse("b l (h d^), n^ d^, ?, b l 1 -> b l h")
    assert found.inputs == (("b", "l", "h"), ("n", "d"), None, ("b", "l", "1"))
    assert found.split == {"b", "l", "h"}
    assert Annotation.parse("m k+, k+ n -> m n").summed == {"k"}


def test_plain_tensors_pass_through():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    out = register_parts.scale(x, torch.ones(4, dtype=torch.float64))
    assert torch.equal(out, x)


def test_wrong_annotations_are_found_by_trying_and_right_ones_proposed():
    x, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)

    @weft.register_op("m k+, n k+ -> m n")
    def right(x, weight):
        return x @ weight.T

    @weft.register_op("m d -> m d")
    def softmax(x):
        return x.softmax(-1)

    @weft.register_op("m k+ -> m")
    def largest(x):
        return x.amax(-1)

    assert wrong_splits(right, x, weight) == []
    (line,) = wrong_splits(softmax, x)
    assert line.startswith("d:")
    assert "d^" in line
    (line,) = wrong_splits(largest, x)
    assert "k^" in line
    with pytest.raises(UserError, match="register_op"):
        wrong_splits(torch.relu, x)


def test_operations_that_fail_on_parts_or_return_something_else_are_reported():
    @weft.register_op("b d -> b d")
    def halves(x):
        return torch.cat(x.view(len(x), 2, 3).unbind(1), 1)

    @weft.register_op("b -> b, b")
    def one_result(x):
        return x

    x = torch.randn(4, 6, dtype=torch.float64)
    (line,) = wrong_splits(halves, x)
    assert line.startswith("d: fails on a part (")
    assert line.endswith("; write d^")
    assert wrong_splits(one_result, x[:, 0]) == ["one_result returns 1 results, but the annotation has 2"]
    with pytest.raises(UserError, match="argument 1 has 1 dimensions"):
        wrong_splits(halves, x[0])


def test_other_arguments_than_the_annotation_says_are_named():
    from weft.planner.parallelize.register_op import split_call

    with pytest.raises(UserError, match="argument 2 has 1 dimensions"):
        split_call(torch.matmul, Annotation.parse("a b+, b+ c -> a c"), [torch.ones(2, 2), torch.ones(2)], {})
