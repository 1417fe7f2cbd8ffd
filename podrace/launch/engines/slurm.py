"""Programs on SLURM: a job that supervises the program and starts replicas as steps (`srun`).

The supervisor is the one for a single machine (podrace.launch.supervisor.local), and SLURM places
the steps. All machines see the program's directory, with keys and announced addresses for this user
alone. Before its time is up, the job saves and is queued again.

    python -m podrace.launch.engines.slurm DIRECTORY SHA256    # the job; SHA256 of program.json
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from podrace.errors import UsageError
from podrace.launch import program as programs
from podrace.launch.engines.manifests import (
  CPUS,
  GPUS,
  LEARNERS_INSECURE,
  Make,
  call,
  make_keys,
  tool,
  with_resources,
)
from podrace.launch.program import Node, Program
from podrace.launch.supervisor.addresses import Announcements
from podrace.launch.supervisor.local import lock_logs, supervise
from podrace.launch.supervisor.replica import LocalStarter, ReplicaProcess, expand_podrace
from podrace.system.child import python
from podrace.system.files import UTF8, move, remove, write_whole
from podrace.system.options import Option, Options
from podrace.system.output import print_text
from podrace.system.process import scratch_directory

OPTIONS = (
  Option('--sbatch', 'OPTION', "option of sbatch without its --, as time=8:00:00, for slurm;"
    ' may be repeated'),
  CPUS,
  GPUS,
  LEARNERS_INSECURE,
)  # fmt: skip
LEFT = 90  # seconds before the end of its time at which the job begins to save
SECONDS = 60.0  # deadline of sbatch and scontrol


def launch(make: Make, options: Options) -> int:
  """Submit the job, or print it with --dry-run; returns the exit code.

  Raises:
    UsageError: for impossible options, or without sbatch.
  """
  directory = Path(options.needed('--run-dir')).absolute()
  program = with_resources(make(directory), options)
  text = job(program, directory, options.every('--sbatch'))
  steps = dict(commands(program, directory))
  if '--dry-run' in options:
    print_text(text, *(f'# {name}\n{line}' for name, line in steps.items()), sep='\n')
    return 0
  sbatch = tool('sbatch', 'see its script with --dry-run')
  with lock_logs(directory / 'logs'):
    prepare(program, directory)
    write_whole(directory / 'job.sbatch', text)
  return submit(sbatch, directory)


def job(program: Program, directory: Path, more: list[str]) -> str:
  """Return the script for sbatch, which runs the program's supervisor.

  Args:
    program: the program.
    directory: its directory.
    more: options of sbatch without their --. They come last, so they override the ones made here.
  """
  gpus = sum(n.gpus * n.replicas for n in program.nodes)
  own = [
    f'--job-name=podrace-{directory.name}',
    f'--ntasks={sum(n.replicas for n in program.nodes)}',
    f'--cpus-per-task={max(map(cores, program.nodes))}',
    *([f'--gpus={gpus}'] if gpus else []),
    f'--output={str(directory).replace("%", "%%")}/logs/slurm-%j.txt',
    '--open-mode=append',
    '--requeue',
    f'--signal=B:USR1@{LEFT}',
  ]
  options = [*map(shlex.quote, own), *(f'--{x}' for x in more)]
  if wrong := [x for x in more if x.startswith('-') or not x.isprintable()]:
    raise UsageError(f'--sbatch takes an option of sbatch, as time=8:00:00, not {wrong[0]!r}')
  if not str(directory).isprintable() or '\\' in str(directory):  # a backslash stops %j
    raise UsageError(
      f'{str(directory)!r}: sbatch takes no path with a backslash or a control character; use '
      'another --run-dir'
    )
  words = ('-m', 'podrace.launch.engines.slurm', str(directory), sha256(to_record(program)))
  supervisor = shlex.join(python(*words))
  lines = ['#!/bin/sh', *(f'#SBATCH {x}' for x in options), '', f'exec {supervisor}', '']
  return '\n'.join(lines)


def cores(node: Node) -> int:
  """Return the cores of each replica, as SLURM counts them."""
  return max(1, math.ceil(node.cpus))


def step(node: Node) -> tuple[str, ...]:
  """Return the words before a replica's command that make it a step with its own cores."""
  gpus = f'--gpus-per-task={node.gpus}' if node.gpus else '--gres=none'
  return (
    'srun', '--disable-status', f'--job-name={node.name}', '--nodes=1', '--ntasks=1',
    f'--cpus-per-task={cores(node)}', gpus,
    '--exact', '--mem=0',
  )  # fmt: skip


class Step:
  """The `srun` process of a step; a ReplicaProcess.

  srun does not pass SIGTERM on but kills the step. With --disable-status it passes SIGINT on. If
  srun itself is killed, a process that it has started kills the step. So signals go to srun alone,
  and not to its session.
  """

  def __init__(self, srun: ReplicaProcess) -> None:
    self.pid, self.stdout, self.poll, self.wait = srun.pid, srun.stdout, srun.poll, srun.wait

  def signal(self, signum: int) -> None:
    """Send a signal to the step, SIGINT in place of SIGTERM."""
    if self.pid is not None and self.poll() is None:
      os.kill(self.pid, signal.SIGINT if signum == signal.SIGTERM else signum)


def start(node: Node, number: int, words: tuple[str, ...]) -> Step:
  """Start a replica as a step; raises as `LocalStarter`."""
  return Step(LocalStarter()(node, number, (*step(node), *expand_podrace(words))))


def places(program: Program, directory: Path) -> Announcements:
  """Return the addresses of a job's processes."""
  return Announcements(program, directory / 'announced', directory / 'keys', directory)


def commands(program: Program, directory: Path) -> Iterator[tuple[str, str]]:
  """Yield the name of each step and its command for a shell."""
  where = places(program, directory)
  for node in program.order():
    for i, name in enumerate(node.names):
      words = expand_podrace(where.command(node, i, where.known()))
      yield name, shlex.join((*step(node), *words))


def to_record(program: Program) -> str:
  """Return the text of program.json."""
  return programs.to_json(program) + '\n'


def sha256(text: str) -> str:
  """Return the hash by which a job knows the program that was submitted."""
  return hashlib.sha256(text.encode()).hexdigest()


def prepare(program: Program, directory: Path) -> None:
  """Write the files of the job: the program, and new keys.

  Keys that exist already may be known to the user that made the directory.

  Raises:
    UsageError: if old keys cannot be removed.
  """
  write_whole(directory / 'program.json', to_record(program))
  target = directory / 'keys'
  with scratch_directory('keys-', directory) as draft:
    make_keys(draft / 'keys')
    remove(target)
    try:
      move(draft / 'keys', target)
    except FileExistsError:
      raise UsageError(f'{target} cannot be removed: each job gets new keys') from None


def submit(sbatch: str, directory: Path) -> int:
  """Submit the script, and print commands for the next steps; returns the exit code."""
  try:
    done = subprocess.run(
      (sbatch, '--parsable', str(directory / 'job.sbatch')),
      stdout=subprocess.PIPE, encoding=UTF8, errors='replace', timeout=SECONDS, check=False,
    )  # fmt: skip
  except subprocess.TimeoutExpired:
    print_text(f'podrace launch: sbatch has not ended in {SECONDS:.0f} s', file=sys.stderr)
    return 1
  if done.returncode:
    return 1  # sbatch has printed the reason
  number = done.stdout.strip().partition(';')[0]
  print_text(f'job {number}: {directory / "job.sbatch"}')
  print_text(f'tail -F {directory}/logs/slurm-{number}.txt   # its output')
  print_text(f'squeue --job {number}   # its state')
  print_text(f'scancel --batch --signal=TERM {number}   # save and end')
  return 0


# --- in the job ----------------------------------------------------------------------------------


def main(directory: Path, submitted: str = '') -> int:
  """Supervise the program to its end; returns the exit code, as `Supervisor.run`.

  Raises:
    UsageError: if the hash of program.json is not `submitted`, as another user may have replaced
      it.
  """
  text = (directory / 'program.json').read_text(encoding=UTF8)
  if sha256(text) != submitted:
    raise UsageError(
      f'{directory / "program.json"} is not the program of this job: its sha256 is {sha256(text)}, '
      f'expected {submitted or "one"}; submit it anew by podrace launch --on slurm'
    )
  program = programs.from_json(text)
  with end_on_warning() as warnings:
    code = supervise(program, directory, start, lambda _: places(program, directory).open())
  if warnings and code == 128 + signal.SIGTERM:  # else the program has ended by itself
    call('scontrol', 'requeue', os.environ['SLURM_JOB_ID'], timeout=SECONDS)
  return code


@contextlib.contextmanager
def end_on_warning() -> Iterator[list[int]]:
  """End the program at SLURM's warning as at SIGTERM.

  Yields a list to which the warning is added.
  """
  warnings: list[int] = []

  def handle(signum: int, frame: object) -> None:
    if not warnings:
      os.kill(os.getpid(), signal.SIGTERM)
    warnings.append(signum)

  before = signal.signal(signal.SIGUSR1, handle)
  try:
    yield warnings
  finally:
    signal.signal(signal.SIGUSR1, before)


if __name__ == '__main__':
  try:
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
  except UsageError as e:
    print_text(f'podrace launch: {e}', file=sys.stderr)
    sys.exit(2)
