"""Presets of `podrace discover`: configurations by name. Importing this does not import jax."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podrace.fields import of_part, replace_paths
from podrace.settings.presets import Preset

if TYPE_CHECKING:
  from podrace.settings.discovery import Discovery


def _make_discovery(agent: Any, settings: Mapping[str, Any]) -> Discovery:
  """Return a configuration of meta-training; `settings` are of `Discovery`, by path."""
  from podrace.settings.discovery import Discovery, rules_of

  return replace_paths(Discovery(agent=agent, rule=rules_of(agent).Sizes()), settings)


_preset = functools.partial(Preset, make=_make_discovery)
_network, _rule, _value_network = (
  functools.partial(of_part, part) for part in ('network', 'rule', 'value.network')
)

PRESETS: Mapping[str, Preset] = {
  'lpg-catch': _preset(
    "LPG's rule on two boards of Catch: a minute or two. What `podrace discover` alone does.",
    'lpg',
    _network(hidden=(32,), predictions=8),
    {'env': 'podrace:catch,rows=5,columns=5 podrace:catch,rows=4,columns=3', 'agents': 8,
      'num_envs': 16, 'unroll_length': 16, 'agent_updates': 5, 'lifetime': 200,
      'entropy_cost': 0.05, 'total_steps': 5_000_000}
    | _rule(predictions=8, trajectory=32)
    | _value_network(hidden=(32,), initializer='lecun', activation='relu'),
  ),
  'lpg-grid-worlds': _preset(
    "LPG's rule on grid worlds of 5 x 5 in short lives: an hour of one core.",
    'lpg',
    {'learning_rate': 0.03} | _network(hidden=(32,), predictions=8),
    {'env': 'podrace:grid_worlds,size=5,objects=2', 'agents': 64, 'num_envs': 16,
      'unroll_length': 20, 'agent_updates': 5, 'lifetime': 50, 'entropy_cost': 0.05,
      'total_steps': 400_000_000}
    | _rule(predictions=8, trajectory=32)
    | _value_network(hidden=(32,), initializer='lecun', activation='relu'),
  ),
  'disco-catch': _preset(
    "DiscoRL's small example: its rule on Catch of 5 x 5, two agents, 800 meta-steps of two "
    'updates each.',
    'disco',
    {'learning_rate': 5e-4} | _network(hidden=(512, 512), head_hidden=(256,), model_size=256),
    {'env': 'podrace:catch,rows=5,columns=5', 'agents': 2, 'num_envs': 32, 'unroll_length': 16,
      'agent_updates': 2, 'lifetime': 1_600, 'meta_learning_rate': 5e-4, 'meta_optimizer': 'mean',
      'total_steps': 2_457_600}
    | _value_network(hidden=(256, 256), initializer='lecun', activation='relu'),
  ),
  'disco-small': _preset(
    "A rule of DiscoRL's kind with narrow layers, on Catch of 5 x 5: minutes on one core.",
    'disco',
    # Because of Adam's momentum, one update applies only a tenth of a gradient's total effect. A
    # meta-gradient through two updates is nearly all noise: with K = 2 the rule stays at chance.
    {'lifetime': 16, 'learning_rate': 1e-2}
    | _network(hidden=(64,), model_size=32, head_hidden=(32,), predictions=16, bins=41,
      max_value=4.0),
    {'env': 'podrace:catch,rows=5,columns=5', 'agents': 8, 'num_envs': 8, 'unroll_length': 16,
      'agent_updates': 10, 'lifetime': 100, 'meta_learning_rate': 3e-3, 'total_steps': 9_011_200}
    | _rule(predictions=16, trajectory=32, lifetime=16)
    | _value_network(hidden=(64,), initializer='lecun', activation='relu'),
  ),
}  # fmt: skip
