"""The epochs of a group as one member sees them: `Epochs`, a state machine without threads, clocks or a network.

docs/development/membership.md has the protocol and the argument for it. The caller passes the time of its own clock to
each method. The caller also sends the messages of `take_outgoing`, and reports messages, ticks and certain deaths.

The file is long, since leases, ballots and founding are one argument about the same variables.
"""

from __future__ import annotations

from torch_ucx_rpc._workers.messages import (
    Accept,
    Answer,
    Ballot,
    Beat,
    Behind,
    Chosen,
    Epoch,
    Found,
    Free,
    Join,
    Leave,
    Member,
    Message,
    Over,
    Prepare,
    Promise,
    Propose,
    Refuse,
    Suspect,
)

# Times as fractions of the limit. A lease and a vote together fit into the limit. So a member that is left out for
# silence cannot still count a death that happened after a vote for leaving it out.
BEAT = 0.125
LEASE = 0.65
VOTE = 0.3
# After this time a candidate leaves out members that have not promised their vote, and its proposal no longer waits for
# votes. A founder begins again.
PATIENCE = 0.5
# In a longer gap between ticks this process did not run. It heard nothing in that gap, so it blames no other member.
_GAP = 0.25
# The first number of a group that is founded again is a multiple of this. The dead may have used smaller numbers.
_STRIDE = 1 << 20

_NEVER = float("-inf")


class _Attempt:
    """An epoch that this member tries to begin."""

    __slots__ = ("ballot", "promises", "since", "value", "votes")

    def __init__(self, ballot: Ballot, value: Epoch | None, now: float) -> None:
        self.ballot = ballot
        self.since = now
        # None until enough members have promised.
        self.value = value
        self.promises: dict[Member, tuple[Ballot, Epoch] | None] = {}
        # For each member, this member's own time in the latest proposal that the other has accepted.
        self.votes: dict[Member, float] = {}


class Epochs:
    """The knowledge and rights of one member. Not thread-safe.

    Attributes:
        me (Member): changes when this member gives up its membership.
        epoch (Epoch): the latest one that has this member, or has left it out; number 0 outside the group.
        is_out (bool): ``epoch`` does not have this member any more. It may `rejoin` as a newcomer.
        dead (set): members that have certainly ended, or have given up their membership.
    """

    def __init__(self, me: Member, limit: float, now: float, epoch: Epoch | None = None) -> None:
        self.me = me
        self.limit = limit
        self.epoch = Epoch(0, (), me)
        self.is_out = False
        self.dead: set[Member] = set()
        # The deaths that count for a quorum, with the times at which this member saw them.
        self._counted: dict[Member, float] = {}
        self._outgoing: list[tuple[Member, Message]] = []
        # No epoch without this member begins before this time, unless the member has accepted it.
        self._lease = now
        # This member decides: it has not promised anything to a candidate.
        self._leads = False
        # The member that this one follows, the time of that leader's last sign, and the leader's own time in its last
        # answer.
        self._leader = me
        self._heard = now
        self._echo = _NEVER
        self._lost_at: float | None = None
        # Ballots and votes for the next epoch.
        self._promised: Ballot = (0, 0)
        self._accepted: tuple[Ballot, Epoch] | None = None
        self._attempt: _Attempt | None = None
        self._next_beat = self._ticked = self._installed = now
        # On a decider: when it last gave a lease to each member, and its own time in each member's latest sign of
        # support.
        self._granted: dict[Member, float] = {}
        self._support: dict[Member, float] = {}
        self._joining: set[Member] = set()
        self._leaving: set[Member] = set()
        # Outside the group: all other living workers, and the names of those that are outside too.
        self._others: tuple[Member, ...] = ()
        self._free: set[str] = set()
        # The number with which this worker would found the group, and since when.
        self._founds = 0
        self._founding_since = now
        # The founder that this worker waits for.
        self._bound: Member | None = None
        self._highest = 0
        if epoch is not None:
            self._install(epoch, now)

    # ---------------------------------------------------------------------------------------- what the caller wants

    def seek(self, others: tuple[Member, ...], now: float) -> None:
        """Join the group, or found it if all other living workers are outside. Outside, call this before each tick.

        ``others`` includes every worker that may be a member. It may also include workers that have ended. This
        compares workers by name.
        """
        self._others = others
        if self._bound is not None and all(one.name != self._bound.name for one in others):
            self._bound, self._next_beat = None, now
        if self.epoch.number or self.is_out or self._bound is not None:
            return
        is_late = now - self._founding_since > PATIENCE * self.limit
        if self._founds and (self._founds < self._highest or (self.not_free() and is_late)):
            self._renew(now)
        elif not self.not_free():
            number = (self._highest // _STRIDE + 1) * _STRIDE if self._highest else 2
            if others and not self._founds:
                # Found under a new membership: no member can admit that membership without this worker's knowledge.
                self._renew(now)
                self._founds, self._founding_since = number, now
                return
            self._install(Epoch(self._founds or number, (self.me,), self.me), now)
            for one in others:
                self._send(one, Over(self.me))

    @property
    def _is_in(self) -> bool:
        """Whether this worker is a member, as far as it knows."""
        return bool(self.epoch.number) and not self.is_out

    def not_free(self) -> list[str]:
        """Return the names of workers that have not said that they are outside the group, as this worker is."""
        return [one.name for one in self._others if one.name not in self._free]

    def rejoin(self, now: float) -> None:
        """Give up this membership, and become a newcomer."""
        self._step_out(Epoch(0, (), self.me))
        self.is_out, self._lease = False, now
        self._leaving, self._joining = set(), set()
        self._promised, self._accepted = (0, 0), None
        self._renew(now)

    def _renew(self, now: float) -> None:
        self.me = self.me._replace(joined=self.me.joined + 1)
        self._free, self._founds, self._next_beat = set(), 0, now

    def leave(self, now: float) -> None:
        """Ask to be left out of later epochs."""
        if not self.epoch.number:
            self.is_out = True
        elif not self.is_out:
            self._leaving.add(self.me)
            self._next_beat = now

    def suspect(self, member: Member, now: float) -> None:
        """Ask the others to leave out a member that this one cannot work with."""
        if self.is_out or member not in self.epoch.members or member == self.me:
            return
        if self._leads:
            self._leaving.add(member)
            self._consider(now)
        elif self.epoch.decider != self.me:
            self._send(self.epoch.decider, Suspect(self.epoch.number, member))

    def die(self, member: Member, now: float) -> None:
        """Note that a member has certainly ended."""
        if member in self.dead or member == self.me:
            return
        self.dead.add(member)
        self._count(now)
        self._consider(now)

    def _count(self, now: float) -> None:
        # The lease proves that no epoch without this member was begun while the others lived.
        if self.is_leased(now):
            for one in self.dead:
                self._counted.setdefault(one, now)

    def is_current(self, now: float) -> bool:
        """Tell whether `epoch` is in force now. Then no other epoch of this group is in force on any worker."""
        return self._is_in and self.voted_for() is None and self.is_leased(now)

    def voted_for(self) -> Epoch | None:
        """Return the next epoch if another member has proposed it, this one has accepted it, and it has not begun."""
        return None if self._accepted is None or self._leads else self._accepted[1]

    def is_leased(self, now: float, ahead: float = 0.0) -> bool:
        """Tell whether no epoch without this member has begun. A decider first extends its lease by its support, if
        little is left."""
        if now + ahead >= self._lease and self._leads:
            self._lease = max(self._lease, self._supported_until(now))
        return now < self._lease

    def quiet(self, now: float, seconds: float) -> list[Member]:
        """Return members that this one listens to, and that have been silent for more than ``seconds``."""
        if not self._is_in:
            return []
        if self._leads:
            return [one for one, at in self._granted.items() if now - at > seconds and one != self.me]
        return [self._leader] if now - self._heard > seconds else []

    def take_outgoing(self) -> list[tuple[Member, Message]]:
        """Return the messages to send, each with its receiver."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def tick(self, now: float) -> None:
        """Do all that is due. Call this a few times in each BEAT."""
        if self.is_out:
            return
        epoch = self.epoch
        self._wake(now)
        if now >= self._next_beat:
            self._next_beat = now + BEAT * self.limit
            if not epoch.number:
                self._call_others()
            elif self._leader != self.me:
                self._send(self._leader, Beat(epoch.number, now, self._echo))
                if self.me in self._leaving:
                    self._send(epoch.decider, Leave(epoch.number))
            elif not self.is_leased(now):
                # The others may have begun another epoch, and report it then.
                for one in epoch.members:
                    if one != self.me and one not in self.dead:
                        self._send(one, Behind(epoch.number))
            self._ask(now)
        if epoch.number:
            self._consider(now)

    def receive(self, sender: Member, message: Message, now: float) -> None:
        """Handle a message."""
        if sender in self.dead:
            return
        if isinstance(message, (Join, Found, Free, Over)):
            self._hear_outside(sender, message, now)
            return
        if self.is_out:
            return
        self._wake(now)
        if isinstance(message, Chosen):
            self._hear_of(message.epoch, now)
            return
        if isinstance(message, Prepare):
            self._hear_of(message.epoch, now)
            number = message.epoch.number
        elif isinstance(message, Propose):
            if not self.epoch.number and self.me not in message.after.members:
                # This is a newcomer's consent, and does not count as a vote.
                if self.me in message.epoch.members:
                    self._send(sender, Accept(message.after.number, message.ballot, message.at))
                return
            self._hear_of(message.after, now)
            number = message.after.number
        else:
            number = message.number
        epoch = self.epoch
        if not self._is_in:
            return
        if number != epoch.number:
            self._send(sender, Chosen(epoch) if number < epoch.number else Behind(epoch.number))
        elif not isinstance(message, Behind):
            getattr(self, _HANDLERS[type(message)])(sender, message, now)

    def _wake(self, now: float) -> None:
        if now - self._ticked > _GAP * self.limit:
            self._heard = now
            self._granted = dict.fromkeys(self._granted, now)
        self._ticked = now

    # --------------------------------------------------------------------------------------------------- the epochs

    def _hear_of(self, epoch: Epoch, now: float) -> None:
        known = self.epoch
        self._highest = max(self._highest, epoch.number)
        if epoch.number <= known.number:
            return
        if self.me in epoch.members:
            self._install(epoch, now)
        elif known.number:
            self._step_out(epoch)

    def _step_out(self, epoch: Epoch) -> None:
        self.epoch, self.is_out, self._leads, self._attempt = epoch, True, False, None

    def _install(self, epoch: Epoch, now: float) -> None:
        leads, was_leading = epoch.decider == self.me, self._leads
        attempt, old = self._attempt, self._granted
        self.epoch, self._leads = epoch, leads
        self._highest = max(self._highest, epoch.number)
        self._attempt = None
        self._promised, self._accepted = (0, 0), None
        self._leader, self._heard, self._lost_at = epoch.decider, now, None
        self._echo = _NEVER
        self._next_beat = self._installed = now
        self._leaving &= {*epoch.members}
        if leads:
            self._granted = {one: old.get(one, now) if was_leading else now for one in epoch.members}
            kept = self._support if was_leading else {}
            self._support = {**kept, **(attempt.votes if attempt is not None else {})}
            self._joining -= {*epoch.members}
        else:
            self._granted, self._support = {}, {}

    def _supported_until(self, now: float) -> float:
        """Return the time until which a quorum follows only this decider."""
        times = [self._support.get(one, _NEVER) if one != self.me else now for one in self.epoch.members]
        until = now
        for start in sorted({*times}, reverse=True):
            votes = {one for one, at in zip(self.epoch.members, times, strict=True) if at >= start}
            if self._is_quorum(votes, now):
                until = start + LEASE * self.limit
                break
        return until

    def _is_quorum(self, votes: set[Member], now: float) -> bool:
        """Tell whether ``votes`` are a quorum: more than half of the members, or half with the decider.

        A member does not count from one limit after its counted death.
        """
        members = self.epoch.members
        # All members that could know of a later epoch are among ``votes``.
        if all(one in votes or one in self._counted for one in members):
            return True
        # Until all their votes have run out, the dead may have voted for another epoch, or followed another decider.
        settled = now - self.limit
        rest = [one for one in members if self._counted.get(one, now) > settled]
        count = 2 * sum(one in votes for one in rest)
        return count > len(rest) or (count == len(rest) and self.epoch.decider in votes)

    # -------------------------------------------------------------------------------------- the decider, candidates

    def _consider(self, now: float) -> None:
        """Begin or continue an attempt, if there is a reason."""
        if not self._is_in:
            return
        if self.dead and not self.is_leased(now):
            living = {*self.epoch.members} - self.dead
            if not self._is_quorum(living, now + 2 * self.limit):
                # This epoch can have no successor.
                self.rejoin(now)
                return
        if self._attempt is None:
            if self._leads:
                self._decide(now)
            elif self._is_lost(self._leader, now):
                self._stand(now)
            else:
                self._lost_at = None
        self._carry_on(now)

    def _decide(self, now: float) -> None:
        if not self._joining and not self._leaving and not self._promised[0]:
            for one in self.epoch.members:
                if one != self.me and (one in self.dead or now - self._granted[one] > self.limit):
                    break
            else:
                return
        staying = self._staying(now)
        # Silent members could not consent. Without a quorum of the others, this side is cut off.
        if not self._is_quorum({*staying, *self._leaving, self.me}, now):
            return
        if self._promised[0]:
            self._begin(now)
            return
        ballot, value = (0, self.me.rank), self._next_epoch(staying)
        self._attempt = _Attempt(ballot, value, now)
        self._accepted = (ballot, value)
        self._ask(now)

    def _staying(self, now: float) -> list[Member]:
        return [
            one
            for one in self.epoch.members
            if one not in self.dead
            and one not in self._leaving
            and (one == self.me or now - self._granted[one] <= self.limit)
        ]

    def _next_epoch(self, staying: list[Member]) -> Epoch:
        members = sorted({*staying, *(self._joining - self.dead)})
        decider = self.me if self.me in members or not members else members[0]
        return Epoch(self.epoch.number + 1, tuple(members), decider)

    def _stand(self, now: float) -> None:
        """Stand as a candidate: the living member of lowest rank does so at once, another member later."""
        if self._lost_at is None:
            self._lost_at = now
        before = [one for one in self.epoch.members if one < self.me and one not in self.dead and one != self._leader]
        if now - self._lost_at >= 2 * BEAT * self.limit * len(before):
            self._begin(now)

    def _begin(self, now: float) -> None:
        ballot = (self._promised[0] + 1, self.me.rank)
        self._promised = ballot
        self._attempt = _Attempt(ballot, None, now)
        self._attempt.promises[self.me] = self._accepted
        self._ask(now)

    def _is_lost(self, member: Member, now: float) -> bool:
        return member in self.dead or now - self._heard > self.limit

    def _ask(self, now: float) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        message: Message
        if attempt.value is None:
            # In a long-lived group, most of the dead were members of earlier epochs.
            dead = tuple(one for one in self.epoch.members if one in self.dead)
            message = Prepare(self.epoch, attempt.ballot, dead)
            asked = dict.fromkeys(self.epoch.members)
        else:
            message = Propose(self.epoch, attempt.ballot, attempt.value, now)
            asked = dict.fromkeys((*self.epoch.members, *attempt.value.members))
        for one in asked:
            if one != self.me and one not in self.dead:
                self._send(one, message)

    def _carry_on(self, now: float) -> None:
        attempt, members = self._attempt, self.epoch.members
        if attempt is None:
            return
        if attempt.value is None:
            missing = [one for one in members if one not in attempt.promises and one not in self.dead]
            if missing and now - attempt.since <= PATIENCE * self.limit:
                return
            if not self._is_quorum({*attempt.promises}, now):
                if now - attempt.since > 2 * PATIENCE * self.limit:
                    # Another member may win: it may have seen, under its lease, deaths that do not count for this
                    # member.
                    self._attempt, self._lost_at = None, now + self.limit
                return
            attempt.value = _accepted_before(attempt) or self._next_epoch(
                [one for one in attempt.promises if one not in self.dead and one not in self._leaving]
            )
            attempt.since = now
            self._accepted = (attempt.ballot, attempt.value)
            self._ask(now)
        votes = {one for one, at in attempt.votes.items() if now - at < VOTE * self.limit}
        votes.add(self.me)
        leads = self._leads
        # Wait for each vote until its time is over. A member that has not voted stays in the proposed epoch.
        for one in {*members, *attempt.value.members} if leads else attempt.value.members:
            if one in votes or one in self.dead:
                continue
            # A lease that this decider has given must run out first. A newcomer has some time to answer.
            since = self._granted.get(one, attempt.since) if leads else attempt.since
            if now - since <= (self.limit if leads else PATIENCE * self.limit):
                return
        if self._is_quorum(votes, now):
            self._choose(attempt.value, now)

    def _choose(self, epoch: Epoch, now: float) -> None:
        told = dict.fromkeys((*self.epoch.members, *epoch.members))
        if self.me in epoch.members:
            self._install(epoch, now)
        else:
            self._step_out(epoch)
        for one in told:
            if one != self.me and one not in self.dead:
                self._send(one, Chosen(epoch))

    # -------------------------------------------------------------------------------------------------- the messages

    def _send(self, to: Member, message: Message) -> None:
        self._outgoing.append((to, message))

    def _call_others(self) -> None:
        if self._bound is not None:
            self._send(self._bound, Free(self._bound, self._highest))
            return
        for one in self._others:
            self._send(one, Found(self._founds) if self._founds else Join())

    def _hear_outside(self, sender: Member, message: Join | Found | Free | Over, now: float) -> None:
        """Handle a message about joining or founding. Its sender is outside, or a member that answers `Free`."""
        for one in self.epoch.members if self._is_in else ():
            if one.life == sender.life and one.name == sender.name and one.joined < sender.joined:
                # The worker has given up that membership.
                self.die(one, now)
        if isinstance(message, Free):
            self._highest = max(self._highest, message.number)
            if message.asker != self.me or self.epoch.number or self.is_out:
                self._send(sender, Over(message.asker))
            else:
                self._free.add(sender.name)
        elif isinstance(message, Over):
            if self._bound == message.asker:
                self._bound, self._next_beat = None, now
        elif self._is_in:
            if isinstance(message, Join) and self._leads and sender not in self.epoch.members:
                self._joining = {one for one in self._joining if one.name != sender.name} | {sender}
                self._consider(now)
        elif isinstance(message, Join):
            self._send(sender, Free(sender, self._highest))
        elif not (self._founds and self.me < sender) and self._bound in (None, sender):
            if self._bound is None:
                # An epoch may have begun that has this worker's former membership.
                self._renew(now)
                self._bound = sender
            self._highest = max(self._highest, message.number)
            self._send(sender, Free(sender, self._highest))

    def _on_beat(self, sender: Member, beat: Beat, now: float) -> None:
        if not self._leads or sender not in self.epoch.members:
            return
        self._support[sender] = max(beat.heard, self._support.get(sender, beat.heard))
        if self.is_leased(now, ahead=2 * BEAT * self.limit) and self._may_stay(sender, beat, now):
            self._count(now)
            self._granted[sender] = now
            self._send(sender, Answer(beat.number, beat.at, now, min(LEASE * self.limit, self._lease - now)))
        else:
            # A sign of life, which also asks for missing support.
            self._send(sender, Answer(beat.number, beat.at, now, 0.0))
        self._consider(now)

    def _may_stay(self, sender: Member, beat: Beat, now: float) -> bool:
        """Tell whether a member may have a lease. A member that is to be left out, or hears nothing, gets no more."""
        value = None if self._attempt is None else self._attempt.value
        is_left_out = value is not None and sender not in value.members
        return not is_left_out and now - max(beat.heard, self._installed) <= self.limit

    def _on_answer(self, sender: Member, answer: Answer, now: float) -> None:
        if sender != self.epoch.decider:
            return
        if self._promised[0]:
            # The decider loses this member's support to a candidate, until the decider itself asks for a promise.
            self._send(sender, Refuse(answer.number, self._promised))
            return
        if self._accepted is None or self._leader == sender:
            self._heard = now
            self._echo = max(self._echo, answer.at)
        self._lease = max(self._lease, answer.beat + answer.lease)
        self._count(now)

    def _on_prepare(self, sender: Member, prepare: Prepare, now: float) -> None:
        for one in prepare.dead:
            self.die(one, now)
        if prepare.ballot < self._promised:
            self._send(sender, Refuse(prepare.epoch.number, self._promised))
            return
        if self._decides(sender, now) or not (sender == self._leader or self._is_lost(self._leader, now)):
            return
        self._promised = prepare.ballot
        self._attempt = None
        self._lost_at = now
        if sender == self._leader:
            # Otherwise this member would stand again before the proposal comes, and neither would win.
            self._heard = now
        self._send(sender, Promise(prepare.epoch.number, prepare.ballot, self._accepted))

    def _decides(self, candidate: Member, now: float) -> bool:
        """Tell whether this member decides and a quorum follows it. A decider without one follows the candidate."""
        if self._leads and not self.is_leased(now):
            self._leads, self._leader, self._heard = False, candidate, now
        return self._leads

    def _on_promise(self, sender: Member, promise: Promise, now: float) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.value is None and attempt.ballot == promise.ballot:
            attempt.promises[sender] = promise.accepted
            self._carry_on(now)

    def _on_refuse(self, sender: Member, refuse: Refuse, now: float) -> None:
        if refuse.ballot > self._promised:
            self._promised = refuse.ballot
            self._attempt = None
            self._lost_at = now

    def _on_propose(self, sender: Member, propose: Propose, now: float) -> None:
        if propose.ballot < self._promised:
            self._send(sender, Refuse(propose.after.number, self._promised))
            return
        if self._decides(sender, now):
            return
        self._promised = propose.ballot
        self._accepted = (propose.ballot, propose.epoch)
        self._attempt = None
        self._leader, self._heard, self._lost_at = sender, now, None
        self._send(sender, Accept(propose.after.number, propose.ballot, propose.at))

    def _on_accept(self, sender: Member, accept: Accept, now: float) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.value is not None and attempt.ballot == accept.ballot:
            attempt.votes[sender] = max(accept.at, attempt.votes.get(sender, accept.at))
            if sender in self._support:
                self._support[sender] = max(accept.at, self._support[sender])
            self._carry_on(now)

    def _on_leave(self, sender: Member, leave: Leave, now: float) -> None:
        if self._leads:
            self._leaving.add(sender)
            self._consider(now)

    def _on_suspect(self, sender: Member, suspect: Suspect, now: float) -> None:
        if self._leads:
            # A member that cannot reach the decider must leave.
            self._leaving.add(sender if suspect.member == self.me else suspect.member)
            self._consider(now)


def _accepted_before(attempt: _Attempt) -> Epoch | None:
    """Return the epoch that may have begun already, as far as the promises show."""
    accepted = [one for one in attempt.promises.values() if one is not None]
    return max(accepted)[1] if accepted else None


_HANDLERS: dict[type, str] = {
    Beat: "_on_beat",
    Answer: "_on_answer",
    Prepare: "_on_prepare",
    Promise: "_on_promise",
    Refuse: "_on_refuse",
    Propose: "_on_propose",
    Accept: "_on_accept",
    Leave: "_on_leave",
    Suspect: "_on_suspect",
}
