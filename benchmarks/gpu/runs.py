"""Items that are runs of the command line: determinism, learning curves and evaluation."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import common
import session
from session import TINY

DETERMINISTIC = '--xla_gpu_deterministic_ops=true'
WIDE = ('minatar-breakout', '--num-envs', '2048', '--unroll-length', '32', '--total-steps', '60_000_000')  # fmt: skip
PONG = (
  'ppo-pong', '--num-envs', '64', '--unroll-length', '32', '--agent.minibatches', '8', '--total-steps', '20_000_000',
  '--log-every', '50_000', '--checkpoint-every', '500_000',
)  # fmt: skip
SMOKE = {  # runs of `smoke`: XLA's flags, and the cache of programs; the second four start later
  'plain': ('', 'a'), 'anew': ('', 'b'), 'ordered': (DETERMINISTIC, 'c'), 'ordered_anew': (DETERMINISTIC, 'd'),
  'again': ('', 'a'), 'killed': ('', 'a'), 'ordered_again': (DETERMINISTIC, 'c'),
}  # fmt: skip


def podrace(*args: str, flags: str = '', cache: str = '') -> subprocess.Popen[str]:
  environ = dict(os.environ, XLA_FLAGS=flags or os.environ.get('XLA_FLAGS', ''))
  if cache:
    environ['JAX_COMPILATION_CACHE_DIR'] = cache
  command = [sys.executable, '-m', 'podrace', *args]
  return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def finish(process: subprocess.Popen[str], timeout: float, codes: tuple[int, ...] = (0,)) -> str:
  """Returns the output; raises if the process fails or takes too long."""
  try:
    out, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    out, _ = process.communicate()
    raise RuntimeError(f'took more than {timeout:.0f} s: {out[-600:]}') from None
  if process.returncode not in codes:
    raise RuntimeError(f'exit code {process.returncode}: {out[-1500:]}')
  return out


class Smoke:
  """Runs of `podrace train catch`, all at once: no time here is a measurement."""

  def __init__(self, folder: pathlib.Path) -> None:
    self.folder, self.runs = folder, {}

  def start(self, name: str) -> subprocess.Popen[str]:
    flags, cache = SMOKE[name]
    steps, every = ('100_000', '20_000') if TINY else ('2_000_000', '100_000')
    sizes = ('--total-steps', steps, '--checkpoint-every', every, '--quiet')
    run_dir = str(self.folder / name)
    return podrace('train', 'catch', *sizes, '--run-dir', run_dir, flags=flags, cache=str(self.folder / cache))  # fmt: skip

  def collect(self, processes: dict[str, subprocess.Popen[str]], timeout: float) -> None:
    """Waits for runs, and reports after each, in case that the rest takes too long."""
    for name, process in processes.items():
      try:
        finish(process, timeout)
        summary = common.summary_of(self.folder / name)
        keys = ('compile_s', 'steps_per_s', 'wall_s')
        self.runs[name] = {k: summary[k] for k in keys} | dict(
          sha256=summary['params_sha256'],
          episode_return=common.metrics(self.folder / name)[-1]['episode_return'],
        )
      except RuntimeError as e:
        self.runs[name] = dict(error=str(e)[-800:])
      session.NOTES['report'](self.verdict())

  def verdict(self) -> dict[str, Any]:
    """Returns which runs have the same parameters; None where one is missing."""
    sha = {name: x.get('sha256') for name, x in self.runs.items()}
    pairs = dict(
      same_again=('plain', 'again'), same_after_kill=('plain', 'killed'), same_compiled_anew=('plain', 'anew'),
      ordered_same_again=('ordered', 'ordered_again'), ordered_same_compiled_anew=('ordered', 'ordered_anew'),
      ordered_as_plain=('ordered', 'plain'),
    )  # fmt: skip
    same = {
      name: sha[a] == sha[b] if sha.get(a) and sha.get(b) else None for name, (a, b) in pairs.items()
    }  # fmt: skip
    return dict(same, runs=self.runs)


def smoke() -> dict[str, Any]:
  """Trains catch to its end: its return; the same parameters again, after SIGKILL, by a program compiled anew, and with
  operations that are deterministic by XLA's word."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='smoke-'))
  every, names = Smoke(folder), list(SMOKE)
  every.collect({name: every.start(name) for name in names[:4]}, 240)
  started = {name: every.start(name) for name in names[4:]}  # from kept programs
  killed, deadline = started['killed'], time.monotonic() + 60
  while killed.poll() is None and time.monotonic() < deadline:
    if len(list((folder / 'killed' / 'checkpoints').glob('[0-9]*'))) >= 2:
      killed.send_signal(signal.SIGKILL)
      break
    time.sleep(0.02)
  code = killed.wait(60)
  at = common.metrics(folder / 'killed')[-1:]
  started['killed'] = every.start('killed')
  every.collect(started, 90)
  every.runs['killed']['by'] = dict(signal=-code, at_step=at[0]['step'] if at else None)
  shutil.rmtree(folder, ignore_errors=True)
  return every.verdict()


def compile_ahead(args: tuple[str, ...], limit: float) -> dict[str, Any]:
  """Trains until the first line of metrics, for its programs only."""
  with tempfile.TemporaryDirectory(prefix='ahead-') as folder:
    run_dir, end = pathlib.Path(folder) / 'run', time.monotonic() + limit
    process = podrace('train', *args, '--quiet', '--run-dir', str(run_dir))
    while process.poll() is None and not common.metrics(run_dir) and time.monotonic() < end:
      time.sleep(0.25)
    process.send_signal(signal.SIGTERM)
    finish(process, 60, (0, 143))
  return {}


def learn(*args: str, targets: tuple[float, ...], name: str, limit: float) -> dict[str, Any]:
  """Runs `podrace train` until its end or the limit, Pong until the last target; goes on with a run of --state."""
  args = (*args, *(('--total-steps', '3_000') if TINY else ()))
  if session.NOTES['ahead']:
    return compile_ahead(args, limit)
  run_dir = pathlib.Path(os.environ['GPU_STATE']) / 'runs' / name
  process = podrace('train', *args, '--quiet', '--run-dir', str(run_dir))
  end, stopped = time.monotonic() + limit, False

  def curve() -> list[list[float]]:
    rows = [x for x in common.metrics(run_dir) if x['episodes']]
    return [[x['step'], round(x['wall_s'], 2), round(x['episode_return'], 2)] for x in rows]

  while process.poll() is None and not stopped:
    is_enough = name == 'pong' and (curve() or [[0, 0, -99]])[-1][2] >= targets[-1]
    if stopped := is_enough or time.monotonic() > end:
      process.send_signal(signal.SIGTERM)
    time.sleep(0.25)
  out = finish(process, 60, (0, 143))
  if not (every := common.metrics(run_dir)):
    raise RuntimeError(f'no line of metrics within {limit:.0f} s: {out[-1500:]}')
  path, points = run_dir / 'summary.json', curve()
  summary = common.read_json(path) if path.exists() else {}
  return dict(
    args=list(args), stopped=stopped, step=every[-1]['step'], wall_s=every[-1]['wall_s'],
    compile_s=summary.get('compile_s'), steps_per_s=summary.get('steps_per_s'),
    last_return=points[-1][2] if points else None, best_return=max((x[2] for x in points), default=None),
    reached={str(t): next((x for x in points if x[2] >= t), None) for t in targets},
    curve=points[:: max(1, len(points) // 150)],
  )  # fmt: skip


def evaluated() -> dict[str, Any]:
  """Returns the greedy return of MinAtar's run, as docs/presets.md has it."""
  run_dir = pathlib.Path(os.environ['GPU_STATE']) / 'runs' / 'minatar'
  out = finish(podrace('eval', str(run_dir), '--episodes', '100'), 100)
  return json.loads(out.splitlines()[-1])
