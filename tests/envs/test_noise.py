"""The option noise=0.1 of environments in JAX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrace.envs
from podrace import cli
from podrace.envs import make
from podrace.envs.base import batch
from podrace.errors import UnknownName

CART = 'gymnax:CartPole-v1,hide=velocity'
N, STEPS = 500, 8


def play(name: str) -> tuple[np.ndarray, np.ndarray]:
  """True and observed positions [STEPS + 1, N, 2], by pushes to the right."""
  env = batch(make(name), N)

  def both(state: Any, timestep: Any) -> Any:
    return jnp.stack([state.inner.x, state.inner.theta], axis=1), timestep.observation

  def step(state: Any, key: Any) -> Any:
    actions = jnp.ones(N, jnp.int32)
    state, timestep = env.step(state, actions, jax.random.split(key, N))
    return state, both(state, timestep)

  state, timestep = jax.jit(env.reset)(jax.random.key(0))
  _, later = jax.jit(lambda s, k: jax.lax.scan(step, s, k))(
    state, jax.random.split(jax.random.key(1), STEPS)
  )
  first = both(state, timestep)
  true, seen = (np.concatenate([np.asarray(a)[None], b]) for a, b in zip(first, later, strict=True))
  return true, seen


def test_noise_is_gaussian_and_independent() -> None:
  true, seen = play(f'{CART},noise=0.02')
  noise = (seen - true)[:, :, 0]  # the cart is far from its bounds
  assert abs(noise.mean()) < 4 * 0.02 / noise.size**0.5
  assert abs(noise.std() / 0.02 - 1) < 0.05
  within = np.abs(noise) < 0.02
  assert abs(within.mean() - 0.683) < 0.03  # the share of a Gaussian within one deviation
  others = (seen - true)[:, :, 1]
  for a, b in ((noise[1:], noise[:-1]), (noise, others), (noise[:, 1:], noise[:, :-1])):
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.07
  true, seen = play(CART)
  np.testing.assert_array_equal(true, seen)


def test_noisy_observations_stay_in_their_space() -> None:
  """The angle is within 0.42 radians, so that much of the noise is clipped; the rest is not."""
  bound = float(make(CART).observation_space.high[1])
  _, seen = play(f'{CART},noise=0.3')
  angles = seen[0, :, 1]
  assert np.abs(angles).max() == np.float32(bound)
  beyond = math.erfc(bound / 0.3 / 2**0.5)  # the angle itself begins within 0.05
  assert abs(np.mean(np.abs(angles) == np.float32(bound)) - beyond) < 0.07
  assert make(f'{CART},noise=0.3').observation_space == make(CART).observation_space


def test_noise_changes_nothing_else() -> None:
  """One action that fells the pole: the same rewards and ends."""
  plain, noisy = (make(f'gymnax:CartPole-v1{x}') for x in ('', ',noise=1'))
  ends = []
  for env in (plain, noisy):
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    state = state._replace(inner=make_still(state.inner))
    step, rewards = jax.jit(env.step), []
    while not timestep.last:
      state, timestep = step(state, jnp.int32(1), jax.random.key(len(rewards)))
      rewards.append(float(timestep.reward))
    ends.append((rewards, float(timestep.discount)))
  assert ends[0] == ends[1] and len(ends[0][0]) > 5


def make_still(state: Any) -> Any:
  return state.replace(**{k: jnp.float32(0) for k in ('x', 'x_dot', 'theta', 'theta_dot')})


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('podrace:grasp,noise=0.1', 'podrace:grasp has no option noise.*floats.*uint8'),
    ('podrace:empty_rooms,noise=0.1', 'podrace:empty_rooms has no option noise.*NextStepReset'),
    ('gymnax:FrozenLake-misc,noise=0.1', 'FrozenLake-misc has no option noise.*Discrete'),
    ('gymnax:CartPole-v1,noise=0', 'noise is a positive number, such as 0.1, not 0'),
    ('gymnax:CartPole-v1,noise=-0.1', 'not -0.1'),
    ('gymnax:CartPole-v1,noise=1e999', 'not inf'),
    ('gymnax:CartPole-v1,noise=True', 'not True'),
    ('gymnax:CartPole-v1,noise=None', 'not None'),
    ('gymnax:CartPole-v1,noise=loud', "not 'loud'"),
  ],
)
def test_where_it_does_not_apply_it_is_refused(name: str, message: str) -> None:
  with pytest.raises(UnknownName, match=message):
    make(name)


@pytest.mark.parametrize(
  'env', ['podrace:grasp,noise=0.1', 'gymnasium:CartPole-v1,noise=0.1', 'gymnax:Acrobot-v1,noise=x']
)
def test_the_command_ends_with_2_and_one_line(env: str, capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(SystemExit) as exit_:
    cli.main(['train', '--env', env])
  error = capsys.readouterr().err
  assert exit_.value.code == 2 and 'noise' in error and error.count('\n') == 1


def noisy(noise: float = 0.5, hide: str = '') -> Any:
  return podrace.envs.make(f'podrace:catch,rows={int(noise * 10)},columns={len(hide)}')


def test_functions_of_the_users_may_have_the_options_themselves() -> None:
  assert make(f'python:{__name__}.noisy,noise=0.7,hide=ab').observation_space.shape == (7, 2)
