"""The common part of policy-gradient agents: how they act, and the transitions to learn from."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from podrace import distributions
from podrace.agents import normalize
from podrace.envs.spaces import seen
from podrace.networks import Network, body
from podrace.types import ActorOutput, Array, TimeStep, TrainState, Trajectory

FEW = 8  # actions that are treated one by one on a GPU


class PolicyParams(NamedTuple):
  """Everything that acting needs."""

  network: Any
  observation: Any = ()  # normalize.Statistics; () if observations are not normalized
  reward: Any = ()  # likewise, of discounted returns


class PolicyState(NamedTuple):
  """State of acting, [B, ...]."""

  core: Any  # the network's recurrent state
  discounted_return: Any = ()  # [B] f32, kept where rewards are normalized


class PolicyExtras(NamedTuple):
  """Record of an action, for learning, [B, ...]."""

  sample: Array  # the action before it was clipped or squashed into the space
  log_prob: Array  # f32 of `sample` under the acting policy
  discounted_return: Any = ()


class _PolicyAgent(Protocol):
  """An agent with `init`, `initial_state` and `act` of this module as its methods."""

  @property
  def network(self) -> Network: ...
  @property
  def greedy(self) -> bool: ...  # take the mode of the policy instead of a sample
  @property
  def discount(self) -> float: ...  # also of the returns that rewards are normalized by
  @property
  def normalize_observations(self) -> bool: ...
  @property
  def normalize_rewards(self) -> bool: ...
  def optimiser(self) -> optax.GradientTransformation: ...


class PolicyTransitions(NamedTuple):
  """The T transitions of a trajectory, [T, B] each; see podrace.returns for the suffixes."""

  reward_t: Array
  discount_t: Array
  lambda_t: Array  # 0 where timestep t is LAST
  mask: Array  # f32, 0 for LAST -> FIRST, which is no transition of any episode


def observe(params: PolicyParams, timestep: TimeStep) -> TimeStep:
  """Return the timestep with its observation normalized, as the network takes it."""
  if not params.observation:
    return timestep
  observation = timestep.observation
  standard = normalize.standardize(params.observation, floats(observation))
  return timestep._replace(observation=with_floats(observation, standard))


def floats(observation: Any) -> list[Array]:
  """Return the leaves of an observation that are normalized.

  They are the floats, except in an `action_mask` or a state. Pixels and indices are not floats.
  """
  return [x for x in jax.tree.leaves(seen(observation)) if _is_float(x)]


def with_floats(observation: Any, floats: list[Array]) -> Any:
  """Return the observation with `floats` in place of its own."""
  replacements = iter(floats)
  changed = jax.tree.map(lambda x: next(replacements) if _is_float(x) else x, seen(observation))
  return {**observation, **changed} if isinstance(observation, dict) else changed


def _is_float(x: Array) -> bool:
  return bool(jnp.issubdtype(x.dtype, jnp.floating))


def init(agent: _PolicyAgent, key: Array) -> TrainState:
  """Return the first state of training: `Agent.init`.

  Raises:
    ValueError: if observations are to be normalized, and have no floats.
  """
  network, observation = agent.network, agent.network.example().observation
  one = [x[0] for x in floats(observation)]
  if agent.normalize_observations and not one:
    shapes = jax.tree.map(lambda x: f'{x.dtype}{list(x.shape[1:])}', observation)
    raise ValueError(
      'normalize_observations is for observations with floats in them (an action_mask aside); '
      f"this environment's are {shapes}: leave it out"
    )
  params = PolicyParams(
    network=network.init(key),
    observation=normalize.init(one) if agent.normalize_observations else (),
    reward=normalize.init(jnp.float32(0)) if agent.normalize_rewards else (),
  )
  return TrainState(params, agent.optimiser().init(params.network))


def initial_state(agent: _PolicyAgent, env_id: Array) -> PolicyState:
  """Return the state of acting before the first timestep: `Agent.initial_state`."""
  core = agent.network.initial_state(env_id.shape[0])
  return PolicyState(core, jnp.zeros(env_id.shape) if agent.normalize_rewards else ())


def act(
  agent: _PolicyAgent, params: PolicyParams, state: PolicyState, timestep: TimeStep, key: Array
) -> tuple[ActorOutput, PolicyState]:
  """Choose the actions of timesteps [B]: `Agent.act`."""
  output, core = agent.network.step(params.network, state.core, observe(params, timestep))
  policy = agent.network.distribution
  if agent.greedy:
    x = policy.mode(output.policy)
    log_prob = policy.log_prob(output.policy, x)
  else:
    x, log_prob = draw(policy, output.policy, key)
  discounted_return: Any = ()
  if agent.normalize_rewards:
    carried = jnp.where(timestep.first, 0.0, agent.discount * state.discounted_return)
    discounted_return = carried + timestep.reward
  extras = PolicyExtras(x, log_prob, discounted_return)
  return ActorOutput(policy.to_action(x), extras), PolicyState(core, discounted_return)


def draw(policy: distributions.Distribution, params: Array, key: Array) -> tuple[Array, Array]:
  """Return raw samples and their log-probabilities, for acting.

  On a GPU a reduction over a few actions is a kernel of its own. There the actions are separate
  arrays, so that everything after the network's last product joins the environment's step.
  """
  few = isinstance(policy, distributions.Categorical) and policy.num_actions <= FEW
  if few and jax.default_backend() != 'cpu':
    return _draw_few(params, key)
  x = policy.sample(params, key)
  return x, policy.log_prob(params, x)


def _draw_few(params: Array, key: Array) -> tuple[Array, Array]:
  """Return `Categorical.sample` and its log-probability, up to rounding, without a reduction."""
  logits = [params[..., i] for i in range(params.shape[-1])]
  top = functools.reduce(jnp.maximum, logits)
  shifted = [x - top for x in logits]
  ends = list(itertools.accumulate(map(jnp.exp, shifted)))
  u = jax.random.uniform(key, top.shape) * ends[-1]
  x = sum(((end <= u).astype(jnp.int32) for end in ends), jnp.zeros(top.shape, jnp.int32))
  log_weight = functools.reduce(
    lambda a, i: jnp.where(x == i, shifted[i], a), range(len(shifted)), top
  )
  # Apart from the step: the environment's kernel overwrites arrays that this one reads.
  return jax.lax.optimization_barrier((x, log_weight - jnp.log(ends[-1])))


def transitions(
  trajectory: Trajectory, params: PolicyParams, discount: float, lambda_: float
) -> PolicyTransitions:
  """Cut a trajectory into transitions. This is the only rule about episode ends."""
  before = jax.tree.map(lambda x: x[:-1], trajectory.timesteps)
  after = jax.tree.map(lambda x: x[1:], trajectory.timesteps)
  reward = normalize.scale(params.reward, after.reward) if params.reward else after.reward
  return PolicyTransitions(
    reward_t=reward,
    discount_t=discount * after.discount,
    lambda_t=jnp.where(after.last, 0.0, lambda_),
    mask=1.0 - before.last.astype(jnp.float32),
  )


def new_moments(params: PolicyParams, trajectory: Trajectory) -> Any:
  """Return the contribution of this device's trajectory to the statistics.

  Each timestep is counted once, also FIRST, with a return of 0: in episodes of one step with equal
  rewards there would be no other deviation.
  """
  observation: Any = ()
  if params.observation:
    seen = jax.tree.map(lambda x: x[:-1], trajectory.timesteps.observation)
    observation = normalize.moments(params.observation, floats(seen))
  reward: Any = ()
  if params.reward:
    reward = normalize.moments(params.reward, trajectory.outputs.extras.discounted_return)
  return observation, reward


def merge_moments(params: PolicyParams, joined: Any, num_devices: int) -> PolicyParams:
  """Return the parameters with new statistics, from moments averaged over the devices."""
  observation, reward = joined
  return params._replace(
    observation=observation and normalize.merge(params.observation, observation, num_devices),
    reward=reward and normalize.merge(params.reward, reward, num_devices),
  )


def chunks(network: Network, index: Array, length: int) -> Array:
  """Split an index [B] of streams of `length` samples into chunks [C, B/C], one gradient each.

  On CPU a gradient over as many samples as fit the caches is faster than one over all. That number
  is the network's `cpu_chunk`. On other devices, or if no divisor of B fits, there is one chunk.
  """
  limit = getattr(network, 'cpu_chunk', body.CPU_CHUNK)
  if jax.default_backend() != 'cpu':
    return index.reshape(1, -1)
  size, samples = index.shape[0], index.shape[0] * length
  fewest, most = max(1, -(-samples // limit)), min(size, samples // max(1, limit // 4))
  fits = (c for c in range(fewest, most + 1) if size % c == 0)
  return index.reshape(next(fits, 1), -1)
