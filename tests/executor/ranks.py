"""Ranks of a test: forked from a process that has torch loaded, so that a case takes seconds.

Each rank runs one function in a gloo group on 127.0.0.1 and sends back what it returns. After a
limit all are killed, by their ids. The error that is told is the first rank's own, not one about
a peer that is gone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from executor.failures import OF_PEERS

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 180


def run_ranks(count: int, function: Callable[[int], Any]) -> list[Any]:
    """``function(rank)`` on each of ``count`` ranks."""
    children = start_ranks(count, function)
    try:
        return _collect(list(children))
    finally:
        kill_ranks(children)


def kill_ranks(children: dict[int, int]) -> None:
    """End what is left of ``start_ranks``."""
    for pipe, process in children.items():
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        with contextlib.suppress(OSError):  # it has been read
            os.close(pipe)


def start_ranks(count: int, function: Callable[[int], Any]) -> dict[int, int]:
    """The process of each rank, by the pipe on which it will answer."""
    # Rank 0 serves the store: this process must have no thread of torch's when it forks.
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    children: dict[int, int] = {}  # end of a pipe -> process
    for rank in range(count):
        receive, send = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(receive)
            _child(rank, count, listener, function, send)
        os.close(send)
        children[receive] = process
    listener.close()
    return children


def _child(
    rank: int, count: int, listener: socket.socket, function: Callable[[int], Any], send: int
) -> None:
    torch.set_num_threads(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        port = listener.getsockname()[1]
        served = {"is_master": True, "master_listen_fd": listener.detach()} if rank == 0 else {}
        store = TCPStore("127.0.0.1", port, wait_for_workers=False, **served)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        answer = (True, function(rank))
    except BaseException:  # noqa: BLE001 - the parent raises it
        answer = (False, traceback.format_exc())
    with os.fdopen(send, "wb") as pipe:
        pickle.dump(answer, pipe)
    signal.pause()  # a rank that leaves would give its peers another error


def _collect(pipes: list[int]) -> list[Any]:
    until = time.monotonic() + LIMIT_S
    answers: dict[int, Any] = {}
    peers: str | None = None
    while len(answers) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in answers]
        ready, _, _ = select.select(waiting, [], [], max(0, until - time.monotonic()))
        assert ready, f"ranks did not end within {LIMIT_S} s"
        for pipe in ready:
            with os.fdopen(pipe, "rb") as stream:
                is_good, answer = pickle.load(stream)  # noqa: S301 - our own children
            if not is_good and not any(words in answer for words in OF_PEERS):
                raise AssertionError(f"rank {pipes.index(pipe)}:\n{answer}")
            peers = peers or (None if is_good else answer)
            answers[pipe] = answer
    assert peers is None, peers
    return [answers[pipe] for pipe in pipes]
