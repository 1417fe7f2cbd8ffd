"""A run in four processes: a learner, a replay service, and two acting processes, on one machine.

Trains r2d2-remote-memory as docs/distributed.md says, over unix:, and evaluates it. Writes results/acting.json: the
curve, the final greedy return, and the counters of the service.
"""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import common

import podrace
from podrace.distributed import replay as service

PRESET, ACTORS = 'r2d2-remote-memory', 2


def score(folder: Path, options: list[Any]) -> dict[str, Any]:
  """Trains in four processes; returns the learned policy's figures."""
  replay, parameters, run_dir = f'unix:{folder}/replay', f'unix:{folder}/parameters', folder / 'run'
  at = ('--connect-replay', replay)
  local = podrace.configure(PRESET).num_envs // ACTORS
  train = (*options, *at, '--listen', parameters, '--run-dir', run_dir)
  act = (*at, '--params', parameters, '--local-envs', local)
  server = common.start_podrace(folder / 'replay.txt', 'replay', '--listen', replay)
  processes = [common.start_podrace(folder / 'train.txt', 'train', PRESET, *train)]
  processes += [common.start_podrace(folder / f'{i}.txt', 'act', PRESET, *act) for i in range(ACTORS)]  # fmt: skip
  try:
    codes = [process.wait() for process in processes]
    client = service.connect(replay)
    info = client.table('windows').info()
    client.close()
  finally:
    for process in processes:
      process.kill()
    common.stop(server, signal.SIGTERM)
  if any(codes):
    raise SystemExit(f'{codes}: see {[p.read_text()[-500:] for p in folder.glob("*.txt")]}')
  return dict(
    acting_processes=ACTORS,
    greedy=common.evaluate_run(run_dir, '--episodes', 100),
    summary=common.summary_of(run_dir),
    curve=[[x['step'], x['episode_return']] for x in common.metrics(run_dir) if x['episodes']],
    service={k: getattr(info, k) for k in ('inserts', 'samples', 'size', 'bytes', 'limiter')},
  )


def main() -> None:
  args = common.arguments(__doc__, steps=(0, 'fewer steps than the preset has'))
  with tempfile.TemporaryDirectory() as folder:
    result = score(Path(folder), ['--total-steps', args.steps] if args.steps else [])
  print(json.dumps({k: v for k, v in result.items() if k != 'curve'}, indent=1))
  common.keep('acting', PRESET, result)


if __name__ == '__main__':
  main()
