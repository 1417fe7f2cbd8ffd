"""The option hide=velocity, and the memory task with a number as its action."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from podrace import cli, configure, envs
from podrace.agents.recurrent import Recurrence
from podrace.envs.hidden import POSITIONS
from podrace.envs.host import base as host
from podrace.envs.host import registered
from podrace.errors import UnknownName
from podrace.replay import Buffer
from podrace.settings.resolved import Resolved, resolve

KEPT = {  # by the documentation of each environment
  'gymnax:CartPole-v1': [0, 2],
  'gymnax:Pendulum-v1': [0, 1],
  'gymnax:Acrobot-v1': [0, 1, 2, 3],
  'gymnax:MountainCar-v0': [0],
  'brax:inverted_pendulum': [0, 1],
}


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=pytest.mark.slow) if 'brax' in n else n for n in KEPT]
)
def test_positions_are_left(name: str) -> None:
  """The same states, rewards and ends, and observations without the rest of the numbers."""
  whole, hidden = envs.make(name), envs.make(f'{name},hide=velocity')
  keys = jax.random.split(jax.random.key(1), 20)
  states = [env.reset(jax.random.key(0)) for env in (whole, hidden)]
  step, step_hidden = jax.jit(whole.step), jax.jit(hidden.step)
  action = jnp.ones(whole.action_space.shape, whole.action_space.dtype)
  for key in keys:
    (_, t), (_, h) = states
    assert hidden.observation_space.contains(np.asarray(h.observation))
    np.testing.assert_array_equal(h.observation, t.observation[np.array(KEPT[name])])
    assert (h.reward, h.step_type) == (t.reward, t.step_type)
    states = [
      step(states[0][0], action, key),
      step_hidden(states[1][0], action, jax.random.clone(key)),
    ]
  assert np.ptp(np.asarray(states[0][1].observation)) > 0


def test_gymnasium_hides_the_same_in_workers() -> None:
  name = 'Pendulum-v1'
  whole, hidden = (registered.make(name, o) for o in ({}, {'hide': 'velocity'}))
  seen, positions = (env.reset(seed=3)[0] for env in (whole, hidden))
  np.testing.assert_array_equal(positions, seen[:2])
  spec = host.make(f'gymnasium:{name},hide=velocity')
  assert spec.observation_space.shape == (2,) and spec.longest_episode == 200
  pool = spec.make(host.PoolArgs(2, 2, np.uint32([3, 4]), 1, 60.0))
  try:
    pool.reset()
    first = pool.recv().timestep.observation
    np.testing.assert_allclose(first[0], whole.reset(seed=3)[0][:2], rtol=1e-6)
  finally:
    pool.close()


def test_every_listed_environment_is_there() -> None:
  """Positions are fewer than the numbers of an observation. Brax compiles too long for all."""
  for library in ('gymnax', 'gymnasium'):
    make = envs.make if library == 'gymnax' else host.make
    for name, kept in POSITIONS[library].items():
      plain, hidden = make(f'{library}:{name}'), make(f'{library}:{name},hide=velocity')
      assert hidden.observation_space.shape == (len(kept),) < plain.observation_space.shape


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('podrace:catch,hide=velocity', 'podrace:catch has no option hide=velocity.*gymnax:Pendulum'),
    ('gymnax:Catch-bsuite,hide=velocity', 'no option hide=velocity.*brax:ant'),
    ('gymnax:Pendulum-v1,hide=position', "hide is velocity, not 'position'"),
    ('gymnasium:Taxi-v3,hide=velocity', 'gymnasium:Taxi-v3 has no option hide=velocity'),
  ],
)
def test_what_has_no_velocities_refuses(name: str, message: str) -> None:
  make = host.make if name.startswith('gymnasium') else envs.make
  with pytest.raises(UnknownName, match=message):
    make(name)


def test_windows_longer_than_episodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
  """By the limits of each library, with exit 2."""
  core = ['--agent.actor.core', 'gru', '--agent.recurrence.start', 'episode']
  for env, longest in (('gymnax:Pendulum-v1,hide=velocity', 200), ('gymnasium:Pendulum-v1', 200),
                       ('podrace:memory,length=4,continuous=true', 5)):  # fmt: skip
    command = ['train', '--agent', 'sac', '--env', env, *core]
    command += ['--agent.recurrence.sequence', str(longest + 1)]
    with pytest.raises(SystemExit) as exit_:
      cli.main(command)
    error = capsys.readouterr().err
    assert exit_.value.code == 2 and f'at most {longest}' in error, error


@pytest.mark.parametrize('replay', ['device', 'host'])
def test_replay_holds_the_beginnings_of_episodes(replay: str) -> None:
  """Else every gradient is 0 while it holds none."""
  config = configure(
    agent='sac', env='podrace:memory,length=4,continuous=true', architecture='sebulba',
    replay=replay, num_envs=8, unroll_length=2,
  )  # fmt: skip
  recurrence, least = Recurrence('episode', 3), 8 * (5 + 3)

  def resolved(capacity: int) -> Resolved:
    actor = dataclasses.replace(config.agent.actor, core='gru')
    buffer = Buffer(capacity, batch_size=8, min_size=8)
    agent = dataclasses.replace(config.agent, actor=actor, buffer=buffer, recurrence=recurrence)
    return resolve(dataclasses.replace(config, agent=agent))

  assert resolved(least).replay.windows.starts >= 5 + 3
  with pytest.raises(ValueError, match=f'--agent.buffer.capacity {least}'):
    _ = resolved(least - 1).replay


def test_memory_with_a_number() -> None:
  env = envs.make('podrace:memory,length=2,continuous=true')
  reset, act = jax.jit(env.reset), jax.jit(env.step)
  assert env.action_space == spaces.Box(-1, 1, (1,), np.float32)
  rewards = []
  for seed in range(6):
    state, t = reset(jax.random.key(seed))
    cue = float(t.observation[0])
    for _ in range(3):
      action = jnp.full(1, 0.3 * cue if seed % 2 else -0.3 * cue)
      state, t = act(state, action, jax.random.key(0))
    assert t.last
    rewards.append(float(t.reward))
  assert rewards == [-1, 1] * 3
