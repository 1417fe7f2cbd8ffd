"""The speed, bottleneck and price of a run on many machines, from the rates of its stages alone.

A model of a few divisions. Stages that share a processor take turns, so the seconds of a step add
up. Stages on separate machines run at the same time, so the slowest one decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from podrace.errors import UsageError
from podrace.fields import SMALLEST

HANDOVER = 162e-6  # seconds for a batch of an actor thread, besides its stages; benchmarks/plan.py


@dataclasses.dataclass(frozen=True)
class Rates:
  """Rates of one machine's stages, each measured alone by `podrace bench sebulba`.

  Attributes:
    environment: steps/s of the environments.
    inference: steps/s of inference.
    learner: steps/s of the learner.
    batch: the number of environments of an actor thread.
    step_bytes: bytes of a step in an unroll.
    shared: whether actors and learner have the same devices.
  """

  environment: float
  inference: float
  learner: float
  batch: float
  step_bytes: float
  shared: bool

  def __post_init__(self) -> None:
    for name in ('environment', 'inference', 'learner', 'batch', 'step_bytes'):
      if not SMALLEST <= (value := getattr(self, name)) <= 1 / SMALLEST:
        raise UsageError(f'rates: {name} must be {SMALLEST:g} to {1 / SMALLEST:g}, not {value}')

  @classmethod
  def from_bench(cls, result: Mapping[str, Any]) -> Rates:
    """Return the rates in the JSON that `podrace bench sebulba` prints.

    Raises:
      UsageError: for any other JSON.
    """
    try:
      batch = result['num_envs'] / result['threads']
      step_bytes = result['bytes']['actor_thread'] / (batch * result['unroll_length'])
      environment, inference, learner = (
        float(result[k]) for k in ('environment', 'inference', 'learner')
      )
    except (KeyError, TypeError, ValueError, ArithmeticError) as e:
      raise UsageError(
        f'these are no rates as `podrace bench sebulba` prints them ({type(e).__name__}: {e})'
      ) from e
    return cls(environment, inference, learner, batch, step_bytes, 'minimum' not in result)

  @property
  def acting(self) -> float:
    """Steps/s of environments and inference by turns, with the time between them."""
    return 1 / (1 / self.environment + 1 / self.inference + HANDOVER / self.batch)


@dataclasses.dataclass(frozen=True)
class Machines:
  """The machines of a run.

  Attributes:
    acting: the number of machines that act, or have environments.
    gbits: gigabits per second into the learner's machine.
    learner_price: dollars an hour of the learner's machine.
    acting_price: dollars an hour of each acting machine.
  """

  acting: int = 1
  gbits: float = 10.0
  learner_price: float = 0.0
  acting_price: float = 0.0

  @property
  def price(self) -> float:
    """Dollars an hour of all machines."""
    return self.learner_price + self.acting * self.acting_price


@dataclasses.dataclass(frozen=True)
class Estimate:
  """The speed and the price of a run.

  Attributes:
    limits: the largest steps/s of each part.
    price: dollars an hour.
  """

  limits: Mapping[str, float]
  price: float = 0.0

  @property
  def waits_for(self) -> str:
    """The slowest part."""
    return min(self.limits, key=self.limits.__getitem__)

  @property
  def steps_per_s(self) -> float:
    """Steps/s of the run."""
    return self.limits[self.waits_for]

  def hours(self, steps: float) -> float:
    """Return the hours that a run of `steps` steps takes."""
    return steps / self.steps_per_s / 3600


def one_machine(rates: Rates) -> Estimate:
  """Estimate Sebulba in one process."""
  if not rates.shared:
    return Estimate({'acting': rates.acting, 'learner': rates.learner})
  return Estimate({'all stages': 1 / (1 / rates.acting + 1 / rates.learner)})


def seed(learner: Rates, acting: Rates, machines: Machines) -> Estimate:
  """Estimate environments on acting machines, with inference on the learner's (SEED)."""
  by_turns = 1 / (1 / learner.inference + 1 / learner.learner + HANDOVER / learner.batch)
  own = {'inference': learner.inference, 'learner': learner.learner}
  if learner.shared:
    own = {'learner': by_turns}
  limits = {'environments': machines.acting * acting.environment, **own}
  return Estimate(limits | _wire(acting, machines), machines.price)


def acting_machines(learner: Rates, acting: Rates, machines: Machines) -> Estimate:
  """Estimate acting on acting machines, with replay on the learner's (IMPALA, Ape-X)."""
  limits = {'acting': machines.acting * acting.acting, 'learner': learner.learner}
  return Estimate(limits | _wire(acting, machines), machines.price)


def _wire(acting: Rates, machines: Machines) -> dict[str, float]:
  return {'network': machines.gbits * 1e9 / 8 / acting.step_bytes}


ESTIMATES = {'seed': seed, 'impala': acting_machines, 'apex': acting_machines}
