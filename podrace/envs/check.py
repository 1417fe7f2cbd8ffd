"""Checks of environments in JAX before anything is compiled: types, and steps at random."""

from __future__ import annotations

import logging
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from podrace.envs import contract
from podrace.envs.host.infos import MOST
from podrace.envs.spaces import action_dtype, bounds, check_observation_space, map_leaves, values
from podrace.envs.spaces import leaves as leaves_of
from podrace.envs.timestep_rules import DTYPES, RESETS, RULES, broken_rules, is_outside
from podrace.errors import UsageError
from podrace.system.blame import (
  calling,
  check_arrays,
  describe,
  failed,
  first_difference,
  inner,
  is_ours,
  label,
  leaves,
  refuse,
  same_structure,
)
from podrace.types import FIRST, LAST, MID, TimeStep

log = logging.getLogger('podrace')

STEPS, NUM_ENVS = 100, 8  # of an environment, at random
ROUNDING = 1e-4  # relative tolerance of bounds
NAMES = {FIRST: 'FIRST', MID: 'MID', LAST: 'LAST'}


def key_type() -> Any:
  """Return the type of a PRNG key."""
  return jax.eval_shape(lambda: jax.random.key(0))


def batch_type(n: int, space: Any) -> Any:
  """Return the types of values of a space, [n, ...], as JAX has them."""

  def one(leaf: Any) -> Any:
    dtype = np.int32 if np.issubdtype(leaf.dtype, np.int64) else leaf.dtype
    return jax.ShapeDtypeStruct((n, *leaf.shape), dtype)

  return map_leaves(one, space)


def check_environment(env: Any) -> None:
  """Check the types of an environment in JAX, and some steps at random.

  Environments of podrace itself are not checked.

  Raises:
    UsageError: if it breaks the contract; the message names the function and its line.
  """
  if env is None or is_ours(env):  # None: it is on the host
    return
  for name in ('observation_space', 'action_space'):
    space = getattr(env, name)
    if not isinstance(space, spaces.Space):
      raise UsageError(f'{label(env, name)} is {space!r}, expected a gymnasium.spaces.Space')
    _check_shapes(label(env, name), space)
  _check_observation_space(label(env, 'observation_space'), env.observation_space)
  _check_types(inner(env), wrapped=inner(env) is not env)
  if bounds(env.action_space) is not None:  # so that there are random actions
    _check_steps(env)


def _check_shapes(name: str, space: Any) -> None:
  """Check that a space is made of arrays, as Text, Graph, Sequence and OneOf are not."""
  for where, leaf in leaves_of(space, ''):
    if leaf.shape is None:
      part = f'{where[1:]} of {name}' if where else name
      raise UsageError(f'{part} is {leaf}, which is no array: encode it as a Box, or leave it out')


def _check_observation_space(name: str, space: Any) -> None:
  try:
    check_observation_space(space)
  except ValueError as e:
    raise UsageError(f'{name} {e}') from e
  for where, leaf in leaves_of(space, ''):
    dtype = np.dtype(leaf.dtype)
    if isinstance(leaf, spaces.Box) and dtype.itemsize > 4 and dtype.kind in 'iuf':
      part = f'{where[1:]} of {name}' if where else name
      narrow = {'i': 'int32', 'u': 'uint32', 'f': 'float32'}[dtype.kind]
      raise UsageError(
        f'{part} is a Box of {dtype}, which podrace does not compute in: declare {narrow}'
      )


def _check_types(env: Any, wrapped: bool) -> None:
  """Check the results of `reset` and `step`; `wrapped` if `env` is inside a NextStepReset."""

  def reset(key: Any) -> Any:
    result = _tracing(env, 'reset', 'a key', key)
    _check_pair(env, 'reset', result, wrapped)
    return result

  def step(state: Any, action: Any, key: Any) -> Any:
    inputs = f'the state of one environment, the action {describe(action)}, a key'
    result = _tracing(env, 'step', inputs, state, action, key)
    _check_pair(env, 'step', result, wrapped)
    return result

  with jax.debug_key_reuse(False):
    before, _ = jax.eval_shape(reset, key_type())
    action = map_leaves(lambda s: jax.ShapeDtypeStruct(s.shape, action_dtype(s)), env.action_space)
    after, _ = jax.eval_shape(step, before, action, key_type())
  if different := first_difference(after, before):
    refuse(env, 'step', f'the state {different[0]}', f'{different[1]}, as `reset` returns it')
  _check_infos(env, before)


def _tracing(env: Any, name: str, inputs: str, *args: Any) -> Any:
  """Call a function as `calling` does, and warn of random numbers that are drawn while tracing."""
  before = _global_generators()
  result = calling(env, name, inputs, *args)
  if _global_generators() != before:
    log.warning(
      '%s draws from np.random or random: that happens once, when it is traced, so all episodes '
      'get the same number. Draw from its key, as jax.random.uniform(key)', label(env, name)
    )  # fmt: skip
  return result


def _global_generators() -> Any:
  """Return the states of the global generators of NumPy and Python."""
  state: Any = np.random.get_state()
  return state[1].tobytes(), state[2:], random.getstate()


def _check_infos(env: Any, state: Any) -> None:
  """Check `infos`: a dict of numbers by name."""
  if not hasattr(env, 'infos'):
    return
  if not callable(env.infos):
    refuse(env, 'infos', f'{env.infos!r}', 'a function of the state')
  result = jax.eval_shape(lambda s: calling(env, 'infos', 'the state of one environment', s), state)
  if not isinstance(result, dict) or not all(isinstance(name, str) for name in result):
    refuse(env, 'infos', describe(result), 'a dict of numbers by their names')
  for name, x in result.items():
    if x.shape != ():
      refuse(env, 'infos', f'{name} of shape {x.shape}', 'one number, of shape ()')
  if len(result) > MOST:
    refuse(env, 'infos', f'{len(result)} numbers', f'at most {MOST}')


def _check_pair(env: Any, name: str, result: Any, wrapped: bool) -> None:
  """Check the (state, TimeStep) of one environment."""
  if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], TimeStep)):
    many = f'a tuple of {len(result)}: ' if isinstance(result, tuple) else ''
    refuse(env, name, many + describe(result), 'a pair (state, TimeStep)')
  state, timestep = result
  check_arrays(env, name, state, 'a state of arrays')
  for path, x in leaves(state) if wrapped else ():
    if isinstance(x, bool | int | float):
      came = f"the state's {path.lstrip('.')}".removesuffix("'s ")
      came = f'{came} as a Python {type(x).__name__}'
      refuse(env, name, came, f'an array: write jnp.{jnp.result_type(x)}({x})')
  for field, dtype in DTYPES.items():
    x = getattr(timestep, field)
    if (jnp.shape(x), str(jnp.result_type(x))) != ((), dtype):
      refuse(env, name, f'the {field} {describe(x)}', f'{dtype}[], of one environment')
  space, x = env.observation_space, timestep.observation
  if not same_structure(x, batch_type(1, space)):
    refuse(env, name, f'the observation {describe(x)}', f'one of {space}')
  for (where, leaf), y in zip(leaves_of(space), values(space, x), strict=True):
    integer = isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
    fits = jnp.issubdtype(y.dtype, jnp.integer) if integer else y.dtype == leaf.dtype
    if y.shape != leaf.shape or not fits:
      kind = 'integers' if integer else leaf.dtype
      refuse(
        env, name, f'{where} {describe(y)}', f'{kind}{list(leaf.shape)}, as the space declares'
      )


def _check_steps(env: Any) -> None:
  """Step some copies at random."""
  inputs = f'the states of {NUM_ENVS} environments under vmap, in a scan, random actions, keys'
  try:
    with jax.debug_key_reuse(False):
      run = contract.rollout(env, STEPS, NUM_ENVS)
      stream = jax.device_get(run(jax.random.key(0), False))
  except Exception as e:
    raise failed(env, 'step', inputs, e) from e
  _check_order(env, stream)
  _check_numbers(env, 'reward', stream.reward)
  _check_numbers(env, 'discount', stream.discount)
  for (where, leaf), x in zip(
    leaves_of(env.observation_space),
    values(env.observation_space, stream.observation),
    strict=True,
  ):
    _check_numbers(env, where, x)
    _check_bounds(env, where, leaf, x)


def _check_order(env: Any, stream: TimeStep) -> None:
  """Check the step types and the action masks of a stream [T, B]."""
  broken, kind = dict(broken_rules(stream, env.action_space)), stream.step_type
  if 'step_type' in broken:
    refuse(env, 'step', f'step_type {kind[broken["step_type"]]}', RULES['step_type'].expected)
  if 'order' in broken:
    t, b = broken['order']
    came = NAMES[int(kind[t, b])]
    if t == 0:
      refuse(env, 'reset', f'step_type {came}', 'FIRST')
    before = NAMES[int(kind[t - 1, b])]
    expected = f'FIRST: {RESETS}' if before == 'LAST' else 'LAST first, as the end of an episode'
    refuse(env, 'step', f'{came} after {before} in step {t}', expected)
  if 'mask' in broken:
    t, rule = broken['mask'][0], RULES['mask']
    refuse(env, 'step' if t else 'reset', f'{rule.came} in step {t}', rule.expected)


def _check_numbers(env: Any, what: str, x: np.ndarray) -> None:
  if x.dtype.kind != 'f':
    return
  for t, *rest in np.argwhere(~np.isfinite(x))[:1]:
    name = 'step' if t else 'reset'
    refuse(env, name, f'{what} {x[(t, *rest)]} in step {t}', 'a finite number')


def _check_bounds(env: Any, where: str, space: Any, x: np.ndarray) -> None:
  """Check that observations [T, B, ...] are in their space, up to rounding of floats."""
  low, high = (np.asarray(y, np.float64) for y in bounds(space) or (-np.inf, np.inf))
  outside = is_outside(x, low - ROUNDING * (1 + abs(low)), high + ROUNDING * (1 + abs(high)))
  if not np.any(outside):
    return
  axes = tuple(range(1, x.ndim))
  name = 'step' if not np.any(outside[0]) else 'reset'
  t = int(np.argmax(np.any(outside, axes)))
  came = f'{where} between {x.min():g} and {x.max():g}, out of its space from step {t} on'
  refuse(env, name, came, f'what is in {space}')
