"""Where the processes of a program listen, and their commands with that in them."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from podrace.errors import UsageError
from podrace.net import announce
from podrace.program import Announced, Node, Program, Reference, command, references

LONGEST = 100  # bytes of a Unix socket's path; some systems have no room for more


class Places(Protocol):
  """Where replicas listen, as a supervisor knows it."""

  def known(self) -> Announced:
    """The addresses that are known now."""

  def forget(self, node: Node, number: int) -> None:
    """Removes what a process announced before it starts again."""

  def command(self, node: Node, i: int, known: Announced) -> tuple[str, ...]:
    """The words of a replica's command, all of whose references are known."""


class Addresses:
  """Unix sockets in a directory, and announcements of processes that choose their address."""

  def __init__(self, program: Program, sockets: Path, directory: Path) -> None:
    self._program, self._sockets, self._directory = program, sockets, directory
    self._announced_in = sockets / 'announced'

  def open(self) -> Addresses:
    """Itself, with what is needed within the directory of sockets.

    Raises:
      UsageError: if its path is too long.
    """
    names = (f'{n.name}-{n.replicas}' for n in self._program.nodes)
    if max(len(os.fsencode(self._sockets / name)) for name in names) > LONGEST:
      raise UsageError(
        f'{self._sockets} is too long for the path of a Unix socket; set TMPDIR to a shorter one, such as /tmp'
      )
    self._announced_in.mkdir(mode=0o700)
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
