"""Spaces are walked alike by everybody, and what JAX has no type for is refused or narrowed."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from shorthand import slow_after
from typed_envs import ACTIONS

from podrace import distributions
from podrace.envs import UnknownName
from podrace.envs.contract import random_action
from podrace.envs.host import base as host
from podrace.envs.host import envpool as envpool_
from podrace.envs.host.spaces import allowed_choices, best_choices, i32, in_jax
from podrace.envs.host.worker import actions_for
from podrace.envs.spaces import convert, is_bytes_of_image, leaves, map_leaves, tree, values
from podrace.envs.timestep_rules import RULES, choices_of
from podrace.errors import HostError, UsageError
from podrace.types import MID, TimeStep

SPACE = Dict(b=Tuple([Discrete(3), Dict(x=Box(0, 1, (2,)))]), a=Discrete(2))
VALUE = {'a': 1, 'b': (2, {'x': 3}), 'more': 4}  # what is not declared is left out


def test_every_walk_has_the_same_order() -> None:
  paths = [path for path, _ in leaves(SPACE)]
  assert sorted(paths) == ['observation/a', 'observation/b/0', 'observation/b/1/x']
  found = dict(zip(paths, values(SPACE, VALUE), strict=True))
  assert found == {'observation/a': 1, 'observation/b/0': 2, 'observation/b/1/x': 3}
  assert tree(SPACE, values(SPACE, VALUE)) == {'a': 1, 'b': (2, {'x': 3})}
  assert map_leaves(lambda space, x: (space, x), SPACE['b'], VALUE['b']) == (
    (Discrete(3), 2), {'x': (Box(0, 1, (2,)), 3)}
  )  # fmt: skip
  assert map_leaves(lambda space: space.shape, Discrete(3)) == ()
  assert map_leaves(lambda space, x: x, dict(SPACE.spaces), VALUE)['b'] == (2, {'x': 3})
  converted = convert(lambda s: Discrete(9) if isinstance(s, Discrete) else s, SPACE)
  expected = Dict(b=Tuple([Discrete(9), Dict(x=Box(0, 1, (2,)))]), a=Discrete(9))
  assert converted == expected and type(converted['b']) is Tuple


def test_what_is_not_as_declared() -> None:
  with pytest.raises(KeyError, match='x'):
    list(values(SPACE, {'a': 1, 'b': (2, {})}))
  with pytest.raises(ValueError, match=r'1 .* 2 '):
    list(values(SPACE, {'a': 1, 'b': (2,)}))


def test_walking_spaces_imports_nothing() -> None:
  code = 'import sys, podrace.envs.spaces; assert not {"jax", "gymnasium"} & set(sys.modules)'
  subprocess.run([sys.executable, '-c', code], check=True)


LONG = Box(-(2**63), 2**63 - 1, (2,), np.int64)


@pytest.mark.parametrize('declared', [envpool_.space_in_jax, in_jax])
def test_long_integers_are_declared_as_jax_has_them(declared) -> None:
  space = convert(declared, Dict(x=LONG, y=Box(-5, 5, (), np.int64)))
  assert space['x'] == Box(-(2**31), 2**31 - 1, (2,), np.int32)
  assert space['y'] == Box(-5, 5, (), np.int32)


def test_envpool_s_integers_beyond_jax_s_are_an_error() -> None:
  space = convert(envpool_.space_in_jax, gymnasium.spaces.Dict(x=LONG))
  rows = np.array([1, 0])
  given = {'x': np.array([[1, 2], [-(2**31), 2**31 - 1]], np.int64)}
  found = envpool_.as_declared('it', space, given, rows)['x']
  assert found.dtype == np.int32 and found.tolist() == [[-(2**31), 2**31 - 1], [1, 2]]
  with pytest.raises(HostError, match=r'\[2147483648\].* int32'):
    envpool_.as_declared('it', space, {'x': np.array([[2**31, -1]])}, rows[:1] - 1)


def test_keys_with_slashes_have_paths_of_their_own() -> None:
  odd = {'a/b': Discrete(2), 'a': Dict(b=Discrete(3)), 'a~1b': Discrete(4), 'a~b': Discrete(5)}
  paths = [path for path, _ in leaves(Dict(odd))]
  assert len(set(paths)) == 4 and 'observation/a/b' in paths


@pytest.mark.parametrize('declared', [envpool_.space_in_jax, in_jax])
def test_spaces_in_the_types_of_jax(declared) -> None:
  long = declared(Box(0, 2**40, (2,), np.uint64))
  assert long == Box(0, 2**32 - 1, (2,), np.uint32)
  narrow = declared(Box(-0.1, 0.1, (1,), np.float64))
  assert narrow.dtype == np.float32 and narrow.low[0] >= -0.1 and narrow.high[0] <= 0.1
  with pytest.raises(UnknownName):
    declared(Discrete(2**40))


def made(kind: str, seen: int = 5):
  return host.make(f'gymnasium:typed_envs:Typed-v0,kind={kind},seen={seen}')


def typed(kind: str, seen: int = 5):
  spec = made(kind, seen)
  assert spec.try_out is not None
  spec.try_out(60.0)
  return spec


@pytest.mark.parametrize('kind', ACTIONS)
def test_an_environment_gets_actions_as_its_space_samples_them(kind: str) -> None:
  space = made(kind).action_space
  policy = distributions.for_space(space)
  raw = policy.sample(jnp.zeros((64, policy.size)), jax.random.key(0))
  sent = np.zeros((64, *space.shape), space.dtype)  # as the memory that workers share
  sent[...] = policy.to_action(raw)
  own = ACTIONS[kind]
  for action in actions_for(own, sent):
    sample = own.sample()
    assert type(action) is type(sample) and action.dtype == sample.dtype
    assert action.shape == sample.shape and own.contains(action)


@pytest.mark.parametrize(
  'kind', slow_after(2, 'scalar', 'half', *sorted(ACTIONS.keys() - {'scalar', 'half'}))
)
def test_its_worker_process_gives_it_such_actions(kind: str) -> None:
  """Or the environment refuses them."""
  typed(kind)


def test_integers_of_64_bits_are_observed_or_refused() -> None:
  typed('discrete', 2**32 - 1)
  with pytest.raises(UsageError, match='uint32'):
    typed('discrete', 2**32)


@pytest.mark.slow
def test_a_pool_has_any_number_of_environments() -> None:
  spec = host.make('gymnasium:typed_envs:Typed-v0,kind=discrete')
  n = 12_000
  with contextlib.closing(
    spec.make(host.PoolArgs(n, n, np.arange(n, dtype=np.uint32) + 2**30, 1, 60.0))
  ) as pool:
    pool.reset()
    assert len(pool.recv().env_id) == n


# --- choices --------------------------------------------------------------------------------------

MASK = np.array([1, 0, 0, 1, 1, 0], np.int8)
CHOICES = (  # a space, the choices of its parts, and the actions that MASK allows
  (Discrete(6), [6], [0, 3, 4]),
  (Discrete(6, start=2), [6], [2, 5, 6]),
  (MultiDiscrete([2, 4]), [2, 4], [[0, 1], [0, 2]]),
  (MultiDiscrete([[2], [4]], start=[[1], [0]]), [2, 4], [[[1], [1]], [[1], [2]]]),
  (MultiBinary(3), [2, 2, 2], [[0, 1, 0]]),
)


@pytest.mark.parametrize(('space', 'counts', 'allowed'), CHOICES, ids=str)
def test_actions_that_a_mask_allows(space, counts, allowed) -> None:
  assert choices_of(space) == counts
  mask = allowed_choices(space, {'action_mask': np.tile(MASK, (200, 1))}, 200)
  rng = np.random.default_rng(0)
  actions = best_choices(space, rng.random(mask.shape) * mask)
  assert actions.dtype == space.dtype and all(map(space.contains, actions))
  assert np.unique(actions, axis=0).tolist() == allowed


@pytest.mark.parametrize('start', [2**31 - 2, 2**40, -(2**31) - 1])
def test_choices_beyond_int32_are_refused(start: int) -> None:
  for space in (Discrete(3, start=start), MultiDiscrete([2, 3], start=[0, start])):
    with pytest.raises(UnknownName, match='int32'):
      i32(space)
  assert i32(Discrete(3, start=2**31 - 3)) == Discrete(3, start=2**31 - 3, dtype=np.int32)


def test_no_mask_of_the_choices() -> None:
  masked = {'action_mask': MASK[None]}
  assert allowed_choices(Discrete(5), masked, 1) is None  # the network refuses it
  assert allowed_choices(Box(0, 1, (6,)), masked, 1) is None
  assert allowed_choices(Discrete(6), MASK, 1) is None
  assert choices_of(Box(0, 1, (6,))) == choices_of(Box(0, 5, (6,), np.int8)) == []


def test_a_switch_whose_mask_allows_nothing_breaks_the_contract() -> None:
  mask = np.array([[1, 0, 0, 0], [1, 0, 0, 1]], np.int8)
  one = np.ones(2, np.float32)
  t = TimeStep({'action_mask': mask}, one, one, np.full(2, MID, np.int8))
  broken = RULES['mask'].is_broken(t, None, choices_of(MultiBinary(2)))
  assert broken.tolist() == [True, False]


@pytest.mark.parametrize(
  'space',
  [
    Discrete(3, start=-1), MultiDiscrete([2, 3], start=[5, 0], dtype=np.int8), MultiBinary(3),
    Box(-2, 1, (2,), np.int8), Box(-(2**31), 2**31 - 1, (2,), np.int32), Box(0, 2**32 - 1, (1,), np.uint32),
    Box(-1, 1, (2,), np.float64), Box(-np.inf, 5, (2,)),
    Box(-np.finfo('f').max, np.finfo('f').max, (2,)), Box(0, 1e30, (2,)),
  ],
  ids=str,
)  # fmt: skip
def test_random_actions_are_in_the_space_and_in_the_types_of_agents(space) -> None:
  actions = np.asarray(random_action(space, jax.random.key(0), 500))
  is_float = np.issubdtype(space.dtype, np.floating)
  assert actions.dtype == (np.float32 if is_float else np.int32)
  assert actions.shape == (500, *space.shape) and np.isfinite(actions).all()
  for action in actions:
    assert space.contains(action.astype(space.dtype)), action
  for part in np.reshape(actions, (500, -1)).T:
    assert len(np.unique(part)) == (2 if space == MultiBinary(3) else len(np.unique(part))) > 1


def test_an_image_of_no_pixels_is_none() -> None:
  assert not is_bytes_of_image(Box(0, 255, (0, 4, 3), np.uint8))
  assert is_bytes_of_image(Box(0, 255, (4, 4, 3), np.uint8))
