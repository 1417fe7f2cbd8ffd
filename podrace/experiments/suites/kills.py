"""Programs that are killed by SIGKILL at random while they train."""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from podrace.errors import RunError, Stopped, UnreadableFile
from podrace.experiments.suites.suite import Program
from podrace.experiments.sweep.processes import GRACE
from podrace.run.directory import last_line
from podrace.system.child import ChildProcess, python
from podrace.system.files import make_folder, open_append, write_json
from podrace.system.files.reading import read_json
from podrace.system.files.schema import COUNT, Member
from podrace.system.signals import Stop

POLL = 0.02  # seconds between looks at the program
LONGEST = 1.0  # most seconds that a kill comes after its step
FILE = 'kills.json'
STEPS = Member('a list', each=COUNT)
KILLED = 128 + signal.SIGKILL  # exit code


def kill_repeatedly(program: Program, run_dir: Path, say: Callable[[str], None]) -> list[int]:
  """Train a program in a child process that is killed `program.kills` times.

  The parts of the run at which it is killed are random, and a random delay follows. Each child is
  killed after a step that no earlier child has reached, so that each has resumed and learned. A
  program that is finished earlier is not killed again.

  Args:
    program: the program.
    run_dir: its run directory, which also keeps the kills. A second call goes on.
    say: receives a message at each kill.

  Returns:
    The step at each kill.

  Raises:
    RunError: if the child fails by itself.
  """
  rng = np.random.default_rng([program.first, program.kills])
  targets = np.sort(rng.uniform(0.02, 0.98, program.kills)) * program.steps
  delays = rng.uniform(0.0, LONGEST, program.kills)
  killed_at = _read_kills(run_dir, program.kills)
  for target, delay in list(zip(targets, delays, strict=True))[len(killed_at) :]:
    # Lines of an earlier child are still there. A kill may have cut the last one.
    target = max(target, _step(run_dir) + 1, *(step + 1 for step in killed_at[-1:]))
    code, is_ours = _train_until(program, run_dir, target, delay)
    if code == 0:
      break
    if code != KILLED or not is_ours:
      raise RunError(f'{program.name}: its child ended with {code}: see {run_dir}/output.txt')
    killed_at.append(max(_step(run_dir), math.ceil(target)))
    write_json(run_dir / FILE, killed_at)
    say(f'killed at step {killed_at[-1]:,}')
  return killed_at


def _read_kills(run_dir: Path, most: int) -> list[int]:
  """Return the steps of earlier kills, at most `most`.

  Raises:
    UnreadableFile: if the file has anything else.
  """
  kills = read_json(run_dir / FILE)
  if kills is None:
    return []
  wrong = STEPS.difference(kills)
  if wrong or len(kills) > most or any(b <= a for a, b in itertools.pairwise(kills)):
    raise UnreadableFile(
      run_dir / FILE, f'is no list of at most {most} rising steps: remove {run_dir}, or add --again'
    )
  return list(kills)


def _train_until(program: Program, run_dir: Path, target: float, delay: float) -> tuple[int, bool]:
  """Train in a child that is killed `delay` seconds after step `target`.

  Returns:
    Its exit code, and whether it was alive when it was killed.

  Raises:
    Stopped: on a signal, after the child has saved.
  """
  with Stop() as stop:
    with open_append(make_folder(run_dir) / 'output.txt') as output:
      words = python('-m', 'podrace', 'train', *program.command, '--run-dir', str(run_dir))
      child = ChildProcess(words, stdout=output, stderr=output)
    try:
      while child.poll() is None and not stop.signum and _step(run_dir) < target:
        child.wait(POLL)
      if stop.signum:
        child.stop(GRACE)
        raise Stopped(stop.signum)
      child.wait(delay)
      is_alive = child.poll() is None
    finally:
      child.signal(signal.SIGKILL)
    return child.finish(), is_alive


def _step(run_dir: Path) -> int:
  """Return the last step in a run's metrics, 0 without any."""
  try:
    step: int = last_line(run_dir / 'metrics.jsonl')[0].get('step', 0)
  except UnreadableFile:  # a line is being written
    return 0
  return step
