"""Learners of several processes whose experience is on the host: in replay there, in a service, elsewhere."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from groups import Learners
from peers import Envs
from processes import Podrace, as_users_have_it, cache, checkpoints, lines, podrace, summary

DQN = ['catch', '--architecture', 'sebulba', '--agent', 'dqn', '--num-envs', '8', '--unroll-length', '8',
       '--agent.network.hidden', '16', '--agent.buffer.min-size', '500', '--agent.buffer.batch-size', '16',
       '--agent.buffer.samples-per-insert', '1', '--agent.buffer.capacity', '2048',
       '--agent.buffer.priority-exponent', '0.5', '--log-every', '640']  # fmt: skip
HOST = [
  *DQN, '--replay', 'host', '--lag', 'async', '--actor-threads', '1', '--checkpoint-every', '640',
]  # fmt: skip


def saved(run_dir: Path) -> list[int]:
  return checkpoints(run_dir) if (run_dir / 'checkpoints').is_dir() else []


@pytest.mark.slow
def test_replay_on_the_host_of_two_processes(tmp_path: Path, cache: Path) -> None:
  """Each has its own, and its own share of the batches; one is killed, and both go on from where they saved."""
  run_dir = tmp_path / 'run'
  learners = Learners(run_dir, cache, *HOST, '--total-steps', '64000000')
  learners.until(lambda: len(saved(run_dir)) > 1)
  assert all(learners.end(signal.SIGKILL)), learners.output
  step = saved(run_dir)[-1]
  end = step + 1280

  learners = Learners(run_dir, cache, *HOST, '--total-steps', str(end), '--override')
  assert learners.end() == [0, 0], learners.output
  assert f'resuming at step {step:,}' in learners.output
  assert learners.parameters == [summary(run_dir)['params_sha256']] * 2
  assert [line['step'] for line in lines(run_dir)] == list(range(640, end + 1, 640))
  last = lines(run_dir)[-1]
  learned = end - 448  # from the update on that has min_size: of all samples, by both processes
  assert last['replay_samples'] == learned
  assert end - 1000 < last['replay_inserts'] <= end and last['replay_windows'] <= 2048

  one = Podrace(
    ['train', *HOST, '--total-steps', str(2 * end), '--override', '--run-dir', str(run_dir),
     '--actor-devices', '0', '--learner-devices', '0,1'], tmp_path / 'one.txt', 2, cache,
  )  # fmt: skip
  assert one.wait() == 2
  assert '2 process(es)' in one.output
  parts = [run_dir / 'replay' / str(end) / name for name in '01']
  hashes = {json.loads((p / 'record.json').read_text())['sha256'] for p in parts}
  assert len(hashes) == 2  # what they remember is not the same


# --- a replay service, and acting processes -----------------------------------------------------------


SERVED = ['--lag', 'async', '--replay', 'service', '--checkpoint-every', '640']
WITH_REPLAY = [*DQN, *SERVED]
IN_A_QUEUE = ['catch', '--architecture', 'sebulba', '--num-envs', '8', '--unroll-length', '8',
              '--agent.network.hidden', '16', '--log-every', '640', *SERVED]  # fmt: skip


class Program:
  """A replay service, an acting process, and learners in two processes."""

  def __init__(self, folder: Path, cache: Path, args: list[str]) -> None:
    self._folder, self._cache, self._args = folder, cache, args
    self._replay = ('--connect-replay', f'unix:{folder}/replay')
    self.run_dir = folder / 'run'
    self.service = self._start('replay', '--listen', self._replay[1])

  def _start(self, name: str, *args: str) -> Podrace:
    return Podrace([name, *args], self._folder / f'{name}.txt', 1, self._cache)

  def learn(self, steps: int, *args: str) -> Learners:
    listen = '--listen', f'unix:{self._folder}/params'
    return Learners(
      self.run_dir, self._cache, *self._args, *self._replay, *listen, '--total-steps', str(steps),
      *args,
    )  # fmt: skip

  def act(self) -> Podrace:
    given = [a for a in self._args if a not in SERVED and a not in ('--log-every', '640')]
    return self._start('act', *given, *self._replay, '--params', f'unix:{self._folder}/params')


@pytest.mark.slow
@pytest.mark.parametrize('args', [WITH_REPLAY, IN_A_QUEUE], ids=['replay', 'queue'])
def test_a_service_feeds_two_processes(args: list[str], tmp_path: Path, cache: Path) -> None:
  """The first of them is killed, and both go on with the same acting process and the same tables."""
  program = Program(tmp_path, cache, args)
  learners, actor = program.learn(64_000_000), program.act()
  learners.until(lambda: len(saved(program.run_dir)) > 1)
  assert all(learners.end(signal.SIGKILL, victim=0)), learners.output
  step = saved(program.run_dir)[-1]
  end = step + 1280

  learners = program.learn(end, '--override')
  assert learners.end() == [0, 0], learners.output
  assert actor.wait() == 0, actor.output
  assert f'resuming at step {step:,}' in learners.output
  assert learners.parameters == [summary(program.run_dir)['params_sha256']] * 2
  told = lines(program.run_dir)
  assert [line['step'] for line in told] == list(range(640, end + 1, 640))
  assert sum(line['episodes'] for line in told) > 0
  learned = [line for line in told if line['step'] > step][-1]
  if args is WITH_REPLAY:  # by both processes, and what they have drawn ahead
    assert 1280 <= learned['replay_samples'] <= 1280 + 2 * 8 * 6
  else:
    assert 1280 // 8 <= learned['unrolls_taken'] <= 1280 // 8 + 2 * 4 * 4
    assert learned['policy_lag_max'] >= learned['policy_lag_mean'] >= 0
  assert told[-1]['acting_processes'] == 1  # which only the first process knows


# --- environments elsewhere ---------------------------------------------------------------------------


REMOTE = ['catch', '--architecture', 'sebulba', '--env', 'gymnasium:CartPole-v1', '--envs', 'remote',
          '--num-envs', '16', '--unroll-length', '8', '--agent.network.hidden', '16', '--actor-threads', '1',
          '--log-every', '1280', '--checkpoint-every', '1280']  # fmt: skip


@pytest.mark.slow
def test_environments_elsewhere_serve_two_processes(tmp_path: Path, cache: Path) -> None:
  """One client, with half of its environments for each; one of them is killed, and it comes back to both."""
  run_dir = tmp_path / 'run'
  remote, at = [*REMOTE, '--announce', str(tmp_path / 'at')], [f'unix:{tmp_path}/{i}' for i in '01']
  listen = (('--listen', at[0]), ('--listen', at[1]))
  client = Envs(','.join(at), tmp_path / 'client', '--num-envs', '16', env='gymnasium:CartPole-v1')
  learners = Learners(run_dir, cache, *remote, '--total-steps', '64000000', each=listen)
  learners.until(lambda: len(saved(run_dir)) > 1)
  assert [json.loads((tmp_path / f'at.{i}').read_text())['envs'] for i in '01'] == at
  client.says('with 8 environments in one group', 2)
  assert all(learners.end(signal.SIGKILL)), learners.output
  step = saved(run_dir)[-1]
  end = step + 2560

  learners = Learners(run_dir, cache, *remote, '--total-steps', str(end), '--override', each=listen)
  assert learners.end() == [0, 0], learners.output
  assert client.wait() == 0, client.output
  client.says('with 8 environments in one group', 4)
  assert f'resuming at step {step:,}' in learners.output
  assert learners.parameters == [summary(run_dir)['params_sha256']] * 2
  told = lines(run_dir)
  assert [line['step'] for line in told] == list(range(1280, end + 1, 1280))
  assert told[-1]['remote_envs'] == 16 and told[-1]['remote_clients'] == 2  # of both processes


@pytest.mark.slow
def test_a_process_that_waits_for_experience_ends_in_time_after_a_signal(
  tmp_path: Path, cache: Path
) -> None:
  """Alone: the other one waits for its own, and is ended by JAX."""
  listen = tuple(('--listen', f'unix:{tmp_path}/{i}') for i in '01')
  learners = Learners(tmp_path / 'run', cache, *REMOTE, each=listen)
  learners.until(lambda: learners.output.count('no environments are connected') == 2)
  other, signalled = learners.end(signal.SIGTERM)
  assert signalled == 128 + signal.SIGTERM and other, learners.output
  assert 'within 20 s' in learners.output
