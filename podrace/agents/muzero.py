"""MuZero: search in a learned model (Schrittwieser et al. 2020, arXiv 1911.08265), as settings its successors.

Gumbel MuZero (Danihelka et al. 2022, ICLR) by `search`; Sampled MuZero (Hubert et al. 2021, arXiv 2104.06303) by
`sampled_actions`; Reanalyse (Schrittwieser et al. 2021, arXiv 2104.06294) by `reanalyse`; the consistency loss of
EfficientZero (Ye et al. 2021, arXiv 2111.00210) by `consistency`. The search is mctx's.

Against the paper: Adam with weight decay in the place of SGD with momentum; a Gumbel search by default, whose root
value is the value of the improved policy, and not the mean over all visits; replay's priorities are exponentiated by
`buffer.priority_exponent`; after learning, a priority is by the network's value and not by the search's, which would
never change. Past the end of an episode, value and reward are 0 and the policy is masked; the actions there are
those that replay has next. Past a time limit all is masked. Networks are smaller: see `LearnedModel`.
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

from podrace import distributions
from podrace.agents import value_based
from podrace.agents.model_unroll import imagine
from podrace.agents.muzero_targets import (
  Goals,
  goals_of,
  outside,
  spread_all,
  streams,
  unfit,
  value_targets,
)
from podrace.agents.search import Params, Plan, by_chance, plan, predict
from podrace.envs.states import rules, takes_turns
from podrace.fields import check_fields
from podrace.learner import clip_norm, flatten, sgd
from podrace.networks import LearnedModel, merge_time, split_time
from podrace.networks.planning import decode, number_loss
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

CANDIDATES = 16  # of continuous and multi-discrete actions, unless a number is given


class Rest(NamedTuple):
  """What else is learned."""

  target: Any  # the network that reanalyses
  opt_state: Any


class Extras(NamedTuple):
  """What learning wants to know of each action, [B, ...]."""

  sample: Any  # the action before it was squashed into the space
  plan: Plan


@dataclasses.dataclass(frozen=True)
class MuZero:
  """Hyper-parameters, and the functions of an `Agent`."""

  network: LearnedModel = LearnedModel()
  buffer: Buffer = Buffer(batch_size=128, priority_exponent=1.0, importance_exponent=1.0)
  model: Literal['learned', 'rules'] = 'learned'
  # ^ what is searched in: the network's, or the environment itself (AlphaZero); needs --env LIB:NAME,state=true
  search: Literal['gumbel', 'puct'] = 'gumbel'
  simulations: int = 16  # of each search; 0: it acts by the policy's prior
  max_depth: int = 0  # of the tree; 0: no limit
  acts: Literal['search', 'prior'] = 'search'
  # ^ what draws the actions: the search, or the policy's prior, and the search is only learned from
  epsilon: float = 0.0  # share of actions by chance, of those that are allowed
  target_depth: int = 0  # of a second tree, to learn from instead; 0: the one that acts
  considered_actions: int = 16  # gumbel: at the root, the most
  value_scale: float = 0.1  # gumbel: of values against the prior; 1 for board games
  rescale_values: bool = True  # gumbel: first to 0 to 1 among the actions of a state, however alike
  dirichlet_alpha: float = 0.3  # puct: noise at the root
  dirichlet_fraction: float = 0.25
  temperature: float = 1.0  # puct: of the visits that an action is drawn by
  sampled_actions: int = 0
  # ^ candidates drawn from the policy in each state; 0: all actions, or 16 where they can't be counted
  sampled_temperature: float = 1.0  # of the policy that they are drawn from
  unroll: int = 5  # actions that the model is unrolled for
  n_step: int = 10  # rewards before a search's value is bootstrapped from; 0: the target is it
  bootstrap: Literal['search', 'target'] = 'search'
  # ^ whose value: the search's of acting, or the target network's, which is newer
  sequence: int = 1  # states of a window that are unrolled from; with a core at least unroll_length
  burn_in: int = 0  # steps before them, with a core
  reanalyse: float = 0.0  # share of each batch with new searches, by the target network
  reanalyse_simulations: int = 0  # 0: as many as acting has
  target_period: int = 200  # gradient steps between copies to the target network
  learning_rate: float = 1e-3
  adam_epsilon: float = 1e-5
  weight_decay: float = 1e-4
  max_grad_norm: float = 5.0  # 0: no limit
  discount: float = 0.997  # below 0: two players take turns, and one's gain is the other's loss
  value_cost: float = 1.0  # the paper of Reanalyse has 0.25
  reward_cost: float = 1.0
  entropy_cost: float = 0.0
  consistency: float = 0.0  # weight of that loss; needs network.projection
  greedy: bool = False  # for evaluation: no noise
  environment: Annotated[Any, tyro.conf.Suppress] = None  # bound by the runner

  check_vma = False  # mctx does not trace under it

  def __post_init__(self) -> None:
    check_settings(self)

  @property
  def num_candidates(self) -> int:
    """Of each state; 0: they are all actions."""
    countable = isinstance(self.network.distribution, distributions.Categorical)
    return self.sampled_actions or (0 if countable else CANDIDATES)

  def memory(self, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
    """What is learned from: windows of the states that are unrolled from, and what follows them.

    Raises:
      ValueError: if nothing searches, or sequences would leave out a part of every unroll.
    """
    check_memory(self, unroll_length)
    return windows(
      self.buffer, self.burn_in + self.positions, num_envs, unroll_length,
      keep_state=self.recurrent, stack=stack, initial_priority=self.initial_priority,
    )  # fmt: skip

  @property
  def recurrent(self) -> bool:
    return bool(jax.tree.leaves(jax.eval_shape(lambda: self.network.initial_state(1))))

  @property
  def positions(self) -> int:
    """Steps of a window behind the burn-in, of whose searches something is learned."""
    return self.sequence + self.ahead + self.n_step

  @property
  def ahead(self) -> int:
    """Actions that the model is unrolled for; the true rules are not learned."""
    return 0 if self.model == 'rules' else self.unroll

  def init(self, key: Array) -> TrainState:
    network = self.network.init(key)
    rest = Rest(network, self.optimiser().init(network))
    return TrainState(Params(network, jnp.int32(0)), rest)

  def warm_start(self, train: TrainState, params: Params) -> TrainState:
    learned = train.params._replace(network=params.network)
    return TrainState(learned, train.rest._replace(target=params.network))

  def initial_state(self, env_id: Array) -> Any:
    return self.network.initial_state(env_id.shape[0])

  def act(
    self, params: Params, state: Any, timestep: TimeStep, key: Array
  ) -> tuple[ActorOutput, Any]:
    one = jax.tree.map(lambda x: x[None], timestep)
    hidden, state = self.network.represent(params.network, state, one)
    hidden = jax.tree.map(lambda x: x[0], hidden)
    x, found = self.choose(params, hidden, timestep.observation, key)
    return ActorOutput(self.network.distribution.to_action(x), Extras(x, found)), state

  def choose(self, params: Params, hidden: Any, observation: Any, key: Array) -> tuple[Any, Plan]:
    """Raw samples [B, ...] to act by, and the plans to learn from (Hamrick et al. 2021, arXiv 2011.04021)."""
    key, act_key, random_key, target_key = jax.random.split(key, 4)
    x, found = plan(self, params, hidden, observation, key, self.simulations)
    if self.acts == 'prior':
      x, _ = plan(self, params, hidden, observation, act_key, 0)
    if self.epsilon and not self.greedy:
      x = by_chance(self, x, observation, random_key)
    if self.target_depth:
      shallow = dataclasses.replace(self, max_depth=self.target_depth)
      _, found = plan(shallow, params, hidden, observation, target_key, self.simulations)
    return x, found

  def advice(self, line: dict[str, Any]) -> str:
    return unfit(line.get('outside_support') or 0.0, self.network.support)

  # --- learning

  def learn(
    self, train: TrainState, sample: Sample, key: Array
  ) -> tuple[TrainState, Array, Metrics]:
    rest, before = train.rest, train.params
    own_key = jax.random.fold_in(key, lax.axis_index(AXIS))  # other searches on each device
    window = sample.trajectory
    plans = self.refreshed(rest.target, before.steps, window, own_key)
    goals = goals_of(self, self.behind(window.timesteps), plans)
    weight = jnp.tile(sample.weight, self.sequence)

    def loss(network: Any) -> tuple[Array, Any]:
      each, value, metrics = self.losses(network, window, goals)
      total = jnp.mean(weight * each)
      error = goals.value_mask[0] * (jnp.abs(value - goals.value[0]) + 1e-6)
      priority = jnp.mean(error.reshape(self.sequence, -1), axis=0)
      return total, (dict(loss=total, **metrics), priority)

    network, opt_state, metrics, priority = sgd(
      loss, self.optimiser(), before.network, rest.opt_state, keep=True
    )
    metrics['target_age'] = before.steps.astype(jnp.float32) - metrics['target_age']
    params = Params(network, before.steps + 1)
    target = value_based.follow(rest.target, network, params.steps, self.target_period, 1.0)
    return TrainState(params, Rest(target, opt_state)), priority, metrics

  def behind(self, tree: Any) -> Any:
    """What is behind the burn-in."""
    return jax.tree.map(lambda x: x[self.burn_in :], tree)

  def represent(self, network: Any, window: Trajectory, length: int) -> Any:
    """Hidden states of the first `length` timesteps [length, B, ...] behind the burn-in."""
    timesteps, state = window.timesteps, window.agent_state if self.recurrent else ()
    if self.burn_in:
      early = jax.tree.map(lambda x: x[: self.burn_in], timesteps)
      _, state = self.network.represent(lax.stop_gradient(network), state, early)
    late = jax.tree.map(lambda x: x[:length], self.behind(timesteps))
    return self.network.represent(network, state, late)[0]

  @property
  def searches(self) -> int:
    """Of each window that is refreshed."""
    return self.positions

  def reanalysed(self, batch: int) -> int:
    """How many of a batch."""
    return round(self.reanalyse * batch)

  def refreshed(self, target: Any, steps: Array, window: Trajectory, key: Array) -> Plan:
    """The plans [positions, B, ...] of a window's states, with what is newer of the target network's."""
    kept: Plan = self.behind(window.outputs.extras.plan)
    if self.bootstrap == 'target':
      hidden = merge_time(self.represent(target, window, self.positions))
      value = split_time(predict(self, target, hidden)[1], self.positions)
      kept = kept._replace(value=value)
    batch = window.env_id.shape[0]
    some = self.reanalysed(batch)
    if not some:
      return kept
    pick_key, search_key = jax.random.split(key)
    rows = jax.random.permutation(pick_key, batch)[:some]  # a batch may be sorted by stream
    params = Params(target, steps - steps % self.target_period)
    fresh = self.searched(params, streams(window, rows), search_key)
    return jax.tree.map(lambda old, new: old.at[:, rows].set(new), kept, fresh)

  def searched(self, params: Params, window: Trajectory, key: Array) -> Plan:
    """The plans [positions, B, ...] of new searches in a window's states."""
    hidden = merge_time(self.represent(params.network, window, self.positions))
    observation = self.behind(window.timesteps.observation)
    observation = merge_time(jax.tree.map(lambda x: x[: self.positions], observation))
    simulations = self.reanalyse_simulations or self.simulations
    _, found = plan(self, params, hidden, observation, key, simulations)
    found = found._replace(reanalysed=jnp.ones_like(found.reanalysed))
    return split_time(found, self.positions)

  def refresh(self, params: Params, window: Trajectory, key: Array) -> Trajectory:
    """The window with the plans of new searches; those of the burn-in stay, as nothing learns from them."""
    extras, behind = window.outputs.extras, slice(self.burn_in, self.burn_in + self.positions)
    fresh = self.searched(params, window, key)
    plans = jax.tree.map(lambda old, new: old.at[behind].set(new), extras.plan, fresh)
    return window._replace(outputs=window.outputs._replace(extras=extras._replace(plan=plans)))

  def losses(
    self, network: Any, window: Trajectory, goals: Goals
  ) -> tuple[Array, Array, dict[str, Array]]:
    """The loss [N] of each state, the value [N] there, and metrics."""
    roots = self.sequence + (self.ahead if self.consistency else 0)
    observed = self.represent(network, window, roots)
    root = merge_time(jax.tree.map(lambda x: x[: self.sequence], observed))
    samples = spread_all(self, self.behind(window.outputs.extras.sample))
    actions = jax.tree.map(lambda x: x[:-1], samples)
    hidden, reward = imagine(self.network, network, root, actions)
    said = split_time(self.network.predict(network, merge_time(hidden)), self.ahead + 1)
    share = jnp.ones(self.ahead + 1).at[1:].set(1 / self.unroll)[:, None]
    support = self.network.support

    policy, entropy = policy_losses(self, said.policy, goals.plan)
    policy = jnp.sum(share * goals.policy_mask * (policy - self.entropy_cost * entropy), axis=0)
    value = jnp.sum(
      share * goals.value_mask * number_losses(said.value, goals.value, support), axis=0
    )
    rewards = jnp.zeros_like(value)
    if self.ahead:
      each = goals.reward_mask[1:] * number_losses(reward, goals.reward[1:], support)
      rewards = jnp.sum(share[1:] * each, axis=0)
    total = policy + self.value_cost * value + self.reward_cost * rewards
    now = decode(said.value[0], support)
    parts = dict(policy_loss=policy, value_loss=value, reward_loss=rewards, value=now)
    metrics = means(parts, goals.policy_mask[0] * entropy[0], goals.plan)
    if support is not None:
      metrics['outside_support'] = jnp.mean(outside(goals.value[0], support))
    if self.consistency:
      distance = consistency_losses(self, network, hidden, spread_all(self, observed))
      distance = jnp.sum((share * goals.reward_mask)[1:] * distance, axis=0)
      metrics['consistency_loss'] = jnp.mean(distance)
      total += self.consistency * distance
    return total, now, metrics

  def initial_priority(self, window: Trajectory) -> Array:
    """The priority [B] of new windows: how far the searches' values are from their targets."""
    timesteps, value = self.behind((window.timesteps, window.outputs.extras.plan.value))
    target = value_targets(self, timesteps, value)[: self.sequence]
    error = jnp.abs(value[: self.sequence] - target) if self.n_step else 1.0
    valid = 1.0 - timesteps.last[: self.sequence].astype(jnp.float32)
    return jnp.mean(valid * (error + 1e-6), axis=0)

  def optimiser(self) -> optax.GradientTransformation:
    step = optax.adamw(self.learning_rate, eps=self.adam_epsilon, weight_decay=self.weight_decay)
    return flatten(optax.chain(clip_norm(self.max_grad_norm), step))


def means(each: dict[str, Array], entropy: Array, plans: Plan) -> dict[str, Array]:
  """Metrics: of what there is [N] of each state, and of the plans [U + 1, N, ...] that were learned from."""
  age, share = plans.steps[0].astype(jnp.float32), plans.reanalysed[0].astype(jnp.float32)
  found = dict(**each, entropy=entropy, target_age=age, reanalysed=share)
  return {name: jnp.mean(x) for name, x in found.items()}


def number_losses(outputs: Array, x: Array, support: Array | None) -> Array:
  """Of outputs [U, N, ...] and numbers [U, N]."""
  return split_time(number_loss(merge_time(outputs), x.reshape(-1), support), x.shape[0])


def policy_losses(agent: Any, policy: Array, plans: Plan) -> tuple[Array, Array]:
  """Cross-entropies [U + 1, N] of policies [U + 1, N, P] with plans, and an estimate of their entropies."""
  kind = agent.network.distribution
  if not agent.num_candidates:
    log_p = jax.nn.log_softmax(policy)
    return -jnp.sum(plans.weights * log_p, axis=-1), -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
  wide = jnp.repeat(policy[:, :, None], agent.num_candidates, axis=2)
  log_p = kind.log_prob(wide, plans.candidates)
  return -jnp.sum(plans.weights * log_p, axis=-1), kind.entropy(policy, jax.random.key(0))


def consistency_losses(agent: Any, network: Any, hidden: Any, observed: Any) -> Array:
  """How far imagined hidden states are from observed ones [U, N]: 1 less the cosine of their projections."""

  def project(x: Any, online: bool) -> Array:
    found = agent.network.project(network, merge_time(x), online)
    return split_time(found / (jnp.linalg.norm(found, axis=-1, keepdims=True) + 1e-5), agent.ahead)

  imagined = project(jax.tree.map(lambda x: x[1:], hidden), True)
  real = project(lax.stop_gradient(jax.tree.map(lambda x: x[1:], observed)), False)
  return 1.0 - jnp.sum(imagined * lax.stop_gradient(real), axis=-1)


def check_settings(agent: MuZero) -> None:
  """Raises ValueError for the first setting that cannot be."""
  check_fields(agent)
  if agent.consistency and not getattr(agent.network, 'projection', 0):
    raise ValueError(f'consistency {agent.consistency} needs network.projection above 0')
  if not agent.n_step and agent.bootstrap == 'target':
    raise ValueError(
      "n_step 0 takes the value of the search as the target, and bootstrap target the target network's: give "
      '--agent.bootstrap search, or an n_step of at least 1'
    )
  if agent.model == 'rules' and agent.consistency:
    raise ValueError(f'consistency {agent.consistency} is for a learned model, not for the rules')
  if agent.environment is not None:
    check_environment(agent)
  if agent.sampled_actions == 1:
    raise ValueError(
      f'sampled_actions must be 0, for all actions, or at least 2, not {agent.sampled_actions}'
    )


def check_memory(agent: MuZero, unroll_length: int) -> None:
  """Raises ValueError if nothing would be learned, or only from a part, of unrolls of that length."""
  if agent.simulations < 1 and (agent.reanalyse < 1 or agent.reanalyse_simulations < 1):
    raise ValueError(
      f'simulations {agent.simulations}: training needs a search to learn from, so simulations must be at least 1; '
      'or give reanalyse 1 and reanalyse_simulations of at least 1, to act without a search'
    )
  if agent.model == 'rules' and rules(agent.environment) is None:
    raise ValueError(
      'model rules tries out actions in the environment itself, which has to be one in JAX with its state in its '
      'observations: give --env LIB:NAME,state=true'
    )
  if agent.recurrent and unroll_length > agent.sequence:
    raise ValueError(
      f'an unroll of {unroll_length} steps is longer than a sequence of {agent.sequence}, and with a core one begins '
      f'with each unroll, so the rest would never be learned from; give --agent.sequence {unroll_length}'
    )
  if agent.burn_in and not agent.recurrent:
    raise ValueError(f'burn_in {agent.burn_in} is for a network with a core; this one has none')


def check_environment(agent: MuZero) -> None:
  """Raises ValueError where the settings do not fit the environment that was bound."""
  turns, discount = takes_turns(agent.environment), agent.discount
  if turns and discount > 0:
    raise ValueError(
      f'discount {discount}: two players take turns in this environment, so what is good for one of them is bad for '
      f'the other; give --agent.discount -{discount:g}'
    )
  if discount < 0 and not turns:
    raise ValueError(
      f'discount {discount} is for two players that take turns, as in pgx:tic_tac_toe,opponent=self; here it must be '
      'at least 0'
    )
  if agent.model == 'rules' and agent.recurrent:
    raise ValueError(f'model rules has no core {agent.network.core!r}: it knows the state')
