"""How the processes of one run meet, by jax.distributed: the first of them is the coordinator, and listens.

Its address is given to all, or found by JAX in what a cluster's manager says, or chosen by the first process, which
announces it in a file (podrace.net.announce) that the others read.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import NamedTuple

import jax

from podrace.errors import RunError
from podrace.net import address as addresses
from podrace.worker import Worker

SILENCE_SECONDS = 30  # after which a process of the run is taken for dead, and the others end
PATIENCE = 300.0  # seconds in which the first process must listen where it announces
PAUSE = 0.2  # seconds between looks at an announcement

log = logging.getLogger('podrace')


class Place(NamedTuple):
  """Where a process is among those of a run."""

  coordinator: str  # HOST:PORT, where the first one listens, or announced:FILE#coordinator
  num_processes: int
  process_id: int
  local_devices: tuple[int, ...] | None = None
  # ^ GPUs that are this process's; None: all of its machine
  bind: str = ''  # HOST:PORT where the first one listens, if it is known to others by another name

  @property
  def by_announcement(self) -> bool:
    """The first process chooses its port, and the others read which."""
    return bool(self.bind) or addresses.announced_at(self.coordinator) is not None

  def check(self) -> None:
    """Raises ValueError if the numbers don't fit, or the address is not HOST:PORT."""
    if not 0 <= self.process_id < self.num_processes:
      raise ValueError(
        f'--process-id {self.process_id} is not one of {self.num_processes} processes'
      )
    if addresses.announced_at(self.coordinator) is not None:
      if not self.process_id:
        raise ValueError(
          f'--coordinator {self.coordinator}: the first process listens, at HOST:PORT; the others read where'
        )
      return
    host, _, port = self.coordinator.rpartition(':')
    chooses = port == '0' and not self.process_id
    if not host or not port.isdigit() or not (0 < int(port) < 2**16 or chooses):
      raise ValueError(f'--coordinator takes HOST:PORT, not {self.coordinator!r}')

  def chosen(self) -> Place:
    """The place of the first process with the port that it chooses, if that is 0; else itself.

    Raises:
      ValueError: if it can't listen there.
    """
    host, _, port = self.coordinator.rpartition(':')
    if self.process_id or port != '0':
      return self
    host = '0.0.0.0' if host == '*' else host
    try:
      with socket.create_server((host, 0)) as free:
        at = f'{host}:{free.getsockname()[1]}'
    except OSError as e:
      raise ValueError(f'--coordinator {self.coordinator}: {e.strerror or e}') from e
    return self._replace(coordinator=reachable(at), bind=at)


def reachable(at: str) -> str:
  """HOST:PORT as other machines can use it."""
  return addresses.reachable(f'tcp://{at}').removeprefix('tcp://')


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


def awaited(announced: str, patience: float = PATIENCE) -> str:
  """HOST:PORT of the first process, once it listens where it says.

  What it announced before it was started again is read, too; then nobody listens there.

  Raises:
    RunError: if it does not in time.
  """
  end, why = time.monotonic() + patience, ''
  while time.monotonic() < end:
    try:
      found = addresses.current(announced)
      addresses.connect(found, 1.0).close()
      return found.removeprefix('tcp://')
    except OSError as e:
      if not why:
        log.info('waiting for the first process, at %s', announced)
      why = str(e.strerror or e)
    time.sleep(PAUSE)
  raise RunError(f'the first process is not there after {patience:.0f} s: {announced}: {why}')


def join_processes(place: Place) -> None:
  """Makes this one of several processes of one run (jax.distributed; Gloo on CPU).

  The first process listens on exactly the address it was given, nothing wider.

  Raises:
    ValueError: if the numbers don't fit, or the address is not HOST:PORT.
    RunError: if the first process is not there in time.
  """
  place.check()
  coordinator, num_processes, process_id, local_devices, bind = place
  if addresses.announced_at(coordinator) is not None:
    coordinator = awaited(coordinator)
  host, _, port = coordinator.rpartition(':')
  try:
    socket.getaddrinfo(host, int(port))
  except OSError as e:
    raise ValueError(f'--coordinator {coordinator}: {e.strerror}') from e
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from the run
  jax.distributed.initialize(
    coordinator,
    num_processes,
    process_id,
    local_devices,
    coordinator_bind_address=None if process_id else bind or coordinator,
    heartbeat_timeout_seconds=SILENCE_SECONDS,
    shutdown_timeout_seconds=SILENCE_SECONDS,
  )


def is_one_of_several() -> bool:
  """Whether this process has joined others, and not left them."""
  return jax.distributed.is_initialized()


def leave_processes(seconds: float | None = None) -> None:
  """Waits until all processes of the run are here: one that is gone first takes the others down.

  Args:
    seconds: that are waited at most, whatever becomes of it.
  """
  if is_one_of_several():
    leaving = Worker('leaving', jax.distributed.shutdown)
    leaving.join() if seconds is None else leaving.wait(seconds)
