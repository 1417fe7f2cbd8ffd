"""One agent of a population: its environments, its learning and its life, as pure functions.

Each function is for one member. A group of like members is a `vmap`. A member's meta-step depends
on the rule, its own state and its key, but not on other members or on its device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podrace.agents.rules.layers import RuleParams, entropy
from podrace.architectures import unroll as acting
from podrace.architectures.discovery.objective import ValueFunction, ValueState
from podrace.architectures.faults import find_faults
from podrace.architectures.unroll import ActorState
from podrace.envs.base import select
from podrace.envs.own.lifetimes import batch
from podrace.topology import AXIS
from podrace.types import Array, Environment, Metrics, Replay, TrainState, Trajectory, map_batch


class Member(NamedTuple):
  """The state of one agent; in a group each leaf has a leading axis [N]."""

  train: TrainState
  actor: ActorState  # [B, ...]
  memory: Any  # its replay; () without replay
  value: ValueState
  age: Array  # [] i32 updates in this life
  lives: Array  # [] i32 lives before this one
  number: Array  # [] i32 its index in the population


@dataclasses.dataclass(frozen=True)
class Kind:
  """The settings of a group. Its members differ in seeds, ages and environment states.

  `agent` learns by a rule: it has `learn_by(rule, train, window) -> (train, metrics)`, which is
  differentiable in the rule, and a `network.unroll` with a `policy` of logits in its outputs.
  """

  agent: Any  # bound to the environment's spaces
  env: Environment
  value: ValueFunction  # bound likewise
  num_envs: int  # of each member
  unroll_length: int
  updates: int  # K: updates of an agent that a meta-gradient goes through
  lifetime: int  # updates
  replay: Replay | None  # of past unrolls; None if batches hold only the newest
  entropy_cost: float  # of the policy after K updates
  regularisers: Mapping[str, float]  # metrics of `learn_by` -> their weights in the meta-objective

  @functools.cached_property
  def _env(self) -> Any:
    return batch(self.env, self.num_envs)

  @property
  def steps(self) -> int:
    """Environment steps of a member in a meta-step."""
    return self.num_envs * self.unroll_length * (self.updates + 1)

  # --- lives

  def begin(self, key: Array, number: Array, lives: Array, age: Array) -> Member:
    """Return a member at the beginning of a life."""
    key = jax.random.fold_in(jax.random.fold_in(key, number), lives)
    train_key, actor_key, value_key, example_key = jax.random.split(key, 4)
    train = self.agent.init(train_key)
    env_id = jnp.arange(self.num_envs, dtype=jnp.int32)
    actor = acting.begin(self.agent, self._env, env_id, actor_key)
    memory: Any = ()
    if self.replay is not None:
      _, example = jax.eval_shape(self._unroll, train.params, actor, example_key)
      memory = self.replay.init(example)
    return Member(train, actor, memory, self.value.init(value_key), age, lives, number)

  def renew(self, member: Member, key: Array) -> Member:
    """Replace the members [N] of a group that are at the end of their lives by new ones.

    Counts of episodes and faults are the run's, so they stay.
    """
    due = member.age >= self.lifetime

    def renew_due(member: Member) -> Member:
      def begin(of: tuple[Array, Array]) -> Member:
        return self.begin(key, of[0], of[1], jnp.int32(0))

      new = lax.map(begin, (member.number, member.lives + 1))  # vmapped LAPACK calls can block
      counted = dict(episodes=member.actor.episodes, faults=member.actor.faults)
      new = new._replace(actor=new.actor._replace(**counted))
      return select(due, new, member)

    return lax.cond(jnp.any(due), renew_due, lambda member: member, member)

  # --- a meta-step

  def outcome(
    self, rule: RuleParams, member: Member, key: Array
  ) -> tuple[Array, tuple[Member, Metrics]]:
    """Return the meta-loss of one member, and as aux the member after K updates and metrics.

    The meta-loss is differentiable in the rule. It is the policy gradient, on a further unroll, of
    the parameters after these updates (Oh et al. 2025).
    """
    update_key, last_key = jax.random.split(key)
    keys = jax.random.split(update_key, self.updates)
    member, metrics = lax.scan(functools.partial(self.update, rule), member, keys)
    means = {name: jnp.mean(x) for name, x in metrics.items()}
    member, unrolled = self._act(member, last_key)
    loss, loss_metrics = self._loss(member, unrolled, means)
    value = self.value.learn(member.value, unrolled)
    agents = {f'agent_{name}': x for name, x in means.items()}
    return loss, (member._replace(value=value), lax.stop_gradient(agents | loss_metrics))

  def update(self, rule: RuleParams, member: Member, key: Array) -> tuple[Member, Metrics]:
    """Act, add the unroll to replay, and learn by the rule."""
    act_key, sample_key = jax.random.split(key)
    member, unrolled = self._act(member, act_key)
    memory, window = self._remember(member.memory, unrolled, sample_key)
    train, metrics = self._learn(rule, member.train, window)
    value = self.value.learn(member.value, unrolled)
    return member._replace(train=train, memory=memory, value=value, age=member.age + 1), metrics

  def _loss(self, member: Member, unrolled: Trajectory, means: Metrics) -> tuple[Array, Metrics]:
    """Return the meta-loss on an unroll [T, B]: policy gradient, entropy and regularisers."""
    agent, estimates = self.agent, self.value.estimate(member.value, unrolled)
    outputs, _ = agent.network.unroll(member.train.params, unrolled.agent_state, unrolled.timesteps)
    logits, action = outputs.policy[:-1], unrolled.outputs.action
    log_prob = agent.network.distribution.log_prob(logits, action)
    advantage = self.value.scale(member.value, estimates.advantage)
    policy_loss = -jnp.mean(estimates.mask * advantage * log_prob)
    policy_entropy = jnp.mean(estimates.mask * entropy(logits))
    of_rule = sum((w * means[name] for name, w in self.regularisers.items()), jnp.float32(0))
    loss = policy_loss - self.entropy_cost * policy_entropy + of_rule
    metrics = dict(
      loss=loss, policy_loss=policy_loss, entropy=policy_entropy, regularisation=of_rule
    )
    return loss, metrics | dict(
      value=jnp.mean(estimates.target), reward=jnp.mean(unrolled.timesteps.reward[1:])
    )

  def _unroll(self, params: Any, actor: ActorState, key: Array) -> tuple[ActorState, Trajectory]:
    return acting.unroll(self.agent, self._env, params, actor, key, self.unroll_length)

  def _act(self, member: Member, key: Array) -> tuple[Member, Trajectory]:
    """Act, without a gradient."""
    actor, unrolled = self._unroll(lax.stop_gradient(member.train.params), member.actor, key)
    bits = find_faults(actor.faults, self.env.action_space, unrolled)
    return member._replace(actor=actor._replace(faults=bits)), unrolled

  def _remember(self, memory: Any, unrolled: Trajectory, key: Array) -> tuple[Any, Trajectory]:
    """Add an unroll to the memory; returns also the batch: the unroll and windows of the past."""
    if self.replay is None:
      return memory, unrolled
    memory = self.replay.add(memory, unrolled)
    past = self.replay.sample(memory, key).trajectory
    return memory, map_batch(lambda axis, x, y: jnp.concatenate([x, y], axis), unrolled, past)

  @functools.cached_property
  def _learn(self) -> Callable[..., tuple[TrainState, Metrics]]:
    """An update by the rule. Its gradient recomputes the update from its inputs.

    The agent averages over AXIS, but a member is on one device, so AXIS has the size 1.
    """
    alone = jax.vmap(self.agent.learn_by, in_axes=None, out_axes=None, axis_name=AXIS, axis_size=1)
    return jax.checkpoint(alone, prevent_cse=False)
