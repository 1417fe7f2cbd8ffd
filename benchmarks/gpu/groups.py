"""Groups of items, in the order in which measure.py measures them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import items
from runs import DETERMINISTIC, PONG, WIDE, evaluated, learn, smoke

GRAPHS = {  # settings of CUDA graphs, which start short kernels together
  'no graphs': '--xla_gpu_enable_command_buffer=',
  'loops in graphs': '--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL',
}
SIZES = (4_096, 16_384, 65_536)
ENVIRONMENTS = (  # light enough on memory for all sizes
  'podrace:catch', 'gymnax:CartPole-v1', 'gymnax:Breakout-MinAtar', 'brax:ant', 'jumanji:Snake-v1',
  'navix:Navix-Empty-8x8-v0', 'craftax:Craftax-Classic-Symbolic-v1',
)  # fmt: skip
TARGETS = (50.0, 90.0)


@dataclasses.dataclass(frozen=True)
class Group:
  """Items that one process measures."""

  items: dict[str, Any]
  limit: float  # seconds
  flags: str = ''
  ahead: bool = True  # its programs are compiled before


def sebulba(num_envs: int, threads: int, preset: str = 'pong') -> Any:
  size = '--num-envs', str(num_envs), '--actor-threads', str(threads)
  return partial(items.bench, preset, '--env', 'ale:pong', *size)


minatar = partial(items.anakin, preset='minatar-breakout')
muzero = partial(items.anakin, env='gymnax:Breakout-MinAtar', agent='muzero')


def other_groups() -> dict[str, Group]:
  """Returns the groups that are measured only if they are named."""
  pong = partial(learn, *PONG, targets=(0.0, 18.0), name='pong', limit=500.0)
  return {
    'pong': Group({'learn pong': pong}, 530, ahead=False),
    'middle': Group(
      {'ppo-cartpole x 16384': partial(items.cartpole, 16_384), 'sebulba pong, one thread': sebulba(256, 1)}
      | {f'catch {v} x 16384': partial(items.catch, v, 16_384) for v in ('impala', 'ppo')}
      | {f'muzero minatar-breakout x {n}': partial(muzero, n) for n in (64, 256)}
      | {f'lpg, K {k}': partial(items.lpg, k) for k in (1, 10)},
      900, ahead=False,
    ),
    'environments': Group(
      {f'{name} x {n}': partial(items.environment, name, n) for n in SIZES for name in ENVIRONMENTS}, 3_000, ahead=False
    ),
  }  # fmt: skip


def groups() -> dict[str, Group]:
  launched = {
    'catch impala x 4096': partial(items.catch, 'impala', 4_096),
    'ppo-cartpole x 4096': partial(items.cartpole, 4_096),
    'minatar preset': partial(minatar, 64, 128),
  }
  varied = {
    name: Group({f'{k}, {name}': v for k, v in launched.items()}, 60, flags)
    for name, flags in GRAPHS.items()
  }
  minatars = {f'ppo minatar x {n}': partial(minatar, n, 32) for n in (1_024, *SIZES)}
  search = partial(muzero, 1_024)
  wide = partial(learn, *WIDE, targets=TARGETS, name='wide', limit=45.0)
  narrow = partial(learn, 'minatar-breakout', targets=TARGETS, name='minatar', limit=60.0)
  first = {
    'smoke': Group({'smoke': smoke}, 260, ahead=False),
    'ceilings': Group({'ceilings': items.ceilings}, 40, ahead=False),
    'launches': Group(launched, 60),
    **varied,
    'learn': Group({'learn minatar': narrow}, 90),
    'minatar': Group(minatars, 60),
    'sebulba': Group(
      {'sebulba pong, 1,024 environments': sebulba(1024, 4), 'sebulba dqn-pong, 64 environments': sebulba(64, 2, 'dqn-pong')},
      110,
    ),
    'wide': Group({'learn minatar, wide': wide}, 75),
    'transformer': Group({'transformer x 1024': partial(items.transformer, 1_024, 4, 256)}, 45),
    'replay': Group({'replay, sequences, prioritised': partial(items.replay, 'sequences, prioritised')}, 45, ahead=False),
    'muzero': Group({'muzero minatar-breakout x 1024': search}, 60),
    'wider': Group(
      {f'catch {v} x {n}': partial(items.catch, v, n) for v, n in (('impala', 65_536), ('ppo', 4_096), ('ppo', 65_536))}
      | {'ppo-cartpole x 65536': partial(items.cartpole, 65_536)},
      90, ahead=False,
    ),
    'ordered': Group({'catch impala x 4096, deterministic': launched['catch impala x 4096']}, 45, DETERMINISTIC, False),
    'muzero loops': Group(
      {'muzero minatar-breakout x 1024, loops in graphs': search}, 60, GRAPHS['loops in graphs'], False
    ),
    'sebulba 256': Group({'sebulba pong': sebulba(256, 4)}, 60, ahead=False),
    'eval': Group({'learn minatar, evaluated': evaluated}, 60, ahead=False),
    'lpg': Group({'lpg, K 5': partial(items.lpg, 5)}, 80, ahead=False),
    'acting': Group({'muzero pong': items.acting}, 80, ahead=False),
  }  # fmt: skip
  return first | other_groups()


OTHERS = tuple(other_groups())
