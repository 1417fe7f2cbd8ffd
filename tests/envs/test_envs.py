"""What each environment means: its rewards, and how its episodes end."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import hide_library
from gymnasium import spaces
from navix.entities import EntityIds

import podrace.envs
from podrace.envs import MissingExtra, UnknownName, base, env_names
from podrace.envs.base import NextStepReset, batch, restart, transition
from podrace.envs.libraries import LIBRARIES
from podrace.envs.own.catch import Catch
from podrace.envs.own.memory import MemoryTask
from podrace.types import FIRST, LAST, TimeStep


@functools.lru_cache(maxsize=1)
def compiled(env: Any) -> tuple[Any, Any]:
  return jax.jit(env.reset), jax.jit(env.step)


def play(env: Any, actions: list[Any], seed: int = 0) -> list[TimeStep]:
  """The timesteps of one environment under given actions."""
  reset, step = compiled(env)
  reset_key, *keys = jax.random.split(jax.random.key(seed), len(actions) + 1)
  state, timestep = reset(reset_key)
  timesteps = [timestep]
  for action, key in zip(actions, keys, strict=True):
    state, timestep = step(state, jnp.asarray(action, env.action_space.dtype), key)
    timesteps.append(timestep)
  return timesteps


def first_end(timesteps: list[TimeStep]) -> tuple[int, float]:
  """After how many steps the first episode ends, and with which discount."""
  for t, timestep in enumerate(timesteps):
    if timestep.step_type == LAST:
      return t, float(timestep.discount)
  raise AssertionError('no episode ended')


# Our own.


@pytest.mark.parametrize('seed', range(5))
def test_catch_by_hand(seed: int) -> None:
  env = NextStepReset(Catch(rows=4, columns=3))
  timesteps = play(env, [1, 0, 2, 1], seed)
  boards = [np.asarray(t.observation) for t in timesteps]
  column = int(boards[0][0].argmax())
  paddles = [1, 1, 0, 1]
  for row, (board, paddle) in enumerate(zip(boards, paddles, strict=False)):
    expected = np.zeros([4, 3])
    expected[row, column] = expected[3, paddle] = 1
    np.testing.assert_array_equal(board, expected)
  won = 1 if column == 1 else -1
  assert [float(t.reward) for t in timesteps] == [0, 0, 0, won, 0]
  assert [float(t.discount) for t in timesteps] == [1, 1, 1, 0, 1]
  assert [int(t.step_type) for t in timesteps] == [0, 1, 1, 2, 0]


def returns(env: NextStepReset, policy: Any, steps: int, n: int = 256) -> np.ndarray:
  """[n] the rewards of `n` environments summed over the first `steps` steps."""
  many = batch(env, n)
  reset_key, steps_key = jax.random.split(jax.random.key(0))

  def step(carry: Any, key: jax.Array) -> Any:
    state, memory, timestep = carry
    action, memory = policy(memory, timestep)
    state, timestep = many.step(state, action, jax.random.split(key, n))
    return (state, memory, timestep), timestep.reward

  state, timestep = many.reset(reset_key)
  carry = (state, jnp.zeros([n]), timestep)
  return np.asarray(jax.lax.scan(step, carry, jax.random.split(steps_key, steps))[1].sum(0))


def test_catch_best_policy_always_wins() -> None:
  def follow(memory: jax.Array, timestep: TimeStep) -> Any:
    ball = timestep.observation[:, :-1].max(1).argmax(-1)
    paddle = timestep.observation[:, -1].argmax(-1)
    return 1 + jnp.sign(ball - paddle), memory

  np.testing.assert_array_equal(returns(NextStepReset(Catch()), follow, 9), 1)


def test_memory_by_hand() -> None:
  cues = set()
  for seed in range(6):
    timesteps = play(NextStepReset(MemoryTask(length=2)), [0, 0, 1, 0], seed)
    seen = np.stack([t.observation for t in timesteps])
    cue = seen[0, 0]
    cues.add(float(cue))
    np.testing.assert_array_equal(seen[:4], [[cue, 1, 0], [0, 0.5, 0], [0, 0, 1], [0, 0, 0]])
    assert [float(t.reward) for t in timesteps] == [0, 0, 0, cue, 0]  # the answer was 1
    assert [float(t.discount) for t in timesteps] == [1, 1, 1, 0, 1]
    assert [int(t.step_type) for t in timesteps] == [0, 1, 1, 2, 0]
  assert cues == {-1, 1}


@pytest.mark.slow
def test_memory_best_policy_always_wins_and_blind_ones_are_even() -> None:
  env = NextStepReset(MemoryTask(length=5))

  def remember(memory: jax.Array, timestep: TimeStep) -> Any:
    memory = jnp.where(timestep.first, timestep.observation[:, 0], memory)
    return (memory > 0).astype(jnp.int32), memory

  def blind(memory: jax.Array, timestep: TimeStep) -> Any:
    return jnp.ones([timestep.reward.shape[0]], jnp.int32), memory

  np.testing.assert_array_equal(returns(env, remember, 6), 1)
  even = returns(env, blind, 6, n=4096)
  assert set(even) == {-1, 1} and abs(even.mean()) < 4 / np.sqrt(4096)


@pytest.mark.parametrize('wrong', ['catch,rows=1', 'maze,size=2', 'memory,length=0'])
def test_impossible_sizes_are_refused(wrong: str) -> None:
  with pytest.raises(ValueError, match=wrong.partition(',')[2]):
    podrace.envs.make(f'podrace:{wrong}')


# Termination against truncation, by library.

TRUNCATED, TERMINATED = 1.0, 0.0
# name, the action repeated, the step at which the episode ends (None: whenever), discount
FAST_ENDS = (  # one or two of each library
  ('gymnax:CartPole-v1,max_steps_in_episode=5', 0, 5, TRUNCATED),
  ('gymnax:CartPole-v1', 0, None, TERMINATED),
  ('gymnax:Breakout-MinAtar,max_steps_in_episode=3', 0, 3, TRUNCATED),
  ('gymnax:DeepSea-bsuite', 0, 8, TERMINATED),  # both flags are set: termination wins
  ('jumanji:Snake-v1', 0, None, TERMINATED),
  ('navix:Navix-Empty-5x5-v0,max_steps=3', 0, 3, TRUNCATED),
)
ENDS = (
  ('brax:inverted_pendulum,backend=spring,episode_length=3', [0.0], 3, TRUNCATED),
  ('gymnax:Pendulum-v1,max_steps_in_episode=5', [0.0], 5, TRUNCATED),
  ('gymnax:MountainCar-v0,max_steps_in_episode=5', 0, 5, TRUNCATED),
  ('gymnax:Acrobot-v1,max_steps_in_episode=5', 0, 5, TRUNCATED),
  ('gymnax:Breakout-MinAtar', 1, None, TERMINATED),
  ('gymnax:Freeway-MinAtar,max_steps_in_episode=5', 0, 5, TRUNCATED),
  ('gymnax:Asterix-MinAtar,max_steps_in_episode=2', 0, 2, TRUNCATED),
  ('gymnax:SpaceInvaders-MinAtar,max_steps_in_episode=2', 0, 2, TRUNCATED),
  ('gymnax:Catch-bsuite', 0, 9, TERMINATED),
  ('gymnax:DiscountingChain-bsuite,max_steps_in_episode=7', 0, 7, TERMINATED),
  ('gymnax:UmbrellaChain-bsuite', 0, 10, TERMINATED),
  ('gymnax:SimpleBandit-bsuite', 0, 1, TERMINATED),
  ('gymnax:BernoulliBandit-misc', 0, 100, TERMINATED),
  ('gymnax:Reacher-misc,max_steps_in_episode=5', [0.0, 0.0], 5, TRUNCATED),
  ('brax:inverted_pendulum,backend=spring', [1.0], None, TERMINATED),
  ('jumanji:Maze-v0,time_limit=3', 0, 3, TRUNCATED),
)


def _of_jumanji(name: str) -> Any:
  dynamics = podrace.envs.make(f'jumanji:{name}').dynamics
  return getattr(dynamics, 'dynamics', dynamics)  # without the time limit


def test_a_search_does_not_foresee_the_chance_of_jumanji() -> None:
  """Its state holds a key, which is not the one of the next step."""
  dynamics = _of_jumanji('Snake-v1')
  state, _ = jax.jit(dynamics.reset)(jax.random.key(0))
  step = jax.jit(lambda key: dynamics.step(state, jnp.int32(1), key)[0].key)
  keys = {tuple(np.asarray(step(key))) for key in jax.random.split(jax.random.key(1), 3)}
  assert len(keys) == 3


def test_the_choices_of_jumanji_are_those_of_the_mask() -> None:
  """The library's own bound of MultiCVRP is one too large."""
  dynamics = _of_jumanji('MultiCVRP-v0')
  rows, choices = dynamics.observation_space['action_mask'].shape
  assert dynamics.action_space.nvec.tolist() == [choices] * rows


@pytest.mark.parametrize(
  'name', ['Minesweeper-v0', pytest.param('Tetris-v0', marks=pytest.mark.slow)]
)
def test_a_mask_of_jumanji_that_judges_an_action_as_a_whole(name: str) -> None:
  dynamics = _of_jumanji(name)
  parts = tuple(np.asarray(dynamics.env.action_spec.num_values))
  assert dynamics.action_space == spaces.Discrete(int(np.prod(parts)), dtype=np.int32)
  key = jax.random.key(0)
  state, first = jax.jit(dynamics.reset)(key)
  action = int(np.flatnonzero(np.ravel(first.observation['action_mask']))[7])
  assert action % parts[1]
  _, timestep = jax.jit(dynamics.step)(state, jnp.int32(action), key)
  _, expected = jax.jit(dynamics.env.step)(
    state, np.array(np.unravel_index(action, parts), np.int32)
  )
  assert timestep.reward == expected.reward
  changed = timestep.observation['action_mask'] != first.observation['action_mask']
  np.testing.assert_array_equal(
    changed, expected.observation.action_mask != first.observation['action_mask']
  )
  assert changed.any()


@pytest.mark.parametrize(
  ('name', 'action', 'step', 'discount'),
  [
    *(pytest.param(*e, id=e[0]) for e in FAST_ENDS),
    *(pytest.param(*e, id=e[0], marks=pytest.mark.slow) for e in ENDS),
  ],
)
def test_how_episodes_end(name: str, action: Any, step: int | None, discount: float) -> None:
  env = podrace.envs.make(name)
  length, ended_with = first_end(play(env, [action] * (step or 200)))
  assert ended_with == discount
  assert step is None or length == step


def test_snake_is_truncated_while_alive() -> None:
  env = podrace.envs.make('jumanji:Snake-v1,time_limit=2')
  step = jax.jit(env.step)
  state, timestep = jax.jit(env.reset)(jax.random.key(0))
  for key in jax.random.split(jax.random.key(1), 2):
    state, timestep = step(state, timestep.observation['action_mask'].argmax(), key)
  assert timestep.step_type == LAST and timestep.discount == 1
  assert timestep.observation['step_count'] == 2  # the finished episode's own


@pytest.mark.slow
def test_a_trapped_snake_may_act() -> None:
  env = batch(podrace.envs.make('jumanji:Snake-v1'), 64)
  moves = jnp.array([(-1, 0), (0, 1), (1, 0), (0, -1)])

  def position(channel: Any) -> Any:
    return jnp.stack(jnp.unravel_index(channel.reshape(64, -1).argmax(-1), channel.shape[1:]), -1)

  def step(carry: Any, key: Any) -> Any:
    state, timestep = carry
    grid, mask = timestep.observation['grid'], timestep.observation['action_mask']
    after = position(grid[..., 1])[:, None] + moves[None]  # of the head
    distance = jnp.abs(after - position(grid[..., 3])[:, None]).sum(-1)
    action = jnp.where(mask, distance, 1000).argmin(-1)  # to the fruit, as long as it may live
    state, timestep = env.step(state, action, jax.random.split(key, 64))
    return (state, timestep), (timestep.last, timestep.observation['action_mask'].any(-1))

  carry = env.reset(jax.random.key(0))
  _, (last, allowed) = jax.lax.scan(step, carry, jax.random.split(jax.random.key(1), 400))
  assert last.sum() > 0  # some were trapped
  assert (allowed | last).all()


def test_navix_goal_terminates_with_reward() -> None:
  forward, right = 2, 1
  env = podrace.envs.make('navix:Navix-Empty-5x5-v0')
  timesteps = play(env, [forward, forward, right, forward, forward])
  assert first_end(timesteps) == (5, TERMINATED)
  assert timesteps[-1].reward == 1


def test_final_observation_is_the_finished_episodes() -> None:
  env = podrace.envs.make('gymnax:CartPole-v1')
  timesteps = play(env, [0] * 40)
  end, _ = first_end(timesteps)
  assert abs(timesteps[end].observation[2]) > 0.2  # the angle at which it is lost
  assert timesteps[end + 1].step_type == FIRST
  assert np.all(np.abs(timesteps[end + 1].observation) <= 0.05)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Craftax-Classic-Symbolic-v1', 'Craftax-Symbolic-v1'])
def test_craftax_death_terminates_and_the_limit_truncates(name: str) -> None:
  env = podrace.envs.make(f'craftax:{name},max_timesteps=3')
  assert first_end(play(env, [0] * 3)) == (3, TRUNCATED)
  state, _ = env.reset(jax.random.key(0))
  dying = state.inner.inner.replace(player_health=jnp.zeros_like(state.inner.inner.player_health))
  state = state._replace(inner=state.inner._replace(inner=dying))
  _, timestep = jax.jit(env.step)(state, 0, jax.random.key(1))
  assert timestep.step_type == LAST and timestep.discount == TERMINATED


# Names.


def test_listing_imports_neither_jax_nor_libraries() -> None:
  code = (
    'import sys, podrace.envs; podrace.envs.names(); '
    "print([m for m in ('jax', 'numpy', 'gymnasium', 'gymnax', 'brax') if m in sys.modules])"
  )
  out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert out.stdout.strip() == '[]'


def test_names_are_the_libraries() -> None:
  import brax.envs
  import gymnax
  import jumanji
  import navix

  env_names = podrace.envs.names()
  left_out = {key: set(library.unsupported) for key, library in LIBRARIES.items()}
  assert set(env_names['gymnax']) == set(gymnax.registered_envs) - left_out['gymnax']
  # Brax lists its environments nowhere else.
  assert set(env_names['brax']) == set(brax.envs._envs) - left_out['brax']
  assert set(env_names['navix']) <= set(navix.registry())  # 4.0 has more, for Python >= 3.12 only
  assert set(env_names['jumanji']) == set(jumanji.registered_environments()) - left_out['jumanji']
  assert all(len(set(n)) == len(n) for n in env_names.values())


@pytest.mark.parametrize('fraction', ['0', '-0.5', '1.5', 'nan'])
def test_a_share_of_resets_is_one(fraction: str) -> None:
  with pytest.raises(UnknownName, match='fresh_fraction'):
    podrace.envs.make(f'gymnax:CartPole-v1,fresh_fraction={fraction}')


def test_a_name_reads_its_options() -> None:
  assert env_names.parse('a:b,i=3,f=0.5,e=1e-3,t=true,u=false,s=xy') == (
    'a',
    'b',
    {'i': 3, 'f': 0.5, 'e': 1e-3, 't': True, 'u': False, 's': 'xy'},
  )
  env = podrace.envs.make('podrace:catch,rows=6,columns=7')
  assert env.observation_space.shape == (6, 7)
  assert podrace.envs.make('gymnax:Pendulum-v1,g=9').dynamics.params.g == 9.0
  assert podrace.envs.make('gymnax:Catch-bsuite,rows=6').observation_space.shape == (6, 5)
  assert podrace.envs.make('gymnax:CartPole-v1,fresh_fraction=0.5').fresh_fraction == 0.5


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('catch', r"LIB:NAME\[,key=value...\].* 'catch'"),
    ('gymnaks:CartPole-v1', r"'gymnaks'.*nearest: gymnax.*podrace, gymnax, brax"),
    ('gymnax:Cartpole-v0', 'nearest: CartPole-v1'),
    ('podrace:catch,rows', r"key=value.* 'rows'"),
    ('podrace:catch,row=3', r"'row' \(nearest: rows.*columns=5.*rows=10"),
    ('podrace:catch,rows=ten', r'rows=ten .*podrace:catch .* str, .* int'),
    ('podrace:catch,rows=3,rows=4', "'rows'"),
    ('gymnax:CartPole-v1,gravity=true', r'gravity=true .* bool, .* float'),
    ('gymnax:Catch-bsuite,rows=0', r'gymnax:Catch-bsuite .*rows=0: IndexError'),
    ('gymnax:DeepSea-bsuite,size=0', r'size=0: ZeroDivisionError'),
    ('gymnax:CartPole-v1,max_steps_in_episode=-5', r'max_steps_in_episode .* -5'),
    ('python:host_envs.Sequence', 'gymnasium:host_envs:ID'),
    ('python:podrace.types.FIRST', 'is a int, expected a function'),
    ('brax:swimmer', 'not supported: Brax'),
    ('jumanji:Sokoban-v0', 'not supported: it downloads'),
    ('brax:ant,backend=bullet', r"'bullet'.* generalized"),
    ('brax:ant,episode_length=0', '1 step.* 0'),
    ('navix:Navix-Empty-5x5-v0,observation=smell', "'smell'"),
  ],
)
def test_wrong_names_are_explained(name: str, message: str) -> None:
  with pytest.raises(UnknownName, match=message):
    podrace.envs.make(name)


def test_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
  hide_library(monkeypatch, 'craftax')
  with pytest.raises(MissingExtra, match=r"'podrace\[craftax"):
    podrace.envs.make('craftax:Craftax-Symbolic-v1')


# The pool of fresh states.


@dataclasses.dataclass(frozen=True)
class Tickets:
  """Episodes of a given length; each reset draws a number, and is counted."""

  length: int
  count: Any = None  # called once per reset
  observation_space = spaces.Box(0, 2**32 - 1, (), np.uint32)
  action_space = spaces.Discrete(2)

  def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
    ticket = jax.random.bits(key)
    if self.count:
      jax.debug.callback(lambda _: self.count(), ticket)
    return (ticket, jnp.int32(0)), restart(ticket)

  def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, TimeStep]:
    ticket, time = state
    ended = time + 1 >= self.length
    return (ticket, time + 1), transition(ticket, 0.0, ended, False)


def rollout(env: NextStepReset, num_envs: int, steps: int) -> Callable[[jax.Array], TimeStep]:
  """A function from a key to [T+1, B] under action 0."""
  many = batch(env, num_envs)
  action = jnp.zeros([num_envs], jnp.int32)

  def go(key: jax.Array) -> TimeStep:
    reset_key, steps_key = jax.random.split(key)
    state, first = many.reset(reset_key)
    _, rest = jax.lax.scan(
      lambda s, k: many.step(s, action, jax.random.split(k, num_envs)),
      state,
      jax.random.split(steps_key, steps),
    )
    return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, rest)

  return go


def run(env: NextStepReset, num_envs: int, steps: int) -> TimeStep:
  """[T+1, B] under action 0."""
  return jax.tree.map(np.asarray, jax.jit(rollout(env, num_envs, steps))(jax.random.key(0)))


@pytest.mark.parametrize(('num_envs', 'fraction'), [(8, 1.0), (8, 0.25), (8, 0.5), (6, 0.25)])
def test_every_episode_has_a_fresh_state_of_its_own(num_envs: int, fraction: float) -> None:
  stream = run(NextStepReset(Tickets(length=5), fraction), num_envs, steps=80)
  tickets = stream.observation[stream.step_type == FIRST]
  assert len(tickets) == num_envs * (1 + 80 // 6)  # an episode is FIRST and 5 more
  assert len(set(tickets)) == len(tickets)
  ticket = stream.observation[0]
  for t in range(1, 81):  # an episode keeps its ticket to the end
    ticket = np.where(stream.step_type[t] == FIRST, stream.observation[t], ticket)
    np.testing.assert_array_equal(stream.observation[t], ticket)


def test_resets_are_computed_only_when_needed() -> None:
  def counted(fraction: float) -> int:
    calls: list[None] = []
    run(NextStepReset(Tickets(5, lambda: calls.append(None)), fraction), num_envs=8, steps=60)
    jax.effects_barrier()
    return len(calls)

  ends = 8 * 60 // 6
  assert counted(1.0) == 8 + ends  # all 8 are in step here, so a reset is computed for all or none
  assert 16 + ends - 8 <= counted(0.25) <= 16 + ends


@dataclasses.dataclass(frozen=True)
class Lots(Tickets):
  """Episodes whose lengths differ."""

  def step(self, state: Any, action: Any, key: jax.Array) -> tuple[Any, TimeStep]:
    ticket, time = state
    return (ticket, time + 1), transition(ticket, 0.0, time >= ticket % 7 + 2, False)


@dataclasses.dataclass(frozen=True)
class SlowLots(Lots):
  """Lots with a loop in its reset, which is therefore not drawn ahead."""

  def reset(self, key: jax.Array) -> tuple[Any, TimeStep]:
    key = jax.lax.fori_loop(0, 2, lambda _, k: jax.random.split(k)[0], key)
    return super().reset(key)


@pytest.mark.parametrize('fraction', [1.0, 0.25])
def test_several_seeds_pay_for_resets_only_when_needed(fraction: float) -> None:
  """The seeds of a program are a vmap, under which a cond may become both of its sides."""
  one = rollout(NextStepReset(SlowLots(0), fraction), num_envs=4, steps=40)

  def go(seed: jax.Array) -> TimeStep:
    return one(jax.random.key(seed))

  seeds = jnp.arange(3)
  with jax.debug_key_reuse(False):  # which takes the transpositions of vmap for uses
    together = jax.jit(jax.vmap(jax.vmap(go))).lower(seeds[None]).compile()
  assert ' conditional(' in together.as_text()
  alone = jax.tree.map(lambda *x: np.stack(x)[None], *map(jax.jit(go), seeds))
  jax.tree.map(np.testing.assert_array_equal, together(seeds[None]), alone)


@pytest.mark.parametrize(
  'name',
  [
    'podrace:catch',
    pytest.param('gymnax:CartPole-v1', marks=pytest.mark.slow),
    pytest.param('jumanji:Snake-v1', marks=pytest.mark.slow),
  ],
)
@pytest.mark.parametrize('fraction', [1.0, 0.25])
def test_under_shard_map(name: str, fraction: float) -> None:
  env = dataclasses.replace(podrace.envs.make(name), fresh_fraction=fraction)
  mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec('data')
  many = batch(env, 4)

  across = jax.sharding.PartitionSpec(None, 'data')

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=across, check_vma=False)
  def go(key: jax.Array) -> jax.Array:
    reset_key, steps_key = jax.random.split(key[0])
    state, _ = many.reset(reset_key)
    action = jnp.zeros([4], jnp.int32)
    _, timesteps = jax.lax.scan(
      lambda s, k: many.step(s, action, k), state, jax.random.split(steps_key, (40, 4))
    )
    return timesteps.step_type

  kinds = go(jax.random.split(jax.random.key(0), 2))
  assert kinds.shape == (40, 8)
  assert np.all(np.any(np.asarray(kinds) == LAST, axis=0))


def test_select_matches_leading_axes() -> None:
  condition = jnp.asarray([True, False])
  chosen = base.select(condition, {'x': jnp.ones([2, 3])}, {'x': jnp.zeros([2, 3])})
  np.testing.assert_array_equal(chosen['x'], [[1, 1, 1], [0, 0, 0]])


def test_locked_doors_of_navix_are_closed() -> None:
  env = podrace.envs.make('navix:Navix-KeyCorridorS3R1-v0')
  _, timestep = compiled(env)[0](jax.random.key(0))
  observation = np.asarray(timestep.observation)
  doors = observation[observation[..., 0] == int(EntityIds.DOOR)]
  assert sorted(doors[:, 2]) == [1, 2], 'one is closed, one is locked'
