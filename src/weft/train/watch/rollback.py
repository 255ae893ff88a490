"""Returns a run to an earlier checkpoint within the same process, and skips the data in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.checkpoint.checkpoint_files import step_of
from weft.checkpoint.load import checkpoints
from weft.files import remove
from weft.parallel.gradients.scaling import LossScale
from weft.train.build import restore
from weft.train.watch.guard import Guard

if TYPE_CHECKING:
    from weft.train.loop import Loop


def roll_back(loop: Loop) -> bool:
    """Returns a run to the checkpoint that `watch.rollback_checkpoints` selects. All ranks must call it.

    The data from that checkpoint to the current step, whose update was not made, are skipped. The checkpoint is saved
    again with the skipped window, so that a resumed run skips the same data. Checkpoints of later steps are deleted,
    and so are the metrics of the repeated steps. Trackers keep them.

    Returns:
        False if the run has no checkpoint. Nothing is changed then.
    """
    job, guard, section = loop.job, loop.guard, loop.config.watch
    loop.saver.finish()
    found = job.world.agree(lambda: checkpoints(job.run.path), only_first=True)
    if not found:
        return False
    target = found[-min(section.rollback_checkpoints, len(found))]
    step = step_of(target)
    assert step is not None
    until = guard.data_step(loop.state.step) + 1
    later = found[found.index(target) + 1 :]
    job.world.agree(lambda: [remove(path) for path in reversed(later)], only_first=True)
    loop.saver.forget_after(step)
    saved = restore(job, loop.model, loop.optimizer, loop.compress, loop.callbacks, loop.frozen)
    loop.scale = LossScale(loop.config.training, saved)
    loop.tokens = int(saved.get("tokens", 0))
    loop.guard = Guard(section, saved)
    loop.guard.rollbacks = guard.rollbacks + 1
    loop.guard.skip_data(step, until)
    state = loop.state
    state.step, state.metrics, state.updated = step, {}, True
    loop.saved_at, loop.validated_at, loop.measured = step, 0, {}
    loop.recorder.rolled_back(step)
    loop.passes.after_update()
    loop.save(step)
    loop.repeat_validation(step, missed=not saved.get("validated", True))
    return True
