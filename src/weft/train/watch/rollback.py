"""Returns a run to an earlier checkpoint within the same process, and skips the data in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.checkpoint.checkpoint_files import step_of
from weft.checkpoint.load import checkpoints
from weft.files import remove
from weft.parallel.gradients.scaling import LossScale
from weft.train.build import restore
from weft.train.watch.guard import Finding, Guard
from weft.train.watch.integrity import KIND

if TYPE_CHECKING:
    from weft.train.loop import Loop


def roll_back(loop: Loop, found: Finding) -> bool:
    """Returns a run to the checkpoint that `watch.rollback_checkpoints` selects. All ranks must call it.

    The data from that checkpoint to the step of the finding are skipped. The checkpoint is saved
    again with the skipped window, so that a resumed run skips the same data. After a corruption, no data are skipped,
    and the checkpoint is the newest one from before it.

    Once the checkpoint is loaded, later checkpoints are deleted, and so are the metrics of the repeated steps. Trackers
    keep them.

    Returns:
        False if the run has no checkpoint. Nothing is changed then.
    """
    job, guard, section = loop.job, loop.guard, loop.config.watch
    loop.saver.finish()
    saved_ones = job.world.agree(lambda: checkpoints(job.run.path), only_first=True)
    if not saved_ones:
        return False
    steps = {path: step_of(path) or 0 for path in saved_ones}
    if found.kind == KIND:
        trusted = [path for path in saved_ones if steps[path] <= found.values["equal_step"]]
        if not trusted:
            return False
        target = trusted[-1]
    else:
        target = saved_ones[-min(section.rollback_checkpoints, len(saved_ones))]
    step, until = steps[target], guard.data_step(loop.state.step - found.late) + 1
    # Loaded, and so verified, before anything is deleted.
    saved = restore(job, loop.model, loop.optimizer, loop.compress, loop.callbacks, loop.frozen, target)
    loop.saver.forget_after(step)  # a local checkpoint that is newer than all others would be resumed
    later = [path for path in saved_ones if steps[path] > step]
    job.world.agree(lambda: [remove(path) for path in reversed(later)], only_first=True)
    loop.scale = LossScale(loop.config.training, saved)
    loop.tokens = int(saved.get("tokens", 0))
    loop.guard = Guard(section, saved)
    loop.guard.rollbacks = guard.rollbacks + 1
    if found.kind != KIND:
        loop.guard.skip_data(step, until)
    loop.integrity.checked = step
    loop.readings.read()  # of steps that are repeated
    state = loop.state
    state.step, state.metrics, state.updated = step, {}, True
    loop.saved_at, loop.validated_at, loop.measured = step, 0, {}
    loop.recorder.rolled_back(step)
    loop.passes.after_update()
    loop.save(step)
    loop.repeat_validation(step, missed=not saved.get("validated", True))
    return True
