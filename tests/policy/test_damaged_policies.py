"""Policies, rules and opponents of strangers: each that is not as it should be is one clear error."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from damages import make
from safetensors.numpy import save
from shorthand import Patch
from test_damaged_directories import ends

import podrace
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.agents.rules import disco, storage
from podrace.envs.own.catch import Catch
from podrace.errors import PolicyError, UsageError
from podrace.networks import ActorCritic
from podrace.policy import export as export_module
from podrace.policy import load_policy
from podrace.run import opponents
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.system import files
from podrace.system.files.reading import read_npz

ABOUT: dict[str, Any] = {
  'version': 1, 'agent': 'ppo', 'env': 'podrace:catch', 'step': 10, 'state': [],
  'observation_space': {'kind': 'box', 'shape': [2], 'dtype': 'float32', 'pixels': False, 'channels_first': False, 'scale': 1.0},
  'action': {'kind': 'categorical', 'n': 3, 'shape': [], 'dtype': 'int32'},
  'network': {
    'torso': 'mlp', 'torso_name': 'torso', 'layers': 0, 'activation': 'tanh', 'core': 'none', 'core_size': 0, 'core_name': 'rnn',
    'head': 'policy', 'head_name': 'head', 'atoms': 1, 'dueling': False, 'support': None, 'floats': [0], 'mask': None,
  },
}  # fmt: skip
PARAMS = {'head/kernel': np.eye(2, 3, dtype=np.float32), 'head/bias': np.zeros(3, np.float32)}
HUGE = 2**60
ESCAPE = '\x1b]0;x\x07'


def export(folder: Path, params: bytes | None = None, **members: Any) -> Path:
  """A policy with these members of policy.json; NAME__PART is a member of a member."""
  folder.mkdir()
  about = copy.deepcopy(ABOUT)
  for name, value in members.items():
    *parents, last = name.split('__')
    part = about
    for parent in parents:
      part = part[parent]
    part[last] = value
  data = save(PARAMS) if params is None else params
  (folder / 'params.safetensors').write_bytes(data)
  about.setdefault('sha256', {'params.safetensors': hashlib.sha256(data).hexdigest()})
  (folder / 'policy.json').write_text(json.dumps(about))
  return folder


def header(text: bytes, data: bytes = b'') -> bytes:
  return len(text).to_bytes(8, 'little') + text + data


def nested(depth: int) -> Any:
  value: Any = ABOUT['observation_space']
  for _ in range(depth):
    value = {'tuple': [value]}
  return value


def convolved(size: int, window: int, features: int) -> dict[str, Any]:
  """Members of a policy whose first convolution has many patches, or features."""
  kernel = np.zeros((window, window, 1, features), np.float32)
  bias = np.zeros(features, np.float32)
  name = 'torso/Grid_0/Conv_0'
  return {
    'params': save({**PARAMS, f'{name}/kernel': kernel, f'{name}/bias': bias}),
    'network__torso': 'grid', 'observation_space__shape': [size, size, 1],
  }  # fmt: skip


POLICIES: dict[str, dict[str, Any]] = {
  'many large observations': {
    'observation_space': {'tuple': [{**ABOUT['observation_space'], 'shape': [2**25]}] * 1000}
  },
  'many large patches': convolved(2**10, 2**7, 1),
  'many features': convolved(2**10, 1, 2**13),
  'no header': {'params': b''},
  'a header longer than the file': {'params': HUGE.to_bytes(8, 'little') + b'{}'},
  'a header that is no JSON': {'params': header(b'[' * 1000)},
  'a shape beyond the file': {
    'params': header(
      b'{"head/kernel":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}', b'abcd'
    )
  },
  'an unknown dtype': {
    'params': header(b'{"head/kernel":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', b'abcd')
  },
  'parameters of other names': {'params': save({'x': np.zeros(3, np.float32)})},
  'parameters of other shapes': {
    'params': save({**PARAMS, 'head/kernel': np.zeros((5, 5), np.float32)})
  },
  'a path among the hashes': {'sha256': {'../params.safetensors': 'x'}},
  'hashes that are a list': {'sha256': ['params.safetensors']},
  'a hash that is a number': {'sha256': {'params.safetensors': 5}},
  'a large observation': {'observation_space__shape': [HUGE]},
  'a product of shapes': {'observation_space__shape': [2**20, 2**20]},
  'a negative shape': {'observation_space__shape': [-1]},
  'a shape of text': {'observation_space__shape': ['a']},
  'objects': {'observation_space__dtype': 'O'},
  'a structure': {'observation_space__dtype': 'f4,f4'},
  'no dtype': {'observation_space__dtype': 'nothing'},
  'a space that is text': {'observation_space': 'box'},
  'a space that is a list': {'observation_space': {'tuple': 5}},
  'a space in a space': {'observation_space': {'dict': {'a': 5}}},
  'a deep space': {'observation_space': nested(100)},
  'a space of nothing': {'observation_space': {'tuple': []}},
  'many values': {'observation_space__kind': 'discrete', 'observation_space__n': HUGE},
  'values of text': {'observation_space__kind': 'discrete', 'observation_space__n': 'many'},
  'a large state': {'network__core': 'gru', 'network__core_size': HUGE},
  'an unknown core': {'network__core': 'tree'},
  'many layers': {'network__layers': HUGE},
  'no activation': {'network__activation': 'none'},
  'an unknown torso': {'network__torso': 'resnet', 'observation_space__shape': [2, 2, 2]},
  'an unknown head': {'network__head_name': 'other'},
  'a network that is text': {'network': 'mlp'},
  'a network without members': {'network': {}},
  'an action of nothing': {'action': {}},
  'actions of objects': {'action__dtype': 'O'},
  'a large action': {'action__shape': [HUGE]},
  'a state of text': {'state': 'none'},
  'a scale of nothing': {'observation_space__scale': None},
  'an agent that is a number': {'agent': 5},
}


def test_the_policy_that_is_damaged_below_acts(tmp_path: Path) -> None:
  assert load_policy(export(tmp_path / 'policy')).act(np.float32([0, 1]))[0] == 1


@pytest.mark.parametrize('name', POLICIES)
def test_a_policy_that_contradicts_itself_is_refused(name: str, tmp_path: Path) -> None:
  folder = export(tmp_path / 'policy', **POLICIES[name])
  with ends(), pytest.raises(PolicyError):
    load_policy(folder)


@pytest.mark.parametrize('name', ['many large observations', 'many large patches', 'many features'])
def test_products_of_sizes_are_refused_by_their_number(name: str, tmp_path: Path) -> None:
  folder = export(tmp_path / 'policy', **POLICIES[name])
  with ends(), pytest.raises(PolicyError, match=r'(at most|more than) 67,108,864'):
    load_policy(folder)


@pytest.mark.parametrize('place', ['outside', '../outside', '/dev/zero'])
def test_a_graph_reads_no_other_file_and_prints_nothing(
  place: str, tmp_path: Path, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
  onnx = pytest.importorskip('onnx')
  pytest.importorskip('onnxruntime')
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'outside').write_bytes(bytes(16))
  name = ESCAPE + 'w'
  weights = onnx.TensorProto(name=name, data_type=1, dims=[4], data_location=1)
  for key, value in (('location', place), ('offset', '0'), ('length', '16')):
    weights.external_data.add(key=key, value=value)
  y = onnx.helper.make_tensor_value_info('y', 1, [4])
  nodes = [onnx.helper.make_node('Identity', [name], ['y'])]
  graph = onnx.helper.make_graph(nodes, 'g', [], [y], [weights])
  opset = [onnx.helper.make_opsetid('', 18)]
  data = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
  hashes = {'policy.onnx': hashlib.sha256(data).hexdigest()}
  folder = export(tmp_path / 'policy', sha256=hashes)
  (folder / 'policy.onnx').write_bytes(data)
  with ends(), pytest.raises(PolicyError, match=r'policy\.onnx'):
    load_policy(folder, 'onnx')
  captured = capfd.readouterr()
  assert ESCAPE not in captured.out + captured.err


@pytest.mark.parametrize('file', ['policy.json', 'params.safetensors'])
@pytest.mark.parametrize('node', [os.mkfifo, Path.mkdir, lambda path: path.symlink_to('/dev/zero')])
def test_a_policy_is_of_regular_files(
  file: str, node: Callable[[Path], None], tmp_path: Path
) -> None:
  folder = export(tmp_path / 'policy')
  (folder / file).unlink()
  node(folder / file)
  with ends(), pytest.raises(PolicyError):
    load_policy(folder)


# --- rules ----------------------------------------------------------------------------------------


def npy(shape: Any, data: bytes, descr: str = '<f4') -> bytes:
  """An array whose header tells any shape."""
  out = io.BytesIO()
  np.lib.format.write_array_header_1_0(
    out, {'descr': descr, 'fortran_order': False, 'shape': shape}
  )
  return out.getvalue() + data


def archive(*members: tuple[str, bytes], packed: int = zipfile.ZIP_DEFLATED) -> bytes:
  out = io.BytesIO()
  with zipfile.ZipFile(out, 'w', packed) as file:
    for name, data in members:
      file.writestr(name, data)
  return out.getvalue()


ARCHIVES: dict[str, Callable[[], bytes]] = {
  'empty': lambda: b'',
  'no archive': lambda: b'x' * 1000,
  'one array': lambda: npy((2,), bytes(8)),
  'a cut archive': lambda: archive(('a.npy', npy((2,), bytes(8))))[:-20],
  'a bomb': lambda: archive(('a.npy', npy((2**26 + 1,), bytes(2**28 + 4)))),
  'many members': lambda: archive(*((f'{i}.npy', b'') for i in range(100_001)), packed=0),
  'a name twice': lambda: archive(('a.npy', npy((2,), bytes(8))), ('a', npy((2,), bytes(8)))),
  'a shape beyond the data': lambda: archive(('a.npy', npy((2**40,), bytes(8)))),
  'a negative shape': lambda: archive(('a.npy', npy((-2, -1), bytes(8)))),
  'objects': lambda: archive(('a.npy', npy((1,), bytes(8), '|O'))),
  'a structure': lambda: archive(('a.npy', npy((1,), bytes(8), [('a', '<f4'), ('b', '<f4')]))),  # type: ignore[arg-type]
  'a long header': lambda: archive(('a.npy', b'\x93NUMPY\x01\x00\xff\xff' + b'(' * 65535)),
  'a header that calls': lambda: archive(
    ('a.npy', b'\x93NUMPY\x01\x00\x10\x00' + b'exit(1)' + b' ' * 9)
  ),
  'no header': lambda: archive(('a.npy', b'abc')),
  'another version': lambda: archive(('a.npy', b'\x93NUMPY\x09\x00' + bytes(100))),
  'an encrypted member': lambda: encrypted(archive(('a.npy', npy((2,), bytes(8))))),
  'an unknown packing': lambda: unknown(archive(('a.npy', npy((2,), bytes(8))))),
}


def encrypted(data: bytes) -> bytes:
  content = bytearray(data)
  content[6] |= 1
  content[content.index(b'PK\x01\x02') + 8] |= 1
  return bytes(content)


def unknown(data: bytes) -> bytes:
  content = bytearray(data)
  content[8] = 77
  content[content.index(b'PK\x01\x02') + 10] = 77
  return bytes(content)


@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=pytest.mark.slow) if n == 'many members' else n for n in ARCHIVES]
)
def test_a_rule_that_is_no_rule_is_refused_before_it_is_unpacked(
  name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
  data = ARCHIVES[name]()
  path = tmp_path / 'rule.npz'
  path.write_bytes(data)
  with ends(), pytest.raises(UsageError):
    storage.load(str(path), hashlib.sha256(data).hexdigest(), disco.Sizes)
  with ends(), pytest.raises(ValueError):
    read_npz(data, storage.UNPACKED_BYTES)


@pytest.mark.parametrize('node', [os.mkfifo, Path.mkdir, lambda path: path.symlink_to('/dev/zero')])
def test_a_rule_is_a_regular_file(node: Callable[[Path], None], tmp_path: Path) -> None:
  node(tmp_path / 'rule.npz')
  with ends(), pytest.raises(UsageError):
    storage.sha256(str(tmp_path / 'rule.npz'))


def test_arrays_are_read_as_numpy_writes_them(tmp_path: Path) -> None:
  arrays = {
    'a': np.arange(6.0).reshape(2, 3), 'fortran': np.asfortranarray(np.arange(6).reshape(2, 3)), 'scalar': np.float32(3),
    'none': np.zeros((0, 3)), 'text': np.array(['ab', 'c']), 'bits': np.array([True, False]),
  }  # fmt: skip
  content = io.BytesIO()
  np.savez(content, **arrays)  # type: ignore[arg-type]
  for name, found in read_npz(content.getvalue()).items():
    np.testing.assert_array_equal(found, arrays[name])
    assert found.dtype == arrays[name].dtype


# --- opponents ------------------------------------------------------------------------------------


def generation(path: Path, opponent: str) -> str:
  """A run that was trained against an opponent."""
  make(path)
  record = json.loads((path / 'config.json').read_text())
  record['env'] = f'pgx:tic_tac_toe,opponent={opponent}'
  (path / 'config.json').write_text(json.dumps(record))
  return record['env']


def test_opponents_that_lead_back_are_refused(tmp_path: Path) -> None:
  pytest.importorskip('pgx')
  a, b = tmp_path / 'a', tmp_path / 'b'
  env = generation(a, str(a))
  with ends(), pytest.raises(UsageError, match='itself'):
    opponents.check_chain(a, env)
  with ends(), pytest.raises(UsageError, match='itself'):
    opponents.load_opponent(a, 'tic_tac_toe')
  generation(b, f'{tmp_path}/./c')
  (tmp_path / 'c').symlink_to(b)
  with ends(), pytest.raises(UsageError, match='itself'):
    opponents.load_opponent(b, 'tic_tac_toe')


def test_the_opponent_of_an_opponent_may_have_any_name(tmp_path: Path) -> None:
  pytest.importorskip('pgx')
  network = ActorCritic(core='gru', core_size=8)  # refused once the rest of the record is read
  config = podrace.configure(env='pgx:tic_tac_toe', agent=PPO(network=network), num_envs=2)
  env = "pgx:tic_tac_toe, opponent = 'hidden=[64,64]', rollouts=5"
  files.write_json(tmp_path / 'config.json', to_json(config) | {'env': env})
  files.write_json(tmp_path / 'summary.json', {})
  with pytest.raises(UsageError, match='recurrent'):
    opponents.load_opponent(tmp_path, 'tic_tac_toe')


@pytest.mark.parametrize('core', ['none', 'gru'])
def test_an_opponent_may_normalize_rewards_but_has_no_memory(core: str, tmp_path: Path) -> None:
  pytest.importorskip('pgx')
  network = ActorCritic(hidden=(8,), core=core, core_size=8)
  agent = PPO(normalize_rewards=True, network=network, epochs=1, minibatches=1)
  config = podrace.configure(
    env='pgx:tic_tac_toe', agent=agent, num_envs=2, unroll_length=2, total_steps=4, devices=1
  )
  if core == 'gru':  # which the record tells, before a checkpoint is read
    files.write_json(tmp_path / 'config.json', to_json(config))
    files.write_json(tmp_path / 'summary.json', {})
    with pytest.raises(UsageError, match='recurrent'):
      opponents.load_opponent(tmp_path, 'tic_tac_toe')
    return
  podrace.train(config, tmp_path / 'run', quiet=True)
  move = opponents.load_opponent(tmp_path / 'run', 'tic_tac_toe')
  env = podrace.envs.make('pgx:tic_tac_toe')

  @jax.jit
  def first_move(key: Any) -> Any:
    env_key, move_key = jax.random.split(key)
    return move(None, env.reset(env_key)[1].observation, move_key)

  assert 0 <= int(first_move(jax.random.key(0))) < 9


def test_chains_of_opponents_have_an_end(tmp_path: Path) -> None:
  pytest.importorskip('pgx')
  envs = [
    generation(tmp_path / f'{i}', str(tmp_path / f'{i + 1}')) for i in range(opponents.CHAIN + 1)
  ]
  with ends(), pytest.raises(UsageError, match='generations'):
    opponents.load_opponent(tmp_path / '0', 'tic_tac_toe')
  opponents.check_chain(
    tmp_path / '90', envs[90]
  )  # the last one was trained against one that is gone


def test_the_opponent_of_an_opponent_may_be_damaged(tmp_path: Path) -> None:
  pytest.importorskip('pgx')
  env = generation(tmp_path / 'a', str(tmp_path / 'b'))
  (tmp_path / 'b').mkdir()
  os.mkfifo(tmp_path / 'b' / 'config.json')
  with ends(), pytest.raises(UsageError, match='FIFO'):
    opponents.check_chain(tmp_path / 'a', env)


def test_an_export_that_fails_leaves_no_draft(tmp_path: Path, monkeypatch: Patch) -> None:
  def fail(*args: Any) -> bytes:
    raise MemoryError

  agent = bind(Impala(ActorCritic(hidden=(4,))), Catch())
  params = jax.jit(agent.init)(jax.random.key(0)).params
  monkeypatch.setattr(export_module, '_export_program', fail)
  with pytest.raises(MemoryError), export_module._without_draft(tmp_path / 'policy'):
    export_module.write_policy(tmp_path / 'policy', Config(agent), agent, Catch(), params, 0)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('header', [
  b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,", b"{'descr': '<f4', 'shape': (10**18,)}",
  b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 62, 1 << 62)}",
  b"{'descr': [1, 2], 'fortran_order': False, 'shape': (3,)}", b"{[]: 1}", b"'" * 40, b"(" * 200,
])  # fmt: skip
def test_headers_of_arrays_that_numpy_cannot_read_are_refused(header: bytes) -> None:
  data = b'\x93NUMPY\x01\x00' + len(header).to_bytes(2, 'little') + header + bytes(64)
  archive = io.BytesIO()
  with zipfile.ZipFile(archive, 'w') as file:
    file.writestr('a.npy', data)
  with pytest.raises(ValueError):
    read_npz(archive.getvalue(), 10**6)
