"""Environments that a learner lends to acting processes."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import bare
import pytest
from children import until
from services import ANY
from test_parameters import leaves

from podrace.distributed import parameters, replay
from podrace.distributed.net import session_messages
from podrace.distributed.net.frame import WireError
from podrace.distributed.parameters import parameter_messages
from podrace.distributed.parameters.leases import Leases, read_request


def test_ranges_do_not_overlap_and_fill_what_is_free() -> None:
  """Against a list of who has each environment."""
  draw = random.Random(1)
  for _ in range(200):
    total = draw.randint(1, 20)
    held, owners = Leases(total), [-1] * total
    for holder in range(30):
      size, wish = draw.randint(1, 8), draw.randint(0, 25)
      free = [s for s in range(total - size + 1) if set(owners[s : s + size]) == {-1}]
      found = held.find(size, wish)
      first = wish if wish in free else min(free, default=-1)
      assert found == (range(first, first + size) if free else None)
      if found is None:
        with pytest.raises(WireError, match='environments'):
          held.lend(holder, size, wish)
      else:
        assert held.lend(holder, size, wish) == found
        owners[found.start : found.stop] = [holder] * size
      gone = draw.randint(0, holder)
      held.give_back(gone)
      owners = [-1 if x == gone else x for x in owners]


@pytest.mark.parametrize('said', [True, -1, 1.0, '4', 2**63, None])
@pytest.mark.parametrize('name', ['environments', 'first'])
def test_a_hello_asks_in_whole_numbers(name: str, said: Any) -> None:
  assert read_request({}) == (0, 0) and read_request({'environments': 4, 'first': 8}) == (4, 8)
  with pytest.raises(WireError, match=name):
    read_request({name: said})


def reader(address: str, environments: int, **more: Any) -> parameters.Parameters:
  return parameters.Parameters(address, environments=environments, **more)


def test_a_spare_takes_the_place_that_is_free() -> None:
  with parameters.Publisher(ANY, environments=32) as publisher:
    publisher.publish(1, leaves(1))
    one = reader(publisher.address, 16)
    one.get(timeout=30)
    two = reader(publisher.address, 16)
    two.get(timeout=30)
    assert (one.first, two.first) == (0, 16)
    spare = reader(publisher.address, 16)
    until(lambda: spare.is_stale)
    assert ' 32 ' in spare.link.why
    assert len(publisher.clients('act')) == 2
    small = reader(publisher.address, 0)  # which acts in none
    small.get(timeout=30)
    one.close()
    assert spare.get(timeout=30).version == 1 and spare.first == 0  # it did not give up meanwhile
    assert not spare.is_stale
    for each in (two, spare, small):
      each.close()


def test_a_process_comes_back_to_its_place_after_a_cut() -> None:
  """At once, though the learner has not heard of the cut, and others wait."""
  with parameters.Publisher(ANY, environments=32, peer_timeout=3600.0) as publisher:
    kinds = parameters.Parameters.kinds
    with contextlib.ExitStack() as stack:
      one, before, spare, again, other = (
        stack.enter_context(bare.connect(publisher.address, kinds)) for _ in range(5)
      )
      assert one.hello(parameter_messages.SERVICE, 1, environments=16)['first'] == 0
      assert before.hello(parameter_messages.SERVICE, 2, environments=16)['first'] == 16
      spare.say(session_messages.HELLO, hello(16, 3))
      spare.expect(session_messages.WAIT)
      assert again.hello(parameter_messages.SERVICE, 2, environments=16, first=16)['first'] == 16
      heard = before.hear()
      assert heard and heard[0] is session_messages.GONE
      spare.say(session_messages.HELLO, hello(16, 3))
      spare.expect(session_messages.WAIT)
      other.say(session_messages.HELLO, hello(32, 1))  # which ends its own session, and has to wait
      other.expect(session_messages.WAIT)
      heard = one.hear()
      assert heard and heard[0] is session_messages.GONE
      spare.say(session_messages.HELLO, hello(16, 3))
      assert spare.expect(session_messages.WELCOME)[0][0]['first'] == 0


def test_whose_place_is_taken_meanwhile_does_not_act() -> None:
  with parameters.Publisher(ANY, environments=8) as publisher:
    publisher.publish(1, leaves(1))
    late = reader(publisher.address, 4)
    late.get(timeout=30)
    held = publisher.leases.held
    held['another'] = range(8)
    (peer,) = publisher.peers
    publisher.listener.call(lambda: publisher.listener.tell_gone(peer, 'a test'))
    until(lambda: late.is_stale)
    assert late.version == 1 and late.staleness < 60  # fresh enough, but for that
    held['another'] = range(2)
    late.get(timeout=30)
    assert late.first == 2
    late.close()


def hello(environments: int, client: int = 7) -> dict[str, Any]:
  return session_messages.hello(
    parameter_messages.SERVICE, client, role='act', environments=environments
  )


def test_who_is_silent_loses_its_place() -> None:
  with parameters.Publisher(ANY, environments=4, peer_timeout=0.5) as publisher:
    publisher.publish(1, leaves(1))
    with bare.connect(publisher.address, parameters.Parameters.kinds) as silent:
      assert silent.hello(parameter_messages.SERVICE, 7, environments=4)['first'] == 0
      spare = reader(publisher.address, 4)
      spare.get(timeout=30)
      assert spare.first == 0
      spare.close()


def test_more_than_the_run_has_is_refused() -> None:
  with parameters.Publisher(ANY, environments=32) as publisher:
    much = reader(publisher.address, 33)
    with pytest.raises(replay.Refused, match=r'33 .* 32 \(--num-envs\)'):
      much.get(timeout=30)
    much.close()


def test_spares_hear_that_the_run_is_over() -> None:
  with parameters.Publisher(ANY, environments=4) as publisher:
    publisher.publish(1, leaves(1))
    one = reader(publisher.address, 4)
    one.get(timeout=30)
    spare = reader(publisher.address, 4, first=2)
    until(lambda: spare.is_stale)
    publisher.publish(2, leaves(2))
    publisher.finish()
    assert publisher.waited_for
    assert spare.get(timeout=30).version == 2 and spare.first == 2
    one.close()
    spare.close()
    until(lambda: not publisher.waited_for)


def test_a_welcome_without_a_place_is_none() -> None:
  publisher = bare.Accepting(session_messages.of_clients())
  one = reader(publisher.address, 4)
  for first in (None, -1, '0'):
    with publisher.welcome(first=first) as end:
      assert end.is_closed()
  with publisher.welcome(first=3):
    until(lambda: one.connected)
    assert one.first == 3
    one.close()
  publisher.close()


def test_a_spare_whose_learner_goes_gives_up_as_others_do() -> None:
  with parameters.Publisher(ANY, environments=4) as publisher:
    one = reader(publisher.address, 4)
    until(lambda: one.connected)
    spare = reader(publisher.address, 4)
    until(lambda: spare.is_stale)
  with pytest.raises(parameters.StaleParameters, match=r'0\.3 s'):
    spare.get(timeout=0.3)
  one.close()
  spare.close()
