"""Videos of policies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image
from test_runs import called

from podrace import envs, stages, watch
from podrace.agents.impala import Impala
from podrace.config import Config
from podrace.envs.host import base as host
from podrace.errors import UsageError
from podrace.run import train


def stage(name: str) -> tuple[stages.Stage, Any]:
  library = name.partition(':')[0]
  env: Any = host.make(name) if library in ('ale', 'gymnasium') else envs.make(name)
  return stages.make(name, env), env


def played(name: str, steps: int, seed: int = 3) -> tuple[list[np.ndarray], list[float]]:
  """Frames and rewards of random play."""
  found, env = stage(name)
  env.action_space.seed(0)
  found.reset(seed)
  frames, rewards = [found.frame()], []
  for _ in range(steps):
    _, reward, over = found.step(np.asarray(env.action_space.sample())[None])
    frames.append(found.frame())
    rewards.append(reward)
    if over:
      break
  found.close()
  return frames, rewards


DRAWN = ['ale:breakout', 'gymnasium:CartPole-v1', 'gymnax:Breakout-MinAtar', 'podrace:catch']
SLOW = [
  'ale:ms_pacman,episodic_life=true', 'gymnasium:FrozenLake-v1', 'gymnax:CartPole-v1',
  'navix:Navix-Empty-8x8-v0', 'craftax:Craftax-Classic-Symbolic-v1', 'jumanji:Snake-v1',
]  # fmt: skip


@pytest.mark.parametrize('name', [*DRAWN, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_environments_draw_themselves(name: str) -> None:
  frames, _ = played(name, 6)
  shapes = {(f.shape, f.dtype.name) for f in frames}
  assert len(shapes) == 1 and max(frames[0].shape[:2]) >= stages.SMALLEST
  assert frames[0].shape[2] == 3 and frames[0].dtype == np.uint8
  assert any(not np.array_equal(frames[0], f) for f in frames[1:])  # something moves
  assert len(np.unique(frames[0].reshape(-1, 3), axis=0)) > 1
  again, _ = played(name, 6)
  assert all(np.array_equal(a, b) for a, b in zip(frames, again, strict=True))


@pytest.mark.parametrize(
  'name', ['ale:pong', 'ale:ms_pacman,episodic_life=true', 'ale:ms_pacman,sticky=0.25']
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
    picture = Image.fromarray(found.frame()).convert('L').resize((84, 84), Image.Resampling.BOX)
    grey = np.asarray(timestep.observation)[0, -1].astype(float)
    assert np.corrcoef(np.asarray(picture, float).ravel(), grey.ravel())[0, 1] > 0.9
  assert total > 0
  found.close()


def test_what_is_drawn_of_observations() -> None:
  image = np.zeros((4, 84, 84), np.uint8)
  image[-1, 0, 0] = 200
  shown = stages.draw(spaces.Box(0, 255, image.shape, np.uint8), image)
  assert (
    shown.shape == (336, 336, 3) and shown[0, 0].tolist() == [200] * 3 and shown[4, 4].sum() == 0
  )
  grid = np.zeros((5, 5, 3), bool)
  grid[1, 2, 1] = True
  shown = stages.draw(spaces.MultiBinary(grid.shape), grid)
  factor = shown.shape[0] // 5
  assert shown[factor, 2 * factor].tolist() == stages.PALETTE[1].tolist()
  shown = stages.draw(
    spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Box(-9, 9, ())),
    dict(a=np.array([5.0, -5.0]), b=np.nan),
  )
  lit = (shown == stages.PALETTE[5]).all(-1)
  third = shown.shape[1] // 3
  up, down = lit[:60, :third].sum(), lit[70:, third : 2 * third].sum()
  assert (
    up > 1000 and down > 1000 and lit[70:, :third].sum() == 0 == lit[:60, third : 2 * third].sum()
  )


def test_images_of_any_kind() -> None:
  assert stages.to_image(np.ones((2, 2))).tolist() == [[[255] * 3] * 2] * 2
  assert stages.to_image(np.full((1, 1, 3), 128.0)).tolist() == [[[128] * 3]]
  assert stages.to_image(np.full((1, 1, 4), 7, np.uint8)).tolist() == [[[7] * 3]]


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match=r'envpool:CartPole-v1 can.t be drawn'):
    stages.make('envpool:CartPole-v1', host.make('envpool:CartPole-v1'))


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
  path = tmp_path_factory.mktemp('watch') / 'run'
  train(Config(agent=Impala(learning_rate=3e-3), total_steps=600_000), path, quiet=True)
  return path


def frames(path: Path) -> list[np.ndarray]:
  with av.open(str(path)) as container:
    return [f.to_ndarray(format='rgb24') for f in container.decode(video=0)]


def test_the_best_and_the_median_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
  code, out, err = called(capsys, 'watch', str(run), '--episodes', '3', '--fps', '5')
  assert code == 0 and 'best of 3: return 1 in 9 steps' in err
  found = json.loads(out.splitlines()[-1])
  assert found['step'] == 600_064 and found['returns'] == [1.0] * 3
  for what in ('best', 'median'):
    shown = frames(Path(found[what]['mp4']))
    assert len(shown) == 10  # the first one, and one after each of 9 steps
    assert shown[0].shape == (
      watch.BAR + 260,
      200 if shown[0].shape[1] == 200 else shown[0].shape[1],
      3,
    )
    assert shown[0][: watch.BAR].max() > 200  # words
    with Image.open(found[what]['gif']) as gif:
      assert gif.n_frames == 10 and gif.info['duration'] == 200  # type: ignore[attr-defined]
  assert sorted(p.name for p in (run / 'videos').iterdir()) == [
    f'600064-{what}.{kind}' for what in ('best', 'median') for kind in ('gif', 'mp4')
  ]


def test_a_long_episode_is_cut_and_its_gif_is_small(
  run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
  monkeypatch.setattr(watch, 'GIF_FRAMES', 4)
  found = watch.watch(run, tmp_path, episodes=1, max_steps=7)
  assert found['best']['steps'] == 7 and len(frames(Path(found['best']['mp4']))) == 8
  with Image.open(found['best']['gif']) as gif:
    assert gif.n_frames == 4  # type: ignore[attr-defined]


def test_frames_can_be_shown_instead(run: Path, tmp_path: Path) -> None:
  shown: list[np.ndarray] = []
  found = watch.watch(run, tmp_path / 'none', episodes=2, show=shown.append)
  assert found == {'step': 600_064, 'episodes': 2} and len(shown) == 20
  assert not (tmp_path / 'none').exists()


def test_a_link_is_not_followed(run: Path, tmp_path: Path) -> None:
  (tmp_path / 'elsewhere').mkdir()
  copy = tmp_path / 'run'
  shutil.copytree(run, copy, ignore=shutil.ignore_patterns('videos'))
  (copy / 'videos').symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(UsageError, match='is a symbolic link'):
    watch.watch(copy, episodes=1)
  assert not list((tmp_path / 'elsewhere').iterdir())


def test_what_watch_refuses(
  run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.delenv('DISPLAY', raising=False)
  monkeypatch.delenv('WAYLAND_DISPLAY', raising=False)
  for args, message in (
    ((str(tmp_path),), 'is not a run directory'),
    ((str(run), '--episodes', '0'), '--episodes must be at least 1'),
    ((str(run), '--live'), '--live needs a display'),
  ):
    code, _, err = called(capsys, 'watch', *args)
    assert code == 2 and message in err
