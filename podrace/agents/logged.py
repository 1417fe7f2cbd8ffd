"""An agent in environments of which a part replays a log, where it takes the recorded actions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podrace import hooks
from podrace.envs.logs.log_environment import FLAG, INNER, RECORDED
from podrace.envs.logs.share import Share
from podrace.errors import UsageError
from podrace.learner import Learned
from podrace.replay.windows import replay_of
from podrace.types import ActorOutput, Array, Replay, Sample, TimeStep, TrainState, Trajectory


@dataclasses.dataclass(frozen=True)
class Logged:
  """`agent`, bound to the spaces of the plain environment. It has the optional hooks of `agent`.

  It takes the observations of `podrace.envs.logs.log_environment.LogEnvironment`.
  """

  agent: Any
  share: Share  # p of every q environments replay the log

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__') or name == 'agent':
      raise AttributeError(name)
    return getattr(self.agent, name)

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    train: TrainState = self.agent.init(key)
    return train

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.agent.initial_state(env_id)

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay of `agent`, which knows the streams of the log."""
    replay: Replay = self.agent.memory(num_envs, unroll_length, stack)
    return replay_of(dataclasses.replace(replay.windows, logged=self.share))

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]: the recorded ones, where there are any.

    Raises:
      UsageError: if the agent's extras do not belong to the recorded actions.
    """
    seen: Any = timestep.observation
    is_recorded, recorded = seen[FLAG] > 0, seen[RECORDED]
    timestep = timestep._replace(observation=seen[INNER])

    def replace(action: Array) -> Array:
      taken = recorded.astype(action.dtype)
      if self.share[0] == self.share[1]:
        return taken  # the program then leaves out the computation of the agent's action
      return jnp.where(is_recorded.reshape(-1, *(1,) * (action.ndim - 1)), taken, action)

    output, state = hooks.act_with(self.agent, params, state, timestep, key, replace)
    if jax.tree.leaves(output.extras) and not hooks.replaces_actions(self.agent):
      raise UsageError(
        f'{type(hooks.innermost(self.agent)).__name__} records extras of its own actions, and a '
        'log has other actions: its `act` needs the argument `replace`, see podrace/hooks.py'
      )
    return output, state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    learned: Learned = self.agent.learn(
      train, sample._replace(trajectory=_plain(sample.trajectory)), key
    )
    return learned

  @property
  def refresh(self) -> Any:
    """The hook of `agent`, for windows with the observations of a log."""
    inner = self.agent.refresh

    def refresh(params: Any, window: Trajectory, key: Array) -> Trajectory:
      fresh: Trajectory = inner(params, _plain(window), key)
      observation = window.timesteps.observation
      return fresh._replace(timesteps=fresh.timesteps._replace(observation=observation))

    return refresh


def _plain(trajectory: Trajectory) -> Trajectory:
  """Return a trajectory with the observations that `agent` is bound to."""
  timesteps = trajectory.timesteps
  observation: Any = timesteps.observation
  return trajectory._replace(timesteps=timesteps._replace(observation=observation[INNER]))
