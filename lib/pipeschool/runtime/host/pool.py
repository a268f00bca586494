"""Worker processes: start them, hear what they print, end them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import IO, Any

from pipeschool.runtime.host.fork_server import start_again, start_fork_server
from pipeschool.runtime.host.line import Line

POSIX = os.name == "posix"  # elsewhere workers print to the console of the caller
ONE_AT_A_TIME = threading.Lock()
SPARE = 8  # descriptors that the start of a process takes for a moment
READS = 3  # that empty a pipe into which nobody writes any more


def be_worker(*args: Any) -> None:
    """What a worker process does. Only workers import it: it is heavy, and they have it already."""
    from pipeschool.runtime.host.process import main

    main(*args)


class Pool:
    """`p` worker processes, with a line to each and two boards that all can read.

    links: (source, target) of those that a socket is to connect. modules: what their jobs need
    imported.
    board: for each worker the action under way, -1 before the first. on_link: 1 while nothing but a
    declared link holds it up.
    """

    def __init__(self, p: int, links: Iterable[tuple[int, int]] = (), modules: Iterable[str] = ()):
        context = start_fork_server(modules)
        self.board = context.RawArray("q", [-1] * p)
        self.on_link = context.RawArray("b", p)
        self.lines: list[Line] = []
        self.outputs: dict[Connection, Output] = {}
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.links = sorted(links, key=max)
        self.waiting: dict[tuple[int, tuple[int, int]], socket.socket] = {}  # ends, by process
        try:
            with blank_main():
                for rank in range(p):
                    self._start(context, rank)
        except BaseException:
            self.end()
            raise

    def _start(self, context: Any, rank: int) -> None:
        control, control_end = context.Pipe()
        self.lines.append(Line(control))
        ends = [control_end]
        for stream in ("stdout", "stderr") if POSIX else ():
            source, target = context.Pipe(duplex=False)
            self.outputs[source] = Output(rank, stream)
            ends.append(target)
        sockets = self._sockets_of(rank)
        shared = self.board, self.on_link, sockets
        process = context.Process(target=be_worker, args=(rank, *shared, *ends), daemon=True)
        need_descriptors(SPARE)
        process.start()
        self.processes.append(process)
        for end in (*ends, *sockets.values()):  # the worker has them now
            end.close()

    def _sockets_of(self, rank: int) -> dict[tuple[int, int], socket.socket]:
        """This worker's ends of its links. The other ends wait until their workers are started, so
        that few are open here at any time."""
        sockets = {}
        for link in self.links:
            if rank in link:
                other = sum(link) - rank
                if other > rank:
                    sockets[link], self.waiting[other, link] = socket.socketpair()
                else:
                    sockets[link] = self.waiting.pop((rank, link))
        return sockets

    def show_output(self, source: Connection) -> None:
        """Pass on what a worker printed; forget the pipe once its worker has closed it."""
        data = os.read(source.fileno(), 65536)
        self.outputs[source].feed(data)
        if not data:
            del self.outputs[source]
            source.close()

    def end(self) -> None:
        """End every worker, whatever it is doing, with all that it has started, and show what it
        printed until then."""
        for process in self.processes:
            if POSIX and process.pid:
                with suppress(OSError):  # it has not made its group yet, or nobody is left in it
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()
        for source in list(self.outputs):
            for _ in range(READS):
                if source in self.outputs and source.poll():
                    self.show_output(source)
            if source in self.outputs:  # a process that the worker started still holds its end
                self.outputs.pop(source).feed(b"")
                source.close()
        for line in self.lines:
            line.close()
        for end in self.waiting.values():
            end.close()
        for process in self.processes:
            process.close()


def new_pool(p: int, links: Iterable[tuple[int, int]], modules: Iterable[str]) -> Pool:
    """A `Pool`, also where the fork server has gone in the meantime: then a new one is started."""
    links, modules = list(links), list(modules)
    try:
        return Pool(p, links, modules)
    except (EOFError, ConnectionError):
        start_again()
        return Pool(p, links, modules)


class Output:
    """What one worker prints, passed on in whole lines, each with the worker's number."""

    def __init__(self, rank: int, stream: str):
        self.rank = rank
        self.stream = stream
        self.rest = b""

    def feed(self, data: bytes) -> None:
        """Print the lines that `data` completes; empty data means that no more will come."""
        target: IO[str] = getattr(sys, self.stream)  # now: a notebook swaps it from cell to cell
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [self.rest], b""
        for line in lines:
            print(f"[worker {self.rank}] {line.decode(errors='replace')}", file=target)


def need_descriptors(number: int) -> None:
    """OSError where this process may not open as many. Found out only in the middle of a start, it
    would end the fork server as well."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            opened += os.pipe()
    finally:
        for descriptor in opened:
            os.close(descriptor)


@contextmanager
def blank_main() -> Iterator[None]:
    """Start processes without importing the caller's script into them a second time.

    `multiprocessing` would run a script without a ``__main__`` guard again in every worker. What
    workers need of it comes by cloudpickle.
    """
    with ONE_AT_A_TIME:  # another thread's run would take the blank one for the real one
        real = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = real
