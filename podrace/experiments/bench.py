"""Speeds of Sebulba's stages: each alone with the sizes of the run, and all together."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.architectures.sebulba import ActingProgram, Actors, ActorSource, Batch, SebulbaDriver
from podrace.architectures.sebulba.device_programs import pack
from podrace.envs.host.spaces import allowed_choices, best_choices
from podrace.errors import RunError, UsageError
from podrace.run.build import build_sebulba
from podrace.settings.config import Config
from podrace.settings.resolved import resolve
from podrace.system.output import print_text
from podrace.system.scheduling import cores
from podrace.system.threads import Worker
from podrace.topology import data_size, on_host

PATIENCE = 300.0  # seconds within which a stage must begin, its workers' start included, or end


def bench_sebulba(config: Config, seconds: float) -> dict[str, Any]:
  """Measure steps/s of the environments, of inference, of the learner, and of the whole run.

  Environments: all threads' pools at once, with random actions. Inference: all threads at once,
  with one repeated observation. Learner: one repeated batch, after replay is filled with `min_size`
  zeros, so that each update learns as in a run. Each runs for about `seconds` after compilation.

  Returns:
    Rates, shares of the actors' time, and bytes. `parallel` is the rate of the three stages in
    turns on the same cores. `minimum`, present if actors and learners have separate devices, is the
    rate of the slowest.

  Raises:
    RunError: if the environments do not answer.
  """
  if config.architecture != 'sebulba':
    raise UsageError(f'bench measures sebulba: leave out --architecture {config.architecture}')
  resolved = resolve(config)
  if config.replay != 'device':
    raise UsageError(
      f'bench measures a learner with all it needs on its devices: no --replay {config.replay}'
    )

  def say(text: str) -> None:
    print_text(text, file=sys.stderr, flush=True)

  driver = build_sebulba(resolved)
  acting = acting_program(driver)
  say('compiling')
  driver.compile()
  rates, shares, by_thread = _measure(config, driver, seconds, say)
  more: dict[str, float] = {}
  if 'minimum' in rates:
    more['combined_over_minimum'] = round(rates['combined'] / rates['minimum'], 3)
  return {
    'env': config.env,
    'num_envs': config.num_envs,
    'unroll_length': config.unroll_length,
    'threads': acting.local_threads,
    'groups': acting.groups,
    'lag': config.lag,
    **{k: round(v, 1) for k, v in rates.items()},
    'combined_over_parallel': round(rates['combined'] / rates['parallel'], 3),
    'combined_over_environment': round(rates['combined'] / rates['environment'], 3),
    **more,
    'advice': advise(acting, rates),
    'actor_time': shares,
    'actor_time_by_thread': by_thread,
    'bytes': count_bytes(driver),
  }


def _measure(
  config: Config, driver: SebulbaDriver, seconds: float, say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, float], list[dict[str, float]]]:
  """Return the rates by stage, and the shares of the actor threads' time, of all and of each."""
  acting = acting_program(driver)
  keys = jax.vmap(jax.random.key)(np.array([config.seed], np.uint32))
  state = driver.init(jax.random.clone(keys))
  rates: dict[str, float] = {}
  say('measuring the environments')
  rates['environment'] = measure_environments(acting, state, keys, seconds)
  say('measuring inference')
  rates['inference'] = measure_inference(acting, state, seconds)
  say('measuring the learner')
  rates['learner'] = measure_learner(driver, state, seconds)
  stages = list(rates.values())
  say('measuring the run')
  state = driver.init(jax.random.clone(keys))
  rates['combined'], shares, by_thread = measure_combined(driver, state, keys, seconds)
  if not all(rates.values()):
    raise RunError(f'nothing was measured in {seconds:g} s a stage: give more --seconds')
  rates['parallel'] = 1 / sum(1 / r for r in stages)
  if not set(acting.devices) & set(driver.mesh.devices.flat):
    rates['minimum'] = min(stages)
  return rates, shares, by_thread


def advise(program: ActingProgram, rates: dict[str, float]) -> str:
  """Return advice about a faster setting, or ''."""
  on_cpu = all(d.platform == 'cpu' for d in program.devices)
  if on_cpu and program.local_threads > 1 and rates['combined'] < rates['parallel']:
    return (
      f'{program.local_threads} actor threads and the learner share {cores()} cores, and fill them '
      'no better than one stage after the other would: where a step of environments and network '
      'is this short, threads cost more than they overlap; try --actor-threads 1'
    )
  return ''


def count_bytes(driver: SebulbaDriver) -> dict[str, int]:
  """Count bytes of each actor thread's unroll, and of each learner device.

  A learner device holds the learned parameters, the previous ones with lag 1, a batch, and replay.
  """
  s, batch = driver.shapes, driver.learning.batch
  replay = _count_bytes(s.memory) // data_size(driver.mesh)
  actor = sum(_count_bytes(t) for t in batch) // acting_program(driver).total_threads
  return {
    'parameters': _count_bytes(s.train.params),
    'actor_thread': actor,
    'replay': replay,
    'learner_device': _count_shard_bytes((s.train, s.previous))
    + _count_bytes(batch) // data_size(driver.mesh)
    + replay,
  }


def _count_shard_bytes(tree: Any) -> int:
  """Count the bytes of one device's shard."""
  parts = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree
  )
  return _count_bytes(parts)


def _count_bytes(tree: Any) -> int:
  return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure_threads(
  work: list[Callable[[], int]],
  seconds: float,
  context: Callable[[int], Any] = lambda i: contextlib.nullcontext(),
) -> float:
  """Return the total steps/s of functions that run in one thread each, all at once.

  Args:
    work: functions that make some steps a call and return their number.
    seconds: duration of the measurement.
    context: context manager that thread i enters.

  Raises:
    RunError: if a function does not return. Its thread is abandoned.
  """
  counts = [0] * len(work)
  ready = threading.Barrier(len(work) + 1)

  def target(i: int) -> None:
    try:
      with context(i):
        work[i]()  # compilation and other first-time work
        ready.wait(PATIENCE)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
          counts[i] += work[i]()
    except threading.BrokenBarrierError:
      pass
    except BaseException:
      ready.abort()
      raise

  workers = [Worker(f'measured-{i}', functools.partial(target, i)) for i in range(len(work))]
  with contextlib.suppress(threading.BrokenBarrierError):
    ready.wait(PATIENCE)
  start = time.perf_counter()
  end = start if ready.broken else start + seconds + PATIENCE
  ended = [worker.wait(max(end - time.perf_counter(), 0)) for worker in workers]
  for worker in workers:
    worker.check()
  if ready.broken or not all(ended):
    raise RunError(f'what is measured has not answered for {PATIENCE:.0f} s')
  return sum(counts) / (time.perf_counter() - start)


def measure_environments(program: ActingProgram, state: Any, keys: Any, seconds: float) -> float:
  """Return steps/s of all pools at once, with repeated random actions.

  With action masks, the actions are drawn anew.
  """
  actor_key = jax.random.split(keys[0], 3)[1]
  pools = Actors(program, {0: state.train.params}, state.key, actor_key, start=False).pools

  def stepping(pool: Any) -> Callable[[], int]:
    space, n = program.spec.action_space, pool.num_envs
    space.seed(0)
    actions, rng = np.stack([space.sample() for _ in range(n)]), np.random.default_rng(0)
    begun = False

    def call() -> int:
      nonlocal begun
      if not begun:
        pool.reset()
        begun = True
      arrival = pool.recv()
      action = actions[arrival.env_id]
      mask = allowed_choices(space, arrival.timestep.observation, len(action))
      if mask is not None:
        action = best_choices(space, rng.random(mask.shape) * mask)
      pool.send(arrival.env_id, action)
      return len(arrival.env_id)

    return call

  with contextlib.ExitStack() as stack:
    for pool in pools:
      stack.callback(pool.close)
    try:
      return measure_threads([stepping(pool) for pool in pools], seconds)
    except RunError:  # a thread may still be in its pool
      stack.pop_all()
      for pool in pools:
        pool.kill()
      raise


def measure_inference(program: ActingProgram, state: Any, seconds: float) -> float:
  """Return steps/s of all actor threads' steps, without environments."""
  n, length = program.envs_per_group, program.unroll_length
  size = n if program.ordered else program.batch_size
  step = program.programs.step if program.ordered else program.programs.step_some
  example = jax.tree.map(lambda x: x[:size], program.example)
  ids = np.arange(size, dtype=np.int32)

  def acting(local: int) -> Callable[[], int]:
    device = program.device_of(local * program.groups)
    params = jax.device_put(jax.tree.map(on_host, state.train.params), device)
    env_id = jax.device_put(np.zeros(n, np.int32), device)
    with jax.default_device(device):  # as in a run; otherwise it compiles again
      carry = program.programs.begin(params, env_id, program.example, jax.random.key(0))
      loop_state: dict[str, Any] = {
        'carry': carry, 'keys': program.programs.keys(jax.random.key(1)), 't': 0,
      }  # fmt: skip

    def call() -> int:
      t = loop_state['t'] % length
      loop_state['t'] += 1
      more = (
        (t, t) if program.ordered else (t, ids, t, ids)
      )  # the arguments that `Inference` passes
      numbers = pack(example, *more)
      loop_state['carry'], action = step(
        params, loop_state['carry'], loop_state['keys'], numbers, example.observation
      )
      np.asarray(jax.tree.leaves(action)[0])
      return size

    return call

  return measure_threads(
    [acting(i) for i in range(program.local_threads)],
    seconds,
    lambda i: jax.default_device(program.device_of(i * program.groups)),
  )


def acting_program(driver: SebulbaDriver) -> ActingProgram:
  """Return the acting half of a run that learns from its actors' unrolls."""
  assert isinstance(driver.source, ActorSource)
  return driver.source.acting


def make_zero_batch(driver: SebulbaDriver) -> Batch:
  """Return a batch of zeros for the learner."""
  shapes = driver.learning.batch
  place = lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
  return Batch(jax.tree.map(place, shapes))


def fill_replay(driver: SebulbaDriver, state: Any) -> Any:
  """Return a state in which the next update learns. Earlier updates only fill replay."""
  if driver.windows is None:
    return state
  batch = make_zero_batch(driver)
  for _ in range(driver.windows.schedule.ready):
    state, _ = driver.learning.learn(state, batch)
  return jax.block_until_ready(state)


def steps_per_update(driver: SebulbaDriver) -> int:
  """Return the environment steps of one update."""
  acting = acting_program(driver)
  return acting.num_envs * acting.unroll_length


def measure_learner(driver: SebulbaDriver, state: Any, seconds: float) -> float:
  """Return steps/s of the learner with one repeated batch of zeros."""
  batch = make_zero_batch(driver)
  held = [fill_replay(driver, state)]

  def call() -> int:
    held[0] = jax.block_until_ready(driver.learning.learn(held[0], batch)[0])
    return steps_per_update(driver)

  return measure_threads([call], seconds)


def measure_combined(
  driver: SebulbaDriver, state: Any, keys: Any, seconds: float
) -> tuple[float, dict[str, float], list[dict[str, float]]]:
  """Return steps/s of the run, and the shares of the actor threads' time, of all and of each."""
  state = fill_replay(driver, state)
  driver.start(state, keys)
  try:
    state, _ = driver.advance(state, 3, lambda: False)
    _, state = driver.read_log(state)
    start, updates = time.perf_counter(), 0
    while time.perf_counter() < start + 2 * seconds:
      state, made = driver.advance(state, 10, lambda: False)  # many calls, as in a run
      updates += made
    rate = updates * steps_per_update(driver) / (time.perf_counter() - start)
    assert isinstance(driver.source, ActorSource)
    by_thread = driver.source.shares_by_thread()
    summary, _ = driver.read_log(state)
  finally:
    driver.close()
  return rate, {k: v for k, v in summary['host'].items() if k.startswith('actor_')}, by_thread
