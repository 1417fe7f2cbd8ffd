"""PopArt: values in units of their targets (van Hasselt et al. 2016, arXiv 1602.07714).

With Hessel et al. 2018 (arXiv 1809.04474) for actor-critics. Returns of any size, rare and changing
ones too, then need no other learning rate, cost or clipping of rewards. Running statistics of the
value targets give a mean and a deviation. The loss is taken on (target - mean) / deviation, and
the policy is taught by advantage / deviation. Targets are made in raw units.

The parameters of an agent hold the head of the value in raw units. An update expresses the head in
the present units, makes its gradient steps there, and returns to raw units. That is the paper's
rescaling of the head when the statistics move: the function stays as it is. So acting, evaluation,
`--init-from` and gossip see parameters without units, and the statistics are in `TrainState.rest`.

Against the papers:

- An update learns by the statistics before it. They move afterwards, as in SEED RL (arXiv
  1910.06591). So the sums over devices go with the gradients, and there is no other all-reduce.
- The rate of the moving averages is corrected for their start: the first update takes its own
  targets' statistics. Until targets have differed, an update only measures. A step in units that
  are wrong by a thousand would leave values, and moments of the optimiser, to be forgotten.
- The head starts at 0, so the first targets are rewards alone.
- The default rate of 0.01 is SEED RL's. The papers' 3e-4 is for runs of a million updates.
- The variance is averaged around the mean. A difference of squares would be rounding only if the
  mean is a thousand times the deviation.

`with_popart` adds all of this to an agent from outside, as `metagradient.self_tuned` does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from podrace.fields import check_fields
from podrace.learner import Learned
from podrace.types import Agent, Array, Metrics, Sample, TrainState

HEAD = 'value_head'  # the layer of the network that is rescaled


@dataclasses.dataclass(frozen=True)
class PopArt:
  """Settings of PopArt."""

  rate: float = 0.01  # rate of the moving averages, of each update
  min_std: float = 1e-4  # smallest deviation of value targets
  max_std: float = 1e6  # largest deviation of value targets

  def __post_init__(self) -> None:
    check_fields(self)
    if self.min_std >= self.max_std:
      raise ValueError(f'min_std {self.min_std:g} is not less than max_std {self.max_std:g}')

  def units(self, statistics: Statistics) -> Units:
    """Return the units of an update by the statistics before it."""
    std = jnp.clip(jnp.sqrt(statistics.var), self.min_std, self.max_std)
    return Units(statistics.mean, std)

  def follow(self, statistics: Statistics, units: Units, metrics: Metrics) -> Statistics:
    """Return the statistics after an update.

    `metrics` are of all devices, with `value_moments` of targets in `units`. Masked steps have no
    part in them.
    """
    valid = metrics['value_valid']
    count = jnp.maximum(valid, 1e-8)
    first, second = metrics['value_target'] / count, metrics['value_target_square'] / count
    rate = jnp.where(valid > 0, self.rate, 0.0)
    weight = statistics.weight + rate * (1 - statistics.weight)
    rate = rate / jnp.maximum(weight, 1e-30)
    between = rate * second - jnp.square(rate * first)
    # Of equal targets it is rounding, a part of 1e-7 of the squares.
    between = jnp.where(between > 1e-6 * rate * second, between, 0.0)
    return Statistics(
      mean=statistics.mean + rate * units.std * first,
      var=(1 - rate) * statistics.var + jnp.square(units.std) * between,
      weight=weight,
    )


class Statistics(NamedTuple):
  """Moving averages of the value targets, [] f32 each."""

  mean: Array
  var: Array
  weight: Array  # of all targets in the averages; the rest of 1 is the start


class Units(NamedTuple):
  """Mean and deviation of normalized values, [] f32 each."""

  mean: Array
  std: Array


class PopArtRest(NamedTuple):
  """`TrainState.rest` of an agent with PopArt."""

  statistics: Statistics
  rest: Any  # the agent's own


class _ValueAgent(Agent, Protocol):
  """An agent that `with_popart` can wrap."""

  @property
  def normalize_values(self) -> bool: ...
  @property
  def normalize_rewards(self) -> bool: ...
  @property
  def self_tuning(self) -> bool: ...
  @property
  def popart(self) -> PopArt: ...


AgentClass = TypeVar('AgentClass', bound=type[_ValueAgent])


def with_popart(cls: AgentClass) -> AgentClass:
  """Add PopArt to the dataclass of an agent, active where its field `normalize_values` is true.

  The class's check of its fields, its `init` and its `learn` are wrapped. Its `learn` has one more
  argument: the `Units` of values, or None without PopArt. There the layer `HEAD` of the parameters'
  field `network` is in these units, and the metrics have `value_moments` of targets in them.
  """
  check, init, update = getattr(cls, '__post_init__', None), cls.init, cls.learn

  def check_all(agent: _ValueAgent) -> None:
    if check is not None:
      check(agent)
    if agent.normalize_values:
      check_combination(agent)

  @functools.wraps(init)
  def init_all(agent: _ValueAgent, key: Array) -> TrainState:
    train = init(agent, key)
    return begin(train) if agent.normalize_values else train

  @functools.wraps(update)
  def learn_all(agent: _ValueAgent, train: TrainState, sample: Sample, key: Array) -> Learned:
    if agent.normalize_values:
      return learn(agent, update, train, sample, key)
    return update(agent, train, sample, key)

  for name, method in dict(__post_init__=check_all, init=init_all, learn=learn_all).items():
    setattr(cls, name, method)
  return cls


def check_combination(agent: _ValueAgent) -> None:
  """Raise ValueError for settings that exclude PopArt."""
  if agent.normalize_rewards:
    raise ValueError(
      'normalize_values and normalize_rewards both adapt to the size of returns, and the units of '
      'rewards would move under the values: give --agent.no-normalize-rewards'
    )
  if agent.self_tuning:
    raise ValueError(
      'normalize_values is not for self_tuning, whose outer loss is in raw units: leave one out'
    )


def begin(train: TrainState) -> TrainState:
  """Return the first state of an agent with PopArt: values 0, mean 0, deviation 1.

  Raises:
    ValueError: if the network has no layer `HEAD`.
  """
  params = train.params
  head = params.network.get(HEAD) if isinstance(params.network, dict) else None
  if head is None or set(head) != {'kernel', 'bias'}:
    raise ValueError(
      f'normalize_values rescales the layer {HEAD!r} of a network, with its kernel and bias; '
      'this network has none: leave it out'
    )
  statistics = Statistics(jnp.float32(0), jnp.float32(1), jnp.float32(0))
  network = {**params.network, HEAD: jax.tree.map(jnp.zeros_like, head)}
  return TrainState(params._replace(network=network), PopArtRest(statistics, train.rest))


def learn(
  agent: _ValueAgent, update: Any, train: TrainState, sample: Sample, key: Array
) -> Learned:
  """Make one update of the agent in the present units, then move the statistics."""
  statistics, rest = train.rest
  units, before = agent.popart.units(statistics), TrainState(train.params, rest)
  params = before.params._replace(network=normalize_head(before.params.network, units))
  after, priority, metrics = update(agent, TrainState(params, rest), sample, key, units)
  after = after._replace(
    params=after.params._replace(network=raw_head(after.params.network, units))
  )
  known = (statistics.weight > 0) & (statistics.var > 0)
  # The rest of the parameters, such as statistics of observations, moves from the beginning.
  network, rest = jax.tree.map(
    lambda new, old: jnp.where(known, new, old),
    (after.params.network, after.rest),
    (before.params.network, before.rest),
  )
  params = after.params._replace(network=network)
  statistics = agent.popart.follow(statistics, units, metrics)
  metrics = metrics | dict(value_mean=statistics.mean, value_std=jnp.sqrt(statistics.var))
  return TrainState(params, PopArtRest(statistics, rest)), priority, metrics


def normalize_head(network: Any, units: Units) -> Any:
  """Return the parameters of a network with values in `units`, from one with raw values."""
  head = network[HEAD]
  kernel, bias = head['kernel'] / units.std, (head['bias'] - units.mean) / units.std
  return {**network, HEAD: {**head, 'kernel': kernel, 'bias': bias}}


def raw_head(network: Any, units: Units) -> Any:
  """Return the inverse of `normalize_head`."""
  head = network[HEAD]
  kernel, bias = head['kernel'] * units.std, head['bias'] * units.std + units.mean
  return {**network, HEAD: {**head, 'kernel': kernel, 'bias': bias}}


def to_raw(value: Array, units: Units | None) -> Array:
  """Return values of the network in raw units."""
  return value if units is None else value * units.std + units.mean


def to_units(target: Array, units: Units | None) -> Array:
  """Return raw value targets in units."""
  return target if units is None else (target - units.mean) / units.std


def shrink(advantage: Array, units: Units | None) -> Array:
  """Return raw advantages in units: divided by the deviation."""
  return advantage if units is None else advantage / units.std
