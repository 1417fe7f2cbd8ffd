"""What `podrace train --env E --agent A` reaches with nothing else, beside random play and a peer's figure.

    python benchmarks/defaults.py [--agent A] [ENV ...]

Writes benchmarks/results/defaults.json after each; what is not run keeps what the file has of it. All runs
have Config's million steps, seed 0.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import RESULTS, origin, record
from gymnasium import spaces

from podrace import envs
from podrace.architectures import unroll
from podrace.envs.base import batch as batch_of
from podrace.types import ActorOutput

ROOT = Path(__file__).parent.parent
ZOO = 'PPO of rl-baselines3-zoo (benchmark.md), tuned for the task'
BLINES = 'PPO of gymnax-blines and others, 10M steps'
PEERS: dict[str, tuple[float | None, str]] = {  # a published return, and whose it is
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


class Random:
  """An agent that acts uniformly at random, among what an action mask allows."""

  def __init__(self, env: Any) -> None:
    self.space = env.action_space

  def initial_state(self, env_id: Any) -> Any:
    return ()

  def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
    shape = timestep.reward.shape
    if isinstance(self.space, spaces.Box):
      low, high = jnp.asarray(self.space.low), jnp.asarray(self.space.high)
      u = jax.random.uniform(key, shape + self.space.shape)
      return ActorOutput(low[None] + u * (high - low)[None]), state
    seen = timestep.observation
    masked = isinstance(seen, dict) and 'action_mask' in seen
    allowed = seen['action_mask'] if masked else jnp.ones((*shape, self.space.n))
    return ActorOutput(jax.random.categorical(key, jnp.log(allowed.astype(jnp.float32)))), state


def random_play(name: str, num_envs: int = 64, steps: int = 2_500) -> dict[str, float]:
  """The mean return of random actions, and how many episodes ended."""
  env = envs.make(name)
  agent = Random(env)

  def play(key: Any) -> Any:
    begin_key, unroll_key = jax.random.split(key)
    batch = batch_of(env, num_envs)
    state = unroll.begin(agent, batch, jnp.arange(num_envs), begin_key)
    return unroll.pooled(unroll.unroll(agent, batch, (), state, unroll_key, steps)[0].episodes)

  found = jax.device_get(jax.jit(play)(jax.random.key(0)))
  episodes = int(found['episodes'])
  return dict(episode_return=float(found['return_sum']) / max(episodes, 1), episodes=episodes)


def podrace(*args: str) -> str:
  """What a command prints."""
  command = [str(Path(sys.executable).parent / 'podrace'), *args]
  return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def train(name: str, agent: str) -> dict[str, Any]:
  """Trains and evaluates with nothing but the two names."""
  run_dir = ROOT / 'runs' / 'defaults' / agent / name.replace(':', '-')
  shutil.rmtree(run_dir, ignore_errors=True)
  podrace('train', '--env', name, '--agent', agent, '--run-dir', str(run_dir), '--quiet')
  greedy, sampled = (
    json.loads(podrace('eval', str(run_dir), '--episodes', '100', *more).splitlines()[-1])
    for more in ((), ('--sample',))
  )
  summary = json.loads((run_dir / 'summary.json').read_text())
  lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
  return {
    'origin': origin(),
    'greedy': greedy,
    'sampled': sampled,
    'summary': summary,
    'curve': [[x['step'], x['episode_return']] for x in lines if x['episodes']],
  }


def keep(name: str, agent: str, result: dict[str, Any]) -> None:
  """Records a result beside those that there are."""
  path = RESULTS / 'defaults.json'
  known = json.loads(path.read_text())['results'] if path.exists() else {}
  published, whose = PEERS[name]
  entry = known.get(name, {}) | {'random': random_play(name), agent: result}
  entry['published'] = {'episode_return': published, 'of': whose}
  known[name] = entry
  record('defaults', {name: known[name] for name in PEERS if name in known})


def main() -> None:
  """Runs the environments that are named, or all."""
  args = sys.argv[1:]
  agent = 'ppo'
  if args[:1] == ['--agent']:
    agent, args = args[1], args[2:]
  if unknown := [name for name in args if name not in PEERS]:
    sys.exit(f'nothing is known of {", ".join(unknown)}, only of {", ".join(PEERS)}')
  for name in args or PEERS:
    result = train(name, agent)
    reached = result['sampled']['episode_return_mean']
    print(f'{name}: {reached:.2f} sampled, published {PEERS[name][0]}', flush=True)
    keep(name, agent, result)


if __name__ == '__main__':
  main()
