"""The scores of presets that take too long for the suite `presets`: one seed, trained as `podrace train PRESET` does.

Writes benchmarks/results/scores.json after each; at the end a picture for each agent's page, docs/agents/AGENT.svg. Other
presets keep their results. Without names, all presets of STATED that are neither in HOURS nor in the suite.
--draw draws the agents' pictures from the recorded results, here, by pong.py and by `podrace reproduce presets`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import common
from common import RESULTS, ROOT  # noqa: F401

from podrace.settings.presets import PRESETS

STATED = {  # the greedy return that each preset is to reach
  'catch': 1.0, 'cartpole': 490.0, 'minatar-breakout': 20.0, 'memory': 0.99, 'brax-inverted-pendulum': 990.0,
  'snake': 20.0, 'dqn-cartpole': 490.0, 'rainbow-minatar': 20.0, 'rainbow-minatar-asterix': 10.0, 'r2d2-memory': 0.99,
  'sac-pendulum': -180.0, 'sac-brax': 990.0, 'd4pg-pendulum': -180.0, 'muzero-catch': 1.0, 'muzero-cartpole': 490.0,
  'muzero-pendulum': -180.0, 'muzero-tictactoe': 0.9, 'muzero-connect-four': 0.6, 'muzero-minatar': 50.0,
  'muzero-asterix': 20.0, 'pong': 18.0, 'ppo-pong': 18.0, 'dqn-pong': 18.0, 'r2d2-pong': 18.0, 'muesli-catch': 1.0,
  'muesli-cartpole': 490.0, 'muesli-minatar': 20.0, 'qtopt-pendulum': -180.0, 'qtopt-grasp': 0.9,
  'pqn-cartpole': 490.0, 'pqn-minatar': 20.0,
}  # fmt: skip
HOURS = ('pong', 'ppo-pong', 'dqn-pong', 'r2d2-pong', 'muzero-minatar', 'muzero-asterix', 'muesli-minatar')  # fmt: skip
VARIANTS = {'rainbow-minatar-asterix': ('rainbow-minatar', '--env', 'gymnax:Asterix-MinAtar')}
GROUND, CURVE, GOAL = '#f7f7f5', '#1f5fa8', '#77808a'


def score(preset: str, resume: bool) -> dict[str, Any]:
  """Trains and evaluates one of STATED; `resume` goes on with its run."""
  run_dir = ROOT / 'runs' / 'scores' / preset
  if not resume:
    shutil.rmtree(run_dir, ignore_errors=True)
  common.podrace('train', *VARIANTS.get(preset, (preset,)), '--run-dir', run_dir)
  env = common.read_json(run_dir / 'config.json')['eval_env']  # against another opponent
  result = {
    'origin': common.origin(),
    'greedy': evaluate(run_dir, 100, env),
    'summary': common.summary_of(run_dir),
    'curve': [[x['step'], x['episode_return']] for x in common.metrics(run_dir) if x['episodes']],
  }
  if env:
    rows = common.metrics(run_dir, 'eval.jsonl')
    result['curve'] = [[x['step'], x['episode_return_mean']] for x in rows]
    result['games'] = games(run_dir, env)
  return result


def evaluate(run_dir: Path, episodes: int, env: str = '', *more: str) -> dict[str, Any]:
  where = ('--env', env) if env else ()
  return common.evaluate_run(run_dir, '--episodes', episodes, '--greedy', *where, *more)


def games(run_dir: Path, env: str) -> dict[str, float]:
  """Returns the mean results of 400 games, by the opponent and how the agent plays."""
  results = {}
  for opponent in ('random', 'mcts'):
    for how, settings in (('search', ()), ('prior', ('--agent.simulations', '0'))):
      other = f'{env.partition(",")[0]},opponent={opponent},state=true'
      results[f'{opponent}, {how}'] = evaluate(run_dir, 400, other, *settings)['episode_return_mean']  # fmt: skip
  return results


def whole(curve: list) -> list:
  """Returns a curve without a last line of few steps, and so of few and short episodes."""
  short = len(curve) > 2 and 2 * (curve[-1][0] - curve[-2][0]) < curve[-2][0] - curve[-3][0]
  return curve[:-1] if short else curve


def panel(axis: Any, title: str, curves: list[list], stated: float | None) -> None:
  """Draws one preset: the curve of each seed, and the stated score as a dashed line."""
  alone = len(curves) == 1
  for points in map(whole, curves):
    steps, returns = [p[0] / 1e6 for p in points], [p[-1] for p in points]
    axis.plot(
      steps, returns, color=CURVE, linewidth=1.6 if alone else 0.9, alpha=1 if alone else 0.6
    )
  if stated is not None:
    axis.axhline(stated, color=GOAL, linewidth=1, linestyle='--')
  axis.set(title=title, xlabel='million steps', ylabel='episode return', facecolor=GROUND)


def draw(panels: list[tuple[str, list[list], float | None]], width: int, path: Path) -> None:
  """Draws return against steps, a panel for each (title, curves, stated score)."""
  rows, columns = -(-len(panels) // width), min(len(panels), width)
  plt = common.pyplot(**{'font.size': 10, 'axes.titlesize': 10})
  figure, axes = plt.subplots(
    rows, columns, figsize=(3.1 * columns, 2.5 * rows), layout='constrained', squeeze=False, facecolor=GROUND,
  )  # fmt: skip
  for axis in list(axes.flat)[len(panels) :]:
    axis.set_visible(False)
  for axis, one in zip(axes.flat, panels, strict=False):
    panel(axis, *one)
  metadata = {'Date': None} if path.suffix == '.svg' else None
  figure.savefig(path, facecolor=GROUND, metadata=metadata, dpi=110)
  plt.close(figure)


def of_the_suite() -> dict[str, list[list]]:
  """Returns the curves of each preset that `podrace reproduce presets` has recorded, one for each seed."""
  curves = {}
  for path in sorted((ROOT / 'benchmarks' / 'results' / 'suites' / 'presets').glob('*.json')):
    record = common.read_json(path)
    steps, returns = record['curve']['step'], record['curve']['returns']
    curves[record['task']] = [
      [[s, y] for s, y in zip(steps, seed, strict=True) if y is not None] for seed in returns
    ]
  return curves


def draw_agents(folder: Path) -> None:
  """Draws a picture for each agent's page: a panel for each of its presets."""
  from podrace.settings.agents import agent_name

  recorded: dict[str, Any] = {}
  for file in ('acting', 'pong', 'scores'):
    recorded |= common.known(file)
  curves = {name: [one['curve']] for name, one in recorded.items()} | of_the_suite()
  agents: dict[str, list[Any]] = {}
  for name in [*STATED, 'r2d2-remote-memory']:
    if name in curves:
      preset = VARIANTS[name][0] if name in VARIANTS else name
      one = (name, curves[name], STATED.get(name))
      agents.setdefault(agent_name(PRESETS[preset]().agent), []).append(one)
  for agent, panels in agents.items():
    draw(panels, 2, folder / f'{agent}.svg')


def main() -> None:
  args = sys.argv[1:]
  names = [a for a in args if a not in ('--resume', '--draw')]
  if '--help' in args:
    sys.exit(f'{__doc__}\nusage: scores.py [--resume] [PRESET ...] | --draw')
  if unknown := [name for name in names if name not in STATED]:
    sys.exit(f'nothing is stated of {", ".join(unknown)}, only of {", ".join(STATED)}')
  if '--draw' not in args:
    for preset in names or [n for n in STATED if n not in (*HOURS, *of_the_suite())]:
      result = score(preset, '--resume' in args)
      mean = result['greedy']['episode_return_mean']
      print(f'{preset}: {mean:.2f}, stated {STATED[preset]}', flush=True)
      common.keep('scores', preset, result, (*PRESETS, *VARIANTS))
  draw_agents(ROOT / 'docs' / 'agents')


if __name__ == '__main__':
  main()
