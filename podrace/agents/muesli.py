"""Muesli: a policy gradient regularised by a learned model (Hessel et al. 2021, arXiv 2104.06159).

It acts by its policy, without a search. One step of the model, which is unrolled as MuZero's,
values each action. The policy stays close to CMPO's, the prior times exp(clip(advantage)) (section
4.1). Values are learned from Retrace (Munos et al. 2016, arXiv 1606.02647) over the model's action
values. Advantages are divided by a moving average of their size (section 4.5). Targets come from
the prior, a network that follows the parameters by a moving average.

Against the paper:

- The policy gradient has no beta-LOO baseline.
- An advantage is divided by its size as known before its batch, so that one all-reduce is enough.
  It counts as 0 in the first gradient of a run. In the policy gradient it is divided by at least
  the size that follows from its batch.
- The target of a value is E q + lambda rho (G - q), the value that Retrace bootstraps from, with E
  over the prior's actions.
- The losses of K unrolled steps are weighted 1/K, as MuZero's.
- There is no weight decay unless it is set. A weight of the entropy can be set, for environments
  without noise.
- Past the end of an episode value and reward are 0 and the policy is masked. Past a time limit
  everything is masked.
- Actions are discrete.

A window begins with each unroll. A new window is drawn by a priority such that it is learned from
once while it is new and replay_share / (1 - replay_share) times more from replay, which makes
`replay_share` of a batch in the long run.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import returns
from podrace.agents.model_unroll import (
  ModelGoals,
  make_goals,
  number_losses,
  represent,
  spread,
  unroll_model,
  unroll_weights,
)
from podrace.agents.search import mask_policy
from podrace.agents.value_moments import value_moments
from podrace.fields import check_fields, no_limit
from podrace.learner import Learned, clip_each, flatten, means, sgd
from podrace.networks import LearnedModel, merge_time, split_time
from podrace.networks.planning import decode, outside_support
from podrace.replay import Buffer, windows
from podrace.topology import AXIS
from podrace.types import ActorOutput, Array, Replay, Sample, TimeStep, TrainState, Trajectory


class MuesliRest(NamedTuple):
  """Learned state besides the parameters."""

  target: Any  # parameters of the prior, for targets
  opt_state: Any
  square: Array  # [] f32 moving average of squared advantages, which begins as 0
  weight: Array  # [] f32 the share of it that is not this 0


class MuesliExtras(NamedTuple):
  """Record of an action, for learning, [B]."""

  log_prob: Array  # f32 under the acting policy


class MuesliTargets(NamedTuple):
  """Targets from the target network, for the states of windows, [L, B, ...]."""

  policy: Array  # [L, B, A] f32 CMPO's; sampled ones add up to 1 on average only
  value: Array  # f32
  advantage: Array  # f32 of the actions that were taken, as they are


@dataclasses.dataclass(frozen=True)
class Muesli:
  """Hyper-parameters, and the functions of an `Agent`."""

  network: LearnedModel = LearnedModel()
  capacity: int = 100_000  # environment steps that replay keeps, of all environments
  batch_size: int = 32  # windows of each gradient, over all devices; a window is an unroll
  min_size: int = 1_000  # environment steps before learning begins
  replay_share: float = 0.75
  # ^ share of replay in each batch: a window is learned from 1 / (1 - replay_share) times
  unroll: int = 5  # actions that the model is unrolled for
  learning_rate: float = 3e-4  # learning rate of the optimiser
  anneal_learning_rate: bool = False  # lower the learning rate linearly to 0 over the run
  adam_epsilon: float = 1e-8  # epsilon of Adam, added to the size of gradients
  weight_decay: float = 0.0  # weight decay of the optimiser
  max_update: float = 1.0  # largest step of a parameter, before the learning rate; 0: no limit
  discount: float = 0.995  # discount of each step
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 0.95  # lambda of Retrace's targets
  target_rate: float = 0.1  # share of the online network in each update of the target network
  clip_advantage: float = 1.0  # largest advantage in CMPO; 0: not clipped
  sampled_actions: int = 0
  # ^ actions drawn from the prior, to estimate CMPO's policy; 0: all actions
  advantage_decay: float = 0.99  # decay of the moving average of squared advantages
  advantage_epsilon: float = 1e-12
  # ^ number added to the variance of advantages before they are divided by it
  policy_cost: float = 3.0  # weight of the policy gradient
  cmpo_cost: float = 1.0  # weight of the divergence from CMPO's policy
  reward_cost: float = 1.0  # weight of the reward's loss
  value_cost: float = 0.25  # weight of the value's loss
  model_cost: float = 1.0  # weight of the model's loss of foreseen policies
  entropy_cost: float = 0.0  # weight of the policy's entropy; higher explores more
  greedy: bool = False  # act by the mode of the policy, for evaluation
  total_updates: Annotated[int, tyro.conf.Suppress] = 0  # bound by the runner
  total_envs: Annotated[int, tyro.conf.Suppress] = 0

  def __post_init__(self) -> None:
    check_settings(self)

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay: a window for each unroll, and the steps behind it that the model needs.

    Once a window was learned from, its priority is 1. The priority of a new window is such that the
    new windows of one unroll of all environments are (1 - replay_share) of the sum, once replay is
    full.
    """
    fresh = 1 - self.replay_share
    buffer = Buffer(
      self.capacity, self.batch_size, self.min_size, 1 / (fresh * unroll_length),
      priority_exponent=1.0, importance_exponent=0.0,
    )  # fmt: skip
    replayed = self.replay_share * num_envs * unroll_length
    priority = max(1.0, fresh * self.capacity / replayed) if replayed else 1e6

    def initial_priority(window: Trajectory) -> Array:
      return jnp.full_like(window.timesteps.reward[0], priority)

    return windows(
      buffer, unroll_length + self.unroll, num_envs, unroll_length,
      keep_state=True, stack=stack, initial_priority=initial_priority,
    )  # fmt: skip

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    opt_state = self.optimiser().init(network)
    return TrainState(network, MuesliRest(network, opt_state, jnp.float32(0), jnp.float32(0)))

  def warm_start(self, train: TrainState, params: Any) -> TrainState:
    """Start from the parameters of another run."""
    return TrainState(params, train.rest._replace(target=params))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.network.initial_state(env_id.shape[0])

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    seen = jax.tree.map(lambda x: x[None], timestep)
    hidden, state = self.network.represent(params, state, seen)
    predictions = self.network.predict(params, jax.tree.map(lambda x: x[0], hidden))
    kind = self.network.distribution
    logits = mask_policy(predictions.policy, timestep.observation, kind)
    x = kind.mode(logits) if self.greedy else kind.sample(logits, key)
    return ActorOutput(kind.to_action(x), MuesliExtras(kind.log_prob(logits, x))), state

  # --- learning

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    rest, window = train.rest, sample.trajectory
    own_key = jax.random.fold_in(key, lax.axis_index(AXIS))  # other actions on each device
    known = rest.weight > 0
    variance = rest.square / jnp.where(known, rest.weight, 1.0)
    scale = jnp.where(known, lax.rsqrt(variance + self.advantage_epsilon), 0.0)
    targets = self.targets(rest.target, window, scale, own_key)
    states = jax.tree.map(lambda x: x[:-1], window.timesteps)
    goals = make_goals(states, targets, len(states.reward) - self.unroll, self.unroll)
    mask, advantage = goals.policy_mask[0], goals.targets.advantage[0]
    sums = jnp.mean(mask * jnp.square(advantage)), jnp.mean(mask)
    square, valid = lax.pmean(sums, AXIS)
    square = square / jnp.maximum(valid, 1e-6)
    limited = self.limit_scale(scale, square)

    def loss(network: Any) -> tuple[Array, Any]:
      total, metrics = self.losses(network, window, goals, limited)
      return total, dict(loss=total, **metrics)

    network, opt_state, metrics = sgd(loss, self.optimiser(), train.params, rest.opt_state)
    metrics['advantage_std'] = jnp.sqrt(variance)
    new = MuesliRest(
      optax.incremental_update(network, rest.target, self.target_rate),
      opt_state,
      self.move_average(rest.square, square),
      self.move_average(rest.weight, jnp.float32(1)),
    )
    return TrainState(network, new), jnp.ones_like(sample.weight), metrics

  def limit_scale(self, scale: Array, square: Array) -> Array:
    """Return `scale`, limited by the mean square of a batch's advantages.

    Advantages divided by the moving average with this batch are the limit. Before the first reward
    advantages are rounding of the model. Divided by their own size, the first real ones would fill
    Adam's second moment for tens of thousands of steps, in which nothing is learned.
    """
    return jnp.minimum(
      scale, lax.rsqrt(self.move_average(jnp.float32(0), square) + self.advantage_epsilon)
    )

  def move_average(self, average: Array, x: Array) -> Array:
    """Return a moving average of advantages, one batch later."""
    return self.advantage_decay * average + (1 - self.advantage_decay) * x

  def targets(self, target: Any, window: Trajectory, scale: Array, key: Array) -> MuesliTargets:
    """Return the targets of a window; advantages times `scale` have a variance of 1."""
    t, outputs = window.timesteps, window.outputs
    hidden, _ = self.network.represent(target, window.agent_state, t)
    hidden, length = merge_time(hidden), t.reward.shape[0]
    predictions = self.network.predict(target, hidden)
    prior = mask_policy(predictions.policy, merge_time(t.observation), self.network.distribution)
    v = decode(predictions.value, self.network.support)
    # The last state has no action. Its value is used for bootstrapping only.
    action, log_prob = (
      merge_time(jnp.concatenate([x, x[-1:]])) for x in (outputs.action, outputs.extras.log_prob)
    )
    candidates, share, q = self.action_values(target, hidden, prior, key)
    q_taken = self.one_step(target, hidden, action)
    advantage = scale * (q - v[:, None])
    ratio = jnp.exp(self.network.distribution.log_prob(prior, action) - log_prob)
    expected, q_taken, v, ratio = split_time((jnp.sum(share * q, -1), q_taken, v, ratio), length)
    c = jnp.where(t.last, 0.0, self.lambda_ * jnp.minimum(1.0, ratio))
    retrace = jax.vmap(returns.retrace, in_axes=1, out_axes=1)
    g = retrace(t.reward[1:], self.discount * t.discount[1:], c[1:], q_taken[1:], expected[1:])
    value = expected[:-1] + c[:-1] * (g - q_taken[:-1])
    policy = split_time(self.improve(prior, candidates, advantage), length)
    return MuesliTargets(policy[:-1], value, g - v[:-1])

  def one_step(self, target: Any, hidden: Any, action: Array) -> Array:
    """Return the values [N] of actions [N]: the model's reward plus the discounted next value."""
    hidden, reward = self.network.dynamics(target, hidden, action)
    value = self.network.predict(target, hidden).value
    reward, value = (decode(x, self.network.support) for x in (reward, value))
    return reward + self.discount * value

  def action_values(
    self, target: Any, hidden: Any, prior: Array, key: Array
  ) -> tuple[Array, Array, Array]:
    """Return candidate actions [N, C], the share of each in the prior, and their values."""
    n, num_actions = prior.shape
    if self.sampled_actions:
      many = jnp.repeat(prior[:, None], self.sampled_actions, axis=1)
      candidates = self.network.distribution.sample(many, key)
      share = jnp.full(candidates.shape, 1 / self.sampled_actions)
    else:
      candidates = jnp.broadcast_to(jnp.arange(num_actions)[None], (n, num_actions))
      share = jax.nn.softmax(prior)
    each = jax.vmap(lambda a: self.one_step(target, hidden, a), in_axes=1, out_axes=1)
    return candidates, share, each(candidates)

  def improve(self, prior: Array, candidates: Array, advantage: Array) -> Array:
    """Return CMPO's policy [N, A] of the prior's logits [N, A] and scaled advantages [N, C]."""
    limit = no_limit(self.clip_advantage)
    if not self.sampled_actions:
      return cmpo(prior, advantage, limit)
    weights = jax.vmap(sampled_cmpo, in_axes=(0, None))(advantage, limit)
    code = jax.nn.one_hot(candidates, prior.shape[-1])
    return jnp.sum(code * weights[..., None], axis=1)

  def losses(
    self, network: Any, window: Trajectory, goals: ModelGoals, scale: Array
  ) -> tuple[Array, dict[str, Array]]:
    """Return the loss of a batch, a mean over states with masked ones as 0, and metrics."""
    taken, support = window.outputs, self.network.support
    roots = len(taken.action) - self.unroll
    root = merge_time(represent(self.network, network, window, 0, roots))
    actions = spread(taken.action, roots, self.unroll)
    outputs = unroll_model(self.network, network, root, actions)
    observation = jax.tree.map(lambda x: x[:roots], window.timesteps.observation)
    first = mask_policy(outputs.policy[0], merge_time(observation), self.network.distribution)
    log_p = jax.nn.log_softmax(jnp.concatenate([first[None], outputs.policy[1:]]))
    cross = -jnp.sum(goals.targets.policy * log_p, axis=-1)
    advantage = scale * goals.targets.advantage[0]
    gradient, rho = self.policy_gradient(first, actions[0], window, advantage)
    mask, share = goals.policy_mask, unroll_weights(self.unroll)
    values = number_losses(outputs.value, goals.targets.value, support)
    rewards = number_losses(outputs.reward, goals.reward[1:], support)

    def mean(weight: Array, each: Array) -> Array:
      return jnp.mean(jnp.sum(weight * each, axis=0))

    parts = dict(
      policy_loss=jnp.mean(mask[0] * gradient),
      cmpo_loss=jnp.mean(mask[0] * cross[0]),
      model_loss=mean((share * mask)[1:], cross[1:]),
      value_loss=mean(share * goals.value_mask, values),
      reward_loss=mean((share * goals.reward_mask)[1:], rewards),
    )
    costs = self.policy_cost, self.cmpo_cost, self.model_cost, self.value_cost, self.reward_cost
    total = sum((c * x for c, x in zip(costs, parts.values(), strict=True)), jnp.float32(0))
    entropy = -jnp.mean(mask[0] * jnp.sum(jnp.exp(log_p[0]) * log_p[0], axis=-1))
    value = decode(outputs.value[0], support)
    target = goals.targets.value[0]
    moments = value_moments(target, value, goals.value_mask[0]) | outside_support(target, support)
    return total - self.entropy_cost * entropy, parts | dict(
      entropy=entropy, rho=jnp.mean(mask[0] * rho), value=jnp.mean(value), **means(**moments)
    )

  def policy_gradient(
    self, policy: Array, action: Array, window: Trajectory, advantage: Array
  ) -> tuple[Array, Array]:
    """Return a loss [N] with the policy gradient as its gradient, and the clipped ratios."""
    before = window.outputs.extras.log_prob
    log_prob = self.network.distribution.log_prob(policy, action)
    before = merge_time(before[: len(before) - self.unroll])
    rho = lax.stop_gradient(jnp.minimum(1.0, jnp.exp(log_prob - before)))
    return -rho * advantage * log_prob, rho

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rate: Any = self.learning_rate
    if self.anneal_learning_rate:
      windows = self.total_updates * self.total_envs / (1 - self.replay_share)
      steps = float(math.ceil(windows / self.batch_size))  # beyond 32 bits, maybe
      rate = optax.linear_schedule(rate, 0.0, steps)
    return flatten(
      optax.chain(
        optax.scale_by_adam(eps=self.adam_epsilon),
        clip_each(self.max_update),
        optax.add_decayed_weights(self.weight_decay),
        optax.scale_by_learning_rate(rate),
      )
    )


def cmpo(prior: Array, advantage: Array, limit: float) -> Array:
  """Return CMPO's policy [..., A]: the prior (logits [..., A]) times exp(clip(advantage)).

  Its total variation from the prior is at most tanh(limit / 2) (section 4.1).
  """
  return jax.nn.softmax(prior + jnp.clip(advantage, -limit, limit))


def sampled_cmpo(advantage: Array, limit: float) -> Array:
  """Return weights [C] of C actions drawn from the prior, for one state.

  In expectation they are CMPO's policy. The normalizer of each action's weight has a 1 in place of
  that action, so as not to depend on it (section 4.2).
  """
  size = jnp.exp(jnp.clip(advantage, -limit, limit))
  return size / (1.0 + jnp.sum(size) - size)


def check_settings(agent: Muesli) -> None:
  """Raise ValueError for the first setting that is impossible."""
  from gymnasium import spaces

  check_fields(agent)
  if agent.sampled_actions == 1:
    raise ValueError(
      f'sampled_actions must be 0, for all actions, or at least 2, not {agent.sampled_actions}'
    )
  space = getattr(agent.network, 'action_space', None)  # known once the network is bound
  if space is not None and not isinstance(space, spaces.Discrete):
    raise ValueError(f'muesli needs a Discrete action space, not {space}')
