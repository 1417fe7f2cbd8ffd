"""The learner step, and the one place where gradients of an agent are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace.fields import no_limit
from podrace.hooks import checks_vma
from podrace.topology import AXIS, TRAJECTORY_SPECS, data_size, has_model_axis, on_each
from podrace.types import Agent, Array, Metrics, Replay, Sample, TrainState, Trajectory, map_batch

# Metrics that the run itself writes. An agent must not use these names.
RESERVED = frozenset({
  'step', 'wall_s', 'steps_per_s', 'episodes', 'episodes_by_seed', 'gradient_steps', 'env_restarts',
  'dropped_steps', 'actor_env', 'actor_inference', 'actor_transfer', 'actor_waiting',
  'consensus_distance', 'learner_resident_mb',
})  # fmt: skip
RESERVED_PREFIXES = (
  'acting_', 'episode_', 'info_', 'labelling_', 'labels_', 'policy_lag_', 'reanalysing_', 'replay_',
  'remote_', 'unrolls_',
)  # fmt: skip

Learned = tuple[TrainState, Array, Metrics]
"""Result of `Agent.learn`: the new state, a priority [B] of each trajectory, and metrics."""

EPS_ROOT = 1e-16  # of squared gradients; it changes an update by rounding only


def sgd(
  loss: Callable[..., tuple[Array, Any]],
  optimizer: optax.GradientTransformation,
  params: Any,
  opt_state: Any,
  chunks: Any = None,
  keep: bool = False,
) -> tuple[Any, ...]:
  """Make one gradient step, averaged over all learner devices.

  The gradients and `aux` are averaged in one all-reduce. There is no other collective here. Gossip
  averages parameters instead, and meta-training the changes of a rule. The parameters are made to
  vary over the devices first. Without that, under `check_vma`, the gradient of a replicated
  parameter is already a sum over devices, and its `pmean` is silently wrong by a factor of their
  number.

  Args:
    loss: `loss(params)` returns this device's mean loss and `aux`, any tree of floats. With
      `chunks` it is `loss(params, chunk)`.
    optimizer: the optimiser of `params`.
    params: the parameters, the same on all devices.
    opt_state: the optimiser's state.
    chunks: a tree of [C, ...]. Gradients and `aux` are averaged over the chunks, one after the
      other: the same gradient in less memory, or in faster memory.
    keep: `aux` is `(averaged, local)`, and the second tree is returned unaveraged. Not with
      `chunks`.

  Returns:
    The new parameters, the new state of the optimiser, the averaged `aux`, and `local` if `keep`.
  """
  if keep and chunks is not None:
    raise ValueError('sgd keeps nothing of chunks, which are averaged: give it `keep` or `chunks`')
  local = varying(params)
  grad = jax.grad(loss, has_aux=True)
  grads, aux = grad(local) if chunks is None else _mean_over(chunks, lambda c: grad(local, c))
  aux, *kept = aux if keep else (aux,)
  grads, aux = lax.pmean((grads, aux), AXIS)
  updates, opt_state = optimizer.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, aux, *kept


def varying(tree: Any) -> Any:
  """Return a tree as varying over the devices of a mesh. Under `vmap` it may be varying already."""
  on_mesh = AXIS in jax.sharding.get_abstract_mesh().manual_axes
  return lax.pcast(tree, AXIS, to='varying') if on_mesh else tree


def _mean_over(chunks: Any, f: Callable[[Any], Any]) -> Any:
  """Return the mean of f(chunk) over the leading axis, with the memory of one chunk."""
  count = jax.tree.leaves(chunks)[0].shape[0]
  first = jax.tree.map(lambda x: x[0], chunks)
  if count == 1:
    return f(first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(f, first))
  zeros = varying(zeros)  # as the terms that are added
  total, _ = lax.scan(lambda t, c: (jax.tree.map(jnp.add, t, f(c)), None), zeros, chunks)
  return jax.tree.map(lambda x: x / count, total)


def flatten(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
  """Apply the optimiser to one vector of all parameters, which is faster.

  With a model axis it is applied to each array, as arrays are split.
  """
  return optimizer if has_model_axis() else optax.flatten(optimizer)


def as_vector(params: Any) -> tuple[Any, Callable[[Any], Any]]:
  """Return parameters as one vector, and the function from a vector back to their tree.

  For several gradient steps by an optimiser of `flatten`: a step then adds one vector instead of
  an array a layer. With a model axis, or with several dtypes, the result is the tree itself.
  """
  dtypes = {x.dtype for x in jax.tree.leaves(params)}
  if has_model_axis() or len(dtypes) > 1:
    return params, lambda tree: tree
  return ravel_pytree(params)


def means(**terms: Array) -> Metrics:
  """Return the mean of each term. All terms have the same shape.

  Not on CPU: it is one reduction, as each reduction is two kernels.
  """
  if jax.default_backend() == 'cpu':
    return {name: jnp.mean(x) for name, x in terms.items()}
  stacked = jnp.stack(list(terms.values()))
  return dict(zip(terms, jnp.mean(stacked, range(1, stacked.ndim)), strict=True))


def clip_norm(limit: float, differentiable: bool = False) -> optax.GradientTransformation:
  """Clip the norm of the whole gradient.

  Args:
    limit: the largest norm; 0 or infinity: no limit.
    differentiable: the result has finite derivatives, also at a gradient of 0 and without a limit.
  """
  limit = no_limit(limit)
  if not differentiable:
    if isinstance(limit, float) and limit == math.inf:
      return optax.identity()  # the derivative of the clipping would be NaN
    return optax.clip_by_global_norm(limit)

  def clip(updates: Any, _: Any = None) -> Any:
    squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(updates))
    norm = jnp.sqrt(jnp.maximum(squares, 1e-30))
    return jax.tree.map(lambda x: x / jnp.maximum(1.0, norm / limit), updates)

  return optax.stateless(clip)


def adam(rate: Any, epsilon: float, differentiable: bool = False) -> optax.GradientTransformation:
  """Return optax.adam. If `differentiable`, the derivative of its square root is finite at 0."""
  return optax.adam(rate, eps=epsilon, eps_root=EPS_ROOT if differentiable else 0.0)


def clip_each(limit: float) -> optax.GradientTransformation:
  """Clip each number of a step; a limit of 0, or infinity, is none."""
  return optax.clip(no_limit(limit))


def separately(rates: dict[str, float], kind: Any) -> optax.GradientTransformation:
  """Return Adam for each field of a NamedTuple of parameters, each with its own learning rate."""
  return optax.multi_transform(
    {name: flatten(optax.adam(rate)) for name, rate in rates.items()},
    kind(**{name: name for name in rates}),
  )


def scale_by_adam(epsilon: float) -> optax.GradientTransformation:
  """Return Adam with a denominator that no meta-gradient passes (Oh et al. 2025, Nature).

  It is for agents with learned rules. Without meta-gradients it equals optax's. With them optax's
  gives NaN, as the root has no derivative at 0.
  """
  b1, b2 = 0.9, 0.999
  adam = optax.scale_by_adam(b1, b2, epsilon)

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    _, after = adam.update(grads, state, params)
    first = optax.tree.bias_correction(after.mu, b1, after.count)
    second = lax.stop_gradient(optax.tree.bias_correction(after.nu, b2, after.count))
    updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), first, second)
    return updates, after._replace(nu=lax.stop_gradient(after.nu))

  return optax.GradientTransformation(adam.init, update)


def init_memory(replay: Replay, mesh: Mesh, example: Trajectory) -> Any:
  """Return the empty replay of every device of a mesh; `example` has all devices' trajectories."""

  def part(axis: int, x: Any) -> Any:
    shape = list(x.shape)
    shape[axis] //= data_size(mesh)
    return jax.ShapeDtypeStruct(shape, x.dtype)

  local = map_batch(part, example)
  return on_each(lambda: replay.init(local), mesh, (), P(AXIS))()


def device_step(agent: Agent, replay: Replay) -> Callable[..., Any]:
  """Return one device's part of `learner`, inside AXIS, with its arguments and results."""

  def once(train: TrainState, memory: Any, key: Array) -> tuple[TrainState, Any, Metrics]:
    sample_key, learn_key = jax.random.split(key)
    sample = replay.sample(memory, jax.random.fold_in(sample_key, lax.axis_index(AXIS)))
    train, priority, metrics = agent.learn(train, sample, learn_key)
    metrics = {n: jnp.asarray(x, jnp.result_type(x, jnp.float32)) for n, x in metrics.items()}
    return train, replay.update(memory, sample.index, priority), metrics

  def step(
    train: TrainState, memory: Any, trajectory: Trajectory, key: Array, update: Array
  ) -> tuple[TrainState, Any, Metrics, Array]:
    memory = replay.add(memory, trajectory)
    times = replay.times(update)
    if isinstance(times, int) and times == 1:
      return *once(train, memory, key), jnp.int32(1)

    def again(i: Array, carry: Any) -> Any:
      train, memory, sums = carry
      train, memory, metrics = once(train, memory, jax.random.fold_in(key, i))
      return train, memory, jax.tree.map(jnp.add, sums, metrics)

    _, _, metrics = jax.eval_shape(once, train, memory, key)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
    train, memory, sums = lax.fori_loop(0, times, again, (train, memory, zeros))
    return train, memory, sums, jnp.asarray(times, jnp.int32)

  return step


def learner(agent: Agent, replay: Replay, mesh: Mesh) -> Callable[..., Any]:
  """Return the learner step on a mesh: remember; then sample, learn and re-prioritise when due.

  It is `(train, memory, trajectory, key, update) -> (train, memory, metrics, count)`; `metrics`
  are summed over the `count` samples that were learned from. `train`, `metrics` and `count` are
  the same along AXIS, the rest is split along it.
  """
  flat = P(AXIS)
  return on_each(
    device_step(agent, replay),
    mesh,
    in_specs=(P(), flat, TRAJECTORY_SPECS, P(), P()),
    out_specs=(P(), flat, P(), P()),
    check_vma=checks_vma(agent),
  )


def sample_learner(agent: Agent, mesh: Mesh, sample: Callable[[Any], Sample]) -> Callable[..., Any]:
  """Return the learner step without replay: learn from one batch, split over the mesh.

  `sample` turns one device's part of a batch [n, ...] into the agent's `Sample`. The step is
  `(train, batch, key) -> (train, priority [n], metrics)`.
  """

  def step(train: TrainState, batch: Any, key: Array) -> Learned:
    return agent.learn(train, sample(batch), key)

  flat = P(AXIS)
  return on_each(
    step,
    mesh,
    in_specs=(P(), flat, P()),
    out_specs=(P(), flat, P()),
    check_vma=checks_vma(agent),
  )


# --- the log of learning --------------------------------------------------------------------


class Log(NamedTuple):
  """Sums between two readings of the log, in bounded memory."""

  samples: Array  # [] i32 how many samples' metrics are in `sums`
  sums: Metrics  # of the agent's metrics
  broken: Array  # [] i32 the first update of the run with a loss that was not finite; -1: none


def is_reserved(name: str) -> bool:
  """Return whether the run itself writes, or may write, a metric of this name."""
  return name in RESERVED or name.startswith(RESERVED_PREFIXES)


def empty_log(metrics: Metrics) -> Log:
  """Return an empty log for metrics of these shapes.

  Raises:
    ValueError: if there is no loss among them, or a name that the run itself writes.
  """
  if 'loss' not in metrics:
    raise ValueError(f"learn must report a 'loss' among its metrics; it reports {sorted(metrics)}")
  if taken := [name for name in metrics if is_reserved(name)]:
    raise ValueError(
      f'learn reports {", ".join(taken)}, which is what the run itself writes to metrics.jsonl; '
      'give it another name'
    )
  sums = {name: jnp.zeros(x.shape, jnp.float32) for name, x in metrics.items()}
  return Log(jnp.int32(0), sums, jnp.int32(-1))


def add_to_log(log: Log, sums: Metrics, count: Array, update: Array) -> Log:
  """Return the log after the run's `update`-th update, with the results of `learner`."""
  broken = (log.broken < 0) & ~jnp.isfinite(sums['loss'])
  return Log(
    samples=log.samples + count,
    sums=jax.tree.map(jnp.add, log.sums, sums),
    broken=jnp.where(broken, update, log.broken),
  )


def all_finite(tree: Any) -> Array:
  """Return whether all floats of a tree are finite, [] bool."""
  floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
  if not floats:
    return jnp.bool_(True)
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))
