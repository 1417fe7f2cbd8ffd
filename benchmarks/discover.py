"""Meta-training: the cost of its gradient, and the worth of its rules.

    python benchmarks/discover.py speed                # steps/s, memory and compile time, by K, against no meta-gradient
    python benchmarks/discover.py lpg --runs RUN_DIR   # a run of `podrace discover` with --agent lpg on grid worlds
    python benchmarks/discover.py disco --runs RUN_DIR ... # runs of `podrace discover disco-small`, one of each seed
    python benchmarks/discover.py picture

`speed` times the program of meta-training and, in turn with it, the same agents in the same environments without a
meta-gradient, in one program too. Memory is the program's need besides its state, by XLA.

`lpg` lets 256 agents live in worlds that meta-training has not seen: other grid worlds of the same kind, larger ones, and
other environments. Against them: an advantage actor-critic (IMPALA on its newest unrolls) with the same layers,
environments, unrolls and updates in the same worlds, with the best settings of a grid, chosen in 16 other worlds of the
kind. The agents of the rule have the best learning rate of the same ones, chosen alike, and else the settings of
meta-training. And agents of a rule that was not trained, alike.

`disco` compares the rule of each run with the same before it was trained, in 32 lives of the kind it was trained in.

Intervals are of 95%, by the bootstrap over lives. Writes benchmarks/results/discover.json after each case; cases that are
not run keep their results.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from learned_rewards import combinations, interval

from podrace.agents.impala import Impala
from podrace.agents.lpg import LPG
from podrace.agents.population import with_values
from podrace.agents.rules import storage
from podrace.architectures.discovery.members import Kind
from podrace.architectures.discovery.program import flat
from podrace.networks import ActorCritic
from podrace.run import build
from podrace.run.directory import load_any
from podrace.settings import discovery as settings
from podrace.settings.agents import bind
from podrace.settings.discovery_presets import PRESETS
from podrace.types import Sample

LIVES, TUNING, ROUNDS, SECONDS = 256, 16, 5, 5.0
RATES = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
GRID = dict(learning_rate=RATES, entropy_cost=(0.001, 0.01, 0.05, 0.1), lambda_=(0.95,))
WORLDS = {
  'grid worlds': '',  # as in meta-training
  'grid worlds, larger': 'podrace:grid_worlds,size=7,objects=3',
  'catch, 5 x 5': 'podrace:catch,rows=5,columns=5',
  'empty rooms': 'podrace:empty_rooms,size=7,steps=30,episodes=0',
  'random ABC': 'podrace:random_abc,steps=20,episodes=0',
}


@dataclasses.dataclass(frozen=True)
class ByRule(LPG):
  """An agent that gets its settings with the rule."""

  def learn_by(self, values_and_rule: Any, train: Any, window: Any) -> Any:
    values, rule = values_and_rule
    return LPG.learn_by(with_values(self, values), rule, train, window)


@dataclasses.dataclass(frozen=True)
class A2C(Impala):
  """Learns by its own loss, in the place of an agent that learns by a rule."""

  def learn_by(self, values_and_rule: Any, train: Any, window: Any) -> Any:
    values, _ = values_and_rule
    one = jnp.ones(window.timesteps.reward.shape[1])
    agent = with_values(self, values)
    train, _, metrics = agent.learn(train, Sample(window, one, one), jax.random.key(0))
    return train, metrics


def rules(config: Any, run_dir: Path) -> tuple[Any, Any]:
  """Returns the trained rule of a run, and one of the same widths that was not trained."""
  path, module = str(run_dir / 'rule.npz'), settings.rules_of(config.agent)
  trained = dict(storage.load(path, storage.sha256(path), module.Sizes))
  return trained, module.init(jax.random.key(config.seed), config.rule)


def lives(kind: Kind, rule: Any, key: Any, count: int) -> tuple[Any, Any]:
  """Returns the sum of returns and the episodes, [lives, updates] each, of whole lives of agents."""

  def life(number: Any) -> Any:
    begin_key, run_key = jax.random.split(key)
    member = kind.begin(begin_key, number, jnp.int32(0), jnp.int32(0))

    def update(member: Any, key: Any) -> Any:
      def sums(member: Any) -> Any:
        e = flat(member.actor.episodes)
        n = e.finished.astype(jnp.float32)
        return jnp.sum(n * e.return_mean), jnp.sum(n)

      before = sums(member)
      member, _ = kind.update(rule, member, key)
      return member, jax.tree.map(lambda x, y: x - y, sums(member), before)

    keys = jax.random.split(jax.random.fold_in(run_key, number), kind.lifetime)
    return jax.lax.scan(update, member, keys)[1]

  sums: tuple[Any, Any] = jax.vmap(life)(jnp.arange(count, dtype=jnp.int32))
  return sums


def of_life(sums: Any) -> np.ndarray:
  """Returns the mean return of an episode over each life [lives]."""
  returns, episodes = (np.asarray(x, np.float64) for x in sums)
  return returns.sum(axis=-1) / np.maximum(episodes.sum(axis=-1), 1)


def describe(sums: Any) -> dict[str, Any]:
  """Returns the mean of an episode, over the life and in its last tenth, and a curve."""
  returns, episodes = (np.asarray(x, np.float64) for x in sums)
  last, parts = returns.shape[1] // 10, np.array_split(np.arange(returns.shape[1]), 25)
  curve = [float(returns[:, p].sum() / max(1.0, episodes[:, p].sum())) for p in parts]
  return dict(
    life=interval(of_life(sums)),
    last_tenth=interval(of_life((returns[:, -last:], episodes[:, -last:]))),
    curve=np.round(curve, 4).tolist(),
  )


def kind_of(config: Any, env: str, agent: Any = None) -> Kind:
  """Returns the members of a group, with another agent if there is one."""
  kind = build.meta_training(dataclasses.replace(config, env=env, agents=1, widths=())).kinds[0]
  return kind if agent is None else dataclasses.replace(kind, agent=bind(agent, kind.env))


def tune(kind: Kind, rule: Any, grid: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """Returns lives with the settings of a grid that are the best in other worlds, and their description."""
  values = combinations(grid)

  @functools.partial(jax.jit, static_argnums=2)
  def run(values: Any, key: Any, count: int) -> Any:
    return jax.lax.map(lambda v: lives(kind, (v, rule), key, count), values)

  each = [of_life(x).mean() for x in zip(*run(values, jax.random.key(1), TUNING), strict=True)]
  best = {name: x[int(np.argmax(each))][None] for name, x in values.items()}
  returns, episodes = run(best, jax.random.key(2), LIVES)
  sums = returns[0], episodes[0]
  chosen = {k: float(x[0]) for k, x in best.items()}
  return sums, describe(sums) | dict(settings=chosen, grid=grid, of_each=np.round(each, 4).tolist())


def lpg(run_dirs: list[Path]) -> Iterator[dict[str, Any]]:
  (run_dir,) = run_dirs
  config = load_any(run_dir)
  trained, first = rules(config, run_dir)
  hidden = config.agent.network.hidden
  network = ActorCritic(hidden=hidden, initializer='lecun', activation='relu', shared=False)
  worlds = {}
  for name, env in WORLDS.items():
    env = env or config.env
    learning, rates = kind_of(config, env, ByRule(**vars(config.agent))), dict(learning_rate=RATES)
    by_rule, rule = tune(learning, trained, rates)
    _, untrained = tune(learning, first, rates)
    by_a2c, a2c = tune(kind_of(config, env, A2C(network)), (), GRID)
    difference = interval(of_life(by_rule) - of_life(by_a2c))
    worlds[name] = dict(env=env, rule=rule, untrained=untrained, a2c=a2c, rule_minus_a2c=difference)
    print(name, rule['life'], untrained['life'], a2c['life'], difference, flush=True)
    yield dict(training=training(run_dir), lives=LIVES, worlds=worlds)


def training(run_dir: Path) -> dict[str, Any]:
  """Returns the settings of a rule's training, its size, and returns by the age of agents as it learned."""
  lines = [x for x in common.metrics(run_dir) if x.get('episode_return_by_age')]
  summary, config = common.summary_of(run_dir), common.read_json(run_dir / 'config.json')
  config['agent']['rule'] = common.portable(config['agent']['rule'])
  return dict(
    config=config,
    summary={k: summary[k] for k in ('step', 'steps_per_s', 'params_sha256') if k in summary},
    curve=[(x['step'], x['episode_return'], x['episode_return_by_age']) for x in lines],
  )


def disco(run_dirs: list[Path]) -> Iterator[dict[str, Any]]:
  seeds = []
  for run_dir in run_dirs:
    config = load_any(run_dir)
    run = jax.jit(functools.partial(lives, kind_of(config, config.env), count=32))
    trained, untrained = (run(r, jax.random.key(2)) for r in rules(config, run_dir))
    seeds.append(dict(
      training=training(run_dir), rule=describe(trained), untrained=describe(untrained),
      improvement=interval(of_life(trained) - of_life(untrained)),
    ))  # fmt: skip
    print(run_dir, seeds[-1]['rule']['life'], seeds[-1]['untrained']['life'], flush=True)
  improvement = interval(np.array([s['improvement']['mean'] for s in seeds]))
  yield dict(seeds=seeds, improvement=improvement)


def without_gradient(program: Any) -> Any:
  """Returns a function that makes as many updates as a meta-step has unrolls, without a meta-gradient."""

  def run(rule: Any, groups: Any, key: Any) -> Any:
    after = []
    for kind, members in zip(program.kinds, groups, strict=True):
      keys = jax.random.split(key, kind.updates + 1)

      def update(members: Any, key: Any, kind: Kind = kind) -> Any:
        each = jax.vmap(functools.partial(jax.random.fold_in, key))(members.number)
        return jax.vmap(functools.partial(kind.update, rule))(members, each)[0], ()

      after.append(jax.lax.scan(update, members, keys)[0])
    return tuple(after)

  return jax.jit(run)


def calls_per_s(step: Any, state: Any, seconds: float) -> tuple[float, Any]:
  """Returns calls/s, and the state after them."""
  began, calls = time.perf_counter(), 0
  while time.perf_counter() - began < seconds or calls < 3:
    state = jax.block_until_ready(step(state))
    calls += 1
  return calls / (time.perf_counter() - began), state


def measure_updates(config: Any, rounds: int = ROUNDS, seconds: float = SECONDS) -> dict[str, Any]:
  """Measures the cost of K updates; without rounds, only figures of compiling."""
  program = build.meta_training(config)
  state = program.init(jnp.stack([jax.random.key(0)]))
  clock = [time.perf_counter()]
  meta = program.run.lower(program.shapes, jnp.int32(1)).compile()
  clock.append(time.perf_counter())
  without = without_gradient(program).lower(state.train.params, state.groups, state.key).compile()
  clock.append(time.perf_counter())
  rule, groups = jax.tree.map(jnp.copy, (state.train.params, state.groups))
  key, rates = jax.random.key(1), []
  for _ in range(rounds):
    a, state = calls_per_s(lambda s: meta(s, jnp.int32(1)), state, seconds)
    b, groups = calls_per_s(lambda g: without(rule, g, key), groups, seconds)
    rates.append((a * config.steps_per_update, b * config.steps_per_update))
  result: dict[str, Any] = dict(
    agent_updates=config.agent_updates, compile_s=clock[1] - clock[0], compile_s_without=clock[2] - clock[1],
    temp_mib=meta.memory_analysis().temp_size_in_bytes / 2**20,
    temp_mib_without=without.memory_analysis().temp_size_in_bytes / 2**20,
  )  # fmt: skip
  if rates:
    ours, others = (statistics.median(x) for x in zip(*rates, strict=True))
    ratios = [round(a / b, 3) for a, b in rates]
    result |= dict(steps_per_s=ours, steps_per_s_without=others, ratio=statistics.median(ratios), ratios=ratios)  # fmt: skip
  print(result, flush=True)
  return result


def speed(updates: list[int], rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
  results: dict[str, Any] = {}
  for name in ('lpg-catch', 'disco-small'):
    print(name, flush=True)
    base = dataclasses.replace(PRESETS[name](), devices=1)
    configs = [dataclasses.replace(base, agent_updates=k) for k in updates]
    each = [measure_updates(config, rounds, seconds) for config in configs]
    results[name] = dict(updates=each, machine=common.machine())
    yield results


def picture(results: dict[str, Any]) -> None:
  """Draws agents' returns by their age, as the rule learns; and their lives against the actor-critic's."""
  plt = common.pyplot(**{'legend.fontsize': 6})
  worlds, curve = results['worlds'], results['training']['curve']
  figure, grid = plt.subplots(2, 3, figsize=(9.6, 5.6))
  first, *axes = grid.flat
  shown = np.unique(np.geomspace(1, len(curve), 6).astype(int)) - 1
  for i, at in enumerate(shown):
    step, _, by_age = curve[at]
    colour = plt.get_cmap('viridis')(i / max(1, len(shown) - 1))
    first.plot(np.arange(10) * 10 + 5, by_age, color=colour, label=f'{step / 1e6:.0f}M steps')
  first.set(title='agents, as the rule learns', xlabel="% of an agent's life", ylabel='return')
  labels = {'rule': 'LPG', 'a2c': 'A2C, tuned', 'untrained': 'untrained'}
  for axis, (name, world) in zip(axes, worlds.items(), strict=True):
    for part, label in labels.items():
      axis.plot((np.arange(25) + 0.5) * 4, world[part]['curve'], label=label)
    axis.set(title=name, xlabel='% of a life')
  for axis in grid.flat:
    axis.legend()
  figure.tight_layout()
  figure.savefig(common.ROOT / 'docs' / 'discovery_rules.png', dpi=110)


def main() -> None:
  args = common.arguments(
    __doc__, ('speed', 'lpg', 'disco', 'picture'), runs=([''], 'run directories'), updates=([1, 2, 5, 10, 20], 'K of speed'),
    rounds=ROUNDS, seconds=SECONDS,
  )  # fmt: skip
  runs = [Path(x) for x in args.runs]
  for case in args.cases:
    if case == 'picture':
      picture(common.known('discover')['lpg']['results'])
      continue
    if case != 'speed' and not args.runs[0]:
      print(f'{case}: needs --runs', flush=True)
      continue
    steps = speed(args.updates, args.rounds, args.seconds) if case == 'speed' else {'lpg': lpg, 'disco': disco}[case](runs)  # fmt: skip
    for results in steps:
      about = dict(**common.origin(), machine=common.machine())
      common.keep('discover', case, about | dict(results=results))


if __name__ == '__main__':
  main()
