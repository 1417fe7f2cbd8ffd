"""The command line: a contract, so each word and each exit code of it is tested."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import rule_files
from children import hide_library
from gymnasium import spaces
from processes import (
  Podrace,
  as_users_have_it,
  cache,
  checkpoints,
  command,
  environment,
  lines,
  podrace,
  summary,
)
from shared_programs import shared_programs
from shorthand import Capture, Patch, slow_after

import podrace as podrace_
from podrace import cli
from podrace.agents import AGENTS
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.commands import (
  act,
  configure,
  devices,
  envs,
  evaluate,
  follow,
  list_names,
  plot,
  replay,
  rm,
  runs,
  top,
  train,
  watch,
)
from podrace.commands.shared_options import PEER_TIMEOUT
from podrace.distributed.net.session_messages import SILENCE
from podrace.errors import PolicyError, UsageError
from podrace.experiments import runs as directories
from podrace.fields import flag
from podrace.hooks import BOUND
from podrace.networks import ActorCritic
from podrace.run import directory, new_directory
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.system.options import Command as Declared
from podrace.system.options import Options

TINY = ['--num-envs', '4', '--unroll-length', '8', '--agent.network.hidden', '16',
        '--total-steps', '640', '--devices', '1']  # fmt: skip


@pytest.fixture(scope='module')
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
  """A finished run, made through the interpreter."""
  run_dir = tmp_path_factory.mktemp('finished') / 'run'
  done = command('train', 'catch', *TINY, '--run-dir', str(run_dir))
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-2:] == [
    f'run directory: {run_dir}',
    f'next: podrace eval {run_dir} --episodes 100',
  ]
  assert '\x1b' not in done.stdout + done.stderr
  return run_dir


class Command:
  """`podrace ARGS` in this process: exit code, standard output and standard error."""

  def __init__(self, capfd: Capture) -> None:
    self.capfd = capfd

  def __call__(self, *args: str) -> tuple[int, str, str]:
    self.capfd.readouterr()
    with pytest.raises(SystemExit) as end:
      cli.main(args)
    return end.value.code, *self.capfd.readouterr()


@pytest.fixture
def run(capfd: Capture) -> Command:
  return Command(capfd)


# --- help ---------------------------------------------------------------------------------------

HELP = [[], ['--help'], ['-h'], ['--version'], ['train', '--help'], ['train', 'catch', '-h'],
        ['train', '--help-all'], ['train', 'r2d2-remote-memory', '--help'], ['runs', '--help'], ['plot', '--help'],
        ['watch', '--help'], ['rm', '--help'], ['follow', '--help'],
        ['eval', '--help'], ['list', '--help'], ['list'], ['envs', '--help'], ['keys', '-h'],
        ['top', '--help'], ['devices', '-h'], ['bench', '--help'],
        ['discover', '--help'], ['discover', 'disco-small', '-h']]  # fmt: skip


def test_help_does_not_import_what_it_tells_of() -> None:
  """Which is what makes it answer in under half a second."""
  code = (
    'import contextlib, io, json, sys; from podrace import cli\n'
    'for args in json.loads(sys.argv[1]):\n'
    '  with contextlib.redirect_stdout(io.StringIO()) as said:\n'
    '    try: cli.main(args)\n'
    '    except SystemExit as e: assert e.code == 0, (args, e.code)\n'
    '  heavy = {"jax", "numpy", "flax", "orbax", "tyro", "rich", "gymnasium"} & set(sys.modules)\n'
    '  assert said.getvalue() and not heavy, (args, heavy)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code, json.dumps(HELP)], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr


def shown(option: str, field: Any) -> str:
  """An option as the help has it: a boolean with both forms."""
  if isinstance(field.default, bool):
    head, dot, last = option.rpartition('.')
    option = f'{head}.[no-]{last}' if dot else f'--[no-]{option[2:]}'
  return f'  {option} '


PARTS = ('network', 'buffer', 'actor', 'critic', 'tuning', 'popart', 'recurrence', 'cem')


@pytest.mark.parametrize('preset', PRESETS)
def test_help_with_a_preset_has_its_agent_alone(preset: str, run: Command) -> None:
  config = PRESETS[preset]()
  _, said, _ = run('train', preset, '--help')
  assert f'agent {agent_name(config.agent)}:' in said
  assert [n for n in AGENTS if f'\nagent {n}:' in said] == [agent_name(config.agent)]
  for field in dataclasses.fields(config.agent):
    if field.name not in (*PARTS, *BOUND):
      assert shown(f'--agent.{flag(field.name)}', field) in said
  assert ('--actor-threads' in said) == (config.architecture == 'sebulba')
  options = said.partition('options, ')[2]
  assert options.index('--total-steps') < options.index('--seed ') < options.index('--keep')
  assert said.endswith('podrace train --help-all has every option\n')


def test_help_of_train_is_short(run: Command) -> None:
  _, said, _ = run('train', '--help')
  assert len(said.splitlines()) < 60 and '--agent.' not in said.partition('options, ')[2].replace(
    '--agent.FIELD', ''
  )
  assert 'agents: impala, ppo' in said
  _, said, _ = run('train', '--agent', 'dqn', '--help')
  assert '--agent.buffer.capacity int' in said and 'agent r2d2:' not in said
  assert '--architecture sebulba --help' in said
  _, said, _ = run('train', '--architecture', 'sebulba', '--lag', '0', '--help')
  assert '--architecture sebulba --help' not in said and 'any number (default 0)' in said
  _, said, _ = run('train', '--agent', 'ppo', '--env', 'gymnax:Asterix-MinAtar', '--help')
  assert '(default gymnax:Asterix-MinAtar)' in ' '.join(said.split()) and 'add --env' not in said
  code, _, err = run('train', 'catsch', '--help')
  assert code == 2 and "'catsch'" in err


def test_help_of_train_has_every_option(run: Command) -> None:
  _, said, _ = run('train', '--help-all')
  for option in train.COMMAND.options:
    assert f'  {option.name} {option.value}'.rstrip() in said
  for field in dataclasses.fields(Config):
    if field.name != 'agent':
      assert shown(f'--{flag(field.name)}', field) in said
  for agent in (Impala, PPO):
    for field in dataclasses.fields(agent):
      if field.name not in (*PARTS, 'total_updates'):
        assert shown(f'--agent.{flag(field.name)}', field) in said
  assert '--agent.network.core-size int' in said
  assert '--agent.tuning.learning-rate float' in said
  assert 'observation-space' not in said and 'total-updates' not in said
  assert '(default )' not in said
  recurrent = said.partition('agent r2d2:')[2].partition('agent sac:')[0]  # what it has of its own
  assert '--agent.network.core                        (default lstm)' in recurrent
  assert '--agent.buffer.samples-per-insert           (default 0.015)' in recurrent
  assert '--agent.critic.torso' not in said
  plain = ' '.join(said.split())
  assert '--actor-devices str Sebulba: devices that act, such as 0,1. Default: all that' in plain
  assert '--agent.[no-]actor-priorities Compute first priorities' in plain


@pytest.mark.parametrize(
  'command',
  [x.COMMAND for x in (evaluate, envs, act, replay, top, devices, runs, plot, watch, rm, follow)],
  ids=lambda command: command.name,
)
def test_help_tells_of_every_option(command: Declared, run: Command) -> None:
  code, usage, _ = run(command.name, '--help')
  assert code == 0 and usage.startswith(f'podrace {command.name} ')
  plain = ' '.join(usage.split())
  for option in command.options:
    assert f'  {option.name} {option.value}'.rstrip() + ' ' in usage.replace('\n', ' ')
    assert option.text.lower() in plain.lower()
    if option.default:
      assert '(default' in option.text


def test_the_silence_that_ends_a_session_is_that_of_the_hub() -> None:
  assert PEER_TIMEOUT.default == SILENCE


def test_help_of_an_agent_of_ones_own_is_its_own(
  run: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  monkeypatch.delitem(sys.modules, 'of_mine', raising=False)
  (tmp_path / 'of_mine.py').write_text(
    'import dataclasses\nfrom podrace.networks import ActorCritic\nRATE = 3\n'
    '@dataclasses.dataclass(frozen=True)\nclass Agent:\n'
    '  network: ActorCritic = ActorCritic()\n  boldness: float = 2 * RATE  # of its steps\n'
    '  total_updates: int = 0\n'
  )
  code, said, _ = run('train', '--agent', 'of_mine:Agent', '--help')
  assert code == 0
  assert '--agent.boldness float' in said and '(default 6)' in said
  assert '--agent.network.core-size int' in said and '--num-envs' in said
  for other in ('--agent.clip-rho', '--agent.epochs', 'total-updates', 'observation-space'):
    assert other not in said
  code, _, told = run('train', '--agent', 'of_mine:Agnet', '--help')
  assert code == 2 and "'of_mine:Agnet'" in told


OF_PYTHON = """
import dataclasses, enum, pathlib
from collections.abc import Callable
from typing import Any
import jax
from podrace.agents.impala import Impala
class Kind(enum.Enum):
  A = 1
  B = 2
def named(x): return x
@dataclasses.dataclass(frozen=True)
class Agent(Impala):
  boldness: float = 1.0
  activation: Callable = jax.nn.relu
  pair: tuple[Callable, ...] = (jax.nn.relu, named)
  table: dict[str, int] = dataclasses.field(default_factory=lambda: {'a': 1})
  kind: Kind = Kind.A
  path: pathlib.Path = pathlib.Path('x')
  dtype: Any = jax.numpy.float32
@dataclasses.dataclass(frozen=True)
class Nameless(Agent):
  activation: Callable = lambda x: x
"""


@pytest.fixture
def of_python(tmp_path: Path, monkeypatch: Patch) -> Path:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  monkeypatch.delitem(sys.modules, 'of_python', raising=False)
  (tmp_path / 'of_python.py').write_text(OF_PYTHON)
  return tmp_path


def test_values_of_python_are_defaults_that_an_evaluation_has_again(
  run: Command, of_python: Path
) -> None:
  train = ['train', '--agent', 'of_python:Agent', '--agent.boldness', '2', '--num-envs', '8']
  train += ['--total-steps', '64', '--run-dir', 'run', '--unroll-length', '4']
  code, said, _ = run(*train)
  assert code == 0 and '--allow-code of_python\n' in said and said.count('--allow-code') == 1
  agent = directory.load_config(Path('run'), ['of_python']).agent
  ours = sys.modules['of_python']
  assert agent.activation is jax.nn.relu and agent.pair == (jax.nn.relu, ours.named)
  assert agent.kind is ours.Kind.A and agent.table == {'a': 1} and agent.path == Path('x')
  assert agent.dtype is jax.numpy.float32 and agent.boldness == 2

  record = json.loads(Path('run/config.json').read_text())
  record['agent']['activation']['repr'] = 'jax:relu'
  Path('run/config.json').write_text(json.dumps(record))
  code, _, said = run('eval', 'run', '--allow-code', 'of_python')
  assert code == 2 and 'jax:relu' in said


@pytest.mark.parametrize('option', ['activation', 'pair', 'table', 'kind', 'path', 'dtype'])
def test_values_of_python_have_no_text(run: Command, of_python: Path, option: str) -> None:
  code, _, said = run('train', '--agent', 'of_python:Agent', f'--agent.{option}', 'B')
  assert code == 2 and f'--agent.{option}' in said and "'B'" in said and 'Python' in said


def test_a_lambda_is_refused_before_training(run: Command, of_python: Path) -> None:
  code, _, said = run('train', '--agent', 'of_python:Nameless', '--run-dir', 'run')
  assert code == 2 and '<lambda>' in said and not Path('run').exists()


@pytest.mark.slow
def test_an_agent_of_ones_own_is_trained_and_evaluated(tmp_path: Path) -> None:
  """By the program that is installed, which does not look for modules where it is called."""
  (tmp_path / 'of_mine.py').write_text(
    'import dataclasses\nfrom podrace.agents.impala import Impala\n'
    '@dataclasses.dataclass(frozen=True)\nclass Agent(Impala):\n  pass\n'
  )
  program = Path(sys.executable).parent / 'podrace'
  train = ['train', '--agent', 'of_mine:Agent', '--total-steps', '640', '--run-dir', 'run']
  for args in (train, ['eval', 'run', '--episodes', '4', '--allow-code', 'of_mine']):
    done = subprocess.run(
      [program, *args], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['episodes'] == 4


def test_list(run: Command) -> None:
  code, said, _ = run('list')
  assert code == 0
  for name in (*PRESETS, *AGENTS, 'podrace:catch', 'podrace:memory', 'gymnax:CartPole-v1'):
    assert f' {name}' in said
  for library in ('brax', 'jumanji', 'navix', 'craftax'):
    assert f' {library}:' in said


# --- train --------------------------------------------------------------------------------------


def config_of(*args: str) -> Config:
  preset = args[0] if args and not args[0].startswith('-') else None
  return configure.parse(configure.base_config(preset), list(args[1:] if preset else args))


def test_without_arguments_it_is_catch_on_anakin() -> None:
  config = config_of()
  assert config == PRESETS['catch']()
  assert config.env == 'podrace:catch' and config.architecture == 'anakin'


def test_cartpole_is_ppo_on_gymnax_under_anakin() -> None:
  config = config_of('cartpole')
  assert type(config.agent) is PPO
  assert config.env == 'gymnax:CartPole-v1' and config.architecture == 'anakin'


def test_flags_reach_every_kind_of_field() -> None:
  config = config_of(
    'catch', '--env', 'podrace:memory,length=20', '--total-steps', '1e7', '--seed', '1_000',
    '--devices', '2', '--checkpoint-every=500', '--agent.learning-rate', '1e-4',
    '--agent.lambda', '0.5', '--agent.optimizer', 'rmsprop', '--agent.normalize-rewards',
    '--agent.network.hidden', '32', '16', '--agent.network.core', 'lstm',
  )  # fmt: skip
  agent = config.agent
  assert config.env == 'podrace:memory,length=20'
  assert (config.total_steps, config.seed, config.devices) == (10_000_000, 1000, 2)
  assert config.checkpoint_every == 500
  assert (agent.learning_rate, agent.lambda_, agent.optimizer) == (1e-4, 0.5, 'rmsprop')
  assert agent.normalize_rewards is True
  assert (agent.network.hidden, agent.network.core) == ((32, 16), 'lstm')


@pytest.mark.parametrize(
  ('args', 'architecture'),
  [
    (['--env', 'gymnasium:CartPole-v1'], 'sebulba'),
    (['--env=ale:pong,sticky=0.25'], 'sebulba'),
    (['--envs', 'remote'], 'sebulba'),
    (['--replay', 'host'], 'sebulba'),
    (['--replay', 'service'], 'sebulba'),
    (['--env', 'gymnax:CartPole-v1'], 'anakin'),
    (['--env', 'ale:pong', '--env', 'podrace:memory'], 'anakin'),
    (['--env', 'ale:pong', '--architecture', 'anakin'], 'anakin'),  # which is refused
    ([], 'anakin'),
  ],
  ids=' '.join,
)
def test_what_has_but_one_architecture_implies_it(args: list[str], architecture: str) -> None:
  options = Options(args, train.COMMAND)
  assert configure.with_architecture(Config(Impala()), options).architecture == architecture


@pytest.mark.slow
def test_an_environment_of_the_host_needs_no_word_of_the_architecture(tmp_path: Path) -> None:
  args = ['--env', 'gymnasium:CartPole-v1', '--run-dir', str(tmp_path / 'run')]
  done = command('train', '--agent', 'ppo', *TINY, '--agent.minibatches', '1', *args)
  assert done.returncode == 0, done.stderr
  assert summary(tmp_path / 'run')['step'] == 640


@pytest.mark.parametrize(
  ('args', 'value'),
  [
    (['--agent.normalize-rewards'], True),
    (['--agent.normalize_rewards', '--num-envs', '8'], True),
    (['--agent.normalize-rewards', '--agent.no-normalize-rewards'], False),
    (['--agent.no-normalize-rewards', '--agent.normalize-rewards'], True),
  ],
)
def test_booleans_are_switches(args: list[str], value: bool) -> None:
  assert configure.parse(Config(Impala()), args).agent.normalize_rewards is value
  assert configure.parse(Config(Impala()), ['--no-eval-video']).eval_video is False
  base = Config(Impala(network=ActorCritic(shared=True)))
  assert configure.parse(base, ['--agent.network.no-shared']).agent.network.shared is False


@pytest.mark.parametrize(
  'args',
  [
    ['--agent.normalize-rewards', 'True'],
    ['--agent.normalize-rewards', 'false'],
    ['--agent.normalize-rewards=yes'],
    ['--agent.no-normalize-rewards=1'],
    ['--agent.no-normalize-rewards', 'off'],
  ],
  ids=' '.join,
)
def test_a_boolean_takes_no_value(args: list[str]) -> None:
  with pytest.raises(UsageError) as refused:
    configure.parse(Config(Impala()), args)
  for name in ('--agent.normalize-rewards', '--agent.no-normalize-rewards'):
    assert name in str(refused.value)


def test_the_agent_option_takes_the_agents_defaults() -> None:
  ppo, impala = (Options(['--agent', name], train.COMMAND) for name in ('ppo', 'impala'))
  assert configure.base_config('catch', None, ppo).agent == PPO()
  assert configure.base_config('catch', None, impala) == PRESETS['catch']()
  assert configure.base_config('catch', None, ppo).env == 'podrace:catch'


def test_run_directory_through_the_interpreter(finished: Path) -> None:
  assert {'config.json', 'metrics.jsonl', 'checkpoints', 'summary.json'} <= {
    p.name for p in finished.iterdir()
  }
  for line in lines(finished):
    assert {'step', 'wall_s', 'steps_per_s', 'episode_return', 'episode_length'} <= line.keys()
  assert {'step', 'episode_return', 'steps_per_s', 'compile_s', 'params_sha256'} <= summary(
    finished
  ).keys()


def test_a_run_directory_is_named_where_none_is_given(
  run: Command, cache: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  code, output = podrace(['train', *TINY], tmp_path / 'log', cache=cache)
  assert code == 0, output
  (run_dir,) = (tmp_path / 'runs').iterdir()
  assert run_dir.name.startswith('podrace-catch-')
  assert f'run directory: runs/{run_dir.name}' in output
  assert summary(run_dir)['step'] == 640


def test_runs_of_one_second_have_directories_of_their_own(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(new_directory, 'datetime', SimpleNamespace(datetime=Noon))
  with contextlib.ExitStack() as stack:
    found = [stack.enter_context(new_directory.reserve_run_dir('catch')) for _ in range(3)]
    names = [f'catch-20200101-120000{x}' for x in ('', '-2', '-3')]
    assert found == [Path('runs') / n for n in names] and all(p.is_dir() for p in found)
    (found[1] / 'config.json').touch()
  assert list(tmp_path.glob('runs/*')) == [tmp_path / found[1]]


def test_a_directory_that_another_run_was_quicker_to_take(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  names = iter(['one', 'two'])
  monkeypatch.setattr(new_directory, 'choose_run_dir', lambda name: Path('runs') / next(names))
  (tmp_path / 'runs' / 'one').mkdir(parents=True)
  with new_directory.reserve_run_dir('catch') as path:
    assert path == Path('runs') / 'two'


class Noon:
  """A clock that stands."""

  @staticmethod
  def now() -> datetime.datetime:
    return datetime.datetime(2020, 1, 1, 12)


@pytest.mark.slow
def test_quiet(finished: Path) -> None:
  done = command('train', '--run-dir', str(finished), '--quiet')
  assert done.returncode == 0
  assert done.stderr.splitlines()[-1].startswith(f'{finished} is finished: step 640')
  assert 'compil' not in done.stderr and 'next: podrace eval' in done.stdout


def test_finished(run: Command, finished: Path) -> None:
  code, said, told = run('train', '--run-dir', str(finished))
  assert code == 0
  assert str(finished) in told and 'step 640' in told
  assert 'next: podrace eval' in said


def test_changed_configuration(run: Command, finished: Path, tmp_path: Path, cache: Path) -> None:
  before = {p: p.read_bytes() for p in finished.iterdir() if p.suffix in ('.json', '.jsonl')}
  code, _, told = run('train', '--run-dir', str(finished), '--total-steps', '1280', '--seed', '1')
  assert code == 2
  assert 'total_steps: 640 -> 1280' in told and 'seed: 0 -> 1' in told
  assert '--override' in told
  assert {p: p.read_bytes() for p in before} == before
  code, _, told = run('train', 'cartpole', '--run-dir', str(finished))
  assert code == 2
  assert 'agent.name: "impala" -> "ppo"' in told
  args = ['train', '--run-dir', str(finished), '--total-steps', '1280', '--override']
  code, output = podrace(args, tmp_path / 'log', cache=cache)
  assert code == 0, output
  assert 'resuming at step 640' in output
  assert summary(finished)['step'] == 1280
  assert json.loads((finished / 'config.json').read_text())['total_steps'] == 1280
  assert podrace(args[:-3], tmp_path / 'log', cache=cache)[0] == 0  # finished, and says so


def test_fewer_steps_of_a_finished_run(run: Command, finished: Path) -> None:
  steps = summary(finished)['step']
  code, _, err = run('train', '--run-dir', str(finished), '--total-steps', str(steps // 2))
  assert code == 2 and f'finished at step {steps:,}' in err


def test_parameters_of_another_agent(run: Command, finished: Path, tmp_path: Path) -> None:
  words = ['--init-from', str(finished), '--run-dir', str(tmp_path / 'run')]
  code, _, err = run('train', 'cartpole', *words)
  assert code == 2 and 'of impala, this one of ppo' in err and len(err.splitlines()) <= 3


def test_a_directory_alone_begins_a_run_that_is_named(run: Command, tmp_path: Path) -> None:
  """A mistyped directory would train Catch."""
  words = [*TINY, '--total-steps', '640', '--run-dir', str(tmp_path / 'run')]
  for preset, notes in (([], 1), ([], 0), (['catch'], 0)):
    code, _, err = run('train', *preset, *words)
    assert code == 0 and err.count('preset catch') == notes


@pytest.mark.slow
def test_only_the_run_directory_is_needed_to_resume(tmp_path: Path, cache: Path) -> None:
  args = ['train', 'catch', *TINY, '--total-steps', '1000000', '--log-every', '320',
          '--checkpoint-every', '3200', '--run-dir', str(tmp_path / 'run')]  # fmt: skip
  one = Podrace(args, tmp_path / 'log', cache=cache)
  one.says('\nstep ')
  again = Podrace(args, tmp_path / 'second', cache=cache)  # while the first is going
  assert again.wait() == 2
  assert 'in use' in again.output
  one.signal(signal.SIGTERM)
  assert one.wait() == 143, one.output
  (*_, newest) = checkpoints(tmp_path / 'run')
  again = Podrace(['train', '--run-dir', str(tmp_path / 'run')], tmp_path / 'log', cache=cache)
  again.says(f'resuming at step {newest:,}')
  again.signal(signal.SIGINT)
  assert again.wait() == 130, again.output


# --- eval ---------------------------------------------------------------------------------------


def test_eval_ends_with_one_json_line(run: Command, finished: Path) -> None:
  code, out, err = run('eval', str(finished), '--episodes', '7')
  assert code == 0, err
  result = json.loads(out.splitlines()[-1])
  assert result['episodes'] == result['sampled_episodes'] == 7
  first, line = err.splitlines()
  assert first.startswith('step ') and 'compiling, then 7 episodes, greedy and sampled' in first
  assert line.startswith('return: greedy ') and ', sampled ' in line
  assert -1 <= result['episode_return_mean'] <= 1 and result['episode_return_std'] >= 0
  assert 'Traceback' not in err


# --- devices, bench -----------------------------------------------------------------------------


def test_devices(run: Command) -> None:
  code, out, _ = run('devices', '--actor-devices', '0,1', '--learner-devices=2,3')
  assert code == 0
  first, *rest = out.splitlines()
  assert jax.__version__ in first
  assert [line.split(': ')[1] for line in rest] == ['acts', 'acts', 'learns', 'learns'] + [
    'idle'
  ] * 4
  code, out, _ = run('devices', '--devices', '1')
  assert code == 0 and out.splitlines()[1].endswith(': acts and learns')


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--actor-devices', '0,9'], '9'),
    (['--devices', 'many'], '--devices'),
    (['--actors', '0'], "'--actors'"),
  ],
)
def test_devices_that_are_not_there(run: Command, args: list[str], message: str) -> None:
  code, out, err = run('devices', *args)
  assert (code, out) == (2, '') and message in err


@pytest.mark.parametrize(('learner', 'model'), slow_after(1, ('1', '1'), ('0', '1'), ('1,0', '2')))  # fmt: skip
def test_bench_sebulba(run: Command, learner: str, model: str) -> None:
  code, out, err = run(
    'bench', 'sebulba', 'catch', '--num-envs', '8', '--unroll-length', '4', '--seconds', '0.1',
    '--agent.network.hidden', '16', '--actor-devices', '0', '--learner-devices', learner,
    '--model-devices', model,
  )  # fmt: skip
  assert code == 0, err
  told = json.loads(out.splitlines()[-1])
  rates = [told[k] for k in ('environment', 'inference', 'learner', 'combined', 'parallel')]
  assert min(rates) > 0
  assert told['parallel'] == pytest.approx(1 / sum(1 / r for r in rates[:3]), rel=0.01)
  for shares in told['actor_time'], *told['actor_time_by_thread']:
    assert sum(shares.values()) == pytest.approx(1, abs=0.01)
  assert len(told['actor_time_by_thread']) == told['threads'] == 2
  apart = learner == '1'
  assert ('minimum' in told) == ('combined_over_minimum' in told) == apart
  if apart:
    assert told['minimum'] == min(rates[:3])
    expected = told['combined'] / told['minimum']
    assert told['combined_over_minimum'] == pytest.approx(
      expected, rel=0.02, abs=0.01
    )  # of rounded rates


@pytest.mark.slow
def test_bench_takes_actions_that_masks_allow(run: Command) -> None:
  code, out, told = run(
    'bench', 'sebulba', '--env', 'gymnasium:host_envs:Masked-v0', '--num-envs', '2', '--unroll-length', '4',
    '--actor-threads', '1', '--devices', '1', '--agent.network.hidden', '8', '--seconds', '0.1',
  )  # fmt: skip
  assert code == 0, told
  assert json.loads(out.splitlines()[-1])['environment'] > 0


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['anakin'], 'bench measures sebulba'),
    (['sebulba', 'pongg'], 'pong'),
    (['sebulba', 'catch', '--seconds', '0'], '--seconds'),
    (['sebulba', 'catch', '--seconds', 'x'], '--seconds'),
    (['sebulba', 'catch', '--run-dir', 'x'], '--run-dir'),
    (['sebulba', 'catch', '--replay', 'host'], '--replay host'),
    (['sebulba', 'catch', '--architecture', 'anakin'], '--architecture anakin'),
    (['sebulba', '--replay', 'service', '--lag', 'async'], '--replay service'),
  ],
)
def test_what_bench_cannot_do(run: Command, args: list[str], message: str) -> None:
  code, out, err = run('bench', *args)
  assert (code, out) == (2, '') and message in err


# --- bad input ----------------------------------------------------------------------------------

HUGE = '1' + 400 * '0'
BAD = [
  (['trian'], "unknown command 'trian': did you mean train"),
  (['compare', 'runs'], 'podrace plot'),
  (['train', ''], 'podrace list'),
  (['train', '--total-steps', '1M'], '1e6'),
  (['train', 'cartpol'], "unknown preset 'cartpol': did you mean cartpole"),
  (['train', '--agent', 'pppo'], "unknown agent 'pppo': did you mean ppo"),
  (['train', '--sinks', 'tensorbord'], "unknown sink 'tensorbord': did you mean tensorboard"),
  (['train', '--env', 'gymnaks:CartPole-v1'], 'nearest: gymnax'),
  (['train', '--env', 'gymnax:CartPole'], 'nearest: CartPole-v1'),
  (['train', '--env', 'catch'], 'LIB:NAME'),
  (['train', '--init-from', 'x', '--init-checkpoint', '_'], "--init-checkpoint is newest, best or a step, not '_'"),
  (['train', '--seeds', '0'], '--seeds must be at least 1'),
  (['train', '--seeds', '1000000000'], '--seeds must be at most 65,536'),
  (['train', '--agent', 'dqn', '--agent.network.core', 'transformer', '--agent.network.attention.window', '2147483647'],
   '--agent.network.attention.window'),
  (['train', '--agent', 'dqn', '--agent.network.core', 'transformer', '--agent.network.attention.layers', '100000000'],
   '--agent.network.attention.layers'),
  (['train', '--total-steps', '1e15'], 'in updates of 1024 steps must be less than 2^31, not 976562500000'),
  (['train', '--total-steps', '1e11', '--num-envs', '1', '--unroll-length', '100000'], 'in each of --num-envs 1, expected less than 2^31'),
  (['train', '--num-envs', '3e9'], '--num-envs must be less than 2^31'),
  *((['train', option, HUGE], f'{option} {HUGE} in updates of 1024 steps must be less than 2^31')
    for option in ('--log-every', '--checkpoint-every', '--eval-every')),
  (['train', '--keep', HUGE], '--keep must be less than 2^31'),
  (['discover', '--log-every', HUGE], '--log-every'),
  (['watch', '.', '--fps', '1001'], '--fps takes at most 1,000'),
  (['eval', '.', '--episodes', HUGE], '--episodes takes at most 9,223,372,036,854,775,807'),
  (['plan', '.', '--as', 'seed', '--machines', HUGE], '--machines takes at most'),
  (['plan', '.', '--as', 'seed', '--machines', '1,0'], '--machines takes numbers of at least 1'),
  (['plan', '.', '--as', 'seed', '--gbits', '1e-320'], '--gbits takes 0 or at least 1.17549e-38'),
  (['train', '--env', 'podrace:memory,lenght=3'], 'nearest: length'),
  (['train', '--env', 'podrace:memory,length=x'], 'length'),
  (['train', '--env', 'podrace:memory,length=0'], 'length'),
  (['train', '--env', 'podrace:autoencode,difficulty=harder'], "difficulty must be easy, medium or hard, not 'harder'"),
  (['train', '--env', 'podrace:count_recall,difficulty=1'], 'difficulty'),
  (['train', '--num-env', '4'], '--num-envs'),
  (['train', '--agent.learning-rat', '1'], '--agent.learning-rate'),
  (['train', '--agent.network.hiden', '1'], '--agent.network.hidden'),
  (['train', '--agent.epochs', '3'], '--agent.epochs'),  # the agent is IMPALA
  (['train', '--agent.optimizer', 'adamm'], 'adam'),
  (['train', '--num-envs', 'four'], 'four'),
  (['train', '--num-envs', '1.5'], '1.5'),
  (['train', '--num-envs', '0'], '--num-envs must be at least 1, not 0'),
  (['train', '--total-steps', '-5'], '--total-steps'),
  (['train', '--seed', '5000000000'], '--seed must be less than 2^32'),
  (['train', '--agent.network.hidden', '0'], 'hidden'),
  (['train', '--agent', 'ppo', '--agent.minibatches', '0'], 'minibatches'),
  (['train', '--architecture', 'sebulba', '--num-envs', '7'], '--num-envs 7 must be a multiple of 2'),
  (['train', '--architecture', 'annakin'], 'anakin'),
  (['train', '--devices', '99'], '--devices 99 must be 1 to 8'),
  (['train', '--devices', '3'], '--num-envs 64 does not divide over 3 devices'),
  (
    ['train', 'dqn-cartpole', '--devices', '4', '--agent.buffer.batch-size', '6'],
    '--agent.buffer.batch-size 6 does not divide over 4 devices',
  ),
  (
    ['train', 'muesli-catch', '--devices', '4', '--agent.batch-size', '6'],
    '--agent.batch-size 6 does not divide over 4 devices',
  ),
  (
    ['train', '--agent', 'ppo', '--agent.minibatches', '5'],
    '32 steps of an unroll do not divide into 5 minibatches',
  ),
  (['train', '--agent.network.torso', 'nature', '--env', 'gymnax:CartPole-v1'], 'needs an image'),
  (['train', '--agent', 'sac'],
   'sac cannot act in podrace:catch, whose action space is Discrete(3, dtype=int32): take --agent '
   'impala, ppo, dqn, r2d2, pqn, muzero, muesli, disco, lpg or intrinsic'),
  (['train', '--agent', 'dqn', '--env', 'gymnax:Pendulum-v1'],
   'dqn cannot act in gymnax:Pendulum-v1, whose action space is Box(-2.0, 2.0, (1,), float32): take '
   '--agent impala, ppo, sac, d4pg, qtopt or muzero'),
  (['train', '--agent', 'disco'], 'disco learns by a rule: give its file by --agent.rule PATH.npz'),
  (['train', '--agent', 'disco', '--agent.rule', 'none.npz'], 'cannot read the rule none.npz: No such file'),
  (['train', '--agent', 'disco', '--agent.rule', __file__], 'is no rule: an .npz of arrays is expected'),
  (['train', '--agent', 'disco', '--agent.rule', __file__, '--agent.rule-sha256', '00'], 'expected 00'),
  (['train', '--agent', 'disco', '--env', 'gymnax:Pendulum-v1', '--agent.rule', __file__],
   'disco cannot act in gymnax:Pendulum-v1'),
  (['train', '--agent', 'lpg'], 'lpg learns by a rule: give its file by --agent.rule PATH.npz'),
  (['train', '--agent', 'lpg', '--agent.rule', rule_files.small()],
   'is a rule of disco; give --agent disco'),
  (['train', '--agent', 'lpg', '--agent.rule', rule_files.small_lpg()],
   'needs --agent.network.predictions 5, not 30'),
  (['train', '--agent', 'lpg', '--env', 'gymnax:Pendulum-v1', '--agent.rule', __file__],
   'lpg cannot act in gymnax:Pendulum-v1'),
  (['train', '--agent', 'r2d2', '--env', 'gymnasium:Pendulum-v1', '--architecture', 'sebulba'],
   'r2d2 cannot act in gymnasium:Pendulum-v1'),
  (['train', '--agent.network.squash'], 'needs a continuous action space'),
  (['train', '--run-dir'], '--run-dir needs a value'),
  (['train', 'catch', 'cartpole'], "one preset, and then options: not 'cartpole' after catch"),
  (['train', '--coordinator', '127.0.0.1:1'], 'go together'),
  (['train', '--coordinator', 'auto'], 'started by none of SLURM'),
  (['train', '--coordinator', 'auto', '--process-id', '0'],
   '--coordinator auto sets --process-id itself; leave it out'),
  (_join := ['train', '--num-processes', '2', '--process-id', '0', '--coordinator', 'nohost'],
   '--coordinator takes HOST:PORT'),
  ([*_join[:-1], '127.0.0.1:0'], '--coordinator 127.0.0.1:0 chooses a port; add --announce FILE'),
  ([*_join[:-1], '127.0.0.1:70000'], '--coordinator takes HOST:PORT'),
  (['train', '--num-processes', 'x', '--process-id', '0', '--coordinator', 'a:1'], 'whole number'),
  (['train', '--num-processes', '2', '--process-id', '2',
    '--coordinator', '127.0.0.1:1'], '--process-id 2'),
  (['eval'], 'eval takes one run directory'),
  (['eval', '/nowhere'], '/nowhere is not a run directory: it does not exist'),
  (['eval', '/nowhere', '--agent.network.hidden', '8', '8'], '/nowhere is not a run directory'),
  (['eval', '/nowhere', '--agent.simulations', '0', '8'], 'eval takes one run directory, not 2'),
  (['eval', '/nowhere', '--episodes', '0'], '--episodes must be at least 1, not 0'),
  (['watch', '/nowhere', '--live', '--out', 'videos'], 'leave out --out'),
  (['record', '/nowhere', '--to', 'x', '--random', '--member', '1'], '--random does not use --member'),
  (['record', '/nowhere', '--to', 'x', '--scripted', '--greedy'], '--scripted does not use --greedy'),
  (['eval', '/nowhere', '--episodes', 'x'], "--episodes takes a whole number of at least 0, not 'x'"),
  (['eval', '/nowhere', '--episode', '3'], 'did you mean --episodes'),
  (['list', 'presets'], 'list takes no arguments'),
  (['train', '--override=false'], "--override takes no value, not 'false'"),
  (['train', '--run-dir='], '--run-dir needs a value'),
  (['train', '--sinks', 'wanbd'], "unknown sink 'wanbd': did you mean wandb"),
  (['train', '--agent', 'json:JSONDecoder'], 'json:JSONDecoder is no agent: it is no dataclass'),
  (['train', '--agent', 'podrace.envs.host.base:PoolArgs'],
   'podrace.envs.host.base:PoolArgs needs defaults for its fields: num_envs, batch_size'),
  (['train', '--agent', 'podrace.run.log:Clock'], 'podrace.run.log:Clock must be frozen'),
  (['train', '--agent', 'podrace.replay:Buffer'],
   'podrace.replay.buffer:Buffer is no agent: it has no init and no initial_state and no act'),
  (['train', '--agent.discount', '99'], 'discount must be within [0, 1], not 99'),
  (['train', '--agent.self-tuning', '--agent.discount', '1'], 'discount is 1 and to be tuned, so it needs to be less'),
  (['train', '--agent.self-tuning', '--agent.tuning.fields', 'clip_rho'], "--agent.tuning.fields takes discount or lambda"),
  (['train', '--agent.tuning.learning-rate', '-1'], '--agent.tuning.learning-rate'),
  (['train', '--agent', 'dqn', '--agent.self-tuning'], "unknown option of dqn '--agent.self-tuning': it is a setting of impala"),
  (['train', '--agent', 'dqn', '--agent.learning-rat', '1'], "unknown option of dqn '--agent.learning-rat': did you mean --agent.learning-rate"),
  (['train', '--agent.normalize-observations', '--env', 'jumanji:Game2048-v1'],
   'normalize_observations is for observations with floats'),
  (['train', '--run-dir', '--quiet'], '--run-dir needs a value, DIR, not the option --quiet'),
  (['train', '--listen', 'unix:/x', '--keys', '--insecure'], '--keys needs a value, DIR'),
  (['train', '--architecture', 'sebulba', '--envs', 'remote', '--listen', 'tcp://127.0.0.1:1'],
   '--envs remote: podrace:catch is in JAX'),
  (['train', '--envs', 'remote', '--listen', 'tcp://127.0.0.1:1'],
   '--envs remote: podrace:catch is in JAX'),
  (['train', '--envs', 'remote', '--listen', 'tcp://127.0.0.1:1', '--architecture', 'anakin'],
   '--envs remote is for --arch'),
  (['train', '--env', 'gymnasium:CartPole-v1', '--architecture', 'anakin'],
   'gymnasium:CartPole-v1 runs on the host: give --architecture sebulba'),
  (['train', '--replay', 'host', '--architecture=anakin'], '--replay host: under anakin replay is on the device'),
  (['train', '--env', 'gymnasium:CartPole-v1', '--seeds', '2'], 'sebulba trains one agent in a run'),
  (['train', '--env', 'gymnazium:CartPole-v1'], 'nearest: gymnasium'),
  (['train', '--envs', 'remote', '--listen', 'unix:/x', '--peer-timeout', 'nan'],
   "--peer-timeout takes a number of at least 0, not 'nan'"),
  (['eval', '/nowhere', '--episodes', '--sample'], '--episodes needs a value, N'),
  (['envs', '--connect', '--env', 'ale:pong'], '--connect needs a value, ADDRESS'),
  (['envs', '--env', 'ale:pong'], 'envs needs --connect: see podrace envs --help'),
  (['envs', 'x', '--env', 'ale:pong'], 'envs takes options only, not x'),
  (['envs', '--connect', 'unix:/x', '--env', 'ale:pong', '--keys', '--insecure'],
   '--keys needs a value, DIR'),
  (['act', '--params', 'unix:/x', '--keys', '--insecure'], '--keys needs a value, DIR'),
  (['act', '--params', 'unix:/x'], 'act needs --connect-replay: see podrace act --help'),
  (['replay', '--listen', '--insecure'], '--listen needs a value, ADDRESS'),
  (['replay', '--table', '--insecure'], '--table needs a value, SETTINGS'),
  (['replay', '--insecure=yes'], "--insecure takes no value, not 'yes'"),
  (['top', '--keys', '--once', 'unix:/x'], '--keys needs a value, DIR'),
  (['keys', 'new', '--insecure'], "no option '--insecure' here"),
  (['top', 'a', 'b'], 'top takes one address, not 2'),
  (['devices', '--devices', '--actor-devices'], '--devices needs a value, N'),
  (['devices', '0'], 'devices takes options only, not 0'),
  (['train', '--agent', 'a2c'], "unknown agent 'a2c': the nearest is impala or ppo"),
  (['train', '--agent', 'Rainbow'], "unknown agent 'Rainbow': the nearest is dqn"),
  (['train', '--env', 'CartPole-v1'],
   "not 'CartPole-v1'; did you mean gymnax:CartPole-v1 or gymnasium:CartPole-v1?"),
  (['train', '--env', 'ALE/MsPacman-v5'], 'did you mean ale:ms_pacman?'),
  (['train', '--env', 'catch'], 'did you mean podrace:catch'),
  (['train', '--env', 'space_invaders'], 'did you mean ale:space_invaders if it is a game of'),
  (['train', '--env', 'pong'], 'did you mean gymnax:Pong-misc?'),
  (['train', '--architecture', 'sebulba', '--env', 'gymnasium:NoSuchNoFrameskip-v9'],
   "gymnasium has no environment 'NoSuchNoFrameskip-v9'; here it is ale:no_such"),
  (['train', '--agent', 'dqn', '--agent.buffer.capacity', '2000', '--agent.buffer.batch-size', '4000'],
   '--agent.buffer.batch-size 4000 is more than --agent.buffer.capacity 2000'),
  (['train', '--agent.normalize-rewards', 'maybe'], 'maybe'),
  (['bench', 'sebulba', '--seconds', '-1'], "--seconds takes a number of at least 0, not '-1'"),
  (['top', 'tcp://127.0.0.1:1', '--every', '1e300'], '--every takes at most'),
  (['top', 'tcp://127.0.0.1:1', '--every', '0'], '--every must be more than 0'),
  (['discover', '--agents', '0'], '--agents must be at least 1'),
  (['discover', '--agent-updates', '-1'], '--agent-updates must be at least 1'),
  (['train', '--env', 'envpool:CartPole-v1', '--devices', '1', '--eval-every', '1000', '--eval-video'], "can't be drawn"),
  (['plot', '.', '--records', 'x'], '--records is for --suite'),
]  # fmt: skip


@pytest.fixture
def unchanged(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
  """A working directory; bad usage must leave nothing in it that looks like a run."""
  monkeypatch.chdir(tmp_path)
  yield tmp_path
  assert not list(tmp_path.rglob('config.json')) and not (tmp_path / 'runs').exists()


# Each worker of the tests has rules in files of its own: their names have its process id.
@pytest.mark.parametrize(
  ('args', 'message'),
  BAD,
  ids=[' '.join(a).replace(f'-{os.getpid()}.npz', '.npz')[:200] for a, _ in BAD],
)
def test_bad_input_exits_2_with_a_message(
  args: list[str], message: str, run: Command, unchanged: Path
) -> None:
  code, _, told = run(*args)
  plain = ' '.join(told.replace('│', ' ').split())
  assert code == 2, told
  assert message in plain
  assert 'Traceback' not in told
  assert len(told.splitlines()) < 40


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['eval'], 'podrace eval DIR'),
    (['eval', 'a', 'b'], 'podrace eval DIR'),
    (['top'], 'podrace top ADDRESS'),
    (['envs'], '--connect'),
    (['act'], '--connect-replay'),
    (['replay'], '--listen'),
    (['keys'], '`new DIR`'),
    (['bench'], 'podrace bench sebulba'),
  ],
  ids=lambda x: x if isinstance(x, str) else ' '.join(x),
)
def test_bad_usage_is_told_in_a_line(args: list[str], message: str, run: Command) -> None:
  code, out, err = run(*args)
  assert (code, out) == (2, '') and message in err and len(err.splitlines()) == 1


def test_paths_in_printed_commands_are_quoted(run: Command, tmp_path: Path) -> None:
  folder = tmp_path / "it's mine"
  (folder / 'run/checkpoints').mkdir(parents=True)
  (folder / 'run/config.json').touch()
  assert f'podrace runs {shlex.quote(str(folder))}' in run('eval', str(folder))[2]
  with pytest.raises(PolicyError) as raised:
    podrace_.load_policy(folder / 'run')
  assert f'podrace export {shlex.quote(str(folder / "run"))} ' in str(raised.value)


def test_as_a_module() -> None:
  done = subprocess.run(
    [sys.executable, '-m', 'podrace', '--version'],
    env=environment(), capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert (done.returncode, done.stdout) == (0, f'{podrace_.__version__}\n')


def test_types_are_for_all_who_install_it() -> None:
  assert (Path(cli.__file__).parent / 'py.typed').exists()
  project = tomllib.loads((Path(__file__).parents[2] / 'pyproject.toml').read_text())
  assert project['tool']['setuptools']['package-data'] == {
    'podrace': [
      'py.typed',
      'commands/options.json',
      'commands/templates/*.c',
      'commands/templates/*.py',
      'envs/native/*.c',
      'envs/native/*.h',
      'envs/native/examples/*.c',
      'experiments/page/*',
      'experiments/suites/*.toml',
      'settings/*.toml',
    ]
  }


def test_bad_input_through_the_interpreter(tmp_path: Path) -> None:
  done = command('train', '--env', 'gymnax:CartPole', '--run-dir', str(tmp_path / 'run'))
  assert done.returncode == 2 and done.stdout == ''
  (line,) = done.stderr.splitlines()
  assert line.startswith("podrace: gymnax has no environment 'CartPole'")


@pytest.mark.parametrize(
  ('library', 'name'), [('gymnax', 'CartPole-v1'), ('brax', 'ant'), ('jumanji', 'Snake-v1')]
)
def test_missing_extra(
  library: str, name: str, run: Command, unchanged: Path, monkeypatch: Patch
) -> None:
  hide_library(monkeypatch, library)
  code, _, told = run('train', '--env', f'{library}:{name}')
  assert code == 2
  assert f"pip install 'podrace[{library}]'" in told


def test_an_error_of_the_users_own_code_keeps_its_traceback(
  run: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  monkeypatch.delitem(sys.modules, 'own', raising=False)
  (tmp_path / 'own.py').write_text(
    'import dataclasses\nfrom podrace.agents.impala import Impala\n'
    '@dataclasses.dataclass(frozen=True)\nclass Agent(Impala):\n'
    '  def learn(self, train, sample, key):\n    a, b = (1, 2, 3)\n'
  )
  args = ['train', '--agent', 'own:Agent', *TINY, '--run-dir', str(tmp_path / 'run')]
  code, _, err = run(*args)
  assert code == 2
  assert 'own.py", line 6, in learn' in err
  assert 'ValueError' in err


def test_a_segmentation_fault_says_where(tmp_path: Path, monkeypatch: Patch) -> None:
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'own.py').write_text('import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n')
  done = command('train', '--agent', 'own:Agent', *TINY, '--run-dir', str(tmp_path / 'run'))
  assert done.returncode == -signal.SIGSEGV
  assert 'Segmentation fault' in done.stderr and 'own.py", line 2' in done.stderr


@pytest.mark.parametrize(
  ('args', 'name', 'value'),
  [(['--total-steps', '1e4'], 'total_steps', 10_000), (['--total-steps=1e4'], 'total_steps', 10_000),
   (['--log-every', '9e2'], 'log_every', 900), (['--log-every', '1_000'], 'log_every', 1_000),
   (['--seed', '77'], 'seed', 77), (['--env', 'gymnax:X,n=2.5'], 'env', 'gymnax:X,n=2.5'),
   (['--env='], 'env', '')],
)  # fmt: skip
def test_whole_numbers_may_be_written_short(args: list[str], name: str, value: object) -> None:
  assert getattr(configure.parse(Config(Impala()), args), name) == value


@pytest.mark.parametrize('args', [['--agent.discount', '1e-3'], ['--agent.discount=1e-3']])
def test_other_numbers_stay_as_they_are(args: list[str]) -> None:
  assert configure.parse(Config(Impala()), args).agent.discount == 1e-3


def test_a_learning_rate_that_makes_infinities(tmp_path: Path, cache: Path) -> None:
  run_dir = tmp_path / 'run'
  args = ['train', *TINY, '--agent.learning-rate', '1e38', '--run-dir', str(run_dir)]
  code, output = podrace(args, tmp_path / 'log', cache=cache)
  assert code == 1
  assert 'NaN' in output
  assert 'Traceback' not in output
  assert checkpoints(run_dir) == []
  code, output = podrace(['eval', str(run_dir)], tmp_path / 'log', cache=cache)
  assert code == 2 and 'checkpoint' in output


# --- bad directories ----------------------------------------------------------------------------


def test_run_dir_that_is_a_file(run: Command, unchanged: Path) -> None:
  (unchanged / 'file').write_text('mine')
  for path in ('file', 'file/run'):
    code, _, told = run('train', *TINY, '--run-dir', path)
    assert code == 2
    assert f'--run-dir {path}' in told
  assert (unchanged / 'file').read_text() == 'mine'


@pytest.mark.parametrize(
  'garbled', ['', '{"version": 1', '[]', '{"version": 99}', '{"version": 1}']
)
def test_garbled_config(garbled: str, run: Command, tmp_path: Path) -> None:
  (tmp_path / 'config.json').write_text(garbled)
  for args in (['train', '--run-dir'], ['train', 'catch', '--run-dir'], ['eval']):
    code, _, told = run(*args, str(tmp_path))
    assert code == 2
    assert 'config.json' in told or 'version' in told
    assert 'Traceback' not in told
  assert (tmp_path / 'config.json').read_text() == garbled


def test_unwritable_directory(run: Command, unchanged: Path) -> None:
  """Read-only by its mode; for root, who may write there all the same, by its file system."""
  folder = unchanged / 'closed'
  folder.mkdir(mode=0o555)
  with contextlib.ExitStack() as stack:
    if os.geteuid() == 0:
      mount = ['mount', '-t', 'tmpfs', '-o', 'ro', 'none', str(folder)]
      if subprocess.run(mount, check=False).returncode:
        pytest.skip('mounting is not allowed')
      stack.callback(subprocess.run, ['umount', folder], check=True)
    for path, why in ((folder, 'cannot be written to'), (folder / 'run', 'cannot be a directory')):
      code, _, told = run('train', *TINY, '--run-dir', str(path))
      assert code == 2
      assert f'--run-dir {path} {why}' in told


def test_a_fault_of_ours_keeps_its_traceback(run: Command, monkeypatch: Patch) -> None:
  def broken(args: list[str]) -> int:
    raise AssertionError('ours')

  monkeypatch.setattr(list_names, 'run', broken)
  with pytest.raises(AssertionError, match='ours'):
    cli.main(['list'])
  monkeypatch.setenv('PODRACE_TRACEBACK', '1')
  with pytest.raises(ValueError, match='lits'):
    cli.main(['lits'])


@pytest.mark.parametrize(('value', 'advice'), [(None, True), (1.0, False)])
def test_a_run_without_an_end_of_an_episode_says_what_to_do(
  value: float | None, advice: bool, run: Command, tmp_path: Path, monkeypatch: Patch
) -> None:
  summary = {'episode_return': value, 'steps_per_s': 1.0, 'step': 6_400}
  monkeypatch.setattr('podrace.run.loop.train', lambda *args, **options: summary)
  code, said, _ = run('train', 'cartpole', '--num-envs', '64', '--run-dir', str(tmp_path / 'run'))
  assert code == 0
  assert ('--total-steps' in said) == ('100 steps' in said) == advice
