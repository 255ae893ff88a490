"""Predicted and published training speed of other systems: torchtitan, Llama 3 and Megatron-LM.

    python benchmarks/plan_published.py

Nothing is fitted: the numbers are those of the hardware files h100-sxm and a100-sxm. Sources: torchtitan's
`benchmarks/llama3_h100_202412_torchtitan.md`; Llama 3 (Grattafiori et al., 2024, table 4); Megatron-LM (Narayanan et
al., 2021, table 1). torchtitan's 405B at 8,192 tokens has as many micro-batches as pipeline ranks, the default of that
version (`experimental.pipeline_parallel_microbatches`). Assumed, because not published: micro-batches and stages per
rank of Llama 3 and Megatron-LM, and what a power limit of 500 W costs (`torchtitan_device`). llm.c, nanochat and
MegaScale are not included.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from weft.config.run import RunConfig
from weft.planner.hardware import Hardware, load_hardware
from weft.planner.step import predict
from weft.planner.work import Stack

LLAMA = {  # layers, width, heads, inner
    "8B": (32, 4096, 32, 14336),
    "70B": (80, 8192, 64, 28672),
    "405B": (126, 16384, 128, 53248),
}
MEGATRON = [  # billions, layers, width, heads, tp, pp, devices, sequences, TFLOP/s per device with recomputation
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 30, 3072, 32, 2, 1, 64, 512, 138),
    (7.5, 36, 4096, 32, 4, 1, 128, 512, 142),
    (18.4, 40, 6144, 48, 8, 1, 256, 1024, 135),
    (39.1, 48, 8192, 64, 8, 2, 512, 1536, 138),
    (76.1, 60, 10240, 80, 8, 4, 1024, 1792, 140),
    (145.6, 80, 12288, 96, 8, 8, 1536, 2304, 148),
    (310.1, 96, 16384, 128, 8, 16, 1920, 2160, 155),
    (529.6, 105, 20480, 128, 8, 35, 2520, 2520, 163),
    (1008.0, 128, 25600, 160, 8, 64, 3072, 3072, 163),
]


@dataclass(frozen=True)
class Case:
    """One published run.

    Attributes:
        name: what is trained, and how.
        devices: number of devices.
        published: tokens per second and device.
        model, parallel, training: sections of the run's file.
        length, sequences: tokens of a sequence, and sequences of the global batch.
    """

    name: str
    devices: int
    published: float
    model: str
    length: int
    sequences: int
    parallel: str
    training: str


def llama(size: str) -> str:
    layers, width, heads, inner = LLAMA[size]
    return (
        f"{{vocab_size: 128256, hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads}, "
        f"num_key_value_heads: 8, intermediate_size: {inner}, max_position_embeddings: 1048576}}"
    )


def torchtitan() -> list[Case]:
    """Returns the tables of torchtitan."""
    fast = "compile: true, fp8: true"
    selective, full = "activation_checkpointing: selective", "activation_checkpointing: full"
    cases = []
    for devices, speeds in ((8, (5762, 6667, 8532)), (128, (5605, 6514, 8380))):
        for how, speed in zip(("", "compile: true", fast), speeds, strict=True):
            training = ", ".join(filter(None, ("micro_batch_size: 2", selective, how)))
            label = {"": "", "compile: true": ", compile", fast: ", compile, fp8"}[how]
            name = f"torchtitan 8B, FSDP{label}"
            cases.append(Case(name, devices, speed, llama("8B"), 8192, 2 * devices, "{}", training))
    for cp, speed in ((1, 3890), (2, 2540), (4, 1071), (8, 548)):
        training, parallel = f"micro_batch_size: 1, {full}, {fast}", f"{{cp: {cp}, cp_method: all_gather}}"
        name = f"torchtitan 8B, {32 * cp}k tokens, cp {cp}, compile, fp8"
        cases.append(Case(name, 8, speed, llama("8B"), 32768 * cp, 8 // cp, parallel, training))
    for asynchronous, speed in ((False, 829), (True, 876)):
        parallel = f"{{tp: 8, async_tp: {str(asynchronous).lower()}}}"
        name = "torchtitan 70B, tp 8" + (", async TP" if asynchronous else "") + ", compile, fp8"
        training = f"micro_batch_size: 16, {full}, {fast}"
        cases.append(Case(name, 256, speed, llama("70B"), 8192, 512, parallel, training))
    for schedule, speed in (("1f1b", 100), ("interleaved_1f1b", 128)):
        parallel = f"{{tp: 8, pp: 8, dp_shard: 8, async_tp: true, pp_schedule: {schedule}}}"
        name, training = f"torchtitan 405B, tp 8, pp 8 {schedule}, compile, fp8", f"micro_batch_size: 4, {full}, {fast}"
        cases.append(Case(name, 512, speed, llama("405B"), 8192, 256, parallel, training))
    for cp, speed in ((1, 76), (2, 47), (4, 31), (8, 16)):
        axes = f"tp: 8, pp: 8, cp: {cp}, dp_shard: {8 // cp}"
        parallel = f"{{{axes}, cp_method: all_gather, async_tp: true, pp_schedule: 1f1b}}"
        name = f"torchtitan 405B, {32 * cp}k tokens, tp 8, pp 8, cp {cp}, compile, fp8"
        training = f"micro_batch_size: 1, {full}, {fast}"
        cases.append(Case(name, 512, speed, llama("405B"), 32768 * cp, 64 // cp, parallel, training))
    return cases


def llama_paper() -> list[Case]:
    """Returns Llama 3's table. TFLOP/s count attention with its causal mask."""
    cases, size = [], 405.85e9
    for devices, cp, length, teraflops in ((8192, 1, 8192, 430), (16384, 1, 8192, 400), (16384, 16, 131072, 380)):
        flops = 6 * size + 12 * 126 * 16384 * length / 2
        parallel = (
            f"{{tp: 8, pp: 16, cp: {cp}, dp_shard: {devices // 128 // cp}, cp_method: all_gather, zero_stage: 1, "
            "pp_schedule: interleaved_1f1b, stages_per_rank: 4}"
        )
        name = f"Llama 3 405B, tp 8, pp 16, cp {cp}"
        training = "micro_batch_size: 1, compile: true"
        speed = teraflops * 1e12 / flops
        cases.append(Case(name, devices, speed, llama("405B"), length, (1 << 24) // length, parallel, training))
    return cases


def megatron() -> list[Case]:
    """Returns Megatron-LM's table; its TFLOP/s count the recomputed forward pass, by the formula of the paper."""
    cases = []
    for billions, layers, width, heads, tp, pp, devices, sequences, teraflops in MEGATRON:
        flops = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        data = devices // tp // pp
        interleaved = pp > 1 and layers % (2 * pp) == 0 and sequences // data % pp == 0
        schedule = "interleaved_1f1b" if interleaved else "1f1b"
        parallel = f"{{tp: {tp}, pp: {pp}, dp_replicate: {data}, dp_shard: 1, pp_schedule: {schedule}}}"
        model = (
            f"{{vocab_size: 51200, hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads}, "
            "mlp: plain, hidden_act: gelu, norm: layernorm, position: learned, max_position_embeddings: 2048}"
        )
        training = f"micro_batch_size: {4 if pp == 1 else 1}, activation_checkpointing: full"
        name = f"Megatron-LM {billions:g}B, tp {tp}, pp {pp} {schedule}"
        cases.append(Case(name, devices, teraflops * 1e12 / flops, model, 2048, sequences, parallel, training))
    return cases


def predicted(case: Case, hardware: Hardware, stack: Stack) -> float:
    """Returns the predicted tokens per second and device."""
    text = f"""
model: {case.model}
data: {{sequence_length: {case.length}}}
parallel: {case.parallel}
training: {{steps: 1, dtype: bfloat16, batch_tokens: {case.sequences * case.length}, {case.training}}}
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        path.write_text(text)
        config = RunConfig.load(path, check_data=False, ranks=case.devices)
    return predict(config, case.devices, hardware, stack=stack).tokens_per_second / case.devices


def torchtitan_device(hardware: Hardware) -> Hardware:
    """Returns torchtitan's H100: memory of 2.4 TB/s, and a power limit of 500 instead of 700 W.

    Assumes that rates of matrix products fall like the power.
    """
    device, share = hardware.device, 500 / 700
    rates = {name: value * share for name, value in device.matmul_efficiency.given().items()}
    changes = {
        "memory_bandwidth_gb_s": 2400.0,
        "matmul_efficiency": device.matmul_efficiency.model_copy(update=rates),
        "attention_efficiency": device.attention_efficiency * share,
    }
    return hardware.model_copy(update={"device": device.model_copy(update=changes)})


def main() -> None:
    h100 = load_hardware("h100-sxm")
    stack = Stack(residual_bytes=2, keeps_logits=True)
    of_2021 = Stack(residual_bytes=2, fused=True, keeps_logits=True, fused_attention=False)
    print("| run | devices | published tokens/s per device | predicted | error |\n| --- | ---: | ---: | ---: | ---: |")
    for cases, hardware, used in (
        (torchtitan(), torchtitan_device(h100), stack),
        (llama_paper(), h100, stack),
        (megatron(), load_hardware("a100-sxm"), of_2021),
    ):
        errors = []
        for case in cases:
            speed = predicted(case, hardware, used)
            errors.append(abs(speed / case.published - 1))
            error = speed / case.published - 1
            print(f"| {case.name} | {case.devices} | {case.published:,.0f} | {speed:,.0f} | {error:+.0%} |")
        print(f"| mean absolute error | | | | {fmean(errors):.0%} |")


if __name__ == "__main__":
    main()
