"""Replay on the device against flashbax: what is added and sampled in a second.

Both sides hold the same experience in the same layout (environments side by side, unrolls added as
they come), are compiled with their state donated, and run in processes of their own, in turn. Sampling is
timed as a program that draws and reduces many batches, of which both sides sum all that they keep, so that
none can leave out the reading: observation, reward, discount, step type and action, and with priorities the weights or
probabilities. (Of the action, flashbax has one row more in each window: the step after its last.)

- small: observations of 16 bytes, 64 environments, unrolls of 16, batches of 256 transitions;
- prioritised: the same with a million items, sampling and giving the sampled ones new priorities;
- sequences: 80 steps of 84 x 84 pixels, starting at every 40th, 16 environments, batches of 16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import common

SETTINGS: dict[str, dict[str, Any]] = {
  'small, uniform': dict(envs=64, unroll=16, rows=15_616, steps=1, batch=256, pixels=0, rank=False),
  'small, prioritised': dict(
    envs=64, unroll=16, rows=15_616, steps=1, batch=256, pixels=0, rank=True
  ),
  'sequences, uniform': dict(
    envs=16, unroll=40, rows=2_000, steps=80, batch=16, pixels=84, rank=False
  ),
  'sequences, prioritised': dict(
    envs=16, unroll=40, rows=2_000, steps=80, batch=16, pixels=84, rank=True
  ),
}
ADDS, DRAWS = 20, 50  # in one call


# --- both sides: functions (add, sample and re-prioritise) over a state ---------------------------


def ours(s: dict[str, Any]) -> Any:
  import jax
  import jax.numpy as jnp

  from podrace.replay import Buffer, windows
  from podrace.types import ActorOutput, TimeStep, Trajectory

  n, t = s['envs'], s['unroll']
  buffer = Buffer(
    capacity=s['rows'] * n, batch_size=s['batch'], priority_exponent=0.6 if s['rank'] else 0.0
  )
  sequences = s['steps'] > 1
  replay = windows(buffer, s['steps'], n, t, keep_state=sequences)

  def unroll(key: Any) -> Any:
    def floats(*shape: int) -> Any:
      return jax.random.normal(key, shape)

    pixels = s['pixels']
    observation = (
      jax.random.bits(key, (t + 1, n, pixels, pixels), jnp.uint8) if pixels else floats(t + 1, n, 4)
    )
    ones = jnp.ones((t + 1, n))
    steps = TimeStep(observation, floats(t + 1, n), ones, ones.astype(jnp.int8))
    return Trajectory(steps, ActorOutput(jnp.zeros((t, n), jnp.int32)), (), jnp.arange(n))

  def draw(state: Any, key: Any) -> Any:
    sample = replay.sample(state, key)
    state = replay.update(state, sample.index, jnp.abs(sample.trajectory.timesteps.reward[0]))
    return state, (sample.trajectory.timesteps, sample.trajectory.outputs, sample.weight)

  example = jax.eval_shape(unroll, jax.random.key(0))
  return unroll, lambda: replay.init(example), replay.add, draw


def flashbax(s: dict[str, Any]) -> Any:
  import flashbax as fbx
  import jax
  import jax.numpy as jnp

  n, t = s['envs'], s['unroll']
  sequences = s['steps'] > 1
  settings = dict(
    add_batch_size=n, sample_batch_size=s['batch'], sample_sequence_length=s['steps'] + 1,
    period=t if sequences else 1, min_length_time_axis=s['steps'] + 1,
    max_length_time_axis=s['rows'],
  )  # fmt: skip
  if s['rank']:
    buffer = fbx.make_prioritised_trajectory_buffer(
      **settings, priority_exponent=0.6, device=jax.default_backend()
    )
  else:
    buffer = fbx.make_trajectory_buffer(**settings)

  def unroll(key: Any) -> Any:
    def floats(*shape: int) -> Any:
      return jax.random.normal(key, shape)

    pixels = s['pixels']
    observation = (
      jax.random.bits(key, (n, t, pixels, pixels), jnp.uint8) if pixels else floats(n, t, 4)
    )
    ones = jnp.ones((n, t))
    return dict(
      observation=observation, reward=floats(n, t), discount=ones,
      step_type=ones.astype(jnp.int8), action=jnp.zeros((n, t), jnp.int32),
    )  # fmt: skip

  def init() -> Any:
    return buffer.init(jax.tree.map(lambda x: x[0, 0], unroll(jax.random.key(0))))

  def draw(state: Any, key: Any) -> Any:
    sample = buffer.sample(state, key)
    told: Any = sample.experience
    if s['rank']:
      state = buffer.set_priorities(
        state, sample.indices, jnp.abs(sample.experience['reward'][:, 0])
      )
      told = (told, sample.probabilities)
    return state, told

  return unroll, init, buffer.add, draw


def work(side: str) -> None:
  """Answers: how many steps are added, and items sampled, in a second."""
  import jax
  import jax.numpy as jnp
  from jax import lax

  for request in common.requests():
    s = request['setting']
    unroll, init, add, draw = (ours if side == 'podrace' else flashbax)(s)

    def add_many(state: Any, unrolls: Any, add: Any = add) -> Any:
      return lax.fori_loop(
        0, ADDS, lambda i, st: add(st, jax.tree.map(lambda x: x[i % 2], unrolls)), state
      )

    def draw_many(state: Any, key: Any, draw: Any = draw) -> Any:
      def one(state: Any, key: Any) -> Any:
        state, found = draw(state, key)
        return state, sum(
          jnp.sum(x.astype(jnp.float32) if x.ndim < 4 else x.astype(jnp.uint32))
          for x in jax.tree.leaves(found)
        )

      state, sums = lax.scan(one, state, jax.random.split(key, DRAWS))
      return state, jnp.sum(sums)

    adding = jax.jit(add_many, donate_argnums=0)
    drawing = jax.jit(draw_many, donate_argnums=0)
    unrolls = jax.block_until_ready(
      jax.jit(jax.vmap(unroll))(jax.random.split(jax.random.key(0), 2))
    )
    state = jax.jit(init)()
    for _ in range(-(-s['rows'] // (ADDS * s['unroll'])) + 1):  # full, and compiled
      state = jax.block_until_ready(adding(state, unrolls))
    state, _ = jax.block_until_ready(drawing(state, jax.random.key(1)))
    added, drawn = [], []
    for i in range(request['repeats']):
      took, state = common.timed(lambda state=state: adding(state, unrolls))
      added.append(ADDS * s['unroll'] * s['envs'] / took)
      took, (state, _) = common.timed(
        lambda state=state, i=i: drawing(state, jax.random.key(2 + i))
      )
      drawn.append(DRAWS * s['batch'] / took)
    common.answer(added=added, sampled=drawn)


# --- the comparison -------------------------------------------------------------------------------


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--repeats', type=int, default=5, help='in one round')
  parser.add_argument('--worker', choices=['podrace', 'flashbax'], help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    return work(args.worker)
  pythons = {'flashbax': common.peer('flashbax'), 'podrace': sys.executable}
  results: dict[str, Any] = {}
  for name, setting in SETTINGS.items():
    rates: dict[str, dict[str, list[float]]] = {
      side: dict(added=[], sampled=[]) for side in pythons
    }
    for _ in range(args.rounds):
      for side, python in pythons.items():
        with common.Worker([python, 'benchmarks/replay_device.py', '--worker', side]) as worker:
          told = worker.ask(setting=setting, repeats=args.repeats)
        for what, values in told.items():
          rates[side][what] += values
    ratio = {
      what: statistics.median(rates['podrace'][what]) / statistics.median(rates['flashbax'][what])
      for what in ('added', 'sampled')
    }
    results[name] = dict(
      setting=setting,
      ratio=ratio,
      **{side: {k: common.summary(v) for k, v in told.items()} for side, told in rates.items()},
    )
    print(
      f'{name}: '
      + ', '.join(
        f'{what} {statistics.median(rates["podrace"][what]):,.0f}/s against '
        f'{statistics.median(rates["flashbax"][what]):,.0f}/s, {ratio[what]:.2f}x'
        for what in ratio
      ),
      flush=True,
    )
  return common.record(
    'replay_device', results, common.pins(pythons['flashbax'], 'flashbax', 'jax')
  )


if __name__ == '__main__':
  main()
