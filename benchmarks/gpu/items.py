"""Items that measure.py measures in one process. Each function returns a dictionary of figures."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from typing import Any

import session
from session import TINY


def small(n: int) -> int:
  return min(n, 16) if TINY else n


def catch(variant: str, n: int) -> dict[str, Any]:
  import rates

  return rates.catch(variant, small(n), session.REPEATS, session.SECONDS)


def cartpole(n: int) -> dict[str, Any]:
  import rates

  return rates.cartpole(small(n), session.REPEATS, session.SECONDS)


def anakin(preset: str, n: int, length: int, **agent: Any) -> dict[str, Any]:
  """A preset with other sizes."""
  import common
  import rates

  import podrace
  from podrace import envs
  from podrace.settings.agents import bind

  n = small(n)
  config = podrace.configure(preset, num_envs=n, unroll_length=length, agent=agent)
  env = envs.make(config.env)
  run = common.start(bind(config.agent, env, 10_000, n), env, n, length)
  if windows := run.runner.replay.windows:
    run.seconds(windows.schedule.ready + 1)  # learning has begun
  return rates.rates(run, session.REPEATS, session.SECONDS)


def branchless(measure: Any) -> dict[str, Any]:
  """The same with all environments reset in each step, and the result taken where it is due: what `lax.cond` of
  podrace/envs/base.py saves on a CPU may cost on a GPU, where the host has to know which branch it is."""
  import jax

  from podrace.envs import base

  base._conditional = lambda dynamics: jax.vmap(base.NextStepReset(dynamics).step)
  return measure()


def transformer(n: int, layers: int, width: int) -> dict[str, Any]:
  """PPO with a transformer on MinAtar Breakout: 25 tokens. FLOPs are those of its layers' products, acted and learned."""
  import jax

  layers, width = (1, 32) if TINY else (layers, width)
  sizes = dict(layers=layers, width=width, heads=8, patch=2)
  network = dict(torso='transformer', shared=True, hidden=(width,), transformer=sizes)
  found = anakin('minatar-breakout', n, 16, network=network, epochs=1, minibatches=4)
  params = session.NOTES['run'].state.train.params.network
  weights = sum(x.size for x in jax.tree.leaves(params))
  # acting 1, values of the batch 1, its gradient 3 times forward; forward is 2 a weight and token
  flops = 5 * 2 * weights * 25 * found['steps_per_s']['median']
  return found | dict(parameters=weights, model_tflop_per_s=flops / 1e12)


def muzero(n: int) -> dict[str, Any]:
  import rates

  return rates.muzero(small(n), session.REPEATS, session.SECONDS)


def acting() -> dict[str, Any]:
  import rates

  return rates.muzero_pong(1, session.SECONDS)


def lpg(k: int) -> dict[str, Any]:
  import discover
  import rates

  if TINY:
    whole = discover.of_updates
    discover.of_updates = lambda config, *more: whole(
      dataclasses.replace(config, agents=2, num_envs=2, lifetime=20), *more
    )
  return rates.lpg(k, 2, session.SECONDS)


def bench(*args: str) -> dict[str, Any]:
  """`podrace bench sebulba`."""
  import sebulba

  tiny = ('--num-envs', '8', '--actor-threads', '1') if TINY else ()
  return sebulba.measure([*args, *tiny], 1, 0.3 if TINY or session.NOTES['ahead'] else 3.0)


def replay(name: str) -> dict[str, Any]:
  """Items added to and sampled from replay on the device, of replay_device.py."""
  import common
  import replay_device

  setting = replay_device.SETTINGS[name]
  if TINY:
    setting = setting | dict(rows=200)
  command = [sys.executable, 'benchmarks/replay_device.py', '--worker', 'podrace']
  with common.Worker(command) as worker:
    found = worker.ask(setting=setting, repeats=session.REPEATS)
  size = (setting['pixels'] ** 2 or 16) * (setting['steps'] + 1)
  rate = statistics.median(found['sampled'])
  return {k: common.summary(v) for k, v in found.items()} | dict(gb_sampled_per_s=rate * size / 1e9)


def ceilings() -> dict[str, Any]:
  """Of this card: a copy, products, what a call costs, and what a short kernel within a loop costs."""
  import jax
  import jax.numpy as jnp
  from jax import lax

  def best(f: Any, *args: Any, times: int = 1) -> float:
    jax.block_until_ready(f(*args))
    took = []
    for _ in range(2 if TINY else 10):
      start = time.perf_counter()
      for _ in range(times):
        out = f(*args)
      jax.block_until_ready(out)
      took.append((time.perf_counter() - start) / times)
    return statistics.median(took)

  found: dict[str, Any] = {}
  x = jax.random.normal(jax.random.key(0), (2**16 if TINY else 2**28,))
  found['copy_tb_per_s'] = 2 * x.nbytes / best(jax.jit(lambda x: x + 1), x, times=5) / 1e12
  del x
  n = 128 if TINY else 8192
  for dtype in ('bfloat16', 'float32'):
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    found[f'matmul_{dtype}_tflop_per_s'] = 2 * n**3 / best(jax.jit(lambda a: a @ a), a) / 1e12
  a = jnp.ones((64, 64)) / 64
  one = jax.jit(lambda x: x + 1)
  found['call_us'] = 1e6 * best(one, a, times=200)
  found['call_and_wait_us'] = 1e6 * best(lambda x: jax.block_until_ready(one(x)), a)
  per_loop = {}
  loops = 100 if TINY else 2_000
  for m in (1, 4, 16):  # products that wait for each other: a kernel each

    def body(_: Any, x: Any, m: int = m) -> Any:
      for _ in range(m):
        x = lax.optimization_barrier(x @ a)
      return x

    for name, trips in (('static', loops), ('dynamic', None)):
      f = jax.jit(lambda x, n, t=trips, b=body: lax.fori_loop(0, n if t is None else t, b, x))
      per_loop[f'{name} x {m}'] = 1e6 * best(f, a, jnp.int32(loops)) / loops
  found['loop_us'] = per_loop  # of one round: of a length known to the compiler, or not
  found['kernel_us'] = (per_loop['static x 16'] - per_loop['static x 4']) / 12
  return found
