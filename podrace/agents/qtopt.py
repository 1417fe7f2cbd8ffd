"""QT-Opt: a Q-function of continuous actions without an actor (Kalashnikov et al. 2018).

arXiv 1806.10293. Actions maximise Q by the cross-entropy method, at acting and in targets. Q is a
sigmoid, learned by cross-entropy. Targets take the smaller of two networks: theta1 is an average of
the learned parameters, and theta2 is theta1 as it was.

Against the paper:

- Adam instead of SGD with momentum, and no weight decay.
- theta2 is a copy of theta1 every `target_period` gradient steps, so its lag is from 0 to that
  period. The paper's is about 6,000 steps.
- theta1 follows by `target_rate` 0.005. The paper's is 1e-4, for 15 million steps.
- Returns outside of [0, 1] are mapped by `network.v_min` and `network.v_max`.
- Images are not cropped or distorted.

With `network.core` it learns from sequences; see `podrace.agents.recurrent`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from podrace.agents import cem, recurrent, value_based
from podrace.agents.cem import CEM, ActionLayout
from podrace.agents.recurrent import Recurrence
from podrace.fields import check_fields
from podrace.learner import Learned, flatten, sgd
from podrace.networks import ActionValue
from podrace.replay import Buffer
from podrace.topology import AXIS
from podrace.types import (
  ActorOutput,
  Array,
  Metrics,
  Sample,
  TimeStep,
  TrainState,
  Trajectory,
)

BEYOND = 0.25  # of the range from v_min to v_max: targets further outside are refused, not clipped


class QTOptParams(NamedTuple):
  """The target networks. Acting is by theta1."""

  theta1: Any  # average of the learned parameters
  theta2: Any  # theta1 at the last copy


class QTOptRest(NamedTuple):
  """Learned state that is not sent to actors."""

  network: Any  # theta, which takes gradient steps
  opt_state: Any
  steps: Array  # [] i32 gradient steps so far


class QTOptExtras(NamedTuple):
  """Extras of acting with `labels` stage."""

  label: Array  # [B] f32 the target of the action, which a stage writes; 0 until then


@dataclasses.dataclass(frozen=True)
class QTOpt:
  """Hyper-parameters, and the functions of an `Agent`."""

  network: ActionValue = ActionValue()
  buffer: Buffer = Buffer(batch_size=256, samples_per_insert=256.0)
  cem: CEM = CEM()
  learning_rate: float = 1e-3  # learning rate of Adam
  discount: float = 0.9  # discount of each step
  n_step: int = 1  # rewards before a value is bootstrapped from
  target_rate: float = 0.005  # share of the learned parameters in each update of theta1
  target_period: int = 100  # gradient steps between copies of theta1 to theta2
  epsilon: float = 0.1  # share of random actions
  labels: Literal['learner', 'stage'] = 'learner'
  # ^ learner: targets are computed in each update; stage: beside it, for `podrace label`, and
  #   updates only regress on them
  greedy: bool = False  # act without random actions, for evaluation
  recurrence: Recurrence = Recurrence()

  def __post_init__(self) -> None:
    check_fields(self)
    recurrent.check_used(self.recurrence, self.network)
    if self.is_recurrent and self.labels == 'stage':
      raise ValueError('a stage labels single steps: with a core take --agent.labels learner')

  is_recurrent = property(recurrent.is_recurrent)
  memory = recurrent.memory
  initial_state = recurrent.initial_state

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    rest = QTOptRest(network, self.optimiser().init(network), jnp.int32(0))
    return TrainState(QTOptParams(network, network), rest)

  def warm_start(self, train: TrainState, params: QTOptParams) -> TrainState:
    """Start from the parameters of another run."""
    return TrainState(params, train.rest._replace(network=params.theta1))

  def act(
    self,
    params: QTOptParams,
    state: Any,
    timestep: TimeStep,
    key: Array,
    replace: Callable[[Array], Array] = lambda action: action,
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B], which `replace` may change."""
    batch = timestep.reward.shape[0]
    best_key, random_key, explore_key = jax.random.split(key, 3)
    core: Any = ()
    if self.is_recurrent:
      embedding, core = recurrent.step(self.network, params.theta1, state, timestep)
    else:
      embedding = self.network.embed(params.theta1, timestep.observation)
    action, _ = self.best(params.theta1, embedding, best_key)
    if not self.greedy:
      explores = jax.random.uniform(explore_key, (batch, 1)) < self.epsilon
      action = jnp.where(explores, cem.uniform(batch, self.layout, random_key), action)
    extras = QTOptExtras(jnp.zeros(batch)) if self.labels == 'stage' else ()
    action = replace(self.network.distribution.from_unit(action))
    return ActorOutput(action, extras), recurrent.after(state, core, action)

  def best(self, network: Any, embedding: Any, key: Array) -> tuple[Array, Array]:
    """Return the best actions [B, n] within [-1, 1] by the network, and its outputs [B]."""

    def score(action: Array) -> Array:
      action = self.network.distribution.only_free(action)
      return self.network.value_of(network, embedding, action)

    batch = jax.tree.leaves(embedding)[0].shape[0]
    action, output = cem.maximize(score, batch, self.layout, self.cem, key)
    return self.network.distribution.only_free(action), output

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    rest: QTOptRest = train.rest
    batch = self.transitions(sample)
    if self.labels == 'stage':
      target = sample.trajectory.outputs.extras.label[0]
    else:  # other actions on each device
      target = self.target(train.params, batch, jax.random.fold_in(key, lax.axis_index(AXIS)))
    taken = self.network.distribution.to_unit(batch.step.action)
    mask = batch.step.mask  # 0 for LAST -> FIRST, which is no transition

    def loss(network: Any) -> tuple[Array, Any]:
      embedding = self.embed(network, batch)
      output = self.network.value_of(network, embedding, taken[:, None])[:, 0]
      value = self.network.returns(output)
      each, metrics = self.losses(output, target, mask)
      total = batch.mean(jnp.where(mask > 0, each, 0.0), batch.weight)
      metrics |= dict(loss=total, value=batch.mean_of_valid(value))
      return total, (metrics, batch.priority(mask * (jnp.abs(target - value) + 1e-6)))

    network, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), rest.network, rest.opt_state, keep=True
    )
    steps = rest.steps + 1
    theta1 = optax.incremental_update(network, train.params.theta1, self.target_rate)
    theta2 = value_based.follow(train.params.theta2, theta1, steps, self.target_period, 1.0)
    rest = QTOptRest(network, opt_state, steps)
    return TrainState(QTOptParams(theta1, theta2), rest), priority, metrics

  def losses(self, output: Array, target: Array, mask: Array) -> tuple[Array, Metrics]:
    """Return the losses [B] of outputs [B], and the share of targets that were cut off, if any can.

    The loss is infinite if a target is far outside of the range, see `refusal`.
    """
    if self.network.head == 'value':
      return 0.5 * jnp.square(output - target), {}
    share = self.network.share(target)
    inside = jnp.clip(share, 0.0, 1.0)
    each = optax.sigmoid_binary_cross_entropy(output, inside)
    refused = (mask > 0) & (jnp.abs(share - inside) > BEYOND)
    outside = jnp.mean(mask * (share != inside))
    return jnp.where(refused, jnp.inf, each), dict(outside_support=outside)

  def transitions(self, sample: Sample) -> recurrent.Batch:
    """Return the transitions of a sample."""
    recurrence = self.recurrence if self.is_recurrent else None
    return recurrent.transitions(recurrence, sample, self.discount, self.n_step)

  def embed(self, network: Any, batch: recurrent.Batch, after: bool = False) -> Any:
    """Return embeddings [N, ...] of the steps, or of the timesteps to bootstrap from."""
    if self.is_recurrent:
      return batch.outputs(self.network, network, after)
    timestep = batch.step.after if after else batch.step.before
    return self.network.embed(network, timestep.observation)

  def target(self, params: QTOptParams, batch: recurrent.Batch, key: Array) -> Array:
    """Return the targets [N] f32 of the actions, in units of returns.

    The action is the best one by theta1, and its value the smaller of both networks'.
    """
    action, output1 = self.best(params.theta1, self.embed(params.theta1, batch, after=True), key)
    embedding = self.embed(params.theta2, batch, after=True)
    output2 = self.network.value_of(params.theta2, embedding, action[:, None])[:, 0]
    value = self.network.returns(jnp.minimum(output1, output2))
    return batch.step.r_t + batch.step.discount_t * value

  def label(self, params: QTOptParams, window: Trajectory, key: Array) -> Array:
    """Return the targets [B] f32 of the first actions of windows, in units of returns."""
    sample = Sample(window, jnp.ones(window.env_id.shape), window.env_id)
    return self.target(params, self.transitions(sample), key)

  def refresh(self, params: QTOptParams, window: Trajectory, key: Array) -> Trajectory:
    """Return windows with the label of their first step; with `labels` stage."""
    extras: QTOptExtras = window.outputs.extras
    label = extras.label.at[0].set(self.label(params, window, key))
    return window._replace(outputs=window.outputs._replace(extras=QTOptExtras(label)))

  def refusal(self) -> str:
    """Return the reason for an infinite loss."""
    n = self.network
    return (
      f'a target is far outside of [{n.v_min:g}, {n.v_max:g}], the returns that the sigmoid can '
      'represent: set --agent.network.v-min and --agent.network.v-max to the range of discounted '
      'returns, or take --agent.network.head value'
    )

  @property
  def layout(self) -> ActionLayout:
    """The continuous numbers and the one-hot groups of an action."""
    one_hot = self.network.one_hot
    return ActionLayout(len(self.network.distribution.low) - sum(one_hot), one_hot)

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    return flatten(optax.adam(self.learning_rate))
