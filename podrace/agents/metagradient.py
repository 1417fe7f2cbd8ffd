"""Self-tuning: an agent learns some of its own settings by the gradient of an outer loss.

Xu et al. 2018 (arXiv 1805.09801), Zahavy et al. 2020 (STAC, arXiv 2002.12928). Remarks on STAC are
from memory.

A metaparameter is a setting that is learned, for example the discount. Each update is made with
the current values of the metaparameters. The outer loss is the agent's loss with the user's own
settings, for the parameters after the update and the same trajectory. It is differentiated through
the update, including the clipping of the gradient and the division in the optimiser. Xu et al.
take the next trajectory instead.

A metaparameter is a sigmoid within its range and starts at the user's setting. In STAC that
setting is the upper end of the range. Here a share, such as the discount, is between 0 and 1, and
a cost is between 0 and ten times the user's cost.

The outer loss includes STAC's penalty, the KL divergence of the new policy from the old one. Here
the old policy is the one that acted. The divergence is estimated from its actions, without another
pass through the network.

`self_tuned` adds all of this to an agent from outside:

    @metagradient.self_tuned
    @dataclasses.dataclass(frozen=True)
    class MyAgent:
      self_tuning: bool = False
      tuning: metagradient.Tuning = metagradient.Tuning(fields=('discount',))
      ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace.agents.population import with_values
from podrace.fields import check_fields
from podrace.learner import Learned, sgd, varying
from podrace.topology import AXIS
from podrace.types import Agent, Array, Metrics, Sample, TrainState, Trajectory

Name = Literal['discount', 'lambda', 'clip_mix', 'policy_cost', 'value_cost', 'entropy_cost']

SHARES = ('discount', 'lambda', 'clip_mix')  # within (0, 1)
COST_RANGE = 10.0  # upper end of a cost, as a multiple of the user's cost
START = 0.99  # STAC's start of a lambda or mix of 1, which no sigmoid reaches
OUTER = 2**31 - 1  # folded into the key, so that the outer loss has noise of its own


@dataclasses.dataclass(frozen=True)
class Tuning:
  """Settings of self-tuning."""

  fields: tuple[Name, ...] = ()
  # ^ settings that are learned: discount, lambda, clip_mix, policy_cost, value_cost or
  #   entropy_cost
  learning_rate: float = 1e-3  # learning rate of the tuned settings; 0: they stay as they are
  kl_cost: float = 1.0  # weight, in the outer loss, of the divergence from the acting policy

  def __post_init__(self) -> None:
    check_fields(self)


class SelfTuningRest(NamedTuple):
  """`TrainState.rest` of a self-tuning agent."""

  shift: dict[str, Array]  # [] f32 each, added to the inverse sigmoid of each setting
  opt_state: Any  # of the metaparameters' Adam
  rest: Any  # the agent's own


class Tunable(Agent, Protocol):
  """An agent that `self_tuned` can wrap. Its `learn` is the update without self-tuning."""

  @property
  def self_tuning(self) -> bool:
    """Whether the agent tunes itself. If so, its optimiser is differentiable at a gradient of 0."""
    ...

  @property
  def tuning(self) -> Tuning:
    """The settings of self-tuning."""
    ...

  def outer_loss(self, params: Any, trajectory: Trajectory, key: Array) -> tuple[Array, Metrics]:
    """Return the loss of a whole trajectory, and metrics that include `approx_kl`."""
    ...


AgentClass = TypeVar('AgentClass', bound=type[Tunable])
Update = Callable[[Any, TrainState, Sample, Array], Learned]


def self_tuned(cls: AgentClass) -> AgentClass:
  """Add self-tuning to the dataclass of an agent, active where its field `self_tuning` is true.

  The class's check of its fields, its `init` and its `learn` are wrapped. The parameters of the
  agent must have a field `network`, as `podrace.agents.policy_gradient.PolicyParams` has.
  """
  check, init, update = getattr(cls, '__post_init__', None), cls.init, cls.learn

  def check_all(agent: Tunable) -> None:
    if check is not None:
      check(agent)
    if agent.self_tuning:
      check_tuning(agent)

  @functools.wraps(init)
  def init_all(agent: Tunable, key: Array) -> TrainState:
    train = init(agent, key)
    return begin(agent.tuning, train) if agent.self_tuning else train

  @functools.wraps(update)
  def learn_all(agent: Tunable, train: TrainState, sample: Sample, key: Array) -> Learned:
    if agent.self_tuning:
      return learn(agent, update, train, sample, key)
    return update(agent, train, sample, key)

  methods = {'__post_init__': check_all, 'init': init_all, 'learn': learn_all}
  for name, method in methods.items():
    setattr(cls, name, method)
  return cls


def field_of(name: str) -> str:
  """Return the agent's field of a metaparameter."""
  return 'lambda_' if name == 'lambda' else name


def check_tuning(agent: Tunable) -> None:
  """Raise ValueError for a setting that cannot be a metaparameter."""
  if not agent.tuning.fields:
    raise ValueError('self_tuning needs something to tune: tuning.fields names no setting')
  for name in agent.tuning.fields:
    value = getattr(agent, field_of(name), None)
    if value is None:
      raise ValueError(f'tuning.fields: {type(agent).__name__} has no {name} to tune')
    if value == 0 or (value == 1 and name == 'discount'):
      end = 'needs to be less than 1, as 0.999' if value else 'must not be 0'
      raise ValueError(
        f'{name} is {value:g} and to be tuned, so it {end}; or leave it out of tuning.fields'
      )


def user_values(agent: Tunable) -> dict[str, Any]:
  """Return the user's value of each metaparameter, by its name."""
  return {name: getattr(agent, field_of(name)) for name in agent.tuning.fields}


def tuned_values(user: Mapping[str, Any], shift: Mapping[str, Array]) -> dict[str, Array]:
  """Return the values of the metaparameters, [] f32 each, by the agent's fields.

  A value is top * sigmoid(logit(user / top) + shift), written without logarithms, so that a shift
  of 0 gives the user's value.
  """
  values = {}
  for name, x in shift.items():
    start = user[name]
    top = 1.0 if name in SHARES else COST_RANGE * start
    if name in ('lambda', 'clip_mix'):
      start = jnp.where(start == 1, START, start)
    values[field_of(name)] = top * start / (start + (top - start) * jnp.exp(-x))
  return values


def begin(tuning: Tuning, train: TrainState) -> TrainState:
  """Return the first state of a self-tuning agent from the agent's own first state."""
  shift: dict[str, Array] = {name: jnp.zeros([]) for name in tuning.fields}
  rest = SelfTuningRest(shift, optimiser(tuning).init(shift), train.rest)
  return TrainState(train.params, rest)


def learn(agent: Tunable, update: Update, train: TrainState, sample: Sample, key: Array) -> Learned:
  """Make one update of the agent, and one of its metaparameters.

  There are three all-reduces where the update alone has one: of its gradient, of the outer loss'
  gradient on its way back through that mean, and of the metaparameters' gradient, a few numbers.
  """
  params, rest = train.params, train.rest
  outer_key = jax.random.fold_in(jax.random.fold_in(key, OUTER), lax.axis_index(AXIS))
  user = user_values(agent)

  def outer(shift: dict[str, Array]) -> tuple[Array, Any]:
    inner = with_values(agent, tuned_values(user, shift))
    after, priority, metrics = update(inner, TrainState(params, rest.rest), sample, key)
    moved = params._replace(network=varying(after.params.network))
    loss, outer_metrics = agent.outer_loss(moved, sample.trajectory, outer_key)
    total = loss + agent.tuning.kl_cost * outer_metrics['approx_kl']
    return total, (dict(outer_loss=total), (after, priority, metrics))

  shift, opt_state, outer_metrics, (after, priority, metrics) = sgd(
    outer, optimiser(agent.tuning), rest.shift, rest.opt_state, keep=True
  )
  tuned = {f'tuned_{name.rstrip("_")}': x for name, x in tuned_values(user, rest.shift).items()}
  after = TrainState(after.params, SelfTuningRest(shift, opt_state, after.rest))
  return after, priority, metrics | outer_metrics | tuned


def optimiser(tuning: Tuning) -> optax.GradientTransformation:
  """Return the optimiser of the metaparameters."""
  return optax.adam(tuning.learning_rate)
