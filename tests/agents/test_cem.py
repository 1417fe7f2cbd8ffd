"""The cross-entropy method: known optima, a slow reference, and the sample that it returns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrace.agents.cem import CEM, MIXED, ActionLayout, fit, maximize, uniform

B = 5


def quadratic(optimum: Any) -> Any:
  """Scores of actions [B, N, n] that are best at `optimum` [B, n], with axes of unequal slope."""
  slope = np.linspace(1.0, 3.0, optimum.shape[-1], dtype=np.float32)[None, None]

  def score(action: Any) -> Any:
    return -jnp.sum(slope * jnp.square(action - optimum[:, None]), axis=-1)

  return score


def numbers(key: int, shape: Any, limit: float = 0.9) -> Any:
  return np.random.default_rng(key).uniform(-limit, limit, shape).astype(np.float32)


def best_of(score: Any, batch: int, layout: ActionLayout, settings: CEM, seed: int = 0) -> Any:
  """The actions and the scores of `maximize`, compiled."""
  search = jax.jit(lambda key: maximize(score, batch, layout, settings, key))
  return jax.device_get(search(jax.random.key(seed)))


@pytest.mark.parametrize('size', [1, 4])
def test_optimum_inside(size: int) -> None:
  """Each state has an optimum of its own."""
  optimum = numbers(1, (B, size))
  settings = CEM(iterations=6, samples=256, elites=16, min_std=1e-3)
  action, score = best_of(quadratic(optimum), B, ActionLayout(size), settings)
  np.testing.assert_allclose(action, optimum, atol=0.02)
  again = jax.jit(quadratic(optimum))(action[:, None])
  np.testing.assert_allclose(score, np.asarray(again)[:, 0], rtol=1e-6)


def test_optimum_at_and_beyond_the_bounds() -> None:
  optimum = np.float32([[1.0, -1.0, 0.0], [3.0, 0.5, -2.0]])
  settings = CEM(iterations=5, samples=128, elites=8)
  action, _ = best_of(quadratic(optimum), 2, ActionLayout(3), settings)
  np.testing.assert_allclose(action, np.clip(optimum, -1, 1), atol=0.05)
  assert (np.abs(action) <= 1).all() and (action[1, 0], action[1, 2]) == (1, -1)


def test_the_papers_settings_come_close() -> None:
  """Two iterations of 64 samples; random search with as many samples is worse."""
  score = quadratic(numbers(2, (200, 4)))
  _, best = best_of(score, 200, ActionLayout(4), CEM(), 3)
  once = CEM(iterations=1, samples=128)
  _, random = best_of(score, 200, ActionLayout(4), once, 4)
  assert best.mean() > -0.25 and best.mean() > 0.7 * random.mean()


def test_mixed_with_one_hot_groups() -> None:
  """The best numbers depend on the choices, and a good number with a wrong choice is worse."""
  layout = ActionLayout(1, (3, 2))
  centres = np.float32([[-0.8, 0.0, 0.7], [0.6, -0.4, 0.2]])
  gains = np.float32([[0.0, 0.5, 2.0], [3.0, 0.0, 1.0]])

  def score(action: Any) -> Any:
    x, three, two = action[..., 0], action[..., 1:4] > 0, action[..., 4:] > 0
    assert action.shape == (2, 64, 6)
    centre = jnp.sum(three * centres[:, None], -1)
    return jnp.sum(three * gains[:, None], -1) - jnp.square(x - centre) + two[..., 1]

  settings = CEM(iterations=4, samples=64)
  action, best = best_of(score, 2, layout, settings)
  np.testing.assert_array_equal(action[:, 1:], [[-1, -1, 1, -1, 1], [1, -1, -1, -1, 1]])
  np.testing.assert_allclose(action[:, 0], [0.7, 0.6], atol=0.1)
  np.testing.assert_allclose(best, [3.0, 4.0], atol=0.01)


def test_choices_alone() -> None:
  layout = ActionLayout(0, (5,))

  def score(action: Any) -> Any:
    return jnp.sum(action * jnp.eye(5)[:B][:, None], -1)

  action, _ = best_of(score, B, layout, CEM())
  np.testing.assert_array_equal(np.argmax(action, -1), np.arange(B))
  np.testing.assert_array_equal(np.sum(action, -1), -3)


def reference_fit(actions: Any, scores: Any, settings: CEM) -> tuple[Any, Any]:
  """Means and standard deviations of the elites, by sorting."""
  order = np.argsort(-scores, axis=1, kind='stable')[:, : settings.elites]
  elites = np.take_along_axis(actions, order[..., None], axis=1)
  return elites.mean(1), np.maximum(elites.std(1, ddof=1), settings.min_std)


def test_the_fit_is_that_of_the_elites() -> None:
  rng, settings = np.random.default_rng(0), CEM(samples=32, elites=5, min_std=0.45)
  actions = rng.uniform(-1, 1, (B, 32, 3)).astype(np.float32)
  scores = rng.integers(0, 6, (B, 32)).astype(np.float32)  # many are equal: the first ones count
  sampler = jax.jit(lambda *x: fit(*x, settings, ActionLayout(3)))(actions, scores)
  mean, std = reference_fit(actions, scores, settings)
  np.testing.assert_allclose(sampler.mean, mean, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(sampler.std, std, rtol=1e-4)
  assert (std == settings.min_std).any() and (std > settings.min_std).any()


def test_the_fit_of_choices() -> None:
  """Frequencies among the elites, with a share that is uniform."""
  settings, layout = CEM(samples=4, elites=2), ActionLayout(0, (3,))
  actions = 2 * np.eye(3, dtype=np.float32)[[[0, 1, 1, 2]]] - 1
  fitted = jax.jit(lambda *x: fit(*x, settings, layout))
  sampler = fitted(actions, np.float32([[1.0, 5.0, 4.0, 0.0]]))
  np.testing.assert_allclose(
    sampler.shares[0], [[MIXED / 3, 1 - MIXED + MIXED / 3, MIXED / 3]], rtol=1e-6
  )


def test_the_result_is_the_best_sample_of_the_last_iteration() -> None:
  """Neither the mean, nor the best of all iterations: here all scores fall with each iteration."""
  seen = []

  def score(action: Any) -> Any:
    scores = quadratic(jnp.zeros((B, 2)))(action) - 10.0 * len(seen)
    seen.append((np.asarray(action), np.asarray(scores)))
    return scores

  action, best = maximize(score, B, ActionLayout(2), CEM(iterations=3), jax.random.key(0))
  actions, scores = seen[-1]
  assert len(seen) == 3 and all(a.shape == (B, 64, 2) for a, _ in seen)
  np.testing.assert_array_equal(action, actions[np.arange(B), scores.argmax(1)])
  np.testing.assert_array_equal(best, scores.max(1))


def test_iterations_narrow() -> None:
  """The samples of the second iteration are spread as the elites of the first."""
  seen: list[Any] = []

  def score(action: Any) -> Any:
    seen.append(np.asarray(action))
    return quadratic(jnp.zeros((400, 2)))(action)

  settings = CEM(min_std=1e-3)
  maximize(score, 400, ActionLayout(2), settings, jax.random.key(0))
  first, second = seen
  assert abs(first).max() == 1 and abs((abs(first) == 1).mean() - 0.317) < 0.01  # clipped normals
  mean, std = reference_fit(first, np.asarray(quadratic(jnp.zeros((400, 2)))(first)), settings)
  np.testing.assert_allclose(second.mean((0, 1)), mean.mean(0), atol=0.01)
  np.testing.assert_allclose(
    ((second - mean[:, None]) ** 2).mean((0, 1)), (std**2).mean(0), rtol=0.05
  )


def test_random_actions_are_uniform() -> None:
  draw = jax.jit(lambda key: uniform(4000, ActionLayout(2, (4,)), key))
  x = np.asarray(draw(jax.random.key(0)))
  assert abs(x[:, :2].mean()) < 0.03 and abs(x[:, :2].std() - 3**-0.5) < 0.01
  np.testing.assert_allclose((x[:, 2:] == 1).mean(0), 0.25, atol=0.03)
  np.testing.assert_array_equal(x[:, 2:].sum(1), -2)


@pytest.mark.parametrize(
  ('settings', 'name'),
  [(dict(elites=1), 'elites'), (dict(samples=4), 'samples 4'), (dict(iterations=0), 'iterations'),
   (dict(min_std=0.0), 'min_std')],
)  # fmt: skip
def test_impossible_settings_are_refused(settings: dict[str, Any], name: str) -> None:
  with pytest.raises(ValueError, match=name):
    CEM(**settings)
