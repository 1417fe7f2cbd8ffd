"""Trained agents as opponents in two-player games."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from podrace import hooks
from podrace.envs.adapters.pgx import OPPONENTS
from podrace.envs.env_names import full_name, parse
from podrace.errors import UnreadableFile, UsageError
from podrace.networks import is_recurrent
from podrace.run.directory import load_config, read_record
from podrace.run.saved_params import restore_params
from podrace.settings import user_code
from podrace.settings.agents import AGENTS, agent_name
from podrace.settings.resolved import Resolved
from podrace.system.files.schema import NEWEST
from podrace.types import MID, Array, TimeStep

CHAIN = 100  # most generations of opponents, each trained against the one before


def check_chain(run_dir: Path, env: str) -> None:
  """Follow the records of opponents to the first generation, from a run that was trained in `env`.

  Raises:
    UsageError: if the chain is a circle, or longer than CHAIN.
  """
  seen = [run_dir]
  while (opponent := _opponent_of(env)) is not None:
    run_dir = Path(opponent)
    if any(_is_same(run_dir, before) for before in seen):
      raise UsageError(f'opponent {seen[0]} cannot be: {run_dir} is an opponent of itself')
    if len(seen) == CHAIN:
      raise UsageError(f'opponent {seen[0]} has more than {CHAIN} generations of opponents')
    seen.append(run_dir)
    try:
      record = read_record(run_dir)
    except UnreadableFile as e:
      raise UsageError(
        f'opponent {seen[0]} was trained against one that cannot be read: {e}'
      ) from e
    if record is None:  # the run was deleted
      return
    env = record['env']


def _has_memory(agent: Any, ids: Array) -> bool:
  """Return whether actions depend on earlier observations, for all that is known of the agent.

  The state of podrace's agents also has numbers that actions do not depend on, such as returns.
  """
  if agent_name(agent) in AGENTS:
    return any(map(is_recurrent, hooks.networks(agent).values()))
  return bool(jax.tree.leaves(jax.eval_shape(agent.initial_state, ids)))


def _opponent_of(env: str) -> str | None:
  """Return the directory that a pgx environment names as its opponent, or None."""
  library, _, options = parse(env)
  opponent = str(options.get('opponent', OPPONENTS[0]))
  return None if library != 'pgx' or opponent in OPPONENTS else opponent


def _without_trained(env: str) -> str:
  """Return the same game against a named opponent. An opponent's agent needs only its spaces."""
  if _opponent_of(env) is None:
    return env
  library, game, options = parse(env)
  del options['opponent']
  return full_name(library, game, options, {})


def _is_same(a: Path, b: Path) -> bool:
  try:
    return a.samefile(b)
  except (OSError, ValueError):  # ValueError: the name has a NUL
    return a.absolute() == b.absolute()


def load_opponent(
  run_dir: Path, game: str, checkpoint: str = NEWEST
) -> Callable[[Any, Any, Array], Array]:
  """Return the move function of a run's checkpoint in a pgx game, without a search.

  It acts as in training. Of a run of many seeds it is the first.

  Raises:
    UsageError: if there is no such run or checkpoint, or the run is unfinished, has another game,
      is recurrent, or is its own opponent.
  """
  config = load_config(run_dir, user_code.ALLOWED)
  library, trained_game, _ = parse(config.env)
  if (library, trained_game) != ('pgx', game):
    raise UsageError(f'opponent {run_dir} has learned {config.env}, not pgx:{game}')
  if not (run_dir / 'summary.json').exists():
    raise UsageError(
      f'opponent {run_dir} has not come to its end: its newest checkpoint may change; wait for it, '
      'or go on with it'
    )
  check_chain(run_dir, config.env)
  resolved = Resolved(dataclasses.replace(config, env=_without_trained(config.env))).acting
  agent = hooks.innermost(resolved.agent)
  if hasattr(agent, 'simulations'):
    agent = dataclasses.replace(agent, simulations=0)
  ids = jnp.zeros(1, jnp.int32)
  if _has_memory(agent, ids):
    raise UsageError(f'opponent {run_dir} is recurrent: an opponent has no memory')
  params = jax.device_get(restore_params(resolved, run_dir, checkpoint, 0).params)

  def move(state: Any, observation: Any, key: Array) -> Array:
    batched = jax.tree.map(lambda x: x[None], observation)
    timestep = TimeStep(batched, jnp.zeros(1), jnp.ones(1), jnp.full(1, MID, jnp.int8))
    output, _ = agent.act(params, agent.initial_state(ids), timestep, key)
    action: Array = output.action[0]
    return action

  return move
