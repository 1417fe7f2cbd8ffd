"""Meta-training: what its gradient costs, and what its rules are worth.

    python benchmarks/discover.py speed            # steps/s, memory and compile time, by K, against no meta-gradient
    python benchmarks/discover.py lpg RUN_DIR      # a run of `podrace discover` with --agent lpg on grid worlds
    python benchmarks/discover.py disco RUN_DIR... # runs of `podrace discover disco-small`, one of each seed
    python benchmarks/discover.py picture

`speed` times the program of meta-training and, in turn with it, the same agents in the same environments without a
meta-gradient, in one program too. Memory is what XLA says the program needs besides its state.

`lpg` lets 256 agents live in worlds that meta-training has not seen: other grid worlds of the same kind, larger ones,
and other environments. Against them: an advantage actor-critic (IMPALA on its newest unrolls) with the same layers,
environments, unrolls and updates in the same worlds, with the best settings of a grid, found in 16 other worlds of the
kind. The agents of the rule have the best learning rate of the same ones, found alike, and else the settings of
meta-training. And agents of a rule that was not trained, alike.

`disco` compares the rule of each run with the same before it was trained, in 32 lives of the kind it was trained in.

Intervals are of 95%, by the bootstrap over lives. Writes benchmarks/results/discover.json after each case; what is not
run keeps what the file has.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, ROOT, machine, origin, portable, record
from learned_rewards import interval

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
UPDATES_OF_SPEED = (1, 2, 5, 10, 20)
GRID = dict(
  learning_rate=(3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
  entropy_cost=(0.001, 0.01, 0.05, 0.1),
  lambda_=(0.95,),
)
WORLDS = {
  'grid worlds': '',  # as in meta-training
  'grid worlds, larger': 'podrace:grid_worlds,size=7,objects=3',
  'catch, 5 x 5': 'podrace:catch,rows=5,columns=5',
  'empty rooms': 'podrace:empty_rooms,size=7,steps=30,episodes=0',
  'random ABC': 'podrace:random_abc,steps=20,episodes=0',
}


@dataclasses.dataclass(frozen=True)
class ByRule(LPG):
  """An agent that is given its settings with the rule."""

  def learn_by(self, given: Any, train: Any, window: Any) -> Any:
    values, rule = given
    return LPG.learn_by(with_values(self, values), rule, train, window)


@dataclasses.dataclass(frozen=True)
class A2C(Impala):
  """In the place of an agent that learns by a rule, of which it is given none."""

  def learn_by(self, given: Any, train: Any, window: Any) -> Any:
    values, _ = given
    one = jnp.ones(window.timesteps.reward.shape[1])
    agent = with_values(self, values)
    train, _, metrics = agent.learn(train, Sample(window, one, one), jax.random.key(0))
    return train, metrics


# --- lives ----------------------------------------------------------------------------------------------


def trained_rule(config: Any, run_dir: Path) -> Any:
  """Where it has come to."""
  path = str(run_dir / 'rule.npz')
  return dict(storage.load(path, storage.sha256(path), settings.rules_of(config.agent).Sizes))


def untrained_rule(config: Any) -> Any:
  """One of the same widths that nothing was learned for."""
  return settings.rules_of(config.agent).init(jax.random.key(config.seed), config.rule)


def lives(kind: Kind, rule: Any, key: Any, count: int) -> tuple[Any, Any]:
  """(sum of returns, episodes), [lives, updates] each, of agents from the beginning to the end of a life."""

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

  found: tuple[Any, Any] = jax.vmap(life)(jnp.arange(count, dtype=jnp.int32))
  return found


def of_life(found: Any) -> np.ndarray:
  """The mean return of an episode over each life [lives]."""
  returns, episodes = (np.asarray(x, np.float64) for x in found)
  return returns.sum(axis=-1) / np.maximum(episodes.sum(axis=-1), 1)


def told(found: Any) -> dict[str, Any]:
  """Of lives: the mean of an episode, over the life and in its last tenth, and a curve."""
  returns, episodes = (np.asarray(x, np.float64) for x in found)
  last = returns.shape[1] // 10
  parts = np.array_split(np.arange(returns.shape[1]), 25)
  curve = [float(returns[:, p].sum() / max(1.0, episodes[:, p].sum())) for p in parts]
  return dict(
    life=interval(of_life(found)),
    last_tenth=interval(of_life((returns[:, -last:], episodes[:, -last:]))),
    curve=np.round(curve, 4).tolist(),
  )


def paired(one: Any, other: Any) -> dict[str, float]:
  """By how much the lives of one are better, world by world."""
  return interval(of_life(one) - of_life(other))


def kind_of(config: Any, env: str, agent: Any = None) -> Kind:
  """The members of a group; with another agent if it is given."""
  kind = build.meta_training(dataclasses.replace(config, env=env, agents=1, widths=())).kinds[0]
  return kind if agent is None else dataclasses.replace(kind, agent=bind(agent, kind.env))


def tuned(kind: Kind, rule: Any, of: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """Lives with the best settings of a grid, which are those of other worlds."""
  rows = np.array(list(itertools.product(*of.values())), np.float32)
  grid = {name: jnp.asarray(rows[:, i]) for i, name in enumerate(of)}

  def run(values: Any, key: Any, count: int) -> Any:
    return jax.lax.map(lambda v: lives(kind, (v, rule), key, count), values)

  run = jax.jit(run, static_argnums=2)
  found = run(grid, jax.random.key(1), TUNING)
  each = [of_life((r, n)).mean() for r, n in zip(*found, strict=True)]
  best = {name: x[int(np.argmax(each))][None] for name, x in grid.items()}
  returns, episodes = run(best, jax.random.key(2), LIVES)
  said = dict(
    settings={k: float(x[0]) for k, x in best.items()}, grid={k: list(v) for k, v in of.items()},
    of_each=np.round(each, 4).tolist(),
  )  # fmt: skip
  return (returns[0], episodes[0]), said


def lpg(run_dirs: list[Path]) -> Iterator[dict[str, Any]]:
  (run_dir,) = run_dirs
  config = load_any(run_dir)
  rule = trained_rule(config, run_dir)
  first = untrained_rule(config)
  network = ActorCritic(
    hidden=config.agent.network.hidden, initializer='lecun', activation='relu', shared=False
  )
  worlds = {}
  for name, env in WORLDS.items():
    began = time.perf_counter()
    env = env or config.env
    learning = kind_of(config, env, ByRule(**vars(config.agent)))
    rates = {'learning_rate': GRID['learning_rate']}
    by_rule, rate = tuned(learning, rule, rates)
    untrained, rate_untrained = tuned(learning, first, rates)
    a2c, best = tuned(kind_of(config, env, A2C(network)), (), GRID)
    worlds[name] = dict(
      env=env,
      rule=told(by_rule) | rate, untrained=told(untrained) | rate_untrained, a2c=told(a2c) | best,
      rule_minus_a2c=paired(by_rule, a2c),
    )  # fmt: skip
    print(name, {k: v['life'] for k, v in worlds[name].items() if isinstance(v, dict) and 'life' in v},
          worlds[name]['rule_minus_a2c'], best['settings'], f'{time.perf_counter() - began:.0f} s', flush=True)  # fmt: skip
    yield dict(training=training(run_dir), lives=LIVES, worlds=worlds)


def training(run_dir: Path) -> dict[str, Any]:
  """How a rule was made: its settings, its size, and returns by the age of agents as it learned."""
  lines = [json.loads(x) for x in (run_dir / 'metrics.jsonl').read_text().splitlines()]
  lines = [x for x in lines if x.get('episode_return_by_age')]
  summary = json.loads((run_dir / 'summary.json').read_text())
  config = json.loads((run_dir / 'config.json').read_text())
  config['agent']['rule'] = portable(config['agent']['rule'])
  return dict(
    config=config,
    summary={k: summary[k] for k in ('step', 'steps_per_s', 'params_sha256') if k in summary},
    curve=[(x['step'], x['episode_return'], x['episode_return_by_age']) for x in lines],
  )


def disco(run_dirs: list[Path]) -> Iterator[dict[str, Any]]:
  seeds = []
  for run_dir in run_dirs:
    config = load_any(run_dir)
    rule = trained_rule(config, run_dir)
    first = untrained_rule(config)
    run = jax.jit(functools.partial(lives, kind_of(config, config.env), count=32))
    trained, untrained = (run(r, jax.random.key(2)) for r in (rule, first))
    one = dict(
      training=training(run_dir), rule=told(trained), untrained=told(untrained),
      improvement=paired(trained, untrained),
    )  # fmt: skip
    print(run_dir, one['rule']['life'], one['untrained']['life'], flush=True)
    seeds.append(one)
  yield dict(
    seeds=seeds,
    improvement=interval(np.array([s['improvement']['mean'] for s in seeds])),
  )


# --- speed ----------------------------------------------------------------------------------------------


def plain(program: Any) -> Any:
  """(rule, groups, key) -> groups after as many updates as a meta-step has unrolls, without a meta-gradient."""

  def run(rule: Any, groups: Any, key: Any) -> Any:
    found = []
    for kind, members in zip(program.kinds, groups, strict=True):
      keys = jax.random.split(key, kind.updates + 1)

      def update(members: Any, key: Any, kind: Kind = kind) -> Any:
        each = jax.vmap(functools.partial(jax.random.fold_in, key))(members.number)
        return jax.vmap(functools.partial(kind.update, rule))(members, each)[0], ()

      found.append(jax.lax.scan(update, members, keys)[0])
    return tuple(found)

  return jax.jit(run)


def timed(step: Any, state: Any, seconds: float) -> tuple[float, Any]:
  """Calls a second."""
  began, calls = time.perf_counter(), 0
  while time.perf_counter() - began < seconds or calls < 3:
    state = jax.block_until_ready(step(state))
    calls += 1
  return calls / (time.perf_counter() - began), state


def of_updates(config: Any, rounds: int = ROUNDS, seconds: float = SECONDS) -> dict[str, Any]:
  """What K updates cost; without rounds, what needs only compiling."""
  program = build.meta_training(config)
  state = program.init(jnp.stack([jax.random.key(0)]))
  began = time.perf_counter()
  meta = program.run.lower(program.shapes, jnp.int32(1)).compile()
  compile_s = time.perf_counter() - began
  began = time.perf_counter()
  without = plain(program).lower(state.train.params, state.groups, state.key).compile()
  compile_plain_s = time.perf_counter() - began
  rule = jax.tree.map(jnp.copy, state.train.params)
  groups, key, rates = jax.tree.map(jnp.copy, state.groups), jax.random.key(1), []
  for _ in range(rounds):
    a, state = timed(lambda s: meta(s, jnp.int32(1)), state, seconds)
    b, groups = timed(lambda g: without(rule, g, key), groups, seconds)
    rates.append((a * config.steps_per_update, b * config.steps_per_update))
  found = dict(
    agent_updates=config.agent_updates,
    temp_mib=meta.memory_analysis().temp_size_in_bytes / 2**20,
    temp_mib_without=without.memory_analysis().temp_size_in_bytes / 2**20,
    compile_s=compile_s,
    compile_s_without=compile_plain_s,
  )
  if rates:
    found |= dict(
      steps_per_s=statistics.median(a for a, _ in rates),
      steps_per_s_without=statistics.median(b for _, b in rates),
      ratio=statistics.median(a / b for a, b in rates),
      ratios=[round(a / b, 3) for a, b in rates],
    )
  print({k: v if isinstance(v, list | int) else round(v, 3) for k, v in found.items()}, flush=True)
  return found


def speed(_: list[Path]) -> Iterator[dict[str, Any]]:
  found = {}
  for name in ('lpg-catch', 'disco-small'):
    config = PRESETS[name]()
    print(name, flush=True)
    each = [
      of_updates(dataclasses.replace(config, agent_updates=k, devices=1)) for k in UPDATES_OF_SPEED
    ]
    found[name] = dict(updates=each, machine=machine())
    yield found


CASES = {'speed': speed, 'lpg': lpg, 'disco': disco}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('case', choices=[*CASES, 'picture'])
  parser.add_argument('run_dirs', nargs='*', type=Path)
  args = parser.parse_args()
  path = RESULTS / 'discover.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}
  if args.case == 'picture':
    picture(results)
    return
  for found in CASES[args.case](args.run_dirs):
    results[args.case] = dict(**origin(), machine=machine(), results=found)
    record('discover', results)


def picture(results: dict[str, Any]) -> None:
  """Agents' returns by their age, as the rule learns; and their lives against the actor-critic's."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot as plt

  found = results['lpg']['results']
  worlds, curve = found['worlds'], found['training']['curve']
  figure, grid = plt.subplots(2, 3, figsize=(9.6, 5.6))
  first, *axes = grid.flat
  shown = np.unique(np.geomspace(1, len(curve), 6).astype(int)) - 1
  for i, at in enumerate(shown):
    step, _, by_age = curve[at]
    colour = plt.get_cmap('viridis')(i / max(1, len(shown) - 1))
    first.plot(np.arange(10) * 10 + 5, by_age, color=colour, label=f'{step / 1e6:.0f}M steps')
  first.set(title='agents, as the rule learns', xlabel="% of an agent's life", ylabel='return')
  first.legend(fontsize=6)
  for axis, (name, of) in zip(axes, worlds.items(), strict=True):
    for what in ('rule', 'a2c', 'untrained'):
      x = (np.arange(25) + 0.5) * 4
      axis.plot(x, of[what]['curve'], label={'rule': 'LPG', 'a2c': 'A2C, tuned'}.get(what, what))
    axis.set(title=name, xlabel='% of a life')
    axis.legend(fontsize=6)
  figure.tight_layout()
  figure.savefig(ROOT / 'docs' / 'discovery_rules.png', dpi=110)


if __name__ == '__main__':
  main()
