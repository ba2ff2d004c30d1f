"""Time limits for calls that may never return: an alarm in the main thread, a forked child that is killed elsewhere.

The alarm interrupts Python code where it stands, and what the called function keeps between calls (caches, connections, a model) survives.
It cannot reach a C extension that never returns to Python, nor a function that sets an alarm of its own. The child is always killed, but
what it changed is lost, it has one thread, and it cannot use a GPU that the parent has opened. Both need a POSIX system; without one
nothing is limited.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

ALARM_AGAIN = 1.0  # seconds; an alarm that the called function's own `except:` swallowed comes again


class Hang(BaseException):
    """Raised inside a call that took too long. Not an Exception, so that the call's own `except Exception` does not swallow it."""


class ChildError(RuntimeError):
    """What a call raised in its child, in words."""


def limited(call: Callable[[], Any], seconds: float | None) -> Any:
    """The value of `call()`, or Hang after `seconds`; limits may be nested."""
    if seconds is None or not hasattr(signal, "setitimer"):
        return call()
    if threading.current_thread() is not threading.main_thread():
        return in_child(call, seconds)
    armed = True

    def ring(signum: int, frame: Any) -> None:
        if armed:
            raise Hang

    handler = signal.signal(signal.SIGALRM, ring)
    started = time.monotonic()
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN)
    try:
        try:
            return call()
        finally:
            armed = False
    finally:
        left = max(outer - (time.monotonic() - started), 1e-3) if outer else 0.0
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def in_child(call: Callable[[], Any], seconds: float | None) -> Any:
    """The value of `call()`, which must be JSON, computed in a forked child; Hang after `seconds`, ChildError when it raises there."""
    read, write = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child calls one function and leaves, whatever threads there were
        pid = os.fork()
    if pid == 0:
        _child(call, write, seconds)
    os.close(write)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    received = b""
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([read], [], [], None if math.isinf(left) else left)[0]:
                raise Hang
            piece = os.read(read, 1 << 16)
            if not piece:
                break
            received += piece
    finally:
        os.close(read)
        for kill in (os.killpg, os.kill):  # the child may not have become a group leader yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    message = json.loads(received) if received else {"error": "ended without an answer"}
    if "error" in message:
        raise ChildError(message["error"])
    return message["value"]


def _child(call: Callable[[], Any], write: int, seconds: float | None) -> None:
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0 if seconds is None else seconds + 1)  # it ends even when its parent is gone
        torch.set_num_threads(1)  # the thread pool of the parent does not exist here, and waiting for it would never end
        try:
            message = {"value": call()}
        except BaseException as error:
            message = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.flush()
        with os.fdopen(write, "w") as pipe:
            json.dump(message, pipe)
    finally:
        os._exit(0)
