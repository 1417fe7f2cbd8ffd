"""Learned intrinsic rewards (Zheng et al. 2020, arXiv 1912.05500): rewards learned over lifetimes.

Each environment is a lifetime. Its policy starts from scratch and learns from the intrinsic reward
alone. The reward is a recurrent network over the whole lifetime, across episodes. Only the reward
is learned and shared. Its gradient goes through the policies' updates in an unroll (equation 3),
with a lifetime value function behind the unroll (equation 4). So a policy is state of acting, as a
recurrent state is, and `learn` repeats an unroll, as data, to differentiate it.

A policy learns by REINFORCE (Williams 1992) with traces. Each intrinsic reward, less the moving
average of them, is credited to the earlier actions of the episode, discounted. Every `period`
steps the sum becomes one step of gradient ascent. Without the average a constant reward would
drive policies, and nothing else would be learned.

From the paper: the objective, the reward's inputs, the truncated meta-gradient with a bootstrapped
value. Ours, as its appendix was not at hand: traces instead of returns of whole episodes, the
average, the tanh that bounds the reward, sizes and rates. All policies of an environment start
from the same parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import returns
from podrace.envs.base import select
from podrace.envs.own.lifetimes import Lifetimes
from podrace.errors import UsageError
from podrace.fields import check_fields
from podrace.learner import Learned, clip_norm, flatten, sgd
from podrace.networks import LifetimeNetwork, Policy
from podrace.types import ActorOutput, Array, Metrics, Sample, TimeStep, TrainState, Trajectory


class IntrinsicParams(NamedTuple):
  """Parameters that are learned over lifetimes and shared by them."""

  reward: Any
  value: Any


class PolicyLearner(NamedTuple):
  """A policy that learns, [B, ...]: parameters, traces, gradients, and reward statistics."""

  policy: Any
  trace: Any  # of d log pi(a|s), of the episode so far
  gradient: Any  # since the last update
  steps: Array  # [B] i32 since the last update
  mean: Array  # [B] f32 moving average of intrinsic rewards
  rewards: Array  # [B] f32 how many there were


class IntrinsicState(NamedTuple):
  """State of acting: lifetimes [B, ...]."""

  learner: PolicyLearner
  beginning: Any  # the policy that each lifetime begins with
  reward_state: Any
  value_state: Any
  action: Array  # [B] i32 the last one
  episode: Array  # [B] i32 episodes of the lifetime that are over


@dataclasses.dataclass(frozen=True)
class Intrinsic:
  """Hyper-parameters, and the functions of an `Agent`."""

  policy: Policy = Policy()
  reward: LifetimeNetwork = LifetimeNetwork()
  value: LifetimeNetwork = LifetimeNetwork()
  episodes: int = 0  # episodes of a lifetime; 0: as many as the environment has
  period: int = 8  # steps between updates of a policy
  policy_learning_rate: float = 10.0  # learning rate of the policies, by gradient ascent
  policy_discount: float = 0.9  # discount of intrinsic rewards
  policy_entropy_cost: float = 0.05  # weight of the policies' entropy
  policy_mean_rate: float = 0.02
  # ^ rate of the moving average that is subtracted from intrinsic rewards
  learning_rate: float = 1e-3  # learning rate of the reward
  value_learning_rate: float = 1e-3  # learning rate of the value of lifetimes
  adam_epsilon: float = 1e-8  # epsilon of Adam, added to the size of gradients
  max_grad_norm: float = 1.0  # largest norm of the gradients of reward and value, each; 0: no limit
  reward_cost: float = 1e-3
  # ^ weight of squared rewards before the tanh, which keeps them off its flat ends
  discount: float = 0.99  # discount of rewards over the lifetime
  lambda_: Annotated[float, tyro.conf.arg(name='lambda')] = 0.95
  # ^ mix of n-step returns of a lifetime, as in TD(lambda)
  objective: Literal['lifetime', 'episode'] = 'lifetime'
  # ^ lifetime, or episode: returns then end with the episode, for comparison
  environment: Annotated[Any, tyro.conf.Suppress] = None  # bound by the runner

  def __post_init__(self) -> None:
    check_fields(self)

  @property
  def lifetime(self) -> int:
    """Episodes of a lifetime; 0: it has no end.

    Raises:
      UsageError: if the lifetimes of the environment have another length.
    """
    env = self.environment
    if not isinstance(env, Lifetimes):
      return self.episodes
    if self.episodes and self.episodes != env.episodes:
      raise UsageError(
        f'--agent.episodes {self.episodes}: the lifetimes of the environment have {env.episodes} '
        'episodes; leave it out'
      )
    return env.episodes

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    reward_key, value_key = jax.random.split(key)
    params = IntrinsicParams(self.reward.init(reward_key), self.value.init(value_key))
    return TrainState(params, self.optimiser().init(params))

  def initial_state(self, env_id: Array) -> IntrinsicState:
    """Return the state of acting before the first timestep."""
    n = env_id.shape[0]
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(env_id)
    policy = jax.vmap(self.policy.init)(keys)
    zeros = jnp.zeros(n, jnp.int32)
    states = self.reward.initial_state(n), self.value.initial_state(n)
    return IntrinsicState(new_learner(policy), policy, *states, zeros, zeros)

  def act(
    self, params: IntrinsicParams, state: IntrinsicState, timestep: TimeStep, key: Array
  ) -> tuple[ActorOutput, IntrinsicState]:
    """Choose the actions of timesteps [B]."""
    begins, episode = self.count_episodes(state.episode, timestep)
    seen = jax.tree.map(lambda x: x[None], (timestep, state.action, begins))
    reward, reward_state = self.reward.recall(params.reward, state.reward_state, *seen)
    _, value_state = self.value.recall(params.value, state.value_state, *seen)
    learner = self.reward_policies(state, begins, timestep, jnp.tanh(reward[0]))
    kind = self.policy.distribution
    action = kind.sample(self.logits(learner.policy, timestep), key)
    learner, _ = self.record_actions(learner, timestep, action)
    life = IntrinsicState(learner, state.beginning, reward_state, value_state, action, episode)
    return ActorOutput(kind.to_action(action)), life

  # --- a lifetime

  def count_episodes(self, episode: Array, timestep: TimeStep) -> tuple[Array, Array]:
    """Return whether a lifetime begins [B] bool, and its finished episodes after a timestep [B]."""
    over = (episode >= self.lifetime) if self.lifetime else jnp.zeros_like(timestep.first)
    begins = timestep.first & over
    return begins, jnp.where(begins, 0, episode) + timestep.last

  def logits(self, policy: Any, timestep: TimeStep) -> Array:
    """Return the logits [B, A] of each lifetime's policy."""
    return jax.vmap(self._logits)(policy, timestep)

  def _logits(self, policy: Any, timestep: TimeStep) -> Array:
    one: Array = self.policy.step(policy, (), jax.tree.map(lambda x: x[None], timestep))[0]
    return one[0]

  def reward_policies(
    self, life: IntrinsicState, begins: Array, timestep: TimeStep, reward: Array
  ) -> PolicyLearner:
    """Return the policies after intrinsic rewards [B] of the last step; updated, if due."""
    learner = select(begins, new_learner(life.beginning), life.learner)
    happened = 1.0 - timestep.first
    rewards = learner.rewards + happened
    rate = jnp.maximum(self.policy_mean_rate, 1.0 / jnp.maximum(rewards, 1.0))
    mean = learner.mean + happened * rate * (reward - learner.mean)
    gradient = plus(learner.gradient, learner.trace, happened * (reward - mean))
    trace = jax.tree.map(lambda x: of_each(happened * self.policy_discount, x) * x, learner.trace)
    steps = learner.steps + ~timestep.first
    due = steps >= self.period
    rate = jnp.where(due, self.policy_learning_rate / self.period, 0.0)
    policy = plus(learner.policy, gradient, rate)
    gradient = jax.tree.map(lambda x: jnp.where(of_each(due, x), 0.0, x), gradient)
    return PolicyLearner(policy, trace, gradient, jnp.where(due, 0, steps), mean, rewards)

  def record_actions(
    self, learner: PolicyLearner, timestep: TimeStep, action: Array
  ) -> tuple[PolicyLearner, Any]:
    """Return the policies after actions [B], with log-probabilities and entropies [B]."""

    def of_one(policy: Any, timestep: TimeStep, action: Array) -> Any:
      logits = self._logits(policy, timestep)[None]
      kind = self.policy.distribution
      entropy = kind.entropy(logits, jax.random.key(0))[0]
      return kind.log_prob(logits, action[None])[0], entropy

    each = jax.vmap(jax.jacrev(of_one))(learner.policy, timestep, action)
    outputs = jax.vmap(of_one)(learner.policy, timestep, action)
    counts = 1.0 - timestep.last  # the action at LAST is ignored
    trace = plus(learner.trace, each[0], counts)
    gradient = plus(learner.gradient, each[1], counts * self.policy_entropy_cost)
    return learner._replace(trace=trace, gradient=gradient), outputs

  # --- learning

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""

    def loss(params: IntrinsicParams) -> tuple[Array, Metrics]:
      total, metrics = self.loss(params, sample.trajectory)
      return total, dict(loss=total, **metrics)

    params, opt_state, metrics = sgd(loss, self.optimiser(), train.params, train.rest)
    return TrainState(params, opt_state), jnp.ones_like(sample.weight), metrics

  def loss(self, params: IntrinsicParams, trajectory: Trajectory) -> tuple[Array, Metrics]:
    """Return the loss and metrics: equations 3 and 4 of the paper.

    The loss is a mean over [T, B]. Masked transitions count as 0.
    """
    begins, raw, value, log_prob, entropy = self.relive(params, trajectory)
    mask = 1.0 - trajectory.timesteps.last[:-1]
    advantage = self.advantages(trajectory.timesteps, begins, lax.stop_gradient(value))
    target = advantage + lax.stop_gradient(value[:-1])
    counts = jnp.ones_like(mask) if self.objective == 'lifetime' else mask
    parts = dict(
      policy_loss=-jnp.mean(mask * advantage * log_prob),
      value_loss=0.5 * jnp.mean(counts * jnp.square(target - value[:-1])),
      entropy=jnp.mean(mask * entropy),
      intrinsic_reward=jnp.mean(jnp.tanh(raw)),
      intrinsic_square=jnp.mean(jnp.square(jnp.tanh(raw))),
    )
    total = parts['policy_loss'] + parts['value_loss']
    return total + self.reward_cost * jnp.mean(jnp.square(raw)), parts

  def relive(self, params: IntrinsicParams, trajectory: Trajectory) -> tuple[Array, ...]:
    """Repeat an unroll, differentiable in the reward.

    Returns:
      The results of `recall_unroll`, [T+1, B] each, and the log-probabilities and entropies
      [T, B] of the actions by the policies.
    """
    begins, raw, value = self.recall_unroll(params, trajectory)

    def step(life: IntrinsicState, x: Any) -> tuple[IntrinsicState, Any]:
      timestep, action, begins, reward = x
      learner = self.reward_policies(life, begins, timestep, reward)
      learner, outputs = self.record_actions(learner, timestep, action)
      return life._replace(learner=learner), outputs

    rows = jax.tree.map(lambda x: x[:-1], (trajectory.timesteps, begins, jnp.tanh(raw)))
    acting = (rows[0], trajectory.outputs.action, *rows[1:])
    _, (log_prob, entropy) = lax.scan(step, trajectory.agent_state, acting)
    return begins, raw, value, log_prob, entropy

  def recall_unroll(
    self, params: IntrinsicParams, trajectory: Trajectory
  ) -> tuple[Array, Array, Array]:
    """Return where lifetimes begin, bool, raw intrinsic rewards, and values, [T+1, B] each."""
    t, life = trajectory.timesteps, trajectory.agent_state

    def count(episode: Array, timestep: TimeStep) -> tuple[Array, Array]:
      begins, episode = self.count_episodes(episode, timestep)
      return episode, begins

    _, begins = lax.scan(count, life.episode, t)
    before = jnp.concatenate([life.action[None], trajectory.outputs.action])
    raw, _ = self.reward.recall(params.reward, life.reward_state, t, before, begins)
    value, _ = self.value.recall(params.value, life.value_state, t, before, begins)
    return begins, raw, value

  def advantages(self, timesteps: TimeStep, begins: Array, value: Array) -> Array:
    """Return advantages [T, B] over the lifetime.

    The end of an episode takes no time, and only the end of a lifetime cuts.
    """
    before, after = (
      jax.tree.map(lambda x, s=s: x[s], timesteps) for s in (slice(-1), slice(1, None))
    )
    if self.objective == 'lifetime':
      discount = jnp.where(before.last, 1.0, self.discount) * (1.0 - begins[1:])
      lambda_ = jnp.full_like(discount, self.lambda_)
    else:
      discount = self.discount * after.discount
      lambda_ = jnp.where(after.last, 0.0, self.lambda_)
    gae = jax.vmap(returns.gae, in_axes=1, out_axes=1)
    advantage: Array = gae(after.reward, discount, lambda_, value[:-1], value[1:])
    return advantage

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rates = IntrinsicParams(self.learning_rate, self.value_learning_rate)._asdict()

    def adam(rate: float) -> Any:
      clip = clip_norm(self.max_grad_norm)
      return flatten(optax.chain(clip, optax.adam(rate, eps=self.adam_epsilon)))

    labels = IntrinsicParams(*IntrinsicParams._fields)
    return optax.multi_transform({name: adam(rate) for name, rate in rates.items()}, labels)


def new_learner(policy: Any) -> PolicyLearner:
  """Return the state of policies [B, ...] before their first step."""
  zeros = jax.tree.map(jnp.zeros_like, policy)
  none = jnp.zeros(jax.tree.leaves(policy)[0].shape[0])
  return PolicyLearner(policy, zeros, zeros, none.astype(jnp.int32), none, none)


def of_each(x: Array, like: Array) -> Array:
  """Return numbers [B] with trailing axes of 1, to multiply `like` [B, ...] by."""
  return x.reshape(x.shape + (1,) * (like.ndim - 1))


def plus(tree: Any, other: Any, scale: Array) -> Any:
  """Return tree + scale * other, of trees [B, ...] and a scale [B]."""
  return jax.tree.map(lambda x, y: x + of_each(scale, y) * y, tree, other)
