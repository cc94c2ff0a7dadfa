"""Messages whose two halves do not match, and channels of which one end has begun more than the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_sights import LIMITS, PaperRank, diagnosed, found_in, rank_1, running, waiting_for_rank_1

from lockstep.observe.diagnosis import diagnose
from lockstep.observe.divergence import find_mismatch
from lockstep.observe.message_findings import find_left_over, find_too_large
from lockstep.observe.scene import Scene
from lockstep.observe.wording import Finding

ABORT = "was killed by SIGABRT"


def send(what: str, to: int, tag: int = 0) -> str:
    return f"send {what} to rank {to} tag {tag}"


def recv(what: str, of: int | str, tag: int = 0) -> str:
    return f"recv {what} from rank {of} tag {tag}"


def pair(*sizes: tuple[str, str], is_gone: bool = True, tag: int = 0) -> list[PaperRank]:
    """Rank 0 of three has sent these to rank 2, which asked for those, and is gone since."""
    ranks = running(3)
    for sent, asked in sizes:
        ranks[0].message(send(sent, 2, tag), "train.py:50 give")
        ranks[2].message(recv(asked, 0, tag), "train.py:60 take")
    if is_gone:
        ranks[2].is_gone, ranks[2].how, ranks[2].age_s = True, ABORT, 1.3
    return ranks


def shows_both_calls(finding: Finding, sent: str, asked: str) -> None:
    """Of rank 0 and rank 2, whose message it is."""
    assert f"\n    rank 0: {send(sent, 2)} at train.py:50 give\n" in finding.text
    assert f"\n    rank 2: {recv(asked, 0)} at train.py:60 take\n" in finding.text


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ("float64 [4]", "float32 [4]"),
        ("float32 [8]", "float32 [4]"),
        ("float32 [2, 4]", "bfloat16 [2, 4]"),
        ("int64 []", "int32 []"),
        ("float32 [4]", "float8_e4m3fn [4]"),
        ("complex64 [3]", "float32 [3]"),
        ("float32 [1]", "bool [3]"),
    ],
)
def test_the_two_calls_of_which_one_ends_a_rank_are_shown(sent: str, asked: str) -> None:
    finding = found_in(pair(("float32 [4]", "float32 [4]"), (sent, asked), ("int8 [1]", "int8 [1]")))
    assert (finding.kind, finding.culprits, finding.is_certain) == ("mismatch", (0, 2), True)
    assert "\n  rank 2 asked for less than was sent, in their 2nd message:\n" in finding.text
    shows_both_calls(finding, sent, asked)


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ("float32 [4]", "float32 [4]"),
        ("float32 [4]", "float32 [2, 2]"),
        ("float32 [4]", "uint8 [16]"),
        ("float32 [4]", "float32 [8]"),  # Gloo lets that through
        ("float32 []", "float32 [1]"),
        ("float32 [0, 4]", "float32 [0]"),
        ("", "float32 [4]"),
        ("float32 [4]", ".."),
    ],
)
def test_messages_that_fit_are_not_blamed_for_an_abort(sent: str, asked: str) -> None:
    assert diagnosed(pair((sent, asked))) is None


def test_sizes_are_only_compared_once_a_rank_has_ended_by_that() -> None:
    assert diagnosed(pair(("float32 [8]", "float32 [4]"), is_gone=False)) is None
    ranks = pair(("float32 [8]", "float32 [4]"))
    ranks[2].how = "was killed by SIGKILL"
    assert diagnosed(ranks) is None


def test_what_was_to_come_from_any_rank_pairs_with_nothing() -> None:
    ranks = running(3)
    ranks[2].message(recv("float32 [2]", "any"))
    kill = pair(("float32 [8]", "float32 [4]"))[2]
    ranks[2].is_gone, ranks[2].how, ranks[2].age_s = True, kill.how, kill.age_s
    ranks[0].message(send("float32 [8]", 2))
    ranks[2].message(recv("float32 [4]", 0))
    assert diagnosed(ranks) is None


def test_messages_pair_by_their_numbers_where_the_older_ones_are_overwritten() -> None:
    """Sizes go up and down: one place further on nothing would fit."""
    sizes = [(f"float32 [{size}]", f"float32 [{size}]") for size in (1, 2) * 40]
    ranks = pair(*sizes)
    ranks[0].kept, ranks[2].kept = 11, 20
    assert diagnosed(ranks) is None
    ranks = pair(*sizes, ("float32 [3]", "float32 [2]"))
    ranks[0].kept, ranks[2].kept = 11, 20
    assert "in their 81st message:" in found_in(ranks).text


@pytest.mark.parametrize("other", [{"tag": 1}, {}])
def test_tags_are_channels_of_their_own(other: dict[str, int]) -> None:
    ranks = pair(("float32 [4]", "float32 [4]"))
    ranks[0].message(send("float32 [9]", 2, **other))
    ranks[2].message(recv("float32 [4]", 0))
    assert (diagnosed(ranks) is None) == bool(other)


# ------------------------------------------------------------------ ends


def failed(ranks: list[PaperRank], me: int) -> Finding | None:
    """What rank `me` makes of it that its newest operation has failed."""
    ranks[me].waits(len(ranks[me].records) - 1, 0.0)
    ranks[me].status_fields["stack"] = ()
    sights = {one.rank: one.sight() for one in ranks}
    return diagnose(me, sights, lambda rank: ranks[rank].kept_records(), replace(LIMITS, grace_s=0.0))


def stage(sent: int, asked: int, kept: int = 1024) -> list[PaperRank]:
    """Rank 0 has sent so many to rank 1, which has asked for so many."""
    ranks = running(2)
    for one in ranks:
        one.kept = kept
    for _ in range(sent):
        ranks[0].message(send("float32 [4]", 1), "train.py:50 give")
    for _ in range(asked):
        ranks[1].message(recv("float32 [4]", 0), "train.py:60 take")
    return ranks


@pytest.mark.parametrize("kept", [1024, 8])
@pytest.mark.parametrize(("sent", "asked", "early", "me"), [(12, 13, 0, 1), (13, 12, 1, 0), (12, 20, 0, 1)])
def test_the_numbers_of_a_channel_are_told_where_one_end_has_left(
    sent: int, asked: int, early: int, me: int, kept: int
) -> None:
    ranks = stage(sent, asked, kept)
    ranks[early].finishes()
    finding = failed(ranks, me)
    assert finding is not None
    assert (finding.kind, finding.culprits) == ("finished", (early,))
    assert f"\n  rank 0 sent {sent}, the last at train.py:50 give (step 4)\n" in finding.text
    assert f"\n  rank 1 asked for {asked}, the last at train.py:60 take (step 4)\n" in finding.text
    assert "Likely fix: as many sends as receives, and wait() for each isend before the end." in finding.text


def test_who_left_before_its_sends_were_through_is_told_to_wait_for_them() -> None:
    ranks = stage(20, 2)
    ranks[0].finishes()
    finding = failed(ranks, 1)
    assert finding is not None
    assert "rank 0 sent 20, " in finding.text
    assert "rank 1 asked for 2, " in finding.text


@pytest.mark.parametrize(("each", "is_told"), [((4, 6), True), ((4, 4), False)])
@pytest.mark.parametrize("kept", [1024, 7])
def test_ends_whose_messages_pair_across_steps_are_both_named(each: tuple[int, int], is_told: bool, kept: int) -> None:
    """As stages of a pipeline with other microbatches; not told where no step is whole in the record."""
    ranks = running(2)
    texts = (send("float32 [4]", 1), recv("float32 [4]", 0))
    for one, text, count in zip(ranks, texts, each, strict=True):
        for _ in range(3 if one.rank == 0 else 2):
            for _ in range(count):
                one.message(text, "pipe.py:30 main")
            one.step += 1
    ranks[1].message(texts[1], "pipe.py:30 main")
    ranks[0].finishes()
    for one in ranks:
        one.kept = kept
    finding = failed(ranks, 1)
    assert finding is not None
    assert (finding.kind, finding.culprits) == ("finished", (0, 1) if is_told and kept > 7 else (0,))
    assert ("\n  in step 5: rank 0 sent 4, rank 1 asked for 6\n" in finding.text) == (is_told and kept > 7)


def test_of_a_message_to_who_has_ended_messages_are_advised_and_not_batches() -> None:
    ranks = stage(1, 0)
    ranks[1].finishes()
    finding = failed(ranks, 0)
    assert finding is not None
    assert (finding.kind, finding.culprits) == ("finished", (1,))
    assert "Likely fix: as many sends as receives, and wait() for each isend before the end." in finding.text


def test_numbers_are_not_told_where_one_of_them_is_not_known() -> None:
    ranks = stage(0, 1)
    ranks[0].finishes()
    finding = failed(ranks, 1)
    assert finding is not None
    assert "asked for" not in finding.text
    assert "rank 1 wanted a message (recv" in finding.text


def test_whoever_still_runs_is_not_blamed_for_a_message_that_failed() -> None:
    assert failed(stage(12, 13), 1) is None


def test_a_message_that_was_not_the_newest_has_not_failed() -> None:
    ranks = stage(12, 12)
    ranks[0].finishes()
    ranks[1].waits(ranks[1].message(recv("float32 [4]", 0, 7)), 0.0)
    ranks[1].call(group="pair")
    sights = {one.rank: one.sight() for one in ranks}
    assert diagnose(1, sights, lambda rank: ranks[rank].kept_records(), replace(LIMITS, grace_s=0.0)) is None


# ------------------------------------------------------------------ several that were killed


@pytest.mark.parametrize("how", ["was killed by SIGKILL", "was killed by the kernel: out of memory"])
def test_all_that_were_killed_in_one_way_are_named(how: str) -> None:
    ranks = waiting_for_rank_1(4, 5)
    for rank, age_s in ((1, 1.9), (3, 1.1)):
        ranks[rank].is_gone, ranks[rank].how, ranks[rank].age_s = True, how, age_s
    ranks[3].how += "; its last words: step 4"
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("gone", (1, 3))
    assert all(f"rank {rank} (pid 471{rank}) {how.partition(':')[0]}" in finding.text for rank in (1, 3))


@pytest.mark.parametrize("how", ["was killed by SIGABRT", "ended with exit code 1", "was killed by SIGSEGV"])
def test_an_end_that_may_be_another_ones_doing_is_not_named_beside_it(how: str) -> None:
    ranks = waiting_for_rank_1(4, 5)
    for rank, age_s in ((1, 1.9), (3, 1.1)):
        ranks[rank].is_gone, ranks[rank].how, ranks[rank].age_s = True, how, age_s
    assert found_in(ranks).culprits == (1,)


def test_who_was_killed_is_named_without_who_ended_in_another_way() -> None:
    def kill(one: PaperRank) -> None:
        one.is_gone, one.how, one.age_s = True, "was killed by SIGKILL", 1.3

    ranks = rank_1(kill, 5, 4)
    ranks[2].is_gone, ranks[2].how, ranks[2].age_s = True, "was ended by its launcher because of another", 1.2
    assert found_in(ranks).culprits == (1,)


# ------------------------------------------------------------------ what is only said


def left_over(ranks: list[PaperRank], me: int) -> Finding | None:
    sights = {one.rank: one.sight() for one in ranks}
    return find_left_over(Scene(me, sights, lambda rank: ranks[rank].kept_records(), LIMITS))


def ended(sent: int, asked: int, kept: int = 1024) -> list[PaperRank]:
    ranks = stage(sent, asked, kept)
    for one, told in zip(ranks, ({"world send 1 0": sent}, {"world recv 0 0": asked}), strict=True):
        one.status_fields["messages"] = {key: count for key, count in told.items() if count}
        one.finishes()
    return ranks


@pytest.mark.parametrize(("sent", "asked"), [(1, 0), (3, 2), (1100, 1000)])
def test_messages_that_nobody_asked_for_are_told_at_the_end(sent: int, asked: int) -> None:
    note = left_over(ended(sent, asked, 2048), 0)
    assert note is not None
    assert (note.kind, note.culprits, note.is_certain) == ("messages", (), False)
    assert f"  rank 0 sent {sent}, rank 1 asked for {asked}; " in note.text
    assert f"\n    {send('float32 [4]', 1)} at train.py:50 give\n" in note.text


def test_messages_that_were_received_or_may_yet_be_are_not_told() -> None:
    assert left_over(ended(3, 3), 0) is None
    assert left_over(ended(2, 3), 0) is None  # posted early, and never needed
    ranks = ended(3, 2)
    del ranks[1].status_fields["state"]
    assert left_over(ranks, 0) is None  # it goes on
    assert left_over(ranks, 1) is not None
    assert left_over(ended(1, 0)[:1], 0) is None  # nobody has heard of the other one
    assert left_over(ended(5, 0, kept=3), 0) is None  # what it asked for is not known
    ranks = ended(5, 0)
    ranks[1].message(recv("float32 [4]", "any"))
    assert left_over(ranks, 0) is None
    ranks = ended(3, 2)
    ranks[1].raises("PeerFailed", "rank 0 is lost", "train.py:40", is_consequence=True)
    assert left_over(ranks, 0) is None


@pytest.mark.parametrize(
    ("sent", "asked", "is_told"), [("[4]", "[8]", True), ("[8]", "[4]", False), ("[4]", "[2, 2]", False)]
)
def test_who_asks_for_more_than_is_sent_is_told_so(sent: str, asked: str, is_told: bool) -> None:
    for note in compared(f"float32 {sent}", f"float32 {asked}"):
        assert (note is not None) == is_told
        if note is not None:
            assert (note.kind, note.culprits, note.is_certain) == ("messages", (0, 2), False)
            assert "rank 2 asked for more than was sent, in their 1st message:" in note.text
    assert compared(f"float32 {sent}", f"float32 {asked}", unknown=2) == [None, None]


@pytest.mark.parametrize(
    ("sent", "asked", "is_told"),
    [((1, 2), (2, 1), True), ((0, 1), (1, 0), True), ((1, 2), (1, 2), False), ((0, 0), (5, 6), False)],
)
def test_who_asks_by_tag_where_only_the_order_counts_is_told_so(
    sent: tuple[int, int], asked: tuple[int, int], is_told: bool
) -> None:
    """Tags that mean nothing to either end, as of a receive that names its own, are right on NCCL."""

    first, second = ([f"float32 [4] tagged {tag}" if tag else "float32 [4]" for tag in tags] for tags in (sent, asked))
    ranks = pair(*zip(first, second, strict=True), is_gone=False)
    for rank, key in ((0, "world send 2 0"), (2, "world recv 0 0")):
        ranks[rank].status_fields["messages"] = {key: 2}
    scene = Scene(0, {one.rank: one.sight() for one in ranks}, lambda rank: ranks[rank].kept_records(), LIMITS)
    assert [find_too_large(scene, me) for me in (0, 2)] == [None, None]
    for note in (find_too_large(scene, me, is_note=True) for me in (0, 2)):
        assert (note is not None) == is_told
        if note is not None:
            assert (note.kind, note.culprits, note.is_certain) == ("messages", (0, 2), False)
            assert note.text.startswith("lockstep: TAGS of messages differ in step 4.  Culprits: ranks 0,2\n")
            assert "rank 2 asked for another tag than was sent, in their 1st message:" in note.text


def test_who_has_ended_well_was_not_sent_too_much() -> None:
    """As a launcher looks at all ranks afterwards: what seems to be a pair may be none."""
    ranks = pair(("float32 [8]", "float32 [4]"), is_gone=False)
    for is_finished in (False, True):
        ranks[2].finishes() if is_finished else None
        sights = {one.rank: one.sight() for one in ranks}
        scene = Scene(2, sights, lambda rank: ranks[rank].kept_records(), replace(LIMITS, grace_s=0.0))
        assert (find_mismatch(scene) is None) == is_finished


# ------------------------------------------------------------------ of another dtype


def compared(sent: str, asked: str, *, is_note: bool = True, unknown: int | None = None) -> list[Finding | None]:
    """What each end finds. unknown: the rank that cannot tell how many messages it has begun."""
    ranks = pair((sent, asked), is_gone=False)
    for rank, key in ((0, "world send 2 0"), (2, "world recv 0 0")):
        ranks[rank].status_fields["messages"] = {key: 1} if rank != unknown else {}
    scene = Scene(0, {one.rank: one.sight() for one in ranks}, lambda rank: ranks[rank].kept_records(), LIMITS)
    return [find_too_large(scene, me, is_note=is_note) for me in (0, 2)]


@pytest.mark.parametrize("is_note", [True, False])
@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ("float32 [4]", "int32 [4]"),
        ("float32 [8]", "float64 [4]"),
        ("float32 [8]", "float64 [8]"),
        ("bfloat16 [3]", "float16 [3]"),
        ("int16 [3]", "bfloat16 [3]"),
        ("complex64 [2]", "float64 [2]"),
        ("float32 []", "int32 [1]"),
    ],
)
def test_what_is_received_as_another_dtype_is_a_mismatch(sent: str, asked: str, is_note: bool) -> None:
    for finding in compared(sent, asked, is_note=is_note):
        assert finding is not None
        assert (finding.kind, finding.culprits, finding.is_certain) == ("mismatch", (0, 2), True)
        assert finding.text.startswith("lockstep: MISMATCH in step 4.  Culprits: ranks 0,2\n")
        assert "\n  rank 2 asked for another dtype than was sent, in their 1st message:\n" in finding.text
        shows_both_calls(finding, sent, asked)


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ("float32 [4]", "float32 [2, 2]"),
        ("float32 [4]", "uint8 [16]"),
        ("int8 [16]", "float32 [4]"),
        ("uint8 [4]", "bool [4]"),
        ("complex64 [3]", "float32 [3, 2]"),
        ("float64 [3, 2]", "complex128 [3]"),
        ("float32 [0]", "int64 [0]"),
        ("float32 [4]", ".."),
    ],
)
def test_bytes_and_views_of_one_value_are_not(sent: str, asked: str) -> None:
    assert compared(sent, asked) == [None, None]


@pytest.mark.parametrize("unknown", [0, 2])
def test_dtypes_are_not_compared_where_a_rank_does_not_know_the_numbers_of_its_messages(unknown: int) -> None:
    """It has received from any, say, of which the records are overwritten: what looks like a pair may be none."""
    assert compared("float32 [4]", "int32 [4]", unknown=unknown) == [None, None]


def test_of_two_sizes_and_dtypes_the_size_is_said() -> None:
    for finding in compared("float64 [4]", "float32 [4]"):
        assert finding is not None
        assert "rank 2 asked for less than was sent, in their 1st message:" in finding.text


# ------------------------------------------------------------------ whose Work was dropped


def dropped(*numbers: int, asked: int = 3, by: int = 0, age_s: float = 12.4) -> list[PaperRank]:
    """Rank 0 has sent four messages, rank 1 stands in the last that it asked for. Rank `by` has dropped these."""
    ranks = stage(4, asked)
    first = len(ranks[by].records) - (4, asked)[by]
    for number in numbers:
        ranks[by].records[first + number] = ranks[by].records[first + number]._replace(digest=1)
    ranks[0].status_fields["messages"] = {"world send 1 0": 4}
    ranks[1].status_fields["messages"] = {"world recv 0 0": asked}
    ranks[1].waits(len(ranks[1].records) - 1, age_s)
    return ranks


def at_barrier(ranks: list[PaperRank]) -> list[PaperRank]:
    ranks[0].waits(ranks[0].call("barrier", "train.py:70 meet"), 12.0)
    return ranks


@pytest.mark.parametrize("numbers", [(2,), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("is_at_work", [True, False])
def test_who_dropped_the_work_of_a_message_that_never_comes_is_named(
    numbers: tuple[int, ...], is_at_work: bool
) -> None:
    ranks = dropped(*numbers)
    finding = found_in(ranks if is_at_work else at_barrier(ranks))
    assert (finding.kind, finding.culprits, finding.is_certain) == ("transport", (0,), False)
    assert finding.text.startswith(
        "lockstep: HANG for a lost message, for 12.4 s in step 4.  Culprit: rank 0 (host b, "
    )
    assert "\n  rank 1 waits in recv float32 [4] from rank 0 tag 0, train.py:60 take, for 12.4 s\n" in finding.text
    count = len([number for number in numbers if number <= 2])
    assert f"\n    rank 0 had dropped the Work of {count} by then, the last: {send('float32 [4]', 1)}" in finding.text
    assert "train.py:50 give" in " ".join(finding.text.split())
    assert "\nLikely fix: keep what isend and irecv return, and wait() for it.\n" in finding.text


def test_so_is_a_receiver_that_dropped_an_earlier_receive_of_its_own() -> None:
    finding = found_in(at_barrier(dropped(0, by=1)))
    assert (finding.kind, finding.culprits) == ("transport", (1,))
    assert f"\n    rank 1 had dropped the Work of 1 by then, the last: {recv('float32 [4]', 0)}" in finding.text


def test_who_waits_at_another_line_than_it_asked_is_not_taken_for_missing() -> None:
    ranks = at_barrier(dropped(1))
    ranks[1].is_at("train.py:66 take", unmoved_s=12.4)
    finding = found_in(ranks)
    assert (finding.kind, finding.culprits) == ("transport", (0,))
    assert "a lost message" in finding.text


@pytest.mark.parametrize("numbers", [(), (3,)])
def test_what_is_sent_after_the_message_that_does_not_come_has_not_lost_it(numbers: tuple[int, ...]) -> None:
    ranks = at_barrier(dropped(*numbers))
    assert diagnosed(ranks) is None  # later: of the transport
    ranks[1].open_s = ranks[0].open_s = 40.0
    for one in ranks:
        one.status_fields["unmoved_s"] = 40.0
    assert "HANG of the transport: all ranks are there" in found_in(ranks).text


def test_a_message_that_may_yet_come_is_not_lost() -> None:
    assert diagnosed(dropped(2, age_s=9.0)) is None
    ranks = dropped(2)
    ranks[1].status_fields["unmoved_s"] = 1.0  # it gets data
    assert diagnosed(ranks) is None
    ranks = dropped(2, asked=5)  # more than was sent
    assert "lost" not in ("" if (found := diagnosed(ranks)) is None else found.text)
    ranks = dropped(2)
    ranks[0].message(send("float32 [4]", 1, tag=5))
    ranks[1].open.clear()
    ranks[1].waits(ranks[1].message(recv("float32 [4]", 0, tag=5)), 12.4)  # another channel
    assert diagnosed(ranks) is None


def test_messages_of_one_line_that_lack_their_other_half_are_told_once() -> None:
    ranks = running(2)
    for one, text in zip(
        ranks, ("send float32 [4] to rank 1 tag 3", "recv float32 [4] from rank 0 tag 7"), strict=True
    ):
        for _ in range(2):
            one.waits(one.message(text, "pipe.py:3 pass_on"))
    text = found_in(ranks).text
    assert text.count("not asked for by rank 1") == text.count("not sent by rank 0") == 1, text
