"""The queue of operations of one communicator, with operations that only wait for this test."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from lockstep.comm.engine import Engine, EngineWork, Patience
from lockstep.comm.op import CommOp
from lockstep.comm.waiting import wait_until
from lockstep.errors import CollectiveTimeout, CommError, TransportClosed

LIMIT_S = 30.0


class Scene:
    """An engine whose operations have labels; what happened to them."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, str]] = []  # label, thread
        self.gates: dict[str, threading.Event] = {}  # an operation with a gate ends when it is opened
        self.raises: dict[str, BaseException] = {}
        patience = Patience()
        ran, gates, raises = self.ran, self.gates, self.raises

        def execute(op: CommOp) -> None:
            ran.append((op.label, threading.current_thread().name))
            gate = gates.get(op.label)
            while gate is not None and not gate.wait(0.001):
                if patience.closing:
                    raise TransportClosed("closed")
                if patience.is_over():
                    raise CollectiveTimeout(f"within {patience.seconds:g} s", (1,))
            if op.label in raises:
                raise raises[op.label]

        self.engine = Engine(execute, patience, LIMIT_S, "engine")

    def submit(self, label: str, async_op: bool = True, owner: object = None) -> EngineWork:
        return self.engine.submit(CommOp(0, "barrier", label=label, async_op=async_op), owner)

    def gate(self, label: str) -> threading.Event:
        return self.gates.setdefault(label, threading.Event())

    def labels(self) -> list[str]:
        return [label for label, _ in self.ran]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_in_the_order_of_submission(scene: Scene) -> None:
    works = [scene.submit(str(number), async_op=number % 3 != 0) for number in range(30)]
    works[7].wait()
    assert scene.labels()[:8] == [str(number) for number in range(8)]
    for work in reversed(works):
        work.wait()
        work.wait()
        assert work.is_done()
    assert scene.labels() == [str(number) for number in range(30)]
    scene.engine.close()


def test_whoever_waits_does_the_work(scene: Scene) -> None:
    scene.submit("blocking", async_op=False).wait()
    assert scene.ran == [("blocking", threading.current_thread().name)]
    behind = scene.submit("asynchronous")
    assert wait_until(behind.is_done, LIMIT_S)
    assert scene.ran[1] == ("asynchronous", "engine")
    scene.engine.close()


def test_a_wait_ends_with_its_own_operation(scene: Scene) -> None:
    """The thread is in the next operation already, which needs what the waiter does afterwards."""
    first, second = scene.gate("first"), scene.gate("second")
    works = [scene.submit("first"), scene.submit("second")]
    assert wait_until(lambda: scene.labels() == ["first"], LIMIT_S)
    waited = threading.Thread(target=works[0].wait)
    waited.start()
    first.set()
    waited.join()
    assert not works[1].is_done()
    second.set()
    works[1].wait()
    scene.engine.close()


def test_errors_are_the_operation_s_own(scene: Scene) -> None:
    mine = CommError("mine")
    scene.raises |= {"comm": mine, "kernel": RuntimeError("no kernel"), "interrupt": KeyboardInterrupt()}
    for async_op in (True, False):
        works = [scene.submit(label, async_op) for label in ("good", "comm", "kernel", "good")]
        for _ in range(2):
            works[0].wait()
            with pytest.raises(CommError) as raised:
                works[1].wait()
            assert raised.value is mine
            with pytest.raises(CommError, match=r"^barrier \(seq 0, 'kernel', 0 bytes\): no kernel$") as wrapped:
                works[2].wait()
            assert isinstance(wrapped.value.__cause__, RuntimeError)
            works[3].wait()
    interrupted = scene.submit("interrupt", async_op=False)
    with pytest.raises(KeyboardInterrupt):
        interrupted.wait()
    with pytest.raises(CommError, match="interrupted by KeyboardInterrupt"):
        interrupted.wait()
    scene.submit("good").wait()
    scene.engine.close()


def test_the_limit_of_a_wait_is_that_of_what_stands_before_it(scene: Scene) -> None:
    gate = scene.gate("slow")
    works = [scene.submit("slow"), scene.submit("next")]
    assert wait_until(lambda: scene.labels() == ["slow"], LIMIT_S)
    works[1].wait(0.01)  # the slow one gives up, the next one can run
    with pytest.raises(CollectiveTimeout, match=r"within 0\.01 s") as raised:
        works[0].wait()
    assert raised.value.missing == (1,)
    slow = scene.submit("slow", async_op=False)
    with pytest.raises(CollectiveTimeout, match=r"within 0 s"):
        slow.wait(0.0)
    gate.set()
    scene.submit("slow").wait()
    scene.engine.close()


def test_closing(scene: Scene) -> None:
    """What is under way gives up, what has not begun does not begin, and the thread ends."""
    before = threading.active_count()
    scene.gate("under way")
    works = [scene.submit("under way"), scene.submit("later"), scene.submit("blocking", async_op=False)]
    assert wait_until(lambda: scene.labels() == ["under way"], LIMIT_S)
    scene.engine.close()
    for work in works:
        with pytest.raises(TransportClosed):
            work.wait()
    assert scene.labels() == ["under way"]
    assert threading.active_count() == before
    scene.engine.close()


def test_closing_while_others_wait(scene: Scene) -> None:
    scene.gate("under way")
    errors: list[BaseException] = []

    def wait(work: EngineWork) -> None:
        with pytest.raises(TransportClosed) as raised:
            work.wait()
        errors.append(raised.value)

    works = [scene.submit("under way", async_op=False), scene.submit("under way", async_op=False)]
    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: scene.labels() == ["under way"], LIMIT_S)
    scene.engine.close()
    for thread in threads:
        thread.join()
    assert len(errors) == 2


class Owner:
    """What refers to the engine, and closes it when nobody holds it any more."""

    def __init__(self, scene: Scene) -> None:
        self.end = weakref.finalize(self, scene.engine.close)


@pytest.mark.parametrize("async_op", [True, False])
def test_an_owner_lives_as_long_as_its_operations(scene: Scene, async_op: bool) -> None:
    before = threading.active_count()
    gate = scene.gate("last")
    owner = Owner(scene)
    end = owner.end
    work = scene.submit("last", async_op, owner)
    del owner
    gc.collect()
    assert end.alive
    gate.set()
    work.wait()
    assert wait_until(lambda: not end.alive, LIMIT_S)
    assert wait_until(lambda: threading.active_count() == before, LIMIT_S)


def test_the_limit_of_another_wait_does_not_hit_a_later_operation(scene: Scene) -> None:
    """Asked to give up, an operation that ends well at that moment takes the request with it."""
    patience = scene.engine.patience
    first, second = CommOp(0, "barrier", label="first"), CommOp(1, "barrier", label="second")
    patience.begin(first, LIMIT_S, spins=False)
    patience.give_up(0.5)
    assert patience.is_over()
    patience.end()
    patience.give_up(0.5)  # too late
    patience.begin(second, LIMIT_S, spins=True)
    assert not patience.is_over()
    patience.end()
