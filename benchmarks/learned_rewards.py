"""Rewards that are learned over lifetimes, against policies that learn from the rewards of the world.

`NAME, without memory` has a reward that knows the newest step only, and `NAME, by episode` one that is learned from
returns that end with the episode. --draw draws docs/learned_rewards.png and does nothing else.

Each case learns a reward in a small form of a world of Zheng et al. 2020 (arXiv 1912.05500), from N seeds one after the
other. It keeps the reward at the end of that twentieth of the training in which episodes gave the most, as it is, for 64
new lifetimes of policies that begin as nothing. Against it, in 64 lifetimes with the same tasks: the same policies with the
reward of the world; with it and a bonus for places that were seldom visited, b / sqrt(n) (Strehl and Littman 2008); and an
advantage actor-critic (IMPALA with one environment, a table, unrolls of 8 steps) with the reward of the world. These three
have the settings, of a grid, that give the most in 64 other lifetimes; the grids are in the result. The learned reward's
policies have the settings that it was learned with, which were chosen by a few short runs. Intervals are of 95%, by the
bootstrap: over the seeds of a learned reward, else over lifetimes. Writes benchmarks/results/learned_rewards.json after
each case; cases that are not run keep their results.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import timing

from podrace import topology
from podrace.agents.impala import Impala
from podrace.agents.intrinsic import Intrinsic, IntrinsicParams
from podrace.agents.population import with_values
from podrace.architectures import unroll as actor
from podrace.envs import make
from podrace.envs.base import batch
from podrace.experiments import statistics
from podrace.networks import ActorCritic, LifetimeNetwork
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
  with_baselines: bool = True

  def env(self, episodes: int) -> Any:
    return make(f'podrace:{self.world},steps={self.steps},episodes={episodes}')


WORLDS = {
  'empty_rooms': Case('empty_rooms,size=7', 50, 30, 1500),
  'nonstationary_abc': Case(
    'nonstationary_abc,period=40', 160, 20, 1200, period=40, unroll=256,
    settings=dict(policy_learning_rate=30.0, policy_entropy_cost=0.3, learning_rate=5e-4),
  ),
  'random_abc': Case('random_abc', 50, 20, 2000),
  'key_box': Case('key_box', 50, 30, 2000),
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
  'without memory': dict(reward=LifetimeNetwork(core='none')),
  'by episode': dict(objective='episode'),
}
CASES = WORLDS | {
  f'{name}, {change}': dataclasses.replace(case, settings=case.settings | settings, with_baselines=False)
  for name, case in WORLDS.items() for change, settings in CHANGES.items()
}  # fmt: skip
DISCOUNT = (0.9, 0.97)
GRID = dict(
  policy_learning_rate=(5.0, 20.0, 60.0, 200.0), policy_entropy_cost=(0.01, 0.05, 0.2), policy_discount=DISCOUNT,
)  # fmt: skip
BONUS = {'reward.bonus': (0.05, 0.2, 1.0)}
A2C_GRID = dict(learning_rate=(0.01, 0.03, 0.1, 0.3), entropy_cost=(0.01, 0.05, 0.2), discount=DISCOUNT)  # fmt: skip


class Lived(NamedTuple):
  """Lifetimes as numpy arrays, episode by episode: [lives, episodes]."""

  returns: np.ndarray
  lengths: np.ndarray


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

    state, reward = jax.lax.scan(visit, state, timesteps)
    return jnp.arctanh(jnp.clip(reward, -0.999, 0.999)), state


def learn(case: Case, seed: int, updates: int) -> tuple[Any, Any, dict[str, Any]]:
  """Learns a reward; returns the agent, its parameters, and figures of the training."""
  begin = time.process_time()
  run = timing.start(Intrinsic(**case.settings), case.env(case.episodes), ENVS, case.unroll)
  compiled = time.process_time() - begin
  run.reset(seed)
  curve, best, params, chunk = [], -np.inf, None, max(1, updates // 20)
  begin = time.process_time()
  for done in range(chunk, updates + 1, chunk):
    log, run.state = run.runner.read_log(run.run(run.state, jnp.int32(chunk)))
    curve.append((done * ENVS * case.unroll, float(log['return_sum'] / log['episodes'])))
    if curve[-1][1] > best:
      best, params = curve[-1][1], jax.tree.map(np.array, run.state.train.params)
    print(seed, curve[-1], f'{time.process_time() - begin:.0f} s of CPU', flush=True)
  if params is None:
    raise SystemExit('no episode ended: more steps for each twentieth of the updates')
  figures = dict(
    seed=seed, curve=curve, compile_cpu_s=compiled, cpu_s=time.process_time() - begin,
    steps=updates * ENVS * case.unroll, lifetimes=ENVS,
  )  # fmt: skip
  return run.runner.agent, params, figures


def of_policies(case: Case, agent: Any, params: Any, keys: Any, env_id: Any) -> Any:
  """Returns the trajectory [T, lives] of lifetimes without end; policies learn as they act."""
  env = case.env(0)
  many = batch(env, env_id.shape[0])
  state = actor.begin(agent, many, env_id, keys[0])
  length = case.episodes * (case.steps + 1)
  return actor.unroll(agent, many, params, state, keys[1], length)[1]


def of_actor_critic(case: Case, agent: Any, key: Any) -> Any:
  """Returns rewards and types of timesteps [T] of a lifetime in which an agent learns from one environment."""
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
  _, parts = jax.lax.scan(update, carry, jax.random.split(run_key, updates))
  return jax.tree.map(lambda x: x.reshape(-1), parts)


def by_episode(reward: Any, step_type: Any, episodes: int) -> Lived:
  """Turns [T, lives] into episodes, of which each life has at least that many."""
  reward, kind = np.asarray(reward, np.float64), np.asarray(step_type)
  number = np.cumsum(kind == FIRST, axis=0) - 1
  counts = number < episodes
  returns, lengths = np.zeros((2, kind.shape[1], episodes))
  lives = np.broadcast_to(np.arange(kind.shape[1]), kind.shape)
  np.add.at(returns, (lives[counts], number[counts]), reward[counts])
  np.add.at(lengths, (lives[counts], number[counts]), 1.0 * (kind[counts] != FIRST))
  return Lived(returns, lengths)


def combinations(grid: dict[str, tuple[float, ...]]) -> dict[str, np.ndarray]:
  """Returns all combinations of the values of a grid, [settings] each."""
  rows = np.array(list(itertools.product(*grid.values())), np.float32)
  return {name: rows[:, i] for i, name in enumerate(grid)}


def tune(case: Case, run: Any, grid: dict[str, tuple[float, ...]]) -> tuple[Lived, dict[str, Any]]:
  """Returns lifetimes with that setting of a grid which is the best in other lifetimes.

  `run(values, key)` returns rewards and types [T, lives].
  """
  values = combinations(grid)
  step = jax.jit(lambda values, key: jax.lax.map(lambda v: run(v, key), values))
  sums = step(values, jax.random.key(1))
  each = [by_episode(*x, case.episodes).returns.mean() for x in zip(*sums, strict=True)]
  best = {name: x[[int(np.argmax(each))]] for name, x in values.items()}
  rewards, types = step(best, jax.random.key(2))
  settings = {k: float(x[0]) for k, x in best.items()}
  return by_episode(rewards[0], types[0], case.episodes), dict(settings=settings, grid=grid)


def baselines(case: Case) -> dict[str, tuple[Lived, dict[str, Any]]]:
  env, env_id = case.env(0), jnp.arange(LIVES, dtype=jnp.int32) + 1000
  plain = bind(Intrinsic(reward=World()), env)
  params = IntrinsicParams((), plain.value.init(jax.random.key(0)))  # its values are not used

  def of_world(values: Any, key: Any) -> Any:
    agent = with_values(plain, values)
    x = of_policies(case, agent, params, jax.random.split(key), env_id)
    return x.timesteps.reward, x.timesteps.step_type

  critic = bind(Impala(ActorCritic(hidden=(), shared=False), max_grad_norm=1.0), env)

  def a2c(values: Any, key: Any) -> Any:
    agent = with_values(critic, values)
    each = jax.vmap(functools.partial(of_actor_critic, case, agent), out_axes=1)
    return each(jax.random.split(key, LIVES))

  lives = {}
  for name, run, grid in (
    ('extrinsic', of_world, GRID),
    ('count bonus', of_world, GRID | BONUS),
    ('extrinsic, actor-critic', a2c, A2C_GRID),
  ):
    lives[name] = tune(case, run, grid)
    print(name, round(lives[name][0].returns.mean(), 3), lives[name][1]['settings'], flush=True)
  return lives


def interval(x: np.ndarray, seeds: int = 1) -> dict[str, Any]:
  """Returns the mean of numbers [lives], and the bootstrap's 95%: over seeds, as lifetimes share their reward."""
  of_seed = np.nanmean(x.reshape(seeds, -1), axis=1)
  each = of_seed if seeds > 1 else x[np.isfinite(x)]
  low, high = statistics.interval(statistics.mean, [each])
  by_seed = dict(by_seed=of_seed.round(4).tolist()) if seeds > 1 else {}
  return dict(mean=float(np.nanmean(x)), low=float(low), high=float(high), **by_seed)


def summarize(case: Case, lived: Lived, seeds: int = 1) -> dict[str, Any]:
  """Returns the return of all episodes, and figures of exploration, exploitation and recovery."""
  r, over = lived.returns, functools.partial(interval, seeds=seeds)
  result: dict[str, Any] = dict(
    lifetime=over(r.mean(axis=1)),
    last_quarter=over(r[:, -r.shape[1] // 4 :].mean(axis=1)),
    by_episode=r.mean(axis=0).round(4).tolist(),
    lives=len(r),
  )
  if 'rooms' in case.world:
    is_found = r > 0
    first = np.where(is_found.any(axis=1), is_found.argmax(axis=1), r.shape[1])
    result['episodes_until_found'] = over(first.astype(float))
    result['never_found'] = float((~is_found.any(axis=1)).mean())
    after = [is_found[i, n + 1 :] for i, n in enumerate(first)]
    result['found_again'] = over(np.array([x.mean() if x.size else np.nan for x in after]))
  if case.period:
    swaps = range(case.period, case.episodes, case.period)
    window = case.period // 4
    result['before_swaps'] = over(np.mean([r[:, s - window : s].mean(1) for s in swaps], axis=0))
    result['after_swaps'] = over(np.mean([r[:, s : s + window].mean(1) for s in swaps], axis=0))
    result['episodes_to_recover'] = over(recovery(r, swaps, case.period))
  return result


def recovery(r: np.ndarray, swaps: Any, period: int) -> np.ndarray:
  """Returns the episodes [lives] after a swap until three in a row give 1; the whole period if that never comes."""

  def one(row: np.ndarray) -> int:
    three = np.convolve(row > 0, np.ones(3), 'valid') == 3
    return int(three.argmax()) if three.any() else period

  return np.array([np.mean([one(row[s : s + period]) for s in swaps]) for row in r])


def show(case: Case, agent: Any, params: Any, trajectory: Any) -> dict[str, Any]:
  """Returns the learned reward and the policies' entropy of a step, by episode, as means over lifetimes."""
  _, raw, _, _, entropy = jax.jit(agent.relive)(params, trajectory)
  kind = trajectory.timesteps.step_type[:-1]
  parts = dict(
    intrinsic=jnp.where(kind == FIRST, 0.0, jnp.tanh(raw)[:-1]),
    entropy=jnp.where(kind == LAST, 0.0, entropy),
  )
  means = {}
  for name, values in parts.items():
    lived = by_episode(values, kind, case.episodes)
    means[name] = (lived.returns / np.maximum(lived.lengths, 1)).mean(0).round(4).tolist()
  return means


def run_case(name: str, seeds: int, updates: int) -> dict[str, Any]:
  case = CASES[name]
  updates = updates or case.updates
  env_id = jnp.arange(LIVES, dtype=jnp.int32) + 1000
  learning, every, shows = [], [], []
  for seed in range(seeds):
    agent, params, figures = learn(case, seed, updates)
    agent = dataclasses.replace(agent, environment=case.env(0))
    act = jax.jit(lambda p, keys, agent=agent: of_policies(case, agent, p, keys, env_id))
    x = act(params, jax.random.split(jax.random.key(2)))
    kept = jax.tree.map(lambda y: y[:-1], (x.timesteps.reward, x.timesteps.step_type))
    every.append(by_episode(*kept, case.episodes))
    learning.append(figures | dict(lifetime=interval(every[-1].returns.mean(axis=1))))
    print(name, seed, 'learned', learning[-1]['lifetime'], flush=True)
    shows.append(show(case, agent, params, x))
  whole = Lived(*(np.concatenate(y) for y in zip(*every, strict=True)))
  sizes = dict(dataclasses.asdict(case), settings=str(case.settings), updates=updates)
  agents = {'learned': summarize(case, whole, seeds) | dict(seeds=learning, shows=shows)}
  for other, (lived, figures) in baselines(case).items() if case.with_baselines else ():
    agents[other] = summarize(case, lived) | figures
  sizes['environments'] = ENVS
  return dict(sizes=sizes, **common.origin(), machine=common.machine(), agents=agents)


def draw(results: dict[str, Any]) -> None:
  """Draws the learned reward over a lifetime, before and after the world changes."""
  plt = common.pyplot(**{'legend.fontsize': 7})
  names = [name for name in ('empty_rooms', 'nonstationary_abc') if name in results]
  shape = dict(figsize=(5 * len(names), 5), sharex='col', squeeze=False)
  figure, axes = plt.subplots(2, len(names), **shape)
  for (top, bottom), name in zip(axes.T, names, strict=True):
    agents, sizes = results[name]['agents'], results[name]['sizes']
    further = results.get(f'{name}, without memory', {'agents': {}})['agents']
    curves = agents | {f'{agent}, without memory': one for agent, one in further.items()}
    for agent, one in curves.items():
      x = np.array(one['by_episode'])
      width = max(1, len(x) // 40)
      smooth = np.convolve(x, np.ones(width) / width, 'valid')
      thick = 1.8 if agent.startswith('learned') else 1.2
      top.plot(np.arange(len(smooth)) + width / 2, smooth, label=agent, lw=thick)
    for i, shown in enumerate(agents['learned']['shows']):
      labels = ('learned reward of a step', "the policy's entropy") if not i else (None, None)
      bottom.plot(shown['intrinsic'], color='C0', lw=1, label=labels[0])
      bottom.plot(shown['entropy'], color='C4', lw=1, ls=':', label=labels[1])
    for axis in (top, bottom):
      for swap in range(sizes['period'], sizes['episodes'], sizes['period'] or 1):
        if sizes['period']:
          axis.axvline(swap, color='0.8', lw=1, zorder=0)
      if name == names[0]:
        axis.legend()
    top.set(title=name, ylabel='return of an episode')
    bottom.set(xlabel='episode of the lifetime')
  figure.tight_layout()
  figure.savefig(common.ROOT / 'docs' / 'learned_rewards.png', dpi=110)


def main() -> None:
  args = common.arguments(__doc__, CASES, draw=False, seeds=10, updates=0)
  for name in () if args.draw else args.cases:
    common.keep('learned_rewards', name, run_case(name, args.seeds, args.updates))
  if args.draw:
    draw(common.known('learned_rewards'))


if __name__ == '__main__':
  main()
