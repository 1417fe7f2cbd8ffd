"""Any Gymnasium environment, stepped in worker processes through shared memory.

A worker that dies, or takes longer than the deadline, is ended and replaced. Its environments
begin again under new run ids. An exception in an environment ends the run and is shown to the
user. Before a run, two environments are tried out, unless they are Gymnasium's own.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from podrace.envs.env_names import full_name
from podrace.envs.host import registered, trial
from podrace.envs.host import worker as w
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.checker import Checker
from podrace.envs.host.infos import Infos
from podrace.envs.host.spaces import WRAPPER, action_bounds, allowed_choices, best_choices, in_jax
from podrace.envs.host.worker_pool import EnvironmentFailed, WorkerPool
from podrace.envs.options import Value
from podrace.envs.spaces import check_observation_space, convert, leaves, map_leaves, values
from podrace.errors import HostError, UnknownName, UsageError
from podrace.system.blame import label as label_of
from podrace.types import Arrival, TimeStep

LEAVE_OUT = 'a wrapper such as gymnasium.wrappers.TransformObservation can leave it out'


CLOSE_SECONDS = 5.0
TRIAL_STEPS, TRIAL_SECONDS = 20, 1.0  # that find whether an environment is deterministic

log = logging.getLogger('podrace.envs')


def make(name: str, options: Mapping[str, Value]) -> HostSpec:
  """Return an environment by Gymnasium's id, or by `MODULE:ID`, which imports MODULE first.

  Options are arguments of its maker.
  """
  probe = registered.make(name, options)
  observation_space, action_space = (
    convert(in_jax, x) for x in (probe.observation_space, probe.action_space)
  )
  label = full_name('gymnasium', name, options, {})
  fields = _fields(label, observation_space, action_space)
  _close(probe, label)
  infos, repeats = Infos(), Repeats(label)

  def make_pool(args: PoolArgs) -> WorkerPool:
    args = dataclasses.replace(args, saves=args.saves and repeats.check())
    return WorkerPool(label, fields, observation_space, args, infos, action_space=action_space)

  spec = HostSpec(
    name=label,
    observation_space=observation_space,
    action_space=action_space,
    make=make_pool,
    longest_episode=getattr(probe.spec, 'max_episode_steps', None),
    metrics=infos.means,
  )
  owner = trial.owner(probe)
  if trial.is_gymnasiums(owner) and not trial.has_wrappers(probe):
    return spec
  methods = {m: label_of(owner, m) for m in ('reset', 'step')}

  def try_out(deadline: float) -> None:
    args = PoolArgs(2, 2, np.arange(2, dtype=np.uint32), 1, deadline)
    pool = WorkerPool(label, fields, observation_space, args, trial=True)
    repeats.holds = _try_out(spec, pool, methods)

  return dataclasses.replace(spec, try_out=try_out)


def _close(probe: Any, label: str) -> None:
  """Close an environment that was made for its spaces. A failure is no reason not to run."""
  text = '%s: close has not returned for %g s; end this process if it does not'
  timer = threading.Timer(CLOSE_SECONDS, log.warning, (text, label, CLOSE_SECONDS))
  timer.daemon = True
  timer.start()
  try:
    probe.close()
  except Exception as error:
    log.warning('%s: close raised %s: %s', label, type(error).__name__, error)
  finally:
    timer.cancel()


class Repeats:
  """Whether an environment does the same again with the same seed and actions.

  Attributes:
    holds: False once two copies of it have differed.
  """

  def __init__(self, label: str) -> None:
    self._label, self._warned = label, False
    self.holds = True

  def check(self) -> bool:
    """Return it, and warn once if it does not."""
    if not self.holds and not self._warned:
      self._warned = True
      log.warning(
        '%s: two environments with the same seed and actions observed different things, so a '
        'resumed run begins its environments anew',
        self._label,
      )
    return self.holds


def _try_out(spec: HostSpec, pool: WorkerPool, methods: Mapping[str, str]) -> bool:
  """Reset and step a pool of two environments.

  Returns:
    Whether they do the same with the same seed after they have played with different ones.

  Raises:
    UsageError: if that fails.
  """
  name = 'reset'
  try:
    check = Checker(spec, 1)
    pool.reset()
    arrival = pool.recv()
    check(_of(spec, arrival, 0))
    name = 'step'
    _send(spec, pool, arrival)
    arrival = pool.recv()
    check(_of(spec, arrival, 0))
    return _repeats(spec, pool, arrival)
  except EnvironmentFailed as error:
    raise UsageError(str(error)) from error
  except HostError as error:
    raise UsageError(f'{methods[name]}, tried out once before the run: {error}') from error
  finally:
    pool.close()


def _of(spec: HostSpec, arrival: Arrival, i: int) -> Arrival:
  """Return the arrival of environment i alone."""
  t, one = arrival.timestep, slice(i, i + 1)
  observation = map_leaves(lambda _, x: x[one], spec.observation_space, t.observation)
  timestep: Any = TimeStep(observation, t.reward[one], t.discount[one], t.step_type[one])
  ids, _, score, ended, run_id = arrival
  return Arrival(ids[one], timestep, score[one], ended[one], run_id[one])


def _send(spec: HostSpec, pool: WorkerPool, arrival: Arrival) -> None:
  """Send an action to both environments that is allowed there."""
  actions = [
    allowed_action(spec.action_space, _of(spec, arrival, i).timestep.observation) for i in range(2)
  ]
  pool.send(arrival.env_id, np.concatenate(actions))


def _repeats(spec: HostSpec, pool: WorkerPool, arrival: Arrival) -> bool:
  """Return whether the environments do the same for TRIAL_STEPS steps after a reset with one seed.

  They play TRIAL_STEPS steps before it, and the second one begins another episode, so that counters
  and statistics that outlive the reset differ. Both parts end after TRIAL_SECONDS. A failure is
  left to the run to report.
  """
  try:
    for _ in _until(TRIAL_STEPS):
      _send(spec, pool, arrival)
      arrival = pool.recv()
    for seeds in (-1, 3), (2, 2):
      pool.reset_in_trial(seeds)
      _send(spec, pool, arrival)
      arrival = pool.recv()
    pool.reset_in_trial((-1, -1))
    for i in _until(TRIAL_STEPS):
      t = arrival.timestep
      arrays = [*values(spec.observation_space, t.observation), t.reward]
      if i:  # an episode may have ended just before the reset
        arrays.append(t.step_type)
      if any(not np.array_equal(x[0], x[1]) for x in map(np.asarray, arrays)):
        return False
      _send(spec, pool, arrival)
      arrival = pool.recv()
  except HostError:
    pass
  return True


def _until(steps: int) -> Iterator[int]:
  """Count steps until TRIAL_SECONDS have passed."""
  end = time.monotonic() + TRIAL_SECONDS
  return itertools.takewhile(lambda _: time.monotonic() < end, range(steps))


def allowed_action(space: Any, observation: Any) -> np.ndarray:
  """Return an action [1, ...] for one environment: allowed by the mask, or the one nearest to 0."""
  if (mask := allowed_choices(space, observation, 1)) is not None:
    return best_choices(space, mask)
  low, high = action_bounds(space)
  return np.broadcast_to(np.clip(0, low, high), (1, *space.shape)).astype(space.dtype)


def _fields(name: str, observation_space: Any, action_space: Any) -> list[w.Field]:
  try:
    check_observation_space(observation_space)
  except ValueError as e:
    raise UnknownName(f'{name}: its observation {e}') from e
  parts = [*leaves(observation_space), (w.ACTION, action_space)]
  for where, space in parts:
    if space.dtype is None or space.shape is None or np.dtype(space.dtype).kind not in 'biuf':
      advice = f'{WRAPPER} make it of numbers' if where == w.ACTION else LEAVE_OUT
      raise UnknownName(f'{name}: no arrays of numbers for {where}, which is {space}; {advice}')
  fields: list[w.Field] = [(n, np.dtype(s.dtype).str, list(s.shape)) for n, s in parts]
  return [*fields, (w.REWARD, '<f8', []), *w.ENDS]
