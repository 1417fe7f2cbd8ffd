"""Atari Pong, trained for some time: the return over wall time, and what it is greedily.

    .venv/bin/python benchmarks/pong.py [PRESET ...] [--minutes M] [--until RETURN] [--note TEXT]

Each preset is trained in runs/pong/PRESET, all of them side by side, and goes on where an earlier run of
this stopped, for so many minutes or until the return in training is RETURN; with 0 minutes what is there is
evaluated only, greedily and as in training (`podrace eval --sample`). Writes benchmarks/results/pong.json and docs/pong.png (--name: another name for both);
presets that are not named keep what the file has of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

PRESETS = ('pong', 'ppo-pong')
COLORS = ('#1f5fa8', '#c0552b', '#3b8a4e', '#7a4fa3')  # for each preset that the file may have
RUNS = common.ROOT / 'runs' / 'pong'
PODRACE = str(Path(sys.executable).parent / 'podrace')


def curve(preset: str) -> list[list[float]]:
  """Step, seconds and return in training of each line with episodes in it."""
  path = RUNS / preset / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True) if path.exists() else []
  told = [json.loads(x) for x in lines if x.endswith('\n')]
  return [[x['step'], x['wall_s'], x['episode_return']] for x in told if x['episodes']]


def reached(preset: str, until: float) -> list[float] | None:
  """The first line of the curve with this return."""
  return next((x for x in curve(preset) if x[2] >= until), None)


def train(presets: list[str], minutes: float, until: float) -> None:
  """Trains for so long, or to this return, and has the runs save."""
  runs: dict[str, subprocess.Popen[bytes]] = {}
  RUNS.mkdir(parents=True, exist_ok=True)
  for preset in presets:
    with (RUNS / f'{preset}.txt').open('a') as log:
      command = [PODRACE, 'train', preset, '--run-dir', str(RUNS / preset)]
      runs[preset] = subprocess.Popen(command, stdout=log, stderr=log, cwd=common.ROOT)
  end = time.monotonic() + minutes * 60
  while going := {preset: run for preset, run in runs.items() if run.poll() is None}:
    late = time.monotonic() > end
    for preset, run in going.items():
      if late or reached(preset, until):
        run.send_signal(signal.SIGTERM)
        run.wait()
      else:
        with contextlib.suppress(subprocess.TimeoutExpired):
          run.wait(5.0)
  for preset, run in runs.items():
    if run.wait() not in (0, 143):
      raise RuntimeError(f'{preset} ended with {run.returncode}: see {RUNS / preset}.txt')


def told(preset: str, episodes: int, until: float, note: str) -> dict[str, Any]:
  """The curve of a run, and its greedy return."""
  run_dir = RUNS / preset
  lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
  evaluate = [PODRACE, 'eval', str(run_dir), '--episodes', str(episodes)]
  greedy, sampled = common.last_json(evaluate), common.last_json([*evaluate, '--sample'])
  last = lines[-1]
  print(
    f'{preset}: {last["step"]:,} steps in {last["wall_s"] / 60:.0f} min, '
    f'return {last["episode_return"]:.1f} in training, '
    f'{greedy["episode_return_mean"]:.1f} greedily, {sampled["episode_return_mean"]:.1f} as in training', flush=True,
  )  # fmt: skip
  return dict(
    origin=common.origin(),
    note=note,
    config=json.loads((run_dir / 'config.json').read_text()),
    steps=last['step'],
    frames=4 * last['step'],
    wall_s=last['wall_s'],
    greedy=greedy,
    sampled=sampled,
    until=until,
    reached=reached(preset, until),
    curve=curve(preset),
  )


def draw(results: dict[str, Any], name: str) -> None:
  """Return over minutes."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  figure, axis = plt.subplots(figsize=(7, 3.2), layout='constrained')
  for (preset, found), color in zip(results.items(), COLORS[: len(results)], strict=True):
    _, seconds, returns = zip(*found['curve'], strict=True)
    label = f'{preset}: {found["steps"] / 1e6:.1f}M steps'
    axis.plot([s / 60 for s in seconds], returns, color=color, linewidth=1.6, label=label)
  axis.set_ylim(-21.5, 21.5)
  axis.set_xlabel('minutes', fontsize=9)
  axis.set_ylabel('return of an episode', fontsize=9)
  axis.legend(frameon=False, fontsize=9)
  axis.spines[['top', 'right']].set_visible(False)
  figure.savefig(common.ROOT / 'docs' / f'{name}.png', dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('presets', nargs='*', help=f'of {PRESETS}; none: all')
  parser.add_argument('--minutes', type=float, default=60.0)
  parser.add_argument('--episodes', type=int, default=10, help='of the greedy evaluation')
  parser.add_argument('--until', type=float, default=18.0, help='a return that is enough')
  parser.add_argument('--name', default='pong', help='of the result file and the picture')
  parser.add_argument('--note', default='', help='what else the machine did')
  args = parser.parse_args()
  presets = args.presets or list(PRESETS)
  if args.minutes:
    train(presets, args.minutes, args.until)
  path = common.RESULTS / f'{args.name}.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  for preset in presets:
    results[preset] = told(preset, args.episodes, args.until, args.note)
  common.record(args.name, results)
  draw(results, args.name)


if __name__ == '__main__':
  main()
