"""The options of a process with environments, and the environments they name. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from podrace.distributed.environments.environment_messages import GROUPS
from podrace.distributed.net.address import check_address
from podrace.envs.host import base as host
from podrace.envs.host.base import HostSpec
from podrace.system.scheduling import cores


@dataclasses.dataclass(frozen=True)
class ClientOptions:
  """The options of `podrace envs`."""

  connect: str  # addresses of all learner processes, with commas between them
  env: str
  num_envs: int = 1
  workers: int = 0
  # ^ threads or processes that step; 0: two per core, at most one per core in a group
  groups: int = 0  # 0: the number that the learner advises
  seed: int | None = None
  keys: Path | None = None
  insecure: bool = False
  deadline: float = 60.0  # seconds that environments may take for a step
  give_up: float = 0.0  # seconds without a learner after which to end; 0: never

  def __post_init__(self) -> None:
    for address in self.addresses:
      check_address(address, self.keys, self.insecure, '--connect')
    for name, minimum in (('num_envs', 1), ('workers', 0), ('groups', 0)):
      if getattr(self, name) < minimum:
        flag = name.replace('_', '-')
        raise ValueError(f'--{flag} must be at least {minimum}, not {getattr(self, name)}')
    if not (0 < self.deadline < math.inf and 0 <= self.give_up < math.inf):
      raise ValueError(
        f'--env-deadline must be more than 0, not {self.deadline}, and --give-up-after not '
        f'negative, not {self.give_up}'
      )
    if self.num_envs < len(self.addresses):
      raise ValueError(
        f'--num-envs {self.num_envs}: each of the {len(self.addresses)} learner processes of '
        '--connect needs at least one'
      )
    if self.groups > (limit := min(self.num_envs // len(self.addresses), GROUPS)):
      raise ValueError(
        f'--groups {self.groups}: the environments for a learner process are at most {limit} groups'
      )

  @property
  def addresses(self) -> list[str]:
    """The address of each learner process."""
    return self.connect.split(',')

  def parts(self) -> list[ClientOptions]:
    """Return the options for each learner process, with its share of environments and workers."""
    n = len(self.addresses)
    if n == 1:
      return [self]
    workers = max(1, (self.workers or 2 * cores()) // n)
    return [
      dataclasses.replace(
        self,
        connect=address,
        num_envs=self.num_envs // n + (i < self.num_envs % n),
        workers=workers,
        seed=None if self.seed is None else self.seed + (i << 32),
      )
      for i, address in enumerate(self.addresses)
    ]


def make_spec(name: str) -> HostSpec:
  """Return the kind of environment of a name.

  Raises:
    ValueError: if there is none, or it is written in JAX: the learner runs those itself.
  """
  library = name.partition(':')[0]
  if library not in host.registry.HOST_LIBRARIES:
    known = ', '.join(host.registry.HOST_LIBRARIES)
    raise ValueError(f'--env {name}: remote environments are those of {known}')
  return host.make(name)


def group_sizes(num_envs: int, groups: int, largest: int, best: int) -> list[int]:
  """Return the sizes of groups, which differ by at most 1.

  Args:
    num_envs: environments of all groups.
    groups: number of groups; 0 for `best`, or more if they would be too large.
    largest: size of a group, at most.
    best: number of groups that the learner advises.

  Raises:
    ValueError: if a group would be larger than `largest`.
  """
  minimum = -(-num_envs // largest)
  if groups and groups < minimum:
    raise ValueError(
      f'--groups {groups}: an actor thread of the learner takes groups of at most {largest} '
      f'environments, which makes {minimum} of {num_envs}'
    )
  count = groups or min(max(best, minimum), num_envs, GROUPS)
  if -(-num_envs // count) > largest:
    raise ValueError(
      f'--num-envs {num_envs}: a client has at most {GROUPS} groups of {largest} environments'
    )
  return [num_envs // count + (i < num_envs % count) for i in range(count)]
