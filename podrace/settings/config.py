"""What a run is made of. Importing this does not import jax."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from podrace.fields import EnvName, FilePath, PlainText


@dataclasses.dataclass(frozen=True)
class Basics:
  """What every run has, of agents and of rules."""

  agent: Any  # a frozen dataclass; its fields are --agent.FIELD
  env: EnvName = 'podrace:catch'  # LIB:NAME, and options after commas: podrace:memory,length=20
  num_envs: int = 64  # over all devices; each seed has so many
  unroll_length: int = 16  # environment steps between updates
  total_steps: int = 1_000_000  # environment steps, of each seed
  seed: int = 0
  devices: int | None = None
  # ^ how many, of all processes together, or, under sebulba, of each process; None: all
  log_every: int = 0  # steps between metrics; 0: 1% of the run
  checkpoint_every: int = 0  # steps between checkpoints; 0: a minute
  keep: int = 3  # how many checkpoints

  @property
  def steps_per_update(self) -> int:
    return self.num_envs * self.unroll_length

  @property
  def total_updates(self) -> int:
    return -(-self.total_steps // self.steps_per_update)

  def updates(self, steps: int) -> int:
    """`steps` in updates, at least 1."""
    return max(1, round(steps / self.steps_per_update))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common(Basics):
  """What every architecture reads of a run's settings."""

  architecture: Literal['anakin', 'sebulba'] = 'anakin'
  seeds: int = 1  # independent agents trained in one program, from seed, seed + 1, ...
  eval_every: int = 0  # steps between evaluations into eval.jsonl, while training goes on; 0: none
  eval_episodes: int = 32  # of each evaluation, and each seed
  eval_env: EnvName = ''  # where they play: another opponent, or unseen levels; '': where it trains
  eval_video: bool = False  # films an episode of each, into videos/
  init_from: FilePath = ''  # a run directory: begins with the parameters of its newest checkpoint
  agree: Literal['all-reduce', 'gossip'] = 'all-reduce'
  # ^ gossip (anakin): average parameters with a neighbour, not gradients
  gossip_graph: Literal['exponential', 'ring'] = 'exponential'
  # ^ of gossip, see docs/gossip.md
  gossip_staleness: int = 0  # of gossip, in updates: 0 or 1
  model_devices: int = 1  # parameters are split over so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Common):
  """One run, exactly; recorded as config.json. Its own fields are those that only Sebulba reads."""

  lag: Literal['0', '1', 'async'] = '1'  # sebulba: of the acting policy, in updates; async: any
  max_lag: int = 4  # sebulba: with lag async, the most
  actor_devices: PlainText = ''
  # ^ sebulba: which act, as 0,1 (default: those that don't learn, else the first quarter; of one, that)
  learner_devices: PlainText = ''
  # ^ sebulba: which learn, as 2,3 (default: those that don't act; of one, that; --replay service: all)
  actor_threads: int = 2  # sebulba: for each actor device
  env_batch_size: int = 0  # sebulba: act on so many of a thread as are ready; 0: all together
  env_threads: int = 0  # sebulba: that step environments, over all pools; 0: one for each core
  env_deadline: float = 60.0  # sebulba: seconds that environments may take to answer
  envs: Literal['local', 'remote'] = 'local'  # sebulba: remote ones come by `podrace envs`
  max_wait_ms: float = 5.0  # remote: how long those that came wait for others, to be acted on
  replay: Literal['device', 'host', 'service'] = 'device'
  # ^ sebulba: where the past is, for agents that learn from it; service: `podrace replay`


# --- config.json --------------------------------------------------------------------------------


# --- binding ------------------------------------------------------------------------------------
