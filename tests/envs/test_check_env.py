"""What is said of wrong environments in JAX, from their types and a hundred steps at random."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from podrace.envs import check
from podrace.envs.base import NextStepReset, restart, transition
from podrace.errors import UnknownName, UsageError


class State(NamedTuple):
  v: Any  # [] f32
  time: Any  # [] i32


@dataclasses.dataclass(frozen=True)
class Steps:
  observation_space = spaces.Box(-1.0, 1.0, (3,), 'float32')
  action_space = spaces.Discrete(2)

  def reset(self, key: Any) -> Any:
    return State(jnp.float32(0), jnp.int32(0)), restart(jnp.ones(3))

  def step(self, state: Any, action: Any, key: Any) -> Any:
    state = state._replace(time=state.time + 1)
    return state, transition(self.observe(state), 1.0, self.ends(state), False)

  def observe(self, state: Any) -> Any:
    return jnp.ones(3)

  def ends(self, state: Any) -> Any:
    return state.time >= 10


class FloatEnd(Steps):
  def ends(self, state: Any) -> Any:
    return 0.1 * state.time


class Far(Steps):
  def observe(self, state: Any) -> Any:
    return jnp.full(3, 100.0) * (state.time > 4)


class FarAtOnce(Steps):
  def reset(self, key: Any) -> Any:
    state, timestep = super().reset(key)
    return state, timestep._replace(observation=jnp.full(3, -2.0))


class Rounded(Steps):
  def observe(self, state: Any) -> Any:
    return jnp.full(3, 1.00001)


class Gym(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    return jnp.ones(3), 1.0, False, False, {}


class Swapped(Steps):
  def step(self, state: Any, action: Any, key: Any) -> Any:
    return super().step(state, action, key)[::-1]


class PythonFloat(Steps):
  def reset(self, key: Any) -> Any:
    return State(0.0, jnp.int32(0)), restart(jnp.ones(3))


WRONG = [
  (FloatEnd, 'step', r'terminated .*float32\[\].* bool'),
  (Far, 'step', r'observation .* 0 .* 100,.* step 5'),
  (FarAtOnce, 'reset', r'observation .* -2 .* 1,.* step 0'),
  (Gym, 'step', r'tuple of 5.*\(state, TimeStep\)'),
  (Swapped, 'step', r'tuple of 2: \(TimeStep.*\(state, TimeStep\)'),
  (PythonFloat, 'reset', r' v .*jnp.float32\(0.0\)'),
]  # fmt: skip


@pytest.mark.parametrize(('cls', 'name', 'message'), WRONG, ids=[c.__name__ for c, *_ in WRONG])
def test_wrong_dynamics_that_are_wrapped(cls: Any, name: str, message: str) -> None:
  with pytest.raises(UsageError, match=f'(?s){message}') as told:
    check.check_environment(NextStepReset(cls()))
  line = inspect.getsourcelines(getattr(cls, name))[1]
  place = rf'test_check_env\.{cls.__name__}\.{name} \(\S*{Path(__file__).name}:{line}\)'
  assert re.match(place, str(told.value))


VIEW = spaces.Box(-1.0, 1.0, (3,), 'float32')


@pytest.mark.parametrize(
  ('space', 'message'),
  [
    (spaces.Box(-1.0, 1.0, (3,), 'float64'), r'float64.* float32'),
    (spaces.Dict(a=VIEW, b=spaces.Box(0, 9, (), 'uint64')), r'b of .*uint64.* uint32'),
    (spaces.Dict(action_mask=spaces.Tuple([spaces.MultiBinary(2)] * 2), view=VIEW), 'action_mask'),
    (spaces.Dict({0: VIEW, 'a': VIEW}), r"\[0, 'a'\]"),
  ],
)
def test_spaces_that_jax_has_not(space: Any, message: str) -> None:
  class Own(Steps):
    observation_space = space

  with pytest.raises(UsageError, match=message):
    check.check_environment(NextStepReset(Own()))


@pytest.mark.parametrize(
  ('name', 'space'),
  [
    ('observation_space', spaces.Graph(spaces.Discrete(2), None)),
    ('observation_space', spaces.Dict(x=spaces.Discrete(2), mission=spaces.Text(9))),
    ('action_space', spaces.Sequence(spaces.Discrete(2))),
  ],
)
def test_spaces_that_are_no_arrays(name: str, space: Any) -> None:
  env = type('Env', (Steps,), {name: space})
  with pytest.raises(UsageError, match=name):
    check.check_environment(NextStepReset(env()))


def test_actions_may_be_of_64_bits() -> None:
  class Own(Steps):
    action_space = spaces.Box(-1.0, 1.0, (2,), 'float64')

  check.check_environment(NextStepReset(Own()))


class Parts(Steps):
  action_space = spaces.MultiDiscrete([2, 3], dtype=np.int32)
  observation_space = spaces.Dict(action_mask=spaces.MultiBinary(5), view=VIEW)

  def reset(self, key: Any) -> Any:
    state, timestep = super().reset(key)
    return state, timestep._replace(observation=self.observe(state))

  def observe(self, state: Any) -> Any:
    second = jnp.broadcast_to(state.time < 4, 3)
    mask = jnp.concatenate([jnp.ones(2, bool), second]).astype(jnp.int8)
    return dict(action_mask=mask, view=jnp.ones(3))


def test_a_mask_allows_a_choice_of_each_part() -> None:
  with pytest.raises(UsageError, match=r'action_mask .*step 4'):
    check.check_environment(NextStepReset(Parts()))


def test_what_floats_are_rounded_by_is_in_the_space() -> None:
  check.check_environment(NextStepReset(Rounded()))


def test_a_class_in_the_place_of_its_object() -> None:
  with pytest.raises(UnknownName, match=r'NextStepReset\(Steps\(\)\)'):
    NextStepReset(Steps)  # type: ignore[arg-type]


class Frozen(Steps):
  def reset(self, key: Any) -> Any:
    v = jnp.float32(np.random.uniform() + random.random())
    return State(v, jnp.int32(0)), restart(jnp.ones(3))


def test_random_numbers_that_are_drawn_once(caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.WARNING, 'podrace'):
    check.check_environment(NextStepReset(Steps()))
    assert not caplog.records
    check.check_environment(NextStepReset(Frozen()))
  (said,) = (r.getMessage() for r in caplog.records)
  assert 'Frozen.reset (' in said and 'np.random' in said
