"""Checks of arrivals from host environments, and of the actions sent to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from podrace.envs.host.base import HostSpec, log
from podrace.envs.host.spaces import action_bounds, wide_bounds
from podrace.envs.host.timesteps import EVERY, rows_of
from podrace.envs.spaces import leaves, values
from podrace.envs.timestep_rules import RULES, choices_of, exceeds, is_outside
from podrace.errors import HostError, RunError
from podrace.types import LARGEST_REWARD, Arrival, TimeStep

BOUNDED = 1000  # number of first arrivals that are compared with the bounds of their Boxes


class Checker:
  """Compares arrivals and actions with the declared spaces.

  An observation outside of its Box is learned from unchanged. The log has one warning for each part
  of an observation, for all pools of a HostSpec together.
  """

  def __init__(self, spec: HostSpec, num_envs: int, agent: Any = None) -> None:
    self._name, self._num_envs, self._action_space = spec.name, num_envs, spec.action_space
    self._agent = agent
    self._space, self._leaves = spec.observation_space, list(leaves(spec.observation_space))
    self._low, self._high = action_bounds(spec.action_space)
    self._limits = {field: limits for field, x in self._leaves if (limits := wide_bounds(x))}
    self._outside, self._count = spec.outside, 0
    self._choices = choices_of(spec.action_space)

  def __call__(self, arrival: Arrival) -> None:
    """Check an arrival.

    Raises:
      HostError: if it is not as declared.
    """
    ids = arrival.env_id
    n = len(ids)
    known = not n or rows_of(ids, self._num_envs) is EVERY
    if not known and not (ids.min() >= 0 and ids.max() < self._num_envs):
      raise HostError(f'{self._name}: env_id {ids} is out of range({self._num_envs})')
    arrays = values(self._space, arrival.timestep.observation)
    for (field, space), x in zip(self._leaves, map(np.asarray, arrays), strict=True):
      if x.shape != (n, *space.shape):
        raise HostError(f'{self._name}: {field} has shape {x.shape[1:]}, declared {space.shape}')
      if x.dtype != space.dtype:
        raise HostError(f'{self._name}: {field} is {x.dtype}, declared {space.dtype}')
      if x.dtype.kind == 'f':
        self._finite(field, x, ids)
      if self._count < BOUNDED and field in self._limits:
        self._within(field, space, x, ids)
    self._count += 1
    self._check_mask(arrival.timestep, ids)
    self._check_reward(arrival.timestep.reward, ids)
    if arrival.score is not arrival.timestep.reward:  # rewards may be clipped for learning
      self._check_reward(arrival.score, ids)

  def _check_mask(self, timestep: TimeStep, ids: np.ndarray) -> None:
    rule = RULES['mask']
    stuck = rule.is_broken(timestep, None, self._choices)
    if stuck is not None and np.count_nonzero(stuck):
      kind = ('FIRST', 'MID', 'LAST')[timestep.step_type[stuck][0]]
      raise HostError(
        f'{self._name}: environment {ids[stuck].tolist()} has {rule.came} with a {kind} timestep, '
        f'expected {rule.expected}'
      )

  def _check_reward(self, x: Any, ids: np.ndarray) -> None:
    too_large = exceeds(x, LARGEST_REWARD)
    if np.count_nonzero(too_large):
      self._finite('reward', x, ids)
      raise HostError(
        f'{self._name}: reward of environment {ids[too_large].tolist()} is {x[too_large][0]:g}, '
        f'expected at most {LARGEST_REWARD:g} in size'
      )

  def _finite(self, field: str, x: Any, ids: np.ndarray) -> None:
    finite = np.isfinite(x)
    if np.count_nonzero(finite) != x.size:
      rows = ~finite.reshape(len(x), -1).all(axis=1)
      raise HostError(
        f'{self._name}: {field} of environment {ids[rows].tolist()} is NaN or infinite'
      )

  def _within(self, field: str, space: Any, x: np.ndarray, ids: np.ndarray) -> None:
    low, high = self._limits[field]
    outside = is_outside(x, low, high)
    if np.count_nonzero(outside) and field not in self._outside:
      self._outside.add(field)
      where = tuple(np.argwhere(outside)[0].tolist())
      log.warning(
        '%s: %s of environment %d has %g, outside of %s; it is learned from as it is',
        self._name, field, ids[where[0]], x[where], space,
      )  # fmt: skip

  def action(self, x: np.ndarray) -> None:
    """Check an agent's actions [b, ...].

    Raises:
      RunError: if an action is not in the action space.
    """
    outside = is_outside(x, self._low, self._high)
    if np.count_nonzero(outside):
      from podrace.system.blame import out_of_space

      row = x[np.argwhere(outside)[0, 0]]
      raise RunError(out_of_space(self._agent, self._action_space, row.tolist()))


def cast_exactly(name: str, x: np.ndarray, dtype: Any) -> np.ndarray:
  """Cast an array to its declared type.

  Raises:
    HostError: if the type cannot hold an integer.
  """
  y = x.astype(dtype, copy=False)
  if x.dtype.kind in 'iu' and x.dtype.itemsize > y.dtype.itemsize and np.count_nonzero(x != y):
    raise HostError(f'{name}: observation has {x[x != y][:3].tolist()}, which {y.dtype} has not')
  return y
