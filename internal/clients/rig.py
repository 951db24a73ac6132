"""What the clients share: the two mounts, and ways to compare."""

import hashlib
import importlib
import os
import pathlib
import socket
import sys

A = pathlib.Path(os.environ["CLIENT_A"])
B = pathlib.Path(os.environ["CLIENT_B"])


def need(*modules):
    """Imports modules, or ends the client as skipped."""
    got = []
    for m in modules:
        try:
            got.append(importlib.import_module(m))
        except ImportError as e:
            print(f"not installed: {m} ({e})")
            sys.exit(77)
    return got[0] if len(got) == 1 else got


def through_b(path):
    """The same file, seen through the other mount."""
    return B / pathlib.Path(path).relative_to(A)


def digest(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            h.update(chunk)
    return h.hexdigest()


def same_trees():
    """Every file has the same names, sizes and bytes on both mounts."""
    names = {m: sorted(str(p.relative_to(m)) for p in m.rglob("*")) for m in (A, B)}
    assert names[A] == names[B], (names[A], names[B])
    for n in names[A]:
        if (A / n).is_file():
            assert digest(A / n) == digest(B / n), n


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def spawn(fn, world, *args):
    """Runs fn(rank, world, *args) in world gloo processes."""
    import torch.multiprocessing as mp

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    mp.start_processes(_rank, args=(world, fn, args), nprocs=world, start_method="spawn")


def _rank(rank, world, fn, args):
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        fn(rank, world, *args)
        # The group is taken down by all at once: a rank that ends while its
        # peers still talk to it aborts in gloo's threads.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Nothing of torch's threads is left to the interpreter's own end, where
    # they can abort a process whose work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
