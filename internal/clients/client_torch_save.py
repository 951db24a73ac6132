"""torch.save and torch.load, with and without mmap, and from_file maps."""

import rig

torch = rig.need("torch")

torch.manual_seed(0)
state = {f"layer{i}": torch.randn(512, 1024) for i in range(8)}
state["tiny"] = torch.arange(7, dtype=torch.bfloat16)
for step in range(3):  # rewritten in place, as trainers do
    state["layer0"] += step
    torch.save(state, rig.A / "model.pt")
    for mmap in (False, True):
        got = torch.load(rig.B / "model.pt", mmap=mmap)
        assert got.keys() == state.keys()
        for k in state:
            assert torch.equal(got[k], state[k]), (step, mmap, k)

n = 1 << 20
t = torch.from_file(str(rig.A / "map.bin"), shared=True, size=n, dtype=torch.float32)
t.copy_(torch.randn(n))
want = t.clone()
del t
with open(rig.A / "map.bin", "rb+") as f:
    import os

    os.fsync(f.fileno())
assert torch.equal(torch.from_file(str(rig.B / "map.bin"), shared=False, size=n, dtype=torch.float32), want)
rig.same_trees()
