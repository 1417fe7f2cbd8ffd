"""`podrace discover`, as a user runs it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from shorthand import Capture, Patch

from podrace import cli
from podrace.agents.rules import lpg, storage

SMALL = [
  'lpg-catch', '--agents', '2', '--num-envs', '2', '--unroll-length', '4', '--agent-updates', '2', '--lifetime', '6',
  '--env', 'podrace:catch,rows=5,columns=5', '--rule.trajectory', '4', '--rule.predictions', '3',
  '--agent.network.predictions', '3', '--total-steps', '480', '--devices', '1',
]  # fmt: skip


@pytest.fixture(autouse=True)
def keys_under_vmap() -> Iterator[None]:
  """JAX's check of keys takes the sampling of a `vmap` within a `scan` for a second use.

  In all threads: a command compiles in one of its own.
  """
  jax.config.update('jax_debug_key_reuse', False)
  yield
  jax.config.update('jax_debug_key_reuse', True)


def run(*args: str) -> Any:
  """The exit code of a command."""
  with pytest.raises(SystemExit) as ended:
    cli.main(list(args))
  return ended.value.code


@pytest.mark.slow
def test_a_rule_is_trained_and_the_command_that_is_printed_uses_it(
  tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  monkeypatch.chdir(tmp_path)
  assert run('discover', *SMALL, '--run-dir', 'rule') == 0
  out = capsys.readouterr().out
  summary = json.loads(Path('rule/summary.json').read_text())
  assert summary['step'] == 480
  path = 'rule/rule.npz'
  params = storage.load(path, storage.sha256(path), lpg.Sizes)
  assert lpg.Sizes.of(params).predictions == 3
  found = re.search(r'next: podrace (.*)', out)
  assert found
  command = shlex.split(found[1])
  assert command[-2:] == ['--agent.network.predictions', '3']
  few = ['--total-steps', '320', '--devices', '1', '--run-dir', 'agent', '--no-compile-cache']
  assert run(*command, *few) == 0
  assert json.loads(Path('agent/summary.json').read_text())['step'] >= 320


@pytest.mark.slow
def test_a_finished_one_says_so(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
  monkeypatch.chdir(tmp_path)
  assert run('discover', *SMALL, '--run-dir', 'rule') == 0
  before = Path('rule/rule.npz').read_bytes()
  capsys.readouterr()
  assert run('discover', '--run-dir', 'rule') == 0
  assert 'step 480' in capsys.readouterr().err
  assert Path('rule/rule.npz').read_bytes() == before


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (['--agent-updates', '0'], '--agent-updates'),
    (['--lifetime', '1'], '--agent-updates 2'),
    (['--env', 'ale:pong'], 'ale:pong'),
    (['--env', 'gymnax:Pendulum-v1'], 'gymnax:Pendulum-v1'),
    (['--agents', '3', '--devices', '2'], 'agents 3'),
    (['--replayed', '4'], 'lpg has no replay'),
    (['--rule.predictions', '4'], '--agent.network.predictions'),
    (['--widths', '4', '8', '--agent.network.hidden'], '--widths'),
  ],
)
def test_bad_input_exits_2(
  options: list[str], message: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
  monkeypatch.chdir(tmp_path)
  assert run('discover', *SMALL, *options, '--run-dir', 'rule') == 2
  assert message in capsys.readouterr().err
  assert not Path('rule').exists()


def test_what_is_no_preset(capsys: Capture) -> None:
  assert run('discover', 'lpg-catsh') == 2
  assert 'lpg-catch' in capsys.readouterr().err
