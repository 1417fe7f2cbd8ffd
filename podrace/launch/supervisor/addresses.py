"""The addresses of a program's processes, and commands with these addresses."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from podrace.distributed.net import announce
from podrace.distributed.net.address import host_and_port
from podrace.errors import UsageError
from podrace.launch.program import Announced, Node, Program, Reference, command, references
from podrace.system.files import make_folder, make_user_folder, remove

LONGEST = 100  # bytes of a Unix socket's path, a limit of some systems
LOOPBACK = '127.0.0.1'


class Places(Protocol):
  """The addresses of replicas, for a supervisor."""

  def known(self) -> Announced:
    """Return the addresses that are known now."""

  def forget(self, node: Node, number: int) -> None:
    """Remove the announcement of a process that starts again."""

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """Return the command of a replica; all references in it must be known."""


def coordinator(node: Node, host: str, announcement: Path) -> str:
  """Return the text for {coordinator}; the main node announces a free port of its host."""
  return f'{host}:0' if node.main else f'announced:{announcement}#coordinator'


class Addresses:
  """Unix sockets in a directory, and announcements of processes that choose their address.

  Args:
    program: the program.
    sockets: a directory for this user alone.
    directory: the directory that stands for {dir}.
  """

  def __init__(self, program: Program, sockets: Path, directory: Path) -> None:
    self._program, self._sockets, self._directory = program, sockets, directory
    self._announced_in = sockets / 'announced'

  def open(self) -> Addresses:
    """Make the directory of announcements; returns this object.

    Raises:
      UsageError: if the path of the sockets is too long, or a node refers to keys.
    """
    for node in self._program.nodes:
      if Reference('keys') in references(node):
        raise UsageError(
          f'node {node.name}: {{keys}} are for programs on several machines, there are none here; '
          'leave them out'
        )
    names = (f'{n.name}-{n.replicas}' for n in self._program.nodes)
    if max(len(os.fsencode(self._sockets / name)) for name in names) > LONGEST:
      raise UsageError(
        f'{self._sockets} is too long for the path of a Unix socket; set TMPDIR to a shorter one, '
        'such as /tmp'
      )
    check_in_addresses(self._sockets, 'set TMPDIR to another directory, such as /tmp')
    make_folder(self._announced_in, 0o700)
    return self

  def known(self) -> dict[tuple[str, int], Mapping[str, str]]:
    """Return the addresses of sockets, and the addresses that processes have announced so far."""
    known: dict[tuple[str, int], Mapping[str, str]] = {}
    for node in self._program.nodes:
      for i in range(node.replicas):
        if Reference('listen') in references(node):
          known[node.name, i] = dict.fromkeys(node.listens, self._address(node, i))
        elif node.listens:
          known[node.name, i] = announce.read(self._file(node, i))
    return known

  def forget(self, node: Node, number: int) -> None:
    """Remove the announcement of a process that starts again."""
    self._file(node, number).unlink(missing_ok=True)

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """Return the command of a replica; all references in it must be known."""
    own = dict(
      listen=self._address(node, i), announce=str(self._file(node, i)), dir=str(self._directory),
      replica=str(i), replicas=str(node.replicas),
      coordinator=coordinator(node, LOOPBACK, self._file(self._program.main, 0)),
    )  # fmt: skip
    return command(self._program, node, known, own)

  def commands(self) -> Iterator[tuple[str, str]]:
    """Yield the name and the command of each replica; unknown addresses stay references."""
    known = self.known()
    for node in self._program.nodes:
      for i in range(node.replicas):
        chosen = {x: f'{{{node.name}.{x}}}' for x in node.listens}
        known[node.name, i] = {**chosen, **known.get((node.name, i), {})}
    for node in self._program.order():
      for i, name in enumerate(node.names):
        yield name, shlex.join(self.command(node, i, known))

  def _address(self, node: Node, number: int) -> str:
    return f'unix:{self._sockets}/{node.name}-{number}'

  def _file(self, node: Node, number: int) -> Path:
    return self._announced_in / f'{node.name}-{number}'


def check_in_addresses(directory: Path, hint: str) -> None:
  """Refuse a directory with a space or a comma in its path, which would end an address early."""
  if any(c.isspace() or c == ',' for c in str(directory)):
    raise UsageError(
      f'{directory}: its path is part of addresses, so it has no spaces and commas; {hint}'
    )


class Announcements:
  """Files in which processes on several machines announce their addresses.

  Clients read them at each connection.

  Args:
    program: the program.
    announced: a directory that all machines see, or of which each has a copy.
    keys: a directory of keys, likewise.
    directory: the directory that stands for {dir}.
    listen: the address at which each process listens, with port 0 for a free one.

  Raises:
    UsageError: for a path that cannot be in an address, or a node that listens and does not
      announce.
  """

  def __init__(
    self,
    program: Program,
    announced: Path,
    keys: Path,
    directory: Path,
    listen: str = 'tcp://0.0.0.0:0',
  ) -> None:
    check_in_addresses(announced.parent, 'give another directory')
    for node in program.nodes:
      if node.listens and Reference('announce') not in references(node):
        raise UsageError(
          f'node {node.name}: on several machines a node that listens must announce its address; '
          'add --announce {announce}'
        )
    self._program, self._announced = program, announced
    self._own = dict(listen=listen, keys=str(keys), dir=str(directory))
    self._host = host_and_port(listen)[0]

  def open(self) -> Announcements:
    """Empty the directory of announcements, and make it if there is none; returns this object."""
    make_folder(make_user_folder(self._announced.parent) / self._announced.name, 0o700)
    for file in self._announced.iterdir():
      remove(file)
    return self

  def known(self) -> Announced:
    """Return references to all announcements, which clients read when they connect."""
    return {
      (node.name, i): {x: f'announced:{self.file(node, i)}#{x}' for x in node.listens}
      for node in self._program.nodes
      for i in range(node.replicas)
    }

  def forget(self, node: Node, number: int) -> None:
    """Remove the announcement of a process that starts again."""
    self.file(node, number).unlink(missing_ok=True)

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """Return the command of a replica."""
    own = dict(
      announce=str(self.file(node, i)), replica=str(i), replicas=str(node.replicas),
      coordinator=coordinator(node, self._host, self.file(self._program.main, 0)),
    )  # fmt: skip
    return command(self._program, node, known, self._own | own)

  def file(self, node: Node, number: int) -> Path:
    """Return the path of a replica's announcement."""
    return self._announced / f'{node.name}-{number}'
