"""Files of examples/papers use documented names of podrace only."""

import ast
import importlib
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAPERS = sorted((ROOT / 'examples' / 'papers').glob('*.py'))
REFERENCE = ''.join(path.read_text() for path in (ROOT / 'docs' / 'api').glob('*.md'))


def documented() -> set[str]:
  """Returns full names in the reference, and of the members of its modules."""
  names = {'podrace.configure', 'podrace.train', 'podrace.load_policy', 'podrace.EndTraining'}
  for name in re.findall(r'^::: (\S+)', REFERENCE, re.MULTILINE):
    names |= {name}
    try:
      names |= {f'{name}.{x}' for x in vars(importlib.import_module(name)) if x[0] != '_'}
    except ModuleNotFoundError:
      module, _, attribute = name.rpartition('.')
      value = getattr(importlib.import_module(module), attribute)
      package = module.rpartition('.')[0]  # the package that exports it, as the manual imports it
      if vars(importlib.import_module(package)).get(attribute) is value:
        names.add(f'{package}.{attribute}')
  return names


def imported(path: pathlib.Path) -> Iterator[str]:
  """Yields full names of podrace that a file imports."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'podrace':
      yield from (f'{node.module}.{x.name}' for x in node.names)
    elif isinstance(node, ast.Import):
      yield from (x.name for x in node.names if x.name.startswith('podrace.'))


@pytest.mark.parametrize('path', PAPERS, ids=lambda x: x.stem)
def test_only_documented_names_are_imported(path: pathlib.Path) -> None:
  names = set(imported(path))
  assert names
  assert names <= documented()


@pytest.mark.parametrize('path', PAPERS, ids=lambda x: x.stem)
def test_no_private_attribute_is_used(path: pathlib.Path) -> None:
  nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Attribute)]
  private = {x.attr for x in nodes if x.attr.startswith('_') and not x.attr.startswith('__')}
  own = {x.attr for x in nodes if isinstance(x.value, ast.Name) and x.value.id == 'self'}
  assert private <= own


@pytest.mark.parametrize('path', PAPERS, ids=lambda x: x.stem)
def test_a_file_has_60_to_250_lines(path: pathlib.Path) -> None:
  assert 60 <= len(path.read_text().splitlines()) <= 250
