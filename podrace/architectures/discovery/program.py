"""A population that learns by one rule, and the rule from it: one compiled program on a mesh.

Each device has a part of every group's members. A meta-step is K updates of each member, the
gradient of its meta-loss in the rule, and one step of the rule by the mean gradient. The devices
share one all-reduce in it, and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace import topology
from podrace.agents.rules import storage
from podrace.agents.rules.layers import RuleParams
from podrace.architectures.discovery.members import Kind, Member
from podrace.architectures.faults import check_faults, count_faults
from podrace.architectures.sharding import with_shardings
from podrace.architectures.unroll import Episodes, pooled
from podrace.learner import Log, add_to_log, all_finite, clip_each, empty_log
from podrace.system import files
from podrace.types import Array, Metrics, TrainState

POPULATION = 'population'  # the mesh's axis; an agent's `learn_by` sees one device
LIVES, STEPS = 0, 1  # folded into the run's key
PARTS = 10  # of a lifetime, for which returns are reported


class Curve(NamedTuple):
  """Episodes by the part of a lifetime in which they ended, [PARTS] f32 each."""

  episodes: Array
  return_sum: Array


class State(NamedTuple):
  """The whole state of a run of meta-training."""

  train: TrainState  # the rule, and its optimiser; the same on all devices
  groups: tuple[Member, ...]  # [N, ...] each, split over the devices
  scales: tuple[Any, ...]  # Adam of each member's meta-gradient [N, ...], split likewise; or ()
  log: Log
  curve: Curve  # since the log was last read
  key: Array  # of the run; never changes
  update: Array  # [] i32 number of meta-steps made


@dataclasses.dataclass(frozen=True)
class MetaOptimizer:
  """The optimiser of a rule, from the meta-gradients of a population."""

  learning_rate: float = 1e-3
  optimizer: Literal['each', 'mean'] = 'each'
  # ^ Adam of each agent's meta-gradient, before their mean (Oh et al. 2025); or of their mean
  max_update: float = 1.0  # of each number of a step, before the learning rate; 0: no limit
  epsilon: float = 1e-8

  @property
  def each(self) -> optax.GradientTransformation:
    """The transformation of one member's gradient."""
    return self._adam if self.optimizer == 'each' else optax.identity()

  @property
  def mean(self) -> optax.GradientTransformation:
    """The transformation of the mean over the members."""
    rate = optax.scale_by_learning_rate(self.learning_rate)
    return rate if self.optimizer == 'each' else optax.chain(self._adam, rate)

  @property
  def _adam(self) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(eps=self.epsilon)
    return optax.flatten(optax.chain(adam, clip_each(self.max_update)))


@dataclasses.dataclass(frozen=True)
class MetaTraining:
  """A population and its rule, as compiled functions: a `Program` of `AnakinDriver`.

  Raises:
    ValueError: if the members of a group do not divide over the devices.
  """

  kinds: tuple[Kind, ...]  # of the groups
  agents: int  # in each group, over all devices
  rule: Any  # key -> the arrays of a rule before it is trained
  meta: MetaOptimizer
  devices: Mesh

  windows = None  # each member has its own replay, and the run has none

  def __post_init__(self) -> None:
    topology.per_device(self.devices, self.agents, 'agents')

  @functools.cached_property
  def mesh(self) -> Mesh:
    """The devices, with the axis POPULATION."""
    return Mesh(self.devices.devices, (POPULATION,))

  # --- the state

  def _init(self, keys: Array) -> State:
    rule_key, run_key = jax.random.split(keys[0])
    rule = self.rule(rule_key)
    life_key = jax.random.fold_in(run_key, LIVES)
    total = self.agents * len(self.kinds)

    def group(place: int, kind: Kind) -> Member:
      number = place * self.agents + np.arange(self.agents, dtype=np.int64)
      age = number * kind.lifetime // total  # so that lives end one by one

      def begin(of: tuple[Array, Array]) -> Member:
        return kind.begin(life_key, of[0], jnp.int32(0), of[1])

      return lax.map(begin, (jnp.int32(number), jnp.int32(age)))

    groups = tuple(group(i, kind) for i, kind in enumerate(self.kinds))
    one = self.meta.each.init(rule)
    scale = jax.tree.map(lambda x: jnp.repeat(x[None], self.agents, axis=0), one)
    scales = tuple(scale for _ in self.kinds)
    train = TrainState(rule, self.meta.mean.init(rule))
    shapes = jax.eval_shape(self._local, rule, groups, scales, run_key, jnp.int32(0))
    zeros = jnp.zeros(PARTS)
    return State(
      train, groups, scales, empty_log(shapes[3]), Curve(zeros, zeros), run_key, jnp.int32(0)
    )

  @functools.cached_property
  def shapes(self) -> State:
    """A State of shapes, dtypes and shardings, as `init` returns and a checkpoint holds."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    split = P(POPULATION)
    specs: Any = (P(), split, split, P(), P(), P(), P())
    return with_shardings(jax.eval_shape(self._init, keys), State(*specs), self.mesh)

  @functools.cached_property
  def shardings(self) -> State:
    """The sharding of each leaf of a State."""
    return jax.tree.map(lambda x: x.sharding, self.shapes)

  @functools.cached_property
  def init(self) -> Any:
    """Keys [1] -> State, placed on the mesh."""
    once = {'xla_backend_optimization_level': 1}  # it runs once, so compiling is the cost
    return jax.jit(self._init, out_shardings=self.shardings, compiler_options=once)

  # --- a meta-step

  def _local(
    self, rule: RuleParams, groups: Any, scales: Any, key: Array, update: Array
  ) -> tuple[RuleParams, Any, Any, Metrics, Curve]:
    """Make one device's part of a meta-step: sums over its members, not yet over the devices.

    Returns the moves of the rule, the members, their scales, metrics, and a curve.
    """
    life_key = jax.random.fold_in(key, LIVES)
    step_key = jax.random.fold_in(jax.random.fold_in(key, STEPS), update)
    found = []
    for kind, members, scale in zip(self.kinds, groups, scales, strict=True):
      members = kind.renew(members, life_key)
      keys = jax.vmap(functools.partial(jax.random.fold_in, step_key))(members.number)
      gradient = jax.vmap(jax.grad(kind.outcome, has_aux=True), in_axes=(None, 0, 0))
      grads, (after, metrics) = gradient(rule, members, keys)
      moves, scale = jax.vmap(self.meta.each.update)(grads, scale)
      metrics['meta_gradient_norm'] = jax.vmap(optax.global_norm)(grads)
      summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), (moves, metrics))
      found.append((*summed, after, scale, curve_of(kind, members, after)))
    moves, metrics, groups, scales, curves = zip(*found, strict=True)
    return total(moves), groups, scales, total(metrics), total(curves)

  def _shared(self, *args: Any) -> Any:
    """Return the results of `_local` with means and sums over the whole population."""
    moves, groups, scales, metrics, curve = self._local(*args)
    moves, metrics, curve = lax.psum((moves, metrics, curve), POPULATION)
    members = self.agents * len(self.kinds)
    moves, metrics = jax.tree.map(lambda x: x / members, (moves, metrics))
    return moves, groups, scales, metrics, curve

  @functools.cached_property
  def moves(self) -> Any:
    """(rule, groups, scales, key, update) -> (moves, groups, scales, metrics, curve)."""
    split = P(POPULATION)
    return jax.shard_map(
      self._shared,
      mesh=self.mesh,
      in_specs=(P(), split, split, P(), P()),
      out_specs=(P(), split, split, P(), P()),
      check_vma=False,  # users' environments do not trace under it
    )

  def _update(self, state: State) -> State:
    rule, opt_state = state.train
    moves, groups, scales, metrics, curve = self.moves(
      rule, state.groups, state.scales, state.key, state.update
    )
    updates, opt_state = self.meta.mean.update(moves, opt_state, rule)
    train = TrainState(optax.apply_updates(rule, updates), opt_state)
    log = add_to_log(state.log, metrics, jnp.int32(1), state.update)
    curve = total((state.curve, curve))
    return State(train, groups, scales, log, curve, state.key, state.update + 1)

  @functools.cached_property
  def run(self) -> Any:
    """(State, meta-steps [] i32) -> State. The argument is donated."""

    def run(state: State, updates: Array) -> State:
      return lax.fori_loop(0, updates, lambda _, s: self._update(s), state)

    return jax.jit(run, donate_argnums=0, out_shardings=self.shardings)

  # --- for the driver

  @functools.cached_property
  def read_log(self) -> Any:
    """State -> (a summary, the State with an empty log). The argument is donated."""

    def read(state: State) -> tuple[Any, State]:
      log, counted = state.log, tuple(m.actor.episodes for m in state.groups)
      every = jax.tree.map(lambda *x: jnp.concatenate([y.reshape(-1) for y in x]), *merged(counted))
      summary = dict(
        metrics={name: x / log.samples for name, x in log.sums.items()},
        gradient_steps=log.samples * self.kinds[0].updates,
        by_group=[pooled(flat(e)) for e in counted],
        curve=state.curve,
        **pooled(every),
      )
      zero = jax.tree.map(jnp.zeros_like, (counted, log.samples, log.sums, state.curve))
      pairs = zip(state.groups, zero[0], strict=True)
      groups = tuple(m._replace(actor=m.actor._replace(episodes=e)) for m, e in pairs)
      log = log._replace(samples=zero[1], sums=zero[2])
      return summary, state._replace(groups=groups, log=log, curve=zero[3])

    shardings = (topology.replicated(self.mesh), self.shardings)
    return jax.jit(read, donate_argnums=0, out_shardings=shardings)

  def present(self, summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary on the host, with the returns by group and by age."""
    groups = [(g['return_sum'], g['episodes']) for g in summary.pop('by_group')]
    curve = summary.pop('curve')
    host = {
      'episode_return_by_group': means_of(groups),
      'episode_return_by_age': means_of(zip(curve.return_sum, curve.episodes, strict=True)),
    }
    return summary | {'host': host}

  @functools.cached_property
  def health(self) -> Any:
    """State -> (first bad meta-step or -1, the rule is finite, faults by group [G, F])."""

    def check(state: State) -> tuple[Array, Array, Array]:
      counts = [jnp.sum(count_faults(m.actor.faults), axis=0) for m in state.groups]
      return state.log.broken, all_finite(state.train.params), jnp.stack(counts)

    return jax.jit(check, out_shardings=topology.replicated(self.mesh))

  def check(self, counts: np.ndarray, state: State) -> None:
    """Raise RunError for violations of the contract; `counts` are of `health`."""
    for kind, count in zip(self.kinds, counts, strict=True):
      check_faults(count, kind.agent, kind.env, lambda: None)


def total(trees: Any) -> Any:
  """Return the sum of trees."""
  return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)


def flat(e: Episodes) -> Episodes:
  """Return the episodes of members [N, B] with all environments in one axis."""
  return jax.tree.map(lambda x: x.reshape(-1), e)


def merged(counted: tuple[Episodes, ...]) -> list[Episodes]:
  """Return the episodes with only the infos that all groups have, since only these have a mean."""
  names = set.intersection(*(set(e.info_sums) for e in counted))
  return [e._replace(info_sums={k: e.info_sums[k] for k in sorted(names)}) for e in counted]


def curve_of(kind: Kind, before: Member, after: Member) -> Curve:
  """Return the episodes that ended in a meta-step of members [N]."""

  def sums(e: Episodes) -> tuple[Array, Array]:
    finished = e.finished.astype(jnp.float32)
    return jnp.sum(finished, axis=1), jnp.sum(finished * e.return_mean, axis=1)

  (n, r), (n_before, r_before) = sums(after.actor.episodes), sums(before.actor.episodes)
  part = jnp.minimum(before.age * PARTS // kind.lifetime, PARTS - 1)
  zeros = jnp.zeros(PARTS)
  return Curve(zeros.at[part].add(n - n_before), zeros.at[part].add(r - r_before))


def means_of(pairs: Any) -> list[float | None]:
  """Return the means of (sum, count) pairs; None if a count is 0 or a mean is not finite."""
  return [files.number(float(x) / float(n)) if n else None for x, n in pairs]


RULE = 'rule.npz'  # in the run directory


def write_rule(run_dir: Path, state: Any) -> None:
  """Write the rule at a checkpoint. Only the first process does."""
  if jax.process_index() == 0:
    storage.save(run_dir / RULE, jax.device_get(state.train.params))
