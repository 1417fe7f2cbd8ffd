"""Programs on SLURM: one job, whose first process supervises the program and starts each replica as a step (`srun`).

Supervision is that of one machine (podrace.launch.supervisor.local); SLURM says where a step runs. All machines see the
program's directory: keys and announced addresses are there, for this user alone. The job saves and is queued again
before its time is up.

    python -m podrace.launch.engines.slurm DIRECTORY SHA256    # the job; of the program that was submitted
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
import tempfile
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
from podrace.launch.supervisor.local import Supervisor, lock_logs
from podrace.launch.supervisor.replica import LocalStarter, ReplicaProcess, expand_podrace
from podrace.system.child import python
from podrace.system.files import UTF8, move, remove, write_whole
from podrace.system.options import Option, Options
from podrace.system.output import print_text

OPTIONS = (
  Option('--sbatch', 'OPTION', "of --on slurm: one of sbatch's own without its --, as time=8:00:00; may be repeated"),
  CPUS,
  GPUS,
  LEARNERS_INSECURE,
)  # fmt: skip
LEFT = 90  # seconds before the end of its time, at which the job begins to save
SECONDS = 60.0  # for sbatch and scontrol


def launch(make: Make, options: Options) -> int:
  """Submits the job, or shows it.

  Raises:
    UsageError: for options that can't be, or where there is no sbatch.
  """
  directory = Path(options.needed('--run-dir')).absolute()
  program = with_resources(make(directory), options)
  text = job(program, directory, options.every('--sbatch'))
  steps = dict(commands(program, directory))
  if '--dry-run' in options:
    print_text(text, *(f'# {name}\n{line}' for name, line in steps.items()), sep='\n')
    return 0
  sbatch = tool('sbatch', 'see what it would be given with --dry-run')
  with lock_logs(directory / 'logs'):
    prepare(program, directory)
    write_whole(directory / 'job.sbatch', text)
  return submit(sbatch, directory)


def job(program: Program, directory: Path, more: list[str]) -> str:
  """The script for sbatch: what the job needs, and the program's supervisor.

  Args:
    more: options of sbatch without their --, which come last and so hold against ours.
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
      f'{str(directory)!r}: sbatch takes no path with a backslash or a control character; use another --run-dir'
    )
  words = ('-m', 'podrace.launch.engines.slurm', str(directory), sha256(recorded(program)))
  supervisor = shlex.join(python(*words))
  lines = ['#!/bin/sh', *(f'#SBATCH {x}' for x in options), '', f'exec {supervisor}', '']
  return '\n'.join(lines)


def cores(node: Node) -> int:
  """Of each replica, as SLURM counts them."""
  return max(1, math.ceil(node.cpus))


def step(node: Node) -> tuple[str, ...]:
  """The words before a replica's command, which make it a step of the job that has its own cores."""
  gpus = f'--gpus-per-task={node.gpus}' if node.gpus else '--gres=none'
  return (
    'srun', '--disable-status', f'--job-name={node.name}', '--nodes=1', '--ntasks=1', f'--cpus-per-task={cores(node)}', gpus,
    '--exact', '--mem=0',
  )  # fmt: skip


class Step:
  """A step of the job, by its srun; a ReplicaProcess.

  srun does not pass SIGTERM on: it kills the step. With --disable-status it passes SIGINT on. Where srun itself is
  killed, a process that it has started kills the step, so that one is left alone.
  """

  def __init__(self, srun: ReplicaProcess) -> None:
    self._srun = srun
    self.pid, self.stdout, self.poll, self.wait = srun.pid, srun.stdout, srun.poll, srun.wait

  def signal(self, signum: int) -> None:
    if self.pid is not None and self.poll() is None:
      os.kill(self.pid, signal.SIGINT if signum == signal.SIGTERM else signum)


def start(node: Node, number: int, words: tuple[str, ...]) -> Step:
  """Starts a replica as a step; see `LocalStarter`."""
  return Step(LocalStarter()(node, number, (*step(node), *expand_podrace(words))))


def places(program: Program, directory: Path) -> Announcements:
  """Where the processes of a job find each other."""
  return Announcements(program, directory / 'announced', directory / 'keys', directory)


def commands(program: Program, directory: Path) -> Iterator[tuple[str, str]]:
  """(name, a line for a shell) of each step."""
  where = places(program, directory)
  for node in program.order():
    for i, name in enumerate(node.names):
      words = expand_podrace(where.command(node, i, where.known()))
      yield name, shlex.join((*step(node), *words))


def recorded(program: Program) -> str:
  """Return the text of program.json."""
  return programs.to_json(program) + '\n'


def sha256(text: str) -> str:
  """Return the hash by which a job knows the program that was submitted."""
  return hashlib.sha256(text.encode()).hexdigest()


def prepare(program: Program, directory: Path) -> None:
  """Write what the job reads: the program, and new keys.

  Keys that are there already may be known to the user who made the directory.

  Raises:
    UsageError: if keys that are there cannot be removed.
  """
  write_whole(directory / 'program.json', recorded(program))
  kept = directory / 'keys'
  with tempfile.TemporaryDirectory(prefix='keys-', dir=directory) as draft:
    make_keys(Path(draft) / 'keys')
    remove(kept)
    try:
      move(Path(draft) / 'keys', kept)
    except FileExistsError:
      raise UsageError(f'{kept} cannot be removed: each job gets new keys') from None


def submit(sbatch: str, directory: Path) -> int:
  """Hands the script to SLURM, and says what to type next."""
  try:
    done = subprocess.run(
      (sbatch, '--parsable', str(directory / 'job.sbatch')),
      stdout=subprocess.PIPE, encoding=UTF8, errors='replace', timeout=SECONDS, check=False,
    )  # fmt: skip
  except subprocess.TimeoutExpired:
    print_text(f'podrace launch: sbatch has not ended in {SECONDS:.0f} s', file=sys.stderr)
    return 1
  if done.returncode:
    return 1  # it has said why
  number = done.stdout.strip().partition(';')[0]
  print_text(f'job {number}: {directory / "job.sbatch"}')
  print_text(f'tail -F {directory}/logs/slurm-{number}.txt   # what it says')
  print_text(f'squeue --job {number}   # how it is')
  print_text(f'scancel --batch --signal=TERM {number}   # save and end')
  return 0


# --- in the job -------------------------------------------------------------------------------------


def main(directory: Path, submitted: str = '') -> int:
  """Supervises the program to its end; the exit code, as of `Supervisor.run`.

  Raises:
    UsageError: if program.json is not the one of the hash `submitted`: its commands may be somebody else's.
  """
  from podrace.launch.supervisor.screen import Screen

  text = (directory / 'program.json').read_text(encoding=UTF8)
  if sha256(text) != submitted:
    raise UsageError(
      f'{directory / "program.json"} is not the program of this job: its sha256 is {sha256(text)}, expected '
      f'{submitted or "one"}; submit it anew by podrace launch --on slurm'
    )
  program = programs.from_json(text)
  with time_is_up() as up, Screen([x for n in program.nodes for x in n.names]) as screen:
    code = Supervisor(
      program, directory, screen.say, screen.look, start,
      lambda private: places(program, directory).open(),
    ).run()  # fmt: skip
  if up and code == 128 + signal.SIGTERM:  # else it has ended by itself
    call('scontrol', 'requeue', os.environ['SLURM_JOB_ID'], timeout=SECONDS)
  return code


@contextlib.contextmanager
def time_is_up() -> Iterator[list[int]]:
  """Has SLURM's warning end the program as SIGTERM does; the list has it then."""
  warned: list[int] = []

  def heed(signum: int, frame: object) -> None:
    if not warned:
      os.kill(os.getpid(), signal.SIGTERM)
    warned.append(signum)

  before = signal.signal(signal.SIGUSR1, heed)
  try:
    yield warned
  finally:
    signal.signal(signal.SIGUSR1, before)


if __name__ == '__main__':
  try:
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
  except UsageError as e:
    print_text(f'podrace launch: {e}', file=sys.stderr)
    sys.exit(2)
