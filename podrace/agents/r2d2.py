"""R2D2: recurrent replay distributed DQN (Kapturowski et al. 2019, ICLR).

Sequences begin with the recurrent state that acting had there, which the first steps of each, the
burn-in, bring up to date. Values are rescaled, double and n-step; each environment explores by an
epsilon of its own. The constants are the paper's and SEED RL's (arXiv 1910.06591).

Against the paper: the network sees observations only, not the last action and reward; sequences
cross the ends of episodes, where the recurrent state is reset and traces are cut; their losses have
importance weights (exponent 0.6, as in SEED RL), which the paper leaves out; gradients are clipped
at a norm of 40, and 100 steps are learned from instead of 80, as in SEED RL. Sequences begin where
unrolls do, so `unroll_length` says how far they overlap. The core has 128 units instead of 512, and
the two streams have no hidden layer (`network.core_size`, `network.head_size`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace import returns
from podrace.agents import value_based
from podrace.fields import check_fields
from podrace.learner import Learned, clip_norm, flatten, sgd
from podrace.networks import QNetwork
from podrace.replay import Buffer, windows
from podrace.types import ActorOutput, Array, Replay, Sample, TimeStep, TrainState, Trajectory


class R2D2Rest(NamedTuple):
  """Learned state besides the parameters."""

  target: Any  # parameters of the target network
  opt_state: Any
  steps: Array  # [] i32 gradient steps so far


class R2D2State(NamedTuple):
  """State of acting, [B, ...]."""

  core: Any  # the network's recurrent state
  epsilon: Array  # [B] f32


@dataclasses.dataclass(frozen=True)
class R2D2:
  """Hyper-parameters, and the functions of an `Agent`."""

  network: QNetwork = QNetwork(core='lstm', dueling=True)
  buffer: Buffer = Buffer(batch_size=64, priority_exponent=0.9, samples_per_insert=0.015)
  sequence: int = 100  # steps of a sequence that are learned from, after the burn-in
  burn_in: int = 40  # first steps of a sequence, which only bring the recurrent state up to date
  learning_rate: float = 1e-4  # learning rate of the optimiser
  adam_epsilon: float = 1e-3  # epsilon of Adam, added to the size of gradients
  max_grad_norm: float = 40.0  # largest norm of the gradient; 0: no limit
  discount: float = 0.997  # discount of each step
  n_step: int = 5  # rewards before a value is bootstrapped from
  target_period: int = 2_500  # gradient steps between updates of the target network
  rescale_epsilon: float = 1e-3  # epsilon of the value rescaling
  max_share: float = 0.9
  # ^ share of the largest error in a sequence's priority; the rest is the mean error
  epsilon_base: float = 0.4
  # ^ epsilon of environment i of n is base^(1 + power i / (n - 1)): the base
  epsilon_power: float = 7.0
  # ^ epsilon of environment i of n is base^(1 + power i / (n - 1)): the power
  greedy: bool = False  # act without random actions, for evaluation
  total_envs: Annotated[int, tyro.conf.Suppress] = 0  # bound by the runner

  def __post_init__(self) -> None:
    check_fields(self)
    if self.network.head != 'value' or self.network.noisy:
      raise ValueError('r2d2 learns values: its network has the head value and no noise')
    if self.network.previous_action or self.network.previous_reward or self.network.shortcut:
      raise ValueError(
        'the network of r2d2 sees observations only: previous_action, previous_reward and shortcut '
        'are settings of dqn with a core'
      )

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay: sequences that begin with unrolls, with the state of acting.

    Raises:
      ValueError: if sequences would leave out a part of every unroll.
    """
    if unroll_length > self.sequence:
      raise ValueError(
        f'an unroll of {unroll_length} steps is longer than a sequence, of which {self.sequence} '
        'are learned from: a sequence begins with each unroll, so '
        f'{1 - self.sequence / unroll_length:.0%} of the steps would never be; give '
        f'--unroll-length {self.sequence} or less, or --agent.sequence {unroll_length} or more'
      )
    length = self.burn_in + self.sequence
    return windows(
      self.buffer, length, num_envs, unroll_length,
      keep_state=True, stack=stack, initial_priority=self.initial_priority,
    )  # fmt: skip

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    return TrainState(network, R2D2Rest(network, self.optimiser().init(network), jnp.int32(0)))

  def warm_start(self, train: TrainState, params: Any) -> TrainState:
    """Start from the parameters of another run."""
    return TrainState(params, train.rest._replace(target=params))

  def initial_state(self, env_id: Array) -> R2D2State:
    """Return the state of acting before the first timestep."""
    epsilon = value_based.epsilon_ladder(
      env_id, self.total_envs, self.epsilon_base, self.epsilon_power
    )
    return R2D2State(self.network.initial_state(env_id.shape[0]), epsilon)

  def act(
    self,
    params: Any,
    state: R2D2State,
    timestep: TimeStep,
    key: Array,
    replace: Callable[[Array], Array] = lambda action: action,
  ) -> tuple[ActorOutput, R2D2State]:
    """Choose the actions of timesteps [B], which `replace` may change."""
    q, core = self.network.step(params, state.core, timestep)
    values = self.network.mean(q)
    epsilon = jnp.zeros_like(state.epsilon) if self.greedy else state.epsilon
    action = replace(value_based.epsilon_greedy(values, epsilon, key))
    extras = value_based.ValueExtras(
      value_based.select_action(values, action), jnp.max(values, axis=-1)
    )
    return ActorOutput(action, extras), state._replace(core=core)

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    del key
    rest: R2D2Rest = train.rest

    def loss(network: Any) -> tuple[Array, Any]:
      error, mask, values = self.errors(network, rest.target, sample.trajectory)
      each = jnp.sum(mask * 0.5 * error**2, axis=0)  # of a sequence: Adam's epsilon is for sums
      total = jnp.mean(sample.weight * each)
      value = jnp.sum(mask * values) / jnp.maximum(jnp.sum(mask), 1.0)
      return total, (dict(loss=total, value=value), self.priority(mask * error))

    network, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), train.params, rest.opt_state, keep=True
    )
    steps = rest.steps + 1
    target = value_based.follow(rest.target, network, steps, self.target_period, 1.0)
    return TrainState(network, R2D2Rest(target, opt_state, steps)), priority, metrics

  def errors(self, network: Any, target: Any, window: Trajectory) -> tuple[Array, Array, Array]:
    """Return errors, their mask, and the values of the actions taken, [sequence, B] each."""
    early, late = self.split(window.timesteps)
    core = window.agent_state.core
    if self.burn_in:
      _, core_online = self.network.unroll(lax.stop_gradient(network), core, early)
      _, core_target = self.network.unroll(target, core, early)
    else:
      core_online = core_target = core
    q, _ = self.network.unroll(network, core_online, late)
    q_target, _ = self.network.unroll(target, core_target, late)
    values, values_target = self.network.mean(q), self.network.mean(q_target)
    best = jnp.argmax(values[1:], axis=-1)
    v_t = value_based.select_action(values_target[1:], best)
    taken = value_based.select_action(values[:-1], window.outputs.action[self.burn_in :])
    goal = lax.stop_gradient(self.targets(late, v_t))
    mask = 1.0 - late.last[:-1].astype(jnp.float32)
    return goal - taken, mask, taken

  def split(self, timesteps: TimeStep) -> tuple[TimeStep, TimeStep]:
    """Split timesteps into the burn-in and the part that is learned from."""
    early = jax.tree.map(lambda x: x[: self.burn_in], timesteps)
    return early, jax.tree.map(lambda x: x[self.burn_in :], timesteps)

  def targets(self, timesteps: TimeStep, v_t: Array) -> Array:
    """Return the targets of the values [T, B] at timesteps[:-1].

    `v_t` [T, B] are the rescaled values at the next timesteps.
    """
    one = jax.vmap(returns.n_step_bootstrapped, in_axes=(1, 1, 1, 1, None), out_axes=1)
    target = one(
      timesteps.reward[1:],
      self.discount * timesteps.discount[1:],
      1.0 - timesteps.last[1:].astype(jnp.float32),
      returns.unscale(v_t, self.rescale_epsilon),
      self.n_step,
    )
    return returns.rescale(target, self.rescale_epsilon)

  def priority(self, error: Array) -> Array:
    """Return priorities [B] of masked errors [T, B]; section 2.3 of the paper."""
    size = jnp.abs(error)
    return self.max_share * jnp.max(size, 0) + (1 - self.max_share) * jnp.mean(size, 0) + 1e-6

  def initial_priority(self, window: Trajectory) -> Array:
    """Return the priority of new sequences, by the values that acting computed.

    The last step is left out, as its next value is not known yet.
    """
    _, late = self.split(window.timesteps)
    late = jax.tree.map(lambda x: x[:-1], late)
    extras = jax.tree.map(lambda x: x[self.burn_in :], window.outputs.extras)
    error = self.targets(late, extras.best[1:]) - extras.value[:-1]
    return self.priority(error * (1.0 - late.last[:-1].astype(jnp.float32)))

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    step = optax.adam(self.learning_rate, eps=self.adam_epsilon)
    return flatten(optax.chain(clip_norm(self.max_grad_norm), step))
