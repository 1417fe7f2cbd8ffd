"""Seaquest with fewer places in its lists is gymnax's Seaquest."""

from __future__ import annotations

from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrace.envs
from podrace.envs.adapters.seaquest import PLACES, few_places

LISTS = ('e_fish', 'e_subs', 'e_bullet', 'f_bullet', 'divers')
ENVS, STEPS = 16, 300


def played(env: Any, params: Any, hasten: bool = False) -> Any:
  """Play at random, and begin again where a game ends.

  `hasten`: the submarine stays at the surface, and enemies come and move as fast as they ever do.
  """

  def step(state: Any, key: Any) -> Any:
    act_key, env_key = jax.random.split(key)
    action = jnp.zeros(ENVS, int) if hasten else jax.random.randint(act_key, (ENVS,), 0, 6)
    observation, after, reward, over, _ = each(
      jax.random.split(env_key, ENVS), state, action, params
    )
    counts = jnp.stack([getattr(after, f'{name}_count') for name in LISTS])
    after = jax.tree.map(lambda x, y: jnp.where(jnp.expand_dims(over, range(1, x.ndim)), x, y), first, after)  # fmt: skip
    return after, (observation, reward, over, counts)

  each = jax.vmap(env.step_env, (0, 0, 0, None))
  _, one = env.reset_env(jax.random.key(0), params)
  if hasten:
    one = one.replace(e_spawn_speed=jnp.int32(1), move_speed=jnp.int32(2), e_spawn_timer=jnp.int32(0))  # fmt: skip
  first = jax.tree.map(lambda x: jnp.stack([x] * ENVS), one)
  keys = jax.random.split(jax.random.key(1), STEPS)
  with jax.numpy_rank_promotion('allow'):
    return jax.device_get(jax.jit(lambda state: jax.lax.scan(step, state, keys)[1])(first))


def test_each_number_is_that_of_gymnax() -> None:
  env, params = gymnax.make('Seaquest-MinAtar')
  theirs, ours = played(env, params), played(few_places()(), params)
  for x, y in zip(theirs, ours, strict=True):
    np.testing.assert_array_equal(x, y)
  _, reward, over, counts = ours
  assert over.sum() > ENVS and reward.sum() > 0 and (counts.max((0, 2)) > 0).all()


def test_no_list_is_full_at_the_highest_speed() -> None:
  _, params = gymnax.make('Seaquest-MinAtar')
  *_, over, counts = played(few_places()(), params, hasten=True)
  assert not over.any()
  enemies = counts[:, 0] + counts[:, 1]  # as if all were of one kind
  assert 20 < enemies.max() < PLACES and counts.max() < PLACES


@pytest.mark.parametrize('option, places', [('', PLACES), (',max_steps_in_episode=50', PLACES), (',enemy_shot_interval=0', 100)])  # fmt: skip
def test_places_follow_the_options(option: str, places: int) -> None:
  env = podrace.envs.make(f'gymnax:Seaquest-MinAtar{option}')
  state, _ = jax.eval_shape(env.reset, jax.random.key(0))
  assert {x.shape[0] for x in jax.tree.leaves(state) if x.ndim == 2} == {places}
