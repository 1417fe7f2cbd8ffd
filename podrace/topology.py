"""Devices, meshes and processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from podrace.errors import UsageError
from podrace.types import BATCH_AXIS, Trajectory

AXIS = 'data'  # the mesh axis along which environments, and with them the batch, are split
MODEL = (
  'model'  # second axis of a mesh: `podrace.architectures.sharding` splits parameters along it
)


def split_along(axis: int, names: Any = AXIS) -> P:
  """Return the partition of an array that is split along one axis, over the mesh's axes `names`."""
  return P(*[None] * axis, names)


def trajectory_specs(names: Any = AXIS) -> Trajectory:
  """Return the partition of a trajectory that is split along its batch, likewise."""
  axes: Any = BATCH_AXIS
  specs: Any = (split_along(axis, names) for axis in axes)
  return Trajectory(*specs)


TRAJECTORY_SPECS = trajectory_specs()


class Topology(NamedTuple):
  """The devices that act and the devices that learn."""

  actors: tuple[jax.Device, ...]  # this process's
  learners: Mesh  # all processes'

  @property
  def local_learners(self) -> list[jax.Device]:
    """This process's learner devices, in the mesh's order."""
    return [d for d in self.learners.devices.flat if d.process_index == jax.process_index()]

  @property
  def destinations(self) -> tuple[jax.Device, ...]:
    """The learner devices that unrolls are sent to: the first of each group with a model axis."""
    return tuple(self.local_learners[:: model_size(self.learners)])

  def __str__(self) -> str:
    """Return the numbers of devices of all processes in words."""
    acting, learning = len(self.actors) * jax.process_count(), self.learners.size
    if {*self.actors} == {*self.local_learners}:
      return f'{learning} device(s)'
    return f'{acting} acting and {learning} learning device(s)'


def split_devices(
  actors: str = '', learners: str = '', num_devices: int | None = None, model: int = 1
) -> Topology:
  """Return a topology from lists of device numbers, `0,1`, of each process's `num_devices` devices.

  `num_devices` None: all. If only one of the two lists is given, the remaining devices do the other
  job. If none is, a quarter acts, at least one, and the rest learns. A single device does both. The
  learners' mesh is as `mesh_of` makes it.

  Raises:
    ValueError: if a number is no device's, or comes twice, or if no device acts or none learns.
  """
  local = jax.local_devices()
  n = len(local) if num_devices is None else num_devices
  if not 1 <= n <= len(local):
    raise ValueError(
      f'--devices {n} must be 1 to {len(local)}, the number of {local[0].platform} devices that '
      f'JAX sees in this process{_fake_advice(n)}'
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
  return Topology(tuple(local[i] for i in act), mesh_of(chosen, model))


def _others(chosen: list[int], n: int, flag: str, other: str) -> list[int]:
  """Return the devices of n that are not chosen; a single device is returned in any case."""
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
  if not all(p.isascii() and p.strip().isdigit() for p in parts):
    raise ValueError(f'--{flag} takes device numbers with commas, as 0,1; not {text!r}')
  numbers = [int(p) for p in parts]
  if len(set(numbers)) != len(numbers):
    raise ValueError(f'--{flag} {text}: a device comes twice')
  return numbers


def _fake_advice(devices: int) -> str:
  """Return advice on having more devices than a CPU is; '' where that makes no sense."""
  if jax.devices()[0].platform != 'cpu' or devices <= jax.device_count():
    return ''
  return f'; to try things out on fake ones, set JAX_NUM_CPU_DEVICES={devices}'


def learner_mesh(num_devices: int | None = None, model: int = 1) -> Mesh:
  """Return a mesh over `num_devices` of all processes' devices (None: all), as `mesh_of` makes it.

  Raises:
    ValueError: if there are fewer, if they leave a process of the run without any, or do not divide
      by `model`.
  """
  devices = jax.devices()
  if num_devices is None:
    num_devices = len(devices)
  if not 1 <= num_devices <= len(devices):
    raise ValueError(
      f'--devices {num_devices} must be 1 to {len(devices)}, the number of '
      f'{devices[0].platform} devices that JAX sees{_fake_advice(num_devices)}'
    )
  chosen = devices[:num_devices]
  if len({d.process_index for d in chosen}) != jax.process_count():
    raise ValueError(
      f'--devices {num_devices} leaves a process without a device: '
      f'{jax.process_count()} processes have {len(devices)} devices in all'
    )
  return mesh_of(chosen, model)


def mesh_of(devices: Sequence[jax.Device], model: int = 1) -> Mesh:
  """Return a mesh of the one axis AXIS, or of AXIS and MODEL if `model` is more than 1.

  Each copy of the parameters is then on `model` devices.

  Raises:
    ValueError: if the devices do not divide so.
  """
  if len(devices) % model:
    raise ValueError(
      f'--model-devices {model} does not divide the {len(devices)} devices that learn: give a '
      'divisor of '
      f'{len(devices)}, or other --devices{_fake_advice(model)}'
    )
  if model == 1:
    return Mesh(np.array(devices), (AXIS,))
  return Mesh(np.reshape(np.array(devices), (-1, model)), (AXIS, MODEL))


def data_size(mesh: Mesh) -> int:
  """Return the number of parts that a batch is split into over a mesh."""
  return mesh.size // model_size(mesh)


def model_size(mesh: Mesh) -> int:
  """Return the number of devices that each copy of the parameters is split over."""
  return mesh.shape.get(MODEL, 1)


def on_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
  """Set the mesh for code that is traced outside of `shard_map` and asks for a model axis."""
  if model_size(mesh) == 1:
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def has_model_axis() -> bool:
  """Return whether the mesh of the current trace has a model axis."""
  return MODEL in jax.sharding.get_abstract_mesh().axis_names


def on_each(
  f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable[..., Any]:
  """Return `f` on every device of a mesh, or every group of `model_size` devices.

  Each call of `f` has its own part of the arrays that are split along AXIS. It is `jax.shard_map`
  over AXIS. A model axis is left to XLA, so `f` needs to know no other axis.
  """
  if data_size(mesh) == 1 and model_size(mesh) > 1:
    return _on_the_only_one(f, mesh, in_specs)
  return jax.shard_map(
    f,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={AXIS},
    check_vma=check_vma,
  )


def _on_the_only_one(f: Callable[..., Any], mesh: Mesh, in_specs: Any) -> Callable[..., Any]:
  """Return `on_each` of one group.

  XLA does not compile collectives over an axis of size 1 next to a model axis.
  """

  def run(*args: Any) -> Any:
    def longer(spec: P, tree: Any) -> Any:
      return tree if spec == P() else jax.tree.map(lambda x: x[None], tree)

    axes = jax.tree.map(lambda spec: None if spec == P() else 0, in_specs)
    each = jax.vmap(f, axes, axis_name=AXIS, axis_size=1)
    with on_mesh(mesh):
      results = each(*jax.tree.map(longer, in_specs, args))
    return jax.tree.map(lambda x: x[0], results)

  return run


def per_device(mesh: Mesh, total: int, name: str) -> int:
  """Return `total` divided over the mesh's AXIS; `name` is the flag it came from.

  Raises:
    ValueError: if it does not divide.
  """
  size, model = data_size(mesh), model_size(mesh)
  if total < size or total % size:
    groups = f' in groups of --model-devices {model}' if model > 1 else ''
    raise ValueError(f'--{name} {total} does not divide over {mesh.size} devices{groups}')
  return total // size


def on_host(x: jax.Array) -> np.ndarray:
  """Return a whole array in NumPy's form, of this process or the same in all processes."""
  return np.asarray(x.addressable_data(0) if x.is_fully_replicated else x)


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


def replicated(mesh: Mesh) -> NamedSharding:
  """Return the sharding of an array that is the same on every device."""
  return NamedSharding(mesh, P())


TEXT_BYTES = 4096  # bytes of a text that goes to all processes


def share(total: int) -> int:
  """Return this process's share of a total, rounded up where it does not divide."""
  return -(-total // jax.process_count())


def own_rows(x: jax.Array) -> np.ndarray:
  """Return this process's rows of an array [n, ...] that is split over all processes' devices."""
  if x.is_fully_addressable:
    return np.asarray(x)
  shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start)
  return np.concatenate([np.asarray(s.data) for s in shards])


def everyones(numbers: Sequence[float]) -> np.ndarray:
  """Return each process's numbers [P, n] f64.

  All processes must call this at the same time, in the thread that learns.
  """
  own = np.asarray(numbers, np.float64)
  if jax.process_count() == 1:
    return own[None]
  # as bytes, since JAX has no doubles
  return np.asarray(multihost_utils.process_allgather(own.view(np.uint8))).view(np.float64)


def from_first(text: str) -> str:
  """Return the first process's text, of at most TEXT_BYTES bytes and without zeros; likewise."""
  if jax.process_count() == 1:
    return text
  own = np.frombuffer(text.encode().ljust(TEXT_BYTES, b'\0'), np.uint8)
  return bytes(np.asarray(multihost_utils.broadcast_one_to_all(own))).rstrip(b'\0').decode()
