"""One run over two processes, which are started through the command line and talk over loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from children import until
from processes import DEADLINE, checkpoints, environment, lines, summary
from shorthand import Patch

from podrace.run import processes
from podrace.run.build import build
from podrace.run.checkpoint import Checkpoints
from podrace.run.directory import load_config

ARGS = ['train', 'catch', '--agent', 'ppo', '--agent.network.hidden', '16', '--num-envs', '8',
        '--unroll-length', '8', '--agent.minibatches', '2', '--agent.epochs', '2',
        '--log-every', '640']  # fmt: skip
# Sums over four devices are made in another order: a few units in the last place for each of the
# 400 gradient steps.
TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


TELLING = """
import sys
from podrace import cli
from podrace.run import loop as run

def train(*args, of=run.train, **options):
  summary = of(*args, **options)
  print('parameters', summary['params_sha256'], flush=True)  # only the first process writes it
  return summary

run.train = train
cli.main(sys.argv[1:])
"""


class Process:
  """One process of a run, through the interpreter; it tells the hash of its own parameters."""

  def __init__(self, args: list[str], devices: int, log: Path, **environ: str) -> None:
    self.log = log
    env = environment(JAX_NUM_CPU_DEVICES=str(devices), **environ)
    with log.open('w') as file:
      self.popen = subprocess.Popen(
        [sys.executable, '-c', TELLING, *args], stdout=file, stderr=file, env=env
      )

  @property
  def output(self) -> str:
    return self.log.read_text()

  @property
  def parameters(self) -> str:
    """Their hash."""
    (told,) = (x for x in self.output.splitlines() if x.startswith('parameters '))
    return told.removeprefix('parameters ')

  def wait(self, deadline: float = DEADLINE) -> int:
    try:
      return self.popen.wait(deadline)
    except subprocess.TimeoutExpired:
      self.popen.kill()
      self.popen.wait()
      raise AssertionError(f'still going after {deadline} s: {self.output}') from None


@pytest.fixture
def pair(tmp_path: Path):
  """Starts both processes of a run in `run_dir`; whatever is left of them ends with the test."""
  started: list[Process] = []

  def start(run_dir: Path, *args: str, announced: Path | None = None) -> list[Process]:
    ends = [['--coordinator', f'127.0.0.1:{free_port()}']] * 2
    if announced is not None:
      ends = [
        ['--coordinator', '127.0.0.1:0', '--announce', str(announced)],
        ['--coordinator', f'announced:{announced}#coordinator'],
      ]
    several = ['--run-dir', str(run_dir), '--num-processes', '2', '--process-id']
    both = [
      Process(
        [*ARGS, *args, *several, str(i), *ends[i]],
        devices=2,
        log=tmp_path / f'{run_dir.name}-{i}-{len(started)}.txt',
      )
      for i in range(2)
    ]
    started.extend(both)
    return both

  yield start
  for process in started:
    if process.popen.poll() is None:
      process.popen.kill()
      process.popen.wait()


def parameters(run_dir: Path) -> tuple[int, list[np.ndarray]]:
  """The newest checkpoint's, read on one device."""
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  params = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one),
    build(load_config(run_dir)).shapes.train.params,
  )
  kept = Checkpoints(run_dir / 'checkpoints', writes=False)
  step = kept.steps()[0]
  return step, [np.asarray(x) for x in jax.tree.leaves(kept.restore(step, params).params)]


def listening(pid: int) -> list[str]:
  """The addresses on which a process listens, as in /proc/net/tcp."""
  sockets = set()
  for fd in os.listdir(f'/proc/{pid}/fd'):
    try:
      sockets.add(os.readlink(f'/proc/{pid}/fd/{fd}'))
    except FileNotFoundError:
      continue
  found = []
  for table in ('tcp', 'tcp6'):
    for row in Path(f'/proc/{pid}/net/{table}').read_text().splitlines()[1:]:
      fields = row.split()
      if fields[3] == '0A' and f'socket:[{fields[9]}]' in sockets:
        found.append(fields[1].partition(':')[0])
  return found


LOOPBACK = {'0100007F', '0000000000000000FFFF00000100007F', '00000000000000000000000001000000'}


def slurm(number: int, port: int) -> dict[str, str]:
  """What srun sets in process `number` of four."""
  return dict(
    SLURM_JOB_ID='7', SLURM_STEP_NODELIST='localhost', SLURM_NTASKS='4', SLURM_PROCID=str(number),
    SLURM_LOCALID=str(number), SLURM_STEP_NUM_NODES='1', JAX_COORDINATOR_PORT=str(port),
  )  # fmt: skip


def open_mpi(number: int, port: int) -> dict[str, str]:
  """What mpirun sets likewise."""
  return dict(
    OMPI_MCA_orte_hnp_uri='28672.0;tcp://127.0.0.1:1', OMPI_COMM_WORLD_SIZE='4',
    OMPI_COMM_WORLD_RANK=str(number), OMPI_COMM_WORLD_LOCAL_RANK=str(number), JAX_COORDINATOR_PORT=str(port),
  )  # fmt: skip


@pytest.mark.parametrize(
  ('variables', 'host'), [(slurm, 'localhost'), (open_mpi, '127.0.0.1')], ids=['slurm', 'open mpi']
)
def test_a_process_finds_its_place(variables: Any, host: str, monkeypatch: Patch) -> None:
  for name, value in variables(2, 1234).items():
    monkeypatch.setenv(name, value)
  assert processes.detect_place() == (f'{host}:1234', 4, 2, (2,), '')


def test_variables_that_make_no_sense_are_refused(monkeypatch: Patch) -> None:
  for name, value in slurm(2, 1234).items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv('SLURM_NTASKS', 'four')
  with pytest.raises(ValueError, match=r'variables make no sense.*four'):
    processes.detect_place()


@pytest.mark.slow
@pytest.mark.parametrize('variables', [slurm, open_mpi], ids=['slurm', 'open mpi'])
def test_four_processes_that_a_cluster_started_are_one_run(tmp_path: Path, variables: Any) -> None:
  port, run_dir = free_port(), tmp_path / 'run'
  args = [*ARGS, '--total-steps', '1280', '--run-dir', str(run_dir), '--coordinator', 'auto']
  four = [
    Process(args, 1, tmp_path / f'{i}.txt', JAX_PLATFORMS='cpu', **variables(i, port))
    for i in range(4)
  ]
  try:
    assert [p.wait(2 * DEADLINE) for p in four] == [0] * 4, '\n'.join(p.output for p in four)
  finally:
    for process in four:
      process.popen.kill()
      process.popen.wait()
  assert {p.parameters for p in four} == {summary(run_dir)['params_sha256']}
  alone = Process(
    [*ARGS, '--total-steps', '1280', '--run-dir', str(tmp_path / 'one')], 4, tmp_path / 'one.txt'
  )
  assert alone.wait() == 0, alone.output
  for one, other in zip(parameters(run_dir)[1], parameters(tmp_path / 'one')[1], strict=True):
    np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path: Path, pair) -> None:
  """Stopped by a signal to one of them, and resumed; the same parameters as in one process."""
  run_dir = tmp_path / 'two=[1]'  # a name that orbax takes for a pattern
  length = ['--total-steps', '6400', '--devices', '4']
  both = pair(run_dir, *length)
  until(lambda: 'compiled in' in both[0].output or both[0].popen.poll() is not None)
  for process in both:
    assert process.popen.poll() is None, process.output
    addresses = listening(process.popen.pid)
    assert addresses
    assert set(addresses) <= LOOPBACK
  both[1].popen.send_signal(signal.SIGTERM)
  assert [p.wait(60) for p in both] == [143, 143], both[0].output + both[1].output
  (*_, stopped) = checkpoints(run_dir)
  assert 0 < stopped < 6400

  both = pair(run_dir, *length)
  assert [p.wait() for p in both] == [0, 0], both[0].output + both[1].output
  assert f'resuming at step {stopped:,}' in both[0].output
  assert summary(run_dir)['step'] == 6400
  assert both[0].parameters == both[1].parameters == summary(run_dir)['params_sha256']
  assert [line['step'] for line in lines(run_dir)] == list(range(640, 6401, 640))

  alone = Process([*ARGS, *length, '--run-dir', str(tmp_path / 'one')], 4, tmp_path / 'one.txt')
  assert alone.wait() == 0, alone.output
  step, params = parameters(run_dir)
  step_alone, params_alone = parameters(tmp_path / 'one')
  assert step == step_alone == 6400
  for one, other in zip(params, params_alone, strict=True):
    np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.slow
def test_two_processes_meet_where_the_first_one_announces(tmp_path: Path, pair) -> None:
  """Twice: the second process begins by what the first announced before."""
  for steps in '640', '1280':
    more = ['--total-steps', steps, '--override']
    both = pair(tmp_path / 'run', *more, announced=tmp_path / 'first')
    assert [p.wait() for p in both] == [0, 0], both[0].output + both[1].output
    assert both[0].parameters == both[1].parameters
  assert summary(tmp_path / 'run')['step'] == 1280


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_a_killed_process_does_not_leave_the_other_hanging(
  victim: int, tmp_path: Path, pair
) -> None:
  both = pair(tmp_path / 'run', '--total-steps', '64000000', '--checkpoint-every', '6400')
  until(lambda: both[0].popen.poll() is not None or saved(tmp_path / 'run'))
  both[victim].popen.kill()
  other = both[1 - victim]
  assert other.wait(3 * processes.SILENCE_SECONDS) not in (0, 2), other.output
  both = pair(tmp_path / 'run', '--total-steps', '64000000', '--checkpoint-every', '6400')
  until(lambda: 'resuming at step' in both[0].output or both[0].popen.poll() is not None)
  until(lambda: '\nstep ' in both[0].output or both[0].popen.poll() is not None)
  both[0].popen.send_signal(signal.SIGINT)
  assert [p.wait(60) for p in both] == [130, 130], both[0].output + both[1].output


def saved(run_dir: Path) -> list[int]:
  return checkpoints(run_dir) if (run_dir / 'checkpoints').is_dir() else []


@pytest.mark.slow
@pytest.mark.parametrize(
  'env', [['gymnasium:CartPole-v1', '--env-threads', '2'], ['podrace:catch']], ids=['host', 'jax']
)
def test_actors_of_two_processes_go_on_to_the_bit(
  env: list[str], tmp_path: Path, pair: Any
) -> None:
  args = ['--architecture', 'sebulba', '--env', *env, '--actor-threads', '1',
          '--agent.no-anneal-learning-rate']  # fmt: skip

  def run(name: str, steps: int) -> list[Any]:
    both = pair(tmp_path / name, *args, '--total-steps', str(steps))
    for process in both:
      assert process.wait() == 0, process.output
    return both

  whole = run('whole', 2560)
  run('cut', 1280)
  rest = run('cut', 2560)
  assert 'resuming at step 1,280' in rest[0].output
  for one, other in zip(whole, rest, strict=True):
    assert 'anew' not in other.output
    assert one.parameters == other.parameters
