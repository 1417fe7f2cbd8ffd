"""The loop over updates: metrics, evaluations, checkpoints and signals between calls."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np

from podrace import hooks
from podrace.architectures.protocol import Architecture
from podrace.errors import RunError, Stopped, UsageError
from podrace.run.log import Log
from podrace.run.periodic_evaluation import Evaluations
from podrace.run.save_and_resume import Saves
from podrace.settings.config import Basics
from podrace.system.blame import label
from podrace.system.signals import GRACE_SECONDS, Stop
from podrace.topology import everyones

CALL_SECONDS = 0.5  # that one call of the compiled program may take: signals wait for it
CHECKPOINT_SECONDS = 60.0  # between checkpoints, without --checkpoint-every
FIRST_CHECKPOINT_SECONDS = 10.0  # until a run's first checkpoint, so that an early end loses little


class Pace:
  """Chooses how many updates a call makes, so that it takes about CALL_SECONDS."""

  def __init__(self) -> None:
    self._seconds = 0.0  # of one update
    self._limit = 1

  def updates(self) -> int:
    """Return the number of updates for the next call, at most twice the last call's."""
    return min(max(1, int(CALL_SECONDS / self._seconds)), self._limit) if self._seconds else 1

  def observe(self, updates: int, seconds: float) -> None:
    """Take the seconds of a call that made `updates` updates."""
    self._seconds, self._limit = seconds / updates, 2 * updates


class UpdateLoop:
  """Makes the updates of a run.

  Args:
    seeds: agents that the program trains.
    evaluations: None if this process does not evaluate.
    stop: has the signal that ends the run.
  """

  def __init__(
    self,
    config: Basics,
    program: Architecture,
    seeds: int,
    saves: Saves,
    log: Log,
    evaluations: Evaluations | None,
    stop: Stop,
  ) -> None:
    self.config, self.program, self.seeds = config, program, seeds
    self.saves, self.log, self.evaluations, self.stop = saves, log, evaluations, stop
    self._reported: set[int] = set()  # settings that have diverged

  def run(self, state: Any) -> Any:
    """Make updates to the end of the run; returns the state after them.

    Raises:
      Stopped: on a signal, after saving.
      RunError: if the loss or a parameter is not finite, or if anything fails.
    """
    config, pace = self.config, Pace()
    per_line = config.updates(config.log_every or -(-config.total_steps // 100))
    per_save = config.updates(config.checkpoint_every) if config.checkpoint_every else 0
    per_eval = self.evaluations.updates_between if self.evaluations else 0
    update, total = count_updates(state), config.total_updates
    last_save = time.perf_counter()
    with self.saves.failing(update, state):
      state = self.log.write_pending(state)
    while update < total:
      self.saves.check_directory()
      began = time.perf_counter()
      goals = [total, *(_next(update, n) for n in (per_line, per_save, per_eval) if n)]
      if update < self.program.ready:
        goals.append(self.program.ready)
      n, stop, save, ended = self._agree(
        min(min(goals) - update, pace.updates()),
        self.stop.signum,
        self._is_save_due(began - last_save),
        bool(self.log.callbacks.ended),
      )
      if ended:
        break
      state, n = self._advance(state, update, n)
      seconds = time.perf_counter() - began
      update += n
      self.log.add(n * config.steps_per_update * self.seeds, seconds)
      self._check_health(update)
      if n:
        pace.observe(n, seconds)
        if update == self.program.ready:  # from here on updates take longer
          pace = Pace()
        state = self._write_line(state, update, update % per_line == 0 or update == total)
      if self.evaluations and n and update % per_eval == 0:
        with self.saves.failing(update, state):
          self.evaluations.begin(update * config.steps_per_update, state.train.params)
      if save or stop or (per_save and update % per_save == 0):
        self.saves.save(update, state)
        last_save = time.perf_counter()
      if stop and update < total:
        self.saves.save_and_wait(update, state)
        raise Stopped(stop)
    self.saves.save_and_wait(update, state)
    return state

  def _advance(self, state: Any, update: int, updates: int) -> tuple[Any, int]:
    """Make up to `updates` updates; returns the state and the number made."""

    def call() -> tuple[Any, int]:
      after, n = self.program.advance(state, updates, lambda: bool(self.stop.signum))
      self.health = self.program.health(after)
      return after, n

    with self.saves.failing(update, state):
      result: tuple[Any, int] = self.stop.during(
        call, 'a call of the program', self.log.warn, GRACE_SECONDS
      )
      return result

  def _write_line(self, state: Any, update: int, due: bool) -> Any:
    """Write a line of metrics if it is due, else show progress; returns the state afterwards."""
    step = update * self.config.steps_per_update
    if not due:
      self.log.progress(step)
      return state
    with self.saves.failing(update, state):
      summary, state = self.program.read_log(state)
    state = self.log.write(step, summary, state, functools.partial(self.saves.failing, update))
    if self.log.callbacks.transforms:
      with self.saves.failing(update, state):
        self.health = self.program.health(state)
      self._check_health(update)
    return state

  def _is_save_due(self, seconds: float) -> bool:
    """Return whether a checkpoint is due `seconds` after the last one, or after the beginning."""
    if self.saves.saved < 0:
      return seconds > FIRST_CHECKPOINT_SECONDS
    return seconds > CHECKPOINT_SECONDS and not self.config.checkpoint_every

  def _agree(
    self, updates: int, signum: int, save: bool, ended: bool
  ) -> tuple[int, int, bool, bool]:
    """Return the first process's decisions and the signal of any process, alike on all of them."""
    all_ = everyones([updates, signum, save, ended])
    return int(all_[0, 0]), int(all_[:, 1].max()), bool(all_[0, 2]), bool(all_[0, 3])

  def _check_health(self, update: int) -> None:
    """Raise RunError or UsageError if the loss or a parameter is not finite.

    Of several settings, one that diverges is reported, and the run goes on.
    """
    settings, diverged = hooks.settings(self.config.agent), diverged_members(self.health)
    if settings > 1 and len(diverged) < self.seeds:
      each = self.seeds // settings
      for setting in sorted({i // each for i in diverged} - self._reported):
        self._reported.add(setting)
        self.log.warn(
          f'setting {setting} has diverged by step {update * self.config.steps_per_update:,}: its '
          'loss or a parameter is NaN or infinite. It learns nothing more; other settings go on'
        )
      return
    broken, finite = self.health
    bad = [int(b) for b in np.atleast_1d(broken) if b >= 0]
    if not bad and np.all(finite):
      return
    per_update = self.config.steps_per_update
    if bad:
      problem = f'the loss is NaN or infinite at step {(min(bad) + 1) * per_update:,}'
    else:
      problem = f'a parameter is NaN or infinite at step {update * per_update:,}'
    kept = self.saves.newest_before(update)
    if bad and np.all(finite) and (reason := hooks.refusal(self.config.agent)):
      raise UsageError(f'{problem}; {kept}, in {self.log.run_dir / "checkpoints"}\n{reason}')
    learn = label(hooks.innermost(self.config.agent), 'learn')
    raise RunError(
      f'{problem}; {kept}, in {self.log.run_dir / "checkpoints"}\n'
      f'What is learned is made by {learn}. A lower learning rate often helps; else look for a '
      'logarithm, a root or a division at 0 there: jax.debug.print shows values from within it.'
    )


def diverged_members(health: tuple[Any, Any]) -> list[int]:
  """Return the members with a loss or parameters that are not finite, of `Architecture.health`."""
  broken, finite = (np.atleast_1d(x) for x in health)
  return np.flatnonzero((broken >= 0) | ~finite).tolist()


def diverged_of_sweep(config: Basics, program: Architecture, state: Any) -> list[int]:
  """Return the members of a sweep that have diverged; none of another run."""
  is_sweep = hooks.settings(config.agent) > 1
  return diverged_members(program.health(state)) if is_sweep else []


def count_updates(state: Any) -> int:
  """Return the number of updates that a state was made by."""
  return int(np.atleast_1d(jax.device_get(state.update))[0])


def _next(update: int, every: int) -> int:
  """Return the next multiple of `every` after `update`."""
  return (update // every + 1) * every
