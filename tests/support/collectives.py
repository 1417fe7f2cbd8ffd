"""What a compiled program sends between devices, read from its text."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

COLLECTIVES = ('all-reduce', 'all-gather', 'all-to-all', 'collective-permute', 'reduce-scatter')


class Collective(NamedTuple):
  kind: str
  depth: int  # how many loops it is in
  size: int  # numbers sent


def collectives(text: str) -> list[Collective]:
  """All collectives of a compiled program, from its text."""
  inside: dict[str, tuple[str, bool]] = {}  # computation -> what calls it, whether as a loop's body
  found, here = [], ''
  for line in text.splitlines():
    if start := re.match(r'(?:ENTRY )?%(\S+) \(.*{$', line):
      here = start[1]
      continue
    operation = re.search(r'= (.*?) ([a-z][a-z-]*)\(', line)
    if not operation:
      continue
    for role, callees in re.findall(r'(\w+)=(%[\w.-]+|{%[^}]*})', line):
      for name in re.findall(r'%([\w.-]+)', callees):
        inside[name] = here, operation[2] == 'while' and role == 'body'
    kind = operation[2].removesuffix('-start')
    if kind in COLLECTIVES:
      shapes = re.findall(r'[a-z]\w*\[([\d,]*)\]', operation[1])
      found.append(
        (kind, here, sum(math.prod(map(int, filter(None, s.split(',')))) for s in shapes))
      )
  assert sum(len(re.findall(rf' {kind}(?:-start)?\(', text)) for kind in COLLECTIVES) == len(found)

  def depth(name: str) -> int:
    if name not in inside:
      return 0
    caller, body = inside[name]
    return body + depth(caller)

  return sorted(Collective(kind, depth(name), size) for kind, name, size in found)
