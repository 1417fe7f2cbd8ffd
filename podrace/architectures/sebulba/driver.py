"""The loop of a learner with separate actors: take a batch, learn, publish the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from podrace.architectures.sebulba.learning import LearningProgram, State
from podrace.architectures.sebulba.sources import Source
from podrace.errors import RunError
from podrace.types import Array


class SebulbaDriver:
  """The `Architecture` in which the thread that calls `advance` is the learner.

  Args:
    learning: the programs of the learner.
    source: returns the batches.
    publish: called with the number of updates made and the parameters after them.
  """

  ready = 0  # `advance` looks at `cancelled` before each batch

  def __init__(
    self, learning: LearningProgram, source: Source, publish: Callable[[int, Any], None]
  ) -> None:
    self.learning, self.source, self._publish = learning, source, publish
    self.mesh, self.init, self.windows = learning.mesh, learning.init, learning.windows
    self.health, self.saved_replay = learning.health, source.saved_replay
    self.parts, self.finish, self.close = source.parts, source.finish, source.close
    self._update = 0  # number of updates made

  @property
  def shapes(self) -> State:
    """A state of shapes, dtypes and shardings, with the actors' snapshots."""
    return self.learning.shapes._replace(actors=self.source.snapshots)

  def compile(self) -> None:
    """Compile the learner, and open the source."""
    self.learning.compile()
    self.source.open()

  def start(self, state: State, keys: Array) -> None:
    """Begin to act from `state`."""
    self._update = int(jax.device_get(state.update))
    self.source.start(state, jax.random.split(keys[0], 3)[1])

  def advance(self, state: State, updates: int, cancelled: Callable[[], bool]) -> tuple[State, int]:
    """Make up to `updates` updates; returns the state and the number made."""
    alone = jax.process_count() == 1  # several processes must do the same
    learned, made, before = False, 0, state.train.params
    while made < updates:
      try:
        batch = self.source.take(self._update, cancelled if alone else lambda: False)
      except RunError:
        # Other processes make the whole call, and would wait for this one.
        if not ((learned or made) and alone):
          raise
        break  # the next call raises it again, with a state that can be saved
      if batch is None:
        break
      if batch.data is not None:
        state, priority = self.learning.learn(state, batch)
        self.source.learned(batch, priority, state.train.params)
        learned = True
      if batch.last:
        self._update, made = self._update + 1, made + 1
        state = self.learning.end_update(state, self._update, before, batch)
        before = state.train.params
        self._publish(self._update, before)
    return jax.block_until_ready(state), made

  def read_log(self, state: State) -> tuple[dict[str, Any], State]:
    """Return a summary since the last reading, and the state after it."""
    return self.learning.read_log(state, *self.source.read())
