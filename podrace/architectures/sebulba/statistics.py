"""Statistics of the actors since the log was last read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from podrace.architectures.sebulba.pipe import Unroll
from podrace.envs.host.episodes import Totals
from podrace.topology import everyones


@dataclasses.dataclass
class Statistics:
  """Sums over the unrolls that the learner has used, as values that JSON has."""

  episodes: dict[str, Any] = dataclasses.field(default_factory=lambda: dataclasses.asdict(Totals()))
  unrolls: int = 0
  lag_sum: float = 0.0  # of the unrolls' means
  lag_max: int = 0
  restarts: int = 0
  dropped: int = 0
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by 'ACTIVITY GROUP'

  def add(self, unroll: Unroll, update: int) -> None:
    """Add an unroll that is used in the update-th update."""
    self.episodes = dataclasses.asdict(Totals(**self.episodes) + unroll.totals)
    self.unrolls += 1
    self.lag_sum += update - float(unroll.versions.mean())
    self.lag_max = max(self.lag_max, update - unroll.version)
    self.restarts += unroll.restarts
    self.dropped += unroll.dropped
    for activity, seconds in unroll.seconds.items():
      key = f'{activity} {unroll.group}'
      self.seconds[key] = self.seconds.get(key, 0.0) + seconds

  def shares(self, groups: range | None = None) -> dict[str, float]:
    """Return the shares of time by activity, of an actor thread's groups or of all, for the log."""
    sums: dict[str, float] = {}
    for key, seconds in sorted(self.seconds.items()):
      activity, _, group = key.partition(' ')
      if groups is None or int(group) in groups:
        sums[f'actor_{activity}'] = sums.get(f'actor_{activity}', 0.0) + seconds
    whole = sum(sums.values()) or 1.0
    return {k: round(x / whole, 4) for k, x in sums.items()}

  def metrics(self) -> dict[str, float]:
    """Return metrics for the log."""
    return {
      'policy_lag_mean': self.lag_sum / max(self.unrolls, 1),
      'policy_lag_max': self.lag_max,
      'env_restarts': self.restarts,
      'dropped_steps': self.dropped,
      **self.shares(),
    }

  def over_processes(self) -> Statistics:
    """Return the sum over all processes, which must all call this together."""
    if jax.process_count() == 1:
      return self
    whole = [self.unrolls, self.lag_sum, self.restarts, self.dropped]
    every = everyones([*self.episodes.values(), *whole, self.lag_max])
    sums, lag_max = every.sum(0), int(every[:, -1].max())
    unrolls, restarts, dropped = (int(x) for x in sums[[-5, -3, -2]])
    totals = Totals(int(sums[0]), float(sums[1]), float(sums[2]), int(sums[3]))
    episodes = dataclasses.asdict(totals)
    return Statistics(episodes, unrolls, float(sums[-4]), lag_max, restarts, dropped, self.seconds)
