"""What a step sends: every collective's number and bytes are a closed form of the model, the batch and the mesh.

Counted of a run's own loop by one process, whose fellow ranks are imagined; at the end beside ranks that are there.
Kinds and bytes are those of `wire.Call`.
"""

import json
import math
from collections import defaultdict

import gathered_parts
import imagined
import pytest
import torch
from matrix import ranks_of
from pool import Pool
from wire import MARK, Wire

pytestmark = pytest.mark.xdist_group("ranks")

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, WORDS = 3, 16, 4, 2, 24, 40
HEAD = WIDTH // HEADS
EXPERTS, CHOSEN, OF_EXPERT = 8, 2, 12
ROWS, SEQ = 2, 16  # of a micro-batch
SHAPE = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "intermediate_size": INNER, "max_position_embeddings": SEQ,
}  # fmt: skip
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": OF_EXPERT}
NUMBER = 8  # bytes of a single one, of float64
FLOAT32, BFLOAT16, INT32 = 4, 2, 4
PHASES = ("forward", "backward")


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def count(pool, tmp_path):
    """The collectives of a step on each mesh, and the marks of its layers, as one of as many imagined ranks sees them.

    `count(mesh, ..., rank=0, **options)`: options are `run_file`'s.
    """

    def count(*meshes, rank=0, **options):
        files = [run_file(tmp_path, number, mesh, **options) for number, mesh in enumerate(meshes)]
        (ranks,) = {ranks_of(mesh) for mesh in meshes}
        return pool.call(imagined.counted_alone, 1, files, ranks, rank)[0]

    return count


def run_file(folder, number, mesh, *, micro=1, model=None, **training):
    """The file of a run on a mesh, with so many micro-batches a step."""
    mesh = {"dp_shard": 1} | mesh
    batch = ROWS * SEQ * micro * mesh["dp_shard"] * mesh.get("dp_replicate", 1)
    training = {"dtype": "float32", "micro_batch_size": ROWS, "batch_tokens": batch, "threads": 1} | training
    content = {
        "run": {"name": "run", "directory": str(folder)},
        "model": SHAPE | (model or {}),
        "data": {"train": {"type": "matrix_parts:Sequences"}, "sequence_length": SEQ},
        "optimizer": {"type": "adamw", "lr": 0.001},
        "training": {"steps": 2, **training},
        "parallel": mesh,
    }
    file = folder / f"run-{number}.yaml"
    file.write_text("".join(f"{section}: {json.dumps(value)}\n" for section, value in content.items()))
    return file


# ---- the closed forms: (phase, kind, axis) -> calls and their bytes, of a step


def add(*forms):
    """All of them together; what is nothing is left out."""
    together = defaultdict(lambda: (0, 0))
    for form in forms:
        for key, (calls, amount) in form.items():
            together[key] = together[key][0] + calls, together[key][1] + amount
    return {key: value for key, value in together.items() if value[0]}


def times(calls, amount):
    """So many, each of so many bytes."""
    return calls, calls * amount


def around(ranks, *clipped):
    """Two weights, two counts of tokens, two votes of saves, four to stop; the loss; squares of cut gradients."""
    sums = {("weights", "all_reduce", ranks): times(1, 10 * NUMBER), ("forward", "all_reduce", ranks): times(1, NUMBER)}
    return add(sums, *({("update", "all_reduce", axis): times(1, NUMBER)} for axis in clipped))


def size(rows, columns, ranks):
    """Numbers of a matrix, when each rank has as many rows; or columns, if a tenth of the rows would be for nothing."""
    padded = math.ceil(rows / ranks) * ranks
    return rows * columns if padded > 1.1 * rows and columns % ranks == 0 else padded * columns


def size_of_layer(ranks, tp=1, moe=False):
    """Numbers of a layer's parameters, as `ranks` bring them together; experts are brought together by themselves."""
    q, kv, inner = HEADS * HEAD // tp, KV_HEADS * HEAD // tp, INNER // tp
    attention = size(q, WIDTH, ranks) + 2 * size(kv, WIDTH, ranks) + size(WIDTH, q, ranks)
    mlp = 2 * size(inner, WIDTH, ranks) + size(WIDTH, inner, ranks)
    return attention + (size(EXPERTS, WIDTH, ranks) if moe else mlp) + 2 * size(WIDTH, 1, ranks)


def size_of_rest(ranks, tp=1):
    """The embedding, the head, the last norm."""
    return 2 * size(WORDS // tp, WIDTH, ranks) + size(WIDTH, 1, ranks)


def fsdp(axis, ranks, *, tp=1, micro=1, reshard=True, every=False, unit=1, item=FLOAT32, summed=FLOAT32, moe=False):
    """Units of layers, the embedding, the head and the last norm: gathered for forward, all layers but the last unit
    anew for backward.
    """
    units, in_last = math.ceil(LAYERS / unit), (LAYERS - 1) % unit + 1
    layer = size_of_layer(ranks, tp, moe)
    whole, anew = LAYERS * layer + size_of_rest(ranks, tp), (LAYERS - in_last) * layer
    gathers, sums = micro if reshard else 1, micro if every else 1
    return {
        ("forward", "all_gather", axis): ((units + 3) * gathers, whole * item * gathers),
        ("backward", "all_gather", axis): ((units - 1) * micro * reshard, anew * item * micro),
        ("backward", "reduce_scatter", axis): ((units + 3) * sums, whole * summed * sums),
    }


def copies(ranks):
    """HSDP: a rank's part of all gradients, over the copies, once a step."""
    whole = LAYERS * size_of_layer(ranks) + size_of_rest(ranks)
    return {("backward", "all_reduce", "dp_replicate"): (LAYERS + 3, whole // ranks * FLOAT32)}


def tensor(tp, *, cp=1, micro=1, item=FLOAT32, computed_again=False, moe=False):
    """Tokens are gathered for attention, the MLP and the head; those two's sums and the embedding's are scattered.

    Backward is the mirror, and gathers a layer's tokens again, of which a rank keeps its own only. Computed again is a
    layer up to its last product.
    """
    tokens, parts, again = ROWS * SEQ // cp, 2 * LAYERS + 1, 2 * LAYERS
    message = tokens * WIDTH * item
    of_words = {("forward", "all_gather", "tp"): times(micro, 2 * tp * tokens * FLOAT32)}  # label's logit, normalizer
    # What norms and routers learn of a rank's own tokens.
    shared = {("backward", "all_reduce", "tp"): times(parts, WIDTH * item)}
    routers = {("backward", "all_reduce", "tp"): times(LAYERS * moe, EXPERTS * WIDTH * item)}
    return add(
        {
            ("forward", "all_gather", "tp"): times(parts * micro, message),
            ("forward", "reduce_scatter", "tp"): times(parts * micro, message),
            ("backward", "all_gather", "tp"): times((parts + again) * micro, message),
            ("backward", "reduce_scatter", "tp"): times((parts + LAYERS * computed_again) * micro, message),
        },
        of_words,
        shared,
        routers,
    )


def context(way, cp, *, axis="cp", tp=1, item=FLOAT32):
    """Of each layer heads for tokens and back; or all keys and values; or those of one rank after the other."""
    loss = {("forward", "all_reduce", axis): times(1, NUMBER)}
    heads, kv = (ROWS * each // tp * SEQ * HEAD * item for each in (HEADS, KV_HEADS))  # of whole rows
    if way == "all_to_all":
        each = {(phase, "all_to_all", axis): (4 * LAYERS, 2 * LAYERS * (heads + kv) // cp) for phase in PHASES}
        return add(loss, each)
    if way == "all_gather":
        gathered = {("forward", "all_gather", axis): times(LAYERS, 2 * kv)}
        return add(loss, gathered, {("backward", "reduce_scatter", axis): times(LAYERS, 2 * kv)})
    both = 2 * kv // cp
    turns = {(phase, kind, axis): times((cp - 1) * LAYERS, both) for phase in PHASES for kind in ("send", "receive")}
    # The gradients of keys and values go all the way, until they are where these came from.
    return add(loss, turns, {("backward", kind, axis): times(cp * LAYERS, both) for kind in ("send", "receive")})


def of_ranks(ep, **moe):
    """Experts of which a token's are all on one rank: the groups that it chooses from are those of the ranks."""
    return {"moe": MOE | {"n_group": ep, "topk_group": 1} | moe}


def experts(ep, axis="ep", *, efsdp=1, cp=1, counted="world", chosen=CHOSEN, visits=1):
    """Each token goes once to the ranks of its experts, of which it visits some, with its choices and their weights.

    Before that it is said how many tokens and choices come. One sum comes back. Loads are summed.
    """
    rows = ROWS * SEQ // cp * visits
    there, back = (rows * width * FLOAT32 for width in (WIDTH + chosen, WIDTH))
    whole = size(EXPERTS // ep, 3 * OF_EXPERT * WIDTH, efsdp) * FLOAT32
    cut = efsdp > 1
    return add(
        {("forward", "all_to_all", axis): times(LAYERS, 2 * ep * NUMBER)},
        {("forward", "all_to_all", axis): times(LAYERS, rows * chosen * INT32)},
        {(phase, "all_to_all", axis): (2 * LAYERS, LAYERS * (there + back)) for phase in PHASES},
        {
            ("forward", "all_gather", "efsdp"): times(LAYERS * cut, whole),
            ("backward", "all_gather", "efsdp"): times((LAYERS - 1) * cut, whole),
            ("backward", "reduce_scatter", "efsdp"): times(LAYERS * cut, whole),
        },
        {("update", "all_reduce", counted): times(1, 2 * LAYERS * EXPERTS * NUMBER)},  # had, and lost
    )


def assert_counts(calls, expected, *fields, say=None):
    """By phase, kind and axis, or by some of these."""
    wire = Wire()
    wire.calls = calls
    assert wire.totals(*fields) == expected, say


# ---- data parallel


def test_parameters_are_gathered_and_gradients_scattered_once_each(count):
    """In 2 micro-batches. Of the model only INNER divides by 3 ranks."""
    forms = [
        ({}, {}),
        ({"reshard_after_forward": False}, {"reshard": False}),
        ({"reduce_gradients": "every"}, {"every": True}),
        ({"zero_stage": 1}, {"reshard": False}),
        ({"zero_stage": 2}, {"reshard": False, "every": True}),
        ({"zero_stage": 3}, {"every": True}),
        ({"layers_per_fsdp_unit": 2}, {"unit": 2}),
        ({"prefetch": 1}, {}),
    ]
    for calls, (settings, form) in zip(
        count(*({"dp_shard": 3} | one for one, _ in forms), micro=2), forms, strict=True
    ):
        expected = add(around("dp_shard", "dp_shard"), fsdp("dp_shard", 3, micro=2, **form))
        assert_counts(calls, expected, say=settings)


@pytest.mark.parametrize(("training", "summed"), [({}, FLOAT32), ({"reduce_dtype": "bfloat16"}, BFLOAT16)], ids=str)
def test_parameters_travel_in_the_dtype_of_computing_and_gradients_in_that_of_sums(count, training, summed):
    (calls,) = count({"dp_shard": 4}, dtype="bfloat16", **training)
    assert_counts(calls, add(around("dp_shard", "dp_shard"), fsdp("dp_shard", 4, item=BFLOAT16, summed=summed)))


def test_copies_of_the_model_add_up_their_gradients_once_a_step(count):
    when = [{"reduce_gradients": "last"}, {"reduce_gradients": "every"}]
    last, every = count(*({"dp_replicate": 2, "dp_shard": 2} | one for one in when), micro=2)
    assert_counts(last, add(around("world", "dp_shard"), fsdp("dp_shard", 2, micro=2), copies(2)))
    assert_counts(every, add(around("world", "dp_shard"), fsdp("dp_shard", 2, micro=2, every=True), copies(2)))
    whole = (LAYERS * size_of_layer(1) + size_of_rest(1)) * FLOAT32
    for calls in count(*({"dp_replicate": 2} | one for one in when), micro=2):  # small gradients, in one bucket
        assert_counts(calls, add(around("dp_replicate"), {("backward", "all_reduce", "dp_replicate"): (1, whole)}))


def test_a_pipelines_stage_is_gathered_once_however_many_its_micro_batches(count):
    """The embedding and two layers: once a step, or again and again."""

    def gathered(micro, **settings):
        (calls,) = count({"pp": 2, "dp_shard": 2} | settings, micro=micro)
        return sum(call.kind == "all_gather" and call.axis == "dp_shard" for call in calls)

    assert gathered(2) == gathered(4) == 3
    assert 3 < gathered(2, reshard_after_forward=True) < gathered(4, reshard_after_forward=True)


def test_some_of_the_ranks_can_keep_what_was_gathered(count):
    (calls,) = count({"dp_shard": 4, "reshard_after_forward": 2})
    halves = {call.axis for call in calls} - {"dp_shard", *(call.axis for call in calls if call.kind == MARK)}
    calls = [call._replace(axis="half") if call.axis in halves else call for call in calls]
    expected = add(around("dp_shard", "dp_shard"), fsdp("dp_shard", 4))
    expected["backward", "all_gather", "half"] = expected.pop(("backward", "all_gather", "dp_shard"))
    assert_counts(calls, expected)
    assert all(2 * call.sent == call.bytes for call in calls if call.axis == "half")


# ---- the other axes


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_tensor_ranks_gather_and_scatter_each_part_of_a_layer(count, checkpointing):
    (calls,) = count({"tp": 2}, micro=2, activation_checkpointing=checkpointing)
    assert_counts(calls, add(around("tp", "tp"), tensor(2, micro=2, computed_again=checkpointing == "full")))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_tensor_parallel_layer_saves_its_shard_and_gathers_the_input_again(pool, rows):
    found = pool.call(gathered_parts.layers, 1, rows)[0]
    kept, again, twice = found["kept"], found["again"], found["twice"]
    for one, other, double in zip(kept["gradients"], again["gradients"], twice["gradients"], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(double, 2 * one)
    whole, inner = (rows * gathered_parts.SEQ * each * NUMBER for each in (gathered_parts.WIDTH, gathered_parts.INNER))
    assert kept["saved"] - again["saved"] == whole - whole // 2
    assert again["saved"] >= whole // 2 + 4 * inner  # both products, the activation's result, and the last input
    assert kept["backward"] == ["mark", "reduce_scatter"]
    assert again["backward"] == ["all_gather", "mark", "reduce_scatter"]
    assert twice["backward"] == 2 * again["backward"]


def test_a_tensor_parallel_layer_can_write_over_its_input(pool):
    assert torch.equal(*pool.call(gathered_parts.written_over, 1)[0])


def test_backward_frees_the_shard_of_a_tensor_parallel_layers_input(pool):
    """A pipeline schedule holds the losses, and so the graphs, of all micro-batches of a step."""
    assert pool.call(gathered_parts.freed, 1) == [True]


def test_a_block_with_a_budget_waits_for_what_it_receives_again(pool):
    """A result that is saved replaces the operation that would have waited."""
    assert pool.call(gathered_parts.left_after_budget, 1, 0.9) == [0]


def test_context_ranks_exchange_heads_or_tell_keys_and_values(count):
    (calls,) = count({"cp": 2, "cp_method": "all_to_all"})
    assert_counts(calls, add(around("fsdp", "fsdp"), context("all_to_all", 2, axis="fsdp"), fsdp("fsdp", 2)))
    ways = ("all_gather", "ring")
    for calls, way in zip(count(*({"cp": 4, "cp_method": way} for way in ways)), ways, strict=True):
        assert_counts(calls, add(around("fsdp", "fsdp"), context(way, 4, axis="fsdp"), fsdp("fsdp", 4)), say=way)


def test_tokens_travel_to_experts_and_back(count):
    model = of_ranks(2, router_aux_loss_coef=0.01)
    (calls,) = count({"dp_shard": 2, "ep": 2}, model=model)
    axes = around("ep", "ep", "ep")  # the experts' gradients and the others'
    assert_counts(calls, add(axes, experts(2, counted="ep"), fsdp("ep", 2, moe=True)))
    calls, over_rows = count({"dp_shard": 4, "ep": 2}, {"cp": 4, "ep": 2, "cp_method": "all_gather"}, model=model)
    axes = around("dp_shard", "dp_shard", "ep", "efsdp")
    assert_counts(calls, add(axes, experts(2, efsdp=2, counted="dp_shard"), fsdp("dp_shard", 4, moe=True)))
    axes = around("fsdp", "fsdp", "ep", "efsdp")
    # How often each expert is chosen in a whole row, and how likely it is.
    balance = {("forward", "all_reduce", "fsdp"): times(LAYERS, 2 * ROWS * EXPERTS * FLOAT32)}
    parts = experts(2, efsdp=2, cp=4, counted="fsdp"), context("all_gather", 4, axis="fsdp"), balance
    assert_counts(over_rows, add(axes, *parts, fsdp("fsdp", 4, moe=True)))


def test_a_token_visits_a_rank_once(count):
    """Each token has all experts: two on each rank."""
    (calls,) = count({"dp_shard": 4, "ep": 4}, model={"moe": MOE | {"num_experts_per_tok": EXPERTS}})
    parts = experts(4, counted="ep", chosen=EXPERTS, visits=4), fsdp("ep", 4, moe=True)
    assert_counts(calls, add(around("ep", "ep", "ep"), *parts))


def test_few_experts_are_cut_without_room_for_more(count):
    """2 on a rank of `ep`, over 4 ranks: along their width."""
    (calls,) = count({"dp_shard": 8, "ep": 4}, model=of_ranks(4))
    (wide,) = count({"dp_shard": 16, "ep": 4}, model=of_ranks(4))
    for found, ranks in ((calls, 8), (wide, 16)):
        axes = around("dp_shard", "dp_shard", "ep", "efsdp")
        parts = experts(4, efsdp=ranks // 4, counted="dp_shard"), fsdp("dp_shard", ranks, moe=True)
        assert_counts(found, add(axes, *parts))


def test_stages_pass_on_each_micro_batch_once(count):
    """And a tied matrix's gradient and weights, between the first rank and the last."""
    message, matrix = ROWS * SEQ * WIDTH * FLOAT32, WORDS * WIDTH * FLOAT32
    for rank, tied in ((0, False), (1, False), (2, False), (0, True), (2, True)):
        (calls,) = count({"pp": 3}, rank=rank, micro=4, model={"tie_word_embeddings": tied})
        neighbours = (rank > 0) + (rank < 2)
        passed = {(kind, "pp"): times(4 * neighbours, message) for kind in ("send", "receive")}
        tie = {(kind, "pp"): times(tied, matrix) for kind in ("send", "receive")}
        sums = {("all_reduce", "pp"): (4, (10 + 1 + 1 + 1) * NUMBER)}  # weights; loss of the last and of all; squares
        assert_counts(calls, add(passed, tie, sums), "kind", "axis", say=(rank, tied))


def test_each_of_a_ranks_stages_passes_on_each_micro_batch_once(count):
    (calls,) = count({"pp": 2, "pp_schedule": "interleaved_1f1b"}, micro=4, model={"num_hidden_layers": 4})
    forwards, backwards = 2 * 4, 1 * 4  # of the first rank, that has stages 0 and 2
    sent = sum(call.bytes for call in calls if call.kind == "send")
    assert sent == (forwards + backwards) * ROWS * SEQ * WIDTH * FLOAT32


# ---- mixes


def test_axes_together_send_what_each_does_of_its_part(count):
    (calls,) = count({"dp_shard": 2, "tp": 2}, dtype="bfloat16")
    parts = fsdp("dp_shard", 2, tp=2, item=BFLOAT16), tensor(2, item=BFLOAT16)
    assert_counts(calls, add(around("world", "dp_shard", "dp_shard", "tp"), *parts))

    (calls,) = count({"dp_shard": 2, "cp": 2, "tp": 2, "cp_method": "all_gather"})
    parts = fsdp("fsdp", 4, tp=2), context("all_gather", 2, tp=2), tensor(2, cp=2)
    assert_counts(calls, add(around("world", "fsdp", "fsdp", "tp"), *parts))

    (calls,) = count({"dp_shard": 2, "tp": 2, "ep": 2}, model=of_ranks(2))
    # Each tensor rank has a part of each expert, and so is sent all of their tokens.
    parts = fsdp("dp_shard", 2, tp=2, moe=True), tensor(2, moe=True), experts(2, counted="tokens")
    assert_counts(calls, add(around("world", "dp_shard", "dp_shard", "ep", "tp", "tp"), *parts))


# ---- what hides behind what


def order(calls, phase):
    """G: gathered, R: scattered sums, a digit: the layer's forward begins."""
    letters = {"all_gather": "G", "reduce_scatter": "R"}
    return "".join(
        call.axis.removeprefix("layer ") if call.kind == MARK else letters.get(call.kind, "")
        for call in calls
        if call.phase == phase
    )


def test_what_comes_next_is_gathered_before_it_is_needed(count):
    calls, ahead = count({"dp_shard": 4}, {"dp_shard": 4, "prefetch": 2})
    # The norm, the embedding, each layer and the head, on a GPU's other stream while one computes.
    assert order(calls, "forward") == "GGG0G1G2G"
    # The head's sums beside the backward of layer 2; layer 1 is gathered before that, 0 before the backward of 1.
    assert order(calls, "backward") == "RGRGRRRR"
    assert order(ahead, "forward") == "GGGGG0G12"
    assert order(ahead, "backward") == "GRGRRRRR"


# ---- ranks that are there


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        # gloo gathers one unit ahead, as other backends do if asked.
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "prefetch": 1}, {}, marks=pytest.mark.long),
        ({"pp": 2, "tp": 2}, {"tie_word_embeddings": True}),
        ({"cp": 2, "ep": 2, "cp_method": "all_gather"}, of_ranks(2)),
        pytest.param({"cp": 2, "tp": 2, "ep": 2, "cp_method": "all_gather"}, of_ranks(2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_imagined_ranks_send_what_ranks_do(pool, count, tmp_path, mesh, model):
    number = ranks_of(mesh)
    there = pool.call(imagined.counted_together, number, run_file(tmp_path, 0, mesh, micro=2, model=model))
    (alone,) = count(mesh, rank=number - 1, micro=2, model=model)
    assert [known(call) for call in there[-1]] == [known(call) for call in alone]
    if model.get("moe"):  # some ranks' experts are chosen more often, and all that comes goes back
        assert sum(call.bytes for calls in there for call in calls) == number * sum(call.bytes for call in alone)


def known(call):
    """What of a call does not depend on which experts the tokens choose."""
    return call[:3] if call.kind == "all_to_all" else call[:4]
