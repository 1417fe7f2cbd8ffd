"""Reports of measure.py: the card, a line for each item, and results/gpu.json."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import time
from typing import Any

import session
from session import TINY

SHOWN = (
  'same_again', 'same_after_kill', 'same_compiled_anew', 'ordered_same_again', 'ordered_same_compiled_anew',
  'ordered_as_plain', 'update_ms', 'products_share', 'reached', 'last_return', 'best_return', 'wall_s',
  'copy_tb_per_s', 'matmul_bfloat16_tflop_per_s', 'matmul_float32_tflop_per_s', 'call_us', 'kernel_us', 'loop_us',
  'model_tflop_per_s', 'combined_over_environment', 'gb_sampled_per_s', 'episode_return_mean', 'compile_s',
)  # fmt: skip


def now() -> str:
  return time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime())


def about() -> dict[str, Any]:
  """Returns the card, the machine, versions, and the commit. Without JAX: this process leaves the card alone."""
  import common

  query, gpu = 'name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit', {}
  with contextlib.suppress(OSError, subprocess.TimeoutExpired):
    command = ['nvidia-smi', f'--query-gpu={query}', '--format=csv,noheader']
    out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    gpu = dict(zip(query.split(','), out.strip().split(', '), strict=False))
  path = pathlib.Path(__file__).parent / 'commit'  # prepare.sh writes it
  if path.exists():
    commit = path.read_text().strip()
  else:
    commit = common.head() if (session.ROOT / '.git').exists() else 'unknown'
  return dict(
    date=now(), gpu=gpu, machine=common.machine(), versions=common.versions(), tiny=TINY, commit=commit
  )  # fmt: skip


def brief(result: dict[str, Any]) -> dict[str, Any]:
  """Returns the figures that fit a line."""
  if 'error' in result:
    return dict(error=result['error'][-300:])
  rates = result.get('rates', {}) | {k: v for k, v in result.items() if k.endswith('steps_per_s') or k in ('added', 'sampled')}  # fmt: skip
  if isinstance(each := rates.get('steps_per_s'), dict) and 'median' not in each:
    rates |= rates.pop('steps_per_s')  # rates of different parts
  line = {k: v['median'] if isinstance(v, dict) else v for k, v in rates.items() if v}
  line |= {k: v for k, v in result.items() if k in SHOWN}
  line |= {k: v.get('episode_return', v.get('error')) for k, v in result.get('runs', {}).items()}
  if kernels := result.get('kernels', {}):
    device = kernels.get('device', kernels)
    line['kernels'] = {k: v for k, v in device.items() if k in ('kernels', 'busy_share', 'error')}
    line['by_program'] = kernels.get('program', {}).get('by_program')
  return {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}


def merge(folder: pathlib.Path) -> None:
  """Puts results into benchmarks/results/gpu.json; of another card than the file's, under `NAME, CARD`."""
  import common

  new, path = common.read_json(folder / 'results.json'), common.RESULTS / 'gpu.json'
  old = common.read_json(path)
  card = new['gpu'].get('name') or 'CPU'
  is_same = old['machine'].get('devices') == [f'gpu:{card}']
  commit = dict(hash=new['commit'].split()[0], dirty=new['commit'].endswith('dirty'))
  failed = [name for name, result in new['results'].items() if 'error' in result]
  for name, result in new['results'].items():
    if name not in failed:
      name = name if is_same else f'{name}, {card}'
      before = old['results'].get(name, {})
      compile_s = {k: v for k, v in before.items() if k.startswith('compile_s')}
      old['results'][name] = compile_s | result | dict(
        date=result.get('date', new['date']), commit=commit, card=card, driver=new['gpu'].get('driver_version'),
        command='python benchmarks/gpu/measure.py', machine=new['machine'], versions=new['versions'],
      )  # fmt: skip
  path.write_text(json.dumps(old, indent=1) + '\n')
  kept = len(new['results']) - len(failed)
  print(f'{kept} results of {card} are in {common.portable(str(path))}; not in it: {failed}')
