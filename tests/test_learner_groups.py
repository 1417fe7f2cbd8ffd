"""Learners of several processes whose experience is on the host: in replay there, in a service, elsewhere."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from groups import Learners
from processes import Podrace, as_users_have_it, cache, checkpoints, lines, podrace, summary

DQN = ['catch', '--architecture', 'sebulba', '--agent', 'dqn', '--num-envs', '8', '--unroll-length', '8',
       '--agent.network.hidden', '16', '--agent.buffer.min-size', '500', '--agent.buffer.batch-size', '16',
       '--agent.buffer.samples-per-insert', '1', '--agent.buffer.capacity', '2048',
       '--agent.buffer.priority-exponent', '0.5', '--log-every', '640']  # fmt: skip
HOST = [*DQN, '--replay', 'host', '--actor-threads', '1', '--checkpoint-every', '640']


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
  parts = [run_dir / 'replay' / str(end) / name for name in '01']
  hashes = {json.loads((p / 'record.json').read_text())['sha256'] for p in parts}
  assert len(hashes) == 2  # what they remember is not the same
