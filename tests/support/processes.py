"""`podrace` in processes of its own, watched, signalled and killed by tests.

The processes are forked from one that has imported everything and computed nothing (multiprocessing's
forkserver), which saves each the seconds of importing; they share no state of jax. `command` starts
one the ordinary way, through the interpreter.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from children import STARTED, until

from podrace.run.checkpoint import Checkpoints

DEADLINE = 600.0  # seconds; ends a hang, and decides nothing
CONTEXT = multiprocessing.get_context('forkserver')
CONTEXT.set_forkserver_preload(
  ['podrace.cli', 'podrace.run.loop', 'podrace.run.evaluate', 'podrace.agents.ppo', 'podrace.agents.impala',
   'podrace.envs.own', 'tyro']
)  # fmt: skip


def _child(
  args: Sequence[str],
  log: str,
  devices: int,
  cache: str | None,
  before: Callable[[], None] | None = None,
) -> None:
  file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  os.dup2(file, 1)
  os.dup2(file, 2)
  jax.config.update('jax_num_cpu_devices', devices)
  if cache is None:
    jax.config.update('jax_enable_compilation_cache', False)
  from podrace import cli

  if before is not None:
    before()
  cli.main(args)


def hang(pool: type, at: int) -> None:
  """Has each pool of that class hang in C when it is asked for its `at`-th answer, for ever."""
  from podrace.architectures.sebulba import actors

  recv, calls = pool.recv, collections.Counter()

  def hung(self: Any) -> Any:
    calls[self] += 1
    if calls[self] == at:
      ctypes.CDLL(None).sleep(100_000)
    return recv(self)

  pool.recv = hung
  actors.CLOSE_SECONDS = 0.2


def tell_parameters() -> None:
  """Has a run's process tell the hash of its own parameters: only the first writes a summary."""
  from podrace.run import loop as run

  train = run.train

  def told(*args: Any, **options: Any) -> dict[str, Any]:
    found = train(*args, **options)
    print('parameters', found['params_sha256'], flush=True)
    return found

  run.train = told


class Podrace:
  """One `podrace ARGS`, forked; its output is in a file. `before` is what the process does first."""

  def __init__(
    self,
    args: Sequence[str],
    log: Path,
    devices: int = 1,
    cache: Path | None = None,
    before: Callable[[], None] | None = None,
  ) -> None:
    self.log = log
    log.write_text('')
    self.process = CONTEXT.Process(
      target=_child,
      args=(list(args), str(log), devices, str(cache) if cache else None, before),
      daemon=True,
    )
    self.process.start()
    STARTED.append(self)

  @property
  def output(self) -> str:
    return self.log.read_text()

  def says(self, text: str) -> None:
    """Returns when the output has `text`; fails if the process ends without."""
    until(lambda: text in self.output or not self.process.is_alive(), DEADLINE)
    assert text in self.output, self.output

  def kill(self) -> None:
    """SIGKILL, and wait."""
    self.process.kill()
    self.wait()

  def signal(self, signum: int) -> None:
    if self.process.is_alive():
      os.kill(self.process.pid, signum)

  def wait(self, deadline: float = DEADLINE) -> int:
    """The exit code, as a shell would have it."""
    self.process.join(deadline)
    code = self.process.exitcode
    if code is None:
      self.process.kill()
      raise AssertionError(f'still going after {deadline} s: {self.output}')
    return code if code >= 0 else 128 - code


def podrace(
  args: Sequence[str], log: Path, devices: int = 1, cache: Path | None = None
) -> tuple[int, str]:
  """Runs it to its end: exit code and output."""
  one = Podrace(args, log, devices, cache)
  return one.wait(), one.output


def environment(**changes: str) -> dict[str, str]:
  """The environment for a process of its own: one CPU device, whatever the tests have."""
  plain = {k: v for k, v in os.environ.items() if k != 'JAX_NUM_CPU_DEVICES'}
  return {**plain, 'JAX_PLATFORMS': 'cpu', **changes}


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
  """`podrace ARGS` through the interpreter."""
  return subprocess.run(
    [sys.executable, '-m', 'podrace.cli', *args],
    capture_output=True,
    text=True,
    timeout=DEADLINE,
    env=environment(**env),
    check=False,
  )


# --- what a run leaves ------------------------------------------------------------------------


def summary(run_dir: Path) -> dict[str, Any]:
  return json.loads((run_dir / 'summary.json').read_text())


def lines(run_dir: Path) -> list[dict[str, Any]]:
  """What metrics.jsonl has; its last line may be half written as long as the run goes on."""
  told = (run_dir / 'metrics.jsonl').read_text().splitlines(keepends=True)
  return [json.loads(line) for line in told if line.endswith('\n')]


STRICT = {'jax_debug_key_reuse': False, 'jax_numpy_rank_promotion': 'allow'}
CLOCKED = ('wall_s', 'steps_per_s', 'labels_per_s')


def timeless(run_dir: Path) -> list[dict[str, Any]]:
  """The lines of metrics.jsonl without what depends on the clock.

  Under Sebulba a line has the infos that the workers have added when it is written.
  """
  written = lines(run_dir)
  live = ('actor_', 'info_') if any('actor_env' in line for line in written) else ('actor_',)
  return [
    {k: v for k, v in line.items() if k not in CLOCKED and not k.startswith(live)}
    for line in written
  ]


def assert_same_run(one: Path, other: Path) -> None:
  """Both ended with the same parameters, having told the same; and with the same rule, if they trained one."""
  assert summary(one)['params_sha256'] == summary(other)['params_sha256']
  rules = [{p.name: p.read_bytes() for p in run.glob('rule.npz')} for run in (one, other)]
  assert rules[0] == rules[1]
  assert timeless(one) == timeless(other)
  steps = [line['step'] for line in lines(one)]
  assert steps == sorted(set(steps))


def checkpoints(run_dir: Path) -> list[int]:
  """The steps of the checkpoints, oldest first."""
  return sorted(int(p.name) for p in (run_dir / 'checkpoints').iterdir() if p.name.isdigit())


def every_file(directory: Path) -> Iterator[Path]:
  yield from sorted(p for p in directory.rglob('*') if p.is_file())


@pytest.fixture(scope='session')
def cache() -> Path:
  """Where tests keep compiled programs (see conftest), for modules that import this."""
  return Path(os.environ['JAX_COMPILATION_CACHE_DIR'])


@pytest.fixture(scope='module', autouse=True)
def as_users_have_it() -> Iterator[None]:
  """Runs in this process without the strict modes of conftest; for modules that import this."""
  strict = {name: getattr(jax.config, name) for name in STRICT}
  for name, value in STRICT.items():
    jax.config.update(name, value)
  yield
  for name, value in strict.items():
    jax.config.update(name, value)


class StopAt:
  """A sink that signals its own process at a step, once."""

  def __init__(self, step: int, signum: int = signal.SIGTERM) -> None:
    self.step, self.signum = step, signum

  def __call__(self, run_dir: Path) -> StopAt:
    return self

  def write(self, line: dict[str, Any]) -> None:
    if line['step'] == self.step:
      signal.raise_signal(self.signum)

  def close(self) -> None: ...


def fingerprints(run_dir: Path, step: int) -> Any:
  """Of what the checkpoint of a step holds."""
  return Checkpoints(run_dir / 'checkpoints', writes=False).meta(step)['fingerprints']


def as_saved(state: Any) -> tuple[Any, Any]:
  """The two items of a checkpoint: the parameters, and the state without them."""
  return state.train.params, state._replace(train=state.train._replace(params=()))


def signed(meta: dict[str, Any]) -> dict[str, Any]:
  """The meta of a checkpoint with the hash that belongs to it."""
  rest = {k: v for k, v in meta.items() if k != 'sha256'}
  digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
  return {**rest, 'sha256': digest}
