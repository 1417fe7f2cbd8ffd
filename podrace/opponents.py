"""Trained agents as opponents in games of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from podrace.envs.registry import parse
from podrace.errors import UsageError
from podrace.evaluate import evaluable, newest_params
from podrace.record import load_config
from podrace.types import MID, Array, TimeStep


def from_run(run_dir: Path, game: str) -> Callable[[Any, Any, Array], Array]:
  """How the newest checkpoint of a run moves in a game of pgx: as in training, but without a search.

  Of a run of several seeds it is the first one.

  Raises:
    UsageError: if there is no such run or checkpoint, it goes on, has another game, or has a memory of its own.
  """
  config = load_config(run_dir)
  library, theirs, _ = parse(config.env)
  if (library, theirs) != ('pgx', game):
    raise UsageError(f'opponent {run_dir} has learned {config.env}, not pgx:{game}')
  if not (run_dir / 'summary.json').exists():
    raise UsageError(
      f'opponent {run_dir} has not come to its end: its newest checkpoint may change; wait for it, or go on with it'
    )
  agent, _ = evaluable(config)
  if hasattr(agent, 'simulations'):
    agent = dataclasses.replace(agent, simulations=0)
  ids = jnp.zeros(1, jnp.int32)
  if jax.tree.leaves(jax.eval_shape(agent.initial_state, ids)):
    raise UsageError(f'opponent {run_dir} is recurrent: an opponent has no memory')
  params = jax.device_get(newest_params(config, agent, run_dir)[1])
  if config.seeds > 1:
    params = jax.tree.map(lambda x: x[0], params)

  def move(state: Any, observation: Any, key: Array) -> Array:
    seen = jax.tree.map(lambda x: x[None], observation)
    timestep = TimeStep(seen, jnp.zeros(1), jnp.ones(1), jnp.full(1, MID, jnp.int8))
    output, _ = agent.act(params, agent.initial_state(ids), timestep, key)
    action: Array = output.action[0]
    return action

  return move
