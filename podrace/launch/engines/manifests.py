"""What engines share that hand a program to somebody else's tool: a name, keys, the text of a manifest, the tool."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from podrace.distributed.net import keys
from podrace.errors import UsageError
from podrace.launch.program import (
  NAME,
  Announced,
  Node,
  Program,
  Reference,
  is_one_of_several,
  needs,
  references,
)
from podrace.system.options import Option, Options
from podrace.system.output import print_text
from podrace.system.process import scratch_directory

Make = Callable[[Path], Program]  # the program for a run directory
SERVER_FILES = ('authority.pem', 'server.pem', 'server.key', keys.ALLOWED)  # a listener's
PORT = 5555
COORDINATOR = 5554  # the port of the first of several learners
GRACE = 60  # seconds in which processes may save
CPUS = Option('--cpus', 'NODE=N', 'of --on slurm, ray and kubernetes: cores of each replica (default 1); may be '
  'repeated')  # fmt: skip
GPUS = Option(
  '--gpus', 'NODE=N', 'likewise: accelerators of each replica (default 0); may be repeated'
)
LEARNERS_INSECURE = Option(
  '--learners-insecure',
  '',
  'of --learners, on several machines: they talk in plain text, without keys',
)
IMAGE = Option('--image', 'IMAGE', 'of --on kubernetes and skypilot: with podrace in it')


def placed(options: Options) -> tuple[str, Path]:
  """The name of what is launched, which is the last part of --run-dir, and that directory.

  Raises:
    UsageError: if it is not given, or its last part is no name of a host.
  """
  directory = Path(options.needed('--run-dir'))
  if not NAME.fullmatch(directory.name):
    raise UsageError(
      f'--run-dir {directory}: --on {options.text("--on")} calls the program as its last part, which must have '
      f'1 to 40 of a-z, 0-9 and -, and begin with a letter, not {directory.name!r}'
    )
  return directory.name, directory


def check_listeners(program: Program, engine: str) -> None:
  """Raises UsageError for a node that chooses its own address: no other machine would know it."""
  for node in program.nodes:
    if node.listens and Reference('listen') not in references(node):
      raise UsageError(
        f'node {node.name} chooses where it listens; --on {engine} needs {{listen}} in its command'
      )


def addresses(program: Program, host: Callable[[Node, int], str]) -> Announced:
  """Where all replicas listen, by the host and the port of each."""
  return {
    (n.name, i): dict.fromkeys(n.listens, f'tcp://{host(n, i)}')
    for n in program.nodes
    for i in range(n.replicas)
  }


def files_of_keys(node: Node) -> tuple[str, ...]:
  """The files that a node needs of a directory of keys: those of a listener, of a client, or of both."""
  if Reference('keys') not in references(node):
    return ()
  listener = SERVER_FILES if node.listens else ()
  return tuple(dict.fromkeys((*listener, *(keys.CLIENT_FILES if needs(node) else ()))))


def make_keys(directory: Path) -> None:
  """Makes keys for one program. Nobody can sign others: the authority's is gone."""
  keys.new_keys(directory)
  (directory / f'{keys.AUTHORITY}.key').unlink()


@contextlib.contextmanager
def new_keys() -> Iterator[Path]:
  """A directory with keys for one program, as long as it is entered."""
  with scratch_directory('podrace-keys-') as directory:
    make_keys(directory)
    yield directory


def with_resources(program: Program, options: Options) -> Program:
  """The program with --cpus NODE=N and --gpus NODE=N.

  Raises:
    UsageError: for another node, or no number.
  """
  nodes = {n.name: n for n in program.nodes}
  for name in ('cpus', 'gpus'):
    for given in options.every(f'--{name}'):
      node, _, text = given.partition('=')
      if node not in nodes:
        known = ', '.join(nodes)
        raise UsageError(f'--{name} takes NODE=N, with one of {known} as NODE, not {given!r}')
      if not (text.isascii() and text.isdigit()):
        raise UsageError(f'--{name} {node}=N takes a whole number, not {text!r}')
      more: dict[str, Any] = {name: int(text)}
      nodes[node] = dataclasses.replace(nodes[node], **more)
  if len({n.gpus for n in nodes.values() if is_one_of_several(n)}) > 1:
    names = ', '.join(n.name for n in nodes.values() if is_one_of_several(n))
    raise UsageError(f'--gpus: all that learn as one need as many: {names}')
  return Program(tuple(nodes.values()))


def text(*documents: Mapping[str, Any]) -> str:
  """Documents in YAML; texts of several lines as they are."""
  import yaml

  class Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
      return True

  def as_they_are(dumper: Any, value: str) -> Any:
    return dumper.represent_scalar(
      'tag:yaml.org,2002:str', value, style='|' if '\n' in value else None
    )

  Dumper.add_representer(str, as_they_are)
  return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True)


def tool(name: str, instead: str) -> str:
  """The path of a program that an engine needs.

  Raises:
    UsageError: if it is not there.
  """
  if (found := shutil.which(name)) is None:
    raise UsageError(f'there is no {name} here, which starts it; install it, or {instead}')
  return found


def call(*command: str, given: str | None = None, seconds: float | None = None) -> int:
  """Runs a tool in this terminal; its exit code, 1 if it does not end in time."""
  try:
    return subprocess.run(command, input=given, encoding='utf-8', timeout=seconds).returncode
  except subprocess.TimeoutExpired:
    print_text(f'{command[0]} has not ended in {seconds:.0f} s')
    return 1
