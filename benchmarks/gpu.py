"""PPO CartPole, the Podracer setting and the environments on an accelerator, 4,096 to 65,536 wide; and MuZero.

The podrace side of ppo_cartpole.py, catch_podracer.py and environments.py, on all devices there
are. MuZero trains on MinAtar Breakout under Anakin, with its default settings, and acts on Pong under Sebulba, as in
planning_speed.py. Ends with an error where JAX sees none but the CPU.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import catch_podracer
import common
import environments
import planning_speed
import ppo_cartpole

SIZES = (4_096, 16_384, 65_536)
PLANNING_SIZES = (64, 256, 1_024)  # environments of MuZero
ENVIRONMENTS = (  # those that are light enough on memory for all sizes
  'podrace:catch',
  'gymnax:CartPole-v1',
  'gymnax:Breakout-MinAtar',
  'brax:ant',
  'jumanji:Snake-v1',
  'navix:Navix-Empty-8x8-v0',
  'craftax:Craftax-Classic-Symbolic-v1',
)


def cartpole(num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of the PPO of ppo_cartpole.py."""
  from podrace import envs

  config = dict(ppo_cartpole.STEADY, num_envs=num_envs)
  env = envs.make(f'gymnax:{config["env"]}')
  agent = common.bind(ppo_cartpole.agent(config), env, 0)
  run = common.start(agent, env, num_envs, config['unroll_length'])
  updates = common.updates_for(run.seconds, seconds)
  rates = [updates * run.steps_per_update / run.seconds(updates) for _ in range(repeats)]
  result = dict(steps_per_s=common.summary(rates), compile_s=run.compile_s)
  print(f'ppo-cartpole x {num_envs}: {result["steps_per_s"]["median"]:,.0f} steps/s', flush=True)
  return result


def muzero(num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of MuZero's training on MinAtar Breakout, once replay is full enough to learn from."""
  import podrace
  from podrace import envs
  from podrace.config import bind

  config = podrace.configure(env='gymnax:Breakout-MinAtar', agent='muzero')
  env, length = envs.make(config.env), config.unroll_length
  run = common.start(bind(config.agent, env, 100, num_envs), env, num_envs, length)
  run.seconds(run.runner.replay.windows.schedule.ready + 1)
  updates = common.updates_for(run.seconds, seconds)
  rates = [updates * run.steps_per_update / run.seconds(updates) for _ in range(repeats)]
  result = dict(steps_per_s=common.summary(rates), compile_s=run.compile_s)
  print(f'muzero-minatar x {num_envs}: {result["steps_per_s"]["median"]:,.0f} steps/s', flush=True)
  return result


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--seconds', type=float, default=2.0, help='about how long a run is')
  args = parser.parse_args()
  import jax

  if jax.default_backend() == 'cpu':
    sys.exit(
      'no accelerator: JAX sees only the CPU. Install JAX for yours '
      "(pip install 'jax[cuda13]') and look at `python -c 'import jax; print(jax.devices())'`"
    )
  results: dict[str, Any] = dict(ppo_cartpole={}, catch_podracer={})
  for n in SIZES:
    results['ppo_cartpole'][n] = cartpole(n, args.repeats, args.seconds)
  for n in SIZES:
    results['catch_podracer'][n] = catch_podracer.measure_all(n, args.repeats)
  results['environments'] = environments.measure_all(
    ENVIRONMENTS, SIZES, args.repeats, args.seconds
  )
  results['muzero_minatar'] = {n: muzero(n, args.repeats, args.seconds) for n in PLANNING_SIZES}
  results['muzero_pong'] = planning_speed.pong(args.repeats, args.seconds)
  common.record('gpu', results)


if __name__ == '__main__':
  main()
