"""podrace watch: videos of a run's policy, or a window."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podrace.commands.shared_options import ALLOW_CODE
from podrace.errors import UsageError
from podrace.settings import user_code
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone, tell

COMMAND = Command(
  'watch',
  'RUN [OPTIONS]',
  'plays episodes of the newest checkpoint of a run, and writes the best and the median one as MP4 and GIF',
  (
    Option('--episodes', 'N', 'how many are played', 5),
    Option('--out', 'DIR', 'where the videos go (default RUN/videos)'),
    Option('--sample', '', 'acts as in training (default: greedily, by the best action)'),
    Option('--seed', 'S', 'of the first episode', 0),
    Option('--max-steps', 'N', 'longer episodes are cut', 5000),
    Option('--fps', 'N', 'frames per second; a frame is a step', 30),
    Option('--live', '', 'shows them in a window, and writes nothing'),
    ALLOW_CODE,
  ),
  """
Environments: ale:, gymnasium: and all that are in JAX. Those that don't draw themselves (gymnasium: without rgb_array)
are shown as the agent sees them. The last line printed is JSON.
""",
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Films, or shows."""
  options = Options(args, COMMAND)
  run_dir = Path(options.one_argument('run directory'))
  episodes, fps = options.whole('--episodes'), options.whole('--fps')
  for name, value in (
    ('--episodes', episodes),
    ('--fps', fps),
    ('--max-steps', options.whole('--max-steps')),
  ):
    if value < 1:
      raise UsageError(f'{name} must be at least 1, not {value}')
  show = window(fps) if '--live' in options else None
  allowed = options.every('--allow-code')
  user_code.look_here(allowed)
  from podrace.run.video import film

  found = film.watch(
    run_dir, options.path('--out'), episodes, options.whole('--seed'), '--sample' in options,
    options.whole('--max-steps'), fps, show, allowed,
  )  # fmt: skip
  if show is None:
    best = found['best']
    tell(f'best of {episodes}: return {best["return"]:g} in {best["steps"]:,} steps, {best["mp4"]}')
  print_json(found)
  return 0


def window(fps: int) -> Callable[[Any], None]:
  """A window that shows frames; it can be closed, which ends the command."""
  if not (os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY')):
    raise UsageError('--live needs a display, and there is none here: leave it out for videos')
  try:
    import tkinter

    from PIL import Image, ImageTk
  except ImportError as e:
    raise UsageError(f'--live needs tkinter and Pillow: {e}') from e
  import time

  root = tkinter.Tk()
  root.title('podrace watch')
  label = tkinter.Label(root)
  label.pack()
  due = time.monotonic()

  def show(picture: Any) -> None:
    nonlocal due
    image = ImageTk.PhotoImage(Image.fromarray(picture))
    try:
      label.configure(image=image)
      label.image = image  # type: ignore[attr-defined]  # else Tk forgets it
      due = max(due + 1 / fps, time.monotonic())
      while (left := due - time.monotonic()) > 0:
        root.update()
        time.sleep(min(left, 0.01))
      root.update()
    except tkinter.TclError:  # it was closed
      raise KeyboardInterrupt from None

  return show
