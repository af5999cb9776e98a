"""Machines that are network namespaces, joined by a router through links that tc shapes."""

import contextlib
import ctypes
import math
import multiprocessing
import os
import subprocess
import time

import servers
import torch

# A link that queues: with a short queue it drops, and TCP then waits for a second.
QUEUE = 64 << 20
HERE = 250  # of this process's link to the router


@contextlib.contextmanager
def network(nodes, storage_rate, node_rate):
    """(link of the storage, names of the nodes' namespaces), joined by a router; this process
    reaches the storage, too.

    The storage sends at most ``storage_rate`` bytes a second, each node gets at most ``node_rate``.
    """
    if os.geteuid():
        raise servers.Unavailable("NO SHAPED LINKS: needs root and apt-get install iproute2")
    own = f"pcrsim{os.getpid()}"
    with contextlib.ExitStack() as undo:
        router = _namespace(undo, f"{own}r")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        store = _namespace(undo, f"{own}s")
        _join(router, ("-n", store), 0, "far", store)
        _shape(store, "far", storage_rate)
        names = []
        for number in range(1, nodes + 1):
            node = _namespace(undo, f"{own}n{number}")
            _join(router, ("-n", node), number, "far", node)
            _shape(router, f"near{number}", node_rate)
            names.append(node)
        _join(router, (), HERE, own, str(os.getpid()))
        undo.callback(_run, "ip", "link", "del", own)
        yield servers.Link("198.19.0.2", store), names


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def _namespace(undo, name):
    _run("ip", "netns", "add", name)
    undo.callback(_run, "ip", "netns", "del", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _join(router, other, number, device, namespace):
    """A cable from the router to another machine, with addresses .1 and .2; ``other`` is where
    ``ip`` finds that machine, ``namespace`` its name or the number of a process in it.
    """
    near = f"near{number}"
    cable = ("link", "add", near, "type", "veth", "peer", "name", device, "netns", namespace)
    _run("ip", "-n", router, *cable)
    for where, name, host in ((("-n", router), near, 1), (other, device, 2)):
        _run("ip", *where, "addr", "add", f"198.19.{number}.{host}/24", "dev", name)
        _run("ip", *where, "link", "set", name, "up")
    _run("ip", *other, "route", "add", "198.19.0.0/16", "via", f"198.19.{number}.1")


def _shape(namespace, device, rate):
    burst = max(64 << 10, int(rate) // 200)
    limit = ["rate", f"{int(rate) * 8}bit", "burst", str(burst), "limit", str(QUEUE)]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def goodput(url, file_bytes, num_bytes):
    """Bytes a second of a plain download: of a part of the file, or of the file again and again."""
    each = int(min(file_bytes, num_bytes))
    times = math.ceil(num_bytes / each)
    command = ["curl", "-sf", "-r", f"0-{each - 1}", *["-o", os.devnull, url] * times]
    begun = time.monotonic()
    subprocess.run(command, check=True)
    return each * times / (time.monotonic() - begun)


def enter(namespace):
    """Move this process to a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def begin(namespace, function, *arguments):
    """Start a function in a process of its own; call what is returned for its answer."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def answer():
        if namespace is not None:
            enter(namespace)
        torch.set_num_threads(1)
        send.send(function(*arguments))

    process = context.Process(target=answer)
    process.start()
    send.close()

    def finish():
        try:
            return receive.recv()
        finally:
            process.join()

    return finish


def apart(function, *arguments, namespace=None):
    """What a function gives in a process of its own, which leaves nothing behind."""
    return begin(namespace, function, *arguments)()
