"""Agents with a core by a flag: sequences, masks, burn-in and states, against the same without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from test_value_agents import anakin, keys
from test_value_losses import VECTOR, discrete, fixed, random_window

from podrace import topology
from podrace.agents import recurrent, value_based
from podrace.agents.d4pg import D4PG
from podrace.agents.dqn import DQN
from podrace.agents.r2d2 import R2D2
from podrace.agents.recurrent import Recurrence
from podrace.agents.sac import SAC
from podrace.learner import learner
from podrace.networks import Actor, Critic, QNetwork
from podrace.replay import Buffer
from podrace.types import FIRST, LAST, MID, ActorOutput, Sample, TimeStep, Trajectory

SLOW = pytest.mark.slow
BOX = spaces.Box(np.float32([-2, 0]), np.float32([2, 5]))
CORE: dict[str, Any] = dict(hidden=(8,), core='gru', core_size=5, previous_reward=True)
Q: dict[str, Any] = CORE | dict(previous_action=True, shortcut=True)
AGENTS: dict[str, Any] = {
  'sac': SAC(Actor(**CORE), Critic(**CORE, critics=2)),
  'd4pg': D4PG(Actor(**CORE, deterministic=True), Critic(**CORE, atoms=11), n_step=3),
  'dqn': DQN(QNetwork(**Q, dueling=True), n_step=3),
  'categorical': DQN(QNetwork(**Q, head='categorical', num_atoms=11), n_step=2),
}


def bound(agent: Any, **recurrence: Any) -> Any:
  space = spaces.Discrete(4) if isinstance(agent, DQN) else BOX
  parts = {k: getattr(agent, k) for k in ('network', 'actor', 'critic') if hasattr(agent, k)}
  nets = {k: network.bind(VECTOR, space) for k, network in parts.items()}
  return dataclasses.replace(agent, recurrence=Recurrence(**recurrence), **nets)


def continuous(rng: Any, shape: Any) -> Any:
  return rng.uniform([-2, 0], [2, 5], (*shape, 2)).astype(np.float32)


def actions_of(agent: Any) -> Any:
  return discrete if isinstance(agent, DQN) else continuous


def learn(agent: Any, train: Any, window: Trajectory) -> tuple[Any, Any, Any]:
  """(the new state, priorities, metrics) of one step on one device."""
  n = window.env_id.shape[0]
  sample = Sample(window, np.ones(n, np.float32), np.arange(n))
  arguments = (train, np.zeros(n, np.float32), window, jax.random.key(1), jnp.int32(0))
  replay = fixed(sample)._replace(update=lambda state, index, priority: priority)
  step = learner(agent, replay, topology.learner_mesh(1))
  train, priority, metrics, _ = jax.jit(step)(*arguments)
  return train, priority, metrics


def episode(agent: Any, length: int, padding: int, seed: int) -> Trajectory:
  """An episode of `length` steps that terminates, and then other steps, as replay has them: [T + 1, 1]."""
  rng, total = np.random.default_rng(seed), length + 1 + padding
  noise = np.random.default_rng(99 + padding)  # behind the episode
  kinds = [FIRST, *[MID] * (length - 1), LAST, *([FIRST] + [MID] * padding)[:padding]]

  def values(shape: tuple[int, ...]) -> np.ndarray:
    own = rng.normal(size=(length + 1, 1, *shape))
    return np.concatenate([own, 100 * noise.normal(size=(padding, 1, *shape))]).astype(np.float32)

  observation, reward = values((3,)), values(())
  reward[0] = 0
  discount = np.ones((total, 1), np.float32)
  discount[length] = 0
  if isinstance(agent, DQN):
    action = rng.integers(0, 4, (length, 1))
    action = np.concatenate([action, noise.integers(0, 4, (padding, 1))]).astype(np.int32)
  else:
    action = np.concatenate([continuous(rng, (length, 1)), continuous(noise, (padding, 1))])
  steps = TimeStep(observation, reward, discount, np.array(kinds, np.int8)[:, None])
  return Trajectory(steps, ActorOutput(action), (), np.zeros(1, np.int32))


def moments(train: Any) -> list[Any]:
  return [np.asarray(x) for x in jax.tree.leaves(train.rest.opt_state) if np.ndim(x)]


@pytest.mark.parametrize('name', [n if n == 'dqn' else pytest.param(n, marks=SLOW) for n in AGENTS])  # fmt: skip
def test_padding_changes_no_gradient(name: str) -> None:
  """Adam's first moment is a tenth of the gradient; priorities and losses are the same as well."""
  alone = bound(AGENTS[name], start='episode', sequence=5)
  padded = bound(AGENTS[name], start='episode', sequence=8)
  train = jax.jit(alone.init)(jax.random.key(0))
  actual, expected = (
    learn(agent, train, episode(alone, 5, padding, 3))
    for agent, padding in ((padded, 3), (alone, 0))
  )
  pairs = list(zip(moments(actual[0]), moments(expected[0]), strict=True))
  assert max(np.abs(y).max() for _, y in pairs) > 1e-3
  for x, y in pairs:
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-7)  # of a tenth of the gradient
  np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
  for metric in ('loss', 'value'):
    np.testing.assert_allclose(actual[2][metric], expected[2][metric], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_loss_is_the_mean_over_valid_steps() -> None:
  """Of two episodes in a batch it is that of each, in proportion to their steps."""
  agent = bound(AGENTS['dqn'], start='episode', sequence=7)
  train = jax.jit(agent.init)(jax.random.key(0))
  one, two = episode(agent, 5, 2, 3), episode(agent, 2, 5, 4)
  both = Trajectory(
    *(jax.tree.map(lambda x, y: np.concatenate([x, y], 1), a, b) for a, b in zip(one[:2], two[:2], strict=True)),
    (), np.arange(2, dtype=np.int32),
  )  # fmt: skip
  together, first, second = (float(learn(agent, train, w)[2]['loss']) for w in (both, one, two))
  assert together == pytest.approx((5 * first + 2 * second) / 7, rel=1e-5)


@pytest.mark.parametrize('name', ['dqn', pytest.param('d4pg', marks=SLOW)])
def test_an_update_is_the_same_on_any_number_of_devices(name: str) -> None:
  """With windows that hold ends of episodes, of which one device has more than another."""
  agent = bound(AGENTS[name], start='zero', sequence=6)
  train = jax.jit(agent.init)(jax.random.key(0))
  window = random_window(6, 3, actions_of(agent))
  window = jax.tree.map(lambda x: x[..., :4] if x.ndim == 1 else x[:, :4], window)
  ends = (window.timesteps.step_type[:-1] == LAST).sum(0)
  assert ends[:2].sum() != ends[2:].sum()

  def update(devices: int) -> Any:
    replay = fixed(Sample(window, np.ones(4, np.float32), np.arange(4)))

    def share(state: Any, key: Any) -> Any:
      return jax.tree.map(own, replay.sample(state, key))

    def own(x: Any) -> Any:
      start, axis = jax.lax.axis_index(topology.AXIS) * (4 // devices), min(1, x.ndim - 1)
      return jax.lax.dynamic_slice_in_dim(x, start, 4 // devices, axis)

    step = learner(
      agent, replay._replace(sample=share, update=lambda *x: x[0]), topology.learner_mesh(devices)
    )
    new, *_ = jax.jit(step)(train, np.zeros(4), window, jax.random.key(1), jnp.int32(0))
    return moments(new)

  one, two = update(1), update(2)
  assert max(np.abs(x).max() for x in one) > 1e-3
  for x, y in zip(one, two, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize('kind', [MID, pytest.param(LAST, marks=SLOW)])
def test_a_window_inside_of_an_episode_teaches_nothing(kind: int) -> None:
  """As replay may give one while it has no other; its priority stays 0."""
  agent = bound(AGENTS['d4pg'], start='episode', sequence=5)
  train = jax.jit(agent.init)(jax.random.key(0))
  window = episode(agent, 5, 0, 3)
  window.timesteps.step_type[0] = kind
  new, priority, _ = learn(agent, train, window)
  assert not any(x.any() for x in moments(new)) and priority.tolist() == [0]


@pytest.mark.parametrize('n', [3, *(pytest.param(n, marks=SLOW) for n in (1, 9))])
@pytest.mark.parametrize('burn_in', [0, 2])
def test_sequences_have_the_transitions_of_windows(n: int, burn_in: int) -> None:
  """Each step's is that of a window of n steps there, or of fewer at the end of the sequence."""
  recurrence = Recurrence(sequence=6, burn_in=burn_in)
  window = random_window(6 + burn_in, 3, discrete)
  assert (window.timesteps.step_type[1:-1] == LAST).any()

  def windows(window: Trajectory) -> list[Any]:
    each = []
    for t in range(6):
      rows, outputs = slice(burn_in + t, burn_in + min(t + n, 6) + 1), slice(burn_in + t, None)
      part = Trajectory(
        jax.tree.map(lambda x, rows=rows: x[rows], window.timesteps),
        jax.tree.map(lambda x, rows=outputs: x[rows], window.outputs), (), window.env_id,
      )  # fmt: skip
      each.append(value_based.transitions(part, 0.9))
    return each

  @jax.jit
  def both(window: Trajectory) -> Any:
    return recurrent.sequence_steps(recurrence, window.timesteps, 0.9, n), windows(window)

  (step, mask), each = jax.device_get(both(window))
  for t, expected in enumerate(each):
    np.testing.assert_allclose(step.r_t[t], expected.r_t, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(step.discount_t[t], expected.discount_t, rtol=1e-6)
    np.testing.assert_array_equal(step.end[t], t + expected.end)
    np.testing.assert_array_equal(mask[t], expected.mask)


@pytest.mark.parametrize('name', ['dqn', pytest.param('d4pg', marks=SLOW)])
def test_burn_in_has_no_gradient(name: str) -> None:
  """The gradient is that of the rest alone, from the state that the burn-in leads to.

  Of D4PG's actor, with a critic that has no core, so that the target has no history of its own.
  """
  agent = AGENTS[name]
  if name == 'd4pg':
    agent = dataclasses.replace(agent, critic=Critic(hidden=(8,), atoms=11))
  burnt = bound(agent, start='stored', sequence=6, burn_in=4)
  rest = bound(agent, start='stored', sequence=6)
  train = jax.jit(burnt.init)(jax.random.key(0))
  params = train.params.network if name == 'dqn' else train.params
  network = burnt.network if name == 'dqn' else burnt.actor
  window = random_window(10, 5, actions_of(agent))
  memory = recurrent.begin(network, 7)
  rng = np.random.default_rng(1)
  memory = memory._replace(core=(rng.normal(size=(7, 5)).astype(np.float32),))

  @jax.jit
  def stepped(after: Any, timestep: Any, action: Any) -> Any:
    _, core = recurrent.step(network, params, after, timestep)
    return recurrent.after(after, core, action)

  after = memory
  for t in range(4):
    timestep = jax.tree.map(lambda x, t=t: x[t], window.timesteps)
    after = stepped(after, timestep, window.outputs.action[t])

  def state(memory: Any) -> Any:
    whole = burnt.initial_state(jnp.arange(7))
    return memory if name == 'd4pg' else whole._replace(memory=memory)

  late = Trajectory(
    jax.tree.map(lambda x: x[4:], window.timesteps),
    jax.tree.map(lambda x: x[4:], window.outputs), state(after), window.env_id,
  )  # fmt: skip
  actual, expected = (
    moments(learn(a, train, w)[0])
    for a, w in ((burnt, window._replace(agent_state=state(memory))), (rest, late))
  )
  assert max(np.abs(y).max() for y in expected) > 1e-3
  for x, y in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


ACTED = Buffer(capacity=2048, batch_size=64, min_size=2000)


@pytest.mark.parametrize('core', ['gru', pytest.param('lstm', marks=SLOW)])
@pytest.mark.parametrize(
  'recurrence',
  [
    Recurrence('stored', 8, 3),
    *(pytest.param(r, marks=SLOW) for r in (Recurrence('episode', 6), Recurrence('stored', 8))),
  ],
)
def test_learning_sees_what_acting_saw(core: Any, recurrence: Recurrence) -> None:
  """The values of a sequence are those of acting by the same parameters, in all valid steps.

  So are the stored state, the previous actions and rewards, and the resets within the window.
  """
  network = QNetwork(**Q | dict(core=core))
  buffer = dataclasses.replace(ACTED, priority_exponent=0.5)
  agent = DQN(network, buffer, actor_priorities=True, n_step=2, recurrence=recurrence)
  program = anakin(agent, 'podrace:memory,length=3', num_envs=8, length=4)
  state = program.run(program.init(keys(0)), jnp.int32(20))
  agent = program.agent
  replay = agent.memory(8, 4)

  @jax.jit
  def read(memory: Any, params: Any) -> tuple[Any, ...]:
    sample = replay.sample(memory, jax.random.key(2))
    batch = agent.transitions(sample)
    q = agent.network.mean(batch.outputs(agent.network, params))
    return sample, batch.step.mask, value_based.select_action(q, batch.step.action), q.max(-1)

  sample, mask, taken, best = read(state.memory, state.train.params.network)
  extras = jax.tree.map(
    lambda x: x[recurrence.burn_in :].reshape(-1), sample.trajectory.outputs.extras
  )
  valid = np.asarray(mask) > 0
  assert valid.sum() > 100 and (~valid).sum() > 10
  np.testing.assert_allclose(taken[valid], extras.value[valid], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(best[valid], extras.best[valid], rtol=1e-4, atol=1e-5)
  if recurrence.start == 'episode':
    assert (sample.trajectory.timesteps.step_type[0] == FIRST).all()


@pytest.mark.slow
def test_outputs_after_are_those_where_steps_bootstrap() -> None:
  agent = bound(AGENTS['d4pg'], sequence=6, burn_in=2)
  train = jax.jit(agent.init)(jax.random.key(0))
  window = jax.tree.map(jnp.asarray, random_window(8, 3, continuous))
  sample = Sample(window, jnp.ones(7), window.env_id)
  batch = recurrent.transitions(agent.recurrence, sample, 0.9, 3)
  step, _ = recurrent.sequence_steps(agent.recurrence, window.timesteps, 0.9, 3)
  for get, network, params in (
    (batch.outputs, agent.actor, train.params),
    (batch.seen, agent.critic, train.rest.critic),
  ):
    before, after = (np.asarray(get(network, params, x)).reshape(6, 7, -1) for x in (False, True))
    for t, b in np.ndindex(5, 7):
      end = int(step.end[t, b])
      if end < 6:
        np.testing.assert_array_equal(after[t, b], before[end, b])
    assert np.abs(after - before).max() > 1e-2


def test_inputs_of_the_core() -> None:
  """Each setting has its input, none of which an episode's first step sees."""
  rng = np.random.default_rng(0)
  window = random_window(5, 3, continuous)
  first = np.asarray(window.timesteps.first)
  previous = continuous(rng, (6, 7))
  moved = previous.copy()
  moved[:, :, 0] += 0.5
  for settings, differs in (
    (dict(), [False, False]),
    (dict(previous_action=True), [True, False]),
    (dict(previous_reward=True), [False, True]),
  ):
    flags: Any = dict(previous_action=False, previous_reward=False) | settings
    actor = Actor(hidden=(8,), core='gru', core_size=5, **flags).bind(VECTOR, BOX)
    params = jax.jit(actor.init)(jax.random.key(0))
    state = actor.initial_state(7)

    @jax.jit
    def unroll(t: Any, before: Any, actor: Any = actor, params: Any = params, state: Any = state) -> Any:  # fmt: skip
      return actor.unroll(params, state, t, previous=before)[0]

    def outputs(*x: Any, unroll: Any = unroll) -> np.ndarray:
      return np.asarray(unroll(*x))

    was = outputs(window.timesteps, previous)
    other = outputs(window.timesteps, moved)
    reward = outputs(window.timesteps._replace(reward=window.timesteps.reward + 1), previous)
    for now, expected in zip((other, reward), differs, strict=True):
      assert (np.abs(now - was).max() > 1e-3) == expected
      assert np.abs(now - was)[0][first[0]].max(initial=0.0) == 0


def test_a_core_needs_no_short_cut() -> None:
  sizes = [
    Actor(**CORE, shortcut=cut)
    .bind(VECTOR, BOX)
    .init(jax.random.key(0))['Mlp_0']['Dense_0']['kernel']
    .shape
    for cut in (False, True)
  ]
  assert sizes == [(5, 8), (8, 8)]


@pytest.mark.parametrize(
  ('make_agent', 'message'),
  [
    (lambda: SAC(recurrence=Recurrence(burn_in=2)), 'no network has a core.*--agent.actor.core'),
    (lambda: DQN(recurrence=Recurrence('stored')), 'no network has a core'),
    (lambda: D4PG(recurrence=Recurrence(sequence=2)), 'no network has a core'),
    (lambda: Recurrence('episode', burn_in=1), 'no burn-in.*1'),
    (lambda: Recurrence(sequence=0), 'sequence.*1.*0'),
    (lambda: R2D2(QNetwork(core='gru', shortcut=True)), 'r2d2.*observations only.*dqn'),
    (
      lambda: bound(AGENTS['sac'], start='stored', sequence=4).memory(8, 5),
      r'unroll of 5.*sequence of 4.*--unroll-length 4',
    ),
  ],
)
def test_wrong_settings(make_agent: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    make_agent()
