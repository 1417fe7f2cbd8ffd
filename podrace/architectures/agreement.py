"""Agreement of the learning devices on parameters: averaged gradients, or gossip with neighbours.

Gossip is stochastic gradient push (Assran et al. 2019, arXiv 1811.10792) with acting on the same
device, as in GALA (Assran et al. 2019, arXiv 1906.04585). A replica is a device with parameters and
an optimiser of its own.

An agent is the same for both. Under gossip an agent sees each replica as a mesh of one device: the
mesh has an axis of replicas besides AXIS, and AXIS has the size 1. So a mean over AXIS stays within
the replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace.learner import device_step, learner
from podrace.topology import AXIS, model_size, trajectory_specs
from podrace.types import Agent, Array, Metrics, Replay, TrainState

REPLICAS = 'replicas'  # the axis of a mesh along which replicas differ


@dataclasses.dataclass(frozen=True)
class AllReduce:
  """All devices have the same parameters: the gradients are averaged by `learner.sgd`.

  Anakin calls these methods. A `train` is the run's: its `params` are one tree, the same on all
  devices. `Gossip` overrides every method, and splits `rest` over the devices along its first axis.
  """

  split: bool = dataclasses.field(default=False, init=False)  # `rest` is split over the devices

  def check(self, mesh: Mesh) -> None:
    """Raise ValueError if this mesh does not fit."""

  def begin(self, train: TrainState, replicas: int) -> TrainState:
    """Return the run's first `train`, from the result of an agent's `init`."""
    return train

  def begin_from(self, train: TrainState, f: Callable[[TrainState], TrainState]) -> TrainState:
    """Return the first `train` of a new run, in which `f` has changed the agent's `train`."""
    return f(train)

  def source(self, train: TrainState) -> Any:
    """Return the tree that acting reads its parameters from."""
    return train.params

  def params_of(self, source: Any) -> Any:
    """Return the parameters that a device acts with, from its part of `source`."""
    return source

  def learner(self, agent: Agent, replay: Replay, mesh: Mesh) -> Callable[..., Any]:
    """Return a function as `podrace.learner.learner` does. Its `params` may be out of date."""
    return learner(agent, replay, mesh)

  def finalize(self, train: TrainState) -> TrainState:
    """Return `train` with up-to-date `params`."""
    return train

  def metrics(self, train: TrainState) -> Metrics:
    """Return metrics of a finalized `train`."""
    return {}


class Replicas(NamedTuple):
  """The state of R replicas: the `rest` of a gossip run's `train`."""

  train: TrainState  # [R, ...] of the agent
  weight: Array  # [R] f32 of push-sum: the replica's share in the mass of all parameters
  arriving: Any  # [R, N + 1] f32 mass and weight that a neighbour sent one update ago
  # ^ () without staleness


@dataclasses.dataclass(frozen=True)
class Gossip(AllReduce):
  """Each replica makes its own update, then averages its parameters with one neighbour.

  The agent's `rest` stays the replica's own: optimiser states, target networks, and the critics of
  SAC and D4PG.

  Args:
    graph: the receiver of a replica's message in update k, on R replicas. exponential: the replica
      2^(k mod log2 R) further, so that log2 R consecutive updates average over 2^m replicas.
      ring: the next replica.
    staleness: updates between sending and receiving. With 1, sending overlaps with the next update.
  """

  graph: Literal['exponential', 'ring'] = 'exponential'
  staleness: Literal[0, 1] = 0
  split: bool = dataclasses.field(default=True, init=False)

  def __post_init__(self) -> None:
    if self.graph not in ('exponential', 'ring'):
      raise ValueError(f"graph must be 'exponential' or 'ring', not {self.graph!r}")
    if self.staleness not in (0, 1):
      raise ValueError(f'staleness must be 0 or 1, not {self.staleness}')

  def check(self, mesh: Mesh) -> None:
    """Raise ValueError if the mesh has a model axis or only one device."""
    if model_size(mesh) > 1:
      raise ValueError(
        f'--model-devices {model_size(mesh)} is for --agree all-reduce, not for gossip'
      )
    if mesh.size < 2:
      raise ValueError(
        '--agree gossip needs at least 2 devices, and this run has 1: leave it out, or give more '
        'by --devices (on a CPU, fake ones by JAX_NUM_CPU_DEVICES=8)'
      )

  def begin(self, train: TrainState, replicas: int) -> TrainState:
    """Give each replica its own copy of `train`, and weight 1."""
    every = jax.tree.map(lambda x: jnp.broadcast_to(x, (replicas, *x.shape)), train)
    size = flat(train.params)[0].size
    arriving = jnp.zeros((replicas, size + 1), jnp.float32) if self.staleness else ()
    return TrainState(train.params, Replicas(every, jnp.ones(replicas, jnp.float32), arriving))

  def begin_from(self, train: TrainState, f: Callable[[TrainState], TrainState]) -> TrainState:
    """Return the first `train` in which `f` has changed the first replica, copied to all."""
    return self.begin(f(_first(train.rest.train)), len(train.rest.weight))

  def source(self, train: TrainState) -> Any:
    """Return the parameters of all replicas [R, ...]."""
    return train.rest.train.params

  def params_of(self, source: Any) -> Any:
    """Return the parameters of this device's replica."""
    return _first(source)

  def learner(self, agent: Agent, replay: Replay, mesh: Mesh) -> Callable[..., Any]:
    """Return a function in which each replica updates alone, then mixes with a neighbour."""
    update_alone = device_step(agent, replay)

    def step(own: Replicas, memory: Any, trajectory: Any, key: Array, update: Array) -> Any:
      own = _first(own)
      key = jax.random.fold_in(key, lax.axis_index(REPLICAS))
      train, memory, metrics, count = update_alone(own.train, memory, trajectory, key, update)
      own = self.mix(own, train, update)
      return jax.tree.map(lambda x: x[None], own), memory, lax.pmean(metrics, REPLICAS), count

    split, flat_specs = (REPLICAS, AXIS), P((REPLICAS, AXIS))
    sharded = jax.shard_map(
      step,
      mesh=Mesh(np.reshape(mesh.devices, (-1, 1)), split),
      in_specs=(P(REPLICAS), flat_specs, trajectory_specs(split), P(), P()),
      out_specs=(P(REPLICAS), flat_specs, P(), P()),
      check_vma=False,  # it would require devices to end alike, and replicas differ
    )

    def learn(train: TrainState, *args: Any) -> tuple[Any, ...]:
      replicas, *results = sharded(train.rest, *args)
      return train._replace(rest=replicas), *results

    return learn

  def mix(self, own: Replicas, after: TrainState, update: Array) -> Replicas:
    """Return one replica after its update and the exchange with its neighbours.

    A replica holds the mass w * z, of weight w and parameters z. An update adds the same change to
    z and to the mass. The replica keeps half of its mass and weight, and sends the other half. New
    parameters are mass / weight (push-sum).

    Args:
      own: the replica before its update.
      after: its `train` after the update.
      update: number of updates made before.
    """
    old, _ = flat(own.train.params)
    new, restore = flat(after.params)
    mass = new + (own.weight - 1) * old
    half = jnp.append(mass, own.weight) / 2
    received, arriving = self._exchange(half, update), own.arriving
    if self.staleness:
      received, arriving = arriving, received
    total = half + received
    params = restore(total[:-1] / total[-1])
    return Replicas(TrainState(params, after.rest), total[-1], arriving)

  def _exchange(self, message: Array, update: Array) -> Array:
    """Send `message` and return the message that arrives: one collective-permute."""
    n = lax.axis_size(REPLICAS)

    def further(hops: int) -> Callable[[Array], Array]:
      pairs = [(i, (i + hops) % n) for i in range(n)]
      return lambda x: lax.ppermute(x, REPLICAS, pairs)

    rounds = [further(hops) for hops in self.hops(n)]
    return lax.switch(update % len(rounds), rounds, message)

  def hops(self, replicas: int) -> list[int]:
    """Return the distance of the neighbour in each round of the graph."""
    return [1] if self.graph == 'ring' else [2**k for k in range((replicas - 1).bit_length())]

  def finalize(self, train: TrainState) -> TrainState:
    """Return `train` with the mean over replicas as `params`."""
    return train._replace(params=mean(train.rest.train.params))

  def metrics(self, train: TrainState) -> Metrics:
    """Return the distance of the replicas to their mean."""
    return dict(consensus_distance=consensus_distance(train.rest.train.params, train.params))


def mean(params: Any) -> Any:
  """Return the mean over replicas [R, ...]; for leaves that are not floats, the first replica's."""
  return jax.tree.map(lambda x: jnp.mean(x, 0, x.dtype) if _is_float(x) else x[0], params)


def consensus_distance(params: Any, center: Any) -> Array:
  """Return the mean distance of replicas [R, ...] to `center`, over its norm; [] f32."""
  middle, _ = flat(center)
  distance = jax.vmap(lambda own: jnp.linalg.norm(flat(own)[0] - middle))(params)
  return jnp.mean(distance) / jnp.maximum(jnp.linalg.norm(middle), 1e-30)


def flat(tree: Any) -> tuple[Array, Callable[[Array], Any]]:
  """Return all floats of a tree as one vector [N] f32, and the function back to a tree."""
  leaves, structure = jax.tree.flatten(tree)
  vector, restore = ravel_pytree([x for x in leaves if _is_float(x)])

  def back(values: Array) -> Any:
    floats = iter(restore(values.astype(vector.dtype)))
    return jax.tree.unflatten(structure, [next(floats) if _is_float(x) else x for x in leaves])

  return vector.astype(jnp.float32), back


def _is_float(x: Any) -> bool:
  return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _first(tree: Any) -> Any:
  return jax.tree.map(lambda x: x[0], tree)
