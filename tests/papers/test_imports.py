"""Files of examples/papers use documented names of podrace only."""

import ast
import importlib
import inspect
import pathlib
import re
import sys
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
      members = vars(importlib.import_module(name)).items()
      names |= {f'{name}.{x}' for x, value in members if x[0] != '_' and is_of(name, value)}
    except ModuleNotFoundError:
      module, _, attribute = name.rpartition('.')
      value = getattr(importlib.import_module(module), attribute)
      package = module.rpartition('.')[0]  # the package that exports it, as the manual imports it
      if vars(importlib.import_module(package)).get(attribute) is value:
        names.add(f'{package}.{attribute}')
  return names


def is_of(module: str, value: object) -> bool:
  """Returns whether a member of a module is its own, and not one that it imports."""
  return not inspect.ismodule(value) and getattr(value, '__module__', module).startswith(module)


def used(path: pathlib.Path) -> Iterator[str]:
  """Yields full names of podrace that a file imports, and of the members of imported modules."""
  nodes, modules = [*ast.walk(ast.parse(path.read_text()))], dict[str, str]()
  for node in nodes:
    if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'podrace':
      names = {x.asname or x.name: f'{node.module}.{x.name}' for x in node.names}
      yield from names.values()
      modules |= {local: name for local, name in names.items() if name in sys.modules}
    elif isinstance(node, ast.Import):
      names = {x.name: x.name for x in node.names if x.name.split('.')[0] == 'podrace'}
      yield from names.keys() - {'podrace'}
      modules |= names
  for node in nodes:
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
      yield f'{modules[ast.unparse(node.value)]}.{node.attr}'


@pytest.mark.parametrize('path', PAPERS, ids=lambda x: x.stem)
def test_only_documented_names_are_imported(path: pathlib.Path) -> None:
  known = documented()
  names = set(used(path))
  assert names
  assert names <= known


@pytest.mark.parametrize('path', PAPERS, ids=lambda x: x.stem)
def test_no_private_attribute_is_used(path: pathlib.Path) -> None:
  nodes = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Attribute)]
  private = {x.attr for x in nodes if x.attr.startswith('_') and not x.attr.startswith('__')}
  own = {x.attr for x in nodes if isinstance(x.value, ast.Name) and x.value.id == 'self'}
  assert private <= own


@pytest.mark.parametrize('path', PAPERS, ids=lambda x: x.stem)
def test_a_file_has_60_to_250_lines(path: pathlib.Path) -> None:
  assert 60 <= len(path.read_text().splitlines()) <= 250
