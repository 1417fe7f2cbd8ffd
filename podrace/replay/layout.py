"""Conversion between the trajectories of an agent and the columns of a table."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podrace.errors import UsageError
from podrace.replay.frame_stacks import newest_frames, unstacked, what_is_before
from podrace.replay.rings import end_what_is_cut
from podrace.replay.windows import Windows
from podrace.tables.history import KINDS
from podrace.types import Sample, Trajectory

Columns = dict[str, Any]  # name -> array


class Rows(NamedTuple):
  """A trajectory as columns of a stream."""

  timed: Columns  # [T+1, B, ...] of timesteps
  acted: Columns  # [T, B, ...] of outputs
  frames: Columns  # [stack-1 + T+1, B, ...] single frames; stack-1 of them precede the unroll
  state: Columns  # [B, ...] of the agent before the first timestep
  env_id: Any  # [B]


@dataclasses.dataclass(frozen=True)
class Layout:
  """Columns of the trajectories of an agent. `example` is a trajectory of shapes."""

  windows: Windows
  example: Trajectory

  def rows(self, trajectory: Trajectory) -> Rows:
    """Convert a trajectory to columns, with stacks of frames reduced to single frames."""
    w = self.windows
    timesteps = newest_frames(trajectory.timesteps, w.stack)
    timed, frames = named(timesteps), {}
    if w.stack:
      newest = named(timesteps.observation, 'observation')
      stacks = named(trajectory.timesteps.observation, 'observation')
      for name, x in newest.items():
        before = jnp.moveaxis(stacks[name][0, :, :-1], 1, 0)
        frames[name] = jnp.concatenate([before, x])
        del timed[name]
      kinds = what_is_before(trajectory.timesteps)
      frames['stacks'] = jnp.pad(kinds, ((w.lookback, 0), (0, 0)))  # CONTINUED
    state = named(w.kept(trajectory.agent_state), 'agent_state')
    return Rows(timed, named(trajectory.outputs), frames, state, trajectory.env_id)

  def trajectory(self, data: Columns) -> Trajectory:
    """Convert items of a table to windows.

    Args:
      data: columns [n, L+1, ...] of n items. Columns of observations may be missing.

    Returns:
      Windows [L+1, n, ...], without observations if `data` has none.
    """
    w, example = self.windows, self.example
    timesteps = example.timesteps
    data = {
      k: jnp.moveaxis(x, 1, 0) if x.ndim > 1 and not is_single(k) else x for k, x in data.items()
    }
    if not any(name.startswith('observation') for name in data):
      timesteps = timesteps._replace(observation=())
    elif w.stack:
      at, empty = unstacked(data.pop('stacks'), w.stack)
      n = jnp.arange(at.shape[1], dtype=jnp.int32)[None, :, None]
      for name in named(timesteps.observation, 'observation'):
        found = data[name][at, n]
        data[name] = jnp.where(empty.reshape(empty.shape + (1,) * (found.ndim - 3)), 0, found)
    timesteps = unnamed(timesteps, data)
    return Trajectory(
      timesteps._replace(step_type=end_what_is_cut(timesteps.step_type)),
      unnamed(example.outputs, data),
      unnamed(w.kept(example.agent_state), data, 'agent_state'),
      data['env_id'],
    )

  def sample(self, data: Columns) -> Sample:
    """Convert items, with a column `weight` [n], to a sample for the learner."""
    data = dict(data)
    weight = data.pop('weight')
    return Sample(self.trajectory(data), weight, jnp.arange(weight.shape[0]))

  def batch(self) -> Columns:
    """Return the shapes of the columns of one batch, including `weight`.

    Raises:
      UsageError: if the tables cannot hold the dtype of a column.
    """
    w, n = self.windows, self.windows.buffer.batch_size
    rows = jax.eval_shape(self.rows, self.example)

    def shape(x: Any, rows: int | None, skip: int) -> Any:
      return jax.ShapeDtypeStruct((n, *(() if rows is None else (rows,)), *x.shape[skip:]), x.dtype)

    columns = (
      {k: shape(x, w.length + 1, 2) for k, x in rows.timed.items()}
      | {k: shape(x, w.length, 2) for k, x in rows.acted.items()}
      | {k: shape(x, w.lookback + w.length + 1, 2) for k, x in rows.frames.items()}
      | {k: shape(x, None, 1) for k, x in rows.state.items()}
      | {'env_id': shape(rows.env_id, None, 1), 'weight': jax.ShapeDtypeStruct((n,), jnp.float32)}
    )
    for name, x in columns.items():
      if x.dtype.kind not in KINDS:
        raise UsageError(
          f'{name} is {x.dtype}, and replay on the host or in a service holds bool, integer, float '
          'and complex numbers of NumPy: return float32 in the agent, or give --replay device'
        )
    return columns


def named(tree: Any, prefix: str = '') -> Columns:
  """Map the names of the leaves of a tree, such as observation/image, to the leaves."""
  found = jax.tree_util.tree_leaves_with_path(tree)
  return {_name(path, prefix): x for path, x in found}


def unnamed(example: Any, columns: Columns, prefix: str = '') -> Any:
  """Rebuild a tree of the structure of `example` from the columns that `named` made."""
  return jax.tree_util.tree_map_with_path(lambda path, _: columns[_name(path, prefix)], example)


def _name(path: Any, prefix: str) -> str:
  name = jax.tree_util.keystr(path, simple=True, separator='/')
  return f'{prefix}/{name}'.strip('/') if prefix else name


def is_single(name: str) -> bool:
  """Return whether a column has one row per window instead of one per timestep."""
  return name.startswith('agent_state')
