#!/usr/bin/env python3
"""A bad link between two network namespaces, for kernels without sch_netem: carries packets between two tun devices.

bad_link.py NAMESPACE_A NAMESPACE_B INTERFACE [--delay-ms D] [--loss P] [--reorder P]
Makes INTERFACE in both namespaces, prints "ready", and carries packets until it is killed; the interfaces end with it.
Of all packets a share P is lost; of the others a share P overtakes those that are delayed, as netem's "reorder" does.
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
    """The device stays in the namespace that this process is in when it names it."""
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
    chance = random.Random(1)

    ends = [open_tun(namespace, args.interface) for namespace in args.namespaces]
    other_end = {ends[0]: ends[1], ends[1]: ends[0]}
    print("ready", flush=True)
    under_way = []
    order = itertools.count()
    while True:
        patience = max(0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], patience)[0]:
            try:
                packet = os.read(end, MAX_PACKET_BYTES)
            except BlockingIOError:
                continue
            if chance.random() < args.loss:
                continue
            delay = 0 if chance.random() < args.reorder else args.delay_ms / 1e3
            heapq.heappush(under_way, (time.monotonic() + delay, next(order), other_end[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(under_way)
            # The interface may not be up, or its queue full: links lose packets.
            with contextlib.suppress(OSError):
                os.write(end, packet)


if __name__ == "__main__":
    main()
