"""Anakin: environment, acting and learning are one compiled program on every device.

Hessel et al. 2021 (arXiv 2104.06272). One call runs as many updates as it is asked for: the number
is data, so one program serves all, and what is computed does not depend on how the updates are
divided into calls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace import topology
from podrace.architectures.agreement import Agreement, AllReduce
from podrace.architectures.faults import check_faults, count_faults, find_faults, first_outside
from podrace.architectures.protocol import Extra
from podrace.architectures.sharding import train_specs
from podrace.architectures.unroll import ActorState, actor_on_mesh, pooled
from podrace.envs.base import batch
from podrace.hooks import gradient_steps, init_members
from podrace.learner import Log, add_to_log, all_finite, empty_log, init_memory
from podrace.types import Agent, Array, Environment, Replay, TrainState


class State(NamedTuple):
  """The whole state of a run; with seeds, each leaf but `update` has a leading axis for them."""

  train: TrainState  # the same along AXIS; of replicas that gossip, `rest` is split over them
  actor: ActorState  # split over devices along [B]
  memory: Any  # replay, split likewise
  log: Log
  key: Array  # of the run; never changes
  update: Array  # [] i32 how many updates were made


_axes: Any = (0, 0, 0, 0, 0, None)
SEEDS = State(*_axes)  # where each field has its axis of seeds


@dataclasses.dataclass(frozen=True)
class Anakin:
  """One agent in one kind of environment on one mesh, as two compiled functions.

  `seeds` > 1 trains that many independent agents in one program; each has `num_envs`
  environments of its own and computes what it would alone, up to rounding. `agree` is how devices
  come to parameters that all of them know.
  """

  agent: Agent
  env: Environment
  replay: Replay
  mesh: Mesh
  num_envs: int
  unroll_length: int
  seeds: int = 1
  agree: Agreement = AllReduce()

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

  def _init(self, keys: Array) -> State:
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
    """A State of shapes, dtypes and shardings: what `init` makes and a checkpoint holds."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), self.seeds))
    split = P(None, topology.AXIS) if self.seeds > 1 else P(topology.AXIS)
    shapes = jax.eval_shape(self._init, keys)
    of_train: Any = TrainState(P(), split) if self.agree.split else self._train_specs(shapes.train)
    specs = State(of_train, split, split, P(), P(), P())  # type: ignore[arg-type]

    def place(spec: P, tree: Any) -> Any:
      sharding = NamedSharding(self.mesh, spec)
      return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    return jax.tree.map(place, specs, shapes)

  def _train_specs(self, train: TrainState) -> TrainState:
    return train_specs(self.agent, train, self.mesh, int(self.seeds > 1))

  @functools.cached_property
  def shardings(self) -> State:
    """Where each leaf of a State lives."""
    return jax.tree.map(lambda x: x.sharding, self.shapes)

  @functools.cached_property
  def init(self) -> Any:
    """keys [seeds] -> State, placed on the mesh."""
    once = {'xla_backend_optimization_level': 1}  # it runs once: compiling it is the cost
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

  def _run(self, state: State, updates: Array) -> State:
    update = self._update_one
    if self.seeds > 1:
      update = jax.vmap(update, in_axes=(SEEDS,), out_axes=SEEDS)
    state = lax.fori_loop(0, updates, lambda _, s: update(s), state)
    return state._replace(train=self._of_each_seed(self.agree.settled)(state.train))

  def _of_each_seed(self, f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.vmap(f) if self.seeds > 1 else f

  @functools.cached_property
  def run(self) -> Any:
    """(State, updates [] i32) -> State. The state given is donated: it is gone afterwards."""
    return jax.jit(self._run, donate_argnums=0, out_shardings=self.shardings)

  @functools.cached_property
  def read_log(self) -> Any:
    """State -> (a summary, the State with its log emptied); the state given is donated.

    The summary has, for each seed: `metrics` (means since the last reading), `gradient_steps`, and what
    `podrace.architectures.unroll.pooled` says of the episodes.
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
    """State -> (the first update whose loss was not finite or -1, all parameters are finite, in
    how many environments there was each of `podrace.run.check_agent.FAULTS`)."""

    def check(state: State) -> tuple[Array, Array, Array]:
      return state.log.broken, all_finite(state.train.params), count_faults(state.actor.faults)

    return jax.jit(check, out_shardings=topology.replicated(self.mesh))

  # --- what the driver asks for

  @property
  def windows(self) -> Any:
    return self.replay.windows

  def presented(self, summary: dict[str, Any]) -> dict[str, Any]:
    return summary

  def check(self, counts: np.ndarray, state: State) -> None:
    check_faults(counts, self.agent, self.env, lambda: self._action_outside(state))

  def _action_outside(self, state: State) -> Any:
    """An action that is out of the space, if the agent's answer to the newest timesteps has one."""
    if jax.process_count() > 1:
      return None
    one = jax.tree.map(lambda x: x[0] if self.seeds > 1 else x, (state.train.params, state.actor))
    params, actor = jax.tree.map(jnp.asarray, jax.device_get(one))
    act = jax.jit(self.agent.act)
    output, _ = act(params, actor.agent_state, actor.timestep, jax.random.key(0))
    return first_outside(self.env.action_space, np.asarray(output.action))


class Program(Protocol):
  """What `AnakinDriver` runs: functions that compile, and what is done with their results on the host."""

  @property
  def mesh(self) -> Mesh: ...
  @property
  def shapes(self) -> Any: ...
  @property
  def init(self) -> Any: ...
  @property
  def run(self) -> Any: ...
  @property
  def read_log(self) -> Any: ...
  @property
  def health(self) -> Any: ...
  @property
  def windows(self) -> Any:
    """As `Architecture.windows`."""
    ...

  def presented(self, summary: dict[str, Any]) -> dict[str, Any]:
    """What `read_log` said, for `podrace.run.summary.described`."""
    ...

  def check(self, counts: np.ndarray, state: Any) -> None:
    """Raises RunError for the faults that `health` has counted."""
    ...


class AnakinDriver:
  """An `Architecture`: all of it is in the compiled program.

  `results` is called at each checkpoint, with the run directory and the state.
  """

  def __init__(
    self, program: Program, results: Callable[[Path, Any], None] = lambda run_dir, state: None
  ) -> None:
    self._program, self.results = program, results
    self.mesh, self.shapes, self.init = program.mesh, program.shapes, program.init
    self.windows = program.windows
    self.ready = self.windows.schedule.ready if self.windows else 0

  def compile(self) -> None:
    one = jax.ShapeDtypeStruct((), jnp.int32)
    self._run = self._program.run.lower(self.shapes, one).compile()
    self._read_log = self._program.read_log.lower(self.shapes).compile()
    self._health = self._program.health.lower(self.shapes).compile()

  def start(self, state: Any, keys: Array, statistics: dict[str, Any]) -> None:
    pass

  def advance(self, state: Any, updates: int, give_up: Callable[[], bool]) -> tuple[Any, int]:
    return jax.block_until_ready(self._run(state, np.int32(updates))), updates

  def read_log(self, state: Any) -> tuple[dict[str, Any], Any]:
    summary, state = self._read_log(state)
    return self._program.presented(jax.device_get(summary)), state

  def health(self, state: Any) -> tuple[Any, Any]:
    broken, finite, counts = jax.device_get(self._health(state))
    self._program.check(counts, state)
    return broken, finite

  def statistics(self) -> dict[str, Any]:
    return {}

  def save(self, path: Path) -> Extra | None:
    return None

  def finished(self, state: Any) -> None:
    pass

  def restore(self, path: Path, record: dict[str, Any] | None) -> None:
    pass

  def close(self) -> None:
    pass
