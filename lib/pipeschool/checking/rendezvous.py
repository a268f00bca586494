"""A rendezvous: a send is done only when its receiver is there, and the other way round.

So it is with NCCL: no tags, and on each channel, which is one direction between two workers, the
n-th send and the n-th receive belong together. A message passes once both workers have begun it,
and a worker goes on once all messages of its step have passed: a step is one message, or a group of
fused ones. What has begun stays begun, so the outcome does not depend on who moves first, and one
run settles it.

To fuse more never does harm: the messages of a group begin earlier than one by one, and their
worker waits for the same ones. So those that stand next to each other may all be one group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from pipeschool.actions import Action, Schedule
from pipeschool.checking.together import deadlock, waits_at_update, wrong_tensor
from pipeschool.dependencies import Channel, message_of, peer_of, sender_of


def rendezvous_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(worker, action) for every action, in an order in which the workers could do them; a send
    comes right before its receive.

    For lowered schedules whose rows are right by themselves. Raises `IllegalSchedule` where the
    workers cannot go on: they wait in a circle, or a receive would get somebody else's message.
    """
    steps = [schedule.steps_of(worker) for worker in range(schedule.p)]
    messages = Messages(schedule)
    meetings: defaultdict[Action, list[int]] = defaultdict(list)  # update -> who has come to it
    runnable = list(range(schedule.p - 1, -1, -1))
    while runnable:
        worker = runnable.pop()
        for step in steps[worker]:
            action = step[0]
            if action.is_message:
                for source, send, target, receive in messages.begin(worker, step):
                    yield source, send
                    yield target, receive
                    peer = source + target - worker
                    if not messages.unmet[peer]:
                        runnable.append(peer)
                if messages.unmet[worker]:
                    break
            elif action.kind == "U":
                present = meetings[action]
                present.append(worker)
                if len(present) < len(schedule.owners[action.stage]):
                    break
                runnable += present[:-1]
                yield from ((w, action) for w in present)
            else:
                yield worker, action
    at = {worker: unmet[0] for worker, unmet in enumerate(messages.unmet) if unmet}
    waits = {worker: _waits_for(message, schedule) for worker, message in at.items()}
    for update, present in meetings.items():
        absent = waits_at_update(schedule, update, present)
        waits |= absent
        at |= dict.fromkeys(absent, update)
    if waits:
        raise deadlock(at, waits)


class Messages:
    """The messages that one worker has begun, and the other not yet.

    unmet: for each worker, those of its step.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.unmet: list[list[Action]] = [[] for _ in range(schedule.p)]
        # By channel, and whether it is the send that has been begun.
        self.begun: defaultdict[tuple[Channel, bool], deque[Action]] = defaultdict(deque)

    def begin(
        self, worker: int, step: Sequence[Action]
    ) -> Iterator[tuple[int, Action, int, Action]]:
        """`worker` begins the messages of `step`. Of each that passes at once: who sends it, the
        send, who receives it, the receive."""
        self.unmet[worker] += step
        for message in step:
            peer, sends = peer_of(message, self.schedule), message.kind.startswith("SEND")
            channel = Channel(worker, peer) if sends else Channel(peer, worker)
            if not self.begun[channel, not sends]:
                self.begun[channel, sends].append(message)
                continue
            other = self.begun[channel, not sends].popleft()
            send, receive = (message, other) if sends else (other, message)
            if message_of(send) != receive:
                raise wrong_tensor(*channel, receive, sender_of(receive), send)
            self.unmet[worker].remove(message)
            self.unmet[peer].remove(other)
            yield channel.source, send, channel.target, receive


def _waits_for(message: Action, schedule: Schedule) -> tuple[str, int]:
    """For what a worker waits at `message`, in words, and for whom."""
    peer = peer_of(message, schedule)
    if message.kind.startswith("SEND"):
        return f"for worker {peer} to receive it", peer
    return f"for {sender_of(message)} from worker {peer}", peer
