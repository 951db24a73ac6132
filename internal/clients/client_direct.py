"""torch_checkpointing (O_DIRECT at any offset) and fastsafetensors (shared maps)."""

import rig

torch, tc, fst, saver = rig.need("torch", "torch_checkpointing", "fastsafetensors", "fastsafetensors.saver")

tensors = {f"t{i}": torch.randn(333 + i, 257) for i in range(12)}

manager = tc.CheckpointManager(tc.CheckpointManager.Config.with_sync_save())
manager.save(str(rig.A / "tc"), {"model": tensors})
manager.close()
manager = tc.CheckpointManager(tc.CheckpointManager.Config.with_sync_save())
into = {"model": {k: torch.zeros_like(v) for k, v in tensors.items()}}
manager.load(str(rig.B / "tc"), into=into)
manager.close()
for k, v in tensors.items():
    assert torch.equal(into["model"][k], v), k

entries = [saver.plain_entry(k, v) for k, v in tensors.items()]
(rig.A / "fst").mkdir()
paths = saver.save_sharded(entries, str(rig.A / "fst" / "model"), num_shards=3, fsync=True)
with fst.fastsafe_open([str(rig.through_b(p)) for p in paths], nogds=True) as f:
    for k, v in tensors.items():
        assert torch.equal(f.get_tensor(k), v), k
rig.same_trees()
