"""What planning is for: MuZero without parts of its search, in training and in tests (after Hamrick et al. 2021).

    python benchmarks/planning.py [CASE ...]          # TASK, VARIANT; nothing: all
    python benchmarks/planning.py --draw              # docs/planning.svg of what there is

Each case trains three seeds in one program and then plays with a search and without. The variants are settings of
`muzero`. Writes results/planning.json after each case; what is not run keeps what the file has of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
from common import RESULTS, ROOT, origin, record
from seeds import train

from podrace.agents.muzero import MuZero
from podrace.envs import make
from podrace.hooks import greedily
from podrace.networks import LearnedModel
from podrace.replay import Buffer
from podrace.run.evaluate import make_evaluator
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS

SEEDS, EPISODES = 3, 400


def maze() -> Config:
  """500 mazes; what is tested in are others."""
  network = LearnedModel(
    torso='grid', hidden=(128,), dynamics_hidden=(128,), head_hidden=(64,), bins=21, v_min=-1.0, v_max=1.0,
  )  # fmt: skip
  buffer = Buffer(
    batch_size=128,
    min_size=2_000,
    samples_per_insert=4.0,
    priority_exponent=0.6,
    importance_exponent=0.4,
  )
  return Config(
    agent=MuZero(network, buffer, bootstrap='target', n_step=5, discount=0.97),
    env='podrace:maze,levels=500', num_envs=32, unroll_length=8, total_steps=200_000,
  )  # fmt: skip


def cartpole() -> Config:
  return dataclasses.replace(PRESETS['muzero-cartpole'](), total_steps=30_000)


def tictactoe() -> Config:
  """The preset, in fewer steps; its model and its opponent vary."""
  return dataclasses.replace(PRESETS['muzero-tictactoe'](), total_steps=200_000, eval_every=0)


TASKS = {'maze': maze, 'cartpole': cartpole}
VARIANTS: dict[str, dict[str, Any]] = {
  'all': {},
  'acts by the prior': {'acts': 'prior'},
  'learns one step': {'target_depth': 1},
  'one step': {'acts': 'prior', 'max_depth': 1},
  'depth 2': {'max_depth': 2},
  'depth 4': {'max_depth': 4},
  **{f'{n} simulations': {'simulations': n} for n in (2, 4, 8, 32, 64)},
}
OPPONENTS = {
  'rules against itself': 'pgx:tic_tac_toe,opponent=self,state=true',
  'learned against itself': 'pgx:tic_tac_toe,opponent=self',
  'rules against random': 'pgx:tic_tac_toe,state=true',
  'learned against random': 'pgx:tic_tac_toe',
}
CASES = [f'{task}, {variant}' for task in TASKS for variant in VARIANTS]
CASES += [f'tictactoe, {variant}' for variant in OPPONENTS]


def config(case: str) -> Config:
  """What is trained."""
  task, variant = case.split(', ')
  if task == 'tictactoe':
    return against(tictactoe(), OPPONENTS[variant])
  found = TASKS[task]()
  return dataclasses.replace(found, agent=dataclasses.replace(found.agent, **VARIANTS[variant]))


def against(c: Config, env: str) -> Config:
  """The same settings with a learned model or the rules, against itself or another."""
  model, discount = 'rules' if 'state=true' in env else 'learned', -1.0 if 'self' in env else 1.0
  agent = dataclasses.replace(c.agent, discount=discount, model=model)
  return dataclasses.replace(c, agent=agent, env=env)


def tests(case: str, env: str) -> dict[str, str]:
  """The environments that are played in after training."""
  task, _ = case.split(', ')
  if task == 'maze':
    return {'seen': env, 'unseen': 'podrace:maze,unseen=true'}
  if task == 'tictactoe':
    shown = ',state=true' if 'state=true' in env else ''
    return {o: f'pgx:tic_tac_toe,opponent={o}{shown}' for o in ('random', 'mcts')}
  return {'same': env}


def run(case: str) -> dict[str, Any]:
  """Trains, then plays: by the prior, with as many simulations as in training, and with four times as many."""
  c = config(case)
  trained = train(c, SEEDS)
  played: dict[str, dict[str, list[float]]] = {}
  for name, env in tests(case, c.env).items():
    for simulations in sorted({0, 16, c.agent.simulations, 64}):
      agent = greedily(dataclasses.replace(trained.agent, simulations=simulations, acts='search'))
      play = make_evaluator(agent, make(env), EPISODES)
      found = [float(play(p, jax.random.key(1)).mean()) for p in trained.params]
      played.setdefault(name, {})[str(simulations)] = found
      print(f'  {name}, {simulations} simulations: {np.round(found, 3)}', flush=True)
  return dict(origin=origin(), played=played, **trained.numbers)


def main() -> None:
  names = [name for name in sys.argv[1:] if name != '--draw']
  if unknown := set(names) - set(CASES):
    sys.exit(f'no case {", ".join(sorted(unknown))}, only {"; ".join(CASES)}')
  path = RESULTS / 'planning.json'
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  for case in names or ([] if '--draw' in sys.argv else CASES):
    print(case, flush=True)
    known[case] = run(case)
    record('planning', {name: known[name] for name in CASES if name in known})
  draw(known)


def draw(known: dict[str, Any]) -> None:
  """The returns of each variant, by the prior and by searches: a dot for each seed."""
  import matplotlib
  import matplotlib.pyplot as plt

  panels = [('maze', 'seen'), ('maze', 'unseen'), ('cartpole', 'same'), ('tictactoe', 'mcts')]
  with matplotlib.rc_context({'svg.hashsalt': 'podrace', 'font.size': 9}):
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.8), layout='constrained')
    for axis, (task, test) in zip(axes, panels, strict=True):
      cases = [c for c in CASES if c in known and c.startswith(f'{task}, ')]
      for i, (n, color) in enumerate((('0', '#b0b0b0'), ('16', '#2166ac'), ('64', '#b2182b'))):
        for row, case in enumerate(cases):
          scores = known[case]['played'][test].get(n, [])
          y = np.full(len(scores), row + 0.22 * (i - 1))
          label = f'{n} simulations' if row == 0 else None
          axis.scatter(scores, y, s=14, color=color, label=label)
      axis.set_yticks(range(len(cases)), [c.partition(', ')[2] for c in cases])
      axis.invert_yaxis()
      axis.set_title(f'{task}, {test}' if test != 'same' else task, fontsize=10)
      axis.grid(axis='x', alpha=0.3)
      axis.spines[['top', 'right']].set_visible(False)
    figure.legend(
      *axes[0].get_legend_handles_labels(), title='played with', loc='outside lower center', ncols=3
    )
    figure.savefig(ROOT / 'docs' / 'planning.svg', metadata={'Date': None})


if __name__ == '__main__':
  main()
