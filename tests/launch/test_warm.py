"""The process that makes a program: what it answers, and what becomes of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from children import alive, environment

from podrace.errors import RunError, UsageError
from podrace.launch import replica, warm
from podrace.launch.warm import Warm


def test_it_makes_a_program_and_is_gone_if_it_is_not_wanted(tmp_path: Path) -> None:
  with Warm(environment(), ['catch', '--as', 'impala', '--seed', '7']) as found:
    assert found.name == 'catch'
    program = found.program(tmp_path)
    assert [n.name for n in program.nodes] == ['replay', 'learner', 'act']
    assert program.main.command[-1] == str(tmp_path) and '7' in program.main.command
  assert not alive(found.process.pid)


def test_what_it_refuses_is_refused_here() -> None:
  words = ['catch', '--as', 'impala', '--agent.no-such-field', '1']
  with pytest.raises(UsageError, match='no-such-field'), Warm(environment(), words):
    pass


def test_how_it_died_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
  def spawn(words: Any, *more: Any) -> replica.Process:
    return replica.spawn((sys.executable, '-c', 'raise SystemExit(3)'), *more)

  monkeypatch.setattr(warm, 'spawn', spawn)
  with (
    pytest.raises(RunError, match='has ended with 3'),
    Warm(environment(), ['catch', '--as', 'impala']),
  ):
    pass


def test_what_it_prints_meanwhile_is_told_however_much_that_is(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
  (tmp_path / 'chatty.py').write_text('print("x" * 200_000)\n')
  monkeypatch.chdir(tmp_path)
  words = [
    '--agent',
    'chatty:Agent',
    '--env',
    'podrace:catch',
    '--as',
    'impala',
    '--allow-code',
    'chatty',
  ]
  with pytest.raises(UsageError, match="has no 'Agent'"), Warm(environment(), words):
    pass
  assert 'x' * 200_000 in capfd.readouterr().err


def test_it_ends_with_its_launcher() -> None:
  found = Warm(environment(), ['catch', '--as', 'impala'])
  with found:
    assert found.process.stdin is not None
    found.process.stdin.close()  # as where the launcher was killed
    assert found.process.wait(60) == 0


def test_the_launcher_itself_imports_no_jax(tmp_path: Path) -> None:
  code = (
    'import sys\nfrom podrace.launch import local\nfrom podrace.commands import launch\n'
    'local.run = lambda *_: 0\n'
    f'assert launch.run(["catch", "--as", "impala", "--run-dir", {str(tmp_path / "run")!r}]) == 0\n'
    'assert "jax" not in sys.modules'
  )
  process = replica.spawn(
    (sys.executable, '-c', code), environment(), os.open(os.devnull, os.O_RDONLY)
  )
  assert process.communicate()[0] == b'' and process.returncode == 0
