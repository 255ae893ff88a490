"""Checkpoints written beside the training: what is saved is the state of the save, and nothing else ever appears."""

import errno
import threading

import pytest
import torch
from checkpoint_cases import adamw, built, everything, same, updates
from same_files import equal_files

from weft.checkpoint import save as saving
from weft.checkpoint.background import BackgroundSaver
from weft.checkpoint.checkpoint_files import Keep, find_damage
from weft.checkpoint.late_copy import LateCopies
from weft.checkpoint.load import checkpoints, load
from weft.checkpoint.save import Content, stage
from weft.errors import UserError


def content(model, optimizer, step, state=None):
    return Content(step, model, optimizer, state or {"seen": step}, {"type": "decoder"}, {})


@pytest.fixture
def held(monkeypatch):
    """Lets files be written only after `held.set()`."""
    gate, begin = threading.Event(), saving._begin

    def wait(*arguments):
        assert gate.wait(60)
        begin(*arguments)

    monkeypatch.setattr(saving, "_begin", wait)
    return gate


def test_what_is_loaded_is_the_state_at_the_save(tmp_path, held):
    """torch 2.4's dcp.async_save wrote CPU tensors after the update (pytorch #144657)."""
    model, saver = built(1), BackgroundSaver()
    optimizer, state = adamw(model), {"nested": {"count": [1]}}
    updates(model, optimizer, 0, 2)
    before = everything(model, optimizer)
    saver.start(stage(tmp_path, content(model, optimizer, 2, state), Keep(9), saver.begin()))
    updates(model, optimizer, 2, 5)
    state["nested"]["count"][0] = 7
    assert not checkpoints(tmp_path)
    assert not saver.ended
    held.set()
    saver.finish()
    assert not saver.busy
    (found,) = checkpoints(tmp_path)
    assert find_damage(found) is None
    model = built(2)
    optimizer = adamw(model)
    assert load(found, model=model, optimizer=optimizer) == {"nested": {"count": [1]}, "step": 2}
    same(everything(model, optimizer), before)


def test_host_memory_is_used_again(tmp_path):
    model, saver = built(1), BackgroundSaver()
    optimizer = adamw(model)
    updates(model, optimizer, 0, 1)
    places = []
    for step in (1, 2):
        saver.start(stage(tmp_path, content(model, optimizer, step), Keep(9), saver.begin()))
        saver.finish()
        places.append(sorted(buffer.data_ptr() for buffer in saver._buffers.values()))
        with torch.no_grad():
            model.up.weight.add_(1)
    assert places[0] == places[1]
    one, two = built(3), built(3)
    for path, other in zip(checkpoints(tmp_path), (one, two), strict=True):
        load(path, model=other)
    assert torch.equal(one.up.weight + 1, two.up.weight)


def test_an_error_surfaces_and_the_next_save_works(tmp_path, monkeypatch):
    model, saver = built(1), BackgroundSaver()
    write = saving.files.write_json

    def full(path, value):
        raise OSError(errno.ENOSPC, "No space left on device")

    saver.start(stage(tmp_path, content(model, None, 1), Keep(9), saver.begin()))
    saver.finish()
    monkeypatch.setattr(saving.files, "write_json", full)
    saver.start(stage(tmp_path, content(model, None, 2), Keep(9), saver.begin()))
    with pytest.raises(UserError, match=r"No space left.*the last complete checkpoint is step-00000001; free space"):
        saver.finish()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    monkeypatch.setattr(saving.files, "write_json", write)
    saver.start(stage(tmp_path, content(model, None, 3), Keep(9), saver.begin()))
    saver.finish()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]


def test_all_files_are_those_of_a_save_that_the_training_waits_for(tmp_path, held):
    """The bytes of weights and optimizer state of step n, not of the steps that follow while they are written."""
    model, saver = built(1), BackgroundSaver()
    optimizer, folders = adamw(model), (tmp_path / "sync", tmp_path / "async")
    for step in (1, 2):  # the second save uses the memory of the first again
        updates(model, optimizer, step - 1, step)
        held.set()
        stage(folders[0], content(model, optimizer, step), Keep(9)).write()
        held.clear()
        saver.start(stage(folders[1], content(model, optimizer, step), Keep(9), saver.begin()))
        with torch.no_grad():
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.add_(1)
        held.set()
        saver.finish()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
    assert equal_files(*folders) >= 2 * 5  # weights, index, checksums, state and sections of both steps


@pytest.mark.parametrize("slow", [False, True])
def test_an_update_waits_until_all_is_copied(tmp_path, monkeypatch, slow):
    """Saves beside the next update have the files of saves that the training waits for."""
    model, saver, gate, finish = built(1, width=10_000), BackgroundSaver(), threading.Event(), LateCopies.finish
    optimizer, folders, layout = adamw(model), (tmp_path / "sync", tmp_path / "async"), None
    optimizer.register_step_pre_hook(lambda *_: saver.copied())

    def wait(self):  # a slow thread leaves all copies to the update
        assert not slow or threading.current_thread() is threading.main_thread() or gate.wait(60)
        finish(self)

    monkeypatch.setattr(LateCopies, "finish", wait)
    updates(model, optimizer, 0, 1)
    for step in (1, 2, 3):
        gate.clear()
        stage(folders[0], content(model, optimizer, step), Keep(9)).write()
        staged = stage(folders[1], content(model, optimizer, step), Keep(9), saver.begin(), layout=layout)
        layout = staged.layout
        saver.start(staged, late=True)
        updates(model, optimizer, step, step + 1)
        gate.set()
        saver.finish()
    assert equal_files(*folders) >= 3 * 5


def test_a_tensor_that_changes_while_it_is_copied_is_never_saved(tmp_path, monkeypatch):
    model, saver, gate, finish = built(1, width=8_000), BackgroundSaver(), threading.Event(), LateCopies.finish
    optimizer = adamw(model)
    updates(model, optimizer, 0, 1)
    monkeypatch.setattr(LateCopies, "finish", lambda self: gate.wait(60) and finish(self))
    saver.start(stage(tmp_path, content(model, optimizer, 1), Keep(9), saver.begin()), late=True)
    with torch.no_grad():
        model.down.weight[0].add_(1)  # through a view, and not through `copied`
    gate.set()
    with pytest.raises(RuntimeError, match=r"step-00000001: model\.down\.weight changed while it was copied"):
        saver.finish()
    assert not checkpoints(tmp_path)
    saver.start(stage(tmp_path, content(model, optimizer, 2), Keep(9), saver.begin()), late=True)
    saver.finish()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]


def test_a_layout_is_used_again_only_for_tensors_of_the_same_kinds(tmp_path, monkeypatch):
    plans, save = [], saving.state_dict_saver.save
    monkeypatch.setattr(saving.state_dict_saver, "save", lambda *a, **k: plans.append(1) or save(*a, **k))
    model = built(1)
    optimizer, layout = adamw(model), None
    planned = []
    for step in range(5):
        others = {"extra": torch.arange(3 + (step == 4))} if step > 2 else {}
        asked = Content(step, model, optimizer, {}, {"type": "decoder"}, others)
        staged = stage(tmp_path / "again", asked, Keep(9), layout=layout)
        layout = staged.layout
        staged.write()
        planned.append(len(plans))
        stage(tmp_path / "anew", asked, Keep(9)).write()
        plans.clear()
        updates(model, optimizer, step, step + 1)
    # After the first update there is optimizer state; then another tensor, then one of another shape.
    assert planned == [1, 1, 0, 1, 1]
    assert equal_files(tmp_path / "again", tmp_path / "anew") >= 5 * 5
