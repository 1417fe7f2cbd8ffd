"""A model axis: bytes on each device by its size, compile times, and how large a model makes an update here.

IMPALA on Catch with a transformer torso, on 8 fake devices of a CPU. A case is a process. It compiles the update from shapes alone,
asks XLA for its memory on all devices, and goes on if that is there: then it makes parameters and one update, of one
environment step per environment. Fake devices share this machine's cores and memory, so seconds say nothing of speed, and
compile times include what else ran here (`load`). Writes benchmarks/results/model_axis.json after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['JAX_NUM_CPU_DEVICES'] = '8'

import common
import jax
import jax.numpy as jnp

from podrace import envs, hooks, topology
from podrace.agents.impala import Impala
from podrace.architectures.anakin import Anakin
from podrace.networks import ActorCritic
from podrace.networks.transformer import Transformer
from podrace.settings import agents

DEVICES, SPARE, SECONDS = 8, 2 * 2**30, 3000  # bytes that are left to others; of a case
SMALL = dict(layers=6, width=512)
CASES: dict[str, dict[str, Any]] = {
  **{f'19M, {DEVICES // m} x {m}': dict(model=m, **SMALL) for m in (1, 2, 4, 8)},
  '1B, 1 x 8': dict(model=8, layers=20, width=2048),
}


def program(model: int, layers: int, width: int) -> Anakin:
  network = ActorCritic(
    torso='transformer',
    transformer=Transformer(layers, width, heads=16),
    hidden=(64,),
    initializer='lecun',
  )
  env = envs.make('podrace:catch')
  num_envs = DEVICES // model
  # RMSProp without momentum keeps one number for each parameter, Adam two.
  agent = agents.bind(Impala(network, optimizer='rmsprop'), env, 100, num_envs)
  replay = hooks.memory(agent, env, num_envs, 1)
  return Anakin(agent, env, replay, topology.learner_mesh(DEVICES, model), num_envs, 1)


def available() -> int:
  """Bytes that processes may still take."""
  line = next(x for x in Path('/proc/meminfo').read_text().splitlines() if 'MemAvailable' in x)
  return int(line.split()[1]) * 1024


def on_a_device(tree: Any) -> int:
  """Bytes of the first device's part, as shardings say."""
  leaves = jax.tree.leaves(tree)
  return sum(
    int(jnp.prod(jnp.array(x.sharding.shard_shape(x.shape)))) * x.dtype.itemsize for x in leaves
  )


def there(tree: Any) -> int:
  """Bytes of the first device's arrays, counted."""
  first = jax.devices()[0]
  parts = [
    s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first
  ]
  return sum(parts)


def case(model: int, layers: int, width: int) -> dict[str, Any]:
  anakin = program(model, layers, width)
  params, rest = anakin.shapes.train
  found: dict[str, Any] = dict(
    parameters=sum(x.size for x in jax.tree.leaves(params)),
    params_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)),
    params_bytes_of_a_device=on_a_device(params),
    rest_bytes_of_a_device=on_a_device(rest),
    load=os.getloadavg()[0],
  )
  began = time.perf_counter()
  run = anakin.run.lower(anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile()
  found['compile_s'] = round(time.perf_counter() - began, 1)
  memory = run.memory_analysis()
  needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
  found |= dict(needed_bytes=DEVICES * needed, available_bytes=available(), updates=0)
  if DEVICES * needed > available() - SPARE:
    return found
  return found | one_update(anakin, run)


def one_update(anakin: Anakin, run: Any) -> dict[str, Any]:
  began = time.perf_counter()
  state = jax.block_until_ready(anakin.init(jax.random.split(jax.random.key(0), 1)))
  found: dict[str, Any] = dict(init_s=round(time.perf_counter() - began, 1))
  counted = dict(params_counted=there(state.train.params), rest_counted=there(state.train.rest))
  before = jax.device_get(state.train.params.network['value_head'])
  began = time.perf_counter()
  state = jax.block_until_ready(run(state, jnp.int32(1)))
  found |= counted | dict(update_s=round(time.perf_counter() - began, 1), updates=1)
  after = jax.device_get(state.train.params.network['value_head'])
  found |= dict(
    value_head_moved=float(abs(after['kernel'] - before['kernel']).max()),
    loss=float(state.log.sums['loss']),
    peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  )
  return found


def run_case(name: str) -> dict[str, Any]:
  """In a process of its own, whose memory is its own."""
  command = [sys.executable, __file__, '--case', name]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
  if done.returncode:
    return dict(failed=done.returncode)
  return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--case', choices=CASES)
  parser.add_argument('--missing', action='store_true', help='only those that are not in the file')
  args = parser.parse_args()
  if args.case:
    print(json.dumps(case(**CASES[args.case])))
    return
  path = common.RESULTS / 'model_axis.json'
  found = json.loads(path.read_text())['results'] if args.missing and path.exists() else {}
  for name in CASES:
    if name not in found:
      found[name] = run_case(name) | common.origin()
      print(f'{name}: {found[name]}', flush=True)
      common.record('model_axis', found)


if __name__ == '__main__':
  main()
