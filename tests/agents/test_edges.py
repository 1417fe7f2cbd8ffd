"""Settings at the edges of their ranges, of all agents: refused, or training changes all parameters.

The table is made from the agents' fields. A new one without a range fails here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rule_files
from gymnasium import spaces
from test_runs import called

from podrace import topology
from podrace.agents import AGENTS
from podrace.agents.bc import BC
from podrace.agents.cem import CEM
from podrace.agents.d4pg import D4PG
from podrace.agents.disco import Disco
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.intrinsic import Intrinsic
from podrace.agents.lpg import LPG
from podrace.agents.muesli import Muesli
from podrace.agents.muzero import MuZero
from podrace.agents.ppo import PPO
from podrace.agents.pqn import PQN
from podrace.agents.qtopt import QTOpt
from podrace.agents.r2d2 import R2D2
from podrace.agents.sac import SAC
from podrace.architectures.discovery.objective import ValueFunction
from podrace.fields import COST, RANGES, range_of
from podrace.learner import learner
from podrace.networks import (
  ActionValue,
  Actor,
  ActorCritic,
  Critic,
  LearnedModel,
  LifetimeNetwork,
  PolicyPredictor,
  Predictor,
  QNetwork,
)
from podrace.networks.transformer import Transformer
from podrace.replay import on_policy
from podrace.settings.agents import bind, default_agent
from podrace.settings.validation import check_numbers
from podrace.types import FIRST, LAST, MID, TimeStep, Trajectory

EDGES = (0, 1, -1, math.inf, -math.inf, math.nan, 1e39, 1e-39)
NUMBERS = ('int', 'float', 'Annotated[int', 'Annotated[float', 'float | None', 'tuple[int')


def settings_of(x: Any, path: str = '') -> Iterator[tuple[Any, str, str]]:
  """(settings, field, option) of all numbers of an agent, and of what it is made of."""
  for f in dataclasses.fields(x):
    value = getattr(x, f.name)
    if dataclasses.is_dataclass(value):
      yield from settings_of(value, f'{path}{f.name}.')
    elif str(f.type).startswith(NUMBERS):
      yield x, f.name, path + f.name


ALL = [
  (agent, *row)
  for agent, made in [(name, default_agent(name)) for name in AGENTS] + [('value', ValueFunction())]
  for row in settings_of(made)
]


def test_every_number_has_a_range() -> None:
  assert len(ALL) > 250
  lacking = {f'{type(x).__name__}.{name}' for _, x, name, _ in ALL if range_of(x, name) is None}
  assert not lacking
  used = {name for _, _, name, _ in ALL} | {f'{type(x).__name__}.{n}' for _, x, n, _ in ALL}
  assert set(RANGES) <= used


def expected(x: Any, name: str, value: float) -> bool:
  """Whether a value is in the range that the table states, by its fields alone."""
  limits: Any = range_of(x, name)
  if math.isnan(value):
    return False
  if abs(value) > 3e38:
    return value == math.inf and limits.is_limit
  value = 0 if abs(value) < 1e-38 else value
  low = value > limits.low if limits.without_low else value >= limits.low
  return low and (value < limits.high if limits.without_high else value <= limits.high)


@pytest.mark.parametrize('agent', [*AGENTS, 'value'])
def test_what_is_outside_of_its_range_is_refused_by_name(agent: str) -> None:
  """Where it is made; of numbers that float32 has not, when the run begins."""
  count = 0
  for _, x, name, _ in [row for row in ALL if row[0] == agent]:
    kind = str({f.name: f.type for f in dataclasses.fields(x)}[name])
    for edge in EDGES:
      if expected(x, name, edge) or ('int' in kind and edge not in (0, 1, -1)):
        continue
      value: Any = int(edge) if 'int' in kind else float(edge)
      value = (value,) if 'tuple' in kind else value
      option = name.rstrip('_').replace('_', '.')
      message = rf'{option}.* (must be|needs|is not less than)|is not less than {option}'
      with pytest.raises(ValueError, match=message):
        check_numbers(dataclasses.replace(x, **{name: value}))
      count += 1
  assert count > 10


@pytest.mark.parametrize(
  ('make', 'name', 'largest'),
  [
    (MuZero, 'considered_actions', 4096),
    (LearnedModel, 'blocks', 1024),
    (CEM, 'iterations', 1024),
    (Transformer, 'layers', 1024),
  ],
)
def test_numbers_of_parts_that_are_built_one_by_one_end(make: Any, name: str, largest: int) -> None:
  make(**{name: largest})
  with pytest.raises(ValueError, match=f'{name}.*{largest}.*{2**31 - 1}'):
    make(**{name: 2**31 - 1})


@pytest.mark.parametrize(
  ('args', 'message'),
  [
    (['--agent', 'dqn', '--agent.target-rate', '0'], '--agent.target-rate '),
    (['--agent', 'muesli', '--agent.advantage-decay', '1'], '--agent.advantage-decay '),
    (['--agent', 'muesli', '--agent.advantage-decay', '0.99999999'], '--agent.advantage-decay '),
    (['--agent.max-grad-norm', '-1'], '--agent.max-grad-norm '),
    (['--agent.learning-rate', '0'], '--agent.learning-rate '),
    (['--agent.learning-rate', 'inf'], '--agent.learning-rate'),
    (['--agent', 'ppo', '--agent.adam-epsilon', '0'], '--agent.adam-epsilon '),
  ],
)  # fmt: skip
def test_refused_with_exit_code_2(
  args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
  code, _, err = called(capsys, 'train', 'catch', *args)
  plain = ' '.join(err.replace('│', ' ').split())
  assert code == 2 and message in plain, err


# --- what is accepted trains ----------------------------------------------------------------------------

T, B = 8, 4
VECTOR, BOX, THREE = spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)), spaces.Discrete(3)
MODEL = LearnedModel(
  latent=4, hidden=(4,), dynamics_hidden=(4,), head_hidden=(4,), bins=11, v_min=-3, v_max=3
)
BASES: dict[str, Any] = {
  'impala': Impala(network=ActorCritic(hidden=(4,))),
  'impala, rmsprop': Impala(network=ActorCritic(hidden=(4,)), optimizer='rmsprop'),
  'impala, self-tuning': Impala(network=ActorCritic(hidden=(4,)), self_tuning=True),
  'ppo': PPO(network=ActorCritic(hidden=(4,), shared=False), minibatches=2, epochs=2),
  'dqn': DQN(network=QNetwork(hidden=(4,))),
  'r2d2': R2D2(network=QNetwork(hidden=(4,), core='gru', core_size=4), sequence=6, burn_in=2),
  'pqn': PQN(network=QNetwork(hidden=(4,), layer_norm=True), minibatches=2, epochs=2),
  'sac': SAC(actor=Actor(hidden=(4,)), critic=Critic(hidden=(4,), critics=2)),
  'd4pg': D4PG(
    actor=Actor(hidden=(4,), deterministic=True), critic=Critic(hidden=(4,), atoms=11), v_min=-3, v_max=3
  ),
  'qtopt': QTOpt(network=ActionValue(head_hidden=(4,), head='value'), cem=CEM(samples=4, elites=2)),
  'bc': BC(network=ActorCritic(hidden=(4,))),
  'muzero': MuZero(network=MODEL, simulations=2, unroll=1, n_step=2, learning_rate=1e-2),
  'muzero, puct': MuZero(network=MODEL, simulations=2, unroll=1, n_step=6, search='puct', reanalyse=0.5),
  'muesli': Muesli(network=MODEL, unroll=1),
  'disco': Disco(
    rule_files.small(), lifetime=rule_files.SIZES.lifetime,
    network=Predictor(
      hidden=(4,), model_size=4, head_hidden=(4,), predictions=rule_files.SIZES.predictions, bins=11, max_value=3.0
    ),
  ),
  'lpg': LPG(
    rule_files.small_lpg(),
    network=PolicyPredictor(hidden=(4,), predictions=rule_files.LPG.predictions),
  ),
  'intrinsic': Intrinsic(
    reward=LifetimeNetwork(hidden=(4,), core_size=4), value=LifetimeNetwork(hidden=(4,), core_size=4), period=2
  ),
}  # fmt: skip
OF_MEMORY = {  # what replay is made of, or a run sets: no update reads it
  'capacity', 'batch_size', 'min_size', 'replay_ratio', 'replay_share', 'lifetime', 'episodes', 'total_updates', 'total_envs',
}  # fmt: skip


def accepted(base: str) -> Iterator[tuple[str, Any]]:
  """(field, value) at the edges, of the agent's own numbers."""
  agent = BASES[base]
  for x, name, path in settings_of(agent):
    if x is not agent or name in OF_MEMORY or (', ' in base and range_of(x, name) == COST):
      continue
    if (
      base == 'muzero, puct' and name == 'n_step'
    ):  # what is searched again is as long as the window
      continue
    kind = str({f.name: f.type for f in dataclasses.fields(x)}[name])
    limits: Any = range_of(x, name)
    for edge in (0, 1, limits.low, limits.high, math.inf):
      whole = 'int' in kind
      if (expected(x, path, edge) and math.isfinite(edge)) or (
        limits.is_limit and edge == math.inf
      ):
        yield path, int(edge) if whole else float(edge)
    if 'None' in kind:
      yield path, None


def timesteps() -> TimeStep:
  """A window [T + 1, B] of vectors, in which an episode terminates."""
  rng = np.random.default_rng(0)
  kinds = np.full((T + 1, B), MID, np.int8)
  kinds[0], kinds[3, 0], kinds[4, 0] = FIRST, LAST, FIRST
  discount = np.where(kinds == LAST, 0, 1).astype(np.float32)
  reward = np.where(kinds == FIRST, 0, rng.normal(size=(T + 1, B))).astype(np.float32)
  seen = rng.normal(size=(T + 1, B, 3)).astype(np.float32)
  return TimeStep(*map(jnp.asarray, (seen, reward, discount, kinds)))


def updater(name: str, settings: dict[str, Any], space: Any = VECTOR) -> Any:
  """A compiled function of a window: what is learned before and after two updates, and all else of that."""

  class Env:
    observation_space = space
    action_space = BOX if name in ('sac', 'd4pg', 'qtopt') else THREE

  bound = bind(dataclasses.replace(BASES[name], **settings), Env(), 100, B)
  step = learner(bound, on_policy(), topology.learner_mesh(1))

  def run(key: Any, t: TimeStep) -> Any:
    keys = jax.random.split(key, T + 3)
    train = bound.init(keys[0])
    beginning = state = bound.initial_state(jnp.arange(B))
    outputs = []
    for i in range(T):
      at = jax.tree.map(lambda x: x[i], t)
      output, state = bound.act(train.params, state, at, keys[i + 1])
      outputs.append(output)
    window = Trajectory(
      t, jax.tree.map(lambda *x: jnp.stack(x), *outputs), beginning, jnp.arange(B)
    )
    after, all_metrics = train, []
    for i in range(2):
      after, _, metrics, _ = step(after, (), window, keys[T + 1 + i], jnp.int32(i))
      all_metrics.append(metrics)
    return learned(train), learned(after), (window.outputs, all_metrics)

  compiled = jax.jit(run)

  def update(t: TimeStep) -> Any:
    with jax.debug_key_reuse(False):
      return jax.device_get(compiled(jax.random.key(0), t))

  return update


def updated(name: str, settings: dict[str, Any]) -> tuple[Any, Any]:
  """What is learned before and after two updates."""
  before, after, _ = updater(name, settings)(timesteps())
  return before, after


def changed(before: Any, after: Any) -> dict[str, bool]:
  """Which groups of parameters differ."""
  groups: dict[str, bool] = {}
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
  ):
    group = jax.tree_util.keystr(path[:2])
    groups[group] = groups.get(group, False) or bool((x != y).any())
  return groups


def learned(train: Any) -> Any:
  """Networks that gradients change: without counters, statistics and optimisers."""
  networks = getattr(train.params, 'network', getattr(train.params, 'theta1', train.params))
  return networks, getattr(train.rest, 'critic', ()), getattr(train.rest, 'network', ())


CASES = [(base, name, value) for base in BASES for name, value in dict.fromkeys(accepted(base))]
FAST = {('ppo', 'clip', 0.0), ('dqn', 'max_grad_norm', 0.0)}


@pytest.mark.parametrize(
  ('base', 'name', 'value'),
  [pytest.param(*c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES],
)
def test_an_accepted_edge_trains(base: str, name: str, value: Any) -> None:
  """A cost of 0 leaves its term out, so what only that term trains may stay."""
  agent = BASES[base]
  try:
    dataclasses.replace(agent, **{name: value})
  except ValueError as e:  # with the other settings as they are
    assert name.rstrip('_') in str(e)
    return
  before, after = updated(base, {name: value})
  groups = changed(before, after)
  assert len(groups) > 1 and all(np.isfinite(x).all() for x in jax.tree.leaves(after))
  if range_of(agent, name) == COST and value == 0:
    assert any(groups.values())
  else:
    if base == 'bc':  # it learns no values
      del groups["[0]['value_head']"]
    assert all(groups.values()), groups


def test_there_are_fast_cases() -> None:
  assert set(CASES) >= FAST and len(CASES) > 150
  assert not set(AGENTS) - {base.partition(',')[0] for base in BASES}


@pytest.mark.slow
@pytest.mark.parametrize(('base', 'name'), [('impala', 'max_grad_norm'), ('ppo', 'clip_value')])
def test_a_limit_of_0_is_no_limit(base: str, name: str) -> None:
  none, infinite, small = (updated(base, {name: x})[1] for x in (0.0, math.inf, 1e-3))
  jax.tree.map(np.testing.assert_array_equal, none, infinite)
  assert any(changed(none, small).values())
