"""Words of a dialect of our own stay out of the code; the field has its terms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / 'podrace'
RETIRED = ('told', 'apart', 'beside', 'owed', 'hosted', 'dear', 'dearer', 'ranked_by_acting')
FOUND = re.compile(rf'(?i)(?<![a-z])({"|".join(RETIRED)})(?![a-z])')


def files() -> list[Path]:
  return sorted(HOUSE.rglob('*.py'))


def test_there_are_files() -> None:
  assert len(files()) > 90


@pytest.mark.parametrize('path', files(), ids=lambda p: str(p.relative_to(HOUSE)))
def test_no_retired_words(path: Path) -> None:
  lines = enumerate(path.read_text().splitlines(), 1)
  found = [f'{n}: {line.strip()}' for n, line in lines if FOUND.search(line)]
  assert not found, f'{path.name} has words of a dialect: {found}; see RETIRED for the terms'


def test_the_pattern_finds_them_in_names_too() -> None:
  assert FOUND.search('self._told = 1') and FOUND.search('class Hosted:')
  assert not FOUND.search('untold numbers') and not FOUND.search('besides')
