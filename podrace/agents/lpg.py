"""LPG: learning by a learned policy gradient (Oh et al. 2020, arXiv 2007.08794), read from a file.

The rule (`podrace.agents.rules.lpg`) reads the newest trajectory. It returns an increase of each
action's log-probability, and a target of the agent's prediction y. The loss (equation 2) is the
policy gradient with these increases plus the KL divergence from y to its target. There are no
values: the meaning of y is left to the rule.

From the paper: unrolls of 20 steps, 30 numbers in y, the weight 0.5 of the divergence. Ours: the
optimiser's settings, since the paper draws them for each agent, and a mean over steps, not a sum.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from podrace.agents.rules import lpg as rules
from podrace.agents.rules import storage
from podrace.agents.rules.layers import RuleParams, divergence, entropy
from podrace.fields import FilePath, PlainText, check_fields
from podrace.learner import Learned, clip_norm, flatten, scale_by_adam, sgd
from podrace.networks import PolicyPrediction, PolicyPredictor
from podrace.topology import AXIS
from podrace.types import ActorOutput, Array, Metrics, Sample, TimeStep, TrainState, Trajectory


@dataclasses.dataclass(frozen=True)
class LPG:
  """Hyper-parameters, and the functions of an `Agent`."""

  rule: FilePath = ''  # file of the rule, PATH.npz; see docs/discovery.md
  rule_sha256: PlainText = ''  # sha256 of the rule's file; '': any, and it is recorded
  network: PolicyPredictor = PolicyPredictor()
  optimizer: Literal['adam', 'sgd'] = 'adam'  # the optimiser
  learning_rate: float = 1e-3  # learning rate of the optimiser
  adam_epsilon: float = 1e-8  # epsilon of Adam, with that optimiser
  max_grad_norm: float = 0.5  # largest norm of the gradient; 0: no limit
  discount: float = 0.99  # discount of each step, an input of the rule
  y_cost: float = 0.5  # weight of the divergence of y from the rule's target
  greedy: bool = False  # act by the mode of the policy, for evaluation

  def __post_init__(self) -> None:
    check_fields(self)
    storage.pin(self)

  def params(self) -> dict[str, np.ndarray]:
    """Return the arrays of the rule, as `storage.params_of`."""
    usage = (
      'lpg learns by a rule: give its file by --agent.rule PATH.npz; docs/discovery.md says how '
      'one is made'
    )
    return storage.params_of(self, rules.Sizes, usage)

  def fits(self, sizes: rules.Sizes) -> dict[str, tuple[int, int]]:
    """Return options -> (the agent's value, the value that a rule of these sizes needs)."""
    return {'--agent.network.predictions': (self.network.predictions, sizes.predictions)}

  opening = storage.opening

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    return TrainState(network, self.optimiser().init(network))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.network.initial_state(env_id.shape[0])

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    predictions, state = self.network.step(params, state, timestep)
    kind = self.network.distribution
    x = kind.mode(predictions.policy) if self.greedy else kind.sample(predictions.policy, key)
    return ActorOutput(kind.to_action(x)), state

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    train, metrics = self.step(self.params(), train, sample.trajectory)
    return train, jnp.ones_like(sample.weight), metrics

  def learn_by(
    self, rule: RuleParams, train: TrainState, window: Trajectory
  ) -> tuple[TrainState, Metrics]:
    """Make `step`, differentiable in the rule, and measure entropies of the parameters after it.

    Meta-training regularises these entropies. The entropies before the step do not depend on the
    rule's targets in it.
    """
    train, metrics = self.step(rule, train, window)
    output, _ = self.network.unroll(train.params, window.agent_state, window.timesteps)
    return train, metrics | lax.pmean(self.entropies(output, window), AXIS)

  def step(
    self, rule: RuleParams, train: TrainState, window: Trajectory
  ) -> tuple[TrainState, Metrics]:
    """Make one gradient step by the rule of these parameters; the metrics are of before it."""
    predictions, _ = self.network.unroll(train.params, window.agent_state, window.timesteps)
    goals = rules.targets(rule, self.inputs(predictions, window), self.discount)

    def loss(network: Any) -> tuple[Array, Any]:
      now, _ = self.network.unroll(network, window.agent_state, window.timesteps)
      total, metrics = self.losses(now, goals, window)
      return total, dict(loss=total, **metrics)

    network, opt_state, metrics = sgd(loss, self.optimiser(), train.params, train.rest)
    return TrainState(network, opt_state), metrics

  def inputs(self, predictions: PolicyPrediction, window: Trajectory) -> rules.LPGInputs:
    """Return the inputs of the rule."""
    t = window.timesteps
    log_prob = self.network.distribution.log_prob(predictions.policy[:-1], window.outputs.action)
    return rules.LPGInputs(
      t.reward[1:], t.discount[1:], t.last[1:], jnp.exp(log_prob), predictions.y
    )

  def losses(
    self, predictions: PolicyPrediction, goals: rules.LPGTargets, window: Trajectory
  ) -> tuple[Array, dict[str, Array]]:
    """Return the loss, equation 2 of the paper, and metrics.

    All are means over [T, B] in which masked transitions count as 0. Meta-training regularises some
    of the metrics.
    """
    mask = 1.0 - window.timesteps.last[:-1]
    policy, y = predictions.policy[:-1], predictions.y[:-1]
    log_prob = self.network.distribution.log_prob(policy, window.outputs.action)
    parts = dict(
      policy_loss=-goals.policy * log_prob,
      y_loss=divergence(y, goals.y),
      policy_target_square=jnp.square(goals.policy),
      y_target_square=jnp.sum(jnp.square(jax.nn.softmax(goals.y)), axis=-1),
    )
    means = {name: jnp.mean(mask * x) for name, x in parts.items()} | self.entropies(
      predictions, window
    )
    return means['policy_loss'] + self.y_cost * means['y_loss'], means

  def entropies(self, output: PolicyPrediction, window: Trajectory) -> dict[str, Array]:
    """Return mean entropies over [T, B], masked transitions counting as 0."""
    mask = 1.0 - window.timesteps.last[:-1]
    parts = dict(entropy=output.policy, y_entropy=output.y)
    return {name: jnp.mean(mask * entropy(x[:-1])) for name, x in parts.items()}

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    scale = scale_by_adam(self.adam_epsilon) if self.optimizer == 'adam' else optax.identity()
    clip = clip_norm(self.max_grad_norm)
    return flatten(optax.chain(clip, scale, optax.scale_by_learning_rate(self.learning_rate)))
