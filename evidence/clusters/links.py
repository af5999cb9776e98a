"""Machines that are network namespaces, joined by a router through links that tc shapes."""

import contextlib
import ctypes
import multiprocessing
import os
import subprocess

import servers
import torch

# A link that queues: with a short queue it drops, and TCP then waits for a second.
QUEUE = 64 << 20


@contextlib.contextmanager
def network(nodes, storage_rate, node_rate):
    """(link of the storage, names of the nodes' namespaces), joined by a router.

    The storage sends at most ``storage_rate`` bytes a second, each node gets at most ``node_rate``.
    """
    if os.geteuid():
        raise servers.Unavailable("NO SHAPED LINKS: needs root and apt-get install iproute2")
    own = f"pcrsim{os.getpid()}"
    with contextlib.ExitStack() as undo:
        router = _namespace(undo, f"{own}r")
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        store = _namespace(undo, f"{own}s")
        _join(router, store, "198.19.0", "s")
        _shape(store, "far", storage_rate)
        names = []
        for number in range(nodes):
            node = _namespace(undo, f"{own}n{number}")
            _join(router, node, f"198.19.{number + 1}", f"n{number}")
            _shape(router, f"near{f'n{number}'}", node_rate)
            names.append(node)
        _join_here(undo, router)
        yield servers.Link("198.19.0.2", store), names


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def _namespace(undo, name):
    _run("ip", "netns", "add", name)
    undo.callback(_run, "ip", "netns", "del", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    return name


def _join(router, other, network_of, name):
    """A cable from the router to another machine, with addresses .1 and .2."""
    near = f"near{name}"
    cable = ("link", "add", near, "type", "veth", "peer", "name", "far", "netns", other)
    _run("ip", "-n", router, *cable)
    for where, device, address in ((router, near, 1), (other, "far", 2)):
        _run("ip", "-n", where, "addr", "add", f"{network_of}.{address}/24", "dev", device)
        _run("ip", "-n", where, "link", "set", device, "up")
    _run("ip", "-n", other, "route", "add", "default", "via", f"{network_of}.1")


def _join_here(undo, router):
    """A cable to this process, which looks whether the server answers."""
    name = f"pcrsim{os.getpid()}"
    cable = ("link", "add", name, "type", "veth", "peer", "name", "here", "netns", router)
    _run("ip", *cable)
    undo.callback(_run, "ip", "link", "del", name)
    _run("ip", "-n", router, "addr", "add", "198.19.250.1/24", "dev", "here")
    _run("ip", "-n", router, "link", "set", "here", "up")
    _run("ip", "addr", "add", "198.19.250.2/24", "dev", name)
    _run("ip", "link", "set", name, "up")
    _run("ip", "route", "add", "198.19.0.0/24", "via", "198.19.250.1")


def _shape(namespace, device, rate):
    burst = max(64 << 10, int(rate) // 200)
    limit = ["rate", f"{int(rate) * 8}bit", "burst", str(burst), "limit", str(QUEUE)]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def enter(namespace):
    """Move this process to a network namespace."""
    if namespace is None:
        return
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def apart(function, *arguments, namespace=None):
    """What a function gives in a process of its own, which leaves nothing behind."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, namespace, function, arguments))
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


def _answer(send, namespace, function, arguments):
    enter(namespace)
    torch.set_num_threads(1)
    send.send(function(*arguments))
