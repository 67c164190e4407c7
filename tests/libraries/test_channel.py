"""`torch_ucx_rpc.channel`: values arrive as they were put, wait to be taken, and belong to one epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc

from tests.libraries._jobs import KILLED, die
from tests.support.workers import Steps
from torch_ucx_rpc.channel import Channel
from torch_ucx_rpc.channel._rpc_slots import RpcSlots
from torch_ucx_rpc.errors import CallTimedOut, EpochEnded, NotRunning, WorkerLost

RunWorkers = Callable[..., list]

# Sizes below and above each limit at which the transfer of a value changes.
SIZES = (0, 1, 1000, 40_000, 1 << 20, 9 << 20)


def test_values_arrive_as_they_were_put(run_on_both: RunWorkers) -> None:
    run_on_both(2, exchange_values)


def exchange_values(rank: int) -> None:
    channel, other = Channel("values"), f"worker{1 - rank}"
    kinds = [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.tensor(7),
        torch.ones(2, requires_grad=True),
    ]
    sent = [channel.put(other, f"size {size}", torch.full((size,), rank, dtype=torch.uint8)) for size in SIZES]
    sent.append(channel.put(other, "list", kinds))
    sent.append(channel.put(other, "none", []))
    for size in reversed(SIZES):
        got = channel.take(other, f"size {size}")
        assert torch.equal(got, torch.full((size,), 1 - rank, dtype=torch.uint8))
    for got, put in zip(channel.take(other, "list"), kinds, strict=True):
        assert torch.equal(got, put)
        assert (got.dtype, got.stride(), got.requires_grad) == (put.dtype, put.stride(), put.requires_grad)
    assert channel.take(other, "none") == []
    for one in sent:
        one.wait()


def test_many_small_tensors_in_one_value_arrive(run_on_both: RunWorkers) -> None:
    run_on_both(2, exchange_many)


def exchange_many(rank: int) -> None:
    channel, other = Channel("many"), f"worker{1 - rank}"
    values = [torch.full((5000,), float(index)) for index in range(100)]
    channel.put(other, "all", values)
    for got, put in zip(channel.take(other, "all"), values, strict=True):
        assert torch.equal(got, put)


def test_a_worker_puts_to_itself(run_on_both: RunWorkers) -> None:
    run_on_both(1, put_to_oneself)


def put_to_oneself(rank: int) -> None:
    channel = Channel("self")
    for size in SIZES:
        channel.put("worker0", "x", torch.ones(size))
        assert torch.equal(channel.take("worker0", "x"), torch.ones(size))


def test_values_fill_posted_tensors(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, fill_posted, Steps(tmp_path))


def fill_posted(rank: int, steps: Steps) -> None:
    channel, other = Channel("posted"), f"worker{1 - rank}"
    for size in SIZES:
        early, late, strided = torch.zeros(size), torch.zeros(size), torch.zeros(size, 2)[:, 0]
        posted = channel.post(other, f"early {size}", early)
        steps.meet(f"posted {size}", rank, 2)
        for tag in ("early", "late", "strided"):
            channel.put(other, f"{tag} {size}", torch.full((size,), 3.0))
        assert posted.wait() is early
        channel.take_into(other, f"late {size}", late)
        channel.take_into(other, f"strided {size}", strided)
        for filled in (early, late, strided):
            assert torch.equal(filled, torch.full((size,), 3.0))
    pair = [torch.zeros(100_000), torch.zeros(3)]
    channel.put(other, "pair", [torch.ones(100_000), torch.ones(3)])
    channel.take_into(other, "pair", pair)
    assert all(torch.equal(one, torch.ones_like(one)) for one in pair)


def test_a_filled_tensor_spoils_the_backward_that_needs_it(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, fill_a_saved_tensor, Steps(tmp_path))


def fill_a_saved_tensor(rank: int, steps: Steps) -> None:
    channel, other = Channel("saved"), f"worker{1 - rank}"
    for size in SIZES:
        saved = torch.zeros(size)
        posted = channel.post(other, f"{size}", saved)
        loss = (torch.ones(size, requires_grad=True) * saved).sum()
        steps.meet(f"posted {size}", rank, 2)
        channel.put(other, f"{size}", torch.ones(size))
        posted.wait()
        if size:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_a_second_wait_for_a_value_says_that_it_is_taken(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, wait_twice, Steps(tmp_path))


def wait_twice(rank: int, steps: Steps) -> None:
    channel, other = Channel("twice"), f"worker{1 - rank}"
    for size in (1, 40_000):
        tag, value = f"value of {size}", torch.ones(size)
        posted = channel.post(other, tag)
        channel.put(other, tag, value)
        assert torch.equal(posted.wait(), value)
        steps.meet(f"taken {size}", rank, 2)
        # The second wait leaves a later value under the same tag alone.
        channel.put(other, tag, 2 * value)
        with pytest.raises(RuntimeError, match=TAKEN.format(tag, other)):
            posted.wait()
        assert torch.equal(channel.take(other, tag), 2 * value)
    posted = channel.post(other, "unfit", torch.zeros(2))
    channel.put(other, "unfit", torch.ones(1))
    with pytest.raises(ValueError, match="does not fit"):
        posted.wait()
    with pytest.raises(RuntimeError, match=r"the value under tag 'unfit' .* has been taken"):
        posted.wait()


TAKEN = r"the value under tag '{}' from worker '{}' has been taken: wait\(\) returns it once"


def test_a_wait_that_has_timed_out_may_be_repeated(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, wait_again, Steps(tmp_path))


def wait_again(rank: int, steps: Steps) -> None:
    channel = Channel("again")
    if rank == 0:
        steps.wait_for("timed out")
        channel.put("worker1", "late", torch.ones(1))
        channel.put("worker1", "then", torch.ones(1))
    else:
        posted = channel.post("worker0", "late")
        with pytest.raises(CallTimedOut):
            posted.wait(0.2)
        steps.done("timed out")
        channel.take("worker0", "then")
        assert torch.equal(posted.wait(5), torch.ones(1))
        posted = channel.post("worker0", "never")
        for _ in range(2):
            with pytest.raises(CallTimedOut):
                posted.wait(0.2)


def test_a_value_that_does_not_fit_is_refused(run_on_both: RunWorkers) -> None:
    run_on_both(2, refuse_what_does_not_fit)


def refuse_what_does_not_fit(rank: int) -> None:
    channel, other = Channel("fit"), f"worker{1 - rank}"
    for size in (4, 100_000):
        wrong = [torch.zeros(size + 1), torch.zeros(size, dtype=torch.float64), torch.zeros(size, 1)]
        for index, into in enumerate(wrong):
            channel.put(other, f"{size} {index}", torch.ones(size))
            with pytest.raises(ValueError, match=rf"tag '{size} {index}' from worker '{other}' does not fit"):
                channel.take_into(other, f"{size} {index}", into)
            assert torch.equal(into, torch.zeros_like(into))


def test_a_take_waits_for_its_value(run_on_both: RunWorkers) -> None:
    run_on_both(2, wait_for_values)


def wait_for_values(rank: int) -> None:
    channel = Channel("waits")
    if rank == 1:
        time.sleep(0.3)
        channel.put("worker0", "late", torch.ones(3))
        channel.put("worker0", "large", torch.ones(1 << 20))
    else:
        threads = [threading.Thread(target=channel.take, args=("worker1", tag)) for tag in ("late", "large")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_a_timeout_names_the_tag_and_the_sender(run_on_both: RunWorkers) -> None:
    run_on_both(2, time_out)


def time_out(rank: int) -> None:
    channel, other = Channel("silent"), f"worker{1 - rank}"
    began = time.monotonic()
    with pytest.raises(CallTimedOut, match=f"worker '{other}' .*under tag 'never' of channel 'silent'") as raised:
        channel.take(other, "never", timeout=0.2)
    assert time.monotonic() - began >= 0.2
    assert raised.value.timeout == 0.2
    # A value that arrives after its take has timed out waits for the next take.
    channel.put(other, "has timed out", torch.ones(1))
    channel.take(other, "has timed out")
    channel.put(other, "never", torch.ones(1))
    assert torch.equal(channel.take(other, "never"), torch.ones(1))


def test_a_sender_in_an_earlier_epoch_gets_an_error(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, send_from_the_past, Steps(tmp_path))


def put_until_it_fails(channel: Channel) -> None:
    for number in range(400):  # a value leaves at once, so a later put gets the error
        channel.put("worker0", "late", torch.ones((1 << 20) if number == 0 else 1)).wait()
        time.sleep(0.05)


def send_from_the_past(rank: int, steps: Steps) -> None:
    channel = Channel("fenced", epoch=3)
    if rank == 1:
        channel.put("worker0", "dropped", torch.ones(1 << 20))
        channel.put("worker0", "dropped too", torch.ones(1))
        steps.done("put")
        steps.wait_for("advanced")
        with pytest.raises(EpochEnded, match="worker 'worker0' is in epoch 4 of channel 'fenced'"):
            put_until_it_fails(channel)
        channel.advance(4)
        channel.put("worker0", "small", torch.full((1,), 4.0))
    else:
        steps.wait_for("put")
        channel.advance(4)
        steps.done("advanced")
        assert torch.equal(channel.take("worker1", "small"), torch.full((1,), 4.0))
        with pytest.raises(CallTimedOut):
            channel.take("worker1", "dropped", timeout=0.1)
        with pytest.raises(ValueError, match="'fenced' is in epoch 4 on this worker"):
            Channel("fenced", epoch=3)


def test_values_of_a_later_epoch_wait(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, send_from_the_future, Steps(tmp_path))


def send_from_the_future(rank: int, steps: Steps) -> None:
    if rank == 1:
        channel = Channel("ahead", epoch=2)
        channel.put("worker0", "x", torch.ones(1))
        channel.put("worker0", "y", torch.ones(1 << 20))
        steps.done("put")
    else:
        steps.wait_for("put")
        time.sleep(0.2)
        channel = Channel("ahead", epoch=1)
        with pytest.raises(CallTimedOut):
            channel.take("worker1", "x", timeout=0.1)
        channel.advance(2)
        assert torch.equal(channel.take("worker1", "x"), torch.ones(1))
        assert torch.equal(channel.take("worker1", "y"), torch.ones(1 << 20))


def test_the_end_of_an_epoch_ends_its_waits(run_on_both: RunWorkers) -> None:
    run_on_both(2, end_waits)


def end_waits(rank: int) -> None:
    for end, said in ((lambda channel: channel.advance(1), "epoch 1"), (lambda channel: channel.close(), "closed")):
        channel, old = Channel(f"ending {said}"), Channel(f"ending {said}")
        other = f"worker{1 - rank}"
        timer = threading.Timer(0.2, end, (channel,))
        timer.start()
        with pytest.raises(EpochEnded, match=said):
            old.take(other, "never")
        timer.join()
        with pytest.raises(EpochEnded, match=said):
            old.put(other, "never", torch.ones(1))


def test_late_values_of_a_closed_channel_do_not_block_shutdown(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, put_to_a_closed_channel, Steps(tmp_path))


def put_to_a_closed_channel(rank: int, steps: Steps) -> None:
    channel = Channel("closed", epoch=1)
    if rank == 0:
        channel.close()
        steps.done("closed")
    else:
        steps.wait_for("closed")
        channel.put("worker0", "late", torch.ones(2))
        rpc._set_rpc_timeout(1)
        channel.advance(2)  # the slots do not know that the receiver has closed
        channel.put("worker0", "later", torch.ones(2))


def test_a_receiver_that_takes_nothing_stops_the_sender(run_on_both: RunWorkers, tmp_path: Path) -> None:
    run_on_both(2, put_without_end, Steps(tmp_path))


def put_until_it_blocks(channel: Channel, value: torch.Tensor) -> tuple[int, str]:
    """Put the value under 0, 1, ... Return the number at which it blocked, and the error."""
    for number in range(100_000):
        try:
            channel.put("worker0", str(number), value, timeout=0.5)
        except CallTimedOut as error:
            return number, str(error)
    raise AssertionError("it never blocked")


def put_without_end(rank: int, steps: Steps) -> None:
    channel = Channel("flood")
    size = 4 << 20
    if rank == 1:
        value = torch.ones(size // 4)
        number, said = put_until_it_blocks(channel, value)
        assert "worker 'worker0'" in said
        assert "has not taken" in said
        assert number * size <= (256 + 64 + 4) << 20  # lent by the sender, and received but not taken
        steps.done("stopped")
        channel.put("worker0", str(number), value)
        channel.put("worker0", "count", torch.tensor(number + 1))
        steps.wait_for("taken")
    else:
        steps.wait_for("stopped")
        for number in range(10):
            assert channel.take("worker1", str(number)).numel() == size // 4
        count = int(channel.take("worker1", "count"))
        for number in range(10, count):
            assert channel.take("worker1", str(number)).numel() == size // 4
        steps.done("taken")


def test_small_values_that_are_not_taken_stop_the_sender(run_on_ucx: RunWorkers, tmp_path: Path) -> None:
    run_on_ucx(2, put_small_without_end, Steps(tmp_path))


def put_small_without_end(rank: int, steps: Steps) -> None:
    channel = Channel("drizzle")
    if rank == 1:
        value = torch.ones(4096)
        put, _ = put_until_it_blocks(channel, value)
        assert put * 16384 <= 9 << 20
        steps.done("stopped")
        for number in range(put, put + 200):
            channel.put("worker0", str(number), value)
        channel.put("worker0", "count", torch.tensor(put + 200))
        steps.wait_for("taken")
    else:
        steps.wait_for("stopped")
        for number in range(400):
            channel.take("worker1", str(number))
        rest = int(channel.take("worker1", "count"))
        for number in range(400, rest):
            channel.take("worker1", str(number))
        steps.done("taken")


def test_the_death_of_a_sender_ends_a_take(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(2, lose_a_sender, shutdown=False, exit_codes={1: KILLED})


def lose_a_sender(rank: int) -> None:
    channel = Channel("loss")
    if rank == 1:
        channel.put("worker0", "last words", torch.ones(1))
        channel.take("worker0", "die")
        die()
    channel.put("worker1", "die", torch.ones(0))
    with pytest.raises(WorkerLost, match="worker1") as lost:
        channel.take("worker1", "never", timeout=0)
    assert lost.value.name == "worker1"
    assert torch.equal(channel.take("worker1", "last words"), torch.ones(1))
    with pytest.raises(WorkerLost, match="worker1"):
        channel.put("worker1", "x", torch.ones(1)).wait()
    rpc.shutdown(graceful=False)


def test_handlers_may_take_values(run_on_ucx: RunWorkers) -> None:
    run_on_ucx(2, take_in_handlers, options={"num_worker_threads": 2})


def take_here(tag: str) -> torch.Tensor:
    return Channel("handlers").take("worker0", tag)


def take_in_handlers(rank: int) -> None:
    if rank == 0:
        calls = [rpc.rpc_async("worker1", take_here, (str(number),)) for number in range(2)]
        channel = Channel("handlers")
        for number in range(2):
            channel.put("worker1", str(number), torch.tensor(number))
        assert [int(call.wait()) for call in calls] == [0, 1]


def test_errors_name_wrong_values(run_on_both: RunWorkers) -> None:
    run_on_both(1, name_wrong_values)


def name_wrong_values(rank: int) -> None:
    with pytest.raises(ValueError, match=r"epoch must be from 0 to 2\*\*63 - 1; got -1"):
        Channel("wrong", epoch=-1)
    with pytest.raises(ValueError, match=r"epoch must be from 0 to 2\*\*63 - 1; got 9223372036854775808"):
        Channel("wrong", epoch=2**63)
    with pytest.raises(TypeError, match=r"epoch must be an int; got '1' \(str\)"):
        Channel("wrong", epoch="1")
    channel = Channel("wrong")
    with pytest.raises(TypeError, match=r"value must be a tensor or a list of tensors; got \[1\]"):
        channel.put("worker0", "x", [1])
    with pytest.raises(RuntimeError, match="nobody"):
        channel.put("nobody", "x", torch.ones(1)).wait()


def test_a_channel_needs_rpc() -> None:
    with pytest.raises(NotRunning, match="init_rpc"):
        Channel("x")


def test_close_during_a_refusal_finds_whole_records() -> None:
    slots = RpcSlots("worker0")

    class Refused(dict):
        def __setitem__(self, key: object, why: object) -> None:
            # close() reads these records on another thread.
            assert slots._changed._is_owned()
            super().__setitem__(key, why)

    slots._refused, slots._lent = Refused(), {"worker1": 8}
    sent: torch.futures.Future = torch.futures.Future()
    sent.set_result("worker 'worker1' is in epoch 2")
    slots._end(sent, "group", 1, "worker1", 8)
    assert slots._refused == {("group", 1, "worker1"): "worker 'worker1' is in epoch 2"}
