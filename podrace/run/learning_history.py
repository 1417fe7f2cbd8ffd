"""The metrics of a run so far, as much as the signs of failures need."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from podrace.system.files.schema import is_number

RECENT = 10  # lines that are kept
SMOOTH = 5  # returns in a mean


@dataclasses.dataclass
class Fall:
  """The returns of a seed: whether they have lost half of their gain.

  Attributes:
    first: the first return.
    recent: the newest returns, at most SMOOTH.
    best: the largest mean of SMOOTH returns.
    since: step since which the recent mean is nearer to `first` than to `best`; None if it is not.
  """

  first: float | None = None
  recent: list[float] = dataclasses.field(default_factory=list)
  best: float = -math.inf
  since: float | None = None

  def add(self, step: float, value: float, error: float) -> None:
    """Count a return with the standard error `error`."""
    self.first = value if self.first is None else self.first
    self.recent = [*self.recent[1 - SMOOTH :], value]
    if len(self.recent) < SMOOTH:
      return
    mean = statistics.mean(self.recent)
    self.best = max(self.best, mean)
    gain = self.best - self.first
    fallen = gain > 0.02 * abs(self.first) + 4 * error and mean < self.first + gain / 2
    self.since = (step if self.since is None else self.since) if fallen else None


@dataclasses.dataclass
class History:
  """The metrics of a run so far, as much as the checks need.

  Attributes:
    agent: the innermost agent. Its settings bound some metrics.
    total_steps: of the run.
    warm: whether the run began with learned parameters, so that its first return may be its best.
    lines: the newest lines, numbers only.
    returns: the newest returns, of lines with episodes.
    early: the returns of the first SMOOTH lines with episodes.
    count: the number of all lines.
    gradient_steps: the number of all gradient steps.
    first: the first number of each metric.
    lowest: the least number of each metric.
    highest: the largest number of each metric.
    falls: of each seed.
  """

  agent: Any
  total_steps: int
  warm: bool = False
  lines: list[dict[str, float]] = dataclasses.field(default_factory=list)
  returns: list[float] = dataclasses.field(default_factory=list)
  early: list[float] = dataclasses.field(default_factory=list)
  count: int = 0
  gradient_steps: float = 0.0
  first: dict[str, float] = dataclasses.field(default_factory=dict)
  lowest: dict[str, float] = dataclasses.field(default_factory=dict)
  highest: dict[str, float] = dataclasses.field(default_factory=dict)
  falls: list[Fall] = dataclasses.field(default_factory=list)

  def add(self, line: dict[str, Any]) -> None:
    """Count a line of metrics."""
    numbers = {name: float(value) for name, value in line.items() if is_number(value)}
    if line.get('episodes') and line.get('episode_return') is None:
      numbers['returns_not_finite'] = 1.0
    self.gradient_steps += numbers.get('gradient_steps', 0.0)
    numbers |= _rates(numbers)
    self.lines = [*self.lines[1 - RECENT :], numbers]
    if 'episode_return' in numbers:
      self.returns = [*self.returns[1 - SMOOTH :], numbers['episode_return']]
      self.early = [*self.early, numbers['episode_return']][:SMOOTH]
    self._follow(line.get('episode_return_by_seed') or [line.get('episode_return')], numbers)
    self.count += 1
    for name, value in numbers.items():
      self.first.setdefault(name, value)
      self.lowest[name] = min(value, self.lowest.get(name, value))
      self.highest[name] = max(value, self.highest.get(name, value))

  def _follow(self, returns: list[Any], numbers: dict[str, float]) -> None:
    """Count the return of each seed in a line."""
    if len(self.falls) != len(returns):
      self.falls = [Fall() for _ in returns]
    error = numbers.get('return_error', 0.0) * math.sqrt(len(returns))
    for fall, value in zip(self.falls, returns, strict=True):
      if is_number(value) and 'step' in numbers:
        fall.add(numbers['step'], float(value), error)

  @property
  def progress(self) -> float:
    """Share of the run's steps that are made."""
    return self.lines[-1].get('step', 0.0) / max(1, self.total_steps)

  def newest(self, name: str, n: int) -> list[float]:
    """Return a metric in the newest `n` lines, [] unless all of them have it."""
    values = [line[name] for line in self.lines[-n:] if name in line]
    return values if len(values) == n else []

  @property
  def stagnates(self) -> bool:
    """Whether recent returns exceed `start` by less than 2% and a standard error.

    Three lines with episodes are needed to tell. Returns that have risen to the best of the run,
    and stay there, do not stagnate. With learned parameters at the start, returns have to be lower
    than the first line's by as much.
    """
    if len(self.returns) < 3:
      return False
    recent, first = statistics.mean(self.returns), self.first['episode_return']
    margin = 0.02 * abs(first) + self.first.get('return_error', 0.0)
    if self.warm:
      return recent <= first - margin
    lowest, highest = self.lowest['episode_return'], self.highest['episode_return']
    is_best = min(self.returns) == highest > lowest + margin
    return not is_best and recent <= self.start + margin

  @property
  def is_below_start(self) -> bool:
    """Whether recent returns are below `start` by 2% and 4 standard errors."""
    if len(self.returns) < SMOOTH or self.plays_itself:
      return False
    start, error = self.start, self.highest.get('return_error', 0.0)
    return statistics.mean(self.returns) < start - 0.02 * abs(start) - 4 * error

  @property
  def start(self) -> float:
    """Mean return of the first line or of the first SMOOTH lines, whichever is lower.

    A policy may become good within these lines. In the first one, episodes that end early by
    success may be the only ones.
    """
    first = self.first['episode_return']
    return min(first, statistics.mean(self.early or [first]))

  def stays(self, name: str, n: int, low: float = -math.inf, high: float = math.inf) -> bool:
    """Return whether a metric lay within a range in each of the newest `n` lines."""
    values = self.newest(name, n)
    return bool(values) and all(low <= x <= high for x in values)

  @property
  def plays_itself(self) -> bool:
    """Whether the agent is both players, so that returns tell nothing of its strength."""
    return bool(getattr(self.agent, 'discount', 1.0) < 0)

  @property
  def horizon(self) -> float:
    """Number of steps that the agent's discount counts: 1 / (1 - discount)."""
    discount = abs(getattr(self.agent, 'discount', 1.0))  # below 0 for two players
    return 1 / (1 - discount) if discount < 1 else math.inf


def _rates(line: dict[str, float]) -> dict[str, float]:
  """Return numbers that follow from a line's.

  They are the standard error of the mean return, the reward of a step in the better episodes, and
  SAC's reward for entropy.
  """
  rates = {}
  if line.get('episodes') and 'episode_return_std' in line:
    rates['return_error'] = line['episode_return_std'] / math.sqrt(line['episodes'])
  if line.get('episode_length') and 'episode_return' in line:
    size = abs(line['episode_return']) + line.get('episode_return_std', 0.0)
    rates['reward_rate'] = size / line['episode_length']
  if 'temperature' in line and 'entropy' in line:
    rates['entropy_reward'] = abs(line['temperature'] * line['entropy'])
  return rates
