"""Checks of a configuration before a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from podrace import hooks
from podrace.agents import AGENTS
from podrace.envs.libraries import HOST_LIBRARIES, LIBRARIES
from podrace.errors import UsageError, unknown
from podrace.fields import check_types, flag, range_of
from podrace.settings import log_settings
from podrace.settings.agents import agent_class, agent_name, explain_untyped, untyped_attributes
from podrace.settings.config import MOST_SEEDS, Basics, Common, Config
from podrace.system.files.schema import is_checkpoint

STEP_COUNTS = (
  'importance_steps',
  'online_share_steps',
)  # settings that may be as large as --total-steps
STEPS_FIELDS = ('total_steps', 'log_every', 'checkpoint_every', 'eval_every')  # of a configuration
LARGEST = 3.4028234e38  # the largest float32


def check_numbers(settings: Any, prefix: str = 'agent') -> None:
  """Raise UsageError for a number in an agent's settings that float32 or int32 cannot hold."""
  for f in dataclasses.fields(settings):
    value, name = getattr(settings, f.name), f'{prefix}.{flag(f.name)}'
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith('podrace.'):
      check_numbers(value, name)
    for number in value if isinstance(value, tuple) else (value,):
      if isinstance(number, float) and not abs(number) <= LARGEST:  # also NaN
        limits = range_of(settings, f.name)
        if number != math.inf or not (limits and limits.is_limit):
          raise UsageError(f'--{name} must be a finite number, not {number}')
      elif isinstance(number, int) and abs(number) >= 2**31 and f.name not in STEP_COUNTS:
        raise UsageError(f'--{name} must be less than 2^31, not {number}')


def check_batch(agent: Any) -> None:
  """Raise UsageError if a batch is larger than the capacity of the replay."""
  owner = getattr(agent, 'buffer', agent)
  size, capacity = getattr(owner, 'batch_size', 0), getattr(owner, 'capacity', math.inf)
  if size > capacity:
    batch, limit = (option_of_replay(agent, name) for name in ('batch_size', 'capacity'))
    raise UsageError(f'{batch} {size} is more than {limit} {capacity}')


def option_of_replay(agent: Any, field: str) -> str:
  """Return the option of a setting of replay: of the agent's Buffer, or of the agent itself."""
  inner = hooks.innermost(agent)
  parts = [f.name for f in dataclasses.fields(inner)]
  buffers = [flag(x) for x in parts if hasattr(getattr(inner, x), 'samples_per_insert')]
  return f'--{".".join(["agent", *buffers[:1], flag(field)])}'


def library_of(env: str) -> str:
  """Return LIB of an environment's name, LIB:NAME."""
  return env.partition(':')[0]


def needs_sebulba(env: str, envs: str = 'local', replay: str = 'device') -> bool:
  """Return whether only Sebulba supports the environment, remote environments or the replay."""
  return library_of(env) in HOST_LIBRARIES or envs == 'remote' or replay != 'device'


def validate(config: Config) -> None:
  """Raise UsageError for settings that are invalid, or contradict each other."""
  if isinstance(config.agent, type):
    name = config.agent.__name__
    raise UsageError(f'agent is the class {name}, expected one of its objects, as {name}()')
  if not isinstance(config.env, str):
    raise UsageError(
      f'env is an object of {type(config.env).__name__}, expected a name, LIB:NAME; your own are '
      'named python:MODULE.FUNCTION, see docs/own.md'
    )
  try:
    check_types(config)
  except ValueError as e:
    raise UsageError(str(e)) from e
  if agent_name(config.agent) in AGENTS:
    check_numbers(config.agent)
    check_batch(config.agent)
  if config.seeds % hooks.settings(config.agent):
    raise UsageError(
      f'--seeds {config.seeds} must be a multiple of {hooks.settings(config.agent)}, the number of '
      'settings'
    )
  check_basics(config)
  _check_common(config)
  if config.architecture == 'anakin':
    _check_anakin(config)
  else:
    _check_sebulba(config)


def check_at_least(settings: Any, least: int, *names: str) -> None:
  """Raise UsageError for the first field of `names` that is less than `least`."""
  for name in names:
    if (value := getattr(settings, name)) < least:
      expected = f'be at least {least}' if least else 'not be negative'
      raise UsageError(f'--{flag(name)} must {expected}, not {value}')


def check_basics(config: Basics) -> None:
  """Raise UsageError for invalid settings that every run has."""
  check_at_least(config, 1, 'num_envs', 'unroll_length', 'total_steps', 'keep')
  check_at_least(config, 0, 'log_every', 'checkpoint_every', 'seed')
  for f in dataclasses.fields(config):
    value, subject = getattr(config, f.name), f'--{flag(f.name)}'
    if f.name in STEPS_FIELDS:
      subject += f' {value} in updates of {config.steps_per_update} steps'
      value = -(-value // config.steps_per_update)
    if isinstance(value, int) and value >= 2**31 and f.name != 'seed':
      raise UsageError(f'{subject} must be less than 2^31, not {value}')
  if (steps := config.total_updates * config.unroll_length) >= 2**31:
    raise UsageError(
      f'--total-steps {config.total_steps} are {steps} in each of --num-envs {config.num_envs}, '
      'expected less than 2^31: more environments have fewer steps each'
    )


def _check_common(config: Config) -> None:
  log_settings.check(config)
  _check_labels(config)
  check_at_least(config, 1, 'seeds', 'eval_episodes')
  check_at_least(config, 0, 'eval_every')
  has_options = config.eval_video or config.eval_env or config.eval_episodes != Config.eval_episodes
  if config.eval_every == 0 and has_options:
    raise UsageError('--eval-env, --eval-episodes and --eval-video need --eval-every')
  if not is_checkpoint(config.init_checkpoint):
    raise UsageError(f'--init-checkpoint is newest, best or a step, not {config.init_checkpoint!r}')
  if not config.init_from and (config.init_checkpoint, config.init_member) != ('newest', None):
    raise UsageError('--init-checkpoint and --init-member need --init-from')
  _check_agreement(config)
  check_at_least(config, 1, 'model_devices')
  if config.seeds > MOST_SEEDS:
    raise UsageError(f'--seeds must be at most {MOST_SEEDS:,}, not {config.seeds:,}')
  if config.seed + config.seeds > 2**32:
    raise UsageError(f'--seed must be less than 2^32, with all --seeds, not {config.seed}')


def _check_labels(config: Config) -> None:
  """Raise UsageError if a stage has to compute the targets, and there is no place for it."""
  if not hooks.labels_elsewhere(config.agent):
    return
  if config.architecture == 'anakin':
    raise UsageError(
      '--agent.labels stage is for --architecture sebulba with --replay host or service; this run '
      'is anakin, where the learner computes them: leave it out'
    )
  if config.replay == 'device':
    raise UsageError(
      '--agent.labels stage needs --replay host, or service with `podrace label`, not device'
    )
  buffer = getattr(hooks.innermost(config.agent), 'buffer', None)
  if exponent := getattr(buffer, 'priority_exponent', 0.0):
    raise UsageError(
      f'--agent.buffer.priority-exponent {exponent}: with --agent.labels stage windows are drawn '
      'uniformly; leave it out'
    )
  if config.model_devices > 1:
    raise UsageError(f'--model-devices {config.model_devices}: not with --agent.labels stage')


def _check_agreement(config: Config) -> None:
  if config.gossip_staleness not in (0, 1):
    raise UsageError(f'--gossip-staleness must be 0 or 1, not {config.gossip_staleness}')
  if config.agree == 'gossip':
    if config.architecture == 'sebulba':
      raise UsageError(
        '--agree gossip is for --architecture anakin; this run is sebulba, with all-reduce'
      )
    return
  for name in ('gossip_graph', 'gossip_staleness'):
    if getattr(config, name) != getattr(Config, name):
      raise UsageError(f'--{flag(name)} {getattr(config, name)} needs --agree gossip')


def _check_anakin(config: Config) -> None:
  if library_of(config.env) in HOST_LIBRARIES:
    raise UsageError(f'{config.env} runs on the host: give --architecture sebulba')
  if config.replay != 'device':
    raise UsageError(
      f'--replay {config.replay}: under anakin replay is on the device; leave it out, or give '
      '--architecture sebulba'
    )
  if config.envs != 'local':  # checked first, since it changes --lag
    raise UsageError(f'--envs {config.envs} is for --architecture sebulba; this run is anakin')
  common = {f.name for f in dataclasses.fields(Common)}
  for f in dataclasses.fields(config):
    if f.name not in common and getattr(config, f.name) != f.default:
      raise UsageError(f'--{flag(f.name)} is for --architecture sebulba; this run is anakin')


def _check_sebulba(config: Config) -> None:
  if config.seeds > 1:
    raise UsageError(
      f'--seeds {config.seeds}: sebulba trains one agent in a run. Start a run for each --seed; '
      'podrace plot draws them as one line'
    )
  for name in ('actor_threads', 'max_lag'):
    if getattr(config, name) < 1:
      raise UsageError(f'--{flag(name)} must be at least 1, not {getattr(config, name)}')
  if not 0 < config.env_deadline < math.inf:
    raise UsageError(f'--env-deadline must be more than 0, not {config.env_deadline}')
  if config.envs == 'remote' and library_of(config.env) in LIBRARIES:
    raise UsageError(
      f'--envs remote: {config.env} is in JAX and stays with the learner; environments of '
      f'{", ".join(HOST_LIBRARIES)} can be remote'
    )
  if config.envs == 'remote' and config.lag != 'async':
    raise UsageError(f'--envs remote needs --lag async, not {config.lag}')
  if config.replay == 'service' and config.lag != 'async':
    raise UsageError(f'--replay service needs --lag async, not {config.lag}')
  if config.replay == 'service' and config.envs == 'remote':
    raise UsageError('--replay service: environments are in `podrace act`; leave out --envs remote')
  if not 0 <= config.max_wait_ms <= 10_000:
    raise UsageError(f'--max-wait-ms must be 0 to 10000, not {config.max_wait_ms}')
  if config.max_wait_ms != Config.max_wait_ms and config.envs == 'local':
    raise UsageError(f'--max-wait-ms {config.max_wait_ms:g} is for --envs remote; leave it out')
  if config.max_lag != Config.max_lag and config.lag != 'async':
    raise UsageError(
      f'--max-lag {config.max_lag} is for --lag async, and the lag is {config.lag}: leave it out'
    )
  for name in ('actor_groups', 'env_batch_size', 'env_threads'):
    if getattr(config, name) < 0:
      raise UsageError(f'--{flag(name)} must not be negative, not {getattr(config, name)}')
  if config.env_threads and (config.envs == 'remote' or library_of(config.env) in LIBRARIES):
    raise UsageError(
      f'--env-threads {config.env_threads}: threads step environments on the host, in this '
      'process; leave it out'
    )


def check_agent_options(agent: Any, args: Iterable[str]) -> None:
  """Raise UsageError for an --agent.FIELD that the agent does not have."""
  for arg in args:
    name = arg.partition('=')[0].replace('_', '-')
    if name.startswith('--agent.'):
      _check_option(agent, name)


def agents_with(setting: str) -> list[str]:
  """Return the names of the agents that have a setting, spelled as on the command line."""
  return [
    name
    for name in AGENTS
    if setting in (flag(f.name) for f in dataclasses.fields(agent_class(name)))
  ]


def _check_option(agent: Any, name: str) -> None:
  settings, prefix = agent, '--agent.'
  for part in name.removeprefix(prefix).split('.'):
    fields = {flag(f.name): f.name for f in dataclasses.fields(settings)}
    if part not in fields:
      plain = dict(untyped_attributes(settings)).get(part.replace('-', '_'))
      if isinstance(plain, bool | int | float | str):
        raise UsageError(
          f'{agent_name(settings)}: {explain_untyped(part.replace("-", "_"), plain)}'
        )
      if prefix == '--agent.' and (owners := agents_with(part)):
        raise UsageError(
          f'unknown option of {agent_name(agent)} {name!r}: it is a setting of {", ".join(owners)}'
        )
      raise unknown(f'option of {agent_name(agent)}', name, [prefix + f for f in fields])
    settings, prefix = getattr(settings, fields[part]), f'{prefix}{part}.'
    if not dataclasses.is_dataclass(settings):
      return
