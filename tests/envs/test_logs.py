"""Minari data sets as environments: reading, refusals, and the order of the replayed episodes."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_sets import balance, collected
from gymnasium import spaces
from test_runs import called

from podrace import envs
from podrace.envs.base import batch
from podrace.envs.logs import minari_files
from podrace.envs.logs.log_environment import FLAG, INNER, RECORDED, LogEnvironment, split_block
from podrace.envs.logs.minari_files import read_log
from podrace.envs.logs.recorded import Log
from podrace.envs.logs.recorded_spaces import check_spaces
from podrace.envs.logs.share import is_logged, parse_share
from podrace.envs.native import build
from podrace.errors import UsageError
from podrace.types import FIRST, LAST, MID

EPISODES = 7


@pytest.fixture(scope='module')
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
  home = tmp_path_factory.mktemp('home')
  return collected(home, 'cartpole-v0', gymnasium.make('CartPole-v1'), EPISODES)[0]


class Camera(gymnasium.Env):
  """Observations of several kinds: an image, which Minari keeps as JPEG, a tuple and choices."""

  observation_space = spaces.Dict(
    image=spaces.Box(0, 255, (40, 36, 3), np.uint8),
    pair=spaces.Tuple([spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(4)]),
    bits=spaces.MultiBinary(3),
  )
  action_space = spaces.MultiDiscrete([2, 3])

  def _seen(self) -> Any:
    x = self.observation_space.sample()
    x['image'][:] = self.t  # constant images, which JPEG keeps exactly
    return x

  def reset(self, seed: int | None = None, options: Any = None) -> Any:
    super().reset(seed=seed)
    self.observation_space.seed(seed)
    self.t = 0
    return self._seen(), {}

  def step(self, action: Any) -> Any:
    self.t += 1
    return self._seen(), float(self.t), self.t == 5, False, {}


def rows_of(log: Log, e: int) -> Any:
  first = int(log.rows.starts[e])
  end = int(log.rows.starts[e + 1]) if e + 1 < log.episodes else len(log.rows.reward)
  return jax.tree.map(lambda x: x[first:end], log.rows._replace(starts=log.rows.starts[:0]))


@pytest.mark.parametrize(
  ('make', 'steps'),
  [
    (lambda: gymnasium.make('CartPole-v1'), 10**6),
    (lambda: gymnasium.make('Pendulum-v1'), 10**6),
    (lambda: gymnasium.make('Pendulum-v1'), 9),
    (Camera, 10**6),
  ],
  ids=['terminated', 'truncated', 'cut', 'dict'],
)
def test_reads_what_gymnasium_returned(
  make: Callable[[], gymnasium.Env], steps: int, tmp_path: Path
) -> None:
  path, seen = collected(tmp_path, 'any-v0', make(), 3, steps=steps)
  log = read_log(str(path))
  assert (log.episodes, log.steps) == (3, sum(len(x['rewards']) for x in seen))
  for e, episode in enumerate(seen):
    rows, n = rows_of(log, e), len(episode['rewards'])
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *episode['observations'])
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), rows.observation, stacked
    )
    np.testing.assert_array_equal(rows.action[:n], np.stack(episode['actions']))
    np.testing.assert_allclose(rows.reward, [0, *episode['rewards']], rtol=1e-6)
    assert rows.step_type.tolist() == [FIRST, *[MID] * (n - 1), LAST]
    assert rows.discount.tolist() == [1.0] * n + [float(not episode['terminated'])]
  assert all(x.dtype.itemsize <= 4 for x in jax.tree.leaves(log.rows))


def test_a_name_in_minaris_home(cartpole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('MINARI_DATASETS_PATH', str(cartpole.parent))
  by_name, by_path = read_log('cartpole-v0'), read_log(str(cartpole))
  assert by_name.sha256 == by_path.sha256 == read_log(str(cartpole / 'data')).sha256
  with pytest.raises(UsageError, match='cartpole-v1'):
    read_log('cartpole-v1')


def test_the_hash_is_of_the_contents(cartpole: Path, tmp_path: Path) -> None:
  other = shutil.copytree(cartpole, tmp_path / 'other')
  assert read_log(str(other)).sha256 == read_log(str(cartpole)).sha256
  with h5py.File(other / 'data' / 'main_data.hdf5', 'a') as file:
    file['episode_2/rewards'][0] += 1
  assert read_log(str(other)).sha256 != read_log(str(cartpole)).sha256


# --- damaged and hostile ---------------------------------------------------------------------------


def main(path: Path) -> Path:
  return path / 'data' / 'main_data.hdf5'


def edit(change: Callable[[h5py.File], Any]) -> Callable[[Path], None]:
  def apply(path: Path) -> None:
    with h5py.File(main(path), 'a') as file:
      change(file)

  return apply


def metadata(**changes: Any) -> Callable[[Path], None]:
  def apply(path: Path) -> None:
    file = path / 'data' / 'metadata.json'
    record = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))

  return apply


def replaced(name: str, data: Any, **settings: Any) -> Callable[[Path], None]:
  def change(file: h5py.File) -> None:
    del file[name]
    file.create_dataset(name, data=data, **settings)

  return edit(change)


def linked(name: str, link: Any) -> Callable[[Path], None]:
  def change(file: h5py.File) -> None:
    del file[name]
    file[name] = link

  return edit(change)


def outside(path: Path) -> None:
  """Arrays in another file, as raw bytes."""
  with h5py.File(main(path), 'a') as file:
    n = len(file['episode_0/rewards'])
    (path / 'raw').write_bytes(bytes(8 * n))
    del file['episode_0/rewards']
    file.create_dataset(
      'episode_0/rewards', (n,), 'f8', external=[(str(path / 'raw'), 0, h5py.h5f.UNLIMITED)]
    )


def virtual(file: h5py.File) -> None:
  n = len(file['episode_0/rewards'])
  layout = h5py.VirtualLayout((n,), 'f8')
  layout[:] = h5py.VirtualSource(file.filename, 'episode_1/rewards', shape=(n,))
  del file['episode_0/rewards']
  file.create_virtual_dataset('episode_0/rewards', layout)


def huge(file: h5py.File) -> None:
  """A few bytes on the disk, and 8 TiB in memory."""
  n = 2**40
  for name, shape, dtype in (
    ('rewards', (n,), 'f8'), ('terminations', (n,), '?'), ('truncations', (n,), '?'), ('actions', (n,), 'i8'),
    ('observations', (n + 1, 4), 'f4'),
  ):  # fmt: skip
    del file[f'episode_0/{name}']
    file.create_dataset(f'episode_0/{name}', shape, dtype, chunks=True)


def huge_images(path: Path) -> None:
  """Images of 1 TiB, as Minari writes JPEGs."""
  box = {'type': 'Box', 'dtype': 'uint8', 'shape': [4, 4], 'low': [0] * 16, 'high': [255] * 16}
  metadata(observation_space=json.dumps(box))(path)

  def change(file: h5py.File) -> None:
    rows = len(file['episode_0/observations'])
    del file['episode_0/observations']
    file.create_dataset('episode_0/observations', (rows, 2**40), 'u1', chunks=(1, 1024))

  edit(change)(path)


def bad_offset(path: Path) -> None:
  data = bytearray(main(path).read_bytes())
  data[49] = 183  # of the superblock
  main(path).write_bytes(bytes(data))


def cut(path: Path) -> None:
  data = main(path).read_bytes()
  main(path).write_bytes(data[: len(data) // 2])


def set_value(name: str, value: Any) -> Callable[[Path], None]:
  def change(file: h5py.File) -> None:
    file[name][1] = value

  return edit(change)


def to_fifo(path: Path) -> None:
  main(path).unlink()
  os.mkfifo(main(path))


def to_link(path: Path) -> None:
  main(path).rename(path / 'elsewhere')
  main(path).symlink_to(path / 'elsewhere')


def rewritten(content: bytes) -> Callable[[Path], None]:
  def apply(path: Path) -> None:
    main(path).write_bytes(content)

  return apply


def huge_chunks(file: h5py.File) -> None:
  """A GiB of zeros for three rewards, in a few bytes."""
  n = len(file['episode_1/rewards'])
  del file['episode_1/rewards']
  file['episode_1'].create_dataset(
    'rewards', shape=(n,), maxshape=(None,), chunks=(2**27,), dtype='f8', compression='gzip'
  )


BOX = {'type': 'Box', 'dtype': 'float32', 'shape': [4], 'low': [0] * 4, 'high': [1] * 4}


def with_masks(allowed: Callable[[np.ndarray], Any]) -> Callable[[Path], None]:
  """Observations have a mask of the two actions, made of the actions that were taken."""

  def change(file: h5py.File) -> None:
    for episode in file.values():
      numbers, actions = episode['observations'][()], episode['actions'][()]
      del episode['observations']
      episode['observations/observation'] = numbers
      masks = np.asarray(allowed(np.append(actions, 0)), np.int8)
      episode['observations/action_mask'] = masks

  def apply(path: Path) -> None:
    mask = BOX | {'dtype': 'int8', 'shape': [2], 'low': [0] * 2, 'high': [1] * 2}
    numbers = json.loads(
      json.loads((path / 'data' / 'metadata.json').read_text())['observation_space']
    )
    parts = {'observation': numbers, 'action_mask': mask}
    metadata(observation_space=json.dumps({'type': 'Dict', 'subspaces': parts}))(path)
    edit(change)(path)

  return apply


def discrete_observations(path: Path) -> None:
  metadata(observation_space=json.dumps({'type': 'Discrete', 'n': 3, 'start': 0}))(path)

  def change(file: h5py.File) -> None:
    for episode in file.values():
      rows = len(episode['observations'])
      del episode['observations']
      episode['observations'] = np.full(rows, 77)

  edit(change)(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
  'no file': lambda path: main(path).unlink(),
  'no metadata': lambda path: (path / 'data' / 'metadata.json').unlink(),
  'no json': lambda path: (path / 'data' / 'metadata.json').write_text('{'),
  'a list': lambda path: (path / 'data' / 'metadata.json').write_text('[]'),
  'cut short': cut,
  'empty file': rewritten(b''),
  'no hdf5': rewritten(b'\x00' * 5000),
  'a pipe': to_fifo,
  'a link': to_link,
  'arrow': metadata(data_format='arrow'),
  'no spaces': metadata(observation_space=None, action_space=None),
  'space is a number': metadata(observation_space=3),
  'text space': metadata(observation_space=json.dumps({'type': 'Text', 'max_length': 3})),
  'unknown space': metadata(action_space=json.dumps({'type': 'Graph'})),
  'objects': metadata(observation_space=json.dumps(BOX | {'dtype': 'object'})),
  'other bounds': metadata(observation_space=json.dumps(BOX | {'low': [0]})),
  'a huge space': metadata(action_space=json.dumps({'type': 'Discrete', 'n': 2**40, 'start': 0})),
  'starts at 1': metadata(action_space=json.dumps({'type': 'Discrete', 'n': 2, 'start': 1})),
  'nested': metadata(observation_space='[' * 2000 + ']' * 2000),
  'a path as key': metadata(observation_space=json.dumps({'type': 'Dict', 'subspaces': {'../x': BOX}})),
  'actions in a dict': metadata(action_space=json.dumps({'type': 'Dict', 'subspaces': {'x': BOX}})),
  'more episodes': metadata(total_episodes=EPISODES + 1),
  'episodes not counted': metadata(total_episodes=None),
  'no episodes': edit(lambda file: file.clear()),
  'a missing episode': edit(lambda file: file.move('episode_3', 'episode_9')),
  'no terminations': edit(lambda file: file.pop('episode_1/terminations')),
  'no truncations': edit(lambda file: file.pop('episode_1/truncations')),
  'no rewards': edit(lambda file: file.pop('episode_1/rewards')),
  'no actions': edit(lambda file: file.pop('episode_1/actions')),
  'no observations': edit(lambda file: file.pop('episode_1/observations')),
  'empty rewards': replaced('episode_1/rewards', h5py.Empty('f')),
  'a group': edit(lambda file: (file.pop('episode_1/rewards'), file.create_group('episode_1/rewards'))),
  'a number': replaced('episode_1/rewards', 1.0),
  'a type': linked('episode_1/rewards', np.dtype('f8')),
  'one step fewer': replaced('episode_1/actions', np.zeros(2, np.int64)),
  'other observations': replaced('episode_1/observations', np.zeros((9, 3), np.float32)),
  'an empty episode': replaced('episode_1/rewards', np.zeros(0)),
  'float actions': edit(lambda file: file.move('episode_1/rewards', 'episode_1/r') or file.move('episode_1/actions', 'episode_1/rewards') or file.move('episode_1/r', 'episode_1/actions')),
  'flags are numbers': edit(lambda file: file.pop('episode_1/terminations') and file.copy('episode_1/actions', 'episode_1/terminations')),
  'texts': replaced('episode_1/rewards', ['a', 'b']),
  'records': replaced('episode_1/rewards', np.zeros(3, [('a', 'f8')])),
  'an action outside': set_value('episode_1/actions', 2),
  'nan': set_value('episode_1/observations', np.nan),
  'infinite reward': set_value('episode_1/rewards', np.inf),
  'a large reward': set_value('episode_1/rewards', 1e30),
  'goes on after its end': set_value('episode_1/terminations', True),
  'a soft link': linked('episode_1/rewards', h5py.SoftLink('/episode_2/rewards')),
  'an external link': linked('episode_1', h5py.ExternalLink('/etc/passwd', '/')),
  'a virtual array': edit(virtual),
  'raw bytes elsewhere': outside,
  'huge': edit(huge),
  'huge chunks': edit(huge_chunks),
  'forbidden actions': with_masks(lambda actions: np.stack([actions == 1, actions == 0], 1)),
  'a mask of other actions': with_masks(lambda actions: np.ones((len(actions), 3))),
  'observations outside of their choices': discrete_observations,
  'subspaces are a list': metadata(observation_space=json.dumps({'type': 'Dict', 'subspaces': ['a']})),
  'a dtype that is no syntax': metadata(observation_space=json.dumps(BOX | {'dtype': '(2,'})),
  'huge images': huge_images,
  'a bad offset': bad_offset,
}  # fmt: skip


@pytest.mark.parametrize('name', DAMAGES)
def test_a_damaged_data_set_is_refused(
  name: str, cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
  path = shutil.copytree(cartpole, tmp_path / 'damaged')
  DAMAGES[name](path)
  code, _, err = called(
    capsys, 'train', '--agent', 'bc', '--log', str(path), '--run-dir', str(tmp_path / 'run'),
    '--total-steps', '64', '--num-envs', '4', '--unroll-length', '8',
  )  # fmt: skip
  assert code == 2 and err.count('\n') == 1 and '--log' in err, err
  assert not (tmp_path / 'run' / 'checkpoints').exists()


def test_allowed_actions_are_read(cartpole: Path, tmp_path: Path) -> None:
  path = shutil.copytree(cartpole, tmp_path / 'masked')
  with_masks(lambda actions: np.eye(2)[actions])(path)
  rows = read_log(str(path)).rows
  assert (rows.observation['action_mask'].sum(1) == 1).all() and {*rows.action.tolist()} == {0, 1}


def test_no_code_that_a_data_set_names_is_run(
  cartpole: Path,
  tmp_path: Path,
  capsys: pytest.CaptureFixture[str],
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  """Minari itself makes the environment of a data set without spaces."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'evil.py').write_text('open("ran", "w").close()\n')
  path = shutil.copytree(cartpole, tmp_path / 'hostile')
  record = json.loads((path / 'data' / 'metadata.json').read_text())
  spec = json.loads(record['env_spec']) | {'entry_point': 'evil:Env'}
  metadata(env_spec=json.dumps(spec))(path)
  assert read_log(str(path)).episodes == EPISODES
  metadata(observation_space=None)(path)
  assert called(capsys, 'train', '--agent', 'bc', '--log', str(path))[0] == 2
  assert not (tmp_path / 'ran').exists()


def test_a_data_set_beyond_the_limit_of_memory(
  cartpole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  log = read_log(str(cartpole))
  size = log.nbytes - log.rows.starts.nbytes
  monkeypatch.setattr(minari_files, 'memory_limit', lambda: size - 1)
  with pytest.raises(UsageError, match='GiB'):
    read_log(str(cartpole))
  monkeypatch.setattr(minari_files, 'memory_limit', lambda: size)
  assert read_log(str(cartpole)).nbytes == log.nbytes


def test_spaces_of_another_environment(cartpole: Path) -> None:
  log = read_log(str(cartpole))
  check_spaces(log, envs.make('gymnax:CartPole-v1'), 'gymnax:CartPole-v1')  # of other bounds
  for name, kind in (('gymnax:Acrobot-v1', 'observation'), ('podrace:catch', 'observation')):
    with pytest.raises(UsageError, match=kind):
      check_spaces(log, envs.make(name), name)

  class Other:
    observation_space, action_space = log.observation_space, spaces.Discrete(3)

  with pytest.raises(UsageError, match='action'):
    check_spaces(log, Other(), 'other')


# --- the environment -------------------------------------------------------------------------------


def test_shares() -> None:
  assert is_logged(np.arange(6), (2, 3)).tolist() == [True, True, False] * 2
  assert parse_share('1') == (1, 1) and parse_share('3/4') == (3, 4)
  for text in ('0', '0/2', '3/2', '1/0', '-1/2', '0.5', '', '1/2000', '1/2/3'):
    with pytest.raises(UsageError, match='log-share'):
      parse_share(text)
  logged, acting = split_block(8, (1, 4))
  assert (logged.tolist(), acting.tolist()) == ([0, 4], [1, 2, 3, 5, 6, 7])
  with pytest.raises(UsageError, match='multiple of 4'):
    split_block(6, (1, 4))


def walk(env: LogEnvironment, n: int, steps: int) -> Any:
  """Timesteps [steps + 1, n] of a batch that always takes action 0."""
  many = batch(env, n)

  def step(state: Any, key: Any) -> Any:
    state, timestep = many.step(state, jnp.zeros(n, jnp.int32), jax.random.split(key, n))
    return state, timestep

  def run(key: Any) -> Any:
    reset_key, step_key = jax.random.split(key)
    state, first = many.reset(reset_key)
    _, rest = jax.lax.scan(step, state, jax.random.split(step_key, steps))
    return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, rest)

  return jax.tree.map(np.asarray, jax.jit(run)(jax.random.key(0)))


def replayed(log: Log, timesteps: Any) -> list[list[int]]:
  """The episodes that each stream replays, of which the last may not have ended."""
  marks = log.rows.observation[log.rows.starts]  # the first observations differ
  order = []
  for i in range(timesteps.reward.shape[1]):
    firsts = timesteps.observation[INNER][timesteps.step_type[:, i] == FIRST, i]
    order.append([int(np.flatnonzero((marks == x).all(1))[0]) for x in firsts])
  return order


@pytest.mark.parametrize('n', [1, 3, 2 * EPISODES + 1])
def test_each_episode_is_replayed_once_before_any_is_again(n: int, cartpole: Path) -> None:
  log = read_log(str(cartpole))
  timesteps = walk(LogEnvironment(log, (1, 1), None), n, 4 * log.steps // n + 50)
  order = replayed(log, timesteps)
  begun = []  # (time, stream) of each FIRST, in the order in which episodes are drawn
  for i, episodes in enumerate(order):
    times = np.flatnonzero(timesteps.step_type[:, i] == FIRST)
    begun += [(t, i, e) for t, e in zip(times.tolist(), episodes, strict=True)]
  drawn = [e for _, _, e in sorted(begun)]
  rounds = len(drawn) // EPISODES
  assert rounds >= 3
  if n <= EPISODES:
    for k in range(rounds):
      assert sorted(drawn[k * EPISODES : (k + 1) * EPISODES]) == list(range(EPISODES))
    assert drawn[:EPISODES] != drawn[EPISODES : 2 * EPISODES]  # shuffled anew
  for i, episodes in enumerate(order):  # and whole
    rows = [rows_of(log, e) for e in episodes]
    for name, x in (
      ('observation', timesteps.observation[INNER]), ('action', timesteps.observation[RECORDED]),
      ('reward', timesteps.reward), ('discount', timesteps.discount), ('step_type', timesteps.step_type),
    ):  # fmt: skip
      expected = np.concatenate([getattr(r, name) for r in rows])[: len(timesteps.reward)]
      np.testing.assert_array_equal(x[:, i], expected)


def test_a_share_acts_in_the_environment(cartpole: Path) -> None:
  """Positions of the log replay it, and the rest act in the environment."""
  log = read_log(str(cartpole))
  pure = envs.make('gymnax:CartPole-v1')
  timesteps = walk(LogEnvironment(log, (1, 4), pure), 8, 150)
  flag = timesteps.observation[FLAG]
  assert (flag == np.array([1, 0, 0, 0, 1, 0, 0, 0])).all()
  logged = jax.tree.map(lambda x: x[:, [0, 4]], timesteps)
  assert all(len(x) > 1 for x in replayed(log, logged))
  acting = jax.tree.map(lambda x: x[:, [1, 2, 3, 5, 6, 7]], timesteps)
  assert (acting.observation[RECORDED] == 0).all()
  lengths = np.diff(np.flatnonzero(acting.step_type[:, 0] == FIRST))
  assert ((lengths >= 7) & (lengths <= 13)).all() and len(lengths) > 3  # always to the left
  assert (acting.reward[acting.step_type != FIRST] == 1).all()
  assert balance(np.zeros(4), np.random.default_rng(0)) == 0


def test_a_user_without_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """As in a container with a number for its user."""

  def unknown(number: int) -> Any:
    raise KeyError(number)

  for name in ('HOME', 'MINARI_DATASETS_PATH', 'XDG_CACHE_HOME'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(pwd, 'getpwuid', unknown)
  (tmp_path / 'metadata.json').write_text('{}')
  assert minari_files.find_data(str(tmp_path)) == tmp_path
  with pytest.raises(UsageError, match='no Minari data set'):
    minari_files.find_data('nothing')
  assert build._cache_directory.__wrapped__().is_dir()
