"""Settings for a run that names an environment or an agent, but no preset. Importing this does not import jax.

One table, by agent and kind of environment. What it does not list has the defaults of the agent's class
and of Config. The returns they reach are in benchmarks/results/defaults.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from podrace.config import Config, agent_name
from podrace.envs.registry import HOST_LIBRARIES

Kind = Literal['vector', 'grid', 'pixels', 'continuous']

KINDS: Mapping[Kind, str] = {  # with discrete actions, but for the last
  'vector': 'numbers',
  'grid': 'small images, as of MinAtar and MiniGrid',
  'pixels': 'images of 36 pixels a side and more',
  'continuous': 'actions are numbers',
}


@dataclasses.dataclass(frozen=True)
class Defaults:
  """The sizes of a run, and those fields of its agent that differ from the class' defaults."""

  num_envs: int
  unroll_length: int
  agent: Mapping[str, Any]  # by path: network.activation


def _buffer(**settings: Any) -> dict[str, Any]:
  return {f'buffer.{name}': value for name, value in settings.items()}


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
    64, 128, {'learning_rate': 1e-3, 'minibatches': 8, 'network.activation': 'relu'}
  ),
  ('ppo', 'pixels'): Defaults(
    16, 64,
    CONVOLUTIONS | {'learning_rate': 5e-4, 'epochs': 3, 'clip': 0.1, 'network.activation': 'relu'},
  ),
  ('ppo', 'continuous'): Defaults(
    64, 64,
    NORMALIZED | {'learning_rate': 1e-3, 'epochs': 10, 'minibatches': 8, 'entropy_cost': 0.0},
  ),
  ('impala', 'vector'): Defaults(64, 16, {'learning_rate': 1e-3}),
  ('impala', 'grid'): Defaults(64, 16, {'learning_rate': 1e-3, 'max_grad_norm': 1.0}),
  ('impala', 'pixels'): Defaults(
    16, 20, CONVOLUTIONS | {'learning_rate': 5e-4, 'max_grad_norm': 0.5, 'entropy_cost': 0.003}
  ),
  ('impala', 'continuous'): Defaults(
    64, 16, NORMALIZED | {'learning_rate': 1e-3, 'max_grad_norm': 1.0, 'entropy_cost': 0.0}
  ),
  ('dqn', 'vector'): Defaults(
    16, 4,
    _buffer(capacity=50_000, batch_size=128, min_size=2_000, samples_per_insert=16.0)
    | {'network.hidden': (128, 128), 'n_step': 3, 'epsilon': 0.02, 'epsilon_steps': 5_000},
  ),
  ('dqn', 'grid'): Defaults(
    16, 4,
    _buffer(batch_size=64, min_size=5_000, samples_per_insert=8.0)
    | {'network.hidden': (128,), 'n_step': 3, 'epsilon': 0.01},
  ),
  ('dqn', 'pixels'): Defaults(
    16, 8,
    CONVOLUTIONS | _buffer(min_size=20_000)
    | {'learning_rate': 1e-4, 'n_step': 3, 'target_period': 2_000, 'epsilon': 0.01, 'epsilon_steps': 50_000},
  ),
  ('r2d2', 'vector'): Defaults(32, 20, SEQUENCES),
  ('r2d2', 'grid'): Defaults(32, 20, SEQUENCES),
  ('r2d2', 'pixels'): Defaults(
    16, 40,
    CONVOLUTIONS | _buffer(batch_size=8, min_size=20_000, samples_per_insert=0.1)
    | {'sequence': 40, 'learning_rate': 3e-4, 'adam_epsilon': 1e-5, 'target_period': 150},
  ),
  ('muesli', 'vector'): Defaults(32, 16, {'learning_rate': 1e-3, 'discount': 0.99}),
  ('muesli', 'grid'): Defaults(
    64, 16,
    {'learning_rate': 1e-3, 'discount': 0.99, 'capacity': 200_000, 'network.hidden': (128,), 'network.latent': 128},
  ),
  ('muesli', 'pixels'): Defaults(
    16, 20,
    CONVOLUTIONS
    | {'batch_size': 16, 'min_size': 20_000, 'discount': 0.99, 'network.latent': 256, 'network.dynamics_hidden': (256,)},
  ),
  ('sac', 'continuous'): Defaults(8, 8, CONTROL | {'temperature_learning_rate': 1e-3}),
  ('d4pg', 'continuous'): Defaults(8, 8, CONTROL | {'actor_learning_rate': 5e-4, 'n_step': 3}),
  ('muzero', 'vector'): Defaults(
    16, 4, PLANNING | _buffer(samples_per_insert=16.0) | {'n_step': 20, 'discount': 0.99}
  ),
  ('muzero', 'grid'): Defaults(
    32, 4, PLANNING | {'network.hidden': (256,), 'network.latent': 128, 'bootstrap': 'target'}
  ),
  ('muzero', 'pixels'): Defaults(
    16, 8,
    _buffer(batch_size=64, min_size=20_000, samples_per_insert=4.0)
    | {'network.torso': 'impala', 'network.hidden': (256,), 'network.latent': 256, 'bootstrap': 'target'},
  ),
  ('muzero', 'continuous'): Defaults(
    8, 8,
    PLANNING | _buffer(samples_per_insert=128.0, priority_exponent=0.0)
    | {
      'simulations': 12, 'sampled_actions': 12, 'n_step': 3, 'discount': 0.97, 'bootstrap': 'target',
      'target_period': 100, 'entropy_cost': 0.01,
    },
  ),
}  # fmt: skip


def with_defaults(config: Config, env: str) -> Config:
  """`config` with what the table has for its agent in `env`, which is made to be looked at."""
  name = agent_name(config.agent)
  if all(name != agent for agent, _ in TABLE):
    return config
  observation_space, action_space = spaces_of(env)
  found = TABLE.get((name, kind_of(observation_space, action_space)))
  if found is None:
    return config
  settings = dict(found.agent)
  if not _has_floats(observation_space):
    settings.pop('normalize_observations', None)
  agent = config.agent
  for path, value in settings.items():
    agent = _set(agent, path.split('.'), value)
  return dataclasses.replace(
    config, agent=agent, num_envs=found.num_envs, unroll_length=found.unroll_length
  )


def _set(settings: Any, path: list[str], value: Any) -> Any:
  name, *rest = path
  inner = _set(getattr(settings, name), rest, value) if rest else value
  return dataclasses.replace(settings, **{name: inner})


def spaces_of(name: str) -> tuple[Any, Any]:
  """The spaces of an environment, of observations and actions."""
  from podrace import envs
  from podrace.envs.host import base as host

  on_host = name.partition(':')[0] in HOST_LIBRARIES
  env: Any = host.make(name) if on_host else envs.make(name)
  return env.observation_space, env.action_space


def kind_of(observation_space: Any, action_space: Any) -> Kind:
  """The kind of environment that has these spaces."""
  from gymnasium import spaces

  from podrace.envs.spaces import PIXELS
  from podrace.networks.observations import image_sides

  if isinstance(action_space, spaces.Box):
    return 'continuous'
  sides = image_sides(observation_space)
  if not sides:
    return 'vector'
  return 'pixels' if min(sides) >= PIXELS else 'grid'


def _has_floats(space: Any) -> bool:
  """Whether there is anything in a space that `normalize_observations` is for."""
  import numpy as np

  from podrace.envs.spaces import UNSEEN, leaves

  found = [s for path, s in leaves(space) if path.split('/')[1:2] not in [[x] for x in UNSEEN]]
  return any(np.issubdtype(s.dtype, np.floating) for s in found)


def rows() -> list[tuple[str, str]]:
  """(agent and kind, what is set) of the table, for `podrace train --help`."""
  return [
    (
      f'{agent}, {kind}',
      ' '.join(
        [
          f'--num-envs {d.num_envs} --unroll-length {d.unroll_length}',
          *(f'--agent.{_flag(path)} {_shown(value)}' for path, value in d.agent.items()),
        ]
      ),
    )
    for (agent, kind), d in TABLE.items()
  ]


def _flag(path: str) -> str:
  return '.'.join(part.rstrip('_').replace('_', '-') for part in path.split('.'))


def _shown(value: Any) -> str:
  return ' '.join(map(str, value)) if isinstance(value, tuple) else str(value)
