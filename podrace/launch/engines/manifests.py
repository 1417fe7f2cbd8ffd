"""The common part of engines that use external tools: names, keys, manifests and calls."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
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
SERVER_FILES = ('authority.pem', 'server.pem', 'server.key', keys.ALLOWED)  # of a listener
PORT = 5555
COORDINATOR = 5554  # the port at which JAX connects several learners
GRACE = 60  # seconds in which processes may save
CPUS = Option(
  '--cpus',
  'NODE=N',
  'cores of each replica of a node (default 1); may be repeated; for slurm, ray and kubernetes',
)
GPUS = Option(
  '--gpus',
  'NODE=N',
  'accelerators of each replica (default 0); may be repeated; for slurm, ray, kubernetes',
)
LEARNERS_INSECURE = Option(
  '--learners-insecure',
  '',
  'learners on several machines talk in plain text, without keys',
)
IMAGE = Option('--image', 'IMAGE', 'image with podrace in it, for kubernetes and skypilot')


def run_place(options: Options) -> tuple[str, Path]:
  """Return the name of the program, which is the last part of --run-dir, and that directory.

  Raises:
    UsageError: without --run-dir, or if its last part is no name of a host.
  """
  directory = Path(options.needed('--run-dir'))
  if not NAME.fullmatch(directory.name):
    raise UsageError(
      f'--run-dir {directory}: --on {options.text("--on")} calls the program as its last part, '
      f'which must have 1 to 40 of a-z, 0-9 and -, and begin with a letter, not {directory.name!r}'
    )
  return directory.name, directory


def check_listeners(program: Program, engine: str) -> None:
  """Raise UsageError for a node that chooses its own address, which no other machine would know."""
  for node in program.nodes:
    if node.listens and Reference('listen') not in references(node):
      raise UsageError(
        f'node {node.name} chooses where it listens; --on {engine} needs {{listen}} in its command'
      )


def addresses(program: Program, host: Callable[[Node, int], str]) -> Announced:
  """Return the addresses of all replicas; `host` returns the host and the port of each."""
  return {
    (n.name, i): dict.fromkeys(n.listens, f'tcp://{host(n, i)}')
    for n in program.nodes
    for i in range(n.replicas)
  }


def files_of_keys(node: Node) -> tuple[str, ...]:
  """Return the files of a directory of keys that a node needs, as a listener, a client, or both."""
  if Reference('keys') not in references(node):
    return ()
  listener = SERVER_FILES if node.listens else ()
  return tuple(dict.fromkeys((*listener, *(keys.CLIENT_FILES if needs(node) else ()))))


def make_keys(directory: Path) -> None:
  """Make keys for one program. No further keys can be signed, as the authority's key is removed."""
  keys.new_keys(directory)
  (directory / f'{keys.AUTHORITY}.key').unlink()


@contextlib.contextmanager
def new_keys() -> Iterator[Path]:
  """Yield a directory with keys for one program, and remove it at the end."""
  with scratch_directory('podrace-keys-') as directory:
    make_keys(directory)
    yield directory


def with_resources(program: Program, options: Options) -> Program:
  """Return the program with the resources of --cpus NODE=N and --gpus NODE=N.

  Raises:
    UsageError: for an unknown node, or a value that is no number.
  """
  nodes = {n.name: n for n in program.nodes}
  for name in ('cpus', 'gpus'):
    for value in options.every(f'--{name}'):
      node, _, text = value.partition('=')
      if node not in nodes:
        known = ', '.join(nodes)
        raise UsageError(f'--{name} takes NODE=N, with one of {known} as NODE, not {value!r}')
      if not (text.isascii() and text.isdigit()):
        raise UsageError(f'--{name} {node}=N takes a whole number, not {text!r}')
      more: dict[str, Any] = {name: int(text)}
      nodes[node] = dataclasses.replace(nodes[node], **more)
  if len({n.gpus for n in nodes.values() if is_one_of_several(n)}) > 1:
    names = ', '.join(n.name for n in nodes.values() if is_one_of_several(n))
    raise UsageError(f'--gpus: nodes that learn as one need equal numbers: {names}')
  return Program(tuple(nodes.values()))


def text(*documents: Mapping[str, Any]) -> str:
  """Return documents in YAML, with texts of several lines as literal blocks."""
  import yaml

  class Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
      return True

  def represent_text(dumper: Any, value: str) -> Any:
    return dumper.represent_scalar(
      'tag:yaml.org,2002:str', value, style='|' if '\n' in value else None
    )

  Dumper.add_representer(str, represent_text)
  return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True)


def tool(name: str, instead: str) -> str:
  """Return the path of a tool that an engine needs.

  Raises:
    UsageError: if it is not installed.
  """
  if (path := shutil.which(name)) is None:
    raise UsageError(f'there is no {name} here, which starts the program; install it, or {instead}')
  return path


def call(*command: str, content: str | None = None, timeout: float | None = None) -> int:
  """Run a tool in this terminal, with `content` as input.

  Returns its exit code, 1 after `timeout` seconds.
  """
  try:
    return subprocess.run(command, input=content, encoding='utf-8', timeout=timeout).returncode
  except subprocess.TimeoutExpired:
    print_text(f'{command[0]} has not ended in {timeout:.0f} s', file=sys.stderr)
    return 1
