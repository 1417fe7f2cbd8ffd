"""Checks of a user's agents and environments, made before compilation.

Agents and environments of podrace are tested, so their check costs nothing. Faults that appear
later, such as an episode that ends late or an action learned late, are found by
`podrace.architectures.faults`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace.envs.base import batch
from podrace.envs.check import batch_type, check_environment, key_type
from podrace.envs.host.base import HostSpec
from podrace.errors import UsageError
from podrace.hooks import checks_vma, learns_from_replay, networks
from podrace.learner import is_reserved
from podrace.replay.buffer import Buffer
from podrace.settings.validation import option_of_replay
from podrace.system.blame import (
  UserCodeFailed,
  calling,
  check_arrays,
  describe,
  first_difference,
  is_ours,
  label,
  leaves,
  refuse,
  same_structure,
)
from podrace.topology import AXIS, TRAJECTORY_SPECS, data_size, on_each, on_mesh, per_device
from podrace.types import (
  ActorOutput,
  Replay,
  Sample,
  TimeStep,
  TrainState,
  Trajectory,
)

log = logging.getLogger('podrace')


def check_run(
  agent: Any, env: Any, replay: Replay, mesh: Mesh, num_envs: int, unroll_length: int
) -> None:
  """Check a bound agent and its environment or HostSpec, unless they are podrace's own.

  Raises:
    UsageError: if a function fails, or returns something unexpected.
    ValueError: if the batch of the replay does not divide over the devices.
  """
  _check_buffer(agent)
  if (windows := replay.windows) is not None:
    option = option_of_replay(agent, 'batch_size')
    per_device(mesh, windows.buffer.batch_size, option.removeprefix('--'))
  check_environment(env.jax if isinstance(env, HostSpec) else env)
  if not (is_ours(agent) and all(is_ours(x) for x in _parts(agent))):
    with on_mesh(mesh):
      _AgentCheck(agent, env, mesh, num_envs // data_size(mesh), unroll_length).check(replay)


def _check_buffer(agent: Any) -> None:
  """Refuse a Buffer that receives no data."""
  for field in dataclasses.fields(agent):
    if isinstance(getattr(agent, field.name), Buffer) and not learns_from_replay(agent):
      cls = type(agent)
      raise UsageError(
        f'{cls.__module__}.{cls.__qualname__} has the Buffer `{field.name}` and no method '
        'memory(self, num_envs, unroll_length, stack), so it would learn from the newest '
        'trajectory only: see docs/own.md'
      )


def _parts(agent: Any) -> list[Any]:
  """Return networks and other dataclasses among an agent's fields."""
  fields = [getattr(agent, f.name) for f in dataclasses.fields(agent)]
  return [*networks(agent).values(), *(x for x in fields if dataclasses.is_dataclass(x))]


@dataclasses.dataclass(frozen=True)
class _AgentCheck:
  """The four functions of an agent, traced for one device's share of a run. Nothing is computed."""

  agent: Any
  env: Any
  mesh: Mesh
  n: int  # number of environments on a device
  length: int  # length of an unroll

  def check(self, replay: Replay) -> None:
    """Trace `init`, `initial_state`, `act` and `learn`, within the run's mesh."""
    train = jax.eval_shape(self._init, key_type())
    ids = self._one_each(jnp.int32)
    state = jax.eval_shape(self._initial_state, ids)
    timestep = self._timestep()
    output, after = jax.eval_shape(self._act, train.params, state, timestep, key_type())
    if different := first_difference(after, state):
      refuse(
        self.agent, 'act', f'the state {different[0]}', f'{different[1]}, as `initial_state` does'
      )
    trajectory = self._trajectory(timestep, output, state, ids)
    memory = jax.eval_shape(lambda t: replay.add(replay.init(t), t), trajectory)
    sample = jax.eval_shape(replay.sample, memory, key_type())
    self._check_devices(train, sample)
    self._check_learn(train, sample)

  def _init(self, key: Any) -> Any:
    train = calling(self.agent, 'init', 'a key', key)
    if not isinstance(train, TrainState):
      refuse(self.agent, 'init', describe(train), 'a TrainState(params, rest)')
    check_arrays(self.agent, 'init', train, 'a TrainState of arrays')
    return train

  def _initial_state(self, env_id: Any) -> Any:
    inputs = f'env_id {describe(env_id)}'
    state = calling(self.agent, 'initial_state', inputs, env_id)
    self._check_batch('initial_state', state, '')
    return state

  def _check_batch(self, name: str, tree: Any, part: str) -> None:
    expected = f'arrays of [{self.n}, ...], one for each environment of the batch, or ()'
    check_arrays(self.agent, name, tree, expected)
    for path, x in leaves(tree):
      if jnp.shape(x)[:1] != (self.n,):
        refuse(self.agent, name, f'{part}{path.lstrip(".")} {describe(x)}', expected)

  def _one_each(self, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((self.n,), dtype)

  def _timestep(self) -> TimeStep:
    f, i = (self._one_each(d) for d in (jnp.float32, jnp.int8))
    if isinstance(self.env, HostSpec):
      return TimeStep(batch_type(self.n, self.env.observation_space), f, f, i)
    _, timestep = jax.eval_shape(batch(self.env, self.n).reset, key_type())
    return timestep

  def _act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    inputs = (
      f'a batch of {self.n} environments: observation {describe(timestep.observation)}, the state '
      f'{describe(state)}'
    )
    result = calling(self.agent, 'act', inputs, params, state, timestep, key)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], ActorOutput)):
      refuse(self.agent, 'act', describe(result), 'a pair (ActorOutput, state)')
    output, after = result
    self._check_action(output.action)
    self._check_batch('act', output.extras, 'the extras ')
    check_arrays(self.agent, 'act', after, 'a state of arrays')
    return result

  def _check_action(self, action: Any) -> None:
    space = self.env.action_space
    expected = batch_type(self.n, space)
    if not same_structure(action, expected):
      refuse(self.agent, 'act', f'the action {describe(action)}', f'{describe(expected)}: {space}')
    for x, y in zip(jax.tree.leaves(action), jax.tree.leaves(expected), strict=True):
      kind = jnp.integer if jnp.issubdtype(y.dtype, jnp.integer) else jnp.floating
      if jnp.shape(x) != y.shape or not jnp.issubdtype(jnp.result_type(x), kind):
        refuse(self.agent, 'act', f'the action {describe(x)}', f'{describe(y)}: {space}')

  def _trajectory(self, timestep: Any, output: Any, state: Any, ids: Any) -> Trajectory:
    def rows(n: int, x: Any) -> Any:
      return jax.tree.map(lambda y: jax.ShapeDtypeStruct((n, *y.shape), y.dtype), x)

    return Trajectory(rows(self.length + 1, timestep), rows(self.length, output), state, ids)

  def _learn(self, train: Any, sample: Sample, key: Any) -> Any:
    t, b = sample.trajectory.timesteps.reward.shape
    inputs = (
      f'timesteps of [{t}, {b}], outputs of [{t - 1}, {b}], a weight of [{b}]; observation '
      f'{describe(sample.trajectory.timesteps.observation)}'
    )
    result = calling(self.agent, 'learn', inputs, train, sample, key)
    expected = 'a triple (TrainState, priority, metrics)'
    if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], TrainState)):
      refuse(self.agent, 'learn', describe(result), expected)
    after, priority, metrics = result
    self._check_metrics(metrics)
    check_arrays(self.agent, 'learn', result, expected)
    if different := first_difference(after, train):
      refuse(self.agent, 'learn', f'the TrainState {different[0]}', f'{different[1]}, as given')
    if jnp.shape(priority) != (b,):
      refuse(self.agent, 'learn', f'the priority {describe(priority)}', f'float32[{b}]')
    return result

  def _check_metrics(self, metrics: Any) -> None:
    if not isinstance(metrics, dict) or 'loss' not in metrics:
      refuse(self.agent, 'learn', f'the metrics {describe(metrics)}', "a dict with 'loss'")
    for name, x in metrics.items():
      if not isinstance(name, str):
        refuse(self.agent, 'learn', f'a metric of the name {name!r}', 'a text as name')
      if is_reserved(name):
        came = f'the metric {name!r}, which the run itself writes to metrics.jsonl'
        refuse(self.agent, 'learn', came, 'another name')
      if not (isinstance(x, bool | int | float) or getattr(x, 'shape', None) == ()):
        refuse(self.agent, 'learn', f'the metric {name!r} {describe(x)}', 'a scalar')

  def _refuse_unaveraged(self, part: str) -> None:
    refuse(
      self.agent, 'learn', f'{part} on each device: a step without `sgd`',
      'the same on all: podrace.learner.sgd(loss, optimizer, params, opt_state) makes the gradient '
      'step, and averages it over the devices',
    )  # fmt: skip

  def _check_learn(self, train: Any, sample: Any) -> None:
    """Trace `learn` as the run compiles it, on all devices."""
    flat = P(AXIS)
    specs = Sample(TRAJECTORY_SPECS, flat, flat)  # type: ignore[arg-type]

    def whole(spec: Any, tree: Any) -> Any:
      axis = len(spec) - 1
      return jax.tree.map(lambda x: _lengthen(x, axis, data_size(self.mesh)), tree)

    whole_sample = Sample(
      Trajectory(*map(whole, TRAJECTORY_SPECS, sample.trajectory)),
      *(whole(flat, x) for x in sample[1:]),
    )
    unchanged = []

    def learn_once(train: Any, sample: Any, key: Any) -> Any:
      result = self._learn(train, sample, key)
      before, after = jax.tree.leaves(train.params), jax.tree.leaves(result[0].params)
      unchanged.append(bool(before) and all(x is y for x, y in zip(before, after, strict=True)))
      return result

    learn = on_each(
      learn_once,
      self.mesh,
      in_specs=(P(), specs, P()),
      out_specs=(P(), flat, P()),
      check_vma=checks_vma(self.agent),
    )
    try:
      jax.eval_shape(learn, train, whole_sample, key_type())
    except UserCodeFailed as e:
      if checks_vma(self.agent) and 'varying' in str(e):
        raise UserCodeFailed(
          f"{e}\nIf this is a library's code, which does not trace under JAX's proof that all "
          'devices end with the same parameters: set check_vma = False in the class, see '
          'docs/own.md.'
        ) from e
      raise
    if all(unchanged):
      log.warning(
        '%s returns the params that it was given: nothing is learned', label(self.agent, 'learn')
      )

  def _check_devices(self, train: Any, sample: Any) -> None:
    """Check that all devices end alike: `vmap` finds values that depend on the sample."""
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), sample)

    def trace(params: Any, rest: Any, metrics: Any) -> Any:
      axes: Any = TrainState(params, rest), 0, metrics
      learn = jax.vmap(self._learn, (None, 0, None), axes, axis_name=AXIS, axis_size=2)
      return jax.eval_shape(learn, train, stacked, key_type())

    shared_metrics = None if checks_vma(self.agent) else 0
    try:
      if _can_trace(functools.partial(trace, None, None, shared_metrics)):
        return
      _, _, metrics = trace(0, 0, 0)
    except UserCodeFailed:  # `vmap` is not a mesh, and the agent may need one
      return
    if not _can_trace(functools.partial(trace, None, 0, 0)):
      self._refuse_unaveraged('other params')
    if not _can_trace(functools.partial(trace, 0, None, 0)):
      self._refuse_unaveraged('another rest')
    for name in metrics if checks_vma(self.agent) else ():
      axes = {n: None if n == name else 0 for n in metrics}
      if not _can_trace(functools.partial(trace, 0, 0, axes)):
        refuse(
          self.agent, 'learn', f'another metric {name!r} on each device',
          'the mean over the devices: give it to `sgd` in the second value of the loss',
        )  # fmt: skip


def _can_trace(trace: Callable[[], Any]) -> bool:
  """Return whether `trace` succeeds: `vmap` refuses a shared value that depends on the sample."""
  try:
    trace()
  except ValueError:
    return False
  return True


def _lengthen(x: Any, axis: int, times: int) -> Any:
  shape = list(x.shape)
  shape[axis] *= times
  return jax.ShapeDtypeStruct(tuple(shape), x.dtype)
