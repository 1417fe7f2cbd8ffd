"""Self-tuning: an agent learns some of its own settings too, by the gradient of an outer loss.

Xu et al. 2018 (arXiv 1805.09801), Zahavy et al. 2020 (STAC, arXiv 2002.12928). A metaparameter is such a setting, as the
discount. Each update is made with the metaparameters' values. The outer loss is the agent's loss with the user's own
settings, for the parameters after the update and the same trajectory. It is differentiated through the update: the
clipping of the gradient and the optimiser's division are part of that. Xu et al. take the next trajectory instead.

A metaparameter is a sigmoid within its range, and begins as the user's setting. In STAC that setting is the upper end of
the range. Here a share, such as the discount, is between 0 and 1, and a cost between 0 and ten times the user's. The
outer loss also has STAC's penalty, the KL divergence of the new policy from the old one. Here the old one is the policy
that acted, and the divergence is estimated from its actions, without another pass through the network. The remarks on STAC are from
memory.

An agent that tunes itself has the fields `self_tuning` and `tuning`, and two functions besides those of every agent:
`update(train, sample, key)`, which is its `learn` without self-tuning, and `outer_loss(params, trajectory, key)`, whose
metrics have `approx_kl`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace.agents.population import with_values
from podrace.fields import check_fields, no_limit
from podrace.learner import clip_norm, sgd, varying
from podrace.topology import AXIS
from podrace.types import Array, Metrics, Sample, TrainState

Name = Literal['discount', 'lambda', 'clip_mix', 'policy_cost', 'value_cost', 'entropy_cost']

SHARES = ('discount', 'lambda', 'clip_mix')  # within (0, 1)
COST_RANGE = 10.0  # how many times the user's cost a cost may become
START = 0.99  # of a lambda or mix of 1, which no sigmoid is; STAC's
EPS_ROOT = 1e-16  # of squared gradients; it changes an update by rounding
OUTER = 2**31 - 1  # folded into the key, for noise of the outer loss' own


@dataclasses.dataclass(frozen=True)
class Tuning:
  """How an agent's own settings are learned."""

  fields: tuple[Name, ...] = ()  # discount, lambda, clip_mix, policy_cost, value_cost, entropy_cost
  learning_rate: float = 1e-3  # Adam's; 0: they stay as they are
  kl_cost: float = 1.0  # in the outer loss, of the divergence from the policy that acted

  def __post_init__(self) -> None:
    check_fields(self)


class Rest(NamedTuple):
  """What a self-tuning agent learns besides its parameters."""

  shift: dict[str, Array]  # [] f32 each: what is added to the inverse sigmoid of each setting
  opt_state: Any  # of the metaparameters' Adam
  rest: Any  # the agent's own


def field_of(name: str) -> str:
  """A metaparameter's field of the agent."""
  return 'lambda_' if name == 'lambda' else name


def check_tuning(agent: Any) -> None:
  """Raises ValueError for a setting that can't be a metaparameter."""
  if not agent.self_tuning:
    return
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


def settings(agent: Any, shift: dict[str, Array]) -> dict[str, Array]:
  """The values [] f32 of the metaparameters, by their fields of the agent.

  top * sigmoid(inverse of that for the agent's own setting + shift), without logarithms: at a shift of 0 the setting.
  """
  found = {}
  for name, x in shift.items():
    own = getattr(agent, field_of(name))
    top = 1.0 if name in SHARES else COST_RANGE * own
    if name in ('lambda', 'clip_mix'):
      own = jnp.where(own == 1, START, own)
    found[field_of(name)] = top * own / (own + (top - own) * jnp.exp(-x))
  return found


def init(agent: Any, train: TrainState) -> TrainState:
  """What such an agent begins with; `train` itself if it does not tune itself."""
  if not agent.self_tuning:
    return train
  shift = {name: jnp.zeros([]) for name in agent.tuning.fields}
  return TrainState(train.params, Rest(shift, optimiser(agent).init(shift), train.rest))


def learn(
  agent: Any, train: TrainState, sample: Sample, key: Array
) -> tuple[TrainState, Array, Metrics]:
  """`Agent.learn`: an update of the agent, and one of its metaparameters if it tunes itself.

  There are three all-reduces where the update has one: of its gradient, of the outer loss' gradient on its way back
  through that mean, and of the metaparameters' gradient, a few numbers.
  """
  if not agent.self_tuning:
    plain: tuple[TrainState, Array, Metrics] = agent.update(train, sample, key)
    return plain
  params, rest = train.params, train.rest
  outer_key = jax.random.fold_in(jax.random.fold_in(key, OUTER), lax.axis_index(AXIS))

  def outer(shift: dict[str, Array]) -> tuple[Array, Any]:
    inner = with_values(agent, settings(agent, shift))
    after, priority, metrics = inner.update(TrainState(params, rest.rest), sample, key)
    moved = params._replace(network=varying(after.params.network))
    loss, reported = agent.outer_loss(moved, sample.trajectory, outer_key)
    total = loss + agent.tuning.kl_cost * reported['approx_kl']
    return total, (dict(outer_loss=total), (after, priority, metrics))

  shift, opt_state, outer_metrics, (after, priority, metrics) = sgd(
    outer, optimiser(agent), rest.shift, rest.opt_state, keep=True
  )
  tuned = {f'tuned_{name.rstrip("_")}': x for name, x in settings(agent, rest.shift).items()}
  after = TrainState(after.params, Rest(shift, opt_state, after.rest))
  return after, priority, metrics | outer_metrics | tuned


def optimiser(agent: Any) -> optax.GradientTransformation:
  """The metaparameters'."""
  return optax.adam(agent.tuning.learning_rate)


def eps_root(agent: Any) -> float:
  """Of the agent's own Adam: what stands under its root, whose derivative at 0 is infinite."""
  return EPS_ROOT if agent.self_tuning else 0.0


def clip(agent: Any) -> optax.GradientTransformation:
  """Clips the norm of the agent's own gradient; if it tunes itself, with finite derivatives, also at 0 and of no limit."""
  if not agent.self_tuning:
    return clip_norm(agent.max_grad_norm)
  most = no_limit(agent.max_grad_norm)

  def clipped(updates: Any, _: Any = None) -> Any:
    squares = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(updates))
    norm = jnp.sqrt(jnp.maximum(squares, 1e-30))
    return jax.tree.map(lambda x: x / jnp.maximum(1.0, norm / most), updates)

  return optax.stateless(clipped)
