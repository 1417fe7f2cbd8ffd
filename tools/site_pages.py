"""A hook of MkDocs: the site has pages and files from outside docs/, and links lead to them.

Pages link to each other as GitHub shows them, relative to their place in the repository. On the site
the README's links lead home, and files of benchmarks/ and examples/ keep their paths.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = (
  'benchmarks/*.md',
  'benchmarks/results/*.json',
  'examples/*',
  'podrace/settings/*.toml',
  'CITATION.cff',
)
OPTION = re.compile(r'(?<!<td>)<code>(--[^<\s]{1,36})</code>')
LINK = re.compile(r'(\]\()([^)#\s]+)((?:#[^)\s]*)?\))')


def on_files(files: Any, config: Any) -> Any:
  """Add the files from outside docs/."""
  for path in sorted(p for pattern in OUTSIDE for p in ROOT.glob(pattern) if p.is_file()):
    name = path.relative_to(ROOT).as_posix()
    files.append(File.generated(config, name, abs_src_path=str(path)))
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Links as the site needs them."""
  return rewritten(markdown, page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
  """Options in sentences, which browsers would break after a hyphen."""
  return OPTION.sub(r'<code class="option">\1</code>', html)


def rewritten(markdown: str, page: str) -> str:
  """The text of a page of the site with links that are relative to its place there."""
  folder = posixpath.dirname(in_repository(page))

  def one(found: re.Match[str]) -> str:
    before, target, after = found.groups()
    if '://' in target or target.startswith('mailto:'):
      return found.group()
    there = place_on_site(posixpath.normpath(posixpath.join(folder, target)))
    return before + posixpath.relpath(there, posixpath.dirname(page) or '.') + after

  return LINK.sub(one, markdown)


def in_repository(page: str) -> str:
  """Where the source of a page of the site is."""
  return page if page.startswith(('benchmarks/', 'examples/')) else f'docs/{page}'


def place_on_site(path: str) -> str:
  """Return the place on the site of a `path` in the repository."""
  return path.removeprefix('docs/')  # the README is the home of both
