"""Anakin: environment, acting and learning are one compiled program on every device.

Hessel et al. 2021 (arXiv 2104.06272). The number of updates in a call is data, so one program
serves all numbers, and results do not depend on how the updates are divided into calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from podrace import topology
from podrace.architectures.agreement import AllReduce
from podrace.architectures.faults import check_faults, count_faults, find_faults, first_outside
from podrace.architectures.protocol import Part
from podrace.architectures.sharding import train_specs, with_shardings
from podrace.architectures.unroll import ActorState, actor_on_mesh, pooled
from podrace.envs.base import batch
from podrace.hooks import diverged, gradient_steps, init_members
from podrace.learner import Log, add_to_log, all_finite, empty_log, init_memory
from podrace.types import Agent, Array, Environment, Replay, TrainState


class State(NamedTuple):
  """The whole state of a run; with seeds, each leaf except `update` has a leading axis of seeds."""

  train: TrainState  # the same along AXIS; with gossip, `rest` is split over the replicas
  actor: ActorState  # split over devices along [B]
  memory: Any  # replay, split likewise
  log: Log
  key: Array  # of the run; never changes
  update: Array  # [] i32 number of updates made


_axes: Any = (0, 0, 0, 0, 0, None)
SEEDS = State(*_axes)  # the axis of seeds in each field


@dataclasses.dataclass(frozen=True)
class Anakin:
  """One agent in one kind of environment on one mesh, as compiled functions.

  Args:
    num_envs: environments over all devices, of each seed.
    seeds: independent agents in one program. Each computes the same as alone, up to rounding.
    agree: the way in which the devices agree on parameters.
  """

  agent: Agent
  env: Environment
  replay: Replay
  mesh: Mesh
  num_envs: int
  unroll_length: int
  seeds: int = 1
  agree: AllReduce = AllReduce()

  def __post_init__(self) -> None:
    for name in ('num_envs', 'unroll_length', 'seeds'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be at least 1, not {getattr(self, name)}')
    topology.per_device(self.mesh, self.num_envs, 'num-envs')
    self.agree.check(self.mesh)

  @functools.cached_property
  def _actor(self) -> tuple[Any, Any]:
    local = batch(self.env, self.num_envs // topology.data_size(self.mesh))
    spec = P(topology.AXIS) if self.agree.split else P()
    length, params_of = self.unroll_length, self.agree.params_of
    return actor_on_mesh(self.agent, local, self.mesh, length, spec, params_of)

  @functools.cached_property
  def _learn(self) -> Callable[..., Any]:
    return self.agree.learner(self.agent, self.replay, self.mesh)

  def _init_one(self, train: TrainState, actor_key: Array, run_key: Array) -> State:
    begin, unroll = self._actor
    train = self.agree.begin(train, topology.data_size(self.mesh))
    actor = begin(jnp.arange(self.num_envs, dtype=jnp.int32), actor_key)
    _, example = jax.eval_shape(unroll, self.agree.source(train), actor, actor_key)
    memory = init_memory(self.replay, self.mesh, example)
    _, _, metrics, _ = jax.eval_shape(self._learn, train, memory, example, run_key, jnp.int32(0))
    return State(train, actor, memory, empty_log(metrics), run_key, jnp.int32(0))

  @functools.cached_property
  def arrays(self) -> Any:
    """Arrays of the environment that programs take as an argument; () if there are none.

    They have no sharding, which would clash within `shard_map`. Several processes compile them.
    """
    own = getattr(self.env, 'arrays', ()) if hasattr(self.env, 'holding') else ()
    return jax.device_put(own) if jax.process_count() == 1 else ()

  def _holding(self, arrays: Any) -> contextlib.AbstractContextManager[None]:
    return self.env.holding(arrays) if arrays else contextlib.nullcontext()  # type: ignore[attr-defined]

  def _init(self, keys: Array, arrays: Any = ()) -> State:
    with self._holding(arrays):
      return self._init_all(keys)

  def _init_all(self, keys: Array) -> State:
    if self.seeds == 1:
      train_key, actor_key, run_key = jax.random.split(keys[0], 3)
      with topology.on_mesh(self.mesh):
        train = self.agent.init(train_key)
      return self._init_one(train, actor_key, run_key)
    split = jax.vmap(lambda key: tuple(jax.random.split(key, 3)))
    train_keys, actor_keys, run_keys = split(keys)
    with topology.on_mesh(self.mesh):
      train = init_members(self.agent, train_keys)
    return jax.vmap(self._init_one, out_axes=SEEDS)(train, actor_keys, run_keys)

  @functools.cached_property
  def shapes(self) -> State:
    """A State of shapes, dtypes and shardings, as `init` returns and a checkpoint holds."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.seeds))
    split = P(None, topology.AXIS) if self.seeds > 1 else P(topology.AXIS)
    shapes = jax.eval_shape(self._init, keys)
    of_train: Any = TrainState(P(), split)
    if not self.agree.split:
      of_train = train_specs(self.agent, shapes.train, self.mesh, int(self.seeds > 1))
    specs = State(of_train, split, split, P(), P(), P())  # type: ignore[arg-type]
    return with_shardings(shapes, specs, self.mesh)

  @functools.cached_property
  def shardings(self) -> State:
    """The sharding of each leaf of a State."""
    return jax.tree.map(lambda x: x.sharding, self.shapes)

  @functools.cached_property
  def init(self) -> Any:
    """(keys [seeds], arrays=()) -> State, placed on the mesh."""
    once = {'xla_backend_optimization_level': 1}  # it runs once, so compiling is the cost
    return jax.jit(self._init, out_shardings=self.shardings, compiler_options=once)

  def _update_one(self, state: State) -> State:
    key = jax.random.fold_in(state.key, state.update)
    act_key, learn_key = jax.random.split(key)
    unroll = self._actor[1]
    actor, trajectory = unroll(self.agree.source(state.train), state.actor, act_key)
    actor = actor._replace(faults=find_faults(actor.faults, self.env.action_space, trajectory))
    train, memory, metrics, count = self._learn(
      state.train, state.memory, trajectory, learn_key, state.update
    )
    log = add_to_log(state.log, metrics, count, state.update)
    return State(train, actor, memory, log, state.key, state.update + 1)

  def _run(self, state: State, updates: Array, arrays: Any = ()) -> State:
    update = self._update_one
    if self.seeds > 1:
      update = jax.vmap(update, in_axes=(SEEDS,), out_axes=SEEDS)
    with self._holding(arrays):
      state = lax.fori_loop(0, updates, lambda _, s: update(s), state)
    return state._replace(train=self._of_each_seed(self.agree.finalize)(state.train))

  def _of_each_seed(self, f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.vmap(f) if self.seeds > 1 else f

  @functools.cached_property
  def run(self) -> Any:
    """(State, updates [] i32, arrays=()) -> State. The first argument is donated."""
    return jax.jit(self._run, donate_argnums=0, out_shardings=self.shardings)

  @functools.cached_property
  def read_log(self) -> Any:
    """State -> (a summary, the State with an empty log). The argument is donated.

    The summary has, for each seed: `metrics` (means since the last reading), `gradient_steps`, and
    the sums over episodes of `podrace.architectures.unroll.pooled`.
    """

    def read(state: State) -> tuple[Any, State]:
      episodes, log = state.actor.episodes, state.log
      summary = dict(
        metrics={
          **{name: x / log.samples for name, x in log.sums.items()},
          **self._of_each_seed(self.agree.metrics)(state.train),
        },
        gradient_steps=log.samples * gradient_steps(self.agent),
        **pooled(episodes),
      )
      zero = jax.tree.map(jnp.zeros_like, (episodes, log.samples, log.sums))
      actor = state.actor._replace(episodes=zero[0])
      return summary, state._replace(actor=actor, log=log._replace(samples=zero[1], sums=zero[2]))

    shardings = (topology.replicated(self.mesh), self.shardings)
    return jax.jit(read, donate_argnums=0, out_shardings=shardings)

  @functools.cached_property
  def health(self) -> Any:
    """State -> (first bad update, all parameters are finite, counts of faults), each by seed.

    The first is the update in which the loss was not finite, -1 if there is none. The counts are
    the numbers of environments with each of `podrace.architectures.faults.FAULTS`.
    """
    has_diverged = diverged(self.agent)

    def is_finite(train: TrainState) -> Array:
      return all_finite(train.params) if has_diverged is None else ~has_diverged(train)

    finite_by_seed = jax.vmap(is_finite) if self.seeds > 1 else is_finite

    def check(state: State) -> tuple[Array, Array, Array]:
      return state.log.broken, finite_by_seed(state.train), count_faults(state.actor.faults)

    return jax.jit(check, out_shardings=topology.replicated(self.mesh))

  # --- for the driver

  @property
  def windows(self) -> Any:
    """The sizes of replay; None if it holds the newest trajectory only."""
    return self.replay.windows

  def present(self, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the summary as it is."""
    return summary

  def check(self, counts: np.ndarray, state: State) -> None:
    """Raise RunError for the faults that `health` has counted."""
    check_faults(counts, self.agent, self.env, lambda: self._action_outside(state))

  def _action_outside(self, state: State) -> Any:
    """Return an action out of the space from the agent's newest answer; None if there is none."""
    if jax.process_count() > 1:
      return None
    one = jax.tree.map(lambda x: x[0] if self.seeds > 1 else x, (state.train.params, state.actor))
    params, actor = jax.tree.map(jnp.asarray, jax.device_get(one))
    act = jax.jit(self.agent.act)
    output, _ = act(params, actor.agent_state, actor.timestep, jax.random.key(0))
    return first_outside(self.env.action_space, np.asarray(output.action))


class _Program(Protocol):
  """The functions that `AnakinDriver` compiles, and two that treat their results on the host."""

  @property
  def mesh(self) -> Any: ...  # as `Architecture.mesh`
  @property
  def shapes(self) -> Any: ...  # as `Architecture.shapes`
  @property
  def windows(self) -> Any: ...  # as `Architecture.windows`
  @property
  def init(self) -> Any: ...  # keys [seeds] -> state
  @property
  def run(self) -> Any: ...  # (state, updates [] i32) -> state; the argument is donated
  @property
  def read_log(self) -> Any: ...  # state -> (summary, state); the argument is donated
  @property
  def health(self) -> Any: ...  # state -> (first bad update or -1, is finite, counts of faults)
  def present(self, summary: dict[str, Any]) -> dict[str, Any]: ...  # for `run.summary.summarize`
  def check(self, counts: np.ndarray, state: Any) -> None: ...  # raises RunError for faults


class AnakinDriver:
  """The `Architecture` of a program that holds all of its state in compiled functions.

  It has no actors and no connections, so there is nothing to start, finish or close.
  """

  parts: Mapping[str, Part] = {}
  saved_replay = None

  def __init__(self, program: _Program) -> None:
    self._program = program
    self.mesh, self.shapes = program.mesh, program.shapes
    arrays = getattr(program, 'arrays', ())
    self._arrays = (arrays,) if arrays else ()
    self.init = (lambda keys: program.init(keys, arrays)) if arrays else program.init
    self.windows = program.windows
    self.ready = self.windows.schedule.ready if self.windows else 0

  def compile(self) -> None:
    """Compile `run`, `read_log` and `health`."""
    one = jax.ShapeDtypeStruct((), jnp.int32)
    self._run = self._program.run.lower(self.shapes, one, *self._arrays).compile()
    self._read_log = self._program.read_log.lower(self.shapes).compile()
    self._health = self._program.health.lower(self.shapes).compile()

  def start(self, state: Any, keys: Array) -> None:
    """Do nothing."""

  def advance(self, state: Any, updates: int, cancelled: Callable[[], bool]) -> tuple[Any, int]:
    """Make `updates` updates in one call, which is not cancelled."""
    return jax.block_until_ready(self._run(state, np.int32(updates), *self._arrays)), updates

  def read_log(self, state: Any) -> tuple[dict[str, Any], Any]:
    """Return a summary since the last reading, and the state after it."""
    summary, state = self._read_log(state)
    return self._program.present(jax.device_get(summary)), state

  def health(self, state: Any) -> tuple[Any, Any]:
    """Return the first bad update and if parameters are finite; raises RunError for faults."""
    broken, finite, counts = jax.device_get(self._health(state))
    self._program.check(counts, state)
    return broken, finite

  def finish(self, state: Any) -> None:
    """Do nothing."""

  def close(self) -> None:
    """Do nothing."""
