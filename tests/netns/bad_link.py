#!/usr/bin/env python3
"""A bad link between two network namespaces for kernels without sch_netem: moves packets between two tun devices.

bad_link.py NAMESPACE_A NAMESPACE_B INTERFACE [--delay-ms D] [--loss P] [--reorder P]
Creates INTERFACE in both namespaces, prints "ready" and moves packets until it is killed, which removes the interfaces.
A share P of all packets is lost; a share P of the others is not delayed and so overtakes the delayed ones, like netem's
"reorder".
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import time

TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
CLONE_NEWNET = 0x40000000  # linux/sched.h
MAX_PACKET_BYTES = 1 << 16


def open_tun(namespace, name):
    """Opens a tun device in the namespace, to which the device then belongs. This process stays in the namespace."""
    with open(f"/var/run/netns/{namespace}") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("namespaces", nargs=2)
    parser.add_argument("interface")
    parser.add_argument("--delay-ms", type=float, default=0)
    parser.add_argument("--loss", type=float, default=0)
    parser.add_argument("--reorder", type=float, default=0)
    args = parser.parse_args()
    rng = random.Random(1)

    ends = [open_tun(namespace, args.interface) for namespace in args.namespaces]
    other_end = {ends[0]: ends[1], ends[1]: ends[0]}
    print("ready", flush=True)
    in_flight = []
    order = itertools.count()
    while True:
        timeout_s = max(0, in_flight[0][0] - time.monotonic()) if in_flight else None
        for end in select.select(ends, [], [], timeout_s)[0]:
            try:
                packet = os.read(end, MAX_PACKET_BYTES)
            except BlockingIOError:
                continue
            if rng.random() < args.loss:
                continue
            delay = 0 if rng.random() < args.reorder else args.delay_ms / 1e3
            heapq.heappush(in_flight, (time.monotonic() + delay, next(order), other_end[end], packet))
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(in_flight)
            # If the interface is down or its queue full, the packet is lost, as on any link.
            with contextlib.suppress(OSError):
                os.write(end, packet)


if __name__ == "__main__":
    main()
