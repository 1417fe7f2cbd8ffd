"""Videos of a trained policy: episodes, with their steps and returns drawn in, as MP4 and GIF."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace import envs
from podrace.envs.host import base as host
from podrace.errors import UsageError
from podrace.hooks import can_be_greedy, greedily
from podrace.run.directory import load_config
from podrace.run.evaluate import evaluable, newest_params
from podrace.run.evaluate_host import spread
from podrace.run.video import stages
from podrace.run.video.pictures import Numbers, numbers
from podrace.run.video.stages import Stage
from podrace.settings.agents import bind_run
from podrace.settings.config import Config
from podrace.system.files import make_folder, make_user_folder, write_whole
from podrace.system.importing import why_not
from podrace.system.output import tell
from podrace.system.process import scratch_directory

BAR = 24  # pixels above a picture, for words
GIF_FRAMES = 600  # at most; longer episodes lose frames evenly
GIF_WIDTH = 320


@dataclasses.dataclass
class Episode:
  """One that was filmed."""

  number: int
  episode_return: float
  steps: int
  mp4: Path
  gif: Path


class Film:
  """An MP4 and a GIF under way."""

  def __init__(self, mp4: Path, gif: Path, fps: int) -> None:
    import av

    self._gif, self._fps = gif, fps
    self._container = av.open(str(mp4.absolute()), 'w')  # FFmpeg takes `a:b` for a protocol
    self._stream: Any = None
    self._kept: list[Any] = []  # for the GIF, every `_every`-th frame
    self._every, self._count = 1, 0

  def add(self, picture: np.ndarray) -> None:
    """A frame [H, W, 3] u8; all are of one size."""
    import av
    from PIL import Image

    picture = even(picture)
    if self._stream is None:
      stream: Any = self._container.add_stream('libx264', rate=self._fps)
      stream.height, stream.width = picture.shape[:2]
      stream.pix_fmt = 'yuv420p'
      stream.options = {'crf': '18'}
      self._stream = stream
    for packet in self._stream.encode(av.VideoFrame.from_ndarray(picture, format='rgb24')):
      self._container.mux(packet)
    if self._count % self._every == 0:
      image = Image.fromarray(picture)
      image.thumbnail((GIF_WIDTH, GIF_WIDTH * 4))
      self._kept.append(image)
      if len(self._kept) > GIF_FRAMES:
        self._kept, self._every = self._kept[::2], self._every * 2
    self._count += 1

  def close(self) -> None:
    """Writes what is left."""
    if self._stream is not None:
      for packet in self._stream.encode():
        self._container.mux(packet)
    self._container.close()
    if self._kept:
      first, *rest = self._kept
      milliseconds = max(
        20, round(1000 * self._every / self._fps)
      )  # viewers show none for less than 20
      first.save(self._gif, save_all=True, append_images=rest, duration=milliseconds, loop=0)


def even(picture: np.ndarray) -> np.ndarray:
  """With even sides, as H.264 needs them."""
  h, w = picture.shape[:2]
  return np.ascontiguousarray(np.pad(picture, ((0, h % 2), (0, w % 2), (0, 0))))


def with_words(picture: np.ndarray, words: str) -> np.ndarray:
  """The picture under a bar with words."""
  from PIL import Image, ImageDraw

  image = Image.new('RGB', (max(picture.shape[1], 200), picture.shape[0] + BAR))
  image.paste(Image.fromarray(picture), (0, BAR))
  ImageDraw.Draw(image).text((6, 6), words, fill=(255, 255, 255))
  return np.asarray(image)


def check_libraries() -> None:
  """Raises UsageError without what writes videos."""
  try:
    import av  # noqa: F401
    import PIL  # noqa: F401
  except Exception as e:
    raise UsageError(why_not('a video', 'video', e)) from e


def episode(
  stage: Stage,
  act: Callable[[Any, Any, Any], tuple[Any, Any]],
  state: Any,
  seed: int,
  max_steps: int,
  show: Callable[[np.ndarray], None],
) -> tuple[float, int]:
  """Plays one episode and shows each of its frames, those of numbers at its end; its return and its steps."""
  timestep = stage.reset(seed)
  key, total, over = jax.random.key(seed), 0.0, False
  waiting: list[tuple[Numbers, str]] = []  # their bars are on the scale of the whole episode
  for step in range(max_steps + 1):
    words = f'step {step}   return {total:g}' + ('   end' if over else '')
    frame = stage.frame()
    if isinstance(frame, Numbers):
      waiting.append((frame, words))
    else:
      show(with_words(frame, words))
    if over or step == max_steps:
      break
    action, state = act(timestep, state, jax.random.fold_in(key, step))
    timestep, reward, over = stage.step(action)
    total += reward
  if waiting:
    drawn = numbers([x for x, _ in waiting])
    for picture, (_, words) in zip(drawn, waiting, strict=True):
      show(with_words(picture, words))
  return total, step


def watch(
  run_dir: Path,
  out: Path | None = None,
  episodes: int = 5,
  seed: int = 0,
  sampled: bool = False,
  max_steps: int = 5_000,
  fps: int = 30,
  show: Callable[[np.ndarray], None] | None = None,
  allow_code: Iterable[str] = (),
) -> dict[str, Any]:
  """Films episodes of the newest checkpoint of a run, and keeps the best and the median one.

  Args:
    out: a directory for the videos; None: RUN/videos.
    sampled: acts as in training, not greedily.
    max_steps: of an episode; a longer one is cut.
    show: shows frames instead; nothing is written then.

  Raises:
    UsageError: if there is no run or no checkpoint, if its environment can't be drawn, or if a library is missing.
  """
  if show is None:
    check_libraries()
  config = load_config(run_dir, allow_code)
  agent, _ = evaluable(config)
  step, params, _ = newest_params(config, agent, run_dir)
  if show is None:
    folder = make_folder(run_dir / 'videos') if out is None else make_user_folder(out)
    return film(config, params, folder, step, episodes, seed, sampled, max_steps, fps, tell)
  with _on_stage(config, params, sampled, tell) as (stage, act, begin):
    for i in range(episodes):
      episode(stage, act, begin(), seed + i, max_steps, show)
  return {'step': step, 'episodes': episodes}


@contextlib.contextmanager
def _on_stage(
  config: Config,
  params: Any,
  sampled: bool,
  say: Callable[[str], None] | None,
  elsewhere: str = '',
) -> Iterator[tuple[Stage, Any, Any]]:
  """The environment of a run, or another one, drawn; how its agent acts there; and the state of acting at first."""
  env: Any = host.make(config.env) if config.architecture == 'sebulba' else envs.make(config.env)
  agent = bind_run(config, env)
  if elsewhere:
    env = host.make(elsewhere) if config.architecture == 'sebulba' else envs.make(elsewhere)
  if not sampled and can_be_greedy(agent):
    agent = greedily(agent)
  if config.seeds > 1:  # the first one's
    params = jax.tree.map(lambda x: x[0], params)
  jitted, ids = jax.jit(agent.act), jnp.asarray(spread(1, config.num_envs))

  def act(timestep: Any, state: Any, key: Any) -> tuple[Any, Any]:
    output, state = jitted(params, state, timestep, key)
    return jax.tree.map(np.asarray, output.action), state

  stage = stages.make(elsewhere or config.env, env)
  if stage.note and say is not None:
    say(f'podrace watch: {elsewhere or config.env}: {stage.note}')
  try:
    yield stage, act, lambda: agent.initial_state(ids)
  finally:
    stage.close()


def film(
  config: Config,
  params: Any,
  folder: Path,
  step: int,
  episodes: int,
  seed: int = 0,
  sampled: bool = False,
  max_steps: int = 5_000,
  fps: int = 30,
  say: Callable[[str], None] | None = None,
  env: str = '',
) -> dict[str, Any]:
  """Films episodes of a run's parameters at `step`, and keeps the best and the median one in `folder`.

  Args:
    say: gets a line, where it is the observation that is drawn.
    env: another environment than the run's, with the same spaces.

  Raises:
    UsageError: if the environment can't be drawn.
  """
  with (
    scratch_directory('.draft-', folder) as draft,
    _on_stage(config, params, sampled, say, env) as (stage, act, begin),
  ):
    found = [
      _film(stage, act, begin(), draft, i, seed + i, max_steps, fps) for i in range(episodes)
    ]
    return {'step': step, 'episodes': episodes, **_kept(found, folder, step)}


def _film(
  stage: Stage, act: Any, state: Any, folder: Path, number: int, seed: int, max_steps: int, fps: int
) -> Episode:
  mp4, gif = (folder / f'{number}.{kind}' for kind in ('mp4', 'gif'))
  film = Film(mp4, gif, fps)
  try:
    total, steps = episode(stage, act, state, seed, max_steps, film.add)
  finally:
    film.close()
  return Episode(number, total, steps, mp4, gif)


def _kept(found: list[Episode], folder: Path, step: int) -> dict[str, Any]:
  """Keeps the best and the median episode; of a single one, that."""
  order = sorted(found, key=lambda e: e.episode_return)
  chosen = {'best': order[-1]}
  if len(order) > 1:
    chosen['median'] = order[(len(order) - 1) // 2]
  result: dict[str, Any] = {'returns': [e.episode_return for e in found]}
  for what, e in chosen.items():
    result[what] = {'episode': e.number, 'return': e.episode_return, 'steps': e.steps}
    for kind, path in (('mp4', e.mp4), ('gif', e.gif)):
      target = folder / f'{step}-{what}.{kind}'
      write_whole(target, path.read_bytes())
      result[what][kind] = str(target)
  return result
