"""Recurrence by a flag, for agents that learn from replay.

Without a core an agent learns from n-step transitions. With one it learns from sequences: windows
of replay in which its networks are unrolled. `Batch` has the same members for both, so that the
loss of an agent is written once.

Stored states and burn-in: Kapturowski et al. 2019 (R2D2). Zero states, whole episodes with masks,
the further inputs and separate cores: Ni et al. 2022 (arXiv 2110.05038).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podrace import returns
from podrace.agents import value_based
from podrace.envs.spaces import map_leaves
from podrace.fields import check_fields
from podrace.learner import varying
from podrace.networks import merge_time
from podrace.networks.observations import zeros_of
from podrace.networks.recurrent_body import RecurrentBody
from podrace.replay import Buffer, windows
from podrace.types import FIRST, Array, Replay, Sample, TimeStep, Trajectory

MAX_SHARE = 0.9  # of the largest error in a sequence's priority; the rest is the mean (R2D2)


class ActingMemory(NamedTuple):
  """State of acting with a core, [B, ...]."""

  core: Any  # the recurrent state of the network that acts
  action: Any  # the previous action, as the action space declares


@dataclasses.dataclass(frozen=True)
class Recurrence:
  """Sequences that agents with a recurrent core learn from."""

  start: Literal['zero', 'stored', 'episode'] = 'zero'
  # ^ first state of a sequence; zero: 0, at any step; stored: the state of acting, where unrolls
  #   begin; episode: 0, where episodes begin, without the steps behind the episode's end
  sequence: int = 20  # steps of a sequence that are learned from, after the burn-in
  burn_in: int = 0
  # ^ first steps of a sequence, which only bring the recurrent state up to date; 0 for episodes

  def __post_init__(self) -> None:
    check_fields(self)
    if self.start == 'episode' and self.burn_in:
      raise ValueError(
        f'a sequence that starts with its episode needs no burn-in, not one of {self.burn_in}: '
        'its first state is right'
      )

  @property
  def length(self) -> int:
    """Steps of a window."""
    return self.burn_in + self.sequence

  def replay(
    self,
    buffer: Buffer,
    num_envs: int,
    unroll_length: int,
    stack: int,
    initial_priority: Callable[[Trajectory], Array] | None = None,
  ) -> Replay:
    """Return the replay of sequences.

    Raises:
      ValueError: if stored states would leave out a part of every unroll, or with `online_share`
        and whole episodes.
    """
    if self.start == 'episode' and buffer.online_share is not None:
      raise ValueError(
        'sequences that start with episodes are drawn alike from all streams: leave out '
        'online_share, or take --agent.recurrence.start zero or stored'
      )
    stored = self.start == 'stored'
    if stored and unroll_length > self.sequence:
      raise ValueError(
        f'an unroll of {unroll_length} steps is longer than a sequence of {self.sequence}, and '
        'with stored states a sequence begins with each unroll: take --unroll-length '
        f'{self.sequence} or less, or --agent.recurrence.sequence {unroll_length} or more'
      )
    return windows(
      buffer, self.length, num_envs, unroll_length, keep_state=stored, stack=stack,
      initial_priority=initial_priority, at_first=self.start == 'episode',
    )  # fmt: skip


def has_core(*networks: Any) -> bool:
  """Return whether one of the networks has a recurrent core."""
  return any(getattr(network, 'core', 'none') != 'none' for network in networks)


def is_recurrent(agent: Any) -> bool:
  """Return whether a network of an agent has a core. It has a `network`, or actor and critic."""
  return has_core(*(getattr(agent, x, None) for x in ('network', 'actor', 'critic')))


def memory(agent: Any, num_envs: int, unroll_length: int, stack: int = 0) -> Replay:
  """Return the replay of an agent: sequences, or windows of `n_step` steps."""
  if agent.is_recurrent:
    replay: Replay = agent.recurrence.replay(agent.buffer, num_envs, unroll_length, stack)
    return replay
  return windows(agent.buffer, getattr(agent, 'n_step', 1), num_envs, unroll_length, stack=stack)


def initial_state(agent: Any, env_id: Array) -> Any:
  """Return the state of acting before the first timestep: that of `network` or `actor`."""
  if not agent.is_recurrent:
    return ()
  return begin(agent.network if hasattr(agent, 'network') else agent.actor, env_id.shape[0])


def check_used(recurrence: Recurrence, *networks: Any) -> None:
  """Raise ValueError if sequences are set, but no network has a core."""
  if recurrence != Recurrence() and not has_core(*networks):
    raise ValueError(
      'recurrence is set, but no network has a core: give it one, as in --agent.network.core gru '
      'or --agent.actor.core gru --agent.critic.core gru'
    )


def begin(network: Any, batch_size: int) -> ActingMemory:
  """Return the memory of the network that acts, before the first timestep."""
  action = map_leaves(
    lambda s: jnp.zeros((batch_size, *s.shape), zeros_of(s).dtype), network.action_space
  )
  return ActingMemory(network.initial_state(batch_size), action)


def step(
  network: Any, params: Any, memory: Any, timestep: TimeStep, key: Any = None, per_row: bool = False
) -> Any:
  """Return a network's outputs for timesteps [B], and its recurrent state; () without a core."""
  noise = () if key is None else (key, per_row)
  if not isinstance(memory, ActingMemory):
    return network.step(params, (), timestep, *noise)
  return network.step(params, memory.core, timestep, *noise, **_before(network, memory.action))


def _before(network: Any, action: Any) -> dict[str, Any]:
  """Return the previous action as an argument of networks that may see it."""
  return {'previous': action} if isinstance(network, RecurrentBody) else {}


def after(memory: Any, core: Any, action: Any) -> Any:
  """Return the memory after an action; () without a core."""
  if not isinstance(memory, ActingMemory):
    return memory
  same = jax.tree.map(lambda x, before: x.astype(before.dtype), action, memory.action)
  return ActingMemory(core, same)


class Sequences(NamedTuple):
  """Windows [burn_in + sequence + 1, B] for networks with memory."""

  timesteps: TimeStep
  previous: Any  # the action before each timestep
  core: Any  # the stored state of the network that acts; None: zeros
  burn_in: int
  end: Array  # [sequence, B] i32 the timestep, after the burn-in, to bootstrap from
  padded: bool  # the steps behind an episode's end are padding

  def unroll(self, network: Any, params: Any, acts: bool, key: Any = None) -> Any:
    """Return outputs [sequence + 1, B, ...]. No gradient passes the burn-in.

    Args:
      network: the network.
      params: its parameters.
      acts: the network acts, so that its stored state is known. Other networks begin with 0.
      key: draws the network's noise.
    """
    core = self.core
    if core is None or not acts:
      core = varying(network.initial_state(self.end.shape[1]))
    early, late = (
      jax.tree.map(lambda x, part=part: x[part], (self.timesteps, self.previous))
      for part in (slice(self.burn_in), slice(self.burn_in, None))
    )
    if self.burn_in:
      _, core = network.unroll(
        lax.stop_gradient(params), core, early[0], **_before(network, early[1])
      )
    noise = () if key is None else (key,)
    outputs, _ = network.unroll(params, core, late[0], *noise, **_before(network, late[1]))
    return outputs

  def pick(self, outputs: Any, after: bool) -> Any:
    """Return the outputs [N, ...] at the steps, or at the timesteps to bootstrap from."""
    streams = jnp.arange(self.end.shape[1])[None]
    return merge_time(jax.tree.map(lambda x: x[self.end, streams] if after else x[:-1], outputs))


@dataclasses.dataclass(frozen=True)
class Batch:
  """N transitions of a sample: one of each window, or all steps of sequences."""

  step: value_based.NStepTransitions  # [N]; of sequences `before` and `after` are ()
  weight: Array  # [N] f32 importance weights, 0 where `step.mask` is
  sequences: Sequences | None = None  # with memory

  def outputs(self, network: Any, params: Any, after: bool = False, key: Any = None) -> Any:
    """Return the outputs [N, ...] of the network that acts.

    Args:
      network: the network.
      params: its parameters.
      after: at the timesteps to bootstrap from, instead of the steps.
      key: draws the network's noise, one sample for all.
    """
    if self.sequences is None:
      timestep = self.step.after if after else self.step.before
      outputs, _ = network.step(params, (), timestep, *(() if key is None else (key,)))
      return outputs
    return self.sequences.pick(self.sequences.unroll(network, params, acts=True, key=key), after)

  def seen(self, critic: Any, params: Any, after: bool = False) -> Any:
    """Return the inputs [N, ...] of `critic.value` besides the action; `after` as in `outputs`."""
    if self.sequences is None:
      return (self.step.after if after else self.step.before).observation
    sequences = self.sequences
    if has_core(critic):
      seen = sequences.unroll(critic, params, acts=False)
    else:
      observation = sequences.timesteps.observation
      seen = jax.tree.map(lambda x: x[sequences.burn_in :], observation)
    return sequences.pick(seen, after)

  def acted(self, extras: value_based.ValueExtras) -> value_based.ValueExtras:
    """Return the values of acting [N]: `value` at the steps, `best` where they bootstrap from.

    Acting has not seen the last timestep of a window; the one before stands for it.
    """
    sequences = self.sequences
    start, end = (0, self.step.end) if sequences is None else (sequences.burn_in, sequences.end)
    value, best = extras.value[start:], extras.best[start:]
    last = jnp.minimum(end, best.shape[0] - 1)
    streams = jnp.arange(best.shape[1])
    if sequences is None:
      return value_based.ValueExtras(value[0], best[last, streams])
    return merge_time(value_based.ValueExtras(value, best[last, streams[None]]))

  def mean(self, x: Array, weight: Array | None = None) -> Array:
    """Return the mean of x [..., N], multiplied by `weight` [N]; by default the mask.

    Of padded sequences it is the sum divided by the number of valid steps of this device.
    """
    weight = self.step.mask if weight is None else weight
    mean = jnp.mean(weight.reshape((1,) * (x.ndim - 1) + weight.shape) * x)
    if not self.is_padded:
      return mean
    return mean * (weight.size / jnp.maximum(jnp.sum(self.step.mask), 1.0))

  def mean_of_valid(self, x: Array) -> Array:
    """Return the mean of x [N] over the valid steps of this device, for metrics."""
    return jnp.sum(self.step.mask * x) / jnp.maximum(jnp.sum(self.step.mask), 1.0)

  @property
  def is_padded(self) -> bool:
    """Whether some steps are padding."""
    return self.sequences is not None and self.sequences.padded

  def priority(self, error: Array) -> Array:
    """Return the priorities of the windows, by errors [N] of at least 0, masked."""
    if self.sequences is None:
      return error
    error, mask = (x.reshape(self.sequences.end.shape) for x in (error, self.step.mask))
    mean = jnp.sum(error, axis=0) / jnp.maximum(jnp.sum(mask, axis=0), 1.0)
    return MAX_SHARE * jnp.max(error, axis=0) + (1 - MAX_SHARE) * mean


def transitions(
  recurrence: Recurrence | None, sample: Sample, discount: float, n_step: int
) -> Batch:
  """Return the transitions of a sample, of n steps or fewer; `recurrence` if there is memory."""
  if recurrence is None:
    step = value_based.transitions(sample.trajectory, discount)
    return Batch(step, sample.weight * step.mask)
  window, start = sample.trajectory, recurrence.burn_in
  nth, mask = sequence_steps(recurrence, window.timesteps, discount, n_step)
  weight = mask * sample.weight[None]
  action = jax.tree.map(lambda x: x[start:], window.outputs.action)
  r_t, discount_t, action, mask, end, weight = merge_time(
    (nth.r_t, nth.discount_t, action, mask, nth.end, weight)
  )
  empty: Any = ()
  step = value_based.NStepTransitions(r_t, discount_t, empty, empty, action, mask, end)
  return Batch(step, weight, _sequences(recurrence, window, nth.end))


def sequence_steps(
  recurrence: Recurrence, timesteps: TimeStep, discount: float, n_step: int
) -> tuple[returns.NStep, Array]:
  """Return the n-step transitions of sequences, and their mask.

  Args:
    recurrence: the settings of sequences.
    timesteps: [burn_in + sequence + 1, B]; observations are not read.
    discount: discount of each step.
    n_step: rewards before a value is bootstrapped from; fewer where an episode or a sequence ends.

  Returns:
    Transitions [sequence, B], with the timestep of each end, and the mask [sequence, B] f32.
  """
  t = jax.tree.map(lambda x: x[recurrence.burn_in :], timesteps._replace(observation=()))
  length, n = recurrence.sequence, min(n_step, recurrence.sequence)

  def pad(x: Array, value: Any) -> Array:
    return jnp.pad(x, ((0, n - 1), (0, 0)), constant_values=value)

  starts = jnp.arange(length, dtype=jnp.int32)
  rows = starts[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
  stops = t.last[1:].at[-1].set(True)  # a sequence ends where an episode would
  parts = (pad(t.reward[1:], 0.0), pad(discount * t.discount[1:], 1.0), pad(stops, False))
  each = jax.vmap(jax.vmap(returns.n_step), in_axes=(2, 2, 2), out_axes=1)  # [length, n, B]
  nth = each(*(x[rows] for x in parts))
  mask = ~t.last[:-1]
  if recurrence.start == 'episode':
    within = jnp.cumsum(t.last[:-1], axis=0) == 0  # the steps behind LAST are padding
    mask &= within & t.first[:1]
  nth = nth._replace(end=starts[:, None] + nth.end)
  return nth, mask.astype(jnp.float32)


def _sequences(recurrence: Recurrence, window: Trajectory, end: Array) -> Sequences:
  """Return windows for networks with memory.

  A window with a zero state begins as an episode does: no action or reward precedes it.
  """
  timesteps = window.timesteps
  stored = recurrence.start == 'stored'
  if not stored:
    timesteps = timesteps._replace(step_type=timesteps.step_type.at[0].set(FIRST))

  def shift(x: Array, before: Array | None) -> Array:
    first = jnp.zeros_like(x[0]) if before is None else before
    return jnp.concatenate([first[None], x])

  action = window.outputs.action
  if stored:
    state = window.agent_state  # which may hold more than the memory
    memory: ActingMemory = state if isinstance(state, ActingMemory) else state.memory
    previous = jax.tree.map(shift, action, memory.action)
    return Sequences(timesteps, previous, memory.core, recurrence.burn_in, end, False)
  previous = jax.tree.map(lambda x: shift(x, None), action)
  padded = recurrence.start == 'episode'
  return Sequences(timesteps, previous, None, recurrence.burn_in, end, padded)
