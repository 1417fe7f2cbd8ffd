"""Checks of an environment in C in a process of its own, which a crash ends. Imports no JAX."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from podrace.envs.host.spaces import allowed_choices, best_choices
from podrace.envs.native.library import TEXT, EnvironmentLibrary, NativeSpec, text_of
from podrace.envs.spaces import bounds
from podrace.envs.timestep_rules import choices_of, is_outside
from podrace.errors import UsageError
from podrace.system.child import import_path, python

STEPS = 100  # of each part of the check
SPEC_SECONDS = 60.0
END_SECONDS = 5.0  # time for the output of killed processes to end
START = (
  'import json, sys; settings = json.load(sys.stdin); sys.path[:] = settings["path"]; '
  'import podrace.envs.native.trial as trial; trial.main(settings)'
)
RANDOMNESS = (
  'Keep all state in the environment, draw from a generator that podrace_reset seeds (no rand(), '
  'no time, no global variable), and write every byte of the observation'
)


def run_trial(
  name: str, library: Path, options: bytes, deadline: float | None = None
) -> NativeSpec:
  """Read an environment's specification in a process of its own, and check the environment.

  The checks: equal seeds and actions make equal bytes, in whatever order environments step and
  into whatever memory they write. A state that was saved and loaded goes on with equal bytes.

  Args:
    name: of the environment, for messages.
    library: the shared library.
    options: JSON.
    deadline: seconds for the checks; None: read the specification only.

  Raises:
    UsageError: if it breaks the interface, crashes or hangs; the message names the function.
  """
  settings = dict(
    name=name, library=str(library.absolute()), options=options.decode(),
    check=deadline is not None,
    path=import_path(),
  )  # fmt: skip
  seconds = SPEC_SECONDS if deadline is None else SPEC_SECONDS + deadline
  child = subprocess.Popen(
    python('-c', START), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
  )
  try:
    text, _ = child.communicate(json.dumps(settings).encode(), seconds)
  except subprocess.TimeoutExpired as error:
    place = _place(_kill(child))
    raise UsageError(f'{name} did not answer for {seconds:g} s{place}') from error
  except BaseException:
    _kill(child)
    raise
  return _result(name, text, child.returncode)


def _kill(child: subprocess.Popen[bytes]) -> bytes:
  """Kill a process and its process group, and return its output."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(child.pid, signal.SIGKILL)
  try:
    return child.communicate(timeout=END_SECONDS)[0]
  except subprocess.TimeoutExpired as error:  # a process with a session of its own has the pipe
    return error.stdout or b''


def _place(text: bytes) -> str:
  """Return where a trial was, from its output."""
  lines = text.decode(errors='replace').split('\n')
  return f', in {lines[-2]}' if len(lines) > 1 else ''


def _result(name: str, text: bytes, code: int) -> NativeSpec:
  if code:
    reason = signal.Signals(-code).name if code < 0 else f'exit code {code}'
    raise UsageError(
      f'{name} crashed when it was tried out{_place(text)}: {reason}. Compile it with -g '
      f'-fsanitize=address to see where'
    )
  last = text.decode(errors='replace').split('\n')[-1]
  if not last:
    raise UsageError(f'{name} ended its process{_place(text)}: it must not call exit')
  result = json.loads(last)
  if 'error' in result:
    raise UsageError(result['error'])
  return NativeSpec.from_json(result['spec'])


def main(settings: Mapping[str, Any]) -> None:
  """Read and check an environment. Prints the functions that it calls, and a result as JSON."""
  output = os.dup(1)
  os.dup2(2, 1)  # the environment may print

  def say(text: str) -> None:
    os.write(output, text.encode())

  try:
    options = settings['options'].encode()
    say('podrace_spec_of\n')
    library = EnvironmentLibrary(Path(settings['library']), settings['name'])
    spec = library.spec(options)
    if settings['check']:
      check(library, spec, options, lambda function: say(f'podrace_{function}\n'))
    result: dict[str, Any] = dict(spec=spec.to_json())
  except UsageError as error:
    result = dict(error=str(error))
  say(json.dumps(result))
  os._exit(0)  # without destructors of the library


# --- the checks -----------------------------------------------------------------------------------


class OneEnvironment:
  """One environment, called directly.

  Owner: its creator, which calls `close`.
  """

  def __init__(
    self, library: EnvironmentLibrary, spec: NativeSpec, options: bytes, say: Any
  ) -> None:
    self._spec, self._name, self._say = spec, library.name, say
    addresses = library.functions()
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    void = functools.partial(ctypes.CFUNCTYPE, None)
    types: dict[str, Any] = dict(
      create=ctypes.CFUNCTYPE(pointer, ctypes.c_char_p, ctypes.c_char_p, size),
      reset=void(pointer, ctypes.c_uint64, pointer),
      step=void(pointer, pointer, pointer, pointer, pointer),
      close=void(pointer),
      save=ctypes.CFUNCTYPE(ctypes.c_int64, pointer, pointer),
      load=ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, ctypes.c_int64),
    )
    self._do = {k: t(getattr(addresses, k)) for k, t in types.items() if getattr(addresses, k)}
    self._observation = np.zeros(spec.obs_bytes, np.uint8)
    self._choices: list[tuple[str, Any]] = [
      (a.name, bounds(a.space())) for a in spec.observation if a.choices or a.dtype == 'bool'
    ]
    self._result = np.zeros(1, RESULT)
    self._info = np.zeros(max(len(spec.info), 1), np.float32)
    error = ctypes.create_string_buffer(TEXT)
    say('create')
    self._env = self._do['create'](options, error, TEXT)
    if not self._env:
      raise UsageError(f'{self._name}: {text_of(error)}')
    self.over = True

  def arrays(self) -> dict[str, np.ndarray]:
    """Return the arrays of the last observation."""
    offsets = self._spec.offsets()
    return {
      a.name: self._observation[o : o + a.bytes]
      .view(np.uint8 if a.dtype == 'bool' else a.dtype)
      .reshape(a.shape)
      for a, o in zip(self._spec.observation, offsets, strict=True)
    }

  def bytes(self) -> bytes:
    """Return the arrays of the last observation and the result, without padding."""
    flags = self._result[['reward', 'score', 'terminated', 'truncated']]
    return b''.join(x.tobytes() for x in self.arrays().values()) + repr(flags.tolist()).encode()

  def reset(self, seed: int, fill: int) -> None:
    """Begin an episode. The memory of the observation has the bytes `fill` before."""
    self._observation[:], self._result[:], self.over = fill, np.zeros((), RESULT), False
    self._say('reset')
    self._do['reset'](self._env, seed, self._observation.ctypes.data)
    self._check_choices('reset')

  def step(self, action: np.ndarray, fill: int) -> None:
    """Take an action."""
    self._observation[:], self._result[:], self._info[:] = fill, np.zeros((), RESULT), np.nan
    self._result['score'] = np.nan
    self._do['step'](
      self._env, action.ctypes.data, self._observation.ctypes.data, self._result.ctypes.data,
      self._info.ctypes.data,
    )  # fmt: skip
    self._check_choices('step')
    self.over = bool(self._result['terminated'][0] or self._result['truncated'][0])

  def _check_choices(self, function: str) -> None:
    arrays = self.arrays() if self._choices else {}
    for name, (low, high) in self._choices:
      outside = is_outside(arrays[name], low, high)
      if outside.any():
        came, least, most = (
          np.broadcast_to(x, outside.shape)[outside][0] for x in (arrays[name], low, high)
        )
        part = f'{name} of the observation' if name else 'the observation'
        raise UsageError(
          f'{self._name}: podrace_{function} wrote {came} to {part}, expected {least} to {most}, '
          'as podrace_spec_of declares'
        )

  def save(self) -> np.ndarray:
    """Return the state.

    Raises:
      UsageError: if its size is out of range.
    """
    state = np.zeros(self._spec.state_bytes, np.uint8)
    self._say('save')
    size = self._do['save'](self._env, state.ctypes.data)
    if not 0 <= size <= len(state):
      raise UsageError(
        f'{self._name}: podrace_save returned {size}, expected 0 to {len(state)} bytes, which is '
        'state_bytes'
      )
    return state[:size]

  def load(self, state: np.ndarray) -> None:
    """Load a state.

    Raises:
      UsageError: if it refuses it.
    """
    self._say('load')
    code = self._do['load'](self._env, state.ctypes.data, len(state))
    if code:
      raise UsageError(
        f'{self._name}: podrace_load returned {code} for a state of podrace_save, expected 0'
      )

  def close(self) -> None:
    """Close the environment."""
    self._say('close')
    self._do['close'](self._env)


RESULT = np.dtype(
  dict(
    names=['reward', 'score', 'terminated', 'truncated'],
    formats=['<f4', '<f4', 'u1', 'u1'], offsets=[0, 4, 8, 9], itemsize=16,
  )
)  # fmt: skip


def random_action(spec: NativeSpec, arrays: Mapping[str, np.ndarray], rng: Any) -> np.ndarray:
  """Return a random action, allowed by the action mask if there is one."""
  a = spec.action
  box = a.space()
  if choices := sum(choices_of(box)):
    scores, mask = rng.random((1, choices)), allowed_choices(box, arrays, 1)
    return np.asarray(best_choices(box, scores if mask is None else scores * mask)[0])
  lowest, highest = box.low.astype(np.float64), box.high.astype(np.float64)
  low = np.maximum(lowest, np.where(highest < -10, highest - 20, -10))  # near 0, if they can be
  high = np.minimum(highest, np.where(lowest > 10, lowest + 20, 10))
  return np.asarray(rng.uniform(low, high)).astype(a.dtype)


def check(library: EnvironmentLibrary, spec: NativeSpec, options: bytes, say: Any) -> None:
  """Check an environment.

  Raises:
    UsageError: if it does not repeat, or does not go on from a saved state.
  """
  make = functools.partial(OneEnvironment, library, spec, options, say)
  with contextlib.ExitStack() as stack:
    one, two, three = (stack.enter_context(contextlib.closing(make())) for _ in range(3))
    alone = {seed: _play_together(spec, {seed: one}, 0x00)[seed] for seed in (1, 2)}
    together = _play_together(spec, {2: two, 1: three}, 0xA5)
    for seed, stream in alone.items():
      _compare(library.name, stream, together[seed])
    if spec.state_bytes:
      _check_saves(library.name, spec, one, three)


def _play_together(
  spec: NativeSpec, envs: Mapping[int, OneEnvironment], fill: int
) -> dict[int, list[bytes]]:
  """Return the bytes of episodes by seed, at most STEPS long, stepped in turn."""
  rngs = {seed: np.random.default_rng(seed) for seed in envs}
  streams: dict[int, list[bytes]] = {}
  for seed, env in envs.items():
    env.reset(seed, fill)
    streams[seed] = [env.bytes()]
    env._say('step')
  for _ in range(STEPS):
    for seed, env in envs.items():
      if not env.over:
        env.step(random_action(spec, env.arrays(), rngs[seed]), fill)
        streams[seed].append(env.bytes())
  return streams


def _compare(name: str, one: list[bytes], other: list[bytes]) -> None:
  if one == other:
    return
  t = next((t for t, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
  at = 'step' if t else 'reset'
  at = f'podrace_{at} returned other bytes at step {min(len(one), len(other)) if t is None else t}'
  raise UsageError(
    f'{name} is not deterministic: with equal seed and actions {at}, when environments stepped in '
    f'another order. {RANDOMNESS}'
  )


def _check_saves(name: str, spec: NativeSpec, one: OneEnvironment, other: OneEnvironment) -> None:
  """Save after some steps, go on, load into another environment, and go on alike."""
  rng = np.random.default_rng(0)
  one.reset(3, 0)
  other.reset(4, 0)
  one._say('step')
  for _ in range(5):
    if not one.over:
      before = one.arrays()
      one.step(random_action(spec, before, rng), 0)
  over, arrays = one.over, {k: x.copy() for k, x in one.arrays().items()}
  state = one.save()
  streams = []
  for env in (one, other):
    if env is other:
      env.load(state)
    env.over = over
    rng, stream, seen, seed = np.random.default_rng(5), list[bytes](), arrays, 5
    env._say('step')
    for _ in range(STEPS):
      if env.over:
        seed += 1
        env.reset(seed, 0)
      else:
        env.step(random_action(spec, seen, rng), 0)
      seen = env.arrays()
      stream.append(env.bytes())
    streams.append(stream)
  if streams[0] != streams[1]:
    t = next(t for t, (x, y) in enumerate(zip(*streams, strict=True)) if x != y)
    raise UsageError(
      f'{name}: a state that was saved and loaded went on with other bytes, at step {t} after it: '
      'podrace_save must write all of the state, with that of the random numbers'
    )
