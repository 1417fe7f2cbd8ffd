"""Correlated noise of SAC and D4PG: its distribution, the states of acting, and far exploration."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_recurrent import AGENTS, episode, learn
from test_recurrent import bound as with_core
from test_value_agents import CONTINUOUS, anakin, assert_learns
from test_value_losses import VECTOR, bound

from podrace.agents.correlated_noise import NoisyState
from podrace.agents.d4pg import D4PG
from podrace.agents.sac import SAC
from podrace.types import FIRST, MID, TimeStep

FAR = dict(noise_correlation=0.9)
STEPS, NUM_ENVS = 6, 4_000


def timestep(kind: int) -> TimeStep:
  zeros, observation = jnp.zeros(NUM_ENVS), jnp.zeros((NUM_ENVS, *VECTOR.shape))
  return TimeStep(observation, zeros, zeros, jnp.full(NUM_ENVS, kind, jnp.int8))


def noise_of(agent: Any, kinds: list[int]) -> np.ndarray:
  """The noise [T, B, n] of steps of these kinds."""
  params = jax.jit(agent.init)(jax.random.key(0)).params
  state, act, noises = agent.initial_state(jnp.arange(NUM_ENVS)), jax.jit(agent.act), []
  for i, kind in enumerate(kinds):
    _, state = act(params, state, timestep(kind), jax.random.key(i))
    noises.append(np.asarray(state.noise))
  return np.stack(noises)


@pytest.mark.parametrize('agent', [SAC(**FAR), D4PG(**FAR)], ids=['sac', 'd4pg'])
def test_each_noise_is_normal_and_steps_correlate_by_their_distance(agent: Any) -> None:
  noise = noise_of(bound(agent), [FIRST, *[MID] * (STEPS - 1)])[..., 0]
  np.testing.assert_allclose(noise.mean(axis=1), 0, atol=0.07)
  np.testing.assert_allclose(noise.std(axis=1), 1, atol=0.05)
  correlation = np.corrcoef(noise)[-1, ::-1]
  np.testing.assert_allclose(correlation, 0.9 ** np.arange(STEPS), atol=0.05)


def test_an_episode_begins_with_independent_noise() -> None:
  noise = noise_of(bound(SAC(**FAR)), [FIRST, MID, FIRST, MID])[..., 1]
  lagged = [np.corrcoef(noise[i], noise[i + 1])[0, 1] for i in range(3)]
  np.testing.assert_allclose(lagged, [0.9, 0, 0.9], atol=0.05)


@pytest.mark.parametrize('kind', [SAC, D4PG])
def test_the_first_actions_are_those_without_correlation(kind: Any) -> None:
  near, far = bound(kind()), bound(kind(**FAR))
  params, ids = jax.jit(near.init)(jax.random.key(0)).params, jnp.arange(NUM_ENVS)
  (plain, state), (noisy, _) = (
    jax.jit(agent.act)(params, agent.initial_state(ids), timestep(FIRST), jax.random.key(1))
    for agent in (near, far)
  )
  assert state == () and plain.action.std() > 0.1
  np.testing.assert_allclose(noisy.action, plain.action, atol=1e-5)


@pytest.mark.parametrize('kind', [SAC, D4PG])
def test_greedy_actions_have_no_noise_and_no_state(kind: Any) -> None:
  far = bound(kind(greedy=True, **FAR))
  params, state = jax.jit(far.init)(jax.random.key(0)).params, far.initial_state(jnp.arange(2))
  output, after = jax.jit(far.act)(params, state, timestep(MID), jax.random.key(1))
  assert state == after == () and np.ptp(output.action, axis=0).tolist() == [0, 0]


def test_stored_states_of_a_core_are_learned_from_beside_the_noise() -> None:
  agent = with_core(AGENTS['sac'], start='stored', sequence=6)
  far = dataclasses.replace(agent, **FAR)
  assert isinstance(far.initial_state(jnp.arange(1)), NoisyState)
  train, window = jax.jit(agent.init)(jax.random.key(0)), episode(agent, 6, 0, seed=1)
  memory = jax.tree.map(lambda x: x + 0.5, agent.initial_state(jnp.arange(1)))
  plain = learn(agent, train, window._replace(agent_state=memory))
  state = NoisyState(memory, jnp.ones((1, 2)))
  noisy = learn(far, train, window._replace(agent_state=state))
  jax.tree.map(np.testing.assert_array_equal, plain, noisy)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sac', 'd4pg'])
def test_correlated_noise_finds_a_goal_that_is_far(name: str) -> None:
  """Independent noise never reaches the flag of the mountain, so no action is the best policy."""
  agent = dataclasses.replace(CONTINUOUS[name], noise_correlation=0.97)
  if name == 'd4pg':
    agent = dataclasses.replace(agent, v_min=-100, v_max=100)
  program = anakin(agent, 'gymnax:MountainCarContinuous-v0', 1, 8, 8)
  assert_learns(program, 300, 75, least=16, above=50)
