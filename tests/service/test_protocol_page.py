"""The page of the protocol of replay and parameters has the numbers that are used."""

from __future__ import annotations

import re

from apart import ROOT

from podrace.service import wire

PAGE = (ROOT / 'docs' / 'protocol.md').read_text().partition('\n# The protocol of replay')[2]
BOUNDS = ('VERSION', 'KEY_BITS', 'DEPTH', 'LEAVES', 'AS_IS', 'PACKED', 'DIFFERENCES')


def test_the_page_has_every_kind_and_its_number() -> None:
  rows = re.findall(r'^\| ([A-Z]+) \| `\[(\d+)[,\]]', PAGE, re.MULTILINE)
  rows += [(name, number) for number, name in re.findall(r'`\[(\d+), [^`]*\]` \(([A-Z]+)\)', PAGE)]
  kinds = {
    k: v for k, v in vars(wire).items()
    if k.isupper() and type(v) is int and k not in BOUNDS and not k.startswith(('MOST_', 'MESSAGE_'))
    and not k.endswith('_BYTES')
  }  # fmt: skip
  assert {k: int(v) for k, v in rows} == kinds and len(rows) == len(kinds)
