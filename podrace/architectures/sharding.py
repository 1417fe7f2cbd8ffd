"""Splits parameters over a model axis, by rules on the names of arrays.

The model axis is TF-Replicator's (Buchlovsky et al. 2019, arXiv 1902.00465). Rules on arrays, from
which XLA splits the computation, are as in GSPMD (Xu et al. 2021, arXiv 2105.04663). Default rules
split a layer's outputs and the next layer's inputs, so that there is one sum over devices for the
two (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import hooks
from podrace.topology import MODEL, model_size, split_along
from podrace.types import Agent, TrainState

ADVICE = 'give --agent.network.sharding PATTERN AXIS ..., see docs/model_axis.md'


def train_specs(agent: Agent, train: TrainState, mesh: Mesh, leading: int = 0) -> TrainState:
  """Return a PartitionSpec for each array of a `TrainState` of shapes; P() without a model axis.

  Names of optimiser states and target networks contain the parameters' names, so the same rules
  fit.

  `leading` is the number of axes before the parameters' own, such as an axis of seeds.

  Raises:
    ValueError: if no parameter is split, or if one does not divide.
  """
  if model_size(mesh) == 1:
    return jax.tree.map(lambda x: P(), train)
  rules = hooks.sharding(agent)
  specs = jax.tree_util.tree_map_with_path(
    lambda path, x: _spec(_name(path), x.shape, rules, model_size(mesh), leading), train
  )
  if all(spec == P() for spec in jax.tree.leaves(specs.params, is_leaf=lambda x: x == P())):
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(train)]
    names = [name for name in map(_name, paths) if name.startswith('params/')]
    raise ValueError(
      f'--model-devices {model_size(mesh)} splits no parameter: no rule of '
      f'{rules or "the network, which has none,"} is for any of '
      f'{", ".join(names[:4])}{", ..." if names[4:] else ""}: {ADVICE}'
    )
  return specs


def with_shardings(shapes: Any, specs: Any, mesh: Mesh) -> Any:
  """Return a tree of shapes with shardings, from PartitionSpecs of its leaves or subtrees."""

  def place(spec: P, tree: Any) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

  return jax.tree.map(place, specs, shapes)


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _spec(
  name: str, shape: tuple[int, ...], rules: Sequence[tuple[str, int]], size: int, leading: int
) -> P:
  """Return the PartitionSpec of the first rule with a pattern that matches the name."""
  axes = [(pattern, axis) for pattern, axis in rules if re.search(pattern, name)]
  if not axes:
    return P()
  pattern, axis = axes[0]
  dims = len(shape) - leading
  place = leading + (axis if axis >= 0 else axis + dims)
  if not -dims <= axis < dims or shape[place] % size:
    raise ValueError(
      f'--model-devices {size} does not divide axis {axis} of {name} {list(shape[leading:])}, '
      f'which the rule {pattern!r} splits: give another size, or another rule: {ADVICE}'
    )
  return split_along(place, MODEL)
