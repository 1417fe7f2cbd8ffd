"""How the processes of a run meet through jax.distributed. The first one is the coordinator.

All processes are given the coordinator's address, or JAX detects it from a cluster's environment
variables, or the first process chooses one and announces it in a file
(podrace.distributed.net.announce).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
from jaxlib import _jax

from podrace.distributed.net import address as addresses
from podrace.errors import RunError
from podrace.system.output import tell
from podrace.system.threads import Worker

SILENCE_SECONDS = 30  # silence after which a process counts as dead, and the rest end
PATIENCE = 300.0  # seconds within which the first process must listen at its address
PAUSE = 0.2  # seconds between attempts

T = TypeVar('T')
log = logging.getLogger('podrace')


class Place(NamedTuple):
  """Position of this process among the processes of a run."""

  coordinator: str  # HOST:PORT of the first process, or announced:FILE#coordinator
  num_processes: int
  process_id: int
  local_devices: tuple[int, ...] | None = None  # GPUs of this process; None: all of its machine
  bind: str = ''  # HOST:PORT at which the first process listens, if its public name differs

  @property
  def is_announced(self) -> bool:
    """Whether the first process chooses its port, and the rest read it from a file."""
    return bool(self.bind) or addresses.announced_at(self.coordinator) is not None

  def check(self) -> None:
    """Check numbers and address.

    Raises:
      ValueError: if the numbers do not fit, or the address is not HOST:PORT.
    """
    if not 0 <= self.process_id < self.num_processes:
      raise ValueError(
        f'--process-id {self.process_id} is not one of {self.num_processes} processes'
      )
    if addresses.announced_at(self.coordinator) is not None:
      if not self.process_id:
        raise ValueError(
          f'--coordinator {self.coordinator}: the first process listens, at HOST:PORT; the others '
          'read where'
        )
      return
    host, _, port = self.coordinator.rpartition(':')
    chooses = port == '0' and not self.process_id
    if not host or not port.isdigit() or not (0 < int(port) < 2**16 or chooses):
      raise ValueError(f'--coordinator takes HOST:PORT, not {self.coordinator!r}')

  def with_port(self) -> Place:
    """Return the place with a free port, if this is the first process and its port is 0.

    Raises:
      ValueError: if it cannot listen there.
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
    reachable = addresses.reachable(f'tcp://{at}').removeprefix('tcp://')
    return self._replace(coordinator=reachable, bind=at)


def detect_place() -> Place:
  """Return the place that JAX detects from a cluster's environment variables.

  Raises:
    ValueError: if there is no such cluster, or its variables make no sense.
  """
  # Private, because the public way is inside `initialize`, which would listen at all addresses of
  # the machine.
  from jax._src.clusters import ClusterEnv

  detect = ClusterEnv.auto_detect_unset_distributed_params
  try:
    coordinator, count, number, local = detect(None, None, None, None, None, SILENCE_SECONDS)
  except (LookupError, ValueError, RuntimeError) as e:
    raise ValueError(f"--coordinator auto: the cluster's variables make no sense: {e!r}") from e
  if coordinator is None or count is None or number is None:
    raise ValueError(
      '--coordinator auto: this process was started by none of SLURM (srun), Open MPI (mpirun), '
      'Kubernetes (with the package kubernetes) and Cloud TPU; give '
      'HOST:PORT, --num-processes and --process-id'
    )
  return Place(coordinator, count, number, None if local is None else tuple(local))


def wait_for_coordinator(announced: str, patience: float = PATIENCE) -> str:
  """Wait until the first process listens where it announces, and return its HOST:PORT.

  An announcement of an earlier start is also read. Usually nothing listens there any more.

  Raises:
    RunError: if it does not listen in time.
  """

  def connect() -> str:
    address = addresses.current(announced)
    addresses.connect(address, 1.0).close()
    return address.removeprefix('tcp://')

  return retry(connect, f'the first process, at {announced}', patience)


def retry(attempt: Callable[[], T], subject: str, patience: float) -> T:
  """Call `attempt` until it raises no OSError, and return its result.

  Raises:
    RunError: if it fails for `patience` seconds.
  """
  end, has_warned = time.monotonic() + patience, False
  while True:
    try:
      return attempt()
    except OSError as e:
      why = e.strerror or str(e)
      if time.monotonic() > end:
        raise RunError(f'{subject}: not there after {patience:.0f} s: {why}') from e
      if not has_warned:
        log.warning('waiting for %s: %s', subject, why)
      has_warned = True
    time.sleep(PAUSE)


class MoveWatch:
  """Context that ends this process if the first process announces another address.

  JAX tries the old address for minutes and cannot be stopped. The launcher starts this process
  again.
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
      with contextlib.suppress(OSError):  # nothing is announced yet
        if addresses.current(self._announced) != f'tcp://{self._coordinator}':
          tell('podrace: the first process has started again elsewhere; so must this one')
          os._exit(1)


def join_processes(place: Place) -> None:
  """Join the processes of a run (jax.distributed, Gloo on CPU).

  The first process listens on exactly the address it was given, nothing wider.

  Raises:
    ValueError: if the numbers do not fit, or the address is not HOST:PORT.
    RunError: if the first process, or its name, is not there in time.
  """
  place.check()
  coordinator, num_processes, process_id, local_devices, bind = place
  moves: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
  if addresses.announced_at(coordinator) is not None:
    coordinator = wait_for_coordinator(coordinator)
    moves = MoveWatch(place.coordinator, coordinator)
  host, _, port = coordinator.rpartition(':')
  # A name may appear only with its machine, such as that of a pod.
  retry(lambda: socket.getaddrinfo(host, int(port)), f'--coordinator {coordinator}', PATIENCE)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  if addresses.is_local(f'tcp://{coordinator}'):
    bind_collectives(host.strip('[]'))
  jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM from the run
  with moves:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      local_devices,
      # it would change the arguments; `detect_place` has detected
      cluster_detection_method='deactivate',
      coordinator_bind_address=None if process_id else bind or coordinator,
      heartbeat_timeout_seconds=SILENCE_SECONDS,
      shutdown_timeout_seconds=SILENCE_SECONDS,
    )


def bind_collectives(host: str) -> None:
  """Let the collectives of CPUs (Gloo) listen at this address, instead of the machine's public one.

  JAX has no public setting for it: it calls this function of jaxlib without a host name.
  """
  make = _jax.make_gloo_tcp_collectives
  _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=host)


def has_joined() -> bool:
  """Return whether this process has joined a run of many processes, and not left it."""
  return jax.distributed.is_initialized()


def leave_processes(seconds: float | None = None) -> None:
  """Wait until all processes of the run are here. JAX aborts the rest if one exits early.

  Args:
    seconds: longest time to wait. Default: no limit.
  """
  if has_joined():
    leaving = Worker('leaving', jax.distributed.shutdown)
    leaving.join() if seconds is None else leaving.wait(seconds)
