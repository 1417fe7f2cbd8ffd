"""The settings of a run. Importing this does not import jax."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from podrace.fields import EnvName, FilePath, PlainText

MOST_SEEDS = 2**16  # of a run


@dataclasses.dataclass(frozen=True)
class Basics:
  """Settings of every run, of `train` and of `discover`."""

  agent: Any  # a frozen dataclass; its fields are --agent.FIELD
  env: EnvName = 'podrace:catch'
  # ^ LIB:NAME, with options after commas, for example podrace:memory,length=20
  num_envs: int = 64  # environments per seed, on all devices
  unroll_length: int = 16  # environment steps between updates
  total_steps: int = 1_000_000  # environment steps of each seed
  seed: int = 0  # first seed of the run
  devices: int | None = None
  # ^ number of devices: of all processes together, under Sebulba of each process; None: all
  log_every: int = 0  # steps between metrics; 0: 1% of the run
  checkpoint_every: int = 0  # steps between checkpoints; 0: a minute
  keep: int = 3  # number of checkpoints to keep

  @property
  def steps_per_update(self) -> int:
    """Environment steps of one update."""
    return self.num_envs * self.unroll_length

  @property
  def total_updates(self) -> int:
    """Updates of the whole run."""
    return -(-self.total_steps // self.steps_per_update)

  def updates(self, steps: int) -> int:
    """Return `steps` in updates, at least 1."""
    return max(1, round(steps / self.steps_per_update))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common(Basics):
  """Settings that every architecture reads."""

  architecture: Literal['anakin', 'sebulba'] = 'anakin'
  # ^ anakin: one compiled program; sebulba: actor threads and a learner
  seeds: int = 1  # agents in one program: seed, seed + 1, ...
  eval_every: int = 0  # steps between evaluations; 0: none
  eval_episodes: int = 32  # episodes of each evaluation and seed
  eval_env: EnvName = ''
  # ^ environment of evaluations, such as another opponent or unseen levels; none: that of
  #   training
  log: FilePath = ''
  # ^ Minari data set to learn from: its directory, or its name in Minari's home; see docs/logs.md
  log_share: PlainText = '1'
  # ^ share of the environments that replay --log, such as 1/2; the rest act in --env
  eval_video: bool = False  # film one episode of each evaluation, into videos/
  init_from: FilePath = ''  # start with the parameters of this run directory
  init_checkpoint: PlainText = 'newest'  # checkpoint of --init-from: newest, best or a step
  init_member: int | None = None  # seed of --init-from, counted from 0; None: all its seeds
  agree: Literal['all-reduce', 'gossip'] = 'all-reduce'
  # ^ gossip (anakin): average parameters with a neighbour instead of gradients with all devices
  gossip_graph: Literal['exponential', 'ring'] = 'exponential'
  # ^ graph of neighbours for gossip, see docs/gossip.md
  gossip_staleness: int = 0  # age of the neighbour's parameters in gossip, in updates: 0 or 1
  model_devices: int = 1  # number of devices that the parameters are split over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Common):
  """All settings of one training run, recorded as config.json.

  Only Sebulba reads the fields declared in this class.
  """

  lag: Literal['0', '1', 'async'] = '1'
  # ^ sebulba: updates by which the acting policy is older; async: any number
  max_lag: int = 4  # sebulba: limit of the lag with --lag async
  actor_devices: PlainText = ''
  # ^ sebulba: devices that act, such as 0,1. Default: all that do not learn, or the first quarter
  learner_devices: PlainText = ''
  # ^ sebulba: devices that learn, such as 2,3. Default: all that do not act; replay service: all
  actor_threads: int = 2  # sebulba: threads of each actor device
  actor_groups: int = 0
  # ^ sebulba: groups of each thread, of which one steps while another infers; 0: chosen by device
  env_batch_size: int = 0
  # ^ sebulba: act when this many environments of a thread are ready; 0: all of them
  env_threads: int = 0
  # ^ sebulba: threads that step environments, over all pools; 0: one for each core and group
  env_deadline: float = 60.0  # sebulba: seconds that a step of an environment may take
  envs: Literal['local', 'remote'] = 'local'
  # ^ sebulba: remote: environments of `podrace envs` processes
  max_wait_ms: float = 5.0
  # ^ remote: milliseconds to wait for more environments before acting on the ready ones
  replay: Literal['device', 'host', 'service'] = 'device'
  # ^ sebulba: place of the replay, for agents that have one; service: `podrace replay`
