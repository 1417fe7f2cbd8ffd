"""Kills of the processes of programs that `podrace launch` runs: no run may be damaged, and no process left.

    python tests/endurance/launch_kills.py [--kills 34] [--on ray] [--programs seed impala learners]

A random process of a program ends with SIGKILL, again and again, 3 to 12 s after the run goes on: of SEED RL (IMPALA on
Gymnasium's CartPole, two processes of environments), of IMPALA with a queue (Catch, two acting processes), and of two
processes that learn as one (Catch, Anakin), whose parameters must in the end be those of a run in which nothing was
killed. Time lost is from a kill until the run has come further than before. A program that is complete is followed by
another one, until all kills are made. With `--on ray` (pip install 'podrace[ray]') programs are on a cluster of four
nodes on this machine, and the actors that keep processes are killed as well.

Writes benchmarks/results/launch.json after each program; other cases keep their results.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / 'benchmarks'))

sys.path.append(str(Path(__file__).resolve().parents[1] / 'support'))

import common
from children import until

PROGRAMS = {
  'seed': (
    '--agent', 'impala', '--env', 'gymnasium:CartPole-v1', '--num-envs', '16', '--actor-threads', '1', '--as', 'seed',
    '--total-steps', '600000', '--log-every', '512', '--checkpoint-every', '10000',
  ),
  'impala': ('catch', '--as', 'impala', '--total-steps', '1500000', '--log-every', '2048', '--checkpoint-every', '50000'),
  'learners': (
    'catch', '--as', 'learners', '--architecture', 'anakin', '--total-steps', '1000000', '--log-every', '5000',
    '--checkpoint-every', '20000',
  ),
}  # fmt: skip
EXACT = ('learners',)  # on one machine only
MARK = uuid.uuid4().hex  # in the environment of every process that is started here
KEEPER = 'podrace.launch.supervisor.remote_child'
LONGEST = 120.0  # seconds for a run to go on


class LaunchedProgram:
  """A program that runs. Owner: `kill_processes`. Ends when the run is complete."""

  def __init__(self, *command: str) -> None:
    self.run_dir = Path(tempfile.mkdtemp(prefix='podrace-kills-')) / 'run'
    self.log = self.run_dir.parent / 'log.txt'
    self.process = common.start_podrace(self.log, 'launch', *command, '--run-dir', self.run_dir)

  @property
  def step(self) -> int:
    """The newest step in metrics.jsonl; 0 before there is one."""
    return (common.metrics(self.run_dir) or [{'step': 0}])[-1]['step']

  def wait_past(self, step: int) -> float:
    """Returns the seconds until the run is past that step, or has ended."""
    began = time.perf_counter()
    until(lambda: self.step > step or self.process.poll() is not None, LONGEST)
    return time.perf_counter() - began

  def nodes(self) -> dict[str, int]:
    """Returns the pids of processes that the launcher, or an actor of Ray, has started, by kind and pid."""
    pids = {}
    for pid in self.left():
      words, parent = command_of(pid), parent_of(pid)
      is_kept = KEEPER in command_of(parent)
      if (is_kept or parent == self.process.pid) and 'podrace' in words:
        kind = words[words.index('podrace') + 1]
        pids[f'{kind} {pid}'] = pid
        if is_kept:
          pids[f'{kind}-actor {pid}'] = parent_of(parent)
    return pids

  def left(self) -> list[int]:
    """Returns the pids of processes that were started here and still run, without Ray's own."""
    pids = []
    for path in Path('/proc').glob('[0-9]*/environ'):
      pid = int(path.parent.name)
      with contextlib.suppress(OSError):
        is_marked = f'PODRACE_BENCHMARK={MARK}'.encode() in path.read_bytes()
        if is_marked and not any('ray::' in x or '/ray/' in x for x in command_of(pid)):
          pids.append(pid)
    return [pid for pid in pids if pid != self.process.pid]

  def finish(self) -> dict[str, Any]:
    """Waits for the end, checks it, and returns the summary of the run."""
    code = self.process.wait()
    assert code == 0, f'ended with {code}: see {self.log}'
    assert not self.left(), f'processes are left: {self.left()}'
    return common.summary_of(self.run_dir)


def command_of(pid: int) -> list[str]:
  """Returns the command of a process; empty if there is none."""
  with contextlib.suppress(OSError):
    return Path(f'/proc/{pid}/cmdline').read_text().split('\0')
  return []


def parent_of(pid: int) -> int:
  """Returns the pid of the parent of a process; 0 if there is none."""
  with contextlib.suppress(OSError):
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
  return 0


@contextlib.contextmanager
def cluster(engine: str) -> Iterator[None]:
  """Starts the cluster of an engine: for Ray a head and three nodes with two cores each."""
  if engine != 'ray':
    yield
    return
  from ray.cluster_utils import Cluster

  memory = 200 * 2**20
  head = dict(num_cpus=0, object_store_memory=memory, include_dashboard=False)
  nodes = Cluster(initialize_head=True, head_node_args=head)
  try:
    for _ in range(3):
      nodes.add_node(num_cpus=2, object_store_memory=memory)
    nodes.wait_for_nodes()
    os.environ['RAY_ADDRESS'] = nodes.address
    yield
  finally:
    nodes.shutdown()


def kill_once(program: LaunchedProgram, rng: random.Random) -> tuple[str, float] | None:
  """Kills a process after some seconds; returns its kind and the time lost, None if the run ended before."""
  with contextlib.suppress(subprocess.TimeoutExpired):
    program.process.wait(rng.uniform(3, 12))
  nodes = sorted(program.nodes().items())
  if program.process.poll() is not None or not nodes:  # all of them are about to start
    return None
  kind, pid = rng.choice(nodes)
  step = program.step
  os.kill(pid, signal.SIGKILL)
  return kind.split()[0], program.wait_past(step)


def kill_processes(name: str, kills: int, rng: random.Random, engine: str) -> dict[str, Any]:
  """Runs programs of one arrangement until all kills are made."""
  exact = LaunchedProgram(*PROGRAMS[name]).finish()['params_sha256'] if name in EXACT else None
  lost: list[tuple[str, float]] = []
  programs = 0
  while len(lost) < kills:
    program = LaunchedProgram(*PROGRAMS[name], '--on', engine)
    program.wait_past(0)
    while program.process.poll() is None and len(lost) < kills:
      if (kill := kill_once(program, rng)) is not None:
        lost.append(kill)
        print(f'{name}: {kill[0]} killed: {kill[1]:.1f} s', flush=True)
    summary = program.finish()
    assert exact in (None, summary['params_sha256']), 'other parameters than without kills'
    programs += 1
    print(f'{name}: complete at step {summary["step"]:,}', flush=True)
  kinds = {k: [s for x, s in lost if x == k] for k in sorted({x for x, _ in lost})}
  return dict(
    program=' '.join(PROGRAMS[name]), programs=programs, lost_s=common.summary([s for _, s in lost]),
    by_kind=common.summaries(kinds), steps=summary['step'], params_sha256=exact,
  )  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--kills', type=int, default=34, help='of each program')
  parser.add_argument('--programs', nargs='*', default=list(PROGRAMS), choices=PROGRAMS)
  parser.add_argument('--on', choices=('local', 'ray'), default='local')
  args = parser.parse_args()
  rng, case = random.Random(0), 'kills' if args.on == 'local' else f'kills_{args.on}'
  os.environ['PODRACE_BENCHMARK'] = MARK
  with cluster(args.on):
    for name in args.programs:
      if args.on == 'local' or name not in EXACT:
        result = kill_processes(name, args.kills, rng, args.on) | common.origin()
        common.keep('launch', case, common.known('launch').get(case, {}) | {name: result})


if __name__ == '__main__':
  main()
