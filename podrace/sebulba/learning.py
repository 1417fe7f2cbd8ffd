"""The learner's part of a run whose acting is on the host, or elsewhere: its updates and its log."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from podrace.envs.host.base import Totals
from podrace.sebulba.program import Sebulba, State
from podrace.types import Array


class Learner:
  """Makes the updates of a `State`, in the thread that calls."""

  def __init__(self, program: Sebulba) -> None:
    self._program = program

  def compile(self, batch: Any) -> None:
    """For batches of these shapes: of `learn_sample` where replay is not on the learners' devices,
    else of `learn`."""
    p, s = self._program, self._program.shapes
    given = (s.train.params, s.train.rest)
    if p.hosted:
      lowered = p.learn_sample.lower(*given, s.log, s.key, s.update, s.update, batch)
    else:
      lowered = p.learn.lower(*given, s.memory, s.log, s.key, s.update, batch)
    self._learn = lowered.compile()

  def learn(self, state: State, batch: Any) -> State:
    """One update from trajectories that lie on the learners' mesh."""
    s = state
    train, memory, log, update = self._learn(
      s.train.params, s.train.rest, s.memory, s.log, s.key, s.update, batch
    )
    return s._replace(train=train, memory=memory, log=log, update=update)

  def learn_sample(self, state: State, i: int, data: Any) -> tuple[State, Array]:
    """The i-th step of an update, from a sample; and its priorities. `end_update` comes after the
    last."""
    s = state
    train, log, priority = self._learn(
      s.train.params, s.train.rest, s.log, s.key, s.update, self._placed(i), data
    )
    return s._replace(train=train, log=log), priority

  def end_update(self, state: State, update: int) -> State:
    """The state with so many updates made."""
    return state._replace(update=self._placed(update))

  def _placed(self, number: int) -> Array:
    return jax.device_put(np.int32(number), self._program.shardings.update)

  def read_log(
    self, state: State, episodes: Totals, host: dict[str, Any]
  ) -> tuple[dict[str, Any], State]:
    """What there is to tell since the last time (see `Anakin.read_log`), and the state after."""
    log = jax.device_get(state.log)
    summary = dict(
      metrics={k: x / log.samples if log.samples else np.nan for k, x in log.sums.items()},
      episodes=episodes.count,
      return_sum=episodes.return_sum,
      return_deviation=episodes.return_deviation,
      length_sum=episodes.length_sum,
      host=host,
    )
    zero = jax.tree.map(np.zeros_like, log)._replace(broken=log.broken)
    return summary, state._replace(log=jax.device_put(zero, self._program.shardings.log))

  def health(self, state: State) -> tuple[Any, Any]:
    """The first update whose loss was not finite or -1; whether all parameters are finite."""
    return jax.device_get(self._program.health(state))
