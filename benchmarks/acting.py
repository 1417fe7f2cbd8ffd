"""A run in four processes: a learner, a replay service, and two acting processes, on one machine.

    .venv/bin/python benchmarks/acting.py [PRESET] [OPTIONS of train and act ...]

Trains r2d2-remote-memory as docs/distributed.md says, over unix:, and evaluates it. Writes results/acting.json: the
curve, the final greedy return, and what the service counted.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, record

import podrace

COMMAND = [sys.executable, '-m', 'podrace.cli']
ACTORS = 2
COMMON = (
  '--agent',
  '--env',
  '--num-envs',
  '--unroll-length',
)  # options that acting processes have, too


def start(log: Path, *args: str) -> subprocess.Popen[bytes]:
  """`podrace ARGS`, whose output is in a file."""
  return subprocess.Popen(
    [*COMMAND, *args], cwd=ROOT, stdout=log.open('w'), stderr=subprocess.STDOUT
  )


def score(preset: str, options: list[str], folder: Path) -> dict[str, Any]:
  """Trains in four processes; what came of it."""
  replay, parameters = f'unix:{folder}/replay', f'unix:{folder}/parameters'
  run_dir = folder / 'run'
  to_act = [
    x
    for given in zip(options[::2], options[1::2], strict=True)
    if given[0].startswith(COMMON)
    for x in given
  ]
  given = dict(zip(options[::2], options[1::2], strict=True)).get('--num-envs')
  num_envs = int(given or podrace.configure(preset).num_envs)
  at = ['--connect-replay', replay]
  server = start(folder / 'replay.txt', 'replay', '--listen', replay)
  learner = start(
    folder / 'train.txt',
    'train',
    preset,
    *options,
    *at,
    '--listen',
    parameters,
    '--run-dir',
    str(run_dir),
  )
  actors = [
    start(
      folder / f'{i}.txt',
      'act',
      preset,
      *to_act,
      *at,
      '--params',
      parameters,
      '--local-envs',
      str(num_envs // ACTORS),
    )
    for i in range(ACTORS)
  ]
  try:
    codes = [process.wait() for process in (learner, *actors)]
    from podrace.distributed import replay as service

    client = service.connect(replay)
    info = client.table('windows').info()
    client.close()
  finally:
    server.send_signal(signal.SIGTERM)
    for process in (learner, *actors):
      process.kill()
    server.wait()
  if any(codes):
    raise SystemExit(f'{codes}: see {[p.read_text()[-500:] for p in folder.glob("*.txt")]}')
  told = subprocess.run(
    [*COMMAND, 'eval', str(run_dir), '--episodes', '100'],
    check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True,
  ).stdout  # fmt: skip
  lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
  return {
    'acting_processes': ACTORS,
    'greedy': json.loads(told.splitlines()[-1]),
    'summary': json.loads((run_dir / 'summary.json').read_text()),
    'curve': [[x['step'], x['episode_return']] for x in lines if x['episodes']],
    'service': {k: getattr(info, k) for k in ('inserts', 'samples', 'size', 'bytes', 'limiter')},
  }


def main() -> None:
  """Records one preset."""
  args = sys.argv[1:]
  preset = args.pop(0) if args and not args[0].startswith('-') else 'r2d2-remote-memory'
  with tempfile.TemporaryDirectory() as folder:
    found = score(preset, args, Path(folder))
  print(json.dumps({k: v for k, v in found.items() if k != 'curve'}, indent=1))
  record('acting', {preset: found})


if __name__ == '__main__':
  main()
