"""Disco: learning by a rule that was discovered (Oh et al. 2025, DiscoRL, Nature).

The rule is a network in a file (`podrace.agents.rules.disco`). It makes targets, from a trajectory,
of the policy and of two predictions, y and z. The loss is the KL divergence to them. Action values
are learned from Retrace (Munos et al. 2016, arXiv 1606.02647). A further head predicts the policy
one step later. The rule's memory of an agent's lifetime, the moments of the advantages and the
target network are part of the agent's state.

Against google-deepmind/disco_rl:

- The moments of TD errors are left out, as nothing is learned from them.
- A mean over steps counts the steps of all devices together.
- Past a time limit a value is bootstrapped from, while for the rule the episode has ended.
- Actions that an observation forbids are masked in the target of the policy as well.

A gradient step has two all-reduces, one more than that of other agents. The rule is given
advantages that are divided by their size in this batch, which is averaged over the devices first.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import lax

from podrace import returns
from podrace.agents.rules import disco as rules
from podrace.agents.rules import storage
from podrace.agents.rules.layers import RuleParams, divergence, entropy
from podrace.agents.search import mask_policy
from podrace.agents.value_based import select_action
from podrace.fields import FilePath, PlainText, check_fields
from podrace.learner import Learned, clip_each, flatten, scale_by_adam, sgd
from podrace.networks import Predictions, Predictor, merge_time, split_time
from podrace.networks.planning import decode, number_loss, outside_support
from podrace.replay import Buffer, windows
from podrace.topology import AXIS
from podrace.types import (
  ActorOutput,
  Array,
  Metrics,
  Replay,
  Sample,
  TimeStep,
  TrainState,
  Trajectory,
)


class DiscoMoments(NamedTuple):
  """Moving averages of advantages that begin as 0, [] f32 each."""

  first: Array
  second: Array
  start: Array  # the share of them that is this 0


class DiscoRest(NamedTuple):
  """Learned state besides the parameters, and the memory of the rule."""

  target: Any  # the network that targets are made by
  opt_state: Any
  memory: rules.DiscoRuleState
  moments: DiscoMoments


class DiscoExtras(NamedTuple):
  """Record of an action, for learning."""

  policy: Array  # [B, A] f32 logits that it was drawn by


class DiscoEstimates(NamedTuple):
  """Values of a trajectory, by the target network and for the online policy."""

  value: Array  # [T+1, B] f32 by the online network
  q_target: Array  # [T, B] f32 Retrace's, of the actions that were taken
  advantage: Array  # [T, B] f32 of the same
  q: Array  # [T, B, A] f32
  advantages: Array  # [T, B, A] f32 of all actions


@dataclasses.dataclass(frozen=True)
class Disco:
  """Hyper-parameters, and the functions of an `Agent`."""

  rule: FilePath = ''  # file of the rule, PATH.npz; see docs/discovery.md
  rule_sha256: PlainText = ''  # sha256 of the rule's file; '': any, and it is recorded
  lifetime: int = 128  # size of the rule's memory of a lifetime: as many numbers as the file has
  network: Predictor = Predictor()
  capacity: int = 100_000  # environment steps that replay keeps, of all environments
  batch_size: int = 64  # windows of each gradient, over all devices; a window is an unroll
  min_size: int = 1_000  # environment steps before learning begins
  replay_ratio: float = 8.0  # number of times that a window is learned from
  learning_rate: float = 3e-4  # learning rate of the optimiser
  adam_epsilon: float = 1e-8  # epsilon of Adam, added to the size of gradients
  max_update: float = 1.0  # largest step of a parameter, before the learning rate; 0: no limit
  discount: float = 0.997  # discount of each step
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 0.95  # lambda of Retrace's targets
  target_rate: float = 0.1  # share of the online network in each update of the target network
  moments_decay: float = 0.99  # decay of the moving averages that scale advantages
  policy_cost: float = 1.0  # weight of the policy's loss
  y_cost: float = 1.0  # weight of the divergence of y from the rule's target
  z_cost: float = 1.0  # weight of the divergence of z from the rule's target
  next_policy_cost: float = 1.0  # weight of the prediction of the policy one step later
  value_cost: float = 0.2  # weight of the value's loss
  greedy: bool = False  # act by the mode of the policy, for evaluation

  def __post_init__(self) -> None:
    check_fields(self)
    storage.pin(self)

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay: all unrolls of the past, drawn alike."""
    self.params()
    ratio = self.replay_ratio / unroll_length
    buffer = Buffer(self.capacity, self.batch_size, self.min_size, ratio)
    return windows(buffer, unroll_length, num_envs, unroll_length, keep_state=True, stack=stack)

  def params(self) -> dict[str, np.ndarray]:
    """Return the arrays of the rule, as `storage.params_of`."""
    usage = (
      'disco learns by a rule: give its file by --agent.rule PATH.npz. Disco103, the released one, '
      f'is at {rules.SOURCE}'
    )
    return storage.params_of(self, rules.Sizes, usage)

  def fits(self, sizes: rules.Sizes) -> dict[str, tuple[int, int]]:
    """Return options -> (the agent's value, the value that a rule of these sizes needs)."""
    return {
      '--agent.network.predictions': (self.network.predictions, sizes.predictions),
      '--agent.lifetime': (self.lifetime, sizes.lifetime),
    }

  opening = storage.opening

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    moments = DiscoMoments(jnp.float32(0), jnp.float32(0), jnp.float32(1))
    memory = rules.initial_state(self.lifetime)
    return TrainState(network, DiscoRest(network, self.optimiser().init(network), memory, moments))

  def warm_start(self, train: TrainState, params: Any) -> TrainState:
    """Start from the parameters of another run."""
    return TrainState(params, train.rest._replace(target=params))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.network.initial_state(env_id.shape[0])

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    predictions, state = self.network.step(params, state, timestep)
    kind = self.network.distribution
    x = kind.mode(predictions.policy) if self.greedy else kind.sample(predictions.policy, key)
    return ActorOutput(kind.to_action(x), DiscoExtras(predictions.policy)), state

  # --- learning

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    train, metrics, _ = self.step(self.params(), train, sample.trajectory)
    return train, jnp.ones_like(sample.weight), metrics

  def learn_by(
    self, rule: RuleParams, train: TrainState, window: Trajectory
  ) -> tuple[TrainState, Metrics]:
    """Make `step`, differentiable in the rule, and measure entropies of the parameters after it.

    Meta-training regularises these entropies. The entropies before the step do not depend on the
    rule's targets in it.
    """
    train, metrics, weight = self.step(rule, train, window)
    after = entropies(self.unroll_taken(train.params, window), weight)
    return train, metrics | lax.pmean(after, AXIS)

  def step(
    self, rule: RuleParams, train: TrainState, window: Trajectory
  ) -> tuple[TrainState, Metrics, Array]:
    """Make one gradient step by the rule of these parameters.

    Returns the metrics of before it, and the weights [T, B] of the steps in all means.
    """
    rest = train.rest
    online, target = (
      self.network.unroll(params, window.agent_state, window.timesteps)[0]
      for params in (train.params, rest.target)
    )
    estimates = self.estimates(online, target, window)
    mask = 1.0 - window.timesteps.last[:-1]
    sums = jnp.mean(estimates.advantage), jnp.mean(jnp.square(estimates.advantage)), jnp.mean(mask)
    first, second, valid = lax.pmean(sums, AXIS)
    moments = self.update_moments(rest.moments, first, second)
    inputs = inputs_of(online, target, estimates, window, moments)
    goals, summary = rules.targets(rule, rest.memory, inputs)
    sizes = {
      f'{name}_target_square': jnp.square(jnp.mean(x)) for name, x in goals._asdict().items()
    }
    kind = self.network.distribution
    masked = jax.vmap(lambda policy, seen: mask_policy(policy, seen, kind))
    goals = goals._replace(policy=masked(goals.policy, observations(window)))
    weight = mask / jnp.maximum(valid, 1e-8)

    def loss(network: Any) -> tuple[Array, Any]:
      predictions = self.unroll_taken(network, window)
      total, metrics = self.losses(predictions, goals, estimates.q_target, weight, window)
      away = divergence(lax.stop_gradient(target.policy[:-1]), goals.policy)
      metrics |= dict(target_divergence=jnp.mean(weight * away), value=jnp.mean(estimates.value))
      return total, (dict(loss=total, **metrics, **sizes), summary)

    network, opt_state, (metrics, summary) = sgd(
      loss, self.optimiser(), train.params, rest.opt_state
    )
    metrics['advantage_std'] = jnp.sqrt(mean_and_variance(moments)[1])
    new = DiscoRest(
      optax.incremental_update(train.params, rest.target, self.target_rate),
      opt_state,
      rules.remember(rule, rest.memory, summary),
      moments,
    )
    return TrainState(network, new), metrics, weight

  def unroll_taken(self, network: Any, window: Trajectory) -> Predictions:
    """Return predictions [T + 1, B] of the actions that were taken."""
    # The last state's action is not known, nor is anything learned of it.
    action = jnp.concatenate([window.outputs.action, window.outputs.action[-1:]])
    return self.network.unroll_taken(network, window.agent_state, window.timesteps, action)

  def estimates(
    self, online: Predictions, target: Predictions, window: Trajectory
  ) -> DiscoEstimates:
    """Return Retrace's values by the target network [T+1, B, A, bins], for the online policy."""
    t, action = window.timesteps, window.outputs.action
    pi, log_pi = jax.nn.softmax(online.policy), jax.nn.log_softmax(online.policy[:-1])
    log_mu = jax.nn.log_softmax(window.outputs.extras.policy)
    rho = jnp.exp(select_action(log_pi - log_mu, action))
    own_q, q = (decode(predictions.q, self.network.support) for predictions in (online, target))
    value = jnp.sum(pi * q, axis=-1)
    c = jnp.where(t.last[:-1], 0.0, self.lambda_ * jnp.minimum(1.0, rho))
    q_taken = select_action(q[:-1], action)
    # Retrace's value and trace of an action belong to the step that it begins; the last one's is
    # not looked at.
    c_t, q_t = (jnp.concatenate([x[1:], jnp.zeros_like(x[:1])]) for x in (c, q_taken))
    retrace = jax.vmap(returns.retrace, in_axes=1, out_axes=1)
    q_target = retrace(t.reward[1:], self.discount * t.discount[1:], c_t, q_t, value[1:])
    return DiscoEstimates(
      value=jnp.sum(pi * own_q, axis=-1),
      q_target=q_target,
      advantage=q_target - value[:-1],
      q=q[:-1],
      advantages=(q - value[..., None])[:-1],
    )

  def update_moments(self, moments: DiscoMoments, first: Array, second: Array) -> DiscoMoments:
    """Return the moving averages, one batch later."""
    keep = self.moments_decay
    return DiscoMoments(
      keep * moments.first + (1 - keep) * first,
      keep * moments.second + (1 - keep) * second,
      keep * moments.start,
    )

  def losses(
    self,
    predictions: Predictions,
    goals: rules.DiscoTargets,
    q_target: Array,
    weight: Array,
    window: Trajectory,
  ) -> tuple[Array, dict[str, Array]]:
    """Return the loss of a batch and metrics: means over steps with the weights [T, B].

    `predictions` are the predictions of the actions that were taken.
    """
    now = jax.tree.map(lambda x: x[:-1], predictions)
    value_loss = number_loss(merge_time(now.q), q_target.reshape(-1), self.network.support)
    later = divergence(lax.stop_gradient(predictions.policy[1:]), now.next_policy)
    parts = dict(
      policy_loss=divergence(goals.policy, now.policy),
      y_loss=divergence(goals.y, now.y),
      z_loss=divergence(goals.z, now.z),
      next_policy_loss=jnp.where(window.timesteps.last[1:], 0.0, later),
      value_loss=split_time(value_loss, q_target.shape[0]),
    )
    means = {name: jnp.mean(weight * x) for name, x in parts.items()}
    costs = self.policy_cost, self.y_cost, self.z_cost, self.next_policy_cost, self.value_cost
    total = sum((c * x for c, x in zip(costs, means.values(), strict=True)), jnp.float32(0))
    cut = outside_support(q_target, self.network.support)
    means |= {name: jnp.mean(weight * x) for name, x in cut.items()}
    return total, means | entropies(predictions, weight)

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    return flatten(
      optax.chain(
        scale_by_adam(self.adam_epsilon),
        clip_each(self.max_update),
        optax.scale_by_learning_rate(self.learning_rate),
      )
    )


def entropies(output: Predictions, weight: Array) -> dict[str, Array]:
  """Return mean entropies with these weights [T, B], of predictions [T + 1, B]."""
  parts = dict(entropy=output.policy, y_entropy=output.y, z_entropy=output.z)
  return {name: jnp.mean(weight * entropy(x[:-1])) for name, x in parts.items()}


def observations(window: Trajectory) -> Any:
  """Return the observations of the T steps."""
  return jax.tree.map(lambda x: x[:-1], window.timesteps.observation)


def inputs_of(
  online: Predictions,
  target: Predictions,
  estimates: DiscoEstimates,
  window: Trajectory,
  moments: DiscoMoments,
) -> rules.DiscoInputs:
  """Return the inputs of the rule."""
  t, outputs = window.timesteps, window.outputs
  mean, variance = mean_and_variance(moments)
  scale = 1 / (jnp.sqrt(variance + 1e-12) + 1e-6)
  return rules.DiscoInputs(
    online=rules.Predicted(online.policy, online.y, online.z),
    target=rules.Predicted(target.policy, target.y, target.z),
    behaviour=outputs.extras.policy,
    action=outputs.action,
    reward=t.reward[1:],
    last=t.last[1:],
    value=estimates.value,
    advantage=estimates.advantage,
    scaled_advantage=(estimates.advantage - mean) * scale,
    q=estimates.q,
    advantages=estimates.advantages,
    scaled_advantages=(estimates.advantages - mean) * scale,
  )


def mean_and_variance(moments: DiscoMoments) -> tuple[Array, Array]:
  """Return the mean and the variance, corrected for the start at 0."""
  known = 1 / (1 - moments.start)
  mean = known * moments.first
  return mean, jnp.maximum(0.0, known * moments.second - jnp.square(mean))
