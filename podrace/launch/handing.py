"""What engines share that hand a program to somebody else's tool."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.commands.options import Option, Options
from podrace.errors import UsageError
from podrace.program import Program

Make = Callable[[Path], Program]  # the program for a run directory

CPUS = Option(
  '--cpus', 'NODE=N', 'beyond this machine: cores of each replica (default 1); may be repeated'
)
GPUS = Option(
  '--gpus', 'NODE=N', 'beyond this machine: of each replica (default 0); may be repeated'
)


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
  return Program(tuple(nodes.values()))


def tool(name: str, instead: str) -> str:
  """The path of a program that an engine needs.

  Raises:
    UsageError: if it is not there.
  """
  if (found := shutil.which(name)) is None:
    raise UsageError(f'there is no {name} here, which starts it; install it, or {instead}')
  return found
