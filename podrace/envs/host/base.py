"""Specifications of environments on the host, and the sizes of their batches."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from podrace.envs import env_names, libraries, registry
from podrace.envs.host.spaces import i32
from podrace.envs.host.timesteps import Stepper, everyone
from podrace.envs.spaces import convert
from podrace.errors import UnknownName
from podrace.types import Arrival, HostEnvironment

# Writers of pools import everything from here, see docs/own.md.
__all__ = [
  'HostSpec',
  'PoolArgs',
  'SavedPool',
  'Stepper',
  'batch_sizes',
  'everyone',
  'groups_at_once',
  'make',
]

log = logging.getLogger('podrace.envs')


@dataclasses.dataclass(frozen=True)
class PoolArgs:
  """Arguments of one actor thread's pool."""

  num_envs: int
  batch_size: int  # environments in an arrival; if num_envs, all of them in order
  seeds: np.ndarray  # [num_envs] u32
  threads: int  # threads or worker processes that step the environments
  deadline: float  # seconds that a step may take
  saves: bool = False  # let `SavedPool.state` be called


@runtime_checkable
class SavedPool(Protocol):
  """A `HostEnvironment` of which checkpoints keep the state, while all of it waits for actions."""

  @property
  def saves(self) -> bool:
    """Whether `state` may be called."""
    ...

  def state(self) -> dict[str, np.ndarray]:
    """Return everything that decides the future, as arrays that do not change."""
    ...

  def restore(
    self, state: Mapping[str, np.ndarray], on_step: Callable[[], None] = lambda: None
  ) -> Arrival:
    """Restore a state, in place of `reset`; returns the timesteps that wait for actions.

    Only the observations and rewards of the arrival count. Afterwards `reset` still begins anew.

    Args:
      state: that `state` returned.
      on_step: is to be called after each step that is replayed. Environments are taken to hang
        when `PoolArgs.deadline` seconds pass without a call.

    Raises:
      HostError: if it is no state of this pool. The pool is as before.
    """
    ...


@dataclasses.dataclass(frozen=True)
class HostSpec:
  """A kind of environment on the host, before any is made."""

  name: str  # canonical, with the options that are not the defaults; `make` takes it
  observation_space: Any  # gymnasium's, of one environment
  action_space: Any
  make: Callable[[PoolArgs], HostEnvironment]
  ordered_only: bool = False  # the pool can't return less than all
  frame_stack: int = 0  # number of frames along the first axis of observations; 0: no stack
  jax: Any = None  # the Environment, if it is written in JAX; it runs on the host CPU
  multiple: int = 1  # number of environments that each pool has a multiple of
  comes_and_goes: bool = False  # environments may connect and disconnect at any time
  longest_episode: int | None = None  # steps of the longest episode; None: not known
  metrics: Callable[[], dict[str, float]] | None = None  # of its own, for the log
  finished: Callable[[], None] | None = None  # tells remote environments that the run is complete
  # Resets and steps one environment, with a deadline in seconds; raises UsageError on failure.
  try_out: Callable[[float], None] | None = None
  # Parts of observations outside of their Box of which a Checker has warned.
  outside: set[str] = dataclasses.field(default_factory=set, compare=False)


def make(name: str) -> HostSpec:
  """Return the host environment that `LIB:NAME,key=value,...` names; it may be one in JAX.

  Raises:
    UnknownName: if there is none of this name, or an option is wrong.
    MissingExtra: if its library is not installed.
  """
  key, env, options = env_names.parse(name)
  library = libraries.HOST_LIBRARIES.get(key)
  if library is None:
    return make_jax_spec(name, registry.make(name))
  module = registry.load_adapter(library, f"environment '{key}:{env}'")
  try:
    return module.make(env, options)
  except ImportError as error:
    raise UnknownName(
      f"environment '{key}:{env}' needs what is no part of podrace: {error}"
    ) from error


def make_jax_spec(name: str, env: Any, multiple: int = 1) -> HostSpec:
  """Return the specification of an environment in JAX; `podrace.envs.host.jax` makes its pool."""

  def no_pool(args: PoolArgs) -> HostEnvironment:
    raise TypeError('environments in JAX make their pool from keys, see podrace.envs.host.jax')

  observation, action = (convert(i32, s) for s in (env.observation_space, env.action_space))
  return HostSpec(name, observation, action, no_pool, ordered_only=True, jax=env, multiple=multiple)


SIZES = 4  # padded sizes of batches: all environments of a thread, half of them, ...


def batch_sizes(limit: int) -> tuple[int, ...]:
  """Return the padded batch sizes, ascending, for environments that may disconnect.

  The last one is `limit`.
  """
  return tuple(sorted({-(-limit // 2**i) for i in range(SIZES)}))


def groups_at_once(groups: Iterable[int], limit: int) -> int:
  """Return how many of the waiting groups, in their order, to act for at once.

  As many as fit a batch of `limit` environments and leave at most a quarter of it for padding. If
  no number of groups does, all that fit.

  Args:
    groups: Number of environments of each group.
    limit: Environments in the largest batch.
  """
  sizes, total, fit, good = batch_sizes(limit), 0, 0, 0
  for group in groups:
    total += group
    if total > limit:
      break
    fit += 1
    if 4 * total >= 3 * min(s for s in sizes if s >= total):
      good = fit
  return good or fit
