"""Exported policies act as the agents that they are of."""
# ruff: noqa: F401, F811 (fixtures of processes)

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from processes import as_users_have_it
from shorthand import Patch
from test_runs import called

import podrace
from podrace.agents.bc import BC
from podrace.agents.d4pg import D4PG
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.muesli import Muesli
from podrace.agents.ppo import PPO
from podrace.agents.pqn import PQN
from podrace.agents.r2d2 import R2D2
from podrace.agents.sac import SAC
from podrace.errors import PolicyError
from podrace.networks import Actor, ActorCritic, LearnedModel, QNetwork
from podrace.policy import RUNTIMES, Policy, export, load_policy
from podrace.policy.export import name_params, write_policy
from podrace.policy.load import make_numpy_step
from podrace.run.loop import train
from podrace.settings.agents import bind
from podrace.settings.config import Config
from podrace.types import FIRST, MID, TimeStep

VECTOR, BOX = spaces.Box(-2, 3, (5,), np.float32), spaces.Box(-1, 2, (2, 2), np.float32)
PIXELS, STACK = spaces.Box(0, 255, (40, 40, 3), np.uint8), spaces.Box(0, 255, (4, 36, 36), np.uint8)
MIXED = spaces.Dict(
  b=spaces.Discrete(4, start=1),
  a=VECTOR,
  c=spaces.MultiDiscrete([2, 3]),
  d=spaces.Box(-4, 9, (3,), np.int32),
)
ODD = spaces.Dict(  # encoded by logarithms, by each number's bound, and a grid of bytes with channels first
  a=spaces.Box(0, 2**32 - 1, (), np.uint32),
  b=spaces.Box(np.int32([0, -5, -(2**31)]), np.int32([9, 500, 2**31 - 1]), dtype=np.int32),
  c=spaces.Box(0, 255, (3, 9, 9), np.uint8),
)
FAR = spaces.Box(np.float32([100, 3, 0]), np.float32([200, 3, np.inf]))
MASKED = spaces.Dict(action_mask=spaces.MultiBinary(3), view=VECTOR)
PARTS = spaces.Dict(action_mask=spaces.MultiBinary(7), view=VECTOR)
THREE = spaces.Discrete(3)
STATED = {  # as `state=true` shows it: networks see `view` alone
  'action_mask': spaces.MultiBinary(3),
  'podrace_state': spaces.Tuple([spaces.Box(-9, 9, (3, 4, 2), np.float32), spaces.Box(0, 2**32 - 1, (2,), np.uint32)]),
  'view': VECTOR,
}  # fmt: skip
CASES: dict[str, tuple[Any, Any, Any]] = {
  'impala': (Impala(), VECTOR, THREE),
  'impala, deep': (Impala(network=ActorCritic(torso='impala-deep')), PIXELS, THREE),
  'impala, lstm': (Impala(network=ActorCritic(core='lstm', core_size=8)), VECTOR, THREE),
  'ppo, gru, normalized': (
    PPO(network=ActorCritic(core='gru', core_size=8, activation='relu'), normalize_observations=True), MIXED, THREE,
  ),
  'ppo, stacked frames': (PPO(), STACK, spaces.Discrete(6)),
  'ppo, several choices': (PPO(), VECTOR, spaces.MultiDiscrete([2, 5, 3])),
  'ppo, masked': (PPO(), MASKED, THREE),
  'ppo, masked parts': (PPO(), PARTS, spaces.MultiDiscrete([2, 5])),
  'dqn, masked': (DQN(), MASKED, THREE),
  'ppo, a tuple': (PPO(), spaces.Tuple((spaces.Discrete(5), VECTOR, spaces.Discrete(2))), THREE),
  'ppo, normalized, unsorted keys in a tuple': (
    PPO(normalize_observations=True), spaces.Tuple((spaces.Dict(z=VECTOR, a=spaces.Discrete(3)), VECTOR)), THREE,
  ),
  'ppo, normalized, with a state': (
    PPO(normalize_observations=True), spaces.Dict(STATED), THREE,
  ),
  'dqn, image, with a state': (
    DQN(network=QNetwork(torso='grid', hidden=(8,))),
    spaces.Dict(STATED | dict(view=spaces.Box(0, 1, (10, 10, 2), np.bool_))), THREE,
  ),
  'ppo, box': (PPO(), VECTOR, BOX),
  'ppo, squashed box': (PPO(network=ActorCritic(squash=True)), VECTOR, BOX),
  'ppo, odd spaces': (PPO(), ODD, FAR),
  'ppo, empty part': (PPO(normalize_observations=True), spaces.Dict(a=VECTOR, b=spaces.Box(-1, 1, (0,))), THREE),
  'ppo, plain': (PPO(network=ActorCritic(scaling='plain')), ODD, FAR),
  'ppo, grid': (PPO(network=ActorCritic(torso='grid')), spaces.Box(-3, 3, (10, 10, 4), np.float32), THREE),
  'dqn': (DQN(), VECTOR, THREE),
  'dqn, rainbow': (
    DQN(network=QNetwork(head='categorical', noisy=True, dueling=True, head_size=16, torso='impala')), STACK, THREE,
  ),
  'dqn, quantiles': (DQN(network=QNetwork(head='quantile', num_atoms=5, hidden=(8,))), VECTOR, THREE),
  'pqn, normalized layers': (
    PQN(network=QNetwork(torso='grid', hidden=(16,), layer_norm=True)),
    spaces.Box(-3, 3, (5, 5, 2), np.float32), THREE,
  ),
  'r2d2': (R2D2(network=QNetwork(core='lstm', core_size=8, dueling=True)), VECTOR, THREE),
  'dqn, gru, seeing observations only': (DQN(network=QNetwork(core='gru', core_size=8)), VECTOR, THREE),
  'sac': (SAC(), VECTOR, BOX),
  'd4pg': (D4PG(), VECTOR, BOX),
  'bc': (BC(), VECTOR, BOX),
}  # fmt: skip
# A core and what is normalized, a mask, a convolution, values, a continuous action.
FAST = {
  'ppo, gru, normalized',
  'ppo, normalized, unsorted keys in a tuple',
  'dqn, image, with a state',
  'ppo, empty part',
  'ppo, odd spaces',
  'dqn, masked',
  'pqn, normalized layers',
  'dqn',
  'sac',
}
IN_ALL = ('ppo, gru, normalized', 'ppo, empty part', 'ppo, odd spaces', 'sac')
STEPS, BATCH = 6, 16


def written(name: str, folder: Path) -> tuple[Any, Any, Any]:
  """A bound agent with random parameters, its environment's spaces; its policy is in the folder."""
  agent, observation, action = CASES[name]
  env = SimpleNamespace(observation_space=observation, action_space=action)
  agent = dataclasses.replace(bind(agent, env), greedy=True)
  params = jax.jit(agent.init)(jax.random.key(0)).params
  keys = iter(jax.random.split(jax.random.key(1), 1000))
  # Fresh heads are close to 0, and biases 0: all would look alike.

  def varied(path: Any, x: Any) -> Any:
    inputs = np.prod(x.shape[:-1]) if len(x.shape) > 1 else 10
    y = x + jax.random.normal(next(keys), x.shape).astype(x.dtype) / np.sqrt(inputs)
    return jnp.abs(y) + 0.1 if '.var' in jax.tree_util.keystr(path) else y

  params = jax.tree_util.tree_map_with_path(varied, params)
  write_policy(folder, Config(agent=agent, env='podrace:catch'), agent, env, params, 7)
  return agent, env, params


@functools.cache
def files_of(name: str, program: bool) -> tuple[tuple[Any, Any, Any], dict[str, bytes]]:
  """An export takes a third of a second: each is made once for all tests."""
  with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
    if not program:
      patch.setattr(export, '_export_program', lambda *args: b'')
    made = written(name, Path(folder) / 'policy')
    return made, {p.name: p.read_bytes() for p in (Path(folder) / 'policy').iterdir()}


def made(name: str, folder: Path, program: bool = True) -> tuple[Any, Any, Any]:
  """As `written`, copied; the program of JAX may be left out where only NumPy acts."""
  made, files = files_of(name, program)
  folder.mkdir()
  for file, content in files.items():
    (folder / file).write_bytes(content)
  return made


def observations(space: Any, steps: int, batch: int) -> list[Any]:
  """Some at random, [B, ...] each. Some masks allow nothing, as after an episode's end."""
  space.seed(0)

  def one() -> Any:
    return space.sample()

  return [
    jax.tree.map(lambda *xs: np.stack(xs), *[one() for _ in range(batch)]) for _ in range(steps)
  ]


@pytest.mark.parametrize(
  ('name', 'runtime'),
  [
    pytest.param(
      c, r, marks=() if c in FAST and (r == 'numpy' or c in IN_ALL) else pytest.mark.slow
    )
    for c in CASES
    for r in RUNTIMES
  ],
)
def test_it_acts_as_its_agent(name: str, runtime: str, tmp_path: Path) -> None:
  agent, env, params = made(name, tmp_path / 'policy')
  policy = load_policy(tmp_path / 'policy', runtime)
  act = jax.jit(agent.act)
  ours = jax.jit(agent.initial_state)(np.zeros(BATCH, np.int32))
  zeros, ones = np.zeros(BATCH, np.float32), np.ones(BATCH, np.float32)
  state, seen = None, []
  for t, observation in enumerate(observations(env.observation_space, STEPS, BATCH)):
    first = np.arange(BATCH) % (t + 1) == 0  # all, half of them, a third, ...
    timestep = TimeStep(observation, zeros, ones, np.where(first, FIRST, MID).astype(np.int8))
    output, ours = act(params, ours, timestep, jax.random.key(t))
    action, state = policy.act_many(observation, state, first if t else None)
    expected = np.asarray(output.action)
    assert action.shape == expected.shape and action.dtype == expected.dtype
    if np.issubdtype(expected.dtype, np.integer):
      np.testing.assert_array_equal(action, expected)
    else:
      np.testing.assert_allclose(action, expected, atol=1e-4, rtol=1e-4)
    seen.append(expected)
  assert len(np.unique(np.concatenate(seen).reshape(STEPS * BATCH, -1), axis=0)) > 1


def test_actions_of_low_values_are_above_forbidden_ones(tmp_path: Path) -> None:
  _, env, params = made('dqn, masked', tmp_path / 'policy', program=False)
  about = json.loads((tmp_path / 'policy' / 'policy.json').read_text())
  arrays = name_params(params)
  arrays['advantage_head/bias'] = arrays['advantage_head/bias'] - np.float32(1e14)
  seen = observations(env.observation_space, 1, BATCH)[0]
  action, _ = Policy(about, make_numpy_step(about, arrays)).act_many(seen)
  mask = seen['action_mask'].astype(bool)
  assert (~mask).any() and (mask | ~mask.any(-1, keepdims=True))[np.arange(BATCH), action].all()


def test_a_policy_of_version_1_acts_as_it_did(tmp_path: Path) -> None:
  _, env, _ = made('ppo, plain', tmp_path / 'policy', program=False)
  seen = observations(env.observation_space, 1, BATCH)[0]
  expected, _ = load_policy(tmp_path / 'policy').act_many(seen)
  about = json.loads((tmp_path / 'policy' / 'policy.json').read_text())
  about['version'] = 1
  del about['action']['centre'], about['action']['scale']
  for part in about['observation_space']['dict'].values():
    assert part.pop('log') is False
  (tmp_path / 'policy' / 'policy.json').write_text(json.dumps(about))
  action, _ = load_policy(tmp_path / 'policy').act_many(seen)
  np.testing.assert_array_equal(action, expected)
  about['version'] = 3
  (tmp_path / 'policy' / 'policy.json').write_text(json.dumps(about))
  with pytest.raises(PolicyError, match=r'version 1.*2'):
    load_policy(tmp_path / 'policy')


@pytest.mark.parametrize(
  'runtime', [r if r == 'numpy' else pytest.param(r, marks=pytest.mark.slow) for r in RUNTIMES]
)
def test_one_observation_at_a_time(runtime: str, tmp_path: Path) -> None:
  _, env, _ = made('r2d2', tmp_path / 'policy')
  policy = load_policy(tmp_path / 'policy', runtime)
  state, many = None, None
  for observation in observations(env.observation_space, STEPS, 1):
    action, state = policy.act(observation[0], state)
    expected, many = policy.act_many(observation, many)
    assert action == expected[0]


def test_the_program_of_jax_transfers_explicitly(tmp_path: Path) -> None:
  _, env, _ = made('dqn, masked', tmp_path / 'policy')
  policy = load_policy(tmp_path / 'policy', 'jax')
  (seen,) = observations(env.observation_space, 1, 2)
  with jax.transfer_guard('disallow'):
    action, state = policy.act_many(seen)
    again, _ = policy.act_many(seen, state)
  np.testing.assert_array_equal(action, again)


@pytest.mark.parametrize(
  ('stated', 'first'), [(True, [1]), (True, [True, False]), (True, True), (False, [False])]
)
def test_episodes_that_begin_are_checked(stated: bool, first: Any, tmp_path: Path) -> None:
  made('r2d2', tmp_path / 'policy')
  policy = load_policy(tmp_path / 'policy')
  x = np.zeros((1, 5), np.float32)
  state = policy.act_many(x)[1] if stated else None
  with pytest.raises(ValueError, match='first is'):
    policy.act_many(x, state, first)


@pytest.mark.parametrize('runtime', RUNTIMES)
@pytest.mark.parametrize('state', ['x', (), (np.zeros((2, 8), np.float32),) * 2])
def test_a_state_of_another_kind_is_refused(runtime: str, state: Any, tmp_path: Path) -> None:
  made('r2d2', tmp_path / 'policy')
  with pytest.raises(ValueError, match='a state of shapes'):
    load_policy(tmp_path / 'policy', runtime).act(np.zeros(5, np.float32), state)


@pytest.mark.parametrize(
  'wrong',
  [
    np.float32(1), None, {'a': 1}, np.zeros((0, 5)), (np.zeros((2, 5)),),
    (np.zeros(2, int), np.zeros((3, 5)), np.zeros(3, int)), {1: np.zeros((2, 5))},
  ],
)  # fmt: skip
@pytest.mark.parametrize('name', ['impala', 'ppo, a tuple', 'ppo, empty part'])
def test_batches_that_do_not_fit_are_refused(name: str, wrong: Any, tmp_path: Path) -> None:
  made(name, tmp_path / 'policy', program=name != 'ppo, a tuple')
  with pytest.raises(ValueError, match='expected'):
    load_policy(tmp_path / 'policy').act_many(wrong)


@pytest.mark.parametrize(
  ('space', 'observation'),
  [
    (PIXELS, np.full((40, 40, 3), 0.5)), (PIXELS, np.full((40, 40, 3), 300)), (PIXELS, np.full((40, 40, 3), -1)),
    (VECTOR, np.full(5, np.nan)), (VECTOR, np.full(5, 1e300)), (VECTOR, np.full(5, 1j)), (VECTOR, np.full(5, '1')),
    (spaces.Discrete(4), 4), (spaces.Discrete(4), -1), (spaces.Discrete(4), 1.7), (spaces.Discrete(4), '1'),
    (spaces.MultiDiscrete([2, 3]), [1, 3]), (spaces.MultiBinary(2), [0.5, 1]),
    (spaces.MultiBinary(2), [2, 1]),
  ],
)  # fmt: skip
def test_an_observation_outside_of_its_space_is_refused(
  space: Any, observation: Any, tmp_path: Path
) -> None:
  name = f'ppo, {space}'
  CASES[name] = PPO(network=ActorCritic(hidden=(8,))), space, THREE
  made(name, tmp_path / 'policy', program=False)
  policy = load_policy(tmp_path / 'policy')
  policy.act(space.sample())
  with pytest.raises(ValueError, match=r'expected|has not'):
    policy.act(observation)


def test_loading_needs_numpy_alone(tmp_path: Path) -> None:
  made('ppo, gru, normalized', tmp_path / 'policy')
  code = (
    'import sys, podrace, numpy as np\n'
    f'policy = podrace.load_policy({str(tmp_path / "policy")!r})\n'
    'x = dict(a=np.zeros(5), b=2, c=np.array([1, 2]), d=np.zeros(3, int))\n'
    'action, state = policy.act(x); policy.act(x, state)\n'
    'wrong = {m for m in sys.modules if m.split(".")[0] in ("jax", "flax", "optax", "gymnasium")}\n'
    'rooms = {m.split(".")[1] for m in sys.modules if m.startswith("podrace.")}\n'
    'light = {"envs", "errors", "policy", "system", "version"}\n'
    'assert not wrong and rooms <= light, (wrong, rooms)'
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
  'name', ['params.safetensors', 'config.json', 'policy.jaxexport', 'policy.onnx']
)
def test_a_file_that_was_changed_is_refused(name: str, tmp_path: Path) -> None:
  made('impala', tmp_path / 'policy')
  file = tmp_path / 'policy' / name
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)
  with pytest.raises(PolicyError, match='hash'):
    load_policy(tmp_path / 'policy')
  file.unlink()
  with pytest.raises(PolicyError, match='cannot be read'):
    load_policy(tmp_path / 'policy')


@pytest.mark.parametrize('runtime, name', [('jax', 'policy.jaxexport'), ('onnx', 'policy.onnx')])
def test_a_file_without_a_hash_is_not_used(runtime: str, name: str, tmp_path: Path) -> None:
  made('impala', tmp_path / 'policy')
  about = tmp_path / 'policy' / 'policy.json'
  found = json.loads(about.read_text())
  del found['sha256'][name]
  about.write_text(json.dumps(found))
  with pytest.raises(PolicyError, match=f'was exported without {name}'):
    load_policy(tmp_path / 'policy', runtime)
  load_policy(tmp_path / 'policy')


def test_the_onnx_graph_describes_itself(tmp_path: Path) -> None:
  import onnx

  made('ppo, gru, normalized', tmp_path / 'policy')
  model = onnx.load(tmp_path / 'policy' / 'policy.onnx')
  ends = {}
  for x in [*model.graph.input, *model.graph.output]:
    shape = [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim]
    ends[x.name] = (onnx.TensorProto.DataType.Name(x.type.tensor_type.elem_type), shape)
  assert ends == {
    'observation_0': ('FLOAT', ['batch', 5]),
    'observation_1': ('INT32', ['batch']),
    'observation_2': ('INT32', ['batch', 2]),
    'observation_3': ('INT32', ['batch', 3]),
    'state_0': ('FLOAT', ['batch', 8]),
    'action': ('INT32', ['batch']),
    'next_state_0': ('FLOAT', ['batch', 8]),
  }
  said = {p.key: p.value for p in model.metadata_props}
  assert (said['agent'], said['env'], said['step']) == ('ppo', 'podrace:catch', '7')
  assert {n.domain for n in model.graph.node} == {''}  # the standard's operations alone


def test_without_the_packages_of_onnx(tmp_path: Path, monkeypatch: Patch) -> None:
  made('impala', tmp_path / 'with')
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, 'onnxruntime', None)
    with pytest.raises(PolicyError, match="runtime='onnx'"):
      load_policy(tmp_path / 'with', 'onnx')
  monkeypatch.setitem(sys.modules, 'onnx', None)
  written('impala', tmp_path / 'without')
  assert not (tmp_path / 'without' / 'policy.onnx').exists()
  with pytest.raises(PolicyError, match=r"policy.onnx.*'podrace\[onnx\]'"):
    load_policy(tmp_path / 'without', 'onnx')


class Own(ActorCritic):
  """A network of somebody's own."""


@dataclasses.dataclass(frozen=True)
class Plain(PPO):
  """An agent of somebody's own, with podrace's network, of which it takes the best action."""


@dataclasses.dataclass(frozen=True)
class Contrary(PPO):
  """As `Plain`, but not the best action."""

  def act(self, params: Any, state: Any, timestep: Any, key: Any) -> Any:
    output, state = super().act(params, state, timestep, key)
    return output._replace(action=2 - output.action), state


@pytest.mark.slow
@pytest.mark.parametrize(
  ('kind', 'core'),
  [pytest.param(Plain, 'none', marks=pytest.mark.slow), (Plain, 'gru'), (Contrary, 'none')],
)
def test_an_agent_of_ones_own_with_podraces_network(kind: Any, core: Any, tmp_path: Path) -> None:
  name = f'own, {kind.__name__}, {core}'
  CASES[name] = (kind(network=ActorCritic(hidden=(8,), core=core, core_size=4)), VECTOR, THREE)
  made(name, tmp_path / 'policy')
  if kind is Contrary:
    with pytest.raises(PolicyError, match='action'):
      load_policy(tmp_path / 'policy')
    return
  seen = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
  actions = [
    load_policy(tmp_path / 'policy', r).act_many(seen)[0] for r in ('numpy', 'onnx', 'jax')
  ]
  np.testing.assert_array_equal(actions[0], actions[1])
  np.testing.assert_array_equal(actions[0], actions[2])
  assert len(set(actions[0].tolist())) > 1


@pytest.mark.parametrize(
  'case',
  [
    (SAC(Actor(hidden=(8,), core='gru', core_size=4)), VECTOR, BOX),
    (Muesli(network=LearnedModel(hidden=(8,), core='lstm', core_size=4)), MASKED, THREE),
  ],
)
def test_a_policy_with_memory_acts_as_its_agent(case: Any, tmp_path: Path) -> None:
  """The program of JAX keeps the core's state and the previous action in the policy's state."""
  CASES[str(case)] = case
  test_it_acts_as_its_agent(str(case), 'jax', tmp_path)


@pytest.mark.parametrize(
  ('agent', 'action'),
  [
    (PPO(network=Own()), THREE),
    pytest.param(PPO(network=ActorCritic(torso='transformer')), THREE, marks=pytest.mark.slow),
    pytest.param(
      PPO(network=ActorCritic(core='transformer', core_size=8)), THREE, marks=pytest.mark.slow
    ),
    (SAC(Actor(hidden=(8,), core='gru', core_size=4)), BOX),
    (DQN(QNetwork(hidden=(8,), core='gru', core_size=4, shortcut=True)), THREE),
  ],
)
def test_a_network_that_numpy_lacks_has_the_program_of_jax_alone(
  agent: Any, action: Any, tmp_path: Path
) -> None:
  CASES[str(agent)] = (agent, VECTOR, action)
  made(str(agent), tmp_path / 'policy')
  assert not (tmp_path / 'policy' / 'policy.onnx').exists()
  for runtime in ('numpy', 'onnx'):
    with pytest.raises(PolicyError, match='JAX'):
      load_policy(tmp_path / 'policy', runtime)
  load_policy(tmp_path / 'policy', 'jax').act(np.zeros(5))


def test_what_is_no_policy(tmp_path: Path) -> None:
  with pytest.raises(PolicyError, match=r'policy\.json'):
    load_policy(tmp_path)
  made('impala', tmp_path / 'policy')
  with pytest.raises(PolicyError, match=r"runtime.*'numpy'.*'jax'.*'onnx'.*'torch'"):
    load_policy(tmp_path / 'policy', 'torch')
  policy = podrace.load_policy(tmp_path / 'policy')
  with pytest.raises(ValueError, match=r'shape \[4\].*\[5\]'):
    policy.act(np.zeros(4))
  about = tmp_path / 'policy' / 'policy.json'
  good = json.loads(about.read_text())
  for hashes in ({'../policy/policy.json': '0'}, {'/etc/hostname': '0'}, 3):
    about.write_text(json.dumps(good | {'sha256': hashes}))
    with pytest.raises(PolicyError, match='files'):
      load_policy(tmp_path / 'policy')
  about.write_text(json.dumps({k: v for k, v in good.items() if k != 'network'}))
  with pytest.raises(PolicyError, match='network'):
    load_policy(tmp_path / 'policy')
  about.write_text(json.dumps(good))
  params = tmp_path / 'policy' / 'params.safetensors'
  params.rename(tmp_path / 'elsewhere')
  params.symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(PolicyError, match='no regular file'):
    load_policy(tmp_path / 'policy')
  params.unlink()
  (tmp_path / 'elsewhere').rename(params)
  about.write_text(json.dumps(good | {'version': 3}))
  with pytest.raises(PolicyError, match=r'version 1.*2'):
    load_policy(tmp_path / 'policy')


def test_keys_that_are_no_texts_are_not_exported(
  as_users_have_it: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  env = 'gymnasium:host_envs:Keys-v0,mixed=False'
  small = ('--num-envs', '2', '--unroll-length', '4', '--devices', '1', '--actor-threads', '1', '--agent.minibatches', '1', '--agent.epochs', '1', '--agent.network.hidden', '8')  # fmt: skip
  run = str(tmp_path / 'run')
  code, _, err = called(
    capsys, 'train', '--agent', 'ppo', '--env', env, *small, '--total-steps', '8', '--run-dir', run
  )
  assert code == 0, err
  for words in (
    ('export', run, str(tmp_path / 'policy')),
    ('record', run, '--episodes', '1', '--to', str(tmp_path / 'data-v0')),
  ):
    code, _, err = called(capsys, *words, '--allow-code', 'host_envs')
    assert code == 2 and 'key' in err and len(err.splitlines()) == 1, err


def test_a_policy_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  made('dqn', tmp_path / 'policy')
  code, out, _ = called(capsys, 'runs', str(tmp_path))
  assert code == 0 and 'no run' in out
  for words in (('train', '--run-dir'), ('rm',), ('eval',)):
    code, _, err = called(capsys, words[0], *words[1:], str(tmp_path / 'policy'))
    assert code == 2 and 'exported policy' in err, err
  assert not (tmp_path / 'policy' / 'checkpoints').exists()


def test_a_run_is_exported(
  as_users_have_it: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
  agent = PPO(network=ActorCritic(hidden=(8,)), epochs=1, minibatches=1)
  config = Config(agent=agent, num_envs=2, unroll_length=4, total_steps=8, seeds=2, devices=1)
  train(config, tmp_path / 'run', quiet=True)
  code, out, _ = called(
    capsys, 'export', str(tmp_path / 'run'), str(tmp_path / 'policy'), '--member', '1'
  )
  about = json.loads(out.splitlines()[-1])
  assert code == 0 and (about['step'], about['agent'], about['env']) == (
    8,
    'ppo',
    'podrace:catch',
  )
  assert load_policy(tmp_path / 'policy').act(np.zeros((10, 5)))[0].shape == ()
  monkeypatch.setitem(sys.modules, 'onnx', None)
  code, _, err = called(capsys, 'export', str(tmp_path / 'run'), str(tmp_path / 'less'))
  assert code == 0 and 'policy.onnx' in err and "'onnx'" in err
  names = {p.name for p in (tmp_path / 'policy').iterdir()}
  assert names == {
    'config.json',
    'params.safetensors',
    'policy.jaxexport',
    'policy.json',
    'policy.onnx',
  }
  for args, message in (
    (('run', 'policy'), 'exists already'),
    (('run', 'other', '--member', '2'), 'indices 0 to 1'),
    (('nowhere', 'other'), 'it does not exist'),
    (('policy', 'other'), 'it is an exported policy'),
    (('run',), 'export takes a run and a new directory'),
  ):
    paths = [x if x.startswith('-') or x.isdigit() else str(tmp_path / x) for x in args]
    code, _, err = called(capsys, 'export', *paths)
    assert code == 2 and message in err, err
