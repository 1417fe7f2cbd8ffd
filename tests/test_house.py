"""The layout of the package: sizes, and imports that import-linter does not see."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import podrace

PACKAGE = Path(podrace.__file__).parent
PROJECT = PACKAGE.parent
ENTRIES, FILE_LINES, CLASS_LINES, FUNCTION_LINES = 28, 400, 250, 50
LONGER = {  # still to be split; this list only shrinks
}


def sources() -> Iterator[tuple[str, Path]]:
  """Yield the dotted name of each module within podrace, and its file."""
  for path in sorted(PACKAGE.rglob('*.py')):
    if 'templates' not in path.parts:
      name = path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')
      yield name.removesuffix('.__init__'), path


def layers() -> dict[str, int]:
  """Return the rank of each part of the root, 0 for the highest, as import-linter's contract has it."""
  project = tomllib.loads((PROJECT / 'pyproject.toml').read_text(encoding='utf-8'))
  (contract,) = (c for c in project['tool']['importlinter']['contracts'] if c['type'] == 'layers')
  ranks = enumerate(contract['layers'])
  return {
    part.strip(): rank for rank, layer in ranks for part in layer.replace('|', ':').split(':')
  }


def test_the_root_is_short() -> None:
  entries = [p.name for p in PACKAGE.iterdir() if p.name not in ('__pycache__', 'py.typed')]
  assert len(entries) <= ENTRIES, sorted(entries)


def test_files_classes_and_functions_are_short() -> None:
  long: dict[str, int] = {}
  for name, path in sources():
    text = path.read_text(encoding='utf-8')
    if (lines := len(text.splitlines())) > FILE_LINES:
      long[name] = lines
    for node in ast.walk(ast.parse(text)):
      limit = {ast.ClassDef: CLASS_LINES, ast.FunctionDef: FUNCTION_LINES}.get(type(node))
      if limit is not None and isinstance(node, ast.ClassDef | ast.FunctionDef):
        assert node.end_lineno is not None
        if (lines := node.end_lineno - node.lineno + 1) > limit:
          long[f'{name}.{node.name}'] = lines
  assert long.keys() == LONGER.keys()
  assert all(lines <= LONGER[name] for name, lines in long.items())


def test_texts_that_name_modules_point_downwards_too() -> None:
  """`importlib.import_module('podrace.x')`, tables of modules, and `python -m podrace.x`."""
  modules, ranks = {name for name, _ in sources()}, layers()
  upward = []
  for name, path in sources():
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        module = node.value.partition(':')[0].removeprefix('podrace.')
        if node.value.startswith('podrace.') and module in modules and name != '__init__':
          ours, theirs = name.split('.')[0], module.split('.')[0]
          if ranks[theirs] < ranks[ours]:
            upward.append(f'{name}:{node.lineno} names {node.value}')
  assert not upward


def test_the_contract_lists_every_part_of_the_root() -> None:
  parts = {name.split('.')[0] for name, _ in sources()} - {'__init__'}
  assert parts == set(layers())


def test_a_configuration_is_validated_and_bound_in_one_place() -> None:
  """`resolve` does both; the groups of a population (`discover`) are bound where it is built."""
  places: dict[str, set[str]] = {'validate': set(), 'bind_run': set()}
  for name, path in sources():
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
      if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if called in places:
          places[called].add(name)
  assert places == {called: {'settings.resolved', 'run.build'} for called in places}
