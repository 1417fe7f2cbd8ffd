"""podrace watch: show a run's policy in videos or in a window."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.commands.shared_options import ALLOW_CODE, CHECKPOINT, allowed_modules
from podrace.errors import UsageError
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone, tell

COMMAND = Command(
  'watch',
  'RUN [OPTIONS]',
  'play episodes with a checkpoint of a run, and write the best and the median episode as '
  'MP4 and GIF',
  (
    Option('--episodes', 'N', 'number of episodes', 5),
    Option('--out', 'DIR', 'directory of the videos (default RUN/videos)'),
    Option('--sample', '', 'sample actions as in training (default: greedy, with the best action)'),
    Option('--seed', 'S', 'seed of the first episode', 0),
    Option('--max-steps', 'N', 'cut longer episodes', 5000),
    Option('--fps', 'N', 'frames (steps) per second; 0: 30, fewer for short episodes', 0,
      high=1000),
    Option('--live', '', 'show the episodes in a window, and write nothing'),
    Option('--member', 'I', 'index of the seed, from 0, in a run with --seeds', 0),
    CHECKPOINT,
    ALLOW_CODE,
  ),
  """
Environments: ale:, gymnasium:, c: and all in JAX. An environment that cannot draw itself
(gymnasium: without rgb_array) is shown as the agent sees it. The last line printed is JSON.
""",
  jax=True,
  foreign={
    '--out DIR': 'output output-dir video-dir video-folder',
    '--episodes': 'n-episodes num-episodes',
    '--sample': 'stochastic explore',
    '--max-steps': 'video-length max-episode-steps',
    '--live': 'render render-mode human show',
    'podrace watch RUN, without an option': 'model model-path load run-dir env',
  },
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Write videos, or open the window."""
  options = Options(args, COMMAND)
  run_dir = Path(options.one_argument('run directory'))
  episodes, fps, max_steps = map(options.whole, ('--episodes', '--fps', '--max-steps'))
  for name, value in (('--episodes', episodes), ('--max-steps', max_steps)):
    if value < 1:
      raise UsageError(f'{name} must be at least 1, not {value}')
  if {'--live', '--out'} <= {*options.names}:
    raise UsageError('--live writes nothing: leave out --out')
  show = window(fps or 30) if '--live' in options else None
  allowed = allowed_modules(options)
  from podrace.run.video import film

  seed, sampled = options.whole('--seed'), '--sample' in options
  settings = film.FilmSettings(episodes, seed, sampled, max_steps, fps)
  out, checkpoint = options.path('--out'), options.text('--checkpoint')
  member = options.whole('--member')
  result = film.watch(run_dir, out, settings, show, allowed, checkpoint, member)
  if show is None:
    best = result['best']
    tell(f'best of {episodes}: return {best["return"]:g} in {best["steps"]:,} steps, {best["mp4"]}')
  print_json(result)
  return 0


def window(fps: int) -> Callable[[Any], None]:
  """Return a function that shows a frame in a window; closing the window ends the command."""
  if not (os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY')):
    raise UsageError('--live needs a display, and this session has none: leave it out for videos')
  try:
    import tkinter

    from PIL import Image, ImageTk
  except ImportError as e:
    raise UsageError(f'--live needs tkinter and Pillow: {e}') from e
  import time

  try:
    root = tkinter.Tk()
  except tkinter.TclError as e:
    raise UsageError(f'--live: {e}') from e
  root.title('podrace watch')
  label = tkinter.Label(root)
  label.pack()
  due = time.monotonic()

  def show(picture: Any) -> None:
    nonlocal due
    image = ImageTk.PhotoImage(Image.fromarray(picture))
    try:
      label.configure(image=image)
      label.image = image  # type: ignore[attr-defined]  # a reference, else Tk drops the image
      due = max(due + 1 / fps, time.monotonic())
      while (left := due - time.monotonic()) > 0:
        root.update()
        time.sleep(min(left, 0.01))
      root.update()
    except tkinter.TclError:  # the window is closed
      raise KeyboardInterrupt from None

  return show
