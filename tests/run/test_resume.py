"""A run that is killed, stopped or damaged ends as one that never was."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest
import rule_files
from children import until
from disks import small_disk
from processes import (
  DEADLINE,
  Podrace,
  StopAt,
  as_saved,
  as_users_have_it,
  assert_same_run,
  cache,
  checkpoints,
  every_file,
  podrace,
  summary,
)
from shared_programs import shared_programs
from shorthand import Capture, Patch, TempPaths, slow_after

from podrace import cli
from podrace.architectures import hashes
from podrace.errors import CheckpointError
from podrace.run import build, directory, loop, metrics, save_and_resume, sinks, updates
from podrace.run.checkpoint import Checkpoints
from podrace.system import process
from podrace.system.signals import Stop

# 1,000 updates of 32 steps: 100 lines of metrics, 20 checkpoints.
TINY = ['--num-envs', '4', '--unroll-length', '8', '--agent.network.hidden', '16',
        '--total-steps', '32000', '--log-every', '320', '--checkpoint-every', '1600']  # fmt: skip
PPO = ['--agent', 'ppo', '--agent.epochs', '2', '--agent.minibatches', '2',
       '--agent.normalize-observations', '--agent.normalize-rewards']  # fmt: skip
HALF = [*TINY[:6], '--total-steps', '16000', '--log-every', '320', '--checkpoint-every', '1600']
SHORT = [*TINY[:6], '--total-steps', '8000', '--log-every', '160', '--checkpoint-every', '800']
REPLAY = ['--agent.buffer.capacity', '2048', '--agent.buffer.priority-exponent', '0.6',
          '--agent.buffer.min-size', '500', '--agent.buffer.samples-per-insert', '3.7',
          '--agent.buffer.batch-size', '16']  # fmt: skip
PLAN = ['--agent', 'muzero', '--agent.simulations', '3', '--agent.unroll', '2', '--agent.n-step', '2',
        '--agent.network.latent', '8', '--agent.reanalyse', '0.5']  # fmt: skip
MUESLI = ['--agent', 'muesli', '--agent.unroll', '2', '--agent.network.latent', '8', '--agent.capacity', '2048',
          '--agent.min-size', '500', '--agent.batch-size', '16']  # fmt: skip
RULE = ['--agent', 'disco', '--agent.rule', rule_files.small(), '--agent.lifetime', '6', '--agent.network.predictions', '12',
        '--agent.network.core', 'gru', '--agent.network.core-size', '8', '--agent.capacity', '2048',
        '--agent.min-size', '500', '--agent.batch-size', '16', '--agent.replay-ratio', '3.7']  # fmt: skip
LPG = ['--agent', 'lpg', '--agent.rule', rule_files.small_lpg(), '--agent.network.predictions', '5',
       '--agent.network.core', 'gru', '--agent.network.core-size', '8']  # fmt: skip
DISCOVER = ['discover', 'lpg-catch', '--agents', '2', '--devices', '2', '--num-envs', '4', '--unroll-length', '8',
            '--agent-updates', '2', '--lifetime', '7', '--agent.network.hidden', '8', '--agent.network.predictions', '3',
            '--rule.predictions', '3', '--rule.trajectory', '4', '--value.network.hidden', '8',
            '--total-steps', '96000', '--log-every', '1920', '--checkpoint-every', '9600']  # fmt: skip
HOST = ['--architecture', 'sebulba', '--env-threads', '2', '--num-envs', '4', '--unroll-length', '8',
        '--agent.network.hidden', '16', '--total-steps', '4000', '--log-every', '160',
        '--checkpoint-every', '640']  # fmt: skip
MEMORY = [x for part in ('actor', 'critic')
          for x in (f'--agent.{part}.core', 'gru', f'--agent.{part}.core-size', '8', f'--agent.{part}.hidden', '16')]  # fmt: skip
GRASPS = 'GRASPS'  # stands for the log of `grasps`
GRASP = ['--env', 'podrace:grasp', '--log', GRASPS, '--num-envs', '4', '--unroll-length', '8', '--total-steps', '8000',
         '--log-every', '160', '--checkpoint-every', '800', '--agent.buffer.capacity', '2048', '--agent.buffer.min-size',
         '500', '--agent.buffer.batch-size', '16', '--agent.network.hidden', '16']  # fmt: skip
CASES = {
  'ppo-short': (1, [*PPO, *SHORT]),
  'ppo-normalized': (1, [*PPO, *TINY]),
  'impala-gru': (1, ['--agent.network.core', 'gru', '--agent.network.core-size', '8', *TINY]),
  'self-tuning': (1, ['--agent.self-tuning', '--seeds', '2', *SHORT]),
  'self-tuning-sebulba': (
    2, ['--architecture', 'sebulba', '--lag', '1', '--agent.self-tuning', '--agent.network.core', 'gru',
        '--agent.network.core-size', '8', *SHORT, '--actor-devices', '0', '--learner-devices', '0,1']
  ),
  'popart-sebulba': (
    2, ['--architecture', 'sebulba', '--lag', '1', '--agent', 'ppo', '--agent.normalize-values',
        '--agent.no-normalize-rewards', *SHORT,
        '--actor-devices', '0', '--learner-devices', '0,1']
  ),
  'pqn': (1, ['--agent', 'pqn', '--agent.epochs', '2', '--agent.minibatches', '2', *SHORT]),
  'pqn-gru-sebulba': (
    2, ['--architecture', 'sebulba', '--lag', '1', '--agent', 'pqn', '--agent.epochs', '2', '--agent.minibatches', '1',
        '--agent.network.core', 'gru', '--agent.network.core-size', '8', *SHORT,
        '--actor-devices', '0', '--learner-devices', '0,1']
  ),
  'two-seeds': (1, ['--seeds', '2', *TINY]),
  'two-devices': (2, [*PPO, *TINY, '--devices', '2']),
  'sebulba-lag-0': (1, ['--architecture', 'sebulba', '--lag', '0', *PPO, *SHORT]),
  'sebulba-lag-1': (
    3, ['--architecture', 'sebulba', '--agent.network.core', 'gru', '--agent.network.core-size', '8',
        *SHORT, '--actor-devices', '0,1', '--learner-devices', '2', '--actor-threads', '1']
  ),
  'replay': (
    1, ['--agent', 'dqn', *HALF, *REPLAY]
  ),
  'replay-sebulba': (
    1, ['--architecture', 'sebulba', '--lag', '1', '--agent', 'r2d2', '--agent.network.core', 'gru',
        '--agent.network.core-size', '8', '--agent.sequence', '8', '--agent.burn-in', '8',
        *SHORT, *REPLAY]
  ),
  'replay-sebulba-lag-0': (
    1, ['--architecture', 'sebulba', '--lag', '0', '--agent', 'dqn', *SHORT, *REPLAY]
  ),
  'replay-continuous': (
    1, ['--env', 'gymnax:Pendulum-v1', '--agent', 'sac', '--agent.actor.hidden', '16',
        '--agent.critic.hidden', '16', *TINY[:4], *HALF[6:], *REPLAY]
  ),
  'sac-memory': (
    2, ['--env', 'podrace:memory,length=6,continuous=true', '--agent', 'sac', '--devices', '2', *MEMORY,
        '--agent.recurrence.start', 'episode', '--agent.recurrence.sequence', '7', *TINY[:4], *SHORT[6:], *REPLAY]
  ),
  'dqn-memory-on-the-host': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', '--agent', 'dqn', '--agent.network.core', 'gru',
        '--agent.network.core-size', '8', '--agent.recurrence.start', 'episode', '--agent.recurrence.sequence', '9',
        *SHORT, *REPLAY]
  ),
  'd4pg-memory-sebulba': (
    1, ['--architecture', 'sebulba', '--lag', '1', '--env', 'gymnax:Pendulum-v1,hide=velocity', '--agent', 'd4pg', *MEMORY,
        '--agent.recurrence.start', 'stored', '--agent.recurrence.sequence', '8', '--agent.recurrence.burn-in', '4',
        *TINY[:4], *SHORT[6:], *REPLAY]
  ),
  'replay-on-the-host': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '0', '--agent', 'dqn',
        '--agent.n-step', '3', *SHORT, *REPLAY]
  ),
  'replay-on-the-host-lag-1': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', '--agent', 'r2d2',
        '--agent.network.core', 'gru', '--agent.network.core-size', '8', '--agent.sequence', '8',
        '--agent.burn-in', '8', *SHORT, *REPLAY]
  ),
  'one-checkpoint-and-replay-on-the-host': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '0', '--agent', 'dqn', '--keep', '1',
        *TINY[:6], '--total-steps', '2560', '--log-every', '160', '--checkpoint-every', '640', *REPLAY]
  ),
  'planning': (1, [*PLAN, *SHORT, *REPLAY]),
  'planning-sebulba-on-the-host': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', *PLAN, *SHORT, *REPLAY]
  ),
  'muesli-gru': (
    1, [*MUESLI, '--agent.network.core', 'gru', '--agent.network.core-size', '8', *SHORT]
  ),
  'muesli-sebulba-on-the-host': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', *MUESLI, *SHORT]
  ),
  'a-rule': (1, [*RULE, *SHORT]),
  'a-rule-sebulba-on-the-host': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', *RULE, *SHORT]
  ),
  'lpg-gru': (1, [*LPG, *TINY]),
  'lpg-sebulba': (1, ['--architecture', 'sebulba', '--lag', '1', *LPG, *SHORT]),
  'intrinsic': (
    2, ['--agent', 'intrinsic', '--env', 'podrace:random_abc,episodes=3,steps=5', '--devices', '2',
        *TINY[:4], *HALF[6:]]
  ),
  'lifetimes': (1, ['--env', 'podrace:nonstationary_abc,period=2,episodes=5', *TINY]),
  'log': (1, ['--agent', 'bc', *GRASP]),
  'three-tables-and-log': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', '--agent', 'qtopt', '--agent.labels', 'stage',
        '--agent.network.v-min', '-0.2', '--agent.network.head-hidden', '16', '--agent.cem.samples', '8', *GRASP,
        '--log-share', '1/2', '--agent.buffer.online-share', '0.25', '--agent.buffer.samples-per-insert', '3.7']
  ),
  'three-tables-and-updates-without-samples': (
    1, ['--architecture', 'sebulba', '--replay', 'host', '--lag', '1', '--agent', 'qtopt', '--agent.labels', 'stage',
        '--agent.network.v-min', '-0.2', '--agent.network.head-hidden', '16', '--agent.cem.samples', '8', *GRASP,
        '--log-share', '1/2', '--agent.buffer.samples-per-insert', '0.23']
  ),
  'pooled-resets': (
    1, [*PPO, *TINY, '--env', 'gymnax:CartPole-v1,fresh_fraction=0.25']
  ),
  'meta-training': (2, DISCOVER),
  'gymnasium': (1, ['--env', 'gymnasium:CartPole-v1', *HOST, '--agent.network.core', 'gru', '--agent.network.core-size', '8']),
  'atari': (1, ['--env', 'ale:breakout', *HOST]),
  'atari-sticky': (1, ['--env', 'ale:breakout,sticky=0.25,episodic_life=True', *HOST, '--lag', '0']),
  'envpool-and-replay-on-the-host': (
    1, ['--env', 'envpool:CartPole-v1', *HOST, '--agent', 'dqn', '--replay', 'host', *REPLAY]
  ),
}  # fmt: skip


class Undisturbed:
  """For each case the directory of a run that nothing happened to, made when first asked for."""

  def __init__(self, folder: Path, cache: Path) -> None:
    self.folder, self.cache = folder, cache

  def __getitem__(self, case: str) -> Path:
    run_dir = self.folder / case
    if not run_dir.exists():
      devices, args = CASES[case]
      log = self.folder / f'{case}.txt'
      code, output = podrace(train(run_dir, args), log, devices, self.cache)
      assert code == 0, output
    return run_dir


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: TempPaths, cache: Path) -> Undisturbed:
  return Undisturbed(tmp_path_factory.mktemp('undisturbed'), cache)


@functools.cache
def grasps() -> Path:
  """A log of the scripted policy, which this process takes along when it ends."""
  folder = Path(tempfile.mkdtemp())
  atexit.register(shutil.rmtree, folder)
  command = ['record', '--env', 'podrace:grasp', '--scripted', '--episodes', '200', '--to']
  code, output = podrace([*command, str(folder / 'log')], folder / 'log.txt', 1, None)
  assert code == 0, output
  return folder / 'log'


def train(run_dir: Path, args: Sequence[str]) -> list[str]:
  words = [str(grasps()) if a == GRASPS else a for a in args]
  command = words if args[0] == 'discover' else ['train', 'catch', *words]
  return [*command, '--run-dir', str(run_dir)]


class Lives:
  """One run in `tmp_path/run`, in as many processes as it takes."""

  def __init__(self, tmp_path: Path, case: str, cache: Path | None) -> None:
    self.run_dir, self.cache = tmp_path / 'run', cache
    self.devices, self.args = CASES[case]
    self.log = tmp_path / 'log.txt'

  def start(self) -> Podrace:
    return Podrace(train(self.run_dir, self.args), self.log, self.devices, self.cache)

  def newest(self) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max(saved_in(self.run_dir), default=0)

  def finish(self) -> str:
    code, output = podrace(train(self.run_dir, self.args), self.log, self.devices, self.cache)
    assert code == 0, output
    return output


# --- SIGKILL ------------------------------------------------------------------------------------


def killed_at_random(lives: Lives, kills: int, seed: int, undisturbed: Path) -> None:
  """Kills the run `kills` times: around its checkpoints, and from its first moment on."""
  moments = random.Random(seed)
  killed = resumed = 0
  while killed < kills:
    before = lives.newest()
    one = lives.start()
    if killed % 2 == 0:
      until(lambda one=one, before=before: lives.newest() > before or not one.process.is_alive())
    elif event := moments.choice(['', 'compiled in', '\nstep ']):
      until(lambda one=one, event=event: event in one.output or not one.process.is_alive())
    one.process.join(moments.uniform(0.0, 0.3))
    if one.process.exitcode == 0:  # it was faster; another run then, for the rest of the kills
      assert_same_run(lives.run_dir, undisturbed)
      shutil.rmtree(lives.run_dir)
      continue
    one.kill()
    killed += 1
    resumed += 'resuming at step' in one.output
  resumed += 'resuming at step' in lives.finish()
  assert resumed >= kills // 3
  assert_same_run(lives.run_dir, undisturbed)


def test_killed_while_compiling(tmp_path: Path, cache: Path) -> None:
  """It goes on as the run that it was, by its directory alone."""
  run_dir = tmp_path / 'run'
  one = Podrace(
    ['train', '--env', 'podrace:memory,length=3', '--total-steps', '640', '--run-dir', str(run_dir)],
    tmp_path / 'one.txt', 1, cache,
  )  # fmt: skip
  one.says('compiling podrace:memory')
  one.kill()
  code, output = podrace(['train', '--run-dir', str(run_dir)], tmp_path / 'two.txt', 1, cache)
  assert code == 0 and 'compiling podrace:memory,length=3' in output
  assert summary(run_dir)['step'] == 1024


SLOW = {
  'ppo-normalized',
  'popart-sebulba',
  'pqn',
  'pqn-gru-sebulba',
  'sac-memory',
  'dqn-memory-on-the-host',
  'd4pg-memory-sebulba',
  'replay-continuous',
  'impala-gru',
  'self-tuning',
  'self-tuning-sebulba',
  'two-seeds',
  'pooled-resets',
  'planning',
  'planning-sebulba-on-the-host',
  'muesli-gru',
  'muesli-sebulba-on-the-host',
  'a-rule',
  'intrinsic',
  'lifetimes',
  'log',
  'three-tables-and-log',
  'three-tables-and-updates-without-samples',
  'lpg-gru',
  'lpg-sebulba',
  'meta-training',
  'a-rule-sebulba-on-the-host',
  'two-devices',
  'sebulba-lag-0',
  'sebulba-lag-1',
  'replay',
  'replay-sebulba',
  'replay-sebulba-lag-0',
  'replay-on-the-host',
  'replay-on-the-host-lag-1',
  'one-checkpoint-and-replay-on-the-host',  # killed below, while it writes them
}


ON_THE_HOST = {'gymnasium', 'atari', 'atari-sticky', 'envpool-and-replay-on-the-host'}


@pytest.mark.parametrize(
  'case',
  [
    pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c
    for c in CASES
    if c not in ON_THE_HOST
  ],
)
def test_killed_three_times(
  case: str, tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  killed_at_random(Lives(tmp_path, case, cache), 3, len(case), undisturbed[case])


@pytest.mark.slow
@pytest.mark.parametrize('case', ['gymnasium', 'atari'])
def test_killed_twice_with_environments_on_the_host(
  case: str, tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  killed_at_random(Lives(tmp_path, case, cache), 2, len(case), undisturbed[case])


@pytest.mark.slow
@pytest.mark.parametrize('case', sorted(ON_THE_HOST))
def test_killed_ten_times_with_environments_on_the_host(
  case: str, tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  killed_at_random(Lives(tmp_path, case, cache), 10, 2026, undisturbed[case])


@pytest.mark.slow
@pytest.mark.parametrize('case', [c for c in CASES if c not in ON_THE_HOST])
def test_killed_twenty_times(
  case: str, tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  killed_at_random(Lives(tmp_path, case, cache), 20, 2026, undisturbed[case])


@pytest.mark.slow
def test_the_compilation_cache_of_these_tests_changes_nothing(
  tmp_path: Path, undisturbed: Undisturbed
) -> None:
  lives = Lives(tmp_path, 'ppo-normalized', cache=None)
  lives.finish()
  assert_same_run(lives.run_dir, undisturbed['ppo-normalized'])


@pytest.mark.slow
@pytest.mark.parametrize('case', ['ppo-normalized', 'one-checkpoint-and-replay-on-the-host'])
def test_killed_while_writing_checkpoints(
  case: str, tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  lives, told = Lives(tmp_path, case, cache), 0
  folder = lives.run_dir / 'checkpoints'
  for i in range(3):
    before = set(folder.glob('*tmp*'))
    one = lives.start()
    until(lambda one=one, before=before: (lives.newest() and set(folder.glob('*tmp*')) - before)
          or not one.process.is_alive())  # fmt: skip
    one.process.join(0.02 * i)
    one.kill()
    told += 'half-written' in one.output
  told += 'half-written' in lives.finish()
  assert told > 0
  assert_same_run(lives.run_dir, undisturbed[case])


@pytest.mark.slow
def test_killed_while_writing_metrics(
  tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  lives = Lives(tmp_path, 'impala-gru', cache)
  file = lives.run_dir / 'metrics.jsonl'
  for _ in range(2):
    before = lives.newest()
    one = lives.start()
    until(lambda before=before: lives.newest() > before)
    size = file.stat().st_size
    until(lambda size=size, one=one: file.stat().st_size > size or not one.process.is_alive())
    one.kill()
  with file.open('a') as f:
    f.write('{"step": 999999, "epi')  # the line that a kill cuts off, if it comes at its worst
  lives.finish()
  assert_same_run(lives.run_dir, undisturbed['impala-gru'])


# --- SIGTERM, SIGINT ----------------------------------------------------------------------------

SOON = 60.0  # seconds; a matter of less than one on an idle machine
TERM, INT, HUP = (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)
MOMENTS = ('compiling', 'compiled in', '\nstep ', 'checkpoint')


@pytest.mark.parametrize(
  ('signum', 'code', 'moment', 'case'),
  slow_after(
    1,
    (*TERM, 'checkpoint', 'ppo-short'),
    *((*kind, moment, 'ppo-normalized') for kind in (TERM, INT) for moment in MOMENTS),
    (*HUP, '\nstep ', 'ppo-normalized'),
  ),
)
def test_signals_save_first(
  signum: int,
  code: int,
  moment: str,
  case: str,
  tmp_path: Path,
  cache: Path,
  undisturbed: Undisturbed,
) -> None:
  lives = Lives(tmp_path, case, cache)
  if moment == 'compiling':
    lives.cache = None  # it takes seconds then
  one = lives.start()
  if moment == 'checkpoint':
    until(lambda: list((lives.run_dir / 'checkpoints').glob('*tmp*')))
  else:
    one.says(moment)
  one.signal(signum)
  assert one.wait(SOON) == code, one.output
  assert '--run-dir' in one.output
  assert 'Traceback' not in one.output
  saved = checkpoints(lives.run_dir)
  assert bool(saved) == (moment != 'compiling')
  lives.cache = cache
  output = lives.finish()
  assert not saved or f'resuming at step {saved[-1]:,}' in output
  assert_same_run(lives.run_dir, undisturbed[case])


def test_a_second_ctrl_c_ends_at_once_and_says_so(capfd: Capture) -> None:
  with Stop() as stop:
    signal.raise_signal(signal.SIGTERM)
    assert stop.signum == signal.SIGTERM
    told = capfd.readouterr().err
    assert 'SIGTERM' in told and 'Ctrl-C' in told and told.endswith('\n')
    signal.raise_signal(signal.SIGTERM)
    assert not capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
    assert 'without saving' in capfd.readouterr().err


def test_two_sigints_at_once_are_one(capfd: Capture, monkeypatch: Patch) -> None:
  """`timeout -s INT` signals the process, and then its group."""
  with Stop() as stop:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert stop.signum == signal.SIGINT
    assert 'without saving; the last' not in capfd.readouterr().err
    monkeypatch.setattr(process, 'ONCE_SECONDS', 0.0)
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)


# --- in this process ----------------------------------------------------------------------------


class Here:
  """Runs of one small case in this process: the exit code, and what was said."""

  args = ('--devices', '1', '--agent', 'ppo', *TINY[:6], '--total-steps', '8000', '--log-every', '320', '--checkpoint-every', '1600')  # fmt: skip

  def __init__(self, folder: Path, capfd: Capture) -> None:
    self.folder, self.capfd = folder, capfd

  def __call__(self, name: str, *more: str) -> tuple[int, str]:
    self.capfd.readouterr()
    with pytest.raises(SystemExit) as end, no_exit():
      cli.main([*train(self.folder / name, self.args), *more])
    return end.value.code, ''.join(self.capfd.readouterr())


@contextlib.contextmanager
def no_exit() -> Iterator[None]:
  """os._exit as SystemExit, so that this process outlives a run that a signal stopped."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, '_exit', sys.exit)
    yield


@pytest.fixture
def here(tmp_path: Path, capfd: Capture) -> Here:
  return Here(tmp_path, capfd)


@pytest.fixture(scope='module')
def half(tmp_path_factory: TempPaths) -> Path:
  """A run that was stopped at step 4,800 with three checkpoints; beside it `whole`, finished."""
  folder = tmp_path_factory.mktemp('half')
  with pytest.MonkeyPatch.context() as patch, no_exit():
    patch.setitem(sinks.SINKS, 'stop', StopAt(4_480))
    for name, code, more in (('whole', 0, []), ('half', 143, ['--sinks', 'stop'])):
      with pytest.raises(SystemExit) as end:
        cli.main([*train(folder / name, Here.args), *more])
      assert end.value.code == code
  assert len(checkpoints(folder / 'half')) == 3
  return folder


def test_ctrl_c_saves_first(here: Here, half: Path, monkeypatch: Patch) -> None:
  monkeypatch.setitem(sinks.SINKS, 'stop', StopAt(5_120, signal.SIGINT))
  monkeypatch.setattr(updates, 'CALL_SECONDS', 1e-9)  # so that it is not over before it is told
  run_dir = shutil.copytree(half / 'half', here.folder / 'half')
  code, output = here('half', '--sinks', 'stop')
  assert code == 130 and '--run-dir' in output and 'Traceback' not in output
  assert 5_120 <= checkpoints(run_dir)[-1] < 8_000
  assert here('half')[0] == 0
  assert_same_run(run_dir, half / 'whole')


@pytest.mark.slow
@pytest.mark.parametrize('seconds', [1e-9, 0.01, 5.0])
def test_what_is_computed_does_not_depend_on_the_clock(
  seconds: float, here: Here, half: Path, monkeypatch: Patch
) -> None:
  monkeypatch.setattr(updates, 'CALL_SECONDS', seconds)
  monkeypatch.setattr(updates, 'CHECKPOINT_SECONDS', 0.2)
  monkeypatch.setattr(updates, 'FIRST_CHECKPOINT_SECONDS', 0.0)
  assert here('other', '--checkpoint-every', '0', '--override')[0] == 0
  assert_same_run(here.folder / 'other', half / 'whole')


def truncate(checkpoint: Path) -> None:
  file = largest(checkpoint / 'rest')
  os.truncate(file, file.stat().st_size // 2)


def flip(checkpoint: Path) -> None:
  file = largest(checkpoint / 'params')
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)


def flip_meta(checkpoint: Path) -> None:
  file = checkpoint / 'meta' / 'metadata'
  file.write_text(file.read_text().replace('"mesh": 1', '"mesh": 3'))


def delete(checkpoint: Path) -> None:
  largest(checkpoint / 'params').unlink()


def empty_meta(checkpoint: Path) -> None:
  (checkpoint / 'meta' / 'metadata').write_text('')


def largest(folder: Path) -> Path:
  return max(every_file(folder), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
  'damage',
  [
    flip,
    *(
      pytest.param(damage, marks=pytest.mark.slow)
      for damage in (truncate, flip_meta, delete, empty_meta)
    ),
  ],
)
def test_the_one_before_a_damaged_checkpoint_is_used(damage, here: Here, half: Path) -> None:
  run_dir = here.folder / 'half'
  shutil.copytree(half / 'half', run_dir)
  *_, before, newest = checkpoints(run_dir)
  damage(run_dir / 'checkpoints' / str(newest))
  damaged = contents(run_dir / 'checkpoints' / str(newest))
  code, output = here('half')
  assert code == 0, output
  assert f'damaged: checkpoint {newest}' in output
  assert f'resuming at step {before:,}' in output
  assert contents(run_dir / 'damaged' / str(newest)) == damaged
  assert_same_run(run_dir, half / 'whole')


def test_a_checkpoint_without_any_one_of_its_files_is_whole_or_refused(
  tmp_path: Path, half: Path
) -> None:
  newest = checkpoints(half / 'half')[-1]
  shapes = build.build(directory.load_config(half / 'half')).shapes
  params, rest = as_saved(shapes)
  refused = []
  for i, file in enumerate(every_file(half / 'half' / 'checkpoints' / str(newest))):
    folder = tmp_path / str(i)
    shutil.copytree(half / 'half' / 'checkpoints', folder)
    (folder / file.relative_to(half / 'half' / 'checkpoints')).unlink()
    try:
      found = Checkpoints(folder, writes=False).restore(newest, params, rest)
    except CheckpointError:
      refused.append(str(file))
    else:
      types = [(x.shape, x.dtype) for x in jax.tree.leaves((found.params, found.rest))]
      assert types == [(x.shape, x.dtype) for x in jax.tree.leaves((params, rest))], file
  # A random key is made of its numbers, as the program's shapes have it: no file says that it is one.
  assert any('rest/d/' in name for name in refused), refused
  assert not any('array_metadatas' in name for name in refused), refused


def contents(folder: Path) -> dict[str, bytes]:
  return {str(p.relative_to(folder)): p.read_bytes() for p in every_file(folder)}


def test_a_half_written_checkpoint_is_not_taken_for_one(here: Here, half: Path) -> None:
  run_dir = here.folder / 'half'
  shutil.copytree(half / 'half', run_dir)
  *_, before, newest = checkpoints(run_dir)
  draft = run_dir / 'checkpoints' / f'{newest}.orbax-checkpoint-tmp'
  (run_dir / 'checkpoints' / str(newest)).rename(draft)
  shutil.rmtree(draft / 'params')
  code, output = here('half')
  assert code == 0, output
  assert f'half-written: {draft.name}' in output
  assert not list((run_dir / 'checkpoints').glob('*tmp*'))
  assert f'resuming at step {before:,}' in output
  assert_same_run(run_dir, half / 'whole')


def test_all_checkpoints_damaged(here: Here, half: Path) -> None:
  run_dir = here.folder / 'half'
  shutil.copytree(half / 'half', run_dir)
  for step in checkpoints(run_dir):
    flip(run_dir / 'checkpoints' / str(step))

  def kept() -> dict[str, bytes]:
    return {k: x for k, x in contents(run_dir).items() if k != 'end.json'}

  before = kept()
  for _ in range(2):  # and it doesn't begin again by itself when it is started again
    code, output = here('half')
    assert code == 1
    assert '3 checkpoints' in output
    assert 'Traceback' not in output
    assert '3 checkpoints' in json.loads((run_dir / 'end.json').read_text())['why']
    assert kept() == before


@pytest.mark.parametrize('part', slow_after(1, 'jax', 'processor'))
def test_another_machine_is_told(part: str, here: Here, half: Path, monkeypatch: Patch) -> None:
  shutil.copytree(half / 'half', here.folder / 'half')
  here_now = hashes.machine()
  monkeypatch.setattr(save_and_resume, 'machine', lambda: {**here_now, part: '9.9'})
  code, output = here('half')
  assert code == 0
  assert 'not bit for bit' in output and f'{part} {here_now[part]} -> 9.9' in output


# --- full disk ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_full_disk(
  request: pytest.FixtureRequest, tmp_path: Path, cache: Path, undisturbed: Undisturbed
) -> None:
  if os.geteuid() != 0 and 'INSIDE' not in os.environ:
    if subprocess.run(['unshare', '-rm', 'true'], check=False).returncode:
      pytest.skip('needs root, or user namespaces')
    inside = ['unshare', '-rm', sys.executable, '-m', 'pytest', '-q', request.node.nodeid]
    subprocess.run(inside, env={**os.environ, 'INSIDE': '1'}, timeout=DEADLINE, check=True)
    return
  case = 'ppo-normalized'
  lives = Lives(tmp_path, case, cache)
  lives.run_dir = tmp_path / 'disk' / 'run'
  with small_disk(tmp_path / 'disk', 4096):
    one = lives.start()
    until(lambda: len(saved_in(lives.run_dir)) >= 2)
    one.signal(signal.SIGSTOP)
    filler = tmp_path / 'disk' / 'filler'
    with contextlib.suppress(OSError), filler.open('wb', buffering=0) as f:
      while True:
        f.write(b'x' * 4096)
    one.signal(signal.SIGCONT)
    assert one.wait() == 1, one.output
    assert last_word(one.output)
    kept = saved_in(lives.run_dir)
    assert kept
    code, output = podrace(train(lives.run_dir, lives.args), lives.log, 1, cache)  # still full
    assert code == 1 and last_word(output), output
    assert saved_in(lives.run_dir)
    filler.unlink()
    assert 'resuming at step' in lives.finish()
    assert_same_run(lives.run_dir, undisturbed[case])


def last_word(output: str) -> bool:
  """That podrace's last line tells the reason; tensorstore may print lines of its own around it."""
  line = [x for x in output.splitlines() if x.startswith('podrace: ')][-1]
  return 'No space left on device' in line


def saved_in(run_dir: Path) -> list[int]:
  return checkpoints(run_dir) if (run_dir / 'checkpoints').is_dir() else []
