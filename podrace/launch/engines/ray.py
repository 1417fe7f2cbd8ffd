"""Programs on Ray: a placement group with a bundle and an actor for each replica.

The supervisor is the one for a single machine (podrace.launch.supervisor.local), and Ray places the
replicas. An actor runs its replica in a child process (podrace.launch.supervisor.remote_child), and
passes on its output and announcements. If the actor or its machine dies, the supervisor makes
another actor. Traffic of the program does not go through Ray.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podrace.errors import RunError, UsageError
from podrace.launch.engines.manifests import (
  CPUS,
  GPUS,
  LEARNERS_INSECURE,
  Make,
  files_of_keys,
  make_keys,
  with_resources,
)
from podrace.launch.engines.ray_actor import HOST, ROOM, Placed, Runner
from podrace.launch.program import Node, Program, is_one_of_several
from podrace.launch.supervisor.addresses import Announcements
from podrace.launch.supervisor.local import supervise
from podrace.launch.supervisor.remote_child import ReplicaRequest
from podrace.launch.supervisor.replica import extra_environ
from podrace.system import process
from podrace.system.importing import why_not
from podrace.system.options import Options
from podrace.system.output import print_text

OPTIONS = (CPUS, GPUS, LEARNERS_INSECURE)
REMIND = 30.0  # seconds between messages about missing room
PRIVATE = '/PODRACE-PRIVATE'  # in commands: a directory of each replica on its machine


def launch(make: Make, options: Options) -> int:
  """Run a program on the cluster of this machine, or print it with --dry-run.

  Returns:
    The exit code, as `Supervisor.run`.

  Raises:
    UsageError: without Ray, or without a cluster.
    RunError: if the cluster has no room.
  """
  directory = Path(options.needed('--run-dir')).absolute()
  program = with_resources(make(directory), options)
  if '--dry-run' in options:
    show(program, directory)
    return 0
  with cluster(), room(program) as group:
    return run(program, directory, group)


def run(program: Program, directory: Path, group: Any) -> int:
  """Run a program in a placement group; returns the exit code."""
  actors = Actors(program, directory, group)
  return supervise(program, directory, actors.start, actors.places)


def show(program: Program, directory: Path) -> None:
  """Print the commands and bundles of all replicas."""
  print_text(
    f'# {PRIVATE}: a directory of each replica, on its machine, with keys and announcements'
  )
  print_text(f'# {HOST}: the address of its machine')
  where = places(program, directory)
  for node in program.order():
    for i, name in enumerate(node.names):
      print_text(f'# {name}: {bundle(node)}', *where.command(node, i, where.known()))


def places(program: Program, directory: Path) -> Announcements:
  """Return the addresses of replicas, for machines that each have copies of the announcements.

  Addresses have the IP address of a host. Ray needs no host names, so machines may not know each
  other's.
  """
  at = f'tcp://{HOST}:0'
  return Announcements(program, Path(PRIVATE, 'announced'), Path(PRIVATE, 'keys'), directory, at)


# --- the cluster ---------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster() -> Iterator[None]:
  """Connect to the cluster of this machine.

  Raises:
    UsageError: without Ray, or without a cluster.
  """
  try:
    import ray
  except Exception as e:
    raise UsageError(why_not('--on ray', 'ray', e)) from e
  if (at := os.environ.get('RAY_ADDRESS', '')).startswith('ray://'):
    raise UsageError(
      f'RAY_ADDRESS={at}: podrace launch runs on a machine of the cluster, as in `ray job submit`'
    )
  try:
    ray.init(address='auto', log_to_driver=False, logging_level=logging.ERROR)
  except ConnectionError:
    raise UsageError(
      'there is no Ray cluster here: start one with `ray start --head`, or set RAY_ADDRESS'
    ) from None
  try:
    with process.on_signals(process.end_at_once):  # in place of the handlers of ray.init
      yield
  finally:
    ray.shutdown()


def bundle(node: Node) -> dict[str, float]:
  """Return the resources of a replica, as Ray counts them. A bundle cannot be empty."""
  gpus = {'GPU': float(node.gpus)} if node.gpus else {}
  return {'CPU': max(float(node.cpus), 0.001), **gpus}


@contextlib.contextmanager
def room(program: Program) -> Iterator[Any]:
  """Yield a placement group with a bundle for each replica, in the order of nodes.

  Raises:
    RunError: if the cluster has no room for ROOM seconds.
  """
  import ray
  from ray.util import placement_group, remove_placement_group

  bundles = [bundle(n) for n in program.nodes for _ in range(n.replicas)]
  group = placement_group(bundles, strategy='PACK', name='podrace')
  needs = ', '.join(f'{sum(b.get(x, 0.0) for b in bundles):g} {x}' for x in ('CPU', 'GPU'))
  began = reported = time.monotonic()
  try:
    while not group.wait(1.0):  # a timeout, so that signals are handled
      now, free = time.monotonic(), ray.available_resources()
      has = ', '.join(f'{free.get(x, 0.0):g} {x}' for x in ('CPU', 'GPU'))
      if now - began > ROOM:
        raise RunError(f'the cluster has had no room for {needs} in {ROOM:.0f} s; free: {has}')
      if now - reported > REMIND or reported == began:
        print_text(f'podrace launch: waiting for room for {needs}; free: {has}', flush=True)
        reported = now
    yield group
  finally:
    remove_placement_group(group)


# --- the launcher's end of replicas --------------------------------------------------------------


class Actors:
  """Starts replicas in a placement group, and passes announcements between their machines.

  Args:
    program: the program.
    directory: its directory.
    group: the placement group, of `room`.
  """

  def __init__(self, program: Program, directory: Path, group: Any) -> None:
    self._program, self._directory, self._group = program, directory, group
    self._bundles = {
      key: i for i, key in enumerate((n.name, k) for n in program.nodes for k in range(n.replicas))
    }
    self._lock = threading.Lock()
    self._files: dict[str, str] = {}
    self._running: set[Placed] = set()

  def places(self, private: Path) -> Announcements:
    """Return the addresses of replicas, and make keys for this start of the program."""
    make_keys(private / 'keys')
    self._files = {
      f'keys/{p.name}': p.read_text(encoding='ascii') for p in (private / 'keys').iterdir()
    }
    return places(self._program, self._directory)

  def start(self, node: Node, number: int, words: tuple[str, ...]) -> Placed:
    """Start a replica, which runs once its actor does."""
    addresses = len(node.listens) + (node.main and is_one_of_several(node))
    announces = f'announced/{node.name}-{number}' if addresses else ''
    with self._lock:
      self._files.pop(announces, None)  # the announcement of the life before
      own = {f'keys/{name}' for name in files_of_keys(node)}
      files = {k: x for k, x in self._files.items() if k in own or not k.startswith('keys/')}
      request = ReplicaRequest(
        list(words), extra_environ(node), os.getcwd(), PRIVATE, announces, addresses, files,
        str(self._directory / 'logs' / f'{node.names[number]}.lock'),
      )  # fmt: skip
      make = functools.partial(self._actor, node, number)
      placed = Placed(request, make, self._pass_on, self._remove)
      self._running.add(placed)
    return placed

  def _actor(self, node: Node, number: int, request: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return ray.remote(Runner).options(
      num_cpus=bundle(node)['CPU'], num_gpus=node.gpus, max_concurrency=2,
      scheduling_strategy=PlacementGroupSchedulingStrategy(
        self._group, placement_group_bundle_index=self._bundles[node.name, number]
      ),
    ).remote(request, ray.util.get_node_ip_address)  # fmt: skip

  def _pass_on(self, file: str, text: str) -> None:
    with self._lock:
      self._files[file] = text
      for placed in self._running:
        placed.tell({'files': {file: text}})

  def _remove(self, placed: Placed) -> None:
    with self._lock:
      self._running.discard(placed)
