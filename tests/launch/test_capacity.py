"""Estimates: what runs on so many machines make, cost and wait for."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from podrace.commands import plan
from podrace.errors import UsageError
from podrace.launch import capacity
from podrace.launch.capacity import HANDOVER, Estimate, Machines, Rates

LEARNER = Rates(100.0, 3000.0, 6000.0, 1e9, 1000.0, True)  # a large batch hands over for nothing
BENCH: dict[str, Any] = dict(
  environment=8000.0, inference=16000.0, learner=4000.0, num_envs=32, threads=2, unroll_length=20,
  bytes=dict(actor_thread=320_000),
)  # fmt: skip


def test_rates_of_what_bench_prints() -> None:
  assert Rates.from_bench(BENCH) == Rates(8000.0, 16000.0, 4000.0, 16.0, 1000.0, True)
  assert not Rates.from_bench(BENCH | dict(minimum=4000.0)).shared


@pytest.mark.parametrize('rate', [0.0, 1e-320, 1e300, math.nan])
def test_rates_that_no_machine_has_are_refused(rate: float) -> None:
  with pytest.raises(UsageError, match='learner'):
    Rates.from_bench(BENCH | dict(learner=rate))
  with pytest.raises(UsageError, match='OverflowError'):
    Rates.from_bench(BENCH | dict(learner=10**400))


def test_stages_of_one_machine_take_turns() -> None:
  found = capacity.one_machine(dataclasses.replace(LEARNER, environment=3000.0, inference=6000.0))
  assert found.steps_per_s == pytest.approx(1 / (1 / 3000 + 1 / 6000 + 1 / 6000))


def test_a_batch_costs_its_handover() -> None:
  slower = dataclasses.replace(LEARNER, batch=4.0)
  assert 1 / slower.acting - 1 / LEARNER.acting == pytest.approx(HANDOVER / 4)


def test_the_handover_is_what_was_fitted() -> None:
  path = Path(__file__).parents[2] / 'benchmarks' / 'results' / 'plan.json'
  fitted = json.loads(path.read_text())['results']['recorded']['handover_s']
  assert pytest.approx(fitted, abs=0.5e-6) == HANDOVER


def test_a_learner_with_devices_of_its_own_overlaps() -> None:
  found = capacity.one_machine(dataclasses.replace(LEARNER, shared=False))
  assert found.limits == pytest.approx(dict(acting=1 / (1 / 100 + 1 / 3000), learner=6000.0))
  assert found.waits_for == 'acting'


@pytest.mark.parametrize(
  ('machines', 'gbits', 'waits_for', 'rate'),
  [(4, 1.0, 'environments', 400), (400, 1.0, 'learner', 2000), (400, 0.008, 'network', 1000)],
)
def test_seed_waits_for_its_slowest_part(
  machines: int, gbits: float, waits_for: str, rate: float
) -> None:
  found = capacity.seed(LEARNER, LEARNER, Machines(machines, gbits))
  assert found.waits_for == waits_for
  assert found.steps_per_s == pytest.approx(rate)


def test_a_learner_with_own_devices_overlaps_inference() -> None:
  own = dataclasses.replace(LEARNER, shared=False)
  assert capacity.seed(own, LEARNER, Machines(999)).waits_for == 'inference'


def test_acting_machines_infer_for_themselves() -> None:
  acting = dataclasses.replace(LEARNER, environment=500.0, inference=500.0)
  few, many = (capacity.acting_machines(LEARNER, acting, Machines(n)) for n in (2, 99))
  assert (few.waits_for, few.steps_per_s) == ('acting', pytest.approx(500.0))
  assert (many.waits_for, many.steps_per_s) == ('learner', 6000.0)


def test_costs() -> None:
  machines = Machines(10, learner_price=2.0, acting_price=0.5)
  found = Estimate({'x': 1000.0}, machines.price)
  assert found.price == 7.0
  assert found.hours(7.2e6) == pytest.approx(2.0)


@pytest.mark.parametrize('wrong', [{}, [], {**BENCH, 'threads': 0}, {**BENCH, 'learner': 'fast'}])
def test_what_are_no_rates(wrong: Any) -> None:
  with pytest.raises(UsageError, match='podrace bench sebulba'):
    Rates.from_bench(wrong)


@pytest.mark.parametrize('wrong', [0.0, -1.0, float('nan'), float('inf')])
def test_rates_are_more_than_nothing(wrong: float) -> None:
  with pytest.raises(UsageError, match='inference'):
    Rates.from_bench(BENCH | dict(inference=wrong))


@pytest.fixture
def rates(tmp_path: Path) -> str:
  path = tmp_path / 'rates.json'
  path.write_text(f'compiling\n{json.dumps(BENCH)}\n')
  return str(path)


def test_the_command(rates: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  faster = tmp_path / 'acting.json'
  faster.write_text(json.dumps(BENCH | dict(environment=1e9, inference=1e9)))
  prices = ('--learner-price', '3', '--acting-price', '1', '--steps', '28_800_000')
  words = ['--as', 'impala', '--acting', str(faster), '--machines', '1,5', *prices]
  assert plan.run([rates, *words]) == 0
  *table, last = capsys.readouterr().out.splitlines()
  one, five = json.loads(last)
  assert (one['machines'], one['waits_for'], one['steps_per_s']) == (1, 'learner', 4000.0)
  assert (one['hours'], one['dollars']) == (2.0, 8.0)
  assert five['dollars_per_hour'] == 8.0
  assert table[2].split() == ['5', '4,000', 'learner', '2.00', '16.00']


@pytest.mark.parametrize(
  ('arguments', 'said'),
  [
    (('--as', 'sead'), "'sead'"),
    ((), '--as'),
    (('--as', 'seed', '--machines', '1,0'), "'1,0'"),
    (('--as', 'seed', '--gbits', '0'), '--gbits'),
    (('--as', 'seed', '--acting', '/no/such'), '/no/such'),
    (('--as', 'seed', '--acting', '/dev/null'), '/dev/null'),
  ],
)
def test_bad_usage_of_plan(rates: str, arguments: tuple[str, ...], said: str) -> None:
  with pytest.raises(UsageError) as e:
    plan.run([rates, *arguments])
  assert said in str(e.value)
