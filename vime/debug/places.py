"""What stacks say: where each process stands, which stand alike, and which one the others wait for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vime.debug.stacks import Dump, Frame, Thread
from vime.reward.function import is_users, is_vimes

DISTRIBUTED = "torch/distributed/"
WAITS = ("megatron/core/pipeline_parallel/p2p_communication.py", "megatron/core/distributed/param_and_grad_buffer.py")
"""Files that wait, in C, for a collective that was started before: the frame that one sees is their own."""
RAY_IDLE = {"main_loop"}
"""Of Ray's workers: no call is under way."""
VLLM_IDLE = {"_process_input_queue"}
NOT_A_CALL = {"wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "__call__", "__exit__"}
DEBUGGER = ("/vime/debug/stop/hit.py", "/vime/debug/stop/pause.py", "/debugpy/")
STOPPED = "the debugger"
NUM_IN_SHORT = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where one thread stands. ``own``: the innermost frame of the user's code or vime's; ``call``: the library call
    that it waits in, or "" where it is in ``own`` itself; ``is_user``: ``own`` is no code of vime;
    ``is_waiting_for_others``: in a collective.
    """

    own: Frame | None
    call: str = ""
    is_user: bool = False
    is_idle: bool = False
    is_waiting_for_others: bool = False

    def __str__(self) -> str:
        if self.is_idle:
            return "idle: no work"
        at = f"{os.path.basename(self.own.file)}:{self.own.line} {self.own.name}" if self.own is not None else ""
        if not at:
            return self.call or "nowhere"
        return f"{self.call} <- {at}" if self.call else at


@dataclass(slots=True)
class Group:
    """Processes of one role that stand alike. ``others``: threads beside the main one that are worth a line."""

    names: list[str]
    role: str
    place: Place | None
    problem: str = ""
    frames: tuple[Frame, ...] = ()
    others: list[str] = field(default_factory=list)
    num_hidden: int = 0

    @property
    def title(self) -> str:
        return f"{shown_names(self.names)}: {self.problem or self.place}"


def place_of(thread: Thread) -> Place:
    """The place of one thread, from its frames."""
    if (below := _below_debugger(thread.frames)) is not None:
        return Place(below[0], STOPPED, is_users(below[0].file))
    functions = {frame.name for frame in thread.frames}
    at = next((i for i, frame in enumerate(thread.frames) if is_own(frame.file)), None)
    own = None if at is None else thread.frames[at]
    above = thread.frames if at is None else thread.frames[:at]
    if (collective := _collective(above)) is not None:
        return Place(own, collective, own is not None and is_users(own.file), is_waiting_for_others=True)
    if own is None and functions & RAY_IDLE and _is_in_ray(_innermost(thread).file):
        return Place(None, is_idle=True)
    if functions & VLLM_IDLE and any("vllm/" in frame.file for frame in thread.frames):
        return Place(None, is_idle=True)
    if own is not None and own.name == "main" and own.file.endswith("vime/reward/worker.py"):
        return Place(own, is_idle=True)
    call = next((f.name for f in above if f.name not in NOT_A_CALL and f.file.endswith(".py")), "")
    return Place(own, call, own is not None and is_users(own.file))


def _below_debugger(frames: Sequence[Frame]) -> tuple[Frame, ...] | None:
    """From the frame in which a debugger has stopped a thread; None for others, and for the debugger's own threads."""
    inside = [i for i, frame in enumerate(frames) if any(part in frame.file for part in DEBUGGER)]
    below = tuple(frames[inside[-1] + 1 :]) if inside else ()
    if below and frames[inside[-1]].file.endswith(DEBUGGER[0]):  # a point's call is on the line before it
        below = (replace(below[0], line=below[0].line + 1), *below[1:])
    return below if any(os.path.basename(frame.file) != "threading.py" for frame in below) else None


def _collective(above: Sequence[Frame]) -> str | None:
    """The collective that these library frames wait in, by torch's name, or by that of the library that calls it."""
    inside = [i for i, frame in enumerate(above) if DISTRIBUTED in frame.file and frame.name not in NOT_A_CALL]
    if inside:
        outer = [frame for frame in above[inside[-1] :] if frame.name not in NOT_A_CALL]
        return next((frame.name for frame in outer if not frame.name.startswith("_")), outer[0].name)
    leaf = next((frame for frame in above if frame.file.endswith(".py")), None)
    return leaf.name if leaf is not None and leaf.file.endswith(WAITS) else None


def groups_of(dumps: Sequence[Dump]) -> list[Group]:
    """Processes that stand alike together, the odd ones first: no answer, user code, alone among their kind, idle."""
    found: dict[tuple[str, str], Group] = {}
    sizes: dict[str, int] = {}
    for dump in dumps:
        role = dump.who.role
        sizes[role] = sizes.get(role, 0) + 1
        main = dump.threads[0] if dump.threads else None
        place = None if main is None else place_of(main)
        others, num_hidden = _others(dump.threads[1:])
        frames = () if main is None else _below_debugger(main.frames) or main.frames
        key = (role, dump.problem or f"{place} {others}")
        group = found.setdefault(key, Group([], role, place, dump.problem, frames, others))
        group.names.append(dump.who.name)
        group.num_hidden = max(group.num_hidden, num_hidden)
    return sorted(found.values(), key=lambda group: _oddness(group, sizes[group.role]))


def _oddness(group: Group, num_of_kind: int) -> tuple[int, float]:
    place = group.place
    if place is None:
        order = 0
    elif place.is_user and not place.is_waiting_for_others:
        order = 1
    elif place.is_idle:
        order = 4
    else:
        order = 3 if place.is_waiting_for_others or group.role == "driver" else 2
    return order, len(group.names) / num_of_kind


def _others(threads: Sequence[Thread]) -> tuple[list[str], int]:
    """Threads that run code of the user or vime, and how many more there are."""
    shown = []
    for thread in threads:
        place = place_of(thread)
        if place.own is not None and (place.is_user or not place.call or thread.is_active):
            shown.append(f"{thread.name}: {place}")
    return sorted(shown), len(threads) - len(shown)


def culprit(dumps: Sequence[Dump]) -> str:
    """One sentence on the process that the others wait for; empty where the stacks single out none."""
    return _odd_rank([d for d in dumps if d.who.role == "trainer"]) or _in_user_code(dumps) or _odd_engine(dumps)


def _odd_rank(ranks: Sequence[Dump]) -> str:
    """Ranks that are not in the collective that the others wait in."""
    places = {d.who.rank: place_of(d.threads[0]) for d in ranks if d.threads}
    waiting = {rank: p for rank, p in places.items() if p.is_waiting_for_others}
    gone = [d for d in ranks if not d.threads]
    if gone:
        return f"{shown_names([d.who.name for d in gone])}: {gone[0].problem}{_who_waits(waiting)}"
    away = {rank: p for rank, p in places.items() if rank not in waiting and not p.is_idle}
    if away:
        return f"{_stands(away)}{_who_waits(waiting)}"
    idle = [rank for rank, p in places.items() if p.is_idle]
    if idle and waiting:
        return f"{_ranks(idle)} {_is(idle)} done with its call, or never got it{_who_waits(waiting)}"
    calls = sorted({str(p) for p in waiting.values()}, key=lambda call: [str(p) for p in waiting.values()].count(call))
    if len(calls) > 1:
        odd = {rank: p for rank, p in waiting.items() if str(p) == calls[0]}
        rest = {rank: p for rank, p in waiting.items() if rank not in odd}
        return f"{_stands(odd)}{_who_waits(rest)}: not the same collective"
    return ""


def _in_user_code(dumps: Sequence[Dump]) -> str:
    """A reward that goes on, or a driver that is not in vime's code but in the user's."""
    for role in ("reward worker", "driver"):
        for dump in dumps:
            place = place_of(dump.threads[0]) if dump.threads and dump.who.role == role else None
            if place is not None and not place.is_idle and (place.is_user or role == "reward worker"):
                return f"{dump.who.name} (pid {dump.who.pid}) is in {_at(place)}"
    return ""


def _odd_engine(dumps: Sequence[Dump]) -> str:
    for dump in dumps:
        if dump.who.role not in ("engine", "engine core"):
            continue
        if dump.problem:
            return f"{dump.who.name}: {dump.problem}"
        place = place_of(dump.threads[0])
        if dump.who.role == "engine core" and not place.is_idle:
            return f"{dump.who.name} (pid {dump.who.pid}) is in {_at(place)}"
    return ""


def _stands(places: dict[int, Place]) -> str:
    """Where the first of some ranks stands, and who stands with it."""
    first = next(iter(places.values()))
    alike = [rank for rank, place in places.items() if str(place) == str(first)]
    rest = [rank for rank in places if rank not in alike]
    more = f" ({_ranks(rest)} elsewhere)" if rest else ""
    return f"{_ranks(alike)} {_is(alike)} in {_at(first)}{more}"


def _who_waits(waiting: dict[int, Place]) -> str:
    if not waiting:
        return ""
    calls = sorted({place.call for place in waiting.values()})
    verb = "waits" if len(waiting) == 1 else "wait"
    ranks = ", ".join(map(str, sorted(waiting)))
    return f"; rank{'s' * (len(waiting) > 1)} {ranks} {verb} for it in {', '.join(calls)}"


def _at(place: Place) -> str:
    """reward.py:12 score, or what it calls from there."""
    if place.own is None:
        return place.call or "code that is neither vime's nor the user's"
    at = f"{os.path.basename(place.own.file)}:{place.own.line} {place.own.name}"
    return f"{at}, in {place.call}" if place.call else at


def _ranks(ranks: Sequence[int]) -> str:
    return shown_names([f"trainer rank {rank}" for rank in ranks])


def _is(what: Sequence[object]) -> str:
    return "is" if len(what) == 1 else "are"


def shown_names(names: Sequence[str]) -> str:
    """Names that differ in the number at the end as one: "trainer ranks 0, 2-3"."""
    heads = {name.rpartition(" ")[0] for name in names}
    numbers = [name.rpartition(" ")[2] for name in names]
    if len(names) == 1 or len(heads) > 1 or not all(n.isdigit() for n in numbers):
        return ", ".join(names)
    return f"{heads.pop()}s {_ranges(sorted(map(int, numbers)))}"


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def short_lines(groups: Sequence[Group]) -> list[str]:
    """A few lines per group: who, where, and the innermost frames that are not idle waiting."""
    lines = []
    for group in groups:
        lines.append(group.title)
        if group.place is not None and not group.place.is_idle:
            shown = [f for f in group.frames if is_own(f.file)] or list(group.frames)
            lines += [f"    {frame}" for frame in shown[:NUM_IN_SHORT]]
        lines += [f"    thread {text}" for text in group.others]
        if group.num_hidden:
            lines.append(f"    (+{group.num_hidden} other thread{'s' * (group.num_hidden > 1)})")
    return lines


def is_own(file: str) -> bool:
    """Whether a file is the user's or vime's."""
    return is_vimes(file) or is_users(file)


def _innermost(thread: Thread) -> Frame:
    """Of Python's frames; of all where there is none."""
    return next((frame for frame in thread.frames if frame.file.endswith(".py")), thread.frames[0])


def _is_in_ray(file: str) -> bool:
    return "/ray/" in file
