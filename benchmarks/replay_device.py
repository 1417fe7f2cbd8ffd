"""Replay on the device against flashbax: steps added and items sampled in a second.

Both sides hold the same experience in the same layout (environments side by side, unrolls added as they come), are
compiled with their state donated, and run in processes of their own, in turn. Sampling is timed as a program that draws
and reduces many batches. Both sides sum all that they keep, so that neither can leave out the reading: observation,
reward, discount, step type and action, and with priorities the weights or probabilities. (Of the action, flashbax has
one row more in each window: the step after its last.)

- small: observations of 16 bytes, 64 environments, unrolls of 16, batches of 256 transitions;
- prioritised: the same with a million items, sampling and giving the sampled ones new priorities;
- sequences: 80 steps of 84 x 84 pixels, starting at every 40th, 16 environments, batches of 16.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import common
import jax
import jax.numpy as jnp
import timing
from jax import lax

SMALL = dict(envs=64, unroll=16, rows=15_616, steps=1, batch=256, pixels=0)
SEQUENCES = dict(envs=16, unroll=40, rows=2_000, steps=80, batch=16, pixels=84)
SETTINGS: dict[str, dict[str, Any]] = {
  'small, uniform': dict(SMALL, rank=False),
  'small, prioritised': dict(SMALL, rank=True),
  'sequences, uniform': dict(SEQUENCES, rank=False),
  'sequences, prioritised': dict(SEQUENCES, rank=True),
}
ADDS, DRAWS = 20, 50  # in one call


def arrays(key: Any, pixels: int, *shape: int) -> tuple[Any, Any, Any, Any]:
  """Returns observations, rewards, discounts and step types of this shape."""
  rewards, ones = jax.random.normal(key, shape), jnp.ones(shape)
  if pixels:
    seen = jax.random.bits(key, (*shape, pixels, pixels), jnp.uint8)
  else:
    seen = jax.random.normal(key, (*shape, 4))
  return seen, rewards, ones, ones.astype(jnp.int8)


def ours(s: dict[str, Any]) -> Any:
  from podrace.replay import Buffer, windows
  from podrace.types import ActorOutput, TimeStep, Trajectory

  n, t = s['envs'], s['unroll']
  exponent = 0.6 if s['rank'] else 0.0
  buffer = Buffer(capacity=s['rows'] * n, batch_size=s['batch'], priority_exponent=exponent)
  replay = windows(buffer, s['steps'], n, t, keep_state=s['steps'] > 1)

  def unroll(key: Any) -> Any:
    steps = TimeStep(*arrays(key, s['pixels'], t + 1, n))
    return Trajectory(steps, ActorOutput(jnp.zeros((t, n), jnp.int32)), (), jnp.arange(n))

  def draw(state: Any, key: Any) -> Any:
    sample = replay.sample(state, key)
    state = replay.update(state, sample.index, jnp.abs(sample.trajectory.timesteps.reward[0]))
    return state, (sample.trajectory.timesteps, sample.trajectory.outputs, sample.weight)

  example = jax.eval_shape(unroll, jax.random.key(0))
  return unroll, lambda: replay.init(example), replay.add, draw


def flashbax(s: dict[str, Any]) -> Any:
  import flashbax as fbx

  n, t = s['envs'], s['unroll']
  settings = dict(
    add_batch_size=n, sample_batch_size=s['batch'], sample_sequence_length=s['steps'] + 1,
    period=t if s['steps'] > 1 else 1, min_length_time_axis=s['steps'] + 1, max_length_time_axis=s['rows'],
  )  # fmt: skip
  if s['rank']:
    settings |= dict(priority_exponent=0.6, device=jax.default_backend())
    buffer = fbx.make_prioritised_trajectory_buffer(**settings)
  else:
    buffer = fbx.make_trajectory_buffer(**settings)

  def unroll(key: Any) -> Any:
    names = ('observation', 'reward', 'discount', 'step_type')
    steps = dict(zip(names, arrays(key, s['pixels'], n, t), strict=True))
    return steps | dict(action=jnp.zeros((n, t), jnp.int32))

  def init() -> Any:
    return buffer.init(jax.tree.map(lambda x: x[0, 0], unroll(jax.random.key(0))))

  def draw(state: Any, key: Any) -> Any:
    sample = buffer.sample(state, key)
    if not s['rank']:
      return state, sample.experience
    priorities = jnp.abs(sample.experience['reward'][:, 0])
    state = buffer.set_priorities(state, sample.indices, priorities)
    return state, (sample.experience, sample.probabilities)

  return unroll, init, buffer.add, draw


def total(x: Any) -> Any:
  return jnp.sum(x.astype(jnp.float32) if x.ndim < 4 else x.astype(jnp.uint32))


def measure(side: str, setting: dict[str, Any], repeats: int) -> dict[str, Any]:
  """In a worker: returns the steps added, and items sampled, in a second."""
  s = setting
  unroll, init, add, draw = (ours if side == 'podrace' else flashbax)(s)

  def add_many(state: Any, unrolls: Any) -> Any:
    one = lambda i, state: add(state, jax.tree.map(lambda x: x[i % 2], unrolls))  # noqa: E731
    return lax.fori_loop(0, ADDS, one, state)

  def draw_many(state: Any, key: Any) -> Any:
    def one(state: Any, key: Any) -> Any:
      state, drawn = draw(state, key)
      return state, sum(map(total, jax.tree.leaves(drawn)))

    state, sums = lax.scan(one, state, jax.random.split(key, DRAWS))
    return state, jnp.sum(sums)

  adding, drawing = (jax.jit(f, donate_argnums=0) for f in (add_many, draw_many))
  unrolls = jax.jit(jax.vmap(unroll))(jax.random.split(jax.random.key(0), 2))
  state = jax.jit(init)()
  for _ in range(-(-s['rows'] // (ADDS * s['unroll'])) + 1):  # full, and compiled
    state = jax.block_until_ready(adding(state, unrolls))
  state, _ = jax.block_until_ready(drawing(state, jax.random.key(1)))
  added, drawn = [], []
  for i in range(repeats):
    took, state = timing.timed(lambda state=state: adding(state, unrolls))
    added.append(ADDS * s['unroll'] * s['envs'] / took)
    key = jax.random.key(2 + i)
    took, (state, _) = timing.timed(lambda state=state, key=key: drawing(state, key))
    drawn.append(DRAWS * s['batch'] / took)
  return dict(added=added, sampled=drawn)


def main() -> None:
  args = common.arguments(__doc__, SETTINGS, rounds=3, repeats=(5, 'in one round'), rows=(0, 'fewer rows'))  # fmt: skip
  if args.worker:
    common.serve(measure=lambda **request: measure(args.worker[0], **request))
    return
  pythons = {'flashbax': common.peer('flashbax'), 'podrace': sys.executable}
  pinned = common.pins(pythons['flashbax'], 'flashbax', 'jax')
  for name in args.cases:
    setting = SETTINGS[name] | ({'rows': args.rows} if args.rows else {})
    rates: dict[str, dict[str, list[float]]] = {k: dict(added=[], sampled=[]) for k in pythons}
    for _ in range(args.rounds):
      for side, python in pythons.items():
        command = [python, 'benchmarks/replay_device.py', '--worker', side]
        with common.Worker(command) as worker:
          answer = worker.ask(do='measure', setting=setting, repeats=args.repeats)
        for part, values in answer.items():
          rates[side][part] += values
    medians = {k: {x: statistics.median(v) for x, v in one.items()} for k, one in rates.items()}
    ratio = {x: medians['podrace'][x] / medians['flashbax'][x] for x in ('added', 'sampled')}
    print(f'{name}: {medians}, ratio {ratio}', flush=True)
    sides = {side: common.summaries(one) for side, one in rates.items()}
    common.keep('replay_device', name, dict(setting=setting, ratio=ratio, **sides), SETTINGS, pinned)  # fmt: skip


if __name__ == '__main__':
  main()
