"""Intervals and what a trace says, against grids and closed forms. Traces here are made by hand; microseconds."""

import gzip
import json
import random
from itertools import pairwise

import pytest

from weft.observe.trace import (
    DATA,
    STEP,
    clip,
    collectives,
    length,
    operators,
    parse,
    read_trace,
    step_times,
    subtract,
    union,
)

MAIN, WORKER = 1, 2


def event(name, start, end, *, tid=MAIN, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, "ts": start, "dur": end - start, "args": args}


def step(number, start, end):
    return event(f"{STEP}{number}", start, end, cat="user_annotation")


def gloo(name, start, end, tid=WORKER, **args):
    return event(f"gloo:{name}", start, end, tid=tid, cat="user_annotation", **args)


def kernel(name, start, end, stream=7, **args):
    return event(name, start, end, tid=stream, cat="kernel", **args)


def microseconds(times):
    return [
        round(1e6 * seconds, 6)
        for seconds in (times.seconds, times.compute, times.communication, times.exposed, times.idle)
    ]


def test_intervals_are_what_a_grid_says():
    chooser = random.Random(0)
    for _ in range(300):
        pairs = [
            [tuple(sorted((chooser.randint(0, 60), chooser.randint(0, 60)))) for _ in range(chooser.randint(0, 9))]
            for _ in range(2)
        ]
        one, other = map(union, pairs)
        grids = [{cell for a, b in some for cell in range(a, b)} for some in pairs]
        assert length(one) == len(grids[0])
        assert all(first[1] < second[0] for first, second in pairwise(one))
        left = subtract(one, other)
        assert {cell for a, b in left for cell in range(a, b)} == grids[0] - grids[1]
        assert length(left) == len(grids[0] - grids[1])
        assert length(clip(one, (20, 40))) == len(grids[0] & set(range(20, 40)))


def test_cpu_work_on_any_thread_hides_communication_on_another():
    trace = parse(
        [
            step(3, 0, 100),
            event(DATA, 0, 5, cat="user_annotation"),
            event("RegisterPostBackwardFunctionBackward", 5, 95),  # no operator: what its hooks wait for is inside
            event("autograd::engine::evaluate_function: MmBackward0", 5, 95),
            event("aten::linear", 10, 30),
            event("aten::mm", 12, 28),
            event("c10d::allreduce_", 30, 32),
            gloo("all_reduce", 31, 61),
            event("aten::add_", 40, 45, tid=WORKER),  # gloo's own sum
            event("aten::mul", 50, 70),
            event("aten::mul", 200, 300),  # outside of every step
        ]
    )
    (times,) = step_times(trace)
    # linear and mul: 40. From 30 to 61 there is communication, and from 50 on it is hidden.
    assert microseconds(times) == [100, 40, 31, 20, 40]
    assert times.step == 3
    assert times.data == pytest.approx(5e-6)


def test_sends_and_receives_are_ranges_on_the_thread_that_computes_meanwhile():
    trace = parse([step(1, 0, 50), gloo("recv", 10, 40, tid=MAIN), event("aten::mm", 15, 35)])
    assert microseconds(step_times(trace)[0]) == [50, 20, 30, 10, 20]


def test_compiled_code_computes_but_for_what_it_waits_for():
    graph = "## Call CompiledFxGraph fcd5uqsgciboils ##"
    trace = parse(
        [
            step(1, 0, 100),
            event("Torch-Compiled Region: 0/0", 10, 90),
            event("CompiledFunction", 12, 88),
            event(graph, 20, 80, cat="user_annotation"),
            event("aten::addmm", 20, 40),
            event("_c10d_functional::wait_tensor", 50, 70),
        ]
    )
    assert microseconds(step_times(trace)[0]) == [100, 60, 20, 20, 20]
    own = {work.name: round(1e6 * work.seconds, 6) for work in operators(trace)}
    assert own == {
        "aten::addmm": 20,
        "compiled graph fcd5uqsg": 20,
        "CompiledFunction": 16,
        "Torch-Compiled Region": 4,
    }


def test_gpu_kernels_count_by_stream_and_not_what_the_host_does():
    trace = parse(
        [
            step(1, 0, 100),
            step(2, 100, 200),
            event("aten::mm", 0, 95),
            event("c10d::_allgather_base_", 0, 95),
            kernel("gemm", 10, 30),
            kernel("gemm", 20, 50, stream=8),
            kernel("ncclDevKernel_AllGather_RING_LL(args)", 40, 80, stream=9),
            event("Memcpy HtoD", 70, 75, tid=7, cat="gpu_memcpy"),
            kernel("ncclDevKernel_ReduceScatter_Sum(args)", 110, 150, stream=9),
            gloo("all_reduce", 160, 170),
        ]
    )
    first, second = step_times(trace)
    assert microseconds(first) == [100, 45, 40, 25, 30]
    assert microseconds(second) == [100, 0, 50, 50, 50]
    assert [(work.name, work.calls) for work in operators(trace)] == [("gemm", 2), ("Memcpy HtoD", 1)]


def test_collectives_tell_what_a_rank_gives():
    shapes = {"Input Dims": [[3, 5]], "Input type": ["c10::BFloat16"]}
    nccl = {"Collective name": "_allgather_base", "In msg nelems": 1000, "dtype": "Float"}
    trace = parse(
        [
            step(1, 0, 100),
            event("aten::mm", 0, 20),
            gloo("all_reduce", 10, 30, **shapes),
            gloo("all_reduce", 25, 40, tid=3, **shapes),
            gloo("broadcast", 50, 55, **{"Input Dims": [[2]], "Input type": ["unheard"]}),
            gloo("barrier", 60, 61),
        ]
    )
    rows = [(w.name, w.calls, w.bytes, round(1e6 * w.seconds), round(1e6 * w.exposed)) for w in collectives(trace)]
    assert rows == [
        ("gloo:all_reduce", 2, 2 * 30, 30, 20),
        ("gloo:broadcast", 1, None, 5, 5),
        ("gloo:barrier", 1, 0, 1, 1),
    ]
    trace = parse([step(1, 0, 100), kernel("ncclDevKernel_AllGather(args)", 0, 10, **nccl)])
    assert [(w.name, w.bytes) for w in collectives(trace)] == [("nccl:_allgather_base", 4000)]


def test_a_trace_is_read_plain_and_packed(tmp_path):
    text = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, step(4, 1, 3)]}).encode()
    (tmp_path / "plain.json").write_bytes(text)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "plain.json").steps == read_trace(tmp_path / "packed.json.gz").steps == {4: (1, 3)}
