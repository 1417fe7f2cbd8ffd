"""Videos of a trained policy: episodes with captions of step and return, as MP4 and GIF."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace.errors import UsageError
from podrace.hooks import check_greedy, greedily
from podrace.run.directory import load_config
from podrace.run.evaluate import acting_key, stage_of
from podrace.run.evaluate_host import spread_env_ids
from podrace.run.saved_params import restore_params
from podrace.run.video import stages
from podrace.run.video.pictures import NumericObservation, draw_numbers, enlarge
from podrace.run.video.stages import Stage
from podrace.settings.resolved import Resolved
from podrace.system.files import make_folder, make_user_folder, write_whole
from podrace.system.files.schema import NEWEST
from podrace.system.importing import why_not
from podrace.system.output import tell
from podrace.system.process import scratch_directory

BAR = 24  # height of the caption above a picture, in pixels
GIF_FRAMES = 600  # most frames; longer episodes lose frames evenly
GIF_WIDTH = 320
RATES = 2, 30  # least and largest frames per second that are chosen for an episode
SECONDS = 4  # that a short episode should last
HOLD = 1  # second that the last frame is shown for


@dataclasses.dataclass
class Episode:
  """One filmed episode and its files."""

  number: int
  episode_return: float
  steps: int
  mp4: Path
  gif: Path


@dataclasses.dataclass(frozen=True)
class FilmSettings:
  """How episodes are played and filmed.

  Attributes:
    episodes: number of episodes.
    seed: seed of the first episode. Each further one adds 1.
    sampled: whether to act as in training instead of greedily.
    max_steps: number of steps after which an episode is cut.
    fps: frames per second; 0: 30, and fewer for short episodes, so that a person can follow.
  """

  episodes: int = 5
  seed: int = 0
  sampled: bool = False
  max_steps: int = 5_000
  fps: int = 0

  def __post_init__(self) -> None:
    if not 0 <= self.seed <= 2**32 - self.episodes:
      raise UsageError(
        f'--seed must be at most {2**32 - self.episodes} for {self.episodes} episodes, not '
        f'{self.seed}'
      )

  @property
  def suffix(self) -> str:
    """The settings other than the defaults, in names of files, as -sampled-seed9.

    Films of other settings stay.
    """
    values = {k: getattr(self, k) for k in ('sampled', 'seed', 'episodes', 'max_steps', 'fps')}
    others = {k: v for k, v in values.items() if v != getattr(FilmSettings, k)}
    return ''.join(f'-{k.replace("_", "-")}{"" if v is True else v}' for k, v in others.items())


class Film:
  """An MP4 and a GIF that are being written."""

  def __init__(self, mp4: Path, gif: Path, fps: int) -> None:
    import av

    self._gif, self._fps = gif, fps
    self._early: list[np.ndarray] = []  # frames before the rate is known
    self._container = av.open(str(mp4.absolute()), 'w')  # FFmpeg takes `a:b` for a protocol
    self._stream: Any = None
    self._kept: list[Any] = []  # frames of the GIF: one of each `_every`
    self._every, self._count = 1, 0

  def add(self, picture: np.ndarray) -> None:
    """Append a frame [H, W, 3] u8. All frames have the same size."""
    if self._fps:
      self._write(picture)
      return
    self._early.append(picture)
    if len(self._early) >= RATES[1] * SECONDS:
      self._choose_rate()

  def _choose_rate(self) -> None:
    least, largest = RATES
    self._fps = min(largest, max(least, round(len(self._early) / SECONDS)))
    for picture in self._early:
      self._write(picture)
    self._early = []

  def _write(self, picture: np.ndarray) -> None:
    import av
    from PIL import Image

    picture = pad_to_even(picture)
    self._last = picture
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
    """Write the remaining frames, hold the last one, and close both files."""
    if self._early:
      self._choose_rate()
    if self._stream is not None:
      for _ in range(HOLD * self._fps):
        self._write(self._last)
      for packet in self._stream.encode():
        self._container.mux(packet)
    self._container.close()
    if self._kept:
      first, *rest = self._kept
      # viewers ignore durations below 20 ms
      milliseconds = max(20, round(1000 * self._every / self._fps))
      first.save(self._gif, save_all=True, append_images=rest, duration=milliseconds, loop=0)


def pad_to_even(picture: np.ndarray) -> np.ndarray:
  """Pad a picture to even sides, as H.264 requires."""
  h, w = picture.shape[:2]
  return np.ascontiguousarray(np.pad(picture, ((0, h % 2), (0, w % 2), (0, 0))))


def add_caption(picture: np.ndarray, words: str) -> np.ndarray:
  """Return the picture below a bar with `words`."""
  from PIL import Image, ImageDraw

  image = Image.new('RGB', (max(picture.shape[1], 200), picture.shape[0] + BAR))
  image.paste(Image.fromarray(picture), (0, BAR))
  ImageDraw.Draw(image).text((6, 6), words, fill=(255, 255, 255))
  return np.asarray(image)


def check_libraries() -> None:
  """Raise UsageError if a library that writes videos is missing."""
  try:
    import av  # noqa: F401
    import PIL  # noqa: F401
  except Exception as e:
    raise UsageError(why_not('a video', 'video', e)) from e


def check_filming(resolved: Resolved, env: str = '') -> None:
  """Raise UsageError if the run's environment, or the one named `env`, cannot be filmed."""
  check_libraries()
  config, made = resolved.config, resolved.make_env(env) if env else resolved.env
  stages.make_stage(env or config.env, made, config.env_deadline).close()


def play_episode(
  stage: Stage,
  act: Callable[[Any, Any, Any], tuple[Any, Any]],
  state: Any,
  seed: int,
  max_steps: int,
  show: Callable[[np.ndarray], None],
) -> tuple[float, int]:
  """Play one episode and show each of its frames. Frames of numbers are shown at its end.

  Args:
    stage: environment to play in.
    act: function from timestep, state and key to action and state.
    state: the agent's state at the beginning.
    seed: seed of the environment and the actions.
    max_steps: number of steps after which the episode is cut.
    show: receives each frame [H, W, 3] u8.

  Returns:
    The return and the number of steps.
  """
  timestep = stage.reset(seed)
  key, total, over = acting_key(seed), 0.0, False
  # bars need the ranges of the whole episode
  waiting: list[tuple[NumericObservation, str]] = []
  for step in range(max_steps + 1):
    words = f'step {step}   return {total:g}' + ('   end' if over else '')
    frame = stage.frame()
    if isinstance(frame, NumericObservation):
      waiting.append((frame, words))
    else:
      show(add_caption(enlarge(frame), words))
    if over or step == max_steps:
      break
    action, state = act(timestep, state, jax.random.fold_in(key, step))
    timestep, reward, over = stage.step(action)
    total += reward
  if waiting:
    drawn = draw_numbers([x for x, _ in waiting])
    for picture, (_, words) in zip(drawn, waiting, strict=True):
      show(add_caption(picture, words))
  return total, step


def watch(
  run_dir: Path,
  out: Path | None = None,
  settings: FilmSettings = FilmSettings(),
  show: Callable[[np.ndarray], None] | None = None,
  allow_code: Iterable[str] = (),
  checkpoint: str | int = NEWEST,
  member: int = 0,
) -> dict[str, Any]:
  """Film episodes of a run's policy, and keep the best and the median one.

  Args:
    run_dir: directory of the run.
    out: directory of the videos. Default: RUN/videos.
    settings: how to play and film.
    show: receives the frames, and no file is written. Default: write files.
    allow_code: modules of the user that the run may import.
    checkpoint: newest, best or a step.
    member: index of the seed, in a run with several.

  Raises:
    UsageError: if there is no run, checkpoint or seed, the environment cannot be drawn, or a
      library is missing.
  """
  if show is None:
    check_libraries()
  resolved = Resolved(load_config(run_dir, allow_code), run_dir).acting
  stage_of(resolved)  # a user's environment may have changed since training
  step, params, _ = restore_params(resolved, run_dir, checkpoint, member)
  if show is None:
    folder = make_folder(run_dir / 'videos') if out is None else make_user_folder(out)
    suffix = f'-member{member}' if member else ''
    return film(resolved, params, folder, step, settings, tell, suffix=suffix + settings.suffix)
  with _open_stage(resolved, params, settings.sampled, tell) as (stage, act, begin):
    for i in range(settings.episodes):
      play_episode(stage, act, begin(), settings.seed + i, settings.max_steps, show)
  return {'step': step, 'episodes': settings.episodes}


@contextlib.contextmanager
def _open_stage(
  resolved: Resolved,
  params: Any,
  sampled: bool,
  say: Callable[[str], None] | None,
  other_env: str = '',
) -> Iterator[tuple[Stage, Any, Any]]:
  """Return a drawn environment, a function that acts there, and one that returns the first state.

  The arguments are as of `film`.
  """
  config, agent, env = resolved.config, resolved.agent, resolved.env
  if other_env:
    env = resolved.make_env(other_env)
  if not sampled:
    check_greedy(agent, 'watch it with --sample')
    agent = greedily(agent)
  jitted, ids = jax.jit(agent.act), jnp.asarray(spread_env_ids(1, config.num_envs))

  def act(timestep: Any, state: Any, key: Any) -> tuple[Any, Any]:
    output, state = jitted(params, state, timestep, key)
    return jax.tree.map(np.asarray, output.action), state

  name = other_env or config.env
  stage = stages.NamedStage(name, stages.make_stage(name, env, config.env_deadline))
  if stage.note and say is not None:
    say(f'podrace watch: {name}: {stage.note}')
  try:
    yield stage, act, lambda: agent.initial_state(ids)
  finally:
    stage.close()


def film(
  resolved: Resolved,
  params: Any,
  folder: Path,
  step: int,
  settings: FilmSettings,
  say: Callable[[str], None] | None = None,
  env: str = '',
  suffix: str = '',
) -> dict[str, Any]:
  """Film episodes of parameters, and keep the best and the median one in `folder`.

  Args:
    resolved: configuration of the run.
    params: parameters of its agent, of one seed.
    folder: directory of the videos.
    step: step of the parameters, for the names of the files.
    settings: how to play and film.
    say: receives the progress, and a note if the observation is drawn.
    env: another environment with the same spaces. Default: the run's own.
    suffix: end of the names of the files.

  Raises:
    UsageError: if the environment cannot be drawn.
  """
  with (
    scratch_directory('.draft-', folder) as draft,
    _open_stage(resolved, params, settings.sampled, say, env) as (stage, act, begin),
  ):
    films = []
    if say is not None:
      where = env or resolved.config.env
      say(f'step {step:,}, {where}: compiling, then filming (episodes: {settings.episodes}) ...')
    for number in range(settings.episodes):
      one = _film_episode(stage, act, begin(), draft, number, settings)
      films.append(one)
      if say is not None:
        place = f'episode {number + 1} of {settings.episodes}'
        say(f'{place}: return {one.episode_return:g} in {one.steps:,} steps')
    kept = _keep_best_and_median(films, folder, step, suffix)
    return {'step': step, 'episodes': settings.episodes, **kept}


def _film_episode(
  stage: Stage, act: Any, state: Any, folder: Path, number: int, settings: FilmSettings
) -> Episode:
  mp4, gif = (folder / f'{number}.{kind}' for kind in ('mp4', 'gif'))
  film, seed = Film(mp4, gif, settings.fps), settings.seed + number
  try:
    total, steps = play_episode(stage, act, state, seed, settings.max_steps, film.add)
  finally:
    film.close()
  return Episode(number, total, steps, mp4, gif)


def _keep_best_and_median(
  films: list[Episode], folder: Path, step: int, suffix: str
) -> dict[str, Any]:
  """Move the best and the median episode to `folder`, or the only one."""
  order = sorted(films, key=lambda e: e.episode_return)
  chosen = {'best': order[-1]}
  if len(order) > 1:
    chosen['median'] = order[(len(order) - 1) // 2]
  result: dict[str, Any] = {'returns': [e.episode_return for e in films]}
  for rank, e in chosen.items():
    result[rank] = {'episode': e.number, 'return': e.episode_return, 'steps': e.steps}
    for kind, path in (('mp4', e.mp4), ('gif', e.gif)):
      target = folder / f'{step}-{rank}{suffix}.{kind}'
      write_whole(target, path.read_bytes())
      result[rank][kind] = str(target)
  return result
