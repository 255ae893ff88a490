"""Hardware files: what a plan knows of devices, links and hosts, as YAML.

The files of this package are in `weft/planner/devices`. Units are in the names of the keys; a GB is 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft.config.draft import Draft
from weft.config.inherit import read_tree
from weft.config.section import Section
from weft.config.suggest import did_you_mean
from weft.errors import ConfigError, Problem, UserError

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
DTypeName = Literal["bfloat16", "float16", "float32", "float8", "float64"]
Fraction = Annotated[float, Field(gt=0, le=1)]
MOST = 1 << 24  # devices
FOLDER = Path(__file__).parent / "devices"


class ByDtype(Section):
    """A number for each dtype; a dtype without a number is not supported."""

    bfloat16: float | None = Field(None, gt=0, le=1e5)
    """Number for bfloat16. Default: not supported."""
    float16: float | None = Field(None, gt=0, le=1e5)
    """Number for float16. Default: not supported."""
    float32: float | None = Field(None, gt=0, le=1e5)
    """Number for float32. Default: not supported."""
    float8: float | None = Field(None, gt=0, le=1e5)
    """Number for 8-bit floats. Default: not supported."""
    float64: float | None = Field(None, gt=0, le=1e5)
    """Number for float64. Default: not supported."""

    def given(self) -> dict[str, float]:
        """Returns the dtypes that have a number, and their numbers."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class DeviceSection(Section):
    """One device: a GPU, or a process with its threads on a CPU."""

    name: str = Field(min_length=1)
    """Name of the device, as its vendor gives it."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """Kind of the device. Kernels of CPUs save other tensors for backward than those of GPUs."""
    memory_gb: float = Field(gt=0, le=1e4)
    """Memory of the device in GB."""
    peak_tflops: ByDtype
    """Dense peak TFLOP/s for each dtype."""
    matmul_efficiency: ByDtype
    """Fraction of the peak that large matrix products reach, for each dtype; a dtype that is not listed has the
    smallest of the fractions.
    """
    matmul_half_size: float = Field(ge=0, le=1e5)
    """Size at which a matrix product reaches half of `matmul_efficiency`: the cube root of its three sizes' product."""
    attention_efficiency: Fraction
    """Fraction of the peak that the forward pass of fused attention reaches, with heads of 128 dimensions."""
    memory_bandwidth_gb_s: float = Field(gt=0, le=1e6)
    """Bandwidth of the device's memory in GB/s."""
    memory_efficiency: Fraction
    """Fraction of the memory bandwidth that element-wise operations reach."""
    launch_us: float = Field(ge=0, le=1e5)
    """Microseconds that the host needs to start one operation; operations without compilation are not faster."""
    power_w: float = Field(gt=0, le=1e5)
    """Power of the device under load in watts."""


class LevelSection(Section):
    """One level of links, such as NVLink within a node. Levels are listed from inner to outer."""

    name: str = Field(min_length=1)
    """Name of the level."""
    devices: int | None = Field(None, ge=1, le=MOST)
    """Number of devices in one group of this level. Default: all devices; only the last level has this default."""
    latency_us: float = Field(gt=0, le=1e6)
    """Microseconds of one step of a collective between neighbors."""
    bandwidth_gb_s: float = Field(gt=0, le=1e5)
    """Bandwidth per device and direction in GB/s."""
    efficiency: Fraction = 1.0
    """Fraction of the bandwidth that collectives reach with large messages."""
    congestion: float = Field(0.0, ge=0, le=2)
    """Exponent by which bandwidth falls with the number of groups: N connected groups have N^-congestion of it."""


class MeasuredCollective(Section):
    """A measured line of time over bytes for one collective and one group, which replaces the levels' estimate."""

    kind: Collective
    """The collective."""
    ranks: int = Field(ge=2, le=MOST)
    """Number of ranks in the group."""
    nodes: int = Field(1, ge=1, le=MOST)
    """Number of groups of the first level, such as nodes, over which the ranks are spread evenly."""
    latency_us: float = Field(ge=0, le=1e7)
    """Microseconds of a collective of no bytes."""
    bandwidth_gb_s: float = Field(gt=0, le=1e5)
    """Bytes of the full tensor per further second, in GB/s. For all_to_all: the bytes of one rank's tensor."""


class MeasuredOperator(Section):
    """The measured time of one operation with one shape, which replaces the estimate."""

    op: Literal["matmul", "attention"]
    """`matmul`: `[m, k] x [k, n]`. `attention`: the forward pass of causal attention."""
    shape: list[int]
    """`matmul`: m, k, n. `attention`: batch, heads, key/value heads, seq, head_dim."""
    dtype: DTypeName
    """The dtype."""
    microseconds: float = Field(gt=0)
    """Time of one call."""


class HostSection(Section):
    """The host of the devices."""

    memory_gb: float = Field(gt=0, le=1e6)
    """Memory of one host in GB."""
    to_device_gb_s: float = Field(gt=0, le=1e5)
    """Bandwidth of copies between the host and one device in GB/s."""
    cores: int = Field(ge=1, le=1 << 20)
    """Number of cores of one host."""
    fsdp_us: float = Field(0.0, ge=0, le=1e6)
    """Microseconds of the host for each collective of FSDP2, such as hooks and views. They add to the time of a CPU;
    those of a GPU are hidden.
    """
    fsdp_gb_s: float | None = Field(None, gt=0, le=1e5)
    """Bytes of parameters or gradients over the seconds that a CPU copies them around a collective of FSDP2, in GB/s.
    Default: a copy takes a read and a write of the memory.
    """
    tp_us: float = Field(0.0, ge=0, le=1e6)
    """Microseconds of the host for each collective of tensor parallelism, such as DTensor's dispatch, on a CPU."""

    @cached_property
    def without_collectives(self) -> HostSection:
        """The host of a GPU, which computes while the host prepares collectives."""
        return self.model_copy(update={"fsdp_us": 0.0, "tp_us": 0.0, "fsdp_gb_s": None})


class OverlapSection(Section):
    """What communication beside computation costs."""

    slowdown: float = Field(default=0.1, ge=0, le=1000)
    """Fraction by which computation is slower while a collective runs: collectives use cores and memory bandwidth. With
    1000, computation waits, such as that of ranks on a CPU without further cores.
    """


class Hardware(Section):
    """A hardware file."""

    description: str = ""
    """What the file describes. Default: nothing."""
    aliases: list[str] = Field(default=[])
    """Other names of the file, such as the name of a cluster in published tables. Default: none."""
    device: DeviceSection
    """The device."""
    levels: list[LevelSection] = Field(min_length=1)
    """Levels of links, from inner to outer."""
    collectives: list[MeasuredCollective] = Field(default=[])
    """Measured collectives. Default: none; times follow from the levels."""
    operators: list[MeasuredOperator] = Field(default=[])
    """Measured operations. Default: none; times follow from `device`."""
    host: HostSection
    """The host."""
    overlap: OverlapSection = Field(default_factory=OverlapSection)
    """What communication beside computation costs."""
    jitter: float = Field(0.0, ge=0, le=1)
    """Standard deviation of a node's step time, as a fraction: a step waits for the slowest of all nodes."""
    price_per_hour: float | None = Field(None, gt=0, le=1e6)
    """Price of one device for an hour, in any currency. Default: not known."""
    fitted: dict[str, float] = Field(default={})
    """Dotted keys whose numbers are fitted to measured steps, and their numbers before. Default: none is fitted."""
    source: dict[str, str] = Field(default={})
    """Where the numbers come from, by key."""

    @cached_property
    def node(self) -> int:
        """Number of devices in a node: of the innermost level that connects several; without a limit, all devices."""
        return next((level.devices or MOST for level in self.levels if level.devices != 1), MOST)

    @cached_property
    def measured_operators(self) -> dict[tuple[str, tuple[int, ...], str], float]:
        """Seconds of measured operations by (op, shape, dtype)."""
        return {(one.op, tuple(one.shape), one.dtype): one.microseconds * 1e-6 for one in self.operators}

    @cached_property
    def measured_collectives(self) -> dict[tuple[str, int, int], MeasuredCollective]:
        """Measured collectives by (kind, ranks, nodes)."""
        return {(one.kind, one.ranks, one.nodes): one for one in self.collectives}


def hardware_names() -> list[str]:
    """Returns the names of the hardware files of this package, such as `h100-sxm`."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def hardware_of(device: str, memory_gb: float) -> str | None:
    """Returns the name of the hardware file of this package that describes a GPU; None if none does.

    Args:
        device: name of the GPU, such as "NVIDIA A100-SXM4-80GB".
        memory_gb: its memory in GB. Of several files of this kind of GPU, the one with the closest memory is taken.
    """
    words = device.lower().replace("-", " ").split()
    names = [name for name in hardware_names() if name.partition("-")[0] in words]
    names = [name for name in names if ("pcie" in name) == ("pcie" in words)]
    return min(names, key=lambda name: abs(load_hardware(name).device.memory_gb - memory_gb), default=None)


def load_hardware(name: str | Path) -> Hardware:
    """Reads and checks a hardware file.

    Args:
        name: a name that `hardware_names` lists, an alias of one of these files, or the path of a YAML file.

    Raises:
        UserError: no file has the name.
        ConfigError: a key is missing or unknown, or a number is absurd; each problem has file, line and key.
    """
    known = hardware_names()
    if str(name) in known:
        return _read(FOLDER / f"{name}.yaml")
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return _read(path)
    aliases = {alias: each for each in known for alias in _read(FOLDER / f"{each}.yaml").aliases}
    if str(name) in aliases:
        return load_hardware(aliases[str(name)])
    meant = did_you_mean(str(name), [*known, *aliases])
    listed = ", ".join(known)
    raise UserError(f"no hardware file {str(name)!r}{meant or '; choose one'} of {listed}, or the path of a YAML file")


def _read(path: Path) -> Hardware:
    problems: list[Problem] = []
    tree, _ = read_tree(path, [], problems)
    if tree is None:
        raise ConfigError([_of_hardware(problem) for problem in problems])
    draft = Draft(tree, problems, Hardware)
    draft.check()
    if draft.config is not None:
        _check(draft, draft.config)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.line or 0))
    return draft.finish()


def _of_hardware(problem: Problem) -> Problem:
    """Returns a problem of a file that is not a mapping with the remedy for hardware files, not that for run files."""
    what, _, _ = problem.what.partition("; ")
    if not what.startswith("the file is "):
        return problem
    remedy = "write at least device, levels and host, or measure this machine: weft bench device --out FILE"
    return replace(problem, what=f"{what}; {remedy}")


def _check(draft: Draft, hardware: Hardware) -> None:
    """Reports values that contradict each other."""
    for dtype, value in hardware.device.matmul_efficiency.given().items():
        if value > 1:
            draft.report(f"device.matmul_efficiency.{dtype}", f"must be a fraction, at most 1, not {value:g}")
    if not hardware.device.peak_tflops.given():
        draft.report("device.peak_tflops", "no dtype has a peak; set at least float32")
    if not hardware.device.matmul_efficiency.given():
        draft.report("device.matmul_efficiency", "no dtype has a number; set at least float32")
    inner = 1
    for place, level in enumerate(hardware.levels):
        key, last = f"levels[{place}].devices", place == len(hardware.levels) - 1
        if level.devices is None and not last:
            draft.report(key, "required for every level but the last: the number of devices in one group; add it")
        elif level.devices is not None and level.devices % inner:
            draft.report(key, f"{level.devices} is not a multiple of the {inner} devices of the level before")
        inner = level.devices or inner
