"""Whole runs with remote environments: learners and clients as processes, over loopback."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import ROOT, until
from gymnasium import spaces
from peers import ANY, Envs, Learner, Raw, spec
from processes import Podrace, as_users_have_it, cache, checkpoints, lines, summary
from rich.console import Console

from podrace import cli
from podrace.distributed.environments import environment_messages
from podrace.distributed.net import keys as net_keys
from podrace.distributed.net import session_messages
from podrace.distributed.net.dashboard import Asker, table
from podrace.envs.host import base as host
from podrace.types import FIRST, MID

TINY = ['--architecture', 'sebulba', '--num-envs', '8', '--unroll-length', '8',
        '--agent.network.hidden', '16', '--actor-threads', '2', '--envs', 'remote']  # fmt: skip


def learner(env: str, tmp_path: Path, cache: Path, *args: str) -> Podrace:
  run_dir = str(tmp_path / 'run')
  return Podrace(
    ['train', 'catch', '--env', env, *TINY, *args, '--run-dir', run_dir],
    tmp_path / 'learner.txt', 1, cache,
  )  # fmt: skip


def test_a_run_waits_loses_environments_resumes_and_ends(tmp_path: Path, cache: Path) -> None:
  """Over unix:, with clients that are killed, and a learner that is stopped and started again."""
  address = f'unix:{tmp_path}/socket'
  env = 'gymnasium:CartPole-v1'
  args = ['--listen', address, '--total-steps', '16_000', '--log-every', '640']
  run_dir = tmp_path / 'run'
  one = learner(env, tmp_path, cache, *args)
  one.says(f'`podrace envs --connect {address}')
  assert not (run_dir / 'metrics.jsonl').read_text()
  first = Envs(address, tmp_path / 'first', '--num-envs', '8', env=env)
  until(lambda: len(lines(run_dir)) >= 2)
  first.kill()
  until(lambda: one.output.count('`podrace envs --connect') == 2)
  second = Envs(address, tmp_path / 'second', '--num-envs', '8', env=env)
  third = Envs(address, tmp_path / 'third', '--num-envs', '8', env=env)  # in reserve
  count = len(lines(run_dir))
  until(lambda: len(lines(run_dir)) >= count + 2)
  one.signal(signal.SIGTERM)
  assert one.wait() == 143, one.output
  (*_, saved) = checkpoints(run_dir)
  again = learner(env, tmp_path, cache, *args)
  again.says(f' step {saved:,}')
  assert again.wait() == 0, again.output
  assert [second.wait(), third.wait()] == [0, 0]
  second.says('is over')
  assert summary(run_dir)['step'] >= 16_000
  told = lines(run_dir)
  assert [x['step'] for x in told] == sorted({x['step'] for x in told})
  assert all(x['policy_lag_max'] <= 4 for x in told)
  assert told[-1]['remote_envs'] == 8 and told[-1]['remote_clients'] == 2
  lengths = [x['episode_length'] for x in told if x['episodes']]
  returns = [x['episode_return'] for x in told if x['episodes']]
  np.testing.assert_allclose(lengths, returns)  # CartPole's reward is 1 a step: none is lost


def test_clients_hear_the_end_before_the_run_is_finished(tmp_path: Path, cache: Path) -> None:
  """So a run that dies in between is not finished, and tells them again."""
  address, env = f'unix:{tmp_path}/socket', 'gymnasium:CartPole-v1'
  one = learner(env, tmp_path, cache, '--listen', address, '--total-steps', '640')
  one.says('`podrace envs --connect')
  with Raw(address, host.make(env)) as raw:
    raw.join_as()
    numbers = [0, 0]
    for group in (0, 1):
      raw.enter(4, group)
    for group in (0, 1):
      raw.step(4, 0, FIRST, group)
    while (heard := raw.hear(60))[0] is environment_messages.ACTION:
      group = heard[1][0]
      numbers[group] += 1
      raw.step(4, numbers[group], MID, group)
    assert heard[0] is session_messages.END and heard[1][0] is True
    assert not (tmp_path / 'run' / 'summary.json').exists()
    raw.say(session_messages.BYE, 'over')
    assert one.wait() == 0, one.output
  assert summary(tmp_path / 'run')['step'] >= 640


def test_a_frozen_client_does_not_hold_up_training(tmp_path: Path, cache: Path) -> None:
  address, env = f'unix:{tmp_path}/socket', 'gymnasium:CartPole-v1'
  one = learner(
    env, tmp_path, cache, '--listen', address, '--log-every', '320', '--peer-timeout', '1000'
  )
  with (
    Envs(address, tmp_path / 'a', '--num-envs', '4', env=env) as frozen,
    Envs(address, tmp_path / 'b', '--num-envs', '4', env=env),
  ):
    until(lambda: one.output.count('joins') == 2)
    until(lambda: len(lines(tmp_path / 'run')) >= 2)
    frozen.signal(signal.SIGSTOP)
    count = len(lines(tmp_path / 'run'))
    until(lambda: len(lines(tmp_path / 'run')) >= count + 5)
    one.signal(signal.SIGTERM)
    assert one.wait() == 143, one.output


WALK = dataclasses.replace(
  spec(), observation_space=spaces.Box(0, 1, (7,), np.float32),
  action_space=spaces.Discrete(2, dtype=np.int32),
)  # fmt: skip


def assert_walks(arrivals: list[Any]) -> None:
  """From the middle to either end, with a reward at the right one."""
  assert arrivals
  for _, a in arrivals:
    observation, kind = a.timestep.observation, a.timestep.step_type
    assert (observation.sum(1) == 1).all()
    assert (observation[kind == 0, 3] == 1).all()
    ends = (observation[:, 0] == 1) | (observation[:, 6] == 1)
    np.testing.assert_array_equal(ends, kind == 2)
    np.testing.assert_array_equal(a.timestep.reward, observation[:, 6])


@pytest.mark.parametrize('how', ['tcp', 'tls', 'unix'])
def test_the_minimal_client_is_all_it_takes(tmp_path: Path, how: str) -> None:
  """examples/minimal_client.py has nothing of podrace but docs/protocol.md."""
  module = str(ROOT / 'examples' / 'minimal_client.py')
  source = Path(module).read_text()
  assert not re.search('import podrace|from podrace|numpy as', source)
  keys = tmp_path / 'keys' if how == 'tls' else None
  if keys is not None:
    net_keys.new_keys(keys)
  address = f'unix:{tmp_path}/socket' if how == 'unix' else ANY
  with Learner(WALK, keys=keys, address=address) as one:
    more = [] if keys is None else [str(keys)]
    with Envs(one.address, tmp_path / 'log', *more, module=module) as client:
      until(lambda: one.steps > 500)
      (peer,) = one.server.peers
      one.server.call(one.server.listener.tell_gone, peer, 'a test')
      client.says('session ended: a test')
      before = one.steps
      until(lambda: one.steps > before + 200)
      one.server.network.finish()
      one.__exit__()
      assert client.wait() == 0
    assert one.server.counts['sessions'] == 2 and not one.server.counts['malformed']
    assert_walks(one.arrivals)


@pytest.fixture
def in_c(tmp_path: Path) -> Path:
  """examples/minimal_client.c, compiled."""
  source, binary = ROOT / 'examples' / 'minimal_client.c', tmp_path / 'minimal_client'
  if (compiler := shutil.which('cc')) is None:
    pytest.skip('this machine has no C compiler')
  assert len(source.read_text().splitlines()) <= 200
  subprocess.run([compiler, '-O2', '-Wall', '-Wextra', '-Werror', '-o', binary, source], check=True)
  return binary


@pytest.mark.parametrize('how', ['tcp', 'unix'])
def test_the_minimal_client_in_c_is_all_it_takes(tmp_path: Path, in_c: Path, how: str) -> None:
  """It has nothing but docs/protocol.md, in at most 200 lines; and it says that it is alive."""
  address = f'unix:{tmp_path}/socket' if how == 'unix' else ANY
  with Learner(WALK, peer_timeout=1.0, address=address) as one:
    where = one.address.removeprefix('tcp://').split(':')
    with subprocess.Popen([in_c, *where, '4']) as client:
      until(lambda: one.steps > 500)
      one.pause.clear()
      (peer,) = one.server.peers
      until(lambda: time.monotonic() - peer.since > 3)
      one.pause.set()
      before = one.steps
      until(lambda: one.steps > before + 200)
      one.server.network.finish()
      one.__exit__()
      assert client.wait(20) == 0
    assert one.server.counts['sessions'] == 1 and not one.server.counts['malformed']
    assert_walks(one.arrivals)


@pytest.mark.slow
def test_top(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
  with Learner() as one, Envs(one.address, tmp_path / 'log', '--num-envs', '4') as envs:
    until(lambda: one.steps > 200)
    with pytest.raises(SystemExit) as end:
      cli.main(['top', one.address, '--once'])
    assert end.value.code == 0
    (client,) = json.loads(capfd.readouterr().out)['clients']
    assert client['name'].endswith(f':{envs.process.pid}') and client['acting'] == 4
    assert client['frames'] >= 200 and client['answer_ms'][1] > 0 and client['last_seen_s'] < 5
    asker = Asker(one.address, None, False)
    one.pause.clear()  # for ten seconds, until the client tells its metrics
    until(lambda: asker.ask()['clients'][0]['metrics'])
    report = asker.ask()
    asker.close()
    sent = report['clients'][0]['metrics']
    assert sent['steps_per_s'] > 0 and 20 < sent['resident_mb'] < 1000
    console = Console(width=150, record=True)
    console.print(table(report, {c['name']: 0 for c in report['clients']}, 1.0))
    shown = console.export_text()
    assert all(part in shown for part in (f':{envs.process.pid}', f' {sent["resident_mb"]:.3g} '))
    address = one.address
  with pytest.raises(SystemExit) as end:
    cli.main(['top', address, '--once'])
  assert end.value.code == 1
  assert address in capfd.readouterr().err


REMOTE = ['--envs', 'remote', '--listen', 'tcp://127.0.0.1:1']


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--envs', 'remote'], '--listen'),
    (['--listen', 'tcp://127.0.0.1:5555'], '--envs remote'),
    (['--announce', 'at.json'], '--listen'),
    ([*REMOTE, '--lag', '1'], '--lag async'),
    ([*REMOTE, '--max-wait-ms', '-1'], '--max-wait-ms'),
    (['--envs', 'remote', '--listen', 'nowhere'], 'tcp://HOST:PORT'),
    ([*REMOTE, '--peer-timeout', '0'], '--peer-timeout'),
    ([*REMOTE, '--architecture', 'anakin'], '--architecture sebulba'),
  ],
)
def test_bad_usage_is_2(
  args: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
  base = ['train', 'catch', '--architecture', 'sebulba', '--env', 'gymnasium:CartPole-v1']
  with pytest.raises(SystemExit) as end:
    cli.main([*base, *args, '--run-dir', str(tmp_path / 'run')])
  assert end.value.code == 2
  assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_hundred_kills_during_training(tmp_path: Path, cache: Path) -> None:
  address, env = f'unix:{tmp_path}/socket', 'gymnasium:CartPole-v1'
  one = learner(
    env, tmp_path, cache, '--listen', address, '--log-every', '320', '--peer-timeout', '1',
    '--total-steps', '100_000_000',
  )  # fmt: skip
  running = [Envs(address, tmp_path / f'{i}', '--num-envs', '4', env=env) for i in range(3)]
  for i in range(100):
    running[-1].says('joined the learner')  # which leaves lines out where there are many
    count = len(lines(tmp_path / 'run'))
    until(lambda c=count: len(lines(tmp_path / 'run')) > c or not one.process.is_alive())
    assert one.process.is_alive(), one.output
    running.pop(0).kill()
    running.append(Envs(address, tmp_path / f'{3 + i}', '--num-envs', '4', env=env))
  count = len(lines(tmp_path / 'run'))
  until(lambda: len(lines(tmp_path / 'run')) > count + 5)
  one.signal(signal.SIGTERM)
  assert one.wait() == 143, one.output
  for envs in running:
    envs.kill()
  told = lines(tmp_path / 'run')
  assert sum(x['env_restarts'] for x in told) >= 100
  for x in told:
    if x['episodes']:
      assert x['episode_length'] == pytest.approx(x['episode_return'])


assert Any
