"""The contract of an Environment, as a check that users can call on their own environments."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace import distributions
from podrace.envs.base import batch, select
from podrace.envs.spaces import MASK, action_dtype, bounds, leaves, tree, values
from podrace.envs.timestep_rules import DTYPES, RULES, broken_rules, is_outside
from podrace.types import Array, Environment, TimeStep

quick_jit = functools.partial(  # these programs run once: compiling them is all the cost
  jax.jit,
  compiler_options={
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
  },
)


def check(env: Environment, key: Array, steps: int = 200, num_envs: int = 8) -> None:
  """Step `num_envs` copies of `env` with random actions.

  The checks: spaces are declared, and observations are in them. FIRST, MID and LAST come in order.
  Rewards and discounts have the right values. The state keeps its types. The action after LAST is
  ignored. The same key gives the same stream.

  Raises:
    AssertionError: if a check fails.
  """
  check_spaces(env)
  check_types(env)
  run = rollout(env, steps, num_envs)
  stream = jax.device_get(run(key, False))
  check_observations(env, stream)
  check_timesteps(stream, env.action_space)
  check_equal(stream, jax.device_get(run(key, False)), 'the same key gives another stream')
  check_equal(stream, jax.device_get(run(key, True)), 'the action after LAST is not ignored')


def random_action(space: gymnasium.Space, key: Array, n: int) -> Array:
  """Draw actions [n, ...], uniform over the space, in the types of agents."""
  limits = bounds(space)
  assert limits is not None, f'no random actions for {space}'
  shape: tuple[int, ...] = (n, *(space.shape or ()))
  if action_dtype(space) == np.int32:
    least, most = (np.clip(np.asarray(x, np.int64), -(2**31), 2**31 - 2) for x in limits)
    ends = (jnp.broadcast_to(jnp.int32(x), shape) for x in (least, most + 1))
    return jax.random.randint(key, shape, *ends)
  low, high = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in limits)
  bounded = (low >= -distributions.UNBOUNDED) & (high <= distributions.UNBOUNDED)
  inside = jax.random.uniform(
    jax.random.clone(key),
    shape,
    minval=jnp.where(bounded, low, 0),
    maxval=jnp.where(bounded, high, 1),
  )
  return jnp.where(bounded, inside, jnp.clip(jax.random.normal(key, shape), low, high))


def allowed_action(space: gymnasium.Space, key: Array, timestep: TimeStep) -> Array:
  """Draw actions [n, ...], uniform over the choices that the timesteps' mask allows, if any."""
  observation, n = timestep.observation, timestep.reward.shape[0]
  if not isinstance(observation, dict) or MASK not in observation:
    return random_action(space, key, n)
  try:
    kind = distributions.for_space(space)
  except ValueError:
    return random_action(space, key, n)
  mask = distributions.allowed(observation[MASK], kind)
  if mask.shape[-1] != kind.size:  # the network refuses it
    return random_action(space, key, n)
  return kind.to_action(kind.sample(jnp.where(mask, 0.0, distributions.MASKED), key))


def rollout(env: Environment, steps: int, num_envs: int) -> Any:
  """Return a compiled function (key, contrary) -> stream of timesteps [steps + 1, num_envs].

  If `contrary`, the actions after LAST, and only these, are different ones.
  """
  many = batch(env, num_envs)

  @quick_jit
  def run(key: Array, contrary: bool) -> TimeStep:
    def step(carry: Any, key: Array) -> tuple[Any, TimeStep]:
      state, before = carry
      act_key, other_key, env_key = jax.random.split(key, 3)
      action = allowed_action(env.action_space, act_key, before)
      other = random_action(env.action_space, other_key, num_envs)
      action = select(before.last & contrary, other, action)
      state, timestep = many.step(state, action, jax.random.split(env_key, num_envs))
      return (state, timestep), timestep

    reset_key, steps_key = jax.random.split(key)
    state, first = many.reset(reset_key)
    _, rest = jax.lax.scan(step, (state, first), jax.random.split(steps_key, steps))
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, rest)

  return lambda key, contrary: run(jax.random.clone(key), contrary)


def check_spaces(env: Environment) -> None:
  """Check the spaces: gymnasium's, actions i32 or f32, and discrete actions from 0."""
  assert isinstance(env.observation_space, gymnasium.Space)
  action = env.action_space
  if isinstance(action, gymnasium.spaces.Discrete):
    assert action.start == 0, f'{action} does not start at 0'
  elif not isinstance(action, gymnasium.spaces.MultiBinary):
    assert action.dtype in (np.int32, np.int64, np.float32), f'{action} is of {action.dtype}'


def check_types(env: Environment) -> None:
  """Check one environment without vmap: a scan refuses a state that changes its (weak) types."""

  def run(key: Array) -> Any:
    reset_key, step_key = jax.random.split(key)
    state, timestep = env.reset(reset_key)
    action = random_action(env.action_space, step_key, 1)[0]
    keys = jax.random.split(jax.random.fold_in(key, 1), 3)
    return jax.lax.scan(
      lambda carry, key: (env.step(carry[0], action, key), ()), (state, timestep), keys
    )

  with jax.debug_key_reuse(False):
    jax.eval_shape(run, jax.random.key(0))


def check_observations(env: Environment, stream: TimeStep) -> None:
  """Check that every observation [T, B, ...] is in the declared space."""
  space, x = env.observation_space, stream.observation
  came, declared = (str(jax.tree.structure(t)) for t in (x, tree(space, itertools.repeat(0))))
  assert came == declared, f'observations are {came}, expected {declared}'
  for (where, leaf), array in zip(leaves(space), values(space, x), strict=True):
    _inside(leaf, array, where)


def _inside(space: Any, x: Any, where: str) -> None:
  low: Any = getattr(space, 'low', 0)
  high: Any = getattr(space, 'high', np.inf)
  choices = gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete
  if isinstance(space, choices):  # they declare i64, which JAX does not have
    assert np.issubdtype(x.dtype, np.integer), f'{where} is {x.dtype}, expected integers'
    low, high = bounds(space) or (low, high)
  else:
    assert x.dtype == space.dtype, f'{where} is {x.dtype}, expected {space.dtype}'
  assert x.shape[2:] == space.shape, f'{where} is {x.shape[2:]}, expected {space.shape}'
  assert np.all(np.isfinite(x)), f'{where} is not finite'
  assert not np.any(is_outside(x, low, high)), (
    f'{where} is between {x.min()} and {x.max()}, out of {space}'
  )


def check_timesteps(stream: TimeStep, action_space: gymnasium.Space) -> None:
  """Check the types of a stream [T, B], and every rule of the contract.

  Raises:
    AssertionError: if a rule is broken; the message has the step.
  """
  for name, dtype in DTYPES.items():
    x = getattr(stream, name)
    assert x.dtype == dtype, f'{name} is {x.dtype}, expected {dtype}'
    assert x.shape == stream.step_type.shape, f'{name} has shape {x.shape}'
  for name, (t, _) in broken_rules(stream, action_space):
    raise AssertionError(f'{RULES[name].came} in step {t}, expected {RULES[name].expected}')


def check_equal(stream: Any, other: Any, message: str) -> None:
  """Check that two streams are equal to the bit."""
  for x, y in zip(jax.tree.leaves(stream), jax.tree.leaves(other), strict=True):
    np.testing.assert_array_equal(x, y, err_msg=message)
