"""Where the processes of a program listen, and their commands with that in them."""

from __future__ import annotations

import contextlib
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

LONGEST = 100  # bytes of a Unix socket's path; some systems have no room for more
LOOPBACK = '127.0.0.1'


class Places(Protocol):
  """Where replicas listen, as a supervisor knows it."""

  def known(self) -> Announced:
    """The addresses that are known now."""

  def forget(self, node: Node, number: int) -> None:
    """Removes what a process announced before it starts again."""

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """The words of a replica's command, all of whose references are known."""


def coordinator(node: Node, host: str, announcement: Path) -> str:
  """What stands for {coordinator} in a node's command: the main one chooses a port of its host, and announces it."""
  return f'{host}:0' if node.main else f'announced:{announcement}#coordinator'


class Addresses:
  """Unix sockets in a directory, and announcements of processes that choose their address."""

  def __init__(self, program: Program, sockets: Path, directory: Path) -> None:
    self._program, self._sockets, self._directory = program, sockets, directory
    self._announced_in = sockets / 'announced'

  def open(self) -> Addresses:
    """Itself, with what is needed within the directory of sockets.

    Raises:
      UsageError: if its path is too long, or a node wants keys.
    """
    for node in self._program.nodes:
      if Reference('keys') in references(node):
        raise UsageError(
          f'node {node.name}: there are {{keys}} on several machines only; here nobody needs them, leave them out'
        )
    names = (f'{n.name}-{n.replicas}' for n in self._program.nodes)
    if max(len(os.fsencode(self._sockets / name)) for name in names) > LONGEST:
      raise UsageError(
        f'{self._sockets} is too long for the path of a Unix socket; set TMPDIR to a shorter one, such as /tmp'
      )
    make_folder(self._announced_in, 0o700)
    return self

  def known(self) -> dict[tuple[str, int], Mapping[str, str]]:
    """The addresses that are known: those that are given, and those that processes have announced."""
    found: dict[tuple[str, int], Mapping[str, str]] = {}
    for node in self._program.nodes:
      for i in range(node.replicas):
        if Reference('listen') in references(node):
          found[node.name, i] = dict.fromkeys(node.listens, self._address(node, i))
        elif node.listens:
          found[node.name, i] = announce.read(self._file(node, i))
    return found

  def forget(self, node: Node, number: int) -> None:
    """Removes what a process announced before it starts again."""
    with contextlib.suppress(FileNotFoundError):
      self._file(node, number).unlink()

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """The words of a replica's command, all of whose references are known."""
    own = dict(
      listen=self._address(node, i), announce=str(self._file(node, i)), dir=str(self._directory),
      replica=str(i), replicas=str(node.replicas),
      coordinator=coordinator(node, LOOPBACK, self._file(self._program.main, 0)),
    )  # fmt: skip
    return command(self._program, node, known, own)

  def commands(self) -> Iterator[tuple[str, str]]:
    """(name, a line for a shell) of each replica; what is not known is written as a reference."""
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


class Announcements:
  """Files in which processes on several machines announce their addresses; others read them for each connection.

  Args:
    announced: a directory that all machines see, or of which each has a copy.
    keys: likewise; what listens has keys.
    listen: where; the port is chosen there.

  Raises:
    UsageError: for a path that can't be in an address, or a node that listens and does not announce.
  """

  def __init__(
    self,
    program: Program,
    announced: Path,
    keys: Path,
    directory: Path,
    listen: str = 'tcp://0.0.0.0:0',
  ) -> None:
    if any(c.isspace() or c == ',' for c in str(announced)):
      raise UsageError(
        f'{announced.parent}: on several machines its path is in addresses, so it has no spaces and commas; '
        'give another one'
      )
    for node in program.nodes:
      if node.listens and Reference('announce') not in references(node):
        raise UsageError(
          f'node {node.name}: on several machines what listens must announce it; add --announce {{announce}}'
        )
    self._program, self._announced = program, announced
    self._own = dict(listen=listen, keys=str(keys), dir=str(directory))
    self._host = host_and_port(listen)[0]

  def open(self) -> Announcements:
    """Itself, with an empty directory for announcements."""
    make_folder(make_user_folder(self._announced.parent) / self._announced.name, 0o700)
    for file in self._announced.iterdir():
      remove(file)
    return self

  def known(self) -> Announced:
    """All of them: who connects reads what is announced by then."""
    return {
      (node.name, i): {x: f'announced:{self.file(node, i)}#{x}' for x in node.listens}
      for node in self._program.nodes
      for i in range(node.replicas)
    }

  def forget(self, node: Node, number: int) -> None:
    """Removes what a process announced before it starts again."""
    self.file(node, number).unlink(missing_ok=True)

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """The words of a replica's command."""
    own = dict(
      announce=str(self.file(node, i)), replica=str(i), replicas=str(node.replicas),
      coordinator=coordinator(node, self._host, self.file(self._program.main, 0)),
    )  # fmt: skip
    return command(self._program, node, known, self._own | own)

  def file(self, node: Node, number: int) -> Path:
    """Of a replica's announcement."""
    return self._announced / f'{node.name}-{number}'
