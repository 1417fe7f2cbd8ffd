"""`podrace launch --on slurm` on SLURM itself: one controller and three `slurmd` on this machine.

    apt-get install slurmctld slurmd slurm-client      # or unpack the packages into DIRECTORY
    python tests/endurance/slurm.py [--root DIRECTORY]

Cases, with IMPALA on Catch in four processes (learner, queue, two acting ones):

    complete      a short run: the job ends with 0
    killed        SIGKILL of the learner: another step resumes
    time          three minutes, of which SLURM says 90 s before that they are nearly up: the job saves, is queued
                  again, and resumes
    ended         `scancel --batch --signal=TERM`: the learner saves, the job is not queued again
    supervisor    SIGKILL of the job's first process

After each no process of the run may be left. Writes benchmarks/results/slurm.json. Needs root, or a user that may run
`slurmd`; nothing is installed, and nothing listens but on loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / 'benchmarks'))

sys.path.append(str(Path(__file__).resolve().parents[1] / 'support'))

import common
from children import until

NODES = ('n0', 'n1', 'n2')
CONFIGURATION = """
ClusterName=podrace
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
PluginDir={plugins}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=10
NodeName=n[0-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17001-17003] CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP
"""
WAITED = 400.0  # seconds for anything, at most
RUN = ('catch', '--as', 'impala', '--on', 'slurm', '--checkpoint-every', '50000')


def seconds_until(condition: Callable[[], Any]) -> float:
  """Seconds until it is true."""
  began = time.monotonic()
  until(condition, WAITED)
  return time.monotonic() - began


@contextlib.contextmanager
def cluster(root: Path) -> Iterator[None]:
  """A controller and three nodes, and the commands of SLURM on PATH."""
  plugins = next(root.glob('usr/lib/*/slurm-wlm'))
  directory = Path(tempfile.mkdtemp(prefix='podrace-slurm-'))
  for name in ('state', 'spool'):
    (directory / name).mkdir()
  file = directory / 'slurm.conf'
  user = subprocess.check_output(('id', '-un'), text=True).strip()
  file.write_text(
    CONFIGURATION.format(host=socket.gethostname(), user=user, plugins=plugins, directory=directory)
  )
  os.environ |= {
    'SLURM_CONF': str(file), 'PYTHONPATH': common.PATH,
    'PATH': f'{root / "usr/bin"}:{os.environ["PATH"]}', 'LD_LIBRARY_PATH': f'{plugins.parent}:{plugins}',
  }  # fmt: skip
  bin = root / 'usr' / 'sbin'
  commands = [(f'{bin}/slurmctld-wlm', '-D', '-f', str(file))]
  stepd = ('-d', f'{bin}/slurmstepd-wlm')
  commands += [(f'{bin}/slurmd-wlm', '-D', '-N', x, '-f', str(file), *stepd) for x in NODES]
  with (directory / 'log').open('wb') as log:
    daemons = [subprocess.Popen(x, stdout=log, stderr=log) for x in commands]
  try:
    until(lambda: output('sinfo', '-h', '-o', '%D %t') == '3 idle', WAITED)
    yield
  finally:
    for daemon in reversed(daemons):
      daemon.terminate()
      daemon.wait(60)


def output(*command: str) -> str:
  return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


class Job:
  """A run that is submitted."""

  def __init__(self, *more: str) -> None:
    self.run_dir = Path(tempfile.mkdtemp(prefix='podrace-bench-')) / 'run'
    words = (sys.executable, '-m', 'podrace', 'launch', *RUN, '--run-dir', str(self.run_dir))
    said = subprocess.check_output((*words, *more), text=True, cwd=common.ROOT)
    self.number = re.match(r'job (\d+)', said)[1]  # type: ignore[index]

  @property
  def said(self) -> str:
    path = self.run_dir / 'logs' / f'slurm-{self.number}.txt'
    return path.read_text() if path.exists() else ''

  def says(self, text: str, times: int = 1) -> float:
    """Seconds until it has said that so often."""
    return seconds_until(lambda: self.said.count(text) >= times)

  def state(self, name: str = 'JobState') -> str:
    found = re.search(rf'\b{name}=(\S+)', output('scontrol', 'show', 'job', self.number))
    return found[1] if found else ''

  def ends(self) -> str:
    """Its state and exit code, after which no process of it is left."""
    running = ('PENDING', 'CONFIGURING', 'RUNNING', 'COMPLETING')
    until(lambda: self.state() not in running, WAITED)
    until(lambda: not self.pids(str(self.run_dir)), WAITED)
    return f'{self.state()} {self.state("ExitCode")}'

  def pids(self, *words: str) -> list[int]:
    """Of processes with all of these in their command, those of SLURM left out."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
      with contextlib.suppress(OSError):
        text = path.read_text().split('\0')
        own = Path(text[0]).name not in ('srun', 'sh') and int(path.parent.name) != os.getpid()
        if own and all(any(w in x for x in text) for w in (*words, str(self.run_dir))):
          found.append(int(path.parent.name))
    return found


def complete() -> dict[str, Any]:
  job = Job('--total-steps', '20000')
  ended = job.ends()
  step = json.loads((job.run_dir / 'summary.json').read_text())['step']
  return dict(ended=ended, step=step)


def killed() -> dict[str, Any]:
  job = Job('--total-steps', '400000')
  saved = job.run_dir / 'checkpoints'
  until(lambda: any(p.name.isdigit() for p in saved.glob('*')), WAITED)
  (pid,) = job.pids('train')
  os.kill(pid, signal.SIGKILL)
  lost = job.says('learner | resuming at step')
  return dict(seconds_to_resume=lost, ended=job.ends())


def time_is_up() -> dict[str, Any]:
  job = Job('--total-steps', '100000000', '--sbatch', 'time=3')
  job.says('stopped by SIGINT')
  job.says('learner | resuming at step')
  found = dict(
    restarts=job.state('Restarts'), resumed=re.findall(r'resuming at step (\S+)', job.said)
  )
  subprocess.check_call(('scancel', job.number))
  return {**found, 'ended': job.ends()}


def ended() -> dict[str, Any]:
  job = Job('--total-steps', '100000000')
  job.says('learner | step ', 2)
  subprocess.check_call(('scancel', '--batch', '--signal=TERM', job.number))
  job.says('stopped by SIGINT')
  return dict(ended=job.ends(), restarts=job.state('Restarts'))


def supervisor() -> dict[str, Any]:
  job = Job('--total-steps', '100000000')
  job.says('learner | step ', 2)
  (pid,) = job.pids('podrace.launch.engines.slurm')
  os.kill(pid, signal.SIGKILL)
  return dict(ended=job.ends())


CASES = dict(
  complete=complete, killed=killed, ended=ended, supervisor=supervisor, time=time_is_up
)  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--root', type=Path, default=Path('/'), help='where the packages are')
  args = parser.parse_args()
  with cluster(args.root.absolute()):
    results: dict[str, Any] = dict(version=output('sinfo', '--version'))
    for name, case in CASES.items():
      results[name] = case()
      print(name, results[name], flush=True)
  common.record('slurm', results)


if __name__ == '__main__':
  main()
