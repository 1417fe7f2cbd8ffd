"""A model axis: the same updates, less of each parameter on a device, and that such a run is a run like any other."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives
from compiling import jit as quickly
from jax.sharding import PartitionSpec as P
from processes import fingerprints
from shared_programs import shared_programs  # noqa: F401
from shorthand import Capture, slow_after

import podrace
from podrace import cli, hooks, topology
from podrace.agents.dqn import DQN
from podrace.agents.impala import Impala
from podrace.agents.ppo import PPO
from podrace.architectures.agreement import Gossip
from podrace.architectures.anakin import Anakin
from podrace.architectures.hashes import params_sha256
from podrace.architectures.sebulba import Actors
from podrace.architectures.sharding import train_specs
from podrace.architectures.unroll import actor_on_mesh
from podrace.envs import make
from podrace.envs.base import batch
from podrace.errors import UsageError
from podrace.learner import learner
from podrace.networks import ActorCritic, QNetwork
from podrace.networks.attention import Attention
from podrace.networks.transformer import Transformer, TransformerTorso
from podrace.replay import Buffer, on_policy
from podrace.run import directory
from podrace.run.build import build
from podrace.run.check_agent import check_run
from podrace.run.checkpoint import snapshot
from podrace.settings.agents import bind
from podrace.settings.presets import PRESETS
from podrace.settings.record import from_json, to_json
from podrace.types import TrainState

SIZES = Transformer(layers=1, width=16, heads=8)
SMALL = ActorCritic(torso='transformer', transformer=SIZES, hidden=(), initializer='lecun')
PLAIN = ActorCritic(hidden=(16, 16), initializer='lecun')
MEMORY = ActorCritic(
  hidden=(16,), initializer='lecun', core='transformer', core_size=16, attention=Attention(heads=8)
)


def program(agent: Any, devices: int, model: int, seeds: int = 1, envs: int = 8) -> Anakin:
  world = make('podrace:catch')
  agent = bind(agent, world, 100, envs)
  replay, mesh = hooks.memory(agent, world, envs, 8), topology.learner_mesh(devices, model)
  return Anakin(agent, world, replay, mesh, envs, 8, seeds)


def close(found: Any, expected: Any, atol: float = 2e-6) -> None:
  for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=atol)


# --- the same update ----------------------------------------------------------------------------


@functools.cache
def experience(network: Any) -> tuple[TrainState, Any]:
  """The beginning of an agent, and trajectories of 16 environments by its policy."""
  env = make('podrace:catch')
  agent = bind(Impala(network, normalize_observations=True), env, 100, 16)
  train = quickly(agent.init)(jax.random.key(0))
  start, unroll = actor_on_mesh(agent, batch(env, 16), topology.learner_mesh(1), 8)
  actor = quickly(start)(jnp.arange(16), jax.random.key(1))
  return train, jax.device_get(quickly(unroll)(train.params, actor, jax.random.key(2))[1])


@functools.cache
def updated(kind: Any, network: Any, data: int, model: int) -> tuple[Any, Any]:
  """Parameters and metrics after three updates on `data` x `model` devices, from the same trajectories."""
  mesh = topology.learner_mesh(data * model, model)
  agent = bind(kind(network, normalize_observations=True), make('podrace:catch'), 100, 16)
  train, trajectory = experience(network)
  with topology.on_mesh(mesh):
    train = train._replace(rest=agent.optimiser().init(train.params.network))
  place = functools.partial(jax.sharding.NamedSharding, mesh)
  shardings = jax.tree.map(place, train_specs(agent, train, mesh))
  train = jax.device_put(train, shardings)
  step = quickly(learner(agent, on_policy(), mesh), out_shardings=(shardings, None, None, None))
  for k in range(3):
    train, _, metrics, _ = step(train, (), trajectory, jax.random.key(3 + k), jnp.int32(k))
  return jax.device_get((train.params, metrics))


@pytest.mark.parametrize('shape', [(4, 2), pytest.param((1, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  ('kind', 'network'),
  [
    (Impala, SMALL),
    pytest.param(PPO, PLAIN, marks=pytest.mark.slow),
    pytest.param(Impala, MEMORY, marks=pytest.mark.slow),
  ],
)
def test_the_same_update_on_8_devices_however_they_are_grouped(
  kind: Any, network: Any, shape: tuple[int, int]
) -> None:
  """Within 2e-5 after three updates by Adam that move parameters by 1e-3 and more: sums of float32 in another order."""
  (params, metrics), (expected, of_data) = (updated(kind, network, *s) for s in (shape, (8, 1)))
  begun = experience(network)[0].params.network
  moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), expected.network, begun)
  assert max(jax.tree.leaves(moved)) > 1e-3
  for x, y in zip(
    jax.tree.leaves((params, metrics)), jax.tree.leaves((expected, of_data)), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


# --- a program ------------------------------------------------------------------------------------


@functools.cache
def compiled(model: int) -> tuple[Anakin, Any, Any]:
  """A program on 4 groups of devices, compiled, and its state after 3 updates."""
  anakin = program(Impala(SMALL), 4 * model, model)
  run = anakin.run.lower(anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile()
  state = anakin.init(jax.random.split(jax.random.key(0), 1))
  return anakin, run, run(state, jnp.int32(3))


@pytest.mark.slow
def test_a_run_on_4_x_2_devices_is_that_on_4() -> None:
  """Acting included: a device's noise is that of its group. The optimiser's state is as the parameters are."""
  (_, _, one), (_, _, two) = compiled(1), compiled(2)
  for field in ('actor', 'log', 'update'):
    for x, y in zip(*(jax.tree.leaves(getattr(s, field)) for s in (one, two)), strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)
  for x, y in zip(*(jax.tree.leaves(s.train.params) for s in (one, two)), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def bytes_there(tree: Any, device: Any) -> int:
  shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device]
  return sum(s.data.nbytes for s in shards)


def bytes_split(tree: Any) -> tuple[int, int]:
  """Bytes of all arrays that the rules split, by names written out here; and of the others."""
  wanted = re.compile(r"(query|key|value)'\]|'out'\]\['kernel|'up'\]|'down'\]\['kernel")
  found = [0, 0]
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    found[not wanted.search(jax.tree_util.keystr(path))] += x.size * x.dtype.itemsize
  return found[0], found[1]


def test_a_device_of_two_has_half_of_what_is_split_of_parameters_and_optimiser() -> None:
  _, _, state = compiled(2)
  for tree in state.train:
    split, whole = bytes_split(tree)
    assert split > whole
    for device in jax.devices()[:8]:
      assert bytes_there(tree, device) == split // 2 + whole
  kernel = state.train.params.network['torso']['TransformerTorso_0']['block_0']['up']['kernel']
  assert kernel.sharding.spec == P(None, 'model') and kernel.shape == (16, 64)
  assert {s.data.shape for s in kernel.addressable_shards} == {(16, 32)}


def test_parameters_are_never_gathered() -> None:
  """Groups send sums of activations; between groups there is one all-reduce, of a device's own part of the gradient."""
  anakin, run, _ = compiled(2)
  found = collectives(run.as_text())
  assert {c.kind for c in found} == {'all-reduce'}
  split, whole = bytes_split(anakin.shapes.train.params)
  metrics = len(anakin.shapes.log.sums)
  gradient = (split // 2 + whole) // 4 + metrics
  assert [c.size for c in found].count(gradient) == 1
  # Of a device's tokens [9 or 8, 2, 15], or their features, of width 16; and the parts of the gradient's norm.
  width, tokens = 16, 2 * 15
  others = sorted(c.size for c in found if c.size != gradient)
  assert max(others) <= 3 * 9 * tokens * width
  assert len(others) <= 12


def test_without_a_model_axis_there_is_one_all_reduce() -> None:
  anakin = program(Impala(PLAIN), 4, 1)
  run = anakin.run.lower(anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32)).compile()
  found = collectives(run.as_text())
  size = sum(x.size for x in jax.tree.leaves(anakin.shapes.train.params))
  assert [(c.kind, c.size) for c in found] == [('all-reduce', size + len(anakin.shapes.log.sums))]
  assert topology.learner_mesh(4).axis_names == (topology.AXIS,)


def test_a_checkpoint_keeps_the_parts_of_arrays() -> None:
  train = compiled(2)[2].train
  copy, print_ = snapshot(train.params)
  for x, y in zip(jax.tree.leaves(train.params), jax.tree.leaves(copy), strict=True):
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
  whole = jax.device_put(train.params, jax.devices()[0])
  assert snapshot(whole)[1] == print_ and params_sha256(whole) == params_sha256(train.params)


def test_an_agent_with_a_target_network_and_replay_splits_that_too() -> None:
  agent = DQN(QNetwork(hidden=(16,)), Buffer(batch_size=16, capacity=160, min_size=1))
  specs = train_specs(*begun(agent, 2))
  assert specs.rest.target == specs.params.network
  assert P(None, 'model') in jax.tree.leaves(specs.rest.opt_state)


@pytest.mark.parametrize(
  'preset',
  [
    'dqn-cartpole',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('cartpole', 'muzero-catch', 'muesli-catch', 'r2d2-memory')
    ),
  ],
)
def test_agents_take_a_model_axis_unchanged(preset: str) -> None:
  """That those of presets trace, on several groups and on one; others here are compiled."""
  config = PRESETS[preset]()
  world = make('podrace:catch')
  agent = bind(config.agent, world, 100, 32)
  replay = hooks.memory(agent, world, 32, 16)
  for model in (2, 8):
    anakin = Anakin(agent, world, replay, topology.learner_mesh(8, model), 32, 16)
    # JAX's check takes a scan over split keys for a reuse under vmap, which one group has.
    with jax.debug_key_reuse(model < 8):
      state = jax.eval_shape(anakin.run, anakin.shapes, jax.ShapeDtypeStruct((), jnp.int32))
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, anakin.shapes)


@dataclasses.dataclass(frozen=True)
class Own(Impala):
  """An agent that is not podrace's, which is checked before it runs."""


@pytest.mark.slow
@pytest.mark.parametrize('model', [2, pytest.param(8, marks=pytest.mark.slow)])
def test_an_agent_of_ones_own_is_checked_on_such_a_mesh(model: int) -> None:
  anakin = program(Own(PLAIN), 8, model)
  check_run(anakin.agent, anakin.env, anakin.replay, anakin.mesh, 8, 8)


def begun(agent: Any, model: int, seeds: int = 1) -> tuple[Any, TrainState, Any]:
  anakin = program(agent, 8, model, seeds)
  return (
    anakin.agent,
    jax.eval_shape(anakin.init, jax.random.split(jax.random.key(0), seeds)).train,
    anakin.mesh,
  )


def test_seeds_come_before_the_axes_of_rules() -> None:
  agent = Impala(
    dataclasses.replace(PLAIN, sharding=((r'Dense_0/kernel$', 1), (r'Dense_1/kernel$', -2)))
  )
  layers = train_specs(*begun(agent, 2, seeds=2), 1).params.network['torso']['Mlp_0']
  assert layers['Dense_0']['kernel'] == P(None, None, 'model')
  assert layers['Dense_1']['kernel'] == P(None, 'model')
  assert layers['Dense_0']['bias'] == P()


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    (['--model-devices', '3'], '--model-devices 3'),
    (['--model-devices', '0'], '--model-devices'),
    (['--model-devices', '2', '--num-envs', '6'], '--num-envs 6'),
    (['--model-devices', '2', '--agent.network.sharding', 'nobody', '0'], '--model-devices 2'),
    (['--model-devices', '4', '--agent.network.hidden', '6'],
     'params/network/torso/Mlp_0/Dense_0/bias [6]'),
    (['--model-devices', '2', '--agent.network.sharding', 'kernel', '2'], 'params/network/'),
    (['--model-devices', '2', '--agree', 'gossip'], '--model-devices 2'),
    (['--model-devices', '4', '--architecture', 'sebulba'], '--model-devices 4'),
  ],
)  # fmt: skip
def test_what_can_not_be_is_one_line(
  options: list[str], said: str, tmp_path: Path, capsys: Capture
) -> None:
  code, error = command(capsys, 'train', 'catch', '--run-dir', str(tmp_path / 'run'), *options)
  assert (code, error.count('\n')) == (2, 0) and said in error, error
  assert not (tmp_path / 'run').exists()


def command(capsys: Capture, *args: str) -> tuple[Any, str]:
  """`podrace ARGS`: exit code and what it says of errors."""
  with pytest.raises(SystemExit) as end:
    cli.main(args)
  return end.value.code, capsys.readouterr().err.strip()


@pytest.mark.parametrize(
  ('wrong', 'said'),
  [
    (lambda: ActorCritic(sharding=(('(', 0),)), r"sharding: '\(' is no pattern of names"),
    (lambda: ActorCritic(sharding=(('(a+)+$', 0),)), r"'\(a\+\)\+\$'"),
    (lambda: ActorCritic(sharding=(('.*.*.*x', 0),)), r'expected at most 2 of \* \+ {'),
    (lambda: ActorCritic(sharding=(('(a|b)(a|b)(a|b)(a|b)(a|b)', 0),)), r'and 4 of \? \|'),
    (lambda: ActorCritic(sharding=(('x', 0),) * 101), r'sharding.*101.*100'),
    (lambda: Transformer(width=10), r'width 10.*4'),
    (lambda: Transformer(patch=0), 'must be at least 1'),
  ],
)
def test_settings_that_are_none(wrong: Any, said: str) -> None:
  with pytest.raises(ValueError, match=said):
    wrong()


def test_gossip_refuses_the_mesh() -> None:
  with pytest.raises(ValueError, match=r'--model-devices 2.*--agree'):
    Gossip().check(topology.learner_mesh(8, 2))


# --- runs -----------------------------------------------------------------------------------------

RUN: Any = dict(
  num_envs=8, unroll_length=8, total_steps=1280, agent={'network': {'hidden': (8,)}}, devices=4,
  model_devices=2,
)  # fmt: skip


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  run_dir = tmp_path_factory.mktemp('model') / 'whole'
  podrace.train(podrace.configure('catch', **RUN), run_dir, quiet=True)
  return run_dir


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(whole: Path, tmp_path: Path) -> None:
  podrace.train(
    podrace.configure('catch', **RUN | dict(total_steps=640)), tmp_path / 'run', quiet=True
  )
  run = podrace.train(
    podrace.configure('catch', **RUN), tmp_path / 'run', override=True, quiet=True
  )
  assert fingerprints(tmp_path / 'run', 1280) == fingerprints(whole, 1280)
  assert (
    run.summary['params_sha256']
    == directory.read_summary(whole / 'summary.json', print)['params_sha256']
  )


@pytest.mark.parametrize(
  ('changed', 'said'),
  [
    (dict(model_devices=1), r'--model-devices 2.*1.*--init-from'),
    (dict(model_devices=4), r'on 2.*--model-devices 2.*1.*--devices 8'),
    (dict(devices=8), r'on 2.*--model-devices 2.*4.*--devices 4'),
  ],
)  # fmt: skip
def test_other_devices_are_refused(whole: Path, changed: Any, said: str) -> None:
  other = podrace.configure('catch', **RUN | dict(total_steps=2560) | changed)
  # JAX's check of keys is off for one group: see `test_agents_take_a_model_axis_unchanged`.
  with jax.debug_key_reuse(False), pytest.raises(UsageError, match=said):
    podrace.train(other, whole, override=True, quiet=True)


@pytest.mark.slow
def test_a_run_goes_on_with_larger_groups(whole: Path, tmp_path: Path) -> None:
  """Each part of the batch stays, on other devices."""
  shutil.copytree(whole, tmp_path / 'run')
  larger = RUN | dict(devices=8, model_devices=4, total_steps=1344)
  config = podrace.configure('catch', **larger)
  run = podrace.train(config, tmp_path / 'run', override=True, quiet=True)
  assert run.summary['step'] == 1344
  assert [line['step'] for line in run.metrics][-2:] == [1280, 1344]


@pytest.mark.slow
def test_parameters_go_to_a_run_without_a_model_axis_and_to_evaluation(
  whole: Path, tmp_path: Path, capsys: Capture
) -> None:
  code, said = command(capsys, 'eval', str(whole), '--episodes', '4')
  assert code == 0 and 'step 1,280' in said
  on = podrace.configure('catch', **RUN | dict(model_devices=1, devices=1, init_from=str(whole)))
  assert podrace.train(on, tmp_path / 'run', quiet=True).summary['step'] == 1280


SEBULBA: Any = dict(architecture='sebulba', lag='1', actor_devices='0', actor_threads=1, num_envs=8, unroll_length=8,
                    total_steps=640, agent={'network': {'hidden': (8,)}})  # fmt: skip


@pytest.mark.slow
def test_sebulba_has_the_same_run_with_a_model_axis_and_resumes(tmp_path: Path) -> None:
  """Actors have whole parameters. Two groups of two learn as two devices do."""
  alone = podrace.configure('catch', **SEBULBA | dict(learner_devices='1,2'))
  expected = podrace.train(alone, tmp_path / 'alone', quiet=True)
  grouped = SEBULBA | dict(learner_devices='1,2,3,4', model_devices=2)
  half = podrace.configure('catch', **grouped | dict(total_steps=320))
  podrace.train(half, tmp_path / 'run', quiet=True)
  run = podrace.train(
    podrace.configure('catch', **grouped), tmp_path / 'run', override=True, quiet=True
  )
  for line, other in zip(run.metrics, expected.metrics, strict=True):
    assert line['step'] == other['step'] and line['episode_return'] == other['episode_return']
    np.testing.assert_allclose(line['loss'], other['loss'], rtol=1e-3, atol=1e-5)
  shapes = build(podrace.configure('catch', **grouped)).shapes
  for params in (shapes.train.params, shapes.previous):
    kernel = params.network['torso']['Mlp_0']['Dense_0']['kernel']
    assert kernel.sharding.shard_shape(kernel.shape) == (50, 4)


NO_THREADS: Any = SimpleNamespace(
  local_threads=0, local_groups=0, groups=1, lag='0', max_lag=1, ordered=True, in_turn=False, deadline=1.0,
  devices=jax.devices()[:1],
)  # fmt: skip


def test_actors_get_whole_parameters() -> None:
  mesh = topology.learner_mesh(8, 2)
  for spec in (P(None, topology.MODEL), P()):
    x = jax.device_put(jnp.arange(12.0).reshape(3, 4), jax.sharding.NamedSharding(mesh, spec))
    actors = Actors(NO_THREADS, {0: x}, *2 * [jax.random.key(0)])
    _, found = actors.pipe.params(0, 0, jax.devices()[0])
    assert found.devices() == {jax.devices()[0]}
    assert np.array_equal(found, x) and np.array_equal(topology.on_host(x), found)


def test_the_record_has_the_rules() -> None:
  rules = (('Dense_0/kernel$', -1), ('Dense_1/kernel$', 0))
  config = podrace.configure('catch', agent={'network': {'sharding': rules}}, model_devices=2)
  assert from_json(to_json(config)) == config and config.agent.network.sharding == rules


# --- the torso ------------------------------------------------------------------------------------


@pytest.mark.parametrize('observation', slow_after(2, 'image', 'board', 'numbers'))
def test_tokens_are_of_patches_and_of_numbers(observation: str) -> None:
  shape = dict(image=(5, 4, 2), board=(5, 4), numbers=(7,))[observation]
  torso = TransformerTorso(SIZES)
  x = np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)
  params, apply = jax.jit(torso.init)(jax.random.key(0), x), jax.jit(torso.apply)
  assert params['params']['tokens']['places'].shape == (dict(numbers=7).get(observation, 6), 16)
  found = apply(params, x)
  assert found.shape == (3, 16)
  moved = apply(params, np.roll(x, 1, axis=1))  # a place is seen
  assert float(jnp.abs(moved - found).max()) > 1e-2


@pytest.mark.slow
def test_a_transformer_learns_catch(tmp_path: Path) -> None:
  """By chance the return is about -0.6; a loss that is wrong stays there."""
  network = dict(torso='transformer', transformer=dict(layers=1, width=32), hidden=(32,))
  agent = dict(network=network, learning_rate=3e-3)
  config = podrace.configure('catch', agent=agent, total_steps=300_000, devices=1)
  assert podrace.train(config, tmp_path / 'run', quiet=True).summary['episode_return'] > 0.5
