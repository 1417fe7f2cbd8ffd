"""An agent in different settings of its hyper-parameters, as members of one program.

Each member's values are in its `TrainState.rest`. So one program serves all values, a checkpoint
holds them, and population-based training can change them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podrace import hooks
from podrace.fields import PlainText
from podrace.learner import Learned, all_finite
from podrace.topology import AXIS
from podrace.types import ActorOutput, Array, Sample, TimeStep, TrainState


class VariedRest(NamedTuple):
  """`TrainState.rest` of a member."""

  values: dict[str, Array]  # of its setting, [] f32 each
  rest: Any  # of the agent


@dataclasses.dataclass(frozen=True)
class Varied:
  """`agent` with different values of some fields. It has the optional hooks of `agent`.

  Acting must not read these fields, since it is given the parameters only.
  """

  agent: Any
  fields: tuple[PlainText, ...]  # of `agent`, as learning_rate or network.sigma
  values: tuple[float, ...]  # [settings * fields], setting after setting

  def __post_init__(self) -> None:
    if not self.fields or not self.values or len(self.values) % len(self.fields):
      raise ValueError(
        f'there are {len(self.values)} values for settings of {len(self.fields)} fields'
      )

    for path in self.fields:
      if dataclasses.is_dataclass(self.agent) and not isinstance(_value(self.agent, path), float):
        raise ValueError(
          f'{path!r:.100} is no number with a fraction of {type(self.agent).__name__}'
        )

  @property
  def settings(self) -> int:
    """Number of settings."""
    return len(self.values) // len(self.fields)

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__') or name == 'agent':
      raise AttributeError(name)
    return getattr(self.agent, name)

  def init(self, key: Array) -> TrainState:
    """Return the state of the first setting."""
    return self._init(key, jnp.asarray(self._rows()[0], jnp.float32))

  def init_members(self, keys: Array) -> TrainState:
    """Return the states of all members [N]: the seeds of the first setting, then of the next."""
    rows = jnp.asarray(self._rows(), jnp.float32)
    each = jnp.repeat(rows, keys.shape[0] // len(rows), axis=0)
    return lax.map(lambda member: self._init(*member), (keys, each))

  def _rows(self) -> list[tuple[float, ...]]:
    n = len(self.fields)
    return [self.values[i : i + n] for i in range(0, len(self.values), n)]

  def _init(self, key: Array, row: Array) -> TrainState:
    values = {name: row[i] for i, name in enumerate(self.fields)}
    train: TrainState = with_values(self.agent, values).init(key)
    return TrainState(train.params, VariedRest(values, train.rest))

  def warm_start(self, train: TrainState, params: Any) -> TrainState:
    """Start from the parameters of another run."""
    rest: VariedRest = train.rest
    began = hooks.warm_start(self.agent, TrainState(train.params, rest.rest), params)
    return TrainState(began.params, VariedRest(rest.values, began.rest))

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting before the first timestep."""
    return self.agent.initial_state(env_id)

  def act(
    self, params: Any, state: Any, timestep: TimeStep, key: Array, *replace: Any
  ) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]. See `podrace.hooks` for `replace`."""
    output: tuple[ActorOutput, Any] = self.agent.act(params, state, timestep, key, *replace)
    return output

  def learn(self, train: TrainState, sample: Sample, key: Array) -> Learned:
    """Make one update from a sample.

    A member whose loss or parameters become NaN or infinite has diverged. It keeps its last finite
    parameters, learns nothing more, and has NaN for its values.
    """
    values, rest = train.rest
    agent = with_values(self.agent, values)
    after, priority, metrics = agent.learn(TrainState(train.params, rest), sample, key)
    finite_loss = lax.pmin(jnp.isfinite(metrics['loss']).astype(jnp.int32), AXIS) == 1
    fine = finite_loss & all_finite((after.params, values))

    def if_fine(x: Array, y: Array | float) -> Array:
      return jnp.where(fine, x, y)

    kept = jax.tree.map(if_fine, after, TrainState(train.params, rest))
    values = {name: if_fine(x, jnp.nan) for name, x in values.items()}
    metrics = {name: if_fine(x, 0.0) for name, x in metrics.items()}
    kept = TrainState(kept.params, VariedRest(values, kept.rest))
    return kept, if_fine(priority, 1.0), metrics

  def diverged(self, train: TrainState) -> Array:
    """Return whether a member has diverged, [] bool."""
    return ~all_finite((train.params, train.rest.values))


def _value(settings: Any, path: str) -> Any:
  """Return a field by its path; None if there is none."""
  for name in path.split('.'):
    names = (
      [f.name for f in dataclasses.fields(settings)] if dataclasses.is_dataclass(settings) else []
    )
    settings = getattr(settings, name) if name in names else None
  return settings


def with_values(settings: Any, values: dict[str, Any]) -> Any:
  """Return a dataclass with new values in its fields, unchecked, since they may be tracers."""
  changed = copy.copy(settings)
  for name in {*vars(changed)} - {f.name for f in dataclasses.fields(changed)}:
    object.__delattr__(changed, name)  # of a cached_property
  for path, value in values.items():
    name, _, rest = path.partition('.')
    inner = with_values(getattr(changed, name), {rest: value}) if rest else value
    object.__setattr__(changed, name, inner)
  return changed
