"""What a run is made of. Importing this does not import jax."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from podrace import hooks
from podrace.agents import AGENTS, RELATED, agents_for
from podrace.envs.registry import HOST_LIBRARIES, LIBRARIES
from podrace.errors import UsageError
from podrace.fields import EnvName, FilePath, PlainText, check_types, expected, range_of
from podrace.settings import user_code
from podrace.settings.user_code import CLASS, KIND, KINDS, TRAIN
from podrace.system import importing
from podrace.system.process import check_jax

VERSION = 1  # of config.json


@dataclasses.dataclass(frozen=True)
class Basics:
  """What every run has, of agents and of rules."""

  agent: Any  # a frozen dataclass; its fields are --agent.FIELD
  env: EnvName = 'podrace:catch'  # LIB:NAME, and options after commas: podrace:memory,length=20
  num_envs: int = 64  # over all devices; each seed has so many
  unroll_length: int = 16  # environment steps between updates
  total_steps: int = 1_000_000  # environment steps, of each seed
  seed: int = 0
  devices: int | None = None
  # ^ how many, of all processes together, or, under sebulba, of each process; None: all
  log_every: int = 0  # steps between metrics; 0: 1% of the run
  checkpoint_every: int = 0  # steps between checkpoints; 0: a minute
  keep: int = 3  # how many checkpoints

  @property
  def steps_per_update(self) -> int:
    return self.num_envs * self.unroll_length

  @property
  def total_updates(self) -> int:
    return -(-self.total_steps // self.steps_per_update)

  def updates(self, steps: int) -> int:
    """`steps` in updates, at least 1."""
    return max(1, round(steps / self.steps_per_update))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common(Basics):
  """What every architecture reads of a run's settings."""

  architecture: Literal['anakin', 'sebulba'] = 'anakin'
  seeds: int = 1  # independent agents trained in one program, from seed, seed + 1, ...
  eval_every: int = 0  # steps between evaluations into eval.jsonl, while training goes on; 0: none
  eval_episodes: int = 32  # of each evaluation, and each seed
  eval_env: EnvName = ''  # where they play: another opponent, or unseen levels; '': where it trains
  eval_video: bool = False  # films an episode of each, into videos/
  init_from: FilePath = ''  # a run directory: begins with the parameters of its newest checkpoint
  agree: Literal['all-reduce', 'gossip'] = 'all-reduce'
  # ^ gossip (anakin): average parameters with a neighbour, not gradients
  gossip_graph: Literal['exponential', 'ring'] = 'exponential'
  # ^ of gossip, see docs/gossip.md
  gossip_staleness: int = 0  # of gossip, in updates: 0 or 1
  model_devices: int = 1  # parameters are split over so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Common):
  """One run, exactly; recorded as config.json. Its own fields are those that only Sebulba reads."""

  lag: Literal['0', '1', 'async'] = '1'  # sebulba: of the acting policy, in updates; async: any
  max_lag: int = 4  # sebulba: with lag async, the most
  actor_devices: PlainText = ''
  # ^ sebulba: which act, as 0,1 (default: those that don't learn, else the first quarter; of one, that)
  learner_devices: PlainText = ''
  # ^ sebulba: which learn, as 2,3 (default: those that don't act; of one, that; --replay service: all)
  actor_threads: int = 2  # sebulba: for each actor device
  env_batch_size: int = 0  # sebulba: act on so many of a thread as are ready; 0: all together
  env_threads: int = 0  # sebulba: that step environments, over all pools; 0: one for each core
  env_deadline: float = 60.0  # sebulba: seconds that environments may take to answer
  envs: Literal['local', 'remote'] = 'local'  # sebulba: remote ones come by `podrace envs`
  max_wait_ms: float = 5.0  # remote: how long those that came wait for others, to be acted on
  replay: Literal['device', 'host', 'service'] = 'device'
  # ^ sebulba: where the past is, for agents that learn from it; service: `podrace replay`


OF_STEPS = ('importance_steps',)  # settings that may be as large as --total-steps
LARGEST = 3.4028234e38  # of a float32


def check_numbers(settings: Any, prefix: str = 'agent') -> None:
  """Raises UsageError for numbers in an agent's settings that no network can be trained with, whatever they are of."""
  for f in dataclasses.fields(settings):
    value, name = getattr(settings, f.name), f'{prefix}.{flag(f.name)}'
    if isinstance(value, float) and not abs(value) <= LARGEST:  # of NaN, too
      limits = range_of(settings, f.name)
      if value != math.inf or not (limits and limits.is_limit):
        raise UsageError(f'--{name} must be a finite number, not {value}')
    elif isinstance(value, int) and abs(value) >= 2**31 and f.name not in OF_STEPS:
      raise UsageError(f'--{name} must be less than 2^31, not {value}')
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith('podrace.'):
      check_numbers(value, name)


def check_batch(agent: Any) -> None:
  """Raises UsageError if an agent learns from more at once than it remembers."""
  buffer = getattr(agent, 'buffer', None)
  if buffer is not None and buffer.batch_size > buffer.capacity:
    raise UsageError(
      f'--agent.buffer.batch-size {buffer.batch_size} is more than --agent.buffer.capacity '
      f'{buffer.capacity}, all that is remembered'
    )


def library_of(env: str) -> str:
  return env.partition(':')[0]


def needs_sebulba(env: str, envs: str = 'local', replay: str = 'device') -> bool:
  """Whether there is but that architecture for it."""
  return library_of(env) in HOST_LIBRARIES or envs == 'remote' or replay != 'device'


def validate(config: Config) -> None:
  """Raises UsageError for settings that can't be right."""
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
      f'--seeds {config.seeds}: {hooks.settings(config.agent)} settings need a multiple of as many'
    )
  check_basics(config)
  _check_common(config)
  if config.architecture == 'anakin':
    _check_anakin(config)
  else:
    _check_sebulba(config)


def at_least(settings: Any, least: int, *names: str) -> None:
  """Raises UsageError for the first of these fields that is less."""
  for name in names:
    if (value := getattr(settings, name)) < least:
      expected = f'be at least {least}' if least else 'not be negative'
      raise UsageError(f'--{flag(name)} must {expected}, not {value}')


def check_basics(config: Basics) -> None:
  """Raises UsageError for settings of any run that can't be right."""
  at_least(config, 1, 'num_envs', 'unroll_length', 'total_steps', 'keep')
  at_least(config, 0, 'log_every', 'checkpoint_every', 'seed')
  for name in ('num_envs', 'unroll_length', 'total_updates'):
    if getattr(config, name) >= 2**31:
      what = '--' + flag(name)
      if name == 'total_updates':
        what = f'--total-steps {config.total_steps} in updates of {config.steps_per_update} steps'
      raise UsageError(f'{what} must be less than 2^31, not {getattr(config, name)}')


def _check_common(config: Config) -> None:
  at_least(config, 1, 'seeds', 'eval_episodes')
  at_least(config, 0, 'eval_every')
  given = config.eval_video or config.eval_env or config.eval_episodes != Config.eval_episodes
  if config.eval_every == 0 and given:
    raise UsageError(
      '--eval-env, --eval-episodes and --eval-video are for --eval-every, which is not given'
    )
  _check_agreement(config)
  at_least(config, 1, 'model_devices')
  if config.seed + config.seeds > 2**32:
    raise UsageError(f'--seed must be less than 2^32, with all --seeds, not {config.seed}')


def _check_agreement(config: Config) -> None:
  if config.gossip_staleness not in (0, 1):
    raise UsageError(f'--gossip-staleness must be 0 or 1, not {config.gossip_staleness}')
  if config.agree == 'gossip':
    if config.architecture == 'sebulba':
      raise UsageError(
        '--agree gossip is for --architecture anakin; this run is sebulba, whose learners agree by all-reduce'
      )
    return
  for name in ('gossip_graph', 'gossip_staleness'):
    if getattr(config, name) != getattr(Config, name):
      raise UsageError(
        f'--{flag(name)} {getattr(config, name)} is for --agree gossip, which is not given'
      )


def _check_anakin(config: Config) -> None:
  if library_of(config.env) in HOST_LIBRARIES:
    raise UsageError(f'{config.env} runs on the host: give --architecture sebulba')
  if config.replay != 'device':
    raise UsageError(
      f'--replay {config.replay}: under anakin all of it is on the device; leave it out, or give '
      '--architecture sebulba'
    )
  if config.envs != 'local':  # which sets others as well
    raise UsageError(f'--envs {config.envs} is for --architecture sebulba; this run is anakin')
  common = {f.name for f in dataclasses.fields(Common)}
  for f in dataclasses.fields(config):
    if f.name not in common and getattr(config, f.name) != f.default:
      raise UsageError(f'--{flag(f.name)} is for --architecture sebulba; this run is anakin')


def _check_sebulba(config: Config) -> None:
  if config.seeds > 1:
    raise UsageError(f'--seeds {config.seeds}: sebulba trains one agent in a run')
  for name in ('actor_threads', 'max_lag'):
    if getattr(config, name) < 1:
      raise UsageError(f'--{flag(name)} must be at least 1, not {getattr(config, name)}')
  if not 0 < config.env_deadline < math.inf:
    raise UsageError(f'--env-deadline must be more than 0, not {config.env_deadline}')
  if config.envs == 'remote' and library_of(config.env) in LIBRARIES:
    raise UsageError(
      f'--envs remote: {config.env} is in JAX, whose environments stay with the learner; those of '
      f'{", ".join(HOST_LIBRARIES)} can be elsewhere'
    )
  if config.envs == 'remote' and config.lag != 'async':
    raise UsageError(f'--envs remote comes in any order and needs --lag async, not {config.lag}')
  if config.replay == 'service' and config.lag != 'async':
    raise UsageError(f'--replay service needs --lag async, not {config.lag}')
  if config.replay == 'service' and config.envs == 'remote':
    raise UsageError('--replay service has its environments in `podrace act`: no --envs remote')
  if not 0 <= config.max_wait_ms <= 10_000:
    raise UsageError(f'--max-wait-ms must be 0 to 10000, not {config.max_wait_ms}')
  if config.max_wait_ms != Config.max_wait_ms and config.envs == 'local':
    raise UsageError(f'--max-wait-ms {config.max_wait_ms:g} is for --envs remote; leave it out')
  if config.max_lag != Config.max_lag and config.lag != 'async':
    raise UsageError(
      f'--max-lag {config.max_lag} is for --lag async; the lag is {config.lag} here: leave it out'
    )
  for name in ('env_batch_size', 'env_threads'):
    if getattr(config, name) < 0:
      raise UsageError(f'--{flag(name)} must not be negative, not {getattr(config, name)}')


def flag(field: str) -> str:
  """A field's name on the command line."""
  return field.rstrip('_').replace('_', '-')


def unknown(kind: str, came: str, known: Iterable[str]) -> UsageError:
  """The error for a name that isn't one, with the nearest that are."""
  known = sorted(known)
  near = difflib.get_close_matches(came, known, n=3, cutoff=0.5)
  hint = f'did you mean {" or ".join(near)}?' if near else f'there are {", ".join(known)}'
  return UsageError(f'unknown {kind} {came!r}: {hint}')


def unknown_agent(came: str) -> UsageError:
  """Likewise, of an agent; many algorithms have another name here, or one that does their work."""
  if near := RELATED.get(came.lower().replace('_', '-')):
    return UsageError(
      f"unknown agent '{came}': the nearest here is {' or '.join(near)}; MODULE:CLASS names your own"
    )
  module, _, name = came.rpartition('.')
  if module:
    hint = f'{module}:{name}' if name != 'py' else f'{module}:CLASS'
    raise UsageError(f'unknown agent {came!r}: your own is named MODULE:CLASS; write {hint}')
  return unknown('agent', came, AGENTS)


# --- config.json --------------------------------------------------------------------------------


def agent_class(name: str) -> Any:
  """The class of an agent: one of ours by its name, anybody's by `module:Class`."""
  module, _, attribute = name.partition(':')
  if module.endswith('.py'):
    module = module.removesuffix('.py').replace('/', '.')
    raise UsageError(
      f'no agent {name!r}: your own is named MODULE:CLASS; write {module}:{attribute}'
    )
  if attribute:
    return importing.attribute(f'no agent {name!r}', module, attribute)
  if name not in AGENTS:
    raise unknown_agent(name)
  module, attribute = AGENTS[name]
  return getattr(importlib.import_module(module), attribute)


def default_agent(name: str) -> Any:
  """An agent with its class' defaults; raises UsageError if it is none that has them."""
  cls = agent_class(name)
  if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
    raise UsageError(f'{name} is no agent: it is no dataclass; see docs/own.md')
  if not getattr(cls, '__dataclass_params__').frozen:  # noqa: B009 (which mypy does not know)
    raise UsageError(f'{name} must be frozen: @dataclasses.dataclass(frozen=True)')
  if needed := [f.name for f in dataclasses.fields(cls) if f.init and _has_no_default(f)]:
    raise UsageError(f'{name} needs defaults for its fields: {", ".join(needed)}')
  return cls()


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
  return field.default is field.default_factory is dataclasses.MISSING


def agent_name(agent: Any) -> str:
  """What `agent_class` takes."""
  where = (type(agent).__module__, type(agent).__qualname__)
  names = [name for name, known in AGENTS.items() if known == where]
  return names[0] if names else ':'.join(where)


def to_json(config: Basics, whole: bool = False) -> dict[str, Any]:
  """The exact record of a config; `whole`: with the values that a record leaves out, see `with_unrecorded`."""
  record = _plain(config, whole=whole)
  agent = {k: v for k, v in record['agent'].items() if k != CLASS}
  record['agent'] = {'name': agent_name(config.agent), **agent}
  kind = next(name for name, (_, cls) in KINDS.items() if cls == type(config).__name__)
  return {'version': VERSION, **({} if kind == TRAIN else {KIND: kind}), **record}


def _plain(value: Any, anything: bool = False, whole: bool = False) -> Any:
  """`value` as JSON; `anything`: the type of its field does not say of which class it is."""
  if dataclasses.is_dataclass(value):
    cls = type(value)
    known = cls.__module__.startswith('podrace.') and hooks.lacks(value) and not anything
    theirs = {} if known else {CLASS: f'{cls.__module__}:{cls.__qualname__}'}
    unrecorded = {} if whole else getattr(value, 'UNRECORDED', {})
    fields = [
      f
      for f in dataclasses.fields(value)
      if _own(f) and (f.name not in unrecorded or getattr(value, f.name) != unrecorded[f.name])
    ]
    members = {f.name: _plain(getattr(value, f.name), f.type == 'Any', whole) for f in fields}
    return {**theirs, **members}
  if isinstance(value, tuple | list):
    return [_plain(v, whole=whole) for v in value]
  if value is None or isinstance(value, bool | int | float | str):
    return value
  return {'repr': repr(value)}  # of somebody's own; can be compared, but not made again


def _own(field: dataclasses.Field[Any]) -> bool:
  return field.name not in hooks.BOUND


def from_json(record: dict[str, Any]) -> Any:
  """The config that `to_json` recorded; imports the modules that it names, see `check_code`.

  Raises:
    UsageError: if the record is of another version, or has other fields than the classes.
  """
  version = record.get('version') if isinstance(record, dict) else None
  if version != VERSION:
    raise UsageError(f'config.json has version {version}, expected {VERSION}')
  record = user_code.update_paths(record)
  try:
    agent = dict(_typed('agent', record['agent'], dict, 'an object'))
    agent = _make(_class_named(agent.pop('name')), agent)
    module, name = KINDS[record.get(KIND, TRAIN)]
    settings = {k: v for k, v in record.items() if k not in ('version', KIND)}
    return _make(getattr(importlib.import_module(module), name), settings | {'agent': agent})
  except (KeyError, TypeError, AttributeError, OverflowError) as e:
    raise UsageError(f'config.json is not the record of a run: {e!r}') from e


def check_code(record: dict[str, Any], allowed: Iterable[str]) -> None:
  """Raises UsageError if a record names modules that are neither podrace's own nor allowed."""
  if refused := user_code.refused(record, allowed):
    named = ', '.join(f'{module} ({what})' for module, what in refused.items())
    raise UsageError(
      f"config.json names code that is not podrace's own: {named}. It runs with all rights that you have. If you "
      f'trust it, give {user_code.options(refused)}'
    )


def completed(record: dict[str, Any], allowed: Iterable[str] = ()) -> dict[str, Any]:
  """A record with the defaults of fields that were not there yet when it was made."""
  try:
    check_code(record, allowed)
    return to_json(from_json(record))
  except UsageError:  # as it is, where it can't be made again
    return record


def with_unrecorded(settings: Any, record: dict[str, Any]) -> Any:
  """Return `settings` with the value that each field has in a record of before it was recorded.

  A run goes on with the network that it began with, so a record without the field decides.
  """
  values = {k: v for k, v in getattr(settings, 'UNRECORDED', {}).items() if k not in record}
  for f in dataclasses.fields(settings):
    value, part = getattr(settings, f.name), record.get(f.name)
    if dataclasses.is_dataclass(value) and isinstance(part, dict):
      changed = with_unrecorded(value, part)
      values |= {} if changed is value else {f.name: changed}
  return dataclasses.replace(settings, **values) if values else settings


def unrecorded_options(config: Basics, record: dict[str, Any]) -> list[str]:
  """Return the options that make `with_unrecorded` of a config: for commands that do not read the record."""
  was, now = (to_json(c, whole=True) for c in (config, with_unrecorded(config, record)))
  return [x for path, _, value in changes(was, now) for x in (option(path), argument(value))]


def _make(cls: Any, record: dict[str, Any]) -> Any:
  if record.keys() == {'repr'}:
    raise UsageError(
      f"{record['repr']} was made in Python and is no dataclass: config.json can't make it again; "
      'train and evaluate this run from there'
    )
  record = dict(record)
  if CLASS in record:
    cls = _class_named(record.pop(CLASS), cls)
  hints = typing.get_type_hints(cls, include_extras=True)
  fields = {f.name for f in dataclasses.fields(cls) if _own(f)}
  for name in record.keys() - fields:
    raise unknown(f'field of {cls.__name__}', name, fields)
  values = dict(getattr(cls, 'UNRECORDED', {}))  # a record leaves them out
  for name, value in record.items():
    if (wrong := expected(value, hints[name])) and cls.__module__.startswith('podrace.'):
      raise UsageError(f'config.json: {name} of {cls.__name__} is {value!r:.200}, expected {wrong}')
    if isinstance(value, dict):
      value = _make(hints[name], value)
    values[name] = _tuples(value)
  return cls(**values)


def _typed(name: str, value: Any, kind: type, wanted: str) -> Any:
  """Return a value of a record; raises UsageError if it is of another type."""
  if not isinstance(value, kind):
    raise UsageError(f'config.json: {name} is {value!r:.200}, expected {wanted}')
  return value


def _class_named(name: Any, declared: Any = Any) -> Any:
  """Return the class that a record names, for a field of a type `declared`.

  Raises:
    UsageError: if it is no dataclass, or if it is one of podrace's that is neither an agent nor of that type.
  """
  cls = agent_class(_typed('a class', name, str, 'a text, MODULE:CLASS'))
  if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
    raise UsageError(f'config.json: {name} is no dataclass')
  of_type = declared is Any or (isinstance(declared, type) and issubclass(cls, declared))
  if cls.__module__.startswith('podrace.') and hooks.lacks(cls) and not of_type:
    raise UsageError(f'config.json: {name} is no {getattr(declared, "__name__", declared)}')
  return cls


def _tuples(value: Any) -> Any:
  """What JSON has as lists."""
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def changes(
  old: dict[str, Any], new: dict[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any, Any]]:
  """Path and both values of each setting in which two records differ; None where there is none."""
  for name in [*old, *(n for n in new if n not in old)]:
    a, b = old.get(name), new.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
      yield from changes(a, b, f'{prefix}{name}.')
    elif a != b:
      yield f'{prefix}{name}', a, b


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
  """A line for each setting in which two records differ."""
  return [f'{path}: {json.dumps(a)} -> {json.dumps(b)}' for path, a, b in changes(old, new)]


def option(path: str) -> str:
  """The option for what a record has there: agent.lambda_ is --agent.lambda."""
  return '--' + '.'.join(map(flag, path.split('.')))


def argument(value: Any) -> str:
  """A record's value as an option takes it."""
  return ' '.join(map(argument, value)) if isinstance(value, list) else str(value)


# --- binding ------------------------------------------------------------------------------------


def bind_run(config: Basics, env: Any) -> Any:
  """The agent of a run, for the spaces of its environment and the sizes of the run.

  Raises:
    UsageError: if it is one of ours that can't act there, or no agent.
    ValueError: if a network can't be built for those spaces.
  """
  from podrace.envs.states import takes_turns

  check_jax()  # again: a module of the user's may have changed JAX's settings
  name = agent_name(hooks.innermost(config.agent))
  fit = agents_for(env.action_space)
  if name in AGENTS and name not in fit:
    raise UsageError(
      f'{name} cannot act in {config.env}, whose action space is {env.action_space}: '
      f'take --agent {", ".join(fit[:-1])} or {fit[-1]}'
    )
  agent = hooks.innermost(config.agent)
  if takes_turns(env) and 'environment' not in {f.name for f in dataclasses.fields(agent)}:
    raise UsageError(
      f'in {config.env} two players take turns, and {name} would take what is good for the other as its own; '
      'take --agent muzero, or another opponent, as opponent=random'
    )
  return bind(config.agent, env, config.total_updates, config.num_envs)


def bind(agent: Any, env: Any, total_updates: int = 0, total_envs: int = 0) -> Any:
  """`agent` for the spaces of `env` and the sizes of the run, where it has fields for them.

  Raises:
    UsageError: if it is no agent.
    ValueError: if a network can't be built for those spaces.
  """
  lacks = hooks.lacks(agent)
  if lacks or not dataclasses.is_dataclass(agent):
    what = f'has no {" and no ".join(lacks)}' if lacks else 'is no dataclass'
    raise UsageError(f'{agent_name(agent)} is no agent: it {what}; see docs/own.md')
  for field, value in _untyped(agent):
    if hasattr(value, 'bind'):
      raise UsageError(f'{agent_name(agent)}: {no_field(field, value)}')
  return hooks.bind(agent, env, total_updates, total_envs)


def _untyped(agent: Any) -> Iterator[tuple[str, Any]]:
  """What the user's classes of an agent have that is no field, as it has no type."""
  fields = {f.name for f in dataclasses.fields(agent)}
  for cls in type(agent).__mro__:
    if cls is not object and not cls.__module__.startswith('podrace.'):
      yield from ((k, v) for k, v in vars(cls).items() if k not in fields and not k.startswith('_'))


def no_field(name: str, value: Any) -> str:
  """What to say of a setting that has no type."""
  kind = type(value).__name__
  simple = isinstance(value, bool | int | float | str)
  what = '' if simple else 'has bind but '
  return f'`{name}` {what}{"has " * simple}no type, so it is no field: write `{name}: {kind} = {value if simple else "..."}`'


def check_agent_options(agent: Any, args: Iterable[str]) -> None:
  """Raises UsageError for an --agent.FIELD that is none."""
  for arg in args:
    name = arg.partition('=')[0].replace('_', '-')
    if name.startswith('--agent.'):
      _check_option(agent, name)


def agents_with(setting: str) -> list[str]:
  """Those of ours that have a setting, as the command line calls it."""
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
      plain = dict(_untyped(settings)).get(part.replace('-', '_'))
      if isinstance(plain, bool | int | float | str):
        raise UsageError(f'{agent_name(settings)}: {no_field(part.replace("-", "_"), plain)}')
      if prefix == '--agent.' and (owners := agents_with(part)):
        raise UsageError(
          f'unknown option of {agent_name(agent)} {name!r}: it is a setting of {", ".join(owners)}'
        )
      raise unknown(f'option of {agent_name(agent)}', name, [prefix + f for f in fields])
    settings, prefix = getattr(settings, fields[part]), f'{prefix}{part}.'
    if not dataclasses.is_dataclass(settings):
      return
