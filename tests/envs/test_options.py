"""Options of environments are Python literals, and are compared with the signature of the maker."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Optional

import gymnasium
import pytest

import podrace.envs
from podrace.envs import UnknownName, env_names
from podrace.envs.host import base as host

READ: dict[str, Any] = {
  'False': False, 'True': True, 'false': False, 'true': True, 'None': None, '3': 3, '-3': -3,
  '+3': 3, ' 3': 3, '0': 0, '1_000': 1000, '0.5': 0.5, '.5': 0.5, '5.': 5.0, '1e3': 1000.0,
  '-1e-3': -0.001, '1e999': math.inf, "'False'": 'False', '"7"': '7', "'a,b=c'": 'a,b=c',
  "'it\\'s'": "it's", '(1, 2)': (1, 2), '(1,)': (1,), '()': (), "['SF', 'FG']": ['SF', 'FG'],
  "{'a': (1, None)}": {'a': (1, None)}, 'word': 'word', '4x4': '4x4', '1.2.3': '1.2.3',
  '2020-01-01': '2020-01-01', 'runs/b=1/[x]': 'runs/b=1/[x]', "it's": "it's", 'a(b': 'a(b',
  'True north': 'True north',
}  # fmt: skip


@pytest.mark.parametrize('text', READ)
def test_a_value_is_a_literal_of_python(text: str) -> None:
  key, env, options = env_names.parse(f'a:b,x={text},y=1')
  assert (key, env) == ('a', 'b')
  assert repr(options) == repr({'x': READ[text], 'y': 1})
  again = env_names.full_name(key, env, options, {})
  assert repr(env_names.parse(again)[2]) == repr(options)
  assert repr(env_names.parse(json.loads(json.dumps(again)))[2]) == repr(options)


def test_texts_come_back_from_a_name() -> None:
  for letters in itertools.product('\',"=([ ]\\0Fn\n', repeat=3):
    for text in (''.join(letters), f'false{letters[0]}', f'{letters[0]}7{letters[1]}'):
      options = {'x': text, 'y': (text,), 'z': 1}
      assert env_names.parse(env_names.full_name('a', 'b', options, {}))[2] == options, text


@pytest.mark.parametrize(
  'text',
  [
    *('007', '-01', '00', '01.5', '1__0', '1_', 'infinity', '-inf', 'Inf', 'nan', 'NaN', '１２'),
    *('TRUE', 'tRue', 'FALSE', 'none', 'NONE', 'null', 'yes', 'No', 'on', 'OFF', '0x10', '0b1', '1j'),
    *('\u22125', '\u22121e-3', "{'a': 1, 'a': 2}", "[{'b': {'a': 1, 'a': 1}}]"),
    *('(1, 2', "'open", '[true]', '(a, b)', "b'x'", '{1, 2}', '{1: 2}', '[1]]', "'a' 'b", '9' * 5000),
    '(' * 5000 + ')' * 5000,
  ],
)  # fmt: skip
def test_an_ambiguous_value_is_refused(text: str) -> None:
  with pytest.raises(UnknownName):
    env_names.parse(f'a:b,x={text}')
  quoted = env_names.full_name('a', 'b', {'x': text}, {})
  assert env_names.parse(quoted)[2] == {'x': text}


class Made(gymnasium.Env[Any, Any]):
  """Keeps what it was made with."""

  observation_space = gymnasium.spaces.Discrete(2)
  action_space = gymnasium.spaces.Discrete(2)
  options: ClassVar[dict[str, Any]] = {}

  def __init__(
    self,
    flag: bool = True,
    count: int = 1,
    rate: float = 0.5,
    name: str = 'x',
    maybe: int | None = None,
    kind: Literal['a', 'b'] = 'a',
    sizes: tuple[int, ...] = (1,),
    many: Sequence[float] = (),
    odd: NotImported = None,  # type: ignore[name-defined] # noqa: F821
    bare=False,
    number=3,
    word='x',
    free=None,
  ) -> None:
    Made.options = {k: v for k, v in locals().items() if k != 'self'}


class MadeOfAll(Made):
  def __init__(self, flag: bool = True, **options: Any) -> None:
    Made.options = {'flag': flag, **options}


gymnasium.register('Made-v0', entry_point=Made, disable_env_checker=True)
gymnasium.register('Made-v2', entry_point=Made, disable_env_checker=True)
gymnasium.register('MadeOfAll-v0', entry_point=MadeOfAll, disable_env_checker=True)

TAKEN: dict[str, Any] = {
  'flag=False': False, 'count=2': 2, 'rate=2': 2, 'rate=2.5': 2.5, "name='7'": '7',
  'name=None': None, 'maybe=None': None, 'maybe=3': 3, 'kind=b': 'b', 'sizes=(1, 2)': (1, 2),
  'many=[1, 2.5]': [1, 2.5], 'odd=4': 4, 'bare=true': True, 'number=2.5': 2.5, 'word=y': 'y',
  'free=[None]': [None],
}  # fmt: skip


@pytest.mark.parametrize('text', TAKEN)
@pytest.mark.parametrize('env', ['Made-v0', 'Made', 'MadeOfAll-v0'])
def test_the_maker_gets_the_value(env: str, text: str) -> None:
  spec = host.make(f'gymnasium:{env},{text}')
  assert repr(Made.options[text.partition('=')[0]]) == repr(TAKEN[text])
  assert env_names.parse(spec.name)[2] == env_names.parse(f'a:b,{text}')[2]


NOT_TAKEN = {
  'flag=1': 'bool', 'flag=None': 'bool', 'flag=maybe': 'bool', 'count=2.5': 'int',
  'count=True': 'int', "rate='2'": 'float', 'name=7': "name='7'", 'name=True': "name='True'",
  'maybe=x': 'int', 'kind=c': 'Literal', 'sizes=(1, x)': 'no literal', 'sizes=(1, false)': 'write False', "sizes=(1, 'x')": 'tuple',
  'sizes=3': 'tuple', "many=['x']": 'Sequence', 'bare=0': 'bare=False', 'number=x': 'number=3',
  'number=True': 'number=3', 'word=3': "word='3'", 'flags=True': 'nearest: flag',
  'max_episode_steps=many': 'max_episode_steps', 'max_episode_steps=2.5': 'max_episode_steps',
}  # fmt: skip


@pytest.mark.parametrize('text', NOT_TAKEN)
@pytest.mark.parametrize('env', ['Made-v0', 'Made'])
def test_what_the_maker_does_not_take_is_refused(env: str, text: str) -> None:
  with pytest.raises(UnknownName) as refused:
    host.make(f'gymnasium:{env},{text}')
  assert NOT_TAKEN[text] in str(refused.value)


def test_a_maker_of_any_options_takes_all_but_wrong_types() -> None:
  host.make('gymnasium:MadeOfAll-v0,else=(1, None),max_episode_steps=5')
  assert Made.options == {'flag': True, 'else': (1, None)}
  with pytest.raises(UnknownName, match='flag: bool'):
    host.make('gymnasium:MadeOfAll-v0,flag=3')


def in_jax(rows: int = 5, slippery=False, sizes: tuple[int, ...] = ()) -> Any:
  assert type(rows) is int and type(slippery) is bool and type(sizes) is tuple
  return podrace.envs.make(f'podrace:catch,rows={rows}')


@pytest.mark.parametrize('make', [podrace.envs.make, host.make])
def test_functions_of_the_users(make: Any) -> None:
  name = f'python:{__name__}.in_jax'
  assert make(f'{name},rows=7,slippery=False,sizes=(1, 2)').observation_space.shape == (7, 5)
  for wrong in ('rows=7.5', 'slippery=0', 'slippery=None', 'sizes=[1]', 'row=7', 'rows=007'):
    with pytest.raises(UnknownName):
      make(f'{name},{wrong}')


@pytest.mark.parametrize(
  'name',
  [
    'podrace:catch,rows=None',
    'podrace:catch,rows=(1, 2)',
    'podrace:maze,unseen=no',
    'podrace:maze,unseen=0',
    'podrace:catch,state=1',
    'gymnax:CartPole-v1,gravity=None',
    f'gymnax:CartPole-v1,gravity={10**400}',
    f'podrace:memory,length={2**31}',
    f'ale:pong,max_frames={2**31}',
    'jumanji:Snake-v1,time_limit=007',
    'navix:Navix-Empty-5x5-v0,max_steps=1e2',
    'brax:ant,backend=5',
    'pgx:tic_tac_toe,opponent=None',
    'ale:pong,sticky=False',
    'envpool:CartPole-v1,max_episode_steps=None',
  ],
)
def test_the_rule_is_the_same_for_every_library(name: str) -> None:
  with pytest.raises(UnknownName):
    host.make(name)


def test_workers_read_the_same_options() -> None:
  import numpy as np

  spec = host.make('gymnasium:FrozenLake-v1,is_slippery=False,desc=["SFF", "FFG"],map_name=None')
  with contextlib.closing(
    spec.make(host.PoolArgs(20, 20, np.arange(20, dtype=np.uint32), 2, 60.0))
  ) as pool:
    pool.reset()
    arrival = pool.recv()
    for _ in range(2):
      pool.send(arrival.env_id, np.full(20, 2))
      arrival = pool.recv()
    assert arrival.timestep.observation.tolist() == [2] * 20


class Kind(enum.Enum):
  SMALL = 'small'
  LARGE = 2


class WithNew:
  def __new__(cls, *args: Any, **kwargs: Any) -> WithNew:
    del args, kwargs
    return object.__new__(cls)

  def __init__(self, size: int = 1) -> None: ...


class Called:
  def __call__(self, size: Optional[int] = 1) -> None: ...  # noqa: UP045 (a text that is looked up)


def with_kinds(kind: Kind = Kind.SMALL, sizes: dict[str, int] = {}) -> None: ...  # noqa: B006


@pytest.mark.parametrize(
  ('function', 'option', 'value', 'is_taken'),
  [
    (with_kinds, 'kind', 'small', True),
    (with_kinds, 'kind', 'LARGE', True),
    (with_kinds, 'kind', 2, True),
    (with_kinds, 'kind', 'large', False),
    (with_kinds, 'kind', 1, False),
    (with_kinds, 'sizes', {'a': 1}, True),
    (with_kinds, 'sizes', {'a': 'b'}, False),
    (WithNew, 'size', 3, True),
    (WithNew, 'size', 'x', False),
    (WithNew, 'other', 3, False),
    (Called(), 'size', None, True),
    (functools.partial(Called(), size=2), 'size', None, True),
    (functools.partial(Called(), size=2), 'size', 'x', False),
  ],
)
def test_options_of_enums_dicts_and_callables(
  function: Any, option: str, value: Any, is_taken: bool
) -> None:
  if is_taken:
    env_names.check_options('a:b', function, {option: value})
  else:
    with pytest.raises(UnknownName, match=option):
      env_names.check_options('a:b', function, {option: value})
