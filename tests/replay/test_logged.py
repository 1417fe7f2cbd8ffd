"""Replay of streams of which a share are a log's: sampling by share, and agents that replay it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from shorthand import slow_after

from podrace.agents.bc import BC
from podrace.agents.dqn import DQN
from podrace.agents.logged import Logged
from podrace.agents.population import Varied
from podrace.agents.r2d2 import R2D2
from podrace.envs.logs.log_environment import FLAG, INNER, RECORDED
from podrace.envs.logs.share import is_logged
from podrace.errors import UsageError
from podrace.networks import ActorCritic, QNetwork
from podrace.replay import Buffer
from podrace.replay.windows import Windows, replay_of
from podrace.settings.agents import bind
from podrace.topology import AXIS
from podrace.types import FIRST, LAST, MID, ActorOutput, Sample, TimeStep, Trajectory

B, T = 12, 4


def filled(buffer: Buffer, logged: tuple[int, int], updates: int = 3) -> tuple[Any, Any]:
  """A replay and its memory of B streams, with the environment's number as the observation."""
  w = Windows(buffer, 1, B, T, False, 0, None, logged=logged)
  replay = replay_of(w)
  env_id = np.arange(B, dtype=np.int32)
  row, ones = np.tile(np.float32(env_id), (T + 1, 1)), np.ones((T + 1, B), np.float32)
  timesteps = TimeStep(row, ones, ones, np.full((T + 1, B), MID, np.int8))
  trajectory = Trajectory(timesteps, ActorOutput(np.zeros((T, B), np.int32)), (), env_id)
  memory = replay.init(trajectory)
  add = jax.jit(replay.add)
  for _ in range(updates):
    memory = add(memory, trajectory)
  return replay, memory


def counts(buffer: Buffer, logged: tuple[int, int], updates: int = 3, draws: int = 200) -> Any:
  """Samples of streams that act [draws], and of each stream [B]."""
  replay, memory = filled(buffer, logged, updates)
  keys = jax.random.split(jax.random.key(0), draws)
  sample = jax.jit(jax.vmap(lambda key: replay.sample(memory, key).trajectory.env_id))(keys)
  of_log = np.asarray(is_logged(np.asarray(sample), logged))
  return (~of_log).sum(1), np.bincount(np.asarray(sample).ravel(), minlength=B)


@pytest.mark.parametrize(('share', 'batch'), [(0.25, 16), (0.5, 16), (0.3, 16), (0.0, 8), (1.0, 8)])
def test_samples_by_share(share: float, batch: int) -> None:
  """Each batch has the share, to one sample; streams of a kind are drawn alike."""
  online, each = counts(Buffer(1000, batch, 1, online_share=share), (2, 3))
  assert set(online.tolist()) <= {int(np.floor(share * batch)), int(np.ceil(share * batch))}
  assert abs(online.mean() - share * batch) < 0.15
  logged = np.asarray(is_logged(np.arange(B), (2, 3)))
  for kind, part in ((logged, 1 - share), (~logged, share)):
    expected = 200 * batch * part / kind.sum()
    assert np.abs(each[kind] - expected).max() <= 6 * np.sqrt(expected) + 1


def test_a_share_rises_with_environment_steps() -> None:
  buffer = Buffer(1000, 20, 1, online_share=0.1, online_share_end=0.5, online_share_steps=4 * B * T)
  for updates, share in ((1, 0.2), (2, 0.3), (4, 0.5), (6, 0.5)):
    online, _ = counts(buffer, (1, 2), updates, draws=20)
    assert abs(online.mean() - share * 20) < 0.01, updates


def test_without_a_share_streams_are_drawn_as_ever() -> None:
  """Also with a share, if no stream or every stream is a log's."""
  plain, memory = filled(Buffer(1000, 16, 1), (0, 1))
  expected = jax.jit(plain.sample)(memory, jax.random.key(3)).trajectory.env_id
  for buffer, logged in (
    (Buffer(1000, 16, 1), (1, 2)),
    (Buffer(1000, 16, 1, online_share=0.5), (0, 1)),
    (Buffer(1000, 16, 1, online_share=0.5), (1, 1)),
  ):
    replay, memory = filled(buffer, logged)
    sample = jax.jit(replay.sample)(memory, jax.random.key(3))
    np.testing.assert_array_equal(sample.trajectory.env_id, expected)


@pytest.mark.parametrize(
  'settings',
  [
    dict(online_share=1.5),
    dict(online_share=-0.1),
    dict(online_share_end=0.5),
    dict(online_share=0.1, online_share_end=0.5),
    dict(online_share=0.1, online_share_steps=5),
    dict(online_share=0.1, priority_exponent=0.5),
  ],
)
def test_shares_that_are_refused(settings: dict[str, Any]) -> None:
  with pytest.raises(ValueError, match='online_share'):
    Buffer(**settings)


# --- agents ----------------------------------------------------------------------------------------

VECTOR, THREE, BOX = spaces.Box(-1, 1, (3,)), spaces.Discrete(3), spaces.Box(-2, 2, (2,))


def bound(agent: Any, action: Any = THREE) -> Any:
  return bind(agent, SimpleNamespace(observation_space=VECTOR, action_space=action), 10, 4)


def seen(recorded: Any, flag: Any) -> TimeStep:
  n = len(flag)
  observation = {
    INNER: np.linspace(-1, 1, 3 * n, dtype=np.float32).reshape(n, 3), RECORDED: np.asarray(recorded),
    FLAG: np.asarray(flag, np.int8),
  }  # fmt: skip
  zero = np.zeros(n, np.float32)
  return TimeStep(observation, zero, zero + 1, np.full(n, MID, np.int8))


R2 = R2D2(QNetwork(hidden=(8,), core='gru', core_size=4), sequence=4, burn_in=1)
APEX = DQN(QNetwork(hidden=(8,)), n_step=2, actor_priorities=True, epsilon=1.0)


@pytest.mark.parametrize('agent', slow_after(1, R2, APEX, Varied(R2, ('learning_rate',), (1e-3,))))
def test_extras_belong_to_the_recorded_actions(agent: Any) -> None:
  """The value that acting notes is that of the action that is taken, recorded or not."""
  plain = bound(agent)
  agent = Logged(plain, (1, 2))
  timestep = seen(jnp.array([2, 0, 1, 0], jnp.int32), [1, 0, 1, 0])
  params = jax.jit(agent.init)(jax.random.key(0)).params
  state = agent.initial_state(jnp.arange(4))
  inner = timestep._replace(observation=timestep.observation[INNER])

  def act(agent: Any, timestep: TimeStep, *forced: Any) -> Any:
    return jax.device_get(
      jax.jit(lambda key: agent.act(params, state, timestep, key, *forced))(jax.random.key(1))
    )[0]

  output, own = act(agent, timestep), act(plain, inner)
  assert output.action[[0, 2]].tolist() == [2, 1]
  assert (output.action == own.action)[[1, 3]].all()
  for action in range(3):
    forced = act(plain, inner, lambda x, action=action: jnp.full_like(x, action))
    for i in np.flatnonzero(output.action == action):
      assert output.extras.value[i] == forced.extras.value[i]
  np.testing.assert_array_equal(output.extras.best, own.extras.best)


def test_extras_of_other_actions_are_refused() -> None:
  class Extras(BC):
    def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
      output, state = super().act(params, state, timestep, key)
      return output._replace(extras=output.action), state

  agent = Logged(bound(Extras()), (1, 1))
  params = jax.eval_shape(agent.init, jax.random.key(0)).params
  with pytest.raises(UsageError, match='replace'):
    jax.eval_shape(agent.act, params, (), seen(np.zeros(2, np.int32), [1, 1]), jax.random.key(1))


@pytest.mark.parametrize('action', [THREE, BOX, spaces.MultiDiscrete([2, 3])])
@pytest.mark.parametrize('share', [pytest.param((1, 1), marks=pytest.mark.slow), (1, 2)])
def test_recorded_actions_are_taken(action: Any, share: tuple[int, int]) -> None:
  agent = Logged(bound(BC(ActorCritic(hidden=(4,))), action), share)
  action.seed(0)
  recorded = np.stack([action.sample() for _ in range(4)])
  recorded = recorded.astype(jax.dtypes.canonicalize_dtype(recorded.dtype))
  flag = [1, 1, 1, 1] if share == (1, 1) else [1, 0, 1, 0]
  params, act = jax.jit(agent.init)(jax.random.key(0)).params, jax.jit(agent.act)
  output, _ = jax.device_get(act(params, (), seen(recorded, flag), jax.random.key(1)))
  taken = np.asarray(flag) == 1
  np.testing.assert_array_equal(output.action[taken], recorded[taken])
  own, _ = act(params, (), seen(recorded, [0] * 4), jax.random.key(1))
  assert output.action.dtype == own.action.dtype


def learned(agent: Any, sample: Sample) -> Any:
  """The result of one update on one device."""
  train, key = jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1)
  sample, train = jax.tree.map(lambda x: np.asarray(x)[None], (sample, train))
  step = jax.vmap(lambda *x: agent.learn(*x, key), axis_name=AXIS)
  return jax.device_get(jax.jit(step)(train, sample))


def test_learning_sees_the_plain_observation() -> None:
  plain = bound(BC(ActorCritic(hidden=(4,)), Buffer(batch_size=4, min_size=1)))
  agent = Logged(plain, (1, 1))
  replay = agent.memory(4, 2)
  assert replay.windows.logged == (1, 1) and plain.memory(4, 2).windows.logged == (0, 1)
  timestep = seen(jnp.array([2, 0, 1, 0], jnp.int32), [1] * 4)
  both = jax.tree.map(lambda x: np.stack([x, x]), timestep)
  outputs = ActorOutput(timestep.observation[RECORDED][None])
  sample = Sample(Trajectory(both, outputs, (), jnp.arange(4)), jnp.ones(4), jnp.arange(4))
  inner = both._replace(observation=both.observation[INNER])
  alone = sample._replace(trajectory=sample.trajectory._replace(timesteps=inner))
  jax.tree.map(np.testing.assert_array_equal, learned(agent, sample), learned(plain, alone))


def test_cloning_maximises_the_likelihood_of_actions_within_episodes() -> None:
  """The loss is the mean surprise, and the step from LAST to FIRST teaches nothing."""
  agent = bound(BC(ActorCritic(hidden=(4,)), Buffer(batch_size=4, min_size=1)))
  observation = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
  zero, kinds = np.zeros(4, np.float32), np.array([MID, LAST, FIRST, MID], np.int8)
  t = TimeStep(observation, zero, zero + 1, kinds)

  def sample_of(actions: Any) -> Sample:
    window = jax.tree.map(lambda x: np.stack([x, x]), t)
    outputs = ActorOutput(jnp.array([actions], jnp.int32))
    return Sample(Trajectory(window, outputs, (), jnp.arange(4)), jnp.ones(4), jnp.arange(4))

  train, priority, metrics = learned(agent, sample_of([2, 0, 1, 0]))
  params = jax.jit(agent.init)(jax.random.key(0)).params
  log = jax.jit(lambda params: jax.nn.log_softmax(agent.network.step(params, (), t)[0].policy))
  log_p = np.asarray(log(params))
  surprise = -log_p[np.arange(4), [2, 0, 1, 0]]
  np.testing.assert_allclose(metrics['loss'][0], surprise[[0, 2, 3]].sum() / 4, rtol=1e-5)
  wrong = log_p.argmax(1) != np.array([2, 0, 1, 0])
  np.testing.assert_allclose(metrics['action_error'][0], wrong[[0, 2, 3]].mean())
  assert priority[0, 1] == 0 and (priority[0, [0, 2, 3]] > 0).all()
  other, *_ = learned(agent, sample_of([2, 1, 1, 0]))
  jax.tree.map(np.testing.assert_array_equal, train, other)
  after = jax.tree.map(lambda x: x[0], train).params
  better = (np.asarray(log(after)) - log_p)[np.arange(4), [2, 0, 1, 0]]
  assert better[[0, 2, 3]].sum() > 0
