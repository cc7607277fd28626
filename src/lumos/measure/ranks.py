"""The processes that sample together: one for each GPU of a node, or those that torchrun or Slurm started.

Rank 0 leads: it says what is measured, writes the file and talks to the user. The others follow. Control goes over gloo
beside the collectives that are measured. Every process has a thread that watches the others through a store at rank 0:
if one fails or stops answering, all end, and rank 0 says so in one line.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from lumos.errors import LumosError, OptionError
from lumos.safe_path import safe_path

_JOIN = timedelta(minutes=5)  # for all processes to appear, and for any one of them to answer
_BEAT_S, _SILENT_S, _GRACE_S = 0.5, 20.0, 3.0
_PORT, _PORTS = 29400, 500  # for Slurm, which hands out none: by the number of the job
_FAILED = "failed"


class World(NamedTuple):
    """The place of this process among those that sample together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"  # of rank 0
    port: int = 0  # 0: as torchrun has set up


def world_of(environ: Mapping[str, str]) -> World | None:
    """As torchrun or Slurm states it; None for a process that was started alone."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        found = World(_number(environ, "RANK"), _number(environ, "WORLD_SIZE"))
        local = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else found.rank
        if found.size > 1 and "MASTER_ADDR" not in environ:
            raise OptionError("WORLD_SIZE is set and MASTER_ADDR is not: start all ranks with torchrun or srun")
        world = found._replace(local_rank=local, address=environ.get("MASTER_ADDR", ""))
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NODELIST" in environ:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        address = environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"])
        known = "MASTER_PORT" in environ
        port = _number(environ, "MASTER_PORT") if known else _PORT + _number(environ, "SLURM_JOB_ID") % _PORTS
        rank, size, local = (_number(environ, name) for name in ("SLURM_PROCID", tasks, "SLURM_LOCALID"))
        world = World(rank, size, local, address, port)
    else:
        return None
    return world if world.size > 1 else None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        raise OptionError(f"{name}={text}: not a number; start all ranks with torchrun or srun")
    return int(text)


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: "gpu[003-005,9],login1" is gpu003."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


class Team:
    """All processes, once they have found each other."""

    def __init__(self, world: World, device: str) -> None:
        self.rank, self.size, self.device = world.rank, world.size, device
        method = f"tcp://{world.address}:{world.port}" if world.port else "env://"
        try:
            distributed.init_process_group(
                "gloo", init_method=method, rank=world.rank, world_size=world.size, timeout=_JOIN
            )
        except (RuntimeError, ValueError, OSError) as problem:
            why = words_of(problem)
            raise OptionError(f"rank {world.rank} of {world.size} did not find the others ({why})") from None
        names = self.gathered(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        self.hosts = list(dict.fromkeys(names))
        counts = {host: names.count(host) for host in self.hosts}
        self.nodes, self.per_node = len(self.hosts), counts[self.hosts[0]]
        in_order = names == [host for host in self.hosts for _ in range(self.per_node)]
        self.watch = _Watch(self, world.address)
        if not in_order:
            what = ", ".join(f"{count} on {host}" for host, count in counts.items())
            raise OptionError(f"ranks are spread unevenly ({what}): start as many on every node, node by node")

    def shared(self, value: Any = None) -> Any:
        """What rank 0 says, on every rank."""
        box = [value]
        distributed.broadcast_object_list(box, 0)
        return box[0]

    def gathered(self, value: Any) -> list[Any]:
        """What every rank says, on every rank."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def leave(self) -> None:
        """End in order: nobody is missed from here on."""
        self.watch.stop()
        distributed.destroy_process_group()


def words_of(problem: BaseException) -> str:
    """What gloo or NCCL has to say, without the places in their sources and advice for their developers."""
    text = re.sub(r"\[[^\]]*\]:?\d*", "", (str(problem).splitlines() or [type(problem).__name__])[0])
    return " ".join(text.partition(". ")[0].split()).strip(": ")[:150]


class _Watch:
    """Tells all processes when one of them has failed, or has gone without a word."""

    def __init__(self, team: Team, address: str) -> None:
        self._rank, self._size = team.rank, team.size
        leads, wait = team.rank == 0, timedelta(seconds=30)
        store = distributed.TCPStore(address, 0, None, True, wait, wait_for_workers=False) if leads else None
        port = team.shared(store.port if store is not None else 0)
        self._store = store or distributed.TCPStore(address, port, None, False, wait, wait_for_workers=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def failure(self) -> str:
        """Why another process ended, or ""; waits for it to say so."""
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            try:
                if self._store.check([_FAILED]):
                    return str(self._store.get(_FAILED).decode())
            except RuntimeError:
                break
            time.sleep(0.1)
        return ""

    def report(self, message: str) -> None:
        """Let the others know why this process ends."""
        try:
            if not self._store.check([_FAILED]):
                self._store.set(_FAILED, message)
        except RuntimeError:
            return  # rank 0 is gone, and with it all others

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        """Beat, and look for failures; the main thread may wait in a collective that will never end."""
        last = [(-1, time.monotonic())] * self._size
        while not self._over.wait(_BEAT_S):
            try:
                self._store.add(f"beat {self._rank}", 1)
                if self._rank == 0:
                    self._look_for_silence(last)
                failed = self._store.check([_FAILED])
            except RuntimeError:
                failed = True
            if failed and not self._over.wait(_GRACE_S):  # the main thread may have noticed by itself
                self._end()

    def _look_for_silence(self, last: list[tuple[int, float]]) -> None:
        now = time.monotonic()
        for rank in range(self._size):
            beats = self._store.add(f"beat {rank}", 0)
            if beats != last[rank][0]:
                last[rank] = (beats, now)
            elif now - last[rank][1] > _SILENT_S:
                self.report(f"rank {rank} does not answer")

    def _end(self) -> None:
        why = self.failure() if self._rank == 0 else ""
        if self._rank == 0:
            sys.stderr.write(f"lumos: {why or 'the other ranks are gone'}; the same command resumes\n")
            sys.stderr.flush()
        os._exit(2)


Work = Callable[[Team], None]


class Peers:
    """The processes for the other GPUs of this machine, where nothing else started them."""

    def __init__(self, count: int, device: str, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        self.world = World(size=count, port=port)
        worlds = [World(rank, count, rank, port=port) for rank in range(1, count)]
        self._processes = [context.Process(target=_follow, args=(w, device, work), daemon=True) for w in worlds]
        with safe_path():
            for process in self._processes:
                process.start()

    def end(self) -> None:
        for process in self._processes:
            process.join(timeout=5.0)
            process.terminate()


def _follow(world: World, device: str, work: Work) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    sys.exit(run_follower(world, device, work))


def run_follower(world: World, device: str, work: Work) -> int:
    """What every rank but the first does; the exit status. Only rank 0 says why something failed."""
    team = None
    try:
        use_gpu(world.local_rank, device)
        team = Team(world, device)
        work(team)
        team.leave()
    except (LumosError, RuntimeError, OSError) as problem:
        if team is not None:
            team.watch.report(f"rank {world.rank} failed ({words_of(problem)})")
        return 2
    return 0


def use_gpu(local_rank: int, device: str) -> None:
    """Every process of a node has its own GPU; Slurm may show it no other."""
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
