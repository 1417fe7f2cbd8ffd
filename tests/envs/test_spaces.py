"""Spaces are walked alike by everybody, and what JAX has no type for is refused or narrowed."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from podrace.envs.host import envpool as envpool_
from podrace.envs.host import gymnasium as gymnasium_
from podrace.envs.host.base import HostError
from podrace.envs.spaces import convert, leaves, over, tree, values

SPACE = Dict(b=Tuple([Discrete(3), Dict(x=Box(0, 1, (2,)))]), a=Discrete(2))
VALUE = {'a': 1, 'b': (2, {'x': 3}), 'more': 4}  # what is not declared is left out


def test_every_walk_has_the_same_order() -> None:
  paths = [path for path, _ in leaves(SPACE)]
  assert sorted(paths) == ['observation/a', 'observation/b/0', 'observation/b/1/x']
  found = dict(zip(paths, values(SPACE, VALUE), strict=True))
  assert found == {'observation/a': 1, 'observation/b/0': 2, 'observation/b/1/x': 3}
  assert tree(SPACE, values(SPACE, VALUE)) == {'a': 1, 'b': (2, {'x': 3})}
  assert over(lambda space, x: (space, x), SPACE['b'], VALUE['b']) == (
    (Discrete(3), 2), {'x': (Box(0, 1, (2,)), 3)}
  )  # fmt: skip
  assert over(lambda space: space.shape, Discrete(3)) == ()
  assert over(lambda space, x: x, dict(SPACE.spaces), VALUE)['b'] == (2, {'x': 3})
  converted = convert(lambda s: Discrete(9) if isinstance(s, Discrete) else s, SPACE)
  expected = Dict(b=Tuple([Discrete(9), Dict(x=Box(0, 1, (2,)))]), a=Discrete(9))
  assert converted == expected and type(converted['b']) is Tuple


def test_what_is_not_as_declared() -> None:
  with pytest.raises(KeyError, match='x'):
    list(values(SPACE, {'a': 1, 'b': (2, {})}))
  with pytest.raises(ValueError, match='1 parts, where 2 are declared'):
    list(values(SPACE, {'a': 1, 'b': (2,)}))


def test_walking_spaces_imports_nothing() -> None:
  code = 'import sys, podrace.envs.spaces; assert not {"jax", "gymnasium"} & set(sys.modules)'
  subprocess.run([sys.executable, '-c', code], check=True)


LONG = Box(-(2**63), 2**63 - 1, (2,), np.int64)


@pytest.mark.parametrize('module', [envpool_, gymnasium_])
def test_long_integers_are_declared_as_jax_has_them(module) -> None:
  space = convert(module._space, Dict(x=LONG, y=Box(-5, 5, (), np.int64)))
  assert space['x'] == Box(-(2**31), 2**31 - 1, (2,), np.int32)
  assert space['y'] == Box(-5, 5, (), np.int32)


def test_envpool_s_integers_beyond_jax_s_are_an_error() -> None:
  space = convert(envpool_._space, gymnasium.spaces.Dict(x=LONG))
  rows = np.array([1, 0])
  given = {'x': np.array([[1, 2], [-(2**31), 2**31 - 1]], np.int64)}
  found = envpool_._as_declared('it', space, given, rows)['x']
  assert found.dtype == np.int32 and found.tolist() == [[-(2**31), 2**31 - 1], [1, 2]]
  with pytest.raises(HostError, match=r'it: observation has \[2147483648\], which int32 has not'):
    envpool_._as_declared('it', space, {'x': np.array([[2**31, -1]])}, rows[:1] - 1)
