"""Action masks that allow nothing: an error where something is done or bootstrapped from, and no trace elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from test_edges import BASES, B, T, timesteps, updater
from test_runs import called

from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.r2d2 import R2D2
from podrace.distributed.environments import environment_messages
from podrace.distributed.net.frame import WireError
from podrace.envs import contract
from podrace.envs.base import NextStepReset, restart, transition
from podrace.envs.check import check_environment
from podrace.envs.host.base import HostSpec
from podrace.envs.host.checker import Checker
from podrace.envs.timestep_rules import RULES
from podrace.errors import HostError, RunError, UsageError
from podrace.networks import ActorCritic, QNetwork
from podrace.run.loop import train
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.topology import AXIS
from podrace.types import FIRST, LAST, MID, ActorOutput, Arrival, Sample, TimeStep, Trajectory

SPACE = spaces.Dict(
  action_mask=spaces.Box(0, 1, (3,), np.int8), x=spaces.Box(-9, 9, (3,), np.float32)
)
MASKED = [
  name
  for name in BASES
  if name not in ('sac', 'd4pg', 'qtopt', 'impala, rmsprop', 'impala, self-tuning')
]
QUICK = ('dqn',)


def masked(end: Any) -> TimeStep:
  """The window of `timesteps`, with this mask where an episode has terminated, and others before."""
  t = timesteps()
  mask = np.ones((T + 1, B, 3), np.int8)
  mask[:, :, 1] = np.random.default_rng(1).integers(0, 2, (T + 1, B))
  mask[np.asarray(t.last & (t.discount == 0))] = end
  return t._replace(observation={'action_mask': jnp.asarray(mask), 'x': t.observation})


@pytest.mark.parametrize(
  'name', [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in MASKED]
)
def test_the_mask_of_a_terminated_timestep_changes_nothing(name: str) -> None:
  """Acting, searches, targets and what is learned are the same whether it allows nothing or all; and finite."""
  update = updater(name, {}, SPACE)
  none, every = update(masked(0)), update(masked(1))
  jax.tree.map(np.testing.assert_array_equal, none, every)
  for path, x in jax.tree_util.tree_leaves_with_path(none):
    assert np.isfinite(x).all(), jax.tree_util.keystr(path)
  assert (
    max(np.abs(x).max() for x in jax.tree.leaves(none[2][1])) < 1e4
  )  # of -1e9 there is no trace


@pytest.mark.parametrize('end', [0, 1])
def test_targets_of_dqn_by_hand(end: int) -> None:
  """r where the episode terminated; else r + discount max over what is allowed; of values of a linear network."""
  agent = DQN(
    network=QNetwork(hidden=()), discount=0.5, huber=0.0, learning_rate=1e-3, double=False
  )
  env = SimpleNamespace(observation_space=SPACE, action_space=spaces.Discrete(3))
  agent = bind(agent, env)
  t = jax.tree.map(lambda x: np.asarray(x)[3], masked(end))
  params = jax.jit(agent.init)(jax.random.key(0)).params.network
  step = jax.jit(lambda t: agent.network.step(params, (), t))
  q = np.asarray(step(t)[0])[..., 0]
  mask = t.observation['action_mask']
  free = step(t._replace(observation={**t.observation, 'action_mask': np.ones_like(mask)}))
  best = [max(v for v, m in zip(row, ok, strict=True) if m or not ok.any())
          for row, ok in zip(np.asarray(free[0])[..., 0], mask, strict=True)]  # fmt: skip
  np.testing.assert_allclose(q.max(-1), best, rtol=1e-6)
  assert np.abs(best).max() < 100


@pytest.mark.parametrize('head', ['value', pytest.param('quantile', marks=pytest.mark.slow)])
def test_actions_of_low_values_are_above_forbidden_ones(head: Any) -> None:
  """Rewards may be as low as -1e12, and returns lower. Acting and targets take allowed actions."""
  network = QNetwork(hidden=(), head=head, num_atoms=51)
  env = SimpleNamespace(observation_space=SPACE, action_space=spaces.Discrete(3))
  agent = bind(DQN(network=network, greedy=True), env)
  t = jax.tree.map(lambda x: jnp.asarray(x)[2], masked(1))

  def run(key: Any) -> Any:
    params = agent.init(key).params
    params.network['advantage_head']['bias'] -= 1e14
    return agent.act(params, (), t, key)[0].action, agent.network.step(params.network, (), t)[0]

  action, q = jax.jit(run)(jax.random.key(0))
  mask = np.asarray(t.observation['action_mask'])
  assert (mask == 0).any() and mask[np.arange(B), action].all()
  assert (np.take_along_axis(mask, np.asarray(q).mean(-1).argmax(-1)[:, None], -1) == 1).all()


# --- the contract ---------------------------------------------------------------------------------------


class Timed:
  """An environment of `steps` steps, whose mask allows nothing from `since` on."""

  observation_space = SPACE
  action_space = spaces.Discrete(3)

  def __init__(self, steps: int, since: int, terminates: bool) -> None:
    self.steps, self.since, self.terminates = steps, since, terminates

  def see(self, t: Any) -> Any:
    mask = jnp.where(t >= self.since, 0, jnp.array([1, 1, 0])).astype(jnp.int8)
    return dict(action_mask=mask, x=jnp.zeros(3))

  def reset(self, key: Any) -> Any:
    return jnp.int32(0), restart(self.see(jnp.int32(0)))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    t = state + 1
    over = t >= self.steps
    return t, transition(self.see(t), 1.0, over & self.terminates, over & (not self.terminates))


@pytest.mark.parametrize(
  ('steps', 'since', 'terminates', 'wrong'),
  [
    (10, 10, True, None), (10, 10, False, 10), (10, 4, True, 4), (10, 0, True, 0),
    (3, 9, True, None),
  ],
)  # fmt: skip
def test_environments_in_jax_are_checked(
  steps: int, since: int, terminates: bool, wrong: int | None
) -> None:
  env: Any = NextStepReset(Timed(steps, since, terminates))
  if wrong is None:
    contract.check(env, jax.random.key(0), 30, 2)
    check_environment(env)
    return
  with pytest.raises(AssertionError, match=f'step {wrong}'):
    contract.check(env, jax.random.key(0), 30, 2)
  with pytest.raises(UsageError, match=f'step {wrong}'):
    check_environment(env)


def late() -> Any:
  """Longer than what is tried out before a run."""
  return NextStepReset(Timed(150, 150, False))


def at_once() -> Any:
  return NextStepReset(Timed(10, 10, False))


def test_a_run_ends_where_a_mask_allows_nothing_later_on(tmp_path: Path) -> None:
  config = Config(
    agent=Impala(ActorCritic(hidden=(4,))), env=f'python:{__name__}.late', num_envs=2, unroll_length=20, devices=1,
    total_steps=2_000,
  )  # fmt: skip
  with pytest.raises(RunError, match=r'in 2 environment.*allows nothing'):
    train(config, tmp_path / 'run', quiet=True)


def test_a_run_does_not_begin_where_it_is_found_at_once(capsys: Any, tmp_path: Path) -> None:
  code, _, err = called(
    capsys, 'train', '--env', f'python:{__name__}.at_once', '--run-dir', str(tmp_path / 'run')
  )
  assert code == 2 and 'step' in err and 'discount 0' in err


@pytest.mark.parametrize(
  ('kind', 'discount', 'refused'),
  [(LAST, 0.0, False), (LAST, 1.0, True), (MID, 1.0, True), (FIRST, 1.0, True)],
)
def test_on_the_host_and_from_remote_environments(
  kind: int, discount: float, refused: bool
) -> None:
  """Of three environments the last one's mask allows nothing."""
  mask = np.ones((3, 3), np.int8)
  mask[2] = 0
  reward = np.zeros(3, np.float32)
  t = TimeStep(
    {'action_mask': mask, 'x': np.zeros((3, 3), np.float32)},
    reward, np.full(3, discount, np.float32), np.full(3, kind, np.int8),
  )  # fmt: skip
  assert np.asarray(RULES['mask'].is_broken(t, None)).tolist() == [False, False, refused]
  spec = HostSpec('mine', SPACE, spaces.Discrete(3), make=lambda args: None)  # type: ignore[arg-type, return-value]
  check = Checker(spec, 3)
  arrival = Arrival(np.arange(3, dtype=np.int32), t, reward, reward > 0, np.zeros(3, np.int32))
  layout = environment_messages.Layout(environment_messages.schema(SPACE, spaces.Discrete(3)))
  words = np.zeros((3, 5), np.uint32)
  words[:, 4] = kind
  words[:, 2] = np.full(3, discount, np.float32).view(np.uint32)
  body = words.tobytes() + mask.tobytes() + t.observation['x'].tobytes()
  steps = [layout.arrays(body, 3)]
  if not refused:
    check(arrival)
    layout.check_masks(steps, layout.records(steps))
    return
  with pytest.raises(HostError, match=r'environment \[2\]'):
    check(arrival)
  with pytest.raises(WireError, match='allows nothing'):
    layout.check_masks(steps, layout.records(steps))


def test_remote_masks_allow_a_choice_of_each_part() -> None:
  action = spaces.MultiDiscrete([1, 2], dtype=np.int32)
  layout = environment_messages.Layout(environment_messages.schema(SPACE, action))
  words = np.zeros((1, 5), np.uint32)
  words[:, 2] = np.ones(1, np.float32).view(np.uint32)
  for mask, allows in (([1, 0, 1], True), ([1, 0, 0], False), ([0, 1, 1], False)):
    body = words.tobytes() + np.array([mask], np.int8).tobytes() + np.zeros(3, np.float32).tobytes()
    steps = [layout.arrays(body, 1)]
    with contextlib.nullcontext() if allows else pytest.raises(WireError, match='allows nothing'):
      layout.check_masks(steps, layout.records(steps))


def test_no_environment_has_answered() -> None:
  """As with remote environments, before the first is there."""
  none = np.zeros(0, np.float32)
  observation = {'action_mask': np.zeros((0, 3), np.int8), 'x': np.zeros((0, 3), np.float32)}
  t = TimeStep(observation, none, none, np.zeros(0, np.int8))
  assert np.asarray(RULES['mask'].is_broken(t, None)).shape == (0,)
  spec = HostSpec('mine', SPACE, spaces.Discrete(3), make=lambda args: None)  # type: ignore[arg-type, return-value]
  ids = np.zeros(0, np.int32)
  Checker(spec, 3)(Arrival(ids, t, none, none > 0, ids))


@pytest.mark.parametrize('cls', [DQN, pytest.param(R2D2, marks=pytest.mark.slow)])
def test_a_forbidden_filler_is_in_no_metric(cls: Any) -> None:
  """A log repeats an action in the rows of LAST, where the mask may forbid it."""
  sizes = dict(burn_in=0, sequence=2) if cls is R2D2 else {}
  env = SimpleNamespace(observation_space=SPACE, action_space=spaces.Discrete(3))
  agent = bind(cls(network=QNetwork(hidden=(4,)), **sizes), env)
  kinds = jnp.array([[MID, LAST], [LAST, FIRST], [FIRST, MID]], jnp.int8)
  one, last = jnp.ones((3, 2)), (kinds == LAST).astype(jnp.int8)
  mask = 1 - last[..., None] * jnp.array([[[1, 0, 0]]], jnp.int8)
  steps = TimeStep({'action_mask': mask, 'x': jnp.ones((3, 2, 3))}, one, one, kinds)
  length = 2 if cls is R2D2 else 1
  steps = jax.tree.map(lambda x: x[: length + 1], steps)
  state = agent.initial_state(jnp.arange(2))
  outputs = ActorOutput(jnp.zeros((length, 2), jnp.int32))
  sample = Sample(Trajectory(steps, outputs, state, jnp.arange(2)), jnp.ones(2), jnp.arange(2))
  train, key = jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1)
  step = jax.vmap(lambda train: agent.learn(train, sample, key), axis_name=AXIS, axis_size=1)
  _, _, metrics = jax.jit(step)(jax.tree.map(lambda x: x[None], train))
  assert abs(float(metrics['value'][0])) < 100
