"""megatron-core dist_checkpointing (torch_dist): saved with tensor parallelism
4 through A, loaded with 2 through B; synchronous and asynchronous."""

import rig

torch, mc = rig.need("torch", "megatron.core.dist_checkpointing")


# Its checkpoint code synchronizes with a GPU that is not there.
torch.cuda.synchronize = lambda *args, **kwargs: None
torch.cuda.current_device = lambda: "cpu"


def shard(rank, world, value):
    """A sharded state dict: one matrix split over ranks, one replicated."""
    rows = 64 // world
    whole = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32) * value
    local = whole[rank * rows : (rank + 1) * rows].clone()
    return {
        "w": mc.ShardedTensor.from_rank_offsets("w", local, (0, rank, world)),
        "b": mc.ShardedTensor.from_rank_offsets("b", torch.full((16,), float(value)), replica_id=rank),
    }


def save(rank, world, a):
    import pathlib

    for kind in ("sync", "async"):
        path = pathlib.Path(a, kind)
        if rank == 0:
            path.mkdir()
        torch.distributed.barrier()
        request = mc.save(shard(rank, world, 3), str(path), async_sharded_save=kind == "async")
        if request is not None:
            if request.async_fn is not None:
                fn_args = list(request.async_fn_args)
                if request.preload_fn is not None:
                    fn_args[1] = request.preload_fn()
                request.async_fn(*fn_args, **(request.async_fn_kwargs or {}))
            torch.distributed.barrier()
            for finalize in request.finalize_fns:
                finalize()


def load(rank, world, b):
    for kind in ("sync", "async"):
        got = mc.load(shard(rank, world, 0), f"{b}/{kind}")
        want = shard(rank, world, 3)
        for k in want:
            assert torch.equal(got[k], want[k].data), (kind, k)


if __name__ == "__main__":
    rig.spawn(save, 4, str(rig.A))
    rig.spawn(load, 2, str(rig.B))
    rig.same_trees()
