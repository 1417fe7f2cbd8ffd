"""How the processes of one run meet, by jax.distributed: the first of them is the coordinator, and listens.

Its address is given to all, or found by JAX in what a cluster's manager says, or chosen by the first process, which
announces it in a file (podrace.distributed.net.announce) that the others read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax

from podrace.distributed.net import address as addresses
from podrace.errors import RunError
from podrace.system.output import tell
from podrace.system.threads import Worker

SILENCE_SECONDS = 30  # after which a process of the run is taken for dead, and the others end
PATIENCE = 300.0  # seconds in which the first process must listen where it announces
PAUSE = 0.2  # seconds between looks at an announcement

T = TypeVar('T')
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

  What it announced before it was started again is read, too; most often nobody listens there any more.

  Raises:
    RunError: if it does not in time.
  """

  def there() -> str:
    found = addresses.current(announced)
    addresses.connect(found, 1.0).close()
    return found.removeprefix('tcp://')

  return tried(there, f'the first process, at {announced}', patience)


def tried(attempt: Callable[[], T], what: str, patience: float) -> T:
  """What an attempt returns, once it raises no OSError.

  Raises:
    RunError: if it does all the time.
  """
  end, said = time.monotonic() + patience, False
  while True:
    try:
      return attempt()
    except OSError as e:
      why = e.strerror or str(e)
      if time.monotonic() > end:
        raise RunError(f'{what}: not there after {patience:.0f} s: {why}') from e
      if not said:
        log.warning('waiting for %s: %s', what, why)
      said = True
    time.sleep(PAUSE)


class Moves:
  """Ends this process if the first one announces another address, while it is entered.

  JAX tries the old one for minutes, and has no way to stop. Whoever started the processes starts this
  one again.
  """

  def __init__(self, announced: str, coordinator: str) -> None:
    self._announced, self._coordinator = announced, coordinator
    self._joined = threading.Event()

  def __enter__(self) -> None:
    Worker('coordinator', self._watch)

  def __exit__(self, *exc: object) -> None:
    self._joined.set()

  def _watch(self) -> None:
    while not self._joined.wait(PAUSE):
      with contextlib.suppress(OSError):  # it is not there again yet
        if addresses.current(self._announced) != f'tcp://{self._coordinator}':
          tell('podrace: the first process has started again elsewhere; so must this one')
          os._exit(1)


def join_processes(place: Place) -> None:
  """Makes this one of several processes of one run (jax.distributed; Gloo on CPU).

  The first process listens on exactly the address it was given, nothing wider.

  Raises:
    ValueError: if the numbers don't fit, or the address is not HOST:PORT.
    RunError: if the first process, or its name, is not there in time.
  """
  place.check()
  coordinator, num_processes, process_id, local_devices, bind = place
  moves: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
  if addresses.announced_at(coordinator) is not None:
    coordinator = awaited(coordinator)
    moves = Moves(place.coordinator, coordinator)
  host, _, port = coordinator.rpartition(':')
  # A name may come with its machine, as that of a pod.
  tried(lambda: socket.getaddrinfo(host, int(port)), f'--coordinator {coordinator}', PATIENCE)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from the run
  with moves:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      local_devices,
      cluster_detection_method='deactivate',  # it would change what is given; `detected_place` has asked
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
