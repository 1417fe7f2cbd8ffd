"""A model axis: bytes on each device by its size, compile times, and how large a model makes an update here.

IMPALA on Catch with a transformer torso, on 8 fake devices of a CPU. A case is a process. It compiles the update from
shapes alone, asks XLA for its memory on all devices, and goes on if that is there: then it makes parameters and one
update, of one environment step per environment. Fake devices share this machine's cores and memory, so seconds say
nothing of speed, and compile times include other work (`load`). Writes benchmarks/results/model_axis.json after each case.
"""

from __future__ import annotations

import json
import os
import resource
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

DEVICES, SPARE = 8, 2 * 2**30  # bytes that are left to other processes
CASES: dict[str, tuple[int, int, int]] = {  # model devices, layers, width
  **{f'19M, {DEVICES // m} x {m}': (m, 6, 512) for m in (1, 2, 4, 8)},
  '1B, 1 x 8': (8, 20, 2048),
  'tiny, 4 x 2': (2, 1, 64),  # to try the script
}


def program(model: int, layers: int, width: int) -> Anakin:
  network = ActorCritic(
    torso='transformer', transformer=Transformer(layers, width, heads=16), hidden=(64,), initializer='lecun'
  )  # fmt: skip
  env, num_envs = envs.make('podrace:catch'), DEVICES // model
  # RMSProp without momentum keeps one number for each parameter, Adam two.
  agent = agents.bind(Impala(network, optimizer='rmsprop'), env, 100, num_envs)
  replay = hooks.memory(agent, env, num_envs, 1)
  return Anakin(agent, env, replay, topology.learner_mesh(DEVICES, model), num_envs, 1)


def available() -> int:
  """Returns the bytes that processes may still take."""
  line = next(x for x in Path('/proc/meminfo').read_text().splitlines() if 'MemAvailable' in x)
  return int(line.split()[1]) * 1024


def counted_bytes(tree: Any) -> int:
  """Returns the bytes of the first device's arrays."""
  shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
  return sum(s.data.nbytes for s in shards if s.device == jax.devices()[0])


def case(model: int, layers: int, width: int) -> dict[str, Any]:
  """Compiles an update, and makes it if there is the memory."""
  anakin = program(model, layers, width)
  leaves, begin = jax.tree.leaves(anakin.shapes.train.params), time.perf_counter()
  run = anakin.run.lower(anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile()
  memory = run.memory_analysis()
  needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
  needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
  result = dict(
    parameters=sum(x.size for x in leaves), params_bytes=sum(x.size * x.dtype.itemsize for x in leaves),
    load=os.getloadavg()[0], compile_s=round(time.perf_counter() - begin, 1),
    needed_bytes=DEVICES * needed, available_bytes=available(), updates=0,
  )  # fmt: skip
  if DEVICES * needed > available() - SPARE:
    return result
  return result | one_update(anakin, run)


def one_update(anakin: Anakin, run: Any) -> dict[str, Any]:
  begin = time.perf_counter()
  state = jax.block_until_ready(anakin.init(jax.random.split(jax.random.key(0), 1)))
  result: dict[str, Any] = dict(init_s=round(time.perf_counter() - begin, 1), updates=1)
  result |= {f'{k}_counted': counted_bytes(getattr(state.train, k)) for k in ('params', 'rest')}
  begin = time.perf_counter()
  state = jax.block_until_ready(run(state, jnp.int32(1)))
  return result | dict(
    update_s=round(time.perf_counter() - begin, 1),
    loss=float(state.log.sums['loss']),
    peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  )


def main() -> None:
  args = common.arguments(__doc__, CASES)
  if args.worker:
    print(json.dumps(case(*CASES[args.worker[0]])))
    return
  for name in args.cases:
    try:  # in a process of its own
      result = common.last_json([sys.executable, __file__, '--worker', name])
    except RuntimeError as e:
      result = dict(failed=str(e)[-300:])
    print(f'{name}: {result}', flush=True)
    common.keep('model_axis', name, result | common.origin(), CASES)


if __name__ == '__main__':
  main()
