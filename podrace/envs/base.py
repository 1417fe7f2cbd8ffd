"""Next-step resets, for one environment and for a batch of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from podrace.errors import UnknownName
from podrace.types import FIRST, LAST, MID, Array, Environment, TimeStep


class Dynamics(Protocol):
  """An environment that does not reset itself, as adapters write it.

  `step` returns MID or LAST (see `transition`). The result of a step from a finished state is
  never used. Wrap it in `NextStepReset` to make it an `Environment`. It may have `infos`, as an
  `Environment` may.

  Example:
    class Wait:  # two actions, no choice: each step gives 1, and ten steps are an episode
      observation_space = gymnasium.spaces.Box(0.0, 10.0, (1,), 'float32')
      action_space = gymnasium.spaces.Discrete(2)

      def reset(self, key):
        return jnp.int32(0), restart(jnp.zeros(1))

      def step(self, state, action, key):
        time = state + 1
        return time, transition(jnp.full(1, time, 'float32'), 1.0, time >= 10, False)

    env = NextStepReset(Wait())
  """

  @property
  def observation_space(self) -> Any:
    """Space of the observations of one environment."""

  @property
  def action_space(self) -> Any:
    """Space of the actions of one environment."""

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""

  def step(self, state: Any, action: Any, key: Array) -> tuple[Any, TimeStep]:
    """Take one action."""


def restart(observation: Any) -> TimeStep:
  """Return the TimeStep that opens an episode."""
  return TimeStep(observation, jnp.float32(0), jnp.float32(1), jnp.int8(FIRST))


def transition(observation: Any, reward: Any, terminated: Any, truncated: Any) -> TimeStep:
  """Return the TimeStep after an action. If both flags are set, termination wins (discount 0).

  Raises:
    TypeError: if a flag is not bool.
  """
  terminated, truncated = _flag('terminated', terminated), _flag('truncated', truncated)
  return TimeStep(
    observation=observation,
    reward=jnp.asarray(reward, jnp.float32),
    discount=jnp.where(terminated, 0.0, 1.0).astype(jnp.float32),
    step_type=jnp.where(terminated | truncated, LAST, MID).astype(jnp.int8),
  )


def _flag(name: str, x: Any) -> Array:
  x = jnp.asarray(x)
  if x.dtype != bool:
    came = f'{name} of type {x.dtype}{list(x.shape)}'
    raise TypeError(f'transition was given {came}, expected bool, such as {name}=distance > 4.5')
  return x


def select(condition: Array, on_true: Any, on_false: Any) -> Any:
  """Choose between two pytrees by `condition` [] or [B], which matches the leading axes.

  Leaves may be PRNG keys.
  """

  def leaf(x: Array, y: Array) -> Array:
    c = condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))
    return jnp.where(c, x, y)

  return jax.tree.map(leaf, on_true, on_false)


def infos(env: Any, state: Any) -> dict[str, Array]:
  """Return the numbers that `env.infos` has for the episode that ends in `state`, or {}."""
  method = getattr(env, 'infos', None)
  return {name: jnp.asarray(x, jnp.float32) for name, x in method(state).items()} if method else {}


class ResetState(NamedTuple):
  """State of a NextStepReset."""

  inner: Any
  last: Array  # [] bool: the episode is over, the next step opens a new one


@dataclasses.dataclass(frozen=True)
class NextStepReset:
  """An Environment made of Dynamics: the step after LAST ignores the action and returns FIRST.

  `fresh_fraction` is the share of a *batch* that is reset in each step. With 1, every step in
  which an environment needs a reset resets all of them and drops the surplus. This is exact, and
  fast if a reset is cheap. With less than 1, that share of the batch is reset in turn into a
  shared pool of fresh states. An environment that needs a reset takes the oldest (see `batch`).
  """

  dynamics: Dynamics
  fresh_fraction: float = 1.0

  def __post_init__(self) -> None:
    if isinstance(self.dynamics, type):
      name = self.dynamics.__name__
      raise UnknownName(f'NextStepReset got the class {name}; write NextStepReset({name}())')
    if not 0 < self.fresh_fraction <= 1:
      raise UnknownName(
        f'fresh_fraction is a share, above 0 and at most 1, not {self.fresh_fraction}'
      )

  @property
  def observation_space(self) -> Any:
    """Space of the observations of one environment."""
    return self.dynamics.observation_space

  @property
  def action_space(self) -> Any:
    """Space of the actions of one environment."""
    return self.dynamics.action_space

  def reset(self, key: Array) -> tuple[ResetState, TimeStep]:
    """Begin an episode."""
    inner, timestep = self.dynamics.reset(key)
    return ResetState(inner, jnp.bool_(False)), timestep

  def step(self, state: ResetState, action: Any, key: Array) -> tuple[ResetState, TimeStep]:
    """Take one action."""
    step_key, reset_key = jax.random.split(key)
    stepped = self.dynamics.step(state.inner, action, step_key)
    fresh = self.dynamics.reset(reset_key)
    inner, timestep = select(state.last, fresh, stepped)
    return ResetState(inner, timestep.last), timestep

  def infos(self, state: ResetState) -> dict[str, Array]:
    """Return numbers to log about the episode that ends in `state`."""
    return infos(self.dynamics, state.inner)


LARGE_BATCH = 1024  # with episodes of 1,000 steps, one ends in most steps: a GPU asks no more
CHEAP_RESET, SMALL_RESET = 200, 64  # operations, and numbers of a result, that are drawn ahead

REFILL = 0x5EED  # folded into a refill's key, to keep it apart from the environments' keys


class EnvironmentBatch(NamedTuple):
  """B environments on one device, as pure functions."""

  reset: Any  # key -> (state, TimeStep [B])
  step: Any  # state, action [B], keys [B] -> (state, TimeStep [B])
  infos: Any  # state -> {name: [B] f32}, of the episodes that end in that state
  draw: Any = lambda keys: keys  # keys [B] -> draws [B, ...], for all steps of an unroll at once
  step_drawn: Any = None  # state, action [B], draws -> as `step` with the keys; None: it is `step`


class PooledState(NamedTuple):
  """State of a batch with a pool of fresh states."""

  inner: Any  # [B, ...]
  last: Array  # [B] bool
  pool: tuple[Any, TimeStep]  # [B, ...] results of `reset`
  oldest: Array  # [1] i32 the slot that the next environment to reset takes
  used: Array  # [1] i32 number of slots before `oldest` that are taken and not refilled


def batch(env: Environment, num_envs: int) -> EnvironmentBatch:
  """Return functions that step `num_envs` copies of `env` together.

  A NextStepReset with `fresh_fraction` < 1 keeps a ring of `num_envs` fresh states. An
  environment that must reset takes the oldest. Once a chunk of `fresh_fraction * num_envs` is
  used up, the chunk is refilled. So a reset is computed about once per episode instead of once
  per step. No two environments get the same fresh state unless more than `num_envs` episodes end
  before the ring can be refilled.

  An environment with a method `batch(num_envs)` returns the functions itself.
  """
  if hasattr(env, 'batch'):
    own: EnvironmentBatch = env.batch(num_envs)
    return own
  if isinstance(env, NextStepReset) and env.fresh_fraction < 1:
    return _pooled(env.dynamics, num_envs, math.ceil(env.fresh_fraction * num_envs))

  def reset(key: Array) -> tuple[Any, TimeStep]:
    return jax.vmap(env.reset)(jax.random.split(key, num_envs))

  each_infos = jax.vmap(functools.partial(infos, env))
  if isinstance(env, NextStepReset):
    draw, step = _drawn(env.dynamics, num_envs)

    def draw_and_step(state: Any, action: Any, keys: Array) -> tuple[Any, TimeStep]:
      return step(state, action, draw(keys))

    return EnvironmentBatch(reset, draw_and_step, each_infos, draw, step)
  return EnvironmentBatch(reset, jax.vmap(env.step), each_infos)


def _drawn(dynamics: Dynamics, num_envs: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Return `NextStepReset.step` of a batch in two parts: `draw` and `step_drawn`.

  A cheap and small reset is drawn ahead, so that nothing random is left in the loop over steps.
  """
  operations, numbers = _cost(dynamics.reset)
  ahead = operations <= CHEAP_RESET and numbers <= SMALL_RESET
  skips = jax.default_backend() == 'cpu' or num_envs < LARGE_BATCH

  def draw(keys: Array) -> Any:
    step_keys, reset_keys = jax.vmap(lambda key: tuple(jax.random.split(key)))(keys)
    return step_keys, jax.vmap(dynamics.reset)(reset_keys) if ahead else reset_keys

  def step(state: ResetState, action: Any, draws: Any) -> tuple[ResetState, TimeStep]:
    step_keys, fresh = draws
    stepped = jax.vmap(dynamics.step)(state.inner, action, step_keys)

    def reset_ended(stepped: Any) -> Any:
      return select(state.last, fresh if ahead else jax.vmap(dynamics.reset)(fresh), stepped)

    if skips and not ahead:
      needed = anywhere(jnp.any(state.last))
      inner, timestep = jax.lax.cond(needed, reset_ended, lambda stepped: stepped, stepped)
    else:
      inner, timestep = reset_ended(stepped)
    return ResetState(inner, timestep.last), timestep

  return draw, step


def _cost(reset: Callable[[Array], Any]) -> tuple[float, int]:
  """Return the operations of a reset, infinite with a loop or callback, and its numbers."""

  def count(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
      name = equation.primitive.name
      if name in ('while', 'scan') or 'callback' in name:
        return math.inf
      parts = [x for p in equation.params.values() for x in (p if isinstance(p, tuple) else (p,))]
      inner = [getattr(x, 'jaxpr', x) for x in parts if hasattr(getattr(x, 'jaxpr', x), 'eqns')]
      total += sum(map(count, inner)) if inner else 1
    return total

  traced = jax.make_jaxpr(reset)(jax.random.key(0))
  return count(traced.jaxpr), sum(math.prod(x.shape) for x in traced.out_avals)


@jax.custom_batching.custom_vmap
def anywhere(flag: Array) -> Array:
  """Return a flag []. Under vmap it is the disjunction over the batch, for example of seeds.

  Under vmap a `cond` with a batched predicate computes both sides. With this function it stays a
  `cond`. Its branch must then act by each element's own flag.
  """
  return flag


@anywhere.def_vmap
def _(size: int, batched: list[bool], flag: Array) -> tuple[Array, bool]:
  return anywhere(jnp.any(flag)), False


def _pooled(dynamics: Dynamics, num_envs: int, chunk: int) -> EnvironmentBatch:
  def resets(key: Array, n: int) -> tuple[Any, TimeStep]:
    return jax.vmap(dynamics.reset)(jax.random.split(key, n))

  def reset(key: Array) -> tuple[PooledState, TimeStep]:
    first_key, pool_key = jax.random.split(key)
    inner, timestep = resets(first_key, num_envs)
    pool = resets(pool_key, num_envs)
    zero = jnp.zeros([1], jnp.int32)
    return PooledState(inner, timestep.last, pool, zero, zero), timestep

  def refill(pool: Any, start: Array, key: Array) -> Any:
    slots = (start + jnp.arange(chunk)) % num_envs
    return jax.tree.map(lambda p, f: p.at[slots].set(f), pool, resets(key, chunk))

  def step(state: PooledState, action: Any, keys: Array) -> tuple[PooledState, TimeStep]:
    refill_key = jax.random.fold_in(jax.random.clone(keys)[0], REFILL)
    stepped = jax.vmap(dynamics.step)(state.inner, action, keys)
    rank = jnp.cumsum(state.last) - 1  # the k-th environment to reset takes the k-th oldest slot
    slots = (state.oldest + rank) % num_envs
    fresh = jax.tree.map(lambda p: p[slots], state.pool)
    inner, timestep = select(state.last, fresh, stepped)
    taken = jnp.sum(state.last, dtype=jnp.int32)
    oldest, used = (state.oldest + taken) % num_envs, state.used + taken
    enough = used[0] >= chunk

    def refilled(pool: Any) -> Any:
      new = refill(pool, oldest - used, refill_key)
      return jax.tree.map(lambda a, b: jnp.where(enough, a, b), new, pool)

    pool = jax.lax.cond(anywhere(enough), refilled, lambda pool: pool, state.pool)
    used = jnp.where(enough, used - chunk, used)
    return PooledState(inner, timestep.last, pool, oldest, used), timestep

  def each_infos(state: PooledState) -> dict[str, Array]:
    return jax.vmap(lambda inner, _: infos(dynamics, inner))(state.inner, state.last)

  return EnvironmentBatch(reset, step, each_infos)
