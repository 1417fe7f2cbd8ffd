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
from podrace.types import Replay


@dataclasses.dataclass(frozen=True)
class Resolved:
  """A valid configuration, resolved once for everything that the run builds.

  Attributes:
    agent: bound to the spaces of `env` and the sizes of the run.
    env: an `Environment` under Anakin, a `HostSpec` under Sebulba.
  """

  config: Config
  agent: Any
  env: Any

  @functools.cached_property
  def replay(self) -> Replay:
    """The replay of the agent, with the sizes of the run."""
    return memory(self.agent, self.env, self.config.num_envs, self.config.unroll_length)


def resolve(config: Config) -> Resolved:
  """Make the environment of a valid configuration, and bind its agent.

  Raises:
    UsageError: if there is no such environment, or if the agent cannot act there.
    ValueError: if a network cannot be built for these spaces.
  """
  env = host.make(config.env) if config.architecture == 'sebulba' else envs.make(config.env)
  return Resolved(config, bind_run(config, env), env)
