"""Presets of `podrace discover`: functions that return a whole Discovery. Importing this does not import jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from podrace.settings.discovery import Discovery


def lpg_catch() -> Discovery:
  """LPG's rule on two boards of Catch: a minute or two. What `podrace discover` alone does."""
  from podrace.agents.lpg import LPG
  from podrace.agents.rules.lpg import Sizes
  from podrace.architectures.discovery.objective import ValueFunction
  from podrace.networks import ActorCritic, PolicyPredictor
  from podrace.settings.discovery import Discovery

  return Discovery(
    agent=LPG(network=PolicyPredictor(hidden=(32,), predictions=8)),
    rule=Sizes(predictions=8, trajectory=32),
    value=ValueFunction(ActorCritic(hidden=(32,), initializer='lecun', activation='relu')),
    env='podrace:catch,rows=5,columns=5 podrace:catch,rows=4,columns=3',
    agents=8, num_envs=16, unroll_length=16, agent_updates=5, lifetime=200,
    entropy_cost=0.05, total_steps=5_000_000,
  )  # fmt: skip


def lpg_grid_worlds() -> Discovery:
  """LPG's rule on grid worlds of 5 x 5 in short lives: an hour of one core."""
  base = lpg_catch()
  return dataclasses.replace(
    base,
    agent=dataclasses.replace(base.agent, learning_rate=0.03),
    env='podrace:grid_worlds,size=5,objects=2',
    agents=64, unroll_length=20, lifetime=50, total_steps=400_000_000,
  )  # fmt: skip


def disco_catch() -> Discovery:
  """DiscoRL's small example: its rule on Catch of 5 x 5, two agents, 800 meta-steps of two updates each."""
  from podrace.agents.disco import Disco
  from podrace.agents.rules.disco import Sizes
  from podrace.architectures.discovery.objective import ValueFunction
  from podrace.networks import ActorCritic, Predictor
  from podrace.settings.discovery import Discovery

  network = Predictor(hidden=(512, 512), head_hidden=(256,), model_size=256)
  value = ValueFunction(ActorCritic(hidden=(256, 256), initializer='lecun', activation='relu'))
  return Discovery(
    agent=Disco(network=network, learning_rate=5e-4),
    rule=Sizes(),
    value=value,
    env='podrace:catch,rows=5,columns=5',
    agents=2, num_envs=32, unroll_length=16, agent_updates=2, lifetime=1_600,
    meta_learning_rate=5e-4, meta_optimizer='mean', total_steps=2_457_600,
  )  # fmt: skip


def disco_small() -> Discovery:
  """A rule of DiscoRL's kind with narrow layers, on Catch of 5 x 5: minutes on one core."""
  from podrace.agents.disco import Disco
  from podrace.agents.rules.disco import Sizes
  from podrace.architectures.discovery.objective import ValueFunction
  from podrace.networks import ActorCritic, Predictor
  from podrace.settings.discovery import Discovery

  network = Predictor(
    hidden=(64,), model_size=32, head_hidden=(32,), predictions=16, bins=41, max_value=4.0
  )
  # Adam's momentum lets a single update move an agent by a tenth of what the same gradient does in the end, so a
  # meta-gradient through two updates is nearly all noise: with K = 2 the rule stays at the return of chance.
  return Discovery(
    agent=Disco(network=network, lifetime=16, learning_rate=1e-2),
    rule=Sizes(predictions=16, trajectory=32, lifetime=16),
    value=ValueFunction(ActorCritic(hidden=(64,), initializer='lecun', activation='relu')),
    env='podrace:catch,rows=5,columns=5',
    agents=8, num_envs=8, unroll_length=16, agent_updates=10, lifetime=100,
    meta_learning_rate=3e-3, total_steps=9_011_200,
  )  # fmt: skip


PRESETS: dict[str, Callable[[], Discovery]] = {
  'lpg-catch': lpg_catch,
  'lpg-grid-worlds': lpg_grid_worlds,
  'disco-catch': disco_catch,
  'disco-small': disco_small,
}
