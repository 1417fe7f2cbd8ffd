"""The presets' scores: trains each as `podrace train PRESET` does, evaluates it, draws the curves.

    .venv/bin/python benchmarks/scores.py [--resume] [PRESET ...]

Writes benchmarks/results/scores.json after each, and docs/curves.png at the end; the presets that are not named
keep what the file has of them. Without names, all but those that take hours on a CPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from common import RESULTS, origin, record

from podrace.presets import PRESETS

ROOT = Path(__file__).parent.parent
STATED = {  # what each preset is to reach, greedily
  'catch': 1.0,
  'cartpole': 490.0,
  'minatar-breakout': 20.0,
  'memory': 0.99,
  'brax-inverted-pendulum': 990.0,
  'snake': 20.0,
  'dqn-cartpole': 490.0,
  'rainbow-minatar': 20.0,
  'rainbow-minatar-asterix': 10.0,
  'r2d2-memory': 0.99,
  'sac-pendulum': -180.0,
  'sac-brax': 990.0,
  'd4pg-pendulum': -180.0,
  'muzero-catch': 1.0,
  'muzero-cartpole': 490.0,
  'muzero-pendulum': -180.0,
  'muzero-tictactoe': 0.85,
  'pong': 18.0,
  'ppo-pong': 18.0,
  'dqn-pong': 18.0,
  'r2d2-pong': 18.0,
}
HOURS = ('pong', 'ppo-pong', 'dqn-pong', 'r2d2-pong')
# What is scored besides presets: a preset with other settings.
VARIANTS = {'rainbow-minatar-asterix': ('rainbow-minatar', '--env', 'gymnax:Asterix-MinAtar')}


def podrace(*args: str) -> str:
  """What a command prints."""
  command = [str(Path(sys.executable).parent / 'podrace'), *args]
  return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def score(preset: str, resume: bool) -> dict[str, object]:
  """Trains and evaluates one of STATED; `resume` goes on with the run that is there."""
  run_dir = ROOT / 'runs' / 'scores' / preset
  if not resume:
    shutil.rmtree(run_dir, ignore_errors=True)
  podrace('train', *VARIANTS.get(preset, (preset,)), '--run-dir', str(run_dir))
  greedy = json.loads(
    podrace('eval', str(run_dir), '--episodes', '100', '--greedy').splitlines()[-1]
  )
  summary = json.loads((run_dir / 'summary.json').read_text())
  lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
  return {
    'origin': origin(),
    'greedy': greedy,
    'summary': summary,
    'curve': [[x['step'], x['episode_return']] for x in lines if x['episodes']],
  }


def draw(scores: dict[str, dict]) -> None:
  """Return against steps, a panel for each preset."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  rows = -(-len(scores) // 4)
  figure, axes = plt.subplots(rows, 4, figsize=(13, 2.7 * rows), layout='constrained')
  for axis, (preset, found) in zip(axes.flat, scores.items(), strict=False):
    curve = found['curve']
    if len(curve) > 2 and 2 * (curve[-1][0] - curve[-2][0]) < curve[-2][0] - curve[-3][0]:
      curve = curve[:-1]  # of few steps, and so of few episodes, short ones
    steps, returns = zip(*curve, strict=True)
    axis.plot([s / 1e6 for s in steps], returns, color='#1f5fa8', linewidth=1.6)
    axis.axhline(STATED[preset], color='#999999', linewidth=0.8, linestyle='--')
    wall, cores = found['summary']['wall_s'], found['summary']['machine']['cores']
    axis.set_title(f'{preset}: {wall:.0f} s on {cores} CPU core{"s" * (cores > 1)}', fontsize=9)
    axis.set_xlabel('million steps', fontsize=9)
    axis.set_ylabel('episode return', fontsize=9)
    axis.spines[['top', 'right']].set_visible(False)
  for axis in list(axes.flat)[len(scores) :]:
    axis.set_visible(False)
  figure.savefig(ROOT / 'docs' / 'curves.png', dpi=110)


def main() -> None:
  """Scores the presets that are named, or all."""
  names = [a for a in sys.argv[1:] if a != '--resume'] or [n for n in STATED if n not in HOURS]
  if unknown := [name for name in names if name not in STATED]:
    sys.exit(f'nothing is stated of {", ".join(unknown)}, only of {", ".join(STATED)}')
  known = {}
  for preset in names:
    result = score(preset, '--resume' in sys.argv)
    reached = result['greedy']['episode_return_mean']
    print(f'{preset}: {reached:.2f}, stated {STATED[preset]}', flush=True)
    known = keep(preset, result)
  draw(known)


def keep(preset: str, result: dict[str, object]) -> dict[str, dict]:
  """Records a result beside those that there are; returns all."""
  path = RESULTS / 'scores.json'
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  known[preset] = result
  known = {name: known[name] for name in (*PRESETS, *VARIANTS) if name in known}
  record('scores', known)
  return known


if __name__ == '__main__':
  main()
