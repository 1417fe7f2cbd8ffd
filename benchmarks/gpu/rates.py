"""podrace on an accelerator: PPO and the Podracer setting 4,096 to 65,536 wide, MuZero, meta-training, Sebulba, environments.

    .venv/bin/python benchmarks/gpu/rates.py [PART ...] [--repeats 3] [--seconds 1]

The podrace side of ppo_cartpole.py, catch_podracer.py and environments.py, on all devices there are. MuZero trains on
MinAtar Breakout under Anakin, with its default settings, and acts on Pong under Sebulba, as in planning_speed.py. LPG is
meta-trained at its paper's size. `podrace bench sebulba` measures IMPALA on Pong, several hundred environments wide.

Each part is compiled first, as many at once as there are cores, each in a process of its own; what they compile is kept in a directory that
they share. Then all parts are measured, one by one. `compile_s` is of the first, so of a busy machine. Writes benchmarks/results/gpu.json after each part; parts that are not named keep what the file has.
Ends with an error where JAX sees none but the CPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common

SIZES = (4_096, 16_384, 65_536)
PLANNING_SIZES = (64, 256, 1_024)  # environments of MuZero
AGENT_UPDATES = (1, 5, 10)  # of one meta-step of LPG
PONG = {  # environments in all, actor threads
  'pong': ('256', '4'),
  'pong, one thread': ('256', '1'),
  'pong, 1,024 environments': ('1024', '4'),
}
ENVIRONMENTS = (  # those that are light enough on memory for all sizes
  'podrace:catch',
  'gymnax:CartPole-v1',
  'gymnax:Breakout-MinAtar',
  'brax:ant',
  'jumanji:Snake-v1',
  'navix:Navix-Empty-8x8-v0',
  'craftax:Craftax-Classic-Symbolic-v1',
)
AT_ONCE = os.cpu_count() or 1  # programs that are compiled
BRIEF = 1e-3  # seconds of a run that is only to be compiled


def cartpole(num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of the PPO of ppo_cartpole.py."""
  import ppo_cartpole

  from podrace import envs

  config = dict(ppo_cartpole.STEADY, num_envs=num_envs)
  env = envs.make(f'gymnax:{config["env"]}')
  agent = common.bind(ppo_cartpole.agent(config), env, 0)
  return rates(common.start(agent, env, num_envs, config['unroll_length']), repeats, seconds)


def catch(variant: str, num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of the Podracer setting, and the share of its matrix products."""
  import catch_podracer

  agent = catch_podracer.agents()[variant]
  return catch_podracer.measure(variant, agent, num_envs, repeats, seconds)


def environment(name: str, num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of a random policy, bare and under the runner."""
  import environments

  return environments.measure(name, num_envs, repeats, seconds)


def muzero(num_envs: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of MuZero's training on MinAtar Breakout, once replay is full enough to learn from."""
  import podrace
  from podrace import envs
  from podrace.settings.agents import bind

  config = podrace.configure(env='gymnax:Breakout-MinAtar', agent='muzero')
  env, length = envs.make(config.env), config.unroll_length
  run = common.start(bind(config.agent, env, 100, num_envs), env, num_envs, length)
  run.seconds(run.runner.replay.windows.schedule.ready + 1)
  return rates(run, repeats, seconds)


def rates(run: common.Run, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of a run."""
  updates = common.updates_for(run.seconds, seconds)
  found = [updates * run.steps_per_update / run.seconds(updates) for _ in range(repeats)]
  return dict(steps_per_s=common.summary(found), compile_s=run.compile_s)


def muzero_pong(repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of acting with 50 simulations, and its ceilings."""
  import planning_speed

  return planning_speed.pong(repeats, seconds)


def lpg(agent_updates: int, repeats: int, seconds: float) -> dict[str, Any]:
  """Steps/s of LPG's meta-training at its paper's size: 512 agents x 64 environments, an LSTM of 256."""
  import discover

  from podrace.agents.rules.lpg import Sizes
  from podrace.settings.discovery_presets import PRESETS

  config = dataclasses.replace(
    PRESETS['lpg-catch'](), env='podrace:grid_worlds', agents=512, num_envs=64, unroll_length=20,
    rule=Sizes(predictions=8, trajectory=256), agent_updates=agent_updates, lifetime=250, devices=1,
  )  # fmt: skip
  rounds = 0 if seconds == BRIEF else repeats  # several at once need more memory than there is
  return discover.of_updates(config, rounds, seconds)


def sebulba(name: str, repeats: int, seconds: float) -> dict[str, Any]:
  """`podrace bench sebulba` of IMPALA on Pong, in a process of its own."""
  import sebulba

  num_envs, threads = PONG[name]
  args = ['pong', '--num-envs', num_envs, '--actor-threads', threads]
  return sebulba.measure(args, 1, 4 * seconds)


Part = Callable[[int, float], dict[str, Any]]


def parts() -> dict[str, Part]:
  """What is measured, in this order. Those of processes of their own come first: they need the device's memory."""
  found: dict[str, Part] = {}
  for name in PONG:
    found[f'sebulba {name}'] = functools.partial(sebulba, name)
  for n in SIZES:
    found[f'ppo-cartpole x {n}'] = functools.partial(cartpole, n)
  for n in SIZES:
    for variant in ('impala', 'ppo'):
      found[f'catch {variant} x {n}'] = functools.partial(catch, variant, n)
  for n in PLANNING_SIZES:
    found[f'muzero minatar-breakout x {n}'] = functools.partial(muzero, n)
  for k in AGENT_UPDATES:
    found[f'lpg, K {k}'] = functools.partial(lpg, k)
  found['muzero pong'] = muzero_pong
  for n in (SIZES[0], SIZES[-1], *SIZES[1:-1]):
    for name in ENVIRONMENTS:
      found[f'{name} x {n}'] = functools.partial(environment, name, n)
  return found


def prepare(name: str, cache: str) -> Any:
  """What a part finds when it is compiled, in a process of its own; its error, if it fails."""
  environ = dict(
    JAX_COMPILATION_CACHE_DIR=cache,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES='-1',
    XLA_PYTHON_CLIENT_PREALLOCATE='false',
  )
  began = time.perf_counter()
  command = [sys.executable, __file__, name, '--prepare']
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, env={**os.environ, **environ}
  )
  print(f'compiled {name} in {time.perf_counter() - began:.0f} s', flush=True)
  if done.returncode:
    print(done.stderr[-3_000:], flush=True)
    return dict(error=done.stderr.strip().splitlines()[-1])
  return json.loads(done.stdout.splitlines()[-1])


def told(name: str, found: dict[str, Any]) -> str:
  """A line about a part."""
  each = {k: v for k, v in found.items() if 'steps_per_s' in k}
  each |= found.get('rates', {})
  flat = {k: v.get('median', v) for k, v in each.items() if isinstance(v, dict)}
  flat |= {k: v for k, v in each.items() if not isinstance(v, dict)}
  return f'{name}: {json.dumps(flat, default=str)}'


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('parts', nargs='*', help='none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=1.0, help='about how long a run is')
  parser.add_argument('--prepare', action='store_true', help=argparse.SUPPRESS)
  args = parser.parse_args()
  every = parts()
  if args.prepare:
    (name,) = args.parts
    print(json.dumps(every[name](1, BRIEF), default=str))
    return
  check = "import jax; assert jax.default_backend() != 'cpu'"
  if subprocess.run([sys.executable, '-c', check], capture_output=True, check=False).returncode:
    sys.exit(
      'no accelerator: JAX sees only the CPU. Install JAX for yours '
      "(pip install 'jax[cuda13]') and look at `python -c 'import jax; print(jax.devices())'`"
    )
  path = common.RESULTS / 'gpu.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  names = args.parts or list(every)
  own = [
    x for x in names if x.startswith('sebulba')
  ]  # processes of their own compile for themselves
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR') or tempfile.mkdtemp(prefix='podrace-bench-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = cache
  with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
    first = dict(
      zip(names, pool.map(lambda x: {} if x in own else prepare(x, cache), names), strict=True)
    )
  for name in names:
    found = first[name]
    if 'error' not in found:
      try:
        found = every[name](args.repeats, args.seconds) | {
          k: v for k, v in found.items() if k.startswith('compile_s')
        }
      except Exception as e:  # the others can still be measured
        found = dict(error=f'{type(e).__name__}: {str(e)[-2_000:]}')
    results[name] = found | common.origin()
    print(told(name, found) if 'error' not in found else f'{name}: {found["error"]}', flush=True)
    common.record('gpu', results)


if __name__ == '__main__':
  main()
