"""torch.distributed.checkpoint: FSDP2 and its optimizer saved by 4 ranks
through A, loaded by 2 ranks through B; synchronous, asynchronous, overwritten."""

import rig

torch = rig.need("torch")


def build(mesh_size, seed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)])
    mesh = init_device_mesh("cpu", (mesh_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    m, o = get_state_dict(model, optimizer)
    return {"model": m, "optimizer": o}


def full(tree, prefix=""):
    out = {}
    for k, v in tree.items():
        if isinstance(v, dict):
            out.update(full(v, f"{prefix}{k}."))
        elif isinstance(v, torch.Tensor):
            out[prefix + str(k)] = v.full_tensor() if hasattr(v, "full_tensor") else v
    return out


def save(rank, world, path, reference):
    import torch.distributed.checkpoint as dcp

    model, optimizer = build(world, seed=1)
    s = state(model, optimizer)
    dcp.save(s, checkpoint_id=path + "/sync")
    dcp.async_save(s, checkpoint_id=path + "/async").result()
    dcp.save(s, checkpoint_id=path + "/sync")  # over the first one
    whole = full(s)
    if rank == 0:
        torch.save(whole, reference)


def load(rank, world, path, reference):
    import torch.distributed.checkpoint as dcp

    want = torch.load(reference)
    for kind in ("sync", "async"):
        model, optimizer = build(world, seed=2)
        s = state(model, optimizer)
        dcp.load(s, checkpoint_id=f"{path}/{kind}")
        got = full(s)
        assert got.keys() == want.keys(), (got.keys(), want.keys())
        for name, value in got.items():
            assert torch.equal(value, want[name]), (kind, name)


if __name__ == "__main__":
    reference = str(rig.A / "whole.pt")
    rig.spawn(save, 4, str(rig.A), reference)
    rig.spawn(load, 2, str(rig.B), str(rig.through_b(reference)))
    rig.same_trees()
