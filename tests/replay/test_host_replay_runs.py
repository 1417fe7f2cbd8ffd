"""Agents with replay on the host, under Sebulba: in any order, and with environments elsewhere."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from processes import Podrace, as_users_have_it, cache, checkpoints, lines, podrace, summary
from test_sebulba import Running, Sebulba, assert_close, assert_same, compiled, jittery
from test_sebulba_run import Shuffled
from test_value_agents import AGENTS, CATCH, env_of, sebulba

from podrace import cli
from podrace.agents.r2d2 import R2D2
from podrace.envs.host import base as host
from podrace.envs.host.episodes import Totals
from podrace.errors import ReplayFailed, UsageError
from podrace.networks import QNetwork
from podrace.replay import Buffer, host_checkpoint
from podrace.replay import host as host_replay
from podrace.run import metrics, sinks
from podrace.settings.agents import bind
from podrace.topology import split_devices

SLOW = pytest.mark.slow


def remembering(*args: Any, **kwargs: Any) -> Sebulba:
  return sebulba(*args, **kwargs, host_replay=True)


@SLOW
@pytest.mark.parametrize(('lag', 'learners'), [('0', '1'), ('async', '1,2')])
def test_dqn_learns_catch(lag: str, learners: str) -> None:
  with Running(remembering(CATCH, 'podrace:catch', '0', learners, 2, 32, 4, lag)) as run:
    run.driver.read_log(run.advance(110))
    run.driver.read_log(run.state)
    told, _ = run.driver.read_log(run.advance(30))
  assert told['episodes'] >= 300
  assert told['return_sum'] / told['episodes'] > 0.8
  host_log = told['host']
  assert host_log['replay_windows'] <= 8192
  updates = 140 - 512 // 128 + 1  # from min_size on
  assert host_log['replay_samples'] == updates * 32 * 4 * 8


@SLOW
@pytest.mark.parametrize('lag', ['0', 'async'])
def test_r2d2_remembers(lag: str) -> None:
  network = QNetwork(hidden=(32,), core='gru', core_size=32)
  buffer = Buffer(20_000, 64, 2_000, 4, priority_exponent=0.9)
  agent = R2D2(
    network, buffer, sequence=10, burn_in=4, learning_rate=2e-3, adam_epsilon=1e-5,
    target_period=50, epsilon_base=0.2,
  )  # fmt: skip
  with Running(remembering(agent, 'podrace:memory,length=5', '0', '1', 2, 64, 7, lag)) as run:
    run.driver.read_log(run.advance(330))
    run.driver.read_log(run.state)
    told, _ = run.driver.read_log(run.advance(40))
  assert told['return_sum'] / told['episodes'] > 0.7  # exploring as it does


@SLOW
@pytest.mark.parametrize('name', AGENTS)
def test_every_agent_learns_from_it(name: str) -> None:
  """As many samples as from the device's replay, and the parameters change; on two devices."""
  program = remembering(AGENTS[name], env_of(name), '0', '1,2', 1, lag='1')
  other = sebulba(AGENTS[name], env_of(name), '0', '1,2', 1, lag='1')
  with Running(program) as run:
    before = jax.device_get(run.state.train.params)
    found = run.advance(20)
  with Running(other) as run:
    expected = run.advance(20)
  assert int(found.log.samples) == int(expected.log.samples) > 0
  assert int(found.log.broken) == -1
  changed = [
    not np.array_equal(x, y)
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(found.train.params), strict=True)
  ]
  assert any(changed)


@SLOW
@pytest.mark.parametrize('name', ['dqn', 'r2d2'])
def test_timing_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """With lag 1, whoever is faster; nor does it matter that there was another run before."""
  found = []
  for seed in range(3):
    program = remembering(AGENTS[name], 'podrace:catch', '0,1', '2', 2, lag='1')
    with monkeypatch.context() as patch:
      jittery(patch, seed)
      with Running(program) as run:
        found.append(run.advance(25).train)
        assert run.driver.read_log(run.state)[0]['host']['replay_samples'] > 200
  for other in found[1:]:
    assert_same(found[0], other)


def test_a_checkpoint_without_replay_is_of_other_settings(tmp_path: Path) -> None:
  """Such as one of a run with --replay service: it is not damaged."""
  program = remembering(CATCH, 'podrace:catch', '0', '0', 1, 8, 4)
  with pytest.raises(UsageError, match='--replay host'):
    program.driver.saved_replay.restore(tmp_path / '9', None)


def test_statistics_of_a_run_with_a_service_are_taken_over() -> None:
  part = remembering(CATCH, 'podrace:catch', '0', '0', 1, 8, 4).driver.parts['statistics']
  episodes = dataclasses.asdict(Totals(3, 1.5, 2.0, 12))
  part.restore({'episodes': episodes, 'highest': 2.0})
  assert part.save()['episodes'] == episodes


def test_a_failure_before_learning_keeps_the_updates_that_were_made() -> None:
  """The next call raises it, with a state that belongs to the contents of replay."""
  with Running(remembering(CATCH, 'podrace:catch', '0', '0', 1, 8, 4)) as run:
    take = run.driver.source.take

    def failing(update: int, cancelled: Any) -> Any:
      if update == 3:
        raise ReplayFailed('planted')
      return take(update, cancelled)

    run.driver.source.take = failing
    state, made = run.driver.advance(run.state, 8, lambda: False)
    assert made == int(state.update) == 3
    with pytest.raises(ReplayFailed):
      run.driver.advance(state, 8, lambda: False)


@pytest.mark.slow
def test_environments_in_any_order() -> None:
  """Every window is a piece of one environment's life, and all is learned from."""
  from gymnasium import spaces

  spec = host.HostSpec(
    'shuffled', spaces.Box(-np.inf, np.inf, (3,), np.float32), spaces.Discrete(5),
    lambda args: Shuffled(args.num_envs, args.batch_size, 3),
  )  # fmt: skip
  agent = bind(dataclasses.replace(AGENTS['dqn'], n_step=3), spec, 100, 8)
  program = Sebulba(
    agent, spec, agent.memory(8, 5), split_devices('0', '0'), 8, 5, 1, lag='async', batch_size=2,
    host_replay=True,
  )  # fmt: skip
  with Running(program) as run:
    run.advance(40)
    table = run.driver.source.replay.table
    found = table.sample(400).data
    assert len(table) > 150
  steps = found['observation']
  assert set(found['env_id']) == set(range(8))
  np.testing.assert_array_equal(steps[:, :, 0], np.repeat(found['env_id'][:, None], 4, 1))
  np.testing.assert_array_equal(np.diff(steps[:, :, 1]), 1)  # without a gap
  free = found['step_type'][:, 1:] != 0
  np.testing.assert_array_equal(steps[:, 1:, 2][free], found['action'][free])


@pytest.mark.parametrize('kills', [2, pytest.param(5, marks=SLOW)])
def test_no_window_is_of_two_lives(kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """Workers are killed while they act, in lockstep; their environments number their steps."""
  monkeypatch.setattr('podrace.envs.host.worker_pool.RESTARTS', 1000)
  spec = host.make('gymnasium:host_envs:Sequence-v0')
  agent = bind(dataclasses.replace(AGENTS['dqn'], n_step=3), spec, 100, 4)
  program = Sebulba(
    agent, spec, agent.memory(4, 4), split_devices('0', '0'), 4, 4, 1, lag='1', env_threads=4,
    host_replay=True,
  )  # fmt: skip
  moments = random.Random(0)
  with Running(program) as run:
    (workers,) = run.actors.pools
    for _ in range(kills):
      run.advance(moments.randint(2, 4))
      os.kill(moments.choice(workers.pids), signal.SIGKILL)
    run.advance(4)
    restarts = run.driver.read_log(run.state)[0]['host']['env_restarts']
    table = run.driver.source.replay.table
    steps = table.sample(600).data['observation']
  assert restarts == kills
  assert len({tuple(x) for x in steps[:, 0, :2].tolist()}) > 4  # of several lives
  for life in (0, 1):
    np.testing.assert_array_equal(steps[:, :, life], np.repeat(steps[:, :1, life], 4, 1))
  np.testing.assert_array_equal(np.diff(steps[:, :, 2]), 1)


DQN = ['--architecture', 'sebulba', '--agent', 'dqn', '--num-envs', '8', '--unroll-length', '8',
       '--agent.network.hidden', '16', '--agent.n-step', '3', '--actor-threads', '2',
       '--agent.buffer.min-size', '500', '--agent.buffer.batch-size', '16',
       '--agent.buffer.samples-per-insert', '1', '--agent.buffer.capacity', '4096',
       '--agent.buffer.priority-exponent', '0.5']  # fmt: skip


MUZERO = ['--architecture', 'sebulba', '--agent', 'muzero', '--num-envs', '8', '--unroll-length', '8',
          '--agent.network.hidden', '16', '--agent.simulations', '4', '--agent.unroll', '2',
          '--actor-threads', '2', '--agent.buffer.min-size', '500', '--agent.buffer.batch-size', '16',
          '--agent.buffer.samples-per-insert', '1', '--agent.buffer.capacity', '4096']  # fmt: skip


@SLOW
@pytest.mark.parametrize('agent', [DQN, MUZERO], ids=['dqn', 'muzero'])
def test_seed_with_replay(agent: list[str], tmp_path: Path, cache: Path) -> None:
  """Environments in another process, an agent with replay."""
  from peers import Envs

  address, env, run_dir = f'unix:{tmp_path}/socket', 'gymnasium:CartPole-v1', tmp_path / 'run'
  args = ['train', 'catch', '--env', env, *agent, '--envs', 'remote', '--replay', 'host', '--listen',
          address, '--total-steps', '8000', '--log-every', '640', '--run-dir', str(run_dir)]  # fmt: skip
  one = Podrace(args, tmp_path / 'learner.txt', 1, cache)
  clients = [Envs(address, tmp_path / f'{i}', '--num-envs', '4', env=env) for i in range(2)]
  assert one.wait() == 0, one.output
  assert [client.wait() for client in clients] == [0, 0]
  told = lines(run_dir)
  assert told[-1]['replay_samples'] >= (8000 - 1500) and 'loss' in told[-1]
  assert told[-1]['replay_windows'] <= 4096


@SLOW
def test_host_environments_resume(tmp_path: Path, cache: Path) -> None:
  """Their streams begin anew, and what was remembered stays."""
  run_dir = tmp_path / 'run'
  args = ['train', 'catch', '--env', 'gymnasium:CartPole-v1', *DQN, '--replay', 'host',
          '--log-every', '640', '--run-dir', str(run_dir)]  # fmt: skip
  code, output = podrace([*args, '--total-steps', '3200'], tmp_path / 'one.txt', 1, cache)
  assert code == 0, output
  assert sorted(int(p.name) for p in (run_dir / 'replay').iterdir()) == checkpoints(run_dir)
  code, output = podrace(
    [*args, '--total-steps', '4800', '--override'], tmp_path / 'two.txt', 1, cache
  )
  assert code == 0, output
  assert '3,200' in output
  told = lines(run_dir)
  inserts = {x['step']: x['replay_inserts'] for x in told}
  assert inserts[3200] > 2900 and inserts[4480] - inserts[3200] > 1000


@pytest.mark.slow
def test_a_checkpoint_without_its_replay_is_damaged(tmp_path: Path, cache: Path) -> None:
  run_dir = tmp_path / 'run'
  args = ['train', 'catch', *DQN, '--replay', 'host', '--total-steps', '3200',
          '--checkpoint-every', '1600', '--run-dir', str(run_dir)]  # fmt: skip
  code, output = podrace(args, tmp_path / 'one.txt', 1, cache)
  assert code == 0, output
  hashed = summary(run_dir)['params_sha256']
  (run_dir / 'summary.json').unlink()
  newest = max((run_dir / 'replay').iterdir(), key=lambda p: int(p.name))
  chunks = newest / 'tables' / 'chunks.bin'
  chunks.write_bytes(chunks.read_bytes()[:-3])
  code, output = podrace([*args, '--quiet'], tmp_path / 'two.txt', 1, cache)
  assert code == 0, output
  assert 'damaged: ' in output and 'chunks.bin' in output
  assert 'resuming' not in output  # which is progress
  assert summary(run_dir)['params_sha256'] == hashed
  assert (run_dir / 'damaged' / '3200-replay').is_dir()


def test_learning_goes_on_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  learned, write = threading.Event(), host_checkpoint.write_snapshot

  class Learned:
    def write(self, line: dict[str, Any]) -> None:
      if line['step'] > 640:
        learned.set()

    def close(self) -> None: ...

  def slow(*args: Any) -> None:
    assert learned.wait(60), 'nothing was learned while the first checkpoint was written'
    write(*args)

  monkeypatch.setitem(sinks.SINKS, 'learned', lambda *args: Learned())
  monkeypatch.setattr(host_checkpoint, 'write_snapshot', slow)
  with pytest.raises(SystemExit) as end:
    cli.main(['train', 'catch', *DQN, '--replay', 'host', '--devices', '1', '--total-steps', '1280',
              '--checkpoint-every', '640', '--log-every', '320', '--sinks', 'learned',
              '--run-dir', str(tmp_path / 'run')])  # fmt: skip
  assert end.value.code == 0
  assert checkpoints(tmp_path / 'run') == [640, 1280]


@pytest.mark.parametrize(
  'place',
  ['tables.Table.update_priorities', pytest.param('replay.host.HostReplay.metrics', marks=SLOW)],
)
def test_failing_replay_ends_the_run(
  place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  """While it is learned from, and while a line of the log is made."""
  error = MemoryError if place.startswith('tables') else ReplayFailed

  def fail(*args: Any, **kwargs: Any) -> None:
    raise error('MemoryError: no more chunks')

  monkeypatch.setattr(f'podrace.{place}', fail)
  args = ['--replay', 'host', '--devices', '1', '--run-dir', str(tmp_path / 'run')]
  with pytest.raises(SystemExit) as end:
    cli.main(['train', 'catch', *DQN, *args])
  assert end.value.code == 1
  told = capfd.readouterr().err
  assert 'MemoryError' in told and 'saved' in told


ENV = 'gymnasium:CartPole-v1'


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--replay', 'host', '--architecture', 'anakin'], '--replay host'),
    (['--replay', 'host', '--architecture', 'sebulba'], '--replay host'),
    ([*DQN, '--env', ENV, '--lag', 'async', '--env-batch-size', '2'], '--replay host'),
  ],
)
def test_bad_usage_is_2(
  args: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  with pytest.raises(SystemExit) as end:
    cli.main(['train', 'catch', *args, '--devices', '1', '--run-dir', str(tmp_path / 'run')])
  assert end.value.code == 2
  assert message in capfd.readouterr().err
