"""What activation checkpointing keeps, and that it changes no number: against the same blocks without it."""

import contextlib
import logging

import pytest
import torch
from compare import compare
from matrix import WITHIN, Case
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import ConfigError, UserError
from weft.models.build import build_model
from weft.models.initialize import initialize
from weft.parallel.memory.activations import checkpointed
from weft.parallel.memory.budget import Result, most_valuable

BLOCKS = 4
MODELS = {
    "llama": {},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "experts": {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}},
    "scores": {"attn_logit_softcapping": 30.0, "norm_placement": "both", "num_key_value_heads": 2},
}
MODES = ("budget-0.75", "budget-0.5", "budget-.25", "selective", "every-2", "full")


class Made(TorchDispatchMode):
    """The memory that operations have taken and that is still held."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                self.made[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        return out

    @property
    def held(self) -> int:
        return sum({ref.cdata: size for ref, size in self.made.items() if not ref.expired()}.values())


def build(blocks=BLOCKS, **keys):
    section = ModelSection(
        vocab_size=64, hidden_size=64, num_hidden_layers=blocks, num_attention_heads=4, intermediate_size=128, **keys
    )
    model = build_model(section).double().train()
    initialize(model, 1)
    return model


def step(model, documents=False, compiled=False):
    """Bytes held for backward, the loss, the gradients, and the experts' loads."""
    torch.manual_seed(2)
    tokens = torch.randint(0, 64, (3, 48))
    segments = torch.arange(48).expand(3, -1) // 13 if documents else None
    shares = torch.tensor([0.5, 0.0, 0.25], dtype=torch.float64)
    made = Made()
    with contextlib.nullcontext() if compiled else made:
        loss = model(tokens, labels=tokens, segments=segments, loss_weights=shares).mean()
    held = made.held
    loss.backward()
    loads = [block.mlp.router.load.clone() for block in model.layers if block.has_experts]
    return held, loss.item(), {name: p.grad for name, p in model.named_parameters()}, loads


def changed(model, mode, compile=None):
    for number, block in enumerate(model.layers):
        block.forward = checkpointed(block.forward, mode, number, BLOCKS, compile=compile is not None)
        if compile:
            block.forward = torch.compile(block.forward, fullgraph=True, backend=compile)
    return model


def assert_same(one, other, within=0.0):
    assert one[1] == pytest.approx(other[1], rel=0, abs=within)
    for name, gradient in one[2].items():
        torch.testing.assert_close(gradient, other[2][name], rtol=0, atol=within, msg=lambda m, n=name: f"{n}: {m}")
    assert all(map(torch.equal, one[3], other[3]))


@pytest.mark.parametrize("name", MODELS)
def test_less_is_held_and_nothing_else_changes(name):
    """Not a bit, nor the count of an expert's tokens."""
    documents = name == "llama"
    everything = step(build(**MODELS[name]), documents)
    held = {"none": everything[0]}
    for mode in MODES:
        found = step(changed(build(**MODELS[name]), mode), documents)
        assert_same(everything, found)
        held[mode] = found[0]
    assert held["none"] > held["budget-0.75"] > held["budget-0.5"] > held["budget-.25"] > held["full"]
    assert held["none"] > held["every-2"] > held["full"]
    assert held["none"] > held["selective"] > held["full"]
    outside = held["full"] - BLOCKS * 3 * 48 * 64 * 8  # of the blocks: fully checkpointed, they hold their inputs
    for mode, share in (("budget-0.75", 0.75), ("budget-0.5", 0.5), ("budget-.25", 0.25)):
        assert share - 0.05 < (held[mode] - outside) / (held["none"] - outside) <= share


def test_selective_keeps_products_and_attention_and_runs_none_of_them_again():
    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            self.seen.append(str(op))
            return op(*args, **(kwargs or {}))

    def seen(mode, **keys):
        model = changed(build(**keys), mode)
        tokens = torch.arange(96).view(2, 48) % 64
        with Count() as count:
            model(tokens, labels=tokens).mean().backward()
        return count.seen

    for kind in ("aten.mm.default", "aten._scaled_dot_product_flash_attention_for_cpu.default"):
        assert seen("selective").count(kind) == seen("none").count(kind) < seen("full").count(kind)
    assert seen("selective").count("aten.silu.default") == seen("full").count("aten.silu.default")
    # Scores `[heads, seq, seq]` are not kept where no kernel hides them: they are computed again.
    plain, again = (seen(mode, attn_logit_softcapping=30.0).count("aten.bmm.default") for mode in ("none", "selective"))
    assert again == plain + BLOCKS


def test_gradients_add_up_over_micro_batches_and_shapes():
    """A budget's choice of the first micro-batch holds for rows of another length, and for evaluation."""
    plain, other = build(), changed(build(), "budget-0.4")
    for model in (plain, other):
        for rows in (24, 40, 24):
            tokens = torch.arange(2 * rows).view(2, rows) % 64
            model(tokens, labels=tokens).mean().backward()
        with torch.no_grad():
            model.outputs = model.eval()(tokens)
    assert torch.equal(plain.outputs, other.outputs)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.long), "budget-0.3"])
def test_compiled_blocks_have_the_same_gradients(mode, caplog):
    torch._dynamo.reset()
    expected = step(build(blocks=1, **MODELS["experts"]))
    with caplog.at_level(logging.WARNING):
        found = step(changed(build(blocks=1, **MODELS["experts"]), mode, "aot_eager"), compiled=True)
    assert_same(expected, found, within=1e-12)
    assert not caplog.records


@pytest.mark.long
def test_a_compiler_with_a_budget_draws_no_new_random_numbers():
    """Compiled code has random numbers of its own; backward has to have those of forward."""
    found = []
    for mode in ("none", "budget-0.3"):
        torch._dynamo.reset()
        found.append(step(changed(build(blocks=1, **MODELS["dropout"]), mode, "inductor"), compiled=True))
    assert_same(*found, within=1e-12)


@pytest.mark.long
def test_the_compiler_keeps_less():
    def saved(mode):
        torch._dynamo.reset()
        model, sizes = changed(build(blocks=1), mode, "aot_eager"), []

        def pack(tensor):
            sizes.append(tensor.untyped_storage().nbytes())
            return tensor

        tokens = torch.arange(96).view(2, 48) % 64
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, labels=tokens)
        return sum(sizes)

    none, half, full = saved("none"), saved("budget-0.5"), saved("full")
    assert none > half > full
    assert saved("none") == none  # the budget is not left behind


class _ReadsWithoutOperations(torch.autograd.Function):
    """Like compiled code, such as flex attention, and kernels outside of PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("mode", ["selective", "budget-0.9"])
def test_a_product_that_only_code_outside_of_the_dispatcher_reads_is_saved(mode):
    def forward(x):
        return _ReadsWithoutOperations.apply((x @ x).view(2, 8)).sum() * x

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    out = checkpointed(forward, mode, 0, 1, compile=False)(x)
    assert torch.equal(*(torch.autograd.grad(one.sum(), x)[0] for one in (out, forward(x))))


def test_a_result_written_over_is_reported():
    def forward(x):
        return (x @ x).relu_() * x  # after the product was kept

    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UserError, match="writes in place over a result of aten::mm"):
        checkpointed(forward, "selective", 0, 1, compile=False)(x).sum().backward()
    kept = checkpointed(forward, "budget-0.9", 0, 1, compile=False)(x)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (kept, forward(x))))


@pytest.mark.parametrize("mode", ["selective", "budget-0.5"])
def test_a_block_with_a_sparse_matrix(mode):
    torch.manual_seed(0)
    matrix, weight = torch.eye(4).to_sparse(), torch.randn(4, 4, requires_grad=True)

    def block(x):
        return torch.sparse.mm(matrix, x @ weight).sin()

    x = torch.randn(4, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), (x, weight))
    found = torch.autograd.grad(checkpointed(block, mode, 0, 1, compile=False)(x).sum(), (x, weight))
    assert all(map(torch.equal, found, expected))


def test_the_knapsack_is_the_best_of_all():
    """Against every subset; sizes are multiples of a part, so that nothing is rounded."""
    chooser = torch.Generator().manual_seed(0)
    for _ in range(20):
        drawn = torch.randint(1, 60, (9, 2), generator=chooser).tolist()
        results = [Result((number, 0), size, float(cost)) for number, (size, cost) in enumerate(drawn)]
        capacity = 120
        subsets = ([r for n, r in enumerate(results) if subset >> n & 1] for subset in range(1 << 9))
        best = max(sum(r.cost for r in subset) for subset in subsets if sum(r.bytes for r in subset) <= capacity)
        chosen = most_valuable(results, capacity)
        assert sum(r.cost for r in results if r.key in chosen) == best
        assert sum(r.bytes for r in results if r.key in chosen) <= capacity
    assert most_valuable(results, 0) == frozenset()


def test_what_is_refused(run_yaml):
    with pytest.raises(UserError, match=r"activation_checkpointing: every-5 .* 4 layers"):
        changed(build(), "every-5")
    for mode in ("every-1", "every-two", "budget-1", "budget-0", "budget-50%", "ful", True, 2):
        with pytest.raises(ConfigError, match=r"activation_checkpointing: .*selective.*every-N.*budget-F") as told:
            RunConfig.load(run_yaml(training={"activation_checkpointing": mode}))
        assert len(told.value.problems) == 1
    with pytest.raises(ConfigError, match=r"activation_checkpointing: .*every-3.* 2 layers"):
        RunConfig.load(run_yaml(training={"activation_checkpointing": "every-3"}))
    for mode in ("budget-0.05", "budget-.5", "every-2"):
        assert RunConfig.load(run_yaml(training={"activation_checkpointing": mode})).training.steps == 30


ON_RANKS = [
    ("gqa", {"dp_shard": 2, "tp": 2}, "selective"),
    pytest.param("moe", {"dp_shard": 2, "ep": 2}, "selective", marks=pytest.mark.long),
    ("moe", {"dp_shard": 2, "ep": 2}, "budget-0.5"),
    ("gqa", {"pp": 2, "pp_schedule": "zbv_zero_bubble"}, "budget-0.5"),
    ("gqa", {"cp": 2, "cp_method": "ring"}, "selective"),
]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("model", "mesh", "mode"), ON_RANKS, ids=["tp", "ep", "ep-budget", "zbv", "ring"])
def test_on_several_ranks(runner, model, mesh, mode):
    """FSDP2's hooks inside a block, collectives that are kept or run again, and a backward in two parts."""
    case = Case(model, "dropout" if "ep" in mesh else "plain", mesh, layers=4 if "pp" in mesh else 2)
    run = runner.run(case, training={"activation_checkpointing": mode})
    assert compare(runner.reference(case), run).largest <= WITHIN


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["selective", "budget-0.5", "every-2"])
@pytest.mark.parametrize(("model", "mesh"), [("gqa", {"tp": 2}), ("moe", {"dp_shard": 2, "ep": 2})], ids=["tp", "ep"])
def test_compiled_on_several_ranks(runner, model, mesh, mode):
    """Blocks whose tokens travel are given up by the compiler, and run as they are."""
    case = Case(model, "plain", mesh)
    run = runner.run(case, training={"activation_checkpointing": mode, "compile": True})
    assert compare(runner.reference(case), run).largest <= WITHIN
