"""Hosts for processes that talk over a network: this host, or two hosts that are network namespaces.

    with TwoHosts(["control", "data"]) as hosts, hosts.netem("data", Impairment(delay_ms=2)):
        subprocess.run(hosts.command(1, ["ping", "-c", "1", hosts.address(0)]))

TwoHosts needs root, iproute2 and util-linux, and raises Missing with the name of anything that the machine lacks. The
namespaces and links are removed when the block is left; the next TwoHosts removes those of a killed process.
"""

import contextlib
import itertools
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
COMMAND_TIMEOUT_S = 30
LINK_UP_TIMEOUT_S = 10
NAMESPACES = Path("/run/netns")
BAD_LINK = Path(__file__).resolve().parent / "bad_link.py"
# Administrators' programs are not in the PATH of an ordinary user.
TOOL_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
# Subnets reserved for documentation (RFC 5737).
SUBNETS = {"control": "192.0.2", "data": "198.51.100", "tun": "203.0.113"}
# Below Linux's default ports for outgoing connections.
FIRST_PORT, LAST_PORT = 15000, 32000


class Failure(Exception):
    """An operation failed; the message is for the user."""


class Missing(Failure):
    """This machine lacks a requirement, which the message names."""


@dataclass(frozen=True)
class Impairment:
    """Impairment of a link: it loses a share of the packets, and delays the others except for a share of these."""

    delay_ms: float = 0
    loss: float = 0
    reorder: float = 0


class ThisHost:
    """One host: this one, with its loopback interface as the network."""

    num_hosts = 1

    def __init__(self):
        # Concurrent runs start at different ports.
        self._ports = itertools.count(FIRST_PORT + os.getpid() * 101 % 10000)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def command(self, _host_idx, arguments):
        return arguments

    def address(self, _host_idx):
        return "127.0.0.1"

    def free_port(self):
        """A port not returned before, to which nothing is or recently was bound (TIME_WAIT)."""
        for port in self._ports:
            if port > LAST_PORT:
                raise Failure(f"no free port up to {LAST_PORT}")
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


class TwoHosts:
    """Two network namespaces, joined by one veth pair for each name in `links` (keys of SUBNETS)."""

    num_hosts = 2

    def __init__(self, links):
        self.links = list(links)
        self.names = [f"ferry-{os.getpid()}-{end}" for end in "ab"]
        self._ports = itertools.count(FIRST_PORT)

    def __enter__(self):
        if os.geteuid() != 0:
            raise Missing(f"the right to make network namespaces: run as root, not as user {os.geteuid()}")
        for name in ("ip", "setpriv"):
            tool(name)
        _delete_leftovers()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # An interface ends with its namespace, and a namespace with its name and its last process.
        for name in self.names:
            _delete_namespace(name)

    def command(self, host_idx, arguments):
        """The arguments as a command that runs on one of the hosts and is killed when this process ends."""
        return _killed_with_parent([tool("ip"), "netns", "exec", self.names[host_idx], *arguments])

    def address(self, host_idx, link=None):
        """The host's address on a link, by default on the first."""
        return f"{SUBNETS[link or self.links[0]]}.{host_idx + 1}"

    def free_port(self):
        """A port not returned before: these namespaces have no other user."""
        return next(self._ports)

    def sent_bytes(self, link):
        """Bytes that have left over the link so far, both directions together."""
        return sum(self._interface(name, link)["stats64"]["tx"]["bytes"] for name in self.names)

    def cut(self, links):
        """Take the links down at the second host; raise_links undoes it."""
        for link in links:
            ip("-n", self.names[1], "link", "set", link, "down")

    def raise_links(self):
        for name, link in itertools.product(self.names, self.links):
            ip("-n", name, "link", "set", link, "up")
        self._wait_until_up(self.links)

    def rate_limit(self, link, rate_mbit, burst, latency):
        """Limits the rate of each end of the link while the context lasts (tbf)."""
        return self._qdisc(link, "tbf", "rate", f"{rate_mbit}mbit", "burst", burst, "latency", latency)

    def netem(self, link, impairment):
        """Impairs packets sent by each end of the link while the context lasts (netem)."""
        options = []
        if impairment.delay_ms:
            options += ["delay", f"{impairment.delay_ms:g}ms"]
        if impairment.loss:
            options += ["loss", f"{100 * impairment.loss:g}%"]
        if impairment.reorder:
            options += ["reorder", f"{100 * impairment.reorder:g}%"]
        return self._qdisc(link, "netem", *options)

    @contextlib.contextmanager
    def tun_link(self, impairment):
        """Adds a link "tun" while the context lasts: bad_link.py, which needs no netem in the kernel."""
        if not Path("/dev/net/tun").is_char_device():
            raise Missing("tun devices in this kernel (/dev/net/tun)")
        options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(impairment).items()]
        arguments = _killed_with_parent([sys.executable, str(BAD_LINK), *self.names, "tun", *options])
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
            try:
                printed = select.select([program.stdout], [], [], LINK_UP_TIMEOUT_S)[0] and program.stdout.readline()
                if printed != "ready\n":
                    program.kill()
                    output = (printed or "") + program.stdout.read()
                    raise Failure(f"bad_link.py made no link in {LINK_UP_TIMEOUT_S} s: {last_line(output)}")
                for host_idx, name in enumerate(self.names):
                    self._set_address(host_idx, "tun")
                    ip("-n", name, "link", "set", "tun", "up")
                self._wait_until_up(["tun"])
                yield
            finally:
                program.kill()

    def listening_addresses(self, host_idx):
        """Addresses at which processes of the host accept TCP connections, except loopback addresses."""
        lines = run(self.command(host_idx, [tool("ss"), "-H", "-ltn"])).splitlines()
        addresses = {line.split()[3].rpartition(":")[0].strip("[]") for line in lines}
        return {address for address in addresses if not address.startswith("127.") and address != "::1"}

    def _make(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
        except Failure as failure:
            raise Missing(f"the right to make network namespaces: {failure}") from failure
        first, second = self.names
        for link in self.links:
            pair = ["name", link, "netns", first, "type", "veth", "peer", "name", link, "netns", second]
            try:
                ip("link", "add", *pair)
            except Failure as failure:
                raise Missing(f"veth pairs in this kernel: {failure}") from failure
            self._set_address(0, link)
            self._set_address(1, link)
        for name in self.names:
            # Processes of one host use lo to reach each other at the addresses above.
            ip("-n", name, "link", "set", "lo", "up")
        self.raise_links()

    def _set_address(self, host_idx, link):
        ip("-n", self.names[host_idx], "address", "add", f"{self.address(host_idx, link)}/24", "dev", link)

    def _interface(self, name, link):
        return json.loads(ip("-json", "-n", name, "-statistics", "link", "show", "dev", link))[0]

    def _is_up(self, name, link):
        interface = self._interface(name, link)
        # The kernel does not track the state of a tun device's other side.
        return "LOWER_UP" in interface["flags"] if link == "tun" else interface["operstate"] == "UP"

    def _wait_until_up(self, links):
        """Waits until the interfaces are usable, which takes a while after set-up. UCX ignores an interface before
        that."""
        ends = list(itertools.product(self.names, links))
        if not poll_until(LINK_UP_TIMEOUT_S, lambda: all(self._is_up(*end) for end in ends)):
            raise Failure(f"the links {', '.join(links)} did not come up in {LINK_UP_TIMEOUT_S} s")

    @contextlib.contextmanager
    def _qdisc(self, link, kind, *options):
        tc = tool("tc")
        try:
            for name in self.names:
                try:
                    run([tc, "-n", name, "qdisc", "add", "dev", link, "root", kind, *options])
                except Failure as failure:
                    if re.search("qdisc kind is unknown|RTNETLINK answers: No such file", str(failure)):
                        raise Missing(f"{kind} in this kernel (sch_{kind})") from failure
                    raise
            yield
        finally:
            for name in self.names:
                _run_quietly([tc, "-n", name, "qdisc", "delete", "dev", link, "root"])


def poll_until(timeout_s, condition):
    """Returns true if the condition holds within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def tool(name):
    """Path of a command."""
    packages = {"ip": "iproute2", "tc": "iproute2", "ss": "iproute2", "setpriv": "util-linux"}
    path = shutil.which(name, path=TOOL_PATH)
    if path is None:
        raise Missing(f"the command {name}: install {packages[name]}")
    return path


def ip(*arguments):
    return run([tool("ip"), *arguments])


def run(arguments):
    """Output of the command."""
    try:
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired as expired:
        raise Failure(f"{' '.join(arguments)}: still running after {COMMAND_TIMEOUT_S} s") from expired
    if ended.returncode != 0:
        raise Failure(f"{' '.join(arguments)}: {ended.stderr.strip() or ended.returncode}")
    return ended.stdout


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def _run_quietly(arguments):
    with contextlib.suppress(Failure):
        run(arguments)


def _killed_with_parent(arguments):
    return [tool("setpriv"), "--pdeathsig", "KILL", *arguments]


def _delete_namespace(name):
    if (NAMESPACES / name).exists():
        _run_quietly([tool("ip"), "netns", "delete", name])


def _delete_leftovers():
    """Deletes the namespaces of processes that were killed before they could do it."""
    for path in NAMESPACES.glob("ferry-*-[ab]"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _delete_namespace(path.name)
