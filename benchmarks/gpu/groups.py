"""Groups of items, in the order in which measure.py measures them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from items import (
  acting,
  anakin,
  bench,
  branchless,
  cartpole,
  catch,
  ceilings,
  lpg,
  muzero,
  replay,
  transformer,
)
from runs import DETERMINISTIC, PONG, WIDE, evaluated, learn, smoke

GRAPHS = {  # settings of CUDA graphs, which start short kernels together
  'no graphs': '--xla_gpu_enable_command_buffer=',
  'loops in graphs': '--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL',
}


@dataclasses.dataclass(frozen=True)
class Group:
  """Items that one process measures."""

  items: dict[str, Any]
  limit: float  # seconds
  flags: str = ''
  ahead: bool = True  # its programs are compiled before


def groups() -> dict[str, Group]:
  part = functools.partial
  minatar = {
    f'ppo minatar x {n}': part(anakin, 'minatar-breakout', n, 32)
    for n in (1_024, 4_096, 16_384, 65_536)
  }
  launched = {
    'catch impala x 4096': part(catch, 'impala', 4_096),
    'ppo-cartpole x 4096': part(cartpole, 4_096),
    'minatar preset': part(anakin, 'minatar-breakout', 64, 128),
  }
  varied = {
    name: Group({f'{k}, {name}': v for k, v in launched.items()}, 60, flags)
    for name, flags in GRAPHS.items()
  }
  return {
    'smoke': Group({'smoke': smoke}, 260, ahead=False),
    'ceilings': Group({'ceilings': ceilings}, 40, ahead=False),
    'launches': Group(launched, 60),
    **varied,
    'no branch': Group(
      {f'{k}, resets without a branch': part(branchless, v) for k, v in launched.items() if 'preset' not in k}, 50
    ),
    'learn': Group(
      {'learn minatar': part(learn, 'minatar-breakout', targets=(50.0, 90.0), name='minatar', limit=60.0)}, 90
    ),
    'minatar': Group(minatar, 60),
    'sebulba': Group(
      {
        'sebulba pong, 1,024 environments': part(bench, 'pong', '--num-envs', '1024', '--actor-threads', '4'),
        'sebulba dqn-pong, 64 environments': part(bench, 'dqn-pong', '--num-envs', '64', '--actor-threads', '2'),
      },
      110,
    ),
    'wide': Group({'learn minatar, wide': part(learn, *WIDE, targets=(50.0, 90.0), name='wide', limit=45.0)}, 75),
    'transformer': Group({'transformer x 1024': part(transformer, 1_024, 4, 256)}, 45),
    'replay': Group({'replay, sequences, prioritised': part(replay, 'sequences, prioritised')}, 45, ahead=False),
    'muzero': Group({'muzero minatar-breakout x 1024': part(muzero, 1_024)}, 60),
    'muzero loops': Group(
      {'muzero minatar-breakout x 1024, loops in graphs': part(muzero, 1_024)}, 60, GRAPHS['loops in graphs'], False
    ),
    'wider': Group(
      {
        'catch impala x 65536': part(catch, 'impala', 65_536),
        'catch ppo x 4096': part(catch, 'ppo', 4_096),
        'catch ppo x 65536': part(catch, 'ppo', 65_536),
        'ppo-cartpole x 65536': part(cartpole, 65_536),
      },
      90,
      ahead=False,
    ),
    'ordered': Group({'catch impala x 4096, deterministic': part(catch, 'impala', 4_096)}, 45, DETERMINISTIC, False),
    'sebulba 256': Group({'sebulba pong': part(bench, 'pong', '--num-envs', '256', '--actor-threads', '4')}, 60, ahead=False),
    'eval': Group({'learn minatar, evaluated': evaluated}, 60, ahead=False),
    'lpg': Group({'lpg, K 5': part(lpg, 5)}, 80, ahead=False),
    'acting': Group({'muzero pong': acting}, 80, ahead=False),
    'pong': Group({'learn pong': part(learn, *PONG, targets=(0.0, 18.0), name='pong', limit=500.0)}, 530, ahead=False),
  }  # fmt: skip


FIRST = ('smoke', 'ceilings', 'launches', *GRAPHS, 'no branch', 'learn', 'minatar', 'sebulba', 'wide', 'transformer', 'replay',
         'muzero', 'wider', 'ordered', 'muzero loops', 'sebulba 256', 'eval', 'lpg', 'acting')  # fmt: skip
