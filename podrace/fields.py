"""Fields of settings: roles of texts, types, ranges, paths and spellings.

Importing this imports nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import struct
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

C = typing.TypeVar('C', bound=Any)  # a dataclass


@dataclasses.dataclass(frozen=True)
class Role:
  """The role of a text, in `Annotated`; `podrace.settings.user_code` reads it."""

  name: str


EnvName = Annotated[str, Role('environment')]  # LIB:NAME, or a list separated by blanks
ClassName = Annotated[str, Role('class')]  # MODULE:CLASS, or the name of an agent
FilePath = Annotated[str, Role('file')]  # a file or a run directory, read as data
PlainText = Annotated[str, Role('text')]  # a text that is never imported or opened

TEXTS = ('EnvName', 'ClassName', 'FilePath', 'PlainText')  # the types of texts that have a role

KINDS: dict[str, tuple[type, str]] = {
  'float': (numbers.Real, 'a number'),
  'int': (numbers.Integral, 'a whole number'),
  'bool': (bool, 'True or False'),
  **dict.fromkeys(('str', *TEXTS), (str, 'a text')),
}


def check_types(settings: Any) -> None:
  """Raise ValueError for the first field with a value of another type than declared.

  Skips arrays. Of classes that are not podrace's it checks float, int, bool and str only.
  """
  hints = _hints(settings.__class__)
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    if hasattr(value, 'dtype') and not isinstance(value, numbers.Number):
      continue
    if field.name in hints:
      wrong = mismatch(value, hints[field.name])
    else:
      declared = field.type if isinstance(field.type, str) else getattr(field.type, '__name__', '')
      kind = KINDS.get(declared.removeprefix('Annotated[').partition(',')[0])
      wrong = '' if kind is None or _is_instance(value, kind[0]) else kind[1]
    if wrong:
      raise ValueError(
        f'{field.name.rstrip("_")} of {type(settings).__name__} must be {wrong}, not {value!r:.200}'
      )


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
  """Return the types of the fields of one of podrace's classes; empty for any other."""
  return (
    typing.get_type_hints(cls, include_extras=True) if cls.__module__.startswith('podrace.') else {}
  )


def _is_instance(value: Any, kind: type) -> bool:
  return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def role_of(declared: Any) -> str:
  """Return the name of the role that a type declares; 'choice' for a Literal, '' for none."""
  if typing.get_origin(declared) is Literal:
    return 'choice'
  roles = [x for x in getattr(declared, '__metadata__', ()) if isinstance(x, Role)]
  return roles[0].name if roles else ''


def item_types(declared: Any, count: int) -> list[Any]:
  """Return the types of the `count` items of a value of type `declared`; None if unknown."""
  of = typing.get_args(declared) if typing.get_origin(declared) is tuple else ()
  if len(of) == 2 and of[1] is Ellipsis:
    return [of[0]] * count
  return list(of) if len(of) == count else [None] * count


def mismatch(value: Any, declared: Any) -> str:
  """Return a description of `declared` if a value does not have that type, else ''.

  The value is that of a field, or from JSON, with lists for tuples and objects for dataclasses.
  Does not compare types that JSON does not have, such as arrays and classes of users.
  """
  origin, args = typing.get_origin(declared), typing.get_args(declared)
  if origin is Annotated:
    return mismatch(value, args[0])
  if origin is Literal:
    fits = any(type(value) is type(x) and value == x for x in args)
    return '' if fits else f'one of {", ".join(map(repr, args))}'
  if origin in (typing.Union, types.UnionType):
    wrong = [mismatch(value, x) for x in args]
    return '' if '' in wrong else ' or '.join(wrong)
  if origin is tuple:
    if not isinstance(value, list | tuple) or (
      args[-1] is not Ellipsis and len(value) != len(args)
    ):
      return 'a list' if args[-1] is Ellipsis else f'a list of {len(args)}'
    each = zip(value, item_types(declared, len(value)), strict=True)
    return next((f'a list, each of it {x}' for v, t in each if (x := mismatch(v, t))), '')
  if declared is type(None):
    return '' if value is None else 'null'
  kind = KINDS.get(declared.__name__) if isinstance(declared, type) else None
  if kind is not None:
    return '' if _is_instance(value, kind[0]) else kind[1]
  plain = value is None or isinstance(value, str | numbers.Number | list | tuple)
  return 'an object' if dataclasses.is_dataclass(declared) and plain else ''


# --- ranges -------------------------------------------------------------------------------------


class Range(NamedTuple):
  """The numbers that a setting may have."""

  low: float = -math.inf
  high: float = math.inf
  without_low: bool = False
  without_high: bool = False
  is_limit: bool = False  # 0 and infinity mean no limit

  def __contains__(self, value: object) -> bool:
    assert isinstance(value, numbers.Real)
    number = float(value)
    if self.is_limit and 0 < abs(number) < SMALLEST:
      return False  # a device would take it for 0, which means no limit
    x = 0.0 if abs(number) < SMALLEST else number  # as in float32
    above = x > self.low if self.without_low else x >= self.low
    return above and (_as_float32(x) < self.high if self.without_high else x <= self.high)

  def __str__(self) -> str:
    low = f'more than {self.low:g}' if self.without_low else f'at least {self.low:g}'
    if self.is_limit:
      low += f', and not between 0 and {SMALLEST:g}'
    if self.high == math.inf:
      return low
    if self.without_low or self.without_high:
      return f'{low} and {"less than" if self.without_high else "at most"} {self.high:g}'
    return f'within [{self.low:g}, {self.high:g}]'


def _as_float32(x: float) -> float:
  try:
    return float(struct.unpack('f', struct.pack('f', x))[0])
  except OverflowError:
    return math.copysign(math.inf, x)


SMALLEST = 2.0**-126  # devices flush smaller numbers to 0
ANY, COST, SHARE, COUNT, OPTIONAL = Range(), Range(0), Range(0, 1), Range(1), Range(0)
POSITIVE = Range(0, without_low=True)  # a learning rate of 0 learns nothing
LIMIT = Range(0, is_limit=True)
DECAY = Range(0, 1, without_high=True)  # a moving average with a decay of 1 never moves
FOLLOWING = Range(0, 1, without_low=True)  # a target with a rate of 0 never moves
EPSILON = Range(1e-30)  # a divisor: with 0 a gradient of 0 becomes NaN

RANGES: Mapping[str, Range] = {
  # By the name of a field, which has one meaning in all classes; exceptions are CLASS.FIELD.
  **dict.fromkeys(('learning_rate', 'actor_learning_rate', 'critic_learning_rate'), POSITIVE),
  **dict.fromkeys(('temperature_learning_rate', 'value_learning_rate'), POSITIVE),
  **dict.fromkeys(('policy_learning_rate', 'initial_temperature', 'rescale_epsilon'), POSITIVE),
  **dict.fromkeys(('dirichlet_alpha', 'sampled_temperature', 'max_value'), POSITIVE),
  **dict.fromkeys(('samples_per_insert', 'replay_ratio'), POSITIVE),
  **dict.fromkeys(('max_grad_norm', 'max_update', 'clip', 'clip_value'), LIMIT),
  **dict.fromkeys(('clip_rho', 'clip_pg_rho', 'clip_advantage'), LIMIT),
  **dict.fromkeys(('rmsprop_decay', 'advantage_decay', 'moments_decay', 'decay'), DECAY),
  'replay_share': DECAY,  # with 1 a batch has no new data
  'policy_mean_rate': DECAY,  # with 1 every reward is its own mean, so it teaches nothing
  'target_rate': FOLLOWING,
  'PopArt.rate': FOLLOWING,
  **dict.fromkeys(('min_std', 'max_std'), POSITIVE),
  **dict.fromkeys(('adam_epsilon', 'advantage_epsilon', 'Impala.epsilon'), EPSILON),
  **dict.fromkeys(('discount', 'policy_discount', 'lambda_', 'clip_mix', 'max_share'), SHARE),
  **dict.fromkeys(('epsilon', 'epsilon_base', 'reanalyse', 'dirichlet_fraction'), SHARE),
  **dict.fromkeys(('epsilon_start', 'epsilon_share', 'noise_correlation'), SHARE),
  **dict.fromkeys(('priority_exponent', 'importance_exponent'), SHARE),
  **dict.fromkeys(('online_share', 'online_share_end'), SHARE),
  'MuZero.discount': Range(-1, 1),  # below 0: games of two players
  **dict.fromkeys(('policy_cost', 'value_cost', 'reward_cost', 'entropy_cost', 'kl_cost'), COST),
  **dict.fromkeys(('y_cost', 'z_cost', 'next_policy_cost', 'cmpo_cost', 'model_cost'), COST),
  **dict.fromkeys(('policy_entropy_cost', 'consistency', 'weight_decay'), COST),
  **dict.fromkeys(('noise', 'epsilon_power', 'huber', 'temperature', 'value_scale'), Range(0)),
  'Tuning.learning_rate': Range(0),  # 0: the settings stay as they are
  **dict.fromkeys(('target_entropy', 'initial_log_std', 'v_min', 'v_max'), ANY),
  **dict.fromkeys(('epochs', 'minibatches', 'n_step', 'target_period', 'epsilon_steps'), COUNT),
  **dict.fromkeys(('sequence', 'unroll', 'period', 'lifetime'), COUNT),
  **dict.fromkeys(('capacity', 'batch_size', 'min_size', 'critics', 'atoms'), COUNT),
  'R2D2.sequence': Range(2),  # a single step has no TD error for a priority
  'Predictor.bins': Range(3),
  'MuZero.n_step': OPTIONAL,  # 0: the target is the search's value
  **dict.fromkeys(('burn_in', 'simulations', 'reanalyse_simulations', 'max_depth'), OPTIONAL),
  **dict.fromkeys(('target_depth', 'sampled_actions', 'importance_steps', 'episodes'), OPTIONAL),
  **dict.fromkeys(('online_share_steps', 'decay_steps'), OPTIONAL),
  **dict.fromkeys(('total_updates', 'total_envs', 'head_size', 'projection'), OPTIONAL),
  **dict.fromkeys(('hidden', 'dynamics_hidden', 'head_hidden', 'core_size', 'latent'), COUNT),
  **dict.fromkeys(('channels', 'bins', 'num_atoms', 'predictions', 'model_size'), COUNT),
  **dict.fromkeys(('width', 'heads', 'patch'), COUNT),
  # Each is built one after the other, before anything is compiled.
  **dict.fromkeys(('layers', 'iterations'), Range(1, 1024)),
  'blocks': Range(0, 1024),
  'considered_actions': Range(1, 4096),
  'window': Range(1, 2**20),
  'samples': COUNT,
  **dict.fromkeys(('elites', 'one_hot'), Range(2)),  # one elite has no standard deviation
}


def range_of(settings: Any, name: str) -> Range | None:
  """Return the range of a field that a class of podrace declares; None for any other field."""
  for cls in type(settings).__mro__:
    if name in vars(cls).get('__annotations__', {}):
      known = cls.__module__.startswith('podrace.')
      return RANGES.get(f'{cls.__name__}.{name}', RANGES.get(name)) if known else None
  return None


def check_fields(settings: Any) -> None:
  """Check the types and the ranges of all fields.

  `podrace.settings.validation.check_numbers` checks infinity and NaN, since it knows the option.

  Raises:
    ValueError: for the first field of a wrong type or outside of its range.
  """
  check_types(settings)
  for field in dataclasses.fields(settings):
    values, limits = getattr(settings, field.name), range_of(settings, field.name)
    for value in values if isinstance(values, tuple) else (values,):
      if limits not in (None, ANY) and isinstance(value, numbers.Real) and value not in limits:
        raise ValueError(f'{field.name.rstrip("_")} must be {limits}, not {value}')


def check_support(v_min: float, v_max: float, atoms: int = 2) -> None:
  """Check the ends of a support of evenly spaced atoms.

  Raises:
    ValueError: if they are not in order, or so near that float32 cannot tell the atoms apart.
  """
  if v_min >= v_max:
    raise ValueError(f'v_min {v_min} is not less than v_max {v_max}')
  gap, largest = (v_max - v_min) / (atoms - 1), max(abs(v_min), abs(v_max))
  if math.isfinite(gap) and gap < max(SMALLEST, 2.0 ** (math.frexp(largest)[1] - 23)):
    raise ValueError(
      f'v_min {v_min} and v_max {v_max} are too near for {atoms} atoms, which float32 cannot tell '
      'apart: give a wider range, or subtract the offset of returns from the rewards'
    )


def no_limit(limit: Any) -> Any:
  """Return a limit, a number or an array, with infinity in place of 0."""
  if isinstance(limit, int | float):
    return limit or math.inf
  import jax.numpy as jnp

  return jnp.where(limit == 0, jnp.inf, limit)


def whole_number(text: str) -> str:
  """Return 1e7 and 1_000_000 as digits, and any other text unchanged."""
  with contextlib.suppress(ValueError, OverflowError):
    value = float(text)
    if value == int(value) and not text.lstrip('-').isdigit():
      return str(int(value))
  return text


def flag(field: str) -> str:
  """Return a field's name on the command line."""
  return field.rstrip('_').replace('_', '-')


def negate(option: str) -> str:
  """Return the option that switches a boolean off: --no-x for --x, --agent.no-x for --agent.x."""
  head, dot, last = option.rpartition('.')
  return f'{head}.no-{last}' if dot else f'--no-{option[2:]}'


# --- paths --------------------------------------------------------------------------------------


def of_part(part: str, settings: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, Any]:
  """Return settings of a part by path: `of_part('network', hidden=(64,))` has network.hidden."""
  return {f'{part}.{name}': value for name, value in {**(settings or {}), **more}.items()}


def replace_paths(settings: C, values: Mapping[str, Any]) -> C:
  """Return a dataclass with new values, by path, such as network.hidden.

  Each part is replaced once, so checks of a part see all of its values.
  """
  changes: dict[str, Any] = {}
  parts: dict[str, dict[str, Any]] = {}
  for path, value in values.items():
    name, _, rest = path.partition('.')
    if rest:
      parts.setdefault(name, {})[rest] = value
    else:
      changes[name] = value
  changes |= {n: replace_paths(getattr(settings, n), inner) for n, inner in parts.items()}
  return dataclasses.replace(settings, **changes)
