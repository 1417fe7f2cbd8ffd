"""The return of `podrace train --env E --agent A` with no other option, beside random play and a published figure.

Writes benchmarks/results/defaults.json after each environment; other cases keep their results. All runs have Config's
million steps, seed 0.
"""

from __future__ import annotations

import shutil
from typing import Any

import common
import jax
import jax.numpy as jnp
from environments import RandomAgent

from podrace import envs
from podrace.architectures import unroll
from podrace.envs.base import batch as batch_of

ZOO = 'PPO of rl-baselines3-zoo (benchmark.md), tuned for the task'
BLINES = 'PPO of gymnax-blines and others, 10M steps'
PEERS: dict[str, tuple[float | None, str]] = {  # a published return, and its source
  'gymnax:Acrobot-v1': (-73.5, f'{ZOO}, 1M steps'),
  'gymnax:Pendulum-v1': (-172.2, f'{ZOO}, 100K steps'),
  'gymnax:MountainCarContinuous-v0': (88.3, f'{ZOO}, 20K steps'),
  'gymnax:Freeway-MinAtar': (58.0, BLINES),
  'gymnax:Asterix-MinAtar': (15.0, BLINES),
  'gymnax:SpaceInvaders-MinAtar': (131.0, BLINES),
  'brax:reacher': (None, 'no figure known to us'),
  'jumanji:Game2048-v1': (None, 'no figure known to us'),
  'navix:Navix-Empty-Random-6x6-v0': (
    0.97, f'{ZOO}, MiniGrid-Empty-Random-5x5, 100K steps; it takes off for time, Navix does not',
  ),
}  # fmt: skip


def random_play(name: str, num_envs: int = 64, steps: int = 2_500) -> dict[str, float]:
  """Returns the mean return of random actions, and how many episodes ended."""
  env = envs.make(name)
  agent, many = RandomAgent(env.action_space), batch_of(env, num_envs)

  def play(key: Any) -> Any:
    begin_key, unroll_key = jax.random.split(key)
    state = unroll.begin(agent, many, jnp.arange(num_envs), begin_key)
    return unroll.pooled(unroll.unroll(agent, many, (), state, unroll_key, steps)[0].episodes)

  pooled = jax.device_get(jax.jit(play)(jax.random.key(0)))
  episodes = int(pooled['episodes'])
  return dict(episode_return=float(pooled['return_sum']) / max(episodes, 1), episodes=episodes)


def train(name: str, agent: str, *options: Any) -> dict[str, Any]:
  """Trains with the two names only, and evaluates."""
  run_dir = common.ROOT / 'runs' / 'defaults' / agent / name.replace(':', '-')
  shutil.rmtree(run_dir, ignore_errors=True)
  common.podrace('train', '--env', name, '--agent', agent, '--run-dir', run_dir, '--quiet', *options)  # fmt: skip
  return dict(
    origin=common.origin(),
    greedy=common.evaluate_run(run_dir, '--episodes', 100),
    sampled=common.evaluate_run(run_dir, '--episodes', 100, '--sample'),
    summary=common.summary_of(run_dir),
    curve=[[x['step'], x['episode_return']] for x in common.metrics(run_dir) if x['episodes']],
  )


def main() -> None:
  args = common.arguments(__doc__, PEERS, agent='ppo', steps=(0, 'fewer steps than the default'))
  for name in args.cases:
    result = train(name, args.agent, *(('--total-steps', args.steps) if args.steps else ()))
    published, source = PEERS[name]
    mean = result['sampled']['episode_return_mean']
    print(f'{name}: {mean:.2f} sampled, published {published}', flush=True)
    entry = common.known('defaults').get(name, {}) | {'random': random_play(name), args.agent: result}  # fmt: skip
    entry['published'] = dict(episode_return=published, of=source)
    common.keep('defaults', name, entry, PEERS)


if __name__ == '__main__':
  main()
