"""The command line. What it needs of jax is imported only where something is to be computed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import datetime
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace.agents import AGENTS
from podrace.config import Config, UsageError, agent_class, agent_name, flag, unknown
from podrace.envs.registry import HOST_LIBRARIES
from podrace.presets import PRESETS

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
podrace eval DIR [OPTIONS]: episodes of the newest checkpoint of the run in DIR, greedily

  --episodes N    how many, of each seed (default 100)
  --seed S        of the evaluation (default 0)
  --sample        act as in training, by sampling
  --max-steps N   give up on episodes that are longer (default 1000000)

The last line printed is JSON: episode_return_mean, episode_return_std, episodes.
"""

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
  '--override': ('', 'resume although the configuration has changed'),
  '--sinks': ('NAMES', 'besides metrics.jsonl: tensorboard, wandb, or both with a comma'),
  '--quiet': ('', 'no progress'),
  '--listen': ('ADDRESS', 'of --envs remote: tcp://HOST:PORT or ipc://PATH, see docs/remote.md'),
  '--connect-replay': (
    'ADDRESSES',
    'of --replay service: where `podrace replay` listens, shards with commas; --listen is then '
    'where `podrace act` comes for parameters',
  ),
  '--keys': ('DIR', 'of --listen: made by `podrace keys new`; needed beyond this machine'),
  '--insecure': ('', 'of --listen: anybody may connect, nothing is encrypted'),
  '--peer-timeout': ('S', 'of --listen: seconds of silence that end a session (default 5)'),
  '--coordinator': ('HOST:PORT', 'of a run over several processes: where the first one listens'),
  '--num-processes': ('N', 'of a run over several processes'),
  '--process-id': ('I', 'which of them this is, from 0'),
}


def main(argv: Sequence[str] | None = None) -> None:
  """Runs a command and exits: 0 done, 2 bad usage or input, 1 failed, 128 + n on signal n."""
  args = list(sys.argv[1:] if argv is None else argv)
  try:
    code = _guarded(args)
  except Exception:
    if not _in_company():
      raise
    traceback.print_exc()
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  # A compilation may still be going in a thread, and can't be told to stop; and who leaves a run of
  # several processes in order waits for the others, which don't know yet, until JAX aborts it.
  if code > 128 or (code == 1 and _in_company()):
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
  except BrokenPipeError:  # who read the output has enough, as in `podrace list | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as e:
    if 'podrace.run' not in sys.modules:  # where there is no JAX
      raise
    from podrace.run import RunError, Stopped

    if isinstance(e, Stopped):
      from podrace.topology import leave_processes

      print(f'stopped by {e}; start again with the same --run-dir to go on', file=sys.stderr)
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
  print(f'podrace: {error}', file=sys.stderr)
  return code


# --- train --------------------------------------------------------------------------------------


def train(args: list[str]) -> int:
  """podrace train."""
  if '-h' in args or '--help' in args:
    print(train_help())
    return 0
  preset = args.pop(0) if args and not args[0].startswith('-') else None
  if preset is not None and preset not in PRESETS:
    raise unknown('preset', preset, PRESETS)
  options, rest = split_options(args)
  agent = options.get('--agent')
  if agent is not None and agent not in AGENTS and ':' not in agent:
    raise unknown('agent', agent, AGENTS)
  sys.path.insert(0, '')  # for agents and environments of the user's own, as `python -m` does
  run_dir = Path(options['--run-dir']) if '--run-dir' in options else None
  base = base_config(preset, run_dir, agent)
  if _value_of('--envs', rest) == 'remote':  # which has another default of --lag
    base = dataclasses.replace(base, envs='remote', lag='async')
  config = parse(base, rest)
  addresses = _addresses(options)
  listen = _listen(options) if addresses is None else None
  _join(options)

  from podrace import run

  if run_dir is None:
    run_dir = new_run_dir(preset or config.env.partition(',')[0].replace(':', '-'))
  sinks = tuple(s for s in options.get('--sinks', '').split(',') if s)
  summary = run.train(
    config, run_dir, override='--override' in options, sinks=sinks, quiet='--quiet' in options,
    listen=listen, addresses=addresses,
  )  # fmt: skip
  if '--quiet' not in options:
    _report(run_dir, summary)
  return 0


def _value_of(flag: str, args: list[str]) -> str | None:
  """What is given for a flag, the last time that it is."""
  found = None
  for i, arg in enumerate(args):
    name, equals, value = arg.partition('=')
    if name == flag:
      found = value if equals else next(iter(args[i + 1 : i + 2]), None)
  return found


def _listen(options: dict[str, str]) -> Any:
  """Where to listen for remote environments, if that is asked for."""
  given = [o for o in ('--keys', '--insecure', '--peer-timeout') if o in options]
  if '--listen' not in options:
    if given:
      raise UsageError(f'{", ".join(given)}: of --listen, which is not given')
    return None
  from podrace import remote

  remote.require()
  from podrace.remote.hub import Listen

  return Listen(
    options['--listen'],
    Path(options['--keys']) if '--keys' in options else None,
    '--insecure' in options,
    _number('--peer-timeout', options.get('--peer-timeout', '5')),
  )


def _addresses(options: dict[str, str]) -> Any:
  """Where the replay service is, and where to publish parameters, if that is asked for."""
  if '--connect-replay' not in options:
    return None
  if '--listen' not in options:
    raise UsageError('--connect-replay needs --listen, where `podrace act` comes for parameters')
  from podrace import remote

  remote.require()
  from podrace.apex import Addresses

  return Addresses(
    tuple(options['--connect-replay'].split(',')),
    options['--listen'],
    Path(options['--keys']) if '--keys' in options else None,
    '--insecure' in options,
  )


def _number(name: str, text: str) -> float:
  try:
    return float(text)
  except ValueError:
    raise UsageError(f'{name} takes a number, not {text!r}') from None


def _report(run_dir: Path, summary: dict[str, Any]) -> None:
  value = summary['episode_return']
  told = 'no episode ended' if value is None else f'return {value:.2f}'
  print(f'done: step {summary["step"]:,}, {told}, {summary["steps_per_s"]:,.0f} steps/s')
  print(f'run directory: {run_dir}')
  print(f'next: podrace eval {run_dir} --episodes 100')


def split_options(args: list[str]) -> tuple[dict[str, str], list[str]]:
  """Takes TRAIN_OPTIONS out of the arguments; the rest are fields of the config."""
  options: dict[str, str] = {}
  rest: list[str] = []
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name not in TRAIN_OPTIONS:
      rest.append(arg)
      continue
    takes, what = TRAIN_OPTIONS[name]
    if equals and not takes:
      raise UsageError(f'{name} takes no value, not {value!r}; leave it out for what it is not')
    if takes:
      value = value if equals else next(remaining, '')
      if not value or value.startswith('--'):
        raise UsageError(f'{name} needs a value: {what}')
    options[name] = value
  return options, rest


def base_config(preset: str | None, run_dir: Path | None, agent: str | None) -> Config:
  """What the flags change: the preset, else what the run directory records, else Catch."""
  from podrace.run import load_config

  if preset is None and run_dir is not None and (run_dir / 'config.json').exists():
    config = load_config(run_dir)
  else:
    config = PRESETS[preset or 'catch']()
  if agent is not None and agent != agent_name(config.agent):
    config = dataclasses.replace(config, agent=agent_class(agent)())
  return config


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
  values = [_whole(a) for a in args]
  found = tyro.cli(typed, args=values, prog=prog, config=(tyro.conf.FlagConversionOff,))
  return Config(**{f.name: getattr(found, f.name) for f in dataclasses.fields(Config)})


def _type(field: dataclasses.Field[Any]) -> Any:
  import typing

  return typing.get_type_hints(Config)[field.name]


def _whole(arg: str) -> str:
  """1e7 and 1_000_000 as integers, where that is what they are."""
  name, equals, text = arg.partition('=') if arg.startswith('--') else ('', '', arg)
  with contextlib.suppress(ValueError, OverflowError):
    value = float(text)
    if value == int(value) and not text.lstrip('-').isdigit():
      return f'{name}{equals}{int(value)}'
  return arg


def new_run_dir(name: str) -> Path:
  """A directory for a new run: runs/NAME-DATE-TIME."""
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  path = Path('runs') / f'{name}-{now}'
  n = 1
  while path.exists():
    n += 1
    path = Path('runs') / f'{name}-{now}-{n}'
  return path


def _join(options: dict[str, str]) -> None:
  """Joins the other processes of a run, if there are any."""
  given = [o for o in ('--coordinator', '--num-processes', '--process-id') if o in options]
  if not given:
    return
  if len(given) != 3:
    raise UsageError('--coordinator, --num-processes and --process-id go together')
  for name in given[1:]:
    if not options[name].isdigit():
      raise UsageError(f'{name} takes a whole number, not {options[name]!r}')
  from podrace.topology import join_processes

  join_processes(
    options['--coordinator'], int(options['--num-processes']), int(options['--process-id'])
  )


# --- help, without importing what it tells of ---------------------------------------------------


def train_help() -> str:
  """The help of `train`: read from the source, since importing it would take seconds."""
  lines = [
    'podrace train [PRESET] [OPTIONS]: train an agent; without arguments, IMPALA on Catch',
    '',
    f'presets: {", ".join(PRESETS)} (see `podrace list`)',
    '',
    'options:',
  ]
  lines += [_row(name, value, help) for name, (value, help) in TRAIN_OPTIONS.items()]
  lines += ['', 'the run (defaults of Config; presets have their own):']
  here = Path(__file__).parent
  lines += [_row(*f) for f in fields_of(here / 'config.py', 'Config', '--') if f[0] != '--agent']
  for name, (module, cls) in AGENTS.items():
    lines += ['', f'agent {name}:']
    path = here.parent / (module.replace('.', '/') + '.py')
    fields = fields_of(path, cls, '--agent.')
    lines += [_row(*f) for f in fields if f[0].rpartition('.')[2] not in PARTS]
  for name, kinds in PARTS.items():
    for cls, (file, agents) in kinds.items():
      lines += ['', f'the {name} of {agents}:']
      lines += [_row(*f) for f in fields_of(here / file, cls, f'--agent.{name}.')]
  return '\n'.join(lines)


PARTS = {  # fields of agents that have fields of their own -> class -> where, and whose
  'network': {
    'ActorCritic': ('networks.py', 'impala and ppo'),
    'QNetwork': ('networks.py', 'dqn and r2d2'),
  },
  'actor': {'Actor': ('networks.py', 'sac and d4pg')},
  'critic': {'Critic': ('networks.py', 'sac and d4pg')},
  'buffer': {'Buffer': ('replay/windows.py', 'dqn, r2d2, sac and d4pg')},
}


def fields_of(path: Path, cls: str, prefix: str) -> list[tuple[str, str, str]]:
  """Flag, value and help of a dataclass' fields, from its source: the comment is the help."""
  source = path.read_text()
  lines = source.splitlines()
  classes = {n.name: n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)}
  bases = [b.id for b in classes[cls].bases if isinstance(b, ast.Name) and b.id in classes]
  found = {f[0]: f for base in bases for f in fields_of(path, base, prefix)}
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
    if node.value is not None and not isinstance(node.value, ast.Call):
      default = ast.literal_eval(node.value)
      shown = ' '.join(map(str, default)) if isinstance(default, tuple) else str(default)
      comment = f'{comment} (default {shown})'.strip()
    name = prefix + flag(node.target.id)
    inherited = found.get(name, ('', '', ''))[2].partition('(default')[0].strip()
    if inherited and (not comment or comment.startswith('(default')):
      comment = f'{inherited} {comment}'.strip()
    found[name] = (name, kind, comment)
  return list(found.values())


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
  values: dict[str, Any] = {'--episodes': 100, '--seed': 0, '--max-steps': 1_000_000}
  sample, positional = False, []
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name == '--sample':
      sample = True
    elif name in values:
      text = value if equals else next(remaining, '')
      if not text.isdigit():
        raise UsageError(f'{name} takes a whole number, not {text!r}')
      values[name] = int(text)
    elif name.startswith('-'):
      raise unknown('option', name, [*values, '--sample'])
    else:
      positional.append(arg)
  if len(positional) != 1:
    raise UsageError(f'eval takes one run directory, not {len(positional)}: {EVAL_USAGE}')
  from podrace.evaluate import evaluate as run_evaluation

  result = run_evaluation(
    Path(positional[0]), values['--episodes'], values['--seed'], sample, values['--max-steps']
  )
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
  print('\nenvironments on the host, for --architecture sebulba (those above as well):')
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
  --workers N         threads or processes that step them (default: one for each core)
  --groups N          that step by themselves, so that some are stepped while the learner infers for
                      others (default 2, or as many as the learner's threads ask for)
  --keys DIR          with server.public, client.public and client.secret: `podrace keys new`
  --insecure          no keys, beyond this machine: nothing is encrypted
  --seed S            of the environments (default: random)
  --env-deadline S    seconds that a step may take (default 60)
  --give-up-after S   end if there is no learner for so long (default: wait for it)

It comes back after whatever happens to the connection or to the learner, with environments that begin
anew. Exit codes: 0 the run is complete, 1 failed, 2 refused or bad usage, 143 and 130 on signals.
"""

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
  the other options are those of train; agent and environment must be the learner's

It waits for whom it needs, and comes back to them. Exit codes: 0 the run is complete, 1 failed, 2 refused
or bad usage, 143 and 130 on signals.
"""

REPLAY_USAGE = """\
podrace replay --listen ADDRESS [OPTIONS]: replay tables that many processes write to and sample from;
needs no JAX. Clients have the tables made that they need; docs/replay-service.md says how

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
  --peer-timeout S      seconds of silence after which a client is dropped (default 5)

Exit codes: 1 failed, 2 bad usage or a checkpoint that does not fit, 143 and 130 on signals.
"""

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


def _options(args: list[str], values: dict[str, str], switches: Sequence[str]) -> list[str]:
  """Puts what is given for flags into `values`, switches as '1'; what is left are arguments."""
  left = []
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name in switches and not equals:
      values[name] = '1'
    elif name in values:
      values[name] = value if equals else next(remaining, '')
      if not values[name]:
        raise UsageError(f'{name} needs a value')
    elif name.startswith('-'):
      raise unknown('option', name, [*values, *switches])
    else:
      left.append(arg)
  return left


def _whole_number(name: str, text: str) -> int:
  if not text.isdigit():
    raise UsageError(f'{name} takes a whole number, not {text!r}')
  return int(text)


def environments(args: list[str]) -> int:
  """podrace envs."""
  if not args or '-h' in args or '--help' in args:
    print(ENVS_USAGE, end='')
    return 0
  values = {'--connect': '', '--env': '', '--num-envs': '1', '--workers': '0', '--groups': '0',
            '--keys': '', '--seed': '', '--env-deadline': '60', '--give-up-after': '0'}  # fmt: skip
  if left := _options(args, values, ('--insecure',)):
    raise UsageError(f'envs takes options only, not {" ".join(left)}')
  for name in ('--connect', '--env'):
    if not values[name]:
      raise UsageError(f'envs needs {name}: see podrace envs --help')
  sys.path.insert(0, '')  # for environments of the user's own
  from podrace import remote

  remote.require()
  from podrace.remote import client

  return client.run(
    client.Options(
      connect=values['--connect'],
      env=values['--env'],
      num_envs=_whole_number('--num-envs', values['--num-envs']),
      workers=_whole_number('--workers', values['--workers']),
      groups=_whole_number('--groups', values['--groups']),
      seed=_whole_number('--seed', values['--seed']) if values['--seed'] else None,
      keys=Path(values['--keys']) if values['--keys'] else None,
      insecure='--insecure' in values,
      deadline=_number('--env-deadline', values['--env-deadline']),
      give_up=_number('--give-up-after', values['--give-up-after']),
    )
  )


def act(args: list[str]) -> int:
  """podrace act."""
  if not args or '-h' in args or '--help' in args:
    print(ACT_USAGE, end='')
    return 0
  preset = args.pop(0) if not args[0].startswith('-') else None
  if preset is not None and preset not in PRESETS:
    raise unknown('preset', preset, PRESETS)
  values = {'--connect-replay': '', '--params': '', '--share': '0/1', '--max-staleness': '60',
            '--give-up-after': '0', '--keys': '', '--agent': ''}  # fmt: skip
  mine, rest = _take(args, values, ('--insecure',))
  for name in ('--connect-replay', '--params'):
    if not values[name]:
      raise UsageError(f'act needs {name}: see podrace act --help')
  part, slash, parts = values['--share'].partition('/')
  if not slash or not part.isdigit() or not parts.isdigit():
    raise UsageError(f'--share takes I/N, such as 0/2, not {values["--share"]!r}')
  agent = values['--agent'] or None
  if agent is not None and agent not in AGENTS and ':' not in agent:
    raise unknown('agent', agent, AGENTS)
  from podrace import remote

  remote.require()
  sys.path.insert(0, '')
  config = parse(base_config(preset, None, agent), rest, 'podrace act')
  from podrace import apex

  addresses = apex.Addresses(
    tuple(values['--connect-replay'].split(',')),
    values['--params'],
    Path(values['--keys']) if values['--keys'] else None,
    '--insecure' in mine,
  )
  options = apex.Options(
    addresses,
    (int(part), int(parts)),
    max_staleness=_number('--max-staleness', values['--max-staleness']),
    give_up=_number('--give-up-after', values['--give-up-after']),
  )
  return apex.act(config, options)


def _take(
  args: list[str], values: dict[str, str], switches: Sequence[str]
) -> tuple[set[str], list[str]]:
  """Takes these flags out of the arguments, into `values`; the switches given, and the rest."""
  found, rest = set(), []
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name in switches and not equals:
      found.add(name)
    elif name in values:
      values[name] = value if equals else next(remaining, '')
      if not values[name]:
        raise UsageError(f'{name} needs a value')
    else:
      rest.append(arg)
  return found, rest


def replay(args: list[str]) -> int:
  """podrace replay."""
  if not args or '-h' in args or '--help' in args:
    print(REPLAY_USAGE, end='')
    return 0
  values = {'--listen': '', '--dir': '', '--checkpoint-every': '0', '--client-bytes': str(2**30),
            '--keys': '', '--peer-timeout': '5'}  # fmt: skip
  declared, rest = [], []
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name == '--table':
      declared.append(value if equals else next(remaining, ''))
    else:
      rest.append(arg)
  if left := _options(rest, values, ('--insecure',)):
    raise UsageError(f'replay takes options only, not {" ".join(left)}')
  if not values['--listen']:
    raise UsageError('replay needs --listen: see podrace replay --help')
  from podrace import remote

  remote.require()
  from podrace.service import server

  return server.run(
    values['--listen'],
    dir=Path(values['--dir']) if values['--dir'] else None,
    keys=Path(values['--keys']) if values['--keys'] else None,
    insecure='--insecure' in values,
    tables=server.parse_tables(declared),
    checkpoint_every=_number('--checkpoint-every', values['--checkpoint-every']),
    most_bytes=_whole_number('--client-bytes', values['--client-bytes']),
    peer_timeout=_number('--peer-timeout', values['--peer-timeout']),
  )


def keys(args: list[str]) -> int:
  """podrace keys."""
  if not args or '-h' in args or '--help' in args:
    print(KEYS_USAGE, end='')
    return 0
  from podrace import remote

  remote.require()
  from podrace.remote import security

  if args[0] == 'new' and len(args) == 2:
    security.new_keys(Path(args[1]))
    print(f'keys are in {args[1]}; a machine with environments needs of them')
    print(f'  {security.SERVER_PUBLIC} {security.CLIENT_PUBLIC} {security.CLIENT_SECRET}')
  elif args[0] == 'client' and len(args) == 3:
    security.new_client(Path(args[1]), Path(args[2]))
    print(f'{args[2]} has the keys of a client that {args[1]}/{security.ALLOWED} allows')
  else:
    raise UsageError(f'keys takes `new DIR` or `client DIR NEW`, not {" ".join(args)!r}')
  return 0


def top(args: list[str]) -> int:
  """podrace top."""
  if not args or '-h' in args or '--help' in args:
    print(TOP_USAGE, end='')
    return 0
  values = {'--keys': '', '--every': '1'}
  left = _options(args, values, ('--insecure', '--once'))
  if len(left) != 1:
    raise UsageError(f'top takes one address, not {len(left)}')
  from podrace import remote

  remote.require()
  from podrace.remote import top as remote_top

  return remote_top.run(
    left[0],
    Path(values['--keys']) if values['--keys'] else None,
    '--insecure' in values,
    '--once' in values,
    _number('--every', values['--every']),
  )


# --- devices, bench -----------------------------------------------------------------------------

DEVICES_USAGE = """\
podrace devices [OPTIONS]: the devices that JAX sees, and who would act and learn under Sebulba

  --actor-devices 0,1    as for train
  --learner-devices 2,3
  --devices N
"""

BENCH_USAGE = """\
podrace bench sebulba [PRESET] [OPTIONS of train] [--seconds S]: how fast the environments, the
actors' inference and the learner are alone, with the sizes of the run, and the run itself

The last line printed is JSON, in steps/s: environment, inference, learner, combined; `parallel` is
what they would reach by taking turns on the same cores, 1/(1/e + 1/i + 1/l).
"""


def devices(args: list[str]) -> int:
  """podrace devices."""
  if '-h' in args or '--help' in args:
    print(DEVICES_USAGE, end='')
    return 0
  values = {'--actor-devices': '', '--learner-devices': '', '--devices': ''}
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name not in values:
      raise unknown('option', name, values)
    values[name] = value if equals else next(remaining, '')
  number = values['--devices']
  if number and not number.isdigit():
    raise UsageError(f'--devices takes a whole number, not {number!r}')
  import jax

  from podrace.topology import cores, split_devices

  topology = split_devices(
    values['--actor-devices'], values['--learner-devices'], int(number) if number else None
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
  if not args or args[0] in ('-h', '--help') or '--help' in args:
    print(BENCH_USAGE, end='')
    return 0
  if args.pop(0) != 'sebulba':
    raise UsageError('bench measures sebulba: podrace bench sebulba [PRESET] [OPTIONS]')
  preset = args.pop(0) if args and not args[0].startswith('-') else None
  if preset is not None and preset not in PRESETS:
    raise unknown('preset', preset, PRESETS)
  seconds, rest = 10.0, []
  remaining = iter(args)
  for arg in remaining:
    name, equals, value = arg.partition('=')
    if name == '--seconds':
      text = value if equals else next(remaining, '')
      try:
        seconds = float(text)
      except ValueError:
        raise UsageError(f'--seconds takes a number, not {text!r}') from None
    else:
      rest.append(arg)
  options, rest = split_options(rest)
  if wrong := options.keys() - {'--agent'}:
    raise UsageError(f'bench keeps no run: {", ".join(sorted(wrong))} has no meaning')
  agent = options.get('--agent')
  if agent is not None and agent not in AGENTS and ':' not in agent:
    raise unknown('agent', agent, AGENTS)
  sys.path.insert(0, '')
  base = dataclasses.replace(base_config(preset, None, agent), architecture='sebulba')
  config = parse(base, rest)
  from podrace.bench import bench_sebulba

  print(json.dumps(bench_sebulba(config, seconds)))
  return 0


if __name__ == '__main__':
  main()
