"""Agents and environments of one's own, checked before anything is compiled.

Those that podrace brings are tested, and cost nothing here. What can't be seen in the first steps
(an episode that ends later, an action that an agent learns to take) is noticed in the run: `FAULTS`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace.blame import (
  calling,
  describe,
  failed,
  first_difference,
  is_ours,
  label,
  leaves,
  refuse,
  same_structure,
)
from podrace.envs import contract
from podrace.envs.host.base import HostSpec
from podrace.envs.host.infos import MOST
from podrace.envs.spaces import bounds, over, values
from podrace.envs.spaces import leaves as leaves_of
from podrace.errors import RunError, UsageError
from podrace.hooks import checks_vma, networks
from podrace.topology import AXIS, TRAJECTORY_SPECS
from podrace.types import (
  FIRST,
  LAST,
  MID,
  ActorOutput,
  Replay,
  Sample,
  TimeStep,
  TrainState,
  Trajectory,
)

STEPS, NUM_ENVS = 100, 8  # of an environment, at random
NAMES = {FIRST: 'FIRST', MID: 'MID', LAST: 'LAST'}


def check_run(
  agent: Any, env: Any, replay: Replay, mesh: Mesh, num_envs: int, unroll_length: int
) -> None:
  """Checks what is not podrace's own of a bound agent and its environment, which may be a HostSpec.

  Raises:
    UsageError: if a function returns something else than it should.
    RunError: if one fails.
  """
  check_environment(env.jax if isinstance(env, HostSpec) else env)
  if not (is_ours(agent) and all(is_ours(x) for x in _parts(agent))):
    _Agent(agent, env, mesh, num_envs // mesh.size, unroll_length).check(replay)


def _parts(agent: Any) -> list[Any]:
  """Networks and other dataclasses among an agent's fields."""
  fields = [getattr(agent, f.name) for f in dataclasses.fields(agent)]
  return [*networks(agent).values(), *(x for x in fields if dataclasses.is_dataclass(x))]


def _key() -> Any:
  return jax.eval_shape(lambda: jax.random.key(0))


def _batch(n: int, space: Any) -> Any:
  """What is in a space, [n, ...], in the types that JAX has."""

  def one(leaf: Any) -> Any:
    dtype = np.int32 if np.issubdtype(leaf.dtype, np.int64) else leaf.dtype
    return jax.ShapeDtypeStruct((n, *leaf.shape), dtype)

  return over(one, space)


# --- environments -------------------------------------------------------------------------------


def check_environment(env: Any) -> None:
  """Checks an environment in JAX: its types, and some steps at random. Those of podrace are not."""
  if env is None or is_ours(env):  # None: it is on the host
    return
  for name in ('observation_space', 'action_space'):
    space = getattr(env, name)
    if not isinstance(space, spaces.Space):
      raise UsageError(f'{label(env, name)} is {space!r}, expected a gymnasium.spaces.Space')
  state = _check_types(env)
  if bounds(env.action_space) is not None:  # so that there are random actions
    _check_steps(env, state)


def _check_types(env: Any) -> Any:
  """The shapes of a state, where `reset` and `step` agree about them."""

  def reset(key: Any) -> Any:
    found = calling(env, 'reset', 'a key', key)
    _check_pair(env, 'reset', found)
    return found

  def step(state: Any, action: Any, key: Any) -> Any:
    given = f'the state of one environment, the action {describe(action)}, a key'
    found = calling(env, 'step', given, state, action, key)
    _check_pair(env, 'step', found)
    return found

  with jax.debug_key_reuse(False):
    before, _ = jax.eval_shape(reset, _key())
    action = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _batch(1, env.action_space)
    )
    after, _ = jax.eval_shape(step, before, action, _key())
  if different := first_difference(after, before):
    refuse(env, 'step', f'the state {different[0]}', f'{different[1]}, as `reset` returns it')
  _check_infos(env, before)
  return before


def _check_infos(env: Any, state: Any) -> None:
  """What an environment says of episodes that end: numbers by their names."""
  if not hasattr(env, 'infos'):
    return
  if not callable(env.infos):
    refuse(env, 'infos', f'{env.infos!r}', 'a function of the state')
  found = jax.eval_shape(lambda s: calling(env, 'infos', 'the state of one environment', s), state)
  if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
    refuse(env, 'infos', describe(found), 'a dict of numbers by their names')
  for name, x in found.items():
    if x.shape != ():
      refuse(env, 'infos', f'{name} of shape {x.shape}', 'one number, of shape ()')
  if len(found) > MOST:
    refuse(env, 'infos', f'{len(found)} numbers', f'at most {MOST}')


def _check_pair(env: Any, name: str, found: Any) -> None:
  """Checks (state, TimeStep) of one environment."""
  if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], TimeStep)):
    many = f'a tuple of {len(found)}: ' if isinstance(found, tuple) else ''
    refuse(env, name, many + describe(found), 'a pair (state, TimeStep)')
  state, timestep = found
  _check_arrays(env, name, state, 'a state of arrays')
  for field, dtype in (('reward', 'float32'), ('discount', 'float32'), ('step_type', 'int8')):
    x = getattr(timestep, field)
    if (jnp.shape(x), str(jnp.result_type(x))) != ((), dtype):
      refuse(env, name, f'the {field} {describe(x)}', f'{dtype}[], of one environment')
  space, x = env.observation_space, timestep.observation
  if not same_structure(x, _batch(1, space)):
    refuse(env, name, f'the observation {describe(x)}', f'one of {space}')
  for (where, leaf), y in zip(leaves_of(space), values(space, x), strict=True):
    integer = isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete)
    fits = jnp.issubdtype(y.dtype, jnp.integer) if integer else y.dtype == leaf.dtype
    if y.shape != leaf.shape or not fits:
      kind = 'integers' if integer else leaf.dtype
      refuse(
        env, name, f'{where} {describe(y)}', f'{kind}{list(leaf.shape)}, as the space declares'
      )


def _check_arrays(owner: Any, name: str, found: Any, expected: str) -> None:
  for path, x in leaves(found):
    if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
      refuse(owner, name, f'{path.lstrip(".")} {describe(x)}'.strip(), expected)


def _check_steps(env: Any, state: Any) -> None:
  """Steps some copies at random."""
  given = f'the states of {NUM_ENVS} environments under vmap, in a scan, random actions, keys'
  try:
    with jax.debug_key_reuse(False):
      run = contract.rollout(env, STEPS, NUM_ENVS)
      stream = contract.as_numpy(run(jax.random.key(0), False))
  except Exception as e:
    raise failed(env, 'step', given, e) from e
  kind = stream.step_type
  if wrong := sorted({int(x) for x in kind.flat} - NAMES.keys()):
    refuse(env, 'step', f'step_type {wrong[0]}', 'FIRST (0), MID (1) or LAST (2)')
  if np.any(kind[0] != FIRST):
    refuse(env, 'reset', f'step_type {NAMES[int(kind[0][kind[0] != FIRST][0])]}', 'FIRST')
  for t, i in np.argwhere((kind[1:] == FIRST) != (kind[:-1] == LAST))[:1]:
    before, after = (NAMES[int(kind[t + d, i])] for d in (0, 1))
    expected = (
      f'FIRST: {contract.RESETS}' if before == 'LAST' else 'LAST first, as the end of an episode'
    )
    refuse(env, 'step', f'{after} after {before} in step {t + 1}', expected)
  _check_numbers(env, 'reward', stream.reward)
  _check_numbers(env, 'discount', stream.discount)
  for (where, _), x in zip(
    leaves_of(env.observation_space),
    values(env.observation_space, stream.observation),
    strict=True,
  ):
    _check_numbers(env, where, x)


def _check_numbers(env: Any, what: str, x: np.ndarray) -> None:
  if x.dtype.kind != 'f':
    return
  for t, *rest in np.argwhere(~np.isfinite(x))[:1]:
    name = 'step' if t else 'reset'
    refuse(env, name, f'{what} {x[(t, *rest)]} in step {t}', 'a finite number')


# --- agents -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Agent:
  """The four functions of an agent, traced for one device's part of a run; nothing is computed."""

  agent: Any
  env: Any
  mesh: Mesh
  n: int  # environments
  length: int  # of an unroll

  def check(self, replay: Replay) -> None:
    train = jax.eval_shape(self._init, _key())
    ids = self._one_each(jnp.int32)
    state = jax.eval_shape(self._initial_state, ids)
    timestep = self._timestep()
    output, after = jax.eval_shape(self._act, train.params, state, timestep, _key())
    if different := first_difference(after, state):
      refuse(
        self.agent, 'act', f'the state {different[0]}', f'{different[1]}, as `initial_state` does'
      )
    trajectory = self._trajectory(timestep, output, state, ids)
    memory = jax.eval_shape(lambda t: replay.add(replay.init(t), t), trajectory)
    sample = jax.eval_shape(replay.sample, memory, _key())
    self._check_devices(train, sample)
    self._check_learn(train, sample)

  def _init(self, key: Any) -> Any:
    train = calling(self.agent, 'init', 'a key', key)
    if not isinstance(train, TrainState):
      refuse(self.agent, 'init', describe(train), 'a TrainState(params, rest)')
    _check_arrays(self.agent, 'init', train, 'a TrainState of arrays')
    return train

  def _initial_state(self, env_id: Any) -> Any:
    given = f'env_id {describe(env_id)}'
    state = calling(self.agent, 'initial_state', given, env_id)
    self._check_batch('initial_state', state, '')
    return state

  def _check_batch(self, name: str, found: Any, what: str) -> None:
    expected = f'arrays of [{self.n}, ...], one for each environment of the batch, or ()'
    _check_arrays(self.agent, name, found, expected)
    for path, x in leaves(found):
      if jnp.shape(x)[:1] != (self.n,):
        refuse(self.agent, name, f'{what}{path.lstrip(".")} {describe(x)}', expected)

  def _one_each(self, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((self.n,), dtype)

  def _timestep(self) -> TimeStep:
    f, i = (self._one_each(d) for d in (jnp.float32, jnp.int8))
    if isinstance(self.env, HostSpec):
      return TimeStep(_batch(self.n, self.env.observation_space), f, f, i)
    _, one = jax.eval_shape(self.env.reset, _key())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.n, *x.shape), x.dtype), one)

  def _act(self, params: Any, state: Any, timestep: TimeStep, key: Any) -> Any:
    given = (
      f'a batch of {self.n} environments: observation {describe(timestep.observation)}, the state '
      f'{describe(state)}'
    )
    found = calling(self.agent, 'act', given, params, state, timestep, key)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], ActorOutput)):
      refuse(self.agent, 'act', describe(found), 'a pair (ActorOutput, state)')
    output, after = found
    self._check_action(output.action)
    self._check_batch('act', output.extras, 'the extras ')
    _check_arrays(self.agent, 'act', after, 'a state of arrays')
    return found

  def _check_action(self, action: Any) -> None:
    space = self.env.action_space
    expected = _batch(self.n, space)
    if not same_structure(action, expected):
      refuse(self.agent, 'act', f'the action {describe(action)}', f'{describe(expected)}: {space}')
    pairs = zip(jax.tree.leaves(action), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
      integers = jnp.issubdtype(y.dtype, jnp.integer)
      fits = jnp.shape(x) == y.shape and (
        not integers or jnp.issubdtype(jnp.result_type(x), jnp.integer)
      )
      if not fits:
        refuse(self.agent, 'act', f'the action {describe(x)}', f'{describe(y)}: {space}')

  def _trajectory(self, timestep: Any, output: Any, state: Any, ids: Any) -> Trajectory:
    def rows(n: int, x: Any) -> Any:
      return jax.tree.map(lambda y: jax.ShapeDtypeStruct((n, *y.shape), y.dtype), x)

    return Trajectory(rows(self.length + 1, timestep), rows(self.length, output), state, ids)

  def _learn(self, train: Any, sample: Sample, key: Any) -> Any:
    t, b = sample.trajectory.timesteps.reward.shape
    given = (
      f'timesteps of [{t}, {b}], outputs of [{t - 1}, {b}], a weight of [{b}]; observation '
      f'{describe(sample.trajectory.timesteps.observation)}'
    )
    found = calling(self.agent, 'learn', given, train, sample, key)
    expected = 'a triple (TrainState, priority, metrics)'
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], TrainState)):
      refuse(self.agent, 'learn', describe(found), expected)
    after, priority, metrics = found
    _check_arrays(self.agent, 'learn', found, expected)
    if different := first_difference(after, train):
      refuse(self.agent, 'learn', f'the TrainState {different[0]}', f'{different[1]}, as given')
    if jnp.shape(priority) != (b,):
      refuse(self.agent, 'learn', f'the priority {describe(priority)}', f'float32[{b}]')
    if not isinstance(metrics, dict) or 'loss' not in metrics:
      refuse(self.agent, 'learn', f'the metrics {describe(metrics)}', "a dict with 'loss'")
    for name, x in metrics.items():
      if jnp.shape(x) != ():
        refuse(self.agent, 'learn', f'the metric {name!r} {describe(x)}', 'a scalar')
    return found

  def _refuse_unaveraged(self, what: str) -> None:
    refuse(
      self.agent, 'learn', f'{what} on each device: a step without `sgd`',
      'the same on all: podrace.learner.sgd(loss, optimizer, params, opt_state) makes the gradient '
      'step, and averages it over the devices',
    )  # fmt: skip

  def _check_learn(self, train: Any, sample: Any) -> None:
    """Traces `learn` as it will be, on all devices."""
    flat = P(AXIS)
    specs = Sample(TRAJECTORY_SPECS, flat, flat)  # type: ignore[arg-type]

    def whole(spec: Any, tree: Any) -> Any:
      axis = len(spec) - 1
      return jax.tree.map(lambda x: _longer(x, axis, self.mesh.size), tree)

    every = Sample(
      Trajectory(*map(whole, TRAJECTORY_SPECS, sample.trajectory)),
      *(whole(flat, x) for x in sample[1:]),
    )
    learn = jax.shard_map(
      self._learn,
      mesh=self.mesh,
      in_specs=(P(), specs, P()),
      out_specs=(P(), flat, P()),
      check_vma=checks_vma(self.agent),
    )
    try:
      jax.eval_shape(learn, train, every, _key())
    except RunError as e:
      if checks_vma(self.agent) and 'varying' in str(e):
        raise RunError(
          f"{e}\nIf this is code of others, which does not trace under JAX's proof that all devices "
          'end with the same parameters: set check_vma = False in the class, see docs/own.md.'
        ) from e
      raise

  def _check_devices(self, train: Any, sample: Any) -> None:
    """Whether all devices end alike: what `vmap` finds to depend on a device's sample is not averaged."""
    every = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), sample)

    def trace(params: Any, rest: Any, metrics: Any) -> Any:
      axes: Any = TrainState(params, rest), 0, metrics
      learn = jax.vmap(self._learn, (None, 0, None), axes, axis_name=AXIS, axis_size=2)
      return jax.eval_shape(learn, train, every, _key())

    try:
      _, _, metrics = trace(0, 0, 0)
    except RunError:  # `vmap` is no mesh, for which this may be good
      return
    if not _traces(functools.partial(trace, None, 0, 0)):
      self._refuse_unaveraged('other params')
    if not _traces(functools.partial(trace, 0, None, 0)):
      self._refuse_unaveraged('another rest')
    for name in metrics if checks_vma(self.agent) else ():
      axes = {n: None if n == name else 0 for n in metrics}
      if not _traces(functools.partial(trace, 0, 0, axes)):
        refuse(
          self.agent, 'learn', f'another metric {name!r} on each device',
          'the mean over the devices: give it to `sgd` in the second value of the loss',
        )  # fmt: skip


def _traces(trace: Callable[[], Any]) -> bool:
  """Whether it does; else `vmap` finds that what is to be the same for all is not."""
  try:
    trace()
  except ValueError:
    return False
  return True


def _longer(x: Any, axis: int, times: int) -> Any:
  shape = list(x.shape)
  shape[axis] *= times
  return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


# --- while it runs ------------------------------------------------------------------------------

FAULTS = ('order', 'reward', 'action')  # bits of `ActorState.faults`


def faults(space: Any, trajectory: Trajectory) -> jax.Array:
  """Which of FAULTS there are in a trajectory of each environment, [B] i32 bits."""
  t = trajectory.timesteps
  order = jnp.any(t.last[:-1] != t.first[1:], 0)
  reward = jnp.any(~jnp.isfinite(t.reward), 0)
  found = [order, reward, _any_outside(space, trajectory.outputs.action)]
  return sum(
    (x.astype(jnp.int32) << i for i, x in enumerate(found)), jnp.zeros(order.shape, jnp.int32)
  )


def _any_outside(space: Any, action: Any) -> jax.Array:
  """Of actions [T, B, ...]: whether one of each environment is out of the space, [B]."""
  limits = bounds(space)
  if limits is None:  # a space of several, whose parts nobody here knows
    return jnp.zeros(jax.tree.leaves(action)[0].shape[1], bool)
  low, high = (jnp.broadcast_to(jnp.asarray(x), action.shape) for x in limits)
  outside = ~((action >= low) & (action <= high))  # NaN is
  return jnp.any(outside, axis=(0, *range(2, action.ndim)))


def count_faults(bits: jax.Array) -> jax.Array:
  """How many environments, the last axis of `bits`, have each of FAULTS: [..., 3]."""
  return jnp.stack([jnp.sum(bits >> i & 1, -1) for i in range(len(FAULTS))], -1)


def check_faults(counts: np.ndarray, agent: Any, env: Any) -> None:
  """Raises RunError if there are any."""
  for fault, count in zip(FAULTS, np.sum(np.atleast_2d(counts), 0), strict=True):
    if count:
      raise RunError(f'in {count} environment(s), {_explain(fault, agent, env)}')


def _explain(fault: str, agent: Any, env: Any) -> str:
  if fault == 'order':
    return contract.out_of_order(env)
  if fault == 'reward':
    return f'{label(env, "step")} returned a reward that is NaN or infinite, expected a finite one'
  return (
    f'{label(agent, "act")} returned actions out of {env.action_space}, expected actions in it: '
    'clip or squash them, as `to_action` of podrace.distributions does'
  )
