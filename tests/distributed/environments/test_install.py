"""The installations without JAX that the pages have, in virtual environments of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from children import ROOT, SUPPORT, until
from peers import Learner, assert_whole, lives

from podrace import tables
from podrace.distributed import replay

PLAIN = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}


def install(page: str, folder: Path) -> Path:
  """The commands of a virtual environment in which there is what a page tells to install."""
  (packages,) = re.findall(
    r'^pip install (numpy .*?) *(?:#.*)?$', (ROOT / 'docs' / page).read_text(), re.MULTILINE
  )
  commands = folder / 'light' / 'bin'
  subprocess.run([sys.executable, '-m', 'venv', str(commands.parent)], check=True)
  source = folder / 'source'  # building in place would leave things there
  source.mkdir()
  names = ['pyproject.toml', 'README.md', 'LICENSE', 'podrace']
  subprocess.run(['cp', '-r', *(str(ROOT / n) for n in names), str(source)], check=True)
  pip = [str(commands / 'pip'), 'install', '--quiet', '--disable-pip-version-check']
  subprocess.run([*pip, '--no-deps', str(source)], check=True)
  pins = ['--constraint', str(ROOT / 'constraints.txt')]
  subprocess.run([*pip, *pins, *packages.split()], check=True)
  listed = subprocess.run([str(commands / 'pip'), 'list'], check=True, capture_output=True).stdout
  assert b'jax' not in listed and b'podrace' in listed
  return commands


@pytest.mark.slow
def test_environments_without_jax(tmp_path: Path) -> None:
  podrace = str(install('distributed.md', tmp_path) / 'podrace')
  assert subprocess.run([podrace, 'keys', 'new', 'keys'], cwd=tmp_path, env=PLAIN).returncode == 0
  with Learner(keys=tmp_path / 'keys') as learner:
    args = ['--connect', learner.address, '--keys', 'keys', '--num-envs', '4', '--env']
    path = {**PLAIN, 'PYTHONPATH': str(SUPPORT)}  # of host_envs
    envs = subprocess.Popen(
      [podrace, 'envs', *args, 'gymnasium:host_envs:Sequence-v0'], cwd=tmp_path, env=path
    )
    until(lambda: learner.steps > 400)
    envs.send_signal(signal.SIGTERM)
    assert envs.wait(30) == 143
    assert_whole(lives(learner.arrivals))
    other = subprocess.run(
      [podrace, 'envs', *args, 'ale:pong'], cwd=tmp_path, env=PLAIN, capture_output=True, text=True
    )
    assert other.returncode == 2 and '[4, 84, 84]' in other.stderr
    top = subprocess.run(
      [podrace, 'top', learner.address, '--keys', 'keys', '--once'], cwd=tmp_path, env=PLAIN
    )
    assert top.returncode == 0


@pytest.mark.slow
def test_a_replay_service_without_jax(tmp_path: Path) -> None:
  podrace = str(install('tables.md', tmp_path) / 'podrace')
  with (tmp_path / 'log').open('w') as log:
    args = ['--listen', 'tcp://127.0.0.1:*', '--dir', 'kept']
    server = subprocess.Popen([podrace, 'replay', *args], cwd=tmp_path, env=PLAIN, stderr=log)
  try:
    served(server, tmp_path)
  finally:
    server.kill()  # if it still goes


def served(server: subprocess.Popen[bytes], folder: Path) -> None:
  """Writes, samples, and has it stop with a checkpoint."""
  said = (folder / 'log').read_text
  until(lambda: 'listening at' in said() or server.poll() is not None)
  address = said().partition('listening at ')[2].split()[0]
  with replay.connect(address) as client:
    table = client.table(
      'it', sampler=tables.uniform(), remover=tables.fifo(), rate_limiter=tables.min_size(1), max_size=9
    )  # fmt: skip
    with client.writer(history=2) as writer:
      for i in range(5):
        writer.append({'x': np.full(3, i)})
        if i:
          writer.create_item(table, 1.0, num_steps=2)
      writer.flush(timeout=30)
    (x,) = table.sample(1, timeout=30).data['x']
    assert np.array_equal(x[1], x[0] + 1)
  server.send_signal(signal.SIGTERM)
  assert server.wait(30) == 143
  assert list((folder / 'kept').iterdir())
