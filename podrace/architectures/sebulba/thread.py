"""An actor thread: its pool of environments, and the actor that answers them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np

from podrace.architectures.sebulba.any_order import AnyOrder
from podrace.architectures.sebulba.inference import Inference
from podrace.architectures.sebulba.lockstep import Lockstep
from podrace.architectures.sebulba.pipe import ActorFailed, Closed, Pipe, Snapshot
from podrace.architectures.sebulba.unrolls import Shipping
from podrace.envs.host.answer_timer import AnswerTimer
from podrace.envs.host.checker import Checker
from podrace.envs.host.timesteps import everyone
from podrace.errors import HostError, RunError, UsageError
from podrace.system.threads import Worker
from podrace.types import Array, Arrival, HostEnvironment

if TYPE_CHECKING:
  from podrace.architectures.sebulba.acting import ActingProgram


class ActorThread:
  """Receives timesteps, has the actor answer them, and sends the actions, until the run is over.

  Args:
    acting: what the threads do.
    index: of this one, of this process.
    unroll_key: the key of its n-th unroll.
    number: of the unroll that it begins with.
    snapshot: where it is, if it goes on.
  """

  def __init__(
    self,
    acting: ActingProgram,
    index: int,
    device: jax.Device,
    pool: HostEnvironment,
    pipe: Pipe,
    unroll_key: Callable[[int], Array],
    number: int,
    snapshot: Snapshot | None,
  ) -> None:
    self.index, self.device, self.pool, self._pipe = index, device, pool, pipe
    self._snapshot = snapshot
    self._ids, self._length = everyone(pool.num_envs), acting.unroll_length
    self._check = Checker(acting.spec, pool.num_envs, acting.agent)
    self._timer = AnswerTimer(pool.num_envs)
    self._inference = Inference(acting, index, device, unroll_key, number)
    self._shipping = Shipping(acting, index, device, pool, pipe, number)
    self.actor: Lockstep | AnyOrder
    if acting.ordered:
      self.actor = Lockstep(acting.spec.name, index, self._length, self._inference, self._shipping)
    else:
      columns, first = pool.num_envs * acting.columns, acting.first_env(index)
      self.actor = AnyOrder(index, first, self._length, columns, self._inference, self._shipping)
    self.worker: Worker | None = None

  def start(self) -> None:
    """Begins to act."""
    self.worker = Worker(f'actor-{self.index}', self._main, at_end=self.pool.close)

  def close(self, timeout: float) -> None:
    """Waits for its end; a pool that is stuck is killed."""
    if self.worker is not None and not self.worker.wait(timeout):
      self.pool.kill()

  def check(self) -> None:
    """Raises ActorFailed if it has failed; where the message is for the user it has no traceback."""
    if self.worker is not None and self.worker.failed:
      raise ActorFailed(self.worker.message(HostError, RunError, UsageError))

  def _main(self) -> None:
    with contextlib.suppress(Closed), jax.default_device(self.device):
      self._act()

  def _act(self) -> None:
    arrival = self._begin()
    self.actor.take_params()
    state = None if self._snapshot is None else self._snapshot.agent_state
    self._inference.begin(arrival.timestep, state)
    while True:
      ids, action = self.actor.answer(arrival.env_id, arrival.timestep)
      if len(ids):
        action = np.asarray(action)
        self._shipping.watch('inference')
        self._check.action(action)
        with self._timer:
          self._timer.ask(ids)
          self.pool.send(ids, action)
      arrival = self._receive()

  def _begin(self) -> Arrival:
    """The first arrival: of fresh environments, or what a snapshot was about to answer."""
    if self._snapshot is None:
      with self._timer:
        self._timer.ask(self._ids)
        self.pool.reset()
      return self._receive()
    s, n, episodes = self._snapshot, self.pool.num_envs, self._shipping.episodes
    self.pool.restore(s.env_state, self._shipping.number * self._length)  # type: ignore[attr-defined]
    episodes.restore(s.episodes)
    timestep = jax.tree.map(np.asarray, s.timestep)
    return Arrival(self._ids, timestep, np.zeros(n, np.float32), np.zeros(n, bool), episodes.run_id)

  @property
  def silence(self) -> float:
    """Seconds that the oldest answer of an environment is due."""
    return self._timer.silence

  def _receive(self) -> Arrival:
    if self._pipe.closed:
      raise Closed
    with self._timer:
      arrival = self.pool.recv()
    self._timer.answered(arrival.env_id)
    self._check(arrival)
    restarts = self._shipping.episodes.add(arrival)
    if np.count_nonzero(restarts):
      self._shipping.restarts += int(restarts.sum())
      self.actor.restarted(arrival.env_id[restarts > 0])
    self._shipping.watch('env')
    return arrival
