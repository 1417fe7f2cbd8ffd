"""PPO on CartPole against purejaxrl: speed, compile time, and the return after as many steps.

    git clone https://github.com/luchris429/purejaxrl CHECKOUT
    .venv/bin/python benchmarks/purejaxrl.py --checkout CHECKOUT

Its code is as it stands in its checkout. Both sides have a separate actor and critic of 2 x 64 tanh, orthogonal
initialisation, its own hyper-parameters with a constant rate, and gradients clipped by the global norm. They differ
where the code has no setting for it:
- purejaxrl normalizes advantages over each minibatch, podrace over the batch;
- purejaxrl shuffles the whole batch, podrace each environment's steps (see podrace/agents/ppo.py);
- purejaxrl treats time limits as terminations, podrace bootstraps at them;
- purejaxrl returns each step's episode statistics, podrace their sums.

Each side runs in a new process for each pair, in turn. One call is a whole training run from fresh parameters.
Compile time is that of all programs of a run, without a cache. Evaluation is outside, as in ppo_cartpole.py.
"""

from __future__ import annotations

import pathlib
import sys

import common
import ppo_cartpole

SAME = ppo_cartpole.STEADY
CONFIG = dict(SAME, initializer='orthogonal', adam_epsilon=1e-5, learning_rate=2.5e-4)
STEPS = 524_288  # of a training run


def main() -> None:
  args = common.arguments(__doc__, checkout='', pairs=5, envs=[*ppo_cartpole.NUM_ENVS])
  if args.worker is not None:
    worker = ppo_cartpole.PpoWorker()
    common.serve(setup=worker.setup, run=worker.run)
    return
  if not args.checkout:
    sys.exit('--checkout: the checkout of purejaxrl is missing')
  checkout = pathlib.Path(args.checkout).resolve()
  sides = {
    'purejaxrl': [common.peer('purejaxrl'), 'benchmarks/peers/peer_purejaxrl.py', str(checkout)],
    'podrace': [sys.executable, 'benchmarks/purejaxrl.py', '--worker'],
  }
  with common.Worker(sides['purejaxrl']) as worker:
    versions = worker.ask(do='versions') | {'purejaxrl': common.head(checkout)}
  results = {
    n: ppo_cartpole.compare(sides, dict(CONFIG, num_envs=n), STEPS, args.pairs, fresh=True)
    for n in args.envs
  }
  common.record('purejaxrl', dict(config=CONFIG, steps=STEPS, results=results), versions)


if __name__ == '__main__':
  main()
