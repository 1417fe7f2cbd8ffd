"""PPO on CartPole against purejaxrl: speed, compile time, and the return after as many steps.

    git clone https://github.com/luchris429/purejaxrl CHECKOUT
    .venv/bin/python benchmarks/purejaxrl.py CHECKOUT

Its code is as it stands in its checkout. Both sides: separate actor and critic of 2 x 64 tanh, orthogonal
initialisation, its own hyper-parameters with a constant rate, gradients clipped by the global norm. They differ
where the code does and there is no setting for it:
- purejaxrl normalises advantages over each minibatch, podrace over the batch;
- purejaxrl shuffles the whole batch, podrace each environment's steps (see podrace/agents/ppo.py);
- purejaxrl treats time limits as terminations, podrace bootstraps at them;
- purejaxrl returns each step's episode statistics, podrace their sums.

Each side runs in a process of its own, started anew for each pair, the two in turn. One call is a whole training
run from fresh parameters. Compile time is that of all that a run needs, from traced to executable, without a cache.
Evaluation is outside of both, as in ppo_cartpole.py.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import common
import numpy as np
import ppo_cartpole

CONFIG = dict(
  env='CartPole-v1',
  hidden=(64, 64),
  initializer='orthogonal',
  adam_epsilon=1e-5,
  learning_rate=2.5e-4,
  max_grad_norm=0.5,
  discount=0.99,
  clip=0.2,
  entropy_cost=0.01,
  value_cost=0.5,
  unroll_length=128,
  epochs=4,
  minibatches=4,
) | {'lambda': 0.95}
NUM_ENVS = (4, 64, 512)
STEPS = 524_288  # of a training run
CALLS = 5  # the first is not in the rate


def work() -> None:
  """Answers the requests that peer_purejaxrl.py answers, with podrace's PPO."""
  from podrace import envs

  run, updates = None, 0
  for request in common.requests():
    if request['do'] == 'setup':
      config = request['config']
      updates = request['steps'] // config['num_envs'] // config['unroll_length']
      env = envs.make(f'gymnax:{config["env"]}')
      agent = common.bind(ppo_cartpole.agent(config), env, 0)
      run = common.start(agent, env, config['num_envs'], config['unroll_length'])
      common.answer(compile_s=sum(run.compile_s.values()))
    else:
      assert run is not None
      seconds, actors = [], []
      for call in range(request['calls']):
        began, _ = common.timed(lambda call=call: run.reset(1000 * request['seed'] + call))
        seconds.append(began + run.seconds(updates))
        actors.append(ppo_cartpole.actor(run.state.train.params.network))
      np.savez(request['save'], *(np.stack(x) for x in zip(*actors, strict=True)))
      common.answer(seconds=seconds)


def main() -> None:
  """Measures both sides in turn and records them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('checkout', type=pathlib.Path, nargs='?', help="purejaxrl's")
  parser.add_argument('--pairs', type=int, default=5)
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    work()
    return
  if args.checkout is None:
    parser.error('the checkout of purejaxrl is missing')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')
  here = 'benchmarks'
  sides = {
    'purejaxrl': [
      common.peer('purejaxrl'), f'{here}/peers/peer_purejaxrl.py', str(args.checkout.resolve())
    ],
    'podrace': [sys.executable, f'{here}/purejaxrl.py', '--worker'],
  }  # fmt: skip
  git = ['git', '-C', str(args.checkout), 'rev-parse', 'HEAD']
  commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
  with common.Worker(sides['purejaxrl']) as worker:
    versions = worker.ask(do='versions') | {'purejaxrl': commit}
  results = {}
  with tempfile.TemporaryDirectory() as folder:
    for num_envs in NUM_ENVS:
      found = results[num_envs] = measured(sides, num_envs, args.pairs, pathlib.Path(folder))
      told = ', '.join(
        f'{name} {found["steps_per_s"][name]["median"]:,.0f} steps/s, compile '
        f'{found["compile_s"][name]["median"]:.1f} s, return {found["final_greedy_return"][name]["median"]:.0f}'
        for name in sides
      )
      print(f'{num_envs} environments: {told}; {found["speedup"]:.2f}x', flush=True)
  common.record('purejaxrl', dict(config=CONFIG, steps=STEPS, results=results), peer=versions)


def measured(
  sides: dict[str, list[str]], num_envs: int, pairs: int, folder: pathlib.Path
) -> dict[str, Any]:
  """Rates, compile times and returns of both sides, and the medians of the pairs' ratios."""
  rates: dict[str, list[float]] = {name: [] for name in sides}
  compiles: dict[str, list[float]] = {name: [] for name in sides}
  returns: dict[str, list[float]] = {name: [] for name in sides}
  for seed in range(pairs):
    for name in list(sides)[:: 1 - 2 * (seed % 2)]:
      with common.Worker(sides[name]) as worker:
        config = dict(CONFIG, num_envs=num_envs)
        compiles[name].append(worker.ask(do='setup', config=config, steps=STEPS)['compile_s'])
        path = folder / f'{name}.npz'
        told = worker.ask(do='run', calls=CALLS, seed=seed, save=str(path))
      rates[name].append(STEPS * (CALLS - 1) / sum(told['seconds'][1:]))
      returns[name].extend(map(float, ppo_cartpole.evaluate(list(np.load(path).values()))))
  return dict(
    steps_per_s={k: common.summary(v) for k, v in rates.items()},
    speedup=ratio(rates['podrace'], rates['purejaxrl']),
    compile_s={k: common.summary(v) for k, v in compiles.items()},
    compile_ratio=ratio(compiles['podrace'], compiles['purejaxrl']),
    final_greedy_return={k: common.summary(v) for k, v in returns.items()},
  )


def ratio(ours: list[float], theirs: list[float]) -> float:
  return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


if __name__ == '__main__':
  main()
