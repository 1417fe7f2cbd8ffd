"""Runs of several learner processes on loopback, each forked; see `processes`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from children import until
from processes import DEADLINE, Podrace, tell_parameters
from test_many_processes import free_port


class Learners:
  """`podrace train ARGS --run-dir RUN_DIR` in two processes of one device each; they tell their parameters.

  Args:
    each: further arguments of each process.
  """

  def __init__(
    self, run_dir: Path, cache: Path, *args: str, each: tuple[tuple[str, ...], ...] = ((), ())
  ) -> None:
    port, lives = free_port(), len(list(run_dir.parent.glob(f'{run_dir.name}-*-0.txt')))
    common = ['train', *args, '--run-dir', str(run_dir), '--num-processes', '2',
              '--coordinator', f'127.0.0.1:{port}']  # fmt: skip
    self.all = [
      Podrace(
        [*common, *more, '--process-id', str(i)],
        run_dir.with_name(f'{run_dir.name}-{lives}-{i}.txt'), 1, cache, tell_parameters,
      )
      for i, more in enumerate(each)
    ]  # fmt: skip

  @property
  def output(self) -> str:
    return '\n'.join(p.output for p in self.all)

  @property
  def parameters(self) -> list[str]:
    """The hash of each process's."""
    return re.findall('^parameters ([0-9a-f]{64})$', self.output, re.M)

  def end(self, signum: int = 0, victim: int = 1) -> list[int]:
    """The exit codes of all, after a signal to one of them."""
    if signum:
      self.all[victim].signal(signum)
    return [p.wait() for p in self.all]

  def until(self, condition: Any) -> None:
    """Waits for a condition; fails if a process ends without."""
    until(lambda: condition() or not all(p.process.is_alive() for p in self.all), DEADLINE)
    assert condition(), self.output
