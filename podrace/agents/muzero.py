"""MuZero: search in a learned model (Schrittwieser et al. 2020, arXiv 1911.08265).

Its successors are settings:

- `search`: Gumbel MuZero (Danihelka et al. 2022, ICLR).
- `sampled_actions`: Sampled MuZero (Hubert et al. 2021, arXiv 2104.06303).
- `reanalyse`: Reanalyse (Schrittwieser et al. 2021, arXiv 2104.06294).
- `consistency`: the consistency loss of EfficientZero (Ye et al. 2021, arXiv 2111.00210).

Against the paper:

- Adam with weight decay instead of SGD with momentum. The learning rate is constant unless
  `decay_steps` is set. The paper's falls to a tenth in 350,000 steps (its pseudocode for Atari).
- A Gumbel search by default. Its root value is the value of the improved policy, not the mean over
  all visits.
- Replay's priorities are exponentiated by `buffer.priority_exponent`. After learning, a priority
  is by the network's value, since the search's value would never change.
- Past the end of an episode, value and reward are 0 and the policy is masked. The actions there
  are the next ones in replay. Past a time limit everything is masked.
- Networks are smaller: see `LearnedModel`.

The paper's sizes for Atari: unroll 5, 50 simulations, n-step 10, batch 1,024, discount 0.997.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import lax

from podrace.agents import muzero_losses, value_based
from podrace.agents import search as tree
from podrace.agents.model_unroll import (
  ModelGoals,
  make_goals,
  represent,
  spread,
  unroll_model,
)
from podrace.agents.search import MuZeroParams, Plan, plan, predict
from podrace.agents.value_moments import value_moments
from podrace.envs.states import rules
from podrace.errors import UsageError
from podrace.fields import check_fields
from podrace.learner import Learned, clip_norm, flatten, sgd
from podrace.networks import LearnedModel, is_recurrent, merge_time, split_time
from podrace.networks.planning import decode
from podrace.replay import Buffer, windows
from podrace.topology import AXIS
from podrace.types import (
  ActorOutput,
  Array,
  Replay,
  Sample,
  TimeStep,
  TrainState,
  Trajectory,
  take_batch,
)


class MuZeroRest(NamedTuple):
  """Learned state besides the parameters."""

  target: Any  # parameters of the target network, which reanalyses
  opt_state: Any


class MuZeroExtras(NamedTuple):
  """Record of an action, for learning, [B, ...]."""

  sample: Any  # the action before it was squashed into the space
  plan: Plan


@dataclasses.dataclass(frozen=True)
class MuZero:
  """Hyper-parameters, and the functions of an `Agent`."""

  network: LearnedModel = LearnedModel()
  buffer: Buffer = Buffer(batch_size=128, priority_exponent=1.0, importance_exponent=1.0)
  model: Literal['learned', 'rules'] = 'learned'
  # ^ model of the search: the network's, or the environment itself (AlphaZero); needs --env
  #   LIB:NAME,state=true
  search: Literal['gumbel', 'puct'] = 'gumbel'
  # ^ kind of search: Gumbel MuZero, or the PUCT of MuZero
  simulations: int = 16  # simulations of each search; 0: act by the policy's prior
  max_depth: int = 0  # largest depth of the search tree; 0: no limit
  acts: Literal['search', 'prior'] = 'search'
  # ^ source of the actions: the search, or the policy's prior; learning uses the search
  epsilon: float = 0.0  # share of random actions, drawn from the allowed ones
  target_depth: int = 0
  # ^ largest depth of a second search that makes the targets; 0: the acting search makes them
  considered_actions: int = 16  # gumbel: largest number of actions considered at the root
  value_scale: float = 0.1  # gumbel: weight of values against the prior; 1 for board games
  rescale_values: bool = True
  # ^ gumbel: rescale the values of a state to 0 to 1 before they are weighted
  dirichlet_alpha: float = 0.3  # puct: concentration of the Dirichlet noise at the root
  dirichlet_fraction: float = 0.25  # puct: share of the Dirichlet noise at the root
  temperature: float = 1.0  # puct: temperature of the visits that an action is drawn from
  sampled_actions: int = 0
  # ^ candidates drawn from the policy in each state; 0: all actions, or 16 if there are
  #   infinitely many
  sampled_temperature: float = 1.0  # temperature of the policy that candidates are drawn from
  unroll: int = 5  # actions that the model is unrolled for
  n_step: int = 10
  # ^ rewards before a search's value is bootstrapped from; 0: that value is the target
  bootstrap: Literal['search', 'target'] = 'search'
  # ^ value to bootstrap from: that of the acting search, or the target network's, which is newer
  sequence: int = 1
  # ^ states of a window that the model is unrolled from; with a core at least unroll_length
  burn_in: int = 0  # first steps of a window, which only bring the state of a core up to date
  reanalyse: float = 0.0  # share of each batch that gets new searches, by the target network
  reanalyse_simulations: int = 0  # simulations of new searches; 0: as many as acting has
  target_period: int = 200  # gradient steps between updates of the target network
  learning_rate: float = 1e-3  # learning rate of the optimiser
  decay_steps: int = 0
  # ^ gradient steps in which the learning rate falls to a tenth; 0: it is constant
  adam_epsilon: float = 1e-5  # epsilon of Adam, added to the size of gradients
  weight_decay: float = 1e-4  # weight decay of the optimiser
  max_grad_norm: float = 5.0  # largest norm of the gradient; 0: no limit
  discount: float = 0.997
  # ^ discount of each step; below 0: two players take turns, and one's gain is the other's loss
  value_cost: float = 1.0  # weight of the value's loss; 0.25 in the paper of Reanalyse
  reward_cost: float = 1.0  # weight of the reward's loss
  entropy_cost: float = 0.0  # weight of the policy's entropy; higher explores more
  consistency: float = 0.0  # weight of the consistency loss; needs network.projection
  greedy: bool = False  # act without noise, for evaluation
  environment: Annotated[Any, tyro.conf.Suppress] = None  # bound by the runner

  check_vma = False  # mctx does not trace under it

  def __post_init__(self) -> None:
    check_settings(self)

  @property
  def search_settings(self) -> tree.SearchSettings:
    """The settings of a search, as `plan` takes them."""
    network, learned = self.network, tree.LearnedDynamics(self.network)
    kind, sampled = network.distribution, self.sampled_actions
    gumbel = tree.Gumbel(self.considered_actions, self.value_scale, self.rescale_values)
    puct = tree.Puct(self.dirichlet_alpha, self.dirichlet_fraction, self.temperature)
    return tree.SearchSettings(
      model=network,
      dynamics=learned if self.model == 'learned' else tree.TrueDynamics(network, self.environment),
      candidates=tree.Candidates(kind, sampled, self.sampled_temperature),
      algorithm=gumbel if self.search == 'gumbel' else puct,
      discount=self.discount,
      max_depth=self.max_depth,
      greedy=self.greedy,
    )

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """Return the replay: windows of the states that are unrolled from, and the steps after them.

    Raises:
      ValueError: if nothing searches, or sequences would leave out a part of every unroll.
    """
    check_memory(self, unroll_length)
    return windows(
      self.buffer, self.burn_in + self.positions, num_envs, unroll_length,
      keep_state=is_recurrent(self.network), stack=stack, initial_priority=self.initial_priority,
    )  # fmt: skip

  @property
  def positions(self) -> int:
    """Steps of a window behind the burn-in with searches that are learned from."""
    return self.sequence + self.ahead + self.n_step

  searches = positions  # of each window that is refreshed

  @property
  def ahead(self) -> int:
    """Actions that the model is unrolled for; 0 with the true rules, which are not learned."""
    return 0 if self.model == 'rules' else self.unroll

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    network = self.network.init(key)
    rest = MuZeroRest(network, self.optimiser().init(network))
    return TrainState(MuZeroParams(network, jnp.int32(0)), rest)

  def warm_start(self, train: TrainState, params: MuZeroParams) -> TrainState:
    """Start from the parameters of another run."""
    learned = train.params._replace(network=params.network)
    return TrainState(learned, train.rest._replace(target=params.network))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.network.initial_state(env_id.shape[0])

  def act(
    self, params: MuZeroParams, state: Any, timestep: TimeStep, key: Array
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    one = jax.tree.map(lambda x: x[None], timestep)
    hidden, state = self.network.represent(params.network, state, one)
    hidden = jax.tree.map(lambda x: x[0], hidden)
    x, plans = self.choose(params, hidden, timestep.observation, key)
    return ActorOutput(self.network.distribution.to_action(x), MuZeroExtras(x, plans)), state

  def choose(
    self, params: MuZeroParams, hidden: Any, observation: Any, key: Array
  ) -> tuple[Any, Plan]:
    """Return raw samples [B, ...] to act by, and the plans to learn from.

    Acting and learning may differ, as in Hamrick et al. 2021 (arXiv 2011.04021).
    """
    key, act_key, random_key, target_key = jax.random.split(key, 4)
    settings = self.search_settings
    x, plans = plan(settings, params, hidden, observation, key, self.simulations)
    if self.acts == 'prior':
      x, _ = plan(settings, params, hidden, observation, act_key, 0)
    if self.epsilon and not self.greedy:
      x = tree.explore(self.network.distribution, x, observation, random_key, self.epsilon)
    if self.target_depth:
      shallow = dataclasses.replace(settings, max_depth=self.target_depth)
      _, plans = plan(shallow, params, hidden, observation, target_key, self.simulations)
    return x, plans

  # --- learning

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample."""
    rest, before = train.rest, train.params
    own_key = jax.random.fold_in(key, lax.axis_index(AXIS))  # other searches on each device
    window = sample.trajectory
    plans = self.renew_plans(rest.target, before.steps, window, own_key)
    timesteps = self.behind(window.timesteps)
    value = muzero_losses.value_targets(timesteps, plans.value, self.n_step, self.discount)
    goals = make_goals(timesteps, plans._replace(value=value), self.sequence, self.ahead)
    weight = jnp.tile(sample.weight, self.sequence)

    def loss(network: Any) -> tuple[Array, Any]:
      each, value, metrics = self.losses(network, window, goals)
      total = jnp.mean(weight * each)
      error = goals.value_mask[0] * (jnp.abs(value - goals.targets.value[0]) + 1e-6)
      priority = jnp.mean(error.reshape(self.sequence, -1), axis=0)
      return total, (dict(loss=total, **metrics), priority)

    network, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), before.network, rest.opt_state, keep=True
    )
    metrics['target_age'] = before.steps.astype(jnp.float32) - metrics['target_age']
    params = MuZeroParams(network, before.steps + 1)
    target = value_based.follow(rest.target, network, params.steps, self.target_period, 1.0)
    return TrainState(params, MuZeroRest(target, opt_state)), priority, metrics

  def behind(self, tree: Any) -> Any:
    """Return the part of a tree [T, ...] behind the burn-in."""
    return jax.tree.map(lambda x: x[self.burn_in :], tree)

  def losses(
    self, network: Any, window: Trajectory, goals: ModelGoals
  ) -> tuple[Array, Array, dict[str, Array]]:
    """Return the loss [N] of each state, the value [N] there, and metrics."""
    roots, unroll, support = self.sequence, self.ahead, self.network.support
    seen = roots + (unroll if self.consistency else 0)
    observed = represent(self.network, network, window, self.burn_in, seen)
    root = merge_time(jax.tree.map(lambda x: x[:roots], observed))
    samples = spread(self.behind(window.outputs.extras.sample), roots, unroll)
    outputs = unroll_model(self.network, network, root, samples)
    parts = muzero_losses.model_losses(
      outputs, goals, self.search_settings.candidates, support, self.entropy_cost
    )
    total = parts['policy_loss'] + self.value_cost * parts['value_loss']
    total += self.reward_cost * parts['reward_loss']
    value = decode(outputs.value[0], support)
    if self.consistency:
      observed = spread(observed, roots, unroll)
      distance = muzero_losses.consistency_loss(self.network, network, outputs, goals, observed)
      parts['consistency_loss'] = distance
      total += self.consistency * distance
    parts |= value_moments(goals.targets.value[0], value, goals.value_mask[0]) | dict(value=value)
    return total, value, {name: jnp.mean(x) for name, x in parts.items()}

  def initial_priority(self, window: Trajectory) -> Array:
    """Return the priority [B] of new windows: the error of the searches' values."""
    timesteps, value = self.behind((window.timesteps, window.outputs.extras.plan.value))
    target = muzero_losses.value_targets(timesteps, value, self.n_step, self.discount)
    error = jnp.abs(value[: self.sequence] - target[: self.sequence]) if self.n_step else 1.0
    valid = 1.0 - timesteps.last[: self.sequence].astype(jnp.float32)
    return jnp.mean(valid * (error + 1e-6), axis=0)

  # --- Reanalyse

  def refresh(self, params: MuZeroParams, window: Trajectory, key: Array) -> Trajectory:
    """Return the window with plans of new searches behind its burn-in."""
    hidden = represent(self.network, params.network, window, self.burn_in, self.positions)
    observation = self.behind(window.timesteps.observation)
    observation = jax.tree.map(lambda x: x[: self.positions], observation)
    hidden, observation = merge_time((hidden, observation))
    simulations = self.reanalyse_simulations or self.simulations
    _, plans = plan(self.search_settings, params, hidden, observation, key, simulations)
    plans = plans._replace(reanalysed=jnp.ones_like(plans.reanalysed))
    fresh, extras = split_time(plans, self.positions), window.outputs.extras
    plans = jax.tree.map(lambda old, new: old.at[self.burn_in :].set(new), extras.plan, fresh)
    return window._replace(outputs=window.outputs._replace(extras=extras._replace(plan=plans)))

  def renew_plans(self, target: Any, steps: Array, window: Trajectory, key: Array) -> Plan:
    """Return the plans [positions, B, ...] of a window, in part renewed by the target network."""
    kept: Plan = self.behind(window.outputs.extras.plan)
    if self.bootstrap == 'target':
      hidden = represent(self.network, target, window, self.burn_in, self.positions)
      value = predict(self.network, target, merge_time(hidden))[1]
      kept = kept._replace(value=split_time(value, self.positions))
    batch = window.env_id.shape[0]
    if not (count := count_renewed(self.reanalyse, batch)):
      return kept
    pick_key, search_key = jax.random.split(key)
    rows = jax.random.permutation(pick_key, batch)[:count]  # a batch may be sorted by stream
    params = MuZeroParams(target, steps - steps % self.target_period)
    fresh = self.refresh(params, take_batch(window, rows), search_key).outputs.extras.plan
    return jax.tree.map(lambda old, new: old.at[:, rows].set(new), kept, self.behind(fresh))

  def optimiser(self) -> optax.GradientTransformation:
    """Return the optimiser."""
    rate: Any = self.learning_rate
    if self.decay_steps:
      rate = optax.exponential_decay(rate, self.decay_steps, 0.1)
    step = optax.adamw(rate, eps=self.adam_epsilon, weight_decay=self.weight_decay)
    return flatten(optax.chain(clip_norm(self.max_grad_norm), step))


def count_renewed(share: float, batch: int) -> int:
  """Return the number of windows of a batch that get new plans.

  Raises:
    UsageError: if there is a share, and it is of no window.
  """
  count = round(share * batch)
  if share and not count:
    raise UsageError(
      f'reanalyse {share} of the {batch} windows of a device is none: give at least '
      f'{1 / batch:.2g}, or 0'
    )
  return count


def check_settings(agent: MuZero) -> None:
  """Raise ValueError for the first setting that is impossible."""
  check_fields(agent)
  if agent.consistency and not getattr(agent.network, 'projection', 0):
    raise ValueError(f'consistency {agent.consistency} needs network.projection above 0')
  if not agent.n_step and agent.bootstrap == 'target':
    raise ValueError(
      'n_step 0 takes the value of the search as the target, and bootstrap target the target '
      "network's: give --agent.bootstrap search, or an n_step of at least 1"
    )
  if agent.model == 'rules' and agent.consistency:
    raise ValueError(f'consistency {agent.consistency} is for a learned model, not for the rules')
  if agent.environment is not None:
    tree.check_discount(agent.discount, agent.environment)
    if agent.model == 'rules' and is_recurrent(agent.network):
      raise ValueError(f'model rules has no core {agent.network.core!r}: it knows the state')
  if agent.sampled_actions == 1:
    raise ValueError(
      f'sampled_actions must be 0, for all actions, or at least 2, not {agent.sampled_actions}'
    )


def check_memory(agent: MuZero, unroll_length: int) -> None:
  """Raise ValueError if unrolls of that length would be learned from in part or not at all."""
  if agent.simulations < 1 and (agent.reanalyse < 1 or agent.reanalyse_simulations < 1):
    raise ValueError(
      f'simulations {agent.simulations}: training needs a search to learn from, so simulations '
      'must be at least 1; or give reanalyse 1 and reanalyse_simulations of at least 1, to act '
      'without a search'
    )
  if agent.model == 'rules' and rules(agent.environment) is None:
    raise ValueError(
      'model rules tries out actions in the environment itself, which has to be one in JAX with '
      'its state in its observations: give --env LIB:NAME,state=true'
    )
  if is_recurrent(agent.network) and unroll_length > agent.sequence:
    raise ValueError(
      f'an unroll of {unroll_length} steps is longer than a sequence of {agent.sequence}, and '
      'with a core one begins with each unroll, so the rest would never be learned from; give '
      f'--agent.sequence {unroll_length}'
    )
  if agent.burn_in and not is_recurrent(agent.network):
    raise ValueError(f'burn_in {agent.burn_in} is for a network with a core; this one has none')
