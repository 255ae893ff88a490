"""Hardware files: those of the package, and what is wrong with others."""

import pytest

from weft.errors import ConfigError, UserError
from weft.planner.hardware import FOLDER, hardware_names, hardware_of, load_hardware


@pytest.fixture
def changed(tmp_path):
    """Returns a function that writes a hardware file with replacements, and returns its path."""

    def write(*replacements: tuple[str, str]):
        text = (FOLDER / "h100-mn5.yaml").read_text()
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "machine.yaml"
        path.write_text(text)
        return path

    return write


def test_all_files_of_the_package_are_valid():
    names = hardware_names()
    assert {"a100-sxm", "a100-leonardo", "h100-sxm", "h100-mn5", "h200", "b200", "gb200", "mi300x"} <= set(names)
    for name in names:
        hardware = load_hardware(name)
        assert hardware.source, name
        assert hardware.levels[-1].devices is None
    assert load_hardware("marenostrum5-h100-64gb") == load_hardware("h100-mn5")


def test_an_unknown_name_lists_the_files():
    with pytest.raises(UserError, match=r"no hardware file 'h100-mn'; did you mean 'h100-mn5'\? of .*mi300x"):
        load_hardware("h100-mn")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gb: 64", "memory_gb: -64", r"device.memory_gb: must be more than 0, not -64"),
        ("  power_w: 700\n", "", r"device.power_w: required"),
        ("launch_us", "lunch_us", r"device.lunch_us: unknown key; did you mean 'launch_us'"),
        ("devices: 4, ", "", r"levels\[0\].devices: required for every level but the last"),
        ("bandwidth_gb_s: 25", "bandwidth_gb_s: 25e9", r"levels\[1\].bandwidth_gb_s: must be at most 100000"),
        ("jitter: ", "jitter: .inf #", r"jitter: must be a finite number"),
        ("matmul_efficiency: {", "matmul_efficiency: {float16: 2, ", r"float16: must be a fraction, at most 1, not 2"),
    ],
)
def test_absurd_and_missing_numbers_have_a_place(changed, old, new, message):
    path = changed((old, new))
    with pytest.raises(ConfigError, match=rf"machine.yaml:\d+: .*{message}") as raised:
        load_hardware(path)
    assert all("\n" not in str(problem) for problem in raised.value.problems)


@pytest.mark.parametrize("content", ["", "# nothing\n", "- a100-sxm\n"])
def test_a_file_without_keys_names_those_of_hardware(tmp_path, content):
    (tmp_path / "machine.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"machine.yaml:1: the file is .*; write at least device, levels and host"):
        load_hardware(tmp_path / "machine.yaml")


@pytest.mark.parametrize(
    ("device", "memory_gb", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 85.0, "h100-sxm"),
        ("NVIDIA H100 PCIe", 85.0, "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", 85.0, "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", 42.4, "a100-40gb"),
        ("NVIDIA GB200", 192.0, "gb200"),
        ("NVIDIA GeForce RTX 4090", 25.0, None),
    ],
)
def test_the_file_of_a_gpu_is_found_by_its_name_and_memory(device, memory_gb, name):
    assert hardware_of(device, memory_gb) == name
