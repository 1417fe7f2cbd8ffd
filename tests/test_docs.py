"""The code in the docs runs, page by page."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import podrace.hooks

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


def heading_anchors(page: Path) -> set[str]:
  """What GitHub makes of the headings."""
  text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
  headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_links() -> None:
  """Relative links between pages lead somewhere, to the heading."""
  broken = []
  folders = (ROOT, ROOT / 'docs', ROOT / 'benchmarks')
  for page in [page for folder in folders for page in folder.glob('*.md')]:
    for target, anchor in re.findall(r'\]\(([^)#\s]*)(?:#([^)\s]*))?\)', page.read_text()):
      if '://' in target:
        continue
      file = page.parent / target if target else page
      if not file.exists():
        broken.append(f'{page.name}: {target}')
      elif anchor and anchor not in heading_anchors(file):
        broken.append(f'{page.name}: {target}#{anchor}')
  assert not broken


def test_every_page_is_in_the_index() -> None:
  index = (ROOT / 'docs' / 'README.md').read_text()
  pages = {p.name for p in (ROOT / 'docs').glob('*.md')} - {'README.md'}
  assert pages <= set(re.findall(r'\]\(([\w-]+\.md)\)', index))


def test_the_picture_of_sebulba_is_that_of_its_example() -> None:
  example = (ROOT / 'examples' / 'sebulba.py').read_text()
  (picture,) = re.findall(r'^    pools of .*?parameters.*?$', example, re.DOTALL | re.MULTILINE)
  page = (ROOT / 'docs' / 'architectures.md').read_text()
  assert textwrap.dedent(picture) in page


def test_every_hook_of_an_agent_is_in_the_guide() -> None:
  hooks = re.findall(r'^- (?:`(\w+)|fields with `(\w+))', str(podrace.hooks.__doc__), re.MULTILINE)
  names = [a or b for a, b in hooks]
  assert len(names) >= 6
  guide = (ROOT / 'docs' / 'own.md').read_text()
  assert [n for n in names if n not in guide] == []
