"""Rewards that are learned over lifetimes, against policies that learn from the rewards of the world.

    python benchmarks/learned_rewards.py [CASE ...] [--seeds N] [--updates N]
    python benchmarks/learned_rewards.py picture

`NAME, without memory` has a reward that knows the newest step only, and `NAME, by episode` one that is learned from
returns that end with the episode.

Each case learns a reward in a small form of a world of Zheng et al. 2020 (arXiv 1912.05500), from N seeds one after the
other. It keeps the reward at the end of that twentieth of the training in which episodes gave the most, as it is, for 64 new
lifetimes of policies that begin as nothing. Against it, in 64 lifetimes with the same tasks: the same policies with the
reward of the world; with it and a bonus for places that were seldom visited, b / sqrt(n) (Strehl and Littman 2008); and
an advantage actor-critic (IMPALA with one environment, a table, unrolls of 8 steps) with the reward of the world.
These three have the settings, of a grid, that give the most in 64 other lifetimes; the grids are in the result. The
learned reward's policies have the settings that it was learned with, which were chosen by a few short runs. Intervals are of 95%, by the bootstrap over lifetimes; of several seeds, over the
lifetimes of all. Writes benchmarks/results/learned_rewards.json after each case; what is not run keeps what the file
has.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, ROOT, machine, origin, record

from podrace import topology
from podrace.agents.impala import Impala
from podrace.agents.intrinsic import Intrinsic, IntrinsicParams
from podrace.agents.population import with_values
from podrace.architectures import unroll as actor
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.envs.base import batch
from podrace.networks import ActorCritic, LifetimeNetwork
from podrace.replay import on_policy
from podrace.settings.agents import bind
from podrace.types import FIRST, LAST, Sample

LIVES, ENVS, A2C_UNROLL = 64, 64, 8


@dataclasses.dataclass(frozen=True)
class Case:
  """A world, and the settings that its reward is learned with."""

  world: str  # without the length of a lifetime
  episodes: int  # of a lifetime
  steps: int  # of an episode, at most
  updates: int
  period: int = 0  # episodes between swaps
  unroll: int = 64
  settings: Any = dataclasses.field(default_factory=dict)
  with_others: bool = True  # whether what it is compared with is run as well

  def env(self, episodes: int) -> Any:
    return make(f'podrace:{self.world},steps={self.steps},episodes={episodes}')


CASES = {
  'empty_rooms': Case('empty_rooms,size=7', 50, 30, 1500),
  'nonstationary_abc': Case(
    'nonstationary_abc,period=40',
    160,
    20,
    1200,
    period=40,
    unroll=256,
    settings=dict(policy_learning_rate=30.0, policy_entropy_cost=0.3, learning_rate=5e-4),
  ),
  'random_abc': Case('random_abc', 50, 20, 2000),
  'key_box': Case('key_box', 50, 30, 2000),
}
for _name in ('empty_rooms', 'nonstationary_abc', 'random_abc', 'key_box'):
  for _what, _changed in (
    ('without memory', dict(reward=LifetimeNetwork(core='none'))),
    ('by episode', dict(objective='episode')),
  ):
    _case = CASES[_name]
    CASES[f'{_name}, {_what}'] = dataclasses.replace(
      _case, settings=_case.settings | _changed, with_others=False
    )
GRID = dict(
  policy_learning_rate=(5.0, 20.0, 60.0, 200.0),
  policy_entropy_cost=(0.01, 0.05, 0.2),
  policy_discount=(0.9, 0.97),
)
BONUS = (0.05, 0.2, 1.0)
A2C_GRID = dict(
  learning_rate=(0.01, 0.03, 0.1, 0.3), entropy_cost=(0.01, 0.05, 0.2), discount=(0.9, 0.97)
)


class Lived(NamedTuple):
  """Lifetimes as numpy arrays, episode by episode: [lives, episodes]."""

  returns: np.ndarray
  lengths: np.ndarray


# --- rewards that nobody learns -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World(LifetimeNetwork):
  """The reward of the world, and a bonus for seldom visited places; halved, for the tanh that follows."""

  bonus: Any = 0.0

  def init(self, key: Any) -> Any:
    return ()

  def initial_state(self, batch_size: int) -> Any:
    return jnp.zeros([batch_size, *self.observation_space.shape])

  def recall(self, params: Any, state: Any, timesteps: Any, action: Any, begins: Any) -> Any:
    def visit(count: Any, t: Any) -> Any:
      count = count + t.observation
      n = jnp.sum(count * t.observation, axis=-1)
      return count, 0.5 * (t.reward + self.bonus / jnp.sqrt(n))

    state, found = jax.lax.scan(visit, state, timesteps)
    return jnp.arctanh(jnp.clip(found, -0.999, 0.999)), state


# --- lifetimes ------------------------------------------------------------------------------------------


def learned(case: Case, seed: int, updates: int) -> tuple[Any, Any, dict[str, Any]]:
  """A reward: (agent, parameters, how it was learned)."""
  env = case.env(case.episodes)
  agent = bind(Intrinsic(**case.settings), env)
  program = Anakin(agent, env, on_policy(), topology.learner_mesh(1), ENVS, case.unroll)
  state = program.init(jnp.stack([jax.random.key(seed)]))
  began, run = time.process_time(), program.run.lower(program.shapes, jnp.int32(1)).compile()
  compiled, curve, chunk = time.process_time() - began, [], max(1, updates // 20)
  best, params = -np.inf, None
  began = time.process_time()
  for done in range(chunk, updates + 1, chunk):
    log, state = program.read_log(run(state, jnp.int32(chunk)))
    curve.append((done * ENVS * case.unroll, float(log['return_sum'] / log['episodes'])))
    if curve[-1][1] > best:
      best, params = curve[-1][1], jax.tree.map(np.array, state.train.params)
    print(seed, curve[-1], f'{time.process_time() - began:.0f} s of CPU', flush=True)
  told = dict(
    seed=seed, curve=curve, compile_cpu_s=compiled, cpu_s=time.process_time() - began,
    steps=updates * ENVS * case.unroll, lifetimes=ENVS,
  )  # fmt: skip
  if params is None:
    raise SystemExit('no episode ended: more steps for each twentieth of the updates')
  return agent, params, told


def of_policies(case: Case, agent: Any, params: Any, keys: Any, env_id: Any) -> Any:
  """The trajectory [T, lives] of lifetimes without end; policies learn as they act."""
  env = case.env(0)
  many = batch(env, env_id.shape[0])
  state = actor.begin(agent, many, env_id, keys[0])
  length = case.episodes * (case.steps + 1)
  return actor.unroll(agent, many, params, state, keys[1], length)[1]


def of_actor_critic(case: Case, agent: Any, key: Any) -> Any:
  """(rewards, types of timesteps) [T] of one lifetime, in which an agent learns from one environment."""
  many = batch(case.env(0), 1)
  begin_key, init_key, run_key = jax.random.split(key, 3)
  state = actor.begin(agent, many, jnp.zeros(1, jnp.int32), begin_key)
  one = jnp.ones(1)

  def update(carry: Any, key: Any) -> Any:
    train, state = carry
    state, trajectory = actor.unroll(agent, many, train.params, state, key, A2C_UNROLL)
    learn = jax.vmap(
      lambda train, x: agent.learn(train, Sample(x, one, one), key)[0], axis_name=topology.AXIS
    )
    alone = jax.tree.map(lambda x: x[None], (train, trajectory))
    train = jax.tree.map(lambda x: x[0], learn(*alone))
    seen = trajectory.timesteps
    return (train, state), (seen.reward[:-1, 0], seen.step_type[:-1, 0])

  updates = -(-case.episodes * (case.steps + 1) // A2C_UNROLL)
  carry = agent.init(init_key), state
  _, found = jax.lax.scan(update, carry, jax.random.split(run_key, updates))
  return jax.tree.map(lambda x: x.reshape(-1), found)


def by_episode(reward: Any, step_type: Any, episodes: int) -> Lived:
  """From [T, lives] to episodes; all have at least so many."""
  reward, kind = np.asarray(reward, np.float64), np.asarray(step_type)
  number = np.cumsum(kind == FIRST, axis=0) - 1
  counts = number < episodes
  returns, lengths = np.zeros((2, kind.shape[1], episodes))
  lives = np.broadcast_to(np.arange(kind.shape[1]), kind.shape)
  np.add.at(returns, (lives[counts], number[counts]), reward[counts])
  np.add.at(lengths, (lives[counts], number[counts]), 1.0 * (kind[counts] != FIRST))
  return Lived(returns, lengths)


def settings_of(grid: dict[str, tuple[float, ...]]) -> dict[str, np.ndarray]:
  """All combinations, [settings] each."""
  rows = np.array(list(itertools.product(*grid.values())), np.float32)
  return {name: rows[:, i] for i, name in enumerate(grid)}


def tuned(case: Case, run: Any, grid: dict[str, tuple[float, ...]]) -> tuple[Lived, dict[str, Any]]:
  """Lifetimes with the best setting of a grid; `run(values, key) -> (rewards, types)` [T, lives].

  The best is that of other lifetimes.
  """
  values = settings_of(grid)
  step = jax.jit(lambda values, key: jax.lax.map(lambda v: run(v, key), values))
  found = step(values, jax.random.key(1))
  each = [by_episode(*x, case.episodes).returns.mean() for x in zip(*found, strict=True)]
  best = {name: x[[int(np.argmax(each))]] for name, x in values.items()}
  rewards, types = step(best, jax.random.key(2))
  told = dict(
    settings={k: float(x[0]) for k, x in best.items()}, grid={k: list(v) for k, v in grid.items()}
  )
  return by_episode(rewards[0], types[0], case.episodes), told


def baselines(case: Case) -> dict[str, tuple[Lived, dict[str, Any]]]:
  env, env_id = case.env(0), jnp.arange(LIVES, dtype=jnp.int32) + 1000
  plain = bind(Intrinsic(reward=World()), env)
  params = IntrinsicParams((), plain.value.init(jax.random.key(0)))  # whose values nobody asks for

  def of_world(values: Any, key: Any) -> Any:
    agent = with_values(plain, values)
    x = of_policies(case, agent, params, jax.random.split(key), env_id)
    return x.timesteps.reward, x.timesteps.step_type

  critic = bind(Impala(ActorCritic(hidden=(), shared=False), max_grad_norm=1.0), env)

  def a2c(values: Any, key: Any) -> Any:
    agent = with_values(critic, values)
    each = jax.vmap(functools.partial(of_actor_critic, case, agent), out_axes=1)
    return each(jax.random.split(key, LIVES))

  found = {}
  for name, run, grid in (
    ('extrinsic', of_world, GRID),
    ('count bonus', of_world, GRID | {'reward.bonus': BONUS}),
    ('extrinsic, actor-critic', a2c, A2C_GRID),
  ):
    began = time.process_time()
    found[name] = tuned(case, run, grid)
    print(name, round(found[name][0].returns.mean(), 3), found[name][1]['settings'],
          f'{time.process_time() - began:.0f} s of CPU', flush=True)  # fmt: skip
  return found


# --- what is said of them -------------------------------------------------------------------------------


def interval(x: np.ndarray) -> dict[str, float]:
  """The mean of numbers [lives], and the bootstrap's 95%."""
  rng = np.random.default_rng(0)
  means = rng.choice(x, (2000, len(x))).mean(axis=1)
  low, high = np.quantile(means, [0.025, 0.975])
  return dict(mean=float(x.mean()), low=float(low), high=float(high))


def summary(case: Case, lived: Lived) -> dict[str, Any]:
  """Of lifetimes: the return of all episodes, and what shows exploration, exploitation and recovery."""
  r = lived.returns
  told: dict[str, Any] = dict(
    lifetime=interval(r.mean(axis=1)),
    last_quarter=interval(r[:, -r.shape[1] // 4 :].mean(axis=1)),
    by_episode=r.mean(axis=0).round(4).tolist(),
    lives=len(r),
  )
  if 'rooms' in case.world:
    found = r > 0
    first = np.where(found.any(axis=1), found.argmax(axis=1), r.shape[1])
    told['episodes_until_found'] = interval(first.astype(float))
    told['never_found'] = float((~found.any(axis=1)).mean())
    after = [found[i, n + 1 :].mean() for i, n in enumerate(first) if n + 1 < r.shape[1]]
    told['found_again'] = interval(np.array(after))
  if case.period:
    swaps = range(case.period, case.episodes, case.period)
    window = case.period // 4
    told['before_swaps'] = interval(np.mean([r[:, s - window : s].mean(1) for s in swaps], axis=0))
    told['after_swaps'] = interval(np.mean([r[:, s : s + window].mean(1) for s in swaps], axis=0))
    told['episodes_to_recover'] = recovery(r, swaps, case.period)
  return told


def recovery(r: np.ndarray, swaps: Any, period: int) -> dict[str, float]:
  """Episodes after a swap until three in a row give 1; the whole period if that never comes."""

  def one(row: np.ndarray) -> int:
    three = np.convolve(row > 0, np.ones(3), 'valid') == 3
    return int(three.argmax()) if three.any() else period

  return interval(np.array([np.mean([one(row[s : s + period]) for s in swaps]) for row in r]))


def shown(case: Case, agent: Any, params: Any, trajectory: Any) -> dict[str, Any]:
  """Of the learned reward, for the picture: by episode, the mean over lifetimes."""
  _, raw, _, _, entropy = jax.jit(agent.relive)(params, trajectory)
  intrinsic = jnp.tanh(raw)
  kind = trajectory.timesteps.step_type[:-1]
  of_reward = by_episode(jnp.where(kind == FIRST, 0.0, intrinsic[:-1]), kind, case.episodes)
  of_entropy = by_episode(jnp.where(kind == LAST, 0.0, entropy), kind, case.episodes)
  steps = np.maximum(of_reward.lengths, 1)
  return dict(
    intrinsic=(of_reward.returns / steps).mean(0).round(4).tolist(),
    entropy=(of_entropy.returns / steps).mean(0).round(4).tolist(),
  )


def run(name: str, seeds: int, updates: int) -> dict[str, Any]:
  case = CASES[name]
  updates = updates or case.updates
  env_id = jnp.arange(LIVES, dtype=jnp.int32) + 1000
  learning, every, shows = [], [], []
  for seed in range(seeds):
    agent, params, told = learned(case, seed, updates)
    agent = dataclasses.replace(agent, environment=case.env(0))
    act = jax.jit(lambda p, keys, agent=agent: of_policies(case, agent, p, keys, env_id))
    x = act(params, jax.random.split(jax.random.key(2)))
    kept = jax.tree.map(lambda y: y[:-1], (x.timesteps.reward, x.timesteps.step_type))
    lived = by_episode(*kept, case.episodes)
    told['lifetime'] = interval(lived.returns.mean(axis=1))
    print(name, seed, 'learned', told['lifetime'], flush=True)
    learning.append(told)
    every.append(lived)
    shows.append(shown(case, agent, params, x))
  whole = Lived(*(np.concatenate(y) for y in zip(*every, strict=True)))
  sizes = (
    dataclasses.asdict(case)
    | dict(settings=str(case.settings))
    | dict(updates=updates, environments=ENVS)
  )
  found = {'learned': summary(case, whole) | dict(seeds=learning, shows=shows)}
  for other, (lived, told) in baselines(case).items() if case.with_others else ():
    found[other] = summary(case, lived) | told
  return dict(sizes=sizes, **origin(), machine=machine(), agents=found)


def picture() -> None:
  """The learned reward over a lifetime, before and after the world changes."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot as plt

  results = json.loads((RESULTS / 'learned_rewards.json').read_text())['results']
  names = [name for name in ('empty_rooms', 'nonstationary_abc') if name in results]
  figure, axes = plt.subplots(
    2, len(names), figsize=(5 * len(names), 5), sharex='col', squeeze=False
  )
  for (top, bottom), name in zip(axes.T, names, strict=True):
    found = results[name]['agents']
    for agent, told in found.items():
      x = np.array(told['by_episode'])
      width = max(1, len(x) // 40)
      smooth = np.convolve(x, np.ones(width) / width, 'valid')
      top.plot(
        np.arange(len(smooth)) + width / 2,
        smooth,
        label=agent,
        lw=1.8 if agent == 'learned' else 1.2,
      )
    for i, show in enumerate(found['learned']['shows']):
      label = ('learned reward of a step', "the policy's entropy") if not i else (None, None)
      bottom.plot(show['intrinsic'], color='C0', lw=1, label=label[0])
      bottom.plot(show['entropy'], color='C4', lw=1, ls=':', label=label[1])
    period = results[name]['sizes']['period']
    for axis in (top, bottom):
      for swap in range(period, len(x), period) if period else ():
        axis.axvline(swap, color='0.8', lw=1, zorder=0)
      axis.legend(fontsize=7)
    top.set(title=name, ylabel='return of an episode')
    bottom.set(xlabel='episode of the lifetime')
  figure.tight_layout()
  figure.savefig(ROOT / 'docs' / 'learned_rewards.png', dpi=110)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('cases', nargs='*', default=['empty_rooms', 'nonstationary_abc'])
  parser.add_argument('--seeds', type=int, default=10)
  parser.add_argument('--updates', type=int, default=0)
  args = parser.parse_args()
  if args.cases == ['picture']:
    picture()
    return
  path = RESULTS / 'learned_rewards.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}
  for name in args.cases:
    results[name] = run(name, args.seeds, args.updates)
    record('learned_rewards', results)


if __name__ == '__main__':
  main()
