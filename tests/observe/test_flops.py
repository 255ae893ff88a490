"""MFU by hand, the table of peaks by the names that torch gives, and a measured peak that is one."""

import subprocess
import sys
import time

import pytest
import torch

from weft.observe import flops
from weft.observe.flop_count import flops_per_token


def test_flops_of_a_hand_counted_decoder():
    # Width 8, 2 layers, MLP 3 x (8 x 16), 4 heads of 2, vocabulary 10; sequence 6. Multiplications and additions:
    width, mlp, vocabulary, layers, sequence = 8, 16, 10, 2, 6
    linear = layers * (4 * width * width + 3 * width * mlp) + width * vocabulary
    forward = 2 * linear + layers * (2 * sequence * width + 2 * sequence * width)  # scores, weighted sums
    assert flops_per_token(linear, layers, width, sequence) == 3 * forward  # backward is twice the forward


def test_flops_of_linear_layers_as_torch_counts_them():
    from torch.utils.flop_counter import FlopCounterMode

    tokens, width = 5, 12
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(3)))
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(tokens, width, requires_grad=True)).sum().backward()
    parameters = sum(p.numel() for p in net.parameters())
    assert counter.get_total_flops() == tokens * flops_per_token(parameters, 0, width, tokens)


def test_mfu_is_a_share_of_all_devices():
    assert flops.mfu(1000.0, 1e9, 4 * 1e12) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.5),
        ("NVIDIA H100 80GB HBM3", torch.float32, 66.9),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA H100 80GB HBM3", torch.float8_e5m2, 1978.9),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-PCIE-40GB", torch.float32, 19.5),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("NVIDIA GeForce RTX 3090", torch.float16, 71),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-PCIE-16GB", torch.float16, 112),
        ("Tesla T4", torch.float16, 65),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("AMD Instinct MI250X/MI250", torch.bfloat16, 191.5),
    ],
)
def test_table(device, dtype, teraflops):
    peak = flops.table_peak(device, dtype)
    assert peak is not None
    assert peak.flops_per_second == pytest.approx(teraflops * 1e12)
    assert peak.origin.startswith("table: ")


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16),  # a slice
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),  # another chip under the same name
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16),
        ("Tesla V100-SXM2-16GB", torch.bfloat16),  # it has none
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn),
        ("NVIDIA T400", torch.float16),
        ("Some Accelerator", torch.bfloat16),
    ],
)
def test_what_is_not_in_the_table_is_not_guessed(device, dtype):
    assert flops.table_peak(device, dtype) is None


def test_every_row_gives_a_number_for_every_dtype_or_none():
    for name, _, peaks in flops._TABLE:
        assert len(peaks) == 5, name
        assert peaks[1] is not None, name


def test_a_cpu_is_measured_and_says_so():
    start = time.perf_counter()
    peak = flops.device_peak("cpu", torch.float32)
    assert time.perf_counter() - start < 10
    assert peak.origin.startswith("measured with a ")
    assert "float32 matmul on 1 CPU thread" in peak.origin
    assert flops.device_peak("cpu", torch.float32) is peak  # measured once per process
    a = torch.randn(512, 512)
    torch.mm(a, a)
    start = time.perf_counter()
    torch.mm(a, a)
    once = 2 * 512**3 / (time.perf_counter() - start)
    assert peak.flops_per_second > 0.5 * once  # the best of many is not below one; half for a noisy neighbour


def test_a_dtype_without_a_matmul_says_what_was_measured_in_its_place():
    assert "bfloat16 matmul" in (origin := flops.device_peak("cpu", torch.float8_e4m3fn).origin)
    assert "in place of float8_e4m3fn" in origin


def test_the_peak_of_a_job_is_the_sum():
    one = flops.Peak(2e12, "table: X, bfloat16")
    assert flops.total_peak([one]) == one
    assert flops.total_peak([one] * 3) == flops.Peak(6e12, "3 x table: X, bfloat16")
    mixed = flops.total_peak([one, one, flops.Peak(1e12, "measured")])
    assert mixed == flops.Peak(5e12, "2 x table: X, bfloat16; 1 x measured")


def test_memory_is_the_peak_of_this_process():
    code = (
        "import sys, torch; from weft.observe.flops import memory_bytes\n"
        "before = memory_bytes('cpu'); x = torch.ones(50_000_000); peak = memory_bytes('cpu'); del x\n"
        "assert 190e6 < peak - before < 260e6, (before, peak)\n"
        "assert memory_bytes('cpu') > 0.99 * peak\n"
    )
    ballast = bytearray(800_000_000)  # a large parent is no part of the child's peak
    ballast[::4096] = b"x" * len(ballast[::4096])
    code += "assert before < 700e6, before\n"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_a_gpu_reaches_most_of_its_stated_peak_and_not_more():
    stated = flops.device_peak("cuda", torch.bfloat16)
    measured = flops.measured_peak("cuda", torch.bfloat16)
    assert "matmul on one" in measured.origin
    if stated.origin.startswith("table"):
        assert 0.4 < measured.flops_per_second / stated.flops_per_second < 1.05
    assert flops.memory_bytes("cuda") > 0
