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

import session
from session import TINY

DETERMINISTIC = '--xla_gpu_deterministic_ops=true'


def podrace(*args: str, flags: str = '', cache: str = '', **more: Any) -> subprocess.Popen[str]:
  environ = dict(os.environ, XLA_FLAGS=flags or os.environ.get('XLA_FLAGS', ''))
  if cache:
    environ['JAX_COMPILATION_CACHE_DIR'] = cache
  return subprocess.Popen(
    [sys.executable, '-m', 'podrace', *args], env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more
  )  # fmt: skip


def lines(run_dir: pathlib.Path) -> list[dict[str, Any]]:
  path = run_dir / 'metrics.jsonl'
  told = path.read_text().splitlines(keepends=True) if path.exists() else []
  return [json.loads(x) for x in told if x.endswith('\n')]


def ended(process: subprocess.Popen[str], timeout: float) -> str:
  """Its last words; raises if it failed or takes too long."""
  try:
    out, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    process.kill()
    out, _ = process.communicate()
    raise RuntimeError(f'took more than {timeout:.0f} s: {out[-600:]}') from None
  if process.returncode:
    raise RuntimeError(f'exit code {process.returncode}: {out[-1500:]}')
  return out


def smoke() -> dict[str, Any]:
  """`podrace train catch` to its end: its return; the same parameters again, after SIGKILL, by a program compiled anew,
  and with operations that are deterministic by XLA's word. All at once: no time here is a measurement."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='smoke-'))
  steps, every = (100_000, '20_000') if TINY else (2_000_000, '100_000')
  base = [
    'train',
    'catch',
    '--total-steps',
    str(steps),
    '--checkpoint-every',
    every,
    '--quiet',
    '--run-dir',
  ]

  def start(name: str, flags: str, cache: str) -> subprocess.Popen[str]:
    return podrace(*base, str(folder / name), flags=flags, cache=str(folder / cache))

  def told(name: str) -> dict[str, Any]:
    said = json.loads((folder / name / 'summary.json').read_text())
    last = lines(folder / name)[-1]
    return dict(
      sha256=said['params_sha256'], episode_return=last['episode_return'], compile_s=said['compile_s'],
      steps_per_s=said['steps_per_s'], wall_s=said['wall_s'],
    )  # fmt: skip

  found: dict[str, Any] = {}
  first = dict(
    plain=('', 'a'), anew=('', 'b'), ordered=(DETERMINISTIC, 'c'), ordered_anew=(DETERMINISTIC, 'd')
  )
  started = {name: start(name, *how) for name, how in first.items()}
  for name, process in started.items():
    try:
      ended(process, 240)
      found[name] = told(name)
    except RuntimeError as e:
      found[name] = dict(error=str(e)[-800:])
    session.NOTES['tell'](verdict(found))  # in case that the rest takes too long
  second = dict(
    again=('', 'a'), killed=('', 'a'), ordered_again=(DETERMINISTIC, 'c')
  )  # from kept programs
  started = {name: start(name, *how) for name, how in second.items()}
  deadline = time.monotonic() + 60
  while started['killed'].poll() is None and time.monotonic() < deadline:
    saved = list((folder / 'killed' / 'checkpoints').glob('[0-9]*'))
    if len(saved) >= 2:
      started['killed'].send_signal(signal.SIGKILL)
      break
    time.sleep(0.02)
  code = started['killed'].wait(60)
  at = lines(folder / 'killed')[-1:]
  started['killed'] = start('killed', '', 'a')
  for name, process in started.items():
    try:
      ended(process, 90)
      found[name] = told(name)
    except RuntimeError as e:
      found[name] = dict(error=str(e)[-800:])
  found['killed']['by'] = dict(signal=-code, at_step=at[0]['step'] if at else None)
  shutil.rmtree(folder, ignore_errors=True)
  return verdict(found)


def verdict(found: dict[str, Any]) -> dict[str, Any]:
  """Which runs of `smoke` have the same parameters; None where one is missing."""
  sha = {name: x.get('sha256') for name, x in found.items()}

  def same(*names: str) -> bool | None:
    return len({sha[n] for n in names}) == 1 if all(sha.get(n) for n in names) else None

  return dict(
    same_again=same('plain', 'again'), same_after_kill=same('plain', 'killed'),
    same_compiled_anew=same('plain', 'anew'), ordered_same_again=same('ordered', 'ordered_again'),
    ordered_same_compiled_anew=same('ordered', 'ordered_anew'), ordered_as_plain=same('ordered', 'plain'), runs=found,
  )  # fmt: skip


def learn(*args: str, targets: tuple[float, ...], name: str, limit: float) -> dict[str, Any]:
  """`podrace train` until the last of the targets, its end or the limit; goes on with what --state has."""
  run_dir = pathlib.Path(os.environ['GPU_STATE']) / 'runs' / name
  tiny = ('--total-steps', '3_000') if TINY else ()
  if session.NOTES['ahead']:  # only for its programs
    run_dir = pathlib.Path(tempfile.mkdtemp(prefix='ahead-'))
  process = podrace('train', *args, *tiny, '--quiet', '--run-dir', str(run_dir))
  end = time.monotonic() + limit
  stopped = False
  while process.poll() is None:
    curve = [x for x in lines(run_dir) if x['episodes']]
    enough = (
      bool(lines(run_dir))
      if session.NOTES['ahead']
      else bool(curve) and curve[-1]['episode_return'] >= targets[-1]
    )
    if (
      (enough and not args[0].startswith('minatar'))
      or (enough and session.NOTES['ahead'])
      or time.monotonic() > end
    ):
      process.send_signal(signal.SIGTERM)
      stopped = True
      break
    time.sleep(0.25)
  out, _ = process.communicate(timeout=60)
  if process.returncode not in (0, 143):
    raise RuntimeError(f'exit code {process.returncode}: {out[-1500:]}')
  if session.NOTES['ahead']:
    shutil.rmtree(run_dir, ignore_errors=True)
    return {}
  if not (every := lines(run_dir)):
    raise RuntimeError(f'no line of metrics within {limit:.0f} s: {out[-1500:]}')
  curve = [
    [x['step'], round(x['wall_s'], 2), round(x['episode_return'], 2)]
    for x in every
    if x['episodes']
  ]
  said = (
    json.loads((run_dir / 'summary.json').read_text())
    if (run_dir / 'summary.json').exists()
    else {}
  )
  return dict(
    args=list(args),
    stopped=stopped,
    step=every[-1]['step'] if every else 0,
    wall_s=every[-1]['wall_s'] if every else None,
    compile_s=said.get('compile_s'),
    steps_per_s=said.get('steps_per_s'),
    last_return=curve[-1][2] if curve else None,
    best_return=max((x[2] for x in curve), default=None),
    reached={str(t): next((x for x in curve if x[2] >= t), None) for t in targets},
    curve=curve[:: max(1, len(curve) // 150)],
  )


WIDE = (
  'minatar-breakout',
  '--num-envs',
  '2048',
  '--unroll-length',
  '32',
  '--total-steps',
  '60_000_000',
)
PONG = (
  'ppo-pong', '--num-envs', '64', '--unroll-length', '32', '--agent.minibatches', '8', '--total-steps', '20_000_000',
  '--log-every', '50_000', '--checkpoint-every', '500_000',
)  # fmt: skip


def evaluated() -> dict[str, Any]:
  """The greedy return of MinAtar's run, as docs/presets.md has it."""
  run_dir = pathlib.Path(os.environ['GPU_STATE']) / 'runs' / 'minatar'
  return json.loads(ended(podrace('eval', str(run_dir), '--episodes', '100'), 100).splitlines()[-1])
