"""The contract of environments as one table of rules over the arrays of timesteps.

The rules take NumPy and JAX arrays of any leading shape, such as [T, B]. This module does not
import JAX.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from podrace.envs.spaces import MASK
from podrace.types import FIRST, LARGEST_REWARD, LAST, TimeStep


class TimestepRule(NamedTuple):
  """One rule of the contract, and the two halves of its message.

  Attributes:
    is_broken: Maps a timestep [...], `begins` [...] bool (an episode must begin at this timestep)
      and the action's `choices_of` to [...] bool. None if the rule does not apply. A rule reads
      only the fields that it is about; the rest may be missing.
    came: Description of a timestep that breaks the rule.
    expected: Description of a timestep that keeps it.
  """

  is_broken: Callable[..., Any]
  came: str
  expected: str

  def message(self, function: str) -> str:
    """Return the error message for `function`, such as `label(env, 'step')`."""
    return f'{function} returned {self.came}, expected {self.expected}'


def exceeds(x: Any, limit: float) -> Any:
  """Return where numbers are NaN, or larger than `limit` in size."""
  return ~(abs(x) <= limit)


def is_outside(x: Any, low: Any, high: Any) -> Any:
  """Return where numbers are NaN, or not between two bounds."""
  return ~((x >= low) & (x <= high))


def choices_of(space: Any) -> list[int]:
  """Return the number of choices of each part of an action; [] for a space without choices."""
  if hasattr(space, 'nvec'):  # a MultiDiscrete
    return [int(n) for n in np.ravel(space.nvec)]
  if hasattr(space, 'low') or not hasattr(space, 'n'):
    return []
  if hasattr(space, 'start'):  # a Discrete
    return [int(space.n)]
  return [2] * math.prod(space.shape)  # a MultiBinary


def _allows_nothing(timestep: TimeStep, begins: Any, choices: Sequence[int] = ()) -> Any:
  """Return where an action mask allows nothing though an agent acts or bootstraps there.

  An agent acts in each timestep but a LAST one, and bootstraps from each but that of a termination.

  Args:
    timestep: [...], of one environment or of many.
    begins: not read.
    choices: of each part of an action, which needs one that is allowed; (): there is one part.

  Returns:
    Flags [...]; None without a mask.
  """
  observation = timestep.observation
  mask: Any = observation.get(MASK) if isinstance(observation, dict) else None
  if not hasattr(mask, 'ndim'):
    return None
  lead = timestep.reward.shape  # 0, where no environment has answered
  flat = (mask != 0).reshape(*lead, math.prod(mask.shape[len(lead) :]))
  ends = np.cumsum(choices or flat.shape[-1:]).tolist()
  if ends[-1] != flat.shape[-1]:
    return None  # the network refuses it
  allowed = flat[..., : ends[0]].any(-1)
  for start, end in itertools.pairwise(ends):
    allowed &= flat[..., start:end].any(-1)
  return ~allowed & (~timestep.last | (timestep.discount > 0))


RESETS = (
  'the step after LAST begins a new episode by itself; podrace.envs.base.NextStepReset(...) around '
  'an environment that does not makes it one that does'
)

DTYPES = {'reward': 'float32', 'discount': 'float32', 'step_type': 'int8'}

RULES = {
  'step_type': TimestepRule(
    lambda t, begins, choices=(): is_outside(t.step_type, FIRST, LAST),
    'a step type that is none',
    'FIRST (0), MID (1) or LAST (2)',
  ),
  'order': TimestepRule(
    lambda t, begins, choices=(): begins != t.first,
    'an episode that begins without its first timestep, or within another',
    f'FIRST after LAST and only there: {RESETS}',
  ),
  'reward': TimestepRule(
    lambda t, begins, choices=(): exceeds(t.reward, LARGEST_REWARD),
    f'a reward that is NaN or infinite, or more than {LARGEST_REWARD:g} in size',
    'a finite one that is smaller',
  ),
  'first_reward': TimestepRule(
    lambda t, begins, choices=(): t.first & (t.reward != 0),
    'a reward with the first timestep of an episode',
    'a reward of 0',
  ),
  'discount_range': TimestepRule(
    lambda t, begins, choices=(): is_outside(t.discount, 0, 1),
    'a discount that is not between 0 and 1',
    '0 or 1',
  ),
  'discount': TimestepRule(
    lambda t, begins, choices=(): (t.discount != 1) & ((t.discount != 0) | ~t.last),
    'a discount that is neither 0 nor 1, or 0 before the end of the episode',
    '0 at the LAST timestep of an episode that terminated, else 1',
  ),
  'mask': TimestepRule(
    _allows_nothing,
    f'an {MASK} that allows nothing',
    'at least one choice for each part of an action, but with the LAST timestep of an episode that '
    'terminated, of discount 0',
  ),
}


def broken_rules(stream: TimeStep, space: Any) -> Iterator[tuple[str, tuple[int, int]]]:
  """Yield the name of each rule that a stream [T, B] breaks, and the first place (t, b).

  The stream begins with a reset, and its arrays are NumPy's. `space` is that of the actions.
  """
  last: Any = stream.last
  begins, choices = np.concatenate([np.ones_like(last[:1]), last[:-1]]), choices_of(space)
  for name, rule in RULES.items():
    broken = rule.is_broken(stream, begins, choices)
    if broken is not None and broken.any():
      t, b = np.argwhere(broken)[0].tolist()
      yield name, (t, b)
