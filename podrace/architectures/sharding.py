"""How parameters are split over a model axis: by rules on the names of arrays.

The model axis is TF-Replicator's (Buchlovsky et al. 2019, arXiv 1902.00465). Rules, and XLA's work of splitting what is
computed with such arrays, are as in GSPMD (Xu et al. 2021, arXiv 2105.04663). Default rules split a layer's outputs and
the next layer's inputs, so that there is one sum over devices for the two (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace import hooks
from podrace.topology import MODEL, model_size, split_along
from podrace.types import Agent, TrainState

ADVICE = 'give --agent.network.sharding PATTERN AXIS ..., see docs/model_axis.md'


def train_specs(agent: Agent, train: TrainState, mesh: Mesh, leading: int = 0) -> TrainState:
  """A PartitionSpec for each array of a `TrainState` of shapes; P() for all of them without a model axis.

  Optimiser states and target networks have the names of the parameters within theirs, so the same rules fit.

  Args:
    leading: axes before those of the parameters, as of seeds.

  Raises:
    ValueError: if no parameter is split, or if one does not divide.
  """
  if model_size(mesh) == 1:
    return jax.tree.map(lambda x: P(), train)
  rules = hooks.sharding(agent)
  found = jax.tree_util.tree_map_with_path(
    lambda path, x: _spec(_name(path), x.shape, rules, model_size(mesh), leading), train
  )
  if all(spec == P() for spec in jax.tree.leaves(found.params, is_leaf=lambda x: x == P())):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(train)]
    names = [name for name in map(_name, paths) if name.startswith('params/')]
    raise ValueError(
      f'--model-devices {model_size(mesh)} splits no parameter: no rule of {rules or "the network, which has none,"} '
      f'is for any of {", ".join(names[:4])}{", ..." if names[4:] else ""}: {ADVICE}'
    )
  return found


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _spec(
  name: str, shape: tuple[int, ...], rules: Sequence[tuple[str, int]], size: int, leading: int
) -> P:
  """Of the first rule whose pattern is found in the name."""
  axes = [(pattern, axis) for pattern, axis in rules if re.search(pattern, name)]
  if not axes:
    return P()
  pattern, axis = axes[0]
  dims = len(shape) - leading
  place = leading + (axis if axis >= 0 else axis + dims)
  if not -dims <= axis < dims or shape[place] % size:
    raise ValueError(
      f'--model-devices {size} does not divide axis {axis} of {name} {list(shape[leading:])}, which the rule '
      f'{pattern!r} splits: give another size, or another rule: {ADVICE}'
    )
  return split_along(place, MODEL)
