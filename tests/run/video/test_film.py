"""Videos of policies."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image
from shared_programs import shared_programs  # noqa: F401
from shorthand import Capture, Patch, slow_after
from test_runs import called

from podrace import envs
from podrace.agents.impala import Impala
from podrace.envs.host import base as host
from podrace.errors import HostError, RunError, UsageError
from podrace.run.loop import train
from podrace.run.video import film as watch
from podrace.run.video import pictures, stages
from podrace.settings.config import Config


def stage(name: str) -> tuple[stages.Stage, Any]:
  library = name.partition(':')[0]
  env: Any = host.make(name) if library in ('ale', 'gymnasium') else envs.make(name)
  return stages.make_stage(name, env, 60.0), env


def played(name: str, steps: int, seed: int = 3) -> tuple[list[np.ndarray], list[float]]:
  """Frames and rewards of random play."""
  found, env = stage(name)
  env.action_space.seed(0)
  found.reset(seed)
  frames: list[Any] = [found.frame()]
  rewards = []
  for _ in range(steps):
    _, reward, over = found.step(np.asarray(env.action_space.sample())[None])
    frames.append(found.frame())
    rewards.append(reward)
    if over:
      break
  found.close()
  if isinstance(frames[0], pictures.NumericObservation):
    return list(pictures.draw_numbers(frames)), rewards
  return frames, rewards


ECHO = """
import gymnasium
import numpy as np


class Echo(gymnasium.Env):
  observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
  action_space = gymnasium.spaces.Discrete(3)

  def observe(self):
    self.word = int(self.np_random.integers(3))
    return np.eye(3, dtype=np.float32)[self.word]

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return self.observe(), {}

  def step(self, action):
    reward = float(action == self.word)
    return self.observe(), reward, False, False, {}


class Drawn(Echo):
  metadata = {'render_modes': ['rgb_array'], 'render_fps': 5}

  def __init__(self, render_mode=None):
    self.render_mode = render_mode

  def render(self):
    return np.full((20, 30, 3), 40 * self.word, np.uint8)


class Silent(Drawn):
  def render(self):
    return None


class Numbered(Echo):
  def step(self, action):
    observation, reward, *_ = super().step(action)
    return observation, 1, 0, int(action == 2), {}


for cls in (Echo, Drawn, Silent, Numbered):
  gymnasium.register(f'{cls.__name__}-v0', entry_point=cls, max_episode_steps=10)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: Patch) -> str:
  """The module of the environment of docs/own.md, and of two that have a `render_mode`."""
  (tmp_path / 'echo_to_watch.py').write_text(ECHO)
  monkeypatch.syspath_prepend(str(tmp_path))
  return 'echo_to_watch'


@pytest.mark.filterwarnings('error')
def test_environments_without_a_picture_show_their_observation(echo: str) -> None:
  for name, why in (
    ('Echo-v0', 'its class has no render_mode and render() for rgb_array:'),
    ('Silent-v0', 'it renders no rgb_array (ValueError: render() returned object ()):'),
  ):
    found, _ = stage(f'gymnasium:{echo}:{name}')
    assert found.note.startswith(why)
    found.reset(0)
    frame = found.frame()
    assert isinstance(frame, pictures.NumericObservation) and frame.values.sum() == 1
    found.step(np.zeros(1, np.int32))
    found.close()
  found, _ = stage(f'gymnasium:{echo}:Drawn-v0')
  timestep = found.reset(0)
  frame = found.frame()
  assert found.note == '' and isinstance(frame, np.ndarray) and frame.shape == (20, 30, 3)
  assert frame.max() == 40 * np.asarray(timestep.observation)[0].argmax()


def test_numbers_may_be_flags_of_an_episodes_end(echo: str) -> None:
  found, _ = stage(f'gymnasium:{echo}:Numbered-v0')
  found.reset(0)
  for action, over in ((0, False), (2, True), (0, False)):
    timestep, _, ended = found.step(np.array([action], np.int32))
    assert timestep.last.tolist() == [over] and timestep.discount.tolist() == [1] and ended == over
    if over:
      found.reset(1)
  found.close()


@pytest.mark.slow
def test_a_run_in_an_environment_without_a_picture_is_filmed(
  echo: str, tmp_path: Path, capsys: Capture
) -> None:
  name = f'gymnasium:{echo}:Echo-v0'
  config = Config(
    agent=Impala(), env=name, architecture='sebulba', total_steps=2_048, num_envs=8, devices=1
  )
  train(config, tmp_path / 'run', quiet=True)
  capsys.readouterr()
  code, out, err = called(
    capsys, 'watch', str(tmp_path / 'run'), '--episodes', '1', '--allow-code', echo
  )
  assert code == 0 and 'WARN' not in err and 'site-packages' not in err
  said = f'podrace watch: {name}: its class has no render_mode and render() for rgb_array'
  assert [x for x in err.splitlines() if said in x]
  film = frames(Path(json.loads(out)['best']['mp4']))
  held = 3  # a second of the last frame
  assert len(film) == 11 + held and not np.array_equal(film[0][watch.BAR :], film[-1][watch.BAR :])


DRAWN = ['gymnasium:CartPole-v1', 'gymnax:Breakout-MinAtar', 'podrace:catch']
SLOW = [
  'ale:breakout', 'ale:ms_pacman,episodic_life=true', 'gymnasium:FrozenLake-v1', 'gymnax:CartPole-v1', 'navix:Navix-Empty-8x8-v0',
  'craftax:Craftax-Classic-Symbolic-v1', 'jumanji:Snake-v1', 'gymnax:Pendulum-v1', 'gymnax:Acrobot-v1',
  'podrace:repeat_previous', 'podrace:autoencode',
]  # fmt: skip


@pytest.mark.parametrize('name', [*DRAWN, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_environments_draw_themselves(name: str) -> None:
  frames, _ = played(name, 6)
  shapes = {(f.shape, f.dtype.name) for f in frames}
  assert len(shapes) == 1 and max(frames[0].shape[:2]) >= pictures.SMALLEST
  assert frames[0].shape[2] == 3 and frames[0].dtype == np.uint8
  assert any(not np.array_equal(frames[0], f) for f in frames[1:])  # something moves
  assert len(np.unique(frames[0].reshape(-1, 3), axis=0)) > 1
  again, _ = played(name, 6)
  assert all(np.array_equal(a, b) for a, b in zip(frames, again, strict=True))


@pytest.mark.parametrize(
  'name',
  slow_after(1, 'ale:ms_pacman,episodic_life=true', 'ale:pong', 'ale:ms_pacman,sticky=0.25'),
)
def test_the_coloured_twin_plays_the_same_game(name: str) -> None:
  """A step asserts that both have the same reward; the newest grey frame is the coloured one in grey, smaller."""
  found, env = stage(name)
  env.action_space.seed(0)
  timestep = found.reset(5)
  total = 0.0
  for _ in range(300):
    timestep, reward, _ = found.step(np.asarray(env.action_space.sample())[None])
    total += abs(reward)
    frame = found.frame()
    assert isinstance(frame, np.ndarray)
    picture = Image.fromarray(frame).convert('L').resize((84, 84), Image.Resampling.BOX)
    grey = np.asarray(timestep.observation)[0, -1].astype(float)
    assert np.corrcoef(np.asarray(picture, float).ravel(), grey.ravel())[0, 1] > 0.9
  assert total > 0
  found.close()


def test_what_is_drawn_of_observations() -> None:
  image = np.zeros((4, 84, 84), np.uint8)
  image[-1, 0, 0] = 200
  shown = pictures.draw(spaces.Box(0, 255, image.shape, np.uint8), image)
  assert isinstance(shown, np.ndarray) and shown.shape == (336, 336, 3)
  assert shown[0, 0].tolist() == [200] * 3 and shown[4, 4].sum() == 0
  grid = np.zeros((5, 5, 3), bool)
  grid[1, 2, 1] = True
  shown = pictures.draw(spaces.MultiBinary(grid.shape), grid)
  assert isinstance(shown, np.ndarray)
  factor = shown.shape[0] // 5
  assert shown[factor, 2 * factor].tolist() == pictures.PALETTE[1].tolist()
  found = pictures.draw(
    spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Box(-9, 9, ())),
    dict(a=np.array([5.0, -5.0]), b=np.nan),
  )
  assert isinstance(found, pictures.NumericObservation) and found.names == ('a[0]', 'a[1]', 'b')
  np.testing.assert_array_equal(found.values, np.array([5, -5, np.nan], np.float32))
  parts = dict(action_mask=np.ones((5, 5, 2), bool), board=grid, podrace_state=(np.zeros((3, 3)),))
  masked = pictures.draw(spaces.Dict({k: spaces.MultiBinary(grid.shape) for k in parts}), parts)
  np.testing.assert_array_equal(masked, shown)
  of_box = pictures.draw(spaces.Box(-9, 9, (2,)), np.array([5.0, -5.0]))
  assert isinstance(of_box, pictures.NumericObservation) and of_box.names == ('0', '1')


def episode_of(rows: np.ndarray) -> list[np.ndarray]:
  names = tuple(map(str, range(rows.shape[1])))
  return list(
    pictures.draw_numbers(
      [pictures.NumericObservation(names, row.astype(np.float32)) for row in rows]
    )
  )


def test_numbers_fill_the_range_that_they_have_in_the_episode() -> None:
  """Small ones, as of CartPole, are as well to be seen as large ones; what never changes stays in the middle."""
  x = np.linspace(-1, 1, 11)
  rows = np.stack([0.02 * x, 500 * x, 3 + x, np.full(11, 0.25)], 1)
  shown = episode_of(rows)
  assert {p.shape for p in shown} == {(168, 320, 3)} and shown[0].dtype == np.uint8
  lengths = [[(p[24 + 40 * i] == pictures.BAR).all(-1).sum() for i in range(4)] for p in shown]
  assert lengths[0][0] == lengths[0][1] > 80 and lengths[-1][0] == lengths[-1][1] > 80
  assert lengths[0][2] == 0 and lengths[5][:2] == [0, 0]
  assert lengths[-1][2] > 170 and [n[3] for n in lengths] == [0] * 11
  words = [p[:, pictures.NAME_WIDTH + pictures.BAR_WIDTH + 4 :] for p in shown]
  assert not np.array_equal(words[0], words[1])  # the values


def test_many_numbers_and_such_that_are_none() -> None:
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(5, 100))
  rows[0, 0], rows[1, 1], rows[:, 2] = np.nan, np.inf, -np.inf
  shown = episode_of(rows)
  assert {p.shape for p in shown} == {(128, 300, 3)}
  lit = np.mean([(p == pictures.BAR).all(-1).mean() for p in shown])
  assert 0.1 < lit < 0.6
  assert len(episode_of(rows[:, :3])) == 5


def test_more_numbers_than_a_video_is_wide_become_pixels(tmp_path: Path) -> None:
  space = spaces.Box(-1, 1, (16_500,))
  x = np.zeros((2, *space.shape), np.float32)
  x[:, 0], x[1, 200] = (-1, 1), 1
  shown = list(pictures.draw_numbers([pictures.draw(space, row) for row in x]))  # type: ignore
  factor = 2  # 129 pixels a side
  assert {p.shape for p in shown} == {(258, 258, 3)}
  assert [p[0, 0, 0] for p in shown] == [0, 255] and shown[0][0, factor, 0] == 128
  assert [p[factor * (200 // 129), factor * (200 % 129), 0] for p in shown] == [0, 255]
  film = watch.Film(tmp_path / 'a.mp4', tmp_path / 'a.gif', 2)
  for picture in shown:
    film.add(watch.add_caption(picture, 'step'))
  film.close()
  assert len(frames(tmp_path / 'a.mp4')) == 4


def test_the_cart_and_the_pendulum_stand_as_they_do_in_gymnasium() -> None:
  from types import SimpleNamespace as State

  from podrace.envs.adapters import drawings

  def middle(picture: np.ndarray) -> tuple[float, float]:
    rows, columns = np.nonzero((picture == drawings.ROD).all(-1))
    return float(rows.mean()), float(columns.mean())

  params = State(x_threshold=2.4, length=0.5)
  row, column = middle(drawings.cart_pole(State(x=0.0, theta=0.0), params))
  assert column == pytest.approx(180, abs=1)
  right = middle(drawings.cart_pole(State(x=0.0, theta=0.2), params))
  assert right[1] > column + 4 and right[0] > row
  assert middle(drawings.cart_pole(State(x=1.0, theta=0.0), params))[1] > column + 50
  up, left, down = (middle(drawings.pendulum(State(theta=t), None)) for t in (0, np.pi / 2, np.pi))
  assert up[0] < 100 and down[0] > 156 and left[1] < 100


def test_images_of_any_kind() -> None:
  assert pictures.to_image(np.ones((2, 2))).tolist() == [[[255] * 3] * 2] * 2
  assert pictures.to_image(np.full((1, 1, 3), 128.0)).tolist() == [[[128] * 3]]
  assert pictures.to_image(np.full((1, 1, 4), 7, np.uint8)).tolist() == [[[7] * 3]]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match='envpool:CartPole-v1'):
    stages.make_stage('envpool:CartPole-v1', host.make('envpool:CartPole-v1'), 60.0)


def test_a_stage_has_the_deadline_that_it_is_given() -> None:
  spec, deadlines = host.make('c:breakout'), []

  def make(args: host.PoolArgs) -> Any:
    deadlines.append(args.deadline)
    return spec.make(args)

  stages.make_stage('c:breakout', dataclasses.replace(spec, make=make), 77.0).close()
  assert deadlines == [77.0]


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
  path = tmp_path_factory.mktemp('watch') / 'run'
  train(Config(agent=Impala(learning_rate=3e-3), total_steps=250_000, devices=1), path, quiet=True)
  return path


def frames(path: Path) -> list[np.ndarray]:
  with av.open(str(path)) as container:
    return [f.to_ndarray(format='rgb24') for f in container.decode(video=0)]


def test_the_best_and_the_median_episode(run: Path, capsys: Capture) -> None:
  code, out, err = called(capsys, 'watch', str(run), '--episodes', '3', '--fps', '5')
  assert code == 0 and 'return 1 in 9 steps' in err
  found = json.loads(out.splitlines()[-1])
  assert found['step'] == 250_880 and found['returns'] == [1.0] * 3
  for what in ('best', 'median'):
    shown = frames(Path(found[what]['mp4']))
    # The first one, one after each of 9 steps, and the last one for a second.
    assert len(shown) == 10 + 5
    assert shown[0].shape == (
      watch.BAR + 260,
      200 if shown[0].shape[1] == 200 else shown[0].shape[1],
      3,
    )
    assert shown[0][: watch.BAR].max() > 200  # words
    with Image.open(found[what]['gif']) as gif:
      assert gif.n_frames == 10 and gif.info['duration'] == 200  # type: ignore[attr-defined]
  assert sorted(p.name for p in (run / 'videos').iterdir()) == [
    f'250880-{what}-episodes3-fps5.{kind}' for what in ('best', 'median') for kind in ('gif', 'mp4')
  ]


def test_a_long_episode_is_cut_and_its_gif_is_small(
  run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
  monkeypatch.setattr(watch, 'GIF_FRAMES', 4)
  found = watch.watch(run, tmp_path, watch.FilmSettings(episodes=1, max_steps=7))
  assert found['best']['steps'] == 7 and len(frames(Path(found['best']['mp4']))) == 8 + 2
  with Image.open(found['best']['gif']) as gif:
    assert 1 < gif.n_frames <= 4  # type: ignore[attr-defined]


def test_frames_can_be_shown_instead(run: Path, tmp_path: Path) -> None:
  shown: list[np.ndarray] = []
  found = watch.watch(run, tmp_path / 'none', watch.FilmSettings(episodes=2), shown.append)
  assert found == {'step': 250_880, 'episodes': 2} and len(shown) == 20
  assert not (tmp_path / 'none').exists()


def test_films_of_other_choices_stay(run: Path, tmp_path: Path, capsys: Capture) -> None:
  words = ['watch', str(run), '--max-steps', '1', '--out', str(tmp_path)]
  for more in ('', '--sample', '--seed 9', '--sample --seed 9', '--episodes 1'):
    assert called(capsys, *words, *more.split())[0] == 0
  assert {p.name for p in tmp_path.glob('*best*.mp4')} == {
    f'250880-best{suffix}-max-steps1.mp4'
    for suffix in ('', '-sampled', '-seed9', '-sampled-seed9', '-episodes1')
  }


def test_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
  (tmp_path / 'elsewhere').mkdir()
  copy = tmp_path / 'run'
  shutil.copytree(run, copy, ignore=shutil.ignore_patterns('videos'))
  (copy / 'videos').symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(UsageError, match='link'):
    watch.watch(copy, settings=watch.FilmSettings(episodes=1))
  assert not list((tmp_path / 'elsewhere').iterdir())


@pytest.mark.parametrize('method', ['reset', 'step', 'frame'])
@pytest.mark.parametrize('kind', [HostError, ZeroDivisionError])
def test_an_environment_that_fails_is_named(
  kind: type[Exception], method: str, run: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
  def fail(*args: Any) -> None:
    raise kind('the reason')

  monkeypatch.setattr(stages._JaxStage, method, fail)
  with pytest.raises(RunError, match=r'podrace:catch(.|\n)*the reason'):
    watch.watch(run, tmp_path / 'out', watch.FilmSettings(episodes=1))
  assert not list((tmp_path / 'out').iterdir())


def test_what_watch_refuses(run: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
  monkeypatch.delenv('DISPLAY', raising=False)
  monkeypatch.delenv('WAYLAND_DISPLAY', raising=False)
  for args, message in (
    ((str(tmp_path),), 'is not a run directory'),
    ((str(run), '--episodes', '0'), '--episodes must be at least 1'),
    ((str(run), '--live'), '--live needs a display'),
    ((str(run), '--seed', '4294967296'), '--seed'),
  ):
    code, _, err = called(capsys, 'watch', *args)
    assert code == 2 and message in err


@pytest.mark.parametrize('name', ['a:b', 'pipe:', 'file:x', 'a[1]%d'])
def test_a_film_is_written_in_a_directory_of_any_name(
  name: str, tmp_path: Path, monkeypatch: Patch
) -> None:
  monkeypatch.chdir(tmp_path)
  Path(name).mkdir()
  film = watch.Film(Path(name, 'x.mp4'), Path(name, 'x.gif'), 10)
  film.add(np.zeros((64, 64, 3), np.uint8))
  film.close()
  assert sorted(p.name for p in (tmp_path / name).iterdir()) == ['x.gif', 'x.mp4']
