"""Devices, meshes and processes."""

from __future__ import annotations

import os
import socket
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace.errors import UsageError
from podrace.types import BATCH_AXIS, Trajectory

SILENCE_SECONDS = 30  # after which a process of the run is taken for dead, and the others end
AXIS = 'data'  # the one mesh axis: environments, and with them the batch, are split along it


def split_along(axis: int, names: Any = AXIS) -> P:
  """How an array lies on a mesh that is split along one of its axes, over the mesh's axes of these names."""
  return P(*[None] * axis, names)


def trajectory_specs(names: Any = AXIS) -> Trajectory:
  """How a trajectory lies on a mesh: split along its batch, likewise."""
  axes: Any = BATCH_AXIS
  specs: Any = (split_along(axis, names) for axis in axes)
  return Trajectory(*specs)


TRAJECTORY_SPECS = trajectory_specs()


class Topology(NamedTuple):
  """Who acts and who learns."""

  actors: tuple[jax.Device, ...]  # this process's
  learners: Mesh  # all processes'

  @property
  def local_learners(self) -> list[jax.Device]:
    """This process's learner devices, in the mesh's order."""
    return [d for d in self.learners.devices.flat if d.process_index == jax.process_index()]


def split_devices(actors: str = '', learners: str = '', num_devices: int | None = None) -> Topology:
  """A topology from lists of device numbers, `0,1`, of the first `num_devices` of each process.

  None: of all. If only one of the two lists is given, the others do the other thing; if none is, a
  quarter acts, at least one, and the others learn. A single device does both.

  Raises:
    ValueError: if a number is no device's, or comes twice, or if nobody is left to act or to learn.
  """
  local = jax.local_devices()
  n = len(local) if num_devices is None else num_devices
  if not 1 <= n <= len(local):
    raise ValueError(
      f'--devices {n} must be 1 to {len(local)}: so many {local[0].platform} devices JAX sees in '
      f'this process{_fake_advice(n)}'
    )
  act, learn = _numbers(actors, 'actor-devices'), _numbers(learners, 'learner-devices')
  for flag, text, numbers in (('actor', actors, act), ('learner', learners, learn)):
    if wrong := [i for i in numbers if i >= n]:
      limit = f'that --devices {n} leaves' if n < len(local) else 'of this process'
      raise ValueError(
        f'--{flag}-devices {text}: there is no device {wrong[0]} of the {n} {limit}, which are '
        f'numbered from 0{_fake_advice(max(act + learn) + 1)}'
      )
  if not act and not learn:
    act = list(range(max(1, n // 4)))
  if not act:
    act = _others(learn, n, 'learner-devices', 'actor-devices')
  if not learn:
    learn = _others(act, n, 'actor-devices', 'learner-devices')
  per_process: dict[int, list[jax.Device]] = {}
  for device in jax.devices():
    per_process.setdefault(device.process_index, []).append(device)
  counts = {p: len(per_process[p]) for p in sorted(per_process)}
  if min(counts.values()) <= max(learn):
    raise ValueError(
      f'device {max(learn)} of each process is to learn, but the processes have '
      f'{", ".join(map(str, counts.values()))} devices: give --learner-devices that all have'
    )
  chosen = [per_process[p][i] for p in counts for i in learn]
  return Topology(tuple(local[i] for i in act), Mesh(np.array(chosen), (AXIS,)))


def _others(chosen: list[int], n: int, flag: str, other: str) -> list[int]:
  """Those of n devices that are not chosen; a single device is, for both."""
  left = [i for i in range(n) if i not in chosen]
  if not left and n > 1:
    raise ValueError(
      f'--{flag} {",".join(map(str, chosen))} leaves none of {n} devices over: give --{other}, '
      'which may have the same'
    )
  return left or chosen


def _numbers(text: str, flag: str) -> list[int]:
  if not text:
    return []
  parts = text.split(',')
  if not all(p.strip().isdigit() for p in parts):
    raise ValueError(f'--{flag} takes device numbers with commas, as 0,1; not {text!r}')
  numbers = [int(p) for p in parts]
  if len(set(numbers)) != len(numbers):
    raise ValueError(f'--{flag} {text}: a device comes twice')
  return numbers


def _fake_advice(devices: int) -> str:
  """How to have more devices than a CPU is; '' where that makes no sense."""
  if jax.devices()[0].platform != 'cpu' or devices <= jax.device_count():
    return ''
  return f'; to try things out on fake ones, set JAX_NUM_CPU_DEVICES={devices}'


def learner_mesh(num_devices: int | None = None) -> Mesh:
  """A mesh over `num_devices` of all processes' devices (None: all of them).

  Raises:
    ValueError: if there are fewer, or if they leave a process of the run without any.
  """
  devices = jax.devices()
  if num_devices is None:
    num_devices = len(devices)
  if not 1 <= num_devices <= len(devices):
    raise ValueError(
      f'--devices {num_devices} must be 1 to {len(devices)}: so many {devices[0].platform} devices '
      f'JAX sees{_fake_advice(num_devices)}'
    )
  chosen = devices[:num_devices]
  if len({d.process_index for d in chosen}) != jax.process_count():
    raise ValueError(
      f'--devices {num_devices} leaves a process without a device: '
      f'{jax.process_count()} processes have {len(devices)} devices in all'
    )
  return Mesh(np.array(chosen), (AXIS,))


def per_device(mesh: Mesh, total: int, name: str) -> int:
  """`total` divided over the mesh; `name` is the flag it came from.

  Raises:
    ValueError: if it does not divide.
  """
  if total < mesh.size or total % mesh.size:
    raise ValueError(f'--{name} {total} does not divide over {mesh.size} devices')
  return total // mesh.size


def host_device() -> jax.Device:
  """The CPU that environments in JAX run on where something else acts or learns.

  Raises:
    UsageError: if JAX was set up without it.
  """
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError as e:
    platforms = os.environ.get('JAX_PLATFORMS') or jax.default_backend()
    raise UsageError(
      f'environments in JAX run on the CPU here, which JAX_PLATFORMS={platforms} leaves out: give '
      f'JAX_PLATFORMS={platforms},cpu'
    ) from e


def cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def replicated(mesh: Mesh) -> NamedSharding:
  """The same on every device."""
  return NamedSharding(mesh, P())


class Place(NamedTuple):
  """Where a process is among those of a run."""

  coordinator: str  # HOST:PORT, where the first one listens
  num_processes: int
  process_id: int
  local_devices: tuple[int, ...] | None = (
    None  # GPUs that are this process's; None: all of its machine
  )


def detected_place() -> Place:
  """The place that a cluster's manager has given this process, as JAX finds it in the environment.

  Raises:
    ValueError: if there is no such manager, or what it says makes no sense.
  """
  # JAX's own detection is within `initialize`, which would listen at all of the machine's addresses.
  from jax._src.clusters import ClusterEnv

  detect = ClusterEnv.auto_detect_unset_distributed_params
  try:
    coordinator, count, number, local = detect(None, None, None, None, None, SILENCE_SECONDS)
  except (LookupError, ValueError, RuntimeError) as e:
    raise ValueError(f"--coordinator auto: the cluster's variables make no sense: {e!r}") from e
  if coordinator is None or count is None or number is None:
    raise ValueError(
      '--coordinator auto: this process was started by none of SLURM (srun), Open MPI (mpirun), Kubernetes (with the '
      'package kubernetes) and Cloud TPU; give HOST:PORT, --num-processes and --process-id'
    )
  return Place(coordinator, count, number, None if local is None else tuple(local))


def join_processes(place: Place) -> None:
  """Makes this one of several processes of one run (jax.distributed; Gloo on CPU).

  The first process listens on exactly the address it was given, nothing wider.

  Raises:
    ValueError: if the numbers don't fit, or the address is not HOST:PORT.
  """
  coordinator, num_processes, process_id, local_devices = place
  host, _, port = coordinator.rpartition(':')
  if not host or not port.isdigit() or not 0 < int(port) < 2**16:
    raise ValueError(f'--coordinator takes HOST:PORT, not {coordinator!r}')
  try:
    socket.getaddrinfo(host, int(port))
  except OSError as e:
    raise ValueError(f'--coordinator {coordinator}: {e.strerror}') from e
  if not 0 <= process_id < num_processes:
    raise ValueError(f'--process-id {process_id} is not one of {num_processes} processes')
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from the run
  jax.distributed.initialize(
    coordinator,
    num_processes,
    process_id,
    local_devices,
    coordinator_bind_address=coordinator if process_id == 0 else None,
    heartbeat_timeout_seconds=SILENCE_SECONDS,
    shutdown_timeout_seconds=SILENCE_SECONDS,
  )


def is_one_of_several() -> bool:
  """Whether this process has joined others, and not left them."""
  return jax.distributed.is_initialized()


def leave_processes() -> None:
  """Waits until all processes of the run are here: one that is gone first takes the others down."""
  if is_one_of_several():
    jax.distributed.shutdown()
