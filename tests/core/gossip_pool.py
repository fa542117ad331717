"""A pool of gossiping agents on virtual time, and a network of bytes that can be made bad in every way, by seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable

import msgspec

from sidecar.core.gossip import Seed
from sidecar.core.keyring import INSECURE, Keyring
from sidecar.core.liveness import Timing
from sidecar.core.messages import Standing
from sidecar.core.speaker import SYNC, Call, Datagram, Out, Outcome, Speaker
from sidecar.core.wire import MAX_DATAGRAM, Party
from sidecar.model import Entry, Head, Record, State

START = 1_760_000_000.0


class Network:
    """What happens to bytes on their way. `cut` holds ordered pairs of addresses from the one to the other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.loss = 0.0
        self.duplicate = 0.0
        self.delay = (0.0005, 0.005)
        self.udp = True
        self.cut: set[tuple[str, str]] = set()
        self.cut_udp: set[tuple[str, str]] = set()

    def passes(self, source: str, target: str) -> bool:
        return (source, target) not in self.cut

    def split(self, one: Iterable[str], other: Iterable[str], *, one_way: bool = False) -> None:
        other = list(other)
        for a in one:
            for b in other:
                self.cut.add((a, b))
                if not one_way:
                    self.cut.add((b, a))

    def wait(self) -> float:
        return self.rng.uniform(*self.delay)


class Agent:
    """One agent: its voice, and the process around it."""

    def __init__(self, pool: Pool, name: str, *, uid: str, address: str, generation: int, keys: Keyring) -> None:
        self.name, self.uid, self.address = name, uid, address
        self.wall_offset = 0.0
        self.frozen_until = 0.0
        self.running = True
        self.sent = 0
        self.calls = 0
        self.entries: dict[str, Entry] = {}
        self.tick_at = pool.now
        self.speaker = Speaker(
            me=Party(uid, generation),
            pool="pool",
            keys=keys,
            timing=pool.timing,
            rng=random.Random(pool.rng.random()),
            now=pool.now,
            wall=pool.now,
        )
        self.announce(pool.now)

    @property
    def record(self) -> Record:
        return Record(
            head=Head(uid=self.uid, name=self.name, pool="pool", address=self.address, engine_up=True),
            entries=tuple(self.entries.values()),
        )

    def announce(self, now: float) -> None:
        self.speaker.gossip.announce(self.record, now)

    @property
    def alive(self) -> dict[str, Record | None]:
        """Records of whom this agent holds alive, itself included, by UID."""
        members = self.speaker.gossip.members
        found = {uid: m.replica.record() for uid, m in members.by_uid.items() if m.standing is not Standing.DEAD}
        return found | {self.uid: members.me.replica.record()}

    def standing(self, other: Agent) -> Standing | None:
        member = self.speaker.gossip.members.by_uid.get(other.uid)
        return member.standing if member else None


class Pool:
    """Agents, a network and a clock."""

    def __init__(self, seed: int, size: int = 0, timing: Timing | None = None, keys: Keyring = INSECURE) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.timing = timing or Timing()
        self.keys = keys
        self.now = START
        self.network = Network(self.rng)
        self.agents: dict[str, Agent] = {}
        self.at: dict[str, Agent] = {}
        # (time, observer, subject) of every death that an agent came to believe in.
        self.deaths: list[tuple[float, str, str]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for n in range(size):
            self.start(f"worker-{n}")

    def start(
        self,
        name: str,
        *,
        uid: str = "",
        address: str = "",
        generation: int = 0,
        seeds: Iterable[str] | None = None,
    ) -> Agent:
        agent = Agent(
            self,
            name,
            uid=uid or f"uid-of-{name}",
            address=address or f"10.0.0.{len(self.at)}:8790",
            generation=generation or int(self.now),
            keys=self.keys,
        )
        places = [f"10.0.0.{n}:8790" for n in range(3)] if seeds is None else list(seeds)
        agent.speaker.gossip.seeds = tuple(Seed(place) for place in places)
        self.agents[name] = self.at[agent.address] = agent
        self._wake(agent)
        return agent

    def tell(self, agent: Agent, adapter: str, state: State | None, **fields: object) -> None:
        """Have the agent announce that adapter in that state; None takes it out of its record."""
        if state is None:
            agent.entries.pop(adapter, None)
        else:
            agent.entries[adapter] = msgspec.convert({"adapter": adapter, "state": state, **fields}, Entry)
        agent.announce(self.now)
        self._wake(agent)

    def stop(self, agent: Agent) -> None:
        agent.running = False

    def freeze(self, agent: Agent, seconds: float) -> None:
        agent.frozen_until = self.now + seconds

    def do(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), what))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Let time pass; returns the seconds until `until` held, or all of them."""
        start = self.now
        end = start + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
            if until is not None and until():
                return self.now - start
        self.now = end
        return seconds

    @property
    def running(self) -> list[Agent]:
        return [agent for agent in self.at.values() if agent.running]

    def converged(self) -> bool:
        """Everyone who runs holds exactly those who run alive, and has their records as they are."""
        truth = {agent.uid: agent.speaker.gossip.membership.me.replica.record() for agent in self.running}
        return all(agent.alive == truth for agent in self.running)

    def disagreement(self) -> str:
        lines = [f"seed {self.seed}, time {self.now - START:.2f}"]
        for agent in self.running:
            shown = {uid: record and record.version for uid, record in sorted(agent.alive.items())}
            lines.append(f"{agent.name} ({agent.speaker.gossip.me.generation}): {shown}")
        return "\n".join(lines)

    def _wake(self, agent: Agent) -> None:
        """Have the agent's tick come when it is due."""
        at = agent.speaker.gossip.due(self.now)
        agent.tick_at = at
        self.do(max(0.0, at - self.now), lambda: self._tick(agent, at))

    def _tick(self, agent: Agent, at: float) -> None:
        if agent.running and agent.tick_at == at:
            self._step(agent, lambda: agent.speaker.tick(self.now, self.now + agent.wall_offset))

    def _step(self, agent: Agent, what: Callable[[], list[Out]]) -> None:
        """Let an agent do something, now or as soon as it isn't frozen."""
        if not agent.running:
            return
        if agent.frozen_until > self.now:
            self.do(agent.frozen_until - self.now, lambda: self._step(agent, what))
            return
        before = set(agent.speaker.gossip.members.dead)
        self._carry_out(agent, what())
        for uid in agent.speaker.gossip.members.dead - before:
            self.deaths.append((self.now, agent.uid, uid))
        self._wake(agent)

    def _carry_out(self, agent: Agent, outs: list[Out]) -> None:
        for out in outs:
            if isinstance(out, Datagram):
                agent.sent += len(out.data)
                self._send(agent, out)
            else:
                agent.calls += 1
                self._call(agent, out)

    def _send(self, agent: Agent, out: Datagram) -> None:
        network = self.network
        assert len(out.data) <= MAX_DATAGRAM
        way = (agent.address, out.address)
        if not network.udp or way in network.cut_udp or not network.passes(*way):
            return
        for _ in range(1 + (network.rng.random() < network.duplicate)):
            if network.rng.random() < network.loss:
                continue
            self.do(network.wait(), lambda: self._deliver(agent.address, out))

    def _deliver(self, source: str, out: Datagram) -> None:
        agent = self.at.get(out.address)
        if agent is not None:
            wall = agent.wall_offset
            self._step(agent, lambda: agent.speaker.datagram(out.data, source, self.now, self.now + wall))

    def _call(self, agent: Agent, call: Call) -> None:
        """HTTP is reliable, or fails: at once where nobody listens, else when its time is over."""
        network = self.network
        begun = self.now
        settled = False

        def settle(outcome: Outcome) -> None:
            nonlocal settled
            if settled:
                return
            settled = True
            self._step(
                agent, lambda: follow(agent.speaker.outcome(call, outcome, self.now, self.now + agent.wall_offset))
            )

        def follow(following: Call | None) -> list[Out]:
            return [] if following is None else [following]

        def arrive() -> None:
            other = self.at.get(call.address)
            if other is None or not other.running:
                settle(Outcome(status=0))
                return
            self._step(other, lambda: reply(other))

        def reply(other: Agent) -> list[Out]:
            wall = self.now + other.wall_offset
            opened = other.speaker.admit(call.header, SYNC, self.now, wall)
            if isinstance(opened, Outcome):
                outcome = opened
            else:
                outcome = other.speaker.request(opened, call.body, self.now, wall)
            if network.passes(other.address, agent.address) and self.now - begun < call.timeout:
                self.do(network.wait(), lambda: settle(outcome))
            return []

        self.do(call.timeout, lambda: settle(Outcome(status=0)))
        if network.passes(agent.address, call.address) and network.passes(call.address, agent.address):
            self.do(network.wait() * 2, arrive)


def assert_converges(pool: Pool, within: float) -> float:
    """Seconds until everyone agrees with the truth; the seed is shown when they don't."""
    took = pool.run(within, until=pool.converged)
    assert pool.converged(), pool.disagreement()
    return took
