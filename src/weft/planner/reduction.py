"""When a run reduces gradients, if its config leaves this to the memory (`parallel.gradients.reduction`)."""

from __future__ import annotations

from weft.config.mesh import UNSHARDED_SHARE
from weft.config.run import RunConfig
from weft.planner.hardware import Hardware
from weft.planner.units import Job


def with_reduction(config: RunConfig, devices: int, hardware: Hardware) -> RunConfig:
    """Returns a config with the `parallel.reduce_gradients` that its run would choose on the devices.

    Raises:
        UserError: the run cannot be predicted (see `Job`).
    """
    parallel = config.parallel
    if not parallel.reduces_by_memory:
        return config
    job = Job(config, devices, hardware)
    if job.mesh.pp > 1 or job.mesh.fsdp == 1 or job.micro_batches == 1:
        return config
    stage = job.stages()[0]
    needed = sum(unit.parameters for unit in (stage.root, *stage.pieces)) * job.reduce_width * job.trained
    every = needed > UNSHARDED_SHARE * hardware.device.memory_gb * 1e9
    changed = parallel.model_copy(update={"reduce_gradients": "every" if every else "last"})
    return config.model_copy(update={"parallel": changed})
