"""Count the kernels that one update starts, compiled for an H100 without a GPU.

    python3.12 -m venv VENV
    VENV/bin/pip install jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 --editable .
    VENV/bin/python benchmarks/gpu/count_kernels.py catch cartpole minatar-breakout

XLA compiles ahead of time for the described card. Nothing is autotuned, so the counts differ by a few percent from the
program that runs. With JAX 0.11.2 and Python 3.12: IMPALA on Catch 528 to 548 kernels an update; PPO on CartPole (4 x 4
gradient steps, 4,096 environments) 4,950; PPO on MinAtar with unroll 32 3,586. An H200 takes 2.7 to 3.0 us a kernel.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'
import session  # noqa: F401  (puts the project on the path)
from kernels import kernels_of

H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100_devices() -> list[Any]:
  """Return the described card, and have JAX compile for a GPU."""
  import jax
  from jax.experimental import topologies

  jax.config.update('jax_platforms', 'cpu')
  devices = topologies.get_topology_desc('', 'cuda', target_config=H100, topology='1x1x1').devices
  jax.default_backend = lambda: 'gpu'  # code that depends on the platform compiles its GPU branch
  return list(devices)


def compile_update(preset: str, devices: list[Any]) -> str:
  """Return the optimised HLO of an update of a preset."""
  import jax
  import jax.numpy as jnp

  import podrace
  from podrace import topology
  from podrace.architectures import anakin
  from podrace.settings.resolved import resolve

  config = podrace.configure(preset)
  r, sizes = resolve(config), (config.num_envs, config.unroll_length)
  runner = anakin.Anakin(r.agent, r.env, r.replay, topology.mesh_of(devices), *sizes)
  traced = runner.run.trace(runner.shapes, jax.ShapeDtypeStruct((), jnp.int32))
  return traced.lower(lowering_platforms=('cuda',)).compile().as_text()


def main() -> None:
  """Print the counts of each preset as a line of JSON."""
  names, sys.argv = sys.argv[1:] or ['catch', 'cartpole', 'minatar-breakout'], sys.argv[:1]
  devices = h100_devices()
  for name in names:
    start = time.perf_counter()
    text = compile_update(name, devices)
    print(name, f'{time.perf_counter() - start:.0f} s', json.dumps(kernels_of(text)), flush=True)


if __name__ == '__main__':
  main()
