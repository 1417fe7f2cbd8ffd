"""A configuration with the agent, the environment and the replay that it describes."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from podrace import envs
from podrace.envs.host import base as host
from podrace.envs.logs.share import parse_share
from podrace.hooks import memory
from podrace.settings import log_settings
from podrace.settings.agents import bind_run
from podrace.settings.config import Config
from podrace.settings.validation import needs_sebulba, validate
from podrace.types import Replay


@dataclasses.dataclass(frozen=True)
class Resolved:
  """A configuration and its parts. Each part is made once, when it is first used.

  A recorded configuration was validated when its run began. A new one goes through `resolve`.

  Attributes:
    config: the configuration.
    run_dir: the run directory that records the configuration; None for a new run.
  """

  config: Config
  run_dir: Path | None = None

  @functools.cached_property
  def env(self) -> Any:
    """The environment: an `Environment` under Anakin, a `HostSpec` under Sebulba.

    With a log it is one that replays the log, and `acting.env` the environment alone.

    Raises:
      UsageError: if there is no such environment or log.
    """
    if self.log is None:
      make = host.make if self.config.architecture == 'sebulba' else envs.make
      return make(self.config.env)
    acting = self.acting.env if self.config.env else None
    return log_settings.environment(self.config, self.log, acting)

  @functools.cached_property
  def log(self) -> Any:
    """The data set of `config.log`, read into memory; None if there is none.

    Raises:
      UsageError: if it is damaged, or of other spaces than the environment.
    """
    from podrace.envs.logs.minari_files import read_log

    if not self.config.log:
      return None
    if self.config.env:  # first, as reading a large data set takes a minute
      log_settings.check_spaces_of(self.config, self.acting.env)
    return read_log(self.config.log)

  @functools.cached_property
  def acting(self) -> Resolved:
    """The same agent without the log: in the environment, or in the spaces of the log alone."""
    if not self.config.log:
      return self
    if not self.config.env:
      return WithoutEnvironment(self.config, self.run_dir)
    config = dataclasses.replace(self.config, log='', log_share=Config.log_share)
    return Resolved(config, self.run_dir)

  def make_env(self, name: str) -> Any:
    """Make an environment for an evaluation: on the host if the run acts there, or must."""
    on_host = self.config.architecture == 'sebulba' or needs_sebulba(name)
    return host.make(name) if on_host else envs.make(name)

  @functools.cached_property
  def agent(self) -> Any:
    """The agent, bound to the spaces of `env` and the sizes of the run.

    Raises:
      UsageError: if the agent cannot act in the environment.
      ValueError: if a network cannot be built for its spaces.
    """
    if self.log is None:
      return bind_run(self.config, self.env)
    from podrace.agents.logged import Logged

    return Logged(self.acting.agent, parse_share(self.config.log_share))

  @functools.cached_property
  def replay(self) -> Replay:
    """The replay of the agent, with the sizes of the run.

    Raises:
      ValueError: if windows of whole episodes are longer than any episode, or if replay could be
        without the beginning of an episode.
    """
    replay = memory(self.agent, self.env, self.config.num_envs, self.config.unroll_length)
    w, longest = replay.windows, longest_episode(self.env)
    if w is None or not w.at_first or longest is None:
      return replay
    if w.length > longest:
      raise ValueError(
        f'a sequence of {w.length} steps is longer than the episodes of {self.config.env}, of at '
        f'most {longest}: take --agent.recurrence.sequence {longest} or less'
      )
    if w.buffer.capacity < (least := w.num_envs * (longest + w.length)):
      raise ValueError(
        f'a capacity of {w.buffer.capacity} for {w.num_envs} environments has no room for an '
        f'episode of {longest} steps and a sequence of {w.length} of each: replay would at times '
        'hold no window that begins with an episode, and nothing would be learned; give '
        f'--agent.buffer.capacity {least} or more, or fewer environments'
      )
    return replay


def longest_episode(env: Any) -> int | None:
  """Return the steps of the longest episode of an environment; None if they are not known."""
  while env is not None:
    if (steps := getattr(env, 'longest_episode', None)) is not None:
      return int(steps)
    env = getattr(env, 'jax', None) or getattr(env, 'dynamics', None)  # a HostSpec has its own
  return None


@dataclasses.dataclass(frozen=True)
class WithoutEnvironment(Resolved):
  """A configuration that learns from a log alone: its agent acts in no environment."""

  @functools.cached_property
  def env(self) -> Any:
    """The spaces of the log, of which a run directory has a copy."""
    from podrace.envs.logs.minari_files import read_spaces

    log = self.config.log
    recorded = log_settings.recorded_spaces(log, self.run_dir) if self.run_dir else None
    return recorded or log_settings.LogSpaces(log, *read_spaces(log))

  @functools.cached_property
  def log(self) -> Any:
    """None, as the agent acts."""
    return None

  @property
  def acting(self) -> Resolved:
    """Itself."""
    return self


def resolve(config: Config) -> Resolved:
  """Validate a configuration, once for everything that is made of it.

  Raises:
    UsageError: if settings are invalid, or contradict each other.
  """
  validate(config)
  return Resolved(config)
