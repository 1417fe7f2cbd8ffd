"""The code in the docs runs, page by page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
  p
  for p in [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
  if '```python' in p.read_text()
]


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.name)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  blocks = re.findall(r'^```python\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE)
  assert blocks
  module = {'__name__': f'docs_{page.stem.replace("-", "_")}'}
  for block in blocks:
    exec(compile(block, str(page), 'exec', dont_inherit=True), module)


def test_links() -> None:
  """Relative links between pages lead somewhere."""
  broken = []
  for page in [ROOT / 'README.md', *(ROOT / 'docs').glob('*.md')]:
    for target in re.findall(r'\]\(([^)#\s]+)', page.read_text()):
      if '://' not in target and not (page.parent / target).exists():
        broken.append(f'{page.name}: {target}')
  assert not broken
