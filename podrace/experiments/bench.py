"""How fast Sebulba's stages are: each alone with the sizes of the run, and all together."""

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
from gymnasium import spaces

from podrace.architectures.sebulba import ActingProgram, Actors, ActorSource, Batch, SebulbaDriver
from podrace.architectures.sebulba.device_programs import pack
from podrace.errors import RunError, UsageError
from podrace.run.build import build_sebulba
from podrace.settings.config import Config
from podrace.settings.validation import validate
from podrace.system.output import print_text
from podrace.system.scheduling import cores
from podrace.system.threads import Worker
from podrace.topology import data_size, on_host

PATIENCE = 300.0  # seconds that a stage may take to begin, its workers' start included, or to end


def bench_sebulba(config: Config, seconds: float) -> dict[str, Any]:
  """Steps/s of the environments, of inference, of the learner, and of the whole.

  Environments: all threads' pools at once, with random actions. Inference: all threads at once,
  with the last observation again and again. The learner: the same batch again and again. Each runs
  for about `seconds` after it is compiled; replay has its `min_size` of zeros before, so that every
  update learns as it will in a run. `parallel` is the rate of all three in turns on the same
  cores, `minimum`, where actors and learners have devices of their own, that of the slowest.

  Raises:
    RunError: if the environments do not answer.
  """
  validate(config)
  if config.replay != 'device':
    raise UsageError(
      f'bench measures a learner with all it needs on its devices: no --replay {config.replay}'
    )

  def say(what: str) -> None:
    print_text(what, file=sys.stderr, flush=True)

  driver = build_sebulba(config)
  acting = acting_of(driver)
  say('compiling')
  driver.compile()
  keys = jax.vmap(jax.random.key)(np.array([config.seed], np.uint32))
  state = driver.init(jax.random.clone(keys))
  rates: dict[str, float] = {}
  say('measuring the environments')
  rates['environment'] = environment_rate(acting, state, keys, seconds)
  say('measuring inference')
  rates['inference'] = inference_rate(acting, state, seconds)
  say('measuring the learner')
  rates['learner'] = learner_rate(driver, state, seconds)
  say('measuring the run')
  state = driver.init(jax.random.clone(keys))
  rates['combined'], shares, by_thread = combined_rate(driver, state, keys, seconds)
  stages = [rates[k] for k in ('environment', 'inference', 'learner')]
  rates['parallel'] = 1 / sum(1 / r for r in stages)
  more: dict[str, float] = {}
  if not set(acting.devices) & set(driver.mesh.devices.flat):
    more['combined_over_minimum'] = round(rates['combined'] / min(stages), 3)
    rates['minimum'] = min(stages)
  return {
    'env': config.env,
    'num_envs': config.num_envs,
    'unroll_length': config.unroll_length,
    'threads': acting.local_threads,
    'lag': config.lag,
    **{k: round(v, 1) for k, v in rates.items()},
    'combined_over_parallel': round(rates['combined'] / rates['parallel'], 3),
    'combined_over_environment': round(rates['combined'] / rates['environment'], 3),
    **more,
    'advice': advice(acting, rates),
    'actor_time': shares,
    'actor_time_by_thread': by_thread,
    'bytes': memory(driver),
  }


def advice(program: ActingProgram, rates: dict[str, float]) -> str:
  """What another setting may do better; '' if nothing is known of it."""
  on_cpu = all(d.platform == 'cpu' for d in program.devices)
  if on_cpu and program.local_threads > 1 and rates['combined'] < rates['parallel']:
    return (
      f'{program.local_threads} actor threads and the learner share {cores()} cores, and fill them '
      'no better than one stage after the other would: where a step of environments and network '
      'is this short, threads cost more than they overlap; try --actor-threads 1'
    )
  return ''


def memory(driver: SebulbaDriver) -> dict[str, int]:
  """Bytes on a device: of each actor thread's unroll, and on each learner device.

  The latter are what is learned, the parameters before with lag 1, a batch, and replay.
  """
  s, batch = driver.shapes, driver.learning.batch
  replay = _bytes(s.memory) // data_size(driver.mesh)
  actor = sum(_bytes(t) for t in batch) // acting_of(driver).total_threads
  return {
    'parameters': _bytes(s.train.params),
    'actor_thread': actor,
    'replay': replay,
    'learner_device': _own_bytes((s.train, s.previous))
    + _bytes(batch) // data_size(driver.mesh)
    + replay,
  }


def _own_bytes(tree: Any) -> int:
  """Of a device's part."""
  parts = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree
  )
  return _bytes(parts)


def _bytes(tree: Any) -> int:
  return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def together(
  work: list[Callable[[], int]],
  seconds: float,
  context: Callable[[int], Any] = lambda i: contextlib.nullcontext(),
) -> float:
  """Steps/s of functions that make some steps a call, each called in a thread, all at once.

  The i-th thread is in `context(i)`.

  Raises:
    RunError: if one of them does not come back; its thread is left to itself.
  """
  counts = [0] * len(work)
  ready = threading.Barrier(len(work) + 1)

  def target(i: int) -> None:
    try:
      with context(i):
        work[i]()  # whatever happens only the first time
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


def environment_rate(program: ActingProgram, state: Any, keys: Any, seconds: float) -> float:
  """All pools at once, with the same random actions again and again; with masks, new ones that these allow."""
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
      action, observation = actions[arrival.env_id], arrival.timestep.observation
      masked = isinstance(observation, dict) and 'action_mask' in observation
      if masked and isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        action = allowed(space, observation['action_mask'], rng)
      pool.send(arrival.env_id, action)
      return len(arrival.env_id)

    return call

  with contextlib.ExitStack() as stack:
    for pool in pools:
      stack.callback(pool.close)
    try:
      return together([stepping(pool) for pool in pools], seconds)
    except RunError:  # a thread is in its pool still
      stack.pop_all()
      for pool in pools:
        pool.kill()
      raise


def allowed(space: Any, mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Random actions [n] or [n, choices] i32 of those that the mask [n, ...] has as not 0."""
  mask = np.reshape(mask, (len(mask), -1)) != 0
  chance = np.where(mask, 1 + rng.random(mask.shape), 0)
  if not isinstance(space, spaces.MultiDiscrete):
    return chance.argmax(1).astype(np.int32)
  parts = np.split(chance, np.cumsum(space.nvec.ravel())[:-1], axis=1)
  return np.stack([x.argmax(1) for x in parts], axis=1).astype(np.int32)


def inference_rate(program: ActingProgram, state: Any, seconds: float) -> float:
  """What each actor thread does for a step, but for the environments."""
  n, length = program.envs_per_thread, program.unroll_length
  size = n if program.ordered else program.batch_size
  step = program.programs.step if program.ordered else program.programs.step_some
  example = jax.tree.map(lambda x: x[:size], program.example)
  ids = np.arange(size, dtype=np.int32)

  def acting(local: int) -> Callable[[], int]:
    device = program.device_of(local)
    params = jax.device_put(jax.tree.map(on_host, state.train.params), device)
    env_id = jax.device_put(np.zeros(n, np.int32), device)
    with jax.default_device(device):  # as in a run: else it compiles anew
      carry = program.programs.begin(params, env_id, program.example, jax.random.key(0))
      held: dict[str, Any] = {
        'carry': carry, 'keys': program.programs.keys(jax.random.key(1)), 't': 0,
      }  # fmt: skip

    def call() -> int:
      t = held['t'] % length
      held['t'] += 1
      more = (t, t) if program.ordered else (t, ids, t, ids)  # what `Acting` has each be given
      numbers = pack(example, *more)
      held['carry'], action = step(
        params, held['carry'], held['keys'], numbers, example.observation
      )
      np.asarray(jax.tree.leaves(action)[0])
      return size

    return call

  return together(
    [acting(i) for i in range(program.local_threads)],
    seconds,
    lambda i: jax.default_device(program.device_of(i)),
  )


def acting_of(driver: SebulbaDriver) -> ActingProgram:
  """The acting half of a run whose learner takes its actors' unrolls."""
  assert isinstance(driver.source, ActorSource)
  return driver.source.acting


def zeros(driver: SebulbaDriver) -> Batch:
  """A batch for the learner."""
  shapes = driver.learning.batch
  place = lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
  return Batch(jax.tree.map(place, shapes))


def filled(driver: SebulbaDriver, state: Any) -> Any:
  """The state of which the next update learns: those before only fill replay, with zeros."""
  if driver.windows is None:
    return state
  batch = zeros(driver)
  for _ in range(driver.windows.schedule.ready):
    state, _ = driver.learning.learn(state, batch)
  return jax.block_until_ready(state)


def steps_per_update(driver: SebulbaDriver) -> int:
  acting = acting_of(driver)
  return acting.num_envs * acting.unroll_length


def learner_rate(driver: SebulbaDriver, state: Any, seconds: float) -> float:
  """The same batch of zeros again and again."""
  batch = zeros(driver)
  held = [filled(driver, state)]

  def call() -> int:
    held[0] = jax.block_until_ready(driver.learning.learn(held[0], batch)[0])
    return steps_per_update(driver)

  return together([call], seconds)


def combined_rate(
  driver: SebulbaDriver, state: Any, keys: Any, seconds: float
) -> tuple[float, dict[str, float], list[dict[str, float]]]:
  """The run itself; and the shares of the actor threads' time, of all and of each."""
  state = filled(driver, state)
  driver.start(state, keys, {})
  try:
    state, _ = driver.advance(state, 3, lambda: False)
    _, state = driver.read_log(state)
    start, updates = time.perf_counter(), 0
    while time.perf_counter() < start + 2 * seconds:
      state, made = driver.advance(state, 10, lambda: False)  # many a call, as in a run
      updates += made
    rate = updates * steps_per_update(driver) / (time.perf_counter() - start)
    assert isinstance(driver.source, ActorSource)
    by_thread = driver.source.shares_by_thread()
    found, _ = driver.read_log(state)
  finally:
    driver.close()
  return rate, {k: v for k, v in found['host'].items() if k.startswith('actor_')}, by_thread
