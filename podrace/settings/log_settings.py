"""The log of a configuration: its checks, its spaces and its environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from podrace import hooks
from podrace.agents import FROM_LOGS
from podrace.envs.logs.share import NO_LOG, parse_share
from podrace.errors import UsageError
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.system.files.reading import read_object

SPACES = 'spaces.json'  # in the directory of a run without an environment


class LogSpaces(NamedTuple):
  """The spaces of a log, in place of an environment."""

  name: str
  observation_space: Any
  action_space: Any


def replays_only(config: Config) -> bool:
  """Return whether all environments of a run replay its log."""
  p, q = parse_share(config.log_share) if config.log else NO_LOG
  return p == q


def check(config: Config) -> None:
  """Raise UsageError for settings that contradict each other.

  The data set is read later.
  """
  buffer = getattr(hooks.innermost(config.agent), 'buffer', None)
  share = getattr(buffer, 'online_share', None)
  if not config.log:
    if config.log_share != Config.log_share:
      raise UsageError(f'--log-share {config.log_share} needs --log')
    if not config.env:
      raise UsageError('--env LIB:NAME is needed, or --log with a data set to learn from')
    if share is not None:
      raise UsageError('--agent.buffer.online-share needs --log, and --log-share below 1')
    return
  p, q = parse_share(config.log_share)
  if p < q and not config.env:
    raise UsageError(
      f'--log-share {config.log_share}: the rest of the environments act, and there is no --env'
    )
  if not config.env and config.eval_every and not config.eval_env:
    raise UsageError('--eval-every needs --env or --eval-env: a log has no environment to act in')
  if share is not None and p == q:
    raise UsageError('--agent.buffer.online-share needs --log-share below 1: no environment acts')
  elsewhere = hooks.labels_elsewhere(config.agent)  # then the log has a table of its own
  if share is not None and config.replay != 'device' and not elsewhere:
    raise UsageError(
      f'--agent.buffer.online-share is for --replay device and for --agent.labels stage, not for '
      f'--replay {config.replay}'
    )
  if config.envs == 'remote':
    raise UsageError(
      '--envs remote: environments that replay a log are local; leave out one of them'
    )
  name = agent_name(hooks.innermost(config.agent))
  if not hooks.learns_from_replay(config.agent) or (':' not in name and name not in FROM_LOGS):
    raise UsageError(
      f'--log: {name} learns from its own actions only: use --agent bc, dqn or r2d2 for discrete '
      'actions, and bc, sac, d4pg or qtopt for continuous ones'
    )


def recorded_spaces(log: str, run_dir: Path) -> LogSpaces | None:
  """Return the spaces that a run directory has of a log; None if it has none.

  Raises:
    UsageError: if the file is damaged.
  """
  from podrace.envs.logs.recorded_spaces import spaces_in

  path = run_dir / SPACES
  record = read_object(path, {})
  try:
    return None if record is None else LogSpaces(log, *spaces_in(record))
  except UsageError as e:
    raise UsageError(f'{path}: {e}; restore it, or train on the data set anew') from e


def check_spaces_of(config: Config, env: Any) -> None:
  """Raise UsageError if the log has other spaces than the environment. Reads its metadata alone."""
  from podrace.envs.logs.minari_files import read_spaces
  from podrace.envs.logs.recorded_spaces import check_spaces

  check_spaces(LogSpaces(config.log, *read_spaces(config.log)), env, config.env)


def environment(config: Config, log: Any, env: Any) -> Any:
  """Return the environment that replays a log.

  Args:
    config: the configuration.
    log: its data set.
    env: the environment in which a part acts, an `Environment` or a `HostSpec`, with the spaces of
      the log; None if none does.
  """
  from podrace.envs.host.base import HostSpec
  from podrace.envs.logs.log_environment import LogEnvironment
  from podrace.envs.logs.log_pool import host_spec

  share = parse_share(config.log_share)
  if config.architecture == 'sebulba':
    return host_spec(log, share, env)
  assert not isinstance(env, HostSpec), 'only Sebulba has environments on the host'
  return LogEnvironment(log, share, env)
