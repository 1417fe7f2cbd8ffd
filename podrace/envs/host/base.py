"""What pools share: their specification, next-step timesteps, checks, and exact episode counts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from podrace.envs import env_names, libraries, registry
from podrace.envs.host.spaces import i32
from podrace.envs.spaces import (
  convert,
)
from podrace.errors import UnknownName
from podrace.types import HostEnvironment

log = logging.getLogger('podrace.envs')


@dataclasses.dataclass(frozen=True)
class PoolArgs:
  """What one actor thread's pool is made of."""

  num_envs: int
  batch_size: int  # how many come back together; num_envs: all of them, in order
  seeds: np.ndarray  # [num_envs] u32
  threads: int  # or worker processes, that step them
  deadline: float  # seconds that a step may take


@dataclasses.dataclass(frozen=True)
class HostSpec:
  """A kind of environment on the host, before any is made."""

  name: str  # with its options, unless they are the defaults: what `make` makes the same from
  observation_space: Any  # gymnasium's, of one environment
  action_space: Any
  make: Callable[[PoolArgs], HostEnvironment]
  ordered_only: bool = False  # the pool can't return less than all
  frame_stack: int = 0  # observations are so many frames along their first axis; 0: they are not
  jax: Any = None  # the podrace Environment, if it is one in JAX, which then runs on the host CPU
  comes_and_goes: bool = False  # any number of a pool's environments may be there, in any order
  metrics: Callable[[], dict[str, float]] | None = None  # of its own, for the log
  finished: Callable[[], None] | None = None  # tells whoever has them that the run is complete
  # Resets and steps one of them, within so many seconds; raises UsageError if that goes wrong.
  try_out: Callable[[float], None] | None = None
  outside: set[str] = dataclasses.field(default_factory=set, compare=False)  # see Checker


def make(name: str) -> HostSpec:
  """The host environment that `LIB:NAME,key=value,...` names; those in JAX are among them.

  Raises:
    UnknownName, MissingExtra: as `envs.make`.
  """
  key, env, options = env_names.parse(name)
  library = libraries.HOST_LIBRARIES.get(key)
  if library is None:
    if key not in libraries.LIBRARIES:
      known = [*libraries.HOST_LIBRARIES, *libraries.LIBRARIES]
      raise UnknownName(
        f'no library {key!r} in environment {name!r}{env_names.nearest(key, known)}; '
        f'the libraries are {", ".join(known)}'
      )
    pure = registry.make(name)
    refused = 'environments in JAX make their pool from keys, see podrace.envs.host.jax'

    def no_pool(args: PoolArgs) -> HostEnvironment:
      raise TypeError(refused)

    observation, action = (convert(i32, s) for s in (pure.observation_space, pure.action_space))
    return HostSpec(name, observation, action, no_pool, ordered_only=True, jax=pure)
  module = registry.load_adapter(library, f"environment '{key}:{env}'")
  try:
    return module.make(env, options)
  except ImportError as error:
    raise UnknownName(
      f"environment '{key}:{env}' needs what is no part of podrace: {error}"
    ) from error


SIZES = 4  # of batches of environments that come and go: all of a thread's, half of them, ...


def batch_sizes(most: int) -> tuple[int, ...]:
  """What batches of at most `most` environments are padded to where these come and go; the least first."""
  return tuple(sorted({-(-most // 2**i) for i in range(SIZES)}))


def groups_at_once(groups: Iterable[int], most: int) -> int:
  """How many of the groups that wait, of so many environments each and in their order, to act for at once.

  As many as fit a batch and leave no more than a quarter of it for padding; all that fit if it can't be had.
  """
  sizes, total, fit, good = batch_sizes(most), 0, 0, 0
  for group in groups:
    total += group
    if total > most:
      break
    fit += 1
    if 4 * total >= 3 * min(s for s in sizes if s >= total):
      good = fit
  return good or fit


# --- deadlines -----------------------------------------------------------------------------------


# --- timesteps ----------------------------------------------------------------------------------


# --- checks -------------------------------------------------------------------------------------


# --- episodes -----------------------------------------------------------------------------------
