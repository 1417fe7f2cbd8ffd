"""MuZero without parts of its search, in training and in tests (after Hamrick et al. 2021).

Each case (TASK, VARIANT) trains three seeds in one program and then plays with a search and without. The variants are
settings of `muzero`. Writes results/planning.json after each case; other cases keep their results. Draws
docs/planning.svg; --draw does nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import common
import jax
import numpy as np
from seeds import train

from podrace.agents.muzero import MuZero
from podrace.envs import make
from podrace.hooks import greedily
from podrace.networks import LearnedModel
from podrace.replay import Buffer
from podrace.run.evaluate import make_evaluator
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

SEEDS = 3
STEPS = {'maze': 200_000, 'cartpole': 30_000, 'tictactoe': 200_000}
VARIANTS: dict[str, dict[str, Any]] = {
  'all': {}, 'acts by the prior': {'acts': 'prior'}, 'learns one step': {'target_depth': 1},
  'one step': {'acts': 'prior', 'max_depth': 1}, 'depth 2': {'max_depth': 2}, 'depth 4': {'max_depth': 4},
  **{f'{n} simulations': {'simulations': n} for n in (2, 4, 8, 32, 64)},
}  # fmt: skip
OPPONENTS = {  # of tictactoe: the environment, the model, and the discount
  'rules against itself': ('pgx:tic_tac_toe,opponent=self,state=true', 'rules', -1.0),
  'learned against itself': ('pgx:tic_tac_toe,opponent=self', 'learned', -1.0),
  'rules against random': ('pgx:tic_tac_toe,state=true', 'rules', 1.0),
  'learned against random': ('pgx:tic_tac_toe', 'learned', 1.0),
}
CASES = [f'{task}, {variant}' for task in ('maze', 'cartpole') for variant in VARIANTS]
CASES += [f'tictactoe, {variant}' for variant in OPPONENTS]


def maze() -> Config:
  """Returns the settings for 500 mazes; tests are in other mazes, too."""
  network = LearnedModel(
    torso='grid', hidden=(128,), dynamics_hidden=(128,), head_hidden=(64,), bins=21, v_min=-1.0, v_max=1.0,
  )  # fmt: skip
  buffer = Buffer(
    batch_size=128, min_size=2_000, samples_per_insert=4.0, priority_exponent=0.6, importance_exponent=0.4
  )  # fmt: skip
  agent = MuZero(network, buffer, bootstrap='target', n_step=5, discount=0.97)
  return Config(agent=agent, env='podrace:maze,levels=500', num_envs=32, unroll_length=8)


def config(case: str, steps: int) -> Config:
  """Returns the settings of a case."""
  task, variant = case.split(', ')
  base = maze() if task == 'maze' else PRESETS[f'muzero-{task}']()
  base = dataclasses.replace(base, total_steps=steps or STEPS[task], eval_every=0)
  changes = VARIANTS.get(variant, {})
  if task == 'tictactoe':
    env, model, discount = OPPONENTS[variant]
    base, changes = dataclasses.replace(base, env=env), dict(model=model, discount=discount)
  return dataclasses.replace(base, agent=dataclasses.replace(base.agent, **changes))


def tests(case: str, env: str) -> dict[str, str]:
  """Returns the environments to play in after training."""
  if case.startswith('maze'):
    return {'seen': env, 'unseen': 'podrace:maze,unseen=true'}
  if case.startswith('tictactoe'):
    shown = ',state=true' if 'state=true' in env else ''
    return {o: f'pgx:tic_tac_toe,opponent={o}{shown}' for o in ('random', 'mcts')}
  return {'same': env}


def run(case: str, steps: int, episodes: int) -> dict[str, Any]:
  """Trains, then plays: by the prior, with as many simulations as in training, and with four times as many."""
  c = config(case, steps)
  trained = train(c, SEEDS)
  played: dict[str, dict[str, list[float]]] = {}
  for name, env in tests(case, c.env).items():
    for simulations in sorted({0, 16, c.agent.simulations, 64}):
      agent = greedily(dataclasses.replace(trained.agent, simulations=simulations, acts='search'))
      play = make_evaluator(agent, make(env), episodes)
      returns = [float(play(p, jax.random.key(1)).mean()) for p in trained.params]
      played.setdefault(name, {})[str(simulations)] = returns
      print(f'  {name}, {simulations} simulations: {np.round(returns, 3)}', flush=True)
  return dict(origin=common.origin(), played=played, **trained.numbers)


def draw(results: dict[str, Any]) -> None:
  """Draws the returns of each variant, by the prior and by searches: a dot for each seed."""
  panels = [('maze', 'seen'), ('maze', 'unseen'), ('cartpole', 'same'), ('tictactoe', 'mcts')]
  plt = common.pyplot(**{'font.size': 9, 'axes.titlesize': 10})
  figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.8), layout='constrained')
  for axis, (task, test) in zip(axes, panels, strict=True):
    cases = [c for c in CASES if c in results and c.startswith(f'{task}, ')]
    for i, (n, color) in enumerate((('0', '#b0b0b0'), ('16', '#2166ac'), ('64', '#b2182b'))):
      for row, case in enumerate(cases):
        scores = results[case]['played'][test].get(n, [])
        label = f'{n} simulations' if row == 0 else None
        axis.scatter(scores, [row + 0.22 * (i - 1)] * len(scores), s=14, color=color, label=label)
    axis.set_yticks(range(len(cases)), [c.partition(', ')[2] for c in cases])
    axis.invert_yaxis()
    axis.set_title(f'{task}, {test}' if test != 'same' else task)
    axis.grid(axis='x', alpha=0.3)
  handles = axes[0].get_legend_handles_labels()
  figure.legend(*handles, title='played with', loc='outside lower center', ncols=3)
  figure.savefig(common.ROOT / 'docs' / 'planning.svg', metadata={'Date': None})


def main() -> None:
  args = common.arguments(__doc__, CASES, draw=False, steps=(0, 'fewer steps'), episodes=400)
  for case in () if args.draw else args.cases:
    print(case, flush=True)
    common.keep('planning', case, run(case, args.steps, args.episodes), CASES)
  draw(common.known('planning'))


if __name__ == '__main__':
  main()
