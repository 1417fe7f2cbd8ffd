"""Partial models of AvoidFuzzyBear: exact numbers, losses, and the plans of learned models."""

from __future__ import annotations

from collections.abc import Iterator

import causal
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace.envs.contract import check


@pytest.fixture(autouse=True)
def learn_anew() -> Iterator[None]:
  """A compiled `learn` has the values of the module when it was traced."""
  causal.learn.clear_cache()
  yield
  causal.learn.clear_cache()


def test_bear_is_an_environment() -> None:
  check(causal.bear(), key=jax.random.key(0), steps=50)


step = jax.jit(jax.vmap(causal.Bear().step))


@pytest.mark.parametrize(
  ('enter', 'teddy', 'grizzly', 'value'),
  [(0, 1, 1, 0.6), (1, 1, 1, 0.25), (1, 1, 0, 0.5), (1, 0, 1, -0.25), (1, 0, 0, 0.0)],
)
def test_the_value_of_each_policy(enter: int, teddy: int, grizzly: int, value: float) -> None:
  """By the enumeration, and by the mean reward of episodes in the environment."""
  hug = {causal.TEDDY: teddy, causal.GRIZZLY: grizzly}
  assert causal.true_value(enter, hug) == pytest.approx(value)
  places, total = np.full(2_000, causal.HOME, np.int32), 0.0
  for key, by_place in ((0, [enter] * 4), (1, [0, teddy, grizzly, 0])):
    keys = jax.random.split(jax.random.key(key), 2_000)
    after, timestep = jax.device_get(step(places, np.int32(by_place)[places], keys))
    total += np.mean(timestep.reward * (places != causal.END))
    places = after
  assert total == pytest.approx(value, abs=0.06)


def test_beliefs_by_enumeration() -> None:
  assert causal.exact(0.0) == pytest.approx(
    {'non-causal: hug': 1.0, 'causal: hug': 0.25, 'causal: best of each z': 0.5}
  )
  assert causal.exact(0.2)['non-causal: hug'] == pytest.approx(0.8 * 1.0 - 0.2 * 0.5)


def test_data_is_confounded() -> None:
  """In the data, hugs are paid 0.85 on average; for each z they are paid by the bear."""
  actions, rewards, z = jax.device_get(
    jax.jit(causal.episodes, static_argnums=1)(jax.random.key(0), 4_000)
  )
  hugged = actions.all(axis=1)
  assert rewards[hugged, 1].mean() == pytest.approx(causal.exact(0.1)['non-causal: hug'], abs=0.05)
  assert set(rewards[hugged & (z == 1), 1]) == {1.0}
  assert set(rewards[hugged & (z == 0), 1]) == {-0.5}
  assert (rewards[actions[:, 0] == 0] == np.float32([0.6, 0.0])).all()


def test_the_model_against_numpy() -> None:
  rng = np.random.default_rng(0)
  model = jax.device_get(jax.jit(causal.init)(jax.random.key(0)))
  actions, z = rng.integers(0, 2, (7, 2)), rng.integers(0, 2, 7).astype(np.float32)
  rewards, logits = jax.device_get(jax.jit(causal.unroll)(model, actions, z))
  for n in range(7):
    h = np.zeros(16)
    for t, seen in enumerate((0.0, z[n])):
      h = np.tanh(np.concatenate([h, [seen, actions[n, t], 1.0]]) @ model['dynamics'])
      assert rewards[n, t] == pytest.approx((h @ model['reward'])[0], abs=1e-5)
      if t == 0:
        assert logits[n] == pytest.approx((h @ model['z'])[0], abs=1e-5)


@pytest.mark.slow
def test_a_plan_that_enters_hugs_as_its_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
  """Without a reward at home the causal plan enters and hugs after z, which tells the bear."""
  monkeypatch.setattr(causal, 'HOME_REWARD', -1.0)
  model = causal.learn(jax.random.key(100), True)
  plan = causal.plan(model, True)
  assert plan['true value'] == 0.5 and plan['belief: best plan'] == pytest.approx(0.5, abs=0.1)


@pytest.mark.slow
def test_only_the_causal_model_plans_right() -> None:
  wrong, right = (causal.plan(causal.learn(jax.random.key(100), c), c) for c in (False, True))
  assert wrong['belief: best plan'] > 0.75 and wrong['true value'] == 0.25
  assert right['belief: hug'] == pytest.approx(0.25, abs=0.1) and right['true value'] == 0.6


@pytest.mark.slow
def test_the_causal_model_learns_how_often_each_z_comes(monkeypatch: pytest.MonkeyPatch) -> None:
  """Of teddies alone; the bears of the environment are as frequent, which hides a wrong sign."""
  actions, rewards, z = causal.episodes(jax.random.key(0), 500)
  monkeypatch.setattr(causal, 'episodes', lambda key, n: (actions, rewards, jnp.ones_like(z)))
  model = causal.learn(jax.random.key(1), True)
  _, logits = causal.unroll(model, jnp.full((1, 2), causal.ENTER), jnp.ones(1))
  assert float(jax.nn.sigmoid(logits[0])) > 0.95
