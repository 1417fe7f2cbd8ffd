"""Learning from logs: the speed of offline training beside online training, and the returns of bc and dqn.

    .venv/bin/python benchmarks/logs.py speed --repeats 5
    .venv/bin/python benchmarks/logs.py cartpole --seeds 0 1 2 3 4

`speed` trains with the same settings and seeds online, from a log with the environments away, and half and half, in turn.
`cartpole` trains a policy to a medium return (seed 100), records it with noise, and trains from that log alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import common

ENV = 'gymnax:CartPole-v1'
MEDIUM_STEPS = 12_000  # of dqn-cartpole with seed 100: it does not balance for long yet
NOISE, EPISODES, SEED = 0.2, 200, 100
STEPS = {'bc': 100_000, 'dqn': 200_000}
WAYS: dict[str, tuple[str, ...]] = {
  'online': (),
  'offline': ('--log', '{log}'),
  'half': ('--log', '{log}', '--log-share', '1/2'),
}


def podrace(*args: str) -> str:
  """Runs a command; returns the last line that it prints."""
  done = subprocess.run(
    [*common.PODRACE, *args], check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, 'PYTHONPATH': common.PATH}
  )  # fmt: skip
  return done.stdout.splitlines()[-1]


def record_medium(folder: Path) -> tuple[str, dict[str, Any]]:
  """Returns a log of a medium policy, and its statistics."""
  run, log = folder / 'medium', folder / 'cartpole-medium-v0'
  podrace(
    'train', 'dqn-cartpole', '--seed', str(SEED), '--total-steps', str(MEDIUM_STEPS), '--run-dir', str(run), '--quiet'
  )  # fmt: skip
  line = podrace(
    'record', str(run), '--greedy', '--noise', str(NOISE), '--episodes', str(EPISODES), '--seed', str(SEED), '--to', str(log)
  )  # fmt: skip
  return str(log), json.loads(line)


def speed(folder: Path, repeats: int) -> dict[str, Any]:
  """Returns steps/s of each way, the median of `repeats` runs in turn."""
  log, about = record_medium(folder)
  rates: dict[str, list[float]] = {way: [] for way in WAYS}
  for i in range(repeats):
    for way, words in WAYS.items():
      run = folder / f'{way}-{i}'
      podrace(
        'train', 'dqn-cartpole', '--seed', str(i), '--total-steps', '100_000', '--run-dir', str(run), '--quiet',
        *(word.format(log=log) for word in words),
      )  # fmt: skip
      rates[way].append(json.loads((run / 'summary.json').read_text())['steps_per_s'])
      print(way, rates[way][-1], flush=True)
  medians = {way: statistics.median(x) for way, x in rates.items()}
  ratios = [a / b for a, b in zip(rates['offline'], rates['online'], strict=True)]
  return dict(
    log=about, steps_per_s=medians, each=rates, offline_to_online=statistics.median(ratios)
  )


def cartpole(folder: Path, seeds: list[int]) -> dict[str, Any]:
  """Returns the greedy returns of agents that learned from the log alone."""
  log, about = record_medium(folder)
  returns: dict[str, list[float]] = {agent: [] for agent in STEPS}
  for agent, steps in STEPS.items():
    for seed in seeds:
      run = folder / f'{agent}-{seed}'
      podrace(
        'train', '--agent', agent, '--log', log, '--total-steps', str(steps), '--seed', str(seed), '--run-dir', str(run),
        '--quiet',
      )  # fmt: skip
      line = podrace('eval', str(run), '--env', ENV, '--episodes', '100', '--greedy')
      returns[agent].append(json.loads(line)['episode_return_mean'])
      print(agent, seed, returns[agent][-1], flush=True)
  summary = {
    agent: dict(mean=statistics.mean(x), std=statistics.pstdev(x), each=x, steps=STEPS[agent])
    for agent, x in returns.items()
  }
  return dict(log=about, seeds=seeds, **summary)


def main() -> None:
  """Measures the cases that the command line names."""
  args = common.arguments(__doc__, ('speed', 'cartpole'), repeats=5, seeds=[0, 1, 2, 3, 4])
  results = common.known('logs')
  with tempfile.TemporaryDirectory() as folder:
    for case in args.cases:
      path = Path(folder) / case
      path.mkdir()
      results[case] = speed(path, args.repeats) if case == 'speed' else cartpole(path, args.seeds)
      common.record('logs', results)


if __name__ == '__main__':
  main()
