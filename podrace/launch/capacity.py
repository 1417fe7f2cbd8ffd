"""What a run on so many machines makes and waits for, from the rates of its stages alone.

A model of a few divisions. Stages that share a processor take turns: the seconds of a step add up. Those on machines of
their own run at once: the slowest is what all others wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from podrace.errors import UsageError

HANDOVER = (
  162e-6  # seconds for a batch of an actor thread, besides its stages; by benchmarks/plan.py
)


@dataclasses.dataclass(frozen=True)
class Rates:
  """Steps/s of one machine that does one thing only, as `podrace bench sebulba` measures them."""

  environment: float
  inference: float
  learner: float
  batch: float  # environments of an actor thread
  step_bytes: float  # of a step in an unroll
  shared: bool  # actors and learner have the same devices

  def __post_init__(self) -> None:
    for name in ('environment', 'inference', 'learner', 'batch', 'step_bytes'):
      if not 0 < getattr(self, name) < float('inf'):
        raise UsageError(f'rates: {name} must be more than 0, not {getattr(self, name)}')

  @classmethod
  def of_bench(cls, found: Mapping[str, Any]) -> Rates:
    """Of the JSON that `podrace bench sebulba` prints.

    Raises:
      UsageError: for anything else.
    """
    try:
      batch = found['num_envs'] / found['threads']
      step_bytes = found['bytes']['actor_thread'] / (batch * found['unroll_length'])
      environment, inference, learner = (
        float(found[k]) for k in ('environment', 'inference', 'learner')
      )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as e:
      raise UsageError(
        f'these are no rates as `podrace bench sebulba` prints them ({type(e).__name__}: {e})'
      ) from e
    return cls(environment, inference, learner, batch, step_bytes, 'minimum' not in found)

  @property
  def acting(self) -> float:
    """Environments and inference by turns, and what lies between."""
    return 1 / (1 / self.environment + 1 / self.inference + HANDOVER / self.batch)


@dataclasses.dataclass(frozen=True)
class Machines:
  """Those besides the learner's, and what all of them cost."""

  acting: int = 1  # that act, or have environments
  gbits: float = 10.0  # per second, into the learner's machine
  learner_price: float = 0.0  # dollars an hour
  acting_price: float = 0.0  # of each

  @property
  def price(self) -> float:
    return self.learner_price + self.acting * self.acting_price


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a run makes."""

  limits: Mapping[str, float]  # steps/s that each part could make
  price: float  # dollars an hour

  @property
  def waits_for(self) -> str:
    return min(self.limits, key=self.limits.__getitem__)

  @property
  def steps_per_s(self) -> float:
    return self.limits[self.waits_for]

  def hours(self, steps: float) -> float:
    return steps / self.steps_per_s / 3600


def one_machine(rates: Rates, price: float = 0.0) -> Estimate:
  """Sebulba in one process."""
  if not rates.shared:
    return Estimate({'acting': rates.acting, 'learner': rates.learner}, price)
  return Estimate({'all stages': 1 / (1 / rates.acting + 1 / rates.learner)}, price)


def seed(learner: Rates, acting: Rates, machines: Machines) -> Estimate:
  """Environments on other machines; the learner's infers for all."""
  by_turns = 1 / (1 / learner.inference + 1 / learner.learner + HANDOVER / learner.batch)
  own = {'learner': by_turns} if learner.shared else {'inference': learner.inference, 'learner': learner.learner}  # fmt: skip
  limits = {'environments': machines.acting * acting.environment, **own}
  return Estimate(limits | _wire(acting, machines), machines.price)


def acting_machines(learner: Rates, acting: Rates, machines: Machines) -> Estimate:
  """Environments and inference on other machines; replay is with the learner (IMPALA, Ape-X)."""
  limits = {'acting': machines.acting * acting.acting, 'learner': learner.learner}
  return Estimate(limits | _wire(acting, machines), machines.price)


def _wire(acting: Rates, machines: Machines) -> dict[str, float]:
  return {'network': machines.gbits * 1e9 / 8 / acting.step_bytes}


ESTIMATES = {'seed': seed, 'impala': acting_machines, 'apex': acting_machines}
