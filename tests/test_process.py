"""What commands have in common: what they tell, and to whom."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import podrace
from podrace.process import log_to_stderr

LOG = logging.getLogger('podrace.somewhere')


def tell() -> None:
  LOG.info('somebody joins')
  LOG.warning('somebody is silent')


def test_a_command_tells_what_is_logged_in_one_format(capfd: pytest.CaptureFixture[str]) -> None:
  root = logging.StreamHandler()  # as some library may have set up
  logging.getLogger().addHandler(root)
  try:
    with log_to_stderr('podrace it'):
      tell()
    assert capfd.readouterr().err == 'podrace it: somebody joins\npodrace it: somebody is silent\n'
    with log_to_stderr('podrace it', quiet=True):
      tell()
    assert capfd.readouterr().err == 'podrace it: somebody is silent\n'
  finally:
    logging.getLogger().removeHandler(root)


def test_what_a_command_has_set_up_ends_with_it(capfd: pytest.CaptureFixture[str]) -> None:
  ours = logging.getLogger('podrace')
  before = ours.level, ours.propagate, list(ours.handlers)
  with pytest.raises(ZeroDivisionError), log_to_stderr('podrace it'):
    raise ZeroDivisionError
  assert (ours.level, ours.propagate, ours.handlers) == before


def test_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  class Closed:
    def write(self, text: str) -> None:
      raise BrokenPipeError

    flush = write

  monkeypatch.setattr('sys.stderr', Closed())
  with log_to_stderr('podrace it'):
    tell()


def test_only_commands_configure_logging() -> None:
  """A library that does takes it from the program that it is part of."""
  source, found = Path(podrace.__file__).parent, set()
  for file in source.rglob('*.py'):
    for node in ast.walk(ast.parse(file.read_text())):
      if isinstance(node, ast.Attribute) and node.attr in ('addHandler', 'basicConfig'):
        found.add(file.name)
      if isinstance(node, ast.Name) and node.id == 'log_to_stderr':
        found.add(file.name)
  assert found == {'process.py', 'cli.py'}
