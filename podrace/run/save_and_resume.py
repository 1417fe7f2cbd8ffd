"""Checkpoints of a run: saved regularly and on failure, restored when it is resumed."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from podrace.architectures.hashes import machine
from podrace.architectures.protocol import Architecture, Part
from podrace.errors import CheckpointError, RunError, Stopped, UsageError
from podrace.run.checkpoint import Checkpoints
from podrace.run.compatibility import Fit
from podrace.run.metric_sums import match_sums, with_sums
from podrace.settings.config import Basics


class Saves:
  """Saves and restores a run.

  Args:
    is_ours: returns whether the run directory is still the one that the run began in.
    warn: prints a warning.
    say: prints a message about progress.
    parts: state on the host, by its key in the meta of a checkpoint.
    after_save: called with the run directory and the state, after a checkpoint is begun.
    log_sha256: hash of the data set that the run replays; None if there is none.
  """

  def __init__(
    self,
    config: Basics,
    program: Architecture,
    run_dir: Path,
    is_ours: Callable[[], bool],
    warn: Callable[[str], None],
    say: Callable[[str], None],
    parts: Mapping[str, Part],
    after_save: Callable[[Path, Any], None],
    log_sha256: str | None = None,
  ) -> None:
    self._config, self._program, self._run_dir = config, program, run_dir
    self._is_ours, self._warn, self._say = is_ours, warn, say
    self._parts, self._after_save = parts, after_save
    self._replay = program.saved_replay
    self._fit = Fit(config, program, run_dir, log_sha256)
    self.checkpoints = Checkpoints(run_dir / 'checkpoints', config.keep)
    self.saved = -1  # the step of the newest checkpoint
    self._checked: dict[int, dict[str, Any]] = {}  # the meta of a checkpoint that fits, by step

  def check_newest(self) -> None:
    """Raise UsageError if the newest readable checkpoint is of another program."""
    for step in self.checkpoints.steps():
      with contextlib.suppress(CheckpointError):  # `restore` reports it
        meta = self.checkpoints.meta(step)
        self._fit.check(meta, self.checkpoints.sums(step))
        self._checked[step] = meta
        return

  def check_directory(self) -> None:
    """Raise RunError if the directory was removed, moved or replaced."""
    if not self._is_ours():
      raise RunError(
        f'{self._run_dir} was removed, moved or replaced while this run was in it; the run ends, '
        'and writes nothing more there'
      )

  def save(self, update: int, state: Any) -> None:
    """Begin a checkpoint of the state after `update` updates, unless there is one.

    If the checkpoint before has failed, this one is awaited, as the run may go on if it succeeds.

    Raises:
      CheckpointError: if both have failed. In a run of several processes, which save together, if
        the one before has failed.
    """
    self.check_directory()
    step = update * self._config.steps_per_update
    if step == self.saved or not update:  # a run that has not begun begins alike again
      return
    meta = {
      'update': update,
      'machine': machine(),
      **self._fit.record(),
      'statistics': {},  # of an architecture that has none
      **{name: part.save() for name, part in self._parts.items()},
    }
    params, rest = _split(state)
    try:
      self._begin(step, params, rest, meta)
    except CheckpointError as e:
      if jax.process_count() > 1:
        raise
      self._warn(f'{e}\ntrying to save step {step:,}')
      self._begin(step, params, rest, meta)
      self.checkpoints.wait()
    self.saved = step
    self._after_save(self._run_dir, state)

  def save_and_wait(self, update: int, state: Any) -> None:
    """Save as `save` does, and wait until the checkpoint is on disk.

    In a run of one process, a checkpoint that fails meanwhile is made once more.

    Raises:
      CheckpointError: if the checkpoint is not on disk.
    """
    self.save(update, state)
    try:
      self.checkpoints.wait()
    except CheckpointError as e:
      if jax.process_count() > 1:
        raise
      self._warn(f'{e}\ntrying to save step {update * self._config.steps_per_update:,} again')
      self.saved = -1
      self.save(update, state)
      self.checkpoints.wait()

  def _begin(self, step: int, params: Any, rest: Any, meta: dict[str, Any]) -> None:
    extra = self._replay.save(self.checkpoints.extra(step)) if self._replay else None
    self.checkpoints.save(step, params, rest, meta, extra)

  @contextlib.contextmanager
  def failing(self, update: int, state: Any) -> Iterator[None]:
    """Raise failures within the context as RunError, after an attempt to save `state`."""
    try:
      yield
    except Stopped:
      raise
    except (RunError, UsageError) as e:
      raise RunError(f'{e}\n{self._at_failure(update, state)}') from e
    except Exception as e:
      problem = 'the run failed'
      if isinstance(e, jax.errors.JaxRuntimeError):
        problem = 'JAX failed, on this device or with another process'
      raise RunError(
        f'{traceback.format_exc()}\n{problem}; {self._at_failure(update, state)}'
      ) from e

  def _at_failure(self, update: int, state: Any) -> str:
    """Save if possible; returns a message about the checkpoints. Raises nothing."""
    gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))
    try:
      if not self._is_ours():
        return f'nothing is saved: {self._run_dir} was removed, moved or replaced'
      # All processes save together, and the rest may not have failed.
      if jax.process_count() == 1 and not gone:
        self.save_and_wait(update, state)
      else:
        self.checkpoints.wait()
    except (CheckpointError, OSError, jax.errors.JaxRuntimeError) as e:
      why = str(e)
    except Exception as e:  # the first failure is the one to report
      why = f'{type(e).__name__}: {e}'
    else:
      return (
        f'the run is saved at step {self.saved:,}, and goes on from there with the same --run-dir'
        if self.saved >= 0
        else 'nothing was saved yet'
      )
    return f'and it could not be saved: {why}; {self.newest_before(update)}'

  def newest_before(self, update: int) -> str:
    """Return a message about the newest checkpoint before `update`. Raises nothing."""
    with contextlib.suppress(Exception):
      self.checkpoints.wait()  # one may be under way
    steps = [
      step for step in self.checkpoints.steps() if step < update * self._config.steps_per_update
    ]
    return f'the last checkpoint is step {max(steps):,}' if steps else 'there is no checkpoint'

  def restore(self) -> Any | None:
    """Restore the newest undamaged checkpoint and all parts; returns its state or None."""
    if self.checkpoints.half_written:
      self._warn(f'dropped what was half-written: {", ".join(self.checkpoints.half_written)}')
    damaged: list[int] = []
    for step in self.checkpoints.steps():
      sums = self.checkpoints.sums(step)
      params, rest = _split(with_sums(self._program.shapes, sums))
      try:
        meta = self._checked.get(step)
        if meta is None:
          meta = self.checkpoints.meta(step)
          self._fit.check(meta, sums)
        restored = self.checkpoints.restore(step, params, rest, meta)
        if self._replay:
          self._replay.restore(self.checkpoints.extra(step), meta.get('extra'))
      except CheckpointError as e:
        if jax.process_count() > 1:  # they may not have the same damage
          folder = self._run_dir / 'checkpoints' / str(step)
          raise CheckpointError(f'{e}; to go on from the one before, move {folder} away') from e
        self._warn(f'damaged: {e}')
        damaged.append(step)
        continue
      for bad in damaged:
        self._warn(f'moved the damaged checkpoint {bad} to {self.checkpoints.set_aside(bad)}')
      self.saved = step
      self._say(f'resuming at step {step:,}')
      here = machine()
      if changed := [
        f'{k} {v} -> {here.get(k)}' for k, v in meta['machine'].items() if here.get(k) != v
      ]:
        self._warn(
          f'this is not where the run was: {", ".join(changed)}; it goes on, not bit for bit'
        )
      state = restored.rest._replace(train=restored.rest.train._replace(params=restored.params))
      state = match_sums(state, self._program.shapes.log.sums)
      self._restore_parts(step, meta)
      return state
    if damaged:
      raise RunError(
        f'none of the {len(damaged)} checkpoints in {self._run_dir} can be read; '
        'to begin again, take another --run-dir'
      )
    return None

  def _restore_parts(self, step: int, meta: dict[str, Any]) -> None:
    for name, part in self._parts.items():
      if name not in meta:  # an older podrace had fewer
        continue
      try:
        part.restore(meta[name])
      except UsageError:
        raise
      except Exception as e:  # of a callback's `restore`, or a damaged file
        raise RunError(
          f'checkpoint {step}: its part {name!r} cannot be restored: {type(e).__name__}: {e}'
        ) from e


def _split(state: Any) -> tuple[Any, Any]:
  """Return the parameters, and the state without them, the two items of a checkpoint."""
  return state.train.params, state._replace(train=state.train._replace(params=()))
