"""The first seconds of a run: initialising many seeds, what hangs, and what is compiled only once."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import Process
from processes import summary
from shorthand import Patch, slow_after

from podrace.errors import Stopped
from podrace.networks.initializers import orthogonal
from podrace.run import build, compile_cache, processes
from podrace.settings.presets import PRESETS

LAPACK = re.compile(r'custom_call @(lapack_\w+|\w*[Qq]r\w*|\w*[Hh]ouseholder\w*)\((.*)')


def lapack_calls(text: str) -> list[str]:
  """The calls of LAPACK in a lowered program, with their operands' types."""
  return [line for line in text.splitlines() if LAPACK.search(line)]


def init_program(preset: str, seeds: int) -> str:
  config = dataclasses.replace(PRESETS[preset](), seeds=seeds, num_envs=8, devices=2)
  program = build.build(config)
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), seeds))
  return program.init.lower(keys).as_text()


@pytest.mark.parametrize(
  'preset', slow_after(3, 'catch', 'memory', 'dqn-cartpole', 'sac-pendulum', 'cartpole')
)
def test_no_preset_initialises_with_lapack(preset: str) -> None:
  """Two batched calls of it that run at once on a CPU can wait for each other for ever."""
  assert not lapack_calls(init_program(preset, 4))


def test_an_own_initialiser_with_lapack_is_not_batched_over_seeds(monkeypatch: Patch) -> None:
  monkeypatch.setattr('podrace.networks.actor_critic.orthogonal', jax.nn.initializers.orthogonal)
  calls = lapack_calls(init_program('cartpole', 4))
  assert calls
  assert not [call for call in calls if re.search(r'tensor<4x\d+x\d+xf32>', call)], calls


@pytest.mark.parametrize('shape', [(16, 16), (5, 12), (12, 5), (3, 3, 4, 8)])
def test_orthogonal_is_orthogonal_and_as_jax_has_it(shape: tuple[int, ...]) -> None:
  key = jax.random.key(3)
  found = np.asarray(orthogonal(1.5)(key, shape))
  expected = jax.nn.initializers.orthogonal(1.5)(jax.random.clone(key), shape)
  np.testing.assert_allclose(found, expected, atol=1e-4)
  matrix = found.reshape(-1, shape[-1]) / 1.5
  if matrix.shape[0] < matrix.shape[1]:
    matrix = matrix.T
  np.testing.assert_allclose(matrix.T @ matrix, np.eye(matrix.shape[1]), atol=1e-5)


def test_an_almost_singular_matrix_gives_orthonormal_columns() -> None:
  """One pass of Gram-Schmidt would leave an error of 1e-2 here."""
  from podrace.networks.initializers import orthonormal

  near = jnp.ones((8, 4)) + 1e-4 * jax.random.normal(jax.random.key(0), (8, 4))
  basis = np.asarray(orthonormal(near))
  np.testing.assert_allclose(basis.T @ basis, np.eye(4), atol=1e-5)


# --- what hangs -----------------------------------------------------------------------------------

HANGS = """
import ctypes, sys
import jax
from podrace import cli
from podrace.architectures import anakin
from podrace.run import updates
from podrace.system import signals

signals.SLOW_SECONDS, updates.GRACE_SECONDS = 0.2, 0.5
init = anakin.Anakin._init

def hung(self, keys):
  def sleep():
    print('it hangs', flush=True)
    ctypes.CDLL(None).sleep(100_000)
    return jax.numpy.int32(0)
  state = init(self, keys)
  nothing = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), 'int32'))
  return state._replace(update=state.update + nothing)

def slow(self, state, updates, give_up):
  print('it hangs', flush=True)
  ctypes.CDLL(None).sleep(100_000)

if sys.argv[1] == 'initialisation':
  anakin.Anakin._init = hung
else:
  from podrace.architectures.anakin import AnakinDriver
  AnakinDriver.advance = slow
cli.main(sys.argv[2:])
"""


@pytest.mark.parametrize(
  ('signum', 'code'),
  [
    pytest.param(signal.SIGTERM, 143, id='SIGTERM'),
    pytest.param(signal.SIGINT, 130, id='SIGINT', marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize(
  'what', [pytest.param('initialisation', marks=pytest.mark.slow), 'a call of the program']
)
def test_a_signal_ends_what_hangs_and_a_warning_says_where_it_stands(
  what: str, signum: int, code: int, tmp_path: Path
) -> None:
  args = ('train', 'catch', '--devices', '1', '--run-dir', str(tmp_path / 'run'))
  with Process(tmp_path / 'log', '-c', HANGS, what, *args) as process:
    process.says('it hangs')
    process.says(f'{what} has taken')
    process.signal(signum)
    assert process.wait(60) == code, process.output
  assert re.search(r'has taken \d+ s so far, in \w+ \(.*:\d+\); Ctrl-C ends it', process.output)
  assert '--run-dir' in process.output
  if what != 'initialisation':
    assert 'within 0.5 s' in process.output


def test_sigterm_is_not_taken_by_jax_between_joining_and_the_run(tmp_path: Path) -> None:
  text = """
import os, signal, socket
from podrace.run import processes
with socket.socket() as s:
  s.bind(('127.0.0.1', 0))
  port = s.getsockname()[1]
processes.join_processes(processes.Place(f'127.0.0.1:{port}', 1, 0))
os.kill(os.getpid(), signal.SIGTERM)
print('it goes on')
"""
  with Process(tmp_path / 'log', '-c', text) as process:
    assert process.wait(60) == 128 + signal.SIGTERM, process.output


def test_a_finished_run_of_several_processes_leaves_them_itself(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  """JAX's exit handlers do so as well, but do not run on every way out."""
  from podrace import cli

  left = []
  monkeypatch.setattr(processes, 'leave_processes', lambda: left.append(True))
  args = ['train', 'catch', '--devices', '1', '--total-steps', '16', '--quiet']
  args += ['--num-envs', '4', '--unroll-length', '4', '--agent.network.hidden', '8']
  with pytest.raises(SystemExit) as end:
    cli.main([*args, '--run-dir', str(tmp_path / 'run')])
  assert end.value.code in (0, None) and left == [True]


@pytest.mark.parametrize('fails', [False, True])
def test_processes_that_do_not_come_are_waited_for_a_while_at_most(
  fails: bool, monkeypatch: Patch
) -> None:
  from podrace import cli

  gate = threading.Event()

  def shutdown() -> None:
    if fails:
      raise RuntimeError('they are gone')
    gate.wait()

  monkeypatch.setattr(processes, 'has_joined', lambda: True)
  monkeypatch.setattr(processes.jax.distributed, 'shutdown', shutdown)
  monkeypatch.setattr(cli, 'LEAVE_SECONDS', 0.01)

  def stopped(args: list[str]) -> int:
    raise Stopped(signal.SIGTERM, 'a call did not end')

  monkeypatch.setitem(
    cli.COMMANDS, 'train', types.SimpleNamespace(run=stopped, COMMAND=cli.COMMANDS['train'].COMMAND)
  )
  monkeypatch.setattr(os, '_exit', sys.exit)
  with pytest.raises(SystemExit) as end:
    cli.main(['train'])
  assert end.value.code == 128 + signal.SIGTERM
  gate.set()


# --- what is compiled once ------------------------------------------------------------------------


def train(tmp_path: Path, name: str, *more: str) -> str:
  """Catch in a process of its own, with a cache below `tmp_path`; its output."""
  text = """
import os, sys
os.environ.pop('JAX_COMPILATION_CACHE_DIR', None)
os.environ['XDG_CACHE_HOME'] = sys.argv[1]
from jax._src import monitoring
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith('cache_hits') else None)
from podrace import cli
try:
  cli.main(sys.argv[2:])
finally:
  print('hits', len(hits))
"""
  args = ['train', 'catch', '--total-steps', '2000', '--run-dir', str(tmp_path / name), *more]
  with Process(tmp_path / f'{name}.log', '-c', text, str(tmp_path / 'home'), *args) as process:
    assert process.wait(120) == 0, process.output
  return process.output


def hits(output: str) -> int:
  return int(re.findall(r'^hits (\d+)$', output, re.M)[0])


@pytest.mark.slow
def test_programs_are_kept_and_compute_the_same(tmp_path: Path) -> None:
  first = train(tmp_path, 'first')
  (kept,) = (tmp_path / 'home' / 'podrace' / 'programs').iterdir()
  assert kept.stat().st_mode & 0o777 == 0o700
  assert f'compiled programs are kept in {kept}' in first and not hits(first)
  again = train(tmp_path, 'again')
  assert 'compiled programs' not in again and hits(again)
  without = train(tmp_path, 'without', '--no-compile-cache')
  assert not hits(without)
  for file in kept.glob('*-cache'):  # as a full disk or a kill would leave them
    file.write_bytes(file.read_bytes()[:100])
  damaged = train(tmp_path, 'damaged')
  names = ('first', 'again', 'without', 'damaged')
  assert len({summary(tmp_path / name)['params_sha256'] for name in names}) == 1, damaged


def test_a_directory_that_others_may_write_to_is_not_used(
  tmp_path: Path, monkeypatch: Patch
) -> None:
  """Who writes there has his programs run here."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(jax.config, 'update', lambda *_: pytest.fail('it was used'))
  monkeypatch.setattr(type(jax.config), 'jax_compilation_cache_dir', None, raising=False)
  compile_cache.cache_directory().mkdir(parents=True)
  os.chmod(compile_cache.cache_directory(), 0o777)
  said: list[str] = []
  compile_cache.enable(said.append)
  assert len(said) == 1 and 'write' in said[0]
