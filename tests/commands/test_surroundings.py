"""What a command has around it: variables of JAX, and environments that print."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest
from children import ROOT, Process, environment
from processes import DEADLINE
from shorthand import Capture, Patch, slow_after
from test_runs import called

import podrace
from podrace.cli import COMMANDS
from podrace.commands import configure, train
from podrace.errors import UsageError
from podrace.experiments import runs
from podrace.fields import flag
from podrace.run import loop as run
from podrace.settings.presets import PRESETS
from podrace.settings.record import to_json
from podrace.settings.validation import validate
from podrace.system.options import Options

OF_JAX = sorted(name for name, module in COMMANDS.items() if module.COMMAND.jax)


def command(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
  plain = {k: v for k, v in environment().items() if not k.startswith('JAX_')}
  return subprocess.run(
    [sys.executable, '-m', 'podrace', *args], env=plain | {'JAX_PLATFORMS': 'cpu'} | variables,
    capture_output=True, text=True, timeout=DEADLINE, check=False,
  )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], variable: str) -> None:
  assert done.returncode == 2 and not done.stdout, done.stderr
  assert variable.lower() in done.stderr.lower() and len(done.stderr.splitlines()) == 1, done.stderr


def test_the_commands_that_compute() -> None:
  assert {'train', 'discover', 'sweep', 'eval', 'watch', 'export', 'act', 'launch'} <= {*OF_JAX}


def test_a_working_directory_that_was_removed(
  tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  (tmp_path / 'here').mkdir()
  monkeypatch.chdir(tmp_path / 'here')
  (tmp_path / 'here').rmdir()
  code, out, err = called(capsys, 'eval', 'runs/a')
  assert code == 2 and not out and len(err.splitlines()) == 1


def test_a_disk_without_room_for_temporary_files(monkeypatch: Patch, capsys: Capture) -> None:
  """As a limit of 0 for the size of files, within which this process writes no file but these."""
  monkeypatch.setattr(tempfile, 'tempdir', None)
  monkeypatch.setattr(COMMANDS['envs'], 'run', lambda args: tempfile.mkdtemp())
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
  try:
    code, out, err = called(capsys, 'envs')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert code == 1 and not out and 'TMPDIR' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize('name', OF_JAX)
def test_no_command_computes_in_64_bits(name: str, tmp_path: Path, capsys: Capture) -> None:
  with jax.enable_x64(True):
    code, out, err = called(capsys, name, '--nothing', str(tmp_path))
  assert code == 2 and not out and 'JAX_ENABLE_X64' in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
  ('variable', 'value'),
  [
    ('JAX_ENABLE_X64', '1'),
    ('JAX_ENABLE_X64', 'maybe'),
    ('JAX_NUM_CPU_DEVICES', 'two'),
    ('JAX_PLATFORMS', 'abacus'),
    ('JAX_PLATFORMS', 'cuda'),
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in (
        ('JAX_NUMPY_DTYPE_PROMOTION', 'strict'),
        ('JAX_NUMPY_DTYPE_PROMOTION', 'none'),
        ('JAX_DISABLE_JIT', 'on'),
        ('JAX_TRANSFER_GUARD', 'disallow'),
        ('JAX_TRANSFER_GUARD_HOST_TO_DEVICE', 'disallow_explicit'),
      )
    ),
  ],
)
def test_variables_of_jax_that_no_run_works_with(variable: str, value: str) -> None:
  refused(command('devices', **{variable: value}), variable)


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('jax_numpy_dtype_promotion', 'strict'),
    ('jax_disable_jit', True),
    ('jax_transfer_guard', 'disallow'),
    ('jax_transfer_guard_host_to_device', 'disallow_explicit'),
  ],
)
def test_settings_of_jax_that_no_run_works_with(name: str, value: Any, capsys: Capture) -> None:
  before = getattr(jax.config, name)
  jax.config.update(name, value)
  try:
    code, out, err = called(capsys, 'devices')
  finally:
    jax.config.update(name, before)
  assert code == 2 and not out and name.upper() in err and len(err.splitlines()) == 1


def test_variables_of_jax_are_no_matter_where_nothing_is_computed(tmp_path: Path) -> None:
  assert command('runs', str(tmp_path), JAX_ENABLE_X64='1').returncode == 0


IN_64_BITS = """
import jax
from podrace import envs
def make():
  jax.config.update('jax_enable_x64', True)
  return envs.make('podrace:catch')
"""


def test_an_environment_that_changes_the_settings_of_jax(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  (tmp_path / 'wide.py').write_text(IN_64_BITS)
  monkeypatch.chdir(tmp_path)
  args = ['train', '--env', 'python:wide.make', '--total-steps', '2000']
  done = command(*args, '--no-compile-cache')  # a new cache has a line of its own
  refused(done, 'JAX_ENABLE_X64')


# --- what environments print ----------------------------------------------------------------------

NOISY = """
import atexit
import os
import sys
import gymnasium
import numpy as np
from gymnasium import spaces

def noise(where):
  print('noise', where, flush=True)
  os.system('echo noise of a child')
  sys.__stdout__.write('noise that is not flushed')

class Noisy(gymnasium.Env):
  observation_space = spaces.Box(-1, 1, (2,), np.float32)
  action_space = spaces.Discrete(2)
  def __init__(self, render_mode=None):
    noise('made')
  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    noise('reset')
    return np.zeros(2, np.float32), {}
  def step(self, action):
    noise('step')
    return np.zeros(2, np.float32), 1.0, True, False, {}

gymnasium.register('Noisy-v0', entry_point=Noisy)
atexit.register(noise, 'at the end')
noise('imported')

def catch():
  from podrace import envs
  noise('made')
  return envs.make('podrace:catch')
"""


@pytest.fixture(
  scope='module',
  params=['gymnasium:noisy:Noisy-v0', pytest.param('python:noisy.catch', marks=pytest.mark.slow)],
)
def noisy(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A folder with the run of an environment that prints, in a process of its own and in this one."""
  folder = tmp_path_factory.mktemp('noisy')
  (folder / 'noisy.py').write_text(NOISY)
  sizes = [
    '--num-envs', '2', '--unroll-length', '4', '--total-steps', '8', '--devices', '1',
    '--agent.epochs', '1', '--agent.minibatches', '1', '--agent.network.hidden', '8',
  ]  # fmt: skip
  if request.param.startswith('gymnasium'):
    sizes += ['--actor-threads', '1']
  done = within(
    folder, 'train', '--agent', 'ppo', '--env', request.param, *sizes, '--run-dir', 'run'
  )
  assert done.returncode == 0, done.stderr
  assert 'noise made' in done.stderr and 'noise' not in done.stdout
  return folder


def within(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-m', 'podrace', *args], cwd=folder, capture_output=True, text=True,
    timeout=DEADLINE, check=False, env={**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
  )  # fmt: skip


@pytest.mark.parametrize(
  'args',
  slow_after(1, ['eval', 'run', '--episodes', '1', '--greedy'], ['export', 'run', 'policy']),
)
def test_standard_output_holds_the_result_alone(noisy: Path, args: list[str]) -> None:
  done = within(noisy, *args, '--allow-code', 'noisy')
  assert done.returncode == 0, done.stderr
  assert 'noise made' in done.stderr and 'noise of a child' in done.stderr
  assert isinstance(json.loads(done.stdout), dict)


def test_what_is_launched_is_printed_alone(noisy: Path) -> None:
  done = within(
    noisy, 'launch', '--agent', 'ppo', '--env', 'gymnasium:noisy:Noisy-v0', '--as', 'seed',
    '--allow-code', 'noisy', '--dry-run',
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert 'noise' in done.stderr and 'noise' not in done.stdout and 'podrace' in done.stdout


# --- what is refused, and what is told of it ------------------------------------------------------


@pytest.mark.parametrize(
  ('args', 'named', 'others'),
  [
    (['pong', '--architecture', 'anakin'], ['ale:pong', '--architecture'], ['--actor-threads']),
    (['pong', '--architecture', 'anakin', '--actor-threads', '3'], ['ale:pong'], []),
    (
      ['pong', '--architecture', 'anakin', '--env', 'podrace:catch', '--lag', 'async'],
      ['--lag', '--architecture'],
      ['--actor-threads'],
    ),
  ],
)
def test_a_run_is_refused_for_what_was_given(
  args: list[str], named: list[str], others: list[str], capsys: Capture
) -> None:
  code, _, err = called(capsys, 'train', *args)
  assert code == 2
  assert all(x in err for x in named), err
  assert not any(x in err for x in others), err


@pytest.mark.parametrize(
  ('preset', 'args', 'expected'),
  [
    ('pong', {'architecture': 'anakin', 'env': 'podrace:catch'}, {'actor_threads': 2}),
    ('r2d2-remote-memory', {'architecture': 'anakin'}, {'replay': 'device', 'lag': '1'}),
    ('muzero-tictactoe', {'env': 'pgx:connect_four,state=true'}, {'eval_env': ''}),
    ('muzero-tictactoe', {'eval_every': 0}, {'eval_env': '', 'eval_episodes': 32}),
    ('muzero-tictactoe', {'eval_every': 0, 'eval_env': 'podrace:catch'}, None),
    ('muzero-tictactoe', {}, {'eval_episodes': 100}),
  ],
)
def test_settings_of_a_preset_that_have_no_meaning_are_left_out(
  preset: str, args: dict[str, Any], expected: dict[str, Any] | None
) -> None:
  flags = [x for name, value in args.items() for x in (f'--{flag(name)}', str(value))]
  config = configure.parse_config(preset, Options(flags, train.COMMAND), 'podrace train')
  if expected is None:
    with pytest.raises(ValueError, match='--eval-every'):
      validate(config)
    return
  validate(config)
  assert podrace.configure(preset, **args) == config
  assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize('name', ['file', 'file/run', 'link', 'other'])
def test_a_bad_run_directory_is_refused_before_anything_is_set_up(
  name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
  (tmp_path / 'file').write_text('')
  (tmp_path / 'link').mkdir()
  (tmp_path / 'link' / 'checkpoints').symlink_to(tmp_path)
  (tmp_path / 'other').mkdir()
  (tmp_path / 'other' / 'config.json').write_text(json.dumps(to_json(PRESETS['memory']())))

  def made(*args: Any) -> None:
    raise AssertionError('something was set up')

  monkeypatch.setattr(run, 'assemble', made)
  with pytest.raises(UsageError):
    podrace.train('catch', tmp_path / name)
  if name.startswith('file'):  # not even JAX is imported
    code = 'import sys; from podrace.cli import main\ntry: main()\nfinally: assert "jax" not in sys.modules'
    for args in (['train', 'catch', '--run-dir'], ['discover', '--run-dir']):
      done = subprocess.run(
        [sys.executable, '-c', code, *args, str(tmp_path / name)], capture_output=True, text=True,
        env=environment(), timeout=DEADLINE, check=False,
      )  # fmt: skip
      assert done.returncode == 2 and '--run-dir' in done.stderr, done.stderr


HANGS = """
import os, signal, sys
from podrace import cli
from podrace.architectures import anakin
def compile(self):
  os.kill(os.getpid(), signal.SIGTERM)
  signal.pause()
anakin.AnakinDriver.compile = compile
sys.argv[1:] = ['train', 'catch', *sys.argv[1:]]
cli.entry()
"""


@pytest.mark.parametrize('named', slow_after(1, True, False))
def test_a_run_that_was_stopped_while_it_compiled_is_not_listed(
  named: bool, tmp_path: Path
) -> None:
  given = ['--run-dir', 'mine'] if named else []
  with Process(tmp_path / 'log', '-c', f'import os; os.chdir({str(tmp_path)!r})\n{HANGS}', *given) as process:  # fmt: skip
    assert process.wait() == 143, process.output
  assert ('--run-dir' in process.output) == named
  listed = [run.path.name for run in map(runs.inspect_run, runs.find(tmp_path))]
  assert listed == (['mine'] if named else [])
