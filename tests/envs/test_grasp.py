"""Grasp: rules by hand, the angle modulo 180 degrees, held-out objects, and the stated successes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace.envs import make
from podrace.envs.base import batch
from podrace.envs.own.grasp import OBJECTS, Grasp, GraspState, scripted
from podrace.errors import UnknownName


def key(seed: int = 0) -> Any:
  return jax.random.key(seed)


@functools.cache
def compiled(**options: Any) -> tuple[Any, Any]:
  env = Grasp(**options)
  return jax.jit(env.reset), jax.jit(env.step)


def state_at(place: Any, gripper: Any, time: int = 0) -> GraspState:
  state, _ = compiled()[0](key())
  return state._replace(
    place=jnp.float32(place), gripper=jnp.float32(gripper), time=jnp.int32(time)
  )


def stepped(state: GraspState, action: Any, **options: Any) -> Any:
  return compiled(**options)[1](state, jnp.float32(action), key())


def test_a_move_is_in_pixels_and_degrees() -> None:
  state, timestep = stepped(state_at([8, 8, 0], [12, 12, 0.1]), [1, -0.5, 0.5, -1])
  np.testing.assert_allclose(state.gripper, [14, 11, 0.1 + math.radians(15)], rtol=1e-6)
  assert (timestep.reward, timestep.discount, timestep.last) == (np.float32(-0.02), 1, False)
  state, _ = stepped(state_at([8, 8, 0], [17, 6, 0]), [5, -5, 0, -1])  # the border, and clipped
  np.testing.assert_allclose(state.gripper[:2], [18, 5])


@pytest.mark.parametrize(
  ('gripper', 'success'),
  [
    ([9.4, 8, 0.1], 1), ([9.6, 8, 0.1], 0), ([8, 6.6, 0.1], 1), ([9.2, 9.2, 0.1], 0),
    ([8, 8, 0.1 + math.radians(19)], 1), ([8, 8, 0.1 + math.radians(21)], 0),
    ([8, 8, math.pi - math.radians(10)], 1),  # 180 degrees are none
    ([8, 8, 0.1 + math.pi / 2], 0),
  ],
)  # fmt: skip
def test_closing_ends_the_episode(gripper: Any, success: int) -> None:
  env, state = Grasp(), state_at([8, 8, 0.1], gripper)
  state, timestep = stepped(state, [0, 0, 0, 0.1])
  assert (timestep.reward, timestep.discount, timestep.last) == (success, 0, True)
  assert env.infos(state)['success'] == success
  _, timestep = stepped(state_at([8, 8, 0.1], gripper), [0, 0, 0, 0])
  assert not timestep.last


def test_it_is_truncated_and_may_slip() -> None:
  _, timestep = stepped(state_at([8, 8, 0], [16, 8, 0], time=9), [0, 0, 0, -1])
  assert (timestep.discount, timestep.last) == (1, True)
  _, timestep = stepped(state_at([8, 8, 0], [8, 8, 0]), [0, 0, 0, 1], slip=1.0)
  assert (timestep.reward, timestep.discount, timestep.last) == (0, 0, True)
  state, close = state_at([8, 8, 0], [8, 8, 0]), jnp.float32([0, 0, 0, 1])
  held = jax.jit(jax.vmap(lambda k: Grasp(slip=0.3).step(state, close, k)[1].reward))
  assert abs(float(held(jax.random.split(key(), 2000)).mean()) - 0.7) < 0.04


def test_the_image_shows_place_and_angle() -> None:
  """The object's pixels have their centre and their principal axis where the state has them."""
  for i in range(20):
    state, timestep = jax.device_get(compiled(objects='unseen')[0](key(i)))
    for plane, (x, y, angle) in ((0, state.place), (1, state.gripper)):
      weight = np.asarray(timestep.observation)[..., plane].astype(float)
      rows, columns = np.indices(weight.shape)
      mean = np.array([np.average(columns, weights=weight), np.average(rows, weights=weight)])
      where = np.array([x, y]) - state.gripper[:2] + 11.5  # the camera is over the gripper
      np.testing.assert_allclose(mean, where, atol=0.4)
      spread = np.cov(np.stack([columns.ravel(), rows.ravel()]), aweights=weight.ravel())
      axis = np.linalg.eigh(spread)[1][:, 1]
      seen = math.atan2(axis[1], axis[0]) + plane * math.pi / 2  # the fingers lie across
      error = abs((seen - angle + math.pi / 2) % math.pi - math.pi / 2)
      assert error < math.radians(8), (i, plane)


def test_distractors_stay_away() -> None:
  reset = jax.jit(jax.vmap(Grasp(distractors=3).reset))
  state = jax.device_get(reset(jax.random.split(key(), 500))[0])
  assert len(state.distractors) == 3
  for disc in state.distractors:
    offset = np.asarray(disc[:, :2] - state.place[:, :2])
    assert disc.shape == (500, 3) and np.linalg.norm(offset, axis=-1).min() >= 5.99


def test_no_object_for_testing_is_seen_in_training() -> None:
  train, unseen = OBJECTS['train'], OBJECTS['unseen']
  for column in range(3):
    assert not set(train[:, column]) & set(unseen[:, column])
  state, _ = jax.jit(jax.vmap(Grasp(objects='unseen').reset))(jax.random.split(key(), 500))
  assert {tuple(x) for x in np.asarray(state.shape)} == {tuple(x) for x in unseen}


def success(policy: Any, episodes: int = 2000, **options: Any) -> float:
  """Share of episodes that end with success."""
  env = batch(make('podrace:grasp,' + ','.join(f'{k}={v}' for k, v in options.items())), episodes)

  def step(carry: Any, step_key: Any) -> Any:
    state, over, won = carry
    act_key, env_key = jax.random.split(step_key)
    keys = jax.random.split(act_key, episodes)
    action = jax.vmap(policy)(state.inner, keys)
    state, timestep = env.step(state, action, jax.random.split(env_key, episodes))
    won = jnp.where(over, won, env.infos(state)['success'])
    return (state, over | timestep.last, won), None

  state, _ = env.reset(key())
  start = (state, jnp.zeros(episodes, bool), jnp.zeros(episodes))
  (_, over, won), _ = jax.lax.scan(step, start, jax.random.split(key(1), 10))
  assert over.all()
  return float(won.mean())


def uniform(state: Any, k: Any) -> Any:
  return jax.random.uniform(k, (4,), minval=-1, maxval=1)


@pytest.mark.slow
def test_random_scripted_and_best_success() -> None:
  assert success(uniform, objects='unseen') < 0.02
  assert 0.22 < success(scripted, distractors=2) < 0.29
  assert success(lambda s, k: scripted(s, k, 0.0), objects='unseen') > 0.99


@pytest.mark.parametrize('wrong', ['objects=all', 'slip=1.5', 'distractors=-1', 'steps=0'])
def test_bad_options_are_refused(wrong: str) -> None:
  with pytest.raises((ValueError, UnknownName), match=wrong.partition('=')[0]):
    make(f'podrace:grasp,{wrong}')
