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
  """Measures the Podracer setting, and the share of its matrix products."""
  import catch_podracer

  return catch_podracer.measure(variant, small(n), session.REPEATS, session.SECONDS)


def cartpole(n: int) -> dict[str, Any]:
  """Measures the PPO of ppo_cartpole.py."""
  import ppo_cartpole
  import timing

  from podrace import envs

  config, env = ppo_cartpole.STEADY, envs.make('gymnax:CartPole-v1')
  run = timing.start(ppo_cartpole.agent(config), env, small(n), config['unroll_length'])
  return run.rates(session.REPEATS, session.SECONDS)


def environment(name: str, n: int) -> dict[str, Any]:
  """Measures a random policy, bare and under the runner."""
  import environments

  return environments.measure(name, small(n), session.REPEATS, session.SECONDS)


def anakin(n: int, length: int = 0, **settings: Any) -> dict[str, Any]:
  """Measures an agent's training with other sizes, once replay is full enough to learn from."""
  import timing

  import podrace
  from podrace import envs

  n = small(n)
  config = podrace.configure(**settings, num_envs=n)
  length = length or config.unroll_length
  run = timing.start(config.agent, envs.make(config.env), n, length, 10_000)
  if windows := run.runner.replay.windows:
    run.seconds(windows.schedule.ready + 1)  # learning has begun
  return run.rates(session.REPEATS, session.SECONDS)


def transformer(n: int, layers: int, width: int) -> dict[str, Any]:
  """Measures PPO with a transformer on MinAtar Breakout: 25 tokens. FLOPs: its layers' products."""
  import jax
  import timing

  layers, width = (1, 32) if TINY else (layers, width)
  sizes = dict(layers=layers, width=width, heads=8, patch=2)
  network = dict(torso='transformer', shared=True, hidden=(width,), transformer=sizes)
  agent = dict(network=network, epochs=1, minibatches=4)
  result = anakin(n, 16, preset='minatar-breakout', agent=agent)
  params = timing.LAST['run'].state.train.params.network
  weights = sum(x.size for x in jax.tree.leaves(params))
  # acting 1, values of the batch 1, its gradient 3 times forward; forward is 2 a weight and token
  flops = 5 * 2 * weights * 25 * result['steps_per_s']['median']
  return result | dict(parameters=weights, model_tflop_per_s=flops / 1e12)


def acting() -> dict[str, Any]:
  """Measures MuZero's acting on Pong with 50 simulations, and its ceilings."""
  import planning_speed

  return planning_speed.pong(1, session.SECONDS, *((2,) if TINY else ()))


def lpg(agent_updates: int) -> dict[str, Any]:
  """Measures LPG's meta-training at its paper's size: 512 agents x 64 environments, an LSTM of 256."""
  import discover

  from podrace.agents.rules.lpg import Sizes
  from podrace.settings.discovery_presets import PRESETS

  agents, num_envs, lifetime = (2, 2, 20) if TINY else (512, 64, 250)
  config = dataclasses.replace(
    PRESETS['lpg-catch'](), env='podrace:grid_worlds', agents=agents, num_envs=num_envs, unroll_length=20,
    rule=Sizes(predictions=8, trajectory=256), agent_updates=agent_updates, lifetime=lifetime, devices=1,
  )  # fmt: skip
  rounds = 0 if session.NOTES['ahead'] else 2  # programs at once need more memory than there is
  return discover.measure_updates(config, rounds, session.SECONDS)


def bench(*args: str) -> dict[str, Any]:
  """Runs `podrace bench sebulba`."""
  import sebulba

  tiny = ('--num-envs', '8', '--actor-threads', '1') if TINY else ()
  return sebulba.measure([*args, *tiny], 1, 0.3 if TINY or session.NOTES['ahead'] else 3.0)


def replay(name: str) -> dict[str, Any]:
  """Measures items added to and sampled from replay on the device, by replay_device.py."""
  import common
  import replay_device

  setting = replay_device.SETTINGS[name] | (dict(rows=200) if TINY else {})
  command = [sys.executable, 'benchmarks/replay_device.py', '--worker', 'podrace']
  with common.Worker(command) as worker:
    rates = worker.ask(do='measure', setting=setting, repeats=session.REPEATS)
  size = (setting['pixels'] ** 2 or 16) * (setting['steps'] + 1)
  rate = statistics.median(rates['sampled'])
  return common.summaries(rates) | dict(gb_sampled_per_s=rate * size / 1e9)


def seconds_of(f: Any, *args: Any, times: int = 1) -> float:
  """Returns the median time of a call; `times` calls are made before the wait."""
  import jax

  jax.block_until_ready(f(*args))
  took = []
  for _ in range(2 if TINY else 10):
    begin = time.perf_counter()
    jax.block_until_ready([f(*args) for _ in range(times)][-1])
    took.append((time.perf_counter() - begin) / times)
  return statistics.median(took)


def ceilings() -> dict[str, Any]:
  """Measures this card: a copy, products, the cost of a call, and of a short kernel within a loop."""
  import jax
  import jax.numpy as jnp
  from jax import lax

  x = jax.random.normal(jax.random.key(0), (2**16 if TINY else 2**28,))
  add = jax.jit(lambda x: x + 1)
  result: dict[str, Any] = dict(copy_tb_per_s=2 * x.nbytes / seconds_of(add, x, times=5) / 1e12)
  del x
  n, loops = (128, 100) if TINY else (8192, 2_000)
  for dtype in ('bfloat16', 'float32'):
    a = jax.random.normal(jax.random.key(0), (n, n), dtype)
    took = seconds_of(jax.jit(lambda a: a @ a), a)
    result[f'matmul_{dtype}_tflop_per_s'] = 2 * n**3 / took / 1e12
  a = jnp.ones((64, 64)) / 64
  result['call_us'] = 1e6 * seconds_of(add, a, times=200)
  result['call_and_wait_us'] = 1e6 * seconds_of(lambda x: jax.block_until_ready(add(x)), a)
  per_loop = {}
  for m in (1, 4, 16):  # products that wait for each other: a kernel each

    def body(_: Any, x: Any, m: int = m) -> Any:
      for _ in range(m):
        x = lax.optimization_barrier(x @ a)
      return x

    for name, trips in (('static', loops), ('dynamic', None)):
      f = jax.jit(lambda x, n, t=trips, b=body: lax.fori_loop(0, n if t is None else t, b, x))
      per_loop[f'{name} x {m}'] = 1e6 * seconds_of(f, a, jnp.int32(loops)) / loops
  result['loop_us'] = per_loop  # of one round: of a length known to the compiler, or not
  result['kernel_us'] = (per_loop['static x 16'] - per_loop['static x 4']) / 12
  return result
