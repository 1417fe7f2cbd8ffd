"""A program: the processes of a distributed run, as data.

A node is a command with one or more replicas. Its arguments may refer to addresses that are known
only once other nodes listen, as in `{learner.params}`; docs/launch.md has a table. An engine starts
the processes, nothing here does.
"""

from __future__ import annotations

import dataclasses
import graphlib
import json
import math
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from podrace.errors import UsageError

Announced = Mapping[tuple[str, int], Mapping[str, str]]  # (node, replica) -> name -> address

# References that an engine replaces for each replica.
OWN = ('listen', 'announce', 'keys', 'dir', 'replica', 'replicas', 'coordinator')
NAME = re.compile(r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?')  # as in DNS: Kubernetes names hosts so


@dataclasses.dataclass(frozen=True)
class Backoff:
  """The pause before a replica that failed is started again, which doubles each time.

  Attributes:
    first: seconds before the first restart.
    most: the longest pause, in seconds.
    healthy: seconds of life after which earlier failures no longer count. A learner must have saved
      a checkpoint as well since its last failure.
    failures: failures in a row with which the program fails.
  """

  first: float = 1.0
  most: float = 60.0
  healthy: float = 30.0
  failures: int = 10

  def __post_init__(self) -> None:
    if not (0 <= self.first <= self.most < math.inf and 0 <= self.healthy < math.inf):
      raise UsageError(
        f'backoff: seconds must be 0 <= first <= most, and healthy >= 0: first={self.first}, '
        f'most={self.most}, healthy={self.healthy}'
      )
    if self.failures < 1:
      raise UsageError(f'backoff: failures must be at least 1, not {self.failures}')

  def pause(self, failures: int) -> float:
    """Return the seconds before the restart after `failures` failures in a row, from 1."""
    return min(self.first * 2.0 ** min(failures - 1, 60), self.most)


@dataclasses.dataclass(frozen=True)
class Node:
  """A command with one or more replicas.

  Attributes:
    name: the name of the node.
    command: the program and its arguments, with references.
    replicas: the number of replicas.
    cpus: cores of each replica.
    gpus: accelerators of each replica.
    listens: the names under which it announces addresses.
    restart: the pauses before restarts after failures. None: it is not started again.
    main: whether its end is the end of the program.
  """

  name: str
  command: tuple[str, ...]
  replicas: int = 1
  cpus: float = 1.0
  gpus: int = 0
  listens: tuple[str, ...] = ()
  restart: Backoff | None = Backoff()
  main: bool = False

  def __post_init__(self) -> None:
    for kind, name in (('node', self.name), *(('address', x) for x in self.listens)):
      if not NAME.fullmatch(name):
        raise UsageError(
          f'{kind} {name!r}: a name has 1 to 40 of a-z, 0-9 and -, and begins with a letter'
        )
    if self.name in OWN:
      raise UsageError(f'node {self.name!r}: this name is a reference; give another one')
    texts = isinstance(self.command, tuple) and all(isinstance(x, str) for x in self.command)
    if not self.command or not texts:
      raise UsageError(
        f'node {self.name}: its command must be a tuple of texts, with at least one, not '
        f'{self.command!r}'
      )
    if not (self.restart is None or isinstance(self.restart, Backoff)):
      raise UsageError(f'node {self.name}: restart takes a Backoff or None, not {self.restart!r}')
    if self.replicas < 1 or self.cpus < 0 or self.gpus < 0:
      raise UsageError(
        f'node {self.name}: replicas must be at least 1, cpus and gpus at least 0, not '
        f'{self.replicas}, {self.cpus} and {self.gpus}'
      )
    if len(set(self.listens)) < len(self.listens):
      raise UsageError(f'node {self.name}: it listens twice under one name: {self.listens}')

  @property
  def names(self) -> list[str]:
    """The names of its replicas."""
    return [self.name] if self.replicas == 1 else [f'{self.name}-{i}' for i in range(self.replicas)]


@dataclasses.dataclass(frozen=True)
class Reference:
  """The part of an argument between braces: a node's address, or one of OWN.

  Attributes:
    node: the name of the node, or one of OWN.
    address: the name of the address, '' for the only one of the node.
    all: whether it stands for the addresses of all replicas.
  """

  node: str
  address: str = ''
  all: bool = False

  def __str__(self) -> str:
    address = f'.{self.address}' if self.address else ''
    return f'{{{self.node}{address}{":all" if self.all else ""}}}'


def literal(text: str) -> str:
  """Return an argument of a command for a text without references: its braces are braces."""
  return text.replace('{', '{{').replace('}', '}}')


def parse(argument: str) -> Iterator[str | Reference]:
  """Yield the texts and the references of an argument, in order.

  Raises:
    UsageError: for braces that are no reference.
  """
  try:
    parsed = list(string.Formatter().parse(argument))
  except ValueError as e:
    raise UsageError(f'{argument!r}: {e}; a brace is written {{{{ or }}}}') from None
  for text, field, spec, conversion in parsed:
    if text:
      yield text
    if field is None:
      continue
    node, _, address = field.partition('.')
    if conversion or spec not in ('', 'all') or not NAME.fullmatch(node):
      raise UsageError(
        f'{argument!r}: {{{field}}} is no reference, expected {{NODE}}, {{NODE.NAME}} or '
        '{NODE:all}; a brace is written {{ or }}'
      )
    yield Reference(node, address, spec == 'all')


def references(node: Node) -> tuple[Reference, ...]:
  """Return the references in a node's command, in order."""
  parts = (x for argument in node.command for x in parse(argument))
  return tuple(x for x in parts if isinstance(x, Reference))


def is_one_of_several(node: Node) -> bool:
  """Return whether a node is one of the learners that learn as one."""
  return Reference('coordinator') in references(node)


@dataclasses.dataclass(frozen=True)
class Program:
  """Nodes, one of which is the main one.

  Raises:
    UsageError: if names clash, a reference leads nowhere, nodes wait for each other, or the main
      node is not one.
  """

  nodes: tuple[Node, ...]

  def __post_init__(self) -> None:
    names = [x for n in self.nodes for x in {n.name, *n.names}]
    if twice := sorted({x for x in names if names.count(x) > 1}):
      raise UsageError(f'several nodes or replicas are called {", ".join(twice)}')
    main = [n.name for n in self.nodes if n.main]
    if len(main) != 1:
      raise UsageError(
        f'one node must be the main one, not {len(main)}: {", ".join(main) or "none"}'
      )
    if self.main.replicas != 1:
      raise UsageError(
        f'node {main[0]} is the main one, of which there is one replica, not several'
      )
    for node in self.nodes:
      for reference in references(node):
        self._check(node, reference)
    if any(map(is_one_of_several, self.nodes)):
      own = references(self.main)
      if not {Reference('coordinator'), Reference('announce')} <= {*own}:
        raise UsageError(
          f'node {main[0]}: the main node is the first of those with {{coordinator}}; it needs it '
          'too, and --announce {announce}'
        )
    self.order()

  @property
  def main(self) -> Node:
    """The node that ends the program."""
    return next(n for n in self.nodes if n.main)

  def node(self, name: str) -> Node:
    """Return the node `name`, which must exist."""
    return next(n for n in self.nodes if n.name == name)

  def order(self) -> tuple[Node, ...]:
    """Return all nodes, each after the nodes that it refers to."""
    try:
      sorted_names = graphlib.TopologicalSorter({n.name: needs(n) for n in self.nodes})
      return tuple(self.node(name) for name in sorted_names.static_order())
    except graphlib.CycleError as e:
      circle = ' -> '.join(reversed(e.args[1]))
      raise UsageError(
        f'nodes wait for the addresses of each other: {circle}; one of them must do without'
      ) from None

  def _check(self, node: Node, reference: Reference) -> None:
    """Raise UsageError if a reference leads nowhere."""
    where = f'node {node.name}: {reference}'
    if reference.node in OWN:
      if reference.address or reference.all:
        raise UsageError(f'{where}: it is written {{{reference.node}}}, with nothing after it')
      if reference.node == 'listen' and not node.listens:
        raise UsageError(f'{where}: the node has no `listens`, the names of its addresses')
      return
    nodes = {n.name: n for n in self.nodes}
    if reference.node not in nodes:
      known = ', '.join((*nodes, *OWN))
      raise UsageError(f'{where}: there is no such node; there are {known}')
    other = nodes[reference.node]
    listens = ', '.join(other.listens) or 'none'
    if reference.address and reference.address not in other.listens:
      raise UsageError(f'{where}: {other.name} announces no such address, but {listens}')
    if not reference.address and len(other.listens) != 1:
      raise UsageError(
        f'{where}: {other.name} announces {len(other.listens)} addresses ({listens}); '
        f'name one, as {{{other.name}.NAME}}'
      )
    if other.replicas > 1 and not reference.all:
      raise UsageError(
        f'{where}: {other.name} has {other.replicas} replicas; say :all for the addresses of all'
      )


def needs(node: Node) -> set[str]:
  """Return the names of the nodes that must have announced their addresses before a node starts."""
  return {r.node for r in references(node) if r.node not in OWN}


def is_ready(program: Program, node: Node, announced: Announced) -> bool:
  """Return whether all addresses to which a node refers have been announced."""
  return all(
    set(other.listens) <= set(announced.get((other.name, i), ()))
    for other in map(program.node, needs(node))
    for i in range(other.replicas)
  )


def resolve(program: Program, reference: Reference, announced: Announced) -> str:
  """Return the address of a reference, with commas between the addresses of all replicas.

  It must have been announced.

  Raises:
    UsageError: for one of OWN that the engine does not have.
  """
  if reference.node in OWN:
    raise UsageError(f'{reference}: this engine has none; leave it out')
  other = program.node(reference.node)
  address = reference.address or other.listens[0]
  return ','.join(announced[other.name, i][address] for i in range(other.replicas))


def command(
  program: Program, node: Node, announced: Announced, own: Mapping[str, str]
) -> tuple[str, ...]:
  """Return the command of a replica, with all references resolved.

  Args:
    program: the program.
    node: the node of the replica.
    announced: the addresses of all nodes to which it refers, see `is_ready`.
    own: the replacements of OWN for the replica.
  """

  def text(piece: str | Reference) -> str:
    if isinstance(piece, str):
      return piece
    return own[piece.node] if piece.node in own else resolve(program, piece, announced)

  return tuple(''.join(map(text, parse(argument))) for argument in node.command)


def to_json(program: Program) -> str:
  """Return a program as text, for a process that starts it on another machine."""
  return json.dumps([dataclasses.asdict(node) for node in program.nodes], indent=1)


def from_json(text: str) -> Program:
  """Return the program of a text of `to_json`.

  Raises:
    UsageError: if the text is no program.
  """
  try:
    return Program(tuple(map(_node, json.loads(text))))
  except (ValueError, TypeError, KeyError) as e:
    raise UsageError(f'this is no program of `podrace launch`: {e}') from None


def _node(fields: Mapping[str, Any]) -> Node:
  lists = {name: tuple(fields[name]) for name in ('command', 'listens')}
  restart = fields['restart'] and Backoff(**fields['restart'])
  return Node(**{**fields, **lists, 'restart': restart})
