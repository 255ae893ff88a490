"""A machine whose times follow from few numbers by hand."""

from typing import Any

from weft.planner.hardware import Hardware


def ideal(
    levels: list[dict[str, Any]] | None = None, *, tflops: float = 1.0, slowdown: float = 0.0, **others: Any
) -> Hardware:
    """Returns a machine of devices that reach their peak, with almost infinite memory bandwidth and no launch times."""
    every = {"float32": tflops, "bfloat16": tflops, "float64": tflops}
    device = {
        "name": "ideal",
        "memory_gb": 100.0,
        "peak_tflops": every,
        "matmul_efficiency": {"float32": 1.0},
        "matmul_half_size": 0.0,
        "attention_efficiency": 1.0,
        "memory_bandwidth_gb_s": 1e6,
        "memory_efficiency": 1.0,
        "launch_us": 0.0,
        "power_w": 100.0,
    }
    links = levels or [{"name": "link", "latency_us": 1e-6, "bandwidth_gb_s": 1e5}]
    host = {"memory_gb": 100.0, "to_device_gb_s": 1e5, "cores": 8}
    return Hardware.model_validate(
        {"device": device, "levels": links, "host": host, "overlap": {"slowdown": slowdown}, **others}
    )
