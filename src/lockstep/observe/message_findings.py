"""Messages whose ends do not fit together, and messages that nobody asks for."""

from __future__ import annotations

from lockstep.observe.endings import saw_another
from lockstep.observe.flight import Record
from lockstep.observe.messages import bits, channels_of, is_garbled, knows_all_messages, tag_of
from lockstep.observe.scene import Scene
from lockstep.observe.status import FINISHED
from lockstep.observe.wording import Finding, Kind, call, compose, ordinal, step_after

_ONE_SHAPE = "send and receive one dtype and shape; or one of the two has left out a message before."
_SAID: dict[str, tuple[Kind, str, str]] = {  # what is no error for sure
    "more": ("messages", "SIZES of messages differ", _ONE_SHAPE),
    "another tag": ("messages", "TAGS of messages differ", "receive in the order of the sends: NCCL ignores tags."),
}


def find_too_large(scene: Scene, rank: int, *, is_note: bool = False) -> Finding | None:
    """The first message of `rank` of which more was sent than its receiver asked for: Gloo aborts that one; or of which
    it asked for another dtype, which nothing refuses.

    is_note: of size the other way round, which Gloo lets through; or of which it asked for another one, as far as tags
    tell, where only the order counts.
    """
    for (_, ends, _), (sent, asked) in channels_of(scene, rank).items():
        is_counted = all(e in scene.sights and scene.status(e).messages for e in ends)  # else they may be no pairs
        sent_tags = set(map(tag_of, sent.values())) if is_note else set[str]()
        for number in sorted(sent.keys() & asked.keys()):
            pair = sent[number], asked[number]
            than = _misfit(*pair, sent_tags, is_counted=is_counted, is_note=is_note)
            if than:
                lines = [f"rank {ends[1]} asked for {than} than was sent, in their {ordinal(number + 1)} message:"]
                lines += [f"  rank {end}: {call(one)}" for end, one in zip(ends, pair, strict=True)]
                step = min(record.step for record in pair)
                kind, head, fix = _SAID.get(than, ("mismatch", "MISMATCH", _ONE_SHAPE))
                key, head = ",".join(map(str, sorted(ends))), f"{head} in {step_after(step)}."
                return compose(scene, kind, key, head, sorted(ends), lines, fix=fix, done=step)
    return None


def _misfit(sent: Record, asked: Record, sent_tags: set[str], *, is_counted: bool, is_note: bool) -> str:
    """What was asked for, "less" than was sent say; "" where that is not looked for: see `find_too_large`."""
    is_less = bits(asked) < bits(sent)
    if is_counted and is_garbled(sent, asked):
        return "less" if is_less else "another dtype"
    if not is_note:
        return "less" if is_less else ""
    if is_counted and bits(sent) < bits(asked):
        return "more"
    return "another tag" if is_counted and tag_of(sent) != tag_of(asked) in sent_tags else ""


def find_left_over(scene: Scene) -> Finding | None:
    """Messages that were sent and that nobody has asked for, as the one that looks can tell at its own end."""
    others = [sight.status for rank, sight in scene.sights.items() if rank != scene.me]
    if len(others) < scene.status(scene.me).world_size - 1:
        return None
    if any(one.state != FINISHED or saw_another(one) for one in others):
        return None
    lines: list[str] = []
    for rank in sorted(scene.sights):
        for key, count in scene.status(rank).messages.items():
            group, kind, peer, tag = key.rsplit(" ", 3)
            asked = scene.status(int(peer)).messages.get(f"{group} recv {rank} {tag}", 0)
            if kind == "send" and count > asked and knows_all_messages(scene, int(peer)):
                record = channels_of(scene, rank)[group, (rank, int(peer)), int(tag)][0].get(asked)
                lines.append(f"rank {rank} sent {count}, rank {peer} asked for {asked}; the first that it did not:")
                lines.append("  (overwritten)" if record is None else f"  {call(record)}")
    fix = "as many receives as sends, and wait() for each isend: what nobody waits for may never be sent."
    if not lines:
        return None
    head = f"MESSAGES left over in {step_after(scene.step)}."
    return compose(scene, "messages", "", head, (), lines, fix=fix, done=scene.step)
