"""Count the kernels that one update starts, compiled for an H100 without a GPU, or for this CPU.

    python3.12 -m venv VENV
    VENV/bin/pip install jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 --editable '.[gymnax]'
    VENV/bin/python benchmarks/gpu/count_kernels.py ppo-cartpole catch minatar-breakout
    .venv/bin/python benchmarks/gpu/count_kernels.py --cpu ppo-cartpole catch dqn-cartpole

XLA compiles ahead of time for the described card. Nothing is autotuned, so the counts differ by a few percent from the
program that runs. `ppo-cartpole` is the setting of ppo_cartpole.py with 4,096 environments: 128 steps, 4 x 4 gradient steps;
all other names are presets. An H200 takes 2.7 to 3.0 us a kernel. `--cpu` needs no plugin: it counts the fusions and
other operations of the program for a CPU, where PRNGs are loops and nothing is drawn or joined as on a GPU.

Each line is a name and JSON: kernels and copies (`by_program`), branches, the times that the host waits, and the loops.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CPU = '--cpu' in sys.argv
os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'
if CPU:  # compiling is most of the time; without LLVM's optimisations the operations are the same
  os.environ |= dict(XLA_FLAGS='--xla_backend_optimization_level=0', JAX_NUM_CPU_DEVICES='1')
import session  # noqa: E402, F401  (puts the project on the path)
from kernels import kernels_of  # noqa: E402

H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
NAMES = ('ppo-cartpole', 'catch', 'dqn-cartpole', 'minatar-breakout')


def h100_devices() -> list[Any]:
  """Return the described card, and have JAX compile for a GPU."""
  import jax
  from jax.experimental import topologies

  jax.config.update('jax_platforms', 'cpu')
  devices = topologies.get_topology_desc('', 'cuda', target_config=H100, topology='1x1x1').devices
  jax.default_backend = lambda: 'gpu'  # code that depends on the platform compiles its GPU branch
  return list(devices)


def runner_of(name: str, devices: list[Any]) -> Any:
  """Return the Anakin of `ppo-cartpole` or of a preset."""
  from podrace import configure, envs, hooks, topology
  from podrace.architectures import anakin
  from podrace.settings.agents import bind
  from podrace.settings.resolved import resolve

  mesh = topology.mesh_of(devices)
  if name != 'ppo-cartpole':
    config = configure(name)
    r = resolve(config)
    return anakin.Anakin(r.agent, r.env, r.replay, mesh, config.num_envs, config.unroll_length)
  import ppo_cartpole

  env, sizes = envs.make('gymnax:CartPole-v1'), (4096, ppo_cartpole.STEADY['unroll_length'])
  agent = bind(ppo_cartpole.agent(ppo_cartpole.STEADY), env, 0, sizes[0])
  return anakin.Anakin(agent, env, hooks.memory(agent, env, *sizes), mesh, *sizes)


def compile_update(name: str, devices: list[Any]) -> str:
  """Return the optimised HLO of an update."""
  import jax
  import jax.numpy as jnp

  runner = runner_of(name, devices)
  traced = runner.run.trace(runner.shapes, jax.ShapeDtypeStruct((), jnp.int32))
  platforms = ('cpu',) if CPU else ('cuda',)
  return traced.lower(lowering_platforms=platforms).compile().as_text()


def main() -> None:
  """Print the counts of each program as a line of JSON."""
  names = [x for x in sys.argv[1:] if x != '--cpu'] or list(NAMES)
  sys.argv = sys.argv[:1]
  import jax

  devices = jax.devices()[:1] if CPU else h100_devices()
  for name in names:
    start = time.perf_counter()
    text = compile_update(name, devices)
    print(name, f'{time.perf_counter() - start:.0f} s', json.dumps(kernels_of(text)), flush=True)


if __name__ == '__main__':
  main()
