"""Atari Pong, trained for some time: the return over wall time, and the greedy return.

Each preset is trained in runs/pong/PRESET, all of them side by side, and goes on where an earlier run stopped, for some
minutes or until the return in training is that of --until. With 0 minutes the runs are evaluated only, greedily and as in
training (`podrace eval --sample`). Writes benchmarks/results/pong.json and docs/pong.png (--name: another name for both);
other presets keep their results.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from typing import Any

import common

PRESETS = ('pong', 'ppo-pong', 'dqn-pong', 'r2d2-pong')
COLORS = ('#1f5fa8', '#c0552b', '#3b8a4e', '#7a4fa3')  # for each preset that the file may have
RUNS = common.ROOT / 'runs' / 'pong'


def curve(preset: str) -> list[list[float]]:
  """Returns step, seconds and return in training of each line with episodes in it."""
  lines = common.metrics(RUNS / preset)
  return [[x['step'], x['wall_s'], x['episode_return']] for x in lines if x['episodes']]


def reached(preset: str, until: float) -> list[float] | None:
  """Returns the first line of the curve with this return."""
  return next((x for x in curve(preset) if x[2] >= until), None)


def train(presets: list[str], minutes: float, until: float) -> None:
  """Trains for that time, or to this return, and has the runs save."""
  RUNS.mkdir(parents=True, exist_ok=True)
  runs: dict[str, subprocess.Popen[bytes]] = {
    preset: common.start_podrace(RUNS / f'{preset}.txt', 'train', preset, '--run-dir', RUNS / preset)
    for preset in presets
  }  # fmt: skip
  end = time.monotonic() + minutes * 60
  while going := {preset: run for preset, run in runs.items() if run.poll() is None}:
    for preset, run in going.items():
      if time.monotonic() > end or reached(preset, until):
        common.stop(run, signal.SIGTERM)
      else:
        with contextlib.suppress(subprocess.TimeoutExpired):
          run.wait(5.0)
  for preset, run in runs.items():
    if run.wait() not in (0, 143):
      raise RuntimeError(f'{preset} ended with {run.returncode}: see {RUNS / preset}.txt')


def describe(preset: str, episodes: int, until: float, note: str) -> dict[str, Any]:
  """Returns the curve of a run, and its returns in evaluation."""
  run_dir = RUNS / preset
  last = common.metrics(run_dir)[-1]
  greedy, sampled = (common.evaluate_run(run_dir, '--episodes', episodes, *x) for x in ((), ('--sample',)))  # fmt: skip
  returns = last['episode_return'], greedy['episode_return_mean'], sampled['episode_return_mean']
  print(f'{preset}: {last["step"]:,} steps; training, greedily, sampled: {returns}', flush=True)
  return dict(
    origin=common.origin(), note=note, config=common.read_json(run_dir / 'config.json'), steps=last['step'],
    frames=4 * last['step'], wall_s=last['wall_s'], greedy=greedy, sampled=sampled, until=until,
    reached=reached(preset, until), curve=curve(preset),
  )  # fmt: skip


def draw(results: dict[str, Any], name: str) -> None:
  """Draws return over minutes."""
  plt = common.pyplot(**{'axes.labelsize': 9, 'legend.fontsize': 9, 'legend.frameon': False})
  figure, axis = plt.subplots(figsize=(7, 3.2), layout='constrained')
  for (preset, one), color in zip(results.items(), COLORS, strict=False):
    _, seconds, returns = zip(*one['curve'], strict=True)
    label = f'{preset}: {one["steps"] / 1e6:.1f}M steps'
    axis.plot([s / 60 for s in seconds], returns, color=color, linewidth=1.6, label=label)
  axis.set(ylim=(-21.5, 21.5), xlabel='minutes', ylabel='return of an episode')
  axis.legend()
  figure.savefig(common.ROOT / 'docs' / f'{name}.png', dpi=110)


def main() -> None:
  args = common.arguments(
    __doc__, PRESETS, minutes=60.0, episodes=(10, 'of each evaluation'), until=(18.0, 'a return that is enough'),
    name=('pong', 'of the result file and the picture'), note=('', 'other work on the machine'),
  )  # fmt: skip
  if args.minutes:
    train(args.cases, args.minutes, args.until)
  for preset in args.cases:
    result = describe(preset, args.episodes, args.until, args.note)
    draw(common.keep(args.name, preset, result), args.name)


if __name__ == '__main__':
  main()
