"""Defaults of a run that names an environment or an agent, but no preset.

One table, by agent and kind of environment. Other settings have the defaults of the agent's class
and of Config. benchmarks/results/defaults.json has the returns that the defaults reach. Importing
this does not import jax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from podrace.envs.libraries import HOST_LIBRARIES, LIBRARIES
from podrace.fields import of_part, replace_paths
from podrace.settings.agents import agent_name
from podrace.settings.config import Common, Config

Kind = Literal['vector', 'grid', 'pixels', 'continuous']

KINDS: Mapping[Kind, str] = {  # actions are discrete in all but the last
  'vector': 'numbers',
  'grid': 'small images, as of MinAtar and MiniGrid',
  'pixels': 'images of 36 pixels a side and more',
  'continuous': 'actions are numbers',
}


@dataclasses.dataclass(frozen=True)
class Defaults:
  """The sizes of a run, and the fields of its agent that differ from the class defaults."""

  num_envs: int
  unroll_length: int
  agent: Mapping[str, Any]  # by path: network.activation

  @property
  def paths(self) -> dict[str, Any]:
    """All settings by path, the agent's under `agent.`."""
    sizes = {'num_envs': self.num_envs, 'unroll_length': self.unroll_length}
    return {**sizes, **of_part('agent', self.agent)}


_buffer = functools.partial(of_part, 'buffer')

# Without them positions on a board are learned slowly: benchmarks/notes.md.
SMALL_CONVOLUTIONS = {'network.torso': 'grid', 'network.hidden': (128,)}
CONVOLUTIONS = {'network.torso': 'impala', 'network.hidden': (256,)}
NORMALIZED = {'normalize_observations': True, 'normalize_rewards': True}
CONTROL = _buffer(batch_size=256, min_size=1_000, samples_per_insert=64.0) | {
  'actor.hidden': (128, 128),
  'critic.hidden': (128, 128),
  'actor_learning_rate': 1e-3,
  'critic_learning_rate': 1e-3,
}
PLANNING = _buffer(
  batch_size=128, min_size=2_000, priority_exponent=0.6, importance_exponent=0.4
) | {
  'network.hidden': (128,),
  'network.dynamics_hidden': (128,),
  'network.head_hidden': (64,),
}
SEQUENCES = _buffer(batch_size=32, min_size=5_000, samples_per_insert=2.0) | {
  'sequence': 20,
  'burn_in': 20,
  'learning_rate': 5e-4,
  'adam_epsilon': 1e-5,
  'target_period': 200,
}

TABLE: Mapping[tuple[str, Kind], Defaults] = {
  ('ppo', 'vector'): Defaults(64, 32, {'learning_rate': 1e-3, 'normalize_rewards': True}),
  ('ppo', 'grid'): Defaults(
    64, 128,
    SMALL_CONVOLUTIONS
    | {'learning_rate': 1e-3, 'minibatches': 8, 'network.activation': 'relu'},
  ),
  ('ppo', 'pixels'): Defaults(
    16, 64,
    CONVOLUTIONS | {'learning_rate': 5e-4, 'epochs': 3, 'clip': 0.1, 'network.activation': 'relu'},
  ),
  ('ppo', 'continuous'): Defaults(
    64, 64,
    NORMALIZED | {'learning_rate': 1e-3, 'epochs': 10, 'minibatches': 8, 'entropy_cost': 0.0},
  ),
  ('impala', 'vector'): Defaults(
    32, 16, {'learning_rate': 1e-3, 'max_grad_norm': 0.5, 'normalize_rewards': True}
  ),
  ('impala', 'grid'): Defaults(
    64, 16, SMALL_CONVOLUTIONS | {'learning_rate': 1e-3, 'max_grad_norm': 1.0}
  ),
  ('impala', 'pixels'): Defaults(
    16, 20, CONVOLUTIONS | {'learning_rate': 5e-4, 'max_grad_norm': 0.5, 'entropy_cost': 0.003}
  ),
  ('impala', 'continuous'): Defaults(
    16, 16, NORMALIZED | {'learning_rate': 3e-3, 'max_grad_norm': 1.0, 'entropy_cost': 0.0}
  ),
  ('dqn', 'vector'): Defaults(
    16, 4,
    _buffer(capacity=50_000, batch_size=128, min_size=2_000, samples_per_insert=16.0)
    | {'network.hidden': (128, 128), 'network.layer_norm': True}
    | {'n_step': 3, 'epsilon': 0.02, 'epsilon_steps': 5_000},
  ),
  ('dqn', 'grid'): Defaults(
    16, 4,
    SMALL_CONVOLUTIONS
    | _buffer(batch_size=64, min_size=5_000, samples_per_insert=8.0)
    | {'n_step': 3, 'epsilon': 0.01},
  ),
  ('dqn', 'pixels'): Defaults(
    16, 8,
    CONVOLUTIONS | _buffer(min_size=20_000)
    | {'learning_rate': 1e-4, 'n_step': 3, 'target_period': 2_000, 'epsilon': 0.01}
    | {'epsilon_steps': 50_000},
  ),
  ('r2d2', 'vector'): Defaults(32, 20, SEQUENCES),
  ('r2d2', 'grid'): Defaults(32, 20, SEQUENCES),
  ('r2d2', 'pixels'): Defaults(
    16, 40,
    CONVOLUTIONS | _buffer(batch_size=8, min_size=20_000, samples_per_insert=0.1)
    | {'sequence': 40, 'learning_rate': 3e-4, 'adam_epsilon': 1e-5, 'target_period': 150},
  ),
  ('pqn', 'vector'): Defaults(
    32, 64, {'learning_rate': 5e-4, 'epsilon': 0.2, 'network.hidden': (256, 256)}
  ),
  ('pqn', 'grid'): Defaults(
    128, 32,
    SMALL_CONVOLUTIONS
    | {'learning_rate': 5e-4, 'epochs': 2, 'minibatches': 32, 'lambda_': 0.65}
    | {'epsilon_share': 0.1},
  ),
  ('pqn', 'pixels'): Defaults(
    16, 32,
    {'network.torso': 'nature', 'network.hidden': (512,), 'epochs': 2, 'minibatches': 32}
    | {'lambda_': 0.65, 'epsilon': 0.01, 'epsilon_share': 0.1, 'anneal_learning_rate': False},
  ),
  ('muesli', 'vector'): Defaults(32, 16, {'learning_rate': 1e-3, 'discount': 0.99}),
  ('muesli', 'grid'): Defaults(
    64, 16,
    SMALL_CONVOLUTIONS
    | {'learning_rate': 1e-3, 'discount': 0.99, 'capacity': 200_000, 'network.latent': 128},
  ),
  ('muesli', 'pixels'): Defaults(
    16, 20,
    CONVOLUTIONS
    | {'batch_size': 16, 'min_size': 20_000, 'discount': 0.99}
    | {'network.latent': 256, 'network.dynamics_hidden': (256,)},
  ),
  ('sac', 'continuous'): Defaults(8, 8, CONTROL | {'temperature_learning_rate': 1e-3}),
  ('d4pg', 'continuous'): Defaults(8, 8, CONTROL | {'actor_learning_rate': 5e-4, 'n_step': 3}),
  ('qtopt', 'continuous'): Defaults(
    8, 8,
    _buffer(batch_size=256, min_size=1_000, samples_per_insert=64.0)
    | {'network.head_hidden': (128, 128), 'network.head': 'value', 'discount': 0.99},
  ),
  ('bc', 'vector'): Defaults(16, 16, {'network.hidden': (128, 128)}),
  ('bc', 'grid'): Defaults(16, 16, {'network.hidden': (128,)}),
  ('bc', 'pixels'): Defaults(16, 16, CONVOLUTIONS),
  ('bc', 'continuous'): Defaults(16, 16, {'network.hidden': (128, 128)}),
  ('muzero', 'vector'): Defaults(
    16, 4, PLANNING | _buffer(samples_per_insert=16.0) | {'n_step': 20, 'discount': 0.99}
  ),
  ('muzero', 'grid'): Defaults(
    32, 4, PLANNING | {'network.hidden': (256,), 'network.latent': 128, 'bootstrap': 'target'}
  ),
  ('muzero', 'pixels'): Defaults(
    16, 8,
    _buffer(batch_size=64, min_size=20_000, samples_per_insert=4.0)
    | CONVOLUTIONS
    | {'network.latent': 256, 'bootstrap': 'target'},
  ),
  ('muzero', 'continuous'): Defaults(
    8, 8,
    PLANNING | _buffer(samples_per_insert=128.0, priority_exponent=0.0)
    | {
      'simulations': 12, 'sampled_actions': 12, 'n_step': 3, 'discount': 0.97,
      'bootstrap': 'target', 'target_period': 100, 'entropy_cost': 0.01,
    },
  ),
}  # fmt: skip


def with_defaults(config: Config, env: str, log: str = '') -> Config:
  """Return `config` with the table's settings for its agent in `env`. Makes the environment.

  Args:
    config: the configuration.
    env: name of the environment; '' for the spaces of a log.
    log: its data set.
  """
  name = agent_name(config.agent)
  if all(name != agent for agent, _ in TABLE):
    return config
  row, _ = entry(name, env, log)
  return config if row is None else replace_paths(config, row.paths)


def entry(agent: str, env: str, log: str = '') -> tuple[Defaults | None, Kind]:
  """Return the entry of the table for an agent in `env`, and the kind of `env`.

  Makes the environment to read its spaces.
  """
  observation_space, action_space = spaces_of(env) if env else recorded_spaces(log)
  kind = kind_of(observation_space, action_space)
  row = TABLE.get((agent, kind))
  if row is not None and not _has_floats(observation_space):
    plain = {k: v for k, v in row.agent.items() if k != 'normalize_observations'}
    row = dataclasses.replace(row, agent=plain)
  return row, kind


# The kinds of listed environments, so that --help need not make them. Tests compare them.
OF_LIBRARY: Mapping[str, Kind] = {
  'podrace': 'vector', 'gymnax': 'vector', 'brax': 'continuous', 'jumanji': 'vector',
  'navix': 'grid', 'ale': 'pixels',
}  # fmt: skip
EXCEPTIONS: Mapping[str, Kind] = {
  'podrace:grasp': 'continuous',
  'podrace:maze': 'grid',
  **dict.fromkeys(
    (
      'gymnax:Pendulum-v1', 'gymnax:MountainCarContinuous-v0', 'gymnax:PointRobot-misc',
      'gymnax:Reacher-misc', 'gymnax:Swimmer-misc',
    ),
    'continuous',
  ),
  **dict.fromkeys(
    (
      'gymnax:Asterix-MinAtar', 'gymnax:Breakout-MinAtar', 'gymnax:Freeway-MinAtar',
      'gymnax:Seaquest-MinAtar', 'gymnax:SpaceInvaders-MinAtar', 'gymnax:Pong-misc',
      'jumanji:RubiksCube-v0', 'jumanji:RubiksCube-partly-scrambled-v0',
      'jumanji:FlatPack-v0', 'jumanji:Snake-v1',
    ),
    'grid',
  ),
}  # fmt: skip


def kind_named(env: str) -> Kind | None:
  """Return the kind of a listed environment; None if only its spaces tell."""
  library, _, name = env.partition(':')
  known = LIBRARIES.get(library) or HOST_LIBRARIES.get(library)
  if known is None or (known.names and name not in known.names):
    return None
  return EXCEPTIONS.get(env, OF_LIBRARY.get(library))


def reset_unused(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
  """Return the class defaults of a preset's settings that `changes` make meaningless.

  Without the reset, validation would refuse options that the user did not set.

  Args:
    config: the preset's configuration.
    changes: fields of Config that the user sets.
  """
  fields: set[str] = set()
  if changes.get('architecture') == 'anakin' and config.architecture == 'sebulba':
    fields |= {f.name for f in dataclasses.fields(Config)} - {
      f.name for f in dataclasses.fields(Common)
    }
  if changes.get('env', config.env) != config.env:
    fields |= {'eval_env'}
  if str(changes.get('eval_every', config.eval_every)) == '0':
    fields |= {'eval_env', 'eval_episodes', 'eval_video'}
  return {name: getattr(Config, name) for name in sorted(fields - changes.keys())}


def spaces_of(name: str) -> tuple[Any, Any]:
  """Return the observation space and the action space of an environment."""
  from podrace import envs
  from podrace.envs.host import base as host

  on_host = name.partition(':')[0] in HOST_LIBRARIES
  env: Any = host.make(name) if on_host else envs.make(name)
  return env.observation_space, env.action_space


def recorded_spaces(log: str) -> tuple[Any, Any]:
  """Return the observation space and the action space of a data set."""
  from podrace.envs.logs.minari_files import read_spaces

  return read_spaces(log)


def kind_of(observation_space: Any, action_space: Any) -> Kind:
  """Return the kind of environment that has these spaces."""
  from gymnasium import spaces

  from podrace.envs.spaces import KERNEL, PIXELS
  from podrace.networks.observations import image_sides

  if isinstance(action_space, spaces.Box):
    return 'continuous'
  sides = image_sides(observation_space)
  if not sides or min(sides) < KERNEL:
    return 'vector'
  return 'pixels' if min(sides) >= PIXELS else 'grid'


def _has_floats(space: Any) -> bool:
  """Return whether a space has floats, which `normalize_observations` needs."""
  import numpy as np

  from podrace.envs.spaces import leaves, seen

  return any(np.issubdtype(s.dtype, np.floating) for _, s in leaves(seen(space)))
