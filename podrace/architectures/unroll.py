"""Acting: unrolls of an agent in environments, and the episodes that end in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace import topology
from podrace.architectures.packing import Packed, Packing
from podrace.envs.base import EnvironmentBatch
from podrace.topology import AXIS, TRAJECTORY_SPECS
from podrace.types import ActorOutput, Agent, Array, TimeStep, Trajectory

SAME = P()  # on all devices


class Episodes(NamedTuple):
  """Finished episodes by environment, [B] each. Every episode is counted once."""

  finished: Array  # i32 number of episodes
  return_mean: Array  # f32
  return_deviation: Array  # f32 the sum of squared differences from the mean
  length_sum: Array  # i32 steps of the environment, without the resetting step
  info_sums: dict[str, Array]  # f32 of each info of an environment, at the end of its episodes


class ActorState(NamedTuple):
  """The state of acting between two unrolls, [B, ...]."""

  env_state: Any
  timestep: TimeStep  # for the agent to answer next
  agent_state: Any
  env_id: Array  # i32
  episode_return: Array  # f32 of the episode under way
  episode_length: Array  # i32
  episodes: Episodes  # since the log was last read
  faults: Array  # i32 bits, violations of the contract: `podrace.architectures.faults.FAULTS`


def no_episodes(batch_size: int, infos: Iterable[str] = ()) -> Episodes:
  """Return counts of zero; `infos` are the names of the environments' infos."""
  i, f = jnp.zeros([batch_size], jnp.int32), jnp.zeros([batch_size], jnp.float32)
  return Episodes(i, f, f, i, dict.fromkeys(infos, f))


def begin(agent: Agent, env: EnvironmentBatch, env_id: Array, key: Array) -> ActorState:
  """Return the state before the first step of environments `env_id` [B]."""
  env_state, timestep = env.reset(key)
  n = env_id.shape[0]
  return ActorState(
    env_state=env_state,
    timestep=timestep,
    agent_state=agent.initial_state(env_id),
    env_id=env_id,
    episode_return=jnp.zeros([n], jnp.float32),
    episode_length=jnp.zeros([n], jnp.int32),
    episodes=no_episodes(n, jax.eval_shape(env.infos, env_state)),
    faults=jnp.zeros([n], jnp.int32),
  )


def count_episodes(
  actor: ActorState, timestep: TimeStep, infos: Mapping[str, Array] | None = None
) -> ActorState:
  """Count one new timestep [B]; means and deviations by Welford's method (1962)."""
  first, last = timestep.first, timestep.last
  episode_return = jnp.where(first, 0.0, actor.episode_return + timestep.reward)
  episode_length = jnp.where(first, 0, actor.episode_length + 1)
  e = actor.episodes
  finished = e.finished + last
  before = episode_return - e.return_mean
  mean = e.return_mean + jnp.where(last, before / jnp.maximum(finished, 1), 0.0)
  episodes = Episodes(
    finished=finished,
    return_mean=mean,
    return_deviation=e.return_deviation + jnp.where(last, before * (episode_return - mean), 0.0),
    length_sum=e.length_sum + jnp.where(last, episode_length, 0),
    info_sums={k: e.info_sums[k] + jnp.where(last, x, 0.0) for k, x in (infos or {}).items()},
  )
  return actor._replace(
    episode_return=episode_return, episode_length=episode_length, episodes=episodes
  )


def pooled(e: Episodes) -> dict[str, Any]:
  """Sum over environments, the last axis.

  A difference of squares in place of `return_deviation` (Chan et al. 1979) would be off by 0.1 in
  the standard deviation of returns that are all 500.

  Returns:
    `episodes`, `return_sum`, `length_sum`, `info_sums`, and `return_deviation`, the sum of squared
    differences from the mean over all environments.
  """
  number = e.finished.astype(jnp.float32)
  total = jnp.sum(number, -1)

  def average(x: Array) -> Array:
    return jnp.sum(jnp.where(number > 0, number * x, 0.0), -1) / jnp.maximum(total, 1)

  mean = average(e.return_mean)
  distance = e.return_mean - mean[..., None]
  rounding = average(distance)  # error of the mean, which would count as a difference
  deviation = jnp.sum(e.return_deviation, -1)
  return dict(
    episodes=jnp.sum(e.finished, -1),
    return_sum=total * (mean + rounding),
    return_deviation=deviation + total * (average(distance * distance) - rounding * rounding),
    length_sum=jnp.sum(e.length_sum.astype(jnp.float32), -1),
    info_sums={name: jnp.sum(x, -1) for name, x in e.info_sums.items()},
  )


def unroll(
  agent: Agent, env: EnvironmentBatch, params: Any, actor: ActorState, key: Array, length: int
) -> tuple[ActorState, Trajectory]:
  """Act for `length` steps. Consecutive trajectories overlap in one timestep."""

  def step(actor: ActorState, keys: Any) -> tuple[ActorState, tuple[TimeStep, ActorOutput]]:
    act_key, draws = keys
    timestep = actor.timestep
    output, agent_state = agent.act(params, actor.agent_state, timestep, act_key)
    env_state, next_timestep = env_step(actor.env_state, output.action, draws)
    actor = actor._replace(env_state=env_state, timestep=next_timestep, agent_state=agent_state)
    return count_episodes(actor, next_timestep, env.infos(env_state)), (timestep, output)

  agent_state = actor.agent_state
  act_key, env_key = jax.random.split(key)  # all keys at once: in the loop they would cost more
  env_keys = jax.random.split(env_key, (length, len(actor.env_id)))
  keys = jax.random.split(act_key, length), jax.vmap(env.draw)(env_keys)
  env_step = env.step_drawn or env.step
  packing = Packing()

  def packed_step(actor: ActorState, keys: Any) -> tuple[ActorState, Packed]:
    actor, result = step(actor, keys)
    return actor, packing.pack(result)

  actor, packed = lax.scan(packed_step, actor, keys)
  timesteps, outputs = packing.unpack(packed)
  timesteps = jax.tree.map(lambda xs, x: jnp.concatenate([xs, x[None]]), timesteps, actor.timestep)
  return actor, Trajectory(timesteps, outputs, agent_state, actor.env_id)


def actor_on_mesh(
  agent: Agent,
  env: EnvironmentBatch,
  mesh: Mesh,
  length: int,
  spec: P = SAME,
  params_of: Callable[[Any], Any] = lambda params: params,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Return `begin` and `unroll` on every device of a mesh, each with its own part of the batch.

  Users' environments do not trace under `check_vma`, so it is off.

  Args:
    agent: acts in all environments.
    env: one device's part of the environments.
    mesh: the devices.
    length: steps of an unroll.
    spec: the PartitionSpec of the source of the parameters.
    params_of: from one device's part of the source to its parameters. Default: the source itself.

  Returns:
    `(env_id, key) -> ActorState` and `(source, ActorState, key) -> (ActorState, Trajectory)`.
  """

  def local_begin(env_id: Array, key: Array) -> ActorState:
    return begin(agent, env, env_id, jax.random.fold_in(key, lax.axis_index(AXIS)))

  def local_unroll(source: Any, actor: ActorState, key: Array) -> tuple[ActorState, Trajectory]:
    key = jax.random.fold_in(key, lax.axis_index(AXIS))
    return unroll(agent, env, params_of(source), actor, key, length)

  flat = P(AXIS)
  on_each = functools.partial(topology.on_each, mesh=mesh, check_vma=False)
  return (
    on_each(local_begin, in_specs=(flat, P()), out_specs=flat),
    on_each(local_unroll, in_specs=(spec, flat, P()), out_specs=(flat, TRAJECTORY_SPECS)),
  )
