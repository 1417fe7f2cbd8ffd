"""The command line. What it needs of jax is imported only where something is to be computed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import inspect
import json
import logging
import math
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from podrace import compile_cache, defaults, own_code
from podrace.agents import AGENTS
from podrace.config import (
  BOUND,
  Config,
  UsageError,
  agent_class,
  agent_name,
  flag,
  needs_sebulba,
  to_json,
  unknown,
  unknown_agent,
)
from podrace.envs.registry import HOST_LIBRARIES
from podrace.options import Options, whole_number
from podrace.output import Lasting, flush_standard, open_standard, tell
from podrace.presets import PRESETS
from podrace.process import end_at_once, log_to_stderr, on_signals, tell_of_faults

USAGE = """\
podrace: reinforcement learning at scale in JAX

  podrace train [PRESET] [OPTIONS]    train an agent; without arguments, IMPALA on Catch
  podrace eval DIR [--episodes N]     evaluate the newest checkpoint of a run
  podrace envs --connect ADDRESS ...  environments for a learner on another machine
  podrace act [PRESET] ...            acting processes for a learner with a replay service
  podrace replay --listen ADDRESS ... replay tables as a service
  podrace keys new DIR                keys for learners, services and those who connect to them
  podrace top ADDRESS                 what the clients of a learner or a service do
  podrace list                        presets, agents and environments
  podrace devices [OPTIONS]           the devices there are, and what Sebulba would use
  podrace bench sebulba [PRESET] ...  how fast its stages are alone, and together

`podrace COMMAND --help` says more.
"""

EVAL_USAGE = """\
podrace eval DIR [OPTIONS]: episodes of the newest checkpoint of the run in DIR, twice: greedily, by
the best action, and sampled, as in training

  --episodes N    how many, of each seed and way of acting (default 100)
  --seed S        of the evaluation (default 0)
  --greedy        greedily alone
  --sample        sampled alone; where environments explore each by a rate of its own, with the rates of
                  the run's environments, spread over the episodes
  --max-steps N   give up on episodes that are longer (default 1000000)
  --no-compile-cache  compile anew, and keep nothing of it for the next command
  --allow-code MODULE   the run may import this module of its own, from the working directory too;
                  may be repeated. Without it a run that names code of its own is refused

The last line printed is JSON: episode_return_mean, episode_return_std, episodes; and of the sampled
ones, unless they are alone, sampled_episode_return_mean, sampled_episode_return_std, sampled_episodes.
"""

EVAL_VALUES = {
  '--episodes': 'N', '--seed': 'S', '--greedy': '', '--sample': '', '--max-steps': 'N',
  '--no-compile-cache': '', '--allow-code': 'MODULE',
}  # fmt: skip

HOST_EXAMPLES = {
  'ale': 'ale:pong, ale:breakout, ale:ms_pacman,sticky=0.25',
  'envpool': 'envpool:CartPole-v1, envpool:Pong-v5, envpool:HalfCheetah-v4',
  'gymnasium': 'gymnasium:CartPole-v1, gymnasium:your_module:YourEnv-v0',
}

# What `train` takes besides the fields of Config. Value: what follows the flag, and its help.
TRAIN_OPTIONS = {
  '--run-dir': ('DIR', 'where the run is kept; started again with the same one, it resumes'),
  '--agent': (
    'NAME',
    f'{", ".join(AGENTS)} or module:Class, with its defaults (the preset has its own)',
  ),
  '--no-compile-cache': ('', 'compile anew, and keep nothing of it for the next command'),
  '--allow-code': (
    'MODULE',
    'the run directory may name this module of its own; not needed for what --agent and --env name',
  ),
  '--override': ('', 'resume although the configuration has changed'),
  '--sinks': ('NAMES', 'besides metrics.jsonl: tensorboard, wandb, or both with a comma'),
  '--quiet': ('', 'no progress; warnings and the last words are told'),
  '--listen': (
    'ADDRESS',
    'of --envs remote: tcp://HOST:PORT or ipc://PATH, see docs/distributed.md',
  ),
  '--connect-replay': (
    'ADDRESSES',
    'of --replay service: where `podrace replay` listens, shards with commas; --listen is then '
    'where `podrace act` comes for parameters',
  ),
  '--keys': ('DIR', 'of --listen: made by `podrace keys new`; needed beyond this machine'),
  '--insecure': ('', 'of --listen: anybody may connect, nothing is encrypted'),
  '--peer-timeout': ('S', 'of --listen: seconds of silence that end a session (default 10)'),
  '--coordinator': ('HOST:PORT', 'of a run over several processes: where the first one listens'),
  '--num-processes': ('N', 'of a run over several processes'),
  '--process-id': ('I', 'which of them this is, from 0'),
}

TRAIN_VALUES = {name: value for name, (value, _) in TRAIN_OPTIONS.items()}


LASTING = ('train', 'act', 'envs', 'replay')  # commands that go on if nobody reads what they say
UNREAD = 141  # the exit code of the others, as a shell has it of a process that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> None:
  """Runs a command and exits: 0 done, 2 bad usage or input, 1 failed, 128 + n on signal n."""
  args = list(sys.argv[1:] if argv is None else argv)
  open_standard()
  tell_of_faults()
  own_code.leave_here()
  lasting = bool(args) and args[0] in LASTING
  # Until a command has handlers of its own: nothing is saved yet, and an exception could be swallowed.
  handlers = on_signals(end_at_once) if lasting else contextlib.nullcontext()
  with handlers:
    try:
      code = _guarded(args)
    except Exception:
      if not _in_company():
        raise
      tell(traceback.format_exc())
      code = 1
  if not flush_standard() and not lasting and not code:
    code = UNREAD
  # A compilation may still be going in a thread, and can't be told to stop; and who leaves a run of
  # several processes in order waits for the others, which don't know yet, until JAX aborts it.
  if code > 128 or (code in (1, 2) and _in_company()):
    os._exit(code)
  sys.exit(code)


def _in_company() -> bool:
  """Whether this is one of several processes of a run."""
  topology = sys.modules.get('podrace.topology')
  return topology is not None and topology.is_one_of_several()


def _guarded(args: list[str]) -> int:
  commands = {
    'train': train,
    'envs': environments,
    'replay': replay,
    'act': act,
    'keys': keys,
    'top': top,
    'eval': evaluate,
    'list': list_names,
    'devices': devices,
    'bench': bench,
  }
  try:
    if not args or args[0] in ('-h', '--help'):
      print(USAGE, end='')
      return 0
    if args[0] == '--version':
      from podrace import __version__

      print(__version__)
      return 0
    if args[0] not in commands:
      raise unknown('command', args[0], commands)
    return commands[args[0]](args[1:])
  except ValueError as e:  # UsageError among them: what was asked for can't be
    if not _ours(e):
      raise
    return _complain(e, 2)
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # the reader of the output has enough, as in `podrace list | head`
    return UNREAD
  except Exception as e:
    if 'podrace.run' not in sys.modules:  # where there is no JAX
      raise
    from podrace.run import RunError, Stopped

    if isinstance(e, Stopped):
      from podrace.topology import leave_processes

      tell(f'stopped by {e}; start again with the same --run-dir to go on')
      leave_processes()
      return 128 + e.signum
    if isinstance(e, RunError):
      return _complain(e, 1)
    raise  # a fault of ours: with its traceback, exit code 1


def _ours(error: Exception) -> bool:
  """Whether podrace raised it, knowing what it complains of; not the user's code, or a library."""
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent)


def _complain(error: Exception, code: int) -> int:
  if os.environ.get('PODRACE_TRACEBACK'):
    raise error
  tell(f'podrace: {error}')
  return code


# --- train --------------------------------------------------------------------------------------


def train(args: list[str]) -> int:
  """podrace train."""
  if '-h' in args or '--help' in args:
    asked = [a for a in args if a not in ('-h', '--help')]
    options = Options(asked, TRAIN_VALUES, others_pass=True)
    preset = options.arguments[0] if options.arguments else None
    print(train_help(agent_of(options), preset if preset in PRESETS else None))
    return 0
  preset = take_preset(args)
  options = Options(args, TRAIN_VALUES, others_pass=True)
  agent, rest = agent_of(options), options.arguments
  run_dir, allowed = options.path('--run-dir'), _allowed(options, rest)
  base = base_config(preset, run_dir, agent, rest, allowed)
  if _value_of('--envs', rest) == 'remote':  # which has another default of --lag
    base = dataclasses.replace(base, envs='remote', lag='async')
  base = implied(base, rest)
  config = parse(base, rest)
  addresses = _addresses(options)
  listen = _listen(options) if addresses is None else None
  _join(options)
  if is_open(preset, run_dir, agent, rest):
    config = settled(base, config.env, rest)

  from podrace import run

  sinks = tuple(s for s in options.text('--sinks').split(',') if s)
  quiet = '--quiet' in options
  name = preset or config.env.partition(',')[0].replace(':', '-').replace('/', '-')
  with contextlib.ExitStack() as stack:
    if run_dir is None:
      alone = '--coordinator' not in options  # else the others take the same
      run_dir = stack.enter_context(reserved(name)) if alone else new_run_dir(name)
    stack.enter_context(log_to_stderr('podrace train', quiet))
    if '--no-compile-cache' not in options:
      compile_cache.enable(logging.getLogger('podrace').info)
    summary = run.train(
      config, run_dir, override='--override' in options, sinks=sinks, quiet=quiet,
      listen=listen, addresses=addresses,
    )  # fmt: skip
  _report(run_dir, summary, own_code.named(to_json(config)))
  from podrace.topology import leave_processes

  leave_processes()  # here, as not every way out of Python goes through JAX's exit handlers
  return 0


def implied(base: Config, args: Sequence[str]) -> Config:
  """`base` under sebulba, where what is asked for has no other architecture and none is named."""
  if _value_of('--architecture', args) is not None:
    return base
  asked = {name: _value_of(f'--{name}', args) or getattr(base, name) for name in ASKED}
  return dataclasses.replace(base, architecture='sebulba') if needs_sebulba(**asked) else base


ASKED = ('env', 'envs', 'replay')  # of which the architecture may follow


def _value_of(flag: str, args: Sequence[str]) -> str | None:
  """What is given for a flag, the last time that it is."""
  found = None
  for i, arg in enumerate(args):
    name, equals, value = arg.partition('=')
    if name == flag:
      found = value if equals else next(iter(args[i + 1 : i + 2]), None)
  return found


def take_preset(args: list[str]) -> str | None:
  """Takes the preset out of the arguments, before all options, if there is one."""
  preset = args.pop(0) if args and not args[0].startswith('-') else None
  if preset is not None and preset not in PRESETS:
    raise unknown('preset', preset, PRESETS)
  if preset is not None and args and not args[0].startswith('-'):
    raise UsageError(f'there is one preset, and then options: not {args[0]!r} after {preset}')
  return preset


def agent_of(options: Options) -> str | None:
  """The agent that is asked for, if one is: one of ours, or module:Class."""
  agent = options.text('--agent') or None
  if agent is not None and agent not in AGENTS and ':' not in agent:
    raise unknown_agent(agent)
  return agent


def _listen(options: Options) -> Any:
  """Where to listen for remote environments, if that is asked for."""
  given = [o for o in ('--keys', '--insecure', '--peer-timeout') if o in options]
  if '--listen' not in options:
    if given:
      raise UsageError(f'{", ".join(given)}: of --listen, which is not given')
    return None
  from podrace import remote

  remote.require()
  from podrace.remote.hub import PEER_SECONDS, Listen

  return Listen(
    options.text('--listen'),
    options.path('--keys'),
    '--insecure' in options,
    options.number('--peer-timeout', PEER_SECONDS),
  )


def _addresses(options: Options) -> Any:
  """Where the replay service is, and where to publish parameters, if that is asked for."""
  if '--connect-replay' not in options:
    return None
  if '--listen' not in options:
    raise UsageError('--connect-replay needs --listen, where `podrace act` comes for parameters')
  from podrace import remote

  remote.require()
  from podrace.apex import Addresses
  from podrace.remote.hub import PEER_SECONDS

  return Addresses(
    tuple(options.text('--connect-replay').split(',')),
    options.text('--listen'),
    options.path('--keys'),
    '--insecure' in options,
    options.number('--peer-timeout', PEER_SECONDS),
  )


def _report(run_dir: Path, summary: dict[str, Any], modules: Iterable[str]) -> None:
  value = summary['episode_return']
  told = 'no episode ended' if value is None else f'return {value:.2f}'
  out = Lasting(sys.stdout)
  print(f'done: step {summary["step"]:,}, {told}, {summary["steps_per_s"]:,.0f} steps/s', file=out)
  print(f'run directory: {run_dir}', file=out)
  allow = own_code.options(modules)
  print(f'next: podrace eval {run_dir} --episodes 100 {allow}'.rstrip(), file=out)


def is_open(
  preset: str | None, run_dir: Path | None, agent: str | None, args: Sequence[str]
) -> bool:
  """Whether neither a preset nor the record of a run says all settings of the agent: see `settled`."""
  if preset is not None:
    return agent not in (None, agent_name(PRESETS[preset]().agent))
  if run_dir is not None and (run_dir / 'config.json').exists():
    return False
  return agent is not None or _value_of('--env', args) is not None


def _allowed(options: Options, rest: list[str]) -> list[str]:
  """The modules that the user names, which are looked for in the working directory as well."""
  agent, env = agent_of(options) or '', _value_of('--env', rest) or ''
  named = own_code.of_agent(agent), own_code.of_env(env)
  allowed = [m for m in named if m is not None]
  if '--allow-code' in options:
    allowed += options.every('--allow-code')
  own_code.look_here(allowed)
  return allowed


def base_config(
  preset: str | None,
  run_dir: Path | None,
  agent: str | None,
  args: Sequence[str] = (),
  allowed: Iterable[str] = (),
) -> Config:
  """What the flags change: the preset, else what the run directory records, else Catch.

  With an agent or an environment and no preset, it is the defaults of Config and of the agent.
  """
  from podrace.run import load_config

  if preset is None and is_open(preset, run_dir, agent, args):
    config = Config(agent=default_agent(agent or 'impala'))
  elif preset is None and run_dir is not None and (run_dir / 'config.json').exists():
    config = load_config(run_dir, allowed)
  else:
    config = PRESETS[preset or 'catch']()
  if agent is not None and agent != agent_name(config.agent):
    config = dataclasses.replace(config, agent=default_agent(agent))
  return config


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


def settled(base: Config, env: str, args: list[str], prog: str = 'podrace train') -> Config:
  """What the flags make of `base` with the defaults of its agent in that kind of environment.

  It makes the environment, which may ask JAX for devices: the processes of a run have joined before.
  """
  return parse(defaults.with_defaults(base, env), args, prog)


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
  return field.default is field.default_factory is dataclasses.MISSING


def parse(config: Config, args: list[str], prog: str = 'podrace train') -> Config:
  """`config` with the flags' changes; tyro ends the program with code 2 where it can't."""
  import tyro

  typed = dataclasses.make_dataclass(
    'Options',
    [
      (
        f.name,
        type(config.agent) if f.name == 'agent' else _type(f),
        dataclasses.field(default=getattr(config, f.name)),
      )
      for f in dataclasses.fields(Config)
    ],
    frozen=True,
  )
  values = [_whole(a) for a in said_plainly(args, set(booleans(config)))]
  found = tyro.cli(typed, args=values, prog=prog, config=(tyro.conf.FlagConversionOff,))
  return Config(**{f.name: getattr(found, f.name) for f in dataclasses.fields(Config)})


SAID = dict.fromkeys(('true', 'yes', 'on', '1'), 'True')
SAID |= dict.fromkeys(('false', 'no', 'off', '0'), 'False')


def booleans(settings: Any, prefix: str = '--') -> Iterator[str]:
  """The options of a dataclass, and of those among its fields, that are True or False."""
  for field in dataclasses.fields(settings):
    value, name = getattr(settings, field.name), prefix + flag(field.name)
    if isinstance(value, bool):
      yield name
    elif dataclasses.is_dataclass(value):
      yield from booleans(value, f'{name}.')


def said_plainly(args: list[str], names: set[str]) -> list[str]:
  """Options of `names` as tyro takes them, `--x True`: alone, as --no-x, and with any case or word."""
  negated = {f'{head}.no-{last}': n for n in names for head, _, last in [n.rpartition('.')]}
  negated |= {f'--no-{n[2:]}': n for n in names}
  found: list[str] = []
  rest = list(args)
  while rest:
    arg = rest.pop(0)
    name, equals, value = arg.partition('=')
    name = name.replace('_', '-')
    if name in negated and not equals:
      found += [negated[name], 'False']
    elif name not in names:
      found.append(arg)
    elif equals:
      found += [name, SAID.get(value.lower(), value)]
    elif rest and not rest[0].startswith('--'):
      value = rest.pop(0)
      found += [name, SAID.get(value.lower(), value)]
    else:
      found += [name, 'True']
  return found


def _type(field: dataclasses.Field[Any]) -> Any:
  import typing

  return typing.get_type_hints(Config)[field.name]


def _whole(arg: str) -> str:
  """1e7 and 1_000_000 as integers, where that is what they are."""
  name, equals, text = arg.partition('=') if arg.startswith('--') else ('', '', arg)
  return name + equals + whole_number(text)


def new_run_dir(name: str) -> Path:
  """A directory for a new run: runs/NAME-DATE-TIME."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  path = Path('runs') / f'{name}-{now}'
  n = 1
  while path.exists():
    n += 1
    path = Path('runs') / f'{name}-{now}-{n}'
  return path


@contextlib.contextmanager
def reserved(name: str) -> Iterator[Path]:
  """A new run's directory, made so that no other run takes it; gone again if nothing comes into it."""
  with contextlib.ExitStack() as stack:
    runs = Path('runs')
    try:
      if not runs.exists():
        runs.mkdir(exist_ok=True)
        stack.callback(_remove_empty, runs)
      while True:
        path = new_run_dir(name)
        with contextlib.suppress(FileExistsError):  # another run was quicker
          path.mkdir()
          break
    except OSError as e:
      raise UsageError(f'{runs} cannot be written to: {e.strerror}; give --run-dir') from e
    stack.callback(_remove_empty, path)
    yield path


def _remove_empty(path: Path) -> None:
  with contextlib.suppress(OSError):  # it isn't
    path.rmdir()


def _join(options: Options) -> None:
  """Joins the other processes of a run, if there are any."""
  given = [o for o in ('--coordinator', '--num-processes', '--process-id') if o in options]
  if not given:
    return
  if len(given) != 3:
    raise UsageError('--coordinator, --num-processes and --process-id go together')
  num_processes, process_id = (options.whole(name, 0) for name in given[1:])
  from podrace.topology import join_processes

  join_processes(options.text('--coordinator'), num_processes, process_id)


# --- help, without importing what it tells of ---------------------------------------------------


def train_help(agent: str | None = None, preset: str | None = None) -> str:
  """The help of `train`: read from the source, since importing it would take seconds.

  With an agent of the user's own, which is imported, its options instead of those of ours; with a
  preset, what that sets besides.
  """
  lines = [
    'podrace train [PRESET] [OPTIONS]: train an agent; without arguments, IMPALA on Catch',
    '',
    f'presets: {", ".join(PRESETS)} (see `podrace list`)',
    *(_preset_rows(preset) if preset else []),
    '',
    'options:',
  ]
  lines += [_row(name, value, help) for name, (value, help) in TRAIN_OPTIONS.items()]
  lines += [
    '',
    'the run (these defaults are for --env or --agent; presets have their own, see also below):',
  ]
  here = Path(__file__).parent
  lines += [_row(*f) for f in fields_of(here / 'config.py', 'Config', '--') if f[0] != '--agent']
  if agent is not None and ':' in agent:
    own_code.look_here([own_code.of_agent(agent)])
    lines += ['', f'agent {agent}:', *_own_rows(agent_class(agent), '--agent.')]
    return '\n'.join(lines)
  for name, (module, cls) in AGENTS.items():
    lines += ['', f'agent {name}:']
    path = here.parent / (module.replace('.', '/') + '.py')
    fields = fields_of(path, cls, '--agent.')
    lines += [_row(*f) for f in fields if f[0].rpartition('.')[2] not in PARTS]
    lines += [_row(*f) for f in own_defaults(path, cls)]
  for name, kinds in PARTS.items():
    for cls, (file, agents) in kinds.items():
      lines += ['', f'the {name} of {agents} (defaults that an agent has of its own are above):']
      rows = fields_of(here / file, cls, f'--agent.{name}.')
      lines += [_row(*f) for f in rows if f[0].rpartition('.')[2] not in FIXED.get(cls, ())]
  return '\n'.join([*lines, *_default_rows()])


def _default_rows() -> list[str]:
  """What podrace.defaults sets, by agent and kind of environment."""
  lines = [
    '',
    'defaults in the place of those above, where no preset has others: of an agent in a kind of environment,',
    'which is',
    *(f'  {kind}: {told}' for kind, told in defaults.KINDS.items()),
  ]
  for name, told in defaults.rows():
    indent = ' ' * 6
    options = textwrap.fill(
      told, 100, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    lines += [f'  {name}:', options]
  return lines


def _preset_rows(preset: str) -> list[str]:
  """What a preset sets, as its source has it."""
  source = Path(__file__).with_name('presets.py').read_text()
  found = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
  function = found[PRESETS[preset].__name__]
  shown = [n for n in function.body[1:] if not isinstance(n, ast.Import | ast.ImportFrom)]
  segments = (ast.get_source_segment(source, n, padded=True) or '' for n in shown)
  code = '\n'.join(map(textwrap.dedent, segments))
  lines = [x.partition('  # fmt')[0] for x in code.splitlines()]
  told = 'what it sets; the defaults below are those of the rest, a --flag overrides both:'
  return ['', f'preset {preset}: {told}', *textwrap.indent('\n'.join(lines), '  ').splitlines()]


def _own_rows(cls: Any, prefix: str) -> list[str]:
  """The options of any dataclass, and of those that are the defaults of its fields."""
  found: dict[str, tuple[str, str, str]] = {}
  bases: list[Any] = [c for c in cls.__mro__ if dataclasses.is_dataclass(c)]
  for base in reversed(bases):
    with contextlib.suppress(KeyError, OSError, TypeError):  # it has no source
      file = Path(inspect.getfile(base))
      found |= {f[0]: f for f in fields_of(file, base.__qualname__, prefix)}
  rows, parts = [], []
  for field in dataclasses.fields(cls):
    name = prefix + flag(field.name)
    if field.name in BOUND:
      continue
    if dataclasses.is_dataclass(field.default):
      parts += _own_rows(type(field.default), f'{name}.')
    elif name in found or 'Suppress' not in str(field.type):
      rows.append(_row(*found.get(name, (name, str(field.type), ''))))
  return rows + parts


PARTS = {  # fields of agents that have fields of their own -> class -> where, and whose
  'network': {
    'ActorCritic': ('networks/actor_critic.py', 'impala and ppo'),
    'QNetwork': ('networks/q_network.py', 'dqn and r2d2'),
  },
  'actor': {'Actor': ('networks/continuous.py', 'sac and d4pg')},
  'critic': {'Critic': ('networks/continuous.py', 'sac and d4pg')},
  'buffer': {'Buffer': ('replay/windows.py', 'dqn, r2d2, sac and d4pg')},
}


FIXED = {
  'Actor': ('core', 'core-size'),
  'Critic': ('core', 'core-size', 'torso'),
}  # always one value


def own_defaults(path: Path, cls: str) -> list[tuple[str, str, str]]:
  """As `fields_of`, what an agent's parts have that is not their classes' default."""
  classes = {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)}
  return [
    (f'--agent.{node.target.id}.{flag(k.arg or "")}', '', f'(default {_shown(k.value)})')
    for node in classes[cls].body
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    if node.target.id in PARTS and isinstance(node.value, ast.Call)
    for k in node.value.keywords
  ]


def _shown(default: Any) -> str:
  with contextlib.suppress(ValueError):
    value = ast.literal_eval(default)
    return ' '.join(map(str, value)) if isinstance(value, tuple) else str(value)
  return ast.unparse(default)  # an expression, which is shown as it is


def fields_of(path: Path, cls: str, prefix: str) -> list[tuple[str, str, str]]:
  """Flag, value and help of a dataclass' fields, from its source: the comment is the help."""
  source = path.read_text()
  lines, body = source.splitlines(), ast.parse(source).body
  classes = {n.name: n for n in body if isinstance(n, ast.ClassDef)}
  files = dict.fromkeys(classes, path) | _imported_from(body)
  bases = [b.id for b in classes[cls].bases if isinstance(b, ast.Name) and b.id in files]
  found = {f[0]: f for base in bases for f in fields_of(files[base], base, prefix)}
  for node in classes[cls].body:
    if not isinstance(node, ast.AnnAssign) or 'Suppress' in ast.unparse(node.annotation):
      continue
    assert isinstance(node.target, ast.Name) and node.end_lineno is not None
    comment = lines[node.end_lineno - 1].partition('  # ')[2]
    following = lines[node.end_lineno].strip() if node.end_lineno < len(lines) else ''
    if following.startswith('# ^ '):
      comment = following[4:]
    kind = ast.unparse(node.annotation).removeprefix('Annotated[').partition(', tyro')[0]
    if kind.startswith('Literal['):
      kind = '|'.join(str(v) for v in ast.literal_eval(f'({kind[8:-1]},)'))
    plain = node.value is not None and not isinstance(node.value, ast.Call)
    if plain and (shown := _shown(node.value)):  # else the comment says what is done then
      comment = f'{comment} (default {shown})'.strip()
    name = prefix + flag(node.target.id)
    inherited = found.get(name, ('', '', ''))[2].partition('(default')[0].strip()
    if inherited and (not comment or comment.startswith('(default')):
      comment = f'{inherited} {comment}'.strip()
    found[name] = (name, kind, comment)
  return list(found.values())


def _imported_from(body: list[ast.stmt]) -> dict[str, Path]:
  """The files of ours that names in a module come from."""
  root = Path(__file__).parent.parent
  return {
    alias.name: root / (node.module.replace('.', '/') + '.py')
    for node in body
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith('podrace.')
    for alias in node.names
  }


def _row(name: str, value: str, help: str) -> str:
  head = f'  {name} {value}'.rstrip()
  if len(head) > 44:
    return (
      head + '\n' + textwrap.fill(help, 100, initial_indent=' ' * 46, subsequent_indent=' ' * 46)
    )
  return textwrap.fill(help, 100, initial_indent=head.ljust(46), subsequent_indent=' ' * 46) or head


# --- eval, list ---------------------------------------------------------------------------------


def evaluate(args: list[str]) -> int:
  """podrace eval."""
  if '-h' in args or '--help' in args:
    print(EVAL_USAGE, end='')
    return 0
  options = Options(args, EVAL_VALUES)
  if len(options.arguments) != 1:
    raise UsageError(
      f'eval takes one run directory, not {len(options.arguments)}: podrace eval DIR [OPTIONS]'
    )
  if '--greedy' in options and '--sample' in options:
    raise UsageError('--greedy and --sample: leave out both, to have both')
  allowed = options.every('--allow-code')
  own_code.look_here(allowed)
  from podrace.evaluate import ACTING, GREEDY, SAMPLED, summarised
  from podrace.evaluate import evaluate as run_evaluation

  if '--no-compile-cache' not in options:
    compile_cache.enable(lambda text: print(f'podrace eval: {text}', file=sys.stderr))
  only = GREEDY if '--greedy' in options else SAMPLED if '--sample' in options else ''
  acting = (only,) if only else ACTING
  result = run_evaluation(
    Path(options.arguments[0]),
    options.whole('--episodes', 100),
    options.whole('--seed', 0),
    acting,
    options.whole('--max-steps', 1_000_000),
    allowed,
  )
  tell(summarised(result, acting))
  print(json.dumps(result))
  return 0


def list_names(args: list[str]) -> int:
  """podrace list."""
  if '-h' in args or '--help' in args:
    print('podrace list: presets, agents and environments')
    return 0
  if args:
    raise UsageError(f'list takes no arguments, not {" ".join(args)}')
  from podrace import envs

  print('presets:')
  for name, preset in PRESETS.items():
    print(f'  {name:24}{(preset.__doc__ or "").splitlines()[0]}')
  print('\nagents:')
  for name, (module, _) in AGENTS.items():
    path = Path(__file__).parent.parent / (module.replace('.', '/') + '.py')
    print(f'  {name:24}{(ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]}')
  print('\nenvironments (LIB:NAME):')
  for library, names in envs.names().items():
    names = names or ('MODULE.FUNCTION',)
    print(
      textwrap.fill(
        ' '.join(f'{library}:{n}' for n in names),
        100,
        initial_indent='  ',
        subsequent_indent='    ',
        break_on_hyphens=False,
      )
    )
  print('\nenvironments on the host, under sebulba (as those above may be):')
  for library, known in HOST_LIBRARIES.items():
    print(textwrap.fill(
      f'{library}:NAME  {known.description}; {HOST_EXAMPLES[library]}',
      100, initial_indent='  ', subsequent_indent='    ', break_on_hyphens=False,
    ))  # fmt: skip
  return 0


# --- envs, keys, top ----------------------------------------------------------------------------

ENVS_USAGE = """\
podrace envs --connect ADDRESS --env LIB:NAME [OPTIONS]: environments for a learner elsewhere, which
`podrace train --envs remote --listen ADDRESS` is; needs no JAX

  --connect ADDRESS   tcp://HOST:PORT or ipc://PATH
  --env LIB:NAME      of ale, envpool or gymnasium, with options after commas
  --num-envs N        how many (default 1)
  --workers N         threads or processes that step them, of all groups (default: two for each core)
  --groups N          that step by themselves, so that some are stepped while the learner infers for
                      others (default 2, or as many as the learner's threads ask for)
  --keys DIR          with server.public, client.public and client.secret: `podrace keys new`
  --insecure          no keys, beyond this machine: nothing is encrypted
  --seed S            of the environments (default: random)
  --env-deadline S    seconds that a step may take (default 60)
  --give-up-after S   end if there is no learner for so long (default: wait for it)
  --quiet             tells only what is wrong

It comes back after whatever happens to the connection or to the learner, with environments that begin
anew. Exit codes: 0 the run is complete, 1 failed, 2 refused or bad usage, 143 and 130 on signals.
"""

ENVS_VALUES = {
  '--connect': 'ADDRESS', '--env': 'LIB:NAME', '--num-envs': 'N', '--workers': 'N', '--groups': 'N',
  '--keys': 'DIR', '--insecure': '', '--seed': 'S', '--env-deadline': 'S', '--give-up-after': 'S',
  '--quiet': '',
}  # fmt: skip

ACT_USAGE = """\
podrace act [PRESET] --connect-replay ADDRESSES --params ADDRESS [OPTIONS]: environments and inference
for a learner elsewhere, which is `podrace train [PRESET] --connect-replay ... --listen ADDRESS`

  --connect-replay ADDRESSES  where `podrace replay` listens; several shards with commas
  --params ADDRESS            where the learner listens
  --share I/N                 acts in the I-th of N equal parts of all --num-envs (default 0/1)
  --max-staleness S           seconds that parameters may be out of date; then it waits (default 60)
  --give-up-after S           end if there is no learner for S seconds more (default: wait for it)
  --keys DIR                  with server.public, client.public and client.secret
  --insecure                  no keys, beyond this machine: nothing is encrypted
  --quiet                     tells only what is wrong
  --no-compile-cache          compile anew, and keep nothing of it for the next command
  --actor-devices, --actor-threads, --env-batch-size, --env-deadline, --env-threads, --max-lag as of train,
  and --agent, --agent.FIELD, --env, --num-envs and --unroll-length, which must be the learner's

It waits for whom it needs, and comes back to them. Exit codes: 0 the run is complete, 1 failed, 2 refused
or bad usage, 143 and 130 on signals.
"""

ACT_VALUES = {  # the others are those of train
  '--connect-replay': 'ADDRESSES', '--params': 'ADDRESS', '--share': 'I/N', '--max-staleness': 'S',
  '--give-up-after': 'S', '--keys': 'DIR', '--insecure': '', '--quiet': '', '--agent': 'NAME',
  '--no-compile-cache': '',
}  # fmt: skip

REPLAY_USAGE = """\
podrace replay --listen ADDRESS [OPTIONS]: replay tables that many processes write to and sample from;
needs no JAX. Clients have the tables made that they need; docs/tables.md says how

  --listen ADDRESS      tcp://HOST:PORT or ipc://PATH
  --dir DIR             keeps checkpoints, and begins with the newest: written on SIGTERM and Ctrl-C,
                        when a client asks, and
  --checkpoint-every S  every so many seconds (default: not)
  --table SETTINGS      makes a table at the start; may be repeated. SETTINGS, with commas in between:
                          name=NAME  sampler=SELECTOR  remover=SELECTOR  max_size=N
                          rate=min_size:N, sample_to_insert:RATIO:MIN_SIZE:ERROR, queue:N or stack:N
                          max_bytes=N  max_times_sampled=N (by default unbounded)
                        SELECTOR is uniform, fifo, lifo, min_heap, max_heap or prioritized:EXPONENT
  --client-bytes N      of steps that one client may keep for items to come (default 1 GiB)
  --keys DIR            with server.secret, server.public and allowed_clients: `podrace keys new`
  --insecure            no keys, beyond this machine: nothing is encrypted, anybody may take part
  --peer-timeout S      seconds of silence after which a client is dropped (default 10)
  --quiet               tells only what is wrong

Exit codes: 1 failed, 2 bad usage or a checkpoint that does not fit, 143 and 130 on signals.
"""

REPLAY_VALUES = {
  '--listen': 'ADDRESS', '--dir': 'DIR', '--checkpoint-every': 'S', '--table': 'SETTINGS',
  '--client-bytes': 'N', '--keys': 'DIR', '--insecure': '', '--peer-timeout': 'S', '--quiet': '',
}  # fmt: skip

KEYS_USAGE = """\
podrace keys new DIR          a learner's keys, one client's, and the list of allowed clients
podrace keys client DIR NEW   another client's keys, in the directory NEW; allows them in DIR

The learner needs DIR; a machine with environments only server.public, client.public and client.secret.
Lines of DIR/allowed_clients can be removed at any time: those sessions end.
"""

TOP_USAGE = """\
podrace top ADDRESS [OPTIONS]: the clients of a learner or a service, and what they do

  --keys DIR    as for envs
  --insecure
  --once        print it once, as JSON
  --every S     seconds between looks (default 1)
"""

TOP_VALUES = {'--keys': 'DIR', '--insecure': '', '--once': '', '--every': 'S'}


def no_arguments(options: Options, command: str) -> None:
  """Raises UsageError if there is anything besides options."""
  if options.arguments:
    raise UsageError(f'{command} takes options only, not {" ".join(options.arguments)}')


def environments(args: list[str]) -> int:
  """podrace envs."""
  if '-h' in args or '--help' in args:
    print(ENVS_USAGE, end='')
    return 0
  options = Options(args, ENVS_VALUES)
  no_arguments(options, 'envs')
  connect, env = (options.needed(name, 'envs') for name in ('--connect', '--env'))
  own_code.look_here([own_code.of_env(env)])
  from podrace import remote

  remote.require()
  from podrace.remote import client

  settings = client.Options(
    connect=connect,
    env=env,
    num_envs=options.whole('--num-envs', 1),
    workers=options.whole('--workers', 0),
    groups=options.whole('--groups', 0),
    seed=options.whole('--seed', 0) if '--seed' in options else None,
    keys=options.path('--keys'),
    insecure='--insecure' in options,
    deadline=options.number('--env-deadline', 60.0),
    give_up=options.number('--give-up-after', 0.0),
  )
  with log_to_stderr('podrace envs', '--quiet' in options):
    return client.run(settings)


def act(args: list[str]) -> int:
  """podrace act."""
  if '-h' in args or '--help' in args:
    print(ACT_USAGE, end='')
    return 0
  preset = take_preset(args)
  options = Options(args, ACT_VALUES, others_pass=True)
  replay_at, params = (options.needed(name, 'act') for name in ('--connect-replay', '--params'))
  share = options.text('--share', '0/1')
  part, slash, parts = share.partition('/')
  if not slash or not part.isdigit() or not parts.isdigit():
    raise UsageError(f'--share takes I/N, such as 0/2, not {share!r}')
  agent = agent_of(options)
  from podrace import remote

  remote.require()
  _allowed(options, options.arguments)
  base = implied(base_config(preset, None, agent, options.arguments), options.arguments)
  config = parse(base, options.arguments, 'podrace act')
  if is_open(preset, None, agent, options.arguments):
    config = settled(base, config.env, options.arguments, 'podrace act')
  from podrace import apex

  apex.check_options(config, options.arguments)
  addresses = apex.Addresses(
    tuple(replay_at.split(',')), params, options.path('--keys'), '--insecure' in options
  )
  settings = apex.Options(
    addresses,
    (int(part), int(parts)),
    max_staleness=options.number('--max-staleness', 60.0),
    give_up=options.number('--give-up-after', 0.0),
  )
  with log_to_stderr('podrace act', '--quiet' in options):
    if '--no-compile-cache' not in options:
      compile_cache.enable(logging.getLogger('podrace').info)
    return apex.act(config, settings)


def replay(args: list[str]) -> int:
  """podrace replay."""
  if '-h' in args or '--help' in args:
    print(REPLAY_USAGE, end='')
    return 0
  options = Options(args, REPLAY_VALUES)
  no_arguments(options, 'replay')
  listen = options.needed('--listen', 'replay')
  from podrace import remote

  remote.require()
  from podrace.remote.hub import PEER_SECONDS
  from podrace.service import server

  with log_to_stderr('podrace replay', '--quiet' in options):
    return server.run(
      listen,
      dir=options.path('--dir'),
      keys=options.path('--keys'),
      insecure='--insecure' in options,
      tables=server.parse_tables(options.every('--table')),
      checkpoint_every=options.number('--checkpoint-every', 0.0),
      most_bytes=options.whole('--client-bytes', 2**30),
      peer_timeout=options.number('--peer-timeout', PEER_SECONDS),
    )


def keys(args: list[str]) -> int:
  """podrace keys."""
  if '-h' in args or '--help' in args:
    print(KEYS_USAGE, end='')
    return 0
  args = Options(args, {}).arguments
  from podrace import remote

  remote.require()
  from podrace.remote import security

  if args[:1] == ['new'] and len(args) == 2:
    security.new_keys(Path(args[1]))
    print(f'keys are in {args[1]}; a machine with environments needs of them')
    print(f'  {security.SERVER_PUBLIC} {security.CLIENT_PUBLIC} {security.CLIENT_SECRET}')
  elif args[:1] == ['client'] and len(args) == 3:
    security.new_client(Path(args[1]), Path(args[2]))
    print(f'{args[2]} has the keys of a client that {args[1]}/{security.ALLOWED} allows')
  else:
    raise UsageError(f'keys takes `new DIR` or `client DIR NEW`, not {" ".join(args)!r}')
  return 0


def top(args: list[str]) -> int:
  """podrace top."""
  if '-h' in args or '--help' in args:
    print(TOP_USAGE, end='')
    return 0
  options = Options(args, TOP_VALUES)
  if len(options.arguments) != 1:
    raise UsageError(
      f'top takes one address, not {len(options.arguments)}: podrace top ADDRESS [OPTIONS]'
    )
  from podrace import remote

  remote.require()
  from podrace.remote import top as remote_top

  return remote_top.run(
    options.arguments[0],
    options.path('--keys'),
    '--insecure' in options,
    '--once' in options,
    options.number('--every', 1.0),
  )


# --- devices, bench -----------------------------------------------------------------------------

DEVICES_USAGE = """\
podrace devices [OPTIONS]: the devices that JAX sees, and who would act and learn under Sebulba

  --actor-devices 0,1    as for train
  --learner-devices 2,3
  --devices N
"""

DEVICES_VALUES = {'--actor-devices': 'NUMBERS', '--learner-devices': 'NUMBERS', '--devices': 'N'}

BENCH_USAGE = """\
podrace bench sebulba [PRESET] [OPTIONS of train] [--seconds S]: how fast the environments, the
actors' inference and the learner are alone, with the sizes of the run, and the run itself

  --seconds S            for each of the four (default 10)

The last line printed is JSON, in steps/s: environment, inference, learner, combined; `parallel` is
what they would reach by taking turns on the same cores, 1/(1/e + 1/i + 1/l); `minimum`, where actors
and learners have devices of their own, the slowest. `actor_time` says where the actor threads' time
goes, `bytes` what is on a device, `advice` what another setting may do better.
"""


def devices(args: list[str]) -> int:
  """podrace devices."""
  if '-h' in args or '--help' in args:
    print(DEVICES_USAGE, end='')
    return 0
  options = Options(args, DEVICES_VALUES)
  no_arguments(options, 'devices')
  number = options.whole('--devices', 0) if '--devices' in options else None
  import jax

  from podrace.topology import cores, split_devices

  topology = split_devices(
    options.text('--actor-devices'), options.text('--learner-devices'), number
  )
  learners = set(topology.local_learners)
  print(f'{cores()} cores; JAX {jax.__version__}; devices of this process:')
  for i, device in enumerate(jax.local_devices()):
    roles = [n for n, those in (('acts', topology.actors), ('learns', learners)) if device in those]
    memory = (device.memory_stats() or {}).get('bytes_limit')
    size = f', {memory / 2**30:.1f} GiB' if memory else ''
    print(f'  {i}  {device.platform}:{device.device_kind}{size}: {" and ".join(roles) or "idle"}')
  return 0


def bench(args: list[str]) -> int:
  """podrace bench."""
  if '-h' in args or '--help' in args:
    print(BENCH_USAGE, end='')
    return 0
  if not args or args.pop(0) != 'sebulba':
    raise UsageError('bench measures sebulba: podrace bench sebulba [PRESET] [OPTIONS]')
  preset = take_preset(args)
  options = Options(args, {**TRAIN_VALUES, '--seconds': 'S'}, others_pass=True)
  if wrong := set(options.names) - {'--agent', '--seconds'}:
    raise UsageError(f'bench keeps no run: {", ".join(sorted(wrong))} has no meaning')
  agent, seconds = agent_of(options), options.number('--seconds', 10.0)
  if not 0 < seconds < math.inf:
    raise UsageError(f'--seconds must be more than 0, not {seconds:g}')
  _allowed(options, options.arguments)
  base = base_config(preset, None, agent, options.arguments)
  base = dataclasses.replace(base, architecture='sebulba')
  config = parse(base, options.arguments)
  if is_open(preset, None, agent, options.arguments):
    config = settled(base, config.env, options.arguments)
  from podrace.bench import bench_sebulba

  print(json.dumps(bench_sebulba(config, seconds)))
  return 0


if __name__ == '__main__':
  main()
