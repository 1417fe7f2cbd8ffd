"""Where a gradient of an Atari network goes on a CPU: convolutions against the layers behind them.

640 frames in chunks of 20 in a loop, as Sebulba's learner has them, for the shallow IMPALA network and the
Nature network. Apart: the whole gradient, that of the convolutions alone (their features against fixed
numbers), that of the layers behind them alone (fixed features in the place of the convolutions'), and
the whole without a gradient. The convolution's forms are the one podrace uses on CPU; the one that it had before,
which gathered floats and transposed the patches for the gradient of a kernel; and XLA's own in one batch
without a loop, where XLA uses all cores for it. Frames/s on one core and on all, each in a process of its own.

  python benchmarks/conv_profile.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import common

FRAMES, CHUNK = 640, 20
NETWORKS = ('impala', 'nature')
HIDDEN = dict(impala=256, nature=512)


def calls(kind: str) -> dict[str, Callable[[], Any]]:
  """What is timed; each takes FRAMES frames."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  from gymnasium import spaces

  from podrace import networks
  from podrace.networks import layers, torsos

  def before(x: Any, kernel: Any) -> Any:
    return x @ kernel

  before = jax.custom_vjp(before)
  before.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)),
    lambda saved, g: (g @ saved[1].T, jax.lax.optimization_barrier(saved[0].T) @ g),
  )
  box = spaces.Box(0, 255, (4, 84, 84), np.uint8)
  settings: Any = dict(torso=kind, hidden=(HIDDEN[kind],), activation='relu', initializer='lecun')
  net = networks.ActorCritic(**settings).bind(box, spaces.Discrete(6))
  torso = torsos.IMAGE_TORSOS[kind](net.kernel_init)
  params = net.init(jax.random.key(0))
  (inner,) = (v for k, v in params['torso'].items() if k != 'Mlp_0')
  frames = jax.random.randint(jax.random.key(1), (FRAMES, 4, 84, 84), 0, 256).astype(jnp.uint8)
  shape = jax.eval_shape(torso.apply, {'params': inner}, jnp.zeros((1, 84, 84, 4))).shape[1:]
  features = jax.random.uniform(jax.random.key(2), (FRAMES, *shape))
  fixed = jax.random.normal(jax.random.key(3), (FRAMES, *shape))

  def whole(params: Any, frames: Any) -> Any:
    timestep = net.example()
    n = frames.shape[0]
    timestep = jax.tree.map(lambda x: jnp.repeat(x, n, 0), timestep)
    output, _ = net.step(params, (), timestep._replace(observation=frames))
    return jnp.mean(output.value + jnp.sum(output.policy**2, -1))

  def convolutions(inner: Any, data: Any) -> Any:
    frames, fixed = data
    pixels = net.prepare(frames)[0]
    return jnp.mean(torso.apply({'params': inner}, pixels) * fixed)

  def behind(params: Any, features: Any) -> Any:
    x = torsos.Mlp(net.hidden, jax.nn.relu, net.kernel_init).apply(
      {'params': params['torso']['Mlp_0']}, features.reshape(features.shape[0], -1)
    )
    heads = [x @ params[h]['kernel'] + params[h]['bias'] for h in ('policy_head', 'value_head')]
    return jnp.mean(heads[1]) + jnp.mean(heads[0] ** 2)

  def compiled(loss: Any, params: Any, data: Any, chunk: int, grad: bool = True) -> Any:
    f = jax.grad(loss) if grad else loss
    chunks = jax.tree.map(lambda x: x.reshape(FRAMES // chunk, chunk, *x.shape[1:]), data)

    def run(params: Any, chunks: Any) -> Any:
      if chunk == FRAMES:
        with networks.outside_loops():
          return f(params, jax.tree.map(lambda x: x[0], chunks))
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(f, params, data))
      add = lambda total, c: (jax.tree.map(jnp.add, total, f(params, c)), None)  # noqa: E731
      return jax.lax.scan(add, zeros, chunks)[0]

    program = jax.jit(run).lower(params, chunks).compile()
    return lambda: program(params, chunks)

  found = {
    'whole': compiled(whole, params, frames, CHUNK),
    'convolutions': compiled(convolutions, inner, (frames, fixed), CHUNK),
    'behind them': compiled(behind, params, features, CHUNK),
    'without gradient': compiled(whole, params, frames, CHUNK, grad=False),
    "whole, XLA's convolution, one batch": compiled(whole, params, frames, FRAMES),
  }
  product, unit = layers.product, layers.unit
  layers.product = before
  layers.unit = lambda x: x
  conv = layers.conv2d
  layers.conv2d = lambda x, *rest: conv(unit(x), *rest)
  found['whole, before'] = compiled(whole, params, frames, CHUNK)
  layers.product, layers.unit, layers.conv2d = product, unit, conv
  return found


def measure(repeats: int) -> dict[str, dict[str, float]]:
  """Network -> part -> frames/s, medians."""
  results = {}
  for kind in NETWORKS:
    seconds = common.interleave(calls(kind), repeats)
    results[kind] = {k: FRAMES / statistics.median(s) for k, s in seconds.items()}
  return results


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--repeats', type=int, default=7)
  parser.add_argument('--here', type=int, help='(used by itself) on so many cores, to print')
  args = parser.parse_args()
  cores = sorted(os.sched_getaffinity(0))
  if args.here:
    os.sched_setaffinity(0, cores[: args.here])
    print(json.dumps(measure(args.repeats)))
    return
  results: dict[str, Any] = {}
  for n in dict.fromkeys((1, len(cores))):
    command = [sys.executable, __file__, '--repeats', str(args.repeats), '--here', str(n)]
    results[f'{n} cores'] = found = common.last_json(command)
    for kind, rates in found.items():
      print(f'{n} cores, {kind}:', {k: round(v) for k, v in rates.items()}, flush=True)
  common.record('conv_profile', results)


if __name__ == '__main__':
  main()
