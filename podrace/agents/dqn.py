"""DQN (Mnih et al. 2015, Nature 518) and its extensions, up to Rainbow.

Rainbow (Hessel et al. 2018, arXiv 1710.02298) is double, dueling, n-step, prioritised, noisy and
distributional at once: see the preset `rainbow-minatar`. Each is a setting here or of the network.

With `network.core` it learns from sequences (Hausknecht and Stone 2015, arXiv 1507.06527); see
`podrace.agents.recurrent`, and `r2d2` for the constants of that paper.

Against Nature's DQN:

- Adam instead of RMSProp, and the gradient's norm is clipped.
- Double by default.
- The replay has 100,000 steps, not a million.
- Target copies and epsilon are counted in gradient steps and are faster: 250, not 10,000, and
  10,000 steps to 0.05, not a million frames to 0.1.
- Rewards are clipped by the environment, if at all.

Against Rainbow:

- The gradient's norm is clipped at 10, as in Wang et al. 2016 (arXiv 1511.06581).
- Draws are stratified where replay is on the device, and independent in tables on the host.
- Importance weights are divided by the largest of each device's batch.
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
from podrace.agents import recurrent, value_based
from podrace.agents.recurrent import ActingMemory, Recurrence
from podrace.fields import check_fields
from podrace.learner import Learned, clip_norm, flatten, sgd
from podrace.networks import QNetwork
from podrace.replay import Buffer, windows
from podrace.topology import AXIS
from podrace.types import ActorOutput, Array, Replay, Sample, TimeStep, TrainState, Trajectory


class DQNParams(NamedTuple):
  """Everything that acting needs."""

  network: Any
  epsilon: Array  # [] f32, how often an action is random


class DQNRest(NamedTuple):
  """Learned state besides the parameters."""

  target: Any  # parameters of the target network
  opt_state: Any
  steps: Array  # [] i32 gradient steps so far


class DQNState(NamedTuple):
  """State of acting with a core, [B, ...]."""

  memory: ActingMemory
  epsilon: Any  # [B] f32 with the ladder of epsilon; else ()


@dataclasses.dataclass(frozen=True)
class DQN:
  """Hyper-parameters, and the functions of an `Agent`."""

  network: QNetwork = QNetwork(previous_action=True, shortcut=True)
  buffer: Buffer = Buffer()
  learning_rate: float = 2.5e-4  # learning rate of the optimiser
  adam_epsilon: float = 1.5e-4  # epsilon of Adam, added to the size of gradients
  max_grad_norm: float = 10.0  # largest norm of the gradient; 0: no limit
  discount: float = 0.99  # discount of each step
  n_step: int = 1  # rewards before a value is bootstrapped from
  double: bool = True  # the online network selects the next action, the target network values it
  huber: float = 1.0
  # ^ error at which the loss turns from square to linear; 0: always square (of the head value)
  target_period: int = 250  # gradient steps between updates of the target network
  target_rate: float = 1.0
  # ^ share of the online network in an update of the target network; 1: a copy
  epsilon: float = 0.05  # final share of random actions, also with noisy networks
  epsilon_steps: int = 10_000  # gradient steps in which epsilon falls linearly from 1
  epsilon_ladder: bool = False  # give each environment its own epsilon, as Ape-X does
  epsilon_base: float = 0.4
  # ^ epsilon of environment i of n is base^(1 + power i / (n - 1)): the base
  epsilon_power: float = 7.0
  # ^ epsilon of environment i of n is base^(1 + power i / (n - 1)): the power
  actor_priorities: bool = False
  # ^ compute first priorities from the values of acting (Ape-X); needs an n-step of 2 or more
  greedy: bool = False  # act without random actions and noise, for evaluation
  total_envs: Annotated[int, tyro.conf.Suppress] = 0  # bound by the runner
  recurrence: Recurrence = Recurrence()

  def __post_init__(self) -> None:
    check_fields(self)
    recurrent.check_used(self.recurrence, self.network)
    if self.huber == 0 and self.network.head == 'quantile':
      raise ValueError(f'huber must be more than 0 for quantiles, not {self.huber}')
    few = not self.is_recurrent and self.n_step < 2
    if self.actor_priorities and (few or self.network.head != 'value'):
      raise ValueError(
        'actor_priorities needs an n_step of at least 2, so that acting has seen what is '
        "bootstrapped from, and the head 'value', "
        f'not n_step {self.n_step} and the head {self.network.head!r}'
      )

  is_recurrent = property(recurrent.is_recurrent)

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay: windows of n steps, or sequences."""
    initial = self.initial_priority if self.actor_priorities else None
    if self.is_recurrent:
      return self.recurrence.replay(self.buffer, num_envs, unroll_length, stack, initial)
    return windows(
      self.buffer, self.n_step, num_envs, unroll_length, stack=stack, initial_priority=initial
    )

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    rest = DQNRest(network, self.optimiser().init(network), jnp.int32(0))
    return TrainState(DQNParams(network, jnp.float32(1)), rest)

  def warm_start(self, train: TrainState, params: DQNParams) -> TrainState:
    """Start from the parameters of another run, but explore from the beginning."""
    learned = train.params._replace(network=params.network)
    return TrainState(learned, train.rest._replace(target=params.network))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    epsilon: Any = ()
    if self.epsilon_ladder:
      epsilon = value_based.epsilon_ladder(
        env_id, self.total_envs, self.epsilon_base, self.epsilon_power
      )
    if not self.is_recurrent:
      return epsilon
    return DQNState(recurrent.begin(self.network, env_id.shape[0]), epsilon)

  def act(
    self,
    params: DQNParams,
    state: Any,
    timestep: TimeStep,
    key: Array,
    replace: Callable[[Array], Array] = lambda action: action,
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B], which `replace` may change."""
    noise_key, explore_key = jax.random.split(key)
    noisy = self.network.noisy and not self.greedy
    drawn = noise_key if noisy else None
    memory, ladder = state if self.is_recurrent else ((), state)
    q, core = recurrent.step(self.network, params.network, memory, timestep, drawn, per_row=True)
    values = self.network.mean(q)
    epsilon = ladder if self.epsilon_ladder else params.epsilon
    epsilon = jnp.broadcast_to(0.0 if self.greedy else epsilon, values.shape[:1])
    action = replace(value_based.epsilon_greedy(values, epsilon, explore_key))
    if self.is_recurrent:
      state = DQNState(recurrent.after(memory, core, action), ladder)
    if not self.actor_priorities:
      return ActorOutput(action), state
    extras = value_based.ValueExtras(
      value_based.select_action(values, action), jnp.max(values, axis=-1)
    )
    return ActorOutput(action, extras), state

  def initial_priority(self, window: Trajectory) -> Array:
    """Return the errors [B] of new windows, by the values that acting computed.

    The value of the last timestep of a window is not known, so that of the one before is used.
    """
    batch = self.transitions(Sample(window, jnp.ones(window.env_id.shape), window.env_id))
    value, best = batch.acted(window.outputs.extras)
    error = batch.step.r_t + batch.step.discount_t * best - value
    return batch.priority(batch.step.mask * (jnp.abs(error) + 1e-6))

  def transitions(self, sample: Sample) -> recurrent.Batch:
    """Return the transitions of a sample."""
    recurrence = self.recurrence if self.is_recurrent else None
    return recurrent.transitions(recurrence, sample, self.discount, self.n_step)

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    rest: DQNRest = train.rest
    batch = self.transitions(sample)
    step = batch.step
    own_key = jax.random.fold_in(key, lax.axis_index(AXIS))  # other noise on each device
    online_key, select_key, target_key = jax.random.split(own_key, 3)
    target, cut = self.target(rest.target, train.params.network, batch, target_key, select_key)

    def loss(network: Any) -> tuple[Array, Any]:
      q = value_based.select_action(self.outputs(network, batch, online_key), step.action)
      each, error = self.losses(q, target)
      total = batch.mean(each, batch.weight)
      value = batch.mean_of_valid(self.network.mean(q))
      priority = batch.priority(step.mask * (error + 1e-6))
      return total, (dict(loss=total, value=value, **cut), priority)

    network, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), train.params.network, rest.opt_state, keep=True
    )
    steps = rest.steps + 1
    followed = value_based.follow(rest.target, network, steps, self.target_period, self.target_rate)
    decayed = 1 - (1 - self.epsilon) * steps / self.epsilon_steps
    params = DQNParams(network, jnp.maximum(decayed, self.epsilon).astype(jnp.float32))
    if not self.epsilon_ladder:
      metrics['epsilon'] = params.epsilon
    return TrainState(params, DQNRest(followed, opt_state, steps)), priority, metrics

  def outputs(self, network: Any, batch: recurrent.Batch, key: Array, after: bool = False) -> Array:
    """Return the network's outputs [N, A, atoms], with one sample of its noise for the batch.

    Fortunato et al. 2018 (arXiv 1706.10295, section 3.1) also hold it fixed across the batch.
    """
    q: Array = batch.outputs(self.network, network, after, key if self.network.noisy else None)
    return q

  def target(
    self, target: Any, online: Any, batch: recurrent.Batch, target_key: Array, select_key: Array
  ) -> tuple[Array, dict[str, Array]]:
    """Return the targets [N, atoms], returns or probabilities of the categorical head, and metrics.

    Double: van Hasselt et al. 2016 (arXiv 1509.06461, eq. 4).
    """
    step = batch.step
    q_t = self.outputs(target, batch, target_key, after=True)
    select = self.outputs(online, batch, select_key, after=True) if self.double else q_t
    best = jnp.argmax(self.network.mean(select), axis=-1)
    q_t = value_based.select_action(q_t, best)
    if not self.network.categorical:
      return step.r_t[:, None] + step.discount_t[:, None] * q_t, {}
    return value_based.project(step, jax.nn.softmax(q_t), self.network.support)

  def losses(self, q: Array, target: Array) -> tuple[Array, Array]:
    """Return the losses [B] of outputs [B, atoms], and their errors [B], the priorities."""
    if self.network.head == 'value':
      error = (target - q)[:, 0]
      loss = optax.huber_loss(error, delta=self.huber) if self.huber else 0.5 * error**2
      return loss, jnp.abs(error)
    if self.network.categorical:
      loss = -jnp.sum(target * jax.nn.log_softmax(q), axis=-1)
      # Rainbow, section 3, ranks by the divergence: the loss without the target's own entropy.
      negative_entropy = jnp.sum(jax.scipy.special.xlogy(target, target), axis=-1)
      return loss, jnp.maximum(loss + negative_entropy, 0.0)
    loss = jax.vmap(lambda q, t: returns.quantile_loss(q, t, self.huber))(q, target)
    return loss, jnp.abs(loss)

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    step = optax.adam(self.learning_rate, eps=self.adam_epsilon)
    return flatten(optax.chain(clip_norm(self.max_grad_norm), step))
