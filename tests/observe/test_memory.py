"""Memory by what it is for, from allocations made by hand; and its picture."""

from xml.etree import ElementTree

from weft.observe.memory import ACTIVATIONS, GATHERED, GRADIENTS, MARK, OPTIMIZER, OTHER, PARAMETERS, picture, timeline
from weft.observe.trace import STEP, parse

CPU, GPU = (0, -1), (1, 0)


def event(name, start, end, cat="user_annotation"):
    return {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": 1, "ts": start, "dur": end - start}


def memory(time, address, size, device=CPU, total=0):
    args = {"Addr": address, "Bytes": size, "Device Type": device[0], "Device Id": device[1], "Total Allocated": total}
    return {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 7, "tid": 1, "ts": time, "args": args}


def test_what_memory_is_for():
    trace = parse(
        [
            event(f"{STEP}1", 0, 100),
            memory(5, 50, 7),  # an activation
            event("FSDP::all_gather (layers.0)", 10, 20),
            memory(12, 60, 11),
            memory(30, 60, -11),
            event("autograd::engine::evaluate_function: MmBackward0", 40, 80, cat="cpu_op"),
            memory(42, 70, 3),  # a whole gradient: given back in its reduction
            memory(45, 80, 1000),  # what backward needs for a while
            memory(50, 80, -1000),
            memory(55, 50, -7),
            event("FSDP::post_backward_reduce (layers.0)", 60, 70),
            memory(61, 90, 2),  # this rank's part of it
            memory(62, 70, -3),
            memory(65, 95, 1),
            memory(66, 95, -1),
            event(f"{MARK}0", 85, 86),
            memory(90, 90, -2),
            memory(91, 50, 13),  # the address again, for state that the first update makes
            event(f"{MARK}1", 95, 96),
            memory(97, 40, 5, device=GPU),
        ]
    )
    before = [(10, 100, PARAMETERS), (20, 200, OPTIMIZER)]
    line = timeline(trace, CPU, before, {0: {90: GRADIENTS, 10: PARAMETERS}, 1: {50: OPTIMIZER}})

    def at(moment):
        index = max(i for i, time in enumerate(line.times) if time <= moment)
        return {name: sizes[index] for name, sizes in line.amounts.items() if sizes[index]}

    held = {PARAMETERS: 100, OPTIMIZER: 200}
    assert at(0) == held
    assert at(12) == held | {ACTIVATIONS: 7, GATHERED: 11}
    assert at(45) == held | {ACTIVATIONS: 7, GRADIENTS: 3, OTHER: 1000}
    assert at(61) == held | {GRADIENTS: 5}
    assert at(90) == held
    assert at(100) == {PARAMETERS: 100, OPTIMIZER: 213}
    assert line.peak == 1310
    assert line.at_peak[OTHER] == 1000


def test_of_a_gpu_all_is_known_that_was_there_before():
    trace = parse(
        [
            event(f"{STEP}1", 0, 100),
            memory(10, 50, 8, GPU, total=158),
            memory(20, 33, -30, GPU, total=128),  # from before the trace
        ]
    )
    line = timeline(trace, GPU, [(10, 100, PARAMETERS)])
    assert line.amounts[OTHER] == [50, 58, 28, 28]
    assert line.peak == 158


def test_the_picture_is_whole_and_its_areas_are_the_sums():
    trace = parse([event(f"{STEP}1", 0, 50), event(f"{STEP}2", 50, 100), memory(25, 1, 100), memory(75, 1, -100)])
    svg = picture(timeline(trace, CPU, [(9, 100, PARAMETERS)]), "rank 0 <all>")
    page = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in page.iter(f"{space}text")]
    assert "rank 0 <all>" in texts
    assert "step 1" in texts
    assert "step 2" in texts
    assert "parameters 100 B" in texts
    areas = [path for path in page.iter(f"{space}path") if path.find(f"{space}title") is not None]
    heights = []
    for area in areas:
        ys = [float(point.split()[1]) for point in area.get("d")[1:-1].split("L")]
        heights.append(max(ys) - min(ys))
    assert [area.find(f"{space}title").text for area in areas] == [PARAMETERS, OTHER]
    assert abs(heights[0] - heights[1]) <= 0.2
    assert "no steps" in picture(timeline(parse([]), CPU), "no steps")
