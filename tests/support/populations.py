"""Small populations, and the parts that they are made of."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import rule_files

from podrace.agents.disco import Disco
from podrace.agents.lpg import LPG
from podrace.agents.rules import disco, lpg
from podrace.architectures.discovery.members import Kind, Member
from podrace.architectures.discovery.objective import ValueFunction
from podrace.envs import make
from podrace.networks import ActorCritic, PolicyPredictor, Predictor
from podrace.run import build
from podrace.settings.discovery import Discovery

ENV = 'podrace:catch,rows=3,columns=3'
OTHER = 'podrace:catch,rows=4,columns=2'
LPG_SIZES = lpg.Sizes(predictions=3, trajectory=4, embedding=2)
LPG_AGENT = LPG(
  network=PolicyPredictor(hidden=(4,), activation='tanh', predictions=3), learning_rate=0.02
)
DISCO_AGENT = Disco(
  network=Predictor(
    hidden=(8,), model_size=4, head_hidden=(4,), predictions=12, bins=11, max_value=4.0
  ),
  lifetime=6,
)
VALUE = ValueFunction(ActorCritic(hidden=(4,), initializer='lecun'))


def config(**settings: Any) -> Discovery:
  """A population of LPG's, unless `agent` is another."""
  agent = settings.get('agent', LPG_AGENT)
  rule = LPG_SIZES if isinstance(agent, LPG) else rule_files.SIZES
  given: dict[str, Any] = dict(
    agent=agent, rule=rule, value=VALUE, env=ENV, num_envs=3, unroll_length=4, agents=2, devices=1,
    agent_updates=2, lifetime=100, capacity=200, total_steps=10_000,
  )  # fmt: skip
  return Discovery(**given | settings)


def kind(updates: int = 2, **settings: Any) -> Kind:
  """What the members of a group have in common."""
  return program(**settings, agent_updates=updates).kinds[0]


def member(kind: Kind, number: int = 0) -> Member:
  zero = jnp.int32(0)
  return jax.jit(functools.partial(kind.begin, jax.random.key(0)))(jnp.int32(number), zero, zero)


def group(kind: Kind, ages: list[int], key: Any) -> Member:
  """Members 0, 1, ... in their first lives."""

  def begin(number: Any, age: Any) -> Member:
    return kind.begin(key, number, jnp.int32(0), age)

  numbers = jnp.arange(len(ages), dtype=jnp.int32)
  found: Member = jax.jit(jax.vmap(begin))(numbers, jnp.array(ages, jnp.int32))
  return found


def spaces_of(env: str = ENV) -> tuple[Any, Any]:
  made = make(env)
  return made.observation_space, made.action_space


def lpg_rule(seed: int = 0) -> dict[str, Any]:
  return jax.jit(lambda key: lpg.init(key, LPG_SIZES))(jax.random.key(seed))


def disco_rule(seed: int = 0) -> dict[str, Any]:
  return jax.jit(lambda key: disco.init(key, rule_files.SIZES))(jax.random.key(seed))


def program(**settings: Any) -> Any:
  """The compiled functions of a population."""
  return build.meta_training(config(**settings))
