"""The presets' scores: trains each as `podrace train PRESET` does, evaluates it, draws the curves.

    .venv/bin/python benchmarks/scores.py [--resume] [PRESET ...]
    .venv/bin/python benchmarks/scores.py --draw

Writes benchmarks/results/scores.json after each; at the end docs/curves.png, and a picture for each agent's page,
docs/agents/AGENT.svg. The presets that are not named keep what the file has of them. Without names, all but those
that take hours on a CPU. --draw draws the agents' pictures from what is recorded, here and by pong.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, origin, record

from podrace.settings.presets import PRESETS

ROOT = Path(__file__).parent.parent
AGENT_PAGES = ROOT / 'docs' / 'agents'
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
  'muzero-tictactoe': 0.9,
  'muzero-connect-four': 0.6,
  'muzero-minatar': 50.0,
  'muzero-asterix': 20.0,
  'pong': 18.0,
  'ppo-pong': 18.0,
  'dqn-pong': 18.0,
  'r2d2-pong': 18.0,
  'muesli-catch': 1.0,
  'muesli-cartpole': 490.0,
  'muesli-minatar': 20.0,
}
HOURS = (
  'pong',
  'ppo-pong',
  'dqn-pong',
  'r2d2-pong',
  'muzero-minatar',
  'muzero-asterix',
  'muesli-minatar',
)
# What is scored besides presets: a preset with other settings.
VARIANTS = {
  'rainbow-minatar-asterix': ('rainbow-minatar', '--env', 'gymnax:Asterix-MinAtar'),
}


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
  there = json.loads((run_dir / 'config.json').read_text())['eval_env']  # against another opponent
  where = ('--env', there) if there else ()
  greedy = json.loads(
    podrace('eval', str(run_dir), '--episodes', '100', '--greedy', *where).splitlines()[-1]
  )
  summary = json.loads((run_dir / 'summary.json').read_text())
  lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
  curve = [[x['step'], x['episode_return']] for x in lines if x['episodes']]
  if there:
    evaluated = [json.loads(x) for x in (run_dir / 'eval.jsonl').read_text().splitlines()]
    curve = [[x['step'], x['episode_return_mean']] for x in evaluated]
  found = {'origin': origin(), 'greedy': greedy, 'summary': summary, 'curve': curve}
  return found | {'games': games(run_dir, there)} if there else found


def games(run_dir: Path, env: str) -> dict[str, float]:
  """Mean results of 400 games, by the opponent and how the agent plays."""
  found = {}
  for opponent in ('random', 'mcts'):
    for how, settings in (('search', ()), ('prior', ('--agent.simulations', '0'))):
      other = f'{env.partition(",")[0]},opponent={opponent},state=true'
      said = podrace(
        'eval', str(run_dir), '--episodes', '400', '--greedy', '--env', other, *settings
      )
      found[f'{opponent}, {how}'] = json.loads(said.splitlines()[-1])['episode_return_mean']
  return found


def draw(scores: dict[str, dict]) -> None:
  """Return against steps, a panel for each preset."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  rows = -(-len(scores) // 4)
  figure, axes = plt.subplots(rows, 4, figsize=(13, 2.7 * rows), layout='constrained')
  for axis, (preset, found) in zip(axes.flat, scores.items(), strict=False):
    steps, returns = zip(*whole(found['curve']), strict=True)
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


GROUND, CURVE, GOAL = '#f7f7f5', '#1f5fa8', '#77808a'


def agents_curves() -> dict[str, dict[str, dict]]:
  """The recorded curves of each agent's presets: points of (steps, return), and the stated score."""
  from podrace.settings.agents import agent_name

  recorded: dict[str, Any] = {}
  for file in ('acting', 'pong', 'scores'):
    recorded |= json.loads((RESULTS / f'{file}.json').read_text())['results']
  found: dict[str, dict[str, dict]] = {}
  for name in [*STATED, 'r2d2-remote-memory']:
    if name not in recorded:
      continue
    curve = [
      (point[0], point[-1]) for point in recorded[name]['curve']
    ]  # pong.py has seconds between
    preset = VARIANTS[name][0] if name in VARIANTS else name
    agent = agent_name(PRESETS[preset]().agent)
    found.setdefault(agent, {})[name] = {'curve': whole(curve), 'stated': STATED.get(name)}
  return found


def whole(curve: list) -> list:
  """A curve without a last line of few steps, and so of few episodes, short ones."""
  short = len(curve) > 2 and 2 * (curve[-1][0] - curve[-2][0]) < curve[-2][0] - curve[-3][0]
  return curve[:-1] if short else curve


def draw_agents(folder: Path) -> list[Path]:
  """A picture for each agent's page: return against steps, a panel for each of its presets."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  written = []
  for agent, presets in agents_curves().items():
    rows, columns = -(-len(presets) // 2), min(len(presets), 2)
    with matplotlib.rc_context({'svg.hashsalt': 'podrace', 'font.size': 10}):
      figure, axes = plt.subplots(
        rows, columns, figsize=(3.1 * columns, 2.5 * rows), layout='constrained', squeeze=False,
        facecolor=GROUND,
      )  # fmt: skip
      for axis in list(axes.flat)[len(presets) :]:
        axis.set_visible(False)
      for axis, (name, found) in zip(axes.flat, presets.items(), strict=False):
        panel(axis, name, found)
      path = folder / f'{agent}.svg'
      figure.savefig(path, facecolor=GROUND, metadata={'Date': None})
      plt.close(figure)
    written.append(path)
  return written


def panel(axis: Any, name: str, found: dict) -> None:
  """One preset: its curve, and the stated score as a dashed line."""
  steps, returns = zip(*found['curve'], strict=True)
  axis.plot([s / 1e6 for s in steps], returns, color=CURVE, linewidth=1.6)
  if found['stated'] is not None:
    axis.axhline(found['stated'], color=GOAL, linewidth=1, linestyle='--')
  axis.set_facecolor(GROUND)
  axis.set_title(name, fontsize=10)
  axis.set_xlabel('million steps')
  axis.set_ylabel('episode return')
  axis.spines[['top', 'right']].set_visible(False)


def main() -> None:
  """Scores the presets that are named, or all; or draws."""
  if sys.argv[1:] == ['--draw']:
    draw_agents(AGENT_PAGES)
    return
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
  draw_agents(AGENT_PAGES)


def keep(preset: str, result: dict[str, object]) -> dict[str, dict]:
  """Records a result and keeps the others; returns all."""
  path = RESULTS / 'scores.json'
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  known[preset] = result
  known = {name: known[name] for name in (*PRESETS, *VARIANTS) if name in known}
  record('scores', known)
  return known


if __name__ == '__main__':
  main()
