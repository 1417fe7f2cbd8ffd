"""A configuration with the agent, the environment and the replay that it describes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from podrace import envs
from podrace.envs.host import base as host
from podrace.hooks import memory
from podrace.settings.agents import bind_run
from podrace.settings.config import Config
from podrace.settings.validation import validate
from podrace.types import Replay


@dataclasses.dataclass(frozen=True)
class Resolved:
  """A configuration and its parts. Each part is made once, when it is first used.

  A recorded configuration was validated when its run began. A new one goes through `resolve`.
  """

  config: Config

  @functools.cached_property
  def env(self) -> Any:
    """The environment: an `Environment` under Anakin, a `HostSpec` under Sebulba.

    Raises:
      UsageError: if there is no such environment.
    """
    return self.make_env(self.config.env)

  def make_env(self, name: str) -> Any:
    """Make an environment as the run's architecture needs it."""
    return host.make(name) if self.config.architecture == 'sebulba' else envs.make(name)

  @functools.cached_property
  def agent(self) -> Any:
    """The agent, bound to the spaces of `env` and the sizes of the run.

    Raises:
      UsageError: if the agent cannot act in the environment.
      ValueError: if a network cannot be built for its spaces.
    """
    return bind_run(self.config, self.env)

  @functools.cached_property
  def replay(self) -> Replay:
    """The replay of the agent, with the sizes of the run.

    Raises:
      ValueError: if windows of whole episodes are longer than any episode.
    """
    replay = memory(self.agent, self.env, self.config.num_envs, self.config.unroll_length)
    w, longest = replay.windows, longest_episode(self.env)
    if w is not None and w.at_first and longest is not None and w.length > longest:
      raise ValueError(
        f'a sequence of {w.length} steps is longer than the episodes of {self.config.env}, of at '
        f'most {longest}: take --agent.recurrence.sequence {longest} or less'
      )
    return replay


def longest_episode(env: Any) -> int | None:
  """Return the steps of the longest episode of an environment; None if they are not known."""
  while env is not None:
    if (steps := getattr(env, 'longest_episode', None)) is not None:
      return int(steps)
    env = getattr(env, 'jax', None) or getattr(env, 'dynamics', None)  # a HostSpec has its own
  return None


def resolve(config: Config) -> Resolved:
  """Validate a configuration, once for everything that is made of it.

  Raises:
    UsageError: if settings are invalid, or contradict each other.
  """
  validate(config)
  return Resolved(config)
