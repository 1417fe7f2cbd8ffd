"""MinAtar by its own rules: sticky actions, and no time limit but Freeway's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podrace.envs
from podrace.envs.adapters.sticky import StickyActions
from podrace.envs.base import batch, restart, transition
from podrace.errors import UnknownName
from podrace.settings.resolved import longest_episode


class Echo:
  """Observes the action that reached it."""

  observation_space = podrace.envs.make('podrace:catch').observation_space
  action_space = podrace.envs.make('gymnax:Breakout-MinAtar').action_space

  def reset(self, key: Any) -> Any:
    return jnp.int32(0), restart(jnp.int32(-1))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    return state + 1, transition(action, 0.0, False, False)


@pytest.mark.parametrize('probability', [0.1, 0.4])
def test_an_action_repeats_as_often_as_it_should(probability: float) -> None:
  """With alternating actions, each repetition shows; the one before may be a repetition itself."""
  env, steps = StickyActions(Echo(), probability), 20_000
  state, _ = env.reset(jax.random.key(0))
  sent = jnp.arange(steps, dtype=jnp.int32) % 2 + 1  # 1, 2, 1, 2, ...: never 0
  keys = jax.random.split(jax.random.key(1), steps)
  _, taken = jax.lax.scan(lambda s, x: (lambda y: (y[0], y[1].observation))(env.step(s, *x)), state, (sent, keys))  # fmt: skip
  taken, sent = np.asarray(taken), np.asarray(sent)
  # A repetition shows unless the action before was this one, itself repeated: p / (1 + p) differ.
  expected = probability / (1 + probability)
  error = 4 * np.sqrt(expected / steps)
  assert abs(np.mean(taken != sent) - expected) < error
  assert set(taken[:1]) <= {0, 1}  # an episode begins with doing nothing
  assert (taken[1:][taken[1:] != sent[1:]] == taken[:-1][taken[1:] != sent[1:]]).all()


def played(name: str, steps: int, num_envs: int = 8, randomly: bool = False) -> Any:
  """Timesteps [steps, num_envs] of doing nothing, or of random actions."""
  env = podrace.envs.make(name)
  both = batch(env, num_envs)

  def step(state: Any, key: Any) -> Any:
    act_key, env_key = jax.random.split(key)
    actions = jax.random.randint(act_key, (num_envs,), 0, env.action_space.n if randomly else 1)
    state, timestep = both.step(state, actions, jax.random.split(env_key, num_envs))
    return state, timestep._replace(observation=())

  @jax.jit
  def run(key: Any) -> Any:
    reset_key, run_key = jax.random.split(key)
    state, _ = both.reset(reset_key)
    return jax.lax.scan(step, state, jax.random.split(run_key, steps))[1]

  return jax.device_get(run(jax.random.key(3)))


@pytest.mark.slow
def test_freeway_ends_by_its_own_clock_alone() -> None:
  ours = played('gymnax:Freeway-MinAtar,sticky=0.1,max_steps_in_episode=0', 2_600, 2)
  assert np.flatnonzero(ours.last[:, 0]).tolist() == [2_499]
  assert (ours.discount[2_499] == 0).all()  # an end, and no cut


def test_a_game_without_a_limit_goes_on() -> None:
  """Asterix ends by a collision alone: of the games that a limit of 3 cuts, none is cut at 3."""
  cut = played('gymnax:Asterix-MinAtar,max_steps_in_episode=3', 40)
  free = played('gymnax:Asterix-MinAtar,max_steps_in_episode=0', 40, 64)
  assert (cut.discount[2] == 1).all() and cut.last[2].all()
  assert free.last.any() and (free.discount[np.asarray(free.last)] == 0).all()
  assert not free.last[2].any()


@pytest.mark.slow
def test_the_games_have_the_published_returns_of_random_play() -> None:
  """0.53 +- 0.04 in Asterix by pgx, which has MinAtar's rules (256 to 512 first episodes)."""
  name = 'gymnax:Asterix-MinAtar,sticky=0.1,max_steps_in_episode=0'
  steps = played(name, 400, 512, randomly=True)
  last = np.asarray(steps.last)
  first = np.cumsum(last, axis=0) - last == 0  # the steps of the first episodes
  assert last.any(axis=0).mean() > 0.98
  assert abs(np.sum(steps.reward * first) / 512 - 0.53) < 0.16  # 4 of pgx's standard errors


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('gymnax:Breakout-MinAtar,sticky=1.0', r'sticky .* 1\.0'),
    ('gymnax:Breakout-MinAtar,sticky=-0.1', r'sticky .* -0\.1'),
    ('gymnax:Breakout-MinAtar,max_steps_in_episode=-1', r'max_steps_in_episode .* -1'),
    ('gymnax:CartPole-v1,max_steps_in_episode=0', r'max_steps_in_episode .* 0'),
    ('gymnax:CartPole-v1,sticky=0.1', "no option 'sticky'"),
  ],
)
def test_options_that_are_refused(name: str, message: str) -> None:
  with pytest.raises(UnknownName, match=message):
    podrace.envs.make(name)


@pytest.mark.parametrize(
  ('name', 'steps'),
  [('Breakout-MinAtar', None), ('Freeway-MinAtar', 2_500), ('Breakout-MinAtar,sticky=0.1', None)],
)
def test_games_without_a_limit_have_no_longest_episode(name: str, steps: int | None) -> None:
  env = podrace.envs.make(f'gymnax:{name},max_steps_in_episode=0')
  assert longest_episode(env) == steps
