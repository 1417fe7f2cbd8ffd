"""The installation without JAX that docs/remote.md has, in a virtual environment of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from apart import ROOT, TESTS, until
from peers import Learner, assert_whole, lives


@pytest.mark.slow
def test_environments_without_jax(tmp_path: Path) -> None:
  page = (ROOT / 'docs' / 'remote.md').read_text()
  (packages,) = re.findall(r'^pip install (numpy .*?) *#', page, re.MULTILINE)
  venv = tmp_path / 'envs'
  subprocess.run([sys.executable, '-m', 'venv', str(venv)], check=True)
  source = tmp_path / 'source'  # building in place would leave things there
  names = ['pyproject.toml', 'README.md', 'LICENSE', 'podrace']
  subprocess.run(['mkdir', str(source)], check=True)
  subprocess.run(['cp', '-r', *(str(ROOT / n) for n in names), str(source)], check=True)
  pip = [str(venv / 'bin' / 'pip'), 'install', '--quiet', '--disable-pip-version-check']
  subprocess.run([*pip, '--no-deps', str(source)], check=True)
  pins = ['--constraint', str(ROOT / 'constraints.txt')]
  subprocess.run([*pip, *pins, *packages.split()], check=True)
  freeze = subprocess.run(
    [str(venv / 'bin' / 'pip'), 'list'], check=True, capture_output=True, text=True
  ).stdout
  assert 'jax' not in freeze and 'podrace' in freeze
  podrace = str(venv / 'bin' / 'podrace')
  plain = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  assert subprocess.run([podrace, 'keys', 'new', 'keys'], cwd=tmp_path, env=plain).returncode == 0
  with Learner(keys=tmp_path / 'keys') as learner:
    args = ['--connect', learner.address, '--keys', 'keys', '--num-envs', '4', '--env']
    path = {**plain, 'PYTHONPATH': str(TESTS)}  # of host_envs
    envs = subprocess.Popen(
      [podrace, 'envs', *args, 'gymnasium:host_envs:Sequence-v0'], cwd=tmp_path, env=path
    )
    until(lambda: learner.steps > 400)
    envs.send_signal(signal.SIGTERM)
    assert envs.wait(30) == 143
    assert_whole(lives(learner.arrivals))
    other = subprocess.run(
      [podrace, 'envs', *args, 'ale:pong'], cwd=tmp_path, env=plain, capture_output=True, text=True
    )
    assert other.returncode == 2 and 'the environments Box |u1 of shape [4, 84, 84]' in other.stderr
    top = subprocess.run(
      [podrace, 'top', learner.address, '--keys', 'keys', '--once'], cwd=tmp_path, env=plain
    )
    assert top.returncode == 0
