"""Mode "check": what differs between ranks is named before it is sent, and so is a tensor that changes in flight."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

import comm_cases
from lockstep.comm.communicator import Communicator
from lockstep.comm.op import CommOp, Work
from lockstep.comm.transport import Transport, TransportLayer
from lockstep.errors import CollectiveMismatch, CommError, PeerLost
from lockstep.observe.checking import CheckLayer
from lockstep.testing.worlds import run_threads

pytestmark = pytest.mark.usefixtures("ranks_share_a_process")

Call = Callable[[Communicator], object]


class Counter:
    """Stands for a guard, and for its recorder."""

    step = step_before = 0

    @property
    def recorder(self) -> Counter:
        return self


class Sent(TransportLayer):
    """What reaches the transport."""

    def __init__(self, inner: Transport, ops: list[CommOp]) -> None:
        super().__init__(inner)
        self.ops = ops

    def submit(self, op: CommOp) -> Work:
        self.ops.append(op)
        return self.inner.submit(op)

    def over(self, inner: Transport) -> Sent:
        return Sent(inner, self.ops)


def checked(comm: Communicator, counter: Counter | None = None) -> tuple[Communicator, list[CommOp]]:
    """The ranks of `comm` under the check, and what is sent."""
    sent = Sent(comm.transport, [])
    return Communicator(CheckLayer(sent, counter or Counter())), sent.ops


def equal(group: Communicator) -> object:
    return group.all_reduce(torch.ones(3))


DIFFERENT: dict[str, Call] = {
    "all_reduce float32 [4] sum": lambda c: c.all_reduce(torch.ones(4)),
    "all_reduce float32 [3, 1] sum": lambda c: c.all_reduce(torch.ones(3, 1)),
    "all_reduce float32 [3] max": lambda c: c.all_reduce(torch.ones(3), "max"),
    "all_reduce int32 [3] sum": lambda c: c.all_reduce(torch.ones(3, dtype=torch.int32)),
    "broadcast float32 [3] root=1": lambda c: c.broadcast(torch.ones(3), 1, async_op=True).wait(),
    "barrier": lambda c: c.barrier(),
    "all_gather float32 3 x [3]": lambda c: c.all_gather([torch.ones(3)] * 3, torch.ones(3)),
    "all_to_all float32": lambda c: c.all_to_all([torch.ones(3)] * 3, [torch.ones(3)] * 3),
}


@pytest.mark.parametrize("text", DIFFERENT)
def test_a_difference_is_named_on_every_rank_before_anything_is_sent(text: str) -> None:
    def body(comm: Communicator) -> str:
        group, ops = checked(comm)
        equal(group)
        del ops[:]
        call = DIFFERENT[text] if comm.rank == 1 else equal
        with pytest.raises(CollectiveMismatch) as raised:
            call(group)
        assert [op.label for op in ops] == ["check"]
        with pytest.raises(CollectiveMismatch):  # nothing of this group makes sense any more
            equal(group)
        assert len(ops) == 1
        return str(raised.value)

    messages = run_threads(3, body)
    for rank, message in enumerate(messages):
        lines = message.splitlines()
        assert lines[0] == f"rank {rank}: the ranks are about to call different operations at the same point:"
        assert lines[1].startswith("  ranks 0, 2: all_reduce float32 [3] sum at tests/sim/test_checking.py:")
        assert lines[1].endswith(" equal, step 1")
        assert lines[2].startswith(f"  rank 1: {text} at tests/sim/test_checking.py:")
        assert "Next: " in lines[3]


def test_a_skipped_operation_is_seen_by_the_step() -> None:
    """Row 1: five equal operations, of which one rank leaves one out."""

    def body(comm: Communicator) -> str:
        counter = Counter()
        group, _ = checked(comm, counter)

        def train() -> None:
            for step in range(5):
                counter.step = step
                if (comm.rank, step) != (1, 1):
                    equal(group)

        with pytest.raises(CollectiveMismatch) as raised:
            train()
        return str(raised.value)

    for message in run_threads(2, body):
        assert "rank 0: all_reduce float32 [3] sum at" in message
        assert "equal, step 2\n  rank 1:" in message
        assert "equal, step 3\n" in message


def test_call_sites_may_differ() -> None:
    def body(comm: Communicator) -> None:
        group, _ = checked(comm)
        if comm.rank == 0:
            group.broadcast(torch.ones(3))
        else:
            group.broadcast(torch.zeros(3))

    run_threads(3, body)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_results_and_what_is_sent_are_the_same_as_without(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        group, ops = checked(comm)
        for name, case in comm_cases.CASES.items():
            if name != "closed":
                case(group)
        sent = [op.kind for op in ops if op.label != "check"]
        del ops[:]
        for name, case in comm_cases.CASES.items():
            if name != "closed":
                case(Communicator(Sent(comm.transport, ops)))
        assert sent == [op.kind for op in ops]

        rows = torch.arange(6.0).view(2, 3)[:, ::2] + comm.rank
        whole = torch.zeros(world_size * 4)
        mine = whole[4 * comm.rank : 4 * comm.rank + 4]
        mine.copy_(rows.reshape(-1))
        group.all_gather_into_tensor(whole, mine, async_op=True).wait()  # in place
        assert whole.view(world_size, 4).equal(
            torch.stack([rows.reshape(-1) - comm.rank + r for r in range(world_size)])
        )
        part = whole.view(world_size, 4)[comm.rank]
        group.reduce_scatter_tensor(part, whole, async_op=True).wait()
        assert part.equal(world_size * rows.reshape(-1))
        with torch.inference_mode():
            tensor = torch.ones(5, 1)
            work = group.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.tolist() == [[world_size]] * 5

    run_threads(world_size, body)


@pytest.mark.parametrize("before", [0, 100])
def test_it_ends_after_some_steps_of_this_start_on_all_ranks_at_once(before: int) -> None:
    def body(comm: Communicator) -> list[int]:
        counter = Counter()
        group, ops = checked(comm, counter)
        counter.step_before = before
        checks = []
        for step in range(6):
            counter.step = before + step
            equal(group)
            group.barrier(async_op=True).wait()
            checks.append(sum(op.label == "check" for op in ops))
        part = group.split(0)
        assert part is not None
        del ops[:]
        for _ in range(3):
            part.barrier()
        assert [op.label for op in ops] == ["check", "", "", ""]  # a new group finds out by itself
        return checks

    assert run_threads(2, body) == [[2, 4, 6, 7, 7, 7]] * 2


def test_messages_pass() -> None:
    def body(comm: Communicator) -> None:
        group, ops = checked(comm)
        other = 1 - comm.rank
        pair = [group.send_op(torch.ones(2), other), group.recv_op(torch.ones(2), other)]
        group.batch_send_recv(pair)
        assert [op.kind for op in ops] == ["batch_send_recv"]

    run_threads(2, body)


def test_a_lost_peer_is_what_the_transport_says() -> None:
    def body(comm: Communicator) -> None:
        group, _ = checked(comm)
        if comm.rank == 0:
            work = group.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(PeerLost):
                work.wait()

    run_threads(2, body)


# ---------------------------------------------------------------------- changed in flight


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("how", ["add", "numpy", "data", "view"])
def test_a_tensor_that_is_changed_before_the_wait(world_size: int, how: str) -> None:
    change: dict[str, Callable[[torch.Tensor], object]] = {
        "add": lambda tensor: tensor.add_(1),
        "numpy": lambda tensor: tensor.numpy().fill(3),
        "data": lambda tensor: tensor.data.mul_(2),
        "view": lambda tensor: tensor.view(-1)[-1:].zero_(),
    }

    def body(comm: Communicator) -> str:
        group, _ = checked(comm)
        tensor = torch.full((4, 5), 2.0)
        work = group.all_reduce(tensor, async_op=True, label="bucket1")
        change[how](tensor)
        with pytest.raises(CommError):
            work.wait()
        with pytest.raises(CommError) as raised:
            work.wait()
        assert work.is_done()
        assert tensor.eq(2.0 * world_size).all()  # the result, as it should have been
        equal(group)  # and the group goes on
        return str(raised.value)

    for rank, message in enumerate(run_threads(world_size, body)):
        assert message.startswith("all_reduce float32 [4, 5] sum at tests/sim/test_checking.py:")
        assert f" body, step 1, rank {rank}: its input 0, float32 [4, 5], was changed while" in message


def test_an_input_and_an_output_that_are_changed() -> None:
    def body(comm: Communicator) -> tuple[str, str]:
        group, _ = checked(comm)
        rows, row = torch.zeros(6), torch.ones(3)

        def what_is_named(changed: torch.Tensor) -> str:
            work = group.all_gather_into_tensor(rows, row, async_op=True)
            changed[1] += 1
            with pytest.raises(CommError) as raised:
                work.wait()
            return str(raised.value).split(": ")[1].split(",")[0]

        return what_is_named(row), what_is_named(rows)

    assert run_threads(2, body) == [("its input 0", "its output 0")] * 2


def test_what_lies_beside_may_change() -> None:
    """Buckets are often views of one tensor: torch's count of changes is one for all of them."""

    def body(comm: Communicator) -> None:
        group, _ = checked(comm)
        whole = torch.ones(10)
        first = group.all_reduce(whole[:5], async_op=True)
        whole[5:] += 1
        second = group.all_reduce(whole[5:], async_op=True)
        second.wait()
        first.wait()
        assert whole.tolist() == [2.0] * 5 + [4.0] * 5

    run_threads(2, body)


def test_works_that_nobody_waits_for_give_their_results() -> None:
    def body(comm: Communicator) -> None:
        group, _ = checked(comm)
        dropped, polled = torch.ones(3), torch.ones(4)
        group.all_reduce(dropped, async_op=True)
        work = group.all_reduce(polled, async_op=True)
        gc.collect()
        group.barrier()
        group.barrier()
        assert dropped.tolist() == [2.0] * 3
        assert work.is_done()
        assert polled.tolist() == [2.0] * 4

    run_threads(2, body)
