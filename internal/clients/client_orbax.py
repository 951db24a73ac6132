"""Orbax: save, restore with another sharding, asynchronous, max_to_keep."""

import os

import rig

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
jax, ocp, np = rig.need("jax", "orbax.checkpoint", "numpy")
P = jax.sharding.PartitionSpec


def mesh(n):
    return jax.sharding.Mesh(np.array(jax.devices()[:n]), ("x",))


def state(step, n):
    w = jax.numpy.arange(64 * 64, dtype=jax.numpy.float32).reshape(64, 64) + step
    return {"w": jax.device_put(w, jax.sharding.NamedSharding(mesh(n), P("x"))), "step": step}


with ocp.CheckpointManager(rig.A / "run", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
    for step in range(5):
        manager.save(step, args=ocp.args.StandardSave(state(step, 4)))
    manager.wait_until_finished()
with ocp.CheckpointManager(rig.B / "run") as manager:
    assert sorted(manager.all_steps()) == [3, 4], manager.all_steps()
    target = state(0, 2)
    got = manager.restore(4, args=ocp.args.StandardRestore(target))
    assert np.array_equal(np.array(got["w"]), np.array(state(4, 4)["w"])) and got["step"] == 4
    assert len(got["w"].sharding.device_set) == 2
rig.same_trees()
