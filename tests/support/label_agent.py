"""The smallest agent whose targets a stage can compute: Q-learning of one step.

Processes take it as `--agent label_agent:Regression --allow-code label_agent`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from podrace import envs
from podrace.agents import value_based
from podrace.envs.logs.recorded import Log, LogRows
from podrace.envs.logs.writing import Episode, write_log
from podrace.learner import sgd
from podrace.networks import QNetwork
from podrace.replay import Buffer, windows
from podrace.topology import AXIS
from podrace.types import FIRST, LAST, MID, ActorOutput, Replay, TrainState, Trajectory


def go_first() -> None:
  """Has a stage of this process not give way to the other processes of a loaded machine."""
  from podrace.distributed import stage

  stage.give_way = lambda: None


class Params(NamedTuple):
  network: Any
  steps: Any  # [] i32 gradient steps


class Extras(NamedTuple):
  label: Any  # [B] f32


def catch_log(episodes: int = 20) -> Log:
  """A log with the spaces of Catch, of episodes of noise: 9 steps each, reward 1 at the end."""
  rng, env = np.random.default_rng(0), envs.make('podrace:catch')
  n = 10 * episodes
  end = np.arange(n) % 10 == 9
  step_type = np.where(end, LAST, MID).astype(np.int8)
  step_type[::10] = FIRST
  rows = LogRows(
    rng.random((n, *env.observation_space.shape), np.float32),
    rng.integers(0, 3, n).astype(env.action_space.dtype),
    end.astype(np.float32),
    (~end).astype(np.float32),
    step_type,
    np.arange(0, n, 10, np.int32),
  )
  return Log('noise', env.observation_space, env.action_space, rows, {})


def write_catch_log(folder: Path) -> Path:
  """Writes `catch_log` as a data set; returns its directory."""
  log, length = catch_log(), 9
  episodes = [
    Episode(
      log.rows.observation[i : i + length + 1], log.rows.action[i : i + length],
      log.rows.reward[i + 1 : i + length + 1], True, False, 0,
    )
    for i in log.rows.starts.tolist()
  ]  # fmt: skip
  write_log(folder, log.observation_space, log.action_space, [episodes], {})
  return folder


@dataclasses.dataclass(frozen=True)
class Regression:
  """Regresses values on labels, by the parameters that it learns with `labels` = learner."""

  network: QNetwork = QNetwork(hidden=(8,))
  buffer: Buffer = Buffer(capacity=4096, batch_size=16, min_size=64, samples_per_insert=4.0)
  labels: Literal['learner', 'stage'] = 'stage'
  learning_rate: float = 3e-3
  discount: float = 0.9
  epsilon: float = 0.2
  noise: float = 0.01  # of labels, by the key

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    return windows(self.buffer, 1, num_envs, unroll_length, stack=stack)

  def init(self, key: Any) -> TrainState:
    network = self.network.init(key)
    return TrainState(Params(network, jnp.int32(0)), optax.adam(self.learning_rate).init(network))

  def initial_state(self, env_id: Any) -> Any:
    return ()

  def act(
    self, params: Params, state: Any, timestep: Any, key: Any, replace: Any = lambda action: action
  ) -> Any:
    values = self.network.step(params.network, (), timestep, per_row=True)[0][..., 0]
    epsilon = jnp.full(values.shape[:1], self.epsilon)
    action = replace(value_based.epsilon_greedy(values, epsilon, key))
    return ActorOutput(action, Extras(jnp.zeros(values.shape[:1]))), state

  def label(self, params: Params, window: Trajectory, key: Any) -> Any:
    """Targets [B] of windows [L + 1, B]."""
    step = value_based.transitions(window, self.discount)
    value = self.network.step(params.network, (), step.after)[0][..., 0].max(-1)
    return step.r_t + step.discount_t * value + self.noise * jax.random.normal(key, value.shape)

  def refresh(self, params: Params, window: Trajectory, key: Any) -> Trajectory:
    label = window.outputs.extras.label.at[0].set(self.label(params, window, key))
    return window._replace(outputs=window.outputs._replace(extras=Extras(label)))

  def learn(self, train: TrainState, sample: Any, key: Any) -> Any:
    window: Trajectory = sample.trajectory
    params: Params = train.params
    step = value_based.transitions(window, self.discount)
    if self.labels == 'stage':
      target = window.outputs.extras.label[0]
    else:
      target = self.label(params, window, jax.random.fold_in(key, lax.axis_index(AXIS)))

    def loss(network: Any) -> Any:
      q = self.network.step(network, (), step.before)[0][..., 0]
      error = target - value_based.select_action(q[..., None], step.action)[:, 0]
      total = jnp.mean(sample.weight * step.mask * error**2)
      return total, dict(loss=total, target=jnp.mean(target))

    optimizer = optax.adam(self.learning_rate)
    network, rest, metrics = sgd(loss, optimizer, params.network, train.rest)
    return TrainState(Params(network, params.steps + 1), rest), jnp.abs(sample.weight), metrics
