"""Signs of failures: runs with a planted mistake are named, healthy runs raise no alarm.

Each case is a run of `podrace train` in runs/collapse. A failure must have the sign of its mistake, a healthy run
none. Writes results/collapse.json after each case, and exits 1 if a case is not as expected.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import threading
import time
from typing import Any

import common

from podrace.run.diagnostics import Diagnostics
from podrace.run.directory import load_config

DQN = 'dqn-cartpole --total-steps 20_000'
PENDULUM = '--env gymnax:Pendulum-v1'
PLANTED = '--env python:planted_envs.planted,mistake='
SMALL = '--agent ppo --num-envs 32 --unroll-length 16 --total-steps 40_000'

FAILURES = {  # name -> sign, options
  'learning-rate-of-impala': ('entropy-collapsed', 'catch --agent.learning-rate 1 --total-steps 80_000'),
  'learning-rate-of-ppo': ('updates-too-large', 'cartpole --agent.learning-rate 0.3 --agent.max-grad-norm 0 --total-steps 100_000'),
  'learning-rate-too-small': ('entropy-constant', 'catch --agent.learning-rate 1e-7 --total-steps 300_000'),
  'entropy-cost': ('entropy-constant', 'catch --agent.entropy-cost 10_000 --total-steps 300_000'),
  'clipping': ('ratios-clipped', 'cartpole --agent.clip 1e-7 --total-steps 100_000'),
  'value-cost': ('values-explain-nothing', f'{PENDULUM} --agent impala --agent.value-cost 0 --total-steps 300_000'),
  'min-size': ('no-gradient-steps', f'{DQN} --agent.buffer.min-size 50_000'),
  'target-period': ('target-never-updated', f'{DQN} --agent.target-period 1_000_000'),
  'value-range': ('values-outside-support', 'd4pg-pendulum --agent.v-min -10 --total-steps 8_000'),
  'value-range-of-muzero': ('agent', 'muzero-catch --agent.network.v-min -0.3 --agent.network.v-max 0.3 --total-steps 12_000'),
  'discount': ('short-sighted', '--env gymnax:MountainCar-v0 --agent ppo --agent.discount 0 --total-steps 300_000'),
  'action-scale': ('outputs-saturated', f'{PENDULUM} --agent ppo --agent.learning-rate 0.1 --agent.max-grad-norm 0 --total-steps 100_000'),
  'one-step-episodes': ('one-step-episodes', f'{PLANTED}one-step {SMALL}'),
  'constant-rewards': ('constant-return', f'{PLANTED}constant {SMALL}'),
  'endless-episodes': ('no-episodes', f'{PLANTED}endless {SMALL}'),
}  # fmt: skip

HEALTHY = {  # name -> options
  'catch': 'catch --total-steps 300_000',
  'cartpole': 'cartpole --total-steps 300_000',
  'minatar-breakout': 'minatar-breakout --total-steps 500_000',
  'memory': 'memory --total-steps 1_000_000',
  'brax-inverted-pendulum': 'brax-inverted-pendulum --total-steps 400_000',
  'snake': 'snake --total-steps 400_000',
  'dqn-cartpole': 'dqn-cartpole --total-steps 100_000',
  'rainbow-minatar': 'rainbow-minatar --total-steps 60_000',
  'r2d2-memory': 'r2d2-memory --total-steps 150_000',
  'sac-pendulum': 'sac-pendulum --total-steps 20_000',
  'sac-brax': 'sac-brax --total-steps 30_000',
  'd4pg-pendulum': 'd4pg-pendulum --total-steps 20_000',
  'muzero-catch': 'muzero-catch --total-steps 30_000',
  'muzero-cartpole': 'muzero-cartpole --total-steps 12_000',
  'muzero-pendulum': 'muzero-pendulum --total-steps 6_000',
  'muzero-tictactoe': 'muzero-tictactoe --total-steps 60_000 --eval-every 0',
  'muesli-catch': 'muesli-catch --total-steps 80_000',
  'muesli-cartpole': 'muesli-cartpole --total-steps 60_000',
  'muesli-minatar': 'muesli-minatar --total-steps 60_000',
  'ppo-catch': 'catch --agent ppo --total-steps 300_000',
  'dqn-catch': '--env podrace:catch --agent dqn --num-envs 16 --unroll-length 4 --total-steps 60_000',
  'r2d2-catch': '--env podrace:catch --agent r2d2 --num-envs 16 --unroll-length 8 --total-steps 60_000',
  'impala-cartpole': '--env gymnax:CartPole-v1 --agent impala --total-steps 400_000',
  'r2d2-cartpole': '--env gymnax:CartPole-v1 --agent r2d2 --total-steps 60_000',
  'ppo-acrobot': '--env gymnax:Acrobot-v1 --agent ppo --total-steps 300_000',
  'dqn-acrobot': '--env gymnax:Acrobot-v1 --agent dqn --total-steps 60_000',
  'ppo-pendulum': f'{PENDULUM} --agent ppo --total-steps 500_000',
  'impala-breakout': '--env gymnax:Breakout-MinAtar --agent impala --total-steps 500_000',
  'ppo-mountain-car': '--env gymnax:MountainCarContinuous-v0 --agent ppo --total-steps 300_000',
  'sac-mountain-car': '--env gymnax:MountainCarContinuous-v0 --agent sac --num-envs 8 --total-steps 20_000 --agent.actor.hidden 64 64 --agent.critic.hidden 64 64',
  'ppo-freeway': '--env gymnax:Freeway-MinAtar --agent ppo --total-steps 300_000',
  'ppo-asterix': '--env gymnax:Asterix-MinAtar --agent ppo --total-steps 300_000',
  'dqn-space-invaders': '--env gymnax:SpaceInvaders-MinAtar --agent dqn --total-steps 40_000',
  'ppo-navix': '--env navix:Navix-Empty-Random-6x6-v0 --agent ppo --total-steps 200_000',
  'catch-seeds': 'catch --seeds 4 --total-steps 200_000',
  'catch-self-tuning': 'catch --agent.self-tuning --total-steps 300_000',
  'sebulba-catch': 'catch --architecture sebulba --total-steps 200_000',
  'sebulba-gymnasium-ppo': '--env gymnasium:CartPole-v1 --agent ppo --total-steps 60_000',
  'sebulba-gymnasium-dqn': '--env gymnasium:CartPole-v1 --agent dqn --total-steps 30_000',
  'sebulba-gymnasium-sac': '--env gymnasium:Pendulum-v1 --agent sac --num-envs 8 --total-steps 10_000 --agent.actor.hidden 64 64 --agent.critic.hidden 64 64',
  'sebulba-envpool-ppo': '--env envpool:CartPole-v1 --agent ppo --total-steps 60_000',
  'sebulba-envpool-impala': '--env envpool:Acrobot-v1 --agent impala --total-steps 60_000',
}  # fmt: skip

LINES = 40  # of metrics, in a run
RUNS = common.ROOT / 'runs' / 'collapse'


def steps_of(words: list[str]) -> int:
  """Returns the value of --total-steps."""
  return int(words[words.index('--total-steps') + 1].replace('_', ''))


def run(name: str, options: str, again: bool) -> dict[str, Any]:
  """Returns the exit code of a run, its signs, its return at the start and the end, and its time."""
  words, run_dir = options.split(), RUNS / name
  words += ['--log-every', str(steps_of(words) // LINES)]
  log, result = RUNS / f'{name}.log', {}
  if not again:
    shutil.rmtree(run_dir, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    log.write_text('')
    start = time.perf_counter()
    process = common.start_podrace(log, 'train', *words, '--run-dir', run_dir, '--quiet')
    code = process.wait()
    result = dict(exit_code=code, seconds=round(time.perf_counter() - start, 1))
    if code:
      result['output'] = log.read_text()[-500:]
  lines = common.metrics(run_dir)
  returns = [x['episode_return'] for x in lines if x.get('episode_return') is not None]
  return result | dict(
    options=options,
    signs=signs_of(run_dir, lines),
    first_return=returns[0] if returns else None,
    last_return=returns[-1] if returns else None,
    lines=len(lines),
  )


def signs_of(run_dir: pathlib.Path, lines: list[dict[str, Any]]) -> dict[str, int]:
  """Returns the signs that this checkout sees in the metrics of a run, and their steps."""
  config = load_config(run_dir, ['planted_envs'])
  diagnostics = Diagnostics(config.agent, config.total_steps)
  for line in lines:
    diagnostics.add(line)
  return {entry['name']: entry['step'] for entry in diagnostics.made}


def main() -> None:
  """Runs the cases, `--jobs` at a time."""
  cases = {**FAILURES, **{name: (None, options) for name, options in HEALTHY.items()}}
  again = (False, 'look again at the metrics of the runs that were made')
  args = common.arguments(__doc__, cases, jobs=(1, 'runs at a time'), again=again)
  before = common.known('collapse') if args.again else {}
  lock, wrong = threading.Lock(), []

  def one(name: str) -> None:
    sign, options = cases[name]
    result = before.get(name, {}) | run(name, options, args.again)
    signs = set(result['signs'])
    good = result['exit_code'] == 0 and (sign in signs if sign else not signs)
    with lock:
      wrong.extend([] if good else [name])
      common.keep('collapse', name, {**result, 'expected': sign, 'as_expected': good}, cases)
      print(f'{name}: {"" if good else "WRONG, "}{result}', flush=True)

  with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
    list(pool.map(one, args.cases))
  print(f'{len(args.cases) - len(wrong)} of {len(args.cases)} cases as expected; wrong: {wrong}')
  raise SystemExit(bool(wrong))


if __name__ == '__main__':
  main()
